#include "sampler.h"

#include <math.h>
#include <stdlib.h>

#include "fp8core/cast.h"

typedef struct candidate {
  float logit;
  int32_t token;
  double probability;
} candidate;

struct fp8lm_sampler {
  fp8lm_sampler_options options;
  int vocabulary;
  uint64_t drawn;
  candidate *candidates;
};

fp8core_status fp8lm_sampler_create(fp8lm_sampler **sampler, int vocabulary, const fp8lm_sampler_options *options) {
  fp8lm_sampler *created = calloc(1, sizeof(*created));
  *sampler = NULL;
  if (created) created->candidates = calloc((size_t)vocabulary, sizeof(*created->candidates));
  if (!created || !created->candidates) {
    free(created);
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a sampler of %d tokens", vocabulary);
  }
  created->options = *options;
  created->vocabulary = vocabulary;
  *sampler = created;
  return FP8CORE_OK;
}

void fp8lm_sampler_destroy(fp8lm_sampler **sampler) {
  if (!*sampler) return;
  free((*sampler)->candidates);
  free(*sampler);
  *sampler = NULL;
}

// The most probable first; of equals, the first token.
static int compare(const void *one, const void *other) {
  const candidate *left = one;
  const candidate *right = other;
  if (left->logit != right->logit) return left->logit > right->logit ? -1 : 1;
  return (left->token > right->token) - (left->token < right->token);
}

// 53 bits of draw number `drawn`, in [0, 1).
static double draw(fp8lm_sampler *sampler) {
  const uint32_t counter[4] = {(uint32_t)sampler->drawn, (uint32_t)(sampler->drawn >> 32), 0, 0};
  const uint32_t key[2] = {(uint32_t)sampler->options.seed, (uint32_t)(sampler->options.seed >> 32)};
  uint32_t draws[4];
  fp8core_philox(counter, key, draws);
  sampler->drawn++;
  return (double)(((uint64_t)draws[0] << 32 | draws[1]) >> 11) * 0x1p-53;
}

int32_t fp8lm_sampler_draw(fp8lm_sampler *sampler, const float *logits) {
  candidate *candidates = sampler->candidates;
  int count = 0;
  for (int i = 0; i < sampler->vocabulary; i++) {
    if (isnan(logits[i])) continue;
    candidates[count].logit = logits[i];
    candidates[count++].token = i;
  }
  if (count == 0) return -1;
  qsort(candidates, (size_t)count, sizeof(*candidates), compare);
  if (sampler->options.temperature <= 0.0) return candidates[0].token;
  if (sampler->options.top_k > 0 && sampler->options.top_k < count) count = (int)sampler->options.top_k;
  double sum = 0.0;
  for (int i = 0; i < count; i++) {
    // An infinite difference of equals would not be a number.
    const double below =
      candidates[i].logit == candidates[0].logit ? 0.0 : (double)candidates[i].logit - (double)candidates[0].logit;
    candidates[i].probability = exp(below / sampler->options.temperature);
    sum += candidates[i].probability;
  }
  double kept = 0.0;
  int nucleus = 0;
  while (nucleus < count && kept < sampler->options.top_p * sum) kept += candidates[nucleus++].probability;
  if (nucleus == 0) kept = candidates[nucleus++].probability;
  double rest = draw(sampler) * kept;
  for (int i = 0; i < nucleus; i++) {
    rest -= candidates[i].probability;
    if (rest < 0.0) return candidates[i].token;
  }
  return candidates[nucleus - 1].token;
}
