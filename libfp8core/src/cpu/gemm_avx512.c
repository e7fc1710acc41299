#include <immintrin.h>

#define LANES 16
#include "cpu/gemm_epilogue.h"

// FP32 products by fused multiply-adds, for operands of any format: packing converts to FP32, in which all are exact.
// The tile and its reasons are those of gemm_avx512_bf16.c.

#define ROWS 12
#define COLUMNS 32
#define ROW_MASK ((__mmask16)0x0fff)
// How far ahead packing reads: along a row, and in rows of a K-strided source.
#define PREFETCH_BYTES 256
#define PREFETCH_K 16

ALWAYS_INLINE __mmask16 first_16(int64_t count) {
  const uint32_t mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (UINT32_C(1) << count) - 1;
  return (__mmask16)(mask & 0xffff);
}

ALWAYS_INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

// The elements of the mask as FP32; nothing else is read, and 0 is in the other lanes.
ALWAYS_INLINE __m512 load_16(fp8core_dtype dtype, __mmask16 mask, const unsigned char *data) {
  switch (dtype) {
  case FP8CORE_E4M3: {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, data));
    const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
    // Rebias by a product, which puts subnormals right too.
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(value), is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
  }
  // E5M2 is the upper half of FP16.
  case FP8CORE_E5M2:
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, data)), 8));
  case FP8CORE_BF16:
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, data)), 16));
  case FP8CORE_FP16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, data));
  case FP8CORE_FP32: break;
  }
  return _mm512_maskz_loadu_ps(mask, data);
}

ALWAYS_INLINE void transpose_16x16(__m512 rows[16]) {
  __m512 pairs[16];
  __m512 quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  // quads[4 g + c] holds rows 4 g .. 4 g + 3 of columns c, c + 4, c + 8, c + 12, one a lane.
  for (int c = 0; c < 4; c++) {
    const __m512 low_even = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
    const __m512 low_odd = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
    const __m512 high_even = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512 high_odd = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
    rows[4 + c] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
    rows[12 + c] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
}

ALWAYS_INLINE void pack_k_contiguous(const fp8core_gemm_operand *source, fp8core_dtype dtype, int width, int64_t first,
                                     int64_t count, int64_t k_first, int64_t k_count, unsigned char *panels,
                                     int64_t panel_stride) {
  const int64_t element = (int64_t)fp8core_dtype_size(dtype);
  for (int64_t i = 0; i < count; i += width)
    for (int lane = 0; lane < width; lane += 16) {
      const int rows = width - lane < 16 ? width - lane : 16;
      const __mmask16 lanes = rows == 16 ? (__mmask16)0xffff : ROW_MASK;
      const int64_t valid = minimum(count - i - lane, rows);
      const unsigned char *corner = source->data + (first + i + lane) * source->stride + k_first * element;
      float *packed = (float *)(void *)(panels + i / width * panel_stride) + lane;
      for (int64_t k = 0; k < k_count; k += 16) {
        const __mmask16 present = first_16(k_count - k);
        const int64_t units = minimum(k_count - k, 16);
        // The rows are further apart than hardware fetches ahead.
        for (int row = 0; row < rows; row++)
          __builtin_prefetch(corner + row * source->stride + k * element + PREFETCH_BYTES);
        __m512 block[16];
        for (int row = 0; row < 16; row++)
          block[row] =
            row < valid ? load_16(dtype, present, corner + row * source->stride + k * element) : _mm512_setzero_ps();
        transpose_16x16(block);
        for (int unit = 0; unit < 16; unit++)
          if (unit < units) _mm512_mask_storeu_ps(packed + (k + unit) * width, lanes, block[unit]);
      }
    }
}

ALWAYS_INLINE void pack_k_strided(const fp8core_gemm_operand *source, fp8core_dtype dtype, int width, int64_t first,
                                  int64_t count, int64_t k_first, int64_t k_count, unsigned char *panels,
                                  int64_t panel_stride) {
  const int64_t element = (int64_t)fp8core_dtype_size(dtype);
  // Rows of the source outside, so that it is read in order.
  for (int64_t k = 0; k < k_count; k++) {
    const unsigned char *row = source->data + (k_first + k) * source->stride + first * element;
    for (int64_t i = 0; i < count * element; i += 64) __builtin_prefetch(row + PREFETCH_K * source->stride + i);
    for (int64_t i = 0; i < count; i += width) {
      float *packed = (float *)(void *)(panels + i / width * panel_stride) + k * width;
      for (int lane = 0; lane < width; lane += 16) {
        const int lanes = width - lane < 16 ? width - lane : 16;
        const __mmask16 present = first_16(minimum(count - i - lane, lanes));
        _mm512_mask_storeu_ps(packed + lane, lanes == 16 ? (__mmask16)0xffff : ROW_MASK,
                              load_16(dtype, present, row + (i + lane) * element));
      }
    }
  }
}

#define PACK_ARGUMENTS                                                                                                 \
  const fp8core_gemm_operand *source, int64_t first, int64_t count, int64_t k_first, int64_t k_count,                  \
    unsigned char *panels, int64_t panel_stride

ALWAYS_INLINE void pack(int width, PACK_ARGUMENTS) {
#define PACK_CASE(dtype)                                                                                               \
  case dtype:                                                                                                          \
    if (source->k_contiguous)                                                                                          \
      pack_k_contiguous(source, dtype, width, first, count, k_first, k_count, panels, panel_stride);                   \
    else                                                                                                               \
      pack_k_strided(source, dtype, width, first, count, k_first, k_count, panels, panel_stride);                      \
    break;
  switch (source->dtype) {
    PACK_CASE(FP8CORE_E4M3)
    PACK_CASE(FP8CORE_E5M2)
    PACK_CASE(FP8CORE_BF16)
    PACK_CASE(FP8CORE_FP16)
    PACK_CASE(FP8CORE_FP32)
  }
#undef PACK_CASE
}

static void pack_a(PACK_ARGUMENTS) { pack(ROWS, source, first, count, k_first, k_count, panels, panel_stride); }
static void pack_b(PACK_ARGUMENTS) { pack(COLUMNS, source, first, count, k_first, k_count, panels, panel_stride); }

ALWAYS_INLINE void multiply_rows(int rows, int vectors, int64_t k, const float *a, const float *b, float *tile,
                                 int accumulate) {
  __m512 sums[ROWS][2];
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++)
      sums[i][j] = accumulate ? _mm512_load_ps(tile + i * COLUMNS + j * 16) : _mm512_setzero_ps();
  for (int64_t unit = 0; unit < k; unit++) {
    // Not an array: clang would keep one in memory.
    const __m512 left = _mm512_load_ps(b);
    const __m512 right = vectors > 1 ? _mm512_load_ps(b + 16) : left;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
      const __m512 row = _mm512_set1_ps(a[i]);
      sums[i][0] = _mm512_fmadd_ps(row, left, sums[i][0]);
      if (vectors > 1) sums[i][1] = _mm512_fmadd_ps(row, right, sums[i][1]);
    }
    a += ROWS;
    b += COLUMNS;
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++) _mm512_store_ps(tile + i * COLUMNS + j * 16, sums[i][j]);
}

#define MULTIPLY_FUNCTIONS(rows)                                                                                       \
  static void multiply_##rows##_1(int64_t k, const float *a, const float *b, float *tile, int accumulate) {            \
    multiply_rows(rows, 1, k, a, b, tile, accumulate);                                                                 \
  }                                                                                                                    \
  static void multiply_##rows##_2(int64_t k, const float *a, const float *b, float *tile, int accumulate) {            \
    multiply_rows(rows, 2, k, a, b, tile, accumulate);                                                                 \
  }
MULTIPLY_FUNCTIONS(1)
MULTIPLY_FUNCTIONS(2)
MULTIPLY_FUNCTIONS(3)
MULTIPLY_FUNCTIONS(4)
MULTIPLY_FUNCTIONS(5)
MULTIPLY_FUNCTIONS(6)
MULTIPLY_FUNCTIONS(7)
MULTIPLY_FUNCTIONS(8)
MULTIPLY_FUNCTIONS(9)
MULTIPLY_FUNCTIONS(10)
MULTIPLY_FUNCTIONS(11)
MULTIPLY_FUNCTIONS(12)

static void multiply(int rows, int columns, int64_t k, const unsigned char *a, const unsigned char *b, float *tile,
                     int accumulate) {
  typedef void (*multiply_function)(int64_t k, const float *a, const float *b, float *tile, int accumulate);
#define PAIR(rows)                                                                                                     \
  { multiply_##rows##_1, multiply_##rows##_2 }
  static const multiply_function functions[ROWS][2] = {PAIR(1), PAIR(2), PAIR(3), PAIR(4),  PAIR(5),  PAIR(6),
                                                       PAIR(7), PAIR(8), PAIR(9), PAIR(10), PAIR(11), PAIR(12)};
#undef PAIR
  functions[rows - 1][columns > 16](k, (const float *)(const void *)a, (const float *)(const void *)b, tile,
                                    accumulate);
}

// FP32 bits of 16 values rounded to BF16: the upper halves, with anything in the lower ones.
ALWAYS_INLINE __m512i bf16_in_upper_halves(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), sign,
                              _mm512_set1_epi32(0x7fc00000));
}

// finish_tile() for whole rows without C, activation and column sums, to BF16 or FP32: nearly all tiles of a model's
// products.
ALWAYS_INLINE void finish_whole_rows(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile,
                                     fp8core_gemm_maxima *maxima, fp8core_dtype d_dtype, int with_bias) {
  const int64_t d_size = (int64_t)fp8core_dtype_size(d_dtype);
  const __m512 factor = _mm512_set1_ps(epilogue->factor);
  const __m512 d_scale = _mm512_set1_ps(epilogue->d_scale);
  const __m512i magnitude = _mm512_set1_epi32((int)FP8CORE_F32_MAGNITUDE);
  const __m512 bias_left = with_bias ? _mm512_loadu_ps(epilogue->bias + tile->column) : _mm512_setzero_ps();
  const __m512 bias_right = with_bias ? _mm512_loadu_ps(epilogue->bias + tile->column + 16) : _mm512_setzero_ps();
  static const uint16_t upper_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                            33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_loadu_si512(upper_halves);
  __m512i largest_left = _mm512_setzero_si512();
  __m512i largest_right = _mm512_setzero_si512();
  unsigned char *d = epilogue->d + (tile->row * epilogue->d_stride + tile->column) * d_size;
  for (int i = 0; i < tile->rows; i++) {
    __m512 left = _mm512_mul_ps(_mm512_load_ps(tile->sums + i * COLUMNS), factor);
    __m512 right = _mm512_mul_ps(_mm512_load_ps(tile->sums + i * COLUMNS + 16), factor);
    if (with_bias) {
      left = _mm512_add_ps(left, bias_left);
      right = _mm512_add_ps(right, bias_right);
    }
    largest_left = _mm512_max_epu32(largest_left, _mm512_and_si512(_mm512_castps_si512(left), magnitude));
    largest_right = _mm512_max_epu32(largest_right, _mm512_and_si512(_mm512_castps_si512(right), magnitude));
    left = _mm512_mul_ps(left, d_scale);
    right = _mm512_mul_ps(right, d_scale);
    if (d_dtype == FP8CORE_BF16) {
      _mm512_storeu_si512(d, _mm512_permutex2var_epi16(bf16_in_upper_halves(left), upper, bf16_in_upper_halves(right)));
    } else {
      const __m512i quiet_nan = _mm512_set1_epi32(FP8CORE_F32_QUIET_NAN);
      const __m512i sign = _mm512_set1_epi32(INT32_MIN);
      // FP32 stores one NaN, with its sign: sign bit of the value | quiet_nan.
      const __mmask16 left_nan = _mm512_cmp_ps_mask(left, left, _CMP_UNORD_Q);
      const __mmask16 right_nan = _mm512_cmp_ps_mask(right, right, _CMP_UNORD_Q);
      const __m512i left_bits = _mm512_castps_si512(left);
      const __m512i right_bits = _mm512_castps_si512(right);
      _mm512_storeu_si512(d, _mm512_mask_ternarylogic_epi32(left_bits, left_nan, sign, quiet_nan, 0xea));
      _mm512_storeu_si512(d + 64, _mm512_mask_ternarylogic_epi32(right_bits, right_nan, sign, quiet_nan, 0xea));
    }
    d += epilogue->d_stride * d_size;
  }
  const uint32_t largest = _mm512_reduce_max_epu32(_mm512_max_epu32(largest_left, largest_right));
  if (largest > maxima->d) maxima->d = largest;
}

void fp8core_gemm_finish_avx512(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile,
                                fp8core_gemm_maxima *maxima) {
  if (tile->columns == COLUMNS && !epilogue->c && !tile->column_sums && epilogue->activation == FP8CORE_EPILOGUE_NONE) {
    if (epilogue->d_dtype == FP8CORE_BF16 && epilogue->bias)
      return finish_whole_rows(epilogue, tile, maxima, FP8CORE_BF16, 1);
    if (epilogue->d_dtype == FP8CORE_BF16) return finish_whole_rows(epilogue, tile, maxima, FP8CORE_BF16, 0);
    if (epilogue->d_dtype == FP8CORE_FP32 && epilogue->bias)
      return finish_whole_rows(epilogue, tile, maxima, FP8CORE_FP32, 1);
    if (epilogue->d_dtype == FP8CORE_FP32) return finish_whole_rows(epilogue, tile, maxima, FP8CORE_FP32, 0);
  }
  finish_tile(epilogue, tile, maxima, COLUMNS);
}

const fp8core_gemm_kernels fp8core_gemm_avx512 = {
  .rows = ROWS,
  .columns = COLUMNS,
  .k_unit = 1,
  .packed_bytes = 4,
  .block_k = 256,
  .pack_a = pack_a,
  .pack_b = pack_b,
  .multiply = multiply,
  .finish = fp8core_gemm_finish_avx512,
};
