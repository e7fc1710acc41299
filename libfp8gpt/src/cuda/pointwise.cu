// What goes element by element, and sums of columns.
#include "values.cuh"

namespace {

// Rotary positions. A thread takes elements of the first half of a head, and those of the second that turn with them.
template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(FP8GPT_CUDA_ROW_THREADS) void rotate_kernel(const fp8gpt_rotation job) {
  const int half = job.head_dim / 2;
  const unsigned parts = (unsigned)(half / Vector);
  const unsigned part = blockIdx.y * blockDim.x + threadIdx.x;
  if (part >= (unsigned)job.heads * parts) return;
  const int64_t row = blockIdx.x;
  const int i = (int)(part % parts) * Vector;
  const int64_t at = row * job.row_stride + (int64_t)(part / parts) * job.head_dim + i;
  const int64_t angle = row % job.length * job.head_dim + i;
  float low[Vector], high[Vector], cosines[Vector], sines[Vector];
  fp8gpt_load<Dtype, Vector>(job.data, at, low);
  fp8gpt_load<Dtype, Vector>(job.data, at + half, high);
  fp8gpt_load<FP8CORE_FP32, Vector>(job.angles, angle, cosines);
  fp8gpt_load<FP8CORE_FP32, Vector>(job.angles, angle + half, sines);
#pragma unroll
  for (int j = 0; j < Vector; j++) {
    const float sine = job.sign * sines[j];
    const float turned = low[j] * cosines[j] - high[j] * sine;
    high[j] = high[j] * cosines[j] + low[j] * sine;
    low[j] = turned;
  }
  fp8gpt_store<Dtype, Vector>(low, job.data, at);
  fp8gpt_store<Dtype, Vector>(high, job.data, at + half);
}

// 0 where exp() overflows.
static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(FP8GPT_CUDA_ROW_THREADS) void swiglu_kernel(const fp8gpt_swiglu job) {
  const int64_t row = blockIdx.x;
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * Vector;
  if (column >= job.width) return;
  const int64_t at = row * 2 * job.width + column;
  float gate[Vector], up[Vector];
  fp8gpt_load<Dtype, Vector>(job.gate_up, at, gate);
  fp8gpt_load<Dtype, Vector>(job.gate_up, at + job.width, up);
#pragma unroll
  for (int i = 0; i < Vector; i++) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
  fp8gpt_store<Dtype, Vector>(gate, job.out, row * job.width + column);
}

template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(FP8GPT_CUDA_ROW_THREADS) void swiglu_backward_kernel(const fp8gpt_swiglu job) {
  const int64_t row = blockIdx.x;
  const int64_t column = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * Vector;
  if (column >= job.width) return;
  const int64_t at = row * 2 * job.width + column;
  float gate[Vector], up[Vector], gradient[Vector];
  fp8gpt_load<Dtype, Vector>(job.gate_up, at, gate);
  fp8gpt_load<Dtype, Vector>(job.gate_up, at + job.width, up);
  fp8gpt_load<Dtype, Vector>(job.dout, row * job.width + column, gradient);
#pragma unroll
  for (int i = 0; i < Vector; i++) {
    const float x = gate[i];
    const float s = sigmoid(x);
    gate[i] = gradient[i] * up[i] * (s + x * s * (1.0f - s));
    up[i] = gradient[i] * (x * s);
  }
  fp8gpt_store<Dtype, Vector>(gate, job.dgate_up, at);
  fp8gpt_store<Dtype, Vector>(up, job.dgate_up, at + job.width);
}

constexpr int threads = 256;
constexpr int warps = threads / FP8CORE_WARP;

struct add_arguments {
  const float *values;
  float *gradient;
  int64_t count;
  int first;
};

template <int Vector>
static __global__ __launch_bounds__(threads) void add_kernel(const add_arguments job) {
  const int64_t index = ((int64_t)blockIdx.x * threads + threadIdx.x) * Vector;
  if (index >= job.count) return;
  float sums[Vector];
  fp8gpt_load<FP8CORE_FP32, Vector>(job.values, index, sums);
  if (!job.first) {
    float gradient[Vector];
    fp8gpt_load<FP8CORE_FP32, Vector>(job.gradient, index, gradient);
#pragma unroll
    for (int i = 0; i < Vector; i++) sums[i] = gradient[i] + sums[i];
  }
  fp8gpt_store<FP8CORE_FP32, Vector>(sums, job.gradient, index);
}

struct column_sums_arguments {
  fp8gpt_column_sums job;
  // [gridDim.y, columns]
  float *partials;
};

// Rows that a warp awaits at once.
constexpr int rows_at_a_time = 4;

// A warp takes whole lines of some rows, the warps of all blocks beside each other the rows in turns.
template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(threads) void column_sums_kernel(const column_sums_arguments arguments) {
  constexpr int tile = FP8CORE_WARP * Vector;
  alignas(16) __shared__ float shared[warps][tile];
  const fp8gpt_column_sums &job = arguments.job;
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  const int64_t tile_start = (int64_t)blockIdx.x * tile;
  const int64_t column = tile_start + lane * Vector;
  const int64_t step = (int64_t)gridDim.y * warps;
  float sums[Vector] = {};
  if (column < job.columns) {
    for (int64_t row = (int64_t)blockIdx.y * warps + warp; row < job.rows; row += rows_at_a_time * step) {
      fp8gpt_packed<Dtype, Vector> rows[rows_at_a_time] = {};
#pragma unroll
      for (int k = 0; k < rows_at_a_time; k++)
        if (row + k * step < job.rows)
          rows[k] = fp8gpt_load_packed<Dtype, Vector>(job.data, (row + k * step) * job.columns + column);
#pragma unroll
      for (int k = 0; k < rows_at_a_time; k++) {
        float values[Vector];
        // Zeros, where there is no row.
        fp8gpt_unpack(rows[k], values);
#pragma unroll
        for (int i = 0; i < Vector; i++) sums[i] += values[i];
      }
    }
  }
  fp8gpt_store<FP8CORE_FP32, Vector>(sums, shared[warp], lane * Vector);
  __syncthreads();
  for (int i = (int)threadIdx.x; i < tile && tile_start + i < job.columns; i += threads) {
    float sum = 0.0f;
    for (int from = 0; from < warps; from++) sum += shared[from][i];
    arguments.partials[blockIdx.y * job.columns + tile_start + i] = sum;
  }
}

// A warp adds a share of the blocks' partial sums of 32 columns, then the warps' are added.
static __global__ __launch_bounds__(threads) void add_partials_kernel(const fp8gpt_partials job) {
  __shared__ float shared[warps][FP8CORE_WARP];
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  const int part = (int)blockIdx.y;
  const int64_t column = (int64_t)blockIdx.x * FP8CORE_WARP + lane;
  const int64_t share = (job.blocks + warps - 1) / warps;
  const int64_t end = (warp + 1) * share < job.blocks ? (warp + 1) * share : job.blocks;
  float *gradient = part ? job.gradients[1] : job.gradients[0];
  float sum = 0.0f;
  if (column < job.columns && gradient) {
#pragma unroll 4
    for (int64_t block = warp * share; block < end; block++)
      sum += job.sums[(block * job.parts + part) * job.columns + column];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= job.columns || !gradient) return;
  for (int i = 1; i < warps; i++) sum += shared[i][lane];
  gradient[column] = job.first ? sum : gradient[column] + sum;
}

} // namespace

int fp8gpt_add_partials(void *stream, const fp8gpt_partials &partials) {
  const dim3 grid((unsigned)fp8gpt_divide_up(partials.columns, FP8CORE_WARP), (unsigned)partials.parts, 1);
  return fp8core_launch(add_partials_kernel, grid, dim3(threads, 1, 1), stream, partials);
}

extern "C" int fp8gpt_cuda_launch_rotate(void *stream, const fp8gpt_rotation *job) {
  const int bytes = fp8gpt_bytes(job->dtype);
  const int half = job->head_dim / 2;
  const bool by_vector = half * bytes % 16 == 0 && job->row_stride * bytes % 16 == 0 && fp8gpt_aligned(job->data) &&
                         fp8gpt_aligned(job->angles);
  return fp8gpt_dispatch(job->dtype, by_vector, [&](auto shape) {
    const int64_t parts = (int64_t)job->heads * (half / shape.vector);
    return fp8core_launch(rotate_kernel<shape.dtype, shape.vector>, fp8gpt_row_grid(job->rows, parts),
                          fp8gpt_row_block(parts), stream, *job);
  });
}

extern "C" int fp8gpt_cuda_launch_swiglu(void *stream, const fp8gpt_swiglu *job) {
  const bool by_vector =
    job->width * fp8gpt_bytes(job->dtype) % 16 == 0 && fp8gpt_aligned(job->gate_up) && fp8gpt_aligned(job->out);
  return fp8gpt_dispatch(job->dtype, by_vector, [&](auto shape) {
    const int64_t parts = job->width / shape.vector;
    return fp8core_launch(swiglu_kernel<shape.dtype, shape.vector>, fp8gpt_row_grid(job->rows, parts),
                          fp8gpt_row_block(parts), stream, *job);
  });
}

extern "C" int fp8gpt_cuda_launch_swiglu_backward(void *stream, const fp8gpt_swiglu *job) {
  const bool by_vector = job->width * fp8gpt_bytes(job->dtype) % 16 == 0 && fp8gpt_aligned(job->gate_up) &&
                         fp8gpt_aligned(job->dout) && fp8gpt_aligned(job->dgate_up);
  return fp8gpt_dispatch(job->dtype, by_vector, [&](auto shape) {
    const int64_t parts = job->width / shape.vector;
    return fp8core_launch(swiglu_backward_kernel<shape.dtype, shape.vector>, fp8gpt_row_grid(job->rows, parts),
                          fp8gpt_row_block(parts), stream, *job);
  });
}

extern "C" int fp8gpt_cuda_launch_column_sums(void *stream, const fp8gpt_column_sums *job, float *partials) {
  // Blocks enough to fill a GPU, with four rows a warp where there are so many. Not of the GPU: the bits would be.
  const int64_t most_blocks = 1024;
  const int64_t most_shares = fp8gpt_divide_up(job->rows, warps * rows_at_a_time);
  const bool by_vector = job->columns * fp8gpt_bytes(job->dtype) % 16 == 0 && fp8gpt_aligned(job->data);
  const column_sums_arguments arguments = {*job, partials};
  fp8gpt_partials sums = {partials, 1, job->columns, {job->gradient, NULL}, 1, job->first};
  const int error = fp8gpt_dispatch(job->dtype, by_vector, [&](auto shape) {
    const int64_t tiles = fp8gpt_divide_up(job->columns, FP8CORE_WARP * shape.vector);
    while (2 * sums.blocks <= FP8GPT_CUDA_REDUCTION_BLOCKS && sums.blocks * tiles < most_blocks &&
           sums.blocks < most_shares)
      sums.blocks *= 2;
    return fp8core_launch(column_sums_kernel<shape.dtype, shape.vector>,
                          dim3((unsigned)tiles, (unsigned)sums.blocks, 1), dim3(threads, 1, 1), stream, arguments);
  });
  return error != 0 ? error : fp8gpt_add_partials(stream, sums);
}

extern "C" int fp8gpt_cuda_launch_add(void *stream, const float *values, int64_t count, float *gradient, int first) {
  const add_arguments arguments = {values, gradient, count, first};
  if (count % 4 == 0 && fp8gpt_aligned(values) && fp8gpt_aligned(gradient))
    return fp8core_launch(add_kernel<4>, dim3((unsigned)fp8gpt_divide_up(count, 4 * threads), 1, 1),
                          dim3(threads, 1, 1), stream, arguments);
  return fp8core_launch(add_kernel<1>, dim3((unsigned)fp8gpt_divide_up(count, threads), 1, 1), dim3(threads, 1, 1),
                        stream, arguments);
}
