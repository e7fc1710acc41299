// Quantises a matrix to FP8 and back with a scale of its own, and shows what that costs: what an adopter's first
// program looks like. Builds against the installed library alone: cc quantize.c $(pkg-config --cflags --libs fp8core)
// -lm
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <fp8core/fp8core.h>

enum { ROWS = 64, COLUMNS = 256 };

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

// Signal-to-noise ratio in dB of FP32 values that went through `dtype` and came back.
static double round_trip(fp8core_context *context, const fp8core_tensor *source, fp8core_dtype dtype, int scaled) {
  static unsigned char codes[ROWS * COLUMNS];
  static float back[ROWS * COLUMNS];
  const float *values = source->data;
  float amax = 0.0f;
  check(fp8core_amax(context, source, &amax));
  const float scale = scaled ? fp8core_scale_from_amax(dtype, amax, 0, 0, 1.0f) : 1.0f;
  const float scale_inverse = 1.0f / scale;

  fp8core_tensor quantised = fp8core_tensor_matrix(codes, dtype, ROWS, COLUMNS, source->device);
  quantised.scale = &scale;
  quantised.scale_inverse = &scale_inverse;
  fp8core_cast_statistics statistics = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = &statistics;
  check(fp8core_cast(context, &options, source, &quantised));

  fp8core_tensor restored = fp8core_tensor_matrix(back, FP8CORE_FP32, ROWS, COLUMNS, source->device);
  check(fp8core_cast(context, NULL, &quantised, &restored));

  double signal = 0.0;
  double noise = 0.0;
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    const double error = (double)back[i] - (double)values[i];
    signal += (double)values[i] * (double)values[i];
    noise += error * error;
  }
  const double ratio = 10.0 * log10(signal / noise);
  printf("%s, scale %-12g SNR %5.2f dB, %5.2f %% underflow, %llu saturated\n", fp8core_dtype_name(dtype), (double)scale,
         ratio, 100.0 * (double)statistics.flushed_to_zero / (double)statistics.elements,
         (unsigned long long)statistics.saturated);
  return ratio;
}

int main(void) {
  static float values[ROWS * COLUMNS];
  // Small values, as those of weights: the sum of 12 uniform ones is nearly normal.
  uint32_t state = 1;
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    float sum = -6.0f;
    for (int j = 0; j < 12; j++) {
      state = state * UINT32_C(1664525) + UINT32_C(1013904223);
      sum += (float)(state >> 8) * 0x1p-24f;
    }
    values[i] = 0.002f * sum;
  }
  fp8core_context *context;
  check(fp8core_context_create(&context, NULL));
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const fp8core_tensor source = fp8core_tensor_matrix(values, FP8CORE_FP32, ROWS, COLUMNS, cpu);

  const double e4m3_without = round_trip(context, &source, FP8CORE_E4M3, 0);
  const double e4m3 = round_trip(context, &source, FP8CORE_E4M3, 1);
  const double e5m2 = round_trip(context, &source, FP8CORE_E5M2, 1);
  fp8core_context_destroy(&context);

  // 3 and 2 bits of mantissa, 6 dB each.
  return e4m3 > 30.0 && e5m2 > 24.0 && e4m3 > e4m3_without + 6.0 ? 0 : 1;
}
