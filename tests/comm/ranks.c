#include "ranks.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct rank_job {
  fp8comm_communicator *communicator;
  rank_function function;
  void *data;
  pthread_t thread;
} rank_job;

static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;
static char failure[1024];

void rank_fails(fp8comm_communicator *communicator, const char *file, int line, const char *format, ...) {
  char text[800];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  (void)pthread_mutex_lock(&failure_lock);
  if (!failure[0])
    (void)snprintf(failure, sizeof(failure), "%s:%d: rank %d of %d: %s", file, line,
                   fp8comm_communicator_rank(communicator), fp8comm_communicator_size(communicator), text);
  (void)pthread_mutex_unlock(&failure_lock);
  (void)fp8comm_communicator_abort(communicator, "the test has failed");
}

static void *run(void *argument) {
  rank_job *job = argument;
  job->function(job->communicator, job->data);
  fp8comm_communicator_destroy(&job->communicator);
  return NULL;
}

void run_ranks(int count, double timeout_seconds, rank_function function, void *data) {
  fp8comm_communicator_options options = fp8comm_communicator_options_default();
  if (timeout_seconds > 0) options.timeout_seconds = timeout_seconds;
  run_ranks_with(count, &options, function, data);
}

void run_ranks_with(int count, const fp8comm_communicator_options *options, rank_function function, void *data) {
  rank_job *jobs = calloc((size_t)count, sizeof(*jobs));
  fp8comm_communicator **communicators = calloc((size_t)count, sizeof(*communicators));
  assert_non_null(jobs);
  assert_non_null(communicators);
  failure[0] = 0;
  assert_ok(fp8comm_threads_create(count, communicators, options));
  for (int i = 0; i < count; i++) {
    jobs[i].communicator = communicators[i];
    jobs[i].function = function;
    jobs[i].data = data;
    assert_int_equal(pthread_create(&jobs[i].thread, NULL, run, &jobs[i]), 0);
  }
  for (int i = 0; i < count; i++) (void)pthread_join(jobs[i].thread, NULL);
  free(communicators);
  free(jobs);
  if (failure[0]) fail_msg("%s", failure);
}
