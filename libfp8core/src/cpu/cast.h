// Casts on the CPU: the family's kernels, and the table of them that each tier has.
#ifndef FP8CORE_CPU_CAST_H
#define FP8CORE_CPU_CAST_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/dtype.h"

// What every element of a cast shares.
typedef struct fp8core_cast_parameters {
  float scale_inverse;
  float scale;
  int saturate;
  uint64_t seed;
  uint32_t tensor_id;
  uint32_t step;
  // Stores bypass the caches; the output of such a call starts at a multiple of 64 bytes.
  int streaming;
  // How far ahead of its reads a kernel prefetches, in bytes.
  int64_t prefetch;
} fp8core_cast_parameters;

// Sums and maxima only, so that they do not depend on how the elements are divided.
typedef struct fp8core_cast_totals {
  // FP32 bits of the largest magnitude, where NaN > infinity > finite.
  uint32_t amax;
  int64_t saturated;
  int64_t flushed_to_zero;
  int64_t nonfinite;
} fp8core_cast_totals;

// Casts `elements` contiguous elements, the first of which is number `first_element` of its tensor. Source and
// destination may be the same memory where the destination's elements are no wider: a block is read before it is
// written, in order. SIMD kernels want positive finite scales and at most 2^30 elements a call.
typedef void (*fp8core_cast_kernel)(const fp8core_cast_parameters *parameters, const void *source, void *destination,
                                    int64_t elements, uint64_t first_element, fp8core_cast_totals *totals);

// Raises totals->amax. At most 2^30 elements a call.
typedef void (*fp8core_amax_kernel)(float scale_inverse, const void *source, int64_t elements,
                                    fp8core_cast_totals *totals);

// Transposes a full tile of FP8CORE_TILE x FP8CORE_TILE elements; strides in bytes. Streaming: stores may bypass the
// caches, the caller fences; the destination's rows start at multiples of 64 bytes.
typedef void (*fp8core_transpose_kernel)(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                                         int64_t destination_stride, int streaming);
// Copies whole lines of 64 bytes, both at multiples of 64 bytes, past the caches; the caller fences.
typedef void (*fp8core_copy_kernel)(unsigned char *destination, const unsigned char *source, int64_t bytes);
#define FP8CORE_TILE 64

// How far ahead to prefetch where elements follow one another: the hardware's own prefetch stops at the end of a page
// of 4 KiB.
#define FP8CORE_PREFETCH_BYTES 6144

typedef struct fp8core_cast_kernels {
  // [source dtype][destination dtype][nearest, stochastic]
  fp8core_cast_kernel cast[FP8CORE_DTYPE_COUNT][FP8CORE_DTYPE_COUNT][2];
  // [source dtype]
  fp8core_amax_kernel amax[FP8CORE_DTYPE_COUNT];
  // [log2 of the element's bytes]
  fp8core_transpose_kernel transpose[3];
  fp8core_copy_kernel copy;
} fp8core_cast_kernels;

// Whole tables, as data: a function in the file of a tier may hold the tier's instructions from its first one on, so
// that none is called, not even to hand out a table, before the CPU is known to have them.
extern const fp8core_cast_kernels fp8core_cast_scalar;
extern const fp8core_cast_kernels fp8core_cast_avx2;
extern const fp8core_cast_kernels fp8core_cast_avx512;

// What the tables of higher tiers share with the scalar one.
void fp8core_transpose_2(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                         int64_t destination_stride, int streaming);
void fp8core_transpose_4(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                         int64_t destination_stride, int streaming);

#endif
