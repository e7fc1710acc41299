#include "fp8gpt/config.h"

#include <math.h>
#include <string.h>

#include "internal.h"

typedef struct preset {
  const char *name;
  int layers;
  int hidden;
  int heads;
  int kv_heads;
  int ffn_hidden;
  int vocabulary;
  int sequence;
  fp8gpt_normalization normalization;
  fp8gpt_activation activation;
  fp8gpt_position position;
  int tied;
  int biases;
} preset;

// FP8-LM table 1 (shapes; vocabulary of GPT-NeoX, section 3.1); GPT-2 table 2; Llama table 2.
static const preset presets[] = {
  {"gpt-125m", 12, 768, 12, 12, 3072, 50257, 2048, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_ROPE, 1, 1},
  {"gpt-7b", 32, 4096, 32, 32, 16384, 50257, 2048, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_ROPE, 1, 1},
  {"gpt-13b", 40, 5120, 40, 40, 20480, 50257, 2048, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_ROPE, 1, 1},
  {"gpt-175b", 96, 12288, 96, 96, 49152, 50257, 2048, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_ROPE, 1, 1},
  {"gpt2-124m", 12, 768, 12, 12, 3072, 50257, 1024, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_LEARNED, 1, 1},
  {"llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048, FP8GPT_RMS_NORM, FP8GPT_SWIGLU, FP8GPT_ROPE, 0, 0},
  {"tiny-gpt", 4, 256, 4, 4, 1024, 257, 256, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_ROPE, 1, 1},
  {"tiny-gpt2", 4, 256, 4, 4, 1024, 257, 256, FP8GPT_LAYER_NORM, FP8GPT_GELU, FP8GPT_LEARNED, 1, 1},
  {"tiny-llama", 4, 256, 4, 2, 688, 257, 256, FP8GPT_RMS_NORM, FP8GPT_SWIGLU, FP8GPT_ROPE, 0, 0},
};

#define PRESETS ((int)(sizeof(presets) / sizeof(*presets)))

const char *fp8gpt_config_preset_name(int index) { return index >= 0 && index < PRESETS ? presets[index].name : NULL; }

fp8core_status fp8gpt_config_preset(const char *name, fp8gpt_config *config) {
  if (!name) return fp8gpt_invalid("name of fp8gpt_config_preset() is NULL, expected a preset's name");
  if (!config) return fp8gpt_invalid("config of fp8gpt_config_preset() is NULL, expected where to put it");
  for (int i = 0; i < PRESETS; i++) {
    const preset *found = &presets[i];
    if (strcmp(found->name, name) != 0) continue;
    memset(config, 0, sizeof(*config));
    config->size = sizeof(*config);
    config->layers = found->layers;
    config->hidden = found->hidden;
    config->heads = found->heads;
    config->kv_heads = found->kv_heads;
    config->ffn_hidden = found->ffn_hidden;
    config->vocabulary = found->vocabulary;
    config->sequence = found->sequence;
    config->normalization = found->normalization;
    config->activation = found->activation;
    config->position = found->position;
    config->tied_embeddings = found->tied;
    config->biases = found->biases;
    config->norm_eps = 1e-5f;
    config->rope_theta = 10000.0f;
    config->dropout = 0.0f;
    config->init_std = 0.02f;
    return FP8CORE_OK;
  }
  return fp8gpt_invalid("there is no preset \"%s\", expected one of gpt-125m, gpt-7b, gpt-13b, gpt-175b, gpt2-124m, "
                        "llama-7b, tiny-gpt, tiny-gpt2, tiny-llama",
                        name);
}

static fp8core_status check_range(const char *field, int value, int least, int most) {
  if (value >= least && value <= most) return FP8CORE_OK;
  return fp8gpt_invalid("%s is %d, expected %d to %d", field, value, least, most);
}

fp8core_status fp8gpt_config_validate(const fp8gpt_config *config) {
  if (!config) return fp8gpt_invalid("config is NULL, expected a config");
  if (config->size != sizeof(*config))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8gpt_config.size is %zu, expected %zu",
                                  config->size, sizeof(*config));
  FP8GPT_TRY(check_range("layers", config->layers, 1, 10000));
  FP8GPT_TRY(check_range("hidden", config->hidden, 1, 1 << 20));
  FP8GPT_TRY(check_range("heads", config->heads, 1, config->hidden));
  FP8GPT_TRY(check_range("kv_heads", config->kv_heads, 1, config->heads));
  FP8GPT_TRY(check_range("ffn_hidden", config->ffn_hidden, 1, 1 << 22));
  FP8GPT_TRY(check_range("vocabulary", config->vocabulary, 2, 1 << 24));
  FP8GPT_TRY(check_range("sequence", config->sequence, 1, 1 << 20));
  FP8GPT_TRY(check_range("normalization", (int)config->normalization, 0, 1));
  FP8GPT_TRY(check_range("activation", (int)config->activation, 0, 1));
  FP8GPT_TRY(check_range("position", (int)config->position, 0, 1));
  if (config->hidden % config->heads != 0)
    return fp8gpt_invalid("hidden is %d, expected a multiple of the %d heads", config->hidden, config->heads);
  if (config->heads % config->kv_heads != 0)
    return fp8gpt_invalid("heads is %d, expected a multiple of the %d kv_heads", config->heads, config->kv_heads);
  const int head = config->hidden / config->heads;
  if (head > FP8GPT_MAX_HEAD)
    return fp8gpt_invalid("a head has %d elements (hidden %d, heads %d), expected at most %d", head, config->hidden,
                          config->heads, FP8GPT_MAX_HEAD);
  if (config->position == FP8GPT_ROPE && head % 2 != 0)
    return fp8gpt_invalid("a head has %d elements, expected an even number for rotary positions", head);
  if (!(config->norm_eps > 0.0f && isfinite(config->norm_eps)))
    return fp8gpt_invalid("norm_eps is %g, expected a finite positive number", (double)config->norm_eps);
  if (!(config->rope_theta > 0.0f && isfinite(config->rope_theta)))
    return fp8gpt_invalid("rope_theta is %g, expected a finite positive number", (double)config->rope_theta);
  if (!(config->dropout >= 0.0f && config->dropout < 1.0f))
    return fp8gpt_invalid("dropout is %g, expected a number in [0, 1)", (double)config->dropout);
  if (!(config->init_std >= 0.0f && isfinite(config->init_std)))
    return fp8gpt_invalid("init_std is %g, expected a finite number of at least 0", (double)config->init_std);
  return FP8CORE_OK;
}

static int64_t qkv_outputs(const fp8gpt_config *config) {
  return (int64_t)(config->heads + 2 * config->kv_heads) * (config->hidden / config->heads);
}

static int64_t fc1_outputs(const fp8gpt_config *config) {
  return config->activation == FP8GPT_SWIGLU ? 2 * (int64_t)config->ffn_hidden : config->ffn_hidden;
}

static int64_t linear_weights(const fp8gpt_config *config) {
  const int64_t hidden = config->hidden;
  return config->layers * (hidden * (qkv_outputs(config) + hidden + fc1_outputs(config)) + hidden * config->ffn_hidden);
}

int64_t fp8gpt_config_parameters(const fp8gpt_config *config) {
  if (fp8gpt_config_validate(config) != FP8CORE_OK) return -1;
  const int64_t hidden = config->hidden;
  const int64_t norm = config->normalization == FP8GPT_LAYER_NORM ? 2 * hidden : hidden;
  int64_t parameters = linear_weights(config) + (2 * (int64_t)config->layers + 1) * norm;
  if (config->biases) parameters += config->layers * (qkv_outputs(config) + hidden + fc1_outputs(config) + hidden);
  parameters += hidden * config->vocabulary * (config->tied_embeddings ? 1 : 2);
  if (config->position == FP8GPT_LEARNED) parameters += hidden * config->sequence;
  return parameters;
}

double fp8gpt_config_flops_per_token(const fp8gpt_config *config, int sequence) {
  if (fp8gpt_config_validate(config) != FP8CORE_OK) return -1.0;
  const double weights = (double)linear_weights(config) + (double)config->hidden * config->vocabulary;
  return 6.0 * weights + 6.0 * (double)config->layers * config->hidden * sequence;
}
