// fp8lm data train-bpe: a byte-level BPE from text.
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bpe_train.h"
#include "data.h"
#include "json_writer.h"
#include "output.h"
#include "parallel.h"

#define PREFIX "fp8lm data train-bpe"

static const char help_text[] =
  "Usage: fp8lm data train-bpe --output-folder FOLDER [OPTION]... FILE...\n"
  "\n"
  "Makes a byte-level BPE of text: FOLDER/vocab.json and FOLDER/merges.txt, as GPT-2 and the package tokenizers have "
  "them.\n"
  "Files are plain text or JSONL; '-' is standard input. The same text gives the same files: of pairs that are as\n"
  "frequent, the one with the smaller ids is merged first (docs/data.md).\n"
  "\n"
  "Options:\n"
  "  --output-folder FOLDER where the files go; made if it is not there\n"
  "  --vocab-size N         tokens of the vocabulary, with the 256 bytes and <|endoftext|>, 257 to 16777216 (default\n"
  "                         50257); fewer where pairs run out\n"
  "  --min-frequency N      pairs that are rarer are not merged (default 2)\n"
  "  --end-of-text PLACE    id of <|endoftext|>: first (0, as tokenizers has it; default), last (as GPT-2 has it) or "
  "none\n"
  "  --by-line              every line is a text of its own, as ByteLevelBPETokenizer.train() of tokenizers reads "
  "files\n"
  "  --input-format FORMAT  auto (JSONL by the extensions .jsonl, .ndjson, .json; default), text or jsonl\n"
  "  --json-keys KEY        the key of a document's text in JSONL (default text)\n"
  "  --invalid-utf8 WHAT    bytes that are not UTF-8: replace (by U+FFFD; default), keep or refuse\n"
  "  --overwrite            replace files that are there\n"
  "  --json                 print the summary as one JSON object\n"
  "  --threads N            CPU threads, 1 to 1024 (default: the CPUs there are); the result is the same\n"
  "  --help                 print this text\n"
  "\n"
  "Exit codes: 0 success; 1 a file cannot be read or written, or is malformed; 2 wrong usage.\n";

enum {
  OPTION_OUTPUT_FOLDER = 1,
  OPTION_VOCAB_SIZE,
  OPTION_MIN_FREQUENCY,
  OPTION_END_OF_TEXT,
  OPTION_BY_LINE,
  OPTION_OVERWRITE,
  OPTION_JSON
};

static const struct option options[] = {FP8LM_DATA_TEXT_OPTIONS,
                                        {"output-folder", required_argument, NULL, OPTION_OUTPUT_FOLDER},
                                        {"vocab-size", required_argument, NULL, OPTION_VOCAB_SIZE},
                                        {"min-frequency", required_argument, NULL, OPTION_MIN_FREQUENCY},
                                        {"end-of-text", required_argument, NULL, OPTION_END_OF_TEXT},
                                        {"by-line", no_argument, NULL, OPTION_BY_LINE},
                                        {"overwrite", no_argument, NULL, OPTION_OVERWRITE},
                                        {"json", no_argument, NULL, OPTION_JSON},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};

typedef struct settings {
  fp8lm_data_input input;
  const char *output_folder;
  fp8lm_train_options training;
  int by_line;
  int overwrite;
  int json;
} settings;

// A piece of the input.
typedef struct item {
  fp8lm_piece piece;
  fp8core_status status;
  char message[500];
} item;

// What a thread has counted.
typedef struct counter {
  const settings *set;
  fp8lm_word_counts counts;
  uint64_t replaced;
  unsigned char *text;
  size_t room;
} counter;

typedef struct work {
  counter *counters;
  item *items;
} work;

static fp8core_status count_text(void *context, const char *text, size_t size) {
  counter *c = context;
  const int policy = c->set->input.invalid_utf8;
  const size_t needed = 3 * size + 1;
  if (needed > c->room) {
    free(c->text);
    c->text = malloc(needed);
    c->room = c->text ? needed : 0;
    if (!c->text) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for %zu bytes", needed);
  }
  const fp8lm_repaired repaired = fp8lm_repair_utf8(c->text, (const unsigned char *)text, size, 1,
                                                    policy < 0 ? FP8LM_INVALID_REPLACE : (fp8lm_invalid_utf8)policy);
  c->replaced += repaired.replaced;
  if (repaired.refused) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "0x%02x is not UTF-8, after %zu bytes that are",
                                  (unsigned)(unsigned char)text[repaired.used], repaired.used);
  }
  if (!c->set->by_line) return fp8lm_count_words(&c->counts, c->text, repaired.written);
  for (size_t start = 0; start < repaired.written;) {
    const unsigned char *newline = memchr(c->text + start, '\n', repaired.written - start);
    const size_t end = newline ? (size_t)(newline - c->text) + 1 : repaired.written;
    const fp8core_status status = fp8lm_count_words(&c->counts, c->text + start, end - start);
    if (status != FP8CORE_OK) return status;
    start = end;
  }
  return FP8CORE_OK;
}

static void count_item(void *context, size_t index, int thread) {
  const work *all = context;
  counter *c = &all->counters[thread];
  item *at = &all->items[index];
  if (at->piece.jsonl) {
    at->status = fp8lm_each_json_text(&at->piece, c->set->input.json_key, count_text, c);
    if (at->status != FP8CORE_OK) snprintf(at->message, sizeof(at->message), "%s", fp8core_last_error());
  } else {
    at->status = count_text(c, at->piece.bytes, at->piece.size);
    if (at->status != FP8CORE_OK) {
      snprintf(at->message, sizeof(at->message), "%s, from byte %" PRIu64 " on: %s", at->piece.name, at->piece.offset,
               fp8core_last_error());
    }
  }
}

static fp8core_status count_all(work *all, fp8lm_text_source *source, size_t item_count, int threads, uint64_t *bytes) {
  for (int more = 1; more;) {
    size_t count = 0;
    while (count < item_count) {
      const fp8core_status status = fp8lm_text_next(source, &all->items[count].piece, &more);
      if (status != FP8CORE_OK) return status;
      if (!more) break;
      *bytes += all->items[count++].piece.size;
    }
    fp8lm_parallel(threads, count, count_item, all);
    for (size_t i = 0; i < count; i++) {
      if (all->items[i].status != FP8CORE_OK) {
        return fp8core_set_last_error(all->items[i].status, "%s", all->items[i].message);
      }
    }
    if (fp8lm_data_interrupted) return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "interrupted");
  }
  return FP8CORE_OK;
}

static fp8core_status device_error(const char *path, const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "%s: cannot %s: %s", path, what, strerror(errno));
}

// *created says whether the file is there, whole or not: what else lies at the name is not ours to remove.
static fp8core_status write_temporary(const char *path, const char *text, size_t size, int *created) {
  int descriptor;
  fp8core_status status = fp8lm_output_create(&descriptor, path);
  *created = status == FP8CORE_OK;
  if (status != FP8CORE_OK) return fp8core_set_last_error(status, "%s: %s", path, fp8core_last_error());
  while (size && status == FP8CORE_OK) {
    const ssize_t written = write(descriptor, text, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      status = device_error(path, "write");
    } else {
      text += written;
      size -= (size_t)written;
    }
  }
  if (status == FP8CORE_OK && fsync(descriptor) != 0 && errno != EINVAL) status = device_error(path, "sync");
  if (close(descriptor) != 0 && status == FP8CORE_OK) status = device_error(path, "close");
  return status;
}

// Both files under temporary names, then under their own.
static fp8core_status write_files(const settings *set, const fp8lm_trained *trained) {
  static const char *const names[2] = {"vocab.json", "merges.txt"};
  const char *texts[2] = {trained->vocab, trained->merges};
  const size_t sizes[2] = {trained->vocab_size, trained->merges_size};
  char *paths[2] = {NULL, NULL};
  char *temporary[2] = {NULL, NULL};
  int created[2] = {0, 0};
  fp8core_status status = FP8CORE_OK;
  if (mkdir(set->output_folder, 0777) != 0 && errno != EEXIST)
    return device_error(set->output_folder, "make the folder");
  for (int i = 0; i < 2; i++) {
    if (asprintf(&paths[i], "%s/%s", set->output_folder, names[i]) < 0 ||
        asprintf(&temporary[i], "%s.tmp", paths[i]) < 0) {
      paths[i] = NULL;
      status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory");
    }
  }
  for (int i = 0; i < 2 && status == FP8CORE_OK; i++)
    status = write_temporary(temporary[i], texts[i], sizes[i], &created[i]);
  for (int i = 0; i < 2 && status == FP8CORE_OK; i++) {
    if (rename(temporary[i], paths[i]) != 0) status = device_error(paths[i], "rename the finished file to this");
  }
  for (int i = 0; i < 2; i++) {
    if (status != FP8CORE_OK && created[i]) (void)unlink(temporary[i]);
    free(temporary[i]);
    free(paths[i]);
  }
  return status;
}

static fp8core_status refuse_existing(const settings *set) {
  static const char *const names[2] = {"vocab.json", "merges.txt"};
  for (int i = 0; i < 2 && !set->overwrite; i++) {
    char *path = NULL;
    if (asprintf(&path, "%s/%s", set->output_folder, names[i]) < 0) {
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory");
    }
    const int there = access(path, F_OK) == 0;
    if (there)
      (void)fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s is there already: --overwrite replaces it",
                                   path);
    free(path);
    if (there) return FP8CORE_ERROR_INVALID_ARGUMENT;
  }
  return FP8CORE_OK;
}

static void print_summary(const settings *set, const fp8lm_trained *trained, const fp8lm_word_counts *counts,
                          uint64_t bytes, uint64_t replaced, double seconds) {
  if (set->json) {
    printf("{\"vocabulary\": %" PRIu32 ", \"merges\": %" PRIu32 ", \"words\": %zu, \"bytes\": %" PRIu64
           ", \"replaced\": %" PRIu64 ", \"tokens\": %" PRIu64 ", \"folder\": ",
           trained->vocabulary, trained->merge_count, counts->used, bytes, replaced, trained->tokens);
    fp8lm_json_write_string(stdout, set->output_folder, strlen(set->output_folder));
    printf(", \"seconds\": ");
    fp8lm_json_write_number(stdout, seconds);
    printf("}\n");
    return;
  }
  printf("%" PRIu64 " bytes, %zu different words\n", bytes, counts->used);
  if (replaced) printf("%" PRIu64 " sequences that are not UTF-8 replaced by U+FFFD\n", replaced);
  printf("vocabulary %" PRIu32 ", %" PRIu32 " merges: vocab.json and merges.txt in ", trained->vocabulary,
         trained->merge_count);
  fp8lm_print_text(stdout, set->output_folder);
  printf("\n");
  if (trained->vocabulary < set->training.vocabulary) {
    printf("fewer than %" PRIu32 ": no other pair is there %" PRIu64 " times\n", set->training.vocabulary,
           set->training.minimum_frequency);
  }
  printf("%.3f bytes a token of this text; %.1f s\n", (double)trained->bytes / (double)trained->tokens, seconds);
}

static int train(const settings *set, char *const *paths, size_t path_count) {
  const double start = fp8lm_data_seconds();
  const size_t threads = (size_t)set->input.threads;
  const size_t item_count = threads == 1 ? 1 : 2 * threads;
  work all = {calloc(threads, sizeof(counter)), calloc(item_count, sizeof(item))};
  fp8lm_text_source source;
  fp8lm_text_source_init(&source, paths, path_count, set->input.format, FP8LM_DIVIDE_WORDS, &fp8lm_data_interrupted);
  fp8lm_trained trained = {NULL, 0, NULL, 0, 0, 0, 0, 0};
  uint64_t bytes = 0;
  uint64_t replaced = 0;
  fp8core_status status = refuse_existing(set);
  if (!all.counters || !all.items) {
    status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for %zu threads", threads);
  }
  for (size_t i = 0; all.counters && i < threads; i++) all.counters[i].set = set;
  if (status == FP8CORE_OK) status = count_all(&all, &source, item_count, set->input.threads, &bytes);
  for (size_t i = 0; i < threads && status == FP8CORE_OK; i++) {
    replaced += all.counters[i].replaced;
    if (i) status = fp8lm_add_counts(&all.counters[0].counts, &all.counters[i].counts);
    if (i) fp8lm_word_counts_free(&all.counters[i].counts);
  }
  if (status == FP8CORE_OK && all.counters[0].counts.used == 0) {
    status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the input has no text: nothing was written");
  }
  if (status == FP8CORE_OK) status = fp8lm_train_bpe(&all.counters[0].counts, &set->training, &trained);
  if (status == FP8CORE_OK) status = write_files(set, &trained);
  int result = FP8LM_EXIT_SUCCESS;
  if (status == FP8CORE_OK)
    print_summary(set, &trained, &all.counters[0].counts, bytes, replaced, fp8lm_data_seconds() - start);
  else
    result = fp8lm_data_failed(PREFIX);
  fp8lm_trained_free(&trained);
  for (size_t i = 0; all.counters && i < threads; i++) {
    fp8lm_word_counts_free(&all.counters[i].counts);
    free(all.counters[i].text);
  }
  for (size_t i = 0; all.items && i < item_count; i++) fp8lm_piece_free(&all.items[i].piece);
  free(all.counters);
  free(all.items);
  fp8lm_text_source_free(&source);
  return result;
}

int fp8lm_data_train_bpe(int argc, char **argv) {
  static const char *const places[] = {"first", "last", "none", NULL};
  settings set = {fp8lm_data_input_default(), NULL, {50257, 2, FP8LM_END_OF_TEXT_FIRST}, 0, 0, 0};
  int64_t number;
  opterr = 0;
  optind = 1;
  for (int option; (option = getopt_long(argc, argv, ":h", options, NULL)) != -1;) {
    int taken = 0;
    switch (option) {
    case OPTION_OUTPUT_FOLDER: set.output_folder = optarg; break;
    case OPTION_VOCAB_SIZE:
      taken = fp8lm_parse_integer(PREFIX, "--vocab-size", optarg, 257, FP8LM_TOKENIZER_MAX_ID + 1, &number);
      if (taken == 0) set.training.vocabulary = (uint32_t)number;
      break;
    case OPTION_MIN_FREQUENCY:
      taken = fp8lm_parse_integer(PREFIX, "--min-frequency", optarg, 1, INT64_MAX, &number);
      if (taken == 0) set.training.minimum_frequency = (uint64_t)number;
      break;
    case OPTION_END_OF_TEXT:
      taken = fp8lm_data_choice(PREFIX, "--end-of-text", optarg, places);
      if (taken >= 0) set.training.end_of_text = (fp8lm_end_of_text_place)taken;
      break;
    case OPTION_BY_LINE: set.by_line = 1; break;
    case OPTION_OVERWRITE: set.overwrite = 1; break;
    case OPTION_JSON: set.json = 1; break;
    case 'h': fputs(help_text, stdout); return FP8LM_EXIT_SUCCESS;
    default:
      taken = fp8lm_data_option(PREFIX, option, optarg, &set.input);
      if (taken > 0) return fp8lm_option_error(PREFIX, option, argv, options);
    }
    if (taken < 0) return FP8LM_EXIT_USAGE;
  }
  if (!set.output_folder || !*set.output_folder) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "no --output-folder given; see '" PREFIX " --help'");
  }
  if (optind == argc) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "no file given ('-' is standard input); see '" PREFIX " --help'");
  }
  fp8lm_data_catch_signals();
  return train(&set, argv + optind, (size_t)(argc - optind));
}
