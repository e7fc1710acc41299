// The reader of NumPy files with any bytes, for every dtype that its caller may name.
#include <string.h>

#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "tensor_file.h"

static const struct {
  const char *header;
  int version;
  size_t bytes;
} inputs[] = {
  {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }       \n", 1, 24},
  {"{'descr': '>f8', 'fortran_order': True, 'shape': (3,), }\n", 2, 24},
  {"{'descr': '<V2', 'fortran_order': False, 'shape': (), }\n", 3, 2},
  {"{\"shape\":(5L,),\"fortran_order\":False,\"descr\":\"|V1\"}", 1, 5},
  {"{'descr': '>u2', 'fortran_order': False, 'shape': (0, 4)}", 1, 0},
  {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 1, 4},
};

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index >= sizeof(inputs) / sizeof(inputs[0])) return NULL;
  const size_t length = strlen(inputs[index].header);
  const size_t start = inputs[index].version == 1 ? 10 : 12;
  *size = start + length + inputs[index].bytes;
  uint8_t *bytes = calloc(1, *size);
  FUZZ_CHECK(bytes);
  memcpy(bytes, "\x93NUMPY", 6);
  bytes[6] = (uint8_t)inputs[index].version;
  bytes[8] = (uint8_t)length;
  bytes[9] = (uint8_t)(length >> 8);
  memcpy(bytes + start, inputs[index].header, length);
  for (size_t i = 0; i < inputs[index].bytes; i++) bytes[start + length + i] = (uint8_t)(0x3f + 17 * i);
  return bytes;
}

static void check_file(const fp8lm_input *input, const fp8lm_tensor_file *file) {
  static fp8core_context *context;
  if (!context) {
    fp8core_context_options options = fp8core_context_options_default();
    options.threads = 1;
    FUZZ_CHECK(fp8core_context_create(&context, &options) == FP8CORE_OK);
  }
  FUZZ_CHECK(file->tensor_count == 1);
  const fp8lm_tensor *tensor = &file->tensors[0];
  FUZZ_CHECK(tensor->element != FP8LM_ELEMENT_OTHER && *tensor->dtype_name);
  FUZZ_CHECK(tensor->offset + tensor->bytes == input->size);
  FUZZ_CHECK(tensor->dimensions <= FP8LM_NPY_MAX_DIMENSIONS);
  FUZZ_CHECK(tensor->bytes == tensor->elements * fp8lm_element_size(tensor->element));
  static uint64_t scratch[64];
  static float values[64];
  for (uint64_t first = 0; first < tensor->elements; first += 64) {
    const uint64_t left = tensor->elements - first;
    const size_t count = left < 64 ? (size_t)left : 64;
    FUZZ_CHECK(fp8lm_tensor_read(context, input, tensor, first, count, scratch, values, NULL) == FP8CORE_OK);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fp8lm_input input;
  fp8lm_input_from_memory(&input, data, size);
  // The last one stands for no dtype.
  for (int dtype = FP8LM_ELEMENT_E4M3; dtype <= FP8LM_ELEMENT_OTHER; dtype++) {
    const fp8lm_element element = (fp8lm_element)dtype;
    fp8lm_tensor_file file;
    const fp8core_status status = fp8lm_npy_describe(&input, element == FP8LM_ELEMENT_OTHER ? NULL : &element, &file);
    if (status == FP8CORE_OK) {
      check_file(&input, &file);
    } else {
      FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA && *fp8core_last_error());
      FUZZ_CHECK(!file.tensors && !file.text && !file.shapes && file.tensor_count == 0);
    }
    fp8lm_tensor_file_free(&file);
  }
  return 0;
}
