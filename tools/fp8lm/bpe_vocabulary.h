/** \file
 * What tokenizer.c and bpe_vocabulary.c share: the tables of a tokenizer.
 */
#ifndef FP8LM_BPE_VOCABULARY_H
#define FP8LM_BPE_VOCABULARY_H

#include "tokenizer.h"

/** Merge of the pair (key >> 32, key & 0xffffffff); an unused entry has the key UINT64_MAX. */
typedef struct fp8lm_merge {
  uint64_t key;
  uint32_t rank;
  uint32_t id;
} fp8lm_merge;

typedef struct fp8lm_token {
  const unsigned char *bytes;
  uint32_t length;
  /** 0 for ids that the vocabulary lacks. */
  uint32_t known;
} fp8lm_token;

struct fp8lm_tokenizer {
  int bpe;
  uint32_t vocabulary;
  int64_t end_of_text;
  fp8lm_token *tokens;
  unsigned char *token_bytes;
  uint32_t byte_ids[256];
  /** Open addressing, at most half full. */
  fp8lm_merge *merges;
  unsigned merge_shift;
  size_t merge_mask;
};

static inline size_t fp8lm_merge_slot(const fp8lm_tokenizer *tokenizer, uint64_t key) {
  return (size_t)(key * UINT64_C(0x9E3779B97F4A7C15) >> tokenizer->merge_shift);
}

/** The merge of two tokens; NULL if there is none. */
static inline const fp8lm_merge *fp8lm_find_merge(const fp8lm_tokenizer *tokenizer, uint32_t left, uint32_t right) {
  const uint64_t key = (uint64_t)left << 32 | right;
  for (size_t slot = fp8lm_merge_slot(tokenizer, key);; slot = (slot + 1) & tokenizer->merge_mask) {
    const fp8lm_merge *merge = &tokenizer->merges[slot];
    if (merge->key == key) return merge;
    if (merge->key == UINT64_MAX) return NULL;
  }
}

#endif
