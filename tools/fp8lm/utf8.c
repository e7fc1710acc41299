#include "utf8.h"

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
