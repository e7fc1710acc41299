// LayerNorm and RMSNorm, with the sum before them and dropout, and their gradients.
//
// Threads keep what they can of a row in registers; what is beyond, of very long rows, is read again.
#include "values.cuh"

namespace {

struct norm_arguments {
  fp8gpt_norm job;
  fp8gpt_drop_rule dropout;
};

// A block takes a row.
constexpr int most_threads = 512;
constexpr int norm_held = 4;

// What is normalised, as rounded: that is what the backward pass reads.
template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ fp8gpt_packed<Dtype, Vector>
add_branch(const norm_arguments &arguments, int64_t element, const fp8gpt_packed<Dtype, Vector> &x,
           const fp8gpt_packed<Dtype, Vector> &delta) {
  if (!arguments.job.delta) return x;
  float values[Vector], branch[Vector];
  fp8gpt_unpack(x, values);
  fp8gpt_unpack(delta, branch);
  fp8gpt_drop<Vector>(arguments.dropout, element, branch);
#pragma unroll
  for (int i = 0; i < Vector; i++) values[i] += branch[i];
  const fp8gpt_packed<Dtype, Vector> sum = fp8gpt_pack<Dtype, Vector>(values);
  fp8gpt_store_packed(sum, arguments.job.sum, element);
  return sum;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ float sum_of(const fp8gpt_packed<Dtype, Vector> &x) {
  float values[Vector];
  fp8gpt_unpack(x, values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Vector; i++) sum += values[i];
  return sum;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ float squares_of(const fp8gpt_packed<Dtype, Vector> &x, float mean) {
  float values[Vector];
  fp8gpt_unpack(x, values);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < Vector; i++) {
    const float centred = values[i] - mean;
    squares = fmaf(centred, centred, squares);
  }
  return squares;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void store_normalised(const fp8gpt_norm &job, int64_t start, int column,
                                                        const fp8gpt_packed<Dtype, Vector> &x, float mean,
                                                        float inverse) {
  float values[Vector], weight[Vector];
  fp8gpt_unpack(x, values);
  fp8gpt_load_either<Vector>(job.weight_dtype, job.weight, column, weight);
#pragma unroll
  for (int i = 0; i < Vector; i++) values[i] = (values[i] - mean) * inverse * weight[i];
  if (job.bias) {
    float bias[Vector];
    fp8gpt_load_either<Vector>(job.weight_dtype, job.bias, column, bias);
#pragma unroll
    for (int i = 0; i < Vector; i++) values[i] += bias[i];
  }
  fp8gpt_store<Dtype, Vector>(values, job.y, start + column);
}

template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(most_threads) void norm_kernel(const norm_arguments arguments) {
  __shared__ float shared[2][FP8CORE_WARP];
  const fp8gpt_norm &job = arguments.job;
  const int64_t row = blockIdx.x;
  const int columns = (int)job.columns;
  const int64_t start = row * columns;
  const int first = (int)threadIdx.x * Vector;
  const int step = (int)blockDim.x * Vector;
  // Where the sum is stored, it takes the place of both.
  const void *input = job.delta ? job.sum : job.x;
  fp8gpt_packed<Dtype, Vector> x[norm_held], delta[norm_held];
#pragma unroll
  for (int k = 0; k < norm_held; k++)
    if (first + k * step < columns) {
      x[k] = fp8gpt_load_packed<Dtype, Vector>(job.x, start + first + k * step);
      if (job.delta) delta[k] = fp8gpt_load_packed<Dtype, Vector>(job.delta, start + first + k * step);
    }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < norm_held; k++)
    if (first + k * step < columns) {
      x[k] = add_branch(arguments, start + first + k * step, x[k], delta[k]);
      sum += sum_of(x[k]);
    }
#pragma unroll 1
  for (int column = first + norm_held * step; column < columns; column += step) {
    fp8gpt_packed<Dtype, Vector> more = {};
    if (job.delta) more = fp8gpt_load_packed<Dtype, Vector>(job.delta, start + column);
    sum +=
      sum_of(add_branch(arguments, start + column, fp8gpt_load_packed<Dtype, Vector>(job.x, start + column), more));
  }
  float mean = 0.0f;
  if (job.type == FP8GPT_LAYER_NORM) mean = fp8gpt_block_sum(sum, shared[0]) / (float)columns;
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < norm_held; k++)
    if (first + k * step < columns) squares += squares_of(x[k], mean);
#pragma unroll 1
  for (int column = first + norm_held * step; column < columns; column += step)
    squares += squares_of(fp8gpt_load_packed<Dtype, Vector>(input, start + column), mean);
  const float inverse = 1.0f / sqrtf(fp8gpt_block_sum(squares, shared[1]) / (float)columns + job.eps);
  if (threadIdx.x == 0) {
    if (job.type == FP8GPT_LAYER_NORM) job.mean[row] = mean;
    job.inverse_deviation[row] = inverse;
  }
#pragma unroll
  for (int k = 0; k < norm_held; k++)
    if (first + k * step < columns) store_normalised(job, start, first + k * step, x[k], mean, inverse);
#pragma unroll 1
  for (int column = first + norm_held * step; column < columns; column += step)
    store_normalised(job, start, column, fp8gpt_load_packed<Dtype, Vector>(input, start + column), mean, inverse);
}

struct backward_arguments {
  fp8gpt_norm_backward job;
  fp8gpt_drop_rule dropout;
  float *partials;
  // Threads that share a row: warps, a power of two of them.
  int row_threads;
};

// A block takes several rows at a time, and keeps sums of its columns in registers.
constexpr int backward_threads = 512;
constexpr int backward_warps = backward_threads / FP8CORE_WARP;
constexpr int backward_held = 3;

template <int Vector>
struct column_sums {
  float weight[Vector];
  float bias[Vector];
};

// Both averages over a row.
struct row_sums {
  // Of dy weight x.
  float along;
  // Of dy weight.
  float average;
};

template <fp8core_dtype Dtype, int Vector>
struct row_values {
  float x[Vector];
  float dy[Vector];
};

// x normalised, and dy, from where they are packed.
template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ row_values<Dtype, Vector>
normalise(const fp8gpt_packed<Dtype, Vector> &x, const fp8gpt_packed<Dtype, Vector> &dy, float mean, float inverse) {
  row_values<Dtype, Vector> values;
  fp8gpt_unpack(x, values.x);
  fp8gpt_unpack(dy, values.dy);
#pragma unroll
  for (int i = 0; i < Vector; i++) values.x[i] = (values.x[i] - mean) * inverse;
  return values;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void add_columns(const fp8gpt_norm &norm, int column,
                                                   const row_values<Dtype, Vector> &values,
                                                   column_sums<Vector> &columns, row_sums &row) {
  float weight[Vector];
  fp8gpt_load_either<Vector>(norm.weight_dtype, norm.weight, column, weight);
#pragma unroll
  for (int i = 0; i < Vector; i++) {
    columns.weight[i] = fmaf(values.dy[i], values.x[i], columns.weight[i]);
    columns.bias[i] += values.dy[i];
    const float scaled = values.dy[i] * weight[i];
    row.along = fmaf(scaled, values.x[i], row.along);
    row.average += scaled;
  }
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void
store_gradients(const backward_arguments &arguments, int64_t start, int column, const row_values<Dtype, Vector> &values,
                const fp8gpt_packed<Dtype, Vector> &dx, float inverse, const row_sums &row) {
  const fp8gpt_norm_backward &job = arguments.job;
  float weight[Vector], gradient[Vector];
  fp8gpt_load_either<Vector>(job.forward.weight_dtype, job.forward.weight, column, weight);
  fp8gpt_unpack(dx, gradient);
#pragma unroll
  for (int i = 0; i < Vector; i++)
    gradient[i] += inverse * (values.dy[i] * weight[i] - row.average - values.x[i] * row.along);
  fp8gpt_store<Dtype, Vector>(gradient, job.dx, start + column);
  if (!job.ddelta) return;
  fp8gpt_drop<Vector>(arguments.dropout, start + column, gradient);
  fp8gpt_store<Dtype, Vector>(gradient, job.ddelta, start + column);
}

template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(backward_threads, 1) void backward_kernel(const backward_arguments arguments) {
  // What is not held goes in smaller vectors, for which there are registers beside it.
  constexpr int narrow = Vector < 4 ? Vector : 4;
  __shared__ row_sums shared[2][backward_warps];
  alignas(16) __shared__ float group_sums[backward_threads * Vector];
  const fp8gpt_norm_backward &job = arguments.job;
  const fp8gpt_norm &norm = job.forward;
  const int columns = (int)norm.columns;
  const unsigned rows = (unsigned)norm.rows;
  const int row_threads = arguments.row_threads;
  const unsigned group = threadIdx.x / (unsigned)row_threads;
  const unsigned groups = (unsigned)(backward_threads / row_threads);
  const int first = (int)threadIdx.x % row_threads * Vector;
  const int step = row_threads * Vector;
  float *partials = arguments.partials + (int64_t)blockIdx.x * 2 * columns;
  column_sums<Vector> held[backward_held] = {};
  int parity = 0;
  // All threads of the block go round as often, as they wait for each other.
  for (unsigned round = 0; round * gridDim.x + blockIdx.x < rows; round += groups) {
    const unsigned row = (round + group) * gridDim.x + blockIdx.x;
    const bool active = row < rows;
    const int64_t start = (int64_t)row * columns;
    const int end = active ? columns : 0;
    fp8gpt_packed<Dtype, Vector> x[backward_held], dy[backward_held], dx[backward_held];
#pragma unroll
    for (int k = 0; k < backward_held; k++)
      if (first + k * step < end) {
        x[k] = fp8gpt_load_packed<Dtype, Vector>(norm.x, start + first + k * step);
        dy[k] = fp8gpt_load_packed<Dtype, Vector>(job.dy, start + first + k * step);
        dx[k] = fp8gpt_load_packed<Dtype, Vector>(job.dx, start + first + k * step);
      }
    const float mean = active && norm.type == FP8GPT_LAYER_NORM ? norm.mean[row] : 0.0f;
    const float inverse = active ? norm.inverse_deviation[row] : 0.0f;
    row_sums sums = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < backward_held; k++) {
      if (first + k * step < end)
        add_columns(norm, first + k * step, normalise(x[k], dy[k], mean, inverse), held[k], sums);
    }
    // Rows that are so long have one group.
#pragma unroll 1
    for (int column = backward_held * step + first / Vector * narrow; column < end; column += row_threads * narrow) {
      column_sums<narrow> beyond = {};
      if (round > 0) {
        fp8gpt_load<FP8CORE_FP32, narrow>(partials, column, beyond.weight);
        fp8gpt_load<FP8CORE_FP32, narrow>(partials, columns + column, beyond.bias);
      }
      add_columns(norm, column,
                  normalise(fp8gpt_load_packed<Dtype, narrow>(norm.x, start + column),
                            fp8gpt_load_packed<Dtype, narrow>(job.dy, start + column), mean, inverse),
                  beyond, sums);
      fp8gpt_store<FP8CORE_FP32, narrow>(beyond.weight, partials, column);
      fp8gpt_store<FP8CORE_FP32, narrow>(beyond.bias, partials, columns + column);
    }
    sums.along = fp8gpt_warp_sum(sums.along);
    sums.average = fp8gpt_warp_sum(sums.average);
    if (row_threads > FP8CORE_WARP) {
      const unsigned warp = threadIdx.x / FP8CORE_WARP, row_warps = (unsigned)row_threads / FP8CORE_WARP;
      // Of the last round but one: all threads have read it, as they have come past the last one's barrier.
      if (threadIdx.x % FP8CORE_WARP == 0) shared[parity][warp] = sums;
      __syncthreads();
      sums = {0.0f, 0.0f};
      for (unsigned i = 0; i < row_warps; i++) {
        sums.along += shared[parity][group * row_warps + i].along;
        sums.average += shared[parity][group * row_warps + i].average;
      }
      parity ^= 1;
    }
    sums.along /= (float)columns;
    sums.average = norm.type == FP8GPT_LAYER_NORM ? sums.average / (float)columns : 0.0f;
#pragma unroll
    for (int k = 0; k < backward_held; k++)
      if (first + k * step < end)
        store_gradients(arguments, start, first + k * step, normalise(x[k], dy[k], mean, inverse), dx[k], inverse,
                        sums);
#pragma unroll 1
    for (int column = backward_held * step + first / Vector * narrow; column < end; column += row_threads * narrow)
      store_gradients(arguments, start, column,
                      normalise(fp8gpt_load_packed<Dtype, narrow>(norm.x, start + column),
                                fp8gpt_load_packed<Dtype, narrow>(job.dy, start + column), mean, inverse),
                      fp8gpt_load_packed<Dtype, narrow>(job.dx, start + column), inverse, sums);
  }
  // The groups' sums of columns, in their order.
#pragma unroll
  for (int k = 0; k < backward_held; k++)
#pragma unroll
    for (int part = 0; part < 2; part++) {
      __syncthreads();
      fp8gpt_store<FP8CORE_FP32, Vector>(part ? held[k].bias : held[k].weight, group_sums,
                                         (int64_t)threadIdx.x * Vector);
      __syncthreads();
      for (int i = (int)threadIdx.x; i < step && k * step + i < columns; i += backward_threads) {
        float sum = 0.0f;
        for (unsigned from = 0; from < groups; from++) sum += group_sums[(int)from * step + i];
        partials[part * columns + k * step + i] = sum;
      }
    }
}

int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }

bool takes_vectors(const fp8gpt_norm &norm) {
  return norm.columns * fp8gpt_bytes(norm.dtype) % 16 == 0 && fp8gpt_aligned(norm.x) && fp8gpt_aligned(norm.weight);
}

} // namespace

extern "C" int fp8gpt_cuda_launch_norm(void *stream, const fp8gpt_norm *job) {
  const norm_arguments arguments = {*job, fp8gpt_drop_rule_of(job->dropout)};
  const bool by_vector = takes_vectors(*job) && fp8gpt_aligned(job->y) && fp8gpt_aligned(job->bias) &&
                         (!job->delta || (fp8gpt_aligned(job->delta) && fp8gpt_aligned(job->sum)));
  return fp8gpt_dispatch(job->dtype, by_vector, [&](auto shape) {
    const int64_t warps = fp8gpt_divide_up(job->columns, (int64_t)FP8CORE_WARP * norm_held * shape.vector);
    return fp8core_launch(norm_kernel<shape.dtype, shape.vector>, dim3((unsigned)job->rows, 1, 1),
                          dim3((unsigned)at_most(warps * FP8CORE_WARP, most_threads), 1, 1), stream, arguments);
  });
}

extern "C" int fp8gpt_cuda_launch_norm_backward(void *stream, const fp8gpt_norm_backward *job, float *partials) {
  const fp8gpt_norm &norm = job->forward;
  const int64_t blocks = at_most(norm.rows, FP8GPT_CUDA_REDUCTION_BLOCKS);
  backward_arguments arguments = {*job, fp8gpt_drop_rule_of(norm.dropout), partials, FP8CORE_WARP};
  const bool by_vector = takes_vectors(norm) && fp8gpt_aligned(job->dy) && fp8gpt_aligned(job->dx) &&
                         fp8gpt_aligned(job->ddelta) && fp8gpt_aligned(partials);
  const int error = fp8gpt_dispatch(norm.dtype, by_vector, [&](auto shape) {
    while (arguments.row_threads < backward_threads &&
           (int64_t)arguments.row_threads * backward_held * shape.vector < norm.columns)
      arguments.row_threads *= 2;
    return fp8core_launch(backward_kernel<shape.dtype, shape.vector>, dim3((unsigned)blocks, 1, 1),
                          dim3(backward_threads, 1, 1), stream, arguments);
  });
  if (error != 0) return error;
  const fp8gpt_partials sums = {partials, blocks, norm.columns, {job->dweight, job->dbias}, 2, job->first};
  return fp8gpt_add_partials(stream, sums);
}
