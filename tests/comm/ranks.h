// Ranks as threads of one process.
#ifndef FP8_TEST_RANKS_H
#define FP8_TEST_RANKS_H

#include "fp8comm/fp8comm.h"
#include "support.h"

// What a rank does; must not use cmocka's assertions, which belong to one thread. The communicator is destroyed after.
typedef void (*rank_function)(fp8comm_communicator *communicator, void *data);

// Runs the function on `count` ranks, with this timeout (0: 60 s), and fails the test where one of them has failed.
void run_ranks(int count, double timeout_seconds, rank_function function, void *data);
void run_ranks_with(int count, const fp8comm_communicator_options *options, rank_function function, void *data);

// Within a rank: notes the failure and goes on. At the first one the rank also aborts, so that the others do not wait.
void rank_fails(fp8comm_communicator *communicator, const char *file, int line, const char *format, ...)
  FP8CORE_PRINTF(4, 5);

#define rank_ok(communicator, call)                                                                                    \
  do {                                                                                                                 \
    const fp8core_status rank_status = (call);                                                                         \
    if (rank_status != FP8CORE_OK) {                                                                                   \
      rank_fails((communicator), __FILE__, __LINE__, "%s: %s", #call, fp8core_last_error());                           \
      return;                                                                                                          \
    }                                                                                                                  \
  } while (0)

#define rank_check(communicator, condition, ...)                                                                       \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      rank_fails((communicator), __FILE__, __LINE__, __VA_ARGS__);                                                     \
      return;                                                                                                          \
    }                                                                                                                  \
  } while (0)

// The call must fail with this status and a message that contains the text.
#define rank_refused(communicator, call, expected, text)                                                               \
  do {                                                                                                                 \
    const fp8core_status rank_status = (call);                                                                         \
    if (rank_status != (expected) || !strstr(fp8core_last_error(), (text))) {                                          \
      rank_fails((communicator), __FILE__, __LINE__, "%s: %s, \"%s\", expected %s and \"%s\"", #call,                  \
                 fp8core_status_string(rank_status), rank_status == FP8CORE_OK ? "" : fp8core_last_error(),            \
                 fp8core_status_string(expected), (text));                                                             \
      return;                                                                                                          \
    }                                                                                                                  \
  } while (0)

#endif
