// What the kernels share: vectors of stored elements and their values, sums over warps and blocks, dropout.
//
// A kernel is a template of the format and of how many elements a thread takes at a time: as many as make 16 bytes
// where every row starts at a multiple of them, else one, neighbours in neighbouring threads. So there are no
// remainders.
#ifndef FP8GPT_CUDA_VALUES_CUH
#define FP8GPT_CUDA_VALUES_CUH

#include "kernels.h"
#include "numerics.h"
#include "platform.cuh"

#if !defined(FP8CORE_CUDA_EMULATION)
#  include <cuda_bf16.h>
#endif

// At most, of the blocks that share a row: see fp8gpt_row_grid().
#define FP8GPT_CUDA_ROW_THREADS 256

FP8CORE_CONSTANT_RULE int fp8gpt_bytes(fp8core_dtype dtype) { return dtype == FP8CORE_FP32 ? 4 : 2; }

// Stored elements as they lie in memory.
template <fp8core_dtype Dtype, int Vector>
struct fp8gpt_packed {
  static constexpr int bytes = Vector * fp8gpt_bytes(Dtype);
  static constexpr int words = (bytes + 3) / 4;
  static_assert(Vector == 1 || bytes % 8 == 0, "a single element, or whole loads of 8 or 16 bytes");
  uint32_t word[words];
};

// Elements index .. index + Vector - 1 of an array that is aligned to their bytes, or to 16.
template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ fp8gpt_packed<Dtype, Vector> fp8gpt_load_packed(const void *data, int64_t index) {
  typedef fp8gpt_packed<Dtype, Vector> packed;
  const unsigned char *address = (const unsigned char *)data + index * fp8gpt_bytes(Dtype);
  packed from;
  if constexpr (packed::bytes == 2) {
    from.word[0] = *(const uint16_t *)address;
  } else if constexpr (packed::bytes == 4) {
    from.word[0] = *(const uint32_t *)address;
  } else if constexpr (packed::bytes == 8) {
    const uint2 two = *(const uint2 *)address;
    from.word[0] = two.x;
    from.word[1] = two.y;
  } else {
#pragma unroll
    for (int i = 0; i < packed::words; i += 4) {
      const uint4 four = *(const uint4 *)(address + 4 * i);
      from.word[i] = four.x;
      from.word[i + 1] = four.y;
      from.word[i + 2] = four.z;
      from.word[i + 3] = four.w;
    }
  }
  return from;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void fp8gpt_store_packed(const fp8gpt_packed<Dtype, Vector> &from, void *data,
                                                           int64_t index) {
  typedef fp8gpt_packed<Dtype, Vector> packed;
  unsigned char *address = (unsigned char *)data + index * fp8gpt_bytes(Dtype);
  if constexpr (packed::bytes == 2) {
    *(uint16_t *)address = (uint16_t)from.word[0];
  } else if constexpr (packed::bytes == 4) {
    *(uint32_t *)address = from.word[0];
  } else if constexpr (packed::bytes == 8) {
    *(uint2 *)address = make_uint2(from.word[0], from.word[1]);
  } else {
#pragma unroll
    for (int i = 0; i < packed::words; i += 4)
      *(uint4 *)(address + 4 * i) = make_uint4(from.word[i], from.word[i + 1], from.word[i + 2], from.word[i + 3]);
  }
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void fp8gpt_unpack(const fp8gpt_packed<Dtype, Vector> &from,
                                                     float (&values)[Vector]) {
#pragma unroll
  for (int i = 0; i < Vector; i++) {
    if constexpr (Dtype == FP8CORE_FP32)
      values[i] = fp8core_bits_float(from.word[i]);
    else
      values[i] = fp8core_bits_float(i % 2 ? from.word[i / 2] & 0xffff0000u : from.word[i / 2] << 16);
  }
}

// BF16 codes of two values in a word, rounded to nearest, ties to even.
static __device__ __forceinline__ uint32_t fp8gpt_encode_two(float low, float high) {
  const uint32_t low_bits = fp8core_float_bits(low), high_bits = fp8core_float_bits(high);
#if defined(FP8CORE_CUDA_EMULATION)
  uint32_t word = fp8core_encode_nearest(FP8CORE_BF16, low_bits & FP8CORE_F32_MAGNITUDE, 0) | (low_bits >> 31 << 15) |
                  fp8core_encode_nearest(FP8CORE_BF16, high_bits & FP8CORE_F32_MAGNITUDE, 0) << 16;
  word |= high_bits & FP8CORE_F32_SIGN;
#else
  uint32_t word;
  const __nv_bfloat162 codes = __floats2bfloat162_rn(low, high);
  memcpy(&word, &codes, sizeof(word));
#endif
  // The hardware's rounding is the rule's, but its NaNs have no sign.
  if (__builtin_expect(low != low || high != high, 0)) {
    if (low != low) word = (word & 0xffff0000u) | 0x7fc0 | (low_bits >> 16 & 0x8000);
    if (high != high) word = (word & 0xffff) | FP8CORE_F32_QUIET_NAN | (high_bits & FP8CORE_F32_SIGN);
  }
  return word;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ fp8gpt_packed<Dtype, Vector> fp8gpt_pack(const float (&values)[Vector]) {
  fp8gpt_packed<Dtype, Vector> to;
  if constexpr (Dtype == FP8CORE_FP32) {
#pragma unroll
    for (int i = 0; i < Vector; i++) to.word[i] = fp8core_float_bits(values[i]);
  } else if constexpr (Vector == 1) {
    to.word[0] = fp8gpt_encode_two(values[0], 0.0f);
  } else {
#pragma unroll
    for (int i = 0; i < Vector; i += 2) to.word[i / 2] = fp8gpt_encode_two(values[i], values[i + 1]);
  }
  return to;
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void fp8gpt_load(const void *data, int64_t index, float (&values)[Vector]) {
  fp8gpt_unpack(fp8gpt_load_packed<Dtype, Vector>(data, index), values);
}

template <fp8core_dtype Dtype, int Vector>
static __device__ __forceinline__ void fp8gpt_store(const float (&values)[Vector], void *data, int64_t index) {
  fp8gpt_store_packed(fp8gpt_pack<Dtype, Vector>(values), data, index);
}

// Of a format that is known at run time only.
template <int Vector>
static __device__ __forceinline__ void fp8gpt_load_either(fp8core_dtype dtype, const void *data, int64_t index,
                                                          float (&values)[Vector]) {
  if (dtype == FP8CORE_FP32)
    fp8gpt_load<FP8CORE_FP32, Vector>(data, index, values);
  else
    fp8gpt_load<FP8CORE_BF16, Vector>(data, index, values);
}

// Sums of all lanes, in the same order for each.
static __device__ __forceinline__ float fp8gpt_warp_sum(float value) {
#pragma unroll
  for (int offset = FP8CORE_WARP / 2; offset > 0; offset /= 2)
    value += fp8core_bits_float(__shfl_xor_sync(0xffffffffu, fp8core_float_bits(value), offset));
  return value;
}

// NaNs do not count; of no number minus infinity.
static __device__ __forceinline__ float fp8gpt_warp_max(float value) {
#pragma unroll
  for (int offset = FP8CORE_WARP / 2; offset > 0; offset /= 2)
    value = fmaxf(value, fp8core_bits_float(__shfl_xor_sync(0xffffffffu, fp8core_float_bits(value), offset)));
  return value;
}

// The sum over the threads of a block of whole warps. `shared` is of this call alone.
static __device__ __forceinline__ float fp8gpt_block_sum(float value, float (&shared)[FP8CORE_WARP]) {
  value = fp8gpt_warp_sum(value);
  if (blockDim.x == FP8CORE_WARP) return value;
  const unsigned lane = threadIdx.x % FP8CORE_WARP;
  if (lane == 0) shared[threadIdx.x / FP8CORE_WARP] = value;
  __syncthreads();
  return fp8gpt_warp_sum(lane < blockDim.x / FP8CORE_WARP ? shared[lane] : 0.0f);
}

static __device__ __forceinline__ float fp8gpt_block_max(float value, float (&shared)[FP8CORE_WARP]) {
  value = fp8gpt_warp_max(value);
  if (blockDim.x == FP8CORE_WARP) return value;
  const unsigned lane = threadIdx.x % FP8CORE_WARP;
  if (lane == 0) shared[threadIdx.x / FP8CORE_WARP] = value;
  __syncthreads();
  return fp8gpt_warp_max(lane < blockDim.x / FP8CORE_WARP ? shared[lane] : -INFINITY);
}

// Dropout, ready for the device.
typedef struct fp8gpt_drop_rule {
  uint64_t seed;
  uint32_t place;
  uint32_t pass;
  // Draws below it drop; 0: there is no dropout.
  uint32_t threshold;
  // What an element that is kept is multiplied with.
  float factor;
} fp8gpt_drop_rule;

static inline fp8gpt_drop_rule fp8gpt_drop_rule_of(const fp8gpt_dropout &dropout) {
  fp8gpt_drop_rule rule;
  rule.seed = dropout.seed;
  rule.place = dropout.place;
  rule.pass = dropout.pass;
  // A draw is an integer: it is below a number where it is below that number rounded up.
  rule.threshold = (uint32_t)ceil((double)dropout.probability * 4294967296.0);
  rule.factor = 1.0f / (1.0f - dropout.probability);
  return rule;
}

// Of elements `element` .. element + Vector - 1 of the whole tensor; `element` is a multiple of Vector.
template <int Vector>
static __device__ __forceinline__ void fp8gpt_drop(const fp8gpt_drop_rule &rule, int64_t element,
                                                   float (&values)[Vector]) {
  if (rule.threshold == 0) return;
  if constexpr (Vector == 1) {
    uint32_t draws[4];
    fp8core_draw_block(rule.seed, rule.place, rule.pass, (uint64_t)element / 4, draws);
    // Not draws[element % 4]: an index that the compiler does not know would put them in memory.
    const uint32_t low = element & 1 ? draws[1] : draws[0], high = element & 1 ? draws[3] : draws[2];
    values[0] = (element & 2 ? high : low) < rule.threshold ? 0.0f : values[0] * rule.factor;
  } else {
#pragma unroll
    for (int at = 0; at < Vector; at += 4) {
      uint32_t draws[4];
      fp8core_draw_block(rule.seed, rule.place, rule.pass, (uint64_t)(element + at) / 4, draws);
#pragma unroll
      for (int i = 0; i < 4; i++) values[at + i] = draws[i] < rule.threshold ? 0.0f : values[at + i] * rule.factor;
    }
  }
}

// On the host: the template for a job.

template <fp8core_dtype Dtype, int Vector>
struct fp8gpt_shape {
  static constexpr fp8core_dtype dtype = Dtype;
  static constexpr int vector = Vector;
};

// Calls call() with the shape; `by_vector` where all rows allow it. `Narrow` and `Wide` elements of BF16 and FP32.
template <int Narrow = 8, int Wide = 4, typename Call>
static inline int fp8gpt_dispatch(fp8core_dtype dtype, bool by_vector, Call call) {
  if (dtype == FP8CORE_FP32)
    return by_vector ? call(fp8gpt_shape<FP8CORE_FP32, Wide>()) : call(fp8gpt_shape<FP8CORE_FP32, 1>());
  return by_vector ? call(fp8gpt_shape<FP8CORE_BF16, Narrow>()) : call(fp8gpt_shape<FP8CORE_BF16, 1>());
}

// Whether an array that begins there, or is not there, may be read in vectors of 16 bytes.
static inline bool fp8gpt_aligned(const void *data) { return (uintptr_t)data % 16 == 0; }

static inline int64_t fp8gpt_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks and threads that share a row, an element or vector each.
static inline dim3 fp8gpt_row_grid(int64_t rows, int64_t parts) {
  return dim3((unsigned)rows, (unsigned)fp8gpt_divide_up(parts, FP8GPT_CUDA_ROW_THREADS), 1);
}
static inline dim3 fp8gpt_row_block(int64_t parts) {
  const int64_t threads = fp8gpt_divide_up(parts, fp8gpt_divide_up(parts, FP8GPT_CUDA_ROW_THREADS));
  return dim3((unsigned)(fp8gpt_divide_up(threads, FP8CORE_WARP) * FP8CORE_WARP), 1, 1);
}

// Partial sums of columns, that blocks left: see fp8gpt_add_partials().
typedef struct fp8gpt_partials {
  // [blocks, 2 or 1, columns]
  const float *sums;
  int64_t blocks;
  int64_t columns;
  // Of each part; NULL: not wanted.
  float *gradients[2];
  int parts;
  int first;
} fp8gpt_partials;

// Adds them in the order of the blocks and then to the gradients, which are set where `first` (pointwise.cu).
int fp8gpt_add_partials(void *stream, const fp8gpt_partials &partials);

#endif
