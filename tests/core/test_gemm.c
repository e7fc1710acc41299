// Matrix products: what each option means, the edges, and every refusal. The kernels' accuracy over all formats and
// sizes is checked by tests/kernels/check_gemm.c.
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A matrix or vector on the device under test and a copy of it on the host, quantised from FP32 values.
typedef struct operand {
  fp8core_tensor device;
  fp8core_tensor host;
  unsigned char *bytes;
  size_t size;
  // {scale, scale inverse, amax}
  float host_floats[3];
  float *device_floats;
} operand;

static void *allocate(size_t bytes) {
  void *memory = calloc(bytes ? bytes : 1, 1);
  assert_non_null(memory);
  return memory;
}

static float load(fp8core_dtype dtype, const void *data, int64_t index) {
  uint32_t code = 0;
  const size_t size = fp8core_dtype_size(dtype);
  memcpy(&code, (const unsigned char *)data + (size_t)index * size, size);
  return fp8core_decode(dtype, code);
}

static void store(fp8core_dtype dtype, void *data, int64_t index, float value) {
  const uint32_t code = fp8core_encode(dtype, value, 0);
  const size_t size = fp8core_dtype_size(dtype);
  memcpy((unsigned char *)data + (size_t)index * size, &code, size);
}

// `values` NULL: filled with 0x77, which is a number in every format.
static operand make_strided(fp8core_context *context, fp8core_dtype dtype, int64_t rows, int64_t columns,
                            int64_t stride, float scale, const float *values) {
  operand result;
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  memset(&result, 0, sizeof(result));
  result.size = (size_t)(rows * stride) * fp8core_dtype_size(dtype);
  result.bytes = allocate(result.size);
  memset(result.bytes, 0x77, result.size);
  result.host_floats[0] = scale;
  result.host_floats[1] = 1.0f / scale;
  if (values)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) store(dtype, result.bytes, i * stride + j, values[i * columns + j] * scale);
  result.device_floats = test_upload(context, result.host_floats, sizeof(result.host_floats));
  result.host = fp8core_tensor_matrix(result.bytes, dtype, rows, columns, cpu);
  result.host.row_stride = stride;
  result.device = test_matrix(test_upload(context, result.bytes, result.size), dtype, rows, columns);
  result.device.row_stride = stride;
  result.device.scale = result.device_floats;
  result.device.scale_inverse = result.device_floats + 1;
  result.device.amax = result.device_floats + 2;
  return result;
}

static operand make(fp8core_context *context, fp8core_dtype dtype, int64_t rows, int64_t columns, const float *values) {
  return make_strided(context, dtype, rows, columns, columns, 1.0f, values);
}

static operand make_vector(fp8core_context *context, fp8core_dtype dtype, int64_t count, const float *values) {
  operand result = make(context, dtype, 1, count, values);
  result.host.dimensions = 1;
  result.host.shape[0] = count;
  result.device.dimensions = 1;
  result.device.shape[0] = count;
  return result;
}

// The host's tensor with the host's scales: they lie in the operand, which may have moved since it was made.
static fp8core_tensor host_tensor(operand *source) {
  fp8core_tensor tensor = source->host;
  tensor.scale = &source->host_floats[0];
  tensor.scale_inverse = &source->host_floats[1];
  tensor.amax = &source->host_floats[2];
  return tensor;
}

static void fetch(fp8core_context *context, operand *target) {
  assert_ok(fp8core_context_synchronize(context));
  test_download(context, target->bytes, target->device.data, target->size);
  test_download(context, target->host_floats, target->device_floats, sizeof(target->host_floats));
}

static float value_at(const operand *source, int64_t row, int64_t column) {
  return load(source->host.dtype, source->bytes,
              row * (source->host.dimensions == 1 ? 0 : source->host.row_stride) + column) *
         source->host_floats[1];
}

static void drop(fp8core_context *context, operand *target) {
  test_free(context, target->device.data);
  test_free(context, target->device_floats);
  free(target->bytes);
}

static void random_values(test_random *random, float *values, int64_t count) {
  for (int64_t i = 0; i < count; i++) values[i] = (float)test_random_normal(random);
}

// [2, 3] x [3, 2] by hand, in every pair of formats and all transposes.
static void test_small_product(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float a[6] = {1, -2, 3, 4, 0.5f, -6};
  const float a_transposed[6] = {1, 4, -2, 0.5f, 3, -6};
  const float b[6] = {2, 1, 0, -1, 3, 0.25f};
  const float b_transposed[6] = {2, 0, 3, 1, -1, 0.25f};
  const float expected[4] = {11, 3.75f, -10, 2};
  for (int formats = 0; formats < 25; formats++) {
    const fp8core_dtype a_dtype = (fp8core_dtype)(formats / 5);
    const fp8core_dtype b_dtype = (fp8core_dtype)(formats % 5);
    for (int transposes = 0; transposes < 4; transposes++) {
      const int ta = transposes & 1;
      const int tb = transposes >> 1;
      operand left = make(context, a_dtype, ta ? 3 : 2, ta ? 2 : 3, ta ? a_transposed : a);
      operand right = make(context, b_dtype, tb ? 2 : 3, tb ? 3 : 2, tb ? b_transposed : b);
      operand d = make(context, FP8CORE_FP32, 2, 2, NULL);
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.transpose_a = ta;
      options.transpose_b = tb;
      const fp8core_status status = fp8core_gemm(context, &options, &left.device, &right.device, NULL, &d.device);
      if (test_on_cuda() && a_dtype == FP8CORE_E5M2 && b_dtype == FP8CORE_E5M2) {
        assert_int_equal(status, FP8CORE_ERROR_NOT_SUPPORTED);
      } else {
        assert_int_equal(status, FP8CORE_OK);
        fetch(context, &d);
        for (int i = 0; i < 4; i++) assert_true(value_at(&d, i / 2, i % 2) == expected[i]);
        assert_true(d.host_floats[2] == 11.0f);
      }
      drop(context, &left);
      drop(context, &right);
      drop(context, &d);
    }
  }
  fp8core_context_destroy(&context);
}

static void test_alpha_beta_bias_scales(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float a[2] = {3, 5};
  const float b[2] = {2, -1};
  const float c[4] = {1, 2, 3, 4};
  const float bias[2] = {10, -20};
  for (int dtype = 0; dtype < FP8CORE_DTYPE_COUNT; dtype++) {
    operand left = make_strided(context, FP8CORE_E4M3, 2, 1, 1, 4.0f, a);
    operand right = make_strided(context, FP8CORE_E4M3, 1, 2, 2, 8.0f, b);
    operand added = make_strided(context, (fp8core_dtype)dtype, 2, 2, 3, 2.0f, c);
    operand bias_vector = make_vector(context, dtype == FP8CORE_FP16 ? FP8CORE_FP16 : FP8CORE_BF16, 2, bias);
    operand d = make_strided(context, FP8CORE_FP32, 2, 2, 2, 0.5f, NULL);
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.alpha = 2.0f;
    options.beta = -3.0f;
    options.bias = &bias_vector.device;
    assert_ok(fp8core_gemm(context, &options, &left.device, &right.device, &added.device, &d.device));
    fetch(context, &d);
    // 2 a b - 3 c + bias
    const float expected[4] = {12 - 3 + 10, -6 - 6 - 20, 20 - 9 + 10, -10 - 12 - 20};
    for (int i = 0; i < 4; i++) {
      assert_true(value_at(&d, i / 2, i % 2) == expected[i]);
      // Stored with the scale.
      assert_true(load(FP8CORE_FP32, d.bytes, i) == expected[i] * 0.5f);
    }
    // Of the values, not of what is stored.
    assert_true(d.host_floats[2] == 42.0f);
    drop(context, &left);
    drop(context, &right);
    drop(context, &added);
    drop(context, &bias_vector);
    drop(context, &d);
  }
  fp8core_context_destroy(&context);
}

static void test_beta_zero_ignores_c(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float one[1] = {1};
  const float bad[1] = {NAN};
  operand a = make(context, FP8CORE_E4M3, 1, 1, one);
  operand b = make(context, FP8CORE_E4M3, 1, 1, one);
  operand c = make(context, FP8CORE_FP32, 1, 1, bad);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  // In place too.
  assert_ok(fp8core_gemm(context, &options, &a.device, &b.device, &c.device, &c.device));
  fetch(context, &c);
  assert_true(value_at(&c, 0, 0) == 1.0f);
  // Not even a NULL or a wrong shape is looked at.
  fp8core_tensor wrong = c.device;
  wrong.shape[0] = 7;
  wrong.data = NULL;
  operand d = make(context, FP8CORE_FP32, 1, 1, NULL);
  assert_ok(fp8core_gemm(context, &options, &a.device, &b.device, &wrong, &d.device));
  fetch(context, &d);
  assert_true(value_at(&d, 0, 0) == 1.0f);
  drop(context, &a);
  drop(context, &b);
  drop(context, &c);
  drop(context, &d);
  fp8core_context_destroy(&context);
}

static void test_accumulate_in_place(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float a[4] = {1, 2, 3, 4};
  for (int dtype = 0; dtype < FP8CORE_DTYPE_COUNT; dtype++) {
    operand left = make(context, FP8CORE_E4M3, 2, 2, a);
    operand right = make(context, FP8CORE_E4M3, 2, 2, a);
    const float start[4] = {1, 1, -2, 2};
    operand d = make(context, (fp8core_dtype)dtype, 2, 2, start);
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.beta = 1.0f;
    assert_ok(fp8core_gemm(context, &options, &left.device, &right.device, &d.device, &d.device));
    fetch(context, &d);
    const float expected[4] = {8, 11, 13, 24};
    for (int i = 0; i < 4; i++)
      assert_true(value_at(&d, i / 2, i % 2) ==
                  fp8core_decode((fp8core_dtype)dtype, fp8core_encode((fp8core_dtype)dtype, expected[i], 1)));
    drop(context, &left);
    drop(context, &right);
    drop(context, &d);
  }
  fp8core_context_destroy(&context);
}

static void test_empty(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float c[2] = {2, -4};
  const float bias[2] = {1, 1};
  operand added = make(context, FP8CORE_BF16, 1, 2, c);
  operand bias_vector = make_vector(context, FP8CORE_FP32, 2, bias);
  operand d = make(context, FP8CORE_FP32, 1, 2, NULL);
  fp8core_tensor a = test_matrix(NULL, FP8CORE_E4M3, 1, 0);
  fp8core_tensor b = test_matrix(NULL, FP8CORE_E4M3, 0, 2);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  // K of 0: zeros.
  assert_ok(fp8core_gemm(context, &options, &a, &b, NULL, &d.device));
  fetch(context, &d);
  assert_true(value_at(&d, 0, 0) == 0.0f && value_at(&d, 0, 1) == 0.0f);
  assert_true(d.host_floats[2] == 0.0f);
  // K of 0: epilogue(beta C + bias).
  options.beta = 0.5f;
  options.bias = &bias_vector.device;
  options.epilogue = FP8CORE_EPILOGUE_RELU;
  assert_ok(fp8core_gemm(context, &options, &a, &b, &added.device, &d.device));
  fetch(context, &d);
  assert_true(value_at(&d, 0, 0) == 2.0f && value_at(&d, 0, 1) == 0.0f);
  // M or N of 0: nothing to write, but the column sums of no rows are zero.
  options = fp8core_gemm_options_default();
  const float nonzero[2] = {5, 5};
  operand gradient = make_vector(context, FP8CORE_FP32, 2, nonzero);
  options.bias_gradient = &gradient.device;
  fp8core_tensor no_rows = test_matrix(NULL, FP8CORE_E4M3, 0, 3);
  operand right = make(context, FP8CORE_E4M3, 3, 2, NULL);
  fp8core_tensor empty_d = test_matrix(NULL, FP8CORE_FP32, 0, 2);
  assert_ok(fp8core_gemm(context, &options, &no_rows, &right.device, NULL, &empty_d));
  fetch(context, &gradient);
  assert_true(value_at(&gradient, 0, 0) == 0.0f && value_at(&gradient, 0, 1) == 0.0f);
  options.bias_gradient = NULL;
  fp8core_tensor no_columns = test_matrix(NULL, FP8CORE_E4M3, 3, 0);
  operand left = make(context, FP8CORE_E4M3, 2, 3, NULL);
  fp8core_tensor narrow_d = test_matrix(NULL, FP8CORE_FP32, 2, 0);
  assert_ok(fp8core_gemm(context, &options, &left.device, &no_columns, NULL, &narrow_d));
  drop(context, &added);
  drop(context, &bias_vector);
  drop(context, &d);
  drop(context, &gradient);
  drop(context, &left);
  drop(context, &right);
  fp8core_context_destroy(&context);
}

static void test_nan_and_infinity(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  enum { M = 14, K = 40, N = 35 };
  static float a[M * K];
  static float b[K * N];
  for (int formats = 0; formats < 3; formats++) {
    const fp8core_dtype a_dtype = formats == 0 ? FP8CORE_E5M2 : formats == 1 ? FP8CORE_BF16 : FP8CORE_FP32;
    const fp8core_dtype b_dtype = formats == 0 ? FP8CORE_E4M3 : formats == 1 ? FP8CORE_BF16 : FP8CORE_FP32;
    for (int i = 0; i < M * K; i++) a[i] = 1.0f;
    for (int i = 0; i < K * N; i++) b[i] = 1.0f;
    a[3 * K + 17] = NAN;
    a[5 * K + 39] = INFINITY;
    a[7 * K] = -INFINITY;
    b[0 * N + 34] = 0.0f;
    b[39 * N + 34] = 0.0f;
    operand left = make(context, a_dtype, M, K, a);
    operand right = make(context, b_dtype, K, N, b);
    for (int dtype = 0; dtype < FP8CORE_DTYPE_COUNT; dtype++) {
      operand d = make(context, (fp8core_dtype)dtype, M, N, NULL);
      assert_ok(fp8core_gemm(context, NULL, &left.device, &right.device, NULL, &d.device));
      fetch(context, &d);
      const int fp8 = dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2;
      const float infinity = fp8 ? fp8core_dtype_max((fp8core_dtype)dtype) : INFINITY;
      for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
          const float value = value_at(&d, i, j);
          if (i == 3) assert_true(isnan(value));
          // Infinity times zero.
          else if ((i == 5 || i == 7) && j == 34)
            assert_true(isnan(value));
          else if (i == 5)
            assert_true(value == infinity);
          else if (i == 7)
            assert_true(value == -infinity);
          else
            assert_true(value == (j == 34 ? 38.0f : 40.0f) || (fp8 && fabsf(value - 40.0f) <= 4.0f));
        }
      assert_true(isnan(d.host_floats[2]));
      drop(context, &d);
    }
    drop(context, &left);
    drop(context, &right);
  }
  // Without a NaN the amax is the infinity, even where FP8 saturates it away.
  const float one[1] = {1};
  const float infinite[1] = {-INFINITY};
  operand left = make(context, FP8CORE_E5M2, 1, 1, infinite);
  operand right = make(context, FP8CORE_E4M3, 1, 1, one);
  operand d = make(context, FP8CORE_E4M3, 1, 1, NULL);
  assert_ok(fp8core_gemm(context, NULL, &left.device, &right.device, NULL, &d.device));
  fetch(context, &d);
  assert_int_equal(d.bytes[0], 0xfe);
  assert_true(d.host_floats[2] == INFINITY);
  drop(context, &left);
  drop(context, &right);
  drop(context, &d);
  fp8core_context_destroy(&context);
}

// FP8 saturates; the wider formats overflow to infinity. Ties go to even, as fp8core_encode() has them.
static void test_output_formats(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float values[] = {464.0f,  464.01f,  448.0f,   61440.0f, 65519.0f, 65520.0f,          70000.0f,
                          1.0625f, 1.06251f, 0x1p-10f, 3e-3f,    0x1p-9f,  0x1p-17f,          3 * 0x1p-17f,
                          1e30f,   3.4e38f,  -0.0f,    -448.0f,  1e-30f,   0x1p-6f - 0x1p-10f};
  enum { COUNT = sizeof(values) / sizeof(values[0]) };
  const float one[1] = {1};
  operand a = make(context, FP8CORE_FP32, 1, 1, one);
  operand b = make(context, FP8CORE_FP32, 1, COUNT, values);
  for (int dtype = 0; dtype < FP8CORE_DTYPE_COUNT; dtype++) {
    operand d = make(context, (fp8core_dtype)dtype, 1, COUNT, NULL);
    assert_ok(fp8core_gemm(context, NULL, &a.device, &b.device, NULL, &d.device));
    fetch(context, &d);
    const int fp8 = dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2;
    for (int i = 0; i < COUNT; i++) {
      // TF32 is never used: FP32 operands keep their bits. (The sum starts from +0, so -0 may come out as +0.)
      const float expected = fp8core_decode((fp8core_dtype)dtype, fp8core_encode((fp8core_dtype)dtype, values[i], fp8));
      assert_true(value_at(&d, 0, i) == expected);
    }
    assert_true(d.host_floats[2] == 3.4e38f);
    drop(context, &d);
  }
  drop(context, &a);
  drop(context, &b);
  fp8core_context_destroy(&context);
}

static void test_amax_is_raised_only(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float a[2] = {2, -8};
  const float one[1] = {1};
  const float starts[4] = {0.0f, 3.0f, 100.0f, INFINITY};
  const float expected[4] = {8.0f, 8.0f, 100.0f, INFINITY};
  operand left = make(context, FP8CORE_E4M3, 2, 1, a);
  operand right = make(context, FP8CORE_E4M3, 1, 1, one);
  for (int i = 0; i < 4; i++) {
    operand d = make_strided(context, FP8CORE_E4M3, 2, 1, 1, 16.0f, NULL);
    assert_ok(fp8core_copy(context, d.device_floats + 2, &starts[i], sizeof(float)));
    assert_ok(fp8core_gemm(context, NULL, &left.device, &right.device, NULL, &d.device));
    fetch(context, &d);
    assert_true(d.host_floats[2] == expected[i]);
    assert_true(load(FP8CORE_E4M3, d.bytes, 1) == -128.0f);
    // amax and scales are optional.
    fp8core_tensor bare = d.device;
    bare.scale = NULL;
    bare.scale_inverse = NULL;
    bare.amax = NULL;
    assert_ok(fp8core_gemm(context, NULL, &left.device, &right.device, NULL, &bare));
    fetch(context, &d);
    assert_true(load(FP8CORE_E4M3, d.bytes, 1) == -8.0f);
    drop(context, &d);
  }
  drop(context, &left);
  drop(context, &right);
  fp8core_context_destroy(&context);
}

// Against the FP64 reference within the bound of docs/numerics.md.
static void compare_product(fp8core_context *context, fp8core_dtype a_dtype, fp8core_dtype b_dtype, int64_t m,
                            int64_t n, int64_t k, int ta, int tb, uint64_t seed) {
  test_random random = {seed};
  float *a = allocate((size_t)(m * k) * sizeof(float));
  float *b = allocate((size_t)(n * k) * sizeof(float));
  random_values(&random, a, m * k);
  random_values(&random, b, n * k);
  operand left = make_strided(context, a_dtype, ta ? k : m, ta ? m : k, ta ? m : k, 16.0f, a);
  operand right = make_strided(context, b_dtype, tb ? n : k, tb ? k : n, tb ? k : n, 32.0f, b);
  operand d = make(context, FP8CORE_FP32, m, n, NULL);
  operand expected = make(context, FP8CORE_FP32, m, n, NULL);
  operand magnitudes = make(context, FP8CORE_FP32, m, n, NULL);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_a = ta;
  options.transpose_b = tb;
  assert_ok(fp8core_gemm(context, &options, &left.device, &right.device, NULL, &d.device));
  fetch(context, &d);
  fp8core_tensor left_host = host_tensor(&left);
  fp8core_tensor right_host = host_tensor(&right);
  fp8core_tensor expected_host = host_tensor(&expected);
  fp8core_tensor magnitudes_host = host_tensor(&magnitudes);
  assert_ok(fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, &options, &left_host, &right_host, NULL, &expected_host));
  for (int64_t i = 0; i < m * k; i++) store(a_dtype, left.bytes, i, fabsf(load(a_dtype, left.bytes, i)));
  for (int64_t i = 0; i < n * k; i++) store(b_dtype, right.bytes, i, fabsf(load(b_dtype, right.bytes, i)));
  assert_ok(fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, &options, &left_host, &right_host, NULL, &magnitudes_host));
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      const double share =
        test_on_cuda() ? test_cuda_product_error(a_dtype, b_dtype, 0) : (double)(k + 6) * 1.01 * 0x1p-24;
      const double bound = share * (double)value_at(&magnitudes, i, j);
      const double difference = fabs((double)value_at(&d, i, j) - (double)value_at(&expected, i, j));
      if (!(difference <= bound))
        fail_msg("%s x %s, m %d n %d k %d: [%d, %d] is %.9g, expected %.9g within %.3g", fp8core_dtype_name(a_dtype),
                 fp8core_dtype_name(b_dtype), (int)m, (int)n, (int)k, (int)i, (int)j, (double)value_at(&d, i, j),
                 (double)value_at(&expected, i, j), bound);
    }
  drop(context, &left);
  drop(context, &right);
  drop(context, &d);
  drop(context, &expected);
  drop(context, &magnitudes);
  free(a);
  free(b);
}

// Sizes that FP8 tensor cores refuse, and those of a training step.
static void test_awkward_sizes(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  static const int64_t sizes[][3] = {{4, 50257, 8}, {4, 20001, 8}, {8, 4, 20001},  {4, 8, 16},
                                     {1, 1, 1},     {1, 300, 70},  {3, 5, 7},      {17, 19, 23},
                                     {64, 48, 8},   {33, 1, 40},   {130, 140, 150}};
  for (int i = 0; i < (int)(sizeof(sizes) / sizeof(sizes[0])); i++) {
    compare_product(context, FP8CORE_E4M3, FP8CORE_E4M3, sizes[i][0], sizes[i][1], sizes[i][2], 0, 1, 1);
    compare_product(context, FP8CORE_E5M2, FP8CORE_E4M3, sizes[i][0], sizes[i][1], sizes[i][2], 0, 0, 2);
    compare_product(context, FP8CORE_E5M2, FP8CORE_E4M3, sizes[i][0], sizes[i][1], sizes[i][2], 1, 0, 3);
    compare_product(context, FP8CORE_BF16, FP8CORE_BF16, sizes[i][0], sizes[i][1], sizes[i][2], 1, 1, 4);
  }
  fp8core_context_destroy(&context);
}

static void set_inverse(fp8core_context *context, operand *target, float inverse) {
  target->host_floats[1] = inverse;
  assert_ok(fp8core_copy(context, target->device_floats + 1, &inverse, sizeof(inverse)));
}

// The product of two scales may overflow or underflow where the result does not. A result with an amax is never fused
// on CUDA, so that its factor is in FP64 there too.
static void test_extreme_scales(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float two[1] = {2};
  const float three[1] = {3};
  for (int i = 0; i < TEST_EXTREME_FACTORS; i++)
    for (int fp8 = 0; fp8 < 2; fp8++) {
      const fp8core_dtype dtype = fp8 ? FP8CORE_E4M3 : FP8CORE_FP32;
      operand a = make(context, dtype, 1, 1, two);
      operand b = make(context, dtype, 1, 1, three);
      set_inverse(context, &a, 1.0f / test_extreme_factors[i].scale_a);
      set_inverse(context, &b, 1.0f / test_extreme_factors[i].scale_b);
      operand d = make(context, FP8CORE_FP32, 1, 1, NULL);
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.alpha = test_extreme_factors[i].alpha;
      assert_ok(fp8core_gemm(context, &options, &a.device, &b.device, NULL, &d.device));
      fetch(context, &d);
      assert_true(value_at(&d, 0, 0) == test_extreme_factors[i].expected);
      for (int accumulation = 0; accumulation < 2; accumulation++) {
        const fp8core_tensor a_host = host_tensor(&a);
        const fp8core_tensor b_host = host_tensor(&b);
        const fp8core_tensor d_host = host_tensor(&d);
        store(FP8CORE_FP32, d.bytes, 0, 0.0f);
        assert_ok(
          fp8core_gemm_reference((fp8core_accumulation)accumulation, &options, &a_host, &b_host, NULL, &d_host));
        assert_true(value_at(&d, 0, 0) == test_extreme_factors[i].expected);
      }
      drop(context, &a);
      drop(context, &b);
      drop(context, &d);
    }
  // A zero sum stays zero whatever the factor.
  const float zero[1] = {0};
  operand a = make(context, FP8CORE_E4M3, 1, 1, zero);
  operand b = make(context, FP8CORE_E4M3, 1, 1, three);
  set_inverse(context, &a, 0x1p127f);
  set_inverse(context, &b, 0x1p127f);
  operand d = make(context, FP8CORE_FP32, 1, 1, NULL);
  assert_ok(fp8core_gemm(context, NULL, &a.device, &b.device, NULL, &d.device));
  fetch(context, &d);
  assert_true(value_at(&d, 0, 0) == 0.0f);
  drop(context, &a);
  drop(context, &b);
  drop(context, &d);
  fp8core_context_destroy(&context);
}

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))); }

// Forward: the activation and the pre-activations; backward: the derivative, by central differences of the forward
// rule.
static void test_activations(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  enum { COUNT = 200 };
  float x[COUNT];
  float upstream[COUNT];
  const float one[1] = {1};
  for (int i = 0; i < COUNT; i++) {
    x[i] = ((float)i - 99.5f) * 0.06f;
    upstream[i] = 1.0f + 0.01f * (float)i;
  }
  const fp8core_dtype wide[3] = {FP8CORE_BF16, FP8CORE_FP16, FP8CORE_FP32};
  for (int format = 0; format < 3; format++) {
    operand inputs = make(context, FP8CORE_FP32, COUNT, 1, x);
    operand factor = make(context, FP8CORE_FP32, 1, 1, one);
    operand incoming = make(context, FP8CORE_FP32, COUNT, 1, upstream);
    for (int form = 0; form < 2; form++) {
      operand auxiliary = make(context, wide[format], COUNT, 1, NULL);
      operand d = make(context, FP8CORE_FP32, COUNT, 1, NULL);
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.epilogue = form == 0 ? FP8CORE_EPILOGUE_RELU : FP8CORE_EPILOGUE_GELU;
      options.auxiliary = &auxiliary.device;
      assert_ok(fp8core_gemm(context, &options, &inputs.device, &factor.device, NULL, &d.device));
      fetch(context, &d);
      fetch(context, &auxiliary);
      for (int i = 0; i < COUNT; i++) {
        const double expected = form == 0 ? fmax((double)x[i], 0.0) : gelu((double)x[i]);
        assert_true(fabs((double)value_at(&d, i, 0) - expected) <= 0x1p-20 * fabs((double)x[i]));
        assert_true(value_at(&auxiliary, i, 0) == fp8core_decode(wide[format], fp8core_encode(wide[format], x[i], 1)));
      }
      assert_true(auxiliary.host_floats[2] == x[COUNT - 1] || auxiliary.host_floats[2] == -x[0]);
      // Without the auxiliary matrix too.
      options.auxiliary = NULL;
      operand alone = make(context, FP8CORE_FP32, COUNT, 1, NULL);
      assert_ok(fp8core_gemm(context, &options, &inputs.device, &factor.device, NULL, &alone.device));
      fetch(context, &alone);
      assert_memory_equal(alone.bytes, d.bytes, d.size);
      options.epilogue = form == 0 ? FP8CORE_EPILOGUE_RELU_BACKWARD : FP8CORE_EPILOGUE_GELU_BACKWARD;
      options.auxiliary = &auxiliary.device;
      operand gradient = make_vector(context, FP8CORE_FP32, 1, one);
      options.bias_gradient = &gradient.device;
      assert_ok(fp8core_gemm(context, &options, &incoming.device, &factor.device, NULL, &d.device));
      fetch(context, &d);
      fetch(context, &gradient);
      double sum = 0.0;
      for (int i = 0; i < COUNT; i++) {
        const double at = (double)value_at(&auxiliary, i, 0);
        const double step = 1e-4;
        const double slope = form == 0 ? (at > 0.0 ? 1.0 : 0.0) : (gelu(at + step) - gelu(at - step)) / (2.0 * step);
        assert_true(fabs((double)value_at(&d, i, 0) - (double)upstream[i] * slope) <= (double)upstream[i] * 4e-6);
        sum += (double)value_at(&d, i, 0);
      }
      assert_true(fabs((double)value_at(&gradient, 0, 0) - sum) <= 1e-5 * fabs(sum) + 1e-5);
      drop(context, &auxiliary);
      drop(context, &d);
      drop(context, &alone);
      drop(context, &gradient);
    }
    drop(context, &inputs);
    drop(context, &factor);
    drop(context, &incoming);
  }
  fp8core_context_destroy(&context);
}

// NaN and infinities through the activations.
static void test_activations_of_specials(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float x[5] = {NAN, INFINITY, -50.0f, 50.0f, -INFINITY};
  const float one[1] = {1};
  const float ones[5] = {1, 1, 1, 1, 1};
  operand inputs = make(context, FP8CORE_FP32, 5, 1, x);
  operand factor = make(context, FP8CORE_FP32, 1, 1, one);
  operand units = make(context, FP8CORE_FP32, 5, 1, ones);
  operand d = make(context, FP8CORE_FP32, 5, 1, NULL);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  for (int form = 0; form < 2; form++) {
    options.epilogue = form == 0 ? FP8CORE_EPILOGUE_RELU : FP8CORE_EPILOGUE_GELU;
    options.auxiliary = NULL;
    assert_ok(fp8core_gemm(context, &options, &inputs.device, &factor.device, NULL, &d.device));
    fetch(context, &d);
    assert_true(isnan(value_at(&d, 0, 0)));
    assert_true(value_at(&d, 1, 0) == INFINITY);
    assert_true(fabsf(value_at(&d, 2, 0)) < 1e-30f);
    assert_true(value_at(&d, 3, 0) == 50.0f);
    // The limit, which for GELU comes from below.
    assert_true(value_at(&d, 4, 0) == 0.0f && (signbit(value_at(&d, 4, 0)) != 0) == (form == 1));
    options.epilogue = form == 0 ? FP8CORE_EPILOGUE_RELU_BACKWARD : FP8CORE_EPILOGUE_GELU_BACKWARD;
    options.auxiliary = &inputs.device;
    assert_ok(fp8core_gemm(context, &options, &units.device, &factor.device, NULL, &d.device));
    fetch(context, &d);
    // The derivative at a NaN: ReLU's is 0, as NaN > 0 is false.
    if (form == 0)
      assert_true(value_at(&d, 0, 0) == 0.0f);
    else
      assert_true(isnan(value_at(&d, 0, 0)));
    assert_true(value_at(&d, 1, 0) == 1.0f);
    assert_true(fabsf(value_at(&d, 2, 0)) < 1e-30f);
    assert_true(value_at(&d, 3, 0) == 1.0f);
    assert_true(value_at(&d, 4, 0) == 0.0f);
  }
  drop(context, &inputs);
  drop(context, &factor);
  drop(context, &units);
  drop(context, &d);
  fp8core_context_destroy(&context);
}

// Distinct operands, one shared by all products, and results side by side in the rows of one matrix.
static void test_batches(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  enum { BATCH = 5, M = 16, N = 32, K = 48 };
  static float a[BATCH * M * K];
  static float b[BATCH * K * N];
  test_random random = {11};
  for (int i = 0; i < BATCH * M * K; i++) a[i] = (float)((int)(test_random_bits(&random) % 9) - 4);
  for (int i = 0; i < BATCH * K * N; i++) b[i] = (float)((int)(test_random_bits(&random) % 9) - 4);
  operand left = make(context, FP8CORE_E4M3, BATCH * M, K, a);
  operand right = make(context, FP8CORE_E4M3, BATCH * K, N, b);
  for (int interleaved = 0; interleaved < 2; interleaved++)
    for (int shared = 0; shared < 2; shared++) {
      operand d = make(context, FP8CORE_FP32, interleaved ? M : BATCH * M, interleaved ? BATCH * N : N, NULL);
      fp8core_tensor first_left = left.device;
      fp8core_tensor first_right = right.device;
      fp8core_tensor first_d = d.device;
      first_left.shape[0] = M;
      first_right.shape[0] = K;
      first_d.shape[0] = M;
      first_d.shape[1] = N;
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.batch = BATCH;
      options.batch_stride_a = (int64_t)M * K;
      options.batch_stride_b = shared ? 0 : (int64_t)K * N;
      options.batch_stride_d = interleaved ? N : (int64_t)M * N;
      assert_ok(fp8core_gemm(context, &options, &first_left, &first_right, NULL, &first_d));
      fetch(context, &d);
      float largest = 0.0f;
      for (int product = 0; product < BATCH; product++)
        for (int i = 0; i < M; i++)
          for (int j = 0; j < N; j++) {
            float sum = 0.0f;
            for (int k = 0; k < K; k++)
              sum += a[(product * M + i) * K + k] * b[((shared ? 0 : product) * K + k) * N + j];
            assert_true(value_at(&d, interleaved ? i : product * M + i, interleaved ? product * N + j : j) == sum);
            largest = fmaxf(largest, fabsf(sum));
          }
      assert_true(d.host_floats[2] == largest);
      drop(context, &d);
    }
  drop(context, &left);
  drop(context, &right);
  fp8core_context_destroy(&context);
}

// Each product of a batch has auxiliary values of its own, read and written; the column sums are over all rows of all.
static void test_epilogues_of_batches(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  enum { BATCH = 3, M = 16, N = 32, K = 16 };
  static float a[BATCH * M * K];
  static float b[K * N];
  static float x[BATCH * M * N];
  test_random random = {12};
  for (int i = 0; i < BATCH * M * K; i++) a[i] = (float)((int)(test_random_bits(&random) % 9) - 4);
  for (int i = 0; i < K * N; i++) b[i] = (float)((int)(test_random_bits(&random) % 5) - 2);
  for (int i = 0; i < BATCH * M * N; i++) x[i] = (float)((int)(test_random_bits(&random) % 3) - 1);
  operand left = make(context, FP8CORE_E4M3, BATCH * M, K, a);
  operand right = make(context, FP8CORE_E4M3, K, N, b);
  for (int interleaved = 0; interleaved < 2; interleaved++)
    for (int backward = 0; backward < 2; backward++) {
      const int64_t rows = interleaved ? M : BATCH * M;
      const int64_t columns = interleaved ? BATCH * N : N;
      operand auxiliary = make(context, FP8CORE_BF16, rows, columns, backward ? x : NULL);
      operand d = make(context, FP8CORE_FP32, rows, columns, NULL);
      operand gradient = make_vector(context, FP8CORE_FP32, N, NULL);
      fp8core_tensor first[4] = {left.device, right.device, auxiliary.device, d.device};
      first[0].shape[0] = first[2].shape[0] = first[3].shape[0] = M;
      first[2].shape[1] = first[3].shape[1] = N;
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.epilogue = backward ? FP8CORE_EPILOGUE_RELU_BACKWARD : FP8CORE_EPILOGUE_RELU;
      options.auxiliary = &first[2];
      options.bias_gradient = &gradient.device;
      options.batch = BATCH;
      options.batch_stride_a = (int64_t)M * K;
      options.batch_stride_d = options.batch_stride_auxiliary = interleaved ? N : (int64_t)M * N;
      assert_ok(fp8core_gemm(context, &options, &first[0], &first[1], NULL, &first[3]));
      fetch(context, &d);
      fetch(context, &auxiliary);
      fetch(context, &gradient);
      float sums[N] = {0};
      float largest = 0.0f;
      for (int product = 0; product < BATCH; product++)
        for (int i = 0; i < M; i++)
          for (int j = 0; j < N; j++) {
            const int row = interleaved ? i : product * M + i;
            const int column = interleaved ? product * N + j : j;
            float sum = 0.0f;
            for (int k = 0; k < K; k++) sum += a[(product * M + i) * K + k] * b[k * N + j];
            const float at = backward ? x[row * columns + column] : sum;
            const float expected = at > 0.0f ? sum : 0.0f;
            assert_true(value_at(&auxiliary, row, column) == at);
            assert_true(value_at(&d, row, column) == expected);
            sums[j] += expected;
            largest = fmaxf(largest, fabsf(sum));
          }
      for (int j = 0; j < N; j++) assert_true(value_at(&gradient, 0, j) == sums[j]);
      if (!backward) assert_true(auxiliary.host_floats[2] == largest);
      drop(context, &auxiliary);
      drop(context, &d);
      drop(context, &gradient);
    }
  drop(context, &left);
  drop(context, &right);
  fp8core_context_destroy(&context);
}

// A and D as columns of one buffer, which no byte of the others may suffer from.
// After it the product allocates nothing; it computes and writes nothing itself.
static void test_reserve(void **state) {
  (void)state;
  const int64_t sizes[][3] = {{1, 1, 1}, {33, 65, 129}, {128, 512, 256}, {700, 96, 64}, {4, 0, 8}, {0, 4, 8}};
  const fp8core_dtype dtypes[] = {FP8CORE_E4M3, FP8CORE_BF16, FP8CORE_FP32};
  for (int size = 0; size < 6; size++)
    for (int dtype = 0; dtype < 3; dtype++) {
      const int64_t m = sizes[size][0];
      const int64_t n = sizes[size][1];
      const int64_t k = sizes[size][2];
      fp8core_context *context = test_context_default();
      const size_t elements = (size_t)(m * n);
      float *filled = malloc(elements * sizeof(float) + 1);
      float *found = malloc(elements * sizeof(float) + 1);
      assert_true(filled && found);
      memset(filled, 0x5a, elements * sizeof(float));
      void *zeros = calloc((size_t)((m + n) * k) + 1, 4);
      assert_non_null(zeros);
      const fp8core_tensor a = test_matrix(test_upload(context, zeros, (size_t)(m * k) * 4), dtypes[dtype], m, k);
      const fp8core_tensor b = test_matrix(test_upload(context, zeros, (size_t)(k * n) * 4), dtypes[dtype], k, n);
      const fp8core_tensor d = test_matrix(test_upload(context, filled, elements * 4), FP8CORE_FP32, m, n);
      assert_ok(fp8core_gemm_reserve(context, NULL, &a, &b, NULL, &d));
      const size_t bytes = fp8core_context_workspace_bytes(context);
      test_download(context, found, d.data, elements * 4);
      assert_memory_equal(found, filled, elements * 4);
      assert_ok(fp8core_gemm(context, NULL, &a, &b, NULL, &d));
      assert_int_equal(fp8core_context_workspace_bytes(context), bytes);
      test_download(context, found, d.data, elements * 4);
      for (size_t i = 0; i < elements; i++) assert_true(found[i] == 0.0f);
      assert_int_equal(fp8core_gemm_reserve(NULL, NULL, &a, &b, NULL, &d), FP8CORE_ERROR_INVALID_ARGUMENT);
      assert_int_equal(fp8core_gemm_reserve(context, NULL, &a, NULL, NULL, &d), FP8CORE_ERROR_INVALID_ARGUMENT);
      test_free(context, a.data);
      test_free(context, b.data);
      test_free(context, d.data);
      free(zeros);
      free(filled);
      free(found);
      fp8core_context_destroy(&context);
    }
}

static void test_columns_of_one_buffer(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  enum { M = 20, N = 24, K = 8, STRIDE = 48 };
  static float values[M * STRIDE];
  static float b[K * N];
  for (int i = 0; i < M * STRIDE; i++) values[i] = (float)(i % 7 - 3);
  for (int i = 0; i < K * N; i++) b[i] = (float)(i % 5 - 2);
  operand buffer = make(context, FP8CORE_FP32, M, STRIDE, values);
  operand right = make(context, FP8CORE_FP32, K, N, b);
  fp8core_tensor a = buffer.device;
  fp8core_tensor d = buffer.device;
  a.shape[1] = K;
  d.shape[1] = N;
  a.row_stride = STRIDE;
  d.row_stride = STRIDE;
  d.data = (unsigned char *)buffer.device.data + 12 * sizeof(float);
  assert_ok(fp8core_gemm(context, NULL, &a, &right.device, NULL, &d));
  fetch(context, &buffer);
  for (int i = 0; i < M; i++)
    for (int j = 0; j < STRIDE; j++) {
      float expected = values[i * STRIDE + j];
      if (j >= 12 && j < 12 + N) {
        expected = 0.0f;
        for (int k = 0; k < K; k++) expected += values[i * STRIDE + k] * b[k * N + j - 12];
      }
      assert_true(value_at(&buffer, i, j) == expected);
    }
  // One column further to the left they meet.
  d.data = (unsigned char *)buffer.device.data + 7 * sizeof(float);
  assert_fails(fp8core_gemm(context, NULL, &a, &right.device, NULL, &d), FP8CORE_ERROR_INVALID_ARGUMENT,
               " bytes) overlaps A at ");
  drop(context, &buffer);
  drop(context, &right);
  fp8core_context_destroy(&context);
}

static void test_threads_and_repeats(void **state) {
  (void)state;
  if (test_on_cuda()) {
    print_message("threads are a CPU's: not tested\n");
    skip();
  }
  enum { M = 150, N = 170, K = 600 };
  static float a[M * K];
  static float b[N * K];
  static unsigned char first[M * N * 2];
  static float first_gradient[N];
  test_random random = {5};
  random_values(&random, a, (int64_t)M * K);
  random_values(&random, b, (int64_t)N * K);
  for (int threads = 1; threads <= 7; threads++) {
    fp8core_context *context = test_context(threads, FP8CORE_ISA_AUTO);
    operand left = make(context, FP8CORE_E5M2, M, K, a);
    operand right = make(context, FP8CORE_E4M3, N, K, b);
    operand d = make(context, FP8CORE_BF16, M, N, NULL);
    operand gradient = make_vector(context, FP8CORE_FP32, N, NULL);
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.transpose_b = 1;
    options.bias_gradient = &gradient.device;
    size_t workspace = 0;
    for (int repeat = 0; repeat < 10; repeat++) {
      memset(d.bytes, 0, d.size);
      assert_ok(fp8core_gemm(context, &options, &left.device, &right.device, NULL, &d.device));
      fetch(context, &d);
      fetch(context, &gradient);
      if (threads == 1 && repeat == 0) {
        memcpy(first, d.bytes, sizeof(first));
        memcpy(first_gradient, gradient.bytes, sizeof(first_gradient));
      }
      assert_memory_equal(first, d.bytes, sizeof(first));
      assert_memory_equal(first_gradient, gradient.bytes, sizeof(first_gradient));
      // Only the first call may allocate.
      if (repeat == 0) workspace = fp8core_context_workspace_bytes(context);
      assert_int_equal(workspace, fp8core_context_workspace_bytes(context));
    }
    drop(context, &left);
    drop(context, &right);
    drop(context, &d);
    drop(context, &gradient);
    fp8core_context_destroy(&context);
  }
}

static void test_reference_accumulation(void **state) {
  (void)state;
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  float a[3] = {16777216.0f, 1.0f, 1.0f};
  float b[3] = {1.0f, 1.0f, 1.0f};
  float d = 0.0f;
  const fp8core_tensor left = fp8core_tensor_matrix(a, FP8CORE_FP32, 1, 3, cpu);
  const fp8core_tensor right = fp8core_tensor_matrix(b, FP8CORE_FP32, 3, 1, cpu);
  const fp8core_tensor result = fp8core_tensor_matrix(&d, FP8CORE_FP32, 1, 1, cpu);
  assert_ok(fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP32, NULL, &left, &right, NULL, &result));
  assert_true(d == 16777216.0f);
  assert_ok(fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, NULL, &left, &right, NULL, &result));
  assert_true(d == 16777218.0f);
  assert_fails(fp8core_gemm_reference((fp8core_accumulation)2, NULL, &left, &right, NULL, &result),
               FP8CORE_ERROR_INVALID_ARGUMENT, "accumulation is 2, expected 0 (FP32) or 1 (FP64)");
  assert_fails(fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, NULL, &left, NULL, NULL, &result),
               FP8CORE_ERROR_INVALID_ARGUMENT, "B is NULL");
}

typedef struct bad_input {
  fp8core_context *context;
  fp8core_gemm_options options;
  fp8core_tensor a;
  fp8core_tensor b;
  fp8core_tensor c;
  fp8core_tensor d;
  fp8core_tensor bias;
  fp8core_tensor auxiliary;
  fp8core_tensor gradient;
  unsigned char *memory;
} bad_input;

// [6, 8] x [8, 10] in one block of memory, 1 KiB each.
static bad_input good_input(fp8core_context *context, unsigned char *memory) {
  bad_input input;
  input.context = context;
  input.memory = memory;
  input.options = fp8core_gemm_options_default();
  input.a = test_matrix(memory, FP8CORE_E4M3, 6, 8);
  input.b = test_matrix(memory + 1024, FP8CORE_E4M3, 8, 10);
  input.c = test_matrix(memory + 2048, FP8CORE_FP32, 6, 10);
  input.d = test_matrix(memory + 3072, FP8CORE_FP32, 6, 10);
  input.bias = test_matrix(memory + 4096, FP8CORE_FP32, 10, 1);
  input.bias.dimensions = 1;
  input.auxiliary = test_matrix(memory + 5120, FP8CORE_BF16, 6, 10);
  input.gradient = input.bias;
  input.gradient.data = memory + 6144;
  return input;
}

static fp8core_status try(bad_input *input) {
  return fp8core_gemm(input->context, &input->options, &input->a, &input->b, &input->c, &input->d);
}

// The message names both and says where they are.
static void refuse_overlap(bad_input *input, const char *one, const void *one_data, const char *other,
                           const void *other_data) {
  char text[120];
  assert_int_equal(try(input), FP8CORE_ERROR_INVALID_ARGUMENT);
  (void)snprintf(text, sizeof(text), "%s at %p (", one, one_data);
  test_assert_message_contains("fp8core_gemm", text);
  (void)snprintf(text, sizeof(text), " bytes) overlaps %s at %p (", other, other_data);
  test_assert_message_contains("fp8core_gemm", text);
  test_assert_message_contains("fp8core_gemm", " bytes), expected distinct memory");
}

#define refuse(input, text) assert_fails(try(&(input)), FP8CORE_ERROR_INVALID_ARGUMENT, text)

static void test_bad_pointers_and_shapes(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 8192);
  assert_ok(fp8core_zero(context, memory, 8192));
  bad_input good = good_input(context, memory);
  assert_ok(try(&good));
  assert_fails(fp8core_gemm(NULL, NULL, &good.a, &good.b, NULL, &good.d), FP8CORE_ERROR_INVALID_ARGUMENT,
               "context is NULL");
  assert_fails(fp8core_gemm(context, NULL, NULL, &good.b, NULL, &good.d), FP8CORE_ERROR_INVALID_ARGUMENT, "A is NULL");
  assert_fails(fp8core_gemm(context, NULL, &good.a, NULL, NULL, &good.d), FP8CORE_ERROR_INVALID_ARGUMENT, "B is NULL");
  assert_fails(fp8core_gemm(context, NULL, &good.a, &good.b, NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "D is NULL");
  bad_input bad = good;
  for (size_t size = 0; size < sizeof(bad.options) + 16; size++) {
    bad.options.size = size;
    if (size != sizeof(bad.options)) assert_fails(try(&bad), FP8CORE_ERROR_VERSION_MISMATCH, "size is");
  }
  bad = good;
  bad.a.data = NULL;
  refuse(bad, "A: data is NULL");
  bad = good;
  bad.b.dtype = (fp8core_dtype)9;
  refuse(bad, "B: dtype is 9");
  bad = good;
  bad.d.dimensions = 1;
  refuse(bad, "D has 1 dimensions, expected 2");
  bad = good;
  bad.a.shape[0] = -6;
  refuse(bad, "A: shape[0] is -6");
  bad = good;
  bad.a.row_stride = 7;
  refuse(bad, "A: row_stride is 7");
  bad = good;
  bad.b.shape[0] = 9;
  refuse(bad, "A is [6, 8] with K = 8, but B is [9, 10] with K = 9");
  bad = good;
  bad.options.transpose_a = 1;
  refuse(bad, "A is [6, 8] transposed with K = 6, but B is [8, 10] with K = 8");
  bad = good;
  bad.d.shape[1] = 11;
  refuse(bad, "D is [6, 11], expected [M, N] = [6, 10]");
  bad = good;
  bad.options.beta = 1.0f;
  bad.c.shape[0] = 5;
  refuse(bad, "C is [5, 10], expected [M, N] = [6, 10]");
  assert_fails(fp8core_gemm(context, &bad.options, &good.a, &good.b, NULL, &good.d), FP8CORE_ERROR_INVALID_ARGUMENT,
               "C is NULL with beta 1");
  bad = good;
  bad.a.device.type = test_on_cuda() ? FP8CORE_DEVICE_CPU : FP8CORE_DEVICE_CUDA;
  refuse(bad, "A is on device");
  bad = good;
  bad.a.shape[0] = INT64_MAX / 4;
  bad.a.row_stride = 64;
  refuse(bad, "2^63");
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

static void test_bad_options(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 8192);
  assert_ok(fp8core_zero(context, memory, 8192));
  const bad_input good = good_input(context, memory);
  bad_input bad = good;
  bad.options.alpha = NAN;
  refuse(bad, "alpha is nan, expected a finite number");
  bad = good;
  bad.options.beta = INFINITY;
  refuse(bad, "beta is inf, expected a finite number");
  bad = good;
  bad.options.epilogue = (fp8core_epilogue)5;
  refuse(bad, "epilogue is 5, expected 0 to 4");
  bad = good;
  bad.options.epilogue = (fp8core_epilogue)-1;
  refuse(bad, "epilogue is -1, expected 0 to 4");
  bad = good;
  bad.options.epilogue = FP8CORE_EPILOGUE_GELU_BACKWARD;
  refuse(bad, "auxiliary is NULL, expected the pre-activations");
  bad = good;
  bad.options.auxiliary = &good.auxiliary;
  refuse(bad, "auxiliary is set, expected NULL without an activation");
  bad.options.epilogue = FP8CORE_EPILOGUE_RELU;
  bad.auxiliary.dtype = FP8CORE_E4M3;
  bad.options.auxiliary = &bad.auxiliary;
  refuse(bad, "auxiliary is e4m3, expected fp32, bf16 or fp16");
  bad.auxiliary = good.auxiliary;
  bad.auxiliary.shape[1] = 9;
  refuse(bad, "auxiliary is [6, 9], expected [M, N] = [6, 10]");
  bad = good;
  bad.options.bias = &bad.bias;
  bad.bias.shape[0] = 9;
  refuse(bad, "bias has 1 dimensions and length 9, expected a vector of N = 10");
  bad.bias = good.d;
  refuse(bad, "bias has 2 dimensions");
  bad.bias = good.bias;
  bad.bias.dtype = FP8CORE_E5M2;
  refuse(bad, "bias is e5m2, expected fp32, bf16 or fp16");
  bad = good;
  bad.options.bias_gradient = &bad.gradient;
  bad.gradient.dtype = FP8CORE_BF16;
  refuse(bad, "bias_gradient is bf16, expected fp32");
  bad.gradient = good.gradient;
  bad.gradient.shape[0] = 6;
  refuse(bad, "bias_gradient has 1 dimensions and length 6, expected a vector of N = 10");
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

static void test_bad_batches(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 8192);
  assert_ok(fp8core_zero(context, memory, 8192));
  const bad_input good = good_input(context, memory);
  bad_input bad = good;
  bad.options.batch = 0;
  refuse(bad, "batch is 0, expected at least 1");
  bad.options.batch = -3;
  refuse(bad, "batch is -3, expected at least 1");
  bad = good;
  bad.options.batch_stride_c = -1;
  refuse(bad, "batch_stride_c is -1, expected 0 or more");
  bad = good;
  bad.options.batch = 2;
  refuse(bad, "batch_stride_d is 0, which makes the [6, 10] matrices overlap");
  bad.options.batch_stride_d = 59;
  refuse(bad, "batch_stride_d is 59");
  bad.options.batch_stride_d = 60;
  assert_ok(try(&bad));
  bad.options.batch_stride_a = INT64_MAX / 2;
  bad.options.batch = 1000;
  refuse(bad, "A: batch 1000 with batch stride");
  bad = good;
  bad.options.batch = 2;
  bad.options.batch_stride_d = 60;
  bad.options.bias_gradient = &good.gradient;
  assert_ok(try(&bad));
  bad.options.bias_gradient = NULL;
  bad.options.epilogue = FP8CORE_EPILOGUE_RELU;
  bad.options.auxiliary = &good.auxiliary;
  refuse(bad, "batch_stride_auxiliary is 0, which makes the [6, 10] matrices overlap");
  bad.options.batch_stride_auxiliary = 59;
  refuse(bad, "batch_stride_auxiliary is 59");
  bad.options.batch_stride_auxiliary = -60;
  refuse(bad, "batch_stride_auxiliary is -60, expected 0 or more");
  bad.options.batch_stride_auxiliary = 60;
  assert_ok(try(&bad));
  // The second one reaches into the sums.
  bad.options.batch_stride_auxiliary = 512;
  bad.options.bias_gradient = &good.gradient;
  refuse_overlap(&bad, "bias_gradient", bad.gradient.data, "auxiliary", bad.auxiliary.data);
  bad.options.bias_gradient = NULL;
  // What is only read may be one matrix for all.
  bad.options.batch_stride_auxiliary = 0;
  bad.options.epilogue = FP8CORE_EPILOGUE_RELU_BACKWARD;
  assert_ok(try(&bad));
  // The second D reaches into the bias, the second A into B.
  bad = good;
  bad.options.batch = 5;
  bad.options.batch_stride_d = 60;
  bad.options.bias = &good.bias;
  refuse_overlap(&bad, "D", bad.d.data, "bias", bad.bias.data);
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

// Every pointer that floats are read through, of every tensor; and on CUDA their data.
static void test_misaligned_pointers(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 8192);
  assert_ok(fp8core_zero(context, memory, 8192));
  const char *const names[] = {"A", "B", "C", "D", "bias", "auxiliary", "bias_gradient"};
  for (int which = 0; which < 7; which++)
    for (int field = 0; field < 4; field++)
      for (int offset = 1; offset < 4; offset++) {
        bad_input bad = good_input(context, memory);
        fp8core_tensor *const tensors[] = {&bad.a, &bad.b, &bad.c, &bad.d, &bad.bias, &bad.auxiliary, &bad.gradient};
        const char *const fields[] = {"scale", "scale_inverse", "amax", "data"};
        fp8core_tensor *const tensor = tensors[which];
        void *const odd = field == 3 ? (unsigned char *)tensor->data + offset : memory + 7168 + offset;
        const int element = (int)fp8core_dtype_size(tensor->dtype);
        bad.options.beta = 1.0f;
        bad.options.bias = &bad.bias;
        bad.options.epilogue = FP8CORE_EPILOGUE_GELU;
        bad.options.auxiliary = &bad.auxiliary;
        bad.options.bias_gradient = &bad.gradient;
        if (field == 0) tensor->scale = odd;
        if (field == 1) tensor->scale_inverse = odd;
        if (field == 2) tensor->amax = odd;
        if (field == 3) tensor->data = odd;
        char text[120];
        (void)snprintf(text, sizeof(text), "%s.%s is %p, expected a multiple of %d", names[which], fields[field], odd,
                       field == 3 ? element : 4);
        if (field == 3 && (!test_on_cuda() || offset % element == 0))
          assert_ok(try(&bad));
        else
          refuse(bad, text);
      }
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

static void test_bad_overlap(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 8192);
  assert_ok(fp8core_zero(context, memory, 8192));
  const bad_input good = good_input(context, memory);
  bad_input bad = good;
  bad.d.data = memory + 44;
  refuse_overlap(&bad, "D", bad.d.data, "A", bad.a.data);
  bad.d.data = memory + 1024 + 76;
  refuse_overlap(&bad, "D", bad.d.data, "B", bad.b.data);
  // Up to the last byte of B and no further.
  bad.d.data = memory + 1024 + 80;
  assert_ok(try(&bad));
  bad = good;
  bad.options.beta = 1.0f;
  bad.c.data = good.d.data;
  assert_ok(try(&bad));
  bad.c.data = (unsigned char *)good.d.data + 4;
  refuse_overlap(&bad, "C", bad.c.data, "D", bad.d.data);
  bad.c.data = good.d.data;
  bad.c.dtype = FP8CORE_BF16;
  refuse_overlap(&bad, "C", bad.c.data, "D", bad.d.data);
  bad.c.dtype = FP8CORE_FP32;
  bad.c.row_stride = 11;
  refuse_overlap(&bad, "C", bad.c.data, "D", bad.d.data);
  bad = good;
  bad.options.bias = &bad.bias;
  bad.bias.data = (unsigned char *)good.d.data + 8;
  refuse_overlap(&bad, "D", bad.d.data, "bias", bad.bias.data);
  bad = good;
  bad.options.epilogue = FP8CORE_EPILOGUE_GELU;
  bad.options.auxiliary = &bad.auxiliary;
  bad.auxiliary.data = good.d.data;
  refuse_overlap(&bad, "D", bad.d.data, "auxiliary", bad.auxiliary.data);
  bad.auxiliary.data = good.a.data;
  refuse_overlap(&bad, "auxiliary", bad.auxiliary.data, "A", bad.a.data);
  bad = good;
  bad.options.bias_gradient = &bad.gradient;
  bad.gradient.data = good.d.data;
  refuse_overlap(&bad, "bias_gradient", bad.gradient.data, "D", bad.d.data);
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

// What fails must leave everything as it was.
static void test_refusal_writes_nothing(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char before[8192];
  unsigned char after[8192];
  for (int i = 0; i < 8192; i++) before[i] = (unsigned char)(i * 7);
  unsigned char *memory = test_upload(context, before, sizeof(before));
  bad_input bad = good_input(context, memory);
  bad.options.bias_gradient = &bad.gradient;
  bad.options.bias = &bad.bias;
  bad.bias.dtype = FP8CORE_E4M3;
  refuse(bad, "bias is e4m3");
  test_download(context, after, memory, sizeof(after));
  assert_memory_equal(before, after, sizeof(before));
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

// As for casts: scalars that are written meet nothing, those that are read nothing that is written.
static void test_scalars_that_alias(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 8192);
  assert_ok(fp8core_zero(context, memory, 8192));
  const bad_input good = good_input(context, memory);
  float *const scalars = (float *)(void *)(memory + 7168);
  bad_input bad = good;
  bad.d.amax = bad.d.data;
  refuse(bad, "D.amax overlaps D,");
  bad = good;
  bad.d.scale = (const float *)bad.d.data + 59;
  refuse(bad, "D.scale overlaps D,");
  bad = good;
  bad.d.amax = bad.a.data;
  refuse(bad, "D.amax overlaps A,");
  bad = good;
  bad.a.scale_inverse = bad.d.amax = scalars;
  refuse(bad, "D.amax overlaps A.scale_inverse,");
  bad = good;
  bad.b.scale_inverse = bad.d.data;
  refuse(bad, "B.scale_inverse overlaps D,");
  bad = good;
  bad.options.auxiliary = &bad.auxiliary;
  bad.options.epilogue = FP8CORE_EPILOGUE_GELU;
  bad.auxiliary.amax = bad.d.data;
  refuse(bad, "auxiliary.amax overlaps D,");
  bad.auxiliary.amax = scalars;
  bad.d.scale = scalars;
  refuse(bad, "auxiliary.amax overlaps D.scale,");
  bad.d.scale = bad.auxiliary.data;
  refuse(bad, "D.scale overlaps auxiliary,");
  // Backward it is read, and its amax is none of the call's.
  bad.options.epilogue = FP8CORE_EPILOGUE_GELU_BACKWARD;
  assert_ok(try(&bad));
  bad = good;
  bad.options.bias_gradient = &bad.gradient;
  bad.gradient.amax = bad.gradient.data;
  refuse(bad, "bias_gradient.amax overlaps bias_gradient,");
  // One amax for all that is written.
  bad.gradient.amax = bad.d.amax = scalars;
  assert_ok(try(&bad));
  assert_fails(fp8core_gemm(context, NULL, &good.a, &good.b, NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "D is NULL");
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

// One row may have any stride, and what has no elements any size.
static void test_sizes_without_memory(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  float *data = test_upload(context, ones, sizeof(ones));
  float *result = test_alloc(context, 64);
  float read[1];
  fp8core_tensor a = test_matrix(data, FP8CORE_FP32, 1, 8);
  fp8core_tensor b = test_matrix(data, FP8CORE_FP32, 1, 8);
  fp8core_tensor d = test_matrix(result, FP8CORE_FP32, 1, 1);
  a.row_stride = b.row_stride = d.row_stride = INT64_MAX;
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_b = 1;
  assert_ok(fp8core_gemm(context, &options, &a, &b, NULL, &d));
  test_download(context, read, result, sizeof(read));
  assert_true(read[0] == 8.0f);
  a = test_matrix(NULL, FP8CORE_E4M3, INT64_MAX, 0);
  b = test_matrix(NULL, FP8CORE_E4M3, 0, 0);
  d = test_matrix(NULL, FP8CORE_FP32, INT64_MAX, 0);
  options = fp8core_gemm_options_default();
  options.batch = INT64_MAX;
  options.batch_stride_a = options.batch_stride_d = INT64_MAX;
  assert_ok(fp8core_gemm(context, &options, &a, &b, NULL, &d));
  test_free(context, data);
  test_free(context, result);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_small_product),
    cmocka_unit_test(test_alpha_beta_bias_scales),
    cmocka_unit_test(test_beta_zero_ignores_c),
    cmocka_unit_test(test_accumulate_in_place),
    cmocka_unit_test(test_empty),
    cmocka_unit_test(test_nan_and_infinity),
    cmocka_unit_test(test_output_formats),
    cmocka_unit_test(test_amax_is_raised_only),
    cmocka_unit_test(test_awkward_sizes),
    cmocka_unit_test(test_extreme_scales),
    cmocka_unit_test(test_activations),
    cmocka_unit_test(test_activations_of_specials),
    cmocka_unit_test(test_batches),
    cmocka_unit_test(test_epilogues_of_batches),
    cmocka_unit_test(test_reserve),
    cmocka_unit_test(test_columns_of_one_buffer),
    cmocka_unit_test(test_threads_and_repeats),
    cmocka_unit_test(test_reference_accumulation),
    cmocka_unit_test(test_bad_pointers_and_shapes),
    cmocka_unit_test(test_scalars_that_alias),
    cmocka_unit_test(test_sizes_without_memory),
    cmocka_unit_test(test_bad_options),
    cmocka_unit_test(test_bad_batches),
    cmocka_unit_test(test_misaligned_pointers),
    cmocka_unit_test(test_bad_overlap),
    cmocka_unit_test(test_refusal_writes_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
