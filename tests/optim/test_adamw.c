#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rig.h"

// Optimizers too large for any machine are asked for on purpose; the sanitizer must answer as the C library does.
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

#define INVALID FP8CORE_ERROR_INVALID_ARGUMENT

static const fp8core_dtype all_dtypes[] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_BF16, FP8CORE_FP16, FP8CORE_FP32};

static fp8optim_adamw_options preset_options(int preset) { return fp8optim_adamw_options_of((fp8optim_preset)preset); }

static const char *preset_name(int preset) { return fp8optim_preset_name((fp8optim_preset)preset); }

static fp8optim_adamw_options options_with(fp8core_dtype master, fp8core_dtype exp_avg, fp8core_dtype exp_avg_sq) {
  fp8optim_adamw_options options = fp8optim_adamw_options_default();
  options.master_dtype = master;
  options.exp_avg_dtype = exp_avg;
  options.exp_avg_sq_dtype = exp_avg_sq;
  return options;
}

static fp8optim_group group_with(double learning_rate, double weight_decay) {
  fp8optim_group group = fp8optim_group_default();
  group.learning_rate = learning_rate;
  group.weight_decay = weight_decay;
  return group;
}

static uint32_t sign_of(fp8core_dtype dtype) { return UINT32_C(1) << (8 * fp8core_dtype_size(dtype) - 1); }

static void *host(size_t bytes) {
  void *memory = calloc(1, bytes ? bytes : 1);
  assert_non_null(memory);
  return memory;
}

static void steps_of(rig *r, test_random *random, int steps, double factor) {
  for (int i = 0; i < steps; i++) {
    rig_random_gradients(r, random, factor);
    assert_int_equal(rig_step(r, NULL).skipped, 0);
  }
}

static void names_and_defaults(void **unused) {
  (void)unused;
  const char *const presets[] = {"fp32", "bf16", "fp8", "fp8-bf16-master", "fp8-master", "fp8-exp-avg-sq"};
  const fp8core_dtype formats[][3] = {
    {FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32}, {FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32},
    {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16}, {FP8CORE_BF16, FP8CORE_E4M3, FP8CORE_FP16},
    {FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_FP16}, {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E4M3}};
  for (int i = 0; i < PRESETS; i++) {
    const fp8optim_adamw_options options = preset_options(i);
    assert_string_equal(preset_name(i), presets[i]);
    assert_int_equal(options.size, sizeof(options));
    assert_int_equal(options.master_dtype, formats[i][0]);
    assert_int_equal(options.exp_avg_dtype, formats[i][1]);
    assert_int_equal(options.exp_avg_sq_dtype, formats[i][2]);
    assert_int_equal(options.stochastic_rounding, 0);
    assert_true(options.seed == 0);
  }
  assert_string_equal(preset_name(PRESETS), "unknown");
  assert_string_equal(preset_name(-1), "unknown");
  const fp8optim_adamw_options outside = preset_options(99);
  const fp8optim_adamw_options usual = fp8optim_adamw_options_default();
  assert_memory_equal(&outside, &usual, sizeof(usual));
  assert_string_equal(fp8optim_state_name(FP8OPTIM_MASTER), "master");
  assert_string_equal(fp8optim_state_name(FP8OPTIM_EXP_AVG), "exp_avg");
  assert_string_equal(fp8optim_state_name(FP8OPTIM_EXP_AVG_SQ), "exp_avg_sq");
  assert_string_equal(fp8optim_state_name(FP8OPTIM_WEIGHT), "weight");
  assert_string_equal(fp8optim_state_name((fp8optim_state)4), "unknown");
  assert_string_equal(fp8optim_state_name((fp8optim_state)-1), "unknown");
  assert_true(fp8optim_adamw_steps(NULL) == 0);
  assert_int_equal(fp8optim_adamw_saved_bytes(NULL), 0);
  fp8optim_adamw *none = NULL;
  fp8optim_adamw_destroy(NULL);
  fp8optim_adamw_destroy(&none);
}

static void wrong_arguments_of_create(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  const fp8optim_parameter good[2] = {fp8optim_parameter_create("one", 2, 3), fp8optim_parameter_create("two", 4, 5)};
  fp8optim_adamw *adamw;
#define REFUSED_STATUS(status, text, options, count, parameters, group_count, groups)                                  \
  do {                                                                                                                 \
    adamw = (fp8optim_adamw *)(uintptr_t)8;                                                                            \
    assert_fails(fp8optim_adamw_create(&adamw, context, options, count, parameters, group_count, groups), status,      \
                 text);                                                                                                \
    assert_null(adamw);                                                                                                \
  } while (0)
#define REFUSED(...) REFUSED_STATUS(INVALID, __VA_ARGS__)
  assert_fails(fp8optim_adamw_create(NULL, context, NULL, 2, good, 1, &group), INVALID, "adamw of");
  adamw = (fp8optim_adamw *)(uintptr_t)8;
  assert_fails(fp8optim_adamw_create(&adamw, NULL, NULL, 2, good, 1, &group), INVALID, "context of");
  assert_null(adamw);
  fp8optim_adamw_options options = fp8optim_adamw_options_default();
  options.size = 4;
  REFUSED_STATUS(FP8CORE_ERROR_VERSION_MISMATCH, "fp8optim_adamw_options.size is 4, expected", &options, 2, good, 1,
                 &group);
  options = options_with((fp8core_dtype)5, FP8CORE_E4M3, FP8CORE_E4M3);
  REFUSED("master_dtype is 5, expected an fp8core_dtype, 0 to 4", &options, 2, good, 1, &group);
  options = options_with(FP8CORE_FP16, (fp8core_dtype)-1, FP8CORE_E4M3);
  REFUSED("exp_avg_dtype is -1", &options, 2, good, 1, &group);
  options = options_with(FP8CORE_FP16, FP8CORE_E4M3, (fp8core_dtype)77);
  REFUSED("exp_avg_sq_dtype is 77", &options, 2, good, 1, &group);
  REFUSED("parameter_count is 0, expected 1 to", NULL, 0, good, 1, &group);
  REFUSED("parameter_count is -3", NULL, -3, good, 1, &group);
  REFUSED("parameter_count is 9223372036854775807", NULL, INT64_MAX, good, 1, &group);
  REFUSED("parameters is NULL", NULL, 2, NULL, 1, &group);
  REFUSED("group_count is 0, expected 1 to 65536", NULL, 2, good, 0, &group);
  REFUSED("group_count is -1", NULL, 2, good, -1, &group);
  REFUSED("group_count is 65537", NULL, 2, good, 65537, &group);
  REFUSED("groups is NULL", NULL, 2, good, 1, NULL);
  fp8optim_parameter bad[2];
  char long_name[300];
  memset(long_name, 'x', sizeof(long_name) - 1);
  long_name[sizeof(long_name) - 1] = '\0';
#define REFUSED_PARAMETER(change, text)                                                                                \
  do {                                                                                                                 \
    memcpy(bad, good, sizeof(bad));                                                                                    \
    fp8optim_parameter *const p = &bad[1];                                                                             \
    change;                                                                                                            \
    REFUSED(text, NULL, 2, bad, 1, &group);                                                                            \
  } while (0)
  REFUSED_PARAMETER(p->name = NULL, "the name of parameter 1 is NULL");
  REFUSED_PARAMETER(p->name = "", "the name of parameter 1 has 0 bytes, expected 1 to 255");
  REFUSED_PARAMETER(p->name = long_name, "has 299 bytes");
  REFUSED_PARAMETER(p->name = "one", "two parameters are called \"one\"");
  REFUSED_PARAMETER(p->dimensions = 5, "parameter \"two\" has 5 dimensions, expected 0 to 4");
  REFUSED_PARAMETER(p->dimensions = -1, "parameter \"two\" has -1 dimensions");
  REFUSED_PARAMETER(p->shape[1] = -7, "shape[1] of parameter \"two\" is -7, expected at least 0");
  REFUSED_PARAMETER(p->shape[0] = INT64_MAX, "parameter \"two\" has more than 2^59 elements");
  REFUSED_PARAMETER((p->shape[0] = INT64_C(1) << 40, p->shape[1] = INT64_C(1) << 40), "more than 2^59 elements");
  REFUSED_PARAMETER(p->group = 1, "group of parameter \"two\" is 1, expected 0 to 0");
  REFUSED_PARAMETER(p->group = -1, "group of parameter \"two\" is -1");
  REFUSED_PARAMETER((p->with_weight = 1, p->weight_dtype = (fp8core_dtype)9), "weight_dtype is 9");
  REFUSED_PARAMETER(p->weight = bad, "parameter \"two\" has weight memory at");
#undef REFUSED_PARAMETER
  fp8optim_group groups[2];
#define REFUSED_GROUP(field, value, text)                                                                              \
  do {                                                                                                                 \
    groups[0] = groups[1] = group;                                                                                     \
    groups[1].field = (value);                                                                                         \
    REFUSED(text, NULL, 2, good, 2, groups);                                                                           \
  } while (0)
  REFUSED_GROUP(learning_rate, (double)NAN, "learning_rate of group 1 is nan, expected a finite number of at least 0");
  REFUSED_GROUP(learning_rate, (double)INFINITY, "learning_rate of group 1 is inf");
  REFUSED_GROUP(learning_rate, -1e-9, "learning_rate of group 1 is -1e-09");
  REFUSED_GROUP(beta1, 1.0, "beta1 of group 1 is 1, expected a number in [0, 1)");
  REFUSED_GROUP(beta1, -0.1, "beta1 of group 1 is -0.1");
  REFUSED_GROUP(beta1, (double)NAN, "beta1 of group 1 is nan");
  REFUSED_GROUP(beta2, 1.0, "beta2 of group 1 is 1");
  REFUSED_GROUP(beta2, 1.5, "beta2 of group 1 is 1.5");
  REFUSED_GROUP(beta2, (double)NAN, "beta2 of group 1 is nan");
  REFUSED_GROUP(eps, 0.0, "eps of group 1 is 0, expected a finite number of at least 1e-37");
  REFUSED_GROUP(eps, -1e-8, "eps of group 1 is -1e-08");
  REFUSED_GROUP(eps, (double)NAN, "eps of group 1 is nan");
  REFUSED_GROUP(eps, (double)INFINITY, "eps of group 1 is inf");
  REFUSED_GROUP(weight_decay, -0.1, "weight_decay of group 1 is -0.1, expected a finite number of at least 0");
  REFUSED_GROUP(weight_decay, (double)NAN, "weight_decay of group 1 is nan");
  REFUSED_GROUP(weight_decay, (double)INFINITY, "weight_decay of group 1 is inf");
#undef REFUSED_GROUP
  // Sizes that each fit, but not together: whether in 63 bits or in any machine.
  fp8optim_parameter huge[8];
  char names[8][8];
  for (int i = 0; i < 8; i++) {
    (void)snprintf(names[i], sizeof(names[i]), "huge%d", i);
    huge[i] = fp8optim_parameter_create(names[i], INT64_C(1) << 29, INT64_C(1) << 29);
  }
  options = preset_options(FP8OPTIM_PRESET_FP32);
  for (int count = 1; count <= 8; count++)
    REFUSED_STATUS(FP8CORE_ERROR_OUT_OF_MEMORY, "bytes", &options, count, huge, 1, &group);
  fp8core_context_destroy(&context);
}

// A rig with moments, weights and skipped steps behind it.
static rig busy_rig(fp8core_context *context, int preset, fp8core_dtype gradient_dtype, test_random *random) {
  const fp8optim_adamw_options options = preset_options(preset);
  const fp8optim_group groups[2] = {group_with(1e-3, 0.1), group_with(2e-3, 0.0)};
  fp8optim_parameter parameters[3] = {fp8optim_parameter_create("matrix", 5, 7),
                                      fp8optim_parameter_create("bias", 1, 33),
                                      fp8optim_parameter_create("empty", 0, 4)};
  parameters[0].with_weight = 1;
  parameters[1].with_weight = 1;
  parameters[1].weight_dtype = FP8CORE_BF16;
  parameters[1].group = 1;
  rig r = rig_create(context, &options, 3, parameters, 2, groups, gradient_dtype);
  rig_random_masters(&r, random, 0.1);
  steps_of(&r, random, 3, 1.0);
  return r;
}

static void wrong_arguments_change_nothing(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  test_random random = {5};
  for (int preset = 0; preset < PRESETS; preset++) {
    rig r = busy_rig(context, preset, FP8CORE_FP32, &random);
    rig_random_gradients(&r, &random, 1.0);
    image before = rig_image(&r);
    fp8core_tensor tensor;
    fp8optim_group group = fp8optim_group_default();
    fp8optim_memory memory;
    fp8core_tensor *const g = r.gradients;
    const fp8core_tensor gradient = g[1];
#define REFUSED_STEP(change, text)                                                                                     \
  do {                                                                                                                 \
    fp8optim_step_report report;                                                                                       \
    memset(&report, 0x5a, sizeof(report));                                                                             \
    change;                                                                                                            \
    assert_fails(fp8optim_adamw_step(r.adamw, g, NULL, &report), INVALID, text);                                       \
    assert_int_equal(report.skipped, 0x5a5a5a5a);                                                                      \
    g[1] = gradient;                                                                                                   \
  } while (0)
    REFUSED_STEP(g[1].shape[1] = 32, "shape[1] of the gradient of parameter \"bias\" is 32, expected 33");
    REFUSED_STEP(g[1].shape[0] = 2, "shape[0] of the gradient of parameter \"bias\" is 2, expected 1");
    REFUSED_STEP((g[1].dimensions = 1, g[1].shape[0] = 33), "bias\" has 1 dimensions, expected 2");
    REFUSED_STEP(g[1].dtype = (fp8core_dtype)6, "bias\": tensor: dtype is 6");
    REFUSED_STEP(g[1].data = NULL, "data is NULL");
    REFUSED_STEP(g[1].row_stride = 32, "row_stride is 32");
    REFUSED_STEP(g[1].scale_granularity = (fp8core_scale_granularity)1, "scale_granularity is 1");
    REFUSED_STEP(g[1].device.type = (fp8core_device_type)(1 - (int)g[1].device.type), "bias\" is on device");
    REFUSED_STEP(g[1].scale_inverse = (const float *)(const void *)((const char *)gradient.data + 1), "scale_inverse");
#undef REFUSED_STEP
    fp8optim_step_options step = fp8optim_step_options_default();
    step.size = 1;
    assert_fails(fp8optim_adamw_step(r.adamw, g, &step, NULL), FP8CORE_ERROR_VERSION_MISMATCH, "size is 1, expected");
    const float wrong[] = {-1.0f, NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 4; i++) {
      step = fp8optim_step_options_default();
      step.max_norm = wrong[i];
      assert_fails(fp8optim_adamw_step(r.adamw, g, &step, NULL), INVALID, "max_norm is");
      step = fp8optim_step_options_default();
      step.loss_scale = wrong[i];
      assert_fails(fp8optim_adamw_step(r.adamw, g, &step, NULL), INVALID, "loss_scale is");
    }
    step = fp8optim_step_options_default();
    step.loss_scale = 0.0f;
    assert_fails(fp8optim_adamw_step(r.adamw, g, &step, NULL), INVALID, "loss_scale is 0, expected a finite positive");
    assert_fails(fp8optim_adamw_step(r.adamw, NULL, NULL, NULL), INVALID, "gradients is NULL, expected 3 tensors");
    assert_fails(fp8optim_adamw_step(NULL, g, NULL, NULL), INVALID, "adamw of fp8optim_adamw_step() is NULL");

    const int64_t indices[] = {-1, 3, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < 4; i++) {
      char text[64];
      (void)snprintf(text, sizeof(text), "index is %" PRId64 ", expected 0 to 2", indices[i]);
      assert_fails(fp8optim_adamw_state(r.adamw, indices[i], FP8OPTIM_MASTER, &tensor), INVALID, text);
      assert_fails(fp8optim_adamw_set_state(r.adamw, indices[i], FP8OPTIM_MASTER, &gradient), INVALID, text);
    }
    assert_fails(fp8optim_adamw_state(r.adamw, 0, (fp8optim_state)4, &tensor), INVALID, "state is 4, expected 0 to 3");
    assert_fails(fp8optim_adamw_state(r.adamw, 0, (fp8optim_state)-1, &tensor), INVALID, "state is -1");
    assert_fails(fp8optim_adamw_state(r.adamw, 0, FP8OPTIM_MASTER, NULL), INVALID, "tensor of");
    assert_fails(fp8optim_adamw_state(r.adamw, 2, FP8OPTIM_WEIGHT, &tensor), INVALID, "\"empty\" was created with");
    assert_fails(fp8optim_adamw_state(NULL, 0, FP8OPTIM_MASTER, &tensor), INVALID, "adamw of");

    assert_fails(fp8optim_adamw_set_state(r.adamw, 1, FP8OPTIM_WEIGHT, &gradient), INVALID, "state is 3");
    assert_fails(fp8optim_adamw_set_state(r.adamw, 1, FP8OPTIM_MASTER, NULL), INVALID, "\"bias\" is NULL");
    assert_fails(fp8optim_adamw_set_state(NULL, 1, FP8OPTIM_MASTER, &gradient), INVALID, "adamw of");
    assert_fails(fp8optim_adamw_set_state(r.adamw, 0, FP8OPTIM_MASTER, &gradient), INVALID,
                 "has 33 elements, expected 35");
    float values[33];
    for (int bad = 0; bad < 4; bad++) {
      const float poison[] = {NAN, INFINITY, -INFINITY, -1e-30f};
      static const char *const texts[] = {"holds a NaN", "holds an infinity", "holds an infinity", "a negative value"};
      for (int i = 0; i < 33; i++) values[i] = (float)i;
      values[bad * 10] = poison[bad];
      rig_set_gradient(&r, 1, values);
      for (int state = bad == 3 ? FP8OPTIM_EXP_AVG_SQ : FP8OPTIM_MASTER; state < 3; state++) {
        assert_fails(fp8optim_adamw_set_state(r.adamw, 1, (fp8optim_state)state, &gradient), INVALID, texts[bad]);
        test_assert_message_contains("set_state", fp8optim_state_name((fp8optim_state)state));
      }
    }
    // Finite as stored, but not with its scale.
    const float scale_inverse = 1e38f;
    tensor = gradient;
    for (int i = 0; i < 33; i++) values[i] = (float)i;
    rig_set_gradient(&r, 1, values);
    tensor.scale_inverse = test_upload(context, &scale_inverse, sizeof(scale_inverse));
    assert_fails(fp8optim_adamw_set_state(r.adamw, 1, FP8OPTIM_MASTER, &tensor), INVALID, "holds an infinity");
    test_free(context, (void *)(uintptr_t)tensor.scale_inverse);
    // A source that overlaps its state elsewhere than in place.
    fp8core_tensor own;
    assert_ok(fp8optim_adamw_state(r.adamw, 1, FP8OPTIM_MASTER, &own));
    assert_fails(fp8optim_adamw_set_state(r.adamw, 1, FP8OPTIM_MASTER, &own), INVALID, "overlaps its master");

    assert_fails(fp8optim_adamw_set_steps(r.adamw, -1), INVALID, "steps is -1, expected 0 to 2^31 - 2");
    assert_fails(fp8optim_adamw_set_steps(r.adamw, INT64_C(2147483647)), INVALID, "steps is 2147483647");
    assert_fails(fp8optim_adamw_set_steps(NULL, 1), INVALID, "adamw of");
    assert_fails(fp8optim_adamw_set_group(r.adamw, 2, &group), INVALID, "group is 2, expected 0 to 1");
    assert_fails(fp8optim_adamw_set_group(r.adamw, -1, &group), INVALID, "group is -1");
    assert_fails(fp8optim_adamw_set_group(r.adamw, 0, NULL), INVALID, "values of");
    assert_fails(fp8optim_adamw_set_group(NULL, 0, &group), INVALID, "adamw of");
    group.beta2 = 1.0;
    assert_fails(fp8optim_adamw_set_group(r.adamw, 1, &group), INVALID, "beta2 of group 1 is 1");
    assert_fails(fp8optim_adamw_get_group(r.adamw, 2, &group), INVALID, "group is 2");
    assert_fails(fp8optim_adamw_get_group(r.adamw, 0, NULL), INVALID, "values of");
    assert_fails(fp8optim_adamw_set_learning_rate(r.adamw, (double)NAN), INVALID, "learning_rate is nan, expected");
    assert_fails(fp8optim_adamw_set_learning_rate(r.adamw, -0.5), INVALID, "learning_rate is -0.5");
    assert_fails(fp8optim_adamw_set_learning_rate(NULL, 1.0), INVALID, "adamw of");
    assert_ok(fp8optim_adamw_get_group(r.adamw, 1, &group));
    assert_true(group.learning_rate == 2e-3 && group.beta2 == 0.95 && group.weight_decay == 0.0);
    assert_fails(fp8optim_adamw_memory(r.adamw, NULL), INVALID, "memory of");
    assert_fails(fp8optim_adamw_memory(NULL, &memory), INVALID, "adamw of");

    unsigned char *room = host(before.saved_bytes + 1);
    for (int more = -1; more <= 1; more += 2) {
      memset(room, 0x5a, before.saved_bytes + 1);
      assert_fails(fp8optim_adamw_save(r.adamw, room, before.saved_bytes + (size_t)more), INVALID, "expected the");
      for (size_t i = 0; i <= before.saved_bytes; i++) assert_int_equal(room[i], 0x5a);
    }
    free(room);
    assert_fails(fp8optim_adamw_save(r.adamw, NULL, before.saved_bytes), INVALID, "buffer of");
    assert_fails(fp8optim_adamw_save(NULL, &memory, 4), INVALID, "adamw of");
    assert_fails(fp8optim_adamw_load(r.adamw, NULL, before.saved_bytes), INVALID, "buffer of");
    assert_fails(fp8optim_adamw_load(NULL, before.data, before.saved_bytes), INVALID, "adamw of");
    assert_unchanged(&r, &before);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// The same gradients with and without skipped steps in between give the same bits, but for the count.
static void infinities_and_nans_skip(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int g = 0; g < 5; g++) {
    const fp8core_dtype dtype = all_dtypes[g];
    // Infinity and NaN, of both signs, as far as the format has them.
    uint32_t codes[4] = {0x7f, 0xff, 0x7f, 0xff};
    if (dtype != FP8CORE_E4M3) {
      codes[0] = fp8core_encode(dtype, INFINITY, 0);
      codes[2] = fp8core_encode(dtype, NAN, 0) & ~sign_of(dtype);
      codes[1] = codes[0] | sign_of(dtype);
      codes[3] = (codes[0] + 1) | sign_of(dtype);
    }
    test_random random = {(uint64_t)g};
    test_random other_random = {(uint64_t)g};
    rig r = busy_rig(context, FP8OPTIM_PRESET_FP8, dtype, &random);
    rig clean = busy_rig(context, FP8OPTIM_PRESET_FP8, dtype, &other_random);
    const size_t size = fp8core_dtype_size(dtype);
    int64_t skipped = 0;
    rig_random_gradients(&r, &random, 1.0);
    rig_random_gradients(&clean, &other_random, 1.0);
    const fp8core_tensor first = r.gradients[0];
    for (int64_t tensor = 0; tensor < 2; tensor++) {
      unsigned char *const data = r.gradients[tensor].data;
      for (int64_t place = 0; place < rig_elements(&r, tensor); place++) {
        unsigned char kept[4];
        const uint32_t code = codes[place % 4];
        image before = rig_image(&r);
        test_download(context, kept, data + place * (int64_t)size, size);
        assert_ok(fp8core_copy(context, data + place * (int64_t)size, &code, size));
        const fp8optim_step_report report = rig_step(&r, NULL);
        skipped++;
        assert_true(report.skipped != 0);
        assert_true(isnan(report.gradient_norm));
        assert_true(report.clip_factor == 1.0f);
        assert_true(report.steps == 3 && report.skipped_steps == skipped);
        // All but the count of skipped steps, which has 8 bytes, and the checksum over it.
        const size_t at = 8 + 5 * 4 + 8 + 2 * 8;
        const uint64_t count = (uint64_t)skipped;
        for (int i = 0; i < 8; i++) before.data[at + (size_t)i] = (unsigned char)(count >> 8 * i);
        image after = rig_image(&r);
        memcpy(before.data + before.saved_bytes - 4, after.data + before.saved_bytes - 4, 4);
        assert_same_image(&after, &before);
        free(before.data);
        free(after.data);
        assert_ok(fp8core_copy(context, data + place * (int64_t)size, kept, size));
      }
    }
    // A scale that is no number, of a gradient with elements and of one without.
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (int64_t tensor = 0; tensor < 2; tensor++) {
      const fp8core_tensor kept = r.gradients[tensor];
      for (int i = 0; i < 3; i++) {
        r.gradients[tensor].scale_inverse = test_upload(context, &wrong[i], sizeof(float));
        const fp8optim_step_report report = rig_step(&r, NULL);
        assert_true(report.skipped && report.skipped_steps == ++skipped);
        test_free(context, (void *)(uintptr_t)r.gradients[tensor].scale_inverse);
        r.gradients[tensor] = kept;
      }
    }
    assert_ptr_equal(first.data, r.gradients[0].data);
    // All infinite.
    for (int64_t place = 0; place < 35; place++)
      assert_ok(fp8core_copy(context, (unsigned char *)first.data + place * (int64_t)size, &codes[0], size));
    assert_true(rig_step(&r, NULL).skipped_steps == ++skipped);
    // The steps after are those of a run without.
    test_random next = {99};
    test_random other_next = {99};
    for (int step = 0; step < 3; step++) {
      rig_random_gradients(&r, &next, 1.0);
      rig_random_gradients(&clean, &other_next, 1.0);
      const fp8optim_step_report report = rig_step(&r, NULL);
      const fp8optim_step_report other = rig_step(&clean, NULL);
      assert_true(!report.skipped && report.steps == other.steps && report.skipped_steps == skipped);
      assert_true(report.gradient_norm == other.gradient_norm);
    }
    for (int64_t tensor = 0; tensor < 2; tensor++) {
      for (int state = 0; state < 4; state++) {
        uint32_t one[35];
        uint32_t two[35];
        rig_codes(&r, tensor, (fp8optim_state)state, one);
        rig_codes(&clean, tensor, (fp8optim_state)state, two);
        assert_memory_equal(one, two, (size_t)rig_elements(&r, tensor) * 4);
        assert_true(rig_scale(&r, tensor, (fp8optim_state)state) == rig_scale(&clean, tensor, (fp8optim_state)state));
      }
    }
    rig_destroy(&r);
    rig_destroy(&clean);
  }
  fp8core_context_destroy(&context);
}

// lr = 0: storing a master again gives the same bits, whatever the format, weights too; zeros of both signs, the least
// subnormals and the largest values among them.
static void learning_rate_zero(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int variant = 0; variant < 10; variant++) {
    const fp8core_dtype master = all_dtypes[variant / 2];
    fp8optim_adamw_options options = options_with(master, FP8CORE_E4M3, FP8CORE_FP16);
    const fp8optim_group group = group_with(0.0, 0.1);
    test_random random = {(uint64_t)variant};
    options.stochastic_rounding = variant % 2;
    options.seed = 4;
    for (int weight = 0; weight < 5; weight++) {
      enum { ELEMENTS = 77 };
      uint32_t masters[2][ELEMENTS];
      uint32_t weights[2][ELEMENTS];
      float values[ELEMENTS];
      rig r = rig_matrix(context, &options, 7, 11, weight, &group, FP8CORE_E5M2);
      for (int i = 0; i < ELEMENTS; i++)
        values[i] = (float)(test_random_normal(&random) * exp2(-(double)(i % 30) - 20.0 * (variant / 2 == 4)));
      values[0] = 0.0f;
      values[1] = -0.0f;
      values[2] = -1e-30f;
      values[3] = 7.0f;
      rig_set_state(&r, 0, FP8OPTIM_MASTER, values);
      const float scale = rig_scale(&r, 0, FP8OPTIM_MASTER);
      const float weight_scale = rig_scale(&r, 0, FP8OPTIM_WEIGHT);
      rig_codes(&r, 0, FP8OPTIM_MASTER, masters[0]);
      rig_codes(&r, 0, FP8OPTIM_WEIGHT, weights[0]);
      for (int step = 0; step < 1000; step++) {
        if (step % 100 == 0) rig_random_gradients(&r, &random, exp2(step % 300 / 10.0 - 10.0));
        (void)rig_step(&r, NULL);
      }
      rig_codes(&r, 0, FP8OPTIM_MASTER, masters[1]);
      rig_codes(&r, 0, FP8OPTIM_WEIGHT, weights[1]);
      assert_true(rig_scale(&r, 0, FP8OPTIM_MASTER) == scale);
      assert_true(rig_scale(&r, 0, FP8OPTIM_WEIGHT) == weight_scale);
      for (int i = 0; i < ELEMENTS; i++)
        if (masters[0][i] != masters[1][i] || weights[0][i] != weights[1][i])
          fail_msg("%s master, %s weight, element %d of value %g: %x and %x, expected %x and %x",
                   fp8core_dtype_name(master), fp8core_dtype_name(all_dtypes[weight]), i, (double)values[i],
                   masters[1][i], weights[1][i], masters[0][i], weights[0][i]);
      rig_destroy(&r);
    }
  }
  fp8core_context_destroy(&context);
}

static void zero_gradients(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int preset = 0; preset < PRESETS; preset++) {
    for (int negative = 0; negative < 2; negative++) {
      const fp8optim_adamw_options options = preset_options(preset);
      const fp8optim_group group = group_with(1e-2, 0.0);
      test_random random = {(uint64_t)preset};
      float zeros[40];
      uint32_t codes[40];
      uint32_t masters[2][40];
      uint32_t weights[2][40];
      rig r = rig_matrix(context, &options, 4, 10, FP8CORE_E4M3, &group, FP8CORE_E4M3);
      for (int i = 0; i < 40; i++) zeros[i] = negative && i % 2 ? -0.0f : 0.0f;
      rig_random_masters(&r, &random, 1.0);
      rig_set_gradient(&r, 0, zeros);
      rig_codes(&r, 0, FP8OPTIM_MASTER, masters[0]);
      rig_codes(&r, 0, FP8OPTIM_WEIGHT, weights[0]);
      for (int step = 0; step < 500; step++) {
        const fp8optim_step_report report = rig_step(&r, NULL);
        assert_true(!report.skipped && report.gradient_norm == 0.0f && report.steps == step + 1);
      }
      rig_codes(&r, 0, FP8OPTIM_MASTER, masters[1]);
      rig_codes(&r, 0, FP8OPTIM_WEIGHT, weights[1]);
      assert_memory_equal(masters[1], masters[0], sizeof(masters[0]));
      assert_memory_equal(weights[1], weights[0], sizeof(weights[0]));
      for (int state = FP8OPTIM_EXP_AVG; state <= FP8OPTIM_EXP_AVG_SQ; state++) {
        rig_codes(&r, 0, (fp8optim_state)state, codes);
        for (int i = 0; i < 40; i++) assert_int_equal(codes[i], 0);
      }
      rig_destroy(&r);
    }
  }
  fp8core_context_destroy(&context);
}

// Largest change of a master beyond one unit of its last place, in learning rates.
static double largest_update(const float *before, const float *after, int elements, double learning_rate,
                             double relative_unit) {
  double found = 0.0;
  for (int i = 0; i < elements; i++) {
    const double change = fabs((double)after[i] - (double)before[i]) - fabs((double)before[i]) * relative_unit;
    if (change / learning_rate > found) found = change / learning_rate;
  }
  return found;
}

// 100 in one element once, then 1e-6 everywhere else for 200 steps. With the preset's master, and with one in FP32,
// which shows the updates themselves.
static void spike(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int variant = 0; variant < 2 * PRESETS; variant++) {
    enum { ELEMENTS = 200 };
    fp8optim_adamw_options options = preset_options(variant / 2);
    const fp8optim_group group = group_with(1e-3, 0.0);
    float gradient[ELEMENTS];
    float before[ELEMENTS];
    float after[ELEMENTS];
    if (variant % 2) options.master_dtype = FP8CORE_FP32;
    const double unit = options.master_dtype == FP8CORE_E4M3   ? 0x1p-3
                        : options.master_dtype == FP8CORE_BF16 ? 0x1p-7
                        : options.master_dtype == FP8CORE_FP16 ? 0x1p-10
                                                               : 0x1p-22;
    rig r = rig_matrix(context, &options, 10, 20, -1, &group, FP8CORE_FP32);
    for (int i = 0; i < ELEMENTS; i++) before[i] = 0.5f + (float)i / 512.0f;
    rig_set_state(&r, 0, FP8OPTIM_MASTER, before);
    rig_get(&r, 0, FP8OPTIM_MASTER, before);
    for (int step = 0; step <= 200; step++) {
      for (int i = 0; i < ELEMENTS; i++) gradient[i] = i == 17 ? 0.0f : i % 2 ? 1e-6f : -1e-6f;
      if (step == 0) gradient[17] = 100.0f;
      rig_set_gradient(&r, 0, gradient);
      (void)rig_step(&r, NULL);
      rig_get(&r, 0, FP8OPTIM_MASTER, after);
      const double update = largest_update(before, after, ELEMENTS, group.learning_rate, unit);
      if (update > 3.0) fail_msg("%s, step %d: an update of %g learning rates", preset_name(variant / 2), step, update);
      memcpy(before, after, sizeof(before));
    }
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// A second moment that is positive stays so, however small beside the tensor's largest.
static void positive_second_moments(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int format = 0; format < 5; format++) {
    enum { ELEMENTS = 64 };
    const fp8optim_adamw_options options = options_with(FP8CORE_FP16, FP8CORE_E4M3, all_dtypes[format]);
    const fp8optim_group group = group_with(1e-3, 0.1);
    float gradient[ELEMENTS];
    float values[ELEMENTS];
    uint32_t codes[ELEMENTS];
    rig r = rig_matrix(context, &options, 1, ELEMENTS, -1, &group, FP8CORE_FP32);
    for (int step = 0; step < 300; step++) {
      for (int i = 0; i < ELEMENTS; i++) gradient[i] = i % 8 == 7 || step % 50 ? 0.0f : ldexpf(1.0f, 3 - i % 60);
      rig_set_gradient(&r, 0, gradient);
      (void)rig_step(&r, NULL);
      rig_codes(&r, 0, FP8OPTIM_EXP_AVG_SQ, codes);
      for (int i = 0; i < ELEMENTS; i++) assert_true((codes[i] == 0) == (i % 8 == 7));
    }
    // Set from outside, over the whole range of FP32.
    for (int i = 0; i < ELEMENTS; i++)
      values[i] = i % 8 == 7 ? (i % 16 == 7 ? -0.0f : 0.0f) : ldexpf(1.0f, 127 - 4 * i);
    rig_set_state(&r, 0, FP8OPTIM_EXP_AVG_SQ, values);
    rig_codes(&r, 0, FP8OPTIM_EXP_AVG_SQ, codes);
    for (int i = 0; i < ELEMENTS; i++)
      if ((codes[i] & ~sign_of(all_dtypes[format])) == 0 && values[i] > 0.0f)
        fail_msg("%s: %g became zero", fp8core_dtype_name(all_dtypes[format]), (double)values[i]);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

static void clipping_and_loss_scale(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int preset = 0; preset < PRESETS; preset++) {
    const fp8optim_adamw_options options = preset_options(preset);
    const fp8optim_group group = fp8optim_group_default();
    enum { ELEMENTS = 48 };
    float gradient[ELEMENTS];
    float scaled[ELEMENTS];
    rig plain = rig_matrix(context, &options, 6, 8, FP8CORE_E4M3, &group, FP8CORE_BF16);
    rig clipped = rig_matrix(context, &options, 6, 8, FP8CORE_E4M3, &group, FP8CORE_BF16);
    rig grown = rig_matrix(context, &options, 6, 8, FP8CORE_E4M3, &group, FP8CORE_BF16);
    test_random random = {1};
    test_random same = {1};
    test_random again = {1};
    rig_random_masters(&plain, &random, 1.0);
    rig_random_masters(&clipped, &same, 1.0);
    rig_random_masters(&grown, &again, 1.0);
    // 36 values of 4: the norm is 24.
    for (int i = 0; i < ELEMENTS; i++) gradient[i] = i < 36 ? (i % 3 ? 4.0f : -4.0f) : 0.0f;
    for (int i = 0; i < ELEMENTS; i++) scaled[i] = gradient[i] / 8.0f;
    fp8optim_step_options step = fp8optim_step_options_default();
    fp8optim_step_options loss = fp8optim_step_options_default();
    step.max_norm = 3.0f;
    loss.loss_scale = 4096.0f;
    for (int i = 0; i < 3; i++) {
      rig_set_gradient(&plain, 0, scaled);
      rig_set_gradient(&clipped, 0, gradient);
      for (int j = 0; j < ELEMENTS; j++) gradient[j] *= 512.0f;
      rig_set_gradient(&grown, 0, gradient);
      for (int j = 0; j < ELEMENTS; j++) gradient[j] /= 512.0f;
      const fp8optim_step_report one = rig_step(&plain, NULL);
      const fp8optim_step_report two = rig_step(&clipped, &step);
      const fp8optim_step_report three = rig_step(&grown, &loss);
      assert_true(one.gradient_norm == 3.0f && one.clip_factor == 1.0f);
      assert_true(two.gradient_norm == 24.0f && two.clip_factor == 0.125f);
      assert_true(three.gradient_norm == 3.0f && three.clip_factor == 1.0f);
    }
    image expected = rig_image(&plain);
    image one = rig_image(&clipped);
    image two = rig_image(&grown);
    assert_same_image(&one, &expected);
    assert_same_image(&two, &expected);
    free(expected.data);
    free(one.data);
    free(two.data);
    // At the norm itself nothing is clipped; the loss scale comes before the comparison.
    step.max_norm = 24.0f;
    rig_set_gradient(&clipped, 0, gradient);
    assert_true(rig_step(&clipped, &step).clip_factor == 1.0f);
    step.max_norm = 23.0f;
    assert_true(rig_step(&clipped, &step).clip_factor == 23.0f / 24.0f);
    step.loss_scale = 2.0f;
    assert_true(rig_step(&clipped, &step).clip_factor == 1.0f);
    step.max_norm = 6.0f;
    const fp8optim_step_report both = rig_step(&clipped, &step);
    assert_true(both.gradient_norm == 12.0f && both.clip_factor == 0.5f);
    rig_destroy(&plain);
    rig_destroy(&clipped);
    rig_destroy(&grown);
  }
  fp8core_context_destroy(&context);
}

// The norm is that of all tensors together, with their scales, whatever the formats.
static void norm_over_tensors(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int g = 0; g < 5; g++) {
    fp8optim_parameter parameters[3] = {fp8optim_parameter_create("a", 3, 1000), fp8optim_parameter_create("b", 1, 1),
                                        fp8optim_parameter_create("c", 200, 301)};
    const fp8optim_group group = fp8optim_group_default();
    test_random random = {(uint64_t)g};
    rig r = rig_create(context, NULL, 3, parameters, 1, &group, all_dtypes[g]);
    double sum = 0.0;
    for (int64_t i = 0; i < 3; i++) {
      const int64_t elements = rig_elements(&r, i);
      const float scale_inverse = i == 0 ? 0.37f : i == 1 ? -3.0f : 1e-3f;
      float *values = host((size_t)elements * sizeof(float));
      for (int64_t j = 0; j < elements; j++) values[j] = (float)test_random_normal(&random);
      rig_set_gradient(&r, i, values);
      for (int64_t j = 0; j < elements; j++) {
        const float stored = fp8core_decode(all_dtypes[g], fp8core_encode(all_dtypes[g], values[j], 1));
        sum += (double)stored * (double)stored * (double)scale_inverse * (double)scale_inverse;
      }
      r.gradients[i].scale_inverse = test_upload(context, &scale_inverse, sizeof(float));
      free(values);
    }
    const double norm = (double)rig_step(&r, NULL).gradient_norm;
    // FP32 sums of up to 512 squares each, where they are FP32's.
    if (fabs(norm / sqrt(sum) - 1.0) > 1e-5) fail_msg("norm %.9g, expected %.9g", norm, sqrt(sum));
    for (int64_t i = 0; i < 3; i++) test_free(context, (void *)(uintptr_t)r.gradients[i].scale_inverse);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

static void assert_same_tensor(const rig *one, int64_t index, const rig *other, int64_t other_index) {
  const size_t elements = (size_t)rig_elements(one, index);
  uint32_t *codes[2] = {host(elements * 4), host(elements * 4)};
  for (int state = 0; state < (one->parameters[index].with_weight ? 4 : 3); state++) {
    rig_codes(one, index, (fp8optim_state)state, codes[0]);
    rig_codes(other, other_index, (fp8optim_state)state, codes[1]);
    assert_memory_equal(codes[0], codes[1], elements * 4);
    assert_true(rig_scale(one, index, (fp8optim_state)state) == rig_scale(other, other_index, (fp8optim_state)state));
  }
  free(codes[0]);
  free(codes[1]);
}

// Each group's tensors move as in an optimizer of that group alone, through changes of the hyper-parameters.
static void groups(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  fp8optim_group both[2] = {group_with(1e-2, 0.1), group_with(3e-2, 0.0)};
  both[1].beta1 = 0.8;
  both[1].beta2 = 0.999;
  both[1].eps = 1e-6;
  fp8optim_parameter parameters[2] = {fp8optim_parameter_create("a", 5, 9), fp8optim_parameter_create("b", 5, 9)};
  parameters[0].with_weight = parameters[1].with_weight = 1;
  rig alone[2];
  float values[45];
  test_random random = {8};
  for (int i = 0; i < 2; i++) {
    parameters[i].group = 0;
    alone[i] = rig_create(context, NULL, 1, &parameters[i], 1, &both[i], FP8CORE_FP16);
    parameters[i].group = i;
  }
  rig r = rig_create(context, NULL, 2, parameters, 2, both, FP8CORE_FP16);
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 45; j++) values[j] = (float)test_random_normal(&random);
    rig_set_state(&r, i, FP8OPTIM_MASTER, values);
    rig_set_state(&alone[i], 0, FP8OPTIM_MASTER, values);
  }
  for (int step = 0; step < 12; step++) {
    if (step == 4) {
      both[1].weight_decay = 0.3;
      both[1].beta2 = 0.99;
      assert_ok(fp8optim_adamw_set_group(r.adamw, 1, &both[1]));
      assert_ok(fp8optim_adamw_set_group(alone[1].adamw, 0, &both[1]));
      fp8optim_group read;
      assert_ok(fp8optim_adamw_get_group(r.adamw, 1, &read));
      assert_memory_equal(&read, &both[1], sizeof(read));
      assert_ok(fp8optim_adamw_get_group(r.adamw, 0, &read));
      assert_memory_equal(&read, &both[0], sizeof(read));
    }
    if (step == 8) {
      assert_ok(fp8optim_adamw_set_learning_rate(r.adamw, 5e-3));
      for (int i = 0; i < 2; i++) assert_ok(fp8optim_adamw_set_learning_rate(alone[i].adamw, 5e-3));
      for (int i = 0; i < 2; i++) {
        fp8optim_group read;
        assert_ok(fp8optim_adamw_get_group(r.adamw, i, &read));
        assert_true(read.learning_rate == 5e-3 && read.weight_decay == both[i].weight_decay);
      }
    }
    for (int i = 0; i < 2; i++) {
      for (int j = 0; j < 45; j++) values[j] = (float)test_random_normal(&random);
      rig_set_gradient(&r, i, values);
      rig_set_gradient(&alone[i], 0, values);
      (void)rig_step(&alone[i], NULL);
    }
    (void)rig_step(&r, NULL);
  }
  for (int i = 0; i < 2; i++) {
    assert_same_tensor(&r, i, &alone[i], 0);
    rig_destroy(&alone[i]);
  }
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

// What a run gives on a context: the image, and the norm of its last step.
static image run_on(fp8core_context *context, int preset, int stochastic, float *norm) {
  fp8optim_adamw_options options = preset_options(preset);
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter parameters[5] = {fp8optim_parameter_create("big", 301, 307),
                                      fp8optim_parameter_create("row", 1, 20000),
                                      fp8optim_parameter_create("one", 1, 1), fp8optim_parameter_create("none", 0, 3),
                                      fp8optim_parameter_create("last", 129, 5)};
  test_random random = {(uint64_t)preset};
  options.stochastic_rounding = stochastic;
  options.seed = UINT64_C(0x123456789abcdef);
  for (int i = 0; i < 5; i++) {
    parameters[i].with_weight = i != 1;
    parameters[i].weight_dtype = all_dtypes[i];
  }
  rig r = rig_create(context, &options, 5, parameters, 1, &group, preset == 0 ? FP8CORE_FP32 : FP8CORE_E4M3);
  fp8optim_step_options step = fp8optim_step_options_default();
  step.max_norm = 1.0f;
  rig_random_masters(&r, &random, 0.02);
  for (int i = 0; i < 3; i++) {
    rig_random_gradients(&r, &random, 1.0);
    *norm = rig_step(&r, &step).gradient_norm;
  }
  const image result = rig_image(&r);
  rig_destroy(&r);
  return result;
}

static void any_threads_and_tiers(void **unused) {
  (void)unused;
  const int threads[] = {1, 2, 3, 7};
  for (int variant = 0; variant < 2 * PRESETS; variant++) {
    image expected = {0, 0, NULL};
    float expected_norm = 0.0f;
    for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)fp8core_isa_best(); isa++) {
      if (isa == FP8CORE_ISA_AVX512_BF16) continue;
      for (size_t t = 0; t < 4; t++) {
        if (t > 1 && isa != FP8CORE_ISA_SCALAR && isa != (int)fp8core_isa_best()) continue;
        if (test_on_cuda() && (t > 0 || isa != FP8CORE_ISA_SCALAR)) continue;
        float norm;
        fp8core_context *context = test_context(threads[t], (fp8core_isa)isa);
        image found = run_on(context, variant / 2, variant % 2, &norm);
        if (expected.data) {
          assert_same_image(&found, &expected);
          assert_true(norm == expected_norm);
          free(found.data);
        } else {
          expected = found;
          expected_norm = norm;
        }
        fp8core_context_destroy(&context);
      }
    }
    free(expected.data);
  }
}

// A model's worth of small tensors in one step: each as if it were alone.
static void many_tensors(void **unused) {
  (void)unused;
  enum { COUNT = 3000 };
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter *parameters = host(COUNT * sizeof(*parameters));
  char(*names)[16] = host(COUNT * sizeof(*names));
  test_random random = {6};
  for (int i = 0; i < COUNT; i++) {
    (void)snprintf(names[i], sizeof(names[i]), "tensor.%d", i);
    parameters[i] = fp8optim_parameter_create(names[i], i % 7, 1 + i % 13);
    parameters[i].with_weight = i % 3 != 0;
    parameters[i].weight_dtype = all_dtypes[i % 5];
  }
  rig r = rig_create(context, NULL, COUNT, parameters, 1, &group, FP8CORE_E4M3);
  rig_random_masters(&r, &random, 0.1);
  const test_random at_start = random;
  steps_of(&r, &random, 4, 3.0);
  for (int chosen = 1; chosen < COUNT; chosen += 397) {
    rig alone = rig_create(context, NULL, 1, &parameters[chosen], 1, &group, FP8CORE_E4M3);
    test_random again = {6};
    float values[100];
    for (int step = -1; step < 4; step++) {
      for (int i = 0; i < COUNT; i++) {
        const int64_t elements = rig_elements(&r, i);
        for (int64_t j = 0; j < elements; j++) values[j] = (float)((step < 0 ? 0.1 : 3.0) * test_random_normal(&again));
        if (i != chosen || elements == 0) continue;
        if (step < 0)
          rig_set_state(&alone, 0, FP8OPTIM_MASTER, values);
        else
          rig_set_gradient(&alone, 0, values);
      }
      if (step < 0) assert_true(again.state == at_start.state);
      if (step >= 0) (void)rig_step(&alone, NULL);
    }
    assert_same_tensor(&r, chosen, &alone, 0);
    rig_destroy(&alone);
  }
  rig_destroy(&r);
  free(parameters);
  free(names);
  fp8core_context_destroy(&context);
}

static void no_elements(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter parameters[4] = {fp8optim_parameter_create("a", 0, 5), fp8optim_parameter_create("b", 5, 0),
                                      fp8optim_parameter_create("c", 0, 0), fp8optim_parameter_create("d", 0, 0)};
  parameters[3].dimensions = 4;
  for (int i = 0; i < 4; i++) {
    parameters[3].shape[i] = i;
    parameters[i].with_weight = i % 2;
  }
  for (int with_scalar = 0; with_scalar < 2; with_scalar++) {
    // A tensor of no dimensions has one element.
    if (with_scalar) parameters[2].dimensions = 0;
    rig r = rig_create(context, NULL, 4, parameters, 1, &group, FP8CORE_FP32);
    for (int i = 0; i < 4; i++) {
      fp8core_tensor tensor;
      const int elements = with_scalar && i == 2;
      assert_ok(fp8optim_adamw_state(r.adamw, i, FP8OPTIM_EXP_AVG, &tensor));
      assert_int_equal(fp8core_tensor_elements(&tensor), elements);
      assert_ok(fp8core_tensor_validate(&tensor));
      const fp8core_tensor nothing = test_matrix(NULL, FP8CORE_FP32, 0, 9);
      if (!elements) assert_ok(fp8optim_adamw_set_state(r.adamw, i, FP8OPTIM_MASTER, &nothing));
      if (elements)
        assert_fails(fp8optim_adamw_set_state(r.adamw, i, FP8OPTIM_MASTER, &nothing), INVALID, "0 elements");
    }
    const float three = 3.0f;
    if (with_scalar) rig_set_gradient(&r, 2, &three);
    for (int step = 1; step <= 3; step++) {
      const fp8optim_step_report report = rig_step(&r, NULL);
      assert_true(!report.skipped && report.steps == step && report.gradient_norm == (with_scalar ? 3.0f : 0.0f));
    }
    image saved = rig_image(&r);
    assert_ok(fp8optim_adamw_load(r.adamw, saved.data, saved.saved_bytes));
    assert_unchanged(&r, &saved);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// Rows apart from each other, with NaN between them: the same bits as without gaps.
static void strided_gradients(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  const int64_t shapes[][3] = {{1, 5, 7}, {3, 4, 1}, {2, 3, 33}, {2, 200, 101}, {1, 2, 20000}, {40, 1000, 1}};
  for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
    for (int g = 0; g < 5; g++) {
      const fp8core_dtype dtype = all_dtypes[g];
      const size_t size = fp8core_dtype_size(dtype);
      fp8optim_parameter parameter = fp8optim_parameter_create("w", 0, 0);
      parameter.dimensions = 3;
      memcpy(parameter.shape, shapes[s], sizeof(shapes[s]));
      rig one = rig_create(context, NULL, 1, &parameter, 1, &group, dtype);
      rig two = rig_create(context, NULL, 1, &parameter, 1, &group, dtype);
      const int64_t rows = shapes[s][0] * shapes[s][1];
      const int64_t columns = shapes[s][2];
      const int64_t stride = columns + 3;
      const uint32_t nan = dtype == FP8CORE_E4M3 ? 0x7f : fp8core_encode(dtype, NAN, 0);
      unsigned char *contiguous = host((size_t)(rows * columns) * size);
      unsigned char *apart = host((size_t)(rows * stride) * size);
      test_random random = {s};
      rig_random_gradients(&one, &random, 1.0);
      test_download(context, contiguous, one.gradients[0].data, (size_t)(rows * columns) * size);
      for (int64_t i = 0; i < rows * stride; i++) memcpy(apart + i * (int64_t)size, &nan, size);
      for (int64_t i = 0; i < rows; i++)
        memcpy(apart + i * stride * (int64_t)size, contiguous + i * columns * (int64_t)size, (size_t)columns * size);
      // The last row ends with the memory.
      const size_t bytes = (size_t)((rows - 1) * stride + columns) * size;
      const fp8core_tensor kept = two.gradients[0];
      two.gradients[0].data = test_upload(context, apart, bytes);
      two.gradients[0].row_stride = stride;
      for (int step = 0; step < 2; step++) {
        const fp8optim_step_report report = rig_step(&two, NULL);
        assert_true(!report.skipped && report.gradient_norm == rig_step(&one, NULL).gradient_norm);
      }
      image expected = rig_image(&one);
      // A state of the same shape, too.
      assert_ok(fp8optim_adamw_set_state(one.adamw, 0, FP8OPTIM_MASTER, &one.gradients[0]));
      const image strided = rig_image(&two);
      assert_same_image(&strided, &expected);
      assert_ok(fp8optim_adamw_set_state(two.adamw, 0, FP8OPTIM_MASTER, &two.gradients[0]));
      assert_same_tensor(&one, 0, &two, 0);
      if (columns > 1) {
        fp8core_tensor other = two.gradients[0];
        other.shape[0] = shapes[s][1];
        other.shape[1] = shapes[s][0];
        if (shapes[s][0] != shapes[s][1])
          assert_fails(fp8optim_adamw_set_state(two.adamw, 0, FP8OPTIM_MASTER, &other), INVALID, "row stride");
      }
      test_free(context, two.gradients[0].data);
      two.gradients[0] = kept;
      free(expected.data);
      free(strided.data);
      free(contiguous);
      free(apart);
      rig_destroy(&one);
      rig_destroy(&two);
    }
  }
  fp8core_context_destroy(&context);
}

// Memory of the caller's: what is in it counts, the same bits come out as in memory of the optimizer's.
static void memory_of_the_callers(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  enum { ELEMENTS = 65 };
  const fp8optim_adamw_options options = fp8optim_adamw_options_default();
  uint16_t masters[ELEMENTS];
  float values[ELEMENTS];
  uint8_t moments[ELEMENTS] = {0};
  uint16_t squares[ELEMENTS] = {0};
  uint8_t weights[ELEMENTS];
  test_random random = {12};
  for (int i = 0; i < ELEMENTS; i++) {
    masters[i] = (uint16_t)fp8core_encode(FP8CORE_FP16, (float)(0.05 * test_random_normal(&random)), 1);
    values[i] = fp8core_decode(FP8CORE_FP16, masters[i]);
  }
  memset(weights, 0x5a, sizeof(weights));
  fp8optim_parameter parameter = fp8optim_parameter_create("w", 5, 13);
  parameter.with_weight = 1;
  parameter.master = test_upload(context, masters, sizeof(masters));
  parameter.exp_avg = test_upload(context, moments, sizeof(moments));
  parameter.exp_avg_sq = test_upload(context, squares, sizeof(squares));
  parameter.weight = test_upload(context, weights, sizeof(weights));
  rig given = rig_create(context, &options, 1, &parameter, 1, &group, FP8CORE_E4M3);
  fp8core_tensor tensor;
  void *const memory[4] = {parameter.master, parameter.exp_avg, parameter.exp_avg_sq, parameter.weight};
  for (int part = 0; part < 4; part++) {
    assert_ok(fp8optim_adamw_state(given.adamw, 0, (fp8optim_state)part, &tensor));
    assert_ptr_equal(tensor.data, memory[part]);
    if (part < 3) assert_true(rig_scale(&given, 0, (fp8optim_state)part) == 1.0f);
  }
  // The weights are there at once.
  rig own = rig_matrix(context, &options, 5, 13, FP8CORE_E4M3, &group, FP8CORE_E4M3);
  rig_set_state(&own, 0, FP8OPTIM_MASTER, values);
  float read[2][ELEMENTS];
  rig_get(&given, 0, FP8OPTIM_WEIGHT, read[0]);
  rig_get(&own, 0, FP8OPTIM_WEIGHT, read[1]);
  assert_memory_equal(read[0], read[1], sizeof(read[0]));
  test_random same = {3};
  test_random again = {3};
  steps_of(&given, &same, 5, 1.0);
  steps_of(&own, &again, 5, 1.0);
  assert_same_tensor(&given, 0, &own, 0);
  fp8optim_memory bytes;
  assert_ok(fp8optim_adamw_memory(given.adamw, &bytes));
  assert_true(bytes.master_bytes == 2 * ELEMENTS && bytes.exp_avg_bytes == ELEMENTS &&
              bytes.exp_avg_sq_bytes == 2 * ELEMENTS && bytes.weight_bytes == ELEMENTS);
  rig_destroy(&given);
  rig_destroy(&own);
  // Moments that came with it want to know their step.
  given = rig_create(context, &options, 1, &parameter, 1, &group, FP8CORE_E4M3);
  assert_fails(fp8optim_adamw_step(given.adamw, given.gradients, NULL, NULL), INVALID, "set_steps()");
  assert_ok(fp8optim_adamw_set_steps(given.adamw, 5));
  assert_true(rig_step(&given, NULL).steps == 6);
  rig_destroy(&given);
  // Memory that overlaps, by its last 2 bytes here: of one parameter, of two, and of a gradient. Aligned as CUDA wants
  // it.
  fp8optim_adamw *none = (fp8optim_adamw *)(uintptr_t)8;
  fp8optim_parameter shared[2] = {parameter, fp8optim_parameter_create("v", 1, 1)};
  shared[0].exp_avg = (unsigned char *)parameter.master + 2 * ELEMENTS - 2;
  assert_fails(fp8optim_adamw_create(&none, context, &options, 1, shared, 1, &group), INVALID,
               "expected distinct memory");
  assert_null(none);
  shared[0] = parameter;
  shared[1].exp_avg = (unsigned char *)parameter.master + 32;
  assert_fails(fp8optim_adamw_create(&none, context, &options, 2, shared, 1, &group), INVALID,
               "exp_avg of parameter \"v\" at");
  test_assert_message_contains("create", "overlaps master of parameter \"w\" at");
  given = rig_create(context, &options, 1, &parameter, 1, &group, FP8CORE_E4M3);
  assert_ok(fp8optim_adamw_set_steps(given.adamw, 5));
  fp8core_tensor overlapping = given.gradients[0];
  overlapping.data = parameter.weight;
  assert_fails(fp8optim_adamw_step(given.adamw, &overlapping, NULL, NULL), INVALID, "overlaps its weight at");
  rig_destroy(&given);
  own = rig_matrix(context, &options, 5, 13, FP8CORE_E4M3, &group, FP8CORE_E4M3);
  assert_ok(fp8optim_adamw_state(own.adamw, 0, FP8OPTIM_WEIGHT, &overlapping));
  assert_fails(fp8optim_adamw_step(own.adamw, &overlapping, NULL, NULL), INVALID, "overlaps the optimizer's states");
  // In place only where the elements lie as they will.
  assert_ok(fp8optim_adamw_state(own.adamw, 0, FP8OPTIM_MASTER, &overlapping));
  overlapping.scale_inverse = NULL;
  assert_ok(fp8optim_adamw_set_state(own.adamw, 0, FP8OPTIM_MASTER, &overlapping));
  overlapping.row_stride = 14;
  assert_fails(fp8optim_adamw_set_state(own.adamw, 0, FP8OPTIM_MASTER, &overlapping), INVALID, "overlaps its master");
  rig_destroy(&own);
  // What cannot be a state is refused by name.
  const uint16_t wrong[] = {0x7c00, 0xfe01, 0xbc00};
  const char *const texts[] = {"exp_avg_sq of parameter \"w\" holds an infinity", "holds a NaN", "a negative value"};
  for (int i = 0; i < 3; i++) {
    fp8optim_adamw *adamw = (fp8optim_adamw *)(uintptr_t)8;
    assert_ok(fp8core_copy(context, (uint16_t *)parameter.exp_avg_sq + 64, &wrong[i], sizeof(uint16_t)));
    assert_fails(fp8optim_adamw_create(&adamw, context, &options, 1, &parameter, 1, &group), INVALID, texts[i]);
    assert_null(adamw);
  }
  test_free(context, parameter.master);
  test_free(context, parameter.exp_avg);
  test_free(context, parameter.exp_avg_sq);
  test_free(context, parameter.weight);
  fp8core_context_destroy(&context);
}

// On the CPU memory of the caller's may start anywhere: gradients, sources of states, states and weights.
static void any_address(void **unused) {
  (void)unused;
  if (test_on_cuda()) return;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  enum { ELEMENTS = 83 };
  for (int format = 0; format < 5; format++) {
    const fp8core_dtype dtype = all_dtypes[format];
    const size_t size = fp8core_dtype_size(dtype);
    const fp8optim_adamw_options options = options_with(dtype, dtype, dtype);
    test_random random = {9};
    for (size_t offset = 1; offset < 4; offset++) {
      unsigned char *memory = host(6 * (ELEMENTS * 4 + 8));
      unsigned char *at[6];
      fp8optim_parameter parameter = fp8optim_parameter_create("w", 1, ELEMENTS);
      for (int i = 0; i < 6; i++) at[i] = memory + (size_t)i * (ELEMENTS * 4 + 8) / 8 * 8 + offset;
      parameter.with_weight = 1;
      parameter.weight_dtype = dtype;
      rig own = rig_create(context, &options, 1, &parameter, 1, &group, dtype);
      parameter.master = at[0];
      parameter.exp_avg = at[1];
      parameter.exp_avg_sq = at[2];
      parameter.weight = at[3];
      rig given = rig_create(context, &options, 1, &parameter, 1, &group, dtype);
      const fp8core_tensor kept = given.gradients[0];
      for (int step = 0; step < 3; step++) {
        rig_random_gradients(&own, &random, 1.0);
        memcpy(at[4], own.gradients[0].data, ELEMENTS * size);
        given.gradients[0].data = at[4];
        if (step == 0) {
          assert_ok(fp8optim_adamw_set_state(own.adamw, 0, FP8OPTIM_MASTER, &own.gradients[0]));
          assert_ok(fp8optim_adamw_set_state(given.adamw, 0, FP8OPTIM_MASTER, &given.gradients[0]));
        }
        assert_true(rig_step(&own, NULL).gradient_norm == rig_step(&given, NULL).gradient_norm);
      }
      assert_same_tensor(&own, 0, &given, 0);
      image saved = rig_image(&given);
      assert_ok(fp8optim_adamw_load(given.adamw, saved.data, saved.saved_bytes));
      assert_unchanged(&given, &saved);
      given.gradients[0] = kept;
      rig_destroy(&own);
      rig_destroy(&given);
      free(memory);
    }
  }
  fp8core_context_destroy(&context);
}

// Any format in, any format out: rounded once from the value, scale chosen from the source, weight written.
static void states_from_any_format(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  enum { ELEMENTS = 90 };
  for (int from = 0; from < 5; from++) {
    for (int to = 0; to < 5; to++) {
      const fp8core_dtype dtype = all_dtypes[to];
      const fp8optim_adamw_options options = options_with(dtype, dtype, dtype);
      const size_t size = fp8core_dtype_size(all_dtypes[from]);
      unsigned char codes[ELEMENTS * 4];
      float values[ELEMENTS];
      const float scale_inverse = 0.37f;
      test_random random = {(uint64_t)(from * 5 + to)};
      rig r = rig_matrix(context, &options, 9, 10, FP8CORE_E5M2, &group, FP8CORE_E4M3);
      for (int i = 0; i < ELEMENTS; i++) {
        const uint32_t code = fp8core_encode(all_dtypes[from], fabsf((float)(8.0 * test_random_normal(&random))), 1);
        memcpy(codes + (size_t)i * size, &code, size);
        values[i] = fp8core_decode(all_dtypes[from], code) * scale_inverse;
      }
      // Another shape of as many elements.
      fp8core_tensor source = test_matrix(test_upload(context, codes, ELEMENTS * size), all_dtypes[from], 15, 6);
      source.scale_inverse = test_upload(context, &scale_inverse, sizeof(float));
      for (int state = 0; state < 3; state++) {
        uint32_t found[ELEMENTS];
        float largest = 0.0f;
        assert_ok(fp8optim_adamw_set_state(r.adamw, 0, (fp8optim_state)state, &source));
        rig_codes(&r, 0, (fp8optim_state)state, found);
        const float scale = rig_scale(&r, 0, (fp8optim_state)state);
        for (int i = 0; i < ELEMENTS; i++) {
          assert_int_equal(found[i], fp8core_encode(dtype, values[i] * scale, 1));
          largest = fmaxf(largest, values[i]);
        }
        const int scaled = dtype != FP8CORE_BF16 && dtype != FP8CORE_FP32;
        int exponent;
        if (!scaled) assert_true(scale == 1.0f);
        if (scaled && state == FP8OPTIM_MASTER)
          assert_true(frexpf(scale, &exponent) == 0.5f && largest * scale * 1.99f <= fp8core_dtype_max(dtype) &&
                      largest * scale * 4.01f >= fp8core_dtype_max(dtype));
        if (scaled && state != FP8OPTIM_MASTER)
          assert_true(fabsf(largest * scale / fp8core_dtype_max(dtype) - 1.0f) < 1e-6f);
      }
      float masters[ELEMENTS];
      float weights[ELEMENTS];
      rig_get(&r, 0, FP8OPTIM_MASTER, masters);
      rig_get(&r, 0, FP8OPTIM_WEIGHT, weights);
      for (int i = 0; i < ELEMENTS; i++)
        if (fabsf(weights[i] - masters[i]) > fabsf(masters[i]) * 0.1251f + 1e-4f)
          fail_msg("%s: weight %g of master %g", fp8core_dtype_name(dtype), (double)weights[i], (double)masters[i]);
      test_free(context, source.data);
      test_free(context, (void *)(uintptr_t)source.scale_inverse);
      rig_destroy(&r);
    }
  }
  fp8core_context_destroy(&context);
}

// Finite values become finite states, up to the largest.
static void largest_values(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = group_with(1e-3, 0.1);
  for (int format = 0; format < 5; format++) {
    const fp8core_dtype dtype = all_dtypes[format];
    const fp8optim_adamw_options options = options_with(dtype, dtype, dtype);
    const float values[6] = {FLT_MAX, 0x1.fep127f, 0x1p127f, 1.0f, 1e-38f, 0x1p-149f};
    float read[6];
    rig r = rig_matrix(context, &options, 2, 3, FP8CORE_E4M3, &group, FP8CORE_FP32);
    for (int state = 0; state < 3; state++) rig_set_state(&r, 0, (fp8optim_state)state, values);
    assert_ok(fp8optim_adamw_set_steps(r.adamw, 100));
    for (int step = 0; step < 5; step++) {
      image saved = rig_image(&r);
      for (int part = 0; part < 4; part++) {
        uint32_t codes[6];
        const fp8core_dtype stored = part < 3 ? dtype : FP8CORE_E4M3;
        rig_codes(&r, 0, (fp8optim_state)part, codes);
        for (int i = 0; i < 6; i++)
          if (!isfinite(fp8core_decode(stored, codes[i])))
            fail_msg("%s, step %d: %s[%d] is %x", fp8core_dtype_name(dtype), step,
                     fp8optim_state_name((fp8optim_state)part), i, codes[i]);
        // Times the reciprocal scale it may round up to 2^128, which is beyond FP32.
        rig_get(&r, 0, (fp8optim_state)part, read);
        if (step == 0) assert_true(read[0] >= 0.75f * FLT_MAX && fabsf(read[2] * 0x1p-127f - 1.0f) < 1e-6f);
      }
      assert_ok(fp8optim_adamw_load(r.adamw, saved.data, saved.saved_bytes));
      assert_unchanged(&r, &saved);
      (void)rig_step(&r, NULL);
    }
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// Gradients at all sizes that FP32 has: steps that are taken leave finite states and updates of a few learning rates;
// those too large for a second moment are skipped, or clipped.
static void sizes_of_gradients(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  static const int exponents[] = {-149, -140, -126, -100, -60, -20, 0, 20, 40, 60, 62, 64, 70, 90, 100, 120, 126, 127};
  const fp8core_dtype formats[][2] = {{FP8CORE_FP32, FP8CORE_FP32}, {FP8CORE_E4M3, FP8CORE_FP16},
                                      {FP8CORE_E4M3, FP8CORE_E4M3}, {FP8CORE_BF16, FP8CORE_BF16},
                                      {FP8CORE_E5M2, FP8CORE_E5M2}, {FP8CORE_E4M3, FP8CORE_FP32}};
  for (size_t f = 0; f < sizeof(formats) / sizeof(formats[0]); f++) {
    const fp8optim_adamw_options options = options_with(FP8CORE_FP32, formats[f][0], formats[f][1]);
    const fp8optim_group group = group_with(1e-3, 0.0);
    for (size_t e = 0; e < sizeof(exponents) / sizeof(exponents[0]); e++) {
      for (int clipped = 0; clipped < 2; clipped++) {
        enum { ELEMENTS = 40 };
        float gradient[ELEMENTS];
        float before[ELEMENTS];
        float after[ELEMENTS];
        fp8optim_step_options step_options = fp8optim_step_options_default();
        if (clipped) step_options.max_norm = 1.0f;
        rig r = rig_matrix(context, &options, 1, ELEMENTS, -1, &group, FP8CORE_FP32);
        for (int i = 0; i < ELEMENTS; i++) before[i] = 1.0f;
        rig_set_state(&r, 0, FP8OPTIM_MASTER, before);
        for (int step = 0; step < 6; step++) {
          // Small ones before and after, so that scales go far up and down.
          const int exponent = step % 3 == 1 ? exponents[e] : -10;
          for (int i = 0; i < ELEMENTS; i++) gradient[i] = ldexpf(i % 2 ? 0.125f : -0.09f, exponent - i % 4);
          rig_set_gradient(&r, 0, gradient);
          const fp8optim_step_report report = rig_step(&r, &step_options);
          if (exponent <= 60) assert_int_equal(report.skipped, 0);
          if (report.skipped) assert_true(exponent > 60);
          rig_get(&r, 0, FP8OPTIM_MASTER, after);
          const double update = largest_update(before, after, ELEMENTS, group.learning_rate, 0x1p-22);
          if (!(update < 8.0))
            fail_msg("%s %s, 2^%d, step %d: an update of %g learning rates", fp8core_dtype_name(formats[f][0]),
                     fp8core_dtype_name(formats[f][1]), exponent, step, update);
          memcpy(before, after, sizeof(before));
          for (int state = 0; state < 3; state++) {
            rig_get(&r, 0, (fp8optim_state)state, after);
            for (int i = 0; i < ELEMENTS; i++)
              if (!isfinite(after[i]))
                fail_msg("%s %s, 2^%d, step %d: %s[%d] is %g", fp8core_dtype_name(formats[f][0]),
                         fp8core_dtype_name(formats[f][1]), exponent, step, fp8optim_state_name((fp8optim_state)state),
                         i, (double)after[i]);
          }
        }
        rig_destroy(&r);
      }
    }
  }
  fp8core_context_destroy(&context);
}

static void step_counts(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_adamw_options options = fp8optim_adamw_options_default();
  const fp8optim_group group = fp8optim_group_default();
  float values[12];
  for (int i = 0; i < 12; i++) values[i] = 0.25f + (float)i;
  rig r = rig_matrix(context, &options, 3, 4, FP8CORE_E4M3, &group, FP8CORE_E4M3);
  assert_true(fp8optim_adamw_steps(r.adamw) == 0);
  // Moments with a count of 0, set before any step or after skipped ones only.
  for (int after_skip = 0; after_skip < 2; after_skip++) {
    for (int state = FP8OPTIM_EXP_AVG; state <= FP8OPTIM_EXP_AVG_SQ; state++) {
      rig s = rig_matrix(context, &options, 3, 4, FP8CORE_E4M3, &group, FP8CORE_E4M3);
      if (after_skip) {
        values[3] = NAN;
        rig_set_gradient(&s, 0, values);
        values[3] = 3.25f;
        assert_true(rig_step(&s, NULL).skipped && fp8optim_adamw_steps(s.adamw) == 0);
        rig_set_gradient(&s, 0, values);
      }
      rig_set_state(&s, 0, (fp8optim_state)state, values);
      image before = rig_image(&s);
      assert_fails(fp8optim_adamw_step(s.adamw, s.gradients, NULL, NULL), INVALID,
                   "moments were set while the step count is 0, expected fp8optim_adamw_set_steps()");
      assert_unchanged(&s, &before);
      assert_ok(fp8optim_adamw_set_steps(s.adamw, 0));
      assert_fails(fp8optim_adamw_step(s.adamw, s.gradients, NULL, NULL), INVALID, "step count is 0");
      assert_ok(fp8optim_adamw_set_steps(s.adamw, 10));
      assert_true(fp8optim_adamw_steps(s.adamw) == 10);
      const fp8optim_step_report report = rig_step(&s, NULL);
      assert_true(report.steps == 11 && fp8optim_adamw_steps(s.adamw) == 11);
      rig_destroy(&s);
    }
  }
  // Zeros are no moments, and a master is none.
  float zeros[12] = {0.0f};
  rig_set_state(&r, 0, FP8OPTIM_EXP_AVG, zeros);
  rig_set_state(&r, 0, FP8OPTIM_EXP_AVG_SQ, zeros);
  rig_set_state(&r, 0, FP8OPTIM_MASTER, values);
  assert_true(rig_step(&r, NULL).steps == 1);
  // Taken back to 0 with moments of steps: the same mistake. Once they are zeros again, it is a new start.
  rig_set_gradient(&r, 0, values);
  assert_true(rig_step(&r, NULL).steps == 2);
  assert_ok(fp8optim_adamw_set_steps(r.adamw, 0));
  assert_fails(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL), INVALID, "step count is 0");
  rig_set_state(&r, 0, FP8OPTIM_EXP_AVG, zeros);
  assert_fails(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL), INVALID, "step count is 0");
  rig_set_state(&r, 0, FP8OPTIM_EXP_AVG_SQ, zeros);
  assert_true(rig_step(&r, NULL).steps == 1);
  // The bias correction is that of the count: with a large one there is none.
  assert_ok(fp8optim_adamw_set_steps(r.adamw, INT64_C(2147483646)));
  image largest = rig_image(&r);
  assert_ok(fp8optim_adamw_load(r.adamw, largest.data, largest.saved_bytes));
  assert_unchanged(&r, &largest);
  assert_fails(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL), INVALID, "has taken 2147483646 steps");
  assert_ok(fp8optim_adamw_set_steps(r.adamw, INT64_C(2147483645)));
  assert_true(rig_step(&r, NULL).steps == INT64_C(2147483646));
  assert_fails(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL), INVALID, "has taken 2147483646 steps");
  // Moments whose count is still to come are saved and loaded as they are.
  assert_ok(fp8optim_adamw_set_steps(r.adamw, 0));
  image uncounted = rig_image(&r);
  assert_ok(fp8optim_adamw_load(r.adamw, uncounted.data, uncounted.saved_bytes));
  assert_unchanged(&r, &uncounted);
  assert_fails(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL), INVALID, "step count is 0");
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

// A migrated FP32 state goes on as it would have: masters, moments and count through set_state() and set_steps().
static void migration(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_adamw_options options = preset_options(FP8OPTIM_PRESET_FP32);
  const fp8optim_group group = fp8optim_group_default();
  test_random random = {31};
  float values[60];
  rig one = rig_matrix(context, &options, 6, 10, FP8CORE_BF16, &group, FP8CORE_FP32);
  rig two = rig_matrix(context, &options, 6, 10, FP8CORE_BF16, &group, FP8CORE_FP32);
  rig_random_masters(&one, &random, 1.0);
  steps_of(&one, &random, 7, 1.0);
  for (int state = 0; state < 3; state++) {
    rig_get(&one, 0, (fp8optim_state)state, values);
    rig_set_state(&two, 0, (fp8optim_state)state, values);
  }
  assert_ok(fp8optim_adamw_set_steps(two.adamw, fp8optim_adamw_steps(one.adamw)));
  test_random same = random;
  steps_of(&one, &random, 4, 1.0);
  steps_of(&two, &same, 4, 1.0);
  assert_same_tensor(&one, 0, &two, 0);
  rig_destroy(&one);
  rig_destroy(&two);
  fp8core_context_destroy(&context);
}

// Save, load into another optimizer, continue: bit for bit the uninterrupted run.
static void resume(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int variant = 0; variant < 2 * PRESETS; variant++) {
    fp8optim_adamw_options options = preset_options(variant / 2);
    const fp8optim_group group = group_with(0.02, 0.1);
    fp8optim_parameter parameters[4] = {fp8optim_parameter_create("a", 9, 11), fp8optim_parameter_create("b", 1, 5),
                                        fp8optim_parameter_create("none", 3, 0), fp8optim_parameter_create("c", 64, 3)};
    test_random random = {(uint64_t)variant};
    options.stochastic_rounding = variant % 2;
    options.seed = 77;
    for (int i = 0; i < 4; i++) {
      parameters[i].with_weight = i != 1;
      parameters[i].weight_dtype = all_dtypes[(variant + i) % 5];
    }
    rig r = rig_create(context, &options, 4, parameters, 1, &group, FP8CORE_E4M3);
    rig_random_masters(&r, &random, 0.1);
    steps_of(&r, &random, 5, 1.0);
    for (int times = 0; times < 3; times++) {
      image saved = rig_image(&r);
      rig other = rig_create(context, &options, 4, parameters, 1, &group, FP8CORE_E4M3);
      test_random unrelated = {99};
      // Over a state of its own, whose scales are elsewhere.
      if (times) {
        rig_random_masters(&other, &unrelated, 300.0);
        steps_of(&other, &unrelated, times, 50.0);
      }
      assert_ok(fp8optim_adamw_load(other.adamw, saved.data, saved.saved_bytes));
      const image loaded = rig_image(&other);
      assert_same_image(&loaded, &saved);
      test_random same = random;
      steps_of(&r, &random, 3, times == 1 ? 0.0 : 2.0);
      steps_of(&other, &same, 3, times == 1 ? 0.0 : 2.0);
      image expected = rig_image(&r);
      assert_unchanged(&other, &expected);
      rig_destroy(&other);
      free(saved.data);
      free(loaded.data);
    }
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// A state loads whatever weights the optimizer writes: they are made from the masters in its own format.
static void load_with_other_weights(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_adamw_options options = fp8optim_adamw_options_default();
  const fp8optim_group group = fp8optim_group_default();
  for (int from = -1; from < 5; from++) {
    for (int to = 0; to < 5; to++) {
      test_random random = {2};
      float masters[60];
      float weights[60];
      rig one = rig_matrix(context, &options, 6, 10, from, &group, FP8CORE_FP32);
      rig two = rig_matrix(context, &options, 6, 10, to, &group, FP8CORE_FP32);
      rig_random_masters(&one, &random, 0.02);
      if (from != 3) steps_of(&one, &random, 2, 1.0);
      image saved = rig_image(&one);
      assert_ok(fp8optim_adamw_load(two.adamw, saved.data, saved.saved_bytes));
      rig_get(&two, 0, FP8OPTIM_MASTER, masters);
      rig_get(&two, 0, FP8OPTIM_WEIGHT, weights);
      const float scale = rig_scale(&two, 0, FP8OPTIM_WEIGHT);
      if (all_dtypes[to] == FP8CORE_BF16 || all_dtypes[to] == FP8CORE_FP32) assert_true(scale == 1.0f);
      for (int i = 0; i < 60; i++)
        if (fabsf(weights[i] - masters[i]) > fabsf(masters[i]) * 0.126f + 1e-5f)
          fail_msg("%d to %s: weight %g of master %g", from, fp8core_dtype_name(all_dtypes[to]), (double)weights[i],
                   (double)masters[i]);
      free(saved.data);
      rig_destroy(&one);
      rig_destroy(&two);
    }
  }
  fp8core_context_destroy(&context);
}

static uint32_t crc32_of(const unsigned char *bytes, size_t count) {
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < count; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xEDB88320) : 0);
  }
  return ~crc;
}

static void repair(unsigned char *bytes, size_t count) {
  const uint32_t crc = crc32_of(bytes, count - 4);
  for (int i = 0; i < 4; i++) bytes[count - 4 + (size_t)i] = (unsigned char)(crc >> 8 * i);
}

// Every byte changed in every bit at once and in one, every cut, anything appended.
static void damaged_states(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  test_random random = {4};
  rig r = busy_rig(context, FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, &random);
  image saved = rig_image(&r);
  const size_t size = saved.saved_bytes;
  unsigned char *bytes = host(size + 16);
  steps_of(&r, &random, 2, 1.0);
  image before = rig_image(&r);
  // The file's own checksum is the usual one.
  memcpy(bytes, saved.data, size);
  repair(bytes, size);
  assert_memory_equal(bytes, saved.data, size);
  for (size_t i = 0; i < size; i++) {
    const unsigned char changes[] = {0xff, (unsigned char)(1U << i % 8)};
    for (int j = 0; j < 2; j++) {
      memcpy(bytes, saved.data, size);
      bytes[i] ^= changes[j];
      assert_fails(fp8optim_adamw_load(r.adamw, bytes, size), FP8CORE_ERROR_CORRUPT_DATA, "the state");
    }
  }
  image now = rig_image(&r);
  assert_same_image(&now, &before);
  free(now.data);
  for (size_t cut = 0; cut < size; cut++) {
    // In memory of that size, so that a sanitizer sees a read past it.
    unsigned char *part = host(cut);
    memcpy(part, saved.data, cut);
    assert_fails(fp8optim_adamw_load(r.adamw, part, cut), FP8CORE_ERROR_CORRUPT_DATA, "the state");
    if (cut >= 4) {
      repair(part, cut);
      const fp8core_status status = fp8optim_adamw_load(r.adamw, part, cut);
      assert_true(status == FP8CORE_ERROR_CORRUPT_DATA);
    }
    free(part);
  }
  memcpy(bytes, saved.data, size);
  assert_fails(fp8optim_adamw_load(r.adamw, bytes, size + 16), FP8CORE_ERROR_CORRUPT_DATA, "the state's checksum");
  repair(bytes, size + 16);
  assert_fails(fp8optim_adamw_load(r.adamw, bytes, size + 16), FP8CORE_ERROR_CORRUPT_DATA, "after the last tensor");
  assert_unchanged(&r, &before);
  // And what is whole still loads.
  assert_ok(fp8optim_adamw_load(r.adamw, saved.data, size));
  assert_unchanged(&r, &saved);
  free(bytes);
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

static void states_of_others(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter parameters[3] = {fp8optim_parameter_create("a", 2, 3), fp8optim_parameter_create("b", 4, 1),
                                      fp8optim_parameter_create("c", 1, 2)};
  fp8optim_adamw_options options = fp8optim_adamw_options_default();
  rig saver = rig_create(context, &options, 2, parameters, 1, &group, FP8CORE_FP32);
  test_random random = {1};
  rig_random_masters(&saver, &random, 1.0);
  steps_of(&saver, &random, 3, 1.0);
  const image saved = rig_image(&saver);
#define REFUSED_LOAD(count, text)                                                                                      \
  do {                                                                                                                 \
    rig r = rig_create(context, &options, count, parameters, 1, &group, FP8CORE_FP32);                                 \
    rig_random_masters(&r, &random, 1.0);                                                                              \
    steps_of(&r, &random, 1, 1.0);                                                                                     \
    image before = rig_image(&r);                                                                                      \
    assert_fails(fp8optim_adamw_load(r.adamw, saved.data, saved.saved_bytes), INVALID, text);                          \
    assert_unchanged(&r, &before);                                                                                     \
    rig_destroy(&r);                                                                                                   \
    options = fp8optim_adamw_options_default();                                                                        \
    parameters[0] = fp8optim_parameter_create("a", 2, 3);                                                              \
    parameters[1] = fp8optim_parameter_create("b", 4, 1);                                                              \
  } while (0)
  options = preset_options(FP8OPTIM_PRESET_FP32);
  REFUSED_LOAD(2, "the saved master_dtype is fp16, expected the optimizer's, fp32");
  options = preset_options(FP8OPTIM_PRESET_FP8_BF16_MASTER);
  REFUSED_LOAD(2, "the saved master_dtype is fp16, expected the optimizer's, bf16");
  options = preset_options(FP8OPTIM_PRESET_FP8_EXP_AVG_SQ);
  REFUSED_LOAD(2, "the saved exp_avg_sq_dtype is fp16, expected the optimizer's, e4m3");
  options.exp_avg_dtype = FP8CORE_BF16;
  REFUSED_LOAD(2, "the saved exp_avg_dtype is e4m3, expected the optimizer's, bf16");
  options.stochastic_rounding = 7;
  REFUSED_LOAD(2, "the saved stochastic_rounding is 0, expected the optimizer's, 1");
  options.seed = 5;
  REFUSED_LOAD(2, "the saved seed is 0, expected the optimizer's, 5");
  REFUSED_LOAD(1, "the saved number of tensors is 2, expected the optimizer's, 1");
  REFUSED_LOAD(3, "the saved number of tensors is 2, expected the optimizer's, 3");
  parameters[1].name = "B";
  REFUSED_LOAD(2, "saved tensor 1 is called \"b\", expected \"B\"");
  parameters[0].name = "abc";
  REFUSED_LOAD(2, "saved tensor 0 is called \"a\", expected \"abc\"");
  parameters[0].shape[0] = 3;
  parameters[0].shape[1] = 2;
  REFUSED_LOAD(2, "shape[0] of saved tensor \"a\" is 2, expected 3");
  parameters[1].shape[0] = 5;
  REFUSED_LOAD(2, "shape[0] of saved tensor \"b\" is 4, expected 5");
  parameters[1].dimensions = 1;
  REFUSED_LOAD(2, "saved tensor \"b\" has 2 dimensions, expected 1");
  // Fields that no optimizer writes, under a right checksum.
  unsigned char *bytes = host(saved.saved_bytes);
  const size_t header = 8 + 5 * 4 + 8;
  const struct {
    size_t at;
    size_t count;
    unsigned char byte;
    const char *text;
  } changes[] = {
    {8, 1, 2, "the state has version 2, expected 1"},
    {0, 1, 'f', "does not begin with \"FP8OPTIM\""},
    {12, 1, 9, "the saved master_dtype is 9, expected 0 to 4"},
    {header + 8, 8, 0xff, "the saved steps are -1"},
    {header + 8, 8, 0x7f, "the saved steps are"},
    {header + 16, 8, 0xff, "and -1 skipped"},
    {header + 24, 4, 0xff, "the name of saved tensor 0 has 4294967295 bytes"},
  };
  image before = rig_image(&saver);
  for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
    memcpy(bytes, saved.data, saved.saved_bytes);
    memset(bytes + changes[i].at, changes[i].byte, changes[i].count);
    repair(bytes, saved.saved_bytes);
    assert_fails(fp8optim_adamw_load(saver.adamw, bytes, saved.saved_bytes), FP8CORE_ERROR_CORRUPT_DATA,
                 changes[i].text);
  }
  assert_unchanged(&saver, &before);
  free(bytes);
  free(saved.data);
  rig_destroy(&saver);
  fp8core_context_destroy(&context);
}

// Loading over moments that were set, and a fresh state over old ones.
static void load_forgets_what_was_set(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  float values[6] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f};
  rig fresh = rig_matrix(context, NULL, 2, 3, -1, &group, FP8CORE_FP32);
  rig r = rig_matrix(context, NULL, 2, 3, -1, &group, FP8CORE_FP32);
  const image saved = rig_image(&fresh);
  rig_set_state(&r, 0, FP8OPTIM_EXP_AVG, values);
  assert_ok(fp8optim_adamw_load(r.adamw, saved.data, saved.saved_bytes));
  assert_true(rig_step(&r, NULL).steps == 1);
  assert_ok(fp8optim_adamw_load(r.adamw, saved.data, saved.saved_bytes));
  rig_set_state(&r, 0, FP8OPTIM_EXP_AVG, values);
  assert_fails(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL), INVALID, "step count is 0");
  free(saved.data);
  rig_destroy(&fresh);
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

static void memory_report(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8optim_group group = fp8optim_group_default();
  // With an FP8 gradient, 16, 14, 6, 6, 5 and 5 bytes a parameter.
  const int64_t bytes_of_states[PRESETS] = {12, 12, 5, 5, 4, 4};
  for (int preset = 0; preset < PRESETS; preset++) {
    const fp8optim_adamw_options options = preset_options(preset);
    const int64_t master = (int64_t)fp8core_dtype_size(options.master_dtype);
    fp8optim_parameter parameters[3] = {fp8optim_parameter_create("a", 1024, 1024),
                                        fp8optim_parameter_create("b", 1, 7), fp8optim_parameter_create("c", 0, 1)};
    fp8optim_memory memory;
    parameters[0].with_weight = 1;
    parameters[1].with_weight = 1;
    parameters[1].weight_dtype = FP8CORE_BF16;
    rig r = rig_create(context, &options, 3, parameters, 1, &group, FP8CORE_E4M3);
    const int64_t elements = 1024 * 1024 + 7;
    assert_ok(fp8optim_adamw_memory(r.adamw, &memory));
    assert_true(memory.parameters == elements);
    assert_true(memory.master_bytes == elements * master);
    assert_true(memory.exp_avg_bytes == elements * (int64_t)fp8core_dtype_size(options.exp_avg_dtype));
    assert_true(memory.exp_avg_sq_bytes == elements * (int64_t)fp8core_dtype_size(options.exp_avg_sq_dtype));
    assert_true(memory.weight_bytes == 1024 * 1024 + 14);
    assert_true(memory.master_bytes + memory.exp_avg_bytes + memory.exp_avg_sq_bytes ==
                elements * bytes_of_states[preset]);
    // Tables beside a million parameters: less than a hundredth of a byte each.
    assert_true(memory.overhead_bytes > 0 && memory.overhead_bytes < elements / 100);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// Weights are the stored masters, rounded to nearest in their format; their scale leaves room and is a power of two.
static void weights_follow_masters(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int preset = 0; preset < PRESETS; preset++) {
    for (int weight = 0; weight < 5; weight++) {
      const fp8optim_adamw_options options = preset_options(preset);
      const fp8optim_group group = group_with(0.05, 0.1);
      float masters[130];
      uint32_t codes[130];
      test_random random = {(uint64_t)preset};
      rig r = rig_matrix(context, &options, 10, 13, weight, &group, FP8CORE_BF16);
      rig_random_masters(&r, &random, 0.02);
      for (int step = 0; step < 20; step++) {
        steps_of(&r, &random, 1, 1.0);
        const float scale = rig_scale(&r, 0, FP8OPTIM_WEIGHT);
        rig_get(&r, 0, FP8OPTIM_MASTER, masters);
        rig_codes(&r, 0, FP8OPTIM_WEIGHT, codes);
        for (int i = 0; i < 130; i++)
          assert_int_equal(codes[i], fp8core_encode(all_dtypes[weight], masters[i] * scale, 1));
      }
      rig_destroy(&r);
    }
  }
  fp8core_context_destroy(&context);
}

// Updates far below half a unit of the master's last place: with stochastic rounding they add up as in FP32; to nearest
// none is seen. Tensors and steps draw for themselves, the same seed the same.
static void stochastic_masters(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  enum { ELEMENTS = 2000, TAKEN = 400 };
  const fp8core_dtype formats[] = {FP8CORE_FP16, FP8CORE_BF16, FP8CORE_E4M3};
  const double units[] = {0x1p-10, 0x1p-7, 0x1p-3};
  for (int f = 0; f < 3; f++) {
    double moved[3];
    uint32_t codes[3][2][ELEMENTS];
    // A hundredth of a unit a step.
    const double learning_rate = units[f] / 100.0;
    for (int run = 0; run < 3; run++) {
      fp8optim_adamw_options options = options_with(formats[f], FP8CORE_FP32, FP8CORE_FP32);
      const fp8optim_group group = group_with(learning_rate, 0.0);
      fp8optim_parameter parameters[2] = {fp8optim_parameter_create("a", 1, ELEMENTS),
                                          fp8optim_parameter_create("b", 1, ELEMENTS)};
      float values[ELEMENTS];
      options.stochastic_rounding = run > 0;
      options.seed = (uint64_t)run;
      rig r = rig_create(context, &options, 2, parameters, 1, &group, FP8CORE_FP32);
      for (int i = 0; i < ELEMENTS; i++) values[i] = 1.0f;
      for (int tensor = 0; tensor < 2; tensor++) {
        rig_set_gradient(&r, tensor, values);
        rig_set_state(&r, tensor, FP8OPTIM_MASTER, values);
        for (int i = 0; i < ELEMENTS; i++) values[i] = 1.0f;
      }
      // A constant gradient moves each master down by one learning rate a step: from 1, whose lower neighbour is half a
      // unit away.
      for (int step = 0; step < TAKEN; step++) (void)rig_step(&r, NULL);
      moved[run] = 0.0;
      for (int tensor = 0; tensor < 2; tensor++) {
        rig_get(&r, tensor, FP8OPTIM_MASTER, values);
        rig_codes(&r, tensor, FP8OPTIM_MASTER, codes[run][tensor]);
        for (int i = 0; i < ELEMENTS; i++) moved[run] += (1.0 - (double)values[i]) / (2.0 * ELEMENTS);
      }
      rig_destroy(&r);
    }
    assert_true(moved[0] == 0.0);
    const double expected = TAKEN * learning_rate;
    for (int run = 1; run < 3; run++)
      if (fabs(moved[run] / expected - 1.0) > 0.02)
        fail_msg("%s: masters moved by %g, expected %g", fp8core_dtype_name(formats[f]), moved[run], expected);
    int between_tensors = 0;
    int between_seeds = 0;
    for (int i = 0; i < ELEMENTS; i++) {
      between_tensors += codes[1][0][i] == codes[1][1][i];
      between_seeds += codes[1][0][i] == codes[2][0][i];
    }
    assert_true(between_tensors < ELEMENTS / 2 && between_seeds < ELEMENTS / 2);
  }
  fp8core_context_destroy(&context);
}

typedef struct worker {
  pthread_t handle;
  uint64_t seed;
  unsigned char bytes[4096];
  size_t size;
  int failed;
} worker;

#define TRY_WORKER(call)                                                                                               \
  do {                                                                                                                 \
    if ((call) != FP8CORE_OK) return argument;                                                                         \
  } while (0)

// No assertions here: cmocka's belong to the main thread.
static void *run_worker(void *argument) {
  worker *own = argument;
  fp8core_context_options context_options = fp8core_context_options_default();
  fp8core_context *context;
  fp8optim_adamw *adamw;
  const fp8optim_group group = fp8optim_group_default();
  const fp8optim_parameter parameter = fp8optim_parameter_create("w", 10, 20);
  void *data;
  float values[200];
  test_random random = {own->seed};
  own->failed = 1;
  context_options.device = test_device();
  context_options.threads = 1;
  TRY_WORKER(fp8core_context_create(&context, &context_options));
  TRY_WORKER(fp8optim_adamw_create(&adamw, context, NULL, 1, &parameter, 1, &group));
  TRY_WORKER(fp8core_alloc(context, sizeof(values), &data));
  const fp8core_tensor gradient = test_matrix(data, FP8CORE_FP32, 10, 20);
  for (int step = 0; step < 50; step++) {
    for (int i = 0; i < 200; i++) values[i] = (float)test_random_normal(&random);
    TRY_WORKER(fp8core_copy(context, data, values, sizeof(values)));
    TRY_WORKER(fp8optim_adamw_step(adamw, &gradient, NULL, NULL));
  }
  own->size = fp8optim_adamw_saved_bytes(adamw);
  if (own->size > sizeof(own->bytes)) return NULL;
  TRY_WORKER(fp8optim_adamw_save(adamw, own->bytes, own->size));
  fp8optim_adamw_destroy(&adamw);
  TRY_WORKER(fp8core_free(context, data));
  fp8core_context_destroy(&context);
  own->failed = 0;
  return NULL;
}

// Two optimizers on two threads at once give what they give one after the other.
static void distinct_threads(void **unused) {
  (void)unused;
  static worker together[2];
  static worker alone[2];
  for (int i = 0; i < 2; i++) together[i].seed = alone[i].seed = (uint64_t)i + 10;
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&together[i].handle, NULL, run_worker, &together[i]), 0);
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_join(together[i].handle, NULL), 0);
  for (int i = 0; i < 2; i++) {
    (void)run_worker(&alone[i]);
    assert_int_equal(together[i].failed, 0);
    assert_int_equal(alone[i].failed, 0);
    assert_int_equal(together[i].size, alone[i].size);
    assert_memory_equal(together[i].bytes, alone[i].bytes, alone[i].size);
  }
  assert_memory_not_equal(alone[0].bytes, alone[1].bytes, alone[0].size);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(names_and_defaults),
    cmocka_unit_test(wrong_arguments_of_create),
    cmocka_unit_test(wrong_arguments_change_nothing),
    cmocka_unit_test(infinities_and_nans_skip),
    cmocka_unit_test(learning_rate_zero),
    cmocka_unit_test(zero_gradients),
    cmocka_unit_test(spike),
    cmocka_unit_test(positive_second_moments),
    cmocka_unit_test(clipping_and_loss_scale),
    cmocka_unit_test(norm_over_tensors),
    cmocka_unit_test(groups),
    cmocka_unit_test(any_threads_and_tiers),
    cmocka_unit_test(many_tensors),
    cmocka_unit_test(no_elements),
    cmocka_unit_test(strided_gradients),
    cmocka_unit_test(memory_of_the_callers),
    cmocka_unit_test(any_address),
    cmocka_unit_test(states_from_any_format),
    cmocka_unit_test(largest_values),
    cmocka_unit_test(sizes_of_gradients),
    cmocka_unit_test(step_counts),
    cmocka_unit_test(migration),
    cmocka_unit_test(resume),
    cmocka_unit_test(load_with_other_weights),
    cmocka_unit_test(damaged_states),
    cmocka_unit_test(states_of_others),
    cmocka_unit_test(load_forgets_what_was_set),
    cmocka_unit_test(memory_report),
    cmocka_unit_test(weights_follow_masters),
    cmocka_unit_test(stochastic_masters),
    cmocka_unit_test(distinct_threads),
  };
  return cmocka_run_group_tests_name("adamw", tests, NULL, NULL);
}
