// The formats against the formulas of their specifications, written in double and apart from the library's own rules.
#include <float.h>
#include <math.h>
#include <string.h>

#include "support.h"

// Sign, exponent and mantissa widths, with what the all-ones exponent means.
typedef struct format {
  fp8core_dtype dtype;
  const char *name;
  size_t bytes;
  int exponent_bits;
  int mantissa_bits;
  // OFP8 1.0 section 5.1: E4M3 uses the all-ones exponent for values too; only S.1111.111 is NaN.
  int has_infinity;
  double max;
  double min_subnormal;
} format;

static const format formats[] = {
  {FP8CORE_E4M3, "e4m3", 1, 4, 3, 0, 448.0, 0x1p-9},        {FP8CORE_E5M2, "e5m2", 1, 5, 2, 1, 57344.0, 0x1p-16},
  {FP8CORE_BF16, "bf16", 2, 8, 7, 1, 0x1.FEp127, 0x1p-133}, {FP8CORE_FP16, "fp16", 2, 5, 10, 1, 65504.0, 0x1p-24},
  {FP8CORE_FP32, "fp32", 4, 8, 23, 1, FLT_MAX, 0x1p-149},
};
#define FORMATS (sizeof(formats) / sizeof(formats[0]))

static int bias_of(const format *f) { return (1 << (f->exponent_bits - 1)) - 1; }

static double value_of_code(const format *f, uint32_t code) {
  const uint32_t mantissa = code & ((UINT32_C(1) << f->mantissa_bits) - 1);
  const uint32_t ones = (UINT32_C(1) << f->exponent_bits) - 1;
  const uint32_t exponent = code >> f->mantissa_bits & ones;
  const double sign = code >> (f->mantissa_bits + f->exponent_bits) & 1 ? -1.0 : 1.0;
  const double fraction = (double)mantissa / (double)(UINT32_C(1) << f->mantissa_bits);
  if (exponent == ones && f->has_infinity) return mantissa ? (double)NAN : sign * (double)INFINITY;
  if (exponent == ones && mantissa == (UINT32_C(1) << f->mantissa_bits) - 1) return (double)NAN;
  if (exponent == 0) return sign * ldexp(fraction, 1 - bias_of(f));
  return sign * ldexp(1.0 + fraction, (int)exponent - bias_of(f));
}

// Rounded to the format's grid, to nearest, ties to even (the default mode of rint); infinity past the maximum.
static double round_to_format(const format *f, double value) {
  if (isnan(value) || isinf(value) || value == 0.0) return value;
  const int min_exponent = 1 - bias_of(f);
  const int exponent = ilogb(value) > min_exponent ? ilogb(value) : min_exponent;
  const double rounded = ldexp(rint(ldexp(value, f->mantissa_bits - exponent)), exponent - f->mantissa_bits);
  return fabs(rounded) > f->max ? copysign((double)INFINITY, value) : rounded;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// What fp8core_encode() must give, judged by its value; NaN codes by being NaN of the right sign.
static void check_encode(const format *f, float value, int saturate) {
  const uint32_t code = fp8core_encode(f->dtype, value, saturate);
  const double stored = value_of_code(f, code);
  double expected = round_to_format(f, (double)value);
  if (isinf(expected) && saturate) expected = copysign(f->max, expected);
  if (isinf(expected) && !f->has_infinity) expected = (double)NAN;
  const int sign = (int)(code >> (8 * f->bytes - 1));
  if (f->bytes < 4 && code >> (8 * f->bytes))
    fail_msg("%s of %a: code %x has too many bits", f->name, (double)value, code);
  if (sign != (signbit(value) != 0)) fail_msg("%s of %a: code %x has the wrong sign", f->name, (double)value, code);
  if (isnan(expected) ? !isnan(stored) : stored != expected)
    fail_msg("%s of %a (saturate %d): code %x is %a, expected %a", f->name, (double)value, saturate, code, stored,
             expected);
}

static void check_encode_everywhere(float value) {
  for (size_t i = 0; i < FORMATS; i++)
    for (int saturate = 0; saturate < 2; saturate++) {
      check_encode(&formats[i], value, saturate);
      check_encode(&formats[i], -value, saturate);
    }
}

static void properties_of_formats(void **unused) {
  (void)unused;
  assert_int_equal(FP8CORE_DTYPE_COUNT, FORMATS);
  for (size_t i = 0; i < FORMATS; i++) {
    const format *f = &formats[i];
    assert_int_equal(fp8core_dtype_size(f->dtype), f->bytes);
    assert_string_equal(fp8core_dtype_name(f->dtype), f->name);
    assert_true((double)fp8core_dtype_max(f->dtype) == f->max);
    assert_true((double)fp8core_dtype_min_subnormal(f->dtype) == f->min_subnormal);
  }
}

static void values_outside_the_enum(void **unused) {
  (void)unused;
  const int outside[] = {-1, FP8CORE_DTYPE_COUNT, 77, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
    const fp8core_dtype dtype = (fp8core_dtype)outside[i];
    assert_int_equal(fp8core_dtype_size(dtype), 0);
    assert_string_equal(fp8core_dtype_name(dtype), "unknown");
    assert_true(fp8core_dtype_max(dtype) == 0.0f);
    assert_true(fp8core_dtype_min_subnormal(dtype) == 0.0f);
    assert_true(isnan(fp8core_decode(dtype, 0)));
    assert_int_equal(fp8core_encode(dtype, 1.0f, 1), 0);
  }
}

// All codes: 256 of each FP8 format, 65536 of each 16-bit one; there and back.
static void decode_all_codes(void **unused) {
  (void)unused;
  for (size_t i = 0; i < FORMATS; i++) {
    const format *f = &formats[i];
    if (f->bytes == 4) continue;
    const uint32_t codes = UINT32_C(1) << (8 * f->bytes);
    for (uint32_t code = 0; code < codes; code++) {
      const double expected = value_of_code(f, code);
      const float decoded = fp8core_decode(f->dtype, code);
      const int negative = (int)(code >> (8 * f->bytes - 1));
      if (isnan(expected)) {
        if (bits_of(decoded) != (UINT32_C(0x7fc00000) | (uint32_t)negative << 31))
          fail_msg("%s code %x decodes to bits %x, expected the quiet NaN of its sign", f->name, code,
                   bits_of(decoded));
        for (int saturate = 0; saturate < 2; saturate++) check_encode(f, decoded, saturate);
        continue;
      }
      if ((double)decoded != expected || (signbit(decoded) != 0) != negative)
        fail_msg("%s code %x decodes to %a, expected %a", f->name, code, (double)decoded, expected);
      if (!isinf(expected)) assert_int_equal(fp8core_encode(f->dtype, decoded, 1), code);
      assert_int_equal(fp8core_encode(f->dtype, decoded, 0), code);
      // Higher bits are not the element's.
      assert_int_equal(bits_of(fp8core_decode(f->dtype, code | UINT32_C(0xABCD) << (8 * f->bytes))), bits_of(decoded));
    }
  }
  // Codes 1 to 8 of E4M3 are multiples of its smallest subnormal.
  for (uint32_t k = 1; k <= 8; k++) assert_true(fp8core_decode(FP8CORE_E4M3, k) == (float)k * 0x1p-9f);
}

typedef struct encode_case {
  float value;
  uint32_t e4m3_saturating;
  uint32_t e4m3;
  uint32_t e5m2_saturating;
  uint32_t e5m2;
} encode_case;

static void encode_known_cases(void **unused) {
  (void)unused;
  const encode_case cases[] = {
    {464.0f, 0x7e, 0x7e, 0x5f, 0x5f},
    {0x1.d00002p8f, 0x7e, 0x7f, 0x5f, 0x5f},
    {464.01f, 0x7e, 0x7f, 0x5f, 0x5f},
    {0x1.cffffep8f, 0x7e, 0x7e, 0x5f, 0x5f},
    {INFINITY, 0x7e, 0x7f, 0x7b, 0x7c},
    {FLT_MAX, 0x7e, 0x7f, 0x7b, 0x7c},
    {0.0f, 0x00, 0x00, 0x00, 0x00},
    {0x1p-149f, 0x00, 0x00, 0x00, 0x00},
    {FLT_MIN, 0x00, 0x00, 0x00, 0x00},
    {0x1p-10f, 0x00, 0x00, 0x14, 0x14},
    {0x1.fffffep-11f, 0x00, 0x00, 0x14, 0x14},
    {0x1.00001p-10f, 0x01, 0x01, 0x14, 0x14},
    {3 * 0x1p-10f, 0x02, 0x02, 0x1a, 0x1a},
    {0x1p-6f - 0x1p-10f, 0x08, 0x08, 0x24, 0x24},
    {1.0625f, 0x38, 0x38, 0x3c, 0x3c},
    {1.0625f + 0x1p-20f, 0x39, 0x39, 0x3c, 0x3c},
    {1.0625001192f, 0x39, 0x39, 0x3c, 0x3c},
    {1.1874998808f, 0x39, 0x39, 0x3d, 0x3d},
    {61440.0f, 0x7e, 0x7f, 0x7b, 0x7c},
    {0x1.dffffep15f, 0x7e, 0x7f, 0x7b, 0x7b},
    {57344.0f, 0x7e, 0x7f, 0x7b, 0x7b},
    {3 * 0x1p-17f, 0x00, 0x00, 0x02, 0x02},
    {0x1p-17f, 0x00, 0x00, 0x00, 0x00},
    {0x1.000002p-17f, 0x00, 0x00, 0x01, 0x01},
    {448.0f, 0x7e, 0x7e, 0x5f, 0x5f},
    {1.0f, 0x38, 0x38, 0x3c, 0x3c},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    const encode_case *c = &cases[i];
    for (uint32_t sign = 0; sign < 2; sign++) {
      const float value = sign ? -c->value : c->value;
      assert_int_equal(fp8core_encode(FP8CORE_E4M3, value, 1), c->e4m3_saturating | sign << 7);
      assert_int_equal(fp8core_encode(FP8CORE_E4M3, value, 0), c->e4m3 | sign << 7);
      assert_int_equal(fp8core_encode(FP8CORE_E5M2, value, 1), c->e5m2_saturating | sign << 7);
      assert_int_equal(fp8core_encode(FP8CORE_E5M2, value, 0), c->e5m2 | sign << 7);
    }
    check_encode_everywhere(c->value);
    check_encode_everywhere(nextafterf(c->value, 0.0f));
    check_encode_everywhere(nextafterf(c->value, INFINITY));
  }
}

// A signalling NaN must not become infinity when its payload is cut off, nor 448.
static void nan_patterns_stay_nan(void **unused) {
  (void)unused;
  const uint32_t patterns[] = {0x7fc00000, 0x7fa00000, 0x7f800001, 0x7fffffff, 0x7f80ffff, 0x7fbfffff};
  for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++)
    for (size_t j = 0; j < FORMATS; j++)
      for (int saturate = 0; saturate < 2; saturate++) {
        check_encode(&formats[j], float_of(patterns[i]), saturate);
        check_encode(&formats[j], float_of(patterns[i] | UINT32_C(0x80000000)), saturate);
      }
  assert_int_equal(fp8core_encode(FP8CORE_E4M3, NAN, 1), 0x7f);
  assert_int_equal(fp8core_encode(FP8CORE_E4M3, -NAN, 0), 0xff);
}

// Every midpoint between neighbouring FP8 values, and one FP32 step to either side of it and of the values.
static void encode_midpoints(void **unused) {
  (void)unused;
  int midpoints = 0;
  for (size_t i = 0; i < 2; i++) {
    const format *f = &formats[i];
    for (uint32_t code = 0; value_of_code(f, code) < f->max; code++) {
      const float low = (float)value_of_code(f, code);
      const float high = (float)value_of_code(f, code + 1);
      const float middle = low + (high - low) / 2;
      assert_int_equal(fp8core_encode(f->dtype, middle, 1), code & 1 ? code + 1 : code);
      assert_int_equal(fp8core_encode(f->dtype, nextafterf(middle, 0.0f), 1), code);
      assert_int_equal(fp8core_encode(f->dtype, nextafterf(middle, INFINITY), 1), code + 1);
      check_encode_everywhere(middle);
      check_encode_everywhere(nextafterf(low, INFINITY));
      check_encode_everywhere(nextafterf(high, 0.0f));
      midpoints += f->dtype == FP8CORE_E4M3;
    }
  }
  assert_int_equal(midpoints, 126);
}

// All values of the 16-bit formats, and FP32 values of every exponent.
static void encode_against_formula(void **unused) {
  (void)unused;
  for (uint32_t code = 0; code < 0x10000; code++) {
    check_encode_everywhere(fp8core_decode(FP8CORE_BF16, code));
    check_encode_everywhere(fp8core_decode(FP8CORE_FP16, code));
  }
  test_random random = {1};
  for (uint32_t exponent = 0; exponent < 256; exponent++)
    for (int i = 0; i < 200; i++)
      check_encode_everywhere(float_of(exponent << 23 | ((uint32_t)test_random_bits(&random) & 0x7fffff)));
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(properties_of_formats),  cmocka_unit_test(values_outside_the_enum),
    cmocka_unit_test(decode_all_codes),       cmocka_unit_test(encode_known_cases),
    cmocka_unit_test(nan_patterns_stay_nan),  cmocka_unit_test(encode_midpoints),
    cmocka_unit_test(encode_against_formula),
  };
  return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
