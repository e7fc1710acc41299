// The rules of a matrix product's epilogue, one element at a time: shared by the reference, the portable CPU kernels
// and the CUDA kernels.
#ifndef FP8CORE_GEMM_RULES_H
#define FP8CORE_GEMM_RULES_H

#include "internal.h"
#include "numerics.h"

FP8CORE_RULE float fp8core_load_element(fp8core_dtype dtype, const void *data, int64_t index) {
  const unsigned char *bytes = (const unsigned char *)data;
  if (dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2)
    return fp8core_bits_float(fp8core_decode_bits(dtype, bytes[index]));
  if (dtype == FP8CORE_FP32) {
    float value;
    memcpy(&value, bytes + 4 * index, sizeof(value));
    return value;
  }
  uint16_t code;
  memcpy(&code, bytes + 2 * index, sizeof(code));
  return fp8core_bits_float(fp8core_decode_bits(dtype, code));
}

// The code of a result. FP8 saturates, as the tensor cores do; the wider formats overflow to infinity, which a check
// for overflow then finds.
FP8CORE_RULE uint32_t fp8core_result_code(fp8core_dtype dtype, float value) {
  const int bits = fp8core_format_of(dtype).bits;
  const uint32_t value_bits = fp8core_float_bits(value);
  return fp8core_encode_nearest(dtype, value_bits & FP8CORE_F32_MAGNITUDE, bits == 8) |
         (value_bits & FP8CORE_F32_SIGN) >> (32 - bits);
}

FP8CORE_RULE void fp8core_store_element(fp8core_dtype dtype, void *data, int64_t index, float value) {
  unsigned char *bytes = (unsigned char *)data;
  const uint32_t code = fp8core_result_code(dtype, value);
  if (dtype == FP8CORE_FP32) {
    memcpy(bytes + 4 * index, &code, sizeof(code));
  } else if (dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2) {
    bytes[index] = (unsigned char)code;
  } else {
    const uint16_t narrow = (uint16_t)code;
    memcpy(bytes + 2 * index, &narrow, sizeof(narrow));
  }
}

FP8CORE_RULE float fp8core_scale_of(const float *scale) { return scale ? *scale : 1.0f; }

// alpha / (scale of A * scale of B). In double: in FP32 the product of two scales may overflow where the quotient does
// not.
FP8CORE_RULE double fp8core_gemm_factor(float alpha, const float *scale_inverse_a, const float *scale_inverse_b) {
  return (double)alpha * ((double)fp8core_scale_of(scale_inverse_a) * (double)fp8core_scale_of(scale_inverse_b));
}

// Whether FP32 holds the factor as a normal number (or zero, or what is not finite anyway); else sums are multiplied in
// double, so that only the result itself may overflow or underflow.
FP8CORE_RULE int fp8core_gemm_factor_fits(double factor) {
  const double magnitude = factor < 0 ? -factor : factor;
  return !(magnitude < 0x1p-126 && magnitude > 0) && !(magnitude > 0x1.fffffep127 && magnitude < (double)INFINITY);
}

#endif
