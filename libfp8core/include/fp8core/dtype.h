/** \file
 * Floating-point formats and the conversion of single values.
 *
 * E4M3 and E5M2 as in the OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5: E4M3 has no infinity, one NaN
 * mantissa (S.1111.111) and a maximum of 448; E5M2 follows IEEE 754 with infinities and a maximum of 57344.
 * BF16 is the upper half of an IEEE binary32; FP16 is binary16 and FP32 binary32 of IEEE 754-2019, section 3.4.
 * All calls of this header are pure functions: they cannot fail, and may be made from any thread at any time.
 */
#ifndef FP8CORE_DTYPE_H
#define FP8CORE_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8core_dtype {
  FP8CORE_E4M3 = 0,
  FP8CORE_E5M2 = 1,
  FP8CORE_BF16 = 2,
  FP8CORE_FP16 = 3,
  FP8CORE_FP32 = 4
} fp8core_dtype;

#define FP8CORE_DTYPE_COUNT 5

/** Bytes of one element: 1, 1, 2, 2, 4; 0 for a value outside the enum. Thread-safe. */
FP8CORE_API size_t fp8core_dtype_size(fp8core_dtype dtype);

/** "e4m3", "e5m2", "bf16", "fp16", "fp32"; "unknown" for a value outside the enum. Static storage; thread-safe. */
FP8CORE_API const char *fp8core_dtype_name(fp8core_dtype dtype);

/** Largest finite value: 448, 57344, 0x1.FEp127, 65504, FLT_MAX; 0 for a value outside the enum. Thread-safe. */
FP8CORE_API float fp8core_dtype_max(fp8core_dtype dtype);

/** Smallest positive (subnormal) value: 2^-9, 2^-16, 2^-133, 2^-24, 2^-149; 0 for a value outside the enum.
 * Thread-safe. */
FP8CORE_API float fp8core_dtype_min_subnormal(fp8core_dtype dtype);

/**
 * Value of one element, exactly. A NaN gives the quiet NaN of the same sign.
 *
 * \param dtype one outside the enum gives NaN.
 * \param bits the element in the low 8, 16 or 32 bits; the others are ignored.
 *
 * Source: OFP8 1.0 section 5.1; IEEE 754-2019 section 3.4. Thread-safe.
 */
FP8CORE_API float fp8core_decode(fp8core_dtype dtype, uint32_t bits);

/**
 * Bits of \p value rounded to nearest, ties to even, in \p dtype; in the low 8, 16 or 32 bits, the others 0.
 * NaN stays NaN of the same sign, zero keeps its sign.
 *
 * \param dtype one outside the enum gives 0.
 * \param value without scale: the caller multiplies.
 * \param saturate what becomes of infinities, and of finite values that round beyond the maximum. Non-zero: the maximum
 *        of their sign. Zero: infinity, or NaN in E4M3, which has no infinity.
 *
 * Source: OFP8 1.0 section 5.2 (both modes); IEEE 754-2019 section 4.3.1 (rounding). Thread-safe.
 */
FP8CORE_API uint32_t fp8core_encode(fp8core_dtype dtype, float value, int saturate);

#ifdef __cplusplus
}
#endif

#endif
