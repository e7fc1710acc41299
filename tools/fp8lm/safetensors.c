// The safetensors format: https://huggingface.co/docs/safetensors, "Format".
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json_reader.h"
#include "tensor_file.h"

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

typedef struct dtype {
  const char *name;
  unsigned bits;
  fp8lm_element element;
} dtype;

static const dtype dtypes[] = {
  {"F8_E4M3", 8, FP8LM_ELEMENT_E4M3},      {"F8_E5M2", 8, FP8LM_ELEMENT_E5M2},  {"BF16", 16, FP8LM_ELEMENT_BF16},
  {"F16", 16, FP8LM_ELEMENT_FP16},         {"F32", 32, FP8LM_ELEMENT_FP32},     {"F64", 64, FP8LM_ELEMENT_FP64},
  {"BOOL", 8, FP8LM_ELEMENT_OTHER},        {"U8", 8, FP8LM_ELEMENT_OTHER},      {"I8", 8, FP8LM_ELEMENT_OTHER},
  {"U16", 16, FP8LM_ELEMENT_OTHER},        {"I16", 16, FP8LM_ELEMENT_OTHER},    {"U32", 32, FP8LM_ELEMENT_OTHER},
  {"I32", 32, FP8LM_ELEMENT_OTHER},        {"U64", 64, FP8LM_ELEMENT_OTHER},    {"I64", 64, FP8LM_ELEMENT_OTHER},
  {"C64", 64, FP8LM_ELEMENT_OTHER},        {"F4", 4, FP8LM_ELEMENT_OTHER},      {"F6_E2M3", 6, FP8LM_ELEMENT_OTHER},
  {"F6_E3M2", 6, FP8LM_ELEMENT_OTHER},     {"F8_E8M0", 8, FP8LM_ELEMENT_OTHER}, {"F8_E4M3FNUZ", 8, FP8LM_ELEMENT_OTHER},
  {"F8_E5M2FNUZ", 8, FP8LM_ELEMENT_OTHER},
};

// Growing arrays; shapes are indexed until all are read, because growing moves them.
typedef struct safetensors_parser {
  fp8lm_tensor_file *file;
  size_t tensor_capacity;
  size_t metadata_capacity;
  size_t *shape_starts;
  size_t shape_count;
  size_t shape_capacity;
  uint64_t data_start;
  uint64_t data_size;
} safetensors_parser;

static fp8core_status grow(void *array_pointer, size_t element_size, size_t needed, size_t capacity,
                           size_t *new_capacity) {
  size_t wanted = capacity;
  if (needed > wanted) wanted = needed > 2 * capacity ? needed + 15 : 2 * capacity;
  void *array;
  memcpy(&array, array_pointer, sizeof(array));
  void *grown = wanted > SIZE_MAX / element_size ? NULL : realloc(array, wanted * element_size);
  if (!grown) {
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY,
                                  "cannot allocate %zu entries of %zu bytes for the header", wanted, element_size);
  }
  memcpy(array_pointer, &grown, sizeof(grown));
  *new_capacity = wanted;
  return FP8CORE_OK;
}

static int is_key(const char *text, size_t length, const char *key) {
  return length == strlen(key) && memcmp(text, key, length) == 0;
}

static fp8core_status read_dtype(fp8lm_json *json, const char *name, const dtype **found) {
  char *text;
  size_t length;
  const fp8core_status status = fp8lm_json_string(json, &text, &length);
  if (status != FP8CORE_OK) return status;
  for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
    if (is_key(text, length, dtypes[i].name)) {
      *found = &dtypes[i];
      return FP8CORE_OK;
    }
  }
  char quoted[FP8LM_QUOTE_BYTES];
  char known[400];
  size_t used = 0;
  for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
    used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", dtypes[i].name);
  return corrupt("tensor %s: unknown dtype %s, expected one of %s", name, fp8lm_quote(quoted, text, length), known);
}

static fp8core_status read_shape(safetensors_parser *parser, fp8lm_json *json, size_t *dimensions) {
  fp8core_status status = fp8lm_json_enter_array(json);
  *dimensions = 0;
  while (status == FP8CORE_OK) {
    int more;
    status = fp8lm_json_next_element(json, &more);
    if (status != FP8CORE_OK || !more) break;
    if (parser->shape_count == parser->shape_capacity) {
      status = grow(&parser->file->shapes, sizeof(*parser->file->shapes), parser->shape_count + 1,
                    parser->shape_capacity, &parser->shape_capacity);
      if (status != FP8CORE_OK) break;
    }
    status = fp8lm_json_unsigned(json, &parser->file->shapes[parser->shape_count]);
    parser->shape_count++;
    (*dimensions)++;
  }
  return status;
}

static fp8core_status read_offsets(fp8lm_json *json, const char *name, uint64_t offsets[2]) {
  fp8core_status status = fp8lm_json_enter_array(json);
  for (int i = 0; status == FP8CORE_OK; i++) {
    int more;
    status = fp8lm_json_next_element(json, &more);
    if (status != FP8CORE_OK) break;
    if (more != (i < 2))
      return corrupt("tensor %s: data_offsets have %s than two numbers", name, more ? "more" : "fewer");
    if (!more) break;
    status = fp8lm_json_unsigned(json, &offsets[i]);
  }
  return status;
}

// `name` is quoted, for messages; the tensor's own is `text`.
static fp8core_status read_tensor(safetensors_parser *parser, fp8lm_json *json, const char *text, const char *name) {
  const dtype *type = NULL;
  uint64_t offsets[2] = {0, 0};
  size_t dimensions = 0;
  const size_t shape_start = parser->shape_count;
  int have_shape = 0;
  int have_offsets = 0;
  fp8core_status status = fp8lm_json_enter_object(json);
  for (;;) {
    char *key;
    size_t length;
    int more = 0;
    if (status == FP8CORE_OK) status = fp8lm_json_next_member(json, &key, &length, &more);
    if (status != FP8CORE_OK) return status;
    if (!more) break;
    if (is_key(key, length, "dtype")) {
      if (type) return corrupt("tensor %s: \"dtype\" is there twice", name);
      status = read_dtype(json, name, &type);
    } else if (is_key(key, length, "shape")) {
      if (have_shape) return corrupt("tensor %s: \"shape\" is there twice", name);
      status = read_shape(parser, json, &dimensions);
      have_shape = 1;
    } else if (is_key(key, length, "data_offsets")) {
      if (have_offsets) return corrupt("tensor %s: \"data_offsets\" is there twice", name);
      status = read_offsets(json, name, offsets);
      have_offsets = 1;
    } else {
      // The reference implementation ignores what it does not know, and so leaves room for later keys.
      status = fp8lm_json_skip(json);
    }
  }
  if (!type || !have_shape || !have_offsets) {
    return corrupt("tensor %s: \"%s\" is missing", name, !type ? "dtype" : !have_shape ? "shape" : "data_offsets");
  }
  if (offsets[0] > offsets[1]) {
    return corrupt("tensor %s: data_offsets [%" PRIu64 ", %" PRIu64 "] end before they begin", name, offsets[0],
                   offsets[1]);
  }
  if (offsets[1] > parser->data_size) {
    return corrupt("tensor %s: data_offsets [%" PRIu64 ", %" PRIu64 "] reach past the end: the file has %" PRIu64
                   " bytes of data",
                   name, offsets[0], offsets[1], parser->data_size);
  }
  uint64_t elements;
  uint64_t bytes;
  if (fp8lm_shape_bytes(dimensions, dimensions ? parser->file->shapes + shape_start : NULL, type->bits, &elements,
                        &bytes) != 0) {
    char shape[FP8LM_QUOTE_BYTES];
    return corrupt("tensor %s: its shape %s of %s has 2^63 bytes or more", name,
                   fp8lm_shape_text(shape, dimensions, parser->file->shapes + shape_start), type->name);
  }
  if (elements * type->bits % 8 != 0) {
    return corrupt("tensor %s: %" PRIu64 " elements of %s end within a byte", name, elements, type->name);
  }
  if (bytes != offsets[1] - offsets[0]) {
    return corrupt("tensor %s: its shape takes %" PRIu64 " bytes of %s, but data_offsets [%" PRIu64 ", %" PRIu64
                   "] hold %" PRIu64,
                   name, bytes, type->name, offsets[0], offsets[1], offsets[1] - offsets[0]);
  }
  fp8lm_tensor_file *file = parser->file;
  if (file->tensor_count == parser->tensor_capacity) {
    size_t unused;
    status = grow(&parser->shape_starts, sizeof(*parser->shape_starts), file->tensor_count + 1, parser->tensor_capacity,
                  &unused);
    if (status == FP8CORE_OK) {
      status = grow(&file->tensors, sizeof(*file->tensors), file->tensor_count + 1, parser->tensor_capacity,
                    &parser->tensor_capacity);
    }
    if (status != FP8CORE_OK) return status;
  }
  parser->shape_starts[file->tensor_count] = shape_start;
  fp8lm_tensor *tensor = &file->tensors[file->tensor_count++];
  memset(tensor, 0, sizeof(*tensor));
  tensor->name = text;
  tensor->dtype_name = type->name;
  tensor->element = type->element;
  tensor->dimensions = dimensions;
  tensor->elements = elements;
  tensor->offset = parser->data_start + offsets[0];
  tensor->bytes = bytes;
  return FP8CORE_OK;
}

static int compare_metadata(const void *one, const void *other) {
  const fp8lm_metadata *left = one;
  const fp8lm_metadata *right = other;
  const size_t common = left->key_length < right->key_length ? left->key_length : right->key_length;
  const int order = memcmp(left->key, right->key, common);
  if (order) return order;
  return (left->key_length > right->key_length) - (left->key_length < right->key_length);
}

static fp8core_status read_metadata(safetensors_parser *parser, fp8lm_json *json) {
  // The reference implementation takes null for an absent entry.
  if (fp8lm_json_peek(json) == FP8LM_JSON_NULL) return fp8lm_json_skip(json);
  fp8lm_tensor_file *file = parser->file;
  fp8core_status status = fp8lm_json_enter_object(json);
  while (status == FP8CORE_OK) {
    char *text;
    int more;
    fp8lm_metadata entry;
    status = fp8lm_json_next_member(json, &text, &entry.key_length, &more);
    if (status != FP8CORE_OK || !more) break;
    entry.key = text;
    status = fp8lm_json_string(json, &text, &entry.value_length);
    if (status != FP8CORE_OK) break;
    entry.value = text;
    if (file->metadata_count == parser->metadata_capacity) {
      status = grow(&file->metadata, sizeof(entry), file->metadata_count + 1, parser->metadata_capacity,
                    &parser->metadata_capacity);
      if (status != FP8CORE_OK) break;
    }
    file->metadata[file->metadata_count++] = entry;
  }
  if (status != FP8CORE_OK || file->metadata_count == 0) return status;
  qsort(file->metadata, file->metadata_count, sizeof(*file->metadata), compare_metadata);
  for (size_t i = 1; i < file->metadata_count; i++) {
    if (compare_metadata(&file->metadata[i - 1], &file->metadata[i]) == 0) {
      char quoted[FP8LM_QUOTE_BYTES];
      return corrupt("\"__metadata__\": the key %s is there twice",
                     fp8lm_quote(quoted, file->metadata[i].key, file->metadata[i].key_length));
    }
  }
  return FP8CORE_OK;
}

static fp8core_status read_header(safetensors_parser *parser, fp8lm_json *json) {
  int have_metadata = 0;
  fp8core_status status = fp8lm_json_enter_object(json);
  for (;;) {
    char *key;
    size_t length;
    int more = 0;
    if (status == FP8CORE_OK) status = fp8lm_json_next_member(json, &key, &length, &more);
    if (status != FP8CORE_OK) return status;
    if (!more) return fp8lm_json_finish(json);
    if (is_key(key, length, "__metadata__")) {
      if (have_metadata) return corrupt("\"__metadata__\" is there twice");
      have_metadata = 1;
      status = read_metadata(parser, json);
      continue;
    }
    char quoted[FP8LM_QUOTE_BYTES];
    fp8lm_quote(quoted, key, length);
    if (strlen(key) != length) return corrupt("tensor %s: its name holds the character U+0000", quoted);
    status = read_tensor(parser, json, key, quoted);
  }
}

static int compare_names(const void *one, const void *other) {
  return strcmp(((const fp8lm_tensor *)one)->name, ((const fp8lm_tensor *)other)->name);
}

static int compare_offsets(const void *one, const void *other) {
  const fp8lm_tensor *left = one;
  const fp8lm_tensor *right = other;
  if (left->offset != right->offset) return left->offset < right->offset ? -1 : 1;
  // An empty tensor comes before the one that begins where it lies.
  if ((left->bytes == 0) != (right->bytes == 0)) return left->bytes == 0 ? -1 : 1;
  return strcmp(left->name, right->name);
}

// No name twice; the data covered once, from its first byte to its last.
static fp8core_status check_tensors(const safetensors_parser *parser) {
  fp8lm_tensor_file *file = parser->file;
  char quoted[FP8LM_QUOTE_BYTES];
  char other[FP8LM_QUOTE_BYTES];
  if (file->tensor_count) qsort(file->tensors, file->tensor_count, sizeof(*file->tensors), compare_names);
  for (size_t i = 1; i < file->tensor_count; i++) {
    const char *name = file->tensors[i].name;
    if (strcmp(file->tensors[i - 1].name, name) == 0) {
      return corrupt("tensor %s is there twice", fp8lm_quote(quoted, name, strlen(name)));
    }
  }
  if (file->tensor_count) qsort(file->tensors, file->tensor_count, sizeof(*file->tensors), compare_offsets);
  uint64_t covered = parser->data_start;
  for (size_t i = 0; i < file->tensor_count; i++) {
    const fp8lm_tensor *tensor = &file->tensors[i];
    if (tensor->offset != covered) {
      fp8lm_quote(quoted, tensor->name, strlen(tensor->name));
      const uint64_t begin = tensor->offset - parser->data_start;
      if (tensor->offset > covered) {
        return corrupt("bytes %" PRIu64 " to %" PRIu64 " of the data, before tensor %s, belong to no tensor",
                       covered - parser->data_start, begin, quoted);
      }
      const char *previous = file->tensors[i - 1].name;
      return corrupt("tensor %s overlaps tensor %s: it begins at %" PRIu64
                     " of the data, which the other fills up to %" PRIu64,
                     quoted, fp8lm_quote(other, previous, strlen(previous)), begin, covered - parser->data_start);
    }
    covered += tensor->bytes;
  }
  const uint64_t rest = parser->data_start + parser->data_size - covered;
  if (rest) return corrupt("%" PRIu64 " bytes after the last tensor belong to no tensor", rest);
  return FP8CORE_OK;
}

static fp8core_status read_header_text(const fp8lm_input *input, char **text, uint64_t *length) {
  unsigned char bytes[8];
  if (input->size < sizeof(bytes)) {
    return corrupt("the file has %" PRIu64 " bytes, a safetensors file at least 10", input->size);
  }
  fp8core_status status = fp8lm_input_read(input, 0, bytes, sizeof(bytes));
  if (status != FP8CORE_OK) return status;
  *length = 0;
  for (int i = 0; i < 8; i++) *length |= (uint64_t)bytes[i] << (8 * i);
  if (*length > FP8LM_SAFETENSORS_MAX_HEADER) {
    return corrupt("the header length is %" PRIu64 ", expected at most %" PRIu64, *length,
                   FP8LM_SAFETENSORS_MAX_HEADER);
  }
  if (*length > input->size - sizeof(bytes)) {
    return corrupt("the header length is %" PRIu64 ", but only %" PRIu64 " bytes follow it", *length,
                   input->size - sizeof(bytes));
  }
  if (*length < 2) return corrupt("the header length is %" PRIu64 ", expected at least 2", *length);
  *text = malloc((size_t)*length);
  if (!*text) {
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %" PRIu64 " bytes for the header",
                                  *length);
  }
  status = fp8lm_input_read(input, sizeof(bytes), *text, (size_t)*length);
  if (status == FP8CORE_OK && (*text)[0] != '{') {
    status = corrupt("the header begins with byte 0x%02x, expected '{'", (unsigned)(unsigned char)(*text)[0]);
  }
  return status;
}

fp8core_status fp8lm_safetensors_describe(const fp8lm_input *input, fp8lm_tensor_file *file) {
  memset(file, 0, sizeof(*file));
  file->format = FP8LM_FILE_SAFETENSORS;
  uint64_t length = 0;
  fp8core_status status = read_header_text(input, &file->text, &length);
  safetensors_parser parser = {.file = file, .data_start = 8 + length};
  if (status == FP8CORE_OK) {
    parser.data_size = input->size - parser.data_start;
    fp8lm_json json;
    fp8lm_json_init(&json, file->text, (size_t)length);
    status = read_header(&parser, &json);
  }
  if (status == FP8CORE_OK) {
    for (size_t i = 0; i < file->tensor_count; i++) {
      file->tensors[i].shape = file->tensors[i].dimensions ? file->shapes + parser.shape_starts[i] : NULL;
    }
    status = check_tensors(&parser);
  }
  free(parser.shape_starts);
  if (status != FP8CORE_OK) fp8lm_tensor_file_free(file);
  return status;
}

int fp8lm_looks_like_safetensors(const fp8lm_input *input) {
  unsigned char bytes[9];
  if (input->size < sizeof(bytes) || fp8lm_input_read(input, 0, bytes, sizeof(bytes)) != FP8CORE_OK) return 0;
  uint64_t length = 0;
  for (int i = 0; i < 8; i++) length |= (uint64_t)bytes[i] << (8 * i);
  return bytes[8] == '{' && length >= 2 && length <= input->size - 8;
}
