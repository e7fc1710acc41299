/** \file
 * Figures of fp8lm ablate allreduce: what each reducer did to the blocks of a model, as tables, as JSON and as a page.
 */
#ifndef FP8LM_ABLATE_RESULTS_H
#define FP8LM_ABLATE_RESULTS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "fp8core/status.h"

/** Algorithms (native, two-shot), each with its scalings (auto, pre, post): reducer = algorithm * scalings + scaling.
 */
enum { FP8LM_ABLATE_ALGORITHMS = 2, FP8LM_ABLATE_SCALINGS = 3, FP8LM_ABLATE_REDUCERS = 6 };

/** Figures of a group of tensors over the measured steps. Shares are from 0; NaN: there was nothing to count. */
typedef struct fp8lm_ablate_figures {
  /** Sum of the squares of the mean in FP64 over that of the difference; infinite where there is none. */
  double snr;
  /** Of the casts of all ranks: values that were not 0 and became it. */
  double underflow;
  /** Values that saturated when they were cast, or whose addition did, of the values of all ranks. */
  double overflow;
  /** Of the elements of the mean: those that are 0 though the mean in FP64 is not; those of native sums at the
   * largest magnitude of the format. */
  double lost;
  double at_maximum;
} fp8lm_ablate_figures;

/** A block, or several, or what is outside of them. */
typedef struct fp8lm_ablate_group {
  char name[32];
  int64_t tensors;
  int64_t elements;
  fp8lm_ablate_figures figures[FP8LM_ABLATE_REDUCERS];
  /** Of auto-scaling, by algorithm: the median over the group's tensors in the last step. */
  double mu[FP8LM_ABLATE_ALGORITHMS];
} fp8lm_ablate_group;

/** One reduced step of auto-scaling, over all tensors. */
typedef struct fp8lm_ablate_step {
  int64_t step;
  double mu_least;
  double mu_median;
  double mu_most;
  double overflow;
} fp8lm_ablate_step;

typedef struct fp8lm_ablate_results {
  /** The blocks in their order, then all blocks, the other tensors, and all tensors. */
  size_t blocks;
  fp8lm_ablate_group *groups;
  /** [algorithms, step_count]. */
  fp8lm_ablate_step *steps;
  size_t step_count;
  int64_t measured_steps;
  /** Tensors with an infinity or a NaN in a measured step, which are left out. */
  int64_t nonfinite;
} fp8lm_ablate_results;

/** Groups of the results. */
static inline size_t fp8lm_ablate_group_count(const fp8lm_ablate_results *results) { return results->blocks + 3; }

/** "native", "auto", "native auto" and so on. */
const char *fp8lm_ablate_algorithm(int algorithm);
const char *fp8lm_ablate_scaling(int scaling);
const char *fp8lm_ablate_reducer(int reducer);

/** 10 log10 of it. */
double fp8lm_ablate_decibels(double snr);

/** Prints a table for each algorithm. */
void fp8lm_ablate_print(FILE *stream, const fp8lm_ablate_results *results);

/** What the page tells beside the figures. */
typedef struct fp8lm_ablate_page {
  const char *title;
  /** A sentence of the run, and its options as JSON. */
  const char *summary;
  const char *options;
} fp8lm_ablate_page;

/** Writes the page: one HTML file that needs nothing else; the same results give the same bytes. \return
 * FP8CORE_ERROR_OUT_OF_MEMORY; errors of \p stream are its owner's to find. */
fp8core_status fp8lm_ablate_write_page(FILE *stream, const fp8lm_ablate_results *results,
                                       const fp8lm_ablate_page *page);

#endif
