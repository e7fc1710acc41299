// An NCCL between threads of one process, as far as libfp8comm uses it, for tests without a GPU. It is as strict as
// NVIDIA's documentation: communicators that do not block are looked at before their next use, operations of a
// communicator go in the order in which they were given, and ranks whose operations do not match wait for ever.
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"
#include "nccl/library.h"
#include "numerics.h"

// What an NCCL would not bear, or libfp8comm never does.
#define refuse()                                                                                                       \
  do {                                                                                                                 \
    (void)fprintf(stderr, "%s:%d: the played NCCL is used wrongly\n", __FILE__, __LINE__);                             \
    abort();                                                                                                           \
  } while (0)

#define MOST_RANKS 64
#define MOST_OPERATIONS 256

typedef enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE } kind;

typedef struct operation {
  kind what;
  const void *send;
  void *receive;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int peer;
  int matched;
} operation;

// What one ncclGroupEnd() has put on a stream.
typedef struct group {
  struct group *next;
  fake_work *work;
  int count;
  operation operations[MOST_OPERATIONS];
} group;

typedef struct clique {
  struct clique *next;
  ncclUniqueId id;
  int size;
  int joined;
  int left;
  int finalized;
  // By rank; NULL: not there, or gone.
  struct ncclComm *members[MOST_RANKS];
} clique;

struct ncclComm {
  clique *in;
  int rank;
  int device;
  group *groups;
  // Given, and not yet put on its stream: that happens when it is looked at.
  group *given;
  cudaStream_t given_stream;
  int finalizing;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static clique *cliques;
static unsigned long long ids;

// The group that a thread is making.
static _Thread_local group *open_group;
static _Thread_local struct ncclComm *open_communicator;
static _Thread_local cudaStream_t open_stream;

static size_t size_of(ncclDataType_t type) {
  switch (type) {
  case ncclUint8:
  case ncclFloat8e4m3:
  case ncclFloat8e5m2: return 1;
  case ncclFloat16:
  case ncclBfloat16: return 2;
  case ncclFloat32: return 4;
  case ncclInt64:
  case ncclFloat64: return 8;
  default: refuse();
  }
}

static int is_narrow(ncclDataType_t type, fp8core_dtype *dtype) {
  *dtype = type == ncclFloat8e4m3   ? FP8CORE_E4M3
           : type == ncclFloat8e5m2 ? FP8CORE_E5M2
           : type == ncclFloat16    ? FP8CORE_FP16
           : type == ncclBfloat16   ? FP8CORE_BF16
                                    : FP8CORE_FP32;
  return *dtype != FP8CORE_FP32 || type == ncclFloat32;
}

static double load(ncclDataType_t type, const void *data, size_t index) {
  const unsigned char *at = (const unsigned char *)data + index * size_of(type);
  fp8core_dtype dtype;
  uint32_t code = 0;
  int64_t integer;
  double wide;
  if (is_narrow(type, &dtype)) {
    memcpy(&code, at, size_of(type));
    return (double)fp8core_bits_float(fp8core_decode_bits(dtype, code));
  }
  if (type == ncclUint8) return (double)*at;
  memcpy(&integer, at, 8);
  memcpy(&wide, at, 8);
  return type == ncclInt64 ? (double)integer : wide;
}

static void store(ncclDataType_t type, void *data, size_t index, double value) {
  unsigned char *at = (unsigned char *)data + index * size_of(type);
  fp8core_dtype dtype;
  const int64_t integer = (int64_t)value;
  if (is_narrow(type, &dtype)) {
    const uint32_t bits = fp8core_float_bits((float)value);
    const uint32_t sign = bits >> 31 << (8 * size_of(type) - 1);
    const uint32_t code = sign | fp8core_encode_nearest(dtype, bits & FP8CORE_F32_MAGNITUDE, size_of(type) == 1);
    memcpy(at, &code, size_of(type));
  } else if (type == ncclUint8) {
    *at = (unsigned char)value;
  } else if (type == ncclInt64) {
    memcpy(at, &integer, 8);
  } else {
    memcpy(at, &value, 8);
  }
}

static double combine(ncclRedOp_t reduction, double one, double other) {
  if (reduction == ncclMin) return one < other ? one : other;
  if (reduction == ncclMax) return one > other ? one : other;
  if (reduction != ncclSum) refuse();
  return one + other;
}

static int same(const operation *one, const operation *other) {
  return one->what == other->what && one->count == other->count && one->type == other->type &&
         one->reduction == other->reduction && one->peer == other->peer;
}

// Every rank's operation of this place in the group at its head.
static void carry_out(clique *of, int place) {
  const operation *all[MOST_RANKS] = {NULL};
  for (int i = 0; i < of->size; i++) all[i] = &of->members[i]->groups->operations[place];
  const size_t element = size_of(all[0]->type), count = all[0]->count, bytes = count * element;
  const int size = of->size;
  if (all[0]->what == BROADCAST) {
    for (int i = 0; i < size; i++) {
      if (all[i]->receive != all[all[0]->peer]->send) memcpy(all[i]->receive, all[all[0]->peer]->send, bytes);
    }
    return;
  }
  const size_t parts = all[0]->what == ALL_REDUCE ? 1 : (size_t)size;
  unsigned char *results = malloc(parts * bytes + 1);
  if (!results) refuse();
  if (all[0]->what == ALL_GATHER) {
    for (int i = 0; i < size; i++) memcpy(results + (size_t)i * bytes, all[i]->send, bytes);
  } else {
    for (size_t i = 0; i < parts * count; i++) {
      double value = load(all[0]->type, all[0]->send, i);
      for (int rank = 1; rank < size; rank++)
        value = combine(all[0]->reduction, value, load(all[0]->type, all[rank]->send, i));
      store(all[0]->type, results, i, value);
    }
  }
  for (int i = 0; i < size; i++) {
    const int scatters = all[0]->what == REDUCE_SCATTER;
    memcpy(all[i]->receive, results + (scatters ? (size_t)i * bytes : 0), scatters ? bytes : parts * bytes);
  }
  free(results);
}

static void pop(struct ncclComm *communicator) {
  group *done = communicator->groups;
  communicator->groups = done->next;
  atomic_store(&done->work->done, 1);
  fake_work_release(done->work);
  free(done);
}

static int go_on_together(clique *of) {
  for (int i = 0; i < of->size; i++) {
    if (!of->members[i] || !of->members[i]->groups) return 0;
    const group *mine = of->members[i]->groups, *first = of->members[0]->groups;
    if (mine->count != first->count) return 0;
    for (int j = 0; j < mine->count; j++) {
      if (mine->operations[j].what >= SEND || !same(&mine->operations[j], &first->operations[j])) return 0;
    }
  }
  const int count = of->members[0]->groups->count;
  for (int j = 0; j < count; j++) carry_out(of, j);
  for (int i = 0; i < of->size; i++) pop(of->members[i]);
  return 1;
}

static operation *receive_of(struct ncclComm *communicator, int peer) {
  for (int i = 0; communicator && communicator->groups && i < communicator->groups->count; i++) {
    operation *one = &communicator->groups->operations[i];
    if (one->what == RECEIVE && one->peer == peer && !one->matched) return one;
  }
  return NULL;
}

static int go_on_in_pairs(clique *of) {
  int moved = 0;
  for (int i = 0; i < of->size; i++) {
    struct ncclComm *from = of->members[i];
    for (int j = 0; from && from->groups && j < from->groups->count; j++) {
      operation *sent = &from->groups->operations[j];
      if (sent->what != SEND || sent->matched) continue;
      operation *received = receive_of(of->members[sent->peer], i);
      if (!received || received->count != sent->count) continue;
      memcpy(received->receive, sent->send, sent->count * size_of(sent->type));
      sent->matched = received->matched = moved = 1;
    }
  }
  for (int i = 0; i < of->size; i++) {
    struct ncclComm *one = of->members[i];
    int done = one && one->groups && one->groups->operations[0].what >= SEND;
    for (int j = 0; done && j < one->groups->count; j++) done = one->groups->operations[j].matched;
    if (!done) continue;
    pop(one);
    moved = 1;
  }
  return moved;
}

static void go_on(clique *of) {
  fake_device_begin();
  while (go_on_together(of) || go_on_in_pairs(of)) {
  }
  fake_device_end();
}

// --- What libfp8comm calls ---

static ncclResult_t fake_ncclGetVersion(int *version) {
  const char *value = getenv("FP8_FAKE_NCCL_VERSION");
  *version = value ? atoi(value) : NCCL_VERSION_CODE;
  return ncclSuccess;
}

static const char *fake_ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage" : "an error";
}

static const char *fake_ncclGetLastError(ncclComm_t communicator) { return communicator ? "played" : ""; }

static ncclResult_t fake_ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof(*id));
  (void)pthread_mutex_lock(&lock);
  const unsigned long long number = ++ids;
  (void)pthread_mutex_unlock(&lock);
  memcpy(id, &number, sizeof(number));
  return ncclSuccess;
}

static clique *find_clique(const ncclUniqueId *id, int size) {
  for (clique *one = cliques; one; one = one->next) {
    if (memcmp(&one->id, id, sizeof(*id)) == 0) return one;
  }
  clique *made = calloc(1, sizeof(*made));
  if (!made) refuse();
  made->id = *id;
  made->size = size;
  made->next = cliques;
  cliques = made;
  return made;
}

static ncclResult_t fake_ncclCommInitRankConfig(ncclComm_t *communicator, int size, ncclUniqueId id, int rank,
                                                ncclConfig_t *config) {
  ncclComm_t made = calloc(1, sizeof(*made));
  if (!made || config->blocking != 0 || size > MOST_RANKS) refuse();
  (void)cudaGetDevice(&made->device);
  made->rank = rank;
  (void)pthread_mutex_lock(&lock);
  made->in = find_clique(&id, size);
  if (made->in->size != size || made->in->members[rank]) refuse();
  made->in->members[rank] = made;
  made->in->joined++;
  (void)pthread_mutex_unlock(&lock);
  *communicator = made;
  return ncclInProgress;
}

static ncclResult_t fake_ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *result) {
  (void)pthread_mutex_lock(&lock);
  clique *in = communicator->in;
  *result = in->joined < in->size ? ncclInProgress : ncclSuccess;
  for (int i = 0; i < in->size && *result == ncclSuccess; i++) {
    if (i != communicator->rank && in->members[i] && in->members[i]->device == communicator->device)
      *result = ncclInvalidUsage;
  }
  if (communicator->finalizing && in->finalized < in->size) *result = ncclInProgress;
  if (communicator->given) {
    group **link = &communicator->groups;
    while (*link) link = &(*link)->next;
    *link = communicator->given;
    fake_stream_flush(communicator->given_stream);
    fake_stream_put(communicator->given_stream, communicator->given->work);
    communicator->given = NULL;
    *result = ncclInProgress;
    go_on(in);
  }
  (void)pthread_mutex_unlock(&lock);
  return ncclSuccess;
}

static ncclResult_t fake_ncclCommFinalize(ncclComm_t communicator) {
  (void)pthread_mutex_lock(&lock);
  if (communicator->groups || communicator->given || communicator->finalizing) refuse();
  communicator->finalizing = 1;
  communicator->in->finalized++;
  (void)pthread_mutex_unlock(&lock);
  return ncclInProgress;
}

static ncclResult_t end(ncclComm_t communicator, int orderly) {
  (void)pthread_mutex_lock(&lock);
  clique *in = communicator->in;
  if (orderly && (!communicator->finalizing || in->finalized < in->size)) refuse();
  if (communicator->given) {
    communicator->given->next = communicator->groups;
    communicator->groups = communicator->given;
  }
  while (communicator->groups) pop(communicator);
  in->members[communicator->rank] = NULL;
  in->left++;
  clique **link = &cliques;
  while (*link != in) link = &(*link)->next;
  if (in->left == in->joined && (in->left == in->size || !orderly)) {
    *link = in->next;
    free(in);
  }
  (void)pthread_mutex_unlock(&lock);
  free(communicator);
  return ncclSuccess;
}

static ncclResult_t fake_ncclCommDestroy(ncclComm_t communicator) { return end(communicator, 1); }
static ncclResult_t fake_ncclCommAbort(ncclComm_t communicator) { return end(communicator, 0); }

static ncclResult_t fake_ncclGroupStart(void) {
  if (open_group) refuse();
  open_group = calloc(1, sizeof(*open_group));
  if (!open_group) refuse();
  open_communicator = NULL;
  return ncclSuccess;
}

static ncclResult_t add(operation one, ncclComm_t communicator, cudaStream_t stream) {
  // Without a group, and while what was given last is still being put on the stream: not as libfp8comm does it.
  if (!open_group || open_group->count == MOST_OPERATIONS) refuse();
  if (communicator->given || communicator->finalizing) refuse();
  if (open_communicator && open_communicator != communicator) refuse();
  struct cudaPointerAttributes attributes;
  const void *const pointers[] = {one.send, one.receive};
  for (int i = 0; i < 2; i++) {
    if (!pointers[i]) continue;
    (void)cudaPointerGetAttributes(&attributes, pointers[i]);
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != communicator->device) refuse();
  }
  open_communicator = communicator;
  open_stream = stream;
  open_group->operations[open_group->count++] = one;
  return ncclSuccess;
}

static ncclResult_t fake_ncclGroupEnd(void) {
  group *ended = open_group;
  open_group = NULL;
  if (!ended || !open_communicator) refuse();
  ended->work = calloc(1, sizeof(*ended->work));
  if (!ended->work) refuse();
  atomic_store(&ended->work->references, 1);
  (void)pthread_mutex_lock(&lock);
  open_communicator->given = ended;
  open_communicator->given_stream = open_stream;
  (void)pthread_mutex_unlock(&lock);
  return ncclInProgress;
}

static ncclResult_t fake_ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                                       ncclRedOp_t reduction, ncclComm_t communicator, cudaStream_t stream) {
  return add((operation){ALL_REDUCE, send, receive, count, type, reduction, 0, 0}, communicator, stream);
}

static ncclResult_t fake_ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                                           ncclRedOp_t reduction, ncclComm_t communicator, cudaStream_t stream) {
  return add((operation){REDUCE_SCATTER, send, receive, count, type, reduction, 0, 0}, communicator, stream);
}

static ncclResult_t fake_ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                                       ncclComm_t communicator, cudaStream_t stream) {
  return add((operation){ALL_GATHER, send, receive, count, type, ncclSum, 0, 0}, communicator, stream);
}

static ncclResult_t fake_ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                                       ncclComm_t communicator, cudaStream_t stream) {
  return add((operation){BROADCAST, send, receive, count, type, ncclSum, root, 0}, communicator, stream);
}

static ncclResult_t fake_ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t communicator, cudaStream_t stream) {
  return add((operation){SEND, data, NULL, count, type, ncclSum, peer, 0}, communicator, stream);
}

static ncclResult_t fake_ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                                  cudaStream_t stream) {
  return add((operation){RECEIVE, NULL, data, count, type, ncclSum, peer, 0}, communicator, stream);
}

// What library.c would have found. FP8_FAKE_NO_NCCL plays a machine without it.
#define PLAYED(name) .name = fake_##name,
fp8comm_nccl_table fp8comm_nccl_library = {FP8COMM_NCCL_FUNCTIONS(PLAYED)};

fp8core_status fp8comm_nccl_load(void) {
  if (!getenv("FP8_FAKE_NO_NCCL")) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "NCCL (played) cannot be loaded: it is not there");
}
