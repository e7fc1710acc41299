#include "internal.h"

fp8core_status fp8optim_cuda_init(fp8optim_adamw *adamw) {
  (void)adamw;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "this build of libfp8optim is without CUDA");
}

void fp8optim_cuda_destroy(fp8optim_adamw *adamw) { (void)adamw; }
