// Every tier of libfp8comm's sums of codes against the scalar rules of gradient_rules.h and numerics.h, bit for bit. No
// test framework: prints the parameters of a failure and returns 1.
//
//   check_sum                  the checks
//   check_sum --bench [MiB]    GB/s of codes of each tier, one thread, in processor time
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu/sum.h"
#include "fp8core/fp8core.h"
#include "gradient_rules.h"

#define GUARD 64
#define GUARD_BYTE 0xa5
#define MOST_SOURCES 64

typedef struct tier {
  const char *name;
  const fp8comm_sum_kernels *kernels;
} tier;

static tier tiers[3];
static int tier_count;

static void find_tiers(void) {
  const fp8core_isa best = fp8core_isa_best();
  tiers[tier_count++] = (tier){"scalar", &fp8comm_sum_scalar};
#if defined(FP8COMM_HAVE_AVX2)
  if (best >= FP8CORE_ISA_AVX2) tiers[tier_count++] = (tier){"avx2", &fp8comm_sum_avx2};
#endif
#if defined(FP8COMM_HAVE_AVX512)
  if (best >= FP8CORE_ISA_AVX512) tiers[tier_count++] = (tier){"avx512", &fp8comm_sum_avx512};
#endif
  (void)best;
}

static uint64_t random_state = 1;

static uint64_t random_bits(void) {
  random_state += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes);
  if (!memory) {
    printf("out of memory: %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
}

static int is_finite_code(fp8core_dtype dtype, uint32_t code) { return isfinite(fp8core_decode(dtype, code)); }

static unsigned char random_code(fp8core_dtype dtype) {
  for (;;) {
    const uint32_t code = (uint32_t)random_bits() & 0xff;
    if (is_finite_code(dtype, code)) return (unsigned char)code;
  }
}

typedef struct sum_case {
  fp8core_dtype dtype;
  int count;
  size_t begin;
  size_t elements;
  float scale_inverse;
  float scale;
} sum_case;

static int fails(const sum_case *one, const char *tier_name, const char *what, size_t index, uint32_t got,
                 uint32_t expected) {
  printf("%s %s, %d sources, %zu elements from %zu, scale_inverse %a, scale %a: %s of element %zu is %x, expected %x\n",
         tier_name, fp8core_dtype_name(one->dtype), one->count, one->elements, one->begin, (double)one->scale_inverse,
         (double)one->scale, what, index, (unsigned)got, (unsigned)expected);
  return 1;
}

// The sources have begin + elements codes each.
static int check(const sum_case *one, const unsigned char *const *sources) {
  const size_t all = one->begin + one->elements;
  unsigned char *codes = allocate(one->elements + 2 * GUARD), *in_place = allocate(all);
  float *sums = allocate((one->elements + 2 * GUARD) * sizeof(*sums));
  const unsigned char *first_in_place[MOST_SOURCES];
  const fp8comm_sum sum = {one->dtype, one->count, sources};
  int failed = 0;
  memcpy(first_in_place, sources, (size_t)one->count * sizeof(*sources));
  first_in_place[0] = in_place;
  for (int t = 0; t < tier_count && !failed; t++) {
    const fp8comm_sum_kernels *kernels = tiers[t].kernels;
    const fp8comm_sum same = {one->dtype, one->count, first_in_place};
    uint32_t largest = 0;
    memset(codes, GUARD_BYTE, one->elements + 2 * GUARD);
    memset(sums, GUARD_BYTE, (one->elements + 2 * GUARD) * sizeof(*sums));
    memcpy(in_place, sources[0], all);
    kernels->sum(&sum, one->begin, one->elements, sums + GUARD);
    const uint32_t requantised =
      kernels->requantise(&sum, one->begin, one->elements, one->scale_inverse, one->scale, codes + GUARD);
    const uint32_t requantised_in_place =
      kernels->requantise(&same, one->begin, one->elements, one->scale_inverse, one->scale, in_place + one->begin);
    for (size_t i = 0; i < one->elements && !failed; i++) {
      const float value = fp8comm_sum_rule(one->dtype, sources, one->count, one->begin + i);
      const uint32_t bits = fp8core_float_bits(value), magnitude = bits & FP8CORE_F32_MAGNITUDE;
      const uint32_t code =
        fp8core_cast_element(bits, FP8CORE_FP32, one->scale_inverse, one->dtype, one->scale, 0, 0, 1).code;
      largest = magnitude > largest ? magnitude : largest;
      if (fp8core_float_bits(sums[GUARD + i]) != bits)
        failed = fails(one, tiers[t].name, "the sum", i, fp8core_float_bits(sums[GUARD + i]), bits);
      if (codes[GUARD + i] != code) failed = fails(one, tiers[t].name, "the code", i, codes[GUARD + i], code);
      if (in_place[one->begin + i] != code)
        failed = fails(one, tiers[t].name, "the code in place", i, in_place[one->begin + i], code);
    }
    const uint32_t found = kernels->largest(&sum, one->begin, one->elements);
    if (!failed && found != largest) failed = fails(one, tiers[t].name, "the largest", 0, found, largest);
    if (!failed && requantised != largest)
      failed = fails(one, tiers[t].name, "the largest of those rounded", 0, requantised, largest);
    if (!failed && requantised_in_place != largest)
      failed = fails(one, tiers[t].name, "the largest of those rounded in place", 0, requantised_in_place, largest);
    for (size_t i = 0; i < GUARD && !failed; i++) {
      if (codes[i] != GUARD_BYTE || codes[GUARD + one->elements + i] != GUARD_BYTE)
        failed = fails(one, tiers[t].name, "a byte outside", i, codes[i], GUARD_BYTE);
      if (fp8core_float_bits(sums[i]) != UINT32_C(0xa5a5a5a5) ||
          fp8core_float_bits(sums[GUARD + one->elements + i]) != UINT32_C(0xa5a5a5a5))
        failed = fails(one, tiers[t].name, "a sum outside", i, fp8core_float_bits(sums[i]), UINT32_C(0xa5a5a5a5));
    }
    if (!failed && memcmp(in_place, sources[0], one->begin) != 0)
      failed = fails(one, tiers[t].name, "a byte before", 0, 0, 0);
  }
  free(codes);
  free(in_place);
  free(sums);
  return failed;
}

// Every pair of finite codes, with scales that keep, saturate and flush, and with extreme ones.
static int check_pairs(fp8core_dtype dtype) {
  static const float scales[][2] = {{0.5f, 1.0f},         {1.0f, 1.0f},           {0.333333343f, 2.71828f},
                                    {0x1p-20f, 3.0f},     {0x1p-126f, 0x1p126f},  {0x1p126f, 0x1p-126f},
                                    {0x1p126f, 0x1p126f}, {0x1p-126f, 0x1p-126f}, {1.7f, 0x1p-12f}};
  const size_t most = (size_t)256 * 256;
  unsigned char *one = allocate(most), *other = allocate(most);
  const unsigned char *sources[2] = {one, other};
  size_t count = 0;
  int failed = 0;
  for (uint32_t i = 0; i < 256; i++) {
    for (uint32_t j = 0; j < 256; j++) {
      if (!is_finite_code(dtype, i) || !is_finite_code(dtype, j)) continue;
      one[count] = (unsigned char)i;
      other[count++] = (unsigned char)j;
    }
  }
  for (size_t i = 0; i < sizeof(scales) / sizeof(*scales) && !failed; i++) {
    const sum_case pairs = {dtype, 2, 0, count, scales[i][0], scales[i][1]};
    failed = check(&pairs, sources);
  }
  free(one);
  free(other);
  return failed;
}

static int check_random(fp8core_dtype dtype) {
  static const int counts[] = {1, 2, 3, 5, 8, 16, 64};
  static const size_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 1000, 4099};
  unsigned char *memory[MOST_SOURCES];
  const unsigned char *sources[MOST_SOURCES];
  int failed = 0;
  for (int i = 0; i < MOST_SOURCES; i++) {
    memory[i] = allocate(8192);
    sources[i] = memory[i] + i % 7;
  }
  for (size_t c = 0; c < sizeof(counts) / sizeof(*counts) && !failed; c++) {
    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes) && !failed; s++) {
      for (int i = 0; i < MOST_SOURCES; i++)
        for (size_t j = 0; j < 8192; j++) memory[i][j] = random_code(dtype);
      sum_case one = {dtype, counts[c], random_bits() % 100, sizes[s], 0, 0};
      one.scale_inverse = (float)exp2(-3 - 6 * ((double)(random_bits() >> 11) * 0x1p-53));
      one.scale = (float)exp2(6 - 12 * ((double)(random_bits() >> 11) * 0x1p-53));
      failed = check(&one, sources);
    }
  }
  for (int i = 0; i < MOST_SOURCES; i++) free(memory[i]);
  return failed;
}

static double processor_time(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void bench(size_t bytes) {
  unsigned char *one = allocate(bytes), *other = allocate(bytes), *codes = allocate(bytes);
  const unsigned char *sources[2] = {one, other};
  const fp8comm_sum sum = {FP8CORE_E4M3, 2, sources};
  for (size_t i = 0; i < bytes; i++) {
    one[i] = random_code(FP8CORE_E4M3);
    other[i] = random_code(FP8CORE_E4M3);
  }
  for (int t = 0; t < tier_count; t++) {
    double best[2] = {1e9, 1e9};
    for (int round = 0; round < 5; round++) {
      double start = processor_time();
      const uint32_t largest = tiers[t].kernels->largest(&sum, 0, bytes);
      best[0] = fmin(best[0], processor_time() - start);
      start = processor_time();
      tiers[t].kernels->requantise(&sum, 0, bytes, 0.5f, fp8core_bits_float(largest) > 0 ? 1.0f : 0.5f, codes);
      best[1] = fmin(best[1], processor_time() - start);
    }
    printf("%-7s two sources: largest %6.2f, requantise %6.2f G elements/s\n", tiers[t].name,
           (double)bytes / best[0] * 1e-9, (double)bytes / best[1] * 1e-9);
  }
  free(one);
  free(other);
  free(codes);
}

int main(int argc, char **argv) {
  find_tiers();
  if (argc == 1) {
    int failed = 0;
    for (fp8core_dtype dtype = FP8CORE_E4M3; dtype <= FP8CORE_E5M2 && !failed; dtype++)
      failed = check_pairs(dtype) || check_random(dtype);
    if (!failed) printf("%d tiers agree with the rules\n", tier_count);
    return failed;
  }
  char *end = NULL;
  const long mebibytes = argc == 3 ? strtol(argv[2], &end, 10) : 8;
  const int asked = strcmp(argv[1], "--bench") == 0 && argc <= 3 && (!end || (end != argv[2] && *end == 0));
  if (asked && mebibytes > 0 && mebibytes <= 4096) {
    bench((size_t)mebibytes << 20);
    return 0;
  }
  const int help = argc == 2 && strcmp(argv[1], "--help") == 0;
  (void)fprintf(help ? stdout : stderr, "usage: check_sum [--bench [MiB]]\n");
  return help ? 0 : 2;
}
