/** \file
 * UTF-8, as RFC 3629 section 4 defines it.
 */
#ifndef FP8LM_UTF8_H
#define FP8LM_UTF8_H

#include <stddef.h>

/**
 * Length of the well-formed sequence that begins at \p text (\p available bytes, at least 1); 0 if there is none: a
 * stray or missing continuation byte, an overlong form, a surrogate, or a code point above U+10FFFF.
 */
size_t fp8lm_utf8_length(const char *text, size_t available);

/** Bytes that fp8lm_printable() may write. */
#define FP8LM_PRINTABLE_BYTES 8

/**
 * Writes the character that begins at \p text into \p printable, ended with 0: as it is, but control characters (also
 * those of U+0080 to U+009F, which terminals obey too) as \\u and four digits, and a byte that is not UTF-8 as \\x and
 * two. Returns the number of bytes that it took.
 */
size_t fp8lm_printable(const char *text, size_t available, char printable[FP8LM_PRINTABLE_BYTES]);

#endif
