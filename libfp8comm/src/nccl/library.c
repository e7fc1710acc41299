#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define STRING_OF(number) #number
#define SONAME(major) "libnccl.so." STRING_OF(major)

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

const char fp8comm_nccl_soname[] = SONAME(NCCL_MAJOR);

fp8comm_nccl_table fp8comm_nccl_library;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

static fp8core_status find(void *library, const char *file, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  if (!symbol)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "NCCL (%s) lacks %s: %s", file, name, dlerror());
  memcpy(function, &symbol, sizeof(symbol));
  return FP8CORE_OK;
}

static fp8core_status find_all(fp8comm_nccl_table *table, void *library, const char *file) {
#define FIND(name) TRY(find(library, file, #name, &table->name));
  FP8COMM_NCCL_FUNCTIONS(FIND)
#undef FIND
  return FP8CORE_OK;
}

fp8core_status fp8comm_nccl_load_from(fp8comm_nccl_table *table, const char *file) {
  fp8comm_nccl_table found;
  void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "NCCL (%s) cannot be loaded: %s", file, dlerror());
  const fp8core_status status = find_all(&found, library, file);
  if (status != FP8CORE_OK) {
    (void)dlclose(library);
    return status;
  }
  *table = found;
  return FP8CORE_OK;
}

fp8core_status fp8comm_nccl_load(void) {
  fp8core_status status = FP8CORE_OK;
  (void)pthread_mutex_lock(&loading);
  if (!loaded) status = fp8comm_nccl_load_from(&fp8comm_nccl_library, fp8comm_nccl_soname);
  loaded = status == FP8CORE_OK;
  (void)pthread_mutex_unlock(&loading);
  return status;
}
