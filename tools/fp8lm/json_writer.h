/** \file
 * Pieces of JSON output.
 */
#ifndef FP8LM_JSON_WRITER_H
#define FP8LM_JSON_WRITER_H

#include <stddef.h>
#include <stdio.h>

/** Writes \p text as a JSON string. Bytes that are not UTF-8 (in file names) become U+FFFD. */
void fp8lm_json_write_string(FILE *stream, const char *text, size_t length);

/** Writes the shortest decimal number that reads back as the same double; null when it is infinite or NaN, which JSON
 * cannot hold. */
void fp8lm_json_write_number(FILE *stream, double value);

#endif
