// A CUDA context where there is no GPU: a build with CUDA and one without both say why it cannot be had.
#include <string.h>

#include "support.h"

#include "fp8core/cuda.h"

static void context_is_refused(void **state) {
  (void)state;
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context = (fp8core_context *)(uintptr_t)1;
  options.device.type = FP8CORE_DEVICE_CUDA;
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) > 0) skip();
  assert_fails(fp8core_context_create(&context, &options), FP8CORE_ERROR_NOT_SUPPORTED, "CUDA");
  assert_null(context);
  // Either the build has no CUDA, or the runtime's own words say what it lacks.
  assert_true(strstr(fp8core_last_error(), "built without CUDA") || strstr(fp8core_last_error(), "no usable GPU") ||
              strstr(fp8core_last_error(), "no GPU"));
}

static void count_is_zero_with_a_reason(void **state) {
  (void)state;
  const int count = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  assert_true(count >= 0);
  if (count == 0) test_assert_message_contains("fp8core_device_count", "CUDA");
}

static void index_out_of_range_is_named(void **state) {
  (void)state;
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) == 0) skip();
  options.device.type = FP8CORE_DEVICE_CUDA;
  options.device.index = 4711;
  assert_fails(fp8core_context_create(&context, &options), FP8CORE_ERROR_INVALID_ARGUMENT, "4711");
  options.device.index = -1;
  assert_fails(fp8core_context_create(&context, &options), FP8CORE_ERROR_INVALID_ARGUMENT, "-1");
}

static void cpu_context_has_no_stream(void **state) {
  (void)state;
  fp8core_context *context;
  int major = 9, minor = 9;
  void *stream = &major;
  assert_ok(fp8core_context_create(&context, NULL));
  assert_true(fp8core_cuda_stream(context, &stream) != FP8CORE_OK);
  assert_null(stream);
  assert_fails(fp8core_cuda_stream(context, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "stream is NULL");
  assert_true(fp8core_cuda_compute_capability(context, &major, &minor) != FP8CORE_OK);
  assert_int_equal(major, 0);
  assert_fails(fp8core_cuda_compute_capability(context, NULL, &minor), FP8CORE_ERROR_INVALID_ARGUMENT, "major is NULL");
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(context_is_refused),
    cmocka_unit_test(count_is_zero_with_a_reason),
    cmocka_unit_test(index_out_of_range_is_named),
    cmocka_unit_test(cpu_context_has_no_stream),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
