// What the check of another library's attention needs (attention_choice.c): values to compute with, and how far two
// results lie apart.
#include "values.cuh"

namespace {

constexpr int threads = 256;
constexpr int most_blocks = 1024;

struct fill_arguments {
  int64_t count;
  void *data;
  uint32_t place;
};

// Uniform in [-2, 2): scores of independent rows then have a standard deviation of 4 / 3, and softmaxes differ.
static __global__ __launch_bounds__(threads) void fill_kernel(const fill_arguments job) {
  const int64_t first = ((int64_t)blockIdx.x * threads + threadIdx.x) * 4, step = (int64_t)gridDim.x * threads * 4;
  for (int64_t i = first; i < job.count; i += step) {
    uint32_t draws[4];
    fp8core_draw_block(0, job.place, 0, (uint64_t)i / 4, draws);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float value[1] = {(float)draws[j] * 0x1p-30f - 2.0f};
      if (i + j < job.count) fp8gpt_store<FP8CORE_BF16, 1>(value, job.data, i + j);
    }
  }
}

template <fp8core_dtype Dtype>
static __global__ __launch_bounds__(threads) void compare_kernel(const fp8gpt_cuda_comparison job) {
  __shared__ double sums[2][threads];
  const int thread = (int)threadIdx.x;
  const int64_t first = (int64_t)blockIdx.x * threads + thread, step = (int64_t)gridDim.x * threads;
  double difference = 0.0, square = 0.0;
  for (int64_t i = first; i < job.rows * job.columns; i += step) {
    const int64_t at = i / job.columns * job.row_stride + job.first_column + i % job.columns;
    float found[1], expected[1];
    fp8gpt_load<Dtype, 1>(job.found, at, found);
    fp8gpt_load<Dtype, 1>(job.expected, at, expected);
    const double apart = (double)found[0] - (double)expected[0];
    difference += apart * apart;
    square += (double)expected[0] * (double)expected[0];
  }
  sums[0][thread] = difference;
  sums[1][thread] = square;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
    sums[0][thread] += sums[0][thread + half];
    sums[1][thread] += sums[1][thread + half];
  }
  if (thread > 0) return;
  job.sums[2 * blockIdx.x] = sums[0][0];
  job.sums[2 * blockIdx.x + 1] = sums[1][0];
}

} // namespace

extern "C" int fp8gpt_cuda_launch_fill(void *stream, void *data, int64_t count, uint32_t place) {
  const fill_arguments job = {count, data, place};
  const int64_t blocks = fp8gpt_divide_up(count, 4 * threads);
  return fp8core_launch(fill_kernel, dim3((unsigned)(blocks < most_blocks ? blocks : most_blocks), 1, 1),
                        dim3(threads, 1, 1), stream, job);
}

extern "C" int fp8gpt_cuda_launch_compare(void *stream, const fp8gpt_cuda_comparison *job) {
  const dim3 grid(FP8GPT_CUDA_REDUCTION_BLOCKS, 1, 1), block(threads, 1, 1);
  return job->dtype == FP8CORE_FP32 ? fp8core_launch(compare_kernel<FP8CORE_FP32>, grid, block, stream, *job)
                                    : fp8core_launch(compare_kernel<FP8CORE_BF16>, grid, block, stream, *job);
}
