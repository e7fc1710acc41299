#include "words.h"

#include <pthread.h>
#include <string.h>

#include "unicode_ranges.h"
#include "utf8.h"

enum { CODE_POINTS = 0x110000 };

// Two bits a code point.
static uint8_t packed_classes[CODE_POINTS / 4];
static uint8_t ascii_classes[128];

static const uint32_t space_ranges[][2] = {{0x9, 0xd},       {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},
                                           {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                           {0x205f, 0x205f}, {0x3000, 0x3000}};

static void add_ranges(const uint32_t ranges[][2], size_t count, fp8lm_class class) {
  for (size_t i = 0; i < count; i++) {
    for (uint32_t c = ranges[i][0]; c <= ranges[i][1]; c++) packed_classes[c / 4] |= (uint8_t)(class << (2 * (c % 4)));
  }
}

static void fill_tables(void) {
  add_ranges(letter_ranges, sizeof(letter_ranges) / sizeof(letter_ranges[0]), FP8LM_LETTER);
  add_ranges(number_ranges, sizeof(number_ranges) / sizeof(number_ranges[0]), FP8LM_NUMBER);
  add_ranges(space_ranges, sizeof(space_ranges) / sizeof(space_ranges[0]), FP8LM_SPACE);
  for (uint32_t c = 0; c < 128; c++) ascii_classes[c] = (uint8_t)fp8lm_class_of(c);
}

void fp8lm_words_prepare(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill_tables);
}

fp8lm_class fp8lm_class_of(uint32_t code_point) {
  return (fp8lm_class)(packed_classes[code_point / 4] >> (2 * (code_point % 4)) & 3);
}

// Class and length of the character at `text`, which has `available` bytes, at least 1.
static inline size_t look(const unsigned char *text, size_t available, fp8lm_class *class) {
  if (text[0] < 0x80) {
    *class = (fp8lm_class)ascii_classes[text[0]];
    return 1;
  }
  const size_t length = fp8lm_utf8_length((const char *)text, available);
  uint32_t code_point;
  switch (length) {
  case 2: code_point = (text[0] & 0x1fU) << 6 | (text[1] & 0x3fU); break;
  case 3: code_point = (text[0] & 0xfU) << 12 | (text[1] & 0x3fU) << 6 | (text[2] & 0x3fU); break;
  case 4:
    code_point = (text[0] & 7U) << 18 | (text[1] & 0x3fU) << 12 | (text[2] & 0x3fU) << 6 | (text[3] & 0x3fU);
    break;
  default: *class = FP8LM_OTHER; return 1;
  }
  *class = fp8lm_class_of(code_point);
  return length;
}

static size_t contraction(const unsigned char *text, size_t size) {
  if (size < 2) return 0;
  switch (text[1]) {
  case 's':
  case 't':
  case 'm':
  case 'd': return 2;
  case 'r':
  case 'v': return size > 2 && text[2] == 'e' ? 3 : 0;
  case 'l': return size > 2 && text[2] == 'l' ? 3 : 0;
  default: return 0;
  }
}

size_t fp8lm_next_word(const unsigned char *text, size_t size, int final) {
  // A character, or a contraction, that begins before the limit is there whole.
  const size_t limit = final ? size : size > 3 ? size - 3 : 0;
  if (limit == 0) return 0;
  if (text[0] == '\'') {
    const size_t length = contraction(text, size);
    if (length) return length;
  }
  fp8lm_class class;
  size_t position = look(text, size, &class);
  if (text[0] == ' ') {
    if (limit == 1) return final ? 1 : 0;
    fp8lm_class second;
    const size_t length = look(text + 1, size - 1, &second);
    if (second != FP8LM_SPACE) {
      class = second;
      position += length;
    }
  }
  // Start of the last character of white space.
  size_t last = 0;
  while (position < limit) {
    fp8lm_class next;
    const size_t length = look(text + position, size - position, &next);
    if (next != class) {
      // White space gives its last character to the word that follows, unless it has only one.
      return class == FP8LM_SPACE && last > 0 ? last : position;
    }
    last = position;
    position += length;
  }
  return final ? position : 0;
}

int fp8lm_divides_words(const unsigned char *text, size_t size, size_t position) {
  fp8lm_class before = FP8LM_OTHER;
  // Where no sequence of 1 to 4 bytes ends here, the byte before is a character of its own.
  for (size_t length = 1; length <= 4 && length <= position; length++) {
    const unsigned char *start = text + position - length;
    if (fp8lm_utf8_length((const char *)start, length) != length) continue;
    (void)look(start, length, &before);
    break;
  }
  if ((text[position] & 0xc0) == 0x80) return 0;
  // A character that is cut off at the end might become a letter.
  if (size - position < 4 && text[position] >= 0x80) return 0;
  fp8lm_class after;
  (void)look(text + position, size - position, &after);
  // An apostrophe and a letter may be one word; white space goes with what follows.
  return before != FP8LM_SPACE && before != after && !(before == FP8LM_OTHER && after == FP8LM_LETTER);
}
