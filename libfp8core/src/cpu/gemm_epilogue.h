// The epilogue in vectors, for the tiers that define LANES (16 or 8) before they include this file. Written with the
// vector extension of gcc and clang, so that every tier has the same operations in the same order as the scalar rules:
// all but GELU and its derivative give the same bits (see gelu() below for their bound).
#ifndef FP8CORE_CPU_GEMM_EPILOGUE_H
#define FP8CORE_CPU_GEMM_EPILOGUE_H

#include <float.h>

#include "cpu/gemm.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float v_float __attribute__((vector_size(LANES * 4)));
typedef int32_t v_int __attribute__((vector_size(LANES * 4)));
typedef uint32_t v_uint __attribute__((vector_size(LANES * 4)));
typedef uint16_t v_half __attribute__((vector_size(LANES * 2)));
typedef uint8_t v_byte __attribute__((vector_size(LANES)));

ALWAYS_INLINE v_float splat(float value) { return value - (v_float){0}; }

#include "cpu/vector_exp.h"

ALWAYS_INLINE v_uint splat_bits(uint32_t value) { return value + (v_uint){0}; }
ALWAYS_INLINE v_float select_float(v_int mask, v_float yes, v_float no) {
  return (v_float)(((v_int)yes & mask) | ((v_int)no & ~mask));
}
ALWAYS_INLINE v_uint select_bits(v_int mask, v_uint yes, v_uint no) {
  return (yes & (v_uint)mask) | (no & ~(v_uint)mask);
}

// `count` elements as FP32 values; the lanes beyond are 0.
ALWAYS_INLINE v_float load_values(fp8core_dtype dtype, const unsigned char *data, int count) {
  v_float value = {0};
  v_half halves = {0};
  v_byte bytes = {0};
  const int whole = count == LANES;
  if (dtype == FP8CORE_FP32) {
    memcpy(&value, data, whole ? sizeof(value) : (size_t)count * 4);
    return value;
  }
  if (dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2) {
    memcpy(&bytes, data, whole ? sizeof(bytes) : (size_t)count);
    const v_uint code = __builtin_convertvector(bytes, v_uint);
    const v_uint sign = (code & 0x80) << 24;
    if (dtype == FP8CORE_E4M3) {
      // Rebias by a product, which puts subnormals right too: they are exact at every step.
      const v_uint magnitude = (v_uint)((v_float)((code & 0x7f) << 20) * splat(0x1p120f));
      return (v_float)(sign |
                       select_bits((v_int)((code & 0x7f) == 0x7f), splat_bits(FP8CORE_F32_QUIET_NAN), magnitude));
    }
    halves = __builtin_convertvector(code << 8, v_half);
  } else {
    memcpy(&halves, data, whole ? sizeof(halves) : (size_t)count * 2);
  }
  const v_uint code = __builtin_convertvector(halves, v_uint);
  if (dtype == FP8CORE_BF16) return (v_float)(code << 16);
  const v_uint magnitude = (v_uint)((v_float)((code & 0x7fff) << 13) * splat(0x1p112f));
  const v_uint special = ((code & 0x7fff) << 13) | FP8CORE_F32_INFINITY;
  return (v_float)((code & 0x8000) << 16 | select_bits((v_int)((code & 0x7c00) == 0x7c00), special, magnitude));
}

// fp8core_store_element() for `count` values.
ALWAYS_INLINE void store_values(fp8core_dtype dtype, unsigned char *data, int count, v_float value) {
  const int whole = count == LANES;
  const v_uint bits = (v_uint)value;
  const v_uint magnitude = bits & FP8CORE_F32_MAGNITUDE;
  const v_int is_nan = (v_int)magnitude > (int32_t)FP8CORE_F32_INFINITY;
  if (dtype == FP8CORE_FP32) {
    const v_uint canonical = (bits & FP8CORE_F32_SIGN) | FP8CORE_F32_QUIET_NAN;
    const v_uint code = select_bits(is_nan, canonical, bits);
    memcpy(data, &code, whole ? sizeof(code) : (size_t)count * 4);
    return;
  }
  if (dtype == FP8CORE_BF16) {
    const v_uint round = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    const v_half code =
      __builtin_convertvector((bits >> 16 & 0x8000) | select_bits(is_nan, splat_bits(0x7fc0), round), v_half);
    memcpy(data, &code, whole ? sizeof(code) : (size_t)count * 2);
    return;
  }
  const fp8core_format format = fp8core_format_of(dtype);
  const int shift = 23 - format.mantissa_bits;
  const uint32_t min_normal = (uint32_t)(format.min_exponent + 127) << 23;
  // Adding a power of two whose unit is the smallest subnormal rounds to multiples of that.
  const float aligned = fp8core_bits_float((uint32_t)(format.min_exponent - format.mantissa_bits + 23 + 127) << 23);
  const v_uint rebiased = magnitude - (min_normal - (UINT32_C(1) << 23));
  const v_uint normal = (rebiased + ((UINT32_C(1) << (shift - 1)) - 1) + (rebiased >> shift & 1)) >> shift;
  const v_uint subnormal = (v_uint)((v_float)magnitude + splat(aligned)) - fp8core_float_bits(aligned);
  v_uint code = select_bits((v_int)magnitude < (int32_t)min_normal, subnormal, normal);
  const int saturate = dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2;
  code = select_bits((v_int)magnitude > (int32_t)format.max_rounding_to_max,
                     splat_bits(saturate ? format.max_code : format.overflow_code), code);
  code = select_bits(is_nan, splat_bits(format.nan_code), code);
  if (saturate) {
    const v_byte narrow = __builtin_convertvector(code | (bits >> 24 & 0x80), v_byte);
    memcpy(data, &narrow, whole ? sizeof(narrow) : (size_t)count);
  } else {
    const v_half narrow = __builtin_convertvector(code | (bits >> 16 & 0x8000), v_half);
    memcpy(data, &narrow, whole ? sizeof(narrow) : (size_t)count * 2);
  }
}

// exp(x): infinity above 88.7, about 1e-38 below -87.
ALWAYS_INLINE v_float exponential(v_float x) {
  const v_float limited =
    select_float(x < splat(-87.0f), splat(-87.0f), select_float(x > splat(88.7f), splat(88.7f), x));
  v_int exponent;
  const v_float p = fp8core_vector_exp(limited, &exponent);
  // 2^n in two factors, as n may be 128.
  const v_int half = exponent >> 1;
  const v_float scaled = p * (v_float)((half + 127) << 23) * (v_float)((exponent - half + 127) << 23);
  return select_float(x > splat(88.7f), splat(INFINITY), scaled);
}

// exp(-2u) with the u = sqrt(2/pi) (x + 0.044715 x^3) of GELU: (1 + tanh u) / 2 is 1 / (1 + exp(-2u)).
ALWAYS_INLINE v_float gelu_exponential(v_float x) {
  const v_float u = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
  return exponential(splat(-2.0f) * u);
}

// x / (1 + exp(-2u)). Differs from the scalar rule by at most 2^-21 |x| (checked over all magnitudes by check_gemm);
// near -1 of the tanh it is the more exact one, as nothing cancels.
ALWAYS_INLINE v_float gelu(v_float x) {
  // Minus infinity has the limit -0, as every large negative number has.
  const v_float finite = select_float(x < splat(-FLT_MAX), splat(-FLT_MAX), x);
  return finite / (splat(1.0f) + gelu_exponential(finite));
}

// Differs from the scalar rule by at most 2^-20.
ALWAYS_INLINE v_float gelu_derivative(v_float x) {
  const v_float e = gelu_exponential(x);
  const v_float s = splat(1.0f) / (splat(1.0f) + e);
  const v_float slope =
    x * (splat(2.0f) * s * (e * s)) * splat(0.7978845608f) * (splat(1.0f) + splat(3.0f * 0.044715f) * x * x);
  const v_float sum = s + slope;
  const v_float inside = select_float(sum == splat(0.0f), splat(FP8CORE_GELU_LEAST), sum);
  return select_float(x > splat(FP8CORE_GELU_FLAT), splat(1.0f),
                      select_float(x < splat(-FP8CORE_GELU_FLAT), splat(0.0f), inside));
}

ALWAYS_INLINE v_uint maximum_bits(v_uint a, v_float value) {
  const v_uint magnitude = (v_uint)value & FP8CORE_F32_MAGNITUDE;
  return select_bits((v_int)magnitude > (v_int)a, magnitude, a);
}

ALWAYS_INLINE void raise_maximum(uint32_t *maximum, v_uint magnitudes) {
  uint32_t largest = *maximum;
  for (int lane = 0; lane < LANES; lane++) largest = magnitudes[lane] > largest ? magnitudes[lane] : largest;
  *maximum = largest;
}

// What follows is compiled once for each combination of constant arguments: most products have no more than a bias.
ALWAYS_INLINE void finish_with(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile,
                               fp8core_gemm_maxima *maxima, int tile_columns, fp8core_dtype d_dtype, int plain) {
  const int64_t d_size = (int64_t)fp8core_dtype_size(d_dtype);
  const int64_t c_size = (int64_t)fp8core_dtype_size(epilogue->c_dtype);
  const int64_t auxiliary_size = (int64_t)fp8core_dtype_size(epilogue->auxiliary_dtype);
  const fp8core_epilogue activation = plain ? FP8CORE_EPILOGUE_NONE : epilogue->activation;
  const v_float factor = splat(epilogue->factor);
  const v_float d_scale = splat(epilogue->d_scale);
  v_uint largest = {0};
  v_uint largest_auxiliary = {0};
  for (int j = 0; j < tile->columns; j += LANES) {
    const int count = tile->columns - j < LANES ? tile->columns - j : LANES;
    const int64_t column = tile->column + j;
    const v_float bias =
      epilogue->bias ? load_values(FP8CORE_FP32, (const unsigned char *)(epilogue->bias + column), count) : splat(0.0f);
    v_float column_sum = {0};
    if (!plain && tile->column_sums)
      column_sum = load_values(FP8CORE_FP32, (const unsigned char *)(tile->column_sums + j), count);
    for (int i = 0; i < tile->rows; i++) {
      const int64_t row = tile->row + i;
      v_float value;
      memcpy(&value, tile->sums + i * tile_columns + j, sizeof(value));
      value = value * factor;
      if (!plain && epilogue->c) {
        const v_float c =
          load_values(epilogue->c_dtype, epilogue->c + (row * epilogue->c_stride + column) * c_size, count);
        value = value + splat(epilogue->beta) * (c * splat(epilogue->c_scale_inverse));
      }
      if (epilogue->bias) value = value + bias;
      // Lanes beyond the columns hold products of padding, which are not zero after an infinite factor or a NaN of C's.
      if (count < LANES) {
        v_int lanes;
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
        value = select_float(lanes < count, value, splat(0.0f));
      }
      if (!plain && activation != FP8CORE_EPILOGUE_NONE) {
        unsigned char *auxiliary = epilogue->auxiliary;
        if (auxiliary) auxiliary += (row * epilogue->auxiliary_stride + column) * auxiliary_size;
        if (activation == FP8CORE_EPILOGUE_RELU || activation == FP8CORE_EPILOGUE_GELU) {
          if (auxiliary) {
            largest_auxiliary = maximum_bits(largest_auxiliary, value);
            store_values(epilogue->auxiliary_dtype, auxiliary, count, value * splat(epilogue->auxiliary_scale));
          }
          value =
            activation == FP8CORE_EPILOGUE_GELU ? gelu(value) : select_float(value < splat(0.0f), splat(0.0f), value);
        } else {
          const v_float x =
            load_values(epilogue->auxiliary_dtype, auxiliary, count) * splat(epilogue->auxiliary_scale_inverse);
          value = activation == FP8CORE_EPILOGUE_GELU_BACKWARD ? value * gelu_derivative(x)
                                                               : select_float(x > splat(0.0f), value, splat(0.0f));
        }
      }
      if (!plain && tile->column_sums) column_sum = column_sum + value;
      largest = maximum_bits(largest, value);
      store_values(d_dtype, epilogue->d + (row * epilogue->d_stride + column) * d_size, count, value * d_scale);
    }
    if (!plain && tile->column_sums) memcpy(tile->column_sums + j, &column_sum, (size_t)count * sizeof(float));
  }
  raise_maximum(&maxima->d, largest);
  if (!plain) raise_maximum(&maxima->auxiliary, largest_auxiliary);
}

ALWAYS_INLINE void finish_tile(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile,
                               fp8core_gemm_maxima *maxima, int tile_columns) {
  if (!epilogue->c && !tile->column_sums && epilogue->activation == FP8CORE_EPILOGUE_NONE) {
    switch (epilogue->d_dtype) {
    case FP8CORE_E4M3: finish_with(epilogue, tile, maxima, tile_columns, FP8CORE_E4M3, 1); return;
    case FP8CORE_E5M2: finish_with(epilogue, tile, maxima, tile_columns, FP8CORE_E5M2, 1); return;
    case FP8CORE_BF16: finish_with(epilogue, tile, maxima, tile_columns, FP8CORE_BF16, 1); return;
    case FP8CORE_FP16: finish_with(epilogue, tile, maxima, tile_columns, FP8CORE_FP16, 1); return;
    case FP8CORE_FP32: finish_with(epilogue, tile, maxima, tile_columns, FP8CORE_FP32, 1); return;
    }
  }
  finish_with(epilogue, tile, maxima, tile_columns, epilogue->d_dtype, 0);
}

#endif
