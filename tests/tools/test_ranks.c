// What the ranks of a run find together. Ranks are threads here, more than there are cores, so that some lag behind.
#include <stdio.h>
#include <string.h>

#include "../comm/ranks.h"
#include "ranks.h"

enum { RANKS = 12, ROUNDS = 100 };

static fp8lm_ranks ranks_of(fp8comm_communicator *communicator) {
  fp8lm_ranks ranks;
  memset(&ranks, 0, sizeof(ranks));
  ranks.communicator = communicator;
  ranks.rank = fp8comm_communicator_rank(communicator);
  ranks.size = fp8comm_communicator_size(communicator);
  return ranks;
}

// A rank that knows leaves at once, and ends the communication as it does: the others must have learned of the error
// before, whichever rank is late.
static void leave(const fp8lm_ranks *ranks, const char *message) {
  (void)fp8lm_ranks_abort(ranks);
  rank_check(ranks->communicator, strcmp(fp8core_last_error(), message) == 0, "abort() made it \"%s\"",
             fp8core_last_error());
}

static void agree_on_failure(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const fp8lm_ranks ranks = ranks_of(communicator);
  const int own = ranks.rank == 3 || ranks.rank == 7;
  char message[100];
  (void)snprintf(message, sizeof(message), "disk %d is full", ranks.rank);
  const char *expected = own ? message : "rank 3 failed: disk 3 is full";
  rank_ok(communicator, fp8lm_ranks_agree(&ranks, FP8CORE_OK));
  const fp8core_status status =
    fp8lm_ranks_agree(&ranks, own ? fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "%s", message) : FP8CORE_OK);
  rank_check(communicator, status == (own ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_PEER), "%s: %s",
             fp8core_status_string(status), fp8core_last_error());
  rank_check(communicator, strcmp(fp8core_last_error(), expected) == 0, "\"%s\", expected \"%s\"", fp8core_last_error(),
             expected);
  leave(&ranks, expected);
}

static void compare_different(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const fp8lm_ranks ranks = ranks_of(communicator);
  const char *expected = "rank 5 has other files than rank 0, expected the same";
  const int same = 1;
  const int own = ranks.rank >= 5;
  rank_ok(communicator, fp8lm_ranks_compare(&ranks, &same, sizeof(same), "numbers"));
  const fp8core_status status = fp8lm_ranks_compare(&ranks, &own, sizeof(own), "files");
  rank_check(communicator, status == FP8CORE_ERROR_INVALID_ARGUMENT, "%s: %s", fp8core_status_string(status),
             fp8core_last_error());
  rank_check(communicator, strcmp(fp8core_last_error(), expected) == 0, "\"%s\", expected \"%s\"", fp8core_last_error(),
             expected);
  leave(&ranks, expected);
}

static void test_agree(void **state) {
  (void)state;
  for (int i = 0; i < ROUNDS; i++) run_ranks(RANKS, 0, agree_on_failure, NULL);
}

static void test_compare(void **state) {
  (void)state;
  for (int i = 0; i < ROUNDS; i++) run_ranks(RANKS, 0, compare_different, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_agree),
    cmocka_unit_test(test_compare),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
