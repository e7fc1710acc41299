// The all-gather over TCP: a star around rank 0, which listens until it has all ranks. What it hears is from anyone who
// can reach the address; wire.h says how ranks are told from strangers. No socket ever blocks: every wait is a poll()
// with what is left of the timeout.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "../transport.h"
#include "bootstrap.h"
#include "wire.h"

// Room for "[address%interface]:port".
#define ADDRESS_CHARS 112
// Addresses of one name that are tried.
#define ADDRESS_LIMIT 16
// Connections that have not said yet who they are. A stranger can drive out those of others by more than this, who then
// connect again.
#define PENDING_LIMIT 256
// Why a connection was refused.
#define REASON_CHARS 96
#define SECOND INT64_C(1000000000)
// Between two looks at whether the waiting is to end.
#define LOOK_MILLISECONDS 100
// How often rank 0 asks who listens at its port, until it is told, and how long it waits for an answer.
#define KNOCKS 3
#define KNOCK_PATIENCE (SECOND / 2)

typedef struct peer {
  // -1: not connected.
  int fd;
  char address[ADDRESS_CHARS];
  fp8comm_wire_session session;
  fp8comm_wire_reader reader;
  // Of the frame that is sent: header, payload, tag.
  uint8_t header[FP8COMM_WIRE_HEADER_BYTES];
  uint8_t tag[FP8COMM_SHA256_BYTES];
  uint64_t sent;
  int finished;
} peer;

typedef struct tcp_bootstrap {
  fp8comm_bootstrap base;
  fp8comm_wait_options wait;
  // When the call underway began to wait; whether it was told to give up.
  int64_t waiting_since;
  int interrupted;
  char *secret_bytes;
  fp8comm_wire_secret secret;
  // As the user gave it, for messages: "host:port".
  char *place;
  int has_secret;
  uint32_t sequence;
  int broken;
  // Connections to be drained before they are closed, so that what was sent last is not lost.
  int draining;
  // Rank 0: for how long another program had the port; whether that is known to be a rank 0 too.
  int64_t port_was_taken;
  int has_rival;
  // Rank 0: [ranks], of which the first is that of another program that has the port. Else one: rank 0.
  peer *peers;
  struct pollfd *polled;
} tcp_bootstrap;

typedef struct address_list {
  int count;
  struct sockaddr_storage addresses[ADDRESS_LIMIT];
  socklen_t lengths[ADDRESS_LIMIT];
} address_list;

// A connection that has not said yet who it is.
typedef struct pending {
  int fd;
  int64_t deadline;
  char address[ADDRESS_CHARS];
  fp8comm_wire_nonces nonces;
  size_t have;
  uint8_t hello[FP8COMM_WIRE_HELLO_BYTES];
} pending;

typedef struct doorkeeper {
  int listeners[ADDRESS_LIMIT];
  int listener_count;
  pending *pending;
  int pending_count;
  // Of whom no rank came.
  uint64_t refused;
  char last_refusal[ADDRESS_CHARS + REASON_CHARS + 8];
  int64_t patience;
} doorkeeper;

static int64_t now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static int64_t deadline_after(double seconds) {
  // Longer than any run; the sum cannot overflow.
  return now() + (seconds < 1e9 ? (int64_t)(seconds * (double)SECOND) : INT64_C(1000000000) * SECOND);
}

// Milliseconds until `deadline`, or the next look, for poll(); rounded up so that no wait spins.
static int milliseconds_until(int64_t deadline) {
  const int64_t left = deadline - now();
  if (left <= 0) return 0;
  return left / 1000000 >= LOOK_MILLISECONDS ? LOOK_MILLISECONDS : (int)((left + 999999) / 1000000);
}

// poll() until something is there, a signal comes, or it is time to look at the clock again: then 0, also before the
// deadline. Less than 0: failed, see errno.
static int wait_for(struct pollfd *polled, size_t count, int64_t deadline) {
  const int ready = poll(polled, (nfds_t)count, milliseconds_until(deadline));
  if (ready >= 0 || errno != EINTR) return ready;
  for (size_t i = 0; i < count; i++) polled[i].revents = 0;
  return 0;
}

static double seconds_since(int64_t start) { return (double)(now() - start) / (double)SECOND; }

// Once it is, it stays so: whoever waits within a wait ends, and then the one around it.
static int is_interrupted(tcp_bootstrap *tcp) {
  const fp8comm_wait_options *const wait = &tcp->wait;
  if (!tcp->interrupted && wait->interrupt)
    tcp->interrupted = wait->interrupt(wait->interrupt_data, seconds_since(tcp->waiting_since));
  return tcp->interrupted;
}

static void close_fd(int *fd) {
  // Not again after EINTR: Linux has closed it then.
  if (*fd >= 0) (void)close(*fd);
  *fd = -1;
}

static fp8core_status no_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for the TCP bootstrap");
}

static void print_address(char text[ADDRESS_CHARS], const struct sockaddr *address, socklen_t length) {
  char host[80];
  char port[16];
  if (getnameinfo(address, length, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    (void)snprintf(text, ADDRESS_CHARS, "(unknown address)");
  else
    (void)snprintf(text, ADDRESS_CHARS, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

static int is_loopback(const struct sockaddr_storage *address) {
  if (address->ss_family == AF_INET) {
    const struct sockaddr_in *const v4 = (const struct sockaddr_in *)address;
    return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  }
  const struct sockaddr_in6 *const v6 = (const struct sockaddr_in6 *)address;
  if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) return v6->sin6_addr.s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

static int is_any(const struct sockaddr_storage *address) {
  if (address->ss_family == AF_INET) return ((const struct sockaddr_in *)address)->sin_addr.s_addr == INADDR_ANY;
  return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static fp8core_status resolve(tcp_bootstrap *tcp, const fp8comm_tcp_options *options, int64_t deadline,
                              address_list *list) {
  char port[16];
  (void)snprintf(port, sizeof(port), "%d", options->port);
  const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
  struct addrinfo *found = NULL;
  int error;
  // A name server that does not answer yet is asked again; a name that is not there is an error at once.
  while ((error = getaddrinfo(options->address, port, &hints, &found)) == EAI_AGAIN && now() < deadline &&
         !is_interrupted(tcp))
    (void)poll(NULL, 0, 200);
  if (tcp->interrupted) {
    return fp8core_set_last_error(FP8CORE_ERROR_INTERRUPTED,
                                  "rank %d of %d was interrupted as it waited for the address of '%s'", options->rank,
                                  options->ranks, options->address);
  }
  if (error != 0) {
    return fp8comm_invalid("%s is '%s', which does not resolve to an address: %s", options->address_from,
                           options->address, error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error));
  }
  list->count = 0;
  for (const struct addrinfo *i = found; i && list->count < ADDRESS_LIMIT; i = i->ai_next) {
    if ((i->ai_family != AF_INET && i->ai_family != AF_INET6) || i->ai_addrlen > sizeof(list->addresses[0])) continue;
    memset(&list->addresses[list->count], 0, sizeof(list->addresses[0]));
    memcpy(&list->addresses[list->count], i->ai_addr, i->ai_addrlen);
    list->lengths[list->count++] = i->ai_addrlen;
  }
  freeaddrinfo(found);
  if (list->count == 0) {
    return fp8comm_invalid("%s is '%s', which has no IPv4 or IPv6 address", options->address_from, options->address);
  }
  for (int i = 0; i < list->count; i++) {
    if (is_any(&list->addresses[i])) {
      return fp8comm_invalid("%s is '%s', the address of no machine; expected one at which every rank reaches rank 0",
                             options->address_from, options->address);
    }
    char text[ADDRESS_CHARS];
    print_address(text, (const struct sockaddr *)&list->addresses[i], list->lengths[i]);
    if (options->across_machines && is_loopback(&list->addresses[i])) {
      return fp8comm_invalid("%s is '%s' (%s), which other machines cannot reach: set MASTER_ADDR to an address of "
                             "rank 0's machine that they can",
                             options->address_from, options->address, text);
    }
    if (!options->secret && !options->allow_insecure && !is_loopback(&list->addresses[i])) {
      return fp8comm_invalid(
        "%s is '%s' (%s), which other machines may reach: set FP8COMM_SECRET to the same random text on every rank, or "
        "FP8COMM_ALLOW_INSECURE=1 on a network that only you can reach",
        options->address_from, options->address, text);
    }
  }
  return FP8CORE_OK;
}

static fp8core_status random_bytes(void *bytes, size_t count) {
  uint8_t *next = bytes;
  while (count > 0) {
    const ssize_t got = getrandom(next, count, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return fp8core_set_last_error(FP8CORE_ERROR_PEER, "getrandom() failed: %s", strerror(errno));
    next += got;
    count -= (size_t)got;
  }
  return FP8CORE_OK;
}

// A small message into a connection whose buffer is empty: whole, or failed.
static int send_at_once(int fd, const void *message, size_t bytes) {
  ssize_t sent;
  do sent = send(fd, message, bytes, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent == (ssize_t)bytes;
}

// Bytes received, 0 at the end, -1 on an error (errno; EAGAIN: nothing there).
static ssize_t receive(int fd, void *place, size_t bytes) {
  ssize_t got;
  do got = recv(fd, place, bytes, 0);
  while (got < 0 && errno == EINTR);
  return got;
}

static int would_block(void) { return errno == EAGAIN || errno == EWOULDBLOCK; }

static void set_no_delay(int fd) {
  const int on = 1;
  // Only slower where it fails.
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// ---- Frames

static void begin_frame(peer *to, const uint8_t *key, fp8comm_wire_type type, uint32_t sequence, const void *payload,
                        uint64_t bytes) {
  fp8comm_wire_put_frame(to->header, to->tag, key, type, sequence, payload, bytes);
  to->sent = 0;
}

// 1: all of it is sent; 0: more later; -1: failed (errno).
static int continue_frame(peer *to, const void *payload, uint64_t bytes) {
  const uint64_t total = sizeof(to->header) + bytes + sizeof(to->tag);
  while (to->sent < total) {
    const struct {
      const void *start;
      uint64_t bytes;
    } parts[3] = {{to->header, sizeof(to->header)}, {payload, bytes}, {to->tag, sizeof(to->tag)}};
    struct iovec vectors[3];
    size_t count = 0;
    uint64_t skip = to->sent;
    for (int i = 0; i < 3; i++) {
      if (skip >= parts[i].bytes) {
        skip -= parts[i].bytes;
        continue;
      }
      vectors[count].iov_base = (uint8_t *)(uintptr_t)parts[i].start + skip;
      vectors[count++].iov_len = (size_t)(parts[i].bytes - skip);
      skip = 0;
    }
    const struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
    const ssize_t sent = sendmsg(to->fd, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return would_block() ? 0 : -1;
    }
    to->sent += (uint64_t)sent;
  }
  return 1;
}

typedef enum read_result { READ_MORE, READ_DONE, READ_GAVE_UP, READ_BAD, READ_CLOSED, READ_FAILED } read_result;

static read_result continue_reading(peer *from) {
  for (;;) {
    size_t room;
    uint8_t *const place = fp8comm_wire_want(&from->reader, &room);
    const ssize_t got = receive(from->fd, place, room);
    if (got == 0) return READ_CLOSED;
    if (got < 0) {
      if (would_block()) return READ_MORE;
      return errno == ECONNRESET ? READ_CLOSED : READ_FAILED;
    }
    switch (fp8comm_wire_got(&from->reader, (size_t)got)) {
    case FP8COMM_WIRE_MORE: break;
    case FP8COMM_WIRE_DONE: return READ_DONE;
    case FP8COMM_WIRE_GAVE_UP: return READ_GAVE_UP;
    case FP8COMM_WIRE_BAD: return READ_BAD;
    }
  }
}

// ---- Towards rank 0

// What became of one attempt to connect.
typedef enum attempt { ATTEMPT_CONNECTED, ATTEMPT_AGAIN, ATTEMPT_FAILED } attempt;

// Waits for the whole of a message. 0: all there; else what is wrong, or "" where the time is over.
static const char *receive_message(tcp_bootstrap *tcp, int fd, uint8_t *message, size_t bytes, int64_t deadline) {
  size_t have = 0;
  while (have < bytes) {
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    if (now() >= deadline || is_interrupted(tcp)) return "";
    if (wait_for(&polled, 1, deadline) < 0) return strerror(errno);
    if (!polled.revents) continue;
    const ssize_t got = receive(fd, message + have, bytes - have);
    if (got == 0) return "it closed the connection";
    if (got < 0 && would_block()) continue;
    if (got < 0) return strerror(errno);
    have += (size_t)got;
    // At once, not when a stranger has sent as much as one of ours would.
    if (!fp8comm_wire_is_magic(message, have)) break;
  }
  return NULL;
}

static attempt shake_hands(tcp_bootstrap *tcp, peer *root, int64_t deadline, char *reason, size_t reason_bytes) {
  const uint32_t rank = (uint32_t)tcp->base.rank;
  fp8comm_wire_nonces nonces;
  uint8_t greeting[FP8COMM_WIRE_GREETING_BYTES];
  uint8_t verdict[FP8COMM_WIRE_VERDICT_BYTES];
  const char *wrong = receive_message(tcp, root->fd, greeting, sizeof(greeting), deadline);
  if (!wrong && !fp8comm_wire_is_magic(greeting, FP8COMM_WIRE_MAGIC_BYTES)) {
    (void)fp8core_set_last_error(FP8CORE_ERROR_PEER,
                                 "what listens at %s is not rank 0 of this version of libfp8comm; choose another "
                                 "MASTER_PORT, or FP8COMM_PORT for libfp8comm alone",
                                 root->address);
    return ATTEMPT_FAILED;
  }
  if (!wrong) {
    fp8comm_wire_get_greeting(greeting, nonces.root);
    if (random_bytes(nonces.other, sizeof(nonces.other)) != FP8CORE_OK) return ATTEMPT_FAILED;
    uint8_t hello[FP8COMM_WIRE_HELLO_BYTES];
    fp8comm_wire_put_hello(hello, tcp->secret, &nonces, rank, (uint32_t)tcp->base.ranks);
    wrong = send_at_once(root->fd, hello, sizeof(hello)) ? NULL : strerror(errno);
  }
  if (!wrong) wrong = receive_message(tcp, root->fd, verdict, sizeof(verdict), deadline);
  // Dropped without a verdict, as one of too many connections may be: once more.
  if (wrong) {
    (void)snprintf(reason, reason_bytes, "%s: %s", root->address, *wrong ? wrong : "it accepts, but does not answer");
    return ATTEMPT_AGAIN;
  }
  uint32_t code;
  uint32_t value;
  if (!fp8comm_wire_get_verdict(verdict, tcp->secret, &nonces, rank, &code, &value)) {
    (void)fp8core_set_last_error(
      FP8CORE_ERROR_PEER, "rank %d and what answers at %s as rank 0 do not have the same FP8COMM_SECRET (here it %s)",
      tcp->base.rank, root->address, tcp->has_secret ? "is set" : "is not set");
    return ATTEMPT_FAILED;
  }
  // Who says so is one, and this one has knocked at its own address.
  tcp->has_rival = rank == 0;
  switch (code) {
  case FP8COMM_WIRE_ACCEPTED:
    fp8comm_wire_open_session(&root->session, tcp->secret, &nonces, rank);
    return ATTEMPT_CONNECTED;
  case FP8COMM_WIRE_DUPLICATE:
    (void)fp8core_set_last_error(FP8CORE_ERROR_PEER,
                                 "rank 0 (%s) has a rank %d already: each process needs a RANK of its own",
                                 root->address, tcp->base.rank);
    return ATTEMPT_FAILED;
  case FP8COMM_WIRE_OTHER_SIZE:
    (void)fp8core_set_last_error(FP8CORE_ERROR_PEER, "WORLD_SIZE is %d at rank %d, but %" PRIu32 " at rank 0 (%s)",
                                 tcp->base.ranks, tcp->base.rank, value, root->address);
    return ATTEMPT_FAILED;
  default:
    (void)fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank 0 (%s) refused rank %d of %d", root->address, tcp->base.rank,
                                 tcp->base.ranks);
    return ATTEMPT_FAILED;
  }
}

// A socket whose port happened to be the one that it called is connected with itself, and in rank 0's way.
static int is_connected_to_itself(int fd) {
  struct sockaddr_storage here;
  struct sockaddr_storage there;
  socklen_t here_length = sizeof(here);
  socklen_t there_length = sizeof(there);
  memset(&here, 0, sizeof(here));
  memset(&there, 0, sizeof(there));
  return getsockname(fd, (struct sockaddr *)&here, &here_length) == 0 &&
         getpeername(fd, (struct sockaddr *)&there, &there_length) == 0 && here_length == there_length &&
         memcmp(&here, &there, here_length) == 0;
}

static attempt try_to_connect(tcp_bootstrap *tcp, const struct sockaddr *address, socklen_t length, int64_t deadline,
                              char *reason, size_t reason_bytes) {
  peer *const root = &tcp->peers[0];
  print_address(root->address, address, length);
  root->fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int error = root->fd < 0 || connect(root->fd, address, length) != 0 ? errno : 0;
  if (error == EINPROGRESS || error == EINTR) {
    // A host that drops packets is given up for the next address, or the next try, long before the deadline.
    int64_t patience = now() + 3 * SECOND;
    if (patience > deadline) patience = deadline;
    struct pollfd polled = {.fd = root->fd, .events = POLLOUT};
    error = ETIMEDOUT;
    while (now() < patience && !is_interrupted(tcp)) {
      if (wait_for(&polled, 1, patience) > 0) {
        socklen_t error_bytes = sizeof(error);
        if (getsockopt(root->fd, SOL_SOCKET, SO_ERROR, &error, &error_bytes) != 0) error = errno;
        break;
      }
    }
  }
  attempt result = ATTEMPT_AGAIN;
  if (tcp->interrupted) {
    // What was wrong before is the better reason.
    close_fd(&root->fd);
    return result;
  }
  if (error) {
    (void)snprintf(reason, reason_bytes, "%s: %s", root->address, strerror(error));
  } else if (is_connected_to_itself(root->fd)) {
    (void)snprintf(reason, reason_bytes, "%s: no one listens", root->address);
  } else {
    set_no_delay(root->fd);
    result = shake_hands(tcp, root, deadline, reason, reason_bytes);
  }
  if (result != ATTEMPT_CONNECTED) close_fd(&root->fd);
  return result;
}

// ---- Rank 0

// Sets the error and tells the ranks that are there, as far as each takes it at once and is not in the middle of a
// frame.
static FP8CORE_PRINTF(3, 4) fp8core_status give_up(tcp_bootstrap *tcp, fp8core_status status, const char *format, ...) {
  char text[FP8COMM_WIRE_FAILURE_LIMIT + 1];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  const size_t bytes = strlen(text);
  for (int r = 1; r < tcp->base.ranks; r++) {
    peer *const to = &tcp->peers[r];
    if (to->fd < 0 || to->sent > 0) continue;
    begin_frame(to, to->session.from_root, FP8COMM_WIRE_FAILURE, tcp->sequence, text, bytes);
    (void)continue_frame(to, text, bytes);
    (void)shutdown(to->fd, SHUT_WR);
  }
  tcp->broken = 1;
  tcp->draining = 1;
  return fp8core_set_last_error(status, "%s", text);
}

// "2, 5, 6 and 9 more" of the ranks that `wanted` is true of; returns their number.
static int list_ranks(const tcp_bootstrap *tcp, int (*wanted)(const peer *), char *text, size_t bytes) {
  int count = 0;
  size_t used = 0;
  text[0] = 0;
  for (int r = 1; r < tcp->base.ranks; r++) {
    if (!wanted(&tcp->peers[r])) continue;
    if (count++ < 8) used += (size_t)snprintf(text + used, bytes - used, "%s%d", count > 1 ? ", " : "", r);
  }
  if (count > 8) (void)snprintf(text + used, bytes - used, " and %d more", count - 8);
  return count;
}

static int is_absent(const peer *one) { return one->fd < 0; }
static int is_unfinished(const peer *one) { return !one->finished; }

static void drop_pending(doorkeeper *door, int index) {
  close_fd(&door->pending[index].fd);
  door->pending[index] = door->pending[--door->pending_count];
}

static void refuse(doorkeeper *door, int index, const char *reason) {
  door->refused++;
  (void)snprintf(door->last_refusal, sizeof(door->last_refusal), "%s, which %s", door->pending[index].address, reason);
  drop_pending(door, index);
}

static void refuse_oldest(doorkeeper *door, const char *reason) {
  int oldest = 0;
  for (int i = 1; i < door->pending_count; i++) {
    if (door->pending[i].deadline < door->pending[oldest].deadline) oldest = i;
  }
  refuse(door, oldest, reason);
}

// Whether the connection is to be looked at no more.
static int hear_hello(tcp_bootstrap *tcp, doorkeeper *door, int index) {
  pending *const guest = &door->pending[index];
  const ssize_t got = receive(guest->fd, guest->hello + guest->have, sizeof(guest->hello) - guest->have);
  if (got < 0 && would_block()) return 0;
  if (got <= 0) {
    refuse(door, index, "left before it said its rank");
    return 1;
  }
  guest->have += (size_t)got;
  if (!fp8comm_wire_is_magic(guest->hello, guest->have)) {
    refuse(door, index, "is no rank of libfp8comm");
    return 1;
  }
  if (guest->have < sizeof(guest->hello)) return 0;

  uint32_t rank;
  uint32_t ranks;
  fp8comm_wire_code code =
    fp8comm_wire_get_hello(guest->hello, tcp->secret, &guest->nonces, (uint32_t)tcp->base.ranks, &rank, &ranks);
  if (code == FP8COMM_WIRE_ACCEPTED && tcp->peers[rank].fd >= 0) code = FP8COMM_WIRE_DUPLICATE;
  uint8_t verdict[FP8COMM_WIRE_VERDICT_BYTES];
  fp8comm_wire_put_verdict(verdict, tcp->secret, &guest->nonces, rank, code, (uint32_t)tcp->base.ranks);
  const int told = send_at_once(guest->fd, verdict, sizeof(verdict));
  char reason[REASON_CHARS];
  switch (code) {
  case FP8COMM_WIRE_STRANGER:
    (void)snprintf(reason, sizeof(reason), "says that it is rank %" PRIu32 ", but has not the same FP8COMM_SECRET",
                   rank);
    break;
  case FP8COMM_WIRE_DUPLICATE: (void)snprintf(reason, sizeof(reason), "is a second rank %" PRIu32, rank); break;
  case FP8COMM_WIRE_OTHER_SIZE:
    (void)snprintf(reason, sizeof(reason), "is rank %" PRIu32 " of %" PRIu32 " ranks", rank, ranks);
    break;
  case FP8COMM_WIRE_NO_SUCH_RANK:
    (void)snprintf(reason, sizeof(reason), rank == 0 ? "is a second rank %" PRIu32 : "says that it is rank %" PRIu32,
                   rank);
    break;
  case FP8COMM_WIRE_ACCEPTED: (void)snprintf(reason, sizeof(reason), "left as it was accepted"); break;
  }
  if (code != FP8COMM_WIRE_ACCEPTED || !told) {
    refuse(door, index, reason);
    return 1;
  }
  peer *const accepted = &tcp->peers[rank];
  accepted->fd = guest->fd;
  memcpy(accepted->address, guest->address, sizeof(accepted->address));
  fp8comm_wire_open_session(&accepted->session, tcp->secret, &guest->nonces, rank);
  guest->fd = -1;
  drop_pending(door, index);
  return 1;
}

static fp8core_status let_in(tcp_bootstrap *tcp, doorkeeper *door, int listener) {
  for (;;) {
    struct sockaddr_storage address;
    socklen_t length = sizeof(address);
    const int fd = accept4(listener, (struct sockaddr *)&address, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      switch (errno) {
      case EINTR:
      case ECONNABORTED: continue;
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        // Strangers may hold what a rank needs.
        if (door->pending_count > 0) {
          refuse_oldest(door, "was in the way when rank 0 had no more files");
          continue;
        }
        return give_up(
          tcp, FP8CORE_ERROR_PEER,
          "rank 0 at %s cannot accept a connection: %s; it needs one file for each of %d ranks (ulimit -n)", tcp->place,
          strerror(errno), tcp->base.ranks);
      // Of the connection, not of the listener (accept(2)).
      case EPERM:
      case EPROTO:
      case ENOPROTOOPT:
      case ENETDOWN:
      case EHOSTDOWN:
      case ENONET:
      case EHOSTUNREACH:
      case EOPNOTSUPP:
      case ENETUNREACH: continue;
      default:
        if (would_block()) return FP8CORE_OK;
        return give_up(tcp, FP8CORE_ERROR_PEER, "rank 0 at %s cannot accept connections: %s", tcp->place,
                       strerror(errno));
      }
    }
    if (door->pending_count == PENDING_LIMIT) refuse_oldest(door, "had not said its rank when many others came");
    set_no_delay(fd);
    pending *const guest = &door->pending[door->pending_count++];
    memset(guest, 0, sizeof(*guest));
    guest->fd = fd;
    guest->deadline = now() + door->patience;
    print_address(guest->address, (const struct sockaddr *)&address, length);
    uint8_t greeting[FP8COMM_WIRE_GREETING_BYTES];
    const fp8core_status status = random_bytes(guest->nonces.root, sizeof(guest->nonces.root));
    if (status != FP8CORE_OK) return give_up(tcp, status, "rank 0 has no random numbers: getrandom() failed");
    fp8comm_wire_put_greeting(greeting, guest->nonces.root);
    if (!send_at_once(fd, greeting, sizeof(greeting)))
      refuse(door, door->pending_count - 1, "left before it was greeted");
  }
}

// Who has the port of rank 0.
static const char *name_rival(const tcp_bootstrap *tcp) {
  return tcp->has_rival ? "another process with RANK=0" : "another program, perhaps another process with RANK=0,";
}

// bind(), as often as another program has the port. It is asked who it is: of two that say that they are rank 0 the one
// that listens is told so as well.
static int bind_in_time(tcp_bootstrap *tcp, int fd, const struct sockaddr *address, socklen_t length,
                        int64_t deadline) {
  const int64_t begun = now();
  char reason[ADDRESS_CHARS + 128];
  attempt answer = ATTEMPT_AGAIN;
  for (int tries = 0;; tries++) {
    const int bound = bind(fd, address, length);
    if (bound == 0 || errno != EADDRINUSE) return bound;
    if (now() >= deadline || is_interrupted(tcp)) {
      errno = EADDRINUSE;
      return -1;
    }
    if (tries < KNOCKS && answer == ATTEMPT_AGAIN) {
      const int64_t patience = now() + KNOCK_PATIENCE;
      answer = try_to_connect(tcp, address, length, patience < deadline ? patience : deadline, reason, sizeof(reason));
    }
    (void)poll(NULL, 0, 50);
    if (now() - begun > tcp->port_was_taken) tcp->port_was_taken = now() - begun;
  }
}

static fp8core_status open_listeners(tcp_bootstrap *tcp, doorkeeper *door, const address_list *list, int64_t deadline) {
  char text[ADDRESS_CHARS];
  int error = 0;
  for (int i = 0; i < list->count; i++) {
    const struct sockaddr *const address = (const struct sockaddr *)&list->addresses[i];
    const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      // A machine without IPv6, whose name of itself has an address of it.
      error = errno;
      continue;
    }
    const int on = 1;
    // After a run that just ended the port is free at once, but never shared with one that still listens.
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address->sa_family == AF_INET6) (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    const int bound = bind_in_time(tcp, fd, address, list->lengths[i], deadline);
    if (bound != 0 || listen(fd, SOMAXCONN) != 0) {
      error = errno;
      (void)close(fd);
      print_address(text, address, list->lengths[i]);
      // Half of the ranks might try that address and find a stranger.
      if (tcp->interrupted) {
        return fp8core_set_last_error(FP8CORE_ERROR_INTERRUPTED,
                                      "rank 0 was interrupted as it waited for %s, where %s listens", text,
                                      name_rival(tcp));
      }
      if (error == EADDRINUSE) {
        return fp8comm_invalid("rank 0 cannot listen at %s within %g s: %s does; %schoose another MASTER_PORT, or "
                               "FP8COMM_PORT for libfp8comm alone",
                               text, tcp->wait.timeout_seconds, name_rival(tcp),
                               tcp->has_rival ? "each process needs a RANK of its own; of another run, " : "");
      }
      continue;
    }
    door->listeners[door->listener_count++] = fd;
  }
  if (door->listener_count > 0) return FP8CORE_OK;
  return fp8comm_invalid("rank 0 cannot listen at %s: %s; MASTER_ADDR must be an address of rank 0's machine",
                         tcp->place, strerror(error));
}

static fp8core_status say_interrupted(tcp_bootstrap *tcp, int (*wanted)(const peer *), const char *what) {
  char ranks[128];
  const int count = list_ranks(tcp, wanted, ranks, sizeof(ranks));
  return give_up(tcp, FP8CORE_ERROR_INTERRUPTED,
                 "rank 0 of %d at %s was interrupted as it waited, for %.1f s so far, for %s %s to %s it",
                 tcp->base.ranks, tcp->place, seconds_since(tcp->waiting_since), count > 1 ? "ranks" : "rank", ranks,
                 what);
}

static fp8core_status say_who_is_missing(tcp_bootstrap *tcp, const doorkeeper *door) {
  char ranks[128];
  const int count = list_ranks(tcp, is_absent, ranks, sizeof(ranks));
  char refusals[sizeof(door->last_refusal) + 64];
  char rival[160];
  refusals[0] = rival[0] = 0;
  if (tcp->port_was_taken > 0) {
    (void)snprintf(rival, sizeof(rival), "; %s had the port for %.1f s of these", name_rival(tcp),
                   (double)tcp->port_was_taken / (double)SECOND);
  }
  if (door->refused > 0) {
    (void)snprintf(refusals, sizeof(refusals), "; refused %" PRIu64 ", the last from %s", door->refused,
                   door->last_refusal);
  }
  return give_up(tcp, FP8CORE_ERROR_TIMEOUT, "%s %s of %d did not connect to rank 0 at %s within %g s%s%s",
                 count > 1 ? "ranks" : "rank", ranks, tcp->base.ranks, tcp->place, tcp->wait.timeout_seconds, rival,
                 refusals);
}

static fp8core_status gather_ranks(tcp_bootstrap *tcp, doorkeeper *door, int64_t deadline) {
  // Listeners, guests, and the ranks that are there, to learn at once of one that ends.
  struct pollfd *const polled = tcp->polled;
  for (;;) {
    size_t count = 0;
    for (int i = 0; i < door->listener_count; i++)
      polled[count++] = (struct pollfd){.fd = door->listeners[i], .events = POLLIN};
    const int guests = door->pending_count;
    int64_t next_deadline = deadline;
    for (int i = 0; i < guests; i++) {
      polled[count++] = (struct pollfd){.fd = door->pending[i].fd, .events = POLLIN};
      if (door->pending[i].deadline < next_deadline) next_deadline = door->pending[i].deadline;
    }
    const size_t first_rank = count;
    int absent = 0;
    for (int r = 1; r < tcp->base.ranks; r++) {
      // A negative file is skipped by poll().
      polled[count++] = (struct pollfd){.fd = tcp->peers[r].fd, .events = POLLRDHUP};
      if (tcp->peers[r].fd < 0) absent++;
    }
    if (absent == 0) return FP8CORE_OK;
    if (is_interrupted(tcp)) return say_interrupted(tcp, is_absent, "connect to");
    if (now() >= deadline) return say_who_is_missing(tcp, door);
    if (wait_for(polled, count, next_deadline) < 0)
      return give_up(tcp, FP8CORE_ERROR_PEER, "poll() of rank 0 failed: %s", strerror(errno));
    for (int r = 1; r < tcp->base.ranks; r++) {
      if (polled[first_rank + (size_t)r - 1].revents) {
        // Whoever leaves when time is up leaves for those that are missing.
        if (now() >= deadline) return say_who_is_missing(tcp, door);
        close_fd(&tcp->peers[r].fd);
        return give_up(tcp, FP8CORE_ERROR_PEER, "rank %d (%s) left while rank 0 waited for others", r,
                       tcp->peers[r].address);
      }
    }
    // From the last: the place of one that goes is taken by a later one, which was looked at.
    for (int i = guests - 1; i >= 0; i--) {
      if (polled[(size_t)door->listener_count + (size_t)i].revents && hear_hello(tcp, door, i)) continue;
      if (now() >= door->pending[i].deadline) refuse(door, i, "did not say its rank in time");
    }
    for (int i = 0; i < door->listener_count; i++) {
      if (polled[i].revents) FP8COMM_TRY(let_in(tcp, door, door->listeners[i]));
    }
  }
}

static fp8core_status start_root(tcp_bootstrap *tcp, const address_list *list, int64_t deadline) {
  doorkeeper door = {
    .patience = (int64_t)(tcp->wait.timeout_seconds < 40 ? tcp->wait.timeout_seconds / 4 * (double)SECOND : 10e9)};
  door.pending = malloc(PENDING_LIMIT * sizeof(door.pending[0]));
  if (!door.pending) return no_memory();
  fp8core_status status = open_listeners(tcp, &door, list, deadline);
  if (status == FP8CORE_OK) status = gather_ranks(tcp, &door, deadline);
  for (int i = 0; i < door.listener_count; i++) close_fd(&door.listeners[i]);
  for (int i = 0; i < door.pending_count; i++) close_fd(&door.pending[i].fd);
  free(door.pending);
  return status;
}

static fp8core_status explain(tcp_bootstrap *tcp, int rank, read_result result) {
  const peer *const from = &tcp->peers[rank];
  if (result == READ_BAD)
    return give_up(tcp, FP8CORE_ERROR_PEER, "rank %d (%s) %s", rank, from->address, from->reader.failure);
  if (result == READ_CLOSED)
    return give_up(tcp, FP8CORE_ERROR_PEER, "rank %d (%s) left during the bootstrap", rank, from->address);
  return give_up(tcp, FP8CORE_ERROR_PEER, "the connection of rank %d (%s) failed: %s", rank, from->address,
                 strerror(errno));
}

static fp8core_status say_who_is_late(tcp_bootstrap *tcp, const char *what) {
  char ranks[128];
  const int count = list_ranks(tcp, is_unfinished, ranks, sizeof(ranks));
  return give_up(tcp, FP8CORE_ERROR_TIMEOUT,
                 "%s %s of %d did not %s all-gather number %" PRIu32 " of the bootstrap within %g s",
                 count > 1 ? "ranks" : "rank", ranks, tcp->base.ranks, what, tcp->sequence, tcp->wait.timeout_seconds);
}

// Polls the ranks that have not finished. *left: how many those are; their number in `polled` is their rank less 1.
static fp8core_status poll_unfinished(tcp_bootstrap *tcp, short events, int64_t deadline, const char *what, int *left) {
  *left = 0;
  for (int r = 1; r < tcp->base.ranks; r++) {
    const int wanted = !tcp->peers[r].finished;
    tcp->polled[r - 1] = (struct pollfd){.fd = wanted ? tcp->peers[r].fd : -1, .events = events};
    *left += wanted;
  }
  if (*left == 0) return FP8CORE_OK;
  if (is_interrupted(tcp)) return say_interrupted(tcp, is_unfinished, "exchange the all-gather of the bootstrap with");
  if (now() >= deadline) return say_who_is_late(tcp, what);
  if (wait_for(tcp->polled, (size_t)tcp->base.ranks - 1, deadline) < 0)
    return give_up(tcp, FP8CORE_ERROR_PEER, "poll() of rank 0 failed: %s", strerror(errno));
  return FP8CORE_OK;
}

static fp8core_status root_all_gather(tcp_bootstrap *tcp, size_t bytes, uint8_t *table, int64_t deadline) {
  const int ranks = tcp->base.ranks;
  for (int r = 1; r < ranks; r++) {
    peer *const from = &tcp->peers[r];
    from->finished = 0;
    from->sent = 0;
    fp8comm_wire_start(&from->reader, from->session.to_root, FP8COMM_WIRE_PART, tcp->sequence,
                       table + (size_t)r * bytes, bytes);
  }
  for (int left;;) {
    FP8COMM_TRY(poll_unfinished(tcp, POLLIN, deadline, "take part in", &left));
    if (left == 0) break;
    for (int r = 1; r < ranks; r++) {
      if (!tcp->polled[r - 1].revents) continue;
      const read_result result = continue_reading(&tcp->peers[r]);
      if (result == READ_DONE)
        tcp->peers[r].finished = 1;
      else if (result != READ_MORE)
        return explain(tcp, r, result);
    }
  }

  const size_t table_bytes = bytes * (size_t)ranks;
  for (int r = 1; r < ranks; r++) {
    peer *const to = &tcp->peers[r];
    to->finished = 0;
    begin_frame(to, to->session.from_root, FP8COMM_WIRE_TABLE, tcp->sequence, table, table_bytes);
  }
  for (int left;;) {
    FP8COMM_TRY(poll_unfinished(tcp, POLLOUT, deadline, "take the result of", &left));
    if (left == 0) return FP8CORE_OK;
    for (int r = 1; r < ranks; r++) {
      if (!tcp->polled[r - 1].revents) continue;
      const int sent = continue_frame(&tcp->peers[r], table, table_bytes);
      if (sent < 0) return explain(tcp, r, errno == EPIPE || errno == ECONNRESET ? READ_CLOSED : READ_FAILED);
      tcp->peers[r].finished = sent;
    }
  }
}

// ---- Other ranks

static fp8core_status start_other(tcp_bootstrap *tcp, const address_list *list, int64_t deadline) {
  char reason[ADDRESS_CHARS + 128] = "no try has ended";
  int pause = 5;
  for (;;) {
    for (int i = 0; i < list->count; i++) {
      // A try without time would only say so, in place of what was wrong before.
      if ((i > 0 && now() >= deadline) || is_interrupted(tcp)) break;
      switch (try_to_connect(tcp, (const struct sockaddr *)&list->addresses[i], list->lengths[i], deadline, reason,
                             sizeof(reason))) {
      case ATTEMPT_CONNECTED: return FP8CORE_OK;
      case ATTEMPT_FAILED: return FP8CORE_ERROR_PEER;
      case ATTEMPT_AGAIN: break;
      }
    }
    if (is_interrupted(tcp)) {
      return fp8core_set_last_error(
        FP8CORE_ERROR_INTERRUPTED,
        "rank %d of %d was interrupted as it waited, for %.1f s so far, for rank 0 at %s (%s)", tcp->base.rank,
        tcp->base.ranks, seconds_since(tcp->waiting_since), tcp->place, reason);
    }
    if (deadline - now() <= pause * INT64_C(1000000)) {
      return fp8core_set_last_error(FP8CORE_ERROR_TIMEOUT, "rank %d of %d did not reach rank 0 at %s within %g s (%s)",
                                    tcp->base.rank, tcp->base.ranks, tcp->place, tcp->wait.timeout_seconds, reason);
    }
    // Longer each time, so that thousands of ranks do not storm one that starts late.
    (void)poll(NULL, 0, pause);
    pause = pause < 160 ? 2 * pause : 250;
  }
}

static fp8core_status other_all_gather(tcp_bootstrap *tcp, const void *part, size_t bytes, uint8_t *table) {
  // Rank 0 knows who is missing, and says so when its time is up: it is waited for a little longer.
  const double patience = tcp->wait.timeout_seconds + fp8comm_grace(tcp->wait.timeout_seconds);
  const int64_t deadline = deadline_after(patience);
  peer *const root = &tcp->peers[0];
  fp8comm_wire_start(&root->reader, root->session.from_root, FP8COMM_WIRE_TABLE, tcp->sequence, table,
                     bytes * (size_t)tcp->base.ranks);
  begin_frame(root, root->session.to_root, FP8COMM_WIRE_PART, tcp->sequence, part, bytes);
  int sent = 0;
  tcp->broken = 1;
  for (;;) {
    if (sent == 0) sent = continue_frame(root, part, bytes);
    const int error = errno;
    // Rank 0 may give up, and say why, before it has all of the part: so what it says is read first.
    const read_result result = continue_reading(root);
    switch (result) {
    case READ_DONE: tcp->broken = 0; return FP8CORE_OK;
    case READ_GAVE_UP: return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank 0 gave up: %s", root->reader.failure);
    case READ_BAD:
      return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank 0 (%s) %s", root->address, root->reader.failure);
    case READ_CLOSED:
      return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank 0 (%s) left during the bootstrap", root->address);
    case READ_FAILED:
      return fp8core_set_last_error(FP8CORE_ERROR_PEER, "the connection with rank 0 (%s) failed: %s", root->address,
                                    strerror(errno));
    case READ_MORE: break;
    }
    if (sent < 0) {
      return fp8core_set_last_error(FP8CORE_ERROR_PEER, "the connection with rank 0 (%s) failed: %s", root->address,
                                    strerror(error));
    }
    if (is_interrupted(tcp)) {
      return fp8core_set_last_error(FP8CORE_ERROR_INTERRUPTED,
                                    "rank %d of %d was interrupted as it waited for rank 0 (%s) in all-gather number "
                                    "%" PRIu32 " of the bootstrap",
                                    tcp->base.rank, tcp->base.ranks, root->address, tcp->sequence);
    }
    if (now() >= deadline) {
      return fp8core_set_last_error(FP8CORE_ERROR_TIMEOUT,
                                    "rank 0 (%s) did not complete all-gather number %" PRIu32
                                    " of the bootstrap within %g s: it, or a rank that it waits for, hangs",
                                    root->address, tcp->sequence, patience);
    }
    struct pollfd polled = {.fd = root->fd, .events = (short)(sent == 0 ? POLLIN | POLLOUT : POLLIN)};
    if (wait_for(&polled, 1, deadline) < 0)
      return fp8core_set_last_error(FP8CORE_ERROR_PEER, "poll() failed: %s", strerror(errno));
  }
}

// ---- Both

static fp8core_status tcp_all_gather(fp8comm_bootstrap *bootstrap, const void *part, size_t bytes, void *table) {
  tcp_bootstrap *const tcp = (tcp_bootstrap *)bootstrap;
  if (tcp->broken) {
    return fp8core_set_last_error(FP8CORE_ERROR_PEER, "the bootstrap at %s has failed before; expected a new one",
                                  tcp->place);
  }
  if (bytes > 0 && (size_t)bootstrap->ranks > SIZE_MAX / 2 / bytes)
    return fp8comm_invalid("all-gather of %zu bytes by %d ranks; expected less than the address space", bytes,
                           bootstrap->ranks);
  if (bytes > 0) memcpy((uint8_t *)table + (size_t)bootstrap->rank * bytes, part, bytes);
  tcp->sequence++;
  tcp->waiting_since = now();
  return bootstrap->rank == 0 ? root_all_gather(tcp, bytes, table, deadline_after(tcp->wait.timeout_seconds))
                              : other_all_gather(tcp, part, bytes, table);
}

// What rank 0 said last reaches ranks that still send only if it is not answered by a reset: so rank 0 reads on for a
// moment.
static void drain(tcp_bootstrap *tcp) {
  const int64_t deadline = now() + SECOND / 4;
  static const size_t room = 16384;
  uint8_t *const bytes = malloc(room);
  if (!bytes) return;
  for (int open = 1; open > 0 && now() < deadline;) {
    open = 0;
    for (int r = 1; r < tcp->base.ranks; r++) {
      tcp->polled[r - 1] = (struct pollfd){.fd = tcp->peers[r].fd, .events = POLLIN};
      open += tcp->peers[r].fd >= 0;
    }
    if (open == 0 || wait_for(tcp->polled, (size_t)tcp->base.ranks - 1, deadline) < 0) break;
    for (int r = 1; r < tcp->base.ranks; r++) {
      if (!tcp->polled[r - 1].revents) continue;
      const ssize_t got = receive(tcp->peers[r].fd, bytes, room);
      if (got == 0 || (got < 0 && !would_block())) close_fd(&tcp->peers[r].fd);
    }
  }
  free(bytes);
}

static void tcp_destroy(fp8comm_bootstrap *bootstrap) {
  tcp_bootstrap *const tcp = (tcp_bootstrap *)bootstrap;
  const int connections = bootstrap->rank == 0 ? bootstrap->ranks : 1;
  if (tcp->draining && tcp->peers && tcp->polled) drain(tcp);
  for (int i = 0; tcp->peers && i < connections; i++) close_fd(&tcp->peers[i].fd);
  if (tcp->peers) fp8comm_wipe(tcp->peers, (size_t)connections * sizeof(tcp->peers[0]));
  if (tcp->secret_bytes) fp8comm_wipe(tcp->secret_bytes, tcp->secret.bytes);
  free(tcp->secret_bytes);
  free(tcp->place);
  free(tcp->peers);
  free(tcp->polled);
  free(tcp);
}

fp8core_status fp8comm_tcp_create(const fp8comm_tcp_options *options, fp8comm_bootstrap **bootstrap) {
  *bootstrap = NULL;
  const int64_t deadline = deadline_after(options->wait.timeout_seconds);
  tcp_bootstrap *const tcp = calloc(1, sizeof(*tcp));
  if (!tcp) return no_memory();
  tcp->base = (fp8comm_bootstrap){options->rank, options->ranks, tcp_all_gather, tcp_destroy};
  tcp->wait = options->wait;
  tcp->waiting_since = now();
  const size_t connections = options->rank == 0 ? (size_t)options->ranks : 1;
  tcp->peers = calloc(connections, sizeof(tcp->peers[0]));
  tcp->polled = calloc(connections + PENDING_LIMIT + ADDRESS_LIMIT, sizeof(tcp->polled[0]));
  tcp->secret_bytes = strdup(options->secret ? options->secret : "");
  tcp->has_secret = options->secret != NULL;
  if (asprintf(&tcp->place, strchr(options->address, ':') ? "[%s]:%d" : "%s:%d", options->address, options->port) < 0)
    tcp->place = NULL;
  fp8core_status status = FP8CORE_OK;
  if (!tcp->peers || !tcp->polled || !tcp->secret_bytes || !tcp->place) {
    status = no_memory();
  } else {
    for (size_t i = 0; i < connections; i++) tcp->peers[i].fd = -1;
    tcp->secret = (fp8comm_wire_secret){tcp->secret_bytes, strlen(tcp->secret_bytes)};
    address_list list;
    status = resolve(tcp, options, deadline, &list);
    if (status == FP8CORE_OK)
      status = options->rank == 0 ? start_root(tcp, &list, deadline) : start_other(tcp, &list, deadline);
  }
  if (status != FP8CORE_OK) {
    tcp_destroy(&tcp->base);
    return status;
  }
  *bootstrap = &tcp->base;
  return FP8CORE_OK;
}
