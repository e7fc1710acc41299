// Gradients on a GPU.
//
// Amaxes and casts are the GPU's, on the stream of the communicator there; records tell it scales, and the host counts.
// Codes come to the host for what happens to them in between; or NCCL, or the transport, and a kernel do that
// (reducer->direct).
#include <math.h>
#include <string.h>

#include "gradient_internal.h"
#include "numerics.h"

static unsigned char *device_code_at(const gradient_slot *slot, size_t element) {
  return slot->device_codes + element * slot->reducer->element;
}

static device_record *device_record_of(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return &reducer->device_records[tensor - reducer->tensors];
}

static fp8core_status copy(gradient_slot *slot, void *destination, const void *source, size_t bytes) {
  fp8comm_cuda *cuda = slot->reducer->cuda;
  if (bytes == 0) return FP8CORE_OK;
  slot->request->copying = 1;
  return cuda->functions->copy(cuda, destination, source, bytes);
}

static fp8core_status upload_records(gradient_slot *slot) {
  const int64_t first = slot->bucket->first;
  return copy(slot, slot->reducer->device_records + first, slot->reducer->records + first,
              (size_t)slot->bucket->count * sizeof(device_record));
}

static fp8core_status download_records(gradient_slot *slot) {
  const int64_t first = slot->bucket->first;
  return copy(slot, slot->reducer->records + first, slot->reducer->device_records + first,
              (size_t)slot->bucket->count * sizeof(device_record));
}

// The values of a gradient with what casts of it have lost.
static fp8comm_feedback_job corrected_on_device(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor) {
  const fp8core_tensor *input = &tensor->input;
  const fp8comm_feedback_job job = {
    .count = tensor->elements,
    .dtype = input->dtype,
    .values = input->data,
    .columns = is_dense(input) ? tensor->elements : input->shape[input->dimensions - 1],
    .stride = is_dense(input) ? tensor->elements : input->row_stride,
    .values_scale_inverse = &device_record_of(slot->reducer, tensor)->input_scale_inverse,
    .lost = tensor->lost,
    .wire = slot->reducer->wire,
  };
  return job;
}

static fp8core_status measure_corrected_on_device(gradient_slot *slot, const fp8comm_gradient_tensor *tensor) {
  fp8comm_cuda *cuda = slot->reducer->cuda;
  fp8comm_feedback_job job = corrected_on_device(slot, tensor);
  job.amax = &device_record_of(slot->reducer, tensor)->amax;
  slot->request->copying = 1;
  return cuda->functions->measure_corrected(cuda, &job);
}

static fp8core_status quantise_corrected_on_device(gradient_slot *slot, const fp8comm_gradient_tensor *tensor) {
  fp8comm_cuda *cuda = slot->reducer->cuda;
  device_record *record = device_record_of(slot->reducer, tensor);
  fp8comm_feedback_job job = corrected_on_device(slot, tensor);
  job.codes = device_code_at(slot, tensor->offset);
  job.scale = &record->wire_scale;
  job.code_scale_inverse = &record->wire_scale_inverse;
  job.statistics = &record->statistics;
  slot->request->copying = 1;
  return cuda->functions->cast_corrected(cuda, &job);
}

// Sums of this rank's part, from its element `first` on, with what roundings of the mean have lost.
static fp8comm_feedback_job corrected_sums_on_device(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                     size_t first, size_t elements) {
  const device_record *record = device_record_of(slot->reducer, tensor);
  const fp8comm_feedback_job job = {
    .count = (int64_t)elements,
    .dtype = FP8CORE_FP32,
    .values = slot->device_sum + first,
    .columns = (int64_t)elements,
    .stride = (int64_t)elements,
    .lost = slot->bucket->lost + first,
    .lost_scale = &record->sum_scale,
    .scale_inverse = &record->sum_scale_inverse,
    .wire = slot->reducer->wire,
  };
  return job;
}

static fp8core_status measure_corrected_sums_on_device(gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                       size_t first, size_t elements) {
  fp8comm_cuda *cuda = slot->reducer->cuda;
  fp8comm_feedback_job job = corrected_sums_on_device(slot, tensor, first, elements);
  job.amax = &device_record_of(slot->reducer, tensor)->mean_amax;
  return cuda->functions->measure_corrected(cuda, &job);
}

static fp8core_status requantise_corrected_on_device(gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                     size_t first, size_t elements) {
  fp8comm_cuda *cuda = slot->reducer->cuda;
  const device_record *record = device_record_of(slot->reducer, tensor);
  fp8comm_feedback_job job = corrected_sums_on_device(slot, tensor, first, elements);
  job.codes = device_code_at(slot, own_begin(slot) + first);
  job.scale = &record->output_scale;
  job.code_scale_inverse = &record->output_scale_inverse;
  return cuda->functions->cast_corrected(cuda, &job);
}

fp8core_status fp8comm_gradient_begin_on_device(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  FP8COMM_TRY(reducer->cuda->functions->follow(reducer->cuda));
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    device_record *record = &reducer->records[slot->bucket->first + i];
    record->amax = 0;
    record->input_scale_inverse = 1;
    record->mean_amax = 0;
    memset(&record->statistics, 0, sizeof(record->statistics));
  }
  FP8COMM_TRY(upload_records(slot));
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    device_record *record = device_record_of(reducer, tensor);
    if (tensor->given_scale_inverse)
      FP8COMM_TRY(copy(slot, &record->input_scale_inverse, tensor->given_scale_inverse, sizeof(float)));
    if (tensor->lost) {
      FP8COMM_TRY(measure_corrected_on_device(slot, tensor));
    } else if (tensor->known_amax) {
      FP8COMM_TRY(copy(slot, &record->amax, tensor->known_amax, sizeof(float)));
    } else if (reducer->scaled) {
      FP8COMM_TRY(fp8core_amax(reducer->device_context, &tensor->input, &record->amax));
    }
  }
  return download_records(slot);
}

fp8core_status fp8comm_gradient_measured(void *data) {
  gradient_slot *slot = data;
  const int64_t count = slot->bucket->count;
  slot->amaxes[count] = 0;
  for (int64_t i = 0; i < count; i++) note_amax(slot, i, fabsf(slot->reducer->records[slot->bucket->first + i].amax));
  return FP8CORE_OK;
}

static fp8core_status upload_scales(gradient_slot *slot) {
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    device_record *record = &slot->reducer->records[slot->bucket->first + i];
    record->wire_scale = tensor->statistics.wire_scale;
    record->wire_scale_inverse = 1.0f / tensor->statistics.wire_scale;
    record->sum_scale = tensor->sum_scale;
    record->sum_scale_inverse = tensor->sum_scale_inverse;
  }
  return upload_records(slot);
}

static fp8core_status download_codes(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t elements = slot->bucket->elements;
  // After the sum.
  if (reducer->direct) return FP8CORE_OK;
  FP8COMM_TRY(copy(slot, slot->codes, slot->device_codes, elements * reducer->element));
  if (reducer->options.measure_snr)
    FP8COMM_TRY(copy(slot, slot->values, slot->device_values, elements * sizeof(float)));
  return download_records(slot);
}

static fp8core_tensor device_vector(const fp8comm_gradient_reducer *reducer, void *data, fp8core_dtype dtype,
                                    size_t elements) {
  fp8core_tensor made = vector(data, dtype, elements);
  made.device = fp8core_context_device(reducer->device_context);
  return made;
}

// What has come from the other ranks is added up; and the amaxes of the means.
fp8core_status fp8comm_gradient_sum_on_device(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t begin = own_begin(slot), elements = own_count(slot);
  const fp8comm_sum_job job = {.dtype = reducer->wire,
                               .own = slot->device_codes + begin,
                               .others = slot->device_parts,
                               .stride = (elements + 15) / 16 * 16,
                               .other_count = reducer->communicator->size - 1,
                               .sum = slot->device_sum,
                               .count = (int64_t)elements};
  slot->request->copying = 1;
  FP8COMM_TRY(reducer->cuda->functions->sum(reducer->cuda, &job));
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    device_record *record = device_record_of(reducer, tensor);
    size_t from;
    const size_t part = overlap(tensor, begin, begin + elements, &from);
    if (part == 0) continue;
    if (slot->bucket->lost && !tensor->statistics.nonfinite && is_requantised(reducer, tensor)) {
      FP8COMM_TRY(measure_corrected_sums_on_device(slot, tensor, from - begin, part));
      continue;
    }
    fp8core_tensor mean = device_vector(reducer, slot->device_sum + (from - begin), FP8CORE_FP32, part);
    mean.scale_inverse = &record->sum_scale_inverse;
    FP8COMM_TRY(fp8core_amax(reducer->device_context, &mean, &record->mean_amax));
  }
  return download_records(slot);
}

// What quantise() does.
fp8core_status fp8comm_gradient_quantise_on_device(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_gradient_choose_scales(slot);
  FP8COMM_TRY(upload_scales(slot));
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    device_record *record = device_record_of(reducer, tensor);
    fp8core_cast_options options = fp8core_cast_options_default();
    fp8core_tensor codes = tensor->input;
    codes.row_stride = 0;
    codes.scale = codes.scale_inverse = NULL;
    codes.amax = NULL;
    if (reducer->options.measure_snr) {
      fp8core_tensor values = codes;
      values.data = slot->device_values + tensor->offset;
      values.dtype = FP8CORE_FP32;
      FP8COMM_TRY(fp8core_cast(reducer->device_context, NULL, &tensor->input, &values));
    }
    codes.data = device_code_at(slot, tensor->offset);
    codes.dtype = reducer->wire;
    // Nothing of it will be looked at.
    if (tensor->statistics.nonfinite) {
      FP8COMM_TRY(fp8core_zero(reducer->device_context, codes.data, (size_t)tensor->elements * reducer->element));
      continue;
    }
    if (tensor->lost) {
      FP8COMM_TRY(quantise_corrected_on_device(slot, tensor));
      continue;
    }
    if (reducer->scaled) {
      codes.scale = &record->wire_scale;
      options.statistics = &record->statistics;
    }
    if (is_measured_in_cast(reducer)) codes.amax = &record->amax;
    options.saturate = reducer->scaled;
    FP8COMM_TRY(fp8core_cast(reducer->device_context, &options, &tensor->input, &codes));
  }
  return download_codes(slot);
}

fp8core_status fp8comm_gradient_quantised(void *data) {
  gradient_slot *slot = data;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const device_record *record = &slot->reducer->records[slot->bucket->first + i];
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    fp8comm_gradient_statistics *statistics = &tensor->statistics;
    if (is_measured_in_cast(slot->reducer)) tensor->found_amax = record->amax;
    statistics->saturated_in_cast = record->statistics.saturated;
    statistics->flushed_to_zero = record->statistics.flushed_to_zero;
    // What a known amax did not show.
    if (record->statistics.nonfinite > 0) statistics->nonfinite = 1;
  }
  return FP8CORE_OK;
}

// The scales of the means, or of an owner's means and sums.
static fp8core_status upload_mean_scales(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    device_record *record = &reducer->records[slot->bucket->first + i];
    record->mean_scale_inverse = is_coded(reducer, tensor) ? tensor->mean_scale_inverse : tensor->sum_scale_inverse;
    record->output_scale = tensor->statistics.mean_scale;
    record->output_scale_inverse = tensor->mean_scale_inverse;
  }
  return upload_records(slot);
}

// What requantise() does on the host.
fp8core_status fp8comm_gradient_requantise_on_device(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t begin = own_begin(slot), end = begin + own_count(slot);
  FP8COMM_TRY(upload_mean_scales(slot));
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    const device_record *record = device_record_of(reducer, tensor);
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    if (elements == 0 || tensor->statistics.nonfinite || !is_requantised(reducer, tensor)) continue;
    if (slot->bucket->lost) {
      FP8COMM_TRY(requantise_corrected_on_device(slot, tensor, from - begin, elements));
      continue;
    }
    fp8core_tensor mean = device_vector(reducer, slot->device_sum + (from - begin), FP8CORE_FP32, elements);
    fp8core_tensor codes = device_vector(reducer, device_code_at(slot, from), reducer->wire, elements);
    mean.scale_inverse = &record->sum_scale_inverse;
    codes.scale = &record->output_scale;
    FP8COMM_TRY(fp8core_cast(reducer->device_context, NULL, &mean, &codes));
  }
  return FP8CORE_OK;
}

// The codes of a mean that is not finite.
static fp8core_status upload_nans(gradient_slot *slot, const fp8comm_gradient_tensor *tensor) {
  const size_t elements = (size_t)tensor->elements;
  unsigned char *codes = device_code_at(slot, tensor->offset);
  size_t done = minimum(elements, CHUNK);
  FP8COMM_TRY(copy(slot, codes, slot->nans, done * slot->reducer->element));
  // What is there already, once more: few copies, of whatever size the tensor is.
  while (done < elements) {
    const size_t part = minimum(done, elements - done);
    FP8COMM_TRY(copy(slot, codes + done * slot->reducer->element, codes, part * slot->reducer->element));
    done += part;
  }
  return FP8CORE_OK;
}

// The means, or an owner's means and sums, and their scales; where those are on the GPU already, NaNs.
static fp8core_status upload_means(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t first = reducer->owned ? own_begin(slot) : 0;
  const size_t elements = reducer->owned ? own_count(slot) : slot->bucket->elements;
  if (!reducer->direct) {
    FP8COMM_TRY(upload_mean_scales(slot));
    if (slot->device_sum && reducer->keeps) {
      const fp8comm_sum all = contributions(slot);
      fp8comm_sum_all(reducer->context, &all, 0, elements, slot->sum);
    }
    if (slot->device_sum) FP8COMM_TRY(copy(slot, slot->device_sum, slot->sum, elements * sizeof(float)));
    return copy(slot, slot->device_codes + first * reducer->element, code_at(slot, first), elements * reducer->element);
  }
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    if (tensor->statistics.nonfinite && is_for(reducer, tensor)) FP8COMM_TRY(upload_nans(slot, tensor));
  }
  return FP8CORE_OK;
}

// What unpack() and deliver() do.
fp8core_status fp8comm_gradient_unpack_on_device(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  FP8COMM_TRY(upload_means(slot));
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    const fp8core_tensor *output = &tensor->output;
    if (!is_for(reducer, tensor)) continue;
    const int codes = is_coded(reducer, tensor);
    fp8core_tensor mean = *output, target = *output;
    mean.data = codes ? (void *)device_code_at(slot, tensor->offset)
                      : (void *)(slot->device_sum + (tensor->offset - own_begin(slot)));
    mean.dtype = codes ? reducer->wire : FP8CORE_FP32;
    mean.row_stride = 0;
    mean.scale = NULL;
    mean.amax = NULL;
    mean.scale_inverse = &device_record_of(reducer, tensor)->mean_scale_inverse;
    target.scale = target.scale_inverse = NULL;
    if (reducer->scaled && output->dtype == reducer->wire) {
      // The codes themselves; what they stand for raises the amax.
      if (output->amax) FP8COMM_TRY(fp8core_amax(reducer->device_context, &mean, output->amax));
      mean.scale_inverse = NULL;
      target.amax = NULL;
    }
    FP8COMM_TRY(fp8core_cast(reducer->device_context, NULL, &mean, &target));
  }
  return FP8CORE_OK;
}
