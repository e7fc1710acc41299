/** \file
 * What `fp8lm train` is told: one table of options, which the command line, configuration files, the help and the index
 * of checkpoints are made of.
 */
#ifndef FP8LM_TRAIN_SETTINGS_H
#define FP8LM_TRAIN_SETTINGS_H

#include <stdint.h>
#include <stdio.h>

#include "fp8comm/gradient.h"
#include "fp8core/scaling.h"
#include "fp8gpt/config.h"
#include "fp8gpt/model.h"
#include "fp8optim/adamw.h"
#include "fp8optim/schedule.h"
#include "json_reader.h"

/** The fields are in the order of the options and named after them. */
typedef struct fp8lm_train_settings {
  /* The model. */
  char *preset;
  int64_t num_layers;
  int64_t hidden_size;
  int64_t ffn_hidden_size;
  int64_t num_attention_heads;
  int64_t num_query_groups;
  int64_t seq_length;
  int64_t max_position_embeddings;
  int64_t vocab_size;
  int64_t normalization;
  double norm_epsilon;
  int64_t swiglu;
  int64_t position_embedding_type;
  double rotary_base;
  int64_t untie_embeddings_and_output_weights;
  int64_t disable_bias_linear;
  double hidden_dropout;
  double init_method_std;
  /* Precision. */
  int64_t precision;
  int64_t fp8_recipe;
  int64_t fp8_amax_history_len;
  int64_t fp8_amax_compute_algo;
  int64_t fp8_margin;
  int64_t stochastic_rounding;
  int64_t recompute_activations;
  /* Optimization. */
  int64_t micro_batch_size;
  int64_t global_batch_size;
  int64_t train_iters;
  double lr;
  double min_lr;
  int64_t lr_decay_style;
  int64_t lr_warmup_iters;
  int64_t lr_decay_iters;
  int64_t lr_wsd_decay_iters;
  double weight_decay;
  double adam_beta1;
  double adam_beta2;
  double adam_eps;
  double clip_grad;
  int64_t seed;
  int64_t max_skipped;
  double spike_sigma;
  int64_t spike_action;
  /* Data. */
  char *data_path;
  char *valid_data_path;
  double val_fraction;
  char *vocab_file;
  char *merge_file;
  int64_t eval_interval;
  int64_t eval_iters;
  int64_t check_data;
  /* Ranks. */
  int64_t data_parallel_size;
  /** Once parsed, 0 to 3. */
  int64_t zero_stage;
  /** 0: as the precision suggests; else one more than an fp8comm_gradient_algorithm. */
  int64_t grad_reduce;
  int64_t grad_scaling;
  int64_t grad_delayed_scaling;
  double distributed_timeout_minutes;
  /* The run. */
  char *config;
  int64_t device;
  int64_t threads;
  char *save;
  char *load;
  int64_t resume;
  int64_t save_interval;
  int64_t keep_last;
  int64_t exit_interval;
  char *log_dir;
  char *tensorboard_dir;
  int64_t log_interval;
  int64_t log_fp8_interval;
  /* No options: whether the command line has the micro-batch; and sequences of a pass, the micro-batch or, where ranks'
   * shares of the global batch are smaller or no multiple of it, fewer. What is stored, and how much is validated, does
   * not depend on the number of ranks. */
  int64_t micro_batch_size_given;
  int64_t pass_sequences;
} fp8lm_train_settings;

/** What an option means to checkpoints. */
typedef enum fp8lm_train_scope {
  /** Stored; a resumed run cannot have another value. */
  FP8LM_TRAIN_FIXED,
  /** Stored; a resumed run may change it. */
  FP8LM_TRAIN_STORED,
  /** Of this run only, and the same on all its ranks. */
  FP8LM_TRAIN_SHARED,
  /** Of this run only. */
  FP8LM_TRAIN_RUN
} fp8lm_train_scope;

/** Devices of --device. */
enum { FP8LM_TRAIN_CPU = 0, FP8LM_TRAIN_CUDA = 1 };

/** What --spike-action makes of a step whose loss is a spike. */
enum { FP8LM_TRAIN_SPIKE_REPORT = 0, FP8LM_TRAIN_SPIKE_SKIP = 1, FP8LM_TRAIN_SPIKE_STOP = 2 };

/** All 0 and NULL; fp8lm_train_settings_free() is fine. */
static inline fp8lm_train_settings fp8lm_train_settings_none(void) {
  const fp8lm_train_settings none = {0};
  return none;
}

void fp8lm_train_settings_free(fp8lm_train_settings *settings);

/**
 * Parses the command line of \p prefix into \p settings: the checkpoint's settings (of --load or --resume), else
 * defaults and preset; then the file of --config; then the options. Nothing is printed but complaints and, for --help,
 * the help.
 *
 * \return FP8LM_EXIT_SUCCESS; FP8LM_EXIT_USAGE or FP8LM_EXIT_FAILURE after a message; -1 after --help.
 */
int fp8lm_train_settings_parse(const char *prefix, int argc, char **argv, fp8lm_train_settings *settings);

/** An option that `fp8lm train` does not have. */
typedef struct fp8lm_train_option {
  /** NULL: a heading of the help, which is \p help. */
  const char *name;
  /** The value's name in the help. */
  const char *argument;
  const char *help;
} fp8lm_train_option;

/** Most options of a variant. */
#define FP8LM_TRAIN_VARIANT_OPTIONS 32

/** Another command that trains: where its command line differs from that of `fp8lm train`. */
typedef struct fp8lm_train_variant {
  /** What --help prints before and after the options. */
  const char *usage;
  const char *end;
  /** Options of its own, which the help lists first. */
  const fp8lm_train_option *options;
  int count;
  /** Names of options that its command line does not take; files of --config may have them. NULL is the last. Without
   * global-batch-size that is the micro-batch's. */
  const char *const *without;
  /** Takes the value of an option of its own; non-zero after a message that it is wrong. */
  int (*set)(void *user_data, const char *prefix, const char *name, const char *value);
  void *user_data;
  /** Defaults of --precision, --train-iters and --micro-batch-size. */
  int64_t precision;
  int64_t train_iters;
  int64_t micro_batch_size;
} fp8lm_train_variant;

/** The same for the command line of another command. \p variant NULL: that of `fp8lm train`. */
int fp8lm_train_settings_parse_variant(const char *prefix, int argc, char **argv, const fp8lm_train_variant *variant,
                                       fp8lm_train_settings *settings);

/**
 * Reads an object of stored options, as fp8lm_train_settings_write() writes it, all of which must be there, but
 * those that are younger than the format: "spike-action", "zero-stage" and those of gradients' reduction.
 * FP8CORE_ERROR_CORRUPT_DATA for keys that are unknown, missing or twice there and values out of range.
 */
fp8core_status fp8lm_train_settings_read(fp8lm_json *json, fp8lm_train_settings *settings);

/** Writes the stored options as an object, one a line, each line after \p indentation spaces. */
void fp8lm_train_settings_write(FILE *stream, const fp8lm_train_settings *settings, int indentation);

/** Writes all that must be the same on every rank, which are the stored and the shared options: a line each, the
 * option, a tabulator and its value, or "none". */
void fp8lm_train_settings_write_shared(FILE *stream, const fp8lm_train_settings *settings);

/** What the settings mean to the libraries. */
fp8gpt_config fp8lm_train_model_config(const fp8lm_train_settings *settings);
fp8gpt_model_options fp8lm_train_model_options(const fp8lm_train_settings *settings);
fp8optim_adamw_options fp8lm_train_adamw_options(const fp8lm_train_settings *settings);
fp8optim_group fp8lm_train_group(const fp8lm_train_settings *settings, int decay);
fp8optim_schedule fp8lm_train_schedule(const fp8lm_train_settings *settings);

fp8comm_gradient_options fp8lm_train_gradient_options(const fp8lm_train_settings *settings);

/** Micro-batches of a step, of all ranks. */
int64_t fp8lm_train_micro_batches(const fp8lm_train_settings *settings);

/** Names of the choices of an option, for logs. */
const char *fp8lm_train_precision_name(const fp8lm_train_settings *settings);

#endif
