#include "fp8gpt/model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/ops.h"
#include "internal.h"

#define ALIGNMENT 256
#define MOST_BYTES (INT64_C(1) << 62)

static const char *const precision_names[] = {"fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3"};

const char *fp8gpt_precision_name(fp8gpt_precision precision) {
  const unsigned index = (unsigned)precision;
  return index < sizeof(precision_names) / sizeof(*precision_names) ? precision_names[index] : "unknown";
}

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Parameters.

static int add_parameter(fp8gpt_model *model, const char *name, int dimensions, int64_t rows, int64_t columns,
                         int linear, float initial_std, float initial_value) {
  const int index = (int)model->parameter_count++;
  // The first pass only counts.
  if (!model->parameters) return index;
  fp8gpt_parameter_record *record = &model->parameters[index];
  (void)snprintf(record->name, sizeof(record->name), "%s", name);
  record->dimensions = dimensions;
  record->shape[0] = rows;
  record->shape[1] = columns;
  record->elements = dimensions == 1 ? rows : rows * columns;
  record->decay = dimensions == 2;
  record->linear = linear;
  record->part = model->listed_part;
  record->initial_std = initial_std;
  record->initial_value = initial_value;
  record->gradient_scale = -1;
  return index;
}

static int add_scale(fp8gpt_model *model, const char *layer, const char *what, fp8core_dtype dtype) {
  const int index = (int)model->scaled_tensors++;
  if (model->scale_dtypes) {
    model->scale_dtypes[index] = dtype;
    (void)snprintf(model->scale_names[index], FP8GPT_MAX_NAME, "%s.%s", layer, what);
  }
  return index;
}

static void add_linear(fp8gpt_model *model, fp8gpt_linear *layer, const char *name, int64_t outputs, int64_t inputs,
                       float initial_std) {
  char full[FP8GPT_MAX_NAME];
  (void)snprintf(full, sizeof(full), "%s.weight", name);
  layer->weight = add_parameter(model, full, 2, outputs, inputs, 1, initial_std, 0.0f);
  (void)snprintf(full, sizeof(full), "%s.bias", name);
  layer->bias = model->config.biases ? add_parameter(model, full, 1, outputs, 1, 0, 0.0f, 0.0f) : -1;
  layer->outputs = outputs;
  layer->inputs = inputs;
  layer->input_scale = -1;
  layer->output_gradient_scale = -1;
  layer->weight_scale = -1;
  if (!model->fp8) return;
  layer->input_scale = add_scale(model, name, "input", FP8CORE_E4M3);
  layer->output_gradient_scale = add_scale(model, name, "output_gradient", FP8CORE_E5M2);
  if (model->options.precision == FP8GPT_TE) {
    layer->weight_scale = add_scale(model, name, "weight", FP8CORE_E4M3);
  } else {
    const int scale = add_scale(model, name, "weight_gradient", FP8CORE_E4M3);
    if (model->parameters) model->parameters[layer->weight].gradient_scale = scale;
  }
}

static void add_norm(fp8gpt_model *model, fp8gpt_norm_layer *norm, const char *name) {
  char full[FP8GPT_MAX_NAME];
  (void)snprintf(full, sizeof(full), "%s.weight", name);
  norm->weight = add_parameter(model, full, 1, model->config.hidden, 1, 0, 0.0f, 1.0f);
  (void)snprintf(full, sizeof(full), "%s.bias", name);
  norm->bias = model->config.normalization == FP8GPT_LAYER_NORM
                 ? add_parameter(model, full, 1, model->config.hidden, 1, 0, 0.0f, 0.0f)
                 : -1;
}

// Lists parameters and scaled tensors; called twice, first to count them.
static void list_parameters(fp8gpt_model *model) {
  const fp8gpt_config *config = &model->config;
  const int64_t hidden = config->hidden;
  const int64_t head_dim = hidden / config->heads;
  const int64_t qkv = (config->heads + 2 * (int64_t)config->kv_heads) * head_dim;
  const int64_t fc1 = config->activation == FP8GPT_SWIGLU ? 2 * (int64_t)config->ffn_hidden : config->ffn_hidden;
  // GPT-2, section 2.3: weights that write to the residual are smaller by the root of the number of such layers.
  const float residual_std = config->init_std / sqrtf(2.0f * (float)config->layers);
  char name[FP8GPT_MAX_NAME];
  model->parameter_count = 0;
  model->scaled_tensors = 0;
  model->listed_part = 0;
  model->token_embedding =
    add_parameter(model, "embedding.token.weight", 2, config->vocabulary, hidden, 0, config->init_std, 0.0f);
  model->position_embedding =
    config->position == FP8GPT_LEARNED
      ? add_parameter(model, "embedding.position.weight", 2, config->sequence, hidden, 0, config->init_std, 0.0f)
      : -1;
  for (int i = 0; i < config->layers; i++) {
    fp8gpt_block *block = &model->blocks[i];
    model->listed_part++;
#define NAMED(format) ((void)snprintf(name, sizeof(name), "layers.%d." format, i), name)
    add_norm(model, &block->norm1, NAMED("attention_norm"));
    add_linear(model, &block->qkv, NAMED("attention.qkv"), qkv, hidden, config->init_std);
    add_linear(model, &block->projection, NAMED("attention.projection"), hidden, hidden, residual_std);
    add_norm(model, &block->norm2, NAMED("ffn_norm"));
    add_linear(model, &block->fc1, NAMED("ffn.fc1"), fc1, hidden, config->init_std);
    add_linear(model, &block->fc2, NAMED("ffn.fc2"), hidden, config->ffn_hidden, residual_std);
#undef NAMED
  }
  model->listed_part++;
  add_norm(model, &model->final_norm, "final_norm");
  model->output = config->tied_embeddings
                    ? model->token_embedding
                    : add_parameter(model, "output.weight", 2, config->vocabulary, hidden, 0, config->init_std, 0.0f);
}

// Memory. A block is laid out twice: first without memory, to count its bytes.

typedef struct layout {
  unsigned char *memory;
  int64_t bytes;
} layout;

static void *take(layout *place, int64_t bytes) {
  void *taken = place->memory ? place->memory + place->bytes : NULL;
  // No single array passes 2^62 bytes, but many layers of them may: more than any memory is asked for then.
  place->bytes = aligned(bytes) < MOST_BYTES - place->bytes ? place->bytes + aligned(bytes) : MOST_BYTES;
  return taken;
}

static fp8core_dtype weight_dtype(const fp8gpt_model *model, const fp8gpt_parameter_record *record) {
  const int in_fp8 = model->options.precision >= FP8GPT_FP8_O1;
  return record->linear && in_fp8 ? FP8CORE_E4M3 : model->activation_dtype;
}

// Vectors are small: their gradients are always FP32.
static fp8core_dtype gradient_dtype(const fp8gpt_model *model, const fp8gpt_parameter_record *record) {
  const int in_fp8 = model->options.precision >= FP8GPT_FP8_O1;
  if (record->dimensions == 1 || !in_fp8) return FP8CORE_FP32;
  return record->linear ? FP8CORE_E4M3 : FP8CORE_BF16;
}

static fp8core_tensor parameter_tensor(const fp8gpt_model *model, const fp8gpt_parameter_record *record,
                                       fp8core_dtype dtype, void *data) {
  fp8core_tensor tensor = fp8core_tensor_create(data, dtype, record->dimensions, record->shape);
  tensor.device = fp8core_context_device(model->context);
  return tensor;
}

static void lay_parameters(fp8gpt_model *model, layout *weights, layout *gradients) {
  for (int64_t i = 0; i < model->parameter_count; i++) {
    fp8gpt_parameter_record *record = &model->parameters[i];
    const fp8core_dtype weight = weight_dtype(model, record);
    const fp8core_dtype gradient = gradient_dtype(model, record);
    void *weight_data = NULL;
    void *gradient_data = NULL;
    if (!model->options.external_weights)
      weight_data = take(weights, record->elements * (int64_t)fp8core_dtype_size(weight));
    record->weight = parameter_tensor(model, record, weight, weight_data);
    if (!model->options.inference && !model->options.external_gradients)
      gradient_data = take(gradients, record->elements * (int64_t)fp8core_dtype_size(gradient));
    record->gradient = parameter_tensor(model, record, gradient, gradient_data);
  }
}

static void lay_linear(const fp8gpt_model *model, layout *place, fp8gpt_linear *layer) {
  const int64_t size = model->fp8 ? 1 : (int64_t)fp8core_dtype_size(model->activation_dtype);
  layer->input_data = take(place, model->rows * layer->inputs * size);
}

static void lay_norm(const fp8gpt_model *model, layout *place, fp8gpt_norm_layer *norm, int64_t size) {
  norm->sum = take(place, model->rows * model->config.hidden * size);
  norm->mean = take(place, model->rows * (int64_t)sizeof(float));
  norm->inverse_deviation = take(place, model->rows * (int64_t)sizeof(float));
}

// With recomputation all blocks share everything but their input.
static void lay_activations(fp8gpt_model *model, layout *place) {
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const int share = model->options.recompute || model->options.inference;
  int64_t shared_start = 0;
  for (int i = 0; i < model->config.layers; i++) {
    fp8gpt_block *block = &model->blocks[i];
    // Of the block's input: the sum that the first norm stores.
    if (!model->options.inference || i == 0)
      block->norm1.sum = take(place, model->rows * model->config.hidden * size);
    else
      block->norm1.sum = model->blocks[0].norm1.sum;
  }
  shared_start = place->bytes;
  for (int i = 0; i < model->config.layers; i++) {
    fp8gpt_block *block = &model->blocks[i];
    if (share) place->bytes = shared_start;
    block->norm1.mean = take(place, model->rows * (int64_t)sizeof(float));
    block->norm1.inverse_deviation = take(place, model->rows * (int64_t)sizeof(float));
    lay_linear(model, place, &block->qkv);
    block->qkv_out = take(place, model->rows * block->qkv.outputs * size);
    block->attention_out = take(place, model->rows * model->config.hidden * size);
    block->log_sums = take(place, model->rows * model->config.heads * (int64_t)sizeof(float));
    // In 16 and 32 bits the attention's output is the input itself.
    if (model->fp8) lay_linear(model, place, &block->projection);
    lay_norm(model, place, &block->norm2, size);
    lay_linear(model, place, &block->fc1);
    block->fc1_out = take(place, model->rows * block->fc1.outputs * size);
    lay_linear(model, place, &block->fc2);
  }
  lay_norm(model, place, &model->final_norm, size);
}

static int on_host(const fp8gpt_model *model) {
  return fp8core_context_device(model->context).type == FP8CORE_DEVICE_CPU;
}

static int64_t id_count(const fp8gpt_model *model) { return (model->options.inference ? 2 : 4) * model->rows + 1; }

static void lay_ids(const fp8gpt_model *model, layout *place, fp8gpt_ids *ids) {
  ids->tokens = take(place, id_count(model) * (int64_t)sizeof(int32_t));
  if (!ids->tokens) return;
  ids->targets = ids->tokens + model->rows;
  ids->order = ids->targets + model->rows;
  ids->starts = ids->order + model->rows;
}

static void lay_workspace(fp8gpt_model *model, layout *place) {
  const fp8gpt_config *config = &model->config;
  const fp8gpt_block *block = &model->blocks[0];
  const int64_t size = (int64_t)fp8core_dtype_size(model->activation_dtype);
  const int64_t hidden = config->hidden;
  const int64_t widest = larger(larger(block->qkv.outputs, block->fc1.outputs), hidden);
  const int64_t logit_rows = model->rows < model->backend->logit_rows ? model->rows : model->backend->logit_rows;
  model->normalised = take(place, model->rows * hidden * size);
  model->branch = take(place, model->rows * hidden * size);
  model->hidden = take(place, model->rows * config->ffn_hidden * size);
  if (!model->options.inference) {
    model->residual_gradient = take(place, model->rows * hidden * size);
    model->branch_gradient = take(place, model->rows * hidden * size);
    model->wide_gradient = take(place, model->rows * widest * size);
    if (model->fp8) model->quantised_gradient = take(place, model->rows * widest);
    model->logit_gradients = take(place, logit_rows * config->vocabulary * size);
  } else {
    model->cache =
      take(place, (int64_t)config->layers * config->sequence * 2 * config->kv_heads * (hidden / config->heads) * size);
  }
  if (model->options.precision == FP8GPT_TE)
    model->quantised_weight = take(place, larger(widest * hidden, hidden * config->ffn_hidden));
  model->logits = take(place, logit_rows * config->vocabulary * (int64_t)sizeof(float));
  model->angles = take(place, (int64_t)config->sequence * (hidden / config->heads) * (int64_t)sizeof(float));
  model->column_sums = take(place, widest * (int64_t)sizeof(float));
  model->scratch = take(place, model->backend->scratch_bytes(model));
  if (on_host(model)) return;
  lay_ids(model, place, &model->ids);
  model->losses = take(place, model->rows * (int64_t)sizeof(float));
}

static void lay_staging(fp8gpt_model *model, layout *place) {
  lay_ids(model, place, &model->host_ids);
  model->host_losses = take(place, model->rows * (int64_t)sizeof(float));
  if (!model->options.inference) model->token_rows = take(place, model->rows * (int64_t)sizeof(int64_t));
  if (!on_host(model)) return;
  model->ids = model->host_ids;
  model->losses = model->host_losses;
}

static void lay_all(fp8gpt_model *model) {
  layout weights = {model->weight_memory, 0};
  layout gradients = {model->gradient_memory, 0};
  layout activations = {model->activation_memory, 0};
  layout workspace = {model->workspace, 0};
  layout staging = {model->staging, 0};
  lay_parameters(model, &weights, &gradients);
  lay_activations(model, &activations);
  lay_workspace(model, &workspace);
  lay_staging(model, &staging);
  model->weight_bytes = weights.bytes;
  model->gradient_bytes = gradients.bytes;
  model->activation_bytes = activations.bytes;
  model->workspace_bytes = workspace.bytes;
  model->staging_bytes = staging.bytes;
}

static fp8core_status fill_angles(fp8gpt_model *model) {
  const int head_dim = model->config.hidden / model->config.heads;
  const size_t bytes = (size_t)model->config.sequence * (size_t)head_dim * sizeof(float);
  float *angles = malloc(bytes);
  if (!angles)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
  for (int64_t position = 0; position < model->config.sequence; position++)
    for (int i = 0; i < head_dim / 2; i++) {
      const double angle = (double)position * pow((double)model->config.rope_theta, -2.0 * i / (double)head_dim);
      angles[position * head_dim + i] = (float)cos(angle);
      angles[position * head_dim + head_dim / 2 + i] = (float)sin(angle);
    }
  const fp8core_status status = fp8core_copy(model->context, model->angles, angles, bytes);
  free(angles);
  return status;
}

// Initial weights.

static uint32_t name_hash(const char *name) {
  // FNV-1a.
  uint32_t hash = UINT32_C(2166136261);
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * UINT32_C(16777619);
  return hash;
}

// Box and Muller, two values of two draws.
static void normal_pair(uint32_t first, uint32_t second, float std, float *values) {
  const double radius = sqrt(-2.0 * log(((double)first + 1.0) / 4294967296.0));
  const double angle = 6.283185307179586 * ((double)second / 4294967296.0);
  values[0] = (float)(radius * cos(angle)) * std;
  values[1] = (float)(radius * sin(angle)) * std;
}

static void draw_values(const fp8gpt_model *model, int64_t index, float *values) {
  const fp8gpt_parameter_record *record = &model->parameters[index];
  const uint32_t id = name_hash(record->name);
  const int64_t blocks = (record->elements + 3) / 4;
  // Dropout draws with the steps as the last word.
  const uint32_t kind = UINT32_MAX;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(model->threads)
#endif
  for (int64_t block = 0; block < blocks; block++) {
    float drawn[4];
    if (record->initial_std > 0.0f) {
      uint32_t draws[4];
      fp8core_draw_block(model->options.seed, id, kind, (uint64_t)block, draws);
      normal_pair(draws[0], draws[1], record->initial_std, drawn);
      normal_pair(draws[2], draws[3], record->initial_std, drawn + 2);
    } else {
      for (int i = 0; i < 4; i++) drawn[i] = record->initial_value;
    }
    for (int i = 0; i < 4 && block * 4 + i < record->elements; i++) values[block * 4 + i] = drawn[i];
  }
}

// values: on the model's device.
static fp8core_status initial_values(const fp8gpt_model *model, int64_t index, float *values) {
  if (on_host(model)) {
    draw_values(model, index, values);
    return FP8CORE_OK;
  }
  const size_t bytes = (size_t)model->parameters[index].elements * sizeof(float);
  float *drawn = malloc(bytes);
  if (!drawn)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
  draw_values(model, index, drawn);
  const fp8core_status status = fp8core_copy(model->context, values, drawn, bytes);
  free(drawn);
  return status;
}

static fp8core_status initialise_weights(fp8gpt_model *model) {
  int64_t most = 0;
  int64_t linear = 0;
  for (int64_t i = 0; i < model->parameter_count; i++) {
    most = larger(most, model->parameters[i].elements);
    if (model->parameters[i].weight.dtype == FP8CORE_E4M3) linear++;
  }
  if (linear > 0) {
    fp8core_scaling_options options = fp8core_scaling_options_default();
    options.policy = FP8CORE_SCALING_JUST_IN_TIME;
    fp8core_dtype *dtypes = malloc((size_t)linear * sizeof(*dtypes));
    if (!dtypes)
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory",
                                    (size_t)linear * sizeof(*dtypes));
    for (int64_t i = 0; i < linear; i++) dtypes[i] = FP8CORE_E4M3;
    const fp8core_status status =
      fp8core_scaling_create(&model->weight_scaling, model->context, linear, dtypes, &options);
    free(dtypes);
    FP8GPT_TRY(status);
  }
  void *values;
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)most * sizeof(float), &values));
  fp8core_status status = FP8CORE_OK;
  int64_t scaled = 0;
  for (int64_t i = 0; i < model->parameter_count && status == FP8CORE_OK; i++) {
    fp8gpt_parameter_record *record = &model->parameters[i];
    status = initial_values(model, i, values);
    if (status != FP8CORE_OK) break;
    const fp8core_tensor source = parameter_tensor(model, record, FP8CORE_FP32, values);
    if (record->weight.dtype == FP8CORE_E4M3)
      status = fp8core_scaling_cast(model->weight_scaling, scaled++, NULL, &source, &record->weight, NULL);
    else
      status = fp8core_cast(model->context, NULL, &source, &record->weight);
  }
  (void)fp8core_free(model->context, values);
  return status;
}

static fp8core_status create_scaling(fp8gpt_model *model) {
  if (!model->fp8) return FP8CORE_OK;
  fp8core_scaling_options options = fp8core_scaling_options_default();
  options.policy = FP8CORE_SCALING_JUST_IN_TIME;
  FP8GPT_TRY(fp8core_scaling_create(&model->evaluation_scaling, model->context, model->scaled_tensors,
                                    model->scale_dtypes, &options));
  FP8GPT_TRY(fp8core_scaling_create(&model->scaling, model->context, model->scaled_tensors, model->scale_dtypes,
                                    &model->options.scaling));
  for (int64_t i = 0; i < model->parameter_count; i++)
    if (model->parameters[i].gradient_scale >= 0)
      FP8GPT_TRY(
        fp8core_scaling_bind(model->scaling, model->parameters[i].gradient_scale, &model->parameters[i].gradient));
  return FP8CORE_OK;
}

static fp8core_status create(fp8gpt_model *model) {
  model->blocks = calloc((size_t)model->config.layers, sizeof(*model->blocks));
  if (!model->blocks)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the table of %d layers",
                                  model->config.layers);
  list_parameters(model);
  model->parameters = calloc((size_t)model->parameter_count, sizeof(*model->parameters));
  model->scale_names = calloc((size_t)model->scaled_tensors + 1, sizeof(*model->scale_names));
  model->scale_dtypes = calloc((size_t)model->scaled_tensors + 1, sizeof(*model->scale_dtypes));
  if (!model->parameters || !model->scale_names || !model->scale_dtypes)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the table of %lld parameters",
                                  (long long)model->parameter_count);
  list_parameters(model);
  lay_all(model);
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)model->weight_bytes, &model->weight_memory));
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)model->gradient_bytes, &model->gradient_memory));
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)model->activation_bytes, &model->activation_memory));
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)model->workspace_bytes, &model->workspace));
  if (model->gradient_bytes > 0)
    FP8GPT_TRY(fp8core_zero(model->context, model->gradient_memory, (size_t)model->gradient_bytes));
  model->staging = malloc((size_t)model->staging_bytes);
  if (!model->staging)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %lld bytes of host memory",
                                  (long long)model->staging_bytes);
  lay_all(model);
  FP8GPT_TRY(fill_angles(model));
  FP8GPT_TRY(create_scaling(model));
  FP8GPT_TRY(fp8gpt_reserve(model));
  return model->options.external_weights ? FP8CORE_OK : initialise_weights(model);
}

fp8core_status fp8gpt_model_create(fp8gpt_model **model, fp8core_context *context, const fp8gpt_config *config,
                                   const fp8gpt_model_options *options) {
  if (!model) return fp8gpt_invalid("model of fp8gpt_model_create() is NULL, expected where to put the handle");
  *model = NULL;
  if (!context) return fp8gpt_invalid("context of fp8gpt_model_create() is NULL, expected a context");
  FP8GPT_TRY(fp8gpt_config_validate(config));
  const fp8gpt_model_options chosen = options ? *options : fp8gpt_model_options_default();
  if (chosen.size != sizeof(chosen))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8gpt_model_options.size is %zu, expected %zu",
                                  chosen.size, sizeof(chosen));
  if ((unsigned)chosen.precision > FP8GPT_FP8_O3)
    return fp8gpt_invalid("precision is %d, expected an fp8gpt_precision, 0 to %d", (int)chosen.precision,
                          (int)FP8GPT_FP8_O3);
  if (chosen.batch < 1 || (int64_t)chosen.batch * config->sequence > INT32_MAX)
    return fp8gpt_invalid("batch is %d, expected at least 1 and at most 2^31 - 1 tokens (sequence %d)", chosen.batch,
                          config->sequence);
  fp8gpt_model *created = calloc(1, sizeof(*created));
  if (!created) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a model");
  created->context = context;
  created->backend = &fp8gpt_cpu_backend;
  created->ops = fp8gpt_cpu_ops(fp8core_context_isa(context));
  created->config = *config;
  created->options = chosen;
  created->threads = fp8core_context_threads(context);
  created->fp8 = chosen.precision >= FP8GPT_TE;
  created->activation_dtype = chosen.precision == FP8GPT_FP32 ? FP8CORE_FP32 : FP8CORE_BF16;
  created->rows = (int64_t)chosen.batch * config->sequence;
  fp8core_status status = on_host(created) ? FP8CORE_OK : fp8gpt_cuda_init(created);
  if (status == FP8CORE_OK && created->backend->prepare) status = created->backend->prepare(created);
  if (status == FP8CORE_OK) status = create(created);
  if (status != FP8CORE_OK)
    fp8gpt_model_destroy(&created);
  else
    *model = created;
  return status;
}

void fp8gpt_model_destroy(fp8gpt_model **model) {
  if (!model || !*model) return;
  fp8gpt_model *destroyed = *model;
  *model = NULL;
  fp8core_scaling_destroy(&destroyed->scaling);
  fp8core_scaling_destroy(&destroyed->evaluation_scaling);
  fp8core_scaling_destroy(&destroyed->weight_scaling);
  (void)fp8core_free(destroyed->context, destroyed->weight_memory);
  (void)fp8core_free(destroyed->context, destroyed->gradient_memory);
  (void)fp8core_free(destroyed->context, destroyed->activation_memory);
  (void)fp8core_free(destroyed->context, destroyed->workspace);
  (void)fp8core_free(destroyed->context, destroyed->wide_weight_gradient);
  if (destroyed->backend->destroy) destroyed->backend->destroy(destroyed);
  free(destroyed->staging);
  free(destroyed->blocks);
  free(destroyed->parameters);
  free(destroyed->scale_names);
  free(destroyed->scale_dtypes);
  free(destroyed);
}

const fp8gpt_config *fp8gpt_model_config(const fp8gpt_model *model) { return model ? &model->config : NULL; }

const char *fp8gpt_model_attention(const fp8gpt_model *model) {
  return model ? model->backend->attention_by(model) : NULL;
}

int64_t fp8gpt_model_parameters(const fp8gpt_model *model) { return model ? model->parameter_count : 0; }

static fp8core_status check_index(const fp8gpt_model *model, const char *call, int64_t index, int64_t count) {
  if (!model) return fp8gpt_invalid("model of %s() is NULL, expected a model", call);
  if (index >= 0 && index < count) return FP8CORE_OK;
  return fp8gpt_invalid("index is %lld, expected 0 to %lld", (long long)index, (long long)count - 1);
}

fp8core_status fp8gpt_model_parameter(const fp8gpt_model *model, int64_t index, fp8gpt_parameter *parameter) {
  FP8GPT_TRY(check_index(model, "fp8gpt_model_parameter", index, fp8gpt_model_parameters(model)));
  if (!parameter) return fp8gpt_invalid("parameter is NULL, expected where to put the description");
  const fp8gpt_parameter_record *record = &model->parameters[index];
  parameter->name = record->name;
  parameter->dimensions = record->dimensions;
  parameter->shape[0] = record->shape[0];
  parameter->shape[1] = record->shape[1];
  parameter->decay = record->decay;
  parameter->linear = record->linear;
  parameter->part = record->part;
  parameter->weight = record->weight;
  parameter->gradient = record->gradient;
  parameter->gradient.amax = NULL;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_model_bind_weight(fp8gpt_model *model, int64_t index, const fp8core_tensor *weight) {
  FP8GPT_TRY(check_index(model, "fp8gpt_model_bind_weight", index, fp8gpt_model_parameters(model)));
  if (!weight) return fp8gpt_invalid("weight of fp8gpt_model_bind_weight() is NULL, expected a tensor");
  FP8GPT_TRY(fp8core_tensor_validate(weight));
  fp8gpt_parameter_record *record = &model->parameters[index];
  if (weight->dtype != record->weight.dtype)
    return fp8gpt_invalid("the weight of \"%s\" is %s, expected %s", record->name, fp8core_dtype_name(weight->dtype),
                          fp8core_dtype_name(record->weight.dtype));
  if (weight->dimensions != record->dimensions || weight->shape[0] != record->shape[0] ||
      (record->dimensions == 2 && weight->shape[1] != record->shape[1]))
    return fp8gpt_invalid("the weight of \"%s\" has another shape, expected [%lld, %lld]", record->name,
                          (long long)record->shape[0], record->dimensions == 2 ? (long long)record->shape[1] : 1);
  const fp8core_device device = fp8core_context_device(model->context);
  if (weight->device.type != device.type || weight->device.index != device.index)
    return fp8gpt_invalid("the weight of \"%s\" is on device %d:%d, expected %d:%d", record->name,
                          (int)weight->device.type, weight->device.index, (int)device.type, device.index);
  if (weight->row_stride != 0 && record->dimensions == 2 && weight->row_stride != record->shape[1])
    return fp8gpt_invalid("the weight of \"%s\" has a row stride of %lld, expected contiguous rows", record->name,
                          (long long)weight->row_stride);
  record->weight = *weight;
  record->weight.amax = NULL;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_model_bind_gradient(fp8gpt_model *model, int64_t index, void *data) {
  FP8GPT_TRY(check_index(model, "fp8gpt_model_bind_gradient", index, fp8gpt_model_parameters(model)));
  fp8gpt_parameter_record *record = &model->parameters[index];
  if (model->options.inference)
    return fp8gpt_invalid("the model was created with inference 1, expected one for training, which has gradients");
  if (!data) return fp8gpt_invalid("data of fp8gpt_model_bind_gradient() is NULL, expected memory");
  if ((uintptr_t)data % fp8core_dtype_size(record->gradient.dtype) != 0)
    return fp8gpt_invalid("the gradient of \"%s\" is at %p, expected an address that %zu divides", record->name, data,
                          fp8core_dtype_size(record->gradient.dtype));
  record->gradient.data = data;
  return FP8CORE_OK;
}

int fp8gpt_model_parts(const fp8gpt_model *model) { return model ? model->config.layers + 2 : 0; }

fp8core_status fp8gpt_model_set_hooks(fp8gpt_model *model, const fp8gpt_hooks *hooks) {
  static const fp8gpt_hooks none = {sizeof(none), NULL, NULL, NULL};
  if (!model) return fp8gpt_invalid("model of fp8gpt_model_set_hooks() is NULL, expected a model");
  if (hooks && hooks->size != sizeof(*hooks))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8gpt_hooks.size is %zu, expected %zu", hooks->size,
                                  sizeof(*hooks));
  model->hooks = hooks ? *hooks : none;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_model_initial_weight(const fp8gpt_model *model, int64_t index, float *values) {
  FP8GPT_TRY(check_index(model, "fp8gpt_model_initial_weight", index, fp8gpt_model_parameters(model)));
  if (!values) return fp8gpt_invalid("values of fp8gpt_model_initial_weight() is NULL, expected memory");
  return initial_values(model, index, values);
}

fp8core_status fp8gpt_memory_report(const fp8gpt_model *model, fp8gpt_memory *memory) {
  if (!model) return fp8gpt_invalid("model of fp8gpt_memory_report() is NULL, expected a model");
  if (!memory) return fp8gpt_invalid("memory of fp8gpt_memory_report() is NULL, expected where to put it");
  memset(memory, 0, sizeof(*memory));
  for (int64_t i = 0; i < model->parameter_count; i++) {
    const fp8gpt_parameter_record *record = &model->parameters[i];
    memory->parameters += record->elements;
    if (!model->options.external_weights)
      memory->weight_bytes += record->elements * (int64_t)fp8core_dtype_size(record->weight.dtype);
    if (!model->options.inference && !model->options.external_gradients)
      memory->gradient_bytes += record->elements * (int64_t)fp8core_dtype_size(record->gradient.dtype);
  }
  memory->activation_bytes = model->activation_bytes;
  memory->workspace_bytes =
    model->workspace_bytes + (model->wide_weight_gradient ? model->wide_weight_gradient_bytes : 0) +
    (on_host(model) ? model->staging_bytes : 0) + (int64_t)fp8core_context_workspace_bytes(model->context) +
    (int64_t)fp8core_scaling_memory_bytes(model->scaling) +
    (int64_t)fp8core_scaling_memory_bytes(model->evaluation_scaling) +
    (int64_t)fp8core_scaling_memory_bytes(model->weight_scaling) + model->weight_bytes + model->gradient_bytes -
    memory->weight_bytes - memory->gradient_bytes;
  return FP8CORE_OK;
}

int64_t fp8gpt_model_scaled_tensors(const fp8gpt_model *model) {
  return model && model->fp8 ? model->scaled_tensors : 0;
}

fp8core_status fp8gpt_model_scaled_tensor(fp8gpt_model *model, int64_t index, const char **name,
                                          fp8core_scaling_record *record) {
  FP8GPT_TRY(check_index(model, "fp8gpt_model_scaled_tensor", index, fp8gpt_model_scaled_tensors(model)));
  if (name) *name = model->scale_names[index];
  return record ? fp8core_scaling_get(model->scaling, index, record) : FP8CORE_OK;
}

fp8core_status fp8gpt_model_count_casts(fp8gpt_model *model, fp8core_cast_statistics *statistics) {
  if (!model) return fp8gpt_invalid("model of fp8gpt_model_count_casts() is NULL, expected a model");
  if (statistics && !model->fp8)
    return fp8gpt_invalid("the model computes in %s and has no scaled tensors to count the casts of",
                          fp8gpt_precision_name(model->options.precision));
  if ((uintptr_t)statistics % 8 != 0)
    return fp8gpt_invalid("statistics is at %p, expected 8-byte alignment", (void *)statistics);
  model->statistics = statistics;
  return FP8CORE_OK;
}

fp8core_scaling *fp8gpt_model_scaling(fp8gpt_model *model) { return model ? model->scaling : NULL; }
