/** \file
 * Files that are written under names where something else may lie; and standard output.
 */
#ifndef FP8LM_OUTPUT_H
#define FP8LM_OUTPUT_H

#include <signal.h>
#include <stdio.h>

#include "fp8core/status.h"

/**
 * Opens the regular file \p path for reading and for writing at its end, and creates it where it is not there. Pipes,
 * sockets, devices and directories are refused, and none of them is waited for.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT with a message that does not name the file; *descriptor is then -1.
 */
fp8core_status fp8lm_output_open(int *descriptor, const char *path);

/**
 * Opens \p path, which is a temporary name, for reading and writing, empty, and creates it where it is not there. A
 * symbolic link is refused, too: it would be renamed, and what it leads to be overwritten.
 *
 * \return as fp8lm_output_open().
 */
fp8core_status fp8lm_output_create(int *descriptor, const char *path);

/** fp8lm_output_open(), for one program at a time: the file is locked until it is closed. \p what is it that another
 * run may be writing to: "this folder". */
fp8core_status fp8lm_output_open_locked(int *descriptor, const char *path, const char *what);

/**
 * A stream to standard output. Where that is a pipe or a terminal that nobody reads from, it is waited for, but not
 * once a signal has set \p stop: then the rest is lost, so that the program ends in order. fclose() leaves standard
 * output open; it fails, with the reason in errno, where a write did.
 *
 * \param stop lives as long as the stream.
 * \return NULL: out of memory.
 */
FILE *fp8lm_output_screen(const volatile sig_atomic_t *stop);

#endif
