// What the C files of the CUDA backend share.
#ifndef FP8CORE_CUDA_STATE_H
#define FP8CORE_CUDA_STATE_H

#include <cuda_runtime_api.h>

#include "cublaslt.h"
#include "internal.h"
#include "kernels.h"

typedef struct fp8core_cuda_plans fp8core_cuda_plans;

typedef struct fp8core_cuda_state {
  int device;
  // Compute capability, as 10 * major + minor.
  int capability;
  cudaStream_t stream;
  int owns_stream;
  fp8core_cuda_target target;
  cublasLtHandle_t blas;
  fp8core_cuda_plans *plans;
} fp8core_cuda_state;

static inline fp8core_cuda_state *fp8core_cuda_state_of(const fp8core_context *context) {
  return context->backend_state;
}

// FP8CORE_OK for cudaSuccess; else a status with the API's own text, after `what`.
fp8core_status fp8core_cuda_check(cudaError_t error, const char *what);
static inline fp8core_status fp8core_cuda_check_launch(int error, const char *what) {
  return fp8core_cuda_check((cudaError_t)error, what);
}
fp8core_status fp8core_cuda_check_blas(cublasStatus_t error, const char *what);

// Makes the context's device the thread's current one, and back: a caller's choice of device is not ours to change.
fp8core_status fp8core_cuda_enter(const fp8core_context *context, int *previous);
void fp8core_cuda_leave(const fp8core_context *context, int previous);

fp8core_status fp8core_cuda_plans_create(fp8core_cuda_plans **plans);
void fp8core_cuda_plans_destroy(fp8core_cuda_plans **plans);

// The context's device is current.
fp8core_status fp8core_cuda_gemm(fp8core_context *context, const fp8core_gemm_job *job);

#endif
