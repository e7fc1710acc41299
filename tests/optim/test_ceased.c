// Elements whose gradient is zero from step 100 on, beside others that keep the tensor's amaxes up, as the rows of an
// embedding whose token is not met: their first moment must go on falling with the second, or the weight drifts.
#include <math.h>
#include <string.h>

#include "rig.h"

#define ELEMENTS 64
#define CEASE 100
#define ROUND 1000

static void farthest_way(fp8optim_preset preset, fp8core_dtype exp_avg, double beta1, double beta2) {
  fp8core_context *context;
  assert_int_equal(fp8core_context_create(&context, NULL), FP8CORE_OK);
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  float weights[ELEMENTS] = {0.0f};
  float gradients[ELEMENTS];
  const fp8core_tensor gradient = fp8core_tensor_matrix(gradients, FP8CORE_FP32, 1, ELEMENTS, cpu);
  fp8optim_adamw_options options = fp8optim_adamw_options_of(preset);
  fp8optim_parameter parameter = fp8optim_parameter_create("x", 1, ELEMENTS);
  fp8optim_group group = fp8optim_group_default();
  fp8optim_adamw *adamw;
  options.exp_avg_dtype = exp_avg;
  parameter.with_weight = 1;
  parameter.weight_dtype = FP8CORE_FP32;
  parameter.weight = weights;
  group.beta1 = beta1;
  group.beta2 = beta2;
  group.weight_decay = 0.0;
  assert_int_equal(fp8optim_adamw_create(&adamw, context, &options, 1, &parameter, 1, &group), FP8CORE_OK);
  float before[ELEMENTS];
  for (int step = 0; step < 3 * ROUND; step++) {
    if (step == CEASE || step == ROUND || step == 2 * ROUND) memcpy(before, weights, sizeof(before));
    for (int i = 0; i < ELEMENTS; i++)
      gradients[i] = i >= ELEMENTS / 2 && step >= CEASE ? 0.0f : (i % 2 ? -1.0f : 1.0f) + 0.1f * (float)(step % 7);
    assert_int_equal(fp8optim_adamw_step(adamw, &gradient, NULL, NULL), FP8CORE_OK);
    if (step % ROUND != ROUND - 1) continue;
    double farthest = 0.0;
    for (int i = ELEMENTS / 2; i < ELEMENTS; i++)
      farthest = fmax(farthest, fabs((double)weights[i] - (double)before[i]) / group.learning_rate);
    // In FP32 12 and 37 (beta1 0.95) learning rates at first, and nothing after.
    if (farthest > (step < ROUND ? 60.0 : 0.0))
      fail_msg("%s, beta1 %g, beta2 %g: elements without gradient moved %g learning rates in the steps to %d",
               fp8core_dtype_name(exp_avg), beta1, beta2, farthest, step + 1);
  }
  fp8optim_adamw_destroy(&adamw);
  fp8core_context_destroy(&context);
}

static void test_ceased_gradients(void **state) {
  (void)state;
  farthest_way(FP8OPTIM_PRESET_FP32, FP8CORE_FP32, 0.9, 0.95);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0.9, 0.95);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0.9, 0.999);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0.95, 0.95);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_E5M2, 0.9, 0.95);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_E5M2, 0.95, 0.99);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_FP16, 0.9, 0.95);
  farthest_way(FP8OPTIM_PRESET_FP8, FP8CORE_BF16, 0.9, 0.95);
  farthest_way(FP8OPTIM_PRESET_FP8_EXP_AVG_SQ, FP8CORE_E4M3, 0.9, 0.95);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_ceased_gradients)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
