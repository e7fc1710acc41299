// Making a reducer: its options, the plan of its buckets, and memory for all of its steps.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gradient_internal.h"

// Up to this many ranks an owner keeps all contributions to its tensors, beyond it their sum in FP32, which is smaller.
#define KEPT_RANKS 5

const char *fp8comm_gradient_algorithm_name(fp8comm_gradient_algorithm algorithm) {
  switch (algorithm) {
  case FP8COMM_TWO_SHOT: return "two-shot";
  case FP8COMM_NATIVE: return "native";
  case FP8COMM_BASELINE_FP32: return "fp32";
  case FP8COMM_BASELINE_BF16: return "bf16";
  }
  return "unknown";
}

const char *fp8comm_gradient_scaling_name(fp8comm_gradient_scaling scaling) {
  switch (scaling) {
  case FP8COMM_SCALING_AUTO: return "auto";
  case FP8COMM_SCALING_PRE: return "pre";
  case FP8COMM_SCALING_POST: return "post";
  }
  return "unknown";
}

static fp8core_status read_options(const fp8comm_gradient_options *given, fp8comm_gradient_options *options) {
  *options = fp8comm_gradient_options_default();
  if (!given) return FP8CORE_OK;
  if (given->size != sizeof(*given))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8comm_gradient_options has size %zu, expected %zu",
                                  given->size, sizeof(*given));
  // Field by field: padding would reach the digest.
  options->algorithm = given->algorithm;
  options->scaling = given->scaling;
  options->wire_dtype = given->wire_dtype;
  options->buckets_in_flight = given->buckets_in_flight;
  options->bucket_bytes = given->bucket_bytes;
  options->saturation_threshold = given->saturation_threshold;
  options->backoff = given->backoff;
  options->growth_steps = given->growth_steps;
  options->mu_initial = given->mu_initial;
  options->mu_min = given->mu_min;
  options->mu_max = given->mu_max;
  options->measure_snr = given->measure_snr != 0;
  options->owners = given->owners;
  options->bucket_of = given->bucket_of;
  options->inputs_have_amax = given->inputs_have_amax != 0;
  options->error_feedback = given->error_feedback != 0;
  options->in_place = given->in_place != 0;
  options->delayed_scaling = given->delayed_scaling != 0;
  if ((int)options->algorithm < 0 || options->algorithm > FP8COMM_BASELINE_BF16)
    return fp8comm_invalid("algorithm is %d, expected 0 to 3", (int)options->algorithm);
  if ((int)options->scaling < 0 || options->scaling > FP8COMM_SCALING_POST)
    return fp8comm_invalid("scaling is %d, expected 0 to 2", (int)options->scaling);
  if (options->wire_dtype != FP8CORE_E4M3 && options->wire_dtype != FP8CORE_E5M2)
    return fp8comm_invalid("wire_dtype is %s (%d), expected e4m3 or e5m2", fp8core_dtype_name(options->wire_dtype),
                           (int)options->wire_dtype);
  if (options->buckets_in_flight < 1 || options->buckets_in_flight > 64)
    return fp8comm_invalid("buckets_in_flight is %d, expected 1 to 64", options->buckets_in_flight);
  // Packed by hand, it says nothing.
  if (options->bucket_of) options->bucket_bytes = fp8comm_gradient_options_default().bucket_bytes;
  if (options->bucket_bytes < 1)
    return fp8comm_invalid("bucket_bytes is %lld, expected at least 1", (long long)options->bucket_bytes);
  if (!(options->saturation_threshold >= 0 && options->saturation_threshold <= 1))
    return fp8comm_invalid("saturation_threshold is %g, expected 0 to 1", options->saturation_threshold);
  if (!(options->backoff > 0 && options->backoff < 1))
    return fp8comm_invalid("backoff is %g, expected a number between 0 and 1", options->backoff);
  if (!(options->growth_steps >= 1 && options->growth_steps <= 1e9))
    return fp8comm_invalid("growth_steps is %g, expected 1 to 1e9", options->growth_steps);
  if (!(options->mu_min >= 0x1p-60 && options->mu_min <= options->mu_initial &&
        options->mu_initial <= options->mu_max && options->mu_max <= 0x1p60))
    return fp8comm_invalid("mu_min, mu_initial, mu_max are %g, %g, %g, expected rising from 2^-60 to 2^60",
                           options->mu_min, options->mu_initial, options->mu_max);
  return FP8CORE_OK;
}

// The two that have an entry a tensor.
static fp8core_status check_lists(const fp8comm_gradient_options *options, int64_t tensors, int ranks) {
  for (int64_t i = 0; i < tensors; i++) {
    if (options->owners && (options->owners[i] < 0 || options->owners[i] >= ranks))
      return fp8comm_invalid("owners[%lld] is %d, expected a rank, 0 to %d", (long long)i, options->owners[i],
                             ranks - 1);
    if (!options->bucket_of) continue;
    const int bucket = options->bucket_of[i], before = i > 0 ? options->bucket_of[i - 1] : 0;
    if (i == 0 && bucket != 0) return fp8comm_invalid("bucket_of[0] is %d, expected 0", bucket);
    if (bucket != before && bucket != (int64_t)before + 1)
      return fp8comm_invalid("bucket_of[%lld] is %d, expected %d or %d after the %d before it", (long long)i, bucket,
                             before, before + 1, before);
  }
  return FP8CORE_OK;
}

static void plan_buckets(fp8comm_gradient_reducer *reducer) {
  const size_t most = (size_t)reducer->options.bucket_bytes / reducer->element;
  const int *bucket_of = reducer->options.bucket_of;
  gradient_bucket *last = NULL;
  reducer->bucket_count = 0;
  for (int64_t i = 0; i < reducer->tensor_count; i++) {
    const size_t elements = (size_t)reducer->tensors[i].elements;
    // The last condition: at least one tensor each.
    if (!last || (bucket_of ? bucket_of[i] != bucket_of[i - 1] : last->elements + elements > most && last->count > 0)) {
      last = &reducer->buckets[reducer->bucket_count++];
      memset(last, 0, sizeof(*last));
      last->first = i;
    }
    last->elements += elements;
    last->count++;
  }
}

// One tensor after the other; every rank owns as many elements.
static void divide(fp8comm_gradient_reducer *reducer, gradient_bucket *bucket) {
  const size_t ranks = (size_t)reducer->communicator->size;
  const size_t part = (bucket->elements + ranks - 1) / ranks;
  size_t offset = 0;
  for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
    reducer->order[i] = i;
    reducer->tensors[i].offset = offset;
    offset += (size_t)reducer->tensors[i].elements;
  }
  bucket->parts.count = bucket->elements;
  bucket->parts.part = (part + PART_ELEMENTS - 1) / PART_ELEMENTS * PART_ELEMENTS;
}

// Tensors of one owner after those of the other: a sort that counts, with begins[rank] for the rank's next place.
static void divide_among_owners(fp8comm_gradient_reducer *reducer, gradient_bucket *bucket, size_t *begins) {
  const int ranks = reducer->communicator->size;
  const int64_t end = bucket->first + bucket->count;
  fp8comm_gradient_tensor *tensors = reducer->tensors;
  size_t place = (size_t)bucket->first, offset = 0;
  memset(begins, 0, ((size_t)ranks + 1) * sizeof(*begins));
  for (int64_t i = bucket->first; i < end; i++) begins[tensors[i].owner]++;
  for (int rank = 0; rank < ranks; rank++) {
    const size_t count_of = begins[rank];
    begins[rank] = place;
    place += count_of;
  }
  for (int64_t i = bucket->first; i < end; i++) reducer->order[begins[tensors[i].owner]++] = i;
  memset(begins, 0, ((size_t)ranks + 1) * sizeof(*begins));
  for (int64_t i = bucket->first; i < end; i++) {
    fp8comm_gradient_tensor *tensor = &tensors[reducer->order[i]];
    tensor->offset = offset;
    offset += (size_t)tensor->elements;
    begins[tensor->owner + 1] = offset;
  }
  bucket->parts.part = 0;
  for (int rank = 0; rank < ranks; rank++) {
    // Those that own nothing here begin where the one before ends.
    begins[rank + 1] = maximum(begins[rank + 1], begins[rank]);
    bucket->parts.part = maximum(bucket->parts.part, begins[rank + 1] - begins[rank]);
  }
  bucket->parts.count = bucket->elements;
  bucket->parts.begins = begins;
}

// Elements of the largest bucket, and of the largest part of this rank's.
static void largest(const fp8comm_gradient_reducer *reducer, size_t *elements, size_t *part) {
  *elements = *part = 0;
  for (int64_t i = 0; i < reducer->bucket_count; i++) {
    const gradient_bucket *one = &reducer->buckets[i];
    *elements = maximum(*elements, one->elements);
    *part = maximum(*part, fp8comm_part_count(&one->parts, reducer->communicator->rank));
  }
}

// Where the next buffer lies; NULL while only the size is wanted.
static void *place(unsigned char *memory, size_t *used, size_t bytes) {
  unsigned char *at = memory ? memory + *used : NULL;
  *used += (bytes + 63) / 64 * 64;
  return at;
}

// Sets a slot's buffers in `memory`, or finds how many bytes they need.
static size_t lay_out(const fp8comm_gradient_reducer *reducer, gradient_slot *slot, unsigned char *memory) {
  size_t elements, part, tensors = 0, staging = 0, used = 0;
  largest(reducer, &elements, &part);
  for (int64_t i = 0; i < reducer->bucket_count; i++) {
    const gradient_bucket *one = &reducer->buckets[i];
    tensors = maximum(tensors, (size_t)one->count);
    staging = maximum(staging, fp8comm_gradient_staging_bytes(slot, one));
  }
  const int snr = reducer->options.measure_snr;
  // Where codes stay on the GPU, only records, and NaNs for it, are in the host's memory.
  const int on_host = !reducer->direct;
  // What an owner's outputs on a GPU are cast from is a sum.
  const int sums =
    on_host && (!reducer->keeps || (reducer->cuda && reducer->owned)) && reducer->options.algorithm != FP8COMM_NATIVE;
  const size_t ranks = (size_t)reducer->communicator->size;
  const int messages = !reducer->window;
  // An owner's outputs in host memory are cast from as much.
  const size_t chunk = reducer->keeps && reducer->owned && !reducer->cuda ? OWNER_CHUNK : CHUNK;
  slot->codes = messages ? place(memory, &used, on_host ? elements * reducer->element : 0)
                         : reducer->window->own + slot->window_offset;
  slot->received = messages && reducer->keeps ? place(memory, &used, (ranks - 1) * kept_stride(part)) : NULL;
  slot->sources = place(memory, &used, reducer->keeps ? ranks * sizeof(*slot->sources) : 0);
  slot->sum = place(memory, &used, sums ? part * sizeof(float) : 0);
  slot->chunk = place(memory, &used, on_host ? chunk * sizeof(float) : 0);
  slot->other_chunk = place(memory, &used, on_host ? CHUNK * sizeof(float) : 0);
  slot->nans = place(memory, &used, on_host ? 0 : minimum(elements, CHUNK) * reducer->element);
  slot->staging = place(memory, &used, staging);
  slot->amaxes = place(memory, &used, (tensors + 1) * sizeof(uint32_t));
  slot->counts = place(memory, &used, tensors * sizeof(counts_record));
  slot->values = place(memory, &used, snr ? elements * sizeof(float) : 0);
  slot->exact = place(memory, &used, snr ? part * sizeof(float) : 0);
  slot->squares = place(memory, &used, snr ? tensors * sizeof(squares_record) : 0);
  return used;
}

static fp8core_status make_slot_on_device(fp8comm_gradient_reducer *reducer, gradient_slot *slot) {
  size_t elements, part;
  void *memory;
  largest(reducer, &elements, &part);
  size_t codes = elements * reducer->element;
  // Parts that are gathered are all as long.
  for (int64_t i = 0; i < reducer->bucket_count && reducer->direct && !reducer->owned; i++)
    codes = maximum(codes, (size_t)reducer->communicator->size * reducer->buckets[i].parts.part);
  const size_t values = reducer->options.measure_snr ? elements * sizeof(float) : 0;
  const int sums = reducer->direct || (reducer->owned && reducer->options.algorithm != FP8COMM_NATIVE);
  const size_t sum = sums ? part * sizeof(float) : 0;
  const size_t ranks = (size_t)reducer->communicator->size;
  const size_t parts = reducer->direct ? (ranks - 1) * ((part + 15) / 16 * 16) : 0;
  FP8COMM_TRY(fp8core_alloc(reducer->device_context, codes, &memory));
  slot->device_codes = memory;
  FP8COMM_TRY(fp8core_alloc(reducer->device_context, values, &memory));
  slot->device_values = memory;
  FP8COMM_TRY(fp8core_alloc(reducer->device_context, sum, &memory));
  slot->device_sum = memory;
  FP8COMM_TRY(fp8core_alloc(reducer->device_context, parts, &memory));
  slot->device_parts = memory;
  if (reducer->direct) {
    slot->part_counts = calloc(ranks, sizeof(*slot->part_counts));
    if (!slot->part_counts)
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the parts of a bucket");
    fill_with_nan(reducer, slot->nans, minimum(elements, CHUNK));
  }
  reducer->memory_bytes += codes + values + sum + parts + (reducer->direct ? ranks * sizeof(*slot->part_counts) : 0);
  return FP8CORE_OK;
}

// Bytes of a slot's codes in the window.
static size_t window_bytes(const fp8comm_gradient_reducer *reducer) {
  size_t elements, part;
  largest(reducer, &elements, &part);
  return (elements * reducer->element + 63) / 64 * 64;
}

static fp8core_status make_window(fp8comm_gradient_reducer *reducer) {
  const size_t bytes = (size_t)reducer->slot_count * window_bytes(reducer);
  if (!reducer->keeps || reducer->cuda || !reducer->options.in_place || reducer->communicator->size == 1)
    return FP8CORE_OK;
  FP8COMM_TRY(fp8comm_window_create(reducer->communicator, bytes, &reducer->window));
  if (reducer->window) reducer->memory_bytes += bytes;
  return FP8CORE_OK;
}

static fp8core_status make_slot(fp8comm_gradient_reducer *reducer, gradient_slot *slot) {
  slot->reducer = reducer;
  fp8comm_gradient_set_rules(slot);
  slot->window_offset = reducer->window ? (size_t)(slot - reducer->slots) * window_bytes(reducer) : 0;
  const size_t bytes = lay_out(reducer, slot, NULL);
  if (reducer->cuda) {
    void *memory;
    FP8COMM_TRY(reducer->cuda->functions->allocate(reducer->cuda, bytes, &memory));
    slot->memory = memory;
  } else {
    slot->memory = fp8comm_allocate(bytes);
  }
  if (!slot->memory)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
  (void)lay_out(reducer, slot, slot->memory);
  reducer->memory_bytes += bytes;
  return reducer->cuda ? make_slot_on_device(reducer, slot) : FP8CORE_OK;
}

static void free_slot(const fp8comm_gradient_reducer *reducer, gradient_slot *slot) {
  if (!reducer->cuda) {
    free(slot->memory);
    return;
  }
  free(slot->part_counts);
  if (slot->memory) reducer->cuda->functions->free(reducer->cuda, slot->memory);
  if (!reducer->device_context) return;
  (void)fp8core_free(reducer->device_context, slot->device_codes);
  (void)fp8core_free(reducer->device_context, slot->device_values);
  (void)fp8core_free(reducer->device_context, slot->device_sum);
  (void)fp8core_free(reducer->device_context, slot->device_parts);
}

// The contexts and records of a reducer of gradients on a GPU.
static fp8core_status make_on_device(fp8comm_gradient_reducer *reducer, fp8comm_cuda *cuda) {
  fp8core_context_options options = fp8core_context_options_default();
  const size_t bytes = (size_t)reducer->tensor_count * sizeof(device_record);
  void *memory;
  reducer->context = NULL;
  reducer->cuda = cuda;
  FP8COMM_TRY(fp8core_context_create(&reducer->context, &options));
  options.device = fp8core_context_device(cuda->context);
  options.use_stream = 1;
  options.stream = cuda->stream;
  // Casts need none.
  options.workspace_bytes = 256;
  FP8COMM_TRY(fp8core_context_create(&reducer->device_context, &options));
  FP8COMM_TRY(cuda->functions->allocate(cuda, bytes, &memory));
  reducer->records = memory;
  memset(reducer->records, 0, bytes);
  FP8COMM_TRY(fp8core_alloc(reducer->device_context, bytes, &memory));
  reducer->device_records = memory;
  reducer->memory_bytes += 2 * bytes + fp8core_context_workspace_bytes(reducer->device_context);
  return FP8CORE_OK;
}

static void free_on_device(fp8comm_gradient_reducer *reducer) {
  if (!reducer->cuda) return;
  if (reducer->device_context) (void)fp8core_free(reducer->device_context, reducer->device_records);
  if (reducer->records) reducer->cuda->functions->free(reducer->cuda, reducer->records);
  fp8core_context_destroy(&reducer->device_context);
  fp8core_context_destroy(&reducer->context);
}

static fp8core_status make(fp8comm_gradient_reducer *reducer, const int64_t *elements) {
  const size_t count_of = (size_t)reducer->tensor_count;
  reducer->tensors = calloc(count_of, sizeof(*reducer->tensors));
  reducer->order = calloc(count_of, sizeof(*reducer->order));
  reducer->buckets = calloc(count_of, sizeof(*reducer->buckets));
  if (!reducer->tensors || !reducer->order || !reducer->buckets)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the tables of %lld tensors",
                                  (long long)reducer->tensor_count);
  for (int64_t i = 0; i < reducer->tensor_count; i++) {
    fp8comm_gradient_tensor *tensor = &reducer->tensors[i];
    tensor->elements = elements[i];
    tensor->owner = reducer->owned ? reducer->options.owners[i] : -1;
    tensor->mu = reducer->scaled && reducer->options.scaling == FP8COMM_SCALING_AUTO ? reducer->options.mu_initial : 1;
    tensor->statistics.elements = elements[i];
    tensor->statistics.mu = tensor->statistics.next_mu = tensor->mu;
    tensor->last_amax = tensor->last_mean_amax = -1;
  }
  plan_buckets(reducer);
  const size_t begins = reducer->owned ? (size_t)reducer->bucket_count * ((size_t)reducer->communicator->size + 1) : 0;
  if (reducer->owned) {
    reducer->begins = calloc(begins, sizeof(*reducer->begins));
    if (!reducer->begins)
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the parts of %lld buckets",
                                    (long long)reducer->bucket_count);
  }
  for (int64_t i = 0; i < reducer->bucket_count; i++) {
    if (reducer->owned) {
      divide_among_owners(reducer, &reducer->buckets[i],
                          reducer->begins + (size_t)i * ((size_t)reducer->communicator->size + 1));
    } else {
      divide(reducer, &reducer->buckets[i]);
    }
  }
  const int64_t in_flight = reducer->options.buckets_in_flight;
  reducer->slot_count = (int)(in_flight < reducer->bucket_count ? in_flight : reducer->bucket_count);
  reducer->slots = calloc((size_t)reducer->slot_count, sizeof(*reducer->slots));
  if (!reducer->slots) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate buckets");
  reducer->memory_bytes +=
    sizeof(*reducer) + begins * sizeof(*reducer->begins) +
    count_of * (sizeof(*reducer->tensors) + sizeof(*reducer->order) + sizeof(*reducer->buckets)) +
    (size_t)reducer->slot_count * sizeof(*reducer->slots);
  if (reducer->scaled && reducer->options.error_feedback) FP8COMM_TRY(fp8comm_gradient_make_errors(reducer));
  reducer->memory_bytes += reducer->lost_bytes + reducer->lost_means_bytes;
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_create(fp8comm_gradient_reducer **reducer, fp8comm_communicator *communicator,
                                       fp8core_context *context, int64_t tensors, const int64_t *elements,
                                       const fp8comm_gradient_options *given) {
  fp8comm_gradient_options options;
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a place for the handle");
  *reducer = NULL;
  if (!communicator) return fp8comm_invalid("communicator is NULL, expected a communicator");
  if (!context) return fp8comm_invalid("context is NULL, expected a context");
  fp8comm_cuda *cuda = NULL;
  if (fp8core_context_device(context).type != FP8CORE_DEVICE_CPU) {
    cuda = communicator->path != FP8COMM_PATH_NONE ? communicator->shared->cuda : NULL;
    if (!cuda || cuda->context != context)
      return fp8comm_invalid("context is on a GPU, but is not the communicator's, expected one that it was given by "
                             "fp8comm_communicator_use_device()");
  }
  if (tensors < 1 || tensors > INT32_MAX)
    return fp8comm_invalid("tensors is %lld, expected 1 to 2^31 - 1", (long long)tensors);
  if (!elements) return fp8comm_invalid("elements is NULL, expected %lld sizes", (long long)tensors);
  int64_t total = 0;
  for (int64_t i = 0; i < tensors; i++) {
    if (elements[i] < 0 || elements[i] > INT64_MAX / 16 - total)
      return fp8comm_invalid("elements[%lld] is %lld, expected at least 0, and sizes that fit into memory",
                             (long long)i, (long long)elements[i]);
    total += elements[i];
  }
  FP8COMM_TRY(read_options(given, &options));
  FP8COMM_TRY(check_lists(&options, tensors, communicator->size));
  FP8COMM_TRY(fp8comm_check(communicator));
  fp8comm_gradient_reducer *made = calloc(1, sizeof(*made));
  if (!made) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a reducer");
  made->communicator = communicator;
  made->context = context;
  made->options = options;
  made->growth = exp2(1 / options.growth_steps);
  made->scaled = options.algorithm == FP8COMM_TWO_SHOT || options.algorithm == FP8COMM_NATIVE;
  made->wire = made->scaled                                 ? options.wire_dtype
               : options.algorithm == FP8COMM_BASELINE_FP32 ? FP8CORE_FP32
                                                            : FP8CORE_BF16;
  made->element = fp8core_dtype_size(made->wire);
  made->owned = options.owners != NULL;
  made->direct = cuda && fp8comm_device_is_direct(communicator) && communicator->size > 1 &&
                 options.algorithm == FP8COMM_TWO_SHOT && !options.measure_snr;
  // Errors of means need the sums.
  made->keeps = options.algorithm == FP8COMM_TWO_SHOT && !made->direct && !options.error_feedback &&
                (!made->owned || communicator->size <= KEPT_RANKS);
  made->tries = made->keeps && options.delayed_scaling && !options.measure_snr && !cuda;
  made->tensor_count = tensors;
  made->nonfinite_rank = -1;
  fp8core_status status = cuda ? make_on_device(made, cuda) : FP8CORE_OK;
  if (status == FP8CORE_OK) status = make(made, elements);
  // The caller's, for this call only.
  made->options.owners = made->options.bucket_of = NULL;
  if (status == FP8CORE_OK) status = fp8comm_gradient_agree(made);
  if (status == FP8CORE_OK) status = make_window(made);
  for (int i = 0; i < made->slot_count && status == FP8CORE_OK; i++) status = make_slot(made, &made->slots[i]);
  // None goes on, and none begins a step, before all have what they need.
  if (status == FP8CORE_OK) status = fp8comm_gradient_agree(made);
  if (status == FP8CORE_OK) {
    *reducer = made;
  } else {
    fp8comm_gradient_destroy(&made);
  }
  return status;
}

void fp8comm_gradient_destroy(fp8comm_gradient_reducer **reducer) {
  if (!reducer || !*reducer) return;
  fp8comm_gradient_reducer *gone = *reducer;
  *reducer = NULL;
  for (int i = 0; i < gone->slot_count && gone->slots; i++) {
    fp8comm_request_discard(&gone->slots[i].request);
    free_slot(gone, &gone->slots[i]);
  }
  fp8comm_window_destroy(&gone->window);
  fp8comm_gradient_free_errors(gone);
  free_on_device(gone);
  free(gone->slots);
  free(gone->begins);
  free(gone->buckets);
  free(gone->order);
  free(gone->tensors);
  free(gone);
}
