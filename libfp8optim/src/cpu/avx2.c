#include <immintrin.h>

#include "cpu/draw_avx2.h"
#include "cpu/encode_avx2.h"
#include "kernels.h"

#define LANES 8

typedef __m256 v_float;
typedef __m256i v_bits;

#define V static inline __attribute__((always_inline))

V __m256i splat_bits(uint32_t bits) { return _mm256_set1_epi32((int)bits); }
V v_float v_splat(float value) { return _mm256_set1_ps(value); }
V v_float v_root(v_float value) { return _mm256_sqrt_ps(value); }
V v_bits v_zero_bits(void) { return _mm256_setzero_si256(); }
V v_bits magnitude_of(v_float value) {
  return _mm256_and_si256(_mm256_castps_si256(value), splat_bits(FP8CORE_F32_MAGNITUDE));
}
V void v_raise(v_bits *largest, v_float value) { *largest = _mm256_max_epi32(*largest, magnitude_of(value)); }
V void v_raise_positive(v_bits *largest, v_float value) {
  *largest = _mm256_max_epi32(*largest, _mm256_castps_si256(value));
}
V uint32_t v_largest(v_bits largest) {
  uint32_t lanes[LANES];
  uint32_t found = 0;
  _mm256_storeu_si256((__m256i *)(void *)lanes, largest);
  for (int lane = 0; lane < LANES; lane++) found = lanes[lane] > found ? lanes[lane] : found;
  return found;
}
V v_float v_fma(v_float a, v_float b, v_float c) { return _mm256_fmadd_ps(a, b, c); }
V v_float v_positive(v_float scaled, v_float least) {
  return _mm256_blendv_ps(scaled, _mm256_max_ps(scaled, least), _mm256_cmp_ps(scaled, _mm256_setzero_ps(), _CMP_GT_OQ));
}

typedef struct v_wide {
  __m256d low;
  __m256d high;
} v_wide;

V v_wide v_wide_zero(void) {
  const v_wide zero = {_mm256_setzero_pd(), _mm256_setzero_pd()};
  return zero;
}
// A product of two FP32 values is exact in FP64.
V v_wide v_add_squares(v_wide sums, v_float value) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
  sums.low = _mm256_fmadd_pd(low, low, sums.low);
  sums.high = _mm256_fmadd_pd(high, high, sums.high);
  return sums;
}
V double v_wide_lane(const v_wide *sums, int lane) { return lane < 4 ? sums->low[lane] : sums->high[lane - 4]; }

V float v_load_factor(fp8core_dtype dtype) { return dtype == FP8CORE_E4M3 ? 256.0f : 1.0f; }

V v_float load(fp8core_dtype dtype, const unsigned char *data, int finite) {
  switch (dtype) {
  case FP8CORE_E4M3: {
    // Read as FP16, whose exponent bias is 8 more. Multiplying subnormal FP32 into place would be far slower.
    const __m128i code = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)data));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16((short)0xbf80));
    if (finite) return _mm256_cvtph_ps(halves);
    const __m128i nan = _mm_cmpeq_epi16(_mm_add_epi16(halves, halves), _mm_set1_epi16(0x7f00));
    return _mm256_cvtph_ps(_mm_or_si128(halves, _mm_and_si128(nan, _mm_set1_epi16(0x7f80))));
  }
  case FP8CORE_E5M2:
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)data)), 8));
  case FP8CORE_BF16:
    return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)data)), 16));
  case FP8CORE_FP16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)data));
  case FP8CORE_FP32: break;
  }
  return _mm256_loadu_ps((const float *)(const void *)data);
}
V v_float v_load(fp8core_dtype dtype, const unsigned char *data) { return load(dtype, data, 0); }
V v_float v_load_finite(fp8core_dtype dtype, const unsigned char *data) { return load(dtype, data, 1); }

V void v_load_block(fp8core_dtype dtype, const unsigned char *data, v_float values[BLOCK_VECTORS]) {
  const int64_t bytes = LANES * fp8core_format_of(dtype).bits / 8;
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK_VECTORS; i++) values[i] = v_load_finite(dtype, data + i * bytes);
}

// Codes without the sign, of magnitudes that are in range; see avx512.c.
V __m256i encode_8(fp8core_dtype dtype, __m256i magnitude, const __m256 *toward_zero) {
  const fp8core_format format = fp8core_format_of(dtype);
  const int shift = 23 - format.mantissa_bits;
  const __m256i least = splat_bits((uint32_t)(format.min_exponent + 127) << 23);
  const __m256i exponent = _mm256_max_epi32(_mm256_and_si256(magnitude, splat_bits(FP8CORE_F32_INFINITY)), least);
  const __m256 addend = _mm256_castsi256_ps(_mm256_add_epi32(exponent, splat_bits((uint32_t)shift << 23)));
  const __m256 value = _mm256_castsi256_ps(magnitude);
  const __m256 sum = _mm256_add_ps(value, addend);
  __m256i code =
    _mm256_add_epi32(_mm256_castps_si256(sum), _mm256_srli_epi32(_mm256_sub_epi32(exponent, least), shift));
  if (toward_zero) {
    // The difference is exact: what the value was rounded to.
    const __m256 up = _mm256_cmp_ps(_mm256_sub_ps(sum, addend), value, _CMP_GT_OQ);
    code = _mm256_add_epi32(code, _mm256_castps_si256(_mm256_and_ps(up, *toward_zero)));
  }
  return _mm256_and_si256(code, splat_bits(0x7f));
}

V __m256i clamped(fp8core_dtype dtype, v_float value) {
  return _mm256_min_epi32(magnitude_of(value), splat_bits(fp8core_format_of(dtype).max_value));
}

V void store_8(unsigned char *data, v_float value, __m256i code) {
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(value), 24), splat_bits(0x80));
  const __m256i signed_code = _mm256_or_si256(sign, code);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(signed_code), _mm256_extracti128_si256(signed_code, 1));
  _mm_storel_epi64((__m128i *)(void *)data, _mm_packus_epi16(words, words));
}

V void store_16(unsigned char *data, v_float value, __m256i code) {
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(value), 16), splat_bits(0x8000));
  const __m256i signed_code = _mm256_or_si256(sign, code);
  _mm_storeu_si128((__m128i *)(void *)data,
                   _mm_packus_epi32(_mm256_castsi256_si128(signed_code), _mm256_extracti128_si256(signed_code, 1)));
}

V __m256i nearest_bf16(__m256i magnitude) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 16), splat_bits(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(magnitude, splat_bits(0x7fff)), odd), 16);
}

V void v_store(fp8core_dtype dtype, unsigned char *data, v_float value, int bounded) {
  switch (dtype) {
  case FP8CORE_E4M3:
  case FP8CORE_E5M2:
    store_8(data, value, encode_8(dtype, bounded ? magnitude_of(value) : clamped(dtype, value), NULL));
    return;
  case FP8CORE_BF16: store_16(data, value, nearest_bf16(magnitude_of(value))); return;
  case FP8CORE_FP16: {
    const v_float max = v_splat(65504.0f);
    const v_float limited =
      bounded ? value : _mm256_max_ps(_mm256_min_ps(value, max), _mm256_sub_ps(_mm256_setzero_ps(), max));
    _mm_storeu_si128((__m128i *)(void *)data, _mm256_cvtps_ph(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  }
  case FP8CORE_FP32: break;
  }
  _mm256_storeu_ps((float *)(void *)data, value);
}
V void v_store_block(fp8core_dtype dtype, unsigned char *data, const v_float value[BLOCK_VECTORS], int bounded) {
  const int64_t bytes = LANES * fp8core_format_of(dtype).bits / 8;
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK_VECTORS; i++) v_store(dtype, data + i * bytes, value[i], bounded);
}

typedef __m256i v_codes;

V v_codes v_no_codes(void) { return _mm256_setzero_si256(); }
V void v_raise_codes(v_codes *largest, const unsigned char *data) {
  const __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)data);
  *largest = _mm256_max_epu8(*largest, _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)));
}
V uint32_t v_largest_code(v_codes largest) {
  uint32_t found = 0;
  uint8_t lanes[32];
  _mm256_storeu_si256((__m256i *)(void *)lanes, largest);
  for (int lane = 0; lane < 32; lane++) found = lanes[lane] > found ? lanes[lane] : found;
  return found;
}

typedef __m256 v_mask;

V v_mask v_smaller(v_float a, v_float b) {
  const __m256 sign = _mm256_castsi256_ps(splat_bits(FP8CORE_F32_SIGN));
  return _mm256_cmp_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b), _CMP_LT_OQ);
}
V void v_store_8(fp8core_dtype dtype, unsigned char *data, const v_float *value, const v_mask *toward_zero,
                 int vectors) {
  for (int i = 0; i < vectors; i++)
    store_8(data + i * LANES, value[i], encode_8(dtype, magnitude_of(value[i]), &toward_zero[i]));
}

V void v_store_stochastic(fp8core_dtype dtype, unsigned char *data, v_float value, __m256i draw) {
  switch (dtype) {
  case FP8CORE_E4M3:
  case FP8CORE_E5M2: store_8(data, value, fp8core_encode_stochastic8(dtype, clamped(dtype, value), draw)); return;
  case FP8CORE_FP16: store_16(data, value, fp8core_encode_stochastic8(dtype, clamped(dtype, value), draw)); return;
  case FP8CORE_BF16: {
    // At the maximum and beyond it rounds to nearest: nothing is drawn.
    const __m256i magnitude = magnitude_of(value);
    const __m256i within = _mm256_cmpgt_epi32(splat_bits(fp8core_format_of(dtype).max_value), magnitude);
    store_16(data, value,
             _mm256_blendv_epi8(nearest_bf16(magnitude), fp8core_encode_stochastic8(dtype, magnitude, draw), within));
    return;
  }
  case FP8CORE_FP32: break;
  }
  _mm256_storeu_ps((float *)(void *)data, value);
}

V void v_draw(const fp8optim_update_job *job, uint64_t first_element, v_bits draws[BLOCK_VECTORS]) {
  fp8core_draw32(job->seed, job->tensor_id, job->step, first_element / 4, draws);
}

#include "vector.h"

const fp8optim_kernels fp8optim_kernels_avx2 = {update, measure};
