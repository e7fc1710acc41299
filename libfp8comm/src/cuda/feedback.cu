// Error feedback of gradients on a GPU: what gradient_feedback.c does on the host, bit for bit, in one pass over the
// values for their amax and one for their codes.
#include "kernels.h"
#include "rules.cuh"

#include "gradient_rules.h"

namespace {

constexpr int threads = 256;
// Elements of a thread in one round, whose loads go together.
constexpr int width = 4;
// Enough to fill a GPU; they share what is more.
constexpr int64_t most_blocks = 4096;

struct scales {
  float values_inverse;
  float lost;
  float inverse;
};

static __device__ __forceinline__ float scale_of(const float *scale) { return scale ? *scale : 1.0f; }

static __device__ __forceinline__ scales scales_of(const fp8comm_feedback_job &job) {
  return {scale_of(job.values_scale_inverse), scale_of(job.lost_scale), scale_of(job.scale_inverse)};
}

template <fp8core_dtype Source>
static __device__ __forceinline__ uint32_t code_of(const fp8comm_feedback_job &job, int64_t index) {
  const int64_t place = job.columns == job.count ? index : index / job.columns * job.stride + index % job.columns;
  if (fp8core_traits<Source>::size == 1) return ((const uint8_t *)job.values)[place];
  if (fp8core_traits<Source>::size == 2) return ((const uint16_t *)job.values)[place];
  return ((const uint32_t *)job.values)[place];
}

template <fp8core_dtype Source>
static __device__ __forceinline__ float corrected(uint32_t code, uint32_t lost, const scales &by) {
  const uint32_t value = fp8core_cast_element(code, Source, by.values_inverse, FP8CORE_FP32, 1.0f, 0, 0, 0).code;
  return fp8comm_corrected_rule(fp8core_bits_float(value), fp8core_bits_float(fp8core_decode_bits(FP8CORE_BF16, lost)),
                                by.lost);
}

// The values and their errors from `first` on, each `threads` elements behind the one before; 0 where there is none.
template <fp8core_dtype Source>
static __device__ __forceinline__ void load(const fp8comm_feedback_job &job, int64_t first, const scales &by,
                                            float (&values)[width]) {
  uint32_t codes[width], lost[width];
#pragma unroll
  for (int i = 0; i < width; i++) {
    const int64_t index = first + (int64_t)i * threads;
    codes[i] = index < job.count ? code_of<Source>(job, index) : 0;
    lost[i] = index < job.count ? job.lost[index] : 0;
  }
#pragma unroll
  for (int i = 0; i < width; i++) values[i] = corrected<Source>(codes[i], lost[i], by);
}

template <fp8core_dtype Source>
static __global__ __launch_bounds__(threads) void measure_kernel(const fp8comm_feedback_job job) {
  const scales by = scales_of(job);
  const int64_t step = (int64_t)gridDim.x * threads * width;
  fp8core_gathered gathered = {};
  for (int64_t first = (int64_t)blockIdx.x * threads * width + threadIdx.x; first < job.count; first += step) {
    float values[width];
    load<Source>(job, first, by, values);
#pragma unroll
    for (int i = 0; i < width; i++) {
      const uint32_t magnitude =
        fp8core_cast_element(fp8core_float_bits(values[i]), FP8CORE_FP32, by.inverse, FP8CORE_FP32, 1.0f, 0, 0, 1)
          .magnitude;
      gathered.amax = magnitude > gathered.amax ? magnitude : gathered.amax;
    }
  }
  fp8core_store_gathered(gathered, job.amax, NULL);
}

template <fp8core_dtype Source, fp8core_dtype Wire>
static __global__ __launch_bounds__(threads) void cast_kernel(const fp8comm_feedback_job job) {
  const scales by = scales_of(job);
  const float scale = *job.scale, code_scale_inverse = *job.code_scale_inverse;
  const int64_t step = (int64_t)gridDim.x * threads * width;
  fp8core_gathered gathered = {};
  for (int64_t first = (int64_t)blockIdx.x * threads * width + threadIdx.x; first < job.count; first += step) {
    float values[width];
    load<Source>(job, first, by, values);
#pragma unroll
    for (int i = 0; i < width; i++) {
      const int64_t index = first + (int64_t)i * threads;
      if (index >= job.count) break;
      const fp8core_cast_result result =
        fp8core_cast_element(fp8core_float_bits(values[i]), FP8CORE_FP32, by.inverse, Wire, scale, 0, 0, 1);
      const uint32_t stored =
        fp8core_cast_element(result.code, Wire, code_scale_inverse, FP8CORE_FP32, 1.0f, 0, 0, 1).code;
      const float lost = fp8comm_lost_rule(values[i], by.inverse, fp8core_bits_float(stored));
      job.codes[index] = (unsigned char)result.code;
      job.lost[index] =
        (uint16_t)fp8core_cast_element(fp8core_float_bits(lost), FP8CORE_FP32, 1.0f, FP8CORE_BF16, 1.0f, 0, 0, 1).code;
      gathered.saturated += (uint32_t)result.saturated;
      gathered.flushed_to_zero += (uint32_t)result.flushed_to_zero;
      gathered.nonfinite += (uint32_t)result.nonfinite;
    }
  }
  if (job.statistics) fp8core_store_gathered(gathered, NULL, job.statistics);
}

dim3 grid_of(const fp8comm_feedback_job *job) {
  const int64_t per_block = (int64_t)threads * width, blocks = (job->count + per_block - 1) / per_block;
  return dim3((unsigned)(blocks < most_blocks ? blocks : most_blocks), 1, 1);
}

template <fp8core_dtype Source>
int launch_measure(const fp8comm_feedback_job *job, void *stream) {
  return fp8core_launch(measure_kernel<Source>, grid_of(job), dim3(threads, 1, 1), stream, *job);
}

template <fp8core_dtype Source>
int launch_cast(const fp8comm_feedback_job *job, void *stream) {
  const dim3 block(threads, 1, 1);
  return job->wire == FP8CORE_E4M3
           ? fp8core_launch(cast_kernel<Source, FP8CORE_E4M3>, grid_of(job), block, stream, *job)
           : fp8core_launch(cast_kernel<Source, FP8CORE_E5M2>, grid_of(job), block, stream, *job);
}

} // namespace

extern "C" int fp8comm_cuda_launch_feedback_measure(const fp8comm_feedback_job *job, void *stream) {
#define MEASURE(source_dtype) launch_measure<source_dtype>(job, stream)
  FP8CORE_DISPATCH_SOURCE(job->dtype, MEASURE);
#undef MEASURE
}

extern "C" int fp8comm_cuda_launch_feedback_cast(const fp8comm_feedback_job *job, void *stream) {
#define CAST(source_dtype) launch_cast<source_dtype>(job, stream)
  FP8CORE_DISPATCH_SOURCE(job->dtype, CAST);
#undef CAST
}
