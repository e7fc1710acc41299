/** \file
 * Draws a token from logits: temperature, then the most probable ones by number (top-k) and by probability (top-p;
 * Holtzman et al., "The curious case of neural text degeneration", 2020).
 */
#ifndef FP8LM_SAMPLER_H
#define FP8LM_SAMPLER_H

#include <stdint.h>

#include "fp8core/status.h"

typedef struct fp8lm_sampler_options {
  /** 0: always the most probable token, the first of equals. */
  double temperature;
  /** 0: any number. */
  int64_t top_k;
  /** The fewest tokens that together have this probability; 1: all. */
  double top_p;
  uint64_t seed;
} fp8lm_sampler_options;

typedef struct fp8lm_sampler fp8lm_sampler;

fp8core_status fp8lm_sampler_create(fp8lm_sampler **sampler, int vocabulary, const fp8lm_sampler_options *options);
void fp8lm_sampler_destroy(fp8lm_sampler **sampler);

/**
 * The next token: a function of the logits, the options, and how many were drawn before.
 * \return -1 where no logit is a number.
 */
int32_t fp8lm_sampler_draw(fp8lm_sampler *sampler, const float *logits);

#endif
