// Launchers of the CUDA kernels, for step.c. Each puts its work on the stream and returns a cudaError_t as an int; none
// waits, none allocates.
#ifndef FP8OPTIM_CUDA_KERNELS_H
#define FP8OPTIM_CUDA_KERNELS_H

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

// One step of an optimizer; passed by value to its kernels.
typedef struct fp8optim_cuda_step {
  fp8optim_tables tables;
  int64_t tensor_count;
  int64_t chunk_count;
  int group_count;
  // Of all tensors.
  fp8core_dtype state_dtype[FP8OPTIM_STATES];
  float max_norm;
  float loss_scale;
  int stochastic;
  uint64_t seed;
} fp8optim_cuda_step;

// Words that one upload carries: they travel as the kernel's argument, at most 4 KiB.
#define FP8OPTIM_CUDA_UPLOAD_WORDS 1000

// Copies host words, which may change as soon as it returns, to device memory.
int fp8optim_cuda_launch_upload(void *stream, void *destination, const uint32_t *words, int count);

// The parts of a step, in their order. chunk_count is positive where a launcher goes over chunks.
int fp8optim_cuda_launch_measure(void *stream, const fp8optim_cuda_step *step);
int fp8optim_cuda_launch_gather(void *stream, const fp8optim_cuda_step *step);
int fp8optim_cuda_launch_begin(void *stream, const fp8optim_cuda_step *step);
int fp8optim_cuda_launch_plan(void *stream, const fp8optim_cuda_step *step);
int fp8optim_cuda_launch_update(void *stream, const fp8optim_cuda_step *step);
int fp8optim_cuda_launch_end(void *stream, const fp8optim_cuda_step *step);

// One tensor that becomes a state, or a state that becomes a weight, outside of a step.
typedef struct fp8optim_cuda_setting {
  fp8optim_tensor *tensor;
  fp8optim_state state;
  fp8optim_gradient source;
  int64_t elements;
  int64_t row_length;
  float scale;
  uint32_t largest;
  // Raised from zeros.
  fp8optim_survey *found;
} fp8optim_cuda_setting;

int fp8optim_cuda_launch_survey(void *stream, const fp8optim_cuda_setting *setting, int multiprocessors);
int fp8optim_cuda_launch_set_state(void *stream, const fp8optim_cuda_setting *setting, int multiprocessors);
int fp8optim_cuda_launch_choose_weight_scale(void *stream, const fp8optim_cuda_setting *setting);
int fp8optim_cuda_launch_make_weight(void *stream, const fp8optim_cuda_setting *setting, int multiprocessors);

#ifdef __cplusplus
}
#endif

#endif
