// fp8lm plan: what training a model would take of memory and of the wire, on ranks that need not be there.
#include "plan.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "fp8gpt/config.h"

#define PREFIX FP8LM_PLAN_PREFIX

static const char help_text[] =
  "Usage: fp8lm plan [OPTION]...\n"
  "\n"
  "Computes, without a device, what training a GPT model takes: bytes of memory a rank by class, and bytes that a "
  "rank\n"
  "sends in a step by kind, as minimum, maximum and mean over all ranks. docs/plan.md has the formulas. On one rank\n"
  "weights, gradients, states and activations are those of 'fp8lm train' to the byte; the workspace is an estimate.\n"
  "Options have Megatron-LM's names where it has them.\n"
  "\n"
  "Model:\n"
  "  --model NAME                     a preset (default gpt-7b); see below. What else is given goes over it\n"
  "  --num-layers N                   blocks\n"
  "  --hidden-size N                  width of the model\n"
  "  --ffn-hidden-size N              width between the two layers of the feed-forward part (default 4 times the\n"
  "                                   model's if that is given)\n"
  "  --num-attention-heads N          heads of queries\n"
  "  --num-query-groups N             heads of keys and values (default as many as of queries if those are given)\n"
  "  --seq-length N                   tokens of a sequence, and learned positions\n"
  "  --vocab-size N                   token ids\n"
  "  --make-vocab-size-divisible-by N the embedding is padded to a multiple of it times the tensor-parallel size\n"
  "                                   (default 1, as 'fp8lm train'; Megatron-LM's is 128)\n"
  "  --normalization NAME             LayerNorm or RMSNorm\n"
  "  --swiglu[=no]                    SwiGLU instead of GELU\n"
  "  --position-embedding-type NAME   rope or learned_absolute\n"
  "  --untie-embeddings-and-output-weights[=no]\n"
  "                                   the output layer has a weight of its own\n"
  "  --disable-bias-linear[=no]       linear layers without biases\n"
  "\n"
  "Ranks (numbered with tensor parallelism fastest, then data, then pipeline parallelism):\n"
  "  --tensor-model-parallel-size N   ranks that share each layer (default 1)\n"
  "  --sequence-parallel[=no]         they share what is between their products too, by tokens\n"
  "  --pipeline-model-parallel-size N stages of a pipeline, 1F1B (default 1)\n"
  "  --data-parallel-size N           replicas, at most 1048576 (default 1)\n"
  "  --zero-stage N                   what replicas share: 0 nothing, 1 optimizer states, 2 and gradients, 3 and\n"
  "                                   weights (default 0, of several replicas in fp8-o3 1)\n"
  "  --zero-partition KIND            tensors (whole, the largest first; default) or elements (equal parts)\n"
  "\n"
  "Precision and passes:\n"
  "  --precision LEVEL                fp32, bf16, te (FP8 products), fp8-o1 (and FP8 weights and gradients), fp8-o2\n"
  "                                   (and FP8 optimizer; default) or fp8-o3 (and FP8 in sequence parallelism)\n"
  "  --micro-batch-size N             sequences of a pass (default 1)\n"
  "  --global-batch-size N            sequences of a step, a multiple of it times the data-parallel size (default as\n"
  "                                   many times as the pipeline has stages)\n"
  "  --recompute-activations[=no]     keep only the inputs of blocks for the backward pass\n"
  "\n"
  "Question:\n"
  "  --device-memory GIB              memory of a rank, in GiB: says whether the plan fits\n"
  "  --search WHAT                    with --device-memory: micro-batch, the largest --micro-batch-size that fits "
  "(with\n"
  "                                   --global-batch-size, of those that divide it); or model, the largest preset, or\n"
  "                                   with --model or a shape the largest --num-layers\n"
  "  --paper                          the systems of FP8-LM, planned, beside what was measured of them; goes with "
  "--json\n"
  "                                   alone\n"
  "  --json                           print one JSON object, of bytes, instead of tables\n"
  "  --help                           print this text\n"
  "\n"
  "Presets:";

static const char *const normalizations[] = {"LayerNorm", "RMSNorm", NULL};
static const char *const positions[] = {"rope", "learned_absolute", NULL};
static const char *const precisions[] = {"fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3", NULL};
static const char *const partitions[] = {"tensors", "elements", NULL};
static const char *const searches[] = {"micro-batch", "model", NULL};

// In the order of the table below.
typedef enum setting {
  MODEL,
  NUM_LAYERS,
  HIDDEN_SIZE,
  FFN_HIDDEN_SIZE,
  NUM_ATTENTION_HEADS,
  NUM_QUERY_GROUPS,
  SEQ_LENGTH,
  VOCAB_SIZE,
  MAKE_VOCAB_SIZE_DIVISIBLE_BY,
  NORMALIZATION,
  SWIGLU,
  POSITION_EMBEDDING_TYPE,
  UNTIE_EMBEDDINGS,
  DISABLE_BIAS_LINEAR,
  TENSOR_PARALLEL,
  SEQUENCE_PARALLEL,
  PIPELINE_PARALLEL,
  DATA_PARALLEL,
  ZERO_STAGE,
  ZERO_PARTITION,
  PRECISION,
  MICRO_BATCH_SIZE,
  GLOBAL_BATCH_SIZE,
  RECOMPUTE_ACTIVATIONS,
  DEVICE_MEMORY,
  SEARCH,
  PAPER,
  JSON,
  HELP,
  SETTINGS
} setting;

enum { SEARCH_MICRO_BATCH, SEARCH_MODEL };

typedef enum entry_kind { INTEGER, REAL, FLAG, CHOICE, TEXT, SWITCH } entry_kind;

typedef struct option_entry {
  const char *name;
  entry_kind kind;
  // Of integers.
  int least;
  int most;
  const char *const *choices;
} option_entry;

static const option_entry table[SETTINGS] = {
  [MODEL] = {"model", TEXT, 0, 0, NULL},
  [NUM_LAYERS] = {"num-layers", INTEGER, 1, 10000, NULL},
  [HIDDEN_SIZE] = {"hidden-size", INTEGER, 1, 1 << 20, NULL},
  [FFN_HIDDEN_SIZE] = {"ffn-hidden-size", INTEGER, 1, 1 << 22, NULL},
  [NUM_ATTENTION_HEADS] = {"num-attention-heads", INTEGER, 1, 1 << 20, NULL},
  [NUM_QUERY_GROUPS] = {"num-query-groups", INTEGER, 1, 1 << 20, NULL},
  [SEQ_LENGTH] = {"seq-length", INTEGER, 1, 1 << 20, NULL},
  [VOCAB_SIZE] = {"vocab-size", INTEGER, 2, 1 << 24, NULL},
  [MAKE_VOCAB_SIZE_DIVISIBLE_BY] = {"make-vocab-size-divisible-by", INTEGER, 1, 1 << 20, NULL},
  [NORMALIZATION] = {"normalization", CHOICE, 0, 0, normalizations},
  [SWIGLU] = {"swiglu", FLAG, 0, 0, NULL},
  [POSITION_EMBEDDING_TYPE] = {"position-embedding-type", CHOICE, 0, 0, positions},
  [UNTIE_EMBEDDINGS] = {"untie-embeddings-and-output-weights", FLAG, 0, 0, NULL},
  [DISABLE_BIAS_LINEAR] = {"disable-bias-linear", FLAG, 0, 0, NULL},
  [TENSOR_PARALLEL] = {"tensor-model-parallel-size", INTEGER, 1, INT_MAX, NULL},
  [SEQUENCE_PARALLEL] = {"sequence-parallel", FLAG, 0, 0, NULL},
  [PIPELINE_PARALLEL] = {"pipeline-model-parallel-size", INTEGER, 1, INT_MAX, NULL},
  [DATA_PARALLEL] = {"data-parallel-size", INTEGER, 1, 1 << 20, NULL},
  [ZERO_STAGE] = {"zero-stage", INTEGER, 0, 3, NULL},
  [ZERO_PARTITION] = {"zero-partition", CHOICE, 0, 0, partitions},
  [PRECISION] = {"precision", CHOICE, 0, 0, precisions},
  [MICRO_BATCH_SIZE] = {"micro-batch-size", INTEGER, 1, INT_MAX, NULL},
  [GLOBAL_BATCH_SIZE] = {"global-batch-size", INTEGER, 1, INT_MAX, NULL},
  [RECOMPUTE_ACTIVATIONS] = {"recompute-activations", FLAG, 0, 0, NULL},
  [DEVICE_MEMORY] = {"device-memory", REAL, 0, 0, NULL},
  [SEARCH] = {"search", CHOICE, 0, 0, searches},
  [PAPER] = {"paper", SWITCH, 0, 0, NULL},
  [JSON] = {"json", SWITCH, 0, 0, NULL},
  [HELP] = {"help", SWITCH, 0, 0, NULL},
};

typedef struct settings {
  int given[SETTINGS];
  // Of integers, flags and choices.
  int value[SETTINGS];
  const char *model;
  // GiB.
  double device_memory;
} plan_settings;

// The command line.

static int set_choice(const option_entry *entry, const char *text, int *value) {
  char names[128];
  size_t used = 0;
  for (int i = 0; entry->choices[i]; i++) {
    if (strcmp(entry->choices[i], text) == 0) {
      *value = i;
      return 0;
    }
    const char *separator = i == 0 ? "" : entry->choices[i + 1] ? ", " : " or ";
    used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", separator, entry->choices[i]);
  }
  return fp8lm_complain(-1, PREFIX, "--%s is '%s', expected %s", entry->name, text, names);
}

static int set_entry(plan_settings *settings, setting which, const char *text) {
  const option_entry *entry = &table[which];
  char option[64];
  int64_t value;
  settings->given[which] = 1;
  (void)snprintf(option, sizeof(option), "--%s", entry->name);
  switch (entry->kind) {
  case INTEGER:
    if (fp8lm_parse_integer(PREFIX, option, text, entry->least, entry->most, &value) != 0) return -1;
    settings->value[which] = (int)value;
    return 0;
  case REAL: return fp8lm_parse_real(PREFIX, option, text, 1e-6, 1e9, &settings->device_memory);
  case FLAG:
    if (text && strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
      return fp8lm_complain(-1, PREFIX, "%s is '%s', expected yes or no", option, text);
    settings->value[which] = !text || strcmp(text, "yes") == 0;
    return 0;
  case CHOICE: return set_choice(entry, text, &settings->value[which]);
  case TEXT: settings->model = text; return 0;
  case SWITCH: break;
  }
  settings->value[which] = 1;
  return 0;
}

static void print_help(void) {
  fputs(help_text, stdout);
  for (int i = 0; fp8gpt_config_preset_name(i); i++) printf("%s %s", i == 0 ? "" : ",", fp8gpt_config_preset_name(i));
  printf(
    ".\n"
    "\n"
    "Exit codes: 0 success, also where the plan does not fit; 1 nothing that --search may choose fits; 2 wrong usage,\n"
    "with sizes that do not divide as they must.\n");
}

// 0: go on; 1: done (help); -1: wrong usage.
static int parse_options(int argc, char **argv, plan_settings *settings) {
  // Values of long options; below are characters.
  const int base = 256;
  struct option options[SETTINGS + 1];
  for (int i = 0; i < SETTINGS; i++) {
    const int argument = table[i].kind == FLAG     ? optional_argument
                         : table[i].kind == SWITCH ? no_argument
                                                   : required_argument;
    const struct option option = {table[i].name, argument, NULL, base + i};
    options[i] = option;
  }
  const struct option last = {NULL, 0, NULL, 0};
  options[SETTINGS] = last;
  opterr = 0;
  for (;;) {
    const int option = getopt_long(argc, argv, ":h", options, NULL);
    if (option == -1) break;
    if (option == 'h' || option == base + HELP) {
      print_help();
      return 1;
    }
    if (option < base) {
      fp8lm_option_error(PREFIX, option, argv, options);
      return -1;
    }
    if (set_entry(settings, (setting)(option - base), optarg) != 0) return -1;
  }
  if (optind < argc)
    return fp8lm_complain(-1, PREFIX, "unexpected argument '%s'; see '" PREFIX " --help'", argv[optind]);
  return 0;
}

// Whether the shape is told, not only a preset.
static int has_shape(const plan_settings *settings) {
  for (int i = NUM_LAYERS; i <= DISABLE_BIAS_LINEAR; i++)
    if (settings->given[i] && i != MAKE_VOCAB_SIZE_DIVISIBLE_BY) return 1;
  return 0;
}

static int value_or(const plan_settings *settings, setting which, int otherwise) {
  return settings->given[which] ? settings->value[which] : otherwise;
}

static int model_of(const plan_settings *settings, const char *preset, fp8zero_plan_model *model) {
  fp8gpt_config config;
  if (fp8gpt_config_preset(preset, &config) != FP8CORE_OK)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--model: %s", fp8core_last_error());
  const int heads = value_or(settings, NUM_ATTENTION_HEADS, config.heads);
  const int hidden = value_or(settings, HIDDEN_SIZE, config.hidden);
  *model = fp8zero_plan_model_default();
  model->layers = value_or(settings, NUM_LAYERS, config.layers);
  model->hidden = hidden;
  model->heads = heads;
  model->kv_heads =
    value_or(settings, NUM_QUERY_GROUPS, settings->given[NUM_ATTENTION_HEADS] ? heads : config.kv_heads);
  model->ffn_hidden =
    value_or(settings, FFN_HIDDEN_SIZE, settings->given[HIDDEN_SIZE] ? 4 * hidden : config.ffn_hidden);
  model->vocabulary = value_or(settings, VOCAB_SIZE, config.vocabulary);
  model->sequence = value_or(settings, SEQ_LENGTH, config.sequence);
  model->tied_embeddings = !value_or(settings, UNTIE_EMBEDDINGS, !config.tied_embeddings);
  model->biases = !value_or(settings, DISABLE_BIAS_LINEAR, !config.biases);
  model->rms_norm = value_or(settings, NORMALIZATION, config.normalization == FP8GPT_RMS_NORM);
  model->swiglu = value_or(settings, SWIGLU, config.activation == FP8GPT_SWIGLU);
  model->learned_positions = value_or(settings, POSITION_EMBEDDING_TYPE, config.position == FP8GPT_LEARNED);
  return FP8LM_EXIT_SUCCESS;
}

static fp8zero_plan_options options_of(const plan_settings *settings) {
  fp8zero_plan_options options = fp8zero_plan_options_default();
  options.precision = (fp8zero_precision)value_or(settings, PRECISION, FP8ZERO_FP8_O2);
  options.tensor_parallel = value_or(settings, TENSOR_PARALLEL, 1);
  options.sequence_parallel = settings->value[SEQUENCE_PARALLEL];
  options.pipeline_parallel = value_or(settings, PIPELINE_PARALLEL, 1);
  options.data_parallel = value_or(settings, DATA_PARALLEL, 1);
  // As in train.
  options.zero_stage = value_or(settings, ZERO_STAGE, options.precision == FP8ZERO_FP8_O3 && options.data_parallel > 1);
  options.distribution = (fp8zero_distribution)settings->value[ZERO_PARTITION];
  options.micro_batch = value_or(settings, MICRO_BATCH_SIZE, 1);
  options.micro_batches = options.pipeline_parallel;
  options.recompute = settings->value[RECOMPUTE_ACTIVATIONS];
  options.vocabulary_multiple = value_or(settings, MAKE_VOCAB_SIZE_DIVISIBLE_BY, 1);
  return options;
}

// Checks, here by the names of options. With `quiet` nothing is said.

static int check_multiple(int quiet, const char *option, int value, const char *of, int divisor) {
  if (value % divisor == 0) return FP8LM_EXIT_SUCCESS;
  if (quiet) return FP8LM_EXIT_USAGE;
  return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "%s is %d, expected a multiple of %s, %d", option, value, of,
                        divisor);
}

static int check_splits(int quiet, const fp8zero_plan_model *model, const fp8zero_plan_options *options) {
  static const char tensor[] = "--tensor-model-parallel-size";
  const struct {
    const char *option;
    int value;
    const char *of;
    int divisor;
  } splits[] = {
    {"--hidden-size", model->hidden, "--num-attention-heads", model->heads},
    {"--num-attention-heads", model->heads, "--num-query-groups", model->kv_heads},
    {"--num-attention-heads", model->heads, tensor, options->tensor_parallel},
    {"--num-query-groups", model->kv_heads, tensor, options->tensor_parallel},
    {"--ffn-hidden-size", model->ffn_hidden, tensor, options->tensor_parallel},
    {"--num-layers", model->layers, "--pipeline-model-parallel-size", options->pipeline_parallel},
    {"--seq-length", model->sequence, "--tensor-model-parallel-size (with --sequence-parallel)",
     options->sequence_parallel ? options->tensor_parallel : 1},
  };
  for (size_t i = 0; i < sizeof(splits) / sizeof(*splits); i++)
    if (check_multiple(quiet, splits[i].option, splits[i].value, splits[i].of, splits[i].divisor) != FP8LM_EXIT_SUCCESS)
      return FP8LM_EXIT_USAGE;
  if (options->micro_batch <= INT_MAX / model->sequence) return FP8LM_EXIT_SUCCESS;
  if (quiet) return FP8LM_EXIT_USAGE;
  return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                        "--micro-batch-size is %d, expected at most %d: with %d tokens a sequence, a pass has at most "
                        "2^31 - 1",
                        options->micro_batch, INT_MAX / model->sequence, model->sequence);
}

static int make_plan(const fp8lm_planned *plan, const fp8zero_plan_options *options, fp8zero_plan_result *result) {
  const fp8core_status status = fp8zero_plan(&plan->model, options, result);
  if (status == FP8CORE_OK) return FP8LM_EXIT_SUCCESS;
  return fp8lm_complain(status == FP8CORE_ERROR_INVALID_ARGUMENT ? FP8LM_EXIT_USAGE : FP8LM_EXIT_FAILURE, PREFIX, "%s",
                        fp8core_last_error());
}

// Micro-batches of a step, from the global batch where it is given.
static int set_micro_batches(const plan_settings *settings, fp8zero_plan_options *options) {
  if (!settings->given[GLOBAL_BATCH_SIZE]) return FP8LM_EXIT_SUCCESS;
  const int global = settings->value[GLOBAL_BATCH_SIZE];
  const int64_t pass = (int64_t)options->micro_batch * options->data_parallel;
  if (global % pass != 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--global-batch-size is %d, expected a multiple of --micro-batch-size times "
                          "--data-parallel-size, %" PRId64,
                          global, pass);
  options->micro_batches = (int)(global / pass);
  return FP8LM_EXIT_SUCCESS;
}

// Search.

static int fits(const fp8lm_planned *plan) { return (double)plan->result.memory_total.maximum <= plan->device_bytes; }

// Plans with another micro-batch, or depth; what cannot be planned (too many bytes) does not fit.
static int try_micro_batch(fp8lm_planned *plan, int micro_batch) {
  plan->options.micro_batch = micro_batch;
  return fp8zero_plan(&plan->model, &plan->options, &plan->result) == FP8CORE_OK && fits(plan);
}

static int try_layers(fp8lm_planned *plan, int layers) {
  plan->model.layers = layers;
  return fp8zero_plan(&plan->model, &plan->options, &plan->result) == FP8CORE_OK && fits(plan);
}

// The largest multiple of `step`, at most `most`, that `fit` accepts, which accepts all smaller ones; 0: none.
static int largest(fp8lm_planned *plan, int (*fit)(fp8lm_planned *plan, int value), int step, int most) {
  int low = 0;
  int high = most / step;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (fit(plan, middle * step))
      low = middle;
    else
      high = middle - 1;
  }
  return low * step;
}

static int nothing_fits(const fp8lm_planned *plan, const char *what) {
  fp8zero_plan_result result;
  const int status = make_plan(plan, &plan->options, &result);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s takes %.3f GiB a rank, more than --device-memory, %g", what,
                        (double)result.memory_total.maximum * 0x1p-30, plan->device_bytes * 0x1p-30);
}

static int try_division(fp8lm_planned *plan, int sequences, int micro_batch, int most) {
  if (sequences % micro_batch != 0 || micro_batch > most) return 0;
  plan->options.micro_batches = sequences / micro_batch;
  return try_micro_batch(plan, micro_batch);
}

static int search_micro_batch(const plan_settings *settings, fp8lm_planned *plan) {
  plan->search = "micro-batch";
  const int most = INT_MAX / plan->model.sequence;
  if (!settings->given[GLOBAL_BATCH_SIZE]) {
    const int found = largest(plan, try_micro_batch, 1, most);
    plan->options.micro_batch = found ? found : 1;
    return found ? FP8LM_EXIT_SUCCESS : nothing_fits(plan, "a micro-batch of 1");
  }
  plan->options.micro_batch = 1;
  const int status = set_micro_batches(settings, &plan->options);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  // Sequences of a rank in a step, which its micro-batches divide; the largest first: divisors beyond the root, then
  // those below.
  const int sequences = plan->options.micro_batches;
  int64_t divisor = 1;
  for (; divisor * divisor <= sequences; divisor++)
    if (try_division(plan, sequences, sequences / (int)divisor, most)) return FP8LM_EXIT_SUCCESS;
  for (; divisor > 0; divisor--)
    if (try_division(plan, sequences, (int)divisor, most)) return FP8LM_EXIT_SUCCESS;
  plan->options.micro_batch = 1;
  plan->options.micro_batches = sequences;
  return nothing_fits(plan, "a micro-batch of 1");
}

static int search_depth(fp8lm_planned *plan) {
  plan->search = "depth";
  plan->name = "custom";
  const int step = plan->options.pipeline_parallel;
  const int found = step <= 10000 ? largest(plan, try_layers, step, 10000) : 0;
  plan->model.layers = found ? found : step;
  return found ? FP8LM_EXIT_SUCCESS : nothing_fits(plan, "the model with one layer a stage");
}

static int search_preset(const plan_settings *settings, fp8lm_planned *plan) {
  int64_t most = -1;
  int64_t least = -1;
  fp8lm_planned best = *plan;
  fp8lm_planned smallest = *plan;
  for (int i = 0; fp8gpt_config_preset_name(i); i++) {
    plan->name = fp8gpt_config_preset_name(i);
    if (model_of(settings, plan->name, &plan->model) != FP8LM_EXIT_SUCCESS) return FP8LM_EXIT_FAILURE;
    if (check_splits(1, &plan->model, &plan->options) != FP8LM_EXIT_SUCCESS) continue;
    if (fp8zero_plan(&plan->model, &plan->options, &plan->result) != FP8CORE_OK) continue;
    if (least < 0 || plan->result.parameters < least) {
      least = plan->result.parameters;
      smallest = *plan;
    }
    if (!fits(plan) || plan->result.parameters <= most) continue;
    most = plan->result.parameters;
    best = *plan;
  }
  if (least < 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "no preset can be divided by --tensor-model-parallel-size %d and "
                          "--pipeline-model-parallel-size %d with these options",
                          plan->options.tensor_parallel, plan->options.pipeline_parallel);
  *plan = most < 0 ? smallest : best;
  plan->search = "preset";
  if (most >= 0) return FP8LM_EXIT_SUCCESS;
  char what[64];
  (void)snprintf(what, sizeof(what), "the smallest preset, %s,", plan->name);
  return nothing_fits(plan, what);
}

// The whole.

static int check_usage(const plan_settings *settings) {
  if (settings->given[SEARCH] && !settings->given[DEVICE_MEMORY])
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--search needs --device-memory");
  if (settings->given[SEARCH] && settings->value[SEARCH] == SEARCH_MICRO_BATCH && settings->given[MICRO_BATCH_SIZE])
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--search micro-batch and --micro-batch-size exclude each other");
  if (settings->given[SEARCH] && settings->value[SEARCH] == SEARCH_MODEL && settings->given[NUM_LAYERS])
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--search model and --num-layers exclude each other");
  if (!settings->value[PAPER]) return FP8LM_EXIT_SUCCESS;
  for (int i = 0; i < SETTINGS; i++)
    if (settings->given[i] && i != PAPER && i != JSON)
      return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--paper and --%s exclude each other", table[i].name);
  return FP8LM_EXIT_SUCCESS;
}

static int find_plan(const plan_settings *settings, fp8lm_planned *plan) {
  const int search = settings->given[SEARCH] ? settings->value[SEARCH] : -1;
  const int shaped = has_shape(settings);
  plan->name = settings->model ? settings->model : "gpt-7b";
  int status = model_of(settings, plan->name, &plan->model);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  if (shaped) plan->name = "custom";
  plan->options = options_of(settings);
  plan->device_bytes = settings->device_memory * 0x1p30;
  const int any_preset = search == SEARCH_MODEL && !shaped && !settings->model;
  // A depth that is searched for is divided in any case.
  if (search == SEARCH_MODEL && !any_preset) plan->model.layers = plan->options.pipeline_parallel;
  if (!any_preset) status = check_splits(0, &plan->model, &plan->options);
  if (status == FP8LM_EXIT_SUCCESS && search != SEARCH_MICRO_BATCH)
    status = set_micro_batches(settings, &plan->options);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  // Everything else that the library refuses, before a search calls it "does not fit".
  if (!any_preset) status = make_plan(plan, &plan->options, &plan->result);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  if (search == SEARCH_MICRO_BATCH) status = search_micro_batch(settings, plan);
  if (any_preset) status = search_preset(settings, plan);
  if (search == SEARCH_MODEL && !any_preset) status = search_depth(plan);
  if (status != FP8LM_EXIT_SUCCESS) return status;

  fp8zero_plan_options other = plan->options;
  fp8zero_plan_options baseline = plan->options;
  other.distribution = other.distribution == FP8ZERO_ELEMENTS ? FP8ZERO_WHOLE_TENSORS : FP8ZERO_ELEMENTS;
  baseline.precision = FP8ZERO_BF16;
  status = make_plan(plan, &plan->options, &plan->result);
  if (status == FP8LM_EXIT_SUCCESS) status = make_plan(plan, &other, &plan->other);
  if (status == FP8LM_EXIT_SUCCESS) status = make_plan(plan, &baseline, &plan->baseline);
  return status;
}

int fp8lm_plan(int argc, char **argv) {
  plan_settings settings;
  fp8lm_planned plan;
  memset(&settings, 0, sizeof(settings));
  memset(&plan, 0, sizeof(plan));
  const int parsed = parse_options(argc, argv, &settings);
  if (parsed != 0) return parsed > 0 ? FP8LM_EXIT_SUCCESS : FP8LM_EXIT_USAGE;
  int status = check_usage(&settings);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  if (settings.value[PAPER]) return fp8lm_plan_paper(stdout, settings.value[JSON]);
  status = find_plan(&settings, &plan);
  if (status != FP8LM_EXIT_SUCCESS) return status;
  if (settings.value[JSON])
    fp8lm_plan_print_json(stdout, &plan);
  else
    fp8lm_plan_print(stdout, &plan);
  return FP8LM_EXIT_SUCCESS;
}
