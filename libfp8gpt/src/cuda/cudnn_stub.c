#include "cudnn_attention.h"
#include "internal.h"

static fp8core_status without(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "this build of libfp8gpt is without cuDNN");
}

fp8core_status fp8gpt_cudnn_open(fp8gpt_cudnn **opened, void *stream, int capability, const char *properties) {
  (void)stream;
  (void)capability;
  (void)properties;
  *opened = NULL;
  return without();
}

// Nothing below is called, as nothing was opened.

void fp8gpt_cudnn_close(fp8gpt_cudnn **closed) { *closed = NULL; }

const char *fp8gpt_cudnn_version(const fp8gpt_cudnn *cudnn) {
  (void)cudnn;
  return "none";
}

fp8core_status fp8gpt_cudnn_plan_forward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape) {
  (void)cudnn;
  (void)shape;
  return without();
}

fp8core_status fp8gpt_cudnn_plan_backward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape, int64_t most_bytes) {
  (void)cudnn;
  (void)shape;
  (void)most_bytes;
  return without();
}

int64_t fp8gpt_cudnn_workspace_bytes(const fp8gpt_cudnn *cudnn, int backward) {
  (void)cudnn;
  (void)backward;
  return 0;
}

fp8core_status fp8gpt_cudnn_forward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job, void *workspace) {
  (void)cudnn;
  (void)job;
  (void)workspace;
  return without();
}

fp8core_status fp8gpt_cudnn_backward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job, void *workspace) {
  (void)cudnn;
  (void)job;
  (void)workspace;
  return without();
}
