#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fp8zero/partition.h"
#include "support.h"

#define MOST_TENSORS 160
#define MOST_RANKS 48

static int random_below(test_random *random, int bound) { return (int)(test_random_bits(random) % (uint64_t)bound); }

// Few different sizes, so that ties are many; or hardly any; zeros among them in some rounds.
static void random_sizes(test_random *random, int count, int64_t *sizes) {
  const int bits = random_below(random, 3) == 0 ? 40 : 1 + random_below(random, 8);
  const int zeros = random_below(random, 2);
  for (int i = 0; i < count; i++) {
    sizes[i] = (int64_t)(test_random_bits(random) & ((UINT64_C(1) << bits) - 1));
    if (zeros && random_below(random, 4) == 0) sizes[i] = 0;
  }
}

// Algorithm 1 as the paper writes it: the largest tensor left, the rank with the least memory, both by looking at all.
static void reference(int count, const int64_t *sizes, int ranks, int *owners, int64_t *loads) {
  unsigned char done[MOST_TENSORS] = {0};
  for (int r = 0; r < ranks; r++) loads[r] = 0;
  for (int step = 0; step < count; step++) {
    int largest = -1;
    for (int i = 0; i < count; i++)
      if (!done[i] && (largest < 0 || sizes[i] > sizes[largest])) largest = i;
    int least = 0;
    for (int r = 1; r < ranks; r++)
      if (loads[r] < loads[least]) least = r;
    done[largest] = 1;
    owners[largest] = least;
    loads[least] += sizes[largest];
  }
}

static void assert_owners(int count, const int64_t *sizes, int ranks, const int *expected) {
  int owners[MOST_TENSORS];
  assert_ok(fp8zero_partition(count, sizes, ranks, owners, NULL));
  for (int i = 0; i < count; i++)
    if (owners[i] != expected[i])
      fail_msg("tensor %d of %d on %d ranks: owner %d, expected %d", i, count, ranks, owners[i], expected[i]);
}

static void known_cases(void **unused) {
  (void)unused;
  const int64_t pi[8] = {3, 1, 4, 1, 5, 9, 2, 6};
  assert_owners(8, pi, 3, (const int[]){1, 1, 2, 2, 2, 0, 0, 1});
  assert_owners(8, pi, 1, (const int[]){0, 0, 0, 0, 0, 0, 0, 0});
  // As many ranks as tensors, and more: the order of sizes.
  const int64_t some[4] = {10, 40, 20, 30};
  assert_owners(4, some, 4, (const int[]){3, 0, 2, 1});
  assert_owners(4, some, 1000, (const int[]){3, 0, 2, 1});
  // Graham's worst case for 2 ranks: 7 where 6 is possible.
  const int64_t graham[5] = {3, 3, 2, 2, 2};
  assert_owners(5, graham, 2, (const int[]){0, 1, 0, 1, 0});

  int owners[8];
  int64_t loads[3] = {-1, -1, -1};
  assert_ok(fp8zero_partition(8, pi, 3, owners, loads));
  assert_int_equal(loads[0], 11);
  assert_int_equal(loads[1], 10);
  assert_int_equal(loads[2], 10);
}

static void ties(void **unused) {
  (void)unused;
  // Equal sizes in the order of tensors, equal loads in the order of ranks: round robin.
  const int64_t equal[7] = {5, 5, 5, 5, 5, 5, 5};
  assert_owners(7, equal, 3, (const int[]){0, 1, 2, 0, 1, 2, 0});
  // 8 to rank 0; 4 and 4 to 1, 2; then 4 (5) to rank 1, as low as 2; 2 (1) to 2; 2 (3) to 2 again.
  const int64_t mixed[6] = {4, 2, 4, 2, 8, 4};
  assert_owners(6, mixed, 3, (const int[]){1, 2, 2, 2, 0, 1});
}

static void nothing_to_distribute(void **unused) {
  (void)unused;
  int owners[4] = {7, 7, 7, 7};
  int64_t loads[3] = {7, 7, 7};
  assert_ok(fp8zero_partition(0, NULL, 3, NULL, NULL));
  assert_ok(fp8zero_partition(0, NULL, 3, owners, loads));
  assert_int_equal(owners[0], 7);
  for (int r = 0; r < 3; r++) assert_int_equal(loads[r], 0);
  const int64_t zeros[4] = {0, 0, 0, 0};
  assert_ok(fp8zero_partition(4, zeros, 3, owners, loads));
  for (int i = 0; i < 4; i++) assert_int_equal(owners[i], 0);
  for (int r = 0; r < 3; r++) assert_int_equal(loads[r], 0);
  // Empty tensors after the others, to the least loaded.
  const int64_t some[4] = {0, 5, 0, 3};
  assert_owners(4, some, 2, (const int[]){1, 0, 1, 1});
  assert_owners(4, some, 3, (const int[]){2, 0, 2, 1});
  // Ranks without end need no memory.
  assert_owners(4, some, INT32_MAX, (const int[]){2, 0, 2, 1});
}

static void largest_sizes(void **unused) {
  (void)unused;
  const int64_t one[1] = {INT64_MAX};
  int owners[3];
  int64_t loads[2];
  fp8zero_balance balance;
  assert_ok(fp8zero_partition(1, one, 2, owners, loads));
  assert_int_equal(owners[0], 0);
  assert_true(loads[0] == INT64_MAX && loads[1] == 0);
  assert_ok(fp8zero_partition_balance(2, loads, &balance));
  assert_true(balance.total == INT64_MAX && isinf(balance.ratio));
  // A sum that just fits.
  const int64_t half = INT64_C(1) << 62;
  const int64_t three[3] = {half - 2, 1, half};
  assert_ok(fp8zero_partition(3, three, 2, owners, loads));
  assert_true(owners[0] == 1 && owners[1] == 1 && owners[2] == 0);
  assert_true(loads[0] == half && loads[1] == half - 1);
  assert_ok(fp8zero_partition(3, three, 1, owners, loads));
  assert_true(loads[0] == INT64_MAX);
}

static void as_the_reference(void **unused) {
  (void)unused;
  test_random random = {1};
  for (int round = 0; round < 4000; round++) {
    int64_t sizes[MOST_TENSORS];
    int64_t expected_loads[MOST_RANKS];
    int64_t loads[MOST_RANKS];
    int expected[MOST_TENSORS];
    const int count = random_below(&random, MOST_TENSORS + 1);
    const int ranks = 1 + random_below(&random, MOST_RANKS);
    random_sizes(&random, count, sizes);
    reference(count, sizes, ranks, expected, expected_loads);
    assert_owners(count, sizes, ranks, expected);
    int owners[MOST_TENSORS];
    assert_ok(fp8zero_partition(count, sizes, ranks, owners, loads));
    assert_memory_equal(loads, expected_loads, (size_t)ranks * sizeof(*loads));
  }
}

// In another order, a tensor of a size of its own keeps its owner, and ranks keep their loads whatever the ties; in
// another unit nothing changes; no rank is above another by more than the largest tensor.
static void properties(void **unused) {
  (void)unused;
  test_random random = {2};
  for (int round = 0; round < 2000; round++) {
    int64_t sizes[MOST_TENSORS];
    int64_t shuffled[MOST_TENSORS];
    int order[MOST_TENSORS];
    int owners[MOST_TENSORS];
    int others[MOST_TENSORS];
    int64_t loads[MOST_RANKS];
    int64_t other_loads[MOST_RANKS];
    const int count = 1 + random_below(&random, MOST_TENSORS);
    const int ranks = 1 + random_below(&random, MOST_RANKS);
    random_sizes(&random, count, sizes);
    for (int i = 0; i < count; i++) order[i] = i;
    for (int i = count; i-- > 1;) {
      const int other = random_below(&random, i + 1);
      const int kept = order[i];
      order[i] = order[other];
      order[other] = kept;
    }
    for (int i = 0; i < count; i++) shuffled[i] = sizes[order[i]];
    assert_ok(fp8zero_partition(count, sizes, ranks, owners, loads));
    assert_ok(fp8zero_partition(count, shuffled, ranks, others, other_loads));
    assert_memory_equal(loads, other_loads, (size_t)ranks * sizeof(*loads));
    for (int i = 0; i < count; i++) {
      int alike = 0;
      for (int k = 0; k < count; k++) alike += sizes[k] == shuffled[i];
      if (alike == 1) assert_int_equal(others[i], owners[order[i]]);
    }

    int64_t largest = 0;
    int64_t total = 0;
    int64_t sums[MOST_RANKS] = {0};
    for (int i = 0; i < count; i++) {
      assert_in_range(owners[i], 0, ranks - 1);
      sums[owners[i]] += sizes[i];
      total += sizes[i];
      if (sizes[i] > largest) largest = sizes[i];
    }
    assert_memory_equal(loads, sums, (size_t)ranks * sizeof(*loads));
    fp8zero_balance balance;
    assert_ok(fp8zero_partition_balance(ranks, loads, &balance));
    assert_int_equal(balance.total, total);
    assert_true(balance.maximum - balance.minimum <= largest);

    for (int i = 0; i < count; i++) sizes[i] *= 6;
    assert_ok(fp8zero_partition(count, sizes, ranks, others, NULL));
    assert_memory_equal(owners, others, (size_t)count * sizeof(*owners));
  }
}

// The smallest possible maximum, by trying every distribution.
static int64_t best(int count, const int64_t *sizes, int ranks, int64_t *loads, int next) {
  int64_t least = INT64_MAX;
  if (next == count) {
    least = 0;
    for (int r = 0; r < ranks; r++)
      if (loads[r] > least) least = loads[r];
    return least;
  }
  for (int r = 0; r < ranks; r++) {
    loads[r] += sizes[next];
    const int64_t found = best(count, sizes, ranks, loads, next + 1);
    loads[r] -= sizes[next];
    if (found < least) least = found;
  }
  return least;
}

static void near_the_best(void **unused) {
  (void)unused;
  test_random random = {3};
  for (int round = 0; round < 300; round++) {
    int64_t sizes[7];
    int64_t loads[3];
    int owners[7];
    int64_t zeros[3] = {0, 0, 0};
    const int count = 1 + random_below(&random, 7);
    const int ranks = 1 + random_below(&random, 3);
    random_sizes(&random, count, sizes);
    assert_ok(fp8zero_partition(count, sizes, ranks, owners, loads));
    fp8zero_balance balance;
    assert_ok(fp8zero_partition_balance(ranks, loads, &balance));
    // Graham: 4/3 - 1 / (3 ranks).
    assert_true(3 * ranks * balance.maximum <= (4 * ranks - 1) * best(count, sizes, ranks, zeros, 0));
  }
}

static void balance_statistics(void **unused) {
  (void)unused;
  fp8zero_balance balance;
  const int64_t loads[4] = {30, 20, 50, 25};
  assert_ok(fp8zero_partition_balance(4, loads, &balance));
  assert_int_equal(balance.total, 125);
  assert_int_equal(balance.minimum, 20);
  assert_int_equal(balance.maximum, 50);
  assert_true(balance.mean == 31.25 && balance.ratio == 2.5);
  assert_ok(fp8zero_partition_balance(1, loads, &balance));
  assert_true(balance.mean == 30.0 && balance.ratio == 1.0);
  const int64_t zeros[2] = {0, 0};
  assert_ok(fp8zero_partition_balance(2, zeros, &balance));
  assert_true(balance.total == 0 && balance.mean == 0.0 && balance.ratio == 1.0);
  const int64_t idle[2] = {0, 1};
  assert_ok(fp8zero_partition_balance(2, idle, &balance));
  assert_true(balance.minimum == 0 && balance.maximum == 1 && isinf(balance.ratio) && balance.ratio > 0);
}

// gpt-175b as in table 1 of FP8-LM: 96 layers, 12288 wide, 96 heads, feed-forward 4 times as wide. With tensor
// parallelism 8 and pipeline parallelism 4 a rank has 24 layers and an eighth of every matrix.
//
//   norms     weight and bias, twice a layer, whole on every rank
//   qkv, fc1  by columns, with an eighth of the bias
//   proj, fc2 by rows, with the whole bias
//
// The first stage has the embedding besides, of 50257 words padded to 51200 (a multiple of 128 * 8) and divided by 8;
// the last one the final norm and, for the tied output layer, a copy of the embedding. Positions are rotary.
enum { HIDDEN = 12288, TENSOR_PARALLEL = 8, STAGES = 4, LAYERS = 96 / STAGES, DATA_PARALLEL = 4, WORDS = 51200 };

static int stage_tensors(int stage, int64_t *elements) {
  const int64_t h = HIDDEN;
  const int64_t layer[12] = {
    h, h, 3 * h * h / TENSOR_PARALLEL, 3 * h / TENSOR_PARALLEL, h * h / TENSOR_PARALLEL,     h,
    h, h, 4 * h * h / TENSOR_PARALLEL, 4 * h / TENSOR_PARALLEL, 4 * h * h / TENSOR_PARALLEL, h,
  };
  int count = 0;
  if (stage == 0) elements[count++] = WORDS / TENSOR_PARALLEL * h;
  for (int i = 0; i < LAYERS; i++, count += 12) memcpy(elements + count, layer, sizeof(layer));
  if (stage == STAGES - 1) {
    elements[count++] = h;
    elements[count++] = h;
    elements[count++] = WORDS / TENSOR_PARALLEL * h;
  }
  return count;
}

static void gpt_175b(void **unused) {
  (void)unused;
  for (int stage = 0; stage < STAGES; stage++) {
    int64_t sizes[12 * LAYERS + 3];
    int owners[12 * LAYERS + 3];
    int64_t loads[DATA_PARALLEL];
    fp8zero_element_range ranges[DATA_PARALLEL];
    int64_t split;
    fp8zero_balance balance;
    const int count = stage_tensors(stage, sizes);
    assert_ok(fp8zero_partition_elements(count, sizes, DATA_PARALLEL, ranges, &split));
    // Bytes with the FP8 optimizer: master 2, first moment 1, second 2, gradient 1.
    for (int i = 0; i < count; i++) sizes[i] *= 6;
    assert_ok(fp8zero_partition(count, sizes, DATA_PARALLEL, owners, loads));
    assert_ok(fp8zero_partition_balance(DATA_PARALLEL, loads, &balance));
    print_message(
      "gpt-175b, TP %d, PP %d, DP %d, stage %d: %d tensors, %.3f to %.3f GiB a rank, maximum / minimum %.4f; "
      "cut into equal parts, %d tensors are split\n",
      TENSOR_PARALLEL, STAGES, DATA_PARALLEL, stage, count, (double)balance.minimum * 0x1p-30,
      (double)balance.maximum * 0x1p-30, balance.ratio, (int)split);
    assert_true(balance.ratio <= 1.05);
  }
}

// 100,000 tensors on 4096 ranks: every tensor's owner had the least memory when it came. A rank's loads are replayed
// in the documented order; that none is less loaded than the owner is a walk over 4096 ranks, for a sample.
typedef struct sized {
  int64_t size;
  int index;
} sized;

static int larger_first(const void *a, const void *b) {
  const sized *x = a;
  const sized *y = b;
  if (x->size != y->size) return x->size > y->size ? -1 : 1;
  return x->index < y->index ? -1 : 1;
}

static void many(void **unused) {
  (void)unused;
  enum { TENSORS = 100000, RANKS = 4096 };
  int64_t *sizes = malloc(TENSORS * sizeof(*sizes));
  int *owners = malloc(TENSORS * sizeof(*owners));
  sized *order = malloc(TENSORS * sizeof(*order));
  int64_t *loads = malloc(RANKS * sizeof(*loads));
  int64_t *replayed = calloc(RANKS, sizeof(*replayed));
  assert_true(sizes && owners && order && loads && replayed);
  test_random random = {4};
  for (int i = 0; i < TENSORS; i++)
    sizes[i] = (int64_t)exp2(10.0 + 18.0 * test_random_uniform(&random)) & ~INT64_C(1023);
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  const fp8core_status status = fp8zero_partition(TENSORS, sizes, RANKS, owners, loads);
  clock_gettime(CLOCK_MONOTONIC, &end);
  assert_ok(status);
  fp8zero_balance balance;
  assert_ok(fp8zero_partition_balance(RANKS, loads, &balance));
  print_message("%d tensors on %d ranks: %.1f ms, maximum / minimum %.4f\n", TENSORS, RANKS,
                1e3 * (double)(end.tv_sec - begin.tv_sec) + 1e-6 * (double)(end.tv_nsec - begin.tv_nsec),
                balance.ratio);
  for (int i = 0; i < TENSORS; i++) order[i] = (sized){sizes[i], i};
  qsort(order, TENSORS, sizeof(*order), larger_first);
  for (int i = 0; i < TENSORS; i++) {
    const int owner = owners[order[i].index];
    assert_in_range(owner, 0, RANKS - 1);
    if (i % 16 == 0)
      for (int r = 0; r < RANKS; r++)
        if (replayed[r] < replayed[owner] || (replayed[r] == replayed[owner] && r < owner))
          fail_msg("tensor %d: rank %d, expected one with less, as %d", order[i].index, owner, r);
    replayed[owner] += order[i].size;
  }
  assert_memory_equal(replayed, loads, RANKS * sizeof(*loads));
  free(sizes);
  free(owners);
  free(order);
  free(loads);
  free(replayed);
}

static void assert_range(const fp8zero_element_range *found, int64_t begin, int64_t end, int64_t tensor_begin,
                         int64_t tensor_end, int64_t first_begin, int64_t last_end) {
  const fp8zero_element_range expected = {begin, end, tensor_begin, tensor_end, first_begin, last_end};
  if (memcmp(found, &expected, sizeof(expected)) != 0)
    fail_msg(
      "[%lld, %lld) in tensors [%lld, %lld), from %lld to %lld; expected [%lld, %lld), [%lld, %lld), %lld to %lld",
      (long long)found->begin, (long long)found->end, (long long)found->tensor_begin, (long long)found->tensor_end,
      (long long)found->first_begin, (long long)found->last_end, (long long)begin, (long long)end,
      (long long)tensor_begin, (long long)tensor_end, (long long)first_begin, (long long)last_end);
}

static void elements_known(void **unused) {
  (void)unused;
  fp8zero_element_range ranges[6];
  int64_t split = -1;
  // aaa bbbbb c dd: 11 elements on 3 ranks, 4, 4 and 3: aaab bbbb cdd.
  const int64_t sizes[4] = {3, 5, 1, 2};
  assert_ok(fp8zero_partition_elements(4, sizes, 3, ranges, &split));
  assert_range(&ranges[0], 0, 4, 0, 2, 0, 1);
  assert_range(&ranges[1], 4, 8, 1, 2, 1, 5);
  assert_range(&ranges[2], 8, 11, 2, 4, 0, 2);
  assert_int_equal(split, 1);
  // One tensor on many ranks is split once; with more ranks than elements the last ones are empty.
  const int64_t one[1] = {4};
  assert_ok(fp8zero_partition_elements(1, one, 6, ranges, &split));
  for (int r = 0; r < 4; r++) assert_range(&ranges[r], r, r + 1, 0, 1, r, r + 1);
  for (int r = 4; r < 6; r++) assert_range(&ranges[r], 4, 4, 1, 1, 0, 0);
  assert_int_equal(split, 1);
  // Cuts between tensors split none; empty tensors belong to no part, but may lie inside one.
  const int64_t gaps[7] = {0, 4, 0, 0, 2, 0, 2};
  assert_ok(fp8zero_partition_elements(7, gaps, 2, ranges, &split));
  assert_range(&ranges[0], 0, 4, 1, 2, 0, 4);
  assert_range(&ranges[1], 4, 8, 4, 7, 0, 2);
  assert_int_equal(split, 0);
  assert_ok(fp8zero_partition_elements(0, NULL, 2, ranges, &split));
  for (int r = 0; r < 2; r++) assert_range(&ranges[r], 0, 0, 0, 0, 0, 0);
  assert_int_equal(split, 0);
  const int64_t zeros[3] = {0, 0, 0};
  assert_ok(fp8zero_partition_elements(3, zeros, 2, ranges, NULL));
  for (int r = 0; r < 2; r++) assert_range(&ranges[r], 0, 0, 3, 3, 0, 0);
  const int64_t most[3] = {INT64_MAX - 7, 0, 7};
  assert_ok(fp8zero_partition_elements(3, most, 2, ranges, &split));
  assert_range(&ranges[0], 0, INT64_C(1) << 62, 0, 1, 0, INT64_C(1) << 62);
  assert_range(&ranges[1], INT64_C(1) << 62, INT64_MAX, 0, 3, INT64_C(1) << 62, 7);
  assert_int_equal(split, 1);
}

// Element by element: each has the rank that equal parts give it, and the parts list each once, in order.
static void elements_as_the_reference(void **unused) {
  (void)unused;
  test_random random = {5};
  for (int round = 0; round < 4000; round++) {
    int64_t sizes[24];
    fp8zero_element_range ranges[MOST_RANKS];
    unsigned char cut[24] = {0};
    int64_t split;
    int64_t total = 0;
    const int count = random_below(&random, 25);
    const int ranks = 1 + random_below(&random, MOST_RANKS);
    const int bound = 1 + random_below(&random, 30);
    for (int i = 0; i < count; i++) sizes[i] = random_below(&random, 4) == 0 ? 0 : random_below(&random, bound);
    for (int i = 0; i < count; i++) total += sizes[i];
    assert_ok(fp8zero_partition_elements(count, sizes, ranks, ranges, &split));
    int tensor = 0;
    int64_t element = 0;
    int64_t position = 0;
    for (int r = 0; r < ranks; r++) {
      const fp8zero_element_range *range = &ranges[r];
      assert_int_equal(range->begin, position);
      assert_int_equal(range->end - range->begin, total / ranks + (r < total % ranks));
      if (range->begin == range->end) {
        assert_range(range, total, total, count, count, 0, 0);
        continue;
      }
      assert_true(sizes[range->tensor_begin] > 0 && sizes[range->tensor_end - 1] > 0);
      // The loop of the header.
      for (int64_t t = range->tensor_begin; t < range->tensor_end; t++) {
        const int64_t from = t == range->tensor_begin ? range->first_begin : 0;
        const int64_t to = t == range->tensor_end - 1 ? range->last_end : sizes[t];
        for (int64_t e = from; e < to; e++, element++, position++) {
          for (; element == sizes[tensor]; tensor++) element = 0;
          assert_int_equal(t, tensor);
          assert_int_equal(e, element);
        }
        if (to - from < sizes[t]) cut[t] = 1;
      }
      assert_int_equal(range->end, position);
    }
    assert_int_equal(position, total);
    int expected_split = 0;
    for (int i = 0; i < count; i++) expected_split += cut[i];
    assert_int_equal(split, expected_split);
  }
}

#define INVALID(call, text) assert_fails(call, FP8CORE_ERROR_INVALID_ARGUMENT, text)

static void wrong_arguments(void **unused) {
  (void)unused;
  const int64_t sizes[3] = {5, 6, 7};
  const int64_t negative[3] = {5, -6, INT64_MIN};
  const int64_t too_many[3] = {INT64_MAX, 0, 1};
  int owners[3] = {42, 42, 42};
  int64_t loads[2] = {43, 43};
  INVALID(fp8zero_partition(-1, sizes, 2, owners, loads), "tensor_count is -1, expected at least 0");
  INVALID(fp8zero_partition(INT64_MIN, NULL, 2, NULL, loads), "tensor_count is -9223372036854775808");
  INVALID(fp8zero_partition(3, sizes, 0, owners, loads), "rank_count is 0, expected at least 1");
  INVALID(fp8zero_partition(3, sizes, -4, owners, loads), "rank_count is -4");
  INVALID(fp8zero_partition(0, NULL, 0, NULL, loads), "rank_count is 0");
  INVALID(fp8zero_partition(3, NULL, 2, owners, loads), "sizes is NULL, expected the sizes of 3 tensors");
  INVALID(fp8zero_partition(3, sizes, 2, NULL, loads), "owners is NULL, expected where to put the ranks of 3 tensors");
  INVALID(fp8zero_partition(3, negative, 2, owners, loads), "sizes[1] is -6, expected at least 0");
  INVALID(fp8zero_partition(1, negative + 2, 2, owners, loads), "sizes[0] is -9223372036854775808");
  INVALID(fp8zero_partition(3, too_many, 2, owners, loads),
          "sizes[2] is 1, which with the 9223372036854775807 before it passes the largest sum, 9223372036854775807");
  for (int i = 0; i < 3; i++) assert_int_equal(owners[i], 42);

  fp8zero_balance balance;
  fp8zero_balance untouched;
  memset(&balance, 42, sizeof(balance));
  untouched = balance;
  INVALID(fp8zero_partition_balance(0, sizes, &balance), "rank_count is 0, expected at least 1");
  INVALID(fp8zero_partition_balance(-1, sizes, &balance), "rank_count is -1");
  INVALID(fp8zero_partition_balance(3, NULL, &balance), "loads is NULL, expected the loads of 3 ranks");
  INVALID(fp8zero_partition_balance(3, sizes, NULL), "balance is NULL");
  INVALID(fp8zero_partition_balance(3, negative, &balance), "loads[1] is -6, expected at least 0");
  INVALID(fp8zero_partition_balance(3, too_many, &balance), "loads[2] is 1, which with");
  assert_memory_equal(&balance, &untouched, sizeof(balance));

  fp8zero_element_range ranges[2];
  fp8zero_element_range untouched_ranges[2];
  int64_t split = 44;
  memset(ranges, 42, sizeof(ranges));
  memcpy(untouched_ranges, ranges, sizeof(ranges));
  INVALID(fp8zero_partition_elements(-1, sizes, 2, ranges, &split), "tensor_count is -1");
  INVALID(fp8zero_partition_elements(3, sizes, 0, ranges, &split), "rank_count is 0");
  INVALID(fp8zero_partition_elements(3, NULL, 2, ranges, &split), "sizes is NULL");
  INVALID(fp8zero_partition_elements(3, sizes, 2, NULL, &split),
          "ranges is NULL, expected where to put the parts of 2");
  INVALID(fp8zero_partition_elements(3, negative, 2, ranges, &split), "sizes[1] is -6");
  INVALID(fp8zero_partition_elements(3, too_many, 2, ranges, &split), "sizes[2] is 1, which with");
  assert_memory_equal(ranges, untouched_ranges, sizeof(ranges));
  assert_int_equal(split, 44);
  for (int r = 0; r < 2; r++) assert_int_equal(loads[r], 43);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(known_cases),
    cmocka_unit_test(ties),
    cmocka_unit_test(nothing_to_distribute),
    cmocka_unit_test(largest_sizes),
    cmocka_unit_test(as_the_reference),
    cmocka_unit_test(properties),
    cmocka_unit_test(near_the_best),
    cmocka_unit_test(balance_statistics),
    cmocka_unit_test(gpt_175b),
    cmocka_unit_test(many),
    cmocka_unit_test(elements_known),
    cmocka_unit_test(elements_as_the_reference),
    cmocka_unit_test(wrong_arguments),
  };
  return cmocka_run_group_tests_name("partition", tests, NULL, NULL);
}
