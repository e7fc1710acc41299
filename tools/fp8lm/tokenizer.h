/** \file
 * Text to tokens and back: bytes as they are, or GPT-2's byte-level BPE from vocab.json and merges.txt.
 *
 * A tokenizer does not change once created and is shared by any number of threads; an encoder is one thread's state.
 * Tokens are a pure function of the text, whatever pieces it is fed in. Results of the BPE are those of the package
 * tokenizers (ByteLevelBPETokenizer), compared in tests/interop/test_tokenizers.py; docs/data.md has the rules.
 */
#ifndef FP8LM_TOKENIZER_H
#define FP8LM_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "utf8_repair.h"

/** Largest vocab.json and merges.txt, and largest id, that are read. */
#define FP8LM_TOKENIZER_MAX_FILE UINT64_C(100000000)
#define FP8LM_TOKENIZER_MAX_ID UINT32_C(16777215)
/** Longest word (see words.h): a run of letters, of white space and so on. Text with a longer one is refused. */
#define FP8LM_TOKENIZER_MAX_WORD ((size_t)16 << 20)

#define FP8LM_END_OF_TEXT "<|endoftext|>"

typedef struct fp8lm_tokenizer fp8lm_tokenizer;
typedef struct fp8lm_encoder fp8lm_encoder;

/** A growing array; zero it before its first use. */
typedef struct fp8lm_tokens {
  uint32_t *ids;
  size_t count;
  size_t room;
} fp8lm_tokens;

typedef struct fp8lm_encoder_options {
  /** Bytes that are kept are tokens like any: encoding and decoding gives the same text. */
  fp8lm_invalid_utf8 invalid_utf8;
  /** The text "<|endoftext|>" becomes that token; otherwise it is text like any other. */
  int special;
} fp8lm_encoder_options;

/** Tokens 0 to 255 are the bytes, 256 is the end of a text. */
#define FP8LM_TOKENIZER_BYTES_VOCABULARY 257
fp8core_status fp8lm_tokenizer_create_bytes(fp8lm_tokenizer **tokenizer);

/**
 * Reads both files. \return FP8CORE_ERROR_INVALID_ARGUMENT, FP8CORE_ERROR_CORRUPT_DATA, FP8CORE_ERROR_OUT_OF_MEMORY;
 * the message names the file.
 */
fp8core_status fp8lm_tokenizer_create_bpe(fp8lm_tokenizer **tokenizer, const char *vocab_file, const char *merge_file);

/** The same from memory, which is written to and not needed afterwards. */
fp8core_status fp8lm_tokenizer_parse_bpe(fp8lm_tokenizer **tokenizer, char *vocab, size_t vocab_size, char *merges,
                                         size_t merges_size);

void fp8lm_tokenizer_destroy(fp8lm_tokenizer **tokenizer);

/** One more than the largest id. */
uint32_t fp8lm_tokenizer_vocabulary(const fp8lm_tokenizer *tokenizer);

/** The token <|endoftext|>; -1 where a vocabulary has none. */
int64_t fp8lm_tokenizer_end_of_text(const fp8lm_tokenizer *tokenizer);

/** The bytes of a token; NULL for an id that the vocabulary lacks. Decoding is putting these one after another. */
const unsigned char *fp8lm_tokenizer_bytes(const fp8lm_tokenizer *tokenizer, uint32_t id, size_t *length);

/** \p tokenizer must outlive the encoder. */
fp8core_status fp8lm_encoder_create(fp8lm_encoder **encoder, const fp8lm_tokenizer *tokenizer,
                                    const fp8lm_encoder_options *options);
void fp8lm_encoder_destroy(fp8lm_encoder **encoder);

/**
 * Appends the tokens of the next \p size bytes of a text to \p tokens, as far as they cannot change any more by what
 * follows. The encoder keeps the rest: a word, as a rule, or what may become one.
 * After an error the encoder begins a new text.
 */
fp8core_status fp8lm_encoder_feed(fp8lm_encoder *encoder, const void *bytes, size_t size, fp8lm_tokens *tokens);

/** Ends the text: appends the tokens that are left. The next feed begins another text. */
fp8core_status fp8lm_encoder_finish(fp8lm_encoder *encoder, fp8lm_tokens *tokens);

/** The text begins at this byte of its file, for messages. Before the first feed. */
void fp8lm_encoder_locate(fp8lm_encoder *encoder, uint64_t position);

/** Ill-formed sequences that were replaced, in all texts so far. */
uint64_t fp8lm_encoder_replaced(const fp8lm_encoder *encoder);

/** Makes room for \p count tokens more. */
fp8core_status fp8lm_tokens_reserve(fp8lm_tokens *tokens, size_t count);
void fp8lm_tokens_free(fp8lm_tokens *tokens);

/** The character (a code point of at most U+017F) that stands for a byte in the files of a byte-level BPE. */
uint32_t fp8lm_byte_character(unsigned char byte);

/** Reads a regular file of at most \p limit bytes into memory from malloc(), with a NUL after it. */
fp8core_status fp8lm_read_whole_file(const char *path, uint64_t limit, char **bytes, size_t *size);

#endif
