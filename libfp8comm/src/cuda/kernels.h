// Launchers of the CUDA kernels. Each puts its work on the stream and returns a cudaError_t as an int.
#ifndef FP8COMM_CUDA_KERNELS_H
#define FP8COMM_CUDA_KERNELS_H

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

#ifdef __cplusplus
}
#endif

#endif
