// What a sharded optimizer is made of: owners, where everything lies, and that ranks agree.
#include <stdlib.h>
#include <string.h>

#include "fp8comm/collectives.h"
#include "fp8comm/device.h"
#include "fp8zero/partition.h"
#include "internal.h"

#define ALIGNMENT 64
#define MAX_NAME_BYTES 255
#define MAX_BUFFERS 64

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static fp8core_status out_of_memory(int64_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %lld bytes of host memory",
                                (long long)bytes);
}

// A table, zeroed and counted.
static fp8core_status table(fp8zero_sharded *sharded, int64_t count, size_t size, void *pointer) {
  // At least one byte, as NULL is a failure.
  void *memory = calloc((size_t)(count > 0 ? count : 1), size);
  if (!memory) return out_of_memory(count * (int64_t)size);
  sharded->memory.overhead_bytes += count * (int64_t)size;
  memcpy(pointer, &memory, sizeof(memory));
  return FP8CORE_OK;
}

static fp8core_status arena(fp8zero_sharded *sharded, int64_t bytes, int64_t *counted, unsigned char **memory) {
  void *allocated = NULL;
  FP8ZERO_TRY(fp8core_alloc(sharded->context, (size_t)bytes, &allocated));
  *memory = allocated;
  *counted += bytes;
  return allocated ? fp8core_zero(sharded->context, allocated, (size_t)bytes) : FP8CORE_OK;
}

static int64_t maximum(int64_t one, int64_t other) { return one > other ? one : other; }

// No memory at all where nothing is needed.
static unsigned char *advance(unsigned char *at, int64_t bytes) { return at ? at + bytes : NULL; }

// --- Arguments ---

static fp8core_status check_options(const fp8zero_sharded_options *options) {
  if (options->stage < 0 || options->stage > 3) return fp8zero_invalid("stage is %d, expected 0 to 3", options->stage);
  if (options->micro_batches < 1)
    return fp8zero_invalid("micro_batches is %d, expected at least 1", options->micro_batches);
  if (options->stage < 2 && options->micro_batches > 1)
    return fp8zero_invalid(
      "micro_batches is %d in stage %d, expected 1: accumulate in the memory of the gradients, and "
      "reduce once",
      options->micro_batches, options->stage);
  if (options->weight_buffers < 1 || options->weight_buffers > MAX_BUFFERS)
    return fp8zero_invalid("weight_buffers is %d, expected 1 to %d", options->weight_buffers, MAX_BUFFERS);
  if (options->gradient_buffers < 1 || options->gradient_buffers > MAX_BUFFERS)
    return fp8zero_invalid("gradient_buffers is %d, expected 1 to %d", options->gradient_buffers, MAX_BUFFERS);
  if (options->gradient.owners || options->gradient.bucket_of)
    return fp8zero_invalid("%s of the gradient options is set, expected NULL: owners and buckets are chosen here",
                           options->gradient.owners ? "owners" : "bucket_of");
  if (options->gradient.bucket_bytes < 1)
    return fp8zero_invalid("bucket_bytes is %lld, expected at least 1", (long long)options->gradient.bucket_bytes);
  return FP8CORE_OK;
}

static fp8core_status check_parameter(int64_t index, const fp8zero_parameter *parameter, int part_before,
                                      int group_count, int64_t *elements) {
  if (!parameter->name)
    return fp8zero_invalid("the name of parameter %lld is NULL, expected a string", (long long)index);
  const size_t length = strlen(parameter->name);
  if (length == 0 || length > MAX_NAME_BYTES)
    return fp8zero_invalid("the name of parameter %lld has %zu bytes, expected 1 to %d", (long long)index, length,
                           MAX_NAME_BYTES);
  if (parameter->dimensions < 0 || parameter->dimensions > FP8CORE_MAX_DIMENSIONS)
    return fp8zero_invalid("parameter \"%s\" has %d dimensions, expected 0 to %d", parameter->name,
                           parameter->dimensions, FP8CORE_MAX_DIMENSIONS);
  *elements = 1;
  for (int i = 0; i < parameter->dimensions; i++) {
    const int64_t size = parameter->shape[i];
    if (size < 0)
      return fp8zero_invalid("shape[%d] of parameter \"%s\" is %lld, expected at least 0", i, parameter->name,
                             (long long)size);
    if (size != 0 && *elements > INT64_MAX / 32 / size)
      return fp8zero_invalid("parameter \"%s\" has more than 2^58 elements", parameter->name);
    *elements *= size;
  }
  if (parameter->group < 0 || parameter->group >= group_count)
    return fp8zero_invalid("group of parameter \"%s\" is %d, expected 0 to %d", parameter->name, parameter->group,
                           group_count - 1);
  if ((unsigned)parameter->weight_dtype >= FP8CORE_DTYPE_COUNT)
    return fp8zero_invalid("weight_dtype of parameter \"%s\" is %d, expected an fp8core_dtype, 0 to %d",
                           parameter->name, (int)parameter->weight_dtype, FP8CORE_DTYPE_COUNT - 1);
  if ((unsigned)parameter->gradient_dtype >= FP8CORE_DTYPE_COUNT)
    return fp8zero_invalid("gradient_dtype of parameter \"%s\" is %d, expected an fp8core_dtype, 0 to %d",
                           parameter->name, (int)parameter->gradient_dtype, FP8CORE_DTYPE_COUNT - 1);
  if (index == 0 && parameter->part != 0)
    return fp8zero_invalid("part of parameter \"%s\", the first, is %d, expected 0", parameter->name, parameter->part);
  if (index > 0 && parameter->part != part_before && parameter->part != (int64_t)part_before + 1)
    return fp8zero_invalid("part of parameter \"%s\" is %d, expected %d or %d after the %d before it", parameter->name,
                           parameter->part, part_before, part_before + 1, part_before);
  return FP8CORE_OK;
}

static int compare_names(const void *one, const void *other) {
  return strcmp((*(const fp8zero_tensor *const *)one)->name, (*(const fp8zero_tensor *const *)other)->name);
}

static fp8core_status check_names(const fp8zero_sharded *sharded) {
  const size_t count = (size_t)sharded->tensor_count;
  const fp8zero_tensor **sorted = count <= INT32_MAX ? calloc(count, sizeof(*sorted)) : NULL;
  if (!sorted) return out_of_memory(sharded->tensor_count * (int64_t)sizeof(*sorted));
  for (size_t i = 0; i < count; i++) sorted[i] = &sharded->tensors[i];
  qsort(sorted, count, sizeof(*sorted), compare_names);
  const char *twice = NULL;
  for (size_t i = 1; i < count && !twice; i++)
    if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0) twice = sorted[i]->name;
  free(sorted);
  return twice ? fp8zero_invalid("two parameters are called \"%s\", expected unique names", twice) : FP8CORE_OK;
}

static fp8core_status copy_parameters(fp8zero_sharded *sharded, const fp8zero_parameter *parameters, int group_count) {
  size_t name_bytes = 0;
  int64_t total = 0;
  FP8ZERO_TRY(table(sharded, sharded->tensor_count, sizeof(*sharded->tensors), &sharded->tensors));
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    fp8zero_tensor *tensor = &sharded->tensors[i];
    const int part_before = i > 0 ? parameters[i - 1].part : 0;
    FP8ZERO_TRY(check_parameter(i, &parameters[i], part_before, group_count, &tensor->elements));
    if (tensor->elements > INT64_MAX / 32 - total)
      return fp8zero_invalid("parameters up to \"%s\" have more than 2^58 elements together", parameters[i].name);
    total += tensor->elements;
    name_bytes += strlen(parameters[i].name) + 1;
  }
  FP8ZERO_TRY(table(sharded, (int64_t)name_bytes, 1, &sharded->names));
  char *name = sharded->names;
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    fp8zero_tensor *tensor = &sharded->tensors[i];
    const size_t bytes = strlen(parameters[i].name) + 1;
    memcpy(name, parameters[i].name, bytes);
    tensor->name = name;
    name += bytes;
    tensor->dimensions = parameters[i].dimensions;
    memcpy(tensor->shape, parameters[i].shape, (size_t)tensor->dimensions * sizeof(*tensor->shape));
    tensor->group = parameters[i].group;
    tensor->weight_dtype = parameters[i].weight_dtype;
    tensor->gradient_dtype = parameters[i].gradient_dtype;
    tensor->part = parameters[i].part;
    tensor->replicated = parameters[i].replicated != 0;
  }
  sharded->part_count = parameters[sharded->tensor_count - 1].part + 1;
  return check_names(sharded);
}

// --- Owners and places ---

static fp8core_status choose_owners(fp8zero_sharded *sharded) {
  const fp8optim_adamw_options *adamw = &sharded->options.adamw;
  const fp8core_dtype states[] = {adamw->master_dtype, adamw->exp_avg_dtype, adamw->exp_avg_sq_dtype};
  const int64_t count = sharded->tensor_count;
  int64_t state_bytes = 0;
  for (int i = 0; i < 3; i++) {
    if ((unsigned)states[i] >= FP8CORE_DTYPE_COUNT)
      return fp8zero_invalid("%s is %d, expected an fp8core_dtype, 0 to %d",
                             i == 0   ? "master_dtype"
                             : i == 1 ? "exp_avg_dtype"
                                      : "exp_avg_sq_dtype",
                             (int)states[i], FP8CORE_DTYPE_COUNT - 1);
    state_bytes += (int64_t)fp8core_dtype_size(states[i]);
  }
  int64_t *sizes = calloc((size_t)count, sizeof(*sizes));
  int *owners = calloc((size_t)count, sizeof(*owners));
  fp8core_status status = sizes && owners ? FP8CORE_OK : out_of_memory(count * (int64_t)sizeof(*sizes));
  if (status == FP8CORE_OK) {
    for (int64_t i = 0; i < count; i++) sizes[i] = sharded->tensors[i].elements * state_bytes;
    status = fp8zero_partition(count, sizes, sharded->size, owners, NULL);
  }
  if (status == FP8CORE_OK) status = table(sharded, sharded->size, sizeof(*sharded->owned), &sharded->owned);
  for (int64_t i = 0; i < count && status == FP8CORE_OK; i++) {
    fp8zero_tensor *tensor = &sharded->tensors[i];
    tensor->owner = owners[i];
    tensor->local = -1;
    sharded->owned[tensor->owner]++;
    if (sharded->options.stage == 0 || tensor->owner == sharded->rank) tensor->local = sharded->local_count++;
  }
  free(sizes);
  free(owners);
  return status;
}

// Where each weight lies in its part: see fp8zero_part.
static void place_weights(fp8zero_sharded *sharded, fp8zero_part *part) {
  int64_t offset = 0;
  for (int64_t i = part->first; i < part->first + part->count; i++)
    part->counts[sharded->tensors[i].owner] +=
      aligned(sharded->tensors[i].elements * (int64_t)fp8core_dtype_size(sharded->tensors[i].weight_dtype));
  for (int rank = 0; rank < sharded->size; rank++) {
    const int64_t begin = offset;
    if (rank == sharded->rank) part->own_offset = begin;
    int64_t scales = begin + part->counts[rank];
    int64_t found = 0;
    // Those that own something have scales, also of tensors without elements.
    for (int64_t i = part->first; i < part->first + part->count; i++) {
      fp8zero_tensor *tensor = &sharded->tensors[i];
      if (tensor->owner != rank) continue;
      tensor->weight_offset = offset;
      tensor->scale_offset = scales + found++ * (int64_t)sizeof(float);
      offset += aligned(tensor->elements * (int64_t)fp8core_dtype_size(tensor->weight_dtype));
    }
    offset = aligned(scales + found * (int64_t)sizeof(float));
    part->counts[rank] = offset - begin;
  }
  part->weight_bytes = offset;
}

static int64_t gradient_element(const fp8zero_sharded *sharded, const fp8zero_tensor *tensor) {
  const int64_t own = (int64_t)fp8core_dtype_size(tensor->gradient_dtype);
  const int64_t mean = (int64_t)fp8core_dtype_size(sharded->mean_dtype);
  // The mean takes the gradient's place, but for that of the owner's only reduction.
  return sharded->options.stage >= 2 && sharded->options.micro_batches == 1 ? own : maximum(own, mean);
}

static fp8core_status place(fp8zero_sharded *sharded, const int *resident) {
  const fp8comm_gradient_options *gradient = &sharded->options.gradient;
  const int64_t element = (int64_t)fp8core_dtype_size(sharded->mean_dtype);
  int64_t buckets = 0;
  FP8ZERO_TRY(table(sharded, sharded->part_count, sizeof(*sharded->parts), &sharded->parts));
  FP8ZERO_TRY(table(sharded, (int64_t)sharded->part_count * sharded->size, sizeof(*sharded->counts), &sharded->counts));
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    fp8zero_part *part = &sharded->parts[sharded->tensors[i].part];
    if (part->count++ == 0) part->first = i;
  }
  int64_t local = 0;
  for (int p = 0; p < sharded->part_count; p++) {
    fp8zero_part *part = &sharded->parts[p];
    int64_t bucket_bytes = 0;
    part->counts = sharded->counts + (int64_t)p * sharded->size;
    part->weights_stay = sharded->options.stage < 3 || (resident && resident[p]);
    part->gradients_stay = sharded->options.stage < 2 || !sharded->options.gradient_memory || (resident && resident[p]);
    part->local_first = local;
    part->first_bucket = buckets;
    place_weights(sharded, part);
    for (int64_t i = part->first; i < part->first + part->count; i++) {
      fp8zero_tensor *tensor = &sharded->tensors[i];
      const int64_t bytes = tensor->elements * element;
      tensor->gradient_offset = part->gradient_bytes;
      part->gradient_bytes += aligned(tensor->elements * gradient_element(sharded, tensor));
      local += tensor->local >= 0;
      // As buckets of the reducer's own choice, that end where parts end.
      if (i == part->first || bytes > gradient->bucket_bytes - bucket_bytes) {
        buckets++;
        bucket_bytes = 0;
      }
      bucket_bytes += bytes;
    }
    part->local_count = local - part->local_first;
    part->bucket_count = buckets - part->first_bucket;
  }
  return FP8CORE_OK;
}

static fp8core_status make_buffers(fp8zero_sharded *sharded, int wanted, int parts, int64_t bytes, int64_t *counted,
                                   int *count, fp8zero_buffer **buffers) {
  *count = wanted < parts ? wanted : parts;
  FP8ZERO_TRY(table(sharded, *count, sizeof(**buffers), buffers));
  for (int i = 0; i < *count; i++) {
    (*buffers)[i].part = -1;
    FP8ZERO_TRY(arena(sharded, bytes, counted, &(*buffers)[i].memory));
  }
  return FP8CORE_OK;
}

// Every scale is 1 until weights are made.
static fp8core_status reset_scales(fp8zero_sharded *sharded) {
  const float one = 1.0f;
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    const fp8zero_part *part = &sharded->parts[tensor->part];
    if (!part->weights && tensor->owner != sharded->rank) continue;
    unsigned char *scale =
      part->weights ? part->weights + tensor->scale_offset : part->own + (tensor->scale_offset - part->own_offset);
    FP8ZERO_TRY(fp8core_copy(sharded->context, scale, &one, sizeof(one)));
  }
  return FP8CORE_OK;
}

static fp8core_status allocate_weights(fp8zero_sharded *sharded) {
  int64_t bytes = 0;
  int64_t largest = 0;
  int parts = 0;
  for (int p = 0; p < sharded->part_count; p++) {
    const fp8zero_part *part = &sharded->parts[p];
    bytes += part->weights_stay ? part->weight_bytes : part->counts[sharded->rank];
    if (part->weights_stay) continue;
    parts++;
    largest = maximum(largest, part->weight_bytes);
  }
  FP8ZERO_TRY(arena(sharded, bytes, &sharded->memory.weight_bytes, &sharded->weights));
  unsigned char *at = sharded->weights;
  for (int p = 0; p < sharded->part_count; p++) {
    fp8zero_part *part = &sharded->parts[p];
    part->weights = part->weights_stay ? at : NULL;
    part->own = advance(at, part->weights_stay ? part->own_offset : 0);
    at = advance(at, part->weights_stay ? part->weight_bytes : part->counts[sharded->rank]);
  }
  FP8ZERO_TRY(reset_scales(sharded));
  return make_buffers(sharded, sharded->options.weight_buffers, parts, largest, &sharded->memory.weight_buffer_bytes,
                      &sharded->weight_buffer_count, &sharded->weight_buffers);
}

// Memory for gradients of the model, and for means where these don't take its place.
static fp8core_status allocate_gradients(fp8zero_sharded *sharded) {
  const int sums = sharded->options.micro_batches > 1;
  const int64_t element = sums ? (int64_t)sizeof(float) : (int64_t)fp8core_dtype_size(sharded->mean_dtype);
  int64_t bytes = 0;
  int64_t largest = 0;
  int64_t mean_bytes = 0;
  int parts = 0;
  for (int p = 0; p < sharded->part_count; p++) {
    const fp8zero_part *part = &sharded->parts[p];
    if (part->gradients_stay && sharded->options.gradient_memory) bytes += part->gradient_bytes;
    if (part->gradients_stay) continue;
    parts++;
    largest = maximum(largest, part->gradient_bytes);
  }
  FP8ZERO_TRY(arena(sharded, bytes, &sharded->memory.gradient_bytes, &sharded->gradients));
  unsigned char *at = sharded->gradients;
  for (int p = 0; p < sharded->part_count; p++) {
    fp8zero_part *part = &sharded->parts[p];
    part->writable = part->gradients_stay;
    if (!part->gradients_stay) continue;
    part->gradients = at;
    at = advance(at, part->gradient_bytes);
  }
  FP8ZERO_TRY(make_buffers(sharded, sharded->options.gradient_buffers, parts, largest,
                           &sharded->memory.gradient_buffer_bytes, &sharded->gradient_buffer_count,
                           &sharded->gradient_buffers));
  if (sharded->options.stage < 2) return FP8CORE_OK;
  int64_t longest = 0;
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    if (sharded->tensors[i].local < 0) continue;
    mean_bytes += aligned(sharded->tensors[i].elements * element);
    longest = maximum(longest, sharded->tensors[i].elements);
  }
  FP8ZERO_TRY(arena(sharded, mean_bytes, &sharded->memory.mean_gradient_bytes, &sharded->sums));
  return sums ? fp8zero_make_scratch(sharded, longest) : FP8CORE_OK;
}

static fp8core_tensor tensor_of(const fp8zero_sharded *sharded, const fp8zero_tensor *tensor, void *data,
                                fp8core_dtype dtype) {
  fp8core_tensor made = fp8core_tensor_create(data, dtype, tensor->dimensions, tensor->shape);
  made.device = sharded->device;
  return made;
}

// What the reducer writes, and what the optimizer reads.
static fp8core_status describe_gradients(fp8zero_sharded *sharded) {
  const int stage = sharded->options.stage;
  const int sums = sharded->options.micro_batches > 1;
  unsigned char *at = sharded->sums;
  FP8ZERO_TRY(table(sharded, sharded->tensor_count, sizeof(*sharded->inputs), &sharded->inputs));
  FP8ZERO_TRY(table(sharded, sharded->tensor_count, sizeof(*sharded->means), &sharded->means));
  FP8ZERO_TRY(table(sharded, sharded->adamw_count, sizeof(*sharded->local_gradients), &sharded->local_gradients));
  const int64_t none[2] = {0, 0};
  sharded->local_gradients[0] = fp8core_tensor_create(NULL, FP8CORE_FP32, 2, none);
  sharded->local_gradients[0].device = sharded->device;
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    const fp8zero_part *part = &sharded->parts[tensor->part];
    void *data =
      stage < 2 && part->gradients && tensor->elements > 0 ? part->gradients + tensor->gradient_offset : NULL;
    if (stage >= 2 && tensor->local >= 0 && tensor->elements > 0) {
      data = at;
      at += aligned(tensor->elements * (int64_t)(sums ? sizeof(float) : fp8core_dtype_size(sharded->mean_dtype)));
    }
    sharded->means[i] = tensor_of(sharded, tensor, sums ? NULL : data, sharded->mean_dtype);
    if (tensor->local >= 0)
      sharded->local_gradients[tensor->local] =
        tensor_of(sharded, tensor, data, sums ? FP8CORE_FP32 : sharded->mean_dtype);
  }
  return FP8CORE_OK;
}

// --- The optimizer ---

static fp8core_status make_adamw(fp8zero_sharded *sharded, int group_count, const fp8optim_group *groups) {
  sharded->adamw_count = maximum(sharded->local_count, 1);
  fp8optim_parameter *parameters = calloc((size_t)sharded->adamw_count, sizeof(*parameters));
  if (!parameters) return out_of_memory(sharded->adamw_count * (int64_t)sizeof(*parameters));
  parameters[0] = fp8optim_parameter_create("fp8zero.none", 0, 0);
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    const fp8zero_part *part = &sharded->parts[tensor->part];
    if (tensor->local < 0) continue;
    fp8optim_parameter *parameter = &parameters[tensor->local];
    parameter->name = tensor->name;
    parameter->dimensions = tensor->dimensions;
    memcpy(parameter->shape, tensor->shape, sizeof(parameter->shape));
    parameter->group = tensor->group;
    parameter->with_weight = 1;
    parameter->weight_dtype = tensor->weight_dtype;
    // In stage 0 the weights of all are where the owner's would be.
    if (tensor->elements > 0)
      parameter->weight =
        part->weights ? part->weights + tensor->weight_offset : part->own + (tensor->weight_offset - part->own_offset);
  }
  fp8core_status status = fp8optim_adamw_create(&sharded->adamw, sharded->context, &sharded->options.adamw,
                                                sharded->adamw_count, parameters, group_count, groups);
  free(parameters);
  for (int64_t i = 0; i < sharded->tensor_count && status == FP8CORE_OK; i++)
    if (sharded->tensors[i].local >= 0)
      status = fp8optim_adamw_set_stream(sharded->adamw, sharded->tensors[i].local, i);
  return status;
}

static fp8core_status make_squares(fp8zero_sharded *sharded) {
  int64_t total = 0;
  FP8ZERO_TRY(table(sharded, sharded->size, sizeof(*sharded->square_counts), &sharded->square_counts));
  FP8ZERO_TRY(table(sharded, sharded->size, sizeof(*sharded->square_begins), &sharded->square_begins));
  for (int rank = 0; rank < sharded->size; rank++) {
    sharded->square_begins[rank] = total;
    // One of a tensor that is not there, and what to tell.
    sharded->square_counts[rank] =
      maximum(sharded->options.stage == 0 ? sharded->tensor_count : sharded->owned[rank], 1) + 1;
    total += sharded->square_counts[rank];
  }
  if (sharded->options.stage == 0) total = sharded->tensor_count + 1;
  FP8ZERO_TRY(table(sharded, 2 * (int64_t)fp8comm_communicator_size(sharded->options.model_communicator),
                    sizeof(*sharded->model_sums), &sharded->model_sums));
  return table(sharded, total, sizeof(*sharded->squares), &sharded->squares);
}

fp8core_status fp8zero_make(fp8zero_sharded *sharded, const fp8zero_sharded_options *options, int64_t parameter_count,
                            const fp8zero_parameter *parameters, int group_count, const fp8optim_group *groups) {
  sharded->options = *options;
  sharded->options.resident = NULL;
  sharded->rank = fp8comm_communicator_rank(sharded->communicator);
  sharded->size = fp8comm_communicator_size(sharded->communicator);
  sharded->memory.overhead_bytes = (int64_t)sizeof(*sharded);
  sharded->last_result.nonfinite_rank = sharded->result.nonfinite_rank = -1;
  const char *path = fp8comm_communicator_device_path(sharded->communicator);
  sharded->nccl = fp8zero_on_gpu(sharded) && strcmp(path, "nccl") == 0;
  if (fp8zero_on_gpu(sharded) && strcmp(path, "none") == 0)
    return fp8zero_invalid("context is on a GPU, but the communicator has no device, expected "
                           "fp8comm_communicator_use_device() with this context before");
  FP8ZERO_TRY(check_options(options));
  switch (options->gradient.algorithm) {
  case FP8COMM_BASELINE_FP32: sharded->mean_dtype = FP8CORE_FP32; break;
  case FP8COMM_BASELINE_BF16: sharded->mean_dtype = FP8CORE_BF16; break;
  default: sharded->mean_dtype = options->gradient.wire_dtype; break;
  }
  // What else is wrong with it the reducer tells.
  if ((unsigned)sharded->mean_dtype >= FP8CORE_DTYPE_COUNT)
    return fp8zero_invalid("wire_dtype is %d, expected e4m3 or e5m2", (int)sharded->mean_dtype);
  if (parameter_count < 1 || parameter_count > INT32_MAX)
    return fp8zero_invalid("parameter_count is %lld, expected 1 to 2^31 - 1", (long long)parameter_count);
  if (!parameters) return fp8zero_invalid("parameters is NULL, expected %lld", (long long)parameter_count);
  if (group_count < 1 || group_count > 65536)
    return fp8zero_invalid("group_count is %d, expected 1 to 65536", group_count);
  if (!groups) return fp8zero_invalid("groups is NULL, expected %d", group_count);
  sharded->tensor_count = parameter_count;
  FP8ZERO_TRY(copy_parameters(sharded, parameters, group_count));
  FP8ZERO_TRY(choose_owners(sharded));
  FP8ZERO_TRY(place(sharded, options->resident));
  FP8ZERO_TRY(allocate_weights(sharded));
  FP8ZERO_TRY(make_adamw(sharded, group_count, groups));
  FP8ZERO_TRY(allocate_gradients(sharded));
  FP8ZERO_TRY(describe_gradients(sharded));
  return make_squares(sharded);
}

fp8core_status fp8zero_make_reducer(fp8zero_sharded *sharded) {
  const int64_t count = sharded->tensor_count;
  const int64_t element = (int64_t)fp8core_dtype_size(sharded->mean_dtype);
  fp8comm_gradient_options options = sharded->options.gradient;
  int64_t *elements = calloc((size_t)count, sizeof(*elements));
  int *owners = calloc((size_t)count, sizeof(*owners));
  int *bucket_of = calloc((size_t)count, sizeof(*bucket_of));
  fp8core_status status =
    elements && owners && bucket_of ? FP8CORE_OK : out_of_memory(count * (int64_t)sizeof(*elements));
  if (status == FP8CORE_OK) {
    int bucket = -1;
    int64_t bucket_bytes = 0;
    for (int64_t i = 0; i < count; i++) {
      const fp8zero_tensor *tensor = &sharded->tensors[i];
      const int64_t bytes = tensor->elements * element;
      elements[i] = tensor->elements;
      owners[i] = tensor->owner;
      // As in place().
      if (i == sharded->parts[tensor->part].first || bytes > options.bucket_bytes - bucket_bytes) {
        bucket++;
        bucket_bytes = 0;
      }
      bucket_of[i] = bucket;
      bucket_bytes += bytes;
    }
    options.owners = sharded->options.stage == 0 ? NULL : owners;
    options.bucket_of = bucket_of;
  }
  // One that has no memory tells it by its absence.
  if (status == FP8CORE_OK)
    status =
      fp8comm_gradient_create(&sharded->reducer, sharded->communicator, sharded->context, count, elements, &options);
  free(elements);
  free(owners);
  free(bucket_of);
  if (status != FP8CORE_OK) return status;
  sharded->memory.communication_bytes = (int64_t)fp8comm_gradient_memory_bytes(sharded->reducer);
  return FP8CORE_OK;
}

// --- Agreement ---

static uint64_t hash(uint64_t seed, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i++) seed = (seed ^ at[i]) * UINT64_C(0x100000001b3);
  return seed;
}

#define HASH_SEED UINT64_C(0xcbf29ce484222325)

static uint64_t hash_tensor(const fp8zero_sharded *sharded, int64_t index) {
  const fp8zero_tensor *tensor = &sharded->tensors[index];
  const int numbers[] = {tensor->dimensions,
                         tensor->group,
                         (int)tensor->weight_dtype,
                         (int)tensor->gradient_dtype,
                         tensor->part,
                         tensor->replicated,
                         sharded->parts[tensor->part].weights_stay,
                         sharded->parts[tensor->part].gradients_stay};
  uint64_t value = hash(HASH_SEED, numbers, sizeof(numbers));
  value = hash(value, tensor->shape, (size_t)tensor->dimensions * sizeof(*tensor->shape));
  return hash(value, tensor->name, strlen(tensor->name));
}

static uint64_t hash_adamw(const fp8optim_adamw_options *options) {
  const int numbers[] = {(int)options->master_dtype, (int)options->exp_avg_dtype, (int)options->exp_avg_sq_dtype,
                         options->stochastic_rounding != 0};
  return hash(hash(HASH_SEED, numbers, sizeof(numbers)), &options->seed, sizeof(options->seed));
}

static uint64_t hash_gradient(const fp8comm_gradient_options *options) {
  const int integers[] = {(int)options->algorithm, (int)options->scaling, (int)options->wire_dtype,
                          options->buckets_in_flight, options->measure_snr != 0};
  const double numbers[] = {options->saturation_threshold, options->backoff, options->growth_steps,
                            options->mu_initial,           options->mu_min,  options->mu_max,
                            (double)options->bucket_bytes};
  return hash(hash(HASH_SEED, integers, sizeof(integers)), numbers, sizeof(numbers));
}

static uint64_t hash_groups(int count, const fp8optim_group *groups) {
  uint64_t value = HASH_SEED;
  for (int i = 0; i < count; i++) {
    const double numbers[] = {groups[i].learning_rate, groups[i].beta1, groups[i].beta2, groups[i].eps,
                              groups[i].weight_decay};
    value = hash(value, numbers, sizeof(numbers));
  }
  return value;
}

// What ranks compare, in the order in which differences are told.
enum {
  TOLD_STATUS,
  TOLD_DEVICE,
  TOLD_STAGE,
  TOLD_MICRO_BATCHES,
  TOLD_WEIGHT_BUFFERS,
  TOLD_GRADIENT_BUFFERS,
  TOLD_GRADIENT_MEMORY,
  TOLD_MODEL,
  TOLD_PARAMETERS,
  TOLD_GROUPS,
  TOLD_ADAMW,
  TOLD_GRADIENT,
  TOLD_GROUP_VALUES,
  TOLD_PARAMETER_VALUES,
  TOLD
};
static const char *const told_names[TOLD] = {
  [TOLD_DEVICE] = "the context's type of device (0: CPU, 1: CUDA)",
  [TOLD_STAGE] = "stage",
  [TOLD_MICRO_BATCHES] = "micro_batches",
  [TOLD_WEIGHT_BUFFERS] = "weight_buffers",
  [TOLD_GRADIENT_BUFFERS] = "gradient_buffers",
  [TOLD_GRADIENT_MEMORY] = "gradient_memory",
  [TOLD_MODEL] = "size of model_communicator",
  [TOLD_PARAMETERS] = "parameter_count",
  [TOLD_GROUPS] = "group_count",
  [TOLD_ADAMW] = "adamw options",
  [TOLD_GRADIENT] = "gradient options",
  [TOLD_GROUP_VALUES] = "groups",
  [TOLD_PARAMETER_VALUES] = "parameters",
};

// The first parameter of which this rank was told something else than rank 0; and the lowest such rank.
static fp8core_status tell_parameter(fp8zero_sharded *sharded, int differing) {
  const int64_t count = sharded->tensor_count;
  uint64_t *hashes = calloc((size_t)count * (size_t)sharded->size, sizeof(*hashes));
  // A rank without the memory still has to take part, and cannot.
  if (!hashes) return out_of_memory(count * sharded->size * (int64_t)sizeof(*hashes));
  uint64_t *own = hashes + (size_t)count * (size_t)sharded->rank;
  for (int64_t i = 0; i < count; i++) own[i] = hash_tensor(sharded, i);
  fp8core_status status = fp8comm_all_gather(sharded->communicator, own, hashes, count, FP8COMM_INT64);
  int64_t first = 0;
  const uint64_t *theirs = hashes + (size_t)count * (size_t)differing;
  while (status == FP8CORE_OK && first + 1 < count && hashes[first] == theirs[first]) first++;
  free(hashes);
  if (status != FP8CORE_OK) return status;
  return fp8zero_fail_together(
    sharded->communicator,
    fp8zero_invalid("rank %d has another parameter %lld than rank 0 (here it is \"%s\"), expected the same name, "
                    "shape, group, dtypes, part and residence on every rank",
                    differing, (long long)first, sharded->tensors[first].name));
}

fp8core_status fp8zero_fail_together(fp8comm_communicator *communicator, fp8core_status status) {
  char message[512];
  strncpy(message, fp8core_last_error(), sizeof(message) - 1);
  message[sizeof(message) - 1] = '\0';
  (void)fp8comm_barrier(communicator);
  return fp8core_set_last_error(status, "%s", message);
}

fp8core_status fp8zero_agree(fp8zero_sharded *sharded, fp8core_status status, int group_count,
                             const fp8optim_group *groups) {
  const fp8zero_sharded_options *options = &sharded->options;
  const int size = fp8comm_communicator_size(sharded->communicator);
  const int rank = fp8comm_communicator_rank(sharded->communicator);
  char message[512] = "";
  int64_t own[TOLD] = {0};
  own[TOLD_STATUS] = (int64_t)status;
  if (status == FP8CORE_OK) {
    uint64_t parameters = HASH_SEED;
    for (int64_t i = 0; i < sharded->tensor_count; i++) {
      const uint64_t one = hash_tensor(sharded, i);
      parameters = hash(parameters, &one, sizeof(one));
    }
    own[TOLD_DEVICE] = (int64_t)sharded->device.type;
    own[TOLD_STAGE] = options->stage;
    own[TOLD_MICRO_BATCHES] = options->micro_batches;
    own[TOLD_WEIGHT_BUFFERS] = options->weight_buffers;
    own[TOLD_GRADIENT_BUFFERS] = options->gradient_buffers;
    own[TOLD_GRADIENT_MEMORY] = options->gradient_memory != 0;
    own[TOLD_MODEL] = fp8comm_communicator_size(options->model_communicator);
    own[TOLD_PARAMETERS] = sharded->tensor_count;
    own[TOLD_GROUPS] = group_count;
    own[TOLD_ADAMW] = (int64_t)hash_adamw(&options->adamw);
    own[TOLD_GRADIENT] = (int64_t)hash_gradient(&options->gradient);
    own[TOLD_GROUP_VALUES] = (int64_t)hash_groups(group_count, groups);
    own[TOLD_PARAMETER_VALUES] = (int64_t)parameters;
  } else {
    strncpy(message, fp8core_last_error(), sizeof(message) - 1);
  }
  int64_t *all = calloc((size_t)size * TOLD, sizeof(*all));
  if (!all) return out_of_memory((int64_t)size * TOLD * (int64_t)sizeof(*all));
  memcpy(all + (size_t)rank * TOLD, own, sizeof(own));
  fp8core_status told = fp8comm_all_gather(sharded->communicator, all + (size_t)rank * TOLD, all, TOLD, FP8COMM_INT64);
  int differing = -1;
  int what = 0;
  for (int r = 0; r < size && told == FP8CORE_OK && status == FP8CORE_OK; r++)
    if (all[(size_t)r * TOLD] != FP8CORE_OK)
      told =
        fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d could not create its part of the sharded optimizer: %s", r,
                               fp8core_status_string((fp8core_status)all[(size_t)r * TOLD]));
  for (int w = 1; w < TOLD && differing < 0; w++)
    for (int r = 1; r < size && differing < 0; r++)
      if (all[(size_t)r * TOLD + (size_t)w] != all[w]) {
        differing = r;
        what = w;
      }
  const int64_t theirs = differing < 0 ? 0 : all[(size_t)differing * TOLD + (size_t)what];
  const int64_t first = all[what];
  free(all);
  // What other calls have said since is less than what went wrong here.
  if (status != FP8CORE_OK && told == FP8CORE_OK) told = fp8core_set_last_error(status, "%s", message);
  // Of a broken communicator the barrier fails at once.
  if (told != FP8CORE_OK) return fp8zero_fail_together(sharded->communicator, told);
  if (differing < 0) return FP8CORE_OK;
  if (what == TOLD_PARAMETER_VALUES) return tell_parameter(sharded, differing);
  if (what >= TOLD_ADAMW)
    status =
      fp8zero_invalid("rank %d has other %s than rank 0, expected the same on every rank", differing, told_names[what]);
  else
    status = fp8zero_invalid("%s is %lld on rank %d and %lld on rank 0, expected the same on every rank",
                             told_names[what], (long long)theirs, differing, (long long)first);
  return fp8zero_fail_together(sharded->communicator, status);
}
