// Ranks that do not agree, do not come, give up or leave: everyone fails soon, with a message that names who and why.
#include "ranks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void sleep_for(double seconds) {
  const struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  (void)nanosleep(&time, NULL);
}

// --- Ranks that do not agree ---

typedef fp8core_status (*call_function)(fp8comm_communicator *communicator, float *in, float *out, int odd);

static fp8core_status other_count(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  return fp8comm_all_reduce(communicator, in, out, odd ? 100 : 101, FP8COMM_FP32, FP8COMM_SUM);
}
// On both sides of the change of algorithm.
static fp8core_status other_algorithm(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  return fp8comm_all_reduce(communicator, in, out, odd ? 100 : 200000, FP8COMM_FP32, FP8COMM_SUM);
}
static fp8core_status other_dtype(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  return fp8comm_all_reduce(communicator, in, out, odd ? 100 : 200, odd ? FP8COMM_FP32 : FP8COMM_BF16, FP8COMM_SUM);
}
static fp8core_status other_reduction(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  return fp8comm_all_reduce(communicator, in, out, 200000, FP8COMM_FP32, odd ? FP8COMM_MIN : FP8COMM_MAX);
}
static fp8core_status other_operation(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  return odd ? fp8comm_all_reduce(communicator, in, out, 10, FP8COMM_FP32, FP8COMM_SUM)
             : fp8comm_all_gather(communicator, in, out, 10, FP8COMM_FP32);
}
static fp8core_status other_root(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  (void)out;
  return fp8comm_broadcast(communicator, in, 1000, FP8COMM_FP32, odd ? 1 : 0);
}
static fp8core_status other_counts(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  int64_t counts[16] = {3, 5};
  counts[0] += odd;
  counts[1] -= odd;
  return fp8comm_all_gatherv(communicator, in, out, counts, FP8COMM_FP32);
}
static fp8core_status other_order(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  return odd ? fp8comm_barrier(communicator) : fp8comm_all_to_all(communicator, in, out, 10, FP8COMM_FP32);
}
static fp8core_status other_message(fp8comm_communicator *communicator, float *in, float *out, int odd) {
  const int rank = fp8comm_communicator_rank(communicator), size = fp8comm_communicator_size(communicator);
  (void)odd;
  if (rank == 0) return fp8comm_send(communicator, in, 20000, FP8COMM_FP32, size - 1);
  if (rank == size - 1) return fp8comm_recv(communicator, out, 20001, FP8COMM_FP32, 0);
  return fp8comm_recv(communicator, out, 1, FP8COMM_FP32, 0);
}

typedef struct disagreement {
  call_function call;
  // In the message, on every rank.
  const char *text;
} disagreement;

static void check_disagreement(fp8comm_communicator *communicator, void *data) {
  const disagreement *one = data;
  const int odd = fp8comm_communicator_rank(communicator) == fp8comm_communicator_size(communicator) - 1;
  float *in = calloc(200000, 4), *out = calloc(200000, 4);
  const double start = now();
  const fp8core_status status = one->call(communicator, in, out, odd);
  // Who needs nothing of a rank that does not agree may have done its part before others found out.
  const int needs_nothing = one->call == other_message || one->call == other_root || one->call == other_counts;
  if (needs_nothing && status == FP8CORE_OK) {
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_INVALID_ARGUMENT, one->text);
  } else {
    rank_refused(communicator, status, FP8CORE_ERROR_INVALID_ARGUMENT, one->text);
  }
  rank_check(communicator, strstr(fp8core_last_error(), "ranks do not agree: rank ") != NULL, "message \"%s\"",
             fp8core_last_error());
  rank_check(communicator, now() - start < 10, "it took %g s", now() - start);
  // And from then on.
  rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_INVALID_ARGUMENT, "ranks do not agree");
  free(in);
  free(out);
}

static void disagreements(void **unused) {
  (void)unused;
  disagreement cases[] = {
    {other_count, "all_reduce (sum) of 101 fp32"},  {other_algorithm, "all_reduce (sum) of 200000 fp32"},
    {other_dtype, "all_reduce (sum) of 200 bf16"},  {other_reduction, "all_reduce (min) of 200000 fp32"},
    {other_operation, "all_gather of 10 fp32"},     {other_root, "broadcast from root 1 of 1000 fp32"},
    {other_counts, "all_gatherv of 8 fp32 in all"}, {other_order, "barrier"},
    {other_message, "send of 20000 fp32"},
  };
  static const int rank_counts[] = {2, 3, 8, 11};
  for (size_t i = 0; i < COUNT(cases); i++) {
    for (size_t r = 0; r < COUNT(rank_counts); r++) run_ranks(rank_counts[r], 20, check_disagreement, &cases[i]);
  }
}

// --- Ranks that are not there ---

// So long that a rank that is there, on a machine with other work, answers in the last quarter of it.
#define MISSING_SECONDS 2.0

// Rank 2 sleeps through it, or the last of two.
static void check_missing(fp8comm_communicator *communicator, void *data) {
  const int large = *(const int *)data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const int missing = size > 2 ? 2 : 1;
  const int64_t count = large ? 150000 : 3;
  float *buffer = calloc((size_t)count, 4);
  char text[64];
  (void)snprintf(text, sizeof(text), "rank %d does not answer", missing);
  if (rank == missing) {
    sleep_for(5);
    rank_refused(communicator, fp8comm_all_reduce(communicator, buffer, buffer, count, FP8COMM_FP32, FP8COMM_SUM),
                 FP8CORE_ERROR_TIMEOUT, text);
  } else {
    const double start = now();
    rank_refused(communicator, fp8comm_all_reduce(communicator, buffer, buffer, count, FP8COMM_FP32, FP8COMM_SUM),
                 FP8CORE_ERROR_TIMEOUT, text);
    const double took = now() - start;
    // Others may have begun to wait before.
    const int first = strncmp(fp8core_last_error(), "no progress", 11) == 0;
    rank_check(communicator, (!first || took > MISSING_SECONDS - 0.01) && took < 4.9, "it took %g s", took);
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_TIMEOUT, text);
  }
  free(buffer);
}

// Rank 1 is there, but in another call.
static void check_elsewhere(fp8comm_communicator *communicator, void *data) {
  (void)data;
  float value = 0;
  if (fp8comm_communicator_rank(communicator) == 1) {
    (void)fp8comm_recv(communicator, &value, 1, FP8COMM_FP32, 0);
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_TIMEOUT, "answers, but has not taken part");
  } else {
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_TIMEOUT, "answers, but has not taken part");
  }
}

// A late rank is no failure, nor is time that passes between calls.
static void check_late(fp8comm_communicator *communicator, void *data) {
  (void)data;
  float value = 1;
  fp8comm_request *request;
  if (fp8comm_communicator_rank(communicator) == 0) sleep_for(0.3);
  rank_ok(communicator, fp8comm_all_reduce(communicator, &value, &value, 1, FP8COMM_FP32, FP8COMM_SUM));
  rank_ok(communicator, fp8comm_barrier_start(communicator, &request));
  sleep_for(3.5);
  rank_ok(communicator, fp8comm_request_wait(&request));
}

// Polling ends too.
static void check_polling(fp8comm_communicator *communicator, void *data) {
  (void)data;
  fp8comm_request *request;
  int done = 0;
  if (fp8comm_communicator_rank(communicator) == 1) {
    sleep_for(5);
    return;
  }
  rank_ok(communicator, fp8comm_barrier_start(communicator, &request));
  fp8core_status status = FP8CORE_OK;
  while (!done) {
    status = fp8comm_request_test(&request, &done);
    sleep_for(0.001);
  }
  rank_refused(communicator, status, FP8CORE_ERROR_TIMEOUT, "rank 1 does not answer");
  rank_check(communicator, request == NULL, "the request is still there");
}

static void missing(void **unused) {
  (void)unused;
  for (int large = 0; large < 2; large++) {
    run_ranks(2, MISSING_SECONDS, check_missing, &large);
    run_ranks(5, MISSING_SECONDS, check_missing, &large);
  }
  run_ranks(3, MISSING_SECONDS, check_elsewhere, NULL);
  run_ranks(3, 3, check_late, NULL);
  run_ranks(2, MISSING_SECONDS, check_polling, NULL);
}

// --- Ranks that give up or leave ---

static void check_abort(fp8comm_communicator *communicator, void *data) {
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  fp8comm_communicator *part;
  float *buffer = calloc(150000, 4);
  (void)data;
  rank_ok(communicator, fp8comm_communicator_split(communicator, rank % 2, 0, &part));
  // None is still in the split when the last one aborts.
  (void)fp8comm_barrier(communicator);
  if (rank == size - 1) {
    sleep_for(0.1);
    rank_ok(communicator, fp8comm_communicator_abort(communicator, "the disk is full"));
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_PEER, "abort: the disk is full");
  } else {
    const double start = now();
    char text[100];
    (void)snprintf(text, sizeof(text), "rank %d ended the communication: abort: the disk is full", size - 1);
    // Those in a part of their own learn of it too.
    fp8core_status status = FP8CORE_OK;
    while (status == FP8CORE_OK && now() - start < 10)
      status = rank % 2 ? fp8comm_all_reduce(part, buffer, buffer, 150000, FP8COMM_FP32, FP8COMM_SUM)
                        : fp8comm_all_reduce(communicator, buffer, buffer, 150000, FP8COMM_FP32, FP8COMM_SUM);
    rank_refused(communicator, status, FP8CORE_ERROR_PEER, text);
    rank_refused(communicator, fp8comm_barrier(part), FP8CORE_ERROR_PEER, "the disk is full");
    rank_check(communicator, now() - start < 15, "it took %g s", now() - start);
  }
  fp8comm_communicator_destroy(&part);
  free(buffer);
}

// The last rank leaves without a word.
static void check_leave(fp8comm_communicator *communicator, void *data) {
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const int64_t count = *(const int64_t *)data;
  float *buffer = calloc((size_t)count, 4);
  rank_ok(communicator, fp8comm_barrier(communicator));
  if (rank < size - 1) {
    const double start = now();
    char text[64];
    (void)snprintf(text, sizeof(text), "rank %d has left", size - 1);
    rank_refused(communicator, fp8comm_all_reduce(communicator, buffer, buffer, count, FP8COMM_FP32, FP8COMM_SUM),
                 FP8CORE_ERROR_PEER, text);
    rank_check(communicator, now() - start < 15, "it took %g s", now() - start);
  }
  free(buffer);
}

// A rank may leave as soon as its own calls are done.
static void check_early(fp8comm_communicator *communicator, void *data) {
  const int64_t count = *(const int64_t *)data;
  float *buffer = calloc((size_t)count, 4);
  rank_ok(communicator, fp8comm_all_reduce(communicator, buffer, buffer, count, FP8COMM_FP32, FP8COMM_SUM));
  rank_ok(communicator, fp8comm_broadcast(communicator, buffer, count, FP8COMM_FP32, 0));
  free(buffer);
}

static void leaving(void **unused) {
  (void)unused;
  static const int rank_counts[] = {2, 3, 8, 11};
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    if (rank_counts[r] > 2) run_ranks(rank_counts[r], 20, check_abort, NULL);
    for (int64_t count = 1; count < 1000000; count *= 500) {
      run_ranks(rank_counts[r], 20, check_leave, &count);
      for (int i = 0; i < 20; i++) run_ranks(rank_counts[r], 20, check_early, &count);
    }
  }
}

// --- Waiting that is told to end ---

typedef struct interruption {
  atomic_int told;
  // Of what the callback was told.
  atomic_int asked;
  atomic_int wrong;
  int polls;
  int large;
  // For how long a call that is told waits on.
  double patience;
} interruption;

static int on_wait(void *data, double stalled_seconds) {
  interruption *one = data;
  atomic_fetch_add(&one->asked, 1);
  if (!(stalled_seconds > 0 && stalled_seconds < 20)) atomic_store(&one->wrong, 1);
  // As a program that gives others a moment.
  return atomic_load(&one->told) && stalled_seconds > one->patience;
}

// The last rank does not come, as all others wait for it, in a part of their own or of all, until somebody tells them.
static void check_interrupt(fp8comm_communicator *communicator, void *data) {
  interruption *one = data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const int64_t count = one->large ? 150000 : 3;
  float *buffer = calloc((size_t)count, 4);
  fp8comm_communicator *part;
  // In the other order: messages name ranks by both numbers.
  rank_ok(communicator, fp8comm_communicator_split(communicator, 0, -rank, &part));
  if (rank == size - 1) {
    sleep_for(0.3);
    atomic_store(&one->told, 1);
    sleep_for(0.5);
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_INTERRUPTED,
                 "was interrupted as it waited");
  } else {
    const double start = now();
    fp8core_status status;
    if (one->polls) {
      fp8comm_request *request;
      int done = 0;
      rank_ok(communicator, fp8comm_all_reduce_start(part, buffer, buffer, count, FP8COMM_FP32, FP8COMM_SUM, &request));
      for (status = FP8CORE_OK; !done; sleep_for(0.001)) status = fp8comm_request_test(&request, &done);
    } else {
      status = fp8comm_all_reduce(part, buffer, buffer, count, FP8COMM_FP32, FP8COMM_SUM);
    }
    rank_refused(communicator, status, FP8CORE_ERROR_INTERRUPTED, " was interrupted as it waited for rank ");
    const char *found = strstr(fp8core_last_error(), " waited for rank ");
    int awaited = -1, before = -1;
    const int numbers = found ? sscanf(found, " waited for rank %d (%d before the split)", &awaited, &before) : 0;
    rank_check(communicator, numbers == 2 ? awaited + before == size - 1 : numbers == 1 && 2 * awaited == size - 1,
               "\"%s\"", fp8core_last_error());
    rank_refused(communicator, status, FP8CORE_ERROR_INTERRUPTED, one->large ? "of 150000 fp32" : "of 3 fp32");
    rank_check(communicator, atomic_load(&one->told) && now() - start < 8, "it took %g s", now() - start);
    rank_refused(communicator, fp8comm_barrier(communicator), FP8CORE_ERROR_INTERRUPTED,
                 "was interrupted as it waited");
  }
  fp8comm_communicator_destroy(&part);
  free(buffer);
}

// Whoever gets what it waits for is not interrupted, whatever the callback says to others.
static void check_quick(fp8comm_communicator *communicator, void *data) {
  (void)data;
  for (int i = 0; i < 100; i++) rank_ok(communicator, fp8comm_barrier(communicator));
}

static void interrupts(void **unused) {
  (void)unused;
  static const int rank_counts[] = {2, 3, 8};
  fp8comm_communicator_options options = fp8comm_communicator_options_default();
  options.timeout_seconds = 15;
  options.interrupt = on_wait;
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    for (int polls = 0; polls < 2; polls++) {
      for (int large = 0; large < 2; large++) {
        interruption one = {.polls = polls, .large = large, .patience = 0.2};
        options.interrupt_data = &one;
        run_ranks_with(rank_counts[r], &options, check_interrupt, &one);
        assert_true(atomic_load(&one.asked) > 1);
        assert_false(atomic_load(&one.wrong));
      }
    }
    interruption told = {.told = 1, .patience = 10};
    options.interrupt_data = &told;
    run_ranks_with(rank_counts[r], &options, check_quick, NULL);
  }
}

// --- Arguments ---

static void check_arguments(fp8comm_communicator *communicator, void *data) {
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  float in[8] = {0}, out[24] = {0};
  fp8comm_request *request;
  fp8comm_communicator *none;
  int done;
  (void)data;
#define REFUSED(call, text) rank_refused(communicator, call, invalid, text)
  REFUSED(fp8comm_all_reduce(NULL, in, out, 1, FP8COMM_FP32, FP8COMM_SUM), "communicator is NULL");
  REFUSED(fp8comm_all_reduce(communicator, NULL, out, 1, FP8COMM_FP32, FP8COMM_SUM),
          "send is NULL, expected 1 element");
  REFUSED(fp8comm_all_reduce(communicator, in, NULL, 1, FP8COMM_FP32, FP8COMM_SUM), "receive is NULL");
  REFUSED(fp8comm_all_reduce(communicator, in, out, -1, FP8COMM_FP32, FP8COMM_SUM), "count is -1");
  REFUSED(fp8comm_all_reduce(communicator, in, out, INT64_MAX, FP8COMM_FP32, FP8COMM_SUM),
          "count is 9223372036854775807");
  REFUSED(fp8comm_all_reduce(communicator, in, out, 1, (fp8comm_dtype)8, FP8COMM_SUM), "dtype is 8");
  REFUSED(fp8comm_all_reduce(communicator, in, out, 1, FP8COMM_FP32, (fp8comm_reduction)3), "reduction is 3");
  REFUSED(fp8comm_all_reduce(communicator, in, in + 1, 4, FP8COMM_FP32, FP8COMM_SUM), "send and receive overlap");
  rank_refused(communicator, fp8comm_all_reduce(communicator, in, out, 1, FP8COMM_BYTE, FP8COMM_SUM),
               FP8CORE_ERROR_NOT_SUPPORTED, "bytes have no sum");
  rank_refused(communicator, fp8comm_all_reduce(communicator, in, out, 1, FP8COMM_E4M3, FP8COMM_MAX),
               FP8CORE_ERROR_NOT_SUPPORTED, "e4m3 has no reduction");
  REFUSED(fp8comm_all_reduce_start(communicator, in, out, 1, FP8COMM_FP32, FP8COMM_SUM, NULL), "request is NULL");
  REFUSED(fp8comm_all_to_all(communicator, out, out, 1, FP8COMM_FP32), "send and receive overlap");
  REFUSED(fp8comm_all_gatherv(communicator, in, out, NULL, FP8COMM_FP32), "counts is NULL");
  REFUSED(fp8comm_broadcast(communicator, in, 1, FP8COMM_FP32, 3), "root is 3, expected a rank from 0 to 2");
  REFUSED(fp8comm_send(communicator, in, 1, FP8COMM_FP32, -1), "peer is -1");
  REFUSED(fp8comm_recv(communicator, in, 1, FP8COMM_FP32, fp8comm_communicator_rank(communicator)), "this rank");
  REFUSED(fp8comm_communicator_split(NULL, 0, 0, &none), "parent is NULL");
  REFUSED(fp8comm_communicator_set_timeout(communicator, 0), "timeout_seconds is 0");
  REFUSED(fp8comm_request_test(NULL, &done), "request of fp8comm_request_test() is NULL");
  request = NULL;
  rank_ok(communicator, fp8comm_request_wait(&request));
  rank_ok(communicator, fp8comm_request_test(&request, &done));
  rank_check(communicator, done == 1, "a cleared request is not done");
  // None of it has hurt.
  rank_ok(communicator, fp8comm_barrier(communicator));
}

static int never(void *user_data, const void *send, void *receive, size_t bytes) {
  (void)user_data, (void)send, (void)receive, (void)bytes;
  return 7;
}

// Hands out what rank 0 sent, as the others' too.
static int copies(void *user_data, const void *send, void *receive, size_t bytes) {
  for (int i = 0; i < *(int *)user_data; i++) memcpy((char *)receive + (size_t)i * bytes, send, bytes);
  return 0;
}

static void creation(void **unused) {
  (void)unused;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  fp8comm_communicator *made, *group[3];
  fp8comm_communicator_options options = fp8comm_communicator_options_default();
  int size = 3;
  run_ranks(3, 0, check_arguments, NULL);
  assert_fails(fp8comm_communicator_create(NULL, 0, 1, NULL, NULL, NULL), invalid, "communicator is NULL");
  assert_fails(fp8comm_communicator_create(&made, 0, 0, never, NULL, NULL), invalid, "size is 0");
  assert_fails(fp8comm_communicator_create(&made, 3, 3, never, NULL, NULL), invalid, "rank is 3, expected 0 to 2");
  assert_fails(fp8comm_communicator_create(&made, 0, 2, NULL, NULL, NULL), invalid, "all_gather is NULL");
  options.size = 3;
  assert_fails(fp8comm_communicator_create(&made, 0, 1, NULL, NULL, &options), FP8CORE_ERROR_VERSION_MISMATCH,
               "size 3");
  options = fp8comm_communicator_options_default();
  options.timeout_seconds = -1;
  assert_fails(fp8comm_threads_create(3, group, &options), invalid, "timeout_seconds is -1");
  options = fp8comm_communicator_options_default();
  options.transport = "nccl";
  assert_fails(fp8comm_communicator_create(&made, 0, 2, never, NULL, &options), invalid,
               "fp8comm_communicator_use_dev");
  options.transport = "carrier pigeons";
  assert_fails(fp8comm_communicator_create(&made, 0, 2, never, NULL, &options), invalid, "carrier pigeons");
  assert_fails(fp8comm_threads_create(3, group, &options), invalid, "carrier pigeons");
  assert_fails(fp8comm_threads_create(0, group, NULL), invalid, "count is 0");
  // Where a transport between processes is built in.
  options.transport = "ucx";
  const fp8core_status status = fp8comm_communicator_create(&made, 0, 3, never, NULL, &options);
  assert_null(made);
  if (status != FP8CORE_ERROR_NOT_SUPPORTED) {
    assert_int_equal(status, FP8CORE_ERROR_PEER);
    test_assert_message_contains("create", "all_gather returned 7");
    assert_fails(fp8comm_communicator_create(&made, 0, 3, copies, &size, &options), FP8CORE_ERROR_PEER,
                 "rank 0 of 3 in place 1");
  }
  // One rank needs nobody.
  float value = 3;
  assert_ok(fp8comm_communicator_create(&made, 0, 1, NULL, NULL, NULL));
  assert_string_equal(fp8comm_communicator_transport(made), "self");
  assert_ok(fp8comm_all_reduce(made, &value, &value, 1, FP8COMM_FP32, FP8COMM_SUM));
  assert_true(value == 3);
  assert_fails(fp8comm_send(made, &value, 1, FP8COMM_FP32, 0), invalid, "this rank");
  assert_int_equal(fp8comm_communicator_bytes_sent(made), 0);
  // Device memory wants a context of a device.
  fp8core_context *cpu;
  assert_ok(fp8core_context_create(&cpu, NULL));
  assert_fails(fp8comm_communicator_use_device(NULL, cpu, NULL), invalid, "communicator is NULL");
  assert_fails(fp8comm_communicator_use_device(made, NULL, NULL), invalid, "context is NULL");
  assert_fails(fp8comm_communicator_use_device(made, cpu, NULL), invalid, "context is of the CPU");
  assert_string_equal(fp8comm_communicator_device_path(made), "none");
  fp8core_context_destroy(&cpu);
  fp8comm_communicator_destroy(&made);
  assert_null(made);
  fp8comm_communicator_destroy(&made);
  fp8comm_communicator_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(creation), cmocka_unit_test(disagreements), cmocka_unit_test(missing),
    cmocka_unit_test(leaving),  cmocka_unit_test(interrupts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
