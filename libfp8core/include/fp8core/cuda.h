/** \file
 * What only a CUDA context has. Plain C, without CUDA's headers: a stream passes as a void pointer.
 *
 * In a build without CUDA every call with valid pointers returns FP8CORE_ERROR_NOT_SUPPORTED, with the reason.
 */
#ifndef FP8CORE_CUDA_H
#define FP8CORE_CUDA_H

#include "attributes.h"
#include "context.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The cudaStream_t that the context's work is put on: the caller's or, by default, one of its own that does not wait
 * for CUDA's default stream. For events, copies and graph captures of the caller's.
 *
 * Thread-safe.
 *
 * \param stream receives the handle, which belongs to the context or to who gave it; NULL on failure.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p stream or the context is NULL, or the context is of the CPU.
 */
FP8CORE_API fp8core_status fp8core_cuda_stream(const fp8core_context *context, void **stream);

/**
 * The compute capability of the context's GPU: 8 and 9 for 8.9, the first with FP8 tensor cores. Both are 0 on failure.
 * Thread-safe.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when a pointer or the context is NULL, or the context is of the CPU.
 */
FP8CORE_API fp8core_status fp8core_cuda_compute_capability(const fp8core_context *context, int *major, int *minor);

#ifdef __cplusplus
}
#endif

#endif
