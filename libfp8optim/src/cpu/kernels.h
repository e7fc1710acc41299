// The optimizer's kernels on the CPU, one table a tier. Each gives the bits of rules.h.
#ifndef FP8OPTIM_CPU_KERNELS_H
#define FP8OPTIM_CPU_KERNELS_H

#include "rules.h"

// What is constant over a tensor and a step.
typedef struct fp8optim_update_job {
  fp8core_dtype dtype[FP8OPTIM_PARTS];
  fp8core_dtype gradient_dtype;
  fp8optim_constants constants;
  // Of the master's rounding: see fp8core_draw().
  int stochastic;
  uint64_t seed;
  uint32_t tensor_id;
  uint32_t step;
} fp8optim_update_job;

typedef struct fp8optim_kernels {
  // Updates contiguous elements. data[FP8OPTIM_WEIGHT] may be NULL. Element 0 has the index `first_element`, a multiple
  // of 4, in its tensor. Raises scaled_amax.
  void (*update)(const fp8optim_update_job *job, const void *gradient, void *const data[FP8OPTIM_PARTS],
                 uint64_t first_element, int64_t elements, uint32_t scaled_amax[FP8OPTIM_STATES]);
  // The sum of the squares of at most FP8OPTIM_CHUNK elements as they are stored: element i in lane i % FP8OPTIM_LANES
  // of the format of fp8optim_squares_in_fp32(), then the lanes in order in FP64. Raises *amax to the largest
  // magnitude.
  double (*measure)(fp8core_dtype dtype, const void *data, int64_t elements, uint32_t *amax);
} fp8optim_kernels;

extern const fp8optim_kernels fp8optim_kernels_scalar;
extern const fp8optim_kernels fp8optim_kernels_avx2;
extern const fp8optim_kernels fp8optim_kernels_avx512;

// Vectors that a SIMD tier updates together, stage by stage: the chain from a gradient to its weight is longer than
// what a CPU holds of it at a time, so that one vector after the other would wait.
#define BLOCK_VECTORS 4

// The table of the context's tier.
const fp8optim_kernels *fp8optim_cpu_kernels(fp8core_isa isa);

#endif
