// Embeddings of tokens and positions, and their gradients.
#include "values.cuh"

namespace {

struct embed_arguments {
  fp8gpt_embedding job;
  fp8gpt_drop_rule dropout;
};

// A block takes a part of one row.
template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(FP8GPT_CUDA_ROW_THREADS) void embed_kernel(const embed_arguments arguments) {
  const fp8gpt_embedding &job = arguments.job;
  const int64_t row = blockIdx.x;
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * Vector;
  if (column >= job.columns) return;
  float values[Vector];
  fp8gpt_load<Dtype, Vector>(job.words, job.tokens[row] * job.columns + column, values);
  if (job.places) {
    float place[Vector];
    fp8gpt_load<Dtype, Vector>(job.places, (job.position + row % job.length) * job.columns + column, place);
#pragma unroll
    for (int i = 0; i < Vector; i++) values[i] += place[i];
  }
  fp8gpt_drop<Vector>(arguments.dropout, row * job.columns + column, values);
  fp8gpt_store<Dtype, Vector>(values, job.out, row * job.columns + column);
}

struct backward_arguments {
  fp8gpt_embedding_backward job;
  fp8gpt_drop_rule dropout;
};

// Rows of which a thread awaits its elements at once: a frequent token's are many, and its sum is one chain.
constexpr int rows_at_a_time = 8;

// The sum of `count` rows; row_of() names the k-th.
template <fp8core_dtype Dtype, int Vector, typename Rows>
static __device__ __forceinline__ void sum_rows(const backward_arguments &arguments, int64_t column, int count,
                                                Rows row_of, float (&sums)[Vector]) {
  const fp8gpt_embedding_backward &job = arguments.job;
#pragma unroll
  for (int i = 0; i < Vector; i++) sums[i] = 0.0f;
#pragma unroll 1
  for (int done = 0; done < count; done += rows_at_a_time) {
    int64_t elements[rows_at_a_time];
    fp8gpt_packed<Dtype, Vector> rows[rows_at_a_time];
#pragma unroll
    for (int k = 0; k < rows_at_a_time; k++)
      elements[k] = row_of(done + k < count ? done + k : count - 1) * job.columns + column;
#pragma unroll
    for (int k = 0; k < rows_at_a_time; k++) rows[k] = fp8gpt_load_packed<Dtype, Vector>(job.dout, elements[k]);
#pragma unroll
    for (int k = 0; k < rows_at_a_time; k++) {
      if (done + k >= count) break;
      float values[Vector];
      fp8gpt_unpack(rows[k], values);
      fp8gpt_drop<Vector>(arguments.dropout, elements[k], values);
#pragma unroll
      for (int i = 0; i < Vector; i++) sums[i] += values[i];
    }
  }
}

template <int Vector>
static __device__ __forceinline__ void add_to(fp8core_dtype dtype, void *gradient, int64_t index,
                                              const float (&sums)[Vector]) {
  float values[Vector];
  fp8gpt_load_either<Vector>(dtype, gradient, index, values);
#pragma unroll
  for (int i = 0; i < Vector; i++) values[i] += sums[i];
  if (dtype == FP8CORE_FP32)
    fp8gpt_store<FP8CORE_FP32, Vector>(values, gradient, index);
  else
    fp8gpt_store<FP8CORE_BF16, Vector>(values, gradient, index);
}

// A block takes a part of the row of one token.
template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(FP8GPT_CUDA_ROW_THREADS) void words_kernel(const backward_arguments arguments) {
  const fp8gpt_embedding_backward &job = arguments.job;
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * Vector;
  if (column >= job.columns) return;
  const int32_t *order = job.order + job.starts[blockIdx.x];
  const int count = job.starts[blockIdx.x + 1] - job.starts[blockIdx.x];
  float sums[Vector];
  sum_rows<Dtype, Vector>(
    arguments, column, count, [order](int k) { return (int64_t)order[k]; }, sums);
  add_to<Vector>(job.gradient_dtype, job.dwords, job.tokens[order[0]] * job.columns + column, sums);
}

// And here of one position.
template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(FP8GPT_CUDA_ROW_THREADS) void places_kernel(const backward_arguments arguments) {
  const fp8gpt_embedding_backward &job = arguments.job;
  const int64_t position = blockIdx.x;
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * Vector;
  if (column >= job.columns) return;
  const int64_t length = job.length;
  const int count = (int)((job.rows - position + length - 1) / length);
  float sums[Vector];
  sum_rows<Dtype, Vector>(
    arguments, column, count, [position, length](int k) { return position + k * length; }, sums);
  add_to<Vector>(job.gradient_dtype, job.dplaces, position * job.columns + column, sums);
}

} // namespace

extern "C" int fp8gpt_cuda_launch_embed(void *stream, const fp8gpt_embedding *job) {
  const embed_arguments arguments = {*job, fp8gpt_drop_rule_of(job->dropout)};
  const bool by_vector = job->columns * fp8gpt_bytes(job->dtype) % 16 == 0 && fp8gpt_aligned(job->words) &&
                         fp8gpt_aligned(job->places) && fp8gpt_aligned(job->out);
  return fp8gpt_dispatch(job->dtype, by_vector, [&](auto shape) {
    const int64_t parts = job->columns / shape.vector;
    return fp8core_launch(embed_kernel<shape.dtype, shape.vector>, fp8gpt_row_grid(job->rows, parts),
                          fp8gpt_row_block(parts), stream, arguments);
  });
}

extern "C" int fp8gpt_cuda_launch_embed_backward(void *stream, const fp8gpt_embedding_backward *job) {
  const backward_arguments arguments = {*job, fp8gpt_drop_rule_of(job->dropout)};
  const bool by_vector =
    job->columns % 4 == 0 && fp8gpt_aligned(job->dout) && fp8gpt_aligned(job->dwords) && fp8gpt_aligned(job->dplaces);
  // Four elements of either format: chains are long, so that many threads should share the columns of a row.
  return fp8gpt_dispatch<4, 4>(job->dtype, by_vector, [&](auto shape) {
    const int64_t parts = job->columns / shape.vector;
    const int64_t positions = job->length < job->rows ? job->length : job->rows;
    const int error = fp8core_launch(words_kernel<shape.dtype, shape.vector>, fp8gpt_row_grid(job->runs, parts),
                                     fp8gpt_row_block(parts), stream, arguments);
    if (error != 0 || !job->dplaces) return error;
    return fp8core_launch(places_kernel<shape.dtype, shape.vector>, fp8gpt_row_grid(positions, parts),
                          fp8gpt_row_block(parts), stream, arguments);
  });
}
