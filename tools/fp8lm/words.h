/** \file
 * Division of text into the words that a byte-level BPE works on: GPT-2's pattern
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * by a scanner of its own rather than a library of regular expressions, for two reasons: it is several times faster,
 * and letters and numbers are those of one version of Unicode (16.0.0, as in the package tokenizers 0.23), the same on
 * every machine. tests/tools/test_words.c compares it with the pattern itself, run by PCRE2.
 *
 * Text may hold any bytes. One that belongs to no well-formed UTF-8 is a character of its own, neither letter, number
 * nor white space, like U+FFFD, which others put in its place.
 */
#ifndef FP8LM_WORDS_H
#define FP8LM_WORDS_H

#include <stddef.h>
#include <stdint.h>

typedef enum fp8lm_class { FP8LM_OTHER, FP8LM_LETTER, FP8LM_NUMBER, FP8LM_SPACE } fp8lm_class;

/** Prepares the tables. Must be called before the functions below; again, and by many threads at once, is fine. */
void fp8lm_words_prepare(void);

/** Class of a code point below 0x110000. White space is the property White_Space. */
fp8lm_class fp8lm_class_of(uint32_t code_point);

/**
 * Bytes of the word that \p text begins with. \p size is at least 1.
 * \param final nothing follows \p text. Otherwise 0 is returned where what follows could still change the word.
 */
size_t fp8lm_next_word(const unsigned char *text, size_t size, int final);

/**
 * Whether text can be divided before byte \p position so that the words of both parts are those of the whole. 0 where
 * that is not certain. \p position is between 1 and \p size - 1.
 */
int fp8lm_divides_words(const unsigned char *text, size_t size, size_t position);

#endif
