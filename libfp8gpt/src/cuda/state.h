// What a model on CUDA has of its own (model->backend_state).
#ifndef FP8GPT_CUDA_STATE_H
#define FP8GPT_CUDA_STATE_H

#include <cuda_runtime_api.h>

#include "cudnn_attention.h"
#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fp8gpt_cuda_state {
  // The context's.
  void *stream;
  // With plans for whole batches; NULL: the own kernels compute attention.
  fp8gpt_cudnn *cudnn;
  // The backward pass too.
  int cudnn_backward;
  // fp8gpt_model_attention()
  char attention[384];
} fp8gpt_cuda_state;

static inline fp8gpt_cuda_state *fp8gpt_cuda_state_of(const fp8gpt_model *model) { return model->backend_state; }

// A cudaError_t as a status, with a message that begins with `what`.
fp8core_status fp8gpt_cuda_check(int error, const char *what);

// Decides what computes attention in whole batches, by FP8GPT_ATTENTION, and what cuDNN can do and does right
// (attention_choice.c). The context's device is current.
fp8core_status fp8gpt_cuda_choose_attention(fp8gpt_model *model);

// Passes over batches of other shapes are the own kernels'.
static inline int fp8gpt_cuda_is_planned(const fp8gpt_model *model, const fp8gpt_attention *job) {
  return fp8gpt_cuda_state_of(model)->cudnn && job->sequences == model->options.batch &&
         job->length == model->config.sequence;
}

#ifdef __cplusplus
}
#endif

#endif
