// The scalar rules of the suite, written once. Both the C compiler and nvcc take this file; every SIMD and CUDA kernel
// is tested against it. docs/numerics.md states the same rules in words, with their sources.
#ifndef FP8CORE_NUMERICS_H
#define FP8CORE_NUMERICS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "fp8core/dtype.h"
#include "fp8core/gemm.h"
#include "fp8core/scaling.h"

#if defined(__CUDACC__)
#  define FP8CORE_RULE static __host__ __device__ __forceinline__
#else
#  define FP8CORE_RULE static inline
#endif

// A rule that C++ may use where it wants constants.
#if defined(__cplusplus)
#  define FP8CORE_CONSTANT_RULE FP8CORE_RULE constexpr
#else
#  define FP8CORE_CONSTANT_RULE FP8CORE_RULE
#endif

#define FP8CORE_F32_SIGN UINT32_C(0x80000000)
#define FP8CORE_F32_MAGNITUDE UINT32_C(0x7fffffff)
#define FP8CORE_F32_INFINITY UINT32_C(0x7f800000)
#define FP8CORE_F32_QUIET_NAN UINT32_C(0x7fc00000)
#define FP8CORE_F32_MAX UINT32_C(0x7f7fffff)

FP8CORE_RULE uint32_t fp8core_float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FP8CORE_RULE float fp8core_bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// What the rules need to know of a format. Codes are without the sign.
typedef struct fp8core_format {
  int bits;
  int mantissa_bits;
  // Exponent of the smallest normal number.
  int min_exponent;
  uint32_t max_code;
  // What an overflow becomes when it does not saturate: infinity, or NaN where there is no infinity.
  uint32_t overflow_code;
  uint32_t nan_code;
  // FP32 bits of the largest finite value, and of the largest magnitude that still rounds to it (to nearest, ties to
  // even).
  uint32_t max_value;
  uint32_t max_rounding_to_max;
} fp8core_format;

FP8CORE_CONSTANT_RULE fp8core_format fp8core_format_of(fp8core_dtype dtype) {
  // 448 has an even mantissa, so the tie at 464 goes to it; the maxima of the IEEE-like formats are odd, and their tie
  // goes to infinity (OFP8 1.0 section 5.2; IEEE 754-2019 section 4.3.1).
  const fp8core_format e4m3 = {8, 3, -6, 0x7e, 0x7f, 0x7f, 0x43e00000, 0x43e80000};
  const fp8core_format e5m2 = {8, 2, -14, 0x7b, 0x7c, 0x7e, 0x47600000, 0x476fffff};
  const fp8core_format bf16 = {16, 7, -126, 0x7f7f, 0x7f80, 0x7fc0, 0x7f7f0000, 0x7f7f7fff};
  const fp8core_format fp16 = {16, 10, -14, 0x7bff, 0x7c00, 0x7e00, 0x477fe000, 0x477fefff};
  const fp8core_format fp32 = {
    32, 23, -126, FP8CORE_F32_MAX, FP8CORE_F32_INFINITY, FP8CORE_F32_QUIET_NAN, FP8CORE_F32_MAX, FP8CORE_F32_MAX};
  switch (dtype) {
  case FP8CORE_E4M3: return e4m3;
  case FP8CORE_E5M2: return e5m2;
  case FP8CORE_BF16: return bf16;
  case FP8CORE_FP16: return fp16;
  case FP8CORE_FP32: break;
  }
  return fp32;
}

// Exact value of a code, as FP32 bits. NaNs become the quiet NaN of the same sign.
FP8CORE_RULE uint32_t fp8core_decode_bits(fp8core_dtype dtype, uint32_t code) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t sign_bit = UINT32_C(1) << (format.bits - 1);
  const uint32_t sign = (code & sign_bit) ? FP8CORE_F32_SIGN : 0;
  const uint32_t magnitude = code & (sign_bit - 1);
  if (magnitude > format.max_code) {
    const int infinite = magnitude == format.overflow_code && format.overflow_code != format.nan_code;
    return sign | (infinite ? FP8CORE_F32_INFINITY : FP8CORE_F32_QUIET_NAN);
  }
  const int shift = 23 - format.mantissa_bits;
  const uint32_t exponent_offset = (uint32_t)(format.min_exponent + 126) << 23;
  if (magnitude >> format.mantissa_bits) return sign | ((magnitude << shift) + exponent_offset);
  if (shift == 0 || dtype == FP8CORE_BF16) return sign | (magnitude << shift);
  // Subnormal: magnitude * 2^(min_exponent - mantissa_bits), exact in FP32.
  return sign |
         fp8core_float_bits((float)magnitude *
                            fp8core_bits_float((uint32_t)(127 + format.min_exponent - format.mantissa_bits) << 23));
}

// Raises *amax, which may be NULL, to the magnitude (FP32 bits without sign) if that is larger in the order of
// integers, in which NaN > infinity > finite. A NaN is stored as the quiet one. A NaN that is there stays, of either
// sign; anything else with a sign is below every magnitude.
FP8CORE_RULE void fp8core_raise_amax(float *amax, uint32_t magnitude) {
  if (!amax) return;
  const uint32_t present = fp8core_float_bits(*amax);
  if (magnitude > FP8CORE_F32_INFINITY) magnitude = FP8CORE_F32_QUIET_NAN;
  if ((present & FP8CORE_F32_MAGNITUDE) > FP8CORE_F32_INFINITY) return;
  if ((present & FP8CORE_F32_SIGN) || magnitude > present) *amax = fp8core_bits_float(magnitude);
}

// Whether an amax says that something was infinite or NaN. A negative one, also minus infinity, counts as 0.
FP8CORE_RULE int fp8core_amax_is_nonfinite(float amax) {
  const uint32_t bits = fp8core_float_bits(amax);
  return bits == FP8CORE_F32_INFINITY || (bits & FP8CORE_F32_MAGNITUDE) > FP8CORE_F32_INFINITY;
}

// Rounds the magnitude (FP32 bits without sign) to nearest, ties to even. Returns the code without sign.
FP8CORE_RULE uint32_t fp8core_encode_nearest(fp8core_dtype dtype, uint32_t magnitude, int saturate) {
  const fp8core_format format = fp8core_format_of(dtype);
  if (magnitude > FP8CORE_F32_INFINITY) return format.nan_code;
  if (magnitude > format.max_rounding_to_max) return saturate ? format.max_code : format.overflow_code;
  if (dtype == FP8CORE_FP32) return magnitude;
  const int shift = 23 - format.mantissa_bits;
  const uint32_t exponent = magnitude >> 23;
  const uint32_t min_normal_exponent = (uint32_t)(format.min_exponent + 127);
  if (exponent >= min_normal_exponent) {
    const uint32_t rebiased = magnitude - ((min_normal_exponent - 1) << 23);
    return (rebiased + (UINT32_C(1) << (shift - 1)) - 1 + ((rebiased >> shift) & 1)) >> shift;
  }
  const uint32_t significand = (magnitude & 0x7fffff) | (exponent ? UINT32_C(0x800000) : 0);
  const uint32_t subnormal_shift = (uint32_t)shift + min_normal_exponent - (exponent ? exponent : 1);
  if (subnormal_shift > 24) return 0;
  return (significand + (UINT32_C(1) << (subnormal_shift - 1)) - 1 + ((significand >> subnormal_shift) & 1)) >>
         subnormal_shift;
}

// Rounds up with the probability of the distance to the lower neighbour, in units of 2^-32: up where draw < fraction.
FP8CORE_RULE uint32_t fp8core_encode_stochastic(fp8core_dtype dtype, uint32_t magnitude, int saturate, uint32_t draw) {
  const fp8core_format format = fp8core_format_of(dtype);
  if (dtype == FP8CORE_FP32 || magnitude >= format.max_value) return fp8core_encode_nearest(dtype, magnitude, saturate);
  const int shift = 23 - format.mantissa_bits;
  const uint32_t exponent = magnitude >> 23;
  const uint32_t min_normal_exponent = (uint32_t)(format.min_exponent + 127);
  if (exponent >= min_normal_exponent) {
    const uint32_t rebiased = magnitude - ((min_normal_exponent - 1) << 23);
    return (rebiased >> shift) + (draw < rebiased << (32 - shift));
  }
  const uint32_t significand = (magnitude & 0x7fffff) | (exponent ? UINT32_C(0x800000) : 0);
  const uint32_t subnormal_shift = (uint32_t)shift + min_normal_exponent - (exponent ? exponent : 1);
  if (subnormal_shift < 32) return (significand >> subnormal_shift) + (draw < significand << (32 - subnormal_shift));
  return subnormal_shift < 64 && draw < significand >> (subnormal_shift - 32);
}

// One element of a cast, with what it adds to amax and the counts.
typedef struct fp8core_cast_result {
  uint32_t code;
  // FP32 bits of |value|; NaN is FP8CORE_F32_QUIET_NAN. The amax is the largest of these as integers, which lets an
  // infinity win over finite values and a NaN over all, whatever the order.
  uint32_t magnitude;
  int saturated;
  int flushed_to_zero;
  int nonfinite;
} fp8core_cast_result;

FP8CORE_RULE fp8core_cast_result fp8core_cast_element(uint32_t source_code, fp8core_dtype source,
                                                      float source_scale_inverse, fp8core_dtype destination,
                                                      float scale, int stochastic, uint32_t draw, int saturate) {
  const fp8core_format format = fp8core_format_of(destination);
  const uint32_t source_bits = fp8core_decode_bits(source, source_code);
  const uint32_t sign = source_bits & FP8CORE_F32_SIGN ? UINT32_C(1) << (format.bits - 1) : 0;
  fp8core_cast_result result;
  if ((source_bits & FP8CORE_F32_MAGNITUDE) > FP8CORE_F32_INFINITY) {
    result.code = sign | format.nan_code;
    result.magnitude = FP8CORE_F32_QUIET_NAN;
    result.saturated = 0;
    result.flushed_to_zero = 0;
    result.nonfinite = 1;
    return result;
  }
  const float value = fp8core_bits_float(source_bits) * source_scale_inverse;
  const uint32_t value_magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
  const uint32_t scaled_magnitude = fp8core_float_bits(value * scale) & FP8CORE_F32_MAGNITUDE;
  const uint32_t code = stochastic ? fp8core_encode_stochastic(destination, scaled_magnitude, saturate, draw)
                                   : fp8core_encode_nearest(destination, scaled_magnitude, saturate);
  result.code = sign | code;
  result.magnitude = value_magnitude;
  result.nonfinite = value_magnitude >= FP8CORE_F32_INFINITY;
  result.saturated = !result.nonfinite && scaled_magnitude > format.max_rounding_to_max;
  result.flushed_to_zero = !result.nonfinite && value_magnitude != 0 && code == 0;
  return result;
}

// Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3.
FP8CORE_RULE void fp8core_philox_rounds(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = UINT64_C(0xD2511F53) * counter[0];
    const uint64_t product1 = UINT64_C(0xCD9E8D57) * counter[2];
    const uint32_t next0 = (uint32_t)(product1 >> 32) ^ counter[1] ^ key0;
    const uint32_t next2 = (uint32_t)(product0 >> 32) ^ counter[3] ^ key1;
    counter[1] = (uint32_t)product1;
    counter[3] = (uint32_t)product0;
    counter[0] = next0;
    counter[2] = next2;
    key0 += UINT32_C(0x9E3779B9);
    key1 += UINT32_C(0xBB67AE85);
  }
}

// The draws of elements 4 * block to 4 * block + 3.
FP8CORE_RULE void fp8core_draw_block(uint64_t seed, uint32_t tensor_id, uint32_t step, uint64_t block,
                                     uint32_t draws[4]) {
  draws[0] = (uint32_t)block;
  draws[1] = (uint32_t)(block >> 32);
  draws[2] = tensor_id;
  draws[3] = step;
  fp8core_philox_rounds(draws, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// The draw of one element: see FP8CORE_ROUND_STOCHASTIC.
FP8CORE_RULE uint32_t fp8core_draw(uint64_t seed, uint32_t tensor_id, uint32_t step, uint64_t element) {
  uint32_t draws[4];
  fp8core_draw_block(seed, tensor_id, step, element / 4, draws);
  return draws[element % 4];
}

FP8CORE_RULE float fp8core_max_of(fp8core_dtype dtype) {
  return fp8core_bits_float(fp8core_format_of(dtype).max_value);
}

FP8CORE_RULE float fp8core_scale_rule(fp8core_dtype dtype, float amax, int margin, int power_of_two,
                                      float previous_scale) {
  if (dtype == FP8CORE_BF16 || dtype == FP8CORE_FP32) return 1.0f;
  // Also false for a NaN.
  if (!(amax > 0.0f && fp8core_float_bits(amax) < FP8CORE_F32_INFINITY)) return previous_scale;
  // The quotient may overflow to infinity (amax below max * 2^-128); the clamp takes care of it. In double, so that
  // neither it nor the margin rounds twice or underflows on the way.
  const double quotient = ldexp((double)fp8core_max_of(dtype) / (double)amax, -margin);
  if (quotient >= (double)FP8CORE_SCALE_MAX) return FP8CORE_SCALE_MAX;
  if (quotient <= (double)FP8CORE_SCALE_MIN) return FP8CORE_SCALE_MIN;
  // A power of two must not exceed the quotient itself, so it is cut before FP32 rounds it up.
  if (power_of_two) {
    int exponent;
    (void)frexp(quotient, &exponent);
    return (float)ldexp(1.0, exponent - 1);
  }
  return (float)quotient;
}

FP8CORE_RULE float fp8core_gelu(float x) {
  // The limit; the product below would be that of infinity and 0.
  if (fp8core_float_bits(x) == (FP8CORE_F32_SIGN | FP8CORE_F32_INFINITY)) return -0.0f;
  return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// Beyond this magnitude the derivative of GELU is exactly 0 or 1.
#define FP8CORE_GELU_FLAT 10.0f
// What takes the place of a derivative that cancels to 0 between: about its error there.
#define FP8CORE_GELU_LEAST 0x1p-26f

// With (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), in which nothing cancels where the tanh is near -1. An infinite gradient
// times 0 is NaN, so every tier must have its zeros at the same arguments: they are those below -FP8CORE_GELU_FLAT.
FP8CORE_RULE float fp8core_gelu_derivative(float x) {
  if (x > FP8CORE_GELU_FLAT) return 1.0f;
  if (x < -FP8CORE_GELU_FLAT) return 0.0f;
  const float e = expf(-2.0f * (0.7978845608f * (x + 0.044715f * x * x * x)));
  const float s = 1.0f / (1.0f + e);
  const float slope = x * (2.0f * s * (e * s)) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
  return s + slope == 0.0f ? FP8CORE_GELU_LEAST : s + slope;
}

FP8CORE_RULE float fp8core_gemm_activation(fp8core_epilogue epilogue, float value, float auxiliary) {
  switch (epilogue) {
  case FP8CORE_EPILOGUE_NONE: break;
  // Not fmaxf: a NaN must stay one.
  case FP8CORE_EPILOGUE_RELU: return value < 0.0f ? 0.0f : value;
  case FP8CORE_EPILOGUE_GELU: return fp8core_gelu(value);
  case FP8CORE_EPILOGUE_RELU_BACKWARD: return auxiliary > 0.0f ? value : 0.0f;
  case FP8CORE_EPILOGUE_GELU_BACKWARD: return value * fp8core_gelu_derivative(auxiliary);
  }
  return value;
}

#endif
