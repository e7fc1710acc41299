// A tier's cast kernels, one a pair of formats and rounding, made of its cast_run() and amax_run(), and their table. A
// tier expands FP8CORE_CAST_KERNELS once, after those two, and then FP8CORE_CAST_TABLE and FP8CORE_AMAX_TABLE.
#ifndef FP8CORE_CPU_CAST_TABLE_H
#define FP8CORE_CPU_CAST_TABLE_H

#define CAST_KERNEL(source_name, destination_name, rounding_name, stochastic)                                          \
  static void cast_##source_name##_##destination_name##_##rounding_name(                                               \
    const fp8core_cast_parameters *parameters, const void *source, void *destination, int64_t elements,                \
    uint64_t first_element, fp8core_cast_totals *totals) {                                                             \
    cast_run(FP8CORE_##source_name, FP8CORE_##destination_name, stochastic, parameters, source, destination, elements, \
             first_element, totals);                                                                                   \
  }
// To FP32 nothing is rounded, so that both roundings share a kernel.
#define CAST_KERNELS_FROM(source_name)                                                                                 \
  CAST_KERNEL(source_name, E4M3, nearest_even, 0)                                                                      \
  CAST_KERNEL(source_name, E4M3, stochastic, 1)                                                                        \
  CAST_KERNEL(source_name, E5M2, nearest_even, 0)                                                                      \
  CAST_KERNEL(source_name, E5M2, stochastic, 1)                                                                        \
  CAST_KERNEL(source_name, BF16, nearest_even, 0)                                                                      \
  CAST_KERNEL(source_name, BF16, stochastic, 1)                                                                        \
  CAST_KERNEL(source_name, FP16, nearest_even, 0)                                                                      \
  CAST_KERNEL(source_name, FP16, stochastic, 1)                                                                        \
  CAST_KERNEL(source_name, FP32, nearest_even, 0)                                                                      \
  static void amax_##source_name(float scale_inverse, const void *source, int64_t elements,                            \
                                 fp8core_cast_totals *totals) {                                                        \
    amax_run(FP8CORE_##source_name, scale_inverse, source, elements, totals);                                          \
  }
#define FP8CORE_CAST_KERNELS                                                                                           \
  CAST_KERNELS_FROM(E4M3)                                                                                              \
  CAST_KERNELS_FROM(E5M2) CAST_KERNELS_FROM(BF16) CAST_KERNELS_FROM(FP16) CAST_KERNELS_FROM(FP32)

#define CAST_ENTRY(source_name, destination_name)                                                                      \
  { cast_##source_name##_##destination_name##_nearest_even, cast_##source_name##_##destination_name##_stochastic }
#define CAST_ENTRIES(source_name)                                                                                      \
  {                                                                                                                    \
    CAST_ENTRY(source_name, E4M3), CAST_ENTRY(source_name, E5M2), CAST_ENTRY(source_name, BF16),                       \
      CAST_ENTRY(source_name, FP16), {                                                                                 \
      cast_##source_name##_FP32_nearest_even, cast_##source_name##_FP32_nearest_even                                   \
    }                                                                                                                  \
  }
#define FP8CORE_CAST_TABLE                                                                                             \
  { CAST_ENTRIES(E4M3), CAST_ENTRIES(E5M2), CAST_ENTRIES(BF16), CAST_ENTRIES(FP16), CAST_ENTRIES(FP32) }
#define FP8CORE_AMAX_TABLE                                                                                             \
  { amax_E4M3, amax_E5M2, amax_BF16, amax_FP16, amax_FP32 }

#endif
