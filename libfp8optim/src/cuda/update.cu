// The update of all states: a block a chunk, whose bits are those of fp8optim_update_element().
#include "kernels.h"
#include "values.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / FP8CORE_WARP;

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Formats of the states. `Any`: those of the job.
template <fp8core_dtype Master, fp8core_dtype ExpAvg, fp8core_dtype ExpAvgSq, bool Any>
struct update_shape {
  // So that the widest state of a vector is 16 bytes, and all states go in whole lines of a warp.
  static constexpr int vector = Any ? 4
                                    : 16 / larger(fp8core_traits<Master>::size,
                                                  larger(fp8core_traits<ExpAvg>::size, fp8core_traits<ExpAvgSq>::size));
};

struct pointers {
  unsigned char *part[FP8OPTIM_PARTS];
};

// What of a chunk is needed rarely: in shared memory, so that it takes no registers.
struct rare_context {
  fp8optim_gradient_view view;
  uint64_t seed;
  uint32_t tensor_id;
  uint32_t step;
  uint64_t first_element;
};

// Codes of a quad of master weights, from element i of the chunk on.
static __device__ __noinline__ fp8core_quad round_stochastically(const rare_context &rare, fp8core_dtype dtype,
                                                                 float4 values, int i) {
  const float scaled[4] = {values.x, values.y, values.z, values.w};
  fp8core_quad draws = fp8core_draw_quad(rare.seed, rare.tensor_id, rare.step, rare.first_element + (uint64_t)i);
#pragma unroll 1
  for (int j = 0; j < 4; j++) draws.v[j] = fp8optim_code(dtype, scaled[j], 1, draws.v[j]);
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
  // Some of exp_avg rounds toward zero: see FP8OPTIM_SHRINK.
  bool shrinks;
  // Masters and weights are not written: see fp8optim_keeps_masters().
  bool keeps;
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

template <int Vector>
static __device__ __forceinline__ void decode_gradient(fp8core_dtype dtype, const uint32_t (&words)[Vector],
                                                       float (&values)[Vector / 4][4]) {
  switch (dtype) {
#define DECODE(known)                                                                                                  \
  case known:                                                                                                          \
    for (int at = 0; at < Vector; at += 4) fp8optim_decode_quad(known, words, at, values[at / 4]);                     \
    break
    DECODE(FP8CORE_E4M3);
    DECODE(FP8CORE_E5M2);
    DECODE(FP8CORE_BF16);
    DECODE(FP8CORE_FP16);
    DECODE(FP8CORE_FP32);
#undef DECODE
  }
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void store_weight(unsigned char *address, const float (&values)[Vector / 4][4]) {
  uint32_t words[Vector];
#pragma unroll
  for (int at = 0; at < Vector; at += 4) fp8optim_encode_quad(Dtype, values[at / 4], at, words);
  fp8optim_store_words<Vector>(fp8core_traits<Dtype>::size, address, words);
}

static __device__ __forceinline__ void pack_quad(int size, const fp8core_quad &codes, int at, uint32_t *words) {
  if (size == 4) {
#pragma unroll
    for (int j = 0; j < 4; j++) words[at + j] = codes.v[j];
  } else if (size == 2) {
    words[at / 2] = codes.v[0] | codes.v[1] << 16;
    words[at / 2 + 1] = codes.v[2] | codes.v[3] << 16;
  } else {
    words[at / 4] = codes.v[0] | codes.v[1] << 8 | codes.v[2] << 16 | codes.v[3] << 24;
  }
}

// Moves those of four 8-bit codes of values `m` that are masked, and farther from zero than their values, by one.
static __device__ __forceinline__ void round_toward_zero(fp8core_dtype dtype, const float (&m)[4], unsigned masked,
                                                         uint32_t *word) {
  float rounded[4];
  fp8optim_decode_quad(dtype, word, 0, rounded);
#pragma unroll
  for (int j = 0; j < 4; j++)
    if ((masked >> j & 1) && fabsf(rounded[j]) > fabsf(m[j])) *word -= UINT32_C(1) << (8 * j);
}

// Elements i to i + Vector of the chunk.
template <int Vector>
static __device__ __forceinline__ void update_vector(const update_context &of, const rare_context &rare, int i,
                                                     const loaded<Vector> &from, largest_of &largest) {
  const fp8optim_constants &constants = of.constants;
  const fp8core_dtype master_dtype = of.dtype[FP8OPTIM_MASTER];
  const int master_size = fp8optim_bytes(master_dtype);
  const int exp_avg_size = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG]);
  const int exp_avg_sq_size = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG_SQ]);
  uint32_t master[Vector], exp_avg[Vector], exp_avg_sq[Vector];
  float gradient[Vector / 4][4];
  decode_gradient<Vector>(of.gradient_dtype, from.gradient, gradient);
#pragma unroll
  for (int at = 0; at < Vector; at += 4) {
    const float(&g)[4] = gradient[at / 4];
    float m[4], v[4], w[4];
    unsigned shrinks = 0;
    fp8optim_decode_quad(of.dtype[FP8OPTIM_EXP_AVG], from.exp_avg, at, m);
    fp8optim_decode_quad(of.dtype[FP8OPTIM_EXP_AVG_SQ], from.exp_avg_sq, at, v);
    fp8optim_decode_quad(master_dtype, from.master, at, w);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float m_gradient = g[j] * constants.exp_avg_gradient;
      if (of.shrinks)
        shrinks |= (unsigned)fp8optim_shrinks(of.dtype[FP8OPTIM_EXP_AVG], m_gradient, m[j], constants.exp_avg_shrink)
                   << j;
      m[j] = fmaf(m[j], constants.exp_avg_keep, m_gradient);
      const float root_part = g[j] * constants.exp_avg_sq_gradient;
      v[j] = fmaf(v[j], constants.exp_avg_sq_keep, root_part * root_part);
      if (of.dtype[FP8OPTIM_EXP_AVG_SQ] != FP8CORE_FP32)
        v[j] = v[j] > 0.0f && v[j] < of.least_exp_avg_sq ? of.least_exp_avg_sq : v[j];
      w[j] = fmaf(-constants.master_change, m[j] / (sqrtf(v[j]) + constants.eps), w[j] * constants.master_keep);
      largest.state[FP8OPTIM_EXP_AVG] = fmaxf(largest.state[FP8OPTIM_EXP_AVG], fabsf(m[j]));
      largest.state[FP8OPTIM_EXP_AVG_SQ] = fmaxf(largest.state[FP8OPTIM_EXP_AVG_SQ], fabsf(v[j]));
      largest.state[FP8OPTIM_MASTER] = fmaxf(largest.state[FP8OPTIM_MASTER], fabsf(w[j]));
    }
    fp8optim_encode_quad(of.dtype[FP8OPTIM_EXP_AVG], m, at, exp_avg);
    if (of.shrinks) round_toward_zero(of.dtype[FP8OPTIM_EXP_AVG], m, shrinks, &exp_avg[at / 4]);
    fp8optim_encode_quad(of.dtype[FP8OPTIM_EXP_AVG_SQ], v, at, exp_avg_sq);
    if (of.stochastic) {
      const float4 four = {w[0], w[1], w[2], w[3]};
      const fp8core_quad codes = round_stochastically(rare, master_dtype, four, i + at);
      pack_quad(master_size, codes, at, master);
    } else {
      fp8optim_encode_quad(master_dtype, w, at, master);
    }
  }
  fp8optim_store_words<Vector>(exp_avg_size, of.at.part[FP8OPTIM_EXP_AVG] + i * exp_avg_size, exp_avg);
  fp8optim_store_words<Vector>(exp_avg_sq_size, of.at.part[FP8OPTIM_EXP_AVG_SQ] + i * exp_avg_sq_size, exp_avg_sq);
  if (of.keeps) return;
  fp8optim_store_words<Vector>(master_size, of.at.part[FP8OPTIM_MASTER] + i * master_size, master);
  if (!of.at.part[FP8OPTIM_WEIGHT]) return;
  // The weight is the stored master's.
  float weight[Vector / 4][4];
#pragma unroll
  for (int at = 0; at < Vector; at += 4) {
    fp8optim_decode_quad(master_dtype, master, at, weight[at / 4]);
#pragma unroll
    for (int j = 0; j < 4; j++) weight[at / 4][j] *= constants.weight_factor;
  }
  switch (of.dtype[FP8OPTIM_WEIGHT]) {
#define STORE(dtype)                                                                                                   \
  case dtype: store_weight<dtype, Vector>(of.at.part[FP8OPTIM_WEIGHT] + i * fp8core_traits<dtype>::size, weight); break
    STORE(FP8CORE_E4M3);
    STORE(FP8CORE_E5M2);
    STORE(FP8CORE_BF16);
    STORE(FP8CORE_FP16);
    STORE(FP8CORE_FP32);
#undef STORE
  }
}

// One of the last elements of a tensor, by the rule itself.
static __device__ __noinline__ void update_one(const update_context *of, const rare_context &rare, int i,
                                               uint32_t scaled_amax[FP8OPTIM_STATES]) {
  void *data[FP8OPTIM_PARTS];
  int64_t column;
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    unsigned char *start = of->at.part[part];
    data[part] = start ? start + i * fp8optim_bytes(of->dtype[part]) : NULL;
  }
  uint32_t kept = 0;
  if (of->keeps) {
    fp8optim_store_code(of->dtype[FP8OPTIM_MASTER], &kept, 0,
                        fp8optim_load_code(of->dtype[FP8OPTIM_MASTER], data[FP8OPTIM_MASTER], 0));
    data[FP8OPTIM_MASTER] = &kept;
    data[FP8OPTIM_WEIGHT] = NULL;
  }
  const uint32_t draw =
    of->stochastic ? fp8core_draw(rare.seed, rare.tensor_id, rare.step, rare.first_element + (uint64_t)i) : 0;
  fp8optim_update_element(of->dtype, data, of->gradient_dtype, fp8optim_gradient_at(rare.view, i, &column), 0,
                          &of->constants, of->stochastic, draw, scaled_amax);
}

template <fp8core_dtype Master, fp8core_dtype ExpAvg, fp8core_dtype ExpAvgSq, bool Any>
static __global__ __launch_bounds__(threads, 4) void update_kernel(const fp8optim_cuda_step job) {
  __shared__ uint32_t shared[FP8OPTIM_STATES][warps];
  __shared__ rare_context rare;
  typedef update_shape<Master, ExpAvg, ExpAvgSq, Any> shape;
  constexpr int vector = shape::vector;
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
  of.shrinks = fp8optim_bytes(of.dtype[FP8OPTIM_EXP_AVG]) == 1 && of.constants.exp_avg_shrink != 0.0f;
  of.keeps = fp8optim_keeps_masters(&job.tables.group_steps[tensor->group]);
  const fp8optim_gradient_view view = fp8optim_view_gradient(gradient, tensor->row_length, chunk.first, vector);
  const unsigned char *start = view.start;
  const int gradient_size = view.size;
  const bool contiguous = view.contiguous;
  if (threadIdx.x == 0) {
    rare.view = view;
    rare.seed = job.seed;
    rare.tensor_id = tensor->stream;
    rare.step = (uint32_t)job.tables.progress->steps;
    rare.first_element = (uint64_t)chunk.first;
  }
  __syncthreads();
  const int whole = elements / vector * vector;
  largest_of largest = {{0.0f, 0.0f, 0.0f}};
#pragma unroll 1
  for (int i = (int)threadIdx.x * vector; i < whole; i += threads * vector) {
    loaded<vector> from;
    // Loads only: what they bring is waited for in update_vector().
    if (contiguous) {
      fp8optim_load_words<vector>(gradient_size, start + i * gradient_size, from.gradient);
    } else {
      const fp8optim_words<vector> words = fp8optim_gather_gradient<vector>(rare.view, i, vector);
#pragma unroll
      for (int j = 0; j < vector; j++) from.gradient[j] = words.of[j];
    }
    load_states<vector>(of, i, from);
    update_vector<vector>(of, rare, i, from, largest);
  }
  uint32_t scaled_amax[FP8OPTIM_STATES];
  for (int state = 0; state < FP8OPTIM_STATES; state++) scaled_amax[state] = fp8core_float_bits(largest.state[state]);
  if (whole + (int)threadIdx.x < elements) {
    const update_context copy = of;
    uint32_t last_amax[FP8OPTIM_STATES] = {0, 0, 0};
    update_one(&copy, rare, whole + (int)threadIdx.x, last_amax);
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
    if (of.keeps && threadIdx.x == FP8OPTIM_MASTER)
      found = fp8core_float_bits(tensor->amax[FP8OPTIM_MASTER] * tensor->scale[FP8OPTIM_MASTER]);
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
