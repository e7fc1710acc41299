/** \file
 * Per-tensor scales: the rule from amax to scale, and a state that keeps the scales of many tensors.
 *
 * Sources: FP8-LM (arXiv:2310.18313), appendix on FP8 tensor scaling, for just-in-time and delayed scaling; the recipe
 * DelayedScaling of NVIDIA's Transformer Engine for history, maximum or most recent, and margin. What they leave open
 * is told in numerics.md, "Scales".
 *
 * Scales are factors without a unit: stored = round(value * scale). All arrays of a state are in the memory of its
 * context's device, one entry a tensor.
 *
 * Threads: a state is used through its context and shares that context's limit: one thread at a time for all calls on a
 * context and on the states made with it. Calls marked "thread-safe" are free of this. Order on CUDA: context.h; no
 * call waits for the device unless it says so.
 *
 * Errors common to all calls with a state: FP8CORE_ERROR_INVALID_ARGUMENT when the state or a pointer that must be
 * given is NULL, or the index is not from 0 to the number of tensors less 1; FP8CORE_ERROR_DEVICE when CUDA reports a
 * failure, which may be one of earlier work (never on the CPU).
 */
#ifndef FP8CORE_SCALING_H
#define FP8CORE_SCALING_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "cast.h"
#include "context.h"
#include "dtype.h"
#include "gemm.h"
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
 * \p power_of_two lowered to a power of two. Pure function, cannot fail. Thread-safe.
 *
 * \param dtype of the destination. BF16 and FP32 give 1, as their range is that of the values; FP16 has a scale as FP8
 *        does. One outside the enum gives \p previous_scale.
 * \param amax largest magnitude of the values. 0, infinite, NaN or negative gives \p previous_scale.
 * \param margin powers of two of head-room, -64 to 64; clamped to that.
 * \param power_of_two non-zero: the largest power of two that is not above the quotient.
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
  /** sizeof(fp8core_scaling_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
  size_t size;
  fp8core_scaling_policy policy;
  /** Steps that delayed scaling remembers, 1 to 65536; within that also just in time, which remembers none. */
  int history_length;
  fp8core_amax_choice amax_choice;
  /** As in fp8core_scale_from_amax(), but refused outside -64 to 64. */
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
 * Creates a state, every tensor with scale 1, amax 0 and no history. It takes 33 bytes a tensor of device memory and,
 * with delayed scaling, 4 * history_length more. Blocking. The context must outlive the state.
 *
 * \param scaling receives the handle, NULL on failure.
 * \param tensors their number, at least 1.
 * \param dtypes one format a tensor, \p tensors of them in host memory, read during the call.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p scaling, \p context or \p dtypes is NULL, a dtype or an option is out
 *         of range, or there are fewer than 1 or so many tensors that their bytes exceed 2^63;
 *         FP8CORE_ERROR_VERSION_MISMATCH for options of a wrong size; FP8CORE_ERROR_OUT_OF_MEMORY when host or device
 *         memory is short; FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_scaling_create(fp8core_scaling **scaling, fp8core_context *context, int64_t tensors,
                                                  const fp8core_dtype *dtypes, const fp8core_scaling_options *options);

/** Frees the state and clears the pointer; on CUDA waits for the context's work. NULL and a cleared pointer are fine.
 * Tensors that were bound to it must not be used any more. Failures go unreported. */
FP8CORE_API void fp8core_scaling_destroy(fp8core_scaling **scaling);

/** Number of tensors. NULL gives 0. Thread-safe. */
FP8CORE_API int64_t fp8core_scaling_tensors(const fp8core_scaling *scaling);

/**
 * Sets the pointers scale, scale_inverse and amax of \p tensor to the state's of tensor \p index. They stay valid, and
 * follow every update and load, until the state is destroyed. Binding measures nothing, nor do fp8core_gemm() and
 * fp8core_cast() when they write a bound tensor: the scale stays as it is, 1 at the start, under which an FP8 tensor of
 * small values is all zeros. With delayed scaling the next update sets it; with just-in-time scaling only
 * fp8core_scaling_set_scale(), and the casts and products of this header, which are the calls to store FP8 by.
 * Thread-safe: nothing of the state is changed, nothing but the pointers is written.
 *
 * \param tensor any shape; its data is not looked at and may be NULL.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when a pointer is NULL, the index is out of range, the tensor's dtype is not
 *         the one that the state was created with for this index, its device is not the state's, or its granularity is
 *         not per tensor.
 */
FP8CORE_API fp8core_status fp8core_scaling_bind(fp8core_scaling *scaling, int64_t index, fp8core_tensor *tensor);

/**
 * Casts \p source into \p destination with the state's scale of tensor \p index, and binds \p destination to it.
 * Just-in-time: measures the amax, sets the scale from it, casts. Delayed: casts with the scale of earlier steps; while
 * the tensor has no history, as just-in-time. Both raise the state's amax. A just-in-time amax that is 0 or not finite
 * leaves the scale; one that is not finite is counted by the next update. A source that is read with the scale_inverse
 * that this call changes is still read with the old one.
 *
 * Writes the destination's data, its three scale pointers, the state's amax, the statistics and, just in time, the
 * state's scale and reciprocal. No elements: the state stays as it is; the pointers and \p scale_inverse are written.
 *
 * \param options as in fp8core_cast().
 * \param source as in fp8core_cast(): any dtype, 0 to 4 dimensions, any row stride.
 * \param destination of the source's shape and the state's dtype; the pointers that it comes with are not used.
 * \param scale_inverse one float on the state's device, at a multiple of 4 bytes, that receives the reciprocal of the
 *        scale that this cast used, and that \p destination is then bound to: for data that is read after the next cast
 *        or update of the same index (micro-batches in flight, data kept over steps). NULL: the state's own, which
 *        those calls overwrite.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT also for what fp8core_scaling_bind() and fp8core_cast() refuse, and when
 *         \p scale_inverse is not aligned; FP8CORE_ERROR_VERSION_MISMATCH for options of a wrong size;
 *         FP8CORE_ERROR_DEVICE. Where an argument is refused, neither tensors nor state have changed.
 */
FP8CORE_API fp8core_status fp8core_scaling_cast(fp8core_scaling *scaling, int64_t index,
                                                const fp8core_cast_options *options, const fp8core_tensor *source,
                                                fp8core_tensor *destination, float *scale_inverse);

/**
 * fp8core_scaling_cast() with the outputs of fp8core_cast_transpose(): both get the same codes and are bound to the
 * same scale, reciprocal and amax.
 *
 * \param source [rows, columns], any dtype and row stride.
 * \param destination [rows, columns] of the state's dtype; NULL: only the transpose is written.
 * \param transposed [columns, rows] of the state's dtype.
 * \param scale_inverse as in fp8core_scaling_cast(); both outputs are bound to it.
 * \return as fp8core_scaling_cast(), and FP8CORE_ERROR_INVALID_ARGUMENT for what fp8core_cast_transpose() refuses.
 */
FP8CORE_API fp8core_status fp8core_scaling_cast_transpose(fp8core_scaling *scaling, int64_t index,
                                                          const fp8core_cast_options *options,
                                                          const fp8core_tensor *source, fp8core_tensor *destination,
                                                          fp8core_tensor *transposed, float *scale_inverse);

/**
 * The product of fp8core_gemm(), stored in \p d under the state's scale of tensor \p index, to which \p d is bound.
 * Just-in-time, and delayed while the tensor has no history: the product is formed in FP32 in memory that the state
 * keeps (4 bytes an element of D; it grows with the first calls), measured, and cast: what fp8core_gemm() into FP32 and
 * fp8core_scaling_cast() give. Delayed with a history: D is written at once with the scale of earlier steps, on the CPU
 * with the same bits. Both raise the state's amax. A just-in-time amax that is 0 or not finite leaves the scale; one
 * that is not finite is counted by the next update.
 *
 * Non-blocking on CUDA once the memory has grown. So the host does not learn of a history there, but takes it for
 * granted after the first update that follows a use of the index: where that step's amax was 0 or not finite, the next
 * step still has the scale of before.
 *
 * Writes D's data, its three scale pointers, the state's amax, and what the epilogue writes; just in time also the
 * state's scale and reciprocal. No elements: the state stays as it is.
 *
 * \param options, a, b, c as in fp8core_gemm(). C may be bound to the same index, also where it is D's memory: it is
 *        read before the scale changes.
 * \param d as in fp8core_gemm(), of the state's dtype; the pointers that it comes with are not used.
 * \param scale_inverse as in fp8core_scaling_cast().
 * \return what fp8core_gemm() and fp8core_scaling_bind() return; FP8CORE_ERROR_INVALID_ARGUMENT also when
 *         \p scale_inverse is not aligned; FP8CORE_ERROR_OUT_OF_MEMORY also when the FP32 product has no room. Where an
 *         argument is refused, neither D nor the state has changed.
 */
FP8CORE_API fp8core_status fp8core_scaling_gemm(fp8core_scaling *scaling, int64_t index,
                                                const fp8core_gemm_options *options, const fp8core_tensor *a,
                                                const fp8core_tensor *b, const fp8core_tensor *c, fp8core_tensor *d,
                                                float *scale_inverse);

/**
 * Makes room for fp8core_scaling_gemm() with these arguments, in the state and in the context's workspace, so that the
 * call itself allocates nothing, now or once there is a history. Nothing is computed, and nothing else of the state
 * changes; data is not looked at.
 *
 * \return as fp8core_scaling_gemm().
 */
FP8CORE_API fp8core_status fp8core_scaling_gemm_reserve(fp8core_scaling *scaling, int64_t index,
                                                        const fp8core_gemm_options *options, const fp8core_tensor *a,
                                                        const fp8core_tensor *b, const fp8core_tensor *c,
                                                        const fp8core_tensor *d);

/**
 * Ends a step: takes every tensor's amax into its history, sets the scales from it, and resets the amaxes to 0, in one
 * call (one kernel on CUDA). Data that was cast before with the state's own scale_inverse must not be read afterwards:
 * its scale is gone. An amax of 0 (tensor not used) or below leaves the tensor as it was. One that is infinite or NaN
 * keeps the scale, stays out of the history and is counted. Just-in-time: only counts and resets.
 *
 * Writes scales, reciprocals, amaxes, histories and counts of the state; touches no tensor's data.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p scaling is NULL; FP8CORE_ERROR_DEVICE when CUDA cannot launch the
 *         kernel.
 */
FP8CORE_API fp8core_status fp8core_scaling_update(fp8core_scaling *scaling);

/**
 * The amaxes of the step in progress, one a tensor, in the memory of the state's device. For data-parallel ranks: the
 * maximum over all of them, taken here before fp8core_scaling_update(), gives every rank the same scales. Belongs to
 * the state and stays valid until that is destroyed. NULL gives NULL. Thread-safe.
 */
FP8CORE_API float *fp8core_scaling_amaxes(fp8core_scaling *scaling);

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

/**
 * Copies the record of one tensor to the host. Waits for the device.
 *
 * \param record in host memory; written on success only.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p scaling or \p record is NULL or the index out of range;
 *         FP8CORE_ERROR_DEVICE when a copy fails, or the stream is being captured.
 */
FP8CORE_API fp8core_status fp8core_scaling_get(fp8core_scaling *scaling, int64_t index, fp8core_scaling_record *record);

/**
 * Sets one tensor's scale and its reciprocal, and forgets its history and amax. The next fp8core_scaling_cast() of it
 * is just in time and sets the scale anew, unless its amax is 0 or not finite; so the scale holds for what is bound
 * with fp8core_scaling_bind(), until an update. The count of nonfinite steps stays. Waits for the device.
 *
 * \param scale from FP8CORE_SCALE_MIN to FP8CORE_SCALE_MAX; a power of two is not asked for.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p scaling is NULL, the index is out of range, or the scale is outside
 *         the limits or NaN; FP8CORE_ERROR_DEVICE when a copy fails, or the stream is being captured: parts may be set
 *         then.
 */
FP8CORE_API fp8core_status fp8core_scaling_set_scale(fp8core_scaling *scaling, int64_t index, float scale);

/** Bytes of device memory that the state holds now: what it was created with, and what fp8core_scaling_gemm() needed to
 * measure products. NULL gives 0. Not at once with a call that may grow it. */
FP8CORE_API size_t fp8core_scaling_memory_bytes(const fp8core_scaling *scaling);

/** Bytes that fp8core_scaling_save() writes, fixed when the state is created. NULL gives 0. Thread-safe. */
FP8CORE_API size_t fp8core_scaling_saved_bytes(const fp8core_scaling *scaling);

/**
 * Writes the whole state: little-endian, versioned, checksummed (CRC-32 of ISO 3309); numerics.md, "Saved form". Waits
 * for the device.
 *
 * \param buffer \p bytes bytes of host memory, any alignment.
 * \param bytes exactly fp8core_scaling_saved_bytes().
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when a pointer is NULL or \p bytes another number; FP8CORE_ERROR_OUT_OF_MEMORY
 *         when there is no host memory for a copy of the state; FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_scaling_save(fp8core_scaling *scaling, void *buffer, size_t bytes);

/**
 * Restores what fp8core_scaling_save() wrote, on any device: scales, amaxes, histories and counts come back bit for
 * bit (negative amaxes, which count as 0, as 0). Bound tensors stay bound. Waits for the device.
 *
 * \param buffer \p bytes bytes of host memory, any alignment. Need not be trusted: every field is checked.
 * \return FP8CORE_ERROR_CORRUPT_DATA for bytes that are truncated, damaged, foreign, of another version, or hold a
 *         field that no state can have; FP8CORE_ERROR_INVALID_ARGUMENT when a pointer is NULL, or number of tensors,
 *         dtypes or options differ from the state's; FP8CORE_ERROR_OUT_OF_MEMORY when there is no host memory for a
 *         copy of the state; FP8CORE_ERROR_DEVICE. The state is untouched on any error but the last.
 */
FP8CORE_API fp8core_status fp8core_scaling_load(fp8core_scaling *scaling, const void *buffer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
