// fp8core_encode_stochastic() in AVX-512. For files that are compiled with its flags.
#ifndef FP8CORE_CPU_ENCODE_AVX512_H
#define FP8CORE_CPU_ENCODE_AVX512_H

#include <immintrin.h>

#include "numerics.h"

// For the bits of magnitudes up to the maximum of the format, and of what stands for larger ones to give their codes.
static inline __attribute__((always_inline)) __m512i fp8core_encode_stochastic16(fp8core_dtype dtype, __m512i magnitude,
                                                                                 __m512i draw) {
  const fp8core_format format = fp8core_format_of(dtype);
  const __m512i min_exponent = _mm512_set1_epi32(format.min_exponent + 127);
  const __m512i exponent_field = _mm512_srli_epi32(magnitude, 23);
  const __m512i exponent = _mm512_max_epi32(exponent_field, _mm512_set1_epi32(1));
  const __mmask16 normal = _mm512_test_epi32_mask(exponent_field, exponent_field);
  const __m512i mantissa = _mm512_and_si512(magnitude, _mm512_set1_epi32(0x7fffff));
  const __m512i significand = _mm512_mask_or_epi32(mantissa, normal, mantissa, _mm512_set1_epi32(0x800000));
  const __m512i rounded_exponent = _mm512_max_epi32(exponent, min_exponent);
  const __m512i shift =
    _mm512_add_epi32(_mm512_sub_epi32(rounded_exponent, exponent), _mm512_set1_epi32(23 - format.mantissa_bits));
  const __m512i lower = _mm512_add_epi32(
    _mm512_srlv_epi32(significand, shift),
    _mm512_slli_epi32(_mm512_sub_epi32(rounded_exponent, min_exponent), (unsigned)format.mantissa_bits));
  // Counts outside 0 to 31 shift everything out.
  const __m512i fraction =
    _mm512_or_si512(_mm512_sllv_epi32(significand, _mm512_sub_epi32(_mm512_set1_epi32(32), shift)),
                    _mm512_srlv_epi32(significand, _mm512_sub_epi32(shift, _mm512_set1_epi32(32))));
  return _mm512_mask_add_epi32(lower, _mm512_cmplt_epu32_mask(draw, fraction), lower, _mm512_set1_epi32(1));
}

#endif
