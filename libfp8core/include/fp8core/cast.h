/** \file
 * Bulk casts between all formats, with scale, amax and counts in one pass.
 *
 * The rule, for each element x of the source (numerics.md, "Casts"):
 *   value = x * source.scale_inverse             (FP32)
 *   stored = round(value * destination.scale)    (FP32 product, then one rounding to the destination's format)
 * The scalar rule is fp8core_encode() and fp8core_decode(); every tier and CUDA give the same bits.
 */
#ifndef FP8CORE_CAST_H
#define FP8CORE_CAST_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "context.h"
#include "status.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8core_rounding {
  FP8CORE_ROUND_NEAREST_EVEN = 0,
  /**
   * Up with the probability of the distance to the lower neighbour, to 2^-32, with Philox-4x32-10 (Salmon et al.,
   * SC'11): key = the context's seed, counter = (element index / 4, tensor_id, step), lane = element index mod 4.
   * Representable values never move. Magnitudes at or above the maximum round to nearest, so that saturation and NaN
   * do not depend on the draw.
   */
  FP8CORE_ROUND_STOCHASTIC = 1
} fp8core_rounding;

/** Counts of one or more casts. Every count is added to, so that several calls accumulate. In the memory of the
 * destination's device. */
typedef struct fp8core_cast_statistics {
  /** Elements seen. */
  uint64_t elements;
  /** Finite values whose rounded magnitude exceeds the destination's maximum. */
  uint64_t saturated;
  /** Finite values other than zero that were stored as zero. */
  uint64_t flushed_to_zero;
  /** Values that are infinite or NaN. */
  uint64_t nonfinite;
} fp8core_cast_statistics;

typedef struct fp8core_cast_options {
  /** sizeof(fp8core_cast_options) as the caller was compiled. */
  size_t size;
  fp8core_rounding rounding;
  /** As in fp8core_encode(). */
  int saturate;
  /** Stochastic rounding: tells tensors (layers) of one seed apart. */
  uint32_t tensor_id;
  /** Stochastic rounding: tells training steps apart. */
  uint32_t step;
  /** Stochastic rounding: index of the first element in the whole tensor, for a part of a tensor; draws do not depend
   * on how a tensor is cut. */
  uint64_t first_element;
  /** NULL: not wanted. */
  fp8core_cast_statistics *statistics;
} fp8core_cast_options;

/** Nearest even, saturating, no statistics. */
static inline fp8core_cast_options fp8core_cast_options_default(void) {
  fp8core_cast_options options;
  options.size = sizeof(options);
  options.rounding = FP8CORE_ROUND_NEAREST_EVEN;
  options.saturate = 1;
  options.tensor_id = 0;
  options.step = 0;
  options.first_element = 0;
  options.statistics = NULL;
  return options;
}

/**
 * Casts \p source into \p destination, any format to any.
 *
 * \param options NULL for the defaults.
 * Shapes must be equal; row strides may differ. Both tensors lie on the context's device. Writes the data of
 * \p destination (gaps between rows untouched), raises its amax, adds to the statistics.
 * In place (same data pointer) where the destination's element is no wider than the source's and both tensors are
 * contiguous, or both have rows that start at the same bytes. Any other overlap is refused.
 * No elements: success, nothing read or written.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT, or FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_cast(fp8core_context *context, const fp8core_cast_options *options,
                                        const fp8core_tensor *source, const fp8core_tensor *destination);

/**
 * Casts the matrix \p source [rows, columns] in one read into \p destination [rows, columns] and \p transposed
 * [columns, rows]; both hold the same codes. FP8 products on Hopper need both (both operands K-contiguous).
 *
 * \p destination may be NULL: only the transpose is written. Both must have the same dtype and the same scale pointers.
 * amax: that of \p destination or \p transposed, whichever is set, is raised; where both are, it must be the same
 * pointer. Stochastic rounding draws by the index in the source, so that both hold the same values. No overlap is
 * allowed.
 */
FP8CORE_API fp8core_status fp8core_cast_transpose(fp8core_context *context, const fp8core_cast_options *options,
                                                  const fp8core_tensor *source, const fp8core_tensor *destination,
                                                  const fp8core_tensor *transposed);

/** Raises \p amax (one float on the context's device) to the largest magnitude of \p source's values, as
 * fp8core_tensor.amax. */
FP8CORE_API fp8core_status fp8core_amax(fp8core_context *context, const fp8core_tensor *source, float *amax);

/**
 * Philox-4x32-10: the four 32-bit draws for \p counter under \p key. The generator behind FP8CORE_ROUND_STOCHASTIC, for
 * users who want the same stream. Thread-safe.
 */
FP8CORE_API void fp8core_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t draws[4]);

#ifdef __cplusplus
}
#endif

#endif
