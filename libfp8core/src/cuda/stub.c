// The CUDA backend of a build without CUDA: everything links, and says why it cannot serve.
#include "fp8core/cuda.h"
#include "internal.h"

static fp8core_status not_built(void) {
  return fp8core_set_last_error(
    FP8CORE_ERROR_NOT_SUPPORTED,
    "this libfp8core was built without CUDA (the option cuda is off, or nvcc or cuBLASLt was missing)");
}

fp8core_status fp8core_cuda_context_init(fp8core_context *context, const fp8core_context_options *options) {
  (void)context;
  (void)options;
  return not_built();
}

int fp8core_cuda_device_count(void) {
  (void)not_built();
  return 0;
}

fp8core_status fp8core_cuda_stream(const fp8core_context *context, void **stream) {
  (void)context;
  if (!stream) return fp8core_invalid("stream is NULL, expected where to put the handle");
  *stream = NULL;
  return not_built();
}

fp8core_status fp8core_cuda_compute_capability(const fp8core_context *context, int *major, int *minor) {
  (void)context;
  if (!major || !minor) return fp8core_invalid("%s is NULL, expected where to put a number", major ? "minor" : "major");
  *major = 0;
  *minor = 0;
  return not_built();
}
