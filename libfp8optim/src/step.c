// Steps: whole, and in parts.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

int fp8optim_has_moments(const fp8optim_tensor *tensors, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (tensors[i].amax[FP8OPTIM_EXP_AVG] > 0.0f || tensors[i].amax[FP8OPTIM_EXP_AVG_SQ] > 0.0f) return 1;
  return 0;
}

// With a step count of 0: whether the moments are 0 too. They are looked at only where they may be something else.
static fp8core_status check_moments(fp8optim_adamw *adamw) {
  fp8optim_tensor *tensors;
  FP8OPTIM_TRY(fp8optim_copy_tensors(adamw, &tensors));
  adamw->moments_set = fp8optim_has_moments(tensors, adamw->tensor_count);
  free(tensors);
  if (!adamw->moments_set) return FP8CORE_OK;
  return fp8optim_invalid("moments were set while the step count is 0, expected fp8optim_adamw_set_steps() with the "
                          "steps that they have seen, at least 1");
}

// Skipped steps are counted in the host's bound, so it is looked up before it refuses.
static fp8core_status check_step_count(fp8optim_adamw *adamw) {
  fp8optim_progress progress;
  if (adamw->most_steps < FP8OPTIM_MAX_STEPS) return FP8CORE_OK;
  FP8OPTIM_TRY(fp8optim_read_progress(adamw, &progress));
  adamw->most_steps = progress.steps;
  if (progress.steps < FP8OPTIM_MAX_STEPS) return FP8CORE_OK;
  return fp8optim_invalid("the optimizer has taken %lld steps, expected at most 2^31 - 3 before another",
                          (long long)progress.steps);
}

static fp8core_status read_options(const fp8optim_step_options *options, fp8optim_step_options *chosen) {
  if (options && options->size != sizeof(*options))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8optim_step_options.size is %zu, expected %zu",
                                  options->size, sizeof(*options));
  if (options) *chosen = *options;
  if (!(isfinite(chosen->max_norm) && chosen->max_norm >= 0.0f))
    return fp8optim_invalid("max_norm is %g, expected a finite number of at least 0", (double)chosen->max_norm);
  if (!(isfinite(chosen->loss_scale) && chosen->loss_scale > 0.0f))
    return fp8optim_invalid("loss_scale is %g, expected a finite positive number", (double)chosen->loss_scale);
  return FP8CORE_OK;
}

static fp8core_status check_step(fp8optim_adamw *adamw, const fp8core_tensor *gradients) {
  if (!gradients) return fp8optim_invalid("gradients is NULL, expected %lld tensors", (long long)adamw->tensor_count);
  if (adamw->moments_set && !adamw->steps_known) FP8OPTIM_TRY(check_moments(adamw));
  FP8OPTIM_TRY(fp8optim_take_gradients(adamw, gradients));
  return check_step_count(adamw);
}

static void write_report(const fp8optim_progress *progress, fp8optim_step_report *report) {
  report->skipped = progress->skipped;
  report->gradient_norm = progress->gradient_norm;
  report->clip_factor = progress->clip_factor;
  report->steps = progress->steps;
  report->skipped_steps = progress->skipped_steps;
}

static fp8core_status read_report(const fp8optim_adamw *adamw, fp8optim_step_report *report) {
  fp8optim_progress progress;
  if (!report) return FP8CORE_OK;
  FP8OPTIM_TRY(fp8optim_read_progress(adamw, &progress));
  write_report(&progress, report);
  return FP8CORE_OK;
}

static fp8core_status check_handle(const fp8optim_adamw *adamw, const char *call) {
  if (adamw) return FP8CORE_OK;
  return fp8optim_invalid("adamw of %s() is NULL, expected an optimizer", call);
}

fp8core_status fp8optim_check_not_begun(const fp8optim_adamw *adamw, const char *call) {
  if (adamw->phase != FP8OPTIM_BEGUN) return FP8CORE_OK;
  return fp8optim_invalid("%s() within a step that has begun, expected fp8optim_adamw_step_end() before it", call);
}

fp8core_status fp8optim_check_idle(fp8optim_adamw *adamw, const char *call) {
  FP8OPTIM_TRY(fp8optim_check_not_begun(adamw, call));
  adamw->phase = FP8OPTIM_IDLE;
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_step(fp8optim_adamw *adamw, const fp8core_tensor *gradients,
                                   const fp8optim_step_options *options, fp8optim_step_report *report) {
  fp8optim_step_options chosen = fp8optim_step_options_default();
  FP8OPTIM_TRY(check_handle(adamw, "fp8optim_adamw_step"));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_step"));
  FP8OPTIM_TRY(read_options(options, &chosen));
  FP8OPTIM_TRY(check_step(adamw, gradients));
  FP8OPTIM_TRY(adamw->backend->step(adamw, chosen.max_norm, chosen.loss_scale));
  adamw->most_steps++;
  adamw->steps_known = 1;
  return read_report(adamw, report);
}

fp8core_status fp8optim_adamw_step_measure(fp8optim_adamw *adamw, const fp8core_tensor *gradients, double *squares,
                                           int *nonfinite) {
  FP8OPTIM_TRY(check_handle(adamw, "fp8optim_adamw_step_measure"));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_step_measure"));
  if (!nonfinite)
    return fp8optim_invalid("nonfinite of fp8optim_adamw_step_measure() is NULL, expected where to put it");
  FP8OPTIM_TRY(check_step(adamw, gradients));
  FP8OPTIM_TRY(adamw->backend->measure(adamw, squares, nonfinite));
  adamw->phase = FP8OPTIM_MEASURED;
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_step_begin(fp8optim_adamw *adamw, double sum_of_squares, int nonfinite,
                                         const fp8optim_step_options *options, fp8optim_step_report *report) {
  fp8optim_step_options chosen = fp8optim_step_options_default();
  fp8optim_progress progress;
  FP8OPTIM_TRY(check_handle(adamw, "fp8optim_adamw_step_begin"));
  if (adamw->phase != FP8OPTIM_MEASURED)
    return fp8optim_invalid("fp8optim_adamw_step_begin() %s, expected fp8optim_adamw_step_measure() right before it",
                            adamw->phase == FP8OPTIM_BEGUN ? "within a step that has begun" : "of nothing measured");
  FP8OPTIM_TRY(read_options(options, &chosen));
  if (sum_of_squares < 0.0 || (isnan(sum_of_squares) && !nonfinite))
    return fp8optim_invalid("sum_of_squares is %g, expected a number of at least 0", sum_of_squares);
  FP8OPTIM_TRY(adamw->backend->begin(adamw, sum_of_squares, nonfinite != 0, chosen.max_norm, chosen.loss_scale));
  FP8OPTIM_TRY(fp8optim_read_progress(adamw, &progress));
  adamw->most_steps++;
  adamw->steps_known = 1;
  adamw->phase = FP8OPTIM_BEGUN;
  adamw->skipped = progress.skipped;
  adamw->updated_count = 0;
  memset(adamw->updated, 0, (size_t)adamw->tensor_count * sizeof(*adamw->updated));
  if (report) write_report(&progress, report);
  return FP8CORE_OK;
}

static fp8core_status check_begun(const fp8optim_adamw *adamw, const char *call) {
  FP8OPTIM_TRY(check_handle(adamw, call));
  if (adamw->phase == FP8OPTIM_BEGUN) return FP8CORE_OK;
  return fp8optim_invalid("%s() outside of a step, expected fp8optim_adamw_step_begin() before it", call);
}

fp8core_status fp8optim_adamw_step_update(fp8optim_adamw *adamw, int64_t first, int64_t count) {
  FP8OPTIM_TRY(check_begun(adamw, "fp8optim_adamw_step_update"));
  if (first < 0 || first > adamw->tensor_count)
    return fp8optim_invalid("first is %lld, expected 0 to %lld", (long long)first, (long long)adamw->tensor_count);
  if (count < 0 || count > adamw->tensor_count - first)
    return fp8optim_invalid("count is %lld, expected 0 to %lld from tensor %lld on", (long long)count,
                            (long long)(adamw->tensor_count - first), (long long)first);
  for (int64_t i = first; i < first + count; i++)
    if (adamw->updated[i])
      return fp8optim_invalid("parameter \"%s\" was updated in this step already, expected one that was not",
                              adamw->parameters[i].name);
  if (!adamw->skipped && count > 0) FP8OPTIM_TRY(adamw->backend->update(adamw, first, count));
  memset(adamw->updated + first, 1, (size_t)count * sizeof(*adamw->updated));
  adamw->updated_count += count;
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_step_end(fp8optim_adamw *adamw, fp8optim_step_report *report) {
  FP8OPTIM_TRY(check_begun(adamw, "fp8optim_adamw_step_end"));
  if (!adamw->skipped && adamw->updated_count < adamw->tensor_count) {
    int64_t left = 0;
    while (adamw->updated[left]) left++;
    return fp8optim_invalid("parameter \"%s\" was not updated, expected fp8optim_adamw_step_update() of all before the "
                            "end",
                            adamw->parameters[left].name);
  }
  adamw->phase = FP8OPTIM_IDLE;
  return read_report(adamw, report);
}
