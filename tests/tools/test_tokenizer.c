// Tokenizers by their interface: round trips, pieces of any size, what becomes of broken UTF-8, and words of every
// length against a merge that is written as it is defined.
#include "support.h"

#include <stdlib.h>
#include <string.h>

#include "bpe_train.h"
#include "tokenizer.h"
#include "words.h"

static const char corpus[] =
  "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
  "upon "
  "the face of the deep. And the Spirit of God moved upon the face of the waters. abcabcabcabc "
  "aaaaaaaaaaaaaaaaaaaaaaaa "
  "abababababab bcbcbcbcabcabc the the the thethe  \n\n\n    \xf0\x9f\x98\x80\xf0\x9f\x98\x80 \xe4\xbd\xa0\xe5\xa5\xbd";

static fp8lm_tokenizer *bytes_tokenizer;
static fp8lm_tokenizer *bpe;

static void train(fp8lm_end_of_text_place place, uint32_t vocabulary, fp8lm_trained *trained) {
  fp8lm_word_counts counts = {NULL, 0, 0, NULL, 0, 0};
  assert_ok(fp8lm_count_words(&counts, (const unsigned char *)corpus, strlen(corpus)));
  const fp8lm_train_options options = {vocabulary, 1, place};
  assert_ok(fp8lm_train_bpe(&counts, &options, trained));
  fp8lm_word_counts_free(&counts);
}

static int create(void **state) {
  (void)state;
  assert_ok(fp8lm_tokenizer_create_bytes(&bytes_tokenizer));
  fp8lm_trained trained;
  train(FP8LM_END_OF_TEXT_LAST, 420, &trained);
  assert_ok(fp8lm_tokenizer_parse_bpe(&bpe, trained.vocab, trained.vocab_size, trained.merges, trained.merges_size));
  fp8lm_trained_free(&trained);
  return 0;
}

static int destroy(void **state) {
  (void)state;
  fp8lm_tokenizer_destroy(&bytes_tokenizer);
  fp8lm_tokenizer_destroy(&bpe);
  assert_null(bpe);
  return 0;
}

static fp8lm_tokens encode(const fp8lm_tokenizer *tokenizer, fp8lm_encoder_options options, const void *text,
                           size_t size, size_t step) {
  fp8lm_encoder *encoder;
  fp8lm_tokens tokens = {NULL, 0, 0};
  assert_ok(fp8lm_encoder_create(&encoder, tokenizer, &options));
  for (size_t used = 0; used < size; used += step) {
    const size_t left = size - used;
    assert_ok(fp8lm_encoder_feed(encoder, (const char *)text + used, left < step ? left : step, &tokens));
  }
  assert_ok(fp8lm_encoder_finish(encoder, &tokens));
  fp8lm_encoder_destroy(&encoder);
  return tokens;
}

static size_t decode(const fp8lm_tokenizer *tokenizer, const fp8lm_tokens *tokens, unsigned char *out) {
  size_t used = 0;
  for (size_t i = 0; i < tokens->count; i++) {
    size_t length;
    const unsigned char *bytes = fp8lm_tokenizer_bytes(tokenizer, tokens->ids[i], &length);
    assert_non_null(bytes);
    memcpy(out + used, bytes, length);
    used += length;
  }
  return used;
}

static void assert_text(fp8lm_invalid_utf8 policy, const char *text, size_t size, const char *expected,
                        size_t expected_size) {
  const fp8lm_tokenizer *const tokenizers[] = {bytes_tokenizer, bpe};
  unsigned char *out = malloc(3 * size + 1);
  assert_non_null(out);
  for (size_t i = 0; i < 2; i++) {
    const fp8lm_encoder_options options = {policy, 0};
    fp8lm_tokens whole = encode(tokenizers[i], options, text, size, size + 1);
    assert_int_equal(decode(tokenizers[i], &whole, out), expected_size);
    assert_memory_equal(out, expected, expected_size);
    const size_t steps[] = {1, 2, 3, 5, 7, 64, 65536, 65537};
    for (size_t s = size > 10000 ? 5 : 0; s < sizeof(steps) / sizeof(steps[0]); s++) {
      fp8lm_tokens parts = encode(tokenizers[i], options, text, size, steps[s]);
      assert_int_equal(parts.count, whole.count);
      if (whole.count) assert_memory_equal(parts.ids, whole.ids, whole.count * sizeof(uint32_t));
      fp8lm_tokens_free(&parts);
    }
    fp8lm_tokens_free(&whole);
  }
  free(out);
}

static void test_round_trips(void **state) {
  (void)state;
  assert_text(FP8LM_INVALID_KEEP, corpus, strlen(corpus), corpus, strlen(corpus));
  assert_text(FP8LM_INVALID_REPLACE, corpus, strlen(corpus), corpus, strlen(corpus));
  assert_text(FP8LM_INVALID_KEEP, "", 0, "", 0);
  // Every byte, alone and beside every other.
  char pairs[2 * 65536];
  for (unsigned i = 0; i < 65536; i++) {
    pairs[2 * i] = (char)(i >> 8);
    pairs[2 * i + 1] = (char)i;
  }
  assert_text(FP8LM_INVALID_KEEP, pairs, sizeof(pairs), pairs, sizeof(pairs));
  for (unsigned i = 0; i < 256; i++) {
    const char one = (char)i;
    assert_text(FP8LM_INVALID_KEEP, &one, 1, &one, 1);
  }
  static const char emoji[] =
    "\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7 \xf0\x9f\x87\xaa\xf0\x9f\x87\xba "
    "1\xef\xb8\x8f\xe2\x83\xa3 \xf0\x9f\x91\x8d\xf0\x9f\x8f\xbd";
  assert_text(FP8LM_INVALID_REFUSE, emoji, sizeof(emoji) - 1, emoji, sizeof(emoji) - 1);
}

#define R "\xef\xbf\xbd"

static void test_broken_utf8(void **state) {
  (void)state;
  // From Unicode 16, tables 3-8 to 3-11, and the edges of every range.
  static const struct {
    const char *text;
    const char *expected;
  } cases[] = {
    {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", R R R R R R R R "A"},
    {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", R R R R R R R R "A"},
    {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", R R R R R "A" R R "B"},
    {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", R R R R "A"},
    {"\x80", R},
    {"a\xe2\x82", "a" R},
    {"a\xf0\x9f\x98", "a" R},
    {"a\xf0", "a" R},
    {"\xf5\x80\x80\x80", R R R R},
    {"\xf4\x8f\xbf\xbf\xf4\x90\x80\x80", "\xf4\x8f\xbf\xbf" R R R R},
    {"\xe0\xa0\x80\xe0\x9f\xbf", "\xe0\xa0\x80" R R R},
    {"\xf0\x90\x80\x80\xf0\x8f\xbf\xbf", "\xf0\x90\x80\x80" R R R R},
    {"\xc2\xc2\x80", R "\xc2\x80"},
    {"\xe2\x82\xe2\x82\xac", R "\xe2\x82\xac"},
    {"\xfe\xff", R R},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    const char *text = cases[i].text;
    assert_text(FP8LM_INVALID_REPLACE, text, strlen(text), cases[i].expected, strlen(cases[i].expected));
    assert_text(FP8LM_INVALID_KEEP, text, strlen(text), text, strlen(text));
    fp8lm_encoder *encoder;
    const fp8lm_encoder_options options = {FP8LM_INVALID_REFUSE, 0};
    fp8lm_tokens tokens = {NULL, 0, 0};
    assert_ok(fp8lm_encoder_create(&encoder, bpe, &options));
    fp8core_status status = fp8lm_encoder_feed(encoder, text, strlen(text), &tokens);
    if (status == FP8CORE_OK) status = fp8lm_encoder_finish(encoder, &tokens);
    assert_int_equal(status, FP8CORE_ERROR_CORRUPT_DATA);
    assert_non_null(strstr(fp8core_last_error(), "is not UTF-8"));
    // A new text may follow.
    tokens.count = 0;
    assert_ok(fp8lm_encoder_feed(encoder, "the", 3, &tokens));
    assert_ok(fp8lm_encoder_finish(encoder, &tokens));
    assert_true(tokens.count > 0);
    fp8lm_tokens_free(&tokens);
    fp8lm_encoder_destroy(&encoder);
  }
}

static void test_special_token(void **state) {
  (void)state;
  static const char text[] = "one <|endoftext|>two<|endoftext|><|endoftext|> <|endoftex <|end";
  const fp8lm_tokenizer *const tokenizers[] = {bytes_tokenizer, bpe};
  for (size_t i = 0; i < 2; i++) {
    for (size_t step = 1; step < sizeof(text); step++) {
      size_t counts[2] = {0, 0};
      for (int special = 0; special < 2; special++) {
        const fp8lm_encoder_options options = {FP8LM_INVALID_REPLACE, special};
        fp8lm_tokens tokens = encode(tokenizers[i], options, text, sizeof(text) - 1, step);
        for (size_t k = 0; k < tokens.count; k++) {
          counts[special] += tokens.ids[k] == fp8lm_tokenizer_end_of_text(tokenizers[i]);
        }
        unsigned char out[sizeof(text)];
        assert_int_equal(decode(tokenizers[i], &tokens, out), sizeof(text) - 1);
        assert_memory_equal(out, text, sizeof(text) - 1);
        fp8lm_tokens_free(&tokens);
      }
      assert_int_equal(counts[0], 0);
      assert_int_equal(counts[1], 3);
    }
  }
}

static size_t put_text(char *out, const unsigned char *text) {
  const size_t length = strlen((const char *)text);
  memcpy(out, text, length);
  return length;
}

// The definition: again and again the pair of the lowest rank, of several the first. Ranks are the order in the text.
static size_t merge_by_definition(const fp8lm_trained *trained, const unsigned char *word, size_t length,
                                  unsigned char (*parts)[256]) {
  size_t count = 0;
  for (size_t i = 0; i < length; i++) {
    const uint32_t c = fp8lm_byte_character(word[i]);
    parts[count][0] = (unsigned char)(c < 0x80 ? c : 0xc0 | c >> 6);
    parts[count][1] = (unsigned char)(c < 0x80 ? 0 : 0x80 | (c & 0x3f));
    parts[count++][2] = 0;
  }
  for (;;) {
    const char *best = NULL;
    size_t place = 0;
    for (size_t i = 0; i + 1 < count; i++) {
      char line[600];
      size_t used = 0;
      line[used++] = '\n';
      used += put_text(line + used, parts[i]);
      line[used++] = ' ';
      used += put_text(line + used, parts[i + 1]);
      line[used++] = '\n';
      line[used] = '\0';
      const char *found = strstr(trained->merges, line);
      if (found && (!best || found < best)) {
        best = found;
        place = i;
      }
    }
    if (!best) return count;
    const size_t length_before = strlen((char *)parts[place]);
    memmove(parts[place] + length_before, parts[place + 1], strlen((char *)parts[place + 1]) + 1);
    count--;
    memmove(parts[place + 1], parts[place + 2], (count - place - 1) * sizeof(parts[0]));
  }
}

static void test_merges(void **state) {
  (void)state;
  fp8lm_trained trained;
  train(FP8LM_END_OF_TEXT_LAST, 420, &trained);
  static unsigned char parts[120][256];
  // Through the table of words (to 24 bytes), short merges (to 48) and the heap.
  for (size_t length = 1; length <= 120; length++) {
    for (unsigned kind = 0; kind < 4; kind++) {
      unsigned char word[120];
      for (size_t i = 0; i < length; i++)
        word[i] = (unsigned char)(kind == 0 ? 'a' : "abcthe"[i * (kind + 1) * 7 % (2 * kind)]);
      const size_t expected = merge_by_definition(&trained, word, length, parts);
      const fp8lm_encoder_options options = {FP8LM_INVALID_KEEP, 0};
      for (int again = 0; again < 2; again++) {
        fp8lm_tokens tokens = encode(bpe, options, word, length, 1000);
        assert_int_equal(tokens.count, expected);
        for (size_t i = 0; i < tokens.count; i++) {
          size_t bytes;
          (void)fp8lm_tokenizer_bytes(bpe, tokens.ids[i], &bytes);
          assert_int_equal(bytes, strlen((char *)parts[i]));
        }
        fp8lm_tokens_free(&tokens);
      }
    }
  }
  fp8lm_trained_free(&trained);
}

static void test_long_text(void **state) {
  (void)state;
  // A word far longer than a block, and one that is too long.
  const size_t size = FP8LM_TOKENIZER_MAX_WORD + 100000;
  char *text = malloc(size);
  assert_non_null(text);
  memset(text, 'a', size);
  text[300000] = ' ';
  assert_text(FP8LM_INVALID_REPLACE, text, 500000, text, 500000);
  fp8lm_encoder *encoder;
  const fp8lm_encoder_options options = {FP8LM_INVALID_REPLACE, 0};
  fp8lm_tokens tokens = {NULL, 0, 0};
  text[300000] = 'a';
  assert_ok(fp8lm_encoder_create(&encoder, bpe, &options));
  fp8core_status status = fp8lm_encoder_feed(encoder, text, size, &tokens);
  if (status == FP8CORE_OK) status = fp8lm_encoder_finish(encoder, &tokens);
  assert_int_equal(status, FP8CORE_ERROR_CORRUPT_DATA);
  assert_non_null(strstr(fp8core_last_error(), "a word of more than 16777216 bytes"));
  fp8lm_encoder_destroy(&encoder);
  fp8lm_tokens_free(&tokens);
  free(text);
}

static void test_places_of_end_of_text(void **state) {
  (void)state;
  static const int64_t expected[] = {0, 299, -1};
  for (int place = FP8LM_END_OF_TEXT_FIRST; place <= FP8LM_END_OF_TEXT_NONE; place++) {
    fp8lm_trained trained;
    fp8lm_tokenizer *tokenizer;
    train((fp8lm_end_of_text_place)place, 300, &trained);
    assert_int_equal(trained.vocabulary, 300);
    assert_ok(
      fp8lm_tokenizer_parse_bpe(&tokenizer, trained.vocab, trained.vocab_size, trained.merges, trained.merges_size));
    assert_int_equal(fp8lm_tokenizer_vocabulary(tokenizer), 300);
    assert_int_equal(fp8lm_tokenizer_end_of_text(tokenizer), expected[place]);
    size_t length;
    assert_null(fp8lm_tokenizer_bytes(tokenizer, 300, &length));
    assert_null(fp8lm_tokenizer_bytes(tokenizer, UINT32_MAX, &length));
    fp8lm_tokenizer_destroy(&tokenizer);
    fp8lm_trained_free(&trained);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_round_trips),   cmocka_unit_test(test_broken_utf8),
    cmocka_unit_test(test_special_token), cmocka_unit_test(test_merges),
    cmocka_unit_test(test_long_text),     cmocka_unit_test(test_places_of_end_of_text),
  };
  return cmocka_run_group_tests(tests, create, destroy);
}
