/** \file
 * What becomes of bytes that are not UTF-8.
 */
#ifndef FP8LM_UTF8_REPAIR_H
#define FP8LM_UTF8_REPAIR_H

#include <stddef.h>
#include <stdint.h>

typedef enum fp8lm_invalid_utf8 {
  /** Every maximal subpart of an ill-formed sequence (Unicode, chapter 3.9) becomes U+FFFD, as Python's
   * errors="replace" does it. */
  FP8LM_INVALID_REPLACE,
  /** They stay. */
  FP8LM_INVALID_KEEP,
  /** They are an error. */
  FP8LM_INVALID_REFUSE
} fp8lm_invalid_utf8;

typedef struct fp8lm_repaired {
  /** Bytes read: all, but for a sequence that is cut off at the end (at most 3 bytes, if not final), or from the byte
   * that is refused on. */
  size_t used;
  size_t written;
  /** Subparts that were replaced. */
  uint64_t replaced;
  int refused;
} fp8lm_repaired;

/** Copies \p size bytes. \p out has room for as many, for three times as many with FP8LM_INVALID_REPLACE. */
fp8lm_repaired fp8lm_repair_utf8(unsigned char *out, const unsigned char *bytes, size_t size, int final,
                                 fp8lm_invalid_utf8 policy);

#endif
