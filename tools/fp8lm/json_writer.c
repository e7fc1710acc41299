#include "json_writer.h"

#include <math.h>
#include <stdlib.h>

#include "utf8.h"

void fp8lm_json_write_string(FILE *stream, const char *text, size_t length) {
  fputc('"', stream);
  for (size_t i = 0; i < length;) {
    const unsigned char c = (unsigned char)text[i];
    const size_t sequence = fp8lm_utf8_length(text + i, length - i);
    if (c == '"' || c == '\\') {
      fprintf(stream, "\\%c", c);
    } else if (c < 0x20 || c == 0x7f || (sequence == 2 && c == 0xc2 && (unsigned char)text[i + 1] < 0xa0)) {
      // Control characters, of which terminals obey those of U+0080 to U+009F too.
      fprintf(stream, "\\u%04x", (unsigned)(unsigned char)text[i + sequence - 1]);
    } else if (sequence == 0) {
      fputs("\\ufffd", stream);
    } else {
      fwrite(text + i, 1, sequence, stream);
    }
    i += sequence ? sequence : 1;
  }
  fputc('"', stream);
}

void fp8lm_json_write_number(FILE *stream, double value) {
  if (!isfinite(value)) {
    fputs("null", stream);
    return;
  }
  char text[40];
  for (int digits = 6; digits <= 17; digits++) {
    snprintf(text, sizeof(text), "%.*g", digits, value);
    if (strtod(text, NULL) == value) break;
  }
  fputs(text, stream);
}
