#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

// Messages up to this size are copied when they are sent, so that the sender need not wait for the receiver.
#define EAGER_BYTES 4096

// A send that has met no receive, or a receive that has met no send. Changed under the lock of the receiver's mailbox;
// `state` is also read without it, by the owner.
struct fp8comm_operation {
  fp8comm_operation *next;
  // The sender.
  int peer;
  int target;
  int sends;
  uint64_t tag;
  const void *source;
  void *destination;
  size_t bytes;
  _Atomic int state;
  // What a receive met that is not what it expects.
  size_t found_bytes;
  // An eager send: nobody tests it, the receiver frees it. Its data lies behind it.
  int eager;
};

typedef enum { WAITING, COPYING, DONE, WRONG_SIZE, PEER_LEFT } operation_state;

// Freed by the last that holds it. In the hub's list, under its lock.
struct fp8comm_segment {
  struct fp8comm_segment *next;
  uint64_t id;
  int holds;
  void *memory;
};

typedef struct queue {
  fp8comm_operation *first;
  fp8comm_operation *last;
} queue;

typedef struct control_node {
  struct control_node *next;
  int peer;
  fp8comm_control message;
} control_node;

typedef struct mailbox {
  pthread_mutex_t lock;
  // `events` has grown, or a copy has ended.
  pthread_cond_t changed;
  uint64_t events;
  _Atomic int left;
  queue receives;
  queue sends;
  control_node *controls;
  control_node *last_control;
} mailbox;

struct fp8comm_hub {
  pthread_mutex_t segments_lock;
  struct fp8comm_segment *segments;
  uint64_t segment_ids;
  int size;
  _Atomic int endpoints;
  mailbox *mailboxes;
};

typedef struct threads_endpoint {
  fp8comm_endpoint base;
  fp8comm_hub *hub;
  int rank;
  fp8comm_control_callback on_control;
  void *on_control_data;
  uint64_t bytes_sent;
  // Events of the own mailbox that the last progress() has seen.
  uint64_t events_seen;
} threads_endpoint;

static threads_endpoint *of(fp8comm_endpoint *endpoint) { return (threads_endpoint *)endpoint; }

static fp8core_status no_memory(size_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
}

fp8core_status fp8comm_hub_create(int size, fp8comm_hub **hub) {
  *hub = calloc(1, sizeof(**hub));
  if (!*hub) return no_memory(sizeof(**hub));
  (*hub)->size = size;
  (*hub)->mailboxes = calloc((size_t)size, sizeof(*(*hub)->mailboxes));
  if (!(*hub)->mailboxes) {
    free(*hub);
    *hub = NULL;
    return no_memory((size_t)size * sizeof(mailbox));
  }
  pthread_condattr_t attributes;
  (void)pthread_mutex_init(&(*hub)->segments_lock, NULL);
  (void)pthread_condattr_init(&attributes);
  (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  for (int i = 0; i < size; i++) {
    (void)pthread_mutex_init(&(*hub)->mailboxes[i].lock, NULL);
    (void)pthread_cond_init(&(*hub)->mailboxes[i].changed, &attributes);
  }
  (void)pthread_condattr_destroy(&attributes);
  return FP8CORE_OK;
}

void fp8comm_hub_destroy(fp8comm_hub *hub) {
  for (int i = 0; i < hub->size; i++) {
    mailbox *box = &hub->mailboxes[i];
    for (fp8comm_operation *next, *one = box->sends.first; one; one = next) {
      next = one->next;
      free(one);
    }
    for (control_node *next, *one = box->controls; one; one = next) {
      next = one->next;
      free(one);
    }
    (void)pthread_mutex_destroy(&box->lock);
    (void)pthread_cond_destroy(&box->changed);
  }
  (void)pthread_mutex_destroy(&hub->segments_lock);
  free(hub->mailboxes);
  free(hub);
}

static void append(queue *list, fp8comm_operation *operation) {
  operation->next = NULL;
  if (list->last) {
    list->last->next = operation;
  } else {
    list->first = operation;
  }
  list->last = operation;
}

static void unlink_operation(queue *list, fp8comm_operation *before, fp8comm_operation *operation) {
  if (before) {
    before->next = operation->next;
  } else {
    list->first = operation->next;
  }
  if (list->last == operation) list->last = before;
}

// Takes the first of this peer and tag out of the list; NULL: there is none.
static fp8comm_operation *take(queue *list, int peer, uint64_t tag) {
  fp8comm_operation *before = NULL;
  for (fp8comm_operation *one = list->first; one; before = one, one = one->next) {
    if (one->peer != peer || one->tag != tag) continue;
    unlink_operation(list, before, one);
    return one;
  }
  return NULL;
}

// Takes this one out of the list, if it is there.
static int take_this(queue *list, const fp8comm_operation *operation) {
  fp8comm_operation *before = NULL;
  for (fp8comm_operation *one = list->first; one; before = one, one = one->next) {
    if (one != operation) continue;
    unlink_operation(list, before, one);
    return 1;
  }
  return 0;
}

static void notify(mailbox *box) {
  box->events++;
  (void)pthread_cond_broadcast(&box->changed);
}

// The owner may free the operation as soon as it sees the state, so that its mailbox is told after.
static void end(fp8comm_hub *hub, int owner, fp8comm_operation *operation, operation_state state) {
  mailbox *box = &hub->mailboxes[owner];
  (void)pthread_mutex_lock(&box->lock);
  atomic_store_explicit(&operation->state, state, memory_order_release);
  notify(box);
  (void)pthread_mutex_unlock(&box->lock);
}

static fp8core_status threads_send(fp8comm_endpoint *endpoint, int peer, uint64_t tag, const void *data, size_t bytes,
                                   fp8comm_memory memory, fp8comm_operation **operation) {
  threads_endpoint *self = of(endpoint);
  (void)memory;
  mailbox *box = &self->hub->mailboxes[peer];
  *operation = NULL;
  (void)pthread_mutex_lock(&box->lock);
  if (atomic_load(&box->left)) {
    (void)pthread_mutex_unlock(&box->lock);
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d has left", peer);
  }
  self->bytes_sent += bytes;
  fp8comm_operation *receive = take(&box->receives, self->rank, tag);
  if (receive) {
    receive->found_bytes = bytes;
    atomic_store_explicit(&receive->state, COPYING, memory_order_relaxed);
    (void)pthread_mutex_unlock(&box->lock);
    const int fits = receive->bytes == bytes;
    if (fits && bytes > 0) memcpy(receive->destination, data, bytes);
    end(self->hub, peer, receive, fits ? DONE : WRONG_SIZE);
    return FP8CORE_OK;
  }
  const int eager = bytes <= EAGER_BYTES;
  fp8comm_operation *send = malloc(sizeof(*send) + (eager ? bytes : 0));
  if (!send) {
    (void)pthread_mutex_unlock(&box->lock);
    return no_memory(sizeof(*send) + bytes);
  }
  memset(send, 0, sizeof(*send));
  send->peer = self->rank;
  send->target = peer;
  send->sends = 1;
  send->tag = tag;
  send->bytes = bytes;
  send->eager = eager;
  send->source = eager ? (const void *)(send + 1) : data;
  if (eager && bytes > 0) memcpy(send + 1, data, bytes);
  append(&box->sends, send);
  notify(box);
  (void)pthread_mutex_unlock(&box->lock);
  if (!eager) *operation = send;
  return FP8CORE_OK;
}

static fp8core_status wrong_size(int peer, size_t found, size_t expected) {
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d sent %zu bytes, expected %zu", peer, found, expected);
}

static fp8core_status threads_receive(fp8comm_endpoint *endpoint, int peer, uint64_t tag, void *data, size_t bytes,
                                      fp8comm_memory memory, fp8comm_operation **operation) {
  threads_endpoint *self = of(endpoint);
  (void)memory;
  mailbox *box = &self->hub->mailboxes[self->rank];
  *operation = NULL;
  fp8comm_operation *receive = calloc(1, sizeof(*receive));
  if (!receive) return no_memory(sizeof(*receive));
  receive->peer = peer;
  receive->tag = tag;
  receive->destination = data;
  receive->bytes = bytes;
  (void)pthread_mutex_lock(&box->lock);
  fp8comm_operation *send = take(&box->sends, peer, tag);
  if (!send) {
    append(&box->receives, receive);
    (void)pthread_mutex_unlock(&box->lock);
    *operation = receive;
    return FP8CORE_OK;
  }
  atomic_store_explicit(&send->state, COPYING, memory_order_relaxed);
  (void)pthread_mutex_unlock(&box->lock);
  free(receive);
  const size_t found = send->bytes;
  if (found == bytes && bytes > 0) memcpy(data, send->source, bytes);
  // A sender of the wrong size has done nothing that it could be told of; the receiver fails.
  if (send->eager) {
    free(send);
  } else {
    end(self->hub, peer, send, DONE);
  }
  return found == bytes ? FP8CORE_OK : wrong_size(peer, found, bytes);
}

static fp8core_status threads_progress(fp8comm_endpoint *endpoint) {
  threads_endpoint *self = of(endpoint);
  mailbox *box = &self->hub->mailboxes[self->rank];
  (void)pthread_mutex_lock(&box->lock);
  self->events_seen = box->events;
  control_node *nodes = box->controls;
  box->controls = NULL;
  box->last_control = NULL;
  (void)pthread_mutex_unlock(&box->lock);
  while (nodes) {
    control_node *next = nodes->next;
    self->on_control(self->on_control_data, nodes->peer, &nodes->message);
    free(nodes);
    nodes = next;
  }
  return FP8CORE_OK;
}

// A receive whose sender has left will not end, unless the message came before.
static int has_left(const threads_endpoint *self, const fp8comm_operation *receive) {
  if (!atomic_load(&self->hub->mailboxes[receive->peer].left)) return 0;
  mailbox *box = &self->hub->mailboxes[self->rank];
  (void)pthread_mutex_lock(&box->lock);
  const int taken = take_this(&box->receives, receive);
  (void)pthread_mutex_unlock(&box->lock);
  return taken;
}

static fp8core_status threads_test(fp8comm_endpoint *endpoint, fp8comm_operation **operation, int *done) {
  fp8comm_operation *tested = *operation;
  int state = atomic_load_explicit(&tested->state, memory_order_acquire);
  *done = 0;
  if (state == WAITING && !tested->sends && has_left(of(endpoint), tested)) state = PEER_LEFT;
  if (state == WAITING || state == COPYING) return FP8CORE_OK;
  const fp8comm_operation ended = {
    .peer = tested->sends ? tested->target : tested->peer, .bytes = tested->bytes, .found_bytes = tested->found_bytes};
  free(tested);
  *operation = NULL;
  *done = 1;
  if (state == WRONG_SIZE) return wrong_size(ended.peer, ended.found_bytes, ended.bytes);
  if (state == PEER_LEFT)
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d has left before the exchange was complete", ended.peer);
  return FP8CORE_OK;
}

static void threads_cancel(fp8comm_endpoint *endpoint, fp8comm_operation **operation) {
  threads_endpoint *self = of(endpoint);
  fp8comm_operation *gone = *operation;
  mailbox *box = &self->hub->mailboxes[gone->sends ? gone->target : self->rank];
  (void)pthread_mutex_lock(&box->lock);
  (void)take_this(gone->sends ? &box->sends : &box->receives, gone);
  (void)pthread_mutex_unlock(&box->lock);
  // What is no longer in the list is being copied, or has ended.
  while (atomic_load_explicit(&gone->state, memory_order_acquire) == COPYING) (void)sched_yield();
  free(gone);
  *operation = NULL;
}

static void threads_send_control(fp8comm_endpoint *endpoint, int peer, const fp8comm_control *message) {
  threads_endpoint *self = of(endpoint);
  mailbox *box = &self->hub->mailboxes[peer];
  control_node *node = malloc(sizeof(*node));
  if (!node) return;
  node->next = NULL;
  node->peer = self->rank;
  node->message = *message;
  (void)pthread_mutex_lock(&box->lock);
  if (box->controls) {
    box->last_control->next = node;
  } else {
    box->controls = node;
  }
  box->last_control = node;
  notify(box);
  (void)pthread_mutex_unlock(&box->lock);
}

static void threads_wait(fp8comm_endpoint *endpoint, int milliseconds) {
  threads_endpoint *self = of(endpoint);
  mailbox *box = &self->hub->mailboxes[self->rank];
  struct timespec until;
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += (long)milliseconds * 1000000;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  (void)pthread_mutex_lock(&box->lock);
  while (box->events == self->events_seen && pthread_cond_timedwait(&box->changed, &box->lock, &until) != ETIMEDOUT) {
  }
  (void)pthread_mutex_unlock(&box->lock);
}

static int threads_is_gone(const fp8comm_endpoint *endpoint, int peer) {
  return atomic_load(&((const threads_endpoint *)endpoint)->hub->mailboxes[peer].left);
}

static uint64_t threads_bytes_sent(const fp8comm_endpoint *endpoint) {
  return ((const threads_endpoint *)endpoint)->bytes_sent;
}

static fp8core_status threads_share(fp8comm_endpoint *endpoint, size_t bytes, fp8comm_segment **segment, void **address,
                                    fp8comm_segment_name *name) {
  fp8comm_hub *hub = of(endpoint)->hub;
  fp8comm_segment *made = calloc(1, sizeof(*made));
  *segment = NULL;
  if (made) made->memory = fp8comm_allocate(bytes);
  if (!made || !made->memory) {
    free(made);
    return no_memory(bytes);
  }
  made->holds = 1;
  (void)pthread_mutex_lock(&hub->segments_lock);
  made->id = hub->segment_ids++;
  made->next = hub->segments;
  hub->segments = made;
  (void)pthread_mutex_unlock(&hub->segments_lock);
  memset(name, 0, sizeof(*name));
  name->length = sizeof(made->id);
  memcpy(name->bytes, &made->id, sizeof(made->id));
  *address = made->memory;
  *segment = made;
  return FP8CORE_OK;
}

static fp8core_status threads_attach(fp8comm_endpoint *endpoint, int peer, const fp8comm_segment_name *name,
                                     fp8comm_segment **segment, const void **address) {
  fp8comm_hub *hub = of(endpoint)->hub;
  uint64_t id;
  memcpy(&id, name->bytes, sizeof(id));
  (void)pthread_mutex_lock(&hub->segments_lock);
  fp8comm_segment *found = hub->segments;
  while (found && found->id != id) found = found->next;
  if (found) found->holds++;
  (void)pthread_mutex_unlock(&hub->segments_lock);
  *segment = found;
  // Its owner has failed since it told the name.
  if (!found) return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d has let go of what it shared", peer);
  *address = found->memory;
  return FP8CORE_OK;
}

static void threads_detach(fp8comm_endpoint *endpoint, fp8comm_segment **segment) {
  fp8comm_hub *hub = of(endpoint)->hub;
  fp8comm_segment *gone = *segment, **link = &hub->segments;
  *segment = NULL;
  (void)pthread_mutex_lock(&hub->segments_lock);
  const int is_last = --gone->holds == 0;
  if (is_last) {
    while (*link != gone) link = &(*link)->next;
    *link = gone->next;
  }
  (void)pthread_mutex_unlock(&hub->segments_lock);
  if (!is_last) return;
  free(gone->memory);
  free(gone);
}

static void threads_destroy(fp8comm_endpoint *endpoint) {
  threads_endpoint *self = of(endpoint);
  fp8comm_hub *hub = self->hub;
  mailbox *box = &hub->mailboxes[self->rank];
  (void)pthread_mutex_lock(&box->lock);
  atomic_store(&box->left, 1);
  fp8comm_operation *sends = box->sends.first;
  box->sends.first = NULL;
  box->sends.last = NULL;
  // A sender that cancels looks at the list, then at the state.
  for (fp8comm_operation *one = sends; one; one = one->next)
    atomic_store_explicit(&one->state, COPYING, memory_order_relaxed);
  (void)pthread_mutex_unlock(&box->lock);
  for (fp8comm_operation *next; sends; sends = next) {
    next = sends->next;
    if (sends->eager) {
      free(sends);
    } else {
      end(hub, sends->peer, sends, PEER_LEFT);
    }
  }
  for (int i = 0; i < hub->size; i++) {
    (void)pthread_mutex_lock(&hub->mailboxes[i].lock);
    notify(&hub->mailboxes[i]);
    (void)pthread_mutex_unlock(&hub->mailboxes[i].lock);
  }
  free(self);
  if (atomic_fetch_sub(&hub->endpoints, 1) == 1) fp8comm_hub_destroy(hub);
}

static fp8core_status threads_create(fp8comm_endpoint **endpoint, const fp8comm_endpoint_options *options) {
  (void)options;
  *endpoint = NULL;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                "transport \"threads\" is that of fp8comm_threads_create()");
}

static const fp8comm_transport threads_transport = {
  .name = "threads",
  .create = threads_create,
  .destroy = threads_destroy,
  .send = threads_send,
  .receive = threads_receive,
  .progress = threads_progress,
  .test = threads_test,
  .cancel = threads_cancel,
  .send_control = threads_send_control,
  .wait = threads_wait,
  .is_gone = threads_is_gone,
  .check_cuda = NULL,
  .bytes_sent = threads_bytes_sent,
  .share = threads_share,
  .attach = threads_attach,
  .detach = threads_detach,
};

fp8core_status fp8comm_hub_endpoint(fp8comm_hub *hub, const fp8comm_endpoint_options *options,
                                    fp8comm_endpoint **endpoint) {
  threads_endpoint *self = calloc(1, sizeof(*self));
  *endpoint = NULL;
  if (!self) return no_memory(sizeof(*self));
  self->base.transport = &threads_transport;
  self->hub = hub;
  self->rank = options->rank;
  self->on_control = options->on_control;
  self->on_control_data = options->on_control_data;
  (void)atomic_fetch_add(&hub->endpoints, 1);
  *endpoint = &self->base;
  return FP8CORE_OK;
}
