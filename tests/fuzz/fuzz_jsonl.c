// Lines of JSONL with any bytes.
#include <string.h>

#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "text_source.h"
#include "utf8.h"

static const char *const inputs[] = {
  "{\"text\": \"one\"}\n{\"text\": \"\\u0074wo \\ud83d\\ude00\", \"id\": 2}\n",
  "\n  \r\n{\"meta\": {\"text\": [1, 2.5e-3, null]}, \"text\": \"\"}",
  "{\"text\":\"\xc3\xa9\\n\\\"\\\\\",\"a\":[[],{}]}\r\n",
};

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index >= sizeof(inputs) / sizeof(inputs[0])) return NULL;
  *size = strlen(inputs[index]);
  uint8_t *bytes = malloc(*size);
  FUZZ_CHECK(bytes);
  memcpy(bytes, inputs[index], *size);
  return bytes;
}

static fp8core_status use(void *context, const char *text, size_t size) {
  for (size_t i = 0; i < size;) {
    const size_t length = fp8lm_utf8_length(text + i, size - i);
    FUZZ_CHECK(length);
    i += length;
  }
  ++*(size_t *)context;
  return FP8CORE_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fp8lm_piece piece = {malloc(size + 1), size, size + 1, "fuzz", 1, 0, 0, 0};
  FUZZ_CHECK(piece.bytes);
  if (size) memcpy(piece.bytes, data, size);
  size_t count = 0;
  const fp8core_status status = fp8lm_each_json_text(&piece, "text", use, &count);
  FUZZ_CHECK(status == FP8CORE_OK || status == FP8CORE_ERROR_CORRUPT_DATA);
  if (status != FP8CORE_OK) FUZZ_CHECK(strncmp(fp8core_last_error(), "fuzz, line ", 11) == 0);
  fp8lm_piece_free(&piece);
  return 0;
}
