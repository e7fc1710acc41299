// Every tier that the CPU has, through casts, transposes, amaxes and products, without cmocka: run under valgrind,
// whose CPU has no AVX-512, it shows that no instruction of a tier runs on a CPU without it. All tiers agree.
#include <stdio.h>
#include <string.h>

#include "fp8core/fp8core.h"

enum { ROWS = 70, COLUMNS = 90 };

typedef struct results {
  unsigned char codes[ROWS * COLUMNS * 2];
  unsigned char transposed[ROWS * COLUMNS * 2];
  float amax;
} results;

static int failures;

static void check(const char *call, fp8core_isa isa, fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s on %s: %s\n", call, fp8core_isa_name(isa), fp8core_last_error());
  failures++;
}

static void run(fp8core_isa isa, fp8core_dtype dtype, results *found) {
  static float values[ROWS * COLUMNS];
  static float product[ROWS * ROWS];
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *context;
  options.threads = 1;
  options.isa = isa;
  check("fp8core_context_create", isa, fp8core_context_create(&context, &options));
  if (!context) return;
  for (int i = 0; i < ROWS * COLUMNS; i++) values[i] = (float)(i * 7 % 1013 - 500) / 64.0f;
  memset(found, 0, sizeof(*found));
  fp8core_tensor source = fp8core_tensor_matrix(values, FP8CORE_FP32, ROWS, COLUMNS, cpu);
  fp8core_tensor codes = fp8core_tensor_matrix(found->codes, dtype, ROWS, COLUMNS, cpu);
  fp8core_tensor transposed = fp8core_tensor_matrix(found->transposed, dtype, COLUMNS, ROWS, cpu);
  fp8core_tensor sums = fp8core_tensor_matrix(product, FP8CORE_FP32, ROWS, ROWS, cpu);
  check("fp8core_cast", isa, fp8core_cast(context, NULL, &source, &codes));
  check("fp8core_cast_transpose", isa, fp8core_cast_transpose(context, NULL, &source, &codes, &transposed));
  check("fp8core_amax", isa, fp8core_amax(context, &source, &found->amax));
  check("fp8core_gemm", isa, fp8core_gemm(context, NULL, &codes, &transposed, NULL, &sums));
  float square = 0.0f;
  for (int i = 0; i < COLUMNS; i++) {
    uint32_t code = found->codes[i];
    if (dtype == FP8CORE_BF16) {
      uint16_t wide;
      memcpy(&wide, found->codes + 2 * i, sizeof(wide));
      code = wide;
    }
    const float value = fp8core_decode(dtype, code);
    square += value * value;
  }
  if (!(product[0] > 0.99f * square && product[0] < 1.01f * square)) {
    fprintf(stderr, "%s: %g, expected %g\n", fp8core_isa_name(isa), (double)product[0], (double)square);
    failures++;
  }
  fp8core_context_destroy(&context);
}

int main(void) {
  static const fp8core_dtype dtypes[] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_BF16};
  static results scalar;
  static results tier;
  for (int i = 0; i < 3; i++) {
    run(FP8CORE_ISA_SCALAR, dtypes[i], &scalar);
    for (fp8core_isa isa = FP8CORE_ISA_AVX2; isa <= fp8core_isa_best(); isa++) {
      run(isa, dtypes[i], &tier);
      if (memcmp(&scalar, &tier, sizeof(scalar)) != 0) {
        fprintf(stderr, "%s differs from scalar in %s\n", fp8core_isa_name(isa), fp8core_dtype_name(dtypes[i]));
        failures++;
      }
    }
  }
  printf("tiers up to %s\n", fp8core_isa_name(fp8core_isa_best()));
  return failures ? 1 : 0;
}
