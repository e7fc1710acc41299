// Communicators: how they come about, divide and end. What they carry out is in request.c.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "fp8core/version.h"
#include "internal.h"
#include "threads.h"

// Ids are pairs, below what transports keep for themselves.
#define FIRST_ID 1
#define LAST_ID (FP8COMM_TAG_RESERVED - 2)

static fp8core_status no_memory(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %s", what);
}

static fp8core_status check_timeout(double seconds) {
  if (seconds > 0 && seconds <= 1e6) return FP8CORE_OK;
  return fp8comm_invalid("timeout_seconds is %g, expected a number above 0 and up to 1e6", seconds);
}

static fp8core_status read_options(const fp8comm_communicator_options *given, fp8comm_communicator_options *options) {
  *options = fp8comm_communicator_options_default();
  if (!given) return FP8CORE_OK;
  if (given->size != sizeof(*given))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH,
                                  "fp8comm_communicator_options has size %zu, expected %zu", given->size,
                                  sizeof(*given));
  *options = *given;
  return check_timeout(options->timeout_seconds);
}

static fp8core_status find_transport(const char *name, const fp8comm_transport **transport) {
  *transport = NULL;
#if defined(FP8COMM_HAVE_UCX)
  if (!name || strcmp(name, "ucx") == 0) *transport = &fp8comm_ucx_transport;
#endif
  if (*transport) return FP8CORE_OK;
  if (name && strcmp(name, "nccl") == 0)
    return fp8comm_invalid(
      "transport is \"nccl\", expected \"ucx\" or NULL: NCCL moves device memory beside a transport, "
      "see fp8comm_communicator_use_device()");
  if (name && strcmp(name, "ucx") != 0) return fp8comm_invalid("transport is \"%s\", expected \"ucx\" or NULL", name);
  return fp8core_set_last_error(
    FP8CORE_ERROR_NOT_SUPPORTED,
    "this build of libfp8comm has no transport between processes (it was built without UCX)");
}

static fp8comm_shared *new_shared(int rank, int size, const fp8comm_communicator_options *options) {
  fp8comm_shared *shared = calloc(1, sizeof(*shared));
  if (!shared) return NULL;
  shared->rank = rank;
  shared->size = size;
  shared->next_id = FIRST_ID;
  shared->interrupt = options->interrupt;
  shared->interrupt_data = options->interrupt_data;
  shared->answered = calloc((size_t)size, sizeof(*shared->answered));
  if (shared->answered) return shared;
  free(shared);
  return NULL;
}

static void release_shared(fp8comm_shared *shared) {
  if (shared->references > 0) return;
  const int previous = fp8comm_device_make_current(shared);
  if (shared->endpoint) shared->endpoint->transport->destroy(shared->endpoint);
  fp8comm_device_restore(shared, previous);
  fp8comm_device_close(shared);
  free(shared->answered);
  free(shared);
}

static fp8core_status new_communicator(fp8comm_shared *shared, int rank, int size, double timeout_seconds,
                                       fp8comm_communicator **communicator) {
  fp8comm_communicator *made = calloc(1, sizeof(*made));
  if (!made) return no_memory("a communicator");
  made->shared = shared;
  made->rank = rank;
  made->size = size;
  made->id = shared->next_id;
  made->timeout_seconds = timeout_seconds;
  shared->next_id += 2;
  shared->references++;
  *communicator = made;
  return FP8CORE_OK;
}

static fp8comm_endpoint_options endpoint_options(fp8comm_shared *shared, const fp8comm_communicator_options *options) {
  fp8comm_endpoint_options made;
  memset(&made, 0, sizeof(made));
  made.rank = shared->rank;
  made.size = shared->size;
  made.timeout_seconds = options->timeout_seconds;
  made.on_control = fp8comm_on_control;
  made.on_control_data = shared;
  return made;
}

// What every rank tells the others first: that they are of one group, version and byte order.
typedef struct greeting {
  uint32_t magic;
  int32_t api_version;
  int32_t version[3];
  int32_t rank;
  int32_t size;
} greeting;

static fp8core_status greet(int rank, int size, fp8comm_out_of_band_all_gather all_gather, void *user_data) {
  greeting own;
  memset(&own, 0, sizeof(own));
  own.magic = UINT32_C(0x43503846);
  own.api_version = FP8COMM_API_VERSION;
  own.version[0] = FP8COMM_VERSION_MAJOR;
  own.version[1] = FP8COMM_VERSION_MINOR;
  own.version[2] = FP8COMM_VERSION_PATCH;
  own.rank = rank;
  own.size = size;
  greeting *all = calloc((size_t)size, sizeof(*all));
  if (!all) return no_memory("the greetings of all ranks");
  const int failed = all_gather(user_data, &own, all, sizeof(own));
  fp8core_status status = FP8CORE_OK;
  if (failed) status = fp8core_set_last_error(FP8CORE_ERROR_PEER, "all_gather returned %d, expected 0", failed);
  for (int i = 0; i < size && status == FP8CORE_OK; i++) {
    const greeting *other = &all[i];
    if (other->magic != own.magic) {
      status = fp8core_set_last_error(FP8CORE_ERROR_PEER,
                                      "all_gather gave something else than rank %d sent, or its byte order differs", i);
    } else if (memcmp(other->version, own.version, sizeof(own.version)) != 0 || other->api_version != own.api_version) {
      status = fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH,
                                      "rank %d has libfp8comm %d.%d.%d (API %d), expected %d.%d.%d (API %d) as rank %d",
                                      i, other->version[0], other->version[1], other->version[2], other->api_version,
                                      own.version[0], own.version[1], own.version[2], own.api_version, rank);
    } else if (other->rank != i || other->size != size) {
      status =
        fp8core_set_last_error(FP8CORE_ERROR_PEER, "all_gather gave rank %d of %d in place %d, expected rank %d of %d",
                               other->rank, other->size, i, i, size);
    }
  }
  free(all);
  return status;
}

fp8core_status fp8comm_communicator_create(fp8comm_communicator **communicator, int rank, int size,
                                           fp8comm_out_of_band_all_gather all_gather, void *user_data,
                                           const fp8comm_communicator_options *given) {
  fp8comm_communicator_options options;
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a place for the handle");
  *communicator = NULL;
  FP8COMM_TRY(read_options(given, &options));
  if (size < 1 || size > FP8COMM_MAX_RANKS)
    return fp8comm_invalid("size is %d, expected 1 to %d", size, FP8COMM_MAX_RANKS);
  if (rank < 0 || rank >= size) return fp8comm_invalid("rank is %d, expected 0 to %d", rank, size - 1);
  if (size > 1 && !all_gather) return fp8comm_invalid("all_gather is NULL, expected a callback for %d ranks", size);
  const fp8comm_transport *transport = &fp8comm_self_transport;
  if (size > 1) {
    FP8COMM_TRY(find_transport(options.transport, &transport));
    FP8COMM_TRY(greet(rank, size, all_gather, user_data));
  }
  fp8comm_shared *shared = new_shared(rank, size, &options);
  if (!shared) return no_memory("a communicator");
  fp8comm_endpoint_options endpoint = endpoint_options(shared, &options);
  endpoint.all_gather = all_gather;
  endpoint.all_gather_data = user_data;
  fp8core_status status = transport->create(&shared->endpoint, &endpoint);
  if (status == FP8CORE_OK) status = new_communicator(shared, rank, size, options.timeout_seconds, communicator);
  if (status != FP8CORE_OK) release_shared(shared);
  return status;
}

fp8core_status fp8comm_threads_create(int count, fp8comm_communicator **communicators,
                                      const fp8comm_communicator_options *given) {
  fp8comm_communicator_options options;
  if (count < 1 || count > FP8COMM_MAX_RANKS)
    return fp8comm_invalid("count is %d, expected 1 to %d", count, FP8COMM_MAX_RANKS);
  if (!communicators) return fp8comm_invalid("communicators is NULL, expected room for %d handles", count);
  for (int i = 0; i < count; i++) communicators[i] = NULL;
  FP8COMM_TRY(read_options(given, &options));
  if (options.transport)
    return fp8comm_invalid("transport is \"%s\", expected NULL for the threads of one process", options.transport);
  fp8comm_hub *hub;
  fp8core_status status = fp8comm_hub_create(count, &hub);
  if (status != FP8CORE_OK) return status;
  for (int i = 0; i < count && status == FP8CORE_OK; i++) {
    fp8comm_shared *shared = new_shared(i, count, &options);
    if (!shared) {
      status = no_memory("a communicator");
      // A hub without endpoints has no one to free it.
      if (i == 0) fp8comm_hub_destroy(hub);
      break;
    }
    const fp8comm_endpoint_options endpoint = endpoint_options(shared, &options);
    status = fp8comm_hub_endpoint(hub, &endpoint, &shared->endpoint);
    if (status != FP8CORE_OK && i == 0) fp8comm_hub_destroy(hub);
    if (status == FP8CORE_OK) status = new_communicator(shared, i, count, options.timeout_seconds, &communicators[i]);
    if (status != FP8CORE_OK) release_shared(shared);
  }
  if (status != FP8CORE_OK) {
    for (int i = 0; i < count; i++) fp8comm_communicator_destroy(&communicators[i]);
  }
  return status;
}

// --- Split ---

typedef struct member {
  int32_t color;
  int32_t key;
  // Of the parent.
  int32_t rank;
  // The first that the rank has free.
  uint32_t next_id;
} member;

static int compare_members(const void *one, const void *other) {
  const member *a = one, *b = other;
  if (a->key != b->key) return a->key < b->key ? -1 : 1;
  return a->rank < b->rank ? -1 : a->rank > b->rank;
}

static fp8core_status gather_members(fp8comm_communicator *parent, int color, int key, member *members) {
  fp8comm_header header;
  fp8comm_request *request;
  memset(&header, 0, sizeof(header));
  header.operation = FP8COMM_OPERATION_SPLIT;
  FP8COMM_TRY(fp8comm_request_begin(parent, &header, &request));
  const fp8comm_parts parts = {(size_t)parent->size, 1, NULL};
  const member own = {color, key, parent->rank, parent->shared->next_id};
  members[parent->rank] = own;
  fp8comm_build_all_gather(request, &parts, sizeof(*members), members);
  FP8COMM_TRY(fp8comm_request_start(&request));
  return fp8comm_request_wait(&request);
}

static fp8core_status join(fp8comm_communicator *parent, int color, member *members,
                           fp8comm_communicator **communicator) {
  int size = 0, rank = -1;
  for (int i = 0; i < parent->size; i++) {
    if (members[i].color == color) members[size++] = members[i];
  }
  qsort(members, (size_t)size, sizeof(*members), compare_members);
  int *ranks = malloc((size_t)size * sizeof(*ranks));
  if (!ranks) return no_memory("the ranks of a communicator");
  for (int i = 0; i < size; i++) {
    if (members[i].rank == parent->rank) rank = i;
    ranks[i] = fp8comm_endpoint_rank(parent, members[i].rank);
  }
  fp8core_status status = new_communicator(parent->shared, rank, size, parent->timeout_seconds, communicator);
  if (status != FP8CORE_OK) {
    free(ranks);
    return status;
  }
  (*communicator)->endpoint_ranks = ranks;
  status = fp8comm_device_inherit(*communicator, parent);
  if (status != FP8CORE_OK) fp8comm_communicator_destroy(communicator);
  return status;
}

fp8core_status fp8comm_communicator_split(fp8comm_communicator *parent, int color, int key,
                                          fp8comm_communicator **communicator) {
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a place for the handle");
  *communicator = NULL;
  if (!parent) return fp8comm_invalid("parent is NULL, expected a communicator");
  member *members = calloc((size_t)parent->size, sizeof(*members));
  if (!members) return no_memory("the members of a communicator");
  fp8core_status status = gather_members(parent, color, key, members);
  if (status == FP8CORE_OK) {
    // The same for all, so that no two communicators that share a pair of ranks have the same.
    uint32_t id = 0;
    for (int i = 0; i < parent->size; i++) id = members[i].next_id > id ? members[i].next_id : id;
    parent->shared->next_id = id;
    if (id > LAST_ID) {
      status = fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                      "the communicator and its descendants were divided %u times, the most there is",
                                      (id - FIRST_ID) / 2);
    } else if (color >= 0) {
      status = join(parent, color, members, communicator);
    } else {
      parent->shared->next_id = id + 2;
    }
  }
  free(members);
  return status;
}

// --- The rest ---

void fp8comm_communicator_destroy(fp8comm_communicator **communicator) {
  if (!communicator || !*communicator) return;
  fp8comm_communicator *gone = *communicator;
  *communicator = NULL;
  for (fp8comm_request *next, *one = gone->shared->active; one; one = next) {
    next = one->next;
    if (one->communicator == gone) fp8comm_request_discard(&one);
  }
  for (fp8comm_request *next, *one = gone->idle; one; one = next) {
    next = one->next;
    free(one->steps);
    free(one->pending);
    free(one->scratch);
    fp8comm_device_free(one);
    free(one);
  }
  fp8comm_windows_close(gone);
  fp8comm_device_leave(gone);
  free(gone->endpoint_ranks);
  free(gone->sent);
  free(gone->received);
  gone->shared->references--;
  release_shared(gone->shared);
  free(gone);
}

int fp8comm_communicator_rank(const fp8comm_communicator *communicator) {
  return communicator ? communicator->rank : 0;
}

int fp8comm_communicator_size(const fp8comm_communicator *communicator) {
  return communicator ? communicator->size : 0;
}

const char *fp8comm_communicator_transport(const fp8comm_communicator *communicator) {
  return communicator ? communicator->shared->endpoint->transport->name : "none";
}

uint64_t fp8comm_communicator_bytes_sent(const fp8comm_communicator *communicator) {
  if (!communicator) return 0;
  const fp8comm_endpoint *endpoint = communicator->shared->endpoint;
  return endpoint->transport->bytes_sent(endpoint) + communicator->shared->bytes_in_place;
}

fp8core_status fp8comm_communicator_set_timeout(fp8comm_communicator *communicator, double seconds) {
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a communicator");
  FP8COMM_TRY(check_timeout(seconds));
  communicator->timeout_seconds = seconds;
  return FP8CORE_OK;
}

fp8core_status fp8comm_communicator_abort(fp8comm_communicator *communicator, const char *reason) {
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a communicator");
  (void)fp8core_set_last_error(FP8CORE_ERROR_PEER, "abort%s%.200s", reason && *reason ? ": " : "",
                               reason ? reason : "");
  (void)fp8comm_break(communicator->shared, FP8CORE_ERROR_PEER);
  return FP8CORE_OK;
}
