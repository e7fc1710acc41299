/** \file
 * Token shards: the .bin files of llm.c. A header of 256 little-endian 32-bit numbers,
 *
 *     0  magic     20240520          20240801
 *     1  version   1                 7
 *     2  number of tokens, 1 to 2^31 - 1
 *     3  vocabulary: every token is below it; 0 where the writer did not say
 *     4  1 if a checksum follows, else 0
 *     5  CRC-32 (that of zlib) of all bytes after the header
 *     rest: 0
 *
 * then the tokens, of 16 bits each (32 bits in the second kind, which is llm.c's for Llama 3), and nothing after them.
 * Numbers 3 to 5 are this project's; llm.c writes zeros there and does not look at them.
 */
#ifndef FP8LM_SHARD_H
#define FP8LM_SHARD_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "input.h"

#define FP8LM_SHARD_HEADER_BYTES ((size_t)1024)
#define FP8LM_SHARD_MAX_TOKENS INT32_MAX

typedef struct fp8lm_shard {
  uint64_t count;
  /** Bytes of a token, 2 or 4. */
  unsigned width;
  /** 0: not known. */
  uint32_t vocabulary;
  int has_checksum;
  uint32_t checksum;
  fp8lm_input input;
} fp8lm_shard;

/**
 * Opens the file and checks its header and its length; tokens are looked at by fp8lm_shard_check() only. \return
 * FP8CORE_ERROR_INVALID_ARGUMENT (no such file), FP8CORE_ERROR_CORRUPT_DATA, FP8CORE_ERROR_NOT_SUPPORTED (a version of
 * later). The message does not name the file. \p shard is then closed.
 */
fp8core_status fp8lm_shard_open(fp8lm_shard *shard, const char *path);

/** The same for a file that is in memory, which must stay valid. */
fp8core_status fp8lm_shard_from_memory(fp8lm_shard *shard, const void *memory, size_t bytes);

/**
 * Reads tokens [first, first + count), by any thread. Those of 2^31 and more come out as INT32_MAX. \return
 * FP8CORE_ERROR_CORRUPT_DATA where they are not there, also of a file that has become shorter, or cannot be read.
 */
fp8core_status fp8lm_shard_read(const fp8lm_shard *shard, uint64_t first, size_t count, int32_t *tokens);

/** Checks that every token is below \p vocabulary (0: below the header's, if it has one), and the checksum, if there is
 * one. */
fp8core_status fp8lm_shard_check(const fp8lm_shard *shard, uint32_t vocabulary);

/** Closing again is fine. */
void fp8lm_shard_close(fp8lm_shard *shard);

/** A series of shards PREFIX_000000.bin, PREFIX_000001.bin, ..., each written as NAME.tmp until all are there. */
typedef struct fp8lm_shard_writer fp8lm_shard_writer;

/**
 * Nothing is written before the first token.
 * \param vocabulary for the header; tokens have 16 bits if it is at most 65536.
 * \param shard_tokens most tokens of a shard, 1 to FP8LM_SHARD_MAX_TOKENS.
 */
fp8core_status fp8lm_shard_writer_create(fp8lm_shard_writer **writer, const char *prefix, uint32_t vocabulary,
                                         uint64_t shard_tokens);

/** \return FP8CORE_ERROR_DEVICE where the file cannot be written; the message names it. */
fp8core_status fp8lm_shard_writer_append(fp8lm_shard_writer *writer, const uint32_t *tokens, size_t count);

/** Completes the last shard. All are then on the disk, under their temporary names. */
fp8core_status fp8lm_shard_writer_finish(fp8lm_shard_writer *writer);

/** After fp8lm_shard_writer_finish(): gives the shards their names. */
fp8core_status fp8lm_shard_writer_commit(fp8lm_shard_writer *writer);

uint64_t fp8lm_shard_writer_tokens(const fp8lm_shard_writer *writer);
size_t fp8lm_shard_writer_shards(const fp8lm_shard_writer *writer);

/** Removes what has not been committed. */
void fp8lm_shard_writer_destroy(fp8lm_shard_writer **writer);

/**
 * Names of the shards of a series, in order: FOLDER/NAME_NNNNNN.bin for the prefix FOLDER/NAME, numbered from 0 or from
 * 1 without a gap. \p paths is an array from malloc() of strings from malloc(); *count may be 0. \return
 * FP8CORE_ERROR_CORRUPT_DATA where one is missing between others, FP8CORE_ERROR_INVALID_ARGUMENT where the folder
 * cannot be read.
 */
fp8core_status fp8lm_shard_series(const char *prefix, char ***paths, size_t *count);
void fp8lm_shard_series_free(char ***paths, size_t count);

/** Removes the shards of a series whose number is \p keep or more. */
fp8core_status fp8lm_shard_series_trim(const char *prefix, size_t keep);

#endif
