// Every host allocation of libfp8optim fails in turn: the call answers "out of memory", leaves nothing behind, and
// works when asked again. The library's objects are linked in with malloc() and its kin wrapped (ld --wrap); memory of
// states and tables comes from libfp8core, whose own allocations tests/core/test_allocation.c lets fail.
#include <stdlib.h>
#include <string.h>

#include "fp8optim/fp8optim.h"
#include "support.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void __real_free(void *memory);
fp8core_status __real_fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer);
fp8core_status __real_fp8core_free(fp8core_context *context, void *pointer);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void __wrap_free(void *memory);
fp8core_status __wrap_fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer);
fp8core_status __wrap_fp8core_free(fp8core_context *context, void *pointer);

// Counts only while armed. Allocation number `fail_from` and, if `fail_on`, all later ones fail; numbers start at 0.
static int armed;
static long calls;
static long fail_from;
static int fail_on;
static long failures;
static long live;

static int fails(void) {
  if (!armed) return 0;
  const long number = calls++;
  const int failing = fail_on ? number >= fail_from : number == fail_from;
  failures += failing;
  return failing;
}

static void *counted(void *memory) {
  live += memory != NULL;
  return memory;
}

void *__wrap_malloc(size_t bytes) { return fails() ? NULL : counted(__real_malloc(bytes)); }

void *__wrap_calloc(size_t count, size_t bytes) { return fails() ? NULL : counted(__real_calloc(count, bytes)); }

void __wrap_free(void *memory) {
  live -= memory != NULL;
  __real_free(memory);
}

fp8core_status __wrap_fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer) {
  *pointer = NULL;
  if (bytes == 0) return FP8CORE_OK;
  if (fails())
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of the device", bytes);
  const fp8core_status status = __real_fp8core_alloc(context, bytes, pointer);
  live += status == FP8CORE_OK;
  return status;
}

fp8core_status __wrap_fp8core_free(fp8core_context *context, void *pointer) {
  live -= pointer != NULL;
  return __real_fp8core_free(context, pointer);
}

typedef struct fixture {
  fp8core_context *context;
  fp8optim_adamw *adamw;
  fp8core_tensor gradients[2];
  unsigned char saved[16384];
  size_t saved_bytes;
} fixture;

static fp8core_status create(fixture *f, fp8optim_adamw **adamw) {
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter parameters[2] = {fp8optim_parameter_create("one", 20, 30), fp8optim_parameter_create("two", 1, 7)};
  parameters[0].with_weight = 1;
  return fp8optim_adamw_create(adamw, f->context, NULL, 2, parameters, 1, &group);
}

// Each scenario runs one fallible call, and undoes it when it succeeds.
typedef fp8core_status (*scenario)(fixture *f);

static fp8core_status create_optimizer(fixture *f) {
  fp8optim_adamw *adamw = (fp8optim_adamw *)(uintptr_t)8;
  const fp8core_status status = create(f, &adamw);
  if (status != FP8CORE_OK) assert_null(adamw);
  if (status == FP8CORE_OK) fp8optim_adamw_destroy(&adamw);
  return status;
}

static fp8core_status save(fixture *f) {
  static unsigned char buffer[sizeof(f->saved)];
  memset(buffer, 0x5a, sizeof(buffer));
  const fp8core_status status = fp8optim_adamw_save(f->adamw, buffer, f->saved_bytes);
  if (status == FP8CORE_OK) assert_memory_equal(buffer, f->saved, f->saved_bytes);
  if (status != FP8CORE_OK)
    for (size_t i = 0; i < sizeof(buffer); i++) assert_int_equal(buffer[i], 0x5a);
  return status;
}

// The state is another one, which stays as it is unless the load succeeds.
static fp8core_status load(fixture *f) {
  static unsigned char buffer[sizeof(f->saved)];
  const int was_armed = armed;
  armed = 0;
  assert_ok(fp8optim_adamw_set_steps(f->adamw, 1000));
  armed = was_armed;
  const fp8core_status status = fp8optim_adamw_load(f->adamw, f->saved, f->saved_bytes);
  armed = 0;
  assert_true(fp8optim_adamw_steps(f->adamw) == (status == FP8CORE_OK ? 3 : 1000));
  assert_ok(fp8optim_adamw_set_steps(f->adamw, 3));
  assert_ok(fp8optim_adamw_save(f->adamw, buffer, f->saved_bytes));
  assert_memory_equal(buffer, f->saved, f->saved_bytes);
  armed = was_armed;
  return status;
}

// The first step after a count of 0 was set looks at the moments, in an optimizer of its own.
static fp8core_status first_step(fixture *f) {
  const int was_armed = armed;
  fp8optim_adamw *adamw;
  armed = 0;
  assert_ok(create(f, &adamw));
  assert_ok(fp8optim_adamw_set_steps(adamw, 0));
  armed = was_armed;
  const fp8core_status status = fp8optim_adamw_step(adamw, f->gradients, NULL, NULL);
  armed = 0;
  assert_true(fp8optim_adamw_steps(adamw) == (status == FP8CORE_OK ? 1 : 0));
  fp8optim_adamw_destroy(&adamw);
  armed = was_armed;
  return status;
}

static void fail_in_turn(fixture *f, scenario run, int least) {
  for (fail_on = 0; fail_on < 2; fail_on++) {
    for (fail_from = 0;; fail_from++) {
      const long live_before = live;
      calls = failures = 0;
      (void)fp8core_set_last_error(FP8CORE_OK, "untouched");
      armed = 1;
      const fp8core_status status = run(f);
      armed = 0;
      assert_int_equal(live, live_before);
      if (failures == 0) {
        assert_ok(status);
        break;
      }
      assert_int_equal(status, FP8CORE_ERROR_OUT_OF_MEMORY);
      assert_true(fail_from < 1000);
    }
    // The scenario has as many allocations as it is here for.
    assert_true(fail_from >= least);
  }
}

static void every_allocation_fails(void **state) {
  fixture *f = *state;
  // Handle, names to compare, parameters, gradients, names, offsets, groups, states, tables and their image.
  fail_in_turn(f, create_optimizer, 10);
  fail_in_turn(f, save, 1);
  fail_in_turn(f, load, 1);
  fail_in_turn(f, first_step, 1);
}

// A step allocates nothing, the first neither; nor do the calls that go with it.
static void steps_allocate_nothing(void **state) {
  fixture *f = *state;
  fp8optim_adamw *adamw;
  fp8optim_step_report report;
  fp8optim_memory memory;
  fp8optim_group group;
  fp8core_tensor tensor;
  assert_ok(create(f, &adamw));
  calls = 0;
  fail_on = 1;
  fail_from = 0;
  armed = 1;
  for (int i = 0; i < 3; i++) assert_ok(fp8optim_adamw_step(adamw, f->gradients, NULL, &report));
  assert_ok(fp8optim_adamw_get_group(adamw, 0, &group));
  assert_ok(fp8optim_adamw_set_group(adamw, 0, &group));
  assert_ok(fp8optim_adamw_set_learning_rate(adamw, 1e-4));
  assert_ok(fp8optim_adamw_state(adamw, 0, FP8OPTIM_WEIGHT, &tensor));
  assert_ok(fp8optim_adamw_set_state(adamw, 0, FP8OPTIM_MASTER, &f->gradients[0]));
  assert_ok(fp8optim_adamw_memory(adamw, &memory));
  assert_true(fp8optim_adamw_steps(adamw) == 3);
  armed = 0;
  assert_int_equal(calls, 0);
  fp8optim_adamw_destroy(&adamw);
}

static int set_up(void **state) {
  static fixture f;
  static float values[600];
  test_random random = {1};
  for (int i = 0; i < 600; i++) values[i] = (float)test_random_normal(&random);
  f.context = test_context_default();
  assert_ok(create(&f, &f.adamw));
  f.gradients[0] = test_matrix(test_upload(f.context, values, sizeof(values)), FP8CORE_FP32, 20, 30);
  f.gradients[1] = test_matrix(f.gradients[0].data, FP8CORE_FP32, 1, 7);
  for (int i = 0; i < 3; i++) assert_ok(fp8optim_adamw_step(f.adamw, f.gradients, NULL, NULL));
  f.saved_bytes = fp8optim_adamw_saved_bytes(f.adamw);
  assert_true(f.saved_bytes <= sizeof(f.saved));
  assert_ok(fp8optim_adamw_save(f.adamw, f.saved, f.saved_bytes));
  *state = &f;
  return 0;
}

static int tear_down(void **state) {
  fixture *f = *state;
  test_free(f->context, f->gradients[0].data);
  fp8optim_adamw_destroy(&f->adamw);
  fp8core_context_destroy(&f->context);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_allocation_fails),
    cmocka_unit_test(steps_allocate_nothing),
  };
  return cmocka_run_group_tests_name("allocation", tests, set_up, tear_down);
}
