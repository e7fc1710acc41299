// Cross-entropy of FP32 logits and its gradient. A block takes a row: once for the largest logit and the sum of the
// exponentials (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018), once more for the gradients.
#include "values.cuh"

namespace {

constexpr int most_threads = 512;
// Logits that a thread awaits at once.
constexpr int logits_at_a_time = 16;

template <int Vector>
struct batch {
  static constexpr int vectors = logits_at_a_time / Vector;
  float logits[vectors][Vector];
};

// Those from `first` on, a vector of each thread beside the other; minus infinity, whose exponential is 0, beyond the
// row.
template <int Vector>
static __device__ __forceinline__ batch<Vector> load_batch(const float *row, int first, int vocabulary) {
  batch<Vector> from;
#pragma unroll
  for (int k = 0; k < from.vectors; k++) {
    const int i = first + (k * (int)blockDim.x + (int)threadIdx.x) * Vector;
#pragma unroll
    for (int j = 0; j < Vector; j++) from.logits[k][j] = -INFINITY;
    if (i < vocabulary) fp8gpt_load<FP8CORE_FP32, Vector>(row, i, from.logits[k]);
  }
  return from;
}

// What exponentials are taken relative to: no infinity comes of minus infinity less it.
static __device__ __forceinline__ float reference_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(most_threads) void cross_entropy_kernel(const fp8gpt_cross_entropy job) {
  __shared__ float shared[2][FP8CORE_WARP];
  const int64_t row = blockIdx.x;
  const int vocabulary = (int)job.vocabulary;
  const int64_t start = row * vocabulary;
  const float *logits = job.logits + start;
  const int32_t target = job.targets[row];
  const int step = (int)blockDim.x * logits_at_a_time;
  if (target < 0) {
    if (threadIdx.x == 0) job.losses[row] = 0.0f;
    if (!job.dlogits) return;
    const float zeros[Vector] = {};
    for (int i = (int)threadIdx.x * Vector; i < vocabulary; i += (int)blockDim.x * Vector)
      fp8gpt_store<Dtype, Vector>(zeros, job.dlogits, start + i);
    return;
  }
  const float target_logit = logits[target];
  float largest = -INFINITY, sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < vocabulary; first += step) {
    const batch<Vector> from = load_batch<Vector>(logits, first, vocabulary);
    // A NaN is in no maximum, but in the exponentials.
    float next = largest;
#pragma unroll
    for (int k = 0; k < from.vectors; k++)
#pragma unroll
      for (int j = 0; j < Vector; j++) next = fmaxf(next, from.logits[k][j]);
    const float reference = reference_of(next);
    sum *= expf(largest - reference);
#pragma unroll
    for (int k = 0; k < from.vectors; k++)
#pragma unroll
      for (int j = 0; j < Vector; j++) sum += expf(from.logits[k][j] - reference);
    largest = next;
  }
  const float row_largest = fp8gpt_block_max(largest, shared[0]);
  const float reference = reference_of(row_largest);
  sum = fp8gpt_block_sum(sum * expf(largest - reference), shared[1]);
  // The difference first: logits may be much larger than it.
  if (threadIdx.x == 0) job.losses[row] = logf(sum) + (row_largest - target_logit);
  if (!job.dlogits) return;
  const float factor = job.scale / sum;
#pragma unroll 1
  for (int first = 0; first < vocabulary; first += step) {
    batch<Vector> from = load_batch<Vector>(logits, first, vocabulary);
#pragma unroll
    for (int k = 0; k < from.vectors; k++) {
      const int i = first + (k * (int)blockDim.x + (int)threadIdx.x) * Vector;
#pragma unroll
      for (int j = 0; j < Vector; j++) {
        from.logits[k][j] = expf(from.logits[k][j] - reference) * factor;
        if (i + j == target) from.logits[k][j] -= job.scale;
      }
      if (i < vocabulary) fp8gpt_store<Dtype, Vector>(from.logits[k], job.dlogits, start + i);
    }
  }
}

} // namespace

extern "C" int fp8gpt_cuda_launch_cross_entropy(void *stream, const fp8gpt_cross_entropy *job) {
  const bool by_vector = job->vocabulary % 4 == 0 && fp8gpt_aligned(job->logits) && fp8gpt_aligned(job->dlogits);
  const int64_t threads = fp8gpt_divide_up(job->vocabulary, FP8CORE_WARP * logits_at_a_time) * FP8CORE_WARP;
  return fp8gpt_dispatch<4, 4>(job->dtype, by_vector, [&](auto shape) {
    return fp8core_launch(cross_entropy_kernel<shape.dtype, shape.vector>, dim3((unsigned)job->rows, 1, 1),
                          dim3((unsigned)(threads < most_threads ? threads : most_threads), 1, 1), stream, *job);
  });
}
