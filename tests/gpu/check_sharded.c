// The sharded optimizer on CUDA against the one on the CPU: weights, scales, states, means' scales and counts are the
// same bits, in every stage, whatever formats, buffers and path; norms are within their bound, and where gradients are
// clipped all stages are alike. Ranks are threads, on as many GPUs as there are; in check_sharded_emulated CUDA and
// NCCL are played, and, where device memory is not guarded, the transport takes it ("threads").
#include "../comm/ranks.h"
#include "devices.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8zero/sharded.h"
#if defined(FP8_TEST_EMULATED)
#  include "aware.h"
#endif

#define MOST_RANKS 4
#define MOST_TENSORS 16
#define MOST_ELEMENTS 4096
// Of fp8optim/adamw.h.
#define NORM_BOUND 0x1p-15
#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static fp8core_context *contexts[MOST_RANKS];
static int devices;
// Staged; NCCL, unless it is missing; the transport's own, in emulations.
static const char *paths[3] = {"staged"};
static size_t path_count = 1;

static int is(const char *path, const char *name) { return strcmp(path, name) == 0; }

static fp8core_status use_device(fp8comm_communicator *communicator, fp8core_context *context, const char *path) {
  fp8comm_device_options options = fp8comm_device_options_default();
  options.path = path;
#if defined(FP8_TEST_EMULATED)
  if (is(path, "threads")) aware_make(communicator);
#endif
  return fp8comm_communicator_use_device(communicator, context, &options);
}

// --- Models ---

typedef struct model {
  int count;
  int parts;
  fp8zero_parameter parameters[MOST_TENSORS];
} model;

static const char *const names[MOST_TENSORS] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                                "i", "j", "k", "l", "m", "n", "o", "p"};

static void add(model *m, int part, int64_t rows, int64_t columns, fp8core_dtype weight, fp8core_dtype gradient) {
  fp8zero_parameter *parameter = &m->parameters[m->count];
  *parameter = fp8zero_parameter_create(names[m->count], rows, columns, part);
  parameter->group = m->count % 2;
  parameter->weight_dtype = weight;
  parameter->gradient_dtype = gradient;
  m->count++;
  m->parts = part + 1;
}

// A tied embedding, blocks of odd sizes and all formats, a norm.
static void make_transformer(model *m) {
  memset(m, 0, sizeof(*m));
  add(m, 0, 97, 24, FP8CORE_BF16, FP8CORE_FP32);
  add(m, 0, 16, 24, FP8CORE_BF16, FP8CORE_BF16);
  for (int block = 1; block <= 2; block++) {
    add(m, block, 72, 24, FP8CORE_E4M3, FP8CORE_E4M3);
    add(m, block, 1, 71, FP8CORE_FP32, FP8CORE_FP32);
    add(m, block, 24, 24 + block, FP8CORE_E4M3, FP8CORE_FP32);
    add(m, block, 1, block == 2 ? 0 : 1, FP8CORE_FP16, FP8CORE_FP16);
    add(m, block, 95, 23, FP8CORE_E5M2, FP8CORE_E5M2);
  }
  add(m, 3, 1, 24, FP8CORE_FP32, FP8CORE_FP32);
}

// Fewer tensors than ranks, and parts without an element.
static void make_tiny(model *m) {
  memset(m, 0, sizeof(*m));
  add(m, 0, 1, 0, FP8CORE_E4M3, FP8CORE_FP32);
  add(m, 1, 3, 5, FP8CORE_E4M3, FP8CORE_FP32);
  add(m, 1, 1, 1, FP8CORE_BF16, FP8CORE_BF16);
  add(m, 2, 1, 0, FP8CORE_FP16, FP8CORE_E4M3);
}

static int64_t elements_of(const model *m, int index) {
  return m->parameters[index].shape[0] * m->parameters[index].shape[1];
}

// --- A run ---

typedef struct run {
  model m;
  const char *path;
  fp8zero_sharded_options options;
  int resident[MOST_TENSORS];
  int steps;
  // In this step a rank has a NaN; below 0: never.
  int spoiled_step;
  // Part 0 is held around all others.
  int tied;
  // Every second rank has the other half of a model.
  int divided;
  // Gradients lie in memory of the model's own, with gaps between rows where nothing takes their place.
  int elsewhere;
  float max_norm;
  // Where owners put the values of masters in the end, of the CPU and of CUDA; NULL: nobody wants them.
  float *masters[2][MOST_TENSORS];
} run;

// The two of a rank, and memory of its model's own for gradients.
typedef struct pair {
  const run *r;
  // Of all ranks; and within those that have the same tensors.
  int number;
  int rank;
  int size;
  // Where the model is divided: ranks of the same half, and those of the same data. Else NULL.
  fp8comm_communicator *data;
  fp8comm_communicator *model;
  fp8core_context *contexts[2];
  fp8zero_sharded *sharded[2];
  void *own[2][MOST_TENSORS];
  // Of gradients in FP8, on the host and on the device.
  float scale_inverse;
  float *device_scale_inverse;
  float *values;
  unsigned char *bytes[2];
} pair;

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

#define DIFFERS(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

// Whether bytes of the host and of the device are the same.
static fp8core_status compare(const pair *p, const void *host, const void *device, size_t bytes, const char *what,
                              int index) {
  if (bytes == 0) return FP8CORE_OK;
  TRY(fp8core_copy(p->contexts[1], p->bytes[1], device, bytes));
  if (memcmp(host, p->bytes[1], bytes) == 0) return FP8CORE_OK;
  return DIFFERS("%s of tensor %d is not the CPU's", what, index);
}

static fp8core_status compare_weight(const pair *p, int index) {
  fp8core_tensor on_cpu;
  fp8core_tensor on_cuda;
  TRY(fp8zero_sharded_weight(p->sharded[0], index, &on_cpu));
  TRY(fp8zero_sharded_weight(p->sharded[1], index, &on_cuda));
  const fp8core_device device = fp8core_context_device(p->contexts[1]);
  if (on_cuda.device.type != device.type || on_cuda.device.index != device.index)
    return DIFFERS("the weight of tensor %d is on device %d:%d", index, (int)on_cuda.device.type, on_cuda.device.index);
  TRY(compare(p, on_cpu.scale_inverse, on_cuda.scale_inverse, sizeof(float), "scale_inverse of the weight", index));
  return compare(p, on_cpu.data, on_cuda.data, (size_t)elements_of(&p->r->m, index) * fp8core_dtype_size(on_cpu.dtype),
                 "the weight", index);
}

static fp8core_status compare_weights(const pair *p, int part) {
  int64_t first;
  int64_t count;
  TRY(fp8zero_sharded_part(p->sharded[1], part, &first, &count));
  for (int64_t i = first; i < first + count; i++) TRY(compare_weight(p, (int)i));
  return FP8CORE_OK;
}

static fp8core_status compare_states(const pair *p) {
  const fp8optim_adamw *adamw[2] = {fp8zero_sharded_adamw(p->sharded[0]), fp8zero_sharded_adamw(p->sharded[1])};
  for (int i = 0; i < p->r->m.count; i++) {
    const int64_t local = fp8zero_sharded_local(p->sharded[0], i);
    if (fp8zero_sharded_local(p->sharded[1], i) != local) return DIFFERS("tensor %d is another rank's", i);
    for (int state = FP8OPTIM_MASTER; local >= 0 && state <= FP8OPTIM_WEIGHT; state++) {
      fp8core_tensor tensors[2];
      float stored[2][2];
      for (int side = 0; side < 2; side++) {
        TRY(fp8optim_adamw_state(adamw[side], local, (fp8optim_state)state, &tensors[side]));
        TRY(fp8optim_adamw_get_stored(adamw[side], local, (fp8optim_state)state, &stored[side][0], &stored[side][1]));
      }
      if (memcmp(stored[0], stored[1], sizeof(stored[0])) != 0)
        return DIFFERS("scale and amax of %s of tensor %d are %g and %g, on the CPU %g and %g",
                       fp8optim_state_name((fp8optim_state)state), i, (double)stored[1][0], (double)stored[1][1],
                       (double)stored[0][0], (double)stored[0][1]);
      TRY(compare(p, tensors[0].data, tensors[1].data,
                  (size_t)elements_of(&p->r->m, i) * fp8core_dtype_size(tensors[0].dtype),
                  fp8optim_state_name((fp8optim_state)state), i));
    }
  }
  return FP8CORE_OK;
}

static fp8core_status compare_reducers(const pair *p) {
  const fp8comm_gradient_reducer *reducers[2] = {fp8zero_sharded_reducer(p->sharded[0]),
                                                 fp8zero_sharded_reducer(p->sharded[1])};
  fp8comm_gradient_result results[2];
  const size_t bytes = fp8comm_gradient_saved_bytes(reducers[0]);
  for (int side = 0; side < 2; side++) {
    TRY(fp8comm_gradient_save(reducers[side], p->bytes[side], bytes));
    TRY(fp8zero_sharded_reduction(p->sharded[side], &results[side]));
  }
  if (memcmp(p->bytes[0], p->bytes[1], bytes) != 0) return DIFFERS("the reducers' states differ");
  if (results[0].nonfinite_tensors != results[1].nonfinite_tensors ||
      results[0].nonfinite_rank != results[1].nonfinite_rank)
    return DIFFERS("%lld tensors of rank %d are not finite, on the CPU %lld of %d",
                   (long long)results[1].nonfinite_tensors, results[1].nonfinite_rank,
                   (long long)results[0].nonfinite_tensors, results[0].nonfinite_rank);
  return FP8CORE_OK;
}

static fp8core_status compare_reports(const fp8optim_step_report *on_cpu, const fp8optim_step_report *on_cuda) {
  if (on_cpu->skipped != on_cuda->skipped || on_cpu->steps != on_cuda->steps ||
      on_cpu->skipped_steps != on_cuda->skipped_steps)
    return DIFFERS("skipped is %d after %lld steps and %lld skipped, on the CPU %d after %lld and %lld",
                   on_cuda->skipped, (long long)on_cuda->steps, (long long)on_cuda->skipped_steps, on_cpu->skipped,
                   (long long)on_cpu->steps, (long long)on_cpu->skipped_steps);
  const double expected = (double)on_cpu->gradient_norm;
  const double found = (double)on_cuda->gradient_norm;
  if (!on_cpu->skipped && !(fabs(found - expected) <= NORM_BOUND * expected))
    return DIFFERS("the norm is %.9g, on the CPU %.9g", found, expected);
  return FP8CORE_OK;
}

// Puts what a model on this rank computed where a gradient is to be, in both memories, and describes both.
static fp8core_status write_gradient(pair *p, int index, int step, int micro, fp8core_tensor described[2]) {
  const run *r = p->r;
  const fp8zero_parameter *parameter = &r->m.parameters[index];
  const size_t size = fp8core_dtype_size(parameter->gradient_dtype);
  const int64_t elements = elements_of(&r->m, index);
  const int64_t columns = parameter->shape[1];
  // Rows of the model's own memory are apart where the reduction leaves them alone.
  const int64_t stride = r->elsewhere && r->options.gradient_memory && columns > 0 ? columns + 3 : columns;
  test_random random = {(uint64_t)(((index * 8 + p->number) * 16 + step) * 4 + micro + 1)};
  memset(p->bytes[0], 0, (size_t)(parameter->shape[0] * stride) * size);
  for (int64_t i = 0; i < elements; i++) {
    double value = test_random_normal(&random) * (1 + index % 3);
    if (step == r->spoiled_step && p->number == r->options.stage % p->size && index == 1 && i == 0) value = NAN;
    const float scale = size == 1 ? 1 / p->scale_inverse : 1;
    const uint32_t code = fp8core_encode(parameter->gradient_dtype, (float)value * scale, 1);
    memcpy(p->bytes[0] + (size_t)(i / columns * stride + i % columns) * size, &code, size);
  }
  for (int side = 0; side < 2; side++) {
    void *data = p->own[side][index];
    if (!r->elsewhere) TRY(fp8zero_sharded_gradient(p->sharded[side], index, &data));
    if (elements > 0)
      TRY(fp8core_copy(p->contexts[side], data, p->bytes[0], (size_t)(parameter->shape[0] * stride) * size));
    described[side] = fp8core_tensor_matrix(elements > 0 ? data : NULL, parameter->gradient_dtype, parameter->shape[0],
                                            columns, fp8core_context_device(p->contexts[side]));
    if (elements > 0) described[side].row_stride = stride;
    if (size == 1) described[side].scale_inverse = side ? p->device_scale_inverse : &p->scale_inverse;
  }
  return FP8CORE_OK;
}

static fp8core_status reduce(pair *p, int part, int step, int micro) {
  fp8core_tensor gradients[2][MOST_TENSORS];
  int64_t first;
  int64_t count;
  TRY(fp8zero_sharded_part(p->sharded[0], part, &first, &count));
  for (int64_t i = 0; i < count; i++) {
    fp8core_tensor both[2];
    TRY(write_gradient(p, (int)(first + i), step, micro, both));
    gradients[0][i] = both[0];
    gradients[1][i] = both[1];
  }
  for (int side = 0; side < 2; side++) TRY(fp8zero_sharded_reduce(p->sharded[side], part, gradients[side]));
  return FP8CORE_OK;
}

static fp8core_status acquire(const pair *p, int part, fp8zero_direction direction) {
  for (int side = 0; side < 2; side++) TRY(fp8zero_sharded_acquire(p->sharded[side], part, direction));
  return FP8CORE_OK;
}

static fp8core_status release(const pair *p, int part, fp8zero_direction direction) {
  for (int side = 0; side < 2; side++) {
    TRY(fp8zero_sharded_release(p->sharded[side], part, direction));
    TRY(fp8zero_sharded_progress(p->sharded[side]));
  }
  return FP8CORE_OK;
}

// A forward and a backward pass. Weights are compared where nothing was clipped.
static fp8core_status pass(pair *p, int step, int micro) {
  const run *r = p->r;
  const int same = r->max_norm == 0;
  if (r->tied) TRY(acquire(p, 0, FP8ZERO_FORWARD));
  for (int part = r->tied; part < r->m.parts; part++) {
    TRY(acquire(p, part, FP8ZERO_FORWARD));
    if (same) TRY(compare_weights(p, part));
    TRY(release(p, part, FP8ZERO_FORWARD));
  }
  for (int part = r->m.parts - 1; part >= 0; part--) {
    TRY(acquire(p, part, FP8ZERO_BACKWARD));
    if (same) TRY(compare_weights(p, part));
    TRY(reduce(p, part, step, micro));
    TRY(release(p, part, FP8ZERO_BACKWARD));
  }
  return r->tied ? release(p, 0, FP8ZERO_FORWARD) : FP8CORE_OK;
}

static fp8core_status take_step(pair *p, int step) {
  const run *r = p->r;
  fp8optim_step_options options = fp8optim_step_options_default();
  fp8optim_step_report reports[2];
  options.max_norm = r->max_norm;
  options.loss_scale = 2;
  for (int micro = 0; micro < r->options.micro_batches; micro++) TRY(pass(p, step, micro));
  for (int side = 0; side < 2; side++) TRY(fp8zero_sharded_step(p->sharded[side], &options, &reports[side]));
  if (reports[1].skipped != (step == r->spoiled_step)) return DIFFERS("skipped is %d", reports[1].skipped);
  // Once states differ, so do gradients' scales, but not these gradients, which depend on no weight.
  TRY(compare_reports(&reports[0], &reports[1]));
  TRY(compare_reducers(p));
  return r->max_norm == 0 ? compare_states(p) : FP8CORE_OK;
}

static fp8core_status set_masters(const pair *p) {
  const model *m = &p->r->m;
  void *device;
  TRY(fp8core_alloc(p->contexts[1], MOST_ELEMENTS * sizeof(float), &device));
  for (int i = 0; i < m->count; i++) {
    test_random random = {(uint64_t)(1000 + i)};
    const int64_t elements = elements_of(m, i);
    for (int64_t j = 0; j < elements; j++) p->values[j] = (float)(0.05 * test_random_normal(&random));
    if (elements > 0) TRY(fp8core_copy(p->contexts[1], device, p->values, (size_t)elements * sizeof(float)));
    for (int side = 0; side < 2; side++) {
      const fp8core_tensor source =
        fp8core_tensor_matrix(side ? device : p->values, FP8CORE_FP32, m->parameters[i].shape[0],
                              m->parameters[i].shape[1], fp8core_context_device(p->contexts[side]));
      TRY(fp8zero_sharded_set_master(p->sharded[side], i, &source));
    }
  }
  for (int side = 0; side < 2; side++) TRY(fp8zero_sharded_publish(p->sharded[side]));
  return fp8core_free(p->contexts[1], device);
}

static fp8core_status keep_masters(const pair *p) {
  for (int side = 0; side < 2; side++) {
    const fp8optim_adamw *adamw = fp8zero_sharded_adamw(p->sharded[side]);
    for (int i = 0; i < p->r->m.count; i++) {
      const int64_t local = fp8zero_sharded_local(p->sharded[side], i);
      float *values = p->r->masters[side][i];
      fp8core_tensor master;
      float scale;
      float amax;
      if (!values || fp8zero_sharded_owner(p->sharded[side], i) != p->rank || elements_of(&p->r->m, i) == 0) continue;
      TRY(fp8optim_adamw_state(adamw, local, FP8OPTIM_MASTER, &master));
      TRY(fp8optim_adamw_get_stored(adamw, local, FP8OPTIM_MASTER, &scale, &amax));
      const size_t size = fp8core_dtype_size(master.dtype);
      TRY(fp8core_copy(p->contexts[side], p->bytes[0], master.data, (size_t)elements_of(&p->r->m, i) * size));
      for (int64_t j = 0; j < elements_of(&p->r->m, i); j++) {
        uint32_t code = 0;
        memcpy(&code, p->bytes[0] + (size_t)j * size, size);
        values[j] = fp8core_decode(master.dtype, code) / scale;
      }
    }
  }
  return FP8CORE_OK;
}

static fp8core_status make_pair(pair *p, const run *r, fp8comm_communicator *communicator) {
  const fp8optim_group groups[2] = {fp8optim_group_default(), {3e-3, 0.9, 0.95, 1e-8, 0.0}};
  fp8core_context_options cpu = fp8core_context_options_default();
  fp8zero_sharded_options options = r->options;
  void *memory;
  memset(p, 0, sizeof(*p));
  p->r = r;
  p->number = fp8comm_communicator_rank(communicator);
  p->contexts[1] = contexts[p->number];
  p->scale_inverse = 0.25f;
  p->values = calloc(MOST_ELEMENTS, sizeof(*p->values));
  for (int side = 0; side < 2; side++) p->bytes[side] = calloc(2 * MOST_ELEMENTS, sizeof(float));
  cpu.threads = 1;
  TRY(fp8core_context_create(&p->contexts[0], &cpu));
  TRY(use_device(communicator, p->contexts[1], r->path));
  if (r->divided) {
    TRY(fp8comm_communicator_split(communicator, p->number % 2, 0, &p->data));
    TRY(fp8comm_communicator_split(communicator, p->number / 2, 0, &p->model));
    options.model_communicator = p->model;
    communicator = p->data;
  }
  p->rank = fp8comm_communicator_rank(communicator);
  p->size = fp8comm_communicator_size(communicator);
  TRY(fp8core_alloc(p->contexts[1], sizeof(float), &memory));
  p->device_scale_inverse = memory;
  TRY(fp8core_copy(p->contexts[1], memory, &p->scale_inverse, sizeof(float)));
  for (int side = 0; side < 2; side++) {
    for (int i = 0; i < r->m.count; i++)
      TRY(fp8core_alloc(p->contexts[side], 2 * MOST_ELEMENTS * sizeof(float), &p->own[side][i]));
    options.resident = r->resident;
    TRY(fp8zero_sharded_create(&p->sharded[side], communicator, p->contexts[side], &options, r->m.count,
                               r->m.parameters, 2, groups));
  }
  return set_masters(p);
}

static void free_pair(pair *p) {
  for (int side = 0; side < 2; side++) {
    fp8zero_sharded_destroy(&p->sharded[side]);
    for (int i = 0; i < p->r->m.count; i++)
      if (p->contexts[side]) (void)fp8core_free(p->contexts[side], p->own[side][i]);
    free(p->bytes[side]);
  }
  (void)fp8core_free(p->contexts[1], p->device_scale_inverse);
  fp8comm_communicator_destroy(&p->data);
  fp8comm_communicator_destroy(&p->model);
  fp8core_context_destroy(&p->contexts[0]);
  free(p->values);
}

static fp8core_status run_pair(pair *p, const run *r, fp8comm_communicator *communicator) {
  TRY(make_pair(p, r, communicator));
  for (int step = 0; step < r->steps; step++) TRY(take_step(p, step));
  for (int side = 0; side < 2; side++) TRY(fp8zero_sharded_wait(p->sharded[side]));
  for (int part = 0; part < r->m.parts && r->options.stage < 3 && r->max_norm == 0; part++)
    TRY(compare_weights(p, part));
  return keep_masters(p);
}

static void run_beside_the_cpu(fp8comm_communicator *communicator, void *data) {
  const run *r = data;
  pair p;
  const fp8core_status status = run_pair(&p, r, communicator);
  if (status != FP8CORE_OK)
    rank_fails(communicator, __FILE__, __LINE__, "%s, stage %d, algorithm %d, %d micro-batches: %s", r->path,
               r->options.stage, (int)r->options.gradient.algorithm, r->options.micro_batches, fp8core_last_error());
  free_pair(&p);
}

static run run_of(void (*make)(model *), int stage) {
  run r;
  memset(&r, 0, sizeof(r));
  make(&r.m);
  r.path = paths[0];
  r.options = fp8zero_sharded_options_default();
  r.options.stage = stage;
  // Several buckets a part.
  r.options.gradient.bucket_bytes = 2500;
  r.steps = 2;
  r.spoiled_step = -1;
  return r;
}

// The run on every path, with so many ranks.
static void run_on(int ranks, run *r) {
  for (size_t path = 0; path < path_count; path++) {
    if (path > 0 && ranks == 1) continue;
    if (is(paths[path], "nccl") && ranks > devices) continue;
    r->path = paths[path];
    run_ranks(ranks, 0, run_beside_the_cpu, r);
  }
}

static void every_stage(void **unused) {
  (void)unused;
  for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
    for (int stage = 0; stage <= 3; stage++) {
      run r = run_of(make_transformer, stage);
      r.steps = 3;
      r.spoiled_step = 1;
      r.resident[0] = r.tied = ranks % 2;
      run_on(ranks, &r);
      r = run_of(make_tiny, stage);
      run_on(ranks, &r);
    }
  }
}

static void micro_batches_and_places(void **unused) {
  (void)unused;
  for (int stage = 2; stage <= 3; stage++) {
    for (int micro = 2; micro <= 3; micro++) {
      run r = run_of(make_transformer, stage);
      r.options.micro_batches = micro;
      r.options.weight_buffers = micro - 1;
      r.options.gradient_buffers = 4 - micro;
      r.elsewhere = micro == 3;
      run_on(1 + stage, &r);
    }
    run tiny = run_of(make_tiny, stage);
    tiny.options.micro_batches = 2;
    run_on(3, &tiny);
  }
  for (int stage = 0; stage <= 3; stage++) {
    run r = run_of(make_transformer, stage);
    r.elsewhere = 1;
    run_on(2, &r);
    // The model's own memory, and no other.
    r.options.gradient_memory = 0;
    r.options.micro_batches = stage >= 2 ? 2 : 1;
    run_on(2, &r);
  }
}

static void formats(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    for (int kind = 0; kind < 6; kind++) {
      run r = run_of(make_transformer, stage);
      r.options.adamw = fp8optim_adamw_options_of(kind == 1 ? FP8OPTIM_PRESET_FP32 : FP8OPTIM_PRESET_FP8_BF16_MASTER);
      r.options.adamw.stochastic_rounding = kind == 0;
      r.options.gradient.buckets_in_flight = 1 + kind;
      if (kind == 0) r.options.gradient.wire_dtype = FP8CORE_E5M2;
      if (kind == 1) r.options.gradient.algorithm = FP8COMM_BASELINE_FP32;
      if (kind == 2) r.options.gradient.algorithm = FP8COMM_BASELINE_BF16;
      if (kind == 3) r.options.gradient.algorithm = FP8COMM_NATIVE;
      if (kind == 4) r.options.gradient.delayed_scaling = 1;
      if (kind == 5) r.options.gradient.error_feedback = 1;
      run_on(2, &r);
    }
  }
}

// A NaN in one half skips the step of both, and norms are those of the whole model.
static void divided_models(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    run r = run_of(make_transformer, stage);
    r.divided = 1;
    r.steps = 3;
    r.spoiled_step = 1;
    run_on(4, &r);
  }
}

// --- Clipping ---

// Norms differ from the CPU's within a bound, and masters with them; but not from stage to stage.
static void clipped(void **unused) {
  (void)unused;
  for (size_t path = 0; path < path_count; path++) {
    run runs[4];
    const int ranks = is(paths[path], "nccl") && devices < 3 ? devices : 3;
    for (int stage = 0; stage <= 3; stage++) {
      run *r = &runs[stage];
      *r = run_of(make_transformer, stage);
      r->path = paths[path];
      r->max_norm = 0.5f;
      for (int side = 0; side < 2; side++) {
        for (int i = 0; i < r->m.count; i++) {
          r->masters[side][i] = calloc((size_t)elements_of(&r->m, i) + 1, sizeof(float));
          assert_non_null(r->masters[side][i]);
        }
      }
      run_ranks(ranks, 0, run_beside_the_cpu, r);
      for (int i = 0; i < r->m.count; i++) {
        const int64_t elements = elements_of(&r->m, i);
        double off = 0;
        assert_memory_equal(r->masters[1][i], runs[0].masters[1][i], (size_t)elements * sizeof(float));
        // A step moves a master by some 1e-3; here and there a moment is rounded to the next code.
        for (int64_t j = 0; j < elements; j++) {
          const double one = (double)fabsf(r->masters[0][i][j] - r->masters[1][i][j]);
          off += one;
          if (!(one <= 1e-3)) fail_msg("master %d[%lld] is off by %g", i, (long long)j, one);
        }
        if (!(off <= 1e-5 * (double)elements)) fail_msg("master %d is off by %g in all", i, off);
      }
    }
    for (int stage = 0; stage <= 3; stage++)
      for (int side = 0; side < 2; side++)
        for (int i = 0; i < runs[stage].m.count; i++) free(runs[stage].masters[side][i]);
  }
}

// --- Bytes ---

typedef struct traffic_run {
  run r;
  int on_cuda;
  fp8zero_traffic traffic;
} traffic_run;

static fp8core_status count_bytes(traffic_run *t, fp8comm_communicator *communicator, fp8zero_sharded *sharded,
                                  fp8core_context *context) {
  const model *m = &t->r.m;
  void *memory[MOST_TENSORS];
  fp8core_tensor gradients[MOST_TENSORS];
  for (int i = 0; i < m->count; i++) {
    const int64_t elements = elements_of(m, i);
    TRY(fp8core_alloc(context, (size_t)elements * sizeof(float) + 1, &memory[i]));
    TRY(fp8core_zero(context, memory[i], (size_t)elements * sizeof(float) + 1));
    gradients[i] = fp8core_tensor_matrix(memory[i], m->parameters[i].gradient_dtype, m->parameters[i].shape[0],
                                         m->parameters[i].shape[1], fp8core_context_device(context));
    TRY(fp8zero_sharded_set_master(sharded, i,
                                   &(fp8core_tensor){.data = memory[i],
                                                     .dtype = FP8CORE_FP32,
                                                     .dimensions = 2,
                                                     .shape = {m->parameters[i].shape[0], m->parameters[i].shape[1]},
                                                     .device = fp8core_context_device(context)}));
  }
  TRY(fp8zero_sharded_publish(sharded));
  for (int part = m->parts - 1; part >= 0; part--) {
    int64_t first;
    int64_t count;
    TRY(fp8zero_sharded_part(sharded, part, &first, &count));
    TRY(fp8zero_sharded_acquire(sharded, part, FP8ZERO_BACKWARD));
    TRY(fp8zero_sharded_reduce(sharded, part, gradients + first));
    TRY(fp8zero_sharded_release(sharded, part, FP8ZERO_BACKWARD));
  }
  TRY(fp8zero_sharded_step(sharded, NULL, NULL));
  TRY(fp8zero_sharded_wait(sharded));
  fp8zero_traffic own;
  TRY(fp8zero_sharded_traffic(sharded, &own));
  if (fp8comm_communicator_rank(communicator) == 0) t->traffic = own;
  for (int i = 0; i < m->count; i++) TRY(fp8core_free(context, memory[i]));
  return FP8CORE_OK;
}

static void run_traffic(fp8comm_communicator *communicator, void *data) {
  traffic_run *t = data;
  fp8core_context *cpu = NULL;
  fp8core_context *cuda = contexts[fp8comm_communicator_rank(communicator)];
  fp8zero_sharded *sharded = NULL;
  const fp8optim_group groups[2] = {fp8optim_group_default(), fp8optim_group_default()};
  rank_ok(communicator, fp8core_context_create(&cpu, NULL));
  if (t->on_cuda) rank_ok(communicator, use_device(communicator, cuda, t->r.path));
  fp8core_context *context = t->on_cuda ? cuda : cpu;
  rank_ok(communicator, fp8zero_sharded_create(&sharded, communicator, context, &t->r.options, t->r.m.count,
                                               t->r.m.parameters, 2, groups));
  rank_ok(communicator, count_bytes(t, communicator, sharded, context));
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&cpu);
}

static void bytes_are_the_cpus(void **unused) {
  (void)unused;
  for (int stage = 0; stage <= 3; stage++) {
    traffic_run on_cpu;
    memset(&on_cpu, 0, sizeof(on_cpu));
    on_cpu.r = run_of(make_transformer, stage);
    run_ranks(2, 0, run_traffic, &on_cpu);
    for (size_t path = 0; path < path_count; path++) {
      const int nccl = is(paths[path], "nccl");
      if (nccl && devices < 2) continue;
      traffic_run on_cuda = on_cpu;
      on_cuda.on_cuda = 1;
      on_cuda.r.path = paths[path];
      run_ranks(2, 0, run_traffic, &on_cuda);
      assert_int_equal(on_cuda.traffic.weight_bytes, on_cpu.traffic.weight_bytes);
      assert_int_equal(on_cuda.traffic.control_bytes, on_cpu.traffic.control_bytes);
      const uint64_t expected = on_cpu.traffic.gradient_bytes;
      // A bucket's means that are gathered on GPUs are padded to parts of the same length, at multiples of 64.
      const uint64_t padding = is(paths[path], "threads") && stage == 0 ? 64 * MOST_TENSORS : 0;
      // Codes over NCCL are not counted; what is left are the small messages.
      assert_in_range(on_cuda.traffic.gradient_bytes, nccl ? 1 : expected, nccl ? expected - 1 : expected + padding);
    }
  }
}

// --- Refused ---

static void run_refused(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const run r = run_of(make_tiny, 1);
  const int rank = fp8comm_communicator_rank(communicator);
  const fp8optim_group groups[2] = {fp8optim_group_default(), fp8optim_group_default()};
  fp8core_context *cpu = NULL;
  fp8zero_sharded *sharded = NULL;
  fp8zero_sharded_options options = r.options;
  fp8core_tensor gradients[MOST_TENSORS];
  float value = 0;
  rank_ok(communicator, fp8core_context_create(&cpu, NULL));
#define CREATE(context)                                                                                                \
  fp8zero_sharded_create(&sharded, communicator, context, &options, r.m.count, r.m.parameters, 2, groups)
  rank_refused(communicator, CREATE(contexts[rank]), FP8CORE_ERROR_INVALID_ARGUMENT,
               "context is on a GPU, but the communicator has no device, expected fp8comm_communicator_use_device()");
  rank_ok(communicator, fp8comm_communicator_use_device(communicator, contexts[rank], NULL));
  rank_refused(communicator, CREATE(rank == 0 ? cpu : contexts[rank]), FP8CORE_ERROR_INVALID_ARGUMENT,
               "type of device (0: CPU, 1: CUDA) is 1 on rank 1 and 0 on rank 0");
  rank_ok(communicator, CREATE(contexts[rank]));
  gradients[0] = fp8core_tensor_matrix(&value, FP8CORE_FP32, 3, 5, fp8core_context_device(cpu));
  gradients[1] = fp8core_tensor_matrix(&value, FP8CORE_BF16, 1, 1, fp8core_context_device(cpu));
  rank_refused(communicator, fp8zero_sharded_reduce(sharded, 1, gradients), FP8CORE_ERROR_INVALID_ARGUMENT,
               "the gradient of parameter \"b\" is on device 0:0, expected the context's, 1:");
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&cpu);
}

static void refused(void **unused) {
  (void)unused;
  run_ranks(2, 0, run_refused, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_stage), cmocka_unit_test(micro_batches_and_places),
    cmocka_unit_test(formats),     cmocka_unit_test(divided_models),
    cmocka_unit_test(clipped),     cmocka_unit_test(bytes_are_the_cpus),
    cmocka_unit_test(refused),
  };
  const int opened = open_devices(contexts, MOST_RANKS, &devices);
  if (opened != 0) return opened;
  if (have_nccl(contexts[0])) paths[path_count++] = "nccl";
#if defined(FP8_TEST_EMULATED)
  // It is the host that copies then.
  if (!getenv("FP8_FAKE_GUARD")) paths[path_count++] = "threads";
#endif
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  for (int i = 0; i < MOST_RANKS; i++) fp8core_context_destroy(&contexts[i]);
  return failed;
}
