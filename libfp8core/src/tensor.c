#include "fp8core/tensor.h"

#include <string.h>

#include "internal.h"

fp8core_tensor fp8core_tensor_create(void *data, fp8core_dtype dtype, int dimensions, const int64_t *shape) {
  fp8core_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.dimensions = dimensions;
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

int64_t fp8core_row_stride(const fp8core_tensor *tensor) {
  return tensor->row_stride != 0 ? tensor->row_stride : fp8core_row_length(tensor);
}

int64_t fp8core_row_count(const fp8core_tensor *tensor) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < tensor->dimensions; i++) rows *= tensor->shape[i];
  return rows;
}

fp8core_status fp8core_check_aligned(const char *name, const char *field, const void *pointer, size_t alignment) {
  if ((uintptr_t)pointer % alignment == 0) return FP8CORE_OK;
  return fp8core_invalid("%s%s%s is %p, expected a multiple of %zu", name, *field ? "." : "", field, pointer,
                         alignment);
}

static fp8core_status validate(const char *name, const fp8core_tensor *tensor) {
  if (!tensor) return fp8core_invalid("%s is NULL, expected a tensor", name);
  const size_t element_bytes = fp8core_dtype_size(tensor->dtype);
  if (element_bytes == 0)
    return fp8core_invalid("%s: dtype is %d, expected 0 to %d", name, (int)tensor->dtype, FP8CORE_DTYPE_COUNT - 1);
  if (tensor->dimensions < 0 || tensor->dimensions > FP8CORE_MAX_DIMENSIONS)
    return fp8core_invalid("%s: dimensions is %d, expected 0 to %d", name, tensor->dimensions, FP8CORE_MAX_DIMENSIONS);
  int empty = 0;
  for (int i = 0; i < tensor->dimensions; i++) {
    if (tensor->shape[i] < 0)
      return fp8core_invalid("%s: shape[%d] is %lld, expected 0 or more", name, i, (long long)tensor->shape[i]);
    empty |= tensor->shape[i] == 0;
  }
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
  // Sizes must stay products of int64_t even where another dimension is 0.
  int64_t bytes = (int64_t)element_bytes;
  for (int i = 0; i < tensor->dimensions; i++) {
    const int64_t last = i == tensor->dimensions - 1;
    const int64_t factor = last ? fp8core_row_stride(tensor) : tensor->shape[i];
    if (factor != 0 && __builtin_mul_overflow(bytes, factor, &bytes))
      return fp8core_invalid(
        "%s: shape [%lld, %lld, %lld, %lld] (first %d used) with row_stride %lld exceeds 2^63 - 1 bytes", name,
        (long long)tensor->shape[0], (long long)tensor->shape[1], (long long)tensor->shape[2],
        (long long)tensor->shape[3], tensor->dimensions, (long long)tensor->row_stride);
  }
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
  if (elements <= 0) return elements;
  const int64_t bytes = (int64_t)fp8core_dtype_size(tensor->dtype);
  return ((fp8core_row_count(tensor) - 1) * fp8core_row_stride(tensor) + fp8core_row_length(tensor)) * bytes;
}

int fp8core_tensors_overlap(const fp8core_tensor *one, const fp8core_tensor *other) {
  const int64_t one_bytes = fp8core_tensor_span_bytes(one);
  const int64_t other_bytes = fp8core_tensor_span_bytes(other);
  if (one_bytes <= 0 || other_bytes <= 0) return 0;
  const uintptr_t one_start = (uintptr_t)one->data;
  const uintptr_t other_start = (uintptr_t)other->data;
  return one_start < other_start + (uintptr_t)other_bytes && other_start < one_start + (uintptr_t)one_bytes;
}
