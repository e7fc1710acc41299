#include <string.h>

#include "internal.h"
#include "kernels.h"

#if defined(_OPENMP)
#  include <omp.h>
#endif

// Below this many elements, starting threads costs more than it saves.
#define PARALLEL_ELEMENTS ((int64_t)1 << 15)

const fp8optim_kernels *fp8optim_cpu_kernels(fp8core_isa isa) {
#if defined(FP8OPTIM_HAVE_AVX512)
  if (isa >= FP8CORE_ISA_AVX512) return &fp8optim_kernels_avx512;
#endif
#if defined(FP8OPTIM_HAVE_AVX2)
  if (isa >= FP8CORE_ISA_AVX2) return &fp8optim_kernels_avx2;
#endif
  (void)isa;
  return &fp8optim_kernels_scalar;
}

// The gradient of a chunk as contiguous elements: in place, or gathered from its rows into `gathered`.
static const void *chunk_gradient(const fp8optim_tensor *tensor, const fp8optim_gradient *gradient,
                                  const fp8optim_chunk *chunk, unsigned char *gathered) {
  const int64_t size = (int64_t)fp8core_dtype_size(gradient->dtype);
  const unsigned char *data = gradient->data;
  if (gradient->row_stride == tensor->row_length) return data + chunk->first * size;
  int64_t row = chunk->first / tensor->row_length;
  int64_t column = chunk->first % tensor->row_length;
  for (int64_t i = 0; i < chunk->elements;) {
    const int64_t rest = tensor->row_length - column;
    const int64_t part = chunk->elements - i < rest ? chunk->elements - i : rest;
    memcpy(gathered + i * size, data + (row * gradient->row_stride + column) * size, (size_t)(part * size));
    i += part;
    column = 0;
    row++;
  }
  return gathered;
}

static void measure_chunk(const fp8optim_adamw *adamw, const fp8optim_kernels *kernels, int64_t index) {
  const fp8optim_tables *tables = &adamw->tables;
  const fp8optim_chunk *chunk = &tables->chunks[index];
  const fp8optim_gradient *gradient = &adamw->gradients[chunk->tensor];
  fp8optim_chunk_result *result = &tables->results[index];
  unsigned char gathered[FP8OPTIM_CHUNK * sizeof(float)];
  result->gradient_amax = 0;
  result->sum_squares =
    kernels->measure(gradient->dtype, chunk_gradient(&tables->tensors[chunk->tensor], gradient, chunk, gathered),
                     chunk->elements, &result->gradient_amax);
}

static void update_chunk(const fp8optim_adamw *adamw, const fp8optim_kernels *kernels, int64_t index) {
  const fp8optim_tables *tables = &adamw->tables;
  const fp8optim_chunk *chunk = &tables->chunks[index];
  const fp8optim_tensor *tensor = &tables->tensors[chunk->tensor];
  const fp8optim_gradient *gradient = &adamw->gradients[chunk->tensor];
  fp8optim_chunk_result *result = &tables->results[index];
  unsigned char gathered[FP8OPTIM_CHUNK * sizeof(float)];
  void *data[FP8OPTIM_PARTS];
  fp8optim_update_job job;
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    unsigned char *start = tensor->data[part];
    job.dtype[part] = tensor->dtype[part];
    data[part] = start ? start + chunk->first * (int64_t)fp8core_dtype_size(tensor->dtype[part]) : NULL;
  }
  job.gradient_dtype = gradient->dtype;
  job.constants = tables->constants[chunk->tensor];
  job.stochastic = adamw->options.stochastic_rounding;
  job.seed = adamw->options.seed;
  job.tensor_id = tensor->stream;
  job.step = (uint32_t)tables->progress->steps;
  memset(result->scaled_amax, 0, sizeof(result->scaled_amax));
  const int keeps = fp8optim_keeps_masters(&tables->group_steps[tensor->group]);
  unsigned char masters[FP8OPTIM_CHUNK * sizeof(float)];
  if (keeps) {
    memcpy(masters, data[FP8OPTIM_MASTER],
           (size_t)chunk->elements * fp8core_dtype_size(tensor->dtype[FP8OPTIM_MASTER]));
    data[FP8OPTIM_MASTER] = masters;
    data[FP8OPTIM_WEIGHT] = NULL;
  }
  kernels->update(&job, chunk_gradient(tensor, gradient, chunk, gathered), data, (uint64_t)chunk->first,
                  chunk->elements, result->scaled_amax);
  if (keeps)
    result->scaled_amax[FP8OPTIM_MASTER] =
      fp8core_float_bits(tensor->amax[FP8OPTIM_MASTER] * tensor->scale[FP8OPTIM_MASTER]);
}

static float scale_inverse_of(const fp8optim_gradient *gradient) {
  return gradient->scale_inverse ? *gradient->scale_inverse : 1.0f;
}

static int threads_for(const fp8optim_adamw *adamw, int64_t elements) {
  return elements < PARALLEL_ELEMENTS ? 1 : fp8core_context_threads(adamw->context);
}

typedef void (*chunk_function)(const fp8optim_adamw *adamw, const fp8optim_kernels *kernels, int64_t index);

// The chunks of tensors [first, first + count). They hold at most FP8OPTIM_CHUNK elements and are given out as threads
// ask, so that many small tensors and a few large ones balance alike.
static void for_chunks(const fp8optim_adamw *adamw, int64_t first, int64_t count, chunk_function function) {
  if (count == 0) return;
  const fp8optim_kernels *kernels = fp8optim_cpu_kernels(fp8core_context_isa(adamw->context));
  const fp8optim_tensor *tensors = adamw->tables.tensors;
  const int64_t begin = tensors[first].first_chunk;
  const int64_t end = tensors[first + count - 1].first_chunk + tensors[first + count - 1].chunks;
  int64_t elements = 0;
  for (int64_t i = first; i < first + count; i++) elements += tensors[i].elements;
  const int threads = threads_for(adamw, elements);
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel for schedule(dynamic, 8) num_threads(threads) if (threads > 1)
#endif
  for (int64_t index = begin; index < end; index++) function(adamw, kernels, index);
}

static void measure_tensors(fp8optim_adamw *adamw, double *squares, double *sum_squares, int *nonfinite) {
  const fp8optim_tables *tables = &adamw->tables;
  for_chunks(adamw, 0, adamw->tensor_count, measure_chunk);
  *sum_squares = 0.0;
  *nonfinite = 0;
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    double of_tensor = 0.0;
    fp8optim_gather_rule(&tables->tensors[i], tables->results, scale_inverse_of(&adamw->gradients[i]), &of_tensor,
                         nonfinite);
    *sum_squares += of_tensor;
    if (squares) squares[i] = of_tensor;
  }
}

static fp8core_status measure(fp8optim_adamw *adamw, double *squares, int *nonfinite) {
  double unused;
  measure_tensors(adamw, squares, &unused, nonfinite);
  return FP8CORE_OK;
}

static fp8core_status begin(fp8optim_adamw *adamw, double sum_squares, int nonfinite, float max_norm,
                            float loss_scale) {
  const fp8optim_tables *tables = &adamw->tables;
  fp8optim_begin_rule(tables->progress, sum_squares, nonfinite, max_norm, loss_scale);
  if (tables->progress->skipped) return FP8CORE_OK;
  for (int group = 0; group < adamw->group_count; group++)
    tables->group_steps[group] = fp8optim_group_rule(&adamw->groups[group], tables->progress->steps);
  for (int64_t i = 0; i < adamw->tensor_count; i++)
    fp8optim_plan_rule(&tables->tensors[i], &tables->group_steps[tables->tensors[i].group],
                       tables->progress->clip_factor, loss_scale, scale_inverse_of(&adamw->gradients[i]),
                       &tables->constants[i]);
  return FP8CORE_OK;
}

static fp8core_status update(fp8optim_adamw *adamw, int64_t first, int64_t count) {
  const fp8optim_tables *tables = &adamw->tables;
  for_chunks(adamw, first, count, update_chunk);
  for (int64_t i = first; i < first + count; i++) {
    fp8optim_tensor *tensor = &tables->tensors[i];
    uint32_t scaled_amax[FP8OPTIM_STATES] = {0, 0, 0};
    for (int64_t j = tensor->first_chunk; j < tensor->first_chunk + tensor->chunks; j++)
      for (int state = 0; state < FP8OPTIM_STATES; state++)
        if (tables->results[j].scaled_amax[state] > scaled_amax[state])
          scaled_amax[state] = tables->results[j].scaled_amax[state];
    fp8optim_end_rule(tensor, scaled_amax);
  }
  return FP8CORE_OK;
}

static fp8core_status step(fp8optim_adamw *adamw, float max_norm, float loss_scale) {
  double sum_squares;
  int nonfinite;
  measure_tensors(adamw, NULL, &sum_squares, &nonfinite);
  FP8OPTIM_TRY(begin(adamw, sum_squares, nonfinite, max_norm, loss_scale));
  return adamw->tables.progress->skipped ? FP8CORE_OK : update(adamw, 0, adamw->tensor_count);
}

static fp8core_status survey(fp8optim_adamw *adamw, const fp8optim_gradient *source, int64_t rows, int64_t columns,
                             fp8optim_survey *found) {
  const float scale_inverse = scale_inverse_of(source);
  const int64_t size = (int64_t)fp8core_dtype_size(source->dtype);
  const int threads = threads_for(adamw, rows * columns);
  uint32_t largest = 0;
  int negative = 0;
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(threads) reduction(max : largest) reduction(max : negative)
#endif
  for (int64_t i = 0; i < rows * columns; i++) {
    const unsigned char *data = (const unsigned char *)source->data + i / columns * source->row_stride * size;
    const float value = fp8optim_load(source->dtype, data, i % columns) * scale_inverse;
    const uint32_t magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
    if (magnitude > largest) largest = magnitude;
    if (value < 0.0f) negative = 1;
  }
  found->largest = largest;
  found->negative = negative;
  return FP8CORE_OK;
}

static fp8core_status set_state(fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                const fp8optim_gradient *source, float scale, uint32_t largest) {
  fp8optim_tensor *tensor = &adamw->tables.tensors[index];
  const float scale_inverse = scale_inverse_of(source);
  const int64_t size = (int64_t)fp8core_dtype_size(source->dtype);
  const int64_t columns = tensor->row_length;
  const unsigned char *data = source->data;
  const int threads = threads_for(adamw, tensor->elements);
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(threads)
#endif
  for (int64_t i = 0; i < tensor->elements; i++) {
    const float value =
      fp8optim_load(source->dtype, data + i / columns * source->row_stride * size, i % columns) * scale_inverse;
    fp8optim_store_code(tensor->dtype[state], tensor->data[state], i,
                        fp8optim_set_code(tensor->dtype[state], state, value, scale));
  }
  fp8optim_set_rule(tensor, state, scale, largest);
  return FP8CORE_OK;
}

static fp8core_status make_weight(fp8optim_adamw *adamw, int64_t index, int choose_scale) {
  fp8optim_tensor *tensor = &adamw->tables.tensors[index];
  if (choose_scale) fp8optim_weight_scale_rule(tensor);
  const float factor = fp8optim_weight_factor(tensor->scale[FP8OPTIM_MASTER], tensor->scale[FP8OPTIM_WEIGHT]);
  const int threads = threads_for(adamw, tensor->elements);
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(threads)
#endif
  for (int64_t i = 0; i < tensor->elements; i++) {
    const uint32_t master = fp8optim_load_code(tensor->dtype[FP8OPTIM_MASTER], tensor->data[FP8OPTIM_MASTER], i);
    fp8optim_store_code(tensor->dtype[FP8OPTIM_WEIGHT], tensor->data[FP8OPTIM_WEIGHT], i,
                        fp8optim_weight_code(tensor->dtype, master, factor));
  }
  return FP8CORE_OK;
}

const fp8optim_backend fp8optim_cpu_backend = {
  .step = step,
  .measure = measure,
  .begin = begin,
  .update = update,
  .survey = survey,
  .set_state = set_state,
  .make_weight = make_weight,
};
