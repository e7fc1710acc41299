#include <float.h>
#include <math.h>
#include <string.h>

#include "fp8optim/schedule.h"
#include "support.h"

static fp8optim_schedule schedule_of(fp8optim_schedule_type type, double peak, double floor, int64_t warmup,
                                     int64_t total, int64_t decay) {
  fp8optim_schedule schedule = fp8optim_schedule_default();
  schedule.type = type;
  schedule.peak = peak;
  schedule.floor = floor;
  schedule.warmup_steps = warmup;
  schedule.total_steps = total;
  schedule.decay_steps = decay;
  return schedule;
}

static double rate(const fp8optim_schedule *schedule, int64_t step) {
  double learning_rate = -1.0;
  assert_ok(fp8optim_schedule_rate(schedule, step, &learning_rate));
  return learning_rate;
}

static void assert_rate(const fp8optim_schedule *schedule, int64_t step, double expected) {
  const double found = rate(schedule, step);
  if (fabs(found - expected) > 1e-14 * expected)
    fail_msg("type %d, step %lld: %.17g, expected %.17g", (int)schedule->type, (long long)step, found, expected);
}

// The joints, to the bit.
static void assert_exact(const fp8optim_schedule *schedule, int64_t step, double expected) {
  const double found = rate(schedule, step);
  if (found != expected)
    fail_msg("type %d, step %lld: %.17g, expected exactly %.17g", (int)schedule->type, (long long)step, found,
             expected);
}

static void constant(void **unused) {
  (void)unused;
  // total_steps and decay_steps do not matter, whatever they are.
  const fp8optim_schedule s = schedule_of(FP8OPTIM_SCHEDULE_CONSTANT, 6e-4, 1e-5, 4, INT64_MIN, INT64_MAX);
  assert_rate(&s, 0, 1.5e-4);
  assert_rate(&s, 1, 3e-4);
  assert_rate(&s, 2, 4.5e-4);
  assert_exact(&s, 3, 6e-4);
  assert_exact(&s, 4, 6e-4);
  assert_exact(&s, INT64_MAX, 6e-4);
  const fp8optim_schedule none = schedule_of(FP8OPTIM_SCHEDULE_CONSTANT, 6e-4, 0.0, 0, 0, 0);
  assert_exact(&none, 0, 6e-4);
}

static void linear(void **unused) {
  (void)unused;
  // Warm-up 0..3; then 6 steps down from 1.0 at step 3 to 0.1 at step 9: 0.15 a step.
  const fp8optim_schedule s = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, 1.0, 0.1, 4, 10, 0);
  const double expected[] = {0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1};
  for (int i = 0; i < 11; i++) assert_rate(&s, i, expected[i]);
  assert_exact(&s, 3, 1.0);
  assert_exact(&s, 9, 0.1);
  assert_exact(&s, 10, 0.1);
  assert_exact(&s, INT64_MAX, 0.1);
  // Without warm-up step 0 has the peak: 1.0, 0.75, 0.5, 0.25, 0.
  const fp8optim_schedule plain = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, 1.0, 0.0, 0, 5, 0);
  for (int i = 0; i < 6; i++) assert_rate(&plain, i, i < 4 ? 1.0 - 0.25 * i : 0.0);
  assert_exact(&plain, 0, 1.0);
}

static void cosine(void **unused) {
  (void)unused;
  // Warm-up 0..1; from the peak of 3 at step 1 to the floor of 1 at step 7: angles of 30 degrees.
  const fp8optim_schedule s = schedule_of(FP8OPTIM_SCHEDULE_COSINE, 3.0, 1.0, 2, 8, 0);
  const double expected[] = {1.5, 3.0, 2.0 + 0.86602540378443865, 2.5, 2.0, 1.5, 2.0 - 0.86602540378443865, 1.0, 1.0};
  for (int i = 0; i < 9; i++) assert_rate(&s, i, expected[i]);
  assert_exact(&s, 1, 3.0);
  assert_exact(&s, 7, 1.0);
  assert_exact(&s, INT64_MAX, 1.0);
  const fp8optim_schedule paper = fp8optim_schedule_default();
  assert_rate(&paper, 0, 6e-7);
  assert_exact(&paper, 999, 6e-4);
  assert_exact(&paper, 99999, 6e-5);
  // Half way between 999 and 99,999.
  assert_rate(&paper, 50499, 3.3e-4);
  const fp8optim_schedule plain = schedule_of(FP8OPTIM_SCHEDULE_COSINE, 3.0, 1.0, 0, 3, 0);
  assert_exact(&plain, 0, 3.0);
  assert_rate(&plain, 1, 2.0);
  assert_exact(&plain, 2, 1.0);
}

static void warmup_stable_decay(void **unused) {
  (void)unused;
  // Warm-up 0..1, stable 2..5, decay 6..9 from 1 to 0.2: 0.2 a step.
  const fp8optim_schedule s = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.2, 2, 10, 4);
  const double expected[] = {0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2};
  for (int i = 0; i < 11; i++) assert_rate(&s, i, expected[i]);
  for (int i = 1; i < 6; i++) assert_exact(&s, i, 1.0);
  assert_exact(&s, 9, 0.2);
  // No decay: the peak for ever. All decay: from the first step on.
  const fp8optim_schedule stable = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.2, 2, 10, 0);
  assert_exact(&stable, 9, 1.0);
  assert_exact(&stable, 1000, 1.0);
  const fp8optim_schedule falling = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.0, 0, 4, 4);
  for (int i = 0; i < 5; i++) assert_rate(&falling, i, i < 3 ? 0.75 - 0.25 * i : 0.0);
  // Decay straight after the warm-up.
  const fp8optim_schedule joined = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.0, 2, 6, 4);
  const double down[] = {0.5, 1.0, 0.75, 0.5, 0.25, 0.0};
  for (int i = 0; i < 6; i++) assert_rate(&joined, i, down[i]);
}

// Peaks and floors that binary fractions do not hold: the joints are theirs to the bit, nothing leaves their range, and
// no schedule rises after its warm-up.
static void joints_are_exact(void **unused) {
  (void)unused;
  test_random random = {3};
  for (int round = 0; round < 3000; round++) {
    const double peak = 1e-3 * test_random_uniform(&random);
    const double floor = peak * test_random_uniform(&random);
    const int64_t warmup = (int64_t)(test_random_bits(&random) % 9);
    const int64_t total = warmup + 2 + (int64_t)(test_random_bits(&random) % 40);
    const int64_t decay = 1 + (int64_t)(test_random_bits(&random) % (uint64_t)(total - warmup));
    for (int type = FP8OPTIM_SCHEDULE_LINEAR; type <= (int)FP8OPTIM_SCHEDULE_WSD; type++) {
      const fp8optim_schedule s = schedule_of((fp8optim_schedule_type)type, peak, floor, warmup, total, decay);
      if (warmup > 0)
        assert_exact(&s, warmup - 1, peak);
      else if (type != FP8OPTIM_SCHEDULE_WSD)
        assert_exact(&s, 0, peak);
      for (int64_t step = total - 1; step < total + 3; step++) assert_exact(&s, step, floor);
      for (int64_t step = warmup; step < total; step++) {
        const double now = rate(&s, step);
        if (!(now >= floor && now <= peak)) fail_msg("%.17g is outside %.17g to %.17g", now, floor, peak);
        if (step > 0 && step >= warmup + 1) assert_true(now <= rate(&s, step - 1));
      }
      for (int64_t step = 1; step < warmup; step++) assert_true(rate(&s, step) > rate(&s, step - 1) || peak == 0.0);
    }
  }
}

static void the_ends(void **unused) {
  (void)unused;
  const fp8optim_schedule warm = schedule_of(FP8OPTIM_SCHEDULE_COSINE, 1.0, 0.5, 4, 4, 0);
  // The run is its warm-up; the floor holds after it.
  assert_exact(&warm, 3, 1.0);
  assert_exact(&warm, 4, 0.5);
  const fp8optim_schedule one = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, 1.0, 0.5, 0, 1, 0);
  assert_exact(&one, 0, 1.0);
  assert_exact(&one, 1, 0.5);
  const fp8optim_schedule flat = schedule_of(FP8OPTIM_SCHEDULE_COSINE, 0.0, 0.0, 3, 9, 0);
  for (int i = 0; i < 12; i++) assert_exact(&flat, i, 0.0);
  const fp8optim_schedule same = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, 0.3, 0.3, 0, 7, 0);
  for (int i = 0; i < 9; i++) assert_exact(&same, i, 0.3);
  // As long as can be.
  const fp8optim_schedule longest = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, DBL_MAX, 0.0, 0, INT64_MAX, 0);
  assert_exact(&longest, 0, DBL_MAX);
  assert_exact(&longest, INT64_MAX - 1, 0.0);
  assert_exact(&longest, INT64_MAX, 0.0);
  const fp8optim_schedule slow = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.0, INT64_MAX, INT64_MAX, 0);
  assert_exact(&slow, INT64_MAX - 1, 1.0);
  assert_exact(&slow, INT64_MAX, 1.0);
  const fp8optim_schedule all_decay = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.0, 0, INT64_MAX, INT64_MAX);
  assert_exact(&all_decay, INT64_MAX - 1, 0.0);
  assert_exact(&all_decay, INT64_MAX, 0.0);
  // One step is both the first and the last.
  const fp8optim_schedule single = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, 1.0, 0.5, 0, 1, 0);
  assert_exact(&single, 0, 1.0);
  assert_exact(&single, 1, 0.5);
  const fp8optim_schedule all_warm = schedule_of(FP8OPTIM_SCHEDULE_COSINE, 1.0, 0.5, 4, 4, 0);
  assert_exact(&all_warm, 3, 1.0);
  assert_exact(&all_warm, 4, 0.5);
}

#define REFUSED(change, text)                                                                                          \
  do {                                                                                                                 \
    fp8optim_schedule s = schedule_of(FP8OPTIM_SCHEDULE_WSD, 1.0, 0.1, 2, 10, 4);                                      \
    double untouched = 42.0;                                                                                           \
    int64_t step = 5;                                                                                                  \
    (void)step;                                                                                                        \
    change;                                                                                                            \
    assert_fails(fp8optim_schedule_rate(&s, step, &untouched), FP8CORE_ERROR_INVALID_ARGUMENT, text);                  \
    assert_true(untouched == 42.0);                                                                                    \
  } while (0)

static void wrong_arguments(void **unused) {
  (void)unused;
  REFUSED(step = -1, "step is -1, expected at least 0");
  REFUSED(step = INT64_MIN, "step is -9223372036854775808");
  REFUSED(s.type = (fp8optim_schedule_type)4, "type is 4, expected an fp8optim_schedule_type, 0 to 3");
  REFUSED(s.type = (fp8optim_schedule_type)-1, "type is -1");
  REFUSED(s.peak = (double)NAN, "peak is nan, expected a finite number of at least 0");
  REFUSED(s.peak = (double)INFINITY, "peak is inf");
  REFUSED(s.peak = -1.0, "peak is -1");
  REFUSED(s.floor = (double)NAN, "floor is nan, expected 0 to the peak of 1");
  REFUSED(s.floor = -0.5, "floor is -0.5");
  REFUSED(s.floor = 1.5, "floor is 1.5, expected 0 to the peak of 1");
  REFUSED(s.warmup_steps = -1, "warmup_steps is -1, expected at least 0");
  REFUSED(s.warmup_steps = 11, "total_steps is 10, expected at least 1 and the 11 steps of the warm-up");
  REFUSED(s.total_steps = 1, "total_steps is 1");
  REFUSED((s.total_steps = 0, s.warmup_steps = 0), "total_steps is 0, expected at least 1");
  REFUSED(s.total_steps = INT64_MIN, "total_steps is -9223372036854775808");
  REFUSED(s.decay_steps = -1, "decay_steps is -1, expected 0 to the 8 steps after the warm-up");
  REFUSED(s.decay_steps = 9, "decay_steps is 9, expected 0 to the 8 steps");
  REFUSED(s.decay_steps = INT64_MAX, "decay_steps is 9223372036854775807");
  fp8optim_schedule s = fp8optim_schedule_default();
  double untouched = 42.0;
  assert_fails(fp8optim_schedule_rate(NULL, 0, &untouched), FP8CORE_ERROR_INVALID_ARGUMENT, "schedule is NULL");
  assert_fails(fp8optim_schedule_rate(&s, 0, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "learning_rate is NULL");
  s.size = 0;
  assert_fails(fp8optim_schedule_rate(&s, 0, &untouched), FP8CORE_ERROR_VERSION_MISMATCH, "size is 0, expected");
  s.size = sizeof(s) + 8;
  assert_fails(fp8optim_schedule_rate(&s, 0, &untouched), FP8CORE_ERROR_VERSION_MISMATCH, "expected");
  assert_true(untouched == 42.0);
  // decay_steps is for WSD only.
  fp8optim_schedule other = schedule_of(FP8OPTIM_SCHEDULE_LINEAR, 1.0, 0.1, 2, 10, -4);
  assert_rate(&other, 1, 1.0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(constant),         cmocka_unit_test(linear),
    cmocka_unit_test(cosine),           cmocka_unit_test(warmup_stable_decay),
    cmocka_unit_test(joints_are_exact), cmocka_unit_test(the_ends),
    cmocka_unit_test(wrong_arguments),
  };
  return cmocka_run_group_tests_name("schedule", tests, NULL, NULL);
}
