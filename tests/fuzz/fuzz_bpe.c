// vocab.json and merges.txt, one after the other with a NUL between them, with any bytes; what can be read is used.
#include <string.h>

#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "tokenizer.h"

static const char *const merges[] = {
  "#version: 0.2\na b\nab c\nb c\n",
  "",
  "#version: 0.2\r\na a\r\naa aa\r\n\xc4\xa0 a",
};
static const char *const more_tokens[] = {
  ",\"ab\":256,\"abc\":257,\"bc\":258,\"<|endoftext|>\":259}",
  "}",
  ",\"\\u0061a\":300, \"aaaa\":301,\n\"\\u0120a\":1000 }",
};

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index >= sizeof(merges) / sizeof(merges[0])) return NULL;
  char *text = malloc(16384);
  FUZZ_CHECK(text);
  size_t used = 0;
  for (unsigned byte = 0; byte < 256; byte++) {
    const uint32_t c = fp8lm_byte_character((unsigned char)byte);
    text[used++] = byte ? ',' : '{';
    text[used++] = '"';
    if (c == '"' || c == '\\') text[used++] = '\\';
    if (c >= 0x80) {
      text[used++] = (char)(0xc0 | c >> 6);
      text[used++] = (char)(0x80 | (c & 0x3f));
    } else {
      text[used++] = (char)c;
    }
    used += (size_t)snprintf(text + used, 100, "\":%u", byte);
  }
  used += (size_t)snprintf(text + used, 1000, "%s%c%s", more_tokens[index], 0, merges[index]);
  // snprintf() stops at no NUL of %c.
  *size = used;
  return (uint8_t *)text;
}

static void use(const fp8lm_tokenizer *tokenizer) {
  static const char text[] =
    "aaaaabcabcbc b  a\x80 \xf0\x9f\x98\x80 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
  fp8lm_encoder *encoder;
  const fp8lm_encoder_options options = {FP8LM_INVALID_KEEP, 0};
  fp8lm_tokens tokens = {NULL, 0, 0};
  FUZZ_CHECK(fp8lm_encoder_create(&encoder, tokenizer, &options) == FP8CORE_OK);
  FUZZ_CHECK(fp8lm_encoder_feed(encoder, text, sizeof(text) - 1, &tokens) == FP8CORE_OK);
  FUZZ_CHECK(fp8lm_encoder_finish(encoder, &tokens) == FP8CORE_OK);
  size_t used = 0;
  for (size_t i = 0; i < tokens.count; i++) {
    size_t length;
    const unsigned char *bytes = fp8lm_tokenizer_bytes(tokenizer, tokens.ids[i], &length);
    FUZZ_CHECK(bytes && length <= sizeof(text) - 1 - used && memcmp(bytes, text + used, length) == 0);
    used += length;
  }
  FUZZ_CHECK(used == sizeof(text) - 1);
  fp8lm_tokens_free(&tokens);
  fp8lm_encoder_destroy(&encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
  const size_t vocab_size = nul ? (size_t)(nul - data) : size;
  const size_t merges_size = nul ? size - vocab_size - 1 : 0;
  // In blocks of exactly their size.
  char *vocab = malloc(vocab_size + 1);
  char *merge_text = malloc(merges_size + 1);
  FUZZ_CHECK(vocab && merge_text);
  if (vocab_size) memcpy(vocab, data, vocab_size);
  if (merges_size) memcpy(merge_text, nul + 1, merges_size);
  fp8lm_tokenizer *tokenizer;
  const fp8core_status status = fp8lm_tokenizer_parse_bpe(&tokenizer, vocab, vocab_size, merge_text, merges_size);
  free(vocab);
  free(merge_text);
  if (status == FP8CORE_OK) {
    FUZZ_CHECK(fp8lm_tokenizer_vocabulary(tokenizer) >= 256);
    use(tokenizer);
  } else {
    FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA && *fp8core_last_error() && !tokenizer);
  }
  fp8lm_tokenizer_destroy(&tokenizer);
  return 0;
}
