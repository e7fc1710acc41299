/** \file
 * Random access to the bytes of a file, or of memory (tests, fuzzing), in bounded memory.
 */
#ifndef FP8LM_INPUT_H
#define FP8LM_INPUT_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"

/** Where the bytes come from. Plain data: read by many threads at once, changed by open and close only. */
typedef struct fp8lm_input {
  uint64_t size;
  /** Used when \p memory is NULL. */
  int descriptor;
  /** Not owned. */
  const unsigned char *memory;
} fp8lm_input;

/**
 * Opens the regular file \p path for reading. Directories, pipes and devices are refused, for their size is not known.
 * Read with pread() rather than mapped: a file that shrinks meanwhile is an error message and not a SIGBUS.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT; \p input is then closed.
 */
fp8core_status fp8lm_input_open(fp8lm_input *input, const char *path);

/** \p bytes of memory, which must stay valid while \p input is used. */
void fp8lm_input_from_memory(fp8lm_input *input, const void *memory, uint64_t bytes);

/** Reads exactly \p bytes bytes from \p offset on. \return FP8CORE_ERROR_CORRUPT_DATA when the file is shorter or
 * cannot be read. */
fp8core_status fp8lm_input_read(const fp8lm_input *input, uint64_t offset, void *buffer, size_t bytes);

/** Closes the file. Calling it again, or for memory, is fine. */
void fp8lm_input_close(fp8lm_input *input);

#endif
