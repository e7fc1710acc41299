// What a model computes beside its matrix products, on the CPU. One table a tier, all from ops_tier.c, and the drivers
// that divide the work among threads (ops.c). Activations are BF16 or FP32, row-major; everything is computed in FP32.
#ifndef FP8GPT_CPU_OPS_H
#define FP8GPT_CPU_OPS_H

#include <stdint.h>

#include "fp8core/context.h"
#include "fp8core/dtype.h"
#include "fp8gpt/config.h"

// Dropout of one place in the model: element i is kept where its draw, by Philox-4x32-10, is at least the threshold.
typedef struct fp8gpt_dropout {
  float probability;
  uint64_t seed;
  uint32_t place;
  uint32_t pass;
} fp8gpt_dropout;

// x [rows, columns] + dropout(delta) -> sum, normalised -> y. delta NULL: only x, and nothing is stored in sum.
typedef struct fp8gpt_norm {
  fp8gpt_normalization type;
  fp8core_dtype dtype;
  int64_t rows;
  int64_t columns;
  float eps;
  const void *x;
  const void *delta;
  fp8gpt_dropout dropout;
  void *sum;
  void *y;
  // FP32; bias NULL for RMSNorm.
  const float *weight;
  const float *bias;
  // [rows]; mean is not used by RMSNorm.
  float *mean;
  float *inverse_deviation;
} fp8gpt_norm;

// The gradient of the norm's input is added to dx; that of x + dropout(delta) is the same for x, and dropout's for
// delta (ddelta, NULL: not wanted).
typedef struct fp8gpt_norm_backward {
  fp8gpt_norm forward;
  const void *dy;
  void *dx;
  void *ddelta;
  // FP32 [columns], set.
  float *dweight;
  float *dbias;
} fp8gpt_norm_backward;

typedef struct fp8gpt_attention {
  fp8core_dtype dtype;
  int64_t sequences;
  int64_t length;
  int heads;
  int kv_heads;
  int head_dim;
  // [sequences * length, (heads + 2 kv_heads) * head_dim]: queries, keys, values.
  const void *qkv;
  // [sequences * length, heads * head_dim]
  void *out;
  // [sequences, heads, length]: logarithm of the sum of exponentials.
  float *log_sums;
  const void *dout;
  void *dqkv;
} fp8gpt_attention;

typedef struct fp8gpt_cross_entropy {
  int64_t rows;
  int64_t vocabulary;
  // FP32 [rows, vocabulary].
  const float *logits;
  // [rows]; -1: does not count.
  const int32_t *targets;
  // Of the mean: 1 over the number of targets that count, times the loss scale.
  float scale;
  // [rows]: the loss of each, 0 where it does not count.
  float *losses;
  // BF16 or FP32 [rows, vocabulary]; NULL: not wanted.
  fp8core_dtype dtype;
  void *dlogits;
} fp8gpt_cross_entropy;

typedef struct fp8gpt_ops {
  void (*load)(fp8core_dtype dtype, const void *source, int64_t count, float *values);
  void (*store)(fp8core_dtype dtype, const float *values, int64_t count, void *destination);
  // Of rows [first, last); scratch is fp8gpt_row_scratch() floats.
  void (*norm)(const fp8gpt_norm *norm, int64_t first, int64_t last, float *scratch);
  // Adds the rows' share to dweight and dbias of `partial` [2, columns].
  void (*norm_backward)(const fp8gpt_norm_backward *norm, int64_t first, int64_t last, float *partial, float *scratch);
  // Of one head of one sequence; scratch is fp8gpt_attention_scratch() floats.
  void (*attention)(const fp8gpt_attention *attention, int64_t sequence, int head, float *scratch);
  // Of one head of keys and values of one sequence, with all heads that use it.
  void (*attention_backward)(const fp8gpt_attention *attention, int64_t sequence, int kv_head, float *scratch);
  // Of one head of one sequence, queries after `position` cached tokens; scratch of 3 head_dim + position + length.
  void (*attention_cached)(const fp8gpt_attention *attention, const void *cache, int64_t position, int head,
                           float *scratch);
  // Sums of columns [first, last), at most FP8GPT_COLUMN_GROUP of them.
  void (*column_sums)(fp8core_dtype dtype, const void *data, int64_t rows, int64_t row_stride, int64_t first,
                      int64_t last, float *sums);
  void (*drop)(const fp8gpt_dropout *dropout, int64_t first, int64_t count, float *values);
  // In place on the first `heads` heads of each row; angles [length, 2, head_dim / 2]: cosines, sines. sign -1:
  // backward.
  void (*rotate)(fp8core_dtype dtype, void *rows, int64_t row_stride, int64_t first, int64_t last, int64_t length,
                 int heads, int head_dim, const float *angles, float sign, float *scratch);
  // gate_up [rows, 2 width] -> silu(gate) * up [rows, width]; backward in place of gate_up's gradient.
  void (*swiglu)(fp8core_dtype dtype, const void *gate_up, int64_t first, int64_t last, int64_t width, void *out,
                 float *scratch);
  void (*swiglu_backward)(fp8core_dtype dtype, const void *gate_up, const void *dout, int64_t first, int64_t last,
                          int64_t width, void *dgate_up, float *scratch);
  void (*cross_entropy)(const fp8gpt_cross_entropy *loss, int64_t first, int64_t last, float *scratch);
} fp8gpt_ops;

extern const fp8gpt_ops fp8gpt_ops_scalar;
extern const fp8gpt_ops fp8gpt_ops_avx2;
extern const fp8gpt_ops fp8gpt_ops_avx512;

const fp8gpt_ops *fp8gpt_cpu_ops(fp8core_isa isa);

int64_t fp8gpt_row_scratch(int64_t columns);
// Enough for attention_cached() too.
int64_t fp8gpt_attention_scratch(int64_t length, int head_dim, int heads_per_kv_head);

#define FP8GPT_QUERY_BLOCK 32
#define FP8GPT_KEY_BLOCK 64
// Rows whose gradients of norm weights are one partial sum.
#define FP8GPT_NORM_GROUP 64
#define FP8GPT_COLUMN_GROUP 256

#endif
