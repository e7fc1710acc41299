// A model on CUDA against the same model on the CPU: losses, gradients, logits of generation, scaling states, memory.
// On a GPU; and, with FP8_TEST_EMULATED, the same backend and kernels on the host.
//
// The two differ by the order of sums (FP32), by roundings to BF16 of values that differ so (one part in 256 each; a
// gradient is a sum of many), and in FP8 by codes that fall to the other side of a tie: each moves a value by up to a
// quarter, and the noise of FP8 products themselves is a seventh of a gradient (docs/numerics.md, "Gradient
// accumulation"). Bounds are of the error's norm over the norm, for each gradient.
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8gpt/model.h"

// An emulated GPU is slow.
#if defined(FP8_TEST_EMULATED)
#  define EMULATED 1
#else
#  define EMULATED 0
#endif

static fp8core_context *cpu;
static fp8core_context *gpu;

static void require_gpu(void) {
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) > 0) return;
  printf("skipped: %s\n", fp8core_last_error());
  exit(77);
}

static fp8core_context *context_of(fp8core_device_type type) {
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  options.device.type = type;
  assert_ok(fp8core_context_create(&context, &options));
  return context;
}

static fp8gpt_config small_config(const char *preset) {
  fp8gpt_config config;
  assert_ok(fp8gpt_config_preset(preset, &config));
  config.layers = 2;
  config.hidden = EMULATED ? 32 : 64;
  config.heads = 4;
  config.kv_heads = config.activation == FP8GPT_SWIGLU ? 2 : 4;
  config.ffn_hidden = EMULATED ? 48 : 112;
  config.vocabulary = 61;
  config.sequence = 70;
  config.init_std = 0.1f;
  return config;
}

#define MOST_TOKENS 512

typedef struct text {
  int32_t tokens[MOST_TOKENS];
  int32_t targets[MOST_TOKENS];
  fp8gpt_batch batch;
} text;

static void fill_text(text *filled, uint64_t seed, int sequences, int length, int vocabulary) {
  test_random random = {seed};
  assert_true(sequences * length <= MOST_TOKENS);
  for (int i = 0; i < sequences * length; i++) {
    // Half of the draws are of few tokens, so that the rows of the embedding's gradient are sums of many.
    const uint64_t range = test_random_bits(&random) % 2 ? (uint64_t)vocabulary : 3;
    filled->tokens[i] = (int32_t)(test_random_bits(&random) % range);
    filled->targets[i] = i % 7 == 1 ? -1 : (int32_t)(test_random_bits(&random) % (uint64_t)vocabulary);
  }
  filled->batch = (fp8gpt_batch){sequences, length, filled->tokens, filled->targets};
}

static fp8gpt_model *create(fp8core_context *context, const fp8gpt_config *config,
                            const fp8gpt_model_options *options) {
  fp8gpt_model *model;
  assert_ok(fp8gpt_model_create(&model, context, config, options));
  return model;
}

static fp8gpt_parameter parameter_of(const fp8gpt_model *model, int64_t index) {
  fp8gpt_parameter parameter;
  assert_ok(fp8gpt_model_parameter(model, index, &parameter));
  return parameter;
}

static size_t bytes_of(const fp8core_tensor *tensor) {
  return (size_t)fp8core_tensor_elements(tensor) * fp8core_dtype_size(tensor->dtype);
}

static unsigned char *codes_of(fp8core_context *context, const fp8core_tensor *tensor) {
  unsigned char *codes = malloc(bytes_of(tensor));
  assert_non_null(codes);
  test_download(context, codes, tensor->data, bytes_of(tensor));
  return codes;
}

// What a tensor stands for.
static double *values_of(fp8core_context *context, const fp8core_tensor *tensor) {
  const int64_t elements = fp8core_tensor_elements(tensor);
  const size_t size = fp8core_dtype_size(tensor->dtype);
  unsigned char *codes = codes_of(context, tensor);
  double *values = malloc((size_t)elements * sizeof(*values));
  float scale = 1.0f;
  assert_non_null(values);
  if (tensor->scale_inverse) test_download(context, &scale, tensor->scale_inverse, sizeof(scale));
  for (int64_t i = 0; i < elements; i++) {
    uint32_t code = 0;
    memcpy(&code, codes + (size_t)i * size, size);
    values[i] = (double)fp8core_decode(tensor->dtype, code) * (double)scale;
  }
  free(codes);
  return values;
}

static double relative_error(const double *values, const double *expected, int64_t count) {
  double error = 0.0;
  double norm = 0.0;
  for (int64_t i = 0; i < count; i++) {
    error += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  // A NaN must not pass.
  return error == 0.0 ? 0.0 : sqrt(error / norm);
}

// Errors of gradients that precisions may have, and of losses and logits.
static const double gradient_bound[] = {2e-5, 3e-2, 2.5e-1, 2.5e-1, 2.5e-1};
static const double loss_bound[] = {1e-6, 2e-3, 1e-2, 1e-2, 1e-2};
static const double logit_bound[] = {1e-5, 3e-2, 1.5e-1, 1.5e-1, 1.5e-1};

static double compare_gradients(const fp8gpt_model *on_cpu, const fp8gpt_model *on_gpu, double bound,
                                const char *what) {
  double worst = 0.0;
  for (int64_t i = 0; i < fp8gpt_model_parameters(on_cpu); i++) {
    const fp8gpt_parameter expected = parameter_of(on_cpu, i);
    const fp8gpt_parameter found = parameter_of(on_gpu, i);
    double *expected_values = values_of(cpu, &expected.gradient);
    double *values = values_of(gpu, &found.gradient);
    const double error = relative_error(values, expected_values, fp8core_tensor_elements(&expected.gradient));
    if (!(error <= bound))
      fail_msg("%s: gradient of \"%s\" is off by %g of its norm, expected at most %g", what, expected.name, error,
               bound);
    worst = error > worst ? error : worst;
    free(values);
    free(expected_values);
  }
  return worst;
}

static void compare_losses(float found, float expected, double bound, const char *what) {
  if (!(fabs((double)found - (double)expected) <= bound * (double)expected))
    fail_msg("%s: the loss is %.8g, expected %.8g to a relative %g", what, (double)found, (double)expected, bound);
}

typedef struct variant {
  const char *preset;
  float dropout;
  int recompute;
  // 0: the architecture's heads of 16.
  int heads;
  int sequences;
  int length;
} variant;

static const variant variants[] = {
  {"tiny-gpt", 0.0f, 0, 0, 3, 70},   {"tiny-gpt2", 0.0f, 0, 0, 3, 70}, {"tiny-llama", 0.0f, 0, 0, 3, 70},
  {"tiny-gpt", 0.2f, 0, 0, 2, 65},   {"tiny-gpt2", 0.2f, 1, 2, 2, 33}, {"tiny-llama", 0.1f, 1, 0, 1, 70},
  {"tiny-llama", 0.0f, 0, 8, 1, 64}, {"tiny-gpt", 0.0f, 1, 1, 1, 1},
};
#define VARIANTS ((int)(sizeof(variants) / sizeof(*variants)))

// Two steps of two micro-batches each, so that the second has delayed scales and sums over micro-batches.
static void gradients(void **state) {
  (void)state;
  static text batches[2];
  for (int v = 0; v < VARIANTS; v++) {
    const variant *now = &variants[v];
    fp8gpt_config config = small_config(now->preset);
    config.dropout = now->dropout;
    if (now->heads) {
      config.heads = now->heads;
      config.kv_heads = config.activation == FP8GPT_SWIGLU ? now->heads / 4 : now->heads;
    }
    const int sequences = EMULATED && now->sequences > 2 ? 2 : now->sequences;
    const int length = EMULATED && now->length > 20 ? 20 : now->length;
    for (int precision = 0; precision <= FP8GPT_FP8_O2; precision++) {
      char what[96];
      fp8gpt_model_options options = fp8gpt_model_options_default();
      double worst = 0.0;
      options.precision = (fp8gpt_precision)precision;
      options.batch = sequences;
      options.recompute = now->recompute;
      options.seed = 5;
      fp8gpt_model *models[2] = {create(cpu, &config, &options), create(gpu, &config, &options)};
      for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 2; i++) {
          float losses[2];
          fill_text(&batches[i], (uint64_t)(7 * step + i + 1), sequences, length, config.vocabulary);
          (void)snprintf(what, sizeof(what), "%s, variant %d, %s, step %d", now->preset, v,
                         fp8gpt_precision_name(options.precision), step);
          for (int side = 0; side < 2; side++)
            assert_ok(fp8gpt_model_train(models[side], &batches[i].batch, i == 0, 0.5f, step, i, &losses[side]));
          compare_losses(losses[1], losses[0], loss_bound[precision], what);
        }
        const double found = compare_gradients(models[0], models[1], gradient_bound[precision], what);
        worst = found > worst ? found : worst;
        for (int side = 0; side < 2; side++) assert_ok(fp8gpt_model_end_step(models[side]));
      }
      float losses[2];
      for (int side = 0; side < 2; side++) assert_ok(fp8gpt_model_loss(models[side], &batches[0].batch, &losses[side]));
      compare_losses(losses[1], losses[0], loss_bound[precision], what);
      fp8gpt_memory memory[2];
      for (int side = 0; side < 2; side++) assert_ok(fp8gpt_memory_report(models[side], &memory[side]));
      assert_int_equal(memory[0].weight_bytes, memory[1].weight_bytes);
      assert_int_equal(memory[0].gradient_bytes, memory[1].gradient_bytes);
      assert_int_equal(memory[0].activation_bytes, memory[1].activation_bytes);
      printf("%s, dropout %g, recompute %d, %s: gradients differ by %.2g of their norms at most\n", now->preset,
             (double)now->dropout, now->recompute, fp8gpt_precision_name(options.precision), worst);
      for (int side = 0; side < 2; side++) fp8gpt_model_destroy(&models[side]);
    }
  }
}

// The same weights, tokens, seed and step give the same bits.
static void same_bits(void **state) {
  (void)state;
  static text batch;
  const fp8gpt_precision precisions[] = {FP8GPT_FP32, FP8GPT_BF16, FP8GPT_FP8_O2};
  for (int v = 0; v < 3; v++) {
    fp8gpt_config config = small_config(variants[v].preset);
    config.dropout = 0.1f;
    for (int p = 0; p < 3; p++) {
      fp8gpt_model_options options = fp8gpt_model_options_default();
      fp8gpt_model *models[2];
      float losses[2];
      options.precision = precisions[p];
      options.batch = 3;
      fill_text(&batch, 3, 3, EMULATED ? 20 : 69, config.vocabulary);
      for (int side = 0; side < 2; side++) {
        models[side] = create(gpu, &config, &options);
        assert_ok(fp8gpt_model_train(models[side], &batch.batch, 1, 1.0f, 1, 0, &losses[side]));
      }
      assert_memory_equal(&losses[0], &losses[1], sizeof(float));
      for (int64_t i = 0; i < fp8gpt_model_parameters(models[0]); i++) {
        const fp8gpt_parameter one = parameter_of(models[0], i);
        const fp8gpt_parameter other = parameter_of(models[1], i);
        unsigned char *codes = codes_of(gpu, &one.gradient);
        unsigned char *others = codes_of(gpu, &other.gradient);
        assert_memory_equal(codes, others, bytes_of(&one.gradient));
        free(codes);
        free(others);
      }
      for (int side = 0; side < 2; side++) fp8gpt_model_destroy(&models[side]);
    }
  }
}

// A prompt, then token by token, then back to an earlier position.
static void generation(void **state) {
  (void)state;
  static text prompt;
  float logits[2][61];
  const struct {
    int position;
    int count;
  } calls[] = {{0, 20}, {20, 1}, {21, 1}, {22, 3}, {5, 65}, {0, 1}};
  for (int v = 0; v < 3; v++) {
    const fp8gpt_config config = small_config(variants[v].preset);
    fill_text(&prompt, 11, 1, 70, config.vocabulary);
    for (int precision = 0; precision <= FP8GPT_FP8_O2; precision++) {
      fp8gpt_model_options options = fp8gpt_model_options_default();
      options.precision = (fp8gpt_precision)precision;
      options.inference = 1;
      fp8gpt_model *models[2] = {create(cpu, &config, &options), create(gpu, &config, &options)};
      for (size_t call = 0; call < sizeof(calls) / sizeof(*calls); call++) {
        double error = 0.0;
        double norm = 0.0;
        for (int side = 0; side < 2; side++)
          assert_ok(fp8gpt_model_next(models[side], prompt.tokens + calls[call].position, calls[call].count,
                                      calls[call].position, logits[side]));
        for (int i = 0; i < config.vocabulary; i++) {
          error += pow((double)logits[1][i] - (double)logits[0][i], 2.0);
          norm += pow((double)logits[0][i], 2.0);
        }
        // Evaluation scales just in time: one value on the other side of a tie moves little.
        if (!(sqrt(error / norm) <= logit_bound[precision]))
          fail_msg("%s, %s, call %zu: logits are off by %g of their norm", variants[v].preset,
                   fp8gpt_precision_name(options.precision), call, sqrt(error / norm));
      }
      for (int side = 0; side < 2; side++) fp8gpt_model_destroy(&models[side]);
    }
  }
}

// Weights and their initial values are the same codes on both.
static void initial_weights(void **state) {
  (void)state;
  for (int v = 0; v < 3; v++) {
    const fp8gpt_config config = small_config(variants[v].preset);
    for (int precision = 0; precision <= FP8GPT_FP8_O2; precision++) {
      fp8gpt_model_options options = fp8gpt_model_options_default();
      options.precision = (fp8gpt_precision)precision;
      fp8gpt_model *models[2] = {create(cpu, &config, &options), create(gpu, &config, &options)};
      for (int64_t i = 0; i < fp8gpt_model_parameters(models[0]); i++) {
        const fp8gpt_parameter one = parameter_of(models[0], i);
        const fp8gpt_parameter other = parameter_of(models[1], i);
        const size_t bytes = (size_t)fp8core_tensor_elements(&one.weight) * sizeof(float);
        unsigned char *codes = codes_of(cpu, &one.weight);
        unsigned char *others = codes_of(gpu, &other.weight);
        assert_memory_equal(codes, others, bytes_of(&one.weight));
        free(codes);
        free(others);
        float *expected = malloc(bytes);
        float *found = malloc(bytes);
        float *on_gpu = test_alloc(gpu, bytes);
        assert_true(expected && found);
        assert_ok(fp8gpt_model_initial_weight(models[0], i, expected));
        assert_ok(fp8gpt_model_initial_weight(models[1], i, on_gpu));
        test_download(gpu, found, on_gpu, bytes);
        assert_memory_equal(expected, found, bytes);
        test_free(gpu, on_gpu);
        free(expected);
        free(found);
      }
      for (int side = 0; side < 2; side++) fp8gpt_model_destroy(&models[side]);
    }
  }
}

// What casts counted, in device memory.
static void statistics(void **state) {
  (void)state;
  static text batch;
  const fp8gpt_config config = small_config("tiny-llama");
  fp8gpt_model_options options = fp8gpt_model_options_default();
  float loss;
  options.precision = FP8GPT_FP8_O2;
  options.batch = 2;
  fill_text(&batch, 2, 2, 50, config.vocabulary);
  fp8gpt_model *model = create(gpu, &config, &options);
  const int64_t count = fp8gpt_model_scaled_tensors(model);
  const size_t bytes = (size_t)count * sizeof(fp8core_cast_statistics);
  fp8core_cast_statistics *found = calloc(1, bytes);
  assert_non_null(found);
  fp8core_cast_statistics *on_gpu = test_upload(gpu, found, bytes);
  assert_ok(fp8gpt_model_count_casts(model, on_gpu));
  assert_ok(fp8gpt_model_train(model, &batch.batch, 1, 1.0f, 0, 0, &loss));
  assert_ok(fp8gpt_model_count_casts(model, NULL));
  test_download(gpu, found, on_gpu, bytes);
  for (int64_t i = 0; i < count; i++) {
    const char *name;
    fp8core_scaling_record record;
    assert_ok(fp8gpt_model_scaled_tensor(model, i, &name, &record));
    // Weight gradients are written by products, which count nothing.
    if (strstr(name, "weight_gradient")) {
      assert_int_equal(found[i].elements, 0);
    } else {
      assert_true(found[i].elements > 0);
      assert_int_equal(found[i].nonfinite, 0);
    }
    assert_true(record.amax > 0.0f || record.scale != 1.0f);
  }
  test_free(gpu, on_gpu);
  free(found);
  fp8gpt_model_destroy(&model);
}

int main(void) {
  require_gpu();
  cpu = context_of(FP8CORE_DEVICE_CPU);
  gpu = context_of(FP8CORE_DEVICE_CUDA);
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(initial_weights), cmocka_unit_test(gradients),  cmocka_unit_test(same_bits),
    cmocka_unit_test(generation),      cmocka_unit_test(statistics),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  fp8core_context_destroy(&cpu);
  fp8core_context_destroy(&gpu);
  return failed;
}
