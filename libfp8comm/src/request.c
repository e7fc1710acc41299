// Requests: schedules carried out step by step, what ranks must agree on, and how calls end that get no further.
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "device.h"
#include "internal.h"

#define HEADER_MAGIC UINT32_C(0x50384643)
#define CONTROL_ABORT UINT32_C(1)
#define CONTROL_QUESTION UINT32_C(2)
#define CONTROL_ANSWER UINT32_C(3)
// Rounds in which nothing moved after which a waiting thread lets others run, and seconds after which it sleeps, where
// the transport can: waking up costs more than a piece of a bucket takes to come.
#define SPINS 64
#define YIELD_SECONDS 0.0002
#define WAIT_MILLISECONDS 5
// How long a rank whose peer is gone listens for the reason, before it tells the others its own.
#define REASON_SECONDS 0.5
#define HUGE_PAGE ((size_t)2 << 20)

double fp8comm_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void *fp8comm_allocate(size_t bytes) {
  const size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
  if (bytes > SIZE_MAX / 2) return NULL;
  void *memory = aligned_alloc(alignment, bytes ? (bytes + alignment - 1) / alignment * alignment : alignment);
#if defined(MADV_HUGEPAGE)
  // A first touch of 4 KiB pages costs more than sending them.
  if (memory && bytes >= HUGE_PAGE) (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

static fp8core_status no_memory(size_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
}

// "rank 2", with its number among all where that is another.
static const char *rank_name(const fp8comm_communicator *communicator, int rank, char text[64]) {
  const int all = fp8comm_endpoint_rank(communicator, rank);
  if (all == rank) {
    (void)snprintf(text, 64, "rank %d", rank);
  } else {
    (void)snprintf(text, 64, "rank %d (%d before the split)", rank, all);
  }
  return text;
}

// --- Headers ---

static const char *operation_name(uint32_t operation) {
  static const char *const names[] = {
    "",        "all_reduce", "reduce_scatter", "all_gather",      "all_gatherv",         "all_to_all", "broadcast",
    "barrier", "split",      "send",           "gradient_create", "gradient_all_reduce", "use_device"};
  return operation >= 1 && operation < sizeof(names) / sizeof(*names) ? names[operation] : "an unknown operation";
}

static const char *reduction_name(uint32_t reduction) {
  return reduction == FP8COMM_SUM ? "sum" : reduction == FP8COMM_MIN ? "min" : reduction == FP8COMM_MAX ? "max" : "?";
}

static void describe(const fp8comm_header *header, char text[160]) {
  char name[64];
  (void)snprintf(name, sizeof(name), "%s%s", operation_name(header->operation),
                 header->on_device ? " on device memory" : "");
  const unsigned long long count = header->count;
  const char *dtype = fp8comm_dtype_name((fp8comm_dtype)header->dtype);
  switch (header->operation) {
  case FP8COMM_OPERATION_ALL_REDUCE:
  case FP8COMM_OPERATION_REDUCE_SCATTER:
    (void)snprintf(text, 160, "%s (%s) of %llu %s", name, reduction_name(header->detail), count, dtype);
    break;
  case FP8COMM_OPERATION_BROADCAST:
    (void)snprintf(text, 160, "%s from root %u of %llu %s", name, header->detail, count, dtype);
    break;
  case FP8COMM_OPERATION_ALL_GATHERV:
    (void)snprintf(text, 160, "%s of %llu %s in all, counts with digest %08x", name, count, dtype,
                   (unsigned)header->digest);
    break;
  case FP8COMM_OPERATION_BARRIER:
  case FP8COMM_OPERATION_SPLIT:
  case FP8COMM_OPERATION_USE_DEVICE: (void)snprintf(text, 160, "%s", name); break;
  case FP8COMM_OPERATION_GRADIENT_CREATE:
    (void)snprintf(text, 160, "%s of %llu tensors, sizes and options with digest %08x", name, count,
                   (unsigned)header->digest);
    break;
  case FP8COMM_OPERATION_GRADIENT:
    (void)snprintf(text, 160, "%s of bucket %u, %llu elements, of the reducer and state with digest %08x", name,
                   header->detail, count, (unsigned)header->digest);
    break;
  default: (void)snprintf(text, 160, "%s of %llu %s", name, count, dtype);
  }
}

// FNV-1a, folded to 16 bits that are not 0.
static uint64_t header_hash(const fp8comm_header *header) {
  const unsigned char *bytes = (const unsigned char *)header;
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < sizeof(*header); i++) hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
  hash ^= hash >> 32;
  hash = (hash ^ hash >> 16) & 0xffff;
  return hash ? hash : 1;
}

static fp8core_status compare_headers(const fp8comm_request *request) {
  const fp8comm_header *own = &request->header, *other = &request->peer_header;
  if (memcmp(own, other, sizeof(*own)) == 0) return FP8CORE_OK;
  char name[64], own_name[64], theirs[160], ours[160];
  (void)rank_name(request->communicator, request->header_from, name);
  if (other->magic != HEADER_MAGIC)
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "%s sent a malformed header", name);
  describe(other, theirs);
  describe(own, ours);
  return fp8comm_invalid("ranks do not agree: %s calls %s, but %s expects %s", name, theirs,
                         rank_name(request->communicator, request->communicator->rank, own_name), ours);
}

// --- Failures ---

fp8core_status fp8comm_check(const fp8comm_communicator *communicator) {
  const fp8comm_shared *shared = communicator->shared;
  if (shared->failure == FP8CORE_OK) return FP8CORE_OK;
  return fp8core_set_last_error(shared->failure, "%s", shared->failure_text);
}

static void cancel(fp8comm_shared *shared, fp8comm_pending *pending) {
  if (pending->operation) shared->endpoint->transport->cancel(shared->endpoint, &pending->operation);
}

// Ends what the request has in flight.
static void end_request(fp8comm_request *request) {
  fp8comm_shared *shared = request->communicator->shared;
  const int previous = fp8comm_device_make_current(shared);
  for (size_t i = 0; i < request->pending_count; i++) cancel(shared, &request->pending[i]);
  request->pending_count = 0;
  cancel(shared, &request->header_send);
  cancel(shared, &request->header_receive);
  fp8comm_device_cancel(request);
  fp8comm_device_restore(shared, previous);
  fp8comm_request **link = &shared->active;
  while (*link && *link != request) link = &(*link)->next;
  if (*link) *link = request->next;
  request->next = NULL;
  request->active = 0;
}

static void end_all(fp8comm_shared *shared) {
  while (shared->active) {
    fp8comm_request *request = shared->active;
    end_request(request);
    request->done = 1;
    request->status = shared->failure;
  }
}

static void tell_all(fp8comm_shared *shared, const fp8comm_control *message) {
  for (int peer = 0; peer < shared->size; peer++) {
    if (peer != shared->rank) shared->endpoint->transport->send_control(shared->endpoint, peer, message);
  }
}

// Whether some request waits for the device, whose end wakes nobody.
static int awaits_device(const fp8comm_shared *shared) {
  if (!shared->cuda) return 0;
  for (const fp8comm_request *request = shared->active; request; request = request->next) {
    const fp8comm_step_kind kind =
      request->position < request->step_count ? request->steps[request->position].kind : FP8COMM_STEP_WAIT;
    if (kind == FP8COMM_STEP_DEVICE_WAIT || kind == FP8COMM_STEP_NCCL) return 1;
    if (request->moves_device_memory && request->pending_count > 0) return 1;
  }
  return 0;
}

static void rest(const fp8comm_shared *shared) {
  fp8comm_endpoint *endpoint = shared->endpoint;
  if (endpoint->transport->wait && !awaits_device(shared)) {
    endpoint->transport->wait(endpoint, WAIT_MILLISECONDS);
  } else {
    (void)sched_yield();
  }
}

static void await_reason(fp8comm_shared *shared) {
  const double start = fp8comm_now();
  while (shared->failure == FP8CORE_OK && fp8comm_now() - start < REASON_SECONDS) {
    if (shared->endpoint->transport->progress(shared->endpoint) != FP8CORE_OK) return;
    if (shared->failure == FP8CORE_OK) rest(shared);
  }
}

fp8core_status fp8comm_break(fp8comm_shared *shared, fp8core_status status) {
  const int first = shared->failure == FP8CORE_OK;
  if (first) {
    shared->failure = status;
    (void)snprintf(shared->failure_text, sizeof(shared->failure_text), "%s", fp8core_last_error());
  }
  const int previous = fp8comm_device_make_current(shared);
  if (first) {
    fp8comm_control message;
    memset(&message, 0, sizeof(message));
    message.kind = CONTROL_ABORT;
    message.status = status;
    message.rank = shared->rank;
    (void)snprintf(message.text, sizeof(message.text), "%.*s", (int)sizeof(message.text) - 1, shared->failure_text);
    tell_all(shared, &message);
  }
  end_all(shared);
  fp8comm_device_restore(shared, previous);
  return fp8core_set_last_error(shared->failure, "%s", shared->failure_text);
}

// The same for what a call has met. A peer that is gone may have left because of what another one tells everybody just
// now.
static fp8core_status fail(fp8comm_shared *shared, fp8core_status status) {
  char text[FP8COMM_MESSAGE_BYTES];
  (void)snprintf(text, sizeof(text), "%s", fp8core_last_error());
  if (status == FP8CORE_ERROR_PEER) await_reason(shared);
  (void)fp8core_set_last_error(status, "%s", text);
  return fp8comm_break(shared, status);
}

void fp8comm_on_control(void *data, int peer, const fp8comm_control *message) {
  fp8comm_shared *shared = data;
  if (message->kind == CONTROL_QUESTION) {
    fp8comm_control answer;
    memset(&answer, 0, sizeof(answer));
    answer.kind = CONTROL_ANSWER;
    answer.rank = shared->rank;
    // A broken rank takes part in nothing any more, and says so instead.
    if (shared->failure != FP8CORE_OK) {
      answer.kind = CONTROL_ABORT;
      answer.status = shared->failure;
      (void)snprintf(answer.text, sizeof(answer.text), "%.*s", (int)sizeof(answer.text) - 1, shared->failure_text);
    }
    shared->endpoint->transport->send_control(shared->endpoint, peer, &answer);
  } else if (message->kind == CONTROL_ANSWER) {
    shared->answered[peer] = fp8comm_now();
  } else if (message->kind == CONTROL_ABORT && shared->failure == FP8CORE_OK) {
    // The requests end when progress() has returned: transports need not bear a cancel within it.
    const int known = message->status <= FP8CORE_ERROR_INVALID_ARGUMENT && message->status >= FP8CORE_ERROR_INTERRUPTED;
    shared->failure = known ? (fp8core_status)message->status : FP8CORE_ERROR_PEER;
    (void)snprintf(shared->failure_text, sizeof(shared->failure_text), "rank %d ended the communication: %.*s", peer,
                   (int)sizeof(message->text) - 1, message->text);
  }
}

// --- Making ---

static fp8core_status take_request(fp8comm_communicator *communicator, const fp8comm_header *header,
                                   fp8comm_request **request) {
  *request = NULL;
  FP8COMM_TRY(fp8comm_check(communicator));
  fp8comm_request *taken = communicator->idle;
  if (taken) {
    communicator->idle = taken->next;
  } else {
    taken = calloc(1, sizeof(*taken));
    if (!taken) return no_memory(sizeof(*taken));
    taken->communicator = communicator;
  }
  taken->next = NULL;
  taken->header = *header;
  taken->header.magic = HEADER_MAGIC;
  taken->header_to = -1;
  taken->header_from = -1;
  taken->memory = FP8COMM_MEMORY_HOST;
  taken->moves_device_memory = 0;
  taken->step_count = 0;
  taken->message_count = 0;
  taken->posted = 0;
  taken->position = 0;
  taken->pending_count = 0;
  taken->nccl_state = FP8COMM_NCCL_NONE;
  taken->nccl_steps = 0;
  taken->nccl_begun = NULL;
  taken->looked = 0;
  taken->gone_since = 0;
  taken->copying = 0;
  taken->status = FP8CORE_OK;
  taken->active = 0;
  taken->done = 0;
  taken->stalled_since = 0;
  taken->asked = 0;
  *request = taken;
  return FP8CORE_OK;
}

fp8core_status fp8comm_request_begin(fp8comm_communicator *communicator, const fp8comm_header *header,
                                     fp8comm_request **request) {
  FP8COMM_TRY(take_request(communicator, header, request));
  const int size = communicator->size;
  (*request)->tag = (uint64_t)communicator->id << 32 | (uint64_t)(communicator->sequence & 0xffff) << 16;
  communicator->sequence++;
  if (size > 1) {
    (*request)->header_to = (communicator->rank + 1) % size;
    (*request)->header_from = (communicator->rank + size - 1) % size;
  }
  return FP8CORE_OK;
}

fp8core_status fp8comm_request_begin_message(fp8comm_communicator *communicator, const fp8comm_header *header, int peer,
                                             int sends, fp8comm_request **request) {
  const size_t bytes = (size_t)communicator->size * sizeof(uint32_t);
  uint32_t **sequences = sends ? &communicator->sent : &communicator->received;
  if (!*sequences) *sequences = calloc((size_t)communicator->size, sizeof(uint32_t));
  if (!*sequences) return no_memory(bytes);
  FP8COMM_TRY(take_request(communicator, header, request));
  (*request)->tag = (uint64_t)(communicator->id + 1) << 32 | (uint64_t)((*sequences)[peer]++ & 0xffff) << 16;
  *(sends ? &(*request)->header_to : &(*request)->header_from) = peer;
  return FP8CORE_OK;
}

fp8core_status fp8comm_request_scratch(fp8comm_request *request, size_t bytes) {
  if (bytes <= request->scratch_bytes) return FP8CORE_OK;
  free(request->scratch);
  request->scratch = fp8comm_allocate(bytes);
  request->scratch_bytes = request->scratch ? bytes : 0;
  return request->scratch ? FP8CORE_OK : no_memory(bytes);
}

static fp8comm_step *new_step(fp8comm_request *request, fp8comm_step_kind kind) {
  if (request->step_count == request->step_capacity) {
    const size_t capacity = request->step_capacity ? 2 * request->step_capacity : 32;
    fp8comm_step *steps = realloc(request->steps, capacity * sizeof(*steps));
    if (!steps) {
      request->status = no_memory(capacity * sizeof(*steps));
      return NULL;
    }
    request->steps = steps;
    request->step_capacity = capacity;
  }
  fp8comm_step *step = &request->steps[request->step_count++];
  memset(step, 0, sizeof(*step));
  step->kind = kind;
  return step;
}

static void add_message(fp8comm_request *request, fp8comm_step *step) {
  step->memory = request->memory;
  if (step->memory != FP8COMM_MEMORY_HOST) request->moves_device_memory = 1;
  request->message_count++;
}

void fp8comm_add_send(fp8comm_request *request, int peer, const void *data, size_t bytes) {
  fp8comm_step *step = new_step(request, FP8COMM_STEP_SEND);
  if (!step) return;
  step->peer = peer;
  step->source = data;
  step->count = bytes;
  add_message(request, step);
}

void fp8comm_add_receive(fp8comm_request *request, int peer, void *data, size_t bytes) {
  fp8comm_step *step = new_step(request, FP8COMM_STEP_RECEIVE);
  if (!step) return;
  step->peer = peer;
  step->destination = data;
  step->count = bytes;
  add_message(request, step);
}

void fp8comm_add_notice(fp8comm_request *request, int peer, size_t bytes) {
  fp8comm_step *step = new_step(request, FP8COMM_STEP_SEND);
  if (!step) return;
  step->peer = peer;
  step->offset = bytes;
  request->message_count++;
}

void fp8comm_add_wait_for(fp8comm_request *request, size_t messages) {
  fp8comm_step *step = new_step(request, FP8COMM_STEP_WAIT);
  if (step) step->count = messages;
}

void fp8comm_add_wait(fp8comm_request *request) { fp8comm_add_wait_for(request, request->message_count); }

void fp8comm_add_step(fp8comm_request *request, fp8comm_step_kind kind, size_t offset) {
  fp8comm_step *step = new_step(request, kind);
  if (step) step->offset = offset;
}

void fp8comm_add_device_copy(fp8comm_request *request, void *destination, const void *source, size_t bytes) {
  fp8comm_step *step = bytes > 0 && destination != source ? new_step(request, FP8COMM_STEP_DEVICE_COPY) : NULL;
  if (!step) return;
  step->destination = destination;
  step->source = source;
  step->count = bytes;
}

// What follows may send what the stream was given to write, or receive where it still reads.
static void add_device_wait(fp8comm_request *request) {
  if (request->memory == FP8COMM_MEMORY_HOST) return;
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, 0);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, 0);
}

void fp8comm_add_copy(fp8comm_request *request, void *destination, const void *source, size_t bytes) {
  if (request->memory != FP8COMM_MEMORY_HOST && bytes > 0 && destination != source) {
    fp8comm_add_device_copy(request, destination, source, bytes);
    add_device_wait(request);
    return;
  }
  fp8comm_step *step = bytes > 0 && destination != source ? new_step(request, FP8COMM_STEP_COPY) : NULL;
  if (!step) return;
  step->destination = destination;
  step->source = source;
  step->count = bytes;
}

void fp8comm_add_call(fp8comm_request *request, fp8comm_call call, void *data) {
  fp8comm_step *step = new_step(request, FP8COMM_STEP_CALL);
  if (!step) return;
  step->call = call;
  step->data = data;
}

void fp8comm_add_reduction(fp8comm_request *request, fp8comm_step_kind kind, const fp8comm_reducer *reducer,
                           void *destination, const void *source, size_t offset, size_t count) {
  fp8comm_step *step = count > 0 ? new_step(request, kind) : NULL;
  if (!step) return;
  step->reducer = reducer;
  step->destination = destination;
  step->source = source;
  step->offset = offset;
  step->count = count;
  add_device_wait(request);
}

// --- Carrying out ---

static fp8core_status post(fp8comm_request *request, int peer, int sends, uint64_t tag, const void *source,
                           void *destination, size_t bytes, fp8comm_memory memory, fp8comm_pending *pending) {
  fp8comm_endpoint *endpoint = request->communicator->shared->endpoint;
  const fp8comm_transport *transport = endpoint->transport;
  const int other = fp8comm_endpoint_rank(request->communicator, peer);
  pending->operation = NULL;
  pending->peer = peer;
  return sends ? transport->send(endpoint, other, tag, source, bytes, memory, &pending->operation)
               : transport->receive(endpoint, other, tag, destination, bytes, memory, &pending->operation);
}

static fp8core_status post_step(fp8comm_request *request, const fp8comm_step *step) {
  if (request->pending_count == request->pending_capacity) {
    const size_t capacity = request->pending_capacity ? 2 * request->pending_capacity : 16;
    fp8comm_pending *pending = realloc(request->pending, capacity * sizeof(*pending));
    if (!pending) return no_memory(capacity * sizeof(*pending));
    request->pending = pending;
    request->pending_capacity = capacity;
  }
  fp8comm_pending *pending = &request->pending[request->pending_count];
  pending->index = request->posted++;
  if (step->kind == FP8COMM_STEP_SEND) {
    request->communicator->shared->bytes_in_place += step->offset;
    // What the peer may read in place from now on is written, also by stores past the caches; what it may write is
    // read.
    atomic_thread_fence(memory_order_seq_cst);
  }
  FP8COMM_TRY(post(request, step->peer, step->kind == FP8COMM_STEP_SEND, request->data_tag, step->source,
                   step->destination, step->count, step->memory, pending));
  if (pending->operation) request->pending_count++;
  return FP8CORE_OK;
}

static fp8core_status test(const fp8comm_request *request, fp8comm_pending *pending, int *moved) {
  fp8comm_endpoint *endpoint = request->communicator->shared->endpoint;
  int done = 0;
  FP8COMM_TRY(endpoint->transport->test(endpoint, &pending->operation, &done));
  if (done) *moved = 1;
  return FP8CORE_OK;
}

static fp8core_status test_pending(fp8comm_request *request, int *moved) {
  size_t kept = 0;
  for (size_t i = 0; i < request->pending_count; i++) {
    const fp8core_status status = test(request, &request->pending[i], moved);
    if (status != FP8CORE_OK) {
      // Keep what has not been tested for the cancellation; this one is freed already.
      for (i++; i < request->pending_count; i++) request->pending[kept++] = request->pending[i];
      request->pending_count = kept;
      return status;
    }
    if (request->pending[i].operation) request->pending[kept++] = request->pending[i];
  }
  request->pending_count = kept;
  return FP8CORE_OK;
}

// *done 0: to be tried again.
static fp8core_status run_step(fp8comm_request *request, const fp8comm_step *step, int *done) {
  const fp8comm_reducer *reducer = step->reducer;
  *done = 1;
  switch (step->kind) {
  case FP8COMM_STEP_SEND:
  case FP8COMM_STEP_RECEIVE: return post_step(request, step);
  case FP8COMM_STEP_COPY: memcpy(step->destination, step->source, step->count); return FP8CORE_OK;
  case FP8COMM_STEP_FIRST:
    return reducer->first(reducer->data, step->destination, step->source, step->offset, step->count);
  case FP8COMM_STEP_ADD: return reducer->add(reducer->data, step->destination, step->source, step->offset, step->count);
  case FP8COMM_STEP_LAST:
    return reducer->last(reducer->data, step->destination, step->source, step->offset, step->count);
  case FP8COMM_STEP_CALL:
    FP8COMM_TRY(step->call(step->data));
    // What a call adds may not have found room.
    return request->status;
  case FP8COMM_STEP_WAIT: *done = request->pending_count == 0 || request->pending[0].index >= step->count; break;
  case FP8COMM_STEP_DEVICE_COPY:
  case FP8COMM_STEP_DEVICE_MARK:
  case FP8COMM_STEP_DEVICE_WAIT:
  case FP8COMM_STEP_NCCL: return fp8comm_device_step(request, step, done);
  }
  return FP8CORE_OK;
}

static fp8core_status test_header(fp8comm_request *request, int *moved) {
  if (request->header_send.operation) FP8COMM_TRY(test(request, &request->header_send, moved));
  if (request->header_receive.operation) {
    FP8COMM_TRY(test(request, &request->header_receive, moved));
    if (!request->header_receive.operation) return compare_headers(request);
  }
  return FP8CORE_OK;
}

// Goes on until something has to be waited for.
static fp8core_status advance(fp8comm_request *request, int *moved) {
  FP8COMM_TRY(test_header(request, moved));
  FP8COMM_TRY(test_pending(request, moved));
  while (request->position < request->step_count) {
    int done = 0;
    FP8COMM_TRY(run_step(request, &request->steps[request->position], &done));
    if (!done) return FP8CORE_OK;
    request->position++;
    *moved = 1;
  }
  if (request->pending_count == 0 && !request->header_send.operation && !request->header_receive.operation) {
    // The last step has waited for them.
    request->copying = 0;
    end_request(request);
    request->done = 1;
  }
  return FP8CORE_OK;
}

// Everything in flight, once. Where another rank has ended the communication, what had arrived before still counts: a
// call that needs nothing more succeeds.
static fp8core_status progress(fp8comm_shared *shared) {
  fp8comm_endpoint *endpoint = shared->endpoint;
  fp8core_status status = endpoint->transport->progress(endpoint);
  if (status == FP8CORE_OK && shared->cuda && shared->failure == FP8CORE_OK) status = fp8comm_device_progress(shared);
  if (status != FP8CORE_OK && shared->failure == FP8CORE_OK) return fail(shared, status);
  for (fp8comm_request *request = shared->active, *next; request; request = next) {
    int moved = 0;
    next = request->next;
    const fp8core_status advanced = advance(request, &moved);
    if (advanced != FP8CORE_OK && shared->failure == FP8CORE_OK) return fail(shared, advanced);
    if (moved) {
      request->stalled_since = 0;
      request->asked = 0;
    }
  }
  if (shared->failure == FP8CORE_OK) return FP8CORE_OK;
  end_all(shared);
  return fp8core_set_last_error(shared->failure, "%s", shared->failure_text);
}

void fp8comm_request_discard(fp8comm_request **request) {
  fp8comm_request *gone = *request;
  if (!gone) return;
  if (gone->active) end_request(gone);
  gone->next = gone->communicator->idle;
  gone->communicator->idle = gone;
  *request = NULL;
}

static fp8core_status start(fp8comm_request **started) {
  fp8comm_request *request = *started;
  fp8comm_shared *shared = request->communicator->shared;
  // A rank that could not even make its schedule leaves the others in theirs.
  if (request->status != FP8CORE_OK) {
    const fp8core_status status = fail(shared, request->status);
    fp8comm_request_discard(started);
    return status;
  }
  request->header_send.operation = NULL;
  request->header_receive.operation = NULL;
  request->data_tag = request->tag | header_hash(&request->header);
  request->active = 1;
  fp8comm_request **link = &shared->active;
  while (*link) link = &(*link)->next;
  *link = request;
  fp8core_status status = FP8CORE_OK;
  int moved = 0;
  if (request->header_from >= 0)
    status = post(request, request->header_from, 0, request->tag, NULL, &request->peer_header,
                  sizeof(request->peer_header), FP8COMM_MEMORY_HOST, &request->header_receive);
  if (status == FP8CORE_OK && request->header_from >= 0 && !request->header_receive.operation)
    status = compare_headers(request);
  if (status == FP8CORE_OK && request->header_to >= 0)
    status = post(request, request->header_to, 1, request->tag, &request->header, NULL, sizeof(request->header),
                  FP8COMM_MEMORY_HOST, &request->header_send);
  if (status == FP8CORE_OK) status = advance(request, &moved);
  if (status == FP8CORE_OK) return FP8CORE_OK;
  status = fail(shared, status);
  fp8comm_request_discard(started);
  return status;
}

fp8core_status fp8comm_request_start(fp8comm_request **started) {
  fp8comm_shared *shared = (*started)->communicator->shared;
  const int previous = fp8comm_device_make_current(shared);
  const fp8core_status status = start(started);
  fp8comm_device_restore(shared, previous);
  return status;
}

// --- Waiting ---

static size_t append(char *text, size_t used, size_t room, const char *what) {
  const int length = snprintf(text + used, room - used, "%s", what);
  return length < 0 ? used : used + (size_t)length < room ? used + (size_t)length : room - 1;
}

// From or to which rank of the communicator the request's first message in flight is; -1: none is.
static int awaited_peer(const fp8comm_request *request) {
  return request->pending_count > 0          ? request->pending[0].peer
         : request->header_receive.operation ? request->header_receive.peer
         : request->header_send.operation    ? request->header_send.peer
                                             : -1;
}

// The first of those that do not answer, or, where all do, that something is awaited from.
static void name_missing(const fp8comm_request *request, char *text, size_t room) {
  const fp8comm_communicator *communicator = request->communicator;
  const double *answered = communicator->shared->answered;
  size_t used = 0;
  int named = 0;
  char name[64];
  text[0] = 0;
  for (int rank = 0; rank < communicator->size; rank++) {
    if (rank == communicator->rank || answered[fp8comm_endpoint_rank(communicator, rank)] >= request->asked) continue;
    if (named < 4) {
      if (named > 0) used = append(text, used, room, ", ");
      used = append(text, used, room, rank_name(communicator, rank, name));
    }
    named++;
  }
  if (named > 4) {
    char more[32];
    (void)snprintf(more, sizeof(more), " and %d more", named - 4);
    used = append(text, used, room, more);
  }
  if (named > 0) {
    (void)append(text, used, room, named > 1 ? " do not answer" : " does not answer");
    return;
  }
  const int awaited = awaited_peer(request);
  if (awaited < 0)
    (void)snprintf(text, room, "every rank answers, but the device has not done its part");
  else
    (void)snprintf(text, room, "%s answers, but has not taken part", rank_name(communicator, awaited, name));
}

static fp8core_status interrupted(fp8comm_request *request, double stalled) {
  const fp8comm_communicator *communicator = request->communicator;
  char what[160], own[64], whom[64] = "the device";
  const int awaited = awaited_peer(request);
  if (awaited >= 0) (void)rank_name(communicator, awaited, whom);
  describe(&request->header, what);
  return fail(communicator->shared,
              fp8core_set_last_error(FP8CORE_ERROR_INTERRUPTED,
                                     "%s was interrupted as it waited for %s, for %.1f s so far (%s)",
                                     rank_name(communicator, communicator->rank, own), whom, stalled, what));
}

// Whether the request has waited too long. Asks who is there some time before, so that the answers are there by then.
static fp8core_status check_time(fp8comm_request *request) {
  fp8comm_communicator *communicator = request->communicator;
  fp8comm_shared *shared = communicator->shared;
  const double now = fp8comm_now();
  const double timeout = communicator->timeout_seconds;
  const double grace = fp8comm_grace(timeout);
  if (request->stalled_since == 0) request->stalled_since = now;
  const double stalled = now - request->stalled_since;
  // Not before the moment is over in which most calls get what they wait for.
  if (shared->interrupt && stalled >= YIELD_SECONDS && shared->interrupt(shared->interrupt_data, stalled))
    return interrupted(request, stalled);
  if (stalled < timeout - grace) return FP8CORE_OK;
  if (request->asked == 0) {
    fp8comm_control question;
    memset(&question, 0, sizeof(question));
    question.kind = CONTROL_QUESTION;
    question.rank = shared->rank;
    for (int rank = 0; rank < communicator->size; rank++) {
      if (rank != communicator->rank)
        shared->endpoint->transport->send_control(shared->endpoint, fp8comm_endpoint_rank(communicator, rank),
                                                  &question);
    }
    request->asked = now;
    // The time of the answers counts from here, also where this call came late.
    request->stalled_since = now - (timeout - grace);
    return FP8CORE_OK;
  }
  if (stalled < timeout) return FP8CORE_OK;
  char what[160], missing[300];
  describe(&request->header, what);
  name_missing(request, missing, sizeof(missing));
  const fp8core_status status =
    fp8core_set_last_error(FP8CORE_ERROR_TIMEOUT, "no progress for %g s: %s (%s)", timeout, missing, what);
  return fail(shared, status);
}

// Returns the ended request's status, with its message.
static fp8core_status finish(fp8comm_request **request) {
  const fp8core_status status = (*request)->status;
  if (status != FP8CORE_OK) (void)fp8comm_check((*request)->communicator);
  fp8comm_request_discard(request);
  return status;
}

fp8core_status fp8comm_request_test(fp8comm_request **request, int *done) {
  if (!request) return fp8comm_invalid("request of fp8comm_request_test() is NULL, expected a pointer to a request");
  if (!done) return fp8comm_invalid("done of fp8comm_request_test() is NULL, expected an int");
  *done = !*request;
  if (!*request) return FP8CORE_OK;
  fp8comm_shared *shared = (*request)->communicator->shared;
  const int previous = fp8comm_device_make_current(shared);
  if (!(*request)->done) (void)progress(shared);
  if (!(*request)->done) (void)check_time(*request);
  fp8comm_device_restore(shared, previous);
  *done = (*request)->done;
  return *done ? finish(request) : FP8CORE_OK;
}

fp8core_status fp8comm_request_wait(fp8comm_request **request) {
  if (!request) return fp8comm_invalid("request of fp8comm_request_wait() is NULL, expected a pointer to a request");
  if (!*request) return FP8CORE_OK;
  fp8comm_request *waited = *request;
  fp8comm_shared *shared = waited->communicator->shared;
  const int previous = fp8comm_device_make_current(shared);
  // What needs no other rank learns of failures all the same, for the next call.
  if (waited->done) (void)progress(shared);
  // Time between calls does not count.
  if (waited->asked == 0) waited->stalled_since = 0;
  for (int spins = 0; !waited->done;) {
    const size_t position = waited->position, pending = waited->pending_count;
    if (progress(shared) != FP8CORE_OK || waited->done) break;
    if (position != waited->position || pending != waited->pending_count) {
      spins = 0;
      continue;
    }
    if (++spins < SPINS) continue;
    if (check_time(waited) != FP8CORE_OK) break;
    if (fp8comm_now() - waited->stalled_since < YIELD_SECONDS) {
      (void)sched_yield();
    } else {
      rest(shared);
    }
  }
  fp8comm_device_restore(shared, previous);
  return finish(request);
}
