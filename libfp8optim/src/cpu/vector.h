// The kernels of a SIMD tier, LANES (16 or 8) values at a time, bit for bit the scalar rules. The tier defines before
// it includes this file: LANES, v_float (on which arithmetic operators work), v_bits, and for whole vectors
//   v_splat(float), v_root(v_float)
//   v_load(dtype, data): the exact values of stored elements
//   v_store(dtype, data, scaled), v_store_stochastic(dtype, data, scaled, draws): fp8optim_code() of the values
//   v_positive(value, scaled, least): scaled, or least where it is smaller and value is positive
//   v_zero_bits(), v_raise(bits, value), v_largest(bits): the largest magnitude as FP32 bits
//   v_add_squares(sums, value): adds the squares to LANES sums in FP64
#ifndef FP8OPTIM_CPU_VECTOR_H
#define FP8OPTIM_CPU_VECTOR_H

#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

// What the update reads and writes at one place, so that the last elements can be moved to a padded copy.
typedef struct update_pointers {
  const unsigned char *gradient;
  unsigned char *data[FP8OPTIM_PARTS];
} update_pointers;

INLINE int64_t v_bytes(fp8core_dtype dtype) { return fp8core_format_of(dtype).bits / 8; }

typedef struct update_vectors {
  v_float gradient_factor;
  v_float scale_inverse[FP8OPTIM_STATES];
  v_float next_scale[FP8OPTIM_PARTS];
  v_float next_master_inverse;
  v_float beta1_rest;
  v_float beta2;
  v_float beta2_rest;
  v_float step_size;
  v_float inverse_root_correction2;
  v_float eps;
  v_float decay;
  v_float least_exp_avg_sq;
} update_vectors;

INLINE void update_lanes(const fp8core_dtype dtype[FP8OPTIM_PARTS], fp8core_dtype gradient_dtype, int with_weight,
                         int stochastic, const fp8optim_update_job *job, const update_vectors *constants,
                         const update_pointers *at, uint64_t first_element, v_bits largest[FP8OPTIM_STATES]) {
  const v_float g = v_load(gradient_dtype, at->gradient) * constants->gradient_factor;
  const v_float m_old =
    v_load(dtype[FP8OPTIM_EXP_AVG], at->data[FP8OPTIM_EXP_AVG]) * constants->scale_inverse[FP8OPTIM_EXP_AVG];
  const v_float v_old =
    v_load(dtype[FP8OPTIM_EXP_AVG_SQ], at->data[FP8OPTIM_EXP_AVG_SQ]) * constants->scale_inverse[FP8OPTIM_EXP_AVG_SQ];
  const v_float w_old =
    v_load(dtype[FP8OPTIM_MASTER], at->data[FP8OPTIM_MASTER]) * constants->scale_inverse[FP8OPTIM_MASTER];
  const v_float m = m_old + constants->beta1_rest * (g - m_old);
  const v_float v = constants->beta2 * v_old + constants->beta2_rest * (g * g);
  const v_float denominator = v_root(v) * constants->inverse_root_correction2 + constants->eps;
  const v_float w = w_old * constants->decay - constants->step_size * (m / denominator);

  const v_float m_scaled = m * constants->next_scale[FP8OPTIM_EXP_AVG];
  v_float v_scaled = v * constants->next_scale[FP8OPTIM_EXP_AVG_SQ];
  const v_float w_scaled = w * constants->next_scale[FP8OPTIM_MASTER];
  if (dtype[FP8OPTIM_EXP_AVG_SQ] != FP8CORE_FP32) v_scaled = v_positive(v, v_scaled, constants->least_exp_avg_sq);
  v_raise(&largest[FP8OPTIM_EXP_AVG], m_scaled);
  v_raise(&largest[FP8OPTIM_EXP_AVG_SQ], v_scaled);
  v_raise(&largest[FP8OPTIM_MASTER], w_scaled);
  v_store(dtype[FP8OPTIM_EXP_AVG], at->data[FP8OPTIM_EXP_AVG], m_scaled);
  v_store(dtype[FP8OPTIM_EXP_AVG_SQ], at->data[FP8OPTIM_EXP_AVG_SQ], v_scaled);
  if (stochastic) {
    uint32_t draws[LANES];
    for (int lane = 0; lane < LANES; lane++)
      draws[lane] = fp8core_draw(job->seed, job->tensor_id, job->step, first_element + (uint64_t)lane);
    v_store_stochastic(dtype[FP8OPTIM_MASTER], at->data[FP8OPTIM_MASTER], w_scaled, draws);
  } else {
    v_store(dtype[FP8OPTIM_MASTER], at->data[FP8OPTIM_MASTER], w_scaled);
  }
  if (with_weight) {
    const v_float stored = v_load(dtype[FP8OPTIM_MASTER], at->data[FP8OPTIM_MASTER]);
    v_store(dtype[FP8OPTIM_WEIGHT], at->data[FP8OPTIM_WEIGHT],
            stored * constants->next_master_inverse * constants->next_scale[FP8OPTIM_WEIGHT]);
  }
}

INLINE void update_run(fp8core_dtype master, fp8core_dtype exp_avg, fp8core_dtype exp_avg_sq,
                       fp8core_dtype gradient_dtype, fp8core_dtype weight, int with_weight, int stochastic,
                       const fp8optim_update_job *job, const void *gradient, void *const data[FP8OPTIM_PARTS],
                       uint64_t first_element, int64_t elements, uint32_t scaled_amax[FP8OPTIM_STATES]) {
  const fp8core_dtype dtype[FP8OPTIM_PARTS] = {master, exp_avg, exp_avg_sq, weight};
  const int parts = with_weight ? FP8OPTIM_PARTS : FP8OPTIM_STATES;
  update_vectors constants;
  update_pointers at;
  v_bits largest[FP8OPTIM_STATES];
  constants.gradient_factor = v_splat(job->constants.gradient_factor);
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    constants.next_scale[part] = v_splat(job->constants.next_scale[part]);
    at.data[part] = data[part];
  }
  for (int state = 0; state < FP8OPTIM_STATES; state++) {
    constants.scale_inverse[state] = v_splat(job->constants.scale_inverse[state]);
    largest[state] = v_zero_bits();
  }
  constants.next_master_inverse = v_splat(job->constants.next_master_inverse);
  constants.beta1_rest = v_splat(job->constants.beta1_rest);
  constants.beta2 = v_splat(job->constants.beta2);
  constants.beta2_rest = v_splat(job->constants.beta2_rest);
  constants.step_size = v_splat(job->constants.step_size);
  constants.inverse_root_correction2 = v_splat(job->constants.inverse_root_correction2);
  constants.eps = v_splat(job->constants.eps);
  constants.decay = v_splat(job->constants.decay);
  constants.least_exp_avg_sq = v_splat(fp8core_bits_float(fp8core_decode_bits(exp_avg_sq, 1)));
  at.gradient = gradient;
  int64_t i = 0;
  for (; i + LANES <= elements; i += LANES) {
    update_lanes(dtype, gradient_dtype, with_weight, stochastic, job, &constants, &at, first_element + (uint64_t)i,
                 largest);
    at.gradient += LANES * v_bytes(gradient_dtype);
    for (int part = 0; part < parts; part++) at.data[part] += LANES * v_bytes(dtype[part]);
  }
  if (i < elements) {
    // Zeros beyond the last element stay zeros.
    unsigned char padded[FP8OPTIM_PARTS + 1][LANES * 4] __attribute__((aligned(64))) = {{0}};
    const size_t rest = (size_t)(elements - i);
    const update_pointers copy = {padded[FP8OPTIM_PARTS], {padded[0], padded[1], padded[2], padded[3]}};
    memcpy(padded[FP8OPTIM_PARTS], at.gradient, rest * (size_t)v_bytes(gradient_dtype));
    for (int state = 0; state < FP8OPTIM_STATES; state++)
      memcpy(padded[state], at.data[state], rest * (size_t)v_bytes(dtype[state]));
    update_lanes(dtype, gradient_dtype, with_weight, stochastic, job, &constants, &copy, first_element + (uint64_t)i,
                 largest);
    for (int part = 0; part < parts; part++) memcpy(at.data[part], padded[part], rest * (size_t)v_bytes(dtype[part]));
  }
  for (int state = 0; state < FP8OPTIM_STATES; state++) {
    const uint32_t found = v_largest(largest[state]);
    if (found > scaled_amax[state]) scaled_amax[state] = found;
  }
}

#define UPDATE_ARGUMENTS                                                                                               \
  const fp8optim_update_job *job, const void *gradient, void *const data[FP8OPTIM_PARTS], uint64_t first_element,      \
    int64_t elements, uint32_t scaled_amax[FP8OPTIM_STATES]

// Any formats, looked up for each vector.
static __attribute__((noinline)) void update_any(UPDATE_ARGUMENTS) {
  update_run(job->dtype[FP8OPTIM_MASTER], job->dtype[FP8OPTIM_EXP_AVG], job->dtype[FP8OPTIM_EXP_AVG_SQ],
             job->gradient_dtype, job->dtype[FP8OPTIM_WEIGHT], data[FP8OPTIM_WEIGHT] != NULL, job->stochastic, job,
             gradient, data, first_element, elements, scaled_amax);
}

// The formats of the presets that models are trained with, with the gradients and weights that go with them, have
// loops without a branch.
#define UPDATE_CASES(X)                                                                                                \
  X(FP16, E4M3, FP16, E4M3, E4M3)                                                                                      \
  X(FP16, E4M3, FP16, E4M3, BF16)                                                                                      \
  X(FP16, E4M3, FP16, BF16, E4M3)                                                                                      \
  X(FP16, E4M3, FP16, BF16, BF16)                                                                                      \
  X(FP16, E4M3, FP16, FP32, FP32)                                                                                      \
  X(FP32, FP32, FP32, FP32, FP32)                                                                                      \
  X(FP32, FP32, FP32, FP32, BF16)                                                                                      \
  X(FP32, FP32, FP32, BF16, BF16)                                                                                      \
  X(FP32, FP32, FP32, E4M3, E4M3)

#define UPDATE_FUNCTION(master, exp_avg, exp_avg_sq, gradient_dtype, weight)                                           \
  static __attribute__((noinline)) void update_##master##_##exp_avg##_##exp_avg_sq##_##gradient_dtype##_##weight(      \
    UPDATE_ARGUMENTS) {                                                                                                \
    if (data[FP8OPTIM_WEIGHT])                                                                                         \
      update_run(FP8CORE_##master, FP8CORE_##exp_avg, FP8CORE_##exp_avg_sq, FP8CORE_##gradient_dtype,                  \
                 FP8CORE_##weight, 1, 0, job, gradient, data, first_element, elements, scaled_amax);                   \
    else                                                                                                               \
      update_run(FP8CORE_##master, FP8CORE_##exp_avg, FP8CORE_##exp_avg_sq, FP8CORE_##gradient_dtype,                  \
                 FP8CORE_##weight, 0, 0, job, gradient, data, first_element, elements, scaled_amax);                   \
  }
UPDATE_CASES(UPDATE_FUNCTION)

static void update(UPDATE_ARGUMENTS) {
#define UPDATE_CHOICE(master, exp_avg, exp_avg_sq, gradient_format, weight)                                            \
  if (job->dtype[FP8OPTIM_MASTER] == FP8CORE_##master && job->dtype[FP8OPTIM_EXP_AVG] == FP8CORE_##exp_avg &&          \
      job->dtype[FP8OPTIM_EXP_AVG_SQ] == FP8CORE_##exp_avg_sq && job->gradient_dtype == FP8CORE_##gradient_format &&   \
      (!data[FP8OPTIM_WEIGHT] || job->dtype[FP8OPTIM_WEIGHT] == FP8CORE_##weight) && !job->stochastic) {               \
    update_##master##_##exp_avg##_##exp_avg_sq##_##gradient_format##_##weight(job, gradient, data, first_element,      \
                                                                              elements, scaled_amax);                  \
    return;                                                                                                            \
  }
  UPDATE_CASES(UPDATE_CHOICE)
  update_any(job, gradient, data, first_element, elements, scaled_amax);
}

INLINE void measure_run(fp8core_dtype dtype, float scale_inverse, const unsigned char *data, int64_t elements,
                        double sums[FP8OPTIM_LANES], uint32_t *amax) {
  const v_float inverse = v_splat(scale_inverse);
  v_bits largest = v_zero_bits();
  int64_t i = 0;
  for (; i + FP8OPTIM_LANES <= elements; i += FP8OPTIM_LANES)
    for (int lane = 0; lane < FP8OPTIM_LANES; lane += LANES) {
      const v_float value = v_load(dtype, data + (i + lane) * v_bytes(dtype)) * inverse;
      v_raise(&largest, value);
      v_add_squares(sums + lane, value);
    }
  if (i < elements) {
    unsigned char padded[FP8OPTIM_LANES * 4] = {0};
    memcpy(padded, data + i * v_bytes(dtype), (size_t)((elements - i) * v_bytes(dtype)));
    for (int lane = 0; lane < FP8OPTIM_LANES; lane += LANES) {
      const v_float value = v_load(dtype, padded + lane * v_bytes(dtype)) * inverse;
      v_raise(&largest, value);
      v_add_squares(sums + lane, value);
    }
  }
  const uint32_t found = v_largest(largest);
  if (found > *amax) *amax = found;
}

static void measure(fp8core_dtype dtype, float scale_inverse, const void *data, int64_t elements,
                    double sums[FP8OPTIM_LANES], uint32_t *amax) {
  double lanes[FP8OPTIM_LANES] __attribute__((aligned(64)));
  memcpy(lanes, sums, sizeof(lanes));
#define MEASURE_CASE(dtype)                                                                                            \
case dtype: measure_run(dtype, scale_inverse, data, elements, lanes, amax); break;
  switch (dtype) {
    MEASURE_CASE(FP8CORE_E4M3)
    MEASURE_CASE(FP8CORE_E5M2)
    MEASURE_CASE(FP8CORE_BF16)
    MEASURE_CASE(FP8CORE_FP16)
    MEASURE_CASE(FP8CORE_FP32)
  }
#undef MEASURE_CASE
  memcpy(sums, lanes, sizeof(lanes));
}

#endif
