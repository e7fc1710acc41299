#include "json_reader.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

void fp8lm_json_init(fp8lm_json *json, char *text, size_t length) {
  json->start = text;
  json->cursor = text;
  json->end = text + length;
  json->depth = 0;
  json->object_levels = 0;
  json->begun_levels = 0;
}

fp8core_status fp8lm_json_expected(const fp8lm_json *json, const char *expected) {
  const size_t position = (size_t)(json->cursor - json->start);
  if (json->cursor == json->end) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "JSON, byte %zu: expected %s, found the end", position,
                                  expected);
  }
  const unsigned char found = (unsigned char)*json->cursor;
  if (found > 0x20 && found < 0x7f) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "JSON, byte %zu: expected %s, found '%c'", position,
                                  expected, found);
  }
  return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "JSON, byte %zu: expected %s, found byte 0x%02x", position,
                                expected, (unsigned)found);
}

static void skip_white_space(fp8lm_json *json) {
  while (json->cursor < json->end &&
         (*json->cursor == ' ' || *json->cursor == '\t' || *json->cursor == '\n' || *json->cursor == '\r')) {
    json->cursor++;
  }
}

// The next character, 0 at the end; a NUL in the text is no valid token either.
static char look(fp8lm_json *json) {
  skip_white_space(json);
  return json->cursor < json->end ? *json->cursor : '\0';
}

fp8lm_json_type fp8lm_json_peek(fp8lm_json *json) {
  const char next = look(json);
  switch (next) {
  case '{': return FP8LM_JSON_OBJECT;
  case '[': return FP8LM_JSON_ARRAY;
  case '"': return FP8LM_JSON_STRING;
  case 't': return FP8LM_JSON_TRUE;
  case 'f': return FP8LM_JSON_FALSE;
  case 'n': return FP8LM_JSON_NULL;
  default: return next == '-' || (next >= '0' && next <= '9') ? FP8LM_JSON_NUMBER : FP8LM_JSON_NONE;
  }
}

static fp8core_status enter(fp8lm_json *json, int object) {
  if (look(json) != (object ? '{' : '[')) return fp8lm_json_expected(json, object ? "an object" : "an array");
  if (json->depth == FP8LM_JSON_MAX_DEPTH) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "JSON, byte %zu: nested deeper than %d levels",
                                  (size_t)(json->cursor - json->start), FP8LM_JSON_MAX_DEPTH);
  }
  json->cursor++;
  const uint64_t bit = UINT64_C(1) << json->depth;
  json->object_levels = object ? json->object_levels | bit : json->object_levels & ~bit;
  json->begun_levels &= ~bit;
  json->depth++;
  return FP8CORE_OK;
}

fp8core_status fp8lm_json_enter_object(fp8lm_json *json) { return enter(json, 1); }

fp8core_status fp8lm_json_enter_array(fp8lm_json *json) { return enter(json, 0); }

// Passes the comma before an element, or the closing bracket (*more 0).
static fp8core_status advance(fp8lm_json *json, int object, int *more) {
  const uint64_t bit = UINT64_C(1) << (json->depth - 1);
  const char next = look(json);
  if (next == (object ? '}' : ']')) {
    json->cursor++;
    json->depth--;
    *more = 0;
    return FP8CORE_OK;
  }
  if (json->begun_levels & bit) {
    if (next != ',') return fp8lm_json_expected(json, object ? "',' or '}'" : "',' or ']'");
    json->cursor++;
  }
  json->begun_levels |= bit;
  *more = 1;
  return FP8CORE_OK;
}

fp8core_status fp8lm_json_next_member(fp8lm_json *json, char **key, size_t *length, int *more) {
  const fp8core_status status = advance(json, 1, more);
  if (status != FP8CORE_OK || !*more) return status;
  if (look(json) != '"') return fp8lm_json_expected(json, "a key in double quotes");
  const fp8core_status string_status = fp8lm_json_string(json, key, length);
  if (string_status != FP8CORE_OK) return string_status;
  if (look(json) != ':') return fp8lm_json_expected(json, "':'");
  json->cursor++;
  return FP8CORE_OK;
}

fp8core_status fp8lm_json_next_element(fp8lm_json *json, int *more) { return advance(json, 0, more); }

// Four hexadecimal digits at `cursor`; -1 if they are not there.
static int32_t read_hexadecimal(const fp8lm_json *json, const char *cursor) {
  if (json->end - cursor < 4) return -1;
  int32_t value = 0;
  for (int i = 0; i < 4; i++) {
    const char c = cursor[i];
    int digit;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else {
      return -1;
    }
    value = value * 16 + digit;
  }
  return value;
}

static char *write_utf8(char *out, uint32_t code_point) {
  if (code_point < 0x80) {
    *out++ = (char)code_point;
  } else if (code_point < 0x800) {
    *out++ = (char)(0xc0 | (code_point >> 6));
    *out++ = (char)(0x80 | (code_point & 0x3f));
  } else if (code_point < 0x10000) {
    *out++ = (char)(0xe0 | (code_point >> 12));
    *out++ = (char)(0x80 | ((code_point >> 6) & 0x3f));
    *out++ = (char)(0x80 | (code_point & 0x3f));
  } else {
    *out++ = (char)(0xf0 | (code_point >> 18));
    *out++ = (char)(0x80 | ((code_point >> 12) & 0x3f));
    *out++ = (char)(0x80 | ((code_point >> 6) & 0x3f));
    *out++ = (char)(0x80 | (code_point & 0x3f));
  }
  return out;
}

// The escape after a backslash that the cursor has passed.
static fp8core_status read_escape(fp8lm_json *json, char **out) {
  static const char escapes[] = "\"\\/bfnrt";
  static const char meanings[] = "\"\\/\b\f\n\r\t";
  if (json->cursor == json->end) return fp8lm_json_expected(json, "an escape");
  const char *found = *json->cursor ? strchr(escapes, *json->cursor) : NULL;
  if (found) {
    *(*out)++ = meanings[found - escapes];
    json->cursor++;
    return FP8CORE_OK;
  }
  if (*json->cursor != 'u') return fp8lm_json_expected(json, "an escape of JSON");
  json->cursor++;
  const int32_t first = read_hexadecimal(json, json->cursor);
  if (first < 0) return fp8lm_json_expected(json, "four hexadecimal digits");
  uint32_t code_point = (uint32_t)first;
  if (code_point >= 0xdc00 && code_point <= 0xdfff)
    return fp8lm_json_expected(json, "no low surrogate without a high one");
  json->cursor += 4;
  if (code_point >= 0xd800 && code_point <= 0xdbff) {
    const int32_t second = json->end - json->cursor >= 6 && json->cursor[0] == '\\' && json->cursor[1] == 'u'
                             ? read_hexadecimal(json, json->cursor + 2)
                             : -1;
    if (second < 0xdc00 || second > 0xdfff) return fp8lm_json_expected(json, "the escape of a low surrogate");
    json->cursor += 6;
    code_point = 0x10000 + ((code_point - 0xd800) << 10) + ((uint32_t)second - 0xdc00);
  }
  *out = write_utf8(*out, code_point);
  return FP8CORE_OK;
}

fp8core_status fp8lm_json_string(fp8lm_json *json, char **text, size_t *length) {
  if (look(json) != '"') return fp8lm_json_expected(json, "a string");
  json->cursor++;
  char *out = json->cursor;
  *text = out;
  for (;;) {
    if (json->cursor == json->end) return fp8lm_json_expected(json, "the closing '\"' of a string");
    const unsigned char next = (unsigned char)*json->cursor;
    if (next == '"') break;
    if (next == '\\') {
      json->cursor++;
      const fp8core_status status = read_escape(json, &out);
      if (status != FP8CORE_OK) return status;
      continue;
    }
    if (next < 0x20) return fp8lm_json_expected(json, "an escape in place of a control character");
    const size_t sequence = fp8lm_utf8_length(json->cursor, (size_t)(json->end - json->cursor));
    if (sequence == 0) return fp8lm_json_expected(json, "UTF-8");
    for (size_t i = 0; i < sequence; i++) *out++ = *json->cursor++;
  }
  json->cursor++;
  // At most the closing quote is overwritten.
  *length = (size_t)(out - *text);
  *out = '\0';
  return FP8CORE_OK;
}

static int at_digit(const fp8lm_json *json) {
  return json->cursor < json->end && *json->cursor >= '0' && *json->cursor <= '9';
}

fp8core_status fp8lm_json_unsigned(fp8lm_json *json, uint64_t *value) {
  skip_white_space(json);
  if (!at_digit(json)) return fp8lm_json_expected(json, "a whole number of at least 0");
  const char *start = json->cursor;
  uint64_t parsed = 0;
  while (at_digit(json)) {
    const uint64_t digit = (uint64_t)(*json->cursor - '0');
    if (parsed > (UINT64_MAX - digit) / 10) {
      size_t digits = 0;
      while (start + digits < json->end && start[digits] >= '0' && start[digits] <= '9') digits++;
      return fp8core_set_last_error(
        FP8CORE_ERROR_CORRUPT_DATA, "JSON, byte %zu: expected a number below 2^64, found %.*s%s",
        (size_t)(start - json->start), (int)(digits < 40 ? digits : 40), start, digits > 40 ? "..." : "");
    }
    parsed = parsed * 10 + digit;
    json->cursor++;
    if (*start == '0' && at_digit(json)) return fp8lm_json_expected(json, "no digits after a leading 0");
  }
  if (json->cursor < json->end && (*json->cursor == '.' || *json->cursor == 'e' || *json->cursor == 'E')) {
    return fp8lm_json_expected(json, "a whole number without fraction or exponent");
  }
  *value = parsed;
  return FP8CORE_OK;
}

static fp8core_status skip_digits(fp8lm_json *json) {
  if (!at_digit(json)) return fp8lm_json_expected(json, "a digit");
  while (at_digit(json)) json->cursor++;
  return FP8CORE_OK;
}

static fp8core_status skip_number(fp8lm_json *json) {
  fp8core_status status;
  if (*json->cursor == '-') json->cursor++;
  if (at_digit(json) && *json->cursor == '0') {
    json->cursor++;
    if (at_digit(json)) return fp8lm_json_expected(json, "no digits after a leading 0");
  } else {
    status = skip_digits(json);
    if (status != FP8CORE_OK) return status;
  }
  if (json->cursor < json->end && *json->cursor == '.') {
    json->cursor++;
    status = skip_digits(json);
    if (status != FP8CORE_OK) return status;
  }
  if (json->cursor < json->end && (*json->cursor == 'e' || *json->cursor == 'E')) {
    json->cursor++;
    if (json->cursor < json->end && (*json->cursor == '+' || *json->cursor == '-')) json->cursor++;
    return skip_digits(json);
  }
  return FP8CORE_OK;
}

static fp8core_status skip_word(fp8lm_json *json, const char *word) {
  const size_t length = strlen(word);
  if ((size_t)(json->end - json->cursor) < length || memcmp(json->cursor, word, length) != 0) {
    return fp8lm_json_expected(json, "a value");
  }
  json->cursor += length;
  return FP8CORE_OK;
}

fp8core_status fp8lm_json_real(fp8lm_json *json, double *value) {
  if (fp8lm_json_peek(json) != FP8LM_JSON_NUMBER) return fp8lm_json_expected(json, "a number");
  char *start = json->cursor;
  const fp8core_status status = skip_number(json);
  if (status != FP8CORE_OK) return status;
  // The text need not end in a NUL, which strtod() wants.
  char text[64];
  const size_t length = (size_t)(json->cursor - start);
  if (length < sizeof(text)) {
    memcpy(text, start, length);
    text[length] = '\0';
    *value = strtod(text, NULL);
    if (isfinite(*value)) return FP8CORE_OK;
  }
  json->cursor = start;
  return fp8lm_json_expected(json, "a number of less than 64 characters that a double holds");
}

fp8core_status fp8lm_json_boolean(fp8lm_json *json, int *value) {
  const fp8lm_json_type type = fp8lm_json_peek(json);
  if (type != FP8LM_JSON_TRUE && type != FP8LM_JSON_FALSE) return fp8lm_json_expected(json, "true or false");
  *value = type == FP8LM_JSON_TRUE;
  return skip_word(json, *value ? "true" : "false");
}

// A number, string or word, or the start of an object or array.
static fp8core_status skip_token(fp8lm_json *json) {
  char *text;
  size_t length;
  switch (fp8lm_json_peek(json)) {
  case FP8LM_JSON_OBJECT: return fp8lm_json_enter_object(json);
  case FP8LM_JSON_ARRAY: return fp8lm_json_enter_array(json);
  case FP8LM_JSON_STRING: return fp8lm_json_string(json, &text, &length);
  case FP8LM_JSON_NUMBER: return skip_number(json);
  case FP8LM_JSON_TRUE: return skip_word(json, "true");
  case FP8LM_JSON_FALSE: return skip_word(json, "false");
  case FP8LM_JSON_NULL: return skip_word(json, "null");
  case FP8LM_JSON_NONE: break;
  }
  return fp8lm_json_expected(json, "a value");
}

fp8core_status fp8lm_json_skip(fp8lm_json *json) {
  const int outer_depth = json->depth;
  for (;;) {
    fp8core_status status = skip_token(json);
    if (status != FP8CORE_OK) return status;
    int more = 0;
    while (!more) {
      if (json->depth == outer_depth) return FP8CORE_OK;
      char *key;
      size_t length;
      const int object = (json->object_levels >> (json->depth - 1)) & 1;
      status = object ? fp8lm_json_next_member(json, &key, &length, &more) : fp8lm_json_next_element(json, &more);
      if (status != FP8CORE_OK) return status;
    }
  }
}

fp8core_status fp8lm_json_finish(fp8lm_json *json) {
  skip_white_space(json);
  return json->cursor == json->end ? FP8CORE_OK : fp8lm_json_expected(json, "the end of the text");
}
