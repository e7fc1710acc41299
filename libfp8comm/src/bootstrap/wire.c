#include "wire.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

// The last byte is the version of these messages.
static const uint8_t magic[FP8COMM_WIRE_MAGIC_BYTES] = {'F', 'P', '8', 'C', 'O', 'M', 'M', 1};

static void put32(uint8_t *bytes, uint32_t value) {
  for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(value >> (8 * i));
}

static void put64(uint8_t *bytes, uint64_t value) {
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t get32(const uint8_t *bytes) {
  return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint64_t get64(const uint8_t *bytes) { return get32(bytes) | (uint64_t)get32(bytes + 4) << 32; }

// Labels differ within their first 8 bytes, all of which are covered: no tag is good for two purposes.
static void make_tag(uint8_t tag[FP8COMM_SHA256_BYTES], fp8comm_wire_secret secret, const char label[8],
                     const fp8comm_wire_nonces *nonces, const uint8_t *message, size_t bytes) {
  fp8comm_hmac hmac;
  fp8comm_hmac_start(&hmac, secret.key, secret.bytes);
  fp8comm_hmac_add(&hmac, label, 8);
  fp8comm_hmac_add(&hmac, nonces->root, sizeof(nonces->root));
  fp8comm_hmac_add(&hmac, nonces->other, sizeof(nonces->other));
  fp8comm_hmac_add(&hmac, message, bytes);
  fp8comm_hmac_finish(&hmac, tag);
}

int fp8comm_wire_is_magic(const uint8_t *message, size_t bytes) {
  return memcmp(message, magic, bytes < sizeof(magic) ? bytes : sizeof(magic)) == 0;
}

void fp8comm_wire_put_greeting(uint8_t message[FP8COMM_WIRE_GREETING_BYTES],
                               const uint8_t nonce[FP8COMM_WIRE_NONCE_BYTES]) {
  memcpy(message, magic, sizeof(magic));
  memcpy(message + sizeof(magic), nonce, FP8COMM_WIRE_NONCE_BYTES);
}

void fp8comm_wire_get_greeting(const uint8_t message[FP8COMM_WIRE_GREETING_BYTES],
                               uint8_t nonce[FP8COMM_WIRE_NONCE_BYTES]) {
  memcpy(nonce, message + sizeof(magic), FP8COMM_WIRE_NONCE_BYTES);
}

#define HELLO_TAG (FP8COMM_WIRE_HELLO_BYTES - FP8COMM_SHA256_BYTES)

void fp8comm_wire_put_hello(uint8_t message[FP8COMM_WIRE_HELLO_BYTES], fp8comm_wire_secret secret,
                            const fp8comm_wire_nonces *nonces, uint32_t rank, uint32_t ranks) {
  memcpy(message, magic, sizeof(magic));
  put32(message + 8, rank);
  put32(message + 12, ranks);
  memcpy(message + 16, nonces->other, FP8COMM_WIRE_NONCE_BYTES);
  make_tag(message + HELLO_TAG, secret, "hello  1", nonces, message, HELLO_TAG);
}

fp8comm_wire_code fp8comm_wire_get_hello(const uint8_t message[FP8COMM_WIRE_HELLO_BYTES], fp8comm_wire_secret secret,
                                         fp8comm_wire_nonces *nonces, uint32_t ranks, uint32_t *rank,
                                         uint32_t *ranks_there) {
  *rank = get32(message + 8);
  *ranks_there = get32(message + 12);
  memcpy(nonces->other, message + 16, FP8COMM_WIRE_NONCE_BYTES);
  uint8_t tag[FP8COMM_SHA256_BYTES];
  make_tag(tag, secret, "hello  1", nonces, message, HELLO_TAG);
  if (!fp8comm_wire_is_magic(message, sizeof(magic)) || !fp8comm_tags_equal(tag, message + HELLO_TAG))
    return FP8COMM_WIRE_STRANGER;
  if (*ranks_there != ranks) return FP8COMM_WIRE_OTHER_SIZE;
  return *rank == 0 || *rank >= ranks ? FP8COMM_WIRE_NO_SUCH_RANK : FP8COMM_WIRE_ACCEPTED;
}

// The rank is covered too, though not sent: the verdict is on that rank.
static void make_verdict_tag(uint8_t tag[FP8COMM_SHA256_BYTES], fp8comm_wire_secret secret,
                             const fp8comm_wire_nonces *nonces, const uint8_t message[FP8COMM_WIRE_VERDICT_BYTES],
                             uint32_t rank) {
  uint8_t covered[20];
  memcpy(covered, message, 16);
  put32(covered + 16, rank);
  make_tag(tag, secret, "verdict1", nonces, covered, sizeof(covered));
}

void fp8comm_wire_put_verdict(uint8_t message[FP8COMM_WIRE_VERDICT_BYTES], fp8comm_wire_secret secret,
                              const fp8comm_wire_nonces *nonces, uint32_t rank, fp8comm_wire_code code,
                              uint32_t value) {
  memcpy(message, magic, sizeof(magic));
  put32(message + 8, (uint32_t)code);
  put32(message + 12, value);
  make_verdict_tag(message + 16, secret, nonces, message, rank);
}

int fp8comm_wire_get_verdict(const uint8_t message[FP8COMM_WIRE_VERDICT_BYTES], fp8comm_wire_secret secret,
                             const fp8comm_wire_nonces *nonces, uint32_t rank, uint32_t *code, uint32_t *value) {
  *code = get32(message + 8);
  *value = get32(message + 12);
  uint8_t tag[FP8COMM_SHA256_BYTES];
  make_verdict_tag(tag, secret, nonces, message, rank);
  return fp8comm_wire_is_magic(message, sizeof(magic)) && fp8comm_tags_equal(tag, message + 16);
}

void fp8comm_wire_open_session(fp8comm_wire_session *session, fp8comm_wire_secret secret,
                               const fp8comm_wire_nonces *nonces, uint32_t rank) {
  uint8_t covered[4];
  put32(covered, rank);
  make_tag(session->to_root, secret, "to root1", nonces, covered, sizeof(covered));
  make_tag(session->from_root, secret, "of root1", nonces, covered, sizeof(covered));
}

static void make_frame_tag(uint8_t tag[FP8COMM_SHA256_BYTES], const uint8_t key[FP8COMM_SHA256_BYTES],
                           const uint8_t header[FP8COMM_WIRE_HEADER_BYTES], const void *payload, uint64_t bytes) {
  fp8comm_hmac hmac;
  fp8comm_hmac_start(&hmac, key, FP8COMM_SHA256_BYTES);
  fp8comm_hmac_add(&hmac, header, FP8COMM_WIRE_HEADER_BYTES);
  fp8comm_hmac_add(&hmac, payload, (size_t)bytes);
  fp8comm_hmac_finish(&hmac, tag);
}

void fp8comm_wire_put_frame(uint8_t header[FP8COMM_WIRE_HEADER_BYTES], uint8_t tag[FP8COMM_SHA256_BYTES],
                            const uint8_t key[FP8COMM_SHA256_BYTES], fp8comm_wire_type type, uint32_t sequence,
                            const void *payload, uint64_t bytes) {
  put32(header, (uint32_t)type);
  put32(header + 4, sequence);
  put64(header + 8, bytes);
  make_frame_tag(tag, key, header, payload, bytes);
}

void fp8comm_wire_start(fp8comm_wire_reader *reader, const uint8_t *key, fp8comm_wire_type type, uint32_t sequence,
                        void *payload, uint64_t bytes) {
  memset(reader, 0, sizeof(*reader));
  reader->key = key;
  reader->type = (uint32_t)type;
  reader->sequence = sequence;
  reader->payload = payload;
  reader->payload_bytes = bytes;
  reader->total = FP8COMM_WIRE_HEADER_BYTES;
}

static uint8_t *payload_of(fp8comm_wire_reader *reader) {
  return reader->failing ? (uint8_t *)reader->failure : reader->payload;
}

uint8_t *fp8comm_wire_want(fp8comm_wire_reader *reader, size_t *bytes) {
  if (reader->have < FP8COMM_WIRE_HEADER_BYTES) {
    *bytes = (size_t)(FP8COMM_WIRE_HEADER_BYTES - reader->have);
    return reader->header + reader->have;
  }
  const uint64_t tag_start = reader->total - FP8COMM_SHA256_BYTES;
  if (reader->have < tag_start) {
    *bytes = (size_t)(tag_start - reader->have);
    return payload_of(reader) + (reader->have - FP8COMM_WIRE_HEADER_BYTES);
  }
  *bytes = (size_t)(reader->total - reader->have);
  return reader->tag + (reader->have - tag_start);
}

// At most FP8COMM_WIRE_FAILURE_LIMIT bytes of text are told; none of it steers a terminal.
static void make_printable(char *text) {
  for (; *text; text++) {
    if ((unsigned char)*text < ' ' || *text == 0x7f) *text = '?';
  }
}

static fp8comm_wire_progress read_header(fp8comm_wire_reader *reader) {
  const uint32_t type = get32(reader->header);
  const uint32_t sequence = get32(reader->header + 4);
  const uint64_t length = get64(reader->header + 8);
  // Only rank 0 gives up this way.
  if (type == FP8COMM_WIRE_FAILURE && reader->type == FP8COMM_WIRE_TABLE) {
    if (length > FP8COMM_WIRE_FAILURE_LIMIT) {
      (void)snprintf(reader->failure, sizeof(reader->failure),
                     "sent a report of %" PRIu64 " bytes, expected at most %d", length, FP8COMM_WIRE_FAILURE_LIMIT);
      return FP8COMM_WIRE_BAD;
    }
    reader->failing = 1;
  } else if (type != reader->type) {
    (void)snprintf(reader->failure, sizeof(reader->failure),
                   "sent a message of type %" PRIu32 ", expected type %" PRIu32, type, reader->type);
    return FP8COMM_WIRE_BAD;
  } else if (sequence != reader->sequence) {
    (void)snprintf(reader->failure, sizeof(reader->failure),
                   "is in all-gather number %" PRIu32 " of the bootstrap, expected number %" PRIu32, sequence,
                   reader->sequence);
    return FP8COMM_WIRE_BAD;
  } else if (length != reader->payload_bytes) {
    (void)snprintf(reader->failure, sizeof(reader->failure),
                   "sent %" PRIu64 " bytes to all-gather number %" PRIu32 " of the bootstrap, expected %" PRIu64,
                   length, sequence, reader->payload_bytes);
    return FP8COMM_WIRE_BAD;
  }
  reader->total = FP8COMM_WIRE_HEADER_BYTES + length + FP8COMM_SHA256_BYTES;
  return FP8COMM_WIRE_MORE;
}

fp8comm_wire_progress fp8comm_wire_got(fp8comm_wire_reader *reader, size_t bytes) {
  reader->have += bytes;
  if (reader->have < reader->total) return FP8COMM_WIRE_MORE;
  if (reader->total == FP8COMM_WIRE_HEADER_BYTES) return read_header(reader);
  uint8_t tag[FP8COMM_SHA256_BYTES];
  make_frame_tag(tag, reader->key, reader->header, payload_of(reader),
                 reader->total - FP8COMM_WIRE_HEADER_BYTES - FP8COMM_SHA256_BYTES);
  if (!fp8comm_tags_equal(tag, reader->tag)) {
    (void)snprintf(reader->failure, sizeof(reader->failure), "sent a message whose authentication tag is wrong");
    return FP8COMM_WIRE_BAD;
  }
  if (!reader->failing) return FP8COMM_WIRE_DONE;
  make_printable(reader->failure);
  return FP8COMM_WIRE_GAVE_UP;
}
