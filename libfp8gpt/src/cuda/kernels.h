// Launchers of the CUDA kernels, for backend.c. Each puts its work on the stream and returns a cudaError_t as an int;
// none waits, none allocates. Jobs have at least one row, column, sequence and token.
#ifndef FP8GPT_CUDA_KERNELS_H
#define FP8GPT_CUDA_KERNELS_H

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Blocks that share the rows of a reduction; each leaves a partial sum for every column.
#define FP8GPT_CUDA_REDUCTION_BLOCKS 128

int fp8gpt_cuda_launch_embed(void *stream, const fp8gpt_embedding *job);
int fp8gpt_cuda_launch_embed_backward(void *stream, const fp8gpt_embedding_backward *job);
int fp8gpt_cuda_launch_norm(void *stream, const fp8gpt_norm *job);
// partials: [FP8GPT_CUDA_REDUCTION_BLOCKS, 2, columns].
int fp8gpt_cuda_launch_norm_backward(void *stream, const fp8gpt_norm_backward *job, float *partials);
int fp8gpt_cuda_launch_rotate(void *stream, const fp8gpt_rotation *job);
int fp8gpt_cuda_launch_attention(void *stream, const fp8gpt_attention *job);
// deltas: [sequences, heads, length].
int fp8gpt_cuda_launch_attention_backward(void *stream, const fp8gpt_attention *job, float *deltas);
int fp8gpt_cuda_launch_attention_cached(void *stream, const fp8gpt_attention_cached *job);
int fp8gpt_cuda_launch_swiglu(void *stream, const fp8gpt_swiglu *job);
int fp8gpt_cuda_launch_swiglu_backward(void *stream, const fp8gpt_swiglu *job);
int fp8gpt_cuda_launch_cross_entropy(void *stream, const fp8gpt_cross_entropy *job);
// partials: [FP8GPT_CUDA_REDUCTION_BLOCKS, columns].
int fp8gpt_cuda_launch_column_sums(void *stream, const fp8gpt_column_sums *job, float *partials);
int fp8gpt_cuda_launch_add(void *stream, const float *values, int64_t count, float *gradient, int first);
// BF16 values to compute with, others for each `place`.
int fp8gpt_cuda_launch_fill(void *stream, void *data, int64_t count, uint32_t place);

// Columns of two arrays of BF16 or FP32. sums: [FP8GPT_CUDA_REDUCTION_BLOCKS, 2], parts of the sums of (found -
// expected)^2 and expected^2.
typedef struct fp8gpt_cuda_comparison {
  fp8core_dtype dtype;
  int64_t rows;
  int64_t row_stride;
  int64_t first_column;
  int64_t columns;
  const void *found;
  const void *expected;
  double *sums;
} fp8gpt_cuda_comparison;

int fp8gpt_cuda_launch_compare(void *stream, const fp8gpt_cuda_comparison *job);

#ifdef __cplusplus
}
#endif

#endif
