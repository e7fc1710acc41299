// The arithmetic of sums, minima and maxima of plain elements, written once: docs/numerics.md, "Collectives". 16-bit
// formats are combined in FP32, and rounded at the end.
#ifndef FP8COMM_REDUCTION_RULES_H
#define FP8COMM_REDUCTION_RULES_H

#include <math.h>
#include <stdint.h>

#include "numerics.h"

// A NaN wins, and -0 is below +0.
#define FP8COMM_ORDERED_RULES(name, type, with_sign)                                                                   \
  FP8CORE_RULE type fp8comm_min_##name(type one, type other) {                                                         \
    if (one != one || other != other) return (type)fp8core_bits_float(FP8CORE_F32_QUIET_NAN);                          \
    if (one == other) return with_sign((type)1, one) < 0 ? one : other;                                                \
    return one < other ? one : other;                                                                                  \
  }                                                                                                                    \
  FP8CORE_RULE type fp8comm_max_##name(type one, type other) {                                                         \
    if (one != one || other != other) return (type)fp8core_bits_float(FP8CORE_F32_QUIET_NAN);                          \
    if (one == other) return with_sign((type)1, one) < 0 ? other : one;                                                \
    return one > other ? one : other;                                                                                  \
  }
FP8COMM_ORDERED_RULES(fp32, float, copysignf)
FP8COMM_ORDERED_RULES(fp64, double, copysign)

#define FP8COMM_INTEGER_RULES(name, type)                                                                              \
  FP8CORE_RULE type fp8comm_min_##name(type one, type other) { return one < other ? one : other; }                     \
  FP8CORE_RULE type fp8comm_max_##name(type one, type other) { return one > other ? one : other; }
FP8COMM_INTEGER_RULES(int64, int64_t)
FP8COMM_INTEGER_RULES(byte, uint8_t)

FP8CORE_RULE float fp8comm_sum_fp32(float one, float other) { return one + other; }
FP8CORE_RULE double fp8comm_sum_fp64(double one, double other) { return one + other; }
// Unsigned, so that it wraps around.
FP8CORE_RULE int64_t fp8comm_sum_int64(int64_t one, int64_t other) {
  return (int64_t)((uint64_t)one + (uint64_t)other);
}

// Of BF16 and FP16.
FP8CORE_RULE float fp8comm_widen_rule(fp8core_dtype dtype, uint16_t code) {
  return fp8core_bits_float(fp8core_decode_bits(dtype, code));
}

// To nearest even; what overflows becomes infinite.
FP8CORE_RULE uint16_t fp8comm_narrow_rule(fp8core_dtype dtype, float value) {
  const uint32_t bits = fp8core_float_bits(value);
  return (uint16_t)(fp8core_encode_nearest(dtype, bits & FP8CORE_F32_MAGNITUDE, 0) | (bits & FP8CORE_F32_SIGN) >> 16);
}

#endif
