/** \file
 * What a run tells: log.jsonl, TensorBoard event files, and lines or a progress bar on standard output.
 * docs/fp8lm.md lists the fields.
 */
#ifndef FP8LM_TRAIN_LOG_H
#define FP8LM_TRAIN_LOG_H

#include <signal.h>
#include <stdint.h>
#include <stdio.h>

#include "event_file.h"
#include "trainer.h"

typedef struct fp8lm_train_log {
  const fp8lm_train_settings *settings;
  /** Standard output, which a signal is not held up by. */
  FILE *screen;
  /** NULL: none. */
  FILE *json;
  /** Of the first line that could not be written; 0: all could. */
  int json_error;
  fp8lm_event_file *events;
  /** Standard output is a terminal: a bar is drawn. */
  int bar;
  /** The bar is on the line of the cursor. */
  int bar_shown;
  double bar_time;
  /** Operations a second that the machine was seen to reach, so far; 0: not known. */
  double peak;
  double flops_per_token;
  /** Most resident bytes before the first step. */
  int64_t setup_peak;
  /** Since the last line. */
  double seconds;
  int64_t steps;
  double loss_sum;
  /** Since the start, without validation and checkpoints. */
  double all_seconds;
  int64_t all_steps;
  /** fp8lm_train_log_end() was called. */
  int ended;
} fp8lm_train_log;

/** Opens the files that the settings ask for, and appends. Once a signal has set \p stop, lines that nobody reads are
 * given up. The message names the file or folder. */
fp8core_status fp8lm_train_log_open(fp8lm_train_log *log, const fp8lm_train_settings *settings,
                                    const volatile sig_atomic_t *stop);

/** Closes them. \return FP8CORE_ERROR_INVALID_ARGUMENT if not everything could be written. */
fp8core_status fp8lm_train_log_close(fp8lm_train_log *log);

/** Options, shape and memory; first and only once. \p load may be NULL. */
fp8core_status fp8lm_train_log_start(fp8lm_train_log *log, fp8lm_trainer *trainer, const char *load,
                                     uint64_t train_tokens, uint64_t validation_tokens);

void fp8lm_train_log_step(fp8lm_train_log *log, const fp8lm_trainer *trainer, const fp8lm_step_result *result);
/** The spike that the run ends before, of the step after the trainer's last. */
void fp8lm_train_log_spike(fp8lm_train_log *log, const fp8lm_trainer *trainer, const fp8lm_step_result *result);
void fp8lm_train_log_validation(fp8lm_train_log *log, const fp8lm_trainer *trainer, double loss, int64_t sequences,
                                double seconds);
void fp8lm_train_log_checkpoint(fp8lm_train_log *log, const fp8lm_trainer *trainer, double seconds);

/** Before a step that fp8lm_train_log_fp8() is to record: its casts are counted. */
fp8core_status fp8lm_train_log_prepare_fp8(fp8lm_train_log *log, fp8lm_trainer *trainer);

/** Every scaled tensor: within a step, before its end. \p step counts it. */
fp8core_status fp8lm_train_log_fp8(fp8lm_train_log *log, fp8lm_trainer *trainer, int64_t step);

/** \p reason: "done", "exit-interval", "signal", "skipped", "spike" or "error" (in the data). */
void fp8lm_train_log_end(fp8lm_train_log *log, const fp8lm_trainer *trainer, const char *reason);

#endif
