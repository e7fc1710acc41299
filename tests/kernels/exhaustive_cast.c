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

// 2^31 + 2^26 + 5 elements in place, so that every index beyond 32 bits is used: E4M3 to E5M2, then checked by blocks.
static int check_large(void) {
  const int64_t elements = (INT64_C(1) << 31) + (INT64_C(1) << 26) + 5;
  fp8core_context *context;
  void *memory;
  if (fp8core_context_create(&context, NULL) != FP8CORE_OK) return 1;
  if (fp8core_alloc(context, (size_t)elements, &memory) != FP8CORE_OK) {
    printf("skipped: %s\n", fp8core_last_error());
    fp8core_context_destroy(&context);
    return 77;
  }
  unsigned char *data = memory;
  unsigned char result_of[256];
  uint64_t nonfinite = 0;
  for (int code = 0; code < 256; code++)
    result_of[code] =
      (unsigned char)fp8core_cast_element((uint32_t)code, FP8CORE_E4M3, 1.0f, FP8CORE_E5M2, 1.0f, 0, 0, 1).code;
  // A period that is no divisor of a power of two, so that a wrong offset shows.
  for (int64_t i = 0; i < elements; i++) {
    data[i] = (unsigned char)(i % 251);
    nonfinite += data[i] == 0x7f;
  }
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = &statistics;
  const fp8core_tensor in = fp8core_tensor_matrix(data, FP8CORE_E4M3, 1, elements, cpu);
  const fp8core_tensor out = fp8core_tensor_matrix(data, FP8CORE_E5M2, 1, elements, cpu);
  int failed = fp8core_cast(context, &options, &in, &out) != FP8CORE_OK;
  for (int64_t i = 0; i < elements && !failed; i++) {
    if (data[i] != result_of[i % 251]) {
      printf("FAILED: element %lld is %x, expected %x\n", (long long)i, data[i], result_of[i % 251]);
      failed = 1;
    }
  }
  if (statistics.elements != (uint64_t)elements || statistics.nonfinite != nonfinite) {
    printf("FAILED: elements %llu, nonfinite %llu, expected %lld, %llu\n", (unsigned long long)statistics.elements,
           (unsigned long long)statistics.nonfinite, (long long)elements, (unsigned long long)nonfinite);
    failed = 1;
  }
  (void)fp8core_free(context, memory);
  fp8core_context_destroy(&context);
  printf("%lld elements: %s\n", (long long)elements, failed ? "failed" : "as expected");
  return failed;
}

int main(int argc, char **argv) {
  best = fp8core_isa_best();
  if (argc > 1 && strcmp(argv[1], "large") == 0) return check_large();
  // A number: only as many chunks of 65536 inputs, the last ones, for a quick look.
  if (argc > 1) atomic_store(&next_chunk, CHUNKS - (unsigned)strtoul(argv[1], NULL, 10));
  pthread_t threads[MAX_WORKERS];
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  const int workers = online < 1 ? 1 : online > MAX_WORKERS ? MAX_WORKERS : (int)online;
  for (int i = 0; i < workers; i++)
    if (pthread_create(&threads[i], NULL, work, NULL) != 0) return 1;
  for (int i = 0; i < workers; i++) (void)pthread_join(threads[i], NULL);
  printf("all inputs, tiers up to %s: %d failures\n", fp8core_isa_name(best), atomic_load(&failures));
  return atomic_load(&failures) ? 1 : 0;
}
