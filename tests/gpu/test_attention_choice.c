// Which attention a model on CUDA takes, and that it takes it: with our own kernels in the emulation, and a cuDNN that
// is played (fake_cudnn.c) and does right or wrong.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

#include "fake_cudnn.h"
#include "fp8gpt/model.h"

enum { LAYERS = 2, BATCH = 2, LENGTH = 8 };

static fp8core_context *gpu;

static void set_up(fake_cudnn_fault fault, const char *wanted) {
  memset(&fake_cudnn, 0, sizeof(fake_cudnn));
  fake_cudnn.fault = fault;
  if (wanted)
    assert_int_equal(setenv("FP8GPT_ATTENTION", wanted, 1), 0);
  else
    assert_int_equal(unsetenv("FP8GPT_ATTENTION"), 0);
}

static fp8gpt_config small(void) {
  fp8gpt_config config;
  assert_ok(fp8gpt_config_preset("tiny-llama", &config));
  config.layers = LAYERS;
  config.hidden = 32;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn_hidden = 48;
  config.vocabulary = 61;
  config.sequence = LENGTH;
  config.init_std = 0.1f;
  return config;
}

static fp8gpt_model_options options_of(fp8gpt_precision precision) {
  fp8gpt_model_options options = fp8gpt_model_options_default();
  options.precision = precision;
  options.batch = BATCH;
  return options;
}

static fp8gpt_model *create(const fp8gpt_model_options *options) {
  const fp8gpt_config config = small();
  fp8gpt_model *model;
  assert_ok(fp8gpt_model_create(&model, gpu, &config, options));
  return model;
}

static fp8gpt_batch batch_of(int sequences, int length) {
  static int32_t ids[BATCH * LENGTH + 1];
  for (int i = 0; i <= BATCH * LENGTH; i++) ids[i] = 7 * i * i % 61;
  return (fp8gpt_batch){sequences, length, ids, ids + 1};
}

static float train(fp8gpt_model *model, int sequences, int length) {
  const fp8gpt_batch batch = batch_of(sequences, length);
  float loss;
  assert_ok(fp8gpt_model_train(model, &batch, 1, 1.0f, 0, 0, &loss));
  return loss;
}

// Forward and backward passes since the last question.
static void expect_passes(int forwards, int backwards) {
  assert_int_equal(fake_cudnn.forwards, forwards);
  assert_int_equal(fake_cudnn.backwards, backwards);
  fake_cudnn.forwards = fake_cudnn.backwards = 0;
}

static void expect_same_gradients(const fp8gpt_model *one, const fp8gpt_model *other) {
  for (int64_t i = 0; i < fp8gpt_model_parameters(one); i++) {
    fp8gpt_parameter a;
    fp8gpt_parameter b;
    assert_ok(fp8gpt_model_parameter(one, i, &a));
    assert_ok(fp8gpt_model_parameter(other, i, &b));
    const size_t bytes = (size_t)fp8core_tensor_elements(&a.gradient) * fp8core_dtype_size(a.gradient.dtype);
    // The emulation's memory is the host's.
    assert_memory_equal(a.gradient.data, b.gradient.data, bytes);
  }
}

// Whole batches through cuDNN, all others not.
static void cudnn_is_taken(void **state) {
  (void)state;
  for (int recompute = 0; recompute < 2; recompute++)
    for (int precision = FP8GPT_BF16; precision <= FP8GPT_FP8_O2; precision++) {
      fp8gpt_model_options options = options_of((fp8gpt_precision)precision);
      options.recompute = recompute;
      set_up(FAKE_CUDNN_GOOD, recompute ? "auto" : NULL);
      fp8gpt_model *model = create(&options);
      assert_string_equal(fp8gpt_model_attention(model), "cuDNN 9.99.0");
      assert_int_equal(fake_cudnn.open, 1);
      assert_true(fake_cudnn.capability >= 80);
      // The check at creation.
      expect_passes(1, 2);
      (void)train(model, BATCH, LENGTH);
      expect_passes(recompute ? 2 * LAYERS : LAYERS, LAYERS);
      float loss;
      const fp8gpt_batch batch = batch_of(BATCH, LENGTH);
      assert_ok(fp8gpt_model_loss(model, &batch, &loss));
      expect_passes(LAYERS, 0);
      (void)train(model, BATCH - 1, LENGTH);
      (void)train(model, BATCH, LENGTH - 1);
      expect_passes(0, 0);
      (void)train(model, BATCH, LENGTH);
      expect_passes(recompute ? 2 * LAYERS : LAYERS, LAYERS);
      set_up(FAKE_CUDNN_GOOD, "own");
      fp8gpt_model *own = create(&options);
      assert_string_equal(fp8gpt_model_attention(own), "own: FP8GPT_ATTENTION is own");
      (void)train(own, BATCH, LENGTH);
      expect_passes(0, 0);
      // What is played is the same arithmetic; but a model that trained before has other scales.
      if (precision == FP8GPT_BF16) expect_same_gradients(model, own);
      fp8gpt_model_destroy(&own);
      fake_cudnn.open = 1;
      fp8gpt_model_destroy(&model);
      assert_int_equal(fake_cudnn.open, 0);
    }
}

// A fault, what the model says then, and what an order to take cuDNN fails with.
typedef struct fault_case {
  fake_cudnn_fault fault;
  const char *says;
  const char *fails;
  fp8core_status status;
  int forwards;
} fault_case;

static void faults(void **state) {
  (void)state;
  static const fault_case cases[] = {
    {FAKE_CUDNN_ABSENT, "own: cuDNN (played) cannot be loaded", "cuDNN (played) cannot be loaded",
     FP8CORE_ERROR_NOT_SUPPORTED, 0},
    {FAKE_CUDNN_NO_FORWARD, "own: cuDNN: attention is refused", "cuDNN: attention is refused",
     FP8CORE_ERROR_NOT_SUPPORTED, 0},
    {FAKE_CUDNN_NO_BACKWARD, "cuDNN 9.99.0 forward, own backward: cuDNN: attention's backward pass is refused",
     "cuDNN: attention's backward pass is refused", FP8CORE_ERROR_NOT_SUPPORTED, LAYERS},
    {FAKE_CUDNN_IDLE_FORWARD, "own: cuDNN: attention's outputs differ from our own kernels' by 1 of their norm",
     "attention's outputs differ", FP8CORE_ERROR_NOT_SUPPORTED, 0},
    {FAKE_CUDNN_FAILING_FORWARD, "own: cuDNN: attention: a launch failed", "a launch failed", FP8CORE_ERROR_DEVICE, 0},
    {FAKE_CUDNN_NAN_FORWARD, "own: cuDNN: attention's outputs differ from our own kernels' by nan of their norm",
     "attention's outputs differ", FP8CORE_ERROR_NOT_SUPPORTED, 0},
    {FAKE_CUDNN_WRONG_LOGARITHMS, "own: cuDNN: attention's logarithms differ from our own kernels' by 0.1 of",
     "attention's logarithms differ", FP8CORE_ERROR_NOT_SUPPORTED, 0},
    {FAKE_CUDNN_WRONG_QUERIES, "cuDNN 9.99.0 forward, own backward: cuDNN: gradients of queries differ from our own",
     "gradients of queries differ", FP8CORE_ERROR_NOT_SUPPORTED, LAYERS},
    {FAKE_CUDNN_WRONG_KEYS, "cuDNN 9.99.0 forward, own backward: cuDNN: gradients of keys differ from our own",
     "gradients of keys differ", FP8CORE_ERROR_NOT_SUPPORTED, LAYERS},
    {FAKE_CUDNN_WRONG_VALUES, "cuDNN 9.99.0 forward, own backward: cuDNN: gradients of values differ from our own",
     "gradients of values differ", FP8CORE_ERROR_NOT_SUPPORTED, LAYERS},
    {FAKE_CUDNN_FAILING_BACKWARD, "cuDNN 9.99.0 forward, own backward: cuDNN: attention's backward pass: a launch",
     "a launch failed", FP8CORE_ERROR_NOT_SUPPORTED, LAYERS},
    {FAKE_CUDNN_RESTLESS, "cuDNN 9.99.0 forward, own backward: cuDNN: gradients of queries differ by",
     "from one run to the next", FP8CORE_ERROR_NOT_SUPPORTED, LAYERS},
  };
  const fp8gpt_model_options options = options_of(FP8GPT_BF16);
  const fp8gpt_config config = small();
  set_up(FAKE_CUDNN_GOOD, "own");
  fp8gpt_model *own = create(&options);
  (void)train(own, BATCH, LENGTH);
  for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
    const fault_case *now = &cases[i];
    set_up(now->fault, NULL);
    fp8gpt_model *model = create(&options);
    if (strncmp(fp8gpt_model_attention(model), now->says, strlen(now->says)) != 0)
      fail_msg("fault %d: attention is by \"%s\", expected \"%s\"", (int)now->fault, fp8gpt_model_attention(model),
               now->says);
    assert_int_equal(fake_cudnn.open, now->forwards > 0);
    fake_cudnn.forwards = fake_cudnn.backwards = 0;
    (void)train(model, BATCH, LENGTH);
    expect_passes(now->forwards, 0);
    expect_same_gradients(model, own);
    fp8gpt_model_destroy(&model);
    assert_int_equal(fake_cudnn.open, 0);
    set_up(now->fault, "cudnn");
    assert_fails(fp8gpt_model_create(&model, gpu, &config, &options), now->status, now->fails);
    test_assert_message_contains("fp8gpt_model_create", "FP8GPT_ATTENTION is cudnn, but cuDNN");
    assert_null(model);
    assert_int_equal(fake_cudnn.open, 0);
  }
  fp8gpt_model_destroy(&own);
}

// Other models never open it, whatever is wanted.
static void own_models(void **state) {
  (void)state;
  static const char *const wanted[] = {NULL, "auto", "cudnn", ""};
  for (int i = 0; i < 4; i++) {
    fp8gpt_model_options options = options_of(FP8GPT_FP32);
    set_up(FAKE_CUDNN_GOOD, wanted[i]);
    fp8gpt_model *model = create(&options);
    assert_string_equal(fp8gpt_model_attention(model), "own: activations are FP32");
    fp8gpt_model_destroy(&model);
    options = options_of(FP8GPT_BF16);
    options.inference = 1;
    model = create(&options);
    assert_string_equal(fp8gpt_model_attention(model), "own: the model is for inference");
    float loss;
    const fp8gpt_batch batch = batch_of(BATCH, LENGTH);
    assert_ok(fp8gpt_model_loss(model, &batch, &loss));
    fp8gpt_model_destroy(&model);
    expect_passes(0, 0);
  }
  set_up(FAKE_CUDNN_GOOD, "fast");
  const fp8gpt_config config = small();
  const fp8gpt_model_options options = options_of(FP8GPT_BF16);
  fp8gpt_model *model;
  assert_fails(fp8gpt_model_create(&model, gpu, &config, &options), FP8CORE_ERROR_INVALID_ARGUMENT,
               "FP8GPT_ATTENTION is \"fast\", expected auto, cudnn or own");
  assert_null(model);
  assert_null(fp8gpt_model_attention(NULL));
}

// The workspace is the model's, planned and reported; a large one is only for who orders cuDNN.
static void workspace(void **state) {
  (void)state;
  const fp8gpt_model_options options = options_of(FP8GPT_BF16);
  fp8gpt_memory without;
  fp8gpt_memory with;
  set_up(FAKE_CUDNN_GOOD, "own");
  fp8gpt_model *model = create(&options);
  assert_ok(fp8gpt_memory_report(model, &without));
  fp8gpt_model_destroy(&model);
  set_up(FAKE_CUDNN_GOOD, NULL);
  fake_cudnn.workspace_bytes = 3000000;
  model = create(&options);
  assert_string_equal(fp8gpt_model_attention(model), "cuDNN 9.99.0");
  assert_ok(fp8gpt_memory_report(model, &with));
  assert_true(with.workspace_bytes - without.workspace_bytes > 2000000);
  assert_true(with.workspace_bytes - without.workspace_bytes < 4000000);
  assert_int_equal(with.activation_bytes, without.activation_bytes);
  (void)train(model, BATCH, LENGTH);
  fp8gpt_model_destroy(&model);
  fake_cudnn.workspace_bytes = ((int64_t)1 << 30) + 1;
  model = create(&options);
  assert_string_equal(fp8gpt_model_attention(model),
                      "cuDNN 9.99.0 forward, own backward: cuDNN: a large workspace is refused");
  // What is not used is not kept.
  assert_ok(fp8gpt_memory_report(model, &with));
  assert_int_equal(with.workspace_bytes, without.workspace_bytes);
  fp8gpt_model_destroy(&model);
}

int main(void) {
  fp8core_context_options options = fp8core_context_options_default();
  options.device.type = FP8CORE_DEVICE_CUDA;
  if (fp8core_context_create(&gpu, &options) != FP8CORE_OK) {
    fprintf(stderr, "%s\n", fp8core_last_error());
    return 1;
  }
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(cudnn_is_taken),
    cmocka_unit_test(faults),
    cmocka_unit_test(own_models),
    cmocka_unit_test(workspace),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  fp8core_context_destroy(&gpu);
  return failed;
}
