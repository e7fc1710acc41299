// States that are set from outside and weights that are made outside of a step: element by element, by the rules.
#include "kernels.h"
#include "values.cuh"

namespace {

constexpr int threads = 256;

static __device__ __forceinline__ int64_t first_index(void) { return (int64_t)blockIdx.x * threads + threadIdx.x; }
static __device__ __forceinline__ int64_t index_step(void) { return (int64_t)gridDim.x * threads; }

static __device__ __forceinline__ float source_value(const fp8optim_cuda_setting &job, int64_t index,
                                                     float scale_inverse) {
  const int64_t place = index / job.row_length * job.source.row_stride + index % job.row_length;
  return fp8optim_load(job.source.dtype, job.source.data, place) * scale_inverse;
}

static __global__ __launch_bounds__(threads) void survey_kernel(const fp8optim_cuda_setting job) {
  const float scale_inverse = fp8optim_scale_inverse_of(job.source);
  uint32_t largest = 0, negative = 0;
  for (int64_t i = first_index(); i < job.elements; i += index_step()) {
    const float value = source_value(job, i, scale_inverse);
    fp8optim_raise(&largest, value);
    if (value < 0.0f) negative = 1;
  }
  largest = fp8core_warp_max(largest);
  negative = fp8core_warp_max(negative);
  if (threadIdx.x % FP8CORE_WARP != 0) return;
  if (largest) (void)atomicMax((int *)&job.found->largest, (int)largest);
  if (negative) (void)atomicMax(&job.found->negative, 1);
}

static __global__ __launch_bounds__(threads) void set_state_kernel(const fp8optim_cuda_setting job) {
  const float scale_inverse = fp8optim_scale_inverse_of(job.source);
  const fp8core_dtype dtype = job.tensor->dtype[job.state];
  void *data = job.tensor->data[job.state];
  for (int64_t i = first_index(); i < job.elements; i += index_step()) {
    const float value = source_value(job, i, scale_inverse);
    fp8optim_store_code(dtype, data, i, fp8optim_set_code(dtype, job.state, value, job.scale));
  }
  // No block reads what this writes.
  if (blockIdx.x == 0 && threadIdx.x == 0) fp8optim_set_rule(job.tensor, job.state, job.scale, job.largest);
}

static __global__ void choose_weight_scale_kernel(const fp8optim_cuda_setting job) {
  fp8optim_weight_scale_rule(job.tensor);
}

static __global__ __launch_bounds__(threads) void make_weight_kernel(const fp8optim_cuda_setting job) {
  const fp8optim_tensor *tensor = job.tensor;
  const float factor = fp8optim_weight_factor(tensor->scale[FP8OPTIM_MASTER], tensor->scale[FP8OPTIM_WEIGHT]);
  for (int64_t i = first_index(); i < job.elements; i += index_step()) {
    const uint32_t master = fp8optim_load_code(tensor->dtype[FP8OPTIM_MASTER], tensor->data[FP8OPTIM_MASTER], i);
    fp8optim_store_code(tensor->dtype[FP8OPTIM_WEIGHT], tensor->data[FP8OPTIM_WEIGHT], i,
                        fp8optim_weight_code(tensor->dtype, master, factor));
  }
}

int launch(void (*kernel)(const fp8optim_cuda_setting), void *stream, const fp8optim_cuda_setting *setting,
           int multiprocessors) {
  // What is resident at once.
  const int64_t most = (int64_t)multiprocessors * 8;
  const int64_t blocks = (setting->elements + threads - 1) / threads;
  return fp8core_launch(kernel, dim3((unsigned)(blocks < most ? blocks : most), 1, 1), dim3(threads, 1, 1), stream,
                        *setting);
}

} // namespace

extern "C" int fp8optim_cuda_launch_survey(void *stream, const fp8optim_cuda_setting *setting, int multiprocessors) {
  return launch(survey_kernel, stream, setting, multiprocessors);
}

extern "C" int fp8optim_cuda_launch_set_state(void *stream, const fp8optim_cuda_setting *setting, int multiprocessors) {
  return launch(set_state_kernel, stream, setting, multiprocessors);
}

extern "C" int fp8optim_cuda_launch_choose_weight_scale(void *stream, const fp8optim_cuda_setting *setting) {
  return fp8core_launch(choose_weight_scale_kernel, dim3(1, 1, 1), dim3(1, 1, 1), stream, *setting);
}

extern "C" int fp8optim_cuda_launch_make_weight(void *stream, const fp8optim_cuda_setting *setting,
                                                int multiprocessors) {
  return launch(make_weight_kernel, stream, setting, multiprocessors);
}
