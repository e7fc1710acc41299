#include "fp8optim/schedule.h"

#include <math.h>

#define fp8optim_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

static fp8core_status check(const fp8optim_schedule *schedule, int64_t step, const double *learning_rate) {
  if (!schedule) return fp8optim_invalid("schedule is NULL, expected a schedule");
  if (schedule->size != sizeof(*schedule))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8optim_schedule.size is %zu, expected %zu",
                                  schedule->size, sizeof(*schedule));
  if (!learning_rate) return fp8optim_invalid("learning_rate is NULL, expected where to put the rate");
  if (step < 0) return fp8optim_invalid("step is %lld, expected at least 0", (long long)step);
  if ((unsigned)schedule->type > FP8OPTIM_SCHEDULE_WSD)
    return fp8optim_invalid("type is %d, expected an fp8optim_schedule_type, 0 to %d", (int)schedule->type,
                            (int)FP8OPTIM_SCHEDULE_WSD);
  if (!(isfinite(schedule->peak) && schedule->peak >= 0.0))
    return fp8optim_invalid("peak is %g, expected a finite number of at least 0", schedule->peak);
  if (!(schedule->floor >= 0.0 && schedule->floor <= schedule->peak))
    return fp8optim_invalid("floor is %g, expected 0 to the peak of %g", schedule->floor, schedule->peak);
  if (schedule->warmup_steps < 0)
    return fp8optim_invalid("warmup_steps is %lld, expected at least 0", (long long)schedule->warmup_steps);
  if (schedule->type == FP8OPTIM_SCHEDULE_CONSTANT) return FP8CORE_OK;
  if (schedule->total_steps < 1 || schedule->total_steps < schedule->warmup_steps)
    return fp8optim_invalid("total_steps is %lld, expected at least 1 and the %lld steps of the warm-up",
                            (long long)schedule->total_steps, (long long)schedule->warmup_steps);
  if (schedule->type == FP8OPTIM_SCHEDULE_WSD &&
      (schedule->decay_steps < 0 || schedule->decay_steps > schedule->total_steps - schedule->warmup_steps))
    return fp8optim_invalid("decay_steps is %lld, expected 0 to the %lld steps after the warm-up",
                            (long long)schedule->decay_steps,
                            (long long)(schedule->total_steps - schedule->warmup_steps));
  return FP8CORE_OK;
}

// From the peak (part 0) to the floor (part 1), both to the bit.
static double between(const fp8optim_schedule *schedule, double part) {
  const double rate = schedule->peak - (schedule->peak - schedule->floor) * part;
  return part >= 1.0 || rate < schedule->floor ? schedule->floor : rate;
}

fp8core_status fp8optim_schedule_rate(const fp8optim_schedule *schedule, int64_t step, double *learning_rate) {
  const fp8core_status status = check(schedule, step, learning_rate);
  if (status != FP8CORE_OK) return status;
  if (step < schedule->warmup_steps) {
    *learning_rate = schedule->peak * ((double)(step + 1) / (double)schedule->warmup_steps);
    return FP8CORE_OK;
  }
  // Its steps may be any number.
  if (schedule->type == FP8OPTIM_SCHEDULE_CONSTANT) {
    *learning_rate = schedule->peak;
    return FP8CORE_OK;
  }
  // The decay runs from the step after its start to the last step; the peak is what it starts from.
  const int64_t start = schedule->type == FP8OPTIM_SCHEDULE_WSD ? schedule->total_steps - schedule->decay_steps - 1
                        : schedule->warmup_steps > 0            ? schedule->warmup_steps - 1
                                                                : 0;
  const int64_t length = schedule->total_steps - 1 - start;
  double done = 0.0;
  // A step below the last one: its distance from a start of -1 does not overflow.
  if (step > start) done = step >= schedule->total_steps - 1 ? 1.0 : (double)(step - start) / (double)length;
  switch (schedule->type) {
  case FP8OPTIM_SCHEDULE_LINEAR: *learning_rate = between(schedule, done); break;
  case FP8OPTIM_SCHEDULE_COSINE:
    *learning_rate = between(schedule, 0.5 * (1.0 - cos(3.14159265358979323846 * done)));
    break;
  case FP8OPTIM_SCHEDULE_WSD:
    *learning_rate = schedule->decay_steps == 0 ? schedule->peak : between(schedule, done);
    break;
  case FP8OPTIM_SCHEDULE_CONSTANT: break;
  }
  return FP8CORE_OK;
}
