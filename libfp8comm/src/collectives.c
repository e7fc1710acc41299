// The public collectives: arguments are checked, and turned into a request's steps.
#include "fp8comm/collectives.h"

#include <limits.h>
#include <string.h>

#include "device.h"
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

static fp8core_status finish(fp8core_status status, fp8comm_request **request) {
  return status == FP8CORE_OK ? fp8comm_request_wait(request) : status;
}

// --- What they are made of ---

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static fp8comm_parts parts_of_all(const fp8comm_communicator *communicator, size_t count) {
  const size_t size = (size_t)communicator->size;
  const fp8comm_parts parts = {count, (count + size - 1) / size, NULL};
  return parts;
}

static fp8comm_parts parts_of_each(const fp8comm_communicator *communicator, size_t count) {
  const fp8comm_parts parts = {count * (size_t)communicator->size, count, NULL};
  return parts;
}

// Staging of what is received; then, where sums are wider than elements, this rank's part of them.
static size_t reduction_scratch(const fp8comm_communicator *communicator, const fp8comm_parts *parts,
                                const fp8comm_reducer *reducer) {
  const size_t staging = rounded(fp8comm_reduce_scatter_bytes(communicator, parts, reducer));
  return staging + (reducer->accumulator != reducer->element ? parts->part * reducer->accumulator : 0);
}

size_t fp8comm_collective_scratch(const fp8comm_communicator *communicator, const fp8comm_collective *collective) {
  const fp8comm_reducer *reducer = &collective->reducer;
  fp8comm_parts parts;
  switch (collective->header.operation) {
  case FP8COMM_OPERATION_ALL_REDUCE:
    if (communicator->size == 1) return 0;
    if (fp8comm_all_reduce_is_small(communicator, collective->count, collective->element))
      return fp8comm_small_all_reduce_bytes(communicator, collective->count, reducer);
    parts = parts_of_all(communicator, collective->count);
    return reduction_scratch(communicator, &parts, reducer);
  case FP8COMM_OPERATION_REDUCE_SCATTER:
    parts = parts_of_each(communicator, collective->count);
    return reduction_scratch(communicator, &parts, reducer);
  default: return 0;
  }
}

static void *scratch_of(const fp8comm_request *request) {
  return request->memory == FP8COMM_MEMORY_HOST ? request->scratch : request->device_scratch;
}

static void build_all_reduce(fp8comm_request *request, const fp8comm_collective *collective) {
  const fp8comm_communicator *communicator = request->communicator;
  const fp8comm_reducer *reducer = &request->reducer;
  const size_t element = collective->element, count = collective->count;
  if (communicator->size == 1) {
    fp8comm_add_copy(request, collective->receive, collective->send, count * element);
    return;
  }
  if (fp8comm_all_reduce_is_small(communicator, count, element)) {
    fp8comm_build_small_all_reduce(request, reducer, count, collective->send, collective->receive, scratch_of(request));
    return;
  }
  const fp8comm_parts parts = parts_of_all(communicator, count);
  // Of formats that are added up as they are, the result's own part is the accumulator.
  unsigned char *own = (unsigned char *)collective->receive + fp8comm_part_begin(&parts, communicator->rank) * element;
  unsigned char *staging = scratch_of(request);
  void *sum = reducer->accumulator != element
                ? staging + rounded(fp8comm_reduce_scatter_bytes(communicator, &parts, reducer))
                : own;
  fp8comm_build_reduce_scatter(request, reducer, &parts, collective->send, sum, staging);
  fp8comm_add_reduction(request, FP8COMM_STEP_LAST, reducer, own, sum, 0,
                        fp8comm_part_count(&parts, communicator->rank));
  fp8comm_build_all_gather(request, &parts, element, collective->receive);
}

static void build_reduce_scatter(fp8comm_request *request, const fp8comm_collective *collective) {
  const fp8comm_communicator *communicator = request->communicator;
  const fp8comm_reducer *reducer = &request->reducer;
  if (collective->count == 0) return;
  const fp8comm_parts parts = parts_of_each(communicator, collective->count);
  unsigned char *staging = scratch_of(request);
  void *sum = reducer->accumulator != collective->element
                ? staging + rounded(fp8comm_reduce_scatter_bytes(communicator, &parts, reducer))
                : collective->receive;
  fp8comm_build_reduce_scatter(request, reducer, &parts, collective->send, sum, staging);
  fp8comm_add_reduction(request, FP8COMM_STEP_LAST, reducer, collective->receive, sum, 0, collective->count);
}

static void build_all_gather(fp8comm_request *request, const fp8comm_collective *collective) {
  const size_t bytes = collective->count * collective->element;
  if (bytes == 0) return;
  const fp8comm_parts parts = parts_of_each(request->communicator, bytes);
  unsigned char *own = (unsigned char *)collective->receive + bytes * (size_t)request->communicator->rank;
  fp8comm_add_copy(request, own, collective->send, bytes);
  fp8comm_build_all_gather(request, &parts, 1, collective->receive);
}

static size_t bytes_before(const int64_t *counts, int rank, size_t element) {
  size_t sum = 0;
  for (int i = 0; i < rank; i++) sum += (size_t)counts[i] * element;
  return sum;
}

static void build_all_gatherv(fp8comm_request *request, const fp8comm_collective *collective) {
  const int size = request->communicator->size, rank = request->communicator->rank;
  const int64_t *counts = collective->counts;
  const size_t element = collective->element, own = (size_t)counts[rank] * element;
  const size_t begin = bytes_before(counts, rank, element), total = bytes_before(counts, size, element);
  size_t from_begin = begin;
  if (total == 0) return;
  unsigned char *data = collective->receive;
  fp8comm_add_copy(request, data + begin, collective->send, own);
  for (int distance = 1; distance < size; distance++) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    const size_t theirs = (size_t)counts[from] * element;
    // Downwards from this rank's own, and round.
    from_begin = (from == size - 1 ? total : from_begin) - theirs;
    if (theirs > 0) fp8comm_add_receive(request, from, data + from_begin, theirs);
    if (own > 0) fp8comm_add_send(request, to, data + begin, own);
    if (distance % WINDOW == 0) fp8comm_add_wait(request);
  }
}

static void build_all_to_all(fp8comm_request *request, const fp8comm_collective *collective) {
  const int size = request->communicator->size, rank = request->communicator->rank;
  const size_t bytes = collective->count * collective->element;
  if (bytes == 0) return;
  const unsigned char *in = collective->send;
  unsigned char *out = collective->receive;
  fp8comm_add_copy(request, out + bytes * (size_t)rank, in + bytes * (size_t)rank, bytes);
  for (int distance = 1; distance < size; distance++) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    fp8comm_add_receive(request, from, out + bytes * (size_t)from, bytes);
    fp8comm_add_send(request, to, in + bytes * (size_t)to, bytes);
    if (distance % WINDOW == 0) fp8comm_add_wait(request);
  }
}

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
  const fp8comm_parts parts = parts_of_all(request->communicator, bytes);
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

static void build_broadcast(fp8comm_request *request, const fp8comm_collective *collective) {
  const size_t bytes = collective->count * collective->element;
  const int size = request->communicator->size;
  if (size == 1 || bytes == 0) return;
  if (bytes < LARGE_BROADCAST_BYTES || size < 4) {
    build_tree(request, collective->receive, bytes, collective->peer);
  } else {
    build_scattered(request, collective->receive, bytes, collective->peer);
  }
}

static void build_message(fp8comm_request *request, const fp8comm_collective *collective) {
  const size_t bytes = collective->count * collective->element;
  if (bytes == 0) return;
  if (collective->sends) {
    fp8comm_add_send(request, collective->peer, collective->send, bytes);
  } else {
    fp8comm_add_receive(request, collective->peer, collective->receive, bytes);
  }
}

void fp8comm_build_collective(fp8comm_request *request, const fp8comm_collective *collective) {
  switch (collective->header.operation) {
  case FP8COMM_OPERATION_ALL_REDUCE: build_all_reduce(request, collective); break;
  case FP8COMM_OPERATION_REDUCE_SCATTER: build_reduce_scatter(request, collective); break;
  case FP8COMM_OPERATION_ALL_GATHER: build_all_gather(request, collective); break;
  case FP8COMM_OPERATION_ALL_GATHERV: build_all_gatherv(request, collective); break;
  case FP8COMM_OPERATION_ALL_TO_ALL: build_all_to_all(request, collective); break;
  case FP8COMM_OPERATION_BROADCAST: build_broadcast(request, collective); break;
  case FP8COMM_OPERATION_SEND: build_message(request, collective); break;
  default: fp8comm_build_barrier(request);
  }
}

// NCCL has reductions of its own.
static fp8core_status find_reducer(const fp8comm_communicator *communicator, fp8comm_collective *collective) {
  const fp8comm_dtype dtype = (fp8comm_dtype)collective->header.dtype;
  if (!collective->header.on_device || communicator->path != FP8COMM_PATH_NCCL)
    return fp8comm_find_reducer(dtype, collective->reduction, &collective->reducer);
  if (dtype == FP8COMM_E4M3 || dtype == FP8COMM_E5M2) return fp8comm_nccl_check_fp8(communicator->shared->cuda);
  return dtype == FP8COMM_BYTE ? fp8comm_find_reducer(dtype, collective->reduction, &collective->reducer) : FP8CORE_OK;
}

// What is common to all, once the arguments are known to be good.
static fp8core_status start(fp8comm_communicator *communicator, fp8comm_collective *collective,
                            fp8comm_request **request) {
  int on_device = 0;
  fp8core_status status = FP8CORE_OK;
  if (communicator->path != FP8COMM_PATH_NONE) FP8COMM_TRY(fp8comm_device_find(communicator, collective, &on_device));
  collective->header.on_device = (uint32_t)on_device;
  const int reduces = collective->header.operation == FP8COMM_OPERATION_ALL_REDUCE ||
                      collective->header.operation == FP8COMM_OPERATION_REDUCE_SCATTER;
  if (reduces) FP8COMM_TRY(find_reducer(communicator, collective));
  if (collective->header.operation == FP8COMM_OPERATION_SEND) {
    FP8COMM_TRY(
      fp8comm_request_begin_message(communicator, &collective->header, collective->peer, collective->sends, request));
  } else {
    FP8COMM_TRY(fp8comm_request_begin(communicator, &collective->header, request));
  }
  (*request)->reducer = collective->reducer;
  if (on_device) {
    status = fp8comm_device_build(*request, collective);
  } else {
    status = fp8comm_request_scratch(*request, fp8comm_collective_scratch(communicator, collective));
    if (status == FP8CORE_OK) fp8comm_build_collective(*request, collective);
  }
  // A request that could not be made: the others would wait for it.
  if (status != FP8CORE_OK) (*request)->status = status;
  return fp8comm_request_start(request);
}

static fp8comm_collective collective_of(fp8comm_operation_kind operation, const void *send, void *receive,
                                        int64_t count, fp8comm_dtype dtype, uint32_t detail) {
  fp8comm_collective made;
  memset(&made, 0, sizeof(made));
  made.header.operation = operation;
  made.header.dtype = (uint32_t)dtype;
  made.header.detail = detail;
  made.header.count = (uint64_t)count;
  made.send = send;
  made.receive = receive;
  made.element = fp8comm_dtype_size(dtype);
  made.count = (size_t)count;
  return made;
}

// --- Reductions ---

fp8core_status fp8comm_all_reduce_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                        int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction,
                                        fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_reduction(reduction));
  FP8COMM_TRY(check_buffer("send", send, count));
  FP8COMM_TRY(check_buffer("receive", receive, count));
  fp8comm_collective collective =
    collective_of(FP8COMM_OPERATION_ALL_REDUCE, send, receive, count, dtype, (uint32_t)reduction);
  const size_t bytes = collective.count * collective.element;
  if (send != receive) FP8COMM_TRY(check_apart("send", send, bytes, "receive", receive, bytes));
  collective.reduction = reduction;
  return start(communicator, &collective, request);
}

fp8core_status fp8comm_all_reduce(fp8comm_communicator *communicator, const void *send, void *receive, int64_t count,
                                  fp8comm_dtype dtype, fp8comm_reduction reduction) {
  fp8comm_request *request;
  return finish(fp8comm_all_reduce_start(communicator, send, receive, count, dtype, reduction, &request), &request);
}

fp8core_status fp8comm_reduce_scatter_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                            int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction,
                                            fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_reduction(reduction));
  FP8COMM_TRY(check_buffer("send", send, count));
  FP8COMM_TRY(check_buffer("receive", receive, count));
  fp8comm_collective collective =
    collective_of(FP8COMM_OPERATION_REDUCE_SCATTER, send, receive, count, dtype, (uint32_t)reduction);
  const size_t bytes = collective.count * collective.element;
  if (count > 0 && (const unsigned char *)send + bytes * (size_t)communicator->rank != receive)
    FP8COMM_TRY(check_apart("send", send, bytes * (size_t)communicator->size, "receive", receive, bytes));
  collective.reduction = reduction;
  return start(communicator, &collective, request);
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
  fp8comm_collective collective = collective_of(FP8COMM_OPERATION_ALL_GATHER, send, receive, count, dtype, 0);
  const size_t bytes = collective.count * collective.element;
  const unsigned char *own = count > 0 ? (unsigned char *)receive + bytes * (size_t)communicator->rank : receive;
  if (own != send)
    FP8COMM_TRY(check_apart("send", send, bytes, "receive", receive, bytes * (size_t)communicator->size));
  return start(communicator, &collective, request);
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
  fp8comm_collective collective = collective_of(FP8COMM_OPERATION_ALL_GATHERV, send, receive, total, dtype, 0);
  const size_t element = collective.element, bytes = (size_t)counts[rank] * element;
  const unsigned char *own = total > 0 ? (unsigned char *)receive + bytes_before(counts, rank, element) : receive;
  if (own != send) FP8COMM_TRY(check_apart("send", send, bytes, "receive", receive, (size_t)total * element));
  collective.header.digest = digest_of(counts, communicator->size);
  collective.counts = counts;
  return start(communicator, &collective, request);
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
  fp8comm_collective collective = collective_of(FP8COMM_OPERATION_ALL_TO_ALL, send, receive, count, dtype, 0);
  const size_t total = collective.count * collective.element * (size_t)communicator->size;
  FP8COMM_TRY(check_apart("send", send, total, "receive", receive, total));
  return start(communicator, &collective, request);
}

fp8core_status fp8comm_all_to_all(fp8comm_communicator *communicator, const void *send, void *receive, int64_t count,
                                  fp8comm_dtype dtype) {
  fp8comm_request *request;
  return finish(fp8comm_all_to_all_start(communicator, send, receive, count, dtype, &request), &request);
}

// --- Broadcast ---

fp8core_status fp8comm_broadcast_start(fp8comm_communicator *communicator, void *data, int64_t count,
                                       fp8comm_dtype dtype, int root, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  FP8COMM_TRY(check_count(count, communicator->size, dtype));
  FP8COMM_TRY(check_buffer("data", data, count));
  FP8COMM_TRY(check_rank(communicator, "root", root));
  fp8comm_collective collective = collective_of(FP8COMM_OPERATION_BROADCAST, data, data, count, dtype, (uint32_t)root);
  collective.peer = root;
  return start(communicator, &collective, request);
}

fp8core_status fp8comm_broadcast(fp8comm_communicator *communicator, void *data, int64_t count, fp8comm_dtype dtype,
                                 int root) {
  fp8comm_request *request;
  return finish(fp8comm_broadcast_start(communicator, data, count, dtype, root, &request), &request);
}

// --- Barrier ---

fp8core_status fp8comm_barrier_start(fp8comm_communicator *communicator, fp8comm_request **request) {
  FP8COMM_TRY(check_common(communicator, request));
  fp8comm_collective collective = collective_of(FP8COMM_OPERATION_BARRIER, NULL, NULL, 0, FP8COMM_BYTE, 0);
  return start(communicator, &collective, request);
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
  fp8comm_collective collective = collective_of(FP8COMM_OPERATION_SEND, source, destination, count, dtype, 0);
  collective.peer = peer;
  collective.sends = sends;
  return start(communicator, &collective, request);
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
