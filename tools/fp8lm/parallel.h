/** \file
 * A loop whose turns run on several threads.
 */
#ifndef FP8LM_PARALLEL_H
#define FP8LM_PARALLEL_H

#include <stddef.h>

/** Most threads of fp8lm_parallel(). */
#define FP8LM_MAX_THREADS 1024

/**
 * Calls \p turn for every \p index below \p count, each once, in any order, on up to \p threads threads, this one
 * included; \p thread is from 0 to threads - 1. Where no thread can be started, those that are there do the work.
 */
void fp8lm_parallel(int threads, size_t count, void (*turn)(void *context, size_t index, int thread), void *context);

/** CPUs that this process may run on. */
int fp8lm_cpus(void);

#endif
