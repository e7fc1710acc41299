// The sum of a rank's part of a bucket, of the codes of all ranks: what gradient_steps.c adds up on the host, bit for
// bit.
#include "kernels.h"
#include "platform.cuh"

#include "numerics.h"

namespace {

constexpr int threads = 256;
// Elements of a thread: 4 bytes of each rank.
constexpr int width = 4;

static __device__ __forceinline__ uint32_t load(const unsigned char *codes, int count) {
  if (count == width && (uintptr_t)codes % width == 0) return *(const uint32_t *)codes;
  uint32_t word = 0;
  for (int i = 0; i < count; i++) word |= (uint32_t)codes[i] << (8 * i);
  return word;
}

static __device__ __forceinline__ float value_of(fp8core_dtype dtype, uint32_t word, int place) {
  return fp8core_bits_float(fp8core_decode_bits(dtype, word >> (8 * place) & 0xff));
}

template <fp8core_dtype dtype>
static __global__ __launch_bounds__(threads) void sum_kernel(const fp8comm_sum_job job) {
  const int64_t first = ((int64_t)blockIdx.x * threads + threadIdx.x) * width;
  if (first >= job.count) return;
  const int count = job.count - first < width ? (int)(job.count - first) : width;
  float sums[width];
  const uint32_t own = load(job.own + first, count);
  for (int i = 0; i < width; i++) sums[i] = value_of(dtype, own, i);
  for (int other = 0; other < job.other_count; other++) {
    const uint32_t word = load(job.others + (size_t)other * job.stride + first, count);
    for (int i = 0; i < width; i++) sums[i] += value_of(dtype, word, i);
  }
  for (int i = 0; i < count; i++) job.sum[first + i] = sums[i];
}

} // namespace

extern "C" int fp8comm_cuda_launch_sum(const fp8comm_sum_job *job, void *stream) {
  const int64_t per_block = (int64_t)threads * width;
  const dim3 grid((unsigned)((job->count + per_block - 1) / per_block), 1, 1), block(threads, 1, 1);
  return job->dtype == FP8CORE_E4M3 ? fp8core_launch(sum_kernel<FP8CORE_E4M3>, grid, block, stream, *job)
                                    : fp8core_launch(sum_kernel<FP8CORE_E5M2>, grid, block, stream, *job);
}
