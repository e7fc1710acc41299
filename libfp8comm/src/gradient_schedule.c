// A bucket's steps: what is exchanged, and what is called in between.
#include <string.h>

#include "gradient_internal.h"
#include "gradient_rules.h"

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
    raise_bits(&total[i].lacking_room, record[i].lacking_room);
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

size_t fp8comm_gradient_staging_bytes(const gradient_slot *slot, const gradient_bucket *bucket) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  const fp8comm_communicator *communicator = reducer->communicator;
  const size_t count_of = (size_t)bucket->count;
  size_t bytes = 0;
  if (!reducer->keeps && !reducer->direct)
    bytes = fp8comm_reduce_scatter_bytes(communicator, &bucket->parts, &slot->sum_rule);
  bytes = maximum(bytes, exchange_bytes(communicator, &bits_rule, count_of + 1));
  bytes = maximum(bytes, exchange_bytes(communicator, &counts_rule, count_of));
  if (!reducer->options.measure_snr) return bytes;
  bytes = maximum(bytes, fp8comm_reduce_scatter_bytes(communicator, &bucket->parts, &slot->exact_rule));
  return maximum(bytes, exchange_bytes(communicator, &squares_rule, count_of));
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

// --- Steps ---

// Until the stream has done what the call before has given it.
static void build_device_wait(fp8comm_request *request) {
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_MARK, 0);
  fp8comm_add_step(request, FP8COMM_STEP_DEVICE_WAIT, 0);
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
  build_device_wait(request);
  fp8comm_add_call(request, fp8comm_gradient_measured, slot);
  build_exchange(slot, &bits_rule, slot->amaxes, count_of + 1);
  fp8comm_add_call(request, fp8comm_gradient_quantise_on_device, slot);
  if (travels) fp8comm_add_device_collective(request, &slot->exchange);
  fp8comm_add_call(request, fp8comm_gradient_sum_on_device, slot);
  build_device_wait(request);
  fp8comm_add_call(request, fp8comm_gradient_quantised, slot);
  fp8comm_add_call(request, fp8comm_gradient_count, slot);
  build_exchange(slot, &counts_rule, slot->counts, count_of);
  fp8comm_add_call(request, fp8comm_gradient_requantise, slot);
  fp8comm_add_call(request, fp8comm_gradient_requantise_on_device, slot);
  if (travels && !reducer->owned) fp8comm_add_device_collective(request, &slot->gather);
  fp8comm_add_call(request, fp8comm_gradient_unpack_on_device, slot);
  build_device_wait(request);
}

// The means to all, or into the owners' outputs.
static void build_delivery(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_request *request = slot->request;
  const fp8comm_parts *parts = &slot->bucket->parts;
  if (reducer->cuda) {
    if (!reducer->owned) fp8comm_build_all_gather(request, parts, reducer->element, slot->codes);
    fp8comm_add_call(request, fp8comm_gradient_unpack_on_device, slot);
    build_device_wait(request);
  } else if (reducer->owned) {
    fp8comm_add_call(request, fp8comm_gradient_deliver, slot);
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
  fp8comm_add_call(request, reducer->cuda ? fp8comm_gradient_quantise_on_device : fp8comm_gradient_quantise, slot);
  if (reducer->cuda) {
    build_device_wait(request);
    fp8comm_add_call(request, fp8comm_gradient_quantised, slot);
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
  fp8comm_add_call(request, fp8comm_gradient_count, slot);
  build_exchange(slot, &counts_rule, slot->counts, count_of);
  fp8comm_add_call(request, fp8comm_gradient_requantise, slot);
  if (reducer->options.measure_snr) {
    fp8comm_add_call(request, fp8comm_gradient_compare, slot);
    build_exchange(slot, &squares_rule, slot->squares, count_of);
    fp8comm_add_call(request, fp8comm_gradient_note_snr, slot);
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
    fp8comm_gradient_set_wire_scale(reducer, tensor, fp8comm_gradient_expected_amax(reducer, tensor->last_amax));
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
        !fp8comm_expected_fits_rule(fp8comm_gradient_expected_amax(reducer, tensor->last_amax),
                                    fp8core_bits_float(record->input_amax)) ||
        !fp8comm_expected_fits_rule(fp8comm_gradient_expected_amax(reducer, tensor->last_mean_amax),
                                    fp8core_bits_float(record->amax)))
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
    if (good) continue;
    tensor->largest_sum = 0;
    statistics->saturated_in_cast = statistics->flushed_to_zero = 0;
    statistics->nonfinite = 0;
  }
  if (good) {
    fp8comm_gradient_choose_scales(slot);
    fp8comm_add_call(slot->request, fp8comm_gradient_requantise, slot);
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
  fp8comm_add_call(request, fp8comm_gradient_count, slot);
  build_exchange(slot, &counts_rule, slot->counts, (size_t)slot->bucket->count);
  fp8comm_add_call(request, check_expected, slot);
}

void fp8comm_gradient_build(gradient_slot *slot) {
  const fp8comm_gradient_reducer *reducer = slot->reducer;
  fp8comm_request *request = slot->request;
  slot->expects = can_try(slot);
  slot->exchanges = 1;
  if (reducer->direct) {
    build_direct(slot);
    return;
  }
  if (slot->expects) {
    build_try(slot);
    return;
  }
  if (reducer->cuda) build_device_wait(request);
  if (reducer->scaled) {
    fp8comm_add_call(request, reducer->cuda ? fp8comm_gradient_measured : fp8comm_gradient_measure, slot);
    build_exchange(slot, &bits_rule, slot->amaxes, (size_t)slot->bucket->count + 1);
  }
  build_reduction(slot);
}
