// What ranks must have in common: told by the headers of a reducer's creation and of every bucket.
#include <string.h>

#include "gradient_internal.h"

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

fp8core_status fp8comm_gradient_agree(fp8comm_gradient_reducer *reducer) {
  reducer->digest = digest_of(reducer);
  const fp8comm_header header =
    header_of(reducer, FP8COMM_OPERATION_GRADIENT_CREATE, 0, (uint64_t)reducer->tensor_count);
  fp8comm_request *request;
  FP8COMM_TRY(fp8comm_request_begin(reducer->communicator, &header, &request));
  // None goes on before all have agreed.
  fp8comm_build_barrier(request);
  FP8COMM_TRY(fp8comm_request_start(&request));
  return fp8comm_request_wait(&request);
}

fp8core_status fp8comm_gradient_begin(const fp8comm_gradient_reducer *reducer, const gradient_bucket *bucket,
                                      fp8comm_request **request) {
  fp8comm_header header =
    header_of(reducer, FP8COMM_OPERATION_GRADIENT, (uint32_t)(bucket - reducer->buckets), (uint64_t)bucket->elements);
  header.digest ^= digest_of_state(reducer, bucket);
  return fp8comm_request_begin(reducer->communicator, &header, request);
}
