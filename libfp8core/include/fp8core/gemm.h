/** \file
 * Matrix products of FP8, BF16, FP16 and FP32 operands with FP32 accumulation.
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
  FP8CORE_EPILOGUE_RELU = 1,
  /** GELU, tanh approximation: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, arXiv:1606.08415).
   */
  FP8CORE_EPILOGUE_GELU = 2,
  /** Backward of ReLU: the result where \p auxiliary > 0, else 0. */
  FP8CORE_EPILOGUE_RELU_BACKWARD = 3,
  /** Backward of GELU: the result times the derivative of GELU at \p auxiliary. */
  FP8CORE_EPILOGUE_GELU_BACKWARD = 4
} fp8core_epilogue;

typedef struct fp8core_gemm_options {
  /** sizeof(fp8core_gemm_options) as the caller was compiled. */
  size_t size;
  /** Non-zero: op(A) is the transpose of A, and so for B. */
  int transpose_a;
  int transpose_b;
  /** Finite. */
  float alpha;
  /** Finite. */
  float beta;
  fp8core_epilogue epilogue;
  /** Vector of N values added to every row; FP32, BF16 or FP16. NULL: none. */
  const fp8core_tensor *bias;
  /**
   * Matrix [M, N] of pre-activations (after bias, before the activation); FP32, BF16 or FP16. Written by ReLU and GELU
   * when not NULL; read by the backward forms, which need it. Must be NULL without activation, and with batches.
   */
  const fp8core_tensor *auxiliary;
  /**
   * Vector of N values, FP32: the column sums of the result (after the epilogue, before the cast) are written to it:
   * the gradient of the bias of the layer below. Summed over rows in a fixed order; zeros where M is 0. NULL: none. Not
   * with batches.
   */
  const fp8core_tensor *bias_gradient;
  /**
   * Products to compute, at least 1, with operands batch_stride_* elements apart (0: the same operand for all). D's
   * must not overlap, but may lie side by side in the same rows.
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
  return options;
}

/**
 * D = epilogue(alpha * op(A) op(B) + beta * C + bias), all in values, that is with every tensor's scale_inverse applied
 * where it is read; D is stored with its scale, rounded to nearest even, and its amax is raised. FP8 results saturate;
 * BF16, FP16 and FP32 ones overflow to infinity, so that an overflow is seen.
 *
 * \param options NULL for the defaults.
 * \param a [M, K], or [K, M] with transpose_a. \param b [K, N], or [N, K] with transpose_b. Two-dimensional, row-major,
 *        any row stride; each of any dtype. Of a batch the tensor describes the first matrix.
 * \param c [M, N], any dtype; read only when beta is not 0, and then must not be NULL. May be the same memory as \p d
 * if dtype and strides are equal. beta 0 ignores C's NaNs. \param d [M, N], any dtype. Must not overlap A or B (columns
 * of one buffer that do not meet are no overlap).
 *
 * M, N or K of 0 are fine: K of 0 gives epilogue(beta * C + bias).
 * CPU: products of FP8 and BF16 operands go through BF16 dot products where the CPU has them (all FP8 values are exact
 * in BF16; BF16 subnormals, and sums below 2^-126, count as zero there), others through FP32. The bits of an element
 * depend on its row of op(A) and column of op(B) only: neither on the number of threads, nor on the position in a
 * batch, nor on M and N. CUDA: FP8 tensor cores on compute capability 8.9 and later, through BF16 before, and for sizes
 * that the FP8 kernels refuse. Results are within the bound of numerics.md, "Matrix products". \return
 * FP8CORE_ERROR_INVALID_ARGUMENT; FP8CORE_ERROR_NOT_SUPPORTED for E5M2 times E5M2 on CUDA; FP8CORE_ERROR_OUT_OF_MEMORY
 * when the workspace cannot grow; FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_gemm(fp8core_context *context, const fp8core_gemm_options *options,
                                        const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                        const fp8core_tensor *d);

/** Accumulation of fp8core_gemm_reference(). */
typedef enum fp8core_accumulation { FP8CORE_ACCUMULATE_FP32 = 0, FP8CORE_ACCUMULATE_FP64 = 1 } fp8core_accumulation;

/**
 * The judge: fp8core_gemm() by its definition in plain C on the host, one thread, no workspace, products summed in the
 * order of K. Slow; for tests. All tensors on the CPU. Arguments and errors as fp8core_gemm(). Thread-safe.
 */
FP8CORE_API fp8core_status fp8core_gemm_reference(fp8core_accumulation accumulation,
                                                  const fp8core_gemm_options *options, const fp8core_tensor *a,
                                                  const fp8core_tensor *b, const fp8core_tensor *c,
                                                  const fp8core_tensor *d);

#ifdef __cplusplus
}
#endif

#endif
