// Casts with AVX2 and F16C: blocks of 32 elements, one kernel a pair of formats and rounding.
//
// The scheme is that of the AVX-512 tier: a block whose values all stay within the destination's range, the usual case,
// needs no clamp and no counting of what was clamped. Without masks, a partial block goes through a buffer.
#include <immintrin.h>
#include <string.h>

#include "cast.h"
#include "cast_table.h"
#include "draw_avx2.h"
#include "encode_avx2.h"
#include "numerics.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define BLOCK 32
#define TO_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

// Loop invariants of one call.
typedef struct cast_constants {
  __m256 scale_inverse;
  __m256 scale;
  // Largest magnitude that rounds within the destination's range.
  __m256i max_rounding_to_max;
  // What larger ones, and NaN, are replaced by before they are encoded.
  __m256i overflow;
  __m256i nan;
  __m256i max_value;
} cast_constants;

typedef struct cast_sums {
  __m256i amax;
  int64_t saturated;
  int64_t flushed_to_zero;
  int64_t nonfinite;
} cast_sums;

ALWAYS_INLINE __m256i splat(uint32_t value) { return _mm256_set1_epi32((int)value); }

ALWAYS_INLINE int64_t bytes_of(fp8core_dtype dtype) { return fp8core_format_of(dtype).bits / 8; }

// An address beyond the tensor does nothing.
ALWAYS_INLINE void prefetch(const unsigned char *source, int64_t distance) {
  _mm_prefetch((const char *)((uintptr_t)source + (uintptr_t)distance), _MM_HINT_T0);
}

// Eight elements as FP32, times 2^-8 for E4M3: its codes are read as FP16 with the exponent bias of 15 instead of 7,
// which is exact, subnormals included.
ALWAYS_INLINE __m256 load8(fp8core_dtype dtype, const unsigned char *source) {
  if (dtype == FP8CORE_FP32) return _mm256_loadu_ps((const float *)(const void *)source);
  if (dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16) {
    const __m128i codes = _mm_loadu_si128((const __m128i *)source);
    if (dtype == FP8CORE_FP16) return _mm256_cvtph_ps(codes);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(codes), 16));
  }
  const __m128i codes = _mm_loadl_epi64((const __m128i *)source);
  if (dtype == FP8CORE_E5M2) return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(codes), 8));
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16((short)0xbf80));
  const __m128i nan = _mm_cmpeq_epi16(_mm_add_epi16(halves, halves), _mm_set1_epi16(0x7f00));
  return _mm256_cvtph_ps(_mm_or_si128(halves, _mm_and_si128(nan, _mm_set1_epi16(0x7f80))));
}

// What load8() leaves out of the value.
ALWAYS_INLINE float load_factor(fp8core_dtype dtype) { return dtype == FP8CORE_E4M3 ? 256.0f : 1.0f; }

// FP32 to BF16.
ALWAYS_INLINE __m256i encode_bf16(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, splat(0x7fff)), odd), 16);
}

// As in the AVX-512 tier: codes of E4M3 or E5M2 times 2^nearest_shift().
ALWAYS_INLINE int nearest_shift(fp8core_dtype dtype) { return 7 - fp8core_format_of(dtype).mantissa_bits; }

ALWAYS_INLINE __m256i encode_nearest(fp8core_dtype dtype, __m256 magnitude) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t shift = (uint32_t)(23 - format.mantissa_bits);
  const uint32_t min_exponent = (uint32_t)(format.min_exponent + 127);
  const uint32_t m = (UINT32_C(1) << 16) - ((min_exponent + shift) << format.mantissa_bits);
  const __m256i exponent =
    _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(magnitude), splat(0x7f800000)), splat(min_exponent << 23));
  const __m256 sum =
    _mm256_fmadd_ps(_mm256_castsi256_ps(exponent), _mm256_castsi256_ps(splat((127 + shift) << 23 | m)), magnitude);
  return _mm256_madd_epi16(_mm256_castps_si256(sum), splat(UINT32_C(1) << 16 | UINT32_C(1) << nearest_shift(dtype)));
}

ALWAYS_INLINE void store32(unsigned char *destination, __m256i vector, int streaming) {
  if (streaming)
    _mm256_stream_si256((__m256i *)(void *)destination, vector);
  else
    _mm256_storeu_si256((__m256i *)(void *)destination, vector);
}

// The bits of `mask` from `signs`, the others, which are all that `vector` has, from there.
ALWAYS_INLINE __m256i with_sign(__m256i vector, __m256i signs, __m256i mask) {
  return _mm256_or_si256(vector, _mm256_and_si256(signs, mask));
}

ALWAYS_INLINE int64_t lanes_of(__m256i mask) {
  return __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}

// What the codes have more zeros than the values. Elements around a partial block are zeros on both sides.
ALWAYS_INLINE void count_flushed(int zero_codes, const __m256i magnitude[4], cast_sums *sums) {
  if (__builtin_expect(zero_codes == 0, 1)) return;
  sums->flushed_to_zero += zero_codes;
  for (int i = 0; i < 4; i++)
    sums->flushed_to_zero -= lanes_of(_mm256_cmpeq_epi32(magnitude[i], _mm256_setzero_si256()));
}

ALWAYS_INLINE void cast_block(fp8core_dtype source_dtype, fp8core_dtype destination_dtype, int stochastic,
                              const fp8core_cast_parameters *parameters, const cast_constants *constants,
                              const unsigned char *source, unsigned char *destination, uint64_t first_element,
                              int streaming, cast_sums *sums) {
  const __m256i infinity = splat(FP8CORE_F32_INFINITY);
  const __m256i zero = _mm256_setzero_si256();
  __m256i value[4];
  __m256i magnitude[4];
  __m256 scaled[4];
  for (int i = 0; i < 4; i++) {
    value[i] = _mm256_castps_si256(
      _mm256_mul_ps(load8(source_dtype, source + i * 8 * bytes_of(source_dtype)), constants->scale_inverse));
    magnitude[i] = _mm256_and_si256(value[i], splat(FP8CORE_F32_MAGNITUDE));
    scaled[i] = _mm256_mul_ps(_mm256_castsi256_ps(magnitude[i]), constants->scale);
  }
  const __m256i largest =
    _mm256_max_epi32(_mm256_max_epi32(magnitude[0], magnitude[1]), _mm256_max_epi32(magnitude[2], magnitude[3]));
  sums->amax = _mm256_max_epi32(sums->amax, largest);
  const __m256i largest_scaled = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(largest), constants->scale));
  const __m256i any_over = _mm256_cmpgt_epi32(largest_scaled, constants->max_rounding_to_max);
  if (__builtin_expect(!_mm256_testz_si256(any_over, any_over), 0)) {
    for (int i = 0; i < 4; i++) {
      const __m256i bits = _mm256_castps_si256(scaled[i]);
      const __m256i over = _mm256_cmpgt_epi32(bits, constants->max_rounding_to_max);
      const __m256i nan = _mm256_cmpgt_epi32(bits, infinity);
      const __m256i finite = _mm256_cmpgt_epi32(infinity, magnitude[i]);
      const __m256i clamped = _mm256_blendv_epi8(bits, constants->overflow, over);
      scaled[i] = _mm256_castsi256_ps(_mm256_blendv_epi8(clamped, constants->nan, nan));
      sums->saturated += lanes_of(_mm256_and_si256(over, finite));
      sums->nonfinite += 8 - lanes_of(finite);
    }
  }

  int zero_codes = 0;
  if (destination_dtype == FP8CORE_FP32) {
    for (int i = 0; i < 4; i++) {
      const __m256i bits = _mm256_castps_si256(scaled[i]);
      zero_codes += (int)lanes_of(_mm256_cmpeq_epi32(bits, zero));
      store32(destination + i * 32, with_sign(bits, value[i], splat(FP8CORE_F32_SIGN)), streaming);
    }
    count_flushed(zero_codes, magnitude, sums);
    return;
  }

  __m256i codes[4];
  __m256i draws[4];
  if (stochastic) fp8core_draw32(parameters->seed, parameters->tensor_id, parameters->step, first_element / 4, draws);
  for (int i = 0; i < 4; i++) {
    if (stochastic) {
      // Between the maximum and what still rounds to it nothing is drawn. What took a larger one's place has no
      // fraction.
      const __m256i bits = _mm256_castps_si256(scaled[i]);
      const __m256i over = _mm256_cmpgt_epi32(bits, constants->max_rounding_to_max);
      const __m256i at_most_max = _mm256_min_epi32(bits, constants->max_value);
      codes[i] = fp8core_encode_stochastic8(destination_dtype, _mm256_blendv_epi8(at_most_max, bits, over), draws[i]);
    } else if (destination_dtype == FP8CORE_FP16) {
      codes[i] = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(scaled[i], TO_NEAREST));
    } else if (destination_dtype == FP8CORE_BF16) {
      codes[i] = encode_bf16(_mm256_castps_si256(scaled[i]));
    } else {
      codes[i] = encode_nearest(destination_dtype, scaled[i]);
    }
  }
  // The packs work within lanes of 128 bits. A signed one keeps the sign bit of every element, that of -0 too.
  __m256i code_words[2] = {_mm256_packus_epi32(codes[0], codes[1]), _mm256_packus_epi32(codes[2], codes[3])};
  const __m256i value_words[2] = {_mm256_packs_epi32(value[0], value[1]), _mm256_packs_epi32(value[2], value[3])};
  if (bytes_of(destination_dtype) == 2) {
    for (int i = 0; i < 2; i++) {
      const __m256i zeros = _mm256_cmpeq_epi16(code_words[i], zero);
      zero_codes += __builtin_popcount((unsigned)_mm256_movemask_epi8(zeros)) / 2;
      const __m256i result = with_sign(code_words[i], value_words[i], _mm256_set1_epi16(-0x8000));
      store32(destination + i * 32, _mm256_permute4x64_epi64(result, 0xd8), streaming);
    }
    count_flushed(zero_codes, magnitude, sums);
    return;
  }
  for (int i = 0; i < 2 && !stochastic; i++)
    code_words[i] =
      nearest_shift(destination_dtype) == 4 ? _mm256_srli_epi16(code_words[i], 4) : _mm256_srli_epi16(code_words[i], 5);
  const __m256i code_bytes = _mm256_packus_epi16(code_words[0], code_words[1]);
  const __m256i value_bytes = _mm256_packs_epi16(value_words[0], value_words[1]);
  const unsigned zeros = (unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code_bytes, zero));
  if (__builtin_expect(zeros != 0, 0)) count_flushed(__builtin_popcount(zeros), magnitude, sums);
  const __m256i result = with_sign(code_bytes, value_bytes, _mm256_set1_epi8(-0x80));
  store32(destination, _mm256_permutevar8x32_epi32(result, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), streaming);
}

ALWAYS_INLINE uint32_t reduce_amax(__m256i lanes) {
  uint32_t each[8];
  uint32_t amax = 0;
  _mm256_storeu_si256((__m256i *)(void *)each, lanes);
  for (int i = 0; i < 8; i++) amax = each[i] > amax ? each[i] : amax;
  return amax > FP8CORE_F32_INFINITY ? FP8CORE_F32_QUIET_NAN : amax;
}

ALWAYS_INLINE void cast_run(fp8core_dtype source_dtype, fp8core_dtype destination_dtype, int stochastic,
                            const fp8core_cast_parameters *parameters, const void *source, void *destination,
                            int64_t elements, uint64_t first_element, fp8core_cast_totals *totals) {
  const fp8core_format format = fp8core_format_of(destination_dtype);
  // The code of infinity and NaN must come out of the arithmetic of encode_nearest() and fp8core_encode_stochastic8():
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
  const cast_constants constants = {
    .scale_inverse = _mm256_set1_ps(parameters->scale_inverse * load_factor(source_dtype)),
    .scale = _mm256_set1_ps(parameters->scale),
    .max_rounding_to_max = splat(format.max_rounding_to_max),
    .overflow = splat(parameters->saturate ? format.max_value : infinity),
    .nan = splat(nan),
    .max_value = splat(format.max_value),
  };
  cast_sums sums = {_mm256_setzero_si256(), 0, 0, 0};
  const int streaming = parameters->streaming;
  const int64_t ahead = parameters->prefetch;
  const unsigned char *in = source;
  unsigned char *out = destination;
  // Blocks start at a multiple of four elements, as those of the generator do.
  const int64_t skipped = stochastic ? (int64_t)(first_element % 4) : 0;
  for (int64_t i = -skipped; i < elements; i += BLOCK) {
    for (; i >= 0 && i + BLOCK <= elements; i += BLOCK) {
      const unsigned char *from = in + i * bytes_of(source_dtype);
      for (int64_t line = 0; line < bytes_of(source_dtype) * BLOCK; line += 64) prefetch(from + line, ahead);
      cast_block(source_dtype, destination_dtype, stochastic, parameters, &constants, from,
                 out + i * bytes_of(destination_dtype), first_element + (uint64_t)i, streaming, &sums);
    }
    if (i >= elements) break;
    const int64_t low = i < 0 ? -i : 0;
    const int64_t high = elements - i < BLOCK ? elements - i : BLOCK;
    unsigned char buffer[BLOCK * 4] = {0};
    unsigned char results[BLOCK * 4];
    memcpy(buffer + low * bytes_of(source_dtype), in + (i + low) * bytes_of(source_dtype),
           (size_t)((high - low) * bytes_of(source_dtype)));
    cast_block(source_dtype, destination_dtype, stochastic, parameters, &constants, buffer, results,
               first_element + (uint64_t)i, 0, &sums);
    memcpy(out + (i + low) * bytes_of(destination_dtype), results + low * bytes_of(destination_dtype),
           (size_t)((high - low) * bytes_of(destination_dtype)));
  }
  if (streaming) _mm_sfence();

  const uint32_t amax = reduce_amax(sums.amax);
  totals->amax = amax > totals->amax ? amax : totals->amax;
  totals->saturated += sums.saturated;
  totals->nonfinite += sums.nonfinite;
  totals->flushed_to_zero += sums.flushed_to_zero;
}

ALWAYS_INLINE void amax_run(fp8core_dtype source_dtype, float scale_inverse, const void *source, int64_t elements,
                            fp8core_cast_totals *totals) {
  const unsigned char *in = source;
  const __m256 scales = _mm256_set1_ps(scale_inverse * load_factor(source_dtype));
  const __m256i zero = _mm256_setzero_si256();
  __m256i largest[4] = {zero, zero, zero, zero};
  for (int64_t i = 0; i < elements; i += BLOCK) {
    unsigned char buffer[BLOCK * 4] = {0};
    const unsigned char *from = in + i * bytes_of(source_dtype);
    for (int64_t line = 0; line < bytes_of(source_dtype) * BLOCK; line += 64)
      prefetch(from + line, FP8CORE_PREFETCH_BYTES);
    if (elements - i < BLOCK) from = memcpy(buffer, from, (size_t)((elements - i) * bytes_of(source_dtype)));
    for (int j = 0; j < 4; j++) {
      const __m256 value = _mm256_mul_ps(load8(source_dtype, from + j * 8 * bytes_of(source_dtype)), scales);
      largest[j] =
        _mm256_max_epi32(largest[j], _mm256_and_si256(_mm256_castps_si256(value), splat(FP8CORE_F32_MAGNITUDE)));
    }
  }
  const uint32_t amax =
    reduce_amax(_mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]), _mm256_max_epi32(largest[2], largest[3])));
  totals->amax = amax > totals->amax ? amax : totals->amax;
}

FP8CORE_CAST_KERNELS

// Lane l of vector i of a group of 32 rows holds row 16 l + i, so that after four rounds of unpacking, which transpose
// 16 x 16 bytes in each lane of 128 bits, a vector is half a column.
static void transpose_1(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                        int64_t destination_stride, int streaming) {
  __m256i upper[16];
  for (int column = 0; column < FP8CORE_TILE; column += 16) {
    for (int row = 32; row >= 0; row -= 32) {
      __m256i a[16];
      __m256i b[16];
      for (int i = 0; i < 16; i++) {
        const unsigned char *from = source + (row + i) * source_stride + column;
        a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from)),
                                       _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * source_stride)), 1);
      }
      for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
          b[2 * i] = _mm256_unpacklo_epi8(a[i], a[i + 8]);
          b[2 * i + 1] = _mm256_unpackhi_epi8(a[i], a[i + 8]);
        }
        for (int i = 0; i < 16; i++) a[i] = b[i];
      }
      for (int i = 0; i < 16; i++) {
        // The two halves of a line one after the other, so that it goes out whole.
        unsigned char *to = destination + (column + i) * destination_stride;
        if (row == 32) {
          upper[i] = a[i];
        } else {
          store32(to, a[i], streaming);
          store32(to + 32, upper[i], streaming);
        }
      }
    }
  }
}

static void copy(unsigned char *destination, const unsigned char *source, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 32)
    store32(destination + i, _mm256_load_si256((const __m256i *)(const void *)(source + i)), 1);
}

const fp8core_cast_kernels fp8core_cast_avx2 = {
  .cast = FP8CORE_CAST_TABLE,
  .amax = FP8CORE_AMAX_TABLE,
  .transpose = {transpose_1, fp8core_transpose_2, fp8core_transpose_4},
  .copy = copy,
};
