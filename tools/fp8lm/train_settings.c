#include "train_settings.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "command.h"
#include "json_writer.h"
#include "tensor_file.h"
#include "utf8.h"

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

typedef enum option_kind { INTEGER, REAL, FLAG, CHOICE, TEXT } option_kind;

typedef struct option_entry {
  const char *name;
  option_kind kind;
  size_t offset;
  fp8lm_train_scope scope;
  // Of integers and reals.
  double least;
  double most;
  const char *const *choices;
  // The value's name in the help.
  const char *argument;
  const char *help;
} option_entry;

static const char *const normalizations[] = {"LayerNorm", "RMSNorm", NULL};
static const char *const positions[] = {"rope", "learned_absolute", NULL};
static const char *const precisions[] = {"fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3", NULL};
static const char *const reductions[] = {"auto", "two-shot", "native", "fp32", "bf16", NULL};
static const char *const gradient_scalings[] = {"auto", "pre", "post", NULL};
static const char *const recipes[] = {"just-in-time", "delayed", NULL};
static const char *const amax_algorithms[] = {"max", "most_recent", NULL};
static const char *const decay_styles[] = {"constant", "linear", "cosine", "WSD", NULL};
static const char *const granularities[] = {"none", "full", NULL};
static const char *const spike_actions[] = {"report", "skip", "stop", NULL};
static const char *const devices[] = {"cpu", "cuda", NULL};

#define AT(field) offsetof(fp8lm_train_settings, field)
#define INT_RANGE(least) least, INT_MAX, NULL
#define ANY 0, 0, NULL
#define OF(names) 0, 0, names
#define FIXED FP8LM_TRAIN_FIXED
#define STORED FP8LM_TRAIN_STORED
#define SHARED FP8LM_TRAIN_SHARED
#define RUN FP8LM_TRAIN_RUN
// Doubles hold whole numbers to here; so does JSON elsewhere.
#define MOST_INTEGER 9007199254740991.0

// --zero-stage that was not given: as the precision suggests.
#define ZERO_STAGE_AUTO (-1)

// A heading of the help has no name.
static const option_entry table[] = {
  {NULL, TEXT, 0, RUN, ANY, NULL, "Model (a checkpoint's cannot change)"},
  {"preset", TEXT, AT(preset), FIXED, ANY, "NAME",
   "a shape, and learning rate and batch of its paper (default tiny-gpt); see below"},
  {"num-layers", INTEGER, AT(num_layers), FIXED, INT_RANGE(1), "N", "blocks"},
  {"hidden-size", INTEGER, AT(hidden_size), FIXED, INT_RANGE(1), "N", "width of the model"},
  {"ffn-hidden-size", INTEGER, AT(ffn_hidden_size), FIXED, INT_RANGE(1), "N",
   "width between the two layers of the feed-forward part (default 4 times the model's if that is given)"},
  {"num-attention-heads", INTEGER, AT(num_attention_heads), FIXED, INT_RANGE(1), "N", "heads of queries"},
  {"num-query-groups", INTEGER, AT(num_query_groups), FIXED, INT_RANGE(1), "N",
   "heads of keys and values (default as many as of queries if those are given)"},
  {"seq-length", INTEGER, AT(seq_length), FIXED, INT_RANGE(1), "N", "tokens of a sequence"},
  {"max-position-embeddings", INTEGER, AT(max_position_embeddings), FIXED, INT_RANGE(1), "N",
   "learned positions (default the preset's, or the sequence if that is longer)"},
  {"vocab-size", INTEGER, AT(vocab_size), FIXED, INT_RANGE(2), "N", "token ids"},
  {"normalization", CHOICE, AT(normalization), FIXED, OF(normalizations), "NAME", "LayerNorm or RMSNorm"},
  {"norm-epsilon", REAL, AT(norm_epsilon), FIXED, 1e-30, 1.0, NULL, "X", "added to a variance (default 1e-5)"},
  {"swiglu", FLAG, AT(swiglu), FIXED, ANY, NULL, "SwiGLU instead of GELU"},
  {"position-embedding-type", CHOICE, AT(position_embedding_type), FIXED, OF(positions), "NAME",
   "rope or learned_absolute"},
  {"rotary-base", REAL, AT(rotary_base), FIXED, 1.0, 1e30, NULL, "X", "of rope (default 10000)"},
  {"untie-embeddings-and-output-weights", FLAG, AT(untie_embeddings_and_output_weights), FIXED, ANY, NULL,
   "the output layer has a weight of its own"},
  {"disable-bias-linear", FLAG, AT(disable_bias_linear), FIXED, ANY, NULL, "linear layers without biases"},
  {"hidden-dropout", REAL, AT(hidden_dropout), FIXED, 0.0, 0.999, NULL, "P",
   "of the embedding's and of each block's outputs (default 0); attention weights are never dropped, as with "
   "Megatron-LM's --attention-dropout 0"},
  {"init-method-std", REAL, AT(init_method_std), FIXED, 0.0, 1e3, NULL, "X",
   "standard deviation of initial weights (default 0.02)"},

  {NULL, TEXT, 0, RUN, ANY, NULL, "Precision (a checkpoint's cannot change)"},
  {"precision", CHOICE, AT(precision), FIXED, OF(precisions), "LEVEL",
   "fp32, bf16, te (FP8 products), fp8-o1 (and FP8 weights and gradients), fp8-o2 (and FP8 optimizer; default) or "
   "fp8-o3 (and ZeRO, of stage 1 if not told otherwise)"},
  {"fp8-recipe", CHOICE, AT(fp8_recipe), FIXED, OF(recipes), "NAME",
   "scales of FP8 tensors (te and fp8 levels only, as the next three): delayed (from earlier steps; default) or "
   "just-in-time (Megatron-LM's tensorwise)"},
  {"fp8-amax-history-len", INTEGER, AT(fp8_amax_history_len), FIXED, 1, 65536, NULL, "N",
   "steps that delayed scaling remembers (default 16)"},
  {"fp8-amax-compute-algo", CHOICE, AT(fp8_amax_compute_algo), FIXED, OF(amax_algorithms), "NAME",
   "what it takes of them: max (default) or most_recent"},
  {"fp8-margin", INTEGER, AT(fp8_margin), FIXED, -64, 64, NULL, "N", "powers of two of head-room (default 0)"},
  {"stochastic-rounding", FLAG, AT(stochastic_rounding), FIXED, ANY, NULL,
   "master weights round stochastically (fp8-o2 and fp8-o3 only: others' are FP32)"},
  {"recompute-activations", FLAG, AT(recompute_activations), STORED, ANY, NULL,
   "full recomputation (of every block; Megatron-LM's flag of this name recomputes attention only): only the inputs of "
   "blocks are kept for the backward pass, which repeats the forward pass: less memory, a forward pass more"},
  // Another spelling of the same.
  {"recompute-granularity", CHOICE, AT(recompute_activations), RUN, OF(granularities), "NAME",
   "the same under Megatron-LM's name: full, or none (default)"},

  {NULL, TEXT, 0, RUN, ANY, NULL, "Optimization"},
  {"micro-batch-size", INTEGER, AT(micro_batch_size), STORED, INT_RANGE(1), "N",
   "sequences of a pass (default 8, and what a rank's share of the global batch is a multiple of)"},
  {"global-batch-size", INTEGER, AT(global_batch_size), FIXED, INT_RANGE(1), "N",
   "sequences of a step of all ranks together, a multiple of it, at most 2048 times (default the preset's, or 8)"},
  {"train-iters", INTEGER, AT(train_iters), STORED, 1, 2097151, NULL, "N", "steps of the run in all (default 1000)"},
  {"lr", REAL, AT(lr), STORED, 0.0, 1e30, NULL, "X", "learning rate after the warm-up (default the preset's, or 1e-3)"},
  {"min-lr", REAL, AT(min_lr), STORED, 0.0, 1e30, NULL, "X", "learning rate that the decay ends at (default a tenth)"},
  {"lr-decay-style", CHOICE, AT(lr_decay_style), STORED, OF(decay_styles), "NAME",
   "cosine (default), linear, constant or WSD"},
  {"lr-warmup-iters", INTEGER, AT(lr_warmup_iters), STORED, INT_RANGE(0), "N",
   "steps of linear warm-up (default 1000, at most a tenth of the run)"},
  {"lr-decay-iters", INTEGER, AT(lr_decay_iters), STORED, INT_RANGE(1), "N",
   "step at which the decay ends (default the run's last)"},
  {"lr-wsd-decay-iters", INTEGER, AT(lr_wsd_decay_iters), STORED, INT_RANGE(0), "N",
   "WSD: steps of the decay (default a tenth of the run)"},
  {"weight-decay", REAL, AT(weight_decay), STORED, 0.0, 1e6, NULL, "X", "of matrices (default 0.1)"},
  {"adam-beta1", REAL, AT(adam_beta1), STORED, 0.0, 0.9999999, NULL, "X", "default 0.9"},
  {"adam-beta2", REAL, AT(adam_beta2), STORED, 0.0, 0.9999999, NULL, "X", "default 0.95"},
  {"adam-eps", REAL, AT(adam_eps), STORED, 1e-37, 1e6, NULL, "X", "default 1e-8"},
  {"clip-grad", REAL, AT(clip_grad), STORED, 0.0, 1e30, NULL, "X",
   "largest global norm of the gradients, 0 for none (default 1)"},
  {"seed", INTEGER, AT(seed), FIXED, 0, MOST_INTEGER, NULL, "N",
   "of initial weights, dropout, order of the data and rounding (default 1234)"},
  {"max-skipped", INTEGER, AT(max_skipped), STORED, INT_RANGE(1), "N",
   "end the run after so many skipped steps in a row: those whose gradients are not finite, and spikes with "
   "--spike-action skip (default 10)"},
  {"spike-sigma", REAL, AT(spike_sigma), STORED, 0.0, 1e6, NULL, "X",
   "a loss so many standard deviations above the mean of the last 128 steps is a spike, 0 for none (default 6)"},
  {"spike-action", CHOICE, AT(spike_action), STORED, OF(spike_actions), "NAME",
   "what to do with a spike: report it (default), skip the step, which then changes nothing and is counted, or stop: "
   "end the run before the step, with a checkpoint and exit code 1"},

  {NULL, TEXT, 0, RUN, ANY, NULL, "Data"},
  {"data-path", TEXT, AT(data_path), STORED, ANY, "PATH",
   "shards of 'fp8lm data tokenize': a file, a prefix, or WEIGHT PATH WEIGHT PATH ... as one argument"},
  {"valid-data-path", TEXT, AT(valid_data_path), STORED, ANY, "PATH",
   "the same for validation (default the validation shards of --data-path)"},
  {"val-fraction", REAL, AT(val_fraction), STORED, 0.0, 0.999, NULL, "X",
   "share of a source without validation shards to validate with, its end (default 0.05)"},
  {"vocab-file", TEXT, AT(vocab_file), RUN, ANY, "FILE",
   "vocab.json of the tokenizer, which checkpoints keep for 'fp8lm generate' (default: that of --load, or bytes)"},
  {"merge-file", TEXT, AT(merge_file), RUN, ANY, "FILE", "merges.txt of the same"},
  {"eval-interval", INTEGER, AT(eval_interval), STORED, INT_RANGE(0), "N",
   "steps from one validation to the next; one more follows the last step; 0 for none (default 100)"},
  {"eval-iters", INTEGER, AT(eval_iters), STORED, INT_RANGE(0), "N",
   "micro-batches of a validation, 0 for the whole part (default 20)"},
  {"check-data", FLAG, AT(check_data), RUN, ANY, NULL,
   "read all shards at the start and check their tokens and checksums (default; data of many gigabytes: =no)"},

  {NULL, TEXT, 0, RUN, ANY, NULL, "Ranks, as mpirun, srun or torchrun start them"},
  {"data-parallel-size", INTEGER, AT(data_parallel_size), RUN, 0, 65536, NULL, "N",
   "ranks that must be there; each takes its share of the global batch (default as many as there are)"},
  {"zero-stage", INTEGER, AT(zero_stage), STORED, 0, 3, NULL, "N",
   "what ranks divide, by whole tensors: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights (default 0, "
   "fp8-o3 1)"},
  {"grad-reduce", CHOICE, AT(grad_reduce), STORED, OF(reductions), "NAME",
   "how gradients are summed: two-shot (FP8 on the wire), native (and FP8 sums), fp32 or bf16 (default two-shot for "
   "fp8 levels, else fp32)"},
  {"grad-scaling", CHOICE, AT(grad_scaling), STORED, OF(gradient_scalings), "NAME",
   "of gradients in FP8 on the wire: auto (default), pre or post"},
  {"grad-delayed-scaling", FLAG, AT(grad_delayed_scaling), STORED, ANY, NULL,
   "scales of gradients in FP8 on the wire from the step before, checked, so that values are read once"},
  {"distributed-timeout-minutes", REAL, AT(distributed_timeout_minutes), RUN, 0.001, 1e4, NULL, "X",
   "a rank that takes no part for so long ends the run (default 10)"},

  {NULL, TEXT, 0, RUN, ANY, NULL, "Run"},
  {"config", TEXT, AT(config), RUN, ANY, "FILE", "JSON object of options, names as here; the command line goes first"},
  {"device", CHOICE, AT(device), SHARED, OF(devices), "NAME", "cpu (default) or cuda"},
  {"threads", INTEGER, AT(threads), RUN, 0, 1024, NULL, "N",
   "CPU threads of a rank (default OMP_NUM_THREADS, or a share of all); results do not depend on it"},
  {"save", TEXT, AT(save), SHARED, ANY, "DIR", "folder of checkpoints and logs, created if need be"},
  {"load", TEXT, AT(load), SHARED, ANY, "DIR", "continue a checkpoint, or the newest of a --save folder"},
  {"resume", FLAG, AT(resume), SHARED, ANY, NULL,
   "continue the newest checkpoint of --save, or begin where there is none"},
  {"save-interval", INTEGER, AT(save_interval), SHARED, INT_RANGE(0), "N",
   "steps from one checkpoint to the next; one more follows the last step; 0 for none (default 500)"},
  {"keep-last", INTEGER, AT(keep_last), SHARED, INT_RANGE(0), "N", "checkpoints that are kept, 0 for all (default 3)"},
  {"exit-interval", INTEGER, AT(exit_interval), SHARED, INT_RANGE(0), "N",
   "end after a step that is a multiple of N, or the first one after it that is not skipped, with a checkpoint"},
  {"log-dir", TEXT, AT(log_dir), RUN, ANY, "DIR", "folder of log.jsonl (default --save)"},
  {"tensorboard-dir", TEXT, AT(tensorboard_dir), RUN, ANY, "DIR",
   "folder of TensorBoard event files (default tensorboard in the folder of the log)"},
  {"log-interval", INTEGER, AT(log_interval), RUN, INT_RANGE(1), "N",
   "steps from one printed line to the next (default 10); the log has all"},
  {"log-fp8-interval", INTEGER, AT(log_fp8_interval), RUN, INT_RANGE(0), "N",
   "steps from one record of every FP8 tensor to the next, 0 for none (default 0)"},
};

#define ENTRIES ((int)(sizeof(table) / sizeof(*table)))

// Values of long options; below are characters.
#define OPTION_BASE 1000
#define OPTION_HELP 999

static const option_entry *find_entry(const char *name, size_t length) {
  for (int i = 0; i < ENTRIES; i++) {
    if (!table[i].name || strlen(table[i].name) != length) continue;
    size_t same = 0;
    // "num_layers" in files, too.
    while (same < length && (name[same] == '_' ? '-' : name[same]) == table[i].name[same]) same++;
    if (same == length) return &table[i];
  }
  return NULL;
}

static int64_t *integer_at(fp8lm_train_settings *settings, const option_entry *entry) {
  return (int64_t *)(void *)((char *)settings + entry->offset);
}

static double *real_at(fp8lm_train_settings *settings, const option_entry *entry) {
  return (double *)(void *)((char *)settings + entry->offset);
}

static char **text_at(fp8lm_train_settings *settings, const option_entry *entry) {
  return (char **)(void *)((char *)settings + entry->offset);
}

static int64_t integer_of(const fp8lm_train_settings *settings, const option_entry *entry) {
  int64_t value;
  memcpy(&value, (const char *)settings + entry->offset, sizeof(value));
  return value;
}

static double real_of(const fp8lm_train_settings *settings, const option_entry *entry) {
  double value;
  memcpy(&value, (const char *)settings + entry->offset, sizeof(value));
  return value;
}

static const char *text_of(const fp8lm_train_settings *settings, const option_entry *entry) {
  const char *value;
  memcpy(&value, (const char *)settings + entry->offset, sizeof(value));
  return value;
}

void fp8lm_train_settings_free(fp8lm_train_settings *settings) {
  for (int i = 0; i < ENTRIES; i++) {
    if (!table[i].name || table[i].kind != TEXT) continue;
    free(*text_at(settings, &table[i]));
    *text_at(settings, &table[i]) = NULL;
  }
}

static fp8core_status set_text(fp8lm_train_settings *settings, const option_entry *entry, const char *value) {
  char *copy = strdup(value);
  if (!copy) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the text of an option");
  free(*text_at(settings, entry));
  *text_at(settings, entry) = copy;
  return FP8CORE_OK;
}

static int find_choice(const char *const *choices, const char *name) {
  // Megatron-LM's name.
  if (choices == recipes && strcmp(name, "tensorwise") == 0) name = "just-in-time";
  for (int i = 0; choices[i]; i++)
    if (strcmp(choices[i], name) == 0) return i;
  return -1;
}

static const char *list_choices(const char *const *choices, char *buffer, size_t size) {
  size_t used = 0;
  buffer[0] = '\0';
  for (int i = 0; choices[i] && used < size; i++)
    used += (size_t)snprintf(buffer + used, size - used, "%s%s",
                             i == 0           ? ""
                             : choices[i + 1] ? ", "
                                              : " or ",
                             choices[i]);
  return buffer;
}

static int stored(const option_entry *entry) { return entry->scope == FIXED || entry->scope == STORED; }

// The command line.

static int is_utf8(const char *text) {
  size_t left = strlen(text);
  while (left) {
    const size_t length = fp8lm_utf8_length(text, left);
    if (length == 0) return 0;
    text += length;
    left -= length;
  }
  return 1;
}

static int set_from_argument(const char *prefix, const option_entry *entry, const char *value,
                             fp8lm_train_settings *settings) {
  char option[64];
  char names[200];
  (void)snprintf(option, sizeof(option), "--%s", entry->name);
  switch (entry->kind) {
  case INTEGER:
    return fp8lm_parse_integer(prefix, option, value, (int64_t)entry->least, (int64_t)entry->most,
                               integer_at(settings, entry));
  case REAL: return fp8lm_parse_real(prefix, option, value, entry->least, entry->most, real_at(settings, entry));
  case FLAG:
    if (value && strcmp(value, "yes") != 0 && strcmp(value, "no") != 0)
      return fp8lm_complain(-1, prefix, "%s is '%s', expected yes or no", option, value);
    *integer_at(settings, entry) = !value || strcmp(value, "yes") == 0;
    return 0;
  case CHOICE: {
    const int found = find_choice(entry->choices, value);
    if (found < 0)
      return fp8lm_complain(-1, prefix, "%s is '%s', expected %s", option, value,
                            list_choices(entry->choices, names, sizeof(names)));
    *integer_at(settings, entry) = found;
    return 0;
  }
  case TEXT: break;
  }
  if (!*value) return fp8lm_complain(-1, prefix, "%s is empty", option);
  // Checkpoints hold it in JSON, which would have replacement characters there.
  if (stored(entry) && !is_utf8(value))
    return fp8lm_complain(-1, prefix, "%s is '%s', expected text in UTF-8, as a checkpoint holds no other", option,
                          value);
  if (set_text(settings, entry, value) != FP8CORE_OK) return fp8lm_complain(-1, prefix, "%s", fp8core_last_error());
  return 0;
}

// JSON.

// Whether a number that was read as 0 is 0, and not only too small for a double.
static int says_zero(const char *number, const char *end) {
  for (; number < end && *number != 'e' && *number != 'E'; number++)
    if (*number >= '1' && *number <= '9') return 0;
  return 1;
}

static fp8core_status read_value(fp8lm_json *json, const option_entry *entry, fp8lm_train_settings *settings) {
  double number = 0.0;
  const char *start = NULL;
  int digits = 0;
  int truth = 0;
  char *text = NULL;
  size_t length = 0;
  char names[200];
  char quoted[FP8LM_QUOTE_BYTES];
  fp8core_status status = FP8CORE_OK;
  switch (entry->kind) {
  case INTEGER:
  case REAL:
    (void)fp8lm_json_peek(json);
    start = json->cursor;
    status = fp8lm_json_real(json, &number);
    if (status != FP8CORE_OK) break;
    if (number == 0.0 && !says_zero(start, json->cursor))
      return corrupt("\"%s\" is %.*s, too small for a double", entry->name, (int)(json->cursor - start), start);
    // All whole numbers to the largest limit, and other limits as they are written.
    digits = entry->kind == INTEGER ? 16 : 15;
    if (!(number >= entry->least && number <= entry->most))
      return corrupt("\"%s\" is %.*g, expected a number from %.*g to %.*g", entry->name, digits, number, digits,
                     entry->least, digits, entry->most);
    if (entry->kind == INTEGER && number != floor(number))
      return corrupt("\"%s\" is %.*g, expected a whole number", entry->name, digits, number);
    if (entry->kind == INTEGER)
      *integer_at(settings, entry) = (int64_t)number;
    else
      *real_at(settings, entry) = number;
    return FP8CORE_OK;
  case FLAG:
    status = fp8lm_json_boolean(json, &truth);
    if (status == FP8CORE_OK) *integer_at(settings, entry) = truth;
    break;
  case CHOICE:
  case TEXT:
    status = fp8lm_json_string(json, &text, &length);
    if (status != FP8CORE_OK) break;
    if (strlen(text) != length) return corrupt("\"%s\" holds the character U+0000", entry->name);
    if (entry->kind == TEXT && length == 0) return corrupt("\"%s\" is empty", entry->name);
    if (entry->kind == TEXT) return set_text(settings, entry, text);
    if (find_choice(entry->choices, text) < 0)
      return corrupt("\"%s\" is %s, expected %s", entry->name, fp8lm_quote(quoted, text, length),
                     list_choices(entry->choices, names, sizeof(names)));
    *integer_at(settings, entry) = find_choice(entry->choices, text);
    break;
  }
  if (status == FP8CORE_OK) return status;
  char reason[256];
  (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  return fp8core_set_last_error(status, "\"%s\": %s", entry->name, reason);
}

// Reads an object; `given` has a flag for each entry of the table and learns which were there.
static fp8core_status read_object(fp8lm_json *json, int stored_only, fp8lm_train_settings *settings,
                                  unsigned char *given) {
  fp8core_status status = fp8lm_json_enter_object(json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t length;
    int more;
    status = fp8lm_json_next_member(json, &key, &length, &more);
    if (status != FP8CORE_OK || !more) break;
    char quoted[FP8LM_QUOTE_BYTES];
    const option_entry *entry = find_entry(key, length);
    if (!entry || (stored_only && !stored(entry)) || strcmp(entry->name, "config") == 0)
      return corrupt("there is no option %s", fp8lm_quote(quoted, key, length));
    if (given[entry - table]) return corrupt("\"%s\" is there twice", entry->name);
    given[entry - table] = 1;
    status = read_value(json, entry, settings);
  }
  return status;
}

// Options that are younger than the format may be; what they are then is what runs did before.
static int may_be_missing(const option_entry *entry) {
  static const char *const younger[] = {"spike-action", "zero-stage", "grad-reduce", "grad-scaling",
                                        "grad-delayed-scaling"};
  for (size_t i = 0; i < sizeof(younger) / sizeof(*younger); i++)
    if (strcmp(entry->name, younger[i]) == 0) return 1;
  return entry->kind == TEXT && strcmp(entry->name, "preset") != 0 && strcmp(entry->name, "data-path") != 0;
}

fp8core_status fp8lm_train_settings_read(fp8lm_json *json, fp8lm_train_settings *settings) {
  unsigned char given[ENTRIES] = {0};
  settings->zero_stage = ZERO_STAGE_AUTO;
  const fp8core_status status = read_object(json, 1, settings, given);
  if (status != FP8CORE_OK) return status;
  for (int i = 0; i < ENTRIES; i++)
    if (stored(&table[i]) && !given[i] && !may_be_missing(&table[i]))
      return corrupt("the option \"%s\" is missing", table[i].name);
  return FP8CORE_OK;
}

static void write_value(FILE *stream, const option_entry *entry, const fp8lm_train_settings *settings) {
  switch (entry->kind) {
  case INTEGER: fprintf(stream, "%" PRId64, integer_of(settings, entry)); break;
  case REAL: fp8lm_json_write_number(stream, real_of(settings, entry)); break;
  case FLAG: fputs(integer_of(settings, entry) ? "true" : "false", stream); break;
  case CHOICE: fprintf(stream, "\"%s\"", entry->choices[integer_of(settings, entry)]); break;
  case TEXT: fp8lm_json_write_string(stream, text_of(settings, entry), strlen(text_of(settings, entry))); break;
  }
}

void fp8lm_train_settings_write(FILE *stream, const fp8lm_train_settings *settings, int indentation) {
  const char *separator = "";
  fputc('{', stream);
  for (int i = 0; i < ENTRIES; i++) {
    if (!stored(&table[i]) || (table[i].kind == TEXT && !text_of(settings, &table[i]))) continue;
    if (indentation > 0)
      fprintf(stream, "%s\n%*s\"%s\": ", separator, indentation, "", table[i].name);
    else
      fprintf(stream, "%s\"%s\": ", separator, table[i].name);
    separator = indentation > 0 ? "," : ", ";
    write_value(stream, &table[i], settings);
  }
  if (indentation > 0) fprintf(stream, "\n%*s", indentation - 2, "");
  fputc('}', stream);
}

void fp8lm_train_settings_write_shared(FILE *stream, const fp8lm_train_settings *settings) {
  for (int i = 0; i < ENTRIES; i++) {
    if (!stored(&table[i]) && table[i].scope != SHARED) continue;
    // That of --resume, too.
    if (strcmp(table[i].name, "load") == 0)
      fputs("the checkpoint to continue\t", stream);
    else
      fprintf(stream, "--%s\t", table[i].name);
    if (table[i].kind == TEXT && !text_of(settings, &table[i]))
      fputs("none", stream);
    else
      write_value(stream, &table[i], settings);
    fputc('\n', stream);
  }
}

// Help.

static void print_wrapped(const char *text, int column) {
  int at = column;
  while (*text) {
    const int word = (int)strcspn(text, " ");
    if (at > column && at + 1 + word > 118) {
      printf("\n%*s", column, "");
      at = column;
    } else if (at > column) {
      fputc(' ', stdout);
      at++;
    }
    printf("%.*s", word, text);
    at += word;
    text += word;
    while (*text == ' ') text++;
  }
  fputc('\n', stdout);
}

static int is_without(const fp8lm_train_variant *variant, const option_entry *entry) {
  for (const char *const *name = variant ? variant->without : NULL; name && *name; name++)
    if (strcmp(*name, entry->name) == 0) return 1;
  return 0;
}

static void print_option(const char *left, const char *help) {
  if (strlen(left) > 34)
    printf("  %s\n%38s", left, "");
  else
    printf("  %-34s  ", left);
  print_wrapped(help, 38);
}

static void print_options(const fp8lm_train_variant *variant) {
  char left[64];
  const char *heading = NULL;
  for (int i = 0; variant && i < variant->count; i++) {
    const fp8lm_train_option *option = &variant->options[i];
    if (!option->name) {
      printf("\n%s:\n", option->help);
      continue;
    }
    (void)snprintf(left, sizeof(left), "--%s %s", option->name, option->argument);
    print_option(left, option->help);
  }
  for (int i = 0; i < ENTRIES; i++) {
    if (!table[i].name) {
      heading = table[i].help;
      continue;
    }
    if (is_without(variant, &table[i])) continue;
    // Only over what there is.
    if (heading) printf("\n%s:\n", heading);
    heading = NULL;
    (void)snprintf(left, sizeof(left), "--%s%s%s", table[i].name, table[i].argument ? " " : "",
                   table[i].argument ? table[i].argument : "[=no]");
    print_option(left, table[i].help);
  }
  print_option("--help", "print this text");
}

static void print_usage(const char *prefix) {
  printf(
    "Usage: %s --data-path PATH [OPTION]...\n"
    "\n"
    "Trains a GPT model. Options have Megatron-LM's names where it has them. Prints a line every few steps, or a\n"
    "progress bar on a terminal; writes one JSON object a step to log.jsonl, TensorBoard event files, and\n"
    "checkpoints from which a run continues bit for bit. SIGINT and SIGTERM end the run after the step in progress,\n"
    "with a checkpoint if there is --save.\n",
    prefix);
}

static void print_help(const char *prefix, const fp8lm_train_variant *variant) {
  if (variant)
    fputs(variant->usage, stdout);
  else
    print_usage(prefix);
  print_options(variant);
  printf("\n"
         "Presets:");
  for (int i = 0; fp8gpt_config_preset_name(i); i++) printf("%s %s", i == 0 ? "" : ",", fp8gpt_config_preset_name(i));
  fputs(".\n\n", stdout);
  if (variant) {
    fputs(variant->end, stdout);
    return;
  }
  printf(
    "Exit codes: 0 success; 1 a failure at run time (data or a checkpoint that cannot be read or written, gradients\n"
    "that stay infinite, a spike with --spike-action stop, a device that is not there); 2 wrong usage; 130 the run\n"
    "was ended by SIGINT or SIGTERM (with --save, its checkpoint is written).\n");
}

// Defaults.

typedef struct recipe {
  const char *preset;
  double lr;
  // Of tokens.
  int64_t batch;
} recipe;

// FP8-LM, table 1 and section 3.1; GPT-3, table 2.1, for GPT-2's smallest; Llama, table 2.
static const recipe preset_recipes[] = {
  {"gpt-125m", 6e-4, 1 << 20}, {"gpt-7b", 3e-4, 4 << 20},    {"gpt-13b", 3e-4, 4 << 20},
  {"gpt-175b", 3e-5, 1 << 20}, {"gpt2-124m", 6e-4, 1 << 19}, {"llama-7b", 3e-4, 4 << 20},
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static fp8core_status set_defaults(fp8lm_train_settings *settings) {
  const fp8optim_group group = fp8optim_group_default();
  settings->precision = FP8GPT_FP8_O2;
  settings->fp8_recipe = FP8CORE_SCALING_DELAYED;
  settings->fp8_amax_history_len = 16;
  settings->train_iters = 1000;
  settings->lr_decay_style = FP8OPTIM_SCHEDULE_COSINE;
  settings->weight_decay = group.weight_decay;
  settings->adam_beta1 = group.beta1;
  settings->adam_beta2 = group.beta2;
  settings->adam_eps = group.eps;
  settings->clip_grad = 1.0;
  settings->seed = 1234;
  settings->max_skipped = 10;
  settings->spike_sigma = 6.0;
  settings->val_fraction = 0.05;
  settings->eval_interval = 100;
  settings->eval_iters = 20;
  return set_text(settings, find_entry("preset", 6), "tiny-gpt");
}

static void set_run_defaults(fp8lm_train_settings *settings) {
  settings->check_data = 1;
  settings->zero_stage = ZERO_STAGE_AUTO;
  settings->distributed_timeout_minutes = 10.0;
  settings->save_interval = 500;
  settings->keep_last = 3;
  settings->log_interval = 10;
}

static int is_given(const unsigned char *given, const char *name) {
  return given[find_entry(name, strlen(name)) - table];
}

// Numbers as options store them: a float that was written as 1e-5 stays 1e-5.
static double shortest(float value) {
  char text[40];
  for (int digits = 1; digits <= 9; digits++) {
    (void)snprintf(text, sizeof(text), "%.*g", digits, (double)value);
    if (strtof(text, NULL) == value) break;
  }
  return strtod(text, NULL);
}

// Fills what was not given from the preset and from what was. \p micro_batch is a default, or 0.
static fp8core_status complete(fp8lm_train_settings *settings, const unsigned char *given, int64_t micro_batch) {
  fp8gpt_config preset;
  const fp8core_status status = fp8gpt_config_preset(settings->preset, &preset);
  if (status != FP8CORE_OK) return status;
#define FILL(field, name, value)                                                                                       \
  if (!is_given(given, name)) settings->field = (value)
  FILL(num_layers, "num-layers", preset.layers);
  FILL(hidden_size, "hidden-size", preset.hidden);
  FILL(swiglu, "swiglu", preset.activation == FP8GPT_SWIGLU);
  FILL(num_attention_heads, "num-attention-heads", preset.heads);
  FILL(num_query_groups, "num-query-groups",
       is_given(given, "num-attention-heads") ? settings->num_attention_heads : preset.kv_heads);
  FILL(ffn_hidden_size, "ffn-hidden-size",
       is_given(given, "hidden-size") ? 4 * settings->hidden_size : preset.ffn_hidden);
  FILL(seq_length, "seq-length", preset.sequence);
  FILL(max_position_embeddings, "max-position-embeddings",
       settings->seq_length > preset.sequence ? settings->seq_length : preset.sequence);
  FILL(vocab_size, "vocab-size", preset.vocabulary);
  FILL(normalization, "normalization", preset.normalization);
  FILL(norm_epsilon, "norm-epsilon", shortest(preset.norm_eps));
  FILL(position_embedding_type, "position-embedding-type", preset.position);
  FILL(rotary_base, "rotary-base", shortest(preset.rope_theta));
  FILL(untie_embeddings_and_output_weights, "untie-embeddings-and-output-weights", !preset.tied_embeddings);
  FILL(disable_bias_linear, "disable-bias-linear", !preset.biases);
  FILL(hidden_dropout, "hidden-dropout", shortest(preset.dropout));
  FILL(init_method_std, "init-method-std", shortest(preset.init_std));
  double lr = 1e-3;
  int64_t batch = 8;
  for (size_t i = 0; i < sizeof(preset_recipes) / sizeof(*preset_recipes); i++) {
    if (strcmp(preset_recipes[i].preset, settings->preset) != 0) continue;
    lr = preset_recipes[i].lr;
    batch = preset_recipes[i].batch / preset.sequence;
  }
  FILL(lr, "lr", lr);
  if (!is_given(given, "global-batch-size"))
    settings->global_batch_size =
      is_given(given, "micro-batch-size")
        ? (batch + settings->micro_batch_size - 1) / settings->micro_batch_size * settings->micro_batch_size
        : batch;
  if (micro_batch == 0) micro_batch = settings->global_batch_size % 8 == 0 ? 8 : settings->global_batch_size;
  FILL(micro_batch_size, "micro-batch-size", micro_batch);
  FILL(min_lr, "min-lr", settings->lr / 10.0);
  FILL(lr_warmup_iters, "lr-warmup-iters", smaller(1000, settings->train_iters / 10));
  FILL(lr_decay_iters, "lr-decay-iters", settings->train_iters);
  FILL(lr_wsd_decay_iters, "lr-wsd-decay-iters", settings->train_iters / 10);
#undef FILL
  return FP8CORE_OK;
}

// What the libraries are told.

fp8gpt_config fp8lm_train_model_config(const fp8lm_train_settings *settings) {
  fp8gpt_config config;
  memset(&config, 0, sizeof(config));
  config.size = sizeof(config);
  config.layers = (int)settings->num_layers;
  config.hidden = (int)settings->hidden_size;
  config.heads = (int)settings->num_attention_heads;
  config.kv_heads = (int)settings->num_query_groups;
  config.ffn_hidden = (int)settings->ffn_hidden_size;
  config.vocabulary = (int)settings->vocab_size;
  config.position = (fp8gpt_position)settings->position_embedding_type;
  // Memory is planned for the longest sequence, and rotary positions have no weights.
  config.sequence = (int)(config.position == FP8GPT_LEARNED ? settings->max_position_embeddings : settings->seq_length);
  config.normalization = (fp8gpt_normalization)settings->normalization;
  config.activation = settings->swiglu ? FP8GPT_SWIGLU : FP8GPT_GELU;
  config.tied_embeddings = !settings->untie_embeddings_and_output_weights;
  config.biases = !settings->disable_bias_linear;
  config.norm_eps = (float)settings->norm_epsilon;
  config.rope_theta = (float)settings->rotary_base;
  config.dropout = (float)settings->hidden_dropout;
  config.init_std = (float)settings->init_method_std;
  return config;
}

fp8gpt_model_options fp8lm_train_model_options(const fp8lm_train_settings *settings) {
  fp8gpt_model_options options = fp8gpt_model_options_default();
  options.precision = (fp8gpt_precision)settings->precision;
  options.batch = (int)settings->micro_batch_size;
  options.scaling.policy = (fp8core_scaling_policy)settings->fp8_recipe;
  options.scaling.history_length = (int)settings->fp8_amax_history_len;
  options.scaling.amax_choice = (fp8core_amax_choice)settings->fp8_amax_compute_algo;
  options.scaling.margin = (int)settings->fp8_margin;
  options.recompute = (int)settings->recompute_activations;
  options.seed = (uint64_t)settings->seed;
  return options;
}

fp8optim_adamw_options fp8lm_train_adamw_options(const fp8lm_train_settings *settings) {
  fp8optim_adamw_options options =
    fp8optim_adamw_options_of(settings->precision >= FP8GPT_FP8_O2 ? FP8OPTIM_PRESET_FP8 : FP8OPTIM_PRESET_FP32);
  options.stochastic_rounding = (int)settings->stochastic_rounding;
  options.seed = (uint64_t)settings->seed;
  return options;
}

fp8optim_group fp8lm_train_group(const fp8lm_train_settings *settings, int decay) {
  fp8optim_group group = fp8optim_group_default();
  group.learning_rate = settings->lr;
  group.beta1 = settings->adam_beta1;
  group.beta2 = settings->adam_beta2;
  group.eps = settings->adam_eps;
  group.weight_decay = decay ? settings->weight_decay : 0.0;
  return group;
}

fp8optim_schedule fp8lm_train_schedule(const fp8lm_train_settings *settings) {
  fp8optim_schedule schedule = fp8optim_schedule_default();
  schedule.type = (fp8optim_schedule_type)settings->lr_decay_style;
  schedule.peak = settings->lr;
  schedule.floor = settings->min_lr;
  schedule.warmup_steps = settings->lr_warmup_iters;
  schedule.total_steps = settings->lr_decay_iters;
  schedule.decay_steps = settings->lr_wsd_decay_iters;
  return schedule;
}

// What precision suggests, which cannot change: what is stored is what the run had.
static void choose_zero_stage(fp8lm_train_settings *settings) {
  if (settings->zero_stage == ZERO_STAGE_AUTO) settings->zero_stage = settings->precision == FP8GPT_FP8_O3 ? 1 : 0;
}

fp8comm_gradient_options fp8lm_train_gradient_options(const fp8lm_train_settings *settings) {
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  if (settings->grad_reduce > 0)
    options.algorithm = (fp8comm_gradient_algorithm)(settings->grad_reduce - 1);
  else
    options.algorithm = settings->precision >= FP8GPT_FP8_O1 ? FP8COMM_TWO_SHOT : FP8COMM_BASELINE_FP32;
  options.scaling = (fp8comm_gradient_scaling)settings->grad_scaling;
  options.delayed_scaling = (int)settings->grad_delayed_scaling;
  return options;
}

int64_t fp8lm_train_micro_batches(const fp8lm_train_settings *settings) {
  return settings->global_batch_size / settings->pass_sequences;
}

const char *fp8lm_train_precision_name(const fp8lm_train_settings *settings) { return precisions[settings->precision]; }

// The whole.

static int check(const char *prefix, const fp8lm_train_settings *settings) {
  if (!settings->data_path)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "--data-path is missing; 'fp8lm data tokenize' makes shards");
  // Here, by the names of options.
  if (settings->hidden_size % settings->num_attention_heads != 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--hidden-size is %" PRId64 ", expected a multiple of --num-attention-heads, %" PRId64,
                          settings->hidden_size, settings->num_attention_heads);
  if (settings->num_attention_heads % settings->num_query_groups != 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--num-attention-heads is %" PRId64 ", expected a multiple of --num-query-groups, %" PRId64,
                          settings->num_attention_heads, settings->num_query_groups);
  const fp8gpt_config config = fp8lm_train_model_config(settings);
  if (fp8gpt_config_validate(&config) != FP8CORE_OK)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "%s", fp8core_last_error());
  if (settings->seq_length > config.sequence)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--seq-length is %" PRId64 ", expected at most --max-position-embeddings, %" PRId64,
                          settings->seq_length, settings->max_position_embeddings);
  if (settings->micro_batch_size > INT_MAX / config.sequence)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--micro-batch-size is %" PRId64
                          ", expected at most %d: with %d tokens a sequence, a pass has "
                          "at most 2^31 - 1",
                          settings->micro_batch_size, INT_MAX / config.sequence, config.sequence);
  if (settings->global_batch_size % settings->micro_batch_size != 0 ||
      settings->global_batch_size / settings->micro_batch_size > FP8GPT_MICRO_BATCHES)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--global-batch-size is %" PRId64 ", expected a multiple of --micro-batch-size, %" PRId64
                          ", by 1 to %d",
                          settings->global_batch_size, settings->micro_batch_size, FP8GPT_MICRO_BATCHES);
  const int64_t after_warmup = settings->lr_decay_iters - settings->lr_warmup_iters;
  if (settings->min_lr > settings->lr)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "--min-lr is %g, expected at most --lr, %g", settings->min_lr,
                          settings->lr);
  if (settings->lr_decay_style != FP8OPTIM_SCHEDULE_CONSTANT && after_warmup < 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--lr-decay-iters is %" PRId64 ", expected at least --lr-warmup-iters, %" PRId64,
                          settings->lr_decay_iters, settings->lr_warmup_iters);
  if (settings->lr_decay_style == FP8OPTIM_SCHEDULE_WSD && settings->lr_wsd_decay_iters > after_warmup)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix,
                          "--lr-wsd-decay-iters is %" PRId64 ", expected at most what --lr-warmup-iters, %" PRId64
                          ", leaves of --lr-decay-iters, %" PRId64,
                          settings->lr_wsd_decay_iters, settings->lr_warmup_iters, settings->lr_decay_iters);
  const fp8optim_schedule schedule = fp8lm_train_schedule(settings);
  double rate;
  if (fp8optim_schedule_rate(&schedule, 0, &rate) != FP8CORE_OK)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "the learning rate's schedule: %s", fp8core_last_error());
  if (!settings->vocab_file != !settings->merge_file)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "--vocab-file and --merge-file go together");
  if (settings->resume && !settings->save) return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "--resume needs --save");
  return FP8LM_EXIT_SUCCESS;
}

// What a checkpoint fixed must be the same now.
static int check_fixed(const char *prefix, const fp8lm_train_settings *now, const fp8lm_train_settings *before) {
  for (int i = 0; i < ENTRIES; i++) {
    const option_entry *entry = &table[i];
    if (!entry->name || entry->scope != FIXED) continue;
    const int same = entry->kind == TEXT   ? strcmp(text_of(now, entry), text_of(before, entry)) == 0
                     : entry->kind == REAL ? real_of(now, entry) == real_of(before, entry)
                                           : integer_of(now, entry) == integer_of(before, entry);
    if (same) continue;
    (void)fflush(stdout);
    fprintf(stderr, "%s: --%s is ", prefix, entry->name);
    write_value(stderr, entry, now);
    fputs(", but the checkpoint was trained with ", stderr);
    write_value(stderr, entry, before);
    fputc('\n', stderr);
    return FP8LM_EXIT_USAGE;
  }
  return FP8LM_EXIT_SUCCESS;
}

typedef struct argument {
  const option_entry *entry;
  const char *value;
} argument;

// Options of a variant's own are given to it at once.
static int read_arguments(const char *prefix, int argc, char **argv, const fp8lm_train_variant *variant,
                          argument *arguments, int *count) {
  struct option options[ENTRIES + FP8LM_TRAIN_VARIANT_OPTIONS + 2];
  int used = 0;
  for (int i = 0; variant && i < variant->count; i++) {
    if (!variant->options[i].name) continue;
    const struct option option = {variant->options[i].name, required_argument, NULL, OPTION_BASE + ENTRIES + i};
    options[used++] = option;
  }
  for (int i = 0; i < ENTRIES; i++) {
    if (!table[i].name || is_without(variant, &table[i])) continue;
    const struct option option = {table[i].name, table[i].kind == FLAG ? optional_argument : required_argument, NULL,
                                  OPTION_BASE + i};
    options[used++] = option;
  }
  const struct option last[] = {{"help", no_argument, NULL, OPTION_HELP}, {NULL, 0, NULL, 0}};
  options[used++] = last[0];
  options[used] = last[1];
  opterr = 0;
  *count = 0;
  for (;;) {
    const int option = getopt_long(argc, argv, ":h", options, NULL);
    if (option == -1) break;
    if (option == 'h' || option == OPTION_HELP) {
      print_help(prefix, variant);
      return -1;
    }
    if (option < OPTION_BASE) return fp8lm_option_error(prefix, option, argv, options);
    if (option >= OPTION_BASE + ENTRIES) {
      const char *name = variant->options[option - OPTION_BASE - ENTRIES].name;
      if (variant->set(variant->user_data, prefix, name, optarg) != 0) return FP8LM_EXIT_USAGE;
      continue;
    }
    arguments[*count].entry = &table[option - OPTION_BASE];
    arguments[(*count)++].value = optarg;
  }
  if (optind < argc)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "unexpected argument '%s'; see '%s --help'", argv[optind], prefix);
  return FP8LM_EXIT_SUCCESS;
}

static int read_config_file(const char *prefix, const char *path, fp8lm_train_settings *settings,
                            unsigned char *given) {
  char *text;
  size_t length;
  if (fp8lm_checkpoint_read_text(path, &text, &length) != FP8CORE_OK)
    return fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s: %s", path, fp8core_last_error());
  fp8lm_json json;
  fp8lm_json_init(&json, text, length);
  fp8core_status status = read_object(&json, 0, settings, given);
  if (status == FP8CORE_OK) status = fp8lm_json_finish(&json);
  free(text);
  if (status != FP8CORE_OK) return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "%s: %s", path, fp8core_last_error());
  return FP8LM_EXIT_SUCCESS;
}

// The checkpoint to continue, if any, is left in settings->load.
static int find_checkpoint(const char *prefix, fp8lm_train_settings *settings) {
  char *found = NULL;
  if (settings->resume) {
    if (!settings->save) return FP8LM_EXIT_SUCCESS;
    if (fp8lm_checkpoint_newest(settings->save, &found, NULL) != FP8CORE_OK)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s: %s", settings->save, fp8core_last_error());
  } else if (settings->load) {
    if (fp8lm_checkpoint_find(settings->load, &found) != FP8CORE_OK)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s: %s", settings->load, fp8core_last_error());
  }
  if (!found) return FP8LM_EXIT_SUCCESS;
  free(settings->load);
  settings->load = found;
  settings->resume = 0;
  return FP8LM_EXIT_SUCCESS;
}

static int apply(const char *prefix, const char *config, const argument *arguments, int count,
                 fp8lm_train_settings *settings, unsigned char *given) {
  int result = config ? read_config_file(prefix, config, settings, given) : FP8LM_EXIT_SUCCESS;
  for (int i = 0; i < count && result == FP8LM_EXIT_SUCCESS; i++) {
    given[arguments[i].entry - table] = 1;
    if (set_from_argument(prefix, arguments[i].entry, arguments[i].value, settings) != 0) result = FP8LM_EXIT_USAGE;
  }
  return result;
}

static int parse(const char *prefix, int argc, char **argv, const fp8lm_train_variant *variant, argument *arguments,
                 fp8lm_train_settings *settings, fp8lm_train_settings *first, fp8lm_train_settings *saved) {
  unsigned char given[ENTRIES] = {0};
  int count;
  int result = read_arguments(prefix, argc, argv, variant, arguments, &count);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  const char *config = NULL;
  for (int i = 0; i < count; i++)
    if (strcmp(arguments[i].entry->name, "config") == 0) config = arguments[i].value;
  // Once for what is to be loaded, then over it.
  set_run_defaults(first);
  result = apply(prefix, config, arguments, count, first, given);
  if (result == FP8LM_EXIT_SUCCESS && first->resume && first->load)
    result = fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "--resume and --load exclude each other");
  if (result == FP8LM_EXIT_SUCCESS) result = find_checkpoint(prefix, first);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  set_run_defaults(settings);
  if (!first->load) {
    if (set_defaults(settings) != FP8CORE_OK)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s", fp8core_last_error());
    if (variant) {
      settings->precision = variant->precision;
      settings->train_iters = variant->train_iters;
    }
  } else {
    fp8lm_checkpoint_index index;
    fp8core_status status = fp8lm_checkpoint_open(first->load, &index);
    if (status == FP8CORE_OK) {
      *saved = index.settings;
      index.settings = fp8lm_train_settings_none();
      // Their copy: what is stored and may be changed.
      for (int i = 0; i < ENTRIES && status == FP8CORE_OK; i++) {
        if (!stored(&table[i])) continue;
        if (table[i].kind == TEXT)
          status = text_of(saved, &table[i]) ? set_text(settings, &table[i], text_of(saved, &table[i])) : FP8CORE_OK;
        else if (table[i].kind == REAL)
          *real_at(settings, &table[i]) = real_of(saved, &table[i]);
        else
          *integer_at(settings, &table[i]) = integer_of(saved, &table[i]);
      }
      fp8lm_checkpoint_index_free(&index);
    }
    if (status != FP8CORE_OK)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "%s: %s", first->load, fp8core_last_error());
  }
  memset(given, 0, sizeof(given));
  result = apply(prefix, config, arguments, count, settings, given);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  free(settings->load);
  settings->load = first->load;
  first->load = NULL;
  settings->resume = first->resume;
  // Options of a log, which --config may be, have one as well, perhaps of another number of ranks.
  for (int i = 0; i < count; i++)
    if (strcmp(arguments[i].entry->name, "micro-batch-size") == 0) settings->micro_batch_size_given = 1;
  const int64_t micro_batch = variant ? variant->micro_batch_size : 0;
  if (!settings->load && complete(settings, given, micro_batch) != FP8CORE_OK)
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "--preset: %s", fp8core_last_error());
  if (settings->load && settings->preset && saved->preset) result = check_fixed(prefix, settings, saved);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  // Whoever does not take it sets it.
  if (is_without(variant, find_entry("global-batch-size", strlen("global-batch-size"))))
    settings->global_batch_size = settings->micro_batch_size;
  settings->pass_sequences = settings->micro_batch_size;
  choose_zero_stage(settings);
  return check(prefix, settings);
}

int fp8lm_train_settings_parse(const char *prefix, int argc, char **argv, fp8lm_train_settings *settings) {
  return fp8lm_train_settings_parse_variant(prefix, argc, argv, NULL, settings);
}

int fp8lm_train_settings_parse_variant(const char *prefix, int argc, char **argv, const fp8lm_train_variant *variant,
                                       fp8lm_train_settings *settings) {
  fp8lm_train_settings first = fp8lm_train_settings_none();
  fp8lm_train_settings saved = fp8lm_train_settings_none();
  *settings = fp8lm_train_settings_none();
  argument *arguments = calloc((size_t)argc + 1, sizeof(*arguments));
  const int result = arguments ? parse(prefix, argc, argv, variant, arguments, settings, &first, &saved)
                               : fp8lm_complain(FP8LM_EXIT_FAILURE, prefix, "cannot allocate the list of options");
  free(arguments);
  fp8lm_train_settings_free(&first);
  fp8lm_train_settings_free(&saved);
  if (result != FP8LM_EXIT_SUCCESS) fp8lm_train_settings_free(settings);
  return result;
}
