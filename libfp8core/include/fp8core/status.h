/** \file
 * Status codes and the calling thread's last error message.
 *
 * Every fallible call of libfp8core returns an #fp8core_status. The library never prints, exits or aborts.
 */
#ifndef FP8CORE_STATUS_H
#define FP8CORE_STATUS_H

#include "attributes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8core_status {
  FP8CORE_OK = 0,
  /** An argument is null, out of range, misaligned, overlapping or contradicts another one. */
  FP8CORE_ERROR_INVALID_ARGUMENT = -1,
  /** A valid request that this build, device or pair of dtypes cannot serve. */
  FP8CORE_ERROR_NOT_SUPPORTED = -2,
  FP8CORE_ERROR_OUT_OF_MEMORY = -3,
  /** CUDA or cuBLASLt reported a failure. */
  FP8CORE_ERROR_DEVICE = -4,
  /** The headers that the caller was compiled with do not fit the library that is loaded. */
  FP8CORE_ERROR_VERSION_MISMATCH = -5,
  /** Serialised bytes are truncated, damaged, or of another kind or version. */
  FP8CORE_ERROR_CORRUPT_DATA = -6
} fp8core_status;

/** Short English name of \p status, "unknown status" for a value outside the enum. Static storage; thread-safe. */
FP8CORE_API const char *fp8core_status_string(fp8core_status status);

/**
 * Message of the last failed call of the calling thread, of any library of the suite: what was wrong, with which
 * value, and what was expected. Empty before the first failure; a success leaves it as it was.
 * The storage belongs to the thread and is valid until its next failed call.
 */
FP8CORE_API const char *fp8core_last_error(void);

/**
 * Sets the calling thread's message (printf format; truncated to 511 bytes) and returns \p status.
 * For libraries built upon this one, so that their users find every message in one place.
 */
FP8CORE_API fp8core_status fp8core_set_last_error(fp8core_status status, const char *format, ...) FP8CORE_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif

#endif
