// What every test of the libraries shares: contexts on the device under test, and buffers there.
//
// FP8CORE_TEST_DEVICE=cuda runs the same tests on the first GPU; unset or "cpu", on the CPU.
#ifndef FP8_TEST_SUPPORT_H
#define FP8_TEST_SUPPORT_H

// The order that cmocka.h asks for.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
// A macro of cmocka's own allocator, which no test here uses; the name is wanted below.
#undef test_free

#include "fp8core/fp8core.h"

// The device that the tests run on.
fp8core_device test_device(void);
int test_on_cuda(void);

// A context on the device under test with this many threads (0: default) and this tier; fails the test on an error.
fp8core_context *test_context(int threads, fp8core_isa isa);
// The same with all defaults.
fp8core_context *test_context_default(void);

// Device memory of the context; fails the test on an error. upload() allocates and copies; 0 bytes give NULL.
void *test_alloc(fp8core_context *context, size_t bytes);
void *test_upload(fp8core_context *context, const void *host, size_t bytes);
void test_download(fp8core_context *context, void *host, const void *device, size_t bytes);
void test_free(fp8core_context *context, void *device);

// A matrix on the device under test.
fp8core_tensor test_matrix(void *data, fp8core_dtype dtype, int64_t rows, int64_t columns);

// How far the sums of a product on CUDA may be off, as a share of the sum of the magnitudes of their terms: see
// docs/numerics.md, "Matrix products". Hopper's FP8 tensor cores keep 13 bits below the largest term of a step; BF16's
// and FP32's keep FP32's.
double test_cuda_product_error(fp8core_dtype a, fp8core_dtype b, int fast_accumulation);

// Factors of a product of 2 by 3, in scales and alpha, whose own product leaves FP32 or its normal numbers on the way.
typedef struct test_factors {
  float scale_a;
  float scale_b;
  float alpha;
  // 2 * 3 * alpha / (scale_a * scale_b), rounded once.
  float expected;
} test_factors;
#define TEST_EXTREME_FACTORS 8
extern const test_factors test_extreme_factors[TEST_EXTREME_FACTORS];

// Fails with the library's message unless the call succeeded.
#define assert_ok(call)                                                                                                \
  do {                                                                                                                 \
    const fp8core_status assert_ok_status = (call);                                                                    \
    if (assert_ok_status != FP8CORE_OK)                                                                                \
      fail_msg("%s: %s (%s)", #call, fp8core_last_error(), fp8core_status_string(assert_ok_status));                   \
  } while (0)

// The call must fail with this status and a message that contains `text`.
#define assert_fails(call, expected_status, text)                                                                      \
  do {                                                                                                                 \
    const fp8core_status assert_fails_status = (call);                                                                 \
    if (assert_fails_status != (expected_status))                                                                      \
      fail_msg("%s: status %s, expected %s", #call, fp8core_status_string(assert_fails_status),                        \
               fp8core_status_string(expected_status));                                                                \
    test_assert_message_contains(#call, (text));                                                                       \
  } while (0)
void test_assert_message_contains(const char *call, const char *text);

// A small deterministic generator (SplitMix64) for test data.
typedef struct test_random {
  uint64_t state;
} test_random;
uint64_t test_random_bits(test_random *random);
// Uniform in [0, 1).
double test_random_uniform(test_random *random);
// Standard normal.
double test_random_normal(test_random *random);

#endif
