// What becomes of a bucket's elements between messages, on the host: amaxes, scales, codes, sums, means.
#include <math.h>
#include <string.h>

#include "gradient_internal.h"
#include "gradient_rules.h"

// The one that is `place`-th in the bucket's memory.
static fp8comm_gradient_tensor *tensor_in_order(const gradient_slot *slot, int64_t place) {
  return &slot->reducer->tensors[slot->reducer->order[slot->bucket->first + place]];
}

// The place in the bucket of the tensor that holds this element; one without elements holds none.
static int64_t tensor_at(const gradient_slot *slot, size_t element) {
  int64_t low = 0, high = slot->bucket->count - 1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (tensor_in_order(slot, middle)->offset <= element) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The mean, wherever it is.
static const unsigned char *mean_at(const gradient_slot *slot, size_t element) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  if (!reducer->window || reducer->owned) return code_at(slot, element);
  return reducer->window->ranks[element / slot->bucket->parts.part] + slot->window_offset + element * reducer->element;
}

// --- Sums ---

static fp8core_status wide_first(void *data, void *sum, const void *in, size_t offset, size_t count) {
  const gradient_slot *slot = data;
  (void)offset;
  return convert(slot, sum, FP8CORE_FP32, in, slot->reducer->wire, count, NULL);
}

static fp8core_status wide_add(void *data, void *sum, const void *in, size_t offset, size_t count) {
  const gradient_slot *slot = data;
  const size_t element = slot->reducer->element;
  float *total = sum;
  (void)offset;
  for (size_t begin = 0; begin < count; begin += CHUNK) {
    const size_t elements = minimum(CHUNK, count - begin);
    FP8COMM_TRY(convert(slot, slot->chunk, FP8CORE_FP32, (const unsigned char *)in + begin * element,
                        slot->reducer->wire, elements, NULL));
    for (size_t i = 0; i < elements; i++) total[begin + i] += slot->chunk[i];
  }
  return FP8CORE_OK;
}

static fp8core_status exact_first(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  memcpy(sum, in, count * sizeof(float));
  return FP8CORE_OK;
}

static fp8core_status exact_add(void *data, void *sum, const void *in, size_t offset, size_t count) {
  const float *values = in;
  float *total = sum;
  (void)data, (void)offset;
  for (size_t i = 0; i < count; i++) total[i] += values[i];
  return FP8CORE_OK;
}

// The sum is where the codes are.
static fp8core_status native_first(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)sum, (void)in, (void)offset, (void)count;
  return FP8CORE_OK;
}

// fp8comm_native_add_rule(), by casts.
static fp8core_status native_add(void *data, void *sum, const void *in, size_t offset, size_t count) {
  const gradient_slot *slot = data;
  const fp8core_dtype wire = slot->reducer->wire;
  const size_t begin = own_begin(slot) + offset, end = begin + count;
  unsigned char *codes = sum;
  for (int64_t i = tensor_at(slot, begin); i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_in_order(slot, i);
    if (tensor->offset >= end) break;
    fp8core_cast_statistics statistics = {0, 0, 0, 0};
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    for (size_t done = 0; done < elements; done += CHUNK) {
      const size_t part = minimum(CHUNK, elements - done), at = from - begin + done;
      FP8COMM_TRY(convert(slot, slot->chunk, FP8CORE_FP32, codes + at, wire, part, NULL));
      FP8COMM_TRY(convert(slot, slot->other_chunk, FP8CORE_FP32, (const unsigned char *)in + at, wire, part, NULL));
      for (size_t j = 0; j < part; j++) slot->chunk[j] += slot->other_chunk[j];
      FP8COMM_TRY(convert(slot, codes + at, wire, slot->chunk, FP8CORE_FP32, part, &statistics));
    }
    tensor->statistics.saturated_in_sum += statistics.saturated;
  }
  return FP8CORE_OK;
}

static float expected_mean_scale(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor) {
  return fp8core_scale_rule(slot->reducer->wire, fp8comm_expected_amax_rule(tensor->last_mean_amax), 0, 0, 1.0f);
}

// Contributions that are kept: of a piece of the part of which all are there, the largest sums; and the mean, where its
// scale is tried.
static fp8core_status measure_sums(void *data, void *sum, const void *in, size_t offset, size_t count) {
  const gradient_slot *slot = data;
  const size_t begin = own_begin(slot) + offset, end = begin + count;
  const fp8comm_sum all = contributions(slot);
  (void)sum, (void)in;
  for (int64_t i = tensor_at(slot, begin); i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_in_order(slot, i);
    if (tensor->offset >= end) break;
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    const size_t at = from - own_begin(slot);
    const uint32_t found =
      slot->expects && is_requantised(slot->reducer, tensor)
        ? fp8comm_sum_requantise(slot->reducer->context, &all, at, elements, tensor->sum_scale_inverse,
                                 expected_mean_scale(slot, tensor), code_at(slot, from))
        : fp8comm_sum_largest(slot->reducer->context, &all, at, elements);
    if (found > tensor->largest_sum) tensor->largest_sum = found;
  }
  return FP8CORE_OK;
}

// --- Scales ---

static double factor_of(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  switch (reducer->options.scaling) {
  case FP8COMM_SCALING_AUTO: return tensor->mu;
  case FP8COMM_SCALING_PRE: return 1.0 / reducer->communicator->size;
  case FP8COMM_SCALING_POST: break;
  }
  return 1;
}

float fp8comm_gradient_expected_amax(const fp8comm_gradient_reducer *reducer, float before) {
  return reducer->options.delayed_scaling ? fp8comm_expected_amax_rule(before) : -1;
}

// By which amax a scale is chosen.
static float scaled_amax(const fp8comm_gradient_reducer *reducer, float before, float found) {
  const float expected = fp8comm_gradient_expected_amax(reducer, before);
  return fp8comm_expected_fits_rule(expected, found) ? expected : found;
}

void fp8comm_gradient_set_wire_scale(const fp8comm_gradient_reducer *reducer, fp8comm_gradient_tensor *tensor,
                                     float amax) {
  const int ranks = reducer->communicator->size;
  tensor->statistics.wire_scale =
    reducer->scaled ? fp8comm_wire_scale_rule(reducer->wire, amax, factor_of(reducer, tensor), ranks) : 1;
  tensor->sum_scale = fp8comm_sum_scale_rule(tensor->statistics.wire_scale, ranks);
  tensor->sum_scale_inverse = 1.0f / tensor->sum_scale;
}

static void choose_scale(gradient_slot *slot, int64_t index) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_gradient_tensor *tensor = tensor_of(slot, index);
  fp8comm_gradient_statistics *statistics = &tensor->statistics;
  if (reducer->scaled) {
    statistics->amax = fp8core_bits_float(slot->amaxes[index]);
    statistics->nonfinite = fp8core_amax_is_nonfinite(statistics->amax);
  }
  fp8comm_gradient_set_wire_scale(reducer, tensor, scaled_amax(reducer, tensor->last_amax, statistics->amax));
}

// `told`: the number of ranks less the lowest with an infinity or a NaN, or 0.
static void note_nonfinite_rank(fp8comm_gradient_reducer *reducer, uint32_t told) {
  const int rank = reducer->communicator->size - (int)told;
  if (told > 0 && (reducer->nonfinite_rank < 0 || rank < reducer->nonfinite_rank)) reducer->nonfinite_rank = rank;
}

void fp8comm_gradient_choose_scales(gradient_slot *slot) {
  fp8comm_gradient_reducer *reducer = slot->reducer;
  if (reducer->scaled) note_nonfinite_rank(reducer, slot->amaxes[slot->bucket->count]);
  for (int64_t i = 0; i < slot->bucket->count; i++) choose_scale(slot, i);
}

static void update_mu(const fp8comm_gradient_reducer *reducer, fp8comm_gradient_tensor *tensor) {
  fp8comm_gradient_statistics *statistics = &tensor->statistics;
  const fp8comm_gradient_options *options = &reducer->options;
  statistics->mu = tensor->mu;
  // A step that says nothing about the range changes nothing.
  if (reducer->scaled && options->scaling == FP8COMM_SCALING_AUTO && !statistics->nonfinite && statistics->amax > 0) {
    const double saturation = fp8comm_saturation_rule(statistics->saturated_in_cast, statistics->saturated_in_sum,
                                                      tensor->elements, reducer->communicator->size);
    tensor->mu = fp8comm_mu_rule(tensor->mu, saturation, options->saturation_threshold, options->backoff,
                                 reducer->growth, options->mu_min, options->mu_max);
  }
  statistics->next_mu = tensor->mu;
}

// --- The calls between messages ---

// Amaxes of this rank's gradients.
fp8core_status fp8comm_gradient_measure(void *data) {
  gradient_slot *slot = data;
  const int64_t count = slot->bucket->count;
  slot->amaxes[count] = 0;
  for (int64_t i = 0; i < count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    float amax = fabsf(tensor->known_amax_value);
    if (tensor->lost) {
      amax = 0;
      FP8COMM_TRY(fp8comm_gradient_measure_corrected(slot, tensor, &amax));
    } else if (!tensor->known_amax) {
      amax = 0;
      FP8COMM_TRY(fp8core_amax(slot->reducer->context, &tensor->input, &amax));
    }
    note_amax(slot, i, amax);
  }
  return FP8CORE_OK;
}

// Codes of the tensor's elements from `first` on, as they travel.
static fp8core_status quantise_range(const gradient_slot *slot, fp8comm_gradient_tensor *tensor, size_t first,
                                     size_t elements) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8core_cast_statistics counted = {0, 0, 0, 0};
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = reducer->scaled ? &counted : NULL;
  // An infinity of a baseline stays one.
  options.saturate = reducer->scaled;
  for (size_t done = 0; done < elements;) {
    const fp8core_tensor source = input_part(tensor, first + done, elements - done);
    const size_t part = (size_t)source.shape[0];
    fp8core_tensor codes = vector(code_at(slot, tensor->offset + first + done), reducer->wire, part);
    codes.scale = reducer->scaled ? &tensor->statistics.wire_scale : NULL;
    codes.amax = slot->expects || is_measured_in_cast(reducer) ? &tensor->found_amax : NULL;
    FP8COMM_TRY(fp8core_cast(reducer->context, &options, &source, &codes));
    done += part;
  }
  tensor->statistics.saturated_in_cast += counted.saturated;
  tensor->statistics.flushed_to_zero += counted.flushed_to_zero;
  if (counted.nonfinite > 0) tensor->statistics.nonfinite = 1;
  return FP8CORE_OK;
}

// Of a piece of the bucket that is about to be sent, or added up. Nothing of a tensor that is not finite will be looked
// at.
static fp8core_status quantise_piece(void *data, void *sum, const void *in, size_t begin, size_t count) {
  const gradient_slot *slot = data;
  const size_t end = begin + count;
  (void)sum, (void)in;
  // Those of gradients on a GPU have come from there.
  if (slot->reducer->cuda) return FP8CORE_OK;
  for (int64_t i = tensor_at(slot, begin); i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_in_order(slot, i);
    if (tensor->offset >= end) break;
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    if (elements == 0) continue;
    if (tensor->statistics.nonfinite) {
      memset(code_at(slot, from), 0, elements * slot->reducer->element);
    } else {
      FP8COMM_TRY(quantise_range(slot, tensor, from - tensor->offset, elements));
    }
  }
  return FP8CORE_OK;
}

// The codes that travel.
fp8core_status fp8comm_gradient_quantise(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_gradient_choose_scales(slot);
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    if (reducer->options.measure_snr) {
      fp8core_tensor values = tensor->input;
      values.data = slot->values + tensor->offset;
      values.dtype = FP8CORE_FP32;
      values.row_stride = 0;
      values.scale = values.scale_inverse = NULL;
      values.amax = NULL;
      FP8COMM_TRY(fp8core_cast(reducer->context, NULL, &tensor->input, &values));
    }
    // Piece by piece, as they travel.
    if (reducer->keeps) continue;
    // Nothing of it will be looked at.
    if (tensor->statistics.nonfinite) {
      memset(code_at(slot, tensor->offset), 0, (size_t)tensor->elements * reducer->element);
      continue;
    }
    FP8COMM_TRY(tensor->lost ? fp8comm_gradient_quantise_corrected(slot, tensor)
                             : quantise_range(slot, tensor, 0, (size_t)tensor->elements));
  }
  return FP8CORE_OK;
}

static uint32_t input_most(const fp8comm_gradient_tensor *tensor) {
  const fp8core_dtype dtype = tensor->input.dtype;
  return dtype == FP8CORE_FP16 || dtype == FP8CORE_BF16 ? fp8core_float_bits(fp8core_max_of(dtype)) : FP8CORE_F32_MAX;
}

static uint32_t lacking_room(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  if (!is_for(reducer, tensor)) return 0;
  return FP8CORE_F32_MAX - fp8core_float_bits(fp8comm_output_room_rule(tensor->output.dtype));
}

// Of the codes of native sums: of interest only where some output may lack room for them.
static fp8core_status measure_native(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor, size_t from,
                                     size_t elements, uint32_t *amax_bits) {
  const fp8core_dtype wire = slot->reducer->wire;
  fp8core_tensor mean = vector(code_at(slot, from), wire, elements);
  float amax = 0;
  if (fp8core_max_of(wire) * tensor->sum_scale_inverse <= fp8comm_output_room_rule(FP8CORE_FP16)) return FP8CORE_OK;
  mean.scale_inverse = &tensor->sum_scale_inverse;
  FP8COMM_TRY(fp8core_amax(slot->reducer->context, &mean, &amax));
  *amax_bits = fp8core_float_bits(amax);
  return FP8CORE_OK;
}

// What this rank has to tell once its part is added up.
fp8core_status fp8comm_gradient_count(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t begin = own_begin(slot), end = begin + own_count(slot);
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    counts_record *record = &slot->counts[i];
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    memset(record, 0, sizeof(*record));
    // Of an amax that showed it all ranks know.
    if (tensor->statistics.nonfinite && !fp8core_amax_is_nonfinite(tensor->statistics.amax))
      record->nonfinite = (uint32_t)(reducer->communicator->size - reducer->communicator->rank);
    // How much of it was cast before an infinity or a NaN was found is nobody's business.
    if (!tensor->statistics.nonfinite) {
      record->saturated_in_cast = tensor->statistics.saturated_in_cast;
      record->flushed_to_zero = tensor->statistics.flushed_to_zero;
    }
    record->saturated_in_sum = tensor->statistics.saturated_in_sum;
    record->input_amax = is_measured_in_cast(reducer) ? fp8core_float_bits(tensor->found_amax) : input_most(tensor);
    record->lacking_room = lacking_room(reducer, tensor);
    if (slot->expects) {
      const float amax = tensor->known_amax ? fabsf(tensor->known_amax_value) : tensor->found_amax;
      record->input_amax = fp8core_float_bits(amax);
      if (fp8core_amax_is_nonfinite(amax))
        record->nonfinite = (uint32_t)(reducer->communicator->size - reducer->communicator->rank);
    }
    if (elements == 0) continue;
    if (reducer->options.algorithm == FP8COMM_NATIVE) {
      FP8COMM_TRY(measure_native(slot, tensor, from, elements, &record->amax));
      continue;
    }
    if (reducer->direct) {
      record->amax = fp8core_float_bits(reducer->records[slot->bucket->first + i].mean_amax);
      continue;
    }
    if (reducer->keeps) {
      record->amax = fp8core_float_bits(fp8core_bits_float(tensor->largest_sum) * tensor->sum_scale_inverse);
      continue;
    }
    if (slot->bucket->lost && !tensor->statistics.nonfinite && is_requantised(reducer, tensor))
      FP8COMM_TRY(fp8comm_gradient_correct_sums(slot, tensor, from - begin, elements));
    fp8core_tensor mean = vector(slot->sum + (from - begin), FP8CORE_FP32, elements);
    float amax = 0;
    mean.scale_inverse = &tensor->sum_scale_inverse;
    FP8COMM_TRY(fp8core_amax(reducer->context, &mean, &amax));
    record->amax = fp8core_float_bits(amax);
  }
  return FP8CORE_OK;
}

// Whether some rank's output has no room for the mean. The same on every rank.
static int leaves_outputs(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor,
                          const counts_record *record) {
  const float gradients = reducer->scaled ? tensor->statistics.amax : FLT_MAX;
  return fp8comm_mean_magnitude_rule(fp8core_bits_float(record->amax), gradients,
                                     fp8core_bits_float(record->input_amax)) >
         fp8core_bits_float(FP8CORE_F32_MAX - record->lacking_room);
}

// The mean of this rank's part, as it travels; and what the counts of all ranks tell.
fp8core_status fp8comm_gradient_requantise(void *data) {
  gradient_slot *slot = data;
  fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t begin = own_begin(slot), end = begin + own_count(slot);
  const int native = reducer->options.algorithm == FP8COMM_NATIVE;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    fp8comm_gradient_statistics *statistics = &tensor->statistics;
    const counts_record *record = &slot->counts[i];
    const float mean_amax = fp8core_bits_float(record->amax);
    statistics->saturated_in_cast = record->saturated_in_cast;
    statistics->saturated_in_sum = record->saturated_in_sum;
    statistics->flushed_to_zero = record->flushed_to_zero;
    if (!reducer->scaled) {
      statistics->amax = mean_amax;
      statistics->nonfinite = fp8core_amax_is_nonfinite(mean_amax);
    } else if (record->nonfinite > 0) {
      statistics->nonfinite = 1;
      note_nonfinite_rank(reducer, record->nonfinite);
    } else if (fp8core_amax_is_nonfinite(mean_amax)) {
      // Codes that were rounded up stand for more than FP32 has.
      statistics->nonfinite = 1;
    }
    if (!statistics->nonfinite) statistics->nonfinite = leaves_outputs(reducer, tensor, record);
    reducer->nonfinite_tensors += statistics->nonfinite;
    update_mu(reducer, tensor);
    // Sums of codes of an infinity or a NaN, which an amax did not show, tell nothing.
    statistics->mean_scale =
      native ? tensor->sum_scale
      : reducer->scaled && !statistics->nonfinite
        ? fp8core_scale_rule(reducer->wire, scaled_amax(reducer, tensor->last_mean_amax, mean_amax), 0, 0, 1.0f)
        : 1.0f;
    statistics->bytes_sent = (uint64_t)tensor->elements * reducer->element *
                             (uint64_t)(reducer->communicator->size - 1) *
                             (uint64_t)(slot->exchanges + !reducer->owned);
    if (reducer->scaled && !statistics->nonfinite) {
      tensor->last_amax = statistics->amax;
      tensor->last_mean_amax = native ? -1 : mean_amax;
    }
    tensor->mean_scale_inverse = 1.0f / statistics->mean_scale;
    tensor->output_scale = statistics->mean_scale;
    tensor->output_scale_inverse = tensor->mean_scale_inverse;
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    if (statistics->nonfinite && !reducer->direct) fill_with_nan(reducer, code_at(slot, from), elements);
    if (elements == 0 || native || statistics->nonfinite || !is_requantised(reducer, tensor) || reducer->direct ||
        slot->expects)
      continue;
    if (reducer->keeps) {
      const fp8comm_sum all = contributions(slot);
      (void)fp8comm_sum_requantise(reducer->context, &all, from - begin, elements, tensor->sum_scale_inverse,
                                   statistics->mean_scale, code_at(slot, from));
      continue;
    }
    fp8core_tensor mean = vector(slot->sum + (from - begin), FP8CORE_FP32, elements);
    fp8core_tensor codes = vector(code_at(slot, from), reducer->wire, elements);
    mean.scale_inverse = &tensor->sum_scale_inverse;
    codes.scale = &statistics->mean_scale;
    FP8COMM_TRY(fp8core_cast(reducer->context, NULL, &mean, &codes));
    if (slot->bucket->lost) FP8COMM_TRY(fp8comm_gradient_note_lost_means(slot, tensor, from - begin, elements));
  }
  return FP8CORE_OK;
}

// Squares of the exact mean, and of what the mean that travels, or an owner has, is off by, in this rank's part.
fp8core_status fp8comm_gradient_compare(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const size_t begin = own_begin(slot), end = begin + own_count(slot);
  const double ranks = reducer->communicator->size;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    squares_record *record = &slot->squares[i];
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    record->signal = record->noise = 0;
    if (tensor->statistics.nonfinite || elements == 0) continue;
    const int codes = is_coded(reducer, tensor);
    const double scale = (double)(codes ? tensor->statistics.mean_scale : tensor->sum_scale);
    for (size_t done = 0; done < elements; done += CHUNK) {
      const size_t part = minimum(CHUNK, elements - done);
      const float *exact = slot->exact + (from - begin + done);
      const float *mean = slot->chunk;
      if (codes) {
        FP8COMM_TRY(convert(slot, slot->chunk, FP8CORE_FP32, code_at(slot, from + done), reducer->wire, part, NULL));
      } else if (reducer->keeps) {
        const fp8comm_sum all = contributions(slot);
        fp8comm_sum_all(reducer->context, &all, from - begin + done, part, slot->chunk);
      } else {
        mean = slot->sum + (from - begin + done);
      }
      for (size_t j = 0; j < part; j++) {
        const double right = (double)exact[j] / ranks;
        const double off = (double)mean[j] / scale - right;
        record->signal += right * right;
        record->noise += off * off;
      }
    }
  }
  return FP8CORE_OK;
}

// Elements of a tensor's mean, from `first` on, into its output: what is in `mean`, as values times scale_inverse.
static fp8core_status write_mean(const gradient_slot *slot, fp8comm_gradient_tensor *tensor, size_t first,
                                 size_t elements, const void *mean, fp8core_dtype dtype, const float *scale_inverse) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const fp8core_tensor *output = &tensor->output;
  const int narrow = reducer->scaled && output->dtype == reducer->wire;
  const size_t out_element = fp8core_dtype_size(output->dtype), in_element = fp8core_dtype_size(dtype);
  const int dense = is_dense(output);
  const size_t row = dense ? (size_t)tensor->elements : (size_t)output->shape[output->dimensions - 1];
  const size_t stride = dense ? row : (size_t)output->row_stride;
  for (size_t done = 0; done < elements;) {
    const size_t column = (first + done) % row, part = minimum(row - column, elements - done);
    unsigned char *to = (unsigned char *)output->data + ((first + done) / row * stride + column) * out_element;
    fp8core_tensor source = vector((unsigned char *)(uintptr_t)mean + done * in_element, dtype, part);
    source.scale_inverse = scale_inverse;
    if (narrow) {
      // The codes themselves; what they stand for raises the amax.
      if (output->amax) FP8COMM_TRY(fp8core_amax(reducer->context, &source, output->amax));
      memcpy(to, source.data, part);
    } else {
      fp8core_tensor target = vector(to, output->dtype, part);
      target.amax = output->amax;
      // Saturating: what is too large here is so by roundings only. A NaN stays one.
      FP8COMM_TRY(fp8core_cast(reducer->context, NULL, &source, &target));
    }
    done += part;
  }
  return FP8CORE_OK;
}

// The same of the codes from element `from` of the bucket on, in one rank's part.
static fp8core_status write_codes(const gradient_slot *slot, fp8comm_gradient_tensor *tensor, size_t from,
                                  size_t elements) {
  return write_mean(slot, tensor, from - tensor->offset, elements, mean_at(slot, from), slot->reducer->wire,
                    &tensor->mean_scale_inverse);
}

// A piece of the bucket whose mean has come.
static fp8core_status unpack(void *data, void *out, const void *in, size_t begin, size_t count_of) {
  const gradient_slot *slot = data;
  const size_t end = begin + count_of;
  (void)out, (void)in;
  for (int64_t i = tensor_at(slot, begin); i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_in_order(slot, i);
    if (tensor->offset >= end) break;
    size_t from;
    const size_t elements = overlap(tensor, begin, end, &from);
    FP8COMM_TRY(write_codes(slot, tensor, from, elements));
  }
  return FP8CORE_OK;
}

// The means of this rank's own tensors. What has not been rounded to the wire's format, nor needs to, is still a sum.
fp8core_status fp8comm_gradient_deliver(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    const size_t elements = (size_t)tensor->elements;
    if (!is_for(reducer, tensor)) continue;
    if (is_coded(reducer, tensor)) {
      FP8COMM_TRY(write_codes(slot, tensor, tensor->offset, elements));
      continue;
    }
    const size_t begin = tensor->offset - own_begin(slot);
    if (!reducer->keeps) {
      FP8COMM_TRY(write_mean(slot, tensor, 0, elements, slot->sum + begin, FP8CORE_FP32, &tensor->sum_scale_inverse));
      continue;
    }
    const fp8comm_sum all = contributions(slot);
    for (size_t done = 0; done < elements; done += OWNER_CHUNK) {
      const size_t part = minimum(OWNER_CHUNK, elements - done);
      fp8comm_sum_all(reducer->context, &all, begin + done, part, slot->chunk);
      FP8COMM_TRY(write_mean(slot, tensor, done, part, slot->chunk, FP8CORE_FP32, &tensor->sum_scale_inverse));
    }
  }
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_note_snr(void *data) {
  const gradient_slot *slot = data;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const squares_record *record = &slot->squares[i];
    if (record->signal > 0) tensor_of(slot, i)->statistics.snr_db = 10 * log10(record->signal / record->noise);
  }
  return FP8CORE_OK;
}

void fp8comm_gradient_set_rules(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const int native = reducer->options.algorithm == FP8COMM_NATIVE;
  const fp8comm_reducer wide = {reducer->element, sizeof(float), wide_first, wide_add, NULL, slot};
  const fp8comm_reducer narrow = {reducer->element, reducer->element, native_first, native_add, NULL, slot};
  const fp8comm_reducer kept = {reducer->element, 0, quantise_piece, measure_sums, NULL, slot};
  const fp8comm_reducer exact = {sizeof(float), sizeof(float), exact_first, exact_add, NULL, slot};
  const fp8comm_reducer unpacks = {reducer->element, 0, NULL, NULL, unpack, slot};
  slot->sum_rule = native ? narrow : reducer->keeps ? kept : wide;
  slot->exact_rule = exact;
  slot->unpack_rule = unpacks;
}
