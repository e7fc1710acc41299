// What the files of libfp8comm share: communicators, requests, and the schedules that requests carry out.
//
// Every collective is a schedule: a list of steps, made when the call begins, that progress carries out in order. So
// blocking calls, calls that are started and waited for, and the buckets of a gradient reducer are the same thing, and
// no algorithm waits by itself.
#ifndef FP8COMM_INTERNAL_H
#define FP8COMM_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "fp8comm/collectives.h"
#include "fp8comm/communicator.h"
#include "transport.h"

#define FP8COMM_MESSAGE_BYTES 512

// An endpoint and what the communicators over it share. They break together.
typedef struct fp8comm_shared {
  fp8comm_endpoint *endpoint;
  int rank;
  int size;
  // Communicators over it.
  int references;
  // The first upper 16 bits of tags that no communicator here has.
  uint32_t next_id;
  // FP8CORE_OK, or why everything fails from now on.
  fp8core_status failure;
  char failure_text[FP8COMM_MESSAGE_BYTES];
  // Of the options.
  fp8comm_interrupt interrupt;
  void *interrupt_data;
  // Requests in flight, of all communicators.
  fp8comm_request *active;
  // What other ranks have been told to read in place.
  uint64_t bytes_in_place;
  // One a rank of the endpoint: when it last answered the question of a call that waits in vain.
  double *answered;
  // device.h; NULL as long as no communicator here was given a device.
  struct fp8comm_cuda *cuda;
  // Whether the transport has device memory to move: then its calls are made with that device as the current one.
  int moves_device_memory;
} fp8comm_shared;

// How device memory travels.
typedef enum fp8comm_path {
  FP8COMM_PATH_NONE,
  FP8COMM_PATH_STAGED,
  FP8COMM_PATH_NCCL,
  // By the transport, which takes it as it takes host memory.
  FP8COMM_PATH_TRANSPORT
} fp8comm_path;

struct fp8comm_communicator {
  fp8comm_shared *shared;
  int rank;
  int size;
  // Ranks of the endpoint, by rank of the communicator; NULL: the same.
  int *endpoint_ranks;
  // Upper 16 bits of the tags of collectives; of messages between two ranks, one more.
  uint32_t id;
  double timeout_seconds;
  // Of the next collective.
  uint32_t sequence;
  // Of the next message to and from each rank, or NULL as long as there was none.
  uint32_t *sent;
  uint32_t *received;
  // Requests that have ended and keep their memory for the next.
  fp8comm_request *idle;
  struct fp8comm_window *windows;
  fp8comm_path path;
  // NULL unless the path is NCCL's, and after it was aborted.
  struct fp8comm_nccl *nccl;
};

// The endpoint's number of a rank of the communicator.
static inline int fp8comm_endpoint_rank(const fp8comm_communicator *communicator, int rank) {
  return communicator->endpoint_ranks ? communicator->endpoint_ranks[rank] : rank;
}

// What ranks must agree on. Sent beside the data of every operation.
typedef struct fp8comm_header {
  uint32_t magic;
  // fp8comm_operation_kind.
  uint32_t operation;
  uint32_t dtype;
  // fp8comm_reduction_kind, or the root, or the bucket.
  uint32_t detail;
  uint64_t count;
  // Of sizes that are many.
  uint64_t digest;
  // 1: device memory.
  uint32_t on_device;
  uint32_t unused;
} fp8comm_header;

typedef enum fp8comm_operation_kind {
  FP8COMM_OPERATION_ALL_REDUCE = 1,
  FP8COMM_OPERATION_REDUCE_SCATTER,
  FP8COMM_OPERATION_ALL_GATHER,
  FP8COMM_OPERATION_ALL_GATHERV,
  FP8COMM_OPERATION_ALL_TO_ALL,
  FP8COMM_OPERATION_BROADCAST,
  FP8COMM_OPERATION_BARRIER,
  FP8COMM_OPERATION_SPLIT,
  FP8COMM_OPERATION_SEND,
  FP8COMM_OPERATION_GRADIENT_CREATE,
  FP8COMM_OPERATION_GRADIENT,
  FP8COMM_OPERATION_USE_DEVICE
} fp8comm_operation_kind;

// How contributions are added up: an accumulator takes the first, then the others in a fixed order, and gives the
// result. `offset` is that of the first of `count` elements in this rank's part.
typedef struct fp8comm_reducer {
  // Bytes of an element on the wire, and in the accumulator.
  size_t element;
  size_t accumulator;
  fp8core_status (*first)(void *data, void *accumulator, const void *in, size_t offset, size_t count);
  fp8core_status (*add)(void *data, void *accumulator, const void *in, size_t offset, size_t count);
  fp8core_status (*last)(void *data, void *out, const void *accumulator, size_t offset, size_t count);
  void *data;
} fp8comm_reducer;

// A plain collective or message. Bytes and addresses are those of any memory.
typedef struct fp8comm_collective {
  fp8comm_header header;
  // What is read, and written; the same of a broadcast, one NULL of a message.
  const void *send;
  void *receive;
  size_t element;
  // Elements of each rank's part: one number, or, unless NULL, one a rank.
  size_t count;
  const int64_t *counts;
  // The root of a broadcast, the other rank of a message, and whether that is sent.
  int peer;
  int sends;
  // Of reductions.
  fp8comm_reduction reduction;
  fp8comm_reducer reducer;
} fp8comm_collective;

typedef enum fp8comm_step_kind {
  FP8COMM_STEP_SEND,
  FP8COMM_STEP_RECEIVE,
  // Until the first `count` messages of the request have ended.
  FP8COMM_STEP_WAIT,
  FP8COMM_STEP_COPY,
  FP8COMM_STEP_FIRST,
  FP8COMM_STEP_ADD,
  FP8COMM_STEP_LAST,
  FP8COMM_STEP_CALL,
  // device.c: a copy on the device's stream; a mark there, of which a request has two (`offset`); until the stream is
  // past it; until NCCL has done the request's collective.
  FP8COMM_STEP_DEVICE_COPY,
  FP8COMM_STEP_DEVICE_MARK,
  FP8COMM_STEP_DEVICE_WAIT,
  FP8COMM_STEP_NCCL
} fp8comm_step_kind;

typedef fp8core_status (*fp8comm_call)(void *data);

typedef struct fp8comm_step {
  fp8comm_step_kind kind;
  int peer;
  // Of messages.
  fp8comm_memory memory;
  const void *source;
  void *destination;
  // Bytes of messages and copies, elements of reductions.
  size_t count;
  // Of a message without bytes: those that the other rank reads in place.
  size_t offset;
  const fp8comm_reducer *reducer;
  fp8comm_call call;
  void *data;
} fp8comm_step;

// How far NCCL is with a request.
typedef enum fp8comm_nccl_state {
  FP8COMM_NCCL_NONE,
  // Waits for its turn.
  FP8COMM_NCCL_QUEUED,
  FP8COMM_NCCL_LAUNCHING,
  FP8COMM_NCCL_RUNNING
} fp8comm_nccl_state;

typedef struct fp8comm_pending {
  fp8comm_operation *operation;
  // Of the communicator.
  int peer;
  // How many messages of the request were posted before.
  size_t index;
} fp8comm_pending;

struct fp8comm_request {
  fp8comm_communicator *communicator;
  fp8comm_request *next;
  fp8comm_header header;
  fp8comm_header peer_header;
  // Ranks of the communicator that get this rank's header, and whose header is compared with it; -1: none.
  int header_to;
  int header_from;
  fp8comm_pending header_send;
  fp8comm_pending header_receive;
  // Of headers; and of data, with a hash of the header, so that ranks that do not agree exchange no data.
  uint64_t tag;
  uint64_t data_tag;
  // Where the data of messages and copies lies that are added from now on; and whether messages of device memory were.
  fp8comm_memory memory;
  int moves_device_memory;
  fp8comm_step *steps;
  size_t step_count;
  size_t step_capacity;
  size_t position;
  // Messages among the steps, and those that were posted.
  size_t message_count;
  size_t posted;
  // In the order in which they were posted.
  fp8comm_pending *pending;
  size_t pending_count;
  size_t pending_capacity;
  // Kept from one use to the next.
  void *scratch;
  size_t scratch_bytes;
  // The same in device memory.
  void *device_scratch;
  size_t device_scratch_bytes;
  // Of plain reductions.
  fp8comm_reducer reducer;
  // Of NCCL.
  fp8comm_collective collective;
  fp8comm_nccl_state nccl_state;
  // Steps that are still to come; until they have, it is no later request's turn, so that ranks keep one order.
  int nccl_steps;
  // The one that has its place in NCCL's queue, or had it last.
  const struct fp8comm_step *nccl_begun;
  // When ranks were last looked at while NCCL works, and since when one is gone; 0: none is.
  double looked;
  double gone_since;
  // Of device memory: whether copies may be under way; marks, and page-locked memory, kept as scratch is.
  int copying;
  void *marks[2];
  void *staging;
  size_t staging_bytes;
  // What a step that could not be made is answered with at the end of making.
  fp8core_status status;
  int active;
  int done;
  // Since when a test or wait has seen no progress; 0: it has, or has not looked.
  double stalled_since;
  // When all ranks were asked since; 0: they were not.
  double asked;
};

// request.c: carrying out.

double fp8comm_now(void);
// Marks everything over the endpoint as broken with the calling thread's last error, ends what is in flight, tells the
// other ranks. Returns `status`.
fp8core_status fp8comm_break(fp8comm_shared *shared, fp8core_status status);
// FP8CORE_OK, or the failure with its message.
fp8core_status fp8comm_check(const fp8comm_communicator *communicator);
// The endpoint's control callback; data is the fp8comm_shared.
void fp8comm_on_control(void *shared, int peer, const fp8comm_control *message);
// A request without steps, of a collective: the ring of ranks must agree with the header.
fp8core_status fp8comm_request_begin(fp8comm_communicator *communicator, const fp8comm_header *header,
                                     fp8comm_request **request);
// The same for a message between two ranks.
fp8core_status fp8comm_request_begin_message(fp8comm_communicator *communicator, const fp8comm_header *header, int peer,
                                             int sends, fp8comm_request **request);
// At least `bytes` of memory that the request keeps, 64-byte aligned.
fp8core_status fp8comm_request_scratch(fp8comm_request *request, size_t bytes);
// Adding steps; what fails is told by fp8comm_request_start(). Data lies in the request's `memory`; a copy or a
// reduction in device memory is waited for.
void fp8comm_add_send(fp8comm_request *request, int peer, const void *data, size_t bytes);
void fp8comm_add_receive(fp8comm_request *request, int peer, void *data, size_t bytes);
// A message without bytes: from then on the peer may read `bytes` bytes of this rank's window.
void fp8comm_add_notice(fp8comm_request *request, int peer, size_t bytes);
// Waits for all messages added so far, or for the first `messages` (of message_count) only.
void fp8comm_add_wait(fp8comm_request *request);
void fp8comm_add_wait_for(fp8comm_request *request, size_t messages);
void fp8comm_add_copy(fp8comm_request *request, void *destination, const void *source, size_t bytes);
void fp8comm_add_call(fp8comm_request *request, fp8comm_call call, void *data);
void fp8comm_add_reduction(fp8comm_request *request, fp8comm_step_kind kind, const fp8comm_reducer *reducer,
                           void *destination, const void *source, size_t offset, size_t count);
void fp8comm_add_device_copy(fp8comm_request *request, void *destination, const void *source, size_t bytes);
// A step that has no more than a kind and a number.
void fp8comm_add_step(fp8comm_request *request, fp8comm_step_kind kind, size_t offset);
// The memory of 64-byte alignment that holds buffers; NULL where there is none. For free().
void *fp8comm_allocate(size_t bytes);
// Puts the request among those in flight and goes as far as it can. On failure the request is gone.
fp8core_status fp8comm_request_start(fp8comm_request **request);
void fp8comm_request_discard(fp8comm_request **request);

// schedule.c: algorithms, as steps of a request. A part is what one rank owns: `part` elements from rank * part
// on, up to `count`; or, where `begins` is not NULL, the elements from begins[rank] to begins[rank + 1], at most
// `part`.
typedef struct fp8comm_parts {
  size_t count;
  size_t part;
  const size_t *begins;
} fp8comm_parts;
size_t fp8comm_part_begin(const fp8comm_parts *parts, int rank);
size_t fp8comm_part_count(const fp8comm_parts *parts, int rank);

// Bytes of scratch of the two that follow.
size_t fp8comm_reduce_scatter_bytes(const fp8comm_communicator *communicator, const fp8comm_parts *parts,
                                    const fp8comm_reducer *reducer);
size_t fp8comm_small_all_reduce_bytes(const fp8comm_communicator *communicator, size_t count,
                                      const fp8comm_reducer *reducer);
// This rank's part of the sum into `accumulator`, from the contributions of all (`source`: `count` elements): its own
// first, then those of rank - 1, rank - 2 and so on round. The order is fixed, and each part is added up in one place.
void fp8comm_build_reduce_scatter(fp8comm_request *request, const fp8comm_reducer *reducer, const fp8comm_parts *parts,
                                  const void *source, void *accumulator, void *scratch);
// The contributions to this rank's part, without its own: that of rank - 1 into `received`, that of rank - 2 `stride`
// elements behind it, and so on round. first() is called for each piece of `source` before it is sent or needed, add()
// for each piece of the part of which all are there; with nothing but the piece's place in `source`, or in the part.
// `received` NULL: `source` lies in a window, and the pieces stay there.
void fp8comm_build_contributions(fp8comm_request *request, const fp8comm_reducer *reducer, const fp8comm_parts *parts,
                                 const void *source, void *received, size_t stride);
// An all-gather in pieces; last() is called for each as soon as it is there, beginning with this rank's own part, with
// nothing but its place in `data`. `data` NULL: every rank's own part lies in its window, and stays there.
void fp8comm_build_all_gather_in_pieces(fp8comm_request *request, const fp8comm_reducer *reducer,
                                        const fp8comm_parts *parts, void *data);
// Every rank's part of `data`, of which each has its own.
void fp8comm_build_all_gather(fp8comm_request *request, const fp8comm_parts *parts, size_t element, void *data);
// Few steps: everything to everyone, added up in the order of ranks.
void fp8comm_build_small_all_reduce(fp8comm_request *request, const fp8comm_reducer *reducer, size_t count,
                                    const void *source, void *destination, void *scratch);
// Ends when every rank has begun it.
void fp8comm_build_barrier(fp8comm_request *request);
int fp8comm_all_reduce_is_small(const fp8comm_communicator *communicator, size_t count, size_t element);

// window.c: memory of every rank of a communicator that all of them read in place. A rank that has been told by a
// message (fp8comm_add_notice()) sees what was written before it.
typedef struct fp8comm_window {
  // NULL: it is gone, and with it all that could be read.
  fp8comm_communicator *communicator;
  struct fp8comm_window *next;
  unsigned char *own;
  // One a rank, this one's among them.
  const unsigned char **ranks;
  // The same, of the transport's.
  fp8comm_segment **segments;
} fp8comm_window;
// Blocking, collective. *window NULL on success: some two ranks are not on one machine, or the transport has none.
fp8core_status fp8comm_window_create(fp8comm_communicator *communicator, size_t bytes, fp8comm_window **window);
// Other ranks may still read theirs.
void fp8comm_window_destroy(fp8comm_window **window);
// Lets go of the memory of all windows of a communicator that ends before them.
void fp8comm_windows_close(fp8comm_communicator *communicator);

// collectives.c: a collective on memory of the request's kind, as steps. Bytes of scratch of that kind that it needs,
// and the steps; `collective->reducer` and `counts` are read here only, the request's own reducer is theirs.
size_t fp8comm_collective_scratch(const fp8comm_communicator *communicator, const fp8comm_collective *collective);
void fp8comm_build_collective(fp8comm_request *request, const fp8comm_collective *collective);

#endif
