// The rules of a matrix product's epilogue, one element at a time: shared by the reference and the portable CPU
// kernels.
#ifndef FP8CORE_GEMM_RULES_H
#define FP8CORE_GEMM_RULES_H

#include "internal.h"
#include "numerics.h"

static inline float fp8core_load_element(fp8core_dtype dtype, const void *data, int64_t index) {
  const unsigned char *bytes = data;
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

// FP8 saturates, as the tensor cores do; the wider formats overflow to infinity, which a check for overflow then finds.
static inline void fp8core_store_element(fp8core_dtype dtype, void *data, int64_t index, float value) {
  unsigned char *bytes = data;
  const int saturate = dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2;
  const uint32_t bits = fp8core_float_bits(value);
  const uint32_t magnitude = fp8core_encode_nearest(dtype, bits & FP8CORE_F32_MAGNITUDE, saturate);
  if (dtype == FP8CORE_FP32) {
    const uint32_t code = (bits & FP8CORE_F32_SIGN) | magnitude;
    memcpy(bytes + 4 * index, &code, sizeof(code));
  } else if (saturate) {
    bytes[index] = (unsigned char)(magnitude | (bits >> 24 & 0x80));
  } else {
    const uint16_t code = (uint16_t)(magnitude | (bits >> 16 & 0x8000));
    memcpy(bytes + 2 * index, &code, sizeof(code));
  }
}

// alpha / (scale of A * scale of B). In double: in FP32 the product of two scales may overflow where the quotient does
// not.
static inline double fp8core_gemm_factor(const fp8core_gemm_job *job) {
  const double a = job->a.scale_inverse ? (double)*job->a.scale_inverse : 1.0;
  const double b = job->b.scale_inverse ? (double)*job->b.scale_inverse : 1.0;
  return (double)job->options.alpha * (a * b);
}

// Whether FP32 holds the factor as a normal number (or zero, or what is not finite anyway); else sums are multiplied in
// double, so that only the result itself may overflow or underflow.
static inline int fp8core_gemm_factor_fits(double factor) {
  const double magnitude = factor < 0 ? -factor : factor;
  return !(magnitude < 0x1p-126 && magnitude > 0) && !(magnitude > 0x1.fffffep127 && magnitude < (double)INFINITY);
}

static inline float fp8core_scale_of(const float *scale) { return scale ? *scale : 1.0f; }

#endif
