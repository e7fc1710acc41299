// The loops of every SIMD tier, over blocks of four vectors. A tier's file defines LANES, v_float and the functions v_*
// before it includes this, and gives the table its name after it.
//
// Sums of E4M3 codes are kept times 2^-8, which v_load() leaves out: a power of two changes no rounding where nothing
// over- or underflows, and sums of codes are far from both.
#include "gradient_rules.h"

#define VECTORS 4
#define BLOCK ((size_t)(VECTORS * LANES))

V float sum_factor(fp8core_dtype dtype) { return dtype == FP8CORE_E4M3 ? 256.0f : 1.0f; }

V void add_block(fp8core_dtype dtype, const fp8comm_sum *sum, size_t at, v_float sums[VECTORS]) {
  for (int i = 0; i < VECTORS; i += 2) v_load(dtype, sum->codes[0] + at + (size_t)(i * LANES), &sums[i]);
  for (int source = 1; source < sum->count; source++) {
    const unsigned char *codes = sum->codes[source] + at;
    for (int i = 0; i < VECTORS; i += 2) {
      v_float values[2];
      v_load(dtype, codes + i * LANES, values);
      sums[i] = v_add(sums[i], values[0]);
      sums[i + 1] = v_add(sums[i + 1], values[1]);
    }
  }
}

V void sum_run(fp8core_dtype dtype, const fp8comm_sum *sum, size_t begin, size_t elements, float *out) {
  size_t done = 0;
  for (; done + BLOCK <= elements; done += BLOCK) {
    v_float sums[VECTORS];
    add_block(dtype, sum, begin + done, sums);
    for (int i = 0; i < VECTORS; i++)
      v_store(out + done + (size_t)(i * LANES), v_multiply(sums[i], v_splat(sum_factor(dtype))));
  }
  if (done < elements) fp8comm_sum_scalar.sum(sum, begin + done, elements - done, out + done);
}

// The largest lane, of sums as they are kept, and what the scalar loop has found.
V uint32_t largest_lane(fp8core_dtype dtype, v_float largest, uint32_t found) {
  float lanes[LANES];
  v_store(lanes, v_multiply(largest, v_splat(sum_factor(dtype))));
  for (int i = 0; i < LANES; i++) {
    const uint32_t bits = fp8core_float_bits(lanes[i]);
    found = bits > found ? bits : found;
  }
  return found;
}

V uint32_t largest_run(fp8core_dtype dtype, const fp8comm_sum *sum, size_t begin, size_t elements) {
  v_float largest = v_splat(0);
  uint32_t found = 0;
  size_t done = 0;
  for (; done + BLOCK <= elements; done += BLOCK) {
    v_float sums[VECTORS];
    add_block(dtype, sum, begin + done, sums);
    for (int i = 0; i < VECTORS; i++) largest = v_larger(largest, v_magnitude(sums[i]));
  }
  if (done < elements) found = fp8comm_sum_scalar.largest(sum, begin + done, elements - done);
  return largest_lane(dtype, largest, found);
}

V uint32_t requantise_run(fp8core_dtype dtype, const fp8comm_sum *sum, size_t begin, size_t elements,
                          float scale_inverse, float scale, unsigned char *codes) {
  const v_float factor = v_splat(sum_factor(dtype)), inverse = v_splat(scale_inverse), multiplier = v_splat(scale);
  const v_float most = v_splat(fp8core_bits_float(fp8core_format_of(dtype).max_value));
  v_float largest = v_splat(0);
  uint32_t found = 0;
  size_t done = 0;
  for (; done + BLOCK <= elements; done += BLOCK) {
    v_float sums[VECTORS], scaled[VECTORS];
    add_block(dtype, sum, begin + done, sums);
    for (int i = 0; i < VECTORS; i++) {
      const v_float magnitude = v_magnitude(sums[i]);
      const v_float mean = v_multiply(v_multiply(magnitude, factor), inverse);
      largest = v_larger(largest, magnitude);
      scaled[i] = v_smaller(v_multiply(mean, multiplier), most);
    }
    v_encode(dtype, scaled, sums, codes + done);
  }
  if (done < elements)
    found = fp8comm_sum_scalar.requantise(sum, begin + done, elements - done, scale_inverse, scale, codes + done);
  return largest_lane(dtype, largest, found);
}

static void sum_kernel(const fp8comm_sum *sum, size_t begin, size_t elements, float *out) {
  if (sum->dtype == FP8CORE_E4M3) {
    sum_run(FP8CORE_E4M3, sum, begin, elements, out);
  } else {
    sum_run(FP8CORE_E5M2, sum, begin, elements, out);
  }
}

static uint32_t largest_kernel(const fp8comm_sum *sum, size_t begin, size_t elements) {
  return sum->dtype == FP8CORE_E4M3 ? largest_run(FP8CORE_E4M3, sum, begin, elements)
                                    : largest_run(FP8CORE_E5M2, sum, begin, elements);
}

static uint32_t requantise_kernel(const fp8comm_sum *sum, size_t begin, size_t elements, float scale_inverse,
                                  float scale, unsigned char *codes) {
  return sum->dtype == FP8CORE_E4M3 ? requantise_run(FP8CORE_E4M3, sum, begin, elements, scale_inverse, scale, codes)
                                    : requantise_run(FP8CORE_E5M2, sum, begin, elements, scale_inverse, scale, codes);
}
