// The sharded optimizer step beside what it is made of: every stage, at 1 to 8 ranks, has the bits of an all-reduce and
// an optimizer of all tensors on each rank.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/ranks.h"
#include "fp8comm/collectives.h"
#include "fp8zero/partition.h"
#include "fp8zero/sharded.h"

#define MOST 24
#define REFUSED(call, text) rank_refused(communicator, call, FP8CORE_ERROR_INVALID_ARGUMENT, text)

// --- Models ---

typedef struct model {
  int count;
  int parts;
  fp8zero_parameter parameters[MOST];
  int groups;
  fp8optim_group group[2];
  // Where the model is divided: which part of it this is. Its gradients are others but for replicated tensors.
  int division;
  // In which step the second division has an infinity; below 0: never.
  int spoiled_step;
} model;

static const char *const names[MOST] = {"wte", "wpe", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l",
                                        "m",   "n",   "o", "p", "q", "r", "s", "t", "u", "v", "w", "x"};

static void add(model *m, int part, int64_t rows, int64_t columns, fp8core_dtype weight, fp8core_dtype gradient) {
  fp8zero_parameter *parameter = &m->parameters[m->count];
  memset(parameter, 0, sizeof(*parameter));
  parameter->name = names[m->count];
  parameter->dimensions = rows > 0 ? 2 : 1;
  parameter->shape[0] = rows > 0 ? rows : columns;
  parameter->shape[1] = columns;
  parameter->group = m->count % 2;
  parameter->weight_dtype = weight;
  parameter->gradient_dtype = gradient;
  parameter->part = part;
  m->count++;
  m->parts = part + 1;
}

static void finish(model *m) {
  m->groups = 2;
  m->spoiled_step = -1;
  m->group[0] = m->group[1] = fp8optim_group_default();
  m->group[1].learning_rate = 3e-3;
  m->group[1].weight_decay = 0;
}

// A tied embedding, three blocks of odd sizes and formats, a final norm.
static void make_transformer(model *m) {
  memset(m, 0, sizeof(*m));
  add(m, 0, 97, 24, FP8CORE_BF16, FP8CORE_FP32);
  add(m, 0, 16, 24, FP8CORE_BF16, FP8CORE_BF16);
  for (int block = 1; block <= 3; block++) {
    add(m, block, 72, 24, FP8CORE_E4M3, FP8CORE_E4M3);
    add(m, block, 0, 71, FP8CORE_FP32, FP8CORE_FP32);
    add(m, block, 24, 24 + block, FP8CORE_E4M3, FP8CORE_FP32);
    add(m, block, 0, block == 2 ? 0 : 1, FP8CORE_BF16, FP8CORE_FP16);
    add(m, block, 95, 23, FP8CORE_E5M2, FP8CORE_E5M2);
  }
  add(m, 4, 0, 24, FP8CORE_FP32, FP8CORE_FP32);
  finish(m);
}

// Fewer tensors than most groups have ranks, and parts without an element.
static void make_tiny(model *m) {
  memset(m, 0, sizeof(*m));
  add(m, 0, 0, 0, FP8CORE_E4M3, FP8CORE_FP32);
  add(m, 1, 3, 5, FP8CORE_E4M3, FP8CORE_FP32);
  add(m, 1, 0, 1, FP8CORE_BF16, FP8CORE_BF16);
  add(m, 2, 0, 0, FP8CORE_FP16, FP8CORE_E4M3);
  finish(m);
}

static int64_t elements_of(const model *m, int index) {
  const fp8zero_parameter *parameter = &m->parameters[index];
  int64_t elements = 1;
  for (int i = 0; i < parameter->dimensions; i++) elements *= parameter->shape[i];
  return elements;
}

static void part_of(const model *m, int part, int *first, int *count) {
  *first = 0;
  while (m->parameters[*first].part != part) ++*first;
  *count = 0;
  while (*first + *count < m->count && m->parameters[*first + *count].part == part) ++*count;
}

// --- Gradients ---

// What a rank's model computed: another one on each rank, in each step and micro-batch, unless all ranks are alike.
static void gradient_values(const model *m, int index, int rank, int step, int micro, float *values) {
  const int source = rank + (m->parameters[index].replicated ? 0 : 8 * m->division);
  test_random random = {(uint64_t)(((index * 64 + source) * 64 + step) * 64 + micro)};
  const int64_t elements = elements_of(m, index);
  for (int64_t i = 0; i < elements; i++) values[i] = (float)(test_random_normal(&random) * (1 + index % 3));
  // An FP32 gradient.
  if (step == m->spoiled_step && m->division == 1 && index == 3 && rank == 0) values[70] = INFINITY;
}

static const float e5m2_scale_inverse = 0.25f;

// Encodes values as the model would have written them.
static fp8core_tensor gradient_tensor(const model *m, int index, void *data, const float *values) {
  const fp8zero_parameter *parameter = &m->parameters[index];
  fp8core_tensor tensor =
    fp8core_tensor_create(data, parameter->gradient_dtype, parameter->dimensions, parameter->shape);
  const float scale = parameter->gradient_dtype == FP8CORE_E5M2 ? 1 / e5m2_scale_inverse : 1;
  const int64_t elements = elements_of(m, index);
  const size_t size = fp8core_dtype_size(parameter->gradient_dtype);
  if (scale != 1) tensor.scale_inverse = &e5m2_scale_inverse;
  for (int64_t i = 0; i < elements; i++) {
    const uint32_t code = fp8core_encode(parameter->gradient_dtype, values[i] * scale, 1);
    memcpy((unsigned char *)data + (size_t)i * size, &code, size);
  }
  return tensor;
}

// --- The reference ---

// An all-reduce and an optimizer of all tensors, on each rank.
typedef struct reference {
  fp8core_context *context;
  fp8comm_gradient_reducer *reducer;
  fp8optim_adamw *adamw;
  fp8core_tensor inputs[MOST];
  fp8core_tensor means[MOST];
  fp8core_tensor sums[MOST];
  void *memory[3][MOST];
} reference;

static void reference_destroy(reference *r) {
  fp8comm_gradient_destroy(&r->reducer);
  fp8optim_adamw_destroy(&r->adamw);
  for (int kind = 0; kind < 3; kind++)
    for (int i = 0; i < MOST; i++) free(r->memory[kind][i]);
  fp8core_context_destroy(&r->context);
}

static fp8core_status reference_create(reference *r, const model *m, fp8comm_communicator *communicator,
                                       const fp8zero_sharded_options *options) {
  int64_t elements[MOST];
  int bucket_of[MOST];
  fp8optim_parameter parameters[MOST];
  fp8comm_gradient_options gradient = options->gradient;
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = 1;
  memset(r, 0, sizeof(*r));
  fp8core_status status = fp8core_context_create(&r->context, &context_options);
  if (status != FP8CORE_OK) return status;
  for (int i = 0; i < m->count; i++) {
    const fp8zero_parameter *one = &m->parameters[i];
    elements[i] = elements_of(m, i);
    bucket_of[i] = one->part;
    for (int kind = 0; kind < 3; kind++) r->memory[kind][i] = calloc((size_t)elements[i] + 1, sizeof(float));
    const fp8core_dtype mean = gradient.algorithm == FP8COMM_BASELINE_FP32   ? FP8CORE_FP32
                               : gradient.algorithm == FP8COMM_BASELINE_BF16 ? FP8CORE_BF16
                                                                             : gradient.wire_dtype;
    r->means[i] = fp8core_tensor_create(r->memory[1][i], mean, one->dimensions, one->shape);
    r->sums[i] = fp8core_tensor_create(r->memory[2][i], FP8CORE_FP32, one->dimensions, one->shape);
    parameters[i] = fp8optim_parameter_create(one->name, 0, 0);
    parameters[i].dimensions = one->dimensions;
    memcpy(parameters[i].shape, one->shape, sizeof(one->shape));
    parameters[i].group = one->group;
    parameters[i].with_weight = 1;
    parameters[i].weight_dtype = one->weight_dtype;
  }
  gradient.bucket_of = bucket_of;
  status = fp8comm_gradient_create(&r->reducer, communicator, r->context, m->count, elements, &gradient);
  if (status != FP8CORE_OK) return status;
  return fp8optim_adamw_create(&r->adamw, r->context, &options->adamw, m->count, parameters, m->groups, m->group);
}

static fp8core_status reference_reduce(reference *r, const model *m, int rank, int step, int micro_batches, int alike) {
  float *values = malloc(8192 * sizeof(*values));
  fp8core_status status = FP8CORE_OK;
  for (int micro = 0; micro < micro_batches && status == FP8CORE_OK; micro++) {
    for (int i = 0; i < m->count; i++) {
      gradient_values(m, i, alike ? 0 : rank, step, micro, values);
      r->inputs[i] = gradient_tensor(m, i, r->memory[0][i], values);
    }
    status = fp8comm_gradient_all_reduce(r->reducer, r->inputs, r->means, NULL);
    for (int i = 0; i < m->count && status == FP8CORE_OK && micro_batches > 1; i++) {
      float *sum = r->sums[i].data;
      const float scale_inverse = r->means[i].scale_inverse ? *r->means[i].scale_inverse : 1.0f;
      const size_t size = fp8core_dtype_size(r->means[i].dtype);
      for (int64_t j = 0; j < elements_of(m, i); j++) {
        uint32_t code = 0;
        memcpy(&code, (const unsigned char *)r->means[i].data + (size_t)j * size, size);
        const float mean = fp8core_decode(r->means[i].dtype, code) * scale_inverse;
        sum[j] = micro == 0 ? mean : sum[j] + mean;
      }
    }
  }
  free(values);
  return status;
}

static const fp8core_tensor *reference_gradients(const reference *r, int micro_batches) {
  return micro_batches > 1 ? r->sums : r->means;
}

// --- Runs ---

typedef struct run {
  model m;
  fp8zero_sharded_options options;
  int resident[MOST];
  int steps;
  // Hold part 0 from the beginning of the forward pass to the end of the backward pass, as a tied embedding.
  int tied;
  // Gradients in memory of the model's own, not in that of the sharded optimizer.
  int drops;
  int elsewhere;
  int alike;
  float max_norm;
  // NULL, or where the owners put the bytes of their masters in the end.
  unsigned char *masters[MOST];
} run;

static fp8core_status context_of(fp8core_context **context) {
  fp8core_context_options options = fp8core_context_options_default();
  options.threads = 1;
  return fp8core_context_create(context, &options);
}

static void initial_values(const model *m, int index, float *values) {
  test_random random = {(uint64_t)(1000 + index)};
  for (int64_t i = 0; i < elements_of(m, index); i++) values[i] = (float)(0.05 * test_random_normal(&random));
}

static fp8core_status set_masters(const model *m, fp8zero_sharded *sharded, fp8optim_adamw *adamw) {
  float *values = malloc(8192 * sizeof(*values));
  fp8core_status status = FP8CORE_OK;
  for (int i = 0; i < m->count && status == FP8CORE_OK; i++) {
    initial_values(m, i, values);
    const fp8core_tensor source =
      fp8core_tensor_create(values, FP8CORE_FP32, m->parameters[i].dimensions, m->parameters[i].shape);
    if (sharded) status = fp8zero_sharded_set_master(sharded, i, &source);
    if (adamw && status == FP8CORE_OK && elements_of(m, i) > 0)
      status = fp8optim_adamw_set_state(adamw, i, FP8OPTIM_MASTER, &source);
  }
  free(values);
  return status;
}

// Compares what the model would compute with.
static int same_weights(const model *m, int part, const fp8zero_sharded *sharded, const fp8optim_adamw *adamw,
                        char *what, size_t bytes) {
  int first;
  int count;
  part_of(m, part, &first, &count);
  for (int i = first; i < first + count; i++) {
    fp8core_tensor found;
    fp8core_tensor expected;
    if (fp8zero_sharded_weight(sharded, i, &found) != FP8CORE_OK ||
        fp8optim_adamw_state(adamw, i, FP8OPTIM_WEIGHT, &expected) != FP8CORE_OK) {
      (void)snprintf(what, bytes, "%s", fp8core_last_error());
      return 0;
    }
    if ((uintptr_t)found.data % 64 != 0 || found.dtype != expected.dtype) {
      (void)snprintf(what, bytes, "weight %d is %s at %p", i, fp8core_dtype_name(found.dtype), found.data);
      return 0;
    }
    if (*found.scale_inverse != *expected.scale_inverse) {
      (void)snprintf(what, bytes, "scale_inverse of weight %d is %g, expected %g", i, (double)*found.scale_inverse,
                     (double)*expected.scale_inverse);
      return 0;
    }
    const size_t size = (size_t)elements_of(m, i) * fp8core_dtype_size(found.dtype);
    if (size > 0 && memcmp(found.data, expected.data, size) != 0) {
      (void)snprintf(what, bytes, "weight %d is not the reference's", i);
      return 0;
    }
  }
  return 1;
}

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

static fp8core_status write_gradients(const run *r, fp8zero_sharded *sharded, int part, int rank, int step, int micro,
                                      void **own, float *values) {
  fp8core_tensor gradients[MOST];
  int first;
  int count;
  part_of(&r->m, part, &first, &count);
  for (int i = first; i < first + count; i++) {
    void *data = own[i];
    if (!r->elsewhere) TRY(fp8zero_sharded_gradient(sharded, i, &data));
    gradient_values(&r->m, i, r->alike ? 0 : rank, step, micro, values);
    gradients[i - first] = gradient_tensor(&r->m, i, data, values);
  }
  return fp8zero_sharded_reduce(sharded, part, gradients);
}

// A forward and a backward pass; compares weights with those of the reference unless it is NULL.
static fp8core_status pass(const run *r, fp8zero_sharded *sharded, const fp8optim_adamw *adamw, int rank, int step,
                           int micro, void **own, char *what, size_t bytes) {
  const int parts = r->m.parts;
  float *values = malloc(8192 * sizeof(*values));
  fp8core_status status = FP8CORE_OK;
  if (r->tied) status = fp8zero_sharded_acquire(sharded, 0, FP8ZERO_FORWARD);
  for (int p = 0; p < parts && status == FP8CORE_OK; p++) {
    if (p > 0 || !r->tied) status = fp8zero_sharded_acquire(sharded, p, FP8ZERO_FORWARD);
    if (status == FP8CORE_OK && adamw && !same_weights(&r->m, p, sharded, adamw, what, bytes)) break;
    if (status == FP8CORE_OK && (p > 0 || !r->tied)) status = fp8zero_sharded_release(sharded, p, FP8ZERO_FORWARD);
  }
  if (r->tied && status == FP8CORE_OK) status = fp8zero_sharded_acquire(sharded, 0, FP8ZERO_BACKWARD);
  for (int p = parts - 1; p >= 0 && status == FP8CORE_OK; p--) {
    if (p > 0 || !r->tied) status = fp8zero_sharded_acquire(sharded, p, FP8ZERO_BACKWARD);
    if (status == FP8CORE_OK && adamw && !same_weights(&r->m, p, sharded, adamw, what, bytes)) break;
    // Before or after the reduction.
    if (status == FP8CORE_OK && p % 2 == 1) status = fp8zero_sharded_release(sharded, p, FP8ZERO_BACKWARD);
    if (status == FP8CORE_OK) status = write_gradients(r, sharded, p, rank, step, micro, own, values);
    if (status == FP8CORE_OK && p % 2 == 0) status = fp8zero_sharded_release(sharded, p, FP8ZERO_BACKWARD);
    if (status == FP8CORE_OK) status = fp8zero_sharded_progress(sharded);
  }
  if (r->tied && status == FP8CORE_OK) status = fp8zero_sharded_release(sharded, 0, FP8ZERO_FORWARD);
  free(values);
  return status;
}

// A state of the sharded optimizer against that of the reference; this rank's only.
static int same_states(const model *m, const fp8zero_sharded *sharded, const fp8optim_adamw *adamw, char *what,
                       size_t bytes) {
  const fp8optim_adamw *own = fp8zero_sharded_adamw(sharded);
  for (int i = 0; i < m->count; i++) {
    const int64_t local = fp8zero_sharded_local(sharded, i);
    if (local < 0) continue;
    for (int state = FP8OPTIM_MASTER; state <= FP8OPTIM_EXP_AVG_SQ; state++) {
      fp8core_tensor found;
      fp8core_tensor expected;
      float scales[2];
      float amaxes[2];
      if (fp8optim_adamw_state(own, local, (fp8optim_state)state, &found) != FP8CORE_OK ||
          fp8optim_adamw_state(adamw, i, (fp8optim_state)state, &expected) != FP8CORE_OK ||
          fp8optim_adamw_get_stored(own, local, (fp8optim_state)state, &scales[0], &amaxes[0]) != FP8CORE_OK ||
          fp8optim_adamw_get_stored(adamw, i, (fp8optim_state)state, &scales[1], &amaxes[1]) != FP8CORE_OK) {
        (void)snprintf(what, bytes, "%s", fp8core_last_error());
        return 0;
      }
      const size_t size = (size_t)elements_of(m, i) * fp8core_dtype_size(found.dtype);
      if (scales[0] != scales[1] || amaxes[0] != amaxes[1] ||
          (size > 0 && memcmp(found.data, expected.data, size) != 0)) {
        (void)snprintf(what, bytes, "%s of tensor %d is not the reference's",
                       fp8optim_state_name((fp8optim_state)state), i);
        return 0;
      }
    }
  }
  return 1;
}

static int same_report(const fp8optim_step_report *one, const fp8optim_step_report *other) {
  return one->skipped == other->skipped && one->steps == other->steps && one->skipped_steps == other->skipped_steps &&
         memcmp(&one->gradient_norm, &other->gradient_norm, sizeof(float)) == 0 &&
         memcmp(&one->clip_factor, &other->clip_factor, sizeof(float)) == 0;
}

// A step that the caller drops: only the reducers go on.
static void drop_step(fp8comm_communicator *communicator, const run *r, fp8zero_sharded *sharded, reference *beside,
                      void **own) {
  const int dropped = 100;
  const int rank = fp8comm_communicator_rank(communicator);
  for (int micro = 0; micro < r->options.micro_batches; micro++)
    rank_ok(communicator, pass(r, sharded, NULL, rank, dropped, micro, own, NULL, 0));
  rank_ok(communicator, fp8zero_sharded_skip(sharded));
  rank_ok(communicator, reference_reduce(beside, &r->m, rank, dropped, r->options.micro_batches, r->alike));
}

static void run_beside_reference(fp8comm_communicator *communicator, void *data) {
  run *r = data;
  const int rank = fp8comm_communicator_rank(communicator);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  reference beside;
  char what[256] = "";
  fp8zero_sharded_options options = r->options;
  fp8optim_step_options step_options = fp8optim_step_options_default();
  step_options.max_norm = r->max_norm;
  step_options.loss_scale = 2.0f;
  options.resident = r->resident;
  void *own[MOST] = {NULL};
  for (int i = 0; i < r->m.count; i++) own[i] = calloc((size_t)elements_of(&r->m, i) + 1, sizeof(float));
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, reference_create(&beside, &r->m, communicator, &options));
  rank_ok(communicator, fp8zero_sharded_create(&sharded, communicator, context, &options, r->m.count, r->m.parameters,
                                               r->m.groups, r->m.group));
  rank_ok(communicator, set_masters(&r->m, sharded, beside.adamw));
  rank_ok(communicator, fp8zero_sharded_publish(sharded));
  for (int step = 0; step < r->steps; step++) {
    fp8optim_step_report expected;
    fp8optim_step_report found;
    if (r->drops && step == 1) drop_step(communicator, r, sharded, &beside, own);
    for (int micro = 0; micro < options.micro_batches; micro++) {
      rank_ok(communicator, pass(r, sharded, beside.adamw, rank, step, micro, own, what, sizeof(what)));
      rank_check(communicator, !what[0], "stage %d, step %d: %s", options.stage, step, what);
    }
    rank_ok(communicator, fp8zero_sharded_step(sharded, &step_options, &found));
    rank_ok(communicator, reference_reduce(&beside, &r->m, rank, step, options.micro_batches, r->alike));
    rank_ok(communicator, fp8optim_adamw_step(beside.adamw, reference_gradients(&beside, options.micro_batches),
                                              &step_options, &expected));
    rank_check(communicator, same_report(&found, &expected),
               "stage %d, step %d: norm %.9g, factor %.9g, expected %.9g, %.9g", options.stage, step,
               (double)found.gradient_norm, (double)found.clip_factor, (double)expected.gradient_norm,
               (double)expected.clip_factor);
    rank_check(communicator, found.steps == step + 1, "step %d is counted as %lld", step, (long long)found.steps);
    rank_check(communicator, same_states(&r->m, sharded, beside.adamw, what, sizeof(what)), "stage %d, step %d: %s",
               options.stage, step, what);
    if (step % 2 == 0) rank_ok(communicator, fp8zero_sharded_wait(sharded));
    for (int p = 0; p < r->m.parts && options.stage < 3 && step % 2 == 0; p++)
      rank_check(communicator, same_weights(&r->m, p, sharded, beside.adamw, what, sizeof(what)),
                 "stage %d, step %d, without acquire: %s", options.stage, step, what);
  }
  rank_ok(communicator, fp8zero_sharded_wait(sharded));
  for (int i = 0; i < r->m.count; i++) {
    fp8core_tensor master;
    if (!r->masters[i] || fp8zero_sharded_owner(sharded, i) != rank || elements_of(&r->m, i) == 0) continue;
    rank_ok(communicator, fp8optim_adamw_state(fp8zero_sharded_adamw(sharded), fp8zero_sharded_local(sharded, i),
                                               FP8OPTIM_MASTER, &master));
    memcpy(r->masters[i], master.data, (size_t)fp8core_tensor_span_bytes(&master));
  }
  fp8zero_sharded_destroy(&sharded);
  reference_destroy(&beside);
  fp8core_context_destroy(&context);
  for (int i = 0; i < r->m.count; i++) free(own[i]);
}

static run run_of(void (*make)(model *), int stage) {
  run r;
  memset(&r, 0, sizeof(r));
  make(&r.m);
  r.options = fp8zero_sharded_options_default();
  r.options.stage = stage;
  r.options.gradient.bucket_bytes = 4000;
  r.steps = 3;
  r.max_norm = 1.0f;
  return r;
}

static const int rank_counts[] = {1, 2, 3, 4, 8};
#define RANK_COUNTS 5

static void every_stage_is_the_reference(void **unused) {
  (void)unused;
  for (int n = 0; n < RANK_COUNTS; n++) {
    for (int stage = 0; stage <= 3; stage++) {
      run r = run_of(make_transformer, stage);
      r.resident[0] = r.tied = 1;
      run_ranks(rank_counts[n], 0, run_beside_reference, &r);
      r = run_of(make_tiny, stage);
      run_ranks(rank_counts[n], 0, run_beside_reference, &r);
    }
  }
}

static void buffers_and_places(void **unused) {
  (void)unused;
  for (int stage = 2; stage <= 3; stage++) {
    for (int buffers = 1; buffers <= 4; buffers++) {
      run r = run_of(make_transformer, stage);
      r.options.weight_buffers = buffers;
      r.options.gradient_buffers = 5 - buffers;
      r.elsewhere = buffers == 2;
      run_ranks(3, 0, run_beside_reference, &r);
      // Held, in a buffer like the others.
      r.tied = 1;
      r.options.weight_buffers = buffers + 1;
      r.options.gradient_buffers = buffers + 1;
      run_ranks(2, 0, run_beside_reference, &r);
    }
  }
  for (int stage = 0; stage <= 3; stage++) {
    run r = run_of(make_transformer, stage);
    r.elsewhere = 1;
    run_ranks(3, 0, run_beside_reference, &r);
    // The model's own memory, and no other.
    r.options.gradient_memory = 0;
    run_ranks(3, 0, run_beside_reference, &r);
    r.resident[0] = r.tied = 1;
    r.options.micro_batches = stage >= 2 ? 3 : 1;
    run_ranks(4, 0, run_beside_reference, &r);
  }
}

static void options_of_all_kinds(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    for (int kind = 0; kind < 5; kind++) {
      run r = run_of(make_transformer, stage);
      r.steps = 4;
      r.max_norm = kind % 2 ? 0.0f : 0.5f;
      r.options.adamw = fp8optim_adamw_options_of(kind == 1 ? FP8OPTIM_PRESET_FP32 : FP8OPTIM_PRESET_FP8_BF16_MASTER);
      r.options.adamw.stochastic_rounding = kind != 1;
      r.options.adamw.seed = 12345;
      r.options.gradient.buckets_in_flight = 1 + kind;
      r.options.gradient.bucket_bytes = kind == 0 ? 1 : 1 << 20;
      // Sums of two are exact, in whatever order.
      if (kind == 1) r.options.gradient.algorithm = FP8COMM_BASELINE_FP32;
      if (kind == 2) r.options.gradient.algorithm = FP8COMM_BASELINE_BF16;
      if (kind == 3) r.options.gradient.wire_dtype = FP8CORE_E5M2;
      // Owners' means have scales of their own past, the same as everybody's.
      r.options.gradient.delayed_scaling = kind == 4;
      run_ranks(2, 0, run_beside_reference, &r);
    }
  }
}

static void micro_batches(void **unused) {
  (void)unused;
  for (int stage = 2; stage <= 3; stage++) {
    for (int micro = 2; micro <= 3; micro++) {
      run r = run_of(make_transformer, stage);
      r.options.micro_batches = micro;
      r.options.gradient_buffers = micro - 1;
      r.resident[0] = r.tied = micro == 3;
      r.elsewhere = stage == 2 && micro == 2;
      run_ranks(3, 0, run_beside_reference, &r);
      r = run_of(make_tiny, stage);
      r.options.micro_batches = micro;
      run_ranks(4, 0, run_beside_reference, &r);
    }
  }
}

// --- Many ranks and one ---

static void dropped_steps(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    for (int micro = 1; micro <= (stage >= 2 ? 2 : 1); micro++) {
      run r = run_of(make_transformer, stage);
      r.options.micro_batches = micro;
      r.drops = 1;
      run_ranks(3, 0, run_beside_reference, &r);
    }
  }
}

static void keep_masters(run *r) {
  for (int i = 0; i < r->m.count; i++) {
    r->masters[i] = calloc((size_t)elements_of(&r->m, i) + 1, sizeof(float));
    assert_non_null(r->masters[i]);
  }
}

static void drop_masters(run *r) {
  for (int i = 0; i < r->m.count; i++) free(r->masters[i]);
}

static void assert_same_masters(const run *one, const run *other) {
  for (int i = 0; i < one->m.count; i++)
    assert_memory_equal(one->masters[i], other->masters[i],
                        (size_t)elements_of(&one->m, i) * fp8core_dtype_size(one->options.adamw.master_dtype));
}

// An optimizer of this process alone, with the gradients as they come.
static void run_alone(run *r) {
  fp8core_context *context = NULL;
  fp8optim_adamw *adamw = NULL;
  fp8optim_parameter parameters[MOST];
  fp8core_tensor gradients[MOST];
  float *values = malloc(8192 * sizeof(*values));
  fp8optim_step_options options = fp8optim_step_options_default();
  options.max_norm = r->max_norm;
  options.loss_scale = 2.0f;
  assert_ok(context_of(&context));
  for (int i = 0; i < r->m.count; i++) {
    parameters[i] = fp8optim_parameter_create(r->m.parameters[i].name, 0, 0);
    parameters[i].dimensions = r->m.parameters[i].dimensions;
    memcpy(parameters[i].shape, r->m.parameters[i].shape, sizeof(parameters[i].shape));
    parameters[i].group = r->m.parameters[i].group;
  }
  assert_ok(fp8optim_adamw_create(&adamw, context, &r->options.adamw, r->m.count, parameters, r->m.groups, r->m.group));
  assert_ok(set_masters(&r->m, NULL, adamw));
  void *data[MOST];
  for (int i = 0; i < r->m.count; i++) data[i] = calloc((size_t)elements_of(&r->m, i) + 1, sizeof(float));
  for (int step = 0; step < r->steps; step++) {
    for (int i = 0; i < r->m.count; i++) {
      gradient_values(&r->m, i, 0, step, 0, values);
      // In FP32, as what was reduced: an optimizer adds up the squares of FP8 gradients otherwise.
      const fp8core_tensor written = gradient_tensor(&r->m, i, data[i], values);
      for (int64_t j = 0; j < elements_of(&r->m, i); j++) {
        const size_t size = fp8core_dtype_size(written.dtype);
        uint32_t code = 0;
        memcpy(&code, (unsigned char *)data[i] + (size_t)j * size, size);
        values[j] = fp8core_decode(written.dtype, code) * (written.scale_inverse ? *written.scale_inverse : 1.0f);
      }
      memcpy(data[i], values, (size_t)elements_of(&r->m, i) * sizeof(*values));
      gradients[i] = fp8core_tensor_create(data[i], FP8CORE_FP32, written.dimensions, written.shape);
    }
    assert_ok(fp8optim_adamw_step(adamw, gradients, &options, NULL));
  }
  for (int i = 0; i < r->m.count; i++) {
    fp8core_tensor master;
    assert_ok(fp8optim_adamw_state(adamw, i, FP8OPTIM_MASTER, &master));
    if (master.data) memcpy(r->masters[i], master.data, (size_t)fp8core_tensor_span_bytes(&master));
    free(data[i]);
  }
  free(values);
  fp8optim_adamw_destroy(&adamw);
  fp8core_context_destroy(&context);
}

// With the same gradients on all ranks, and sums that are exact, it is the optimizer without ranks.
static void as_one_rank(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    run alone = run_of(make_transformer, stage);
    alone.options.gradient.algorithm = FP8COMM_BASELINE_FP32;
    alone.alike = 1;
    run one = alone;
    one.options.gradient.algorithm = FP8COMM_TWO_SHOT;
    keep_masters(&alone);
    run_alone(&alone);
    keep_masters(&one);
    run_ranks(1, 0, run_beside_reference, &one);
    for (int n = 0; n < RANK_COUNTS; n++) {
      // Sums of 3 are rounded.
      if (rank_counts[n] == 3) continue;
      run many = alone;
      keep_masters(&many);
      run_ranks(rank_counts[n], 0, run_beside_reference, &many);
      assert_same_masters(&many, &alone);
      many.options.gradient.algorithm = FP8COMM_TWO_SHOT;
      run_ranks(rank_counts[n], 0, run_beside_reference, &many);
      assert_same_masters(&many, &one);
      drop_masters(&many);
    }
    drop_masters(&alone);
    drop_masters(&one);
  }
}

// --- Steps that are skipped ---

typedef struct spoiled {
  int stage;
  int rank;
  float value;
} spoiled;

static void run_spoiled(fp8comm_communicator *communicator, void *data) {
  const spoiled *s = data;
  const int rank = fp8comm_communicator_rank(communicator);
  run r = run_of(make_transformer, s->stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8optim_step_report report;
  fp8comm_gradient_result result;
  float *values = malloc(8192 * sizeof(*values));
  unsigned char before[2000];
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, fp8zero_sharded_create(&sharded, communicator, context, &r.options, r.m.count, r.m.parameters,
                                               r.m.groups, r.m.group));
  rank_ok(communicator, set_masters(&r.m, sharded, NULL));
  rank_ok(communicator, fp8zero_sharded_publish(sharded));
  rank_ok(communicator, fp8zero_sharded_reduction(sharded, &result));
  rank_check(communicator, result.nonfinite_tensors == 0 && result.nonfinite_rank == -1, "a result before a step");
  for (int step = 0; step < 3; step++) {
    fp8core_tensor weight;
    rank_ok(communicator, fp8zero_sharded_acquire(sharded, 2, FP8ZERO_FORWARD));
    rank_ok(communicator, fp8zero_sharded_weight(sharded, 7, &weight));
    rank_check(communicator, weight.dtype == FP8CORE_E4M3, "weight 7 is %s", fp8core_dtype_name(weight.dtype));
    if (step == 1) memcpy(before, weight.data, 72 * 24);
    // What was skipped has changed nothing; what was not, has.
    if (step == 2)
      rank_check(communicator, memcmp(before, weight.data, 72 * 24) == 0, "a skipped step changed a weight");
    rank_ok(communicator, fp8zero_sharded_release(sharded, 2, FP8ZERO_FORWARD));
    for (int p = r.m.parts - 1; p >= 0; p--) {
      fp8core_tensor gradients[MOST];
      int first;
      int count;
      part_of(&r.m, p, &first, &count);
      rank_ok(communicator, fp8zero_sharded_acquire(sharded, p, FP8ZERO_BACKWARD));
      for (int i = first; i < first + count; i++) {
        void *memory;
        rank_ok(communicator, fp8zero_sharded_gradient(sharded, i, &memory));
        gradient_values(&r.m, i, rank, step, 0, values);
        gradients[i - first] = gradient_tensor(&r.m, i, memory, values);
        // FP32, of a block.
        if (step == 1 && i == 9 && rank == s->rank) ((float *)memory)[11] = s->value;
      }
      rank_ok(communicator, fp8zero_sharded_reduce(sharded, p, gradients));
      rank_ok(communicator, fp8zero_sharded_release(sharded, p, FP8ZERO_BACKWARD));
    }
    rank_ok(communicator, fp8zero_sharded_step(sharded, NULL, &report));
    rank_ok(communicator, fp8zero_sharded_reduction(sharded, &result));
    rank_check(communicator, report.skipped == (step == 1), "step %d: skipped is %d", step, report.skipped);
    rank_check(communicator, result.nonfinite_tensors == (step == 1), "step %d: %lld tensors", step,
               (long long)result.nonfinite_tensors);
    rank_check(communicator, result.nonfinite_rank == (step == 1 ? s->rank : -1), "step %d: rank %d", step,
               result.nonfinite_rank);
    rank_check(communicator, report.steps == (step == 0 ? 1 : step), "step %d: %lld taken", step,
               (long long)report.steps);
    rank_check(communicator, report.skipped_steps == (step > 0), "step %d: %lld skipped", step,
               (long long)report.skipped_steps);
  }
  rank_check(communicator, fp8optim_adamw_steps(fp8zero_sharded_adamw(sharded)) == 2, "2 steps");
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  free(values);
}

static void not_finite(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    spoiled s = {stage, stage % 3, stage % 2 ? NAN : INFINITY};
    run_ranks(3, 0, run_spoiled, &s);
  }
}

#define CREATE()                                                                                                       \
  fp8zero_sharded_create(&sharded, communicator, context, &r.options, r.m.count, r.m.parameters, r.m.groups, r.m.group)

// --- Calls that are refused ---

// Where means take the place of gradients in the model's own memory.
static void run_refused_places(fp8comm_communicator *communicator, void *data) {
  (void)data;
  run r = run_of(make_transformer, 1);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8zero_memory memory;
  fp8core_tensor gradients[MOST];
  void *address;
  float *values = calloc(8192, sizeof(*values));
  r.options.gradient_memory = 0;
  r.options.gradient.algorithm = FP8COMM_BASELINE_BF16;
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, CREATE());
  rank_ok(communicator, fp8zero_sharded_memory(sharded, &memory));
  rank_check(communicator, memory.gradient_bytes + memory.gradient_buffer_bytes + memory.mean_gradient_bytes == 0,
             "memory for gradients");
  REFUSED(fp8zero_sharded_gradient(sharded, 2, &address), "the gradient of \"c\" is in memory of the model's own");
  for (int i = 0; i < r.m.count; i++)
    gradients[i] = fp8core_tensor_create(values, r.m.parameters[i].gradient_dtype, r.m.parameters[i].dimensions,
                                         r.m.parameters[i].shape);
  REFUSED(fp8zero_sharded_reduce(sharded, 1, gradients + 2),
          "the gradient of parameter \"c\" is e4m3, expected at least the 2 bytes of bf16, whose mean takes its place");
  gradients[0].row_stride = 25;
  REFUSED(fp8zero_sharded_reduce(sharded, 0, gradients),
          "the gradient of parameter \"wte\" has a row stride of 25, expected contiguous memory");
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  free(values);
}

static void run_refused(fp8comm_communicator *communicator, void *data) {
  const int stage = *(const int *)data;
  run r = run_of(make_transformer, stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8core_tensor tensor;
  fp8core_tensor gradients[MOST];
  void *memory;
  int64_t first;
  int64_t count;
  float *values = calloc(8192, sizeof(*values));
  fp8optim_step_options step = fp8optim_step_options_default();
  rank_ok(communicator, context_of(&context));
  r.options.weight_buffers = 2;
  r.options.gradient_buffers = 2;
  rank_ok(communicator, fp8zero_sharded_create(&sharded, communicator, context, &r.options, r.m.count, r.m.parameters,
                                               r.m.groups, r.m.group));
  rank_check(communicator, fp8zero_sharded_parameters(sharded) == r.m.count && fp8zero_sharded_parts(sharded) == 5,
             "its own size");
  rank_ok(communicator, fp8zero_sharded_part(sharded, 2, &first, &count));
  rank_check(communicator, first == 7 && count == 5, "part 2 is %lld from %lld on", (long long)count, (long long)first);
  REFUSED(fp8zero_sharded_part(sharded, 5, &first, &count), "part is 5, expected 0 to 4");
  REFUSED(fp8zero_sharded_acquire(sharded, -1, FP8ZERO_FORWARD), "part is -1, expected 0 to 4");
  REFUSED(fp8zero_sharded_acquire(sharded, 0, (fp8zero_direction)2), "direction is 2");
  REFUSED(fp8zero_sharded_release(sharded, 0, FP8ZERO_FORWARD), "part 0 is not held for forward");
  REFUSED(fp8zero_sharded_weight(sharded, r.m.count, &tensor), "index is 18, expected 0 to 17");
  REFUSED(fp8zero_sharded_gradient(sharded, -1, &memory), "index is -1, expected 0 to 17");
  REFUSED(fp8zero_sharded_step(sharded, NULL, NULL),
          "part 0 was reduced 0 times in this step, expected micro_batches, 1");
  step.max_norm = -1.0f;
  REFUSED(fp8zero_sharded_step(sharded, &step, NULL), "max_norm is -1");
  step.size = 1;
  rank_refused(communicator, fp8zero_sharded_step(sharded, &step, NULL), FP8CORE_ERROR_VERSION_MISMATCH,
               "fp8optim_step_options.size is 1");
  REFUSED(fp8zero_sharded_acquire(NULL, 0, FP8ZERO_FORWARD), "sharded of fp8zero_sharded_acquire() is NULL");
  REFUSED(fp8zero_sharded_step(NULL, NULL, NULL), "sharded of fp8zero_sharded_step() is NULL");
  REFUSED(fp8zero_sharded_wait(NULL), "sharded of fp8zero_sharded_wait() is NULL");
  // Set and not published.
  rank_ok(communicator, set_masters(&r.m, sharded, NULL));
  REFUSED(fp8zero_sharded_acquire(sharded, 0, FP8ZERO_FORWARD), "expected fp8zero_sharded_publish()");
  rank_ok(communicator, fp8zero_sharded_publish(sharded));
  rank_ok(communicator, fp8zero_sharded_acquire(sharded, 1, FP8ZERO_FORWARD));
  REFUSED(fp8zero_sharded_acquire(sharded, 1, FP8ZERO_FORWARD), "part 1 is held for forward already");
  REFUSED(fp8zero_sharded_publish(sharded), "fp8zero_sharded_publish() while part 1 is held");
  REFUSED(fp8zero_sharded_step(sharded, NULL, NULL), "fp8zero_sharded_step() while part 1 is held");
  tensor = fp8core_tensor_create(values, FP8CORE_FP32, 2, r.m.parameters[0].shape);
  REFUSED(fp8zero_sharded_set_master(sharded, 0, &tensor), "fp8zero_sharded_set_master() while part 1 is held");
  REFUSED(fp8zero_sharded_set_master(sharded, 99, &tensor), "index is 99");
  rank_ok(communicator, fp8zero_sharded_acquire(sharded, 2, FP8ZERO_FORWARD));
  if (stage == 3) {
    REFUSED(fp8zero_sharded_acquire(sharded, 3, FP8ZERO_FORWARD),
            "part 3 needs memory for weights while 2 parts are held");
    REFUSED(fp8zero_sharded_weight(sharded, 0, &tensor), "the weight of \"wte\" is of part 0, which is not held");
  }
  rank_ok(communicator, fp8zero_sharded_release(sharded, 1, FP8ZERO_FORWARD));
  rank_ok(communicator, fp8zero_sharded_release(sharded, 2, FP8ZERO_FORWARD));
  // Reductions out of order.
  for (int i = 0; i < r.m.count; i++)
    gradients[i] = fp8core_tensor_create(values, r.m.parameters[i].gradient_dtype, r.m.parameters[i].dimensions,
                                         r.m.parameters[i].shape);
  REFUSED(fp8zero_sharded_reduce(sharded, 2, NULL), "gradients is NULL, expected 5 tensors");
  if (stage >= 2) {
    REFUSED(fp8zero_sharded_gradient(sharded, 7, &memory), "part 2 has no memory for the gradient of \"h\"");
    REFUSED(fp8zero_sharded_reduce(sharded, 2, gradients + 7), "part 2 has no memory for gradients");
  }
  rank_ok(communicator, fp8zero_sharded_acquire(sharded, 2, FP8ZERO_BACKWARD));
  REFUSED(fp8zero_sharded_reduce(sharded, 2, gradients + 6),
          "the gradient of parameter \"h\" has 2185 elements, expected 1728");
  gradients[8].data = NULL;
  REFUSED(fp8zero_sharded_reduce(sharded, 2, gradients + 7), "the gradient of parameter \"i\":");
  gradients[8].data = values;
  rank_ok(communicator, fp8zero_sharded_acquire(sharded, 1, FP8ZERO_BACKWARD));
  rank_ok(communicator, fp8zero_sharded_release(sharded, 1, FP8ZERO_BACKWARD));
  if (stage >= 2)
    REFUSED(fp8zero_sharded_acquire(sharded, 0, FP8ZERO_BACKWARD),
            "part 0 needs memory for gradients while 2 parts were acquired for backward and not reduced");
  rank_ok(communicator, fp8zero_sharded_reduce(sharded, 2, gradients + 7));
  REFUSED(fp8zero_sharded_reduce(sharded, 2, gradients + 7), "part 2 was reduced 1 times already in this step");
  if (stage >= 2) REFUSED(fp8zero_sharded_gradient(sharded, 7, &memory), "part 2 has no memory for the gradient");
  rank_ok(communicator, fp8zero_sharded_release(sharded, 2, FP8ZERO_BACKWARD));
  REFUSED(fp8zero_sharded_step(sharded, NULL, NULL), "part 0 was reduced 0 times");
  // And it goes on: the rest, and a step.
  const int others[] = {1, 0, 4, 3};
  for (int i = 0; i < 4; i++) {
    rank_ok(communicator, fp8zero_sharded_part(sharded, others[i], &first, &count));
    rank_ok(communicator, fp8zero_sharded_acquire(sharded, others[i], FP8ZERO_BACKWARD));
    rank_ok(communicator, fp8zero_sharded_reduce(sharded, others[i], gradients + first));
    rank_ok(communicator, fp8zero_sharded_release(sharded, others[i], FP8ZERO_BACKWARD));
  }
  fp8optim_step_report report;
  rank_ok(communicator, fp8zero_sharded_step(sharded, NULL, &report));
  rank_check(communicator, report.steps == 1 && report.gradient_norm == 0.0f, "a step of zeros");
  rank_ok(communicator, fp8zero_sharded_wait(sharded));
  fp8zero_sharded_destroy(&sharded);
  fp8zero_sharded_destroy(&sharded);
  fp8zero_sharded_destroy(NULL);
  fp8core_context_destroy(&context);
  free(values);
}

static void refused_calls(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) run_ranks(2, 0, run_refused, &stage);
  run_ranks(2, 0, run_refused_places, NULL);
}

static void run_bad_creation(fp8comm_communicator *communicator, void *data) {
  (void)data;
  run r = run_of(make_transformer, 1);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  rank_ok(communicator, context_of(&context));
#define BAD(change, text)                                                                                              \
  do {                                                                                                                 \
    const run kept = r;                                                                                                \
    change;                                                                                                            \
    REFUSED(CREATE(), text);                                                                                           \
    rank_check(communicator, !sharded, "a handle");                                                                    \
    r = kept;                                                                                                          \
  } while (0)
  REFUSED(fp8zero_sharded_create(NULL, communicator, context, NULL, r.m.count, r.m.parameters, 2, r.m.group),
          "sharded of fp8zero_sharded_create() is NULL");
  REFUSED(fp8zero_sharded_create(&sharded, NULL, context, NULL, r.m.count, r.m.parameters, 2, r.m.group),
          "communicator of fp8zero_sharded_create() is NULL");
  REFUSED(fp8zero_sharded_create(&sharded, communicator, NULL, NULL, r.m.count, r.m.parameters, 2, r.m.group),
          "context of fp8zero_sharded_create() is NULL");
  REFUSED(fp8zero_sharded_create(&sharded, communicator, context, NULL, 3, NULL, 2, r.m.group),
          "parameters is NULL, expected 3");
  REFUSED(fp8zero_sharded_create(&sharded, communicator, context, NULL, 1, r.m.parameters, 1, NULL),
          "groups is NULL, expected 1");
  BAD(r.options.stage = 4, "stage is 4, expected 0 to 3");
  BAD(r.options.stage = -1, "stage is -1");
  BAD(r.options.micro_batches = 0, "micro_batches is 0, expected at least 1");
  BAD(r.options.micro_batches = 2, "micro_batches is 2 in stage 1, expected 1");
  BAD(r.options.weight_buffers = 0, "weight_buffers is 0, expected 1 to 64");
  BAD(r.options.gradient_buffers = 65, "gradient_buffers is 65, expected 1 to 64");
  BAD(r.options.gradient.owners = rank_counts, "owners of the gradient options is set");
  BAD(r.options.gradient.bucket_bytes = 0, "bucket_bytes is 0");
  BAD(r.options.gradient.backoff = 2, "backoff is 2");
  BAD(r.options.adamw.exp_avg_dtype = (fp8core_dtype)9, "exp_avg_dtype is 9");
  BAD(r.m.count = 0, "parameter_count is 0, expected 1 to 2^31 - 1");
  BAD(r.m.groups = 0, "group_count is 0");
  BAD(r.m.group[1].beta2 = 1, "beta2 of group 1 is 1");
  BAD(r.m.parameters[3].name = NULL, "the name of parameter 3 is NULL");
  BAD(r.m.parameters[3].name = "", "the name of parameter 3 has 0 bytes");
  BAD(r.m.parameters[3].name = "wpe", "two parameters are called \"wpe\"");
  BAD(r.m.parameters[3].dimensions = 5, "parameter \"d\" has 5 dimensions");
  BAD(r.m.parameters[3].shape[0] = -7, "shape[0] of parameter \"d\" is -7");
  BAD(r.m.parameters[2].shape[0] = INT64_MAX / 3, "parameter \"c\" has more than 2^58 elements");
  BAD(r.m.parameters[3].group = 2, "group of parameter \"d\" is 2, expected 0 to 1");
  BAD(r.m.parameters[3].weight_dtype = (fp8core_dtype)-1, "weight_dtype of parameter \"d\"");
  BAD(r.m.parameters[3].gradient_dtype = (fp8core_dtype)7, "gradient_dtype of parameter \"d\" is 7");
  BAD(r.m.parameters[0].part = 1, "part of parameter \"wte\", the first, is 1, expected 0");
  BAD(r.m.parameters[3].part = 3, "part of parameter \"d\" is 3, expected 1 or 2 after the 1 before it");
  BAD(r.m.parameters[7].part = 0, "part of parameter \"h\" is 0");
  r.options.size--;
  rank_refused(communicator, CREATE(), FP8CORE_ERROR_VERSION_MISMATCH, "fp8zero_sharded_options.size is");
  r.options.size++;
  rank_ok(communicator, CREATE());
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
}

static void bad_creations(void **unused) {
  (void)unused;
  run_ranks(1, 0, run_bad_creation, NULL);
  run_ranks(2, 0, run_bad_creation, NULL);
}

// Ranks that were told different things; they say so, and can go on.
static void run_disagreeing(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int rank = fp8comm_communicator_rank(communicator);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  run r = run_of(make_transformer, 1);
  rank_ok(communicator, context_of(&context));
#define DIFFERS(change, text)                                                                                          \
  do {                                                                                                                 \
    const run kept = r;                                                                                                \
    if (rank == 2) {                                                                                                   \
      change;                                                                                                          \
    }                                                                                                                  \
    REFUSED(CREATE(), text);                                                                                           \
    r = kept;                                                                                                          \
  } while (0)
  DIFFERS(r.options.stage = 2, "stage is 2 on rank 2 and 1 on rank 0, expected the same on every rank");
  DIFFERS(r.options.weight_buffers = 3, "weight_buffers is 3 on rank 2");
  DIFFERS(r.m.count--, "parameter_count is 17 on rank 2 and 18 on rank 0");
  DIFFERS(r.m.group[0].eps = 1e-7, "rank 2 has other groups than rank 0");
  DIFFERS(r.options.adamw.seed = 1, "rank 2 has other adamw options than rank 0");
  DIFFERS(r.options.gradient.mu_max = 8, "rank 2 has other gradient options than rank 0");
  DIFFERS(r.m.parameters[4].shape[0] = 25, "rank 2 has another parameter 4 than rank 0 (here it is \"e\")");
  DIFFERS(r.m.parameters[17].name = "r_", "rank 2 has another parameter 17 than rank 0");
  DIFFERS(r.m.parameters[0].weight_dtype = FP8CORE_E4M3, "rank 2 has another parameter 0 than rank 0");
  // What one rank cannot do, the others learn.
  if (rank == 1) {
    r.options.stage = 7;
    REFUSED(CREATE(), "stage is 7");
    r.options.stage = 1;
  } else {
    rank_refused(communicator, CREATE(), FP8CORE_ERROR_PEER,
                 "rank 1 could not create its part of the sharded optimizer");
  }
  rank_ok(communicator, CREATE());
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
}

static void disagreements(void **unused) {
  (void)unused;
  run_ranks(3, 0, run_disagreeing, NULL);
}

// --- Ranks that leave ---

typedef struct leaving {
  int stage;
  // 0: before a reduction; 1: before the step; 2: before the weights are waited for.
  int when;
} leaving;

static void run_leaving(fp8comm_communicator *communicator, void *data) {
  const leaving *l = data;
  const int rank = fp8comm_communicator_rank(communicator);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  run r = run_of(make_transformer, l->stage);
  float *values = calloc(8192, sizeof(*values));
  fp8core_status status = FP8CORE_OK;
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, CREATE());
  for (int step = 0; step < 2 && status == FP8CORE_OK; step++) {
    for (int p = r.m.parts - 1; p >= 0 && status == FP8CORE_OK; p--) {
      if (rank == 1 && step == 1 && l->when == 0 && p == 2) {
        (void)fp8comm_communicator_abort(communicator, "out of electricity");
        break;
      }
      status = fp8zero_sharded_acquire(sharded, p, FP8ZERO_BACKWARD);
      if (status == FP8CORE_OK) {
        void *own[MOST] = {NULL};
        status = write_gradients(&r, sharded, p, rank, step, 0, own, values);
      }
      if (status == FP8CORE_OK) status = fp8zero_sharded_release(sharded, p, FP8ZERO_BACKWARD);
    }
    if (rank == 1 && step == 1 && l->when < 2) {
      if (l->when == 1) (void)fp8comm_communicator_abort(communicator, "out of electricity");
      break;
    }
    if (status == FP8CORE_OK) status = fp8zero_sharded_step(sharded, NULL, NULL);
    if (rank == 1 && step == 1) {
      (void)fp8comm_communicator_abort(communicator, "out of electricity");
      break;
    }
    if (status == FP8CORE_OK && step == 1 && l->when == 2) {
      status = fp8comm_barrier(communicator);
    }
  }
  if (rank != 1) {
    rank_check(communicator, status == FP8CORE_ERROR_PEER, "status %s", fp8core_status_string(status));
    rank_check(communicator,
               strstr(fp8core_last_error(), "rank 1") && strstr(fp8core_last_error(), "out of electricity"),
               "message \"%s\"", fp8core_last_error());
    for (int p = 0; p < r.m.parts; p++) (void)fp8zero_sharded_release(sharded, p, FP8ZERO_BACKWARD);
    if (l->stage == 1 || l->stage == 2)
      rank_check(communicator, fp8zero_sharded_publish(sharded) == FP8CORE_ERROR_PEER, "it goes on: %s",
                 fp8core_last_error());
  }
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  free(values);
}

static void ranks_that_leave(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    for (int when = 0; when < 3; when++) {
      leaving l = {stage, when};
      run_ranks(3, 20, run_leaving, &l);
    }
  }
}

// --- Models that are divided ---

// Two ranks of each of two divisions: the norm is that of the whole model.
static void run_divided(fp8comm_communicator *world, void *data) {
  const int stage = *(const int *)data;
  const int world_rank = fp8comm_communicator_rank(world);
  fp8comm_communicator *communicator = NULL;
  fp8comm_communicator *division = NULL;
  run r = run_of(make_transformer, stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  reference beside;
  char what[256] = "";
  void *own[MOST] = {NULL};
  fp8optim_step_options step_options = fp8optim_step_options_default();
  step_options.max_norm = 1.0f;
  rank_ok(world, fp8comm_communicator_split(world, world_rank % 2, world_rank, &communicator));
  rank_ok(world, fp8comm_communicator_split(world, world_rank / 2, world_rank, &division));
  const int rank = fp8comm_communicator_rank(communicator);
  r.m.division = fp8comm_communicator_rank(division);
  r.m.spoiled_step = 2;
  for (int i = 0; i < r.m.count; i++) r.m.parameters[i].replicated = i % 4 == 1;
  r.options.model_communicator = division;
  rank_ok(world, context_of(&context));
  rank_ok(world, reference_create(&beside, &r.m, communicator, &r.options));
  rank_ok(world, CREATE());
  rank_ok(world, set_masters(&r.m, sharded, beside.adamw));
  rank_ok(world, fp8zero_sharded_publish(sharded));
  for (int step = 0; step < 4; step++) {
    double squares[MOST];
    double sums[4];
    fp8optim_step_report expected;
    fp8optim_step_report found;
    int nonfinite;
    rank_ok(world, pass(&r, sharded, beside.adamw, rank, step, 0, own, what, sizeof(what)));
    rank_check(world, !what[0], "stage %d, step %d: %s", stage, step, what);
    rank_ok(world, fp8zero_sharded_step(sharded, &step_options, &found));
    rank_ok(world, reference_reduce(&beside, &r.m, rank, step, 1, 0));
    rank_ok(world, fp8optim_adamw_step_measure(beside.adamw, beside.means, squares, &nonfinite));
    double sum = 0.0;
    for (int i = 0; i < r.m.count; i++)
      if (!r.m.parameters[i].replicated || r.m.division == 0) sum += squares[i];
    const double told_by_this[2] = {sum, nonfinite};
    rank_ok(world, fp8comm_all_gather(division, told_by_this, sums, 2, FP8COMM_FP64));
    rank_ok(world, fp8optim_adamw_step_begin(beside.adamw, sums[0] + sums[2], sums[1] + sums[3] > 0, &step_options,
                                             &expected));
    rank_ok(world, fp8optim_adamw_step_update(beside.adamw, 0, r.m.count));
    rank_ok(world, fp8optim_adamw_step_end(beside.adamw, NULL));
    rank_check(world, same_report(&found, &expected), "stage %d, step %d: norm %.9g, expected %.9g", stage, step,
               (double)found.gradient_norm, (double)expected.gradient_norm);
    rank_check(world, found.skipped == (step == 2), "stage %d, step %d: skipped %d", stage, step, found.skipped);
    rank_check(world, same_states(&r.m, sharded, beside.adamw, what, sizeof(what)), "stage %d, step %d: %s", stage,
               step, what);
  }
  fp8zero_sharded_destroy(&sharded);
  reference_destroy(&beside);
  fp8core_context_destroy(&context);
  fp8comm_communicator_destroy(&division);
  fp8comm_communicator_destroy(&communicator);
}

static void divided_models(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) run_ranks(4, 0, run_divided, &stage);
}

// --- A rank that cannot take a step ---

static void run_unable(fp8comm_communicator *communicator, void *data) {
  const int stage = *(const int *)data;
  const int rank = fp8comm_communicator_rank(communicator);
  run r = run_of(make_transformer, stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8optim_step_report report;
  char what[256] = "";
  void *own[MOST] = {NULL};
  float *values = calloc(8192, sizeof(*values));
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, CREATE());
  fp8optim_adamw *adamw = fp8zero_sharded_adamw(sharded);
  // Moments of other steps, and rank 1 forgot to count them.
  for (int i = 0; i < r.m.count; i++) {
    if (fp8zero_sharded_local(sharded, i) < 0 || elements_of(&r.m, i) == 0) continue;
    const fp8core_tensor source =
      fp8core_tensor_create(values, FP8CORE_FP32, r.m.parameters[i].dimensions, r.m.parameters[i].shape);
    values[0] = 1.0f;
    rank_ok(communicator,
            fp8optim_adamw_set_state(adamw, fp8zero_sharded_local(sharded, i), FP8OPTIM_EXP_AVG, &source));
  }
  if (rank != 1) rank_ok(communicator, fp8optim_adamw_set_steps(adamw, 7));
  rank_ok(communicator, fp8zero_sharded_publish(sharded));
  rank_ok(communicator, pass(&r, sharded, NULL, rank, 0, 0, own, what, sizeof(what)));
  if (rank == 1)
    REFUSED(fp8zero_sharded_step(sharded, NULL, &report), "moments were set while the step count is 0");
  else
    rank_refused(communicator, fp8zero_sharded_step(sharded, NULL, &report), FP8CORE_ERROR_PEER,
                 "rank 1 could not take the step");
  // What is wrong can be put right; the gradients are still there.
  if (rank == 1) rank_ok(communicator, fp8optim_adamw_set_steps(adamw, 7));
  rank_ok(communicator, fp8zero_sharded_step(sharded, NULL, &report));
  rank_check(communicator, report.steps == 8 && !report.skipped && report.gradient_norm > 0, "the step after");
  rank_ok(communicator, pass(&r, sharded, NULL, rank, 1, 0, own, what, sizeof(what)));
  rank_ok(communicator, fp8zero_sharded_step(sharded, NULL, &report));
  rank_check(communicator, report.steps == 9, "the step after that");
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  free(values);
}

static void unable_to_step(void **unused) {
  (void)unused;
  for (int stage = 1; stage <= 3; stage++) run_ranks(3, 0, run_unable, &stage);
}

// --- Memory and bytes on the wire ---

typedef struct measured {
  int stage;
  int micro_batches;
  fp8zero_memory memory[8];
  fp8zero_traffic traffic[8];
  uint64_t transport[8];
  int owners[MOST];
} measured;

static void run_measured(fp8comm_communicator *communicator, void *data) {
  measured *found = data;
  const int rank = fp8comm_communicator_rank(communicator);
  run r = run_of(make_transformer, found->stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8zero_traffic traffic;
  char what[256] = "";
  void *own[MOST] = {NULL};
  r.options.micro_batches = found->micro_batches;
  r.resident[0] = 1;
  r.options.resident = r.resident;
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, CREATE());
  rank_ok(communicator, fp8zero_sharded_traffic(sharded, &traffic));
  rank_check(communicator, traffic.gradient_bytes + traffic.weight_bytes + traffic.control_bytes == 0,
             "bytes of nothing");
  const uint64_t begin = fp8comm_communicator_bytes_sent(communicator);
  rank_ok(communicator, set_masters(&r.m, sharded, NULL));
  rank_ok(communicator, fp8zero_sharded_publish(sharded));
  // Nothing but weights until now.
  const uint64_t published = fp8comm_communicator_bytes_sent(communicator) - begin;
  rank_ok(communicator, fp8zero_sharded_traffic(sharded, &traffic));
  rank_check(communicator, traffic.weight_bytes == published && traffic.gradient_bytes + traffic.control_bytes == 0,
             "%llu bytes of weights are told, the transport counts %llu", (unsigned long long)traffic.weight_bytes,
             (unsigned long long)published);
  for (int micro = 0; micro < found->micro_batches; micro++)
    rank_ok(communicator, pass(&r, sharded, NULL, rank, 0, micro, own, what, sizeof(what)));
  // Reductions go on meanwhile, and are counted all the same.
  rank_ok(communicator, fp8comm_barrier(communicator));
  rank_ok(communicator, fp8zero_sharded_step(sharded, NULL, NULL));
  rank_ok(communicator, fp8zero_sharded_wait(sharded));
  found->transport[rank] = fp8comm_communicator_bytes_sent(communicator) - begin;
  rank_ok(communicator, fp8zero_sharded_traffic(sharded, &found->traffic[rank]));
  rank_ok(communicator, fp8zero_sharded_memory(sharded, &found->memory[rank]));
  for (int i = 0; i < r.m.count && rank == 0; i++) found->owners[i] = fp8zero_sharded_owner(sharded, i);
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
}

static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// What the classes must be, from the model and the owners alone.
static void assert_memory(const measured *found, int ranks) {
  const run r = run_of(make_transformer, found->stage);
  const int stage = found->stage;
  int64_t weights = 0;
  int64_t gradients = 0;
  int64_t largest_weights = 0;
  int64_t largest_gradients = 0;
  int64_t own_weights[8] = {0};
  int64_t own_elements[8] = {0};
  int64_t own_means[8] = {0};
  int64_t elements = 0;
  uint64_t all_gradients = 0;
  for (int p = 0; p < r.m.parts; p++) {
    int first;
    int count;
    int64_t part_weights = 0;
    int64_t part_gradients = 0;
    part_of(&r.m, p, &first, &count);
    for (int rank = 0; rank < ranks; rank++) {
      int64_t segment = 0;
      int scales = 0;
      for (int i = first; i < first + count; i++) {
        if (found->owners[i] != rank) continue;
        segment += padded(elements_of(&r.m, i) * (int64_t)fp8core_dtype_size(r.m.parameters[i].weight_dtype));
        scales += (int)sizeof(float);
        own_elements[rank] += elements_of(&r.m, i);
        own_means[rank] += padded(elements_of(&r.m, i) * (found->micro_batches > 1 ? 4 : 1));
      }
      segment += padded(scales);
      part_weights += segment;
      if (p > 0) own_weights[rank] += segment;
    }
    for (int i = first; i < first + count; i++) {
      part_gradients += padded(elements_of(&r.m, i) * (int64_t)fp8core_dtype_size(r.m.parameters[i].gradient_dtype));
      elements += elements_of(&r.m, i);
    }
    // Part 0 is resident.
    if (stage < 3 || p == 0) weights += part_weights;
    if (stage < 2 || p == 0) gradients += part_gradients;
    if (p > 0 && part_weights > largest_weights) largest_weights = part_weights;
    if (p > 0 && part_gradients > largest_gradients) largest_gradients = part_gradients;
  }
  for (int rank = 0; rank < ranks; rank++) {
    const fp8zero_memory *m = &found->memory[rank];
    const int64_t states = stage == 0 ? elements : own_elements[rank];
    assert_int_equal(m->weight_bytes, weights + (stage == 3 ? own_weights[rank] : 0));
    assert_int_equal(m->weight_buffer_bytes, stage == 3 ? 2 * largest_weights : 0);
    assert_int_equal(m->gradient_bytes, gradients);
    assert_int_equal(m->gradient_buffer_bytes, stage >= 2 ? 2 * largest_gradients : 0);
    assert_int_equal(m->mean_gradient_bytes, stage >= 2 ? own_means[rank] : 0);
    assert_int_equal(m->master_bytes, 2 * states);
    assert_int_equal(m->exp_avg_bytes, states);
    assert_int_equal(m->exp_avg_sq_bytes, 2 * states);
    assert_int_equal(m->total_bytes, m->weight_bytes + m->weight_buffer_bytes + m->gradient_bytes +
                                       m->gradient_buffer_bytes + m->mean_gradient_bytes + m->master_bytes +
                                       m->exp_avg_bytes + m->exp_avg_sq_bytes + m->communication_bytes +
                                       m->overhead_bytes);
    // All that was sent, and of which kind: an FP8 byte for each element and rank, twice where the mean travels too.
    const fp8zero_traffic *t = &found->traffic[rank];
    assert_int_equal(t->gradient_bytes + t->weight_bytes + t->control_bytes, found->transport[rank]);
    if (ranks == 1) continue;
    all_gradients += t->gradient_bytes;
    const double share = (double)(elements - own_elements[rank]) * found->micro_batches;
    // Beside codes, amaxes and counts of 18 tensors in a few buckets.
    if (stage > 0 &&
        ((double)t->gradient_bytes < share || (double)t->gradient_bytes > share + 20000.0 * found->micro_batches))
      fail_msg("stage %d, rank %d sent %llu bytes of gradients, expected %.0f and some", stage, rank,
               (unsigned long long)t->gradient_bytes, share);
    assert_true(stage == 0 ? t->control_bytes == 0 : t->control_bytes > 0 && t->control_bytes < 2000);
    assert_true(stage == 0 ? t->weight_bytes == 0 : t->weight_bytes > 0 || own_elements[rank] == 0);
  }
  const double twice = 2.0 * (double)elements * (ranks - 1);
  if (stage == 0 && ((double)all_gradients < twice || (double)all_gradients > twice + 20000.0 * ranks))
    fail_msg("%llu bytes of gradients, expected %.0f and some", (unsigned long long)all_gradients, twice);
}

static void memory_and_traffic(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    for (int micro = 1; micro <= (stage >= 2 ? 2 : 1); micro++) {
      for (int n = 0; n < RANK_COUNTS; n++) {
        measured found;
        memset(&found, 0, sizeof(found));
        found.stage = stage;
        found.micro_batches = micro;
        run_ranks(rank_counts[n], 0, run_measured, &found);
        assert_memory(&found, rank_counts[n]);
      }
    }
  }
}

#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33)
#  include <malloc.h>

typedef struct counted {
  int stage;
  int64_t told[4];
  int64_t states[4];
  // Of the process, by its first rank.
  int64_t allocated;
} counted;

static int64_t allocated_bytes(void) {
  const struct mallinfo2 info = mallinfo2();
  return (int64_t)info.uordblks + (int64_t)info.hblkhd;
}

static void run_counted(fp8comm_communicator *communicator, void *data) {
  counted *c = data;
  const int rank = fp8comm_communicator_rank(communicator);
  run r = run_of(make_tiny, c->stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8zero_memory memory;
  r.m.count = 0;
  for (int p = 0; p < 6; p++)
    for (int i = 0; i < 4; i++) add(&r.m, p, 300 + p, 400, FP8CORE_E4M3, FP8CORE_E4M3);
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, fp8comm_barrier(communicator));
  const int64_t before = rank == 0 ? allocated_bytes() : 0;
  rank_ok(communicator, fp8comm_barrier(communicator));
  rank_ok(communicator, CREATE());
  rank_ok(communicator, fp8comm_barrier(communicator));
  if (rank == 0) c->allocated = allocated_bytes() - before;
  rank_ok(communicator, fp8zero_sharded_memory(sharded, &memory));
  rank_ok(communicator, fp8comm_barrier(communicator));
  c->told[rank] = memory.total_bytes;
  c->states[rank] = memory.master_bytes + memory.exp_avg_bytes + memory.exp_avg_sq_bytes;
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
}

// What all ranks tell is what the process has allocated, and the states of all are those of one optimizer.
static void memory_as_allocated(void **unused) {
  (void)unused;
  int64_t one = 0;
  // Under a sanitizer, whose allocator counts nothing, this is the first that calls the C library's, which sets itself
  // up on a first call without a lock and counts the thread of that call as the first of the process: not one that
  // ends.
  (void)allocated_bytes();
  for (int stage = 0; stage <= 3; stage++) {
    counted c;
    memset(&c, 0, sizeof(c));
    c.stage = stage;
    run_ranks(4, 0, run_counted, &c);
    int64_t told = 0;
    int64_t states = 0;
    for (int rank = 0; rank < 4; rank++) {
      told += c.told[rank];
      states += c.states[rank];
      if (stage > 0) assert_in_range(c.states[rank] * 100, one * 24, one * 26);
    }
    if (stage == 0) one = states / 4;
    assert_int_equal(states, stage == 0 ? 4 * one : one);
    print_message("stage %d: %.2f MB told, %.2f MB allocated by 4 ranks of %.2f million parameters\n", stage,
                  1e-6 * (double)told, 1e-6 * (double)c.allocated, 1e-6 * (double)one / 5);
    // Nothing is counted of a sanitizer's allocator. Five large blocks a rank are aligned to 2 MiB.
    if (c.allocated == 0) continue;
    if ((double)told > 1.01 * (double)c.allocated || (double)c.allocated > 1.05 * (double)told + 4 * 5 * 2.1e6)
      fail_msg("stage %d: %lld bytes are told, %lld are allocated", stage, (long long)told, (long long)c.allocated);
  }
}
#else
static void memory_as_allocated(void **unused) {
  (void)unused;
  skip();
}
#endif

// --- Checkpoints ---

typedef struct saved_part {
  unsigned char *data;
  float scale;
  float amax;
} saved_part;

typedef struct checkpoint {
  int stage;
  // In which steps this group trains; what it finds, and leaves, as a trainer's files would.
  int first_step;
  int end_step;
  int64_t steps;
  saved_part parts[MOST][4];
  unsigned char reducer[4096];
  size_t reducer_bytes;
} checkpoint;

static void run_checkpoint(fp8comm_communicator *communicator, void *data) {
  checkpoint *c = data;
  const int rank = fp8comm_communicator_rank(communicator);
  run r = run_of(make_transformer, c->stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  char what[256] = "";
  void *own[MOST] = {NULL};
  r.alike = 1;
  r.resident[0] = r.tied = 1;
  r.options.resident = r.resident;
  r.options.adamw.stochastic_rounding = 1;
  rank_ok(communicator, context_of(&context));
  rank_ok(communicator, CREATE());
  fp8optim_adamw *adamw = fp8zero_sharded_adamw(sharded);
  fp8comm_gradient_reducer *reducer = fp8zero_sharded_reducer(sharded);
  if (c->first_step == 0) {
    rank_ok(communicator, set_masters(&r.m, sharded, NULL));
  } else {
    for (int i = 0; i < r.m.count; i++) {
      const int64_t local = fp8zero_sharded_local(sharded, i);
      for (int state = 0; state < 4 && local >= 0; state++) {
        const saved_part *part = &c->parts[i][state];
        rank_ok(communicator,
                fp8optim_adamw_set_stored(adamw, local, (fp8optim_state)state, part->data, part->scale, part->amax));
      }
    }
    rank_ok(communicator, fp8optim_adamw_set_steps(adamw, c->steps));
    rank_ok(communicator, fp8comm_gradient_load(reducer, c->reducer, c->reducer_bytes));
  }
  rank_ok(communicator, fp8zero_sharded_publish(sharded));
  for (int step = c->first_step; step < c->end_step; step++) {
    rank_ok(communicator, pass(&r, sharded, NULL, rank, step, 0, own, what, sizeof(what)));
    rank_ok(communicator, fp8zero_sharded_step(sharded, NULL, NULL));
  }
  rank_ok(communicator, fp8zero_sharded_wait(sharded));
  rank_ok(communicator, fp8comm_barrier(communicator));
  // Owners write what is theirs.
  for (int i = 0; i < r.m.count; i++) {
    const int64_t local = fp8zero_sharded_local(sharded, i);
    for (int state = 0; state < 4 && fp8zero_sharded_owner(sharded, i) == rank; state++) {
      saved_part *part = &c->parts[i][state];
      fp8core_tensor tensor;
      rank_ok(communicator, fp8optim_adamw_state(adamw, local, (fp8optim_state)state, &tensor));
      rank_ok(communicator, fp8optim_adamw_get_stored(adamw, local, (fp8optim_state)state, &part->scale, &part->amax));
      if (tensor.data) memcpy(part->data, tensor.data, (size_t)fp8core_tensor_span_bytes(&tensor));
    }
  }
  if (rank == 0) {
    c->steps = fp8optim_adamw_steps(adamw);
    c->reducer_bytes = fp8comm_gradient_saved_bytes(reducer);
    rank_check(communicator, c->reducer_bytes <= sizeof(c->reducer), "room for the factors");
    rank_ok(communicator, fp8comm_gradient_save(reducer, c->reducer, c->reducer_bytes));
  }
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
}

static void make_checkpoint(checkpoint *c, int stage) {
  const run r = run_of(make_transformer, stage);
  memset(c, 0, sizeof(*c));
  c->stage = stage;
  for (int i = 0; i < r.m.count; i++)
    for (int state = 0; state < 4; state++)
      c->parts[i][state].data = calloc((size_t)elements_of(&r.m, i) + 1, sizeof(float));
}

// Steps 0 to 5 by one group, and by others of other sizes and stages that take over from each other.
static void resharding(void **unused) {
  (void)unused;
  static const struct {
    int ranks;
    int stage;
  } legs[] = {{2, 1}, {4, 3}, {1, 0}, {8, 2}, {4, 1}, {2, 3}};
  checkpoint whole;
  checkpoint parts;
  make_checkpoint(&whole, 0);
  make_checkpoint(&parts, 0);
  whole.end_step = 6;
  run_ranks(2, 0, run_checkpoint, &whole);
  for (int leg = 0; leg < 6; leg++) {
    parts.stage = legs[leg].stage;
    parts.first_step = leg;
    parts.end_step = leg + 1;
    run_ranks(legs[leg].ranks, 0, run_checkpoint, &parts);
  }
  assert_int_equal(whole.steps, 6);
  assert_int_equal(parts.steps, 6);
  assert_int_equal(whole.reducer_bytes, parts.reducer_bytes);
  assert_memory_equal(whole.reducer, parts.reducer, whole.reducer_bytes);
  const run r = run_of(make_transformer, 0);
  for (int i = 0; i < r.m.count; i++) {
    for (int state = 0; state < 4; state++) {
      const saved_part *one = &whole.parts[i][state];
      const saved_part *other = &parts.parts[i][state];
      assert_true(one->scale == other->scale && one->amax == other->amax);
      assert_memory_equal(one->data, other->data, ((size_t)elements_of(&r.m, i) + 1) * sizeof(float));
      free(one->data);
      free(other->data);
    }
  }
}

// --- As one process of several ---

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Steps until one fails, which it does when a rank is killed.
static fp8core_status endless(fp8comm_communicator *communicator, int stage) {
  const int rank = fp8comm_communicator_rank(communicator);
  run r = run_of(make_transformer, stage);
  fp8core_context *context = NULL;
  fp8zero_sharded *sharded = NULL;
  char what[256] = "";
  void *own[MOST] = {NULL};
  fp8core_status status = context_of(&context);
  if (status == FP8CORE_OK) status = CREATE();
  for (int step = 0; status == FP8CORE_OK; step++) {
    status = pass(&r, sharded, NULL, rank, step % 8, 0, own, what, sizeof(what));
    if (status == FP8CORE_OK) status = fp8zero_sharded_step(sharded, NULL, NULL);
    if (status == FP8CORE_OK && step == 2) {
      (void)printf("going %d\n", rank);
      (void)fflush(stdout);
    }
  }
  char message[512];
  (void)snprintf(message, sizeof(message), "%s", fp8core_last_error());
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  return fp8core_set_last_error(status, "%s", message);
}

// TIMEOUT sharded: every stage beside the reference. TIMEOUT endless STAGE. What it prints, and how it exits, is told
// in tests/multirank/rank.c.
static int as_process(int count, char **arguments) {
  fp8comm_communicator_options options = fp8comm_communicator_options_default();
  fp8comm_communicator *communicator = NULL;
  options.timeout_seconds = strtod(arguments[1], NULL);
  const double started = now();
  fp8core_status status = fp8comm_communicator_create_from_environment(&communicator, &options);
  const int rank = fp8comm_communicator_rank(communicator);
  const int size = fp8comm_communicator_size(communicator);
  if (status == FP8CORE_OK && count > 3) status = endless(communicator, (int)strtol(arguments[3], NULL, 10));
  for (int stage = 0; stage <= 3 && status == FP8CORE_OK && count == 3; stage++) {
    run r = run_of(make_transformer, stage);
    r.resident[0] = r.tied = 1;
    run_beside_reference(communicator, &r);
    // At the first failure the rank has aborted.
    status = fp8comm_barrier(communicator);
  }
  if (status == FP8CORE_OK)
    (void)printf("ok rank %d of %d\n", rank, size);
  else
    (void)printf("error %d %.3f %s\n", (int)status, now() - started, fp8core_last_error());
  fp8comm_communicator_destroy(&communicator);
  return status == FP8CORE_OK ? 0 : 3;
}

int main(int count, char **arguments) {
  if (count > 2) return as_process(count, arguments);
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_stage_is_the_reference),
    cmocka_unit_test(buffers_and_places),
    cmocka_unit_test(options_of_all_kinds),
    cmocka_unit_test(micro_batches),
    cmocka_unit_test(dropped_steps),
    cmocka_unit_test(as_one_rank),
    cmocka_unit_test(not_finite),
    cmocka_unit_test(refused_calls),
    cmocka_unit_test(bad_creations),
    cmocka_unit_test(disagreements),
    cmocka_unit_test(ranks_that_leave),
    cmocka_unit_test(divided_models),
    cmocka_unit_test(unable_to_step),
    cmocka_unit_test(memory_and_traffic),
    cmocka_unit_test(memory_as_allocated),
    cmocka_unit_test(resharding),
  };
  return cmocka_run_group_tests_name("sharded", tests, NULL, NULL);
}
