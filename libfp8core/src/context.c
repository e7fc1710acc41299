#include "fp8core/context.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu.h"
#include "internal.h"

#if defined(_OPENMP)
#  include <omp.h>
#  include <pthread.h>
#  include <signal.h>
#endif

#define MAX_THREADS 1024

static const char *const isa_names[] = {"auto", "scalar", "avx2", "avx512", "avx512-bf16"};
#define ISA_COUNT ((int)(sizeof(isa_names) / sizeof(isa_names[0])))

const char *fp8core_isa_name(fp8core_isa isa) {
  return (unsigned)isa < (unsigned)ISA_COUNT ? isa_names[isa] : "unknown";
}

int fp8core_device_count(fp8core_device_type type) {
  if (type == FP8CORE_DEVICE_CPU) return 1;
  if (type == FP8CORE_DEVICE_CUDA) return fp8core_cuda_device_count();
  (void)fp8core_invalid("device type is %d, expected 0 (CPU) or 1 (CUDA)", (int)type);
  return 0;
}

fp8core_status fp8core_read_options(const char *name, void *destination, size_t size, const void *source) {
  if (!source) return FP8CORE_OK;
  size_t caller_size;
  memcpy(&caller_size, source, sizeof(caller_size));
  // Only sizes that a release had: any other cuts a field, or has fields that must not be dropped silently. So far
  // there is one release; see docs/architecture.md for the next.
  if (caller_size != size)
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH,
                                  "%s.size is %zu, expected %zu (set it with %s_default())", name, caller_size, size,
                                  name);
  memcpy(destination, source, caller_size);
  memcpy(destination, &size, sizeof(size));
  return FP8CORE_OK;
}

static fp8core_status isa_from_environment(fp8core_isa *isa) {
  const char *value = getenv("FP8CORE_ISA");
  *isa = FP8CORE_ISA_AUTO;
  if (!value || !*value) return FP8CORE_OK;
  for (int i = 0; i < ISA_COUNT; i++)
    if (strcmp(value, isa_names[i]) == 0) *isa = (fp8core_isa)i;
  if (*isa == FP8CORE_ISA_AUTO && strcmp(value, "auto") != 0)
    return fp8core_invalid("FP8CORE_ISA is \"%.40s\", expected auto, scalar, avx2, avx512 or avx512-bf16", value);
  if (*isa > fp8core_isa_best())
    return fp8core_invalid("FP8CORE_ISA is \"%s\", but the best tier of this CPU and build is %s", value,
                           fp8core_isa_name(fp8core_isa_best()));
  return FP8CORE_OK;
}

static fp8core_status choose_isa(fp8core_isa wanted, fp8core_isa *isa) {
  fp8core_isa environment;
  FP8CORE_TRY(isa_from_environment(&environment));
  if ((unsigned)wanted >= (unsigned)ISA_COUNT)
    return fp8core_invalid("isa is %d, expected 0 (auto) to %d", (int)wanted, ISA_COUNT - 1);
  if (wanted > fp8core_isa_best())
    return fp8core_invalid("isa is %s, but the best tier of this CPU and build is %s", fp8core_isa_name(wanted),
                           fp8core_isa_name(fp8core_isa_best()));
  *isa = wanted != FP8CORE_ISA_AUTO ? wanted : environment != FP8CORE_ISA_AUTO ? environment : fp8core_isa_best();
  return FP8CORE_OK;
}

#if defined(_OPENMP)
// The threads of OpenMP do not exist in a child of fork(), whose parallel regions would wait for them for ever. Results
// do not depend on threads, so the child goes on with one.
static volatile sig_atomic_t in_forked_child;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void note_fork(void) { in_forked_child = 1; }

static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, note_fork); }

typedef struct thread_probe {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int may_end;
} thread_probe;

static void *wait_for_end(void *argument) {
  thread_probe *probe = argument;
  (void)pthread_mutex_lock(&probe->mutex);
  while (!probe->may_end) (void)pthread_cond_wait(&probe->changed, &probe->mutex);
  (void)pthread_mutex_unlock(&probe->mutex);
  return NULL;
}

// OpenMP has no way to say that it cannot create a thread: it ends the process. So that many are created beforehand,
// all at once, with the default stacks, which OpenMP's have too unless OMP_STACKSIZE says otherwise.
static fp8core_status probe_threads(int threads) {
  pthread_t created[MAX_THREADS];
  thread_probe probe = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
  int count = 0;
  int error = 0;
  while (count < threads - 1 && error == 0) {
    error = pthread_create(&created[count], NULL, wait_for_end, &probe);
    if (error == 0) count++;
  }
  (void)pthread_mutex_lock(&probe.mutex);
  probe.may_end = 1;
  (void)pthread_cond_broadcast(&probe.changed);
  (void)pthread_mutex_unlock(&probe.mutex);
  for (int i = 0; i < count; i++) (void)pthread_join(created[i], NULL);
  if (error == 0) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY,
                                "cannot create the %d threads of the context: after %d, %s (ask for fewer with threads "
                                "or OMP_NUM_THREADS, or raise the limit)",
                                threads, count + 1, strerror(error));
}

static fp8core_status choose_threads(const fp8core_context *context, int wanted, int *threads) {
  if (wanted < 0 || wanted > MAX_THREADS)
    return fp8core_invalid("threads is %d, expected 0 (all) to %d", wanted, MAX_THREADS);
  const int limit = omp_get_thread_limit();
  const int most = limit < 1 ? 1 : limit < MAX_THREADS ? limit : MAX_THREADS;
  const int asked = wanted == 0 ? omp_get_max_threads() : wanted;
  if (wanted > most)
    fp8core_log(context, FP8CORE_LOG_WARNING, "%d threads asked for, but OMP_THREAD_LIMIT allows %d: running with %d",
                wanted, limit, most);
  *threads = asked < 1 ? 1 : asked < most ? asked : most;
  if (*threads == 1 || in_forked_child || context->device.type != FP8CORE_DEVICE_CPU) return FP8CORE_OK;
  (void)pthread_once(&fork_once, watch_forks);
  return probe_threads(*threads);
}

int fp8core_usable_threads(const fp8core_context *context) { return in_forked_child ? 1 : context->threads; }
#else
static fp8core_status choose_threads(const fp8core_context *context, int wanted, int *threads) {
  if (wanted < 0 || wanted > MAX_THREADS)
    return fp8core_invalid("threads is %d, expected 0 (all) to %d", wanted, MAX_THREADS);
  if (wanted > 1)
    fp8core_log(context, FP8CORE_LOG_WARNING, "%d threads asked for, but this build has no OpenMP: running with one",
                wanted);
  *threads = 1;
  return FP8CORE_OK;
}

int fp8core_usable_threads(const fp8core_context *context) { return context->threads; }
#endif

static fp8core_status context_init(fp8core_context *context, const fp8core_context_options *options) {
  context->device = options->device;
  context->seed = options->seed;
  context->log = options->log;
  context->log_user_data = options->log_user_data;
  FP8CORE_TRY(choose_isa(options->isa, &context->isa));
  FP8CORE_TRY(choose_threads(context, options->threads, &context->threads));
  if (options->device.type == FP8CORE_DEVICE_CPU) {
    if (options->device.index != 0)
      return fp8core_invalid("device.index is %d, expected 0 for the CPU", options->device.index);
    context->backend = &fp8core_cpu_backend;
  } else if (options->device.type == FP8CORE_DEVICE_CUDA) {
    FP8CORE_TRY(fp8core_cuda_context_init(context, options));
  } else {
    return fp8core_invalid("device.type is %d, expected 0 (CPU) or 1 (CUDA)", (int)options->device.type);
  }
  size_t workspace_bytes = options->workspace_bytes;
  if (workspace_bytes == 0 && options->device.type == FP8CORE_DEVICE_CUDA) workspace_bytes = (size_t)32 << 20;
  void *unused;
  return fp8core_workspace(context, workspace_bytes, &unused);
}

fp8core_status fp8core_context_create(fp8core_context **context, const fp8core_context_options *options) {
  if (!context) return fp8core_invalid("context is NULL, expected where to put the handle");
  *context = NULL;
  fp8core_context_options known = fp8core_context_options_default();
  // Before the size, which may be another one in another version: this is the message that helps.
  const size_t version_end = offsetof(fp8core_context_options, api_version) + sizeof(options->api_version);
  if (options && options->size >= version_end && options->api_version != FP8CORE_API_VERSION)
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH,
                                  "the caller was compiled for API version %d of libfp8core, the loaded library %s has "
                                  "%d: compile the caller with the library's headers, or load the library of its own",
                                  options->api_version, fp8core_version(), FP8CORE_API_VERSION);
  FP8CORE_TRY(fp8core_read_options("fp8core_context_options", &known, sizeof(known), options));
  fp8core_context *created = calloc(1, sizeof(*created));
  if (!created)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a context of %zu bytes",
                                  sizeof(*created));
  const fp8core_status status = context_init(created, &known);
  if (status != FP8CORE_OK) {
    fp8core_context_destroy(&created);
    return status;
  }
  fp8core_log(created, FP8CORE_LOG_INFO, "libfp8core %s: %s %d, %d threads, kernels %s", fp8core_version(),
              known.device.type == FP8CORE_DEVICE_CPU ? "CPU" : "CUDA", known.device.index,
              fp8core_usable_threads(created), fp8core_isa_name(created->isa));
  *context = created;
  return FP8CORE_OK;
}

void fp8core_context_destroy(fp8core_context **context) {
  if (!context || !*context) return;
  fp8core_context *destroyed = *context;
  *context = NULL;
  if (destroyed->backend) {
    if (destroyed->workspace) (void)destroyed->backend->free(destroyed, destroyed->workspace);
    destroyed->backend->destroy(destroyed);
  }
  free(destroyed);
}

static fp8core_status check_context(const fp8core_context *context) {
  return context ? FP8CORE_OK : fp8core_invalid("context is NULL, expected a context");
}

fp8core_status fp8core_context_synchronize(fp8core_context *context) {
  FP8CORE_TRY(check_context(context));
  return context->backend->synchronize(context);
}

fp8core_device fp8core_context_device(const fp8core_context *context) {
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  return context ? context->device : cpu;
}

fp8core_isa fp8core_context_isa(const fp8core_context *context) { return context ? context->isa : FP8CORE_ISA_AUTO; }

int fp8core_context_threads(const fp8core_context *context) { return context ? fp8core_usable_threads(context) : 0; }

uint64_t fp8core_context_seed(const fp8core_context *context) { return context ? context->seed : 0; }

fp8core_status fp8core_context_set_seed(fp8core_context *context, uint64_t seed) {
  FP8CORE_TRY(check_context(context));
  context->seed = seed;
  return FP8CORE_OK;
}

size_t fp8core_context_workspace_bytes(const fp8core_context *context) {
  return context ? context->workspace_bytes : 0;
}

fp8core_status fp8core_workspace(fp8core_context *context, size_t bytes, void **pointer) {
  if (bytes > context->workspace_bytes) {
    // Freed first: the two together might not fit. The old contents are nobody's.
    if (context->workspace) FP8CORE_TRY(context->backend->free(context, context->workspace));
    const size_t old_bytes = context->workspace_bytes;
    context->workspace = NULL;
    context->workspace_bytes = 0;
    FP8CORE_TRY(context->backend->alloc(context, bytes, &context->workspace));
    context->workspace_bytes = bytes;
    fp8core_log(context, FP8CORE_LOG_DEBUG, "workspace grows from %zu to %zu bytes", old_bytes, bytes);
  }
  *pointer = context->workspace;
  if (context->reserving) return FP8CORE_RESERVED;
  return FP8CORE_OK;
}

void fp8core_log(const fp8core_context *context, fp8core_log_level level, const char *format, ...) {
  if (!context->log) return;
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  context->log(context->log_user_data, level, message);
}

fp8core_status fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer) {
  if (!pointer) return fp8core_invalid("pointer is NULL, expected where to put the address");
  *pointer = NULL;
  FP8CORE_TRY(check_context(context));
  return bytes == 0 ? FP8CORE_OK : context->backend->alloc(context, bytes, pointer);
}

fp8core_status fp8core_free(fp8core_context *context, void *pointer) {
  FP8CORE_TRY(check_context(context));
  return pointer ? context->backend->free(context, pointer) : FP8CORE_OK;
}

fp8core_status fp8core_copy(fp8core_context *context, void *destination, const void *source, size_t bytes) {
  FP8CORE_TRY(check_context(context));
  if (bytes == 0) return FP8CORE_OK;
  if (!destination || !source)
    return fp8core_invalid("%s is NULL, expected memory of %zu bytes", destination ? "source" : "destination", bytes);
  return context->backend->copy(context, destination, source, bytes);
}

fp8core_status fp8core_zero(fp8core_context *context, void *pointer, size_t bytes) {
  FP8CORE_TRY(check_context(context));
  if (bytes == 0) return FP8CORE_OK;
  if (!pointer) return fp8core_invalid("pointer is NULL, expected memory of %zu bytes", bytes);
  return context->backend->zero(context, pointer, bytes);
}
