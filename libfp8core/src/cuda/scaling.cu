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
    const float amax = state.amax[index];
    const uint64_t steps = state.history_steps[index];
    const bool nonfinite = (fp8core_float_bits(amax) & FP8CORE_F32_MAGNITUDE) >= FP8CORE_F32_INFINITY;
    const bool pushes = !nonfinite && amax > 0.0f && state.delayed;
    float *history = state.history + index * state.history_length;
    const int64_t position = state.delayed ? (int64_t)(steps % (uint64_t)state.history_length) : 0;
    // Amaxes of the history are positive and finite, so that their bits are ordered as they are.
    uint32_t largest = fp8core_float_bits(amax);
    if (pushes && !state.most_recent) {
      const int64_t kept = steps < (uint64_t)state.history_length ? (int64_t)steps : (int64_t)state.history_length;
      for (int64_t i = lane; i < kept; i += FP8CORE_WARP) {
        const uint32_t bits = i == position ? 0 : fp8core_float_bits(history[i]);
        largest = bits > largest ? bits : largest;
      }
    }
    largest = fp8core_warp_max(largest);
    __syncwarp();
    if (lane != 0) continue;
    state.amax[index] = 0.0f;
    if (nonfinite) state.nonfinite_steps[index]++;
    if (!pushes) continue;
    history[position] = amax;
    state.history_steps[index] = steps + 1;
    fp8core_store_scale(&state, index,
                        fp8core_scale_rule((fp8core_dtype)state.dtypes[index], fp8core_bits_float(largest),
                                           state.margin, state.power_of_two, state.scale[index]));
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
