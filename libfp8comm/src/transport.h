// The contract between communicators and transports. A transport moves bytes between ranks; it knows nothing of
// collectives, sub-communicators or formats.
//
// A transport is one constant table of functions over an endpoint, the transport's own object, which begins with an
// fp8comm_endpoint. Every communicator made by splits of one communicator shares its endpoint, and ranks in this file
// are always the endpoint's.
//
// Threads: one thread at a time calls functions of one endpoint. Nothing happens outside of calls but what hardware and
// peers do by themselves: progress() is where a transport works, and it is called by all that wait.
//
// Errors: a status and fp8core_set_last_error() with a message that names the peer as "rank %d" (of the endpoint).
// FP8CORE_ERROR_PEER: the peer is gone, unreachable or sent something malformed. FP8CORE_ERROR_TIMEOUT: creation only;
// after it, the communicator keeps the time. Whatever a function returns, it does so soon: none waits but create(), and
// wait() for as long as it is told.
#ifndef FP8COMM_TRANSPORT_H
#define FP8COMM_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "fp8comm/communicator.h"
#include "fp8core/status.h"

#define fp8comm_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define FP8COMM_TRY(call)                                                                                              \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

// Tags have 48 bits, so that a transport whose tags have 64 can put the sender's rank into the upper 16. Messages from
// one rank with one tag match the receives for them in the order of the calls.
#define FP8COMM_TAG_BITS 48
#define FP8COMM_MAX_RANKS 65536
// Upper 16 bits of tags that no communicator uses: a transport's own, for control messages and the like.
#define FP8COMM_TAG_RESERVED UINT64_C(0xffff)

// Seconds of a timeout in which ranks that wait learn who is missing.
static inline double fp8comm_grace(double timeout_seconds) { return timeout_seconds < 8 ? timeout_seconds / 4 : 2; }

typedef struct fp8comm_transport fp8comm_transport;
typedef struct fp8comm_endpoint fp8comm_endpoint;
// A send or receive in flight, of the transport's.
typedef struct fp8comm_operation fp8comm_operation;
// Memory of one rank that others of its machine read in place: the owner's hold on it, or a reader's.
typedef struct fp8comm_segment fp8comm_segment;

// What a rank needs to know of another's segment, as bytes of the transport's.
typedef struct fp8comm_segment_name {
  uint64_t address;
  uint32_t length;
  unsigned char bytes[244];
} fp8comm_segment_name;

// A message beside all tags, delivered by progress() to the peer's callback: aborts, and who is still there.
// Transports carry it as bytes; ranks are of one byte order (the communicator checks at creation).
typedef struct fp8comm_control {
  uint32_t kind;
  int32_t status;
  int32_t rank;
  char text[244];
} fp8comm_control;

// Where a message's data lies. Both sides of a message say the same.
typedef enum fp8comm_memory {
  FP8COMM_MEMORY_HOST,
  // Of a CUDA device, managed memory included; where check_cuda() is FP8CORE_OK. What is sent is complete when send()
  // is called, what has been received is there for whatever a stream is given afterwards, and the device is the calling
  // thread's current one in every call of the endpoint, from the first such message on.
  FP8COMM_MEMORY_CUDA
} fp8comm_memory;

typedef void (*fp8comm_control_callback)(void *user_data, int peer, const fp8comm_control *message);

typedef struct fp8comm_endpoint_options {
  int rank;
  // At least 2; self.c serves 1.
  int size;
  // Exchanges addresses; used during create() only, by all ranks in the same order with the same sizes.
  fp8comm_out_of_band_all_gather all_gather;
  void *all_gather_data;
  // For creation: connections that must stand when create() returns.
  double timeout_seconds;
  // Called within progress(), never from elsewhere. May call send_control(), nothing else. A message of the wrong size
  // or from a rank out of range never reaches it.
  fp8comm_control_callback on_control;
  void *on_control_data;
} fp8comm_endpoint_options;

struct fp8comm_transport {
  const char *name;
  // Collective. *endpoint is NULL on failure. The options are read during the call.
  fp8core_status (*create)(fp8comm_endpoint **endpoint, const fp8comm_endpoint_options *options);
  // All operations have ended or were cancelled. Peers may still use theirs: what they send to this rank then fails
  // with FP8CORE_ERROR_PEER. What this rank has sent still arrives, as far as that takes no more than a moment; so does
  // a control message. Must not wait for a peer that is dead.
  void (*destroy)(fp8comm_endpoint *endpoint);
  // Start sending `bytes` bytes (0 is fine, and is a message too) to `peer`, not this rank. The data stays untouched by
  // the caller until the operation ends. *operation NULL on success: it has ended already.
  fp8core_status (*send)(fp8comm_endpoint *endpoint, int peer, uint64_t tag, const void *data, size_t bytes,
                         fp8comm_memory memory, fp8comm_operation **operation);
  // The same for a message of exactly `bytes` bytes: one of another size is FP8CORE_ERROR_PEER, here or from test(),
  // and writes nothing beyond `bytes`.
  fp8core_status (*receive)(fp8comm_endpoint *endpoint, int peer, uint64_t tag, void *data, size_t bytes,
                            fp8comm_memory memory, fp8comm_operation **operation);
  // Works on everything that can go on. A failure that concerns one operation is reported by its test(); one that
  // concerns the endpoint as a whole from here, and from then on by everything.
  fp8core_status (*progress)(fp8comm_endpoint *endpoint);
  // Whether the operation has ended: *done. Then, and on failure, it is freed and *operation is NULL. A receive fails
  // (FP8CORE_ERROR_PEER) as soon as the transport knows that the peer is gone and the message will not come. Does no
  // progress by itself.
  fp8core_status (*test)(fp8comm_endpoint *endpoint, fp8comm_operation **operation, int *done);
  // Ends an operation: when it returns, the data is not touched any more. Frees it and sets *operation to NULL.
  void (*cancel)(fp8comm_endpoint *endpoint, fp8comm_operation **operation);
  // Sends a control message, as far as the peer can be reached; failures are not reported. Does not wait.
  void (*send_control)(fp8comm_endpoint *endpoint, int peer, const fp8comm_control *message);
  // Waits until progress() may find something, at most this long; may return at once. NULL: callers yield instead.
  void (*wait)(fp8comm_endpoint *endpoint, int milliseconds);
  // Whether the peer is known to be gone or to have left, also while nothing is expected of it. NULL: nobody can tell.
  int (*is_gone)(const fp8comm_endpoint *endpoint, int peer);
  // FP8CORE_OK: messages of FP8COMM_MEMORY_CUDA are taken. Else FP8CORE_ERROR_NOT_SUPPORTED, and why. NULL: they never
  // are.
  fp8core_status (*check_cuda)(const fp8comm_endpoint *endpoint);
  // Payload bytes of all sends that were started, headers of the transport and control messages left out.
  uint64_t (*bytes_sent)(const fp8comm_endpoint *endpoint);
  // The three that follow are NULL where the transport has no such memory. Makes `bytes` bytes that peers can read; at
  // a multiple of 64. What was written before a send is read by a peer that has received the message.
  fp8core_status (*share)(fp8comm_endpoint *endpoint, size_t bytes, fp8comm_segment **segment, void **address,
                          fp8comm_segment_name *name);
  // A reader's hold on a peer's segment. Fails where the two are not on one machine, or kept apart there. The memory
  // stays readable until the hold ends, whatever becomes of the peer.
  fp8core_status (*attach)(fp8comm_endpoint *endpoint, int peer, const fp8comm_segment_name *name,
                           fp8comm_segment **segment, const void **address);
  // Ends either hold, before destroy(), also where the peer is gone.
  void (*detach)(fp8comm_endpoint *endpoint, fp8comm_segment **segment);
};

// How each transport's endpoint begins.
struct fp8comm_endpoint {
  const fp8comm_transport *transport;
};

extern const fp8comm_transport fp8comm_self_transport;
// src/ucx/; where FP8COMM_HAVE_UCX is 1.
extern const fp8comm_transport fp8comm_ucx_transport;

// Bootstraps (src/bootstrap/) end in fp8comm_communicator_create() with a callback of their own, which is called during
// creation only; fp8comm_communicator_create_from_environment() is theirs.

#endif
