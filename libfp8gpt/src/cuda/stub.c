#include "internal.h"

fp8core_status fp8gpt_cuda_init(fp8gpt_model *model) {
  (void)model;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "this build of libfp8gpt is without CUDA");
}
