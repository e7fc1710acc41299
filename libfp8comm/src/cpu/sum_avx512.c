// Sums of codes with AVX-512 F and BW. Conversions as in libfp8core's cast_avx512.c.
#include <immintrin.h>

#include "cpu/sum.h"
#include "gradient_rules.h"

#define LANES 16
#define V static inline __attribute__((always_inline))
#define NEAREST_SHIFT(format) (7 - (format).mantissa_bits)

typedef __m512 v_float;

V v_float v_splat(float value) { return _mm512_set1_ps(value); }
V v_float v_add(v_float one, v_float other) { return _mm512_add_ps(one, other); }
V v_float v_multiply(v_float one, v_float other) { return _mm512_mul_ps(one, other); }
V v_float v_magnitude(v_float value) { return _mm512_abs_ps(value); }
V v_float v_larger(v_float one, v_float other) { return _mm512_max_ps(one, other); }
V v_float v_smaller(v_float one, v_float other) { return _mm512_min_ps(one, other); }
V void v_store(float *out, v_float value) { _mm512_storeu_ps(out, value); }

// Two vectors of values, of E4M3 times 2^-8: its codes are read as FP16 with the exponent bias of 15 instead of 7,
// which is exact, subnormals included.
V void v_load(fp8core_dtype dtype, const unsigned char *source, v_float values[2]) {
  const __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)source);
  const __m512i halves = dtype == FP8CORE_E5M2 ? _mm512_slli_epi16(_mm512_cvtepu8_epi16(codes), 8)
                                               : _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7),
                                                                  _mm512_set1_epi16((short)0xbf80));
  values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

// The code is in a word's upper bits; see cast_avx512.c.
V __m512i code_words(fp8core_dtype dtype, v_float magnitude) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t shift = (uint32_t)(23 - format.mantissa_bits);
  const uint32_t min_exponent = (uint32_t)(format.min_exponent + 127);
  const uint32_t m = (UINT32_C(1) << 16) - ((min_exponent + shift) << format.mantissa_bits);
  const __m512i exponent =
    _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(magnitude), _mm512_set1_epi32(0x7f800000)),
                     _mm512_set1_epi32((int)(min_exponent << 23)));
  const __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(exponent),
                                     _mm512_castsi512_ps(_mm512_set1_epi32((int)((127 + shift) << 23 | m))), magnitude);
  return _mm512_madd_epi16(_mm512_castps_si512(sum), _mm512_set1_epi32(1 << 16 | 1 << NEAREST_SHIFT(format)));
}

// The codes of four vectors of magnitudes up to the format's maximum, with the signs of others.
V void v_encode(fp8core_dtype dtype, const v_float magnitude[4], const v_float signs[4], unsigned char *codes) {
  __m512i words[2], sign_words[2];
  for (int i = 0; i < 2; i++) {
    words[i] = _mm512_packus_epi32(code_words(dtype, magnitude[2 * i]), code_words(dtype, magnitude[2 * i + 1]));
    words[i] = dtype == FP8CORE_E4M3 ? _mm512_srli_epi16(words[i], 4) : _mm512_srli_epi16(words[i], 5);
    sign_words[i] = _mm512_packs_epi32(_mm512_castps_si512(signs[2 * i]), _mm512_castps_si512(signs[2 * i + 1]));
  }
  const __m512i bytes = _mm512_packus_epi16(words[0], words[1]);
  const __m512i sign_bytes = _mm512_packs_epi16(sign_words[0], sign_words[1]);
  const __m512i result = _mm512_ternarylogic_epi32(_mm512_set1_epi8(-0x80), sign_bytes, bytes, 0xca);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, result));
}

#include "cpu/sum_vector.h"

const fp8comm_sum_kernels fp8comm_sum_avx512 = {sum_kernel, largest_kernel, requantise_kernel};
