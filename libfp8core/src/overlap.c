#include "overlap.h"

#include <string.h>

fp8core_status fp8core_region_of(const char *name, const fp8core_tensor *tensor, int64_t batch, int64_t batch_stride,
                                 fp8core_region *region) {
  memset(region, 0, sizeof(*region));
  region->name = name;
  const int64_t element = (int64_t)fp8core_dtype_size(tensor->dtype);
  const int64_t rows = fp8core_row_count(tensor);
  const int64_t columns = fp8core_row_length(tensor);
  if (rows == 0 || columns == 0) return FP8CORE_OK;
  // Single rows of a batch are rows a batch stride apart.
  const int64_t stride = rows == 1 && batch > 1 && batch_stride >= columns ? batch_stride : fp8core_row_stride(tensor);
  int64_t batch_span;
  int64_t span;
  if (__builtin_mul_overflow(batch - 1, batch_stride, &batch_span) ||
      __builtin_add_overflow(rows == 1 ? 0 : (rows - 1) * stride, batch_span, &span) ||
      __builtin_add_overflow(span, columns, &span) || __builtin_mul_overflow(span, element, &span))
    return fp8core_invalid("%s: batch %lld with batch stride %lld exceeds 2^63 - 1 bytes", name, (long long)batch,
                           (long long)batch_stride);
  region->start = (uintptr_t)tensor->data;
  region->span = (uintptr_t)span;
  int64_t width = 0;
  if (batch_span == 0 || batch_stride % stride == 0)
    width = columns;
  else if (batch_span <= stride - columns)
    width = batch_span + columns;
  if (width == stride || span == width * element) {
    // One run of bytes.
    region->row_stride = region->span;
    region->row_width = region->span;
  } else if (width != 0) {
    region->row_stride = (uintptr_t)(stride * element);
    region->row_width = (uintptr_t)(width * element);
  }
  return FP8CORE_OK;
}

static int is_run(const fp8core_region *region) { return region->row_width == region->span; }

int fp8core_regions_overlap(const fp8core_region *one, const fp8core_region *other) {
  if (one->span == 0 || other->span == 0) return 0;
  if (one->start >= other->start + other->span || other->start >= one->start + one->span) return 0;
  // A run of bytes goes with any stride.
  const uintptr_t stride = is_run(one) ? other->row_stride : one->row_stride;
  if (stride == 0 || (!is_run(one) && !is_run(other) && one->row_stride != other->row_stride)) return 1;
  const uintptr_t offset = other->start >= one->start ? (other->start - one->start) % stride
                                                      : (stride - (one->start - other->start) % stride) % stride;
  return offset < one->row_width || offset + other->row_width > stride;
}

static const char *field_of(const fp8core_region *region) { return region->field ? region->field : ""; }

fp8core_status fp8core_overlap(const fp8core_region *one, const fp8core_region *other, const char *expected) {
  if (!one->field && !other->field)
    return fp8core_invalid("%s at %p (%llu bytes) overlaps %s at %p (%llu bytes), expected %s", one->name,
                           (const void *)one->start, (unsigned long long)one->span, other->name,
                           (const void *)other->start, (unsigned long long)other->span, expected);
  return fp8core_invalid("%s%s%s overlaps %s%s%s, expected %s", one->name, *field_of(one) ? "." : "", field_of(one),
                         other->name, *field_of(other) ? "." : "", field_of(other), expected);
}

fp8core_status fp8core_refuse_overlap(const fp8core_region *one, const fp8core_region *other) {
  if (!fp8core_regions_overlap(one, other)) return FP8CORE_OK;
  return fp8core_overlap(one, other, "distinct memory");
}

void fp8core_add_scalar(fp8core_scalars *scalars, const char *name, const char *field, const void *pointer,
                        size_t bytes, int written) {
  if (!pointer) return;
  const fp8core_region region = {name, field, (uintptr_t)pointer, bytes, bytes, bytes, written};
  scalars->regions[scalars->count++] = region;
}

void fp8core_add_scalars_of(fp8core_scalars *scalars, const char *name, const fp8core_tensor *tensor, int written) {
  fp8core_add_scalar(scalars, name, "scale", tensor->scale, sizeof(float), 0);
  fp8core_add_scalar(scalars, name, "scale_inverse", tensor->scale_inverse, sizeof(float), 0);
  if (written) fp8core_add_scalar(scalars, name, "amax", tensor->amax, sizeof(float), 1);
}

fp8core_status fp8core_check_scalars(const fp8core_scalars *scalars, const fp8core_region *const *data, int count) {
  for (int i = 0; i < scalars->count; i++) {
    const fp8core_region *const scalar = &scalars->regions[i];
    for (int j = 0; j < count; j++)
      if (scalar->written || data[j]->written) FP8CORE_TRY(fp8core_refuse_overlap(scalar, data[j]));
    for (int j = 0; j < i; j++) {
      const fp8core_region *const other = &scalars->regions[j];
      const int one_amax = scalar->written && other->written && scalar->start == other->start &&
                           scalar->span == sizeof(float) && other->span == sizeof(float);
      if ((scalar->written || other->written) && !one_amax) FP8CORE_TRY(fp8core_refuse_overlap(scalar, other));
    }
  }
  return FP8CORE_OK;
}
