// Every tier of the optimizer's kernels against the scalar rules of libfp8optim's rules.h, bit for bit. No test
// framework: prints the parameters of a failure and returns 1.
//
//   check_adamw                  the checks
//   check_adamw --bench [MiB]    GB/s and parameters a second of each tier, one thread, in processor time
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cpu/kernels.h"
#include "fp8core/fp8core.h"

#define GUARD 128
#define GUARD_BYTE 0xa5
#define PARTS FP8OPTIM_PARTS
#define STATES FP8OPTIM_STATES
// The gradient is the buffer after the parts.
#define BUFFERS (PARTS + 1)
#define GRADIENT PARTS

static int failures;

typedef struct tier {
  const char *name;
  const fp8optim_kernels *kernels;
  fp8core_isa isa;
} tier;

static tier tiers[3];
static int tier_count;

static void find_tiers(void) {
  const fp8core_isa best = fp8core_isa_best();
  tiers[tier_count++] = (tier){"scalar", &fp8optim_kernels_scalar, FP8CORE_ISA_SCALAR};
#if defined(FP8OPTIM_HAVE_AVX2)
  if (best >= FP8CORE_ISA_AVX2) tiers[tier_count++] = (tier){"avx2", &fp8optim_kernels_avx2, FP8CORE_ISA_AVX2};
#endif
#if defined(FP8OPTIM_HAVE_AVX512)
  if (best >= FP8CORE_ISA_AVX512) tiers[tier_count++] = (tier){"avx512", &fp8optim_kernels_avx512, FP8CORE_ISA_AVX512};
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

static double random_uniform(void) { return (double)(random_bits() >> 11) * 0x1p-53; }

// A magnitude between two powers of two, its logarithm evenly spread.
static double random_magnitude(int lowest, int highest) { return exp2(lowest + (highest - lowest) * random_uniform()); }

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes);
  if (!memory) {
    printf("out of memory: %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
}

// Values of a step as it comes; finite codes of any kind; what rounds to a tie, with factors of few bits; the same with
// a master that only keeps its value, so that the weight sees the ties; edges of the formats; zeros of both signs
// beside them; tensors whose old scales are far from what the gradient asks for.
enum { KIND_STEP, KIND_CODES, KIND_TIES, KIND_KEPT, KIND_EDGES, KIND_ZEROS, KIND_RATIOS, KINDS };

static const char *const kind_names[KINDS] = {"step", "codes", "ties", "kept", "edges", "zeros", "ratios"};

typedef struct update_case {
  const char *what;
  const char *tier;
  int kind;
  int with_weight;
  int64_t length;
  uint64_t first_element;
  // Instead of the kind's, where it is not 0.
  float weight_factor;
  fp8optim_update_job job;
  int offsets[BUFFERS];
} update_case;

static fp8core_dtype dtype_of(const update_case *c, int buffer) {
  return buffer == GRADIENT ? c->job.gradient_dtype : c->job.dtype[buffer];
}

static int64_t bytes_of(const update_case *c, int buffer) {
  return (int64_t)fp8core_dtype_size(dtype_of(c, buffer)) * c->length;
}

static void report(const update_case *c, const char *what, int64_t index, uint32_t got, uint32_t expected) {
  if (failures++ >= 20) return;
  const fp8optim_constants *k = &c->job.constants;
  printf("FAILED %s: %s, %s, states %s %s %s, gradient %s, weight %s, %s, %lld elements from %llu, offsets %d %d %d %d "
         "%d, constants %a %a %a %a %a %a %a %a: %s %lld is %x, expected %x\n",
         c->what, c->tier, kind_names[c->kind], fp8core_dtype_name(c->job.dtype[0]),
         fp8core_dtype_name(c->job.dtype[1]), fp8core_dtype_name(c->job.dtype[2]),
         fp8core_dtype_name(c->job.gradient_dtype), c->with_weight ? fp8core_dtype_name(c->job.dtype[3]) : "none",
         c->job.stochastic ? "stochastic" : "nearest", (long long)c->length, (unsigned long long)c->first_element,
         c->offsets[0], c->offsets[1], c->offsets[2], c->offsets[3], c->offsets[4], (double)k->exp_avg_keep,
         (double)k->exp_avg_gradient, (double)k->exp_avg_sq_keep, (double)k->exp_avg_sq_gradient, (double)k->eps,
         (double)k->master_keep, (double)k->master_change, (double)k->weight_factor, what, (long long)index, got,
         expected);
}

// A finite code with a magnitude up to `limit`; never negative for second moments.
static uint32_t limited_code(fp8core_dtype dtype, float value, float limit, int negative) {
  if (fabsf(value) > limit) value = limit * (value < 0.0f ? -1.0f : 1.0f);
  return fp8core_encode(dtype, negative ? value : fabsf(value), 1);
}

static uint32_t random_code(fp8core_dtype dtype, float limit, int negative) {
  const uint64_t bits = random_bits();
  const fp8core_format format = fp8core_format_of(dtype);
  uint32_t code = (uint32_t)bits % (format.max_code + 1);
  if (negative && bits >> 63) code |= UINT32_C(1) << (format.bits - 1);
  return limited_code(dtype, fp8core_decode(dtype, code), limit, negative);
}

static uint32_t edge_code(fp8core_dtype dtype, float limit, int negative) {
  const fp8core_format format = fp8core_format_of(dtype);
  const uint32_t one = UINT32_C(1) << format.mantissa_bits;
  const uint32_t codes[] = {0, 1, 2, 3, one - 1, one, one + 1, format.max_code - 1, format.max_code};
  const uint64_t bits = random_bits();
  uint32_t code = codes[bits % (sizeof(codes) / sizeof(codes[0]))];
  if (negative && bits >> 63) code |= UINT32_C(1) << (format.bits - 1);
  return limited_code(dtype, fp8core_decode(dtype, code), limit, negative);
}

static uint32_t input_code(int kind, fp8core_dtype dtype, float largest, float limit, int negative) {
  const uint64_t bits = random_bits();
  switch (kind) {
  case KIND_CODES: return random_code(dtype, limit, negative);
  case KIND_EDGES: return edge_code(dtype, limit, negative);
  case KIND_ZEROS:
    if (bits % 4 != 0) return negative && bits >> 63 ? UINT32_C(1) << (fp8core_format_of(dtype).bits - 1) : 0;
    return bits & 4 ? edge_code(dtype, limit, negative) : random_code(dtype, limit, negative);
  case KIND_RATIOS:
    return limited_code(dtype, (float)(random_magnitude(-40, 0) * (double)largest * (bits & 1 ? 1 : -1)), limit,
                        negative);
  default: break;
  }
  // Mostly within a few powers of two of each other, some far below.
  const double magnitude = bits % 8 == 0 ? random_magnitude(-30, 0) : random_magnitude(-6, 0);
  return limited_code(dtype, (float)(magnitude * (double)largest * (bits & 256 ? 1 : -1)), limit, negative);
}

static void store(const update_case *c, unsigned char *const at[BUFFERS], int buffer, int64_t index, uint32_t code) {
  fp8optim_store_code(dtype_of(c, buffer), at[buffer], index, code);
}

// Magnitudes up to a quarter of the maximum, so that sums of few of them stay within it.
static float tie_limit(fp8core_dtype dtype) {
  return dtype == FP8CORE_FP32 || dtype == FP8CORE_BF16 ? 0x1p30f : fp8core_dtype_max(dtype) * 0.25f;
}

static void fill_ties(update_case *c, unsigned char *const at[BUFFERS]) {
  static const float factors[] = {1.0f, 1.0f, 0.5f, 1.0625f, 1.0f + 0x1p-4f, 1.0f + 0x1p-8f, 1.0f + 0x1p-11f, 0.75f};
#define FACTOR factors[random_bits() % (sizeof(factors) / sizeof(factors[0]))]
  fp8optim_constants *k = &c->job.constants;
  k->exp_avg_keep = FACTOR;
  k->exp_avg_gradient = FACTOR;
  k->exp_avg_shrink = random_bits() % 2 ? FACTOR * 0.25f : 0.0f;
  k->exp_avg_sq_keep = FACTOR;
  k->exp_avg_sq_gradient = FACTOR * 0.5f;
  k->eps = 1.0f;
  k->master_keep = FACTOR;
  k->master_change = c->kind == KIND_KEPT ? 0.0f : FACTOR;
  k->weight_factor = random_bits() % 2 ? 1.0f : 0.25f;
  float gradient_limit = fminf(tie_limit(c->job.dtype[FP8OPTIM_EXP_AVG]), tie_limit(c->job.gradient_dtype));
  gradient_limit = fminf(gradient_limit, sqrtf(tie_limit(c->job.dtype[FP8OPTIM_EXP_AVG_SQ])));
  for (int64_t i = 0; i < c->length; i++) {
    for (int state = 0; state < STATES; state++) {
      const fp8core_dtype dtype = c->job.dtype[state];
      // Around a tie of the weight, or of another state; zero where only the gradient is to count.
      const fp8core_dtype target = c->job.dtype[random_bits() % PARTS];
      const uint32_t code = (uint32_t)random_bits() % fp8core_format_of(target).max_code;
      const float lower = fp8core_decode(target, code);
      const float tie = lower + (fp8core_decode(target, code + 1) - lower) * 0.5f;
      const uint32_t near = fp8core_float_bits(tie) + (uint32_t)random_bits() % 3 - 1;
      const float value = random_bits() % 4 == 0 ? 0.0f : fp8core_bits_float(near);
      const float signed_value = random_bits() % 2 ? value : -value;
      store(c, at, state, i, limited_code(dtype, signed_value, tie_limit(dtype), state != FP8OPTIM_EXP_AVG_SQ));
    }
    store(c, at, GRADIENT, i,
          random_bits() % 3 == 0
            ? random_code(c->job.gradient_dtype, gradient_limit, 1)
            : limited_code(c->job.gradient_dtype, (float)(random_magnitude(-12, 2) * (random_bits() % 2 ? 1 : -1)),
                           gradient_limit, 1));
  }
}

static float largest_of(const update_case *c, unsigned char *const at[BUFFERS], int buffer) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < c->length; i++) fp8optim_raise(&largest, fp8optim_load(dtype_of(c, buffer), at[buffer], i));
  return fp8core_bits_float(largest);
}

// States and gradients of the kind, with the scales and constants that a step would have.
static void fill_step(update_case *c, unsigned char *const at[BUFFERS]) {
  const int ratios = c->kind == KIND_RATIOS;
  fp8optim_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  for (int buffer = 0; buffer < BUFFERS; buffer++) {
    if (buffer == FP8OPTIM_WEIGHT) continue;
    const fp8core_dtype dtype = dtype_of(c, buffer);
    const int wide = dtype == FP8CORE_BF16 || dtype == FP8CORE_FP32;
    // Beyond a norm of 2^63 a step is skipped. First moments without second ones to match may not be so large that
    // their quotient is infinite.
    const float limit = !wide                        ? INFINITY
                        : buffer == GRADIENT         ? 0x1p62f
                        : buffer == FP8OPTIM_EXP_AVG ? 0x1p20f
                                                     : 0x1p120f;
    const float largest = wide ? (float)random_magnitude(ratios ? -100 : -20, ratios ? 60 : 4)
                               : fp8core_dtype_max(dtype) * (float)random_magnitude(-2, 0);
    for (int64_t i = 0; i < c->length; i++)
      store(c, at, buffer, i, input_code(c->kind, dtype, largest, limit, buffer != FP8OPTIM_EXP_AVG_SQ));
  }
  for (int part = 0; part < PARTS; part++) {
    const int scaled = c->job.dtype[part] != FP8CORE_BF16 && c->job.dtype[part] != FP8CORE_FP32;
    int exponent = scaled ? (int)(random_bits() % 40) - 8 : 0;
    if (ratios && scaled) exponent = (int)(random_bits() % 100) - 50;
    tensor.dtype[part] = c->job.dtype[part];
    tensor.scale[part] = ldexpf(1.0f, exponent);
    if (part == FP8OPTIM_EXP_AVG || part == FP8OPTIM_EXP_AVG_SQ)
      tensor.scale[part] *= scaled ? (float)(1.0 + random_uniform()) : 1.0f;
    tensor.scale_inverse[part] = 1.0f / tensor.scale[part];
    if (part < STATES) tensor.amax[part] = largest_of(c, at, part) * tensor.scale_inverse[part];
  }
  tensor.gradient_amax = largest_of(c, at, GRADIENT);
  fp8optim_group group = fp8optim_group_default();
  group.learning_rate = random_bits() % 8 == 0 ? 0.0 : random_magnitude(-20, -2);
  group.beta1 = random_bits() % 8 == 0 ? 0.0 : 1.0 - random_magnitude(-6, -1);
  group.beta2 = random_bits() % 8 == 0 ? 0.0 : 1.0 - random_magnitude(-10, -2);
  group.weight_decay = random_bits() % 2 ? 0.1 : 0.0;
  group.eps = random_magnitude(-60, -10);
  const fp8optim_group_step step = fp8optim_group_rule(&group, 1 + (int64_t)(random_bits() % 1000));
  // Gradients that are small or huge beside the states, up to a norm of 2^63, beyond which a step is skipped.
  const int highest = (int)fmin(ratios ? 60.0 : 4.0, 61.0 - log2((double)tensor.gradient_amax + 0x1p-100));
  const float inverse = (float)random_magnitude(highest - (ratios ? 90 : 14), highest);
  fp8optim_plan_rule(&tensor, &step, random_bits() % 2 ? 1.0f : 0.37f, random_bits() % 2 ? 1.0f : 64.0f, inverse,
                     &c->job.constants);
}

typedef struct buffers {
  unsigned char *memory[BUFFERS];
  unsigned char *at[BUFFERS];
  size_t bytes[BUFFERS];
} buffers;

static void allocate_buffers(const update_case *c, buffers *b) {
  for (int buffer = 0; buffer < BUFFERS; buffer++) {
    b->bytes[buffer] = (size_t)bytes_of(c, buffer) + 2 * GUARD + 128;
    b->memory[buffer] = allocate(b->bytes[buffer]);
    memset(b->memory[buffer], GUARD_BYTE, b->bytes[buffer]);
    b->at[buffer] =
      b->memory[buffer] + GUARD + (64 - ((uintptr_t)b->memory[buffer] + GUARD) % 64) % 64 + c->offsets[buffer];
  }
}

static void free_buffers(buffers *b) {
  for (int buffer = 0; buffer < BUFFERS; buffer++) free(b->memory[buffer]);
}

static void expect(const update_case *c, buffers *b, uint32_t amax[STATES]) {
  void *const data[PARTS] = {b->at[0], b->at[1], b->at[2], c->with_weight ? b->at[FP8OPTIM_WEIGHT] : NULL};
  for (int64_t i = 0; i < c->length; i++) {
    const uint32_t draw =
      c->job.stochastic ? fp8core_draw(c->job.seed, c->job.tensor_id, c->job.step, c->first_element + (uint64_t)i) : 0;
    fp8optim_update_element(c->job.dtype, data, c->job.gradient_dtype, b->at[GRADIENT], i, &c->job.constants,
                            c->job.stochastic, draw, amax);
  }
}

// The first byte in which the areas differ decides what is reported: an element, or a guard.
static void compare(const update_case *c, unsigned char *const at[BUFFERS], unsigned char *const expected_at[BUFFERS]) {
  static const char *const names[BUFFERS] = {"master", "exp_avg", "exp_avg_sq", "weight", "gradient"};
  for (int buffer = 0; buffer < BUFFERS; buffer++) {
    const int64_t bytes = bytes_of(c, buffer);
    if (memcmp(at[buffer] - GUARD, expected_at[buffer] - GUARD, (size_t)bytes + 2 * GUARD) == 0) continue;
    for (int64_t i = -GUARD; i < bytes + GUARD; i++) {
      if (at[buffer][i] == expected_at[buffer][i]) continue;
      if (i < 0 || i >= bytes) {
        report(c, i < 0 ? "byte before, guard" : "byte after, guard", i, at[buffer][i], expected_at[buffer][i]);
      } else {
        const int64_t index = i / (int64_t)fp8core_dtype_size(dtype_of(c, buffer));
        report(c, names[buffer], index, fp8optim_load_code(dtype_of(c, buffer), at[buffer], index),
               fp8optim_load_code(dtype_of(c, buffer), expected_at[buffer], index));
      }
      break;
    }
  }
}

static void run_tier(update_case *c, const tier *t, const buffers *input, const buffers *expected,
                     const uint32_t before[STATES], const uint32_t amax[STATES]) {
  buffers b;
  uint32_t found[STATES];
  c->tier = t->name;
  allocate_buffers(c, &b);
  for (int buffer = 0; buffer < BUFFERS; buffer++) memcpy(b.at[buffer], input->at[buffer], (size_t)bytes_of(c, buffer));
  memcpy(found, before, sizeof(found));
  void *const data[PARTS] = {b.at[0], b.at[1], b.at[2], c->with_weight ? b.at[FP8OPTIM_WEIGHT] : NULL};
  t->kernels->update(&c->job, b.at[GRADIENT], data, c->first_element, c->length, found);
  compare(c, b.at, expected->at);
  for (int state = 0; state < STATES; state++)
    if (found[state] != amax[state]) report(c, "scaled amax of state", state, found[state], amax[state]);
  free_buffers(&b);
}

static void check_update(update_case *c) {
  buffers input;
  buffers expected;
  uint32_t before[STATES];
  uint32_t amax[STATES];
  allocate_buffers(c, &input);
  allocate_buffers(c, &expected);
  memset(&c->job.constants, 0, sizeof(c->job.constants));
  if (c->kind == KIND_TIES || c->kind == KIND_KEPT)
    fill_ties(c, input.at);
  else
    fill_step(c, input.at);
  if (c->weight_factor != 0.0f) c->job.constants.weight_factor = c->weight_factor;
  for (int buffer = 0; buffer < BUFFERS; buffer++)
    memcpy(expected.at[buffer], input.at[buffer], (size_t)bytes_of(c, buffer));
  // Raised, never set: some start above what is found.
  for (int state = 0; state < STATES; state++)
    amax[state] = before[state] = random_bits() % 4 == 0 ? UINT32_C(0x7e000000) : 0;
  expect(c, &expected, amax);
  for (int i = 0; i < tier_count; i++) {
    // The scalar kernel is the rule in a loop.
    if (tiers[i].isa == FP8CORE_ISA_SCALAR && random_bits() % 8 != 0) continue;
    run_tier(c, &tiers[i], &input, &expected, before, amax);
  }
  free_buffers(&input);
  free_buffers(&expected);
}

static update_case case_of(const char *what, const fp8core_dtype dtype[BUFFERS], int with_weight) {
  static const uint64_t firsts[] = {0, 4, 16384, UINT64_C(0x3fffffffc), UINT64_C(0x4000000000000004)};
  update_case c;
  memset(&c, 0, sizeof(c));
  c.what = what;
  c.with_weight = with_weight;
  for (int part = 0; part < PARTS; part++) c.job.dtype[part] = dtype[part];
  c.job.gradient_dtype = dtype[GRADIENT];
  c.job.stochastic = random_bits() % 4 == 0;
  c.job.seed = random_bits();
  c.job.tensor_id = (uint32_t)random_bits();
  c.job.step = (uint32_t)random_bits();
  c.first_element = firsts[random_bits() % (sizeof(firsts) / sizeof(firsts[0]))];
  for (int buffer = 0; buffer < BUFFERS; buffer++) c.offsets[buffer] = (int)(random_bits() % 64);
  return c;
}

// Weights 0 to 4 are the formats, 5 is none.
#define WEIGHTS (FP8CORE_DTYPE_COUNT + 1)

static void formats_of(int number, fp8core_dtype dtype[BUFFERS], int *with_weight) {
  const int weight = number % WEIGHTS;
  number /= WEIGHTS;
  for (int buffer = 0; buffer < BUFFERS; buffer++) {
    if (buffer == FP8OPTIM_WEIGHT) continue;
    dtype[buffer] = (fp8core_dtype)(number % FP8CORE_DTYPE_COUNT);
    number /= FP8CORE_DTYPE_COUNT;
  }
  *with_weight = weight < FP8CORE_DTYPE_COUNT;
  dtype[FP8OPTIM_WEIGHT] = *with_weight ? (fp8core_dtype)weight : FP8CORE_FP32;
}

#define FORMATS (5 * 5 * 5 * 5 * WEIGHTS)

// Every combination of formats, every length up to 130 in some combination of each kind.
static void check_formats(void) {
  for (int number = 0; number < FORMATS; number++) {
    fp8core_dtype dtype[BUFFERS];
    int with_weight;
    formats_of(number, dtype, &with_weight);
    for (int kind = 0; kind < KINDS; kind++) {
      for (int round = 0; round < 16; round++) {
        update_case c = case_of("formats", dtype, with_weight);
        c.kind = kind;
        c.length = (int64_t)(random_bits() % 131);
        check_update(&c);
      }
    }
  }
}

static const fp8core_dtype preset_formats[][BUFFERS] = {
  {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E4M3},
  {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_BF16, FP8CORE_BF16},
  {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_BF16},
  {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_BF16, FP8CORE_E4M3},
  {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_FP32, FP8CORE_FP32},
  {FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32},
  {FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32, FP8CORE_BF16, FP8CORE_BF16},
  {FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32, FP8CORE_BF16, FP8CORE_FP32},
  {FP8CORE_FP32, FP8CORE_FP32, FP8CORE_FP32, FP8CORE_E4M3, FP8CORE_E4M3},
  {FP8CORE_BF16, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E4M3},
  {FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E4M3},
  {FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_E4M3},
  {FP8CORE_E5M2, FP8CORE_E5M2, FP8CORE_E5M2, FP8CORE_E5M2, FP8CORE_E5M2},
};
#define PRESETS ((int)(sizeof(preset_formats) / sizeof(preset_formats[0])))

// All lengths, all kinds, and some of several thousand elements, of the formats that are used together.
static void check_presets(void) {
  static const int64_t lengths[] = {1023, 4096, 4097, 5000, 16384};
  for (int preset = 0; preset < PRESETS; preset++) {
    for (int kind = 0; kind < KINDS; kind++) {
      for (int with_weight = 0; with_weight < 2; with_weight++) {
        for (int stochastic = 0; stochastic < 2; stochastic++) {
          for (int64_t length = 0; length <= 130; length++) {
            update_case c = case_of("lengths", preset_formats[preset], with_weight);
            c.kind = kind;
            c.job.stochastic = stochastic;
            c.length = length;
            check_update(&c);
          }
        }
        update_case c = case_of("long", preset_formats[preset], with_weight);
        c.kind = kind;
        c.length = lengths[random_bits() % (sizeof(lengths) / sizeof(lengths[0]))];
        check_update(&c);
      }
    }
  }
}

// Each buffer in turn at every offset from a multiple of 64 bytes.
static void check_alignments(void) {
  for (int preset = 0; preset < PRESETS; preset++) {
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
      for (int offset = 0; offset < 64; offset++) {
        update_case c = case_of("alignments", preset_formats[preset], 1);
        memset(c.offsets, 0, sizeof(c.offsets));
        c.offsets[buffer] = offset;
        c.kind = KIND_STEP;
        c.length = 101;
        check_update(&c);
      }
    }
  }
}

// Weights of 8-bit masters near the end of FP32's range: the scales are far apart, and their ratio with a factor of the
// load's overflows.
static void check_huge_masters(void) {
  static const fp8core_dtype masters[] = {FP8CORE_E4M3, FP8CORE_E5M2};
  for (int master = 0; master < 2; master++) {
    for (int weight = 0; weight < FP8CORE_DTYPE_COUNT; weight++) {
      for (int exponent = 100; exponent <= 126; exponent++) {
        const fp8core_dtype dtype[BUFFERS] = {masters[master], FP8CORE_E4M3, FP8CORE_FP16, (fp8core_dtype)weight,
                                              FP8CORE_FP32};
        update_case c = case_of("huge masters", dtype, 1);
        c.kind = KIND_KEPT;
        c.length = (int64_t)(random_bits() % 131);
        c.weight_factor = ldexpf(1.0f, exponent);
        check_update(&c);
      }
    }
  }
}

// A page that may be written, between two that may not be touched.
static unsigned char *guarded_page(void) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  unsigned char *pages = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED || mprotect(pages + page, page, PROT_READ | PROT_WRITE) != 0) {
    printf("cannot map guard pages\n");
    exit(1);
  }
  return pages + page;
}

// Buffers that end at, or start after, a page that may not be touched.
static void check_page_edges(void) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  unsigned char *pages[BUFFERS];
  for (int buffer = 0; buffer < BUFFERS; buffer++) pages[buffer] = guarded_page();
  for (int preset = 0; preset < PRESETS; preset++) {
    for (int64_t length = 1; length <= 130; length++) {
      for (int at_end = 0; at_end < 2; at_end++) {
        update_case c = case_of("page edges", preset_formats[preset], 1);
        unsigned char *at[BUFFERS];
        uint32_t amax[STATES] = {0, 0, 0};
        c.kind = KIND_STEP;
        c.length = length;
        for (int buffer = 0; buffer < BUFFERS; buffer++)
          at[buffer] = pages[buffer] + (at_end ? page - (size_t)bytes_of(&c, buffer) : 0);
        fill_step(&c, at);
        void *const data[PARTS] = {at[0], at[1], at[2], at[3]};
        for (int i = 1; i < tier_count; i++)
          tiers[i].kernels->update(&c.job, at[GRADIENT], data, c.first_element, length, amax);
        uint32_t largest = 0;
        for (int i = 1; i < tier_count; i++)
          (void)tiers[i].kernels->measure(c.job.gradient_dtype, at[GRADIENT], length, &largest);
      }
    }
  }
  for (int buffer = 0; buffer < BUFFERS; buffer++) (void)munmap(pages[buffer] - page, 3 * page);
}

// The lanes as kernels.h defines them.
static double expected_squares(fp8core_dtype dtype, const void *data, int64_t elements, uint32_t *amax) {
  double sum = 0.0;
  for (int64_t lane = 0; lane < FP8OPTIM_LANES; lane++) {
    float narrow = 0.0f;
    double wide = 0.0;
    for (int64_t i = lane; i < elements; i += FP8OPTIM_LANES) {
      const float value = fp8core_decode(dtype, fp8optim_load_code(dtype, data, i));
      const uint32_t magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
      if (magnitude > *amax) *amax = magnitude;
      narrow = narrow + value * value;
      wide = wide + (double)value * (double)value;
    }
    sum += dtype == FP8CORE_BF16 || dtype == FP8CORE_FP32 ? wide : (double)narrow;
  }
  return sum;
}

static void check_measure(fp8core_dtype dtype, int64_t length, int kind, int nonfinite) {
  unsigned char *memory = allocate((size_t)length * 4 + 128);
  unsigned char *data = memory + random_bits() % 64;
  const fp8core_format format = fp8core_format_of(dtype);
  for (int64_t i = 0; i < length; i++)
    fp8optim_store_code(dtype, data, i, input_code(kind, dtype, fminf(fp8core_dtype_max(dtype), 8.0f), INFINITY, 1));
  if (nonfinite && length > 0) {
    // An infinity where there is one, or a NaN of either sign.
    const int64_t place = (int64_t)(random_bits() % (uint64_t)length);
    const uint32_t code = random_bits() % 2 ? format.overflow_code : format.nan_code;
    const uint32_t sign = random_bits() % 2 ? UINT32_C(1) << (format.bits - 1) : 0;
    fp8optim_store_code(dtype, data, place, code | sign);
  }
  const uint32_t before = random_bits() % 8 == 0 ? UINT32_C(0x7e000000) : 0;
  uint32_t amax = before;
  const double sum = expected_squares(dtype, data, length, &amax);
  for (int i = 0; i < tier_count; i++) {
    uint32_t found = before;
    const double got = tiers[i].kernels->measure(dtype, data, length, &found);
    // The payload of a NaN is open; whether there is one, or an infinity, is not.
    const int same_amax = found == amax || (found > FP8CORE_F32_INFINITY && amax > FP8CORE_F32_INFINITY);
    if ((same_amax && (nonfinite || memcmp(&got, &sum, sizeof(sum)) == 0)) || failures++ >= 20) continue;
    printf("FAILED measure: %s, %s, %s, %lld elements at offset %d: sum %a and amax %08x, expected %a and %08x\n",
           tiers[i].name, fp8core_dtype_name(dtype), kind_names[kind], (long long)length, (int)((uintptr_t)data % 64),
           got, found, sum, amax);
  }
  free(memory);
}

static void check_measures(void) {
  static const int kinds[] = {KIND_STEP, KIND_CODES, KIND_EDGES, KIND_ZEROS};
  for (int dtype = 0; dtype < FP8CORE_DTYPE_COUNT; dtype++) {
    for (size_t kind = 0; kind < sizeof(kinds) / sizeof(kinds[0]); kind++) {
      for (int nonfinite = 0; nonfinite < 2; nonfinite++) {
        for (int64_t length = 0; length <= 130; length++)
          for (int round = 0; round < 3; round++) check_measure((fp8core_dtype)dtype, length, kinds[kind], nonfinite);
        for (int64_t length = 4095; length <= FP8OPTIM_CHUNK; length += 4096 - length % 4096 + (length % 2))
          check_measure((fp8core_dtype)dtype, length, kinds[kind], nonfinite);
        check_measure((fp8core_dtype)dtype, FP8OPTIM_CHUNK, kinds[kind], nonfinite);
      }
    }
  }
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare_doubles(const void *one, const void *other) {
  const double a = *(const double *)one;
  const double b = *(const double *)other;
  return (a > b) - (a < b);
}

// Chunk by chunk, as a step does.
static double bench_pass(const update_case *c, const tier *t, unsigned char *const at[BUFFERS], int64_t elements,
                         int measure) {
  uint32_t amax[STATES] = {0, 0, 0};
  double unused = 0.0;
  const double start = seconds();
  for (int64_t i = 0; i < elements; i += FP8OPTIM_CHUNK) {
    unsigned char *moved[BUFFERS];
    const int64_t length = elements - i < FP8OPTIM_CHUNK ? elements - i : FP8OPTIM_CHUNK;
    for (int buffer = 0; buffer < BUFFERS; buffer++)
      moved[buffer] = at[buffer] + i * (int64_t)fp8core_dtype_size(dtype_of(c, buffer));
    void *const data[PARTS] = {moved[0], moved[1], moved[2], moved[3]};
    if (measure)
      unused += t->kernels->measure(c->job.gradient_dtype, moved[GRADIENT], length, amax);
    else
      t->kernels->update(&c->job, moved[GRADIENT], data, (uint64_t)i, length, amax);
  }
  return seconds() - start + 0.0 * unused;
}

static void bench_one(const tier *t, const fp8core_dtype dtype[BUFFERS], int stochastic, int64_t elements) {
  enum { PASSES = 7 };
  update_case c = case_of("bench", dtype, 1);
  unsigned char *at[BUFFERS];
  double update_times[PASSES];
  double measure_times[PASSES];
  double moved = 0.0;
  c.kind = KIND_STEP;
  c.length = elements;
  c.job.stochastic = stochastic;
  for (int buffer = 0; buffer < BUFFERS; buffer++) {
    at[buffer] = aligned_alloc(64, (size_t)bytes_of(&c, buffer) / 64 * 64 + 64);
    if (!at[buffer]) exit(1);
    memset(at[buffer], 0, (size_t)bytes_of(&c, buffer));
    moved += (double)bytes_of(&c, buffer) * (buffer < STATES ? 2 : 1);
  }
  fill_step(&c, at);
  // Pass 0 of each touches the memory.
  for (int pass = 0; pass < PASSES; pass++) {
    update_times[pass] = bench_pass(&c, t, at, elements, 0);
    measure_times[pass] = bench_pass(&c, t, at, elements, 1);
  }
  qsort(update_times + 1, PASSES - 1, sizeof(double), compare_doubles);
  qsort(measure_times + 1, PASSES - 1, sizeof(double), compare_doubles);
  const double update_time = update_times[PASSES / 2];
  const double measure_time = measure_times[PASSES / 2];
  printf(
    "%-8s %s/%s/%s, gradient %s, weight %s%s   update %6.1f GB/s %7.3f G parameters/s   measure %6.1f GB/s %7.3f G "
    "parameters/s\n",
    t->name, fp8core_dtype_name(dtype[0]), fp8core_dtype_name(dtype[1]), fp8core_dtype_name(dtype[2]),
    fp8core_dtype_name(dtype[GRADIENT]), fp8core_dtype_name(dtype[FP8OPTIM_WEIGHT]), stochastic ? ", stochastic" : "",
    moved / update_time * 1e-9, (double)elements / update_time * 1e-9,
    (double)bytes_of(&c, GRADIENT) / measure_time * 1e-9, (double)elements / measure_time * 1e-9);
  for (int buffer = 0; buffer < BUFFERS; buffer++) free(at[buffer]);
}

static int bench(size_t mebibytes) {
  const int64_t elements = (int64_t)(mebibytes << 20) / 16;
  printf("%lld parameters, one thread, processor time, medians of 6 passes; bytes read and written count, each once\n",
         (long long)elements);
  for (int i = tier_count - 1; i >= 0; i--) {
    for (int preset = 0; preset < PRESETS; preset++) bench_one(&tiers[i], preset_formats[preset], 0, elements);
    bench_one(&tiers[i], preset_formats[0], 1, elements);
  }
  return 0;
}

int main(int argc, char **argv) {
  find_tiers();
  if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
    const size_t mebibytes = argc > 2 ? strtoul(argv[2], NULL, 10) : 256;
    return bench(mebibytes ? mebibytes : 256);
  }
  check_measures();
  check_formats();
  check_presets();
  check_alignments();
  check_huge_masters();
  check_page_edges();
  printf("tiers up to %s against the scalar rule: %d failures\n", tiers[tier_count - 1].name, failures);
  return failures ? 1 : 0;
}
