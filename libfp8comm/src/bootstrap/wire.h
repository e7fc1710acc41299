// Messages of the TCP bootstrap, apart from sockets: what is sent, and the readers of what is received, which trust
// nothing.
//
// Rank 0 speaks first, and both prove that they know the secret without sending it:
//
//   0 -> r  greeting   magic, nonce of 0
//   r -> 0  hello      magic, rank, ranks, nonce of r, tag
//   0 -> r  verdict    magic, code, value, tag
//   then    frames     header (type, sequence, length), payload, tag
//
// A tag is an HMAC-SHA-256. That of a hello and a verdict is keyed by the secret and covers a label and both nonces, so
// that none can be replayed or reflected. Each direction's frames have a key of their own, derived from the secret,
// both nonces and the rank; the sequence number in the header is checked, so that frames can be neither altered nor
// reordered. Nothing is encrypted. Without a secret the same is done with an empty one, and then finds mistakes, not
// enemies. Numbers are little-endian.
#ifndef FP8COMM_WIRE_H
#define FP8COMM_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "sha256.h"

#define FP8COMM_WIRE_MAGIC_BYTES 8
#define FP8COMM_WIRE_NONCE_BYTES 32
#define FP8COMM_WIRE_GREETING_BYTES (FP8COMM_WIRE_MAGIC_BYTES + FP8COMM_WIRE_NONCE_BYTES)
#define FP8COMM_WIRE_HELLO_BYTES (FP8COMM_WIRE_MAGIC_BYTES + 8 + FP8COMM_WIRE_NONCE_BYTES + FP8COMM_SHA256_BYTES)
#define FP8COMM_WIRE_VERDICT_BYTES (FP8COMM_WIRE_MAGIC_BYTES + 8 + FP8COMM_SHA256_BYTES)
#define FP8COMM_WIRE_HEADER_BYTES 16
#define FP8COMM_WIRE_FAILURE_LIMIT 480

typedef struct fp8comm_wire_secret {
  const void *key;
  size_t bytes;
} fp8comm_wire_secret;

typedef enum fp8comm_wire_code {
  FP8COMM_WIRE_ACCEPTED = 0,
  // The tag is wrong.
  FP8COMM_WIRE_STRANGER = 1,
  // Of that rank one is there already.
  FP8COMM_WIRE_DUPLICATE = 2,
  // Rank 0 has another number of ranks, given as the verdict's value.
  FP8COMM_WIRE_OTHER_SIZE = 3,
  // No rank of this job that could connect.
  FP8COMM_WIRE_NO_SUCH_RANK = 4
} fp8comm_wire_code;

typedef enum fp8comm_wire_type {
  // A rank's part, to rank 0; all parts, from it.
  FP8COMM_WIRE_PART = 1,
  FP8COMM_WIRE_TABLE = 2,
  // Rank 0 gives up, and says why: text.
  FP8COMM_WIRE_FAILURE = 3
} fp8comm_wire_type;

typedef struct fp8comm_wire_session {
  uint8_t to_root[FP8COMM_SHA256_BYTES];
  uint8_t from_root[FP8COMM_SHA256_BYTES];
} fp8comm_wire_session;

typedef struct fp8comm_wire_nonces {
  uint8_t root[FP8COMM_WIRE_NONCE_BYTES];
  uint8_t other[FP8COMM_WIRE_NONCE_BYTES];
} fp8comm_wire_nonces;

// Whether the first `bytes` of a message can be those of one of ours.
int fp8comm_wire_is_magic(const uint8_t *message, size_t bytes);

void fp8comm_wire_put_greeting(uint8_t message[FP8COMM_WIRE_GREETING_BYTES],
                               const uint8_t nonce[FP8COMM_WIRE_NONCE_BYTES]);
// The nonce, after a magic that is right.
void fp8comm_wire_get_greeting(const uint8_t message[FP8COMM_WIRE_GREETING_BYTES],
                               uint8_t nonce[FP8COMM_WIRE_NONCE_BYTES]);

void fp8comm_wire_put_hello(uint8_t message[FP8COMM_WIRE_HELLO_BYTES], fp8comm_wire_secret secret,
                            const fp8comm_wire_nonces *nonces, uint32_t rank, uint32_t ranks);
// Whom rank 0 of `ranks` has before it: fills in nonces->other, *rank and *ranks_there, whatever the code is, and
// answers all but FP8COMM_WIRE_DUPLICATE.
fp8comm_wire_code fp8comm_wire_get_hello(const uint8_t message[FP8COMM_WIRE_HELLO_BYTES], fp8comm_wire_secret secret,
                                         fp8comm_wire_nonces *nonces, uint32_t ranks, uint32_t *rank,
                                         uint32_t *ranks_there);

void fp8comm_wire_put_verdict(uint8_t message[FP8COMM_WIRE_VERDICT_BYTES], fp8comm_wire_secret secret,
                              const fp8comm_wire_nonces *nonces, uint32_t rank, fp8comm_wire_code code, uint32_t value);
// 0: not from one that knows the secret.
int fp8comm_wire_get_verdict(const uint8_t message[FP8COMM_WIRE_VERDICT_BYTES], fp8comm_wire_secret secret,
                             const fp8comm_wire_nonces *nonces, uint32_t rank, uint32_t *code, uint32_t *value);

void fp8comm_wire_open_session(fp8comm_wire_session *session, fp8comm_wire_secret secret,
                               const fp8comm_wire_nonces *nonces, uint32_t rank);

// Header and tag of a frame.
void fp8comm_wire_put_frame(uint8_t header[FP8COMM_WIRE_HEADER_BYTES], uint8_t tag[FP8COMM_SHA256_BYTES],
                            const uint8_t key[FP8COMM_SHA256_BYTES], fp8comm_wire_type type, uint32_t sequence,
                            const void *payload, uint64_t bytes);

typedef enum fp8comm_wire_progress {
  FP8COMM_WIRE_MORE = 0,
  // The expected frame is there, and its tag is right.
  FP8COMM_WIRE_DONE = 1,
  // Rank 0 gave up; its words are in `failure`, printable and terminated.
  FP8COMM_WIRE_GAVE_UP = 2,
  // Not the expected frame; what is wrong with it is in `failure`.
  FP8COMM_WIRE_BAD = 3
} fp8comm_wire_progress;

// Reads one frame of the expected type, sequence number and length. The length on the wire is compared, never trusted.
typedef struct fp8comm_wire_reader {
  const uint8_t *key;
  uint32_t type;
  uint32_t sequence;
  uint8_t *payload;
  uint64_t payload_bytes;
  // Bytes of the frame read, of how many. The first is a header's until that is read.
  uint64_t have;
  uint64_t total;
  int failing;
  uint8_t header[FP8COMM_WIRE_HEADER_BYTES];
  uint8_t tag[FP8COMM_SHA256_BYTES];
  char failure[FP8COMM_WIRE_FAILURE_LIMIT + 1];
} fp8comm_wire_reader;

void fp8comm_wire_start(fp8comm_wire_reader *reader, const uint8_t *key, fp8comm_wire_type type, uint32_t sequence,
                        void *payload, uint64_t bytes);
// Where the next bytes go, and how many at most (at least 1).
uint8_t *fp8comm_wire_want(fp8comm_wire_reader *reader, size_t *bytes);
// That many were put there.
fp8comm_wire_progress fp8comm_wire_got(fp8comm_wire_reader *reader, size_t bytes);

#endif
