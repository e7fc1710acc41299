// Forward and backward passes. The residual stream is kept as the sums that norms store: each norm takes the sum so far
// and the branch that came last.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

// Places of dropout: 0 the embedding's, then two a block.
static fp8gpt_dropout dropout_at(const fp8gpt_model *model, int place, uint32_t pass, int training) {
  fp8gpt_dropout dropout;
  dropout.probability = training ? model->config.dropout : 0.0f;
  dropout.seed = model->options.seed;
  dropout.place = (uint32_t)place;
  dropout.pass = pass;
  return dropout;
}

static int head_dim(const fp8gpt_model *model) { return model->config.hidden / model->config.heads; }

static const void *weight_of(const fp8gpt_model *model, int parameter) {
  return parameter < 0 ? NULL : model->parameters[parameter].weight.data;
}

static void *gradient_of(const fp8gpt_model *model, int parameter) {
  return parameter < 0 ? NULL : model->parameters[parameter].gradient.data;
}

static fp8gpt_norm norm_of(const fp8gpt_model *model, const fp8gpt_norm_layer *layer, int64_t rows, const void *x,
                           const void *delta, fp8gpt_dropout dropout, void *y) {
  const fp8gpt_norm norm = {.type = model->config.normalization,
                            .dtype = model->activation_dtype,
                            .rows = rows,
                            .columns = model->config.hidden,
                            .eps = model->config.norm_eps,
                            .x = x,
                            .delta = delta,
                            .dropout = dropout,
                            .sum = layer->sum,
                            .y = y,
                            .weight_dtype = model->parameters[layer->weight].weight.dtype,
                            .weight = weight_of(model, layer->weight),
                            .bias = weight_of(model, layer->bias),
                            .mean = layer->mean,
                            .inverse_deviation = layer->inverse_deviation};
  return norm;
}

// Where the outputs of a norm go that are the input of a linear layer: in 16 and 32 bits they are the saved input.
static void *input_of(const fp8gpt_model *model, const fp8gpt_linear *layer) {
  return model->fp8 ? model->normalised : layer->input_data;
}

static fp8core_status norm_forward(fp8gpt_model *model, const fp8gpt_norm_layer *layer, int64_t rows, const void *x,
                                   const void *delta, fp8gpt_dropout dropout, void *y) {
  const fp8gpt_norm job = norm_of(model, layer, rows, x, delta, dropout, y);
  return model->backend->norm(model, &job);
}

// `dy` is the gradient of the norm's output; the residual's gradient is added to. With dropout the branch's gradient is
// written to branch_gradient.
static fp8core_status norm_backward(fp8gpt_model *model, const fp8gpt_norm_layer *layer, const fp8gpt_pass *now,
                                    const void *dy, fp8gpt_dropout dropout) {
  const fp8gpt_norm_backward job = {// What was stored is the sum: no delta to add.
                                    .forward = norm_of(model, layer, now->rows, layer->sum, NULL, dropout, NULL),
                                    .dy = dy,
                                    .dx = model->residual_gradient,
                                    .ddelta = dropout.probability > 0.0f ? model->branch_gradient : NULL,
                                    .dweight = gradient_of(model, layer->weight),
                                    .dbias = gradient_of(model, layer->bias),
                                    .first = now->first};
  return model->backend->norm_backward(model, &job);
}

// Where the gradient of the branch that a norm added lies.
static const void *branch_gradient(const fp8gpt_model *model) {
  return model->config.dropout > 0.0f ? model->branch_gradient : model->residual_gradient;
}

static int64_t qkv_columns(const fp8gpt_model *model) {
  return (int64_t)(model->config.heads + 2 * model->config.kv_heads) * head_dim(model);
}

static fp8core_status rotate(fp8gpt_model *model, void *qkv, int64_t rows, int64_t length, int64_t position,
                             float sign) {
  if (model->config.position != FP8GPT_ROPE) return FP8CORE_OK;
  const fp8gpt_rotation job = {.dtype = model->activation_dtype,
                               .rows = rows,
                               .row_stride = qkv_columns(model),
                               .length = length,
                               .heads = model->config.heads + model->config.kv_heads,
                               .head_dim = head_dim(model),
                               .data = qkv,
                               .angles = model->angles + position * head_dim(model),
                               .sign = sign};
  return model->backend->rotate(model, &job);
}

static fp8gpt_attention attention_of(const fp8gpt_model *model, const fp8gpt_block *block, const fp8gpt_pass *now) {
  const fp8gpt_attention attention = {.dtype = model->activation_dtype,
                                      .sequences = now->sequences,
                                      .length = now->length,
                                      .heads = model->config.heads,
                                      .kv_heads = model->config.kv_heads,
                                      .head_dim = head_dim(model),
                                      .qkv = block->qkv_out,
                                      .out = block->attention_out,
                                      .log_sums = block->log_sums};
  return attention;
}

// In generation the keys and values of new tokens go to the cache, and their queries meet all of it.
static fp8core_status attention_forward(fp8gpt_model *model, int index, const fp8gpt_pass *now) {
  const fp8gpt_attention job = attention_of(model, &model->blocks[index], now);
  if (!now->cached) return model->backend->attention(model, &job);
  const int64_t cached =
    2 * (int64_t)model->config.kv_heads * head_dim(model) * (int64_t)fp8core_dtype_size(model->activation_dtype);
  const fp8gpt_attention_cached with_cache = {.attention = job,
                                              .cache =
                                                (unsigned char *)model->cache + index * model->config.sequence * cached,
                                              .position = now->position};
  return model->backend->attention_cached(model, &with_cache);
}

static fp8core_status attention_backward(fp8gpt_model *model, const fp8gpt_block *block, const fp8gpt_pass *now,
                                         const void *dout, void *dqkv) {
  fp8gpt_attention job = attention_of(model, block, now);
  job.dout = dout;
  job.dqkv = dqkv;
  return model->backend->attention_backward(model, &job);
}

// In 16 bits the activations are the input of fc2 itself.
static void *activated_of(const fp8gpt_model *model, const fp8gpt_block *block) {
  return model->fp8 ? model->hidden : block->fc2.input_data;
}

static fp8core_status swiglu(fp8gpt_model *model, const fp8gpt_block *block, int64_t rows) {
  const fp8gpt_swiglu job = {.dtype = model->activation_dtype,
                             .rows = rows,
                             .width = model->config.ffn_hidden,
                             .gate_up = block->fc1_out,
                             .out = activated_of(model, block)};
  return model->backend->swiglu(model, &job);
}

static fp8core_status swiglu_backward(fp8gpt_model *model, const fp8gpt_block *block, int64_t rows, const void *dout,
                                      void *dgate_up) {
  const fp8gpt_swiglu job = {.dtype = model->activation_dtype,
                             .rows = rows,
                             .width = model->config.ffn_hidden,
                             .gate_up = block->fc1_out,
                             .dout = dout,
                             .dgate_up = dgate_up};
  return model->backend->swiglu_backward(model, &job);
}

// Parts, as their users are told of them.

static fp8core_status check_bound(const fp8gpt_model *model, int part, fp8gpt_direction direction) {
  for (int64_t i = 0; i < model->parameter_count; i++) {
    const fp8gpt_parameter_record *record = &model->parameters[i];
    if (record->part != part) continue;
    if (!record->weight.data)
      return fp8gpt_invalid(
        "\"%s\" has no weight, expected one from fp8gpt_model_bind_weight(), as external_weights is %d", record->name,
        model->options.external_weights);
    if (direction == FP8GPT_BACKWARD && !record->gradient.data)
      return fp8gpt_invalid(
        "\"%s\" has no gradient, expected one from fp8gpt_model_bind_gradient(), as external_gradients is %d",
        record->name, model->options.external_gradients);
  }
  return FP8CORE_OK;
}

static fp8core_status acquire(fp8gpt_model *model, int part, fp8gpt_direction direction) {
  if (model->hooks.acquire) FP8GPT_TRY(model->hooks.acquire(model->hooks.user_data, part, direction));
  if (!model->options.external_weights && !model->options.external_gradients) return FP8CORE_OK;
  return check_bound(model, part, direction);
}

static fp8core_status release(fp8gpt_model *model, int part, fp8gpt_direction direction) {
  return model->hooks.release ? model->hooks.release(model->hooks.user_data, part, direction) : FP8CORE_OK;
}

// The last part, and the first one where it has the output layer's weight. Backward, the caller releases.
static fp8core_status acquire_head(fp8gpt_model *model, fp8gpt_direction direction) {
  if (model->output == model->token_embedding) FP8GPT_TRY(acquire(model, 0, direction));
  return acquire(model, model->config.layers + 1, direction);
}

static fp8core_status release_head(fp8gpt_model *model, fp8gpt_direction direction) {
  FP8GPT_TRY(release(model, model->config.layers + 1, direction));
  return model->output == model->token_embedding ? release(model, 0, direction) : FP8CORE_OK;
}

// Embeddings.

// Brings what a pass reads of its batch to the device; targets NULL: none.
static fp8core_status upload(fp8gpt_model *model, const int32_t *tokens, const int32_t *targets, int64_t rows,
                             int64_t runs) {
  const size_t bytes = (size_t)rows * sizeof(int32_t);
  memcpy(model->host_ids.tokens, tokens, bytes);
  if (targets) memcpy(model->host_ids.targets, targets, bytes);
  if (model->ids.tokens == model->host_ids.tokens) return FP8CORE_OK;
  // One copy of everything up to the last that is there; the block's parts lie as for the largest batch.
  const int32_t *end = runs > 0  ? model->host_ids.starts + runs + 1
                       : targets ? model->host_ids.targets + rows
                                 : model->host_ids.tokens + rows;
  return fp8core_copy(model->context, model->ids.tokens, model->host_ids.tokens,
                      (size_t)(end - model->host_ids.tokens) * sizeof(int32_t));
}

static int compare_pairs(const void *one, const void *other) {
  const int64_t a = *(const int64_t *)one;
  const int64_t b = *(const int64_t *)other;
  return (a > b) - (a < b);
}

// Puts the rows in the order of their tokens, so that each row of the embedding's gradient is one sum. Returns how many
// tokens occur.
static int64_t sort_rows(fp8gpt_model *model, const int32_t *tokens, int64_t rows) {
  int64_t *pairs = model->token_rows;
  int64_t runs = 0;
  for (int64_t row = 0; row < rows; row++) pairs[row] = (int64_t)tokens[row] << 32 | row;
  qsort(pairs, (size_t)rows, sizeof(*pairs), compare_pairs);
  for (int64_t i = 0; i < rows; i++) {
    model->host_ids.order[i] = (int32_t)(pairs[i] & INT64_C(0xffffffff));
    if (i == 0 || pairs[i] >> 32 != pairs[i - 1] >> 32) model->host_ids.starts[runs++] = (int32_t)i;
  }
  model->host_ids.starts[runs] = (int32_t)rows;
  return runs;
}

// The first norm stores no sum: the embedding lies where the backward pass reads it.
static fp8core_status embed(fp8gpt_model *model, const fp8gpt_pass *now) {
  const fp8gpt_embedding job = {.dtype = model->activation_dtype,
                                .rows = now->rows,
                                .columns = model->config.hidden,
                                .length = now->length,
                                .position = now->position,
                                .tokens = model->ids.tokens,
                                .words = weight_of(model, model->token_embedding),
                                .places = weight_of(model, model->position_embedding),
                                .dropout = dropout_at(model, 0, now->number, now->training),
                                .out = model->blocks[0].norm1.sum};
  return model->backend->embed(model, &job);
}

static fp8core_status embed_backward(fp8gpt_model *model, const fp8gpt_pass *now) {
  const fp8gpt_embedding_backward job = {.dtype = model->activation_dtype,
                                         .rows = now->rows,
                                         .columns = model->config.hidden,
                                         .length = now->length,
                                         .dropout = dropout_at(model, 0, now->number, 1),
                                         .dout = model->residual_gradient,
                                         .tokens = model->ids.tokens,
                                         .order = model->ids.order,
                                         .starts = model->ids.starts,
                                         .runs = now->runs,
                                         .gradient_dtype = model->parameters[model->token_embedding].gradient.dtype,
                                         .dwords = gradient_of(model, model->token_embedding),
                                         .dplaces = gradient_of(model, model->position_embedding)};
  return model->backend->embed_backward(model, &job);
}

// Blocks.

static fp8core_status block_forward(fp8gpt_model *model, int index, const fp8gpt_pass *now, const void *x,
                                    const void *delta) {
  fp8gpt_block *block = &model->blocks[index];
  const int64_t rows = now->rows;
  FP8GPT_TRY(norm_forward(model, &block->norm1, rows, x, delta,
                          dropout_at(model, 2 * index, now->number, now->training), input_of(model, &block->qkv)));
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->qkv, rows, input_of(model, &block->qkv), block->qkv_out, now->training));
  FP8GPT_TRY(rotate(model, block->qkv_out, rows, now->length, now->position, 1.0f));
  FP8GPT_TRY(attention_forward(model, index, now));
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->projection, rows, block->attention_out, model->branch, now->training));
  const void *sum = block->norm1.sum;
  FP8GPT_TRY(norm_forward(model, &block->norm2, rows, sum, model->branch,
                          dropout_at(model, 2 * index + 1, now->number, now->training), input_of(model, &block->fc1)));
  if (model->config.activation == FP8GPT_GELU) {
    FP8GPT_TRY(fp8gpt_linear_forward_gelu(model, &block->fc1, &block->fc2, rows, input_of(model, &block->fc1),
                                          block->fc1_out, now->training));
    return fp8gpt_linear_forward_saved(model, &block->fc2, rows, model->branch, now->training);
  }
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->fc1, rows, input_of(model, &block->fc1), block->fc1_out, now->training));
  FP8GPT_TRY(swiglu(model, block, rows));
  return fp8gpt_linear_forward(model, &block->fc2, rows, activated_of(model, block), model->branch, now->training);
}

static fp8core_status block_backward(fp8gpt_model *model, int index, const fp8gpt_pass *now) {
  fp8gpt_block *block = &model->blocks[index];
  const int64_t rows = now->rows;
  const int gelu = model->config.activation == FP8GPT_GELU;
  const fp8gpt_dropout none = dropout_at(model, 0, 0, 0);
  // Feed-forward part. The gradient of fc1's outputs is wide_gradient.
  FP8GPT_TRY(fp8gpt_linear_backward(model, &block->fc2, now, branch_gradient(model), 1,
                                    gelu ? model->wide_gradient : model->hidden, gelu ? block->fc1_out : NULL,
                                    gelu ? block->fc1.bias : -1));
  if (!gelu) FP8GPT_TRY(swiglu_backward(model, block, rows, model->hidden, model->wide_gradient));
  FP8GPT_TRY(fp8gpt_linear_backward(model, &block->fc1, now, model->wide_gradient, !gelu, model->normalised, NULL, -1));
  FP8GPT_TRY(norm_backward(model, &block->norm2, now, model->normalised,
                           model->config.dropout > 0.0f ? dropout_at(model, 2 * index + 1, now->number, 1) : none));
  // Attention part.
  FP8GPT_TRY(
    fp8gpt_linear_backward(model, &block->projection, now, branch_gradient(model), 1, model->branch, NULL, -1));
  FP8GPT_TRY(attention_backward(model, block, now, model->branch, model->wide_gradient));
  FP8GPT_TRY(rotate(model, model->wide_gradient, rows, now->length, 0, -1.0f));
  FP8GPT_TRY(fp8gpt_linear_backward(model, &block->qkv, now, model->wide_gradient, 1, model->normalised, NULL, -1));
  return norm_backward(model, &block->norm1, now, model->normalised,
                       model->config.dropout > 0.0f && index > 0 ? dropout_at(model, 2 * index, now->number, 1) : none);
}

// The output layer and the loss, some rows at a time. With training the gradient of the final norm's outputs is left in
// model->branch.
static fp8core_status head(fp8gpt_model *model, const fp8gpt_pass *now, float scale) {
  const int64_t columns = model->config.hidden;
  const int64_t vocabulary = model->config.vocabulary;
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const fp8gpt_parameter_record *output = &model->parameters[model->output];
  const fp8core_tensor gradient = output->gradient;
  for (int64_t row = 0; row < now->rows; row += model->backend->logit_rows) {
    const int64_t left = now->rows - row;
    const int64_t rows = left < model->backend->logit_rows ? left : model->backend->logit_rows;
    const fp8core_tensor input = fp8gpt_matrix(model, (unsigned char *)model->normalised + row * columns * size,
                                               model->activation_dtype, rows, columns);
    const fp8core_tensor logits = fp8gpt_matrix(model, model->logits, FP8CORE_FP32, rows, vocabulary);
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.transpose_b = 1;
    FP8GPT_TRY(fp8gpt_product(model, &options, &input, &output->weight, NULL, &logits));
    fp8gpt_cross_entropy loss;
    loss.rows = rows;
    loss.vocabulary = vocabulary;
    loss.logits = model->logits;
    loss.targets = model->ids.targets + row;
    loss.scale = scale;
    loss.losses = model->losses + row;
    loss.dtype = model->activation_dtype;
    loss.dlogits = now->training ? model->logit_gradients : NULL;
    if (!model->reserving) FP8GPT_TRY(model->backend->cross_entropy(model, &loss));
    if (!now->training) continue;
    const fp8core_tensor dlogits =
      fp8gpt_matrix(model, model->logit_gradients, model->activation_dtype, rows, vocabulary);
    const fp8core_tensor result = fp8gpt_matrix(model, (unsigned char *)model->branch + row * columns * size,
                                                model->activation_dtype, rows, columns);
    const int set = now->first && row == 0;
    options = fp8core_gemm_options_default();
    options.transpose_a = 1;
    options.beta = set ? 0.0f : 1.0f;
    FP8GPT_TRY(fp8gpt_product(model, &options, &dlogits, &input, set ? NULL : &gradient, &gradient));
    options = fp8core_gemm_options_default();
    FP8GPT_TRY(fp8gpt_product(model, &options, &dlogits, &output->weight, NULL, &result));
  }
  return FP8CORE_OK;
}

// Products of a pass over `now->rows` rows; all blocks have the same.
static fp8core_status reserve_rows(fp8gpt_model *model, fp8gpt_pass *now) {
  fp8gpt_block *block = &model->blocks[0];
  const int64_t rows = now->rows;
  const int gelu = model->config.activation == FP8GPT_GELU;
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->qkv, rows, input_of(model, &block->qkv), block->qkv_out, now->training));
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->projection, rows, block->attention_out, model->branch, now->training));
  if (gelu) {
    FP8GPT_TRY(fp8gpt_linear_forward_gelu(model, &block->fc1, &block->fc2, rows, input_of(model, &block->fc1),
                                          block->fc1_out, now->training));
    FP8GPT_TRY(fp8gpt_linear_forward_saved(model, &block->fc2, rows, model->branch, now->training));
  } else {
    FP8GPT_TRY(
      fp8gpt_linear_forward(model, &block->fc1, rows, input_of(model, &block->fc1), block->fc1_out, now->training));
    FP8GPT_TRY(
      fp8gpt_linear_forward(model, &block->fc2, rows, activated_of(model, block), model->branch, now->training));
  }
  FP8GPT_TRY(head(model, now, 1.0f));
  if (!now->training) return FP8CORE_OK;
  // The first micro-batch, and one of the later ones.
  for (now->first = 1; now->first >= 0; now->first--) {
    model->accumulated = now->first ? 1 : FP8GPT_MICRO_BATCHES;
    FP8GPT_TRY(fp8gpt_linear_backward(model, &block->fc2, now, branch_gradient(model), 1,
                                      gelu ? model->wide_gradient : model->hidden, gelu ? block->fc1_out : NULL,
                                      gelu ? block->fc1.bias : -1));
    FP8GPT_TRY(
      fp8gpt_linear_backward(model, &block->fc1, now, model->wide_gradient, !gelu, model->normalised, NULL, -1));
    FP8GPT_TRY(
      fp8gpt_linear_backward(model, &block->projection, now, branch_gradient(model), 1, model->branch, NULL, -1));
    FP8GPT_TRY(fp8gpt_linear_backward(model, &block->qkv, now, model->wide_gradient, 1, model->normalised, NULL, -1));
  }
  return FP8CORE_OK;
}

// Lends memory to parameters that have none yet, as products are checked whole: all of them the same, as each product
// has one weight or one gradient. NULL takes it back.
static void lend_external(fp8gpt_model *model, void *memory) {
  for (int64_t i = 0; i < model->parameter_count; i++) {
    if (model->options.external_weights) model->parameters[i].weight.data = memory;
    if (model->options.external_gradients && !model->options.inference) model->parameters[i].gradient.data = memory;
  }
}

static int64_t largest_external(const fp8gpt_model *model) {
  int64_t most = 0;
  for (int64_t i = 0; i < model->parameter_count; i++) {
    const int64_t bytes = model->parameters[i].elements * (int64_t)sizeof(float);
    if (bytes > most) most = bytes;
  }
  return model->options.external_weights || model->options.external_gradients ? most : 0;
}

static fp8core_status reserve(fp8gpt_model *model) {
  fp8core_status status = FP8CORE_OK;
  model->reserving = 1;
  // On the CPU fewer rows are divided otherwise, and may need more.
  const int64_t least = fp8core_context_device(model->context).type == FP8CORE_DEVICE_CPU ? 1 : model->rows;
  for (int training = 0; training <= !model->options.inference; training++)
    for (int64_t rows = model->rows; rows >= least && status == FP8CORE_OK; rows /= 2) {
      fp8gpt_pass now = {.sequences = 1, .length = rows, .rows = rows, .training = training};
      status = reserve_rows(model, &now);
    }
  model->reserving = 0;
  return status;
}

fp8core_status fp8gpt_reserve(fp8gpt_model *model) {
  const int64_t bytes = largest_external(model);
  void *memory;
  if (bytes == 0) return reserve(model);
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)bytes, &memory));
  lend_external(model, memory);
  const fp8core_status status = reserve(model);
  lend_external(model, NULL);
  (void)fp8core_free(model->context, memory);
  return status;
}

static fp8core_status zero_gradient(fp8gpt_model *model, int parameter) {
  const fp8core_tensor *gradient = &model->parameters[parameter].gradient;
  return fp8core_zero(model->context, gradient->data, (size_t)fp8core_tensor_span_bytes(gradient));
}

// Leaves the last part acquired: the output layer follows.
static fp8core_status forward(fp8gpt_model *model, const fp8gpt_pass *now) {
  const void *x = model->blocks[0].norm1.sum;
  const void *delta = NULL;
  FP8GPT_TRY(acquire(model, 0, FP8GPT_FORWARD));
  FP8GPT_TRY(embed(model, now));
  FP8GPT_TRY(release(model, 0, FP8GPT_FORWARD));
  for (int i = 0; i < model->config.layers; i++) {
    FP8GPT_TRY(acquire(model, i + 1, FP8GPT_FORWARD));
    FP8GPT_TRY(block_forward(model, i, now, x, delta));
    FP8GPT_TRY(release(model, i + 1, FP8GPT_FORWARD));
    x = model->blocks[i].norm2.sum;
    delta = model->branch;
  }
  FP8GPT_TRY(acquire_head(model, now->training ? FP8GPT_BACKWARD : FP8GPT_FORWARD));
  return norm_forward(model, &model->final_norm, now->rows, x, delta,
                      dropout_at(model, 2 * model->config.layers, now->number, now->training), model->normalised);
}

static fp8core_status backward(fp8gpt_model *model, const fp8gpt_pass *now) {
  const size_t bytes = (size_t)(now->rows * model->config.hidden) * fp8core_dtype_size(model->activation_dtype);
  FP8GPT_TRY(fp8core_zero(model->context, model->residual_gradient, bytes));
  FP8GPT_TRY(norm_backward(model, &model->final_norm, now, model->branch,
                           dropout_at(model, 2 * model->config.layers, now->number, 1)));
  FP8GPT_TRY(release(model, model->config.layers + 1, FP8GPT_BACKWARD));
  for (int i = model->config.layers - 1; i >= 0; i--) {
    FP8GPT_TRY(acquire(model, i + 1, FP8GPT_BACKWARD));
    if (model->options.recompute) {
      // From the block's input, which its first norm kept, with the same scales and draws.
      fp8gpt_norm_layer *norm = &model->blocks[i].norm1;
      FP8GPT_TRY(block_forward(model, i, now, norm->sum, NULL));
    }
    FP8GPT_TRY(block_backward(model, i, now));
    FP8GPT_TRY(release(model, i + 1, FP8GPT_BACKWARD));
  }
  const int tied = model->output == model->token_embedding;
  if (!tied) FP8GPT_TRY(acquire(model, 0, FP8GPT_BACKWARD));
  // The rows of tokens and positions that do not occur; a tied weight's gradient the output layer has set.
  if (now->first && !tied) FP8GPT_TRY(zero_gradient(model, model->token_embedding));
  if (now->first && model->position_embedding >= 0) FP8GPT_TRY(zero_gradient(model, model->position_embedding));
  FP8GPT_TRY(embed_backward(model, now));
  return release(model, 0, FP8GPT_BACKWARD);
}

// Checks.

static fp8core_status check_batch(const fp8gpt_model *model, const char *call, const fp8gpt_batch *batch) {
  if (!model) return fp8gpt_invalid("model of %s() is NULL, expected a model", call);
  if (!batch) return fp8gpt_invalid("batch of %s() is NULL, expected a batch", call);
  if (batch->sequences < 1 || batch->sequences > model->options.batch)
    return fp8gpt_invalid("sequences is %d, expected 1 to the model's batch of %d", batch->sequences,
                          model->options.batch);
  if (batch->length < 1 || batch->length > model->config.sequence)
    return fp8gpt_invalid("length is %d, expected 1 to the model's sequence of %d", batch->length,
                          model->config.sequence);
  if (!batch->tokens) return fp8gpt_invalid("tokens is NULL, expected token ids");
  if (!batch->targets) return fp8gpt_invalid("targets is NULL, expected token ids");
  const int64_t rows = (int64_t)batch->sequences * batch->length;
  for (int64_t i = 0; i < rows; i++) {
    if (batch->tokens[i] < 0 || batch->tokens[i] >= model->config.vocabulary)
      return fp8gpt_invalid("token %lld is %d, expected 0 to %d", (long long)i, batch->tokens[i],
                            model->config.vocabulary - 1);
    if (batch->targets[i] < -1 || batch->targets[i] >= model->config.vocabulary)
      return fp8gpt_invalid("target %lld is %d, expected -1 to %d", (long long)i, batch->targets[i],
                            model->config.vocabulary - 1);
  }
  return FP8CORE_OK;
}

static int64_t counting(const fp8gpt_batch *batch) {
  int64_t count = 0;
  for (int64_t i = 0; i < (int64_t)batch->sequences * batch->length; i++) count += batch->targets[i] >= 0;
  return count;
}

// Waits for the device.
static fp8core_status mean_loss(fp8gpt_model *model, int64_t rows, int64_t count, float *loss) {
  double sum = 0.0;
  if (model->losses != model->host_losses)
    FP8GPT_TRY(fp8core_copy(model->context, model->host_losses, model->losses, (size_t)rows * sizeof(float)));
  for (int64_t i = 0; i < rows; i++) sum += (double)model->host_losses[i];
  *loss = count ? (float)(sum / (double)count) : 0.0f;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_model_train(fp8gpt_model *model, const fp8gpt_batch *batch, int first, float loss_scale,
                                  int64_t step, int micro_batch, float *loss) {
  FP8GPT_TRY(check_batch(model, "fp8gpt_model_train", batch));
  if (model->options.inference)
    return fp8gpt_invalid("the model was created with inference 1, expected one for training");
  if (!(isfinite(loss_scale) && loss_scale > 0.0f))
    return fp8gpt_invalid("loss_scale is %g, expected a finite positive number", (double)loss_scale);
  // Initial weights draw with the number that the last micro-batch of one more step would have.
  const int64_t steps = (INT64_C(1) << 32) / FP8GPT_MICRO_BATCHES - 1;
  if (step < 0 || step >= steps)
    return fp8gpt_invalid("step is %lld, expected 0 to %lld", (long long)step, (long long)steps - 1);
  if (micro_batch < 0 || micro_batch >= FP8GPT_MICRO_BATCHES)
    return fp8gpt_invalid("micro_batch is %d, expected 0 to %d", micro_batch, FP8GPT_MICRO_BATCHES - 1);
  if (!loss) return fp8gpt_invalid("loss is NULL, expected where to put it");
  fp8gpt_pass now;
  memset(&now, 0, sizeof(now));
  now.sequences = batch->sequences;
  now.length = batch->length;
  now.rows = now.sequences * now.length;
  now.number = (uint32_t)(step * FP8GPT_MICRO_BATCHES) + (uint32_t)micro_batch;
  now.training = 1;
  now.first = first != 0;
  model->accumulated = now.first ? 1 : model->accumulated + 1;
  const int64_t count = counting(batch);
  now.runs = sort_rows(model, batch->tokens, now.rows);
  FP8GPT_TRY(upload(model, batch->tokens, batch->targets, now.rows, now.runs));
  FP8GPT_TRY(forward(model, &now));
  FP8GPT_TRY(head(model, &now, count ? loss_scale / (float)count : 0.0f));
  FP8GPT_TRY(backward(model, &now));
  return mean_loss(model, now.rows, count, loss);
}

fp8core_status fp8gpt_model_end_step(fp8gpt_model *model) {
  if (!model) return fp8gpt_invalid("model of fp8gpt_model_end_step() is NULL, expected a model");
  return model->scaling ? fp8core_scaling_update(model->scaling) : FP8CORE_OK;
}

fp8core_status fp8gpt_model_loss(fp8gpt_model *model, const fp8gpt_batch *batch, float *loss) {
  FP8GPT_TRY(check_batch(model, "fp8gpt_model_loss", batch));
  if (!loss) return fp8gpt_invalid("loss is NULL, expected where to put it");
  fp8gpt_pass now;
  memset(&now, 0, sizeof(now));
  now.sequences = batch->sequences;
  now.length = batch->length;
  now.rows = now.sequences * now.length;
  FP8GPT_TRY(upload(model, batch->tokens, batch->targets, now.rows, 0));
  FP8GPT_TRY(forward(model, &now));
  FP8GPT_TRY(head(model, &now, 0.0f));
  FP8GPT_TRY(release_head(model, FP8GPT_FORWARD));
  return mean_loss(model, now.rows, counting(batch), loss);
}

fp8core_status fp8gpt_model_next(fp8gpt_model *model, const int32_t *tokens, int count, int position, float *logits) {
  if (!model) return fp8gpt_invalid("model of fp8gpt_model_next() is NULL, expected a model");
  if (!model->options.inference)
    return fp8gpt_invalid("the model was created with inference 0, expected one for inference");
  if (!tokens) return fp8gpt_invalid("tokens is NULL, expected token ids");
  if (!logits) return fp8gpt_invalid("logits is NULL, expected memory for %d of them", model->config.vocabulary);
  if (position < 0 || count < 1 || (int64_t)position + count > model->config.sequence)
    return fp8gpt_invalid("position is %d and count %d, expected at least 0 and 1, and a sum of at most %d", position,
                          count, model->config.sequence);
  if (position > model->cached)
    return fp8gpt_invalid("position is %d, expected at most the %d tokens that were given before", position,
                          model->cached);
  for (int i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= model->config.vocabulary)
      return fp8gpt_invalid("token %d is %d, expected 0 to %d", i, tokens[i], model->config.vocabulary - 1);
  model->cached = position;
  fp8gpt_pass now;
  memset(&now, 0, sizeof(now));
  now.sequences = 1;
  now.length = count;
  now.rows = count;
  now.cached = 1;
  now.position = position;
  FP8GPT_TRY(upload(model, tokens, NULL, now.rows, 0));
  FP8GPT_TRY(forward(model, &now));
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const fp8core_tensor last =
    fp8gpt_matrix(model, (unsigned char *)model->normalised + (now.rows - 1) * model->config.hidden * size,
                  model->activation_dtype, 1, model->config.hidden);
  const fp8core_tensor result = fp8gpt_matrix(model, model->logits, FP8CORE_FP32, 1, model->config.vocabulary);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_b = 1;
  FP8GPT_TRY(fp8gpt_product(model, &options, &last, &model->parameters[model->output].weight, NULL, &result));
  FP8GPT_TRY(release_head(model, FP8GPT_FORWARD));
  FP8GPT_TRY(fp8core_copy(model->context, logits, model->logits, (size_t)model->config.vocabulary * sizeof(float)));
  model->cached = position + count;
  return FP8CORE_OK;
}
