/** \file
 * What is trained: a model, its optimizer and the state of the run, and how they come from and go to checkpoints.
 */
#ifndef FP8LM_TRAINER_H
#define FP8LM_TRAINER_H

#include <stddef.h>
#include <stdint.h>

#include "checkpoint.h"
#include "fp8core/context.h"
#include "fp8gpt/model.h"
#include "fp8optim/adamw.h"
#include "fp8zero/sharded.h"
#include "loader.h"
#include "ranks.h"
#include "train_settings.h"

/** Steps whose losses are remembered to tell a spike. */
#define FP8LM_TRAINER_LOSSES 128

typedef struct fp8lm_trainer {
  /** The caller's, and outlives the trainer. */
  const fp8lm_train_settings *settings;
  const fp8lm_ranks *ranks;
  /** On several GPUs the ranks'. */
  fp8core_context *context;
  fp8gpt_model *model;
  /** Of several ranks; NULL with one. */
  fp8zero_sharded *sharded;
  /** With several ranks that of the sharded optimizer, of the parameters that this rank owns. */
  fp8optim_adamw *adamw;
  fp8optim_schedule schedule;
  int64_t parameter_count;
  fp8core_tensor *gradients;
  /** Of the casts of a step that is recorded, an entry a scaled tensor, in device memory; NULL: none was. */
  void *cast_statistics;
  /** Of this rank's part of a step, and how many were passed on. */
  int64_t micro_batches;
  int64_t micro_batches_done;
  /** Of a step: [sequences of this rank, sequence] tokens and targets. */
  int32_t *tokens;
  int32_t *targets;
  int64_t step;
  int64_t skipped_steps;
  int64_t skipped_in_a_row;
  /** The finite losses of the last steps, the latest last; but of spikes that were skipped. */
  float losses[FP8LM_TRAINER_LOSSES];
  int loss_count;
  /** The scaling state before a step that a spike may stop, as fp8core_scaling_save() writes it; NULL: no need of it.
   */
  void *scaling_before;
  void *reducer_before;
  /** Of several ranks on GPUs: a copy of the scaling state's amaxes, which the ranks exchange; NULL: they need none. */
  float *amaxes;
  /** The tokenizer's files, which go into every checkpoint; NULL: bytes. */
  char *vocab;
  size_t vocab_bytes;
  char *merges;
  size_t merges_bytes;
} fp8lm_trainer;

/** What one step did. */
typedef struct fp8lm_step_result {
  double learning_rate;
  /** Mean of the micro-batches. */
  double loss;
  float gradient_norm;
  float clip_factor;
  int skipped;
  /** The loss is that of a spike; mean and deviation of the steps before. With --spike-action skip it is skipped, too,
   * and its gradients were not looked at: their norm is NaN. */
  int spike;
  /** It is, and --spike-action is stop: the step was not taken, and the state is that before it. */
  int stopped;
  double mean;
  double deviation;
  /** The batch was read: before that, an error leaves the state as the step before left it. */
  int begun;
  double data_seconds;
  double model_seconds;
  double optimizer_seconds;
} fp8lm_step_result;

/** Called between the passes of a step and its end, when amaxes and gradients are there. */
typedef fp8core_status (*fp8lm_step_observer)(fp8lm_trainer *trainer, void *user_data);

/** Makes model and optimizer with initial weights. A zeroed trainer may be destroyed. All calls that may fail, but
 * fp8lm_trainer_read_tokenizer(), are collective over the ranks. Several ranks on GPUs are given theirs here, and
 * outlive the trainer. */
fp8core_status fp8lm_trainer_create(fp8lm_trainer *trainer, const fp8lm_train_settings *settings, fp8lm_ranks *ranks);
void fp8lm_trainer_destroy(fp8lm_trainer *trainer);

/** The ZeRO stage; 0 with one rank. */
int fp8lm_trainer_stage(const fp8lm_trainer *trainer);

/** The parameter's index in the trainer's optimizer; -1 where another rank has it. */
int64_t fp8lm_trainer_local(const fp8lm_trainer *trainer, int64_t index);

/** Reads the tokenizer's files, of settings or, where those name none, of the checkpoint \p load (NULL: none). */
fp8core_status fp8lm_trainer_read_tokenizer(fp8lm_trainer *trainer, const char *load);

/** Takes one step with the loader's next batch. \p observer may be NULL. */
fp8core_status fp8lm_trainer_step(fp8lm_trainer *trainer, const fp8lm_loader *loader, fp8lm_step_observer observer,
                                  void *user_data, fp8lm_step_result *result);

/**
 * Mean loss of validation sequences, the same ones every time. \p stop, if not NULL, ends it early when it becomes
 * non-zero on any rank. *sequences is how many were seen; 0 where there are none, and where it was ended. *unread tells
 * of a failure whether it is that data could not be read, which all ranks then know.
 */
fp8core_status fp8lm_trainer_validate(fp8lm_trainer *trainer, const fp8lm_loader *loader, const volatile int *stop,
                                      double *loss, int64_t *sequences, int *unread);

/** Writes a checkpoint of the state after the last step to \p folder, and removes old ones. */
fp8core_status fp8lm_trainer_save(fp8lm_trainer *trainer, const char *folder, int64_t keep);

/**
 * Whether the weights of the checkpoint \p path, by their names, shapes and number, are those of a model of \p config.
 * Only the header of the file is read: before a model is made, as its size is known to be that of the file then.
 */
fp8core_status fp8lm_check_weights(const fp8gpt_config *config, const char *path);

/** Continues the checkpoint \p path, whose settings are the trainer's. After an error the trainer must not be used. */
fp8core_status fp8lm_trainer_load(fp8lm_trainer *trainer, const char *path);

/** Fills \p model, which may be one for inference, with the weights of a checkpoint. Their scales are kept in \p
 * scales, two floats a parameter in the memory of the model's device, which must outlive the use of the model. */
fp8core_status fp8lm_load_weights(fp8core_context *context, fp8gpt_model *model, const char *path, float *scales);

#endif
