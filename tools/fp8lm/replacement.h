/** \file
 * Files that are replaced once the new one is whole.
 */
#ifndef FP8LM_REPLACEMENT_H
#define FP8LM_REPLACEMENT_H

#include <stdio.h>

#include "fp8core/status.h"

/** A file that is being written, under a temporary name beside its own. */
typedef struct fp8lm_replacement {
  const char *path;
  char *temporary;
  /** NULL: none is open. */
  FILE *stream;
} fp8lm_replacement;

/** Replacements that may be open at once. */
#define FP8LM_MOST_REPLACEMENTS 4

/**
 * Makes the temporary file. A signal that ends the program (SIGINT, SIGTERM, SIGHUP) removes it from now on. By one
 * thread.
 *
 * \param path must outlive the replacement.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT, with a message that does not name the file, where \p path is something else
 *         than a file or its folder cannot be written.
 */
fp8core_status fp8lm_replacement_open(fp8lm_replacement *replacement, const char *path);

/** Writes what is left, to the disk, and renames. On an error the temporary file is removed, and a file that was there
 * stays as it was; the message does not name it. */
fp8core_status fp8lm_replacement_commit(fp8lm_replacement *replacement);

/** Removes the temporary file. One that is not open, or all 0, is fine. */
void fp8lm_replacement_discard(fp8lm_replacement *replacement);

#endif
