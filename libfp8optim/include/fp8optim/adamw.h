/** \file
 * AdamW with a format of its own for each state: decoupled weight decay (Loshchilov and Hutter, "Decoupled weight
 * decay regularization", 2019, algorithm 2) and the precision-decoupled states of FP8-LM (Peng et al., 2023, section
 * 2.2 and table 6).
 *
 * The optimizer holds, for each tensor of parameters, a master weight, exp_avg (first moment) and exp_avg_sq (second
 * moment), each in its format with one FP32 scale a tensor where the format has few exponents. A step reads gradients
 * in any format and can write the weights that the model computes with, in FP8, BF16, FP16 or FP32, in the same pass.
 *
 * Statuses and messages are those of libfp8core (fp8core/status.h). An optimizer belongs to its context and is used by
 * one thread at a time, as the context is. On CUDA, calls queue work on the context's stream and do not wait for it
 * unless their description says so. The same inputs, seed and calls give the same bits on any number of threads, and on
 * every CPU tier. On CUDA they give the same bits again and again, and those of the CPU but for gradient_norm, which is
 * within a relative 2^-15 (its sum has an order of its own), and for what follows from it where gradients are clipped.
 *
 * A step without a report can be captured in a CUDA graph. The graph keeps the gradients' descriptions, the groups'
 * hyper-parameters and the options as they were when it was captured; counts, scales and states go on at each launch.
 */
#ifndef FP8OPTIM_ADAMW_H
#define FP8OPTIM_ADAMW_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/context.h"
#include "fp8core/tensor.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Formats of master weight / exp_avg / exp_avg_sq, as numbered in table 6 of FP8-LM. */
typedef enum fp8optim_preset {
  /** #0: FP32 / FP32 / FP32. With an FP32 gradient, 16 bytes a parameter. */
  FP8OPTIM_PRESET_FP32 = 0,
  /** #1: the same states, for models that compute in BF16. */
  FP8OPTIM_PRESET_BF16 = 1,
  /** #2a: FP16 / E4M3 / FP16. With an FP8 gradient, 6 bytes a parameter. */
  FP8OPTIM_PRESET_FP8 = 2,
  /** #2b: BF16 / E4M3 / FP16. */
  FP8OPTIM_PRESET_FP8_BF16_MASTER = 3,
  /** #3: E4M3 / E4M3 / FP16. For comparison: visibly worse. */
  FP8OPTIM_PRESET_FP8_MASTER = 4,
  /** #4: FP16 / E4M3 / E4M3. For comparison. */
  FP8OPTIM_PRESET_FP8_EXP_AVG_SQ = 5
} fp8optim_preset;

/** "fp32", "bf16", "fp8", "fp8-bf16-master", "fp8-master", "fp8-exp-avg-sq"; "unknown" outside the enum. Thread-safe.
 */
FP8OPTIM_API const char *fp8optim_preset_name(fp8optim_preset preset);

typedef struct fp8optim_adamw_options {
  /** sizeof(fp8optim_adamw_options) as the caller was compiled. */
  size_t size;
  fp8core_dtype master_dtype;
  fp8core_dtype exp_avg_dtype;
  fp8core_dtype exp_avg_sq_dtype;
  /**
   * Non-zero: master weights round stochastically (Philox-4x32-10, keyed by \p seed, the tensor's index, the step and
   * the element), so that updates below half a unit of their last place add up. Zero: to nearest, ties to even.
   */
  int stochastic_rounding;
  uint64_t seed;
} fp8optim_adamw_options;

/** The options of a preset, rounding to nearest, seed 0. A value outside the enum gives FP8OPTIM_PRESET_FP8's. */
static inline fp8optim_adamw_options fp8optim_adamw_options_of(fp8optim_preset preset) {
  fp8optim_adamw_options options;
  const int full = preset == FP8OPTIM_PRESET_FP32 || preset == FP8OPTIM_PRESET_BF16;
  options.size = sizeof(options);
  options.master_dtype = full                                        ? FP8CORE_FP32
                         : preset == FP8OPTIM_PRESET_FP8_BF16_MASTER ? FP8CORE_BF16
                         : preset == FP8OPTIM_PRESET_FP8_MASTER      ? FP8CORE_E4M3
                                                                     : FP8CORE_FP16;
  options.exp_avg_dtype = full ? FP8CORE_FP32 : FP8CORE_E4M3;
  options.exp_avg_sq_dtype = full                                       ? FP8CORE_FP32
                             : preset == FP8OPTIM_PRESET_FP8_EXP_AVG_SQ ? FP8CORE_E4M3
                                                                        : FP8CORE_FP16;
  options.stochastic_rounding = 0;
  options.seed = 0;
  return options;
}

/** FP8OPTIM_PRESET_FP8. */
static inline fp8optim_adamw_options fp8optim_adamw_options_default(void) {
  return fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP8);
}

/** Hyper-parameters that tensors share. */
typedef struct fp8optim_group {
  /** Finite, not negative. */
  double learning_rate;
  /** In [0, 1). */
  double beta1;
  double beta2;
  /** At least 1e-37, finite; added to the root of the bias-corrected second moment. */
  double eps;
  /** Finite, not negative; decoupled: a step multiplies the weight by 1 - learning_rate * weight_decay. */
  double weight_decay;
} fp8optim_group;

/** Learning rate 1e-3, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1 (betas and decay: FP8-LM, section 3.1). */
static inline fp8optim_group fp8optim_group_default(void) {
  fp8optim_group group;
  group.learning_rate = 1e-3;
  group.beta1 = 0.9;
  group.beta2 = 0.95;
  group.eps = 1e-8;
  group.weight_decay = 0.1;
  return group;
}

/** One tensor of parameters. */
typedef struct fp8optim_parameter {
  /** Names the tensor in messages and saved states; unique, 1 to 255 bytes, copied. */
  const char *name;
  int dimensions;
  int64_t shape[FP8CORE_MAX_DIMENSIONS];
  /** Index into the groups. */
  int group;
  /** Non-zero: a step writes the weights that the model computes with. */
  int with_weight;
  fp8core_dtype weight_dtype;
  /**
   * Contiguous device memory of the caller's for the weights and the states, in their formats, which must outlive the
   * optimizer; NULL: the optimizer allocates it. No two of all parameters may overlap. The contents of states given
   * here are taken as they are, with scale 1.
   */
  void *weight;
  void *master;
  void *exp_avg;
  void *exp_avg_sq;
} fp8optim_parameter;

/** A parameter of group 0 without weight output and with memory of the optimizer's own. */
static inline fp8optim_parameter fp8optim_parameter_create(const char *name, int64_t rows, int64_t columns) {
  fp8optim_parameter parameter;
  parameter.name = name;
  parameter.dimensions = 2;
  parameter.shape[0] = rows;
  parameter.shape[1] = columns;
  parameter.shape[2] = 0;
  parameter.shape[3] = 0;
  parameter.group = 0;
  parameter.with_weight = 0;
  parameter.weight_dtype = FP8CORE_E4M3;
  parameter.weight = NULL;
  parameter.master = NULL;
  parameter.exp_avg = NULL;
  parameter.exp_avg_sq = NULL;
  return parameter;
}

typedef struct fp8optim_adamw fp8optim_adamw;

/**
 * Creates an optimizer of \p parameter_count tensors in \p group_count groups; all arrays are read during the call.
 * States start at zero, masters too: see fp8optim_adamw_set_state(). All memory of later steps is allocated here.
 * Weights are written here only where the caller brought the master: until the master is set, a model's weights stay as
 * they are, so that they can be its source.
 *
 * \param adamw receives the handle, NULL on failure.
 * \param context must outlive the optimizer; its device holds the states.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for names that are missing, too long or not unique, shapes that are negative
 *         or overflow, a group index or hyper-parameter out of range, a dtype outside the enum, memory of the
 *         caller's that overlaps;
 *         FP8CORE_ERROR_OUT_OF_MEMORY; FP8CORE_ERROR_DEVICE.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_create(fp8optim_adamw **adamw, fp8core_context *context,
                                                  const fp8optim_adamw_options *options, int64_t parameter_count,
                                                  const fp8optim_parameter *parameters, int group_count,
                                                  const fp8optim_group *groups);

/** Waits for the context's work, frees the optimizer and clears the pointer. NULL and a cleared pointer are fine. */
FP8OPTIM_API void fp8optim_adamw_destroy(fp8optim_adamw **adamw);

/** The parts of a tensor of parameters. */
typedef enum fp8optim_state {
  FP8OPTIM_MASTER = 0,
  FP8OPTIM_EXP_AVG = 1,
  FP8OPTIM_EXP_AVG_SQ = 2,
  /** What the model computes with: the master weight, cast. */
  FP8OPTIM_WEIGHT = 3
} fp8optim_state;

/** "master", "exp_avg", "exp_avg_sq", "weight"; "unknown" outside the enum. Thread-safe. */
FP8OPTIM_API const char *fp8optim_state_name(fp8optim_state state);

/**
 * Describes one state in place: data, dtype, shape, scale and scale_inverse on the context's device, amax NULL. The
 * description stays valid, and its scale pointers follow every step, until the optimizer is destroyed.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for an index or state out of range, or the weight of a tensor without one.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_state(const fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                                 fp8core_tensor *tensor);

/**
 * Sets one state from \p source, in any format, of the same number of elements, on the context's device: chooses the
 * scale from the source's amax and casts to nearest. Setting the master writes the weight too. A positive exp_avg_sq
 * stays positive. Nothing is written when the source holds an infinity, a NaN, or (exp_avg_sq) a negative value. Waits
 * for the device.
 *
 * \param state not FP8OPTIM_WEIGHT.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_set_state(fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                                     const fp8core_tensor *source);

/**
 * What fp8optim_adamw_state() does not tell of a part: the scale in host memory, and the amax from which the next step
 * chooses scales (0 for weights). With the data that fp8optim_adamw_state() describes and fp8optim_adamw_steps(), all
 * that a file of the caller's own format needs for a bit-exact resume. Waits for the device.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for an index or state out of range, the weight of a tensor without one, NULL.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_get_stored(const fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                                      float *scale, float *amax);

/**
 * Sets one part to what it was: the counterpart of fp8optim_adamw_get_stored(). Unlike fp8optim_adamw_set_state() it
 * neither casts nor chooses, and setting the master leaves the weight alone. Call fp8optim_adamw_set_steps() too. Waits
 * for the device.
 *
 * \param data as many elements as the parameter has, contiguous, in the part's dtype, in host or the context's device
 *        memory; not looked at.
 * \param scale in [2^-126, 2^126].
 * \param amax finite, at least 0; not used for weights.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT also for a scale or amax out of range; nothing is changed then.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_set_stored(fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                                      const void *data, float scale, float amax);

/** Number of steps that were taken; skipped ones are not counted. Waits for the device. NULL gives 0. */
FP8OPTIM_API int64_t fp8optim_adamw_steps(const fp8optim_adamw *adamw);

/**
 * Sets the number of steps that were taken, on which the bias correction depends: for moments that come from another
 * optimizer. Moments other than 0 with a count of 0 make the next step fail.
 *
 * \param steps 0 to 2^31 - 2.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_set_steps(fp8optim_adamw *adamw, int64_t steps);

/** Replaces the hyper-parameters of a group from the next step on. FP8CORE_ERROR_INVALID_ARGUMENT out of range. */
FP8OPTIM_API fp8core_status fp8optim_adamw_set_group(fp8optim_adamw *adamw, int group, const fp8optim_group *values);

/** Copies the hyper-parameters of a group. */
FP8OPTIM_API fp8core_status fp8optim_adamw_get_group(const fp8optim_adamw *adamw, int group, fp8optim_group *values);

/** Sets the learning rate of every group from the next step on. */
FP8OPTIM_API fp8core_status fp8optim_adamw_set_learning_rate(fp8optim_adamw *adamw, double learning_rate);

typedef struct fp8optim_step_options {
  /** sizeof(fp8optim_step_options) as the caller was compiled. */
  size_t size;
  /** Gradients are scaled down so that their global norm is at most this; 0: no clipping. Finite, not negative. */
  float max_norm;
  /** What the loss was multiplied by; gradients are divided by it. Positive, finite. */
  float loss_scale;
} fp8optim_step_options;

/** No clipping, loss scale 1. */
static inline fp8optim_step_options fp8optim_step_options_default(void) {
  fp8optim_step_options options;
  options.size = sizeof(options);
  options.max_norm = 0.0f;
  options.loss_scale = 1.0f;
  return options;
}

/** What a step found. */
typedef struct fp8optim_step_report {
  /**
   * Non-zero: the gradients held an infinity or a NaN, or their norm exceeds 2^63 after clipping or 2^126 before, so
   * that a second moment could leave the range of FP32; nothing was changed.
   */
  int skipped;
  /** Root of the sum of all squared gradients, after division by the loss scale and before clipping. */
  float gradient_norm;
  /** What the gradients were multiplied by to clip them: 1 without clipping. */
  float clip_factor;
  /** Steps taken and skipped since the optimizer was created or its state loaded, this one included. */
  int64_t steps;
  int64_t skipped_steps;
} fp8optim_step_report;

/**
 * One step of AdamW over all tensors. Two passes: one over the gradients, for their norm, amax and non-finite values,
 * then one over gradients and states. With g the gradient after clipping and t the steps taken, this one included:
 *
 *     exp_avg    = exp_avg + (1 - beta1) * (g - exp_avg)
 *     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
 *     master     = master * (1 - learning_rate * weight_decay)
 *                  - learning_rate / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
 *
 * in FP32 from the stored values; each result is then cast to its format. Scales are chosen before the pass, from
 * bounds on the new amaxes (FP8-LM section 2.2 rescales after it), so that nothing is read twice and nothing overflows,
 * but masters for a beta2 far below beta1 squared, which saturate. Outside FP32 a positive exp_avg_sq never rounds to
 * zero, as long as g^2 with its scale does not underflow FP32.
 *
 * Gradients with an infinity or a NaN anywhere, or too large (see fp8optim_step_report), skip the step whole: no state,
 * scale, amax or count changes but the number of skipped steps. With a learning rate of 0 masters and weights keep
 * their bits.
 *
 * \param gradients one tensor for each parameter in order, any format, contiguous or with a row stride, with
 *        scale_inverse as elsewhere; same shape as the parameter; apart from states and weights. amax is not used.
 * \param options NULL for the defaults.
 * \param report NULL, or receives the findings in host memory, which on CUDA waits for the device.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when a gradient's shape, dtype or device does not fit or its memory overlaps
 *         the optimizer's states or its parameter's parts, when moments are not 0 but the step count is, after 2^31 - 2
 * steps, or options are out of range. Nothing is changed on any error.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_step(fp8optim_adamw *adamw, const fp8core_tensor *gradients,
                                                const fp8optim_step_options *options, fp8optim_step_report *report);

/**
 * A step in parts, for optimizers whose tensors are divided over ranks: the norm is that of all ranks' gradients, and
 * tensors that are updated first can travel first. In this order:
 *
 *     fp8optim_adamw_step_measure(adamw, gradients, squares, &nonfinite);   the first pass, over gradients
 *     fp8optim_adamw_step_begin(adamw, sum, any_nonfinite, options, &report);
 *     fp8optim_adamw_step_update(adamw, first, count);                      the second pass, until all had their turn
 *     fp8optim_adamw_step_end(adamw, &report);
 *
 * With the sum of its own squares, added in the order of tensors, it is fp8optim_adamw_step(), bit for bit, which on
 * the CPU is made of these calls. Ranks that add the same numbers in the same order have the same norm and decide
 * alike.
 *
 * Measuring changes nothing: it may be done again, or be followed by another call. From begin to end the optimizer can
 * only be updated, ended, asked and destroyed; all else is FP8CORE_ERROR_INVALID_ARGUMENT, as is a call out of order.
 */

/**
 * Measures the gradients, whose data and scales must stay until the step ends. Waits for the device.
 *
 * \param gradients as in fp8optim_adamw_step().
 * \param squares NULL, or receives, in host memory, the sum of the squares of each tensor's gradient as it came: not
 *        divided by a loss scale. Of no use for a tensor with an infinity or a NaN.
 * \param nonfinite receives whether a gradient held an infinity or a NaN.
 * \return as fp8optim_adamw_step().
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_step_measure(fp8optim_adamw *adamw, const fp8core_tensor *gradients,
                                                        double *squares, int *nonfinite);

/**
 * Begins the step that was measured: decides whether it is skipped, and by what gradients are clipped.
 *
 * \param sum_of_squares of all gradients of all ranks, at least 0; with \p nonfinite it may be a NaN.
 * \param nonfinite whether any gradient of any rank held an infinity or a NaN.
 * \param options NULL for the defaults.
 * \param report NULL, or receives the findings, as fp8optim_adamw_step_end() gives them.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_step_begin(fp8optim_adamw *adamw, double sum_of_squares, int nonfinite,
                                                      const fp8optim_step_options *options,
                                                      fp8optim_step_report *report);

/**
 * Updates tensors \p first to \p first + \p count - 1, in any order of calls, each tensor once; their states, scales
 * and weights are then those after the step. A step that is skipped changes nothing.
 *
 * \param count at least 0.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_step_update(fp8optim_adamw *adamw, int64_t first, int64_t count);

/**
 * Ends the step.
 *
 * \param report NULL, or receives the findings.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT where a tensor has not been updated, unless the step is skipped; the step then
 *         goes on.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_step_end(fp8optim_adamw *adamw, fp8optim_step_report *report);

/**
 * Sets which stream of random numbers a tensor draws from where masters round stochastically: its index unless set.
 * With the index that it has among all tensors of a model, a tensor rounds alike on whatever rank it is. No part of
 * saved states.
 *
 * \param stream 0 to 2^32 - 1.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_set_stream(fp8optim_adamw *adamw, int64_t index, int64_t stream);

/** Bytes by class, as allocated or described. */
typedef struct fp8optim_memory {
  int64_t parameters;
  int64_t weight_bytes;
  int64_t master_bytes;
  int64_t exp_avg_bytes;
  int64_t exp_avg_sq_bytes;
  /** Scales, amaxes, tables of tensors and chunks, partial results. */
  int64_t overhead_bytes;
} fp8optim_memory;

/** Exact bytes of the optimizer's data on its device, memory of the caller's included in its class. */
FP8OPTIM_API fp8core_status fp8optim_adamw_memory(const fp8optim_adamw *adamw, fp8optim_memory *memory);

/** Bytes that fp8optim_adamw_save() writes. NULL gives 0. */
FP8OPTIM_API size_t fp8optim_adamw_saved_bytes(const fp8optim_adamw *adamw);

/**
 * Writes the whole state (names, formats, scales, amaxes, counts, masters and moments; not groups, not weights) to
 * \p bytes bytes of host memory: little-endian, versioned, checksummed (CRC-32). Waits for the device.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p bytes is not fp8optim_adamw_saved_bytes().
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_save(const fp8optim_adamw *adamw, void *buffer, size_t bytes);

/**
 * Restores what fp8optim_adamw_save() wrote, on any device, and writes the weights from the masters, whatever their
 * formats were: the next step gives the same bits as without the interruption. Tensors are matched in order: each must
 * have the name and shape of the parameter at its place.
 *
 * \return FP8CORE_ERROR_CORRUPT_DATA for damaged or foreign bytes or another version; FP8CORE_ERROR_INVALID_ARGUMENT
 *         when names, shapes, formats, rounding or seed differ from the optimizer's. The optimizer is untouched on any
 *         error.
 */
FP8OPTIM_API fp8core_status fp8optim_adamw_load(fp8optim_adamw *adamw, const void *buffer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
