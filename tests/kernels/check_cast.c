// Every tier of the CPU's casts against the scalar rule of numerics.h, bit for bit. No test framework: prints the
// parameters of a failure and returns 1.
//
//   check_cast                  the checks
//   check_cast --bench [MiB]    GB/s of each tier beside a copy of as many bytes; one thread in processor time
//   check_cast --instructions   instructions a value of each tier, counted by single steps
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && defined(__x86_64__)
#  include <signal.h>
#  include <sys/ptrace.h>
#  include <sys/wait.h>
#  define CAN_COUNT_INSTRUCTIONS 1
#else
#  define CAN_COUNT_INSTRUCTIONS 0
#endif

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

#include "fp8core/fp8core.h"
#include "numerics.h"

#define GUARD 128
#define GUARD_BYTE 0xa5
#define THREAD_COUNTS 3

static const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
static int failures;
// Asked once: CPUID is slow in a virtual machine.
static fp8core_isa best;

typedef struct cast_case {
  fp8core_isa isa;
  int threads;
  fp8core_dtype from;
  fp8core_dtype to;
  fp8core_rounding rounding;
  int saturate;
  float scale_inverse;
  float scale;
  int64_t rows;
  int64_t columns;
  int64_t source_stride;
  int64_t destination_stride;
  int64_t transposed_stride;
  uint64_t first_element;
  const char *what;
} cast_case;

static void report(const cast_case *c, const char *format, const char *detail, int64_t index, uint32_t got,
                   uint32_t expected) {
  if (failures++ >= 20) return;
  printf(
    "FAILED %s: %s %s -> %s, %s, %s, scale_inverse %a, scale %a, [%lld, %lld], strides %lld %lld %lld, first %llu, "
    "%d threads: ",
    c->what, fp8core_isa_name(c->isa), fp8core_dtype_name(c->from), fp8core_dtype_name(c->to),
    c->rounding == FP8CORE_ROUND_STOCHASTIC ? "stochastic" : "nearest", c->saturate ? "saturating" : "not saturating",
    (double)c->scale_inverse, (double)c->scale, (long long)c->rows, (long long)c->columns, (long long)c->source_stride,
    (long long)c->destination_stride, (long long)c->transposed_stride, (unsigned long long)c->first_element,
    c->threads);
  printf(format, detail, (long long)index, got, expected);
  printf("\n");
}

static uint64_t random_state = 1;

static uint64_t random_bits(void) {
  random_state += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static uint32_t load_code(const unsigned char *data, int64_t index, size_t bytes) {
  uint32_t code = 0;
  memcpy(&code, data + index * (int64_t)bytes, bytes);
  return code;
}

static void store_code(unsigned char *data, int64_t index, size_t bytes, uint32_t code) {
  memcpy(data + index * (int64_t)bytes, &code, bytes);
}

// Kinds of input: random bits; values that mostly fit; ties of the destination and their neighbours; specials and
// zeros.
enum { KIND_BITS, KIND_FITTING, KIND_TIES, KIND_SPECIALS, KINDS };

static uint32_t input_bits(int kind, fp8core_dtype to) {
  static const uint32_t specials[] = {
    0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7fa00000, 0x7f800001, 0xffc00000, 0xffffffff,
    0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x43e80000, 0x43e80001, 0x43e7ffff,
    0x43e00000, 0x47600000, 0x476fffff, 0x47700000, 0x47700001, 0x477fefff, 0x477ff000, 0x7f7f7fff, 0x7f7f8000,
    0x3f800000, 0x00000000, 0x80000000, 0x3a800000, 0x3a800008, 0x37000000, 0x36ffffff};
  const uint64_t bits = random_bits();
  const uint32_t low = (uint32_t)bits;
  const uint32_t high = (uint32_t)(bits >> 32);
  const fp8core_format format = fp8core_format_of(to);
  if (kind == KIND_BITS) return low;
  if (kind == KIND_SPECIALS) return specials[high % (sizeof(specials) / sizeof(specials[0]))];
  const uint32_t sign = low & FP8CORE_F32_SIGN;
  if (kind == KIND_FITTING) {
    // From a little below the smallest subnormal up to the maximum.
    const uint32_t lowest =
      (uint32_t)(format.min_exponent + 127 > 24 ? format.min_exponent + 127 - format.mantissa_bits - 3 : 0);
    const uint32_t highest = format.max_value >> 23;
    const uint32_t magnitude = (lowest + high % (highest - lowest)) << 23 | (low & 0x7fffff);
    return high & 0x100 ? sign | magnitude : sign | (0x7fu << 23) | (low & 0x7fffff);
  }
  if (to == FP8CORE_FP32) return low;
  // Halfway between a code and the next.
  const uint32_t code = high % format.max_code;
  const float lower = fp8core_bits_float(fp8core_decode_bits(to, code));
  const float upper = fp8core_bits_float(fp8core_decode_bits(to, code + 1 > format.max_code ? code : code + 1));
  const uint32_t tie = fp8core_float_bits(lower + (upper - lower) * 0.5f);
  return (sign | tie) + (low % 3) - 1;
}

// Source codes of the kind, undoing the scales so that the scaled values are of the kind.
static void fill(const cast_case *c, unsigned char *source, int kind) {
  const size_t bytes = fp8core_dtype_size(c->from);
  for (int64_t i = 0; i < (c->rows - 1) * c->source_stride + c->columns; i++) {
    const uint32_t bits = input_bits(kind, c->to);
    uint32_t code = bits;
    if (kind == KIND_BITS) {
      code = bits & (uint32_t)(UINT64_MAX >> (64 - 8 * bytes));
    } else if (c->from != FP8CORE_FP32 || c->scale != 1.0f || c->scale_inverse != 1.0f) {
      const float value =
        kind == KIND_SPECIALS ? fp8core_bits_float(bits) : fp8core_bits_float(bits) / c->scale / c->scale_inverse;
      code = fp8core_encode(c->from, value, 0);
    }
    store_code(source, i, bytes, code);
  }
}

typedef struct expectation {
  unsigned char *codes;
  float amax;
  fp8core_cast_statistics statistics;
} expectation;

#define TENSOR_ID UINT32_C(7)
#define STEP UINT32_C(0x80000003)
#define SEED UINT64_C(0x0123456789abcdef)

static void expect(const cast_case *c, const unsigned char *source, expectation *e) {
  uint32_t amax = 0;
  const size_t from_bytes = fp8core_dtype_size(c->from);
  const size_t to_bytes = fp8core_dtype_size(c->to);
  const int stochastic = c->rounding == FP8CORE_ROUND_STOCHASTIC;
  memset(&e->statistics, 0, sizeof(e->statistics));
  for (int64_t row = 0; row < c->rows; row++) {
    for (int64_t column = 0; column < c->columns; column++) {
      const int64_t i = row * c->columns + column;
      const uint32_t draw = stochastic ? fp8core_draw(SEED, TENSOR_ID, STEP, c->first_element + (uint64_t)i) : 0;
      const fp8core_cast_result r =
        fp8core_cast_element(load_code(source, row * c->source_stride + column, from_bytes), c->from, c->scale_inverse,
                             c->to, c->scale, stochastic, draw, c->saturate);
      store_code(e->codes, i, to_bytes, r.code);
      amax = r.magnitude > amax ? r.magnitude : amax;
      e->statistics.elements++;
      e->statistics.saturated += (uint64_t)r.saturated;
      e->statistics.flushed_to_zero += (uint64_t)r.flushed_to_zero;
      e->statistics.nonfinite += (uint64_t)r.nonfinite;
    }
  }
  e->amax = fp8core_bits_float(amax);
}

static fp8core_context *contexts[FP8CORE_ISA_AVX512_BF16 + 1][THREAD_COUNTS + 1];

static fp8core_context *context_of(fp8core_isa isa, int threads) {
  if (contexts[isa][threads]) return contexts[isa][threads];
  fp8core_context_options options = fp8core_context_options_default();
  options.isa = isa;
  options.threads = threads;
  options.seed = SEED;
  if (fp8core_context_create(&contexts[isa][threads], &options) != FP8CORE_OK) {
    printf("cannot create a context: %s\n", fp8core_last_error());
    exit(1);
  }
  return contexts[isa][threads];
}

static void compare_totals(const cast_case *c, const expectation *e, float amax, const fp8core_cast_statistics *s) {
  if (fp8core_float_bits(amax) != fp8core_float_bits(e->amax))
    report(c, "%s%.0lld is %08x, expected %08x", "amax", 0, fp8core_float_bits(amax), fp8core_float_bits(e->amax));
  const uint64_t got[4] = {s->elements, s->saturated, s->flushed_to_zero, s->nonfinite};
  const uint64_t want[4] = {e->statistics.elements, e->statistics.saturated, e->statistics.flushed_to_zero,
                            e->statistics.nonfinite};
  static const char *const names[4] = {"elements", "saturated", "flushed_to_zero", "nonfinite"};
  for (int i = 0; i < 4; i++)
    if (got[i] != want[i]) report(c, "%s%.0lld is %u, expected %u", names[i], 0, (uint32_t)got[i], (uint32_t)want[i]);
}

// Compares a matrix, and that the bytes between its rows are still GUARD_BYTE.
static void compare_matrix(const cast_case *c, const char *name, const expectation *e, const unsigned char *got,
                           int64_t rows, int64_t columns, int64_t stride, int transposed) {
  const size_t bytes = fp8core_dtype_size(c->to);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t column = 0; column < columns; column++) {
      const int64_t index = transposed ? column * rows + row : row * columns + column;
      const uint32_t expected = load_code(e->codes, index, bytes);
      const uint32_t found = load_code(got, row * stride + column, bytes);
      if (found != expected) {
        report(c, "%s[%lld] is %x, expected %x", name, index, found, expected);
        return;
      }
    }
    for (int64_t i = (row * stride + columns) * (int64_t)bytes;
         row + 1 < rows && i < (row + 1) * stride * (int64_t)bytes; i++)
      if (got[i] != GUARD_BYTE) {
        report(c, "%s: byte %lld between rows is %x, expected %x", name, i, got[i], GUARD_BYTE);
        return;
      }
  }
}

static void compare_guards(const cast_case *c, const unsigned char *start, int64_t bytes) {
  for (int i = 1; i <= GUARD; i++) {
    if (start[-i] != GUARD_BYTE)
      report(c, "%s: byte %lld before the output is %x, expected %x", "guard", i, start[-i], GUARD_BYTE);
    if (start[bytes + i - 1] != GUARD_BYTE)
      report(c, "%s: byte %lld after the output is %x, expected %x", "guard", i - 1, start[bytes + i - 1], GUARD_BYTE);
  }
}

static fp8core_cast_options options_of(const cast_case *c, fp8core_cast_statistics *statistics) {
  fp8core_cast_options options = fp8core_cast_options_default();
  options.rounding = c->rounding;
  options.saturate = c->saturate;
  options.tensor_id = TENSOR_ID;
  options.step = STEP;
  options.first_element = c->first_element;
  options.statistics = statistics;
  memset(statistics, 0, sizeof(*statistics));
  return options;
}

static fp8core_tensor tensor_of(void *data, fp8core_dtype dtype, int64_t rows, int64_t columns, int64_t stride) {
  fp8core_tensor tensor = fp8core_tensor_matrix(data, dtype, rows, columns, cpu);
  tensor.row_stride = stride;
  return tensor;
}

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes);
  if (!memory) {
    printf("out of memory: %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
}

static void run_cast(const cast_case *c, const expectation *e, unsigned char *source, unsigned char *destination,
                     int guarded) {
  const int64_t to_bytes = (int64_t)fp8core_dtype_size(c->to);
  const int64_t span = ((c->rows - 1) * c->destination_stride + c->columns) * to_bytes;
  fp8core_cast_statistics statistics;
  fp8core_cast_options options = options_of(c, &statistics);
  float amax = 0.0f;
  if (guarded) memset(destination - GUARD, GUARD_BYTE, (size_t)span + 2 * GUARD);
  fp8core_tensor in = tensor_of(source, c->from, c->rows, c->columns, c->source_stride);
  fp8core_tensor out = tensor_of(destination, c->to, c->rows, c->columns, c->destination_stride);
  in.scale_inverse = &c->scale_inverse;
  out.scale = &c->scale;
  out.amax = &amax;
  if (fp8core_cast(context_of(c->isa, c->threads), &options, &in, &out) != FP8CORE_OK) {
    report(c, "%s%.0lld%.0u%.0u", fp8core_last_error(), 0, 0, 0);
    return;
  }
  compare_totals(c, e, amax, &statistics);
  if (guarded) {
    compare_matrix(c, "destination", e, destination, c->rows, c->columns, c->destination_stride, 0);
    compare_guards(c, destination, span);
    return;
  }
  for (int64_t row = 0; row < c->rows; row++)
    if (memcmp(destination + row * c->destination_stride * to_bytes, e->codes + row * c->columns * to_bytes,
               (size_t)(c->columns * to_bytes)) != 0)
      report(c, "%s: row %lld differs%.0u%.0u", "destination", row, 0, 0);
}

// One cast on every tier and with 1 to `threads` threads. `source` holds the input; `destination` is the output, with
// GUARD bytes on both sides where `guarded`.
static void check_cast(cast_case *c, unsigned char *source, unsigned char *destination, int threads, int guarded) {
  const int in_place = source == destination;
  const size_t source_bytes = (size_t)((c->rows - 1) * c->source_stride + c->columns) * fp8core_dtype_size(c->from);
  expectation e = {.codes = allocate((size_t)(c->rows * c->columns) * fp8core_dtype_size(c->to) + 1)};
  unsigned char *kept = NULL;
  expect(c, source, &e);
  if (in_place) memcpy(kept = allocate(source_bytes), source, source_bytes);
  for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) {
    for (c->threads = 1; c->threads <= threads; c->threads++) {
      c->isa = (fp8core_isa)isa;
      if (in_place) memcpy(source, kept, source_bytes);
      run_cast(c, &e, source, destination, guarded);
    }
  }
  free(kept);
  free(e.codes);
}

static const float scales[][2] = {{1.0f, 1.0f},
                                  {3.7f, 1.0f},
                                  {1.0f, 3.7f},
                                  {0.25f, 64.0f},
                                  {1.0f, 0x1p126f},
                                  {1.0f, 0x1p-126f},
                                  {0x1p126f, 1.0f},
                                  {0x1p-126f, 1.0f},
                                  {0x1p-126f, 0x1p126f},
                                  {0x1p126f, 0x1p-126f},
                                  {1.0f / 3.7f, 448.0f / 12.3f}};
#define SCALES (sizeof(scales) / sizeof(scales[0]))

#define MAX_LENGTH 200

static unsigned char *aligned_area(unsigned char *memory, int offset) {
  return memory + GUARD + (64 - ((uintptr_t)memory + GUARD) % 64) + offset;
}

static const uint64_t firsts[] = {0, 1, 2, 3, 4, UINT64_C(0x3ffffffff), UINT64_C(0x4000000000000001)};

static cast_case plain_case(const char *what, fp8core_dtype from, fp8core_dtype to, int variant) {
  cast_case c = {.isa = FP8CORE_ISA_SCALAR, .threads = 1, .from = from, .to = to, .rows = 1, .what = what};
  c.rounding = variant & 1 ? FP8CORE_ROUND_STOCHASTIC : FP8CORE_ROUND_NEAREST_EVEN;
  c.saturate = variant & 2 ? 1 : 0;
  c.scale_inverse = 1.0f;
  c.scale = 1.0f;
  return c;
}

static void set_scale(cast_case *c, uint64_t choice) {
  c->scale_inverse = scales[choice % SCALES][0];
  c->scale = scales[choice % SCALES][1];
}

static void set_columns(cast_case *c, int64_t columns) {
  c->columns = columns;
  c->source_stride = columns;
  c->destination_stride = columns;
}

// Every length, every kind of input and scale in turn, at alignments that change with them.
static void check_lengths(fp8core_dtype from, fp8core_dtype to, int variant) {
  unsigned char source[GUARD * 2 + 64 * 2 + MAX_LENGTH * 4];
  unsigned char destination[GUARD * 2 + 64 * 2 + MAX_LENGTH * 4];
  cast_case c = plain_case("lengths", from, to, variant);
  for (int length = 1; length <= MAX_LENGTH; length++) {
    for (int kind = 0; kind < KINDS; kind++) {
      set_columns(&c, length);
      set_scale(&c, random_bits() % 3 ? 0 : random_bits());
      c.first_element = firsts[random_bits() % (sizeof(firsts) / sizeof(firsts[0]))];
      unsigned char *in = aligned_area(source, (int)(random_bits() % 64));
      fill(&c, in, kind);
      check_cast(&c, in, aligned_area(destination, (int)(random_bits() % 64)), 1, 1);
    }
  }
}

static void check_alignments(fp8core_dtype from, fp8core_dtype to) {
  unsigned char source[GUARD * 2 + 64 * 2 + 101 * 4];
  unsigned char destination[GUARD * 2 + 64 * 2 + 101 * 4];
  for (int from_offset = 0; from_offset < 64; from_offset++) {
    cast_case c = plain_case("alignments", from, to, 2);
    set_columns(&c, 101);
    fill(&c, aligned_area(source, from_offset), KIND_FITTING);
    for (int to_offset = from_offset % 4; to_offset < 64; to_offset += 4)
      check_cast(&c, aligned_area(source, from_offset), aligned_area(destination, to_offset), 1, 1);
  }
}

// Source and destination end at, or start after, a page that may not be touched.
static void check_page_edges(fp8core_dtype from, fp8core_dtype to, int variant) {
  static unsigned char *pages[2];
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  for (int i = 0; i < 2 && !pages[i]; i++) {
    pages[i] = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages[i] == MAP_FAILED || mprotect(pages[i] + page, page, PROT_READ | PROT_WRITE) != 0) {
      printf("cannot map guard pages\n");
      exit(1);
    }
  }
  cast_case c = plain_case("page edges", from, to, variant);
  for (int length = 1; length <= 130; length++) {
    set_columns(&c, length);
    c.first_element = (uint64_t)length;
    for (int at_end = 0; at_end < 2; at_end++) {
      unsigned char *in = pages[0] + page + (at_end ? page - (size_t)length * fp8core_dtype_size(from) : 0);
      unsigned char *out = pages[1] + page + (at_end ? page - (size_t)length * fp8core_dtype_size(to) : 0);
      fill(&c, in, KIND_FITTING);
      check_cast(&c, in, out, 1, 0);
    }
  }
}

static void check_strides(fp8core_dtype from, fp8core_dtype to, int variant) {
  static const int64_t shapes[][4] = {{3, 1, 2, 5},     {5, 7, 7, 9},       {2, 64, 65, 64},
                                      {7, 65, 65, 130}, {4, 131, 200, 140}, {33, 3, 4, 3}};
  for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
    cast_case c = plain_case("strides", from, to, variant);
    c.rows = shapes[i][0];
    c.columns = shapes[i][1];
    c.source_stride = shapes[i][2];
    c.destination_stride = shapes[i][3];
    c.first_element = i;
    const size_t elements =
      (size_t)(c.rows * (c.source_stride > c.destination_stride ? c.source_stride : c.destination_stride));
    unsigned char *source = allocate(elements * 4 + 4 * GUARD);
    unsigned char *destination = allocate(elements * 4 + 4 * GUARD);
    for (int kind = 0; kind < KINDS; kind++) {
      fill(&c, aligned_area(source, (int)i), kind);
      check_cast(&c, aligned_area(source, (int)i), aligned_area(destination, (int)(i * 5)), 1, 1);
    }
    free(source);
    free(destination);
  }
}

// Contiguous, strided and large, with 1 to 3 threads.
static void check_in_place(fp8core_dtype from, fp8core_dtype to, int variant, int64_t large) {
  const int64_t ratio = (int64_t)(fp8core_dtype_size(from) / fp8core_dtype_size(to));
  if (ratio == 0) return;
  const int64_t shapes[][3] = {{1, 1, 1},
                               {1, 63, 63},
                               {1, 200, 200},
                               {9, 100, 100},
                               {9, 100, 131},
                               {1, large, large},
                               {4, large / 4, large / 4 + 3}};
  for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
    cast_case c = plain_case("in place", from, to, variant);
    c.rows = shapes[i][0];
    c.columns = shapes[i][1];
    c.source_stride = shapes[i][2];
    c.destination_stride = c.source_stride == c.columns ? c.columns : c.source_stride * ratio;
    c.first_element = i * 3;
    unsigned char *data = allocate((size_t)(c.rows * c.source_stride) * fp8core_dtype_size(from));
    fill(&c, data, KIND_FITTING);
    check_cast(&c, data, data, THREAD_COUNTS, 0);
    free(data);
  }
}

static void check_threads(fp8core_dtype from, fp8core_dtype to, int variant, int64_t rows, int64_t columns,
                          int64_t gap) {
  unsigned char *source = allocate((size_t)(rows * (columns + gap)) * 4 + 4 * GUARD);
  unsigned char *destination = allocate((size_t)(rows * (columns + gap)) * 4 + 4 * GUARD);
  cast_case c = plain_case("threads", from, to, variant);
  c.rows = rows;
  set_columns(&c, columns);
  c.source_stride += gap;
  fill(&c, aligned_area(source, 4), KIND_FITTING);
  // Something of every kind in each thread's share.
  for (int64_t i = 0; i < rows * columns; i += rows * columns / 14)
    store_code(aligned_area(source, 4), i, fp8core_dtype_size(from),
               fp8core_encode(from, fp8core_bits_float((uint32_t)random_bits()), 0));
  check_cast(&c, aligned_area(source, 4), aligned_area(destination, 8), THREAD_COUNTS, 1);
  free(source);
  free(destination);
}

static void run_cast_transpose(const cast_case *c, const expectation *e, unsigned char *source,
                               unsigned char *destination, unsigned char *transposed, int both) {
  const int64_t bytes = (int64_t)fp8core_dtype_size(c->to);
  const int64_t span = ((c->rows - 1) * c->destination_stride + c->columns) * bytes;
  const int64_t transposed_span = ((c->columns - 1) * c->transposed_stride + c->rows) * bytes;
  fp8core_cast_statistics statistics;
  const fp8core_cast_options options = options_of(c, &statistics);
  float amax = 0.0f;
  fp8core_tensor in = tensor_of(source, c->from, c->rows, c->columns, c->source_stride);
  fp8core_tensor out = tensor_of(destination, c->to, c->rows, c->columns, c->destination_stride);
  fp8core_tensor across = tensor_of(transposed, c->to, c->columns, c->rows, c->transposed_stride);
  in.scale_inverse = &c->scale_inverse;
  out.scale = across.scale = &c->scale;
  across.amax = &amax;
  memset(destination - GUARD, GUARD_BYTE, (size_t)span + 2 * GUARD);
  memset(transposed - GUARD, GUARD_BYTE, (size_t)transposed_span + 2 * GUARD);
  if (fp8core_cast_transpose(context_of(c->isa, c->threads), &options, &in, both ? &out : NULL, &across) !=
      FP8CORE_OK) {
    report(c, "%s%.0lld%.0u%.0u", fp8core_last_error(), 0, 0, 0);
    return;
  }
  compare_totals(c, e, amax, &statistics);
  if (both) compare_matrix(c, "destination", e, destination, c->rows, c->columns, c->destination_stride, 0);
  compare_matrix(c, "transposed", e, transposed, c->columns, c->rows, c->transposed_stride, 1);
  compare_guards(c, destination, span);
  compare_guards(c, transposed, transposed_span);
}

// `aligned`: every row of the outputs starts at a multiple of 64 bytes.
static void check_transpose(fp8core_dtype from, fp8core_dtype to, int variant, int64_t rows, int64_t columns,
                            int threads, int aligned) {
  cast_case c = plain_case("cast-transpose", from, to, variant);
  c.rows = rows;
  c.columns = columns;
  c.source_stride = c.columns + rows % 3;
  c.destination_stride = c.columns + rows % 2;
  c.transposed_stride = c.rows + columns % 4;
  if (aligned) c.destination_stride = (columns + 63) / 64 * 64;
  if (aligned) c.transposed_stride = (rows + 63) / 64 * 64;
  c.first_element = (uint64_t)columns;
  set_scale(&c, random_bits());
  unsigned char *source_memory = allocate((size_t)(c.rows * c.source_stride) * 4 + 4 * GUARD);
  unsigned char *destination_memory = allocate((size_t)(c.rows * c.destination_stride) * 4 + 4 * GUARD);
  unsigned char *transposed_memory = allocate((size_t)(c.columns * c.transposed_stride) * 4 + 4 * GUARD);
  unsigned char *source = aligned_area(source_memory, (int)(random_bits() % 64));
  expectation e = {.codes = allocate((size_t)(c.rows * c.columns) * 4)};
  fill(&c, source, (int)(random_bits() % KINDS));
  expect(&c, source, &e);
  for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) {
    for (c.threads = 1; c.threads <= threads; c.threads++) {
      for (int both = 0; both < 2; both++) {
        c.isa = (fp8core_isa)isa;
        run_cast_transpose(&c, &e, source, aligned_area(destination_memory, aligned ? 0 : (int)(random_bits() % 64)),
                           aligned_area(transposed_memory, aligned ? 0 : (int)(random_bits() % 64)), both);
      }
    }
  }
  free(e.codes);
  free(source_memory);
  free(destination_memory);
  free(transposed_memory);
}

static void check_transposes(fp8core_dtype from, fp8core_dtype to, int variant) {
  static const int64_t shapes[][2] = {{1, 1},   {1, 70},   {70, 1},   {63, 65},  {64, 64},
                                      {65, 63}, {64, 256}, {71, 257}, {31, 300}, {129, 577}};
  for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
    check_transpose(from, to, variant, shapes[i][0], shapes[i][1], 1, 0);
  if (to <= FP8CORE_BF16 && variant >= 2) check_transpose(from, to, variant, 500, 301, THREAD_COUNTS, 0);
}

static void check_amax(fp8core_dtype from, int64_t length, int kind, int threads) {
  unsigned char *memory = allocate((size_t)length * 4 + 4 * GUARD);
  unsigned char *source = aligned_area(memory, (int)(random_bits() % 64));
  expectation e = {.codes = allocate((size_t)length)};
  cast_case c = plain_case("amax", from, FP8CORE_E4M3, 2);
  set_columns(&c, length);
  set_scale(&c, random_bits());
  fill(&c, source, kind);
  expect(&c, source, &e);
  fp8core_tensor in = tensor_of(source, from, 1, length, length);
  in.scale_inverse = &c.scale_inverse;
  for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) {
    for (c.threads = 1; c.threads <= threads; c.threads++) {
      float amax = 0.0f;
      c.isa = (fp8core_isa)isa;
      if (fp8core_amax(context_of(c.isa, c.threads), &in, &amax) != FP8CORE_OK)
        report(&c, "%s%.0lld%.0u%.0u", fp8core_last_error(), 0, 0, 0);
      if (fp8core_float_bits(amax) != fp8core_float_bits(e.amax))
        report(&c, "%s%.0lld is %08x, expected %08x", "amax", 0, fp8core_float_bits(amax), fp8core_float_bits(e.amax));
    }
  }
  free(e.codes);
  free(memory);
}

// Long enough for kernels that tabulate the cast: every scale, so that any code is flushed, saturated or neither, and
// data with and without what counts.
static void check_tables(fp8core_dtype from, fp8core_dtype to, int saturate) {
  const int64_t length = 1500;
  unsigned char *source = allocate((size_t)length);
  unsigned char *memory = allocate((size_t)length * 2 + 4 * GUARD);
  for (size_t choice = 0; choice < SCALES; choice++) {
    for (int largest = 0; largest < 128; largest += 21) {
      cast_case c = plain_case("tables", from, to, 2 * saturate);
      set_columns(&c, length);
      set_scale(&c, choice);
      // Up to a magnitude; at every other scale any code from element 700 on.
      for (int64_t i = 0; i < length; i++)
        source[i] = (unsigned char)(random_bits() % (uint64_t)(largest + 1) | (random_bits() & 0x80));
      for (int64_t i = 700; i < length && choice % 2; i++) source[i] = (unsigned char)random_bits();
      check_cast(&c, source, aligned_area(memory, 2 * (int)choice), 1, 1);
    }
  }
  free(source);
  free(memory);
}

// One thread's own time does not count what others take of its core.
static double seconds(int threads) {
  struct timespec now;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare_doubles(const void *one, const void *other) {
  const double a = *(const double *)one;
  const double b = *(const double *)other;
  return (a > b) - (a < b);
}

// Stores past the caches, which no library's copy need choose; where there are none, the library's copy again.
static void copy_streaming(unsigned char *destination, const unsigned char *source, size_t bytes) {
#if defined(__x86_64__)
  size_t i = 0;
  for (; i + 64 <= bytes; i += 64)
    for (size_t j = 0; j < 64; j += 16)
      _mm_stream_si128((__m128i *)(void *)(destination + i + j),
                       _mm_loadu_si128((const __m128i *)(const void *)(source + i + j)));
  _mm_sfence();
  memcpy(destination + i, source + i, bytes - i);
#else
  memcpy(destination, source, bytes);
#endif
}

// Both areas start at a multiple of 64 bytes.
static void copy_parallel(unsigned char *destination, const unsigned char *source, size_t bytes, int threads,
                          int streaming) {
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static, 1) num_threads(threads)
#endif
  for (int thread = 0; thread < threads; thread++) {
    const size_t share = bytes / (size_t)threads / 64 * 64;
    const size_t begin = share * (size_t)thread;
    const size_t part = thread == threads - 1 ? bytes - begin : share;
    if (streaming)
      copy_streaming(destination + begin, source + begin, part);
    else
      memcpy(destination + begin, source + begin, part);
  }
}

// Magnitudes from 2^-7 to 2 in the format.
static void fill_usual(unsigned char *source, fp8core_dtype dtype, size_t values) {
  for (size_t i = 0; i < values; i++) {
    const uint32_t bits = (uint32_t)random_bits();
    const uint32_t magnitude = (bits & 0x807fffff) | (UINT32_C(120) + (bits >> 24 & 7)) << 23;
    store_code(source, (int64_t)i, fp8core_dtype_size(dtype), fp8core_encode(dtype, fp8core_bits_float(magnitude), 1));
  }
}

enum { BENCH_CAST, BENCH_TRANSPOSE, BENCH_AMAX };

static void bench_one(const char *name, int what, fp8core_isa isa, int threads, fp8core_dtype from, fp8core_dtype to,
                      fp8core_rounding rounding, unsigned char *source, unsigned char *destination, size_t area,
                      size_t values) {
  enum { PASSES = 11 };
  fp8core_context *context = context_of(isa, threads);
  static int filled = -1;
  double cast_times[PASSES];
  double copy_times[PASSES];
  const int64_t columns = 4096;
  const int64_t rows = (int64_t)values / columns;
  if (filled != (int)from) fill_usual(source, from, values);
  filled = (int)from;
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  float amax = 0.0f;
  const float scale = 32.0f;
  options.rounding = rounding;
  options.statistics = &statistics;
  fp8core_tensor in = tensor_of(source, from, rows, columns, 0);
  fp8core_tensor out = tensor_of(destination, to, rows, columns, 0);
  fp8core_tensor across = tensor_of(destination + area / 2, to, columns, rows, 0);
  out.amax = &amax;
  out.scale = across.scale = &scale;
  const size_t written = what == BENCH_AMAX ? 0 : fp8core_dtype_size(to) * (what == BENCH_TRANSPOSE ? 2 : 1);
  const size_t moved = (size_t)(rows * columns) * (fp8core_dtype_size(from) + written);
  // Pass 0 of each touches the memory.
  for (int pass = 0; pass < PASSES; pass++) {
    double start = seconds(threads);
    copy_parallel(destination, source, moved / 2, threads, 0);
    copy_times[pass] = seconds(threads) - start;
    // The better of the two copies is the peer.
    start = seconds(threads);
    copy_parallel(destination, source, moved / 2, threads, 1);
    copy_times[pass] = fmin(copy_times[pass], seconds(threads) - start);
    start = seconds(threads);
    if (what == BENCH_TRANSPOSE)
      (void)fp8core_cast_transpose(context, &options, &in, &out, &across);
    else if (what == BENCH_AMAX)
      (void)fp8core_amax(context, &in, &amax);
    else
      (void)fp8core_cast(context, &options, &in, &out);
    cast_times[pass] = seconds(threads) - start;
  }
  double ratios[PASSES];
  for (int pass = 1; pass < PASSES; pass++) ratios[pass] = copy_times[pass] / cast_times[pass];
  qsort(ratios + 1, PASSES - 1, sizeof(double), compare_doubles);
  qsort(cast_times + 1, PASSES - 1, sizeof(double), compare_doubles);
  qsort(copy_times + 1, PASSES - 1, sizeof(double), compare_doubles);
  printf("%-12s %d  %-34s %7.1f GB/s  %7.2f G values/s   copy %7.1f GB/s   ratio %.2f\n", fp8core_isa_name(isa),
         threads, name, (double)moved / cast_times[PASSES / 2] * 1e-9,
         (double)(rows * columns) / cast_times[PASSES / 2] * 1e-9, (double)moved / copy_times[PASSES / 2] * 1e-9,
         ratios[PASSES / 2]);
}

static int bench(size_t mebibytes) {
  // Whatever the formats, at most 8 bytes a value are moved.
  const size_t values = (mebibytes << 20) / 4;
  unsigned char *source;
  unsigned char *destination;
  fp8core_context *context = context_of(FP8CORE_ISA_AUTO, 1);
  const size_t area = values * 8;
  if (fp8core_alloc(context, area, (void **)&source) != FP8CORE_OK ||
      fp8core_alloc(context, area, (void **)&destination) != FP8CORE_OK) {
    printf("%s\n", fp8core_last_error());
    return 1;
  }
  memset(source, 0, area);
  memset(destination, 0, area);
  printf("%zu values, copy of as many bytes in the same run, medians of 10 pairs, %d MiB of FP32\n", values,
         (int)mebibytes);
  for (int isa = (int)best; isa >= FP8CORE_ISA_SCALAR; isa--) {
    if (isa == FP8CORE_ISA_AVX512 && best > FP8CORE_ISA_AVX512) continue;
    for (int threads = 2; threads >= 1; threads--) {
      const fp8core_rounding nearest = FP8CORE_ROUND_NEAREST_EVEN;
      const fp8core_isa tier = (fp8core_isa)isa;
#define BENCH(name, what, from, to, rounding)                                                                          \
  bench_one(name, what, tier, threads, from, to, rounding, source, destination, area, values)
      BENCH("fp32 -> e4m3, amax, counts", BENCH_CAST, FP8CORE_FP32, FP8CORE_E4M3, nearest);
      BENCH("fp32 -> e5m2, amax, counts", BENCH_CAST, FP8CORE_FP32, FP8CORE_E5M2, nearest);
      BENCH("fp32 -> e4m3 and transpose", BENCH_TRANSPOSE, FP8CORE_FP32, FP8CORE_E4M3, nearest);
      BENCH("fp32 -> e4m3, stochastic", BENCH_CAST, FP8CORE_FP32, FP8CORE_E4M3, FP8CORE_ROUND_STOCHASTIC);
      if (isa == FP8CORE_ISA_SCALAR) continue;
      BENCH("fp32 -> bf16", BENCH_CAST, FP8CORE_FP32, FP8CORE_BF16, nearest);
      BENCH("fp32 -> fp16", BENCH_CAST, FP8CORE_FP32, FP8CORE_FP16, nearest);
      BENCH("bf16 -> e4m3, amax, counts", BENCH_CAST, FP8CORE_BF16, FP8CORE_E4M3, nearest);
      BENCH("bf16 -> e4m3 and transpose", BENCH_TRANSPOSE, FP8CORE_BF16, FP8CORE_E4M3, nearest);
      BENCH("e4m3 -> bf16", BENCH_CAST, FP8CORE_E4M3, FP8CORE_BF16, nearest);
      BENCH("e4m3 -> fp32", BENCH_CAST, FP8CORE_E4M3, FP8CORE_FP32, nearest);
      BENCH("amax of fp32", BENCH_AMAX, FP8CORE_FP32, FP8CORE_E4M3, nearest);
#undef BENCH
    }
  }
  (void)fp8core_free(context, source);
  (void)fp8core_free(context, destination);
  return 0;
}

#if CAN_COUNT_INSTRUCTIONS
static unsigned char counted_source[1 << 18];
static unsigned char counted_destination[1 << 18];

// Instructions that a child process executes between two stops around one cast.
static long long count_instructions(fp8core_isa isa, fp8core_rounding rounding, fp8core_dtype from, fp8core_dtype to,
                                    int64_t values) {
  fp8core_context *context = context_of(isa, 1);
  fp8core_tensor in = tensor_of(counted_source, from, 1, values, 0);
  fp8core_tensor out = tensor_of(counted_destination, to, 1, values, 0);
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  float amax = 0.0f;
  options.rounding = rounding;
  options.statistics = &statistics;
  out.amax = &amax;
  // The first call binds symbols.
  (void)fp8core_cast(context, &options, &in, &out);
  fflush(stdout);
  const pid_t child = fork();
  if (child < 0) return -1;
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(2);
    raise(SIGSTOP);
    (void)fp8core_cast(context, &options, &in, &out);
    raise(SIGSTOP);
    _exit(0);
  }
  int status;
  long long count = 0;
  if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return -1;
  for (;;) {
    if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0 || waitpid(child, &status, 0) != child) return -1;
    if (!WIFSTOPPED(status)) return -1;
    if (WSTOPSIG(status) == SIGSTOP) break;
    count++;
  }
  (void)ptrace(PTRACE_CONT, child, NULL, NULL);
  (void)waitpid(child, &status, 0);
  return count;
}

static double instructions_a_value(fp8core_isa isa, fp8core_rounding rounding, fp8core_dtype from, fp8core_dtype to) {
  // The difference leaves out what a call costs however long it is.
  const long long small = count_instructions(isa, rounding, from, to, 8192);
  const long long large = count_instructions(isa, rounding, from, to, 16384);
  return small < 0 || large < 0 ? NAN : (double)(large - small) / 8192.0;
}

static int print_instructions(void) {
  static const fp8core_dtype pairs[][2] = {{FP8CORE_FP32, FP8CORE_E4M3},
                                           {FP8CORE_FP32, FP8CORE_E5M2},
                                           {FP8CORE_BF16, FP8CORE_E4M3},
                                           {FP8CORE_E4M3, FP8CORE_BF16}};
  printf("instructions a value, amax and counts included (single steps of a traced process)\n");
  for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
    fill_usual(counted_source, pairs[i][0], sizeof(counted_source) / 4);
    for (int rounding = 0; rounding < 2; rounding++) {
      double scalar = 0.0;
      for (int isa = FP8CORE_ISA_SCALAR; isa <= (int)best; isa++) {
        const double each =
          instructions_a_value((fp8core_isa)isa, (fp8core_rounding)rounding, pairs[i][0], pairs[i][1]);
        if (isnan(each)) {
          printf("this system does not allow tracing\n");
          return 77;
        }
        if (isa == FP8CORE_ISA_SCALAR) scalar = each;
        printf("%s -> %s %-10s %-12s %8.2f   scalar / this %6.1f\n", fp8core_dtype_name(pairs[i][0]),
               fp8core_dtype_name(pairs[i][1]), rounding ? "stochastic" : "nearest", fp8core_isa_name((fp8core_isa)isa),
               each, scalar / each);
      }
    }
  }
  return 0;
}
#endif

static int usage(FILE *stream, int result) {
  fprintf(
    stream,
    "usage: check_cast                 compare every tier with the scalar rule\n"
    "       check_cast --bench [MIB]   time casts of so many MiB of FP32 (1 to 65536, default 768) beside a copy\n"
    "       check_cast --instructions  count instructions a value (Linux on x86-64)\n");
  return result;
}

int main(int argc, char **argv) {
  best = fp8core_isa_best();
  const char *const mode = argc > 1 ? argv[1] : "";
  if (argc == 2 && strcmp(mode, "--help") == 0) return usage(stdout, 0);
  if (argc <= 3 && strcmp(mode, "--bench") == 0) {
    char *end = NULL;
    const unsigned long mebibytes = argc > 2 ? strtoul(argv[2], &end, 10) : 768;
    return (end && *end) || mebibytes < 1 || mebibytes > 65536 ? usage(stderr, 2) : bench(mebibytes);
  }
  if (argc > 2 || (argc == 2 && strcmp(mode, "--instructions") != 0)) return usage(stderr, 2);
  if (argc == 2) {
#if CAN_COUNT_INSTRUCTIONS
    return print_instructions();
#else
    printf("counting instructions needs Linux on x86-64\n");
    return 77;
#endif
  }
  const int64_t large = (INT64_C(1) << 17) + 77;
  for (int pair = 0; pair < FP8CORE_DTYPE_COUNT * FP8CORE_DTYPE_COUNT; pair++) {
    const fp8core_dtype from = (fp8core_dtype)(pair / FP8CORE_DTYPE_COUNT);
    const fp8core_dtype to = (fp8core_dtype)(pair % FP8CORE_DTYPE_COUNT);
    for (int variant = 0; variant < 4; variant++) {
      check_lengths(from, to, variant);
      check_strides(from, to, variant);
      check_transposes(from, to, variant);
      check_page_edges(from, to, variant);
    }
    check_alignments(from, to);
    for (int saturate = 0; saturate < 2 && fp8core_dtype_size(from) == 1 && fp8core_dtype_size(to) <= 2; saturate++)
      check_tables(from, to, saturate);
    check_in_place(from, to, pair % 4, large);
    check_threads(from, to, (pair + 1) % 4, 1, large, 0);
    check_threads(from, to, (pair + 2) % 4, 5, large / 4, 3);
  }
  for (int from = 0; from < FP8CORE_DTYPE_COUNT; from++) {
    for (int length = 1; length <= MAX_LENGTH; length++)
      for (int kind = 0; kind < KINDS; kind++) check_amax((fp8core_dtype)from, length, kind, 1);
    check_amax((fp8core_dtype)from, large, KIND_FITTING, THREAD_COUNTS);
  }
  // Large enough for stores past the caches.
  check_threads(FP8CORE_FP32, FP8CORE_E4M3, 2, 1, INT64_C(7) << 20, 0);
  check_threads(FP8CORE_BF16, FP8CORE_FP32, 0, 3, (INT64_C(2) << 20) + 5, 1);
  check_threads(FP8CORE_E4M3, FP8CORE_BF16, 2, 1, (INT64_C(12) << 20) + 3, 0);
  check_transpose(FP8CORE_FP32, FP8CORE_E4M3, 2, 2101, 3301, 2, 1);
  check_transpose(FP8CORE_BF16, FP8CORE_E5M2, 0, 3456, 3328, 2, 1);
  printf("tiers up to %s against the scalar rule: %d failures\n", fp8core_isa_name(best), failures);
  for (int isa = 0; isa <= FP8CORE_ISA_AVX512_BF16; isa++)
    for (int threads = 0; threads <= THREAD_COUNTS; threads++) fp8core_context_destroy(&contexts[isa][threads]);
  return failures ? 1 : 0;
}
