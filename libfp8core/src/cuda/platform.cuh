// What the kernels need of CUDA. The tests compile the very same kernels for the host, with an emulation of blocks,
// warps and barriers (tests/gpu/emulation.h), so that their logic is checked on machines without a GPU.
#ifndef FP8CORE_CUDA_PLATFORM_CUH
#define FP8CORE_CUDA_PLATFORM_CUH

#if defined(FP8CORE_CUDA_EMULATION)

#  include "emulation.h"

#else

#  include <cuda_runtime.h>

#  if !defined(FP8CORE_NO_HARDWARE_FP8)
#    include <cuda_fp8.h>
#  endif

// The block's shared memory whose size its launch says, at a multiple of 16 bytes.
static __device__ __forceinline__ unsigned char *fp8core_dynamic_shared(void) {
  extern __shared__ uint4 fp8core_dynamic_shared_memory[];
  return (unsigned char *)fp8core_dynamic_shared_memory;
}

// Launches without looking at errors that earlier work of the process left behind.
template <typename Argument>
static int fp8core_launch(void (*kernel)(Argument), dim3 grid, dim3 block, void *stream, const Argument &argument,
                          size_t shared_bytes = 0) {
  cudaLaunchConfig_t configuration = {};
  configuration.gridDim = grid;
  configuration.blockDim = block;
  configuration.dynamicSmemBytes = shared_bytes;
  configuration.stream = (cudaStream_t)stream;
  // Without it, 48 KiB are the most.
  if (shared_bytes > 48 << 10) {
    const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error != cudaSuccess) return (int)error;
  }
  return (int)cudaLaunchKernelEx(&configuration, kernel, argument);
}

#endif

#define FP8CORE_WARP 32

static __device__ __forceinline__ unsigned fp8core_linear_thread(void) {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ uint32_t fp8core_warp_max(uint32_t value) {
  for (int offset = FP8CORE_WARP / 2; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

static __device__ __forceinline__ uint32_t fp8core_warp_sum(uint32_t value) {
  for (int offset = FP8CORE_WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

#endif
