// What the files of libfp8gpt share. Public functions validate; everything else assumes valid input.
#ifndef FP8GPT_INTERNAL_H
#define FP8GPT_INTERNAL_H

#if defined(_OPENMP)
#  include <omp.h>
#endif

#include "backend.h"
#include "fp8core/fp8core.h"
#include "fp8gpt/config.h"
#include "fp8gpt/model.h"
#include "numerics.h"

#define fp8gpt_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define FP8GPT_TRY(call)                                                                                               \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

#define FP8GPT_MAX_NAME 64

typedef struct fp8gpt_parameter_record {
  char name[FP8GPT_MAX_NAME];
  int dimensions;
  int64_t shape[2];
  int64_t elements;
  int decay;
  int linear;
  int part;
  // Of the initial values: 0 standard deviation means all `initial_value`.
  float initial_std;
  float initial_value;
  fp8core_tensor weight;
  fp8core_tensor gradient;
  // Index of the gradient's scale in model->scaling; -1: none.
  int gradient_scale;
} fp8gpt_parameter_record;

// A linear layer. Its scaling indices are -1 without FP8 products.
typedef struct fp8gpt_linear {
  int weight;
  int bias;
  int64_t outputs;
  int64_t inputs;
  int input_scale;
  int output_gradient_scale;
  // Of a BF16 weight that is cast for the product (te).
  int weight_scale;
  // The saved input of the last pass, as the products read it.
  fp8core_tensor input;
  void *input_data;
} fp8gpt_linear;

typedef struct fp8gpt_norm_layer {
  int weight;
  int bias;
  void *sum;
  float *mean;
  float *inverse_deviation;
} fp8gpt_norm_layer;

typedef struct fp8gpt_block {
  fp8gpt_norm_layer norm1;
  fp8gpt_linear qkv;
  fp8gpt_linear projection;
  fp8gpt_norm_layer norm2;
  fp8gpt_linear fc1;
  fp8gpt_linear fc2;
  // Kept for the backward pass.
  void *qkv_out;
  void *attention_out;
  float *log_sums;
  // Pre-activations.
  void *fc1_out;
} fp8gpt_block;

// One block of memory: a batch's tokens and targets [rows]; its rows in the order of their tokens [rows], and where
// each token's rows start [rows + 1].
typedef struct fp8gpt_ids {
  int32_t *tokens;
  int32_t *targets;
  int32_t *order;
  int32_t *starts;
} fp8gpt_ids;

struct fp8gpt_model {
  fp8core_context *context;
  const fp8gpt_backend *backend;
  // Of CUDA (cuda/state.h).
  void *backend_state;
  // Of the CPU.
  const struct fp8gpt_ops *ops;
  int threads;
  // Passes since the gradients were set last, this one included.
  int accumulated;
  fp8gpt_hooks hooks;
  // Products make room for themselves, and nothing is computed (fp8gpt_reserve()).
  int reserving;
  fp8gpt_config config;
  fp8gpt_model_options options;
  int fp8;
  // Of activations; of weights and gradients that are not linear.
  fp8core_dtype activation_dtype;
  int64_t rows;
  int64_t parameter_count;
  // The part of the parameters that are being listed.
  int listed_part;
  fp8gpt_parameter_record *parameters;
  fp8gpt_block *blocks;
  fp8gpt_norm_layer final_norm;
  int token_embedding;
  int position_embedding;
  int output;
  // Of training, and just-in-time ones of evaluation and of initial weights.
  fp8core_scaling *scaling;
  fp8core_scaling *evaluation_scaling;
  fp8core_scaling *weight_scaling;
  int64_t scaled_tensors;
  char (*scale_names)[FP8GPT_MAX_NAME];
  fp8core_dtype *scale_dtypes;
  // The caller's, an entry a scaled tensor; NULL: not wanted.
  fp8core_cast_statistics *statistics;

  // One block of memory each.
  void *weight_memory;
  void *gradient_memory;
  void *activation_memory;
  void *workspace;
  int64_t weight_bytes;
  int64_t gradient_bytes;
  int64_t activation_bytes;
  int64_t workspace_bytes;
  // FP32, of the largest weight's gradient; where gradients are FP8.
  void *wide_weight_gradient;
  int64_t wide_weight_gradient_bytes;
  // Within the workspace.
  void *normalised;
  void *branch;
  void *hidden;
  void *residual_gradient;
  void *branch_gradient;
  void *wide_gradient;
  void *quantised_gradient;
  void *quantised_weight;
  float *logits;
  void *logit_gradients;
  float *losses;
  float *angles;
  // Sums of columns that a product leaves.
  float *column_sums;
  // The backend's own.
  void *scratch;
  fp8gpt_ids ids;
  void *cache;
  // Tokens in the cache.
  int cached;

  // In host memory: what ids and losses are copied from and to; on the CPU they are these themselves.
  void *staging;
  int64_t staging_bytes;
  fp8gpt_ids host_ids;
  float *host_losses;
  // Token in the upper half, row in the lower.
  int64_t *token_rows;
};

typedef struct fp8gpt_pass {
  int64_t sequences;
  int64_t length;
  int64_t rows;
  // Of generation: tokens whose keys and values are in the cache, which is used then.
  int cached;
  int64_t position;
  uint32_t number;
  int training;
  int first;
  // Different tokens, of training.
  int64_t runs;
} fp8gpt_pass;

// Makes room for every product of the passes (pass.c).
fp8core_status fp8gpt_reserve(fp8gpt_model *model);

fp8core_status fp8gpt_product(fp8gpt_model *model, const fp8core_gemm_options *options, const fp8core_tensor *a,
                              const fp8core_tensor *b, const fp8core_tensor *c, const fp8core_tensor *d);

// Linear layers (linear.c). The input's rows become the layer's saved input.
fp8core_status fp8gpt_linear_forward(fp8gpt_model *model, fp8gpt_linear *layer, int64_t rows, const void *input,
                                     void *output, int training);
// GELU between two layers: pre-activations to fc1_out, activations as the input of the next layer.
fp8core_status fp8gpt_linear_forward_gelu(fp8gpt_model *model, fp8gpt_linear *layer, fp8gpt_linear *next, int64_t rows,
                                          const void *input, void *pre_activation, int training);
// The product of a saved input that the next layer already has.
fp8core_status fp8gpt_linear_forward_saved(fp8gpt_model *model, fp8gpt_linear *layer, int64_t rows, void *output,
                                           int training);
// Gradients of weight and bias are added to (or set, now->first). input_gradient NULL: not wanted. With gelu_of
// (pre-activations) the input's gradient goes through GELU, and `bias_below` receives its column sums.
fp8core_status fp8gpt_linear_backward(fp8gpt_model *model, fp8gpt_linear *layer, const fp8gpt_pass *now,
                                      const void *output_gradient, int with_bias_gradient, void *input_gradient,
                                      const void *gelu_of, int bias_below);
fp8core_tensor fp8gpt_matrix(const fp8gpt_model *model, const void *data, fp8core_dtype dtype, int64_t rows,
                             int64_t columns);

#endif
