/** \file
 * What the files of `fp8lm plan` share.
 */
#ifndef FP8LM_PLAN_H
#define FP8LM_PLAN_H

#include <stdio.h>

#include "fp8zero/plan.h"

#define FP8LM_PLAN_PREFIX "fp8lm plan"

/** A plan and what it is a plan of. */
typedef struct fp8lm_planned {
  /** Of a preset, or "custom". */
  const char *name;
  fp8zero_plan_model model;
  fp8zero_plan_options options;
  fp8zero_plan_result result;
  /** The same with the other way of distributing, where ZeRO distributes. */
  fp8zero_plan_result other;
  /** The same in bf16. */
  fp8zero_plan_result baseline;
  /** Bytes; 0: not told. */
  double device_bytes;
  /** What was searched for, and found; NULL: nothing. */
  const char *search;
} fp8lm_planned;

/** Gradients and weights that a rank sends in a step, the mean over ranks. */
double fp8lm_plan_weight_related(const fp8zero_plan_result *result);

void fp8lm_plan_print(FILE *stream, const fp8lm_planned *plan);
void fp8lm_plan_print_json(FILE *stream, const fp8lm_planned *plan);

/** The systems of FP8-LM beside what was measured of them. \return an exit code, after a message if it isn't 0. */
int fp8lm_plan_paper(FILE *stream, int json);

#endif
