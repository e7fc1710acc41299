// The CPU backend: what its files share.
#ifndef FP8CORE_CPU_H
#define FP8CORE_CPU_H

#include "internal.h"

// The best tier that the mask of FP8CORE_CPU_* allows and this build contains.
fp8core_isa fp8core_isa_of_features(uint32_t features);

fp8core_status fp8core_cpu_cast(fp8core_context *context, const fp8core_cast_job *job);
fp8core_status fp8core_cpu_amax(fp8core_context *context, int64_t rows, int64_t columns, const fp8core_rows *source,
                                float *amax);
fp8core_status fp8core_cpu_scaling_calibrate(fp8core_context *context, const fp8core_scaling_arrays *arrays,
                                             int64_t index, int only_without_history, int64_t rows, int64_t columns,
                                             const fp8core_rows *source);
fp8core_status fp8core_cpu_scaling_update(fp8core_context *context, const fp8core_scaling_arrays *arrays);
fp8core_status fp8core_cpu_copy_float(fp8core_context *context, float *destination, const float *source);
fp8core_status fp8core_cpu_gemm(fp8core_context *context, const fp8core_gemm_job *job);

#endif
