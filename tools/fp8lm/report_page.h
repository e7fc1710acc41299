/** \file
 * The page that fp8lm report writes: runs beside each other, in one HTML file that needs nothing else.
 */
#ifndef FP8LM_REPORT_PAGE_H
#define FP8LM_REPORT_PAGE_H

#include <stdio.h>

#include "run_log.h"

/** One run of the page. */
typedef struct fp8lm_report_run {
  /** What the page calls it, and where it was read from; any bytes. */
  const char *name;
  const char *path;
  const fp8lm_run_log *log;
} fp8lm_report_run;

typedef struct fp8lm_report_options {
  const char *title;
  /** Time constant of the smoothing in steps; 0: no smoothing; negative: a hundredth of the steps. */
  int64_t smoothing;
  /** Tensors of a run of which the FP8 statistics are listed, those in the worst state first. */
  size_t most_tensors;
} fp8lm_report_options;

/**
 * Writes the page. Every string of the input is escaped; the same input gives the same bytes.
 * \param count at least 1.
 * \return FP8CORE_ERROR_OUT_OF_MEMORY; errors of \p stream are its owner's to find.
 */
fp8core_status fp8lm_report_write(FILE *stream, const fp8lm_report_run *runs, size_t count,
                                  const fp8lm_report_options *options);

#endif
