// Plans against a step that is gone through rank by rank: tensors by their shapes, owners by the partition, the
// schedule of the pipeline one pass after the other, every collective by what a rank sends. And figures of FP8-LM.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fp8zero/partition.h"
#include "fp8zero/plan.h"
#include "support.h"

#define MOST_TENSORS 256

static int below(test_random *random, int bound) { return (int)(test_random_bits(random) % (uint64_t)bound); }

typedef struct reference_tensor {
  int64_t elements;
  int linear;
  int matrix;
} reference_tensor;

typedef struct reference_list {
  int count;
  reference_tensor tensors[MOST_TENSORS];
} reference_list;

static void put(reference_list *list, int64_t rows, int64_t columns, int linear, int matrix) {
  assert_true(list->count < MOST_TENSORS);
  list->tensors[list->count++] = (reference_tensor){rows * columns, linear, matrix};
}

static int64_t padded(const fp8zero_plan_model *m, const fp8zero_plan_options *o) {
  int64_t words = m->vocabulary;
  while (words % ((int64_t)o->vocabulary_multiple * o->tensor_parallel) != 0) words++;
  return words;
}

static int head_of(const fp8zero_plan_model *m) { return m->hidden / m->heads; }

static void list_stage(const fp8zero_plan_model *m, const fp8zero_plan_options *o, int stage, reference_list *list) {
  const int t = o->tensor_parallel;
  const int h = m->hidden;
  const int qkv = (m->heads + 2 * m->kv_heads) * head_of(m) / t;
  const int fc1 = (m->swiglu ? 2 : 1) * m->ffn_hidden / t;
  const int last = stage == o->pipeline_parallel - 1;
  list->count = 0;
  if (stage == 0) {
    put(list, padded(m, o) / t, h, 0, 1);
    if (m->learned_positions) put(list, m->sequence, h, 0, 1);
  }
  for (int i = 0; i < m->layers; i++) {
    if (i / (m->layers / o->pipeline_parallel) != stage) continue;
    put(list, h, 1, 0, 0);
    if (!m->rms_norm) put(list, h, 1, 0, 0);
    put(list, qkv, h, 1, 1);
    if (m->biases) put(list, qkv, 1, 0, 0);
    put(list, h, h / t, 1, 1);
    if (m->biases) put(list, h, 1, 0, 0);
    put(list, h, 1, 0, 0);
    if (!m->rms_norm) put(list, h, 1, 0, 0);
    put(list, fc1, h, 1, 1);
    if (m->biases) put(list, fc1, 1, 0, 0);
    put(list, h, m->ffn_hidden / t, 1, 1);
    if (m->biases) put(list, h, 1, 0, 0);
  }
  if (!last) return;
  put(list, h, 1, 0, 0);
  if (!m->rms_norm) put(list, h, 1, 0, 0);
  if (!m->tied_embeddings || o->pipeline_parallel > 1) put(list, padded(m, o) / t, h, 0, 1);
}

static int in_fp8(const fp8zero_plan_options *o) { return o->precision >= FP8ZERO_FP8_O1; }
static int64_t wide(const fp8zero_plan_options *o) { return o->precision == FP8ZERO_FP32 ? 4 : 2; }

static int64_t weight_size(const fp8zero_plan_options *o, const reference_tensor *x) {
  return in_fp8(o) && x->linear ? 1 : wide(o);
}

static int64_t gradient_size(const fp8zero_plan_options *o, const reference_tensor *x) {
  if (!in_fp8(o) || !x->matrix) return 4;
  return x->linear ? 1 : 2;
}

static const int64_t full_states[3] = {4, 4, 4};
static const int64_t small_states[3] = {2, 1, 2};
static const int64_t *state_sizes(const fp8zero_plan_options *o) {
  return o->precision >= FP8ZERO_FP8_O2 ? small_states : full_states;
}

// Elements of each tensor that data-parallel rank `rank` owns, all without ZeRO.
static void find_owned(const fp8zero_plan_options *o, const reference_list *list, int rank, int64_t *owned) {
  int64_t sizes[MOST_TENSORS];
  int owners[MOST_TENSORS];
  int64_t total = 0;
  int64_t position = 0;
  for (int i = 0; i < list->count; i++) {
    sizes[i] = (state_sizes(o)[0] + state_sizes(o)[1] + state_sizes(o)[2]) * list->tensors[i].elements;
    total += list->tensors[i].elements;
  }
  assert_ok(fp8zero_partition(list->count, sizes, o->data_parallel, owners, NULL));
  for (int i = 0; i < list->count; i++) {
    const int64_t n = list->tensors[i].elements;
    owned[i] = n;
    if (o->zero_stage == 0) continue;
    if (o->distribution == FP8ZERO_WHOLE_TENSORS) {
      owned[i] = owners[i] == rank ? n : 0;
      continue;
    }
    owned[i] = 0;
    for (int64_t k = 0; k < n; k++, position++) {
      const int64_t share = total / o->data_parallel;
      const int64_t larger = total % o->data_parallel;
      const int64_t in_larger = larger * (share + 1);
      const int64_t owner = position < in_larger ? position / (share + 1) : larger + (position - in_larger) / share;
      owned[i] += owner == rank;
    }
  }
}

static int64_t array(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Micro-batches whose activations a stage holds at once in 1F1B.
static int most_in_flight(const fp8zero_plan_options *o, int stage) {
  const int warm_up = o->pipeline_parallel - stage - 1;
  int forward = 0;
  int backward = 0;
  int most = 0;
  while (backward < o->micro_batches) {
    if (forward < o->micro_batches && (forward < warm_up || forward - backward <= warm_up))
      forward++;
    else
      backward++;
    if (forward - backward > most) most = forward - backward;
  }
  return most;
}

static int64_t activations_of(const fp8zero_plan_model *m, const fp8zero_plan_options *o, int stage) {
  const int t = o->tensor_parallel;
  const int fp8 = o->precision >= FP8ZERO_TE;
  const int64_t size = wide(o);
  const int64_t kept = fp8 ? 1 : size;
  const int64_t all = (int64_t)o->micro_batch * m->sequence;
  const int64_t part = o->sequence_parallel ? all / t : all;
  const int64_t h = m->hidden;
  const int64_t head = head_of(m);
  const int64_t input = array(part * h * size);
  int64_t block = 2 * array(part * 4);
  block += array(part * h * kept);
  block += array(all * (m->heads + 2 * m->kv_heads) * head / t * size);
  block += array(all * m->heads * head / t * size);
  block += array(all * m->heads / t * 4);
  if (fp8) block += array(all * m->heads * head / t);
  block += array(part * h * size) + 2 * array(part * 4);
  block += array(part * h * kept);
  block += array(all * (m->swiglu ? 2 : 1) * m->ffn_hidden / t * size);
  block += array(all * m->ffn_hidden / t * kept);
  const int64_t layers = m->layers / o->pipeline_parallel;
  const int64_t passes = most_in_flight(o, stage);
  int64_t bytes = o->recompute ? passes * layers * input + block : passes * layers * (input + block);
  if (stage == o->pipeline_parallel - 1) bytes += input + 2 * array(part * 4);
  return bytes;
}

typedef struct reference_rank {
  int64_t memory[FP8ZERO_MEMORY_WORKSPACE];
  int64_t traffic[FP8ZERO_TRAFFIC_KINDS];
  int64_t distributed;
} reference_rank;

// What a rank sends: everything but its own part of what is added up or gathered; both for an all-reduce.
static int64_t gathered(int64_t bytes, int ranks) { return bytes - bytes / ranks; }
static int64_t reduced_to_all(int64_t bytes, int ranks) { return 2 * gathered(bytes, ranks); }

static void send_tensor(const fp8zero_plan_model *m, const fp8zero_plan_options *o, int stage, reference_rank *r) {
  const int t = o->tensor_parallel;
  const int64_t all = (int64_t)o->micro_batch * m->sequence;
  const int64_t values = all * m->hidden * wide(o);
  const int64_t cast = all * m->hidden * (o->precision == FP8ZERO_FP8_O3 ? 1 : wide(o));
  int64_t *gather = &r->traffic[FP8ZERO_TRAFFIC_TENSOR_GATHER];
  int64_t *reduce = &r->traffic[FP8ZERO_TRAFFIC_TENSOR_REDUCE];
  const int last = stage == o->pipeline_parallel - 1;
  if (t == 1) return;
  for (int pass = 0; pass < o->micro_batches; pass++) {
    if (stage == 0 && o->sequence_parallel) {
      *reduce += gathered(values, t);
      *gather += gathered(values, t);
    } else if (stage == 0) {
      *reduce += reduced_to_all(values, t);
    }
    for (int i = 0; i < m->layers / o->pipeline_parallel; i++) {
      for (int forward = 0; forward <= (o->recompute != 0); forward++)
        // Attention, feed-forward.
        for (int half = 0; half < 2; half++) {
          if (o->sequence_parallel) {
            *gather += gathered(cast, t);
            *reduce += gathered(values, t);
          } else {
            *reduce += reduced_to_all(values, t);
          }
        }
      for (int half = 0; half < 2; half++) {
        if (o->sequence_parallel) {
          *gather += gathered(values, t);
          *gather += gathered(cast, t);
          *reduce += gathered(values, t);
        } else {
          *reduce += reduced_to_all(values, t);
        }
      }
    }
    if (!last) continue;
    for (int scalar = 0; scalar < 3; scalar++) *reduce += reduced_to_all(all * 4, t);
    if (o->sequence_parallel) {
      *gather += 2 * gathered(values, t);
      *reduce += gathered(values, t);
    } else {
      *reduce += reduced_to_all(values, t);
    }
  }
  if (!o->sequence_parallel) return;
  const int64_t norm = (m->rms_norm ? 1 : 2) * (int64_t)m->hidden;
  const int64_t layer = 2 * norm + (m->biases ? 2 : 0) * (int64_t)m->hidden;
  *reduce += reduced_to_all(4 * (m->layers / o->pipeline_parallel * layer + (last ? norm : 0)), t);
}

static void send_pipeline(const fp8zero_plan_model *m, const fp8zero_plan_options *o, int stage, reference_rank *r) {
  const int64_t rows = (int64_t)o->micro_batch * m->sequence / (o->sequence_parallel ? o->tensor_parallel : 1);
  const int last = stage == o->pipeline_parallel - 1;
  int64_t *sent = &r->traffic[FP8ZERO_TRAFFIC_PIPELINE];
  if (o->pipeline_parallel == 1) return;
  for (int pass = 0; pass < o->micro_batches; pass++) {
    if (!last) *sent += rows * m->hidden * wide(o);
    if (stage > 0) *sent += rows * m->hidden * wide(o);
  }
  const reference_tensor embedding = {padded(m, o) / o->tensor_parallel * m->hidden, 0, 1};
  if (m->tied_embeddings && (stage == 0 || last))
    *sent += reduced_to_all(embedding.elements * gradient_size(o, &embedding), 2);
}

static reference_rank rank_of(const fp8zero_plan_model *m, const fp8zero_plan_options *o, int rank) {
  const int data = rank / o->tensor_parallel % o->data_parallel;
  const int stage = rank / o->tensor_parallel / o->data_parallel;
  reference_list list;
  int64_t owned[MOST_TENSORS];
  reference_rank r;
  int64_t gradients = 0;
  int scaled = 0;
  memset(&r, 0, sizeof(r));
  list_stage(m, o, stage, &list);
  find_owned(o, &list, data, owned);
  for (int i = 0; i < list.count; i++) {
    const reference_tensor *x = &list.tensors[i];
    const int64_t weight = weight_size(o, x);
    const int64_t gradient = gradient_size(o, x);
    r.memory[FP8ZERO_MEMORY_WEIGHTS] += weight * (o->zero_stage == 3 ? owned[i] : x->elements);
    // FP8 on the wire is all that is reduced; several passes are added up in FP32 where only the owner has the sum.
    const int64_t wire = in_fp8(o) ? 1 : 4;
    const int64_t kept = o->micro_batches > 1 ? 4 : wire;
    r.memory[FP8ZERO_MEMORY_GRADIENTS] += o->zero_stage >= 2 ? kept * owned[i] : gradient * x->elements;
    for (int state = 0; state < 3; state++) {
      r.memory[FP8ZERO_MEMORY_MASTER + state] += state_sizes(o)[state] * owned[i];
      if (o->zero_stage > 0) r.distributed += state_sizes(o)[state] * owned[i];
    }
    if (o->zero_stage > 1) r.distributed += kept * owned[i];
    if (o->zero_stage > 2) r.distributed += weight * owned[i];
    if (owned[i] > 0) r.memory[FP8ZERO_MEMORY_SCALES] += 236 + 48 * ((owned[i] + 16383) / 16384);
    scaled += x->linear;
    gradients += wire * x->elements;
    if (o->zero_stage == 0) continue;
    r.traffic[FP8ZERO_TRAFFIC_GRADIENTS] +=
      wire * (x->elements - owned[i]) * (o->zero_stage > 1 ? o->micro_batches : 1);
    r.traffic[FP8ZERO_TRAFFIC_WEIGHTS] +=
      weight * owned[i] * (o->data_parallel - 1) * (o->zero_stage > 2 ? 2 * o->micro_batches : 1);
  }
  if (o->zero_stage == 0 && o->data_parallel > 1)
    r.traffic[FP8ZERO_TRAFFIC_GRADIENTS] = reduced_to_all(gradients, o->data_parallel);
  // 8 + 8 + 4 * 4 + 1 bytes, twice, and 16 amaxes.
  if (o->precision >= FP8ZERO_TE) r.memory[FP8ZERO_MEMORY_SCALES] += 3 * scaled * (33 + 33 + 64);
  if (in_fp8(o)) r.memory[FP8ZERO_MEMORY_SCALES] += 33 * scaled;
  r.memory[FP8ZERO_MEMORY_ACTIVATIONS] = activations_of(m, o, stage);
  send_tensor(m, o, stage, &r);
  send_pipeline(m, o, stage, &r);
  return r;
}

typedef struct gathered_spread {
  int64_t minimum;
  int64_t maximum;
  double sum;
} gathered_spread;

static void collect(gathered_spread *spread, int64_t value, int first) {
  if (first || value < spread->minimum) spread->minimum = value;
  if (first || value > spread->maximum) spread->maximum = value;
  spread->sum = (first ? 0.0 : spread->sum) + (double)value;
}

static void assert_spread(const char *what, const fp8zero_spread *planned, const gathered_spread *found, int ranks) {
  const double mean = found->sum / ranks;
  if (planned->minimum != found->minimum || planned->maximum != found->maximum ||
      fabs(planned->mean - mean) > 1e-12 * mean)
    fail_msg("%s: planned %lld to %lld, mean %.3f; rank by rank %lld to %lld, mean %.3f", what,
             (long long)planned->minimum, (long long)planned->maximum, planned->mean, (long long)found->minimum,
             (long long)found->maximum, mean);
}

static void compare(const fp8zero_plan_model *m, const fp8zero_plan_options *o) {
  gathered_spread memory[FP8ZERO_MEMORY_WORKSPACE];
  gathered_spread traffic[FP8ZERO_TRAFFIC_KINDS];
  gathered_spread sent = {0, 0, 0.0};
  gathered_spread distributed = sent;
  gathered_spread known = sent;
  fp8zero_plan_result plan;
  const int ranks = o->tensor_parallel * o->data_parallel * o->pipeline_parallel;
  assert_ok(fp8zero_plan(m, o, &plan));
  assert_int_equal(plan.ranks, ranks);
  assert_int_equal(plan.padded_vocabulary, padded(m, o));
  for (int i = 0; i < ranks; i++) {
    const reference_rank r = rank_of(m, o, i);
    int64_t all = 0;
    for (int k = 0; k < FP8ZERO_MEMORY_WORKSPACE; k++) {
      collect(&memory[k], r.memory[k], i == 0);
      all += r.memory[k];
    }
    collect(&known, all, i == 0);
    all = 0;
    for (int k = 0; k < FP8ZERO_TRAFFIC_KINDS; k++) {
      collect(&traffic[k], r.traffic[k], i == 0);
      all += r.traffic[k];
    }
    collect(&sent, all, i == 0);
    collect(&distributed, r.distributed, i == 0);
  }
  for (int k = 0; k < FP8ZERO_MEMORY_WORKSPACE; k++)
    assert_spread(fp8zero_memory_class_name((fp8zero_memory_class)k), &plan.memory[k], &memory[k], ranks);
  for (int k = 0; k < FP8ZERO_TRAFFIC_KINDS; k++)
    assert_spread(fp8zero_traffic_kind_name((fp8zero_traffic_kind)k), &plan.traffic[k], &traffic[k], ranks);
  assert_spread("traffic", &plan.traffic_total, &sent, ranks);
  assert_spread("distributed", &plan.distributed, &distributed, ranks);
  // One stage: the same workspace everywhere.
  const fp8zero_spread *workspace = &plan.memory[FP8ZERO_MEMORY_WORKSPACE];
  if (o->pipeline_parallel == 1) {
    assert_true(workspace->minimum == workspace->maximum && workspace->minimum > 0);
    known.minimum += workspace->minimum;
    known.maximum += workspace->minimum;
    known.sum += ranks * (double)workspace->minimum;
    assert_spread("memory", &plan.memory_total, &known, ranks);
    const double ratio = distributed.minimum > 0   ? (double)distributed.maximum / (double)distributed.minimum
                         : distributed.maximum > 0 ? (double)INFINITY
                                                   : 1.0;
    assert_true(plan.balance == ratio);
  }
  assert_true(plan.memory_total.maximum >= known.maximum && plan.memory_total.minimum >= known.minimum);
}

static void rank_by_rank(void **unused) {
  (void)unused;
  test_random random = {3};
  for (int round = 0; round < 1500; round++) {
    fp8zero_plan_model m = fp8zero_plan_model_default();
    fp8zero_plan_options o = fp8zero_plan_options_default();
    o.tensor_parallel = 1 << below(&random, 3);
    o.pipeline_parallel = 1 + below(&random, 4);
    o.data_parallel = 1 + below(&random, 5);
    o.sequence_parallel = below(&random, 2);
    o.zero_stage = below(&random, 4);
    o.distribution = below(&random, 2) ? FP8ZERO_ELEMENTS : FP8ZERO_WHOLE_TENSORS;
    o.precision = (fp8zero_precision)below(&random, FP8ZERO_FP8_O3 + 1);
    o.micro_batch = 1 + below(&random, 3);
    o.micro_batches = 1 + below(&random, 6);
    o.recompute = below(&random, 2);
    o.vocabulary_multiple = 1 + below(&random, 5);
    m.kv_heads = o.tensor_parallel * (1 + below(&random, 2));
    m.heads = m.kv_heads * (1 + below(&random, 2));
    m.hidden = m.heads * 2 * (1 + below(&random, 2));
    m.layers = o.pipeline_parallel * (1 + below(&random, 3));
    m.ffn_hidden = o.tensor_parallel * (1 + below(&random, 20));
    m.vocabulary = 2 + below(&random, 60);
    m.sequence = o.tensor_parallel * (1 + below(&random, 12));
    m.tied_embeddings = below(&random, 2);
    m.biases = below(&random, 2);
    m.rms_norm = below(&random, 2);
    m.swiglu = below(&random, 2);
    m.learned_positions = below(&random, 2);
    compare(&m, &o);
  }
}

// Whatever the order of classes and ranks: counted by hand from table 1 of FP8-LM and section 2.2.
static void seven_billion(void **unused) {
  (void)unused;
  fp8zero_plan_model m = fp8zero_plan_model_default();
  fp8zero_plan_options o = fp8zero_plan_options_default();
  fp8zero_plan_result plan;
  m.layers = 32;
  m.hidden = 4096;
  m.heads = m.kv_heads = 32;
  m.ffn_hidden = 16384;
  assert_ok(fp8zero_plan(&m, &o, &plan));
  // 32 (12 h^2 + 13 h) + 2 h + 50257 h.
  const int64_t parameters = INT64_C(6650015744);
  const int64_t linear = INT64_C(32) * 12 * 4096 * 4096;
  const int64_t embedding = INT64_C(50257) * 4096;
  assert_true(plan.parameters == parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_WEIGHTS].maximum == 2 * parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_GRADIENTS].maximum == 4 * parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_MASTER].maximum == 4 * parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_EXP_AVG].maximum == 4 * parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_EXP_AVG_SQ].maximum == 4 * parameters);
  assert_true(plan.traffic_total.maximum == 0);
  o.precision = FP8ZERO_FP8_O2;
  assert_ok(fp8zero_plan(&m, &o, &plan));
  assert_true(plan.memory[FP8ZERO_MEMORY_WEIGHTS].maximum == 2 * parameters - linear);
  assert_true(plan.memory[FP8ZERO_MEMORY_GRADIENTS].maximum == 4 * parameters - 3 * linear - 2 * embedding);
  assert_true(plan.memory[FP8ZERO_MEMORY_MASTER].maximum == 2 * parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_EXP_AVG].maximum == parameters);
  assert_true(plan.memory[FP8ZERO_MEMORY_EXP_AVG_SQ].maximum == 2 * parameters);
  // FP8-LM's 6 bytes a parameter, gradients included, but for embeddings and vectors.
  const int64_t six = plan.memory[FP8ZERO_MEMORY_GRADIENTS].maximum + 5 * parameters;
  assert_true((double)six / (double)parameters < 6.05);
}

// The configurations of FP8-LM's tables 2, 7 and 8.
typedef struct system_row {
  const char *name;
  int layers;
  int hidden;
  int heads;
  int tensor;
  int pipeline;
  int data;
  int micro_batch;
  // All-gathers of activations in GiB, table 7; 0: not there.
  double bf16_activations;
  double fp8_activations;
} system_row;

static const system_row systems[] = {
  {"gpt-7b", 32, 4096, 32, 1, 1, 32, 2, 0.0, 0.0},
  {"gpt-13b", 40, 5120, 40, 2, 1, 16, 2, 4.7, 3.1},
  {"gpt-175b", 96, 12288, 96, 8, 4, 4, 1, 5.9, 3.9},
};

static void plan_system(const system_row *system, fp8zero_precision precision, fp8zero_plan_result *plan) {
  fp8zero_plan_model m = fp8zero_plan_model_default();
  fp8zero_plan_options o = fp8zero_plan_options_default();
  m.layers = system->layers;
  m.hidden = system->hidden;
  m.heads = m.kv_heads = system->heads;
  m.ffn_hidden = 4 * system->hidden;
  o.precision = precision;
  o.tensor_parallel = system->tensor;
  o.sequence_parallel = system->tensor > 1;
  o.pipeline_parallel = system->pipeline;
  o.data_parallel = system->data;
  o.zero_stage = 1;
  o.distribution = precision == FP8ZERO_FP8_O3 ? FP8ZERO_WHOLE_TENSORS : FP8ZERO_ELEMENTS;
  o.micro_batch = system->micro_batch;
  o.vocabulary_multiple = 128;
  assert_ok(fp8zero_plan(&m, &o, plan));
}

static double weight_related(const fp8zero_plan_result *plan) {
  return plan->traffic[FP8ZERO_TRAFFIC_GRADIENTS].mean + plan->traffic[FP8ZERO_TRAFFIC_WEIGHTS].mean;
}

static void promises(void **unused) {
  (void)unused;
  for (size_t i = 0; i < sizeof(systems) / sizeof(*systems); i++) {
    const system_row *system = &systems[i];
    fp8zero_plan_result bf16;
    fp8zero_plan_result fp8;
    plan_system(system, FP8ZERO_BF16, &bf16);
    plan_system(system, FP8ZERO_FP8_O3, &fp8);
    const double saved = 1.0 - weight_related(&fp8) / weight_related(&bf16);
    const double gather[2] = {(double)bf16.traffic[FP8ZERO_TRAFFIC_TENSOR_GATHER].minimum * 0x1p-30,
                              (double)fp8.traffic[FP8ZERO_TRAFFIC_TENSOR_GATHER].minimum * 0x1p-30};
    print_message("%s: gradients and weights on the wire %.1f -> %.1f GiB a rank, %.1f %% less; memory %.1f -> %.1f "
                  "GiB; whole tensors maximum / minimum %.4f, cut into equal parts %lld are split; all-gathers of "
                  "activations %.2f -> %.2f GiB\n",
                  system->name, weight_related(&bf16) * 0x1p-30, weight_related(&fp8) * 0x1p-30, 100.0 * saved,
                  (double)bf16.memory_total.maximum * 0x1p-30, (double)fp8.memory_total.maximum * 0x1p-30, fp8.balance,
                  (long long)bf16.split_tensors, gather[0], gather[1]);
    assert_true(saved >= 0.63);
    assert_true(fp8.memory_total.maximum < bf16.memory_total.maximum);
    assert_true(bf16.balance < 1.000001);
    if (system->bf16_activations > 0.0) {
      // To the digit of the table, and the three of embedding and output layer, which the 13-billion model's only stage
      // has on top.
      assert_true(fabs(gather[0] - system->bf16_activations) < 0.11);
      assert_true(fabs(gather[1] - system->fp8_activations) < 0.11);
    }
    // The promise: at most 5 % between the ranks that share the 175-billion model's optimizer, and over all ranks.
    if (system->pipeline > 1) {
      assert_true(fp8.balance <= 1.05);
      assert_true((double)fp8.distributed.maximum <= 1.05 * (double)fp8.distributed.minimum);
    }
  }
}

// Each stage of ZeRO takes its class away from ranks, and stage 3 sends more.
static void stages_of_zero(void **unused) {
  (void)unused;
  fp8zero_plan_model m = fp8zero_plan_model_default();
  fp8zero_plan_options o = fp8zero_plan_options_default();
  fp8zero_plan_result plans[4];
  o.data_parallel = 8;
  o.distribution = FP8ZERO_ELEMENTS;
  for (o.zero_stage = 0; o.zero_stage < 4; o.zero_stage++) assert_ok(fp8zero_plan(&m, &o, &plans[o.zero_stage]));
  // Rajbhandari et al., 2020, section 3: 16 bytes and the FP32 gradient's 2 more, of which 12, 16 and 18 are divided.
  const double n = (double)plans[0].parameters;
  const double expected[4] = {18.0, 6.0 + 12.0 / 8, 2.0 + 16.0 / 8, 18.0 / 8};
  for (int stage = 0; stage < 4; stage++) {
    double states = 0.0;
    for (int i = 0; i <= FP8ZERO_MEMORY_EXP_AVG_SQ; i++) states += plans[stage].memory[i].mean;
    assert_true(fabs(states / n - expected[stage]) < 1e-9);
  }
  assert_true(plans[1].traffic_total.mean == plans[2].traffic_total.mean);
  assert_true(plans[0].traffic_total.mean > plans[1].traffic_total.mean);
  assert_true(plans[3].traffic_total.mean > plans[2].traffic_total.mean);
}

static void names(void **unused) {
  (void)unused;
  assert_string_equal(fp8zero_precision_name(FP8ZERO_FP8_O3), "fp8-o3");
  assert_string_equal(fp8zero_precision_name((fp8zero_precision)6), "unknown");
  assert_string_equal(fp8zero_precision_name((fp8zero_precision)-1), "unknown");
  assert_string_equal(fp8zero_memory_class_name(FP8ZERO_MEMORY_WORKSPACE), "workspace");
  assert_string_equal(fp8zero_memory_class_name(FP8ZERO_MEMORY_CLASSES), "unknown");
  assert_string_equal(fp8zero_traffic_kind_name(FP8ZERO_TRAFFIC_PIPELINE), "pipeline");
  assert_string_equal(fp8zero_traffic_kind_name(FP8ZERO_TRAFFIC_KINDS), "unknown");
}

static void defaults(void **unused) {
  (void)unused;
  const fp8zero_plan_model m = fp8zero_plan_model_default();
  const fp8zero_plan_options o = fp8zero_plan_options_default();
  fp8zero_plan_result with;
  fp8zero_plan_result without;
  memset(&with, 0, sizeof(with));
  memset(&without, 0, sizeof(without));
  assert_ok(fp8zero_plan(&m, &o, &with));
  assert_ok(fp8zero_plan(&m, NULL, &without));
  assert_memory_equal(&with, &without, sizeof(with));
  assert_int_equal(with.ranks, 1);
}

static void refuse(const fp8zero_plan_model *m, const fp8zero_plan_options *o, fp8core_status status,
                   const char *text) {
  fp8zero_plan_result plan;
  fp8zero_plan_result untouched;
  memset(&plan, 42, sizeof(plan));
  untouched = plan;
  assert_fails(fp8zero_plan(m, o, &plan), status, text);
  assert_memory_equal(&plan, &untouched, sizeof(plan));
}

#define REFUSE_MODEL(field, value, text)                                                                               \
  do {                                                                                                                 \
    fp8zero_plan_model m = fp8zero_plan_model_default();                                                               \
    m.field = (value);                                                                                                 \
    refuse(&m, NULL, FP8CORE_ERROR_INVALID_ARGUMENT, text);                                                            \
  } while (0)

#define REFUSE_OPTION(field, value, text)                                                                              \
  do {                                                                                                                 \
    const fp8zero_plan_model m = fp8zero_plan_model_default();                                                         \
    fp8zero_plan_options o = fp8zero_plan_options_default();                                                           \
    o.field = (value);                                                                                                 \
    refuse(&m, &o, FP8CORE_ERROR_INVALID_ARGUMENT, text);                                                              \
  } while (0)

static void wrong_arguments(void **unused) {
  (void)unused;
  fp8zero_plan_model model = fp8zero_plan_model_default();
  fp8zero_plan_options options = fp8zero_plan_options_default();
  refuse(NULL, NULL, FP8CORE_ERROR_INVALID_ARGUMENT, "model of fp8zero_plan() is NULL");
  assert_fails(fp8zero_plan(&model, NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "result of fp8zero_plan() is NULL");
  model.size--;
  refuse(&model, NULL, FP8CORE_ERROR_VERSION_MISMATCH, "fp8zero_plan_model.size is");
  model.size++;
  options.size = 0;
  refuse(&model, &options, FP8CORE_ERROR_VERSION_MISMATCH, "fp8zero_plan_options.size is 0, expected");
  REFUSE_MODEL(layers, 0, "layers is 0, expected 1 to 10000");
  REFUSE_MODEL(layers, 10001, "layers is 10001");
  REFUSE_MODEL(hidden, -768, "hidden is -768, expected 1 to 1048576");
  REFUSE_MODEL(hidden, 770, "hidden is 770, expected a multiple of heads, 12");
  REFUSE_MODEL(heads, 769, "heads is 769, expected 1 to 768");
  REFUSE_MODEL(kv_heads, 5, "heads is 12, expected a multiple of kv_heads, 5");
  REFUSE_MODEL(hidden, 12 * 258, "a head has 258 elements (hidden 3096, heads 12), expected at most 256");
  REFUSE_MODEL(hidden, 12 * 15, "a head has 15 elements, expected an even number");
  REFUSE_MODEL(ffn_hidden, 0, "ffn_hidden is 0, expected 1 to 4194304");
  REFUSE_MODEL(vocabulary, 1, "vocabulary is 1, expected 2 to 16777216");
  REFUSE_MODEL(sequence, (1 << 20) + 1, "sequence is 1048577, expected 1 to 1048576");
  REFUSE_OPTION(precision, (fp8zero_precision)6, "precision is 6, expected 0 to 5");
  REFUSE_OPTION(zero_stage, 4, "zero_stage is 4, expected 0 to 3");
  REFUSE_OPTION(distribution, (fp8zero_distribution)2, "distribution is 2");
  REFUSE_OPTION(tensor_parallel, 0, "tensor_parallel is 0, expected 1 to");
  REFUSE_OPTION(tensor_parallel, 8, "heads is 12, expected a multiple of tensor_parallel, 8");
  REFUSE_OPTION(pipeline_parallel, 5, "layers is 12, expected a multiple of pipeline_parallel, 5");
  REFUSE_OPTION(pipeline_parallel, 24, "layers is 12, expected a multiple of pipeline_parallel, 24");
  REFUSE_OPTION(data_parallel, 0, "data_parallel is 0, expected 1 to 1048576");
  REFUSE_OPTION(vocabulary_multiple, 0, "vocabulary_multiple is 0");
  REFUSE_OPTION(micro_batch, 0, "micro_batch is 0, expected 1 to 1048575: with 2048 tokens a sequence");
  REFUSE_OPTION(micro_batch, 1 << 20, "micro_batch is 1048576, expected 1 to 1048575");
  REFUSE_OPTION(micro_batches, 0, "micro_batches is 0, expected 1 to 2147483647");
  model.kv_heads = 2;
  options = fp8zero_plan_options_default();
  options.tensor_parallel = 4;
  refuse(&model, &options, FP8CORE_ERROR_INVALID_ARGUMENT, "kv_heads is 2, expected a multiple of tensor_parallel, 4");
  model.kv_heads = 12;
  model.ffn_hidden = 3074;
  refuse(&model, &options, FP8CORE_ERROR_INVALID_ARGUMENT,
         "ffn_hidden is 3074, expected a multiple of tensor_parallel");
  model.ffn_hidden = 3072;
  model.sequence = 1022;
  assert_ok(fp8zero_plan(&model, &options, &(fp8zero_plan_result){0}));
  options.sequence_parallel = 1;
  refuse(&model, &options, FP8CORE_ERROR_INVALID_ARGUMENT, "sequence is 1022, expected a multiple of tensor_parallel");
}

// The largest of everything that is allowed: refused where bytes pass 2^63, and exact below.
static void largest(void **unused) {
  (void)unused;
  fp8zero_plan_model m = fp8zero_plan_model_default();
  fp8zero_plan_options o = fp8zero_plan_options_default();
  fp8zero_plan_result plan;
  m.layers = 10000;
  m.hidden = 1 << 20;
  m.heads = m.kv_heads = 1 << 13;
  m.ffn_hidden = 1 << 22;
  m.vocabulary = 1 << 24;
  m.sequence = 1;
  m.swiglu = 1;
  o.precision = FP8ZERO_FP32;
  assert_ok(fp8zero_plan(&m, &o, &plan));
  const int64_t h = 1 << 20;
  assert_true(plan.parameters == 10000 * (16 * h * h + (3 + 1 + 8 + 1 + 4) * h) + 2 * h + h * (1 << 24));
  assert_true(plan.memory[FP8ZERO_MEMORY_MASTER].maximum == 4 * plan.parameters);
  m.sequence = 1 << 20;
  o.micro_batch = 2047;
  refuse(&m, &o, FP8CORE_ERROR_INVALID_ARGUMENT, "the bytes of a rank pass 2^63 - 1 (layers 10000, hidden 1048576");
  // Traffic alone.
  m = fp8zero_plan_model_default();
  o = fp8zero_plan_options_default();
  o.tensor_parallel = 2;
  o.micro_batch = 1 << 19;
  o.micro_batches = INT32_MAX;
  refuse(&m, &o, FP8CORE_ERROR_INVALID_ARGUMENT, "micro_batches 2147483647");
}

// 2^20 ranks, 10,000 stages.
static void many_ranks(void **unused) {
  (void)unused;
  fp8zero_plan_model m = fp8zero_plan_model_default();
  fp8zero_plan_options o = fp8zero_plan_options_default();
  fp8zero_plan_result plan;
  m.layers = 10000;
  o.pipeline_parallel = 10000;
  o.data_parallel = 1 << 20;
  o.zero_stage = 3;
  for (int i = 0; i < 2; i++) {
    o.distribution = i ? FP8ZERO_ELEMENTS : FP8ZERO_WHOLE_TENSORS;
    assert_ok(fp8zero_plan(&m, &o, &plan));
    assert_true(plan.ranks == INT64_C(10000) << 20);
    // More ranks than tensors: most have none.
    assert_true(i ? plan.balance < 2.0 : isinf(plan.balance));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(names),         cmocka_unit_test(defaults), cmocka_unit_test(rank_by_rank),
    cmocka_unit_test(seven_billion), cmocka_unit_test(promises), cmocka_unit_test(stages_of_zero),
    cmocka_unit_test(many_ranks),    cmocka_unit_test(largest),  cmocka_unit_test(wrong_arguments),
  };
  return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
