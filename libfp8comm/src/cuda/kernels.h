// Launchers of the CUDA kernels. Each puts its work on the stream and returns a cudaError_t as an int.
#ifndef FP8COMM_CUDA_KERNELS_H
#define FP8COMM_CUDA_KERNELS_H

#include "fp8comm/collectives.h"
#include "fp8core/cast.h"
#include "fp8core/dtype.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// sum[i] = own[i] + others[i] + others[stride + i] + ... in FP32 and in this order; all device memory.
typedef struct fp8comm_sum_job {
  // E4M3 or E5M2.
  fp8core_dtype dtype;
  const unsigned char *own;
  const unsigned char *others;
  size_t stride;
  int other_count;
  float *sum;
  int64_t count;
} fp8comm_sum_job;

int fp8comm_cuda_launch_sum(const fp8comm_sum_job *job, void *stream);

// One step of a plain reduction: destination[i], in the accumulator's format, takes source[i], an element (first: as it
// is, 16-bit formats only; add: combined with what is there); or the element destination[i] is source[i], the
// accumulator, rounded (16-bit formats only). All device memory, at any address.
typedef struct fp8comm_reduce_job {
  fp8comm_dtype dtype;
  fp8comm_reduction reduction;
  void *destination;
  const void *source;
  int64_t count;
} fp8comm_reduce_job;

int fp8comm_cuda_launch_widen(const fp8comm_reduce_job *job, void *stream);
int fp8comm_cuda_launch_add(const fp8comm_reduce_job *job, void *stream);
int fp8comm_cuda_launch_narrow(const fp8comm_reduce_job *job, void *stream);

// Error feedback: x = values[i] * values_scale_inverse + lost[i] * lost_scale. All device memory; scales that are NULL
// are 1.
typedef struct fp8comm_feedback_job {
  int64_t count;
  fp8core_dtype dtype;
  // In rows of `columns`, with `stride` elements between the starts of two.
  const void *values;
  int64_t columns;
  int64_t stride;
  const float *values_scale_inverse;
  // BF16, without gaps.
  uint16_t *lost;
  const float *lost_scale;
  // What x is in units of.
  const float *scale_inverse;
  // Measuring: raised to the largest |x * scale_inverse|.
  float *amax;
  // Casting: codes = cast(x * scale_inverse * scale), to nearest, saturating; the statistics, which may be NULL, but
  // for their `elements`; and lost = x * scale_inverse - codes * code_scale_inverse. E4M3 or E5M2.
  fp8core_dtype wire;
  unsigned char *codes;
  const float *scale;
  const float *code_scale_inverse;
  fp8core_cast_statistics *statistics;
} fp8comm_feedback_job;

int fp8comm_cuda_launch_feedback_measure(const fp8comm_feedback_job *job, void *stream);
int fp8comm_cuda_launch_feedback_cast(const fp8comm_feedback_job *job, void *stream);

#ifdef __cplusplus
}
#endif

#endif
