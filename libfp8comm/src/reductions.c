// Elements may lie at any address, so they are read and written by memcpy(), which costs nothing where it is aligned.
#include "reductions.h"

#include <string.h>

#include "reduction_rules.h"

static inline float from_bf16(const void *in, size_t index) {
  uint16_t code;
  memcpy(&code, (const unsigned char *)in + 2 * index, 2);
  return fp8comm_widen_rule(FP8CORE_BF16, code);
}

static inline float from_fp16(const void *in, size_t index) {
  uint16_t code;
  memcpy(&code, (const unsigned char *)in + 2 * index, 2);
  return fp8comm_widen_rule(FP8CORE_FP16, code);
}

#define READ(name, type)                                                                                               \
  static inline type from_##name(const void *in, size_t index) {                                                       \
    type value;                                                                                                        \
    memcpy(&value, (const unsigned char *)in + sizeof(value) * index, sizeof(value));                                  \
    return value;                                                                                                      \
  }
READ(fp32, float)
READ(fp64, double)
READ(int64, int64_t)
READ(byte, uint8_t)

// Of each format, how it gets into an accumulator of `type` and is combined there.
#define FIRST(name, type)                                                                                              \
  static fp8core_status first_##name(void *data, void *sum, const void *in, size_t offset, size_t count) {             \
    (void)data, (void)offset;                                                                                          \
    for (size_t i = 0; i < count; i++) {                                                                               \
      const type value = from_##name(in, i);                                                                           \
      memcpy((unsigned char *)sum + sizeof(value) * i, &value, sizeof(value));                                         \
    }                                                                                                                  \
    return FP8CORE_OK;                                                                                                 \
  }
#define ADD(name, type, operation, wide)                                                                               \
  static fp8core_status operation##_of_##name(void *data, void *sum, const void *in, size_t offset, size_t count) {    \
    (void)data, (void)offset;                                                                                          \
    for (size_t i = 0; i < count; i++) {                                                                               \
      const type value = fp8comm_##operation##_##wide(from_##wide(sum, i), from_##name(in, i));                        \
      memcpy((unsigned char *)sum + sizeof(value) * i, &value, sizeof(value));                                         \
    }                                                                                                                  \
    return FP8CORE_OK;                                                                                                 \
  }
FIRST(bf16, float)
FIRST(fp16, float)
ADD(bf16, float, sum, fp32)
ADD(bf16, float, min, fp32)
ADD(bf16, float, max, fp32)
ADD(fp16, float, sum, fp32)
ADD(fp16, float, min, fp32)
ADD(fp16, float, max, fp32)
ADD(fp32, float, sum, fp32)
ADD(fp32, float, min, fp32)
ADD(fp32, float, max, fp32)
ADD(fp64, double, sum, fp64)
ADD(fp64, double, min, fp64)
ADD(fp64, double, max, fp64)
ADD(int64, int64_t, sum, int64)
ADD(int64, int64_t, min, int64)
ADD(int64, int64_t, max, int64)
ADD(byte, uint8_t, min, byte)
ADD(byte, uint8_t, max, byte)

#define NARROW(name, dtype)                                                                                            \
  static fp8core_status last_##name(void *data, void *out, const void *sum, size_t offset, size_t count) {             \
    (void)data, (void)offset;                                                                                          \
    for (size_t i = 0; i < count; i++) {                                                                               \
      const uint16_t stored = fp8comm_narrow_rule(dtype, from_fp32(sum, i));                                           \
      memcpy((unsigned char *)out + 2 * i, &stored, 2);                                                                \
    }                                                                                                                  \
    return FP8CORE_OK;                                                                                                 \
  }
NARROW(bf16, FP8CORE_BF16)
NARROW(fp16, FP8CORE_FP16)

#define COPY(bytes)                                                                                                    \
  static fp8core_status copy_##bytes(void *data, void *out, const void *in, size_t offset, size_t count) {             \
    (void)data, (void)offset;                                                                                          \
    if (out != in) memcpy(out, in, (bytes)*count);                                                                     \
    return FP8CORE_OK;                                                                                                 \
  }
COPY(1)
COPY(4)
COPY(8)

typedef fp8core_status (*reduction_function)(void *data, void *sum, const void *in, size_t offset, size_t count);

fp8core_status fp8comm_find_reducer(fp8comm_dtype dtype, fp8comm_reduction reduction, fp8comm_reducer *reducer) {
  // Sum, minimum, maximum.
  static const reduction_function bf16[] = {sum_of_bf16, min_of_bf16, max_of_bf16};
  static const reduction_function fp16[] = {sum_of_fp16, min_of_fp16, max_of_fp16};
  static const reduction_function fp32[] = {sum_of_fp32, min_of_fp32, max_of_fp32};
  static const reduction_function fp64[] = {sum_of_fp64, min_of_fp64, max_of_fp64};
  static const reduction_function int64[] = {sum_of_int64, min_of_int64, max_of_int64};
  static const reduction_function byte[] = {NULL, min_of_byte, max_of_byte};
  memset(reducer, 0, sizeof(*reducer));
  reducer->element = fp8comm_dtype_size(dtype);
  reducer->accumulator = reducer->element;
  switch (dtype) {
  case FP8COMM_BF16:
    reducer->accumulator = 4;
    reducer->first = first_bf16;
    reducer->add = bf16[reduction];
    reducer->last = last_bf16;
    break;
  case FP8COMM_FP16:
    reducer->accumulator = 4;
    reducer->first = first_fp16;
    reducer->add = fp16[reduction];
    reducer->last = last_fp16;
    break;
  case FP8COMM_FP32:
    reducer->first = reducer->last = copy_4;
    reducer->add = fp32[reduction];
    break;
  case FP8COMM_FP64:
    reducer->first = reducer->last = copy_8;
    reducer->add = fp64[reduction];
    break;
  case FP8COMM_INT64:
    reducer->first = reducer->last = copy_8;
    reducer->add = int64[reduction];
    break;
  case FP8COMM_BYTE:
    reducer->first = reducer->last = copy_1;
    reducer->add = byte[reduction];
    break;
  case FP8COMM_E4M3:
  case FP8COMM_E5M2: break;
  }
  if (reducer->add) return FP8CORE_OK;
  if (dtype == FP8COMM_BYTE)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "bytes have no sum, expected min or max");
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                "%s has no reduction here, as its values need scales; see fp8comm/gradient.h",
                                fp8comm_dtype_name(dtype));
}
