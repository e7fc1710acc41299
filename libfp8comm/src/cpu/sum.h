// Sums of ranks' FP8 codes, without a place for the sums: what becomes of them is computed in the same pass. So
// contributions are read twice, once for the largest magnitude and once for the codes of the mean, 1 byte an element
// each, instead of sums of 4 bytes that would be written and read for every rank.
//
// Every tier gives the bits of fp8comm_sum_rule() and of a cast from there. The codes are those of finite values.
#ifndef FP8COMM_CPU_SUM_H
#define FP8COMM_CPU_SUM_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/context.h"
#include "fp8core/dtype.h"

// Contributions: `count` vectors of codes, added up in this order.
typedef struct fp8comm_sum {
  fp8core_dtype dtype;
  int count;
  const unsigned char *const *codes;
} fp8comm_sum;

typedef struct fp8comm_sum_kernels {
  // Of the elements from `begin` on: the sums.
  void (*sum)(const fp8comm_sum *sum, size_t begin, size_t elements, float *sums);
  // The bits of their largest magnitude.
  uint32_t (*largest)(const fp8comm_sum *sum, size_t begin, size_t elements);
  // sum * scale_inverse, cast with `scale` to the same format, to nearest and saturating. `codes` may be where the
  // first contribution is. Gives what largest() does.
  uint32_t (*requantise)(const fp8comm_sum *sum, size_t begin, size_t elements, float scale_inverse, float scale,
                         unsigned char *codes);
} fp8comm_sum_kernels;

extern const fp8comm_sum_kernels fp8comm_sum_scalar;
extern const fp8comm_sum_kernels fp8comm_sum_avx2;
extern const fp8comm_sum_kernels fp8comm_sum_avx512;

const fp8comm_sum_kernels *fp8comm_sum_kernels_of(fp8core_isa isa);

// The same in the context's tier and threads, of which results do not depend.
void fp8comm_sum_all(const fp8core_context *context, const fp8comm_sum *sum, size_t begin, size_t elements,
                     float *sums);
uint32_t fp8comm_sum_largest(const fp8core_context *context, const fp8comm_sum *sum, size_t begin, size_t elements);
uint32_t fp8comm_sum_requantise(const fp8core_context *context, const fp8comm_sum *sum, size_t begin, size_t elements,
                                float scale_inverse, float scale, unsigned char *codes);

#endif
