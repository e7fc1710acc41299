// Portable casts: the rule of numerics.h, compiled once a pair of formats so that the formats' constants fold.
#include <string.h>

#include "cast.h"
#include "cast_table.h"
#include "numerics.h"

static inline uint32_t load_code(const unsigned char *source, int64_t index, size_t bytes) {
  if (bytes == 1) return source[index];
  if (bytes == 2) {
    uint16_t code;
    memcpy(&code, source + index * 2, sizeof(code));
    return code;
  }
  uint32_t code;
  memcpy(&code, source + index * 4, sizeof(code));
  return code;
}

static inline void store_code(unsigned char *destination, int64_t index, size_t bytes, uint32_t code) {
  if (bytes == 1) {
    destination[index] = (unsigned char)code;
  } else if (bytes == 2) {
    const uint16_t narrow = (uint16_t)code;
    memcpy(destination + index * 2, &narrow, sizeof(narrow));
  } else {
    memcpy(destination + index * 4, &code, sizeof(code));
  }
}

static inline size_t bytes_of(fp8core_dtype dtype) { return (size_t)fp8core_format_of(dtype).bits / 8; }

static inline __attribute__((always_inline)) void cast_run(fp8core_dtype source_dtype, fp8core_dtype destination_dtype,
                                                           int stochastic, const fp8core_cast_parameters *parameters,
                                                           const unsigned char *source, unsigned char *destination,
                                                           int64_t elements, uint64_t first_element,
                                                           fp8core_cast_totals *totals) {
  const fp8core_cast_parameters p = *parameters;
  fp8core_cast_totals sums = *totals;
  uint32_t draws[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < elements; i++) {
    const uint64_t element = first_element + (uint64_t)i;
    // One block of the generator serves four elements.
    if (stochastic && (i == 0 || element % 4 == 0)) fp8core_draw_block(p.seed, p.tensor_id, p.step, element / 4, draws);
    const uint32_t draw = stochastic ? draws[element % 4] : 0;
    const fp8core_cast_result result =
      fp8core_cast_element(load_code(source, i, bytes_of(source_dtype)), source_dtype, p.scale_inverse,
                           destination_dtype, p.scale, stochastic, draw, p.saturate);
    store_code(destination, i, bytes_of(destination_dtype), result.code);
    sums.amax = result.magnitude > sums.amax ? result.magnitude : sums.amax;
    sums.saturated += result.saturated;
    sums.flushed_to_zero += result.flushed_to_zero;
    sums.nonfinite += result.nonfinite;
  }
  *totals = sums;
}

static inline __attribute__((always_inline)) void amax_run(fp8core_dtype source_dtype, float scale_inverse,
                                                           const unsigned char *source, int64_t elements,
                                                           fp8core_cast_totals *totals) {
  uint32_t amax = totals->amax;
  for (int64_t i = 0; i < elements; i++) {
    const uint32_t bits = fp8core_decode_bits(source_dtype, load_code(source, i, bytes_of(source_dtype)));
    const uint32_t magnitude = fp8core_float_bits(fp8core_bits_float(bits) * scale_inverse) & FP8CORE_F32_MAGNITUDE;
    amax = magnitude > amax ? magnitude : amax;
  }
  totals->amax = amax;
}

FP8CORE_CAST_KERNELS

static inline __attribute__((always_inline)) void transpose_tile(size_t bytes, const unsigned char *source,
                                                                 int64_t source_stride, unsigned char *destination,
                                                                 int64_t destination_stride) {
  for (int64_t i = 0; i < FP8CORE_TILE; i++)
    for (int64_t j = 0; j < FP8CORE_TILE; j++)
      memcpy(destination + i * destination_stride + j * (int64_t)bytes, source + j * source_stride + i * (int64_t)bytes,
             bytes);
}

static void transpose_1(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                        int64_t destination_stride, int streaming) {
  (void)streaming;
  transpose_tile(1, source, source_stride, destination, destination_stride);
}

void fp8core_transpose_2(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                         int64_t destination_stride, int streaming) {
  (void)streaming;
  transpose_tile(2, source, source_stride, destination, destination_stride);
}

void fp8core_transpose_4(const unsigned char *source, int64_t source_stride, unsigned char *destination,
                         int64_t destination_stride, int streaming) {
  (void)streaming;
  transpose_tile(4, source, source_stride, destination, destination_stride);
}

static void copy(unsigned char *destination, const unsigned char *source, int64_t bytes) {
  memcpy(destination, source, (size_t)bytes);
}

const fp8core_cast_kernels fp8core_cast_scalar = {
  .cast = FP8CORE_CAST_TABLE,
  .amax = FP8CORE_AMAX_TABLE,
  .transpose = {transpose_1, fp8core_transpose_2, fp8core_transpose_4},
  .copy = copy,
};
