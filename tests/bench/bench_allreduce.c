// One rank of the gradient all-reduce, timed. Started once a rank, in the ways of libfp8comm/README.md, "Launching".
//
//   bench_allreduce ALGORITHM ELEMENTS ROUNDS [TENSORS [fp32|fp8 [amax|delayed]]]
//
// ALGORITHM: two-shot, native, bf16, fp32. Gradients are FP32, in TENSORS equal tensors (1), reduced in place, or into
// FP8; with "amax" their largest magnitudes are known beforehand, with "delayed" scales are those that the step before
// lets expect. Buffers are in pages of 4 KiB, as malloc() gives them, or, with BENCH_HUGE_PAGES in the environment, in
// pages of 2 MiB. Casts are part of the time. A round's time is that of the slowest rank; rank 0 prints "ALGORITHM
// ELEMENTS best MS median MS bytes BYTES check ERROR": milliseconds, what it sent in a round, and how far the first
// mean is off, as a share of the largest value.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fp8comm/fp8comm.h"
#include "fp8core/fp8core.h"

#define CHECK(call)                                                                                                    \
  do {                                                                                                                 \
    if ((call) != FP8CORE_OK) {                                                                                        \
      (void)fprintf(stderr, "bench_allreduce: %s\n", fp8core_last_error());                                            \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *allocate(size_t bytes) {
  const size_t huge = (size_t)2 << 20;
  void *memory = aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
  if (!memory) exit(1);
#if defined(MADV_HUGEPAGE)
  if (getenv("BENCH_HUGE_PAGES")) (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  memset(memory, 0, bytes);
  return memory;
}

static int by_value(const void *one, const void *other) {
  const double difference = *(const double *)one - *(const double *)other;
  return (difference > 0) - (difference < 0);
}

// From -1 to 1, another on every rank.
static float value_of(int64_t i, int rank) {
  const uint32_t mixed = ((uint32_t)i * UINT32_C(2654435761) ^ (uint32_t)rank * UINT32_C(40503)) * UINT32_C(2246822519);
  return (float)(mixed >> 8) * 0x1p-23f - 1.0f;
}

int main(int argc, char **argv) {
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  const int64_t elements = argc > 2 ? atoll(argv[2]) : 0, tensors = argc > 4 ? atoll(argv[4]) : 1;
  const int rounds = argc > 3 ? atoi(argv[3]) : 0;
  const int fp8 = argc > 5 && strcmp(argv[5], "fp8") == 0, known = argc > 6 && strcmp(argv[6], "amax") == 0;
  const int delayed = argc > 6 && strcmp(argv[6], "delayed") == 0;
  float one = 1;
  int algorithm = 0;
  while (argc > 1 && algorithm < 4 &&
         strcmp(argv[1], fp8comm_gradient_algorithm_name((fp8comm_gradient_algorithm)algorithm)) != 0)
    algorithm++;
  if (argc < 4 || algorithm == 4 || tensors < 1 || elements < tensors || rounds < 1) {
    (void)fprintf(
      stderr, "usage: bench_allreduce two-shot|native|bf16|fp32 ELEMENTS ROUNDS [TENSORS [fp32|fp8 [amax|delayed]]]\n");
    return 2;
  }
  fp8comm_communicator *communicator;
  fp8core_context *context;
  fp8comm_gradient_reducer *reducer;
  fp8comm_gradient_result result = {0, 0, 0};
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = 1;
  CHECK(fp8comm_communicator_create_from_environment(&communicator, NULL));
  CHECK(fp8core_context_create(&context, &context_options));
  const int rank = fp8comm_communicator_rank(communicator), ranks = fp8comm_communicator_size(communicator);
  float *values = allocate((size_t)elements * sizeof(float));
  unsigned char *codes = allocate((size_t)elements);
  int64_t *sizes = calloc((size_t)tensors, sizeof(*sizes));
  fp8core_tensor *inputs = calloc((size_t)tensors, sizeof(*inputs)),
                 *outputs = calloc((size_t)tensors, sizeof(*outputs));
  double *times = calloc((size_t)rounds, sizeof(*times));
  if (!sizes || !inputs || !outputs || !times) return 1;
  for (int64_t i = 0, before = 0; i < tensors; before += sizes[i++]) {
    sizes[i] = elements / tensors + (i < elements % tensors);
    inputs[i] = fp8core_tensor_create(values + before, FP8CORE_FP32, 1, &sizes[i]);
    outputs[i] = inputs[i];
    if (known) inputs[i].amax = &one;
    if (fp8) outputs[i] = fp8core_tensor_create(codes + before, options.wire_dtype, 1, &sizes[i]);
  }
  options.algorithm = (fp8comm_gradient_algorithm)algorithm;
  options.inputs_have_amax = known;
  options.delayed_scaling = delayed;
  CHECK(fp8comm_gradient_create(&reducer, communicator, context, tensors, sizes, &options));
  double error = 0;
  for (int round = -2; round < rounds; round++) {
    for (int64_t i = 0; i < elements; i++) values[i] = value_of(i, rank);
    CHECK(fp8comm_barrier(communicator));
    const double start = now();
    CHECK(fp8comm_gradient_all_reduce(reducer, inputs, outputs, &result));
    double taken = now() - start;
    CHECK(fp8comm_all_reduce(communicator, &taken, &taken, 1, FP8COMM_FP64, FP8COMM_MAX));
    if (round >= 0) times[round] = taken;
    for (int64_t i = 0; round == -2 && i < elements; i += elements / 1000 + 1) {
      double mean = 0;
      for (int other = 0; other < ranks; other++) mean += (double)value_of(i, other) / ranks;
      if (!fp8) error = fmax(error, fabs((double)values[i] - mean));
    }
  }
  qsort(times, (size_t)rounds, sizeof(*times), by_value);
  if (rank == 0)
    (void)printf("%s %" PRId64 " best %.3f median %.3f bytes %" PRIu64 " check %.5f\n", argv[1], elements,
                 1e3 * times[0], 1e3 * times[rounds / 2], result.bytes_sent, error);
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
  fp8comm_communicator_destroy(&communicator);
  free(times);
  free(outputs);
  free(inputs);
  free(sizes);
  free(codes);
  free(values);
  return 0;
}
