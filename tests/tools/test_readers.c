// The readers of tensor files by their interface: descriptions, metadata, values in blocks, and the JSON reader below.
// Malformed files are check_inspect.py's, which sees their messages as a user does.
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json_reader.h"
#include "tensor_file.h"
#include "utf8.h"

static size_t put_safetensors(unsigned char *buffer, const char *header, const void *data, size_t bytes) {
  const size_t length = strlen(header);
  for (int i = 0; i < 8; i++) buffer[i] = (unsigned char)((uint64_t)length >> (8 * i));
  memcpy(buffer + 8, header, length);
  if (bytes) memcpy(buffer + 8 + length, data, bytes);
  return 8 + length + bytes;
}

static void test_safetensors_description(void **state) {
  (void)state;
  const unsigned char data[13] = {0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 0x38, 0x7e, 0xfe, 1, 2};
  unsigned char buffer[512];
  const size_t bytes = put_safetensors(buffer,
                                       "{\"w\":{\"shape\":[3,1],\"dtype\":\"F8_E4M3\",\"data_offsets\":[8,11]},"
                                       "\"__metadata__\":{\"step\":\"17\",\"format\":\"a\\u0000b\",\"\":\"\"},"
                                       "\"u\":{\"dtype\":\"U16\",\"shape\":[],\"data_offsets\":[11,13]},"
                                       "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}  ",
                                       data, sizeof(data));
  fp8lm_input input;
  fp8lm_input_from_memory(&input, buffer, bytes);
  assert_true(fp8lm_looks_like_safetensors(&input));
  assert_false(fp8lm_looks_like_npy(&input));
  fp8lm_tensor_file file;
  assert_ok(fp8lm_safetensors_describe(&input, &file));
  assert_int_equal(file.format, FP8LM_FILE_SAFETENSORS);
  assert_int_equal(file.tensor_count, 3);

  assert_string_equal(file.tensors[0].name, "b");
  assert_string_equal(file.tensors[0].dtype_name, "F32");
  assert_int_equal(file.tensors[0].element, FP8LM_ELEMENT_FP32);
  assert_int_equal(file.tensors[0].offset, bytes - sizeof(data));
  assert_int_equal(file.tensors[0].dimensions, 1);
  assert_int_equal(file.tensors[0].shape[0], 2);
  assert_string_equal(file.tensors[1].name, "w");
  assert_int_equal(file.tensors[1].element, FP8LM_ELEMENT_E4M3);
  assert_int_equal(file.tensors[1].dimensions, 2);
  assert_int_equal(file.tensors[1].shape[0], 3);
  assert_int_equal(file.tensors[1].shape[1], 1);
  assert_int_equal(file.tensors[1].elements, 3);
  assert_int_equal(file.tensors[1].bytes, 3);
  assert_string_equal(file.tensors[2].name, "u");
  assert_int_equal(file.tensors[2].element, FP8LM_ELEMENT_OTHER);
  assert_int_equal(file.tensors[2].dimensions, 0);
  assert_int_equal(file.tensors[2].elements, 1);

  // Metadata comes in the order of its keys, with its lengths.
  assert_int_equal(file.metadata_count, 3);
  assert_int_equal(file.metadata[0].key_length, 0);
  assert_int_equal(file.metadata[0].value_length, 0);
  assert_string_equal(file.metadata[1].key, "format");
  assert_int_equal(file.metadata[1].value_length, 3);
  assert_memory_equal(file.metadata[1].value, "a\0b", 4);
  assert_string_equal(file.metadata[2].key, "step");
  assert_string_equal(file.metadata[2].value, "17");

  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  unsigned char scratch[16];
  float values[3];
  assert_ok(fp8lm_tensor_read(context, &input, &file.tensors[0], 0, 2, scratch, values, NULL));
  assert_true(values[0] == 1.0f && values[1] == -2.0f);
  assert_ok(fp8lm_tensor_read(context, &input, &file.tensors[1], 0, 3, scratch, values, NULL));
  assert_true(values[0] == 1.0f && values[1] == 448.0f && values[2] == -448.0f);
  assert_ok(fp8lm_tensor_read(context, &input, &file.tensors[1], 2, 1, scratch, values, NULL));
  assert_true(values[0] == -448.0f);
  assert_ok(fp8lm_tensor_read(context, &input, &file.tensors[1], 3, 0, scratch, values, NULL));
  assert_fails(fp8lm_tensor_read(context, &input, &file.tensors[2], 0, 1, scratch, values, NULL),
               FP8CORE_ERROR_NOT_SUPPORTED, "values of dtype U16 are not read");
  fp8core_context_destroy(&context);

  fp8lm_tensor_file_free(&file);
  assert_null(file.tensors);
  assert_int_equal(file.tensor_count, 0);
  fp8lm_tensor_file_free(&file);
}

static void test_refused_file_is_empty(void **state) {
  (void)state;
  unsigned char buffer[512];
  fp8lm_input input;
  fp8lm_tensor_file file;
  const size_t bytes =
    put_safetensors(buffer,
                    "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"U8\",\"shape\":[1],"
                    "\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,2]}}",
                    "xx", 2);
  fp8lm_input_from_memory(&input, buffer, bytes);
  memset(&file, 0xa5, sizeof(file));
  assert_fails(fp8lm_safetensors_describe(&input, &file), FP8CORE_ERROR_CORRUPT_DATA,
               "tensor \"b\": its shape takes 1 bytes of U8");
  assert_null(file.tensors);
  assert_null(file.metadata);
  assert_null(file.text);
  assert_int_equal(file.tensor_count, 0);
  fp8lm_tensor_file_free(&file);
  memset(&file, 0xa5, sizeof(file));
  assert_fails(fp8lm_npy_describe(&input, NULL, &file), FP8CORE_ERROR_CORRUPT_DATA, "magic");
  assert_null(file.tensors);
  memset(&file, 0xa5, sizeof(file));
  assert_fails(fp8lm_raw_describe(&input, FP8LM_ELEMENT_FP64, 1, (const uint64_t[]){3}, &file),
               FP8CORE_ERROR_CORRUPT_DATA, "the shape takes 3 elements of fp64");
  assert_null(file.tensors);
  fp8lm_input_from_memory(&input, NULL, 0);
  assert_false(fp8lm_looks_like_npy(&input));
  assert_false(fp8lm_looks_like_safetensors(&input));
  assert_fails(fp8lm_safetensors_describe(&input, &file), FP8CORE_ERROR_CORRUPT_DATA, "has 0 bytes");
}

static void test_npy_values(void **state) {
  (void)state;
  static const char header[] = "{'descr': '>f8', 'fortran_order': True, 'shape': (2, 3)}\n";
  static const double doubles[6] = {1.5, -1e300, 1e-60, 0.1, INFINITY, 0.0};
  unsigned char buffer[256] = {0x93, 'N', 'U', 'M', 'P', 'Y', 3, 0, sizeof(header) - 1, 0, 0, 0};
  memcpy(buffer + 12, header, sizeof(header) - 1);
  unsigned char *data = buffer + 12 + sizeof(header) - 1;
  for (int i = 0; i < 6; i++) {
    uint64_t bits;
    memcpy(&bits, &doubles[i], sizeof(bits));
    for (int j = 0; j < 8; j++) *data++ = (unsigned char)(bits >> (56 - 8 * j));
  }
  fp8lm_input input;
  fp8lm_input_from_memory(&input, buffer, (uint64_t)(data - buffer));
  assert_true(fp8lm_looks_like_npy(&input));
  fp8lm_tensor_file file;
  assert_ok(fp8lm_npy_describe(&input, NULL, &file));
  const fp8lm_tensor *tensor = &file.tensors[0];
  assert_string_equal(tensor->name, "");
  assert_string_equal(tensor->dtype_name, ">f8");
  assert_true(tensor->big_endian && tensor->fortran_order);
  assert_int_equal(tensor->dimensions, 2);
  assert_int_equal(tensor->shape[0], 2);
  assert_int_equal(tensor->shape[1], 3);
  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  unsigned char scratch[48];
  float values[6];
  fp8lm_narrowing narrowing = {10, 20};
  assert_ok(fp8lm_tensor_read(context, &input, tensor, 0, 6, scratch, values, &narrowing));
  const float expected[6] = {1.5f, -INFINITY, 0.0f, 0.1f, INFINITY, 0.0f};
  assert_memory_equal(values, expected, sizeof(expected));
  assert_int_equal(narrowing.overflowed, 11);
  assert_int_equal(narrowing.underflowed, 21);
  fp8core_context_destroy(&context);
  fp8lm_tensor_file_free(&file);
}

static void test_file_that_shrinks(void **state) {
  (void)state;
  char path[] = "/tmp/fp8lm-test-XXXXXX";
  const int descriptor = mkstemp(path);
  assert_true(descriptor >= 0);
  assert_int_equal(ftruncate(descriptor, 4096), 0);
  fp8lm_input input;
  assert_ok(fp8lm_input_open(&input, path));
  assert_int_equal(input.size, 4096);
  fp8lm_tensor_file file;
  assert_ok(fp8lm_raw_describe(&input, FP8LM_ELEMENT_FP32, 0, NULL, &file));
  assert_int_equal(file.tensors[0].elements, 1024);
  assert_int_equal(ftruncate(descriptor, 4094), 0);
  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  static unsigned char scratch[4096];
  static float values[1024];
  assert_fails(fp8lm_tensor_read(context, &input, &file.tensors[0], 0, 1024, scratch, values, NULL),
               FP8CORE_ERROR_CORRUPT_DATA, "the file became shorter while it was read");
  assert_fails(fp8lm_input_read(&input, 4090, scratch, 7), FP8CORE_ERROR_CORRUPT_DATA, "the file has 4096 bytes");
  assert_fails(fp8lm_input_read(&input, UINT64_MAX, scratch, 2), FP8CORE_ERROR_CORRUPT_DATA,
               "offset 18446744073709551615");
  fp8core_context_destroy(&context);
  fp8lm_tensor_file_free(&file);
  fp8lm_input_close(&input);
  fp8lm_input_close(&input);
  close(descriptor);
  unlink(path);
  assert_fails(fp8lm_input_open(&input, path), FP8CORE_ERROR_INVALID_ARGUMENT, "No such file");
}

static fp8core_status begin_json(fp8lm_json *json, char *copy, const char *text) {
  strcpy(copy, text);
  fp8lm_json_init(json, copy, strlen(copy));
  return FP8CORE_OK;
}

static void test_json_values(void **state) {
  (void)state;
  char copy[256];
  fp8lm_json json;
  begin_json(&json, copy, " { \"a\" : [ 0 , 18446744073709551615,7 ] , \"\\u20ac\\t\" : \"x\\\\\" , \"n\" : null } ");
  char *text;
  size_t length;
  int more;
  uint64_t value;
  assert_int_equal(fp8lm_json_peek(&json), FP8LM_JSON_OBJECT);
  assert_ok(fp8lm_json_enter_object(&json));
  assert_ok(fp8lm_json_next_member(&json, &text, &length, &more));
  assert_true(more);
  assert_string_equal(text, "a");
  assert_ok(fp8lm_json_enter_array(&json));
  const uint64_t expected[] = {0, UINT64_MAX, 7};
  for (int i = 0; i < 3; i++) {
    assert_ok(fp8lm_json_next_element(&json, &more));
    assert_true(more);
    assert_ok(fp8lm_json_unsigned(&json, &value));
    assert_true(value == expected[i]);
  }
  assert_ok(fp8lm_json_next_element(&json, &more));
  assert_false(more);
  assert_ok(fp8lm_json_next_member(&json, &text, &length, &more));
  assert_true(more);
  assert_string_equal(text, "\xe2\x82\xac\t");
  assert_int_equal(length, 4);
  assert_ok(fp8lm_json_string(&json, &text, &length));
  assert_string_equal(text, "x\\");
  assert_ok(fp8lm_json_next_member(&json, &text, &length, &more));
  assert_int_equal(fp8lm_json_peek(&json), FP8LM_JSON_NULL);
  assert_ok(fp8lm_json_skip(&json));
  assert_ok(fp8lm_json_next_member(&json, &text, &length, &more));
  assert_false(more);
  assert_ok(fp8lm_json_finish(&json));
}

// Texts that skip() must take or refuse as RFC 8259 says.
static void test_json_grammar(void **state) {
  (void)state;
  static const char *const good[] = {"0",
                                     "-0",
                                     "1.5e+10",
                                     "-12E-3",
                                     "0.0",
                                     "true",
                                     "false",
                                     "null",
                                     "\"\"",
                                     "[]",
                                     "{}",
                                     "[[],{}]",
                                     " [1 , 2]\n",
                                     "{\"a\":{}}",
                                     "\"\\b\\f\\n\\r\\t\\/\\\"\\\\\\u0041\\ud834\\udd1e\"",
                                     "\"\x7f\"",
                                     "\"\xf4\x8f\xbf\xbf\"",
                                     "[0,-1]",
                                     "{\"a\":1,\"a\":2}"};
  static const char *const bad[] = {"",
                                    " ",
                                    "+1",
                                    "01",
                                    "-01",
                                    "1.",
                                    ".5",
                                    "1e",
                                    "1e+",
                                    "-",
                                    "tru",
                                    "True",
                                    "nul",
                                    "\"",
                                    "\"\\\"",
                                    "[",
                                    "]",
                                    "[1",
                                    "[1,",
                                    "[,1]",
                                    "[1 2]",
                                    "{",
                                    "{\"a\"",
                                    "{\"a\":",
                                    "{\"a\":1",
                                    "{\"a\":1,",
                                    "{\"a\":1,}",
                                    "{1:2}",
                                    "{\"a\" 1}",
                                    "[}",
                                    "{]",
                                    "1 2",
                                    "[] []",
                                    "\"\\u12\"",
                                    "\"\\ud834\"",
                                    "\"\\ud834\\u0041\"",
                                    "\"\\udd1e\"",
                                    "\"\t\"",
                                    "\"\x01\"",
                                    "\"\x80\"",
                                    "\"\xc1\x81\"",
                                    "\"\xe0\x9f\xbf\"",
                                    "\"\xed\xa0\x80\"",
                                    "\"\xf0\x8f\xbf\xbf\"",
                                    "\"\xf4\x90\x80\x80\"",
                                    "\"\xf5\x80\x80\x80\"",
                                    "NaN",
                                    "Infinity",
                                    "'a'",
                                    "[1,]",
                                    "/*x*/1",
                                    "\357\273\2771",
                                    "\v1",
                                    "\f1"};
  char copy[256];
  fp8lm_json json;
  for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
    begin_json(&json, copy, good[i]);
    if (fp8lm_json_skip(&json) != FP8CORE_OK || fp8lm_json_finish(&json) != FP8CORE_OK) {
      fail_msg("%s: %s", good[i], fp8core_last_error());
    }
  }
  for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
    begin_json(&json, copy, bad[i]);
    if (fp8lm_json_skip(&json) == FP8CORE_OK && fp8lm_json_finish(&json) == FP8CORE_OK)
      fail_msg("accepted: %s", bad[i]);
  }
}

static void test_json_depth(void **state) {
  (void)state;
  char text[2 * (FP8LM_JSON_MAX_DEPTH + 1)];
  for (int depth = FP8LM_JSON_MAX_DEPTH; depth <= FP8LM_JSON_MAX_DEPTH + 1; depth++) {
    memset(text, '[', (size_t)depth);
    memset(text + depth, ']', (size_t)depth);
    fp8lm_json json;
    fp8lm_json_init(&json, text, 2 * (size_t)depth);
    if (depth == FP8LM_JSON_MAX_DEPTH) {
      assert_ok(fp8lm_json_skip(&json));
      assert_ok(fp8lm_json_finish(&json));
    } else {
      assert_fails(fp8lm_json_skip(&json), FP8CORE_ERROR_CORRUPT_DATA, "nested deeper than 64 levels");
    }
  }
}

static void test_quotes(void **state) {
  (void)state;
  char buffer[FP8LM_QUOTE_BYTES];
  assert_string_equal(fp8lm_quote(buffer, "a\nb\x7f", 4), "\"a\\u000ab\\u007f\"");
  assert_string_equal(fp8lm_quote(buffer, "", 0), "\"\"");
  char garbage[500];
  memset(garbage, 0x80, sizeof(garbage));
  assert_true(strlen(fp8lm_quote(buffer, garbage, sizeof(garbage))) < FP8LM_QUOTE_BYTES);
  // Long names are cut between characters, whatever they consist of.
  for (size_t width = 1; width <= 4; width++) {
    static const char *const characters[] = {"\x01", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    char text[1200];
    size_t length = 0;
    while (length + width <= 1000) {
      memcpy(text + length, characters[width - 1], width);
      length += width;
    }
    fp8lm_quote(buffer, text, length);
    const size_t quoted = strlen(buffer);
    assert_true(quoted > 60 && quoted < FP8LM_QUOTE_BYTES);
    assert_string_equal(buffer + quoted - 4, "...\"");
    for (size_t i = 1; i < quoted;) {
      const size_t sequence = fp8lm_utf8_length(buffer + i, quoted - i);
      assert_true(sequence > 0);
      i += sequence;
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_safetensors_description),
    cmocka_unit_test(test_refused_file_is_empty),
    cmocka_unit_test(test_npy_values),
    cmocka_unit_test(test_file_that_shrinks),
    cmocka_unit_test(test_json_values),
    cmocka_unit_test(test_json_grammar),
    cmocka_unit_test(test_json_depth),
    cmocka_unit_test(test_quotes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
