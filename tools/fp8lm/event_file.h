/** \file
 * TensorBoard event files: scalars by step. Records are framed as TFRecord (length, masked CRC-32C of it, data, masked
 * CRC-32C of them) and hold the protobuf message Event of tensorflow/core/util/event.proto.
 */
#ifndef FP8LM_EVENT_FILE_H
#define FP8LM_EVENT_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"

typedef struct fp8lm_event_file fp8lm_event_file;

/** One point of a curve. */
typedef struct fp8lm_scalar {
  const char *tag;
  float value;
} fp8lm_scalar;

/** Creates events.out.tfevents.TIME.HOST.PID in \p folder, which must exist. The message does not name the folder. */
fp8core_status fp8lm_event_file_create(fp8lm_event_file **file, const char *folder);

/** Adds one event with \p count scalars at \p step. Errors are kept for fp8lm_event_file_close(). */
void fp8lm_event_file_add(fp8lm_event_file *file, int64_t step, const fp8lm_scalar *scalars, size_t count);

/** Gives what was added to the operating system. */
void fp8lm_event_file_flush(fp8lm_event_file *file);

/** Closes and clears. \return FP8CORE_ERROR_INVALID_ARGUMENT if not everything could be written. NULL is fine. */
fp8core_status fp8lm_event_file_close(fp8lm_event_file **file);

/** CRC-32C (Castagnoli; RFC 3720, appendix B.4) of \p bytes bytes. */
uint32_t fp8lm_crc32c(const void *data, size_t bytes);

#endif
