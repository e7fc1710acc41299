// Steps in parts: the bits of whole steps in any order of tensors, the squares that ranks add up, and what is refused.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rig.h"

#define INVALID(call, text) assert_fails(call, FP8CORE_ERROR_INVALID_ARGUMENT, text)
#define TENSORS 5

static const char *const names[TENSORS] = {"big", "row", "one", "none", "last"};
static const int64_t rows[TENSORS] = {301, 1, 1, 0, 129};
static const int64_t columns[TENSORS] = {307, 20000, 1, 3, 5};
static const fp8core_dtype weights[TENSORS] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_BF16, FP8CORE_E4M3, FP8CORE_FP32};

static rig five(fp8core_context *context, int preset, int stochastic) {
  fp8optim_adamw_options options = fp8optim_adamw_options_of((fp8optim_preset)preset);
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter parameters[TENSORS];
  test_random random = {(uint64_t)preset};
  options.stochastic_rounding = stochastic;
  options.seed = 77;
  for (int i = 0; i < TENSORS; i++) {
    parameters[i] = fp8optim_parameter_create(names[i], rows[i], columns[i]);
    parameters[i].with_weight = i != 1;
    parameters[i].weight_dtype = weights[i];
  }
  rig r = rig_create(context, &options, TENSORS, parameters, 1, &group, preset == 0 ? FP8CORE_FP32 : FP8CORE_E4M3);
  rig_random_masters(&r, &random, 0.02);
  return r;
}

static double sum_of(const double *squares, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; i++) sum += squares[i];
  return sum;
}

static fp8optim_step_options clipped(void) {
  fp8optim_step_options options = fp8optim_step_options_default();
  options.max_norm = 1.0f;
  options.loss_scale = 4.0f;
  return options;
}

// A step by its parts, tensors in the given order, in ranges where neighbours follow each other.
static fp8optim_step_report step_in_order(rig *r, const int *order, const fp8optim_step_options *options) {
  double squares[TENSORS];
  int nonfinite = -1;
  fp8optim_step_report begun;
  fp8optim_step_report ended;
  assert_ok(fp8optim_adamw_step_measure(r->adamw, r->gradients, squares, &nonfinite));
  assert_ok(fp8optim_adamw_step_begin(r->adamw, sum_of(squares, TENSORS), nonfinite, options, &begun));
  for (int i = 0; i < TENSORS;) {
    int count = 1;
    while (i + count < TENSORS && order[i + count] == order[i] + count) count++;
    assert_ok(fp8optim_adamw_step_update(r->adamw, order[i], count));
    i += count;
  }
  assert_ok(fp8optim_adamw_step_end(r->adamw, &ended));
  assert_int_equal(begun.skipped, ended.skipped);
  assert_int_equal(begun.steps, ended.steps);
  assert_int_equal(begun.skipped_steps, ended.skipped_steps);
  assert_memory_equal(&begun.gradient_norm, &ended.gradient_norm, sizeof(float));
  assert_memory_equal(&begun.clip_factor, &ended.clip_factor, sizeof(float));
  return ended;
}

static void bits_of_whole_steps(void **unused) {
  (void)unused;
  static const int orders[][TENSORS] = {{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2, 3, 4, 0, 1}, {3, 0, 1, 4, 2}};
  fp8core_context *context = test_context_default();
  fp8optim_step_options options = clipped();
  // On CUDA the whole step adds up in an order of its own: the norm may differ, and what is clipped by it.
  if (test_on_cuda()) options.max_norm = 0.0f;
  for (int variant = 0; variant < 2 * PRESETS; variant++) {
    for (size_t o = 0; o < sizeof(orders) / sizeof(*orders); o++) {
      rig whole = five(context, variant / 2, variant % 2);
      rig parts = five(context, variant / 2, variant % 2);
      test_random random = {5};
      test_random same = {5};
      for (int step = 0; step < 3; step++) {
        rig_random_gradients(&whole, &random, 1.0);
        rig_random_gradients(&parts, &same, 1.0);
        const fp8optim_step_report one = rig_step(&whole, &options);
        const fp8optim_step_report other = step_in_order(&parts, orders[o], &options);
        assert_false(other.skipped);
        assert_int_equal(one.steps, other.steps);
        if (test_on_cuda()) continue;
        assert_memory_equal(&one.gradient_norm, &other.gradient_norm, sizeof(float));
        assert_true(other.clip_factor < 1.0f);
      }
      image expected = rig_image(&whole);
      assert_unchanged(&parts, &expected);
      rig_destroy(&whole);
      rig_destroy(&parts);
    }
  }
  fp8core_context_destroy(&context);
}

// Two optimizers share what one has: each rank's squares, put in the order of tensors, give the norm, and the tensors
// round as they do in the one, whose streams they have.
static void divided(void **unused) {
  (void)unused;
  enum { COUNT = 6 };
  static const int owner[COUNT] = {1, 0, 0, 1, 0, 1};
  fp8core_context *context = test_context_default();
  fp8optim_adamw_options options = fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP8);
  const fp8optim_group group = fp8optim_group_default();
  const fp8optim_step_options step_options = clipped();
  fp8optim_parameter parameters[COUNT];
  fp8optim_parameter divided_parameters[2][COUNT];
  int64_t counts[2] = {0, 0};
  int64_t local[COUNT];
  options.stochastic_rounding = 1;
  options.seed = 3;
  for (int i = 0; i < COUNT; i++) {
    static const char *const all[COUNT] = {"a", "b", "c", "d", "e", "f"};
    parameters[i] = fp8optim_parameter_create(all[i], 33 + i, 71);
    parameters[i].with_weight = 1;
    local[i] = counts[owner[i]]++;
    divided_parameters[owner[i]][local[i]] = parameters[i];
  }
  rig one = rig_create(context, &options, COUNT, parameters, 1, &group, FP8CORE_E4M3);
  rig ranks[2];
  for (int r = 0; r < 2; r++)
    ranks[r] = rig_create(context, &options, counts[r], divided_parameters[r], 1, &group, FP8CORE_E4M3);
  for (int i = 0; i < COUNT; i++) assert_ok(fp8optim_adamw_set_stream(ranks[owner[i]].adamw, local[i], i));
  test_random random = {21};
  float *values = malloc(40 * 71 * sizeof(*values));
  assert_non_null(values);
  for (int step = 0; step < 4; step++) {
    double squares[2][COUNT];
    double in_order[COUNT];
    int nonfinite[2];
    for (int i = 0; i < COUNT; i++) {
      const int64_t elements = rig_elements(&one, i);
      for (int64_t j = 0; j < elements; j++) values[j] = (float)test_random_normal(&random);
      rig_set_gradient(&one, i, values);
      rig_set_gradient(&ranks[owner[i]], local[i], values);
      if (step > 0) continue;
      for (int64_t j = 0; j < elements; j++) values[j] = (float)(0.02 * test_random_normal(&random));
      rig_set_state(&one, i, FP8OPTIM_MASTER, values);
      rig_set_state(&ranks[owner[i]], local[i], FP8OPTIM_MASTER, values);
    }
    double all[COUNT];
    int any = -1;
    fp8optim_step_report whole;
    assert_ok(fp8optim_adamw_step_measure(one.adamw, one.gradients, all, &any));
    assert_int_equal(any, 0);
    for (int r = 0; r < 2; r++) {
      assert_ok(fp8optim_adamw_step_measure(ranks[r].adamw, ranks[r].gradients, squares[r], &nonfinite[r]));
      assert_int_equal(nonfinite[r], 0);
    }
    for (int i = 0; i < COUNT; i++) in_order[i] = squares[owner[i]][local[i]];
    assert_memory_equal(in_order, all, sizeof(all));
    assert_ok(fp8optim_adamw_step_begin(one.adamw, sum_of(all, COUNT), 0, &step_options, &whole));
    assert_ok(fp8optim_adamw_step_update(one.adamw, 0, COUNT));
    assert_ok(fp8optim_adamw_step_end(one.adamw, NULL));
    assert_true(whole.clip_factor < 1.0f);
    for (int r = 0; r < 2; r++) {
      fp8optim_step_report report;
      assert_ok(fp8optim_adamw_step_begin(ranks[r].adamw, sum_of(in_order, COUNT), 0, &step_options, &report));
      assert_ok(fp8optim_adamw_step_update(ranks[r].adamw, 0, counts[r]));
      assert_ok(fp8optim_adamw_step_end(ranks[r].adamw, NULL));
      assert_memory_equal(&report.gradient_norm, &whole.gradient_norm, sizeof(float));
      assert_memory_equal(&report.clip_factor, &whole.clip_factor, sizeof(float));
    }
  }
  for (int i = 0; i < COUNT; i++) {
    for (int state = FP8OPTIM_MASTER; state <= FP8OPTIM_WEIGHT; state++) {
      const size_t elements = (size_t)rig_elements(&one, i);
      uint32_t *expected = malloc(elements * sizeof(*expected));
      uint32_t *found = malloc(elements * sizeof(*found));
      assert_true(expected && found);
      rig_codes(&one, i, (fp8optim_state)state, expected);
      rig_codes(&ranks[owner[i]], local[i], (fp8optim_state)state, found);
      assert_memory_equal(found, expected, elements * sizeof(*expected));
      assert_true(rig_scale(&one, i, (fp8optim_state)state) ==
                  rig_scale(&ranks[owner[i]], local[i], (fp8optim_state)state));
      free(expected);
      free(found);
    }
  }
  free(values);
  rig_destroy(&one);
  for (int r = 0; r < 2; r++) rig_destroy(&ranks[r]);
  fp8core_context_destroy(&context);
}

// What another rank found skips the step here; so does what is found here; nothing changes but the count.
static void skipped(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  rig r = five(context, FP8OPTIM_PRESET_FP8, 0);
  test_random random = {6};
  for (int kind = 0; kind < 3; kind++) {
    double squares[TENSORS];
    int nonfinite = -1;
    fp8optim_step_report report;
    rig_random_gradients(&r, &random, 1.0);
    uint32_t before[645];
    uint32_t after[645];
    rig_codes(&r, 4, FP8OPTIM_MASTER, before);
    if (kind == 1) {
      const float nan = NAN;
      rig_set_gradient(&r, 2, &nan);
    }
    assert_ok(fp8optim_adamw_step_measure(r.adamw, r.gradients, squares, &nonfinite));
    assert_int_equal(nonfinite, kind == 1);
    // From elsewhere, from here, and by a norm that is too large.
    const double sum = kind == 2 ? 0x1p300 : sum_of(squares, TENSORS);
    assert_ok(fp8optim_adamw_step_begin(r.adamw, sum, kind < 2, NULL, &report));
    assert_int_equal(report.skipped, 1);
    assert_int_equal(report.skipped_steps, kind + 1);
    assert_int_equal(report.steps, 0);
    // With updates and without: there is nothing to do.
    if (kind == 0) assert_ok(fp8optim_adamw_step_update(r.adamw, 0, TENSORS));
    assert_ok(fp8optim_adamw_step_end(r.adamw, &report));
    assert_int_equal(report.skipped, 1);
    rig_codes(&r, 4, FP8OPTIM_MASTER, after);
    assert_memory_equal(before, after, sizeof(before));
  }
  assert_int_equal(fp8optim_adamw_steps(r.adamw), 0);
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

static void out_of_order(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  rig r = five(context, FP8OPTIM_PRESET_FP8, 0);
  test_random random = {7};
  double squares[TENSORS];
  int nonfinite = 0;
  rig_random_gradients(&r, &random, 1.0);
  INVALID(fp8optim_adamw_step_begin(r.adamw, 1.0, 0, NULL, NULL),
          "fp8optim_adamw_step_begin() of nothing measured, expected fp8optim_adamw_step_measure() right before it");
  INVALID(fp8optim_adamw_step_update(r.adamw, 0, 1),
          "fp8optim_adamw_step_update() outside of a step, expected fp8optim_adamw_step_begin() before it");
  INVALID(fp8optim_adamw_step_end(r.adamw, NULL), "fp8optim_adamw_step_end() outside of a step");
  INVALID(fp8optim_adamw_step_measure(NULL, r.gradients, squares, &nonfinite), "adamw of fp8optim_adamw_step_measure");
  INVALID(fp8optim_adamw_step_measure(r.adamw, NULL, squares, &nonfinite), "gradients is NULL, expected 5 tensors");
  INVALID(fp8optim_adamw_step_measure(r.adamw, r.gradients, squares, NULL), "nonfinite of");
  // Measured, and then changed: to be measured again.
  assert_ok(fp8optim_adamw_step_measure(r.adamw, r.gradients, NULL, &nonfinite));
  assert_ok(fp8optim_adamw_set_learning_rate(r.adamw, 1e-2));
  INVALID(fp8optim_adamw_step_begin(r.adamw, 1.0, 0, NULL, NULL), "of nothing measured");
  assert_ok(fp8optim_adamw_step_measure(r.adamw, r.gradients, squares, &nonfinite));
  assert_ok(fp8optim_adamw_step_measure(r.adamw, r.gradients, squares, &nonfinite));
  INVALID(fp8optim_adamw_step_begin(r.adamw, -1.0, 0, NULL, NULL),
          "sum_of_squares is -1, expected a number of at least 0");
  INVALID(fp8optim_adamw_step_begin(r.adamw, (double)NAN, 0, NULL, NULL), "sum_of_squares is");
  fp8optim_step_options options = fp8optim_step_options_default();
  options.max_norm = -2.0f;
  INVALID(fp8optim_adamw_step_begin(r.adamw, 1.0, 0, &options, NULL), "max_norm is -2");
  options.size = 3;
  assert_fails(fp8optim_adamw_step_begin(r.adamw, 1.0, 0, &options, NULL), FP8CORE_ERROR_VERSION_MISMATCH,
               "fp8optim_step_options.size is 3");
  assert_ok(fp8optim_adamw_step_begin(r.adamw, sum_of(squares, TENSORS), 0, NULL, NULL));
  // Within the step.
  fp8core_tensor master;
  assert_ok(fp8optim_adamw_state(r.adamw, 0, FP8OPTIM_MASTER, &master));
  INVALID(fp8optim_adamw_step_begin(r.adamw, 1.0, 0, NULL, NULL), "within a step that has begun");
  INVALID(fp8optim_adamw_step_measure(r.adamw, r.gradients, squares, &nonfinite), "within a step that has begun");
  INVALID(fp8optim_adamw_step(r.adamw, r.gradients, NULL, NULL),
          "fp8optim_adamw_step() within a step that has begun, expected fp8optim_adamw_step_end() before it");
  INVALID(fp8optim_adamw_set_state(r.adamw, 0, FP8OPTIM_MASTER, &master), "fp8optim_adamw_set_state() within a step");
  INVALID(fp8optim_adamw_set_stored(r.adamw, 0, FP8OPTIM_MASTER, master.data, 1.0f, 1.0f),
          "fp8optim_adamw_set_stored() within a step");
  INVALID(fp8optim_adamw_set_steps(r.adamw, 3), "fp8optim_adamw_set_steps() within a step");
  INVALID(fp8optim_adamw_set_learning_rate(r.adamw, 1e-3), "fp8optim_adamw_set_learning_rate() within a step");
  INVALID(fp8optim_adamw_set_stream(r.adamw, 0, 0), "fp8optim_adamw_set_stream() within a step");
  const fp8optim_group group = fp8optim_group_default();
  INVALID(fp8optim_adamw_set_group(r.adamw, 0, &group), "fp8optim_adamw_set_group() within a step");
  const size_t bytes = fp8optim_adamw_saved_bytes(r.adamw);
  void *buffer = malloc(bytes);
  INVALID(fp8optim_adamw_save(r.adamw, buffer, bytes), "fp8optim_adamw_save() within a step");
  INVALID(fp8optim_adamw_load(r.adamw, buffer, bytes), "fp8optim_adamw_load() within a step");
  free(buffer);
  INVALID(fp8optim_adamw_step_update(r.adamw, -1, 1), "first is -1, expected 0 to 5");
  INVALID(fp8optim_adamw_step_update(r.adamw, 3, 3), "count is 3, expected 0 to 2 from tensor 3 on");
  INVALID(fp8optim_adamw_step_update(r.adamw, 3, -1), "count is -1");
  assert_ok(fp8optim_adamw_step_update(r.adamw, 1, 2));
  assert_ok(fp8optim_adamw_step_update(r.adamw, 5, 0));
  INVALID(fp8optim_adamw_step_update(r.adamw, 0, 2), "parameter \"row\" was updated in this step already");
  assert_ok(fp8optim_adamw_step_update(r.adamw, 4, 1));
  assert_ok(fp8optim_adamw_step_update(r.adamw, 0, 1));
  INVALID(fp8optim_adamw_step_end(r.adamw, NULL), "parameter \"none\" was not updated");
  assert_ok(fp8optim_adamw_step_update(r.adamw, 3, 1));
  assert_ok(fp8optim_adamw_step_end(r.adamw, NULL));
  assert_int_equal(fp8optim_adamw_steps(r.adamw), 1);
  // And it goes on.
  assert_int_equal(rig_step(&r, NULL).steps, 2);
  INVALID(fp8optim_adamw_set_stream(r.adamw, 5, 0), "index is 5");
  INVALID(fp8optim_adamw_set_stream(r.adamw, 0, -1), "stream is -1, expected 0 to 2^32 - 1");
  INVALID(fp8optim_adamw_set_stream(r.adamw, 0, INT64_C(1) << 32), "stream is 4294967296");
  // A step that has begun may be left.
  assert_ok(fp8optim_adamw_step_measure(r.adamw, r.gradients, squares, &nonfinite));
  assert_ok(fp8optim_adamw_step_begin(r.adamw, sum_of(squares, TENSORS), 0, NULL, NULL));
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(bits_of_whole_steps),
    cmocka_unit_test(divided),
    cmocka_unit_test(skipped),
    cmocka_unit_test(out_of_order),
  };
  return cmocka_run_group_tests_name("steps in parts", tests, NULL, NULL);
}
