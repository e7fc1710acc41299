// Trains a GPT of 0.2 million parameters in FP8 on a text of its own, with libfp8gpt and libfp8optim, and lets it
// write.
//
//   continue_text [STEPS]
#include <stdio.h>
#include <stdlib.h>

#include <fp8core/fp8core.h>
#include <fp8gpt/model.h>
#include <fp8optim/fp8optim.h>

#define SEQUENCES 4
#define LENGTH 64

static const char text[] = "One for the money, two for the show, three to make ready, and four to go. "
                           "Rain, rain, go away, come again another day. "
                           "Twinkle, twinkle, little star, how I wonder what you are. "
                           "Up above the world so high, like a diamond in the sky. ";

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

// An optimizer with the model's parameters: its masters are the initial weights, and its steps write the weights that
// the model computes with.
static fp8optim_adamw *create_optimizer(fp8core_context *context, fp8gpt_model *model, fp8core_tensor *gradients) {
  const int64_t count = fp8gpt_model_parameters(model);
  fp8optim_group groups[2] = {fp8optim_group_default(), fp8optim_group_default()};
  fp8optim_parameter *parameters = calloc((size_t)count, sizeof(*parameters));
  fp8optim_adamw *optimizer;
  if (!parameters) exit(1);
  groups[0].learning_rate = groups[1].learning_rate = 3e-3;
  groups[1].weight_decay = 0.0;
  for (int64_t i = 0; i < count; i++) {
    fp8gpt_parameter parameter;
    check(fp8gpt_model_parameter(model, i, &parameter));
    parameters[i] = fp8optim_parameter_create(parameter.name, parameter.shape[0], parameter.shape[1]);
    parameters[i].dimensions = parameter.dimensions;
    parameters[i].group = parameter.decay ? 0 : 1;
    parameters[i].with_weight = 1;
    parameters[i].weight_dtype = parameter.weight.dtype;
    parameters[i].weight = parameter.weight.data;
  }
  check(fp8optim_adamw_create(&optimizer, context, NULL, count, parameters, 2, groups));
  free(parameters);
  for (int64_t i = 0; i < count; i++) {
    fp8gpt_parameter parameter;
    fp8core_tensor weight;
    void *values;
    check(fp8gpt_model_parameter(model, i, &parameter));
    check(fp8core_alloc(context, (size_t)fp8core_tensor_elements(&parameter.weight) * sizeof(float), &values));
    check(fp8gpt_model_initial_weight(model, i, values));
    fp8core_tensor initial = fp8core_tensor_create(values, FP8CORE_FP32, parameter.dimensions, parameter.shape);
    initial.device = fp8core_context_device(context);
    check(fp8optim_adamw_set_state(optimizer, i, FP8OPTIM_MASTER, &initial));
    check(fp8optim_adamw_state(optimizer, i, FP8OPTIM_WEIGHT, &weight));
    check(fp8gpt_model_bind_weight(model, i, &weight));
    check(fp8core_free(context, values));
    gradients[i] = parameter.gradient;
  }
  return optimizer;
}

static float train(fp8gpt_model *model, fp8optim_adamw *optimizer, fp8core_tensor *gradients, int steps) {
  int32_t tokens[SEQUENCES * LENGTH];
  int32_t targets[SEQUENCES * LENGTH];
  const fp8gpt_batch batch = {SEQUENCES, LENGTH, tokens, targets};
  fp8optim_step_options options = fp8optim_step_options_default();
  float loss = 0.0f;
  options.max_norm = 1.0f;
  for (int step = 0; step < steps; step++) {
    for (int i = 0; i < SEQUENCES * LENGTH; i++) {
      const int start = (step * 31 + i / LENGTH * 57) % (int)(sizeof(text) - 1);
      tokens[i] = text[(start + i % LENGTH) % (int)(sizeof(text) - 1)];
      targets[i] = text[(start + i % LENGTH + 1) % (int)(sizeof(text) - 1)];
    }
    check(fp8gpt_model_train(model, &batch, 1, 1.0f, step, 0, &loss));
    // The scales of FP8 gradients may be others than last time.
    for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
      fp8gpt_parameter parameter;
      check(fp8gpt_model_parameter(model, i, &parameter));
      gradients[i] = parameter.gradient;
    }
    check(fp8optim_adamw_step(optimizer, gradients, &options, NULL));
    check(fp8gpt_model_end_step(model));
    if (step % 50 == 0) printf("step %d: loss %.3f\n", step, (double)loss);
  }
  return loss;
}

// A model for inference that computes with the weights of the one that was trained.
static void write_text(fp8core_context *context, fp8gpt_model *trained, fp8gpt_model_options options) {
  const fp8gpt_config *config = fp8gpt_model_config(trained);
  fp8gpt_model *model;
  float *logits = malloc((size_t)config->vocabulary * sizeof(*logits));
  if (!logits) exit(1);
  options.inference = 1;
  check(fp8gpt_model_create(&model, context, config, &options));
  for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
    fp8gpt_parameter parameter;
    check(fp8gpt_model_parameter(trained, i, &parameter));
    check(fp8gpt_model_bind_weight(model, i, &parameter.weight));
  }
  int32_t token = 'T';
  for (int position = 0; position < LENGTH; position++) {
    putchar(token);
    check(fp8gpt_model_next(model, &token, 1, position, logits));
    token = 0;
    for (int i = 1; i < config->vocabulary; i++)
      if (logits[i] > logits[token]) token = i;
  }
  putchar('\n');
  fp8gpt_model_destroy(&model);
  free(logits);
}

int main(int argc, char **argv) {
  const int steps = argc > 1 ? atoi(argv[1]) : 121;
  fp8gpt_config config;
  fp8gpt_model_options options = fp8gpt_model_options_default();
  fp8core_context *context;
  fp8gpt_model *model;
  check(fp8core_context_create(&context, NULL));
  check(fp8gpt_config_preset("tiny-llama", &config));
  config.layers = 2;
  config.hidden = 96;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn_hidden = 256;
  config.sequence = LENGTH;
  options.precision = FP8GPT_FP8_O2;
  options.batch = SEQUENCES;
  check(fp8gpt_model_create(&model, context, &config, &options));
  fp8core_tensor *gradients = calloc((size_t)fp8gpt_model_parameters(model), sizeof(*gradients));
  if (!gradients) return 1;
  fp8optim_adamw *optimizer = create_optimizer(context, model, gradients);
  const float loss = train(model, optimizer, gradients, steps);
  write_text(context, model, options);
  fp8optim_adamw_destroy(&optimizer);
  fp8gpt_model_destroy(&model);
  fp8core_context_destroy(&context);
  free(gradients);
  // It knows the text by heart then.
  return steps > 100 && loss > 0.5f;
}
