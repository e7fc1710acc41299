// fp8lm data tokenize: text to token shards.
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data.h"
#include "json_writer.h"
#include "output.h"
#include "parallel.h"
#include "shard.h"

#define PREFIX "fp8lm data tokenize"

static const char help_text[] =
  "Usage: fp8lm data tokenize --output-prefix PREFIX [OPTION]... FILE...\n"
  "\n"
  "Turns text into shards of tokens PREFIX_train_000000.bin, PREFIX_train_000001.bin, ..., and PREFIX_val_000000.bin, "
  "...\n"
  "(the .bin files of llm.c; docs/data.md). Files are plain text, each a document, or JSONL, each line a document; '-' "
  "is\n"
  "standard input.\n"
  "\n"
  "Tokenizer:\n"
  "  --tokenizer NAME       bytes (256 bytes and the end of a text; default) or gpt2 (byte-level BPE)\n"
  "  --vocab-file FILE      vocab.json of gpt2\n"
  "  --merge-file FILE      merges.txt of gpt2\n"
  "  --append-eod           append the token <|endoftext|> to every document\n"
  "  --parse-special        \"<|endoftext|>\" in the text becomes that token; otherwise it is text like any other\n"
  "  --invalid-utf8 WHAT    bytes that are not UTF-8: replace (by U+FFFD; default for gpt2), keep (default for bytes) "
  "or\n"
  "                         refuse\n"
  "\n"
  "Input:\n"
  "  --input-format FORMAT  auto (JSONL by the extensions .jsonl, .ndjson, .json; default), text or jsonl\n"
  "  --json-keys KEY        the key of a document's text in JSONL (default text)\n"
  "\n"
  "Output:\n"
  "  --output-prefix PREFIX where the shards go; the folder must exist\n"
  "  --shard-size N         most tokens of a shard, 1 to 2147483647 (default 100000000)\n"
  "  --val-fraction F       share for validation, 0 to 0.999 (default 0)\n"
  "  --val-by HOW           tail (the last tokens of all; default) or document (each by a hash of its number)\n"
  "  --seed N               of that hash (default 0)\n"
  "  --overwrite            replace shards of the same prefix\n"
  "  --json                 print the summary as one JSON object\n"
  "\n"
  "  --threads N            CPU threads, 1 to 1024 (default: the CPUs there are); the result is the same\n"
  "  --help                 print this text\n"
  "\n"
  "Shards are written to PREFIX_..._NNNNNN.bin.tmp, synced, and get their names when all are done; after an error "
  "there is\n"
  "none. Documents without any text are left out.\n"
  "Exit codes: 0 success; 1 a file cannot be read or written, or is malformed; 2 wrong usage.\n";

enum {
  OPTION_OUTPUT_PREFIX = 1,
  OPTION_APPEND_EOD,
  OPTION_PARSE_SPECIAL,
  OPTION_SHARD_SIZE,
  OPTION_VAL_FRACTION,
  OPTION_VAL_BY,
  OPTION_SEED,
  OPTION_OVERWRITE,
  OPTION_JSON
};

static const struct option options[] = {FP8LM_DATA_TOKENIZER_OPTIONS,
                                        FP8LM_DATA_TEXT_OPTIONS,
                                        {"output-prefix", required_argument, NULL, OPTION_OUTPUT_PREFIX},
                                        {"append-eod", no_argument, NULL, OPTION_APPEND_EOD},
                                        {"parse-special", no_argument, NULL, OPTION_PARSE_SPECIAL},
                                        {"shard-size", required_argument, NULL, OPTION_SHARD_SIZE},
                                        {"val-fraction", required_argument, NULL, OPTION_VAL_FRACTION},
                                        {"val-by", required_argument, NULL, OPTION_VAL_BY},
                                        {"seed", required_argument, NULL, OPTION_SEED},
                                        {"overwrite", no_argument, NULL, OPTION_OVERWRITE},
                                        {"json", no_argument, NULL, OPTION_JSON},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};

typedef struct settings {
  fp8lm_data_input input;
  const char *output_prefix;
  int append_eod;
  int parse_special;
  int64_t shard_size;
  double val_fraction;
  int val_by_document;
  int64_t seed;
  int overwrite;
  int json;
} settings;

// A piece of the input and the tokens of it.
typedef struct item {
  fp8lm_piece piece;
  fp8lm_tokens tokens;
  // Documents end at these tokens; of a text that goes on in the next piece, none does.
  size_t *ends;
  size_t end_count;
  size_t end_room;
  fp8core_status status;
  char message[500];
  // For the callback.
  fp8lm_encoder *encoder;
} item;

typedef struct work {
  const settings *set;
  fp8lm_tokenizer *tokenizer;
  fp8lm_encoder **encoders;
  item *items;
  size_t item_count;
  // Train, validation.
  fp8lm_shard_writer *writers[2];
  // Of a validation by the tail: all tokens, before they are divided.
  int spool;
  uint64_t spooled;
  // Figures. The document that is being read has a number, and tokens so far.
  uint64_t bytes;
  uint64_t documents;
  uint64_t empty_documents;
  uint64_t document_tokens;
  uint64_t validation_documents;
} work;

static fp8core_status add_end(item *at) {
  if (at->end_count == at->end_room) {
    const size_t room = at->end_room ? 2 * at->end_room : 64;
    size_t *larger = realloc(at->ends, room * sizeof(size_t));
    if (!larger) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for the documents");
    at->ends = larger;
    at->end_room = room;
  }
  at->ends[at->end_count++] = at->tokens.count;
  return FP8CORE_OK;
}

static fp8core_status encode_document(void *context, const char *text, size_t size) {
  item *at = context;
  fp8core_status status = fp8lm_encoder_feed(at->encoder, text, size, &at->tokens);
  if (status == FP8CORE_OK) status = fp8lm_encoder_finish(at->encoder, &at->tokens);
  return status == FP8CORE_OK ? add_end(at) : status;
}

static void encode_item(void *context, size_t index, int thread) {
  work *all = context;
  item *at = &all->items[index];
  at->encoder = all->encoders[thread];
  at->tokens.count = 0;
  at->end_count = 0;
  if (at->piece.jsonl) {
    at->status = fp8lm_each_json_text(&at->piece, all->set->input.json_key, encode_document, at);
    if (at->status != FP8CORE_OK) snprintf(at->message, sizeof(at->message), "%s", fp8core_last_error());
    return;
  }
  fp8lm_encoder_locate(at->encoder, at->piece.offset);
  at->status = fp8lm_encoder_feed(at->encoder, at->piece.bytes, at->piece.size, &at->tokens);
  if (at->status == FP8CORE_OK) at->status = fp8lm_encoder_finish(at->encoder, &at->tokens);
  if (at->status == FP8CORE_OK && at->piece.ends_document) at->status = add_end(at);
  if (at->status != FP8CORE_OK)
    snprintf(at->message, sizeof(at->message), "%s: %s", at->piece.name, fp8core_last_error());
}

// SplitMix64 of the seed and the document's number.
static int for_validation(const work *all) {
  if (!all->set->val_by_document || all->set->val_fraction == 0.0) return 0;
  uint64_t x = (uint64_t)all->set->seed + (all->documents + 1) * UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  x ^= x >> 31;
  return (double)(x >> 11) * 0x1p-53 < all->set->val_fraction;
}

static fp8core_status spool_tokens(work *all, const uint32_t *tokens, size_t count) {
  const unsigned char *next = (const unsigned char *)tokens;
  for (size_t bytes = count * sizeof(uint32_t); bytes;) {
    const ssize_t written = write(all->spool, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "%s.spool.tmp: cannot write: %s", all->set->output_prefix,
                                    strerror(errno));
    }
    next += written;
    bytes -= (size_t)written;
  }
  all->spooled += count;
  return FP8CORE_OK;
}

static fp8core_status put(work *all, const uint32_t *tokens, size_t count) {
  if (count == 0) return FP8CORE_OK;
  all->document_tokens += count;
  if (all->spool >= 0) return spool_tokens(all, tokens, count);
  return fp8lm_shard_writer_append(all->writers[for_validation(all)], tokens, count);
}

// Writes the tokens of an item, the documents' ends included.
static fp8core_status put_item(work *all, const item *at) {
  if (at->status != FP8CORE_OK) return fp8core_set_last_error(at->status, "%s", at->message);
  size_t start = 0;
  for (size_t i = 0; i < at->end_count; i++) {
    fp8core_status status = put(all, at->tokens.ids + start, at->ends[i] - start);
    start = at->ends[i];
    const uint32_t end = (uint32_t)fp8lm_tokenizer_end_of_text(all->tokenizer);
    const int is_empty = all->document_tokens == 0;
    if (status == FP8CORE_OK && all->set->append_eod && !is_empty) status = put(all, &end, 1);
    if (status != FP8CORE_OK) return status;
    all->validation_documents += (uint64_t)(!is_empty && for_validation(all));
    all->empty_documents += (uint64_t)is_empty;
    all->documents++;
    all->document_tokens = 0;
  }
  return put(all, at->tokens.ids + start, at->tokens.count - start);
}

static fp8core_status encode_all(work *all, fp8lm_text_source *source) {
  for (int more = 1; more;) {
    size_t count = 0;
    fp8core_status status = FP8CORE_OK;
    while (more && status == FP8CORE_OK && count < all->item_count) {
      status = fp8lm_text_next(source, &all->items[count].piece, &more);
      if (status != FP8CORE_OK || !more) break;
      all->bytes += all->items[count].piece.size;
      count++;
    }
    if (status != FP8CORE_OK) return status;
    fp8lm_parallel(all->set->input.threads, count, encode_item, all);
    for (size_t i = 0; i < count; i++) {
      status = put_item(all, &all->items[i]);
      if (status != FP8CORE_OK) return status;
    }
    if (fp8lm_data_interrupted) return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "interrupted");
  }
  return FP8CORE_OK;
}

// The spooled tokens: the last ones for validation, the others for training.
static fp8core_status divide_spool(work *all) {
  const uint64_t tail = (uint64_t)((double)all->spooled * all->set->val_fraction);
  const uint64_t train = all->spooled - tail;
  static uint32_t block[65536];
  for (uint64_t done = 0; done < all->spooled;) {
    const int validation = done >= train;
    const uint64_t left = (validation ? all->spooled : train) - done;
    const size_t count = left < 65536 ? (size_t)left : 65536;
    size_t bytes = 0;
    while (bytes < count * sizeof(uint32_t)) {
      const ssize_t got = pread(all->spool, (unsigned char *)block + bytes, count * sizeof(uint32_t) - bytes,
                                (off_t)(done * sizeof(uint32_t) + bytes));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "%s.spool.tmp: cannot read: %s", all->set->output_prefix,
                                      got < 0 ? strerror(errno) : "it became shorter");
      }
      bytes += (size_t)got;
    }
    const fp8core_status status = fp8lm_shard_writer_append(all->writers[validation], block, count);
    if (status != FP8CORE_OK) return status;
    if (fp8lm_data_interrupted) return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "interrupted");
    done += count;
  }
  return FP8CORE_OK;
}

static char *joined(const char *prefix, const char *suffix) {
  char *text = malloc(strlen(prefix) + strlen(suffix) + 1);
  if (text) {
    (void)strcpy(text, prefix);
    (void)strcat(text, suffix);
  }
  return text;
}

static const char *const suffixes[2] = {"_train", "_val"};

static fp8core_status open_outputs(work *all) {
  for (int split = 0; split < 2; split++) {
    char *prefix = joined(all->set->output_prefix, suffixes[split]);
    if (!prefix) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory");
    char **paths;
    size_t count;
    fp8core_status status = fp8lm_shard_series(prefix, &paths, &count);
    const int there = count > 0 || status == FP8CORE_ERROR_CORRUPT_DATA;
    fp8lm_shard_series_free(&paths, count);
    if (there && !all->set->overwrite) {
      status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                      "shards %s_NNNNNN.bin are there already: --overwrite replaces them", prefix);
    } else if (there || status == FP8CORE_OK) {
      status = fp8lm_shard_writer_create(&all->writers[split], prefix, fp8lm_tokenizer_vocabulary(all->tokenizer),
                                         (uint64_t)all->set->shard_size);
    }
    free(prefix);
    if (status != FP8CORE_OK) return status;
  }
  if (all->set->val_fraction > 0.0 && !all->set->val_by_document) {
    char *path = joined(all->set->output_prefix, ".spool.tmp");
    if (!path) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory");
    const fp8core_status status = fp8lm_output_create(&all->spool, path);
    if (status != FP8CORE_OK) {
      (void)fp8core_set_last_error(status, "%s: %s", path, fp8core_last_error());
      free(path);
      return status;
    }
    // It goes away with this process, however that ends.
    (void)unlink(path);
    free(path);
  }
  return FP8CORE_OK;
}

static fp8core_status close_outputs(work *all) {
  fp8core_status status = all->spool >= 0 ? divide_spool(all) : FP8CORE_OK;
  for (int split = 0; split < 2 && status == FP8CORE_OK; split++)
    status = fp8lm_shard_writer_finish(all->writers[split]);
  if (status != FP8CORE_OK) return status;
  const uint64_t train = fp8lm_shard_writer_tokens(all->writers[0]);
  const uint64_t validation = fp8lm_shard_writer_tokens(all->writers[1]);
  if (train + validation == 0) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the input has no text: nothing was written");
  }
  if (all->set->val_fraction > 0.0 && (train == 0 || validation == 0)) {
    return fp8core_set_last_error(
      FP8CORE_ERROR_INVALID_ARGUMENT, "--val-fraction %g of %" PRIu64 " %s leaves nothing for %s: nothing was written",
      all->set->val_fraction, all->set->val_by_document ? all->documents : train + validation,
      all->set->val_by_document ? "documents" : "tokens", train ? "validation" : "training");
  }
  for (int split = 0; split < 2 && status == FP8CORE_OK; split++) {
    status = fp8lm_shard_writer_commit(all->writers[split]);
    char *prefix = all->set->overwrite ? joined(all->set->output_prefix, suffixes[split]) : NULL;
    if (status == FP8CORE_OK && prefix) {
      status = fp8lm_shard_series_trim(prefix, fp8lm_shard_writer_shards(all->writers[split]));
    }
    free(prefix);
  }
  return status;
}

static void print_summary(const work *all, size_t files, double seconds) {
  const settings *set = all->set;
  uint64_t replaced = 0;
  for (int i = 0; i < set->input.threads; i++) replaced += fp8lm_encoder_replaced(all->encoders[i]);
  const uint64_t tokens = fp8lm_shard_writer_tokens(all->writers[0]) + fp8lm_shard_writer_tokens(all->writers[1]);
  const double rate = seconds > 0.0 ? 1e-6 * (double)all->bytes / seconds : 0.0;
  const char *kind = set->input.vocab_file ? "gpt2" : "bytes";
  if (set->json) {
    printf("{\"tokenizer\": \"%s\", \"vocabulary\": %" PRIu32 ", \"end_of_text\": %" PRId64 ", \"files\": %zu"
           ", \"documents\": %" PRIu64 ", \"empty_documents\": %" PRIu64 ", \"validation_documents\": %" PRIu64
           ", \"bytes\": %" PRIu64 ", \"tokens\": %" PRIu64 ", \"replaced\": %" PRIu64,
           kind, fp8lm_tokenizer_vocabulary(all->tokenizer), fp8lm_tokenizer_end_of_text(all->tokenizer), files,
           all->documents, all->empty_documents, all->validation_documents, all->bytes, tokens, replaced);
    for (int split = 0; split < 2; split++) {
      printf(", \"%s\": {\"tokens\": %" PRIu64 ", \"shards\": [", split ? "validation" : "train",
             fp8lm_shard_writer_tokens(all->writers[split]));
      for (size_t i = 0; i < fp8lm_shard_writer_shards(all->writers[split]); i++) {
        char *path = NULL;
        if (asprintf(&path, "%s%s_%06zu.bin", set->output_prefix, suffixes[split], i) < 0) continue;
        if (i) printf(", ");
        fp8lm_json_write_string(stdout, path, strlen(path));
        free(path);
      }
      printf("]}");
    }
    printf(", \"threads\": %d, \"seconds\": ", set->input.threads);
    fp8lm_json_write_number(stdout, seconds);
    printf(", \"megabytes_per_second\": ");
    fp8lm_json_write_number(stdout, rate);
    printf("}\n");
    return;
  }
  printf("tokenizer   %s, vocabulary %" PRIu32 "\n", kind, fp8lm_tokenizer_vocabulary(all->tokenizer));
  printf("input       %zu file%s, %" PRIu64 " document%s (%" PRIu64 " empty), %" PRIu64 " bytes\n", files,
         files == 1 ? "" : "s", all->documents, all->documents == 1 ? "" : "s", all->empty_documents, all->bytes);
  if (replaced) printf("            %" PRIu64 " sequences that are not UTF-8 replaced by U+FFFD\n", replaced);
  for (int split = 0; split < 2; split++) {
    const size_t shards = fp8lm_shard_writer_shards(all->writers[split]);
    if (!shards) continue;
    printf("%-11s %" PRIu64 " tokens in %zu shard%s, ", split ? "validation" : "train",
           fp8lm_shard_writer_tokens(all->writers[split]), shards, shards == 1 ? "" : "s");
    fp8lm_print_text(stdout, set->output_prefix);
    printf("%s_000000.bin", suffixes[split]);
    if (shards > 1) printf(" to %06zu", shards - 1);
    printf("\n");
  }
  printf("            %.3f bytes a token; %.1f MB/s, %d thread%s\n", (double)all->bytes / (double)tokens, rate,
         set->input.threads, set->input.threads == 1 ? "" : "s");
}

static int tokenize(const settings *set, char *const *paths, size_t count) {
  work all;
  memset(&all, 0, sizeof(all));
  all.set = set;
  all.spool = -1;
  int result = fp8lm_data_tokenizer(PREFIX, &set->input, &all.tokenizer);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  const double start = fp8lm_data_seconds();
  const int bpe = set->input.vocab_file != NULL;
  fp8lm_encoder_options encoding;
  encoding.special = set->parse_special;
  encoding.invalid_utf8 = set->input.invalid_utf8 >= 0 ? (fp8lm_invalid_utf8)set->input.invalid_utf8
                          : bpe                        ? FP8LM_INVALID_REPLACE
                                                       : FP8LM_INVALID_KEEP;
  const int anywhere = !bpe && !set->parse_special && encoding.invalid_utf8 == FP8LM_INVALID_KEEP;
  fp8lm_text_source source;
  fp8lm_text_source_init(&source, paths, count, set->input.format,
                         anywhere             ? FP8LM_DIVIDE_ANYWHERE
                         : set->parse_special ? FP8LM_DIVIDE_SPACE
                                              : FP8LM_DIVIDE_WORDS,
                         &fp8lm_data_interrupted);
  fp8core_status status = FP8CORE_OK;
  if ((set->append_eod || set->parse_special) && fp8lm_tokenizer_end_of_text(all.tokenizer) < 0) {
    status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: has no token <|endoftext|>, which %s needs",
                                    set->input.vocab_file, set->append_eod ? "--append-eod" : "--parse-special");
  }
  all.item_count = set->input.threads == 1 ? 1 : 2 * (size_t)set->input.threads;
  all.items = calloc(all.item_count, sizeof(item));
  all.encoders = calloc((size_t)set->input.threads, sizeof(fp8lm_encoder *));
  if (!all.items || !all.encoders) {
    status =
      fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for %d threads", set->input.threads);
  }
  for (int i = 0; i < set->input.threads && status == FP8CORE_OK; i++) {
    status = fp8lm_encoder_create(&all.encoders[i], all.tokenizer, &encoding);
  }
  if (status == FP8CORE_OK) status = open_outputs(&all);
  if (status == FP8CORE_OK) status = encode_all(&all, &source);
  if (status == FP8CORE_OK) status = close_outputs(&all);
  if (status == FP8CORE_OK)
    print_summary(&all, count, fp8lm_data_seconds() - start);
  else
    result = fp8lm_data_failed(PREFIX);
  if (all.spool >= 0) (void)close(all.spool);
  for (int split = 0; split < 2; split++) fp8lm_shard_writer_destroy(&all.writers[split]);
  for (int i = 0; all.encoders && i < set->input.threads; i++) fp8lm_encoder_destroy(&all.encoders[i]);
  for (size_t i = 0; all.items && i < all.item_count; i++) {
    fp8lm_piece_free(&all.items[i].piece);
    fp8lm_tokens_free(&all.items[i].tokens);
    free(all.items[i].ends);
  }
  free(all.encoders);
  free(all.items);
  fp8lm_text_source_free(&source);
  fp8lm_tokenizer_destroy(&all.tokenizer);
  return result;
}

int fp8lm_data_tokenize(int argc, char **argv) {
  static const char *const ways[] = {"tail", "document", NULL};
  settings set = {fp8lm_data_input_default(), NULL, 0, 0, 100000000, 0.0, 0, 0, 0, 0};
  opterr = 0;
  optind = 1;
  for (int option; (option = getopt_long(argc, argv, ":h", options, NULL)) != -1;) {
    int taken = 0;
    switch (option) {
    case OPTION_OUTPUT_PREFIX: set.output_prefix = optarg; break;
    case OPTION_APPEND_EOD: set.append_eod = 1; break;
    case OPTION_PARSE_SPECIAL: set.parse_special = 1; break;
    case OPTION_SHARD_SIZE:
      taken = fp8lm_parse_integer(PREFIX, "--shard-size", optarg, 1, FP8LM_SHARD_MAX_TOKENS, &set.shard_size);
      break;
    case OPTION_VAL_FRACTION:
      taken = fp8lm_parse_real(PREFIX, "--val-fraction", optarg, 0.0, 0.999, &set.val_fraction);
      break;
    case OPTION_VAL_BY: taken = set.val_by_document = fp8lm_data_choice(PREFIX, "--val-by", optarg, ways); break;
    case OPTION_SEED: taken = fp8lm_parse_integer(PREFIX, "--seed", optarg, 0, INT64_MAX, &set.seed); break;
    case OPTION_OVERWRITE: set.overwrite = 1; break;
    case OPTION_JSON: set.json = 1; break;
    case 'h': fputs(help_text, stdout); return FP8LM_EXIT_SUCCESS;
    default:
      taken = fp8lm_data_option(PREFIX, option, optarg, &set.input);
      if (taken > 0) return fp8lm_option_error(PREFIX, option, argv, options);
    }
    if (taken < 0) return FP8LM_EXIT_USAGE;
  }
  if (!set.output_prefix || !*set.output_prefix) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "no --output-prefix given; see '" PREFIX " --help'");
  }
  if (optind == argc) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "no file given ('-' is standard input); see '" PREFIX " --help'");
  }
  fp8lm_data_catch_signals();
  return tokenize(&set, argv + optind, (size_t)(argc - optind));
}
