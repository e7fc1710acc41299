/** \file
 * The log of a training run: one JSON object a line. docs/fp8lm.md, "Log of a run", defines it.
 */
#ifndef FP8LM_RUN_LOG_H
#define FP8LM_RUN_LOG_H

#include "input.h"

/** Bytes of the longest line that is read. */
#define FP8LM_LOG_LINE_LIMIT (UINT64_C(1) << 24)

/** Broken lines of which the message is kept, and events that are kept; more are only counted. */
#define FP8LM_LOG_KEPT_PROBLEMS 8
#define FP8LM_LOG_KEPT_EVENTS 1000

/** Tensors and settings of one log; a line that brings more is broken. */
#define FP8LM_LOG_MOST_NAMES 8192

/** Columns of a step that are drawn. */
enum {
  FP8LM_LOG_LOSS,
  FP8LM_LOG_LEARNING_RATE,
  FP8LM_LOG_GRADIENT_NORM,
  FP8LM_LOG_TOKENS_PER_SECOND,
  FP8LM_LOG_MFU,
  FP8LM_LOG_COLUMNS
};

typedef struct fp8lm_log_step {
  int64_t step;
  /** NaN: not in the log, or null there. */
  double values[FP8LM_LOG_COLUMNS];
  /** The optimizer left the weights as they were. */
  unsigned char skipped;
  /** The loss is there, but null: it was infinite or NaN. */
  unsigned char nonfinite;
  /** The trainer called the loss a spike. */
  unsigned char spike;
} fp8lm_log_step;

typedef struct fp8lm_log_evaluation {
  int64_t step;
  double loss;
} fp8lm_log_evaluation;

typedef struct fp8lm_log_event {
  /** -1: of no step. */
  int64_t step;
  char *kind;
  char *message;
} fp8lm_log_event;

typedef struct fp8lm_log_setting {
  char *key;
  char *value;
} fp8lm_log_setting;

/** What a tensor's scaling looked like after a step; NaN where the log doesn't say. */
typedef struct fp8lm_log_statistics {
  int64_t step;
  float scale;
  float amax;
  /** amax times scale, over the format's maximum: above 1, values saturated. */
  float fill;
  /** Shares of the tensor's elements, 0 to 1: at the format's maximum, and zero. */
  float saturated;
  float zeros;
} fp8lm_log_statistics;

typedef struct fp8lm_log_tensor {
  char *name;
  fp8lm_log_statistics *statistics;
  size_t count;
  size_t room;
} fp8lm_log_tensor;

/** Classes of memory, in the order in which they are stacked. */
enum {
  FP8LM_LOG_WEIGHTS,
  FP8LM_LOG_GRADIENTS,
  FP8LM_LOG_MASTER,
  FP8LM_LOG_MOMENTS,
  FP8LM_LOG_ACTIVATIONS,
  FP8LM_LOG_WORKSPACE,
  FP8LM_LOG_MEMORY_CLASSES
};

typedef struct fp8lm_log_problem {
  uint64_t line;
  char *message;
} fp8lm_log_problem;

/** Names in the order in which they came, found by hash. */
typedef struct fp8lm_log_names {
  uint32_t *slots;
  size_t slot_count;
} fp8lm_log_names;

/** Everything that a log says. Strings are UTF-8 without NUL. */
typedef struct fp8lm_run_log {
  /** Steps ascend strictly, here and below. */
  fp8lm_log_step *steps;
  size_t step_count;
  size_t step_room;
  fp8lm_log_evaluation *evaluations;
  size_t evaluation_count;
  size_t evaluation_room;
  fp8lm_log_tensor *tensors;
  size_t tensor_count;
  size_t tensor_room;
  fp8lm_log_setting *settings;
  size_t setting_count;
  size_t setting_room;
  fp8lm_log_event *events;
  size_t event_count;
  size_t event_room;
  /** Beyond those kept. */
  uint64_t further_events;
  int has_memory;
  /** NaN: not in the log. */
  double memory[FP8LM_LOG_MEMORY_CLASSES];
  double parameters;
  double peak_resident;
  /** The trainer says of each step whether it is a spike. */
  int tells_spikes;
  uint64_t lines;
  /** Lines that are no JSON object or hold a known field of another type. They have no effect. */
  uint64_t broken_lines;
  /** The first few of them, 1 the first line. */
  fp8lm_log_problem problems[FP8LM_LOG_KEPT_PROBLEMS];
  size_t problem_count;
  /** The last line has no end and is broken: the run is still writing it, or died there. Not counted as broken. */
  int cut_off;
  /** Private to the reader. */
  fp8lm_log_names tensor_names;
  fp8lm_log_names setting_names;
  int64_t newest_statistics;
} fp8lm_run_log;

/**
 * Reads a whole log, line by line. A broken line is noted and passed over.
 *
 * A step that is not greater than the one before is a run that went on from an older checkpoint: what was logged from
 * that step on is replaced, and an event "resumed" says so.
 * \return FP8CORE_ERROR_CORRUPT_DATA when the log holds neither a step nor an evaluation, or cannot be read;
 *         FP8CORE_ERROR_OUT_OF_MEMORY. \p log is then empty.
 */
fp8core_status fp8lm_run_log_read(const fp8lm_input *input, fp8lm_run_log *log);

/** Value of a setting by its key, or NULL. */
const char *fp8lm_run_log_setting(const fp8lm_run_log *log, const char *key);

/** Frees what fp8lm_run_log_read() made. A zeroed log is fine. */
void fp8lm_run_log_free(fp8lm_run_log *log);

#endif
