// Scaling states on the device: the rules of scaling_rules.h, with the search of the history shared by a warp.
#include "kernels.h"
#include "scaling_rules.h"
#include "platform.cuh"

namespace {

constexpr int threads = 128;

struct state_arguments {
  fp8core_scaling_arrays state;
  int64_t index;
  int only_without_history;
};

static __device__ __forceinline__ bool has_history(const state_arguments &job) {
  return job.only_without_history && job.state.history_steps[job.index] > 0;
}

static __global__ void calibrate_begin_kernel(const state_arguments job) {
  if (!has_history(job)) job.state.measured[job.index] = 0.0f;
}

static __global__ void calibrate_end_kernel(const state_arguments job) {
  if (!has_history(job)) fp8core_calibrate_rule(&job.state, job.index);
}

// fp8core_update_rule() by a warp a tensor.
static __global__ __launch_bounds__(threads) void update_kernel(const state_arguments job) {
  const fp8core_scaling_arrays &state = job.state;
  const unsigned lane = threadIdx.x % FP8CORE_WARP;
  const int64_t first = (int64_t)blockIdx.x * (threads / FP8CORE_WARP) + threadIdx.x / FP8CORE_WARP;
  for (int64_t index = first; index < state.tensors; index += (int64_t)gridDim.x * (threads / FP8CORE_WARP)) {
    uint32_t pushed = 0;
    if (lane == 0) pushed = (uint32_t)fp8core_push_rule(&state, index);
    // What the first lane wrote is read by all.
    __syncwarp();
    if (!fp8core_warp_max(pushed)) continue;
    const uint32_t largest = fp8core_warp_max(fp8core_search_rule(&state, index, (int)lane, FP8CORE_WARP));
    if (lane == 0) fp8core_rescale_rule(&state, index, largest);
  }
}

} // namespace

extern "C" int fp8core_cuda_launch_calibrate_begin(const fp8core_cuda_target *target,
                                                   const fp8core_scaling_arrays *arrays, int64_t index,
                                                   int only_without_history) {
  const state_arguments job = {*arrays, index, only_without_history};
  return fp8core_launch(calibrate_begin_kernel, dim3(1, 1, 1), dim3(1, 1, 1), target->stream, job);
}

extern "C" int fp8core_cuda_launch_calibrate_end(const fp8core_cuda_target *target,
                                                 const fp8core_scaling_arrays *arrays, int64_t index,
                                                 int only_without_history) {
  const state_arguments job = {*arrays, index, only_without_history};
  return fp8core_launch(calibrate_end_kernel, dim3(1, 1, 1), dim3(1, 1, 1), target->stream, job);
}

extern "C" int fp8core_cuda_launch_scaling_update(const fp8core_cuda_target *target,
                                                  const fp8core_scaling_arrays *arrays) {
  const state_arguments job = {*arrays, 0, 0};
  const int64_t warps = threads / FP8CORE_WARP;
  int64_t blocks = (arrays->tensors + warps - 1) / warps;
  const int64_t most = (int64_t)target->multiprocessors * 16;
  blocks = blocks > most ? most : blocks;
  return fp8core_launch(update_kernel, dim3((unsigned)blocks, 1, 1), dim3(threads, 1, 1), target->stream, job);
}
