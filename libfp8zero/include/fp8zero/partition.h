/** \file
 * Which rank of a data-parallel group owns which part of a model's memory.
 *
 * Pure functions of sizes: no communication, no state, the same answer on every rank and machine. All calls may be made
 * from any thread at any time. What is refused is refused before any output is written.
 */
#ifndef FP8ZERO_PARTITION_H
#define FP8ZERO_PARTITION_H

#include <stdint.h>

#include "fp8core/status.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Distributes whole tensors (FP8-LM, Peng et al., 2023, section 2.3, Algorithm 1): largest first, each to the rank with
 * the least memory so far. A tensor is never cut, so that its scale is needed on one rank only. Of equal sizes the
 * tensor with the lower index comes first; of equal loads the lowest rank takes it. A size of 0 adds no load: such
 * tensors all go to the rank that is least loaded in the end.
 *
 * No rank's load is above another's by more than the largest tensor, and the maximum is at most 4/3 of the smallest
 * possible (Graham, "Bounds on multiprocessing timing anomalies", 1969). Algorithm 1 also has each rank's memory as a
 * limit; ranks are alike here, so that the limit is kept or cannot be kept this way: compare the maximum load with it.
 *
 * O(n log n) time and 32 n bytes of scratch memory at most, for n tensors on any number of ranks.
 *
 * \param tensor_count at least 0.
 * \param sizes of the tensors, each at least 0, together at most 2^63 - 1; in any one unit: bytes of the state that is
 *        distributed, or elements. May be NULL without tensors, as may \p owners.
 * \param rank_count at least 1.
 * \param owners receives the rank of each tensor, 0 to rank_count - 1.
 * \param loads NULL, or receives for each rank the sum of the sizes of its tensors.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT with a message that names the argument, its value and what was expected;
 *         FP8CORE_ERROR_OUT_OF_MEMORY. Outputs are untouched on any error.
 */
FP8ZERO_API fp8core_status fp8zero_partition(int64_t tensor_count, const int64_t *sizes, int rank_count, int *owners,
                                             int64_t *loads);

/** How evenly memory is distributed; in the unit of the loads. */
typedef struct fp8zero_balance {
  int64_t total;
  int64_t minimum;
  int64_t maximum;
  /** total / ranks. */
  double mean;
  /** maximum / minimum, 1 or more: 1 where all loads are 0, infinite where only some are. */
  double ratio;
} fp8zero_balance;

/**
 * Statistics of \p loads, as of fp8zero_partition() or of any other distribution. O(rank_count).
 *
 * \param rank_count at least 1.
 * \param loads one a rank, each at least 0, together at most 2^63 - 1.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT with a message that names the argument, its value and what was expected;
 *         \p balance is then untouched.
 */
FP8ZERO_API fp8core_status fp8zero_partition_balance(int rank_count, const int64_t *loads, fp8zero_balance *balance);

/**
 * A rank's part of the concatenation of all tensors. Its elements in tensor t, for t from tensor_begin to tensor_end -
 * 1, are those from (t == tensor_begin ? first_begin : 0) to before (t == tensor_end - 1 ? last_end : the size of t).
 * An empty part has begin and end at the end of the concatenation, both tensors at their count, and 0 elsewhere.
 */
typedef struct fp8zero_element_range {
  /** Elements [begin, end) of the concatenation. */
  int64_t begin;
  int64_t end;
  /** Tensors [tensor_begin, tensor_end) hold them; the first and the last are not empty. */
  int64_t tensor_begin;
  int64_t tensor_end;
  /** Where the part begins, as an element of tensor_begin. */
  int64_t first_begin;
  /** Where it ends, as an element of tensor_end - 1: one past its last. */
  int64_t last_end;
} fp8zero_element_range;

/**
 * The partition of ordinary ZeRO, to compare with (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
 * Trillion Parameter Models", 2020): all tensors one after the other in their order, cut into equal parts wherever the
 * cuts fall. Where the elements don't divide evenly, the first ranks have one more; nothing is padded. A tensor with a
 * scale that is cut needs the scale, and the maximum that it is computed from, on several ranks: whole tensors are the
 * paper's answer to this.
 *
 * O(tensor_count + rank_count) time, no memory.
 *
 * \param tensor_count at least 0.
 * \param sizes elements of each tensor, at least 0, together at most 2^63 - 1. May be NULL without tensors.
 * \param rank_count at least 1.
 * \param ranges receives the part of each rank.
 * \param split_tensors NULL, or receives the number of tensors that have elements on more than one rank.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT with a message that names the argument, its value and what was expected.
 *         Outputs are untouched on any error.
 */
FP8ZERO_API fp8core_status fp8zero_partition_elements(int64_t tensor_count, const int64_t *sizes, int rank_count,
                                                      fp8zero_element_range *ranges, int64_t *split_tensors);

#ifdef __cplusplus
}
#endif

#endif
