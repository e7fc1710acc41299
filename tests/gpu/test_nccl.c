// How NCCL is loaded, which needs no GPU: what is not there or is not NCCL is named, and the real one is found from the
// build tree, by many threads at once.
#include <pthread.h>
#include <string.h>

#include "support.h"

#include "nccl/library.h"

static void missing_file_is_named(void **state) {
  (void)state;
  fp8comm_nccl_table table, before;
  memset(&table, 0, sizeof(table));
  before = table;
  assert_fails(fp8comm_nccl_load_from(&table, "libfp8-nowhere.so.7"), FP8CORE_ERROR_NOT_SUPPORTED,
               "NCCL (libfp8-nowhere.so.7) cannot be loaded: ");
  // The loader's own words.
  test_assert_message_contains("fp8comm_nccl_load_from", "No such file");
  assert_memory_equal(&table, &before, sizeof(table));
}

static void missing_symbol_is_named(void **state) {
  (void)state;
  fp8comm_nccl_table table, before;
  memset(&table, 0, sizeof(table));
  before = table;
  assert_fails(fp8comm_nccl_load_from(&table, "libc.so.6"), FP8CORE_ERROR_NOT_SUPPORTED,
               "NCCL (libc.so.6) lacks ncclAllGather: ");
  assert_memory_equal(&table, &before, sizeof(table));
}

static void *load(void *status) {
  *(fp8core_status *)status = fp8comm_nccl_load();
  return NULL;
}

static void threads_load_it_once(void **state) {
  (void)state;
#if !defined(FP8_TEST_HAVE_NCCL)
  skip();
#endif
  enum { THREADS = 4 };
  pthread_t threads[THREADS];
  fp8core_status statuses[THREADS];
  int version = 0;
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, load, &statuses[i]), 0);
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_ok(fp8comm_nccl_load());
  for (int i = 0; i < THREADS; i++) assert_int_equal(statuses[i], FP8CORE_OK);
  // Needs no GPU either.
  assert_int_equal(fp8comm_nccl_library.ncclGetVersion(&version), ncclSuccess);
  assert_int_equal(version / 10000, NCCL_MAJOR);
  ncclUniqueId id;
  assert_int_equal(fp8comm_nccl_library.ncclGetUniqueId(&id), ncclSuccess);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(missing_file_is_named),
    cmocka_unit_test(missing_symbol_is_named),
    cmocka_unit_test(threads_load_it_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
