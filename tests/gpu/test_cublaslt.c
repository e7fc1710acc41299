// How cuBLASLt is loaded, which needs no GPU: what is not there or is not cuBLASLt is named, and the real one is found
// from the build tree, by many threads at once.
#include <pthread.h>
#include <string.h>

#include "support.h"

#include "cuda/cublaslt.h"

static void missing_file_is_named(void **state) {
  (void)state;
  fp8core_cublaslt_table table, before;
  memset(&table, 0, sizeof(table));
  before = table;
  assert_fails(fp8core_cublaslt_open(&table, "libfp8-nowhere.so.7"), FP8CORE_ERROR_NOT_SUPPORTED,
               "cuBLASLt (libfp8-nowhere.so.7) cannot be loaded: ");
  // The loader's own words.
  test_assert_message_contains("fp8core_cublaslt_open", "No such file");
  assert_memory_equal(&table, &before, sizeof(table));
}

static void missing_symbol_is_named(void **state) {
  (void)state;
  fp8core_cublaslt_table table, before;
  memset(&table, 0, sizeof(table));
  before = table;
  assert_fails(fp8core_cublaslt_open(&table, "libc.so.6"), FP8CORE_ERROR_NOT_SUPPORTED,
               "cuBLASLt (libc.so.6) lacks cublasLtCreate: ");
  test_assert_message_contains("fp8core_cublaslt_open", "undefined symbol");
  assert_memory_equal(&table, &before, sizeof(table));
}

static void *load(void *status) {
  *(fp8core_status *)status = fp8core_cublaslt_load();
  return NULL;
}

static void threads_load_it_once(void **state) {
  (void)state;
#if !defined(FP8_TEST_HAVE_CUBLASLT)
  skip();
#endif
  enum { THREADS = 4 };
  pthread_t threads[THREADS];
  fp8core_status statuses[THREADS];
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, load, &statuses[i]), 0);
  for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_ok(fp8core_cublaslt_load());
  for (int i = 0; i < THREADS; i++) assert_int_equal(statuses[i], FP8CORE_OK);
  assert_string_equal(fp8core_cublaslt.cublasLtGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED),
                      "CUBLAS_STATUS_NOT_SUPPORTED");
  // Every entry is filled in.
  void *const entries = &fp8core_cublaslt;
  void *none = NULL;
  for (size_t i = 0; i < sizeof(fp8core_cublaslt); i += sizeof(none))
    assert_memory_not_equal((char *)entries + i, &none, sizeof(none));
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(missing_file_is_named),
    cmocka_unit_test(missing_symbol_is_named),
    cmocka_unit_test(threads_load_it_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
