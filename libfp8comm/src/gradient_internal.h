// What the files that carry out the gradient all-reduce share: reducers, buckets and their slots, and who calls whom.
#ifndef FP8COMM_SRC_GRADIENT_INTERNAL_H
#define FP8COMM_SRC_GRADIENT_INTERNAL_H

#include <math.h>
#include <string.h>

#include "cpu/sum.h"
#include "device.h"
#include "gradient.h"
#include "internal.h"
#include "numerics.h"

// Elements that are converted at once: in and out stay in the first two caches.
#define CHUNK 16384
// The same for an owner's sums, which all threads work on.
#define OWNER_CHUNK 262144
// Parts begin at multiples of this many elements.
#define PART_ELEMENTS 64

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
  // Of the gradient, where its cast has measured it, else the most that its format holds: FP32 bits.
  uint32_t input_amax;
  // By how much FP32's largest value exceeds that for which this rank's output has room: bits.
  uint32_t lacking_room;
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
  // The bucket as it travels by the host; then the mean. Where ranks read each other's, in the window, `window_offset`
  // bytes from its beginning, and of the mean this rank's part only.
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
  // The same: NaNs, page-locked; as many as the largest bucket has elements, up to CHUNK.
  unsigned char *nans;
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
  // Whether contributions are kept, on the host, until the scale of the mean is known, rather than added up as they
  // come.
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

static inline size_t minimum(size_t one, size_t other) { return one < other ? one : other; }
static inline size_t maximum(size_t one, size_t other) { return one > other ? one : other; }

static inline fp8comm_gradient_tensor *tensor_of(const gradient_slot *slot, int64_t index) {
  return &slot->reducer->tensors[slot->bucket->first + index];
}

// Whether this rank gets the tensor's mean.
static inline int is_for(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return tensor->owner < 0 || tensor->owner == reducer->communicator->rank;
}

// Whether the tensor's mean is rounded to what travels, or would: an owner writes other formats from the sum.
static inline int is_requantised(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return !reducer->owned || (tensor->output.dtype == reducer->wire && reducer->wire != FP8CORE_FP32);
}

// Whether what an output is cast from is a mean as it travels; what an owner has not rounded so is still a sum.
static inline int is_coded(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_tensor *tensor) {
  return reducer->options.algorithm == FP8COMM_NATIVE || tensor->statistics.nonfinite ||
         is_requantised(reducer, tensor);
}

// Whether what travels is rounded by no scale of an amax, which casts measure then: how much roundings add is known.
static inline int is_measured_in_cast(const fp8comm_gradient_reducer *reducer) { return reducer->wire == FP8CORE_BF16; }

static inline size_t own_begin(const gradient_slot *slot) {
  return fp8comm_part_begin(&slot->bucket->parts, slot->reducer->communicator->rank);
}

static inline size_t own_count(const gradient_slot *slot) {
  return fp8comm_part_count(&slot->bucket->parts, slot->reducer->communicator->rank);
}

static inline unsigned char *code_at(const gradient_slot *slot, size_t element) {
  return slot->codes + element * slot->reducer->element;
}

static inline fp8core_tensor vector(void *data, fp8core_dtype dtype, size_t elements) {
  const int64_t shape = (int64_t)elements;
  return fp8core_tensor_create(data, dtype, 1, &shape);
}

static inline fp8core_status convert(const gradient_slot *slot, void *out, fp8core_dtype to, const void *in,
                                     fp8core_dtype from, size_t elements, fp8core_cast_statistics *statistics) {
  fp8core_cast_options options = fp8core_cast_options_default();
  const fp8core_tensor source = vector((void *)(uintptr_t)in, from, elements), target = vector(out, to, elements);
  options.statistics = statistics;
  // On the way to FP32 nothing is to be lost, infinities neither.
  options.saturate = to != FP8CORE_FP32;
  return fp8core_cast(slot->reducer->context, &options, &source, &target);
}

static inline int is_dense(const fp8core_tensor *tensor) { return tensor->row_stride == 0 || tensor->dimensions < 2; }

// A tensor of the bucket has this amax here; the last place tells of one that is not finite.
static inline void note_amax(gradient_slot *slot, int64_t index, float amax) {
  const fp8comm_communicator *communicator = slot->reducer->communicator;
  slot->amaxes[index] = fp8core_float_bits(amax);
  if (fp8core_amax_is_nonfinite(amax))
    slot->amaxes[slot->bucket->count] = (uint32_t)(communicator->size - communicator->rank);
}

// The input's elements from `first` on, up to `elements` of them: as many as lie together.
static inline fp8core_tensor input_part(const fp8comm_gradient_tensor *tensor, size_t first, size_t elements) {
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

static inline void fill_with_nan(const fp8comm_gradient_reducer *reducer, unsigned char *codes, size_t elements) {
  const uint32_t nan = fp8core_encode(reducer->wire, NAN, 1);
  for (size_t i = 0; i < elements; i++) memcpy(codes + i * reducer->element, &nan, reducer->element);
}

// What one tensor has of the elements from `begin` to `end`: *from and the number.
static inline size_t overlap(const fp8comm_gradient_tensor *tensor, size_t begin, size_t end, size_t *from) {
  const size_t first = maximum(begin, tensor->offset);
  const size_t last = minimum(end, tensor->offset + (size_t)tensor->elements);
  *from = first;
  return first < last ? last - first : 0;
}

static inline fp8comm_sum contributions(const gradient_slot *slot) {
  const fp8comm_sum sum = {slot->reducer->wire, slot->reducer->communicator->size, slot->sources};
  return sum;
}

// Elements of a contribution that is kept.
static inline size_t kept_stride(size_t part) { return (part + PART_ELEMENTS - 1) / PART_ELEMENTS * PART_ELEMENTS; }

// gradient_agreement.c: that ranks agree on a reducer, which is collective; and a bucket's request, without steps, in
// which they agree on the bucket and on what its scales depend on.

fp8core_status fp8comm_gradient_agree(fp8comm_gradient_reducer *reducer);
fp8core_status fp8comm_gradient_begin(const fp8comm_gradient_reducer *reducer, const gradient_bucket *bucket,
                                      fp8comm_request **request);

// gradient_schedule.c

// Bytes that a bucket's exchanges need of the slot's staging.
size_t fp8comm_gradient_staging_bytes(const gradient_slot *slot, const gradient_bucket *bucket);
// Adds the steps of the slot's bucket to its request.
void fp8comm_gradient_build(gradient_slot *slot);

// gradient_steps.c, for host memory; gradients on a GPU share scales, count() and requantise().

// How the slot's contributions are added up, and its means unpacked.
void fp8comm_gradient_set_rules(gradient_slot *slot);
// What the delayed scales of this step are made for; negative: nothing is expected.
float fp8comm_gradient_expected_amax(const fp8comm_gradient_reducer *reducer, float before);
void fp8comm_gradient_set_wire_scale(const fp8comm_gradient_reducer *reducer, fp8comm_gradient_tensor *tensor,
                                     float amax);
// Of all tensors of the bucket, from amaxes that all ranks know: every rank's are the same.
void fp8comm_gradient_choose_scales(gradient_slot *slot);
// Calls between messages; `slot` is a gradient_slot.
fp8core_status fp8comm_gradient_measure(void *slot);
fp8core_status fp8comm_gradient_quantise(void *slot);
fp8core_status fp8comm_gradient_count(void *slot);
fp8core_status fp8comm_gradient_requantise(void *slot);
fp8core_status fp8comm_gradient_compare(void *slot);
fp8core_status fp8comm_gradient_note_snr(void *slot);
fp8core_status fp8comm_gradient_deliver(void *slot);

// gradient_device.c

// What measure() does, as far as it concerns the GPU. The scale of an input may be the one that this step writes later.
fp8core_status fp8comm_gradient_begin_on_device(gradient_slot *slot);
// Calls between messages. measured() and quantised() read what the GPU has found, so they come after a wait for it.
fp8core_status fp8comm_gradient_measured(void *slot);
fp8core_status fp8comm_gradient_quantise_on_device(void *slot);
fp8core_status fp8comm_gradient_quantised(void *slot);
fp8core_status fp8comm_gradient_sum_on_device(void *slot);
fp8core_status fp8comm_gradient_requantise_on_device(void *slot);
fp8core_status fp8comm_gradient_unpack_on_device(void *slot);

// gradient_feedback.c: errors in host memory; room for them, wherever it is.

// Makes room for the errors of error_feedback, all 0.
fp8core_status fp8comm_gradient_make_errors(fp8comm_gradient_reducer *reducer);
void fp8comm_gradient_free_errors(fp8comm_gradient_reducer *reducer);
fp8core_status fp8comm_gradient_measure_corrected(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                  float *amax);
fp8core_status fp8comm_gradient_quantise_corrected(gradient_slot *slot, fp8comm_gradient_tensor *tensor);
// Sums of this rank's part, from its element `first` on, with what roundings of the mean have lost before.
fp8core_status fp8comm_gradient_correct_sums(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                             size_t first, size_t elements);
fp8core_status fp8comm_gradient_note_lost_means(const gradient_slot *slot, const fp8comm_gradient_tensor *tensor,
                                                size_t first, size_t elements);

#endif
