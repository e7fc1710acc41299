// fp8lm generate: text from a checkpoint.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "command.h"
#include "sampler.h"
#include "tokenizer.h"
#include "trainer.h"
#include "try.h"

#define PREFIX "fp8lm generate"

static const char help_text[] =
  "Usage: fp8lm generate --load DIR [OPTION]... [PROMPT]\n"
  "\n"
  "Continues a text with a trained model, and prints it as it comes. Without PROMPT (or with '-') the prompt is read\n"
  "from standard input; an empty one begins a new text.\n"
  "\n"
  "Options:\n"
  "  --load DIR         a checkpoint, or a --save folder of 'fp8lm train', whose newest is taken\n"
  "  --max-tokens N     tokens to generate, at most (default 256)\n"
  "  --temperature X    0 for the most probable token always (default 1)\n"
  "  --top-k N          only the N most probable tokens, 0 for all (default 0)\n"
  "  --top-p X          only the most probable tokens that together have this probability (default 1)\n"
  "  --seed N           of the draws (default 0)\n"
  "  --ignore-eot       go on after <|endoftext|>\n"
  "  --vocab-file FILE  vocab.json of the tokenizer (default: that of the checkpoint, or bytes)\n"
  "  --merge-file FILE  merges.txt of the same\n"
  "  --device NAME      cpu (default) or cuda\n"
  "  --threads N        CPU threads (default OMP_NUM_THREADS or all)\n"
  "  --help             print this text\n"
  "\n"
  "The text may become longer than the model's sequence: the older half is forgotten then.\n"
  "Exit codes: 0 success; 1 a checkpoint that cannot be read, a prompt that cannot be encoded, or no such device;\n"
  "2 wrong usage.\n";

typedef struct generate_settings {
  const char *load;
  const char *prompt;
  const char *vocab_file;
  const char *merge_file;
  int64_t max_tokens;
  int64_t threads;
  int cuda;
  int ignore_eot;
  fp8lm_sampler_options sampling;
} generate_settings;

enum {
  OPTION_LOAD = 256,
  OPTION_MAX_TOKENS,
  OPTION_TEMPERATURE,
  OPTION_TOP_K,
  OPTION_TOP_P,
  OPTION_SEED,
  OPTION_IGNORE_EOT,
  OPTION_VOCAB_FILE,
  OPTION_MERGE_FILE,
  OPTION_DEVICE,
  OPTION_THREADS,
  OPTION_HELP
};

static const struct option options[] = {
  {"load", required_argument, NULL, OPTION_LOAD},
  {"max-tokens", required_argument, NULL, OPTION_MAX_TOKENS},
  {"temperature", required_argument, NULL, OPTION_TEMPERATURE},
  {"top-k", required_argument, NULL, OPTION_TOP_K},
  {"top-p", required_argument, NULL, OPTION_TOP_P},
  {"seed", required_argument, NULL, OPTION_SEED},
  {"ignore-eot", no_argument, NULL, OPTION_IGNORE_EOT},
  {"vocab-file", required_argument, NULL, OPTION_VOCAB_FILE},
  {"merge-file", required_argument, NULL, OPTION_MERGE_FILE},
  {"device", required_argument, NULL, OPTION_DEVICE},
  {"threads", required_argument, NULL, OPTION_THREADS},
  {"help", no_argument, NULL, OPTION_HELP},
  {NULL, 0, NULL, 0},
};

// 0: go on; 1: done (help); -1: wrong usage.
static int parse_options(int argc, char **argv, generate_settings *settings) {
  opterr = 0;
  for (;;) {
    const int option = getopt_long(argc, argv, ":h", options, NULL);
    int64_t seed;
    int bad = 0;
    switch (option) {
    case -1: return 0;
    case 'h':
    case OPTION_HELP: fputs(help_text, stdout); return 1;
    case OPTION_LOAD: settings->load = optarg; break;
    case OPTION_MAX_TOKENS:
      bad = fp8lm_parse_integer(PREFIX, "--max-tokens", optarg, 0, INT32_MAX, &settings->max_tokens);
      break;
    case OPTION_TEMPERATURE:
      bad = fp8lm_parse_real(PREFIX, "--temperature", optarg, 0.0, 1e6, &settings->sampling.temperature);
      break;
    case OPTION_TOP_K:
      bad = fp8lm_parse_integer(PREFIX, "--top-k", optarg, 0, INT32_MAX, &settings->sampling.top_k);
      break;
    case OPTION_TOP_P: bad = fp8lm_parse_real(PREFIX, "--top-p", optarg, 0.0, 1.0, &settings->sampling.top_p); break;
    case OPTION_SEED:
      bad = fp8lm_parse_integer(PREFIX, "--seed", optarg, 0, INT64_MAX, &seed);
      if (bad == 0) settings->sampling.seed = (uint64_t)seed;
      break;
    case OPTION_IGNORE_EOT: settings->ignore_eot = 1; break;
    case OPTION_VOCAB_FILE: settings->vocab_file = optarg; break;
    case OPTION_MERGE_FILE: settings->merge_file = optarg; break;
    case OPTION_DEVICE:
      settings->cuda = strcmp(optarg, "cuda") == 0;
      if (settings->cuda || strcmp(optarg, "cpu") == 0) break;
      (void)fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--device is '%s', expected cpu or cuda", optarg);
      return -1;
    case OPTION_THREADS: bad = fp8lm_parse_integer(PREFIX, "--threads", optarg, 1, 1024, &settings->threads); break;
    default: fp8lm_option_error(PREFIX, option, argv, options); return -1;
    }
    if (bad) return -1;
  }
}

typedef struct generator {
  char *path;
  fp8lm_checkpoint_index index;
  fp8core_context *context;
  fp8gpt_model *model;
  // Of weights, on the device.
  float *scales;
  fp8lm_tokenizer *tokenizer;
  fp8lm_sampler *sampler;
  // The text so far, and how much of it the model has seen.
  fp8lm_tokens tokens;
  size_t seen;
  // The first token that the model sees.
  size_t begin;
  float *logits;
} generator;

static fp8core_status open_tokenizer(const generate_settings *settings, generator *state) {
  char vocab[PATH_MAX];
  char merges[PATH_MAX];
  if (settings->vocab_file)
    return fp8lm_tokenizer_create_bpe(&state->tokenizer, settings->vocab_file, settings->merge_file);
  if (!fp8lm_checkpoint_index_file(&state->index, FP8LM_CHECKPOINT_VOCAB))
    return fp8lm_tokenizer_create_bytes(&state->tokenizer);
  TRY(fp8lm_join_path(vocab, state->path, FP8LM_CHECKPOINT_VOCAB));
  TRY(fp8lm_join_path(merges, state->path, FP8LM_CHECKPOINT_MERGES));
  return fp8lm_tokenizer_create_bpe(&state->tokenizer, vocab, merges);
}

static fp8core_status open_model(const generate_settings *settings, generator *state) {
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = (int)settings->threads;
  if (settings->cuda) context_options.device.type = FP8CORE_DEVICE_CUDA;
  TRY(fp8core_context_create(&state->context, &context_options));
  const fp8gpt_config config = fp8lm_train_model_config(&state->index.settings);
  TRY(fp8lm_check_weights(&config, state->path));
  fp8gpt_model_options model_options = fp8lm_train_model_options(&state->index.settings);
  model_options.inference = 1;
  model_options.batch = 1;
  TRY(fp8gpt_model_create(&state->model, state->context, &config, &model_options));
  void *scales;
  TRY(fp8core_alloc(state->context, (size_t)fp8gpt_model_parameters(state->model) * 2 * sizeof(float), &scales));
  state->scales = scales;
  state->logits = calloc((size_t)config.vocabulary, sizeof(*state->logits));
  if (!state->logits) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the logits");
  TRY(fp8lm_checkpoint_verify(state->path, &state->index));
  TRY(fp8lm_load_weights(state->context, state->model, state->path, state->scales));
  return fp8lm_sampler_create(&state->sampler, config.vocabulary, &settings->sampling);
}

static fp8core_status encode(generator *state, FILE *stream, const char *text) {
  const fp8lm_encoder_options encoder_options = {FP8LM_INVALID_KEEP, 1};
  fp8lm_encoder *encoder;
  char block[4096];
  TRY(fp8lm_encoder_create(&encoder, state->tokenizer, &encoder_options));
  fp8core_status status = text ? fp8lm_encoder_feed(encoder, text, strlen(text), &state->tokens) : FP8CORE_OK;
  for (size_t count; stream && status == FP8CORE_OK && (count = fread(block, 1, sizeof(block), stream)) > 0;)
    status = fp8lm_encoder_feed(encoder, block, count, &state->tokens);
  if (status == FP8CORE_OK && stream && ferror(stream))
    status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot read standard input");
  if (status == FP8CORE_OK) status = fp8lm_encoder_finish(encoder, &state->tokens);
  fp8lm_encoder_destroy(&encoder);
  return status;
}

static fp8core_status begin_text(const generate_settings *settings, generator *state) {
  const int vocabulary = fp8gpt_model_config(state->model)->vocabulary;
  const int from_input = !settings->prompt || strcmp(settings->prompt, "-") == 0;
  TRY(encode(state, from_input ? stdin : NULL, from_input ? NULL : settings->prompt));
  if (state->tokens.count == 0) {
    const int64_t end = fp8lm_tokenizer_end_of_text(state->tokenizer);
    if (end < 0)
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                    "the prompt is empty, and the vocabulary has no " FP8LM_END_OF_TEXT
                                    " to begin with");
    TRY(fp8lm_tokens_reserve(&state->tokens, 1));
    state->tokens.ids[state->tokens.count++] = (uint32_t)end;
  }
  for (size_t i = 0; i < state->tokens.count; i++)
    if (state->tokens.ids[i] >= (uint32_t)vocabulary)
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                    "token %zu of the prompt is %" PRIu32 ", but the model's vocabulary has %d", i,
                                    state->tokens.ids[i], vocabulary);
  return FP8CORE_OK;
}

// Shows the model what it has not seen.
static fp8core_status read_on(generator *state) {
  const size_t longest = (size_t)fp8gpt_model_config(state->model)->sequence;
  // No more room for one token: begin again with the newer half.
  if (state->tokens.count - state->begin > longest || state->seen - state->begin >= longest) {
    state->begin = state->tokens.count - (longest + 1) / 2;
    state->seen = state->begin;
  }
  const size_t count = state->tokens.count - state->seen;
  int32_t *ids = malloc(count * sizeof(*ids));
  if (!ids) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu tokens", count);
  for (size_t i = 0; i < count; i++) ids[i] = (int32_t)state->tokens.ids[state->seen + i];
  const fp8core_status status =
    fp8gpt_model_next(state->model, ids, (int)count, (int)(state->seen - state->begin), state->logits);
  free(ids);
  state->seen = state->tokens.count;
  return status;
}

static fp8core_status generate_tokens(const generate_settings *settings, generator *state) {
  const int64_t end = fp8lm_tokenizer_end_of_text(state->tokenizer);
  for (int64_t i = 0; i < settings->max_tokens; i++) {
    TRY(read_on(state));
    const int32_t token = fp8lm_sampler_draw(state->sampler, state->logits);
    if (token < 0) return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the model's logits are all NaN");
    if (token == end && !settings->ignore_eot) break;
    size_t length = 0;
    // A vocabulary may be padded with ids that no text has.
    const unsigned char *bytes = fp8lm_tokenizer_bytes(state->tokenizer, (uint32_t)token, &length);
    if (bytes) {
      fwrite(bytes, 1, length, stdout);
      (void)fflush(stdout);
      if (ferror(stdout)) break;
    }
    TRY(fp8lm_tokens_reserve(&state->tokens, 1));
    state->tokens.ids[state->tokens.count++] = (uint32_t)token;
  }
  fputc('\n', stdout);
  return FP8CORE_OK;
}

static int run(const generate_settings *settings, generator *state) {
  fp8core_status status = fp8lm_checkpoint_find(settings->load, &state->path);
  if (status == FP8CORE_OK) status = fp8lm_checkpoint_open(state->path, &state->index);
  if (status == FP8CORE_OK) status = open_model(settings, state);
  if (status != FP8CORE_OK)
    return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s: %s", state->path ? state->path : settings->load,
                          fp8core_last_error());
  status = open_tokenizer(settings, state);
  if (status == FP8CORE_OK) status = begin_text(settings, state);
  if (status == FP8CORE_OK) status = generate_tokens(settings, state);
  return status == FP8CORE_OK ? FP8LM_EXIT_SUCCESS
                              : fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s", fp8core_last_error());
}

int fp8lm_generate(int argc, char **argv) {
  generate_settings settings = {.max_tokens = 256, .sampling = {1.0, 0, 1.0, 0}};
  const int parsed = parse_options(argc, argv, &settings);
  if (parsed != 0) return parsed > 0 ? FP8LM_EXIT_SUCCESS : FP8LM_EXIT_USAGE;
  if (!settings.load) return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--load is missing; see '" PREFIX " --help'");
  if (!settings.vocab_file != !settings.merge_file)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--vocab-file and --merge-file go together");
  if (argc - optind > 1)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "more than one prompt: '%s' and '%s'", argv[optind],
                          argv[optind + 1]);
  if (optind < argc) settings.prompt = argv[optind];
  generator state = {.path = NULL};
  const int result = run(&settings, &state);
  fp8lm_sampler_destroy(&state.sampler);
  fp8lm_tokenizer_destroy(&state.tokenizer);
  fp8lm_tokens_free(&state.tokens);
  fp8gpt_model_destroy(&state.model);
  if (state.scales) (void)fp8core_free(state.context, state.scales);
  fp8core_context_destroy(&state.context);
  fp8lm_checkpoint_index_free(&state.index);
  free(state.logits);
  free(state.path);
  return result;
}
