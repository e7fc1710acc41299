// Allocations fail: the call answers "out of memory", writes nothing, leaves nothing behind and works when asked again;
// and steps of a sharded optimizer allocate nothing. The library's objects are linked in with calloc(), free(),
// fp8core_alloc() and fp8core_free() wrapped (ld --wrap).
#include <stdlib.h>
#include <string.h>

#include "fp8zero/partition.h"
#include "fp8zero/sharded.h"
#include "support.h"

void *__real_calloc(size_t count, size_t bytes);
void __real_free(void *memory);
void *__wrap_calloc(size_t count, size_t bytes);
void __wrap_free(void *memory);

fp8core_status __real_fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer);
fp8core_status __real_fp8core_free(fp8core_context *context, void *pointer);
// Visible, as the linker takes the calls of shared libraries for theirs.
FP8ZERO_API fp8core_status __wrap_fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer);
FP8ZERO_API fp8core_status __wrap_fp8core_free(fp8core_context *context, void *pointer);

static int failing;
// Calls until the one that fails; below 0: none does.
static long until_failure = -1;
static long calls;
static long live;

void *__wrap_calloc(size_t count, size_t bytes) {
  calls++;
  void *memory = failing || until_failure-- == 0 ? NULL : __real_calloc(count, bytes);
  live += memory != NULL;
  return memory;
}

void __wrap_free(void *memory) {
  live -= memory != NULL;
  __real_free(memory);
}

fp8core_status __wrap_fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer) {
  calls++;
  *pointer = NULL;
  if (bytes == 0) return FP8CORE_OK;
  if (failing || until_failure-- == 0)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes", bytes);
  const fp8core_status status = __real_fp8core_alloc(context, bytes, pointer);
  live += *pointer != NULL;
  return status;
}

fp8core_status __wrap_fp8core_free(fp8core_context *context, void *pointer) {
  live -= pointer != NULL;
  return __real_fp8core_free(context, pointer);
}

static void out_of_memory(void **unused) {
  (void)unused;
  const int64_t sizes[3] = {5, 6, 7};
  int owners[3] = {42, 42, 42};
  int64_t loads[2] = {43, 43};
  const long before = live;
  calls = 0;
  failing = 1;
  const fp8core_status status = fp8zero_partition(3, sizes, 2, owners, loads);
  failing = 0;
  assert_fails(status, FP8CORE_ERROR_OUT_OF_MEMORY, "no memory to sort 3 tensors and 2 ranks, of 16 bytes each");
  assert_int_equal(calls, 1);
  for (int i = 0; i < 3; i++) assert_int_equal(owners[i], 42);
  for (int i = 0; i < 2; i++) assert_int_equal(loads[i], 43);
  assert_int_equal(live, before);
  assert_ok(fp8zero_partition(3, sizes, 2, owners, loads));
  assert_int_equal(loads[0], 7);
  assert_int_equal(loads[1], 11);
  assert_int_equal(live, before);
}

static void calls_that_need_none(void **unused) {
  (void)unused;
  const int64_t sizes[3] = {5, 6, 7};
  fp8zero_element_range ranges[2];
  fp8zero_balance balance;
  int64_t loads[2] = {43, 43};
  calls = 0;
  failing = 1;
  const fp8core_status none = fp8zero_partition(0, NULL, 2, NULL, loads);
  const fp8core_status elements = fp8zero_partition_elements(3, sizes, 2, ranges, NULL);
  const fp8core_status statistics = fp8zero_partition_balance(2, loads, &balance);
  failing = 0;
  assert_ok(none);
  assert_ok(elements);
  assert_ok(statistics);
  assert_int_equal(calls, 0);
}

enum { TENSORS = 3, ELEMENTS = 100 };

static fp8core_status create(fp8zero_sharded **sharded, fp8comm_communicator *communicator, fp8core_context *context,
                             int stage, int micro_batches) {
  static const char *const names[TENSORS] = {"a", "b", "c"};
  fp8zero_sharded_options options = fp8zero_sharded_options_default();
  const fp8optim_group group = fp8optim_group_default();
  fp8zero_parameter parameters[TENSORS];
  options.stage = stage;
  options.micro_batches = micro_batches;
  memset(parameters, 0, sizeof(parameters));
  for (int i = 0; i < TENSORS; i++) {
    parameters[i].name = names[i];
    parameters[i].dimensions = 1;
    parameters[i].shape[0] = ELEMENTS;
    parameters[i].weight_dtype = FP8CORE_E4M3;
    parameters[i].gradient_dtype = FP8CORE_FP32;
    parameters[i].part = i;
  }
  return fp8zero_sharded_create(sharded, communicator, context, &options, TENSORS, parameters, 1, &group);
}

static void sharded_allocations(void **unused) {
  (void)unused;
  fp8core_context *context = test_context(1, fp8core_isa_best());
  fp8comm_communicator *communicator;
  assert_ok(fp8comm_threads_create(1, &communicator, NULL));
  for (int stage = 0; stage <= 3; stage++) {
    for (int micro = 1; micro <= (stage >= 2 ? 2 : 1); micro++) {
      const long before = live;
      fp8zero_sharded *sharded = NULL;
      fp8core_status status = FP8CORE_ERROR_OUT_OF_MEMORY;
      long failures = 0;
      for (; status != FP8CORE_OK; failures++) {
        until_failure = failures;
        status = create(&sharded, communicator, context, stage, micro);
        until_failure = -1;
        if (status == FP8CORE_OK) break;
        assert_int_equal(status, FP8CORE_ERROR_OUT_OF_MEMORY);
        assert_null(sharded);
        assert_int_equal(live, before);
      }
      assert_true(failures > 15);
      // No step allocates.
      failing = 1;
      calls = 0;
      float values[ELEMENTS];
      const int64_t shape = ELEMENTS;
      for (int i = 0; i < ELEMENTS; i++) values[i] = (float)i;
      const fp8core_tensor gradient = fp8core_tensor_create(values, FP8CORE_FP32, 1, &shape);
      for (int step = 0; step < 2; step++) {
        for (int m = 0; m < micro; m++) {
          for (int part = 0; part < TENSORS; part++) {
            assert_ok(fp8zero_sharded_acquire(sharded, part, FP8ZERO_FORWARD));
            assert_ok(fp8zero_sharded_release(sharded, part, FP8ZERO_FORWARD));
          }
          for (int part = TENSORS - 1; part >= 0; part--) {
            assert_ok(fp8zero_sharded_acquire(sharded, part, FP8ZERO_BACKWARD));
            assert_ok(fp8zero_sharded_reduce(sharded, part, &gradient));
            assert_ok(fp8zero_sharded_release(sharded, part, FP8ZERO_BACKWARD));
          }
        }
        assert_ok(fp8zero_sharded_step(sharded, NULL, NULL));
      }
      failing = 0;
      assert_int_equal(calls, 0);
      fp8zero_sharded_destroy(&sharded);
      assert_int_equal(live, before);
    }
  }
  fp8comm_communicator_destroy(&communicator);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(out_of_memory),
    cmocka_unit_test(calls_that_need_none),
    cmocka_unit_test(sharded_allocations),
  };
  return cmocka_run_group_tests_name("zero allocation", tests, NULL, NULL);
}
