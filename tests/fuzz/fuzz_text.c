// Any bytes as text: words, tokens, repair, in one piece and in many.
#include <string.h>

#include "bpe_train.h"
#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "tokenizer.h"
#include "words.h"

static const char *const inputs[] = {
  "The quick brown fox, who'd jumped 13 times; didn't he?\n\n\tYes.  ",
  "\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9 na\xc3\xafve \xe4\xbd\xa0\xef\xbc\x8c\xe3\x80\x80\xe4\xb8\x96",
  "\xff\xfe \xc3 \xe2\x82 \xf0\x9f\x98 \xed\xa0\x80 \xc0\xaf",
  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
  "one<|endoftext|>two <|endoftext|><|endof",
};

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index >= sizeof(inputs) / sizeof(inputs[0])) return NULL;
  *size = strlen(inputs[index]);
  uint8_t *bytes = malloc(*size);
  FUZZ_CHECK(bytes);
  memcpy(bytes, inputs[index], *size);
  return bytes;
}

// Trained on the seed inputs.
static const fp8lm_tokenizer *bpe(void) {
  static fp8lm_tokenizer *tokenizer;
  if (tokenizer) return tokenizer;
  fp8lm_word_counts counts = {NULL, 0, 0, NULL, 0, 0};
  for (size_t i = 0; i < sizeof(inputs) / sizeof(inputs[0]); i++) {
    FUZZ_CHECK(fp8lm_count_words(&counts, (const unsigned char *)inputs[i], strlen(inputs[i])) == FP8CORE_OK);
  }
  const fp8lm_train_options options = {400, 1, FP8LM_END_OF_TEXT_LAST};
  fp8lm_trained trained;
  FUZZ_CHECK(fp8lm_train_bpe(&counts, &options, &trained) == FP8CORE_OK);
  FUZZ_CHECK(fp8lm_tokenizer_parse_bpe(&tokenizer, trained.vocab, trained.vocab_size, trained.merges,
                                       trained.merges_size) == FP8CORE_OK);
  fp8lm_trained_free(&trained);
  fp8lm_word_counts_free(&counts);
  return tokenizer;
}

static void check_words(const uint8_t *data, size_t size) {
  uint8_t *ends = calloc(size + 1, 1);
  FUZZ_CHECK(ends);
  for (size_t used = 0; used < size;) {
    const size_t length = fp8lm_next_word(data + used, size - used, 1);
    FUZZ_CHECK(length > 0 && length <= size - used);
    // With less to see, the word is the same or not known.
    for (size_t seen = 1; seen < size - used && seen < length + 8; seen++) {
      const size_t early = fp8lm_next_word(data + used, seen, 0);
      FUZZ_CHECK(early == 0 || early == length);
    }
    used += length;
    ends[used] = 1;
  }
  // A division leaves the words of both sides as they are.
  for (size_t position = 1; position < size; position++) {
    if (!fp8lm_divides_words(data, size, position)) continue;
    FUZZ_CHECK(ends[position]);
    if (size > 300) continue;
    for (size_t part = 0; part < 2; part++) {
      const size_t begin = part ? position : 0;
      const size_t end = part ? size : position;
      for (size_t used = begin; used < end;) {
        const size_t length = fp8lm_next_word(data + used, end - used, 1);
        for (size_t i = 1; i <= length; i++) FUZZ_CHECK(ends[used + i] == (i == length));
        used += length;
      }
    }
  }
  free(ends);
}

static int encode(fp8lm_encoder *encoder, const uint8_t *data, size_t size, size_t step, fp8lm_tokens *tokens) {
  fp8core_status status = FP8CORE_OK;
  for (size_t used = 0; used < size && status == FP8CORE_OK; used += step) {
    status = fp8lm_encoder_feed(encoder, data + used, size - used < step ? size - used : step, tokens);
  }
  if (status == FP8CORE_OK) status = fp8lm_encoder_finish(encoder, tokens);
  FUZZ_CHECK(status == FP8CORE_OK || status == FP8CORE_ERROR_CORRUPT_DATA);
  return status == FP8CORE_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static fp8lm_tokenizer *bytes_tokenizer;
  if (!bytes_tokenizer) FUZZ_CHECK(fp8lm_tokenizer_create_bytes(&bytes_tokenizer) == FP8CORE_OK);
  check_words(data, size);
  for (int number = 0; number < 12; number++) {
    const fp8lm_tokenizer *tokenizer = number % 2 ? bpe() : bytes_tokenizer;
    const fp8lm_encoder_options options = {(fp8lm_invalid_utf8)(number / 2 % 3), number / 6};
    // One for all inputs: nothing of a text may stay behind.
    static fp8lm_encoder *encoders[12];
    fp8lm_encoder **encoder = &encoders[number];
    if (!*encoder) FUZZ_CHECK(fp8lm_encoder_create(encoder, tokenizer, &options) == FP8CORE_OK);
    fp8lm_tokens whole = {NULL, 0, 0};
    fp8lm_tokens parts = {NULL, 0, 0};
    const int good = encode(*encoder, data, size, size + 1, &whole);
    FUZZ_CHECK(good || options.invalid_utf8 == FP8LM_INVALID_REFUSE);
    const size_t step = 1 + (size ? data[0] % 7U : 0);
    FUZZ_CHECK(encode(*encoder, data, size, step, &parts) == good);
    if (good) {
      FUZZ_CHECK(whole.count == parts.count);
      FUZZ_CHECK(whole.count == 0 || memcmp(whole.ids, parts.ids, whole.count * sizeof(uint32_t)) == 0);
      size_t used = 0;
      for (size_t i = 0; i < whole.count; i++) {
        size_t length;
        const unsigned char *text = fp8lm_tokenizer_bytes(tokenizer, whole.ids[i], &length);
        FUZZ_CHECK(text);
        if (options.invalid_utf8 != FP8LM_INVALID_REPLACE) {
          FUZZ_CHECK(length <= size - used && memcmp(text, data + used, length) == 0);
        }
        used += length;
      }
      FUZZ_CHECK(options.invalid_utf8 == FP8LM_INVALID_REPLACE || used == size);
    }
    fp8lm_tokens_free(&whole);
    fp8lm_tokens_free(&parts);
  }
  return 0;
}
