/** \file
 * Bulk casts between all formats, with scale, amax and counts in one pass.
 *
 * The rule, for each element x of the source (numerics.md, "Casts"):
 *   value = x * source.scale_inverse             (FP32)
 *   stored = round(value * destination.scale)    (FP32 product, then one rounding to the destination's format)
 * The scalar rule is fp8core_encode() and fp8core_decode(); every tier and CUDA give the same bits, on any number of
 * threads.
 *
 * Sources: OFP8 1.0 section 5.2 (conversion, both modes of saturation); IEEE 754-2019 section 4.3.1 (rounding); Philox
 * for stochastic rounding (below). What they leave open is told in numerics.md, "Casts".
 *
 * Common to all calls:
 * - Tensors: any dtype, 0 to 4 dimensions, any row stride, on the context's device. Data needs no alignment on the CPU,
 *   that of its elements on CUDA; the scale, amax and statistics pointers need that of their types on both.
 * - The largest magnitude of the values, before scaling, raises the amax (see fp8core_tensor); no elements leave it as
 *   it is, and the statistics too.
 * - Threads, order on CUDA and common errors: context.h. One thread at a time for a context.
 * - FP8CORE_ERROR_INVALID_ARGUMENT: a pointer that must be given is NULL, a tensor is not valid (see
 *   fp8core_tensor_validate()) or not on the context's device, a pointer is not aligned, or what the call adds.
 *   FP8CORE_ERROR_DEVICE: CUDA cannot launch the kernel, or reports that earlier work failed.
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

/** Counts of one or more casts. Every count is added to, so that several calls accumulate; the owner sets them to 0.
 * In the memory of the destination's device, at a multiple of 8 bytes. */
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
  /** sizeof(fp8core_cast_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
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
 * Casts \p source into \p destination, any format to any. Writes the data of \p destination (gaps between rows
 * untouched), raises its amax, adds to the statistics. No elements: success, nothing read or written.
 *
 * In place (same data pointer) where the destination's element is no wider than the source's, and both tensors are
 * contiguous or both have rows that start at the same bytes. Any other overlap is refused, also that of an amax or the
 * statistics with data or scales (see fp8core_tensor); columns of one buffer that do not meet, its rows being equally
 * far apart, are none.
 *
 * \param options NULL for the defaults. Its \p statistics are on the context's device.
 * \param source read with its scale_inverse.
 * \param destination of the source's dimensions and shape; its row stride may differ. Written with its scale.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT also when the shapes differ, the tensors overlap otherwise than allowed, the
 *         rounding is outside its enum, or first_element plus the elements exceeds 2^64 - 1;
 *         FP8CORE_ERROR_VERSION_MISMATCH for options of a wrong size; FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_cast(fp8core_context *context, const fp8core_cast_options *options,
                                        const fp8core_tensor *source, const fp8core_tensor *destination);

/**
 * Casts a matrix in one read into a matrix of the same shape and its transpose; both hold the same codes, those of
 * fp8core_cast(). Writes the data of both (gaps between rows untouched), raises the amax, adds to the statistics once.
 * No elements: success, nothing read or written.
 *
 * FP8 products on Hopper take both operands with K contiguous only (cuBLASLt), so that a backward pass needs the
 * transposes of what the forward pass multiplied.
 *
 * \param options NULL for the defaults. Stochastic rounding draws by the index in the source.
 * \param source [rows, columns], any row stride; read with its scale_inverse.
 * \param destination [rows, columns]; NULL: only the transpose is written.
 * \param transposed [columns, rows], of the dtype, scale and scale_inverse pointers of \p destination. The amax of one
 *        of the two is raised, whichever is set; where both are, it must be the same pointer.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT also when \p transposed is NULL, the source or the transpose has not two
 *         dimensions, shapes do not fit, the outputs' dtypes or pointers differ, the spans of any two of the three
 *         tensors overlap (there is no cast in place), or an option is out of range as in fp8core_cast();
 *         FP8CORE_ERROR_VERSION_MISMATCH for options of a wrong size; FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_cast_transpose(fp8core_context *context, const fp8core_cast_options *options,
                                                  const fp8core_tensor *source, const fp8core_tensor *destination,
                                                  const fp8core_tensor *transposed);

/**
 * Raises \p amax to the largest magnitude of the source's values, as fp8core_tensor.amax: an infinity or a NaN among
 * them wins. No elements: success, \p amax as it was. It is never lowered: set it to 0 for the amax of this tensor
 * alone.
 *
 * \param source any dtype, shape and row stride; its scale_inverse is applied. Its scale and amax are not used.
 * \param amax one float on the context's device, at a multiple of 4 bytes.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p amax is NULL, or as told above; FP8CORE_ERROR_DEVICE.
 */
FP8CORE_API fp8core_status fp8core_amax(fp8core_context *context, const fp8core_tensor *source, float *amax);

/**
 * Philox-4x32-10: the four 32-bit draws for \p counter under \p key, written to \p draws, which may be \p counter.
 * The generator behind FP8CORE_ROUND_STOCHASTIC, for users who want the same stream. Host memory; cannot fail.
 * Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3. Thread-safe.
 */
FP8CORE_API void fp8core_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t draws[4]);

#ifdef __cplusplus
}
#endif

#endif
