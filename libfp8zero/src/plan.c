// Bytes of memory and on the wire of a training step: docs/plan.md has the formulas and their sources. Counts are
// 64-bit and saturate: what passes 2^63 - 1 is remembered and refused in the end.
#include "fp8zero/plan.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fp8zero/partition.h"

#define fp8zero_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

// As libfp8gpt aligns its arrays.
#define ALIGNMENT 256
#define MAX_HEAD 256
// As libfp8gpt on CUDA: rows that have logits at a time.
#define LOGIT_ROWS 1024
// As libfp8comm: bytes of a bucket, unless one tensor has more, and buckets in flight.
#define BUCKET_BYTES (INT64_C(25) << 20)
#define BUCKETS_IN_FLIGHT 2
// libfp8core, for each tensor with a scale: two counts of steps, scale, reciprocal, amax, measured amax, format; and a
// history of 16 amaxes where scaling is delayed.
#define SCALE_BYTES 33
#define HISTORY_BYTES 64
// libfp8optim, for each tensor and for each chunk of one: its tables.
#define OPTIMIZER_TENSOR_BYTES 236
#define OPTIMIZER_CHUNK_BYTES 48
#define OPTIMIZER_CHUNK 16384
#define FP32_BYTES 4

static const char *const precision_names[] = {"fp32", "bf16", "te", "fp8-o1", "fp8-o2", "fp8-o3"};
static const char *const class_names[FP8ZERO_MEMORY_CLASSES] = {"weights",    "gradients", "master",      "exp_avg",
                                                                "exp_avg_sq", "scales",    "activations", "workspace"};
static const char *const traffic_names[FP8ZERO_TRAFFIC_KINDS] = {"gradients", "weights", "tensor_gather",
                                                                 "tensor_reduce", "pipeline"};

const char *fp8zero_precision_name(fp8zero_precision precision) {
  return (unsigned)precision <= FP8ZERO_FP8_O3 ? precision_names[(unsigned)precision] : "unknown";
}

const char *fp8zero_memory_class_name(fp8zero_memory_class memory_class) {
  return (unsigned)memory_class < FP8ZERO_MEMORY_CLASSES ? class_names[(unsigned)memory_class] : "unknown";
}

const char *fp8zero_traffic_kind_name(fp8zero_traffic_kind kind) {
  return (unsigned)kind < FP8ZERO_TRAFFIC_KINDS ? traffic_names[(unsigned)kind] : "unknown";
}

// Formats depend on this.
typedef enum tensor_kind {
  // Weights of linear layers.
  LINEAR,
  // Embeddings and the output layer.
  MATRIX,
  // Norms and biases.
  VECTOR,
  KINDS
} tensor_kind;

// Bytes of an element.
typedef struct formats {
  // Of what is not linear.
  int64_t activation;
  // Of saved inputs of linear layers.
  int64_t input;
  // On the wire, of activations in the all-gathers of sequence parallelism.
  int64_t gathered;
  int64_t weight[KINDS];
  int64_t gradient[KINDS];
  // Of gradients in the data-parallel group: FP8 casts whatever it reduces.
  int64_t reduced;
  int64_t master;
  int64_t exp_avg;
  int64_t exp_avg_sq;
  int fp8_products;
  int fp8_weights;
} formats;

// A rank's share of a layer, and what all parts of a plan read.
typedef struct shape {
  fp8zero_plan_model model;
  fp8zero_plan_options options;
  formats bytes;
  int64_t stage_layers;
  // Of a pass; `part_rows` are those between products, where sequence parallelism divides them.
  int64_t rows;
  int64_t part_rows;
  int64_t qkv;
  int64_t fc1;
  int64_t ffn;
  int64_t heads;
  int64_t projection_inputs;
  int64_t vocabulary;
  int overflow;
} shape;

static int64_t times(shape *s, int64_t a, int64_t b) {
  int64_t product;
  if (!__builtin_mul_overflow(a, b, &product)) return product;
  s->overflow = 1;
  return INT64_MAX;
}

static int64_t plus(shape *s, int64_t a, int64_t b) {
  int64_t sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  s->overflow = 1;
  return INT64_MAX;
}

static int64_t aligned(shape *s, int64_t bytes) { return plus(s, bytes, ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static formats formats_of(fp8zero_precision precision) {
  const int64_t wide = precision == FP8ZERO_FP32 ? 4 : 2;
  const int fp8_weights = precision >= FP8ZERO_FP8_O1;
  const int fp8_states = precision >= FP8ZERO_FP8_O2;
  formats f;
  f.activation = wide;
  f.fp8_products = precision >= FP8ZERO_TE;
  f.fp8_weights = fp8_weights;
  f.input = f.fp8_products ? 1 : wide;
  f.gathered = precision == FP8ZERO_FP8_O3 ? 1 : wide;
  f.weight[LINEAR] = fp8_weights ? 1 : wide;
  f.weight[MATRIX] = f.weight[VECTOR] = wide;
  f.gradient[LINEAR] = fp8_weights ? 1 : 4;
  f.gradient[MATRIX] = fp8_weights ? 2 : 4;
  f.gradient[VECTOR] = 4;
  f.reduced = fp8_weights ? 1 : 4;
  f.master = fp8_states ? 2 : 4;
  f.exp_avg = fp8_states ? 1 : 4;
  f.exp_avg_sq = fp8_states ? 2 : 4;
  return f;
}

// Checks.

static fp8core_status check_range(const char *field, int value, int least, int most) {
  if (value >= least && value <= most) return FP8CORE_OK;
  return fp8zero_invalid("%s is %d, expected %d to %d", field, value, least, most);
}

static fp8core_status check_multiple(const char *field, int value, const char *of, int divisor) {
  if (value % divisor == 0) return FP8CORE_OK;
  return fp8zero_invalid("%s is %d, expected a multiple of %s, %d", field, value, of, divisor);
}

static fp8core_status check_model(const fp8zero_plan_model *model) {
  if (!model) return fp8zero_invalid("model of fp8zero_plan() is NULL, expected a model");
  if (model->size != sizeof(*model))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8zero_plan_model.size is %zu, expected %zu",
                                  model->size, sizeof(*model));
  TRY(check_range("layers", model->layers, 1, 10000));
  TRY(check_range("hidden", model->hidden, 1, 1 << 20));
  TRY(check_range("heads", model->heads, 1, model->hidden));
  TRY(check_range("kv_heads", model->kv_heads, 1, model->heads));
  TRY(check_range("ffn_hidden", model->ffn_hidden, 1, 1 << 22));
  TRY(check_range("vocabulary", model->vocabulary, 2, 1 << 24));
  TRY(check_range("sequence", model->sequence, 1, 1 << 20));
  TRY(check_multiple("hidden", model->hidden, "heads", model->heads));
  TRY(check_multiple("heads", model->heads, "kv_heads", model->kv_heads));
  const int head = model->hidden / model->heads;
  if (head > MAX_HEAD)
    return fp8zero_invalid("a head has %d elements (hidden %d, heads %d), expected at most %d", head, model->hidden,
                           model->heads, MAX_HEAD);
  if (!model->learned_positions && head % 2 != 0)
    return fp8zero_invalid("a head has %d elements, expected an even number for rotary positions", head);
  return FP8CORE_OK;
}

static fp8core_status check_options(const fp8zero_plan_model *model, const fp8zero_plan_options *options) {
  if (options->size != sizeof(*options))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8zero_plan_options.size is %zu, expected %zu",
                                  options->size, sizeof(*options));
  TRY(check_range("precision", (int)options->precision, FP8ZERO_FP32, FP8ZERO_FP8_O3));
  TRY(check_range("zero_stage", options->zero_stage, 0, 3));
  TRY(check_range("distribution", (int)options->distribution, FP8ZERO_WHOLE_TENSORS, FP8ZERO_ELEMENTS));
  TRY(check_range("tensor_parallel", options->tensor_parallel, 1, INT_MAX));
  TRY(check_range("pipeline_parallel", options->pipeline_parallel, 1, INT_MAX));
  TRY(check_range("data_parallel", options->data_parallel, 1, 1 << 20));
  TRY(check_range("vocabulary_multiple", options->vocabulary_multiple, 1, 1 << 20));
  TRY(check_multiple("heads", model->heads, "tensor_parallel", options->tensor_parallel));
  TRY(check_multiple("kv_heads", model->kv_heads, "tensor_parallel", options->tensor_parallel));
  TRY(check_multiple("ffn_hidden", model->ffn_hidden, "tensor_parallel", options->tensor_parallel));
  TRY(check_multiple("layers", model->layers, "pipeline_parallel", options->pipeline_parallel));
  if (options->sequence_parallel)
    TRY(check_multiple("sequence", model->sequence, "tensor_parallel (with sequence_parallel)",
                       options->tensor_parallel));
  const int most = INT_MAX / model->sequence;
  if (options->micro_batch < 1 || options->micro_batch > most)
    return fp8zero_invalid("micro_batch is %d, expected 1 to %d: with %d tokens a sequence, a pass has at most 2^31 - "
                           "1",
                           options->micro_batch, most, model->sequence);
  return check_range("micro_batches", options->micro_batches, 1, INT_MAX);
}

// The vocabulary's rows on each of the tensor-parallel ranks; at most 2^44 on all of them.
static int64_t padded_share(const fp8zero_plan_model *model, const fp8zero_plan_options *options) {
  const int64_t whole = (int64_t)options->vocabulary_multiple * options->tensor_parallel;
  return (model->vocabulary + whole - 1) / whole * options->vocabulary_multiple;
}

static shape shape_of(const fp8zero_plan_model *model, const fp8zero_plan_options *options) {
  shape s;
  memset(&s, 0, sizeof(s));
  s.model = *model;
  s.options = *options;
  s.bytes = formats_of(options->precision);
  const int tensor = options->tensor_parallel;
  s.stage_layers = model->layers / options->pipeline_parallel;
  s.rows = (int64_t)options->micro_batch * model->sequence;
  s.part_rows = options->sequence_parallel ? s.rows / tensor : s.rows;
  s.heads = model->heads / tensor;
  s.projection_inputs = s.heads * (model->hidden / model->heads);
  s.qkv = s.projection_inputs + 2 * (int64_t)(model->kv_heads / tensor) * (model->hidden / model->heads);
  s.ffn = model->ffn_hidden / tensor;
  s.fc1 = model->swiglu ? 2 * s.ffn : s.ffn;
  s.vocabulary = padded_share(model, options);
  return s;
}

// Parameters.

static int64_t parameters_of(const fp8zero_plan_model *model) {
  const int64_t hidden = model->hidden;
  const int64_t qkv = (int64_t)(model->heads + 2 * model->kv_heads) * (hidden / model->heads);
  const int64_t fc1 = model->swiglu ? 2 * (int64_t)model->ffn_hidden : model->ffn_hidden;
  const int64_t norm = model->rms_norm ? hidden : 2 * hidden;
  int64_t layer = hidden * (qkv + hidden + fc1 + model->ffn_hidden) + 2 * norm;
  if (model->biases) layer += qkv + hidden + fc1 + hidden;
  int64_t parameters = model->layers * layer + norm + hidden * model->vocabulary * (model->tied_embeddings ? 1 : 2);
  if (model->learned_positions) parameters += hidden * model->sequence;
  return parameters;
}

// Tensors of a rank; of each its elements and kind.
typedef struct tensors {
  int64_t count;
  int64_t *elements;
  // Bytes by which they are distributed.
  int64_t *sizes;
  int *owners;
  unsigned char *kinds;
  int64_t total[KINDS];
  int64_t largest[KINDS];
  // Of one layer.
  int64_t layer[KINDS];
} tensors;

static void add_tensor(tensors *list, tensor_kind kind, int64_t elements) {
  list->elements[list->count] = elements;
  list->kinds[list->count++] = (unsigned char)kind;
  list->total[kind] += elements;
  list->largest[kind] = larger(list->largest[kind], elements);
}

static void add_linear(tensors *list, const shape *s, int64_t outputs, int64_t inputs) {
  add_tensor(list, LINEAR, outputs * inputs);
  if (s->model.biases) add_tensor(list, VECTOR, outputs);
}

static void add_norm(tensors *list, const shape *s) {
  add_tensor(list, VECTOR, s->model.hidden);
  if (!s->model.rms_norm) add_tensor(list, VECTOR, s->model.hidden);
}

// In libfp8gpt's order. At most 12 a layer and 5 more, of at most 2^44 elements: no sum overflows.
static void list_tensors(tensors *list, const shape *s, int first, int last) {
  const int64_t hidden = s->model.hidden;
  if (first) {
    add_tensor(list, MATRIX, s->vocabulary * hidden);
    if (s->model.learned_positions) add_tensor(list, MATRIX, s->model.sequence * hidden);
  }
  for (int64_t i = 0; i < s->stage_layers; i++) {
    int64_t before[KINDS];
    memcpy(before, list->total, sizeof(before));
    add_norm(list, s);
    add_linear(list, s, s->qkv, hidden);
    add_linear(list, s, hidden, s->projection_inputs);
    add_norm(list, s);
    add_linear(list, s, s->fc1, hidden);
    add_linear(list, s, hidden, s->ffn);
    for (int kind = 0; kind < KINDS; kind++) list->layer[kind] = list->total[kind] - before[kind];
  }
  if (!last) return;
  add_norm(list, s);
  // A tied output layer that is not on the embedding's stage is a copy.
  if (!s->model.tied_embeddings || !first) add_tensor(list, MATRIX, s->vocabulary * hidden);
}

static int64_t bytes_of(const int64_t elements[KINDS], const int64_t size[KINDS]) {
  return elements[LINEAR] * size[LINEAR] + elements[MATRIX] * size[MATRIX] + elements[VECTOR] * size[VECTOR];
}

static int64_t sum_of(const int64_t elements[KINDS]) { return elements[LINEAR] + elements[MATRIX] + elements[VECTOR]; }

// Minimum, maximum and sum as ranks are met.
typedef struct tally {
  int64_t minimum;
  int64_t maximum;
  double sum;
  double ranks;
} tally;

static void note(tally *t, int64_t least, int64_t most, double mean, double ranks) {
  if (t->ranks == 0.0 || least < t->minimum) t->minimum = least;
  if (t->ranks == 0.0 || most > t->maximum) t->maximum = most;
  t->sum += mean * ranks;
  t->ranks += ranks;
}

static double mean_of(const tally *t) { return t->sum / t->ranks; }

static fp8zero_spread spread_of(const tally *t) {
  const fp8zero_spread spread = {t->minimum, t->maximum, mean_of(t)};
  return spread;
}

// What differs from one data-parallel rank of a stage to the next.
typedef struct stage_plan {
  int known;
  tally memory[FP8ZERO_MEMORY_ACTIVATIONS];
  tally memory_total;
  tally traffic[FP8ZERO_TRAFFIC_WEIGHTS + 1];
  tally traffic_total;
  tally distributed;
  double balance;
  int64_t split;
  // Elements of the largest linear weight, of a layer, and of everything.
  int64_t largest[KINDS];
  int64_t layer[KINDS];
  int64_t total[KINDS];
} stage_plan;

// What a rank owns of what is distributed.
typedef struct holding {
  int64_t elements[KINDS];
  // Tensors with elements here, and chunks of them.
  int64_t tensors;
  int64_t chunks;
} holding;

static void hold(holding *owned, int kind, int64_t elements) {
  owned->elements[kind] += elements;
  owned->tensors++;
  owned->chunks += (elements + OPTIMIZER_CHUNK - 1) / OPTIMIZER_CHUNK;
}

// Of gradients that the owner alone keeps: as they come, but the sum over several passes in FP32.
static int64_t kept_gradient(const shape *s) { return s->options.micro_batches > 1 ? FP32_BYTES : s->bytes.reduced; }

// Bytes an element of what a stage of ZeRO distributes.
static int64_t distributed_size(const shape *s, int kind) {
  const formats *f = &s->bytes;
  int64_t size = 0;
  if (s->options.zero_stage >= 1) size += f->master + f->exp_avg + f->exp_avg_sq;
  if (s->options.zero_stage >= 2) size += kept_gradient(s);
  if (s->options.zero_stage >= 3) size += f->weight[kind];
  return size;
}

static fp8core_status out_of_memory(const shape *s, int64_t count) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory to plan %lld tensors and %d ranks",
                                (long long)count, s->options.data_parallel);
}

// By the bytes of their states, so that owners do not depend on the stage.
static fp8core_status distribute_tensors(const shape *s, tensors *list, holding *ranks) {
  const formats *f = &s->bytes;
  for (int64_t i = 0; i < list->count; i++)
    list->sizes[i] = list->elements[i] * (f->master + f->exp_avg + f->exp_avg_sq);
  TRY(fp8zero_partition(list->count, list->sizes, s->options.data_parallel, list->owners, NULL));
  for (int64_t i = 0; i < list->count; i++) hold(&ranks[list->owners[i]], list->kinds[i], list->elements[i]);
  return FP8CORE_OK;
}

static fp8core_status distribute_elements(const shape *s, const tensors *list, holding *ranks, int64_t *split) {
  fp8zero_element_range *ranges = calloc((size_t)s->options.data_parallel, sizeof(*ranges));
  if (!ranges) return out_of_memory(s, list->count);
  const fp8core_status status =
    fp8zero_partition_elements(list->count, list->elements, s->options.data_parallel, ranges, split);
  for (int r = 0; r < s->options.data_parallel && status == FP8CORE_OK; r++)
    for (int64_t i = ranges[r].tensor_begin; i < ranges[r].tensor_end; i++) {
      const int64_t from = i == ranges[r].tensor_begin ? ranges[r].first_begin : 0;
      const int64_t to = i == ranges[r].tensor_end - 1 ? ranges[r].last_end : list->elements[i];
      if (to > from) hold(&ranks[r], list->kinds[i], to - from);
    }
  free(ranges);
  return status;
}

// One kind of rank: `owned` of what is distributed, everything else whole. `ranks` of them.
static void add_rank(shape *s, stage_plan *stage, const holding *owned, double ranks) {
  const formats *f = &s->bytes;
  const int zero = s->options.zero_stage;
  const int64_t others = s->options.data_parallel - 1;
  const int64_t passes = s->options.micro_batches;
  const int64_t states = sum_of(owned->elements);
  const int64_t weights = bytes_of(stage->total, f->weight);
  const int64_t gradients = bytes_of(stage->total, f->gradient);
  const int64_t own_weights = bytes_of(owned->elements, f->weight);
  const int64_t reduced = sum_of(stage->total) * f->reduced;
  const int64_t own_reduced = states * f->reduced;
  int64_t memory[FP8ZERO_MEMORY_ACTIVATIONS];
  memory[FP8ZERO_MEMORY_WEIGHTS] = zero >= 3 ? own_weights : weights;
  memory[FP8ZERO_MEMORY_GRADIENTS] = zero >= 2 ? states * kept_gradient(s) : gradients;
  memory[FP8ZERO_MEMORY_MASTER] = states * f->master;
  memory[FP8ZERO_MEMORY_EXP_AVG] = states * f->exp_avg;
  memory[FP8ZERO_MEMORY_EXP_AVG_SQ] = states * f->exp_avg_sq;
  // Inputs, gradients of outputs, and weights or their gradients: 3 a linear layer, for training and once more for
  // evaluation; weights that stay in FP8 have their own.
  const int64_t linear = 4 * s->stage_layers;
  memory[FP8ZERO_MEMORY_SCALES] = (f->fp8_products ? 3 * linear * (SCALE_BYTES + HISTORY_BYTES + SCALE_BYTES) : 0) +
                                  (f->fp8_weights ? linear * SCALE_BYTES : 0) +
                                  owned->tensors * OPTIMIZER_TENSOR_BYTES + owned->chunks * OPTIMIZER_CHUNK_BYTES;
  int64_t total = 0;
  for (int i = 0; i < FP8ZERO_MEMORY_ACTIVATIONS; i++) {
    note(&stage->memory[i], memory[i], memory[i], (double)memory[i], ranks);
    total = plus(s, total, memory[i]);
  }
  note(&stage->memory_total, total, total, (double)total, ranks);

  int64_t traffic[FP8ZERO_TRAFFIC_WEIGHTS + 1] = {0, 0};
  if (zero == 0) {
    // Each rank adds up a part, which all then gather.
    if (others > 0) traffic[FP8ZERO_TRAFFIC_GRADIENTS] = times(s, 2, reduced - reduced / (others + 1));
  } else {
    // To the owners: once, or after every pass where only they keep the sum.
    traffic[FP8ZERO_TRAFFIC_GRADIENTS] = times(s, reduced - own_reduced, zero >= 2 ? passes : 1);
    // From the owners: after the update, or for the forward and the backward part of every pass.
    traffic[FP8ZERO_TRAFFIC_WEIGHTS] = times(s, times(s, own_weights, others), zero >= 3 ? times(s, 2, passes) : 1);
  }
  for (int i = 0; i <= FP8ZERO_TRAFFIC_WEIGHTS; i++)
    note(&stage->traffic[i], traffic[i], traffic[i], (double)traffic[i], ranks);
  const int64_t sent = plus(s, traffic[FP8ZERO_TRAFFIC_GRADIENTS], traffic[FP8ZERO_TRAFFIC_WEIGHTS]);
  note(&stage->traffic_total, sent, sent, (double)sent, ranks);

  int64_t distributed = 0;
  for (int kind = 0; kind < KINDS; kind++) distributed += owned->elements[kind] * distributed_size(s, kind);
  note(&stage->distributed, distributed, distributed, (double)distributed, ranks);
}

static fp8core_status plan_ranks(shape *s, tensors *list, stage_plan *stage) {
  memcpy(stage->total, list->total, sizeof(stage->total));
  memcpy(stage->layer, list->layer, sizeof(stage->layer));
  memcpy(stage->largest, list->largest, sizeof(stage->largest));
  stage->balance = 1.0;
  if (s->options.zero_stage == 0) {
    holding all = {{0}, 0, 0};
    for (int64_t i = 0; i < list->count; i++) hold(&all, list->kinds[i], list->elements[i]);
    add_rank(s, stage, &all, s->options.data_parallel);
    return FP8CORE_OK;
  }
  holding *ranks = calloc((size_t)s->options.data_parallel, sizeof(*ranks));
  if (!ranks) return out_of_memory(s, list->count);
  const fp8core_status status = s->options.distribution == FP8ZERO_ELEMENTS
                                  ? distribute_elements(s, list, ranks, &stage->split)
                                  : distribute_tensors(s, list, ranks);
  for (int r = 0; r < s->options.data_parallel && status == FP8CORE_OK; r++) add_rank(s, stage, &ranks[r], 1.0);
  free(ranks);
  if (status == FP8CORE_OK)
    stage->balance = stage->distributed.minimum > 0
                       ? (double)stage->distributed.maximum / (double)stage->distributed.minimum
                       : (double)INFINITY;
  return status;
}

static fp8core_status plan_stage(shape *s, int first, int last, stage_plan *stage) {
  // Twelve a layer; embedding, positions, final norm of two, output layer.
  const int64_t most = 12 * s->stage_layers + 5;
  tensors list;
  memset(&list, 0, sizeof(list));
  list.elements = calloc((size_t)most, sizeof(*list.elements));
  list.sizes = calloc((size_t)most, sizeof(*list.sizes));
  list.owners = calloc((size_t)most, sizeof(*list.owners));
  list.kinds = calloc((size_t)most, sizeof(*list.kinds));
  fp8core_status status = FP8CORE_OK;
  if (!list.elements || !list.sizes || !list.owners || !list.kinds) {
    status = out_of_memory(s, most);
  } else {
    list_tensors(&list, s, first, last);
    status = plan_ranks(s, &list, stage);
    stage->known = 1;
  }
  free(list.elements);
  free(list.sizes);
  free(list.owners);
  free(list.kinds);
  return status;
}

// Activations, as libfp8gpt lays them out (lay_activations()).

static int64_t array_bytes(shape *s, int64_t rows, int64_t columns, int64_t size) {
  return aligned(s, times(s, times(s, rows, columns), size));
}

// What a block keeps besides its input.
static int64_t block_bytes(shape *s) {
  const int64_t hidden = s->model.hidden;
  const formats *f = &s->bytes;
  const int64_t statistics = 4 * array_bytes(s, s->part_rows, 1, FP32_BYTES);
  int64_t bytes = statistics;
  // Inputs of qkv and fc1, which sequence parallelism gathers again.
  bytes = plus(s, bytes, times(s, 2, array_bytes(s, s->part_rows, hidden, f->input)));
  bytes = plus(s, bytes, array_bytes(s, s->rows, s->qkv, f->activation));
  bytes = plus(s, bytes, array_bytes(s, s->rows, s->projection_inputs, f->activation));
  bytes = plus(s, bytes, array_bytes(s, s->rows, s->heads, FP32_BYTES));
  // Else the attention's output is the input itself.
  if (f->fp8_products) bytes = plus(s, bytes, array_bytes(s, s->rows, s->projection_inputs, f->input));
  // The sum that the second norm keeps.
  bytes = plus(s, bytes, array_bytes(s, s->part_rows, hidden, f->activation));
  bytes = plus(s, bytes, array_bytes(s, s->rows, s->fc1, f->activation));
  return plus(s, bytes, array_bytes(s, s->rows, s->ffn, f->input));
}

// 1F1B: stage i has as many micro-batches in flight as stages follow, itself included.
static int64_t activation_bytes(shape *s, int stage, int last) {
  const int64_t in_flight = smaller(s->options.pipeline_parallel - stage, s->options.micro_batches);
  const int64_t input = array_bytes(s, s->part_rows, s->model.hidden, s->bytes.activation);
  const int64_t layers = times(s, in_flight, s->stage_layers);
  // Recomputed blocks share one.
  int64_t bytes = plus(s, times(s, layers, input), times(s, s->options.recompute ? 1 : layers, block_bytes(s)));
  if (last) bytes = plus(s, bytes, plus(s, input, 2 * array_bytes(s, s->part_rows, 1, FP32_BYTES)));
  return bytes;
}

// What a pass uses, as libfp8gpt on CUDA lays it out (lay_workspace()), and buffers of communication: an estimate.
static int64_t workspace_bytes(shape *s, const stage_plan *stage, int last) {
  const formats *f = &s->bytes;
  const int64_t hidden = s->model.hidden;
  const int64_t widest = larger(larger(s->qkv, s->fc1), hidden);
  // Output of a norm, a branch, and the gradients of both.
  int64_t bytes = times(s, 4, array_bytes(s, s->part_rows, hidden, f->activation));
  bytes = plus(s, bytes, array_bytes(s, s->rows, s->ffn, f->activation));
  bytes = plus(s, bytes, array_bytes(s, s->rows, widest, f->activation));
  if (f->fp8_products) bytes = plus(s, bytes, array_bytes(s, s->rows, widest, 1));
  if (s->options.precision == FP8ZERO_TE) bytes = plus(s, bytes, stage->largest[LINEAR]);
  if (f->fp8_weights) bytes = plus(s, bytes, times(s, stage->largest[LINEAR], FP32_BYTES));
  // Products in FP32 on their way to FP8, of passes that train and of those that evaluate: activations behind a GELU,
  // and gradients of weights.
  if (f->fp8_products) {
    const int64_t activated = s->model.swiglu ? 0 : times(s, s->rows, s->ffn);
    const int64_t trained = larger(activated, f->fp8_weights ? stage->largest[LINEAR] : 0);
    bytes = plus(s, bytes, times(s, plus(s, trained, activated), FP32_BYTES));
  }
  // Softmax statistics of attention's backward pass; rotary angles.
  bytes = plus(s, bytes, array_bytes(s, s->rows, s->heads, FP32_BYTES));
  bytes = plus(s, bytes, array_bytes(s, s->model.sequence, hidden / s->model.heads, FP32_BYTES));
  // Logits in FP32, and their gradients.
  if (last) {
    const int64_t rows = smaller(s->rows, LOGIT_ROWS);
    bytes = plus(s, bytes, array_bytes(s, rows, s->vocabulary, FP32_BYTES + f->activation));
  }
  // All rows before a product, and after one before their sum is divided.
  if (s->options.sequence_parallel && s->options.tensor_parallel > 1)
    bytes = plus(s, bytes, array_bytes(s, s->rows, hidden, f->gathered + f->activation));
  // Activations that come from the stage before, gradients that come from the one behind.
  if (s->options.pipeline_parallel > 1)
    bytes = plus(s, bytes, times(s, 2, array_bytes(s, s->part_rows, hidden, f->activation)));
  if (s->options.data_parallel > 1) {
    int64_t bucket = smaller(BUCKET_BYTES, sum_of(stage->total) * f->reduced);
    for (int kind = 0; kind < KINDS; kind++) bucket = larger(bucket, stage->largest[kind] * f->reduced);
    // With the FP32 sum of this rank's part.
    const int64_t part = bucket / f->reduced / s->options.data_parallel * FP32_BYTES;
    bytes = plus(s, bytes, BUCKETS_IN_FLIGHT * (bucket + part));
    // Gathered weights of a layer, and of the next; gradients of a layer, and of one on the way to its owners.
    if (s->options.zero_stage == 3) bytes = plus(s, bytes, times(s, 2, bytes_of(stage->layer, f->weight)));
    if (s->options.zero_stage >= 2) bytes = plus(s, bytes, times(s, 2, bytes_of(stage->layer, f->gradient)));
  }
  return bytes;
}

// Traffic of tensor and pipeline parallelism.

// What a rank sends of `bytes` that its group gathers, or adds up and divides: all but its own part.
static int64_t exchanged(const shape *s, int64_t bytes) { return bytes - bytes / s->options.tensor_parallel; }

typedef struct model_traffic {
  int64_t gather;
  int64_t reduce;
  int64_t pipeline;
} model_traffic;

static model_traffic model_traffic_of(shape *s, int first, int last) {
  const formats *f = &s->bytes;
  const int64_t hidden = s->model.hidden;
  const int64_t passes = s->options.micro_batches;
  const int64_t values = times(s, times(s, s->rows, hidden), f->activation);
  const int64_t plain = exchanged(s, values);
  const int64_t cast = exchanged(s, times(s, times(s, s->rows, hidden), f->gathered));
  // Forward passes of a block.
  const int64_t forward = s->options.recompute ? 2 : 1;
  model_traffic sent = {0, 0, 0};
  int64_t gather = 0;
  int64_t reduce = 0;
  if (s->options.tensor_parallel > 1) {
    if (s->options.sequence_parallel) {
      // Before qkv and fc1, and again for the gradients of their weights; gradients of the outputs of projection and
      // fc2. Sums behind those, and of the gradients of inputs.
      gather = times(s, s->stage_layers, plus(s, times(s, 2 * forward + 2, cast), times(s, 2, plain)));
      reduce = times(s, s->stage_layers, times(s, 2 * forward + 2, plain));
      if (first) reduce = plus(s, reduce, plain);
      if (first) gather = plus(s, gather, plain);
      // The output layer's input is not linear's: never in FP8.
      if (last) gather = plus(s, gather, times(s, 2, plain));
      if (last) reduce = plus(s, reduce, plain);
    } else {
      // All-reduces, each both.
      reduce = times(s, s->stage_layers, times(s, 2 * (2 * forward + 2), plain));
      if (first) reduce = plus(s, reduce, times(s, 2, plain));
      if (last) reduce = plus(s, reduce, times(s, 2, plain));
    }
    // Cross-entropy over a divided vocabulary: maximum, sum of exponentials, the target's logit.
    if (last) reduce = plus(s, reduce, times(s, 2 * 3, exchanged(s, times(s, s->rows, FP32_BYTES))));
    gather = times(s, gather, passes);
    reduce = times(s, reduce, passes);
    // Gradients of what is on all ranks, each of which saw its own tokens: norms, biases of projection and fc2.
    if (s->options.sequence_parallel) {
      const int64_t norm = s->model.rms_norm ? hidden : 2 * hidden;
      const int64_t layer = 2 * norm + (s->model.biases ? 2 * hidden : 0);
      const int64_t vectors = s->stage_layers * layer + (last ? norm : 0);
      reduce = plus(s, reduce, 2 * exchanged(s, vectors * f->gradient[VECTOR]));
    }
  }
  sent.gather = gather;
  sent.reduce = reduce;
  if (s->options.pipeline_parallel > 1) {
    const int64_t part = times(s, times(s, s->part_rows, hidden), f->activation);
    sent.pipeline = times(s, times(s, part, passes), (first ? 0 : 1) + (last ? 0 : 1));
    // Two ranks add up the gradients of one embedding: as many bytes as it has.
    if (s->model.tied_embeddings && (first || last))
      sent.pipeline = plus(s, sent.pipeline, s->vocabulary * hidden * f->gradient[MATRIX]);
  }
  return sent;
}

// The whole.

typedef struct totals {
  tally memory[FP8ZERO_MEMORY_CLASSES];
  tally memory_total;
  tally traffic[FP8ZERO_TRAFFIC_KINDS];
  tally traffic_total;
  tally distributed;
} totals;

// `more` bytes on top of what differs within the stage.
static void note_sum(shape *s, tally *all, const tally *differing, int64_t more) {
  note(all, plus(s, differing->minimum, more), plus(s, differing->maximum, more), mean_of(differing) + (double)more,
       differing->ranks);
}

static void note_same(tally *all, int64_t value, double ranks) { note(all, value, value, (double)value, ranks); }

static void add_stage(shape *s, const stage_plan *stage, int index, totals *all) {
  const int first = index == 0;
  const int last = index == s->options.pipeline_parallel - 1;
  const double ranks = s->options.data_parallel;
  const int64_t activations = activation_bytes(s, index, last);
  const int64_t workspace = workspace_bytes(s, stage, last);
  for (int i = 0; i < FP8ZERO_MEMORY_ACTIVATIONS; i++) note_sum(s, &all->memory[i], &stage->memory[i], 0);
  note_same(&all->memory[FP8ZERO_MEMORY_ACTIVATIONS], activations, ranks);
  note_same(&all->memory[FP8ZERO_MEMORY_WORKSPACE], workspace, ranks);
  note_sum(s, &all->memory_total, &stage->memory_total, plus(s, activations, workspace));
  const model_traffic sent = model_traffic_of(s, first, last);
  for (int i = 0; i <= FP8ZERO_TRAFFIC_WEIGHTS; i++) note_sum(s, &all->traffic[i], &stage->traffic[i], 0);
  note_same(&all->traffic[FP8ZERO_TRAFFIC_TENSOR_GATHER], sent.gather, ranks);
  note_same(&all->traffic[FP8ZERO_TRAFFIC_TENSOR_REDUCE], sent.reduce, ranks);
  note_same(&all->traffic[FP8ZERO_TRAFFIC_PIPELINE], sent.pipeline, ranks);
  note_sum(s, &all->traffic_total, &stage->traffic_total, plus(s, plus(s, sent.gather, sent.reduce), sent.pipeline));
  note_sum(s, &all->distributed, &stage->distributed, 0);
}

fp8core_status fp8zero_plan(const fp8zero_plan_model *model, const fp8zero_plan_options *options,
                            fp8zero_plan_result *result) {
  const fp8zero_plan_options chosen = options ? *options : fp8zero_plan_options_default();
  TRY(check_model(model));
  TRY(check_options(model, &chosen));
  if (!result) return fp8zero_invalid("result of fp8zero_plan() is NULL, expected where to put the plan");
  shape s = shape_of(model, &chosen);
  fp8zero_plan_result found;
  memset(&found, 0, sizeof(found));
  found.balance = 1.0;
  totals all;
  memset(&all, 0, sizeof(all));
  // All stages between the first and the last have the same tensors.
  stage_plan kinds[3];
  memset(kinds, 0, sizeof(kinds));
  for (int i = 0; i < chosen.pipeline_parallel; i++) {
    const int first = i == 0;
    const int last = i == chosen.pipeline_parallel - 1;
    stage_plan *stage = &kinds[first ? 0 : last ? 2 : 1];
    if (!stage->known) TRY(plan_stage(&s, first, last, stage));
    add_stage(&s, stage, i, &all);
    if (stage->balance > found.balance) found.balance = stage->balance;
    found.split_tensors += stage->split * chosen.tensor_parallel;
  }
  if (s.overflow)
    return fp8zero_invalid("the bytes of a rank pass 2^63 - 1 (layers %d, hidden %d, ffn_hidden %d, sequence %d, "
                           "micro_batch %d, micro_batches %d), expected a smaller model or fewer sequences",
                           model->layers, model->hidden, model->ffn_hidden, model->sequence, chosen.micro_batch,
                           chosen.micro_batches);
  found.parameters = parameters_of(model);
  found.ranks = (int64_t)chosen.tensor_parallel * chosen.pipeline_parallel * chosen.data_parallel;
  found.padded_vocabulary = s.vocabulary * chosen.tensor_parallel;
  for (int i = 0; i < FP8ZERO_MEMORY_CLASSES; i++) found.memory[i] = spread_of(&all.memory[i]);
  found.memory_total = spread_of(&all.memory_total);
  for (int i = 0; i < FP8ZERO_TRAFFIC_KINDS; i++) found.traffic[i] = spread_of(&all.traffic[i]);
  found.traffic_total = spread_of(&all.traffic_total);
  found.distributed = spread_of(&all.distributed);
  *result = found;
  return FP8CORE_OK;
}
