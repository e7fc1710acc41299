// Four elements of a cast at once: the common case in few instructions, every other through the scalar rule of
// numerics.h.
#ifndef FP8CORE_CUDA_RULES_CUH
#define FP8CORE_CUDA_RULES_CUH

#include "numerics.h"
#include "platform.cuh"

// fp8core_format_of() as constants, and what follows from it.
template <fp8core_dtype Dtype>
struct fp8core_traits {
  static constexpr int size = fp8core_format_of(Dtype).bits / 8;
  static constexpr int mantissa_bits = fp8core_format_of(Dtype).mantissa_bits;
  static constexpr int min_exponent = fp8core_format_of(Dtype).min_exponent;
  static constexpr uint32_t max_code = fp8core_format_of(Dtype).max_code;
  static constexpr uint32_t max_rounding_to_max = fp8core_format_of(Dtype).max_rounding_to_max;
  // Half of the smallest subnormal, 2^half_exponent; 0 where FP32 has no such number.
  static constexpr int half_exponent = min_exponent - mantissa_bits - 1;
  static constexpr uint32_t max_rounding_to_zero = half_exponent >= -126   ? (uint32_t)(half_exponent + 127) << 23
                                                   : half_exponent >= -149 ? UINT32_C(1) << (half_exponent + 149)
                                                                           : 0;
};
static_assert(fp8core_traits<FP8CORE_E4M3>::max_rounding_to_zero == 0x3a800000 &&
                fp8core_traits<FP8CORE_E5M2>::max_rounding_to_zero == 0x37000000 &&
                fp8core_traits<FP8CORE_BF16>::max_rounding_to_zero == 0x00008000 &&
                fp8core_traits<FP8CORE_FP16>::max_rounding_to_zero == 0x33000000 &&
                fp8core_traits<FP8CORE_FP32>::max_rounding_to_zero == 0,
              "2^-10, 2^-17, 2^-134, 2^-25, and nothing");

// FP32 bits of a code's value, exact for every finite one; infinities and NaNs give some NaN, whose sign means nothing.
template <fp8core_dtype Source>
FP8CORE_RULE uint32_t fp8core_decode_finite(uint32_t code) {
  typedef fp8core_traits<Source> format;
  if (Source == FP8CORE_FP32) return code;
  if (Source == FP8CORE_BF16) return code << 16;
  constexpr uint32_t sign_bit = UINT32_C(1) << (8 * format::size - 1);
  const uint32_t magnitude = code & (sign_bit - 1);
  // The code's exponent and mantissa, read as FP32, are off by a power of two, for its subnormals too.
  const float rebias = fp8core_bits_float((uint32_t)(127 + 126 + format::min_exponent) << 23);
  uint32_t bits = fp8core_float_bits(fp8core_bits_float(magnitude << (23 - format::mantissa_bits)) * rebias);
  if (magnitude > format::max_code) bits = FP8CORE_F32_QUIET_NAN;
  return bits | (code & sign_bit) << (32 - 8 * format::size);
}

typedef struct fp8core_quad {
  uint32_t v[4];
} fp8core_quad;

// What a thread gathers. The magnitudes are compared as integers: NaN > infinity > finite.
typedef struct fp8core_gathered {
  uint32_t amax;
  uint32_t saturated;
  uint32_t flushed_to_zero;
  uint32_t nonfinite;
} fp8core_gathered;

typedef struct fp8core_quad_result {
  fp8core_quad codes;
  fp8core_gathered gathered;
} fp8core_quad_result;

// How the elements of one launch are cast. Uniform over the launch.
typedef struct fp8core_cast_mode {
  int stochastic;
  int saturate;
  int count;
  uint32_t tensor_id;
  uint32_t step;
  uint64_t seed;
} fp8core_cast_mode;

// The four draws of elements `element` to `element` + 3.
static __device__ __noinline__ fp8core_quad fp8core_draw_quad(uint64_t seed, uint32_t tensor_id, uint32_t step,
                                                              uint64_t element) {
  uint32_t draws[8];
  for (int half = 0; half < 2; half++) {
    const uint64_t block = element / 4 + (uint64_t)half;
    uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), tensor_id, step};
    // An aligned quad needs one block only.
    if (half == 0 || element % 4 != 0) fp8core_philox_rounds(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
    for (int i = 0; i < 4; i++) draws[4 * half + i] = counter[i];
  }
  const int one = (int)(element & 1), two = (int)(element & 2);
  fp8core_quad quad;
  for (int i = 0; i < 6; i++) draws[i] = one ? draws[i + 1] : draws[i];
  for (int i = 0; i < 4; i++) quad.v[i] = two ? draws[i + 2] : draws[i];
  return quad;
}

// The scalar rule for the first `valid` of four elements.
template <fp8core_dtype Source, fp8core_dtype Destination>
static __device__ __noinline__ fp8core_quad_result fp8core_cast_quad_rule(fp8core_quad codes, int valid,
                                                                          float scale_inverse, float scale,
                                                                          int stochastic, fp8core_quad draws,
                                                                          int saturate) {
  fp8core_quad_result result = {};
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    const fp8core_cast_result element =
      fp8core_cast_element(codes.v[i], Source, scale_inverse, Destination, scale, stochastic, draws.v[i], saturate);
    result.codes.v[i] = element.code;
    if (i >= valid) continue;
    result.gathered.amax = element.magnitude > result.gathered.amax ? element.magnitude : result.gathered.amax;
    result.gathered.saturated += (uint32_t)element.saturated;
    result.gathered.flushed_to_zero += (uint32_t)element.flushed_to_zero;
    result.gathered.nonfinite += (uint32_t)element.nonfinite;
  }
  return result;
}

// Codes of four finite values (FP32 bits with their signs) that do not exceed max_rounding_to_max, to nearest even.
template <fp8core_dtype Destination>
static __device__ __forceinline__ void fp8core_encode_quad(const uint32_t (&bits)[4], uint32_t (&codes)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(FP8CORE_NO_HARDWARE_FP8)
  if constexpr (Destination == FP8CORE_E4M3 || Destination == FP8CORE_E5M2) {
    const __nv_fp8_interpretation_t format = Destination == FP8CORE_E4M3 ? __NV_E4M3 : __NV_E5M2;
#  pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 pair = make_float2(fp8core_bits_float(bits[i]), fp8core_bits_float(bits[i + 1]));
      const uint32_t packed = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, format);
      codes[i] = packed & 0xff;
      codes[i + 1] = packed >> 8;
    }
  } else
#endif
  {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (Destination == FP8CORE_FP32) {
        codes[i] = bits[i];
      } else if constexpr (Destination == FP8CORE_BF16) {
        codes[i] = (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16;
      } else {
        constexpr int sign_shift = 32 - 8 * fp8core_traits<Destination>::size;
        codes[i] = fp8core_encode_nearest(Destination, bits[i] & FP8CORE_F32_MAGNITUDE, 1) |
                   (bits[i] & FP8CORE_F32_SIGN) >> sign_shift;
      }
    }
  }
}

// Casts four elements, of which the first `valid` are real (the others' codes must be 0), and gathers their amax and
// counts. `element` is the index of the first in the whole tensor.
template <fp8core_dtype Source, fp8core_dtype Destination>
static __device__ __forceinline__ void fp8core_cast_quad(const uint32_t (&source)[4], int valid, float scale_inverse,
                                                         float scale, const fp8core_cast_mode &mode, uint64_t element,
                                                         uint32_t (&codes)[4], fp8core_gathered &gathered) {
  typedef fp8core_traits<Destination> format;
  uint32_t magnitudes[4], scaled[4], signed_scaled[4];
  uint32_t largest_scaled = 0, largest = gathered.amax;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t bits = fp8core_decode_finite<Source>(source[i]);
    const float value = fp8core_bits_float(bits) * scale_inverse;
    magnitudes[i] = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
    scaled[i] = fp8core_float_bits(value * scale) & FP8CORE_F32_MAGNITUDE;
    signed_scaled[i] = scaled[i] | (bits & FP8CORE_F32_SIGN);
    largest = magnitudes[i] > largest ? magnitudes[i] : largest;
    largest_scaled = scaled[i] > largest_scaled ? scaled[i] : largest_scaled;
  }
  // Infinities, NaNs and what saturates: rare.
  if (mode.stochastic || largest_scaled > format::max_rounding_to_max) {
    fp8core_quad quad, draws = {};
#pragma unroll
    for (int i = 0; i < 4; i++) quad.v[i] = source[i];
    if (mode.stochastic) draws = fp8core_draw_quad(mode.seed, mode.tensor_id, mode.step, element);
    const fp8core_quad_result result = fp8core_cast_quad_rule<Source, Destination>(
      quad, valid, scale_inverse, scale, mode.stochastic, draws, mode.saturate);
#pragma unroll
    for (int i = 0; i < 4; i++) codes[i] = result.codes.v[i];
    gathered.amax = result.gathered.amax > gathered.amax ? result.gathered.amax : gathered.amax;
    gathered.saturated += result.gathered.saturated;
    gathered.flushed_to_zero += result.gathered.flushed_to_zero;
    gathered.nonfinite += result.gathered.nonfinite;
    return;
  }
  gathered.amax = largest;
  if (mode.count) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      gathered.flushed_to_zero += scaled[i] <= format::max_rounding_to_zero && magnitudes[i] != 0;
  }
  fp8core_encode_quad<Destination>(signed_scaled, codes);
}

// fp8core_raise_amax() beside other threads. As signed integers: a float with a sign is below every magnitude. A NaN
// that is there stays, which looking first is enough for, as nobody writes one with a sign.
static __device__ __forceinline__ void fp8core_raise_shared_amax(float *amax, uint32_t magnitude) {
  const uint32_t present = *(const volatile uint32_t *)amax;
  if (magnitude > FP8CORE_F32_INFINITY) magnitude = FP8CORE_F32_QUIET_NAN;
  if ((present & FP8CORE_F32_MAGNITUDE) > FP8CORE_F32_INFINITY || (int)magnitude <= (int)present) return;
  (void)atomicMax((int *)amax, (int)magnitude);
}

// One atomic a block and quantity. Every thread of the block calls it, once a kernel.
static __device__ __forceinline__ void fp8core_store_gathered(const fp8core_gathered &gathered, float *amax,
                                                              fp8core_cast_statistics *statistics) {
  __shared__ uint32_t shared[4][FP8CORE_WARP];
  const unsigned thread = fp8core_linear_thread(), lane = thread % FP8CORE_WARP, warp = thread / FP8CORE_WARP;
  const unsigned warps = (blockDim.x * blockDim.y + FP8CORE_WARP - 1) / FP8CORE_WARP;
  const uint32_t largest = fp8core_warp_max(gathered.amax);
  if (lane == 0) shared[0][warp] = largest;
  if (statistics) {
    const uint32_t saturated = fp8core_warp_sum(gathered.saturated);
    const uint32_t flushed_to_zero = fp8core_warp_sum(gathered.flushed_to_zero);
    const uint32_t nonfinite = fp8core_warp_sum(gathered.nonfinite);
    if (lane == 0) {
      shared[1][warp] = saturated;
      shared[2][warp] = flushed_to_zero;
      shared[3][warp] = nonfinite;
    }
  }
  __syncthreads();
  if (thread != 0) return;
  if (amax) {
    uint32_t block_amax = 0;
    for (unsigned i = 0; i < warps; i++) block_amax = shared[0][i] > block_amax ? shared[0][i] : block_amax;
    fp8core_raise_shared_amax(amax, block_amax);
  }
  if (statistics) {
    unsigned long long sums[3] = {0, 0, 0};
    for (int quantity = 0; quantity < 3; quantity++)
      for (unsigned i = 0; i < warps; i++) sums[quantity] += shared[1 + quantity][i];
    if (sums[0]) (void)atomicAdd((unsigned long long *)&statistics->saturated, sums[0]);
    if (sums[1]) (void)atomicAdd((unsigned long long *)&statistics->flushed_to_zero, sums[1]);
    if (sums[2]) (void)atomicAdd((unsigned long long *)&statistics->nonfinite, sums[2]);
  }
}

// Calls a template for a pair of formats that is known at run time only.
#define FP8CORE_DISPATCH_SOURCE(dtype, CALL)                                                                           \
  switch (dtype) {                                                                                                     \
  case FP8CORE_E4M3: return CALL(FP8CORE_E4M3);                                                                        \
  case FP8CORE_E5M2: return CALL(FP8CORE_E5M2);                                                                        \
  case FP8CORE_BF16: return CALL(FP8CORE_BF16);                                                                        \
  case FP8CORE_FP16: return CALL(FP8CORE_FP16);                                                                        \
  case FP8CORE_FP32: break;                                                                                            \
  }                                                                                                                    \
  return CALL(FP8CORE_FP32)

#endif
