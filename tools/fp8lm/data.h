/** \file
 * What the subcommands of fp8lm data share.
 */
#ifndef FP8LM_DATA_H
#define FP8LM_DATA_H

#include <signal.h>

#include "command.h"
#include "text_source.h"
#include "tokenizer.h"

/** How text is read, and by which tokenizer. */
typedef struct fp8lm_data_input {
  /** "bytes", "gpt2" or NULL: gpt2 where a file of its is named, else bytes. */
  const char *tokenizer;
  const char *vocab_file;
  const char *merge_file;
  const char *json_key;
  fp8lm_text_format format;
  /** -1: replace for gpt2, keep for bytes. */
  int invalid_utf8;
  int threads;
} fp8lm_data_input;

/** Values of the options below, which getopt_long() returns. */
enum {
  FP8LM_DATA_TOKENIZER = 1000,
  FP8LM_DATA_VOCAB_FILE,
  FP8LM_DATA_MERGE_FILE,
  FP8LM_DATA_JSON_KEYS,
  FP8LM_DATA_INPUT_FORMAT,
  FP8LM_DATA_INVALID_UTF8,
  FP8LM_DATA_THREADS
};

#define FP8LM_DATA_TOKENIZER_OPTIONS                                                                                   \
  {"tokenizer", required_argument, NULL, FP8LM_DATA_TOKENIZER},                                                        \
    {"vocab-file", required_argument, NULL, FP8LM_DATA_VOCAB_FILE}, {                                                  \
    "merge-file", required_argument, NULL, FP8LM_DATA_MERGE_FILE                                                       \
  }
#define FP8LM_DATA_TEXT_OPTIONS                                                                                        \
  {"json-keys", required_argument, NULL, FP8LM_DATA_JSON_KEYS},                                                        \
    {"input-format", required_argument, NULL, FP8LM_DATA_INPUT_FORMAT},                                                \
    {"invalid-utf8", required_argument, NULL, FP8LM_DATA_INVALID_UTF8}, {                                              \
    "threads", required_argument, NULL, FP8LM_DATA_THREADS                                                             \
  }

/** Nothing named, text by extension, as many threads as CPUs. */
fp8lm_data_input fp8lm_data_input_default(void);

/** Takes one of the options above. Returns 0, -1 after a message, 1 if \p option is none of them. */
int fp8lm_data_option(const char *prefix, int option, const char *value, fp8lm_data_input *input);

/** Position of \p value among \p choices, which end with NULL. -1 after a message. */
int fp8lm_data_choice(const char *prefix, const char *option, const char *value, const char *const *choices);

/** Creates the tokenizer that was named. Returns an exit code, after a message if it is not success. */
int fp8lm_data_tokenizer(const char *prefix, const fp8lm_data_input *input, fp8lm_tokenizer **tokenizer);

/** Prints fp8core_last_error() and returns FP8LM_EXIT_FAILURE. */
int fp8lm_data_failed(const char *prefix);

/** Set by SIGINT, SIGTERM and SIGHUP after fp8lm_data_catch_signals(). */
extern volatile sig_atomic_t fp8lm_data_interrupted;
void fp8lm_data_catch_signals(void);

/** Seconds of a clock that only goes forward. */
double fp8lm_data_seconds(void);

int fp8lm_data_tokenize(int argc, char **argv);
int fp8lm_data_train_bpe(int argc, char **argv);
int fp8lm_data_check(int argc, char **argv);
int fp8lm_data_decode(int argc, char **argv);

#endif
