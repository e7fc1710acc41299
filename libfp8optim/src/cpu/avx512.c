#include <immintrin.h>

#include "cpu/draw_avx512.h"
#include "cpu/encode_avx512.h"
#include "kernels.h"

#define LANES 16

typedef __m512 v_float;
typedef __m512i v_bits;

#define V static inline __attribute__((always_inline))

V __m512i splat_bits(uint32_t bits) { return _mm512_set1_epi32((int)bits); }
V v_float v_splat(float value) { return _mm512_set1_ps(value); }
V v_float v_root(v_float value) { return _mm512_sqrt_ps(value); }
V v_bits v_zero_bits(void) { return _mm512_setzero_si512(); }
V v_bits magnitude_of(v_float value) {
  return _mm512_and_si512(_mm512_castps_si512(value), splat_bits(FP8CORE_F32_MAGNITUDE));
}
V void v_raise(v_bits *largest, v_float value) { *largest = _mm512_max_epi32(*largest, magnitude_of(value)); }
V void v_raise_positive(v_bits *largest, v_float value) {
  *largest = _mm512_max_epi32(*largest, _mm512_castps_si512(value));
}
V uint32_t v_largest(v_bits largest) { return (uint32_t)_mm512_reduce_max_epi32(largest); }
V v_float v_fma(v_float a, v_float b, v_float c) { return _mm512_fmadd_ps(a, b, c); }
V v_float v_positive(v_float scaled, v_float least) {
  return _mm512_mask_max_ps(scaled, _mm512_cmp_ps_mask(scaled, _mm512_setzero_ps(), _CMP_GT_OQ), scaled, least);
}

typedef struct v_wide {
  __m512d low;
  __m512d high;
} v_wide;

V v_wide v_wide_zero(void) {
  const v_wide zero = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  return zero;
}
// A product of two FP32 values is exact in FP64.
V v_wide v_add_squares(v_wide sums, v_float value) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
  sums.low = _mm512_fmadd_pd(low, low, sums.low);
  sums.high = _mm512_fmadd_pd(high, high, sums.high);
  return sums;
}
V double v_wide_lane(const v_wide *sums, int lane) { return lane < 8 ? sums->low[lane] : sums->high[lane - 8]; }

V float v_load_factor(fp8core_dtype dtype) { return dtype == FP8CORE_E4M3 ? 256.0f : 1.0f; }

V v_float load(fp8core_dtype dtype, const unsigned char *data, int finite) {
  switch (dtype) {
  case FP8CORE_E4M3: {
    // Read as FP16, whose exponent bias is 8 more. Multiplying subnormal FP32 into place would be far slower.
    const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)data));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16((short)0xbf80));
    if (finite) return _mm512_cvtph_ps(halves);
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_add_epi16(halves, halves), _mm256_set1_epi16(0x7f00));
    return _mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_maskz_mov_epi16(nan, _mm256_set1_epi16(0x7f80))));
  }
  case FP8CORE_E5M2:
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)data)), 8));
  case FP8CORE_BF16:
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)data)), 16));
  case FP8CORE_FP16: return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)data));
  case FP8CORE_FP32: break;
  }
  return _mm512_loadu_ps(data);
}
V v_float v_load(fp8core_dtype dtype, const unsigned char *data) { return load(dtype, data, 0); }
V v_float v_load_finite(fp8core_dtype dtype, const unsigned char *data) { return load(dtype, data, 1); }

V void v_load_block(fp8core_dtype dtype, const unsigned char *data, v_float values[BLOCK_VECTORS]) {
  if (dtype == FP8CORE_E4M3) {
    // As load(), 64 codes at a time: unpacking works within lanes of 128 bits, so that their halves come first and
    // last.
    const __m512i codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(data));
    const __m512i mask = _mm512_set1_epi16((short)0xbf80);
    const __m512i zero = _mm512_setzero_si512();
    const __m512i first = _mm512_and_si512(_mm512_srai_epi16(_mm512_unpacklo_epi8(zero, codes), 1), mask);
    const __m512i last = _mm512_and_si512(_mm512_srai_epi16(_mm512_unpackhi_epi8(zero, codes), 1), mask);
    values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(first));
    values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(first, 1));
    values[2] = _mm512_cvtph_ps(_mm512_castsi512_si256(last));
    values[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(last, 1));
    return;
  }
  const int64_t bytes = LANES * fp8core_format_of(dtype).bits / 8;
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK_VECTORS; i++) values[i] = v_load_finite(dtype, data + i * bytes);
}

typedef __m256i v_codes;

V v_codes v_no_codes(void) { return _mm256_setzero_si256(); }
V void v_raise_codes(v_codes *largest, const unsigned char *data) {
  const __m256i codes = _mm256_loadu_si256((const __m256i *)data);
  *largest = _mm256_max_epu8(*largest, _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)));
}
V uint32_t v_largest_code(v_codes largest) {
  uint32_t found = 0;
  uint8_t lanes[32];
  _mm256_storeu_si256((__m256i *)lanes, largest);
  for (int lane = 0; lane < 32; lane++) found = lanes[lane] > found ? lanes[lane] : found;
  return found;
}

// Codes of magnitudes that are in range, times 2^code_shift().
//
// Adding 2^(exponent + 23 - mantissa bits) rounds to the mantissa bits at that exponent and leaves the significand in
// the low bits of the sum; exponents below the smallest normal count as that one, which makes the subnormals. The upper
// half of the sum holds its exponent, and one product of halves puts both together. The addend carries what takes off
// the exponent's bias: an even number of units, so that ties stay where they are.
V int code_shift(fp8core_dtype dtype) { return 7 - fp8core_format_of(dtype).mantissa_bits; }
V __m512i encode_8(fp8core_dtype dtype, __m512i magnitude, const __mmask16 *toward_zero) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t shift = (uint32_t)(23 - format.mantissa_bits);
  const uint32_t unbias = 0x10000 - (((uint32_t)(format.min_exponent + 127) + shift) << format.mantissa_bits);
  const __m512i exponent = _mm512_max_epi32(_mm512_and_si512(magnitude, splat_bits(FP8CORE_F32_INFINITY)),
                                            splat_bits((uint32_t)(format.min_exponent + 127) << 23));
  const __m512 power = _mm512_castsi512_ps(exponent);
  const __m512 addend = _mm512_castsi512_ps(splat_bits((127 + shift) << 23 | unbias));
  const __m512 value = _mm512_castsi512_ps(magnitude);
  __m512 sum = _mm512_fmadd_ps(power, addend, value);
  if (toward_zero)
    sum = _mm512_mask_mov_ps(sum, *toward_zero,
                             _mm512_fmadd_round_ps(power, addend, value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
  return _mm512_madd_epi16(_mm512_castps_si512(sum),
                           splat_bits(UINT32_C(1) << 16 | UINT32_C(1) << (7 - fp8core_format_of(dtype).mantissa_bits)));
}

V __m512i clamped(fp8core_dtype dtype, v_float value) {
  return _mm512_min_epi32(magnitude_of(value), splat_bits(fp8core_format_of(dtype).max_value));
}

V void store_8(unsigned char *data, v_float value, __m512i code) {
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(value), 24);
  // sign & 0x80 | code & 0x7f
  const __m512i signed_code = _mm512_ternarylogic_epi32(splat_bits(0x80), sign, code, 0xca);
  _mm_storeu_si128((__m128i *)data, _mm512_cvtepi32_epi8(signed_code));
}

// Words 0, 2, ... (odd 0) or 1, 3, ... of two vectors.
V __m512i words(__m512i first, __m512i second, int odd) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutex2var_epi16(first, odd ? _mm512_or_si512(even, _mm512_set1_epi16(1)) : even, second);
}

// Four vectors as 64 bytes.
V void store_block_8(fp8core_dtype dtype, unsigned char *data, const v_float value[BLOCK_VECTORS], int bounded,
                     const __mmask16 *toward_zero) {
  __m512i code[BLOCK_VECTORS];
  __m512i code_words[2];
  __m512i value_words[2];
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK_VECTORS; i++)
    code[i] = encode_8(dtype, bounded ? magnitude_of(value[i]) : clamped(dtype, value[i]),
                       toward_zero ? toward_zero + i : NULL);
  for (int i = 0; i < 2; i++) {
    const __m512i shifted = words(code[2 * i], code[2 * i + 1], 0);
    // Compilers disagree on the type of the count; a literal suits all.
    code_words[i] = dtype == FP8CORE_E4M3 ? _mm512_srli_epi16(shifted, 4) : _mm512_srli_epi16(shifted, 5);
    value_words[i] = words(_mm512_castps_si512(value[2 * i]), _mm512_castps_si512(value[2 * i + 1]), 1);
  }
  // The packs work within lanes of 128 bits. A signed one keeps the sign bit of every word, that of -0 too.
  const __m512i code_bytes = _mm512_packus_epi16(code_words[0], code_words[1]);
  const __m512i value_bytes = _mm512_packs_epi16(value_words[0], value_words[1]);
  const __m512i packed = _mm512_ternarylogic_epi32(_mm512_set1_epi8(-0x80), value_bytes, code_bytes, 0xca);
  _mm512_storeu_si512(data, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed));
}

V void store_16(unsigned char *data, v_float value, __m512i code) {
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(value), 16);
  const __m512i signed_code = _mm512_ternarylogic_epi32(splat_bits(0x8000), sign, code, 0xca);
  _mm256_storeu_si256((__m256i *)data, _mm512_cvtepi32_epi16(signed_code));
}

V void v_store(fp8core_dtype dtype, unsigned char *data, v_float value, int bounded) {
  switch (dtype) {
  case FP8CORE_E4M3:
  case FP8CORE_E5M2:
    store_8(data, value,
            _mm512_srli_epi32(encode_8(dtype, bounded ? magnitude_of(value) : clamped(dtype, value), NULL),
                              (unsigned)code_shift(dtype)));
    return;
  case FP8CORE_BF16: {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat_bits(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, splat_bits(0x7fff)), odd);
    _mm256_storeu_si256((__m256i *)data, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    return;
  }
  case FP8CORE_FP16: {
    // The smaller magnitude, with the sign of the first.
    const v_float limited = bounded ? value : _mm512_range_ps(value, v_splat(65504.0f), 0x2);
    _mm256_storeu_si256((__m256i *)data, _mm512_cvtps_ph(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  }
  case FP8CORE_FP32: break;
  }
  _mm512_storeu_ps(data, value);
}
V void v_store_block(fp8core_dtype dtype, unsigned char *data, const v_float value[BLOCK_VECTORS], int bounded) {
  if (dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2) {
    store_block_8(dtype, data, value, bounded, NULL);
    return;
  }
  const int64_t bytes = LANES * fp8core_format_of(dtype).bits / 8;
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK_VECTORS; i++) v_store(dtype, data + i * bytes, value[i], bounded);
}

typedef __mmask16 v_mask;

V v_mask v_smaller(v_float a, v_float b) { return _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_abs_ps(b), _CMP_LT_OQ); }
V void v_store_8(fp8core_dtype dtype, unsigned char *data, const v_float *value, const v_mask *toward_zero,
                 int vectors) {
  if (vectors == BLOCK_VECTORS)
    store_block_8(dtype, data, value, 1, toward_zero);
  else
    store_8(data, value[0],
            _mm512_srli_epi32(encode_8(dtype, magnitude_of(value[0]), toward_zero), (unsigned)code_shift(dtype)));
}

V void v_store_stochastic(fp8core_dtype dtype, unsigned char *data, v_float value, __m512i draw) {
  switch (dtype) {
  case FP8CORE_E4M3:
  case FP8CORE_E5M2: store_8(data, value, fp8core_encode_stochastic16(dtype, clamped(dtype, value), draw)); return;
  case FP8CORE_FP16: store_16(data, value, fp8core_encode_stochastic16(dtype, clamped(dtype, value), draw)); return;
  case FP8CORE_BF16: {
    // At the maximum and beyond it rounds to nearest: nothing is drawn.
    const __m512i magnitude = magnitude_of(value);
    const __mmask16 beyond = _mm512_cmpge_epi32_mask(magnitude, splat_bits(fp8core_format_of(dtype).max_value));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 16), splat_bits(1));
    const __m512i nearest =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(magnitude, splat_bits(0x7fff)), odd), 16);
    store_16(data, value, _mm512_mask_mov_epi32(fp8core_encode_stochastic16(dtype, magnitude, draw), beyond, nearest));
    return;
  }
  case FP8CORE_FP32: break;
  }
  _mm512_storeu_ps(data, value);
}

V void v_draw(const fp8optim_update_job *job, uint64_t first_element, v_bits draws[BLOCK_VECTORS]) {
  const fp8core_draw_keys keys = fp8core_draw_keys_of(job->seed);
  fp8core_draw64(&keys, job->tensor_id, job->step, first_element / 4, draws);
}

#include "vector.h"

const fp8optim_kernels fp8optim_kernels_avx512 = {update, measure};
