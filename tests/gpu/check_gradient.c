// The gradient reducer on CUDA against the one on the CPU: means, scales, statistics and states are the same bits,
// whatever algorithm, formats, owners and path, with error feedback, delayed scaling, and without. Ranks are threads,
// on as many GPUs as there are; in check_gradient_emulated CUDA and NCCL are played, and the transport takes device
// memory ("threads").
#include "../comm/ranks.h"
#include "devices.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8core/cuda.h"
#if defined(FP8_TEST_EMULATED)
#  include "aware.h"
#  include "fake_cuda.h"
#endif

#define MOST_RANKS 4
#define TENSORS 6
#define STEPS 4
#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static fp8core_context *contexts[MOST_RANKS];
static int devices;
// Staged; NCCL, unless it is missing; the transport's own, in emulations.
static const char *paths[3] = {"staged"};
static size_t path_count = 1;

// Rows, columns, and elements between the rows' starts.
static const int64_t shapes[TENSORS][3] = {{40, 25, 32}, {1, 0, 0}, {1, 3, 3}, {33, 64, 64}, {1, 777, 777}, {7, 9, 9}};

typedef struct gradient_case {
  const char *path;
  fp8comm_gradient_algorithm algorithm;
  fp8comm_gradient_scaling scaling;
  fp8core_dtype wire;
  int owners;
  int measure_snr;
  int in_place;
  // Inputs come with amaxes, which are too small, and tell nothing of a NaN.
  int known;
  int feedback;
  int delayed;
  // Means are near the largest value of their output's format, and beyond.
  int range;
} gradient_case;

// A tensor in both memories; of FP8 with its scale.
typedef struct pair {
  fp8core_tensor host;
  fp8core_tensor device;
  float scale_inverse;
  float *device_scale_inverse;
  float amax;
  float *device_amax;
  size_t bytes;
} pair;

static int make_pair(fp8core_context *context, pair *made, int index, fp8core_dtype dtype, int with_amax) {
  memset(made, 0, sizeof(*made));
  const int64_t rows = shapes[index][0], columns = shapes[index][1], stride = shapes[index][2];
  made->bytes = (size_t)(rows * stride) * fp8core_dtype_size(dtype);
  fp8core_device host = {FP8CORE_DEVICE_CPU, 0};
  void *memory = NULL, *scale = NULL, *amax = NULL;
  if (fp8core_alloc(context, made->bytes + 1, &memory) != FP8CORE_OK ||
      fp8core_alloc(context, sizeof(float), &scale) != FP8CORE_OK ||
      fp8core_alloc(context, sizeof(float), &amax) != FP8CORE_OK ||
      fp8core_zero(context, amax, sizeof(float)) != FP8CORE_OK ||
      fp8core_zero(context, memory, made->bytes + 1) != FP8CORE_OK)
    return 0;
  made->host = fp8core_tensor_matrix(calloc(1, made->bytes + 1), dtype, rows, columns, host);
  made->device = fp8core_tensor_matrix(memory, dtype, rows, columns, fp8core_context_device(context));
  made->host.row_stride = made->device.row_stride = columns > 0 ? stride : 0;
  made->device_scale_inverse = scale;
  made->device_amax = amax;
  if (with_amax) {
    made->host.amax = &made->amax;
    made->device.amax = amax;
  }
  return made->host.data != NULL;
}

static void free_pair(fp8core_context *context, pair *gone) {
  (void)fp8core_free(context, gone->device.data);
  (void)fp8core_free(context, gone->device_scale_inverse);
  (void)fp8core_free(context, gone->device_amax);
  free(gone->host.data);
}

// The largest value of a step, in those of the output's format.
static double range_value(int step, int index) {
  static const double values[STEPS] = {0.6597, 0.9922, 1.0005, 1};
  return values[step] * (index == 4   ? (double)fp8core_dtype_max(FP8CORE_FP16)
                         : index == 2 ? (double)fp8core_dtype_max(FP8CORE_BF16)
                                      : 1);
}

// New values: wide ones, so that some saturate and some vanish; in one step a NaN on one rank.
static fp8core_status fill(fp8core_context *context, pair *one, int rank, int step, int index, int known, int range) {
  test_random random = {(uint64_t)(rank * 1000 + step * 100 + index + 1)};
  const size_t element = fp8core_dtype_size(one->host.dtype);
  one->scale_inverse = 0.125f * (float)(1 + step);
  for (size_t i = 0; i * element < one->bytes; i++) {
    double value = test_random_normal(&random) * exp(2 * test_random_normal(&random));
    if (range) value = range_value(step, index) * ((double)(i % 7) - 3) / 3;
    if (step == 2 && rank == 1 && index == 3 && i == 5) value = NAN;
    const uint32_t code = fp8core_encode(one->host.dtype, (float)value, 1);
    memcpy((unsigned char *)one->host.data + i * element, &code, element);
  }
  one->host.scale_inverse = element == 1 ? &one->scale_inverse : NULL;
  one->device.scale_inverse = element == 1 ? one->device_scale_inverse : NULL;
  if (known) {
    one->amax = index == 4 ? -3.0f : 3.0f;
    one->host.amax = &one->amax;
    one->device.amax = one->device_amax;
    const fp8core_status status = fp8core_copy(context, one->device_amax, &one->amax, sizeof(one->amax));
    if (status != FP8CORE_OK) return status;
  }
  if (element == 1) {
    const fp8core_status status =
      fp8core_copy(context, one->device_scale_inverse, &one->scale_inverse, sizeof(one->scale_inverse));
    if (status != FP8CORE_OK) return status;
  }
  return one->bytes > 0 ? fp8core_copy(context, one->device.data, one->host.data, one->bytes) : FP8CORE_OK;
}

static int same_double(double one, double other) { return one == other || (isnan(one) && isnan(other)); }

static int same_statistics(const fp8comm_gradient_statistics *one, const fp8comm_gradient_statistics *other) {
  return one->elements == other->elements && one->saturated_in_cast == other->saturated_in_cast &&
         one->saturated_in_sum == other->saturated_in_sum && one->flushed_to_zero == other->flushed_to_zero &&
         one->nonfinite == other->nonfinite && same_double((double)one->amax, (double)other->amax) &&
         one->wire_scale == other->wire_scale && same_double((double)one->mean_scale, (double)other->mean_scale) &&
         one->mu == other->mu && one->next_mu == other->next_mu && same_double(one->snr_db, other->snr_db);
}

// What both have written; floats of the device come to the host first.
static const char *compare(fp8core_context *context, const pair *one, const fp8core_tensor *host,
                           const fp8core_tensor *device) {
  unsigned char *bytes = malloc(one->bytes + 1);
  float values[3] = {0};
  const char *what = NULL;
  fp8core_status status = FP8CORE_OK;
  if (!bytes) return "no memory";
  if (one->bytes > 0) status = fp8core_copy(context, bytes, device->data, one->bytes);
  if (status == FP8CORE_OK && device->scale) status = fp8core_copy(context, &values[0], device->scale, sizeof(float));
  if (status == FP8CORE_OK && device->scale_inverse)
    status = fp8core_copy(context, &values[1], device->scale_inverse, sizeof(float));
  if (status == FP8CORE_OK) status = fp8core_copy(context, &values[2], one->device_amax, sizeof(float));
  if (status != FP8CORE_OK)
    what = fp8core_last_error();
  else if (memcmp(bytes, host->data, one->bytes) != 0)
    what = "the bits differ";
  else if (!host->scale != !device->scale || (host->scale && *host->scale != values[0]))
    what = "the scales differ";
  else if (!host->scale_inverse != !device->scale_inverse || (host->scale_inverse && *host->scale_inverse != values[1]))
    what = "the inverse scales differ";
  else if (memcmp(&one->amax, &values[2], sizeof(float)) != 0)
    what = "the amaxes differ";
  free(bytes);
  return what;
}

// Of a dense tensor, as all but the first are, in host memory.
static int has_infinity(const fp8core_tensor *tensor) {
  const size_t element = fp8core_dtype_size(tensor->dtype);
  for (int64_t i = 0; i < fp8core_tensor_elements(tensor); i++) {
    uint32_t code = 0;
    memcpy(&code, (const unsigned char *)tensor->data + (size_t)i * element, element);
    if (isinf(fp8core_decode(tensor->dtype, code))) return 1;
  }
  return 0;
}

static void check_case(fp8comm_communicator *communicator, void *data) {
  static const fp8core_dtype dtypes[] = {FP8CORE_FP32, FP8CORE_BF16, FP8CORE_FP16, FP8CORE_E4M3, FP8CORE_E5M2};
  const gradient_case *one = data;
  const int rank = fp8comm_communicator_rank(communicator), size = fp8comm_communicator_size(communicator);
  fp8core_context *context = contexts[rank], *cpu;
  fp8comm_gradient_reducer *on_cpu, *on_cuda;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_device_options device = fp8comm_device_options_default();
  int64_t elements[TENSORS];
  int owners[TENSORS];
  pair inputs[TENSORS], outputs[TENSORS];
  fp8core_tensor host_inputs[TENSORS], host_outputs[TENSORS], device_inputs[TENSORS], device_outputs[TENSORS];
  const int scaled = one->algorithm == FP8COMM_TWO_SHOT || one->algorithm == FP8COMM_NATIVE;
  for (int i = 0; i < TENSORS; i++) {
    const fp8core_dtype narrow = scaled ? one->wire : FP8CORE_BF16;
    const fp8core_dtype outs[] = {FP8CORE_FP32, narrow, FP8CORE_BF16, narrow, FP8CORE_FP16, narrow};
    const fp8core_dtype in = one->in_place ? outs[i] : dtypes[(i + rank) % 5];
    elements[i] = shapes[i][0] * shapes[i][1];
    owners[i] = (i * 2 + 1) % size;
    rank_check(communicator, make_pair(context, &inputs[i], i, in, 0), "memory: %s", fp8core_last_error());
    rank_check(communicator, make_pair(context, &outputs[i], i, outs[i], 1), "memory: %s", fp8core_last_error());
  }
  options.algorithm = one->algorithm;
  options.scaling = one->scaling;
  options.wire_dtype = one->wire;
  options.measure_snr = one->measure_snr;
  // Three buckets or more.
  options.bucket_bytes = 2500;
  options.mu_initial = 4;
  if (one->range) options.mu_initial = options.mu_max = 1;
  options.inputs_have_amax = one->known;
  options.error_feedback = one->feedback;
  options.delayed_scaling = one->delayed;
  if (one->owners) options.owners = owners;
  device.path = one->path;
#if defined(FP8_TEST_EMULATED)
  if (strcmp(one->path, "threads") == 0) aware_make(communicator);
#endif
  rank_ok(communicator, fp8core_context_create(&cpu, NULL));
  rank_refused(communicator, fp8comm_gradient_create(&on_cuda, communicator, context, TENSORS, elements, &options),
               FP8CORE_ERROR_INVALID_ARGUMENT, "expected one that it was given by fp8comm_communicator_use_device()");
  rank_ok(communicator, fp8comm_communicator_use_device(communicator, context, &device));
  rank_ok(communicator, fp8comm_gradient_create(&on_cpu, communicator, cpu, TENSORS, elements, &options));
  rank_ok(communicator, fp8comm_gradient_create(&on_cuda, communicator, context, TENSORS, elements, &options));
  rank_check(communicator, fp8comm_gradient_buckets(on_cuda) > 2, "there are %lld buckets",
             (long long)fp8comm_gradient_buckets(on_cuda));
  unsigned char states[2][512];
  const size_t bytes = fp8comm_gradient_saved_bytes(on_cuda);
  rank_check(communicator, bytes <= sizeof(states[0]), "the state has %zu bytes", bytes);
  for (int step = 0; step < STEPS; step++) {
    // What the CPU's has forgotten the GPU's must not remember.
    if (step == STEPS - 1 && one->feedback && one->in_place) {
      rank_ok(communicator, fp8comm_gradient_save(on_cpu, states[0], bytes));
      rank_ok(communicator, fp8comm_gradient_load(on_cpu, states[0], bytes));
      rank_ok(communicator, fp8comm_gradient_load(on_cuda, states[0], bytes));
    }
    for (int i = 0; i < TENSORS; i++) {
      // An FP8 mean of the step before is a gradient of the next: its scale is the one that is written.
      const int again = one->in_place && step == 3 && outputs[i].host.dtype == one->wire && scaled;
      if (!again) {
        rank_ok(communicator, fill(context, &inputs[i], rank, step, i, one->known, one->range));
        host_inputs[i] = inputs[i].host;
        device_inputs[i] = inputs[i].device;
      } else if (!one->owners) {
        host_inputs[i] = host_outputs[i];
        device_inputs[i] = device_outputs[i];
      }
      host_outputs[i] = outputs[i].host;
      device_outputs[i] = outputs[i].device;
      if (one->in_place) {
        host_outputs[i].data = host_inputs[i].data;
        device_outputs[i].data = device_inputs[i].data;
      }
    }
    if (step == 0)
      rank_refused(communicator, fp8comm_gradient_all_reduce(on_cuda, host_inputs, host_outputs, NULL),
                   FP8CORE_ERROR_INVALID_ARGUMENT, "inputs[0] is in host memory, expected the memory of CUDA device");
    fp8comm_gradient_result expected, result;
    rank_ok(communicator, fp8comm_gradient_all_reduce(on_cpu, host_inputs, host_outputs, &expected));
    if (step % 2 == 0) {
      rank_ok(communicator, fp8comm_gradient_all_reduce(on_cuda, device_inputs, device_outputs, &result));
    } else {
      // The same by hand, from the last bucket on, with work in between.
      for (int64_t bucket = fp8comm_gradient_buckets(on_cuda) - 1; bucket >= 0; bucket--) {
        int done;
        rank_ok(communicator, fp8comm_gradient_start(on_cuda, bucket, device_inputs, device_outputs));
        rank_ok(communicator, fp8comm_gradient_progress(on_cuda, &done));
      }
      rank_ok(communicator, fp8comm_gradient_wait(on_cuda, &result));
    }
    rank_check(
      communicator,
      expected.nonfinite_tensors == result.nonfinite_tensors && expected.nonfinite_rank == result.nonfinite_rank,
      "step %d: %lld tensors of rank %d are not finite, expected %lld of %d", step, (long long)result.nonfinite_tensors,
      result.nonfinite_rank, (long long)expected.nonfinite_tensors, expected.nonfinite_rank);
    for (int i = 0; i < TENSORS; i++) {
      fp8comm_gradient_statistics right, statistics;
      rank_ok(communicator, fp8comm_gradient_get_statistics(on_cpu, i, &right));
      rank_ok(communicator, fp8comm_gradient_get_statistics(on_cuda, i, &statistics));
      rank_check(
        communicator, same_statistics(&right, &statistics),
        "%s, case %d, step %d: statistics of tensor %d differ: mean_scale %g, expected %g; amax %g, expected %g",
        one->path, (int)one->algorithm, step, i, (double)statistics.mean_scale, (double)right.mean_scale,
        (double)statistics.amax, (double)right.amax);
      if (one->owners && owners[i] != rank) continue;
      const char *what = compare(context, &outputs[i], &host_outputs[i], &device_outputs[i]);
      rank_check(communicator, !what, "step %d, tensor %d (%s, %s): %s", step, i,
                 fp8core_dtype_name(host_inputs[i].dtype), fp8core_dtype_name(host_outputs[i].dtype), what);
      rank_check(communicator, !one->range || i == 0 || !has_infinity(&host_outputs[i]),
                 "step %d, tensor %d: an infinity", step, i);
    }
  }
  rank_ok(communicator, fp8comm_gradient_save(on_cpu, states[0], bytes));
  rank_ok(communicator, fp8comm_gradient_save(on_cuda, states[1], bytes));
  rank_check(communicator, memcmp(states[0], states[1], bytes) == 0, "the states differ");
  fp8comm_gradient_destroy(&on_cpu);
  fp8comm_gradient_destroy(&on_cuda);
  fp8core_context_destroy(&cpu);
  for (int i = 0; i < TENSORS; i++) {
    free_pair(context, &inputs[i]);
    free_pair(context, &outputs[i]);
  }
}

// Where codes can be added up on the GPU, they do not come to the host but with NaNs, one tensor of one step's.
// *staged: what does where they come to it.
static void run_case(int ranks, gradient_case *one, unsigned long long *staged) {
#if defined(FP8_TEST_EMULATED)
  const unsigned long long before = fake_page_locked_bytes(), sent = aware_sent_bytes();
  run_ranks(ranks, 0, check_case, one);
  const unsigned long long copied = fake_page_locked_bytes() - before;
  const int direct = ranks > 1 && one->algorithm == FP8COMM_TWO_SHOT && !one->measure_snr;
  unsigned long long codes = 0;
  for (int i = 0; i < TENSORS; i++) codes += (unsigned long long)(shapes[i][0] * shapes[i][1]);
  assert_int_equal(aware_sent_bytes() > sent, direct && strcmp(one->path, "threads") == 0);
  if (strcmp(one->path, "staged") == 0) {
    *staged = copied;
  } else if (direct && !one->owners) {
    assert_true(copied + STEPS * (unsigned long long)ranks * codes < *staged);
  } else if (direct) {
    assert_true(copied < *staged);
  }
#else
  (void)staged;
  run_ranks(ranks, 0, check_case, one);
#endif
}

static void same_as_on_the_cpu(void **unused) {
  (void)unused;
  static const gradient_case cases[] = {
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E5M2, 0, 1, 1, 0, 0, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_PRE, FP8CORE_E4M3, 1, 1, 0, 0, 0, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 1, 0, 1, 0, 0, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 1, 0, 0, 0},
    {NULL, FP8COMM_NATIVE, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 1, 0, 0, 1, 0, 0, 0},
    {NULL, FP8COMM_NATIVE, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 1, 0, 0, 0, 0, 0},
    {NULL, FP8COMM_NATIVE, FP8COMM_SCALING_POST, FP8CORE_E5M2, 1, 0, 0, 0, 0, 0, 0},
    {NULL, FP8COMM_BASELINE_FP32, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 0, 0},
    {NULL, FP8COMM_BASELINE_FP32, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 1, 0, 0, 0, 0, 0, 0},
    {NULL, FP8COMM_BASELINE_BF16, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 1, 1, 0, 0, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 1, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E5M2, 0, 0, 1, 0, 1, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_PRE, FP8CORE_E5M2, 1, 0, 0, 1, 1, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 1, 1, 1, 0, 1, 0, 0},
    {NULL, FP8COMM_NATIVE, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 1, 0, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 1, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E5M2, 1, 0, 0, 0, 1, 1, 0},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 1, 0, 0, 0, 1},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 1, 1},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E5M2, 1, 0, 1, 0, 0, 1, 1},
    {NULL, FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 1, 0, 1, 1, 1},
    {NULL, FP8COMM_NATIVE, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 1, 1},
    {NULL, FP8COMM_BASELINE_FP32, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 0, 1},
    {NULL, FP8COMM_BASELINE_BF16, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 1, 0, 1, 0, 0, 0, 1},
    {NULL, FP8COMM_BASELINE_BF16, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, 0, 0, 0, 0, 0, 0, 1},
  };
  for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
    for (size_t i = 0; i < COUNT(cases); i++) {
      unsigned long long staged = 0;
      for (size_t p = 0; p < path_count; p++) {
        if (strcmp(paths[p], "nccl") == 0 && ranks > devices) continue;
        gradient_case one = cases[i];
        one.path = paths[p];
        run_case(ranks, &one, &staged);
      }
    }
  }
}

#if defined(FP8_TEST_EMULATED)

typedef struct room_case {
  const char *path;
  int owners;
  int feedback;
} room_case;

#  define ROOM_RANKS 3

// A step of a tensor with a NaN, which is more than is filled with NaNs at once, and of one without, which lies behind
// it: the mean of the one is NaNs, and the other's is not touched by them.
static void check_nans(fp8comm_communicator *communicator, fp8core_context *context, fp8comm_gradient_reducer *reducer,
                       const int64_t *elements, const int *owners) {
  const int rank = fp8comm_communicator_rank(communicator);
  fp8comm_gradient_result result;
  fp8core_tensor tensors[2];
  float *values[2];
  for (int i = 0; i < 2; i++) {
    void *memory;
    values[i] = calloc((size_t)elements[i], sizeof(**values));
    rank_check(communicator, values[i], "no memory");
    for (int64_t j = 0; j < elements[i]; j++) values[i][j] = (float)(rank + 1);
    if (i == 0 && rank == 1) values[i][77] = NAN;
    rank_ok(communicator, fp8core_alloc(context, (size_t)elements[i] * sizeof(**values), &memory));
    rank_ok(communicator, fp8core_copy(context, memory, values[i], (size_t)elements[i] * sizeof(**values)));
    tensors[i] = fp8core_tensor_create(memory, FP8CORE_FP32, 1, &elements[i]);
    tensors[i].device = fp8core_context_device(context);
  }
  rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, tensors, tensors, &result));
  rank_check(communicator, result.nonfinite_tensors == 1 && result.nonfinite_rank == 1, "%lld tensors of rank %d",
             (long long)result.nonfinite_tensors, result.nonfinite_rank);
  for (int i = 0; i < 2; i++) {
    rank_ok(communicator, fp8core_copy(context, values[i], tensors[i].data, (size_t)elements[i] * sizeof(**values)));
    for (int64_t j = 0; j < elements[i] && (!owners || owners[i] == rank); j++)
      rank_check(communicator, i == 0 ? isnan(values[i][j]) : fabsf(values[i][j] - 2.0f) < 0.2f,
                 "element %lld of mean %d is %g", (long long)j, i, (double)values[i][j]);
    rank_ok(communicator, fp8core_free(context, tensors[i].data));
    free(values[i]);
  }
}

// What a reducer says that it holds is what it has allocated, beside a few tables of the host's. Where codes stay on
// the GPU, next to nothing of it is page-locked; elsewhere the codes, contributions or sums, and what is cast at once.
static void check_room(fp8comm_communicator *communicator, void *data) {
  static const int64_t elements[2] = {50001, 20003};
  static const int owners[2] = {0, 1};
  const room_case *one = data;
  const int rank = fp8comm_communicator_rank(communicator), direct = strcmp(one->path, "staged") != 0;
  const double all = (double)(elements[0] + elements[1]), tables = 8192 * ROOM_RANKS;
  fp8core_context *context = contexts[rank];
  fp8comm_gradient_reducer *reducer;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_device_options device = fp8comm_device_options_default();
  unsigned long long before[2];
  double held[2], told;
  options.error_feedback = one->feedback;
  if (one->owners) options.owners = owners;
  device.path = one->path;
  if (strcmp(one->path, "threads") == 0) aware_make(communicator);
  rank_ok(communicator, fp8comm_communicator_use_device(communicator, context, &device));
  // No rank allocates anything while another looks.
  rank_ok(communicator, fp8comm_barrier(communicator));
  for (int i = 0; i < 2; i++) before[i] = fake_held_bytes(i);
  rank_ok(communicator, fp8comm_barrier(communicator));
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 2, elements, &options));
  told = (double)fp8comm_gradient_memory_bytes(reducer);
  rank_ok(communicator, fp8comm_all_reduce(communicator, &told, &told, 1, FP8COMM_FP64, FP8COMM_SUM));
  for (int i = 0; i < 2; i++) held[i] = (double)(fake_held_bytes(i) - before[i]);
  rank_ok(communicator, fp8comm_barrier(communicator));
  // Of error feedback the errors of means are in other host memory where sums are.
  const double errors = one->feedback && !direct ? 2 * all : 0;
  rank_check(communicator, held[0] + held[1] + errors <= told && told <= held[0] + held[1] + errors + tables,
             "%s: %g bytes are told of, %g are on the GPUs, %g page-locked", one->path, told, held[0], held[1]);
  const double most = direct ? 32768 * ROOM_RANKS : (all + 262144) * ROOM_RANKS + all * (ROOM_RANKS - 1 + 4);
  // Contributions that are not kept wait in pieces.
  rank_check(communicator, held[1] < most || (one->feedback && !direct),
             "%s: %g bytes are page-locked, expected less than %g", one->path, held[1], most);
  check_nans(communicator, context, reducer, elements, one->owners ? owners : NULL);
  fp8comm_gradient_destroy(&reducer);
}

static void only_what_is_used(void **unused) {
  (void)unused;
  for (size_t p = 0; p < path_count; p++) {
    for (int way = 0; way < 4; way++) {
      room_case one = {paths[p], way % 2, way / 2};
      run_ranks(ROOM_RANKS, 0, check_room, &one);
    }
  }
}

#endif

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(same_as_on_the_cpu),
#if defined(FP8_TEST_EMULATED)
    cmocka_unit_test(only_what_is_used),
#endif
  };
  const int opened = open_devices(contexts, MOST_RANKS, &devices);
  if (opened != 0) return opened;
  if (have_nccl(contexts[0])) paths[path_count++] = "nccl";
#if defined(FP8_TEST_EMULATED)
  paths[path_count++] = "threads";
#endif
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  for (int i = 0; i < MOST_RANKS; i++) fp8core_context_destroy(&contexts[i]);
  return failed;
}
