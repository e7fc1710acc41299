// Matrix products on the CPU: what the driver (gemm.c) and the kernels of a tier (gemm_*.c) share.
//
// The structure is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34
// (2008): both operands are copied into panels that the kernel reads in order, converted on the way. An element of the
// result is always one sum in the order of K, wherever the matrix is cut, so that neither threads, blocks nor batches
// change its bits.
#ifndef FP8CORE_CPU_GEMM_H
#define FP8CORE_CPU_GEMM_H

#include "gemm_rules.h"

// An operand as packing sees it: element (i, k) of op(A), or of op(B) transposed.
typedef struct fp8core_gemm_operand {
  const unsigned char *data;
  fp8core_dtype dtype;
  int k_contiguous;
  // Bytes from one i to the next with k_contiguous, else from one k to the next.
  int64_t stride;
} fp8core_gemm_operand;

// Copies i = first .. first + count - 1 and k = k_first .. k_first + k_count - 1 into panels of the kernel's width,
// panel starts `panel_stride` bytes apart. Within a panel, unit after unit of K holds all i. What is beyond count or
// k_count is 0.
typedef void (*fp8core_gemm_pack)(const fp8core_gemm_operand *source, int64_t first, int64_t count, int64_t k_first,
                                  int64_t k_count, unsigned char *panels, int64_t panel_stride);

// The largest magnitudes seen, as FP32 bits.
typedef struct fp8core_gemm_maxima {
  uint32_t d;
  uint32_t auxiliary;
} fp8core_gemm_maxima;

// The epilogue of one product of a batch. Factors and scales are read once; 1 where a tensor has none.
typedef struct fp8core_gemm_epilogue {
  fp8core_epilogue activation;
  float factor;
  float beta;
  // NULL: not wanted. Strides in elements.
  const unsigned char *c;
  fp8core_dtype c_dtype;
  int64_t c_stride;
  float c_scale_inverse;
  unsigned char *d;
  fp8core_dtype d_dtype;
  int64_t d_stride;
  float d_scale;
  // N values, scale applied; NULL: none.
  const float *bias;
  // NULL: none.
  unsigned char *auxiliary;
  fp8core_dtype auxiliary_dtype;
  int64_t auxiliary_stride;
  float auxiliary_scale;
  float auxiliary_scale_inverse;
} fp8core_gemm_epilogue;

// Which part of the result a tile holds.
typedef struct fp8core_gemm_tile {
  const float *sums;
  int64_t row;
  int64_t column;
  int rows;
  int columns;
  // Sums of the columns so far, of `columns` values; NULL: not wanted.
  float *column_sums;
} fp8core_gemm_tile;

typedef struct fp8core_gemm_kernels {
  // Rows and columns of a tile: the widths of the panels of A and B. A tile's row is `columns` floats apart.
  int rows;
  int columns;
  // Elements of K that a kernel takes together, and bytes of a packed element.
  int k_unit;
  int packed_bytes;
  // Elements of K per block, sized so that a panel of B stays in the first-level cache.
  int block_k;
  fp8core_gemm_pack pack_a;
  fp8core_gemm_pack pack_b;
  // tile[rows, columns] = (accumulate ? tile : 0) + the panels' product over `k` elements. Only the given rows and
  // columns (of at most a panel's width) need be right.
  void (*multiply)(int rows, int columns, int64_t k, const unsigned char *a, const unsigned char *b, float *tile,
                   int accumulate);
  void (*finish)(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile, fp8core_gemm_maxima *maxima);
} fp8core_gemm_kernels;

extern const fp8core_gemm_kernels fp8core_gemm_scalar;
extern const fp8core_gemm_kernels fp8core_gemm_avx2;
extern const fp8core_gemm_kernels fp8core_gemm_avx512;
// Operands of at most BF16's precision and range only.
extern const fp8core_gemm_kernels fp8core_gemm_avx512_bf16;

void fp8core_gemm_finish_avx512(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile,
                                fp8core_gemm_maxima *maxima);

#endif
