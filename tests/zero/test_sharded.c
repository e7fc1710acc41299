// The sharded optimizer step beside what it is made of: every stage, at 1 to 8 ranks, has the bits of an all-reduce and
// an optimizer of all tensors on each rank.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
  test_random random = {(uint64_t)(((index * 64 + rank) * 64 + step) * 64 + micro)};
  const int64_t elements = elements_of(m, index);
  for (int64_t i = 0; i < elements; i++) values[i] = (float)(test_random_normal(&random) * (1 + index % 3));
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
  int elsewhere;
  int alike;
  // Without what only the reference can tell.
  int alone;
  float max_norm;
  // Where rank 0 puts the masters in the end.
  float *masters[MOST];
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
  for (int stage = 0; stage <= 1; stage++) {
    run r = run_of(make_transformer, stage);
    r.elsewhere = 1;
    run_ranks(3, 0, run_beside_reference, &r);
  }
}

static void options_of_all_kinds(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    for (int kind = 0; kind < 4; kind++) {
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

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_stage_is_the_reference),
    cmocka_unit_test(buffers_and_places),
    cmocka_unit_test(options_of_all_kinds),
    cmocka_unit_test(micro_batches),
  };
  return cmocka_run_group_tests_name("sharded", tests, NULL, NULL);
}
