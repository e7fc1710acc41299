// cuBLASLt calls, with what its heuristics chose kept a shape.
#ifndef FP8CORE_CUDA_PLANS_H
#define FP8CORE_CUDA_PLANS_H

#include "state.h"

// Everything that the choice of a kernel depends on, in cuBLASLt's column-major terms: D [m, n] = op(A) op(B).
// All fields have one type, so that there is no padding, and keys compare as bytes.
typedef struct fp8core_cuda_plan_key {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t transpose_a;
  int64_t transpose_b;
  int64_t type_a;
  int64_t type_b;
  int64_t type_c;
  int64_t type_d;
  int64_t leading_a;
  int64_t leading_b;
  int64_t leading_c;
  int64_t leading_d;
  int64_t batch;
  int64_t stride_a;
  int64_t stride_b;
  int64_t stride_c;
  int64_t stride_d;
  // Powers of two that divide the addresses (and batch strides), at most 256.
  int64_t alignment_a;
  int64_t alignment_b;
  int64_t alignment_c;
  int64_t alignment_d;
  int64_t epilogue;
  int64_t type_bias;
  int64_t alignment_bias;
  int64_t type_auxiliary;
  int64_t leading_auxiliary;
  int64_t stride_auxiliary;
  int64_t alignment_auxiliary;
  int64_t fast_accumulation;
  int64_t device_factors;
  int64_t has_c;
  int64_t has_scale_a;
  int64_t has_scale_b;
  int64_t has_scale_d;
  int64_t has_amax_d;
  int64_t workspace_bytes;
} fp8core_cuda_plan_key;

// What differs from call to call of one key. Unused pointers are NULL.
typedef struct fp8core_cuda_plan_pointers {
  const void *alpha;
  const void *beta;
  const void *a;
  const void *b;
  const void *c;
  void *d;
  const void *bias;
  void *auxiliary;
  const float *scale_a;
  const float *scale_b;
  const float *scale_d;
  float *amax_d;
  void *workspace;
} fp8core_cuda_plan_pointers;

typedef struct fp8core_cuda_plan fp8core_cuda_plan;

// *plan is NULL where cuBLASLt has no kernel for the key. The pointers tell it alignments; it reads none. Valid until
// the next call.
fp8core_status fp8core_cuda_find_plan(fp8core_context *context, const fp8core_cuda_plan_key *key,
                                      const fp8core_cuda_plan_pointers *pointers, fp8core_cuda_plan **plan);

// *refused: cuBLASLt takes neither this plan nor, from now on, this key; nothing was launched.
fp8core_status fp8core_cuda_run_plan(fp8core_context *context, fp8core_cuda_plan *plan,
                                     const fp8core_cuda_plan_pointers *pointers, int *refused);

// The largest power of two, up to 256, that divides both.
int64_t fp8core_cuda_alignment(const void *pointer, int64_t stride_bytes);

#endif
