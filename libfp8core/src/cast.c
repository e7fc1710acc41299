#include "fp8core/cast.h"

#include <stdint.h>

#include "internal.h"
#include "numerics.h"
#include "overlap.h"

static fp8core_status check_same_shape(const fp8core_tensor *source, const fp8core_tensor *destination) {
  if (destination->dimensions != source->dimensions)
    return fp8core_invalid("destination: dimensions is %d, expected the source's %d", destination->dimensions,
                           source->dimensions);
  for (int i = 0; i < source->dimensions; i++)
    if (destination->shape[i] != source->shape[i])
      return fp8core_invalid("destination: shape[%d] is %lld, expected the source's %lld", i,
                             (long long)destination->shape[i], (long long)source->shape[i]);
  return FP8CORE_OK;
}

static fp8core_status check_transposed(const fp8core_tensor *source, const fp8core_tensor *destination,
                                       const fp8core_tensor *transposed) {
  if (source->dimensions != 2)
    return fp8core_invalid("source: dimensions is %d, expected 2 for a transpose", source->dimensions);
  if (transposed->dimensions != 2)
    return fp8core_invalid("transposed: dimensions is %d, expected 2", transposed->dimensions);
  for (int i = 0; i < 2; i++)
    if (transposed->shape[i] != source->shape[1 - i])
      return fp8core_invalid("transposed: shape[%d] is %lld, expected the source's shape[%d], which is %lld", i,
                             (long long)transposed->shape[i], 1 - i, (long long)source->shape[1 - i]);
  if (!destination) return FP8CORE_OK;
  if (transposed->dtype != destination->dtype)
    return fp8core_invalid("transposed: dtype is %s, expected the destination's %s",
                           fp8core_dtype_name(transposed->dtype), fp8core_dtype_name(destination->dtype));
  if (transposed->scale != destination->scale)
    return fp8core_invalid("transposed.scale is %p, expected the destination's %p", (const void *)transposed->scale,
                           (const void *)destination->scale);
  if (transposed->scale_inverse != destination->scale_inverse)
    return fp8core_invalid("transposed.scale_inverse is %p, expected the destination's %p",
                           (const void *)transposed->scale_inverse, (const void *)destination->scale_inverse);
  if (transposed->amax && destination->amax && transposed->amax != destination->amax)
    return fp8core_invalid("transposed.amax is %p, expected NULL or the destination's %p", (void *)transposed->amax,
                           (void *)destination->amax);
  return FP8CORE_OK;
}

static fp8core_status check_disjoint(const char *name, const fp8core_tensor *one, const char *other_name,
                                     const fp8core_tensor *other) {
  fp8core_region regions[2];
  FP8CORE_TRY(fp8core_region_of(name, one, 1, 0, &regions[0]));
  FP8CORE_TRY(fp8core_region_of(other_name, other, 1, 0, &regions[1]));
  return fp8core_refuse_overlap(&regions[0], &regions[1]);
}

// What is written besides data must meet neither data nor what is read.
static fp8core_status check_scalars(const fp8core_tensor *source, const fp8core_tensor *destination,
                                    const fp8core_tensor *transposed, const fp8core_cast_statistics *statistics) {
  static const char *const names[3] = {"source", "destination", "transposed"};
  const fp8core_tensor *const tensors[3] = {source, destination, transposed};
  fp8core_region regions[3];
  const fp8core_region *data[3];
  fp8core_scalars scalars;
  int count = 0;
  scalars.count = 0;
  for (int i = 0; i < 3; i++) {
    if (!tensors[i]) continue;
    FP8CORE_TRY(fp8core_region_of(names[i], tensors[i], 1, 0, &regions[count]));
    regions[count].written = i > 0;
    data[count] = &regions[count];
    count++;
    fp8core_add_scalars_of(&scalars, names[i], tensors[i], i > 0);
  }
  fp8core_add_scalar(&scalars, "statistics", "", statistics, sizeof(*statistics), 1);
  return fp8core_check_scalars(&scalars, data, count);
}

static int is_contiguous(const fp8core_tensor *tensor) {
  return fp8core_row_count(tensor) == 1 || fp8core_row_stride(tensor) == fp8core_row_length(tensor);
}

static fp8core_status check_in_place(const fp8core_tensor *source, const fp8core_tensor *destination) {
  const int64_t source_bytes = (int64_t)fp8core_dtype_size(source->dtype);
  const int64_t destination_bytes = (int64_t)fp8core_dtype_size(destination->dtype);
  if (destination_bytes > source_bytes)
    return fp8core_invalid("destination at %p overlaps source, and in place its dtype %s is wider than the source's %s",
                           destination->data, fp8core_dtype_name(destination->dtype),
                           fp8core_dtype_name(source->dtype));
  if (is_contiguous(source) && is_contiguous(destination)) return FP8CORE_OK;
  const int64_t source_stride = fp8core_row_stride(source);
  const int64_t destination_stride = fp8core_row_stride(destination);
  const int64_t ratio = source_bytes / destination_bytes;
  if (destination_stride % ratio == 0 && destination_stride / ratio == source_stride) return FP8CORE_OK;
  return fp8core_invalid(
    "in place, the destination's rows start %lld elements of %s apart, the source's %lld of %s: expected "
    "contiguous tensors, or rows that start at the same bytes",
    (long long)destination_stride, fp8core_dtype_name(destination->dtype), (long long)source_stride,
    fp8core_dtype_name(source->dtype));
}

static fp8core_rows rows_of(const fp8core_tensor *tensor) {
  const fp8core_rows rows = {tensor->data,  tensor->dtype,         fp8core_row_stride(tensor),
                             tensor->scale, tensor->scale_inverse, tensor->amax};
  return rows;
}

fp8core_status fp8core_cast_prepare(fp8core_context *context, const fp8core_cast_options *options,
                                    const fp8core_tensor *source, const fp8core_tensor *destination,
                                    const fp8core_tensor *transposed, fp8core_cast_job *job, int *empty) {
  if (!context) return fp8core_invalid("context is NULL, expected a context");
  fp8core_cast_options known = fp8core_cast_options_default();
  FP8CORE_TRY(fp8core_read_options("fp8core_cast_options", &known, sizeof(known), options));
  if (known.rounding != FP8CORE_ROUND_NEAREST_EVEN && known.rounding != FP8CORE_ROUND_STOCHASTIC)
    return fp8core_invalid("rounding is %d, expected %d (nearest even) or %d (stochastic)", (int)known.rounding,
                           FP8CORE_ROUND_NEAREST_EVEN, FP8CORE_ROUND_STOCHASTIC);
  FP8CORE_TRY(fp8core_check_aligned("statistics", "", known.statistics, _Alignof(fp8core_cast_statistics)));
  FP8CORE_TRY(fp8core_check_tensor(context, "source", source));
  if (destination || !transposed) {
    FP8CORE_TRY(fp8core_check_tensor(context, "destination", destination));
    FP8CORE_TRY(check_same_shape(source, destination));
  }
  if (transposed) {
    FP8CORE_TRY(fp8core_check_tensor(context, "transposed", transposed));
    FP8CORE_TRY(check_transposed(source, destination, transposed));
  }
  job->rows = fp8core_row_count(source);
  job->columns = fp8core_row_length(source);
  const int64_t elements = job->rows * job->columns;
  if (known.first_element > UINT64_MAX - (uint64_t)elements)
    return fp8core_invalid("first_element is %llu, expected at most 2^64 - 1 less the %lld elements",
                           (unsigned long long)known.first_element, (long long)elements);
  *empty = elements == 0;
  if (*empty) return FP8CORE_OK;

  const int in_place = destination && !transposed && source->data == destination->data;
  if (in_place) {
    FP8CORE_TRY(check_in_place(source, destination));
  } else if (destination) {
    FP8CORE_TRY(check_disjoint("destination", destination, "source", source));
  }
  if (transposed) {
    FP8CORE_TRY(check_disjoint("transposed", transposed, "source", source));
    if (destination) FP8CORE_TRY(check_disjoint("transposed", transposed, "destination", destination));
  }

  FP8CORE_TRY(check_scalars(source, destination, transposed, known.statistics));

  const fp8core_rows nothing = {NULL, FP8CORE_FP32, 0, NULL, NULL, NULL};
  job->source = rows_of(source);
  job->destination = rows_of(destination ? destination : transposed);
  job->transposed = transposed ? rows_of(transposed) : nothing;
  if (!destination) job->destination.data = NULL;
  if (!job->destination.amax) job->destination.amax = job->transposed.amax;
  if (!transposed && is_contiguous(source) && is_contiguous(destination)) {
    job->rows = 1;
    job->columns = elements;
    job->source.stride = elements;
    job->destination.stride = elements;
  }
  job->in_place_narrowing = in_place && fp8core_dtype_size(destination->dtype) < fp8core_dtype_size(source->dtype);
  job->stochastic = known.rounding == FP8CORE_ROUND_STOCHASTIC;
  job->saturate = known.saturate != 0;
  job->tensor_id = known.tensor_id;
  job->step = known.step;
  job->first_element = known.first_element;
  job->seed = context->seed;
  job->statistics = known.statistics;
  return FP8CORE_OK;
}

fp8core_status fp8core_cast(fp8core_context *context, const fp8core_cast_options *options, const fp8core_tensor *source,
                            const fp8core_tensor *destination) {
  fp8core_cast_job job;
  int empty;
  FP8CORE_TRY(fp8core_cast_prepare(context, options, source, destination, NULL, &job, &empty));
  return empty ? FP8CORE_OK : context->backend->cast(context, &job);
}

fp8core_status fp8core_cast_transpose(fp8core_context *context, const fp8core_cast_options *options,
                                      const fp8core_tensor *source, const fp8core_tensor *destination,
                                      const fp8core_tensor *transposed) {
  fp8core_cast_job job;
  int empty;
  if (!transposed) return fp8core_invalid("transposed is NULL, expected a tensor");
  FP8CORE_TRY(fp8core_cast_prepare(context, options, source, destination, transposed, &job, &empty));
  return empty ? FP8CORE_OK : context->backend->cast(context, &job);
}

fp8core_status fp8core_amax(fp8core_context *context, const fp8core_tensor *source, float *amax) {
  if (!context) return fp8core_invalid("context is NULL, expected a context");
  FP8CORE_TRY(fp8core_check_tensor(context, "source", source));
  if (!amax) return fp8core_invalid("amax is NULL, expected one float on the context's device");
  FP8CORE_TRY(fp8core_check_aligned("amax", "", amax, sizeof(float)));
  int64_t rows = fp8core_row_count(source);
  int64_t columns = fp8core_row_length(source);
  if (rows * columns == 0) return FP8CORE_OK;
  fp8core_region region;
  const fp8core_region *const data = &region;
  fp8core_scalars scalars;
  scalars.count = 0;
  FP8CORE_TRY(fp8core_region_of("source", source, 1, 0, &region));
  fp8core_add_scalars_of(&scalars, "source", source, 0);
  fp8core_add_scalar(&scalars, "amax", "", amax, sizeof(*amax), 1);
  FP8CORE_TRY(fp8core_check_scalars(&scalars, &data, 1));
  fp8core_rows source_rows = rows_of(source);
  if (is_contiguous(source)) {
    columns *= rows;
    rows = 1;
    source_rows.stride = columns;
  }
  return context->backend->amax(context, rows, columns, &source_rows, amax);
}

void fp8core_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t draws[4]) {
  uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
  fp8core_philox_rounds(words, key[0], key[1]);
  for (int i = 0; i < 4; i++) draws[i] = words[i];
}
