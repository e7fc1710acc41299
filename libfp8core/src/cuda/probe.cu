// Compiled when the build is configured: a toolkit that is there but does not work with the host's compiler is found
// out then.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

__global__ void probe(unsigned char *code, float value) {
  *code = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}
