/** \file
 * Tensors in files: what a safetensors or NumPy file, or plain bytes, hold and where; and their values as FP32.
 *
 * A description is read and checked whole before anything of the data is: once a reader has succeeded, every tensor
 * lies within the file and has as many bytes as its shape and dtype ask for. Malformed files give
 * FP8CORE_ERROR_CORRUPT_DATA and an fp8core_last_error() that names the tensor or the field, what it holds and what was
 * expected.
 */
#ifndef FP8LM_TENSOR_FILE_H
#define FP8LM_TENSOR_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/fp8core.h"
#include "input.h"

typedef enum fp8lm_file_format { FP8LM_FILE_RAW, FP8LM_FILE_NPY, FP8LM_FILE_SAFETENSORS } fp8lm_file_format;

/** What the elements of a tensor are, as far as their values can be read. */
typedef enum fp8lm_element {
  FP8LM_ELEMENT_E4M3,
  FP8LM_ELEMENT_E5M2,
  FP8LM_ELEMENT_BF16,
  FP8LM_ELEMENT_FP16,
  FP8LM_ELEMENT_FP32,
  /** Read as FP32, rounded to nearest. */
  FP8LM_ELEMENT_FP64,
  /** Integers, booleans, complex numbers and other formats: described, but not read. */
  FP8LM_ELEMENT_OTHER
} fp8lm_element;

typedef struct fp8lm_tensor {
  /** UTF-8, never with a NUL inside; "" in formats without names. */
  const char *name;
  /** The dtype as the file spells it, "F8_E4M3" or "<f4". */
  const char *dtype_name;
  fp8lm_element element;
  /** Bytes of an element must be swapped (on a host of either order). */
  int big_endian;
  /** Elements are stored with the first dimension fastest. Reading does not reorder them. */
  int fortran_order;
  size_t dimensions;
  const uint64_t *shape;
  uint64_t elements;
  /** From the start of the file. Aligned to nothing. */
  uint64_t offset;
  uint64_t bytes;
} fp8lm_tensor;

/** An entry of the "__metadata__" of a safetensors file. UTF-8, may hold NULs. */
typedef struct fp8lm_metadata {
  const char *key;
  size_t key_length;
  const char *value;
  size_t value_length;
} fp8lm_metadata;

/** Owns all that its members point to. */
typedef struct fp8lm_tensor_file {
  fp8lm_file_format format;
  /** In the order of their offsets; of one offset (empty tensors), in the order of their names. */
  fp8lm_tensor *tensors;
  size_t tensor_count;
  fp8lm_metadata *metadata;
  size_t metadata_count;
  /** Storage of names, text and shapes. */
  char *text;
  uint64_t *shapes;
} fp8lm_tensor_file;

/** Longest header of a safetensors file; the limit of the format's reference implementation. */
#define FP8LM_SAFETENSORS_MAX_HEADER UINT64_C(100000000)
/** Longest header of a NumPy file that is read: headers of arrays without fields need a few hundred bytes. */
#define FP8LM_NPY_MAX_HEADER UINT64_C(1048576)
/** Most dimensions of a NumPy array (NumPy 2) and of --shape. */
#define FP8LM_NPY_MAX_DIMENSIONS 64

/**
 * Reads the header of a safetensors file, with every check of the format: header length, strict JSON, no key twice,
 * known dtypes, data_offsets that agree with shape and dtype, and that cover the data without hole, overlap or rest.
 * Keys of a tensor besides dtype, shape and data_offsets are passed over, as the reference implementation does.
 * \return also FP8CORE_ERROR_OUT_OF_MEMORY. On failure \p file is empty; freeing it is fine.
 */
fp8core_status fp8lm_safetensors_describe(const fp8lm_input *input, fp8lm_tensor_file *file);

/**
 * Reads the header of a NumPy array file, format 1.0, 2.0 or 3.0, of either byte order.
 *
 * \param dtype what elements of void, integer and one-byte floating types hold (NumPy has no BF16 and FP8 of its own;
 * ml_dtypes writes them as V1, V2 and f1); NULL: such files are refused. Refused for others.
 */
fp8core_status fp8lm_npy_describe(const fp8lm_input *input, const fp8lm_element *dtype, fp8lm_tensor_file *file);

/** A file of nothing but little-endian elements. \param shape NULL: one dimension, as long as the file. */
fp8core_status fp8lm_raw_describe(const fp8lm_input *input, fp8lm_element dtype, size_t dimensions,
                                  const uint64_t *shape, fp8lm_tensor_file *file);

/** Whether the file begins as a NumPy array, or as a safetensors file (a length that fits and a brace). */
int fp8lm_looks_like_npy(const fp8lm_input *input);
int fp8lm_looks_like_safetensors(const fp8lm_input *input);

/** Frees and empties \p file. */
void fp8lm_tensor_file_free(fp8lm_tensor_file *file);

/** Bytes of an element; 0 for FP8LM_ELEMENT_OTHER. */
size_t fp8lm_element_size(fp8lm_element element);

/** The element called "e4m3", "e5m2", "bf16", "fp16", "fp32" or "fp64"; -1 for another name. */
int fp8lm_element_from_name(const char *name, fp8lm_element *element);

/** "e4m3" and so on, "other". */
const char *fp8lm_element_name(fp8lm_element element);

/** FP64 values that FP32 cannot hold. */
typedef struct fp8lm_narrowing {
  /** Finite, but infinite in FP32. */
  uint64_t overflowed;
  /** Not zero, but zero in FP32. */
  uint64_t underflowed;
} fp8lm_narrowing;

/**
 * Reads \p count elements from \p first on, in the file's order, as FP32.
 *
 * \param context any CPU context.
 * \param scratch fp8lm_element_size() * \p count bytes.
 * \param narrowing added to; may be NULL.
 * \return FP8CORE_ERROR_NOT_SUPPORTED for FP8LM_ELEMENT_OTHER, FP8CORE_ERROR_CORRUPT_DATA when the file cannot be read.
 */
fp8core_status fp8lm_tensor_read(fp8core_context *context, const fp8lm_input *input, const fp8lm_tensor *tensor,
                                 uint64_t first, size_t count, void *scratch, float *values,
                                 fp8lm_narrowing *narrowing);

/** Product of a shape times \p bits, in bytes rounded up, and the number of elements. Returns -1 beyond 2^63. */
int fp8lm_shape_bytes(size_t dimensions, const uint64_t *shape, unsigned bits, uint64_t *elements, uint64_t *bytes);

/** A buffer for fp8lm_quote(). */
#define FP8LM_QUOTE_BYTES 100

/** Writes \p text in double quotes, as fp8lm_printable() does, its end cut off when long, for messages. */
const char *fp8lm_quote(char buffer[FP8LM_QUOTE_BYTES], const char *text, size_t length);

/** Writes the sizes in brackets, the last ones cut off when there are many, for messages. */
const char *fp8lm_shape_text(char buffer[FP8LM_QUOTE_BYTES], size_t dimensions, const uint64_t *shape);

#endif
