#include <stdio.h>

#include "support.h"

static float storage[64];

static void create_fills_every_field(void **unused) {
  (void)unused;
  const int64_t shape[4] = {2, 3, 4, 5};
  for (int dimensions = 0; dimensions <= 4; dimensions++) {
    const fp8core_tensor tensor = fp8core_tensor_create(storage, FP8CORE_E5M2, dimensions, shape);
    int64_t elements = 1;
    for (int i = 0; i < 4; i++) {
      assert_int_equal(tensor.shape[i], i < dimensions ? shape[i] : 0);
      if (i < dimensions) elements *= shape[i];
    }
    assert_ptr_equal(tensor.data, storage);
    assert_int_equal(tensor.dtype, FP8CORE_E5M2);
    assert_int_equal(tensor.dimensions, dimensions);
    assert_int_equal(tensor.row_stride, 0);
    assert_int_equal(tensor.device.type, FP8CORE_DEVICE_CPU);
    assert_int_equal(tensor.device.index, 0);
    assert_int_equal(tensor.scale_granularity, FP8CORE_SCALE_PER_TENSOR);
    assert_null(tensor.scale);
    assert_null(tensor.scale_inverse);
    assert_null(tensor.amax);
    assert_ok(fp8core_tensor_validate(&tensor));
    assert_int_equal(fp8core_tensor_elements(&tensor), elements);
    assert_int_equal(fp8core_tensor_span_bytes(&tensor), elements);
  }
}

static void matrix_fills_every_field(void **unused) {
  (void)unused;
  const fp8core_device device = {FP8CORE_DEVICE_CUDA, 3};
  const fp8core_tensor tensor = fp8core_tensor_matrix(storage, FP8CORE_FP16, 7, 9, device);
  assert_int_equal(tensor.dimensions, 2);
  assert_int_equal(tensor.shape[0], 7);
  assert_int_equal(tensor.shape[1], 9);
  assert_int_equal(tensor.device.type, FP8CORE_DEVICE_CUDA);
  assert_int_equal(tensor.device.index, 3);
  assert_ok(fp8core_tensor_validate(&tensor));
  assert_int_equal(fp8core_tensor_elements(&tensor), 63);
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), 126);
}

// Dimensions beyond the struct's must not be read or written; validation then refuses them.
static void create_with_wrong_dimensions(void **unused) {
  (void)unused;
  const int64_t shape[4] = {2, 3, 4, 5};
  const int wrong[] = {5, 100, -1, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
    char number[16];
    (void)snprintf(number, sizeof(number), "%d", wrong[i]);
    const fp8core_tensor tensor = fp8core_tensor_create(storage, FP8CORE_FP32, wrong[i], shape);
    assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, number);
    assert_int_equal(fp8core_tensor_elements(&tensor), -1);
    assert_int_equal(fp8core_tensor_span_bytes(&tensor), -1);
  }
}

// Without sizes there is no tensor, rather than an empty one, which every call takes.
static void create_without_shape(void **unused) {
  (void)unused;
  for (int dimensions = 1; dimensions <= 4; dimensions++) {
    const fp8core_tensor tensor = fp8core_tensor_create(storage, FP8CORE_FP32, dimensions, NULL);
    assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "dimensions is -1");
  }
}

static void strides(void **unused) {
  (void)unused;
  const int64_t shape[3] = {2, 3, 4};
  fp8core_tensor tensor = fp8core_tensor_create(storage, FP8CORE_FP32, 3, shape);
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), 96);
  tensor.row_stride = 4;
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), 96);
  tensor.row_stride = 10;
  assert_ok(fp8core_tensor_validate(&tensor));
  assert_int_equal(fp8core_tensor_elements(&tensor), 24);
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), (5 * 10 + 4) * 4);
  tensor.row_stride = 3;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "row_stride is 3");
  tensor.row_stride = -4;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "row_stride is -4");
  assert_int_equal(fp8core_tensor_elements(&tensor), -1);
  // One row of one dimension may have any stride that holds it.
  tensor = fp8core_tensor_create(storage, FP8CORE_BF16, 1, shape);
  tensor.row_stride = 1000;
  assert_int_equal(fp8core_tensor_elements(&tensor), 2);
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), 4);
}

static void empty_tensors(void **unused) {
  (void)unused;
  for (int zero = 0; zero < 4; zero++) {
    int64_t shape[4] = {2, 3, 4, 5};
    shape[zero] = 0;
    const fp8core_tensor tensor = fp8core_tensor_create(NULL, FP8CORE_E4M3, 4, shape);
    assert_ok(fp8core_tensor_validate(&tensor));
    assert_int_equal(fp8core_tensor_elements(&tensor), 0);
    assert_int_equal(fp8core_tensor_span_bytes(&tensor), 0);
  }
  // No dimensions at all is one element, which needs memory.
  fp8core_tensor scalar = fp8core_tensor_create(NULL, FP8CORE_FP32, 0, NULL);
  assert_fails(fp8core_tensor_validate(&scalar), FP8CORE_ERROR_INVALID_ARGUMENT, "data is NULL");
  scalar.data = storage;
  assert_int_equal(fp8core_tensor_elements(&scalar), 1);
  assert_int_equal(fp8core_tensor_span_bytes(&scalar), 4);
}

static void wrong_fields(void **unused) {
  (void)unused;
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const fp8core_tensor good = fp8core_tensor_matrix(storage, FP8CORE_FP32, 4, 4, cpu);
  fp8core_tensor tensor = good;
  assert_fails(fp8core_tensor_validate(NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "NULL");
  assert_int_equal(fp8core_tensor_elements(NULL), -1);
  assert_int_equal(fp8core_tensor_span_bytes(NULL), -1);
  tensor.dtype = (fp8core_dtype)5;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "dtype is 5");
  tensor.dtype = (fp8core_dtype)-1;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "dtype is -1");
  tensor = good;
  tensor.shape[1] = -7;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "shape[1] is -7");
  tensor.shape[1] = INT64_MIN;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "-9223372036854775808");
  // Negative sizes beside a size of 0 are wrong all the same.
  tensor.shape[0] = 0;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "shape[1]");
  tensor = good;
  tensor.scale_granularity = (fp8core_scale_granularity)9;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "scale_granularity is 9");
  tensor = good;
  tensor.device.type = (fp8core_device_type)4;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "device.type is 4");
  tensor = good;
  tensor.device.index = 2;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "device.index is 2");
  tensor.device.type = FP8CORE_DEVICE_CUDA;
  assert_ok(fp8core_tensor_validate(&tensor));
  tensor.device.index = -2;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "device.index is -2");
  tensor = good;
  tensor.data = NULL;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "data is NULL");
}

// What is read as floats lies at addresses of floats; data may lie anywhere on the CPU, on CUDA at its elements'.
static void misaligned_pointers(void **unused) {
  (void)unused;
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const fp8core_device cuda = {FP8CORE_DEVICE_CUDA, 0};
  unsigned char *const bytes = (unsigned char *)storage;
  for (int offset = 1; offset < 4; offset++) {
    float *const odd = (float *)(void *)(bytes + offset);
    fp8core_tensor tensor = fp8core_tensor_matrix(bytes + offset, FP8CORE_FP32, 4, 4, cpu);
    char address[80];
    assert_ok(fp8core_tensor_validate(&tensor));
    assert_int_equal(fp8core_tensor_elements(&tensor), 16);
    tensor.device = cuda;
    (void)snprintf(address, sizeof(address), "tensor.data is %p, expected a multiple of 4", (void *)odd);
    assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, address);
    tensor.dtype = FP8CORE_E4M3;
    assert_ok(fp8core_tensor_validate(&tensor));
    for (int i = 0; i < 2; i++) {
      const fp8core_tensor good = fp8core_tensor_matrix(storage, FP8CORE_BF16, 4, 4, i ? cuda : cpu);
      tensor = good;
      tensor.scale = odd;
      (void)snprintf(address, sizeof(address), "tensor.scale is %p, expected a multiple of 4", (void *)odd);
      assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, address);
      assert_int_equal(fp8core_tensor_elements(&tensor), -1);
      tensor = good;
      tensor.scale_inverse = odd;
      (void)snprintf(address, sizeof(address), "tensor.scale_inverse is %p, expected", (void *)odd);
      assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, address);
      tensor = good;
      tensor.amax = odd;
      (void)snprintf(address, sizeof(address), "tensor.amax is %p, expected a multiple of 4", (void *)odd);
      assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, address);
    }
  }
}

static void assert_size_refused(fp8core_dtype dtype, int dimensions, const int64_t *shape, int64_t row_stride) {
  fp8core_tensor tensor = fp8core_tensor_create(storage, dtype, dimensions, shape);
  tensor.row_stride = row_stride;
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT, "2^63");
  assert_int_equal(fp8core_tensor_elements(&tensor), -1);
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), -1);
}

static void overflowing_sizes(void **unused) {
  (void)unused;
  const int64_t two_31 = INT64_C(1) << 31;
  // 2^63 - 1 bytes exactly, and one dimension more than fits, in each way that a product can overflow.
  const int64_t largest[1] = {INT64_MAX};
  const int64_t halves[2] = {INT64_C(1) << 32, two_31};
  const int64_t below[2] = {INT64_C(1) << 31, two_31};
  const int64_t four[4] = {INT64_C(1) << 16, INT64_C(1) << 16, INT64_C(1) << 16, INT64_C(1) << 16};
  const int64_t wraps_to_small[3] = {INT64_C(1) << 32, INT64_C(1) << 32, 4};
  fp8core_tensor tensor = fp8core_tensor_create(storage, FP8CORE_E4M3, 1, largest);
  assert_ok(fp8core_tensor_validate(&tensor));
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), INT64_MAX);
  tensor = fp8core_tensor_create(storage, FP8CORE_E4M3, 2, below);
  assert_ok(fp8core_tensor_validate(&tensor));
  assert_int_equal(fp8core_tensor_elements(&tensor), INT64_C(1) << 62);
  assert_size_refused(FP8CORE_BF16, 1, largest, 0);
  assert_size_refused(FP8CORE_FP32, 1, largest, 0);
  assert_size_refused(FP8CORE_E4M3, 2, halves, 0);
  assert_size_refused(FP8CORE_FP32, 2, below, 0);
  assert_size_refused(FP8CORE_E5M2, 4, four, 0);
  assert_size_refused(FP8CORE_E4M3, 3, wraps_to_small, 0);
  assert_size_refused(FP8CORE_E4M3, 2, below, INT64_MAX);
  // What has no elements, or one row, occupies no memory by its sizes and strides.
  for (int zero = 0; zero < 4; zero++) {
    int64_t empty[4] = {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX};
    empty[zero] = 0;
    tensor = fp8core_tensor_create(NULL, FP8CORE_FP32, 4, empty);
    tensor.row_stride = INT64_MAX;
    assert_ok(fp8core_tensor_validate(&tensor));
    assert_int_equal(fp8core_tensor_elements(&tensor), 0);
    assert_int_equal(fp8core_tensor_span_bytes(&tensor), 0);
  }
  const int64_t row[2] = {1, 8};
  tensor = fp8core_tensor_create(storage, FP8CORE_FP32, 2, row);
  tensor.row_stride = INT64_MAX;
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), 32);
  // The message says how much it would be.
  const int64_t rows[2] = {3, INT64_C(1) << 62};
  tensor = fp8core_tensor_create(storage, FP8CORE_FP32, 2, rows);
  assert_fails(fp8core_tensor_validate(&tensor), FP8CORE_ERROR_INVALID_ARGUMENT,
               "shape [3, 4611686018427387904] with row_stride 0 takes 5.53e+19 bytes of fp32");
  // More than 2^31 elements are ordinary.
  const int64_t large[3] = {3, two_31, 5};
  tensor = fp8core_tensor_create(storage, FP8CORE_FP16, 3, large);
  assert_int_equal(fp8core_tensor_elements(&tensor), 15 * two_31);
  assert_int_equal(fp8core_tensor_span_bytes(&tensor), 30 * two_31);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(create_fills_every_field),
    cmocka_unit_test(matrix_fills_every_field),
    cmocka_unit_test(create_with_wrong_dimensions),
    cmocka_unit_test(create_without_shape),
    cmocka_unit_test(strides),
    cmocka_unit_test(empty_tensors),
    cmocka_unit_test(wrong_fields),
    cmocka_unit_test(misaligned_pointers),
    cmocka_unit_test(overflowing_sizes),
  };
  return cmocka_run_group_tests_name("tensor", tests, NULL, NULL);
}
