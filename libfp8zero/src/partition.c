#include "fp8zero/partition.h"

#include <math.h>
#include <stdlib.h>

#define fp8zero_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

// Values of an array are at least 0 and have a sum.
static fp8core_status sum(const char *name, int64_t count, const int64_t *values, int64_t *total) {
  int64_t before = 0;
  for (int64_t i = 0; i < count; i++) {
    if (values[i] < 0)
      return fp8zero_invalid("%s[%lld] is %lld, expected at least 0", name, (long long)i, (long long)values[i]);
    if (values[i] > INT64_MAX - before)
      return fp8zero_invalid("%s[%lld] is %lld, which with the %lld before it passes the largest sum, %lld", name,
                             (long long)i, (long long)values[i], (long long)before, (long long)INT64_MAX);
    before += values[i];
  }
  *total = before;
  return FP8CORE_OK;
}

static fp8core_status check(int64_t tensor_count, const int64_t *sizes, int rank_count, int64_t *total) {
  if (tensor_count < 0) return fp8zero_invalid("tensor_count is %lld, expected at least 0", (long long)tensor_count);
  if (rank_count < 1) return fp8zero_invalid("rank_count is %d, expected at least 1", rank_count);
  if (!sizes && tensor_count > 0)
    return fp8zero_invalid("sizes is NULL, expected the sizes of %lld tensors", (long long)tensor_count);
  return sum("sizes", tensor_count, sizes, total);
}

// A tensor or a rank in a binary heap with the smallest key on top; of equal keys the lowest index. Keys are a rank's
// load, and a tensor's negated size, so that one order serves both.
typedef struct item {
  int64_t key;
  int64_t index;
} item;

static int precedes(item a, item b) { return a.key < b.key || (a.key == b.key && a.index < b.index); }

// Gives `value` its place in the heap of `count` items under `hole`, whose own item is dropped.
static void sift_down(item *heap, int64_t count, int64_t hole, item value) {
  for (;;) {
    int64_t child = 2 * hole + 1;
    if (child + 1 < count && precedes(heap[child + 1], heap[child])) child++;
    if (child >= count || !precedes(heap[child], value)) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = value;
}

fp8core_status fp8zero_partition(int64_t tensor_count, const int64_t *sizes, int rank_count, int *owners,
                                 int64_t *loads) {
  int64_t total = 0;
  const fp8core_status status = check(tensor_count, sizes, rank_count, &total);
  if (status != FP8CORE_OK) return status;
  if (!owners && tensor_count > 0)
    return fp8zero_invalid("owners is NULL, expected where to put the ranks of %lld tensors", (long long)tensor_count);

  // n tensors reach no rank beyond the first n: a lower one is empty until then.
  const int64_t heap_ranks = rank_count < tensor_count ? rank_count : tensor_count;
  item *tensors = NULL;
  if (tensor_count > 0) {
    tensors = calloc((size_t)tensor_count + (size_t)heap_ranks, sizeof(*tensors));
    if (!tensors)
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY,
                                    "no memory to sort %lld tensors and %lld ranks, of %zu bytes each",
                                    (long long)tensor_count, (long long)heap_ranks, sizeof(*tensors));
  }
  item *ranks = tensors ? tensors + tensor_count : NULL;
  for (int64_t i = 0; i < tensor_count; i++) tensors[i] = (item){-sizes[i], i};
  for (int64_t i = tensor_count / 2; i-- > 0;) sift_down(tensors, tensor_count, i, tensors[i]);
  // In order, so a heap.
  for (int64_t i = 0; i < heap_ranks; i++) ranks[i] = (item){0, i};

  for (int64_t left = tensor_count; left > 0; left--) {
    const item tensor = tensors[0];
    const item rank = ranks[0];
    owners[tensor.index] = (int)rank.index;
    sift_down(tensors, left - 1, 0, tensors[left - 1]);
    sift_down(ranks, heap_ranks, 0, (item){rank.key - tensor.key, rank.index});
  }
  if (loads) {
    for (int64_t i = heap_ranks; i < rank_count; i++) loads[i] = 0;
    for (int64_t i = 0; i < heap_ranks; i++) loads[ranks[i].index] = ranks[i].key;
  }
  free(tensors);
  return FP8CORE_OK;
}

fp8core_status fp8zero_partition_balance(int rank_count, const int64_t *loads, fp8zero_balance *balance) {
  if (rank_count < 1) return fp8zero_invalid("rank_count is %d, expected at least 1", rank_count);
  if (!loads) return fp8zero_invalid("loads is NULL, expected the loads of %d ranks", rank_count);
  if (!balance) return fp8zero_invalid("balance is NULL, expected where to put the statistics");
  fp8zero_balance found;
  const fp8core_status status = sum("loads", rank_count, loads, &found.total);
  if (status != FP8CORE_OK) return status;
  found.minimum = found.maximum = loads[0];
  for (int i = 1; i < rank_count; i++) {
    if (loads[i] < found.minimum) found.minimum = loads[i];
    if (loads[i] > found.maximum) found.maximum = loads[i];
  }
  found.mean = (double)found.total / rank_count;
  if (found.minimum > 0)
    found.ratio = (double)found.maximum / (double)found.minimum;
  else
    found.ratio = found.maximum > 0 ? (double)INFINITY : 1.0;
  *balance = found;
  return FP8CORE_OK;
}

fp8core_status fp8zero_partition_elements(int64_t tensor_count, const int64_t *sizes, int rank_count,
                                          fp8zero_element_range *ranges, int64_t *split_tensors) {
  int64_t total = 0;
  const fp8core_status status = check(tensor_count, sizes, rank_count, &total);
  if (status != FP8CORE_OK) return status;
  if (!ranges) return fp8zero_invalid("ranges is NULL, expected where to put the parts of %d ranks", rank_count);

  const int64_t share = total / rank_count;
  const int64_t larger = total % rank_count;
  int64_t split = 0;
  int64_t begin = 0;
  // A tensor, and where it starts in the concatenation.
  int64_t tensor = 0;
  int64_t start = 0;
  for (int r = 0; r < rank_count; r++) {
    fp8zero_element_range range = {begin, begin + share + (r < larger), tensor_count, tensor_count, 0, 0};
    if (range.begin < range.end) {
      while (range.begin - start >= sizes[tensor]) start += sizes[tensor++];
      range.tensor_begin = tensor;
      range.first_begin = range.begin - start;
      while (range.end - start > sizes[tensor]) start += sizes[tensor++];
      range.tensor_end = tensor + 1;
      range.last_end = range.end - start;
      // A tensor that continues here from an earlier rank has been counted there.
      const int counted = tensor == range.tensor_begin && range.first_begin > 0;
      split += range.last_end < sizes[tensor] && !counted;
    }
    ranges[r] = range;
    begin = range.end;
  }
  if (split_tensors) *split_tensors = split;
  return FP8CORE_OK;
}
