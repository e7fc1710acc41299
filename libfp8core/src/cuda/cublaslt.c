#include "cublaslt.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define STRING_OF(number) #number
#define SONAME(major) "libcublasLt.so." STRING_OF(major)

const char fp8core_cublaslt_soname[] = SONAME(CUBLAS_VER_MAJOR);

fp8core_cublaslt_table fp8core_cublaslt;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

static fp8core_status find(void *library, const char *file, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  if (!symbol)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuBLASLt (%s) lacks %s: %s", file, name, dlerror());
  memcpy(function, &symbol, sizeof(symbol));
  return FP8CORE_OK;
}

static fp8core_status find_all(fp8core_cublaslt_table *table, void *library, const char *file) {
#define FIND(name) FP8CORE_TRY(find(library, file, #name, &table->name));
  FP8CORE_CUBLASLT_FUNCTIONS(FIND)
#undef FIND
  return FP8CORE_OK;
}

fp8core_status fp8core_cublaslt_open(fp8core_cublaslt_table *table, const char *file) {
  fp8core_cublaslt_table found;
  void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuBLASLt (%s) cannot be loaded: %s", file, dlerror());
  const fp8core_status status = find_all(&found, library, file);
  if (status != FP8CORE_OK) {
    (void)dlclose(library);
    return status;
  }
  *table = found;
  return FP8CORE_OK;
}

fp8core_status fp8core_cublaslt_load(void) {
  fp8core_status status = FP8CORE_OK;
  (void)pthread_mutex_lock(&loading);
  if (!loaded) status = fp8core_cublaslt_open(&fp8core_cublaslt, fp8core_cublaslt_soname);
  loaded = status == FP8CORE_OK;
  (void)pthread_mutex_unlock(&loading);
  return status;
}
