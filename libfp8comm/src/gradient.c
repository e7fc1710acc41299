// The gradient all-reduce: buckets of tensors, each a request whose steps are messages and calls (gradient_schedule.c).
#include <math.h>
#include <string.h>

#include "gradient_internal.h"

int64_t fp8comm_gradient_buckets(const fp8comm_gradient_reducer *reducer) {
  return reducer ? reducer->bucket_count : 0;
}

static fp8core_status check_bucket(const fp8comm_gradient_reducer *reducer, int64_t index) {
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a reducer");
  if (index < 0 || index >= reducer->bucket_count)
    return fp8comm_invalid("bucket is %lld, expected 0 to %lld", (long long)index,
                           (long long)(reducer->bucket_count - 1));
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_bucket(const fp8comm_gradient_reducer *reducer, int64_t index, int64_t *first,
                                       int64_t *count_of) {
  FP8COMM_TRY(check_bucket(reducer, index));
  if (!first || !count_of) return fp8comm_invalid("first or count is NULL, expected places for both");
  *first = reducer->buckets[index].first;
  *count_of = reducer->buckets[index].count;
  return FP8CORE_OK;
}

static fp8core_status check_tensor(const fp8comm_gradient_reducer *reducer, const char *name, int64_t index,
                                   const fp8core_tensor *tensor, int64_t elements) {
  const int64_t found = fp8core_tensor_elements(tensor);
  if (found < 0) return fp8comm_invalid("%s[%lld]: %s", name, (long long)index, fp8core_last_error());
  if (found != elements)
    return fp8comm_invalid("%s[%lld] has %lld elements, expected the %lld of the reducer", name, (long long)index,
                           (long long)found, (long long)elements);
  if (reducer->cuda && (tensor->device.type != FP8CORE_DEVICE_CUDA || tensor->device.index != reducer->cuda->device))
    return fp8comm_invalid("%s[%lld] is %s, expected the memory of CUDA device %d", name, (long long)index,
                           tensor->device.type == FP8CORE_DEVICE_CUDA ? "on another GPU" : "in host memory",
                           reducer->cuda->device);
  if (!reducer->cuda && tensor->device.type != FP8CORE_DEVICE_CPU)
    return fp8comm_invalid("%s[%lld] is on a GPU, expected host memory", name, (long long)index);
  return FP8CORE_OK;
}

static fp8core_status check_bucket_tensors(const fp8comm_gradient_reducer *reducer, const gradient_bucket *bucket,
                                           const fp8core_tensor *inputs, const fp8core_tensor *outputs) {
  for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
    const fp8core_dtype dtype = outputs[i].dtype;
    FP8COMM_TRY(check_tensor(reducer, "inputs", i, &inputs[i], reducer->tensors[i].elements));
    if (!is_for(reducer, &reducer->tensors[i])) continue;
    // What scales it comes with is not looked at.
    fp8core_tensor output = outputs[i];
    output.scale = output.scale_inverse = NULL;
    FP8COMM_TRY(check_tensor(reducer, "outputs", i, &output, reducer->tensors[i].elements));
    if (dtype != FP8CORE_FP32 && dtype != FP8CORE_BF16 && dtype != FP8CORE_FP16 && dtype != reducer->wire)
      return fp8comm_invalid("outputs[%lld] is %s, expected fp32, bf16, fp16%s%s", (long long)i,
                             fp8core_dtype_name(dtype), reducer->scaled ? " or the wire's " : "",
                             reducer->scaled ? fp8core_dtype_name(reducer->wire) : "");
  }
  return FP8CORE_OK;
}

static fp8core_status check_step(const fp8comm_gradient_reducer *reducer, const fp8core_tensor *inputs,
                                 const fp8core_tensor *outputs) {
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a reducer");
  if (!inputs) return fp8comm_invalid("inputs is NULL, expected %lld tensors", (long long)reducer->tensor_count);
  if (!outputs) return fp8comm_invalid("outputs is NULL, expected %lld tensors", (long long)reducer->tensor_count);
  return fp8comm_check(reducer->communicator);
}

// The slot that was started first; NULL: none is in flight.
static gradient_slot *oldest(const fp8comm_gradient_reducer *reducer) {
  gradient_slot *found = NULL;
  for (int i = 0; i < reducer->slot_count; i++) {
    gradient_slot *one = &reducer->slots[i];
    if (one->request && (!found || one->ticket < found->ticket)) found = one;
  }
  return found;
}

static void take_tensors(fp8comm_gradient_reducer *reducer, const gradient_bucket *bucket, const fp8core_tensor *inputs,
                         fp8core_tensor *outputs) {
  for (int64_t i = bucket->first; i < bucket->first + bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = &reducer->tensors[i];
    const double mu = tensor->mu;
    tensor->input = inputs[i];
    // Its scale may be the one that this step is going to write: what it is now counts.
    tensor->given_scale_inverse = inputs[i].scale_inverse;
    if (reducer->cuda) {
      tensor->input.scale_inverse = &reducer->device_records[i].input_scale_inverse;
    } else {
      tensor->input_scale_inverse = inputs[i].scale_inverse ? *inputs[i].scale_inverse : 1.0f;
      tensor->input.scale_inverse = &tensor->input_scale_inverse;
    }
    tensor->known_amax = reducer->scaled && reducer->options.inputs_have_amax ? inputs[i].amax : NULL;
    if (tensor->known_amax && !reducer->cuda) tensor->known_amax_value = *tensor->known_amax;
    tensor->input.amax = NULL;
    if (is_for(reducer, tensor)) {
      const int narrow = reducer->scaled && outputs[i].dtype == reducer->wire;
      const device_record *record = reducer->cuda ? &reducer->device_records[i] : NULL;
      outputs[i].scale = !narrow ? NULL : record ? &record->output_scale : &tensor->output_scale;
      outputs[i].scale_inverse = !narrow  ? NULL
                                 : record ? &record->output_scale_inverse
                                          : &tensor->output_scale_inverse;
      tensor->output = outputs[i];
    }
    memset(&tensor->statistics, 0, sizeof(tensor->statistics));
    tensor->statistics.elements = tensor->elements;
    tensor->statistics.mu = tensor->statistics.next_mu = mu;
    tensor->statistics.snr_db = NAN;
    tensor->largest_sum = 0;
    tensor->found_amax = 0;
  }
}

// Notes a bucket's failure, so that no later wait takes what is left for the whole.
static fp8core_status note(fp8comm_gradient_reducer *reducer, fp8core_status status) {
  if (status != FP8CORE_OK) reducer->failed = 1;
  return status;
}

// What the rank `distance` before this one contributes to this rank's part.
static const unsigned char *contribution_in_window(const gradient_slot *slot, int distance) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const int size = reducer->communicator->size, from = (reducer->communicator->rank + size - distance) % size;
  return reducer->window->ranks[from] + slot->window_offset + own_begin(slot) * reducer->element;
}

static fp8core_status start(fp8comm_gradient_reducer *reducer, int64_t index, const fp8core_tensor *inputs,
                            fp8core_tensor *outputs) {
  gradient_bucket *bucket = &reducer->buckets[index];
  // In turns, so that a bucket is in the same slot on every rank.
  gradient_slot *slot = &reducer->slots[reducer->tickets % (uint64_t)reducer->slot_count];
  if (slot->request) FP8COMM_TRY(note(reducer, fp8comm_request_wait(&slot->request)));
  if (!reducer->in_progress) {
    reducer->in_progress = 1;
    reducer->bytes_before = fp8comm_communicator_bytes_sent(reducer->communicator);
    reducer->nonfinite_tensors = 0;
    reducer->nonfinite_rank = -1;
  }
  FP8COMM_TRY(fp8comm_gradient_begin(reducer, bucket, &slot->request));
  take_tensors(reducer, bucket, inputs, outputs);
  slot->bucket = bucket;
  if (reducer->keeps) {
    slot->stride = kept_stride(own_count(slot));
    slot->sources[0] = code_at(slot, own_begin(slot));
    for (int i = 1; i < reducer->communicator->size; i++)
      slot->sources[i] =
        reducer->window ? contribution_in_window(slot, i) : slot->received + (size_t)(i - 1) * slot->stride;
  }
  slot->ticket = reducer->tickets++;
  bucket->started = 1;
  const fp8core_status status = reducer->cuda ? fp8comm_gradient_begin_on_device(slot) : FP8CORE_OK;
  fp8comm_gradient_build(slot);
  if (status != FP8CORE_OK) slot->request->status = status;
  return note(reducer, fp8comm_request_start(&slot->request));
}

fp8core_status fp8comm_gradient_start(fp8comm_gradient_reducer *reducer, int64_t index, const fp8core_tensor *inputs,
                                      fp8core_tensor *outputs) {
  FP8COMM_TRY(check_step(reducer, inputs, outputs));
  FP8COMM_TRY(check_bucket(reducer, index));
  if (reducer->buckets[index].started)
    return fp8comm_invalid("bucket %lld was started already, expected fp8comm_gradient_wait() before it starts again",
                           (long long)index);
  FP8COMM_TRY(check_bucket_tensors(reducer, &reducer->buckets[index], inputs, outputs));
  return start(reducer, index, inputs, outputs);
}

fp8core_status fp8comm_gradient_progress(fp8comm_gradient_reducer *reducer, int *done) {
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a reducer");
  for (int i = 0; i < reducer->slot_count; i++) {
    int ended;
    FP8COMM_TRY(note(reducer, fp8comm_request_test(&reducer->slots[i].request, &ended)));
  }
  if (done) *done = !oldest(reducer);
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_wait_bucket(fp8comm_gradient_reducer *reducer, int64_t index) {
  FP8COMM_TRY(check_bucket(reducer, index));
  if (!reducer->buckets[index].started)
    return fp8comm_invalid("bucket %lld was not started, expected fp8comm_gradient_start() before it is waited for",
                           (long long)index);
  if (reducer->failed) return fp8comm_check(reducer->communicator);
  for (int i = 0; i < reducer->slot_count; i++) {
    gradient_slot *one = &reducer->slots[i];
    if (one->request && one->bucket == &reducer->buckets[index])
      return note(reducer, fp8comm_request_wait(&one->request));
  }
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_wait(fp8comm_gradient_reducer *reducer, fp8comm_gradient_result *result) {
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a reducer");
  for (gradient_slot *one; (one = oldest(reducer));) FP8COMM_TRY(note(reducer, fp8comm_request_wait(&one->request)));
  if (reducer->failed) return fp8comm_check(reducer->communicator);
  for (int64_t i = 0; i < reducer->bucket_count; i++) reducer->buckets[i].started = 0;
  if (result) {
    const int stepped = reducer->in_progress;
    result->nonfinite_tensors = stepped ? reducer->nonfinite_tensors : 0;
    result->nonfinite_rank = stepped ? reducer->nonfinite_rank : -1;
    result->bytes_sent = stepped ? fp8comm_communicator_bytes_sent(reducer->communicator) - reducer->bytes_before : 0;
  }
  reducer->in_progress = 0;
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_all_reduce(fp8comm_gradient_reducer *reducer, const fp8core_tensor *inputs,
                                           fp8core_tensor *outputs, fp8comm_gradient_result *result) {
  FP8COMM_TRY(check_step(reducer, inputs, outputs));
  if (reducer->in_progress)
    return fp8comm_invalid("a bucket is started, expected fp8comm_gradient_wait() before all are reduced");
  for (int64_t i = 0; i < reducer->bucket_count; i++)
    FP8COMM_TRY(check_bucket_tensors(reducer, &reducer->buckets[i], inputs, outputs));
  for (int64_t i = 0; i < reducer->bucket_count; i++) FP8COMM_TRY(start(reducer, i, inputs, outputs));
  return fp8comm_gradient_wait(reducer, result);
}

fp8core_status fp8comm_gradient_get_statistics(const fp8comm_gradient_reducer *reducer, int64_t tensor,
                                               fp8comm_gradient_statistics *statistics) {
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a reducer");
  if (!statistics) return fp8comm_invalid("statistics is NULL, expected a place for them");
  if (tensor < 0 || tensor >= reducer->tensor_count)
    return fp8comm_invalid("tensor is %lld, expected 0 to %lld", (long long)tensor,
                           (long long)(reducer->tensor_count - 1));
  *statistics = reducer->tensors[tensor].statistics;
  return FP8CORE_OK;
}

size_t fp8comm_gradient_memory_bytes(const fp8comm_gradient_reducer *reducer) {
  return reducer ? reducer->memory_bytes : 0;
}

fp8comm_gradient_tensor *fp8comm_gradient_tensors(const fp8comm_gradient_reducer *reducer, int64_t *tensor_count) {
  *tensor_count = reducer->tensor_count;
  return reducer->tensors;
}

void fp8comm_gradient_limits(const fp8comm_gradient_reducer *reducer, double *least, double *most, int *busy) {
  const int automatic = reducer->scaled && reducer->options.scaling == FP8COMM_SCALING_AUTO;
  *least = automatic ? reducer->options.mu_min : 1;
  *most = automatic ? reducer->options.mu_max : 1;
  *busy = reducer->in_progress;
}
