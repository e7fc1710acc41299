// The NumPy array format 1.0 to 3.0: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tensor_file.h"

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

// The header is a Python dictionary of literals, of which three keys with a string, a truth value and a tuple may
// occur.
typedef struct npy_parser {
  const char *start;
  const char *cursor;
  const char *end;
} npy_parser;

static fp8core_status expected(const npy_parser *parser, const char *what) {
  const size_t position = (size_t)(parser->cursor - parser->start);
  if (parser->cursor == parser->end) return corrupt("header, byte %zu: expected %s, found the end", position, what);
  const unsigned char found = (unsigned char)*parser->cursor;
  if (found > 0x20 && found < 0x7f) return corrupt("header, byte %zu: expected %s, found '%c'", position, what, found);
  return corrupt("header, byte %zu: expected %s, found byte 0x%02x", position, what, (unsigned)found);
}

static char look(npy_parser *parser) {
  while (parser->cursor < parser->end && *parser->cursor && strchr(" \t\r\n", *parser->cursor)) parser->cursor++;
  return parser->cursor < parser->end ? *parser->cursor : '\0';
}

static int take(npy_parser *parser, char wanted) {
  if (look(parser) != wanted) return 0;
  parser->cursor++;
  return 1;
}

static fp8core_status read_string(npy_parser *parser, const char **text, size_t *length) {
  const char quote = look(parser);
  if (quote != '\'' && quote != '"') return expected(parser, "a string");
  parser->cursor++;
  *text = parser->cursor;
  while (parser->cursor < parser->end && *parser->cursor != quote) {
    if (*parser->cursor < 0x20 || *parser->cursor > 0x7e || *parser->cursor == '\\') {
      return expected(parser, "a printable ASCII character");
    }
    parser->cursor++;
  }
  if (parser->cursor == parser->end) return expected(parser, "the end of a string");
  *length = (size_t)(parser->cursor - *text);
  parser->cursor++;
  return FP8CORE_OK;
}

static fp8core_status read_truth(npy_parser *parser, int *value) {
  (void)look(parser);
  *value = parser->cursor < parser->end && *parser->cursor == 'T';
  // The message names the first character that is wrong.
  for (const char *wanted = *value ? "True" : "False"; *wanted; wanted++, parser->cursor++)
    if (parser->cursor == parser->end || *parser->cursor != *wanted)
      return expected(parser, "True or False for fortran_order");
  return FP8CORE_OK;
}

static fp8core_status too_large(const npy_parser *parser, const char *first) {
  char quoted[FP8LM_QUOTE_BYTES];
  size_t digits = 0;
  while (first + digits < parser->end && first[digits] >= '0' && first[digits] <= '9') digits++;
  return corrupt("header, byte %zu: expected a size below 2^63, found %s", (size_t)(first - parser->start),
                 fp8lm_quote(quoted, first, digits));
}

static fp8core_status read_shape(npy_parser *parser, uint64_t *shape, size_t *dimensions) {
  if (!take(parser, '(')) return expected(parser, "a tuple of sizes for shape");
  *dimensions = 0;
  int comma = 1;
  while (!take(parser, ')')) {
    if (!comma) return expected(parser, "',' or ')'");
    if (*dimensions == FP8LM_NPY_MAX_DIMENSIONS) {
      size_t more = 1;
      for (const char *c = parser->cursor; c < parser->end && *c != ')'; c++) more += *c == ',' && c[1] != ')';
      return corrupt("shape: %zu dimensions, expected at most %d", *dimensions + more, FP8LM_NPY_MAX_DIMENSIONS);
    }
    if (look(parser) < '0' || look(parser) > '9') return expected(parser, "a size of at least 0");
    const char *const first = parser->cursor;
    uint64_t value = 0;
    while (parser->cursor < parser->end && *parser->cursor >= '0' && *parser->cursor <= '9') {
      const uint64_t digit = (uint64_t)(*parser->cursor - '0');
      if (value > ((uint64_t)INT64_MAX - digit) / 10) return too_large(parser, first);
      value = value * 10 + digit;
      parser->cursor++;
    }
    // Python 2 wrote long integers so.
    if (parser->cursor < parser->end && *parser->cursor == 'L') parser->cursor++;
    shape[(*dimensions)++] = value;
    comma = take(parser, ',');
  }
  // In Python a tuple of one is written with a comma; without it the value is a number.
  if (*dimensions == 1 && !comma)
    return corrupt("shape: (%" PRIu64 ") is a number, expected the tuple (%" PRIu64 ",)", shape[0], shape[0]);
  return FP8CORE_OK;
}

typedef struct npy_header {
  const char *descr;
  size_t descr_length;
  int fortran_order;
  uint64_t shape[FP8LM_NPY_MAX_DIMENSIONS];
  size_t dimensions;
} npy_header;

static fp8core_status read_header(npy_parser *parser, npy_header *header) {
  static const char *const keys[] = {"descr", "fortran_order", "shape"};
  int seen[3] = {0, 0, 0};
  char quoted[FP8LM_QUOTE_BYTES];
  if (!take(parser, '{')) return expected(parser, "a dictionary");
  while (!take(parser, '}')) {
    const char *key;
    size_t length;
    fp8core_status status = read_string(parser, &key, &length);
    if (status != FP8CORE_OK) return status;
    int index = 0;
    while (index < 3 && !(length == strlen(keys[index]) && memcmp(key, keys[index], length) == 0)) index++;
    if (index == 3)
      return corrupt("unknown key %s, expected descr, fortran_order and shape", fp8lm_quote(quoted, key, length));
    if (seen[index]) return corrupt("the key %s is there twice", keys[index]);
    seen[index] = 1;
    if (!take(parser, ':')) return expected(parser, "':'");
    if (index == 0) {
      if (look(parser) == '[' || look(parser) == '(')
        return corrupt("descr: structured dtypes are not read, expected one type");
      status = read_string(parser, &header->descr, &header->descr_length);
    } else if (index == 1) {
      status = read_truth(parser, &header->fortran_order);
    } else {
      status = read_shape(parser, header->shape, &header->dimensions);
    }
    if (status != FP8CORE_OK) return status;
    if (!take(parser, ',') && look(parser) != '}') return expected(parser, "',' or '}'");
  }
  for (int i = 0; i < 3; i++) {
    if (!seen[i]) return corrupt("the key %s is missing", keys[i]);
  }
  (void)look(parser);
  if (parser->cursor != parser->end) return expected(parser, "the end of the header");
  return FP8CORE_OK;
}

// What the elements are, from descr such as "<f4".
static fp8core_status read_descr(const npy_header *header, const fp8lm_element *dtype, fp8lm_tensor *tensor) {
  char quoted[FP8LM_QUOTE_BYTES];
  fp8lm_quote(quoted, header->descr, header->descr_length);
  const char *text = header->descr;
  size_t length = header->descr_length;
  char order = '|';
  if (length && strchr("<>|=", *text)) {
    order = *text++;
    length--;
  }
  if (length && *text == 'O') {
    return corrupt("descr: %s holds pickled Python objects, which are never read", quoted);
  }
  uint64_t size = 0;
  size_t digits = 0;
  while (length > 1 + digits && text[1 + digits] >= '0' && text[1 + digits] <= '9' && digits < 6) {
    size = size * 10 + (uint64_t)(text[1 + digits] - '0');
    digits++;
  }
  const int known = length > 1 && strchr("biufcVSUaMm", *text) && digits > 0;
  if (!known || (length != 1 + digits && *text != 'M' && *text != 'm'))
    return corrupt("descr: %s is no NumPy type", quoted);
  const char kind = *text;
  tensor->big_endian = order == '>' && size > 1;
  if (kind == 'f' && (size == 2 || size == 4 || size == 8)) {
    tensor->element = size == 2 ? FP8LM_ELEMENT_FP16 : size == 4 ? FP8LM_ELEMENT_FP32 : FP8LM_ELEMENT_FP64;
    if (size > 1 && order == '|') return corrupt("descr: %s has no byte order", quoted);
    if (dtype && *dtype != tensor->element) {
      return corrupt("descr: %s is %s, which contradicts the dtype %s that was asked for", quoted,
                     fp8lm_element_name(tensor->element), fp8lm_element_name(*dtype));
    }
    return FP8CORE_OK;
  }
  // Types that serve as containers for formats that NumPy does not know; ml_dtypes writes E5M2 as "f1".
  const int container =
    (kind == 'V' || kind == 'u' || kind == 'i' || (kind == 'f' && size == 1)) && (size == 1 || size == 2);
  if (!container) {
    return corrupt(
      "descr: %s is not read, expected f2, f4 or f8, or a type of 1 or 2 bytes with the dtype that it holds", quoted);
  }
  if (!dtype) {
    return corrupt("descr: %s does not say what its elements are; name the dtype (--dtype %s)", quoted,
                   size == 1 ? "e4m3 or e5m2" : "bf16 or fp16");
  }
  if (fp8lm_element_size(*dtype) != size) {
    return corrupt("descr: %s has %" PRIu64 " bytes an element, %s has %zu", quoted, size, fp8lm_element_name(*dtype),
                   fp8lm_element_size(*dtype));
  }
  tensor->element = *dtype;
  return FP8CORE_OK;
}

static fp8core_status describe(const fp8lm_input *input, const fp8lm_element *dtype, fp8lm_tensor_file *file) {
  unsigned char preamble[12];
  if (input->size == 0) return corrupt("the file is empty, expected the magic \\x93NUMPY");
  if (!fp8lm_looks_like_npy(input)) {
    const size_t found = input->size < sizeof(magic) ? (size_t)input->size : sizeof(magic);
    char quoted[FP8LM_QUOTE_BYTES];
    const fp8core_status read = fp8lm_input_read(input, 0, preamble, found);
    if (read != FP8CORE_OK) return read;
    return corrupt("the file begins with %s, not with the magic \\x93NUMPY",
                   fp8lm_quote(quoted, (const char *)preamble, found));
  }
  if (input->size < 10) return corrupt("the file has %" PRIu64 " bytes, a NumPy file more than 10", input->size);
  fp8core_status status = fp8lm_input_read(input, 0, preamble, 10);
  if (status != FP8CORE_OK) return status;
  if (preamble[6] < 1 || preamble[6] > 3 || preamble[7] != 0) {
    return corrupt("format version %d.%d, expected 1.0, 2.0 or 3.0", preamble[6], preamble[7]);
  }
  uint64_t header_start = 10;
  uint64_t length = (uint64_t)preamble[8] | (uint64_t)preamble[9] << 8;
  if (preamble[6] > 1) {
    header_start = 12;
    if (input->size < header_start)
      return corrupt("the file has %" PRIu64 " bytes, a NumPy file more than 12", input->size);
    status = fp8lm_input_read(input, 10, preamble + 10, 2);
    if (status != FP8CORE_OK) return status;
    length |= (uint64_t)preamble[10] << 16 | (uint64_t)preamble[11] << 24;
  }
  if (length > input->size - header_start) {
    return corrupt("the header length is %" PRIu64 ", but only %" PRIu64 " bytes follow it", length,
                   input->size - header_start);
  }
  if (length > FP8LM_NPY_MAX_HEADER) {
    return corrupt("the header length is %" PRIu64 ", expected at most %" PRIu64, length, FP8LM_NPY_MAX_HEADER);
  }
  file->text = malloc((size_t)length + 1);
  file->tensors = calloc(1, sizeof(*file->tensors));
  if (!file->text || !file->tensors) {
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %" PRIu64 " bytes for the header",
                                  length);
  }
  status = fp8lm_input_read(input, header_start, file->text, (size_t)length);
  if (status != FP8CORE_OK) return status;
  npy_parser parser = {file->text, file->text, file->text + length};
  npy_header header = {0};
  status = read_header(&parser, &header);
  if (status != FP8CORE_OK) return status;
  fp8lm_tensor *tensor = &file->tensors[0];
  status = read_descr(&header, dtype, tensor);
  if (status != FP8CORE_OK) return status;
  const size_t element_size = fp8lm_element_size(tensor->element);
  if (fp8lm_shape_bytes(header.dimensions, header.shape, (unsigned)element_size * 8, &tensor->elements,
                        &tensor->bytes) != 0) {
    char text[FP8LM_QUOTE_BYTES];
    return corrupt("shape: %s of %s has 2^63 bytes or more", fp8lm_shape_text(text, header.dimensions, header.shape),
                   fp8lm_element_name(tensor->element));
  }
  tensor->offset = header_start + length;
  const uint64_t available = input->size - tensor->offset;
  if (tensor->bytes != available) {
    return corrupt("shape: %" PRIu64 " elements take %" PRIu64 " bytes, but %" PRIu64 " follow the header",
                   tensor->elements, tensor->bytes, available);
  }
  file->shapes = calloc(header.dimensions ? header.dimensions : 1, sizeof(*file->shapes));
  if (!file->shapes) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the shape");
  memcpy(file->shapes, header.shape, header.dimensions * sizeof(*file->shapes));
  tensor->shape = file->shapes;
  tensor->dimensions = header.dimensions;
  tensor->fortran_order = header.fortran_order;
  tensor->name = "";
  // The quote after it ends the string.
  file->text[header.descr + header.descr_length - file->text] = '\0';
  tensor->dtype_name = header.descr;
  file->tensor_count = 1;
  return FP8CORE_OK;
}

fp8core_status fp8lm_npy_describe(const fp8lm_input *input, const fp8lm_element *dtype, fp8lm_tensor_file *file) {
  memset(file, 0, sizeof(*file));
  file->format = FP8LM_FILE_NPY;
  const fp8core_status status = describe(input, dtype, file);
  if (status != FP8CORE_OK) fp8lm_tensor_file_free(file);
  return status;
}

int fp8lm_looks_like_npy(const fp8lm_input *input) {
  unsigned char bytes[sizeof(magic)];
  return input->size >= sizeof(magic) && fp8lm_input_read(input, 0, bytes, sizeof(bytes)) == FP8CORE_OK &&
         memcmp(bytes, magic, sizeof(magic)) == 0;
}
