/** \file
 * Matrix products of FP8, BF16, FP16 and FP32 operands with FP32 accumulation.
 *
 * M, N and K are the sizes of op(A) [M, K], op(B) [K, N] and D [M, N], in elements. Matrices are row-major with any row
 * stride, in the memory of the context's device; on CUDA data is aligned to its elements. Every tensor is read as
 * values, that is with its scale_inverse, and written with its scale; its amax is raised by what is written, before the
 * scale (see fp8core_tensor).
 *
 * Sources: FP8 products with a scale per tensor and FP32 accumulation, E5M2 for output gradients: "FP8 Formats for Deep
 * Learning" (arXiv:2209.05433). CPU: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM
 * TOMS 34, 2008. Bounds: numerics.md, "Matrix products", after Higham. The order of the epilogue and of all sums is
 * stated there too.
 *
 * Threads, order on CUDA and common errors: context.h.
 */
#ifndef FP8CORE_GEMM_H
#define FP8CORE_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "context.h"
#include "status.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8core_epilogue {
  FP8CORE_EPILOGUE_NONE = 0,
  /** 0 for negative values. NaN stays NaN. */
  FP8CORE_EPILOGUE_RELU = 1,
  /** GELU, tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415):
   * x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). */
  FP8CORE_EPILOGUE_GELU = 2,
  /** Backward of ReLU: the result where \p auxiliary > 0, else 0 (also where it is NaN). */
  FP8CORE_EPILOGUE_RELU_BACKWARD = 3,
  /** Backward of GELU: the result times the derivative of GELU at \p auxiliary. */
  FP8CORE_EPILOGUE_GELU_BACKWARD = 4
} fp8core_epilogue;

typedef struct fp8core_gemm_options {
  /** sizeof(fp8core_gemm_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
  size_t size;
  /** Non-zero: op(A) is the transpose of A, and so for B. */
  int transpose_a;
  int transpose_b;
  /** Finite. */
  float alpha;
  /** Finite. */
  float beta;
  fp8core_epilogue epilogue;
  /** Vector of N values added to every row; FP32, BF16 or FP16; one dimension. NULL: none. */
  const fp8core_tensor *bias;
  /**
   * Matrix [M, N] of pre-activations (after bias, before the activation); FP32, BF16 or FP16. Written by ReLU and GELU
   * when not NULL, with a scale and an amax of its own; a value beyond its format becomes infinity. Read by the
   * backward forms, which need it. Must be NULL without activation. Of a batch the tensor describes the first matrix.
   */
  const fp8core_tensor *auxiliary;
  /**
   * Vector of N values, FP32: the column sums of the result (after the epilogue, before the cast) are written to it:
   * the gradient of the bias of the layer below. Its scale and amax, where set, are used. Summed over the rows of
   * all products of a batch, which share a bias, in a fixed order; zeros where M is 0. NULL: none.
   */
  const fp8core_tensor *bias_gradient;
  /**
   * Products to compute, at least 1, with matrices batch_stride_* elements apart, 0 or more (0: the same one for all).
   * D's must not overlap, but may lie side by side in the same rows. bias is the same for all.
   */
  int64_t batch;
  int64_t batch_stride_a;
  int64_t batch_stride_b;
  int64_t batch_stride_c;
  int64_t batch_stride_d;
  /**
   * CUDA with FP8 operands: non-zero lets the tensor cores keep partial sums with fewer bits ("fast accumulation":
   * customary in forward products, not in backward ones). No effect elsewhere.
   */
  int fast_accumulation;
  /** As batch_stride_*, of the auxiliary matrices. Those that are written must not overlap, as D's. */
  int64_t batch_stride_auxiliary;
} fp8core_gemm_options;

/** No transposes, alpha 1, beta 0, no epilogue, one product, exact accumulation. */
static inline fp8core_gemm_options fp8core_gemm_options_default(void) {
  fp8core_gemm_options options;
  options.size = sizeof(options);
  options.transpose_a = 0;
  options.transpose_b = 0;
  options.alpha = 1.0f;
  options.beta = 0.0f;
  options.epilogue = FP8CORE_EPILOGUE_NONE;
  options.bias = NULL;
  options.auxiliary = NULL;
  options.bias_gradient = NULL;
  options.batch = 1;
  options.batch_stride_a = 0;
  options.batch_stride_b = 0;
  options.batch_stride_c = 0;
  options.batch_stride_d = 0;
  options.fast_accumulation = 0;
  options.batch_stride_auxiliary = 0;
  return options;
}

/**
 * D = epilogue(alpha * op(A) op(B) + beta * C + bias), all in values. D is rounded to nearest even; FP8 results
 * saturate, BF16, FP16 and FP32 ones overflow to infinity, so that an overflow is seen. Writes D (gaps between rows
 * untouched), and where they are wanted the auxiliary and the bias gradient; raises their amaxes.
 *
 * M, N or K of 0 are fine: K of 0 gives epilogue(beta * C + bias), M or N of 0 writes no more than a bias gradient of
 * zeros.
 *
 * CPU: products of FP8 and BF16 operands go through BF16 dot products where the CPU has them (all FP8 values are exact
 * in BF16; BF16 subnormals, and sums below 2^-126, count as zero there), others through FP32. The bits of an element
 * depend on its row of op(A) and column of op(B) only: neither on the number of threads, nor on the position in a
 * batch, nor on M and N. CUDA: FP8 tensor cores on compute capability 8.9 and later, through BF16 before, and for sizes
 * that the FP8 kernels refuse. Results are within the bound of numerics.md, "Matrix products", where no partial sum
 * overflows FP32: one that does is infinite or NaN for good. The context's workspace grows to what the call needs and
 * stays. One thread at a time for a context.
 *
 * \param options NULL for the defaults.
 * \param a [M, K], or [K, M] with transpose_a; any dtype. Of a batch the tensor describes the first matrix.
 * \param b [K, N], or [N, K] with transpose_b; any dtype.
 * \param c [M, N], any dtype. Looked at only when beta is not 0; else it may be NULL, and its NaNs do not count. May be
 *        the same memory as \p d if dtype and strides are equal.
 * \param d [M, N], any dtype. Must not overlap A, B, bias or auxiliary (columns of one buffer that do not meet are no
 *        overlap), nor C otherwise than told.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the context, A, B, D, or a C that is read is NULL; a tensor is not valid
 *         or not on the context's device; a matrix has not two dimensions, a vector not one; sizes do not fit, or
 *         exceed 2^63 - 1 bytes with their batch; alpha or beta is not finite; the epilogue is outside its enum; bias
 *         or auxiliary is FP8, or bias_gradient not FP32; auxiliary is missing for a backward form, or set without an
 *         activation; batch is below 1 or a stride negative; what is written overlaps something else;
 *         FP8CORE_ERROR_VERSION_MISMATCH for options of a wrong size;
 *         FP8CORE_ERROR_NOT_SUPPORTED on CUDA for E5M2 times E5M2, and where cuBLASLt has no kernel for the product;
 *         FP8CORE_ERROR_OUT_OF_MEMORY when the workspace cannot grow (the context then has none, until a call gets it);
 *         FP8CORE_ERROR_DEVICE when CUDA or cuBLASLt fails, or the workspace would have to grow during a capture.
 */
FP8CORE_API fp8core_status fp8core_gemm(fp8core_context *context, const fp8core_gemm_options *options,
                                        const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                        const fp8core_tensor *d);

/** Accumulation of fp8core_gemm_reference(). */
typedef enum fp8core_accumulation { FP8CORE_ACCUMULATE_FP32 = 0, FP8CORE_ACCUMULATE_FP64 = 1 } fp8core_accumulation;

/**
 * Makes room for fp8core_gemm() with these arguments in the context's workspace, so that the call itself allocates
 * nothing. Nothing is computed or written; data is not looked at. A product of fewer rows may need more of it, where
 * its work is divided otherwise.
 *
 * \return as fp8core_gemm().
 */
FP8CORE_API fp8core_status fp8core_gemm_reserve(fp8core_context *context, const fp8core_gemm_options *options,
                                                const fp8core_tensor *a, const fp8core_tensor *b,
                                                const fp8core_tensor *c, const fp8core_tensor *d);

/**
 * The judge: fp8core_gemm() by its definition in plain C on the host, one thread, no workspace, products summed in the
 * order of K. Slow; for tests. Arguments and what is written are those of fp8core_gemm(); all tensors are on the CPU.
 * Thread-safe, as it has no context.
 *
 * \param accumulation FP32: every operation rounds to FP32, as in the portable CPU kernels. FP64: none before the
 *        values that are stored, which round to FP32 first.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT as fp8core_gemm(), and when \p accumulation is outside its enum;
 *         FP8CORE_ERROR_VERSION_MISMATCH for options of a wrong size.
 */
FP8CORE_API fp8core_status fp8core_gemm_reference(fp8core_accumulation accumulation,
                                                  const fp8core_gemm_options *options, const fp8core_tensor *a,
                                                  const fp8core_tensor *b, const fp8core_tensor *c,
                                                  const fp8core_tensor *d);

#ifdef __cplusplus
}
#endif

#endif
