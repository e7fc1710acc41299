// Every allocation of a plan fails in turn: the call answers "out of memory", writes nothing, leaves nothing behind and
// works when asked again. The files that plan are linked in with calloc() and free() wrapped (ld --wrap).
#include <stdlib.h>

#include "fp8zero/plan.h"
#include "support.h"

void *__real_calloc(size_t count, size_t bytes);
void __real_free(void *memory);
void *__wrap_calloc(size_t count, size_t bytes);
void __wrap_free(void *memory);

// Calls that succeed before one that fails; negative: none does.
static long successes = -1;
static long live;

void *__wrap_calloc(size_t count, size_t bytes) {
  const int fails = successes >= 0 && successes-- == 0;
  void *memory = fails ? NULL : __real_calloc(count, bytes);
  live += memory != NULL;
  return memory;
}

void __wrap_free(void *memory) {
  live -= memory != NULL;
  __real_free(memory);
}

static void each_fails(void **unused) {
  (void)unused;
  const fp8zero_plan_model model = fp8zero_plan_model_default();
  fp8zero_plan_options options = fp8zero_plan_options_default();
  options.pipeline_parallel = 3;
  options.data_parallel = 4;
  options.zero_stage = 1;
  for (int i = 0; i < 2; i++) {
    options.distribution = i ? FP8ZERO_ELEMENTS : FP8ZERO_WHOLE_TENSORS;
    const long before = live;
    fp8zero_plan_result plan = {.parameters = 42};
    long failures = 0;
    for (;; failures++) {
      successes = failures;
      const fp8core_status status = fp8zero_plan(&model, &options, &plan);
      const int none_failed = successes >= 0;
      successes = -1;
      assert_int_equal(live, before);
      if (none_failed) {
        assert_ok(status);
        break;
      }
      assert_fails(status, FP8CORE_ERROR_OUT_OF_MEMORY, "no memory to");
      assert_int_equal(plan.parameters, 42);
    }
    // For each of three stages: four lists of tensors, the ranks, and the partition's own or its ranges.
    assert_int_equal(failures, 3 * 6);
    assert_int_not_equal(plan.parameters, 42);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(each_fails),
  };
  return cmocka_run_group_tests_name("plan allocation", tests, NULL, NULL);
}
