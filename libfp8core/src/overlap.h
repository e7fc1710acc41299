// Which memory of a call may meet which: exact for rows of one buffer, so that columns of it serve as distinct
// matrices.
#ifndef FP8CORE_OVERLAP_H
#define FP8CORE_OVERLAP_H

#include "internal.h"

// Memory that a tensor, or a batch of them, covers, or one of its scalars.
typedef struct fp8core_region {
  const char *name;
  // Of a scalar, its field in the tensor, or "" where it is in none; NULL of data.
  const char *field;
  uintptr_t start;
  // Bytes from the first element to the end of the last; 0: none.
  uintptr_t span;
  // Where every row lies within [start + i * row_stride, start + i * row_stride + row_width); 0 where that is not
  // known.
  uintptr_t row_stride;
  uintptr_t row_width;
  int written;
} fp8core_region;

fp8core_status fp8core_region_of(const char *name, const fp8core_tensor *tensor, int64_t batch, int64_t batch_stride,
                                 fp8core_region *region);
int fp8core_regions_overlap(const fp8core_region *one, const fp8core_region *other);
// The error of two that do.
fp8core_status fp8core_overlap(const fp8core_region *one, const fp8core_region *other, const char *expected);
// That error where they overlap.
fp8core_status fp8core_refuse_overlap(const fp8core_region *one, const fp8core_region *other);

// The scalars of a call: scales, amaxes, statistics.
typedef struct fp8core_scalars {
  fp8core_region regions[24];
  int count;
} fp8core_scalars;

// NULL pointers are left out.
void fp8core_add_scalar(fp8core_scalars *scalars, const char *name, const char *field, const void *pointer,
                        size_t bytes, int written);
// The tensor's scales, and its amax where the tensor is written.
void fp8core_add_scalars_of(fp8core_scalars *scalars, const char *name, const fp8core_tensor *tensor, int written);
// Refuses scalars that are written into data or into other scalars, and those in data that is written. One amax of
// several tensors is fine: it is raised to the largest of them all.
fp8core_status fp8core_check_scalars(const fp8core_scalars *scalars, const fp8core_region *const *data, int count);

#endif
