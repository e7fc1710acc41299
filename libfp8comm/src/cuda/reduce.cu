// Sums, minima and maxima of plain elements in device memory: the steps that reductions.c does on the host.
#include "kernels.h"
#include "platform.cuh"

#include "reduction_rules.h"

#include <string.h>

namespace {

constexpr int threads = 256;
// Enough to fill a GPU; they share what is more.
constexpr int64_t most_blocks = 2048;

// Elements may lie at any address.
template <typename Type>
static __device__ __forceinline__ Type load(const void *from, int64_t index) {
  if ((uintptr_t)from % sizeof(Type) == 0) return ((const Type *)from)[index];
  Type value;
  memcpy(&value, (const unsigned char *)from + index * (int64_t)sizeof(Type), sizeof(Type));
  return value;
}

template <typename Type>
static __device__ __forceinline__ void store(void *to, int64_t index, Type value) {
  if ((uintptr_t)to % sizeof(Type) == 0) {
    ((Type *)to)[index] = value;
  } else {
    memcpy((unsigned char *)to + index * (int64_t)sizeof(Type), &value, sizeof(Type));
  }
}

// How each format is combined, and in what.
struct fp32 {
  typedef float stored;
  typedef float wide;
  static __device__ __forceinline__ float widen(float value) { return value; }
  static __device__ __forceinline__ float sum(float one, float other) { return fp8comm_sum_fp32(one, other); }
  static __device__ __forceinline__ float least(float one, float other) { return fp8comm_min_fp32(one, other); }
  static __device__ __forceinline__ float most(float one, float other) { return fp8comm_max_fp32(one, other); }
};

template <fp8core_dtype Dtype>
struct narrow : fp32 {
  typedef uint16_t stored;
  static __device__ __forceinline__ float widen(uint16_t code) { return fp8comm_widen_rule(Dtype, code); }
};
typedef narrow<FP8CORE_BF16> bf16;
typedef narrow<FP8CORE_FP16> fp16;

struct fp64 {
  typedef double stored;
  typedef double wide;
  static __device__ __forceinline__ double widen(double value) { return value; }
  static __device__ __forceinline__ double sum(double one, double other) { return fp8comm_sum_fp64(one, other); }
  static __device__ __forceinline__ double least(double one, double other) { return fp8comm_min_fp64(one, other); }
  static __device__ __forceinline__ double most(double one, double other) { return fp8comm_max_fp64(one, other); }
};

struct int64 {
  typedef int64_t stored;
  typedef int64_t wide;
  static __device__ __forceinline__ int64_t widen(int64_t value) { return value; }
  static __device__ __forceinline__ int64_t sum(int64_t one, int64_t other) { return fp8comm_sum_int64(one, other); }
  static __device__ __forceinline__ int64_t least(int64_t one, int64_t other) { return fp8comm_min_int64(one, other); }
  static __device__ __forceinline__ int64_t most(int64_t one, int64_t other) { return fp8comm_max_int64(one, other); }
};

// Has no sum, which nobody asks for.
struct byte {
  typedef uint8_t stored;
  typedef uint8_t wide;
  static __device__ __forceinline__ uint8_t widen(uint8_t value) { return value; }
  static __device__ __forceinline__ uint8_t sum(uint8_t one, uint8_t) { return one; }
  static __device__ __forceinline__ uint8_t least(uint8_t one, uint8_t other) { return fp8comm_min_byte(one, other); }
  static __device__ __forceinline__ uint8_t most(uint8_t one, uint8_t other) { return fp8comm_max_byte(one, other); }
};

template <typename Format>
static __global__ __launch_bounds__(threads) void add_kernel(const fp8comm_reduce_job job) {
  typedef typename Format::wide wide;
  const int64_t step = (int64_t)gridDim.x * threads;
  for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < job.count; i += step) {
    const wide one = load<wide>(job.destination, i);
    const wide other = Format::widen(load<typename Format::stored>(job.source, i));
    const wide result = job.reduction == FP8COMM_SUM   ? Format::sum(one, other)
                        : job.reduction == FP8COMM_MIN ? Format::least(one, other)
                                                       : Format::most(one, other);
    store<wide>(job.destination, i, result);
  }
}

template <fp8core_dtype Dtype>
static __global__ __launch_bounds__(threads) void widen_kernel(const fp8comm_reduce_job job) {
  const int64_t step = (int64_t)gridDim.x * threads;
  for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < job.count; i += step)
    store<float>(job.destination, i, fp8comm_widen_rule(Dtype, load<uint16_t>(job.source, i)));
}

template <fp8core_dtype Dtype>
static __global__ __launch_bounds__(threads) void narrow_kernel(const fp8comm_reduce_job job) {
  const int64_t step = (int64_t)gridDim.x * threads;
  for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < job.count; i += step)
    store<uint16_t>(job.destination, i, fp8comm_narrow_rule(Dtype, load<float>(job.source, i)));
}

int launch(void (*kernel)(fp8comm_reduce_job), const fp8comm_reduce_job *job, void *stream) {
  const int64_t blocks = (job->count + threads - 1) / threads;
  const dim3 grid((unsigned)(blocks < most_blocks ? blocks : most_blocks), 1, 1);
  return fp8core_launch(kernel, grid, dim3(threads, 1, 1), stream, *job);
}

} // namespace

extern "C" int fp8comm_cuda_launch_add(const fp8comm_reduce_job *job, void *stream) {
  switch (job->dtype) {
  case FP8COMM_BF16: return launch(add_kernel<bf16>, job, stream);
  case FP8COMM_FP16: return launch(add_kernel<fp16>, job, stream);
  case FP8COMM_FP64: return launch(add_kernel<fp64>, job, stream);
  case FP8COMM_INT64: return launch(add_kernel<int64>, job, stream);
  case FP8COMM_BYTE: return launch(add_kernel<byte>, job, stream);
  default: return launch(add_kernel<fp32>, job, stream);
  }
}

extern "C" int fp8comm_cuda_launch_widen(const fp8comm_reduce_job *job, void *stream) {
  return launch(job->dtype == FP8COMM_BF16 ? widen_kernel<FP8CORE_BF16> : widen_kernel<FP8CORE_FP16>, job, stream);
}

extern "C" int fp8comm_cuda_launch_narrow(const fp8comm_reduce_job *job, void *stream) {
  return launch(job->dtype == FP8COMM_BF16 ? narrow_kernel<FP8CORE_BF16> : narrow_kernel<FP8CORE_FP16>, job, stream);
}
