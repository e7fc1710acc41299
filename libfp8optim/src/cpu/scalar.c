#include "kernels.h"

static void update(const fp8optim_update_job *job, const void *gradient, void *const data[FP8OPTIM_PARTS],
                   uint64_t first_element, int64_t elements, uint32_t scaled_amax[FP8OPTIM_STATES]) {
  for (int64_t i = 0; i < elements; i++) {
    const uint32_t draw =
      job->stochastic ? fp8core_draw(job->seed, job->tensor_id, job->step, first_element + (uint64_t)i) : 0;
    fp8optim_update_element(job->dtype, data, job->gradient_dtype, gradient, i, &job->constants, job->stochastic, draw,
                            scaled_amax);
  }
}

static double measure(fp8core_dtype dtype, const void *data, int64_t elements, uint32_t *amax) {
  const int in_fp32 = fp8optim_squares_in_fp32(dtype);
  float narrow[FP8OPTIM_LANES] = {0.0f};
  double wide[FP8OPTIM_LANES] = {0.0};
  double sum = 0.0;
  for (int64_t i = 0; i < elements; i++) {
    const float value = fp8optim_load(dtype, data, i);
    fp8optim_raise(amax, value);
    if (in_fp32)
      narrow[i % FP8OPTIM_LANES] += value * value;
    else
      wide[i % FP8OPTIM_LANES] += (double)value * (double)value;
  }
  for (int lane = 0; lane < FP8OPTIM_LANES; lane++) sum += in_fp32 ? (double)narrow[lane] : wide[lane];
  return sum;
}

const fp8optim_kernels fp8optim_kernels_scalar = {update, measure};
