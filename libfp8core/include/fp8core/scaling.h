/** \file
 * Per-tensor scales: the rule from amax to scale, and a state that keeps the scales of many tensors.
 *
 * Sources: FP8-LM (arXiv:2310.18313) section 2; "FP8 Formats for Deep Learning" (arXiv:2209.05433) section 3.1 for
 * just-in-time and delayed scaling; numerics.md, "Scales".
 */
#ifndef FP8CORE_SCALING_H
#define FP8CORE_SCALING_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "cast.h"
#include "context.h"
#include "dtype.h"
#include "status.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Scales and their reciprocals stay within [2^-126, 2^126], so that both are normal numbers, also where subnormals are
 * flushed. */
#define FP8CORE_SCALE_MAX 8.507059173023462e37f
#define FP8CORE_SCALE_MIN 1.1754943508222875e-38f

/**
 * The rule: maximum of \p dtype / amax / 2^margin, clamped to [FP8CORE_SCALE_MIN, FP8CORE_SCALE_MAX]; with
 * \p power_of_two lowered to a power of two. \p previous_scale when \p amax is 0, infinite, NaN or negative.
 * 1 for BF16 and FP32, whose range is that of the values. Thread-safe.
 *
 * \param margin powers of two of head-room, -64 to 64; clamped to that.
 * \param previous_scale the scale until now; 1 for a new tensor. One outside the limits (infinite, NaN, 0) counts as 1.
 */
FP8CORE_API float fp8core_scale_from_amax(fp8core_dtype dtype, float amax, int margin, int power_of_two,
                                          float previous_scale);

typedef enum fp8core_scaling_policy {
  /** The scale comes from the amax of the very tensor that is cast, in a pass before the cast. */
  FP8CORE_SCALING_JUST_IN_TIME = 0,
  /** The scale comes from the amaxes of earlier steps; a tensor without history is scaled just in time. */
  FP8CORE_SCALING_DELAYED = 1
} fp8core_scaling_policy;

/** What delayed scaling takes from the history. */
typedef enum fp8core_amax_choice { FP8CORE_AMAX_MAXIMUM = 0, FP8CORE_AMAX_MOST_RECENT = 1 } fp8core_amax_choice;

typedef struct fp8core_scaling_options {
  /** sizeof(fp8core_scaling_options) as the caller was compiled. */
  size_t size;
  fp8core_scaling_policy policy;
  /** Steps that delayed scaling remembers, 1 to 65536. */
  int history_length;
  fp8core_amax_choice amax_choice;
  /** As in fp8core_scale_from_amax(). */
  int margin;
  int power_of_two;
} fp8core_scaling_options;

/** Delayed scaling, history of 1024, maximum, margin 0, any scale. */
static inline fp8core_scaling_options fp8core_scaling_options_default(void) {
  fp8core_scaling_options options;
  options.size = sizeof(options);
  options.policy = FP8CORE_SCALING_DELAYED;
  options.history_length = 1024;
  options.amax_choice = FP8CORE_AMAX_MAXIMUM;
  options.margin = 0;
  options.power_of_two = 0;
  return options;
}

/** Scale, reciprocal, current amax, history and counts of a fixed number of tensors, in the memory of one device. */
typedef struct fp8core_scaling fp8core_scaling;

/**
 * Creates the state of \p tensors tensors (at least 1), all with scale 1 and no history.
 *
 * \param dtypes one format a tensor, read during the call.
 * \param options NULL for the defaults.
 * The context must outlive the state.
 */
FP8CORE_API fp8core_status fp8core_scaling_create(fp8core_scaling **scaling, fp8core_context *context, int64_t tensors,
                                                  const fp8core_dtype *dtypes, const fp8core_scaling_options *options);

/** Frees the state and clears the pointer. Tensors that were bound to it must not be used any more. */
FP8CORE_API void fp8core_scaling_destroy(fp8core_scaling **scaling);

/** Number of tensors. NULL gives 0. */
FP8CORE_API int64_t fp8core_scaling_tensors(const fp8core_scaling *scaling);

/**
 * Sets scale, scale_inverse and amax of \p tensor to the state's of tensor \p index. The pointers stay valid, and
 * follow every update and load, until the state is destroyed. \return FP8CORE_ERROR_INVALID_ARGUMENT when the tensor's
 * dtype or device is not the state's.
 */
FP8CORE_API fp8core_status fp8core_scaling_bind(fp8core_scaling *scaling, int64_t index, fp8core_tensor *tensor);

/**
 * Casts \p source into \p destination with the state's scale of tensor \p index, and binds \p destination to it.
 * Just-in-time: measures the amax, sets the scale, casts. Delayed: casts with the scale of earlier steps and records
 * the amax; the very first time as just-in-time. A just-in-time amax that is not finite leaves the scale and is
 * counted. On CUDA nothing waits for the host. Arguments as fp8core_cast(); \p destination's scale pointers are
 * written.
 *
 * \param scale_inverse one float on the state's device that receives the reciprocal of the scale that this cast used,
 * and that \p destination is then bound to: for data that is read after the next cast or update of the same index
 *        (micro-batches in flight, data kept over steps). NULL: the state's own, which those calls overwrite.
 */
FP8CORE_API fp8core_status fp8core_scaling_cast(fp8core_scaling *scaling, int64_t index,
                                                const fp8core_cast_options *options, const fp8core_tensor *source,
                                                fp8core_tensor *destination, float *scale_inverse);

/** The same with the transpose, as fp8core_cast_transpose(). \p destination may be NULL. */
FP8CORE_API fp8core_status fp8core_scaling_cast_transpose(fp8core_scaling *scaling, int64_t index,
                                                          const fp8core_cast_options *options,
                                                          const fp8core_tensor *source, fp8core_tensor *destination,
                                                          fp8core_tensor *transposed, float *scale_inverse);

/**
 * Ends a step: takes every tensor's amax into its history, sets the scales from it, and resets the amaxes to 0, in one
 * call (one kernel on CUDA). Data that was cast before with the state's own scale_inverse must not be read afterwards:
 * its scale is gone. An amax of 0 (tensor not used) leaves the tensor as it was. One that is infinite or NaN
 * keeps the scale, stays out of the history and is counted. Just-in-time: only counts and resets.
 */
FP8CORE_API fp8core_status fp8core_scaling_update(fp8core_scaling *scaling);

/** What fp8core_scaling_get() returns of one tensor. */
typedef struct fp8core_scaling_record {
  fp8core_dtype dtype;
  float scale;
  float scale_inverse;
  /** Of the step in progress. */
  float amax;
  /** Steps in the history, up to its length. */
  int64_t history_steps;
  /** Steps whose amax was infinite or NaN, since the state was created. */
  uint64_t nonfinite_steps;
} fp8core_scaling_record;

/** Copies the record of one tensor to the host. Waits for the device. */
FP8CORE_API fp8core_status fp8core_scaling_get(fp8core_scaling *scaling, int64_t index, fp8core_scaling_record *record);

/**
 * Sets one tensor's scale (finite, within the limits above) and its reciprocal, and forgets its history and amax: the
 * next delayed cast of it is just in time again.
 */
FP8CORE_API fp8core_status fp8core_scaling_set_scale(fp8core_scaling *scaling, int64_t index, float scale);

/** Bytes that fp8core_scaling_save() writes. NULL gives 0. */
FP8CORE_API size_t fp8core_scaling_saved_bytes(const fp8core_scaling *scaling);

/**
 * Writes the whole state to \p bytes bytes of host memory: little-endian, versioned, checksummed (CRC-32). Waits for
 * the device. \return FP8CORE_ERROR_INVALID_ARGUMENT when \p bytes is not fp8core_scaling_saved_bytes().
 */
FP8CORE_API fp8core_status fp8core_scaling_save(fp8core_scaling *scaling, void *buffer, size_t bytes);

/**
 * Restores what fp8core_scaling_save() wrote, on any device: scales, amaxes, histories and counts come back bit for
 * bit. \return FP8CORE_ERROR_CORRUPT_DATA for damaged or foreign bytes; FP8CORE_ERROR_INVALID_ARGUMENT when tensors,
 * dtypes or options differ from the state's. The state is untouched on any error.
 */
FP8CORE_API fp8core_status fp8core_scaling_load(fp8core_scaling *scaling, const void *buffer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
