#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

// States too large for any machine are asked for on purpose; the sanitizer must answer as the C library does.
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

static const fp8core_dtype all_dtypes[] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_BF16, FP8CORE_FP16, FP8CORE_FP32};
static const fp8core_scaling_policy policies[] = {FP8CORE_SCALING_JUST_IN_TIME, FP8CORE_SCALING_DELAYED};

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static void assert_same_float(float one, float other) {
  if (bits_of(one) != bits_of(other))
    fail_msg("%a (%08x) is not %a (%08x)", (double)one, bits_of(one), (double)other, bits_of(other));
}

// The rule in its own words: the quotient in double, cut to the limits, rounded once.
static float expected_scale(fp8core_dtype dtype, float amax, int margin, int power_of_two, float previous) {
  if (dtype == FP8CORE_BF16 || dtype == FP8CORE_FP32) return 1.0f;
  if (isnan(amax) || isinf(amax) || amax <= 0.0f) return previous;
  const double quotient = (double)fp8core_dtype_max(dtype) / (double)amax / exp2(margin);
  if (quotient > 0x1p126) return 0x1p126f;
  if (quotient < 0x1p-126) return 0x1p-126f;
  return (float)(power_of_two ? exp2(ilogb(quotient)) : quotient);
}

static void check_rule(fp8core_dtype dtype, float amax, int margin, int power_of_two) {
  const float raw = fp8core_scale_from_amax(dtype, amax, margin, 0, 3.0f);
  const float scale = fp8core_scale_from_amax(dtype, amax, margin, power_of_two, 3.0f);
  const float expected = expected_scale(dtype, amax, margin, power_of_two, 3.0f);
  const float inverse = 1.0f / scale;
  if (bits_of(scale) != bits_of(expected))
    fail_msg("%s, amax %a, margin %d, power of two %d: scale %a, expected %a", fp8core_dtype_name(dtype), (double)amax,
             margin, power_of_two, (double)scale, (double)expected);
  if (!isnormal(scale) || !isnormal(inverse) || scale < 0.0f)
    fail_msg("amax %a gives scale %a and reciprocal %a", (double)amax, (double)scale, (double)inverse);
  int exponent;
  if (power_of_two && amax > 0.0f && isfinite(amax) &&
      (frexpf(scale, &exponent) != 0.5f || scale > raw || scale < raw / 2))
    fail_msg("amax %a: %a is not the power of two below %a", (double)amax, (double)scale, (double)raw);
}

static void rule_known_values(void **unused) {
  (void)unused;
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 448.0f, 0, 0, 7.0f), 1.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 3.0f, 0, 0, 7.0f), 448.0f / 3.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 3.0f, 0, 1, 7.0f), 128.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 448.0f, 0, 1, 7.0f), 1.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, nextafterf(448.0f, INFINITY), 0, 1, 7.0f), 0.5f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, nextafterf(448.0f, 0.0f), 0, 1, 7.0f), 1.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 1.0f, 3, 0, 7.0f), 56.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 1.0f, -2, 0, 7.0f), 1792.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E5M2, 57344.0f, 0, 0, 7.0f), 1.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E5M2, 3.0f, 0, 1, 7.0f), 16384.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_FP16, 65504.0f, 0, 0, 7.0f), 1.0f);
  // FP16 masters of small weights want a scale that FP16 itself cannot hold.
  const float large = fp8core_scale_from_amax(FP8CORE_FP16, 1e-6f, 0, 0, 1.0f);
  assert_true(large > 6.54e10f && large < 6.56e10f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_BF16, 3.0f, 5, 0, 7.0f), 1.0f);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_FP32, 3.0f, 5, 1, 7.0f), 1.0f);
}

static void rule_without_a_usable_amax(void **unused) {
  (void)unused;
  const float amaxes[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, float_of(0x7f800001), -1.0f, -FLT_MIN};
  const fp8core_dtype scaled[] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_FP16};
  for (size_t i = 0; i < sizeof(amaxes) / sizeof(amaxes[0]); i++)
    for (size_t j = 0; j < 3; j++)
      for (int power_of_two = 0; power_of_two < 2; power_of_two++) {
        assert_same_float(fp8core_scale_from_amax(scaled[j], amaxes[i], 0, power_of_two, 1.0f), 1.0f);
        assert_same_float(fp8core_scale_from_amax(scaled[j], amaxes[i], 9, power_of_two, 37.5f), 37.5f);
      }
}

// Where maximum / amax overflows or leaves the normal numbers, and everything in between.
static void rule_at_the_edges(void **unused) {
  (void)unused;
  const float edges[] = {0x1p-149f,     1e-40f,      1e-38f,      FLT_MIN,   1.3e-36f,    1.3166e-36f,
                         1.3167e-36f,   1.6851e-34f, 1.6853e-34f, 5.26e-36f, 0x1.cp-118f, 0x1.cp-111f,
                         0x1.ffcp-111f, 1e38f,       FLT_MAX,     1.0f};
  const int margins[] = {-64, -9, -1, 0, 1, 2, 9, 64};
  for (size_t d = 0; d < 5; d++)
    for (size_t m = 0; m < sizeof(margins) / sizeof(margins[0]); m++)
      for (int power_of_two = 0; power_of_two < 2; power_of_two++) {
        for (size_t i = 0; i < sizeof(edges) / sizeof(edges[0]); i++) {
          check_rule(all_dtypes[d], edges[i], margins[m], power_of_two);
          check_rule(all_dtypes[d], nextafterf(edges[i], 0.0f), margins[m], power_of_two);
          check_rule(all_dtypes[d], nextafterf(edges[i], INFINITY), margins[m], power_of_two);
        }
        for (int exponent = -149; exponent < 128; exponent++) {
          const float power = ldexpf(1.0f, exponent);
          check_rule(all_dtypes[d], power, margins[m], power_of_two);
          check_rule(all_dtypes[d], nextafterf(power, INFINITY), margins[m], power_of_two);
          check_rule(all_dtypes[d], power * 1.75f, margins[m], power_of_two);
        }
      }
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 0x1p-149f, 0, 0, 1.0f), FP8CORE_SCALE_MAX);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 1e-38f, 0, 0, 1.0f), FP8CORE_SCALE_MAX);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E4M3, 1.3e-36f, 0, 0, 1.0f), FP8CORE_SCALE_MAX);
  assert_same_float(fp8core_scale_from_amax(FP8CORE_E5M2, 1.6e-34f, 0, 0, 1.0f), FP8CORE_SCALE_MAX);
  const float small = fp8core_scale_from_amax(FP8CORE_E4M3, FLT_MAX, 0, 0, 1.0f);
  assert_true(small > 1.3e-36f && small < 1.4e-36f);
  test_random random = {2};
  for (int i = 0; i < 100000; i++) {
    const uint64_t draw = test_random_bits(&random);
    check_rule(all_dtypes[draw % 5], float_of((uint32_t)(draw >> 32) & 0x7fffffff), (int)(draw >> 8 & 127) - 64,
               (int)(draw >> 16 & 1));
  }
}

// States and tensors on the device under test.

static fp8core_scaling_options options_with(fp8core_scaling_policy policy, int history_length) {
  fp8core_scaling_options options = fp8core_scaling_options_default();
  options.policy = policy;
  options.history_length = history_length;
  return options;
}

static fp8core_scaling *new_state(fp8core_context *context, fp8core_dtype dtype,
                                  const fp8core_scaling_options *options) {
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, 1, &dtype, options));
  return scaling;
}

static fp8core_scaling_record record_of(fp8core_scaling *scaling, int64_t index) {
  fp8core_scaling_record record;
  assert_ok(fp8core_scaling_get(scaling, index, &record));
  // The two are one thing.
  assert_same_float(record.scale_inverse, 1.0f / record.scale);
  return record;
}

static float read_float(fp8core_context *context, const float *device) {
  float value;
  test_download(context, &value, device, sizeof(value));
  return value;
}

#define MOST_VALUES 512

typedef struct quantised {
  uint8_t codes[MOST_VALUES];
  // As left behind by the cast.
  float scale_inverse;
  fp8core_cast_statistics statistics;
} quantised;

// Casts FP32 values under the scale of tensor `index`, whose dtype is an FP8 one.
static quantised quantise(fp8core_context *context, fp8core_scaling *scaling, int64_t index, const float *values,
                          int count) {
  quantised result;
  assert_in_range(count, 0, MOST_VALUES);
  memset(&result, 0, sizeof(result));
  void *source_data = test_upload(context, values, sizeof(float) * (size_t)count);
  void *data = test_alloc(context, (size_t)count);
  float *inverse = test_alloc(context, sizeof(float));
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = test_upload(context, &result.statistics, sizeof(result.statistics));
  const fp8core_tensor source = test_matrix(source_data, FP8CORE_FP32, 1, count);
  fp8core_tensor destination = test_matrix(data, record_of(scaling, index).dtype, 1, count);
  assert_ok(fp8core_scaling_cast(scaling, index, &options, &source, &destination, inverse));
  assert_ptr_equal(destination.scale_inverse, inverse);
  test_download(context, result.codes, data, (size_t)count);
  test_download(context, &result.statistics, options.statistics, sizeof(result.statistics));
  result.scale_inverse = read_float(context, inverse);
  test_free(context, source_data);
  test_free(context, data);
  test_free(context, inverse);
  test_free(context, options.statistics);
  return result;
}

static void assert_codes(const quantised *result, fp8core_dtype dtype, const float *values, int count, float scale) {
  for (int i = 0; i < count; i++) assert_int_equal(result->codes[i], fp8core_encode(dtype, values[i] * scale, 1));
  assert_same_float(result->scale_inverse, 1.0f / scale);
}

// One step of a tensor that holds a single value; returns the scale that it was cast with.
static float step_with(fp8core_context *context, fp8core_scaling *scaling, float value) {
  const float inverse = quantise(context, scaling, 0, &value, 1).scale_inverse;
  const float scale = record_of(scaling, 0).scale;
  assert_same_float(inverse, 1.0f / scale);
  assert_ok(fp8core_scaling_update(scaling));
  return scale;
}

static void new_state_has_scale_one(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, 5, all_dtypes, NULL));
  assert_int_equal(fp8core_scaling_tensors(scaling), 5);
  for (int i = 0; i < 5; i++) {
    const fp8core_scaling_record record = record_of(scaling, i);
    assert_int_equal(record.dtype, all_dtypes[i]);
    assert_same_float(record.scale, 1.0f);
    assert_same_float(record.amax, 0.0f);
    assert_int_equal(record.history_steps, 0);
    assert_int_equal(record.nonfinite_steps, 0);
  }
  // An update of a state that nothing was cast with leaves it so.
  assert_ok(fp8core_scaling_update(scaling));
  for (int i = 0; i < 5; i++) {
    assert_same_float(record_of(scaling, i).scale, 1.0f);
    assert_int_equal(record_of(scaling, i).history_steps, 0);
  }
  fp8core_scaling_destroy(&scaling);
  assert_null(scaling);
  fp8core_scaling_destroy(&scaling);
  fp8core_scaling_destroy(NULL);
  fp8core_context_destroy(&context);
}

static void just_in_time(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (int power_of_two = 0; power_of_two < 2; power_of_two++)
    for (int margin = -1; margin < 3; margin++)
      for (size_t d = 0; d < 2; d++) {
        fp8core_scaling_options options = options_with(FP8CORE_SCALING_JUST_IN_TIME, 4);
        options.power_of_two = power_of_two;
        options.margin = margin;
        fp8core_scaling *scaling = new_state(context, all_dtypes[d], &options);
        float values[100];
        test_random random = {3};
        for (int step = 0; step < 4; step++) {
          float amax = 0.0f;
          for (int i = 0; i < 100; i++) {
            values[i] = (float)test_random_normal(&random) * ldexpf(1.0f, 10 * (step - 2));
            amax = fmaxf(amax, fabsf(values[i]));
          }
          const float scale = expected_scale(all_dtypes[d], amax, margin, power_of_two, 1.0f);
          const quantised result = quantise(context, scaling, 0, values, 100);
          assert_codes(&result, all_dtypes[d], values, 100, scale);
          assert_int_equal(result.statistics.elements, 100);
          if (margin >= 0) assert_int_equal(result.statistics.saturated, 0);
          assert_same_float(record_of(scaling, 0).scale, scale);
          assert_same_float(record_of(scaling, 0).amax, amax);
          // The end of a step only resets.
          assert_ok(fp8core_scaling_update(scaling));
          assert_same_float(record_of(scaling, 0).scale, scale);
          assert_same_float(record_of(scaling, 0).amax, 0.0f);
          assert_int_equal(record_of(scaling, 0).history_steps, 0);
        }
        fp8core_scaling_destroy(&scaling);
      }
  fp8core_context_destroy(&context);
}

static void delayed_takes_the_maximum(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_scaling_options options = options_with(FP8CORE_SCALING_DELAYED, 3);
  fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
  // The first step is just in time; each later one has the maximum of the three before it.
  const float amaxes[] = {8.0f, 4.0f, 2.0f, 1.0f, 1.0f, 0.5f, 16.0f, 1.0f};
  const float scales[] = {56.0f, 56.0f, 56.0f, 56.0f, 112.0f, 224.0f, 448.0f, 28.0f};
  for (int i = 0; i < 8; i++) {
    assert_same_float(step_with(context, scaling, -amaxes[i]), scales[i]);
    assert_int_equal(record_of(scaling, 0).history_steps, i < 2 ? i + 1 : 3);
  }
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

static void delayed_takes_the_most_recent(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  fp8core_scaling_options options = options_with(FP8CORE_SCALING_DELAYED, 3);
  options.amax_choice = FP8CORE_AMAX_MOST_RECENT;
  fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
  const float amaxes[] = {8.0f, 4.0f, 2.0f, 1.0f, 16.0f, 0.5f};
  const float scales[] = {56.0f, 56.0f, 112.0f, 224.0f, 448.0f, 28.0f};
  for (int i = 0; i < 6; i++) assert_same_float(step_with(context, scaling, amaxes[i]), scales[i]);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

// Long random runs against a history that is kept as a plain list.
static void delayed_against_a_list(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const int lengths[] = {1, 2, 5, 17};
  test_random random = {4};
  for (int variant = 0; variant < 32; variant++) {
    fp8core_scaling_options options = options_with(FP8CORE_SCALING_DELAYED, lengths[variant % 4]);
    const fp8core_dtype dtype = variant & 4 ? FP8CORE_E5M2 : FP8CORE_E4M3;
    options.amax_choice = variant & 8 ? FP8CORE_AMAX_MOST_RECENT : FP8CORE_AMAX_MAXIMUM;
    options.power_of_two = variant >> 4 & 1;
    options.margin = variant % 3;
    fp8core_scaling *scaling = new_state(context, dtype, &options);
    fp8core_tensor bound = test_matrix(NULL, dtype, 0, 0);
    assert_ok(fp8core_scaling_bind(scaling, 0, &bound));
    float list[60];
    int kept = 0;
    uint64_t nonfinite = 0;
    float scale = 1.0f;
    for (int step = 0; step < 60; step++) {
      const uint64_t draw = test_random_bits(&random);
      float amax = (float)exp2(20.0 * (test_random_uniform(&random) - 0.5));
      if (draw % 7 == 0) amax = 0.0f;
      if (draw % 11 == 0) amax = draw & 1024 ? INFINITY : NAN;
      // As a cast leaves it, but without one: the owner may also write it.
      assert_ok(fp8core_copy(context, bound.amax, &amax, sizeof(amax)));
      assert_ok(fp8core_scaling_update(scaling));
      if (!isfinite(amax)) nonfinite++;
      if (isfinite(amax) && amax > 0.0f) {
        list[kept++] = amax;
        float chosen = amax;
        for (int i = kept - 1; i >= 0 && i >= kept - options.history_length; i--) chosen = fmaxf(chosen, list[i]);
        if (options.amax_choice == FP8CORE_AMAX_MOST_RECENT) chosen = amax;
        scale = expected_scale(dtype, chosen, options.margin, options.power_of_two, scale);
      }
      const fp8core_scaling_record record = record_of(scaling, 0);
      assert_same_float(record.scale, scale);
      assert_same_float(record.amax, 0.0f);
      assert_int_equal(record.history_steps, kept < options.history_length ? kept : options.history_length);
      assert_int_equal(record.nonfinite_steps, nonfinite);
      assert_same_float(read_float(context, bound.scale), scale);
      assert_same_float(read_float(context, bound.scale_inverse), 1.0f / scale);
    }
    fp8core_scaling_destroy(&scaling);
  }
  fp8core_context_destroy(&context);
}

// The step's amax is that of all its micro-batches, in any order.
static void micro_batches(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float orders[][3] = {{8.0f, 2.0f, 1.0f}, {1.0f, 2.0f, 8.0f}, {2.0f, -8.0f, 1.0f}};
  for (size_t p = 0; p < 2; p++)
    for (size_t o = 0; o < 3; o++) {
      const fp8core_scaling_options options = options_with(policies[p], 16);
      fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
      for (int i = 0; i < 3; i++) {
        // Each is read with the scale that it was cast with, though the state has moved on. Here that is its own amax:
        // with no history yet, delayed scaling too works just in time.
        const quantised result = quantise(context, scaling, 0, &orders[o][i], 1);
        assert_same_float(fp8core_decode(FP8CORE_E4M3, result.codes[0]) * result.scale_inverse, orders[o][i]);
      }
      assert_same_float(record_of(scaling, 0).amax, 8.0f);
      assert_ok(fp8core_scaling_update(scaling));
      if (policies[p] == FP8CORE_SCALING_DELAYED) {
        assert_same_float(record_of(scaling, 0).scale, 56.0f);
        assert_int_equal(record_of(scaling, 0).history_steps, 1);
        // A step with a history has one scale throughout.
        for (int i = 0; i < 3; i++)
          assert_same_float(quantise(context, scaling, 0, &orders[o][i], 1).scale_inverse, 1.0f / 56.0f);
        assert_same_float(record_of(scaling, 0).amax, 8.0f);
      }
      fp8core_scaling_destroy(&scaling);
    }
  fp8core_context_destroy(&context);
}

static void all_zero_tensors(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  float zeros[33];
  for (int i = 0; i < 33; i++) zeros[i] = i & 1 ? -0.0f : 0.0f;
  for (size_t p = 0; p < 2; p++)
    for (size_t d = 0; d < 2; d++) {
      const fp8core_scaling_options options = options_with(policies[p], 8);
      fp8core_scaling *scaling = new_state(context, all_dtypes[d], &options);
      float previous = 1.0f;
      for (int step = 0; step < 4; step++) {
        const quantised result = quantise(context, scaling, 0, zeros, 33);
        assert_same_float(result.scale_inverse, 1.0f / previous);
        for (int i = 0; i < 33; i++) {
          const float back = fp8core_decode(all_dtypes[d], result.codes[i]) * result.scale_inverse;
          assert_same_float(back, zeros[i]);
        }
        assert_same_float(record_of(scaling, 0).amax, 0.0f);
        assert_ok(fp8core_scaling_update(scaling));
        assert_same_float(record_of(scaling, 0).scale, previous);
        if (step == 1) {
          previous = expected_scale(all_dtypes[d], 5.0f, 0, 0, 1.0f);
          assert_same_float(step_with(context, scaling, 5.0f), previous);
        }
      }
      assert_int_equal(record_of(scaling, 0).history_steps, policies[p] == FP8CORE_SCALING_DELAYED);
      assert_int_equal(record_of(scaling, 0).nonfinite_steps, 0);
      fp8core_scaling_destroy(&scaling);
    }
  fp8core_context_destroy(&context);
}

// An infinity or NaN at any place keeps the scale, is counted, and is forgotten with the next finite step.
static void infinities_and_nans(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float wrong[] = {INFINITY, -INFINITY, NAN, -NAN, float_of(0x7f800001)};
  for (size_t p = 0; p < 2; p++)
    for (size_t w = 0; w < sizeof(wrong) / sizeof(wrong[0]); w++) {
      const fp8core_scaling_options options = options_with(policies[p], 1024);
      fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
      // At the very first step too, where there is no scale yet to keep but 1.
      assert_same_float(step_with(context, scaling, wrong[w]), 1.0f);
      assert_int_equal(record_of(scaling, 0).nonfinite_steps, 1);
      assert_int_equal(record_of(scaling, 0).history_steps, 0);
      assert_same_float(step_with(context, scaling, 7.0f), 64.0f);
      uint64_t counted = 1;
      for (int place = 0; place < 37; place++) {
        float values[37];
        for (int i = 0; i < 37; i++) values[i] = i == place ? wrong[w] : 3.5f;
        const quantised result = quantise(context, scaling, 0, values, 37);
        assert_codes(&result, FP8CORE_E4M3, values, 37, 64.0f);
        assert_int_equal(result.statistics.nonfinite, 1);
        const float amax = record_of(scaling, 0).amax;
        assert_true(isnan(wrong[w]) ? isnan(amax) : isinf(amax));
        // A finite micro-batch of the same step does not hide it.
        const float finite = 1.0f;
        if (policies[p] == FP8CORE_SCALING_DELAYED) {
          (void)quantise(context, scaling, 0, &finite, 1);
          assert_true(!isfinite(record_of(scaling, 0).amax));
        }
        assert_ok(fp8core_scaling_update(scaling));
        assert_int_equal(record_of(scaling, 0).nonfinite_steps, ++counted);
        assert_same_float(record_of(scaling, 0).scale, 64.0f);
        assert_same_float(record_of(scaling, 0).amax, 0.0f);
      }
      // The next finite step is as if nothing had been.
      assert_same_float(step_with(context, scaling, 14.0f), policies[p] == FP8CORE_SCALING_DELAYED ? 64.0f : 32.0f);
      assert_same_float(record_of(scaling, 0).scale, 32.0f);
      assert_int_equal(record_of(scaling, 0).nonfinite_steps, counted);
      fp8core_scaling_destroy(&scaling);
    }
  fp8core_context_destroy(&context);
}

// A tensor 100 times larger than its history saturates, is counted, and is taken account of a step later.
static void larger_than_the_history(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (size_t d = 0; d < 2; d++) {
    const fp8core_dtype dtype = all_dtypes[d];
    fp8core_scaling *scaling = new_state(context, dtype, NULL);
    const float scale = step_with(context, scaling, 1.0f);
    const float values[5] = {100.0f, -100.0f, 1.0f, -0.5f, 50.0f};
    const quantised result = quantise(context, scaling, 0, values, 5);
    assert_same_float(result.scale_inverse, 1.0f / scale);
    assert_int_equal(result.statistics.saturated, 3);
    assert_int_equal(result.statistics.nonfinite, 0);
    const float max = fp8core_dtype_max(dtype);
    assert_same_float(fp8core_decode(dtype, result.codes[0]), max);
    assert_same_float(fp8core_decode(dtype, result.codes[1]), -max);
    assert_same_float(fp8core_decode(dtype, result.codes[2]), max);
    assert_same_float(fp8core_decode(dtype, result.codes[3]), -max / 2);
    assert_same_float(fp8core_decode(dtype, result.codes[4]), max);
    assert_ok(fp8core_scaling_update(scaling));
    assert_same_float(record_of(scaling, 0).scale, expected_scale(dtype, 100.0f, 0, 0, 1.0f));
    fp8core_scaling_destroy(&scaling);
  }
  fp8core_context_destroy(&context);
}

// Tiny and huge values survive quantising: no infinite, zero or NaN scale on the way.
static void extreme_values(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float amaxes[] = {0x1p-149f, 1e-38f, 1.3e-36f, 1.6e-34f, 1e-30f, 1e30f, FLT_MAX};
  for (size_t p = 0; p < 2; p++)
    for (size_t d = 0; d < 2; d++)
      for (size_t i = 0; i < sizeof(amaxes) / sizeof(amaxes[0]); i++) {
        fp8core_scaling_options options = options_with(policies[p], 4);
        fp8core_scaling *scaling = new_state(context, all_dtypes[d], &options);
        for (int step = 0; step < 2; step++) {
          const quantised result = quantise(context, scaling, 0, &amaxes[i], 1);
          const float back = fp8core_decode(all_dtypes[d], result.codes[0]) * result.scale_inverse;
          assert_true(isnormal(result.scale_inverse) && isnormal(1.0f / result.scale_inverse));
          assert_true(isfinite(back) && back >= 0.0f);
          // Half a unit of the last place, or half the smallest subnormal where the clamp leaves that little.
          const double relative = (double)amaxes[i] * (all_dtypes[d] == FP8CORE_E4M3 ? 0x1p-4 : 0x1p-3);
          const double absolute = (double)fp8core_dtype_min_subnormal(all_dtypes[d]) / 2 * (double)result.scale_inverse;
          assert_true(fabs((double)back - (double)amaxes[i]) <= fmax(relative, absolute));
          assert_ok(fp8core_scaling_update(scaling));
        }
        assert_int_equal(record_of(scaling, 0).nonfinite_steps, 0);
        fp8core_scaling_destroy(&scaling);
      }
  fp8core_context_destroy(&context);
}

static void zero_elements(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (size_t p = 0; p < 2; p++) {
    const fp8core_scaling_options options = options_with(policies[p], 8);
    fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
    (void)step_with(context, scaling, 7.0f);
    const quantised result = quantise(context, scaling, 0, NULL, 0);
    assert_same_float(result.scale_inverse, 1.0f / 64.0f);
    assert_int_equal(result.statistics.elements, 0);
    assert_same_float(record_of(scaling, 0).amax, 0.0f);
    assert_ok(fp8core_scaling_update(scaling));
    assert_same_float(record_of(scaling, 0).scale, 64.0f);
    fp8core_tensor source = test_matrix(NULL, FP8CORE_FP32, 3, 0);
    fp8core_tensor destination = test_matrix(NULL, FP8CORE_E4M3, 3, 0);
    fp8core_tensor transposed = test_matrix(NULL, FP8CORE_E4M3, 0, 3);
    assert_ok(fp8core_scaling_cast_transpose(scaling, 0, NULL, &source, &destination, &transposed, NULL));
    assert_non_null(destination.scale);
    assert_ptr_equal(destination.scale_inverse, transposed.scale_inverse);
    fp8core_scaling_destroy(&scaling);
  }
  fp8core_context_destroy(&context);
}

// Bound tensors see every change at once, in scale and reciprocal alike.
static void bound_tensors_follow(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_dtype dtypes[2] = {FP8CORE_E5M2, FP8CORE_E4M3};
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, 2, dtypes, NULL));
  const float initial[2] = {0.5f, -0.25f};
  const float loaded[2] = {4.0f, -2.0f};
  void *source_data = test_upload(context, initial, sizeof(initial));
  void *data = test_alloc(context, 2);
  const fp8core_tensor source = test_matrix(source_data, FP8CORE_FP32, 1, 2);
  fp8core_tensor weight = test_matrix(data, FP8CORE_E4M3, 1, 2);
  // The other tensor's dtype is refused, and nothing bound.
  assert_fails(fp8core_scaling_bind(scaling, 0, &weight), FP8CORE_ERROR_INVALID_ARGUMENT, "e4m3");
  assert_null(weight.scale);
  assert_ok(fp8core_scaling_cast(scaling, 1, NULL, &source, &weight, NULL));
  assert_same_float(read_float(context, weight.scale), 896.0f);
  assert_same_float(read_float(context, weight.scale_inverse), 1.0f / 896.0f);
  assert_same_float(read_float(context, weight.amax), 0.5f);
  const fp8core_tensor bound = weight;
  assert_ok(fp8core_scaling_update(scaling));
  // Weights of amax 4 are loaded over an initialisation of amax 0.5: the new scale counts from the first use.
  assert_ok(fp8core_copy(context, source_data, loaded, sizeof(loaded)));
  assert_ok(fp8core_scaling_set_scale(scaling, 1, 112.0f));
  assert_same_float(read_float(context, bound.scale), 112.0f);
  assert_same_float(read_float(context, bound.scale_inverse), 1.0f / 112.0f);
  assert_same_float(read_float(context, bound.amax), 0.0f);
  assert_int_equal(record_of(scaling, 1).history_steps, 0);
  assert_ok(fp8core_cast(context, NULL, &source, &bound));
  uint8_t codes[2];
  test_download(context, codes, data, 2);
  assert_same_float(fp8core_decode(FP8CORE_E4M3, codes[0]), 448.0f);
  assert_same_float(fp8core_decode(FP8CORE_E4M3, codes[1]), -224.0f);
  assert_ok(fp8core_scaling_update(scaling));
  assert_same_float(record_of(scaling, 1).scale, 112.0f);
  // After a scale set by hand there is no history, so that a cast by the state measures again.
  assert_ok(fp8core_scaling_set_scale(scaling, 1, 3.0f));
  assert_ok(fp8core_scaling_cast(scaling, 1, NULL, &source, &weight, NULL));
  assert_same_float(record_of(scaling, 1).scale, 112.0f);
  // The other tensor has seen nothing of all this.
  assert_same_float(record_of(scaling, 0).scale, 1.0f);
  assert_int_equal(record_of(scaling, 0).history_steps, 0);
  test_free(context, source_data);
  test_free(context, data);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

static void cast_transpose(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  enum { ROWS = 16, COLUMNS = 32 };
  float values[ROWS * COLUMNS];
  test_random random = {5};
  for (int i = 0; i < ROWS * COLUMNS; i++) values[i] = (float)test_random_normal(&random);
  values[100] = 14.0f;
  void *source_data = test_upload(context, values, sizeof(values));
  void *data = test_alloc(context, ROWS * COLUMNS);
  void *transposed_data = test_alloc(context, ROWS * COLUMNS);
  float *inverse = test_alloc(context, sizeof(float));
  for (size_t p = 0; p < 2; p++)
    for (int with_destination = 0; with_destination < 2; with_destination++) {
      const fp8core_scaling_options options = options_with(policies[p], 2);
      fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
      const fp8core_tensor source = test_matrix(source_data, FP8CORE_FP32, ROWS, COLUMNS);
      fp8core_tensor destination = test_matrix(data, FP8CORE_E4M3, ROWS, COLUMNS);
      fp8core_tensor transposed = test_matrix(transposed_data, FP8CORE_E4M3, COLUMNS, ROWS);
      uint8_t codes[ROWS * COLUMNS];
      uint8_t transposed_codes[ROWS * COLUMNS];
      assert_ok(fp8core_zero(context, data, ROWS * COLUMNS));
      assert_ok(fp8core_zero(context, transposed_data, ROWS * COLUMNS));
      assert_ok(fp8core_scaling_cast_transpose(scaling, 0, NULL, &source, with_destination ? &destination : NULL,
                                               &transposed, inverse));
      test_download(context, codes, data, sizeof(codes));
      test_download(context, transposed_codes, transposed_data, sizeof(transposed_codes));
      for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) {
          const uint32_t expected = fp8core_encode(FP8CORE_E4M3, values[i * COLUMNS + j] * 32.0f, 1);
          assert_int_equal(transposed_codes[j * ROWS + i], expected);
          assert_int_equal(codes[i * COLUMNS + j], with_destination ? expected : 0);
        }
      assert_ptr_equal(transposed.scale_inverse, inverse);
      assert_non_null(transposed.scale);
      if (with_destination) assert_ptr_equal(destination.scale_inverse, inverse);
      assert_same_float(read_float(context, inverse), 1.0f / 32.0f);
      assert_same_float(read_float(context, transposed.amax), 14.0f);
      assert_same_float(record_of(scaling, 0).amax, 14.0f);
      fp8core_scaling_destroy(&scaling);
    }
  test_free(context, source_data);
  test_free(context, data);
  test_free(context, transposed_data);
  test_free(context, inverse);
  fp8core_context_destroy(&context);
}

// Data under the very scale that the cast replaces is read with the old one.
static void quantise_again_under_the_same_index(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_scaling_options options = options_with(FP8CORE_SCALING_JUST_IN_TIME, 1);
  fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
  const float values[4] = {3.0f, -1.5f, 0.75f, 0.0f};
  void *source_data = test_upload(context, values, sizeof(values));
  void *data = test_alloc(context, 4);
  void *other_data = test_alloc(context, 4);
  fp8core_tensor source = test_matrix(source_data, FP8CORE_FP32, 1, 4);
  fp8core_tensor tensor = test_matrix(data, FP8CORE_E4M3, 1, 4);
  fp8core_tensor other = test_matrix(other_data, FP8CORE_E4M3, 1, 4);
  // A scale that is far from the best.
  assert_ok(fp8core_scaling_bind(scaling, 0, &tensor));
  assert_ok(fp8core_scaling_set_scale(scaling, 0, 2.0f));
  assert_ok(fp8core_cast(context, NULL, &source, &tensor));
  for (int in_place = 0; in_place < 2; in_place++) {
    fp8core_tensor again = tensor;
    fp8core_tensor *target = in_place ? &again : &other;
    assert_ok(fp8core_scaling_set_scale(scaling, 0, 2.0f));
    assert_ok(fp8core_scaling_cast(scaling, 0, NULL, &tensor, target, NULL));
    assert_same_float(record_of(scaling, 0).scale, 448.0f / 3.0f);
    uint8_t codes[4];
    test_download(context, codes, target->data, 4);
    for (int i = 0; i < 4; i++)
      assert_int_equal(codes[i], fp8core_encode(FP8CORE_E4M3, values[i] * (448.0f / 3.0f), 1));
  }
  test_free(context, source_data);
  test_free(context, data);
  test_free(context, other_data);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

// Saved states.

typedef struct saved {
  unsigned char *bytes;
  size_t size;
} saved;

static saved save_state(fp8core_scaling *scaling) {
  saved state = {NULL, fp8core_scaling_saved_bytes(scaling)};
  state.bytes = malloc(state.size);
  assert_non_null(state.bytes);
  assert_ok(fp8core_scaling_save(scaling, state.bytes, state.size));
  return state;
}

static void assert_unchanged(fp8core_scaling *scaling, const saved *before) {
  saved now = save_state(scaling);
  assert_int_equal(now.size, before->size);
  assert_memory_equal(now.bytes, before->bytes, now.size);
  free(now.bytes);
}

// One step of every tensor with values that depend on the step alone; collects the codes.
static void training_step(fp8core_context *context, fp8core_scaling *scaling, int step, uint8_t *codes) {
  for (int64_t index = 0; index < fp8core_scaling_tensors(scaling); index++) {
    test_random random = {(uint64_t)step * 100 + (uint64_t)index};
    float values[40];
    const float size = ldexpf(1.0f, (int)(test_random_bits(&random) % 20) - 10);
    for (int i = 0; i < 40; i++) values[i] = size * (float)test_random_normal(&random);
    if (step % 5 == 4 && index == 1) values[7] = NAN;
    const quantised result = quantise(context, scaling, index, values, 40);
    memcpy(codes + 40 * index, result.codes, 40);
  }
}

// Saved between steps or amid one, and loaded into another state: the same bits as without the break.
static void save_load_continue(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_dtype dtypes[3] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_E4M3};
  for (size_t p = 0; p < 2; p++)
    for (int break_at = 0; break_at < 12; break_at++)
      for (int amid = 0; amid < 2; amid++) {
        fp8core_scaling_options options = options_with(policies[p], 4);
        options.margin = 1;
        fp8core_scaling *whole;
        fp8core_scaling *first;
        fp8core_scaling *second;
        assert_ok(fp8core_scaling_create(&whole, context, 3, dtypes, &options));
        assert_ok(fp8core_scaling_create(&first, context, 3, dtypes, &options));
        assert_ok(fp8core_scaling_create(&second, context, 3, dtypes, &options));
        // What is loaded over must leave no trace.
        uint8_t expected[120];
        uint8_t codes[120];
        training_step(context, second, 99, codes);
        assert_ok(fp8core_scaling_update(second));
        fp8core_tensor bound = test_matrix(NULL, FP8CORE_E4M3, 0, 0);
        assert_ok(fp8core_scaling_bind(second, 2, &bound));
        fp8core_scaling *current = first;
        for (int step = 0; step < 12; step++) {
          training_step(context, whole, step, expected);
          if (step == break_at && !amid) {
            const saved state = save_state(first);
            assert_ok(fp8core_scaling_load(second, state.bytes, state.size));
            free(state.bytes);
            current = second;
          }
          training_step(context, current, step, codes);
          if (step == break_at && amid) {
            const saved state = save_state(first);
            assert_ok(fp8core_scaling_load(second, state.bytes, state.size));
            free(state.bytes);
            current = second;
          }
          assert_memory_equal(codes, expected, sizeof(codes));
          assert_ok(fp8core_scaling_update(whole));
          assert_ok(fp8core_scaling_update(current));
        }
        const saved state = save_state(whole);
        assert_unchanged(second, &state);
        free(state.bytes);
        assert_same_float(read_float(context, bound.scale), record_of(whole, 2).scale);
        assert_same_float(read_float(context, bound.scale_inverse), record_of(whole, 2).scale_inverse);
        assert_true(record_of(second, 1).nonfinite_steps == 2);
        fp8core_scaling_destroy(&whole);
        fp8core_scaling_destroy(&first);
        fp8core_scaling_destroy(&second);
      }
  fp8core_context_destroy(&context);
}

// Infinite and NaN amaxes of a step in progress come back as they were.
static void save_any_amax(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, NULL);
  fp8core_tensor bound = test_matrix(NULL, FP8CORE_E4M3, 0, 0);
  assert_ok(fp8core_scaling_bind(scaling, 0, &bound));
  const uint32_t amaxes[] = {0,          1,          0x3f800000, 0x7f7fffff, 0x7f800000,
                             0x7fc00000, 0xffc00000, 0x7f800001, 0xff800000, 0xbf800000};
  for (size_t i = 0; i < sizeof(amaxes) / sizeof(amaxes[0]); i++) {
    assert_ok(fp8core_copy(context, bound.amax, &amaxes[i], 4));
    const saved state = save_state(scaling);
    assert_ok(fp8core_zero(context, bound.amax, 4));
    assert_ok(fp8core_scaling_load(scaling, state.bytes, state.size));
    uint32_t bits;
    test_download(context, &bits, bound.amax, 4);
    // What is negative counts as 0.
    assert_int_equal(bits, amaxes[i] == 0xff800000 || amaxes[i] == 0xbf800000 ? 0 : amaxes[i]);
    free(state.bytes);
  }
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

// A state of two tensors with three steps of history, one of them amid a step.
static fp8core_scaling *small_state(fp8core_context *context, const fp8core_scaling_options *options) {
  const fp8core_dtype dtypes[2] = {FP8CORE_E4M3, FP8CORE_E5M2};
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, 2, dtypes, options));
  for (int step = 0; step < 2; step++) {
    uint8_t codes[80];
    training_step(context, scaling, step, codes);
    if (step == 0) assert_ok(fp8core_scaling_update(scaling));
  }
  return scaling;
}

static void load_damaged_bytes(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (size_t p = 0; p < 2; p++) {
    const fp8core_scaling_options options = options_with(policies[p], 3);
    fp8core_scaling *scaling = small_state(context, &options);
    const saved good = save_state(scaling);
    saved bad = {malloc(good.size + 8), good.size};
    assert_non_null(bad.bytes);
    // Cut anywhere; from memory of exactly that size, so that reading past it shows.
    for (size_t size = 0; size < good.size; size++) {
      unsigned char *cut = malloc(size + !size);
      assert_non_null(cut);
      memcpy(cut, good.bytes, size);
      assert_int_equal(fp8core_scaling_load(scaling, cut, size), FP8CORE_ERROR_CORRUPT_DATA);
      free(cut);
    }
    // Longer.
    memcpy(bad.bytes, good.bytes, good.size);
    memset(bad.bytes + good.size, 0, 8);
    for (size_t more = 1; more <= 8; more++)
      assert_fails(fp8core_scaling_load(scaling, bad.bytes, good.size + more), FP8CORE_ERROR_CORRUPT_DATA, "bytes");
    // Each bit flipped.
    for (size_t bit = 0; bit < 8 * good.size; bit++) {
      memcpy(bad.bytes, good.bytes, good.size);
      bad.bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
      if (fp8core_scaling_load(scaling, bad.bytes, bad.size) != FP8CORE_ERROR_CORRUPT_DATA)
        fail_msg("bit %zu flipped is not noticed", bit);
    }
    assert_unchanged(scaling, &good);
    // Foreign bytes.
    test_random random = {6};
    for (int i = 0; i < 200; i++) {
      for (size_t j = 0; j < bad.size; j++) bad.bytes[j] = (unsigned char)test_random_bits(&random);
      if (i & 1) memcpy(bad.bytes, good.bytes, 8);
      assert_int_equal(fp8core_scaling_load(scaling, bad.bytes, bad.size), FP8CORE_ERROR_CORRUPT_DATA);
    }
    memset(bad.bytes, 0, bad.size);
    assert_fails(fp8core_scaling_load(scaling, bad.bytes, bad.size), FP8CORE_ERROR_CORRUPT_DATA, "00 00 00 00");
    assert_unchanged(scaling, &good);
    assert_ok(fp8core_scaling_load(scaling, good.bytes, good.size));
    assert_unchanged(scaling, &good);
    free(good.bytes);
    free(bad.bytes);
    fp8core_scaling_destroy(&scaling);
  }
  fp8core_context_destroy(&context);
}

// CRC-32 of ISO 3309, bit by bit.
static uint32_t crc32_of(const unsigned char *bytes, size_t count) {
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < count; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xEDB88320) : 0);
  }
  return ~crc;
}

static void put_little_endian(unsigned char *bytes, uint64_t value, int count) {
  for (int i = 0; i < count; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

typedef struct tampering {
  size_t offset;
  int bytes;
  uint64_t value;
  fp8core_status status;
  const char *message;
} tampering;

// Offsets in the saved form: the header, and the record of the first tensor.
enum {
  HEADER = 40,
  SCALE = HEADER + 4,
  AMAX = HEADER + 8,
  STEPS = HEADER + 16,
  NONFINITE = HEADER + 24,
  HISTORY = HEADER + 32
};

// The known answer of the polynomial, and the checksum where it belongs.
static void saved_checksum(void **unused) {
  (void)unused;
  assert_int_equal(crc32_of((const unsigned char *)"123456789", 9), 0xCBF43926);
  fp8core_context *context = test_context_default();
  fp8core_scaling *scaling = small_state(context, NULL);
  const saved state = save_state(scaling);
  unsigned char expected[4];
  put_little_endian(expected, crc32_of(state.bytes, state.size - 4), 4);
  assert_memory_equal(state.bytes + state.size - 4, expected, 4);
  assert_memory_equal(state.bytes, "FP8SCALE", 8);
  free(state.bytes);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

// A right checksum does not make wrong fields right.
static void load_wrong_fields(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_status corrupt = FP8CORE_ERROR_CORRUPT_DATA;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  const tampering cases[] = {
    {8, 4, 0, corrupt, "version 0"},
    {8, 4, 2, corrupt, "version 2"},
    {12, 4, 2, corrupt, "policy 2"},
    {16, 8, 0, corrupt, "0 saved tensors"},
    {16, 8, UINT64_MAX, corrupt, "18446744073709551615 saved tensors"},
    {16, 8, UINT64_C(1) << 63, corrupt, "9223372036854775808 saved tensors"},
    // A size that would be right modulo 2^64.
    {16, 8, UINT64_C(1) << 62, corrupt, "4611686018427387904 saved tensors"},
    {16, 8, 1, corrupt, "for its 1 tensors"},
    {16, 8, 3, corrupt, "for its 3 tensors"},
    {24, 4, 0, corrupt, "history_length 0"},
    {24, 4, 65537, corrupt, "history_length 65537"},
    {24, 4, UINT32_MAX, corrupt, "history_length 4294967295"},
    {28, 4, 2, corrupt, "amax_choice 2"},
    {28, 4, 1, invalid, "amax_choice 1"},
    {32, 4, 65, corrupt, "margin 65"},
    {32, 4, UINT32_MAX - 64, corrupt, "margin"},
    {32, 4, 3, invalid, "margin 3"},
    {32, 4, UINT32_MAX - 1, invalid, "margin -2"},
    {36, 4, 2, corrupt, "power_of_two 2"},
    {36, 4, 1, invalid, "power_of_two 1"},
    {HEADER, 4, 5, corrupt, "dtype 5"},
    {HEADER, 4, UINT32_MAX, corrupt, "dtype 4294967295"},
    {HEADER, 4, 1, invalid, "e5m2"},
    {SCALE, 4, 0, corrupt, "scale 0"},
    {SCALE, 4, 0x80000000, corrupt, "scale -0"},
    {SCALE, 4, 0xbf800000, corrupt, "scale -1"},
    {SCALE, 4, 0x7f800000, corrupt, "scale inf"},
    {SCALE, 4, 0x7fc00000, corrupt, "nan"},
    // Just outside 2^-126 and 2^126.
    {SCALE, 4, 0x007fffff, corrupt, "scale 1.17549e-38"},
    {SCALE, 4, 0x7e800001, corrupt, "scale 8.50706e+37"},
    {HEADER + 12, 4, 7, corrupt, "7 in its unused field"},
    {STEPS, 8, UINT64_C(1) << 63, corrupt, "9223372036854775808 steps"},
    {STEPS, 8, UINT64_MAX, corrupt, "18446744073709551615 steps"},
    {STEPS, 8, 0, corrupt, "0 beyond the last"},
    {STEPS, 8, 2, corrupt, "a finite value above 0"},
    // Of a history of 3 the count is at most 3 plus the place in the ring.
    {STEPS, 8, 6, corrupt, "6 steps of history, expected at most 5"},
    {HISTORY, 4, 0, corrupt, "a finite value above 0"},
    {HISTORY, 4, 0x7f800000, corrupt, "inf as amax 0"},
    {HISTORY, 4, 0x7fc00000, corrupt, "nan as amax 0"},
    {HISTORY, 4, 0xbf800000, corrupt, "-1 as amax 0"},
    {HISTORY + 4, 4, 0x3f800000, corrupt, "1 as amax 1"},
    {HISTORY + 8, 4, 0x80000000, corrupt, "-0 as amax 2"},
    {SCALE, 4, 0x7e800000, FP8CORE_OK, ""},
    {SCALE, 4, 0x00800000, FP8CORE_OK, ""},
    {AMAX, 4, 0x80000001, corrupt, "amax -1.4013e-45, expected 0 or more"},
    {AMAX, 4, 0xbf800000, corrupt, "amax -1, expected 0 or more"},
    {AMAX, 4, 0xff800000, corrupt, "amax -inf, expected 0 or more"},
    {AMAX, 4, 0x7fc00000, FP8CORE_OK, ""},
    {AMAX, 4, 0xffc00000, FP8CORE_OK, ""},
    {AMAX, 4, 0x80000000, FP8CORE_OK, ""},
    {AMAX, 4, 0x7f800000, FP8CORE_OK, ""},
    {NONFINITE, 8, UINT64_MAX, FP8CORE_OK, ""},
    {HISTORY, 4, 0x7f7fffff, FP8CORE_OK, ""},
    {HISTORY, 4, 1, FP8CORE_OK, ""},
  };
  const fp8core_scaling_options options = options_with(FP8CORE_SCALING_DELAYED, 3);
  fp8core_scaling *scaling = small_state(context, &options);
  const saved good = save_state(scaling);
  saved bad = {malloc(good.size), good.size};
  assert_non_null(bad.bytes);
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    memcpy(bad.bytes, good.bytes, good.size);
    put_little_endian(bad.bytes + cases[i].offset, cases[i].value, cases[i].bytes);
    put_little_endian(bad.bytes + bad.size - 4, crc32_of(bad.bytes, bad.size - 4), 4);
    if (cases[i].status != FP8CORE_OK) {
      assert_fails(fp8core_scaling_load(scaling, bad.bytes, bad.size), cases[i].status, cases[i].message);
      assert_unchanged(scaling, &good);
    } else {
      assert_ok(fp8core_scaling_load(scaling, bad.bytes, bad.size));
      assert_unchanged(scaling, &bad);
      (void)record_of(scaling, 0);
      assert_ok(fp8core_scaling_load(scaling, good.bytes, good.size));
    }
  }
  // A history that just-in-time scaling does not have.
  fp8core_scaling_options just_in_time_options = options_with(FP8CORE_SCALING_JUST_IN_TIME, 3);
  fp8core_scaling *other = small_state(context, &just_in_time_options);
  saved state = save_state(other);
  put_little_endian(state.bytes + STEPS, 1, 8);
  put_little_endian(state.bytes + state.size - 4, crc32_of(state.bytes, state.size - 4), 4);
  assert_fails(fp8core_scaling_load(other, state.bytes, state.size), corrupt, "1 steps of history");
  free(state.bytes);
  free(good.bytes);
  free(bad.bytes);
  fp8core_scaling_destroy(&scaling);
  fp8core_scaling_destroy(&other);
  fp8core_context_destroy(&context);
}

// Whole and undamaged, but of another state: refused by name, never taken over silently.
static void load_of_another_state(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_scaling_options own_options = options_with(FP8CORE_SCALING_DELAYED, 3);
  fp8core_scaling *own = small_state(context, &own_options);
  const saved before = save_state(own);
  const char *expected[] = {"policy 0",       "history_length 4", "amax_choice 1", "margin -1",
                            "power_of_two 1", "1 saved tensors",  "fp16"};
  for (int i = 0; i < 7; i++) {
    fp8core_scaling_options options = own_options;
    if (i == 0) options.policy = FP8CORE_SCALING_JUST_IN_TIME;
    if (i == 1) options.history_length = 4;
    if (i == 2) options.amax_choice = FP8CORE_AMAX_MOST_RECENT;
    if (i == 3) options.margin = -1;
    if (i == 4) options.power_of_two = 77;
    const fp8core_dtype dtypes[2] = {FP8CORE_E4M3, i == 6 ? FP8CORE_FP16 : FP8CORE_E5M2};
    fp8core_scaling *other;
    assert_ok(fp8core_scaling_create(&other, context, i == 5 ? 1 : 2, dtypes, &options));
    const saved state = save_state(other);
    assert_fails(fp8core_scaling_load(own, state.bytes, state.size), FP8CORE_ERROR_INVALID_ARGUMENT, expected[i]);
    assert_unchanged(own, &before);
    free(state.bytes);
    fp8core_scaling_destroy(&other);
  }
  free(before.bytes);
  fp8core_scaling_destroy(&own);
  fp8core_context_destroy(&context);
}

static void set_scale_limits(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  fp8core_scaling *scaling = small_state(context, NULL);
  const saved before = save_state(scaling);
  const float wrong[] = {0.0f,    -0.0f,    -1.0f, INFINITY, -INFINITY, NAN, 0x1.fffffcp-127f, 0x1.000002p126f,
                         FLT_MAX, 0x1p-149f};
  for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
    char text[32];
    (void)snprintf(text, sizeof(text), "scale is %g", (double)wrong[i]);
    assert_fails(fp8core_scaling_set_scale(scaling, 0, wrong[i]), FP8CORE_ERROR_INVALID_ARGUMENT, text);
  }
  assert_unchanged(scaling, &before);
  const float right[] = {FP8CORE_SCALE_MIN, FP8CORE_SCALE_MAX, 1.0f, 3.0f};
  for (size_t i = 0; i < sizeof(right) / sizeof(right[0]); i++) {
    assert_ok(fp8core_scaling_set_scale(scaling, 0, right[i]));
    assert_same_float(record_of(scaling, 0).scale, right[i]);
    assert_int_equal(record_of(scaling, 0).history_steps, 0);
    assert_same_float(record_of(scaling, 0).amax, 0.0f);
  }
  free(before.bytes);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

static void wrong_options(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_dtype dtype = FP8CORE_E4M3;
  const struct {
    int policy, history_length, amax_choice, margin;
    const char *message;
  } cases[] = {
    {2, 8, 0, 0, "policy is 2"},
    {-1, 8, 0, 0, "policy is -1"},
    {1, 0, 0, 0, "history_length is 0"},
    {0, -1, 0, 0, "history_length is -1"},
    {1, 65537, 0, 0, "history_length is 65537"},
    {1, INT32_MIN, 0, 0, "history_length is -2147483648"},
    {1, 8, 2, 0, "amax_choice is 2"},
    {1, 8, -1, 0, "amax_choice is -1"},
    {1, 8, 0, 65, "margin is 65"},
    {1, 8, 0, -65, "margin is -65"},
    {1, 8, 0, INT32_MIN, "margin is -2147483648"},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    fp8core_scaling_options options = fp8core_scaling_options_default();
    fp8core_scaling *scaling = (fp8core_scaling *)(uintptr_t)8;
    options.policy = (fp8core_scaling_policy)cases[i].policy;
    options.history_length = cases[i].history_length;
    options.amax_choice = (fp8core_amax_choice)cases[i].amax_choice;
    options.margin = cases[i].margin;
    assert_fails(fp8core_scaling_create(&scaling, context, 1, &dtype, &options), FP8CORE_ERROR_INVALID_ARGUMENT,
                 cases[i].message);
    assert_null(scaling);
  }
  fp8core_scaling_options options = fp8core_scaling_options_default();
  fp8core_scaling *scaling;
  options.size = sizeof(options) + 1;
  assert_fails(fp8core_scaling_create(&scaling, context, 1, &dtype, &options), FP8CORE_ERROR_VERSION_MISMATCH,
               "size is");
  // The limits themselves are in range.
  options = options_with(FP8CORE_SCALING_DELAYED, 65536);
  options.margin = 64;
  assert_ok(fp8core_scaling_create(&scaling, context, 1, &dtype, &options));
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

static void wrong_arguments_of_create(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_dtype dtypes[3] = {FP8CORE_E4M3, FP8CORE_E5M2, (fp8core_dtype)9};
  fp8core_scaling *scaling = (fp8core_scaling *)(uintptr_t)8;
  assert_fails(fp8core_scaling_create(NULL, context, 1, dtypes, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "fp8core_scaling_create: scaling is NULL, expected ");
  assert_fails(fp8core_scaling_create(&scaling, NULL, 1, dtypes, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "fp8core_scaling_create: context is NULL, expected ");
  assert_null(scaling);
  assert_fails(fp8core_scaling_create(&scaling, context, 1, NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "fp8core_scaling_create: dtypes is NULL, expected ");
  assert_fails(fp8core_scaling_create(&scaling, context, 3, dtypes, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "dtypes[2] is 9");
  assert_null(scaling);
  // Sizes whose bytes do not fit into 63 bits, in whole or after a wrap-around.
  const int64_t tensors[] = {0, -1, INT64_MIN, INT64_MAX, INT64_C(1) << 62, INT64_C(1) << 52, INT64_C(1) << 51};
  for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
    char text[48];
    (void)snprintf(text, sizeof(text), "tensors is %" PRId64 ",", tensors[i]);
    assert_fails(fp8core_scaling_create(&scaling, context, tensors[i], dtypes, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
                 text);
    assert_null(scaling);
  }
  // This fits into 63 bits, but into no machine.
  assert_fails(fp8core_scaling_create(&scaling, context, INT64_C(1) << 50, dtypes, NULL), FP8CORE_ERROR_OUT_OF_MEMORY,
               "bytes");
  assert_null(scaling);
  fp8core_context_destroy(&context);
}

// Everything is checked before anything changes: neither the state nor the tensors.
static void wrong_arguments_change_nothing(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (size_t p = 0; p < 2; p++) {
    const fp8core_scaling_options state_options = options_with(policies[p], 3);
    fp8core_scaling *scaling = small_state(context, &state_options);
    const saved before = save_state(scaling);
    const float values[4] = {1000.0f, 2.0f, 3.0f, 4.0f};
    void *source_data = test_upload(context, values, sizeof(values));
    void *data = test_alloc(context, 8);
    float *inverses = test_alloc(context, 2 * sizeof(float));
    const fp8core_tensor source = test_matrix(source_data, FP8CORE_FP32, 2, 2);
    const fp8core_tensor good = test_matrix(data, FP8CORE_E4M3, 2, 2);
    fp8core_tensor destination = good;
    fp8core_tensor transposed = test_matrix((char *)data + 4, FP8CORE_E4M3, 2, 2);
    fp8core_scaling_record record;
    const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
    const int64_t indices[] = {-1, 2, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < 4; i++) {
      char text[48];
      (void)snprintf(text, sizeof(text), "index is %" PRId64 ", expected 0 to 1", indices[i]);
      assert_fails(fp8core_scaling_bind(scaling, indices[i], &destination), invalid, text);
      assert_fails(fp8core_scaling_cast(scaling, indices[i], NULL, &source, &destination, NULL), invalid, text);
      assert_fails(fp8core_scaling_cast_transpose(scaling, indices[i], NULL, &source, NULL, &transposed, NULL), invalid,
                   text);
      assert_fails(fp8core_scaling_get(scaling, indices[i], &record), invalid, text);
      assert_fails(fp8core_scaling_set_scale(scaling, indices[i], 1.0f), invalid, text);
    }
    assert_fails(fp8core_scaling_bind(NULL, 0, &destination), invalid,
                 "fp8core_scaling_bind: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_bind(scaling, 0, NULL), invalid, "fp8core_scaling_bind: tensor is NULL, expected ");
    assert_fails(fp8core_scaling_cast(NULL, 0, NULL, &source, &destination, NULL), invalid,
                 "fp8core_scaling_cast: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, NULL, &destination, NULL), invalid, "source is NULL");
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, NULL, NULL), invalid,
                 "fp8core_scaling_cast: destination is NULL, expected ");
    assert_fails(fp8core_scaling_cast_transpose(NULL, 0, NULL, &source, &destination, &transposed, NULL), invalid,
                 "fp8core_scaling_cast_transpose: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_cast_transpose(scaling, 0, NULL, &source, &destination, NULL, NULL), invalid,
                 "fp8core_scaling_cast_transpose: transposed is NULL, expected ");
    assert_fails(fp8core_scaling_update(NULL), invalid, "fp8core_scaling_update: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_get(NULL, 0, &record), invalid, "fp8core_scaling_get: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_get(scaling, 0, NULL), invalid, "fp8core_scaling_get: record is NULL, expected ");
    assert_fails(fp8core_scaling_set_scale(NULL, 0, 1.0f), invalid,
                 "fp8core_scaling_set_scale: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_save(NULL, data, 8), invalid, "fp8core_scaling_save: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_save(scaling, NULL, before.size), invalid,
                 "fp8core_scaling_save: buffer is NULL, expected ");
    assert_fails(fp8core_scaling_load(NULL, before.bytes, before.size), invalid,
                 "fp8core_scaling_load: scaling is NULL, expected ");
    assert_fails(fp8core_scaling_load(scaling, NULL, before.size), invalid,
                 "fp8core_scaling_load: buffer is NULL, expected ");
    assert_int_equal(fp8core_scaling_tensors(NULL), 0);
    assert_int_equal(fp8core_scaling_saved_bytes(NULL), 0);
    assert_int_equal(fp8core_scaling_memory_bytes(NULL), 0);
    unsigned char *room = malloc(before.size + 1);
    assert_non_null(room);
    for (int more = -1; more <= 1; more += 2) {
      char text[32];
      const size_t size = before.size + (size_t)more;
      (void)snprintf(text, sizeof(text), "bytes is %zu", size);
      memset(room, 0x5a, before.size + 1);
      assert_fails(fp8core_scaling_save(scaling, room, size), invalid, text);
      for (size_t i = 0; i <= before.size; i++) assert_int_equal(room[i], 0x5a);
    }
    free(room);
    // The dtype of the other tensor, one outside the enum, another device, another granularity, another shape.
    destination.dtype = FP8CORE_E5M2;
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, inverses), invalid, "e5m2");
    destination.dtype = (fp8core_dtype)11;
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, inverses), invalid, "11");
    destination = good;
    destination.device.index = 5;
    assert_fails(fp8core_scaling_bind(scaling, 0, &destination), invalid, "5");
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, inverses), invalid, "5");
    destination = good;
    destination.scale_granularity = (fp8core_scale_granularity)4;
    assert_fails(fp8core_scaling_bind(scaling, 0, &destination), invalid, "scale_granularity is 4");
    destination = good;
    destination.shape[1] = 1;
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, inverses), invalid, "shape");
    transposed.dtype = FP8CORE_E5M2;
    assert_fails(fp8core_scaling_cast_transpose(scaling, 0, NULL, &source, NULL, &transposed, inverses), invalid,
                 "transposed.dtype");
    destination = good;
    destination.data = NULL;
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, inverses), invalid, "data is NULL");
    destination = good;
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, (float *)(void *)((char *)inverses + 1)),
                 invalid, "scale_inverse");
    fp8core_tensor odd_source = source;
    odd_source.scale_inverse = (const float *)(const void *)((const char *)inverses + 2);
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &odd_source, &destination, inverses), invalid,
                 "source.scale_inverse is ");
    fp8core_cast_options cast_options = fp8core_cast_options_default();
    cast_options.size = 0;
    assert_int_not_equal(fp8core_scaling_cast(scaling, 0, &cast_options, &source, &destination, inverses), FP8CORE_OK);
    assert_null(destination.scale);
    assert_null(destination.scale_inverse);
    assert_null(destination.amax);
    assert_null(transposed.scale);
    assert_unchanged(scaling, &before);
    free(before.bytes);
    test_free(context, source_data);
    test_free(context, data);
    test_free(context, inverses);
    fp8core_scaling_destroy(&scaling);
  }
  fp8core_context_destroy(&context);
}

// Products stored under a state's scale.

enum { M = 24, N = 32, K = 16, BATCH = 3 };

typedef struct product_case {
  fp8core_scaling_policy policy;
  fp8core_dtype dtype;
  int batch;
  // Of D: matrices one below the other, side by side, or with gaps.
  int64_t row_stride;
  int64_t batch_stride;
  int with_epilogue;
  // Magnitude of the results.
  float size;
} product_case;

typedef struct product_memory {
  fp8core_context *context;
  fp8core_tensor a;
  fp8core_tensor b;
  fp8core_tensor bias;
  fp8core_tensor wide;
  uint8_t *codes;
  float *inverse;
} product_memory;

enum { CODES = 4 * M * N * BATCH };

static void fill_operands(const product_memory *memory, int step) {
  test_random random = {(uint64_t)step + 40};
  uint8_t codes[BATCH * M * K];
  for (int i = 0; i < BATCH * M * K; i++)
    codes[i] = (uint8_t)fp8core_encode(FP8CORE_E4M3, (float)test_random_normal(&random), 1);
  assert_ok(fp8core_copy(memory->context, memory->a.data, codes, sizeof(codes)));
  for (int i = 0; i < K * N; i++)
    codes[i] = (uint8_t)fp8core_encode(FP8CORE_E4M3, (float)test_random_normal(&random), 1);
  assert_ok(fp8core_copy(memory->context, memory->b.data, codes, K * N));
}

static product_memory new_product_memory(fp8core_context *context) {
  product_memory memory;
  memory.context = context;
  memory.a = test_matrix(test_alloc(context, BATCH * M * K), FP8CORE_E4M3, M, K);
  memory.b = test_matrix(test_alloc(context, K * N), FP8CORE_E4M3, K, N);
  memory.bias = test_matrix(test_alloc(context, N * sizeof(float)), FP8CORE_FP32, 1, N);
  memory.bias.dimensions = 1;
  memory.bias.shape[0] = N;
  memory.wide = test_matrix(test_alloc(context, BATCH * M * N * sizeof(float)), FP8CORE_FP32, M, N);
  memory.codes = test_alloc(context, CODES);
  memory.inverse = test_alloc(context, sizeof(float));
  return memory;
}

static void free_product_memory(product_memory *memory) {
  test_free(memory->context, memory->a.data);
  test_free(memory->context, memory->b.data);
  test_free(memory->context, memory->bias.data);
  test_free(memory->context, memory->wide.data);
  test_free(memory->context, memory->codes);
  test_free(memory->context, memory->inverse);
}

static fp8core_gemm_options product_options(const product_memory *memory, const product_case *tried) {
  fp8core_gemm_options options = fp8core_gemm_options_default();
  // Sums of K products of normal numbers are about 4.
  options.alpha = tried->size / 4;
  options.batch = tried->batch;
  options.batch_stride_a = M * K;
  if (tried->with_epilogue) {
    options.bias = &memory->bias;
    options.epilogue = FP8CORE_EPILOGUE_GELU;
  }
  return options;
}

// A step of the product, beside the same in two calls under a state of its own: FP32, then a cast.
static void compare_product(const product_memory *memory, const product_case *tried, fp8core_scaling *scaling,
                            fp8core_scaling *twin, int64_t *nonzero) {
  fp8core_context *context = memory->context;
  fp8core_gemm_options options = product_options(memory, tried);
  options.batch_stride_d = tried->batch_stride;
  uint8_t codes[CODES];
  memset(codes, 0x5a, sizeof(codes));
  assert_ok(fp8core_copy(context, memory->codes, codes, sizeof(codes)));
  fp8core_tensor d = test_matrix(memory->codes, tried->dtype, M, N);
  d.row_stride = tried->row_stride;
  assert_ok(fp8core_scaling_gemm(scaling, 0, &options, &memory->a, &memory->b, NULL, &d, memory->inverse));
  assert_ptr_equal(d.scale_inverse, memory->inverse);
  assert_non_null(d.scale);
  assert_non_null(d.amax);
  test_download(context, codes, memory->codes, sizeof(codes));
  const float inverse = read_float(context, memory->inverse);

  options.batch_stride_d = M * N;
  assert_ok(fp8core_gemm(context, &options, &memory->a, &memory->b, NULL, &memory->wide));
  float wide[BATCH * M * N];
  uint8_t expected[BATCH * M * N];
  const size_t count = (size_t)tried->batch * M * N;
  test_download(context, wide, memory->wide.data, count * sizeof(float));
  const fp8core_tensor source = test_matrix(memory->wide.data, FP8CORE_FP32, tried->batch * M, N);
  fp8core_tensor cast = test_matrix(memory->codes, tried->dtype, tried->batch * M, N);
  assert_ok(fp8core_scaling_cast(twin, 0, NULL, &source, &cast, NULL));
  test_download(context, expected, memory->codes, count);

  int written[CODES] = {0};
  float amax = 0.0f;
  for (size_t i = 0; i < count; i++) amax = fmaxf(amax, fabsf(wide[i]));
  for (size_t i = 0; i < count; i++) {
    const int64_t matrix = (int64_t)i / (M * N), row = (int64_t)i / N % M, column = (int64_t)i % N;
    const int64_t place = matrix * tried->batch_stride + row * tried->row_stride + column;
    written[place] = 1;
    *nonzero += (codes[place] & 0x7f) != 0;
    // A GPU may sum in another order for another type of D.
    if (!test_on_cuda()) assert_int_equal(codes[place], expected[i]);
    const float value = fp8core_decode(tried->dtype, codes[place]) * inverse;
    assert_true(fabsf(value - wide[i]) <= 0.15f * fabsf(wide[i]) + 0.01f * amax);
  }
  for (int i = 0; i < CODES; i++)
    if (!written[i]) assert_int_equal(codes[i], 0x5a);
  const fp8core_scaling_record record = record_of(scaling, 0);
  const fp8core_scaling_record other = record_of(twin, 0);
  if (!test_on_cuda()) {
    assert_same_float(record.scale, other.scale);
    assert_same_float(record.amax, other.amax);
    assert_true(record.amax >= amax);
  }
  assert_same_float(record.scale_inverse, inverse);
}

static void product_steps(const product_memory *memory, const product_case *tried) {
  const fp8core_scaling_options options = options_with(tried->policy, 8);
  fp8core_scaling *scaling = new_state(memory->context, tried->dtype, &options);
  fp8core_scaling *twin = new_state(memory->context, tried->dtype, &options);
  float bias[N];
  for (int i = 0; i < N; i++) bias[i] = tried->size * (float)(i % 5 - 2);
  assert_ok(fp8core_copy(memory->context, memory->bias.data, bias, sizeof(bias)));
  for (int step = 0; step < 4; step++) {
    // The second step has two micro-batches.
    for (int part = 0; part < (step == 1 ? 2 : 1); part++) {
      int64_t nonzero = 0;
      fill_operands(memory, 2 * step + part);
      compare_product(memory, tried, scaling, twin, &nonzero);
      assert_true(nonzero > tried->batch * M * N * 9 / 10);
    }
    assert_ok(fp8core_scaling_update(scaling));
    assert_ok(fp8core_scaling_update(twin));
    if (!test_on_cuda()) assert_same_float(record_of(scaling, 0).scale, record_of(twin, 0).scale);
    assert_int_equal(record_of(scaling, 0).history_steps, tried->policy == FP8CORE_SCALING_DELAYED ? step + 1 : 0);
  }
  fp8core_scaling_destroy(&scaling);
  fp8core_scaling_destroy(&twin);
}

// Small results are not lost before the first update, nor under just-in-time scaling, which fp8core_gemm() into a bound
// tensor would do.
static void products_under_the_states_scale(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  product_memory memory = new_product_memory(context);
  const float sizes[] = {1e-3f, 1e-30f, 1e5f};
  const int64_t layouts[][3] = {
    {1, N, 0}, {1, N + 16, 0}, {BATCH, N, M * N}, {BATCH, BATCH * N, N}, {BATCH, N + 16, M * (N + 16) + 32}};
  for (size_t p = 0; p < 2; p++)
    for (size_t d = 0; d < 2; d++)
      for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (size_t l = 0; l < sizeof(layouts) / sizeof(layouts[0]); l++)
          for (int with_epilogue = 0; with_epilogue < 2; with_epilogue++) {
            const product_case tried = {policies[p],   all_dtypes[d], (int)layouts[l][0], layouts[l][1], layouts[l][2],
                                        with_epilogue, sizes[s]};
            // GELU of large negative values is 0.
            if (with_epilogue && sizes[s] > 1.0f) continue;
            product_steps(&memory, &tried);
          }
  // What this is for: the plain product into a bound tensor.
  const product_case plain = {FP8CORE_SCALING_JUST_IN_TIME, FP8CORE_E4M3, 1, N, 0, 0, 1e-5f};
  const fp8core_scaling_options options = options_with(plain.policy, 1);
  const fp8core_gemm_options gemm_options = product_options(&memory, &plain);
  fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &options);
  fp8core_tensor d = test_matrix(memory.codes, FP8CORE_E4M3, M, N);
  uint8_t codes[M * N];
  assert_ok(fp8core_scaling_bind(scaling, 0, &d));
  assert_ok(fp8core_gemm(context, &gemm_options, &memory.a, &memory.b, NULL, &d));
  test_download(context, codes, memory.codes, sizeof(codes));
  for (int i = 0; i < M * N; i++) assert_int_equal(codes[i] & 0x7f, 0);
  fp8core_scaling_destroy(&scaling);
  free_product_memory(&memory);
  fp8core_context_destroy(&context);
}

// D's own memory as C, read with the scale of before; no elements; a scale set by hand; a step that leaves no history.
static void products_at_the_edges(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  product_memory memory = new_product_memory(context);
  const product_case tried = {FP8CORE_SCALING_JUST_IN_TIME, FP8CORE_E4M3, 1, N, 0, 0, 1e-3f};
  fp8core_gemm_options options = product_options(&memory, &tried);
  fill_operands(&memory, 0);
  for (size_t p = 0; p < 2; p++) {
    const fp8core_scaling_options scaling_options = options_with(policies[p], 4);
    fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, &scaling_options);
    fp8core_tensor d = test_matrix(memory.codes, FP8CORE_E4M3, M, N);
    uint8_t codes[2][M * N];
    float inverse[2];
    options.beta = 0.0f;
    const size_t bytes = fp8core_scaling_memory_bytes(scaling);
    assert_true(bytes >= (size_t)fp8core_scaling_tensors(scaling) * 33);
    // Room is made beforehand; nothing else changes.
    test_download(context, codes[0], memory.codes, sizeof(codes[0]));
    assert_ok(fp8core_scaling_gemm_reserve(scaling, 0, &options, &memory.a, &memory.b, NULL, &d));
    assert_int_equal(fp8core_scaling_memory_bytes(scaling), bytes + M * N * sizeof(float));
    const size_t workspace = fp8core_context_workspace_bytes(context);
    test_download(context, codes[1], memory.codes, sizeof(codes[1]));
    assert_memory_equal(codes[0], codes[1], sizeof(codes[0]));
    assert_true(record_of(scaling, 0).scale == 1.0f && record_of(scaling, 0).amax == 0.0f);
    assert_int_equal(fp8core_scaling_gemm_reserve(scaling, -1, &options, &memory.a, &memory.b, NULL, &d),
                     FP8CORE_ERROR_INVALID_ARGUMENT);
    assert_ok(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, NULL, &d, NULL));
    assert_int_equal(fp8core_scaling_memory_bytes(scaling), bytes + M * N * sizeof(float));
    assert_int_equal(fp8core_context_workspace_bytes(context), workspace);
    inverse[0] = read_float(context, d.scale_inverse);
    test_download(context, codes[0], memory.codes, sizeof(codes[0]));
    // D = 3 D + product: about 4 times as much.
    options.beta = 3.0f;
    const fp8core_tensor c = d;
    assert_ok(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, &c, &d, NULL));
    inverse[1] = read_float(context, d.scale_inverse);
    test_download(context, codes[1], memory.codes, sizeof(codes[1]));
    assert_true(inverse[1] > 3.5f * inverse[0] && inverse[1] < 4.5f * inverse[0]);
    for (int i = 0; i < M * N; i++) {
      const float before = fp8core_decode(FP8CORE_E4M3, codes[0][i]) * inverse[0];
      const float after = fp8core_decode(FP8CORE_E4M3, codes[1][i]) * inverse[1];
      assert_true(fabsf(after - 4.0f * before) <= 0.13f * fabsf(4.0f * before) + 4e-5f);
    }
    options.beta = 0.0f;
    // A scale set by hand has no history, and does not stay.
    assert_ok(fp8core_scaling_update(scaling));
    assert_ok(fp8core_scaling_set_scale(scaling, 0, 1.0f));
    assert_ok(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, NULL, &d, NULL));
    assert_true(record_of(scaling, 0).scale > 1000.0f);
    // A first step of zeros leaves no history: the next one is measured. CUDA's host has not seen that.
    fp8core_scaling *other = new_state(context, FP8CORE_E4M3, &scaling_options);
    options.alpha = 0.0f;
    assert_ok(fp8core_scaling_gemm(other, 0, &options, &memory.a, &memory.b, NULL, &d, NULL));
    assert_same_float(record_of(other, 0).scale, 1.0f);
    assert_ok(fp8core_scaling_update(other));
    options.alpha = 1e-3f / 4;
    assert_ok(fp8core_scaling_gemm(other, 0, &options, &memory.a, &memory.b, NULL, &d, NULL));
    if (!test_on_cuda() || policies[p] == FP8CORE_SCALING_JUST_IN_TIME)
      assert_true(record_of(other, 0).scale > 1000.0f);
    // Nothing to multiply: nothing moves.
    const float scale = record_of(scaling, 0).scale;
    const fp8core_tensor no_rows = test_matrix(NULL, FP8CORE_E4M3, 0, K);
    fp8core_tensor empty = test_matrix(NULL, FP8CORE_E4M3, 0, N);
    assert_ok(fp8core_scaling_gemm(scaling, 0, &options, &no_rows, &memory.b, NULL, &empty, memory.inverse));
    assert_same_float(read_float(context, memory.inverse), 1.0f / scale);
    assert_same_float(record_of(scaling, 0).scale, scale);
    // Wrong arguments change nothing.
    const saved before = save_state(scaling);
    fp8core_tensor wrong = test_matrix(memory.codes, FP8CORE_E5M2, M, N);
    const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
    assert_fails(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, NULL, &wrong, NULL), invalid, "e5m2");
    wrong.dtype = FP8CORE_E4M3;
    wrong.shape[1] = N - 1;
    assert_fails(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, NULL, &wrong, NULL), invalid, "D is");
    assert_fails(fp8core_scaling_gemm(scaling, 1, &options, &memory.a, &memory.b, NULL, &d, NULL), invalid, "index");
    assert_fails(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, NULL, NULL, NULL), invalid, "d is");
    assert_fails(fp8core_scaling_gemm(NULL, 0, &options, &memory.a, &memory.b, NULL, &d, NULL), invalid, "scaling is");
    assert_fails(fp8core_scaling_gemm(scaling, 0, &options, &memory.a, &memory.b, NULL, &d,
                                      (float *)(void *)((char *)memory.inverse + 1)),
                 invalid, "scale_inverse");
    assert_null(wrong.scale);
    assert_unchanged(scaling, &before);
    free(before.bytes);
    fp8core_scaling_destroy(&other);
    fp8core_scaling_destroy(&scaling);
  }
  free_product_memory(&memory);
  fp8core_context_destroy(&context);
}

// A model's worth of tensors in one call, with the same result on any number of threads.
static void many_tensors(void **unused) {
  (void)unused;
  enum { TENSORS = 5000, HISTORY_LENGTH = 64 };
  static fp8core_dtype dtypes[TENSORS];
  static float amaxes[TENSORS];
  for (int i = 0; i < TENSORS; i++) dtypes[i] = all_dtypes[i % 5];
  saved states[3];
  const int threads[3] = {1, 2, 7};
  for (int t = 0; t < 3; t++) {
    fp8core_context *context = test_context(threads[t], FP8CORE_ISA_AUTO);
    const fp8core_scaling_options options = options_with(FP8CORE_SCALING_DELAYED, HISTORY_LENGTH);
    fp8core_scaling *scaling;
    assert_ok(fp8core_scaling_create(&scaling, context, TENSORS, dtypes, &options));
    fp8core_tensor first = test_matrix(NULL, dtypes[0], 0, 0);
    fp8core_tensor last = test_matrix(NULL, dtypes[TENSORS - 1], 0, 0);
    assert_ok(fp8core_scaling_bind(scaling, 0, &first));
    assert_ok(fp8core_scaling_bind(scaling, TENSORS - 1, &last));
    // One array, so that a caller can reduce all amaxes over ranks in one message.
    assert_true(last.amax - first.amax == TENSORS - 1);
    test_random random = {7};
    static float largest[TENSORS];
    memset(largest, 0, sizeof(largest));
    for (int step = 0; step < 20; step++) {
      for (int i = 0; i < TENSORS; i++) {
        amaxes[i] = (float)exp2(40.0 * (test_random_uniform(&random) - 0.5));
        largest[i] = fmaxf(largest[i], amaxes[i]);
      }
      assert_ok(fp8core_copy(context, first.amax, amaxes, sizeof(amaxes)));
      assert_ok(fp8core_scaling_update(scaling));
    }
    for (int i = 0; i < TENSORS; i += t == 0 ? 1 : 499) {
      const fp8core_scaling_record record = record_of(scaling, i);
      assert_same_float(record.scale, expected_scale(dtypes[i], largest[i], 0, 0, 1.0f));
      assert_same_float(record.amax, 0.0f);
      assert_int_equal(record.history_steps, 20);
    }
    states[t] = save_state(scaling);
    fp8core_scaling_destroy(&scaling);
    fp8core_context_destroy(&context);
  }
  for (int t = 1; t < 3; t++) {
    assert_int_equal(states[t].size, states[0].size);
    assert_memory_equal(states[t].bytes, states[0].bytes, states[0].size);
    free(states[t].bytes);
  }
  free(states[0].bytes);
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
  fp8core_scaling *scaling;
  const fp8core_scaling_options options = options_with(FP8CORE_SCALING_DELAYED, 7);
  void *source_data;
  void *data;
  float values[200];
  test_random random = {own->seed};
  own->failed = 1;
  context_options.device = test_device();
  context_options.threads = 1;
  TRY_WORKER(fp8core_context_create(&context, &context_options));
  TRY_WORKER(fp8core_scaling_create(&scaling, context, 5, all_dtypes, &options));
  TRY_WORKER(fp8core_alloc(context, sizeof(values), &source_data));
  TRY_WORKER(fp8core_alloc(context, sizeof(values), &data));
  const fp8core_tensor source = test_matrix(source_data, FP8CORE_FP32, 10, 20);
  for (int step = 0; step < 50; step++) {
    for (int index = 0; index < 5; index++) {
      for (int i = 0; i < 200; i++) values[i] = (float)test_random_normal(&random);
      fp8core_tensor destination = test_matrix(data, all_dtypes[index], 10, 20);
      TRY_WORKER(fp8core_copy(context, source_data, values, sizeof(values)));
      TRY_WORKER(fp8core_scaling_cast(scaling, index, NULL, &source, &destination, NULL));
    }
    TRY_WORKER(fp8core_scaling_update(scaling));
  }
  own->size = fp8core_scaling_saved_bytes(scaling);
  if (own->size > sizeof(own->bytes)) return NULL;
  TRY_WORKER(fp8core_scaling_save(scaling, own->bytes, own->size));
  TRY_WORKER(fp8core_free(context, source_data));
  TRY_WORKER(fp8core_free(context, data));
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
  own->failed = 0;
  return NULL;
}

// States of two contexts on two threads at once give what they give one after the other.
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

static void test_scale_stays_legal_whatever_comes_in(void **state) {
  (void)state;
  const float illegal[] = {0.0f, -1.0f, 0x1p-130f, 0x1p127f, INFINITY, -INFINITY, NAN};
  for (size_t i = 0; i < sizeof(illegal) / sizeof(illegal[0]); i++)
    assert_float_equal(fp8core_scale_from_amax(FP8CORE_E4M3, 0.0f, 0, 0, illegal[i]), 1.0f, 0.0f);
  assert_float_equal(fp8core_scale_from_amax(FP8CORE_E4M3, 448.0f, INT_MIN, 0, 1.0f), 0x1p64f, 0.0f);
  assert_float_equal(fp8core_scale_from_amax(FP8CORE_E4M3, 448.0f, INT_MAX, 0, 1.0f), 0x1p-64f, 0.0f);
}

// An amax that is negative, which only the caller can have written, is one of a tensor that was not used.
static void negative_amax_counts_as_zero(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  fp8core_scaling *scaling = new_state(context, FP8CORE_E4M3, NULL);
  fp8core_tensor bound = test_matrix(NULL, FP8CORE_E4M3, 0, 0);
  assert_ok(fp8core_scaling_bind(scaling, 0, &bound));
  const float negative[] = {-5.0f, -INFINITY, -0.0f};
  for (int i = 0; i < 3; i++) {
    fp8core_scaling_record record;
    assert_ok(fp8core_copy(context, bound.amax, &negative[i], sizeof(float)));
    assert_ok(fp8core_scaling_update(scaling));
    assert_ok(fp8core_scaling_get(scaling, 0, &record));
    assert_int_equal(record.nonfinite_steps, 0);
    assert_int_equal(record.history_steps, 0);
    assert_true(record.amax == 0.0f && record.scale == 1.0f);
  }
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

// The reciprocal that a cast gives out is written, so it must meet neither data nor the state.
static void reciprocal_that_aliases(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const fp8core_dtype dtypes[2] = {FP8CORE_E4M3, FP8CORE_E4M3};
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, 2, dtypes, NULL));
  float *data = test_alloc(context, 64 * sizeof(float));
  unsigned char *codes = test_alloc(context, 64);
  fp8core_cast_statistics *statistics = test_alloc(context, sizeof(*statistics));
  assert_ok(fp8core_zero(context, data, 64 * sizeof(float)));
  const fp8core_tensor source = test_matrix(data, FP8CORE_FP32, 8, 8);
  fp8core_tensor destination = test_matrix(codes, FP8CORE_E4M3, 8, 8);
  fp8core_tensor other = destination;
  assert_ok(fp8core_scaling_bind(scaling, 1, &other));
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = statistics;
  assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, (float *)(void *)codes),
               FP8CORE_ERROR_INVALID_ARGUMENT, "destination.scale_inverse overlaps destination,");
  assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, data + 5), FP8CORE_ERROR_INVALID_ARGUMENT,
               "scale_inverse overlaps source,");
  assert_fails(
    fp8core_scaling_cast(scaling, 0, &options, &source, &destination, (float *)(void *)&statistics->saturated),
    FP8CORE_ERROR_INVALID_ARGUMENT, "statistics overlaps destination.scale_inverse,");
  float *const of_state[] = {other.amax, (float *)(uintptr_t)other.scale, (float *)(uintptr_t)other.scale_inverse};
  for (int i = 0; i < 3; i++)
    assert_fails(fp8core_scaling_cast(scaling, 0, NULL, &source, &destination, of_state[i]),
                 FP8CORE_ERROR_INVALID_ARGUMENT, "overlaps");
  // Of products too.
  float *const product_inverses[] = {data + 5, (float *)(void *)codes, of_state[0]};
  for (int i = 0; i < 3; i++)
    assert_fails(fp8core_scaling_gemm(scaling, 0, NULL, &source, &source, NULL, &destination, product_inverses[i]),
                 FP8CORE_ERROR_INVALID_ARGUMENT, "overlaps");
  // A failed call binds nothing.
  assert_null(destination.scale);
  // Its own is what NULL gives.
  assert_ok(fp8core_scaling_cast(scaling, 1, NULL, &source, &destination, of_state[2]));
  test_free(context, data);
  test_free(context, codes);
  test_free(context, statistics);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(negative_amax_counts_as_zero),
    cmocka_unit_test(reciprocal_that_aliases),
    cmocka_unit_test(test_scale_stays_legal_whatever_comes_in),
    cmocka_unit_test(rule_known_values),
    cmocka_unit_test(rule_without_a_usable_amax),
    cmocka_unit_test(rule_at_the_edges),
    cmocka_unit_test(new_state_has_scale_one),
    cmocka_unit_test(just_in_time),
    cmocka_unit_test(delayed_takes_the_maximum),
    cmocka_unit_test(delayed_takes_the_most_recent),
    cmocka_unit_test(delayed_against_a_list),
    cmocka_unit_test(micro_batches),
    cmocka_unit_test(all_zero_tensors),
    cmocka_unit_test(infinities_and_nans),
    cmocka_unit_test(larger_than_the_history),
    cmocka_unit_test(extreme_values),
    cmocka_unit_test(zero_elements),
    cmocka_unit_test(bound_tensors_follow),
    cmocka_unit_test(cast_transpose),
    cmocka_unit_test(quantise_again_under_the_same_index),
    cmocka_unit_test(save_load_continue),
    cmocka_unit_test(save_any_amax),
    cmocka_unit_test(load_damaged_bytes),
    cmocka_unit_test(saved_checksum),
    cmocka_unit_test(load_wrong_fields),
    cmocka_unit_test(load_of_another_state),
    cmocka_unit_test(set_scale_limits),
    cmocka_unit_test(wrong_options),
    cmocka_unit_test(wrong_arguments_of_create),
    cmocka_unit_test(wrong_arguments_change_nothing),
    cmocka_unit_test(products_under_the_states_scale),
    cmocka_unit_test(products_at_the_edges),
    cmocka_unit_test(many_tensors),
    cmocka_unit_test(distinct_threads),
  };
  return cmocka_run_group_tests_name("scaling", tests, NULL, NULL);
}
