// Collectives on device memory: over NCCL, by a transport that takes it, or around the algorithms for host memory.
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of host memory in one of two buffers of each direction, so that one is copied while the other travels.
#if !defined(FP8COMM_STAGING_BYTES)
#  define FP8COMM_STAGING_BYTES ((size_t)4 << 20)
#endif
// Messages that NCCL is given at once; more follow.
#define GROUP 64
// Between two looks at whether ranks are still there, and how long NCCL may take to end what one that is gone has had
// its part in.
#define LOOK_SECONDS 0.05
#define GONE_SECONDS 1.0

// Messages of an exchange that are in flight at once.
#define WINDOW 8
// No device.
#define NO_DEVICE (-1)

static size_t minimum(size_t one, size_t other) { return one < other ? one : other; }

int fp8comm_device_make_current(const fp8comm_shared *shared) {
  int previous;
  // Where that fails, the transport says what it lacks.
  return shared->moves_device_memory && shared->cuda->functions->enter(shared->cuda, &previous) == FP8CORE_OK
           ? previous
           : NO_DEVICE;
}

void fp8comm_device_restore(const fp8comm_shared *shared, int previous) {
  if (previous != NO_DEVICE) shared->cuda->functions->leave(shared->cuda, previous);
}

int fp8comm_device_is_direct(const fp8comm_communicator *communicator) {
  return communicator->path == FP8COMM_PATH_NCCL || communicator->path == FP8COMM_PATH_TRANSPORT;
}

// --- What NCCL has to do, in the order of the calls ---

static fp8core_status launch(fp8comm_request *first) {
  fp8comm_nccl *nccl = first->communicator->nccl;
  fp8comm_request *group[GROUP];
  int count = 0;
  group[count++] = first;
  if (first->collective.header.operation == FP8COMM_OPERATION_SEND) {
    // What was started with it goes with it: two ranks may send to each other.
    for (fp8comm_request *one = first->next; one && count < GROUP; one = one->next) {
      if (one->nccl_state == FP8COMM_NCCL_NONE && one->nccl_steps == 0) continue;
      if (one->nccl_state != FP8COMM_NCCL_QUEUED) break;
      if (one->collective.header.operation != FP8COMM_OPERATION_SEND || one->communicator != first->communicator) break;
      group[count++] = one;
    }
  } else if (first->header_receive.operation) {
    // Not before ranks agree; a message that is not what the other sends is ended when that shows.
    return FP8CORE_OK;
  }
  for (int i = 0; i < count; i++) group[i]->nccl_state = FP8COMM_NCCL_LAUNCHING;
  return fp8comm_nccl_launch(nccl, group, count);
}

// What NCCL waits for may never come: the host's transport knows.
static fp8core_status look_for_ranks(fp8comm_request *request) {
  const fp8comm_communicator *communicator = request->communicator;
  const fp8comm_endpoint *endpoint = communicator->shared->endpoint;
  const double now = fp8comm_now();
  if (!endpoint->transport->is_gone || now - request->looked < LOOK_SECONDS) return FP8CORE_OK;
  request->looked = now;
  const int message = request->collective.header.operation == FP8COMM_OPERATION_SEND;
  int gone = -1;
  for (int rank = 0; rank < communicator->size && gone < 0; rank++) {
    const int place = fp8comm_endpoint_rank(communicator, rank);
    if (rank == communicator->rank || (message && rank != request->collective.peer)) continue;
    if (endpoint->transport->is_gone(endpoint, place)) gone = place;
  }
  if (gone < 0 || request->gone_since == 0) request->gone_since = gone < 0 ? 0 : now;
  if (gone < 0 || now - request->gone_since < GONE_SECONDS) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d is gone or has left, and NCCL waits for it", gone);
}

fp8core_status fp8comm_device_progress(fp8comm_shared *shared) {
  fp8comm_cuda *cuda = shared->cuda;
  for (fp8comm_request *request = shared->active; request; request = request->next) {
    int done = 0;
    switch (request->nccl_state) {
    case FP8COMM_NCCL_NONE:
      if (request->nccl_steps > 0) return FP8CORE_OK;
      break;
    case FP8COMM_NCCL_QUEUED: return launch(request);
    case FP8COMM_NCCL_LAUNCHING:
      FP8COMM_TRY(fp8comm_nccl_poll(request->communicator->nccl, &done));
      // Nothing may be given to NCCL before.
      if (!done) return look_for_ranks(request);
      FP8COMM_TRY(cuda->functions->record(cuda, &request->marks[0]));
      request->nccl_state = FP8COMM_NCCL_RUNNING;
      // What comes after its last step may follow on the stream.
      if (request->nccl_steps > 1) return FP8CORE_OK;
      break;
    case FP8COMM_NCCL_RUNNING:
      FP8COMM_TRY(cuda->functions->query(cuda, request->marks[0], &done));
      if (done) {
        request->nccl_state = FP8COMM_NCCL_NONE;
        // Its next step may begin, or end it.
        if (request->nccl_steps > 0) return FP8CORE_OK;
      } else {
        FP8COMM_TRY(fp8comm_nccl_poll(request->communicator->nccl, &done));
        FP8COMM_TRY(look_for_ranks(request));
        if (request->nccl_steps > 1) return FP8CORE_OK;
      }
      break;
    }
  }
  return FP8CORE_OK;
}

// Takes its place in the queue, and waits. Without a collective it is there already.
static void step_nccl(fp8comm_request *request, const fp8comm_step *step, int *done) {
  if (step->source && request->nccl_begun != step) {
    request->nccl_begun = step;
    request->collective = *(const fp8comm_collective *)step->source;
    request->nccl_state = FP8COMM_NCCL_QUEUED;
  }
  *done = request->nccl_state == FP8COMM_NCCL_NONE;
  if (*done && step->source) request->nccl_steps--;
}

fp8core_status fp8comm_device_step(fp8comm_request *request, const fp8comm_step *step, int *done) {
  fp8comm_cuda *cuda = request->communicator->shared->cuda;
  switch (step->kind) {
  case FP8COMM_STEP_DEVICE_COPY:
    request->copying = 1;
    return cuda->functions->copy(cuda, step->destination, step->source, step->count);
  case FP8COMM_STEP_DEVICE_MARK: return cuda->functions->record(cuda, &request->marks[step->offset]);
  case FP8COMM_STEP_DEVICE_WAIT: return cuda->functions->query(cuda, request->marks[step->offset], done);
  default: step_nccl(request, step, done); return FP8CORE_OK;
  }
}

static void add_nccl(fp8comm_request *request, const fp8comm_collective *collective) {
  fp8comm_add_step(request, FP8COMM_STEP_NCCL, 0);
  if (request->status != FP8CORE_OK) return;
  request->steps[request->step_count - 1].source = collective;
  request->nccl_steps++;
}

// FP8COMM_OPERATION_GRADIENT, by messages: to the rank after this one and from the one before, and so on round.
static void build_exchange(fp8comm_request *request, const fp8comm_collective *collective) {
  const int size = request->communicator->size, rank = request->communicator->rank;
  const size_t element = collective->element, own = (size_t)collective->counts[rank] * element;
  const size_t stride = (own + 15) / 16 * 16;
  const unsigned char *all = collective->send, *send = all;
  unsigned char *receive = collective->receive;
  for (int i = 0; i <= rank; i++) send += (size_t)collective->counts[i] * element;
  for (int distance = 1; distance < size; distance++) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    const size_t theirs = (size_t)collective->counts[to] * element;
    if (to == 0) send = all;
    if (own > 0) fp8comm_add_receive(request, from, receive + (size_t)(distance - 1) * stride, own);
    if (theirs > 0) fp8comm_add_send(request, to, send, theirs);
    if (distance % WINDOW == 0) fp8comm_add_wait(request);
    send += theirs;
  }
}

// Steps of reductions. The data is the request.
static fp8core_status reduce_step(fp8comm_request *request, fp8comm_step_kind step, void *destination,
                                  const void *source, size_t count) {
  fp8comm_cuda *cuda = request->communicator->shared->cuda;
  const fp8comm_reducer *reducer = &request->reducer;
  const fp8comm_reduce_job job = {.dtype = (fp8comm_dtype)request->header.dtype,
                                  .reduction = (fp8comm_reduction)request->header.detail,
                                  .destination = destination,
                                  .source = source,
                                  .count = (int64_t)count};
  request->copying = 1;
  if (step == FP8COMM_STEP_ADD || reducer->accumulator != reducer->element)
    return cuda->functions->reduce(cuda, step, &job);
  return destination == source ? FP8CORE_OK
                               : cuda->functions->copy(cuda, destination, source, count * reducer->element);
}

static fp8core_status first_step(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)offset;
  return reduce_step(data, FP8COMM_STEP_FIRST, sum, in, count);
}

static fp8core_status add_step(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)offset;
  return reduce_step(data, FP8COMM_STEP_ADD, sum, in, count);
}

static fp8core_status last_step(void *data, void *out, const void *sum, size_t offset, size_t count) {
  (void)offset;
  return reduce_step(data, FP8COMM_STEP_LAST, out, sum, count);
}

// Sums in device memory, in the order of those in host memory.
static fp8core_status prepare_reduction(fp8comm_request *request, const fp8comm_collective *collective) {
  fp8comm_cuda *cuda = request->communicator->shared->cuda;
  const size_t bytes = fp8comm_collective_scratch(request->communicator, collective);
  request->reducer.first = first_step;
  request->reducer.add = add_step;
  request->reducer.last = last_step;
  request->reducer.data = request;
  if (bytes <= request->device_scratch_bytes) return FP8CORE_OK;
  if (request->device_scratch) (void)fp8core_free(cuda->context, request->device_scratch);
  request->device_scratch = NULL;
  request->device_scratch_bytes = 0;
  FP8COMM_TRY(fp8core_alloc(cuda->context, bytes, &request->device_scratch));
  request->device_scratch_bytes = bytes;
  return FP8CORE_OK;
}

// What the stream has been given is done before the transport reads memory, or writes what may still be read.
static void build_by_transport(fp8comm_request *request, const fp8comm_collective *collective) {
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, 0);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, 0);
  request->memory = FP8COMM_MEMORY_CUDA;
  if (collective->header.operation == FP8COMM_OPERATION_GRADIENT) {
    build_exchange(request, collective);
  } else {
    fp8comm_build_collective(request, collective);
  }
  fp8comm_add_wait(request);
  request->memory = FP8COMM_MEMORY_HOST;
}

void fp8comm_add_device_collective(fp8comm_request *request, const fp8comm_collective *collective) {
  if (request->communicator->path == FP8COMM_PATH_NCCL) {
    add_nccl(request, collective);
  } else {
    build_by_transport(request, collective);
  }
}

void fp8comm_device_cancel(fp8comm_request *request) {
  fp8comm_communicator *communicator = request->communicator;
  fp8comm_cuda *cuda = communicator->shared->cuda;
  if (request->nccl_state == FP8COMM_NCCL_LAUNCHING || request->nccl_state == FP8COMM_NCCL_RUNNING)
    fp8comm_nccl_close(&communicator->nccl, 1);
  request->nccl_state = FP8COMM_NCCL_NONE;
  request->nccl_steps = 0;
  if (request->copying) cuda->functions->synchronize(cuda);
  request->copying = 0;
}

void fp8comm_device_free(fp8comm_request *request) {
  fp8comm_cuda *cuda = request->communicator->shared->cuda;
  for (int i = 0; i < 2; i++) {
    if (request->marks[i]) cuda->functions->destroy_event(cuda, request->marks[i]);
    request->marks[i] = NULL;
  }
  if (request->staging) cuda->functions->free(cuda, request->staging);
  request->staging = NULL;
  if (request->device_scratch) (void)fp8core_free(cuda->context, request->device_scratch);
  request->device_scratch = NULL;
  request->device_scratch_bytes = 0;
}

// --- Buffers ---

static int is_of_parts(const fp8comm_collective *collective) {
  switch (collective->header.operation) {
  case FP8COMM_OPERATION_REDUCE_SCATTER:
  case FP8COMM_OPERATION_ALL_GATHER:
  case FP8COMM_OPERATION_ALL_GATHERV:
  case FP8COMM_OPERATION_ALL_TO_ALL: return 1;
  default: return 0;
  }
}

// Parts that this rank reads, and writes: one a rank, one, or none.
static int parts_read(const fp8comm_communicator *communicator, const fp8comm_collective *collective) {
  switch (collective->header.operation) {
  case FP8COMM_OPERATION_REDUCE_SCATTER:
  case FP8COMM_OPERATION_ALL_TO_ALL: return communicator->size;
  case FP8COMM_OPERATION_BROADCAST: return communicator->rank == collective->peer;
  case FP8COMM_OPERATION_SEND: return collective->sends;
  default: return 1;
  }
}

static int parts_written(const fp8comm_communicator *communicator, const fp8comm_collective *collective) {
  switch (collective->header.operation) {
  case FP8COMM_OPERATION_ALL_GATHER:
  case FP8COMM_OPERATION_ALL_GATHERV:
  case FP8COMM_OPERATION_ALL_TO_ALL: return communicator->size;
  case FP8COMM_OPERATION_BROADCAST: return communicator->rank != collective->peer;
  case FP8COMM_OPERATION_SEND: return !collective->sends;
  default: return 1;
  }
}

static size_t part_count(const fp8comm_collective *collective, int rank) {
  return collective->counts ? (size_t)collective->counts[rank] : collective->count;
}

static size_t longest_part(const fp8comm_communicator *communicator, const fp8comm_collective *collective) {
  size_t longest = collective->count;
  if (!collective->counts) return longest;
  longest = 0;
  for (int i = 0; i < communicator->size; i++) {
    if ((size_t)collective->counts[i] > longest) longest = (size_t)collective->counts[i];
  }
  return longest;
}

fp8core_status fp8comm_device_find(const fp8comm_communicator *communicator, const fp8comm_collective *collective,
                                   int *on_device) {
  fp8comm_cuda *cuda = communicator->shared->cuda;
  const int rank = communicator->rank;
  const int broadcast = collective->header.operation == FP8COMM_OPERATION_BROADCAST;
  const int reads = part_count(collective, rank) > 0 && collective->send;
  const int writes = longest_part(communicator, collective) > 0 && collective->receive;
  int read_on_device = 0;
  *on_device = 0;
  if (writes)
    FP8COMM_TRY(
      cuda->functions->find(cuda, broadcast || !collective->send ? "data" : "receive", collective->receive, on_device));
  if (!reads || broadcast) return FP8CORE_OK;
  FP8COMM_TRY(cuda->functions->find(cuda, collective->receive ? "send" : "data", collective->send, &read_on_device));
  if (writes && read_on_device != *on_device)
    return fp8comm_invalid("send is in %s memory and receive in %s memory, expected both in memory of one kind",
                           read_on_device ? "device" : "host", *on_device ? "device" : "host");
  *on_device = read_on_device;
  return FP8CORE_OK;
}

static fp8core_status reserve(fp8comm_request *request, size_t bytes) {
  fp8comm_cuda *cuda = request->communicator->shared->cuda;
  if (bytes <= request->staging_bytes) return FP8CORE_OK;
  if (request->staging) cuda->functions->free(cuda, request->staging);
  request->staging = NULL;
  request->staging_bytes = 0;
  FP8COMM_TRY(cuda->functions->allocate(cuda, bytes, &request->staging));
  request->staging_bytes = bytes;
  return FP8CORE_OK;
}

// --- Staged ---

typedef struct staged {
  const fp8comm_collective *collective;
  // Elements of each part that go at once, and how often.
  size_t chunk;
  size_t chunks;
  // Of each of two buffers.
  unsigned char *in[2];
  unsigned char *out[2];
  // One a rank, of the chunk that is built.
  int64_t *counts;
} staged;

static size_t chunk_count(const staged *work, int part, size_t chunk) {
  const size_t count = part_count(work->collective, part);
  return minimum(work->chunk, count - minimum(count, chunk * work->chunk));
}

// Between the parts in device memory, which lie one after the other, and their chunks, which do too.
static void copy_parts(fp8comm_request *request, const staged *work, size_t chunk, int in) {
  const fp8comm_collective *collective = work->collective;
  const fp8comm_communicator *communicator = request->communicator;
  const size_t element = collective->element;
  const int parts = in ? parts_read(communicator, collective) : parts_written(communicator, collective);
  unsigned char *staging = in ? work->in[chunk % 2] : work->out[chunk % 2];
  size_t begin = 0;
  for (int i = 0; i < parts; i++) {
    // The one part of a gather that is read is this rank's.
    const int part = parts == 1 ? communicator->rank : i;
    const size_t bytes = chunk_count(work, part, chunk) * element, offset = (begin + chunk * work->chunk) * element;
    if (in) {
      fp8comm_add_device_copy(request, staging, (const unsigned char *)collective->send + offset, bytes);
    } else {
      fp8comm_add_device_copy(request, (unsigned char *)collective->receive + offset, staging, bytes);
    }
    staging += bytes;
    begin += part_count(collective, part);
  }
}

static void stage_in(fp8comm_request *request, const staged *work, size_t chunk) {
  copy_parts(request, work, chunk, 1);
  // Also where nothing is read: what was copied out of the buffer before has left it then.
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, chunk % 2);
}

static fp8comm_collective chunk_of(const fp8comm_communicator *communicator, const staged *work, size_t chunk) {
  fp8comm_collective part = *work->collective;
  part.send = work->in[chunk % 2];
  part.receive = work->out[chunk % 2];
  if (part.counts) {
    for (int i = 0; i < communicator->size; i++) work->counts[i] = (int64_t)chunk_count(work, i, chunk);
    part.counts = work->counts;
  } else {
    part.count = chunk_count(work, 0, chunk);
  }
  return part;
}

static void build_chunks(fp8comm_request *request, const staged *work) {
  stage_in(request, work, 0);
  for (size_t chunk = 0; chunk < work->chunks; chunk++) {
    if (chunk + 1 < work->chunks) stage_in(request, work, chunk + 1);
    fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, chunk % 2);
    const fp8comm_collective part = chunk_of(request->communicator, work, chunk);
    fp8comm_build_collective(request, &part);
    fp8comm_add_wait(request);
    copy_parts(request, work, chunk, 0);
  }
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, 0);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, 0);
}

static fp8core_status build_staged(fp8comm_request *request, const fp8comm_collective *collective) {
  const fp8comm_communicator *communicator = request->communicator;
  const size_t element = collective->element, longest = longest_part(communicator, collective);
  // The same on every rank, also where one reads more parts than another.
  const size_t width = is_of_parts(collective) ? (size_t)communicator->size : 1;
  staged work;
  memset(&work, 0, sizeof(work));
  work.collective = collective;
  work.chunk = FP8COMM_STAGING_BYTES / element / width;
  if (work.chunk > 64) work.chunk = work.chunk / 64 * 64;
  work.chunk = minimum(work.chunk > 0 ? work.chunk : 1, longest);
  work.chunks = (longest + work.chunk - 1) / work.chunk;
  const size_t part = (work.chunk * element + 63) / 64 * 64, buffers = work.chunks > 1 ? 2 : 1;
  const int separate = is_of_parts(collective);
  const size_t in = part * (size_t)parts_read(communicator, collective);
  const size_t out = part * (size_t)parts_written(communicator, collective);
  const size_t both = separate ? in + out : part;
  FP8COMM_TRY(reserve(request, both * buffers));
  for (size_t i = 0; i < buffers; i++) {
    work.in[i] = (unsigned char *)request->staging + i * both;
    work.out[i] = separate ? work.in[i] + in : work.in[i];
  }
  // The last chunk is shorter, which may be another algorithm's.
  fp8comm_collective first = *collective, last = *collective;
  first.count = work.chunk;
  last.count = longest - (work.chunks - 1) * work.chunk;
  const size_t one = fp8comm_collective_scratch(communicator, &first);
  const size_t other = fp8comm_collective_scratch(communicator, &last);
  FP8COMM_TRY(fp8comm_request_scratch(request, one > other ? one : other));
  if (collective->counts) {
    work.counts = calloc((size_t)communicator->size, sizeof(*work.counts));
    if (!work.counts)
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the counts of %d ranks",
                                    communicator->size);
  }
  build_chunks(request, &work);
  free(work.counts);
  return FP8CORE_OK;
}

// One rank: whatever it is, it is a copy.
static void build_alone(fp8comm_request *request, const fp8comm_collective *collective) {
  fp8comm_add_device_copy(request, collective->receive, collective->send,
                          part_count(collective, 0) * collective->element);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, 0);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, 0);
}

static fp8core_status build_nccl(fp8comm_request *request, const fp8comm_collective *collective) {
  const fp8comm_communicator *communicator = request->communicator;
  if (!communicator->nccl)
    return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "NCCL's part of the communicator was ended with a request that "
                                                        "was destroyed before it was done");
  request->collective = *collective;
  if (collective->counts) {
    const size_t bytes = (size_t)communicator->size * sizeof(*collective->counts);
    FP8COMM_TRY(fp8comm_request_scratch(request, bytes));
    memcpy(request->scratch, collective->counts, bytes);
    request->collective.counts = request->scratch;
  }
  add_nccl(request, &request->collective);
  return FP8CORE_OK;
}

fp8core_status fp8comm_device_build(fp8comm_request *request, const fp8comm_collective *collective) {
  const fp8comm_communicator *communicator = request->communicator;
  fp8comm_cuda *cuda = communicator->shared->cuda;
  FP8COMM_TRY(cuda->functions->follow(cuda));
  if (communicator->path == FP8COMM_PATH_NCCL) return build_nccl(request, collective);
  if (communicator->size == 1) {
    build_alone(request, collective);
    return FP8CORE_OK;
  }
  if (communicator->path == FP8COMM_PATH_STAGED) return build_staged(request, collective);
  const int reduces = collective->header.operation == FP8COMM_OPERATION_ALL_REDUCE ||
                      collective->header.operation == FP8COMM_OPERATION_REDUCE_SCATTER;
  if (reduces) FP8COMM_TRY(prepare_reduction(request, collective));
  build_by_transport(request, collective);
  return FP8CORE_OK;
}

// --- Making ---

// What ranks tell each other before they choose a path.
typedef struct introduction {
  int32_t rank;
  // fp8comm_path; NONE: the best.
  int32_t wanted;
  // 0: there is none.
  int32_t nccl_version;
  // Whether the transport does.
  int32_t takes_cuda;
  // Of the machine, the same as long as it is up; and of the GPU in it.
  char machine[40];
  char gpu[FP8COMM_CUDA_NAME_BYTES];
} introduction;

static const char *transport_name(const fp8comm_communicator *communicator) {
  return communicator->shared->endpoint->transport->name;
}

static const char *path_name(const fp8comm_communicator *communicator, int path) {
  switch (path) {
  case FP8COMM_PATH_STAGED: return "staged";
  case FP8COMM_PATH_NCCL: return "nccl";
  case FP8COMM_PATH_TRANSPORT: return transport_name(communicator);
  default: return "none";
  }
}

static fp8core_status check_own_transport(const fp8comm_communicator *communicator) {
  const fp8comm_endpoint *endpoint = communicator->shared->endpoint;
  if (endpoint->transport->check_cuda) return endpoint->transport->check_cuda(endpoint);
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "the transport \"%s\" moves host memory only",
                                endpoint->transport->name);
}

// Why this rank lacks what is wanted: of NCCL, or of the transport.
typedef struct reasons {
  char nccl[300];
  char transport[300];
} reasons;

static void introduce(const fp8comm_communicator *communicator, fp8comm_path wanted, introduction *own, reasons *why) {
  memset(own, 0, sizeof(*own));
  memset(why, 0, sizeof(*why));
  own->rank = communicator->rank;
  own->wanted = (int32_t)wanted;
  int version = 0;
  if ((wanted == FP8COMM_PATH_NONE || wanted == FP8COMM_PATH_NCCL) && fp8comm_nccl_version(&version) != FP8CORE_OK)
    (void)snprintf(why->nccl, sizeof(why->nccl), "%.299s", fp8core_last_error());
  own->nccl_version = version;
  own->takes_cuda = check_own_transport(communicator) == FP8CORE_OK;
  if (!own->takes_cuda) (void)snprintf(why->transport, sizeof(why->transport), "%.299s", fp8core_last_error());
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file) {
    if (!fgets(own->machine, (int)sizeof(own->machine), file)) own->machine[0] = 0;
    (void)fclose(file);
  }
  (void)snprintf(own->gpu, sizeof(own->gpu), "%s", communicator->shared->cuda->name);
}

static fp8core_status gather(fp8comm_communicator *communicator, introduction *all) {
  fp8comm_header header;
  fp8comm_request *request;
  const fp8comm_parts parts = {(size_t)communicator->size, 1, NULL};
  memset(&header, 0, sizeof(header));
  header.operation = FP8COMM_OPERATION_USE_DEVICE;
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, &request));
  fp8comm_build_all_gather(request, &parts, sizeof(*all), all);
  FP8COMM_TRY(fp8comm_request_start(&request));
  return fp8comm_request_wait(&request);
}

static int compare_places(const void *one, const void *other) {
  const introduction *a = one, *b = other;
  int order = memcmp(a->machine, b->machine, sizeof(a->machine));
  if (order == 0) order = memcmp(a->gpu, b->gpu, sizeof(a->gpu));
  return order != 0 ? order : a->rank < b->rank ? -1 : a->rank > b->rank;
}

// Why NCCL does not serve, in the order of ranks; sorts them. FP8CORE_OK: it does.
static fp8core_status check_nccl(introduction *all, int size) {
  for (int i = 0; i < size; i++) {
    if (all[i].nccl_version == 0)
      return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "rank %d has no NCCL, expected one on every rank", i);
    if (all[i].nccl_version != all[0].nccl_version)
      return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                    "rank %d has NCCL of version %d, expected %d as rank 0", i,
                                    (int)all[i].nccl_version, (int)all[0].nccl_version);
  }
  qsort(all, (size_t)size, sizeof(*all), compare_places);
  for (int i = 1; i < size; i++) {
    const introduction *one = &all[i - 1], *other = &all[i];
    if (memcmp(one->machine, other->machine, sizeof(one->machine)) == 0 &&
        memcmp(one->gpu, other->gpu, sizeof(one->gpu)) == 0)
      return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                    "ranks %d and %d have the same GPU (%.31s), expected one each for NCCL",
                                    (int)one->rank, (int)other->rank, one->gpu);
  }
  return FP8CORE_OK;
}

static fp8core_status check_transport(const introduction *all, int size, const char *name) {
  for (int i = 0; i < size; i++) {
    if (!all[i].takes_cuda)
      return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                    "the transport \"%s\" of rank %d takes no memory of CUDA devices, expected one on "
                                    "every rank that does",
                                    name, i);
  }
  return FP8CORE_OK;
}

static fp8core_status with_reason(fp8core_status status, const char *why) {
  return why[0] ? fp8core_set_last_error(status, "%s (here: %s)", fp8core_last_error(), why) : status;
}

// The same on every rank, of the same introductions; sorts them.
static fp8core_status choose(const fp8comm_communicator *communicator, introduction *all, const reasons *why,
                             fp8comm_path *path) {
  const int wanted = (int)all[0].wanted, size = communicator->size;
  *path = FP8COMM_PATH_STAGED;
  for (int i = 1; i < size; i++) {
    if (all[i].wanted != wanted)
      return fp8comm_invalid("ranks do not agree: path is \"%s\" on rank %d, but \"%s\" on rank 0",
                             all[i].wanted ? path_name(communicator, all[i].wanted) : "the best", i,
                             wanted ? path_name(communicator, wanted) : "the best");
  }
  if (wanted == FP8COMM_PATH_STAGED || (wanted == FP8COMM_PATH_NONE && size == 1)) return FP8CORE_OK;
  const fp8core_status by_transport = check_transport(all, size, transport_name(communicator));
  if (wanted == FP8COMM_PATH_TRANSPORT && by_transport != FP8CORE_OK) return with_reason(by_transport, why->transport);
  if (by_transport == FP8CORE_OK) *path = FP8COMM_PATH_TRANSPORT;
  if (wanted == FP8COMM_PATH_TRANSPORT) return FP8CORE_OK;
  const fp8core_status by_nccl = check_nccl(all, size);
  if (by_nccl == FP8CORE_OK) *path = FP8COMM_PATH_NCCL;
  return by_nccl == FP8CORE_OK || wanted == FP8COMM_PATH_NONE ? FP8CORE_OK : with_reason(by_nccl, why->nccl);
}

// Makes NCCL's part of a communicator, on all of its ranks.
static fp8core_status join_nccl(fp8comm_communicator *communicator) {
  unsigned char id[FP8COMM_NCCL_ID_BYTES];
  fp8comm_header header;
  fp8comm_request *request;
  memset(id, 0, sizeof(id));
  fp8core_status status = communicator->rank == 0 ? fp8comm_nccl_unique_id(id) : FP8CORE_OK;
  if (status != FP8CORE_OK) return fp8comm_break(communicator->shared, status);
  // The communicator takes host memory only as yet.
  FP8COMM_TRY(fp8comm_broadcast(communicator, id, FP8COMM_NCCL_ID_BYTES, FP8COMM_BYTE, 0));
  memset(&header, 0, sizeof(header));
  header.operation = FP8COMM_OPERATION_USE_DEVICE;
  header.detail = 1;
  FP8COMM_TRY(fp8comm_request_begin(communicator, &header, &request));
  status =
    fp8comm_nccl_open(communicator->shared->cuda, communicator->rank, communicator->size, id, &communicator->nccl);
  if (status == FP8CORE_OK) {
    // As if a launch had begun.
    request->nccl_state = FP8COMM_NCCL_LAUNCHING;
    fp8comm_add_step(request, FP8COMM_STEP_NCCL, 0);
  } else {
    request->status = status;
  }
  FP8COMM_TRY(fp8comm_request_start(&request));
  FP8COMM_TRY(fp8comm_request_wait(&request));
  communicator->path = FP8COMM_PATH_NCCL;
  return FP8CORE_OK;
}

fp8core_status fp8comm_device_inherit(fp8comm_communicator *communicator, const fp8comm_communicator *parent) {
  if (parent->path == FP8COMM_PATH_NCCL) return join_nccl(communicator);
  communicator->path = parent->path;
  return FP8CORE_OK;
}

static fp8core_status read_options(const fp8comm_communicator *communicator, const fp8comm_device_options *options,
                                   fp8comm_path *wanted) {
  *wanted = FP8COMM_PATH_NONE;
  if (!options) return FP8CORE_OK;
  if (options->size != sizeof(*options))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8comm_device_options has size %zu, expected %zu",
                                  options->size, sizeof(*options));
  if (!options->path) return FP8CORE_OK;
  if (strcmp(options->path, "nccl") == 0) *wanted = FP8COMM_PATH_NCCL;
  if (strcmp(options->path, "staged") == 0) *wanted = FP8COMM_PATH_STAGED;
  // Also where the transport is another one, which then says so.
  if (strcmp(options->path, "ucx") == 0 || strcmp(options->path, transport_name(communicator)) == 0)
    *wanted = FP8COMM_PATH_TRANSPORT;
  if (*wanted != FP8COMM_PATH_NONE) return FP8CORE_OK;
  return fp8comm_invalid("path is \"%s\", expected \"nccl\", \"ucx\", \"staged\" or NULL", options->path);
}

// An error that all ranks know. None returns with it before all do: an abort that follows would overtake it.
static fp8core_status fail_together(fp8comm_communicator *communicator, fp8core_status status) {
  char message[FP8COMM_MESSAGE_BYTES];
  (void)snprintf(message, sizeof(message), "%s", fp8core_last_error());
  (void)fp8comm_barrier(communicator);
  return fp8core_set_last_error(status, "%s", message);
}

static fp8core_status agree_on_path(fp8comm_communicator *communicator, fp8comm_path wanted) {
  introduction *all = calloc((size_t)communicator->size, sizeof(*all));
  if (!all)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the introductions of %d ranks",
                                  communicator->size);
  reasons why;
  introduce(communicator, wanted, &all[communicator->rank], &why);
  fp8comm_path path = FP8COMM_PATH_STAGED;
  fp8core_status status = gather(communicator, all);
  if (status == FP8CORE_OK) {
    status = choose(communicator, all, &why, &path);
    if (status != FP8CORE_OK) status = fail_together(communicator, status);
  }
  free(all);
  FP8COMM_TRY(status);
  if (path == FP8COMM_PATH_NCCL) return join_nccl(communicator);
  if (path == FP8COMM_PATH_TRANSPORT) communicator->shared->moves_device_memory = 1;
  communicator->path = path;
  return FP8CORE_OK;
}

fp8core_status fp8comm_communicator_use_device(fp8comm_communicator *communicator, fp8core_context *context,
                                               const fp8comm_device_options *options) {
  fp8comm_path wanted;
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a communicator");
  if (!context) return fp8comm_invalid("context is NULL, expected a context of a CUDA device");
  if (fp8core_context_device(context).type != FP8CORE_DEVICE_CUDA)
    return fp8comm_invalid("context is of the CPU, expected one of a CUDA device");
  FP8COMM_TRY(read_options(communicator, options, &wanted));
  FP8COMM_TRY(fp8comm_check(communicator));
  if (communicator->path != FP8COMM_PATH_NONE)
    return fp8comm_invalid("the communicator has a device already (path \"%s\"), expected this once",
                           path_name(communicator, (int)communicator->path));
  fp8comm_shared *shared = communicator->shared;
  if (!shared->cuda) FP8COMM_TRY(fp8comm_cuda_open(context, &shared->cuda));
  // Kept until the end also where this fails: another call may follow.
  if (shared->cuda->context != context)
    return fp8comm_invalid("context is not the one that a communicator which a split connects with this one has, "
                           "expected the same");
  return agree_on_path(communicator, wanted);
}

const char *fp8comm_communicator_device_path(const fp8comm_communicator *communicator) {
  return communicator ? path_name(communicator, (int)communicator->path) : "none";
}

void fp8comm_device_leave(fp8comm_communicator *communicator) {
  if (communicator->nccl) fp8comm_nccl_close(&communicator->nccl, communicator->shared->failure != FP8CORE_OK);
}

void fp8comm_device_close(fp8comm_shared *shared) {
  if (shared->cuda) shared->cuda->functions->close(shared->cuda);
  shared->cuda = NULL;
}
