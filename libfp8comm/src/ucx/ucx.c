// The transport over UCX: tagged messages of UCP, one worker an endpoint, a connection (UCX's "ep") to each rank that
// is spoken to, made when that first happens.
//
// A peer that ends is noticed by UCX where its transports can (UCP_ERR_HANDLING_MODE_PEER): a connection that is reset
// or, in shared memory, a process that is no more. One that is stopped is noticed by nobody here: the communicator
// asks, and counts on progress() to answer. A peer that leaves in order says so, since shared memory would not tell.
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include "../transport.h"
#include "cma.h"

#define AM_CONTROL 1
#define AM_GOODBYE 2
// The receipt of a message that was read by cross-memory attach.
#define AM_RECEIPT 3
// After the news that a peer is gone, messages of it that are still on their way through another lane may arrive.
#define GRACE_SECONDS 0.1
// Where others never cease to send, so that there is always more to look at.
#define PATIENCE_SECONDS 2.0
// What a moment is: for the last messages before destroy(), and for an operation that is cancelled to end by itself and
// then by force.
#define LINGER_SECONDS 1.0
#define CANCEL_SECONDS 0.1
#define FORCE_SECONDS 0.3
// Between two looks at whether the processes of peers still run, and calls of progress() between two looks at the
// clock.
#define LOOK_SECONDS 0.05
#define LOOK_CALLS 256
// What one call reads of one message, so that questions of peers are answered meanwhile.
#define READ_BYTES ((size_t)4 << 20)
// Far above any worker's address (a few hundred bytes), far below what a table of all ranks could not bear.
#define ADDRESS_BYTES_LIMIT 65536
// Of what a message says of the user's variables.
#define VARIABLES_CHARS 256

typedef struct ucx_endpoint ucx_endpoint;

typedef struct ucx_peer {
  ucx_endpoint *owner;
  ucp_ep_h ep;
  // Since when it is known to be gone; 0: not.
  double gone_since;
  // UCS_OK: it said goodbye.
  ucs_status_t reason;
  // The connection has been closed by force; there will be no other.
  int closed;
  // Control messages on their way to it.
  int outgoing;
  // Of the end: until all that was sent has left. NULL: it has.
  void *flush;
  // It has sent control messages, so it would like to know of this rank's end.
  int heard;
  // Where it is known under this number here: its process; else 0.
  pid_t process;
  // Whether the two read each other's memory.
  int reads;
  // Readable when the process has ended, also while nobody has waited for it. -1: none.
  int process_fd;
} ucx_peer;

// Sent in place of a large message.
typedef struct offer {
  uint64_t address;
  uint64_t bytes;
  // Comes back in the receipt.
  uint64_t id;
} offer;

struct fp8comm_operation {
  fp8comm_operation *next_idle;
  fp8comm_operation *next_made;
  ucx_endpoint *owner;
  int peer;
  int receives;
  // UCX's, until the operation is freed.
  void *request;
  int ended;
  // Given up while UCX still had it: goes back to the idle ones when that ends.
  int orphaned;
  ucs_status_t status;
  size_t expected;
  size_t received;
  // Of a message that is read by cross-memory attach: what is left to read, to where, and its place in the list of
  // those that this rank reads, or whose receipt it awaits.
  int by_offer;
  offer offer;
  uint8_t *place;
  fp8comm_operation *next_offer;
  fp8comm_operation **offer_link;
};

// One of the two: what this rank shares, or what a peer does.
struct fp8comm_segment {
  ucp_mem_h own;
  ucp_rkey_h theirs;
};

// A control message, or a goodbye, on its way out.
typedef struct outgoing {
  struct outgoing *next;
  struct outgoing *previous;
  ucx_peer *to;
  uint32_t sender;
  union {
    fp8comm_control message;
    // Of a receipt.
    uint64_t id;
  } data;
} outgoing;

// A control message that has come in, until progress() delivers it.
typedef struct incoming {
  struct incoming *next;
  int peer;
  fp8comm_control message;
} incoming;

struct ucx_endpoint {
  fp8comm_endpoint base;
  int rank;
  int size;
  fp8comm_control_callback on_control;
  void *on_control_data;
  ucp_context_h context;
  // Bits of ucs_memory_type_t, of what messages may lie in.
  uint64_t memory_types;
  ucp_worker_h worker;
  // -1: the worker cannot be waited for.
  int event_fd;
  // Whether connections are made with UCP_ERR_HANDLING_MODE_PEER; not where no transport can.
  int peer_errors;
  ucx_peer *peers;
  // Of all ranks, address_bytes each.
  uint8_t *addresses;
  size_t address_bytes;
  uint64_t bytes_sent;
  // When the processes of peers were last looked at.
  double looked;
  unsigned calls;
  // Failed connections that are to be closed.
  int to_close;
  // Whether some peer is gone, and when, since then, nothing more was there that had arrived.
  int some_gone;
  double looked_at_all;
  fp8comm_operation *idle;
  // All operations there are.
  fp8comm_operation *made;
  // Messages that are being read, and those whose receipt is awaited.
  fp8comm_operation *reading;
  fp8comm_operation *offered;
  uint64_t next_offer;
  // Read by peers at creation, to find out whether they can.
  uint64_t canary;
  // UCX may still write into memory of an operation that was cancelled: it must not be called any more but to end.
  int unsafe;
  outgoing *first_outgoing;
  incoming *first_incoming;
  incoming **last_incoming;
};

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static fp8core_status no_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for the UCX transport");
}

// What the user lets UCX have, for messages: "; here UCX_TLS is 'tcp'"; nothing where nothing is set.
static const char *say_variables(char *text, size_t bytes) {
  static const char *const names[] = {"UCX_TLS", "UCX_NET_DEVICES"};
  size_t used = 0;
  text[0] = 0;
  for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
    const char *const value = getenv(names[i]);
    if (value && used < bytes)
      used +=
        (size_t)snprintf(text + used, bytes - used, "%s %s is '%.80s'", used == 0 ? "; here" : " and", names[i], value);
  }
  return text;
}

static fp8core_status ucx_failed(const char *call, ucs_status_t status) {
  char variables[VARIABLES_CHARS];
  return fp8core_set_last_error(status == UCS_ERR_NO_MEMORY ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_PEER,
                                "UCX: %s failed: %s%s", call, ucs_status_string(status),
                                say_variables(variables, sizeof(variables)));
}

static fp8core_status say_gone(const ucx_endpoint *ucx, int peer) {
  const ucs_status_t reason = ucx->peers[peer].reason;
  char variables[VARIABLES_CHARS];
  if (reason == UCS_OK)
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d has left: it has destroyed its communicator", peer);
  if (reason == UCS_ERR_UNREACHABLE) {
    return fp8core_set_last_error(FP8CORE_ERROR_PEER,
                                  "UCX has no way from rank %d to rank %d; expected a network that both had when they "
                                  "started, among UCX_NET_DEVICES, and a transport for it, among UCX_TLS%s",
                                  ucx->rank, peer, say_variables(variables, sizeof(variables)));
  }
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d is gone or cannot be reached (UCX: %s)", peer,
                                ucs_status_string(reason));
}

// Of a rank that had no processor meanwhile all that has arrived still waits to be looked at.
static int is_gone(const ucx_endpoint *ucx, const ucx_peer *peer) {
  if (peer->gone_since == 0) return 0;
  return peer->closed || ucx->looked_at_all - peer->gone_since >= GRACE_SECONDS ||
         now() - peer->gone_since >= PATIENCE_SECONDS;
}

static void mark_gone(ucx_peer *peer, ucs_status_t reason) {
  // A goodbye counts more than the end of the connection that follows it.
  if (peer->gone_since > 0) return;
  peer->owner->some_gone = 1;
  peer->gone_since = now();
  peer->reason = reason;
}

// ---- Connections

// Within UCX's progress.
static void on_error(void *argument, ucp_ep_h ep, ucs_status_t status) {
  ucx_peer *const peer = argument;
  if (peer->ep != ep) return;
  mark_gone(peer, status);
  peer->owner->to_close++;
}

static fp8core_status connect_peer(ucx_endpoint *ucx, int rank) {
  ucx_peer *const peer = &ucx->peers[rank];
  if (peer->ep) return FP8CORE_OK;
  if (peer->gone_since > 0) return say_gone(ucx, rank);
  ucp_ep_params_t parameters = {
    .field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
    .address = (const ucp_address_t *)(ucx->addresses + (size_t)rank * ucx->address_bytes),
    .err_mode = ucx->peer_errors ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE,
    .err_handler = {.cb = on_error, .arg = peer},
  };
  ucs_status_t status = ucp_ep_create(ucx->worker, &parameters, &peer->ep);
  if (status != UCS_OK && ucx->peer_errors) {
    // No transport that notices the end of a peer: the communicator's timeout has to.
    parameters.err_mode = UCP_ERR_HANDLING_MODE_NONE;
    status = ucp_ep_create(ucx->worker, &parameters, &peer->ep);
    if (status == UCS_OK) ucx->peer_errors = 0;
  }
  if (status == UCS_OK) {
#if defined(SYS_pidfd_open)
    // Of Linux 5.3; UCX's own look at the process takes one that has ended, but was not waited for, for alive.
    if (peer->process != 0) peer->process_fd = (int)syscall(SYS_pidfd_open, peer->process, 0);
#endif
    return FP8CORE_OK;
  }
  peer->ep = NULL;
  mark_gone(peer, status);
  return say_gone(ucx, rank);
}

static void on_closed(void *request, ucs_status_t status, void *user_data) {
  (void)status;
  (void)user_data;
  ucp_request_free(request);
}

// Ends everything that is underway with the peer; the callbacks of that come now or in the next progress.
static void close_by_force(ucx_endpoint *ucx, ucx_peer *peer) {
  peer->closed = 1;
  if (!peer->ep || !ucx->peer_errors) return;
  const ucp_request_param_t parameters = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK,
                                          .flags = UCP_EP_CLOSE_FLAG_FORCE,
                                          .cb.send = on_closed};
  (void)ucp_ep_close_nbx(peer->ep, &parameters);
  peer->ep = NULL;
}

static void close_failed(ucx_endpoint *ucx) {
  int left = 0;
  for (int r = 0; r < ucx->size; r++) {
    ucx_peer *const peer = &ucx->peers[r];
    if (!peer->ep || peer->gone_since == 0 || peer->reason == UCS_OK) continue;
    if (is_gone(ucx, peer))
      close_by_force(ucx, peer);
    else
      left++;
  }
  ucx->to_close = left;
}

static void look_at_processes(ucx_endpoint *ucx) {
  const double time = now();
  if (time - ucx->looked < LOOK_SECONDS) return;
  ucx->looked = time;
  for (int r = 0; r < ucx->size; r++) {
    ucx_peer *const peer = &ucx->peers[r];
    if (peer->process_fd < 0 || !peer->ep || peer->gone_since > 0) continue;
    struct pollfd polled = {.fd = peer->process_fd, .events = POLLIN};
    if (poll(&polled, 1, 0) <= 0) continue;
    mark_gone(peer, UCS_ERR_CONNECTION_RESET);
    ucx->to_close++;
  }
}

// ---- Control messages

// Whether the message has this form; then *sender is the rank that sent it.
static int is_well_formed(const ucx_endpoint *ucx, const void *header, size_t header_length, size_t length,
                          const ucp_am_recv_param_t *parameters, size_t expected, uint32_t *sender) {
  if (header_length != sizeof(*sender) || length != expected || (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV))
    return 0;
  memcpy(sender, header, sizeof(*sender));
  return *sender < (uint32_t)ucx->size && *sender != (uint32_t)ucx->rank;
}

static ucs_status_t on_control(void *argument, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *parameters) {
  ucx_endpoint *const ucx = argument;
  uint32_t sender;
  if (!is_well_formed(ucx, header, header_length, length, parameters, sizeof(fp8comm_control), &sender)) return UCS_OK;
  ucx->peers[sender].heard = 1;
  incoming *const in = malloc(sizeof(*in));
  // Lost, as on a bad line; whoever sent it has a timeout.
  if (!in) return UCS_OK;
  in->next = NULL;
  in->peer = (int)sender;
  memcpy(&in->message, data, sizeof(in->message));
  in->message.text[sizeof(in->message.text) - 1] = 0;
  *ucx->last_incoming = in;
  ucx->last_incoming = &in->next;
  return UCS_OK;
}

static ucs_status_t on_goodbye(void *argument, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *parameters) {
  ucx_endpoint *const ucx = argument;
  uint32_t sender;
  (void)data;
  if (is_well_formed(ucx, header, header_length, length, parameters, 0, &sender))
    mark_gone(&ucx->peers[sender], UCS_OK);
  return UCS_OK;
}

static void unlink_offer(fp8comm_operation *operation) {
  if (!operation->offer_link) return;
  *operation->offer_link = operation->next_offer;
  if (operation->next_offer) operation->next_offer->offer_link = operation->offer_link;
  operation->offer_link = NULL;
}

// Last, so that messages are read in the order in which they came.
static void link_offer(fp8comm_operation **list, fp8comm_operation *operation) {
  while (*list) list = &(*list)->next_offer;
  operation->next_offer = NULL;
  operation->offer_link = list;
  *list = operation;
}

static ucs_status_t on_receipt(void *argument, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *parameters) {
  ucx_endpoint *const ucx = argument;
  uint32_t sender;
  uint64_t id;
  if (!is_well_formed(ucx, header, header_length, length, parameters, sizeof(id), &sender)) return UCS_OK;
  memcpy(&id, data, sizeof(id));
  for (fp8comm_operation *one = ucx->offered; one; one = one->next_offer) {
    if (one->offer.id != id || one->peer != (int)sender) continue;
    unlink_offer(one);
    break;
  }
  return UCS_OK;
}

static void free_outgoing(outgoing *out) {
  ucx_endpoint *const ucx = out->to->owner;
  out->to->outgoing--;
  if (out->previous)
    out->previous->next = out->next;
  else
    ucx->first_outgoing = out->next;
  if (out->next) out->next->previous = out->previous;
  free(out);
}

static void on_control_sent(void *request, ucs_status_t status, void *user_data) {
  (void)status;
  free_outgoing(user_data);
  ucp_request_free(request);
}

static void send_message(ucx_endpoint *ucx, int rank, unsigned id, const void *data, size_t bytes) {
  ucx_peer *const peer = &ucx->peers[rank];
  if (peer->closed || connect_peer(ucx, rank) != FP8CORE_OK) return;
  outgoing *const out = malloc(sizeof(*out));
  if (!out) return;
  out->to = peer;
  out->sender = (uint32_t)ucx->rank;
  if (bytes > 0) memcpy(&out->data, data, bytes);
  out->previous = NULL;
  out->next = ucx->first_outgoing;
  if (out->next) out->next->previous = out;
  ucx->first_outgoing = out;
  peer->outgoing++;
  const ucp_request_param_t parameters = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                                                          UCP_OP_ATTR_FIELD_USER_DATA,
                                          .flags = UCP_AM_SEND_FLAG_EAGER,
                                          .cb.send = on_control_sent,
                                          .user_data = out};
  const ucs_status_ptr_t request =
    ucp_am_send_nbx(peer->ep, id, &out->sender, sizeof(out->sender), &out->data, bytes, &parameters);
  // Sent already, or failed: of that on_error() learns.
  if (!UCS_PTR_IS_PTR(request)) free_outgoing(out);
}

static void ucx_send_control(fp8comm_endpoint *endpoint, int peer, const fp8comm_control *message) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  if (ucx->unsafe) return;
  send_message(ucx, peer, AM_CONTROL, message, sizeof(*message));
  // On its way even if the caller, who may have failed, calls nothing more.
  (void)ucp_worker_progress(ucx->worker);
}

// ---- Operations

// NULL: no memory.
static fp8comm_operation *take_operation(ucx_endpoint *ucx, int peer, int receives, size_t bytes) {
  fp8comm_operation *taken = ucx->idle;
  if (taken) {
    ucx->idle = taken->next_idle;
  } else {
    taken = malloc(sizeof(*taken));
    if (!taken) return NULL;
    taken->owner = ucx;
    taken->next_made = ucx->made;
    ucx->made = taken;
  }
  taken->next_idle = NULL;
  taken->peer = peer;
  taken->receives = receives;
  taken->request = NULL;
  taken->ended = 0;
  taken->orphaned = 0;
  taken->status = UCS_OK;
  taken->expected = bytes;
  taken->received = 0;
  taken->by_offer = 0;
  taken->offer_link = NULL;
  return taken;
}

static void free_operation(fp8comm_operation *operation) {
  unlink_offer(operation);
  if (operation->request) ucp_request_free(operation->request);
  operation->next_idle = operation->owner->idle;
  operation->owner->idle = operation;
}

static void end_operation(fp8comm_operation *operation, ucs_status_t status) {
  operation->ended = 1;
  operation->status = status;
  if (operation->orphaned) free_operation(operation);
}

static void on_sent(void *request, ucs_status_t status, void *user_data) {
  (void)request;
  end_operation(user_data, status);
}

static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data) {
  (void)request;
  fp8comm_operation *const operation = user_data;
  operation->received = status == UCS_OK ? info->length : 0;
  operation->ended = 1;
  // What is not as long as an offer is a message that the sender took for a small one.
  if (operation->by_offer && status == UCS_OK && !operation->orphaned &&
      operation->received == sizeof(operation->offer)) {
    operation->received = (size_t)operation->offer.bytes;
    if (operation->received == operation->expected) {
      link_offer(&operation->owner->reading, operation);
      return;
    }
  }
  end_operation(operation, status);
}

// Of an operation that has ended; frees it.
static fp8core_status result_of(ucx_endpoint *ucx, fp8comm_operation *operation) {
  const int peer = operation->peer;
  const size_t expected = operation->expected;
  const size_t got = operation->receives ? operation->received : expected;
  const ucs_status_t status = operation->status;
  free_operation(operation);
  if (status == UCS_OK && got == expected) return FP8CORE_OK;
  if (status == UCS_OK) {
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d sent %zu bytes where rank %d expects %zu", peer, got,
                                  ucx->rank, expected);
  }
  if (status == UCS_ERR_MESSAGE_TRUNCATED) {
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d sent more than the %zu bytes that rank %d expects", peer,
                                  expected, ucx->rank);
  }
  mark_gone(&ucx->peers[peer], status);
  return say_gone(ucx, peer);
}

// Another process's device memory cannot be read so.
static int is_by_offer(const ucx_endpoint *ucx, int peer, size_t bytes, fp8comm_memory memory) {
  return bytes >= FP8COMM_CMA_LEAST && memory == FP8COMM_MEMORY_HOST && ucx->peers[peer].reads;
}

static int takes_cuda(const ucx_endpoint *ucx) { return (ucx->memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0; }

// A UCX that knows several kinds of memory looks each address up, which host memory can be spared. It tells device
// memory from managed memory, which travel differently, so that is left to it.
static void describe_memory(const ucx_endpoint *ucx, fp8comm_memory memory, ucp_request_param_t *parameters) {
  if (memory != FP8COMM_MEMORY_HOST || !takes_cuda(ucx)) return;
  parameters->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  parameters->memory_type = UCS_MEMORY_TYPE_HOST;
}

// UCX's part of it, and what follows on an offer.
static int has_ended(const fp8comm_operation *operation) { return operation->ended && !operation->offer_link; }

static fp8core_status ucx_send(fp8comm_endpoint *endpoint, int peer, uint64_t tag, const void *data, size_t bytes,
                               fp8comm_memory memory, fp8comm_operation **operation) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  *operation = NULL;
  if (ucx->peers[peer].gone_since > 0) return say_gone(ucx, peer);
  FP8COMM_TRY(connect_peer(ucx, peer));
  fp8comm_operation *const sending = take_operation(ucx, peer, 0, bytes);
  if (!sending) return no_memory();
  ucp_request_param_t parameters = {
    .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA, .cb.send = on_sent, .user_data = sending};
  describe_memory(ucx, memory, &parameters);
  const ucp_tag_t full_tag = (ucp_tag_t)ucx->rank << FP8COMM_TAG_BITS | tag;
  const void *content = data ? data : "";
  size_t content_bytes = bytes;
  if (is_by_offer(ucx, peer, bytes, memory)) {
    sending->by_offer = 1;
    sending->offer = (offer){(uint64_t)(uintptr_t)data, bytes, ucx->next_offer++};
    link_offer(&ucx->offered, sending);
    content = &sending->offer;
    content_bytes = sizeof(sending->offer);
  }
  const ucs_status_ptr_t request = ucp_tag_send_nbx(ucx->peers[peer].ep, content, content_bytes, full_tag, &parameters);
  if (UCS_PTR_IS_PTR(request)) {
    sending->request = request;
    *operation = sending;
  } else {
    sending->status = UCS_PTR_STATUS(request);
    sending->ended = 1;
    if (sending->status != UCS_OK || !sending->by_offer)
      FP8COMM_TRY(result_of(ucx, sending));
    else
      *operation = sending;
  }
  ucx->bytes_sent += bytes;
  return FP8CORE_OK;
}

static fp8core_status ucx_receive(fp8comm_endpoint *endpoint, int peer, uint64_t tag, void *data, size_t bytes,
                                  fp8comm_memory memory, fp8comm_operation **operation) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  static char nothing;
  *operation = NULL;
  // Connected though nothing is sent, so that UCX looks after the peer. One that has left may have sent before.
  if (ucx->peers[peer].gone_since == 0) FP8COMM_TRY(connect_peer(ucx, peer));
  fp8comm_operation *const receiving = take_operation(ucx, peer, 1, bytes);
  if (!receiving) return no_memory();
  ucp_request_param_t parameters = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                    UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
                                    .cb.recv = on_received,
                                    .user_data = receiving};
  describe_memory(ucx, memory, &parameters);
  const ucp_tag_t full_tag = (ucp_tag_t)peer << FP8COMM_TAG_BITS | tag;
  void *place = data ? data : &nothing;
  size_t place_bytes = bytes;
  if (is_by_offer(ucx, peer, bytes, memory)) {
    receiving->by_offer = 1;
    receiving->place = data;
    place = &receiving->offer;
    place_bytes = sizeof(receiving->offer);
  }
  const ucs_status_ptr_t request =
    ucp_tag_recv_nbx(ucx->worker, place, place_bytes, full_tag, (ucp_tag_t)-1, &parameters);
  // Never complete without the callback, which alone tells the length.
  if (!UCS_PTR_IS_PTR(request)) {
    receiving->status = UCS_PTR_STATUS(request);
    return result_of(ucx, receiving);
  }
  receiving->request = request;
  if (has_ended(receiving)) return result_of(ucx, receiving);
  *operation = receiving;
  return FP8CORE_OK;
}

// At most so long.
static void progress_until_ended(ucx_endpoint *ucx, const fp8comm_operation *operation, double seconds) {
  const double deadline = now() + seconds;
  while (!operation->ended && now() < deadline) {
    if (ucp_worker_progress(ucx->worker) == 0) (void)poll(NULL, 0, 1);
  }
}

static void ucx_cancel(fp8comm_endpoint *endpoint, fp8comm_operation **cancelled) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  fp8comm_operation *const operation = *cancelled;
  *cancelled = NULL;
  if (!operation) return;
  // What reads memory after an offer is this rank, or the peer, which learns of the end in time or reads in vain.
  unlink_offer(operation);
  ucx_peer *const peer = &ucx->peers[operation->peer];
  // Enough for a receive that nothing has matched. UCX cannot cancel anything else: that goes on until it ends by
  // itself, or until the connection is closed under it, which the peer, if it lives, takes for this rank's end.
  // Messages that tell it why go first.
  if (!operation->ended) ucp_request_cancel(ucx->worker, operation->request);
  if (!operation->ended) (void)ucp_worker_progress(ucx->worker);
  if (!operation->ended && !peer->closed) {
    progress_until_ended(ucx, operation, CANCEL_SECONDS);
    if (!operation->ended) close_by_force(ucx, peer);
  }
  progress_until_ended(ucx, operation, FORCE_SECONDS);
  if (operation->ended) {
    free_operation(operation);
    return;
  }
  operation->orphaned = 1;
  // A message that UCX was copying in pieces when the peer stopped.
  if (operation->receives && !operation->by_offer) ucx->unsafe = 1;
}

static fp8core_status ucx_test(fp8comm_endpoint *endpoint, fp8comm_operation **tested, int *done) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  fp8comm_operation *const operation = *tested;
  *done = 1;
  if (!operation) return FP8CORE_OK;
  if (has_ended(operation)) {
    *tested = NULL;
    return result_of(ucx, operation);
  }
  *done = 0;
  // UCX does not know from whom a receive is that nothing has matched.
  if (!is_gone(ucx, &ucx->peers[operation->peer])) return FP8CORE_OK;
  const int peer = operation->peer;
  ucx_cancel(endpoint, tested);
  return say_gone(ucx, peer);
}

static void read_some(ucx_endpoint *ucx, fp8comm_operation *operation) {
  offer *const left = &operation->offer;
  const size_t bytes = left->bytes < READ_BYTES ? (size_t)left->bytes : READ_BYTES;
  const ssize_t got = fp8comm_cma_read(ucx->peers[operation->peer].process, left->address, operation->place, bytes);
  if (got <= 0) {
    unlink_offer(operation);
    end_operation(operation, got < 0 && errno == ESRCH ? UCS_ERR_CONNECTION_RESET : UCS_ERR_IO_ERROR);
    return;
  }
  operation->place += got;
  left->address += (uint64_t)got;
  left->bytes -= (uint64_t)got;
  if (left->bytes > 0) return;
  unlink_offer(operation);
  send_message(ucx, operation->peer, AM_RECEIPT, &left->id, sizeof(left->id));
}

static fp8core_status ucx_progress(fp8comm_endpoint *endpoint) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  if (ucx->unsafe) {
    return fp8core_set_last_error(
      FP8CORE_ERROR_PEER, "UCX could not end a message of a rank that is gone or stopped; expected a new communicator");
  }
  unsigned events;
  while ((events = ucp_worker_progress(ucx->worker)) > 0) {
    // A peer that never ceases to send must not keep the caller from its other work.
    if (ucx->first_incoming || ucx->to_close) break;
  }
  if (events == 0 && ucx->some_gone) ucx->looked_at_all = now();
  if (++ucx->calls % LOOK_CALLS == 0) look_at_processes(ucx);
  if (ucx->to_close) close_failed(ucx);
  for (fp8comm_operation *next, *one = ucx->reading; one; one = next) {
    next = one->next_offer;
    read_some(ucx, one);
  }
  for (incoming *in; (in = ucx->first_incoming);) {
    ucx->first_incoming = in->next;
    if (!ucx->first_incoming) ucx->last_incoming = &ucx->first_incoming;
    ucx->on_control(ucx->on_control_data, in->peer, &in->message);
    free(in);
  }
  return FP8CORE_OK;
}

static void ucx_wait(fp8comm_endpoint *endpoint, int milliseconds) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  if (ucx->reading || ucx->unsafe) return;
  look_at_processes(ucx);
  if (ucx->to_close && milliseconds > 10) milliseconds = 10;
  if (ucx->event_fd < 0) {
    (void)poll(NULL, 0, milliseconds < 1 ? milliseconds : 1);
    return;
  }
  // UCS_ERR_BUSY: there is something to do; perhaps by UCX's own thread, which may want this core.
  if (ucp_worker_arm(ucx->worker) != UCS_OK) {
    (void)sched_yield();
    return;
  }
  struct pollfd polled = {.fd = ucx->event_fd, .events = POLLIN};
  (void)poll(&polled, 1, milliseconds);
}

static int ucx_is_gone(const fp8comm_endpoint *endpoint, int peer) {
  return ((const ucx_endpoint *)endpoint)->peers[peer].gone_since > 0;
}

static fp8core_status ucx_check_cuda(const fp8comm_endpoint *endpoint) {
  if (takes_cuda((const ucx_endpoint *)endpoint)) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                "UCX %s takes no CUDA memory: expected one that was built with CUDA, on a machine with "
                                "a GPU, and cuda among UCX_TLS where that is set",
                                ucp_get_version_string());
}

static uint64_t ucx_bytes_sent(const fp8comm_endpoint *endpoint) {
  return ((const ucx_endpoint *)endpoint)->bytes_sent;
}

// ---- Segments

// UCX's own: System V or POSIX shared memory, without a name that could outlive the process.
static fp8core_status ucx_share(fp8comm_endpoint *endpoint, size_t bytes, fp8comm_segment **segment, void **address,
                                fp8comm_segment_name *name) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  fp8comm_segment *const made = calloc(1, sizeof(*made));
  *segment = NULL;
  if (!made) return no_memory();
  const ucp_mem_map_params_t parameters = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                                           .length = bytes > 0 ? bytes : 1,
                                           .flags = UCP_MEM_MAP_ALLOCATE};
  ucs_status_t status = ucp_mem_map(ucx->context, &parameters, &made->own);
  if (status != UCS_OK) {
    free(made);
    return ucx_failed("ucp_mem_map()", status);
  }
  ucp_mem_attr_t found = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
  void *packed = NULL;
  size_t length = 0;
  const char *call = "ucp_mem_query()";
  status = ucp_mem_query(made->own, &found);
  if (status == UCS_OK) {
    call = "ucp_rkey_pack()";
    status = ucp_rkey_pack(ucx->context, made->own, &packed, &length);
  }
  memset(name, 0, sizeof(*name));
  if (status == UCS_OK && length <= sizeof(name->bytes)) {
    name->address = (uint64_t)(uintptr_t)found.address;
    name->length = (uint32_t)length;
    memcpy(name->bytes, packed, length);
  }
  if (packed) ucp_rkey_buffer_release(packed);
  if (name->length == 0) {
    (void)ucp_mem_unmap(ucx->context, made->own);
    free(made);
    return status == UCS_OK ? fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                                     "UCX: a key of memory has %zu bytes, expected at most %zu", length,
                                                     sizeof(name->bytes))
                            : ucx_failed(call, status);
  }
  *address = found.address;
  *segment = made;
  return FP8CORE_OK;
}

static fp8core_status ucx_attach(fp8comm_endpoint *endpoint, int peer, const fp8comm_segment_name *name,
                                 fp8comm_segment **segment, const void **address) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  *segment = NULL;
  // UCX believes the bytes.
  if (name->length == 0 || name->length > sizeof(name->bytes))
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d has sent a malformed name of memory", peer);
  FP8COMM_TRY(connect_peer(ucx, peer));
  fp8comm_segment *const made = calloc(1, sizeof(*made));
  if (!made) return no_memory();
  void *local = NULL;
  ucs_status_t status = ucp_ep_rkey_unpack(ucx->peers[peer].ep, name->bytes, &made->theirs);
  if (status == UCS_OK) {
    status = ucp_rkey_ptr(made->theirs, name->address, &local);
    if (status != UCS_OK) ucp_rkey_destroy(made->theirs);
  }
  if (status != UCS_OK) {
    free(made);
    return ucx_failed("ucp_rkey_ptr()", status);
  }
  *address = local;
  *segment = made;
  return FP8CORE_OK;
}

static void ucx_detach(fp8comm_endpoint *endpoint, fp8comm_segment **segment) {
  fp8comm_segment *const gone = *segment;
  *segment = NULL;
  // UCX asks for this before the connection's end, which a peer that is gone does not wait for. Keys hold what they
  // need of the worker, not of the connection (1.13).
  if (gone->theirs) ucp_rkey_destroy(gone->theirs);
  if (gone->own) (void)ucp_mem_unmap(((ucx_endpoint *)endpoint)->context, gone->own);
  free(gone);
}

// ---- Creation and its end

// Waits, no longer than a moment, until everything sent has left, but not for peers that are gone: what is still on its
// way to them would be read by nobody.
static void say_goodbye(ucx_endpoint *ucx) {
  const double deadline = now() + LINGER_SECONDS;
  const ucp_request_param_t parameters = {0};
  for (int r = 0; r < ucx->size; r++) {
    ucx_peer *const peer = &ucx->peers[r];
    // One that has said goodbye may wait for this rank's.
    if (peer->gone_since > 0 ? peer->reason != UCS_OK || !peer->ep : !(peer->ep || peer->heard)) continue;
    send_message(ucx, r, AM_GOODBYE, NULL, 0);
    if (!peer->ep) continue;
    peer->flush = ucp_ep_flush_nbx(peer->ep, &parameters);
    if (!UCS_PTR_IS_PTR(peer->flush)) peer->flush = NULL;
  }
  for (int waiting = 1; waiting;) {
    waiting = 0;
    const int moved = ucp_worker_progress(ucx->worker) > 0;
    for (int r = 0; r < ucx->size; r++) {
      ucx_peer *const peer = &ucx->peers[r];
      if (!peer->flush) continue;
      if (ucp_request_check_status(peer->flush) != UCS_INPROGRESS) {
        ucp_request_free(peer->flush);
        peer->flush = NULL;
      } else if (peer->gone_since == 0) {
        waiting = 1;
      }
    }
    if (now() >= deadline) break;
    if (waiting && !moved) (void)poll(NULL, 0, 1);
  }
}

static void ucx_destroy(fp8comm_endpoint *endpoint) {
  ucx_endpoint *const ucx = (ucx_endpoint *)endpoint;
  if (ucx->worker && ucx->peers) {
    if (!ucx->unsafe) say_goodbye(ucx);
    for (int r = 0; r < ucx->size; r++) {
      close_by_force(ucx, &ucx->peers[r]);
      if (ucx->peers[r].process != 0 && ucx->peers[r].process_fd >= 0) (void)close(ucx->peers[r].process_fd);
      if (ucx->peers[r].flush) ucp_request_free(ucx->peers[r].flush);
    }
    for (int i = 0; i < 100 && !ucx->unsafe && ucp_worker_progress(ucx->worker) > 0; i++) continue;
  }
  if (ucx->worker) ucp_worker_destroy(ucx->worker);
  if (ucx->context) ucp_cleanup(ucx->context);
  while (ucx->first_outgoing) free_outgoing(ucx->first_outgoing);
  for (incoming *in; (in = ucx->first_incoming);) {
    ucx->first_incoming = in->next;
    free(in);
  }
  for (fp8comm_operation *operation; (operation = ucx->made);) {
    ucx->made = operation->next_made;
    free(operation);
  }
  free(ucx->addresses);
  free(ucx->peers);
  free(ucx);
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3);
  return hash;
}

// Of a namespace of this process on this boot of the machine: the same on ranks that share it; 0 where that is unknown.
static uint64_t hash_space(const char *path) {
  char boot[64] = "";
  FILE *const file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (!file) return 0;
  const int known = fgets(boot, sizeof(boot), file) != NULL;
  (void)fclose(file);
  struct stat space;
  if (!known || stat(path, &space) != 0) return 0;
  uint64_t hash = hash_bytes(UINT64_C(0xcbf29ce484222325), boot, strlen(boot));
  hash = hash_bytes(hash, &space.st_ino, sizeof(space.st_ino));
  return hash_bytes(hash, &space.st_dev, sizeof(space.st_dev));
}

// What the user sets in the environment comes first.
static void configure(ucp_config_t *config, const char *name, const char *variable, const char *value) {
  // A name that another version of UCX does not know changes nothing.
  if (!getenv(variable)) (void)ucp_config_modify(config, name, value);
}

static fp8core_status open_worker(ucx_endpoint *ucx, const fp8comm_endpoint_options *options, int one_host) {
  // A library prints nothing. UCX would, of each peer that is gone, what the statuses tell, and of options that the
  // transports in use have not.
  if (!getenv("UCX_LOG_LEVEL")) (void)ucs_global_opts_set_value("LOG_LEVEL", "fatal");
  ucp_config_t *config;
  ucs_status_t status = ucp_config_read(NULL, NULL, &config);
  if (status != UCS_OK) return ucx_failed("ucp_config_read()", status);
  // Shared memory has it off by default. By this name UCX takes it for both kinds, POSIX and System V, though users
  // write UCX_POSIX_ERROR_HANDLING.
  configure(config, "MM_ERROR_HANDLING", "UCX_MM_ERROR_HANDLING", "y");
  // A killed process in shared memory is seen by these alone.
  const double interval = options->timeout_seconds / 8;
  char text[32];
  (void)snprintf(text, sizeof(text), "%dms", interval > 5 ? 5000 : interval < 0.1 ? 100 : (int)(interval * 1000));
  configure(config, "KEEPALIVE_INTERVAL", "UCX_KEEPALIVE_INTERVAL", text);
  // Ranks on one machine listen to no other.
  if (one_host) configure(config, "NET_DEVICES", "UCX_NET_DEVICES", "lo");

  const ucp_params_t parameters = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS |
                                                 UCP_PARAM_FIELD_NAME,
                                   .features = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                                   .estimated_num_eps = (size_t)options->size,
                                   .name = "fp8comm"};
  status = ucp_init(&parameters, config, &ucx->context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    ucx->context = NULL;
    return ucx_failed("ucp_init()", status);
  }
  ucp_context_attr_t attributes = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
  status = ucp_context_query(ucx->context, &attributes);
  if (status != UCS_OK) return ucx_failed("ucp_context_query()", status);
  ucx->memory_types = attributes.memory_types;
  const ucp_worker_params_t worker_parameters = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                                 .thread_mode = UCS_THREAD_MODE_SERIALIZED};
  status = ucp_worker_create(ucx->context, &worker_parameters, &ucx->worker);
  if (status != UCS_OK) {
    char variables[VARIABLES_CHARS];
    ucx->worker = NULL;
    return fp8core_set_last_error(status == UCS_ERR_NO_MEMORY ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_PEER,
                                  "UCX: ucp_worker_create() failed: %s; where /dev/shm is full or small (10 MiB a rank "
                                  "are wanted), UCX_TLS=tcp,self does without%s",
                                  ucs_status_string(status), say_variables(variables, sizeof(variables)));
  }
  if (ucp_worker_get_efd(ucx->worker, &ucx->event_fd) != UCS_OK) ucx->event_fd = -1;
  const struct {
    unsigned id;
    ucp_am_recv_callback_t callback;
  } handlers[] = {{AM_CONTROL, on_control}, {AM_GOODBYE, on_goodbye}, {AM_RECEIPT, on_receipt}};
  for (size_t i = 0; i < sizeof(handlers) / sizeof(handlers[0]); i++) {
    const ucp_am_handler_param_t handler = {
      .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
      .id = handlers[i].id,
      .cb = handlers[i].callback,
      .arg = ucx};
    status = ucp_worker_set_am_recv_handler(ucx->worker, &handler);
    if (status != UCS_OK) return ucx_failed("ucp_worker_set_am_recv_handler()", status);
  }
  return FP8CORE_OK;
}

static fp8core_status gather(const fp8comm_endpoint_options *options, const void *send, void *receive, size_t bytes) {
  if (options->all_gather(options->all_gather_data, send, receive, bytes) == 0) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "the out-of-band all-gather failed");
}

// The first that ranks tell each other.
typedef struct introduction {
  // Ranks with the same one reach each other through one loopback interface. 0: unknown.
  uint64_t network;
  // Ranks with the same one know each other's processes by the same number. 0: unknown.
  uint64_t processes;
  int64_t process;
  uint64_t canary_address;
  uint64_t canary;
} introduction;

typedef struct readiness {
  // 0: UCX has failed.
  uint64_t address_bytes;
  // Whether the rank can read the memory of every rank with its number of `processes`.
  uint64_t reads;
} readiness;

static int reads_all(const ucx_endpoint *ucx, const introduction *ranks) {
  for (int r = 0; r < ucx->size; r++) {
    uint64_t canary = 0;
    if (r == ucx->rank || ranks[r].processes != ranks[ucx->rank].processes) continue;
    if (fp8comm_cma_read((pid_t)ranks[r].process, ranks[r].canary_address, &canary, sizeof(canary)) !=
          (ssize_t)sizeof(canary) ||
        canary != ranks[r].canary)
      return 0;
  }
  return 1;
}

// Every rank takes part in every all-gather, also one that has failed: it has an address of no bytes.
static fp8core_status exchange_readiness(ucx_endpoint *ucx, const fp8comm_endpoint_options *options,
                                         introduction *ranks, readiness *ready, ucp_address_t **address,
                                         size_t *length) {
  introduction own = {.network = hash_space("/proc/self/ns/net"), .process = getpid()};
  own.processes = hash_space("/proc/self/ns/pid");
  ucx->canary = hash_bytes(own.network, &own.process, sizeof(own.process));
  own.canary = ucx->canary;
  own.canary_address = (uint64_t)(uintptr_t)&ucx->canary;
  FP8COMM_TRY(gather(options, &own, ranks, sizeof(own)));
  int one_host = own.network != 0;
  for (int r = 0; r < ucx->size; r++) one_host = one_host && ranks[r].network == own.network;

  fp8core_status opened = open_worker(ucx, options, one_host);
  if (opened == FP8CORE_OK) {
    const ucs_status_t found = ucp_worker_get_address(ucx->worker, address, length);
    if (found != UCS_OK) {
      *address = NULL;
      opened = ucx_failed("ucp_worker_get_address()", found);
    }
  }
  readiness mine = {0};
  if (opened == FP8CORE_OK) mine.address_bytes = *length;
  mine.reads = own.processes != 0 && fp8comm_cma_is_allowed() && reads_all(ucx, ranks);
  if (opened != FP8CORE_OK) {
    // In words of its own, whatever becomes of the all-gather.
    (void)options->all_gather(options->all_gather_data, &mine, ready, sizeof(mine));
    return opened;
  }
  FP8COMM_TRY(gather(options, &mine, ready, sizeof(mine)));
  for (int r = 0; r < ucx->size; r++) {
    if (ready[r].address_bytes == 0 || ready[r].address_bytes > ADDRESS_BYTES_LIMIT)
      return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d has no UCX address: UCX failed there", r);
    if (ready[r].address_bytes > ucx->address_bytes) ucx->address_bytes = (size_t)ready[r].address_bytes;
    ucx->peers[r].owner = ucx;
    ucx->peers[r].process_fd = -1;
    if (r == ucx->rank || own.processes == 0 || ranks[r].processes != own.processes) continue;
    ucx->peers[r].process = (pid_t)ranks[r].process;
    ucx->peers[r].reads = mine.reads && ready[r].reads;
  }
  return FP8CORE_OK;
}

static fp8core_status exchange_addresses(ucx_endpoint *ucx, const fp8comm_endpoint_options *options) {
  const size_t size = (size_t)options->size;
  introduction *const ranks = calloc(size, sizeof(*ranks));
  readiness *const ready = calloc(size, sizeof(*ready));
  ucp_address_t *address = NULL;
  size_t length = 0;
  uint8_t *own = NULL;
  fp8core_status status;
  ucx->peers = calloc(size, sizeof(ucx->peers[0]));
  if (!ranks || !ready || !ucx->peers)
    status = no_memory();
  else
    status = exchange_readiness(ucx, options, ranks, ready, &address, &length);
  if (status == FP8CORE_OK) {
    own = calloc(1, ucx->address_bytes);
    ucx->addresses = malloc(size * ucx->address_bytes);
    if (!own || !ucx->addresses) status = no_memory();
  }
  if (status == FP8CORE_OK) {
    memcpy(own, address, length);
    status = gather(options, own, ucx->addresses, ucx->address_bytes);
  }
  free(own);
  free(ranks);
  free(ready);
  if (address) ucp_worker_release_address(ucx->worker, address);
  return status;
}

static fp8core_status ucx_create(fp8comm_endpoint **endpoint, const fp8comm_endpoint_options *options) {
  *endpoint = NULL;
  ucx_endpoint *const ucx = calloc(1, sizeof(*ucx));
  if (!ucx) return no_memory();
  ucx->base.transport = &fp8comm_ucx_transport;
  ucx->rank = options->rank;
  ucx->size = options->size;
  ucx->on_control = options->on_control;
  ucx->on_control_data = options->on_control_data;
  ucx->event_fd = -1;
  ucx->peer_errors = 1;
  ucx->last_incoming = &ucx->first_incoming;
  const fp8core_status status = exchange_addresses(ucx, options);
  if (status != FP8CORE_OK) {
    ucx_destroy(&ucx->base);
    return status;
  }
  *endpoint = &ucx->base;
  return FP8CORE_OK;
}

const fp8comm_transport fp8comm_ucx_transport = {
  .name = "ucx",
  .create = ucx_create,
  .destroy = ucx_destroy,
  .send = ucx_send,
  .receive = ucx_receive,
  .progress = ucx_progress,
  .test = ucx_test,
  .cancel = ucx_cancel,
  .send_control = ucx_send_control,
  .wait = ucx_wait,
  .is_gone = ucx_is_gone,
  .check_cuda = ucx_check_cuda,
  .bytes_sent = ucx_bytes_sent,
  .share = ucx_share,
  .attach = ucx_attach,
  .detach = ucx_detach,
};
