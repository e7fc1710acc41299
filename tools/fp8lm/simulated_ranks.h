/** \file
 * Data-parallel ranks simulated in one process: each rank's gradient of its own micro-batch, reduced by libfp8comm over
 * a communicator of as many threads, with every algorithm and scaling beside each other, against the mean in FP64.
 */
#ifndef FP8LM_SIMULATED_RANKS_H
#define FP8LM_SIMULATED_RANKS_H

#include <stddef.h>
#include <stdint.h>

#include "fp8comm/gradient.h"
#include "fp8core/context.h"
#include "fp8gpt/model.h"

/** Most ranks: each of them is a thread. */
#define FP8LM_SIMULATED_RANKS 1024

/** Reducers: native auto, pre and post; two-shot auto, pre and post. */
#define FP8LM_REDUCERS 6

fp8comm_gradient_algorithm fp8lm_reducer_algorithm(int reducer);
fp8comm_gradient_scaling fp8lm_reducer_scaling(int reducer);

/** The reducer of these two. */
int fp8lm_reducer_of(fp8comm_gradient_algorithm algorithm, fp8comm_gradient_scaling scaling);

typedef struct fp8lm_simulated_options {
  int ranks;
  /** Steps that are reduced, at least 1, and how many of them, the last ones, with pre- and post-scaling too: these two
   * have no state that earlier steps would change. */
  int64_t steps;
  int64_t measured_steps;
  /** What all reducers have in common; algorithm, scaling and buckets are set for each. */
  fp8comm_gradient_options gradient;
  /** A folder for a file of all ranks' gradients; NULL: they are kept in memory. */
  const char *folder;
  /** For the mean. */
  int threads;
} fp8lm_simulated_options;

/** One tensor in one reduced step, over all ranks. */
typedef struct fp8lm_reduction {
  /** 0: this reducer had no part in the step. */
  int present;
  /** Some rank's gradient held an infinity or a NaN: nothing but mu is known. */
  int nonfinite;
  /** Factor of this step; 1 unless the scaling is auto. */
  double mu;
  /** Of elements * ranks casts, and of elements * (ranks - 1) additions. */
  uint64_t saturated_in_cast;
  uint64_t saturated_in_sum;
  uint64_t flushed_to_zero;
  /** Elements of the mean that are 0, though the mean in FP64 is not. */
  uint64_t lost;
  /** Elements of a native sum at the largest magnitude of the format. */
  uint64_t at_maximum;
  /** Sums of squares: of the mean in FP64, and of the difference. */
  double signal;
  double noise;
} fp8lm_reduction;

typedef struct fp8lm_simulated_ranks fp8lm_simulated_ranks;

/** Bytes of the gradients of all ranks. */
int64_t fp8lm_simulated_gradient_bytes(const fp8gpt_model *model, int ranks);

/**
 * Makes communicators, reducers and memory.
 *
 * \param model on the CPU; outlives the simulation.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a folder where no file can be made or that has too little room,
 *         FP8CORE_ERROR_OUT_OF_MEMORY, and what libfp8comm returns for options that are out of range.
 */
fp8core_status fp8lm_simulated_ranks_create(fp8lm_simulated_ranks **ranks, const fp8gpt_model *model,
                                            const fp8lm_simulated_options *options);
void fp8lm_simulated_ranks_destroy(fp8lm_simulated_ranks **ranks);

/** Bytes of the reducers of all ranks with what they write to; of the means. */
size_t fp8lm_simulated_reducer_bytes(const fp8lm_simulated_ranks *ranks);
size_t fp8lm_simulated_mean_bytes(const fp8lm_simulated_ranks *ranks);

/** Begins a step: the mean is 0. */
void fp8lm_simulated_ranks_begin(fp8lm_simulated_ranks *ranks);

/** Takes the gradient that the model holds as that of \p rank, each once a step. \p context is the model's; non-zero \p
 * keep: for fp8lm_simulated_ranks_reduce(). */
fp8core_status fp8lm_simulated_ranks_add(fp8lm_simulated_ranks *ranks, fp8core_context *context, int rank, int keep);

/** Reduces the gradients of this step, which were all kept, by every reducer that has a part in the step. */
fp8core_status fp8lm_simulated_ranks_reduce(fp8lm_simulated_ranks *ranks);

/** The mean of tensor \p tensor, in FP32 until the next step begins: rounded from FP64. */
fp8core_status fp8lm_simulated_ranks_mean(fp8lm_simulated_ranks *ranks, int64_t tensor, fp8core_tensor *mean);

/** Of a reduced step, from 0. */
const fp8lm_reduction *fp8lm_simulated_reduction(const fp8lm_simulated_ranks *ranks, int64_t step, int reducer,
                                                 int64_t tensor);

#endif
