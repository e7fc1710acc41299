/** \file
 * Learning rates over the steps of a run.
 */
#ifndef FP8OPTIM_SCHEDULE_H
#define FP8OPTIM_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8optim_schedule_type {
  /** The peak after the warm-up. */
  FP8OPTIM_SCHEDULE_CONSTANT = 0,
  /** Falls in a straight line from the peak to the floor. */
  FP8OPTIM_SCHEDULE_LINEAR = 1,
  /** Falls along half a cosine (Loshchilov and Hutter, "SGDR", 2017, equation 5, one cycle). */
  FP8OPTIM_SCHEDULE_COSINE = 2,
  /** Warm-up, stable, decay: the peak until the last decay_steps, then a straight line to the floor. */
  FP8OPTIM_SCHEDULE_WSD = 3
} fp8optim_schedule_type;

typedef struct fp8optim_schedule {
  /** sizeof(fp8optim_schedule) as the caller was compiled. */
  size_t size;
  fp8optim_schedule_type type;
  /** Learning rate after the warm-up, and the one that the decay ends at: finite, 0 <= floor <= peak. */
  double peak;
  double floor;
  /** Steps of linear warm-up from 0: step 0 has peak / warmup_steps. */
  int64_t warmup_steps;
  /** Steps of the run, warm-up included; the floor holds after them. Not used by the constant schedule. */
  int64_t total_steps;
  /** WSD: steps of the decay. */
  int64_t decay_steps;
} fp8optim_schedule;

/** Cosine from 6e-4 to a tenth of it over 100,000 steps, of which 1000 warm up (FP8-LM, section 3.1). */
static inline fp8optim_schedule fp8optim_schedule_default(void) {
  fp8optim_schedule schedule;
  schedule.size = sizeof(schedule);
  schedule.type = FP8OPTIM_SCHEDULE_COSINE;
  schedule.peak = 6e-4;
  schedule.floor = 6e-5;
  schedule.warmup_steps = 1000;
  schedule.total_steps = 100000;
  schedule.decay_steps = 0;
  return schedule;
}

/**
 * The learning rate of \p step, counted from 0. The warm-up's last step, and every step before the decay, has the
 * peak; from step total_steps - 1 on it is the floor. The peak comes first where both are one step: a run that is all
 * warm-up, and a linear or cosine one of a single step, has the peak in its last step and the floor after it. Constant
 * schedules, and WSD with decay_steps 0, keep the peak. Thread-safe.
 *
 * \param learning_rate receives the rate.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a negative step, rates that are not finite or out of order, steps that
 *         are negative or do not fit into total_steps, or an unknown type; the message names the value.
 */
FP8OPTIM_API fp8core_status fp8optim_schedule_rate(const fp8optim_schedule *schedule, int64_t step,
                                                   double *learning_rate);

#ifdef __cplusplus
}
#endif

#endif
