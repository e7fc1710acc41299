// SHA-256 and HMAC against published vectors: FIPS 180-4's examples, RFC 4231.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bootstrap/sha256.h"
#include "support.h"

static void check_hex(const uint8_t digest[FP8COMM_SHA256_BYTES], const char *expected) {
  char text[2 * FP8COMM_SHA256_BYTES + 1];
  for (int i = 0; i < FP8COMM_SHA256_BYTES; i++) (void)snprintf(text + 2 * i, 3, "%02x", digest[i]);
  assert_string_equal(text, expected);
}

static void check_hash(const char *text, size_t repeats, const char *expected) {
  // However it is cut.
  for (size_t piece = 1; piece <= 130; piece += 43) {
    const size_t bytes = strlen(text) * repeats;
    char *const all = malloc(bytes + 1);
    assert_non_null(all);
    for (size_t i = 0; i < bytes; i++) all[i] = text[i % strlen(text)];
    fp8comm_sha256 hash;
    uint8_t digest[FP8COMM_SHA256_BYTES];
    fp8comm_sha256_start(&hash);
    for (size_t i = 0; i < bytes; i += piece) fp8comm_sha256_add(&hash, all + i, bytes - i < piece ? bytes - i : piece);
    fp8comm_sha256_finish(&hash, digest);
    check_hex(digest, expected);
    free(all);
  }
}

static void test_hash(void **state) {
  (void)state;
  check_hash("a", 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  check_hash("abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  check_hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  check_hash("a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void check_hmac(const char *key, size_t key_repeats, const char *data, size_t data_repeats,
                       const char *expected) {
  char keys[256];
  char text[256];
  const size_t key_bytes = strlen(key) * key_repeats;
  const size_t bytes = strlen(data) * data_repeats;
  for (size_t i = 0; i < key_bytes; i++) keys[i] = key[i % strlen(key)];
  for (size_t i = 0; i < bytes; i++) text[i] = data[i % strlen(data)];
  fp8comm_hmac hmac;
  uint8_t tag[FP8COMM_SHA256_BYTES];
  fp8comm_hmac_start(&hmac, keys, key_bytes);
  fp8comm_hmac_add(&hmac, text, bytes);
  fp8comm_hmac_finish(&hmac, tag);
  check_hex(tag, expected);
}

static void test_hmac(void **state) {
  (void)state;
  check_hmac("\x0b", 20, "Hi There", 1, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  check_hmac("Jefe", 1, "what do ya want for nothing?", 1,
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  check_hmac("\xaa", 20, "\xdd", 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  check_hmac("\xaa", 131, "Test Using Larger Than Block-Size Key - Hash Key First", 1,
             "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

static void test_equal(void **state) {
  (void)state;
  uint8_t a[FP8COMM_SHA256_BYTES] = {0};
  uint8_t b[FP8COMM_SHA256_BYTES] = {0};
  assert_true(fp8comm_tags_equal(a, b));
  for (int i = 0; i < FP8COMM_SHA256_BYTES; i++) {
    b[i] = 0x80;
    assert_false(fp8comm_tags_equal(a, b));
    b[i] = 0;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_hash),
    cmocka_unit_test(test_hmac),
    cmocka_unit_test(test_equal),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
