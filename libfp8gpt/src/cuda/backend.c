// The CUDA backend: puts the kernels on the context's stream.
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "fp8core/cuda.h"
#include "kernels.h"
#include "state.h"

static void *stream_of(const fp8gpt_model *model) { return fp8gpt_cuda_state_of(model)->stream; }

fp8core_status fp8gpt_cuda_check(int code, const char *what) {
  const cudaError_t error = (cudaError_t)code;
  if (error == cudaSuccess) return FP8CORE_OK;
  // The runtime keeps the last error for whoever asks next; it has been reported.
  (void)cudaGetLastError();
  return fp8core_set_last_error(error == cudaErrorMemoryAllocation ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_DEVICE,
                                "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// With the context's device current for as long as the call takes: a caller's choice of device is not ours to change.
#define ON_DEVICE(model, call)                                                                                         \
  do {                                                                                                                 \
    const int device = fp8core_context_device((model)->context).index;                                                 \
    int previous;                                                                                                      \
    FP8GPT_TRY(fp8gpt_cuda_check((int)cudaGetDevice(&previous), "cudaGetDevice"));                                     \
    if (previous != device) FP8GPT_TRY(fp8gpt_cuda_check((int)cudaSetDevice(device), "cudaSetDevice"));                \
    const fp8core_status call_status = (call);                                                                         \
    if (previous != device) (void)cudaSetDevice(previous);                                                             \
    return call_status;                                                                                                \
  } while (0)

#define LAUNCH(model, launch, what) ON_DEVICE(model, fp8gpt_cuda_check(launch, what))

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Partial sums of the columns of norms and biases, or what attention's backward pass keeps for each query, or cuDNN's
// workspace.
static int64_t scratch_bytes(const fp8gpt_model *model) {
  const fp8gpt_config *config = &model->config;
  const int64_t qkv = (config->heads + 2 * (int64_t)config->kv_heads) * (config->hidden / config->heads);
  const int64_t fc1 = (config->activation == FP8GPT_SWIGLU ? 2 : 1) * (int64_t)config->ffn_hidden;
  const int64_t widest = larger(larger(qkv, fc1), 2 * (int64_t)config->hidden);
  const fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(model);
  const int64_t own =
    larger(FP8GPT_CUDA_REDUCTION_BLOCKS * widest, model->rows * config->heads) * (int64_t)sizeof(float);
  return state->cudnn ? larger(own, fp8gpt_cudnn_workspace_bytes(state->cudnn, state->cudnn_backward)) : own;
}

static fp8core_status embed(fp8gpt_model *model, const fp8gpt_embedding *job) {
  LAUNCH(model, fp8gpt_cuda_launch_embed(stream_of(model), job), "launch of embedding");
}

static fp8core_status embed_backward(fp8gpt_model *model, const fp8gpt_embedding_backward *job) {
  LAUNCH(model, fp8gpt_cuda_launch_embed_backward(stream_of(model), job), "launch of embedding's backward pass");
}

static fp8core_status norm(fp8gpt_model *model, const fp8gpt_norm *job) {
  LAUNCH(model, fp8gpt_cuda_launch_norm(stream_of(model), job), "launch of norm");
}

static fp8core_status norm_backward(fp8gpt_model *model, const fp8gpt_norm_backward *job) {
  LAUNCH(model, fp8gpt_cuda_launch_norm_backward(stream_of(model), job, model->scratch),
         "launch of norm's backward pass");
}

static fp8core_status rotate(fp8gpt_model *model, const fp8gpt_rotation *job) {
  LAUNCH(model, fp8gpt_cuda_launch_rotate(stream_of(model), job), "launch of rotation");
}

static fp8core_status prepare(fp8gpt_model *model) { ON_DEVICE(model, fp8gpt_cuda_choose_attention(model)); }

static void destroy(fp8gpt_model *model) {
  fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(model);
  if (state) fp8gpt_cudnn_close(&state->cudnn);
  free(state);
  model->backend_state = NULL;
}

static const char *attention_by(const fp8gpt_model *model) { return fp8gpt_cuda_state_of(model)->attention; }

static fp8core_status attention(fp8gpt_model *model, const fp8gpt_attention *job) {
  const fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(model);
  if (fp8gpt_cuda_is_planned(model, job)) ON_DEVICE(model, fp8gpt_cudnn_forward(state->cudnn, job, model->scratch));
  LAUNCH(model, fp8gpt_cuda_launch_attention(stream_of(model), job), "launch of attention");
}

static fp8core_status attention_backward(fp8gpt_model *model, const fp8gpt_attention *job) {
  const fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(model);
  if (fp8gpt_cuda_is_planned(model, job) && state->cudnn_backward)
    ON_DEVICE(model, fp8gpt_cudnn_backward(state->cudnn, job, model->scratch));
  LAUNCH(model, fp8gpt_cuda_launch_attention_backward(stream_of(model), job, model->scratch),
         "launch of attention's backward pass");
}

static fp8core_status attention_cached(fp8gpt_model *model, const fp8gpt_attention_cached *job) {
  LAUNCH(model, fp8gpt_cuda_launch_attention_cached(stream_of(model), job), "launch of attention with a cache");
}

static fp8core_status swiglu(fp8gpt_model *model, const fp8gpt_swiglu *job) {
  LAUNCH(model, fp8gpt_cuda_launch_swiglu(stream_of(model), job), "launch of SwiGLU");
}

static fp8core_status swiglu_backward(fp8gpt_model *model, const fp8gpt_swiglu *job) {
  LAUNCH(model, fp8gpt_cuda_launch_swiglu_backward(stream_of(model), job), "launch of SwiGLU's backward pass");
}

static fp8core_status cross_entropy(fp8gpt_model *model, const fp8gpt_cross_entropy *job) {
  LAUNCH(model, fp8gpt_cuda_launch_cross_entropy(stream_of(model), job), "launch of cross-entropy");
}

static fp8core_status column_sums(fp8gpt_model *model, const fp8gpt_column_sums *job) {
  LAUNCH(model, fp8gpt_cuda_launch_column_sums(stream_of(model), job, model->scratch), "launch of sums of columns");
}

static fp8core_status add(fp8gpt_model *model, const float *values, int64_t count, float *gradient, int first) {
  LAUNCH(model, fp8gpt_cuda_launch_add(stream_of(model), values, count, gradient, first), "launch of a sum of vectors");
}

static const fp8gpt_backend cuda_backend = {
  // Rows enough to fill a GPU; at a vocabulary of 50,257 logits and their gradients take 0.3 GB.
  .logit_rows = 1024,
  .prepare = prepare,
  .destroy = destroy,
  .attention_by = attention_by,
  .scratch_bytes = scratch_bytes,
  .embed = embed,
  .embed_backward = embed_backward,
  .norm = norm,
  .norm_backward = norm_backward,
  .rotate = rotate,
  .attention = attention,
  .attention_backward = attention_backward,
  .attention_cached = attention_cached,
  .swiglu = swiglu,
  .swiglu_backward = swiglu_backward,
  .cross_entropy = cross_entropy,
  .column_sums = column_sums,
  .add = add,
};

fp8core_status fp8gpt_cuda_init(fp8gpt_model *model) {
  fp8gpt_cuda_state *state = calloc(1, sizeof(*state));
  model->backend = &cuda_backend;
  model->backend_state = state;
  if (!state) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a model's state on CUDA");
  return fp8core_cuda_stream(model->context, &state->stream);
}
