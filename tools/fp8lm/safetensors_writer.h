/** \file
 * Writes safetensors files: the counterpart of fp8lm_safetensors_describe().
 */
#ifndef FP8LM_SAFETENSORS_WRITER_H
#define FP8LM_SAFETENSORS_WRITER_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/context.h"
#include "fp8core/dtype.h"
#include "fp8core/tensor.h"

/** A tensor to be written; all pointers are the caller's. */
typedef struct fp8lm_saved_tensor {
  /** Unique, UTF-8. */
  const char *name;
  /** As safetensors spells it; see fp8lm_safetensors_dtype(). */
  const char *dtype;
  size_t element_size;
  int dimensions;
  int64_t shape[FP8CORE_MAX_DIMENSIONS];
  /** Contiguous; in host memory or that of the context's device. */
  const void *data;
} fp8lm_saved_tensor;

/** What was written. */
typedef struct fp8lm_saved_file {
  uint64_t bytes;
  /** CRC-32 of ISO 3309 of all of them. */
  uint32_t crc32;
} fp8lm_saved_file;

/** "F8_E4M3", "F8_E5M2", "BF16", "F16", "F32". */
const char *fp8lm_safetensors_dtype(fp8core_dtype dtype);

/** A tensor of \p dtype. */
fp8lm_saved_tensor fp8lm_saved_tensor_create(const char *name, fp8core_dtype dtype, int dimensions,
                                             const int64_t *shape, const void *data);

/**
 * Writes all tensors to the new file \p path and syncs it. Wide elements come first, so that every tensor is aligned to
 * its elements; the header is padded with spaces to 8 bytes. The bytes depend on the arguments alone.
 *
 * \param metadata pairs of key and value for "__metadata__", ended by NULL; NULL: none.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the file cannot be created or written (a full disk, a limit): the message
 *         says why and does not name the file, which is left as it is then. FP8CORE_ERROR_OUT_OF_MEMORY.
 */
fp8core_status fp8lm_safetensors_write(const char *path, fp8core_context *context, const fp8lm_saved_tensor *tensors,
                                       size_t count, const char *const *metadata, fp8lm_saved_file *saved);

/** A file whose tensors are written one by one, as their data comes. */
typedef struct fp8lm_safetensors_writer {
  /** Of the caller's list. */
  const fp8lm_saved_tensor *tensors;
  size_t count;
  /** Where the data of each begins. */
  uint64_t *offsets;
  uint64_t bytes;
  int descriptor;
} fp8lm_safetensors_writer;

/** Creates the file with its header; the list's data pointers are not looked at. Errors as above. */
fp8core_status fp8lm_safetensors_begin(fp8lm_safetensors_writer *writer, const char *path,
                                       const fp8lm_saved_tensor *tensors, size_t count, const char *const *metadata);

/** Writes the data of tensor \p index, from host memory or that of the context's device: each tensor once, in any
 * order. */
fp8core_status fp8lm_safetensors_put(const fp8lm_safetensors_writer *writer, fp8core_context *context, size_t index,
                                     const void *data);

/** Reads the file back for its checksum and syncs it, unless \p status says that it failed; closes it. The same bytes
 * as fp8lm_safetensors_write()'s. \return \p status, or what went wrong here. */
fp8core_status fp8lm_safetensors_end(fp8lm_safetensors_writer *writer, fp8core_status status, fp8lm_saved_file *saved);

/** Writes \p bytes bytes to the new file \p path and syncs it; errors as above. */
fp8core_status fp8lm_write_file(const char *path, const void *data, size_t bytes, fp8lm_saved_file *saved);

#endif
