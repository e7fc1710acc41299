// The update of all states: a block a chunk, whose bits are those of fp8optim_update_element().
#include "kernels.h"
#include "values.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / FP8CORE_WARP;

constexpr int size_of(fp8core_dtype dtype) {
  return dtype == FP8CORE_FP32 ? 4 : dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16 ? 2 : 1;
}
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Formats of the states. `Any`: those of the job.
template <fp8core_dtype Master, fp8core_dtype ExpAvg, fp8core_dtype ExpAvgSq, bool Any>
struct update_shape {
  // So that the widest state of a vector is 16 bytes, and all states go in whole lines of a warp.
  static constexpr int vector = Any ? 4 : 16 / larger(size_of(Master), larger(size_of(ExpAvg), size_of(ExpAvgSq)));
  // Vectors that a thread has in flight.
  static constexpr int unroll = vector == 4 ? 2 : 1;
};

struct pointers {
  unsigned char *part[FP8OPTIM_PARTS];
};

// Codes of a quad of master weights.
static __device__ __noinline__ fp8core_quad round_stochastically(fp8core_dtype dtype, float4 values, uint64_t seed,
                                                                 uint32_t tensor_id, uint32_t step, uint64_t element) {
  const float scaled[4] = {values.x, values.y, values.z, values.w};
  fp8core_quad draws = fp8core_draw_quad(seed, tensor_id, step, element);
#pragma unroll 1
  for (int i = 0; i < 4; i++) draws.v[i] = fp8optim_code(dtype, scaled[i], 1, draws.v[i]);
  return draws;
}

// What a chunk's vectors share.
struct update_context {
  fp8core_dtype dtype[FP8OPTIM_PARTS];
  fp8core_dtype gradient_dtype;
  pointers at;
  fp8optim_constants constants;
  float least_exp_avg_sq;
  bool stochastic;
  uint64_t seed;
  uint32_t tensor_id;
  uint32_t step;
  uint64_t first_element;
};

struct largest_of {
  float state[FP8OPTIM_STATES];
};

template <int Vector>
struct loaded {
  uint32_t gradient[Vector], master[Vector], exp_avg[Vector], exp_avg_sq[Vector];
};

template <int Vector>
static __device__ __forceinline__ void load_states(const update_context &of, int i, loaded<Vector> &from) {
  const int master_size = fp8optim_bytes(of.dtype[FP8OPTIM_MASTER]);
  const int exp_avg_size = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG]);
  const int exp_avg_sq_size = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG_SQ]);
  fp8optim_load_words<Vector>(exp_avg_size, of.at.part[FP8OPTIM_EXP_AVG] + i * exp_avg_size, from.exp_avg);
  fp8optim_load_words<Vector>(exp_avg_sq_size, of.at.part[FP8OPTIM_EXP_AVG_SQ] + i * exp_avg_sq_size, from.exp_avg_sq);
  fp8optim_load_words<Vector>(master_size, of.at.part[FP8OPTIM_MASTER] + i * master_size, from.master);
}

// Elements i to i + Vector of the chunk.
template <int Vector>
static __device__ __forceinline__ void update_vector(const update_context &of, int i, const loaded<Vector> &from,
                                                     largest_of &largest) {
  const fp8optim_constants &constants = of.constants;
  float g[Vector], m[Vector], v[Vector], w[Vector];
  uint32_t words[Vector];
  fp8optim_decode<Vector>(of.gradient_dtype, from.gradient, g);
  fp8optim_decode<Vector>(of.dtype[FP8OPTIM_EXP_AVG], from.exp_avg, m);
  fp8optim_decode<Vector>(of.dtype[FP8OPTIM_EXP_AVG_SQ], from.exp_avg_sq, v);
  fp8optim_decode<Vector>(of.dtype[FP8OPTIM_MASTER], from.master, w);
#pragma unroll
  for (int j = 0; j < Vector; j++) {
    m[j] = fmaf(m[j], constants.exp_avg_keep, g[j] * constants.exp_avg_gradient);
    const float root_part = g[j] * constants.exp_avg_sq_gradient;
    v[j] = fmaf(v[j], constants.exp_avg_sq_keep, root_part * root_part);
    if (of.dtype[FP8OPTIM_EXP_AVG_SQ] != FP8CORE_FP32)
      v[j] = v[j] > 0.0f && v[j] < of.least_exp_avg_sq ? of.least_exp_avg_sq : v[j];
    w[j] = fmaf(-constants.master_change, m[j] / (sqrtf(v[j]) + constants.eps), w[j] * constants.master_keep);
    largest.state[FP8OPTIM_EXP_AVG] = fmaxf(largest.state[FP8OPTIM_EXP_AVG], fabsf(m[j]));
    largest.state[FP8OPTIM_EXP_AVG_SQ] = fmaxf(largest.state[FP8OPTIM_EXP_AVG_SQ], fabsf(v[j]));
    largest.state[FP8OPTIM_MASTER] = fmaxf(largest.state[FP8OPTIM_MASTER], fabsf(w[j]));
  }
  const int exp_avg_size = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG]);
  fp8optim_encode<Vector>(of.dtype[FP8OPTIM_EXP_AVG], m, words);
  fp8optim_store_words<Vector>(exp_avg_size, of.at.part[FP8OPTIM_EXP_AVG] + i * exp_avg_size, words);
  const int exp_avg_sq_size = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG_SQ]);
  fp8optim_encode<Vector>(of.dtype[FP8OPTIM_EXP_AVG_SQ], v, words);
  fp8optim_store_words<Vector>(exp_avg_sq_size, of.at.part[FP8OPTIM_EXP_AVG_SQ] + i * exp_avg_sq_size, words);
  const int master_size = fp8optim_bytes(of.dtype[FP8OPTIM_MASTER]);
  if (of.stochastic) {
#pragma unroll
    for (int j = 0; j < Vector; j++) words[j] = 0;
#pragma unroll
    for (int j = 0; j < Vector; j += 4) {
      const float4 four = {w[j], w[j + 1], w[j + 2], w[j + 3]};
      const fp8core_quad codes = round_stochastically(of.dtype[FP8OPTIM_MASTER], four, of.seed, of.tensor_id, of.step,
                                                      of.first_element + (uint64_t)(i + j));
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (master_size == 4)
          words[j + k] = codes.v[k];
        else if (master_size == 2)
          words[(j + k) / 2] |= codes.v[k] << (16 * (k % 2));
        else
          words[(j + k) / 4] |= codes.v[k] << (8 * k);
      }
    }
  } else {
    fp8optim_encode<Vector>(of.dtype[FP8OPTIM_MASTER], w, words);
  }
  fp8optim_store_words<Vector>(master_size, of.at.part[FP8OPTIM_MASTER] + i * master_size, words);
  if (!of.at.part[FP8OPTIM_WEIGHT]) return;
  // The weight is the stored master's.
  fp8optim_decode<Vector>(of.dtype[FP8OPTIM_MASTER], words, w);
#pragma unroll
  for (int j = 0; j < Vector; j++) w[j] = w[j] * constants.weight_factor;
  switch (of.dtype[FP8OPTIM_WEIGHT]) {
#define STORE(weight, size)                                                                                            \
  case weight:                                                                                                         \
    fp8optim_encode<Vector>(weight, w, words);                                                                         \
    fp8optim_store_words<Vector>(size, of.at.part[FP8OPTIM_WEIGHT] + i * (size), words);                               \
    break
    STORE(FP8CORE_E4M3, 1);
    STORE(FP8CORE_E5M2, 1);
    STORE(FP8CORE_BF16, 2);
    STORE(FP8CORE_FP16, 2);
    STORE(FP8CORE_FP32, 4);
#undef STORE
  }
}

// One of the last elements of a tensor, by the rule itself.
static __device__ __noinline__ void update_one(const update_context *of, const fp8optim_gradient_view *view, int i,
                                               uint32_t scaled_amax[FP8OPTIM_STATES]) {
  void *data[FP8OPTIM_PARTS];
  int64_t column;
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    unsigned char *start = of->at.part[part];
    data[part] = start ? start + i * fp8optim_bytes(of->dtype[part]) : NULL;
  }
  const uint32_t draw =
    of->stochastic ? fp8core_draw(of->seed, of->tensor_id, of->step, of->first_element + (uint64_t)i) : 0;
  fp8optim_update_element(of->dtype, data, of->gradient_dtype, fp8optim_gradient_at(*view, i, &column), 0,
                          &of->constants, of->stochastic, draw, scaled_amax);
}

template <fp8core_dtype Master, fp8core_dtype ExpAvg, fp8core_dtype ExpAvgSq, bool Any>
static __global__ __launch_bounds__(threads, 4) void update_kernel(const fp8optim_cuda_step job) {
  __shared__ uint32_t shared[FP8OPTIM_STATES][warps];
  typedef update_shape<Master, ExpAvg, ExpAvgSq, Any> shape;
  constexpr int vector = shape::vector, unroll = shape::unroll;
  if (job.tables.progress->skipped) return;
  const fp8optim_chunk chunk = job.tables.chunks[blockIdx.x];
  const fp8optim_tensor *tensor = &job.tables.tensors[chunk.tensor];
  const fp8optim_gradient gradient = job.tables.gradients[chunk.tensor];
  const int elements = (int)chunk.elements;
  update_context of;
  of.dtype[FP8OPTIM_MASTER] = Any ? job.state_dtype[FP8OPTIM_MASTER] : Master;
  of.dtype[FP8OPTIM_EXP_AVG] = Any ? job.state_dtype[FP8OPTIM_EXP_AVG] : ExpAvg;
  of.dtype[FP8OPTIM_EXP_AVG_SQ] = Any ? job.state_dtype[FP8OPTIM_EXP_AVG_SQ] : ExpAvgSq;
  of.dtype[FP8OPTIM_WEIGHT] = tensor->dtype[FP8OPTIM_WEIGHT];
  of.gradient_dtype = gradient.dtype;
#pragma unroll
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    unsigned char *start = (unsigned char *)tensor->data[part];
    of.at.part[part] = start ? start + chunk.first * fp8optim_bytes(of.dtype[part]) : NULL;
  }
  of.constants = job.tables.constants[chunk.tensor];
  of.least_exp_avg_sq = fp8core_bits_float(fp8core_decode_bits(of.dtype[FP8OPTIM_EXP_AVG_SQ], 1));
  of.stochastic = job.stochastic != 0;
  of.seed = job.seed;
  of.tensor_id = (uint32_t)chunk.tensor;
  of.step = (uint32_t)job.tables.progress->steps;
  of.first_element = (uint64_t)chunk.first;
  const fp8optim_gradient_view view = fp8optim_view_gradient(gradient, tensor->row_length, chunk.first, vector);
  const int whole = elements / vector * vector;
  largest_of largest = {{0.0f, 0.0f, 0.0f}};
#pragma unroll 1
  for (int first = (int)threadIdx.x * vector; first < whole; first += threads * vector * unroll) {
    loaded<vector> from[unroll];
#pragma unroll
    for (int u = 0; u < unroll; u++) {
      const int i = first + u * threads * vector;
      if (i >= whole) continue;
      // Loads only: what they bring is waited for below.
      load_states<vector>(of, i, from[u]);
      switch (view.size) {
      case 1: fp8optim_load_gradient<vector>(view, 1, i, vector, from[u].gradient); break;
      case 2: fp8optim_load_gradient<vector>(view, 2, i, vector, from[u].gradient); break;
      default: fp8optim_load_gradient<vector>(view, 4, i, vector, from[u].gradient); break;
      }
    }
#pragma unroll
    for (int u = 0; u < unroll; u++) {
      const int i = first + u * threads * vector;
      if (i < whole) update_vector<vector>(of, i, from[u], largest);
    }
  }
  uint32_t scaled_amax[FP8OPTIM_STATES];
  for (int state = 0; state < FP8OPTIM_STATES; state++) scaled_amax[state] = fp8core_float_bits(largest.state[state]);
  if (whole + (int)threadIdx.x < elements) {
    const update_context copy = of;
    const fp8optim_gradient_view view_copy = view;
    uint32_t last_amax[FP8OPTIM_STATES] = {0, 0, 0};
    update_one(&copy, &view_copy, whole + (int)threadIdx.x, last_amax);
    for (int state = 0; state < FP8OPTIM_STATES; state++)
      if (last_amax[state] > scaled_amax[state]) scaled_amax[state] = last_amax[state];
  }
#pragma unroll
  for (int state = 0; state < FP8OPTIM_STATES; state++) {
    const uint32_t found = fp8core_warp_max(scaled_amax[state]);
    if (threadIdx.x % FP8CORE_WARP == 0) shared[state][threadIdx.x / FP8CORE_WARP] = found;
  }
  __syncthreads();
  if (threadIdx.x < FP8OPTIM_STATES) {
    uint32_t found = 0;
    for (int i = 0; i < warps; i++) found = shared[threadIdx.x][i] > found ? shared[threadIdx.x][i] : found;
    job.tables.results[blockIdx.x].scaled_amax[threadIdx.x] = found;
  }
}

template <fp8core_dtype Master, fp8core_dtype ExpAvg, fp8core_dtype ExpAvgSq, bool Any>
int launch(void *stream, const fp8optim_cuda_step *step) {
  return fp8core_launch(update_kernel<Master, ExpAvg, ExpAvgSq, Any>, dim3((unsigned)step->chunk_count, 1, 1),
                        dim3(threads, 1, 1), stream, *step);
}

} // namespace

extern "C" int fp8optim_cuda_launch_update(void *stream, const fp8optim_cuda_step *step) {
  // The presets; everything else by looking at the formats of every vector.
#define PRESET(master, exp_avg, exp_avg_sq)                                                                            \
  if (step->state_dtype[FP8OPTIM_MASTER] == (master) && step->state_dtype[FP8OPTIM_EXP_AVG] == (exp_avg) &&            \
      step->state_dtype[FP8OPTIM_EXP_AVG_SQ] == (exp_avg_sq))                                                          \
  return launch<master, exp_avg, exp_avg_sq, false>(stream, step)
  PRESET(FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32);
  PRESET(FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16);
  PRESET(FP8CORE_BF16, FP8CORE_E4M3, FP8CORE_FP16);
  PRESET(FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_FP16);
  PRESET(FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E4M3);
#undef PRESET
  return launch<FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32, true>(stream, step);
}
