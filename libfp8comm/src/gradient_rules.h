// The arithmetic of the gradient all-reduce, written once; docs/numerics.md, "Gradient all-reduce", has it in words.
// Conversions are those of libfp8core's numerics.h.
#ifndef FP8COMM_GRADIENT_RULES_H
#define FP8COMM_GRADIENT_RULES_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "numerics.h"

// By which values are multiplied before the cast. `amax` is the largest of all ranks, so that the scale is the
// smallest. Cut so that the sum's scale, ranks times as large, has a normal reciprocal.
FP8CORE_RULE float fp8comm_wire_scale_rule(fp8core_dtype wire, float amax, double factor, int ranks) {
  const double scale = (double)fp8core_scale_rule(wire, amax, 0, 0, 1.0f) * factor;
  const double most = (double)FP8CORE_SCALE_MAX / ranks;
  if (scale >= most) return (float)most;
  if (scale <= (double)FP8CORE_SCALE_MIN) return FP8CORE_SCALE_MIN;
  return (float)scale;
}

// Delayed scaling: the largest magnitude that a step's scales are made for, from that of the step before; a negative
// one: there was none.
FP8CORE_RULE float fp8comm_expected_amax_rule(float before) { return before > FLT_MAX / 2 ? FLT_MAX : 2 * before; }

// Whether what was found fits, so that no value saturates by it and little of the range is left over. Else the scale is
// that of the amax found.
FP8CORE_RULE int fp8comm_expected_fits_rule(float expected, float found) {
  return expected >= 0 && found <= expected && 8 * (double)found >= (double)expected;
}

// Sum of codes / this = mean of values.
FP8CORE_RULE float fp8comm_sum_scale_rule(float wire_scale, int ranks) {
  return (float)((double)wire_scale * (double)ranks);
}

// The sum of one element's codes of all ranks: values in FP32, added in this order.
FP8CORE_RULE float fp8comm_sum_rule(fp8core_dtype wire, const unsigned char *const *codes, int count, size_t index) {
  float sum = fp8core_bits_float(fp8core_decode_bits(wire, codes[0][index]));
  for (int i = 1; i < count; i++) sum += fp8core_bits_float(fp8core_decode_bits(wire, codes[i][index]));
  return sum;
}

// One addition of the native algorithm: values of both codes in FP32 (in which a sum of two E4M3 values is exact), then
// one rounding, saturating. *saturated counts.
FP8CORE_RULE uint32_t fp8comm_native_add_rule(fp8core_dtype wire, uint32_t one, uint32_t other, uint64_t *saturated) {
  const float sum =
    fp8core_bits_float(fp8core_decode_bits(wire, one)) + fp8core_bits_float(fp8core_decode_bits(wire, other));
  const fp8core_cast_result result =
    fp8core_cast_element(fp8core_float_bits(sum), FP8CORE_FP32, 1.0f, wire, 1.0f, 0, 0, 1);
  *saturated += (uint64_t)result.saturated;
  return result.code;
}

// The largest magnitude for which an output has room: that rounds to its format's maximum. FP8 has scales.
FP8CORE_RULE float fp8comm_output_room_rule(fp8core_dtype output) {
  return output == FP8CORE_BF16 || output == FP8CORE_FP16
           ? fp8core_bits_float(fp8core_format_of(output).max_rounding_to_max)
           : FLT_MAX;
}

// How large the mean is. What only roundings have added, of contributions or of errors that came back, does not count:
// no mean exceeds all gradients, nor what their formats hold. `found` is the amax of the mean as codes have it.
FP8CORE_RULE float fp8comm_mean_magnitude_rule(float found, float gradients, float formats) {
  const float least = found < gradients ? found : gradients;
  return least < formats ? least : formats;
}

// Error feedback. What is cast in place of a value: with what casts have lost before, times the value's own scale.
FP8CORE_RULE float fp8comm_corrected_rule(float value, float lost, float times) { return value + times * lost; }

// What a cast of value * times loses, whose code stands for `stored`.
FP8CORE_RULE float fp8comm_lost_rule(float value, float times, float stored) { return value * times - stored; }

// The share of values that saturated: of all ranks' casts, and of the additions for each element. An element that
// saturates in several additions counts as often.
FP8CORE_RULE double fp8comm_saturation_rule(uint64_t in_cast, uint64_t in_sum, int64_t elements, int ranks) {
  return (double)in_cast / ((double)elements * ranks) + (double)in_sum / (double)elements;
}

// FP8-LM, section 2.1: halved where more than 0.001 % saturate, doubled in the course of 1,000 steps otherwise.
FP8CORE_RULE double fp8comm_mu_rule(double mu, double saturation, double threshold, double backoff, double growth,
                                    double least, double most) {
  const double next = mu * (saturation > threshold ? backoff : growth);
  return next < least ? least : next > most ? most : next;
}

#endif
