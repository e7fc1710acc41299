#include "reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../support.h"
#include "numerics.h"

static void *cleared(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) fail_msg("cannot allocate %zu bytes", count * size);
  return memory;
}

static int index_of(const fp8gpt_model *model, const char *name) {
  for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
    fp8gpt_parameter parameter;
    assert_ok(fp8gpt_model_parameter(model, i, &parameter));
    if (strcmp(parameter.name, name) == 0) return (int)i;
  }
  return -1;
}

reference *reference_create(const fp8gpt_model *model, uint64_t seed) {
  static const char *const parts[] = {"attention_norm", "attention.qkv", "attention.projection",
                                      "ffn_norm",       "ffn.fc1",       "ffn.fc2"};
  reference *created = cleared(1, sizeof(*created));
  created->config = *fp8gpt_model_config(model);
  created->seed = seed;
  created->count = fp8gpt_model_parameters(model);
  created->values = cleared((size_t)created->count, sizeof(*created->values));
  created->elements = cleared((size_t)created->count, sizeof(*created->elements));
  for (int64_t i = 0; i < created->count; i++) {
    fp8gpt_parameter parameter;
    assert_ok(fp8gpt_model_parameter(model, i, &parameter));
    const int64_t elements = fp8core_tensor_elements(&parameter.weight);
    const size_t size = fp8core_dtype_size(parameter.weight.dtype);
    const double scale = parameter.weight.scale_inverse ? (double)*parameter.weight.scale_inverse : 1.0;
    created->elements[i] = elements;
    created->values[i] = cleared((size_t)elements, sizeof(double));
    for (int64_t j = 0; j < elements; j++) {
      uint32_t code = 0;
      memcpy(&code, (const unsigned char *)parameter.weight.data + (size_t)j * size, size);
      created->values[i][j] = (double)fp8core_decode(parameter.weight.dtype, code) * scale;
    }
  }
  created->token = index_of(model, "embedding.token.weight");
  created->position = index_of(model, "embedding.position.weight");
  created->output = index_of(model, "output.weight");
  if (created->output < 0) created->output = created->token;
  created->final_norm[0] = index_of(model, "final_norm.weight");
  created->final_norm[1] = index_of(model, "final_norm.bias");
  created->layers = cleared((size_t)created->config.layers, sizeof(*created->layers));
  for (int layer = 0; layer < created->config.layers; layer++)
    for (int part = 0; part < 6; part++)
      for (int which = 0; which < 2; which++) {
        char name[64];
        (void)snprintf(name, sizeof(name), "layers.%d.%s.%s", layer, parts[part], which ? "bias" : "weight");
        created->layers[layer][part][which] = index_of(model, name);
      }
  return created;
}

void reference_destroy(reference *freed) {
  for (int64_t i = 0; i < freed->count; i++) free(freed->values[i]);
  free(freed->values);
  free(freed->elements);
  free(freed->layers);
  free(freed);
}

static const double *parameter_of(const reference *model, int index) { return index < 0 ? NULL : model->values[index]; }

static void normalise(const reference *model, const int parameters[2], const double *x, double *y) {
  const int columns = model->config.hidden;
  const double *weight = parameter_of(model, parameters[0]);
  const double *bias = parameter_of(model, parameters[1]);
  double mean = 0.0;
  double square = 0.0;
  if (model->config.normalization == FP8GPT_LAYER_NORM)
    for (int i = 0; i < columns; i++) mean += x[i] / columns;
  for (int i = 0; i < columns; i++) square += (x[i] - mean) * (x[i] - mean) / columns;
  for (int i = 0; i < columns; i++)
    y[i] = (x[i] - mean) / sqrt(square + (double)model->config.norm_eps) * weight[i] + (bias ? bias[i] : 0.0);
}

static void linear(const reference *model, const int parameters[2], int64_t rows, int inputs, int outputs,
                   const double *x, double *y) {
  const double *weight = parameter_of(model, parameters[0]);
  const double *bias = parameter_of(model, parameters[1]);
  for (int64_t row = 0; row < rows; row++)
    for (int j = 0; j < outputs; j++) {
      double sum = bias ? bias[j] : 0.0;
      for (int i = 0; i < inputs; i++) sum += x[row * inputs + i] * weight[(int64_t)j * inputs + i];
      y[row * outputs + j] = sum;
    }
}

static void rotate(double *vector, int head_dim, int64_t position, double theta) {
  for (int i = 0; i < head_dim / 2; i++) {
    const double angle = (double)position * pow(theta, -2.0 * i / head_dim);
    const double low = vector[i];
    const double high = vector[i + head_dim / 2];
    vector[i] = low * cos(angle) - high * sin(angle);
    vector[i + head_dim / 2] = high * cos(angle) + low * sin(angle);
  }
}

static void attend(const fp8gpt_config *config, int64_t length, double *qkv, double *out, double *scores) {
  const int head_dim = config->hidden / config->heads;
  const int64_t stride = (int64_t)(config->heads + 2 * config->kv_heads) * head_dim;
  if (config->position == FP8GPT_ROPE)
    for (int64_t row = 0; row < length; row++)
      for (int head = 0; head < config->heads + config->kv_heads; head++)
        rotate(qkv + row * stride + (int64_t)head * head_dim, head_dim, row, (double)config->rope_theta);
  for (int head = 0; head < config->heads; head++) {
    const int kv_head = head / (config->heads / config->kv_heads);
    const double *keys = qkv + (int64_t)(config->heads + kv_head) * head_dim;
    const double *values = keys + (int64_t)config->kv_heads * head_dim;
    for (int64_t row = 0; row < length; row++) {
      const double *query = qkv + row * stride + (int64_t)head * head_dim;
      double *result = out + row * config->hidden + (int64_t)head * head_dim;
      double largest = -INFINITY;
      double sum = 0.0;
      for (int64_t key = 0; key <= row; key++) {
        scores[key] = 0.0;
        for (int i = 0; i < head_dim; i++) scores[key] += query[i] * keys[key * stride + i];
        scores[key] /= sqrt((double)head_dim);
        largest = fmax(largest, scores[key]);
      }
      for (int64_t key = 0; key <= row; key++) {
        scores[key] = exp(scores[key] - largest);
        sum += scores[key];
      }
      for (int i = 0; i < head_dim; i++) {
        result[i] = 0.0;
        for (int64_t key = 0; key <= row; key++) result[i] += scores[key] / sum * values[key * stride + i];
      }
    }
  }
}

static void drop(const reference *model, int place, int64_t step, int micro_batch, int64_t count, double *values) {
  const double probability = (double)model->config.dropout;
  if (step < 0 || probability == 0.0) return;
  const uint32_t pass = (uint32_t)(step * FP8GPT_MICRO_BATCHES + micro_batch);
  for (int64_t i = 0; i < count; i++) {
    const double draw = (double)fp8core_draw(model->seed, (uint32_t)place, pass, (uint64_t)i) * 0x1p-32;
    values[i] = draw < probability ? 0.0 : values[i] / (1.0 - probability);
  }
}

double reference_loss(const reference *model, const fp8gpt_batch *batch, int64_t step, int micro_batch,
                      double *logits) {
  const fp8gpt_config *config = &model->config;
  const int hidden = config->hidden;
  const int head_dim = hidden / config->heads;
  const int qkv_columns = (config->heads + 2 * config->kv_heads) * head_dim;
  const int gated = config->activation == FP8GPT_SWIGLU;
  const int ffn = config->ffn_hidden;
  const int64_t length = batch->length;
  const int64_t rows = batch->sequences * length;
  double *x = cleared((size_t)(rows * hidden), sizeof(double));
  double *y = cleared((size_t)(rows * hidden), sizeof(double));
  double *branch = cleared((size_t)(rows * hidden), sizeof(double));
  double *qkv = cleared((size_t)(rows * qkv_columns), sizeof(double));
  double *up = cleared((size_t)(rows * ffn * 2), sizeof(double));
  double *scores = cleared((size_t)length, sizeof(double));
  double *row_logits = cleared((size_t)config->vocabulary, sizeof(double));
  for (int64_t row = 0; row < rows; row++)
    for (int i = 0; i < hidden; i++) {
      x[row * hidden + i] = model->values[model->token][(int64_t)batch->tokens[row] * hidden + i];
      if (config->position == FP8GPT_LEARNED)
        x[row * hidden + i] += model->values[model->position][row % length * hidden + i];
    }
  drop(model, 0, step, micro_batch, rows * hidden, x);
  for (int layer = 0; layer < config->layers; layer++) {
    const int(*parts)[2] = model->layers[layer];
    for (int64_t row = 0; row < rows; row++) normalise(model, parts[0], x + row * hidden, y + row * hidden);
    linear(model, parts[1], rows, hidden, qkv_columns, y, qkv);
    for (int sequence = 0; sequence < batch->sequences; sequence++)
      attend(config, length, qkv + sequence * length * qkv_columns, y + sequence * length * hidden, scores);
    linear(model, parts[2], rows, hidden, hidden, y, branch);
    drop(model, 2 * layer + 1, step, micro_batch, rows * hidden, branch);
    for (int64_t i = 0; i < rows * hidden; i++) x[i] += branch[i];
    for (int64_t row = 0; row < rows; row++) normalise(model, parts[3], x + row * hidden, y + row * hidden);
    linear(model, parts[4], rows, hidden, gated ? 2 * ffn : ffn, y, up);
    for (int64_t row = 0; row < rows; row++)
      for (int i = 0; i < ffn; i++) {
        // In place: row `row` of the result never passes what is still to be read.
        if (gated) {
          const double gate = up[row * 2 * ffn + i];
          up[row * ffn + i] = gate / (1.0 + exp(-gate)) * up[row * 2 * ffn + ffn + i];
        } else {
          const double u = up[row * ffn + i];
          up[row * ffn + i] = 0.5 * u * (1.0 + tanh(0.7978845608028654 * (u + 0.044715 * u * u * u)));
        }
      }
    linear(model, parts[5], rows, ffn, hidden, up, branch);
    drop(model, 2 * layer + 2, step, micro_batch, rows * hidden, branch);
    for (int64_t i = 0; i < rows * hidden; i++) x[i] += branch[i];
  }
  double loss = 0.0;
  int64_t counted = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int output[2] = {model->output, -1};
    double sum = 0.0;
    double largest = -INFINITY;
    if (!logits && batch->targets[row] < 0) continue;
    normalise(model, model->final_norm, x + row * hidden, y);
    linear(model, output, 1, hidden, config->vocabulary, y, row_logits);
    if (logits) memcpy(logits + row * config->vocabulary, row_logits, (size_t)config->vocabulary * sizeof(double));
    if (batch->targets[row] < 0) continue;
    for (int i = 0; i < config->vocabulary; i++) largest = fmax(largest, row_logits[i]);
    for (int i = 0; i < config->vocabulary; i++) sum += exp(row_logits[i] - largest);
    loss += log(sum) + largest - row_logits[batch->targets[row]];
    counted++;
  }
  free(x);
  free(y);
  free(branch);
  free(qkv);
  free(up);
  free(scores);
  free(row_logits);
  return counted ? loss / (double)counted : 0.0;
}
