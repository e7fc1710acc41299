// A decoder-only Transformer in FP64, one token at a time, as its papers define it: nothing of it is shared with the
// library but the shape, the names of the parameters and the draws of dropout.
#ifndef FP8_TEST_GPT_REFERENCE_H
#define FP8_TEST_GPT_REFERENCE_H

#include "fp8gpt/model.h"

typedef struct reference {
  fp8gpt_config config;
  uint64_t seed;
  int64_t count;
  // One array a parameter, in the model's order.
  double **values;
  int64_t *elements;
  // By name; the position, output and bias ones may be -1.
  int token;
  int position;
  int output;
  int final_norm[2];
  // layers of [norm 1, qkv, projection, norm 2, fc1, fc2] of [weight, bias].
  int (*layers)[6][2];
} reference;

// With the weights that the model has now, as the values they stand for.
reference *reference_create(const fp8gpt_model *model, uint64_t seed);
void reference_destroy(reference *freed);

// Mean loss of the targets that count. Dropout as in the training pass of this step and micro-batch, or none with step
// -1. logits, if not NULL, receives [sequences, length, vocabulary].
double reference_loss(const reference *model, const fp8gpt_batch *batch, int64_t step, int micro_batch, double *logits);

#endif
