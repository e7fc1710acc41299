// The public collectives: arguments are checked, and turned into a request's steps.
#include "fp8comm/collectives.h"

#include <limits.h>
#include <string.h>

#include "internal.h"
#include "reductions.h"

// From this size on a broadcast is divided among all, who then gather: twice the bytes for the root's one copy, in
// place of log2(ranks) copies one after the other.
#define LARGE_BROADCAST_BYTES ((size_t)64 << 10)
#define WINDOW 8

size_t fp8comm_dtype_size(fp8comm_dtype dtype) {
  switch (dtype) {
  case FP8COMM_E4M3:
  case FP8COMM_E5M2:
  case FP8COMM_BYTE: return 1;
  case FP8COMM_BF16:
  case FP8COMM_FP16: return 2;
  case FP8COMM_FP32: return 4;
  case FP8COMM_FP64:
  case FP8COMM_INT64: return 8;
  }
  return 0;
}

const char *fp8comm_dtype_name(fp8comm_dtype dtype) {
  switch (dtype) {
  case FP8COMM_E4M3:
  case FP8COMM_E5M2:
  case FP8COMM_BF16:
  case FP8COMM_FP16:
  case FP8COMM_FP32: return fp8core_dtype_name((fp8core_dtype)dtype);
  case FP8COMM_FP64: return "fp64";
  case FP8COMM_INT64: return "int64";
  case FP8COMM_BYTE: return "byte";
  }
  return "unknown";
}

// --- Arguments ---

// `blocks` of `count` elements each.
static fp8core_status check_count(int64_t count, int blocks, fp8comm_dtype dtype) {
  const size_t element = fp8comm_dtype_size(dtype);
  if (element == 0) return fp8comm_invalid("dtype is %d, expected 0 to %d", (int)dtype, (int)FP8COMM_BYTE);
  if (count < 0) return fp8comm_invalid("count is %lld, expected at least 0", (long long)count);
  if ((uint64_t)count > SIZE_MAX / 4 / element / (size_t)blocks)
    return fp8comm_invalid("count is %lld, expected elements that fit into memory", (long long)count);
  return FP8CORE_OK;
}

static fp8core_status check_buffer(const char *name, const void *buffer, int64_t count) {
  if (buffer || count == 0) return FP8CORE_OK;
  return fp8comm_invalid("%s is NULL, expected %lld elements", name, (long long)count);
}

static fp8core_status check_apart(const char *one_name, const void *one, size_t one_bytes, const char *other_name,
                                  const void *other, size_t other_bytes) {
  const uintptr_t a = (uintptr_t)one, b = (uintptr_t)other;
  if (one_bytes == 0 || other_bytes == 0 || a + one_bytes <= b || b + other_bytes <= a) return FP8CORE_OK;
  return fp8comm_invalid("%s and %s overlap, expected memory apart, or in place", one_name, other_name);
}

static fp8core_status check_reduction(fp8comm_reduction reduction) {
  if (reduction == FP8COMM_SUM || reduction == FP8COMM_MIN || reduction == FP8COMM_MAX) return FP8CORE_OK;
  return fp8comm_invalid("reduction is %d, expected FP8COMM_SUM, FP8COMM_MIN or FP8COMM_MAX", (int)reduction);
}

static fp8core_status check_rank(const fp8comm_communicator *communicator, const char *name, int rank) {
  if (rank >= 0 && rank < communicator->size) return FP8CORE_OK;
  return fp8comm_invalid("%s is %d, expected a rank from 0 to %d", name, rank, communicator->size - 1);
}

static fp8core_status check_common(const fp8comm_communicator *communicator, fp8comm_request **request) {
  if (!request) return fp8comm_invalid("request is NULL, expected a place for the request");
  *request = NULL;
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a communicator");
  return fp8comm_check(communicator);
}

static fp8comm_header header_of(fp8comm_operation_kind operation, fp8comm_dtype dtype, uint32_t detail, int64_t count) {
  fp8comm_header header;
  memset(&header, 0, sizeof(header));
  header.operation = operation;
  header.dtype = (uint32_t)dtype;
  header.detail = detail;
  header.count = (uint64_t)count;
  return header;
}

static fp8core_status finish(fp8core_status status, fp8comm_request **request) {
  return status == FP8CORE_OK ? fp8comm_request_wait(request) : status;
}

// A request that could not get its memory: the others would wait for it.
static fp8core_status give_up(fp8comm_request **request, fp8core_status status) {
  (*request)->status = status;
  return fp8comm_request_start(request);
}

// --- Reductions ---

fp8core_status fp8comm_all_reduce_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                        int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction,
                                        fp8comm_request **request) {
  fp8comm_reducer reducer;
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_reduction(reduction));
  FP8COMM_TRY(check_buffer("send", send, count));
  FP8COMM_TRY(check_buffer("receive", receive, count));
  const size_t element = fp8comm_dtype_size(dtype), elements = (size_t)count;
  if (send != receive)
    FP8COMM_TRY(check_apart("send", send, elements * element, "receive", receive, elements * element));
  FP8COMM_TRY(fp8comm_find_reducer(dtype, reduction, &reducer));
  const fp8comm_header header = header_of(FP8COMM_OPERATION_ALL_REDUCE, dtype, (uint32_t)reduction, count);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  fp8comm_request *made = *request;
  made->reducer = reducer;
  if (communicator->size == 1) {
    fp8comm_add_copy(made, receive, send, elements * element);
    return fp8comm_request_start(request);
  }
  if (fp8comm_all_reduce_is_small(communicator, elements, element)) {
    const fp8core_status status =
      fp8comm_request_scratch(made, fp8comm_small_all_reduce_bytes(communicator, elements, &reducer));
    if (status != FP8CORE_OK) return give_up(request, status);
    fp8comm_build_small_all_reduce(made, &made->reducer, elements, send, receive, made->scratch);
    return fp8comm_request_start(request);
  }
  const size_t size = (size_t)communicator->size;
  const fp8comm_parts parts = {elements, (elements + size - 1) / size, NULL};
  const size_t staging = fp8comm_reduce_scatter_bytes(communicator, &parts, &reducer);
  const int wide = reducer.accumulator != element;
  const fp8core_status status =
    fp8comm_request_scratch(made, (staging + 63) / 64 * 64 + (wide ? parts.part * reducer.accumulator : 0));
  if (status != FP8CORE_OK) return give_up(request, status);
  // Of formats that are added up as they are, the result's own part is the accumulator.
  unsigned char *own = (unsigned char *)receive + fp8comm_part_begin(&parts, communicator->rank) * element;
  void *sum = wide ? (unsigned char *)made->scratch + (staging + 63) / 64 * 64 : own;
  fp8comm_build_reduce_scatter(made, &made->reducer, &parts, send, sum, made->scratch);
  fp8comm_add_reduction(made, FP8COMM_STEP_LAST, &made->reducer, own, sum, 0,
                        fp8comm_part_count(&parts, communicator->rank));
  fp8comm_build_all_gather(made, &parts, element, receive);
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_all_reduce(fp8comm_communicator *communicator, const void *send, void *receive, int64_t count,
                                  fp8comm_dtype dtype, fp8comm_reduction reduction) {
  fp8comm_request *request;
  return finish(fp8comm_all_reduce_start(communicator, send, receive, count, dtype, reduction, &request), &request);
}

fp8core_status fp8comm_reduce_scatter_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                            int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction,
                                            fp8comm_request **request) {
  fp8comm_reducer reducer;
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_reduction(reduction));
  FP8COMM_TRY(check_buffer("send", send, count));
  FP8COMM_TRY(check_buffer("receive", receive, count));
  const size_t element = fp8comm_dtype_size(dtype), elements = (size_t)count;
  const size_t total = elements * (size_t)communicator->size;
  if (count > 0 && (const unsigned char *)send + elements * element * (size_t)communicator->rank != receive)
    FP8COMM_TRY(check_apart("send", send, total * element, "receive", receive, elements * element));
  FP8COMM_TRY(fp8comm_find_reducer(dtype, reduction, &reducer));
  const fp8comm_header header = header_of(FP8COMM_OPERATION_REDUCE_SCATTER, dtype, (uint32_t)reduction, count);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  fp8comm_request *made = *request;
  made->reducer = reducer;
  const fp8comm_parts parts = {total, elements, NULL};
  const size_t staging = (fp8comm_reduce_scatter_bytes(communicator, &parts, &reducer) + 63) / 64 * 64;
  const int wide = reducer.accumulator != element;
  const fp8core_status status = fp8comm_request_scratch(made, staging + (wide ? elements * reducer.accumulator : 0));
  if (status != FP8CORE_OK) return give_up(request, status);
  void *sum = wide ? (unsigned char *)made->scratch + staging : receive;
  if (count > 0) fp8comm_build_reduce_scatter(made, &made->reducer, &parts, send, sum, made->scratch);
  fp8comm_add_reduction(made, FP8COMM_STEP_LAST, &made->reducer, receive, sum, 0, elements);
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_reduce_scatter(fp8comm_communicator *communicator, const void *send, void *receive,
                                      int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction) {
  fp8comm_request *request;
  return finish(fp8comm_reduce_scatter_start(communicator, send, receive, count, dtype, reduction, &request), &request);
}

// --- Gathers ---

fp8core_status fp8comm_all_gather_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                        int64_t count, fp8comm_dtype dtype, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_buffer("send", send, count));
  FP8COMM_TRY(check_buffer("receive", receive, count));
  const size_t bytes = (size_t)count * fp8comm_dtype_size(dtype), total = bytes * (size_t)communicator->size;
  unsigned char *own = count > 0 ? (unsigned char *)receive + bytes * (size_t)communicator->rank : receive;
  if (own != send) FP8COMM_TRY(check_apart("send", send, bytes, "receive", receive, total));
  const fp8comm_header header = header_of(FP8COMM_OPERATION_ALL_GATHER, dtype, 0, count);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  const fp8comm_parts parts = {total, bytes, NULL};
  fp8comm_add_copy(*request, own, send, bytes);
  if (bytes > 0) fp8comm_build_all_gather(*request, &parts, 1, receive);
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_all_gather(fp8comm_communicator *communicator, const void *send, void *receive, int64_t count,
                                  fp8comm_dtype dtype) {
  fp8comm_request *request;
  return finish(fp8comm_all_gather_start(communicator, send, receive, count, dtype, &request), &request);
}

// FNV-1a of the counts, which are too many for a header.
static uint64_t digest_of(const int64_t *counts, int size) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (int i = 0; i < size; i++) {
    for (int shift = 0; shift < 64; shift += 8)
      hash = (hash ^ ((uint64_t)counts[i] >> shift & 0xff)) * UINT64_C(0x100000001b3);
  }
  return hash;
}

static size_t bytes_before(const int64_t *counts, int rank, size_t element) {
  size_t sum = 0;
  for (int i = 0; i < rank; i++) sum += (size_t)counts[i] * element;
  return sum;
}

static void build_all_gatherv(fp8comm_request *request, unsigned char *data, const int64_t *counts, size_t element) {
  const fp8comm_communicator *communicator = request->communicator;
  const int size = communicator->size, rank = communicator->rank;
  const size_t own = (size_t)counts[rank] * element, begin = bytes_before(counts, rank, element);
  const size_t total = bytes_before(counts, size, element);
  size_t from_begin = begin;
  for (int distance = 1; distance < size; distance++) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    const size_t theirs = (size_t)counts[from] * element;
    // Downwards from this rank's own, and round.
    from_begin = (from == size - 1 ? total : from_begin) - theirs;
    if (theirs > 0) fp8comm_add_receive(request, from, data + from_begin, theirs);
    if (own > 0) fp8comm_add_send(request, to, data + begin, own);
    if (distance % WINDOW == 0) fp8comm_add_wait(request);
  }
  fp8comm_add_wait(request);
}

fp8core_status fp8comm_all_gatherv_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                         const int64_t *counts, fp8comm_dtype dtype, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  if (!counts) return fp8comm_invalid("counts is NULL, expected %d of them", communicator->size);
  int64_t total = 0;
  for (int i = 0; i < communicator->size; i++) {
    FP8COMM_TRY(check_count(counts[i], communicator->size, dtype));
    total += counts[i];
  }
  const int rank = communicator->rank;
  FP8COMM_TRY(check_buffer("send", send, counts[rank]));
  FP8COMM_TRY(check_buffer("receive", receive, total));
  const size_t element = fp8comm_dtype_size(dtype), bytes = (size_t)counts[rank] * element;
  unsigned char *own = total > 0 ? (unsigned char *)receive + bytes_before(counts, rank, element) : receive;
  if (own != send) FP8COMM_TRY(check_apart("send", send, bytes, "receive", receive, (size_t)total * element));
  fp8comm_header header = header_of(FP8COMM_OPERATION_ALL_GATHERV, dtype, 0, total);
  header.digest = digest_of(counts, communicator->size);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  fp8comm_add_copy(*request, own, send, bytes);
  if (total > 0) build_all_gatherv(*request, receive, counts, element);
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_all_gatherv(fp8comm_communicator *communicator, const void *send, void *receive,
                                   const int64_t *counts, fp8comm_dtype dtype) {
  fp8comm_request *request;
  return finish(fp8comm_all_gatherv_start(communicator, send, receive, counts, dtype, &request), &request);
}

fp8core_status fp8comm_all_to_all_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                        int64_t count, fp8comm_dtype dtype, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_buffer("send", send, count));
  FP8COMM_TRY(check_buffer("receive", receive, count));
  const int size = communicator->size, rank = communicator->rank;
  const size_t bytes = (size_t)count * fp8comm_dtype_size(dtype), total = bytes * (size_t)size;
  FP8COMM_TRY(check_apart("send", send, total, "receive", receive, total));
  const fp8comm_header header = header_of(FP8COMM_OPERATION_ALL_TO_ALL, dtype, 0, count);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  if (bytes == 0) return fp8comm_request_start(request);
  const unsigned char *in = send;
  unsigned char *out = receive;
  fp8comm_add_copy(*request, out + bytes * (size_t)rank, in + bytes * (size_t)rank, bytes);
  for (int distance = 1; distance < size; distance++) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    fp8comm_add_receive(*request, from, out + bytes * (size_t)from, bytes);
    fp8comm_add_send(*request, to, in + bytes * (size_t)to, bytes);
    if (distance % WINDOW == 0) fp8comm_add_wait(*request);
  }
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_all_to_all(fp8comm_communicator *communicator, const void *send, void *receive, int64_t count,
                                  fp8comm_dtype dtype) {
  fp8comm_request *request;
  return finish(fp8comm_all_to_all_start(communicator, send, receive, count, dtype, &request), &request);
}

// --- Broadcast ---

// A binomial tree, in ranks relative to the root.
static void build_tree(fp8comm_request *request, void *data, size_t bytes, int root) {
  const int size = request->communicator->size;
  const int place = (request->communicator->rank - root + size) % size;
  int mask = 1;
  for (; mask < size; mask <<= 1) {
    if (!(place & mask)) continue;
    fp8comm_add_receive(request, (place - mask + root) % size, data, bytes);
    fp8comm_add_wait(request);
    break;
  }
  for (mask >>= 1; mask > 0; mask >>= 1) {
    if (place + mask < size) fp8comm_add_send(request, (place + mask + root) % size, data, bytes);
  }
}

// Scatter and all-gather: van de Geijn, "On global combine operations", 1994.
static void build_scattered(fp8comm_request *request, void *data, size_t bytes, int root) {
  const int size = request->communicator->size, rank = request->communicator->rank;
  const fp8comm_parts parts = {bytes, (bytes + (size_t)size - 1) / (size_t)size, NULL};
  unsigned char *at = data;
  if (rank == root) {
    for (int distance = 1; distance < size; distance++) {
      const int to = (rank + distance) % size;
      fp8comm_add_send(request, to, at + fp8comm_part_begin(&parts, to), fp8comm_part_count(&parts, to));
    }
  } else {
    fp8comm_add_receive(request, root, at + fp8comm_part_begin(&parts, rank), fp8comm_part_count(&parts, rank));
  }
  fp8comm_add_wait(request);
  for (int distance = 1; distance < size; distance++) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    // The root has everything, and gives its own part only.
    if (rank != root)
      fp8comm_add_receive(request, from, at + fp8comm_part_begin(&parts, from), fp8comm_part_count(&parts, from));
    if (to != root)
      fp8comm_add_send(request, to, at + fp8comm_part_begin(&parts, rank), fp8comm_part_count(&parts, rank));
    if (distance % WINDOW == 0) fp8comm_add_wait(request);
  }
}

fp8core_status fp8comm_broadcast_start(fp8comm_communicator *communicator, void *data, int64_t count,
                                       fp8comm_dtype dtype, int root, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_buffer("data", data, count));
  FP8COMM_TRY(check_rank(communicator, "root", root));
  const fp8comm_header header = header_of(FP8COMM_OPERATION_BROADCAST, dtype, (uint32_t)root, count);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  const size_t bytes = (size_t)count * fp8comm_dtype_size(dtype);
  if (communicator->size > 1 && bytes > 0) {
    if (bytes < LARGE_BROADCAST_BYTES || communicator->size < 4) {
      build_tree(*request, data, bytes, root);
    } else {
      build_scattered(*request, data, bytes, root);
    }
  }
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_broadcast(fp8comm_communicator *communicator, void *data, int64_t count, fp8comm_dtype dtype,
                                 int root) {
  fp8comm_request *request;
  return finish(fp8comm_broadcast_start(communicator, data, count, dtype, root, &request), &request);
}

// --- Barrier ---

fp8core_status fp8comm_barrier_start(fp8comm_communicator *communicator, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  const fp8comm_header header = header_of(FP8COMM_OPERATION_BARRIER, FP8COMM_BYTE, 0, 0);
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, request));
  fp8comm_build_barrier(*request);
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_barrier(fp8comm_communicator *communicator) {
  fp8comm_request *request;
  return finish(fp8comm_barrier_start(communicator, &request), &request);
}

// --- Messages ---

static fp8core_status start_message(fp8comm_communicator *communicator, const void *source, void *destination,
                                    int64_t count, fp8comm_dtype dtype, int peer, int sends,
                                    fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, 1, dtype));
  FP8COMM_TRY(check_buffer("data", sends ? source : destination, count));
  FP8COMM_TRY(check_rank(communicator, "peer", peer));
  if (peer == communicator->rank) return fp8comm_invalid("peer is %d, this rank, expected another one", peer);
  const fp8comm_header header = header_of(FP8COMM_OPERATION_SEND, dtype, 0, count);
  FP8COMM_TRY(fp8comm_request_begin_message(communicator, &header, peer, sends, request));
  const size_t bytes = (size_t)count * fp8comm_dtype_size(dtype);
  if (bytes > 0 && sends) fp8comm_add_send(*request, peer, source, bytes);
  if (bytes > 0 && !sends) fp8comm_add_receive(*request, peer, destination, bytes);
  return fp8comm_request_start(request);
}

fp8core_status fp8comm_send_start(fp8comm_communicator *communicator, const void *data, int64_t count,
                                  fp8comm_dtype dtype, int peer, fp8comm_request **request) {
  return start_message(communicator, data, NULL, count, dtype, peer, 1, request);
}

fp8core_status fp8comm_recv_start(fp8comm_communicator *communicator, void *data, int64_t count, fp8comm_dtype dtype,
                                  int peer, fp8comm_request **request) {
  return start_message(communicator, NULL, data, count, dtype, peer, 0, request);
}

fp8core_status fp8comm_send(fp8comm_communicator *communicator, const void *data, int64_t count, fp8comm_dtype dtype,
                            int peer) {
  fp8comm_request *request;
  return finish(fp8comm_send_start(communicator, data, count, dtype, peer, &request), &request);
}

fp8core_status fp8comm_recv(fp8comm_communicator *communicator, void *data, int64_t count, fp8comm_dtype dtype,
                            int peer) {
  fp8comm_request *request;
  return finish(fp8comm_recv_start(communicator, data, count, dtype, peer, &request), &request);
}
