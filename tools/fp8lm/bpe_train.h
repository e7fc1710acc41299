/** \file
 * Training of a byte-level BPE: the vocabulary and merges that the package tokenizers (ByteLevelBPETokenizer) makes of
 * the same words, to the byte of its files.
 *
 * Words are counted first; then, until the vocabulary is full, the most frequent pair of neighbouring tokens becomes a
 * token. Of pairs as frequent, the one with the smaller first id wins, then the one with the smaller second id.
 */
#ifndef FP8LM_BPE_TRAIN_H
#define FP8LM_BPE_TRAIN_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"

/** Words and how often each is there. Zero it before its first use. */
typedef struct fp8lm_word_counts {
  /** Open addressing; entries with a count of 0 are free. */
  struct fp8lm_word_count {
    uint64_t hash;
    uint64_t count;
    /** Into bytes. */
    uint64_t offset;
    uint32_t length;
  } * entries;
  size_t used;
  size_t mask;
  unsigned char *bytes;
  size_t bytes_used;
  size_t bytes_room;
} fp8lm_word_counts;

/** Counts a word \p count times more. */
fp8core_status fp8lm_count_word(fp8lm_word_counts *counts, const unsigned char *word, size_t length, uint64_t count);

/** Divides \p size bytes, a whole text, into words and counts them. */
fp8core_status fp8lm_count_words(fp8lm_word_counts *counts, const unsigned char *text, size_t size);

/** Adds the counts of \p other. */
fp8core_status fp8lm_add_counts(fp8lm_word_counts *counts, const fp8lm_word_counts *other);

void fp8lm_word_counts_free(fp8lm_word_counts *counts);

typedef enum fp8lm_end_of_text_place {
  /** Id 0, as tokenizers gives its first special token. */
  FP8LM_END_OF_TEXT_FIRST,
  /** The largest id, as in GPT-2's vocabulary. */
  FP8LM_END_OF_TEXT_LAST,
  FP8LM_END_OF_TEXT_NONE
} fp8lm_end_of_text_place;

typedef struct fp8lm_train_options {
  /** With the 256 bytes and the end of a text; at least as many. The result is smaller where pairs run out. */
  uint32_t vocabulary;
  /** Rarer pairs are not merged. */
  uint64_t minimum_frequency;
  fp8lm_end_of_text_place end_of_text;
} fp8lm_train_options;

/** The two files as text, from malloc(). */
typedef struct fp8lm_trained {
  char *vocab;
  size_t vocab_size;
  char *merges;
  size_t merges_size;
  uint32_t vocabulary;
  uint32_t merge_count;
  /** Tokens that all the words have, before any merge (their bytes) and after all. */
  uint64_t bytes;
  uint64_t tokens;
} fp8lm_trained;

/** \return FP8CORE_ERROR_OUT_OF_MEMORY; \p trained is then empty. */
fp8core_status fp8lm_train_bpe(const fp8lm_word_counts *counts, const fp8lm_train_options *options,
                               fp8lm_trained *trained);

void fp8lm_trained_free(fp8lm_trained *trained);

#endif
