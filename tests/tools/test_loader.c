// Shards and the loader: what is written is read, every sequence comes once an epoch, ranks share the work, sources
// keep their weights, and nothing but (seed, step, rank, ranks) matters.
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "loader.h"
#include "shard.h"

static char folder[] = "/tmp/fp8lm-loader-XXXXXX";

static const char *path(const char *name) {
  static char paths[4][300];
  static unsigned turn;
  char *out = paths[turn++ % 4];
  (void)snprintf(out, sizeof(paths[0]), "%s/%s", folder, name);
  return out;
}

// Tokens first, first + 1, ..., in shards of at most `limit`.
static void write_series(const char *name, uint32_t first, size_t count, size_t limit, uint32_t vocabulary) {
  fp8lm_shard_writer *writer;
  assert_ok(fp8lm_shard_writer_create(&writer, path(name), vocabulary, limit));
  for (size_t i = 0; i < count; i++) {
    const uint32_t token = first + (uint32_t)i;
    assert_ok(fp8lm_shard_writer_append(writer, &token, 1));
  }
  assert_ok(fp8lm_shard_writer_finish(writer));
  assert_ok(fp8lm_shard_writer_commit(writer));
  assert_int_equal(fp8lm_shard_writer_shards(writer), (count + limit - 1) / limit);
  fp8lm_shard_writer_destroy(&writer);
}

static int create(void **state) {
  (void)state;
  assert_non_null(mkdtemp(folder));
  write_series("a_train", 0, 1001, 300, 20000);
  write_series("a_val", 10000, 101, 1000, 20000);
  write_series("b_train", 20000, 5003, 5003, 40000);
  write_series("wide_train", 100000, 2000, 700, 128256);
  write_series("tiny_train", 7, 1, 1, 0);
  return 0;
}

static int destroy(void **state) {
  (void)state;
  static const char *const series[] = {"a_train", "a_val", "b_train", "wide_train", "tiny_train", "x_train"};
  for (size_t i = 0; i < sizeof(series) / sizeof(series[0]); i++)
    assert_ok(fp8lm_shard_series_trim(path(series[i]), 0));
  return rmdir(folder);
}

static fp8lm_loader *open_loader(const char *data_path, double fraction, uint64_t seed) {
  fp8lm_loader *loader;
  fp8lm_loader_options options = fp8lm_loader_options_default();
  options.data_path = data_path;
  options.validation_fraction = fraction;
  options.seed = seed;
  assert_ok(fp8lm_loader_create(&loader, &options));
  return loader;
}

static const char *two_sources(const char *weight_a, const char *weight_b) {
  static char text[700];
  (void)snprintf(text, sizeof(text), "%s %s %s %s", weight_a, path("a"), weight_b, path("b"));
  return text;
}

static void test_shards(void **state) {
  (void)state;
  static const uint32_t vocabularies[] = {257, 65536, 65537, 16777216};
  for (size_t v = 0; v < 4; v++) {
    fp8lm_shard_writer *writer;
    uint32_t tokens[1000];
    for (size_t i = 0; i < 1000; i++) tokens[i] = (uint32_t)(i * 7919 * 65537 % vocabularies[v]);
    assert_ok(fp8lm_shard_writer_create(&writer, path("x_train"), vocabularies[v], 333));
    assert_ok(fp8lm_shard_writer_append(writer, tokens, 1000));
    // Nothing has its name before all is done.
    assert_int_equal(access(path("x_train_000000.bin"), F_OK), -1);
    assert_ok(fp8lm_shard_writer_finish(writer));
    assert_int_equal(access(path("x_train_000000.bin"), F_OK), -1);
    assert_int_equal(access(path("x_train_000003.bin.tmp"), F_OK), 0);
    assert_ok(fp8lm_shard_writer_commit(writer));
    assert_int_equal(access(path("x_train_000003.bin.tmp"), F_OK), -1);
    fp8lm_shard_writer_destroy(&writer);
    for (size_t s = 0, begin = 0; s < 4; s++) {
      char name[40];
      (void)snprintf(name, sizeof(name), "x_train_%06zu.bin", s);
      fp8lm_shard shard;
      assert_ok(fp8lm_shard_open(&shard, path(name)));
      assert_int_equal(shard.count, s < 3 ? 333 : 1);
      assert_int_equal(shard.width, vocabularies[v] <= 65536 ? 2 : 4);
      assert_int_equal(shard.vocabulary, vocabularies[v]);
      assert_ok(fp8lm_shard_check(&shard, 0));
      int32_t read[333];
      assert_ok(fp8lm_shard_read(&shard, 0, (size_t)shard.count, read));
      for (size_t i = 0; i < shard.count; i++) assert_int_equal(read[i], tokens[begin++]);
      fp8lm_shard_close(&shard);
      fp8lm_shard_close(&shard);
    }
    assert_ok(fp8lm_shard_series_trim(path("x_train"), 0));
  }
  // Left behind by no one.
  fp8lm_shard_writer *writer;
  const uint32_t token = 1;
  assert_ok(fp8lm_shard_writer_create(&writer, path("x_train"), 257, 1));
  for (int i = 0; i < 3; i++) assert_ok(fp8lm_shard_writer_append(writer, &token, 1));
  fp8lm_shard_writer_destroy(&writer);
  assert_int_equal(access(path("x_train_000000.bin.tmp"), F_OK), -1);
  assert_int_equal(access(path("x_train_000002.bin.tmp"), F_OK), -1);
}

static void test_crc(void **state) {
  (void)state;
  assert_int_equal(fp8lm_crc32(0, "123456789", 9), 0xcbf43926);
  char text[100];
  for (size_t i = 0; i < sizeof(text); i++) text[i] = (char)(i * 37);
  const uint32_t whole = fp8lm_crc32(0, text, sizeof(text));
  for (size_t i = 0; i <= sizeof(text); i++) {
    assert_int_equal(fp8lm_crc32(fp8lm_crc32(0, text, i), text + i, sizeof(text) - i), whole);
  }
}

static void test_permutation(void **state) {
  (void)state;
  static unsigned char seen[70000];
  static const uint64_t counts[] = {1, 2, 3, 4, 5, 7, 8, 16, 17, 100, 1000, 4096, 4097, 65537};
  for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
    for (uint64_t key = 0; key < 5; key++) {
      memset(seen, 0, sizeof(seen));
      uint64_t fixed = 0;
      for (uint64_t i = 0; i < counts[c]; i++) {
        const uint64_t to = fp8lm_permute(key, counts[c], i);
        assert_true(to < counts[c] && !seen[to]);
        seen[to] = 1;
        fixed += to == i;
      }
      if (counts[c] >= 1000) assert_true(fixed < 10);
    }
  }
  // Large ones end, and stay within.
  for (uint64_t i = 0; i < 1000; i++) {
    assert_true(fp8lm_permute(i, UINT64_C(1) << 62, i) < UINT64_C(1) << 62);
    assert_true(fp8lm_permute(i, (UINT64_C(1) << 40) + 1, i) <= UINT64_C(1) << 40);
  }
  // Of the orders of three, with many keys, each comes about as often.
  int orders[27] = {0};
  for (uint64_t key = 0; key < 6000; key++) {
    int order = 0;
    for (uint64_t i = 0; i < 3; i++) order = 3 * order + (int)fp8lm_permute(key * UINT64_C(0x9E3779B97F4A7C15), 3, i);
    orders[order]++;
  }
  for (int i = 0; i < 27; i++) assert_true(orders[i] == 0 || (orders[i] > 700 && orders[i] < 1300));
}

// One source: every sequence once an epoch, in another order each time, and targets that follow.
static void test_epochs(void **state) {
  (void)state;
  enum { LENGTH = 10, SEQUENCES = 100, BATCH = 4, RANKS = 5 };
  fp8lm_loader *loader = open_loader(path("a"), 0.0, 42);
  assert_int_equal(fp8lm_loader_tokens(loader, FP8LM_TRAIN), 1001);
  assert_int_equal(fp8lm_loader_sequences(loader, FP8LM_TRAIN, LENGTH), SEQUENCES);
  int orders[3][SEQUENCES];
  for (uint64_t epoch = 0; epoch < 3; epoch++) {
    int seen[SEQUENCES] = {0};
    int count = 0;
    for (uint64_t step = 0; step < SEQUENCES / (BATCH * RANKS); step++) {
      for (uint32_t rank = 0; rank < RANKS; rank++) {
        int32_t inputs[BATCH * LENGTH];
        int32_t targets[BATCH * LENGTH];
        assert_ok(
          fp8lm_loader_batch(loader, FP8LM_TRAIN, epoch * 5 + step, rank, RANKS, BATCH, LENGTH, inputs, targets));
        for (int b = 0; b < BATCH; b++) {
          const int first = inputs[b * LENGTH];
          assert_int_equal(first % LENGTH, 0);
          for (int t = 0; t < LENGTH; t++) {
            assert_int_equal(inputs[b * LENGTH + t], first + t);
            assert_int_equal(targets[b * LENGTH + t], first + t + 1);
          }
          seen[first / LENGTH]++;
          orders[epoch][count++] = first / LENGTH;
        }
      }
    }
    for (int i = 0; i < SEQUENCES; i++) assert_int_equal(seen[i], 1);
  }
  assert_memory_not_equal(orders[0], orders[1], sizeof(orders[0]));
  assert_memory_not_equal(orders[1], orders[2], sizeof(orders[0]));
  fp8lm_loader_destroy(&loader);
  assert_null(loader);
}

static void test_pure_function(void **state) {
  (void)state;
  enum { LENGTH = 16, GLOBAL = 12, STEPS = 50 };
  static int32_t all[STEPS][GLOBAL][LENGTH];
  int32_t targets[GLOBAL * LENGTH];
  fp8lm_loader *loader = open_loader(two_sources("0.7", "0.3"), 0.05, 7);
  for (uint64_t step = 0; step < STEPS; step++) {
    assert_ok(fp8lm_loader_batch(loader, FP8LM_TRAIN, step, 0, 1, GLOBAL, LENGTH, all[step][0], targets));
  }
  // Backwards, by another loader, with every number of ranks: the same sequences.
  fp8lm_loader *other = open_loader(two_sources("7", "3"), 0.05, 7);
  for (uint64_t step = STEPS; step-- > 0;) {
    for (uint32_t ranks = 1; ranks <= GLOBAL; ranks++) {
      if (GLOBAL % ranks) continue;
      const size_t batch = GLOBAL / ranks;
      for (uint32_t rank = 0; rank < ranks; rank++) {
        int32_t inputs[GLOBAL * LENGTH];
        assert_ok(fp8lm_loader_batch(other, FP8LM_TRAIN, step, rank, ranks, batch, LENGTH, inputs, targets));
        assert_memory_equal(inputs, all[step][rank * batch], batch * LENGTH * sizeof(int32_t));
      }
    }
  }
  fp8lm_loader_destroy(&other);
  // Another seed, another order.
  other = open_loader(two_sources("0.7", "0.3"), 0.05, 8);
  int32_t inputs[GLOBAL * LENGTH];
  assert_ok(fp8lm_loader_batch(other, FP8LM_TRAIN, 0, 0, 1, GLOBAL, LENGTH, inputs, targets));
  assert_memory_not_equal(inputs, all[0], sizeof(all[0]));
  // Far away.
  assert_ok(fp8lm_loader_batch(other, FP8LM_TRAIN, UINT64_C(1) << 50, 3, 64, GLOBAL, LENGTH, inputs, targets));
  fp8lm_loader_destroy(&other);
  fp8lm_loader_destroy(&loader);
}

static void test_weights(void **state) {
  (void)state;
  static const char *const weights[][2] = {{"0.7", "0.3"}, {"1", "1"}, {"999", "1"}, {"0.333333", "0.666667"}};
  for (size_t w = 0; w < 4; w++) {
    fp8lm_loader *loader = open_loader(two_sources(weights[w][0], weights[w][1]), 0.0, 1);
    const double a = strtod(weights[w][0], NULL);
    const double share = a / (a + strtod(weights[w][1], NULL));
    uint64_t counts[2] = {0, 0};
    static unsigned char seen[2][5003];
    memset(seen, 0, sizeof(seen));
    for (uint64_t i = 0; i < 200000; i++) {
      fp8lm_sample sample;
      assert_ok(fp8lm_loader_sample(loader, FP8LM_TRAIN, i, 1, &sample));
      // The n-th sample of a source belongs to the epoch that n says, and is new there.
      const uint64_t sequences = sample.source ? 5002 : 1000;
      assert_int_equal(sample.epoch, counts[sample.source]++ / sequences);
      unsigned char *mark = &seen[sample.source][sample.sequence];
      assert_int_equal(*mark, sample.epoch % 256);
      *mark = (unsigned char)(*mark + 1);
      // 16 for the order; the rest for weights in steps of 2^-16.
      const double expected = share * (double)(i + 1);
      const double off = (double)counts[0] - expected;
      assert_true(off > -16.0 - 3.1e-5 * (double)i && off < 16.0 + 3.1e-5 * (double)i);
    }
    fp8lm_loader_destroy(&loader);
  }
  // Without weights, by size.
  char text[700];
  (void)snprintf(text, sizeof(text), "%s %s", path("a"), path("b"));
  fp8lm_loader *loader = open_loader(text, 0.0, 1);
  uint64_t count = 0;
  for (uint64_t i = 0; i < 65536; i++) {
    fp8lm_sample sample;
    assert_ok(fp8lm_loader_sample(loader, FP8LM_TRAIN, i, 1, &sample));
    count += sample.source == 0;
  }
  assert_int_equal(count, 10926 /* 65536 * 1001 / 6004 = 10926.3 */);
  fp8lm_loader_destroy(&loader);
}

static void test_validation(void **state) {
  (void)state;
  enum { LENGTH = 7 };
  int32_t inputs[LENGTH];
  int32_t targets[LENGTH];
  static unsigned char train[5003];
  static unsigned char validation[5003];
  // A tail of b, which has no shards of its own for it; those of a.
  fp8lm_loader *loader = open_loader(path("b"), 0.1, 3);
  assert_int_equal(fp8lm_loader_tokens(loader, FP8LM_TRAIN), 4503);
  assert_int_equal(fp8lm_loader_tokens(loader, FP8LM_VALIDATION), 500);
  for (int split = 0; split < 2; split++) {
    const uint64_t sequences = fp8lm_loader_sequences(loader, (fp8lm_split)split, LENGTH);
    for (uint64_t i = 0; i < sequences; i++) {
      assert_ok(fp8lm_loader_batch(loader, (fp8lm_split)split, i, 0, 1, 1, LENGTH, inputs, targets));
      unsigned char *marks = split ? validation : train;
      for (int t = 0; t < LENGTH; t++) {
        marks[inputs[t] - 20000] = 1;
        marks[targets[t] - 20000] = 1;
      }
    }
  }
  for (size_t i = 0; i < 5003; i++) assert_false(train[i] && validation[i]);
  assert_true(train[0] && validation[4503]);
  // Validation does not change from one time through to the next.
  const uint64_t round = fp8lm_loader_sequences(loader, FP8LM_VALIDATION, LENGTH);
  for (uint64_t i = 0; i < round; i++) {
    fp8lm_sample first;
    fp8lm_sample second;
    assert_ok(fp8lm_loader_sample(loader, FP8LM_VALIDATION, i, LENGTH, &first));
    assert_ok(fp8lm_loader_sample(loader, FP8LM_VALIDATION, i + 65536 * round, LENGTH, &second));
    assert_int_equal(first.sequence, second.sequence);
  }
  fp8lm_loader_destroy(&loader);
  loader = open_loader(path("a"), 0.1, 3);
  assert_int_equal(fp8lm_loader_tokens(loader, FP8LM_TRAIN), 1001);
  assert_int_equal(fp8lm_loader_tokens(loader, FP8LM_VALIDATION), 101);
  assert_ok(fp8lm_loader_batch(loader, FP8LM_VALIDATION, 0, 0, 1, 1, LENGTH, inputs, targets));
  assert_true(inputs[0] >= 10000);
  fp8lm_loader_destroy(&loader);
  // Sources of its own.
  fp8lm_loader_options options = fp8lm_loader_options_default();
  options.data_path = path("b");
  options.validation_data_path = path("a");
  assert_ok(fp8lm_loader_create(&loader, &options));
  assert_ok(fp8lm_loader_batch(loader, FP8LM_VALIDATION, 0, 0, 1, 1, LENGTH, inputs, targets));
  assert_true(inputs[0] >= 10000 && inputs[0] < 10101);
  assert_ok(fp8lm_loader_batch(loader, FP8LM_TRAIN, 0, 0, 1, 1, LENGTH, inputs, targets));
  assert_true(inputs[0] >= 20000);
  fp8lm_loader_destroy(&loader);
}

static void test_wide_tokens(void **state) {
  (void)state;
  enum { LENGTH = 50 };
  int32_t inputs[LENGTH];
  int32_t targets[LENGTH];
  fp8lm_loader *loader = open_loader(path("wide"), 0.0, 3);
  assert_ok(fp8lm_loader_check(loader));
  for (uint64_t i = 0; i < 39; i++) {
    assert_ok(fp8lm_loader_batch(loader, FP8LM_TRAIN, i, 0, 1, 1, LENGTH, inputs, targets));
    for (int t = 0; t < LENGTH; t++) assert_int_equal(inputs[t], inputs[0] + t);
  }
  fp8lm_loader_destroy(&loader);
}

static void refused(const char *data_path, double fraction, uint32_t vocabulary, const char *message) {
  fp8lm_loader *loader;
  fp8lm_loader_options options = fp8lm_loader_options_default();
  options.data_path = data_path;
  options.validation_fraction = fraction;
  options.vocabulary = vocabulary;
  fp8core_status status = fp8lm_loader_create(&loader, &options);
  int32_t tokens[2][32];
  for (uint64_t step = 0; status == FP8CORE_OK && step < 40; step++) {
    status = fp8lm_loader_batch(loader, FP8LM_TRAIN, step, 0, 1, 1, 32, tokens[0], tokens[1]);
  }
  assert_int_not_equal(status, FP8CORE_OK);
  if (!strstr(fp8core_last_error(), message)) fail_msg("\"%s\" lacks \"%s\"", fp8core_last_error(), message);
  fp8lm_loader_destroy(&loader);
}

static void test_refusals(void **state) {
  (void)state;
  refused(NULL, 0.0, 0, "there is no data path");
  refused(" \n", 0.0, 0, "the data path names no source");
  refused(path("a"), 1.0, 0, "the share for validation is 1, expected at least 0 and less than 1");
  refused(path("none"), 0.0, 0, "there is no such shard, and no series");
  refused("0.7 kjv 0.3", 0.0, 0, "weights and paths must alternate");
  refused("/nowhere/at/all", 0.0, 0, "/nowhere/at: cannot read the folder: No such file");
  refused(two_sources("0", "1"), 0.0, 0, "its weight is 0, expected more than 0");
  refused(two_sources("1e300", "1"), 0.0, 0, "its weight is 1e+300");
  refused(path("tiny"), 0.0, 0, "has 1 tokens for training, a sequence of 32 needs 33");
  refused(path("a"), 0.0, 500, "its vocabulary has 20000 tokens, expected at most --vocab-size, 500");
  // A shard that does not say its vocabulary, with a token beyond the one that is asked for.
  refused(path("x_train_000000.bin"), 0.0, 0, "x_train_000000.bin");
  write_series("x_train", 0, 1000, 1000, 0);
  refused(path("x_train_000000.bin"), 0.0, 900, "x_train_000000.bin: token 9");
  assert_ok(fp8lm_shard_series_trim(path("x_train"), 0));
  // A gap in a series.
  write_series("x_train", 0, 30, 10, 257);
  assert_int_equal(unlink(path("x_train_000001.bin")), 0);
  refused(path("x"), 0.0, 0, "x_train_000001.bin is missing");
  assert_ok(fp8lm_shard_series_trim(path("x_train"), 0));
  fp8lm_loader *loader = open_loader(path("a"), 0.0, 0);
  int32_t token;
  assert_int_equal(fp8lm_loader_batch(loader, FP8LM_TRAIN, 0, 1, 1, 1, 1, &token, &token),
                   FP8CORE_ERROR_INVALID_ARGUMENT);
  assert_int_equal(fp8lm_loader_batch(loader, FP8LM_TRAIN, 0, 0, 1, 0, 1, &token, &token),
                   FP8CORE_ERROR_INVALID_ARGUMENT);
  assert_int_equal(fp8lm_loader_batch(loader, FP8LM_TRAIN, 0, 0, 1, 1, 0, &token, &token),
                   FP8CORE_ERROR_INVALID_ARGUMENT);
  assert_int_equal(fp8lm_loader_batch(loader, FP8LM_TRAIN, UINT64_MAX, 0, 2, 1, 1, &token, &token),
                   FP8CORE_ERROR_INVALID_ARGUMENT);
  fp8lm_loader_destroy(&loader);
  fp8lm_loader_destroy(&loader);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_shards),     cmocka_unit_test(test_crc),           cmocka_unit_test(test_permutation),
    cmocka_unit_test(test_epochs),     cmocka_unit_test(test_pure_function), cmocka_unit_test(test_weights),
    cmocka_unit_test(test_validation), cmocka_unit_test(test_wide_tokens),   cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, create, destroy);
}
