// The plan of one rank against the libraries that it describes: weights, gradients and activations are those of
// fp8gpt_memory_report(), states those of fp8optim_adamw_memory(), to the byte; scales to their padding, and the
// workspace within what the header calls an estimate.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8gpt/config.h"
#include "fp8gpt/model.h"
#include "fp8optim/adamw.h"
#include "fp8zero/plan.h"
#include "support.h"

// Presets that take no more are created: the small ones, and with the argument --large all that an ordinary machine has
// memory for.
static int64_t most_bytes = INT64_C(512) << 20;
static double smallest_ratio = 1.0;
static double largest_ratio = 1.0;

static void note_ratio(double ratio) {
  if (ratio < smallest_ratio) smallest_ratio = ratio;
  if (ratio > largest_ratio) largest_ratio = ratio;
}

static fp8zero_plan_model model_of(const fp8gpt_config *config) {
  fp8zero_plan_model model = fp8zero_plan_model_default();
  model.layers = config->layers;
  model.hidden = config->hidden;
  model.heads = config->heads;
  model.kv_heads = config->kv_heads;
  model.ffn_hidden = config->ffn_hidden;
  model.vocabulary = config->vocabulary;
  model.sequence = config->sequence;
  model.tied_embeddings = config->tied_embeddings;
  model.biases = config->biases;
  model.rms_norm = config->normalization == FP8GPT_RMS_NORM;
  model.swiglu = config->activation == FP8GPT_SWIGLU;
  model.learned_positions = config->position == FP8GPT_LEARNED;
  return model;
}

static fp8zero_plan_result plan_of(const fp8gpt_config *config, fp8gpt_precision precision, int batch, int recompute) {
  const fp8zero_plan_model model = model_of(config);
  fp8zero_plan_options options = fp8zero_plan_options_default();
  fp8zero_plan_result plan;
  options.precision = (fp8zero_precision)precision;
  options.micro_batch = batch;
  options.micro_batches = 3;
  options.recompute = recompute;
  assert_ok(fp8zero_plan(&model, &options, &plan));
  return plan;
}

static void assert_bytes(const char *what, const fp8zero_spread *planned, int64_t found) {
  if (planned->minimum != found || planned->maximum != found || planned->mean != (double)found)
    fail_msg("%s: planned %lld to %lld bytes, found %lld", what, (long long)planned->minimum,
             (long long)planned->maximum, (long long)found);
}

// What the plan leaves out is between 0 and `most`.
static void assert_within(const char *what, int64_t planned, int64_t found, int64_t most) {
  if (found < planned || found - planned > most)
    fail_msg("%s: planned %lld bytes, found %lld, expected at most %lld more", what, (long long)planned,
             (long long)found, (long long)most);
}

// Of a scaling state like those of a model, for so many tensors; just-in-time without options.
static int64_t scaling_bytes(fp8core_context *context, int64_t count, const fp8core_scaling_options *delayed) {
  fp8core_scaling_options options = delayed ? *delayed : fp8core_scaling_options_default();
  if (!delayed) options.policy = FP8CORE_SCALING_JUST_IN_TIME;
  if (count == 0) return 0;
  fp8core_dtype *dtypes = calloc((size_t)count, sizeof(*dtypes));
  assert_non_null(dtypes);
  for (int64_t i = 0; i < count; i++) dtypes[i] = FP8CORE_E4M3;
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, count, dtypes, &options));
  const int64_t bytes = (int64_t)fp8core_scaling_memory_bytes(scaling);
  fp8core_scaling_destroy(&scaling);
  free(dtypes);
  return bytes;
}

// With the states of the optimizer that fp8lm train would choose. The model goes before the optimizer comes.
static void compare(const char *name, const fp8gpt_config *config, fp8gpt_precision precision, int batch,
                    int recompute) {
  char what[128];
  const fp8zero_plan_result plan = plan_of(config, precision, batch, recompute);
  assert_int_equal(plan.parameters, fp8gpt_config_parameters(config));
  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  fp8gpt_model_options model_options = fp8gpt_model_options_default();
  model_options.precision = precision;
  model_options.batch = batch;
  model_options.recompute = recompute;
  fp8gpt_model *model;
  assert_ok(fp8gpt_model_create(&model, context, config, &model_options));
  fp8gpt_memory memory;
  assert_ok(fp8gpt_memory_report(model, &memory));
  (void)snprintf(what, sizeof(what), "%s, %s, batch %d, recompute %d", name, fp8gpt_precision_name(precision), batch,
                 recompute);
  assert_int_equal(plan.parameters, memory.parameters);
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_WEIGHTS], memory.weight_bytes);
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_GRADIENTS], memory.gradient_bytes);
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_ACTIVATIONS], memory.activation_bytes);
  // The context's workspace belongs to its products and is not planned. What is planned is CUDA's: no room for threads,
  // and logits of 1,024 rows at a time and not of 256.
  const int64_t workspace = memory.workspace_bytes - (int64_t)fp8core_context_workspace_bytes(context);
  const int64_t rows = (int64_t)batch * config->sequence;
  const int64_t logits =
    ((rows < 1024 ? rows : 1024) - (rows < 256 ? rows : 256)) * config->vocabulary * (precision == FP8GPT_FP32 ? 8 : 6);
  const int64_t planned = plan.memory[FP8ZERO_MEMORY_WORKSPACE].maximum + plan.memory[FP8ZERO_MEMORY_SCALES].maximum;
  const double ratio = (double)(planned - (test_on_cuda() ? 0 : logits)) / (double)workspace;
  // Odd shapes have small arrays, which padding and threads' rooms outweigh.
  if (config->hidden >= 256 && !(ratio > 0.75 && ratio < 1.15))
    fail_msg("%s: planned %lld bytes of workspace and scales, found %lld", what, (long long)planned,
             (long long)workspace);
  if (config->hidden >= 256) note_ratio(ratio);

  const int64_t count = fp8gpt_model_parameters(model);
  fp8optim_parameter *parameters = calloc((size_t)count, sizeof(*parameters));
  char(*names)[64] = calloc((size_t)count, sizeof(*names));
  assert_true(parameters && names);
  for (int64_t i = 0; i < count; i++) {
    fp8gpt_parameter parameter;
    assert_ok(fp8gpt_model_parameter(model, i, &parameter));
    (void)snprintf(names[i], sizeof(names[i]), "%s", parameter.name);
    parameters[i] = fp8optim_parameter_create(names[i], parameter.shape[0], parameter.shape[1]);
    parameters[i].dimensions = parameter.dimensions;
    parameters[i].with_weight = 1;
    parameters[i].weight_dtype = parameter.weight.dtype;
  }
  const int64_t scaled = fp8gpt_model_scaled_tensors(model);
  const int64_t scaled_weights = precision >= FP8GPT_FP8_O1 ? 4 * (int64_t)config->layers : 0;
  const int64_t scales = scaling_bytes(context, scaled, &model_options.scaling) + scaling_bytes(context, scaled, NULL) +
                         scaling_bytes(context, scaled_weights, NULL);
  fp8gpt_model_destroy(&model);

  const fp8optim_adamw_options adamw_options =
    fp8optim_adamw_options_of(precision >= FP8GPT_FP8_O2 ? FP8OPTIM_PRESET_FP8 : FP8OPTIM_PRESET_FP32);
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_adamw *adamw;
  fp8optim_memory states;
  assert_ok(fp8optim_adamw_create(&adamw, context, &adamw_options, count, parameters, 1, &group));
  assert_ok(fp8optim_adamw_memory(adamw, &states));
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_WEIGHTS], states.weight_bytes);
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_MASTER], states.master_bytes);
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_EXP_AVG], states.exp_avg_bytes);
  assert_bytes(what, &plan.memory[FP8ZERO_MEMORY_EXP_AVG_SQ], states.exp_avg_sq_bytes);
  fp8optim_adamw_destroy(&adamw);

  // Nothing but padding is left out: of 9 arrays a scaling state, 4 parts a tensor, 10 tables; and a few words.
  assert_within(what, plan.memory[FP8ZERO_MEMORY_SCALES].maximum, scales + states.overhead_bytes,
                3 * 9 * 256 + 4 * 256 * count + 10 * 256 + 1024);
  free(parameters);
  free(names);
  fp8core_context_destroy(&context);
}

static void presets(void **unused) {
  (void)unused;
  int compared = 0;
  for (int i = 0; fp8gpt_config_preset_name(i); i++) {
    const char *name = fp8gpt_config_preset_name(i);
    fp8gpt_config config;
    assert_ok(fp8gpt_config_preset(name, &config));
    for (int precision = FP8GPT_FP32; precision <= FP8GPT_FP8_O3; precision++) {
      const fp8zero_plan_result plan = plan_of(&config, (fp8gpt_precision)precision, 1, 0);
      if (plan.memory_total.maximum > most_bytes) continue;
      // Large ones once.
      const int small = plan.parameters < 10000000;
      for (int recompute = 0; recompute <= small; recompute++)
        for (int batch = 1; batch <= 1 + 2 * small; batch += 2)
          compare(name, &config, (fp8gpt_precision)precision, batch, recompute);
      compared++;
    }
  }
  print_message("%d presets and precisions; workspace planned over allocated: %.2f to %.2f\n", compared, smallest_ratio,
                largest_ratio);
  // Three small ones, and two larger ones.
  assert_true(compared >= (most_bytes > INT64_C(1) << 30 ? 30 : 18));
}

static int below(test_random *random, int bound) { return (int)(test_random_bits(random) % (uint64_t)bound); }

// Sizes that no alignment suits.
static void odd_shapes(void **unused) {
  (void)unused;
  test_random random = {11};
  for (int round = 0; round < 60; round++) {
    fp8gpt_config config;
    assert_ok(fp8gpt_config_preset("tiny-gpt", &config));
    config.kv_heads = 1 + below(&random, 3);
    config.heads = config.kv_heads * (1 + below(&random, 3));
    config.hidden = config.heads * 2 * (1 + below(&random, 9));
    config.layers = 1 + below(&random, 5);
    config.ffn_hidden = 1 + below(&random, 150);
    config.vocabulary = 2 + below(&random, 500);
    config.sequence = 1 + below(&random, 70);
    config.normalization = below(&random, 2) ? FP8GPT_RMS_NORM : FP8GPT_LAYER_NORM;
    config.activation = below(&random, 2) ? FP8GPT_SWIGLU : FP8GPT_GELU;
    config.position = below(&random, 2) ? FP8GPT_LEARNED : FP8GPT_ROPE;
    config.tied_embeddings = below(&random, 2);
    config.biases = below(&random, 2);
    compare("odd", &config, (fp8gpt_precision)below(&random, FP8GPT_FP8_O3 + 1), 1 + below(&random, 4),
            below(&random, 2));
  }
}

// The same precisions, in the same order, by the same names.
static void names(void **unused) {
  (void)unused;
  for (int i = FP8GPT_FP32; i <= FP8GPT_FP8_O3; i++)
    assert_string_equal(fp8zero_precision_name((fp8zero_precision)i), fp8gpt_precision_name((fp8gpt_precision)i));
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "--large") == 0) most_bytes = INT64_C(4) << 30;
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(names),
    cmocka_unit_test(odd_shapes),
    cmocka_unit_test(presets),
  };
  return cmocka_run_group_tests_name("plan and libraries", tests, NULL, NULL);
}
