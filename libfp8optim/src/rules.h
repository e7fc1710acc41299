// The arithmetic of the optimizer, written once. Both the C compiler and nvcc take this file; every SIMD and CUDA
// kernel gives the bits of fp8optim_update_element(). docs/numerics.md states the same rules in words, with their
// sources.
//
// Operations round separately but for the fused multiply-adds that are written as such, so that all tiers agree.
#ifndef FP8OPTIM_RULES_H
#define FP8OPTIM_RULES_H

#include "fp8optim/adamw.h"
#include "numerics.h"

// States with a scale, and the weight, in the order of fp8optim_state.
#define FP8OPTIM_STATES 3
#define FP8OPTIM_PARTS 4

// Consecutive elements of one tensor that are measured and updated together, and whose squares are one partial sum.
#define FP8OPTIM_CHUNK 16384
// Element i of a chunk belongs to lane i % 32 of its partial sum.
#define FP8OPTIM_LANES 32

// A gradient norm above the first, or above the second after clipping, skips the step: a second moment is an FP32
// number at some point, which the square of the second leaves room in.
#define FP8OPTIM_NORM_MAX 0x1p126
#define FP8OPTIM_CLIPPED_NORM_MAX 0x1p63

// A gradient below this share of exp_avg lets it shrink by nearly 1 - beta1, which is less than half a unit of many
// 8-bit numbers: to nearest it would stay where it is for ever while exp_avg_sq falls, and move the weight by ever
// more. Rounding toward zero every fourth step is enough, and a smaller bias than in every one.
#define FP8OPTIM_SHRINK 0.25
#define FP8OPTIM_SHRINK_STEPS 4

// Rounding of bounds and of the arithmetic that they bound.
#define FP8OPTIM_BOUND_SLACK (1.0 + 0x1p-18)

typedef struct fp8optim_chunk_result {
  // Of the gradient's elements as they are stored, without its scale.
  double sum_squares;
  // FP32 bits of the largest magnitude, without the scale; above infinity's for a NaN.
  uint32_t gradient_amax;
  // FP32 bits of the largest scaled magnitudes before they were rounded.
  uint32_t scaled_amax[FP8OPTIM_STATES];
} fp8optim_chunk_result;

// One tensor of parameters, in device memory. Indices are fp8optim_state.
typedef struct fp8optim_tensor {
  void *data[FP8OPTIM_PARTS];
  fp8core_dtype dtype[FP8OPTIM_PARTS];
  int64_t elements;
  int64_t row_length;
  int group;
  // Of random numbers.
  uint32_t stream;
  int64_t first_chunk;
  int64_t chunks;
  float scale[FP8OPTIM_PARTS];
  float scale_inverse[FP8OPTIM_PARTS];
  // Largest magnitudes, rounded to nearest in their formats: of the stored values, or of what they would be.
  float amax[FP8OPTIM_STATES];
  // Of the step in progress.
  float next_scale[FP8OPTIM_PARTS];
  float gradient_amax;
} fp8optim_tensor;

typedef struct fp8optim_gradient {
  const void *data;
  fp8core_dtype dtype;
  // Elements from one row to the next.
  int64_t row_stride;
  const float *scale_inverse;
} fp8optim_gradient;

// What the whole optimizer counts and what a step finds, in device memory.
typedef struct fp8optim_progress {
  int64_t steps;
  int64_t skipped_steps;
  // Of the last step.
  int skipped;
  float gradient_norm;
  float clip_factor;
} fp8optim_progress;

// One tensor's share in the norm, where tensors are gathered by themselves: see fp8optim_gather_rule().
typedef struct fp8optim_share {
  double sum_squares;
  int nonfinite;
} fp8optim_share;

// What one element's update needs, constant over a tensor and a step. The update works on stored values times the new
// scales, so that each stored value takes one multiplication on its way in and none on its way out.
typedef struct fp8optim_constants {
  float exp_avg_keep;
  float exp_avg_gradient;
  // An exp_avg of 8 bits whose gradient's term is below this times the stored value rounds toward zero.
  float exp_avg_shrink;
  float exp_avg_sq_keep;
  float exp_avg_sq_gradient;
  float eps;
  float master_keep;
  float master_change;
  // From the stored master weight to the scaled weight.
  float weight_factor;
} fp8optim_constants;

// After the gradients were measured: one tensor's amax, and its share of the norm.
FP8CORE_RULE void fp8optim_gather_rule(fp8optim_tensor *tensor, const fp8optim_chunk_result *results,
                                       float scale_inverse, double *sum_squares, int *nonfinite) {
  uint32_t amax = 0;
  double sum = 0.0;
  for (int64_t i = tensor->first_chunk; i < tensor->first_chunk + tensor->chunks; i++) {
    sum += results[i].sum_squares;
    if (results[i].gradient_amax > amax) amax = results[i].gradient_amax;
  }
  tensor->gradient_amax = fp8core_bits_float(amax);
  // NaN and infinity times 0 would be no number either.
  if (amax >= FP8CORE_F32_INFINITY || !(fabsf(scale_inverse) < INFINITY)) *nonfinite = 1;
  *sum_squares += sum * (double)scale_inverse * (double)scale_inverse;
}

// Whether the gradients allow a step, its clip factor and norm. `sum_squares` is of all gradients as they came; it may
// lack what a NaN or an infinity does to it, which `nonfinite` tells.
FP8CORE_RULE void fp8optim_begin_rule(fp8optim_progress *progress, double sum_squares, int nonfinite, float max_norm,
                                      float loss_scale) {
  const double norm = sqrt(sum_squares) / (double)loss_scale;
  const int clips = max_norm > 0.0f && norm > (double)max_norm;
  const double clipped = clips ? (double)max_norm : norm;
  progress->skipped = nonfinite || !(norm <= FP8OPTIM_NORM_MAX && clipped <= FP8OPTIM_CLIPPED_NORM_MAX);
  progress->gradient_norm = nonfinite ? fp8core_bits_float(FP8CORE_F32_QUIET_NAN) : (float)norm;
  progress->clip_factor = clips && !progress->skipped ? (float)((double)max_norm / norm) : 1.0f;
  if (progress->skipped)
    progress->skipped_steps++;
  else
    progress->steps++;
}

// A power of two that leaves a factor of 2 to 4 above `bound`, kept while that factor is 1 to 16, so that storing an
// unchanged value again gives the same bits.
FP8CORE_RULE float fp8optim_kept_scale(fp8core_dtype dtype, float bound, float scale) {
  if (dtype == FP8CORE_BF16 || dtype == FP8CORE_FP32) return 1.0f;
  if (!(bound > 0.0f)) return scale > 0.0f ? scale : 1.0f;
  const double limit = (double)fp8core_max_of(dtype) / (double)bound;
  if ((double)scale <= limit && (double)scale * 16.0 > limit) return scale;
  return fp8core_scale_rule(dtype, bound, 1, 1, 1.0f);
}

// A power by products: pow() of one library is not that of another in its last bit.
FP8CORE_RULE double fp8optim_power(double base, int64_t exponent) {
  double power = 1.0;
  for (double square = base; exponent > 0; exponent /= 2) {
    if (exponent % 2 != 0) power *= square;
    square *= square;
  }
  return power;
}

// |exp_avg / sqrt(exp_avg_sq)| after bias correction is at most this (Cauchy and Schwarz), twice over for the rounding
// of stored moments. Not bounded for beta2 far below beta1 squared: the cast saturates then.
FP8CORE_RULE double fp8optim_update_bound(double beta1, double beta2, double correction1, double correction2,
                                          int64_t steps) {
  const double ratio = beta2 > 0.0 ? beta1 * beta1 / beta2 : beta1 > 0.0 ? 2.0 : 0.0;
  const double terms = ratio == 1.0 ? (double)steps : (1.0 - fp8optim_power(ratio, steps)) / (1.0 - ratio);
  const double bound = 2.0 * (1.0 - beta1) / correction1 * sqrt(terms * correction2 / (1.0 - beta2));
  // Also for an infinity or a NaN.
  return bound < 64.0 ? bound : 64.0;
}

// What the tensors of a group share in one step.
typedef struct fp8optim_group_step {
  double beta1;
  double beta2;
  double decay;
  // Of the change of a master weight.
  double change_bound;
  double step_size;
  double root_correction2;
  double eps;
  // Of exp_avg, below which a gradient lets it round toward zero; 0 in most steps.
  double shrink;
} fp8optim_group_step;

// `steps` counts the step in progress.
FP8CORE_RULE fp8optim_group_step fp8optim_group_rule(const fp8optim_group *group, int64_t steps) {
  const double correction1 = 1.0 - fp8optim_power(group->beta1, steps);
  const double correction2 = 1.0 - fp8optim_power(group->beta2, steps);
  fp8optim_group_step step;
  step.beta1 = group->beta1;
  step.beta2 = group->beta2;
  step.decay = 1.0 - group->learning_rate * group->weight_decay;
  step.change_bound =
    group->learning_rate * fp8optim_update_bound(group->beta1, group->beta2, correction1, correction2, steps);
  step.step_size = group->learning_rate / correction1;
  step.root_correction2 = sqrt(correction2);
  step.eps = group->eps;
  step.shrink = steps % FP8OPTIM_SHRINK_STEPS == 0 ? (1.0 - group->beta1) * FP8OPTIM_SHRINK : 0.0;
  return step;
}

// A bound as FP32 for fp8core_scale_rule(), which reads 0 and infinity as "keep the scale".
FP8CORE_RULE float fp8optim_bound(double bound) {
  const double limited = bound * FP8OPTIM_BOUND_SLACK;
  if (limited > 0.0 && limited < 0x1p-149) return 0x1p-149f;
  const float most = fp8core_bits_float(FP8CORE_F32_MAX);
  return limited < (double)most ? (float)limited : most;
}

// Both scales are powers of two, so the factor is exact.
FP8CORE_RULE float fp8optim_weight_factor(float master_scale, float weight_scale) {
  return 1.0f / master_scale * weight_scale;
}

// A constant as FP32. What is beyond the limit multiplies zeros, of which an infinity would make NaNs, or numbers so
// small that they lose accuracy by it: see docs/numerics.md. The limit leaves room for a factor that a kernel adds.
FP8CORE_RULE float fp8optim_constant(double value) {
  return value > 0x1p100 ? 0x1p100f : value < -0x1p100 ? -0x1p100f : (float)value;
}

// Learning rate 0 without a change by decay: masters and weights keep their bits, -0 too, which the sums of an update
// would make 0. Backends do not write them then.
FP8CORE_RULE int fp8optim_keeps_masters(const fp8optim_group_step *step) {
  return step->change_bound == 0.0 && step->decay == 1.0;
}

// Before the pass over the states: the next scales, from bounds on what will be stored, and the constants.
FP8CORE_RULE void fp8optim_plan_rule(fp8optim_tensor *tensor, const fp8optim_group_step *step, float clip_factor,
                                     float loss_scale, float gradient_scale_inverse, fp8optim_constants *constants) {
  const double factor = (double)gradient_scale_inverse * (double)clip_factor / (double)loss_scale;
  const double gradient = (double)tensor->gradient_amax * fabs(factor);
  const double exp_avg = step->beta1 * (double)tensor->amax[FP8OPTIM_EXP_AVG] + (1.0 - step->beta1) * gradient;
  const double exp_avg_sq =
    step->beta2 * (double)tensor->amax[FP8OPTIM_EXP_AVG_SQ] + (1.0 - step->beta2) * gradient * gradient;
  const double master = (double)tensor->amax[FP8OPTIM_MASTER] * fabs(step->decay) + step->change_bound;
  const int keeps = fp8optim_keeps_masters(step);
  const float master_scale =
    keeps ? tensor->scale[FP8OPTIM_MASTER]
          : fp8optim_kept_scale(tensor->dtype[FP8OPTIM_MASTER], fp8optim_bound(master), tensor->scale[FP8OPTIM_MASTER]);
  const float exp_avg_scale =
    fp8core_scale_rule(tensor->dtype[FP8OPTIM_EXP_AVG], fp8optim_bound(exp_avg), 0, 0, tensor->scale[FP8OPTIM_EXP_AVG]);
  const float exp_avg_sq_scale = fp8core_scale_rule(tensor->dtype[FP8OPTIM_EXP_AVG_SQ], fp8optim_bound(exp_avg_sq), 0,
                                                    0, tensor->scale[FP8OPTIM_EXP_AVG_SQ]);
  const float weight_scale =
    keeps ? tensor->scale[FP8OPTIM_WEIGHT]
          : fp8optim_kept_scale(tensor->dtype[FP8OPTIM_WEIGHT], fp8optim_bound(master), tensor->scale[FP8OPTIM_WEIGHT]);
  const double root_scale = sqrt((double)exp_avg_sq_scale);
  const double eps = step->eps * step->root_correction2 * root_scale;
  tensor->next_scale[FP8OPTIM_MASTER] = master_scale;
  tensor->next_scale[FP8OPTIM_EXP_AVG] = exp_avg_scale;
  tensor->next_scale[FP8OPTIM_EXP_AVG_SQ] = exp_avg_sq_scale;
  tensor->next_scale[FP8OPTIM_WEIGHT] = weight_scale;
  constants->exp_avg_keep =
    fp8optim_constant(step->beta1 * (double)exp_avg_scale * (double)tensor->scale_inverse[FP8OPTIM_EXP_AVG]);
  constants->exp_avg_gradient = fp8optim_constant((1.0 - step->beta1) * factor * (double)exp_avg_scale);
  constants->exp_avg_shrink =
    fp8optim_constant(step->shrink * (double)exp_avg_scale * (double)tensor->scale_inverse[FP8OPTIM_EXP_AVG]);
  constants->exp_avg_sq_keep =
    fp8optim_constant(step->beta2 * (double)exp_avg_sq_scale * (double)tensor->scale_inverse[FP8OPTIM_EXP_AVG_SQ]);
  constants->exp_avg_sq_gradient = fp8optim_constant(sqrt(1.0 - step->beta2) * factor * root_scale);
  constants->eps = eps > 0x1p-100 ? fp8optim_constant(eps) : 0x1p-100f;
  constants->master_keep =
    fp8optim_constant(step->decay * (double)master_scale * (double)tensor->scale_inverse[FP8OPTIM_MASTER]);
  constants->master_change = fp8optim_constant(step->step_size * step->root_correction2 * (double)master_scale *
                                               root_scale / (double)exp_avg_scale);
  constants->weight_factor = fp8optim_weight_factor(master_scale, weight_scale);
}

// The magnitude that a scaled one is stored as. At the end of FP32's range its rounding may leave it.
FP8CORE_RULE float fp8optim_stored_amax(fp8core_dtype dtype, uint32_t scaled, float scale_inverse) {
  const uint32_t code = fp8core_encode_nearest(dtype, scaled, 1);
  const float amax = fp8core_bits_float(fp8core_decode_bits(dtype, code)) * scale_inverse;
  return amax < INFINITY ? amax : fp8core_bits_float(FP8CORE_F32_MAX);
}

// After the pass: the scales that were used become current, and the amaxes are those of the stored values. Rounding to
// nearest is monotonic, so the largest stored value is the rounded largest value.
FP8CORE_RULE void fp8optim_end_rule(fp8optim_tensor *tensor, const uint32_t scaled_amax[FP8OPTIM_STATES]) {
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    tensor->scale[part] = tensor->next_scale[part];
    tensor->scale_inverse[part] = 1.0f / tensor->next_scale[part];
  }
  for (int state = 0; state < FP8OPTIM_STATES; state++)
    tensor->amax[state] = fp8optim_stored_amax(tensor->dtype[state], scaled_amax[state], tensor->scale_inverse[state]);
}

// The scale for values up to the magnitude `largest` (FP32 bits) that are set from outside.
FP8CORE_RULE float fp8optim_scale_for(fp8core_dtype dtype, fp8optim_state state, uint32_t largest) {
  const float amax = fp8core_bits_float(largest);
  return state == FP8OPTIM_MASTER || state == FP8OPTIM_WEIGHT ? fp8optim_kept_scale(dtype, amax, 0.0f)
                                                              : fp8core_scale_rule(dtype, amax, 0, 0, 1.0f);
}

// After a state was set with `scale` from values up to `largest`.
FP8CORE_RULE void fp8optim_set_rule(fp8optim_tensor *tensor, fp8optim_state state, float scale, uint32_t largest) {
  const uint32_t scaled = fp8core_float_bits(fp8core_bits_float(largest) * scale) & FP8CORE_F32_MAGNITUDE;
  tensor->scale[state] = scale;
  tensor->scale_inverse[state] = 1.0f / scale;
  tensor->amax[state] = fp8optim_stored_amax(tensor->dtype[state], scaled, tensor->scale_inverse[state]);
}

// Before a weight is made from its master outside of a step.
FP8CORE_RULE void fp8optim_weight_scale_rule(fp8optim_tensor *tensor) {
  const float scale =
    fp8optim_kept_scale(tensor->dtype[FP8OPTIM_WEIGHT], tensor->amax[FP8OPTIM_MASTER], tensor->scale[FP8OPTIM_WEIGHT]);
  tensor->scale[FP8OPTIM_WEIGHT] = scale;
  tensor->scale_inverse[FP8OPTIM_WEIGHT] = 1.0f / scale;
}

// Memory of a caller's need not be aligned on the CPU.
FP8CORE_RULE uint32_t fp8optim_load_code(fp8core_dtype dtype, const void *data, int64_t index) {
#if defined(__CUDA_ARCH__)
  switch (fp8core_format_of(dtype).bits) {
  case 8: return ((const uint8_t *)data)[index];
  case 16: return ((const uint16_t *)data)[index];
  default: return ((const uint32_t *)data)[index];
  }
#else
  const uint8_t *bytes = (const uint8_t *)data;
  uint16_t half;
  uint32_t word;
  switch (fp8core_format_of(dtype).bits) {
  case 8: return bytes[index];
  case 16: memcpy(&half, bytes + 2 * index, sizeof(half)); return half;
  default: memcpy(&word, bytes + 4 * index, sizeof(word)); return word;
  }
#endif
}

FP8CORE_RULE void fp8optim_store_code(fp8core_dtype dtype, void *data, int64_t index, uint32_t code) {
#if defined(__CUDA_ARCH__)
  switch (fp8core_format_of(dtype).bits) {
  case 8: ((uint8_t *)data)[index] = (uint8_t)code; break;
  case 16: ((uint16_t *)data)[index] = (uint16_t)code; break;
  default: ((uint32_t *)data)[index] = code; break;
  }
#else
  uint8_t *bytes = (uint8_t *)data;
  const uint16_t half = (uint16_t)code;
  switch (fp8core_format_of(dtype).bits) {
  case 8: bytes[index] = (uint8_t)code; break;
  case 16: memcpy(bytes + 2 * index, &half, sizeof(half)); break;
  default: memcpy(bytes + 4 * index, &code, sizeof(code)); break;
  }
#endif
}

FP8CORE_RULE float fp8optim_load(fp8core_dtype dtype, const void *data, int64_t index) {
  return fp8core_bits_float(fp8core_decode_bits(dtype, fp8optim_load_code(dtype, data, index)));
}

// The code of a scaled value: saturating, sign of zero kept. Stochastic with the largest draw is toward zero.
FP8CORE_RULE uint32_t fp8optim_code(fp8core_dtype dtype, float scaled, int stochastic, uint32_t draw) {
  const uint32_t bits = fp8core_float_bits(scaled);
  const uint32_t magnitude = bits & FP8CORE_F32_MAGNITUDE;
  const uint32_t sign = bits & FP8CORE_F32_SIGN ? UINT32_C(1) << (fp8core_format_of(dtype).bits - 1) : 0;
  const int saturate = dtype != FP8CORE_FP32 && dtype != FP8CORE_BF16;
  return sign | (stochastic ? fp8core_encode_stochastic(dtype, magnitude, saturate, draw)
                            : fp8core_encode_nearest(dtype, magnitude, saturate));
}

// Whether an exp_avg rounds toward zero: see FP8OPTIM_SHRINK.
FP8CORE_RULE int fp8optim_shrinks(fp8core_dtype dtype, float gradient_term, float stored, float exp_avg_shrink) {
  return fp8core_format_of(dtype).bits == 8 && fabsf(gradient_term) < fabsf(stored * exp_avg_shrink);
}

FP8CORE_RULE void fp8optim_raise(uint32_t *maximum, float scaled) {
  const uint32_t magnitude = fp8core_float_bits(scaled) & FP8CORE_F32_MAGNITUDE;
  if (magnitude > *maximum) *maximum = magnitude;
}

// A scaled second moment that stays positive where it is: an update of exp_avg / (0 + eps) would be out of all
// proportion.
FP8CORE_RULE float fp8optim_positive(fp8core_dtype dtype, float scaled) {
  if (dtype == FP8CORE_FP32) return scaled;
  const float least = fp8core_bits_float(fp8core_decode_bits(dtype, 1));
  return scaled > 0.0f && scaled < least ? least : scaled;
}

// The code of a value that is set from outside: finite as the value is, and positive where a second moment is, however
// small its product with the scale.
FP8CORE_RULE uint32_t fp8optim_set_code(fp8core_dtype dtype, fp8optim_state state, float value, float scale) {
  const uint32_t bits = fp8core_float_bits(value * scale);
  const uint32_t code = fp8core_encode_nearest(dtype, bits & FP8CORE_F32_MAGNITUDE, 1);
  if (state == FP8OPTIM_EXP_AVG_SQ) return value > 0.0f && code == 0 ? 1 : code;
  return code | (bits & FP8CORE_F32_SIGN ? UINT32_C(1) << (fp8core_format_of(dtype).bits - 1) : 0);
}

// Sums of squares add FP32 numbers where a square is exact in FP32 and its sum cannot overflow, else FP64 numbers.
FP8CORE_RULE int fp8optim_squares_in_fp32(fp8core_dtype dtype) {
  return dtype != FP8CORE_BF16 && dtype != FP8CORE_FP32;
}

// The weight is the stored master's, so that it can be made again from a saved state.
FP8CORE_RULE uint32_t fp8optim_weight_code(const fp8core_dtype dtype[FP8OPTIM_PARTS], uint32_t master_code,
                                           float weight_factor) {
  const float master = fp8core_bits_float(fp8core_decode_bits(dtype[FP8OPTIM_MASTER], master_code));
  return fp8optim_code(dtype[FP8OPTIM_WEIGHT], master * weight_factor, 0, 0);
}

// The update of one element: reads the gradient and the states, writes the states and, unless weight is NULL, the
// weight.
FP8CORE_RULE void fp8optim_update_element(const fp8core_dtype dtype[FP8OPTIM_PARTS], void *const data[FP8OPTIM_PARTS],
                                          fp8core_dtype gradient_dtype, const void *gradient, int64_t index,
                                          const fp8optim_constants *constants, int stochastic, uint32_t draw,
                                          uint32_t scaled_amax[FP8OPTIM_STATES]) {
  const float g = fp8optim_load(gradient_dtype, gradient, index);
  const float m_old = fp8optim_load(dtype[FP8OPTIM_EXP_AVG], data[FP8OPTIM_EXP_AVG], index);
  const float v_old = fp8optim_load(dtype[FP8OPTIM_EXP_AVG_SQ], data[FP8OPTIM_EXP_AVG_SQ], index);
  const float w_old = fp8optim_load(dtype[FP8OPTIM_MASTER], data[FP8OPTIM_MASTER], index);
  const float m_gradient = g * constants->exp_avg_gradient;
  const float m = fmaf(m_old, constants->exp_avg_keep, m_gradient);
  const int m_shrinks = fp8optim_shrinks(dtype[FP8OPTIM_EXP_AVG], m_gradient, m_old, constants->exp_avg_shrink);
  const float root_part = g * constants->exp_avg_sq_gradient;
  const float v =
    fp8optim_positive(dtype[FP8OPTIM_EXP_AVG_SQ], fmaf(v_old, constants->exp_avg_sq_keep, root_part * root_part));
  const float w = fmaf(-constants->master_change, m / (sqrtf(v) + constants->eps), w_old * constants->master_keep);
  fp8optim_raise(&scaled_amax[FP8OPTIM_EXP_AVG], m);
  fp8optim_raise(&scaled_amax[FP8OPTIM_EXP_AVG_SQ], v);
  fp8optim_raise(&scaled_amax[FP8OPTIM_MASTER], w);
  const uint32_t w_code = fp8optim_code(dtype[FP8OPTIM_MASTER], w, stochastic, draw);
  fp8optim_store_code(dtype[FP8OPTIM_EXP_AVG], data[FP8OPTIM_EXP_AVG], index,
                      fp8optim_code(dtype[FP8OPTIM_EXP_AVG], m, m_shrinks, UINT32_MAX));
  fp8optim_store_code(dtype[FP8OPTIM_EXP_AVG_SQ], data[FP8OPTIM_EXP_AVG_SQ], index,
                      fp8optim_code(dtype[FP8OPTIM_EXP_AVG_SQ], v, 0, 0));
  fp8optim_store_code(dtype[FP8OPTIM_MASTER], data[FP8OPTIM_MASTER], index, w_code);
  if (data[FP8OPTIM_WEIGHT])
    fp8optim_store_code(dtype[FP8OPTIM_WEIGHT], data[FP8OPTIM_WEIGHT], index,
                        fp8optim_weight_code(dtype, w_code, constants->weight_factor));
}

#endif
