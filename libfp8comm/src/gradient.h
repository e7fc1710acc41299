// What the files of the gradient all-reduce share.
#ifndef FP8COMM_SRC_GRADIENT_H
#define FP8COMM_SRC_GRADIENT_H

#include "fp8comm/gradient.h"

typedef struct fp8comm_gradient_tensor {
  int64_t elements;
  // Of its first element in the bucket.
  size_t offset;
  // The rank that its mean is for; -1: all.
  int owner;
  // The state.
  double mu;
  // Of the step in progress. The tensors point to the scales here.
  fp8core_tensor input;
  fp8core_tensor output;
  float input_scale_inverse;
  // The input's own, wherever it lies.
  const float *given_scale_inverse;
  float sum_scale;
  float sum_scale_inverse;
  float mean_scale_inverse;
  float output_scale;
  float output_scale_inverse;
  fp8comm_gradient_statistics statistics;
} fp8comm_gradient_tensor;

fp8comm_gradient_tensor *fp8comm_gradient_tensors(const fp8comm_gradient_reducer *reducer, int64_t *tensor_count);
// Limits of mu, and whether a step is in progress.
void fp8comm_gradient_limits(const fp8comm_gradient_reducer *reducer, double *least, double *most, int *busy);

#endif
