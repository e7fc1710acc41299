// In builds without CUDA, where no context is of a GPU either.
#include "../device.h"

fp8core_status fp8comm_cuda_open(fp8core_context *context, fp8comm_cuda **cuda) {
  (void)context;
  *cuda = NULL;
  return fp8core_set_last_error(
    FP8CORE_ERROR_NOT_SUPPORTED,
    "this libfp8comm was built without CUDA (the option cuda is off, or nvcc or cuBLASLt was missing)");
}
