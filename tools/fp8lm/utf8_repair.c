#include "utf8_repair.h"

#include <string.h>

#include "utf8.h"

// The maximal subpart of an ill-formed sequence at `text` (Unicode 16, 3.9, "U+FFFD Substitution of Maximal Subparts").
// *open: the text ends where the sequence might still go on.
static size_t maximal_subpart(const unsigned char *text, size_t available, int *open) {
  *open = 0;
  if (text[0] < 0xc2 || text[0] > 0xf4) return 1;
  // What is there, completed: only the second byte of a sequence has bounds of its own.
  unsigned char sequence[4] = {text[0], 0x80, 0x80, 0x80};
  const size_t length = text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : 4;
  for (size_t good = 1; good < length; good++) {
    if (good == available) {
      *open = 1;
      return good;
    }
    sequence[good] = text[good];
    if (fp8lm_utf8_length((const char *)sequence, 4) != length) return good;
  }
  return length;
}

fp8lm_repaired fp8lm_repair_utf8(unsigned char *out, const unsigned char *bytes, size_t size, int final,
                                 fp8lm_invalid_utf8 policy) {
  fp8lm_repaired result = {0, 0, 0, 0};
  unsigned char *const start = out;
  size_t i = 0;
  while (i < size) {
    uint64_t word;
    while (size - i >= 8 && (memcpy(&word, bytes + i, 8), !(word & UINT64_C(0x8080808080808080)))) {
      memcpy(out, &word, 8);
      out += 8;
      i += 8;
    }
    if (i == size) break;
    const size_t length = fp8lm_utf8_length((const char *)bytes + i, size - i);
    if (length) {
      for (size_t k = 0; k < length; k++) *out++ = bytes[i + k];
      i += length;
      continue;
    }
    int open;
    const size_t part = maximal_subpart(bytes + i, size - i, &open);
    if (open && !final) break;
    if (policy == FP8LM_INVALID_REFUSE) {
      result.refused = 1;
      break;
    }
    if (policy == FP8LM_INVALID_REPLACE) {
      memcpy(out, "\xef\xbf\xbd", 3);
      out += 3;
      result.replaced++;
    } else {
      memcpy(out, bytes + i, part);
      out += part;
    }
    i += part;
  }
  result.used = i;
  result.written = (size_t)(out - start);
  return result;
}
