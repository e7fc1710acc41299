// Every collective, at awkward numbers of ranks and sizes, against what a loop over all ranks' data gives.
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int rank_counts[] = {1, 2, 3, 8, 11, 16};
// None, fewer than ranks, odd, on both sides of the change of algorithm, and pieces that are not whole.
static const int64_t sizes[] = {0, 1, 7, 64, 1023, 20001, 150001};

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

// Element i of a rank: small integers, whose sums are exact in every format.
static double value_of(int rank, int64_t i) { return (double)((rank * 7 + i * 3) % 15 - 7); }

static void put(fp8comm_dtype dtype, void *data, int64_t i, double value) {
  unsigned char *at = (unsigned char *)data + (size_t)i * fp8comm_dtype_size(dtype);
  const uint32_t code = dtype <= FP8COMM_FP32 ? fp8core_encode((fp8core_dtype)dtype, (float)value, 0) : 0;
  const int64_t integer = (int64_t)value;
  const unsigned char byte = (unsigned char)(value + 100);
  if (dtype <= FP8COMM_FP32) memcpy(at, &code, fp8comm_dtype_size(dtype));
  if (dtype == FP8COMM_FP64) memcpy(at, &value, 8);
  if (dtype == FP8COMM_INT64) memcpy(at, &integer, 8);
  if (dtype == FP8COMM_BYTE) *at = byte;
}

static double get(fp8comm_dtype dtype, const void *data, int64_t i) {
  const unsigned char *at = (const unsigned char *)data + (size_t)i * fp8comm_dtype_size(dtype);
  uint32_t code = 0;
  int64_t integer = 0;
  double value = 0;
  if (dtype <= FP8COMM_FP32) {
    memcpy(&code, at, fp8comm_dtype_size(dtype));
    return (double)fp8core_decode((fp8core_dtype)dtype, code);
  }
  if (dtype == FP8COMM_BYTE) return (double)*at - 100;
  memcpy(&integer, at, 8);
  memcpy(&value, at, 8);
  return dtype == FP8COMM_INT64 ? (double)integer : value;
}

static double expected(int ranks, int64_t i, fp8comm_reduction reduction) {
  double result = value_of(0, i);
  for (int rank = 1; rank < ranks; rank++) {
    const double value = value_of(rank, i);
    if (reduction == FP8COMM_SUM) result += value;
    if (reduction == FP8COMM_MIN && value < result) result = value;
    if (reduction == FP8COMM_MAX && value > result) result = value;
  }
  return result;
}

static void *filled(fp8comm_dtype dtype, int rank, int64_t count) {
  unsigned char *data = malloc((size_t)count * fp8comm_dtype_size(dtype) + 1);
  for (int64_t i = 0; data && i < count; i++) put(dtype, data, i, value_of(rank, i));
  return data;
}

typedef struct reduce_case {
  fp8comm_dtype dtype;
  fp8comm_reduction reduction;
  int64_t count;
} reduce_case;

static void check_reduce(fp8comm_communicator *communicator, void *data) {
  const reduce_case *one = data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const size_t element = fp8comm_dtype_size(one->dtype);
  unsigned char *in = filled(one->dtype, rank, one->count * size);
  unsigned char *out = calloc((size_t)one->count * (size_t)size + 1, element);
  rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, one->count, one->dtype, one->reduction));
  for (int64_t i = 0; i < one->count; i++)
    rank_check(communicator, get(one->dtype, out, i) == expected(size, i, one->reduction),
               "all_reduce %s of %lld %s: element %lld is %g, expected %g", "", (long long)one->count,
               fp8comm_dtype_name(one->dtype), (long long)i, get(one->dtype, out, i),
               expected(size, i, one->reduction));
  // In place, the same bits.
  unsigned char *same = filled(one->dtype, rank, one->count);
  rank_ok(communicator, fp8comm_all_reduce(communicator, same, same, one->count, one->dtype, one->reduction));
  rank_check(communicator, memcmp(same, out, (size_t)one->count * element) == 0, "all_reduce in place differs");
  rank_ok(communicator, fp8comm_reduce_scatter(communicator, in, out, one->count, one->dtype, one->reduction));
  for (int64_t i = 0; i < one->count; i++)
    rank_check(communicator, get(one->dtype, out, i) == expected(size, i + rank * one->count, one->reduction),
               "reduce_scatter of %lld %s: element %lld is %g", (long long)one->count, fp8comm_dtype_name(one->dtype),
               (long long)i, get(one->dtype, out, i));
  unsigned char *own = in + (size_t)rank * (size_t)one->count * element;
  rank_ok(communicator, fp8comm_reduce_scatter(communicator, in, own, one->count, one->dtype, one->reduction));
  rank_check(communicator, memcmp(own, out, (size_t)one->count * element) == 0, "reduce_scatter in place differs");
  free(in);
  free(out);
  free(same);
}

static void reductions(void **unused) {
  (void)unused;
  static const fp8comm_dtype dtypes[] = {FP8COMM_FP32, FP8COMM_BF16,  FP8COMM_FP16,
                                         FP8COMM_FP64, FP8COMM_INT64, FP8COMM_BYTE};
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    for (size_t s = 0; s < COUNT(sizes); s++) {
      for (size_t d = 0; d < COUNT(dtypes); d++) {
        // Large ones in one format each way.
        if (sizes[s] > 2000 && d > 1) continue;
        for (int reduction = FP8COMM_SUM; reduction <= FP8COMM_MAX; reduction++) {
          if (dtypes[d] == FP8COMM_BYTE && reduction == FP8COMM_SUM) continue;
          if (sizes[s] > 2000 && reduction != FP8COMM_SUM) continue;
          // Sums of 16 ranks reach 112, which BF16 and FP16 hold exactly.
          reduce_case one = {dtypes[d], (fp8comm_reduction)reduction, sizes[s]};
          run_ranks(rank_counts[r], 0, check_reduce, &one);
        }
      }
    }
  }
}

static void check_moves(fp8comm_communicator *communicator, void *data) {
  const int64_t count = *(const int64_t *)data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const size_t total = (size_t)count * (size_t)size;
  float *in = filled(FP8COMM_FP32, rank, count * size), *out = calloc(total + 1, 4);
  rank_ok(communicator, fp8comm_all_gather(communicator, in, out, count, FP8COMM_FP32));
  for (int from = 0; from < size; from++) {
    for (int64_t i = 0; i < count; i++)
      rank_check(communicator, (double)out[from * count + i] == value_of(from, i),
                 "all_gather of %lld: element %lld of rank %d", (long long)count, (long long)i, from);
  }
  // In place.
  memset(out, 0, total * 4);
  memcpy(out + rank * count, in, (size_t)count * 4);
  rank_ok(communicator, fp8comm_all_gather(communicator, out + rank * count, out, count, FP8COMM_FP32));
  for (int from = 0; from < size; from++)
    rank_check(communicator, count == 0 || (double)out[from * count + count - 1] == value_of(from, count - 1),
               "all_gather in place of %lld", (long long)count);
  rank_ok(communicator, fp8comm_all_to_all(communicator, in, out, count, FP8COMM_FP32));
  for (int from = 0; from < size; from++) {
    for (int64_t i = 0; i < count; i++)
      rank_check(communicator, (double)out[from * count + i] == value_of(from, rank * count + i), "all_to_all of %lld",
                 (long long)count);
  }
  for (int root = 0; root < size; root += root + 1) {
    memcpy(out, in, (size_t)count * 4);
    rank_ok(communicator, fp8comm_broadcast(communicator, out, count, FP8COMM_FP32, root));
    for (int64_t i = 0; i < count; i++)
      rank_check(communicator, (double)out[i] == value_of(root, i), "broadcast of %lld from %d", (long long)count,
                 root);
  }
  // Sizes of each rank's own, some of them none.
  int64_t counts[64], before = 0;
  for (int i = 0; i < size; i++) counts[i] = i % 3 == 1 ? 0 : (count + i) % (count + 1);
  rank_ok(communicator, fp8comm_all_gatherv(communicator, in, out, counts, FP8COMM_FP32));
  for (int from = 0; from < size; from++) {
    for (int64_t i = 0; i < counts[from]; i++)
      rank_check(communicator, (double)out[before + i] == value_of(from, i), "all_gatherv of %lld", (long long)count);
    before += counts[from];
  }
  // A ring of messages, twice each, in order.
  if (size > 1) {
    fp8comm_request *sends[2], *receives[2];
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    for (int i = 0; i < 2; i++) {
      rank_ok(communicator, fp8comm_recv_start(communicator, out + i * count, count, FP8COMM_FP32, left, &receives[i]));
      rank_ok(communicator, fp8comm_send_start(communicator, in + i * count, count, FP8COMM_FP32, right, &sends[i]));
    }
    for (int i = 1; i >= 0; i--) {
      rank_ok(communicator, fp8comm_request_wait(&receives[i]));
      rank_ok(communicator, fp8comm_request_wait(&sends[i]));
    }
    for (int64_t i = 0; i < 2 * count; i++)
      rank_check(communicator, (double)out[i] == value_of(left, i), "message of %lld", (long long)count);
  }
  rank_ok(communicator, fp8comm_barrier(communicator));
  free(in);
  free(out);
}

static void moves(void **unused) {
  (void)unused;
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    for (size_t s = 0; s < COUNT(sizes); s++) {
      int64_t count = sizes[s];
      run_ranks(rank_counts[r], 0, check_moves, &count);
    }
  }
}

// Values whose sum depends on the order: the bits must not depend on rank or run.
static void check_bits(fp8comm_communicator *communicator, void *data) {
  const int64_t count = *(const int64_t *)data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  float *in = malloc((size_t)count * 4), *out = malloc((size_t)count * 4), *again = malloc((size_t)count * 4);
  float *all = malloc((size_t)count * 4 * (size_t)size);
  test_random random = {(uint64_t)rank + 1};
  for (int64_t i = 0; i < count; i++)
    in[i] = (float)(test_random_normal(&random) * exp(4 * test_random_normal(&random)));
  rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, count, FP8COMM_FP32, FP8COMM_SUM));
  rank_ok(communicator, fp8comm_all_reduce(communicator, in, again, count, FP8COMM_FP32, FP8COMM_SUM));
  rank_check(communicator, memcmp(out, again, (size_t)count * 4) == 0, "two runs differ");
  rank_ok(communicator, fp8comm_all_gather(communicator, out, all, count, FP8COMM_FP32));
  for (int i = 0; i < size; i++)
    rank_check(communicator, memcmp(all + i * count, out, (size_t)count * 4) == 0, "rank %d has other bits", i);
  free(in);
  free(out);
  free(again);
  free(all);
}

static void same_bits(void **unused) {
  (void)unused;
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    for (size_t s = 1; s < COUNT(sizes); s++) {
      int64_t count = sizes[s];
      run_ranks(rank_counts[r], 0, check_bits, &count);
    }
  }
}

// 16-bit sums are rounded once: 256 + 1 + 1 is 258 in BF16 although 257 is none.
static void check_once(fp8comm_communicator *communicator, void *data) {
  (void)data;
  uint16_t in[4097], out[4097];
  const float value = fp8comm_communicator_rank(communicator) == 0 ? 256.0f : 1.0f;
  for (int i = 0; i < 4097; i++) in[i] = (uint16_t)fp8core_encode(FP8CORE_BF16, value, 0);
  static const int counts[] = {5, 4097};
  for (int k = 0; k < 2; k++) {
    rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, counts[k], FP8COMM_BF16, FP8COMM_SUM));
    rank_check(communicator, (double)fp8core_decode(FP8CORE_BF16, out[counts[k] - 1]) == 258, "rounded more than once");
  }
}

// A NaN wins, -0 is below +0, sums overflow to infinity, integers wrap.
static void check_special(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int rank = fp8comm_communicator_rank(communicator);
  float in[4] = {rank == 1 ? NAN : 1.0f, rank == 2 ? -0.0f : 0.0f, rank == 0 ? -INFINITY : 5.0f, 3e38f}, out[4];
  rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, 4, FP8COMM_FP32, FP8COMM_MIN));
  rank_check(communicator, isnan(out[0]) && signbit(out[1]) && isinf(out[2]), "min of special values");
  rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, 4, FP8COMM_FP32, FP8COMM_MAX));
  rank_check(communicator, isnan(out[0]) && !signbit(out[1]) && out[2] == 5.0f, "max of special values");
  rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, 4, FP8COMM_FP32, FP8COMM_SUM));
  rank_check(communicator, isnan(out[0]) && isinf(out[2]) && isinf(out[3]), "sum of special values");
  int64_t integer = INT64_MAX;
  rank_ok(communicator, fp8comm_all_reduce(communicator, &integer, &integer, 1, FP8COMM_INT64, FP8COMM_SUM));
  rank_check(communicator, integer == INT64_MAX - 2, "sum of three times 2^63 - 1 is %lld", (long long)integer);
}

static void arithmetic(void **unused) {
  (void)unused;
  run_ranks(3, 0, check_once, NULL);
  run_ranks(3, 0, check_special, NULL);
}

// Many at once, waited for in another order on each rank; thousands of small ones one after the other.
#define AT_ONCE 20
static void check_many(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  static const int64_t counts[] = {3, 40000};
  float *buffers[AT_ONCE];
  fp8comm_request *requests[AT_ONCE];
  for (int i = 0; i < AT_ONCE; i++) {
    buffers[i] = filled(FP8COMM_FP32, rank + i, counts[i % 2]);
    rank_ok(communicator, fp8comm_all_reduce_start(communicator, buffers[i], buffers[i], counts[i % 2], FP8COMM_FP32,
                                                   FP8COMM_SUM, &requests[i]));
  }
  for (int k = 0; k < AT_ONCE; k++) {
    const int i = (k * 7 + rank) % AT_ONCE;
    int done = k % 2;
    // Half by testing.
    while (!done && requests[i]) rank_ok(communicator, fp8comm_request_test(&requests[i], &done));
    rank_ok(communicator, fp8comm_request_wait(&requests[i]));
    rank_check(communicator, requests[i] == NULL, "the request is still there");
  }
  for (int i = 0; i < AT_ONCE; i++) {
    double sum = 0;
    for (int other = 0; other < size; other++) sum += value_of(other + i, counts[i % 2] - 1);
    rank_check(communicator, (double)buffers[i][counts[i % 2] - 1] == sum, "request %d", i);
    free(buffers[i]);
  }
  for (int i = 0; i < 3000; i++) {
    float one = (float)i;
    rank_ok(communicator, fp8comm_all_reduce(communicator, &one, &one, 1, FP8COMM_FP32, FP8COMM_MAX));
    rank_check(communicator, one == (float)i, "call %d", i);
  }
}

static void many(void **unused) {
  (void)unused;
  run_ranks(1, 0, check_many, NULL);
  run_ranks(2, 0, check_many, NULL);
  run_ranks(8, 0, check_many, NULL);
}

static void check_large(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const int64_t count = (INT64_C(8) << 20) + 13;
  float *one = malloc((size_t)count * 4);
  for (int64_t i = 0; i < count; i++) one[i] = (float)(rank + i % 100);
  rank_ok(communicator, fp8comm_all_reduce(communicator, one, one, count, FP8COMM_FP32, FP8COMM_SUM));
  for (int64_t i = 0; i < count; i++)
    rank_check(communicator, one[i] == (float)(size * (size - 1) / 2 + size * (i % 100)), "element %lld", (long long)i);
  // Twice the elements less the own part.
  const uint64_t sent = fp8comm_communicator_bytes_sent(communicator);
  const uint64_t most = (uint64_t)(2 * 4 * count * (size - 1) / size + 4 * size + 64);
  rank_check(communicator, sent <= most, "%llu bytes were sent, expected at most %llu", (unsigned long long)sent,
             (unsigned long long)most);
  free(one);
}

static void large(void **unused) {
  (void)unused;
  run_ranks(2, 0, check_large, NULL);
  run_ranks(3, 0, check_large, NULL);
}

static void check_split(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  fp8comm_communicator *part, *all, *none;
  // Odd and even ranks, the last first.
  rank_ok(communicator, fp8comm_communicator_split(communicator, rank % 2, -rank, &part));
  rank_check(communicator, fp8comm_communicator_size(part) == (size + 1 - rank % 2) / 2, "size of a part");
  int64_t sum = rank, others = 0;
  rank_ok(communicator, fp8comm_all_reduce(part, &sum, &sum, 1, FP8COMM_INT64, FP8COMM_SUM));
  for (int i = rank % 2; i < size; i += 2) others += i;
  rank_check(communicator, sum == others, "sum of a part");
  int64_t ranks[16];
  const int64_t own = rank;
  rank_ok(communicator, fp8comm_all_gather(part, &own, ranks, 1, FP8COMM_INT64));
  for (int i = 1; i < fp8comm_communicator_size(part); i++)
    rank_check(communicator, ranks[i] < ranks[i - 1], "order of a part");
  // A part of a part, with the parent gone.
  rank_ok(communicator, fp8comm_communicator_split(part, 0, 0, &all));
  fp8comm_communicator_destroy(&part);
  rank_ok(communicator, fp8comm_all_reduce(all, &sum, &sum, 1, FP8COMM_INT64, FP8COMM_MAX));
  rank_ok(communicator, fp8comm_barrier(communicator));
  rank_ok(communicator, fp8comm_barrier(all));
  fp8comm_communicator_destroy(&all);
  // No part for rank 0.
  rank_ok(communicator, fp8comm_communicator_split(communicator, rank == 0 ? -1 : 5, 0, &none));
  rank_check(communicator, (none == NULL) == (rank == 0), "a negative colour");
  if (none) rank_check(communicator, fp8comm_communicator_rank(none) == rank - 1, "rank of a part");
  if (none) rank_ok(communicator, fp8comm_barrier(none));
  fp8comm_communicator_destroy(&none);
  rank_ok(communicator, fp8comm_barrier(communicator));
}

static void split(void **unused) {
  (void)unused;
  for (size_t r = 0; r < COUNT(rank_counts); r++) run_ranks(rank_counts[r], 0, check_split, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(moves), cmocka_unit_test(reductions), cmocka_unit_test(same_bits), cmocka_unit_test(arithmetic),
    cmocka_unit_test(many),  cmocka_unit_test(large),      cmocka_unit_test(split),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
