/** \file
 * Batches of token sequences from weighted sources: shuffled, seekable, and a pure function of (seed, step, rank,
 * ranks). Nothing is stored for the order: a permutation of the sequences is computed where it is needed. docs/data.md
 * defines the order exactly.
 */
#ifndef FP8LM_LOADER_H
#define FP8LM_LOADER_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"

typedef struct fp8lm_loader fp8lm_loader;

typedef enum fp8lm_split { FP8LM_TRAIN, FP8LM_VALIDATION } fp8lm_split;

typedef struct fp8lm_loader_options {
  /**
   * Sources, separated by white space (a backslash takes the next character as it is): one path; or "WEIGHT PATH WEIGHT
   * PATH ...", or several paths, which are weighted by their tokens. A path is a shard, or the prefix of the series
   * PATH_train_NNNNNN.bin and PATH_val_NNNNNN.bin.
   */
  const char *data_path;
  /** Validation sources, in the same form, of which all tokens are for validation; NULL: those of data_path. */
  const char *validation_data_path;
  /** Of a source that has no shards for validation: its last tokens, this share of all, from 0 to below 1. */
  double validation_fraction;
  uint64_t seed;
  /** The model's: every token must be below it; 0: below what the shards say. */
  uint32_t vocabulary;
} fp8lm_loader_options;

/** No source, no validation part, seed 0. */
static inline fp8lm_loader_options fp8lm_loader_options_default(void) {
  fp8lm_loader_options options = {NULL, NULL, 0.0, 0, 0};
  return options;
}

/**
 * Opens all shards and checks their headers.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT, FP8CORE_ERROR_CORRUPT_DATA, FP8CORE_ERROR_NOT_SUPPORTED,
 * FP8CORE_ERROR_OUT_OF_MEMORY; the message names the file.
 */
fp8core_status fp8lm_loader_create(fp8lm_loader **loader, const fp8lm_loader_options *options);

void fp8lm_loader_destroy(fp8lm_loader **loader);

/** Reads every shard and checks its tokens and checksum: takes as long as reading the files does. */
fp8core_status fp8lm_loader_check(const fp8lm_loader *loader);

/** The largest vocabulary that a shard's header says; 0: none says any. */
uint32_t fp8lm_loader_vocabulary(const fp8lm_loader *loader);

/** A number that differs where the shards do, by their headers, which have checksums of their tokens: for comparing
 * what several ranks read. */
uint32_t fp8lm_loader_fingerprint(const fp8lm_loader *loader);

/** A number that differs where the shards are other files of a machine, whatever is in them. */
uint32_t fp8lm_loader_files(const fp8lm_loader *loader);

/** Tokens of all sources, and sequences that they have. */
uint64_t fp8lm_loader_tokens(const fp8lm_loader *loader, fp8lm_split split);
uint64_t fp8lm_loader_sequences(const fp8lm_loader *loader, fp8lm_split split, size_t sequence_length);

/**
 * The batch of one rank at one step, by any thread: \p inputs and \p targets are [batch, sequence_length], and a target
 * is the token that follows its input. The sequences of all ranks together depend on batch times ranks only. \return
 * FP8CORE_ERROR_INVALID_ARGUMENT where a source is too short for one sequence or arguments are out of range,
 * FP8CORE_ERROR_CORRUPT_DATA for a token beyond the vocabulary, and a shard that cannot be read or became shorter; the
 * message names it.
 */
fp8core_status fp8lm_loader_batch(const fp8lm_loader *loader, fp8lm_split split, uint64_t step, uint32_t rank,
                                  uint32_t ranks, size_t batch, size_t sequence_length, int32_t *inputs,
                                  int32_t *targets);

/** Where the sequence number \p index (of all ranks and steps) comes from: for tests and reports. */
typedef struct fp8lm_sample {
  size_t source;
  uint64_t epoch;
  /** In the source's part. */
  uint64_t sequence;
} fp8lm_sample;

fp8core_status fp8lm_loader_sample(const fp8lm_loader *loader, fp8lm_split split, uint64_t index,
                                   size_t sequence_length, fp8lm_sample *sample);

/** The shuffling permutation of 0 to count - 1, at \p index. */
uint64_t fp8lm_permute(uint64_t key, uint64_t count, uint64_t index);

#endif
