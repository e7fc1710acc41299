// All 2^32 FP32 inputs to each narrower format, saturating and not, every tier of the machine against the scalar rule,
// with amax and counts. With "large": a tensor of more than 2^31 elements. Minutes; in the slow suite.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fp8core/fp8core.h"
#include "numerics.h"

#define CHUNK (UINT32_C(1) << 16)
#define CHUNKS (UINT32_C(1) << 16)
#define MAX_WORKERS 64

static const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
static atomic_uint next_chunk;
static atomic_int failures;
static fp8core_isa best;

static void fail(fp8core_isa isa, fp8core_dtype dtype, int saturate, uint32_t first, const char *what) {
  if (atomic_fetch_add(&failures, 1) < 20)
    printf("FAILED %s: fp32 -> %s, %s, inputs from %08x: %s\n", fp8core_isa_name(isa), fp8core_dtype_name(dtype),
           saturate ? "saturating" : "not saturating", first, what);
}

static void store_code(unsigned char *codes, size_t index, size_t bytes, uint32_t code) {
  if (bytes == 1) {
    codes[index] = (unsigned char)code;
  } else {
    const uint16_t narrow = (uint16_t)code;
    memcpy(codes + index * 2, &narrow, sizeof(narrow));
  }
}

typedef struct worker {
  fp8core_context *contexts[FP8CORE_ISA_AVX512_BF16 + 1];
  uint32_t inputs[CHUNK];
  unsigned char expected[CHUNK * 2];
  unsigned char codes[CHUNK * 2];
} worker;

static inline __attribute__((always_inline)) uint32_t expect(worker *w, fp8core_dtype dtype, int saturate,
                                                             fp8core_cast_statistics *statistics) {
  const size_t bytes = dtype <= FP8CORE_E5M2 ? 1 : 2;
  uint32_t amax = 0;
  for (uint32_t i = 0; i < CHUNK; i++) {
    const fp8core_cast_result r = fp8core_cast_element(w->inputs[i], FP8CORE_FP32, 1.0f, dtype, 1.0f, 0, 0, saturate);
    store_code(w->expected, i, bytes, r.code);
    amax = r.magnitude > amax ? r.magnitude : amax;
    statistics->saturated += (uint64_t)r.saturated;
    statistics->flushed_to_zero += (uint64_t)r.flushed_to_zero;
    statistics->nonfinite += (uint64_t)r.nonfinite;
  }
  statistics->elements += CHUNK;
  return amax;
}

static uint32_t expect_of(worker *w, fp8core_dtype dtype, int saturate, fp8core_cast_statistics *statistics) {
  switch (dtype) {
  case FP8CORE_E4M3: return expect(w, FP8CORE_E4M3, saturate, statistics);
  case FP8CORE_E5M2: return expect(w, FP8CORE_E5M2, saturate, statistics);
  case FP8CORE_BF16: return expect(w, FP8CORE_BF16, saturate, statistics);
  default: return expect(w, FP8CORE_FP16, saturate, statistics);
  }
}

static void check_chunk(worker *w, uint32_t first, fp8core_dtype dtype, int saturate) {
  fp8core_cast_statistics expected = {0, 0, 0, 0};
  const uint32_t amax = expect_of(w, dtype, saturate, &expected);
  for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) {
    fp8core_cast_statistics statistics = {0, 0, 0, 0};
    fp8core_cast_options options = fp8core_cast_options_default();
    float measured = 0.0f;
    fp8core_tensor in = fp8core_tensor_matrix(w->inputs, FP8CORE_FP32, 1, CHUNK, cpu);
    fp8core_tensor out = fp8core_tensor_matrix(w->codes, dtype, 1, CHUNK, cpu);
    out.amax = &measured;
    options.saturate = saturate;
    options.statistics = &statistics;
    memset(w->codes, 0x55, sizeof(w->codes));
    if (fp8core_cast(w->contexts[isa], &options, &in, &out) != FP8CORE_OK)
      fail((fp8core_isa)isa, dtype, saturate, first, fp8core_last_error());
    else if (memcmp(w->codes, w->expected, CHUNK * fp8core_dtype_size(dtype)) != 0)
      fail((fp8core_isa)isa, dtype, saturate, first, "codes differ");
    else if (fp8core_float_bits(measured) != amax || memcmp(&statistics, &expected, sizeof(expected)) != 0)
      fail((fp8core_isa)isa, dtype, saturate, first, "amax or counts differ");
  }
}

static void *work(void *unused) {
  (void)unused;
  worker *w = calloc(1, sizeof(*w));
  if (!w) abort();
  for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) {
    fp8core_context_options options = fp8core_context_options_default();
    options.isa = (fp8core_isa)isa;
    options.threads = 1;
    if (fp8core_context_create(&w->contexts[isa], &options) != FP8CORE_OK) {
      printf("%s\n", fp8core_last_error());
      atomic_fetch_add(&failures, 1);
      free(w);
      return NULL;
    }
  }
  for (uint32_t chunk = atomic_fetch_add(&next_chunk, 1); chunk < CHUNKS; chunk = atomic_fetch_add(&next_chunk, 1)) {
    const uint32_t first = chunk * CHUNK;
    for (uint32_t i = 0; i < CHUNK; i++) w->inputs[i] = first + i;
    for (int dtype = FP8CORE_E4M3; dtype <= FP8CORE_FP16; dtype++)
      for (int saturate = 0; saturate < 2; saturate++) check_chunk(w, first, (fp8core_dtype)dtype, saturate);
  }
  for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) fp8core_context_destroy(&w->contexts[isa]);
  free(w);
  return NULL;
}

// More than 2^31, so that every index beyond 32 bits is used.
#define LARGE ((INT64_C(1) << 31) + (INT64_C(1) << 26) + 5)
// Of the data: no divisor of a power of two, so that a wrong offset shows.
#define PERIOD 251

// Memory that can be had without driving the system out of it; where that is not known, any.
static size_t available_bytes(void) {
  char line[128];
  unsigned long long kibibytes = UINT64_MAX >> 11;
  FILE *file = fopen("/proc/meminfo", "r");
  while (file && fgets(line, sizeof(line), file))
    if (sscanf(line, "MemAvailable: %llu", &kibibytes) == 1) break;
  if (file) fclose(file);
  return (size_t)(kibibytes << 10);
}

static int compare_large(const char *what, const unsigned char *codes, const unsigned char *expected,
                         int64_t elements) {
  for (int64_t begin = 0; begin < elements; begin += PERIOD) {
    const int64_t part = elements - begin < PERIOD ? elements - begin : PERIOD;
    if (memcmp(codes + begin, expected, (size_t)part) == 0) continue;
    printf("FAILED %s: elements from %lld differ\n", what, (long long)begin);
    return 1;
  }
  return 0;
}

static int compare_large_totals(const char *what, const fp8core_cast_statistics *got,
                                const fp8core_cast_statistics *expected, float amax, uint32_t expected_amax) {
  if (memcmp(got, expected, sizeof(*got)) == 0 && fp8core_float_bits(amax) == expected_amax) return 0;
  printf(
    "FAILED %s: elements %llu, saturated %llu, flushed %llu, nonfinite %llu, amax %08x; expected %llu, %llu, %llu, "
    "%llu, %08x\n",
    what, (unsigned long long)got->elements, (unsigned long long)got->saturated,
    (unsigned long long)got->flushed_to_zero, (unsigned long long)got->nonfinite, fp8core_float_bits(amax),
    (unsigned long long)expected->elements, (unsigned long long)expected->saturated,
    (unsigned long long)expected->flushed_to_zero, (unsigned long long)expected->nonfinite, expected_amax);
  return 1;
}

// E4M3 to E5M2 in place; NaNs among the values. 2.1 GiB.
static int check_large_in_place(fp8core_context *context, unsigned char *data) {
  unsigned char expected[PERIOD];
  fp8core_cast_statistics counts = {LARGE, 0, 0, 0};
  for (int code = 0; code < PERIOD; code++)
    expected[code] =
      (unsigned char)fp8core_cast_element((uint32_t)code, FP8CORE_E4M3, 1.0f, FP8CORE_E5M2, 1.0f, 0, 0, 1).code;
  for (int64_t i = 0; i < LARGE; i++) {
    data[i] = (unsigned char)(i % PERIOD);
    counts.nonfinite += data[i] == 0x7f;
  }
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  float amax = 0.0f;
  options.statistics = &statistics;
  const fp8core_tensor in = fp8core_tensor_matrix(data, FP8CORE_E4M3, 1, LARGE, cpu);
  fp8core_tensor out = fp8core_tensor_matrix(data, FP8CORE_E5M2, 1, LARGE, cpu);
  out.amax = &amax;
  if (fp8core_cast(context, &options, &in, &out) != FP8CORE_OK) {
    printf("FAILED in place: %s\n", fp8core_last_error());
    return 1;
  }
  return compare_large("in place", data, expected, LARGE) |
         compare_large_totals("in place", &statistics, &counts, amax, FP8CORE_F32_QUIET_NAN);
}

// BF16 to E4M3, not in place, so that offsets in bytes exceed 2^32 too; the largest value is the last. 6.5 GiB.
static int check_large_apart(fp8core_context *context, unsigned char *source, unsigned char *codes) {
  unsigned char expected[PERIOD];
  uint16_t inputs[PERIOD];
  const float last = 1000.0f;
  const uint16_t last_code = (uint16_t)fp8core_encode(FP8CORE_BF16, last, 1);
  const fp8core_cast_statistics counts = {LARGE, 1, 0, 0};
  for (int code = 0; code < PERIOD; code++) {
    expected[code] = (unsigned char)(code == 0x7f ? 0 : code);
    inputs[code] = (uint16_t)(fp8core_decode_bits(FP8CORE_E4M3, expected[code]) >> 16);
  }
  for (int64_t i = 0; i < LARGE - 1; i++) memcpy(source + i * 2, &inputs[i % PERIOD], 2);
  memcpy(source + (LARGE - 1) * 2, &last_code, 2);
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  float amax = 0.0f;
  float measured = 0.0f;
  options.statistics = &statistics;
  const fp8core_tensor in = fp8core_tensor_matrix(source, FP8CORE_BF16, 1, LARGE, cpu);
  fp8core_tensor out = fp8core_tensor_matrix(codes, FP8CORE_E4M3, 1, LARGE, cpu);
  out.amax = &amax;
  if (fp8core_cast(context, &options, &in, &out) != FP8CORE_OK || fp8core_amax(context, &in, &measured) != FP8CORE_OK) {
    printf("FAILED not in place: %s\n", fp8core_last_error());
    return 1;
  }
  int failed = compare_large("not in place", codes, expected, LARGE - 1);
  failed |= compare_large_totals("not in place", &statistics, &counts, amax, fp8core_float_bits(last));
  if (codes[LARGE - 1] != 0x7e || measured != last) {
    printf("FAILED not in place: last element %x, fp8core_amax() %a\n", codes[LARGE - 1], (double)measured);
    failed = 1;
  }
  return failed;
}

static int check_large(void) {
  fp8core_context *context;
  void *codes = NULL;
  void *source = NULL;
  if (fp8core_context_create(&context, NULL) != FP8CORE_OK) return 1;
  const size_t spare = (size_t)1 << 30;
  int result = 77;
  if (available_bytes() / 3 < (size_t)LARGE + spare / 3) {
    printf("skipped: less than 7.5 GiB of memory available\n");
  } else if (fp8core_alloc(context, (size_t)LARGE, &codes) != FP8CORE_OK ||
             fp8core_alloc(context, (size_t)LARGE * 2, &source) != FP8CORE_OK) {
    printf("skipped: %s\n", fp8core_last_error());
  } else {
    result = check_large_in_place(context, codes) | check_large_apart(context, source, codes);
    printf("%lld elements: %s\n", (long long)LARGE, result ? "failed" : "as expected");
  }
  (void)fp8core_free(context, source);
  (void)fp8core_free(context, codes);
  fp8core_context_destroy(&context);
  return result;
}

static int usage(FILE *stream, int result) {
  fprintf(stream,
          "usage: exhaustive_cast        every FP32 value on every tier (tens of minutes)\n"
          "       exhaustive_cast CHUNKS  only the last so many of %u chunks of 65536 values\n"
          "       exhaustive_cast large   tensors beyond 2^32 bytes\n",
          CHUNKS);
  return result;
}

int main(int argc, char **argv) {
  best = fp8core_isa_best();
  if (argc == 2 && strcmp(argv[1], "--help") == 0) return usage(stdout, 0);
  if (argc == 2 && strcmp(argv[1], "large") == 0) return check_large();
  // A number: only as many chunks of 65536 inputs, the last ones, for a quick look.
  if (argc > 1) {
    char *end;
    const unsigned long chunks = strtoul(argv[1], &end, 10);
    if (argc > 2 || *end || chunks < 1 || chunks > CHUNKS) return usage(stderr, 2);
    atomic_store(&next_chunk, CHUNKS - (unsigned)chunks);
  }
  pthread_t threads[MAX_WORKERS];
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  const int workers = online < 1 ? 1 : online > MAX_WORKERS ? MAX_WORKERS : (int)online;
  for (int i = 0; i < workers; i++)
    if (pthread_create(&threads[i], NULL, work, NULL) != 0) return 1;
  for (int i = 0; i < workers; i++) (void)pthread_join(threads[i], NULL);
  printf("all inputs, tiers up to %s: %d failures\n", fp8core_isa_name(best), atomic_load(&failures));
  return atomic_load(&failures) ? 1 : 0;
}
