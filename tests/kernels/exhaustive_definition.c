// All 2^32 FP32 inputs to each narrower format, saturating and not, against the definition: the nearest of the format's
// values, and of two the one with the even code. The values are a table made from the widths of the fields; nothing of
// the library is used but the cast that is judged, on the scalar tier and on the best. Minutes; in the slow suite.
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fp8core/fp8core.h"

#define CHUNK (UINT32_C(1) << 16)
#define CHUNKS (UINT32_C(1) << 16)
#define MAX_WORKERS 64

// OFP8 1.0, section 5; IEEE 754-2019, section 3.4; BF16 is the upper half of an FP32.
typedef struct format {
  fp8core_dtype dtype;
  int bits;
  int mantissa_bits;
  int bias;
  // Code of the largest value, of what an overflow becomes, and of the NaN, without sign.
  uint32_t max_code;
  uint32_t overflow_code;
  uint32_t nan_code;
  // Value of each code up to one beyond the largest, as if the exponents went on; and half way to the next.
  double *values;
  double *middles;
} format;

static format formats[] = {
  {FP8CORE_E4M3, 8, 3, 7, 0x7e, 0x7f, 0x7f, NULL, NULL},
  {FP8CORE_E5M2, 8, 2, 15, 0x7b, 0x7c, 0x7e, NULL, NULL},
  {FP8CORE_BF16, 16, 7, 127, 0x7f7f, 0x7f80, 0x7fc0, NULL, NULL},
  {FP8CORE_FP16, 16, 10, 15, 0x7bff, 0x7c00, 0x7e00, NULL, NULL},
};
#define FORMATS ((int)(sizeof(formats) / sizeof(formats[0])))

static const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
static atomic_uint next_chunk;
static atomic_int failures;
static fp8core_isa tiers[2];

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes);
  if (!memory) abort();
  return memory;
}

static void make_table(format *of) {
  const uint32_t count = of->max_code + 2;
  of->values = allocate(count * sizeof(double));
  of->middles = allocate((count - 1) * sizeof(double));
  for (uint32_t code = 0; code < count; code++) {
    const int exponent = (int)(code >> of->mantissa_bits);
    const int fraction = (int)(code & ((1u << of->mantissa_bits) - 1));
    const int significand = exponent == 0 ? fraction : (1 << of->mantissa_bits) + fraction;
    of->values[code] = ldexp((double)significand, (exponent == 0 ? 1 : exponent) - of->bias - of->mantissa_bits);
  }
  for (uint32_t code = 0; code + 1 < count; code++) of->middles[code] = 0.5 * (of->values[code] + of->values[code + 1]);
}

static int below(const format *of, uint32_t code, double magnitude) {
  return magnitude > of->middles[code] || (magnitude == of->middles[code] && code % 2 == 1);
}

// The code of the nearest value, or max_code + 1 for an overflow. `code` is that of a magnitude that is no larger, near
// this one.
static uint32_t nearest(const format *of, uint32_t code, double magnitude) {
  while (code <= of->max_code && below(of, code, magnitude)) code++;
  return code;
}

static uint32_t search(const format *of, double magnitude) {
  uint32_t low = 0;
  uint32_t high = of->max_code + 1;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (below(of, middle, magnitude))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

typedef struct worker {
  fp8core_context *contexts[2];
  float inputs[CHUNK];
  // Saturating or not.
  uint16_t expected[2][CHUNK];
  unsigned char codes[CHUNK * 2];
  fp8core_cast_statistics statistics;
  float amax;
} worker;

// A chunk's inputs have one sign, and magnitudes that rise.
static void expect(worker *w, const format *of) {
  const uint32_t sign = signbit(w->inputs[0]) ? 1u << (of->bits - 1) : 0;
  uint32_t code = 0;
  memset(&w->statistics, 0, sizeof(w->statistics));
  w->statistics.elements = CHUNK;
  w->amax = 0.0f;
  for (uint32_t i = 0; i < CHUNK; i++) {
    const float magnitude = fabsf(w->inputs[i]);
    if (isnan(magnitude)) {
      w->expected[0][i] = w->expected[1][i] = (uint16_t)(sign | of->nan_code);
      w->statistics.nonfinite++;
      w->amax = NAN;
      continue;
    }
    code = i == 0 ? search(of, (double)magnitude) : nearest(of, code, (double)magnitude);
    const int over = code > of->max_code;
    w->expected[0][i] = (uint16_t)(sign | (over ? of->overflow_code : code));
    w->expected[1][i] = (uint16_t)(sign | (over ? of->max_code : code));
    if (isinf(magnitude))
      w->statistics.nonfinite++;
    else
      w->statistics.saturated += (uint64_t)over;
    w->statistics.flushed_to_zero += code == 0 && magnitude > 0.0f;
    // A NaN comes after all numbers.
    w->amax = magnitude;
  }
}

static void fail(const worker *w, const format *of, int tier, int saturate, const char *what, uint32_t index) {
  if (atomic_fetch_add(&failures, 1) < 20)
    printf("FAILED %s: fp32 %a -> %s, %s: %s, expected code %x\n", fp8core_isa_name(tiers[tier]),
           (double)w->inputs[index], fp8core_dtype_name(of->dtype), saturate ? "saturating" : "not saturating", what,
           w->expected[saturate][index]);
}

static void check_chunk(worker *w, const format *of, int tier, int saturate) {
  const uint32_t bytes = (uint32_t)of->bits / 8;
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  float measured = 0.0f;
  const fp8core_tensor in = fp8core_tensor_matrix(w->inputs, FP8CORE_FP32, 1, CHUNK, cpu);
  fp8core_tensor out = fp8core_tensor_matrix(w->codes, of->dtype, 1, CHUNK, cpu);
  out.amax = &measured;
  options.saturate = saturate;
  options.statistics = &statistics;
  memset(w->codes, 0x55, sizeof(w->codes));
  if (fp8core_cast(w->contexts[tier], &options, &in, &out) != FP8CORE_OK) {
    fail(w, of, tier, saturate, fp8core_last_error(), 0);
    return;
  }
  for (uint32_t i = 0; i < CHUNK; i++) {
    uint16_t code = w->codes[i];
    if (bytes == 2) memcpy(&code, w->codes + 2 * i, sizeof(code));
    if (code != w->expected[saturate][i]) {
      fail(w, of, tier, saturate, "another code", i);
      return;
    }
  }
  if (memcmp(&statistics, &w->statistics, sizeof(statistics)) != 0)
    fail(w, of, tier, saturate, "other counts in the chunk of this", 0);
  if (!(measured == w->amax || (isnan(measured) && isnan(w->amax))))
    fail(w, of, tier, saturate, "another amax in the chunk of this", 0);
}

static void *work(void *unused) {
  (void)unused;
  worker *w = allocate(sizeof(*w));
  for (int tier = 0; tier < 2; tier++) {
    fp8core_context_options options = fp8core_context_options_default();
    options.isa = tiers[tier];
    options.threads = 1;
    if (fp8core_context_create(&w->contexts[tier], &options) != FP8CORE_OK) {
      printf("%s\n", fp8core_last_error());
      exit(1);
    }
  }
  for (uint32_t chunk = atomic_fetch_add(&next_chunk, 1); chunk < CHUNKS; chunk = atomic_fetch_add(&next_chunk, 1)) {
    for (uint32_t i = 0; i < CHUNK; i++) {
      const uint32_t bits = chunk * CHUNK + i;
      memcpy(&w->inputs[i], &bits, sizeof(bits));
    }
    for (int i = 0; i < FORMATS; i++) {
      expect(w, &formats[i]);
      for (int tier = 0; tier < 2; tier++)
        for (int saturate = 0; saturate < 2; saturate++) check_chunk(w, &formats[i], tier, saturate);
    }
  }
  for (int tier = 0; tier < 2; tier++) fp8core_context_destroy(&w->contexts[tier]);
  free(w);
  return NULL;
}

int main(int argc, char **argv) {
  tiers[0] = FP8CORE_ISA_SCALAR;
  tiers[1] = fp8core_isa_best();
  for (int i = 0; i < FORMATS; i++) make_table(&formats[i]);
  // A number: only as many chunks of 65536 inputs, the last ones, for a quick look.
  if (argc > 1) atomic_store(&next_chunk, CHUNKS - (unsigned)strtoul(argv[1], NULL, 10));
  pthread_t threads[MAX_WORKERS];
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  const int workers = online < 1 ? 1 : online > MAX_WORKERS ? MAX_WORKERS : (int)online;
  for (int i = 0; i < workers; i++)
    if (pthread_create(&threads[i], NULL, work, NULL) != 0) return 1;
  for (int i = 0; i < workers; i++) (void)pthread_join(threads[i], NULL);
  for (int i = 0; i < FORMATS; i++) {
    free(formats[i].values);
    free(formats[i].middles);
  }
  printf("all inputs, %s and %s: %d failures\n", fp8core_isa_name(tiers[0]), fp8core_isa_name(tiers[1]),
         atomic_load(&failures));
  return atomic_load(&failures) ? 1 : 0;
}
