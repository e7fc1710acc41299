// The sharded optimizer at work: weights and gradients that come and go, reductions, steps.
#include "fp8zero/sharded.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fp8core/cast.h"
#include "internal.h"

static fp8core_status check_handle(const fp8zero_sharded *sharded, const char *call) {
  if (sharded) return FP8CORE_OK;
  return fp8zero_invalid("sharded of %s() is NULL, expected a sharded optimizer", call);
}

static fp8core_status check_index(const fp8zero_sharded *sharded, const char *call, int64_t index) {
  FP8ZERO_TRY(check_handle(sharded, call));
  if (index >= 0 && index < sharded->tensor_count) return FP8CORE_OK;
  return fp8zero_invalid("index is %lld, expected 0 to %lld", (long long)index, (long long)sharded->tensor_count - 1);
}

static fp8core_status check_part(const fp8zero_sharded *sharded, const char *call, int part) {
  FP8ZERO_TRY(check_handle(sharded, call));
  if (part >= 0 && part < sharded->part_count) return FP8CORE_OK;
  return fp8zero_invalid("part is %d, expected 0 to %d", part, sharded->part_count - 1);
}

static int is_held(const fp8zero_part *part) { return part->held[FP8ZERO_FORWARD] || part->held[FP8ZERO_BACKWARD]; }

// --- Bytes on the wire ---

static uint64_t sent(const fp8zero_sharded *sharded) { return fp8comm_communicator_bytes_sent(sharded->communicator); }

// Whether something travels that was started here.
static int in_flight(const fp8zero_sharded *sharded) {
  for (int p = 0; p < sharded->part_count; p++)
    if (sharded->parts[p].reducing || sharded->parts[p].gather) return 1;
  return 0;
}

// From where on a call counts: what travels goes on in every call that waits for other ranks, also those between.
static uint64_t count_begin(const fp8zero_sharded *sharded) {
  return sharded->counts_on ? sharded->counted : sent(sharded);
}

// Counts what was sent since, whatever came of it.
static fp8core_status count_sent(fp8zero_sharded *sharded, uint64_t before, fp8core_status status) {
  sharded->counted = sent(sharded);
  sharded->sent_bytes += sharded->counted - before;
  sharded->counts_on = in_flight(sharded);
  return status;
}

// --- Creation ---

fp8core_status fp8zero_sharded_create(fp8zero_sharded **sharded, fp8comm_communicator *communicator,
                                      fp8core_context *context, const fp8zero_sharded_options *options,
                                      int64_t parameter_count, const fp8zero_parameter *parameters, int group_count,
                                      const fp8optim_group *groups) {
  if (!sharded) return fp8zero_invalid("sharded of fp8zero_sharded_create() is NULL, expected where to put the handle");
  *sharded = NULL;
  if (!communicator)
    return fp8zero_invalid("communicator of fp8zero_sharded_create() is NULL, expected a communicator");
  if (!context) return fp8zero_invalid("context of fp8zero_sharded_create() is NULL, expected a context");
  // The options of another version may end before these.
  if (options && options->size != sizeof(*options))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8zero_sharded_options.size is %zu, expected %zu",
                                  options->size, sizeof(*options));
  const fp8zero_sharded_options chosen = options ? *options : fp8zero_sharded_options_default();
  fp8zero_sharded *made = calloc(1, sizeof(*made));
  if (!made)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory",
                                  sizeof(*made));
  made->communicator = communicator;
  made->context = context;
  made->device = fp8core_context_device(context);
  fp8core_status status = fp8zero_make(made, &chosen, parameter_count, parameters, group_count, groups);
  status = fp8zero_agree(made, status, group_count, groups);
  if (status == FP8CORE_OK) status = fp8zero_make_reducer(made);
  if (status == FP8CORE_OK)
    *sharded = made;
  else
    fp8zero_sharded_destroy(&made);
  return status;
}

// What they write to is about to go.
static void drop_gathers(fp8zero_sharded *sharded) {
  for (int p = 0; p < sharded->part_count && sharded->parts; p++)
    if (sharded->parts[p].gather) (void)fp8comm_request_wait(&sharded->parts[p].gather);
}

void fp8zero_sharded_destroy(fp8zero_sharded **sharded) {
  if (!sharded || !*sharded) return;
  fp8zero_sharded *gone = *sharded;
  *sharded = NULL;
  drop_gathers(gone);
  fp8comm_gradient_destroy(&gone->reducer);
  fp8optim_adamw_destroy(&gone->adamw);
  for (int i = 0; i < gone->weight_buffer_count && gone->weight_buffers; i++)
    (void)fp8core_free(gone->context, gone->weight_buffers[i].memory);
  for (int i = 0; i < gone->gradient_buffer_count && gone->gradient_buffers; i++)
    (void)fp8core_free(gone->context, gone->gradient_buffers[i].memory);
  (void)fp8core_free(gone->context, gone->weights);
  (void)fp8core_free(gone->context, gone->gradients);
  (void)fp8core_free(gone->context, gone->sums);
  fp8zero_free_scratch(gone);
  free(gone->weight_buffers);
  free(gone->gradient_buffers);
  free(gone->squares);
  free(gone->square_counts);
  free(gone->square_begins);
  free(gone->model_sums);
  free(gone->inputs);
  free(gone->means);
  free(gone->local_gradients);
  free(gone->owned);
  free(gone->counts);
  free(gone->parts);
  free(gone->names);
  free(gone->tensors);
  free(gone);
}

// --- Weights that come and go ---

// With what libfp8comm begins each exchange between ranks; tests/zero compares with what the transport counts.
#define HEADER_BYTES 40

static fp8core_status start_gather(fp8zero_sharded *sharded, fp8zero_part *part) {
  const uint64_t others = (uint64_t)(sharded->size - 1);
  const uint64_t bytes = (uint64_t)part->counts[sharded->rank] * others;
  sharded->gathered_bytes += bytes + (others > 0 ? HEADER_BYTES : 0);
  if (sharded->nccl) sharded->uncounted_bytes += bytes;
  return fp8comm_all_gatherv_start(sharded->communicator, part->own, part->weights, part->counts, FP8COMM_BYTE,
                                   &part->gather);
}

static fp8core_status wait_gathers(fp8zero_sharded *sharded) {
  for (int p = 0; p < sharded->part_count; p++) FP8ZERO_TRY(fp8comm_request_wait(&sharded->parts[p].gather));
  return FP8CORE_OK;
}

// The buffer that is free longest: an empty one first. NULL: all are of parts that are held. Which one it is must not
// depend on how far requests are, as all ranks have to choose alike.
static fp8zero_buffer *find_weight_buffer(const fp8zero_sharded *sharded) {
  fp8zero_buffer *found = NULL;
  for (int i = 0; i < sharded->weight_buffer_count; i++) {
    fp8zero_buffer *one = &sharded->weight_buffers[i];
    if (one->part < 0) return one;
    if (!is_held(&sharded->parts[one->part]) && (!found || one->ticket < found->ticket)) found = one;
  }
  return found;
}

static fp8core_status empty_weight_buffer(fp8zero_sharded *sharded, fp8zero_buffer *buffer) {
  if (buffer->part < 0) return FP8CORE_OK;
  fp8zero_part *part = &sharded->parts[buffer->part];
  buffer->part = -1;
  part->weights = NULL;
  return fp8comm_request_wait(&part->gather);
}

static fp8core_status gather_into(fp8zero_sharded *sharded, int index, fp8zero_buffer *buffer) {
  fp8zero_part *part = &sharded->parts[index];
  FP8ZERO_TRY(empty_weight_buffer(sharded, buffer));
  buffer->part = index;
  part->weights = buffer->memory;
  return start_gather(sharded, part);
}

static void note_use(fp8zero_sharded *sharded, int index) {
  for (int i = 0; i < sharded->weight_buffer_count; i++)
    if (sharded->weight_buffers[i].part == index) sharded->weight_buffers[i].ticket = sharded->tickets++;
}

static fp8core_status prefetch(fp8zero_sharded *sharded, int index, fp8zero_direction direction) {
  const int next = direction == FP8ZERO_FORWARD ? index + 1 : index - 1;
  if (next < 0 || next >= sharded->part_count || sharded->parts[next].weights) return FP8CORE_OK;
  fp8zero_buffer *buffer = find_weight_buffer(sharded);
  if (!buffer) return FP8CORE_OK;
  FP8ZERO_TRY(gather_into(sharded, next, buffer));
  note_use(sharded, next);
  return FP8CORE_OK;
}

// --- Reductions ---

// Adds the means of a part to the sums of the tensors that this rank owns.
static fp8core_status add_means(fp8zero_sharded *sharded, const fp8zero_part *part) {
  for (int64_t i = part->first; i < part->first + part->count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    if (tensor->local >= 0)
      FP8ZERO_TRY(fp8zero_add_mean(sharded, &sharded->means[i], tensor->elements,
                                   sharded->local_gradients[tensor->local].data, part->reductions == 1));
  }
  return FP8CORE_OK;
}

// Waits for a part's reduction and for what follows from it; its memory for gradients is then free.
static fp8core_status finish_reduction(fp8zero_sharded *sharded, int index) {
  fp8zero_part *part = &sharded->parts[index];
  if (!part->reducing) return FP8CORE_OK;
  for (int64_t i = 0; i < part->bucket_count; i++)
    FP8ZERO_TRY(fp8comm_gradient_wait_bucket(sharded->reducer, part->first_bucket + i));
  part->reducing = 0;
  if (sharded->options.micro_batches > 1) FP8ZERO_TRY(add_means(sharded, part));
  if (part->gradients_stay) return FP8CORE_OK;
  part->gradients = NULL;
  for (int i = 0; i < sharded->gradient_buffer_count; i++)
    if (sharded->gradient_buffers[i].part == index) sharded->gradient_buffers[i].part = -1;
  return FP8CORE_OK;
}

// Ends a micro-batch in which all parts were reduced.
static fp8core_status finish_round(fp8zero_sharded *sharded) {
  fp8comm_gradient_result result;
  for (int p = 0; p < sharded->part_count; p++) FP8ZERO_TRY(finish_reduction(sharded, p));
  FP8ZERO_TRY(fp8comm_gradient_wait(sharded->reducer, &result));
  sharded->result.nonfinite_tensors += result.nonfinite_tensors;
  if (sharded->result.nonfinite_rank < 0) sharded->result.nonfinite_rank = result.nonfinite_rank;
  sharded->rounds++;
  sharded->round_parts = 0;
  return FP8CORE_OK;
}

static fp8zero_buffer *free_gradient_buffer(const fp8zero_sharded *sharded) {
  for (int i = 0; i < sharded->gradient_buffer_count; i++)
    if (sharded->gradient_buffers[i].part < 0) return &sharded->gradient_buffers[i];
  return NULL;
}

// The part whose buffer is reduced since longest; -1: none is.
static int oldest_reduction(const fp8zero_sharded *sharded) {
  int found = -1;
  for (int i = 0; i < sharded->gradient_buffer_count; i++) {
    const int index = sharded->gradient_buffers[i].part;
    if (index < 0 || !sharded->parts[index].reducing) continue;
    if (found < 0 || sharded->parts[index].ticket < sharded->parts[found].ticket) found = index;
  }
  return found;
}

// Whether a part can get memory for its gradients, without waiting.
static fp8core_status check_gradient_memory(const fp8zero_sharded *sharded, int index) {
  const fp8zero_part *part = &sharded->parts[index];
  if (part->writable || part->gradients_stay) return FP8CORE_OK;
  if (free_gradient_buffer(sharded) || oldest_reduction(sharded) >= 0) return FP8CORE_OK;
  return fp8zero_invalid("part %d needs memory for gradients while %d parts were acquired for backward and not "
                         "reduced, expected fewer, or more gradient_buffers",
                         index, sharded->gradient_buffer_count);
}

static fp8core_status give_gradient_memory(fp8zero_sharded *sharded, int index) {
  fp8zero_part *part = &sharded->parts[index];
  // Of the micro-batch before.
  FP8ZERO_TRY(finish_reduction(sharded, index));
  if (part->writable) return FP8CORE_OK;
  if (!part->gradients_stay) {
    if (!free_gradient_buffer(sharded)) FP8ZERO_TRY(finish_reduction(sharded, oldest_reduction(sharded)));
    fp8zero_buffer *buffer = free_gradient_buffer(sharded);
    buffer->part = index;
    part->gradients = buffer->memory;
  }
  part->writable = 1;
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_gradient(const fp8zero_sharded *sharded, int64_t index, void **data) {
  FP8ZERO_TRY(check_index(sharded, "fp8zero_sharded_gradient", index));
  if (!data) return fp8zero_invalid("data of fp8zero_sharded_gradient() is NULL, expected where to put the address");
  const fp8zero_tensor *tensor = &sharded->tensors[index];
  const fp8zero_part *part = &sharded->parts[tensor->part];
  if (!sharded->options.gradient_memory)
    return fp8zero_invalid("the gradient of \"%s\" is in memory of the model's own, as gradient_memory is 0",
                           tensor->name);
  if (!part->writable)
    return fp8zero_invalid("part %d has no memory for the gradient of \"%s\", expected fp8zero_sharded_acquire() for "
                           "backward before it and no reduction since",
                           tensor->part, tensor->name);
  *data = tensor->elements > 0 ? part->gradients + tensor->gradient_offset : NULL;
  return FP8CORE_OK;
}

// Whether a mean is written to where the model's own gradient is.
static int means_are_in_place(const fp8zero_sharded *sharded) {
  return !sharded->options.gradient_memory && (sharded->options.stage < 2 || sharded->options.micro_batches > 1);
}

static fp8core_status check_place(const fp8zero_sharded *sharded, const fp8zero_tensor *tensor,
                                  const fp8core_tensor *gradient) {
  const int64_t bytes = tensor->elements * (int64_t)fp8core_dtype_size(gradient->dtype);
  if (fp8core_dtype_size(gradient->dtype) < fp8core_dtype_size(sharded->mean_dtype))
    return fp8zero_invalid(
      "the gradient of parameter \"%s\" is %s, expected at least the %zu bytes of %s, whose mean takes "
      "its place",
      tensor->name, fp8core_dtype_name(gradient->dtype), fp8core_dtype_size(sharded->mean_dtype),
      fp8core_dtype_name(sharded->mean_dtype));
  if (fp8core_tensor_span_bytes(gradient) != bytes)
    return fp8zero_invalid(
      "the gradient of parameter \"%s\" has a row stride of %lld, expected contiguous memory, as its "
      "mean takes its place",
      tensor->name, (long long)gradient->row_stride);
  return FP8CORE_OK;
}

static fp8core_status check_gradients(const fp8zero_sharded *sharded, const fp8zero_part *part,
                                      const fp8core_tensor *gradients) {
  for (int64_t i = 0; i < part->count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[part->first + i];
    const int64_t elements = fp8core_tensor_elements(&gradients[i]);
    if (elements < 0) {
      char reason[256] = "";
      strncpy(reason, fp8core_last_error(), sizeof(reason) - 1);
      return fp8zero_invalid("the gradient of parameter \"%s\": %s", tensor->name, reason);
    }
    if (elements != tensor->elements)
      return fp8zero_invalid("the gradient of parameter \"%s\" has %lld elements, expected %lld", tensor->name,
                             (long long)elements, (long long)tensor->elements);
    const fp8core_device device = gradients[i].device;
    if (device.type != sharded->device.type || device.index != sharded->device.index)
      return fp8zero_invalid("the gradient of parameter \"%s\" is on device %d:%d, expected the context's, %d:%d "
                             "(0: CPU, 1: CUDA)",
                             tensor->name, (int)device.type, device.index, (int)sharded->device.type,
                             sharded->device.index);
    if (elements > 0 && means_are_in_place(sharded)) FP8ZERO_TRY(check_place(sharded, tensor, &gradients[i]));
  }
  return FP8CORE_OK;
}

static fp8core_status reduce(fp8zero_sharded *sharded, int index, const fp8core_tensor *gradients) {
  fp8zero_part *part = &sharded->parts[index];
  // All of the micro-batch before: the reducer wants to be waited for.
  if (part->reductions > sharded->rounds) FP8ZERO_TRY(finish_round(sharded));
  for (int64_t i = part->first; i < part->first + part->count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    sharded->inputs[i] = gradients[i - part->first];
    if (tensor->elements == 0) continue;
    if (means_are_in_place(sharded))
      sharded->means[i].data = gradients[i - part->first].data;
    else if (sharded->options.micro_batches > 1)
      sharded->means[i].data = part->gradients + tensor->gradient_offset;
  }
  part->reductions++;
  part->reducing = 1;
  part->ticket = sharded->tickets++;
  if (sharded->options.stage >= 2 && sharded->options.gradient_memory) part->writable = 0;
  sharded->round_parts++;
  for (int64_t i = 0; i < part->bucket_count; i++)
    FP8ZERO_TRY(fp8comm_gradient_start(sharded->reducer, part->first_bucket + i, sharded->inputs, sharded->means));
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_reduce(fp8zero_sharded *sharded, int index, const fp8core_tensor *gradients) {
  FP8ZERO_TRY(check_part(sharded, "fp8zero_sharded_reduce", index));
  const fp8zero_part *part = &sharded->parts[index];
  if (!gradients) return fp8zero_invalid("gradients is NULL, expected %lld tensors", (long long)part->count);
  if (part->reductions >= sharded->options.micro_batches)
    return fp8zero_invalid("part %d was reduced %d times already in this step, expected micro_batches, %d, at most",
                           index, part->reductions, sharded->options.micro_batches);
  if (part->reductions > sharded->rounds && sharded->round_parts < sharded->part_count)
    return fp8zero_invalid("part %d was reduced already in micro-batch %d, of which %d of %d parts were, expected the "
                           "others first",
                           index, sharded->rounds, sharded->round_parts, sharded->part_count);
  if (!part->writable)
    return fp8zero_invalid(
      "part %d has no memory for gradients, expected fp8zero_sharded_acquire() for backward before "
      "its reduction",
      index);
  FP8ZERO_TRY(check_gradients(sharded, part, gradients));
  const uint64_t before = count_begin(sharded);
  return count_sent(sharded, before, reduce(sharded, index, gradients));
}

// --- Parts ---

static fp8core_status check_published(const fp8zero_sharded *sharded, const char *call) {
  if (!sharded->unpublished) return FP8CORE_OK;
  return fp8zero_invalid("%s() after weights were set, expected fp8zero_sharded_publish() before it", call);
}

static fp8core_status acquire(fp8zero_sharded *sharded, int index, fp8zero_direction direction,
                              fp8zero_buffer *buffer) {
  fp8zero_part *part = &sharded->parts[index];
  if (buffer) FP8ZERO_TRY(gather_into(sharded, index, buffer));
  part->held[direction] = 1;
  note_use(sharded, index);
  // Started before this rank waits, so that it travels meanwhile.
  if (sharded->options.stage == 3) FP8ZERO_TRY(prefetch(sharded, index, direction));
  if (direction == FP8ZERO_BACKWARD && sharded->options.stage >= 2) FP8ZERO_TRY(give_gradient_memory(sharded, index));
  return fp8comm_request_wait(&part->gather);
}

fp8core_status fp8zero_sharded_acquire(fp8zero_sharded *sharded, int index, fp8zero_direction direction) {
  FP8ZERO_TRY(check_part(sharded, "fp8zero_sharded_acquire", index));
  if (direction != FP8ZERO_FORWARD && direction != FP8ZERO_BACKWARD)
    return fp8zero_invalid("direction is %d, expected 0 (forward) or 1 (backward)", (int)direction);
  FP8ZERO_TRY(check_published(sharded, "fp8zero_sharded_acquire"));
  const fp8zero_part *part = &sharded->parts[index];
  if (part->held[direction])
    return fp8zero_invalid("part %d is held for %s already, expected fp8zero_sharded_release() first", index,
                           direction == FP8ZERO_FORWARD ? "forward" : "backward");
  fp8zero_buffer *buffer = NULL;
  if (!part->weights) {
    buffer = find_weight_buffer(sharded);
    if (!buffer)
      return fp8zero_invalid("part %d needs memory for weights while %d parts are held, expected fewer, or more "
                             "weight_buffers",
                             index, sharded->weight_buffer_count);
  }
  if (direction == FP8ZERO_BACKWARD && sharded->options.stage >= 2) FP8ZERO_TRY(check_gradient_memory(sharded, index));
  const uint64_t before = count_begin(sharded);
  return count_sent(sharded, before, acquire(sharded, index, direction, buffer));
}

fp8core_status fp8zero_sharded_release(fp8zero_sharded *sharded, int index, fp8zero_direction direction) {
  FP8ZERO_TRY(check_part(sharded, "fp8zero_sharded_release", index));
  if (direction != FP8ZERO_FORWARD && direction != FP8ZERO_BACKWARD)
    return fp8zero_invalid("direction is %d, expected 0 (forward) or 1 (backward)", (int)direction);
  fp8zero_part *part = &sharded->parts[index];
  if (!part->held[direction])
    return fp8zero_invalid("part %d is not held for %s, expected fp8zero_sharded_acquire() first", index,
                           direction == FP8ZERO_FORWARD ? "forward" : "backward");
  part->held[direction] = 0;
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_weight(const fp8zero_sharded *sharded, int64_t index, fp8core_tensor *tensor) {
  FP8ZERO_TRY(check_index(sharded, "fp8zero_sharded_weight", index));
  if (!tensor) return fp8zero_invalid("tensor of fp8zero_sharded_weight() is NULL, expected where to put it");
  const fp8zero_tensor *one = &sharded->tensors[index];
  const fp8zero_part *part = &sharded->parts[one->part];
  if (!part->weights_stay && !is_held(part))
    return fp8zero_invalid("the weight of \"%s\" is of part %d, which is not held, expected fp8zero_sharded_acquire()",
                           one->name, one->part);
  *tensor = fp8core_tensor_create(one->elements > 0 ? part->weights + one->weight_offset : NULL, one->weight_dtype,
                                  one->dimensions, one->shape);
  tensor->device = sharded->device;
  tensor->scale_inverse = (const float *)(const void *)(part->weights + one->scale_offset);
  return FP8CORE_OK;
}

static fp8core_status progress(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(fp8comm_gradient_progress(sharded->reducer, NULL));
  for (int p = 0; p < sharded->part_count; p++) {
    int done;
    if (sharded->parts[p].gather) FP8ZERO_TRY(fp8comm_request_test(&sharded->parts[p].gather, &done));
  }
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_progress(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_progress"));
  const uint64_t before = count_begin(sharded);
  return count_sent(sharded, before, progress(sharded));
}

fp8core_status fp8zero_sharded_wait(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_wait"));
  const uint64_t before = count_begin(sharded);
  return count_sent(sharded, before, wait_gathers(sharded));
}

// --- Steps ---

static fp8core_status check_none_held(const fp8zero_sharded *sharded, const char *call) {
  for (int p = 0; p < sharded->part_count; p++)
    if (is_held(&sharded->parts[p]))
      return fp8zero_invalid("%s() while part %d is held, expected fp8zero_sharded_release() first", call, p);
  return FP8CORE_OK;
}

static fp8core_status check_reduced(const fp8zero_sharded *sharded) {
  for (int p = 0; p < sharded->part_count; p++)
    if (sharded->parts[p].reductions != sharded->options.micro_batches)
      return fp8zero_invalid("part %d was reduced %d times in this step, expected micro_batches, %d", p,
                             sharded->parts[p].reductions, sharded->options.micro_batches);
  return FP8CORE_OK;
}

static fp8core_status check_step_options(const fp8optim_step_options *options) {
  if (!options) return FP8CORE_OK;
  if (options->size != sizeof(*options))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8optim_step_options.size is %zu, expected %zu",
                                  options->size, sizeof(*options));
  if (!(isfinite(options->max_norm) && options->max_norm >= 0.0f))
    return fp8zero_invalid("max_norm is %g, expected a finite number of at least 0", (double)options->max_norm);
  if (!(isfinite(options->loss_scale) && options->loss_scale > 0.0f))
    return fp8zero_invalid("loss_scale is %g, expected a finite positive number", (double)options->loss_scale);
  return FP8CORE_OK;
}

// What ranks decide on together before a step: the sum of squares of all gradients, whether any is not finite, and
// whether a rank could not measure its own: where, and its number, or -1.
typedef struct verdict {
  double sum;
  int nonfinite;
  const char *where;
  int failed;
} verdict;

// What a rank tells beside its squares.
enum { TELLS_NOTHING = 0, TELLS_NONFINITE = 1, TELLS_FAILURE = 2 };

static double told(const verdict *one) {
  return one->failed >= 0 ? TELLS_FAILURE : one->nonfinite ? TELLS_NONFINITE : TELLS_NOTHING;
}

static void hear(verdict *one, double told_by_rank, const char *where, int rank) {
  if (told_by_rank == TELLS_NONFINITE) one->nonfinite = 1;
  if (told_by_rank != TELLS_FAILURE || one->failed >= 0) return;
  one->failed = rank;
  one->where = where;
}

// Whether a tensor's squares count here, or on another rank of the model.
static int counts(const fp8zero_sharded *sharded, const fp8zero_tensor *tensor) {
  return !tensor->replicated || fp8comm_communicator_rank(sharded->options.model_communicator) == 0;
}

// The squares of all owners, in the order of tensors.
static fp8core_status exchange_squares(fp8zero_sharded *sharded, verdict *common) {
  double *own = sharded->squares + sharded->square_begins[sharded->rank];
  own[sharded->square_counts[sharded->rank] - 1] = told(common);
  FP8ZERO_TRY(fp8comm_all_gatherv(sharded->communicator, own, sharded->squares, sharded->square_counts, FP8COMM_FP64));
  for (int rank = 0; rank < sharded->size; rank++)
    hear(common, sharded->squares[sharded->square_begins[rank] + sharded->square_counts[rank] - 1], "", rank);
  // Each rank's are in the order of tensors too: next[rank] of them are done with, in the end as many as there are.
  int64_t *next = sharded->owned;
  memset(next, 0, (size_t)sharded->size * sizeof(*next));
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    const double square = sharded->squares[sharded->square_begins[tensor->owner] + next[tensor->owner]++];
    if (counts(sharded, tensor)) common->sum += square;
  }
  return FP8CORE_OK;
}

// The sums of all ranks of the model, in their order.
static fp8core_status exchange_sums(fp8zero_sharded *sharded, verdict *common) {
  fp8comm_communicator *model = sharded->options.model_communicator;
  double *sums = sharded->model_sums;
  double *own = sums + 2 * (ptrdiff_t)fp8comm_communicator_rank(model);
  own[0] = common->sum;
  own[1] = told(common);
  FP8ZERO_TRY(fp8comm_all_gather(model, own, sums, 2, FP8COMM_FP64));
  common->sum = 0.0;
  for (int rank = 0; rank < fp8comm_communicator_size(model); rank++) {
    common->sum += sums[2 * rank];
    hear(common, sums[2 * rank + 1], " of the model's communicator", rank);
  }
  return FP8CORE_OK;
}

// Measures this rank's gradients, and decides with the others. Only a failure of a communicator ends it early, so that
// every rank hears of what another one cannot do.
static fp8core_status measure(fp8zero_sharded *sharded, verdict *common) {
  const int all = sharded->options.stage == 0;
  double *squares = sharded->squares + (all ? 0 : sharded->square_begins[sharded->rank]);
  char message[512] = "";
  const verdict nothing = {0.0, 0, "", -1};
  *common = nothing;
  const fp8core_status measured =
    fp8optim_adamw_step_measure(sharded->adamw, sharded->local_gradients, squares, &common->nonfinite);
  if (measured != FP8CORE_OK) {
    strncpy(message, fp8core_last_error(), sizeof(message) - 1);
    common->nonfinite = 0;
    common->failed = sharded->rank;
  }
  for (int64_t i = 0; i < sharded->tensor_count && all; i++)
    if (counts(sharded, &sharded->tensors[i])) common->sum += squares[i];
  const uint64_t before = sent(sharded);
  if (!all) FP8ZERO_TRY(exchange_squares(sharded, common));
  if (sharded->options.model_communicator) FP8ZERO_TRY(exchange_sums(sharded, common));
  sharded->control_bytes += sent(sharded) - before;
  if (common->failed < 0) return FP8CORE_OK;
  fp8core_status status = measured;
  if (measured != FP8CORE_OK)
    (void)fp8core_set_last_error(measured, "%s", message);
  else
    status =
      fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d%s could not take the step, whose gradients it measured",
                             common->failed, common->where);
  if (!all) status = fp8zero_fail_together(sharded->communicator, status);
  if (sharded->options.model_communicator) status = fp8zero_fail_together(sharded->options.model_communicator, status);
  return status;
}

static fp8core_status copy_scale(const fp8zero_sharded *sharded, void *to, const float *from) {
  if (!fp8zero_on_gpu(sharded)) {
    memcpy(to, from, sizeof(*from));
    return FP8CORE_OK;
  }
  // On the stream: fp8core_copy() would wait for the update of the part. Scales are finite, so their bits stay.
  fp8core_tensor source = fp8core_tensor_create((void *)(uintptr_t)from, FP8CORE_FP32, 0, NULL);
  source.device = sharded->device;
  fp8core_tensor target = source;
  target.data = to;
  return fp8core_cast(sharded->context, NULL, &source, &target);
}

// The scales of this rank's weights to where they travel from.
static fp8core_status place_scales(fp8zero_sharded *sharded, const fp8zero_part *part) {
  for (int64_t i = part->first; i < part->first + part->count; i++) {
    const fp8zero_tensor *tensor = &sharded->tensors[i];
    fp8core_tensor weight;
    if (tensor->local < 0) continue;
    FP8ZERO_TRY(fp8optim_adamw_state(sharded->adamw, tensor->local, FP8OPTIM_WEIGHT, &weight));
    unsigned char *scale =
      part->weights_stay ? part->weights + tensor->scale_offset : part->own + (tensor->scale_offset - part->own_offset);
    FP8ZERO_TRY(copy_scale(sharded, scale, weight.scale_inverse));
  }
  return FP8CORE_OK;
}

// Sends this rank's weights of a part, where they stay; else drops what was gathered before.
static fp8core_status publish_part(fp8zero_sharded *sharded, int index) {
  fp8zero_part *part = &sharded->parts[index];
  FP8ZERO_TRY(place_scales(sharded, part));
  return part->weights_stay && sharded->options.stage > 0 ? start_gather(sharded, part) : FP8CORE_OK;
}

static fp8core_status empty_weight_buffers(fp8zero_sharded *sharded) {
  for (int i = 0; i < sharded->weight_buffer_count; i++)
    FP8ZERO_TRY(empty_weight_buffer(sharded, &sharded->weight_buffers[i]));
  return FP8CORE_OK;
}

static void end_step(fp8zero_sharded *sharded) {
  sharded->last_result = sharded->result;
  sharded->result.nonfinite_tensors = 0;
  sharded->result.nonfinite_rank = -1;
  sharded->rounds = sharded->round_parts = 0;
  for (int p = 0; p < sharded->part_count; p++) sharded->parts[p].reductions = 0;
}

static void find_means(fp8zero_sharded *sharded) {
  if (sharded->options.micro_batches > 1) return;
  for (int64_t i = 0; i < sharded->tensor_count; i++) {
    if (sharded->tensors[i].local < 0) continue;
    fp8core_tensor *gradient = &sharded->local_gradients[sharded->tensors[i].local];
    gradient->data = sharded->means[i].data;
    gradient->scale_inverse = sharded->means[i].scale_inverse;
  }
}

static fp8core_status update(fp8zero_sharded *sharded, const fp8optim_step_options *options,
                             fp8optim_step_report *report) {
  verdict common;
  find_means(sharded);
  FP8ZERO_TRY(measure(sharded, &common));
  FP8ZERO_TRY(fp8optim_adamw_step_begin(sharded->adamw, common.sum, common.nonfinite, options, report));
  if (!report->skipped) {
    // In the order in which the next forward pass needs them.
    FP8ZERO_TRY(empty_weight_buffers(sharded));
    for (int p = 0; p < sharded->part_count; p++) {
      const fp8zero_part *part = &sharded->parts[p];
      FP8ZERO_TRY(fp8optim_adamw_step_update(sharded->adamw, part->local_first, part->local_count));
      FP8ZERO_TRY(publish_part(sharded, p));
    }
    if (sharded->local_count == 0) FP8ZERO_TRY(fp8optim_adamw_step_update(sharded->adamw, 0, 1));
  }
  return fp8optim_adamw_step_end(sharded->adamw, report);
}

static fp8core_status step(fp8zero_sharded *sharded, const fp8optim_step_options *options,
                           fp8optim_step_report *report) {
  // Weights that still travel must not change.
  FP8ZERO_TRY(wait_gathers(sharded));
  FP8ZERO_TRY(finish_round(sharded));
  FP8ZERO_TRY(update(sharded, options, report));
  end_step(sharded);
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_step(fp8zero_sharded *sharded, const fp8optim_step_options *options,
                                    fp8optim_step_report *report) {
  fp8optim_step_report found;
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_step"));
  FP8ZERO_TRY(check_step_options(options));
  FP8ZERO_TRY(check_published(sharded, "fp8zero_sharded_step"));
  FP8ZERO_TRY(check_none_held(sharded, "fp8zero_sharded_step"));
  FP8ZERO_TRY(check_reduced(sharded));
  const uint64_t before = count_begin(sharded);
  FP8ZERO_TRY(count_sent(sharded, before, step(sharded, options, &found)));
  if (report) *report = found;
  return FP8CORE_OK;
}

static fp8core_status skip(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(finish_round(sharded));
  end_step(sharded);
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_skip(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_skip"));
  FP8ZERO_TRY(check_none_held(sharded, "fp8zero_sharded_skip"));
  FP8ZERO_TRY(check_reduced(sharded));
  const uint64_t before = count_begin(sharded);
  return count_sent(sharded, before, skip(sharded));
}

fp8core_status fp8zero_sharded_reduction(const fp8zero_sharded *sharded, fp8comm_gradient_result *result) {
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_reduction"));
  if (!result) return fp8zero_invalid("result of fp8zero_sharded_reduction() is NULL, expected where to put it");
  *result = sharded->last_result;
  return FP8CORE_OK;
}

// --- States from outside ---

fp8core_status fp8zero_sharded_set_master(fp8zero_sharded *sharded, int64_t index, const fp8core_tensor *source) {
  FP8ZERO_TRY(check_index(sharded, "fp8zero_sharded_set_master", index));
  FP8ZERO_TRY(check_none_held(sharded, "fp8zero_sharded_set_master"));
  const uint64_t before = count_begin(sharded);
  // Setting the master writes the weight, too.
  FP8ZERO_TRY(count_sent(sharded, before, wait_gathers(sharded)));
  sharded->unpublished = 1;
  const int64_t local = sharded->tensors[index].local;
  return local < 0 ? FP8CORE_OK : fp8optim_adamw_set_state(sharded->adamw, local, FP8OPTIM_MASTER, source);
}

static fp8core_status publish(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(wait_gathers(sharded));
  FP8ZERO_TRY(empty_weight_buffers(sharded));
  for (int p = 0; p < sharded->part_count; p++) FP8ZERO_TRY(publish_part(sharded, p));
  return wait_gathers(sharded);
}

fp8core_status fp8zero_sharded_publish(fp8zero_sharded *sharded) {
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_publish"));
  FP8ZERO_TRY(check_none_held(sharded, "fp8zero_sharded_publish"));
  const uint64_t before = count_begin(sharded);
  FP8ZERO_TRY(count_sent(sharded, before, publish(sharded)));
  sharded->unpublished = 0;
  return FP8CORE_OK;
}

// --- What it is made of ---

int64_t fp8zero_sharded_parameters(const fp8zero_sharded *sharded) { return sharded ? sharded->tensor_count : 0; }

int fp8zero_sharded_parts(const fp8zero_sharded *sharded) { return sharded ? sharded->part_count : 0; }

fp8core_status fp8zero_sharded_part(const fp8zero_sharded *sharded, int part, int64_t *first, int64_t *count) {
  FP8ZERO_TRY(check_part(sharded, "fp8zero_sharded_part", part));
  if (!first || !count) return fp8zero_invalid("first or count is NULL, expected places for both");
  *first = sharded->parts[part].first;
  *count = sharded->parts[part].count;
  return FP8CORE_OK;
}

int fp8zero_sharded_owner(const fp8zero_sharded *sharded, int64_t index) {
  return sharded && index >= 0 && index < sharded->tensor_count ? sharded->tensors[index].owner : -1;
}

int64_t fp8zero_sharded_local(const fp8zero_sharded *sharded, int64_t index) {
  return sharded && index >= 0 && index < sharded->tensor_count ? sharded->tensors[index].local : -1;
}

fp8optim_adamw *fp8zero_sharded_adamw(const fp8zero_sharded *sharded) { return sharded ? sharded->adamw : NULL; }

fp8comm_gradient_reducer *fp8zero_sharded_reducer(const fp8zero_sharded *sharded) {
  return sharded ? sharded->reducer : NULL;
}

fp8core_status fp8zero_sharded_memory(const fp8zero_sharded *sharded, fp8zero_memory *memory) {
  fp8optim_memory adamw;
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_memory"));
  if (!memory) return fp8zero_invalid("memory of fp8zero_sharded_memory() is NULL, expected where to put it");
  FP8ZERO_TRY(fp8optim_adamw_memory(sharded->adamw, &adamw));
  *memory = sharded->memory;
  memory->master_bytes = adamw.master_bytes;
  memory->exp_avg_bytes = adamw.exp_avg_bytes;
  memory->exp_avg_sq_bytes = adamw.exp_avg_sq_bytes;
  memory->overhead_bytes += adamw.overhead_bytes;
  memory->total_bytes = memory->weight_bytes + memory->weight_buffer_bytes + memory->gradient_bytes +
                        memory->gradient_buffer_bytes + memory->mean_gradient_bytes + memory->master_bytes +
                        memory->exp_avg_bytes + memory->exp_avg_sq_bytes + memory->communication_bytes +
                        memory->overhead_bytes;
  return FP8CORE_OK;
}

fp8core_status fp8zero_sharded_traffic(const fp8zero_sharded *sharded, fp8zero_traffic *traffic) {
  FP8ZERO_TRY(check_handle(sharded, "fp8zero_sharded_traffic"));
  if (!traffic) return fp8zero_invalid("traffic of fp8zero_sharded_traffic() is NULL, expected where to put it");
  const uint64_t others = sharded->gathered_bytes + sharded->control_bytes;
  traffic->weight_bytes = sharded->gathered_bytes;
  traffic->control_bytes = sharded->control_bytes;
  const uint64_t all = sharded->sent_bytes + sharded->uncounted_bytes;
  traffic->gradient_bytes = all > others ? all - others : 0;
  return FP8CORE_OK;
}
