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

// The end of a step for one tensor (see fp8core_scaling_update()) in three parts, of which the search may be shared by
// several threads: each takes every `step`-th entry from `first`, and the largest result is the amax.

// Whether the step's amax has entered the history, from which the scale follows then.
FP8CORE_RULE int fp8core_push_rule(const fp8core_scaling_arrays *state, int64_t index) {
  const float amax = state->amax[index];
  state->amax[index] = 0.0f;
  if (fp8core_amax_is_nonfinite(amax)) {
    state->nonfinite_steps[index]++;
    return 0;
  }
  if (!(amax > 0.0f) || !state->delayed) return 0;
  state->history[index * state->history_length +
                 (int64_t)(state->history_steps[index] % (uint64_t)state->history_length)] = amax;
  state->history_steps[index]++;
  return 1;
}

// FP32 bits, which of positive finite numbers are ordered as they are. 0: no entry was this thread's.
FP8CORE_RULE uint32_t fp8core_search_rule(const fp8core_scaling_arrays *state, int64_t index, int first, int step) {
  const uint64_t steps = state->history_steps[index];
  const int64_t length = state->history_length;
  const float *history = state->history + index * length;
  if (state->most_recent) return fp8core_float_bits(history[(steps - 1) % (uint64_t)length]);
  const int64_t kept = steps < (uint64_t)length ? (int64_t)steps : length;
  uint32_t largest = 0;
  for (int64_t i = first; i < kept; i += step) {
    const uint32_t bits = fp8core_float_bits(history[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

FP8CORE_RULE void fp8core_rescale_rule(const fp8core_scaling_arrays *state, int64_t index, uint32_t amax_bits) {
  fp8core_store_scale(state, index,
                      fp8core_scale_rule((fp8core_dtype)state->dtypes[index], fp8core_bits_float(amax_bits),
                                         state->margin, state->power_of_two, state->scale[index]));
}

FP8CORE_RULE void fp8core_update_rule(const fp8core_scaling_arrays *state, int64_t index) {
  if (fp8core_push_rule(state, index)) fp8core_rescale_rule(state, index, fp8core_search_rule(state, index, 0, 1));
}

#endif
