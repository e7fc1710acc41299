// Memory that runs out in the middle of a step: the rank says so, and the others do not wait for it. The library's
// objects are linked in with realloc() wrapped (ld --wrap), which is what schedules grow by.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fp8core/fp8core.h"
#include "ranks.h"

void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);

// Whether this thread's next call, and the ones after it, fail.
static _Thread_local int failing;

void *__wrap_realloc(void *memory, size_t bytes) { return failing ? NULL : __real_realloc(memory, bytes); }

static double seconds(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Several pieces, so that two tries need more steps than the first reduction of all.
enum { COUNT_OF = 1200000 };

// What was expected does not fit, so that the schedule of the bucket has to grow; on rank 0 it cannot.
static void check_second_try(fp8comm_communicator *communicator, void *data) {
  const int in_place = *(const int *)data, rank = fp8comm_communicator_rank(communicator);
  const int64_t count = COUNT_OF;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8core_context *context;
  fp8comm_gradient_result result;
  float *values = malloc(COUNT_OF * sizeof(*values));
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = 1;
  options.delayed_scaling = 1;
  options.in_place = in_place;
  rank_ok(communicator, fp8core_context_create(&context, &context_options));
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 1, &count, &options));
  fp8core_tensor gradient = fp8core_tensor_create(values, FP8CORE_FP32, 1, &count);
  for (int step = 0; step < 2; step++) {
    for (int i = 0; i < COUNT_OF; i++) values[i] = (float)(i % 7 + 1) * (step == 0 ? 1.0f : 100.0f);
    fp8core_tensor mean = gradient;
    if (step == 0) {
      rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, &gradient, &mean, NULL));
      continue;
    }
    const double start = seconds();
    if (rank == 0) {
      failing = 1;
      rank_refused(communicator, fp8comm_gradient_all_reduce(reducer, &gradient, &mean, &result),
                   FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate");
      failing = 0;
    } else {
      rank_refused(communicator, fp8comm_gradient_all_reduce(reducer, &gradient, &mean, &result),
                   FP8CORE_ERROR_OUT_OF_MEMORY, "rank 0");
    }
    rank_check(communicator, seconds() - start < 10, "it took %g s", seconds() - start);
    // And it stays so.
    rank_refused(communicator, fp8comm_gradient_wait(reducer, &result), FP8CORE_ERROR_OUT_OF_MEMORY, "allocate");
  }
  free(values);
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
}

static void second_try(void **unused) {
  (void)unused;
  for (int in_place = 0; in_place < 2; in_place++) run_ranks(3, 30, check_second_try, &in_place);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(second_try)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
