// Error feedback: what casts of gradients and roundings of means have lost, kept for the next step.
#include <stdlib.h>
#include <string.h>

#include "gradient_internal.h"
#include "gradient_rules.h"

// --- Room ---

static fp8core_status allocate_lost(const fp8comm_gradient_reducer *reducer, int on_device, size_t bytes,
                                    uint16_t **lost) {
  void *memory = NULL;
  if (on_device) {
    // Never NULL, as host memory never is.
    FP8COMM_TRY(fp8core_alloc(reducer->device_context, bytes > 0 ? bytes : sizeof(**lost), &memory));
  } else {
    memory = fp8comm_allocate(bytes);
    if (!memory)
      return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory for errors",
                                    bytes);
  }
  *lost = memory;
  return FP8CORE_OK;
}

static fp8core_status zero_lost(const fp8comm_gradient_reducer *reducer, int on_device, uint16_t *lost, size_t bytes) {
  if (!lost || bytes == 0) return FP8CORE_OK;
  if (on_device) return fp8core_zero(reducer->device_context, lost, bytes);
  memset(lost, 0, bytes);
  return FP8CORE_OK;
}

static void free_lost(const fp8comm_gradient_reducer *reducer, int on_device, uint16_t *lost) {
  if (!on_device) {
    free(lost);
  } else if (lost) {
    (void)fp8core_free(reducer->device_context, lost);
  }
}

fp8core_status fp8comm_gradient_make_errors(fp8comm_gradient_reducer *reducer) {
  const int rank = reducer->communicator->rank, means = reducer->options.algorithm == FP8COMM_TWO_SHOT;
  const size_t element = sizeof(*reducer->lost);
  size_t used = 0;
  for (int64_t i = 0; i < reducer->tensor_count; i++)
    reducer->lost_bytes += (size_t)reducer->tensors[i].elements * element;
  for (int64_t i = 0; i < reducer->bucket_count && means; i++)
    reducer->lost_means_bytes += fp8comm_part_count(&reducer->buckets[i].parts, rank) * element;
  FP8COMM_TRY(allocate_lost(reducer, reducer->cuda != NULL, reducer->lost_bytes, &reducer->lost));
  for (int64_t i = 0; i < reducer->tensor_count; used += (size_t)reducer->tensors[i++].elements)
    reducer->tensors[i].lost = reducer->lost + used;
  if (means) FP8COMM_TRY(allocate_lost(reducer, reducer->direct, reducer->lost_means_bytes, &reducer->lost_means));
  used = 0;
  for (int64_t i = 0; i < reducer->bucket_count && means; i++) {
    reducer->buckets[i].lost = reducer->lost_means + used;
    used += fp8comm_part_count(&reducer->buckets[i].parts, rank);
  }
  return fp8comm_gradient_forget(reducer);
}

void fp8comm_gradient_free_errors(fp8comm_gradient_reducer *reducer) {
  free_lost(reducer, reducer->cuda != NULL, reducer->lost);
  free_lost(reducer, reducer->direct, reducer->lost_means);
}

fp8core_status fp8comm_gradient_forget(fp8comm_gradient_reducer *reducer) {
  FP8COMM_TRY(zero_lost(reducer, reducer->cuda != NULL, reducer->lost, reducer->lost_bytes));
  return zero_lost(reducer, reducer->direct, reducer->lost_means, reducer->lost_means_bytes);
}

// --- On the host ---

// values += times * lost.
static fp8core_status add_lost(const gradient_slot *slot, float *values, const uint16_t *lost, size_t elements,
                               float times) {
  FP8COMM_TRY(convert(slot, slot->other_chunk, FP8CORE_FP32, lost, FP8CORE_BF16, elements, NULL));
  for (size_t i = 0; i < elements; i++) values[i] = fp8comm_corrected_rule(values[i], slot->other_chunk[i], times);
  return FP8CORE_OK;
}

// lost = values * times less what the codes stand for. The values are lost as well.
static fp8core_status note_lost(const gradient_slot *slot, uint16_t *lost, float *values, float times,
                                const unsigned char *codes, const float *scale_inverse, size_t elements) {
  fp8core_tensor stored = vector((unsigned char *)(uintptr_t)codes, slot->reducer->wire, elements);
  const fp8core_tensor wide = vector(slot->other_chunk, FP8CORE_FP32, elements);
  stored.scale_inverse = scale_inverse;
  FP8COMM_TRY(fp8core_cast(slot->reducer->context, NULL, &stored, &wide));
  for (size_t i = 0; i < elements; i++) values[i] = fp8comm_lost_rule(values[i], times, slot->other_chunk[i]);
  return convert(slot, lost, FP8CORE_BF16, values, FP8CORE_FP32, elements, NULL);
}

// Elements of the input from `first` on, at most CHUNK, in FP32 in the chunk, with what was lost before.
static fp8core_status correct(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor, size_t first,
                              size_t elements) {
  fp8core_cast_options options = fp8core_cast_options_default();
  options.saturate = 0;
  for (size_t done = 0; done < elements;) {
    const fp8core_tensor source = input_part(tensor, first + done, elements - done);
    const size_t part = (size_t)source.shape[0];
    const fp8core_tensor target = vector(slot->chunk + done, FP8CORE_FP32, part);
    FP8COMM_TRY(fp8core_cast(slot->reducer->context, &options, &source, &target));
    done += part;
  }
  return add_lost(slot, slot->chunk, tensor->lost + first, elements, 1);
}

fp8core_status fp8comm_gradient_measure_corrected(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                  float *amax) {
  for (size_t done = 0; done < (size_t)tensor->elements; done += CHUNK) {
    const size_t part = minimum(CHUNK, (size_t)tensor->elements - done);
    FP8COMM_TRY(correct(slot, tensor, done, part));
    const fp8core_tensor values = vector(slot->chunk, FP8CORE_FP32, part);
    FP8COMM_TRY(fp8core_amax(slot->reducer->context, &values, amax));
  }
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_quantise_corrected(gradient_slot *slot, fp8comm_gradient_tensor *tensor) {
  fp8core_cast_statistics counted = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  const float inverse = 1.0f / tensor->statistics.wire_scale;
  options.statistics = &counted;
  for (size_t done = 0; done < (size_t)tensor->elements; done += CHUNK) {
    const size_t part = minimum(CHUNK, (size_t)tensor->elements - done);
    unsigned char *codes = code_at(slot, tensor->offset + done);
    FP8COMM_TRY(correct(slot, tensor, done, part));
    const fp8core_tensor values = vector(slot->chunk, FP8CORE_FP32, part);
    fp8core_tensor target = vector(codes, slot->reducer->wire, part);
    target.scale = &tensor->statistics.wire_scale;
    FP8COMM_TRY(fp8core_cast(slot->reducer->context, &options, &values, &target));
    FP8COMM_TRY(note_lost(slot, tensor->lost + done, slot->chunk, 1, codes, &inverse, part));
  }
  tensor->statistics.saturated_in_cast = counted.saturated;
  tensor->statistics.flushed_to_zero = counted.flushed_to_zero;
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_correct_sums(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                             size_t first, size_t elements) {
  for (size_t done = 0; done < elements; done += CHUNK)
    FP8COMM_TRY(add_lost(slot, slot->sum + first + done, slot->bucket->lost + first + done,
                         minimum(CHUNK, elements - done), tensor->sum_scale));
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_note_lost_means(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                size_t first, size_t elements) {
  for (size_t done = 0; done < elements; done += CHUNK) {
    const size_t at = first + done, part = minimum(CHUNK, elements - done);
    FP8COMM_TRY(note_lost(slot, slot->bucket->lost + at, slot->sum + at, tensor->sum_scale_inverse,
                          code_at(slot, own_begin(slot) + at), &tensor->mean_scale_inverse, part));
  }
  return FP8CORE_OK;
}
