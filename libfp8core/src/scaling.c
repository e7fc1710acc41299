// States of scales: argument checks, and the saved form. The arithmetic is in scaling_rules.h and the backends.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "numerics.h"
#include "overlap.h"

#define MARGIN_LIMIT 64
#define HISTORY_LIMIT 65536
#define ALIGNMENT 64

// Messages of NULLs begin with the name of the call: several have arguments of these names.
#define null_argument(name, expected) fp8core_invalid("%s: %s is NULL, expected %s", __func__, name, expected)
#define A_STATE "a state of fp8core_scaling_create()"

struct fp8core_scaling {
  fp8core_context *context;
  fp8core_scaling_options options;
  fp8core_scaling_arrays arrays;
  // What the arrays lie in, on the context's device. One block, so that a state goes to and from the host in one copy.
  void *memory;
  size_t memory_bytes;
  // On the device: the reciprocal of a source that is bound to the very scale that a cast replaces.
  float *source_inverse;
  // On the host, one byte a tensor.
  uint8_t *dtypes;
  // The host has seen that the tensor has a history, which it then keeps until its scale is set by hand: there is no
  // need to ask the device for a just-in-time pass any more.
  uint8_t *history_seen;
  // On the host: updates so far, and that count plus 1 as a tensor was first used without a history that was seen; 0:
  // not yet.
  uint64_t updates;
  uint64_t *first_use;
  // On the device: FP32 products on their way to FP8. Grows to what fp8core_scaling_gemm() needs, and stays.
  void *product;
  size_t product_bytes;
};

static fp8core_status check_options(const fp8core_scaling_options *options) {
  if (options->policy != FP8CORE_SCALING_JUST_IN_TIME && options->policy != FP8CORE_SCALING_DELAYED) {
    return fp8core_invalid("options.policy is %d, expected %d (just in time) or %d (delayed)", (int)options->policy,
                           FP8CORE_SCALING_JUST_IN_TIME, FP8CORE_SCALING_DELAYED);
  }
  if (options->history_length < 1 || options->history_length > HISTORY_LIMIT) {
    return fp8core_invalid("options.history_length is %d, expected 1 to %d", options->history_length, HISTORY_LIMIT);
  }
  if (options->amax_choice != FP8CORE_AMAX_MAXIMUM && options->amax_choice != FP8CORE_AMAX_MOST_RECENT) {
    return fp8core_invalid("options.amax_choice is %d, expected %d (maximum) or %d (most recent)",
                           (int)options->amax_choice, FP8CORE_AMAX_MAXIMUM, FP8CORE_AMAX_MOST_RECENT);
  }
  if (options->margin < -MARGIN_LIMIT || options->margin > MARGIN_LIMIT) {
    return fp8core_invalid("options.margin is %d, expected %d to %d", options->margin, -MARGIN_LIMIT, MARGIN_LIMIT);
  }
  return FP8CORE_OK;
}

// Floats of history that one tensor keeps.
static size_t history_entries(const fp8core_scaling_options *options) {
  return options->policy == FP8CORE_SCALING_DELAYED ? (size_t)options->history_length : 0;
}

// Gives every array its place behind `memory`, and returns the bytes that they take together. Does not overflow for a
// number of tensors that tensors_limit() allows. With NULL only the size is wanted.
static size_t place_arrays(unsigned char *memory, const fp8core_scaling_options *options, int64_t tensors,
                           fp8core_scaling_arrays *arrays, float **source_inverse) {
  size_t offset = 0;
#define PLACE(pointer, count)                                                                                          \
  do {                                                                                                                 \
    (pointer) = memory ? (void *)(memory + offset) : NULL;                                                             \
    offset += (sizeof(*(pointer)) * (size_t)(count) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;                          \
  } while (0)
  PLACE(arrays->history_steps, tensors);
  PLACE(arrays->nonfinite_steps, tensors);
  PLACE(arrays->scale, tensors);
  PLACE(arrays->scale_inverse, tensors);
  PLACE(arrays->amax, tensors);
  PLACE(arrays->measured, tensors);
  PLACE(*source_inverse, 1);
  PLACE(arrays->dtypes, tensors);
  PLACE(arrays->history, (size_t)tensors * history_entries(options));
#undef PLACE
  arrays->tensors = tensors;
  arrays->delayed = options->policy == FP8CORE_SCALING_DELAYED;
  arrays->history_length = options->history_length;
  arrays->most_recent = options->amax_choice == FP8CORE_AMAX_MOST_RECENT;
  arrays->margin = options->margin;
  arrays->power_of_two = options->power_of_two;
  return offset;
}

// The most tensors whose memory and saved form stay below 2^63 bytes (and what this machine can address).
static int64_t tensors_limit(const fp8core_scaling_options *options) {
  const uint64_t largest = SIZE_MAX < INT64_MAX ? SIZE_MAX : INT64_MAX;
  const uint64_t tensor_bytes = 64 + sizeof(float) * (uint64_t)history_entries(options);
  return (int64_t)((largest - 16 * ALIGNMENT) / tensor_bytes);
}

static fp8core_status out_of_memory(size_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for %zu bytes of a scaling state", bytes);
}

// Fills the state's host and device memory for the first time.
static fp8core_status fill_new(fp8core_scaling *scaling, const fp8core_dtype *dtypes) {
  const int64_t tensors = scaling->arrays.tensors;
  scaling->dtypes = malloc((size_t)tensors);
  scaling->history_seen = calloc((size_t)tensors, 1);
  scaling->first_use = calloc((size_t)tensors, sizeof(*scaling->first_use));
  unsigned char *image = calloc(scaling->memory_bytes, 1);
  fp8core_status status = FP8CORE_OK;
  if (!scaling->dtypes || !scaling->history_seen || !scaling->first_use || !image) {
    status = out_of_memory(scaling->memory_bytes + 10 * (size_t)tensors);
  }
  for (int64_t i = 0; status == FP8CORE_OK && i < tensors; i++) {
    if (!fp8core_dtype_size(dtypes[i])) {
      status =
        fp8core_invalid("dtypes[%" PRId64 "] is %d, expected 0 to %d", i, (int)dtypes[i], FP8CORE_DTYPE_COUNT - 1);
    } else {
      scaling->dtypes[i] = (uint8_t)dtypes[i];
    }
  }
  if (status == FP8CORE_OK) {
    fp8core_scaling_arrays arrays;
    float *source_inverse;
    place_arrays(image, &scaling->options, tensors, &arrays, &source_inverse);
    memcpy(arrays.dtypes, scaling->dtypes, (size_t)tensors);
    for (int64_t i = 0; i < tensors; i++) arrays.scale[i] = arrays.scale_inverse[i] = 1.0f;
    status = fp8core_copy(scaling->context, scaling->memory, image, scaling->memory_bytes);
  }
  free(image);
  return status;
}

fp8core_status fp8core_scaling_create(fp8core_scaling **scaling, fp8core_context *context, int64_t tensors,
                                      const fp8core_dtype *dtypes, const fp8core_scaling_options *options) {
  if (!scaling) return null_argument("scaling", "where to put the handle");
  *scaling = NULL;
  if (!context) return null_argument("context", "a context");
  if (!dtypes)
    return fp8core_invalid("%s: dtypes is NULL, expected one format for each of %" PRId64 " tensors", __func__,
                           tensors);
  fp8core_scaling_options read = fp8core_scaling_options_default();
  if (options) FP8CORE_TRY(fp8core_read_options("fp8core_scaling_options", &read, sizeof(read), options));
  FP8CORE_TRY(check_options(&read));
  read.power_of_two = read.power_of_two != 0;
  if (tensors < 1 || tensors > tensors_limit(&read)) {
    return fp8core_invalid("tensors is %" PRId64 ", expected 1 to %" PRId64 " (2^63 bytes of history)", tensors,
                           tensors_limit(&read));
  }
  fp8core_scaling *created = calloc(1, sizeof(*created));
  if (!created) return out_of_memory(sizeof(*created));
  created->context = context;
  created->options = read;
  created->memory_bytes = place_arrays(NULL, &read, tensors, &created->arrays, &created->source_inverse);
  fp8core_status status = fp8core_alloc(context, created->memory_bytes, &created->memory);
  if (status == FP8CORE_OK) {
    place_arrays(created->memory, &read, tensors, &created->arrays, &created->source_inverse);
    status = fill_new(created, dtypes);
  }
  if (status != FP8CORE_OK) {
    fp8core_scaling_destroy(&created);
    return status;
  }
  *scaling = created;
  return FP8CORE_OK;
}

void fp8core_scaling_destroy(fp8core_scaling **scaling) {
  if (!scaling || !*scaling) return;
  // Nobody is there to hear of a failure.
  (void)fp8core_free((*scaling)->context, (*scaling)->memory);
  (void)fp8core_free((*scaling)->context, (*scaling)->product);
  free((*scaling)->dtypes);
  free((*scaling)->history_seen);
  free((*scaling)->first_use);
  free(*scaling);
  *scaling = NULL;
}

int64_t fp8core_scaling_tensors(const fp8core_scaling *scaling) { return scaling ? scaling->arrays.tensors : 0; }

static fp8core_status check_index(const char *call, const fp8core_scaling *scaling, int64_t index) {
  if (!scaling) return fp8core_invalid("%s: scaling is NULL, expected " A_STATE, call);
  if (index < 0 || index >= scaling->arrays.tensors) {
    return fp8core_invalid("index is %" PRId64 ", expected 0 to %" PRId64, index, scaling->arrays.tensors - 1);
  }
  return FP8CORE_OK;
}

static void bind(const fp8core_scaling *scaling, int64_t index, const float *scale_inverse, fp8core_tensor *tensor) {
  tensor->scale = scaling->arrays.scale + index;
  tensor->scale_inverse = scale_inverse ? scale_inverse : scaling->arrays.scale_inverse + index;
  tensor->amax = scaling->arrays.amax + index;
}

static fp8core_status check_bindable(const fp8core_scaling *scaling, int64_t index, const char *name,
                                     const fp8core_tensor *tensor) {
  const fp8core_dtype dtype = (fp8core_dtype)scaling->dtypes[index];
  if (tensor->dtype != dtype) {
    return fp8core_invalid("%s.dtype is %d (%s), expected %s, which the state has for tensor %" PRId64, name,
                           (int)tensor->dtype, fp8core_dtype_name(tensor->dtype), fp8core_dtype_name(dtype), index);
  }
  const fp8core_device device = scaling->context->device;
  if (tensor->device.type != device.type || tensor->device.index != device.index) {
    return fp8core_invalid("%s.device is type %d, index %d, expected the state's, type %d, index %d", name,
                           (int)tensor->device.type, tensor->device.index, (int)device.type, device.index);
  }
  if (tensor->scale_granularity != FP8CORE_SCALE_PER_TENSOR) {
    return fp8core_invalid("%s.scale_granularity is %d, expected %d (one scale for the tensor)", name,
                           (int)tensor->scale_granularity, FP8CORE_SCALE_PER_TENSOR);
  }
  return FP8CORE_OK;
}

fp8core_status fp8core_scaling_bind(fp8core_scaling *scaling, int64_t index, fp8core_tensor *tensor) {
  FP8CORE_TRY(check_index(__func__, scaling, index));
  if (!tensor) return null_argument("tensor", "a tensor to bind");
  FP8CORE_TRY(check_bindable(scaling, index, "tensor", tensor));
  bind(scaling, index, NULL, tensor);
  return FP8CORE_OK;
}

static void note_use(fp8core_scaling *scaling, int64_t index) {
  if (!scaling->first_use[index]) scaling->first_use[index] = scaling->updates + 1;
}

// Whether the reciprocal that a call gives out meets the state or what the call reads. Against what it writes it has
// been checked as the result's own scale_inverse.
static fp8core_status check_apart(const fp8core_scaling *scaling, int64_t index, const float *scale_inverse,
                                  const char *name, const fp8core_tensor *read, int64_t batch, int64_t batch_stride) {
  fp8core_scalars scalars;
  fp8core_region data;
  if (!scale_inverse || !read->data) return FP8CORE_OK;
  scalars.count = 0;
  FP8CORE_TRY(fp8core_region_of(name, read, batch, batch_stride, &data));
  fp8core_add_scalar(&scalars, "scale_inverse", "", scale_inverse, sizeof(float), 1);
  FP8CORE_TRY(fp8core_refuse_overlap(&scalars.regions[0], &data));
  if (scale_inverse == scaling->arrays.scale_inverse + index) return FP8CORE_OK;
  fp8core_add_scalar(&scalars, "the scaling state", "", scaling->memory, scaling->memory_bytes, 0);
  return fp8core_refuse_overlap(&scalars.regions[0], &scalars.regions[1]);
}

// `destination` or `transposed` may be NULL, not both. Nothing changes before every argument has been checked.
static fp8core_status scaled_cast(fp8core_scaling *scaling, int64_t index, const fp8core_cast_options *options,
                                  const fp8core_tensor *source, fp8core_tensor *destination, fp8core_tensor *transposed,
                                  float *scale_inverse) {
  fp8core_context *const context = scaling->context;
  const fp8core_scaling_arrays *const arrays = &scaling->arrays;
  FP8CORE_TRY(fp8core_check_aligned("scale_inverse", "", scale_inverse, sizeof(float)));
  fp8core_tensor bound = {0};
  fp8core_tensor bound_transposed = {0};
  if (destination) {
    FP8CORE_TRY(check_bindable(scaling, index, "destination", destination));
    bound = *destination;
    bind(scaling, index, scale_inverse, &bound);
  }
  if (transposed) {
    FP8CORE_TRY(check_bindable(scaling, index, "transposed", transposed));
    bound_transposed = *transposed;
    bind(scaling, index, scale_inverse, &bound_transposed);
  }
  fp8core_cast_job job;
  int empty = 0;
  FP8CORE_TRY(fp8core_cast_prepare(context, options, source, destination ? &bound : NULL,
                                   transposed ? &bound_transposed : NULL, &job, &empty));
  FP8CORE_TRY(check_apart(scaling, index, scale_inverse, "source", source, 1, 0));
  if (!empty) {
    const int delayed = arrays->delayed;
    if (!delayed || !scaling->history_seen[index]) {
      // A source under the very scale that is about to change (re-quantising) is still read with the old one.
      if (job.source.scale_inverse == arrays->scale_inverse + index) {
        FP8CORE_TRY(context->backend->copy_float(context, scaling->source_inverse, job.source.scale_inverse));
        job.source.scale_inverse = scaling->source_inverse;
      }
      FP8CORE_TRY(
        context->backend->scaling_calibrate(context, arrays, index, delayed, job.rows, job.columns, &job.source));
    }
    FP8CORE_TRY(context->backend->cast(context, &job));
    note_use(scaling, index);
  }
  // After the cast, whose source may be read with what this overwrites.
  if (scale_inverse) {
    FP8CORE_TRY(context->backend->copy_float(context, scale_inverse, arrays->scale_inverse + index));
  }
  if (destination) *destination = bound;
  if (transposed) *transposed = bound_transposed;
  return FP8CORE_OK;
}

fp8core_status fp8core_scaling_cast(fp8core_scaling *scaling, int64_t index, const fp8core_cast_options *options,
                                    const fp8core_tensor *source, fp8core_tensor *destination, float *scale_inverse) {
  FP8CORE_TRY(check_index(__func__, scaling, index));
  if (!destination) return null_argument("destination", "a tensor to write");
  return scaled_cast(scaling, index, options, source, destination, NULL, scale_inverse);
}

fp8core_status fp8core_scaling_cast_transpose(fp8core_scaling *scaling, int64_t index,
                                              const fp8core_cast_options *options, const fp8core_tensor *source,
                                              fp8core_tensor *destination, fp8core_tensor *transposed,
                                              float *scale_inverse) {
  FP8CORE_TRY(check_index(__func__, scaling, index));
  if (!transposed) return null_argument("transposed", "a tensor to write");
  return scaled_cast(scaling, index, options, source, destination, transposed, scale_inverse);
}

// Whether a product may be stored under the scale that is there. On the CPU the history is there to be looked at. On
// CUDA the host does not wait for it: a step that ended after the first use is taken to have left one.
static int has_scale_of_history(const fp8core_scaling *scaling, int64_t index) {
  if (!scaling->arrays.delayed) return 0;
  if (scaling->history_seen[index]) return 1;
  if (scaling->context->device.type == FP8CORE_DEVICE_CPU) return scaling->arrays.history_steps[index] > 0;
  return scaling->first_use[index] && scaling->updates >= scaling->first_use[index];
}

static fp8core_status grow_product(fp8core_scaling *scaling, const fp8core_gemm_job *job) {
  fp8core_context *const context = scaling->context;
  int64_t bytes;
  if (__builtin_mul_overflow(job->m, job->n, &bytes) || __builtin_mul_overflow(bytes, job->options.batch, &bytes) ||
      __builtin_mul_overflow(bytes, (int64_t)sizeof(float), &bytes)) {
    return out_of_memory(SIZE_MAX);
  }
  if ((size_t)bytes <= scaling->product_bytes) return FP8CORE_OK;
  if (scaling->product) FP8CORE_TRY(context->backend->free(context, scaling->product));
  scaling->product = NULL;
  scaling->product_bytes = 0;
  FP8CORE_TRY(context->backend->alloc(context, (size_t)bytes, &scaling->product));
  scaling->product_bytes = (size_t)bytes;
  return FP8CORE_OK;
}

// The product in FP32, its amax, the scale from that where there is no history, and the cast: as fp8core_gemm() and
// fp8core_scaling_cast() one after the other. `d` is the bound D, `job` the product into it.
static fp8core_status measured_product(fp8core_scaling *scaling, int64_t index, const fp8core_tensor *d,
                                       fp8core_gemm_job *job) {
  fp8core_context *const context = scaling->context;
  const fp8core_scaling_arrays *const arrays = &scaling->arrays;
  const int64_t batch = job->options.batch;
  const int64_t stride = job->d.row_stride;
  const int64_t apart = job->options.batch_stride_d;
  // The matrices of a batch lie one below the other, side by side, or anyhow, and are cast accordingly.
  const int below = batch == 1 || (apart % job->m == 0 && apart / job->m == stride);
  const int beside = !below && apart == job->n && batch <= stride / job->n;
  const int64_t casts = below || beside ? 1 : batch;
  const int64_t rows = below ? batch * job->m : job->m;
  const int64_t columns = beside ? batch * job->n : job->n;
  FP8CORE_TRY(grow_product(scaling, job));
  fp8core_tensor product = fp8core_tensor_matrix(scaling->product, FP8CORE_FP32, rows, columns, context->device);
  fp8core_tensor target = *d;
  target.shape[0] = rows;
  target.shape[1] = columns;
  target.row_stride = stride;
  // As products are stored: FP8 saturates, what is wider shows an overflow.
  fp8core_cast_options options = fp8core_cast_options_default();
  options.saturate = target.dtype == FP8CORE_E4M3 || target.dtype == FP8CORE_E5M2;
  fp8core_cast_job cast;
  int empty;
  FP8CORE_TRY(fp8core_cast_prepare(context, &options, &product, &target, NULL, &cast, &empty));
  product.shape[0] = job->m;
  product.shape[1] = job->n;
  product.row_stride = columns;
  job->d = product;
  job->options.batch_stride_d = beside ? job->n : job->m * job->n;
  FP8CORE_TRY(context->backend->gemm(context, job));
  const int64_t elements = batch * job->m * job->n;
  const fp8core_rows all = {scaling->product, FP8CORE_FP32, elements, NULL, NULL, NULL};
  FP8CORE_TRY(context->backend->scaling_calibrate(context, arrays, index, arrays->delayed, 1, elements, &all));
  for (int64_t i = 0; i < casts; i++) {
    cast.source.data = (float *)scaling->product + i * job->m * job->n;
    cast.destination.data = (unsigned char *)d->data + i * apart * (int64_t)fp8core_dtype_size(d->dtype);
    FP8CORE_TRY(context->backend->cast(context, &cast));
  }
  return FP8CORE_OK;
}

// Validates the arguments of a product under the scale of tensor `index`: D as it will be bound, and the job into it.
static fp8core_status prepare_product(fp8core_scaling *scaling, int64_t index, const fp8core_gemm_options *options,
                                      const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                      const fp8core_tensor *d, float *scale_inverse, fp8core_tensor *bound,
                                      fp8core_gemm_job *job, int *empty) {
  if (!d) return null_argument("d", "a tensor to write");
  FP8CORE_TRY(fp8core_check_aligned("scale_inverse", "", scale_inverse, sizeof(float)));
  FP8CORE_TRY(check_bindable(scaling, index, "d", d));
  *bound = *d;
  bind(scaling, index, scale_inverse, bound);
  FP8CORE_TRY(fp8core_gemm_prepare(scaling->context, options, a, b, c, bound, job, empty));
  const int64_t batch = job->options.batch;
  FP8CORE_TRY(check_apart(scaling, index, scale_inverse, "A", &job->a, batch, job->options.batch_stride_a));
  FP8CORE_TRY(check_apart(scaling, index, scale_inverse, "B", &job->b, batch, job->options.batch_stride_b));
  FP8CORE_TRY(check_apart(scaling, index, scale_inverse, "C", &job->c, batch, job->options.batch_stride_c));
  FP8CORE_TRY(check_apart(scaling, index, scale_inverse, "bias", &job->bias, 1, 0));
  return check_apart(scaling, index, scale_inverse, "auxiliary", &job->auxiliary, 1, 0);
}

fp8core_status fp8core_scaling_gemm(fp8core_scaling *scaling, int64_t index, const fp8core_gemm_options *options,
                                    const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                    fp8core_tensor *d, float *scale_inverse) {
  fp8core_tensor bound;
  fp8core_gemm_job job;
  int empty;
  FP8CORE_TRY(check_index(__func__, scaling, index));
  FP8CORE_TRY(prepare_product(scaling, index, options, a, b, c, d, scale_inverse, &bound, &job, &empty));
  fp8core_context *const context = scaling->context;
  if (empty || has_scale_of_history(scaling, index)) {
    FP8CORE_TRY(fp8core_gemm(context, options, a, b, c, &bound));
  } else {
    FP8CORE_TRY(measured_product(scaling, index, &bound, &job));
  }
  if (!empty) note_use(scaling, index);
  // After the product, whose operands may be read with what this overwrites.
  if (scale_inverse) {
    FP8CORE_TRY(context->backend->copy_float(context, scale_inverse, scaling->arrays.scale_inverse + index));
  }
  *d = bound;
  return FP8CORE_OK;
}

fp8core_status fp8core_scaling_gemm_reserve(fp8core_scaling *scaling, int64_t index,
                                            const fp8core_gemm_options *options, const fp8core_tensor *a,
                                            const fp8core_tensor *b, const fp8core_tensor *c, const fp8core_tensor *d) {
  fp8core_tensor bound;
  fp8core_gemm_job job;
  int empty;
  FP8CORE_TRY(check_index(__func__, scaling, index));
  FP8CORE_TRY(prepare_product(scaling, index, options, a, b, c, d, NULL, &bound, &job, &empty));
  if (empty) return FP8CORE_OK;
  fp8core_context *const context = scaling->context;
  // At once, with a history, and by way of FP32, without.
  if (scaling->arrays.delayed) FP8CORE_TRY(fp8core_reserve_product(context, &job));
  context->reserving = 1;
  const fp8core_status status = measured_product(scaling, index, &bound, &job);
  context->reserving = 0;
  return status == FP8CORE_RESERVED ? FP8CORE_OK : status;
}

fp8core_status fp8core_scaling_update(fp8core_scaling *scaling) {
  if (!scaling) return null_argument("scaling", A_STATE);
  FP8CORE_TRY(scaling->context->backend->scaling_update(scaling->context, &scaling->arrays));
  scaling->updates++;
  return FP8CORE_OK;
}

float *fp8core_scaling_amaxes(fp8core_scaling *scaling) { return scaling ? scaling->arrays.amax : NULL; }

fp8core_status fp8core_scaling_get(fp8core_scaling *scaling, int64_t index, fp8core_scaling_record *record) {
  FP8CORE_TRY(check_index(__func__, scaling, index));
  if (!record) return null_argument("record", "where to put the record");
  const fp8core_scaling_arrays *const arrays = &scaling->arrays;
  fp8core_context *const context = scaling->context;
  fp8core_scaling_record read;
  uint64_t steps;
  read.dtype = (fp8core_dtype)scaling->dtypes[index];
  FP8CORE_TRY(fp8core_copy(context, &read.scale, arrays->scale + index, sizeof(float)));
  FP8CORE_TRY(fp8core_copy(context, &read.scale_inverse, arrays->scale_inverse + index, sizeof(float)));
  FP8CORE_TRY(fp8core_copy(context, &read.amax, arrays->amax + index, sizeof(float)));
  FP8CORE_TRY(fp8core_copy(context, &steps, arrays->history_steps + index, sizeof(steps)));
  FP8CORE_TRY(fp8core_copy(context, &read.nonfinite_steps, arrays->nonfinite_steps + index, sizeof(uint64_t)));
  read.history_steps = steps < (uint64_t)arrays->history_length ? (int64_t)steps : arrays->history_length;
  scaling->history_seen[index] = steps > 0;
  *record = read;
  return FP8CORE_OK;
}

// Whether both the scale and its reciprocal are normal numbers. Also false for a NaN.
static int scale_in_range(float scale) { return scale >= FP8CORE_SCALE_MIN && scale <= FP8CORE_SCALE_MAX; }

fp8core_status fp8core_scaling_set_scale(fp8core_scaling *scaling, int64_t index, float scale) {
  FP8CORE_TRY(check_index(__func__, scaling, index));
  if (!scale_in_range(scale)) {
    return fp8core_invalid("scale is %g, expected %g to %g", (double)scale, (double)FP8CORE_SCALE_MIN,
                           (double)FP8CORE_SCALE_MAX);
  }
  const fp8core_scaling_arrays *const arrays = &scaling->arrays;
  fp8core_context *const context = scaling->context;
  const float inverse = 1.0f / scale;
  const size_t history_bytes = history_entries(&scaling->options) * sizeof(float);
  scaling->history_seen[index] = 0;
  scaling->first_use[index] = 0;
  FP8CORE_TRY(fp8core_copy(context, arrays->scale + index, &scale, sizeof(scale)));
  FP8CORE_TRY(fp8core_copy(context, arrays->scale_inverse + index, &inverse, sizeof(inverse)));
  FP8CORE_TRY(fp8core_zero(context, arrays->amax + index, sizeof(float)));
  FP8CORE_TRY(fp8core_zero(context, arrays->history_steps + index, sizeof(uint64_t)));
  if (history_bytes) {
    FP8CORE_TRY(fp8core_zero(context, arrays->history + index * arrays->history_length, history_bytes));
  }
  return FP8CORE_OK;
}

// The saved form, all little-endian:
//   header   8 bytes of magic, u32 version, u32 policy, u64 tensors, u32 history_length, u32 amax_choice, i32 margin,
//            u32 power_of_two
//   tensors  u32 dtype, f32 scale, f32 amax, u32 zero, u64 history_steps, u64 nonfinite_steps, and with delayed scaling
//            f32[history_length], a ring whose next entry is history_steps modulo history_length, unused entries zero;
//            of a full ring history_steps is less than twice its length
//   end      u32 CRC-32 of all before
// The reciprocals are not in it: they follow from the scales, and what is not stored cannot be stale.
#define MAGIC "FP8SCALE"
#define FORMAT_VERSION 1
#define HEADER_BYTES 40
#define TENSOR_BYTES 32
#define CHECKSUM_BYTES 4

static void put_u32(unsigned char *bytes, uint32_t value) {
  for (int i = 0; i < 4; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

static void put_u64(unsigned char *bytes, uint64_t value) {
  put_u32(bytes, (uint32_t)value);
  put_u32(bytes + 4, (uint32_t)(value >> 32));
}

static uint32_t get_u32(const unsigned char *bytes) {
  return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint64_t get_u64(const unsigned char *bytes) { return get_u32(bytes) | (uint64_t)get_u32(bytes + 4) << 32; }

static float get_float(const unsigned char *bytes) { return fp8core_bits_float(get_u32(bytes)); }

// CRC-32 of ISO 3309 and ITU-T V.42 (polynomial 0x04C11DB7, reflected), the one of zlib and PNG.
static uint32_t crc32_of(const unsigned char *bytes, size_t count) {
  uint32_t table[256];
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t remainder = i;
    for (int bit = 0; bit < 8; bit++) remainder = remainder >> 1 ^ (remainder & 1 ? UINT32_C(0xEDB88320) : 0);
    table[i] = remainder;
  }
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < count; i++) crc = crc >> 8 ^ table[(crc ^ bytes[i]) & 0xff];
  return ~crc;
}

// Of options and a number of tensors that have been checked.
static size_t saved_bytes(const fp8core_scaling_options *options, int64_t tensors) {
  return HEADER_BYTES + (size_t)tensors * (TENSOR_BYTES + sizeof(float) * history_entries(options)) + CHECKSUM_BYTES;
}

size_t fp8core_scaling_memory_bytes(const fp8core_scaling *scaling) {
  return scaling ? scaling->memory_bytes + scaling->product_bytes : 0;
}

size_t fp8core_scaling_saved_bytes(const fp8core_scaling *scaling) {
  return scaling ? saved_bytes(&scaling->options, scaling->arrays.tensors) : 0;
}

fp8core_status fp8core_scaling_save(fp8core_scaling *scaling, void *buffer, size_t bytes) {
  if (!scaling) return null_argument("scaling", A_STATE);
  if (!buffer) return null_argument("buffer", "where to put the saved form");
  const size_t expected = fp8core_scaling_saved_bytes(scaling);
  if (bytes != expected)
    return fp8core_invalid("bytes is %zu, expected %zu, as fp8core_scaling_saved_bytes() says", bytes, expected);
  const int64_t tensors = scaling->arrays.tensors;
  unsigned char *image = malloc(scaling->memory_bytes);
  if (!image) return out_of_memory(scaling->memory_bytes);
  const fp8core_status status = fp8core_copy(scaling->context, image, scaling->memory, scaling->memory_bytes);
  if (status != FP8CORE_OK) {
    free(image);
    return status;
  }
  fp8core_scaling_arrays arrays;
  float *source_inverse;
  place_arrays(image, &scaling->options, tensors, &arrays, &source_inverse);
  const size_t entries = history_entries(&scaling->options);
  unsigned char *out = buffer;
  memcpy(out, MAGIC, 8);
  put_u32(out + 8, FORMAT_VERSION);
  put_u32(out + 12, (uint32_t)scaling->options.policy);
  put_u64(out + 16, (uint64_t)tensors);
  put_u32(out + 24, (uint32_t)scaling->options.history_length);
  put_u32(out + 28, (uint32_t)scaling->options.amax_choice);
  put_u32(out + 32, (uint32_t)scaling->options.margin);
  put_u32(out + 36, (uint32_t)scaling->options.power_of_two);
  out += HEADER_BYTES;
  for (int64_t i = 0; i < tensors; i++) {
    const uint64_t steps = arrays.history_steps[i];
    put_u32(out, arrays.dtypes[i]);
    put_u32(out + 4, fp8core_float_bits(arrays.scale[i]));
    // A negative one, which only the caller can have written, counts as 0.
    put_u32(out + 8, arrays.amax[i] < 0.0f ? 0 : fp8core_float_bits(arrays.amax[i]));
    put_u32(out + 12, 0);
    put_u64(out + 16, steps < entries ? steps : entries ? entries + steps % entries : 0);
    put_u64(out + 24, arrays.nonfinite_steps[i]);
    out += TENSOR_BYTES;
    for (size_t j = 0; j < entries; j++, out += 4)
      put_u32(out, fp8core_float_bits(arrays.history[(size_t)i * entries + j]));
    scaling->history_seen[i] = steps > 0;
  }
  put_u32(out, crc32_of(buffer, bytes - CHECKSUM_BYTES));
  free(image);
  return FP8CORE_OK;
}

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

// Reads and checks everything but the tensors' records, and that the bytes are whole.
static fp8core_status read_header(const unsigned char *in, size_t bytes, fp8core_scaling_options *options,
                                  int64_t *tensors) {
  if (bytes < HEADER_BYTES + CHECKSUM_BYTES) {
    return corrupt("a saved scaling state of %zu bytes, expected at least %d", bytes, HEADER_BYTES + CHECKSUM_BYTES);
  }
  if (memcmp(in, MAGIC, 8) != 0) {
    return corrupt("the saved scaling state begins with %02x %02x %02x %02x, expected \"" MAGIC "\"", in[0], in[1],
                   in[2], in[3]);
  }
  if (get_u32(in + 8) != FORMAT_VERSION) {
    return corrupt("the saved scaling state has version %" PRIu32 ", expected %d", get_u32(in + 8), FORMAT_VERSION);
  }
  const uint32_t policy = get_u32(in + 12);
  const uint64_t count = get_u64(in + 16);
  const uint32_t length = get_u32(in + 24);
  const uint32_t choice = get_u32(in + 28);
  const uint32_t margin_bits = get_u32(in + 32);
  const uint32_t power_of_two = get_u32(in + 36);
  if (policy > FP8CORE_SCALING_DELAYED) return corrupt("saved policy %" PRIu32 ", expected 0 or 1", policy);
  if (length < 1 || length > HISTORY_LIMIT) {
    return corrupt("saved history_length %" PRIu32 ", expected 1 to %d", length, HISTORY_LIMIT);
  }
  if (choice > FP8CORE_AMAX_MOST_RECENT) return corrupt("saved amax_choice %" PRIu32 ", expected 0 or 1", choice);
  // Two's complement, so that the offset makes the range contiguous from 0.
  if (margin_bits + MARGIN_LIMIT > 2 * MARGIN_LIMIT) {
    return corrupt("saved margin %" PRIu32 " (unsigned), expected -%d to %d", margin_bits, MARGIN_LIMIT, MARGIN_LIMIT);
  }
  if (power_of_two > 1) return corrupt("saved power_of_two %" PRIu32 ", expected 0 or 1", power_of_two);
  *options = fp8core_scaling_options_default();
  options->policy = (fp8core_scaling_policy)policy;
  options->history_length = (int)length;
  options->amax_choice = (fp8core_amax_choice)choice;
  options->margin = (int)(margin_bits + MARGIN_LIMIT) - MARGIN_LIMIT;
  options->power_of_two = (int)power_of_two;
  if (count < 1 || count > (uint64_t)tensors_limit(options)) {
    return corrupt("%" PRIu64 " saved tensors, expected 1 to %" PRId64, count, tensors_limit(options));
  }
  *tensors = (int64_t)count;
  const size_t expected = saved_bytes(options, *tensors);
  if (bytes != expected) {
    return corrupt("a saved scaling state of %zu bytes, expected %zu for its %" PRIu64 " tensors", bytes, expected,
                   count);
  }
  const uint32_t stored = get_u32(in + bytes - CHECKSUM_BYTES);
  const uint32_t computed = crc32_of(in, bytes - CHECKSUM_BYTES);
  if (stored != computed) {
    return corrupt("the saved scaling state has the checksum %08" PRIx32 ", expected %08" PRIx32 " of its bytes",
                   stored, computed);
  }
  return FP8CORE_OK;
}

static fp8core_status check_same(const fp8core_scaling *scaling, const fp8core_scaling_options *saved,
                                 int64_t tensors) {
  const fp8core_scaling_options *const own = &scaling->options;
  if (tensors != scaling->arrays.tensors) {
    return fp8core_invalid("%" PRId64 " saved tensors, expected the state's %" PRId64, tensors,
                           scaling->arrays.tensors);
  }
  if (saved->policy != own->policy) {
    return fp8core_invalid("saved policy %d, expected the state's %d", (int)saved->policy, (int)own->policy);
  }
  if (saved->history_length != own->history_length) {
    return fp8core_invalid("saved history_length %d, expected the state's %d", saved->history_length,
                           own->history_length);
  }
  if (saved->amax_choice != own->amax_choice) {
    return fp8core_invalid("saved amax_choice %d, expected the state's %d", (int)saved->amax_choice,
                           (int)own->amax_choice);
  }
  if (saved->margin != own->margin)
    return fp8core_invalid("saved margin %d, expected the state's %d", saved->margin, own->margin);
  if (saved->power_of_two != own->power_of_two) {
    return fp8core_invalid("saved power_of_two %d, expected the state's %d", saved->power_of_two, own->power_of_two);
  }
  return FP8CORE_OK;
}

// Reads the record of tensor `index` into `arrays`, which lie in host memory full of zeros. The checksum only guards
// against damage, so every field is checked; only a count of steps that were not finite may be any number.
static fp8core_status read_tensor(const unsigned char *in, int64_t index, uint8_t own_dtype,
                                  const fp8core_scaling_options *options, const fp8core_scaling_arrays *arrays) {
  const uint32_t dtype = get_u32(in);
  const float scale = get_float(in + 4);
  const uint64_t steps = get_u64(in + 16);
  if (dtype >= FP8CORE_DTYPE_COUNT) {
    return corrupt("saved tensor %" PRId64 " has dtype %" PRIu32 ", expected 0 to %d", index, dtype,
                   FP8CORE_DTYPE_COUNT - 1);
  }
  if (dtype != own_dtype) {
    return fp8core_invalid("saved tensor %" PRId64 " is %s, expected the state's %s", index,
                           fp8core_dtype_name((fp8core_dtype)dtype), fp8core_dtype_name((fp8core_dtype)own_dtype));
  }
  if (!scale_in_range(scale)) {
    return corrupt("saved tensor %" PRId64 " has scale %g, expected %g to %g", index, (double)scale,
                   (double)FP8CORE_SCALE_MIN, (double)FP8CORE_SCALE_MAX);
  }
  if (get_float(in + 8) < 0.0f) {
    return corrupt("saved tensor %" PRId64 " has amax %g, expected 0 or more, infinity or NaN", index,
                   (double)get_float(in + 8));
  }
  if (get_u32(in + 12) != 0) {
    return corrupt("saved tensor %" PRId64 " has %" PRIu32 " in its unused field, expected 0", index, get_u32(in + 12));
  }
  const size_t entries = history_entries(options);
  if (steps > 0 && steps >= 2 * entries) {
    return corrupt("saved tensor %" PRId64 " has %" PRIu64 " steps of history, expected at most %zu", index, steps,
                   entries ? 2 * entries - 1 : 0);
  }
  in += TENSOR_BYTES;
  for (size_t i = 0; i < entries; i++, in += 4) {
    const float amax = get_float(in);
    const int used = i < steps;
    if (used ? !(amax > 0.0f && get_u32(in) < FP8CORE_F32_INFINITY) : get_u32(in) != 0) {
      return corrupt("saved tensor %" PRId64 " has %g as amax %zu of %" PRIu64 ", expected %s", index, (double)amax, i,
                     steps, used ? "a finite value above 0" : "0 beyond the last");
    }
    arrays->history[(size_t)index * entries + i] = amax;
  }
  in -= TENSOR_BYTES + 4 * entries;
  arrays->dtypes[index] = (uint8_t)dtype;
  arrays->scale[index] = scale;
  arrays->scale_inverse[index] = 1.0f / scale;
  arrays->amax[index] = get_float(in + 8);
  arrays->history_steps[index] = steps;
  arrays->nonfinite_steps[index] = get_u64(in + 24);
  return FP8CORE_OK;
}

fp8core_status fp8core_scaling_load(fp8core_scaling *scaling, const void *buffer, size_t bytes) {
  if (!scaling) return null_argument("scaling", A_STATE);
  if (!buffer) return null_argument("buffer", "a saved form");
  fp8core_scaling_options options = fp8core_scaling_options_default();
  int64_t tensors = 0;
  FP8CORE_TRY(read_header(buffer, bytes, &options, &tensors));
  FP8CORE_TRY(check_same(scaling, &options, tensors));
  unsigned char *image = calloc(scaling->memory_bytes, 1);
  if (!image) return out_of_memory(scaling->memory_bytes);
  fp8core_scaling_arrays arrays;
  float *source_inverse;
  place_arrays(image, &scaling->options, tensors, &arrays, &source_inverse);
  const unsigned char *const records = (const unsigned char *)buffer + HEADER_BYTES;
  const size_t stride = TENSOR_BYTES + sizeof(float) * history_entries(&options);
  fp8core_status status = FP8CORE_OK;
  for (int64_t i = 0; status == FP8CORE_OK && i < tensors; i++) {
    status = read_tensor(records + (size_t)i * stride, i, scaling->dtypes[i], &scaling->options, &arrays);
  }
  if (status == FP8CORE_OK) status = fp8core_copy(scaling->context, scaling->memory, image, scaling->memory_bytes);
  if (status == FP8CORE_OK) {
    for (int64_t i = 0; i < tensors; i++) {
      scaling->history_seen[i] = arrays.history_steps[i] > 0;
      scaling->first_use[i] = 0;
    }
  }
  free(image);
  return status;
}
