#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

// Allocations that cannot succeed are asked for on purpose; the sanitizer must answer as the C library does.
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

static fp8core_context_options options_of_device(void) {
  fp8core_context_options options = fp8core_context_options_default();
  options.device = test_device();
  return options;
}

// Every case starts without the variable, whatever the suite runs under.
static int clear_environment(void **unused) {
  (void)unused;
  return unsetenv("FP8CORE_ISA");
}

static void assert_create_fails(const fp8core_context_options *options, fp8core_status status, const char *text) {
  fp8core_context *context = (fp8core_context *)(uintptr_t)8;
  assert_fails(fp8core_context_create(&context, options), status, text);
  assert_null(context);
}

static void defaults(void **unused) {
  (void)unused;
  fp8core_context *context = NULL;
  assert_ok(fp8core_context_create(&context, NULL));
  assert_non_null(context);
  assert_int_equal(fp8core_context_device(context).type, FP8CORE_DEVICE_CPU);
  assert_int_equal(fp8core_context_device(context).index, 0);
  assert_in_range(fp8core_context_threads(context), 1, 1024);
  assert_int_equal(fp8core_context_isa(context), fp8core_isa_best());
  assert_int_equal(fp8core_context_seed(context), 0);
  assert_ok(fp8core_context_synchronize(context));
  fp8core_context_destroy(&context);
  assert_null(context);
  // Again, on the cleared pointer, and on none.
  fp8core_context_destroy(&context);
  fp8core_context_destroy(NULL);
}

static void device_under_test(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  assert_int_equal(fp8core_context_device(context).type, test_device().type);
  assert_int_equal(fp8core_context_device(context).index, test_device().index);
  assert_ok(fp8core_context_synchronize(context));
  fp8core_context_destroy(&context);
}

static void null_arguments(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  void *pointer = context;
  char byte = 1;
  assert_fails(fp8core_context_create(NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_fails(fp8core_context_synchronize(NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_fails(fp8core_context_set_seed(NULL, 1), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_int_equal(fp8core_context_device(NULL).type, FP8CORE_DEVICE_CPU);
  assert_int_equal(fp8core_context_isa(NULL), FP8CORE_ISA_AUTO);
  assert_int_equal(fp8core_context_threads(NULL), 0);
  assert_int_equal(fp8core_context_seed(NULL), 0);
  assert_int_equal(fp8core_context_workspace_bytes(NULL), 0);
  assert_fails(fp8core_alloc(context, 8, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "pointer is NULL");
  assert_fails(fp8core_alloc(NULL, 8, &pointer), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_null(pointer);
  assert_fails(fp8core_free(NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_fails(fp8core_copy(NULL, &byte, &byte, 1), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_fails(fp8core_copy(context, NULL, &byte, 1), FP8CORE_ERROR_INVALID_ARGUMENT, "destination is NULL");
  assert_fails(fp8core_copy(context, &byte, NULL, 1), FP8CORE_ERROR_INVALID_ARGUMENT, "source is NULL");
  assert_fails(fp8core_zero(NULL, &byte, 1), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_fails(fp8core_zero(context, NULL, 1), FP8CORE_ERROR_INVALID_ARGUMENT, "pointer is NULL");
  // Nothing to do is no error.
  assert_ok(fp8core_copy(context, NULL, NULL, 0));
  assert_ok(fp8core_zero(context, NULL, 0));
  assert_ok(fp8core_free(context, NULL));
  fp8core_context_destroy(&context);
}

static void options_out_of_range(void **unused) {
  (void)unused;
  fp8core_context_options options = options_of_device();
  options.threads = -1;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "threads is -1");
  options.threads = 1025;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "threads is 1025");
  options.threads = INT32_MIN;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "-2147483648");
  options = options_of_device();
  options.isa = (fp8core_isa)5;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "isa is 5");
  options.isa = (fp8core_isa)-1;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "isa is -1");
  options = fp8core_context_options_default();
  options.device.type = (fp8core_device_type)2;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "device.type is 2");
  options.device.type = (fp8core_device_type)-3;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "device.type is -3");
  options = fp8core_context_options_default();
  options.device.index = 1;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "device.index is 1");
  options.device.index = -1;
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "device.index is -1");
}

static void versions(void **unused) {
  (void)unused;
  char text[64];
  (void)snprintf(text, sizeof(text), "%d.%d.%d", FP8CORE_VERSION_MAJOR, FP8CORE_VERSION_MINOR, FP8CORE_VERSION_PATCH);
  assert_string_equal(fp8core_version(), text);
  assert_int_equal(fp8core_api_version(), FP8CORE_API_VERSION);
  fp8core_context_options options = options_of_device();
  options.api_version = FP8CORE_API_VERSION + 1;
  (void)snprintf(text, sizeof(text), "API version %d", options.api_version);
  assert_create_fails(&options, FP8CORE_ERROR_VERSION_MISMATCH, text);
  options.api_version = -1;
  assert_create_fails(&options, FP8CORE_ERROR_VERSION_MISMATCH, "API version -1");
}

static void size_field(void **unused) {
  (void)unused;
  fp8core_context_options options = options_of_device();
  char text[64];
  // Any but a whole one cuts a field or holds unknown ones; also where the version beyond the size would not fit.
  options.api_version = 77;
  for (size_t size = 0; size < offsetof(fp8core_context_options, api_version) + sizeof(int); size++) {
    options.size = size;
    (void)snprintf(text, sizeof(text), "size is %zu", size);
    assert_create_fails(&options, FP8CORE_ERROR_VERSION_MISMATCH, text);
  }
  options.size = sizeof(options) + 8;
  assert_create_fails(&options, FP8CORE_ERROR_VERSION_MISMATCH, "API version 77");
  options.api_version = FP8CORE_API_VERSION;
  for (size_t size = 0; size < sizeof(options) + 16; size++) {
    if (size == sizeof(options)) continue;
    options.size = size;
    (void)snprintf(text, sizeof(text), "size is %zu", size);
    assert_create_fails(&options, FP8CORE_ERROR_VERSION_MISMATCH, text);
  }
  options.size = SIZE_MAX;
  assert_create_fails(&options, FP8CORE_ERROR_VERSION_MISMATCH, "size is");
}

static void isa_from_environment(void **unused) {
  (void)unused;
  const fp8core_isa best = fp8core_isa_best();
  fp8core_context_options options = options_of_device();
  fp8core_context *context;
  for (int isa = FP8CORE_ISA_SCALAR; isa <= FP8CORE_ISA_AVX512_BF16; isa++) {
    const char *name = fp8core_isa_name((fp8core_isa)isa);
    assert_int_equal(setenv("FP8CORE_ISA", name, 1), 0);
    if (isa > (int)best) {
      assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, name);
      continue;
    }
    assert_ok(fp8core_context_create(&context, &options));
    assert_int_equal(fp8core_context_isa(context), isa);
    fp8core_context_destroy(&context);
    // What the variable says does not change what the machine can do.
    assert_int_equal(fp8core_isa_best(), best);
  }
  const char *same_as_unset[] = {"", "auto"};
  for (size_t i = 0; i < 2; i++) {
    assert_int_equal(setenv("FP8CORE_ISA", same_as_unset[i], 1), 0);
    assert_ok(fp8core_context_create(&context, &options));
    assert_int_equal(fp8core_context_isa(context), best);
    fp8core_context_destroy(&context);
  }
  const char *unknown[] = {"avx1024", "AVX2", "avx2 ", " avx2", "avx", "2", "avx512_bf16", "scalar,avx2"};
  for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
    assert_int_equal(setenv("FP8CORE_ISA", unknown[i], 1), 0);
    assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, unknown[i]);
    test_assert_message_contains("FP8CORE_ISA", "expected auto, scalar, avx2, avx512 or avx512-bf16");
    // An option does not excuse a wrong variable.
    options.isa = FP8CORE_ISA_SCALAR;
    assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, unknown[i]);
    options.isa = FP8CORE_ISA_AUTO;
  }
  // A name of any length is reported, cut.
  char *name = malloc(100001);
  assert_non_null(name);
  memset(name, 'x', 100000);
  name[100000] = 0;
  assert_int_equal(setenv("FP8CORE_ISA", name, 1), 0);
  assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "FP8CORE_ISA is \"xxxx");
  free(name);
}

static void isa_from_options(void **unused) {
  (void)unused;
  const fp8core_isa best = fp8core_isa_best();
  assert_in_range(best, FP8CORE_ISA_SCALAR, FP8CORE_ISA_AVX512_BF16);
  fp8core_context_options options = options_of_device();
  for (int isa = FP8CORE_ISA_SCALAR; isa <= FP8CORE_ISA_AVX512_BF16; isa++) {
    options.isa = (fp8core_isa)isa;
    // The option goes first, above and below the variable.
    for (int environment = 0; environment < 2; environment++) {
      if (environment) assert_int_equal(setenv("FP8CORE_ISA", "scalar", 1), 0);
      if (isa > (int)best) {
        assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, fp8core_isa_name(options.isa));
        continue;
      }
      fp8core_context *context;
      assert_ok(fp8core_context_create(&context, &options));
      assert_int_equal(fp8core_context_isa(context), isa);
      fp8core_context_destroy(&context);
    }
    assert_int_equal(unsetenv("FP8CORE_ISA"), 0);
  }
}

static void isa_names(void **unused) {
  (void)unused;
  const char *names[] = {"auto", "scalar", "avx2", "avx512", "avx512-bf16"};
  for (int i = 0; i < 5; i++) assert_string_equal(fp8core_isa_name((fp8core_isa)i), names[i]);
  assert_string_equal(fp8core_isa_name((fp8core_isa)5), "unknown");
  assert_string_equal(fp8core_isa_name((fp8core_isa)-1), "unknown");
}

// The mask and the tier must agree, and with the compiler's own view of the CPU.
static void cpu_features(void **unused) {
  (void)unused;
  const uint32_t features = fp8core_cpu_features();
  const uint32_t avx2 = FP8CORE_CPU_AVX2 | FP8CORE_CPU_FMA | FP8CORE_CPU_F16C;
  const uint32_t avx512 = FP8CORE_CPU_AVX512F | FP8CORE_CPU_AVX512BW | FP8CORE_CPU_AVX512DQ | FP8CORE_CPU_AVX512VL;
  const uint32_t bf16 = FP8CORE_CPU_AVX512VBMI | FP8CORE_CPU_AVX512BF16;
  assert_int_equal(features, fp8core_cpu_features());
  assert_int_equal(features & ~(avx2 | avx512 | bf16), 0);
#if defined(__x86_64__)
  __builtin_cpu_init();
  assert_int_equal((features & FP8CORE_CPU_AVX2) != 0, __builtin_cpu_supports("avx2") != 0);
  assert_int_equal((features & FP8CORE_CPU_FMA) != 0, __builtin_cpu_supports("fma") != 0);
  assert_int_equal((features & FP8CORE_CPU_AVX512F) != 0, __builtin_cpu_supports("avx512f") != 0);
  assert_int_equal((features & FP8CORE_CPU_AVX512BW) != 0, __builtin_cpu_supports("avx512bw") != 0);
  assert_int_equal((features & FP8CORE_CPU_AVX512DQ) != 0, __builtin_cpu_supports("avx512dq") != 0);
  assert_int_equal((features & FP8CORE_CPU_AVX512VL) != 0, __builtin_cpu_supports("avx512vl") != 0);
  assert_int_equal((features & FP8CORE_CPU_AVX512VBMI) != 0, __builtin_cpu_supports("avx512vbmi") != 0);
  assert_int_equal((features & FP8CORE_CPU_AVX512BF16) != 0, __builtin_cpu_supports("avx512bf16") != 0);
#endif
  const fp8core_isa best = fp8core_isa_best();
  if (best >= FP8CORE_ISA_AVX2) assert_int_equal(features & avx2, avx2);
  if (best >= FP8CORE_ISA_AVX512) assert_int_equal(features & avx512, avx512);
  if (best >= FP8CORE_ISA_AVX512_BF16) assert_int_equal(features & bf16, bf16);
}

typedef struct log_record {
  int messages;
  int warnings;
  int wrong;
  char last[512];
} log_record;

static void record_log(void *user_data, fp8core_log_level level, const char *message) {
  log_record *record = user_data;
  record->messages++;
  record->warnings += level == FP8CORE_LOG_WARNING;
  record->wrong +=
    level < FP8CORE_LOG_DEBUG || level > FP8CORE_LOG_WARNING || !*message || strchr(message, '\n') != NULL;
  (void)snprintf(record->last, sizeof(record->last), "%s", message);
}

static void log_callback(void **unused) {
  (void)unused;
  log_record record = {0};
  fp8core_context_options options = options_of_device();
  options.log = record_log;
  options.log_user_data = &record;
  fp8core_context *context;
  assert_ok(fp8core_context_create(&context, &options));
  assert_true(record.messages > 0);
  assert_int_equal(record.wrong, 0);
  // The line at creation tells what runs.
  assert_non_null(strstr(record.last, fp8core_version()));
  assert_non_null(strstr(record.last, fp8core_isa_name(fp8core_context_isa(context))));
  fp8core_context_destroy(&context);
}

static void threads(void **unused) {
  (void)unused;
  const int counts[] = {1, 2, 3, 1024};
  for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
    log_record record = {0};
    fp8core_context_options options = options_of_device();
    options.threads = counts[i];
    options.log = record_log;
    options.log_user_data = &record;
    fp8core_context *context;
    assert_ok(fp8core_context_create(&context, &options));
    // Fewer than asked for only in a build without OpenMP, which says so.
    if (counts[i] > 1 && record.warnings) {
      assert_int_equal(fp8core_context_threads(context), 1);
    } else {
      assert_int_equal(fp8core_context_threads(context), counts[i]);
    }
    fp8core_context_destroy(&context);
  }
}

static void seed(void **unused) {
  (void)unused;
  fp8core_context_options options = options_of_device();
  options.seed = UINT64_C(0xfedcba9876543210);
  fp8core_context *context;
  assert_ok(fp8core_context_create(&context, &options));
  assert_true(fp8core_context_seed(context) == UINT64_C(0xfedcba9876543210));
  assert_ok(fp8core_context_set_seed(context, UINT64_MAX));
  assert_true(fp8core_context_seed(context) == UINT64_MAX);
  fp8core_context_destroy(&context);
}

static void workspace(void **unused) {
  (void)unused;
  fp8core_context_options options = options_of_device();
  fp8core_context *context;
  assert_ok(fp8core_context_create(&context, &options));
  assert_int_equal(fp8core_context_workspace_bytes(context), test_on_cuda() ? 32 << 20 : 0);
  fp8core_context_destroy(&context);
  const size_t sizes[] = {1, 4097, 3 << 20};
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
    options.workspace_bytes = sizes[i];
    assert_ok(fp8core_context_create(&context, &options));
    assert_int_equal(fp8core_context_workspace_bytes(context), sizes[i]);
    fp8core_context_destroy(&context);
  }
  // More than any machine has, and sizes that overflow when rounded up.
  const size_t too_many[] = {SIZE_MAX, SIZE_MAX - 255, SIZE_MAX / 2 + 1};
  for (size_t i = 0; i < sizeof(too_many) / sizeof(too_many[0]); i++) {
    char text[32];
    (void)snprintf(text, sizeof(text), "%zu", too_many[i]);
    options.workspace_bytes = too_many[i];
    assert_create_fails(&options, FP8CORE_ERROR_OUT_OF_MEMORY, text);
  }
}

static void device_counts(void **unused) {
  (void)unused;
  assert_int_equal(fp8core_device_count(FP8CORE_DEVICE_CPU), 1);
  (void)fp8core_set_last_error(FP8CORE_OK, "untouched");
  const int gpus = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  assert_true(gpus >= 0);
  // Without one the message tells why.
  if (gpus == 0) assert_string_not_equal(fp8core_last_error(), "untouched");
  assert_int_equal(fp8core_device_count((fp8core_device_type)2), 0);
  assert_non_null(strstr(fp8core_last_error(), "2"));
  assert_int_equal(fp8core_device_count((fp8core_device_type)-1), 0);
  assert_non_null(strstr(fp8core_last_error(), "-1"));
}

static void cuda_device_that_is_not_there(void **unused) {
  (void)unused;
  const int gpus = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  fp8core_context_options options = fp8core_context_options_default();
  options.device.type = FP8CORE_DEVICE_CUDA;
  if (gpus == 0) {
    (void)fp8core_set_last_error(FP8CORE_OK, "untouched");
    assert_create_fails(&options, FP8CORE_ERROR_NOT_SUPPORTED, "CUDA");
    assert_string_not_equal(fp8core_last_error(), "untouched");
  } else {
    char text[16];
    options.device.index = gpus;
    (void)snprintf(text, sizeof(text), "%d", gpus);
    assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, text);
    options.device.index = -1;
    assert_create_fails(&options, FP8CORE_ERROR_INVALID_ARGUMENT, "-1");
  }
}

static void memory(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const size_t sizes[] = {1, 255, 256, 257, 5 << 20};
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
    const size_t bytes = sizes[i];
    unsigned char *host = malloc(bytes);
    unsigned char *back = calloc(bytes, 1);
    assert_non_null(host);
    assert_non_null(back);
    for (size_t j = 0; j < bytes; j++) host[j] = (unsigned char)(j * 7 + 1);
    unsigned char *device = test_alloc(context, bytes);
    unsigned char *other = test_alloc(context, bytes);
    assert_int_equal((uintptr_t)device % 256, 0);
    // To the device, between two places there, and back.
    assert_ok(fp8core_copy(context, device, host, bytes));
    assert_ok(fp8core_copy(context, other, device, bytes));
    assert_ok(fp8core_copy(context, back, other, bytes));
    assert_memory_equal(back, host, bytes);
    assert_ok(fp8core_zero(context, other, bytes));
    assert_ok(fp8core_copy(context, back, other, bytes));
    for (size_t j = 0; j < bytes; j++) assert_int_equal(back[j], 0);
    assert_ok(fp8core_copy(context, back, device, bytes));
    assert_memory_equal(back, host, bytes);
    test_free(context, device);
    test_free(context, other);
    free(host);
    free(back);
  }
  void *nothing = context;
  assert_ok(fp8core_alloc(context, 0, &nothing));
  assert_null(nothing);
  nothing = context;
  assert_fails(fp8core_alloc(context, SIZE_MAX, &nothing), FP8CORE_ERROR_OUT_OF_MEMORY, "18446744073709551615");
  assert_null(nothing);
  fp8core_context_destroy(&context);
}

static void status_strings(void **unused) {
  (void)unused;
  const char *seen[10];
  for (int i = 0; i < 10; i++) {
    seen[i] = fp8core_status_string((fp8core_status)-i);
    assert_string_not_equal(seen[i], "unknown status");
    for (int j = 0; j < i; j++) assert_string_not_equal(seen[i], seen[j]);
  }
  assert_string_equal(fp8core_status_string((fp8core_status)1), "unknown status");
  assert_string_equal(fp8core_status_string((fp8core_status)-10), "unknown status");
}

static void last_error_messages(void **unused) {
  (void)unused;
  assert_int_equal(fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "number %d", 42), FP8CORE_ERROR_DEVICE);
  assert_string_equal(fp8core_last_error(), "number 42");
  // A message may quote the one before.
  assert_int_equal(fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "again: %s", fp8core_last_error()),
                   FP8CORE_ERROR_DEVICE);
  assert_string_equal(fp8core_last_error(), "again: number 42");
  char text[2000];
  memset(text, 'y', sizeof(text) - 1);
  text[sizeof(text) - 1] = 0;
  (void)fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "%s", text);
  assert_int_equal(strlen(fp8core_last_error()), 511);
  // Success leaves it.
  (void)fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "kept");
  fp8core_context *context = test_context_default();
  fp8core_context_destroy(&context);
  assert_string_equal(fp8core_last_error(), "kept");
}

static void *use_own_context(void *result) {
  const uintptr_t number = *(uintptr_t *)result;
  *(uintptr_t *)result = 0;
  if (*fp8core_last_error()) return NULL;
  for (int i = 0; i < 50; i++) {
    char text[64];
    fp8core_context_options options = options_of_device();
    fp8core_context *context;
    options.seed = number;
    options.threads = 1;
    if (fp8core_context_create(&context, &options) != FP8CORE_OK || fp8core_context_seed(context) != number)
      return NULL;
    (void)snprintf(text, sizeof(text), "thread %ju", (uintmax_t)number);
    (void)fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "%s", text);
    void *memory;
    if (fp8core_alloc(context, 4096, &memory) != FP8CORE_OK || fp8core_zero(context, memory, 4096) != FP8CORE_OK ||
        fp8core_free(context, memory) != FP8CORE_OK)
      return NULL;
    fp8core_context_destroy(&context);
    if (strcmp(fp8core_last_error(), text) != 0) return NULL;
  }
  *(uintptr_t *)result = number;
  return NULL;
}

static void last_error_without_format(void **unused) {
  (void)unused;
  const char *volatile none = NULL;
  assert_int_equal(fp8core_set_last_error(FP8CORE_ERROR_DEVICE, none, 0), FP8CORE_ERROR_DEVICE);
  assert_string_equal(fp8core_last_error(), "device error");
}

// Contexts and messages of two threads do not meet.
static void distinct_threads(void **unused) {
  (void)unused;
  pthread_t handles[2];
  uintptr_t results[2] = {1, 2};
  (void)fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "of the main thread");
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&handles[i], NULL, use_own_context, &results[i]), 0);
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_join(handles[i], NULL), 0);
  assert_int_equal(results[0], 1);
  assert_int_equal(results[1], 2);
  assert_string_equal(fp8core_last_error(), "of the main thread");
}

static int has_openmp(void) {
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  options.threads = 2;
  assert_ok(fp8core_context_create(&context, &options));
  const int threads = fp8core_context_threads(context);
  fp8core_context_destroy(&context);
  return threads == 2;
}

static void *sleep_not(void *unused) { return unused; }

// What a child of fork() writes must be what the parent writes, and it must come back at all: OpenMP's threads are
// gone.
static void work(fp8core_context *context, unsigned char *codes, float *product) {
  enum { N = 384 };
  static float values[N * N];
  for (int i = 0; i < N * N; i++) values[i] = (float)(i * 7 % 101 - 50) / 8.0f;
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const fp8core_tensor source = fp8core_tensor_matrix(values, FP8CORE_FP32, N, N, cpu);
  const fp8core_tensor destination = fp8core_tensor_matrix(codes, FP8CORE_E4M3, N, N, cpu);
  const fp8core_tensor sums = fp8core_tensor_matrix(product, FP8CORE_FP32, N, N, cpu);
  float amax = 0.0f;
  assert_ok(fp8core_cast(context, NULL, &source, &destination));
  assert_ok(fp8core_amax(context, &source, &amax));
  assert_ok(fp8core_gemm(context, NULL, &source, &source, NULL, &sums));
}

static void children_of_fork(void **unused) {
  (void)unused;
  if (test_on_cuda()) {
    print_message("CUDA does not outlive a fork: not tested\n");
    skip();
  }
  enum { N = 384 };
  static unsigned char codes[2][N * N];
  static float product[2][N * N];
  fp8core_context *context = test_context(4, FP8CORE_ISA_AUTO);
  work(context, codes[0], product[0]);
  for (int create = 0; create < 2; create++) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
      (void)alarm(20);
      fp8core_context *used = create ? test_context(4, FP8CORE_ISA_AUTO) : context;
      work(used, codes[1], product[1]);
      work(used, codes[1], product[1]);
      const int same = fp8core_context_threads(used) == 1 && memcmp(codes[0], codes[1], sizeof(codes[0])) == 0 &&
                       memcmp(product[0], product[1], sizeof(product[0])) == 0;
      _exit(same ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
  }
  // The parent has its threads still.
  work(context, codes[1], product[1]);
  assert_memory_equal(product[0], product[1], sizeof(product[0]));
  fp8core_context_destroy(&context);
}

// Runs in a process of its own: creates contexts where no thread can be created. Exit status 77: there is no such
// limit.
static int create_without_threads(void) {
  const struct rlimit none = {0, 0};
  pthread_t thread;
  if (setrlimit(RLIMIT_NPROC, &none) != 0) return 77;
  // Root has no limit.
  if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) return 77;
  if (pthread_create(&thread, NULL, sleep_not, NULL) == 0) return 77;
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  options.threads = 5;
  if (fp8core_context_create(&context, &options) != FP8CORE_ERROR_OUT_OF_MEMORY || context) return 1;
  if (!strstr(fp8core_last_error(), "the 5 threads")) return 2;
  options.threads = 1;
  if (fp8core_context_create(&context, &options) != FP8CORE_OK) return 3;
  return 0;
}

static int run_self(const char *argument, const char *variable, const char *value) {
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    if (variable) (void)setenv(variable, value, 1);
    (void)execl("/proc/self/exe", "test_context", argument, (char *)NULL);
    _exit(77);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

static void threads_that_cannot_be_created(void **unused) {
  (void)unused;
  if (!has_openmp()) {
    print_message("built without OpenMP: not tested\n");
    skip();
  }
  const int status = run_self("without-threads", NULL, NULL);
  if (status == 77) print_message("threads cannot be limited here: not tested\n");
  if (status == 77) skip();
  assert_int_equal(status, 0);
}

static void note_warning(void *user_data, fp8core_log_level level, const char *message) {
  if (level == FP8CORE_LOG_WARNING && strstr(message, "OMP_THREAD_LIMIT")) *(int *)user_data = 1;
}

// Run with OMP_THREAD_LIMIT=3.
static int create_under_limit(void) {
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  int warned = 0;
  options.threads = 8;
  options.log = note_warning;
  options.log_user_data = &warned;
  if (fp8core_context_create(&context, &options) != FP8CORE_OK) return 1;
  if (fp8core_context_threads(context) != 3 || !warned) return 2;
  fp8core_context_destroy(&context);
  if (fp8core_context_create(&context, NULL) != FP8CORE_OK) return 3;
  if (fp8core_context_threads(context) > 3) return 4;
  fp8core_context_destroy(&context);
  return 0;
}

static void thread_limit_of_openmp(void **unused) {
  (void)unused;
  if (!has_openmp()) {
    print_message("built without OpenMP: not tested\n");
    skip();
  }
  assert_int_equal(run_self("under-limit", "OMP_THREAD_LIMIT", "3"), 0);
}

int main(int count, char **arguments) {
  if (count > 1 && strcmp(arguments[1], "without-threads") == 0) _exit(create_without_threads());
  if (count > 1 && strcmp(arguments[1], "under-limit") == 0) _exit(create_under_limit());
#define TEST(name) cmocka_unit_test_setup_teardown(name, clear_environment, clear_environment)
  const struct CMUnitTest tests[] = {
    TEST(defaults),
    TEST(device_under_test),
    TEST(null_arguments),
    TEST(options_out_of_range),
    TEST(versions),
    TEST(size_field),
    TEST(isa_from_environment),
    TEST(isa_from_options),
    TEST(isa_names),
    TEST(cpu_features),
    TEST(log_callback),
    TEST(threads),
    TEST(seed),
    TEST(workspace),
    TEST(device_counts),
    TEST(cuda_device_that_is_not_there),
    TEST(memory),
    TEST(status_strings),
    TEST(last_error_messages),
    TEST(distinct_threads),
    TEST(last_error_without_format),
    TEST(children_of_fork),
    TEST(threads_that_cannot_be_created),
    TEST(thread_limit_of_openmp),
  };
  return cmocka_run_group_tests_name("context", tests, NULL, NULL);
}
