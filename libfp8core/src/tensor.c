#include "fp8core/tensor.h"

#include <stdio.h>
#include <string.h>

#include "internal.h"

fp8core_tensor fp8core_tensor_create(void *data, fp8core_dtype dtype, int dimensions, const int64_t *shape) {
  fp8core_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = dtype;
  // One that every call refuses, rather than sizes of 0, which all take.
  tensor.dimensions = !shape && dimensions > 0 ? -1 : dimensions;
  if (!shape) return tensor;
  for (int i = 0; i < dimensions && i < FP8CORE_MAX_DIMENSIONS; i++) tensor.shape[i] = shape[i];
  return tensor;
}

fp8core_tensor fp8core_tensor_matrix(void *data, fp8core_dtype dtype, int64_t rows, int64_t columns,
                                     fp8core_device device) {
  const int64_t shape[2] = {rows, columns};
  fp8core_tensor tensor = fp8core_tensor_create(data, dtype, 2, shape);
  tensor.device = device;
  return tensor;
}

int64_t fp8core_row_length(const fp8core_tensor *tensor) {
  return tensor->dimensions == 0 ? 1 : tensor->shape[tensor->dimensions - 1];
}

static int is_empty(const fp8core_tensor *tensor) {
  int empty = 0;
  for (int i = 0; i < tensor->dimensions; i++) empty |= tensor->shape[i] == 0;
  return empty;
}

int64_t fp8core_row_count(const fp8core_tensor *tensor) {
  int64_t rows = 1;
  if (is_empty(tensor)) return 0;
  for (int i = 0; i + 1 < tensor->dimensions; i++) rows *= tensor->shape[i];
  return rows;
}

fp8core_status fp8core_check_aligned(const char *name, const char *field, const void *pointer, size_t alignment) {
  if ((uintptr_t)pointer % alignment == 0) return FP8CORE_OK;
  return fp8core_invalid("%s%s%s is %p, expected a multiple of %zu", name, *field ? "." : "", field, pointer,
                         alignment);
}

int64_t fp8core_row_stride(const fp8core_tensor *tensor) {
  return tensor->row_stride != 0 && fp8core_row_count(tensor) > 1 ? tensor->row_stride : fp8core_row_length(tensor);
}

// Bytes from the first element to the end of the last, of a tensor that has elements. False where they reach 2^63.
static int span_fits(const fp8core_tensor *tensor, int64_t *bytes) {
  const int64_t length = fp8core_row_length(tensor);
  int64_t rows = 1;
  int64_t span;
  for (int i = 0; i + 1 < tensor->dimensions; i++)
    if (__builtin_mul_overflow(rows, tensor->shape[i], &rows)) return 0;
  return !__builtin_mul_overflow(rows - 1, tensor->row_stride ? tensor->row_stride : length, &span) &&
         !__builtin_add_overflow(span, length, &span) &&
         !__builtin_mul_overflow(span, (int64_t)fp8core_dtype_size(tensor->dtype), bytes);
}

static fp8core_status refuse_size(const char *name, const fp8core_tensor *tensor) {
  const double length = (double)fp8core_row_length(tensor);
  char shape[128] = "";
  int used = 0;
  double rows = 1.0;
  for (int i = 0; i < tensor->dimensions; i++) {
    used += snprintf(shape + used, sizeof(shape) - (size_t)used, i ? ", %lld" : "%lld", (long long)tensor->shape[i]);
    if (i + 1 < tensor->dimensions) rows *= (double)tensor->shape[i];
  }
  const double stride = tensor->row_stride ? (double)tensor->row_stride : length;
  return fp8core_invalid("%s: shape [%s] with row_stride %lld takes %.3g bytes of %s, expected fewer than 2^63", name,
                         shape, (long long)tensor->row_stride,
                         ((rows - 1.0) * stride + length) * (double)fp8core_dtype_size(tensor->dtype),
                         fp8core_dtype_name(tensor->dtype));
}

static fp8core_status validate(const char *name, const fp8core_tensor *tensor) {
  if (!tensor) return fp8core_invalid("%s is NULL, expected a tensor", name);
  const size_t element_bytes = fp8core_dtype_size(tensor->dtype);
  if (element_bytes == 0)
    return fp8core_invalid("%s: dtype is %d, expected 0 to %d", name, (int)tensor->dtype, FP8CORE_DTYPE_COUNT - 1);
  if (tensor->dimensions < 0 || tensor->dimensions > FP8CORE_MAX_DIMENSIONS)
    return fp8core_invalid("%s: dimensions is %d, expected 0 to %d", name, tensor->dimensions, FP8CORE_MAX_DIMENSIONS);
  for (int i = 0; i < tensor->dimensions; i++)
    if (tensor->shape[i] < 0)
      return fp8core_invalid("%s: shape[%d] is %lld, expected 0 or more", name, i, (long long)tensor->shape[i]);
  const int empty = is_empty(tensor);
  const int64_t length = fp8core_row_length(tensor);
  if (tensor->row_stride < 0 || (tensor->row_stride != 0 && tensor->row_stride < length))
    return fp8core_invalid("%s: row_stride is %lld, expected 0 or at least the row length %lld", name,
                           (long long)tensor->row_stride, (long long)length);
  if (tensor->scale_granularity != FP8CORE_SCALE_PER_TENSOR)
    return fp8core_invalid("%s: scale_granularity is %d, expected %d (per tensor)", name,
                           (int)tensor->scale_granularity, FP8CORE_SCALE_PER_TENSOR);
  if (tensor->device.type != FP8CORE_DEVICE_CPU && tensor->device.type != FP8CORE_DEVICE_CUDA)
    return fp8core_invalid("%s: device.type is %d, expected 0 (CPU) or 1 (CUDA)", name, (int)tensor->device.type);
  if (tensor->device.index < 0 || (tensor->device.type == FP8CORE_DEVICE_CPU && tensor->device.index != 0))
    return fp8core_invalid("%s: device.index is %d, expected %s", name, tensor->device.index,
                           tensor->device.type == FP8CORE_DEVICE_CPU ? "0 for the CPU" : "0 or more");
  int64_t bytes;
  if (!empty && !span_fits(tensor, &bytes)) return refuse_size(name, tensor);
  if (!tensor->data && !empty) return fp8core_invalid("%s: data is NULL, expected memory for its elements", name);
  FP8CORE_TRY(fp8core_check_aligned(name, "scale", tensor->scale, sizeof(float)));
  FP8CORE_TRY(fp8core_check_aligned(name, "scale_inverse", tensor->scale_inverse, sizeof(float)));
  FP8CORE_TRY(fp8core_check_aligned(name, "amax", tensor->amax, sizeof(float)));
  return tensor->device.type == FP8CORE_DEVICE_CPU ? FP8CORE_OK
                                                   : fp8core_check_aligned(name, "data", tensor->data, element_bytes);
}

fp8core_status fp8core_tensor_validate(const fp8core_tensor *tensor) { return validate("tensor", tensor); }

fp8core_status fp8core_check_tensor(const fp8core_context *context, const char *name, const fp8core_tensor *tensor) {
  FP8CORE_TRY(validate(name, tensor));
  const fp8core_device device = fp8core_context_device(context);
  if (tensor->device.type != device.type || tensor->device.index != device.index)
    return fp8core_invalid("%s is on device %s %d, expected the context's %s %d", name,
                           tensor->device.type == FP8CORE_DEVICE_CPU ? "CPU" : "CUDA", tensor->device.index,
                           device.type == FP8CORE_DEVICE_CPU ? "CPU" : "CUDA", device.index);
  return FP8CORE_OK;
}

int64_t fp8core_tensor_elements(const fp8core_tensor *tensor) {
  if (fp8core_tensor_validate(tensor) != FP8CORE_OK) return -1;
  return fp8core_row_count(tensor) * fp8core_row_length(tensor);
}

int64_t fp8core_tensor_span_bytes(const fp8core_tensor *tensor) {
  const int64_t elements = fp8core_tensor_elements(tensor);
  int64_t bytes = 0;
  if (elements > 0) (void)span_fits(tensor, &bytes);
  return elements < 0 ? -1 : bytes;
}
