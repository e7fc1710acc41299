// fp8core_encode_stochastic() in AVX2. For files that are compiled with its flags.
#ifndef FP8CORE_CPU_ENCODE_AVX2_H
#define FP8CORE_CPU_ENCODE_AVX2_H

#include <immintrin.h>

#include "numerics.h"

// For the bits of magnitudes up to the maximum of the format, and of what stands for larger ones to give their codes.
static inline __attribute__((always_inline)) __m256i fp8core_encode_stochastic8(fp8core_dtype dtype, __m256i magnitude,
                                                                                __m256i draw) {
  const fp8core_format format = fp8core_format_of(dtype);
  const __m256i min_exponent = _mm256_set1_epi32(format.min_exponent + 127);
  const __m256i exponent_field = _mm256_srli_epi32(magnitude, 23);
  const __m256i exponent = _mm256_max_epi32(exponent_field, _mm256_set1_epi32(1));
  const __m256i subnormal = _mm256_cmpeq_epi32(exponent_field, _mm256_setzero_si256());
  const __m256i mantissa = _mm256_and_si256(magnitude, _mm256_set1_epi32(0x7fffff));
  const __m256i significand = _mm256_or_si256(mantissa, _mm256_andnot_si256(subnormal, _mm256_set1_epi32(0x800000)));
  const __m256i rounded_exponent = _mm256_max_epi32(exponent, min_exponent);
  const __m256i shift =
    _mm256_add_epi32(_mm256_sub_epi32(rounded_exponent, exponent), _mm256_set1_epi32(23 - format.mantissa_bits));
  const __m256i lower =
    _mm256_add_epi32(_mm256_srlv_epi32(significand, shift),
                     _mm256_slli_epi32(_mm256_sub_epi32(rounded_exponent, min_exponent), format.mantissa_bits));
  // Counts outside 0 to 31 shift everything out.
  const __m256i fraction =
    _mm256_or_si256(_mm256_sllv_epi32(significand, _mm256_sub_epi32(_mm256_set1_epi32(32), shift)),
                    _mm256_srlv_epi32(significand, _mm256_sub_epi32(shift, _mm256_set1_epi32(32))));
  // AVX2 compares signed integers only: both sides move by 2^31.
  const __m256i up = _mm256_cmpgt_epi32(_mm256_xor_si256(fraction, _mm256_set1_epi32((int)FP8CORE_F32_SIGN)),
                                        _mm256_xor_si256(draw, _mm256_set1_epi32((int)FP8CORE_F32_SIGN)));
  return _mm256_sub_epi32(lower, up);
}

#endif
