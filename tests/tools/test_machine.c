// What fp8lm knows of the machine: rates of its arithmetic, and shares of them.
#include <math.h>

#include "support.h"

#include "machine.h"

static void test_share_of_peak(void **state) {
  (void)state;
  double peak = 200.0;
  assert_true(fp8lm_share_of_peak(&peak, 50.0) == 0.25);
  assert_true(peak == 200.0);
  assert_true(fp8lm_share_of_peak(&peak, 200.0) == 1.0);
  // Measured while another program had the cores: what was reached is the peak from then on.
  assert_true(fp8lm_share_of_peak(&peak, 400.0) == 1.0);
  assert_true(peak == 400.0);
  assert_true(fp8lm_share_of_peak(&peak, 100.0) == 0.25);
  // Not known, and no step tells it.
  double none = 0.0;
  assert_true(isnan(fp8lm_share_of_peak(&none, 50.0)));
  assert_true(none == 0.0);
}

static void test_peak_rates(void **state) {
  (void)state;
  for (int i = 0; i < FP8LM_PEAK_COUNT; i++) {
    const double rate = fp8lm_peak_rate((fp8lm_peak)i, 1, 1e-3);
    if (fp8lm_peak_available((fp8lm_peak)i))
      assert_true(rate > 1e6 && isfinite(rate));
    else
      assert_true(rate == 0.0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_share_of_peak),
    cmocka_unit_test(test_peak_rates),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
