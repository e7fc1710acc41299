/** \file
 * The optimizer step of a data-parallel group whose tensors have owners: ZeRO with whole tensors (FP8-LM, Peng et al.,
 * 2023, section 2.3; stages as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
 * Models", 2020).
 *
 * Every rank computes gradients of all parameters from data of its own. Each parameter has an owner
 * (fp8zero_partition()), which keeps its master weight and moments, gets the mean of its gradient, and updates it; then
 * the weights that the model computes with, with their scales, go to all ranks. By stage, a rank keeps
 *
 *     stage  master, moments  mean gradients  gradients of the model     weights of the model
 *     0      all              all             all                        all
 *     1      its own          its own         all                        all
 *     2      its own          its own         those of a few parts       all
 *     3      its own          its own         those of a few parts       its own, and those of a few parts
 *
 * Parts are what is exchanged at once, such as the blocks of a Transformer: numbered in the order in which the forward
 * pass needs them. A step of a trainer, with the calls that a stage does not need being cheap:
 *
 *     for each part, up:    acquire(part, FORWARD), compute with the weights, release(part, FORWARD)
 *     for each part, down:  acquire(part, BACKWARD), compute, write the gradients, reduce(part, gradients),
 *                           release(part, BACKWARD)
 *     step()
 *
 * Gathers and reductions overlap with what is computed, as far as the thread calls this library meanwhile: they go on
 * within acquire, reduce and progress.
 *
 * What is collective is called by all ranks of the communicator, in the same order with the same arguments but for the
 * gradients' values. Threads: one at a time, as communicator and context are. Failures and messages:
 * fp8comm/communicator.h; after a failure of the communicator only fp8zero_sharded_destroy() is of use.
 * docs/numerics.md, "Sharded optimizer", has the rules, and what has the same bits as what.
 *
 * Weights, gradients, states and their scales lie in the memory of the context's device. On CUDA the communicator must
 * have been given this context (fp8comm/device.h); ranks may share a GPU. Calls queue work on the context's stream:
 * gathers and reductions follow what it was given before them, and what it is given after acquire,
 * fp8zero_sharded_wait() or a step sees their results. The host waits for the device where it waits for other ranks,
 * and within fp8zero_sharded_step() and set_master(). Nothing of it can be captured in a CUDA graph.
 */
#ifndef FP8ZERO_SHARDED_H
#define FP8ZERO_SHARDED_H

#include <stddef.h>
#include <stdint.h>

#include "fp8comm/communicator.h"
#include "fp8comm/gradient.h"
#include "fp8core/context.h"
#include "fp8core/tensor.h"
#include "fp8optim/adamw.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fp8zero_sharded_options {
  /** sizeof(fp8zero_sharded_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
  size_t size;
  /** 0 to 3, see above. */
  int stage;
  fp8optim_adamw_options adamw;
  /** How gradients are reduced; its owners and buckets are chosen here and must be NULL. */
  fp8comm_gradient_options gradient;
  /**
   * How often each part is reduced in a step, at least 1. Above 1 the owner adds up the means in FP32, 4 bytes for each
   * element that it owns: the way to accumulate gradients where a rank cannot keep them (stages 2 and 3). In stages 0
   * and 1 this must be 1: accumulate in the memory of the gradients, and reduce the last time only.
   */
  int micro_batches;
  /** Stage 3: parts whose weights are there at once, beside resident ones, at least 1; with 2 and more, the next part's
   * travel meanwhile. At most as many as there are. */
  int weight_buffers;
  /** Stages 2 and 3: parts whose gradients are there at once, beside resident ones, at least 1; with 2 and more, one is
   * reduced while the next is computed. At most as many as there are. */
  int gradient_buffers;
  /**
   * Zero: the model has memory of its own for gradients, and none is made here. Where means take the place of gradients
   * (stages 0 and 1, or several micro-batches), what fp8zero_sharded_reduce() is given must be contiguous, with
   * elements of at least the size of the means' (1 byte with FP8 on the wire, else that of the baseline).
   * gradient_buffers are not used.
   */
  int gradient_memory;
  /**
   * NULL, or one a part: non-zero keeps memory of its own for the part's weights and gradients in every stage (and
   * gathers its weights once a step): for parts that are held while others come and go, such as an embedding that is
   * tied to the output. Read during the creation.
   */
  const int *resident;
  /**
   * NULL, or the ranks that have the other tensors of the same model, where tensors or layers are divided too (tensor
   * and pipeline parallelism): the norm is then over these as well, summed in the order of its ranks, and what one of
   * them must skip, or cannot do, all do. It must outlive the handle; fp8zero_sharded_step() is collective over it.
   */
  fp8comm_communicator *model_communicator;
} fp8zero_sharded_options;

/** Stage 1, the defaults of optimizer and reduction, one micro-batch, two buffers of each kind, memory for gradients,
 * nothing resident, the whole model on each rank. */
static inline fp8zero_sharded_options fp8zero_sharded_options_default(void) {
  fp8zero_sharded_options options;
  options.size = sizeof(options);
  options.stage = 1;
  options.adamw = fp8optim_adamw_options_default();
  options.gradient = fp8comm_gradient_options_default();
  options.micro_batches = 1;
  options.weight_buffers = 2;
  options.gradient_buffers = 2;
  options.gradient_memory = 1;
  options.resident = NULL;
  options.model_communicator = NULL;
  return options;
}

/** One tensor of parameters. */
typedef struct fp8zero_parameter {
  /** Unique, 1 to 255 bytes; copied. */
  const char *name;
  int dimensions;
  int64_t shape[FP8CORE_MAX_DIMENSIONS];
  /** Index into the groups. */
  int group;
  /** Of the weight that the model computes with. */
  fp8core_dtype weight_dtype;
  /** Of the gradient that the model writes. */
  fp8core_dtype gradient_dtype;
  /** 0 for the first parameter, then that of the one before or the next number. */
  int part;
  /** Non-zero: every rank of the model's communicator has this tensor, with the same gradient, and rank 0 of it alone
   * counts it in the norm. Without that communicator it says nothing. */
  int replicated;
} fp8zero_parameter;

/** A matrix of part \p part and group 0, with an E4M3 weight and an FP32 gradient. */
static inline fp8zero_parameter fp8zero_parameter_create(const char *name, int64_t rows, int64_t columns, int part) {
  fp8zero_parameter parameter;
  parameter.name = name;
  parameter.dimensions = 2;
  parameter.shape[0] = rows;
  parameter.shape[1] = columns;
  parameter.shape[2] = 0;
  parameter.shape[3] = 0;
  parameter.group = 0;
  parameter.weight_dtype = FP8CORE_E4M3;
  parameter.gradient_dtype = FP8CORE_FP32;
  parameter.part = part;
  parameter.replicated = 0;
  return parameter;
}

/** Opaque. */
typedef struct fp8zero_sharded fp8zero_sharded;

/**
 * Creates the sharded optimizer, and all memory of later steps but for some small tables of requests. Masters, moments
 * and weights are 0: see fp8zero_sharded_set_master(). Blocking, collective.
 *
 * Owners are those of Algorithm 1 over the bytes of masters and moments, so that they do not depend on the stage. Where
 * ranks do not agree on options, parameters or groups, the message names a rank and the parameter.
 *
 * \param sharded receives the handle, NULL on failure.
 * \param communicator, context must outlive the handle. A context of a CUDA device must be that of
 *        fp8comm_communicator_use_device(). Contexts are of the same type of device on every rank.
 * \param options NULL for the defaults.
 * \param parameter_count 1 to 2^31 - 1; ranks may be more.
 * \param groups see fp8optim_adamw_create().
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for arguments out of range, as a rank finds by itself, where ranks do not
 *         agree, and for a context on a GPU that is not the communicator's; FP8CORE_ERROR_VERSION_MISMATCH;
 *         FP8CORE_ERROR_DEVICE; FP8CORE_ERROR_OUT_OF_MEMORY, and on the other ranks FP8CORE_ERROR_PEER with the number
 *         of the rank that has no memory; those of communicator.h.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_create(fp8zero_sharded **sharded, fp8comm_communicator *communicator,
                                                  fp8core_context *context, const fp8zero_sharded_options *options,
                                                  int64_t parameter_count, const fp8zero_parameter *parameters,
                                                  int group_count, const fp8optim_group *groups);

/** Frees the handle and clears the pointer; waits for weights that travel, and ends reductions in flight where they
 * are. NULL and a cleared pointer are fine. Before communicator and context. */
FP8ZERO_API void fp8zero_sharded_destroy(fp8zero_sharded **sharded);

/** What a part is needed for. */
typedef enum fp8zero_direction {
  /** Its weights; the next part's come in advance. */
  FP8ZERO_FORWARD = 0,
  /** Its weights, and memory for its gradients; the weights of the part before come in advance. */
  FP8ZERO_BACKWARD = 1
} fp8zero_direction;

/** Number of parameters, and of parts. NULL gives 0. */
FP8ZERO_API int64_t fp8zero_sharded_parameters(const fp8zero_sharded *sharded);
FP8ZERO_API int fp8zero_sharded_parts(const fp8zero_sharded *sharded);

/** The parameters of a part: \p count from \p first on. FP8CORE_ERROR_INVALID_ARGUMENT out of range or for NULL. */
FP8ZERO_API fp8core_status fp8zero_sharded_part(const fp8zero_sharded *sharded, int part, int64_t *first,
                                                int64_t *count);

/**
 * Describes the weight of a parameter: data (aligned to 64 bytes), dtype, shape, device and scale_inverse; scale and
 * amax are NULL. In stages 0 to 2, and for resident parts, the description is valid until the handle is destroyed, and
 * what it describes is there after the part was acquired, or fp8zero_sharded_wait(). Else both hold while the part is
 * held.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for an index out of range, or a part that must be held and is not.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_weight(const fp8zero_sharded *sharded, int64_t index,
                                                  fp8core_tensor *tensor);

/**
 * Memory for the gradient of a parameter, contiguous, in its gradient_dtype, aligned to 64 bytes, which the model
 * writes to. In stages 0 and 1 the same until the handle is destroyed; in stages 2 and 3 the part's from acquire for
 * backward until reduce. The reduction works in place: what it leaves there is undefined.
 *
 * \param data receives NULL for a parameter without elements.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for an index out of range, a part that has no such memory at the time, or
 *         options without gradient_memory.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_gradient(const fp8zero_sharded *sharded, int64_t index, void **data);

/**
 * Waits until the part's weights are there, and for backward, in stages 2 and 3, until memory for its gradients is. In
 * stage 3 it gathers them where they are not, and starts the gather of the next part's where a buffer is free. A part
 * can be held once in each direction at a time, and any number of parts as far as buffers are there. Collective.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a part or direction out of range, a part that is held in that direction
 *         already, one more than there are buffers for, or weights that were set and not published; those of
 *         communicator.h.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_acquire(fp8zero_sharded *sharded, int part, fp8zero_direction direction);

/** Ends the use of the part's weights in that direction. FP8CORE_ERROR_INVALID_ARGUMENT where it is not held. */
FP8ZERO_API fp8core_status fp8zero_sharded_release(fp8zero_sharded *sharded, int part, fp8zero_direction direction);

/**
 * Starts the reduction of a part's gradients: in stage 0 the mean goes to every rank, else to the owners. Each part
 * once in a micro-batch, in any order that all ranks share. Collective.
 *
 * \param gradients of the part's parameters, in their order: of any shape with as many elements, dtype, row stride and
 *        scale_inverse, which is read in this call. The data is usually where fp8zero_sharded_gradient() told; it is
 *        then no longer the caller's, until the step in stages 0 and 1, until the next acquire for backward in 2 and 3.
 *        It may be elsewhere, apart from it, and must then stay as it is until the step, or the part's next acquire for
 *        backward in stages 2 and 3. Without gradient_memory it is elsewhere, and means may be written there.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a tensor that is not valid or has another size, a part that was reduced in
 *         this micro-batch already or has no memory for gradients; those of communicator.h.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_reduce(fp8zero_sharded *sharded, int part, const fp8core_tensor *gradients);

/** Works on what is in flight; for calls in between. Does not wait. */
FP8ZERO_API fp8core_status fp8zero_sharded_progress(fp8zero_sharded *sharded);

/**
 * Waits for the reductions, and takes a step of AdamW (fp8optim_adamw_step()) with the means: the norm is that of all
 * gradients, in the order of parameters, so that it has the same bits in every stage, on every rank, whatever the
 * number of owners; a gradient with an infinity or a NaN on any rank skips the step on all. Each part's new weights
 * start to travel as soon as they are made; acquire and fp8zero_sharded_wait() wait for them. Collective; no part may
 * be held.
 *
 * \param options NULL for the defaults.
 * \param report NULL, or receives the findings, the same on every rank.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for options out of range, a part that is held or was not reduced as often as
 *         there are micro-batches, or weights that were set and not published, before anything is sent; those of
 *         communicator.h.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_step(fp8zero_sharded *sharded, const fp8optim_step_options *options,
                                                fp8optim_step_report *report);

/**
 * Ends a step without taking it, for a caller who knows better: waits for the reductions and drops the means. Masters,
 * moments, weights and counts stay as they are; the reducer's scaling factors go on. Collective; no part may be held.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a part that is held or was not reduced as often as there are
 *         micro-batches; those of communicator.h.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_skip(fp8zero_sharded *sharded);

/** What the reductions of the last step found: tensors that were not finite, and a rank that had one, over all
 * micro-batches; bytes_sent is 0, see fp8zero_sharded_traffic(). Zeros and -1 before.
 * FP8CORE_ERROR_INVALID_ARGUMENT for NULL. */
FP8ZERO_API fp8core_status fp8zero_sharded_reduction(const fp8zero_sharded *sharded, fp8comm_gradient_result *result);

/** Waits for weights that travel: those of the last step in stages 0 to 2 and of resident parts. Collective.
 * FP8CORE_ERROR_INVALID_ARGUMENT for NULL; those of communicator.h. */
FP8ZERO_API fp8core_status fp8zero_sharded_wait(fp8zero_sharded *sharded);

/** The rank that owns a parameter; -1 out of range. In stage 0 every rank has all states; this is then the one to write
 * a file from, say. */
FP8ZERO_API int fp8zero_sharded_owner(const fp8zero_sharded *sharded, int64_t index);

/** The parameter's index in this rank's optimizer; -1 where it is none of its parameters. */
FP8ZERO_API int64_t fp8zero_sharded_local(const fp8zero_sharded *sharded, int64_t index);

/**
 * This rank's optimizer, of the parameters that it owns, of all in stage 0: for groups, learning rates, counts and the
 * states of checkpoints. It belongs to the handle. Set groups, rates and counts on every rank alike; take steps by
 * fp8zero_sharded_step() only; after states were loaded call fp8zero_sharded_publish(). On a rank that owns nothing it
 * has one parameter, "fp8zero.none", without elements. NULL gives NULL.
 */
FP8ZERO_API fp8optim_adamw *fp8zero_sharded_adamw(const fp8zero_sharded *sharded);

/** The reducer, of all parameters in their order: for its statistics, and the state of checkpoints. NULL gives NULL. */
FP8ZERO_API fp8comm_gradient_reducer *fp8zero_sharded_reducer(const fp8zero_sharded *sharded);

/**
 * Sets the master weight of a parameter from \p source (fp8optim_adamw_set_state()), which every rank gives and only
 * those that have the parameter read. After the last one call fp8zero_sharded_publish(). Call it on every rank alike; a
 * rank that refuses a source has to tell the others.
 */
FP8ZERO_API fp8core_status fp8zero_sharded_set_master(fp8zero_sharded *sharded, int64_t index,
                                                      const fp8core_tensor *source);

/** Sends the owners' weights, as their optimizers hold them, to all ranks: after masters were set or states were
 * loaded. Waits. Collective; no part may be held. */
FP8ZERO_API fp8core_status fp8zero_sharded_publish(fp8zero_sharded *sharded);

/** Bytes of this rank by class, exact. */
typedef struct fp8zero_memory {
  /** Weights that stay: tensors, scales and padding to 64 bytes. */
  int64_t weight_bytes;
  /** Buffers for weights that come and go (stage 3). */
  int64_t weight_buffer_bytes;
  /** Gradients of the model that stay (stages 0 and 1, resident parts), which in stages 0 and 1 become the means. */
  int64_t gradient_bytes;
  /** Buffers for gradients that come and go (stages 2 and 3). */
  int64_t gradient_buffer_bytes;
  /** Means of the gradients that this rank owns, in FP32 where there are several micro-batches (stages 2 and 3). */
  int64_t mean_gradient_bytes;
  int64_t master_bytes;
  int64_t exp_avg_bytes;
  int64_t exp_avg_sq_bytes;
  /** Of the reducer. */
  int64_t communication_bytes;
  /** Tables, of host and device. */
  int64_t overhead_bytes;
  int64_t total_bytes;
} fp8zero_memory;

/** Fills in what this rank holds. FP8CORE_ERROR_INVALID_ARGUMENT for NULL. */
FP8ZERO_API fp8core_status fp8zero_sharded_memory(const fp8zero_sharded *sharded, fp8zero_memory *memory);

/** Bytes that this rank has sent since the creation: all that the transport counted within the calls of this header,
 * and between them while something that they have started is in flight. Gathers run beside reductions, so theirs are
 * told by what they are made of, and the rest counts as gradients; so do other exchanges of the same communicator
 * meanwhile. Over NCCL (fp8comm/device.h), which counts
 * nothing, the codes of two-shot reductions are left out: gradient_bytes are then those of the small messages. */
typedef struct fp8zero_traffic {
  /** Reductions. */
  uint64_t gradient_bytes;
  /** Gathers. */
  uint64_t weight_bytes;
  /** Norms. */
  uint64_t control_bytes;
} fp8zero_traffic;

/** Exact while nothing is in flight. FP8CORE_ERROR_INVALID_ARGUMENT for NULL. */
FP8ZERO_API fp8core_status fp8zero_sharded_traffic(const fp8zero_sharded *sharded, fp8zero_traffic *traffic);

#ifdef __cplusplus
}
#endif

#endif
