// exp() in vectors, for files that define v_float and v_int (of as many lanes, with the vector extension of gcc and
// clang) and splat() before they include this one.
#ifndef FP8CORE_CPU_VECTOR_EXP_H
#define FP8CORE_CPU_VECTOR_EXP_H

// exp(x) as p * 2^n with p about 0.7 to 1.42, for -87 <= x <= 88.7. x = n ln 2 + r with |r| <= ln 2 / 2, and the Taylor
// series of exp(r) to r^7, whose remainder is below 2^-27; with the roundings of Horner's rule the relative error stays
// below 2^-22.
static inline __attribute__((always_inline)) v_float fp8core_vector_exp(v_float x, v_int *exponent) {
  const v_float magic = splat(0x1.8p23f);
  const v_float shifted = x * splat(0x1.715476p+0f) + magic;
  const v_float n = shifted - magic;
  // ln 2 in two parts, the first with so few bits that n times it is exact.
  const v_float r = (x - n * splat(0x1.62e4p-1f)) - n * splat(0x1.7f7d1cp-20f);
  v_float p = r * splat(1.0f / 5040) + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r * r + r;
  *exponent = (v_int)shifted - (v_int)magic;
  return p + splat(1.0f);
}

#endif
