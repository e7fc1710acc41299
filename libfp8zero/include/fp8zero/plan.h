/** \file
 * What training a model costs on many ranks: bytes of memory by class, bytes on the wire by kind, before anything is
 * allocated.
 *
 * Pure functions of sizes, as those of partition.h: no communication, no device, no state, the same answer on every
 * machine. All calls may be made from any thread at any time. docs/plan.md has every formula with its source.
 *
 * The model is the decoder-only Transformer of libfp8gpt. It is divided as Megatron-LM divides it (Shoeybi et al.,
 * 2019; Narayanan et al., 2021; Korthikanti et al., 2022): linear layers by columns, then by rows, and the vocabulary,
 * over tensor-parallel ranks; layers evenly over the stages of a pipeline, of which the first also has the embedding,
 * the last the final norm and the output layer. Ranks are numbered with tensor parallelism fastest, then data, then
 * pipeline parallelism.
 */
#ifndef FP8ZERO_PLAN_H
#define FP8ZERO_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What is computed, kept and sent in which format: the levels of FP8-LM (Peng et al., 2023, section 2 and table 6). */
typedef enum fp8zero_precision {
  /** All in FP32. */
  FP8ZERO_FP32 = 0,
  /** BF16 weights and activations; FP32 gradients, on the wire too, and states: the Megatron baseline. */
  FP8ZERO_BF16 = 1,
  /** BF16, with the products of linear layers, and the inputs kept for them, in FP8: the Transformer Engine baseline.
   */
  FP8ZERO_TE = 2,
  /** FP8 products, and FP8 weights and gradients of linear layers; on the wire of data parallelism all gradients. */
  FP8ZERO_FP8_O1 = 3,
  /** And an optimizer of 5 bytes a parameter: FP16 master, FP8 first and FP16 second moment. */
  FP8ZERO_FP8_O2 = 4,
  /** And FP8 activations in the all-gathers of sequence parallelism (FP8-LM, section 2.4). */
  FP8ZERO_FP8_O3 = 5
} fp8zero_precision;

/** "fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3"; "unknown" outside the enum. Thread-safe. */
FP8ZERO_API const char *fp8zero_precision_name(fp8zero_precision precision);

/** The shape of a model; fields and limits are those of fp8gpt_config. */
typedef struct fp8zero_plan_model {
  /** sizeof(fp8zero_plan_model) as the caller was compiled. */
  size_t size;
  /** 1 to 10,000. */
  int layers;
  /** 1 to 2^20. */
  int hidden;
  /** Divides hidden. */
  int heads;
  /** Heads of keys and values; divides heads. */
  int kv_heads;
  /** Width between the two linear layers of the feed-forward part, 1 to 2^22. */
  int ffn_hidden;
  /** 2 to 2^24. */
  int vocabulary;
  /** Tokens of a sequence, and learned positions; 1 to 2^20. */
  int sequence;
  /** Non-zero: the output layer uses the embedding's weight. */
  int tied_embeddings;
  /** Non-zero: linear layers have biases (never the output layer). */
  int biases;
  /** Non-zero: RMSNorm, without a bias; zero: LayerNorm, with one. */
  int rms_norm;
  /** Non-zero: SwiGLU, whose first layer is twice as wide; zero: GELU. */
  int swiglu;
  /** Non-zero: a learned vector a position; zero: rotary positions, which have no parameters. */
  int learned_positions;
} fp8zero_plan_model;

/** gpt-125m of FP8-LM's table 1: 12 layers, 768 wide, 12 heads, 2048 tokens, GPT-NeoX's vocabulary of 50257, tied. */
static inline fp8zero_plan_model fp8zero_plan_model_default(void) {
  fp8zero_plan_model model;
  model.size = sizeof(model);
  model.layers = 12;
  model.hidden = 768;
  model.heads = 12;
  model.kv_heads = 12;
  model.ffn_hidden = 3072;
  model.vocabulary = 50257;
  model.sequence = 2048;
  model.tied_embeddings = 1;
  model.biases = 1;
  model.rms_norm = 0;
  model.swiglu = 0;
  model.learned_positions = 0;
  return model;
}

/** How what ZeRO distributes is cut. */
typedef enum fp8zero_distribution {
  /** Whole tensors, by fp8zero_partition() over the bytes of their states (FP8-LM, section 2.3). */
  FP8ZERO_WHOLE_TENSORS = 0,
  /** Equal parts of their concatenation, by fp8zero_partition_elements(). */
  FP8ZERO_ELEMENTS = 1
} fp8zero_distribution;

typedef struct fp8zero_plan_options {
  /** sizeof(fp8zero_plan_options) as the caller was compiled. */
  size_t size;
  fp8zero_precision precision;
  /** Ranks that share each layer; divides heads, kv_heads and ffn_hidden. */
  int tensor_parallel;
  /** Non-zero: they also share what is between their products, by tokens. Divides sequence then. */
  int sequence_parallel;
  /** Stages; divides layers. */
  int pipeline_parallel;
  /** Replicas, or ranks that ZeRO distributes over; at most 2^20. */
  int data_parallel;
  /** Distributed over data-parallel ranks: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights. */
  int zero_stage;
  fp8zero_distribution distribution;
  /** Sequences of a pass, at most 2^31 - 1 tokens. */
  int micro_batch;
  /** Passes of a step. */
  int micro_batches;
  /** Non-zero: only the inputs of blocks are kept, and the rest is computed again. */
  int recompute;
  /** Rows of the embedding are padded to a multiple of this times tensor_parallel; at least 1, at most 2^20. */
  int vocabulary_multiple;
} fp8zero_plan_options;

/** One rank, bf16, no ZeRO (whole tensors), a micro-batch of one sequence, one a step, no recomputation; a vocabulary
 * that is padded only to divide by tensor_parallel. */
static inline fp8zero_plan_options fp8zero_plan_options_default(void) {
  fp8zero_plan_options options;
  options.size = sizeof(options);
  options.precision = FP8ZERO_BF16;
  options.tensor_parallel = 1;
  options.sequence_parallel = 0;
  options.pipeline_parallel = 1;
  options.data_parallel = 1;
  options.zero_stage = 0;
  options.distribution = FP8ZERO_WHOLE_TENSORS;
  options.micro_batch = 1;
  options.micro_batches = 1;
  options.recompute = 0;
  options.vocabulary_multiple = 1;
  return options;
}

/** Classes of memory. The first five are exact; activations are exactly libfp8gpt's on one rank. */
typedef enum fp8zero_memory_class {
  FP8ZERO_MEMORY_WEIGHTS = 0,
  /** In stages 2 and 3 of ZeRO the owner's, as they were reduced; of several passes in FP32. */
  FP8ZERO_MEMORY_GRADIENTS = 1,
  FP8ZERO_MEMORY_MASTER = 2,
  FP8ZERO_MEMORY_EXP_AVG = 3,
  FP8ZERO_MEMORY_EXP_AVG_SQ = 4,
  /** Scales with their histories, and the optimizer's tables; without padding. */
  FP8ZERO_MEMORY_SCALES = 5,
  /** Kept from forward to backward, of all micro-batches in flight. */
  FP8ZERO_MEMORY_ACTIVATIONS = 6,
  /** Used within a pass, and buffers of communication: an estimate. */
  FP8ZERO_MEMORY_WORKSPACE = 7,
  FP8ZERO_MEMORY_CLASSES = 8
} fp8zero_memory_class;

/** "weights", "gradients", "master", "exp_avg", "exp_avg_sq", "scales", "activations", "workspace"; "unknown" outside
 * the enum. Thread-safe. */
FP8ZERO_API const char *fp8zero_memory_class_name(fp8zero_memory_class memory_class);

/** Kinds of traffic. Each rank's own bytes, sent; it receives as many on average. Messages of scales, counts and losses
 * (a few bytes a tensor or step) are left out. */
typedef enum fp8zero_traffic_kind {
  /** Of the data-parallel group: gradients, reduced and, without ZeRO, gathered again. */
  FP8ZERO_TRAFFIC_GRADIENTS = 0,
  /** Of the data-parallel group: weights that ZeRO gathers. */
  FP8ZERO_TRAFFIC_WEIGHTS = 1,
  /** All-gathers of sequence parallelism: activations, and gradients of outputs. */
  FP8ZERO_TRAFFIC_TENSOR_GATHER = 2,
  /** Sums of tensor parallelism: all-reduces, or reduce-scatters with sequence parallelism. */
  FP8ZERO_TRAFFIC_TENSOR_REDUCE = 3,
  /** Between stages: activations and their gradients, and the gradient of a tied embedding. */
  FP8ZERO_TRAFFIC_PIPELINE = 4,
  FP8ZERO_TRAFFIC_KINDS = 5
} fp8zero_traffic_kind;

/** "gradients", "weights", "tensor_gather", "tensor_reduce", "pipeline"; "unknown" outside the enum. Thread-safe. */
FP8ZERO_API const char *fp8zero_traffic_kind_name(fp8zero_traffic_kind kind);

/** Bytes of the ranks. */
typedef struct fp8zero_spread {
  int64_t minimum;
  int64_t maximum;
  double mean;
} fp8zero_spread;

typedef struct fp8zero_plan_result {
  /** Of the whole model, tied embeddings once, without padding. */
  int64_t parameters;
  int64_t ranks;
  /** Rows of the embedding with padding, over all tensor-parallel ranks. */
  int64_t padded_vocabulary;
  /** Bytes a rank. */
  fp8zero_spread memory[FP8ZERO_MEMORY_CLASSES];
  /** Of the sums of each rank: its minimum is not the sum of minima. */
  fp8zero_spread memory_total;
  /** Bytes that a rank sends in a step. */
  fp8zero_spread traffic[FP8ZERO_TRAFFIC_KINDS];
  fp8zero_spread traffic_total;
  /** Bytes a rank of what ZeRO distributes; all 0 without. */
  fp8zero_spread distributed;
  /** Largest over smallest of them within a data-parallel group, of the worst group: 1 or more; infinite where a rank
   * has nothing. 1 without ZeRO. */
  double balance;
  /** Tensors of all ranks of one replica that element-wise distribution cuts. */
  int64_t split_tensors;
} fp8zero_plan_result;

/**
 * Plans a step of training \p model as \p options say.
 *
 * On one rank weights and gradients are exactly those of fp8gpt_memory_report(), states those of
 * fp8optim_adamw_memory(), and activations those of fp8gpt_memory_report() too (alignment to 256 bytes included).
 *
 * O(tensors log tensors + data_parallel + pipeline_parallel) time; 96 bytes of scratch memory for each tensor of a
 * stage and each data-parallel rank at most.
 *
 * \param options NULL for the defaults.
 * \param result receives the plan; untouched on any error.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT with a message that names the field, its value and what was expected: sizes
 *         out of range, a split that is not even, bytes beyond 2^63 - 1; FP8CORE_ERROR_VERSION_MISMATCH for a size
 *         field that no release had; FP8CORE_ERROR_OUT_OF_MEMORY.
 */
FP8ZERO_API fp8core_status fp8zero_plan(const fp8zero_plan_model *model, const fp8zero_plan_options *options,
                                        fp8zero_plan_result *result);

#ifdef __cplusplus
}
#endif

#endif
