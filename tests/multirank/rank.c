// One rank of a test of whole communicators between processes.
//
//   rank TIMEOUT collectives             every kind of operation, at awkward sizes
//   rank TIMEOUT split                   sub-communicators
//   rank TIMEOUT transfer MEBIBYTES      all-reduces of that size, one after the other, until one fails
//   rank TIMEOUT reduce MEBIBYTES        gradients of that size in FP32, likewise
//   rank TIMEOUT ring MEBIBYTES          messages round a ring, likewise
//   rank TIMEOUT leave                   rank 1 leaves in order; the others go on without it, then call it
//   rank TIMEOUT disagree                rank 1 calls with another size
//   rank TIMEOUT again                   three communicators, one after the other
//
// SIGTERM interrupts its waiting. Prints "ok rank R of N"; "going R PID" when a transfer has gone through once; "error
// STATUS SECONDS MESSAGE", the seconds those of the call that failed, and exits with 3.
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fp8comm/fp8comm.h"
#include "fp8core/fp8core.h"

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double started;

static volatile sig_atomic_t told;

static void on_signal(int number) {
  (void)number;
  told = 1;
}

// As a program does that waits a little for what may still come.
static int is_told(void *user_data, double stalled_seconds) {
  (void)user_data;
  return told && stalled_seconds > 0.5;
}

static void fail(fp8core_status status) {
  (void)printf("error %d %.3f %s\n", (int)status, now() - started, fp8core_last_error());
  (void)fflush(stdout);
}

static void *allocate(size_t bytes) {
  void *const memory = malloc(bytes ? bytes : 1);
  if (!memory) exit(4);
  memset(memory, 0xee, bytes ? bytes : 1);
  return memory;
}

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      (void)printf("line %d does not hold: %s\n", __LINE__, #condition);                                               \
      (void)fflush(stdout);                                                                                            \
      exit(5);                                                                                                         \
    }                                                                                                                  \
  } while (0)

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

static uint8_t pattern(int rank, int64_t i) { return (uint8_t)(rank * 31 + i * 7 + (i >> 8)); }

static fp8core_status check_size(fp8comm_communicator *communicator, int64_t count) {
  const int rank = fp8comm_communicator_rank(communicator);
  const int size = fp8comm_communicator_size(communicator);
  float *const values = allocate((size_t)count * sizeof(*values));
  float *const sums = allocate((size_t)count * sizeof(*sums));
  for (int64_t i = 0; i < count; i++) values[i] = (float)(rank + 1) + (float)(i % 100);
  TRY(fp8comm_all_reduce(communicator, values, sums, count, FP8COMM_FP32, FP8COMM_SUM));
  for (int64_t i = 0; i < count; i++) CHECK(sums[i] == (float)(size * (size + 1) / 2 + size * (int)(i % 100)));

  // Of each rank's part of `count` elements, in the widths that have sums of their own.
  const int64_t whole = count * size;
  int64_t *const integers = allocate((size_t)whole * sizeof(*integers));
  int64_t *const own = allocate((size_t)count * sizeof(*own));
  for (int64_t i = 0; i < whole; i++) integers[i] = (i % 1000 - 500) * (rank + 1);
  TRY(fp8comm_reduce_scatter(communicator, integers, own, count, FP8COMM_INT64, FP8COMM_SUM));
  for (int64_t i = 0; i < count; i++) CHECK(own[i] == ((rank * count + i) % 1000 - 500) * (size * (size + 1) / 2));
  TRY(fp8comm_all_reduce(communicator, integers, integers, count, FP8COMM_INT64, FP8COMM_MAX));
  for (int64_t i = 0; i < count; i++) CHECK(integers[i] == (i % 1000 - 500) * (i % 1000 >= 500 ? size : 1));
  uint16_t *const halves = allocate((size_t)count * sizeof(*halves));
  for (int64_t i = 0; i < count; i++) halves[i] = (uint16_t)fp8core_encode(FP8CORE_BF16, (float)(i % 16 + rank), 1);
  TRY(fp8comm_all_reduce(communicator, halves, halves, count, FP8COMM_BF16, FP8COMM_SUM));
  for (int64_t i = 0; i < count; i++)
    CHECK(fp8core_decode(FP8CORE_BF16, halves[i]) == (float)(size * (i % 16) + size * (size - 1) / 2));
  TRY(fp8comm_all_reduce(communicator, halves, halves, count, FP8COMM_BF16, FP8COMM_MIN));
  double *const doubles = allocate((size_t)count * sizeof(*doubles));
  for (int64_t i = 0; i < count; i++) doubles[i] = (double)(i % 77) + 0.5 * rank;
  TRY(fp8comm_all_reduce(communicator, doubles, doubles, count, FP8COMM_FP64, FP8COMM_MIN));
  for (int64_t i = 0; i < count; i++) CHECK(doubles[i] == (double)(i % 77));
  // Ranks have as many elements as their number says, the first none.
  int64_t counts[64];
  int64_t begin = 0;
  CHECK(size <= 64);
  for (int r = 0; r < size; r++) counts[r] = r * count / size;
  int64_t total = 0;
  for (int r = 0; r < size; r++) total += counts[r];
  for (int r = 0; r < rank; r++) begin += counts[r];
  for (int64_t i = 0; i < counts[rank]; i++) own[i] = begin + i;
  TRY(fp8comm_all_gatherv(communicator, own, integers, counts, FP8COMM_INT64));
  for (int64_t i = 0; i < total; i++) CHECK(integers[i] == i);
  free(integers);
  free(own);
  free(halves);
  free(doubles);

  uint8_t *const part = allocate((size_t)count);
  uint8_t *const table = allocate((size_t)count * (size_t)size);
  for (int64_t i = 0; i < count; i++) part[i] = pattern(rank, i);
  TRY(fp8comm_all_gather(communicator, part, table, count, FP8COMM_BYTE));
  for (int r = 0; r < size; r++)
    for (int64_t i = 0; i < count; i++) CHECK(table[r * count + i] == pattern(r, i));

  uint8_t *const back = allocate((size_t)count * (size_t)size);
  for (int r = 0; r < size; r++)
    for (int64_t i = 0; i < count; i++) table[r * count + i] = pattern(rank * size + r, i);
  TRY(fp8comm_all_to_all(communicator, table, back, count, FP8COMM_BYTE));
  for (int r = 0; r < size; r++)
    for (int64_t i = 0; i < count; i++) CHECK(back[r * count + i] == pattern(r * size + rank, i));

  for (int root = 0; root < size; root++) {
    for (int64_t i = 0; i < count; i++) part[i] = pattern(rank == root ? root + 3 : -1, i);
    TRY(fp8comm_broadcast(communicator, part, count, FP8COMM_BYTE, root));
    for (int64_t i = 0; i < count; i++) CHECK(part[i] == pattern(root + 3, i));
  }

  if (size > 1) {
    fp8comm_request *sending;
    for (int64_t i = 0; i < count; i++) part[i] = pattern(rank, i);
    TRY(fp8comm_send_start(communicator, part, count, FP8COMM_BYTE, (rank + 1) % size, &sending));
    TRY(fp8comm_recv(communicator, back, count, FP8COMM_BYTE, (rank + size - 1) % size));
    TRY(fp8comm_request_wait(&sending));
    for (int64_t i = 0; i < count; i++) CHECK(back[i] == pattern((rank + size - 1) % size, i));
  }
  free(values);
  free(sums);
  free(part);
  free(table);
  free(back);
  return fp8comm_barrier(communicator);
}

static fp8core_status check_large(fp8comm_communicator *communicator) {
  const int rank = fp8comm_communicator_rank(communicator);
  const int size = fp8comm_communicator_size(communicator);
  const int64_t count = (INT64_C(8) << 20) + 13;
  float *const values = allocate((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; i++) values[i] = (float)(rank + i % 100);
  TRY(fp8comm_all_reduce(communicator, values, values, count, FP8COMM_FP32, FP8COMM_SUM));
  for (int64_t i = 0; i < count; i++) CHECK(values[i] == (float)(size * (size - 1) / 2 + size * (i % 100)));
  free(values);
  return FP8CORE_OK;
}

// Buckets of several pieces and small ones, three at a time, from the last to the first, with codes in messages and in
// place, in turns: the same bits.
static fp8core_status run_gradients(fp8comm_communicator *communicator) {
  enum { STEPS = 6, WAYS = 3, TENSORS = 7, ELEMENTS = 2200008 };
  static const int64_t counts[TENSORS] = {1500001, 5, 0, 300000, 70000, 200001, 130001};
  const int rank = fp8comm_communicator_rank(communicator);
  fp8comm_gradient_reducer *reducers[WAYS];
  float *const values = allocate(ELEMENTS * sizeof(*values));
  float *means[WAYS];
  fp8core_context *context;
  TRY(fp8core_context_create(&context, NULL));
  for (int way = 0; way < WAYS; way++) {
    fp8comm_gradient_options options = fp8comm_gradient_options_default();
    options.in_place = way > 0;
    options.delayed_scaling = 1;
    options.measure_snr = way == 2;
    options.bucket_bytes = 300000;
    options.buckets_in_flight = 3;
    TRY(fp8comm_gradient_create(&reducers[way], communicator, context, TENSORS, counts, &options));
    means[way] = allocate(ELEMENTS * sizeof(*values));
  }
  // What others contribute is not held twice, where the transport has memory that all read.
  const char *const transports = getenv("UCX_TLS");
  const size_t messages = fp8comm_gradient_memory_bytes(reducers[0]), own = fp8comm_gradient_memory_bytes(reducers[1]);
  if (fp8comm_communicator_size(communicator) == 1 || (transports && strncmp(transports, "tcp", 3) == 0))
    CHECK(own == messages);
  else
    CHECK(own < messages);
  for (int step = 0; step < STEPS; step++) {
    uint64_t sent[WAYS] = {0};
    for (int64_t i = 0; i < ELEMENTS; i++)
      values[i] = (float)((i * 7919 + rank * 31 + step) % 4001 - 2000) * (step == 3 ? 100.0f : 1.0f);
    for (int way = 0; way < WAYS; way++) {
      fp8comm_gradient_result result;
      fp8core_tensor in[TENSORS], out[TENSORS];
      for (int64_t i = 0, before = 0; i < TENSORS; before += counts[i++]) {
        in[i] = fp8core_tensor_create(values + before, FP8CORE_FP32, 1, &counts[i]);
        out[i] = fp8core_tensor_create(means[way] + before, FP8CORE_FP32, 1, &counts[i]);
      }
      const int64_t buckets = fp8comm_gradient_buckets(reducers[way]);
      CHECK(buckets >= 4);
      for (int64_t bucket = buckets - 1; bucket >= 0; bucket--) {
        TRY(fp8comm_gradient_start(reducers[way], bucket, in, out));
        if ((bucket + step + rank) % 2 == 0) TRY(fp8comm_gradient_progress(reducers[way], NULL));
        if ((bucket + step) % 3 == 0) TRY(fp8comm_gradient_wait_bucket(reducers[way], bucket));
      }
      TRY(fp8comm_gradient_wait(reducers[way], &result));
      CHECK(memcmp(means[way], means[0], ELEMENTS * sizeof(*values)) == 0);
      sent[way] = result.bytes_sent;
    }
    CHECK(sent[0] == sent[1]);
  }
  for (int way = 0; way < WAYS; way++) {
    fp8comm_gradient_destroy(&reducers[way]);
    free(means[way]);
  }
  free(values);
  fp8core_context_destroy(&context);
  return FP8CORE_OK;
}

static fp8core_status run_collectives(fp8comm_communicator *communicator) {
  static const int64_t counts[] = {0, 1, 3, 1000, 4097, 65536, 100003, 1500001};
  const uint64_t before = fp8comm_communicator_bytes_sent(communicator);
  for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) TRY(check_size(communicator, counts[i]));
  const uint64_t sent = fp8comm_communicator_bytes_sent(communicator) - before;
  // At least what an all-gather of the largest must send.
  if (fp8comm_communicator_size(communicator) == 1)
    CHECK(sent == 0);
  else
    CHECK(sent > 1500001);
  TRY(check_large(communicator));
  TRY(run_gradients(communicator));

  // Thousands of small ones, hundreds at once.
  enum { MANY = 300 };
  static float values[MANY][17];
  static fp8comm_request *requests[MANY];
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < MANY; i++) {
      for (int j = 0; j < 17; j++) values[i][j] = (float)(i + j + round);
      TRY(fp8comm_all_reduce_start(communicator, values[i], values[i], 17, FP8COMM_FP32, FP8COMM_SUM, &requests[i]));
    }
    for (int i = MANY - 1; i >= 0; i--) TRY(fp8comm_request_wait(&requests[i]));
    for (int i = 0; i < MANY; i++)
      for (int j = 0; j < 17; j++)
        CHECK(values[i][j] == (float)((i + j + round) * fp8comm_communicator_size(communicator)));
  }
  return FP8CORE_OK;
}

static fp8core_status run_split(fp8comm_communicator *communicator) {
  const int rank = fp8comm_communicator_rank(communicator);
  fp8comm_communicator *half;
  TRY(fp8comm_communicator_split(communicator, rank % 2, -rank, &half));
  int64_t value = rank;
  TRY(fp8comm_all_reduce(half, &value, &value, 1, FP8COMM_INT64, FP8COMM_SUM));
  int64_t expected = 0;
  for (int r = rank % 2; r < fp8comm_communicator_size(communicator); r += 2) expected += r;
  CHECK(value == expected);
  fp8comm_communicator_destroy(&half);
  return fp8comm_barrier(communicator);
}

static void say_going(fp8comm_communicator *communicator) {
  (void)printf("going %d %d\n", fp8comm_communicator_rank(communicator), (int)getpid());
  (void)fflush(stdout);
}

static fp8core_status run_transfer(fp8comm_communicator *communicator, int64_t mebibytes) {
  const int64_t count = mebibytes << 18;
  float *const values = allocate((size_t)count * sizeof(*values));
  for (int64_t i = 0; i < count; i++) values[i] = 0;
  for (int round = 0;; round++) {
    started = now();
    TRY(fp8comm_all_reduce(communicator, values, values, count, FP8COMM_FP32, FP8COMM_SUM));
    if (round == 0) say_going(communicator);
  }
}

// The same with gradients, which ranks of one machine read in place.
static fp8core_status run_reduce(fp8comm_communicator *communicator, int64_t mebibytes) {
  const int64_t count = mebibytes << 18;
  float *const values = allocate((size_t)count * sizeof(*values));
  fp8comm_gradient_reducer *reducer;
  fp8core_context *context;
  TRY(fp8core_context_create(&context, NULL));
  TRY(fp8comm_gradient_create(&reducer, communicator, context, 1, &count, NULL));
  for (int64_t i = 0; i < count; i++) values[i] = (float)(i % 100);
  for (int round = 0;; round++) {
    const fp8core_tensor in = fp8core_tensor_create(values, FP8CORE_FP32, 1, &count);
    fp8core_tensor out = in;
    started = now();
    const fp8core_status status = fp8comm_gradient_all_reduce(reducer, &in, &out, NULL);
    if (status != FP8CORE_OK) {
      fp8comm_gradient_destroy(&reducer);
      return status;
    }
    if (round == 0) say_going(communicator);
  }
}

static fp8core_status run_ring(fp8comm_communicator *communicator, int64_t mebibytes) {
  const int rank = fp8comm_communicator_rank(communicator);
  const int size = fp8comm_communicator_size(communicator);
  const int64_t count = mebibytes << 20;
  uint8_t *const out = allocate((size_t)count);
  uint8_t *const in = allocate((size_t)count);
  for (int round = 0;; round++) {
    fp8comm_request *sending;
    started = now();
    TRY(fp8comm_send_start(communicator, out, count, FP8COMM_BYTE, (rank + 1) % size, &sending));
    TRY(fp8comm_recv(communicator, in, count, FP8COMM_BYTE, (rank + size - 1) % size));
    TRY(fp8comm_request_wait(&sending));
    if (round == 0) say_going(communicator);
  }
}

static fp8core_status run_leave(fp8comm_communicator *communicator) {
  const int rank = fp8comm_communicator_rank(communicator);
  const int size = fp8comm_communicator_size(communicator);
  float value = 1;
  TRY(fp8comm_all_reduce(communicator, &value, &value, 1, FP8COMM_FP32, FP8COMM_SUM));
  fp8comm_communicator *rest;
  TRY(fp8comm_communicator_split(communicator, rank == 1 ? -1 : 0, 0, &rest));
  if (rank == 1) return FP8CORE_OK;
  fp8core_status status = FP8CORE_OK;
  for (int i = 0; i < 200 && status == FP8CORE_OK; i++) {
    float one = 1;
    status = fp8comm_all_reduce(rest, &one, &one, 1, FP8COMM_FP32, FP8COMM_SUM);
    CHECK(status != FP8CORE_OK || one == (float)(size - 1));
    if (i % 20 == 0) (void)usleep(10000);
  }
  fp8comm_communicator_destroy(&rest);
  TRY(status);
  started = now();
  return fp8comm_barrier(communicator);
}

static fp8core_status run_disagree(fp8comm_communicator *communicator) {
  static float values[1000];
  const int64_t count = fp8comm_communicator_rank(communicator) == 1 ? 999 : 1000;
  started = now();
  return fp8comm_all_reduce(communicator, values, values, count, FP8COMM_FP32, FP8COMM_SUM);
}

static fp8core_status run(fp8comm_communicator *communicator, const char *mode, int64_t mebibytes) {
  if (strcmp(mode, "split") == 0) return run_split(communicator);
  if (strcmp(mode, "transfer") == 0) return run_transfer(communicator, mebibytes);
  if (strcmp(mode, "reduce") == 0) return run_reduce(communicator, mebibytes);
  if (strcmp(mode, "ring") == 0) return run_ring(communicator, mebibytes);
  if (strcmp(mode, "leave") == 0) return run_leave(communicator);
  if (strcmp(mode, "disagree") == 0) return run_disagree(communicator);
  return run_collectives(communicator);
}

int main(int count, char **arguments) {
  if (count < 3) return 2;
  const char *const mode = arguments[2];
  (void)signal(SIGTERM, on_signal);
  const int64_t mebibytes = count > 3 ? strtol(arguments[3], NULL, 10) : 1;
  int rank = 0;
  int size = 0;
  for (int round = 0; round < (strcmp(mode, "again") == 0 ? 3 : 1); round++) {
    fp8comm_communicator_options options = fp8comm_communicator_options_default();
    options.timeout_seconds = strtod(arguments[1], NULL);
    options.interrupt = is_told;
    fp8comm_communicator *communicator;
    started = now();
    fp8core_status status = fp8comm_communicator_create_from_environment(&communicator, &options);
    if (status == FP8CORE_OK) status = run(communicator, mode, mebibytes);
    if (status != FP8CORE_OK) fail(status);
    rank = fp8comm_communicator_rank(communicator);
    size = fp8comm_communicator_size(communicator);
    const double destroying = now();
    fp8comm_communicator_destroy(&communicator);
    // Whoever is gone, destroying waits for no one.
    CHECK(now() - destroying < 4);
    if (status != FP8CORE_OK) return 3;
  }
  (void)printf("ok rank %d of %d\n", rank, size);
  return 0;
}
