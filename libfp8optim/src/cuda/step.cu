// The parts of a step around the update: tables, the gradients' norm and amaxes, plans of the tensors, their new
// scales.
#include "kernels.h"
#include "values.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / FP8CORE_WARP;

struct upload_arguments {
  uint32_t *destination;
  int count;
  uint32_t words[FP8OPTIM_CUDA_UPLOAD_WORDS];
};

static __global__ __launch_bounds__(threads) void upload_kernel(const upload_arguments job) {
  for (int i = (int)threadIdx.x; i < job.count; i += threads) job.destination[i] = job.words[i];
}

// The same sum in every lane, in an order that depends on nothing.
static __device__ __forceinline__ double warp_sum(double value) {
  for (int offset = FP8CORE_WARP / 2; offset > 0; offset /= 2) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t low = __shfl_xor_sync(0xffffffffu, (uint32_t)bits, offset);
    const uint32_t high = __shfl_xor_sync(0xffffffffu, (uint32_t)(bits >> 32), offset);
    bits = (uint64_t)high << 32 | low;
    double other;
    memcpy(&other, &bits, sizeof(other));
    value += other;
  }
  return value;
}

// Of all threads of the block; the results are thread 0's.
static __device__ __forceinline__ void block_gather(double *sum, uint32_t *largest) {
  __shared__ double shared_sums[warps];
  __shared__ uint32_t shared_largest[warps];
  const double of_warp = warp_sum(*sum);
  const uint32_t largest_of_warp = fp8core_warp_max(*largest);
  if (threadIdx.x % FP8CORE_WARP == 0) {
    shared_sums[threadIdx.x / FP8CORE_WARP] = of_warp;
    shared_largest[threadIdx.x / FP8CORE_WARP] = largest_of_warp;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < warps; i++) {
      *sum = i == 1 ? of_warp + shared_sums[1] : *sum + shared_sums[i];
      *largest = i == 1 ? largest_of_warp : *largest;
      *largest = shared_largest[i] > *largest ? shared_largest[i] : *largest;
    }
  }
}

// Squares of one vector in FP64, and magnitudes as integers, in which NaN > infinity > finite.
template <fp8core_dtype Dtype, int Elements>
static __device__ __noinline__ double measure_exactly(const fp8optim_words<Elements> words, uint32_t *largest) {
  double sum = 0.0;
#pragma unroll
  for (int at = 0; at < Elements; at += 4) {
    float values[4];
    fp8optim_decode_quad(Dtype, words.of, at, values);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum += (double)values[i] * (double)values[i];
      fp8optim_raise(largest, values[i]);
    }
  }
  return sum;
}

// One vector's squares, summed in FP32, and its largest magnitude.
template <fp8core_dtype Dtype, int Elements>
static __device__ __forceinline__ void measure_vector(const uint32_t (&words)[Elements], double *sum, float *most,
                                                      uint32_t *largest) {
  constexpr bool wide = Dtype == FP8CORE_BF16 || Dtype == FP8CORE_FP32;
  float squares = 0.0f, vector_most = 0.0f;
#pragma unroll
  for (int at = 0; at < Elements; at += 4) {
    float values[4];
    fp8optim_decode_quad(Dtype, words, at, values);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      squares = fmaf(values[i], values[i], squares);
      vector_most = fmaxf(vector_most, fabsf(values[i]));
    }
  }
  // Where a square overflows, or enough of them underflow to matter, and with infinities and NaNs: rare.
  const bool fits = wide ? (squares >= 0x1p-80f && squares <= 0x1p126f) || (squares == 0.0f && vector_most == 0.0f)
                         : squares <= 0x1p126f;
  if (fits) {
    *sum += (double)squares;
    *most = fmaxf(*most, vector_most);
  } else {
    fp8optim_words<Elements> copy;
#pragma unroll
    for (int i = 0; i < Elements; i++) copy.of[i] = words[i];
    *sum += measure_exactly<Dtype, Elements>(copy, largest);
  }
}

// A thread sums its vectors in FP64, in their order.
template <fp8core_dtype Dtype>
static __device__ __forceinline__ void measure_chunk(const fp8optim_gradient &gradient, int64_t row_length,
                                                     const fp8optim_chunk &chunk, double *sum, uint32_t *largest) {
  constexpr int size = fp8core_traits<Dtype>::size;
  constexpr int vector = 16 / size;
  // All four loads of a chunk of FP8 at once.
  constexpr int unroll = 4;
  constexpr int step = threads * vector;
  const fp8optim_gradient_view view = fp8optim_view_gradient(gradient, row_length, chunk.first, vector);
  const unsigned char *start = view.start;
  const int elements = (int)chunk.elements;
  const int whole = view.contiguous ? elements / vector * vector : 0;
  float most = 0.0f;
#pragma unroll 1
  for (int first = (int)threadIdx.x * vector; first < whole; first += step * unroll) {
    uint32_t words[unroll][vector];
#pragma unroll
    for (int u = 0; u < unroll; u++)
      if (first + u * step < whole) fp8optim_load_words<vector>(size, start + (first + u * step) * size, words[u]);
#pragma unroll
    for (int u = 0; u < unroll; u++)
      if (first + u * step < whole) measure_vector<Dtype, vector>(words[u], sum, &most, largest);
  }
#pragma unroll 1
  for (int first = whole + (int)threadIdx.x * vector; first < elements; first += step) {
    const fp8optim_words<vector> words = fp8optim_gather_gradient<vector>(view, first, elements - first);
    measure_vector<Dtype, vector>(words.of, sum, &most, largest);
  }
  fp8optim_raise(largest, most);
}

// A block a chunk.
static __global__ __launch_bounds__(threads, 6) void measure_kernel(const fp8optim_cuda_step job) {
  const fp8optim_chunk chunk = job.tables.chunks[blockIdx.x];
  const fp8optim_gradient gradient = job.tables.gradients[chunk.tensor];
  const int64_t row_length = job.tables.tensors[chunk.tensor].row_length;
  double sum = 0.0;
  uint32_t largest = 0;
  switch (gradient.dtype) {
  case FP8CORE_E4M3: measure_chunk<FP8CORE_E4M3>(gradient, row_length, chunk, &sum, &largest); break;
  case FP8CORE_E5M2: measure_chunk<FP8CORE_E5M2>(gradient, row_length, chunk, &sum, &largest); break;
  case FP8CORE_BF16: measure_chunk<FP8CORE_BF16>(gradient, row_length, chunk, &sum, &largest); break;
  case FP8CORE_FP16: measure_chunk<FP8CORE_FP16>(gradient, row_length, chunk, &sum, &largest); break;
  case FP8CORE_FP32: measure_chunk<FP8CORE_FP32>(gradient, row_length, chunk, &sum, &largest); break;
  }
  block_gather(&sum, &largest);
  if (threadIdx.x != 0) return;
  job.tables.results[blockIdx.x].sum_squares = sum;
  job.tables.results[blockIdx.x].gradient_amax = largest;
}

// A block a tensor: what fp8optim_gather_rule() does, but for the order of the sum.
static __global__ __launch_bounds__(threads) void gather_kernel(const fp8optim_cuda_step job) {
  for (int64_t index = blockIdx.x; index < job.tensor_count; index += gridDim.x) {
    fp8optim_tensor *tensor = &job.tables.tensors[index];
    const fp8optim_chunk_result *results = job.tables.results + tensor->first_chunk;
    double sum = 0.0;
    uint32_t largest = 0;
    for (int64_t i = threadIdx.x; i < tensor->chunks; i += threads) {
      sum += results[i].sum_squares;
      largest = results[i].gradient_amax > largest ? results[i].gradient_amax : largest;
    }
    block_gather(&sum, &largest);
    if (threadIdx.x == 0) {
      const fp8optim_chunk_result all = {sum, largest, {0, 0, 0}};
      fp8optim_tensor gathered;
      gathered.first_chunk = 0;
      gathered.chunks = 1;
      fp8optim_share share = {0.0, 0};
      fp8optim_gather_rule(&gathered, &all, fp8optim_scale_inverse_of(job.tables.gradients[index]), &share.sum_squares,
                           &share.nonfinite);
      tensor->gradient_amax = gathered.gradient_amax;
      job.tables.shares[index] = share;
    }
    __syncthreads();
  }
}

// One block: the shares of all tensors, then the groups.
static __global__ __launch_bounds__(threads) void begin_kernel(const fp8optim_cuda_step job) {
  double sum = 0.0;
  uint32_t nonfinite = 0;
  for (int64_t i = threadIdx.x; i < job.tensor_count; i += threads) {
    sum += job.tables.shares[i].sum_squares;
    nonfinite |= (uint32_t)job.tables.shares[i].nonfinite;
  }
  block_gather(&sum, &nonfinite);
  if (threadIdx.x == 0) fp8optim_begin_rule(job.tables.progress, sum, (int)nonfinite, job.max_norm, job.loss_scale);
  __syncthreads();
  if (job.tables.progress->skipped) return;
  const int64_t steps = job.tables.progress->steps;
  for (int i = (int)threadIdx.x; i < job.group_count; i += threads)
    job.tables.group_steps[i] = fp8optim_group_rule(&job.tables.groups[i], steps);
}

static __global__ __launch_bounds__(threads) void plan_kernel(const fp8optim_cuda_step job) {
  if (job.tables.progress->skipped) return;
  const int64_t index = (int64_t)blockIdx.x * threads + threadIdx.x;
  if (index >= job.tensor_count) return;
  fp8optim_tensor *tensor = &job.tables.tensors[index];
  fp8optim_plan_rule(tensor, &job.tables.group_steps[tensor->group], job.tables.progress->clip_factor, job.loss_scale,
                     fp8optim_scale_inverse_of(job.tables.gradients[index]), &job.tables.constants[index]);
}

// A block a tensor.
static __global__ __launch_bounds__(threads) void end_kernel(const fp8optim_cuda_step job) {
  __shared__ uint32_t shared[FP8OPTIM_STATES][warps];
  if (job.tables.progress->skipped) return;
  for (int64_t index = blockIdx.x; index < job.tensor_count; index += gridDim.x) {
    fp8optim_tensor *tensor = &job.tables.tensors[index];
    const fp8optim_chunk_result *results = job.tables.results + tensor->first_chunk;
    uint32_t largest[FP8OPTIM_STATES] = {0, 0, 0};
    for (int64_t i = threadIdx.x; i < tensor->chunks; i += threads)
      for (int state = 0; state < FP8OPTIM_STATES; state++) {
        const uint32_t found = results[i].scaled_amax[state];
        largest[state] = found > largest[state] ? found : largest[state];
      }
    for (int state = 0; state < FP8OPTIM_STATES; state++) {
      const uint32_t found = fp8core_warp_max(largest[state]);
      if (threadIdx.x % FP8CORE_WARP == 0) shared[state][threadIdx.x / FP8CORE_WARP] = found;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int state = 0; state < FP8OPTIM_STATES; state++) {
        largest[state] = 0;
        for (int i = 0; i < warps; i++)
          largest[state] = shared[state][i] > largest[state] ? shared[state][i] : largest[state];
      }
      fp8optim_end_rule(tensor, largest);
    }
    __syncthreads();
  }
}

dim3 blocks(int64_t count) { return dim3((unsigned)(count < INT32_MAX ? count : INT32_MAX), 1, 1); }

} // namespace

extern "C" int fp8optim_cuda_launch_upload(void *stream, void *destination, const uint32_t *words, int count) {
  upload_arguments job;
  job.destination = (uint32_t *)destination;
  job.count = count;
  memcpy(job.words, words, (size_t)count * sizeof(*words));
  return fp8core_launch(upload_kernel, blocks(1), dim3(threads, 1, 1), stream, job);
}

extern "C" int fp8optim_cuda_launch_measure(void *stream, const fp8optim_cuda_step *step) {
  return fp8core_launch(measure_kernel, blocks(step->chunk_count), dim3(threads, 1, 1), stream, *step);
}

extern "C" int fp8optim_cuda_launch_gather(void *stream, const fp8optim_cuda_step *step) {
  return fp8core_launch(gather_kernel, blocks(step->tensor_count), dim3(threads, 1, 1), stream, *step);
}

extern "C" int fp8optim_cuda_launch_begin(void *stream, const fp8optim_cuda_step *step) {
  return fp8core_launch(begin_kernel, blocks(1), dim3(threads, 1, 1), stream, *step);
}

extern "C" int fp8optim_cuda_launch_plan(void *stream, const fp8optim_cuda_step *step) {
  return fp8core_launch(plan_kernel, blocks((step->tensor_count + threads - 1) / threads), dim3(threads, 1, 1), stream,
                        *step);
}

extern "C" int fp8optim_cuda_launch_end(void *stream, const fp8optim_cuda_step *step) {
  return fp8core_launch(end_kernel, blocks(step->tensor_count), dim3(threads, 1, 1), stream, *step);
}
