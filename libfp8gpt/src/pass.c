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

typedef struct pass {
  int64_t sequences;
  int64_t length;
  int64_t rows;
  uint32_t number;
  int training;
  int first;
} pass;

// The loops of ops.h, divided among threads.

static float *thread_scratch(const fp8gpt_model *model) {
#if defined(_OPENMP)
  return model->scratch + (int64_t)omp_get_thread_num() * model->scratch_floats;
#else
  return model->scratch;
#endif
}

#define ROWS_AT_A_TIME 16

#if defined(_OPENMP)
#  define PARALLEL_FOR _Pragma("omp parallel for schedule(dynamic, 1) num_threads(threads)")
#else
#  define PARALLEL_FOR
#endif

#define FOR_ROWS(rows, begin, end, call)                                                                               \
  do {                                                                                                                 \
    const int64_t row_groups = ((rows) + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;                                         \
    const int threads = row_groups < model->threads ? (int)row_groups : model->threads;                                \
    (void)threads;                                                                                                     \
    PARALLEL_FOR                                                                                                       \
    for (int64_t row_group = 0; row_group < row_groups; row_group++) {                                                 \
      const int64_t begin = row_group * ROWS_AT_A_TIME;                                                                \
      const int64_t end = begin + ROWS_AT_A_TIME < (rows) ? begin + ROWS_AT_A_TIME : (rows);                           \
      call;                                                                                                            \
    }                                                                                                                  \
  } while (0)

static fp8gpt_norm norm_of(fp8gpt_model *model, const fp8gpt_norm_layer *layer, int64_t rows, const void *x,
                           const void *delta, fp8gpt_dropout dropout, void *y) {
  fp8gpt_norm norm;
  norm.type = model->config.normalization;
  norm.dtype = model->activation_dtype;
  norm.rows = rows;
  norm.columns = model->config.hidden;
  norm.eps = model->config.norm_eps;
  norm.x = x;
  norm.delta = delta;
  norm.dropout = dropout;
  norm.sum = layer->sum;
  norm.y = y;
  norm.weight = fp8gpt_vector(model, layer->weight, 0);
  norm.bias = fp8gpt_vector(model, layer->bias, 1);
  norm.mean = layer->mean;
  norm.inverse_deviation = layer->inverse_deviation;
  return norm;
}

// Where the outputs of a norm go that are the input of a linear layer: in 16 and 32 bits they are the saved input.
static void *input_of(const fp8gpt_model *model, const fp8gpt_linear *layer) {
  return model->fp8 ? model->normalised : layer->input_data;
}

static void norm_forward(fp8gpt_model *model, const fp8gpt_norm_layer *layer, int64_t rows, const void *x,
                         const void *delta, fp8gpt_dropout dropout, void *y) {
  const fp8gpt_norm norm = norm_of(model, layer, rows, x, delta, dropout, y);
  FOR_ROWS(rows, begin, end, model->ops->norm(&norm, begin, end, thread_scratch(model)));
}

// `dy` is the gradient of the norm's output; the residual's gradient is added to. With dropout the branch's gradient is
// written to branch_gradient.
static void norm_backward(fp8gpt_model *model, const fp8gpt_norm_layer *layer, const pass *now, const void *dy,
                          fp8gpt_dropout dropout) {
  fp8gpt_norm_backward backward;
  const int64_t columns = model->config.hidden;
  const int64_t groups = (now->rows + FP8GPT_NORM_GROUP - 1) / FP8GPT_NORM_GROUP;
  const int threads = model->threads;
  float *partials = model->norm_partials;
  // What was stored is the sum: no delta to add.
  backward.forward = norm_of(model, layer, now->rows, layer->sum, NULL, dropout, NULL);
  backward.dy = dy;
  backward.dx = model->residual_gradient;
  backward.ddelta = dropout.probability > 0.0f ? model->branch_gradient : NULL;
  memset(partials, 0, (size_t)(2 * groups * columns) * sizeof(float));
  (void)threads;
  PARALLEL_FOR
  for (int64_t group = 0; group < groups; group++) {
    const int64_t begin = group * FP8GPT_NORM_GROUP;
    const int64_t end = begin + FP8GPT_NORM_GROUP < now->rows ? begin + FP8GPT_NORM_GROUP : now->rows;
    model->ops->norm_backward(&backward, begin, end, partials + 2 * group * columns, thread_scratch(model));
  }
  for (int64_t group = 1; group < groups; group++)
    for (int64_t i = 0; i < 2 * columns; i++) partials[i] += partials[2 * group * columns + i];
  fp8gpt_add_vector_gradient(model, layer->weight, partials, now->first);
  if (layer->bias >= 0) fp8gpt_add_vector_gradient(model, layer->bias, partials + columns, now->first);
}

// Where the gradient of the branch that a norm added lies.
static const void *branch_gradient(const fp8gpt_model *model) {
  return model->config.dropout > 0.0f ? model->branch_gradient : model->residual_gradient;
}

static int64_t qkv_columns(const fp8gpt_model *model) {
  return (int64_t)(model->config.heads + 2 * model->config.kv_heads) * head_dim(model);
}

static void rotate(fp8gpt_model *model, void *qkv, int64_t rows, int64_t length, int64_t position, float sign) {
  if (model->config.position != FP8GPT_ROPE) return;
  const int heads = model->config.heads + model->config.kv_heads;
  const float *angles = model->angles + position * head_dim(model);
  FOR_ROWS(rows, begin, end,
           model->ops->rotate(model->activation_dtype, qkv, qkv_columns(model), begin, end, length, heads,
                              head_dim(model), angles, sign, thread_scratch(model)));
}

static fp8gpt_attention attention_of(const fp8gpt_model *model, const fp8gpt_block *block, const pass *now) {
  fp8gpt_attention attention;
  memset(&attention, 0, sizeof(attention));
  attention.dtype = model->activation_dtype;
  attention.sequences = now->sequences;
  attention.length = now->length;
  attention.heads = model->config.heads;
  attention.kv_heads = model->config.kv_heads;
  attention.head_dim = head_dim(model);
  attention.qkv = block->qkv_out;
  attention.out = block->attention_out;
  attention.log_sums = block->log_sums;
  return attention;
}

static void attention_forward(fp8gpt_model *model, const fp8gpt_block *block, const pass *now) {
  const fp8gpt_attention attention = attention_of(model, block, now);
  const int64_t tasks = now->sequences * model->config.heads;
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t task = 0; task < tasks; task++)
    model->ops->attention(&attention, task / model->config.heads, (int)(task % model->config.heads),
                          thread_scratch(model));
}

static void attention_backward(fp8gpt_model *model, const fp8gpt_block *block, const pass *now, const void *dout,
                               void *dqkv) {
  fp8gpt_attention attention = attention_of(model, block, now);
  attention.dout = dout;
  attention.dqkv = dqkv;
  const int64_t tasks = now->sequences * model->config.kv_heads;
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t task = 0; task < tasks; task++)
    model->ops->attention_backward(&attention, task / model->config.kv_heads, (int)(task % model->config.kv_heads),
                                   thread_scratch(model));
}

// Embeddings.

static void embed(fp8gpt_model *model, const int32_t *tokens, const pass *now, int64_t position) {
  const int64_t columns = model->config.hidden;
  const fp8core_dtype dtype = model->activation_dtype;
  const int64_t size = (int64_t)fp8core_dtype_size(dtype);
  const unsigned char *words = model->parameters[model->token_embedding].weight.data;
  const unsigned char *places =
    model->position_embedding >= 0 ? model->parameters[model->position_embedding].weight.data : NULL;
  const fp8gpt_dropout dropout = dropout_at(model, 0, now->number, now->training);
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t row = 0; row < now->rows; row++) {
    float *sum = thread_scratch(model);
    float *place = sum + columns;
    model->ops->load(dtype, words + (int64_t)tokens[row] * columns * size, columns, sum);
    if (places) {
      model->ops->load(dtype, places + (position + row % now->length) * columns * size, columns, place);
      for (int64_t i = 0; i < columns; i++) sum[i] += place[i];
    }
    model->ops->drop(&dropout, row * columns, columns, sum);
    model->ops->store(dtype, sum, columns, (unsigned char *)model->residual + row * columns * size);
  }
}

// Rows in the order of their tokens, so that each row of the gradient is one sum in FP32 and rounded once.
static int compare_pairs(const void *one, const void *other) {
  const int64_t a = *(const int64_t *)one;
  const int64_t b = *(const int64_t *)other;
  return (a > b) - (a < b);
}

static void add_row(fp8gpt_model *model, int parameter, int64_t row, const float *values, float *scratch) {
  const fp8core_tensor *gradient = &model->parameters[parameter].gradient;
  const int64_t columns = model->config.hidden;
  unsigned char *data = (unsigned char *)gradient->data + row * columns * (int64_t)fp8core_dtype_size(gradient->dtype);
  model->ops->load(gradient->dtype, data, columns, scratch);
  for (int64_t i = 0; i < columns; i++) scratch[i] += values[i];
  model->ops->store(gradient->dtype, scratch, columns, data);
}

static void embed_backward(fp8gpt_model *model, const int32_t *tokens, const pass *now) {
  const int64_t columns = model->config.hidden;
  const fp8core_dtype dtype = model->activation_dtype;
  const int64_t size = (int64_t)fp8core_dtype_size(dtype);
  const unsigned char *gradient = model->residual_gradient;
  const fp8gpt_dropout dropout = dropout_at(model, 0, now->number, 1);
  const int threads = model->threads;
  (void)threads;
  // Token in the upper half, row in the lower.
  int64_t *pairs = model->token_rows;
  for (int64_t row = 0; row < now->rows; row++) pairs[row] = (int64_t)tokens[row] << 32 | row;
  qsort(pairs, (size_t)now->rows, sizeof(*pairs), compare_pairs);
  int64_t runs = 0;
  for (int64_t i = 0; i < now->rows; i++)
    if (i == 0 || pairs[i] >> 32 != pairs[i - 1] >> 32) model->token_starts[runs++] = (int32_t)i;
  model->token_starts[runs] = (int32_t)now->rows;
  PARALLEL_FOR
  for (int64_t run = 0; run < runs; run++) {
    float *sum = thread_scratch(model);
    float *values = sum + columns;
    memset(sum, 0, (size_t)columns * sizeof(float));
    for (int32_t i = model->token_starts[run]; i < model->token_starts[run + 1]; i++) {
      const int64_t row = pairs[i] & INT64_C(0xffffffff);
      model->ops->load(dtype, gradient + row * columns * size, columns, values);
      model->ops->drop(&dropout, row * columns, columns, values);
      for (int64_t j = 0; j < columns; j++) sum[j] += values[j];
    }
    add_row(model, model->token_embedding, pairs[model->token_starts[run]] >> 32, sum, values);
  }
  if (model->position_embedding < 0) return;
  PARALLEL_FOR
  for (int64_t position = 0; position < now->length; position++) {
    float *sum = thread_scratch(model);
    float *values = sum + columns;
    memset(sum, 0, (size_t)columns * sizeof(float));
    for (int64_t sequence = 0; sequence < now->sequences; sequence++) {
      const int64_t row = sequence * now->length + position;
      model->ops->load(dtype, gradient + row * columns * size, columns, values);
      model->ops->drop(&dropout, row * columns, columns, values);
      for (int64_t j = 0; j < columns; j++) sum[j] += values[j];
    }
    add_row(model, model->position_embedding, position, sum, values);
  }
}

// Blocks.

static fp8core_status block_forward(fp8gpt_model *model, int index, const pass *now, const void *x, const void *delta) {
  fp8gpt_block *block = &model->blocks[index];
  const int64_t rows = now->rows;
  norm_forward(model, &block->norm1, rows, x, delta, dropout_at(model, 2 * index, now->number, now->training),
               input_of(model, &block->qkv));
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->qkv, rows, input_of(model, &block->qkv), block->qkv_out, now->training));
  rotate(model, block->qkv_out, rows, now->length, 0, 1.0f);
  attention_forward(model, block, now);
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->projection, rows, block->attention_out, model->branch, now->training));
  const void *sum = block->norm1.sum;
  norm_forward(model, &block->norm2, rows, sum, model->branch,
               dropout_at(model, 2 * index + 1, now->number, now->training), input_of(model, &block->fc1));
  if (model->config.activation == FP8GPT_GELU) {
    FP8GPT_TRY(fp8gpt_linear_forward_gelu(model, &block->fc1, &block->fc2, rows, input_of(model, &block->fc1),
                                          block->fc1_out, now->training));
    return fp8gpt_linear_forward_saved(model, &block->fc2, rows, model->branch, now->training);
  }
  FP8GPT_TRY(
    fp8gpt_linear_forward(model, &block->fc1, rows, input_of(model, &block->fc1), block->fc1_out, now->training));
  // In 16 bits the activations are the saved input themselves.
  void *activated = model->fp8 ? model->hidden : block->fc2.input_data;
  FOR_ROWS(rows, begin, end,
           model->ops->swiglu(model->activation_dtype, block->fc1_out, begin, end, model->config.ffn_hidden, activated,
                              thread_scratch(model)));
  return fp8gpt_linear_forward(model, &block->fc2, rows, activated, model->branch, now->training);
}

static fp8core_status block_backward(fp8gpt_model *model, int index, const pass *now) {
  fp8gpt_block *block = &model->blocks[index];
  const int64_t rows = now->rows;
  const int gelu = model->config.activation == FP8GPT_GELU;
  const fp8gpt_dropout none = dropout_at(model, 0, 0, 0);
  // Feed-forward part. The gradient of fc1's outputs is wide_gradient.
  FP8GPT_TRY(fp8gpt_linear_backward(model, &block->fc2, rows, branch_gradient(model), 1,
                                    gelu ? model->wide_gradient : model->hidden, gelu ? block->fc1_out : NULL,
                                    gelu ? block->fc1.bias : -1, now->first));
  if (!gelu)
    FOR_ROWS(rows, begin, end,
             model->ops->swiglu_backward(model->activation_dtype, block->fc1_out, model->hidden, begin, end,
                                         model->config.ffn_hidden, model->wide_gradient, thread_scratch(model)));
  FP8GPT_TRY(fp8gpt_linear_backward(model, &block->fc1, rows, model->wide_gradient, !gelu, model->normalised, NULL, -1,
                                    now->first));
  norm_backward(model, &block->norm2, now, model->normalised,
                model->config.dropout > 0.0f ? dropout_at(model, 2 * index + 1, now->number, 1) : none);
  // Attention part.
  FP8GPT_TRY(fp8gpt_linear_backward(model, &block->projection, rows, branch_gradient(model), 1, model->branch, NULL, -1,
                                    now->first));
  attention_backward(model, block, now, model->branch, model->wide_gradient);
  rotate(model, model->wide_gradient, rows, now->length, 0, -1.0f);
  FP8GPT_TRY(
    fp8gpt_linear_backward(model, &block->qkv, rows, model->wide_gradient, 1, model->normalised, NULL, -1, now->first));
  norm_backward(model, &block->norm1, now, model->normalised,
                model->config.dropout > 0.0f && index > 0 ? dropout_at(model, 2 * index, now->number, 1) : none);
  return FP8CORE_OK;
}

// The output layer and the loss, some rows at a time. With training the gradient of the final norm's outputs is left in
// model->branch.
static fp8core_status head(fp8gpt_model *model, const int32_t *targets, const pass *now, float scale) {
  const int64_t columns = model->config.hidden;
  const int64_t vocabulary = model->config.vocabulary;
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const fp8gpt_parameter_record *output = &model->parameters[model->output];
  const fp8core_tensor gradient = output->gradient;
  for (int64_t row = 0; row < now->rows; row += FP8GPT_LOGIT_ROWS) {
    const int64_t rows = now->rows - row < FP8GPT_LOGIT_ROWS ? now->rows - row : FP8GPT_LOGIT_ROWS;
    const fp8core_tensor input = fp8gpt_matrix(model, (unsigned char *)model->normalised + row * columns * size,
                                               model->activation_dtype, rows, columns);
    const fp8core_tensor logits = fp8gpt_matrix(model, model->logits, FP8CORE_FP32, rows, vocabulary);
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.transpose_b = 1;
    FP8GPT_TRY(fp8core_gemm(model->context, &options, &input, &output->weight, NULL, &logits));
    fp8gpt_cross_entropy loss;
    loss.rows = rows;
    loss.vocabulary = vocabulary;
    loss.logits = model->logits;
    loss.targets = targets + row;
    loss.scale = scale;
    loss.losses = model->losses + row;
    loss.dtype = model->activation_dtype;
    loss.dlogits = now->training ? model->logit_gradients : NULL;
    FOR_ROWS(rows, begin, end, model->ops->cross_entropy(&loss, begin, end, thread_scratch(model)));
    if (!now->training) continue;
    const fp8core_tensor dlogits =
      fp8gpt_matrix(model, model->logit_gradients, model->activation_dtype, rows, vocabulary);
    const fp8core_tensor result = fp8gpt_matrix(model, (unsigned char *)model->branch + row * columns * size,
                                                model->activation_dtype, rows, columns);
    const int set = now->first && row == 0;
    options = fp8core_gemm_options_default();
    options.transpose_a = 1;
    options.beta = set ? 0.0f : 1.0f;
    FP8GPT_TRY(fp8core_gemm(model->context, &options, &dlogits, &input, set ? NULL : &gradient, &gradient));
    options = fp8core_gemm_options_default();
    FP8GPT_TRY(fp8core_gemm(model->context, &options, &dlogits, &output->weight, NULL, &result));
  }
  return FP8CORE_OK;
}

static fp8core_status zero_gradient(fp8gpt_model *model, int parameter) {
  const fp8core_tensor *gradient = &model->parameters[parameter].gradient;
  return fp8core_zero(model->context, gradient->data, (size_t)fp8core_tensor_span_bytes(gradient));
}

static fp8core_status forward(fp8gpt_model *model, const int32_t *tokens, const pass *now) {
  embed(model, tokens, now, 0);
  const void *x = model->residual;
  const void *delta = NULL;
  for (int i = 0; i < model->config.layers; i++) {
    if (i == 0) {
      // The first norm stores no sum: the embedding is moved to where the backward pass reads it.
      const size_t bytes = (size_t)(now->rows * model->config.hidden) * fp8core_dtype_size(model->activation_dtype);
      memcpy(model->blocks[0].norm1.sum, model->residual, bytes);
      x = model->blocks[0].norm1.sum;
    }
    FP8GPT_TRY(block_forward(model, i, now, x, delta));
    x = model->blocks[i].norm2.sum;
    delta = model->branch;
  }
  norm_forward(model, &model->final_norm, now->rows, x, delta,
               dropout_at(model, 2 * model->config.layers, now->number, now->training), model->normalised);
  return FP8CORE_OK;
}

static fp8core_status backward(fp8gpt_model *model, const int32_t *tokens, const pass *now) {
  const size_t bytes = (size_t)(now->rows * model->config.hidden) * fp8core_dtype_size(model->activation_dtype);
  memset(model->residual_gradient, 0, bytes);
  norm_backward(model, &model->final_norm, now, model->branch,
                dropout_at(model, 2 * model->config.layers, now->number, 1));
  for (int i = model->config.layers - 1; i >= 0; i--) {
    if (model->options.recompute) {
      // From the block's input, which its first norm kept, with the same scales and draws.
      fp8gpt_norm_layer *norm = &model->blocks[i].norm1;
      FP8GPT_TRY(block_forward(model, i, now, norm->sum, NULL));
    }
    FP8GPT_TRY(block_backward(model, i, now));
  }
  embed_backward(model, tokens, now);
  return FP8CORE_OK;
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

static float mean_loss(const fp8gpt_model *model, int64_t rows, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < rows; i++) sum += (double)model->losses[i];
  return count ? (float)(sum / (double)count) : 0.0f;
}

fp8core_status fp8gpt_model_train(fp8gpt_model *model, const fp8gpt_batch *batch, int first, float loss_scale,
                                  int64_t step, int micro_batch, float *loss) {
  FP8GPT_TRY(check_batch(model, "fp8gpt_model_train", batch));
  if (model->options.inference)
    return fp8gpt_invalid("the model was created with inference 1, expected one for training");
  if (!(isfinite(loss_scale) && loss_scale > 0.0f))
    return fp8gpt_invalid("loss_scale is %g, expected a finite positive number", (double)loss_scale);
  if (step < 0 || step >= (int64_t)1 << 24)
    return fp8gpt_invalid("step is %lld, expected 0 to 2^24 - 1", (long long)step);
  if (micro_batch < 0 || micro_batch > 255) return fp8gpt_invalid("micro_batch is %d, expected 0 to 255", micro_batch);
  if (!loss) return fp8gpt_invalid("loss is NULL, expected where to put it");
  pass now;
  now.sequences = batch->sequences;
  now.length = batch->length;
  now.rows = now.sequences * now.length;
  now.number = (uint32_t)step << 8 | (uint32_t)micro_batch;
  now.training = 1;
  now.first = first != 0;
  const int64_t count = counting(batch);
  if (now.first) {
    if (model->output != model->token_embedding) FP8GPT_TRY(zero_gradient(model, model->token_embedding));
    if (model->position_embedding >= 0) FP8GPT_TRY(zero_gradient(model, model->position_embedding));
  }
  FP8GPT_TRY(forward(model, batch->tokens, &now));
  FP8GPT_TRY(head(model, batch->targets, &now, count ? loss_scale / (float)count : 0.0f));
  FP8GPT_TRY(backward(model, batch->tokens, &now));
  *loss = mean_loss(model, now.rows, count);
  return FP8CORE_OK;
}

fp8core_status fp8gpt_model_end_step(fp8gpt_model *model) {
  if (!model) return fp8gpt_invalid("model of fp8gpt_model_end_step() is NULL, expected a model");
  return model->scaling ? fp8core_scaling_update(model->scaling) : FP8CORE_OK;
}

fp8core_status fp8gpt_model_loss(fp8gpt_model *model, const fp8gpt_batch *batch, float *loss) {
  FP8GPT_TRY(check_batch(model, "fp8gpt_model_loss", batch));
  if (!loss) return fp8gpt_invalid("loss is NULL, expected where to put it");
  pass now;
  now.sequences = batch->sequences;
  now.length = batch->length;
  now.rows = now.sequences * now.length;
  now.number = 0;
  now.training = 0;
  now.first = 0;
  FP8GPT_TRY(forward(model, batch->tokens, &now));
  FP8GPT_TRY(head(model, batch->targets, &now, 0.0f));
  *loss = mean_loss(model, now.rows, counting(batch));
  return FP8CORE_OK;
}

// The keys and values of new tokens go to the cache, and their queries meet all of it.
static void attention_cached(fp8gpt_model *model, int index, const pass *now, int64_t position) {
  fp8gpt_block *block = &model->blocks[index];
  fp8gpt_attention attention = attention_of(model, block, now);
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const int64_t cached = 2 * (int64_t)model->config.kv_heads * head_dim(model) * size;
  unsigned char *cache = (unsigned char *)model->cache + index * model->config.sequence * cached;
  for (int64_t row = 0; row < now->rows; row++)
    memcpy(cache + (position + row) * cached,
           (unsigned char *)block->qkv_out +
             (row * qkv_columns(model) + (int64_t)model->config.heads * head_dim(model)) * size,
           (size_t)cached);
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int head_index = 0; head_index < model->config.heads; head_index++)
    model->ops->attention_cached(&attention, cache, position, head_index, thread_scratch(model));
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
  pass now;
  memset(&now, 0, sizeof(now));
  now.sequences = 1;
  now.length = count;
  now.rows = count;
  const fp8gpt_dropout none = dropout_at(model, 0, 0, 0);
  embed(model, tokens, &now, position);
  const void *x = model->residual;
  const void *delta = NULL;
  for (int i = 0; i < model->config.layers; i++) {
    fp8gpt_block *block = &model->blocks[i];
    norm_forward(model, &block->norm1, now.rows, x, delta, none, input_of(model, &block->qkv));
    const void *sum = delta ? block->norm1.sum : x;
    FP8GPT_TRY(fp8gpt_linear_forward(model, &block->qkv, now.rows, input_of(model, &block->qkv), block->qkv_out, 0));
    rotate(model, block->qkv_out, now.rows, now.length, position, 1.0f);
    attention_cached(model, i, &now, position);
    FP8GPT_TRY(fp8gpt_linear_forward(model, &block->projection, now.rows, block->attention_out, model->branch, 0));
    norm_forward(model, &block->norm2, now.rows, sum, model->branch, none, input_of(model, &block->fc1));
    if (model->config.activation == FP8GPT_GELU) {
      FP8GPT_TRY(fp8gpt_linear_forward_gelu(model, &block->fc1, &block->fc2, now.rows, input_of(model, &block->fc1),
                                            block->fc1_out, 0));
      FP8GPT_TRY(fp8gpt_linear_forward_saved(model, &block->fc2, now.rows, model->branch, 0));
    } else {
      void *activated = model->fp8 ? model->hidden : block->fc2.input_data;
      FP8GPT_TRY(fp8gpt_linear_forward(model, &block->fc1, now.rows, input_of(model, &block->fc1), block->fc1_out, 0));
      FOR_ROWS(now.rows, begin, end,
               model->ops->swiglu(model->activation_dtype, block->fc1_out, begin, end, model->config.ffn_hidden,
                                  activated, thread_scratch(model)));
      FP8GPT_TRY(fp8gpt_linear_forward(model, &block->fc2, now.rows, activated, model->branch, 0));
    }
    x = block->norm2.sum;
    delta = model->branch;
  }
  norm_forward(model, &model->final_norm, now.rows, x, delta, none, model->normalised);
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const fp8core_tensor last =
    fp8gpt_matrix(model, (unsigned char *)model->normalised + (now.rows - 1) * model->config.hidden * size,
                  model->activation_dtype, 1, model->config.hidden);
  const fp8core_tensor result = fp8gpt_matrix(model, logits, FP8CORE_FP32, 1, model->config.vocabulary);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_b = 1;
  FP8GPT_TRY(fp8core_gemm(model->context, &options, &last, &model->parameters[model->output].weight, NULL, &result));
  model->cached = position + count;
  return FP8CORE_OK;
}
