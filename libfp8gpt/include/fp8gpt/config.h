/** \file
 * The shape of a decoder-only Transformer.
 *
 * One description covers the GPT of FP8-LM (Peng et al., 2023, section 3.1: pre-LayerNorm, GELU, rotary positions),
 * GPT-2 (Radford et al., 2019: learned positions, tied embeddings) and Llama (Touvron et al., 2023: RMSNorm, SwiGLU,
 * grouped-query attention, no biases).
 */
#ifndef FP8GPT_CONFIG_H
#define FP8GPT_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8gpt_normalization {
  /** Ba, Kiros, Hinton, "Layer normalization", 2016; with a bias. */
  FP8GPT_LAYER_NORM = 0,
  /** Zhang and Sennrich, "Root mean square layer normalization", 2019; without a bias. */
  FP8GPT_RMS_NORM = 1
} fp8gpt_normalization;

typedef enum fp8gpt_activation {
  /** GELU, tanh approximation. */
  FP8GPT_GELU = 0,
  /** silu(x W_gate) * (x W_up): Shazeer, "GLU variants improve Transformer", 2020. */
  FP8GPT_SWIGLU = 1
} fp8gpt_activation;

typedef enum fp8gpt_position {
  /** Rotary: Su et al., "RoFormer", 2021; pairs (i, i + head_dim / 2), as GPT-NeoX and Llama. */
  FP8GPT_ROPE = 0,
  /** A learned vector a position, added to the embedding. */
  FP8GPT_LEARNED = 1
} fp8gpt_position;

typedef struct fp8gpt_config {
  /** sizeof(fp8gpt_config) as the caller was compiled. */
  size_t size;
  int layers;
  int hidden;
  int heads;
  /** Heads of keys and values; divides heads. */
  int kv_heads;
  /** Width between the two linear layers of the feed-forward part. */
  int ffn_hidden;
  int vocabulary;
  /** Longest sequence. */
  int sequence;
  fp8gpt_normalization normalization;
  fp8gpt_activation activation;
  fp8gpt_position position;
  /** Non-zero: the output layer uses the embedding's weight. */
  int tied_embeddings;
  /** Non-zero: linear layers have biases (never the output layer). */
  int biases;
  float norm_eps;
  float rope_theta;
  /** Probability of dropping an element of the embedding's and of each block's two outputs, 0 to below 1. Attention
   * weights are never dropped: there is no counterpart of GPT-2's attn_pdrop or Megatron-LM's --attention-dropout. */
  float dropout;
  /** Standard deviation of initial weights; the layers that write to the residual have it divided by sqrt(2 layers). */
  float init_std;
} fp8gpt_config;

/** Names a shape of the paper's ("gpt-125m", "gpt-7b", "gpt-13b", "gpt-175b"), of GPT-2 ("gpt2-124m"), of Llama
 * ("llama-7b"), or a small one for CPUs ("tiny-gpt", "tiny-gpt2", "tiny-llama": 4 layers, 256 wide, byte vocabulary).
 */
FP8GPT_API fp8core_status fp8gpt_config_preset(const char *name, fp8gpt_config *config);

/** Name of preset \p index, counted from 0; NULL beyond the last. Static storage; thread-safe. */
FP8GPT_API const char *fp8gpt_config_preset_name(int index);

/**
 * Whether a model can be made of \p config. Thread-safe.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT with a message that names the field, its value and what was expected.
 */
FP8GPT_API fp8core_status fp8gpt_config_validate(const fp8gpt_config *config);

/** Parameters of the model, embeddings included, tied ones once; -1 if the config is not valid. */
FP8GPT_API int64_t fp8gpt_config_parameters(const fp8gpt_config *config);

/** Floating-point operations of one token, forward and backward (Megatron's count: 6 a weight of the linear and output
 * layers, 6 hidden * sequence a layer for causal attention), at \p sequence tokens a sequence; -1 if the config is not
 * valid. */
FP8GPT_API double fp8gpt_config_flops_per_token(const fp8gpt_config *config, int sequence);

#ifdef __cplusplus
}
#endif

#endif
