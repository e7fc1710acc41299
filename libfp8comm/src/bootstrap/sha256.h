// SHA-256 (FIPS 180-4) and HMAC (RFC 2104) with it, for the handshake of the TCP bootstrap. Our own, of a page, rather
// than libcrypto's: a library that every user of gradient compression loads should not bring megabytes along for one
// handshake.
#ifndef FP8COMM_SHA256_H
#define FP8COMM_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define FP8COMM_SHA256_BYTES 32

typedef struct fp8comm_sha256 {
  uint32_t state[8];
  uint64_t bytes;
  uint8_t block[64];
} fp8comm_sha256;

typedef struct fp8comm_hmac {
  fp8comm_sha256 inner;
  fp8comm_sha256 outer;
} fp8comm_hmac;

void fp8comm_sha256_start(fp8comm_sha256 *hash);
void fp8comm_sha256_add(fp8comm_sha256 *hash, const void *data, size_t bytes);
void fp8comm_sha256_finish(fp8comm_sha256 *hash, uint8_t digest[FP8COMM_SHA256_BYTES]);

// A key of any length, 0 included.
void fp8comm_hmac_start(fp8comm_hmac *hmac, const void *key, size_t bytes);
void fp8comm_hmac_add(fp8comm_hmac *hmac, const void *data, size_t bytes);
void fp8comm_hmac_finish(fp8comm_hmac *hmac, uint8_t tag[FP8COMM_SHA256_BYTES]);

// In a time that doesn't depend on where they differ.
int fp8comm_tags_equal(const uint8_t a[FP8COMM_SHA256_BYTES], const uint8_t b[FP8COMM_SHA256_BYTES]);

// Not optimised away, as memset() before free() is.
void fp8comm_wipe(void *memory, size_t bytes);

#endif
