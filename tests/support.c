#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int test_on_cuda(void) {
  const char *device = getenv("FP8CORE_TEST_DEVICE");
  if (!device || !*device || strcmp(device, "cpu") == 0) return 0;
  if (strcmp(device, "cuda") == 0) return 1;
  fprintf(stderr, "FP8CORE_TEST_DEVICE is \"%s\", expected cpu or cuda\n", device);
  exit(2);
}

fp8core_device test_device(void) {
  const fp8core_device device = {test_on_cuda() ? FP8CORE_DEVICE_CUDA : FP8CORE_DEVICE_CPU, 0};
  return device;
}

fp8core_context *test_context(int threads, fp8core_isa isa) {
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  options.device = test_device();
  options.threads = threads;
  options.isa = isa;
  assert_ok(fp8core_context_create(&context, &options));
  return context;
}

fp8core_context *test_context_default(void) { return test_context(0, FP8CORE_ISA_AUTO); }

void *test_alloc(fp8core_context *context, size_t bytes) {
  void *device;
  assert_ok(fp8core_alloc(context, bytes, &device));
  return device;
}

void *test_upload(fp8core_context *context, const void *host, size_t bytes) {
  void *device = test_alloc(context, bytes);
  assert_ok(fp8core_copy(context, device, host, bytes));
  return device;
}

void test_download(fp8core_context *context, void *host, const void *device, size_t bytes) {
  assert_ok(fp8core_copy(context, host, device, bytes));
}

void test_free(fp8core_context *context, void *device) { assert_ok(fp8core_free(context, device)); }

fp8core_tensor test_matrix(void *data, fp8core_dtype dtype, int64_t rows, int64_t columns) {
  return fp8core_tensor_matrix(data, dtype, rows, columns, test_device());
}

double test_cuda_product_error(fp8core_dtype a, fp8core_dtype b, int fast_accumulation) {
  if (fp8core_dtype_size(a) == 1 && fp8core_dtype_size(b) == 1) return fast_accumulation ? 0x1p-8 : 0x1p-9;
  return a == FP8CORE_FP32 || b == FP8CORE_FP32 ? 0x1p-18 : 0x1p-15;
}

const test_factors test_extreme_factors[TEST_EXTREME_FACTORS] = {
  {0x1p-100f, 0x1p-100f, 0x1p-126f, 6 * 0x1p74f}, {0x1p100f, 0x1p100f, 0x1p126f, 6 * 0x1p-74f},
  {0x1p100f, 0x1p30f, 1.0f, 6 * 0x1p-130f},       {0x1p126f, 0x1p22f, 1.0f, 6 * 0x1p-148f},
  {0x1p-126f, 0x1p-126f, 1.0f, INFINITY},         {0x1p126f, 0x1p126f, 1.0f, 0.0f},
  {0x1p-120f, 0x1p-5f, 1.0f, 6 * 0x1p125f},       {1.0f, 1.0f, 0x1p-149f, 6 * 0x1p-149f},
};

void test_assert_message_contains(const char *call, const char *text) {
  if (!strstr(fp8core_last_error(), text))
    fail_msg("%s: message \"%s\" lacks \"%s\"", call, fp8core_last_error(), text);
}

uint64_t test_random_bits(test_random *random) {
  random->state += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = random->state;
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

double test_random_uniform(test_random *random) { return (double)(test_random_bits(random) >> 11) * 0x1p-53; }

double test_random_normal(test_random *random) {
  const double u = 1.0 - test_random_uniform(random);
  const double v = test_random_uniform(random);
  return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
