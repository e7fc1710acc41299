/** \file
 * Status codes and the calling thread's last error message.
 *
 * Every fallible call of libfp8core returns an #fp8core_status. The library never prints, exits or aborts.
 * What is refused (INVALID_ARGUMENT, NOT_SUPPORTED, VERSION_MISMATCH, CORRUPT_DATA) is refused before any output is
 * written; a handle or pointer that the call would return is then NULL. After ERROR_DEVICE, ERROR_TIMEOUT,
 * ERROR_PEER and ERROR_INTERRUPTED outputs are undefined.
 * All calls of this header may be made from any thread at any time.
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
  FP8CORE_ERROR_CORRUPT_DATA = -6,
  /** Of libfp8comm: other ranks have made no progress within the time that the communicator allows. */
  FP8CORE_ERROR_TIMEOUT = -7,
  /** Of libfp8comm: another rank is gone, cannot be reached, gave up, or sent something malformed. */
  FP8CORE_ERROR_PEER = -8,
  /** Of libfp8comm: a waiting call, here or on another rank, was told to give up. */
  FP8CORE_ERROR_INTERRUPTED = -9
} fp8core_status;

/** Short English name of \p status, "unknown status" for a value outside the enum. Static storage; thread-safe. */
FP8CORE_API const char *fp8core_status_string(fp8core_status status);

/**
 * Message of the last failed call of the calling thread, of any library of the suite: what was wrong, with which
 * value, and what was expected. Empty before the first failure; a success leaves it as it was. Never NULL, at most
 * 511 bytes. The storage belongs to the thread and is valid until its next failed call. Thread-safe.
 */
FP8CORE_API const char *fp8core_last_error(void);

/**
 * Sets the calling thread's message (printf format, truncated to 511 bytes; NULL: the name of \p status) and returns \p
 * status. For libraries built upon this one, so that their users find every message in one place. An argument may point
 * into the old message. Cannot fail: what cannot be formatted is stored as the bare format. Thread-safe: each thread
 * has a message of its own.
 */
FP8CORE_API fp8core_status fp8core_set_last_error(fp8core_status status, const char *format, ...) FP8CORE_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif

#endif
