// The scanner of words against the pattern itself, run by PCRE2, on random text; and the classes of code points.
#include "support.h"

#include <stdio.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "words.h"

#define PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static uint64_t next(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static size_t put_character(unsigned char *out, uint32_t c) {
  if (c < 0x80) {
    out[0] = (unsigned char)c;
    return 1;
  }
  const size_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const unsigned char leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
  for (size_t i = length; i-- > 0; c >>= 6) out[i] = (unsigned char)(i ? 0x80 | (c & 0x3f) : leads[length] | c);
  return length;
}

static pcre2_code *compile(const char *pattern) {
  int error;
  PCRE2_SIZE offset;
  pcre2_code *code =
    pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &offset, NULL);
  assert_non_null(code);
  // Not everywhere.
  (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return code;
}

static size_t match(const pcre2_code *code, pcre2_match_data *data, const unsigned char *text, size_t size,
                    size_t start) {
  if (pcre2_match(code, text, size, start, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED, data, NULL) <= 0) return 0;
  return pcre2_get_ovector_pointer(data)[1] - start;
}

// PCRE2 may know another version of Unicode, and counts U+180E as white space, which it no longer is.
static unsigned char same_class[0x110000];
static size_t same_count[4];

static int find_same_classes(void **state) {
  (void)state;
  static const char *const patterns[] = {"[^\\s\\p{L}\\p{N}]", "\\p{L}", "\\p{N}", "\\s"};
  fp8lm_words_prepare();
  for (size_t class = 0; class < 4; class ++) {
    pcre2_code *code = compile(patterns[class]);
    pcre2_match_data *data = pcre2_match_data_create_from_pattern(code, NULL);
    for (uint32_t c = 0; c < 0x110000; c++) {
      unsigned char text[4];
      if (c >= 0xd800 && c < 0xe000) continue;
      const size_t length = put_character(text, c);
      if ((size_t)fp8lm_class_of(c) == class && match(code, data, text, length, 0)) {
        same_class[c] = 1;
        same_count[class]++;
      }
    }
    pcre2_match_data_free(data);
    pcre2_code_free(code);
  }
  return 0;
}

static void test_classes(void **state) {
  (void)state;
  size_t counts[4] = {0, 0, 0, 0};
  for (uint32_t c = 0; c < 0x110000; c++) counts[fp8lm_class_of(c)]++;
  // Unicode 16.
  assert_int_equal(counts[FP8LM_LETTER], 141028);
  assert_int_equal(counts[FP8LM_SPACE], 25);
  assert_int_equal(fp8lm_class_of(0x180e), FP8LM_OTHER);
  assert_int_equal(fp8lm_class_of(0xfffd), FP8LM_OTHER);
  assert_int_equal(fp8lm_class_of(0x2167), FP8LM_NUMBER);
  // What any version that PCRE2 has known since 10.40 agrees on.
  assert_true(same_count[FP8LM_LETTER] > 131000);
  assert_true(same_count[FP8LM_NUMBER] > 1700);
  assert_int_equal(same_count[FP8LM_SPACE], 25);
}

static uint32_t random_character(uint64_t *state) {
  static const char frequent[] = "''''sstmdrevl   \n\n\t\raZ09.!-";
  static const uint32_t special[] = {0x85, 0xa0,   0x2003, 0x3000,  0x2028, 0x200b, 0x300,
                                     0xe9, 0x4e00, 0xff10, 0x1f600, 0xb2,   0xfffd, 0};
  for (;;) {
    const uint64_t kind = next(state) % 10;
    uint32_t c;
    if (kind < 6)
      c = (unsigned char)frequent[next(state) % (sizeof(frequent) - 1)];
    else if (kind < 8)
      c = special[next(state) % (sizeof(special) / sizeof(special[0]))];
    else
      c = (uint32_t)(next(state) % (kind == 8 ? 0x3000 : 0x110000));
    if (same_class[c]) return c;
  }
}

static void test_pattern(void **state) {
  (void)state;
  pcre2_code *code = compile(PATTERN);
  pcre2_match_data *data = pcre2_match_data_create_from_pattern(code, NULL);
  uint64_t random = 1;
  for (int turn = 0; turn < 100000; turn++) {
    unsigned char text[4 * 64];
    size_t size = 0;
    for (uint64_t left = 1 + next(&random) % 40; left; left--)
      size += put_character(text + size, random_character(&random));
    for (size_t start = 0; start < size;) {
      const size_t expected = match(code, data, text, size, start);
      const size_t length = fp8lm_next_word(text + start, size - start, 1);
      if (length != expected) {
        for (size_t i = 0; i < size; i++) print_error("%02x ", text[i]);
        fail_msg("turn %d: the word at byte %zu has %zu bytes, expected %zu", turn, start, length, expected);
      }
      start += length;
    }
  }
  pcre2_match_data_free(data);
  pcre2_code_free(code);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_classes),
    cmocka_unit_test(test_pattern),
  };
  return cmocka_run_group_tests(tests, find_same_classes, NULL);
}
