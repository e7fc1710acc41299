#include "fake_cudnn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cudnn_attention.h"
#include "cuda/kernels.h"
#include "internal.h"

struct fp8gpt_cudnn {
  void *stream;
  fp8gpt_attention forward;
  fp8gpt_attention backward;
};

fake_cudnn_state fake_cudnn;

static fp8core_status refuse(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuDNN: %s is refused", what);
}

fp8core_status fp8gpt_cudnn_open(fp8gpt_cudnn **opened, void *stream, int capability, const char *properties) {
  *opened = NULL;
  if (properties) return refuse("a GPU that is not there");
  if (fake_cudnn.fault == FAKE_CUDNN_ABSENT)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuDNN (played) cannot be loaded");
  fake_cudnn.capability = capability;
  fake_cudnn.open++;
  *opened = calloc(1, sizeof(**opened));
  if (!*opened) abort();
  (*opened)->stream = stream;
  return FP8CORE_OK;
}

void fp8gpt_cudnn_close(fp8gpt_cudnn **closed) {
  if (*closed) fake_cudnn.open--;
  free(*closed);
  *closed = NULL;
}

const char *fp8gpt_cudnn_version(const fp8gpt_cudnn *cudnn) {
  (void)cudnn;
  return "9.99.0";
}

fp8core_status fp8gpt_cudnn_plan_forward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape) {
  if (fake_cudnn.fault == FAKE_CUDNN_NO_FORWARD) return refuse("attention");
  cudnn->forward = *shape;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_cudnn_plan_backward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape, int64_t most_bytes) {
  if (fake_cudnn.fault == FAKE_CUDNN_NO_BACKWARD) return refuse("attention's backward pass");
  if (fake_cudnn.workspace_bytes > most_bytes) return refuse("a large workspace");
  cudnn->backward = *shape;
  return FP8CORE_OK;
}

int64_t fp8gpt_cudnn_workspace_bytes(const fp8gpt_cudnn *cudnn, int backward) {
  // Our kernels want a float for each query of each head.
  const fp8gpt_attention *shape = &cudnn->backward;
  const int64_t floats = shape->sequences * shape->length * shape->heads;
  return backward ? fake_cudnn.workspace_bytes + floats * (int64_t)sizeof(float) : 0;
}

static int is_shape(const fp8gpt_attention *job, const fp8gpt_attention *shape) {
  return job->dtype == shape->dtype && job->sequences == shape->sequences && job->length == shape->length &&
         job->heads == shape->heads && job->kv_heads == shape->kv_heads && job->head_dim == shape->head_dim;
}

static void scale_bf16(void *data, int64_t at, float factor) {
  uint16_t *code = (uint16_t *)data + at;
  *code = (uint16_t)fp8core_encode(FP8CORE_BF16, factor * fp8core_decode(FP8CORE_BF16, *code), 0);
}

fp8core_status fp8gpt_cudnn_forward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job, void *workspace) {
  (void)workspace;
  if (!is_shape(job, &cudnn->forward)) return refuse("a shape that was not planned");
  fake_cudnn.forwards++;
  if (fake_cudnn.fault == FAKE_CUDNN_IDLE_FORWARD) return FP8CORE_OK;
  if (fake_cudnn.fault == FAKE_CUDNN_FAILING_FORWARD)
    return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "cuDNN: attention: a launch failed");
  if (fp8gpt_cuda_launch_attention(cudnn->stream, job) != 0) abort();
  const int64_t floats = job->sequences * job->length * job->heads;
  if (fake_cudnn.fault == FAKE_CUDNN_NAN_FORWARD) scale_bf16(job->out, 3, NAN);
  if (fake_cudnn.fault == FAKE_CUDNN_WRONG_LOGARITHMS)
    for (int64_t i = 0; i < floats; i++) job->log_sums[i] *= 1.1f;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_cudnn_backward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job, void *workspace) {
  if (!is_shape(job, &cudnn->backward)) return refuse("a shape that was not planned");
  fake_cudnn.backwards++;
  if (fake_cudnn.fault == FAKE_CUDNN_FAILING_BACKWARD)
    return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "cuDNN: attention's backward pass: a launch failed");
  memset(workspace, 0x5a, (size_t)fp8gpt_cudnn_workspace_bytes(cudnn, 1));
  if (fp8gpt_cuda_launch_attention_backward(cudnn->stream, job, workspace) != 0) abort();
  const int64_t queries = (int64_t)job->heads * job->head_dim;
  const int64_t keys = (int64_t)job->kv_heads * job->head_dim;
  const int64_t firsts[] = {0, queries, queries + keys, queries + 2 * keys};
  const int part = (int)fake_cudnn.fault - (int)FAKE_CUDNN_WRONG_QUERIES;
  for (int64_t row = 0; part >= 0 && part < 3 && row < job->sequences * job->length; row++)
    for (int64_t i = firsts[part]; i < firsts[part + 1]; i++) scale_bf16(job->dqkv, row * firsts[3] + i, 1.1f);
  if (fake_cudnn.fault == FAKE_CUDNN_RESTLESS) ((uint16_t *)job->dqkv)[7] ^= (uint16_t)(fake_cudnn.backwards % 2);
  return FP8CORE_OK;
}
