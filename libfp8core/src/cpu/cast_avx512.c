// Casts with AVX-512 F, BW, DQ and VL: blocks of 64 elements, one kernel a pair of formats and rounding.
//
// A block whose values all stay within the destination's range, the usual case, needs no clamp and no counting of what
// was clamped; one comparison of the block's largest magnitude tells.
#include <immintrin.h>

#include "cast.h"
#include "cast_table.h"
#include "draw_avx512.h"
#include "encode_avx512.h"
#include "numerics.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define BLOCK 64
#define TO_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

// Loop invariants of one call.
typedef struct cast_constants {
  __m512 scale_inverse;
  __m512 scale;
  // Largest magnitude that rounds within the destination's range.
  __m512i max_rounding_to_max;
  // What larger ones, and NaN, are replaced by before they are encoded.
  __m512i overflow;
  __m512i nan;
  __m512i max_value;
  // Only for stochastic rounding.
  fp8core_draw_keys keys;
} cast_constants;

typedef struct cast_sums {
  __m512i amax;
  int64_t saturated;
  int64_t flushed_to_zero;
  int64_t nonfinite;
} cast_sums;

ALWAYS_INLINE __m512i splat(uint32_t value) { return _mm512_set1_epi32((int)value); }

ALWAYS_INLINE int64_t bytes_of(fp8core_dtype dtype) { return fp8core_format_of(dtype).bits / 8; }

ALWAYS_INLINE __mmask16 lanes(__mmask64 block_mask, int first) { return (__mmask16)(block_mask >> first); }

// An address beyond the tensor does nothing.
ALWAYS_INLINE void prefetch(const unsigned char *source, int64_t distance) {
  _mm_prefetch((const char *)((uintptr_t)source + (uintptr_t)distance), _MM_HINT_T0);
}

// Sixteen elements as FP32, times 2^-8 for E4M3: its codes are read as FP16 with the exponent bias of 15 instead of 7,
// which is exact, subnormals included.
ALWAYS_INLINE __m512 load16(fp8core_dtype dtype, const unsigned char *source, __mmask16 mask, int partial) {
  if (dtype == FP8CORE_FP32) return partial ? _mm512_maskz_loadu_ps(mask, source) : _mm512_loadu_ps(source);
  if (dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16) {
    const __m256i codes =
      partial ? _mm256_maskz_loadu_epi16(mask, source) : _mm256_loadu_si256((const __m256i *)source);
    if (dtype == FP8CORE_FP16) return _mm512_cvtph_ps(codes);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
  }
  const __m128i codes = partial ? _mm_maskz_loadu_epi8(mask, source) : _mm_loadu_si128((const __m128i *)source);
  if (dtype == FP8CORE_E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
  const __m256i halves =
    _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xbf80));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_add_epi16(halves, halves), _mm256_set1_epi16(0x7f00));
  return _mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_maskz_mov_epi16(nan, _mm256_set1_epi16(0x7f80))));
}

// What load16() leaves out of the value.
ALWAYS_INLINE float load_factor(fp8core_dtype dtype) { return dtype == FP8CORE_E4M3 ? 256.0f : 1.0f; }

// FP32 to BF16, in the low halves.
ALWAYS_INLINE __m512i encode_bf16(__m512i bits) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat(1));
  return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, splat(0x7fff)), odd), 16);
}

// Codes of E4M3 or E5M2 times 2^nearest_shift(). With t the power of two of the magnitude, but at least that of the
// smallest normal, which makes the subnormals, and g = t / 2^mantissa_bits the gap there: the sum of the magnitude and
// (2^23 + m) g, m even and below 2^16, is rounded to a multiple of g, to nearest even, and its low half is m plus the
// multiple. Its high half is the exponent of t + 23 - mantissa_bits, times 2^7. The code is the multiple plus
// 2^mantissa_bits times the exponent over the smallest; m takes all constants off.
ALWAYS_INLINE int nearest_shift(fp8core_dtype dtype) { return 7 - fp8core_format_of(dtype).mantissa_bits; }

ALWAYS_INLINE uint32_t nearest_addend(fp8core_dtype dtype) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t shift = (uint32_t)(23 - format.mantissa_bits);
  const uint32_t m = (UINT32_C(1) << 16) - (((uint32_t)(format.min_exponent + 127) + shift) << format.mantissa_bits);
  return (127 + shift) << 23 | m;
}

ALWAYS_INLINE __m512i nearest_exponent(fp8core_dtype dtype, __m512 magnitude) {
  return _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(magnitude), splat(0x7f800000)),
                          splat((uint32_t)(fp8core_format_of(dtype).min_exponent + 127) << 23));
}

ALWAYS_INLINE __m512i nearest_code(fp8core_dtype dtype, __m512 sum) {
  return _mm512_madd_epi16(_mm512_castps_si512(sum), splat(UINT32_C(1) << 16 | UINT32_C(1) << nearest_shift(dtype)));
}

ALWAYS_INLINE __m512i encode_nearest(fp8core_dtype dtype, __m512 magnitude) {
  return nearest_code(dtype, _mm512_fmadd_ps(_mm512_castsi512_ps(nearest_exponent(dtype, magnitude)),
                                             _mm512_castsi512_ps(splat(nearest_addend(dtype))), magnitude));
}

// fp8core_encode_stochastic16() to E4M3 or E5M2, of which every gap has a reciprocal; times 2^nearest_shift(). The sum
// of encode_nearest() rounded toward zero is the lower neighbour's, and what it left out is exact.
ALWAYS_INLINE __m512i encode_stochastic_8(fp8core_dtype dtype, __m512 magnitude, __m512i draw) {
  const fp8core_format format = fp8core_format_of(dtype);
  const __m512 addend = _mm512_castsi512_ps(splat(nearest_addend(dtype)));
  const __m512i exponent = nearest_exponent(dtype, magnitude);
  const __m512 power = _mm512_castsi512_ps(exponent);
  const __m512 sum = _mm512_fmadd_round_ps(power, addend, magnitude, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(magnitude, _mm512_fnmadd_ps(power, addend, sum));
  // 2^32 over the gap.
  const __m512i per_gap = _mm512_sub_epi32(splat((uint32_t)(2 * 127 + 32 + format.mantissa_bits) << 23), exponent);
  const __m512i fraction = _mm512_cvttps_epu32(_mm512_mul_ps(rest, _mm512_castsi512_ps(per_gap)));
  const __m512i lower = nearest_code(dtype, sum);
  return _mm512_mask_add_epi32(lower, _mm512_cmplt_epu32_mask(draw, fraction), lower,
                               splat(UINT32_C(1) << nearest_shift(dtype)));
}

// Words 0, 2, ... (offset 0) or 1, 3, ... (offset 1) of two vectors.
ALWAYS_INLINE __m512i words(__m512i first, __m512i second, int offset) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i index = offset ? _mm512_or_si512(even, _mm512_set1_epi16(1)) : even;
  return _mm512_permutex2var_epi16(first, index, second);
}

ALWAYS_INLINE void store64(unsigned char *destination, __m512i vector, __mmask64 mask, int partial, int streaming) {
  if (partial)
    _mm512_mask_storeu_epi8(destination, mask, vector);
  else if (streaming)
    _mm512_stream_si512((__m512i *)destination, vector);
  else
    _mm512_storeu_si512(destination, vector);
}

// Sign of `signs`, all else of `vector`.
ALWAYS_INLINE __m512i with_sign(__m512i vector, __m512i signs, __m512i sign_mask) {
  return _mm512_ternarylogic_epi32(sign_mask, signs, vector, 0xca);
}

// What the codes have more zeros than the values. Lanes that a mask left out are zeros on both sides.
ALWAYS_INLINE void count_flushed(__mmask64 zero_codes, const __m512i magnitude[4], cast_sums *sums) {
  if (__builtin_expect(zero_codes == 0, 1)) return;
  sums->flushed_to_zero += __builtin_popcountll(zero_codes);
  for (int i = 0; i < 4; i++)
    sums->flushed_to_zero -= __builtin_popcount((unsigned)_mm512_testn_epi32_mask(magnitude[i], magnitude[i]));
}

ALWAYS_INLINE void cast_block(fp8core_dtype source_dtype, fp8core_dtype destination_dtype, int stochastic,
                              const fp8core_cast_parameters *parameters, const cast_constants *constants,
                              const unsigned char *source, unsigned char *destination, uint64_t first_element,
                              __mmask64 mask, int partial, int streaming, cast_sums *sums) {
  __m512i value[4];
  __m512i magnitude[4];
  __m512 scaled[4];
  for (int i = 0; i < 4; i++) {
    value[i] = _mm512_castps_si512(
      _mm512_mul_ps(load16(source_dtype, source + i * 16 * bytes_of(source_dtype), lanes(mask, i * 16), partial),
                    constants->scale_inverse));
    magnitude[i] = _mm512_and_si512(value[i], splat(FP8CORE_F32_MAGNITUDE));
    scaled[i] = _mm512_mul_ps(_mm512_castsi512_ps(magnitude[i]), constants->scale);
  }
  const __m512i largest =
    _mm512_max_epi32(_mm512_max_epi32(magnitude[0], magnitude[1]), _mm512_max_epi32(magnitude[2], magnitude[3]));
  sums->amax = _mm512_max_epi32(sums->amax, largest);
  const __m512i largest_scaled = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(largest), constants->scale));
  if (__builtin_expect(_mm512_cmpgt_epi32_mask(largest_scaled, constants->max_rounding_to_max) != 0, 0)) {
    for (int i = 0; i < 4; i++) {
      const __m512i bits = _mm512_castps_si512(scaled[i]);
      const __mmask16 over = _mm512_cmpgt_epi32_mask(bits, constants->max_rounding_to_max);
      const __mmask16 nan = _mm512_cmpgt_epi32_mask(bits, splat(FP8CORE_F32_INFINITY));
      const __mmask16 nonfinite = _mm512_cmpge_epi32_mask(magnitude[i], splat(FP8CORE_F32_INFINITY));
      const __m512i clamped = _mm512_mask_mov_epi32(bits, over, constants->overflow);
      scaled[i] = _mm512_castsi512_ps(_mm512_mask_mov_epi32(clamped, nan, constants->nan));
      // Whatever is not finite exceeds the range after any scale too.
      sums->saturated += __builtin_popcount((unsigned)over) - __builtin_popcount((unsigned)nonfinite);
      sums->nonfinite += __builtin_popcount((unsigned)nonfinite);
    }
  }

  __mmask64 zeros = 0;
  const __m512i sign_dwords = splat(FP8CORE_F32_SIGN);
  if (destination_dtype == FP8CORE_FP32) {
    for (int i = 0; i < 4; i++) {
      const __m512i bits = _mm512_castps_si512(scaled[i]);
      zeros |= (__mmask64)_mm512_testn_epi32_mask(bits, bits) << (i * 16);
      const __m512i result = with_sign(bits, value[i], sign_dwords);
      if (partial)
        _mm512_mask_storeu_epi32(destination + i * 64, lanes(mask, i * 16), result);
      else
        store64(destination + i * 64, result, 0, 0, streaming);
    }
    count_flushed(zeros, magnitude, sums);
    return;
  }

  __m512i codes[4];
  __m512i draws[4];
  if (stochastic) fp8core_draw64(&constants->keys, parameters->tensor_id, parameters->step, first_element / 4, draws);
  const int by_instruction = destination_dtype == FP8CORE_FP16 && !stochastic;
  const int to_bf16 = destination_dtype == FP8CORE_BF16 && !stochastic;
  for (int i = 0; i < 4; i++) {
    if (by_instruction) continue;
    if (stochastic) {
      // Between the maximum and what still rounds to it nothing is drawn. What clamp put there has no fraction.
      const __m512i bits = _mm512_castps_si512(scaled[i]);
      const __mmask16 within = _mm512_cmple_epi32_mask(bits, constants->max_rounding_to_max);
      scaled[i] = _mm512_castsi512_ps(_mm512_mask_min_epi32(bits, within, bits, constants->max_value));
      codes[i] = bytes_of(destination_dtype) == 1
                   ? encode_stochastic_8(destination_dtype, scaled[i], draws[i])
                   : fp8core_encode_stochastic16(destination_dtype, _mm512_castps_si512(scaled[i]), draws[i]);
    } else {
      codes[i] = to_bf16 ? encode_bf16(_mm512_castps_si512(scaled[i])) : encode_nearest(destination_dtype, scaled[i]);
    }
  }
  if (bytes_of(destination_dtype) == 2) {
    for (int i = 0; i < 2; i++) {
      const __m512i code_words =
        by_instruction ? _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(scaled[2 * i], TO_NEAREST)),
                                            _mm512_cvtps_ph(scaled[2 * i + 1], TO_NEAREST), 1)
                       : words(codes[2 * i], codes[2 * i + 1], 0);
      const __m512i value_words = words(value[2 * i], value[2 * i + 1], 1);
      zeros |= (__mmask64)_mm512_testn_epi16_mask(code_words, code_words) << (i * 32);
      const __m512i result = with_sign(code_words, value_words, _mm512_set1_epi16(-0x8000));
      if (partial)
        _mm512_mask_storeu_epi16(destination + i * 64, (__mmask32)(mask >> i * 32), result);
      else
        store64(destination + i * 64, result, 0, 0, streaming);
    }
    count_flushed(zeros, magnitude, sums);
    return;
  }
  // The packs work within lanes of 128 bits: four dwords of each vector come together there. Signed ones keep the sign
  // bit of every element, that of -0 too.
  __m512i code_words[2];
  __m512i value_words[2];
  for (int i = 0; i < 2; i++) {
    code_words[i] = _mm512_packus_epi32(codes[2 * i], codes[2 * i + 1]);
    code_words[i] =
      nearest_shift(destination_dtype) == 4 ? _mm512_srli_epi16(code_words[i], 4) : _mm512_srli_epi16(code_words[i], 5);
    value_words[i] = _mm512_packs_epi32(value[2 * i], value[2 * i + 1]);
  }
  const __m512i code_bytes = _mm512_packus_epi16(code_words[0], code_words[1]);
  const __m512i value_bytes = _mm512_packs_epi16(value_words[0], value_words[1]);
  count_flushed(_mm512_testn_epi8_mask(code_bytes, code_bytes), magnitude, sums);
  const __m512i result = with_sign(code_bytes, value_bytes, _mm512_set1_epi8(-0x80));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  store64(destination, _mm512_permutexvar_epi32(order, result), mask, partial, streaming);
}

// A cast to nearest of an 8-bit format to a 16-bit one, as a table of the 128 magnitudes.
typedef struct cast_table {
  __m512i words[4];
  // Codes that count nowhere: zero, and those from `lowest` to `highest`.
  __m512i lowest_less_one;
  __m512i highest;
  __m512i largest;
} cast_table;

// Elements from which a table is worth its making.
#define TABLE_ELEMENTS 1024

ALWAYS_INLINE cast_table make_table(fp8core_dtype source_dtype, fp8core_dtype destination_dtype,
                                    const fp8core_cast_parameters *parameters, const cast_constants *constants) {
  unsigned char codes[128];
  uint16_t results[128];
  cast_sums unused = {_mm512_setzero_si512(), 0, 0, 0};
  for (int i = 0; i < 128; i++) codes[i] = (unsigned char)i;
  for (int i = 0; i < 128; i += BLOCK)
    cast_block(source_dtype, destination_dtype, 0, parameters, constants, codes + i, (unsigned char *)(results + i), 0,
               UINT64_MAX, 0, 0, &unused);
  int lowest = 1;
  int highest = 127;
  while (lowest < 127 && results[lowest] == 0) lowest++;
  for (; highest > 0; highest--) {
    const fp8core_cast_result result =
      fp8core_cast_element((uint32_t)highest, source_dtype, parameters->scale_inverse, destination_dtype,
                           parameters->scale, 0, 0, parameters->saturate);
    if (!result.nonfinite && !result.saturated) break;
  }
  cast_table table = {.lowest_less_one = _mm512_set1_epi8((char)(lowest - 1)),
                      .highest = _mm512_set1_epi8((char)highest),
                      .largest = _mm512_setzero_si512()};
  for (int i = 0; i < 4; i++) table.words[i] = _mm512_loadu_si512(results + i * 32);
  return table;
}

// Casts a block, or returns 0 where something in it counts.
ALWAYS_INLINE int cast_block_by_table(cast_table *table, const unsigned char *source, unsigned char *destination,
                                      int streaming) {
  const __m512i codes = _mm512_and_si512(_mm512_loadu_si512(source), _mm512_set1_epi8(0x7f));
  const __mmask64 high = _mm512_cmpgt_epu8_mask(codes, table->highest);
  const __mmask64 low = _mm512_cmplt_epu8_mask(_mm512_sub_epi8(codes, _mm512_set1_epi8(1)), table->lowest_less_one);
  if (__builtin_expect((high | low) != 0, 0)) return 0;
  table->largest = _mm512_max_epu8(table->largest, codes);
  for (int i = 0; i < 2; i++) {
    // The permutations read the low six bits of a word; the sign is at its top.
    const __m512i index = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(source + i * 32)));
    const __m512i below = _mm512_permutex2var_epi16(table->words[0], index, table->words[1]);
    const __m512i above = _mm512_permutex2var_epi16(table->words[2], index, table->words[3]);
    const __m512i words = _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(index, _mm512_set1_epi16(64)), above);
    store64(destination + i * 64, with_sign(words, index, _mm512_set1_epi16(-0x8000)), 0, 0, streaming);
  }
  return 1;
}

ALWAYS_INLINE void cast_run(fp8core_dtype source_dtype, fp8core_dtype destination_dtype, int stochastic,
                            const fp8core_cast_parameters *parameters, const void *source, void *destination,
                            int64_t elements, uint64_t first_element, fp8core_cast_totals *totals) {
  const fp8core_format format = fp8core_format_of(destination_dtype);
  // The code of infinity and NaN must come out of the arithmetic of encode_nearest() and fp8core_encode_stochastic16():
  // the value that the code would have if it were finite. The conversion instruction to FP16 and wider formats take the
  // real ones.
  const int as_finite = destination_dtype == FP8CORE_E4M3 || destination_dtype == FP8CORE_E5M2 ||
                        (destination_dtype == FP8CORE_FP16 && stochastic);
  const uint32_t infinity = !as_finite                          ? FP8CORE_F32_INFINITY
                            : destination_dtype == FP8CORE_E4M3 ? UINT32_C(0x43f00000)
                                                                : UINT32_C(0x47800000);
  const uint32_t nan = !as_finite                          ? FP8CORE_F32_QUIET_NAN
                       : destination_dtype == FP8CORE_E4M3 ? UINT32_C(0x43f00000)
                                                           : UINT32_C(0x47c00000);
  cast_constants constants = {
    .scale_inverse = _mm512_set1_ps(parameters->scale_inverse * load_factor(source_dtype)),
    .scale = _mm512_set1_ps(parameters->scale),
    .max_rounding_to_max = splat(format.max_rounding_to_max),
    .overflow = splat(parameters->saturate ? format.max_value : infinity),
    .nan = splat(nan),
    .max_value = splat(format.max_value),
  };
  if (stochastic) constants.keys = fp8core_draw_keys_of(parameters->seed);
  cast_sums sums = {_mm512_setzero_si512(), 0, 0, 0};
  const int streaming = parameters->streaming;
  const int64_t ahead = parameters->prefetch;
  const unsigned char *in = source;
  unsigned char *out = destination;
  const int by_table =
    !stochastic && bytes_of(source_dtype) == 1 && bytes_of(destination_dtype) == 2 && elements >= TABLE_ELEMENTS;
  cast_table table;
  if (by_table) table = make_table(source_dtype, destination_dtype, parameters, &constants);
  // Blocks start at a multiple of four elements, as those of the generator do.
  const int64_t skipped = stochastic ? (int64_t)(first_element % 4) : 0;
  for (int64_t i = -skipped; i < elements; i += BLOCK) {
    for (; i >= 0 && i + BLOCK <= elements; i += BLOCK) {
      const unsigned char *from = in + i * bytes_of(source_dtype);
      for (int64_t line = 0; line < bytes_of(source_dtype); line++) prefetch(from + line * 64, ahead);
      if (by_table && cast_block_by_table(&table, from, out + i * bytes_of(destination_dtype), streaming)) continue;
      cast_block(source_dtype, destination_dtype, stochastic, parameters, &constants, from,
                 out + i * bytes_of(destination_dtype), first_element + (uint64_t)i, UINT64_MAX, 0, streaming, &sums);
    }
    if (i >= elements) break;
    // Lanes before the first element and after the last are masked; addresses there are only computed.
    const int64_t low = i < 0 ? -i : 0;
    const int64_t high = elements - i < BLOCK ? elements - i : BLOCK;
    const __mmask64 mask = UINT64_MAX >> (BLOCK - (high - low)) << low;
    cast_block(source_dtype, destination_dtype, stochastic, parameters, &constants,
               (const unsigned char *)((uintptr_t)in + (uintptr_t)(i * bytes_of(source_dtype))),
               (unsigned char *)((uintptr_t)out + (uintptr_t)(i * bytes_of(destination_dtype))),
               first_element + (uint64_t)i, mask, 1, 0, &sums);
  }
  if (streaming) _mm_sfence();

  const uint32_t amax = (uint32_t)_mm512_reduce_max_epi32(sums.amax);
  const uint32_t canonical = amax > FP8CORE_F32_INFINITY ? FP8CORE_F32_QUIET_NAN : amax;
  totals->amax = canonical > totals->amax ? canonical : totals->amax;
  if (by_table) {
    unsigned char each[64];
    uint32_t largest = 0;
    _mm512_storeu_si512(each, table.largest);
    for (int i = 0; i < 64; i++) largest = each[i] > largest ? each[i] : largest;
    const float value = fp8core_bits_float(fp8core_decode_bits(source_dtype, largest)) * parameters->scale_inverse;
    totals->amax = fp8core_float_bits(value) > totals->amax ? fp8core_float_bits(value) : totals->amax;
  }
  totals->saturated += sums.saturated;
  totals->nonfinite += sums.nonfinite;
  totals->flushed_to_zero += sums.flushed_to_zero;
}

ALWAYS_INLINE void amax_run(fp8core_dtype source_dtype, float scale_inverse, const void *source, int64_t elements,
                            fp8core_cast_totals *totals) {
  const unsigned char *in = source;
  const __m512 scales = _mm512_set1_ps(scale_inverse * load_factor(source_dtype));
  __m512i largest[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t i = 0; i < elements; i += BLOCK) {
    const int full = i + BLOCK <= elements;
    const __mmask64 mask = full ? UINT64_MAX : UINT64_MAX >> (BLOCK - (elements - i));
    for (int64_t line = 0; line < bytes_of(source_dtype); line++)
      prefetch(in + i * bytes_of(source_dtype) + line * 64, FP8CORE_PREFETCH_BYTES);
    for (int j = 0; j < 4; j++) {
      const unsigned char *from = in + (i + j * 16) * bytes_of(source_dtype);
      const __m512 loaded =
        full ? load16(source_dtype, from, 0, 0) : load16(source_dtype, from, lanes(mask, j * 16), 1);
      const __m512i magnitude =
        _mm512_and_si512(_mm512_castps_si512(_mm512_mul_ps(loaded, scales)), splat(FP8CORE_F32_MAGNITUDE));
      largest[j] = _mm512_max_epi32(largest[j], magnitude);
    }
  }
  const uint32_t amax = (uint32_t)_mm512_reduce_max_epi32(
    _mm512_max_epi32(_mm512_max_epi32(largest[0], largest[1]), _mm512_max_epi32(largest[2], largest[3])));
  const uint32_t canonical = amax > FP8CORE_F32_INFINITY ? FP8CORE_F32_QUIET_NAN : amax;
  totals->amax = canonical > totals->amax ? canonical : totals->amax;
}

FP8CORE_CAST_KERNELS

// Sixteen columns at a time. Lane l of vector i holds row 16 l + i, so that after four rounds of unpacking, which
// transpose 16 x 16 bytes in each lane of 128 bits, a vector is a whole column.
static void transpose_1(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                        int64_t destination_stride, int streaming) {
  for (int group = 0; group < FP8CORE_TILE; group += 16) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; i++) {
      const unsigned char *from = source + i * source_stride + group;
      a[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
      for (int lane = 1; lane < 4; lane++)
        a[i] = _mm512_mask_broadcast_i32x4(a[i], (__mmask16)(0xf << 4 * lane),
                                           _mm_loadu_si128((const __m128i *)(from + lane * 16 * source_stride)));
    }
    for (int round = 0; round < 2; round++) {
      for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi8(a[i], a[i + 8]);
        b[2 * i + 1] = _mm512_unpackhi_epi8(a[i], a[i + 8]);
      }
      for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi8(b[i], b[i + 8]);
        a[2 * i + 1] = _mm512_unpackhi_epi8(b[i], b[i + 8]);
      }
    }
    for (int i = 0; i < 16; i++) store64(destination + (group + i) * destination_stride, a[i], 0, 0, streaming);
  }
}

static void copy(unsigned char *destination, const unsigned char *source, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) store64(destination + i, _mm512_load_si512(source + i), 0, 0, 1);
}

const fp8core_cast_kernels fp8core_cast_avx512 = {
  .cast = FP8CORE_CAST_TABLE,
  .amax = FP8CORE_AMAX_TABLE,
  .transpose = {transpose_1, fp8core_transpose_2, fp8core_transpose_4},
  .copy = copy,
};
