/** \file
 * Text of many files, JSONL files and standard input in pieces of about a mebibyte, each of which can be worked on
 * alone.
 */
#ifndef FP8LM_TEXT_SOURCE_H
#define FP8LM_TEXT_SOURCE_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"

/** Longest line of JSONL. */
#define FP8LM_MAX_LINE ((size_t)256 << 20)

typedef enum fp8lm_text_format {
  /** By the extension: .jsonl, .ndjson and .json are JSONL. */
  FP8LM_TEXT_AUTO,
  FP8LM_TEXT_PLAIN,
  FP8LM_TEXT_JSONL
} fp8lm_text_format;

typedef enum fp8lm_text_division {
  /** Between words (words.h). */
  FP8LM_DIVIDE_WORDS,
  /** Between words, before white space: never within "<|endoftext|>". */
  FP8LM_DIVIDE_SPACE,
  FP8LM_DIVIDE_ANYWHERE
} fp8lm_text_division;

/** Zero it before its first use; it is used again and again. */
typedef struct fp8lm_piece {
  char *bytes;
  size_t size;
  size_t room;
  /** Path of the file, "standard input". */
  const char *name;
  /** Whole lines of JSONL. Otherwise part of a text, perhaps of no bytes. */
  int jsonl;
  /** The text ends with this piece. */
  int ends_document;
  /** Where it begins: bytes and lines before it, in its file. */
  uint64_t offset;
  uint64_t line;
} fp8lm_piece;

typedef struct fp8lm_text_source {
  char *const *paths;
  size_t count;
  fp8lm_text_format format;
  fp8lm_text_division division;
  /** Set by a signal handler: reading then fails. */
  const volatile sig_atomic_t *interrupted;
  /** The rest is its own. Paths already finished; the open file, or -1. */
  size_t finished;
  int descriptor;
  int jsonl;
  int at_end;
  uint64_t offset;
  uint64_t line;
  /** Read, but not part of a piece yet. */
  char *rest;
  size_t rest_size;
  size_t rest_room;
} fp8lm_text_source;

/** \param paths "-" is standard input. They and \p interrupted must outlive the source. */
void fp8lm_text_source_init(fp8lm_text_source *source, char *const *paths, size_t count, fp8lm_text_format format,
                            fp8lm_text_division division, const volatile sig_atomic_t *interrupted);

/**
 * Reads the next piece; *more is 0 where there is none.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT where a file cannot be read, FP8CORE_ERROR_CORRUPT_DATA for lines and words
 * that are too long, FP8CORE_ERROR_OUT_OF_MEMORY. The message names the file.
 */
fp8core_status fp8lm_text_next(fp8lm_text_source *source, fp8lm_piece *piece, int *more);

void fp8lm_text_source_free(fp8lm_text_source *source);
void fp8lm_piece_free(fp8lm_piece *piece);

/**
 * Goes over the lines of a piece of JSONL and calls \p use with the string that each line's object has under \p key.
 * Blank lines are passed over. Bytes of the piece are written to.
 * \return an error of \p use, or FP8CORE_ERROR_CORRUPT_DATA; the message names file and line.
 */
fp8core_status fp8lm_each_json_text(fp8lm_piece *piece, const char *key,
                                    fp8core_status (*use)(void *context, const char *text, size_t size), void *context);

#endif
