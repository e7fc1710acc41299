// The reader of safetensors files with any bytes: what it takes is consistent and can be read to its last value; what
// it refuses leaves a message and nothing else.
#include <string.h>

#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "tensor_file.h"

static const char *const headers[] = {
  "{}",
  "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
  "{\"__metadata__\":{\"format\":\"pt\",\"step\":\"1\"},\"w\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,2],\"data_offsets\":["
  "0,4]},"
  "\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,8]}}   ",
  "{\"z\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},\"e\":{\"shape\":[0,8],\"dtype\":\"F16\",\"data_"
  "offsets\":[8,8]}}",
  "{\"\\u00e9\\ud83d\\ude00\":{\"dtype\":\"F8_E5M2\",\"shape\":[1,1,1,7],\"data_offsets\":[1,8]},"
  "\"q\":{\"x\":[{},[null,-1.5e3]],\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}",
};

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index >= sizeof(headers) / sizeof(headers[0])) return NULL;
  const size_t length = strlen(headers[index]);
  const size_t data = index == 0 ? 0 : 8;
  *size = 8 + length + data;
  uint8_t *bytes = calloc(1, *size);
  FUZZ_CHECK(bytes);
  bytes[0] = (uint8_t)length;
  bytes[1] = (uint8_t)(length >> 8);
  memcpy(bytes + 8, headers[index], length);
  for (size_t i = 0; i < data; i++) bytes[8 + length + i] = (uint8_t)(0x3f + 17 * i);
  return bytes;
}

static void read_values(const fp8lm_input *input, const fp8lm_tensor *tensor) {
  static fp8core_context *context;
  if (!context) {
    fp8core_context_options options = fp8core_context_options_default();
    options.threads = 1;
    FUZZ_CHECK(fp8core_context_create(&context, &options) == FP8CORE_OK);
  }
  static uint64_t scratch[64];
  static float values[64];
  if (tensor->element == FP8LM_ELEMENT_OTHER) return;
  for (uint64_t first = 0; first < tensor->elements; first += 64) {
    const uint64_t left = tensor->elements - first;
    const size_t count = left < 64 ? (size_t)left : 64;
    FUZZ_CHECK(fp8lm_tensor_read(context, input, tensor, first, count, scratch, values, NULL) == FP8CORE_OK);
  }
}

static void check_file(const fp8lm_input *input, const fp8lm_tensor_file *file) {
  uint64_t covered = file->tensor_count ? file->tensors[0].offset : input->size;
  FUZZ_CHECK(covered >= 10);
  for (size_t i = 0; i < file->tensor_count; i++) {
    const fp8lm_tensor *tensor = &file->tensors[i];
    FUZZ_CHECK(tensor->offset == covered && tensor->bytes <= input->size - covered);
    covered += tensor->bytes;
    uint64_t elements = 1;
    for (size_t d = 0; d < tensor->dimensions; d++)
      elements = elements && tensor->shape[d] ? elements * tensor->shape[d] : 0;
    FUZZ_CHECK(elements == tensor->elements);
    const size_t element_size = fp8lm_element_size(tensor->element);
    FUZZ_CHECK(element_size == 0 || tensor->bytes == elements * element_size);
    for (size_t j = 0; j < i; j++) FUZZ_CHECK(strcmp(file->tensors[j].name, tensor->name) != 0);
    read_values(input, tensor);
  }
  FUZZ_CHECK(covered == input->size);
  for (size_t i = 0; i < file->metadata_count; i++) {
    FUZZ_CHECK(file->metadata[i].key[file->metadata[i].key_length] == '\0');
    FUZZ_CHECK(file->metadata[i].value[file->metadata[i].value_length] == '\0');
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fp8lm_input input;
  fp8lm_input_from_memory(&input, data, size);
  fp8lm_tensor_file file;
  const fp8core_status status = fp8lm_safetensors_describe(&input, &file);
  if (status == FP8CORE_OK) {
    check_file(&input, &file);
  } else {
    FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA && *fp8core_last_error());
    FUZZ_CHECK(!file.tensors && !file.metadata && !file.text && !file.shapes && file.tensor_count == 0);
  }
  fp8lm_tensor_file_free(&file);
  return 0;
}
