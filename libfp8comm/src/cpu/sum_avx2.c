// Sums of codes with AVX2, FMA and F16C. Conversions as in libfp8core's cast_avx2.c.
#include <immintrin.h>

#include "cpu/sum.h"
#include "gradient_rules.h"

#define LANES 8
#define V static inline __attribute__((always_inline))
#define NEAREST_SHIFT(format) (7 - (format).mantissa_bits)

typedef __m256 v_float;

V __m256i splat_bits(uint32_t bits) { return _mm256_set1_epi32((int)bits); }
V v_float v_splat(float value) { return _mm256_set1_ps(value); }
V v_float v_add(v_float one, v_float other) { return _mm256_add_ps(one, other); }
V v_float v_multiply(v_float one, v_float other) { return _mm256_mul_ps(one, other); }
V v_float v_magnitude(v_float value) {
  return _mm256_and_ps(value, _mm256_castsi256_ps(splat_bits(FP8CORE_F32_MAGNITUDE)));
}
V v_float v_larger(v_float one, v_float other) { return _mm256_max_ps(one, other); }
V v_float v_smaller(v_float one, v_float other) { return _mm256_min_ps(one, other); }
V void v_store(float *out, v_float value) { _mm256_storeu_ps(out, value); }

V void v_load(fp8core_dtype dtype, const unsigned char *source, v_float values[2]) {
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)source);
  const __m256i halves = dtype == FP8CORE_E5M2 ? _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8)
                                               : _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                                                  _mm256_set1_epi16((short)0xbf80));
  values[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  values[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

V __m256i code_words(fp8core_dtype dtype, v_float magnitude) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t shift = (uint32_t)(23 - format.mantissa_bits);
  const uint32_t min_exponent = (uint32_t)(format.min_exponent + 127);
  const uint32_t m = (UINT32_C(1) << 16) - ((min_exponent + shift) << format.mantissa_bits);
  const __m256i exponent = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(magnitude), splat_bits(0x7f800000)),
                                            splat_bits(min_exponent << 23));
  const __m256 sum =
    _mm256_fmadd_ps(_mm256_castsi256_ps(exponent), _mm256_castsi256_ps(splat_bits((127 + shift) << 23 | m)), magnitude);
  return _mm256_madd_epi16(_mm256_castps_si256(sum),
                           splat_bits(UINT32_C(1) << 16 | UINT32_C(1) << NEAREST_SHIFT(format)));
}

V void v_encode(fp8core_dtype dtype, const v_float magnitude[4], const v_float signs[4], unsigned char *codes) {
  __m256i words[2], sign_words[2];
  for (int i = 0; i < 2; i++) {
    words[i] = _mm256_srli_epi16(
      _mm256_packus_epi32(code_words(dtype, magnitude[2 * i]), code_words(dtype, magnitude[2 * i + 1])),
      NEAREST_SHIFT(fp8core_format_of(dtype)));
    sign_words[i] = _mm256_packs_epi32(_mm256_castps_si256(signs[2 * i]), _mm256_castps_si256(signs[2 * i + 1]));
  }
  const __m256i bytes = _mm256_packus_epi16(words[0], words[1]);
  const __m256i sign_bytes = _mm256_packs_epi16(sign_words[0], sign_words[1]);
  const __m256i result = _mm256_or_si256(bytes, _mm256_and_si256(sign_bytes, _mm256_set1_epi8(-0x80)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i *)(void *)codes, _mm256_permutevar8x32_epi32(result, order));
}

#include "cpu/sum_vector.h"

const fp8comm_sum_kernels fp8comm_sum_avx2 = {sum_kernel, largest_kernel, requantise_kernel};
