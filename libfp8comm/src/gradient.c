// The gradient all-reduce: buckets of tensors, each a request whose steps are messages and calls of this file.
#include "fp8comm/gradient.h"

#include <stdlib.h>
#include <string.h>

#include "cpu/sum.h"
#include "device.h"
#include "gradient.h"
#include "gradient_rules.h"
#include "internal.h"

// Elements that are converted at once: in and out stay in the first two caches.
#define CHUNK 16384
// The same for an owner's sums, which all threads work on.
#define OWNER_CHUNK 262144
// Parts begin at multiples of this many elements.
#define PART_ELEMENTS 64
// Up to this many ranks an owner keeps all contributions to its tensors, beyond it their sum in FP32, which is smaller.
#define KEPT_RANKS 5

typedef struct gradient_bucket {
  int64_t first;
  int64_t count;
  size_t elements;
  fp8comm_parts parts;
  int started;
  // What roundings of the mean of this rank's part have lost, in BF16, where they are rounded; or NULL.
  uint16_t *lost;
} gradient_bucket;

// What a rank tells of a tensor once its part is added up.
typedef struct counts_record {
  // FP32 bits of the largest magnitude of the mean; as integers, so that a NaN wins.
  uint32_t amax;
  // Where the cast met an infinity or a NaN that the amax did not show: the number of ranks less the rank, or 0.
  uint32_t nonfinite;
  uint64_t saturated_in_cast;
  uint64_t saturated_in_sum;
  uint64_t flushed_to_zero;
  // Of the gradient, where the cast went by what was expected: FP32 bits.
  uint32_t input_amax;
  uint32_t unused;
} counts_record;

typedef struct squares_record {
  double signal;
  double noise;
} squares_record;

// What casts on a GPU read and write of a tensor: in the GPU's memory, and page-locked in the host's.
typedef struct device_record {
  float amax;
  float input_scale_inverse;
  float wire_scale;
  float wire_scale_inverse;
  float mean_scale_inverse;
  float output_scale;
  float output_scale_inverse;
  float sum_scale;
  float sum_scale_inverse;
  float mean_amax;
  fp8core_cast_statistics statistics;
} device_record;

// A bucket in flight and its memory.
typedef struct gradient_slot {
  fp8comm_gradient_reducer *reducer;
  // NULL: idle.
  fp8comm_request *request;
  gradient_bucket *bucket;
  uint64_t ticket;
  // Codes and means are made with the scales expected, before anybody knows amaxes.
  int expects;
  // How often contributions were exchanged.
  int exchanges;
  unsigned char *memory;
  // The bucket as it travels; then the mean. Where ranks read each other's, in the window, `window_offset` bytes from
  // its beginning, and of the mean this rank's part only.
  unsigned char *codes;
  size_t window_offset;
  // Of this rank's part, one of the two: what the other ranks contributed, each `stride` elements behind the one
  // before, and where all contributions are, this rank's first; or the sum, in FP32.
  unsigned char *received;
  size_t stride;
  const unsigned char **sources;
  float *sum;
  float *chunk;
  float *other_chunk;
  unsigned char *staging;
  // One a tensor, and who had an infinity or a NaN: the number of ranks less that rank, or 0.
  uint32_t *amaxes;
  counts_record *counts;
  // Of the SNR: the bucket in FP32, the exact sum of this rank's part.
  float *values;
  float *exact;
  squares_record *squares;
  // Of gradients on a GPU, there: the codes, the inputs in FP32, an owner's sums.
  unsigned char *device_codes;
  float *device_values;
  float *device_sum;
  // Where codes stay there: those of this rank's part that others have sent, elements of each rank's part, and what
  // takes them from rank to rank.
  unsigned char *device_parts;
  int64_t *part_counts;
  fp8comm_collective exchange;
  fp8comm_collective gather;
  fp8comm_reducer sum_rule;
  fp8comm_reducer exact_rule;
  fp8comm_reducer unpack_rule;
} gradient_slot;

struct fp8comm_gradient_reducer {
  fp8comm_communicator *communicator;
  fp8core_context *context;
  fp8comm_gradient_options options;
  double growth;
  fp8core_dtype wire;
  // Of an element on the wire.
  size_t element;
  int scaled;
  // Whether contributions are kept until the scale of the mean is known, rather than added up as they come.
  int keeps;
  // Whether scales are tried before amaxes are known.
  int tries;
  int64_t tensor_count;
  fp8comm_gradient_tensor *tensors;
  // The tensors of each bucket by their offset.
  int64_t *order;
  int64_t bucket_count;
  gradient_bucket *buckets;
  // Whether means are for their owners only; where each rank's part begins, in each bucket.
  int owned;
  size_t *begins;
  // Errors of casts, of all tensors, and of means, of this rank's parts; or NULL. On a GPU the former are there, and
  // the latter where sums are.
  uint16_t *lost;
  size_t lost_bytes;
  uint16_t *lost_means;
  size_t lost_means_bytes;
  int slot_count;
  gradient_slot *slots;
  uint64_t tickets;
  size_t memory_bytes;
  // Of gradients on a GPU, else NULL: its memory and stream; a context there, which amaxes and casts of gradients go
  // to, while sums are those of a CPU context of the reducer's own; records, one a tensor.
  fp8comm_cuda *cuda;
  fp8core_context *device_context;
  device_record *device_records;
  device_record *records;
  // Whether codes stay on the GPU: NCCL or the transport exchanges them, a kernel adds them up.
  int direct;
  uint64_t digest;
  // Where the slots' codes are, if ranks read each other's; else NULL.
  fp8comm_window *window;
  // A bucket has failed, and the communicator with it.
  int failed;
  // Of the step in progress.
  int in_progress;
  uint64_t bytes_before;
  int64_t nonfinite_tensors;
  int nonfinite_rank;
};

static size_t minimum(size_t one, size_t other) { return one < other ? one : other; }
static size_t maximum(size_t one, size_t other) { return one > other ? one : other; }

static fp8comm_gradient_tensor *tensor_of(const gradient_slot *slot, int64_t index) {
  return &slot->reducer->tensors[slot->bucket->first + index];
}

// The one that is `place`-th in the bucket's memory.
static fp8comm_gradient_tensor *tensor_in_order(const gradient_slot *slot, int64_t place) {
  return &slot->reducer->tensors[slot->reducer->order[slot->bucket->first + place]];
}

// Whether this rank gets the tensor's mean.
static int is_for(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return tensor->owner < 0 || tensor->owner == reducer->communicator->rank;
}

// Whether the tensor's mean is rounded to what travels, or would: an owner writes other formats from the sum.
static int is_requantised(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return !reducer->owned || (tensor->output.dtype == reducer->wire && reducer->wire != FP8CORE_FP32);
}

static size_t own_begin(const gradient_slot *slot) {
  return fp8comm_part_begin(&slot->bucket->parts, slot->reducer->communicator->rank);
}

static size_t own_count(const gradient_slot *slot) {
  return fp8comm_part_count(&slot->bucket->parts, slot->reducer->communicator->rank);
}

static unsigned char *code_at(const gradient_slot *slot, size_t element) {
  return slot->codes + element * slot->reducer->element;
}

// The mean, wherever it is.
static const unsigned char *mean_at(const gradient_slot *slot, size_t element) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  if (!reducer->window || reducer->owned) return code_at(slot, element);
  return reducer->window->ranks[element / slot->bucket->parts.part] + slot->window_offset + element * reducer->element;
}

static unsigned char *device_code_at(const gradient_slot *slot, size_t element) {
  return slot->device_codes + element * slot->reducer->element;
}

static device_record *device_record_of(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return &reducer->device_records[tensor - reducer->tensors];
}

static fp8core_tensor vector(void *data, fp8core_dtype dtype, size_t elements) {
  const int64_t shape = (int64_t)elements;
  return fp8core_tensor_create(data, dtype, 1, &shape);
}

static fp8core_status convert(const gradient_slot *slot, void *out, fp8core_dtype to, const void *in,
                              fp8core_dtype from, size_t elements, fp8core_cast_statistics *statistics) {
  fp8core_cast_options options = fp8core_cast_options_default();
  const fp8core_tensor source = vector((void *)(uintptr_t)in, from, elements), target = vector(out, to, elements);
  options.statistics = statistics;
  // On the way to FP32 nothing is to be lost, infinities neither.
  options.saturate = to != FP8CORE_FP32;
  return fp8core_cast(slot->reducer->context, &options, &source, &target);
}

static int is_dense(const fp8core_tensor *tensor) { return tensor->row_stride == 0 || tensor->dimensions < 2; }

// The input's elements from `first` on, up to `elements` of them: as many as lie together.
static fp8core_tensor input_part(const fp8comm_gradient_tensor *tensor, size_t first, size_t elements) {
  const fp8core_tensor *input = &tensor->input;
  const size_t row = is_dense(input) ? (size_t)tensor->elements : (size_t)input->shape[input->dimensions - 1];
  const size_t stride = is_dense(input) ? row : (size_t)input->row_stride;
  const size_t column = first % row;
  fp8core_tensor part =
    vector((unsigned char *)input->data + (first / row * stride + column) * fp8core_dtype_size(input->dtype),
           input->dtype, minimum(row - column, elements));
  part.scale_inverse = input->scale_inverse;
  return part;
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

// What one tensor has of the elements from `begin` to `end`: *from and the number.
static size_t overlap(const fp8comm_gradient_tensor *tensor, size_t begin, size_t end, size_t *from) {
  const size_t first = maximum(begin, tensor->offset);
  const size_t last = minimum(end, tensor->offset + (size_t)tensor->elements);
  *from = first;
  return first < last ? last - first : 0;
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

static fp8comm_sum contributions(const gradient_slot *slot) {
  const fp8comm_sum sum = {slot->reducer->wire, slot->reducer->communicator->size, slot->sources};
  return sum;
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

// --- Records ---

static void raise_bits(uint32_t *bits, uint32_t other) { *bits = other > *bits ? other : *bits; }

static fp8core_status bits_first(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  if (sum != in) memcpy(sum, in, count * sizeof(uint32_t));
  return FP8CORE_OK;
}

static fp8core_status bits_add(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  uint32_t *largest = sum;
  const uint32_t *bits = in;
  for (size_t i = 0; i < count; i++) raise_bits(&largest[i], bits[i]);
  return FP8CORE_OK;
}

static fp8core_status counts_first(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  if (sum != in) memcpy(sum, in, count * sizeof(counts_record));
  return FP8CORE_OK;
}

static fp8core_status counts_add(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  counts_record *total = sum;
  const counts_record *record = in;
  for (size_t i = 0; i < count; i++) {
    raise_bits(&total[i].amax, record[i].amax);
    raise_bits(&total[i].nonfinite, record[i].nonfinite);
    raise_bits(&total[i].input_amax, record[i].input_amax);
    total[i].saturated_in_cast += record[i].saturated_in_cast;
    total[i].saturated_in_sum += record[i].saturated_in_sum;
    total[i].flushed_to_zero += record[i].flushed_to_zero;
  }
  return FP8CORE_OK;
}

static fp8core_status squares_first(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  if (sum != in) memcpy(sum, in, count * sizeof(squares_record));
  return FP8CORE_OK;
}

static fp8core_status squares_add(void *data, void *sum, const void *in, size_t offset, size_t count) {
  (void)data, (void)offset;
  squares_record *total = sum;
  const squares_record *record = in;
  for (size_t i = 0; i < count; i++) {
    total[i].signal += record[i].signal;
    total[i].noise += record[i].noise;
  }
  return FP8CORE_OK;
}

static const fp8comm_reducer bits_rule = {sizeof(uint32_t), sizeof(uint32_t), bits_first, bits_add, bits_first, NULL};
static const fp8comm_reducer counts_rule = {
  sizeof(counts_record), sizeof(counts_record), counts_first, counts_add, counts_first, NULL};
static const fp8comm_reducer squares_rule = {
  sizeof(squares_record), sizeof(squares_record), squares_first, squares_add, squares_first, NULL};

static fp8comm_parts exchange_parts(const fp8comm_communicator *communicator, size_t count) {
  const size_t size = (size_t)communicator->size;
  const fp8comm_parts parts = {count, (count + size - 1) / size, NULL};
  return parts;
}

static size_t exchange_bytes(const fp8comm_communicator *communicator, const fp8comm_reducer *rule, size_t count) {
  const fp8comm_parts parts = exchange_parts(communicator, count);
  return fp8comm_all_reduce_is_small(communicator, count, rule->element)
           ? fp8comm_small_all_reduce_bytes(communicator, count, rule)
           : fp8comm_reduce_scatter_bytes(communicator, &parts, rule);
}

// An all-reduce of records in place.
static void build_exchange(gradient_slot *slot, const fp8comm_reducer *rule, void *records, size_t count) {
  fp8comm_request *request = slot->request;
  const fp8comm_communicator *communicator = slot->reducer->communicator;
  if (communicator->size == 1) return;
  if (fp8comm_all_reduce_is_small(communicator, count, rule->element)) {
    fp8comm_build_small_all_reduce(request, rule, count, records, records, slot->staging);
    return;
  }
  const fp8comm_parts parts = exchange_parts(communicator, count);
  unsigned char *own = (unsigned char *)records + fp8comm_part_begin(&parts, communicator->rank) * rule->element;
  fp8comm_build_reduce_scatter(request, rule, &parts, records, own, slot->staging);
  fp8comm_build_all_gather(request, &parts, rule->element, records);
}

// --- Error feedback ---

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

static fp8core_status measure_corrected(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor, float *amax) {
  for (size_t done = 0; done < (size_t)tensor->elements; done += CHUNK) {
    const size_t part = minimum(CHUNK, (size_t)tensor->elements - done);
    FP8COMM_TRY(correct(slot, tensor, done, part));
    const fp8core_tensor values = vector(slot->chunk, FP8CORE_FP32, part);
    FP8COMM_TRY(fp8core_amax(slot->reducer->context, &values, amax));
  }
  return FP8CORE_OK;
}

static fp8core_status quantise_corrected(gradient_slot *slot, fp8comm_gradient_tensor *tensor) {
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

// Sums of this rank's part, from its element `first` on, with what roundings of the mean have lost before.
static fp8core_status correct_sums(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor, size_t first,
                                   size_t elements) {
  for (size_t done = 0; done < elements; done += CHUNK)
    FP8COMM_TRY(add_lost(slot, slot->sum + first + done, slot->bucket->lost + first + done,
                         minimum(CHUNK, elements - done), tensor->sum_scale));
  return FP8CORE_OK;
}

static fp8core_status note_lost_means(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor, size_t first,
                                      size_t elements) {
  for (size_t done = 0; done < elements; done += CHUNK) {
    const size_t at = first + done, part = minimum(CHUNK, elements - done);
    FP8COMM_TRY(note_lost(slot, slot->bucket->lost + at, slot->sum + at, tensor->sum_scale_inverse,
                          code_at(slot, own_begin(slot) + at), &tensor->mean_scale_inverse, part));
  }
  return FP8CORE_OK;
}

// --- The calls between messages ---

// Amaxes of this rank's gradients.
static fp8core_status measure(void *data) {
  gradient_slot *slot = data;
  const fp8comm_communicator *communicator = slot->reducer->communicator;
  const int64_t count = slot->bucket->count;
  slot->amaxes[count] = 0;
  for (int64_t i = 0; i < count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    float amax = fabsf(tensor->known_amax_value);
    if (tensor->lost) {
      amax = 0;
      FP8COMM_TRY(measure_corrected(slot, tensor, &amax));
    } else if (!tensor->known_amax) {
      amax = 0;
      FP8COMM_TRY(fp8core_amax(slot->reducer->context, &tensor->input, &amax));
    }
    slot->amaxes[i] = fp8core_float_bits(amax);
    if (fp8core_amax_is_nonfinite(amax)) slot->amaxes[count] = (uint32_t)(communicator->size - communicator->rank);
  }
  return FP8CORE_OK;
}

static double factor_of(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  switch (reducer->options.scaling) {
  case FP8COMM_SCALING_AUTO: return tensor->mu;
  case FP8COMM_SCALING_PRE: return 1.0 / reducer->communicator->size;
  case FP8COMM_SCALING_POST: break;
  }
  return 1;
}

// What the delayed scales of this step are made for; negative: nothing is expected.
static float expected_amax(const fp8comm_gradient_reducer *reducer, float before) {
  return reducer->options.delayed_scaling ? fp8comm_expected_amax_rule(before) : -1;
}

// By which amax a scale is chosen.
static float scaled_amax(const fp8comm_gradient_reducer *reducer, float before, float found) {
  const float expected = expected_amax(reducer, before);
  return fp8comm_expected_fits_rule(expected, found) ? expected : found;
}

static void set_wire_scale(const fp8comm_gradient_reducer *reducer, fp8comm_gradient_tensor *tensor, float amax) {
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
  set_wire_scale(reducer, tensor, scaled_amax(reducer, tensor->last_amax, statistics->amax));
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
    codes.amax = slot->expects ? &tensor->found_amax : NULL;
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

// `told`: the number of ranks less the lowest with an infinity or a NaN, or 0.
static void note_nonfinite_rank(fp8comm_gradient_reducer *reducer, uint32_t told) {
  const int rank = reducer->communicator->size - (int)told;
  if (told > 0 && (reducer->nonfinite_rank < 0 || rank < reducer->nonfinite_rank)) reducer->nonfinite_rank = rank;
}

// Every rank's scales are the same now; and the codes that travel.
static fp8core_status quantise(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  if (reducer->scaled) note_nonfinite_rank(slot->reducer, slot->amaxes[slot->bucket->count]);
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    choose_scale(slot, i);
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
    FP8COMM_TRY(tensor->lost ? quantise_corrected(slot, tensor)
                             : quantise_range(slot, tensor, 0, (size_t)tensor->elements));
  }
  return FP8CORE_OK;
}

// --- Gradients on a GPU ---
//
// Amaxes and casts are the GPU's, on the stream of the communicator there; records tell it scales, and the host counts.
// Codes come to the host for what happens to them in between; or NCCL, or the transport, and a kernel do that
// (reducer->direct).

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

// Until the stream has done what the call before has given it.
static void build_device_wait(fp8comm_request *request) {
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, 0);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, 0);
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

// What measure() does, as far as it concerns the GPU. The scale of an input may be the one that this step writes later.
static fp8core_status begin_on_device(gradient_slot *slot) {
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

static fp8core_status measured(void *data) {
  gradient_slot *slot = data;
  const fp8comm_communicator *communicator = slot->reducer->communicator;
  const int64_t count = slot->bucket->count;
  slot->amaxes[count] = 0;
  for (int64_t i = 0; i < count; i++) {
    const float amax = fabsf(slot->reducer->records[slot->bucket->first + i].amax);
    slot->amaxes[i] = fp8core_float_bits(amax);
    if (fp8core_amax_is_nonfinite(amax)) slot->amaxes[count] = (uint32_t)(communicator->size - communicator->rank);
  }
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
static fp8core_status sum_on_device(void *data) {
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
static fp8core_status quantise_on_device(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  if (reducer->scaled) note_nonfinite_rank(slot->reducer, slot->amaxes[slot->bucket->count]);
  for (int64_t i = 0; i < slot->bucket->count; i++) choose_scale(slot, i);
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
    options.saturate = reducer->scaled;
    FP8COMM_TRY(fp8core_cast(reducer->device_context, &options, &tensor->input, &codes));
  }
  return download_codes(slot);
}

static fp8core_status quantised(void *data) {
  gradient_slot *slot = data;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const device_record *record = &slot->reducer->records[slot->bucket->first + i];
    fp8comm_gradient_statistics *statistics = &tensor_of(slot, i)->statistics;
    statistics->saturated_in_cast = record->statistics.saturated;
    statistics->flushed_to_zero = record->statistics.flushed_to_zero;
    // What a known amax did not show.
    if (record->statistics.nonfinite > 0) statistics->nonfinite = 1;
  }
  return FP8CORE_OK;
}

// Whether what an output is cast from is a mean as it travels; what an owner has not rounded so is still a sum.
static int is_coded(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return reducer->options.algorithm == FP8COMM_NATIVE || tensor->statistics.nonfinite ||
         is_requantised(reducer, tensor);
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
static fp8core_status requantise_on_device(gradient_slot *slot) {
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

// The means, or an owner's means and sums, and their scales; where those are on the GPU, the NaNs that were filled in.
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
    if (!tensor->statistics.nonfinite || !is_for(reducer, tensor)) continue;
    FP8COMM_TRY(copy(slot, device_code_at(slot, tensor->offset), code_at(slot, tensor->offset),
                     (size_t)tensor->elements * reducer->element));
  }
  return FP8CORE_OK;
}

static void fill_with_nan(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor) {
  const uint32_t nan = fp8core_encode(slot->reducer->wire, NAN, 1);
  for (int64_t j = 0; j < tensor->elements; j++)
    memcpy(code_at(slot, tensor->offset + (size_t)j), &nan, slot->reducer->element);
}

// What unpack() and deliver() do.
static fp8core_status unpack_on_device(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    if (tensor->statistics.nonfinite && is_for(reducer, tensor)) fill_with_nan(slot, tensor);
  }
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
    fp8core_cast_options options = fp8core_cast_options_default();
    options.saturate = 0;
    FP8COMM_TRY(fp8core_cast(reducer->device_context, &options, &mean, &target));
  }
  return FP8CORE_OK;
}

// --- The calls between messages, continued ---

// What this rank has to tell once its part is added up.
static fp8core_status count(void *data) {
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
    if (slot->expects) {
      const float amax = tensor->known_amax ? fabsf(tensor->known_amax_value) : tensor->found_amax;
      record->input_amax = fp8core_float_bits(amax);
      if (fp8core_amax_is_nonfinite(amax))
        record->nonfinite = (uint32_t)(reducer->communicator->size - reducer->communicator->rank);
    }
    if (elements == 0 || reducer->options.algorithm == FP8COMM_NATIVE) continue;
    if (reducer->direct) {
      record->amax = fp8core_float_bits(reducer->records[slot->bucket->first + i].mean_amax);
      continue;
    }
    if (reducer->keeps) {
      record->amax = fp8core_float_bits(fp8core_bits_float(tensor->largest_sum) * tensor->sum_scale_inverse);
      continue;
    }
    if (slot->bucket->lost && !tensor->statistics.nonfinite && is_requantised(reducer, tensor))
      FP8COMM_TRY(correct_sums(slot, tensor, from - begin, elements));
    fp8core_tensor mean = vector(slot->sum + (from - begin), FP8CORE_FP32, elements);
    float amax = 0;
    mean.scale_inverse = &tensor->sum_scale_inverse;
    FP8COMM_TRY(fp8core_amax(reducer->context, &mean, &amax));
    record->amax = fp8core_float_bits(amax);
  }
  return FP8CORE_OK;
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

// The mean of this rank's part, as it travels; and what the counts of all ranks tell.
static fp8core_status requantise(void *data) {
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
    if (statistics->nonfinite && !reducer->direct) {
      const uint32_t nan = fp8core_encode(reducer->wire, NAN, 1);
      for (size_t j = 0; j < elements; j++) memcpy(code_at(slot, from + j), &nan, reducer->element);
    }
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
    if (slot->bucket->lost) FP8COMM_TRY(note_lost_means(slot, tensor, from - begin, elements));
  }
  return reducer->direct ? requantise_on_device(slot) : FP8CORE_OK;
}

// Squares of the exact mean, and of what the mean that travels, or an owner has, is off by, in this rank's part.
static fp8core_status compare(void *data) {
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
    const int codes = reducer->options.algorithm == FP8COMM_NATIVE || is_requantised(reducer, tensor);
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
  fp8core_cast_options options = fp8core_cast_options_default();
  options.saturate = 0;
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
      FP8COMM_TRY(fp8core_cast(reducer->context, &options, &source, &target));
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
static fp8core_status deliver(void *data) {
  gradient_slot *slot = data;
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const int native = reducer->options.algorithm == FP8COMM_NATIVE;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    const size_t elements = (size_t)tensor->elements;
    if (!is_for(reducer, tensor)) continue;
    if (native || tensor->statistics.nonfinite || is_requantised(reducer, tensor)) {
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

static fp8core_status note_snr(void *data) {
  const gradient_slot *slot = data;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const squares_record *record = &slot->squares[i];
    if (record->signal > 0) tensor_of(slot, i)->statistics.snr_db = 10 * log10(record->signal / record->noise);
  }
  return FP8CORE_OK;
}

// A bucket whose codes stay on the GPU: NCCL, or the transport, takes them to where they are added up, and the means to
// all.
static void build_direct(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const fp8comm_communicator *communicator = reducer->communicator;
  fp8comm_request *request = slot->request;
  const size_t count_of = (size_t)slot->bucket->count;
  // One without elements has nothing to exchange.
  const int travels = slot->bucket->elements > 0;
  for (int i = 0; i < communicator->size; i++)
    slot->part_counts[i] = (int64_t)fp8comm_part_count(&slot->bucket->parts, i);
  memset(&slot->exchange, 0, sizeof(slot->exchange));
  slot->exchange.element = reducer->element;
  slot->exchange.counts = slot->part_counts;
  slot->gather = slot->exchange;
  slot->exchange.header.operation = FP8COMM_OPERATION_GRADIENT;
  slot->exchange.send = slot->device_codes;
  slot->exchange.receive = slot->device_parts;
  // The last parts may be shorter; what they travel with then lies behind the bucket.
  slot->gather.header.operation = FP8COMM_OPERATION_ALL_GATHER;
  slot->gather.counts = NULL;
  slot->gather.count = slot->bucket->parts.part;
  slot->gather.send = slot->device_codes + (size_t)communicator->rank * slot->bucket->parts.part;
  slot->gather.receive = slot->device_codes;
  slot->exchanges = 1;
  build_device_wait(request);
  fp8comm_add_call(request, measured, slot);
  build_exchange(slot, &bits_rule, slot->amaxes, count_of + 1);
  fp8comm_add_call(request, quantise_on_device, slot);
  if (travels) fp8comm_add_device_collective(request, &slot->exchange);
  fp8comm_add_call(request, sum_on_device, slot);
  build_device_wait(request);
  fp8comm_add_call(request, quantised, slot);
  fp8comm_add_call(request, count, slot);
  build_exchange(slot, &counts_rule, slot->counts, count_of);
  fp8comm_add_call(request, requantise, slot);
  if (travels && !reducer->owned) fp8comm_add_device_collective(request, &slot->gather);
  fp8comm_add_call(request, unpack_on_device, slot);
  build_device_wait(request);
}

// The means to all, or into the owners' outputs.
static void build_delivery(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_request *request = slot->request;
  const fp8comm_parts *parts = &slot->bucket->parts;
  if (reducer->cuda) {
    if (!reducer->owned) fp8comm_build_all_gather(request, parts, reducer->element, slot->codes);
    fp8comm_add_call(request, unpack_on_device, slot);
    build_device_wait(request);
  } else if (reducer->owned) {
    fp8comm_add_call(request, deliver, slot);
  } else {
    fp8comm_build_all_gather_in_pieces(request, &slot->unpack_rule, parts, reducer->window ? NULL : slot->codes);
  }
}

// From amaxes that all ranks know.
static void build_reduction(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_request *request = slot->request;
  const size_t count_of = (size_t)slot->bucket->count;
  const int native = reducer->options.algorithm == FP8COMM_NATIVE;
  const fp8comm_parts *parts = &slot->bucket->parts;
  fp8comm_add_call(request, reducer->cuda ? quantise_on_device : quantise, slot);
  if (reducer->cuda) {
    build_device_wait(request);
    fp8comm_add_call(request, quantised, slot);
  }
  if (reducer->keeps) {
    // The exchange of amaxes has shown that every rank is done with what was in the slot.
    fp8comm_build_contributions(request, &slot->sum_rule, parts, slot->codes, slot->received, slot->stride);
  } else {
    fp8comm_build_reduce_scatter(request, &slot->sum_rule, parts, slot->codes,
                                 native ? (void *)code_at(slot, own_begin(slot)) : slot->sum, slot->staging);
  }
  if (reducer->options.measure_snr)
    fp8comm_build_reduce_scatter(request, &slot->exact_rule, parts, slot->values, slot->exact, slot->staging);
  fp8comm_add_call(request, count, slot);
  build_exchange(slot, &counts_rule, slot->counts, count_of);
  fp8comm_add_call(request, requantise, slot);
  if (reducer->options.measure_snr) {
    fp8comm_add_call(request, compare, slot);
    build_exchange(slot, &squares_rule, slot->squares, count_of);
    fp8comm_add_call(request, note_snr, slot);
  }
  build_delivery(slot);
}

// Whether there is something to expect of every tensor of the bucket; the same on every rank.
static int can_try(const gradient_slot *slot) {
  if (!slot->reducer->tries) return 0;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    if (tensor->elements > 0 && (tensor->last_amax < 0 || tensor->last_mean_amax < 0)) return 0;
  }
  return 1;
}

static void set_expected_scales(const gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    set_wire_scale(reducer, tensor, expected_amax(reducer, tensor->last_amax));
    tensor->found_amax = 0;
  }
}

// Whether the bucket is as was expected of every tensor.
static int is_as_expected(const gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  for (int64_t i = 0; i < slot->bucket->count; i++) {
    const fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    const counts_record *record = &slot->counts[i];
    if (tensor->elements == 0) continue;
    if (record->nonfinite > 0 || fp8core_amax_is_nonfinite(fp8core_bits_float(record->input_amax)) ||
        !fp8comm_expected_fits_rule(expected_amax(reducer, tensor->last_amax),
                                    fp8core_bits_float(record->input_amax)) ||
        !fp8comm_expected_fits_rule(expected_amax(reducer, tensor->last_mean_amax), fp8core_bits_float(record->amax)))
      return 0;
  }
  return 1;
}

// All ranks know now what was found. Where it is not what was expected of some tensor, the bucket is reduced anew: the
// scales of the others stay what they were, so that results do not depend on who is in a bucket with whom.
static fp8core_status check_expected(void *data) {
  gradient_slot *slot = data;
  const int64_t count_of = slot->bucket->count;
  const int good = is_as_expected(slot);
  slot->amaxes[count_of] = 0;
  for (int64_t i = 0; i < count_of; i++) {
    fp8comm_gradient_tensor *tensor = tensor_of(slot, i);
    fp8comm_gradient_statistics *statistics = &tensor->statistics;
    slot->amaxes[i] = slot->counts[i].input_amax;
    raise_bits(&slot->amaxes[count_of], slot->counts[i].nonfinite);
    if (good) {
      choose_scale(slot, i);
      continue;
    }
    tensor->largest_sum = 0;
    statistics->saturated_in_cast = statistics->flushed_to_zero = 0;
    statistics->nonfinite = 0;
  }
  if (good) {
    fp8comm_add_call(slot->request, requantise, slot);
    build_delivery(slot);
  } else {
    slot->expects = 0;
    slot->exchanges = 2;
    build_reduction(slot);
  }
  return FP8CORE_OK;
}

static void build_try(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_request *request = slot->request;
  set_expected_scales(slot);
  // Every rank is done with what was in the slot, of which no exchange of amaxes tells.
  if (reducer->window) fp8comm_build_barrier(request);
  fp8comm_build_contributions(request, &slot->sum_rule, &slot->bucket->parts, slot->codes, slot->received,
                              slot->stride);
  fp8comm_add_call(request, count, slot);
  build_exchange(slot, &counts_rule, slot->counts, (size_t)slot->bucket->count);
  fp8comm_add_call(request, check_expected, slot);
}

static void build(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_request *request = slot->request;
  slot->expects = can_try(slot);
  slot->exchanges = 1;
  if (slot->expects) {
    build_try(slot);
    return;
  }
  if (reducer->cuda) build_device_wait(request);
  if (reducer->scaled) {
    fp8comm_add_call(request, reducer->cuda ? measured : measure, slot);
    build_exchange(slot, &bits_rule, slot->amaxes, (size_t)slot->bucket->count + 1);
  }
  build_reduction(slot);
}

// --- Making ---

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

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
  return hash;
}

// Of all that ranks must have in common.
static uint64_t digest_of(const fp8comm_gradient_reducer *reducer) {
  const fp8comm_gradient_options *options = &reducer->options;
  const int integers[] = {(int)options->algorithm,    (int)options->scaling,    (int)options->wire_dtype,
                          options->buckets_in_flight, options->measure_snr,     options->error_feedback,
                          options->in_place,          options->delayed_scaling, reducer->owned};
  const double numbers[] = {options->saturation_threshold, options->backoff, options->growth_steps,
                            options->mu_initial,           options->mu_min,  options->mu_max,
                            (double)options->bucket_bytes};
  uint64_t hash = hash_bytes(UINT64_C(0xcbf29ce484222325), integers, sizeof(integers));
  hash = hash_bytes(hash, numbers, sizeof(numbers));
  for (int64_t i = 0; i < reducer->tensor_count; i++) {
    hash = hash_bytes(hash, &reducer->tensors[i].elements, sizeof(int64_t));
    hash = hash_bytes(hash, &reducer->tensors[i].owner, sizeof(int));
  }
  for (int64_t i = 0; i < reducer->bucket_count; i++)
    hash = hash_bytes(hash, &reducer->buckets[i].first, sizeof(int64_t));
  // Folded, as messages print the lower half.
  return hash ^ hash >> 32;
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

// Makes room for the errors of error_feedback, all 0.
static fp8core_status make_lost(fp8comm_gradient_reducer *reducer) {
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

// Elements of a contribution that is kept.
static size_t kept_stride(size_t part) { return (part + PART_ELEMENTS - 1) / PART_ELEMENTS * PART_ELEMENTS; }

// Sets a slot's buffers in `memory`, or finds how many bytes they need.
static size_t lay_out(const fp8comm_gradient_reducer *reducer, gradient_slot *slot, unsigned char *memory) {
  const fp8comm_communicator *communicator = reducer->communicator;
  size_t elements, part, tensors = 0, staging = 0, used = 0;
  largest(reducer, &elements, &part);
  for (int64_t i = 0; i < reducer->bucket_count; i++) {
    const gradient_bucket *one = &reducer->buckets[i];
    const size_t count_of = (size_t)one->count;
    tensors = maximum(tensors, count_of);
    if (!reducer->keeps)
      staging = maximum(staging, fp8comm_reduce_scatter_bytes(communicator, &one->parts, &slot->sum_rule));
    staging = maximum(staging, exchange_bytes(communicator, &bits_rule, count_of + 1));
    staging = maximum(staging, exchange_bytes(communicator, &counts_rule, count_of));
    if (!reducer->options.measure_snr) continue;
    staging = maximum(staging, fp8comm_reduce_scatter_bytes(communicator, &one->parts, &slot->exact_rule));
    staging = maximum(staging, exchange_bytes(communicator, &squares_rule, count_of));
  }
  const int snr = reducer->options.measure_snr;
  // What an owner's outputs on a GPU are cast from is a sum.
  const int sums = !reducer->direct && (!reducer->keeps || (reducer->cuda && reducer->owned)) &&
                   reducer->options.algorithm != FP8COMM_NATIVE;
  const size_t ranks = (size_t)communicator->size;
  const int messages = !reducer->window;
  slot->codes =
    messages ? place(memory, &used, elements * reducer->element) : reducer->window->own + slot->window_offset;
  slot->received = messages && reducer->keeps ? place(memory, &used, (ranks - 1) * kept_stride(part)) : NULL;
  slot->sources = place(memory, &used, reducer->keeps ? ranks * sizeof(*slot->sources) : 0);
  slot->sum = place(memory, &used, sums ? part * sizeof(float) : 0);
  slot->chunk = place(memory, &used, (reducer->keeps && reducer->owned ? OWNER_CHUNK : CHUNK) * sizeof(float));
  slot->other_chunk = place(memory, &used, CHUNK * sizeof(float));
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
  }
  reducer->memory_bytes += codes + values + sum + parts;
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
  const int native = reducer->options.algorithm == FP8COMM_NATIVE;
  const fp8comm_reducer wide = {reducer->element, sizeof(float), wide_first, wide_add, NULL, slot};
  const fp8comm_reducer narrow = {reducer->element, reducer->element, native_first, native_add, NULL, slot};
  const fp8comm_reducer kept = {reducer->element, 0, quantise_piece, measure_sums, NULL, slot};
  const fp8comm_reducer exact = {sizeof(float), sizeof(float), exact_first, exact_add, NULL, slot};
  const fp8comm_reducer unpacks = {reducer->element, 0, NULL, NULL, unpack, slot};
  slot->reducer = reducer;
  slot->sum_rule = native ? narrow : reducer->keeps ? kept : wide;
  slot->exact_rule = exact;
  slot->unpack_rule = unpacks;
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
  reducer->memory_bytes += 2 * bytes;
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
  if (reducer->scaled && reducer->options.error_feedback) FP8COMM_TRY(make_lost(reducer));
  reducer->memory_bytes += reducer->lost_bytes + reducer->lost_means_bytes;
  reducer->digest = digest_of(reducer);
  return FP8CORE_OK;
}

static fp8comm_header header_of(const fp8comm_gradient_reducer *reducer, fp8comm_operation_kind operation,
                                uint32_t detail, uint64_t count_of) {
  fp8comm_header header;
  memset(&header, 0, sizeof(header));
  header.operation = operation;
  header.dtype = (uint32_t)reducer->wire;
  header.detail = detail;
  header.count = count_of;
  header.digest = reducer->digest;
  return header;
}

static fp8core_status agree(fp8comm_gradient_reducer *reducer) {
  const fp8comm_header header =
    header_of(reducer, FP8COMM_OPERATION_GRADIENT_CREATE, 0, (uint64_t)reducer->tensor_count);
  fp8comm_request *request;
  FP8COMM_TRY(fp8comm_request_begin(reducer->communicator, &header, &request));
  // None goes on before all have agreed.
  fp8comm_build_barrier(request);
  FP8COMM_TRY(fp8comm_request_start(&request));
  return fp8comm_request_wait(&request);
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
  made->keeps = options.algorithm == FP8COMM_TWO_SHOT && !options.error_feedback &&
                (!made->owned || communicator->size <= KEPT_RANKS);
  made->tries = made->keeps && options.delayed_scaling && !options.measure_snr && !cuda;
  made->tensor_count = tensors;
  made->nonfinite_rank = -1;
  fp8core_status status = cuda ? make_on_device(made, cuda) : FP8CORE_OK;
  if (status == FP8CORE_OK) status = make(made, elements);
  // The caller's, for this call only.
  made->options.owners = made->options.bucket_of = NULL;
  if (status == FP8CORE_OK) status = agree(made);
  if (status == FP8CORE_OK) status = make_window(made);
  for (int i = 0; i < made->slot_count && status == FP8CORE_OK; i++) status = make_slot(made, &made->slots[i]);
  // None goes on, and none begins a step, before all have what they need.
  if (status == FP8CORE_OK) status = agree(made);
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
  free_lost(gone, gone->cuda != NULL, gone->lost);
  free_lost(gone, gone->direct, gone->lost_means);
  free_on_device(gone);
  free(gone->slots);
  free(gone->begins);
  free(gone->buckets);
  free(gone->order);
  free(gone->tensors);
  free(gone);
}

// --- Steps ---

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

// Of what the scales of the bucket depend on: ranks that have loaded other states do not agree.
static uint64_t digest_of_state(const fp8comm_gradient_reducer *reducer, const gradient_bucket *bucket) {
  uint64_t hash = 0;
  for (int64_t i = bucket->first; i < bucket->first + bucket->count && reducer->scaled; i++) {
    const fp8comm_gradient_tensor *tensor = &reducer->tensors[i];
    hash = hash_bytes(hash, &tensor->mu, sizeof(tensor->mu));
    if (!reducer->options.delayed_scaling) continue;
    hash = hash_bytes(hash, &tensor->last_amax, sizeof(tensor->last_amax));
    hash = hash_bytes(hash, &tensor->last_mean_amax, sizeof(tensor->last_mean_amax));
  }
  return hash ^ hash >> 32;
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
  fp8comm_header header = header_of(reducer, FP8COMM_OPERATION_GRADIENT, (uint32_t)index, (uint64_t)bucket->elements);
  header.digest ^= digest_of_state(reducer, bucket);
  FP8COMM_TRY(fp8comm_request_begin(reducer->communicator, &header, &slot->request));
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
  const fp8core_status status = reducer->cuda ? begin_on_device(slot) : FP8CORE_OK;
  if (reducer->direct) {
    build_direct(slot);
  } else {
    build(slot);
  }
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

fp8core_status fp8comm_gradient_forget(fp8comm_gradient_reducer *reducer) {
  FP8COMM_TRY(zero_lost(reducer, reducer->cuda != NULL, reducer->lost, reducer->lost_bytes));
  return zero_lost(reducer, reducer->direct, reducer->lost_means, reducer->lost_means_bytes);
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
