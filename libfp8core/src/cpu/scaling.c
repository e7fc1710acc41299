// Scaling states on the CPU. The rules are in scaling_rules.h.
#include <string.h>

#include "cpu.h"
#include "scaling_rules.h"

// Entries of history below which starting threads costs more than they save.
#define PARALLEL_ENTRIES (INT64_C(1) << 16)

fp8core_status fp8core_cpu_scaling_calibrate(fp8core_context *context, const fp8core_scaling_arrays *arrays,
                                             int64_t index, int only_without_history, int64_t rows, int64_t columns,
                                             const fp8core_rows *source) {
  if (only_without_history && arrays->history_steps[index] > 0) return FP8CORE_OK;
  arrays->measured[index] = 0.0f;
  FP8CORE_TRY(fp8core_cpu_amax(context, rows, columns, source, &arrays->measured[index]));
  fp8core_calibrate_rule(arrays, index);
  return FP8CORE_OK;
}

fp8core_status fp8core_cpu_scaling_update(fp8core_context *context, const fp8core_scaling_arrays *arrays) {
  const int64_t entries = arrays->tensors * (arrays->delayed && !arrays->most_recent ? arrays->history_length : 1);
  const int threads = entries < PARALLEL_ENTRIES ? 1 : fp8core_usable_threads(context);
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
  for (int64_t i = 0; i < arrays->tensors; i++) fp8core_update_rule(arrays, i);
  return FP8CORE_OK;
}

fp8core_status fp8core_cpu_copy_float(fp8core_context *context, float *destination, const float *source) {
  (void)context;
  *destination = *source;
  return FP8CORE_OK;
}
