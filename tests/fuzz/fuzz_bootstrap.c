// The readers of the TCP bootstrap's messages with any bytes. The first byte says which reader, and how the rest is
// cut.
#include <string.h>

#include "bootstrap/wire.h"
#include "fp8core/status.h"
#include "fuzz.h"

enum { HELLO, VERDICT, GREETING, PART, TABLE, READERS };
enum { RANKS = 5, RANK = 3, PAYLOAD = 77, SEQUENCE = 9 };

static const fp8comm_wire_secret secret = {"a secret", 8};

static fp8comm_wire_nonces make_nonces(void) {
  fp8comm_wire_nonces nonces;
  memset(nonces.root, 0x11, sizeof(nonces.root));
  memset(nonces.other, 0x22, sizeof(nonces.other));
  return nonces;
}

static fp8comm_wire_session make_session(void) {
  const fp8comm_wire_nonces nonces = make_nonces();
  fp8comm_wire_session session;
  fp8comm_wire_open_session(&session, secret, &nonces, RANK);
  return session;
}

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index > READERS) return NULL;
  const fp8comm_wire_nonces nonces = make_nonces();
  const fp8comm_wire_session session = make_session();
  uint8_t *const seed = calloc(1, 1024);
  FUZZ_CHECK(seed);
  uint8_t *const message = seed + 1;
  seed[0] = (uint8_t)index;
  switch (index) {
  case HELLO:
    fp8comm_wire_put_hello(message, secret, &nonces, RANK, RANKS);
    *size = 1 + FP8COMM_WIRE_HELLO_BYTES;
    break;
  case VERDICT:
    fp8comm_wire_put_verdict(message, secret, &nonces, RANK, FP8COMM_WIRE_OTHER_SIZE, RANKS);
    *size = 1 + FP8COMM_WIRE_VERDICT_BYTES;
    break;
  case GREETING:
    fp8comm_wire_put_greeting(message, nonces.root);
    *size = 1 + FP8COMM_WIRE_GREETING_BYTES;
    break;
  default: {
    // A part, a table, and a failure in place of the table.
    uint8_t payload[PAYLOAD];
    memset(payload, 0x33, sizeof(payload));
    const fp8comm_wire_type type = index == PART    ? FP8COMM_WIRE_PART
                                   : index == TABLE ? FP8COMM_WIRE_TABLE
                                                    : FP8COMM_WIRE_FAILURE;
    if (index == READERS) seed[0] = TABLE;
    fp8comm_wire_put_frame(message, message + FP8COMM_WIRE_HEADER_BYTES + PAYLOAD,
                           index == PART ? session.to_root : session.from_root, type, SEQUENCE, payload, PAYLOAD);
    memcpy(message + FP8COMM_WIRE_HEADER_BYTES, payload, PAYLOAD);
    *size = 1 + FP8COMM_WIRE_HEADER_BYTES + PAYLOAD + FP8COMM_SHA256_BYTES;
  }
  }
  return seed;
}

static void read_frame(int is_part, size_t piece, const uint8_t *data, size_t size) {
  const fp8comm_wire_session session = make_session();
  // Of exactly that size, so that a sanitizer sees a write past it.
  uint8_t *const payload = malloc(PAYLOAD);
  FUZZ_CHECK(payload);
  fp8comm_wire_reader reader;
  fp8comm_wire_start(&reader, is_part ? session.to_root : session.from_root,
                     is_part ? FP8COMM_WIRE_PART : FP8COMM_WIRE_TABLE, SEQUENCE, payload, PAYLOAD);
  fp8comm_wire_progress progress = FP8COMM_WIRE_MORE;
  size_t used = 0;
  while (progress == FP8COMM_WIRE_MORE && used < size) {
    size_t room;
    uint8_t *const place = fp8comm_wire_want(&reader, &room);
    FUZZ_CHECK(room > 0);
    size_t count = room < piece ? room : piece;
    if (count > size - used) count = size - used;
    memcpy(place, data + used, count);
    used += count;
    progress = fp8comm_wire_got(&reader, count);
  }
  // Never more than the longest frame there is.
  FUZZ_CHECK(used <= FP8COMM_WIRE_HEADER_BYTES + FP8COMM_WIRE_FAILURE_LIMIT + FP8COMM_SHA256_BYTES);
  if (progress == FP8COMM_WIRE_DONE) {
    FUZZ_CHECK(used == FP8COMM_WIRE_HEADER_BYTES + PAYLOAD + FP8COMM_SHA256_BYTES);
    // Nobody forges a tag here: it is the seed's.
    for (size_t i = 0; i < PAYLOAD; i++) FUZZ_CHECK(payload[i] == 0x33);
  }
  if (progress == FP8COMM_WIRE_BAD) FUZZ_CHECK(*reader.failure);
  if (progress == FP8COMM_WIRE_GAVE_UP) FUZZ_CHECK(!is_part);
  for (const char *c = reader.failure; progress == FP8COMM_WIRE_GAVE_UP && *c; c++)
    FUZZ_CHECK((unsigned char)*c >= ' ' && *c != 0x7f);
  free(payload);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const int reader = data[0] % READERS;
  const size_t piece = 1 + data[0] / READERS;
  data++;
  size--;
  fp8comm_wire_nonces nonces = make_nonces();
  const fp8comm_wire_nonces before = nonces;
  uint8_t again[FP8COMM_WIRE_HELLO_BYTES];
  uint32_t one;
  uint32_t two;
  switch (reader) {
  case HELLO:
    (void)fp8comm_wire_is_magic(data, size);
    if (size < FP8COMM_WIRE_HELLO_BYTES) break;
    if (fp8comm_wire_get_hello(data, secret, &nonces, RANKS, &one, &two) != FP8COMM_WIRE_ACCEPTED) break;
    FUZZ_CHECK(one > 0 && one < RANKS && two == RANKS);
    // What is accepted is what a rank would have sent.
    fp8comm_wire_put_hello(again, secret, &nonces, one, two);
    FUZZ_CHECK(memcmp(again, data, sizeof(again)) == 0);
    break;
  case VERDICT:
    if (size < FP8COMM_WIRE_VERDICT_BYTES || !fp8comm_wire_get_verdict(data, secret, &nonces, RANK, &one, &two)) break;
    fp8comm_wire_put_verdict(again, secret, &before, RANK, (fp8comm_wire_code)one, two);
    FUZZ_CHECK(memcmp(again, data, FP8COMM_WIRE_VERDICT_BYTES) == 0);
    // To another rank, or on other nonces, it says nothing.
    FUZZ_CHECK(!fp8comm_wire_get_verdict(data, secret, &nonces, RANK + 1, &one, &two));
    nonces.other[0] ^= 1;
    FUZZ_CHECK(!fp8comm_wire_get_verdict(data, secret, &nonces, RANK, &one, &two));
    break;
  case GREETING:
    if (size < FP8COMM_WIRE_GREETING_BYTES || !fp8comm_wire_is_magic(data, size)) break;
    fp8comm_wire_get_greeting(data, nonces.root);
    FUZZ_CHECK(memcmp(nonces.root, data + FP8COMM_WIRE_MAGIC_BYTES, sizeof(nonces.root)) == 0);
    break;
  default: read_frame(reader == PART, piece, data, size);
  }
  return 0;
}
