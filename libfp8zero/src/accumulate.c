// Sums of the means of several micro-batches, in FP32, where they lie.
#include <stdlib.h>

#include "fp8core/cast.h"
#include "fp8core/gemm.h"
#include "internal.h"

// Elements at once: on the CPU they stay in its cache, a GPU wants few launches.
#define CHUNK 65536
#define GPU_CHUNK ((int64_t)1 << 20)

static fp8core_tensor row(const fp8zero_sharded *sharded, float *data, int64_t elements) {
  return fp8core_tensor_matrix(data, FP8CORE_FP32, 1, elements, sharded->device);
}

// sum += scratch on a GPU, as a product of the scratch with 1: exact but for the addition, which rounds once, so that
// the sum has the CPU's bits. It is work for the memory's bandwidth, whatever computes it.
static fp8core_status add_on_gpu(const fp8zero_sharded *sharded, float *sum, int64_t elements,
                                 fp8core_status (*product)(fp8core_context *, const fp8core_gemm_options *,
                                                           const fp8core_tensor *, const fp8core_tensor *,
                                                           const fp8core_tensor *, const fp8core_tensor *)) {
  const fp8core_tensor one = row(sharded, sharded->scratch + sharded->scratch_elements, 1);
  const fp8core_tensor added = row(sharded, sharded->scratch, elements);
  const fp8core_tensor total = row(sharded, sum, elements);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.beta = 1.0f;
  return product(sharded->context, &options, &one, &added, &total, &total);
}

static fp8core_status make_on_gpu(fp8zero_sharded *sharded, int64_t largest) {
  const float one = 1.0f;
  void *memory;
  sharded->scratch_elements = largest < GPU_CHUNK ? largest : GPU_CHUNK;
  const size_t bytes = ((size_t)sharded->scratch_elements + 1) * sizeof(float);
  FP8ZERO_TRY(fp8core_alloc(sharded->context, bytes, &memory));
  sharded->scratch = memory;
  sharded->memory.overhead_bytes += (int64_t)bytes;
  FP8ZERO_TRY(fp8core_copy(sharded->context, sharded->scratch + sharded->scratch_elements, &one, sizeof(one)));
  if (largest == 0) return FP8CORE_OK;
  // Steps allocate nothing.
  return add_on_gpu(sharded, (float *)(void *)sharded->sums, sharded->scratch_elements, fp8core_gemm_reserve);
}

fp8core_status fp8zero_make_scratch(fp8zero_sharded *sharded, int64_t largest) {
  if (fp8zero_on_gpu(sharded)) return make_on_gpu(sharded, largest);
  sharded->scratch_elements = CHUNK;
  sharded->scratch = calloc(CHUNK, sizeof(*sharded->scratch));
  if (!sharded->scratch)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory",
                                  CHUNK * sizeof(*sharded->scratch));
  sharded->memory.overhead_bytes += CHUNK * (int64_t)sizeof(*sharded->scratch);
  return FP8CORE_OK;
}

fp8core_status fp8zero_add_mean(const fp8zero_sharded *sharded, const fp8core_tensor *mean, int64_t elements,
                                float *sum, int first) {
  const int64_t size = (int64_t)fp8core_dtype_size(mean->dtype);
  fp8core_cast_options options = fp8core_cast_options_default();
  // Infinities are for the optimizer to find.
  options.saturate = 0;
  for (int64_t begin = 0; begin < elements; begin += sharded->scratch_elements) {
    const int64_t rest = elements - begin;
    const int64_t count = rest < sharded->scratch_elements ? rest : sharded->scratch_elements;
    const fp8core_tensor target = row(sharded, first ? sum + begin : sharded->scratch, count);
    fp8core_tensor source = target;
    source.dtype = mean->dtype;
    source.data = (unsigned char *)mean->data + begin * size;
    source.scale_inverse = mean->scale_inverse;
    FP8ZERO_TRY(fp8core_cast(sharded->context, &options, &source, &target));
    if (first) continue;
    if (fp8zero_on_gpu(sharded)) {
      FP8ZERO_TRY(add_on_gpu(sharded, sum + begin, count, fp8core_gemm));
      continue;
    }
    for (int64_t i = 0; i < count; i++) sum[begin + i] += sharded->scratch[i];
  }
  return FP8CORE_OK;
}

void fp8zero_free_scratch(fp8zero_sharded *sharded) {
  if (fp8zero_on_gpu(sharded))
    (void)fp8core_free(sharded->context, sharded->scratch);
  else
    free(sharded->scratch);
  sharded->scratch = NULL;
}
