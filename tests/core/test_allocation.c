// Every host allocation of the library fails in turn: the call answers "out of memory", leaves nothing behind, and
// works when asked again. The library's objects are linked in with malloc() and its kin wrapped (ld --wrap).
#include <stdlib.h>
#include <string.h>

#include "support.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
int __real_posix_memalign(void **memory, size_t alignment, size_t bytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **memory, size_t alignment, size_t bytes);
void __wrap_free(void *memory);

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

void *__wrap_realloc(void *memory, size_t bytes) {
  if (fails()) return NULL;
  void *moved = __real_realloc(memory, bytes);
  live += !memory && moved;
  return moved;
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return fails() ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

int __wrap_posix_memalign(void **memory, size_t alignment, size_t bytes) {
  if (fails()) return 12;
  const int error = __real_posix_memalign(memory, alignment, bytes);
  live += error == 0;
  return error;
}

void __wrap_free(void *memory) {
  live -= memory != NULL;
  __real_free(memory);
}

typedef struct fixture {
  fp8core_context *context;
  fp8core_scaling *scaling;
  fp8core_scaling *just_in_time;
  unsigned char *saved;
  size_t saved_bytes;
  fp8core_tensor a;
  fp8core_tensor b;
  fp8core_tensor d;
} fixture;

static const fp8core_dtype dtypes[2] = {FP8CORE_E4M3, FP8CORE_E5M2};

// Each scenario runs one fallible call, and undoes it when it succeeds.
typedef fp8core_status (*scenario)(fixture *f);

static fp8core_status create_context(fixture *f) {
  (void)f;
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context = (fp8core_context *)(uintptr_t)8;
  options.device = test_device();
  options.workspace_bytes = 12345;
  const fp8core_status status = fp8core_context_create(&context, &options);
  if (status != FP8CORE_OK) assert_null(context);
  if (status == FP8CORE_OK) fp8core_context_destroy(&context);
  return status;
}

static fp8core_status allocate(fixture *f) {
  void *memory = f;
  const fp8core_status status = fp8core_alloc(f->context, 5000, &memory);
  if (status != FP8CORE_OK) assert_null(memory);
  if (status == FP8CORE_OK) assert_ok(fp8core_free(f->context, memory));
  return status;
}

static fp8core_status create_scaling(fixture *f) {
  fp8core_scaling *scaling = (fp8core_scaling *)(uintptr_t)8;
  const fp8core_status status = fp8core_scaling_create(&scaling, f->context, 2, dtypes, NULL);
  if (status != FP8CORE_OK) assert_null(scaling);
  if (status == FP8CORE_OK) fp8core_scaling_destroy(&scaling);
  return status;
}

static fp8core_status save_scaling(fixture *f) {
  unsigned char buffer[16384];
  assert_true(f->saved_bytes <= sizeof(buffer));
  memset(buffer, 0x5a, sizeof(buffer));
  const fp8core_status status = fp8core_scaling_save(f->scaling, buffer, f->saved_bytes);
  if (status != FP8CORE_OK)
    for (size_t i = 0; i < sizeof(buffer); i++) assert_int_equal(buffer[i], 0x5a);
  return status;
}

static fp8core_status load_scaling(fixture *f) {
  fp8core_scaling_record record;
  assert_ok(fp8core_scaling_set_scale(f->scaling, 0, 5.0f));
  const fp8core_status status = fp8core_scaling_load(f->scaling, f->saved, f->saved_bytes);
  const int was_armed = armed;
  armed = 0;
  assert_ok(fp8core_scaling_get(f->scaling, 0, &record));
  assert_true(record.scale == (status == FP8CORE_OK ? 3.0f : 5.0f));
  armed = was_armed;
  return status;
}

// In a context of its own, whose workspace has still to grow.
static fp8core_status multiply(fixture *f) {
  const int was_armed = armed;
  armed = 0;
  fp8core_context *context = test_context(2, FP8CORE_ISA_AUTO);
  armed = was_armed;
  const fp8core_status status = fp8core_gemm(context, NULL, &f->a, &f->b, NULL, &f->d);
  armed = 0;
  fp8core_context_destroy(&context);
  armed = was_armed;
  return status;
}

// With a context and a state of its own, neither of which has memory for the product yet.
static fp8core_status multiply_under_a_scale(fixture *f) {
  const int was_armed = armed;
  armed = 0;
  fp8core_context *context = test_context(2, FP8CORE_ISA_AUTO);
  fp8core_scaling *scaling;
  assert_ok(fp8core_scaling_create(&scaling, context, 2, dtypes, NULL));
  fp8core_tensor d = f->b;
  d.data = f->d.data;
  armed = was_armed;
  const fp8core_status status = fp8core_scaling_gemm(scaling, 0, NULL, &f->a, &f->b, NULL, &d, NULL);
  armed = 0;
  if (status != FP8CORE_OK) assert_null(d.scale);
  fp8core_scaling_destroy(&scaling);
  fp8core_context_destroy(&context);
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
      assert_string_not_equal(fp8core_last_error(), "untouched");
      assert_true(fail_from < 1000);
    }
    // The scenario has as many allocations as it is here for.
    assert_true(fail_from >= least);
  }
}

static void every_allocation_fails(void **state) {
  fixture *f = *state;
  // On CUDA the device's memory is not the host's: fewer of them are counted.
  const int host = !test_on_cuda();
  fail_in_turn(f, create_context, host ? 2 : 1);
  fail_in_turn(f, allocate, host ? 1 : 0);
  fail_in_turn(f, create_scaling, host ? 6 : 5);
  fail_in_turn(f, save_scaling, 1);
  fail_in_turn(f, load_scaling, 1);
  fail_in_turn(f, multiply, host ? 1 : 0);
  fail_in_turn(f, multiply_under_a_scale, host ? 2 : 0);
}

static void one_step(fixture *f) {
  fp8core_tensor quantised = f->b;
  assert_ok(fp8core_scaling_cast(f->scaling, 0, NULL, &f->d, &quantised, NULL));
  assert_ok(fp8core_gemm(f->context, NULL, &f->a, &quantised, NULL, &f->d));
  fp8core_tensor product = f->b;
  product.data = f->d.data;
  assert_ok(fp8core_scaling_gemm(f->just_in_time, 0, NULL, &f->a, &f->b, NULL, &product, NULL));
  assert_ok(fp8core_scaling_update(f->just_in_time));
  assert_ok(fp8core_scaling_update(f->scaling));
  assert_ok(fp8core_context_synchronize(f->context));
}

// A step allocates nothing: after the first one has grown the workspace, none more.
static void steps_allocate_nothing(void **state) {
  fixture *f = *state;
  one_step(f);
  calls = 0;
  fail_on = 1;
  fail_from = 0;
  armed = 1;
  one_step(f);
  one_step(f);
  armed = 0;
  assert_int_equal(calls, 0);
}

static int set_up(void **state) {
  static fixture f;
  float values[32 * 32];
  test_random random = {1};
  for (int i = 0; i < 32 * 32; i++) values[i] = (float)test_random_normal(&random);
  f.context = test_context_default();
  assert_ok(fp8core_scaling_create(&f.scaling, f.context, 2, dtypes, NULL));
  assert_ok(fp8core_scaling_set_scale(f.scaling, 0, 3.0f));
  fp8core_scaling_options options = fp8core_scaling_options_default();
  options.policy = FP8CORE_SCALING_JUST_IN_TIME;
  assert_ok(fp8core_scaling_create(&f.just_in_time, f.context, 2, dtypes, &options));
  f.saved_bytes = fp8core_scaling_saved_bytes(f.scaling);
  f.saved = malloc(f.saved_bytes);
  assert_non_null(f.saved);
  assert_ok(fp8core_scaling_save(f.scaling, f.saved, f.saved_bytes));
  f.a = test_matrix(test_upload(f.context, values, 32 * 32), FP8CORE_E4M3, 32, 32);
  f.b = test_matrix(test_upload(f.context, values, 32 * 32), FP8CORE_E4M3, 32, 32);
  f.d = test_matrix(test_upload(f.context, values, sizeof(values)), FP8CORE_FP32, 32, 32);
  *state = &f;
  return 0;
}

static int tear_down(void **state) {
  fixture *f = *state;
  test_free(f->context, f->a.data);
  test_free(f->context, f->b.data);
  test_free(f->context, f->d.data);
  free(f->saved);
  fp8core_scaling_destroy(&f->just_in_time);
  fp8core_scaling_destroy(&f->scaling);
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
