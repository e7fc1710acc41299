// The loops of the CPU's backend: one table a tier, all from ops_tier.c. backend.c divides a job among threads, and
// each call here does a part of one.
#ifndef FP8GPT_CPU_OPS_H
#define FP8GPT_CPU_OPS_H

#include <stdint.h>

#include "backend.h"
#include "fp8core/context.h"

typedef struct fp8gpt_ops {
  void (*load)(fp8core_dtype dtype, const void *source, int64_t count, float *values);
  void (*store)(fp8core_dtype dtype, const float *values, int64_t count, void *destination);
  // Of rows [first, last), with FP32 weights. All scratch is a thread's own.
  void (*norm)(const fp8gpt_norm *norm, int64_t first, int64_t last, float *scratch);
  // Adds the rows' share to dweight and dbias of `partial` [2, columns].
  void (*norm_backward)(const fp8gpt_norm_backward *norm, int64_t first, int64_t last, float *partial, float *scratch);
  // Of one head of one sequence.
  void (*attention)(const fp8gpt_attention *attention, int64_t sequence, int head, float *scratch);
  // Of one head of keys and values of one sequence, with all heads that use it.
  void (*attention_backward)(const fp8gpt_attention *attention, int64_t sequence, int kv_head, float *scratch);
  // Of one head, with the new keys and values in the cache.
  void (*attention_cached)(const fp8gpt_attention_cached *attention, int head, float *scratch);
  // Sums of columns [first, last), at most FP8GPT_COLUMN_GROUP of them; the job's gradient is not touched.
  void (*column_sums)(const fp8gpt_column_sums *job, int64_t first, int64_t last, float *sums);
  void (*drop)(const fp8gpt_dropout *dropout, int64_t first, int64_t count, float *values);
  void (*rotate)(const fp8gpt_rotation *job, int64_t first, int64_t last, float *scratch);
  void (*swiglu)(const fp8gpt_swiglu *job, int64_t first, int64_t last, float *scratch);
  void (*swiglu_backward)(const fp8gpt_swiglu *job, int64_t first, int64_t last, float *scratch);
  void (*cross_entropy)(const fp8gpt_cross_entropy *loss, int64_t first, int64_t last, float *scratch);
} fp8gpt_ops;

extern const fp8gpt_ops fp8gpt_ops_scalar;
extern const fp8gpt_ops fp8gpt_ops_avx2;
extern const fp8gpt_ops fp8gpt_ops_avx512;

const fp8gpt_ops *fp8gpt_cpu_ops(fp8core_isa isa);

#define FP8GPT_QUERY_BLOCK 32
#define FP8GPT_KEY_BLOCK 64
// Rows whose gradients of norm weights are one partial sum.
#define FP8GPT_NORM_GROUP 64
#define FP8GPT_COLUMN_GROUP 256

#endif
