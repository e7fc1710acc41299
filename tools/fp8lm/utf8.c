#include "utf8.h"

#include <stdio.h>
#include <string.h>

size_t fp8lm_utf8_length(const char *text, size_t available) {
  const unsigned char *bytes = (const unsigned char *)text;
  size_t length;
  unsigned lowest = 0x80;
  unsigned highest = 0xbf;
  if (bytes[0] < 0x80) return 1;
  if (bytes[0] >= 0xc2 && bytes[0] <= 0xdf) {
    length = 2;
  } else if (bytes[0] >= 0xe0 && bytes[0] <= 0xef) {
    length = 3;
    if (bytes[0] == 0xe0) lowest = 0xa0;
    if (bytes[0] == 0xed) highest = 0x9f;
  } else if (bytes[0] >= 0xf0 && bytes[0] <= 0xf4) {
    length = 4;
    if (bytes[0] == 0xf0) lowest = 0x90;
    if (bytes[0] == 0xf4) highest = 0x8f;
  } else {
    return 0;
  }
  if (available < length || bytes[1] < lowest || bytes[1] > highest) return 0;
  for (size_t i = 2; i < length; i++) {
    if (bytes[i] < 0x80 || bytes[i] > 0xbf) return 0;
  }
  return length;
}

size_t fp8lm_printable(const char *text, size_t available, char printable[FP8LM_PRINTABLE_BYTES]) {
  const unsigned char *bytes = (const unsigned char *)text;
  const size_t length = fp8lm_utf8_length(text, available);
  if (length == 0) {
    (void)snprintf(printable, FP8LM_PRINTABLE_BYTES, "\\x%02x", bytes[0]);
    return 1;
  }
  if (bytes[0] < 0x20 || bytes[0] == 0x7f || (bytes[0] == 0xc2 && bytes[1] < 0xa0)) {
    (void)snprintf(printable, FP8LM_PRINTABLE_BYTES, "\\u%04x", bytes[length - 1]);
    return length;
  }
  memcpy(printable, text, length);
  printable[length] = '\0';
  return length;
}
