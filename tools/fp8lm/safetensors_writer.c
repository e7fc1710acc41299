#include "safetensors_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "json_writer.h"

// Device memory is copied, and host memory checksummed while it is in cache, by blocks of this size.
#define BLOCK_BYTES ((size_t)1 << 20)

const char *fp8lm_safetensors_dtype(fp8core_dtype dtype) {
  static const char *const names[] = {"F8_E4M3", "F8_E5M2", "BF16", "F16", "F32"};
  return names[dtype];
}

fp8lm_saved_tensor fp8lm_saved_tensor_create(const char *name, fp8core_dtype dtype, int dimensions,
                                             const int64_t *shape, const void *data) {
  fp8lm_saved_tensor tensor = {.name = name,
                               .dtype = fp8lm_safetensors_dtype(dtype),
                               .element_size = fp8core_dtype_size(dtype),
                               .dimensions = dimensions,
                               .data = data};
  for (int i = 0; i < dimensions; i++) tensor.shape[i] = shape[i];
  return tensor;
}

static fp8core_status failed(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot %s the file: %s", what, strerror(errno));
}

static fp8core_status put(int descriptor, const void *data, size_t bytes, fp8lm_saved_file *saved) {
  const char *from = data;
  saved->crc32 = fp8lm_crc32(saved->crc32, data, bytes);
  saved->bytes += bytes;
  while (bytes > 0) {
    const ssize_t written = write(descriptor, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed("write");
    from += written;
    bytes -= (size_t)written;
  }
  return FP8CORE_OK;
}

static fp8core_status create_file(const char *path, int *descriptor) {
  *descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  return *descriptor < 0 ? failed("create") : FP8CORE_OK;
}

static fp8core_status finish_file(int descriptor, fp8core_status status) {
  if (status == FP8CORE_OK && fsync(descriptor) != 0) status = failed("sync");
  if (close(descriptor) != 0 && status == FP8CORE_OK) status = failed("close");
  return status;
}

static uint64_t elements_of(const fp8lm_saved_tensor *tensor) {
  uint64_t elements = 1;
  for (int i = 0; i < tensor->dimensions; i++) elements *= (uint64_t)tensor->shape[i];
  return elements;
}

// Calls of `visit` in the order of the file: from the widest elements to the narrowest.
#define FOR_TENSORS(tensors, count, tensor)                                                                            \
  for (size_t width = 8; width > 0; width /= 2)                                                                        \
    for (const fp8lm_saved_tensor *tensor = (tensors); tensor < (tensors) + (count); tensor++)                         \
      if (tensor->element_size == width)

static void write_header(FILE *stream, const fp8lm_saved_tensor *tensors, size_t count, const char *const *metadata) {
  const char *separator = "";
  fputc('{', stream);
  if (metadata) {
    fputs("\"__metadata__\":{", stream);
    for (size_t i = 0; metadata[i]; i += 2) {
      if (i > 0) fputc(',', stream);
      fp8lm_json_write_string(stream, metadata[i], strlen(metadata[i]));
      fputc(':', stream);
      fp8lm_json_write_string(stream, metadata[i + 1], strlen(metadata[i + 1]));
    }
    fputc('}', stream);
    separator = ",";
  }
  uint64_t offset = 0;
  FOR_TENSORS(tensors, count, tensor) {
    const uint64_t bytes = elements_of(tensor) * tensor->element_size;
    fputs(separator, stream);
    separator = ",";
    fp8lm_json_write_string(stream, tensor->name, strlen(tensor->name));
    fprintf(stream, ":{\"dtype\":\"%s\",\"shape\":[", tensor->dtype);
    for (int i = 0; i < tensor->dimensions; i++) fprintf(stream, "%s%" PRId64, i > 0 ? "," : "", tensor->shape[i]);
    fprintf(stream, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", offset, offset + bytes);
    offset += bytes;
  }
  fputc('}', stream);
}

// The length, the header and its padding, in memory.
static fp8core_status make_header(const fp8lm_saved_tensor *tensors, size_t count, const char *const *metadata,
                                  char **header, size_t *bytes) {
  static const char padding[8] = "        ";
  *header = NULL;
  FILE *stream = open_memstream(header, bytes);
  if (!stream) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the header");
  fwrite(padding, 1, 8, stream);
  write_header(stream, tensors, count, metadata);
  (void)fflush(stream);
  fwrite(padding, 1, (8 - *bytes % 8) % 8, stream);
  const int bad = ferror(stream);
  if (fclose(stream) != 0 || bad) {
    free(*header);
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the header");
  }
  for (int i = 0; i < 8; i++) (*header)[i] = (char)(unsigned char)((uint64_t)(*bytes - 8) >> 8 * i);
  return FP8CORE_OK;
}

static fp8core_status put_tensors(int descriptor, fp8core_context *context, const fp8lm_saved_tensor *tensors,
                                  size_t count, fp8lm_saved_file *saved) {
  const int on_device = fp8core_context_device(context).type != FP8CORE_DEVICE_CPU;
  void *block = on_device ? malloc(BLOCK_BYTES) : NULL;
  if (on_device && !block) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a block");
  fp8core_status status = FP8CORE_OK;
  FOR_TENSORS(tensors, count, tensor) {
    const uint64_t bytes = elements_of(tensor) * tensor->element_size;
    for (uint64_t first = 0; first < bytes && status == FP8CORE_OK; first += BLOCK_BYTES) {
      const size_t part = bytes - first < BLOCK_BYTES ? (size_t)(bytes - first) : BLOCK_BYTES;
      const void *from = (const char *)tensor->data + first;
      if (on_device) status = fp8core_copy(context, block, from, part);
      if (status == FP8CORE_OK) status = put(descriptor, on_device ? block : from, part, saved);
    }
  }
  free(block);
  return status;
}

fp8core_status fp8lm_safetensors_write(const char *path, fp8core_context *context, const fp8lm_saved_tensor *tensors,
                                       size_t count, const char *const *metadata, fp8lm_saved_file *saved) {
  memset(saved, 0, sizeof(*saved));
  char *header;
  size_t header_bytes;
  fp8core_status status = make_header(tensors, count, metadata, &header, &header_bytes);
  if (status != FP8CORE_OK) return status;
  int descriptor;
  status = create_file(path, &descriptor);
  if (status == FP8CORE_OK) {
    status = put(descriptor, header, header_bytes, saved);
    if (status == FP8CORE_OK) status = put_tensors(descriptor, context, tensors, count, saved);
    status = finish_file(descriptor, status);
  }
  free(header);
  return status;
}

fp8core_status fp8lm_safetensors_begin(fp8lm_safetensors_writer *writer, const char *path,
                                       const fp8lm_saved_tensor *tensors, size_t count, const char *const *metadata) {
  char *header;
  size_t header_bytes;
  fp8lm_saved_file saved = {0, 0};
  memset(writer, 0, sizeof(*writer));
  writer->descriptor = -1;
  writer->tensors = tensors;
  writer->count = count;
  writer->offsets = calloc(count + 1, sizeof(*writer->offsets));
  if (!writer->offsets)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the places of tensors");
  fp8core_status status = make_header(tensors, count, metadata, &header, &header_bytes);
  if (status != FP8CORE_OK) return status;
  writer->bytes = header_bytes;
  FOR_TENSORS(tensors, count, tensor) {
    writer->offsets[tensor - tensors] = writer->bytes;
    writer->bytes += elements_of(tensor) * tensor->element_size;
  }
  status = create_file(path, &writer->descriptor);
  if (status == FP8CORE_OK) status = put(writer->descriptor, header, header_bytes, &saved);
  free(header);
  return status;
}

static fp8core_status put_at(int descriptor, const char *from, uint64_t left, uint64_t at) {
  while (left > 0) {
    const ssize_t written = pwrite(descriptor, from, (size_t)left, (off_t)at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed("write");
    from += written;
    at += (uint64_t)written;
    left -= (uint64_t)written;
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_safetensors_put(const fp8lm_safetensors_writer *writer, fp8core_context *context, size_t index,
                                     const void *data) {
  const uint64_t bytes = elements_of(&writer->tensors[index]) * writer->tensors[index].element_size;
  const uint64_t at = writer->offsets[index];
  if (fp8core_context_device(context).type == FP8CORE_DEVICE_CPU) return put_at(writer->descriptor, data, bytes, at);
  char *block = malloc(BLOCK_BYTES);
  if (!block) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a block");
  fp8core_status status = FP8CORE_OK;
  for (uint64_t first = 0; first < bytes && status == FP8CORE_OK; first += BLOCK_BYTES) {
    const size_t part = bytes - first < BLOCK_BYTES ? (size_t)(bytes - first) : BLOCK_BYTES;
    status = fp8core_copy(context, block, (const char *)data + first, part);
    if (status == FP8CORE_OK) status = put_at(writer->descriptor, block, part, at + first);
  }
  free(block);
  return status;
}

static fp8core_status read_back(const fp8lm_safetensors_writer *writer, fp8lm_saved_file *saved) {
  void *block = malloc(BLOCK_BYTES);
  if (!block) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a block");
  fp8core_status status = FP8CORE_OK;
  while (saved->bytes < writer->bytes && status == FP8CORE_OK) {
    const uint64_t left = writer->bytes - saved->bytes;
    const size_t wanted = left < BLOCK_BYTES ? (size_t)left : BLOCK_BYTES;
    const ssize_t seen = pread(writer->descriptor, block, wanted, (off_t)saved->bytes);
    if (seen < 0 && errno == EINTR) continue;
    if (seen < 0) status = failed("read back");
    if (seen == 0)
      status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the file became shorter while it was written");
    if (seen <= 0) break;
    saved->crc32 = fp8lm_crc32(saved->crc32, block, (size_t)seen);
    saved->bytes += (uint64_t)seen;
  }
  free(block);
  return status;
}

fp8core_status fp8lm_safetensors_end(fp8lm_safetensors_writer *writer, fp8core_status status, fp8lm_saved_file *saved) {
  memset(saved, 0, sizeof(*saved));
  if (status == FP8CORE_OK) status = read_back(writer, saved);
  if (writer->descriptor >= 0) status = finish_file(writer->descriptor, status);
  free(writer->offsets);
  writer->descriptor = -1;
  writer->offsets = NULL;
  return status;
}

fp8core_status fp8lm_write_file(const char *path, const void *data, size_t bytes, fp8lm_saved_file *saved) {
  memset(saved, 0, sizeof(*saved));
  int descriptor;
  fp8core_status status = create_file(path, &descriptor);
  if (status != FP8CORE_OK) return status;
  status = put(descriptor, data, bytes, saved);
  return finish_file(descriptor, status);
}
