// Sums of codes: the scalar kernels, the choice of a tier, and threads.
#include "cpu/sum.h"

#include "gradient_rules.h"

// Elements of one thread at a time, and from how many on there are several.
#define UNIT ((size_t)16384)
#define PARALLEL_ELEMENTS ((size_t)1 << 17)

static void sum_scalar(const fp8comm_sum *sum, size_t begin, size_t elements, float *sums) {
  for (size_t i = 0; i < elements; i++) sums[i] = fp8comm_sum_rule(sum->dtype, sum->codes, sum->count, begin + i);
}

static uint32_t largest_scalar(const fp8comm_sum *sum, size_t begin, size_t elements) {
  uint32_t largest = 0;
  for (size_t i = 0; i < elements; i++) {
    const float value = fp8comm_sum_rule(sum->dtype, sum->codes, sum->count, begin + i);
    const uint32_t magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

static uint32_t requantise_scalar(const fp8comm_sum *sum, size_t begin, size_t elements, float scale_inverse,
                                  float scale, unsigned char *codes) {
  uint32_t largest = 0;
  for (size_t i = 0; i < elements; i++) {
    const float value = fp8comm_sum_rule(sum->dtype, sum->codes, sum->count, begin + i);
    const uint32_t magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
    largest = magnitude > largest ? magnitude : largest;
    codes[i] = (unsigned char)fp8core_cast_element(fp8core_float_bits(value), FP8CORE_FP32, scale_inverse, sum->dtype,
                                                   scale, 0, 0, 1)
                 .code;
  }
  return largest;
}

const fp8comm_sum_kernels fp8comm_sum_scalar = {sum_scalar, largest_scalar, requantise_scalar};

const fp8comm_sum_kernels *fp8comm_sum_kernels_of(fp8core_isa isa) {
  const fp8comm_sum_kernels *kernels = &fp8comm_sum_scalar;
#if defined(FP8COMM_HAVE_AVX2)
  if (isa >= FP8CORE_ISA_AVX2) kernels = &fp8comm_sum_avx2;
#endif
#if defined(FP8COMM_HAVE_AVX512)
  if (isa >= FP8CORE_ISA_AVX512) kernels = &fp8comm_sum_avx512;
#endif
  (void)isa;
  return kernels;
}

static size_t unit_of(size_t unit, size_t elements) {
  return elements - unit * UNIT < UNIT ? elements - unit * UNIT : UNIT;
}

static int threads_for(const fp8core_context *context, size_t elements) {
  return elements < PARALLEL_ELEMENTS ? 1 : fp8core_context_threads(context);
}

void fp8comm_sum_all(const fp8core_context *context, const fp8comm_sum *sum, size_t begin, size_t elements,
                     float *sums) {
  const fp8comm_sum_kernels *kernels = fp8comm_sum_kernels_of(fp8core_context_isa(context));
  const int threads = threads_for(context, elements);
  const int64_t units = (int64_t)((elements + UNIT - 1) / UNIT);
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
  for (int64_t i = 0; i < units; i++) {
    const size_t first = (size_t)i * UNIT;
    kernels->sum(sum, begin + first, unit_of((size_t)i, elements), sums + first);
  }
  (void)threads;
}

uint32_t fp8comm_sum_largest(const fp8core_context *context, const fp8comm_sum *sum, size_t begin, size_t elements) {
  const fp8comm_sum_kernels *kernels = fp8comm_sum_kernels_of(fp8core_context_isa(context));
  const int threads = threads_for(context, elements);
  const int64_t units = (int64_t)((elements + UNIT - 1) / UNIT);
  uint32_t largest = 0;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(threads) reduction(max : largest) if (threads > 1)
#endif
  for (int64_t i = 0; i < units; i++) {
    const uint32_t found = kernels->largest(sum, begin + (size_t)i * UNIT, unit_of((size_t)i, elements));
    largest = found > largest ? found : largest;
  }
  (void)threads;
  return largest;
}

uint32_t fp8comm_sum_requantise(const fp8core_context *context, const fp8comm_sum *sum, size_t begin, size_t elements,
                                float scale_inverse, float scale, unsigned char *codes) {
  const fp8comm_sum_kernels *kernels = fp8comm_sum_kernels_of(fp8core_context_isa(context));
  const int threads = threads_for(context, elements);
  const int64_t units = (int64_t)((elements + UNIT - 1) / UNIT);
  uint32_t largest = 0;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(threads) reduction(max : largest) if (threads > 1)
#endif
  for (int64_t i = 0; i < units; i++) {
    const size_t first = (size_t)i * UNIT;
    const uint32_t found =
      kernels->requantise(sum, begin + first, unit_of((size_t)i, elements), scale_inverse, scale, codes + first);
    largest = found > largest ? found : largest;
  }
  (void)threads;
  return largest;
}
