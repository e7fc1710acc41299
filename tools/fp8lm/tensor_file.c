#include "tensor_file.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

static const struct {
  const char *name;
  size_t size;
} elements[] = {
  [FP8LM_ELEMENT_E4M3] = {"e4m3", 1},   [FP8LM_ELEMENT_E5M2] = {"e5m2", 1}, [FP8LM_ELEMENT_BF16] = {"bf16", 2},
  [FP8LM_ELEMENT_FP16] = {"fp16", 2},   [FP8LM_ELEMENT_FP32] = {"fp32", 4}, [FP8LM_ELEMENT_FP64] = {"fp64", 8},
  [FP8LM_ELEMENT_OTHER] = {"other", 0},
};

size_t fp8lm_element_size(fp8lm_element element) { return elements[element].size; }

const char *fp8lm_element_name(fp8lm_element element) { return elements[element].name; }

int fp8lm_element_from_name(const char *name, fp8lm_element *element) {
  for (int i = 0; i < FP8LM_ELEMENT_OTHER; i++) {
    if (strcmp(name, elements[i].name) == 0) {
      *element = (fp8lm_element)i;
      return 0;
    }
  }
  return -1;
}

void fp8lm_tensor_file_free(fp8lm_tensor_file *file) {
  free(file->tensors);
  free(file->metadata);
  free(file->text);
  free(file->shapes);
  file->tensors = NULL;
  file->metadata = NULL;
  file->text = NULL;
  file->shapes = NULL;
  file->tensor_count = 0;
  file->metadata_count = 0;
}

int fp8lm_shape_bytes(size_t dimensions, const uint64_t *shape, unsigned bits, uint64_t *element_count,
                      uint64_t *bytes) {
  uint64_t product = 1;
  // A zero anywhere means no elements, however large the other sizes are.
  for (size_t i = 0; i < dimensions; i++) {
    if (shape[i] == 0) product = 0;
  }
  for (size_t i = 0; i < dimensions && product; i++) {
    if (product > (uint64_t)INT64_MAX / shape[i]) return -1;
    product *= shape[i];
  }
  if (product > (uint64_t)INT64_MAX / bits) return -1;
  *element_count = product;
  *bytes = (product * bits + 7) / 8;
  return 0;
}

const char *fp8lm_quote(char buffer[FP8LM_QUOTE_BYTES], const char *text, size_t length) {
  size_t used = 0;
  buffer[used++] = '"';
  for (size_t i = 0; i < length;) {
    char printable[FP8LM_PRINTABLE_BYTES];
    // Room for one more character, the dots, the quote and the end.
    if (used + 12 > FP8LM_QUOTE_BYTES) {
      memcpy(buffer + used, "...", 3);
      used += 3;
      break;
    }
    i += fp8lm_printable(text + i, length - i, printable);
    memcpy(buffer + used, printable, strlen(printable));
    used += strlen(printable);
  }
  buffer[used++] = '"';
  buffer[used] = '\0';
  return buffer;
}

const char *fp8lm_shape_text(char buffer[FP8LM_QUOTE_BYTES], size_t dimensions, const uint64_t *shape) {
  size_t used = (size_t)snprintf(buffer, FP8LM_QUOTE_BYTES, "[");
  for (size_t i = 0; i < dimensions; i++) {
    if (used + 32 > FP8LM_QUOTE_BYTES) {
      used += (size_t)snprintf(buffer + used, FP8LM_QUOTE_BYTES - used, ", ...");
      break;
    }
    used += (size_t)snprintf(buffer + used, FP8LM_QUOTE_BYTES - used, "%s%" PRIu64, i ? ", " : "", shape[i]);
  }
  (void)snprintf(buffer + used, FP8LM_QUOTE_BYTES - used, "]");
  return buffer;
}

fp8core_status fp8lm_raw_describe(const fp8lm_input *input, fp8lm_element dtype, size_t dimensions,
                                  const uint64_t *shape, fp8lm_tensor_file *file) {
  memset(file, 0, sizeof(*file));
  file->format = FP8LM_FILE_RAW;
  const size_t element_size = fp8lm_element_size(dtype);
  uint64_t whole_file = 0;
  if (!shape) {
    if (input->size % element_size != 0) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "%" PRIu64 " bytes are no whole number of %s elements",
                                    input->size, fp8lm_element_name(dtype));
    }
    dimensions = 1;
    whole_file = input->size / element_size;
    shape = &whole_file;
  }
  uint64_t element_count;
  uint64_t bytes;
  if (fp8lm_shape_bytes(dimensions, shape, (unsigned)element_size * 8, &element_count, &bytes) != 0) {
    char text[FP8LM_QUOTE_BYTES];
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the shape %s of %s has 2^63 bytes or more",
                                  fp8lm_shape_text(text, dimensions, shape), fp8lm_element_name(dtype));
  }
  if (bytes != input->size) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                  "the shape takes %" PRIu64 " elements of %s, %" PRIu64
                                  " bytes; the file has %" PRIu64,
                                  element_count, fp8lm_element_name(dtype), bytes, input->size);
  }
  file->tensors = calloc(1, sizeof(*file->tensors));
  file->shapes = calloc(dimensions ? dimensions : 1, sizeof(*file->shapes));
  if (!file->tensors || !file->shapes) {
    fp8lm_tensor_file_free(file);
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the description of a file");
  }
  if (dimensions) memcpy(file->shapes, shape, dimensions * sizeof(*shape));
  file->tensor_count = 1;
  file->tensors[0].name = "";
  file->tensors[0].dtype_name = fp8lm_element_name(dtype);
  file->tensors[0].element = dtype;
  file->tensors[0].dimensions = dimensions;
  file->tensors[0].shape = file->shapes;
  file->tensors[0].elements = element_count;
  file->tensors[0].bytes = bytes;
  return FP8CORE_OK;
}

static int host_is_big_endian(void) {
  const uint16_t one = 1;
  unsigned char first;
  memcpy(&first, &one, 1);
  return first == 0;
}

static void swap_bytes(unsigned char *data, size_t count, size_t element_size) {
  for (size_t i = 0; i < count; i++) {
    unsigned char *element = data + i * element_size;
    for (size_t j = 0; j < element_size / 2; j++) {
      const unsigned char other = element[element_size - 1 - j];
      element[element_size - 1 - j] = element[j];
      element[j] = other;
    }
  }
}

static void narrow(const unsigned char *data, size_t count, float *values, fp8lm_narrowing *narrowing) {
  for (size_t i = 0; i < count; i++) {
    double wide;
    memcpy(&wide, data + i * sizeof(wide), sizeof(wide));
    // Beyond FP32 a conversion is undefined in C without Annex F; the largest double that rounds to FLT_MAX is below
    // this.
    if (isfinite(wide) && fabs(wide) >= 0x1.ffffffp127) {
      values[i] = wide < 0 ? -HUGE_VALF : HUGE_VALF;
      if (narrowing) narrowing->overflowed++;
      continue;
    }
    values[i] = (float)wide;
    if (narrowing && values[i] == 0.0f && wide != 0.0) narrowing->underflowed++;
  }
}

fp8core_status fp8lm_tensor_read(fp8core_context *context, const fp8lm_input *input, const fp8lm_tensor *tensor,
                                 uint64_t first, size_t count, void *scratch, float *values,
                                 fp8lm_narrowing *narrowing) {
  static const fp8core_dtype dtypes[] = {
    [FP8LM_ELEMENT_E4M3] = FP8CORE_E4M3, [FP8LM_ELEMENT_E5M2] = FP8CORE_E5M2, [FP8LM_ELEMENT_BF16] = FP8CORE_BF16,
    [FP8LM_ELEMENT_FP16] = FP8CORE_FP16, [FP8LM_ELEMENT_FP32] = FP8CORE_FP32,
  };
  if (tensor->element == FP8LM_ELEMENT_OTHER) {
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "values of dtype %s are not read", tensor->dtype_name);
  }
  const size_t element_size = fp8lm_element_size(tensor->element);
  const fp8core_status status =
    fp8lm_input_read(input, tensor->offset + first * element_size, scratch, count * element_size);
  if (status != FP8CORE_OK) return status;
  if (tensor->big_endian != host_is_big_endian()) swap_bytes(scratch, count, element_size);
  if (tensor->element == FP8LM_ELEMENT_FP64) {
    narrow(scratch, count, values, narrowing);
    return FP8CORE_OK;
  }
  const int64_t shape = (int64_t)count;
  const fp8core_tensor source = fp8core_tensor_create(scratch, dtypes[tensor->element], 1, &shape);
  const fp8core_tensor destination = fp8core_tensor_create(values, FP8CORE_FP32, 1, &shape);
  fp8core_cast_options options = fp8core_cast_options_default();
  options.saturate = 0;
  return fp8core_cast(context, &options, &source, &destination);
}
