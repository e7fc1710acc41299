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

static void measure(fp8core_dtype dtype, float scale_inverse, const void *data, int64_t elements,
                    double sums[FP8OPTIM_LANES], uint32_t *amax) {
  for (int64_t i = 0; i < elements; i++) {
    const float value = fp8optim_load(dtype, data, i) * scale_inverse;
    fp8optim_raise(amax, value);
    sums[i % FP8OPTIM_LANES] += (double)value * (double)value;
  }
}

const fp8optim_kernels fp8optim_kernels_scalar = {update, measure};
