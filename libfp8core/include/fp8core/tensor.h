/** \file
 * Tensors: a plain struct that describes memory of the caller. Nothing in it is owned.
 *
 * The calls of this header read the struct only, never its data, need no context and allocate nothing. They may be made
 * from any thread at any time, unless the same struct is being written.
 */
#ifndef FP8CORE_TENSOR_H
#define FP8CORE_TENSOR_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "context.h"
#include "dtype.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FP8CORE_MAX_DIMENSIONS 4

/** How many elements share one scale. */
typedef enum fp8core_scale_granularity {
  /** One scale for the tensor: \p scale, \p scale_inverse and \p amax point to one float each. */
  FP8CORE_SCALE_PER_TENSOR = 0
} fp8core_scale_granularity;

/**
 * A row-major tensor of 0 to 4 dimensions. The last dimension is contiguous. Rows (all dimensions but the last, taken
 * together) start \p row_stride elements apart; a tensor of 0 or 1 dimensions has one row.
 *
 * A stored element q stands for the value q * scale_inverse; quantising stores cast(value * scale). Scales exist so
 * that narrow formats use their range; FP32 and BF16 may have them too. The three pointers lie in the memory of
 * \p device, at multiples of 4 bytes. Two tensors may share them; but a call refuses an amax that it raises where
 * it lies in the data of one of the call's tensors or is one of their scales, and scales in data that it writes.
 *
 * \p scale must be positive and finite, and \p scale_inverse its reciprocal in FP32; the values are not checked, as
 * they may lie on a GPU.
 */
typedef struct fp8core_tensor {
  /** Device or host memory; may be NULL when the tensor has no elements. Need not be aligned on the CPU; on CUDA to the
   * element size. */
  void *data;
  fp8core_dtype dtype;
  int dimensions;
  int64_t shape[FP8CORE_MAX_DIMENSIONS];
  /** Elements from the start of a row to the start of the next, at least the length of a row; 0: rows are contiguous.
   */
  int64_t row_stride;
  fp8core_device device;
  fp8core_scale_granularity scale_granularity;
  /** Multiplier applied before storing; NULL: 1. Read when the tensor is written. */
  const float *scale;
  /** Reciprocal of \p scale; NULL: 1. Read when the tensor is read. */
  const float *scale_inverse;
  /**
   * When the tensor is written: raised to the largest magnitude of the values (before scaling) if that is larger, never
   * lowered, so that micro-batches accumulate; the owner sets it to 0. Any infinity or NaN among the values makes it
   * infinity or NaN (NaN wins), and it stays so. A negative one that is there, also minus infinity, counts as 0. NULL:
   * not recorded.
   */
  float *amax;
} fp8core_tensor;

/**
 * A contiguous CPU tensor without scale. Checks nothing: the calls that take it do. Thread-safe.
 *
 * \param data of the first element; kept, not read.
 * \param dimensions 0 to 4.
 * \param shape as many sizes as \p dimensions, in elements, outermost first; copied. May be NULL for
 *        0 dimensions; for more, NULL gives a tensor of -1 dimensions, which every call refuses.
 */
FP8CORE_API fp8core_tensor fp8core_tensor_create(void *data, fp8core_dtype dtype, int dimensions, const int64_t *shape);

/** The same for a matrix [rows, columns], row-major, on \p device. Checks nothing. Thread-safe. */
FP8CORE_API fp8core_tensor fp8core_tensor_matrix(void *data, fp8core_dtype dtype, int64_t rows, int64_t columns,
                                                 fp8core_device device);

/**
 * Checks everything that can be checked without reading the data. Calls with a context do so themselves, and also check
 * that the tensor is on the context's device. Thread-safe.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the pointer is NULL; dtype, granularity or device type is outside its
 *         enum; the device index is negative, or not 0 on the CPU; there are not 0 to 4 dimensions; a size is negative;
 *         row_stride is neither 0 nor at least the length of a row; from the first element to the end of the
 *         last there are 2^63 bytes or more; data is NULL although there are elements;
 *         scale, scale_inverse or amax is not aligned to a float; on CUDA, data is not aligned to its elements.
 */
FP8CORE_API fp8core_status fp8core_tensor_validate(const fp8core_tensor *tensor);

/** Number of elements; 1 for 0 dimensions; -1, with the last error set, if the tensor is not valid. Thread-safe. */
FP8CORE_API int64_t fp8core_tensor_elements(const fp8core_tensor *tensor);

/** Bytes from the first element to the end of the last one, gaps between rows included; 0 without elements; -1, with
 * the last error set, if the tensor is not valid. Thread-safe. */
FP8CORE_API int64_t fp8core_tensor_span_bytes(const fp8core_tensor *tensor);

#ifdef __cplusplus
}
#endif

#endif
