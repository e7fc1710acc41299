#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

typedef struct loop {
  void (*turn)(void *context, size_t index, int thread);
  void *context;
  size_t count;
  atomic_size_t next;
} loop;

typedef struct worker {
  pthread_t handle;
  loop *work;
  int thread;
} worker;

static void *run(void *argument) {
  const worker *self = argument;
  loop *work = self->work;
  for (size_t index; (index = atomic_fetch_add(&work->next, 1)) < work->count;) {
    work->turn(work->context, index, self->thread);
  }
  return NULL;
}

void fp8lm_parallel(int threads, size_t count, void (*turn)(void *context, size_t index, int thread), void *context) {
  loop work = {turn, context, count, 0};
  worker workers[FP8LM_MAX_THREADS];
  if (threads > FP8LM_MAX_THREADS) threads = FP8LM_MAX_THREADS;
  if ((size_t)threads > count) threads = (int)count;
  int started = 1;
  for (; started < threads; started++) {
    workers[started].work = &work;
    workers[started].thread = started;
    if (pthread_create(&workers[started].handle, NULL, run, &workers[started]) != 0) break;
  }
  workers[0].work = &work;
  workers[0].thread = 0;
  (void)run(&workers[0]);
  for (int i = 1; i < started; i++) (void)pthread_join(workers[i].handle, NULL);
}

int fp8lm_cpus(void) {
  cpu_set_t set;
  const int count = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return count < 1 ? 1 : count > FP8LM_MAX_THREADS ? FP8LM_MAX_THREADS : count;
}
