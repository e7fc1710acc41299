// The one allocation of a partition fails: the call answers "out of memory", writes nothing, leaves nothing behind and
// works when asked again. The library's objects are linked in with calloc() and free() wrapped (ld --wrap).
#include <stdlib.h>

#include "fp8zero/partition.h"
#include "support.h"

void *__real_calloc(size_t count, size_t bytes);
void __real_free(void *memory);
void *__wrap_calloc(size_t count, size_t bytes);
void __wrap_free(void *memory);

static int failing;
static long calls;
static long live;

void *__wrap_calloc(size_t count, size_t bytes) {
  calls++;
  void *memory = failing ? NULL : __real_calloc(count, bytes);
  live += memory != NULL;
  return memory;
}

void __wrap_free(void *memory) {
  live -= memory != NULL;
  __real_free(memory);
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

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(out_of_memory),
    cmocka_unit_test(calls_that_need_none),
  };
  return cmocka_run_group_tests_name("zero allocation", tests, NULL, NULL);
}
