// fp8lm data: the table of its subcommands, what they share, and the two small ones, check and decode.
#include "data.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "parallel.h"
#include "shard.h"

static const fp8lm_command commands[] = {
  {"tokenize", "turn text into token shards", fp8lm_data_tokenize},
  {"train-bpe", "make a byte-level BPE from text", fp8lm_data_train_bpe},
  {"check", "check token shards", fp8lm_data_check},
  {"decode", "turn token shards into text", fp8lm_data_decode},
  {NULL, NULL, NULL},
};

int fp8lm_data(int argc, char **argv) {
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    printf("Usage: fp8lm data COMMAND [OPTION]... [ARGUMENT]...\n"
           "\n"
           "Training data: from text to shards of tokens.\n"
           "\n"
           "Commands:\n");
    fp8lm_print_commands(stdout, commands);
    printf("\n"
           "'fp8lm data COMMAND --help' describes a command and its options.\n");
    return FP8LM_EXIT_SUCCESS;
  }
  return fp8lm_dispatch("fp8lm data", "command", commands, argc, argv);
}

volatile sig_atomic_t fp8lm_data_interrupted;

static void interrupt(int signal_number) {
  (void)signal_number;
  fp8lm_data_interrupted = 1;
}

void fp8lm_data_catch_signals(void) {
  // Without SA_RESTART, so that a read that waits comes back.
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = interrupt;
  (void)sigaction(SIGINT, &action, NULL);
  (void)sigaction(SIGTERM, &action, NULL);
  (void)sigaction(SIGHUP, &action, NULL);
}

double fp8lm_data_seconds(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int fp8lm_data_failed(const char *prefix) {
  return fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s", fp8core_last_error());
}

fp8lm_data_input fp8lm_data_input_default(void) {
  const fp8lm_data_input input = {NULL, NULL, NULL, "text", FP8LM_TEXT_AUTO, -1, fp8lm_cpus()};
  return input;
}

int fp8lm_data_choice(const char *prefix, const char *option, const char *value, const char *const *choices) {
  for (int i = 0; choices[i]; i++) {
    if (strcmp(value, choices[i]) == 0) return i;
  }
  fprintf(stderr, "%s: %s is '", prefix, option);
  fp8lm_print_text(stderr, value);
  fprintf(stderr, "', expected ");
  for (int i = 0; choices[i]; i++) fprintf(stderr, "%s%s", i == 0 ? "" : choices[i + 1] ? ", " : " or ", choices[i]);
  fputc('\n', stderr);
  return -1;
}

int fp8lm_data_option(const char *prefix, int option, const char *value, fp8lm_data_input *input) {
  static const char *const tokenizers[] = {"bytes", "gpt2", NULL};
  static const char *const formats[] = {"auto", "text", "jsonl", NULL};
  static const char *const policies[] = {"replace", "keep", "refuse", NULL};
  int choice = 0;
  int64_t threads;
  switch (option) {
  case FP8LM_DATA_TOKENIZER:
    choice = fp8lm_data_choice(prefix, "--tokenizer", value, tokenizers);
    if (choice >= 0) input->tokenizer = tokenizers[choice];
    break;
  case FP8LM_DATA_VOCAB_FILE: input->vocab_file = value; break;
  case FP8LM_DATA_MERGE_FILE: input->merge_file = value; break;
  case FP8LM_DATA_JSON_KEYS: input->json_key = value; break;
  case FP8LM_DATA_INPUT_FORMAT:
    choice = fp8lm_data_choice(prefix, "--input-format", value, formats);
    input->format = (fp8lm_text_format)choice;
    break;
  case FP8LM_DATA_INVALID_UTF8:
    choice = fp8lm_data_choice(prefix, "--invalid-utf8", value, policies);
    input->invalid_utf8 = choice;
    break;
  case FP8LM_DATA_THREADS:
    choice = fp8lm_parse_integer(prefix, "--threads", value, 1, FP8LM_MAX_THREADS, &threads);
    if (choice == 0) input->threads = (int)threads;
    break;
  default: return 1;
  }
  return choice < 0 ? -1 : 0;
}

int fp8lm_data_tokenizer(const char *prefix, const fp8lm_data_input *input, fp8lm_tokenizer **tokenizer) {
  const int has_files = input->vocab_file || input->merge_file;
  const int bpe = input->tokenizer ? strcmp(input->tokenizer, "gpt2") == 0 : has_files;
  if (bpe && !(input->vocab_file && input->merge_file)) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "the tokenizer gpt2 needs --vocab-file and --merge-file");
  }
  if (!bpe && has_files) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--vocab-file and --merge-file are for the tokenizer gpt2, not for bytes");
  }
  const fp8core_status status = bpe ? fp8lm_tokenizer_create_bpe(tokenizer, input->vocab_file, input->merge_file)
                                    : fp8lm_tokenizer_create_bytes(tokenizer);
  return status == FP8CORE_OK ? FP8LM_EXIT_SUCCESS : fp8lm_data_failed(prefix);
}

// check

static const char check_help[] =
  "Usage: fp8lm data check [OPTION]... SHARD...\n"
  "\n"
  "Checks token shards (.bin of llm.c): header, length, every token against the vocabulary, and the checksum, if the\n"
  "shard has one. Prints a line for each.\n"
  "\n"
  "Options:\n"
  "  --vocab-size N  tokens must be below N (default: below what the shard says, if it does)\n"
  "  --help          print this text\n"
  "\n"
  "Exit codes: 0 success; 1 a shard is not good (the others are still checked); 2 wrong usage.\n";

int fp8lm_data_check(int argc, char **argv) {
  static const char prefix[] = "fp8lm data check";
  static const struct option options[] = {
    {"vocab-size", required_argument, NULL, 'v'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
  int64_t vocabulary = 0;
  opterr = 0;
  optind = 1;
  for (int option; (option = getopt_long(argc, argv, ":h", options, NULL)) != -1;) {
    switch (option) {
    case 'v':
      if (fp8lm_parse_integer(prefix, "--vocab-size", optarg, 1, INT32_MAX, &vocabulary)) return FP8LM_EXIT_USAGE;
      break;
    case 'h': fputs(check_help, stdout); return FP8LM_EXIT_SUCCESS;
    default: return fp8lm_option_error(prefix, option, argv, options);
    }
  }
  if (optind == argc) return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "no shard given; see '%s --help'", prefix);
  int result = FP8LM_EXIT_SUCCESS;
  for (int i = optind; i < argc; i++) {
    fp8lm_shard shard;
    fp8core_status status = fp8lm_shard_open(&shard, argv[i]);
    if (status == FP8CORE_OK) status = fp8lm_shard_check(&shard, (uint32_t)vocabulary);
    if (status != FP8CORE_OK) {
      result = fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s: %s", argv[i], fp8core_last_error());
    } else {
      fp8lm_print_text(stdout, argv[i]);
      printf(": %" PRIu64 " tokens of %u bits", shard.count, 8 * shard.width);
      if (shard.vocabulary) printf(", vocabulary %" PRIu32, shard.vocabulary);
      printf(", %s\n", shard.has_checksum ? "checksum right" : "no checksum");
    }
    fp8lm_shard_close(&shard);
  }
  return result;
}

// decode

static const char decode_help[] =
  "Usage: fp8lm data decode [OPTION]... SHARD...\n"
  "\n"
  "Writes the text of token shards to standard output.\n"
  "\n"
  "Options:\n"
  "  --tokenizer NAME   bytes (default) or gpt2\n"
  "  --vocab-file FILE  vocab.json of gpt2\n"
  "  --merge-file FILE  merges.txt of gpt2\n"
  "  --help             print this text\n"
  "\n"
  "The end of a text is written as <|endoftext|>.\n"
  "Exit codes: 0 success; 1 a shard cannot be read or has a token that the vocabulary lacks; 2 wrong usage.\n";

static fp8core_status decode_shard(const fp8lm_shard *shard, const fp8lm_tokenizer *tokenizer) {
  int32_t block[4096];
  for (uint64_t first = 0; first < shard->count; first += 4096) {
    const size_t count = shard->count - first < 4096 ? (size_t)(shard->count - first) : 4096;
    const fp8core_status status = fp8lm_shard_read(shard, first, count, block);
    if (status != FP8CORE_OK) return status;
    for (size_t i = 0; i < count; i++) {
      size_t length;
      const unsigned char *bytes = fp8lm_tokenizer_bytes(tokenizer, (uint32_t)block[i], &length);
      if (!bytes) {
        return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                      "token %" PRIu64 " is %" PRId32 ", which the vocabulary lacks", first + i,
                                      block[i]);
      }
      fwrite(bytes, 1, length, stdout);
    }
    if (ferror(stdout)) break;
  }
  return FP8CORE_OK;
}

int fp8lm_data_decode(int argc, char **argv) {
  static const char prefix[] = "fp8lm data decode";
  static const struct option options[] = {
    FP8LM_DATA_TOKENIZER_OPTIONS, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
  fp8lm_data_input input = fp8lm_data_input_default();
  opterr = 0;
  optind = 1;
  for (int option; (option = getopt_long(argc, argv, ":h", options, NULL)) != -1;) {
    if (option == 'h') {
      fputs(decode_help, stdout);
      return FP8LM_EXIT_SUCCESS;
    }
    const int taken = fp8lm_data_option(prefix, option, optarg, &input);
    if (taken > 0) return fp8lm_option_error(prefix, option, argv, options);
    if (taken < 0) return FP8LM_EXIT_USAGE;
  }
  if (optind == argc) return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "no shard given; see '%s --help'", prefix);
  fp8lm_tokenizer *tokenizer = NULL;
  int result = fp8lm_data_tokenizer(prefix, &input, &tokenizer);
  for (int i = optind; i < argc && result == FP8LM_EXIT_SUCCESS; i++) {
    fp8lm_shard shard;
    fp8core_status status = fp8lm_shard_open(&shard, argv[i]);
    if (status == FP8CORE_OK) status = decode_shard(&shard, tokenizer);
    if (status != FP8CORE_OK) {
      result = fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s: %s", argv[i], fp8core_last_error());
    }
    fp8lm_shard_close(&shard);
  }
  fp8lm_tokenizer_destroy(&tokenizer);
  return result;
}
