// Attention through cuDNN, of one shape that is planned beforehand. What cuDNN does not take fails with
// FP8CORE_ERROR_NOT_SUPPORTED and the reason as the last error; the caller has kernels of its own then. The stub of
// builds without cuDNN fails so in fp8gpt_cudnn_open().
//
// cuDNN is loaded when it is first wanted, as cuBLASLt is. Graphs of its operations come from cudnn-frontend, NVIDIA's
// C++ headers over cuDNN's interface.
#ifndef FP8GPT_CUDNN_ATTENTION_H
#define FP8GPT_CUDNN_ATTENTION_H

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fp8gpt_cudnn fp8gpt_cudnn;

// Loads cuDNN for work on a stream of the current device, whose compute capability is `capability`, as 10 * major +
// minor. With `properties`, a GPU's in cuDNN's JSON, plans are made for that GPU, which need not be there; they cannot
// be run.
fp8core_status fp8gpt_cudnn_open(fp8gpt_cudnn **opened, void *stream, int capability, const char *properties);

// NULL and a cleared pointer are fine.
void fp8gpt_cudnn_close(fp8gpt_cudnn **closed);

// "9.19.0"
const char *fp8gpt_cudnn_version(const fp8gpt_cudnn *cudnn);

// Plans a pass over jobs of the shape of `shape`, whose pointers are not used. Kernels are compiled here: a second or
// so. A backward pass that needs a larger workspace than `most_bytes` is refused.
fp8core_status fp8gpt_cudnn_plan_forward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape);
fp8core_status fp8gpt_cudnn_plan_backward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape, int64_t most_bytes);

// Of the forward pass alone, or of both.
int64_t fp8gpt_cudnn_workspace_bytes(const fp8gpt_cudnn *cudnn, int backward);

// Of the shape that was planned; every array at a multiple of 16 bytes, the workspace at one of 256. Nothing waits and
// nothing is allocated on the device, so a pass can be captured. log_sums are what the own kernels read and write.
fp8core_status fp8gpt_cudnn_forward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job, void *workspace);
fp8core_status fp8gpt_cudnn_backward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job, void *workspace);

#ifdef __cplusplus
}
#endif

#endif
