// The kernels of a SIMD tier, LANES (16 or 8) values at a time, bit for bit the scalar rules. The tier defines before
// it includes this file: LANES, v_float (on which arithmetic operators work), v_bits, and for whole vectors
//   v_splat(float), v_root(v_float)
//   v_load(dtype, data): stored elements, any; v_load_finite(dtype, data): the same without infinities and NaN. Both
//     times 1 / v_load_factor(dtype). v_load_block(dtype, data, values): BLOCK_VECTORS of finite elements
//   v_store(dtype, data, scaled, bounded), v_store_stochastic(dtype, data, scaled, draws): codes of fp8optim_code();
//     bounded: none exceeds the format's maximum. v_store_block(dtype, data, scaled, bounded): of BLOCK_VECTORS vectors
//   v_mask, v_smaller(a, b): where |a| < |b|; v_store_8(dtype, data, scaled, masks, vectors): bounded 8-bit codes,
//     toward zero where the mask is set
//   v_fma(a, b, c): a * b + c
//   v_positive(scaled, least): scaled, or least where it is smaller and positive
//   v_zero_bits(), v_raise(bits, value), v_largest(bits): the largest magnitude as FP32 bits; v_raise_positive(bits,
//     value): of values without a sign
//   v_draw(job, first_element, draws): the draws of BLOCK_VECTORS vectors from that element on, a multiple of 4
//   v_codes, v_no_codes(), v_raise_codes(codes, data), v_largest_code(codes): the largest of FP8OPTIM_LANES codes in
//     8 bits, without their signs
//   v_wide, v_wide_zero(), v_add_squares(sums, value), v_wide_lane(sums, lane): LANES sums of exact squares in FP64
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

typedef struct update_constants {
  v_float exp_avg_keep;
  v_float exp_avg_gradient;
  v_float exp_avg_shrink;
  v_float exp_avg_sq_keep;
  v_float exp_avg_sq_gradient;
  v_float eps;
  v_float master_keep;
  v_float minus_master_change;
  v_float weight_load_factor;
  v_float weight_factor;
  v_float least_exp_avg_sq;
} update_constants;

INLINE void v_load_vectors(fp8core_dtype dtype, const unsigned char *data, v_float *values, int vectors) {
  if (vectors == BLOCK_VECTORS)
    v_load_block(dtype, data, values);
  else
    values[0] = v_load_finite(dtype, data);
}

INLINE void v_store_vectors(fp8core_dtype dtype, unsigned char *data, const v_float *scaled, int vectors, int bounded) {
  if (vectors == BLOCK_VECTORS)
    v_store_block(dtype, data, scaled, bounded);
  else
    v_store(dtype, data, scaled[0], bounded);
}

INLINE void update_vectors_at(const fp8core_dtype dtype[FP8OPTIM_PARTS], fp8core_dtype gradient_dtype, int with_weight,
                              int stochastic, int shrinks, int vectors, const fp8optim_update_job *job,
                              const update_constants *constants, const update_pointers *at, uint64_t first_element,
                              v_bits largest[FP8OPTIM_STATES]) {
  unsigned char *const master = at->data[FP8OPTIM_MASTER];
  unsigned char *const exp_avg = at->data[FP8OPTIM_EXP_AVG];
  unsigned char *const exp_avg_sq = at->data[FP8OPTIM_EXP_AVG_SQ];
  const int64_t master_bytes = LANES * v_bytes(dtype[FP8OPTIM_MASTER]);
  v_float m[BLOCK_VECTORS];
  v_float v[BLOCK_VECTORS];
  v_float w[BLOCK_VECTORS];
  v_mask m_shrinks[BLOCK_VECTORS] = {0};
  v_load_vectors(gradient_dtype, at->gradient, w, vectors);
  v_load_vectors(dtype[FP8OPTIM_EXP_AVG], exp_avg, m, vectors);
  v_load_vectors(dtype[FP8OPTIM_EXP_AVG_SQ], exp_avg_sq, v, vectors);
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) {
    const v_float g = w[i];
    const v_float root_part = g * constants->exp_avg_sq_gradient;
    const v_float m_gradient = g * constants->exp_avg_gradient;
    if (shrinks) m_shrinks[i] = v_smaller(m_gradient, m[i] * constants->exp_avg_shrink);
    m[i] = v_fma(m[i], constants->exp_avg_keep, m_gradient);
    v[i] = v_fma(v[i], constants->exp_avg_sq_keep, root_part * root_part);
    if (dtype[FP8OPTIM_EXP_AVG_SQ] != FP8CORE_FP32) v[i] = v_positive(v[i], constants->least_exp_avg_sq);
  }
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) w[i] = v_root(v[i]) + constants->eps;
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) {
    w[i] = m[i] / w[i];
    v_raise(&largest[FP8OPTIM_EXP_AVG], m[i]);
    v_raise_positive(&largest[FP8OPTIM_EXP_AVG_SQ], v[i]);
  }
  // Within the bounds from which their scales were chosen.
  if (shrinks)
    v_store_8(dtype[FP8OPTIM_EXP_AVG], exp_avg, m, m_shrinks, vectors);
  else
    v_store_vectors(dtype[FP8OPTIM_EXP_AVG], exp_avg, m, vectors, 1);
  v_store_vectors(dtype[FP8OPTIM_EXP_AVG_SQ], exp_avg_sq, v, vectors, 1);
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) {
    const v_float w_old = v_load_finite(dtype[FP8OPTIM_MASTER], master + i * master_bytes);
    w[i] = v_fma(constants->minus_master_change, w[i], w_old * constants->master_keep);
    v_raise(&largest[FP8OPTIM_MASTER], w[i]);
  }
  if (stochastic) {
    v_bits draws[BLOCK_VECTORS];
    v_draw(job, first_element, draws);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
      v_store_stochastic(dtype[FP8OPTIM_MASTER], master + i * master_bytes, w[i], draws[i]);
  } else {
    v_store_vectors(dtype[FP8OPTIM_MASTER], master, w, vectors, 0);
  }
  if (!with_weight) return;
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) {
    w[i] = v_load_finite(dtype[FP8OPTIM_MASTER], master + i * master_bytes);
    // The product of the two factors may overflow.
    if (v_bytes(dtype[FP8OPTIM_MASTER]) == 1) w[i] = w[i] * constants->weight_load_factor;
    w[i] = w[i] * constants->weight_factor;
  }
  v_store_vectors(dtype[FP8OPTIM_WEIGHT], at->data[FP8OPTIM_WEIGHT], w, vectors, 0);
}

INLINE void advance(update_pointers *at, const fp8core_dtype dtype[FP8OPTIM_PARTS], fp8core_dtype gradient_dtype,
                    int parts, int vectors) {
  at->gradient += vectors * LANES * v_bytes(gradient_dtype);
  for (int part = 0; part < parts; part++) at->data[part] += vectors * LANES * v_bytes(dtype[part]);
}

INLINE void update_run(fp8core_dtype master, fp8core_dtype exp_avg, fp8core_dtype exp_avg_sq,
                       fp8core_dtype gradient_dtype, fp8core_dtype weight, int with_weight, int stochastic, int shrinks,
                       const fp8optim_update_job *job, const void *gradient, void *const data[FP8OPTIM_PARTS],
                       uint64_t first_element, int64_t elements, uint32_t scaled_amax[FP8OPTIM_STATES]) {
  const fp8core_dtype dtype[FP8OPTIM_PARTS] = {master, exp_avg, exp_avg_sq, weight};
  const int parts = with_weight ? FP8OPTIM_PARTS : FP8OPTIM_STATES;
  update_constants constants;
  update_pointers at;
  v_bits largest[FP8OPTIM_STATES];
  for (int part = 0; part < FP8OPTIM_PARTS; part++) at.data[part] = data[part];
  for (int state = 0; state < FP8OPTIM_STATES; state++) largest[state] = v_zero_bits();
  constants.exp_avg_keep = v_splat(job->constants.exp_avg_keep * v_load_factor(exp_avg));
  constants.exp_avg_gradient = v_splat(job->constants.exp_avg_gradient * v_load_factor(gradient_dtype));
  constants.exp_avg_shrink = v_splat(job->constants.exp_avg_shrink * v_load_factor(exp_avg));
  constants.exp_avg_sq_keep = v_splat(job->constants.exp_avg_sq_keep * v_load_factor(exp_avg_sq));
  constants.exp_avg_sq_gradient = v_splat(job->constants.exp_avg_sq_gradient * v_load_factor(gradient_dtype));
  constants.eps = v_splat(job->constants.eps);
  constants.master_keep = v_splat(job->constants.master_keep * v_load_factor(master));
  constants.minus_master_change = v_splat(-job->constants.master_change);
  constants.weight_load_factor = v_splat(v_load_factor(master));
  constants.weight_factor = v_splat(job->constants.weight_factor);
  constants.least_exp_avg_sq = v_splat(fp8core_bits_float(fp8core_decode_bits(exp_avg_sq, 1)));
  at.gradient = gradient;
  int64_t i = 0;
  for (; i + BLOCK_VECTORS * LANES <= elements; i += BLOCK_VECTORS * LANES) {
    update_vectors_at(dtype, gradient_dtype, with_weight, stochastic, shrinks, BLOCK_VECTORS, job, &constants, &at,
                      first_element + (uint64_t)i, largest);
    advance(&at, dtype, gradient_dtype, parts, BLOCK_VECTORS);
  }
  for (; i + LANES <= elements; i += LANES) {
    update_vectors_at(dtype, gradient_dtype, with_weight, stochastic, shrinks, 1, job, &constants, &at,
                      first_element + (uint64_t)i, largest);
    advance(&at, dtype, gradient_dtype, parts, 1);
  }
  if (i < elements) {
    // Zeros beyond the last element stay zeros.
    unsigned char padded[FP8OPTIM_PARTS + 1][LANES * 4] __attribute__((aligned(64))) = {{0}};
    const size_t rest = (size_t)(elements - i);
    const update_pointers copy = {padded[FP8OPTIM_PARTS], {padded[0], padded[1], padded[2], padded[3]}};
    memcpy(padded[FP8OPTIM_PARTS], at.gradient, rest * (size_t)v_bytes(gradient_dtype));
    for (int state = 0; state < FP8OPTIM_STATES; state++)
      memcpy(padded[state], at.data[state], rest * (size_t)v_bytes(dtype[state]));
    update_vectors_at(dtype, gradient_dtype, with_weight, stochastic, shrinks, 1, job, &constants, &copy,
                      first_element + (uint64_t)i, largest);
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
             job->gradient_dtype, job->dtype[FP8OPTIM_WEIGHT], data[FP8OPTIM_WEIGHT] != NULL, job->stochastic,
             v_bytes(job->dtype[FP8OPTIM_EXP_AVG]) == 1 && job->constants.exp_avg_shrink != 0.0f, job, gradient, data,
             first_element, elements, scaled_amax);
}

// The formats of the presets that models are trained with, with the gradients and weights that go with them, have
// loops without a branch.
#if defined(FP8OPTIM_FEW_CASES)
// A compiler that adds checks to every operation takes minutes for all of them.
#  define UPDATE_CASES(X) X(FP16, E4M3, FP16, E4M3, E4M3)
#else
#  define UPDATE_CASES(X)                                                                                              \
    X(FP16, E4M3, FP16, E4M3, E4M3)                                                                                    \
    X(FP16, E4M3, FP16, E4M3, BF16)                                                                                    \
    X(FP16, E4M3, FP16, BF16, E4M3)                                                                                    \
    X(FP16, E4M3, FP16, BF16, BF16)                                                                                    \
    X(FP16, E4M3, FP16, FP32, FP32)                                                                                    \
    X(FP32, FP32, FP32, FP32, FP32)                                                                                    \
    X(FP32, FP32, FP32, FP32, BF16)                                                                                    \
    X(FP32, FP32, FP32, BF16, BF16)                                                                                    \
    X(FP32, FP32, FP32, E4M3, E4M3)
#endif

#define UPDATE_VARIANT(master, exp_avg, exp_avg_sq, gradient_dtype, weight, stochastic, shrinks)                       \
  do {                                                                                                                 \
    if (data[FP8OPTIM_WEIGHT])                                                                                         \
      update_run(FP8CORE_##master, FP8CORE_##exp_avg, FP8CORE_##exp_avg_sq, FP8CORE_##gradient_dtype,                  \
                 FP8CORE_##weight, 1, stochastic, shrinks, job, gradient, data, first_element, elements, scaled_amax); \
    else                                                                                                               \
      update_run(FP8CORE_##master, FP8CORE_##exp_avg, FP8CORE_##exp_avg_sq, FP8CORE_##gradient_dtype,                  \
                 FP8CORE_##weight, 0, stochastic, shrinks, job, gradient, data, first_element, elements, scaled_amax); \
  } while (0)

// An FP32 master neither rounds nor has an exp_avg that shrinks by a rule of its own.
#define UPDATE_FUNCTION(master, exp_avg, exp_avg_sq, gradient_dtype, weight)                                           \
  static __attribute__((noinline)) void update_##master##_##exp_avg##_##exp_avg_sq##_##gradient_dtype##_##weight(      \
    UPDATE_ARGUMENTS) {                                                                                                \
    const int shrinks = v_bytes(FP8CORE_##exp_avg) == 1 && job->constants.exp_avg_shrink != 0.0f;                      \
    const int stochastic = FP8CORE_##master != FP8CORE_FP32 && job->stochastic;                                        \
    if (stochastic && shrinks)                                                                                         \
      UPDATE_VARIANT(master, exp_avg, exp_avg_sq, gradient_dtype, weight, 1, 1);                                       \
    else if (stochastic)                                                                                               \
      UPDATE_VARIANT(master, exp_avg, exp_avg_sq, gradient_dtype, weight, 1, 0);                                       \
    else if (shrinks)                                                                                                  \
      UPDATE_VARIANT(master, exp_avg, exp_avg_sq, gradient_dtype, weight, 0, 1);                                       \
    else                                                                                                               \
      UPDATE_VARIANT(master, exp_avg, exp_avg_sq, gradient_dtype, weight, 0, 0);                                       \
  }
UPDATE_CASES(UPDATE_FUNCTION)

static void update(UPDATE_ARGUMENTS) {
#define UPDATE_CHOICE(master, exp_avg, exp_avg_sq, gradient_format, weight)                                            \
  if (job->dtype[FP8OPTIM_MASTER] == FP8CORE_##master && job->dtype[FP8OPTIM_EXP_AVG] == FP8CORE_##exp_avg &&          \
      job->dtype[FP8OPTIM_EXP_AVG_SQ] == FP8CORE_##exp_avg_sq && job->gradient_dtype == FP8CORE_##gradient_format &&   \
      (!data[FP8OPTIM_WEIGHT] || job->dtype[FP8OPTIM_WEIGHT] == FP8CORE_##weight)) {                                   \
    update_##master##_##exp_avg##_##exp_avg_sq##_##gradient_format##_##weight(job, gradient, data, first_element,      \
                                                                              elements, scaled_amax);                  \
    return;                                                                                                            \
  }
  UPDATE_CASES(UPDATE_CHOICE)
  update_any(job, gradient, data, first_element, elements, scaled_amax);
}

typedef struct measure_sums {
  v_float narrow[FP8OPTIM_LANES / LANES];
  v_wide wide[FP8OPTIM_LANES / LANES];
  v_bits largest;
  v_codes largest_code;
} measure_sums;

// FP8OPTIM_LANES elements of a chunk. The largest 8-bit element is that with the largest code, in which infinities and
// NaNs show; their squares do not matter then.
INLINE void measure_lanes(fp8core_dtype dtype, const unsigned char *data, measure_sums *sums) {
  const int by_code = v_bytes(dtype) == 1;
  if (by_code) v_raise_codes(&sums->largest_code, data);
  for (int i = 0; i < FP8OPTIM_LANES / LANES; i++) {
    const unsigned char *from = data + i * LANES * v_bytes(dtype);
    const v_float value = by_code ? v_load_finite(dtype, from) : v_load(dtype, from);
    if (!by_code) v_raise(&sums->largest, value);
    // Exact products: a fused addition rounds as a separate one.
    if (fp8optim_squares_in_fp32(dtype))
      sums->narrow[i] = v_fma(value, value, sums->narrow[i]);
    else
      sums->wide[i] = v_add_squares(sums->wide[i], value);
  }
}

INLINE double measure_run(fp8core_dtype dtype, const unsigned char *data, int64_t elements, uint32_t *amax) {
  const double factor = (double)v_load_factor(dtype);
  measure_sums sums;
  sums.largest = v_zero_bits();
  sums.largest_code = v_no_codes();
  for (int i = 0; i < FP8OPTIM_LANES / LANES; i++) {
    sums.narrow[i] = v_splat(0.0f);
    sums.wide[i] = v_wide_zero();
  }
  int64_t i = 0;
  for (; i + FP8OPTIM_LANES <= elements; i += FP8OPTIM_LANES) measure_lanes(dtype, data + i * v_bytes(dtype), &sums);
  if (i < elements) {
    unsigned char padded[FP8OPTIM_LANES * 4] = {0};
    memcpy(padded, data + i * v_bytes(dtype), (size_t)((elements - i) * v_bytes(dtype)));
    measure_lanes(dtype, padded, &sums);
  }
  const uint32_t found = v_bytes(dtype) == 1
                           ? fp8core_decode_bits(dtype, v_largest_code(sums.largest_code)) & FP8CORE_F32_MAGNITUDE
                           : v_largest(sums.largest);
  if (found > *amax) *amax = found;
  double sum = 0.0;
  for (int vector = 0; vector < FP8OPTIM_LANES / LANES; vector++)
    for (int lane = 0; lane < LANES; lane++)
      sum += fp8optim_squares_in_fp32(dtype) ? (double)sums.narrow[vector][lane] * factor * factor
                                             : v_wide_lane(&sums.wide[vector], lane);
  return sum;
}

static double measure(fp8core_dtype dtype, const void *data, int64_t elements, uint32_t *amax) {
  switch (dtype) {
  case FP8CORE_E4M3: return measure_run(FP8CORE_E4M3, data, elements, amax);
  case FP8CORE_E5M2: return measure_run(FP8CORE_E5M2, data, elements, amax);
  case FP8CORE_BF16: return measure_run(FP8CORE_BF16, data, elements, amax);
  case FP8CORE_FP16: return measure_run(FP8CORE_FP16, data, elements, amax);
  case FP8CORE_FP32: break;
  }
  return measure_run(FP8CORE_FP32, data, elements, amax);
}

#endif
