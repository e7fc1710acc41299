// Launchers of the CUDA kernels, for the C files of the backend. Each puts its work on the stream and returns a
// cudaError_t as an int; none waits, none allocates.
#ifndef FP8CORE_CUDA_KERNELS_H
#define FP8CORE_CUDA_KERNELS_H

#include <stdint.h>

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fp8core_cuda_target {
  // cudaStream_t
  void *stream;
  int multiprocessors;
} fp8core_cuda_target;

// Also in place, and narrowing in place.
int fp8core_cuda_launch_cast(const fp8core_cuda_target *target, const fp8core_cast_job *job);
int fp8core_cuda_launch_cast_transpose(const fp8core_cuda_target *target, const fp8core_cast_job *job);

// Bytes of `source` [rows, columns] into `destination` [columns, rows], codes as they are, for each matrix of a batch.
typedef struct fp8core_cuda_byte_transpose {
  int64_t rows;
  int64_t columns;
  int64_t batch;
  const void *source;
  int64_t source_stride;
  int64_t source_batch_stride;
  void *destination;
  int64_t destination_stride;
  int64_t destination_batch_stride;
} fp8core_cuda_byte_transpose;
int fp8core_cuda_launch_byte_transpose(const fp8core_cuda_target *target, const fp8core_cuda_byte_transpose *job);

// Raises *amax. Does nothing where `skip_if_positive` is not NULL and *skip_if_positive > 0.
int fp8core_cuda_launch_amax(const fp8core_cuda_target *target, int64_t rows, int64_t columns,
                             const fp8core_rows *source, float *amax, const uint64_t *skip_if_positive);

// The two ends of a just-in-time pass: measured[index] = 0, and the scale from measured[index].
int fp8core_cuda_launch_calibrate_begin(const fp8core_cuda_target *target, const fp8core_scaling_arrays *arrays,
                                        int64_t index, int only_without_history);
int fp8core_cuda_launch_calibrate_end(const fp8core_cuda_target *target, const fp8core_scaling_arrays *arrays,
                                      int64_t index, int only_without_history);
int fp8core_cuda_launch_scaling_update(const fp8core_cuda_target *target, const fp8core_scaling_arrays *arrays);

// factors[0] = alpha * *scale_a * *scale_b, factors[1] = beta, factors[2] = 0; NULL scales are 1.
int fp8core_cuda_launch_factors(const fp8core_cuda_target *target, float *factors, float alpha, float beta,
                                const float *scale_a, const float *scale_b);

// Everything of a product that follows its sums: see fp8core_gemm(). The product's rows are `rows` rows of `columns`
// sums of op(A) op(B), without scales; NULL stands for zeros (K = 0).
typedef struct fp8core_cuda_epilogue {
  int64_t batch;
  int64_t rows;
  int64_t columns;
  const float *product;
  int64_t product_stride;
  int64_t product_batch_stride;
  float alpha;
  const float *scale_inverse_a;
  const float *scale_inverse_b;
  float beta;
  fp8core_rows c;
  int64_t c_batch_stride;
  fp8core_rows bias;
  fp8core_epilogue epilogue;
  fp8core_rows auxiliary;
  int64_t auxiliary_batch_stride;
  // Sums of columns over each FP8CORE_CUDA_EPILOGUE_ROWS rows, [batch, row blocks, columns]; NULL: not wanted.
  float *partial_sums;
  fp8core_rows d;
  int64_t d_batch_stride;
} fp8core_cuda_epilogue;
#define FP8CORE_CUDA_EPILOGUE_ROWS 64
int fp8core_cuda_launch_epilogue(const fp8core_cuda_target *target, const fp8core_cuda_epilogue *job);

// Stores in `sums` (FP32, with its scale and amax) the sum over `blocks` rows of `partial_sums`, in the order of the
// rows.
int fp8core_cuda_launch_column_sums(const fp8core_cuda_target *target, const fp8core_rows *sums,
                                    const float *partial_sums, int64_t blocks, int64_t columns);

// Raises *amax to *measured, and to NaN where an FP8 code of `data` is a NaN. Rows start at multiples of 16 bytes, and
// have one as their length.
int fp8core_cuda_launch_merge_amax(const fp8core_cuda_target *target, float *amax, const float *measured, int64_t rows,
                                   int64_t columns, const void *data, int64_t stride, fp8core_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
