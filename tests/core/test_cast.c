// Casts against the formulas of the formats' specifications, written in double and apart from the library's own rules.
// Runs on the device under test; tests/kernels/check_cast holds every CPU tier against the scalar rule.
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

// Widths, with what the all-ones exponent means and the NaN that is written (OFP8 1.0 section 5.1, IEEE 754
// section 3.4).
typedef struct format {
  fp8core_dtype dtype;
  size_t bytes;
  int exponent_bits;
  int mantissa_bits;
  int has_infinity;
  double max;
  uint32_t nan_code;
} format;

static const format formats[] = {{FP8CORE_E4M3, 1, 4, 3, 0, 448.0, 0x7f},
                                 {FP8CORE_E5M2, 1, 5, 2, 1, 57344.0, 0x7e},
                                 {FP8CORE_BF16, 2, 8, 7, 1, 0x1.FEp127, 0x7fc0},
                                 {FP8CORE_FP16, 2, 5, 10, 1, 65504.0, 0x7e00},
                                 {FP8CORE_FP32, 4, 8, 23, 1, FLT_MAX, 0x7fc00000}};
#define FORMATS (sizeof(formats) / sizeof(formats[0]))

#define SENTINEL 0xa5

static const int64_t one_row = 1;

static int bias_of(const format *f) { return (1 << (f->exponent_bits - 1)) - 1; }

static uint32_t sign_of(const format *f) { return UINT32_C(1) << (8 * f->bytes - 1); }

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static uint32_t load(const void *data, size_t index, size_t bytes) {
  uint32_t code = 0;
  memcpy(&code, (const unsigned char *)data + index * bytes, bytes);
  return code;
}

static void store(void *data, size_t index, size_t bytes, uint32_t code) {
  memcpy((unsigned char *)data + index * bytes, &code, bytes);
}

static double value_of_code(const format *f, uint32_t code) {
  const uint32_t mantissa = code & ((UINT32_C(1) << f->mantissa_bits) - 1);
  const uint32_t ones = (UINT32_C(1) << f->exponent_bits) - 1;
  const uint32_t exponent = code >> f->mantissa_bits & ones;
  const double sign = code & sign_of(f) ? -1.0 : 1.0;
  const double fraction = (double)mantissa / (double)(UINT32_C(1) << f->mantissa_bits);
  if (exponent == ones && f->has_infinity) return mantissa ? copysign((double)NAN, sign) : sign * (double)INFINITY;
  if (exponent == ones && mantissa == (UINT32_C(1) << f->mantissa_bits) - 1) return copysign((double)NAN, sign);
  if (exponent == 0) return sign * ldexp(fraction, 1 - bias_of(f));
  return sign * ldexp(1.0 + fraction, (int)exponent - bias_of(f));
}

// Distance of neighbouring values of the format at this magnitude, which is finite and not 0.
static double gap_at(const format *f, double magnitude) {
  const int min_exponent = 1 - bias_of(f);
  const int exponent = ilogb(magnitude) > min_exponent ? ilogb(magnitude) : min_exponent;
  return ldexp(1.0, exponent - f->mantissa_bits);
}

// Code, without sign, of a magnitude that the format has.
static uint32_t code_of_value(const format *f, double magnitude) {
  const int min_exponent = 1 - bias_of(f);
  if (magnitude == 0.0) return 0;
  if (ilogb(magnitude) < min_exponent) return (uint32_t)ldexp(magnitude, f->mantissa_bits - min_exponent);
  const uint32_t significand = (uint32_t)ldexp(magnitude, f->mantissa_bits - ilogb(magnitude));
  return ((uint32_t)(ilogb(magnitude) + bias_of(f) - 1) << f->mantissa_bits) + significand;
}

static uint32_t overflow_code(const format *f, int saturate) {
  if (saturate) return code_of_value(f, f->max);
  return f->has_infinity ? ((UINT32_C(1) << f->exponent_bits) - 1) << f->mantissa_bits : f->nan_code;
}

// To nearest, ties to even, which is the default mode of rint().
static uint32_t nearest_code(const format *f, double value, int saturate) {
  const uint32_t sign = signbit(value) ? sign_of(f) : 0;
  const double magnitude = fabs(value);
  if (isnan(value)) return sign | f->nan_code;
  if (isinf(value)) return sign | overflow_code(f, saturate);
  if (magnitude == 0.0) return sign;
  const double gap = gap_at(f, magnitude);
  const double rounded = rint(magnitude / gap) * gap;
  return sign | (rounded > f->max ? overflow_code(f, saturate) : code_of_value(f, rounded));
}

// Away from zero where the draw is below the distance to the lower neighbour in units of 2^-32 of the gap.
static uint32_t stochastic_code(const format *f, double value, int saturate, uint32_t draw) {
  const double magnitude = fabs(value);
  if (!(magnitude < f->max) || magnitude == 0.0 || f->dtype == FP8CORE_FP32) return nearest_code(f, value, saturate);
  const double gap = gap_at(f, magnitude);
  const double lower = floor(magnitude / gap);
  const double fraction = floor((magnitude / gap - lower) * 0x1p32);
  const double rounded = (lower + ((double)draw < fraction ? 1.0 : 0.0)) * gap;
  return (signbit(value) ? sign_of(f) : 0) | code_of_value(f, rounded);
}

typedef struct cast_case {
  fp8core_dtype from;
  fp8core_dtype to;
  int64_t rows;
  int64_t columns;
  // 0: contiguous.
  int64_t source_stride;
  int64_t destination_stride;
  float scale_inverse;
  float scale;
  fp8core_cast_options options;
} cast_case;

static cast_case make_case(fp8core_dtype from, fp8core_dtype to, int64_t rows, int64_t columns) {
  cast_case c = {.from = from, .to = to, .rows = rows, .columns = columns, .scale_inverse = 1.0f, .scale = 1.0f};
  c.options = fp8core_cast_options_default();
  return c;
}

typedef struct outcome {
  float amax;
  fp8core_cast_statistics statistics;
} outcome;

// Host memory to host memory through the device; `destination` holds the whole span. Adds to the outcome.
static void run_cast(fp8core_context *context, const cast_case *c, const void *source, void *destination,
                     outcome *result) {
  fp8core_tensor in = test_matrix(NULL, c->from, c->rows, c->columns);
  fp8core_tensor out = test_matrix(NULL, c->to, c->rows, c->columns);
  fp8core_cast_options options = c->options;
  in.row_stride = c->source_stride;
  out.row_stride = c->destination_stride;
  in.data = out.data = &in;
  const size_t source_bytes = (size_t)fp8core_tensor_span_bytes(&in);
  const size_t destination_bytes = (size_t)fp8core_tensor_span_bytes(&out);
  in.data = test_upload(context, source, source_bytes);
  memset(destination, SENTINEL, destination_bytes);
  out.data = test_upload(context, destination, destination_bytes);
  float *scale_inverse = c->scale_inverse == 1.0f ? NULL : test_upload(context, &c->scale_inverse, sizeof(float));
  float *scale = c->scale == 1.0f ? NULL : test_upload(context, &c->scale, sizeof(float));
  in.scale_inverse = scale_inverse;
  out.scale = scale;
  if (result) {
    out.amax = test_upload(context, &result->amax, sizeof(float));
    options.statistics = test_upload(context, &result->statistics, sizeof(result->statistics));
  }
  assert_ok(fp8core_cast(context, &options, &in, &out));
  test_download(context, destination, out.data, destination_bytes);
  if (result) {
    test_download(context, &result->amax, out.amax, sizeof(float));
    test_download(context, &result->statistics, options.statistics, sizeof(result->statistics));
    test_free(context, out.amax);
    test_free(context, options.statistics);
  }
  if (scale) test_free(context, scale);
  if (scale_inverse) test_free(context, scale_inverse);
  test_free(context, in.data);
  test_free(context, out.data);
}

// Of a contiguous cast: codes, amax and counts against the formulas.
static void check_cast(fp8core_context *context, const cast_case *c, const void *source) {
  const format *from = &formats[c->from];
  const format *to = &formats[c->to];
  const size_t elements = (size_t)(c->rows * c->columns);
  unsigned char *stored = malloc(elements * to->bytes);
  assert_non_null(stored);
  outcome result = {0.0f, {0, 0, 0, 0}};
  run_cast(context, c, source, stored, &result);
  uint32_t amax = 0;
  fp8core_cast_statistics expected = {elements, 0, 0, 0};
  for (size_t i = 0; i < elements; i++) {
    const uint32_t source_code = load(source, i, from->bytes);
    const double decoded = value_of_code(from, source_code);
    const float value = (float)decoded * c->scale_inverse;
    const float scaled = value * c->scale;
    uint32_t code;
    if (c->options.rounding == FP8CORE_ROUND_STOCHASTIC) {
      // The context's seed is 0.
      const uint64_t element = c->options.first_element + i;
      const uint32_t counter[4] = {(uint32_t)(element / 4), (uint32_t)(element / 4 >> 32), c->options.tensor_id,
                                   c->options.step};
      const uint32_t key[2] = {0, 0};
      uint32_t draws[4];
      fp8core_philox(counter, key, draws);
      code = stochastic_code(to, (double)scaled, c->options.saturate, draws[element % 4]);
    } else {
      code = nearest_code(to, (double)scaled, c->options.saturate);
    }
    // NaN times anything has the sign of the source, which a product in C need not keep.
    if (isnan(decoded)) code = (signbit(decoded) ? sign_of(to) : 0) | to->nan_code;
    const uint32_t got = load(stored, i, to->bytes);
    if (got != code)
      fail_msg(
        "%s %x -> %s (scale_inverse %a, scale %a, saturate %d, rounding %d, element %zu of %zu): %x, expected %x",
        fp8core_dtype_name(c->from), source_code, fp8core_dtype_name(c->to), (double)c->scale_inverse, (double)c->scale,
        c->options.saturate, (int)c->options.rounding, i, elements, got, code);
    const uint32_t magnitude = isnan(value) ? UINT32_C(0x7fc00000) : bits_of(fabsf(value));
    amax = magnitude > amax ? magnitude : amax;
    if (!isfinite(value)) {
      expected.nonfinite++;
    } else {
      // Beyond the maximum also when it is rounded as if there were no maximum.
      const double exact = fabs((double)scaled);
      const double gap = isinf(exact) || exact == 0.0 ? 1.0 : gap_at(to, exact);
      expected.saturated += isinf(exact) || rint(exact / gap) * gap > to->max;
      expected.flushed_to_zero += value != 0.0f && (code & (sign_of(to) - 1)) == 0;
    }
  }
  free(stored);
  assert_int_equal(bits_of(result.amax), amax);
  assert_int_equal(result.statistics.elements, expected.elements);
  assert_int_equal(result.statistics.saturated, expected.saturated);
  assert_int_equal(result.statistics.flushed_to_zero, expected.flushed_to_zero);
  assert_int_equal(result.statistics.nonfinite, expected.nonfinite);
}

// Into every format, saturating and not, in both roundings.
static void check_everywhere(fp8core_context *context, fp8core_dtype from, int64_t elements, const void *source,
                             float scale_inverse, float scale) {
  for (size_t to = 0; to < FORMATS; to++) {
    for (int variant = 0; variant < 4; variant++) {
      cast_case c = make_case(from, formats[to].dtype, 1, elements);
      c.scale_inverse = scale_inverse;
      c.scale = scale;
      c.options.saturate = variant & 1;
      c.options.rounding = variant & 2 ? FP8CORE_ROUND_STOCHASTIC : FP8CORE_ROUND_NEAREST_EVEN;
      c.options.step = (uint32_t)variant;
      check_cast(context, &c, source);
    }
  }
}

typedef struct known_case {
  float value;
  // E4M3 saturating and not, E5M2 saturating and not.
  uint32_t codes[4];
} known_case;

static const known_case known_cases[] = {
  {464.0f, {0x7e, 0x7e, 0x5f, 0x5f}},        {464.01f, {0x7e, 0x7f, 0x5f, 0x5f}},
  {INFINITY, {0x7e, 0x7f, 0x7b, 0x7c}},      {0.0f, {0x00, 0x00, 0x00, 0x00}},
  {0x1p-10f, {0x00, 0x00, 0x14, 0x14}},      {0x1.00001p-10f, {0x01, 0x01, 0x14, 0x14}},
  {3 * 0x1p-10f, {0x02, 0x02, 0x1a, 0x1a}},  {0x1p-6f - 0x1p-10f, {0x08, 0x08, 0x24, 0x24}},
  {1.0625f, {0x38, 0x38, 0x3c, 0x3c}},       {1.0625f + 0x1p-20f, {0x39, 0x39, 0x3c, 0x3c}},
  {1.0625001192f, {0x39, 0x39, 0x3c, 0x3c}}, {1.1874998808f, {0x39, 0x39, 0x3d, 0x3d}},
  {61440.0f, {0x7e, 0x7f, 0x7b, 0x7c}},      {3 * 0x1p-17f, {0x00, 0x00, 0x02, 0x02}},
  {FLT_MAX, {0x7e, 0x7f, 0x7b, 0x7c}},       {0x1p-149f, {0x00, 0x00, 0x00, 0x00}},
  {448.0f, {0x7e, 0x7e, 0x5f, 0x5f}},        {57344.0f, {0x7e, 0x7f, 0x7b, 0x7b}},
};
#define KNOWN_CASES (sizeof(known_cases) / sizeof(known_cases[0]))

// Each value, its negative, and one FP32 step to either side.
static void known_values(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  float source[KNOWN_CASES * 6];
  unsigned char stored[KNOWN_CASES * 6];
  for (size_t i = 0; i < KNOWN_CASES; i++) {
    const float value = known_cases[i].value;
    const float values[3] = {value, nextafterf(value, 0.0f), nextafterf(value, INFINITY)};
    for (size_t j = 0; j < 6; j++) source[6 * i + j] = j < 3 ? values[j] : -values[j - 3];
  }
  for (int variant = 0; variant < 4; variant++) {
    cast_case c = make_case(FP8CORE_FP32, variant < 2 ? FP8CORE_E4M3 : FP8CORE_E5M2, 1, KNOWN_CASES * 6);
    c.options.saturate = variant % 2 == 0;
    run_cast(context, &c, source, stored, NULL);
    for (size_t i = 0; i < KNOWN_CASES; i++) {
      assert_int_equal(stored[6 * i], known_cases[i].codes[variant]);
      assert_int_equal(stored[6 * i + 3], known_cases[i].codes[variant] | 0x80);
    }
  }
  check_everywhere(context, FP8CORE_FP32, KNOWN_CASES * 6, source, 1.0f, 1.0f);
  fp8core_context_destroy(&context);
}

// A signalling NaN must become neither infinity, when its payload is cut off, nor 448.
static void nan_patterns(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const uint32_t patterns[] = {0x7fc00000, 0x7fa00000, 0x7f800001, 0x7fffffff, 0x7f80ffff, 0xffc00000,
                               0xffa00000, 0xff800001, 0xffffffff, 0xff80ffff, 0x7fbfffff, 0x7fc00001};
  const int64_t elements = sizeof(patterns) / sizeof(patterns[0]);
  check_everywhere(context, FP8CORE_FP32, elements, patterns, 1.0f, 1.0f);
  check_everywhere(context, FP8CORE_FP32, elements, patterns, 0x1p-126f, 0x1p126f);
  fp8core_context_destroy(&context);
}

// Every value of each format, every midpoint, and one FP32 step to either side of both.
static void ties(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  for (size_t i = 0; i + 1 < FORMATS; i++) {
    const format *f = &formats[i];
    const uint32_t codes = code_of_value(f, f->max);
    float *source = malloc(sizeof(float) * 6 * ((size_t)codes + 1));
    unsigned char *stored = malloc(2 * ((size_t)codes + 1) * 6);
    assert_non_null(source);
    assert_non_null(stored);
    size_t elements = 0;
    for (uint32_t code = 0; code < codes; code++) {
      const float low = (float)value_of_code(f, code);
      const float middle = (float)((value_of_code(f, code) + value_of_code(f, code + 1)) / 2);
      const float values[6] = {middle, nextafterf(middle, 0.0f),   nextafterf(middle, INFINITY),
                               low,    nextafterf(low, -INFINITY), nextafterf(low, INFINITY)};
      for (size_t j = 0; j < 6; j++) source[elements++] = code % 3 ? values[j] : -values[j];
    }
    for (int saturate = 0; saturate < 2; saturate++) {
      cast_case c = make_case(FP8CORE_FP32, f->dtype, 1, (int64_t)elements);
      c.options.saturate = saturate;
      check_cast(context, &c, source);
      run_cast(context, &c, source, stored, NULL);
      for (uint32_t code = 0; code < codes; code++) {
        const uint32_t magnitude = sign_of(f) - 1;
        assert_int_equal(load(stored, 6 * code, f->bytes) & magnitude, code & 1 ? code + 1 : code);
        assert_int_equal(load(stored, 6 * code + 1, f->bytes) & magnitude, code);
        assert_int_equal(load(stored, 6 * code + 2, f->bytes) & magnitude, code + 1);
        assert_int_equal(load(stored, 6 * code + 3, f->bytes) & magnitude, code);
      }
    }
    free(source);
    free(stored);
  }
  fp8core_context_destroy(&context);
}

static const float scale_pairs[][2] = {{1.0f, 1.0f},          {3.7f, 1.0f},      {1.0f, 0.3f},        {0x1p126f, 1.0f},
                                       {0x1p-126f, 0x1p126f}, {1.0f, 0x1p-126f}, {1.0f / 7.0f, 7.0f}, {1.0f, 0x1p126f}};
#define SCALE_PAIRS (sizeof(scale_pairs) / sizeof(scale_pairs[0]))

// All 256 codes of the FP8 formats and all 65536 of the 16-bit ones, into every format.
static void all_codes(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  uint16_t *source = malloc(65536 * sizeof(uint16_t));
  assert_non_null(source);
  for (size_t i = 0; i < 4; i++) {
    const size_t codes = formats[i].bytes == 1 ? 256 : 65536;
    for (size_t code = 0; code < codes; code++) store(source, code, formats[i].bytes, (uint32_t)code);
    for (size_t j = 0; j < (codes == 256 ? SCALE_PAIRS : 2); j++)
      check_everywhere(context, formats[i].dtype, (int64_t)codes, source, scale_pairs[j][0], scale_pairs[j][1]);
  }
  free(source);
  fp8core_context_destroy(&context);
}

// FP32 values of every exponent, with every scale.
static void all_exponents(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  static uint32_t source[256 * 20];
  test_random random = {1};
  for (uint32_t exponent = 0; exponent < 256; exponent++)
    for (uint32_t i = 0; i < 20; i++)
      source[exponent * 20 + i] = ((uint32_t)test_random_bits(&random) & 0x807fffff) | exponent << 23;
  for (size_t j = 0; j < SCALE_PAIRS; j++)
    check_everywhere(context, FP8CORE_FP32, 256 * 20, source, scale_pairs[j][0], scale_pairs[j][1]);
  fp8core_context_destroy(&context);
}

// Every FP8 and 16-bit code through FP32 and back, also under a power of two, is the code it was.
static void round_trips(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  uint16_t *source = malloc(65536 * sizeof(uint16_t));
  uint16_t *again = malloc(65536 * sizeof(uint16_t));
  float *wide = malloc(65536 * sizeof(float));
  assert_true(source && again && wide);
  for (size_t i = 0; i < 4; i++) {
    const format *f = &formats[i];
    const size_t codes = f->bytes == 1 ? 256 : 65536;
    for (size_t code = 0; code < codes; code++) store(source, code, f->bytes, (uint32_t)code);
    for (int scaled = 0; scaled < 2; scaled++) {
      // BF16 has FP32's exponents, which leave no room for a scale.
      const float scale = scaled && f->dtype != FP8CORE_BF16 ? 128.0f : 1.0f;
      cast_case out = make_case(f->dtype, FP8CORE_FP32, 1, (int64_t)codes);
      cast_case back = make_case(FP8CORE_FP32, f->dtype, 1, (int64_t)codes);
      out.scale_inverse = 1.0f / scale;
      back.scale = scale;
      out.options.saturate = back.options.saturate = 0;
      run_cast(context, &out, source, wide, NULL);
      run_cast(context, &back, wide, again, NULL);
      for (size_t code = 0; code < codes; code++) {
        const double value = value_of_code(f, (uint32_t)code);
        const uint32_t expected = isnan(value) ? ((uint32_t)code & sign_of(f)) | f->nan_code : (uint32_t)code;
        assert_int_equal(load(again, code, f->bytes), expected);
      }
    }
  }
  free(source);
  free(again);
  free(wide);
  fp8core_context_destroy(&context);
}

// Lengths 1 to 33 and some beyond a vector, source and destination at every offset that the device allows.
static void lengths_and_alignments(void **unused) {
  (void)unused;
  enum { LONGEST = 161, AREA = (LONGEST + 2 * 64) * 4 };
  const int64_t lengths[] = {47, 63, 64, 65, 127, 128, 129, LONGEST};
  fp8core_context *context = test_context_default();
  unsigned char host[AREA];
  unsigned char *device_source = test_alloc(context, AREA);
  unsigned char *device_destination = test_alloc(context, AREA);
  test_random random = {2};
  const fp8core_dtype pairs[][2] = {{FP8CORE_FP32, FP8CORE_E4M3},
                                    {FP8CORE_BF16, FP8CORE_E5M2},
                                    {FP8CORE_E4M3, FP8CORE_FP16},
                                    {FP8CORE_E5M2, FP8CORE_FP32}};
  for (size_t pair = 0; pair < sizeof(pairs) / sizeof(pairs[0]); pair++) {
    const format *from = &formats[pairs[pair][0]];
    const format *to = &formats[pairs[pair][1]];
    for (size_t l = 1; l <= 33 + sizeof(lengths) / sizeof(lengths[0]); l++) {
      const size_t length = l <= 33 ? l : (size_t)lengths[l - 34];
      uint32_t codes[LONGEST];
      for (size_t i = 0; i < length; i++) codes[i] = nearest_code(from, test_random_normal(&random) * 3.0, 1);
      const size_t step = test_on_cuda() ? (from->bytes > to->bytes ? from->bytes : to->bytes) : 1;
      for (size_t offset = 0; offset < 64; offset += step) {
        const size_t destination_offset = (offset * 5 + 64 - l * step) % 64 / step * step;
        memset(host, 0, AREA);
        for (size_t i = 0; i < length; i++) store(host + offset, i, from->bytes, codes[i]);
        assert_ok(fp8core_copy(context, device_source, host, AREA));
        memset(host, SENTINEL, AREA);
        assert_ok(fp8core_copy(context, device_destination, host, AREA));
        const fp8core_tensor in = test_matrix(device_source + offset, from->dtype, one_row, (int64_t)length);
        const fp8core_tensor out =
          test_matrix(device_destination + destination_offset, to->dtype, one_row, (int64_t)length);
        assert_ok(fp8core_cast(context, NULL, &in, &out));
        test_download(context, host, device_destination, AREA);
        for (size_t i = 0; i < AREA; i++)
          if (i < destination_offset || i >= destination_offset + length * to->bytes)
            assert_int_equal(host[i], SENTINEL);
        for (size_t i = 0; i < length; i++)
          assert_int_equal(load(host + destination_offset, i, to->bytes),
                           nearest_code(to, value_of_code(from, codes[i]), 1));
      }
    }
  }
  test_free(context, device_source);
  test_free(context, device_destination);
  fp8core_context_destroy(&context);
}

static void statistics_accumulate(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float source[] = {1.0f, -464.0f, 464.5f,   -1000.0f,  0x1p-10f, -0x1p-11f,
                          0.0f, -0.0f,   INFINITY, -INFINITY, NAN,      0x1p-9f};
  unsigned char stored[12];
  cast_case c = make_case(FP8CORE_FP32, FP8CORE_E4M3, 1, 12);
  outcome result = {0.0f, {5, 6, 7, 8}};
  for (uint64_t call = 1; call <= 3; call++) {
    run_cast(context, &c, source, stored, &result);
    assert_int_equal(result.statistics.elements, 5 + 12 * call);
    assert_int_equal(result.statistics.saturated, 6 + 2 * call);
    assert_int_equal(result.statistics.flushed_to_zero, 7 + 2 * call);
    assert_int_equal(result.statistics.nonfinite, 8 + 3 * call);
    // Without the mode that saturates, the counts are the same.
    c.options.saturate = call % 2 == 0;
  }
  assert_true(isnan(result.amax));
  fp8core_context_destroy(&context);
}

// Micro-batches of amax 8, 2, 1 leave 8; what is there is never lowered; values count before the scale.
static void amax_accumulates(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float batches[4][3] = {{8.0f, -1.0f, 0.5f}, {2.0f, 1.0f, -0.0f}, {-1.0f, 0.0f, 0.25f}, {-9.0f, 1.0f, 3.0f}};
  const float expected[4] = {8.0f, 8.0f, 8.0f, 9.0f};
  unsigned char stored[3];
  outcome result = {0.0f, {0, 0, 0, 0}};
  cast_case c = make_case(FP8CORE_FP32, FP8CORE_E5M2, 1, 3);
  c.scale = 16.0f;
  for (size_t i = 0; i < 4; i++) {
    run_cast(context, &c, batches[i], stored, &result);
    assert_true(result.amax == expected[i]);
  }
  c.scale_inverse = 4.0f;
  run_cast(context, &c, batches[0], stored, &result);
  assert_true(result.amax == 32.0f);
  const float subnormal[3] = {0x1p-149f, -0x1p-148f, 0.0f};
  c.scale_inverse = 1.0f;
  result.amax = 0.0f;
  run_cast(context, &c, subnormal, stored, &result);
  assert_true(result.amax == 0x1p-148f);
  fp8core_context_destroy(&context);
}

// From any lane, of the body or of the tail, beside finite values; and once there, it stays.
static void nonfinite_reaches_amax_from_any_lane(void **unused) {
  (void)unused;
  enum { LENGTH = 147 };
  fp8core_context *context = test_context_default();
  float *device_amax = test_alloc(context, sizeof(float));
  float source[LENGTH];
  const float specials[] = {NAN, -NAN, INFINITY, -INFINITY};
  for (size_t i = 0; i < LENGTH; i++) source[i] = 3.0f - (float)i;
  float *in = test_alloc(context, sizeof(source));
  unsigned char *out = test_alloc(context, LENGTH);
  unsigned char *across = test_alloc(context, LENGTH);
  fp8core_tensor in_tensor = test_matrix(in, FP8CORE_FP32, 1, LENGTH);
  fp8core_tensor out_tensor = test_matrix(out, FP8CORE_E4M3, 1, LENGTH);
  fp8core_tensor across_tensor = test_matrix(across, FP8CORE_E4M3, LENGTH, 1);
  out_tensor.amax = across_tensor.amax = device_amax;
  for (size_t lane = 0; lane < LENGTH; lane++) {
    for (size_t s = 0; s < 4; s++) {
      const float kept = source[lane];
      for (int how = 0; how < 3; how++) {
        float amax = 1.0f;
        assert_ok(fp8core_copy(context, device_amax, &amax, sizeof(amax)));
        for (int clean = 0; clean < 2; clean++) {
          source[lane] = clean ? kept : specials[s];
          assert_ok(fp8core_copy(context, in, source, sizeof(source)));
          if (how == 0) assert_ok(fp8core_cast(context, NULL, &in_tensor, &out_tensor));
          if (how == 1) assert_ok(fp8core_cast_transpose(context, NULL, &in_tensor, NULL, &across_tensor));
          if (how == 2) assert_ok(fp8core_amax(context, &in_tensor, device_amax));
          test_download(context, &amax, device_amax, sizeof(amax));
          assert_int_equal(bits_of(amax), s < 2 ? 0x7fc00000 : 0x7f800000);
        }
      }
    }
  }
  // A NaN wins over an infinity, whichever comes first.
  for (size_t first = 0; first < 2; first++) {
    float amax = 0.0f;
    assert_ok(fp8core_copy(context, device_amax, &amax, sizeof(amax)));
    source[first ? 140 : 2] = INFINITY;
    source[first ? 2 : 140] = NAN;
    assert_ok(fp8core_copy(context, in, source, sizeof(source)));
    assert_ok(fp8core_cast(context, NULL, &in_tensor, &out_tensor));
    test_download(context, &amax, device_amax, sizeof(amax));
    assert_true(isnan(amax));
  }
  test_free(context, in);
  test_free(context, out);
  test_free(context, across);
  test_free(context, device_amax);
  fp8core_context_destroy(&context);
}

static void zero_elements(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const outcome before = {2.5f, {1, 2, 3, 4}};
  outcome after;
  float *amax = test_upload(context, &before.amax, sizeof(float));
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = test_upload(context, &before.statistics, sizeof(before.statistics));
  const int64_t shapes[][4] = {{0, 0, 0, 0}, {0, 5, 0, 0}, {5, 0, 0, 0}, {2, 0, 3, 4}, {2, 3, 4, 0}};
  const int dimensions[] = {1, 2, 2, 4, 4};
  for (size_t i = 0; i < 5; i++) {
    fp8core_tensor in = fp8core_tensor_create(NULL, FP8CORE_FP32, dimensions[i], shapes[i]);
    fp8core_tensor out = fp8core_tensor_create(NULL, FP8CORE_E4M3, dimensions[i], shapes[i]);
    in.device = out.device = test_device();
    out.amax = amax;
    assert_ok(fp8core_cast(context, &options, &in, &out));
    assert_ok(fp8core_amax(context, &in, amax));
    if (dimensions[i] == 2) {
      fp8core_tensor across = test_matrix(NULL, FP8CORE_E4M3, shapes[i][1], shapes[i][0]);
      across.amax = amax;
      assert_ok(fp8core_cast_transpose(context, &options, &in, &out, &across));
      assert_ok(fp8core_cast_transpose(context, &options, &in, NULL, &across));
    }
    // Wrong arguments are wrong all the same.
    out.dtype = (fp8core_dtype)9;
    assert_fails(fp8core_cast(context, &options, &in, &out), FP8CORE_ERROR_INVALID_ARGUMENT, "dtype is 9");
  }
  test_download(context, &after.amax, amax, sizeof(float));
  test_download(context, &after.statistics, options.statistics, sizeof(after.statistics));
  assert_true(after.amax == before.amax);
  assert_memory_equal(&after.statistics, &before.statistics, sizeof(before.statistics));
  test_free(context, amax);
  test_free(context, options.statistics);
  fp8core_context_destroy(&context);
}

// Rows apart, one to four dimensions; gaps stay as they are.
static void strided_rows(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const int64_t shapes[][2] = {{1, 7}, {5, 1}, {5, 7}, {3, 64}, {4, 65}, {17, 33}, {2, 300}};
  test_random random = {3};
  for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
    for (int64_t gap = 0; gap < 4; gap++) {
      cast_case c = make_case(FP8CORE_FP32, gap % 2 ? FP8CORE_E5M2 : FP8CORE_BF16, shapes[s][0], shapes[s][1]);
      c.source_stride = c.columns + gap;
      c.destination_stride = c.columns + 2 * (gap / 2);
      const format *to = &formats[c.to];
      const size_t span = (size_t)((c.rows - 1) * c.destination_stride + c.columns);
      float *source = malloc((size_t)(c.rows * c.source_stride) * sizeof(float));
      unsigned char *stored = malloc(span * to->bytes);
      assert_true(source && stored);
      for (int64_t i = 0; i < c.rows * c.source_stride; i++) source[i] = (float)test_random_normal(&random);
      // Nothing between the rows may count.
      for (int64_t row = 0; row < c.rows && gap; row++) source[row * c.source_stride + c.columns] = NAN;
      outcome result = {0.0f, {0, 0, 0, 0}};
      run_cast(context, &c, source, stored, &result);
      float amax = 0.0f;
      for (size_t i = 0; i < span; i++) {
        const int64_t row = (int64_t)i / c.destination_stride;
        const int64_t column = (int64_t)i % c.destination_stride;
        if (column >= c.columns) {
          for (size_t byte = 0; byte < to->bytes; byte++) assert_int_equal(stored[i * to->bytes + byte], SENTINEL);
          continue;
        }
        const float value = source[row * c.source_stride + column];
        amax = fabsf(value) > amax ? fabsf(value) : amax;
        assert_int_equal(load(stored, i, to->bytes), nearest_code(to, (double)value, 1));
      }
      assert_true(result.amax == amax);
      assert_int_equal(result.statistics.elements, c.rows * c.columns);
      assert_int_equal(result.statistics.nonfinite, 0);
      free(source);
      free(stored);
    }
  }
  fp8core_context_destroy(&context);
}

static void dimensions_0_to_4(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const int64_t shape[4] = {2, 3, 4, 5};
  float source[2 * 3 * 4 * 7];
  unsigned char stored[2 * 3 * 4 * 7];
  for (size_t i = 0; i < sizeof(stored); i++) source[i] = 0.5f * (float)i - 20.0f;
  float *in_data = test_upload(context, source, sizeof(source));
  unsigned char *out_data = test_alloc(context, sizeof(stored));
  for (int dimensions = 0; dimensions <= 4; dimensions++) {
    memset(stored, SENTINEL, sizeof(stored));
    assert_ok(fp8core_copy(context, out_data, stored, sizeof(stored)));
    fp8core_tensor in = fp8core_tensor_create(in_data, FP8CORE_FP32, dimensions, shape);
    fp8core_tensor out = fp8core_tensor_create(out_data, FP8CORE_E4M3, dimensions, shape);
    in.device = out.device = test_device();
    const int64_t length = dimensions ? shape[dimensions - 1] : 1;
    const int64_t elements = fp8core_tensor_elements(&in);
    out.row_stride = length + 2;
    assert_ok(fp8core_cast(context, NULL, &in, &out));
    test_download(context, stored, out_data, sizeof(stored));
    for (int64_t i = 0; i < (int64_t)sizeof(stored); i++) {
      const int64_t row = i / (length + 2);
      const int64_t column = i % (length + 2);
      const int inside = column < length && row < elements / length;
      assert_int_equal(stored[i],
                       inside ? nearest_code(&formats[0], (double)source[row * length + column], 1) : SENTINEL);
    }
  }
  test_free(context, in_data);
  test_free(context, out_data);
  fp8core_context_destroy(&context);
}

// In place equals out of place: same width, narrower; one row and many, small and large.
static void in_place(void **unused) {
  (void)unused;
  fp8core_context *context = test_context(3, FP8CORE_ISA_AUTO);
  const int64_t shapes[][3] = {{1, 1, 0}, {1, 63, 0}, {9, 100, 0}, {9, 100, 31}, {1, (1 << 18) + 77, 0}, {300, 700, 5}};
  test_random random = {4};
  for (size_t from = 0; from < FORMATS; from++) {
    for (size_t to = 0; to < FORMATS; to++) {
      if (formats[to].bytes > formats[from].bytes) continue;
      const int64_t ratio = (int64_t)(formats[from].bytes / formats[to].bytes);
      for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        cast_case c = make_case(formats[from].dtype, formats[to].dtype, shapes[s][0], shapes[s][1]);
        c.source_stride = c.columns + shapes[s][2];
        c.destination_stride = c.columns;
        const size_t source_bytes = (size_t)(c.rows * c.source_stride) * formats[from].bytes;
        const size_t expected_bytes = (size_t)(c.rows * c.columns) * formats[to].bytes;
        unsigned char *source = malloc(source_bytes);
        unsigned char *expected = malloc(expected_bytes);
        assert_true(source && expected);
        for (int64_t i = 0; i < c.rows * c.source_stride; i++)
          store(source, (size_t)i, formats[from].bytes, nearest_code(&formats[from], test_random_normal(&random), 1));
        run_cast(context, &c, source, expected, NULL);
        unsigned char *data = test_upload(context, source, source_bytes);
        fp8core_tensor in = test_matrix(data, c.from, c.rows, c.columns);
        fp8core_tensor out = test_matrix(data, c.to, c.rows, c.columns);
        const int64_t stride = shapes[s][2] ? c.source_stride * ratio : c.columns;
        in.row_stride = c.source_stride;
        out.row_stride = stride;
        assert_ok(fp8core_cast(context, NULL, &in, &out));
        test_download(context, source, data, source_bytes);
        for (int64_t row = 0; row < c.rows; row++)
          assert_memory_equal(source + (size_t)(row * stride) * formats[to].bytes,
                              expected + (size_t)(row * c.columns) * formats[to].bytes,
                              (size_t)c.columns * formats[to].bytes);
        test_free(context, data);
        free(source);
        free(expected);
      }
    }
  }
  fp8core_context_destroy(&context);
}

static void transposes(void **unused) {
  (void)unused;
  fp8core_context *context = test_context(2, FP8CORE_ISA_AUTO);
  const int64_t shapes[][2] = {{1, 1},   {1, 70},    {70, 1},    {31, 33},  {64, 64},
                               {65, 63}, {128, 192}, {257, 130}, {500, 301}};
  test_random random = {5};
  for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
    for (int variant = 0; variant < 8; variant++) {
      cast_case c = make_case(variant & 4 ? FP8CORE_BF16 : FP8CORE_FP32, variant & 2 ? FP8CORE_E5M2 : FP8CORE_E4M3,
                              shapes[s][0], shapes[s][1]);
      c.options.rounding = variant & 1 ? FP8CORE_ROUND_STOCHASTIC : FP8CORE_ROUND_NEAREST_EVEN;
      c.source_stride = c.columns + variant % 3;
      c.scale = 96.0f;
      const format *from = &formats[c.from];
      const int64_t transposed_stride = c.rows + variant % 2 * 3;
      const size_t elements = (size_t)(c.rows * c.columns);
      const size_t source_bytes = (size_t)(c.rows * c.source_stride) * from->bytes;
      const size_t transposed_bytes = (size_t)(c.columns * transposed_stride);
      unsigned char *source = malloc(source_bytes);
      unsigned char *expected = malloc(elements);
      unsigned char *plain = malloc(elements);
      unsigned char *transposed = malloc(transposed_bytes);
      assert_true(source && expected && plain && transposed);
      for (int64_t i = 0; i < c.rows * c.source_stride; i++)
        store(source, (size_t)i, from->bytes, nearest_code(from, 3.0 * test_random_normal(&random), 1));
      outcome once = {0.0f, {0, 0, 0, 0}};
      run_cast(context, &c, source, expected, &once);
      assert_true(once.statistics.saturated > 0 || elements < 200 || c.to == FP8CORE_E5M2);
      float *scale = test_upload(context, &c.scale, sizeof(float));
      unsigned char *in_data = test_upload(context, source, source_bytes);
      unsigned char *out_data = test_alloc(context, elements);
      unsigned char *across_data = test_alloc(context, transposed_bytes);
      for (int both = 0; both < 2; both++) {
        outcome result = {0.0f, {0, 0, 0, 0}};
        memset(transposed, SENTINEL, transposed_bytes);
        assert_ok(fp8core_copy(context, across_data, transposed, transposed_bytes));
        fp8core_tensor in = test_matrix(in_data, c.from, c.rows, c.columns);
        fp8core_tensor out = test_matrix(out_data, c.to, c.rows, c.columns);
        fp8core_tensor across = test_matrix(across_data, c.to, c.columns, c.rows);
        fp8core_cast_options options = c.options;
        in.row_stride = c.source_stride;
        across.row_stride = transposed_stride;
        out.scale = across.scale = scale;
        float *amax = test_upload(context, &result.amax, sizeof(float));
        options.statistics = test_upload(context, &result.statistics, sizeof(result.statistics));
        // Whichever has it.
        (variant & 1 ? &out : &across)->amax = amax;
        if (!both) across.amax = amax;
        assert_ok(fp8core_cast_transpose(context, &options, &in, both ? &out : NULL, &across));
        test_download(context, &result.amax, amax, sizeof(float));
        test_download(context, &result.statistics, options.statistics, sizeof(result.statistics));
        assert_int_equal(bits_of(result.amax), bits_of(once.amax));
        assert_memory_equal(&result.statistics, &once.statistics, sizeof(once.statistics));
        test_download(context, transposed, across_data, transposed_bytes);
        test_download(context, plain, out_data, elements);
        if (both) assert_memory_equal(plain, expected, elements);
        for (int64_t column = 0; column < c.columns; column++)
          for (int64_t row = 0; row < transposed_stride; row++)
            assert_int_equal(transposed[column * transposed_stride + row],
                             row < c.rows ? expected[row * c.columns + column] : SENTINEL);
        test_free(context, amax);
        test_free(context, options.statistics);
      }
      test_free(context, scale);
      test_free(context, in_data);
      test_free(context, out_data);
      test_free(context, across_data);
      free(source);
      free(expected);
      free(plain);
      free(transposed);
    }
  }
  fp8core_context_destroy(&context);
}

// Random123's known answers (its kat_vectors file, philox4x32 with 10 rounds).
static void philox_known_answers(void **unused) {
  (void)unused;
  const uint32_t vectors[3][10] = {{0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                   {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
                                    0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                   {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
                                    0x94fdcceb, 0x5001e420, 0x24126ea1}};
  for (size_t i = 0; i < 3; i++) {
    uint32_t draws[4];
    fp8core_philox(vectors[i], vectors[i] + 4, draws);
    assert_memory_equal(draws, vectors[i] + 6, sizeof(draws));
    // The output may be the counter.
    uint32_t counter[4];
    memcpy(counter, vectors[i], sizeof(counter));
    fp8core_philox(counter, vectors[i] + 4, counter);
    assert_memory_equal(counter, vectors[i] + 6, sizeof(counter));
  }
}

#define DRAWS 65536

static void stochastic_mean(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  float *source = malloc(DRAWS * sizeof(float));
  uint16_t *stored = malloc(DRAWS * sizeof(uint16_t));
  assert_true(source && stored);
  const double values[] = {1.03, -1.1, 0.9999, 300.0, 0x1.8p-10, -0x1.1p-9, 0.013, 0x1p-12, 3e-5};
  for (size_t to = 0; to < 4; to++) {
    const format *f = &formats[to];
    for (size_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
      for (size_t i = 0; i < DRAWS; i++) source[i] = (float)values[v];
      cast_case c = make_case(FP8CORE_FP32, f->dtype, 1, DRAWS);
      c.options.rounding = FP8CORE_ROUND_STOCHASTIC;
      c.options.step = (uint32_t)v;
      run_cast(context, &c, source, stored, NULL);
      const double exact = (double)source[0];
      const double gap = gap_at(f, fabs(exact));
      const double lower = floor(fabs(exact) / gap) * gap;
      const double fraction = (fabs(exact) - lower) / gap;
      double sum = 0.0;
      for (size_t i = 0; i < DRAWS; i++) {
        const double value = value_of_code(f, load(stored, i, f->bytes));
        assert_true((fabs(value) == lower || fabs(value) == lower + gap) && !signbit(value) == !signbit(exact));
        sum += value - exact;
      }
      // Five standard deviations of the mean of so many draws.
      assert_true(fabs(sum / DRAWS) <= 5.0 * gap * sqrt(fraction * (1.0 - fraction) / DRAWS));
    }
  }
  free(source);
  free(stored);
  fp8core_context_destroy(&context);
}

// Representable values, those at or beyond the maximum, infinities and NaN: the same in every step.
static void stochastic_leaves_be(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float beyond[] = {448.0f,   450.0f,   463.9f,   464.0f,   464.1f,    57344.0f, 58000.0f,
                          61439.0f, 61440.0f, 65504.0f, 65519.0f, 65520.0f,  FLT_MAX,  INFINITY,
                          NAN,      -448.0f,  -460.0f,  -464.1f,  -61439.0f, -INFINITY};
  enum { BEYOND = sizeof(beyond) / sizeof(beyond[0]) };
  float *source = malloc((65536 + BEYOND) * sizeof(float));
  uint16_t *nearest = malloc((65536 + BEYOND) * sizeof(uint16_t));
  uint16_t *drawn = malloc((65536 + BEYOND) * sizeof(uint16_t));
  assert_true(source && nearest && drawn);
  for (size_t to = 0; to < 4; to++) {
    const format *f = &formats[to];
    const size_t codes = f->bytes == 1 ? 256 : 65536;
    size_t elements = 0;
    for (; elements < codes; elements++) source[elements] = (float)value_of_code(f, (uint32_t)elements);
    for (size_t i = 0; i < BEYOND; i++)
      if (!(fabs((double)beyond[i]) < f->max)) source[elements++] = beyond[i];
    for (int saturate = 0; saturate < 2; saturate++) {
      cast_case c = make_case(FP8CORE_FP32, f->dtype, 1, (int64_t)elements);
      c.options.saturate = saturate;
      run_cast(context, &c, source, nearest, NULL);
      c.options.rounding = FP8CORE_ROUND_STOCHASTIC;
      for (uint32_t step = 0; step < 8; step++) {
        c.options.step = step;
        run_cast(context, &c, source, drawn, NULL);
        assert_memory_equal(drawn, nearest, elements * f->bytes);
      }
    }
  }
  free(source);
  free(nearest);
  free(drawn);
  fp8core_context_destroy(&context);
}

// Equal values halfway between neighbours: two tensors, steps, seeds and places in a tensor draw independently.
static void stochastic_independence(void **unused) {
  (void)unused;
  enum { N = 4096 };
  float source[N];
  for (size_t i = 0; i < N; i++) source[i] = 1.0625f;
  unsigned char draws[6][N];
  for (uint32_t variant = 0; variant < 6; variant++) {
    fp8core_context_options options = fp8core_context_options_default();
    fp8core_context *context;
    options.device = test_device();
    options.seed = variant == 4 ? 1 : 0;
    assert_ok(fp8core_context_create(&context, &options));
    cast_case c = make_case(FP8CORE_FP32, FP8CORE_E4M3, 1, N);
    c.options.rounding = FP8CORE_ROUND_STOCHASTIC;
    c.options.tensor_id = variant == 1 || variant == 3;
    c.options.step = variant == 2 || variant == 3;
    c.options.first_element = variant == 5 ? N : 0;
    run_cast(context, &c, source, draws[variant], NULL);
    fp8core_context_destroy(&context);
  }
  for (size_t one = 0; one < 6; one++) {
    for (size_t other = 0; other < one; other++) {
      int agreements = 0;
      for (size_t i = 0; i < N; i++) agreements += draws[one][i] == draws[other][i];
      assert_in_range(agreements, (uintmax_t)(0.45 * N), (uintmax_t)(0.55 * N));
    }
    int neighbours = 0;
    for (size_t i = 1; i < N; i++) neighbours += draws[one][i] == draws[one][i - 1];
    assert_in_range(neighbours, (uintmax_t)(0.45 * N), (uintmax_t)(0.55 * N));
  }
}

// The same bits on any number of threads, however the tensor is cut, and every time.
static void same_bits(void **unused) {
  (void)unused;
  enum { N = 300001 };
  float *source = malloc(N * sizeof(float));
  unsigned char *whole = malloc(N);
  unsigned char *other = malloc(N);
  assert_true(source && whole && other);
  test_random random = {6};
  for (size_t i = 0; i < N; i++) source[i] = (float)(100.0 * test_random_normal(&random));
  for (int rounding = 0; rounding < 2; rounding++) {
    cast_case c = make_case(FP8CORE_FP32, FP8CORE_E4M3, 1, N);
    c.options.rounding = rounding ? FP8CORE_ROUND_STOCHASTIC : FP8CORE_ROUND_NEAREST_EVEN;
    // The counter's carry into its second word lies within the tensor.
    c.options.first_element = (UINT64_C(1) << 34) - 12345;
    outcome expected = {0.0f, {0, 0, 0, 0}};
    for (int threads = 1; threads <= 4; threads++) {
      fp8core_context *context = test_context(threads, FP8CORE_ISA_AUTO);
      outcome result = {0.0f, {0, 0, 0, 0}};
      run_cast(context, &c, source, threads == 1 ? whole : other, threads == 1 ? &expected : &result);
      if (threads > 1) {
        assert_memory_equal(whole, other, N);
        assert_int_equal(bits_of(result.amax), bits_of(expected.amax));
        assert_memory_equal(&result.statistics, &expected.statistics, sizeof(expected.statistics));
      }
      fp8core_context_destroy(&context);
    }
    fp8core_context *context = test_context_default();
    check_cast(context, &c, source);
    outcome parts = {0.0f, {0, 0, 0, 0}};
    cast_case part = c;
    for (int64_t begin = 0; begin < N; begin += part.columns) {
      part.columns = 1 + (int64_t)(test_random_bits(&random) % 20000);
      if (part.columns > N - begin) part.columns = N - begin;
      part.options.first_element = c.options.first_element + (uint64_t)begin;
      run_cast(context, &part, source + begin, other + begin, &parts);
    }
    assert_memory_equal(whole, other, N);
    assert_int_equal(bits_of(parts.amax), bits_of(expected.amax));
    assert_memory_equal(&parts.statistics, &expected.statistics, sizeof(expected.statistics));
    // As a matrix, also with rows apart, elements count row after row.
    cast_case matrix = c;
    matrix.rows = 10;
    matrix.columns = 30000;
    run_cast(context, &matrix, source, other, NULL);
    assert_memory_equal(whole, other, 300000);
    matrix.columns = matrix.source_stride = 4097;
    part.columns = 40970;
    part.options.first_element = c.options.first_element;
    for (int repeat = 0; repeat < 100; repeat++) {
      run_cast(context, repeat % 2 ? &matrix : &part, source, other, NULL);
      assert_memory_equal(whole, other, 40970);
    }
    fp8core_context_destroy(&context);
  }
  free(source);
  free(whole);
  free(other);
}

typedef struct bad_input {
  fp8core_context *context;
  fp8core_cast_options options;
  unsigned char *in_data;
  unsigned char *out_data;
  unsigned char *across_data;
  fp8core_tensor in;
  fp8core_tensor out;
  fp8core_tensor across;
} bad_input;

// 8 x 6 FP32 into E4M3, in areas of 512 bytes.
static void reset(bad_input *b) {
  b->options = fp8core_cast_options_default();
  b->in = test_matrix(b->in_data, FP8CORE_FP32, 8, 6);
  b->out = test_matrix(b->out_data, FP8CORE_E4M3, 8, 6);
  b->across = test_matrix(b->across_data, FP8CORE_E4M3, 6, 8);
}

// The cast refuses with this text, and so does the transpose.
#define assert_cast_refused(b, text)                                                                                   \
  do {                                                                                                                 \
    assert_fails(fp8core_cast((b)->context, &(b)->options, &(b)->in, &(b)->out), FP8CORE_ERROR_INVALID_ARGUMENT,       \
                 text);                                                                                                \
    assert_fails(fp8core_cast_transpose((b)->context, &(b)->options, &(b)->in, &(b)->out, &(b)->across),               \
                 FP8CORE_ERROR_INVALID_ARGUMENT, text);                                                                \
    reset(b);                                                                                                          \
  } while (0)
#define assert_transpose_refused(b, text)                                                                              \
  do {                                                                                                                 \
    assert_fails(fp8core_cast_transpose((b)->context, &(b)->options, &(b)->in, &(b)->out, &(b)->across),               \
                 FP8CORE_ERROR_INVALID_ARGUMENT, text);                                                                \
    reset(b);                                                                                                          \
  } while (0)
#define assert_only_cast_refused(b, text)                                                                              \
  do {                                                                                                                 \
    assert_fails(fp8core_cast((b)->context, &(b)->options, &(b)->in, &(b)->out), FP8CORE_ERROR_INVALID_ARGUMENT,       \
                 text);                                                                                                \
    reset(b);                                                                                                          \
  } while (0)

static void *shifted(void *pointer, size_t bytes) { return (unsigned char *)pointer + bytes; }

static void refuse_wrong_arguments(bad_input *b) {
  assert_fails(fp8core_cast(NULL, NULL, &b->in, &b->out), FP8CORE_ERROR_INVALID_ARGUMENT, "context is NULL");
  assert_fails(fp8core_cast(b->context, NULL, NULL, &b->out), FP8CORE_ERROR_INVALID_ARGUMENT, "source");
  assert_fails(fp8core_cast(b->context, NULL, &b->in, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "destination");
  assert_fails(fp8core_cast_transpose(NULL, NULL, &b->in, NULL, &b->across), FP8CORE_ERROR_INVALID_ARGUMENT,
               "context is NULL");
  assert_fails(fp8core_cast_transpose(b->context, NULL, &b->in, &b->out, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "transposed is NULL");
  assert_fails(fp8core_amax(NULL, &b->in, (float *)(void *)b->out_data), FP8CORE_ERROR_INVALID_ARGUMENT,
               "context is NULL");
  assert_fails(fp8core_amax(b->context, NULL, (float *)(void *)b->out_data), FP8CORE_ERROR_INVALID_ARGUMENT, "source");
  assert_fails(fp8core_amax(b->context, &b->in, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "amax is NULL");
  assert_fails(fp8core_amax(b->context, &b->in, shifted(b->out_data, 2)), FP8CORE_ERROR_INVALID_ARGUMENT, "amax is ");
  b->options.size = 0;
  assert_fails(fp8core_cast(b->context, &b->options, &b->in, &b->out), FP8CORE_ERROR_VERSION_MISMATCH, "size is 0");
  reset(b);
  b->options.rounding = (fp8core_rounding)2;
  assert_cast_refused(b, "rounding is 2");
  b->options.rounding = (fp8core_rounding)-1;
  assert_cast_refused(b, "rounding is -1");
  b->options.statistics = shifted(b->out_data, 4);
  assert_cast_refused(b, "statistics is ");
  b->options.first_element = UINT64_MAX - 47;
  assert_cast_refused(b, "first_element is 18446744073709551568");
}

static void refuse_wrong_tensors(bad_input *b) {
  b->in.dtype = (fp8core_dtype)5;
  assert_cast_refused(b, "dtype is 5");
  b->out.dtype = (fp8core_dtype)-3;
  assert_cast_refused(b, "dtype is -3");
  b->in.dimensions = 5;
  assert_cast_refused(b, "dimensions is 5");
  b->in.shape[0] = -8;
  assert_cast_refused(b, "shape[0] is -8");
  b->out.shape[1] = INT64_MAX;
  assert_cast_refused(b, "2^63");
  b->in.row_stride = 5;
  assert_cast_refused(b, "row_stride is 5");
  b->out.data = NULL;
  assert_cast_refused(b, "data is NULL");
  b->out.device.type = test_on_cuda() ? FP8CORE_DEVICE_CPU : FP8CORE_DEVICE_CUDA;
  assert_cast_refused(b, "destination");
  b->in.device.type = test_on_cuda() ? FP8CORE_DEVICE_CPU : FP8CORE_DEVICE_CUDA;
  assert_cast_refused(b, "source");
  b->in.scale_granularity = (fp8core_scale_granularity)1;
  assert_cast_refused(b, "scale_granularity is 1");
  b->in.scale_inverse = shifted(b->out_data, 1);
  assert_cast_refused(b, "source.scale_inverse is ");
  b->out.scale = shifted(b->out_data, 2);
  assert_cast_refused(b, "destination.scale is ");
  b->out.amax = shifted(b->out_data, 3);
  assert_cast_refused(b, "destination.amax is ");
  if (test_on_cuda()) {
    b->in.data = shifted(b->in_data, 2);
    assert_cast_refused(b, "source.data is ");
  }
  b->out.shape[0] = 7;
  assert_cast_refused(b, "shape[0] is 7, expected the source's 8");
  b->out.dimensions = 1;
  assert_cast_refused(b, "dimensions is 1, expected the source's 2");
}

static void refuse_overlaps(bad_input *b) {
  // Same start: wider, rows that do not start at the same bytes.
  b->in.dtype = FP8CORE_E4M3;
  b->out.dtype = FP8CORE_BF16;
  b->out.data = b->in_data;
  assert_only_cast_refused(b, "wider");
  b->out.data = b->in_data;
  b->in.row_stride = 7;
  assert_only_cast_refused(b, "rows start 6 elements of e4m3 apart, the source's 7 of fp32");
  b->out.data = b->in_data;
  b->in.row_stride = 7;
  b->out.row_stride = 27;
  assert_only_cast_refused(b, "rows that start at the same bytes");
  // Elsewhere in the source, before it, and in its last byte.
  b->out.data = shifted(b->in_data, 4);
  assert_cast_refused(b, "overlaps");
  b->out.data = shifted(b->in_data, 8 * 6 * 4 - 1);
  assert_cast_refused(b, "overlaps");
  b->out.data = b->in_data;
  b->in.data = shifted(b->in_data, 8);
  assert_cast_refused(b, "overlaps");
  // Transposes are never in place.
  b->across.data = b->in_data;
  assert_transpose_refused(b, "transposed at ");
  b->across.data = b->out_data;
  assert_transpose_refused(b, "transposed at ");
  b->out.data = b->in_data;
  assert_transpose_refused(b, "source at ");
  // Side by side is none.
  b->out.data = shifted(b->in_data, 8 * 6 * 4);
  assert_ok(fp8core_cast(b->context, NULL, &b->in, &b->out));
  reset(b);
}

static void refuse_wrong_transposes(bad_input *b) {
  const int64_t three[3] = {2, 4, 6};
  b->across.shape[0] = 8;
  b->across.shape[1] = 6;
  assert_transpose_refused(b, "transposed: shape[0] is 8, expected the source's shape[1], which is 6");
  b->across.dimensions = 1;
  assert_transpose_refused(b, "transposed: dimensions is 1, expected 2");
  b->in = fp8core_tensor_create(b->in_data, FP8CORE_FP32, 3, three);
  b->out = fp8core_tensor_create(b->out_data, FP8CORE_E4M3, 3, three);
  b->in.device = b->out.device = test_device();
  assert_transpose_refused(b, "source: dimensions is 3, expected 2");
  b->across.dtype = FP8CORE_E5M2;
  assert_transpose_refused(b, "transposed: dtype is e5m2, expected the destination's e4m3");
  b->across.scale = (const float *)(void *)b->out_data;
  assert_transpose_refused(b, "transposed.scale is ");
  b->out.scale_inverse = (const float *)(void *)b->out_data;
  assert_transpose_refused(b, "transposed.scale_inverse is ");
  b->out.amax = (float *)(void *)shifted(b->out_data, 256);
  b->across.amax = (float *)(void *)shifted(b->out_data, 260);
  assert_transpose_refused(b, "transposed.amax is ");
}

static void bad_inputs(void **unused) {
  (void)unused;
  enum { AREA = 512 };
  unsigned char before[AREA];
  unsigned char after[AREA];
  bad_input b;
  memset(before, SENTINEL, AREA);
  b.context = test_context_default();
  b.in_data = test_upload(b.context, before, AREA);
  b.out_data = test_upload(b.context, before, AREA);
  b.across_data = test_upload(b.context, before, AREA);
  reset(&b);
  refuse_wrong_arguments(&b);
  refuse_wrong_tensors(&b);
  refuse_wrong_transposes(&b);
  // Nothing was written by any of those.
  unsigned char *const areas[3] = {b.in_data, b.out_data, b.across_data};
  for (size_t i = 0; i < 3; i++) {
    test_download(b.context, after, areas[i], AREA);
    assert_memory_equal(before, after, AREA);
  }
  refuse_overlaps(&b);
  for (size_t i = 0; i < 3; i++) test_free(b.context, areas[i]);
  fp8core_context_destroy(&b.context);
}

// Only whole options are read: a size that cuts a field would leave half of it to chance.
static void options_of_other_sizes(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  float *in_data = test_alloc(context, 2 * sizeof(float));
  unsigned char *out_data = test_alloc(context, 2);
  const fp8core_tensor in = test_matrix(in_data, FP8CORE_FP32, 1, 2);
  const fp8core_tensor out = test_matrix(out_data, FP8CORE_E4M3, 1, 2);
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = (fp8core_cast_statistics *)(void *)8;
  for (size_t size = 0; size < sizeof(options) + 16; size++) {
    if (size == sizeof(options)) continue;
    options.size = size;
    assert_fails(fp8core_cast(context, &options, &in, &out), FP8CORE_ERROR_VERSION_MISMATCH, "size is");
  }
  test_free(context, in_data);
  test_free(context, out_data);
  fp8core_context_destroy(&context);
}

// A scalar that is written must meet neither data nor another scalar; one that is read, no data that is written.
static void scalars_that_alias(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  float *source = test_alloc(context, 64 * sizeof(float));
  unsigned char *codes = test_alloc(context, 128);
  float *scalars = test_alloc(context, 64);
  assert_ok(fp8core_zero(context, source, 64 * sizeof(float)));
  const fp8core_tensor in = test_matrix(source, FP8CORE_FP32, 8, 8);
  const fp8core_tensor out = test_matrix(codes, FP8CORE_E4M3, 8, 8);
  const fp8core_tensor across = test_matrix(codes + 64, FP8CORE_E4M3, 8, 8);
  float *const in_codes = (float *)(void *)(codes + 60);
  const struct {
    float *destination_amax;
    const float *destination_scale;
    const float *destination_inverse;
    const float *source_inverse;
    void *statistics;
    const char *message;
  } cases[] = {
    {in_codes, NULL, NULL, NULL, NULL, "destination.amax overlaps destination,"},
    {source + 63, NULL, NULL, NULL, NULL, "destination.amax overlaps source,"},
    {scalars, scalars, NULL, NULL, NULL, "destination.amax overlaps destination.scale,"},
    {scalars, NULL, scalars, NULL, NULL, "destination.amax overlaps destination.scale_inverse,"},
    {scalars, NULL, NULL, scalars, NULL, "destination.amax overlaps source.scale_inverse,"},
    {NULL, in_codes, NULL, NULL, NULL, "destination.scale overlaps destination,"},
    {NULL, NULL, in_codes, NULL, NULL, "destination.scale_inverse overlaps destination,"},
    {NULL, NULL, NULL, in_codes, NULL, "source.scale_inverse overlaps destination,"},
    {NULL, NULL, NULL, NULL, codes + 56, "statistics overlaps destination,"},
    {NULL, NULL, NULL, NULL, source + 62, "statistics overlaps source,"},
    {scalars + 7, NULL, NULL, NULL, scalars, "statistics overlaps destination.amax,"},
    {NULL, scalars + 3, NULL, NULL, scalars, "statistics overlaps destination.scale,"},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    fp8core_tensor from = in;
    fp8core_tensor to = out;
    fp8core_cast_options options = fp8core_cast_options_default();
    from.scale_inverse = cases[i].source_inverse;
    to.amax = cases[i].destination_amax;
    to.scale = cases[i].destination_scale;
    to.scale_inverse = cases[i].destination_inverse;
    options.statistics = cases[i].statistics;
    assert_fails(fp8core_cast(context, &options, &from, &to), FP8CORE_ERROR_INVALID_ARGUMENT, cases[i].message);
    fp8core_tensor turned = across;
    turned.scale = to.scale;
    turned.scale_inverse = to.scale_inverse;
    assert_fails(fp8core_cast_transpose(context, &options, &from, &to, &turned), FP8CORE_ERROR_INVALID_ARGUMENT,
                 cases[i].message);
  }
  fp8core_tensor turned = across;
  turned.amax = (float *)(void *)(codes + 64);
  assert_fails(fp8core_cast_transpose(context, NULL, &in, NULL, &turned), FP8CORE_ERROR_INVALID_ARGUMENT,
               "transposed.amax overlaps transposed,");
  assert_fails(fp8core_amax(context, &in, source), FP8CORE_ERROR_INVALID_ARGUMENT, "amax overlaps source,");
  fp8core_tensor scaled = in;
  scaled.scale_inverse = scalars;
  assert_fails(fp8core_amax(context, &scaled, scalars), FP8CORE_ERROR_INVALID_ARGUMENT,
               "amax overlaps source.scale_inverse,");
  // In a gap between rows, of one buffer for all, scalars are no worse than elsewhere; and one amax may serve both.
  fp8core_tensor gaps = in;
  fp8core_tensor packed = out;
  gaps.shape[1] = packed.shape[1] = 4;
  gaps.row_stride = 8;
  gaps.amax = packed.amax = source + 7;
  assert_ok(fp8core_zero(context, source + 7, sizeof(float)));
  assert_ok(fp8core_cast(context, NULL, &gaps, &packed));
  packed.amax = source + 8;
  assert_fails(fp8core_cast(context, NULL, &gaps, &packed), FP8CORE_ERROR_INVALID_ARGUMENT,
               "destination.amax overlaps source,");
  test_free(context, source);
  test_free(context, codes);
  test_free(context, scalars);
  fp8core_context_destroy(&context);
}

// The amax that is there counts by its value: a negative one as 0, a NaN of either sign stays.
static void amaxes_that_are_there(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float values[4] = {1.0f, -4.0f, 3.0f, 0.0f};
  const uint32_t four = 0x40800000;
  const struct {
    uint32_t before;
    uint32_t after;
  } cases[] = {{0x80000000, four},       {0xbf800000, four},       {0xc0a00000, four},
               {0xff800000, four},       {0x80000001, four},       {0, four},
               {0x40a00000, 0x40a00000}, {0x7f800000, 0x7f800000}, {0x7fc00000, 0x7fc00000},
               {0xffc00000, 0xffc00000}, {0x7f800001, 0x7f800001}};
  float *in_data = test_upload(context, values, sizeof(values));
  float *zeros = test_alloc(context, sizeof(values));
  unsigned char *out_data = test_alloc(context, 16);
  float *amax = test_alloc(context, sizeof(float));
  assert_ok(fp8core_zero(context, zeros, sizeof(values)));
  for (int empty = 0; empty < 2; empty++) {
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
      const uint32_t expected = !empty                         ? cases[i].after
                                : cases[i].before > 0xff800000 ? cases[i].before
                                : cases[i].before >> 31        ? 0
                                                               : cases[i].before;
      for (int call = 0; call < 4; call++) {
        const fp8core_tensor in = test_matrix(empty ? zeros : in_data, FP8CORE_FP32, 2, 2);
        fp8core_tensor out = test_matrix(out_data, call == 3 ? FP8CORE_FP32 : FP8CORE_E4M3, 2, 2);
        const float identity[4] = {1.0f, 0.0f, 0.0f, 1.0f};
        float *right = test_upload(context, identity, sizeof(identity));
        const fp8core_tensor factor = test_matrix(right, FP8CORE_FP32, 2, 2);
        uint32_t bits;
        assert_ok(fp8core_copy(context, amax, &cases[i].before, sizeof(float)));
        out.amax = amax;
        if (call == 0) assert_ok(fp8core_cast(context, NULL, &in, &out));
        if (call == 1) assert_ok(fp8core_cast_transpose(context, NULL, &in, NULL, &out));
        if (call == 2) assert_ok(fp8core_amax(context, &in, amax));
        if (call == 3) assert_ok(fp8core_gemm(context, NULL, &in, &factor, NULL, &out));
        test_download(context, &bits, amax, sizeof(bits));
        assert_int_equal(bits, expected);
        test_free(context, right);
      }
    }
  }
  test_free(context, in_data);
  test_free(context, zeros);
  test_free(context, out_data);
  test_free(context, amax);
  fp8core_context_destroy(&context);
}

// Columns of one buffer that do not meet are no overlap.
static void columns_of_one_buffer(void **unused) {
  (void)unused;
  enum { ROWS = 40, STRIDE = 24 };
  fp8core_context *context = test_context_default();
  float values[ROWS * STRIDE];
  for (int i = 0; i < ROWS * STRIDE; i++) values[i] = (float)i;
  float *buffer = test_upload(context, values, sizeof(values));
  fp8core_tensor left = test_matrix(buffer, FP8CORE_FP32, ROWS, 11);
  fp8core_tensor right = test_matrix(buffer + 11, FP8CORE_FP32, ROWS, 11);
  left.row_stride = right.row_stride = STRIDE;
  assert_ok(fp8core_cast(context, NULL, &left, &right));
  test_download(context, values, buffer, sizeof(values));
  for (int i = 0; i < ROWS * STRIDE; i++) {
    const int column = i % STRIDE;
    assert_true(values[i] == (float)(column >= 11 && column < 22 ? i - 11 : i));
  }
  right.data = buffer + 10;
  assert_fails(fp8core_cast(context, NULL, &left, &right), FP8CORE_ERROR_INVALID_ARGUMENT, "overlaps");
  assert_fails(fp8core_cast(context, NULL, &right, &left), FP8CORE_ERROR_INVALID_ARGUMENT, "overlaps");
  right.data = buffer + 14;
  assert_fails(fp8core_cast(context, NULL, &left, &right), FP8CORE_ERROR_INVALID_ARGUMENT, "overlaps");
  // Rows of other distances may meet anywhere.
  right.data = buffer + 11;
  right.row_stride = STRIDE - 1;
  assert_fails(fp8core_cast(context, NULL, &left, &right), FP8CORE_ERROR_INVALID_ARGUMENT, "overlaps");
  test_free(context, buffer);
  fp8core_context_destroy(&context);
}

// What occupies no memory has no size that is too large.
static void sizes_without_memory(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  const float source[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  float *in_data = test_upload(context, source, sizeof(source));
  unsigned char *out_data = test_alloc(context, 8);
  unsigned char codes[8];
  fp8core_tensor in = test_matrix(NULL, FP8CORE_FP32, 0, INT64_MAX);
  fp8core_tensor out = test_matrix(NULL, FP8CORE_E4M3, 0, INT64_MAX);
  fp8core_tensor across = test_matrix(NULL, FP8CORE_E4M3, INT64_MAX, 0);
  assert_ok(fp8core_cast(context, NULL, &in, &out));
  assert_ok(fp8core_cast(context, NULL, &across, &across));
  assert_ok(fp8core_cast_transpose(context, NULL, &in, &out, &across));
  in = test_matrix(in_data, FP8CORE_FP32, 1, 8);
  out = test_matrix(out_data, FP8CORE_E4M3, 1, 8);
  across = test_matrix(out_data, FP8CORE_E4M3, 8, 1);
  in.row_stride = out.row_stride = INT64_MAX;
  assert_ok(fp8core_cast(context, NULL, &in, &out));
  test_download(context, codes, out_data, 8);
  for (int i = 0; i < 8; i++) assert_int_equal(codes[i], fp8core_encode(FP8CORE_E4M3, source[i], 1));
  assert_ok(fp8core_cast_transpose(context, NULL, &in, NULL, &across));
  test_free(context, in_data);
  test_free(context, out_data);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(scalars_that_alias),
    cmocka_unit_test(amaxes_that_are_there),
    cmocka_unit_test(columns_of_one_buffer),
    cmocka_unit_test(sizes_without_memory),
    cmocka_unit_test(known_values),
    cmocka_unit_test(nan_patterns),
    cmocka_unit_test(ties),
    cmocka_unit_test(all_codes),
    cmocka_unit_test(all_exponents),
    cmocka_unit_test(round_trips),
    cmocka_unit_test(lengths_and_alignments),
    cmocka_unit_test(statistics_accumulate),
    cmocka_unit_test(amax_accumulates),
    cmocka_unit_test(nonfinite_reaches_amax_from_any_lane),
    cmocka_unit_test(zero_elements),
    cmocka_unit_test(strided_rows),
    cmocka_unit_test(dimensions_0_to_4),
    cmocka_unit_test(in_place),
    cmocka_unit_test(transposes),
    cmocka_unit_test(philox_known_answers),
    cmocka_unit_test(stochastic_mean),
    cmocka_unit_test(stochastic_leaves_be),
    cmocka_unit_test(stochastic_independence),
    cmocka_unit_test(same_bits),
    cmocka_unit_test(bad_inputs),
    cmocka_unit_test(options_of_other_sizes),
  };
  return cmocka_run_group_tests_name("cast", tests, NULL, NULL);
}
