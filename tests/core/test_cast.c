// Casts against their definition: known answers, all codes, ties, counts, amax, stochastic rounding, bad input.
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NAN_CODE 0x100

typedef struct fixture {
  fp8core_context *context;
  fp8core_cast_statistics statistics;
  float amax;
} fixture;

static fixture start(int threads) {
  fixture f = {test_context(threads, FP8CORE_ISA_AUTO), {0, 0, 0, 0}, 0.0f};
  return f;
}

// Casts host arrays through the device; fills amax and statistics.
static void cast(fixture *f, fp8core_cast_options options, const void *source, fp8core_dtype from, void *destination,
                 fp8core_dtype to, int64_t elements, float scale) {
  const size_t source_bytes = (size_t)elements * fp8core_dtype_size(from);
  const size_t bytes = (size_t)elements * fp8core_dtype_size(to);
  void *in = test_upload(f->context, source, source_bytes);
  void *out = test_alloc(f->context, bytes);
  void *statistics = test_upload(f->context, &f->statistics, sizeof(f->statistics));
  float *amax = test_upload(f->context, &f->amax, sizeof(float));
  float *device_scale = test_upload(f->context, &scale, sizeof(float));
  fp8core_tensor source_tensor = test_matrix(in, from, 1, elements);
  fp8core_tensor destination_tensor = test_matrix(out, to, 1, elements);
  destination_tensor.scale = device_scale;
  destination_tensor.amax = amax;
  options.statistics = statistics;
  assert_ok(fp8core_cast(f->context, &options, &source_tensor, &destination_tensor));
  test_download(f->context, destination, out, bytes);
  test_download(f->context, &f->statistics, statistics, sizeof(f->statistics));
  test_download(f->context, &f->amax, amax, sizeof(float));
  test_free(f->context, in);
  test_free(f->context, out);
  test_free(f->context, statistics);
  test_free(f->context, amax);
  test_free(f->context, device_scale);
}

static fp8core_cast_options nearest(int saturate) {
  fp8core_cast_options options = fp8core_cast_options_default();
  options.saturate = saturate;
  return options;
}

static int is_nan_code(fp8core_dtype dtype, uint32_t code) { return isnan(fp8core_decode(dtype, code)); }

// Value; E4M3 saturating and not; E5M2 saturating and not.
static void known_answers(void **state) {
  (void)state;
  static const struct {
    float value;
    int codes[4];
  } cases[] = {
    {464.0f, {0x7e, 0x7e, 0x5f, 0x5f}},
    {464.01f, {0x7e, 0x7f, 0x5f, 0x5f}},
    {INFINITY, {0x7e, 0x7f, 0x7b, 0x7c}},
    {NAN, {NAN_CODE, NAN_CODE, NAN_CODE, NAN_CODE}},
    {0.0f, {0x00, 0x00, 0x00, 0x00}},
    {0x1p-10f, {0x00, 0x00, 0x14, 0x14}},
    {0x1p-10f * (1.0f + 0x1p-20f), {0x01, 0x01, 0x14, 0x14}},
    {3 * 0x1p-10f, {0x02, 0x02, 0x1a, 0x1a}},
    {0x1p-6f - 0x1p-10f, {0x08, 0x08, 0x24, 0x24}},
    {1.0625f, {0x38, 0x38, 0x3c, 0x3c}},
    {1.0625f + 0x1p-20f, {0x39, 0x39, 0x3c, 0x3c}},
    {61440.0f, {0x7e, 0x7f, 0x7b, 0x7c}},
    {3 * 0x1p-17f, {0x00, 0x00, 0x02, 0x02}},
    {1.0625001192f, {0x39, 0x39, 0x3c, 0x3c}},
    {1.1874998808f, {0x39, 0x39, 0x3d, 0x3d}},
    {15 * 0x1p-10f, {0x08, 0x08, 0x24, 0x24}},
  };
  fixture f = start(1);
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    for (int column = 0; column < 4; column++) {
      const fp8core_dtype dtype = column < 2 ? FP8CORE_E4M3 : FP8CORE_E5M2;
      const float values[2] = {cases[i].value, -cases[i].value};
      uint8_t codes[2];
      cast(&f, nearest(column % 2 == 0), values, FP8CORE_FP32, codes, dtype, 2, 1.0f);
      for (int sign = 0; sign < 2; sign++) {
        if (cases[i].codes[column] == NAN_CODE)
          assert_true(is_nan_code(dtype, codes[sign]));
        else
          assert_int_equal(codes[sign], cases[i].codes[column] | sign << 7);
      }
    }
  }
  fp8core_context_destroy(&f.context);
}

// What an independent definition chooses: the nearest of all finite values of the format, the even code at a tie.
static uint32_t nearest_code(fp8core_dtype dtype, double magnitude, uint32_t max_code) {
  uint32_t low = 0;
  uint32_t high = max_code;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if ((double)fp8core_decode(dtype, middle) <= magnitude)
      low = middle;
    else
      high = middle;
  }
  const double below = magnitude - (double)fp8core_decode(dtype, low);
  const double above = (double)fp8core_decode(dtype, high) - magnitude;
  if (below == above) return low % 2 == 0 ? low : high;
  return below < above ? low : high;
}

static void ties_and_neighbours(void **state) {
  (void)state;
  static const uint32_t max_codes[] = {0x7e, 0x7b, 0x7f7f, 0x7bff};
  fixture f = start(0);
  for (int d = FP8CORE_E4M3; d <= FP8CORE_FP16; d++) {
    const fp8core_dtype dtype = (fp8core_dtype)d;
    const int64_t count = (int64_t)max_codes[d] * 6;
    float *values = malloc((size_t)count * sizeof(float));
    uint32_t *expected = malloc((size_t)count * sizeof(uint32_t));
    uint16_t *codes = malloc((size_t)count * sizeof(uint16_t));
    assert_true(values && expected && codes);
    int64_t n = 0;
    for (uint32_t code = 0; code < max_codes[d]; code++) {
      const float low = fp8core_decode(dtype, code);
      const float tie = low + (fp8core_decode(dtype, code + 1) - low) / 2;
      const float points[3] = {nextafterf(tie, 0.0f), tie, nextafterf(tie, INFINITY)};
      for (int i = 0; i < 6; i++) {
        values[n] = i < 3 ? points[i] : -points[i - 3];
        expected[n++] = nearest_code(dtype, (double)points[i % 3], max_codes[d]) | (i < 3       ? 0
                                                                                    : dtype < 2 ? 0x80u
                                                                                                : 0x8000u);
      }
    }
    cast(&f, nearest(1), values, FP8CORE_FP32, codes, dtype, count, 1.0f);
    for (int64_t i = 0; i < count; i++) {
      const uint32_t code = fp8core_dtype_size(dtype) == 1 ? ((const uint8_t *)codes)[i] : codes[i];
      if (code != expected[i])
        fail_msg("%s: %a gives %x, expected %x", fp8core_dtype_name(dtype), (double)values[i], code, expected[i]);
    }
    free(values);
    free(expected);
    free(codes);
  }
  fp8core_context_destroy(&f.context);
}

// Every code of every format to every format, by way of the single-value calls.
static void all_codes(void **state) {
  (void)state;
  fixture f = start(0);
  for (int from = FP8CORE_E4M3; from <= FP8CORE_FP16; from++) {
    const int64_t count = fp8core_dtype_size((fp8core_dtype)from) == 1 ? 256 : 65536;
    uint16_t *source = malloc((size_t)count * 2);
    uint32_t *result = malloc((size_t)count * 4);
    assert_true(source && result);
    for (int64_t i = 0; i < count; i++) {
      if (count == 256)
        ((uint8_t *)source)[i] = (uint8_t)i;
      else
        source[i] = (uint16_t)i;
    }
    for (int to = FP8CORE_E4M3; to <= FP8CORE_FP32; to++) {
      for (int saturate = 0; saturate < 2; saturate++) {
        cast(&f, nearest(saturate), source, (fp8core_dtype)from, result, (fp8core_dtype)to, count, 1.0f);
        for (int64_t i = 0; i < count; i++) {
          const size_t bytes = fp8core_dtype_size((fp8core_dtype)to);
          uint32_t code = 0;
          memcpy(&code, (const unsigned char *)result + (size_t)i * bytes, bytes);
          const uint32_t expected =
            fp8core_encode((fp8core_dtype)to, fp8core_decode((fp8core_dtype)from, (uint32_t)i), saturate);
          if (code != expected)
            fail_msg("%s %x -> %s: %x, expected %x", fp8core_dtype_name((fp8core_dtype)from), (unsigned)i,
                     fp8core_dtype_name((fp8core_dtype)to), code, expected);
        }
      }
    }
    free(source);
    free(result);
  }
  fp8core_context_destroy(&f.context);
}

static void counts_and_amax(void **state) {
  (void)state;
  fixture f = start(1);
  uint8_t codes[8];
  const float values[8] = {0.0f, -0.0f, 1e-6f, -500.0f, 460.0f, 2.0f, 3e38f, 464.01f};
  cast(&f, nearest(1), values, FP8CORE_FP32, codes, FP8CORE_E4M3, 8, 1.0f);
  assert_int_equal(f.statistics.elements, 8);
  assert_int_equal(f.statistics.saturated, 3);
  assert_int_equal(f.statistics.flushed_to_zero, 1);
  assert_int_equal(f.statistics.nonfinite, 0);
  assert_true(f.amax == 3e38f);
  // Added to; the amax is raised, never lowered; it is of the values before the scale.
  const float small[3] = {1.0f, -2.0f, 4.0f};
  cast(&f, nearest(1), small, FP8CORE_FP32, codes, FP8CORE_E4M3, 3, 0x1p-20f);
  assert_int_equal(f.statistics.elements, 11);
  assert_int_equal(f.statistics.flushed_to_zero, 4);
  assert_true(f.amax == 3e38f);
  f.amax = 0.0f;
  cast(&f, nearest(1), small, FP8CORE_FP32, codes, FP8CORE_E4M3, 3, 32.0f);
  assert_true(f.amax == 4.0f);
  fp8core_context_destroy(&f.context);
}

// An infinity or a NaN in any lane reaches the amax, whatever stands beside it, and stays.
static void nonfinite_in_any_lane(void **state) {
  (void)state;
  fixture f = start(1);
  float values[130];
  uint8_t codes[130];
  for (int lane = 0; lane < 130; lane++) {
    for (int i = 0; i < 130; i++) values[i] = (float)(i % 7);
    values[lane] = -INFINITY;
    f.amax = 3.0f;
    f.statistics.nonfinite = 0;
    cast(&f, nearest(1), values, FP8CORE_FP32, codes, FP8CORE_E5M2, 130, 1.0f);
    assert_true(isinf(f.amax) && f.amax > 0.0f);
    assert_int_equal(f.statistics.nonfinite, 1);
    values[(lane + 1) % 130] = NAN;
    cast(&f, nearest(1), values, FP8CORE_FP32, codes, FP8CORE_E5M2, 130, 1.0f);
    assert_true(isnan(f.amax));
    values[lane] = values[(lane + 1) % 130] = 1.0f;
    cast(&f, nearest(1), values, FP8CORE_FP32, codes, FP8CORE_E5M2, 130, 1.0f);
    assert_true(isnan(f.amax));
  }
  fp8core_context_destroy(&f.context);
}

static fp8core_cast_options stochastic(uint32_t tensor_id, uint32_t step, uint64_t first) {
  fp8core_cast_options options = fp8core_cast_options_default();
  options.rounding = FP8CORE_ROUND_STOCHASTIC;
  options.tensor_id = tensor_id;
  options.step = step;
  options.first_element = first;
  return options;
}

#define DRAWS 4096

static int ups(const uint8_t *codes, uint8_t code, uint8_t *up) {
  int count = 0;
  for (int i = 0; i < DRAWS; i++) count += up[i] = codes[i] == code;
  return count;
}

static void stochastic_is_unbiased_and_independent(void **state) {
  (void)state;
  fixture f = start(1);
  float values[DRAWS];
  uint8_t codes[DRAWS];
  uint8_t first[DRAWS];
  uint8_t other[DRAWS];
  // 1 + a gap of 1/8 times the fraction: the standard deviation of the share is below 0.0079.
  static const float fractions[] = {0.125f, 0.25f, 0.5f, 0.75f, 0.9375f};
  for (size_t k = 0; k < sizeof(fractions) / sizeof(fractions[0]); k++) {
    for (int i = 0; i < DRAWS; i++) values[i] = 1.0f + fractions[k] * 0.125f;
    cast(&f, stochastic(1, 1, 0), values, FP8CORE_FP32, codes, FP8CORE_E4M3, DRAWS, 1.0f);
    for (int i = 0; i < DRAWS; i++) assert_true(codes[i] == 0x38 || codes[i] == 0x39);
    assert_true(fabs(ups(codes, 0x39, first) / (double)DRAWS - (double)fractions[k]) < 0.04);
  }
  // Half the smallest subnormal goes up half of the time.
  for (int i = 0; i < DRAWS; i++) values[i] = 0x1p-10f;
  cast(&f, stochastic(1, 1, 0), values, FP8CORE_FP32, codes, FP8CORE_E4M3, DRAWS, 1.0f);
  assert_true(abs(ups(codes, 0x01, first) - DRAWS / 2) < 164);
  for (int i = 0; i < DRAWS; i++) values[i] = 1.0625f;
  cast(&f, stochastic(1, 1, 0), values, FP8CORE_FP32, codes, FP8CORE_E4M3, DRAWS, 1.0f);
  (void)ups(codes, 0x39, first);
  static const uint32_t others[][2] = {{2, 1}, {1, 2}, {0, 0}};
  for (int k = 0; k < 4; k++) {
    if (k == 3) assert_ok(fp8core_context_set_seed(f.context, 1));
    cast(&f, k == 3 ? stochastic(1, 1, 0) : stochastic(others[k][0], others[k][1], 0), values, FP8CORE_FP32, codes,
         FP8CORE_E4M3, DRAWS, 1.0f);
    (void)ups(codes, 0x39, other);
    int agree = 0;
    for (int i = 0; i < DRAWS; i++) agree += first[i] == other[i];
    assert_in_range(agree, (int)(0.45 * DRAWS), (int)(0.55 * DRAWS));
  }
  fp8core_context_destroy(&f.context);
}

static void stochastic_leaves_representables(void **state) {
  (void)state;
  fixture f = start(1);
  for (int dtype = FP8CORE_E4M3; dtype <= FP8CORE_E5M2; dtype++) {
    uint8_t codes[256];
    uint8_t result[256];
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    for (uint32_t step = 0; step < 50; step++) {
      fp8core_cast_options options = stochastic(3, step, 0);
      options.saturate = 0;
      cast(&f, options, codes, (fp8core_dtype)dtype, result, (fp8core_dtype)dtype, 256, 1.0f);
      for (int i = 0; i < 256; i++)
        if (is_nan_code((fp8core_dtype)dtype, codes[i]))
          assert_true(is_nan_code((fp8core_dtype)dtype, result[i]));
        else
          assert_int_equal(result[i], codes[i]);
    }
    // At and above the maximum as to nearest.
    const float above[4] = {460.0f, 464.01f, 57500.0f, INFINITY};
    uint8_t drawn[4];
    uint8_t fixed[4];
    for (uint32_t step = 0; step < 50; step++) {
      fp8core_cast_options options = stochastic(3, step, 0);
      options.saturate = step % 2;
      const int skip = dtype == FP8CORE_E5M2 ? 2 : 0;
      cast(&f, options, above + skip, FP8CORE_FP32, drawn, (fp8core_dtype)dtype, 4 - skip, 1.0f);
      cast(&f, nearest(step % 2), above + skip, FP8CORE_FP32, fixed, (fp8core_dtype)dtype, 4 - skip, 1.0f);
      assert_memory_equal(drawn, fixed, (size_t)(4 - skip));
    }
  }
  fp8core_context_destroy(&f.context);
}

// The same bits with any number of threads, and for a tensor that is cut anywhere.
static void stochastic_is_reproducible(void **state) {
  (void)state;
  const int64_t count = (INT64_C(1) << 18) + 11;
  float *values = malloc((size_t)count * sizeof(float));
  uint8_t *whole = malloc((size_t)count);
  uint8_t *again = malloc((size_t)count);
  assert_true(values && whole && again);
  test_random random = {5};
  for (int64_t i = 0; i < count; i++) values[i] = (float)test_random_normal(&random);
  for (int threads = 1; threads <= 3; threads++) {
    fixture f = start(threads);
    const uint64_t first = UINT64_C(0x3fffffff1);
    cast(&f, stochastic(9, 4, first), values, FP8CORE_FP32, threads == 1 ? whole : again, FP8CORE_E5M2, count, 2.5f);
    if (threads > 1) assert_memory_equal(whole, again, (size_t)count);
    for (int64_t begin = 0, part = 1; begin < count; begin += part, part = part * 3 + 1) {
      if (part > count - begin) part = count - begin;
      cast(&f, stochastic(9, 4, first + (uint64_t)begin), values + begin, FP8CORE_FP32, again + begin, FP8CORE_E5M2,
           part, 2.5f);
    }
    assert_memory_equal(whole, again, (size_t)count);
    fp8core_context_destroy(&f.context);
  }
  free(values);
  free(whole);
  free(again);
}

// Published vectors of Philox-4x32-10 (Random123, kat_vectors).
static void philox_known_answers(void **state) {
  (void)state;
  static const uint32_t vectors[][10] = {{0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                         {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff,
                                          0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0,
                                          0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
  for (int i = 0; i < 3; i++) {
    uint32_t draws[4];
    fp8core_philox(vectors[i], vectors[i] + 4, draws);
    assert_memory_equal(draws, vectors[i] + 6, sizeof(draws));
  }
}

static void no_elements(void **state) {
  (void)state;
  fp8core_context *context = test_context_default();
  fp8core_tensor in = test_matrix(NULL, FP8CORE_FP32, 0, 5);
  fp8core_tensor out = test_matrix(NULL, FP8CORE_E4M3, 0, 5);
  fp8core_tensor across = test_matrix(NULL, FP8CORE_E4M3, 5, 0);
  float amax = 2.0f;
  void *device_amax = test_upload(context, &amax, sizeof(amax));
  out.amax = device_amax;
  assert_ok(fp8core_cast(context, NULL, &in, &out));
  assert_ok(fp8core_cast_transpose(context, NULL, &in, &out, &across));
  assert_ok(fp8core_amax(context, &in, device_amax));
  test_download(context, &amax, device_amax, sizeof(amax));
  assert_true(amax == 2.0f);
  test_free(context, device_amax);
  fp8core_context_destroy(&context);
}

static void bad_input(void **state) {
  (void)state;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  fp8core_context *context = test_context_default();
  unsigned char *memory = test_alloc(context, 4096);
  fp8core_tensor in = test_matrix(memory, FP8CORE_FP32, 4, 8);
  fp8core_tensor out = test_matrix(memory + 1024, FP8CORE_E4M3, 4, 8);
  fp8core_tensor across = test_matrix(memory + 2048, FP8CORE_E4M3, 8, 4);
  fp8core_cast_options options = fp8core_cast_options_default();
  assert_fails(fp8core_cast(NULL, NULL, &in, &out), invalid, "context is NULL");
  assert_fails(fp8core_cast(context, NULL, NULL, &out), invalid, "source is NULL");
  assert_fails(fp8core_cast(context, NULL, &in, NULL), invalid, "destination is NULL");
  assert_fails(fp8core_cast_transpose(context, NULL, &in, &out, NULL), invalid, "transposed is NULL");
  assert_fails(fp8core_amax(context, &in, NULL), invalid, "amax is NULL");
  options.rounding = (fp8core_rounding)7;
  assert_fails(fp8core_cast(context, &options, &in, &out), invalid, "rounding is 7");
  options = fp8core_cast_options_default();
  options.size = 4096;
  assert_fails(fp8core_cast(context, &options, &in, &out), FP8CORE_ERROR_VERSION_MISMATCH, "4096");
  options = fp8core_cast_options_default();
  options.first_element = UINT64_MAX;
  assert_fails(fp8core_cast(context, &options, &in, &out), invalid, "first_element is 18446744073709551615");
  options = fp8core_cast_options_default();
  options.statistics = (fp8core_cast_statistics *)(uintptr_t)(memory + 1);
  assert_fails(fp8core_cast(context, &options, &in, &out), invalid, "statistics is");

  fp8core_tensor bad = out;
  bad.shape[1] = 9;
  assert_fails(fp8core_cast(context, NULL, &in, &bad), invalid, "shape[1] is 9, expected the source's 8");
  bad = out;
  bad.dimensions = 1;
  assert_fails(fp8core_cast(context, NULL, &in, &bad), invalid, "dimensions is 1");
  bad = out;
  bad.dtype = (fp8core_dtype)11;
  assert_fails(fp8core_cast(context, NULL, &in, &bad), invalid, "dtype is 11");
  bad = out;
  bad.scale = (const float *)(uintptr_t)(memory + 3);
  assert_fails(fp8core_cast(context, NULL, &in, &bad), invalid, "destination.scale is");
  bad = out;
  bad.data = memory + 4;
  assert_fails(fp8core_cast(context, NULL, &in, &bad), invalid, "overlaps source");
  bad = test_matrix(memory, FP8CORE_FP32, 4, 8);
  fp8core_tensor narrow = test_matrix(memory, FP8CORE_BF16, 4, 8);
  assert_fails(fp8core_cast(context, NULL, &narrow, &bad), invalid, "wider than the source's bf16");
  narrow.row_stride = 12;
  assert_fails(fp8core_cast(context, NULL, &in, &narrow), invalid, "rows start 12 elements");
  narrow.row_stride = 16;
  assert_ok(fp8core_cast(context, NULL, &in, &narrow));

  bad = across;
  bad.shape[0] = 7;
  assert_fails(fp8core_cast_transpose(context, NULL, &in, &out, &bad), invalid, "shape[0] is 7");
  bad = across;
  bad.dtype = FP8CORE_E5M2;
  assert_fails(fp8core_cast_transpose(context, NULL, &in, &out, &bad), invalid,
               "dtype is e5m2, expected the destination's e4m3");
  bad = across;
  bad.scale = (const float *)(const void *)(memory + 3072);
  assert_fails(fp8core_cast_transpose(context, NULL, &in, &out, &bad), invalid, "transposed.scale");
  bad = across;
  bad.data = memory + 1030;
  assert_fails(fp8core_cast_transpose(context, NULL, &in, &out, &bad), invalid, "overlaps destination");
  bad.data = memory;
  assert_fails(fp8core_cast_transpose(context, NULL, &in, NULL, &bad), invalid, "overlaps source");
  assert_ok(fp8core_cast_transpose(context, NULL, &in, NULL, &across));
  test_free(context, memory);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(known_answers),
    cmocka_unit_test(ties_and_neighbours),
    cmocka_unit_test(all_codes),
    cmocka_unit_test(counts_and_amax),
    cmocka_unit_test(nonfinite_in_any_lane),
    cmocka_unit_test(stochastic_is_unbiased_and_independent),
    cmocka_unit_test(stochastic_leaves_representables),
    cmocka_unit_test(stochastic_is_reproducible),
    cmocka_unit_test(philox_known_answers),
    cmocka_unit_test(no_elements),
    cmocka_unit_test(bad_input),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
