#include <immintrin.h>

#define LANES 8
#include "cpu/gemm_epilogue.h"

// FP32 products by fused multiply-adds: 6 x 16 elements of the result stay in 12 of the 16 registers.

#define ROWS 6
#define COLUMNS 16
// How far ahead packing reads: along a row, and in rows of a K-strided source.
#define PREFETCH_BYTES 256
#define PREFETCH_K 16

ALWAYS_INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

// `count` elements as FP32, 0 beyond.
ALWAYS_INLINE __m256 load_8(fp8core_dtype dtype, int64_t count, const unsigned char *data) {
  unsigned char tail[32] = {0};
  if (count < 8) {
    memcpy(tail, data, (size_t)(count > 0 ? count : 0) * fp8core_dtype_size(dtype));
    data = tail;
  }
  switch (dtype) {
  case FP8CORE_E4M3: {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadu_si64(data));
    const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(0x80)), 24);
    // Rebias by a product, which puts subnormals right too.
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(0x1p120f));
    const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    const __m256i bits = _mm256_blendv_epi8(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fc00000), is_nan);
    return _mm256_castsi256_ps(_mm256_or_si256(bits, sign));
  }
  // E5M2 is the upper half of FP16.
  case FP8CORE_E5M2: return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadu_si64(data)), 8));
  case FP8CORE_BF16:
    return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)data)), 16));
  case FP8CORE_FP16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)data));
  case FP8CORE_FP32: break;
  }
  return _mm256_loadu_ps((const float *)(const void *)data);
}

ALWAYS_INLINE void transpose_8x8(__m256 rows[8]) {
  __m256 pairs[8];
  __m256 quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x31);
  }
}

// The first `lanes` values: 8, or the 6 rows of a panel of A.
ALWAYS_INLINE void store_lanes(float *packed, int lanes, __m256 values) {
  if (lanes == 8)
    _mm256_storeu_ps(packed, values);
  else
    _mm256_maskstore_ps(packed, _mm256_setr_epi32(-1, -1, -1, -1, -1, -1, 0, 0), values);
}

ALWAYS_INLINE void pack_k_contiguous(const fp8core_gemm_operand *source, fp8core_dtype dtype, int width, int64_t first,
                                     int64_t count, int64_t k_first, int64_t k_count, unsigned char *panels,
                                     int64_t panel_stride) {
  const int64_t element = (int64_t)fp8core_dtype_size(dtype);
  for (int64_t i = 0; i < count; i += width)
    for (int lane = 0; lane < width; lane += 8) {
      const int lanes = width - lane < 8 ? width - lane : 8;
      const int64_t valid = minimum(count - i - lane, lanes);
      const unsigned char *corner = source->data + (first + i + lane) * source->stride + k_first * element;
      float *packed = (float *)(void *)(panels + i / width * panel_stride) + lane;
      for (int64_t k = 0; k < k_count; k += 8) {
        // The rows are further apart than hardware fetches ahead.
        for (int row = 0; row < 8; row++)
          __builtin_prefetch(corner + row * source->stride + k * element + PREFETCH_BYTES);
        const int64_t units = minimum(k_count - k, 8);
        __m256 block[8];
        for (int row = 0; row < 8; row++)
          block[row] =
            row < valid ? load_8(dtype, units, corner + row * source->stride + k * element) : _mm256_setzero_ps();
        transpose_8x8(block);
        for (int unit = 0; unit < 8; unit++)
          if (unit < units) store_lanes(packed + (k + unit) * width, lanes, block[unit]);
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
      for (int lane = 0; lane < width; lane += 8) {
        const int lanes = width - lane < 8 ? width - lane : 8;
        store_lanes(packed + lane, lanes, load_8(dtype, minimum(count - i - lane, lanes), row + (i + lane) * element));
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
  __m256 sums[ROWS][2];
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++)
      sums[i][j] = accumulate ? _mm256_load_ps(tile + i * COLUMNS + j * 8) : _mm256_setzero_ps();
  for (int64_t unit = 0; unit < k; unit++) {
    // Not an array: clang would keep one in memory.
    const __m256 left = _mm256_load_ps(b);
    const __m256 right = vectors > 1 ? _mm256_load_ps(b + 8) : left;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
      const __m256 row = _mm256_set1_ps(a[i]);
      sums[i][0] = _mm256_fmadd_ps(row, left, sums[i][0]);
      if (vectors > 1) sums[i][1] = _mm256_fmadd_ps(row, right, sums[i][1]);
    }
    a += ROWS;
    b += COLUMNS;
  }
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++) _mm256_store_ps(tile + i * COLUMNS + j * 8, sums[i][j]);
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

static void multiply(int rows, int columns, int64_t k, const unsigned char *a, const unsigned char *b, float *tile,
                     int accumulate) {
  typedef void (*multiply_function)(int64_t k, const float *a, const float *b, float *tile, int accumulate);
#define PAIR(rows)                                                                                                     \
  { multiply_##rows##_1, multiply_##rows##_2 }
  static const multiply_function functions[ROWS][2] = {PAIR(1), PAIR(2), PAIR(3), PAIR(4), PAIR(5), PAIR(6)};
#undef PAIR
  functions[rows - 1][columns > 8](k, (const float *)(const void *)a, (const float *)(const void *)b, tile, accumulate);
}

static void finish(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile, fp8core_gemm_maxima *maxima) {
  finish_tile(epilogue, tile, maxima, COLUMNS);
}

const fp8core_gemm_kernels fp8core_gemm_avx2 = {
  .rows = ROWS,
  .columns = COLUMNS,
  .k_unit = 1,
  .packed_bytes = 4,
  .block_k = 384,
  .pack_a = pack_a,
  .pack_b = pack_b,
  .multiply = multiply,
  .finish = finish,
};
