// What training writes, apart from the command: safetensors read again, folders of checkpoints, CRC-32C, sampling.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support.h"

#include "checkpoint.h"
#include "checksum.h"
#include "event_file.h"
#include "sampler.h"
#include "tensor_file.h"

static char folder[] = "/tmp/fp8lm-checkpoint-XXXXXX";

static int make_folder(void **state) {
  (void)state;
  return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
  (void)state;
  char command[64];
  (void)snprintf(command, sizeof(command), "rm -r %s", folder);
  return system(command);
}

static void path_in_folder(char path[PATH_MAX], const char *name) {
  assert_int_equal(fp8lm_join_path(path, folder, name), FP8CORE_OK);
}

static void test_crc32c(void **state) {
  (void)state;
  // RFC 3720, appendix B.4.
  unsigned char bytes[32] = {0};
  assert_int_equal(fp8lm_crc32c(bytes, 32), 0x8a9136aau);
  memset(bytes, 0xff, 32);
  assert_int_equal(fp8lm_crc32c(bytes, 32), 0x62a8ab43u);
  for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
  assert_int_equal(fp8lm_crc32c(bytes, 32), 0x46dd794eu);
  assert_int_equal(fp8lm_crc32c("123456789", 9), 0xe3069283u);
  assert_int_equal(fp8lm_crc32c(NULL, 0), 0);
}

static void test_safetensors(void **state) {
  (void)state;
  static const unsigned char bytes[7] = {1, 2, 3, 4, 5, 6, 7};
  static const uint16_t halves[3] = {10, 11, 12};
  static const float floats[2] = {1.5f, -2.5f};
  static const int64_t shapes[][2] = {{7, 0}, {3, 1}, {2, 0}, {0, 8}};
  static const char *const metadata[] = {"a \"key\"", "a\nvalue", NULL};
  const fp8lm_saved_tensor tensors[] = {
    fp8lm_saved_tensor_create("bytes", FP8CORE_E4M3, 1, shapes[0], bytes),
    fp8lm_saved_tensor_create("h\xc3\xa9", FP8CORE_FP16, 2, shapes[1], halves),
    fp8lm_saved_tensor_create("floats", FP8CORE_FP32, 1, shapes[2], floats),
    fp8lm_saved_tensor_create("none", FP8CORE_BF16, 2, shapes[3], NULL),
    fp8lm_saved_tensor_create("scalar", FP8CORE_FP32, 0, NULL, floats),
    fp8lm_saved_tensor_create("more", FP8CORE_E5M2, 1, shapes[2], bytes),
  };
  const char *const order[] = {"floats", "scalar", "h\xc3\xa9", "none", "bytes", "more"};
  char path[PATH_MAX];
  path_in_folder(path, "a.safetensors");
  fp8lm_saved_file saved;
  assert_int_equal(fp8lm_safetensors_write(path, NULL, tensors, 6, metadata, &saved), FP8CORE_OK);
  fp8lm_input input;
  fp8lm_tensor_file file;
  assert_int_equal(fp8lm_input_open(&input, path), FP8CORE_OK);
  assert_int_equal(input.size, saved.bytes);
  unsigned char *whole = malloc((size_t)saved.bytes);
  assert_non_null(whole);
  assert_int_equal(fp8lm_input_read(&input, 0, whole, (size_t)saved.bytes), FP8CORE_OK);
  assert_int_equal(fp8lm_crc32(0, whole, (size_t)saved.bytes), saved.crc32);
  assert_int_equal(fp8lm_safetensors_describe(&input, &file), FP8CORE_OK);
  assert_int_equal(file.tensor_count, 6);
  for (size_t i = 0; i < 6; i++) {
    const fp8lm_tensor *tensor = &file.tensors[i];
    // Of one offset the reader puts the empty tensor first.
    assert_string_equal(tensor->name, order[i]);
    assert_int_equal(tensor->offset % fp8lm_element_size(tensor->element), 0);
  }
  assert_memory_equal(whole + file.tensors[0].offset, floats, sizeof(floats));
  assert_memory_equal(whole + file.tensors[2].offset, halves, sizeof(halves));
  assert_memory_equal(whole + file.tensors[4].offset, bytes, sizeof(bytes));
  assert_int_equal(file.metadata_count, 1);
  assert_string_equal(file.metadata[0].key, metadata[0]);
  assert_string_equal(file.metadata[0].value, metadata[1]);
  fp8lm_tensor_file_free(&file);
  fp8lm_input_close(&input);
  free(whole);
  // A file that is there is never overwritten.
  assert_int_equal(fp8lm_safetensors_write(path, NULL, tensors, 6, metadata, &saved), FP8CORE_ERROR_INVALID_ARGUMENT);
  // Nothing at all.
  path_in_folder(path, "empty.safetensors");
  assert_int_equal(fp8lm_safetensors_write(path, NULL, tensors, 0, NULL, &saved), FP8CORE_OK);
  assert_int_equal(saved.bytes, 16);
  assert_int_equal(fp8lm_input_open(&input, path), FP8CORE_OK);
  assert_int_equal(fp8lm_safetensors_describe(&input, &file), FP8CORE_OK);
  assert_int_equal(file.tensor_count, 0);
  fp8lm_tensor_file_free(&file);
  fp8lm_input_close(&input);
}

static void make_step(const char *name) {
  char path[PATH_MAX];
  path_in_folder(path, name);
  assert_int_equal(mkdir(path, 0777), 0);
}

static int is_there(const char *name) {
  char path[PATH_MAX];
  path_in_folder(path, name);
  return access(path, F_OK) == 0;
}

static void test_folders(void **state) {
  (void)state;
  char *newest;
  char *ending;
  assert_int_equal(fp8lm_checkpoint_newest("/no/such/folder", &newest, NULL), FP8CORE_OK);
  assert_null(newest);
  assert_int_equal(fp8lm_checkpoint_newest(folder, &newest, NULL), FP8CORE_OK);
  assert_null(newest);
  make_step("step-00000009");
  make_step("step-00000010");
  make_step("step-100000000");
  make_step("step-99999999");
  make_step("step-00000011.tmp");
  make_step("step-");
  // Not as they are written.
  make_step("step-8");
  make_step("step-123456");
  make_step("step-0000000000000300");
  make_step("step-000000300");
  char file[PATH_MAX];
  fp8lm_saved_file saved_file;
  path_in_folder(file, "step-200000000");
  assert_int_equal(fp8lm_write_file(file, "mine", 4, &saved_file), FP8CORE_OK);
  make_step("step-12x");
  make_step("xstep-12");
  int64_t number;
  assert_int_equal(fp8lm_checkpoint_newest(folder, &newest, &number), FP8CORE_OK);
  assert_int_equal(number, 100000000);
  ending = strrchr(newest, '/');
  assert_string_equal(ending, "/step-100000000");
  free(newest);
  // What another run left unfinished goes when the next one begins.
  fp8lm_checkpoint_writer writer;
  assert_int_equal(fp8lm_checkpoint_begin(&writer, folder, 12), FP8CORE_OK);
  assert_false(is_there("step-00000011.tmp"));
  assert_true(is_there("step-00000012.tmp"));
  fp8lm_checkpoint_abandon(&writer);
  assert_false(is_there("step-00000012.tmp"));
  assert_int_equal(fp8lm_checkpoint_prune(folder, 0), FP8CORE_OK);
  assert_true(is_there("step-00000009"));
  assert_int_equal(fp8lm_checkpoint_prune(folder, 2), FP8CORE_OK);
  assert_false(is_there("step-00000009"));
  assert_false(is_there("step-00000010"));
  assert_true(is_there("step-99999999") && is_there("step-12x") && is_there("step-") && is_there("xstep-12"));
  // A folder with something of the user's in it is not taken away.
  char path[PATH_MAX];
  path_in_folder(path, "step-99999999/notes");
  fp8lm_saved_file saved;
  assert_int_equal(fp8lm_write_file(path, "mine", 4, &saved), FP8CORE_OK);
  assert_int_equal(fp8lm_checkpoint_prune(folder, 1), FP8CORE_OK);
  assert_true(is_there("step-99999999/notes"));
  // Nor does what has a temporary name stand in the way.
  make_step("step-00000012.tmp");
  make_step("step-00000011.2.tmp");
  path_in_folder(path, "step-00000012.tmp/notes");
  assert_int_equal(fp8lm_write_file(path, "mine", 4, &saved), FP8CORE_OK);
  path_in_folder(path, "step-00000012.1.tmp");
  assert_int_equal(fp8lm_write_file(path, "mine", 4, &saved), FP8CORE_OK);
  assert_int_equal(fp8lm_checkpoint_begin(&writer, folder, 12), FP8CORE_OK);
  assert_true(is_there("step-00000012.2.tmp") && is_there("step-00000012.tmp/notes"));
  assert_false(is_there("step-00000011.2.tmp"));
  fp8lm_checkpoint_abandon(&writer);
  assert_true(is_there("step-00000012.1.tmp") && is_there("step-00000012.tmp/notes"));
  assert_false(is_there("step-00000012.2.tmp"));
  // A checkpoint that cannot be removed under its first temporary name.
  make_step("step-00000012");
  assert_int_equal(fp8lm_checkpoint_prune(folder, 2), FP8CORE_OK);
  assert_false(is_there("step-00000012") || is_there("step-00000012.2.tmp"));
  assert_true(is_there("step-00000012.1.tmp") && is_there("step-00000012.tmp/notes"));
  // A link to a checkpoint elsewhere.
  char link[PATH_MAX];
  path_in_folder(path, "step-8");
  path_in_folder(link, "step-00000013");
  assert_int_equal(symlink(path, link), 0);
  assert_int_equal(fp8lm_checkpoint_prune(folder, 1), FP8CORE_OK);
  assert_true(is_there("step-8") && is_there("step-00000013"));
  assert_true(is_there("step-123456") && is_there("step-0000000000000300") && is_there("step-200000000"));
}

static int32_t draw_once(const float *logits, int count, double temperature, int64_t top_k, double top_p,
                         uint64_t seed) {
  const fp8lm_sampler_options options = {temperature, top_k, top_p, seed};
  fp8lm_sampler *sampler;
  assert_int_equal(fp8lm_sampler_create(&sampler, count, &options), FP8CORE_OK);
  const int32_t token = fp8lm_sampler_draw(sampler, logits);
  fp8lm_sampler_destroy(&sampler);
  return token;
}

static void test_sampler(void **state) {
  (void)state;
  const float logits[4] = {logf(0.1f), logf(0.4f), logf(0.2f), logf(0.3f)};
  assert_int_equal(draw_once(logits, 4, 0.0, 0, 1.0, 0), 1);
  int counts[4] = {0};
  const int draws = 20000;
  const fp8lm_sampler_options all = {1.0, 0, 1.0, 7};
  fp8lm_sampler *sampler;
  assert_int_equal(fp8lm_sampler_create(&sampler, 4, &all), FP8CORE_OK);
  for (int i = 0; i < draws; i++) counts[fp8lm_sampler_draw(sampler, logits)]++;
  fp8lm_sampler_destroy(&sampler);
  const double expected[4] = {0.1, 0.4, 0.2, 0.3};
  // Five standard deviations.
  for (int i = 0; i < 4; i++)
    assert_true(fabs(counts[i] - draws * expected[i]) < 5.0 * sqrt(draws * expected[i] * (1.0 - expected[i])));
  for (uint64_t seed = 0; seed < 200; seed++) {
    const int32_t two = draw_once(logits, 4, 1.0, 2, 1.0, seed);
    assert_true(two == 1 || two == 3);
    // 0.4 and 0.3 are the fewest that have 0.5.
    const int32_t half = draw_once(logits, 4, 1.0, 0, 0.5, seed);
    assert_true(half == 1 || half == 3);
    assert_int_equal(draw_once(logits, 4, 1.0, 0, 0.0, seed), 1);
    assert_int_equal(draw_once(logits, 4, 1e-6, 0, 1.0, seed), 1);
  }
  const float odd[4] = {NAN, -INFINITY, INFINITY, INFINITY};
  const int32_t token = draw_once(odd, 4, 1.0, 0, 1.0, 3);
  assert_true(token == 2 || token == 3);
  const float none[2] = {NAN, NAN};
  assert_int_equal(draw_once(none, 2, 1.0, 0, 1.0, 0), -1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_crc32c),
    cmocka_unit_test(test_safetensors),
    cmocka_unit_test(test_folders),
    cmocka_unit_test(test_sampler),
  };
  return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
