// The rules of a scaling state, one tensor at a time, for the CPU and the CUDA backend alike.
#ifndef FP8CORE_SCALING_RULES_H
#define FP8CORE_SCALING_RULES_H

#include "internal.h"
#include "numerics.h"

FP8CORE_RULE void fp8core_store_scale(const fp8core_scaling_arrays *state, int64_t index, float scale) {
  state->scale[index] = scale;
  state->scale_inverse[index] = 1.0f / scale;
}

// After a just-in-time pass: the scale from measured[index].
FP8CORE_RULE void fp8core_calibrate_rule(const fp8core_scaling_arrays *state, int64_t index) {
  fp8core_store_scale(state, index,
                      fp8core_scale_rule((fp8core_dtype)state->dtypes[index], state->measured[index], state->margin,
                                         state->power_of_two, state->scale[index]));
}

// The end of a step for one tensor; see fp8core_scaling_update().
FP8CORE_RULE void fp8core_update_rule(const fp8core_scaling_arrays *state, int64_t index) {
  const float amax = state->amax[index];
  state->amax[index] = 0.0f;
  if ((fp8core_float_bits(amax) & FP8CORE_F32_MAGNITUDE) >= FP8CORE_F32_INFINITY) {
    state->nonfinite_steps[index]++;
    return;
  }
  if (!(amax > 0.0f) || !state->delayed) return;
  float *history = state->history + index * state->history_length;
  history[state->history_steps[index] % (uint64_t)state->history_length] = amax;
  state->history_steps[index]++;
  float chosen = amax;
  if (!state->most_recent) {
    const uint64_t steps = state->history_steps[index];
    const int64_t kept = steps < (uint64_t)state->history_length ? (int64_t)steps : (int64_t)state->history_length;
    for (int64_t i = 0; i < kept; i++) chosen = history[i] > chosen ? history[i] : chosen;
  }
  fp8core_store_scale(state, index,
                      fp8core_scale_rule((fp8core_dtype)state->dtypes[index], chosen, state->margin,
                                         state->power_of_two, state->scale[index]));
}

#endif
