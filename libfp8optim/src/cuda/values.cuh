// Vectors of stored elements in 32-bit words, and their values. A format that is known when the kernel is compiled
// costs no branch: every function here is inlined.
#ifndef FP8OPTIM_CUDA_VALUES_CUH
#define FP8OPTIM_CUDA_VALUES_CUH

#include "cuda/rules.cuh"
#include "internal.h"

#if !defined(FP8CORE_CUDA_EMULATION)
#  include <cuda_bf16.h>
#  include <cuda_fp16.h>
#endif

// Accesses of memory that is known to be global: a pointer that a kernel reads from a table may point anywhere, as far
// as the compiler knows.
template <typename Word>
static __device__ __forceinline__ Word fp8optim_read(const void *address) {
#if !defined(FP8CORE_CUDA_EMULATION)
  __builtin_assume(__isGlobal(address));
#endif
  return *(const Word *)address;
}

template <typename Word>
static __device__ __forceinline__ void fp8optim_write(void *address, Word word) {
#if !defined(FP8CORE_CUDA_EMULATION)
  __builtin_assume(__isGlobal(address));
#endif
  *(Word *)address = word;
}

// Two FP16 codes.
static __device__ __forceinline__ void fp8optim_decode_halves(uint32_t codes, float *low, float *high) {
#if defined(FP8CORE_CUDA_EMULATION)
  *low = fp8core_bits_float(fp8core_decode_bits(FP8CORE_FP16, codes & 0xffff));
  *high = fp8core_bits_float(fp8core_decode_bits(FP8CORE_FP16, codes >> 16));
#else
  __half2 halves;
  memcpy(&halves, &codes, sizeof(halves));
  const float2 values = __half22float2(halves);
  *low = values.x;
  *high = values.y;
#endif
}

// Two E4M3 codes in the low half of a word.
static __device__ __forceinline__ void fp8optim_decode_e4m3(uint32_t codes, float *low, float *high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(FP8CORE_NO_HARDWARE_FP8)
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, __NV_E4M3);
  fp8optim_decode_halves(halves.x | (uint32_t)halves.y << 16, low, high);
#else
  *low = fp8core_bits_float(fp8core_decode_finite<FP8CORE_E4M3>(codes & 0xff));
  *high = fp8core_bits_float(fp8core_decode_finite<FP8CORE_E4M3>(codes >> 8 & 0xff));
#endif
}

// The codes of two scaled values, as fp8optim_code() rounds them to nearest: in the low half of the word for 8 bits.
// NaNs keep no sign and no payload.
static __device__ __forceinline__ uint32_t fp8optim_encode_two(fp8core_dtype dtype, float low, float high) {
#if defined(FP8CORE_CUDA_EMULATION)
  return fp8optim_code(dtype, low, 0, 0) | fp8optim_code(dtype, high, 0, 0) << fp8core_format_of(dtype).bits;
#else
  if (dtype == FP8CORE_BF16) {
    const __nv_bfloat162 codes = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &codes, sizeof(word));
    return word;
  }
  if (dtype == FP8CORE_FP16) {
    const float most = 65504.0f;
    const __half2 codes = __floats2half2_rn(fmaxf(fminf(low, most), -most), fmaxf(fminf(high, most), -most));
    uint32_t word;
    memcpy(&word, &codes, sizeof(word));
    return word;
  }
#  if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(FP8CORE_NO_HARDWARE_FP8)
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE,
                                  dtype == FP8CORE_E4M3 ? __NV_E4M3 : __NV_E5M2);
#  else
  return fp8optim_code(dtype, low, 0, 0) | fp8optim_code(dtype, high, 0, 0) << 8;
#  endif
#endif
}

// The exact values of elements `at` (a multiple of 4) to `at` + 3 of a vector; NaNs keep no payload.
static __device__ __forceinline__ void fp8optim_decode_quad(fp8core_dtype dtype, const uint32_t *words, int at,
                                                            float (&values)[4]) {
  switch (dtype) {
  case FP8CORE_E4M3:
    fp8optim_decode_e4m3(words[at / 4] & 0xffff, &values[0], &values[1]);
    fp8optim_decode_e4m3(words[at / 4] >> 16, &values[2], &values[3]);
    break;
  case FP8CORE_E5M2:
    // The upper halves of FP16.
    fp8optim_decode_halves(__byte_perm(words[at / 4], 0, 0x1404), &values[0], &values[1]);
    fp8optim_decode_halves(__byte_perm(words[at / 4], 0, 0x3424), &values[2], &values[3]);
    break;
  case FP8CORE_BF16:
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      values[i] = fp8core_bits_float(words[(at + i) / 2] << 16);
      values[i + 1] = fp8core_bits_float(words[(at + i) / 2] & 0xffff0000u);
    }
    break;
  case FP8CORE_FP16:
#pragma unroll
    for (int i = 0; i < 4; i += 2) fp8optim_decode_halves(words[(at + i) / 2], &values[i], &values[i + 1]);
    break;
  case FP8CORE_FP32:
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = fp8core_bits_float(words[at + i]);
    break;
  }
}

static __device__ __forceinline__ void fp8optim_encode_quad(fp8core_dtype dtype, const float (&values)[4], int at,
                                                            uint32_t *words) {
  if (dtype == FP8CORE_FP32) {
#pragma unroll
    for (int i = 0; i < 4; i++) words[at + i] = fp8core_float_bits(values[i]);
  } else if (dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) words[(at + i) / 2] = fp8optim_encode_two(dtype, values[i], values[i + 1]);
  } else {
    words[at / 4] = fp8optim_encode_two(dtype, values[0], values[1]) | fp8optim_encode_two(dtype, values[2], values[3])
                                                                         << 16;
  }
}

static __device__ __forceinline__ int fp8optim_bytes(fp8core_dtype dtype) {
  return dtype == FP8CORE_FP32 ? 4 : dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16 ? 2 : 1;
}

// A vector of elements of `size` bytes, aligned to its bytes or to 16.
template <int Elements>
static __device__ __forceinline__ void fp8optim_load_words(int size, const unsigned char *address,
                                                           uint32_t (&words)[Elements]) {
  // Of each size, how many words.
  constexpr int four = Elements, two = Elements / 2, one = Elements / 4;
  const int count = size == 4 ? four : size == 2 ? two : one;
#pragma unroll
  for (int i = 0; i < Elements; i += 4) {
    if (i + 4 <= count) {
      const uint4 value = fp8optim_read<uint4>(address + 4 * i);
      words[i] = value.x;
      words[i + 1] = value.y;
      words[i + 2] = value.z;
      words[i + 3] = value.w;
    } else if (i + 2 == count) {
      const uint2 value = fp8optim_read<uint2>(address + 4 * i);
      words[i] = value.x;
      words[i + 1] = value.y;
    } else if (i + 1 == count) {
      words[i] = fp8optim_read<uint32_t>(address + 4 * i);
    }
  }
}

template <int Elements>
static __device__ __forceinline__ void fp8optim_store_words(int size, unsigned char *address,
                                                            const uint32_t (&words)[Elements]) {
  constexpr int four = Elements, two = Elements / 2, one = Elements / 4;
  const int count = size == 4 ? four : size == 2 ? two : one;
#pragma unroll
  for (int i = 0; i < Elements; i += 4) {
    if (i + 4 <= count)
      fp8optim_write(address + 4 * i, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    else if (i + 2 == count)
      fp8optim_write(address + 4 * i, make_uint2(words[i], words[i + 1]));
    else if (i + 1 == count)
      fp8optim_write(address + 4 * i, words[i]);
  }
}

static __device__ __forceinline__ uint32_t fp8optim_load_one(int size, const unsigned char *address) {
  return size == 4   ? fp8optim_read<uint32_t>(address)
         : size == 2 ? fp8optim_read<uint16_t>(address)
                     : fp8optim_read<uint8_t>(address);
}

// The gradient of one chunk: element i of it, whatever the rows.
typedef struct fp8optim_gradient_view {
  // Of the row that the chunk starts in; of the chunk's first element where all rows follow without a gap.
  const unsigned char *start;
  int64_t column;
  // INT64_MAX without gaps.
  int64_t row_length;
  int64_t row_stride;
  int size;
  // Vectors of the kernel's size never cross a row's end, and are aligned.
  bool vectors;
  // And all follow each other.
  bool contiguous;
} fp8optim_gradient_view;

static __device__ __forceinline__ fp8optim_gradient_view fp8optim_view_gradient(const fp8optim_gradient &gradient,
                                                                                int64_t row_length, int64_t first,
                                                                                int vector) {
  fp8optim_gradient_view view;
  view.size = fp8optim_bytes(gradient.dtype);
  const int alignment = vector * view.size < 16 ? vector * view.size : 16;
  view.start = (const unsigned char *)gradient.data;
  view.row_stride = gradient.row_stride;
  view.column = 0;
  if (gradient.row_stride == row_length) {
    view.row_length = INT64_MAX;
    view.start += first * view.size;
    view.vectors = (uintptr_t)view.start % (unsigned)alignment == 0;
    view.contiguous = view.vectors;
  } else {
    // Chunks start at multiples of every vector.
    view.row_length = row_length;
    view.contiguous = false;
    view.start += first / row_length * gradient.row_stride * view.size;
    view.column = first % row_length;
    view.vectors = (uintptr_t)gradient.data % (unsigned)alignment == 0 &&
                   gradient.row_stride * view.size % alignment == 0 && row_length % vector == 0;
  }
  return view;
}

static __device__ __forceinline__ const unsigned char *fp8optim_gradient_at(const fp8optim_gradient_view &view, int i,
                                                                            int64_t *column) {
  *column = view.column + i;
  if (*column < view.row_length) return view.start + *column * view.size;
  int64_t rows;
  // Rows that a chunk crosses are short, but for the first.
  if (*column <= UINT32_MAX)
    rows = (uint32_t)*column / (uint32_t)view.row_length;
  else
    rows = *column / view.row_length;
  *column -= rows * view.row_length;
  return view.start + (rows * view.row_stride + *column) * view.size;
}

template <int Elements>
struct fp8optim_words {
  uint32_t of[Elements];
};

// Elements i to i + valid of a chunk's gradient, whatever its rows and address; zeros beyond. Not inlined: where it is
// called is rare.
template <int Elements>
static __device__ __noinline__ fp8optim_words<Elements> fp8optim_gather_gradient(const fp8optim_gradient_view &view,
                                                                                 int i, int valid) {
  fp8optim_words<Elements> words;
  int64_t column;
  const unsigned char *address = fp8optim_gradient_at(view, i, &column);
  if (view.vectors && valid >= Elements) {
    fp8optim_load_words<Elements>(view.size, address, words.of);
    return words;
  }
#pragma unroll
  for (int j = 0; j < Elements; j++) words.of[j] = 0;
#pragma unroll
  for (int j = 0; j < Elements; j++) {
    if (j >= valid) continue;
    const uint32_t code = fp8optim_load_one(view.size, address);
    if (view.size == 4)
      words.of[j] = code;
    else if (view.size == 2)
      words.of[j / 2] |= code << (16 * (j % 2));
    else
      words.of[j / 4] |= code << (8 * (j % 4));
    address += view.size;
    if (++column == view.row_length) {
      address += (view.row_stride - view.row_length) * view.size;
      column = 0;
    }
  }
  return words;
}

static __device__ __forceinline__ float fp8optim_scale_inverse_of(const fp8optim_gradient &gradient) {
  return gradient.scale_inverse ? *gradient.scale_inverse : 1.0f;
}

#endif
