#include "simulated_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "parallel.h"
#include "try.h"

// Tensors begin at multiples of it in memory.
#define ALIGNMENT 64
// Small tensors travel together; a larger bucket would only cost memory, on each of so many ranks.
#define LEAST_BUCKET_BYTES 65536
// Elements of a turn of a parallel loop.
#define TURN 65536
// Nobody waits for another machine here; a busy one may be slow.
#define TIMEOUT_SECONDS 3600

typedef struct tensor_place {
  int64_t elements;
  // In a rank's gradients, in bytes, and in the means.
  size_t offset;
  size_t first;
} tensor_place;

// Sums over a rank's share of a tensor.
typedef struct share_sums {
  double signal;
  double noise;
  uint64_t lost;
  uint64_t at_maximum;
} share_sums;

typedef struct simulated_rank {
  fp8lm_simulated_ranks *all;
  int rank;
  fp8core_context *context;
  fp8comm_gradient_reducer *reducers[FP8LM_REDUCERS];
  fp8core_tensor *inputs;
  fp8core_tensor *outputs;
  float *scale_inverses;
  unsigned char *output;
  // [reducers, tensors].
  share_sums *sums;
  fp8core_status status;
  char message[512];
} simulated_rank;

struct fp8lm_simulated_ranks {
  const fp8gpt_model *model;
  fp8lm_simulated_options options;
  int64_t tensor_count;
  tensor_place *places;
  int64_t elements;
  int64_t largest;
  // Of a rank.
  size_t gradient_bytes;
  unsigned char *gradients;
  size_t mapped_bytes;
  int64_t bucket_bytes;
  // Sums over ranks until all are there.
  double *mean;
  float *narrow_mean;
  int64_t added;
  int rounded;
  fp8comm_communicator **communicators;
  simulated_rank *ranks;
  // Values of the wire's codes.
  double values[256];
  int64_t step;
  fp8lm_reduction *reductions;
};

static const struct {
  fp8comm_gradient_algorithm algorithm;
  fp8comm_gradient_scaling scaling;
} reducers[FP8LM_REDUCERS] = {
  {FP8COMM_NATIVE, FP8COMM_SCALING_AUTO},  {FP8COMM_NATIVE, FP8COMM_SCALING_PRE},
  {FP8COMM_NATIVE, FP8COMM_SCALING_POST},  {FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO},
  {FP8COMM_TWO_SHOT, FP8COMM_SCALING_PRE}, {FP8COMM_TWO_SHOT, FP8COMM_SCALING_POST},
};

fp8comm_gradient_algorithm fp8lm_reducer_algorithm(int reducer) { return reducers[reducer].algorithm; }
fp8comm_gradient_scaling fp8lm_reducer_scaling(int reducer) { return reducers[reducer].scaling; }

int fp8lm_reducer_of(fp8comm_gradient_algorithm algorithm, fp8comm_gradient_scaling scaling) {
  int found = 0;
  for (int i = 0; i < FP8LM_REDUCERS; i++)
    if (reducers[i].algorithm == algorithm && reducers[i].scaling == scaling) found = i;
  return found;
}

static fp8core_status out_of_memory(const char *what, size_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes for %s", bytes, what);
}

static size_t aligned(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// --- Memory ---

int64_t fp8lm_simulated_gradient_bytes(const fp8gpt_model *model, int ranks) {
  size_t bytes = 0;
  for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
    fp8gpt_parameter parameter;
    if (fp8gpt_model_parameter(model, i, &parameter) != FP8CORE_OK) return -1;
    bytes += aligned((size_t)fp8core_tensor_span_bytes(&parameter.gradient));
  }
  return (int64_t)bytes * ranks;
}

static fp8core_status lay_out(fp8lm_simulated_ranks *ranks) {
  const fp8gpt_model *model = ranks->model;
  ranks->tensor_count = fp8gpt_model_parameters(model);
  ranks->places = calloc((size_t)ranks->tensor_count, sizeof(*ranks->places));
  if (!ranks->places)
    return out_of_memory("the table of tensors", (size_t)ranks->tensor_count * sizeof(*ranks->places));
  for (int64_t i = 0; i < ranks->tensor_count; i++) {
    fp8gpt_parameter parameter;
    tensor_place *place = &ranks->places[i];
    TRY(fp8gpt_model_parameter(model, i, &parameter));
    place->elements = fp8core_tensor_elements(&parameter.gradient);
    place->offset = ranks->gradient_bytes;
    place->first = (size_t)ranks->elements;
    ranks->gradient_bytes += aligned((size_t)fp8core_tensor_span_bytes(&parameter.gradient));
    ranks->elements += place->elements;
    if (place->elements > ranks->largest) ranks->largest = place->elements;
  }
  ranks->bucket_bytes = ranks->largest > LEAST_BUCKET_BYTES ? ranks->largest : LEAST_BUCKET_BYTES;
  return FP8CORE_OK;
}

static fp8core_status failed_file(const char *folder, size_t bytes, const char *call, int reason) {
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                "%s: cannot %s a file of %zu bytes for the gradients of all ranks: %s", folder, call,
                                bytes, strerror(reason));
}

// A file that has no name, and all its blocks: a full disk is met here, not as a signal when it is written.
static fp8core_status map_file(fp8lm_simulated_ranks *ranks, const char *folder) {
  const size_t bytes = ranks->mapped_bytes;
  char path[4096];
  if (snprintf(path, sizeof(path), "%s/fp8lm-gradients-XXXXXX", folder) >= (int)sizeof(path))
    return failed_file(folder, bytes, "name", ENAMETOOLONG);
  const int descriptor = mkostemp(path, O_CLOEXEC);
  if (descriptor < 0) return failed_file(folder, bytes, "create", errno);
  (void)unlink(path);
  const int reason = posix_fallocate(descriptor, 0, (off_t)bytes);
  void *mapped = reason ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  const int map_reason = errno;
  (void)close(descriptor);
  if (reason) return failed_file(folder, bytes, "create", reason);
  if (mapped == MAP_FAILED) return failed_file(folder, bytes, "map", map_reason);
  ranks->gradients = mapped;
  return FP8CORE_OK;
}

static fp8core_status map_gradients(fp8lm_simulated_ranks *ranks) {
  ranks->mapped_bytes = ranks->gradient_bytes * (size_t)ranks->options.ranks;
  if (ranks->options.folder) return map_file(ranks, ranks->options.folder);
  void *mapped = mmap(NULL, ranks->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return out_of_memory("the gradients of all ranks", ranks->mapped_bytes);
#if defined(MADV_HUGEPAGE)
  (void)madvise(mapped, ranks->mapped_bytes, MADV_HUGEPAGE);
#endif
  ranks->gradients = mapped;
  return FP8CORE_OK;
}

static fp8core_status take_memory(fp8lm_simulated_ranks *ranks) {
  const fp8lm_simulated_options *options = &ranks->options;
  const size_t records = (size_t)(options->steps * FP8LM_REDUCERS * ranks->tensor_count);
  ranks->mean = malloc((size_t)ranks->elements * sizeof(*ranks->mean));
  ranks->narrow_mean = malloc((size_t)ranks->elements * sizeof(*ranks->narrow_mean));
  ranks->reductions = calloc(records, sizeof(*ranks->reductions));
  ranks->communicators = calloc((size_t)options->ranks, sizeof(*ranks->communicators));
  ranks->ranks = calloc((size_t)options->ranks, sizeof(*ranks->ranks));
  if (!ranks->mean || !ranks->narrow_mean) return out_of_memory("the mean", fp8lm_simulated_mean_bytes(ranks));
  if (!ranks->reductions || !ranks->communicators || !ranks->ranks)
    return out_of_memory("the results", records * sizeof(*ranks->reductions));
  return map_gradients(ranks);
}

size_t fp8lm_simulated_mean_bytes(const fp8lm_simulated_ranks *ranks) {
  return (size_t)ranks->elements * (sizeof(*ranks->mean) + sizeof(*ranks->narrow_mean));
}

size_t fp8lm_simulated_reducer_bytes(const fp8lm_simulated_ranks *ranks) {
  size_t bytes = 0;
  for (int i = 0; i < ranks->options.ranks; i++) {
    for (int j = 0; j < FP8LM_REDUCERS; j++) bytes += fp8comm_gradient_memory_bytes(ranks->ranks[i].reducers[j]);
    bytes += (size_t)ranks->bucket_bytes;
  }
  return bytes;
}

// --- Threads, one a rank ---

typedef fp8core_status (*rank_function)(simulated_rank *rank);

typedef struct rank_call {
  simulated_rank *rank;
  rank_function function;
} rank_call;

static void *run_rank(void *argument) {
  const rank_call *call = argument;
  simulated_rank *rank = call->rank;
  rank->status = call->function(rank);
  if (rank->status == FP8CORE_OK) return NULL;
  (void)snprintf(rank->message, sizeof(rank->message), "%s", fp8core_last_error());
  // The others would wait for it.
  (void)fp8comm_communicator_abort(rank->all->communicators[rank->rank], rank->message);
  return NULL;
}

// Calls the function on every rank at once. The first rank's error that is not only the news of another's.
static fp8core_status on_all_ranks(fp8lm_simulated_ranks *ranks, rank_function function) {
  const int count = ranks->options.ranks;
  pthread_t *threads = calloc((size_t)count, sizeof(*threads));
  rank_call *calls = calloc((size_t)count, sizeof(*calls));
  int started = 0;
  int reason = 0;
  if (!threads || !calls) {
    free(threads);
    free(calls);
    return out_of_memory("the threads of the ranks", (size_t)count * (sizeof(*threads) + sizeof(*calls)));
  }
  for (; started < count; started++) {
    calls[started] = (rank_call){.rank = &ranks->ranks[started], .function = function};
    reason = pthread_create(&threads[started], NULL, run_rank, &calls[started]);
    if (reason != 0) break;
  }
  for (int i = started; i < count; i++)
    (void)fp8comm_communicator_abort(ranks->communicators[i], "its thread could not be started");
  for (int i = 0; i < started; i++) (void)pthread_join(threads[i], NULL);
  free(threads);
  free(calls);
  if (started < count)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot start thread %d of %d, one a rank: %s", started,
                                  count, strerror(reason));
  const simulated_rank *failed = NULL;
  for (int i = 0; i < count; i++) {
    const simulated_rank *rank = &ranks->ranks[i];
    if (rank->status == FP8CORE_OK) continue;
    if (!failed || (failed->status == FP8CORE_ERROR_PEER && rank->status != FP8CORE_ERROR_PEER)) failed = rank;
  }
  return failed ? fp8core_set_last_error(failed->status, "%s", failed->message) : FP8CORE_OK;
}

static fp8core_status create_rank(simulated_rank *rank) {
  fp8lm_simulated_ranks *all = rank->all;
  const size_t tensors = (size_t)all->tensor_count;
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = 1;
  TRY(fp8core_context_create(&rank->context, &context_options));
  int64_t *elements = malloc(tensors * sizeof(*elements));
  rank->inputs = calloc(tensors, sizeof(*rank->inputs));
  rank->outputs = calloc(tensors, sizeof(*rank->outputs));
  rank->scale_inverses = calloc(tensors, sizeof(*rank->scale_inverses));
  rank->output = malloc((size_t)all->bucket_bytes);
  rank->sums = calloc(FP8LM_REDUCERS * tensors, sizeof(*rank->sums));
  fp8core_status status = FP8CORE_OK;
  if (!elements || !rank->inputs || !rank->outputs || !rank->scale_inverses || !rank->output || !rank->sums)
    status = out_of_memory("a rank", (size_t)all->bucket_bytes);
  for (size_t i = 0; i < tensors && status == FP8CORE_OK; i++) elements[i] = all->places[i].elements;
  for (int i = 0; i < FP8LM_REDUCERS && status == FP8CORE_OK; i++) {
    fp8comm_gradient_options options = all->options.gradient;
    options.algorithm = reducers[i].algorithm;
    options.scaling = reducers[i].scaling;
    options.buckets_in_flight = 1;
    options.bucket_bytes = all->bucket_bytes;
    status = fp8comm_gradient_create(&rank->reducers[i], all->communicators[rank->rank], rank->context,
                                     all->tensor_count, elements, &options);
  }
  free(elements);
  return status;
}

// --- Making and ending ---

fp8core_status fp8lm_simulated_ranks_create(fp8lm_simulated_ranks **created, const fp8gpt_model *model,
                                            const fp8lm_simulated_options *options) {
  fp8lm_simulated_ranks *ranks = calloc(1, sizeof(*ranks));
  *created = ranks;
  if (!ranks) return out_of_memory("the ranks", sizeof(*ranks));
  ranks->model = model;
  ranks->options = *options;
  TRY(lay_out(ranks));
  TRY(take_memory(ranks));
  for (int i = 0; i < 256; i++) ranks->values[i] = (double)fp8core_decode(options->gradient.wire_dtype, (uint32_t)i);
  fp8comm_communicator_options communicator_options = fp8comm_communicator_options_default();
  communicator_options.timeout_seconds = TIMEOUT_SECONDS;
  TRY(fp8comm_threads_create(options->ranks, ranks->communicators, &communicator_options));
  for (int i = 0; i < options->ranks; i++) {
    ranks->ranks[i].all = ranks;
    ranks->ranks[i].rank = i;
  }
  return on_all_ranks(ranks, create_rank);
}

void fp8lm_simulated_ranks_destroy(fp8lm_simulated_ranks **destroyed) {
  fp8lm_simulated_ranks *ranks = *destroyed;
  if (!ranks) return;
  for (int i = 0; ranks->ranks && i < ranks->options.ranks; i++) {
    simulated_rank *rank = &ranks->ranks[i];
    for (int j = 0; j < FP8LM_REDUCERS; j++) fp8comm_gradient_destroy(&rank->reducers[j]);
    fp8core_context_destroy(&rank->context);
    free(rank->inputs);
    free(rank->outputs);
    free(rank->scale_inverses);
    free(rank->output);
    free(rank->sums);
  }
  for (int i = 0; ranks->communicators && i < ranks->options.ranks; i++)
    fp8comm_communicator_destroy(&ranks->communicators[i]);
  if (ranks->gradients) (void)munmap(ranks->gradients, ranks->mapped_bytes);
  free(ranks->places);
  free(ranks->mean);
  free(ranks->narrow_mean);
  free(ranks->reductions);
  free(ranks->communicators);
  free(ranks->ranks);
  free(ranks);
  *destroyed = NULL;
}

// --- A step ---

void fp8lm_simulated_ranks_begin(fp8lm_simulated_ranks *ranks) {
  memset(ranks->mean, 0, (size_t)ranks->elements * sizeof(*ranks->mean));
  ranks->added = 0;
  ranks->rounded = 0;
}

typedef struct mean_turn {
  double *sum;
  float *values;
  size_t elements;
  double divisor;
} mean_turn;

static void add_turn(void *context, size_t index, int thread) {
  const mean_turn *turn = context;
  const size_t end = (index + 1) * TURN < turn->elements ? (index + 1) * TURN : turn->elements;
  (void)thread;
  for (size_t i = index * TURN; i < end; i++) turn->sum[i] += (double)turn->values[i];
}

static void round_turn(void *context, size_t index, int thread) {
  const mean_turn *turn = context;
  const size_t end = (index + 1) * TURN < turn->elements ? (index + 1) * TURN : turn->elements;
  (void)thread;
  for (size_t i = index * TURN; i < end; i++) turn->values[i] = (float)(turn->sum[i] / turn->divisor);
}

static fp8core_tensor at(const fp8core_tensor *like, void *data) {
  fp8core_tensor moved = *like;
  moved.data = data;
  moved.row_stride = 0;
  moved.amax = NULL;
  moved.scale = NULL;
  return moved;
}

fp8core_status fp8lm_simulated_ranks_add(fp8lm_simulated_ranks *ranks, fp8core_context *context, int rank, int keep) {
  simulated_rank *own = &ranks->ranks[rank];
  // The mean in FP32 is made last; until then its memory takes the values.
  for (int64_t i = 0; i < ranks->tensor_count; i++) {
    const tensor_place *place = &ranks->places[i];
    fp8gpt_parameter parameter;
    TRY(fp8gpt_model_parameter(ranks->model, i, &parameter));
    fp8core_tensor values = at(&parameter.gradient, ranks->narrow_mean + place->first);
    values.dtype = FP8CORE_FP32;
    values.scale_inverse = NULL;
    fp8core_cast_options options = fp8core_cast_options_default();
    // An infinity stays one.
    options.saturate = 0;
    TRY(fp8core_cast(context, &options, &parameter.gradient, &values));
    if (!keep) continue;
    unsigned char *data = ranks->gradients + (size_t)rank * ranks->gradient_bytes + place->offset;
    memcpy(data, parameter.gradient.data, (size_t)fp8core_tensor_span_bytes(&parameter.gradient));
    own->inputs[i] = at(&parameter.gradient, data);
    // What the model's scale is later does not concern these values any more.
    own->scale_inverses[i] = parameter.gradient.scale_inverse ? *parameter.gradient.scale_inverse : 1.0f;
    own->inputs[i].scale_inverse = parameter.gradient.scale_inverse ? &own->scale_inverses[i] : NULL;
  }
  mean_turn turn = {ranks->mean, ranks->narrow_mean, (size_t)ranks->elements, 1.0};
  fp8lm_parallel(ranks->options.threads, (turn.elements + TURN - 1) / TURN, add_turn, &turn);
  ranks->added++;
  return FP8CORE_OK;
}

fp8core_status fp8lm_simulated_ranks_mean(fp8lm_simulated_ranks *ranks, int64_t tensor, fp8core_tensor *mean) {
  fp8gpt_parameter parameter;
  if (!ranks->rounded) {
    mean_turn turn = {ranks->mean, ranks->narrow_mean, (size_t)ranks->elements, (double)ranks->added};
    fp8lm_parallel(ranks->options.threads, (turn.elements + TURN - 1) / TURN, round_turn, &turn);
    ranks->rounded = 1;
  }
  TRY(fp8gpt_model_parameter(ranks->model, tensor, &parameter));
  *mean = at(&parameter.gradient, ranks->narrow_mean + ranks->places[tensor].first);
  mean->dtype = FP8CORE_FP32;
  mean->scale_inverse = NULL;
  return FP8CORE_OK;
}

// --- Reducing ---

static int measured(const fp8lm_simulated_ranks *ranks) {
  return ranks->step >= ranks->options.steps - ranks->options.measured_steps;
}

static int takes_part(const fp8lm_simulated_ranks *ranks, int reducer) {
  return measured(ranks) || reducers[reducer].scaling == FP8COMM_SCALING_AUTO;
}

// All ranks have the same mean, so that each compares a share of it.
static void compare_share(simulated_rank *rank, int reducer, int64_t tensor) {
  const fp8lm_simulated_ranks *all = rank->all;
  const tensor_place *place = &all->places[tensor];
  const unsigned char *codes = rank->outputs[tensor].data;
  const double *sums = all->mean + place->first;
  const double scale_inverse = (double)*rank->outputs[tensor].scale_inverse;
  const double ranks = (double)all->options.ranks;
  const double most = all->options.gradient.wire_dtype == FP8CORE_E4M3 ? 448.0 : 57344.0;
  const int64_t begin = place->elements * rank->rank / all->options.ranks;
  const int64_t end = place->elements * (rank->rank + 1) / all->options.ranks;
  share_sums share = {0.0, 0.0, 0, 0};
  for (int64_t i = begin; i < end; i++) {
    const double value = all->values[codes[i]];
    const double exact = sums[i] / ranks;
    const double off = value * scale_inverse - exact;
    share.signal += exact * exact;
    share.noise += off * off;
    share.lost += value == 0.0 && exact != 0.0;
    share.at_maximum += fabs(value) == most;
  }
  if (reducers[reducer].algorithm != FP8COMM_NATIVE) share.at_maximum = 0;
  rank->sums[(int64_t)reducer * all->tensor_count + tensor] = share;
}

static fp8core_status reduce_bucket(simulated_rank *rank, int reducer, int64_t bucket) {
  const fp8lm_simulated_ranks *all = rank->all;
  fp8comm_gradient_reducer *reduces = rank->reducers[reducer];
  int64_t first;
  int64_t count;
  size_t used = 0;
  TRY(fp8comm_gradient_bucket(reduces, bucket, &first, &count));
  for (int64_t i = first; i < first + count; i++) {
    rank->outputs[i] = at(&rank->inputs[i], rank->output + used);
    rank->outputs[i].dtype = all->options.gradient.wire_dtype;
    rank->outputs[i].scale_inverse = NULL;
    used += (size_t)all->places[i].elements;
  }
  TRY(fp8comm_gradient_start(reduces, bucket, rank->inputs, rank->outputs));
  TRY(fp8comm_gradient_wait(reduces, NULL));
  for (int64_t i = first; i < first + count; i++) compare_share(rank, reducer, i);
  return FP8CORE_OK;
}

static fp8core_status reduce_rank(simulated_rank *rank) {
  for (int i = 0; i < FP8LM_REDUCERS; i++) {
    if (!takes_part(rank->all, i)) continue;
    const int64_t buckets = fp8comm_gradient_buckets(rank->reducers[i]);
    for (int64_t j = 0; j < buckets; j++) TRY(reduce_bucket(rank, i, j));
  }
  return FP8CORE_OK;
}

static fp8core_status sum_up(fp8lm_simulated_ranks *ranks, int reducer, int64_t tensor, fp8lm_reduction *reduction) {
  fp8comm_gradient_statistics statistics;
  // The same on every rank.
  TRY(fp8comm_gradient_get_statistics(ranks->ranks[0].reducers[reducer], tensor, &statistics));
  reduction->present = 1;
  reduction->nonfinite = statistics.nonfinite;
  reduction->mu = statistics.mu;
  if (statistics.nonfinite) return FP8CORE_OK;
  reduction->saturated_in_cast = statistics.saturated_in_cast;
  reduction->saturated_in_sum = statistics.saturated_in_sum;
  reduction->flushed_to_zero = statistics.flushed_to_zero;
  for (int i = 0; i < ranks->options.ranks; i++) {
    const share_sums *share = &ranks->ranks[i].sums[(int64_t)reducer * ranks->tensor_count + tensor];
    reduction->signal += share->signal;
    reduction->noise += share->noise;
    reduction->lost += share->lost;
    reduction->at_maximum += share->at_maximum;
  }
  return FP8CORE_OK;
}

static fp8lm_reduction *reduction_at(const fp8lm_simulated_ranks *ranks, int64_t step, int reducer, int64_t tensor) {
  return &ranks->reductions[(step * FP8LM_REDUCERS + reducer) * ranks->tensor_count + tensor];
}

fp8core_status fp8lm_simulated_ranks_reduce(fp8lm_simulated_ranks *ranks) {
  TRY(on_all_ranks(ranks, reduce_rank));
  for (int i = 0; i < FP8LM_REDUCERS; i++) {
    if (!takes_part(ranks, i)) continue;
    for (int64_t j = 0; j < ranks->tensor_count; j++) TRY(sum_up(ranks, i, j, reduction_at(ranks, ranks->step, i, j)));
  }
  ranks->step++;
  return FP8CORE_OK;
}

const fp8lm_reduction *fp8lm_simulated_reduction(const fp8lm_simulated_ranks *ranks, int64_t step, int reducer,
                                                 int64_t tensor) {
  return reduction_at(ranks, step, reducer, tensor);
}
