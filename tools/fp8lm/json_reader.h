/** \file
 * A strict reader of JSON text (RFC 8259) that is pulled value by value, without building a tree: what a header of 100
 * MB needs besides its own text is the reader itself.
 *
 * Stricter than most: text must be UTF-8, surrogate escapes must pair, integers are exact up to 2^64 - 1 (not rounded
 * through a double), nesting is limited. Duplicate keys are the caller's to find, since only it knows what to keep.
 * Every function sets fp8core_last_error() to a message with the byte position and returns FP8CORE_ERROR_CORRUPT_DATA
 * on malformed text; the reader must not be used after that.
 */
#ifndef FP8LM_JSON_READER_H
#define FP8LM_JSON_READER_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"

/** Arrays and objects that may be open at once. */
#define FP8LM_JSON_MAX_DEPTH 64

typedef enum fp8lm_json_type {
  FP8LM_JSON_OBJECT,
  FP8LM_JSON_ARRAY,
  FP8LM_JSON_STRING,
  FP8LM_JSON_NUMBER,
  FP8LM_JSON_TRUE,
  FP8LM_JSON_FALSE,
  FP8LM_JSON_NULL,
  /** No value starts here. */
  FP8LM_JSON_NONE
} fp8lm_json_type;

typedef struct fp8lm_json {
  char *start;
  char *cursor;
  char *end;
  int depth;
  /** Bit d tells of the d-th open value: whether it is an object, and whether an element was read. */
  uint64_t object_levels;
  uint64_t begun_levels;
} fp8lm_json;

/** Reads \p length bytes at \p text, which strings are decoded into in place, so that they need no memory of their own.
 */
void fp8lm_json_init(fp8lm_json *json, char *text, size_t length);

/** Type of the value that comes next, by its first character. */
fp8lm_json_type fp8lm_json_peek(fp8lm_json *json);

/** Enters an object or array. Its end is found by the functions below, and leaves it. */
fp8core_status fp8lm_json_enter_object(fp8lm_json *json);
fp8core_status fp8lm_json_enter_array(fp8lm_json *json);

/**
 * Reads the next key of the innermost object up to the colon; its value must be read next. *more is 0 at the object's
 * end. \p key is UTF-8 in the text passed to fp8lm_json_init(), NUL-terminated; it may hold further NULs, so mind \p
 * length.
 */
fp8core_status fp8lm_json_next_member(fp8lm_json *json, char **key, size_t *length, int *more);

/** Goes to the next element of the innermost array, which must be read next. *more is 0 at the array's end. */
fp8core_status fp8lm_json_next_element(fp8lm_json *json, int *more);

/** Reads a string; see fp8lm_json_next_member(). */
fp8core_status fp8lm_json_string(fp8lm_json *json, char **text, size_t *length);

/** Reads an integer from 0 to 2^64 - 1, written without fraction or exponent. */
fp8core_status fp8lm_json_unsigned(fp8lm_json *json, uint64_t *value);

/** Reads a number, rounded to the nearest double; one beyond the range of doubles is refused. */
fp8core_status fp8lm_json_real(fp8lm_json *json, double *value);

/** Reads true (1) or false (0). */
fp8core_status fp8lm_json_boolean(fp8lm_json *json, int *value);

/** Checks and passes over a value of any type. */
fp8core_status fp8lm_json_skip(fp8lm_json *json);

/** Checks that only white space follows. */
fp8core_status fp8lm_json_finish(fp8lm_json *json);

/** Sets the message "byte N: expected EXPECTED, found ..." for the position of the reader. */
fp8core_status fp8lm_json_expected(const fp8lm_json *json, const char *expected);

#endif
