// What a model computes beside its matrix products: one table of functions a device. Activations are BF16 or FP32,
// row-major; everything is computed in FP32. All pointers of a job are to memory of the model's device; on CUDA a
// function puts its work on the context's stream and does not wait. The same job gives the same bits every time.
#ifndef FP8GPT_BACKEND_H
#define FP8GPT_BACKEND_H

#include <stdint.h>

#include "fp8core/dtype.h"
#include "fp8core/status.h"
#include "fp8gpt/config.h"
#include "fp8gpt/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Dropout of one place in the model: element i is kept where its draw, by Philox-4x32-10, is at least the threshold.
typedef struct fp8gpt_dropout {
  float probability;
  uint64_t seed;
  uint32_t place;
  uint32_t pass;
} fp8gpt_dropout;

// out [rows, columns] = dropout(words[token] + places[position + row % length]).
typedef struct fp8gpt_embedding {
  fp8core_dtype dtype;
  int64_t rows;
  int64_t columns;
  int64_t length;
  int64_t position;
  // [rows]
  const int32_t *tokens;
  const void *words;
  // NULL: none.
  const void *places;
  fp8gpt_dropout dropout;
  void *out;
} fp8gpt_embedding;

// Adds to the gradients of words and places. A row of either is one sum in FP32, in the order of the rows, and rounded
// once.
typedef struct fp8gpt_embedding_backward {
  fp8core_dtype dtype;
  int64_t rows;
  int64_t columns;
  int64_t length;
  fp8gpt_dropout dropout;
  // [rows, columns]
  const void *dout;
  // Rows in the order of their tokens, and where the rows of each token that occurs start: [runs + 1].
  const int32_t *tokens;
  const int32_t *order;
  const int32_t *starts;
  int64_t runs;
  // BF16 or FP32.
  fp8core_dtype gradient_dtype;
  void *dwords;
  // NULL: none.
  void *dplaces;
} fp8gpt_embedding_backward;

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
  // [columns], FP32 or BF16; bias NULL for RMSNorm.
  fp8core_dtype weight_dtype;
  const void *weight;
  const void *bias;
  // [rows]; mean is not used by RMSNorm.
  float *mean;
  float *inverse_deviation;
} fp8gpt_norm;

// x of `forward` is what was normalised; delta, sum and y are not used. The gradient of the norm's input is added to
// dx; that of x + dropout(delta) is the same for x, and dropout's for delta (ddelta, NULL: not wanted).
typedef struct fp8gpt_norm_backward {
  fp8gpt_norm forward;
  const void *dy;
  void *dx;
  void *ddelta;
  // [columns], added to, or set where `first`; dbias NULL: not wanted.
  float *dweight;
  float *dbias;
  int first;
} fp8gpt_norm_backward;

// Rotary positions in place, on the first `heads` heads of each row. sign -1: backward.
typedef struct fp8gpt_rotation {
  fp8core_dtype dtype;
  int64_t rows;
  int64_t row_stride;
  // Row i is at position i % length.
  int64_t length;
  int heads;
  int head_dim;
  void *data;
  // [length, 2, head_dim / 2]: cosines, sines.
  const float *angles;
  float sign;
} fp8gpt_rotation;

typedef struct fp8gpt_attention {
  fp8core_dtype dtype;
  int64_t sequences;
  int64_t length;
  int heads;
  int kv_heads;
  // At most FP8GPT_MAX_HEAD.
  int head_dim;
  // [sequences * length, (heads + 2 kv_heads) * head_dim]: queries, keys, values.
  const void *qkv;
  // [sequences * length, heads * head_dim]
  void *out;
  // [sequences, heads, length]: logarithm of the sum of exponentials.
  float *log_sums;
  // Of the backward pass, like out and qkv.
  const void *dout;
  void *dqkv;
} fp8gpt_attention;

// One sequence, whose `length` queries of qkv follow `position` tokens: their keys and values are put into the cache
// [position + length, 2 kv_heads * head_dim], then they meet all of it.
typedef struct fp8gpt_attention_cached {
  fp8gpt_attention attention;
  void *cache;
  int64_t position;
} fp8gpt_attention_cached;

// gate_up [rows, 2 width] -> silu(gate) * up [rows, width].
typedef struct fp8gpt_swiglu {
  fp8core_dtype dtype;
  int64_t rows;
  int64_t width;
  const void *gate_up;
  void *out;
  // Of the backward pass, like out and gate_up.
  const void *dout;
  void *dgate_up;
} fp8gpt_swiglu;

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

// Sums of the columns of data [rows, columns], added to a gradient, or set where `first`.
typedef struct fp8gpt_column_sums {
  fp8core_dtype dtype;
  int64_t rows;
  int64_t columns;
  const void *data;
  // [columns]
  float *gradient;
  int first;
} fp8gpt_column_sums;

typedef struct fp8gpt_backend {
  // Rows of logits that exist at a time.
  int64_t logit_rows;
  // What is to be decided before memory is planned, which a model's creation calls once, and the end of backend_state;
  // NULL: nothing.
  fp8core_status (*prepare)(fp8gpt_model *model);
  void (*destroy)(fp8gpt_model *model);
  // fp8gpt_model_attention()
  const char *(*attention_by)(const fp8gpt_model *model);
  // Bytes of model->scratch, which is the backend's own.
  int64_t (*scratch_bytes)(const fp8gpt_model *model);
  fp8core_status (*embed)(fp8gpt_model *model, const fp8gpt_embedding *job);
  fp8core_status (*embed_backward)(fp8gpt_model *model, const fp8gpt_embedding_backward *job);
  fp8core_status (*norm)(fp8gpt_model *model, const fp8gpt_norm *job);
  fp8core_status (*norm_backward)(fp8gpt_model *model, const fp8gpt_norm_backward *job);
  fp8core_status (*rotate)(fp8gpt_model *model, const fp8gpt_rotation *job);
  fp8core_status (*attention)(fp8gpt_model *model, const fp8gpt_attention *job);
  fp8core_status (*attention_backward)(fp8gpt_model *model, const fp8gpt_attention *job);
  fp8core_status (*attention_cached)(fp8gpt_model *model, const fp8gpt_attention_cached *job);
  fp8core_status (*swiglu)(fp8gpt_model *model, const fp8gpt_swiglu *job);
  fp8core_status (*swiglu_backward)(fp8gpt_model *model, const fp8gpt_swiglu *job);
  fp8core_status (*cross_entropy)(fp8gpt_model *model, const fp8gpt_cross_entropy *job);
  fp8core_status (*column_sums)(fp8gpt_model *model, const fp8gpt_column_sums *job);
  // gradient = first ? values : gradient + values
  fp8core_status (*add)(fp8gpt_model *model, const float *values, int64_t count, float *gradient, int first);
} fp8gpt_backend;

extern const fp8gpt_backend fp8gpt_cpu_backend;

// Sets backend and backend_state of a model whose context is of CUDA, which backend->destroy() ends, also after a
// failure; the stub of a build without it fails.
fp8core_status fp8gpt_cuda_init(fp8gpt_model *model);

#define FP8GPT_MAX_HEAD 256

#ifdef __cplusplus
}
#endif

#endif
