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

#endif
