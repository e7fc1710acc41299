// Gradients against central differences, for every layer type and parameter, and the loss itself.
//
// The library's loss in FP32 knows a derivative to three digits at best. So it is compared with an FP64 model written
// for these tests (reference.c), to FP32's accuracy, and the gradients with central differences of that model, whose
// error is below 1e-8: a gradient that is wrong in one element of one parameter by 1e-4 of the largest fails.
#include "../support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fp8gpt/model.h"
#include "reference.h"

#define MOST_TOKENS 160

typedef struct gradient_case {
  const char *preset;
  int layers;
  int heads;
  int kv_heads;
  int head_dim;
  int ffn_hidden;
  int vocabulary;
  int sequences;
  int length;
  float dropout;
  int recompute;
  // Elements of a matrix that are looked at one by one; all of a vector are.
  int single;
} gradient_case;

static double worst;

static fp8gpt_config config_of(const gradient_case *parameters) {
  fp8gpt_config config;
  assert_ok(fp8gpt_config_preset(parameters->preset, &config));
  config.layers = parameters->layers;
  config.heads = parameters->heads;
  config.kv_heads = parameters->kv_heads;
  config.hidden = parameters->heads * parameters->head_dim;
  config.ffn_hidden = parameters->ffn_hidden;
  config.vocabulary = parameters->vocabulary;
  // Passes may be shorter than the longest sequence.
  config.sequence = parameters->length + 3;
  config.dropout = parameters->dropout;
  config.init_std = 0.7f / sqrtf((float)config.hidden);
  return config;
}

// The derivative along `direction` from the reference, against the gradient's.
static void check_direction(reference *model, const fp8gpt_batch *batch, int64_t index, const char *name,
                            const float *gradient, const double *direction, double largest) {
  double *values = model->values[index];
  const int64_t elements = model->elements[index];
  double *kept = malloc((size_t)elements * sizeof(double));
  double length = 0.0;
  double along = 0.0;
  double magnitude = 0.0;
  assert_non_null(kept);
  memcpy(kept, values, (size_t)elements * sizeof(double));
  for (int64_t i = 0; i < elements; i++) {
    length = fmax(length, fabs(direction[i]));
    along += (double)gradient[i] * direction[i];
    magnitude += (fabs((double)gradient[i]) + 0.05 * largest) * fabs(direction[i]);
  }
  // The loss moves by 1e-4 or so, also where every element of a large matrix does.
  const double h = 2e-5 / length / (1.0 + magnitude / length / 10.0);
  double losses[2];
  for (int side = 0; side < 2; side++) {
    for (int64_t i = 0; i < elements; i++) values[i] = kept[i] + (side ? -h : h) * direction[i];
    losses[side] = reference_loss(model, batch, 3, 1, NULL);
  }
  memcpy(values, kept, (size_t)elements * sizeof(double));
  free(kept);
  const double numeric = (losses[0] - losses[1]) / (2.0 * h);
  // 1e-4 of the terms' magnitudes; a gradient that is exactly 0 (a key's bias, say) has only the rounding of FP32.
  const double error = fabs(along - numeric) / (magnitude + 1e-4 * length);
  if (error > worst) worst = error;
  if (!(error <= 1e-4))
    fail_msg("%s: %.9g along a direction, central difference %.9g (%.3g of the terms)", name, along, numeric, error);
}

static void check_case(const fp8gpt_config *config, const gradient_case *parameters, test_random *random) {
  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  fp8gpt_model_options options = fp8gpt_model_options_default();
  fp8gpt_model *model;
  int32_t tokens[MOST_TOKENS];
  int32_t targets[MOST_TOKENS];
  const int rows = parameters->sequences * parameters->length;
  const fp8gpt_batch batch = {parameters->sequences, parameters->length, tokens, targets};
  options.precision = FP8GPT_FP32;
  options.batch = parameters->sequences;
  options.recompute = parameters->recompute;
  options.seed = 11;
  assert_ok(fp8gpt_model_create(&model, context, config, &options));
  for (int i = 0; i < rows; i++) {
    tokens[i] = (int32_t)(test_random_bits(random) % (uint64_t)config->vocabulary);
    targets[i] = i % 7 == 3 ? -1 : (int32_t)(test_random_bits(random) % (uint64_t)config->vocabulary);
  }
  // Norm weights of 1 and biases of 0 would hide errors.
  for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
    fp8gpt_parameter parameter;
    assert_ok(fp8gpt_model_parameter(model, i, &parameter));
    float *values = parameter.weight.data;
    for (int64_t j = 0; j < parameter.shape[0] && parameter.dimensions == 1; j++)
      values[j] += (float)(0.3 * test_random_normal(random));
  }
  float loss;
  assert_ok(fp8gpt_model_train(model, &batch, 1, 1.0f, 3, 1, &loss));
  reference *right = reference_create(model, options.seed);
  const double expected = reference_loss(right, &batch, 3, 1, NULL);
  if (!(fabs((double)loss - expected) <= 2e-6 * (1.0 + expected)))
    fail_msg("loss is %.9g, expected %.9g", (double)loss, expected);
  for (int64_t i = 0; i < right->count; i++) {
    fp8gpt_parameter parameter;
    assert_ok(fp8gpt_model_parameter(model, i, &parameter));
    const int64_t elements = right->elements[i];
    const float *gradient = parameter.gradient.data;
    double *direction = calloc((size_t)elements, sizeof(double));
    double largest = 0.0;
    assert_non_null(direction);
    for (int64_t j = 0; j < elements; j++) largest = fmax(largest, fabs((double)gradient[j]));
    // With the gradient, at random, and with the gradient in half of the elements.
    for (int kind = 0; kind < 4; kind++) {
      for (int64_t j = 0; j < elements; j++) {
        const double sign = gradient[j] < 0.0f ? -1.0 : 1.0;
        direction[j] = kind == 0   ? sign
                       : kind == 1 ? test_random_normal(random)
                                   : sign * (double)(test_random_bits(random) & 1);
        if (j == 0 && kind > 1) direction[j] = sign;
      }
      check_direction(right, &batch, i, parameter.name, gradient, direction, largest);
    }
    const int64_t single = parameters->single == 0 ? 0 : parameter.dimensions == 1 ? elements : parameters->single;
    for (int64_t k = 0; k < single && k < elements; k++) {
      const int64_t j = single >= elements ? k : (int64_t)(test_random_bits(random) % (uint64_t)elements);
      memset(direction, 0, (size_t)elements * sizeof(double));
      direction[j] = 1.0;
      check_direction(right, &batch, i, parameter.name, gradient, direction, largest);
    }
    free(direction);
  }
  reference_destroy(right);
  fp8gpt_model_destroy(&model);
  fp8core_context_destroy(&context);
}

static void run(const gradient_case *cases, size_t count) {
  test_random random = {17};
  worst = 0.0;
  for (size_t i = 0; i < count; i++) {
    const fp8gpt_config config = config_of(&cases[i]);
    check_case(&config, &cases[i], &random);
  }
  print_message("%zu models, worst difference %.2g of the terms\n", count, worst);
}
#define RUN(cases) run((cases), sizeof(cases) / sizeof(*(cases)))

// Every parameter of the three architectures, many elements one by one.
static void test_architectures(void **state) {
  (void)state;
  static const gradient_case cases[] = {
    {"tiny-gpt", 2, 4, 4, 4, 24, 19, 2, 9, 0.0f, 0, 12},
    {"tiny-gpt2", 2, 4, 4, 4, 24, 19, 2, 9, 0.0f, 0, 12},
    {"tiny-llama", 2, 4, 2, 4, 20, 19, 2, 9, 0.0f, 0, 12},
  };
  RUN(cases);
}

static void test_grouped_queries(void **state) {
  (void)state;
  static const gradient_case cases[] = {
    {"tiny-llama", 1, 6, 1, 4, 16, 17, 2, 11, 0.0f, 0, 4},
    {"tiny-llama", 1, 6, 3, 4, 16, 17, 2, 11, 0.0f, 0, 4},
    {"tiny-gpt", 1, 6, 2, 4, 16, 17, 2, 11, 0.0f, 0, 4},
    {"tiny-gpt2", 1, 4, 1, 6, 16, 17, 2, 11, 0.0f, 0, 4},
  };
  RUN(cases);
}

static void test_dropout_and_recomputation(void **state) {
  (void)state;
  static const gradient_case cases[] = {
    {"tiny-gpt", 3, 2, 2, 6, 20, 19, 2, 9, 0.2f, 0, 4},   {"tiny-gpt2", 3, 2, 2, 6, 20, 19, 2, 9, 0.2f, 1, 4},
    {"tiny-llama", 3, 2, 1, 6, 20, 19, 2, 9, 0.5f, 1, 4}, {"tiny-gpt", 3, 2, 2, 6, 20, 19, 2, 9, 0.0f, 1, 4},
    {"tiny-llama", 1, 2, 2, 6, 20, 19, 2, 9, 0.9f, 0, 4},
  };
  RUN(cases);
}

static void test_odd_sizes(void **state) {
  (void)state;
  static const gradient_case cases[] = {
    // Lengths.
    {"tiny-gpt", 1, 2, 2, 4, 12, 19, 1, 1, 0.0f, 0, 3},
    {"tiny-gpt2", 2, 2, 2, 4, 12, 19, 3, 1, 0.0f, 0, 3},
    {"tiny-llama", 1, 2, 1, 4, 12, 19, 1, 67, 0.0f, 0, 0},
    {"tiny-gpt", 1, 2, 2, 4, 12, 19, 2, 67, 0.1f, 1, 0},
    {"tiny-gpt2", 1, 1, 1, 4, 12, 19, 1, 130, 0.0f, 0, 0},
    // Heads.
    {"tiny-gpt", 1, 3, 3, 2, 9, 5, 2, 9, 0.0f, 0, 3},
    {"tiny-llama", 1, 3, 3, 6, 17, 33, 2, 9, 0.0f, 0, 3},
    {"tiny-gpt", 1, 2, 1, 24, 31, 65, 2, 9, 0.0f, 0, 1},
    {"tiny-gpt2", 1, 2, 2, 5, 7, 11, 2, 9, 0.0f, 0, 3},
    {"tiny-gpt2", 1, 1, 1, 1, 3, 2, 2, 9, 0.0f, 0, 3},
    {"tiny-llama", 1, 1, 1, 80, 40, 23, 1, 5, 0.0f, 0, 1},
    {"tiny-gpt", 1, 1, 1, 256, 16, 23, 1, 4, 0.0f, 0, 0},
    {"tiny-llama", 1, 2, 1, 128, 16, 23, 1, 4, 0.0f, 0, 0},
  };
  RUN(cases);
}

// Every combination of the parts, not only those that have names.
static void test_combinations(void **state) {
  (void)state;
  test_random random = {29};
  worst = 0.0;
  for (int bits = 0; bits < 32; bits++) {
    const gradient_case parameters = {"tiny-gpt",    1, 2, 1, 4, 10, 13, 2, 5, bits % 3 == 0 ? 0.3f : 0.0f,
                                      bits % 4 == 0, 2};
    fp8gpt_config config = config_of(&parameters);
    config.normalization = bits & 1 ? FP8GPT_RMS_NORM : FP8GPT_LAYER_NORM;
    config.activation = bits & 2 ? FP8GPT_SWIGLU : FP8GPT_GELU;
    config.position = bits & 4 ? FP8GPT_LEARNED : FP8GPT_ROPE;
    config.tied_embeddings = bits >> 3 & 1;
    config.biases = bits >> 4 & 1;
    config.norm_eps = 0.1f;
    config.rope_theta = 100.0f;
    check_case(&config, &parameters, &random);
  }
  print_message("32 models, worst difference %.2g of the terms\n", worst);
}

// More rows than logits exist at a time (256), so that the output layer's gradient is a sum of several products.
static void test_many_rows(void **state) {
  (void)state;
  enum { SEQUENCES = 5, LENGTH = 67, ROWS = SEQUENCES * LENGTH };
  const gradient_case parameters = {"tiny-gpt", 1, 2, 2, 4, 10, 37, SEQUENCES, LENGTH, 0.0f, 0, 0};
  for (int tied = 0; tied < 2; tied++) {
    fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
    fp8gpt_config config = config_of(&parameters);
    fp8gpt_model_options options = fp8gpt_model_options_default();
    fp8gpt_model *model;
    static int32_t tokens[ROWS];
    static int32_t targets[ROWS];
    const fp8gpt_batch batch = {SEQUENCES, LENGTH, tokens, targets};
    test_random random = {31};
    config.tied_embeddings = tied;
    options.precision = FP8GPT_FP32;
    options.batch = SEQUENCES;
    assert_ok(fp8gpt_model_create(&model, context, &config, &options));
    for (int i = 0; i < ROWS; i++) {
      tokens[i] = (int32_t)(test_random_bits(&random) % 37);
      // The first 256 rows count for little.
      targets[i] = i < 200 ? -1 : (int32_t)(test_random_bits(&random) % 37);
    }
    float loss;
    assert_ok(fp8gpt_model_train(model, &batch, 1, 1.0f, 3, 1, &loss));
    reference *right = reference_create(model, 0);
    for (int64_t i = 0; i < right->count; i++) {
      fp8gpt_parameter parameter;
      assert_ok(fp8gpt_model_parameter(model, i, &parameter));
      const float *gradient = parameter.gradient.data;
      double *direction = calloc((size_t)right->elements[i], sizeof(double));
      double largest = 0.0;
      assert_non_null(direction);
      for (int64_t j = 0; j < right->elements[i]; j++) {
        largest = fmax(largest, fabs((double)gradient[j]));
        direction[j] = gradient[j] < 0.0f ? -1.0 : 1.0;
      }
      check_direction(right, &batch, i, parameter.name, gradient, direction, largest);
      free(direction);
    }
    reference_destroy(right);
    fp8gpt_model_destroy(&model);
    fp8core_context_destroy(&context);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_architectures),
    cmocka_unit_test(test_grouped_queries),
    cmocka_unit_test(test_dropout_and_recomputation),
    cmocka_unit_test(test_odd_sizes),
    cmocka_unit_test(test_combinations),
    cmocka_unit_test(test_many_rows),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
