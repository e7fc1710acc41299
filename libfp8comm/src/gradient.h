// What the gradient all-reduce lets its saved states see: tensors. gradient_internal.h has the rest.
#ifndef FP8COMM_SRC_GRADIENT_H
#define FP8COMM_SRC_GRADIENT_H

#include "fp8comm/gradient.h"

typedef struct fp8comm_gradient_tensor {
  int64_t elements;
  // Of its first element in the bucket.
  size_t offset;
  // The rank that its mean is for; -1: all.
  int owner;
  // What casts of its values have lost, in BF16, in the memory that the values lie in; NULL: nobody keeps it.
  uint16_t *lost;
  // The state: mu, and the amaxes of the last step's gradients and mean; negative: there was none.
  double mu;
  float last_amax;
  float last_mean_amax;
  // Of the step in progress. The tensors point to the scales here.
  fp8core_tensor input;
  fp8core_tensor output;
  float input_scale_inverse;
  // The input's own, wherever it lies.
  const float *given_scale_inverse;
  // What the caller says of the input; NULL: it is measured.
  const float *known_amax;
  float known_amax_value;
  // FP32 bits of the largest magnitude among the sums of this rank's part.
  uint32_t largest_sum;
  // Of the input, as its cast has found it.
  float found_amax;
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
// Sets the errors of error_feedback to 0.
fp8core_status fp8comm_gradient_forget(fp8comm_gradient_reducer *reducer);

#endif
