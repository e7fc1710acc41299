#include "fp8core/dtype.h"

#include "fp8core/cast.h"
#include "numerics.h"

static int is_dtype(fp8core_dtype dtype) { return (unsigned)dtype < FP8CORE_DTYPE_COUNT; }

size_t fp8core_dtype_size(fp8core_dtype dtype) {
  return is_dtype(dtype) ? (size_t)fp8core_format_of(dtype).bits / 8 : 0;
}

const char *fp8core_dtype_name(fp8core_dtype dtype) {
  switch (dtype) {
  case FP8CORE_E4M3: return "e4m3";
  case FP8CORE_E5M2: return "e5m2";
  case FP8CORE_BF16: return "bf16";
  case FP8CORE_FP16: return "fp16";
  case FP8CORE_FP32: return "fp32";
  }
  return "unknown";
}

float fp8core_dtype_max(fp8core_dtype dtype) { return is_dtype(dtype) ? fp8core_max_of(dtype) : 0.0f; }

float fp8core_dtype_min_subnormal(fp8core_dtype dtype) {
  return is_dtype(dtype) ? fp8core_bits_float(fp8core_decode_bits(dtype, 1)) : 0.0f;
}

float fp8core_decode(fp8core_dtype dtype, uint32_t bits) {
  return fp8core_bits_float(is_dtype(dtype) ? fp8core_decode_bits(dtype, bits) : FP8CORE_F32_QUIET_NAN);
}

uint32_t fp8core_encode(fp8core_dtype dtype, float value, int saturate) {
  if (!is_dtype(dtype)) return 0;
  const uint32_t bits = fp8core_float_bits(value);
  const uint32_t sign = bits & FP8CORE_F32_SIGN ? UINT32_C(1) << (fp8core_format_of(dtype).bits - 1) : 0;
  return sign | fp8core_encode_nearest(dtype, bits & FP8CORE_F32_MAGNITUDE, saturate);
}

float fp8core_scale_from_amax(fp8core_dtype dtype, float amax, int margin, int power_of_two, float previous_scale) {
  // A scale never leaves the limits, not even one that only passes through.
  const int legal = previous_scale >= FP8CORE_SCALE_MIN && previous_scale <= FP8CORE_SCALE_MAX;
  const float previous = legal ? previous_scale : 1.0f;
  const int clamped = margin < -64 ? -64 : margin > 64 ? 64 : margin;
  return is_dtype(dtype) ? fp8core_scale_rule(dtype, amax, clamped, power_of_two, previous) : previous;
}
