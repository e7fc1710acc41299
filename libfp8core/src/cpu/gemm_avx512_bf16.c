#include "cpu/gemm.h"

#include <immintrin.h>

// Products of FP8 and BF16 operands as BF16 dot products (VDPBF16PS), 32 multiplications an instruction. A panel holds
// pairs of consecutive K for each row (of A) or column (of B) in turn. FP8 is exact in BF16, so packing loses nothing.
//
// 12 x 32 elements of the result stay in 24 registers, enough to cover the latency of the dot product, two for B, and
// one for the broadcast of A: 14 loads for 24 dot products, where two of each go through in a cycle.

#define ROWS 12
#define COLUMNS 32
#define ROW_MASK ((__mmask16)0x0fff)
// How far ahead packing reads: along a row, and in rows of a K-strided source.
#define PREFETCH_BYTES 256
#define PREFETCH_K 16
#define INLINE static inline __attribute__((always_inline))

// BF16 of the codes 0 to 127: a table is exact for subnormals and NaNs too, at the cost of two byte permutations per 64
// codes.
#define E4M3_AS_BF16(c)                                                                                                \
  ((c) == 0x7f ? 0x7fc0U                                                                                               \
   : (c) >= 8  ? ((c) + 960U) << 4                                                                                     \
   : (c) >= 4  ? 0x3c00 + (((c)-4U) << 5)                                                                              \
   : (c) >= 2  ? 0x3b80 + (((c)-2U) << 6)                                                                              \
   : (c) == 1  ? 0x3b00U                                                                                               \
               : 0U)
#define E5M2_AS_BF16(c)                                                                                                \
  ((c) > 0x7c    ? 0x7fc0U                                                                                             \
   : (c) == 0x7c ? 0x7f80U                                                                                             \
   : (c) >= 4    ? ((c) + 448U) << 5                                                                                   \
   : (c) >= 2    ? 0x3800 + (((c)-2U) << 6)                                                                            \
   : (c) == 1    ? 0x3780U                                                                                             \
                 : 0U)
#define LOW_BYTE(value) ((unsigned char)((value)&0xff))
#define HIGH_BYTE(value) ((unsigned char)((value) >> 8))
#define CODES_4(byte, as_bf16, c)                                                                                      \
  byte(as_bf16(c)), byte(as_bf16((c) + 1)), byte(as_bf16((c) + 2)), byte(as_bf16((c) + 3))
#define CODES_16(byte, as_bf16, c)                                                                                     \
  CODES_4(byte, as_bf16, c), CODES_4(byte, as_bf16, (c) + 4), CODES_4(byte, as_bf16, (c) + 8),                         \
    CODES_4(byte, as_bf16, (c) + 12)
#define CODES_64(byte, as_bf16, c)                                                                                     \
  CODES_16(byte, as_bf16, c), CODES_16(byte, as_bf16, (c) + 16), CODES_16(byte, as_bf16, (c) + 32),                    \
    CODES_16(byte, as_bf16, (c) + 48)
#define CODES_128(byte, as_bf16)                                                                                       \
  { CODES_64(byte, as_bf16, 0), CODES_64(byte, as_bf16, 64) }

static const unsigned char e4m3_low[128] = CODES_128(LOW_BYTE, E4M3_AS_BF16);
static const unsigned char e4m3_high[128] = CODES_128(HIGH_BYTE, E4M3_AS_BF16);
static const unsigned char e5m2_low[128] = CODES_128(LOW_BYTE, E5M2_AS_BF16);
static const unsigned char e5m2_high[128] = CODES_128(HIGH_BYTE, E5M2_AS_BF16);

typedef struct byte_tables {
  __m512i low[2];
  __m512i high[2];
} byte_tables;

INLINE byte_tables load_tables(fp8core_dtype dtype) {
  const unsigned char *low = dtype == FP8CORE_E4M3 ? e4m3_low : e5m2_low;
  const unsigned char *high = dtype == FP8CORE_E4M3 ? e4m3_high : e5m2_high;
  byte_tables tables;
  tables.low[0] = _mm512_loadu_si512(low);
  tables.low[1] = _mm512_loadu_si512(low + 64);
  tables.high[0] = _mm512_loadu_si512(high);
  tables.high[1] = _mm512_loadu_si512(high + 64);
  return tables;
}

// Bytes 0 to 7 of each 128-bit lane become 8 BF16 of that lane of *first, bytes 8 to 15 those of *second.
INLINE void convert(const byte_tables *tables, __m512i codes, __m512i *first, __m512i *second) {
  const __m512i low = _mm512_permutex2var_epi8(tables->low[0], codes, tables->low[1]);
  const __m512i magnitude = _mm512_permutex2var_epi8(tables->high[0], codes, tables->high[1]);
  // magnitude | (codes & 0x80)
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8((char)0x80), 0xf8);
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

// Transposes a matrix of 16 x 16 dwords.
INLINE void transpose_16x16(__m512i rows[16]) {
  __m512i pairs[16];
  __m512i quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  // quads[4 g + c] holds rows 4 g .. 4 g + 3 of columns c, c + 4, c + 8, c + 12, one a lane.
  for (int c = 0; c < 4; c++) {
    const __m512i low_even = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    rows[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    rows[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

INLINE __mmask64 first_64(int64_t count) { return count >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << count) - 1; }
INLINE __mmask32 first_32(int64_t count) { return count >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << count) - 1; }
INLINE __mmask16 first_16(int64_t count) {
  const uint32_t mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (UINT32_C(1) << count) - 1;
  return (__mmask16)(mask & 0xffff);
}

INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

// Up to 16 rows of a K-contiguous source into lanes `lane` .. of a panel `width` pairs wide; `count` rows are there.
INLINE void pack_rows(const fp8core_gemm_operand *source, fp8core_dtype dtype, const byte_tables *tables, int width,
                      int rows, int64_t count, const unsigned char *first, int64_t k_count, unsigned char *packed) {
  const int element = dtype == FP8CORE_BF16 ? 2 : 1;
  // Elements of a row in 64 bytes.
  const int step = 64 / element;
  const int64_t pair_bytes = (int64_t)width * 4;
  const __mmask16 lanes = rows == 16 ? (__mmask16)0xffff : ROW_MASK;
  // Puts the first two codes of four dwords before their last two, as convert() wants them.
  const __m512i halves = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  for (int64_t k = 0; k < k_count; k += step) {
    const __mmask64 present = first_64((k_count - k) * element);
    const int64_t pairs = minimum((k_count - k + 1) / 2, step / 2);
    __m512i block[16];
    for (int i = 0; i < 16; i++)
      block[i] = i < rows && i < count ? _mm512_maskz_loadu_epi8(present, first + i * source->stride + k * element)
                                       : _mm512_setzero_si512();
    transpose_16x16(block);
    unsigned char *out = packed + k / 2 * pair_bytes;
    // The rows are further apart than hardware fetches ahead.
    for (int i = 0; i < rows; i++) __builtin_prefetch(first + i * source->stride + k * element + PREFETCH_BYTES);
    for (int i = 0; i < 16; i++) {
      if (element == 2) {
        if (i < pairs) _mm512_mask_storeu_epi32(out + i * pair_bytes, lanes, block[i]);
      } else {
        __m512i even;
        __m512i odd;
        convert(tables, _mm512_shuffle_epi8(block[i], halves), &even, &odd);
        if (2 * i < pairs) _mm512_mask_storeu_epi32(out + 2 * i * pair_bytes, lanes, even);
        if (2 * i + 1 < pairs) _mm512_mask_storeu_epi32(out + (2 * i + 1) * pair_bytes, lanes, odd);
      }
    }
  }
}

INLINE void pack_k_contiguous(const fp8core_gemm_operand *source, fp8core_dtype dtype, int width, int64_t first,
                              int64_t count, int64_t k_first, int64_t k_count, unsigned char *panels,
                              int64_t panel_stride) {
  const byte_tables tables = load_tables(dtype);
  const int64_t element = dtype == FP8CORE_BF16 ? 2 : 1;
  for (int64_t i = 0; i < count; i += width) {
    unsigned char *panel = panels + i / width * panel_stride;
    for (int lane = 0; lane < width; lane += 16)
      pack_rows(source, dtype, &tables, width, width - lane < 16 ? width - lane : 16, minimum(count - i - lane, 16),
                source->data + (first + i + lane) * source->stride + k_first * element, k_count, panel + lane * 4);
  }
}

INLINE void prefetch_row(const unsigned char *row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// 12 columns and four K of a K-strided source become two units of a panel of A.
INLINE void pack_a_columns(fp8core_dtype dtype, const byte_tables *tables, __m512i order,
                           const unsigned char *const k_rows[4], __mmask16 columns, int64_t pairs,
                           unsigned char *packed) {
  __m512i first;
  __m512i second;
  if (dtype == FP8CORE_BF16) {
    const __m512i low = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(columns, k_rows[0])),
                                           _mm256_maskz_loadu_epi16(columns, k_rows[1]), 1);
    const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(columns, k_rows[2])),
                                            _mm256_maskz_loadu_epi16(columns, k_rows[3]), 1);
    first = _mm512_permutexvar_epi16(order, low);
    second = _mm512_permutexvar_epi16(order, high);
  } else {
    __m512i codes = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(columns, k_rows[0]));
    codes = _mm512_inserti32x4(codes, _mm_maskz_loadu_epi8(columns, k_rows[1]), 1);
    codes = _mm512_inserti32x4(codes, _mm_maskz_loadu_epi8(columns, k_rows[2]), 2);
    codes = _mm512_inserti32x4(codes, _mm_maskz_loadu_epi8(columns, k_rows[3]), 3);
    convert(tables, _mm512_permutexvar_epi8(order, codes), &first, &second);
  }
  _mm512_mask_storeu_epi32(packed, ROW_MASK, first);
  if (pairs > 1) _mm512_mask_storeu_epi32(packed + ROWS * 4, ROW_MASK, second);
}

INLINE void pack_a_k_strided(const fp8core_gemm_operand *source, fp8core_dtype dtype, int64_t first, int64_t count,
                             int64_t k_first, int64_t k_count, unsigned char *panels, int64_t panel_stride) {
  const byte_tables tables = load_tables(dtype);
  const int64_t element = dtype == FP8CORE_BF16 ? 2 : 1;
  unsigned char order_bytes[64];
  for (int i = 0; i < 64; i++) {
    const int column = i / 16 * 4 + i % 8 / 2;
    order_bytes[i] = (unsigned char)((i % 16 < 8 ? 0 : 32) + i % 2 * 16 + column);
  }
  __m512i order = _mm512_loadu_si512(order_bytes);
  if (dtype == FP8CORE_BF16) {
    uint16_t order_words[32];
    for (int i = 0; i < 32; i++) order_words[i] = (uint16_t)(i % 2 * 16 + i / 2);
    order = _mm512_loadu_si512(order_words);
  }
  // Rows of the source outside, so that it is read in order.
  for (int64_t k = 0; k < k_count; k += 4) {
    const unsigned char *k_rows[4];
    for (int i = 0; i < 4; i++) {
      k_rows[i] = source->data + (k_first + k + i) * source->stride + first * element;
      prefetch_row(k_rows[i] + PREFETCH_K * source->stride, count * element);
    }
    for (int64_t i = 0; i < count; i += ROWS) {
      const __mmask16 columns = first_16(minimum(count - i, ROWS));
      const unsigned char *const corners[4] = {k_rows[0] + i * element, k_rows[1] + i * element,
                                               k_rows[2] + i * element, k_rows[3] + i * element};
      unsigned char *packed = panels + i / ROWS * panel_stride + k / 2 * (ROWS * 4);
      if (k_count - k >= 4) {
        pack_a_columns(dtype, &tables, order, corners, columns, 2, packed);
      } else {
        // Beyond K: zeros of the first one's address space.
        static const unsigned char zeros[64];
        const unsigned char *const tail[4] = {corners[0], k_count - k > 1 ? corners[1] : zeros,
                                              k_count - k > 2 ? corners[2] : zeros, zeros};
        pack_a_columns(dtype, &tables, order, tail, columns, (k_count - k + 1) / 2, packed);
      }
    }
  }
}

INLINE void pack_b_k_strided(const fp8core_gemm_operand *source, fp8core_dtype dtype, int64_t first, int64_t count,
                             int64_t k_first, int64_t k_count, unsigned char *panels, int64_t panel_stride) {
  const byte_tables tables = load_tables(dtype);
  const int64_t element = dtype == FP8CORE_BF16 ? 2 : 1;
  unsigned char order_bytes[64];
  uint16_t order_words[2][32];
  for (int i = 0; i < 64; i++) {
    const int column = (i % 16 < 8 ? 0 : 16) + i / 16 * 4 + i % 8 / 2;
    order_bytes[i] = (unsigned char)(i % 2 * 32 + column);
    order_words[i / 32][i % 32] = (uint16_t)(i % 2 * 32 + i / 2);
  }
  const __m512i order = _mm512_loadu_si512(order_bytes);
  const __m512i order_first = _mm512_loadu_si512(order_words[0]);
  const __m512i order_second = _mm512_loadu_si512(order_words[1]);
  for (int64_t k = 0; k < k_count; k += 2) {
    const unsigned char *even = source->data + (k_first + k) * source->stride + first * element;
    const unsigned char *odd = even + source->stride;
    prefetch_row(even + PREFETCH_K * source->stride, count * element);
    prefetch_row(odd + PREFETCH_K * source->stride, count * element);
    const int last = k + 1 == k_count;
    for (int64_t i = 0; i < count; i += COLUMNS) {
      const __mmask32 columns = first_32(count - i);
      // A masked load touches nothing where the mask is 0.
      const __mmask32 odd_columns = last ? 0 : columns;
      __m512i one;
      __m512i two;
      if (dtype == FP8CORE_BF16) {
        const __m512i low = _mm512_maskz_loadu_epi16(columns, even + i * 2);
        const __m512i high = _mm512_maskz_loadu_epi16(odd_columns, odd + i * 2);
        one = _mm512_permutex2var_epi16(low, order_first, high);
        two = _mm512_permutex2var_epi16(low, order_second, high);
      } else {
        const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(columns, even + i)),
                                                 _mm256_maskz_loadu_epi8(odd_columns, odd + i), 1);
        convert(&tables, _mm512_permutexvar_epi8(order, codes), &one, &two);
      }
      unsigned char *packed = panels + i / COLUMNS * panel_stride + k / 2 * (COLUMNS * 4);
      _mm512_storeu_si512(packed, one);
      _mm512_storeu_si512(packed + 64, two);
    }
  }
}

#define PACK_ARGUMENTS                                                                                                 \
  const fp8core_gemm_operand *source, int64_t first, int64_t count, int64_t k_first, int64_t k_count,                  \
    unsigned char *panels, int64_t panel_stride

// One function a format, so that each is compiled without branches on it.
#define PACK_FUNCTIONS(name, dtype)                                                                                    \
  static void pack_a_contiguous_##name(PACK_ARGUMENTS) {                                                               \
    pack_k_contiguous(source, dtype, ROWS, first, count, k_first, k_count, panels, panel_stride);                      \
  }                                                                                                                    \
  static void pack_b_contiguous_##name(PACK_ARGUMENTS) {                                                               \
    pack_k_contiguous(source, dtype, COLUMNS, first, count, k_first, k_count, panels, panel_stride);                   \
  }                                                                                                                    \
  static void pack_a_strided_##name(PACK_ARGUMENTS) {                                                                  \
    pack_a_k_strided(source, dtype, first, count, k_first, k_count, panels, panel_stride);                             \
  }                                                                                                                    \
  static void pack_b_strided_##name(PACK_ARGUMENTS) {                                                                  \
    pack_b_k_strided(source, dtype, first, count, k_first, k_count, panels, panel_stride);                             \
  }
PACK_FUNCTIONS(e4m3, FP8CORE_E4M3)
PACK_FUNCTIONS(e5m2, FP8CORE_E5M2)
PACK_FUNCTIONS(bf16, FP8CORE_BF16)

static void pack_a(PACK_ARGUMENTS) {
  static const fp8core_gemm_pack functions[3][2] = {{pack_a_strided_e4m3, pack_a_contiguous_e4m3},
                                                    {pack_a_strided_e5m2, pack_a_contiguous_e5m2},
                                                    {pack_a_strided_bf16, pack_a_contiguous_bf16}};
  functions[source->dtype][source->k_contiguous](source, first, count, k_first, k_count, panels, panel_stride);
}

static void pack_b(PACK_ARGUMENTS) {
  static const fp8core_gemm_pack functions[3][2] = {{pack_b_strided_e4m3, pack_b_contiguous_e4m3},
                                                    {pack_b_strided_e5m2, pack_b_contiguous_e5m2},
                                                    {pack_b_strided_bf16, pack_b_contiguous_bf16}};
  functions[source->dtype][source->k_contiguous](source, first, count, k_first, k_count, panels, panel_stride);
}

INLINE void multiply_rows(int rows, int vectors, int64_t pairs, const unsigned char *a, const unsigned char *b,
                          float *tile, int accumulate) {
  __m512 sums[ROWS][2];
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++)
      sums[i][j] = accumulate ? _mm512_load_ps(tile + i * COLUMNS + j * 16) : _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; pair++) {
    // Not an array: clang would keep one in memory.
    const __m512bh left = (__m512bh)_mm512_load_si512(b);
    const __m512bh right = vectors > 1 ? (__m512bh)_mm512_load_si512(b + 64) : left;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
      int32_t codes;
      memcpy(&codes, a + i * 4, sizeof(codes));
      const __m512bh row = (__m512bh)_mm512_set1_epi32(codes);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], row, left);
      if (vectors > 1) sums[i][1] = _mm512_dpbf16_ps(sums[i][1], row, right);
    }
    a += ROWS * 4;
    b += COLUMNS * 4;
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < vectors; j++) _mm512_store_ps(tile + i * COLUMNS + j * 16, sums[i][j]);
}

#define MULTIPLY_FUNCTIONS(rows)                                                                                       \
  static void multiply_##rows##_1(int64_t pairs, const unsigned char *a, const unsigned char *b, float *tile,          \
                                  int accumulate) {                                                                    \
    multiply_rows(rows, 1, pairs, a, b, tile, accumulate);                                                             \
  }                                                                                                                    \
  static void multiply_##rows##_2(int64_t pairs, const unsigned char *a, const unsigned char *b, float *tile,          \
                                  int accumulate) {                                                                    \
    multiply_rows(rows, 2, pairs, a, b, tile, accumulate);                                                             \
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
  typedef void (*multiply_function)(int64_t pairs, const unsigned char *a, const unsigned char *b, float *tile,
                                    int accumulate);
#define PAIR(rows)                                                                                                     \
  { multiply_##rows##_1, multiply_##rows##_2 }
  static const multiply_function functions[ROWS][2] = {PAIR(1), PAIR(2), PAIR(3), PAIR(4),  PAIR(5),  PAIR(6),
                                                       PAIR(7), PAIR(8), PAIR(9), PAIR(10), PAIR(11), PAIR(12)};
#undef PAIR
  functions[rows - 1][columns > 16]((k + 1) / 2, a, b, tile, accumulate);
}

const fp8core_gemm_kernels fp8core_gemm_avx512_bf16 = {
  .rows = ROWS,
  .columns = COLUMNS,
  .k_unit = 2,
  .packed_bytes = 2,
  .block_k = 512,
  .pack_a = pack_a,
  .pack_b = pack_b,
  .multiply = multiply,
  .finish = fp8core_gemm_finish_avx512,
};
