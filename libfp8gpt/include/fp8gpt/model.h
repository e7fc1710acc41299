/** \file
 * A model: weights, gradients and activations on one device; forward and backward passes.
 *
 * The model does not update itself. It lists its parameters (fp8gpt_model_parameter()), each with the tensor that holds
 * its weight and the one that receives its gradient; an optimizer reads the gradients and writes the weights, in place
 * or in memory of its own that is bound with fp8gpt_model_bind_weight().
 *
 * Precision: FP8-LM, sections 2.1 and 2.4, and table 6. All memory is planned and allocated at creation, with the
 * context's workspace for the model's products: a pass allocates nothing. A model belongs to its context and is used by
 * one thread at a time. The same weights, tokens, seed and step give the same bits on any number of threads.
 */
#ifndef FP8GPT_MODEL_H
#define FP8GPT_MODEL_H

#include "config.h"
#include "fp8core/context.h"
#include "fp8core/scaling.h"
#include "fp8core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What is computed and kept in which format; the hyper-parameters never depend on it. */
typedef enum fp8gpt_precision {
  /** All in FP32. */
  FP8GPT_FP32 = 0,
  /** BF16 weights, activations and products, FP32 gradients: the Megatron baseline. */
  FP8GPT_BF16 = 1,
  /** BF16, with the products of linear layers in FP8: the Transformer Engine baseline. */
  FP8GPT_TE = 2,
  /** FP8 products, and FP8 weights and gradients of linear layers. */
  FP8GPT_FP8_O1 = 3,
  /** The same model; its optimizer has FP8 states (FP8OPTIM_PRESET_FP8). */
  FP8GPT_FP8_O2 = 4,
  /** The same model and optimizer, with FP8 in what parallel ranks exchange and divide (ZeRO: libfp8zero). */
  FP8GPT_FP8_O3 = 5
} fp8gpt_precision;

/** "fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3"; "unknown" outside the enum. Thread-safe. */
FP8GPT_API const char *fp8gpt_precision_name(fp8gpt_precision precision);

typedef struct fp8gpt_model_options {
  /** sizeof(fp8gpt_model_options) as the caller was compiled. */
  size_t size;
  fp8gpt_precision precision;
  /** Sequences of a pass at most. */
  int batch;
  /** How activations, output gradients and weight gradients are scaled in the FP8 levels. */
  fp8core_scaling_options scaling;
  /** Non-zero: keep only the input of each block, and compute the rest again in the backward pass. */
  int recompute;
  /** Non-zero: no gradients and no memory for them; fp8gpt_model_loss() and fp8gpt_model_next() only. */
  int inference;
  /** Of the initial weights and of dropout. */
  uint64_t seed;
  /** Non-zero: the model has no memory for weights, for gradients; the caller binds its own before a pass reads or
   * writes them (fp8gpt_model_bind_weight(), fp8gpt_model_bind_gradient(), fp8gpt_hooks). */
  int external_weights;
  int external_gradients;
} fp8gpt_model_options;

/** bf16, batches of 1, delayed scaling (history of 16, maximum, margin 0), no recomputation, training, seed 0, memory
 * of the model's own. */
static inline fp8gpt_model_options fp8gpt_model_options_default(void) {
  fp8gpt_model_options options;
  options.size = sizeof(options);
  options.precision = FP8GPT_BF16;
  options.batch = 1;
  options.scaling = fp8core_scaling_options_default();
  options.scaling.history_length = 16;
  options.recompute = 0;
  options.inference = 0;
  options.seed = 0;
  options.external_weights = 0;
  options.external_gradients = 0;
  return options;
}

typedef struct fp8gpt_model fp8gpt_model;

/**
 * Creates a model with initial weights (normal, see fp8gpt_config.init_std; norms 1, biases 0).
 *
 * \param context must outlive the model.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for options or a config out of range, or an FP8GPT_ATTENTION that is no
 *         choice; FP8CORE_ERROR_NOT_SUPPORTED for a device that the model has no kernels for, or where FP8GPT_ATTENTION
 *         wants cuDNN that cannot be had; FP8CORE_ERROR_OUT_OF_MEMORY, FP8CORE_ERROR_DEVICE.
 */
FP8GPT_API fp8core_status fp8gpt_model_create(fp8gpt_model **model, fp8core_context *context,
                                              const fp8gpt_config *config, const fp8gpt_model_options *options);

/** Frees the model and clears the pointer. NULL and a cleared pointer are fine. */
FP8GPT_API void fp8gpt_model_destroy(fp8gpt_model **model);

/** The config of a model, valid as long as the model. NULL gives NULL. */
FP8GPT_API const fp8gpt_config *fp8gpt_model_config(const fp8gpt_model *model);

/**
 * What computes attention in whole batches (options.batch sequences of the config's length), for a log: "own" on the
 * CPU; on CUDA "cuDNN 9.19.0", "cuDNN 9.19.0 forward, own backward: " and the reason, or "own: " and the reason.
 *
 * In training, models whose activations are BF16 take cuDNN where the build and the machine have it, it takes their
 * shape, and its results agree with the own kernels' and repeat themselves, which the creation of the model checks. A
 * backward pass of cuDNN's whose workspace is above 1 GiB is left to the own kernel. The environment variable
 * FP8GPT_ATTENTION, read at creation, says otherwise: "auto" as above, "own" never, "cudnn" whatever its workspace, or
 * creation fails with the reason. All other models and batches have own kernels. Which they are depends on nothing
 * else, so that the same machine gives the same bits.
 *
 * Valid as long as the model. NULL gives NULL.
 */
FP8GPT_API const char *fp8gpt_model_attention(const fp8gpt_model *model);

/** One parameter tensor. */
typedef struct fp8gpt_parameter {
  /** "layers.3.attention.qkv.weight" and the like; valid as long as the model. */
  const char *name;
  /** A matrix, or a vector with one dimension. Linear weights are [outputs, inputs]. */
  int dimensions;
  int64_t shape[2];
  /** Non-zero for matrices: weight decay applies (not to norms and biases). */
  int decay;
  /** Non-zero for the weights of linear layers, whose formats depend on the precision. */
  int linear;
  /** The part of the model that it belongs to, 0 to fp8gpt_model_parts() - 1; parameters are in the order of parts. */
  int part;
  /** Without data until one is bound, where the options say that memory is external. */
  fp8core_tensor weight;
  /** The same; and without data in a model for inference. */
  fp8core_tensor gradient;
} fp8gpt_parameter;

/** Number of parameter tensors. NULL gives 0. */
FP8GPT_API int64_t fp8gpt_model_parameters(const fp8gpt_model *model);

/** Describes parameter \p index. Its tensors stay valid until the model is destroyed or another weight is bound. */
FP8GPT_API fp8core_status fp8gpt_model_parameter(const fp8gpt_model *model, int64_t index, fp8gpt_parameter *parameter);

/**
 * Computes with \p weight from now on: the memory and scale pointers of an optimizer, which must outlive their use.
 * Same shape, dtype and device as the parameter's; a scale that is NULL is 1. The model's own memory for it is kept.
 */
FP8GPT_API fp8core_status fp8gpt_model_bind_weight(fp8gpt_model *model, int64_t index, const fp8core_tensor *weight);

/**
 * From now on passes write the gradient of parameter \p index to \p data: contiguous, of the gradient's dtype, on the
 * context's device, which must outlive its use. The scale of an FP8 gradient stays the model's. The model's own memory
 * for it is kept.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for an index out of range, NULL, memory that is not aligned to an element, or
 *         a model for inference.
 */
FP8GPT_API fp8core_status fp8gpt_model_bind_gradient(fp8gpt_model *model, int64_t index, void *data);

/** Parts of the model, in the order of the forward pass: the embeddings, each block, and what follows (the last norm
 * and, unless tied, the output layer): layers + 2. NULL gives 0. */
FP8GPT_API int fp8gpt_model_parts(const fp8gpt_model *model);

typedef enum fp8gpt_direction { FP8GPT_FORWARD = 0, FP8GPT_BACKWARD = 1 } fp8gpt_direction;

/**
 * What a pass tells of the parts that it uses, so that weights can be gathered just before and given up just after
 * (ZeRO stage 3), and gradients travel while earlier parts are computed. Calls come in pairs, on the thread of the
 * pass; every pass of the same kind makes the same ones. Backward, a part is held from before its activations are
 * computed again until its gradients are complete. The last part's forward and backward computation are one in
 * training: it is held once, backward. Tied embeddings belong to part 0, which is then also held around the last part:
 * in training backward, from before the last part to the end. A hook may bind weights (acquire) and gradients (acquire,
 * backward) of its part. After a pass that failed, parts may be held still.
 */
typedef struct fp8gpt_hooks {
  /** sizeof(fp8gpt_hooks) as the caller was compiled. */
  size_t size;
  void *user_data;
  /** Before the first use of the part's weights and, backward, of its gradients. NULL: not wanted. An error ends the
   * pass, which returns it. */
  fp8core_status (*acquire)(void *user_data, int part, fp8gpt_direction direction);
  /** After the last use; backward, when the gradients of this pass are complete (on CUDA: queued on the stream). NULL:
   * not wanted. */
  fp8core_status (*release)(void *user_data, int part, fp8gpt_direction direction);
} fp8gpt_hooks;

/** Sets the hooks, which are copied; NULL: none. FP8CORE_ERROR_VERSION_MISMATCH for a wrong size. */
FP8GPT_API fp8core_status fp8gpt_model_set_hooks(fp8gpt_model *model, const fp8gpt_hooks *hooks);

/** Writes the initial value of a parameter, as FP32, contiguous, on the context's device: a function of seed, name and
 * element only, whatever the precision. */
FP8GPT_API fp8core_status fp8gpt_model_initial_weight(const fp8gpt_model *model, int64_t index, float *values);

/** Micro-batches of a step at most. */
#define FP8GPT_MICRO_BATCHES 2048

/** A pass over some sequences. */
typedef struct fp8gpt_batch {
  /** Sequences, 1 to the options' batch, and tokens of each, 1 to the config's sequence. */
  int sequences;
  int length;
  /** [sequences, length] token ids, and the ids that should follow them; -1 where none counts. Host memory. */
  const int32_t *tokens;
  const int32_t *targets;
} fp8gpt_batch;

/**
 * Forward and backward pass: adds the gradient of the mean loss, times \p loss_scale, to the gradients, or sets them to
 * it where \p first is non-zero. For a step of several micro-batches: first for the first one, and loss_scale 1 over
 * their number. FP8 gradients are summed in FP32 and rounded once a micro-batch: from the ninth since the first on
 * stochastically, with the context's seed.
 *
 * \param step counts optimizer steps, 0 to 2^21 - 2: dropout draws by it and by \p micro_batch.
 * \param micro_batch of the step, 0 to FP8GPT_MICRO_BATCHES - 1; another one on each of several data-parallel ranks.
 * \param loss receives the mean cross-entropy in nats of the targets that count, in host memory. Waits for the device.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for sizes or token ids out of range; the gradients are untouched then. The
 *         same for a weight or gradient without memory, when the pass comes to it; errors of hooks.
 */
FP8GPT_API fp8core_status fp8gpt_model_train(fp8gpt_model *model, const fp8gpt_batch *batch, int first,
                                             float loss_scale, int64_t step, int micro_batch, float *loss);

/** Ends a step: the amaxes that its passes saw become the scales of the next. Gradients must not be read any more. */
FP8GPT_API fp8core_status fp8gpt_model_end_step(fp8gpt_model *model);

/** Mean cross-entropy without gradients or dropout; sums go over targets that count. Changes no scaling state. */
FP8GPT_API fp8core_status fp8gpt_model_loss(fp8gpt_model *model, const fp8gpt_batch *batch, float *loss);

/**
 * Logits of the tokens that follow one sequence. Keys and values of earlier calls are kept: \p tokens continue the
 * sequence at \p position (0 starts a new one; one before the end goes on from there).
 *
 * \param position at most the number of tokens that are kept, which a failed call sets back to its position.
 * \param count tokens given, at least 1; position + count at most the config's sequence.
 * \param logits receives [vocabulary] FP32 logits after the last token, in host memory.
 */
FP8GPT_API fp8core_status fp8gpt_model_next(fp8gpt_model *model, const int32_t *tokens, int count, int position,
                                            float *logits);

/** Bytes by class. */
typedef struct fp8gpt_memory {
  int64_t parameters;
  int64_t weight_bytes;
  int64_t gradient_bytes;
  /** Kept from forward to backward. */
  int64_t activation_bytes;
  /** Used within a pass, scales and tables; with the context's workspace, which all models of a context share. */
  int64_t workspace_bytes;
} fp8gpt_memory;

/** Exact bytes that the model holds on its device; bound weights count as its own, but not where memory is external. */
FP8GPT_API fp8core_status fp8gpt_memory_report(const fp8gpt_model *model, fp8gpt_memory *memory);

/** Number of tensors with a scale of their own (activations, output gradients, weight gradients), 0 without FP8. */
FP8GPT_API int64_t fp8gpt_model_scaled_tensors(const fp8gpt_model *model);

/** Name and scaling record of one; the name is valid as long as the model. Waits for the device. */
FP8GPT_API fp8core_status fp8gpt_model_scaled_tensor(fp8gpt_model *model, int64_t index, const char **name,
                                                     fp8core_scaling_record *record);

/**
 * Casts of training passes add to \p statistics from now on: one entry a scaled tensor, at a multiple of 8 bytes in the
 * memory of the model's device, which must outlive its use; NULL ends it. What a product writes in FP8 by itself is no
 * cast and is not counted: weight gradients, and the inputs of the second feed-forward layer behind a GELU. With
 * recomputation, casts of the forward pass count twice. Changes no result.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a model without scaled tensors, or memory that is not aligned.
 */
FP8GPT_API fp8core_status fp8gpt_model_count_casts(fp8gpt_model *model, fp8core_cast_statistics *statistics);

/** The scaling state, for saving and loading (fp8core_scaling_save()); NULL without FP8. Belongs to the model. */
FP8GPT_API fp8core_scaling *fp8gpt_model_scaling(fp8gpt_model *model);

#ifdef __cplusplus
}
#endif

#endif
