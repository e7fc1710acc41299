// The gradient all-reduce, against means in FP64 and the scalar rules.
#include "ranks.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gradient_rules.h"

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static const int rank_counts[] = {1, 2, 3, 8, 11, 16};
static const int64_t shapes[] = {1000, 0, 7, 4099, 1, 70001, 64, 0};
#define TENSORS ((int64_t)COUNT(shapes))

// A gradient: a signal that all ranks share, and as much noise of a rank's own.
static void fill(float *data, int64_t count, int rank, int64_t tensor, double shared, double own) {
  test_random signal = {(uint64_t)tensor * 1000 + 17}, noise = {(uint64_t)tensor * 1000 + 100 + (uint64_t)rank};
  for (int64_t i = 0; i < count; i++)
    data[i] = (float)(1e-3 * (shared * test_random_normal(&signal) + own * test_random_normal(&noise)));
}

static fp8core_tensor vector(void *data, fp8core_dtype dtype, int64_t count) {
  return fp8core_tensor_create(data, dtype, 1, &count);
}

// --- Accuracy ---

typedef struct accuracy_case {
  fp8comm_gradient_algorithm algorithm;
  fp8comm_gradient_scaling scaling;
  fp8core_dtype wire;
  fp8core_dtype in;
  fp8core_dtype out;
  int64_t bucket_bytes;
} accuracy_case;

// Half a unit of the last place of a value, as stored with this scale.
static double half_step(fp8core_dtype dtype, double value, double scale) {
  static const int bits[] = {3, 2, 7, 10, 23};
  const double least = (double)fp8core_dtype_min_subnormal(dtype) / 2 / scale;
  const double relative = fabs(value) * ldexp(1, -bits[dtype] - 1);
  return relative > least ? relative : least;
}

// Bounds of docs/numerics.md. `once`: an owner's, which is rounded to the output only.
static double bound(const accuracy_case *one, const fp8comm_gradient_statistics *statistics, int ranks,
                    const double *values, double mean, int once) {
  const double wire_scale = (double)statistics->wire_scale, mean_scale = (double)statistics->mean_scale;
  const fp8core_dtype wire = one->algorithm == FP8COMM_BASELINE_FP32   ? FP8CORE_FP32
                             : one->algorithm == FP8COMM_BASELINE_BF16 ? FP8CORE_BF16
                                                                       : one->wire;
  double first = 0, magnitudes = 0;
  for (int rank = 0; rank < ranks; rank++) {
    first += half_step(wire, values[rank], wire_scale);
    magnitudes += fabs(values[rank]);
  }
  // FP32's own roundings: of the scales, the sum and the mean.
  const double sums = (ranks + 8) * 0x1p-24 * magnitudes;
  double error = (first + sums) / ranks;
  if (one->algorithm == FP8COMM_NATIVE) {
    for (int add = 1; add < ranks; add++) error += half_step(wire, magnitudes + ranks * error, wire_scale) / ranks;
  } else if (!once) {
    error += half_step(wire, fabs(mean) + error, mean_scale);
  }
  return error + half_step(one->out == one->wire ? FP8CORE_FP32 : one->out, fabs(mean) + error, 1);
}

static float *inputs_of(int rank, int64_t tensor, fp8core_dtype dtype, unsigned char *stored, float *scale_inverse) {
  float *values = malloc((size_t)shapes[tensor] * 4 + 4);
  float amax = 0;
  fill(values, shapes[tensor], rank, tensor, 1, 1);
  for (int64_t i = 0; i < shapes[tensor]; i++) amax = fabsf(values[i]) > amax ? fabsf(values[i]) : amax;
  const float scale = fp8core_scale_from_amax(dtype, amax, 0, 0, 1);
  *scale_inverse = 1 / scale;
  for (int64_t i = 0; i < shapes[tensor]; i++) {
    const uint32_t code = fp8core_encode(dtype, values[i] * scale, 1);
    values[i] = fp8core_decode(dtype, code) * *scale_inverse;
    if (stored) memcpy(stored + (size_t)i * fp8core_dtype_size(dtype), &code, fp8core_dtype_size(dtype));
  }
  return values;
}

static void check_accuracy(fp8comm_communicator *communicator, void *data) {
  const accuracy_case *one = data;
  const int ranks = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8core_tensor in[TENSORS], out[TENSORS];
  float scale_inverse[TENSORS];
  fp8comm_gradient_result result;
  fp8core_context_options context_options = fp8core_context_options_default();
  fp8core_context *context;
  context_options.threads = 1;
  rank_ok(communicator, fp8core_context_create(&context, &context_options));
  options.algorithm = one->algorithm;
  options.scaling = one->scaling;
  options.wire_dtype = one->wire;
  options.bucket_bytes = one->bucket_bytes;
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, TENSORS, shapes, &options));
  const size_t element = fp8core_dtype_size(one->out);
  for (int64_t i = 0; i < TENSORS; i++) {
    in[i] = vector(malloc((size_t)shapes[i] * 4 + 4), one->in, shapes[i]);
    out[i] = vector(malloc((size_t)shapes[i] * 4 + 4), one->out, shapes[i]);
    free(inputs_of(rank, i, one->in, in[i].data, &scale_inverse[i]));
    in[i].scale_inverse = &scale_inverse[i];
  }
  rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, in, out, &result));
  rank_check(communicator, result.nonfinite_tensors == 0 && result.nonfinite_rank == -1, "nonfinite");
  double *values = malloc((size_t)ranks * sizeof(*values));
  float **all = malloc((size_t)ranks * sizeof(*all));
  for (int64_t i = 0; i < TENSORS; i++) {
    fp8comm_gradient_statistics statistics;
    float unused;
    rank_ok(communicator, fp8comm_gradient_get_statistics(reducer, i, &statistics));
    rank_check(communicator, statistics.elements == shapes[i] && statistics.saturated_in_cast == 0, "statistics");
    // Every rank looks at its share of elements only.
    for (int other = 0; other < ranks; other++) all[other] = inputs_of(other, i, one->in, NULL, &unused);
    for (int64_t j = rank; j < shapes[i]; j += ranks) {
      double mean = 0;
      uint32_t code = 0;
      for (int other = 0; other < ranks; other++) mean += values[other] = (double)all[other][j];
      mean /= ranks;
      memcpy(&code, (unsigned char *)out[i].data + (size_t)j * element, element);
      const double got =
        (double)fp8core_decode(one->out, code) * (out[i].scale_inverse ? (double)*out[i].scale_inverse : 1);
      const double most = bound(one, &statistics, ranks, values, mean, 0);
      rank_check(communicator, fabs(got - mean) <= most && statistics.saturated_in_sum == 0,
                 "%s %s %s, in %s, out %s: element %lld of tensor %lld is %g, expected %g within %g",
                 fp8comm_gradient_algorithm_name(one->algorithm), fp8comm_gradient_scaling_name(one->scaling),
                 fp8core_dtype_name(one->wire), fp8core_dtype_name(one->in), fp8core_dtype_name(one->out), (long long)j,
                 (long long)i, got, mean, most);
    }
    for (int other = 0; other < ranks; other++) free(all[other]);
    // The same bits on every rank.
    const int64_t bytes = shapes[i] * (int64_t)element;
    unsigned char *gathered = malloc((size_t)(bytes * ranks) + 1);
    rank_ok(communicator, fp8comm_all_gather(communicator, out[i].data, gathered, bytes, FP8COMM_BYTE));
    for (int other = 0; other < ranks; other++)
      rank_check(communicator, memcmp(gathered + other * bytes, out[i].data, (size_t)bytes) == 0,
                 "other bits on rank %d", other);
    free(gathered);
  }
  // And from run to run, with codes in messages or read in place; where the formats allow, in the inputs' own memory.
  fp8comm_gradient_destroy(&reducer);
  options.in_place = 0;
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, TENSORS, shapes, &options));
  fp8core_tensor again[TENSORS];
  for (int64_t i = 0; i < TENSORS; i++) {
    again[i] = vector(one->in == one->out ? in[i].data : malloc((size_t)shapes[i] * 4 + 4), one->out, shapes[i]);
  }
  rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, in, again, NULL));
  for (int64_t i = 0; i < TENSORS; i++) {
    rank_check(communicator, memcmp(again[i].data, out[i].data, (size_t)shapes[i] * element) == 0, "two runs differ");
    if (one->in != one->out) free(again[i].data);
    free(in[i].data);
    free(out[i].data);
  }
  free(values);
  free(all);
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
}

static void accuracy(void **unused) {
  (void)unused;
  static const accuracy_case cases[] = {
    {FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, FP8CORE_FP32, FP8CORE_E4M3, 25 << 20},
    {FP8COMM_TWO_SHOT, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_E4M3, 4096},
    {FP8COMM_TWO_SHOT, FP8COMM_SCALING_PRE, FP8CORE_E5M2, FP8CORE_BF16, FP8CORE_FP32, 25 << 20},
    {FP8COMM_TWO_SHOT, FP8COMM_SCALING_POST, FP8CORE_E4M3, FP8CORE_FP32, FP8CORE_FP32, 5000},
    {FP8COMM_NATIVE, FP8COMM_SCALING_PRE, FP8CORE_E4M3, FP8CORE_FP32, FP8CORE_E4M3, 25 << 20},
    {FP8COMM_NATIVE, FP8COMM_SCALING_PRE, FP8CORE_E5M2, FP8CORE_E5M2, FP8CORE_BF16, 5000},
    {FP8COMM_BASELINE_FP32, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, FP8CORE_FP32, FP8CORE_FP32, 25 << 20},
    {FP8COMM_BASELINE_BF16, FP8COMM_SCALING_AUTO, FP8CORE_E4M3, FP8CORE_BF16, FP8CORE_BF16, 5000},
  };
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    for (size_t i = 0; i < COUNT(cases); i++) {
      accuracy_case one = cases[i];
      run_ranks(rank_counts[r], 0, check_accuracy, &one);
    }
  }
}

// --- A rig of one tensor ---

typedef struct gradient_rig {
  fp8comm_communicator *communicator;
  fp8core_context *context;
  fp8comm_gradient_reducer *reducer;
  int64_t count;
  float *in;
  float *out;
} gradient_rig;

static fp8core_status rig_make(gradient_rig *made, fp8comm_communicator *communicator, int64_t count,
                               const fp8comm_gradient_options *options) {
  fp8core_context_options context_options = fp8core_context_options_default();
  memset(made, 0, sizeof(*made));
  context_options.threads = 1;
  made->communicator = communicator;
  made->count = count;
  made->in = calloc((size_t)count, 4);
  made->out = calloc((size_t)count, 4);
  const fp8core_status status = fp8core_context_create(&made->context, &context_options);
  if (status != FP8CORE_OK) return status;
  return fp8comm_gradient_create(&made->reducer, communicator, made->context, 1, &count, options);
}

static fp8core_status rig_step(gradient_rig *rig, fp8comm_gradient_statistics *statistics,
                               fp8comm_gradient_result *result) {
  const fp8core_tensor in = vector(rig->in, FP8CORE_FP32, rig->count);
  fp8core_tensor out = vector(rig->out, FP8CORE_FP32, rig->count);
  const fp8core_status status = fp8comm_gradient_all_reduce(rig->reducer, &in, &out, result);
  if (status != FP8CORE_OK) return status;
  return fp8comm_gradient_get_statistics(rig->reducer, 0, statistics);
}

static void rig_free(gradient_rig *rig) {
  fp8comm_gradient_destroy(&rig->reducer);
  fp8core_context_destroy(&rig->context);
  free(rig->in);
  free(rig->out);
}

// The native sum is the scalar rule's, bit for bit, saturation counted.
static void check_native(fp8comm_communicator *communicator, void *data) {
  const int64_t count = 5000;
  const int ranks = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics;
  gradient_rig rig;
  options.algorithm = FP8COMM_NATIVE;
  options.scaling = FP8COMM_SCALING_POST;
  options.wire_dtype = *(const fp8core_dtype *)data;
  rank_ok(communicator, rig_make(&rig, communicator, count, &options));
  fill(rig.in, count, rank, 0, 1, 1);
  rank_ok(communicator, rig_step(&rig, &statistics, NULL));
  float *all = malloc((size_t)(count * ranks) * 4);
  uint64_t saturated = 0;
  const int64_t part = ((count + ranks - 1) / ranks + 63) / 64 * 64;
  for (int other = 0; other < ranks; other++) fill(all + other * count, count, other, 0, 1, 1);
  for (int64_t i = 0; i < count; i++) {
    const int owner = (int)(i / part);
    uint32_t sum = fp8core_encode(options.wire_dtype, all[owner * count + i] * statistics.wire_scale, 1);
    for (int distance = 1; distance < ranks; distance++) {
      const int from = (owner + ranks - distance) % ranks;
      sum = fp8comm_native_add_rule(
        options.wire_dtype, sum, fp8core_encode(options.wire_dtype, all[from * count + i] * statistics.wire_scale, 1),
        &saturated);
    }
    const float mean = fp8core_decode(options.wire_dtype, sum) * (1 / statistics.mean_scale);
    rank_check(communicator, memcmp(&mean, &rig.out[i], 4) == 0, "element %lld is %g, expected %g", (long long)i,
               (double)rig.out[i], (double)mean);
  }
  rank_check(communicator, statistics.saturated_in_sum == saturated && (saturated > 0 || ranks < 3),
             "%llu additions saturated, expected %llu", (unsigned long long)statistics.saturated_in_sum,
             (unsigned long long)saturated);
  free(all);
  rig_free(&rig);
}

static void native_is_the_rule(void **unused) {
  (void)unused;
  for (size_t r = 0; r < COUNT(rank_counts); r++) {
    for (fp8core_dtype wire = FP8CORE_E4M3; wire <= FP8CORE_E5M2; wire++)
      run_ranks(rank_counts[r], 0, check_native, &wire);
  }
}

// --- Infinities and NaN ---

static void check_nonfinite(fp8comm_communicator *communicator, void *data) {
  const fp8comm_gradient_algorithm algorithm = *(const fp8comm_gradient_algorithm *)data;
  const int rank = fp8comm_communicator_rank(communicator), ranks = fp8comm_communicator_size(communicator);
  const int scaled = algorithm == FP8COMM_TWO_SHOT || algorithm == FP8COMM_NATIVE;
  const int64_t counts[] = {100, 200, 300};
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8core_context *context;
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  options.algorithm = algorithm;
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 3, counts, &options));
  float in[3][300], out[3][300];
  double mu = 1;
  for (int step = 0; step < 4; step++) {
    fp8core_tensor inputs[3], outputs[3];
    fp8comm_gradient_result result;
    fp8comm_gradient_statistics statistics;
    for (int i = 0; i < 3; i++) {
      fill(in[i], counts[i], rank, i, 0, 1);
      inputs[i] = vector(in[i], FP8CORE_FP32, counts[i]);
      outputs[i] = vector(out[i], FP8CORE_FP32, counts[i]);
    }
    const int poisoned = step == 1 || step == 2;
    if (poisoned && rank >= ranks / 2) in[1][7] = step == 1 ? NAN : -INFINITY;
    rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, inputs, outputs, &result));
    rank_check(communicator, result.nonfinite_tensors == poisoned, "step %d: %lld tensors", step,
               (long long)result.nonfinite_tensors);
    rank_check(communicator, result.nonfinite_rank == (poisoned && scaled ? ranks / 2 : -1), "step %d: rank %d", step,
               result.nonfinite_rank);
    rank_ok(communicator, fp8comm_gradient_get_statistics(reducer, 1, &statistics));
    rank_check(communicator, statistics.nonfinite == poisoned, "step %d: nonfinite is %d", step, statistics.nonfinite);
    rank_check(communicator, statistics.mu == mu, "step %d: mu is %g, expected %g", step, statistics.mu, mu);
    mu = statistics.next_mu;
    rank_check(communicator, !poisoned || mu == statistics.mu, "step %d: mu has moved", step);
    for (int i = 0; i < 300; i++) {
      rank_check(communicator, isfinite(out[2][i]), "step %d: another tensor is hurt", step);
      if (i < 200)
        rank_check(communicator, isnan(out[1][i]) == poisoned, "step %d: element %d is %g", step, i, (double)out[1][i]);
    }
  }
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
}

// Codes that were rounded up stand for more than FP32 has: no mean of theirs is a number.
static void check_beyond_range(fp8comm_communicator *communicator, void *data) {
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics;
  fp8comm_gradient_result result;
  gradient_rig rig;
  options.scaling = FP8COMM_SCALING_PRE;
  options.wire_dtype = FP8CORE_E5M2;
  options.delayed_scaling = *(const int *)data;
  rank_ok(communicator, rig_make(&rig, communicator, 1000, &options));
  for (int step = 0; step < 2; step++) {
    for (int64_t i = 0; i < rig.count; i++) rig.in[i] = i == 0 ? FLT_MAX : ldexpf(1.0f, 120 - (int)(i % 20));
    rank_ok(communicator, rig_step(&rig, &statistics, &result));
    rank_check(communicator, result.nonfinite_tensors == 1 && result.nonfinite_rank == -1 && statistics.nonfinite,
               "%lld tensors, rank %d", (long long)result.nonfinite_tensors, result.nonfinite_rank);
    for (int64_t i = 0; i < rig.count; i++)
      rank_check(communicator, isnan(rig.out[i]), "element %lld is %g", (long long)i, (double)rig.out[i]);
  }
  rig_free(&rig);
}

static void nonfinite(void **unused) {
  (void)unused;
  for (int with_delay = 0; with_delay < 2; with_delay++) run_ranks(3, 0, check_beyond_range, &with_delay);
  for (int algorithm = 0; algorithm < 4; algorithm++) {
    run_ranks(1, 0, check_nonfinite, &algorithm);
    run_ranks(3, 0, check_nonfinite, &algorithm);
    run_ranks(8, 0, check_nonfinite, &algorithm);
  }
}

// --- The outputs' range ---

#define RANGE_COUNT 200

typedef struct range_case {
  fp8comm_gradient_algorithm algorithm;
  fp8core_dtype wire;
  fp8core_dtype in;
  fp8core_dtype out;
  int delayed;
  int error_feedback;
  int owned;
  // The last rank's output is FP32.
  int mixed;
  int messages;
} range_case;

typedef enum range_step {
  RANGE_BELOW,
  RANGE_NEAR,
  RANGE_AT,
  RANGE_AT_AGAIN,
  RANGE_APART,
  RANGE_ABOVE,
  RANGE_AFTER
} range_step;

// The largest value of a rank, in those of the output's format.
static double range_value(range_step step, const range_case *one, int rank) {
  switch (step) {
  case RANGE_BELOW: return 0.6597;
  case RANGE_NEAR: return 0.9922;
  case RANGE_AT:
  case RANGE_AT_AGAIN: return 1;
  // Gradients are beyond the range, their mean is not.
  case RANGE_APART: return one->in == FP8CORE_FP32 && one->out == FP8CORE_FP16 && rank == 0 ? 1.3 : 0.3;
  case RANGE_ABOVE:
    return one->in != FP8CORE_FP32    ? 1
           : one->out == FP8CORE_BF16 ? (double)FLT_MAX / (double)fp8core_dtype_max(FP8CORE_BF16)
                                      : 1.0005;
  case RANGE_AFTER: break;
  }
  return 0.5;
}

// Whether the mean is beyond the output's range: 1: yes, 0: no, -1: the rounding of contributions may hide it.
static int range_is_left(range_step step, const range_case *one, int ranks) {
  // Errors that come back may leave FP32's range beside BF16's, or that of a format that the gradients do not have.
  if (one->error_feedback && (one->out == FP8CORE_BF16 || one->in == FP8CORE_FP32)) return -1;
  // Baselines' sums leave FP32's.
  if (one->algorithm >= FP8COMM_BASELINE_FP32 && one->out == FP8CORE_BF16 && ranks > 1) return -1;
  if (one->in != FP8CORE_FP32) return 0;
  if (step == RANGE_APART) return ranks == 1 && one->out == FP8CORE_FP16;
  if (step != RANGE_ABOVE) return 0;
  // Native sums are rounded over and over, and delayed scales do not make the amax a code.
  return one->algorithm == FP8COMM_NATIVE || one->delayed ? -1 : 1;
}

static void check_range_case(fp8comm_communicator *communicator, fp8core_context *context, const range_case *one) {
  const int ranks = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const int64_t count = RANGE_COUNT;
  const int owner = ranks - 1;
  const double most = (double)fp8core_dtype_max(one->out);
  const fp8core_dtype out_dtype = one->mixed && rank == ranks - 1 ? FP8CORE_FP32 : one->out;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  float values[RANGE_COUNT], results[RANGE_COUNT];
  options.algorithm = one->algorithm;
  options.wire_dtype = one->wire;
  options.delayed_scaling = one->delayed;
  options.error_feedback = one->error_feedback;
  options.owners = one->owned ? &owner : NULL;
  options.in_place = !one->messages;
  // No value saturates as it is cast.
  options.mu_max = 1;
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 1, &count, &options));
  double mu = 1;
  for (range_step step = RANGE_BELOW; step <= RANGE_AFTER; step++) {
    fp8comm_gradient_result result;
    fp8comm_gradient_statistics statistics;
    double mean = 0;
    for (int i = 0; i < ranks; i++) mean += range_value(step, one, i) * most / ranks;
    for (int i = 0; i < RANGE_COUNT; i++) {
      const float value = (float)(range_value(step, one, rank) * most * (i % 7 - 3) / 3);
      const uint32_t code = fp8core_encode(one->in, value, 1);
      memcpy((unsigned char *)values + (size_t)i * fp8core_dtype_size(one->in), &code, fp8core_dtype_size(one->in));
    }
    const fp8core_tensor in = vector(values, one->in, count);
    fp8core_tensor out = vector(one->in == out_dtype ? values : results, out_dtype, count);
    rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, &in, &out, &result));
    rank_ok(communicator, fp8comm_gradient_get_statistics(reducer, 0, &statistics));
    const int left = range_is_left(step, one, ranks);
#define RANGE_CHECK(condition, text, ...)                                                                              \
  rank_check(communicator, condition, "%s, wire %s, %s to %s, %d%d%d%d%d, step %d: " text,                             \
             fp8comm_gradient_algorithm_name(one->algorithm), fp8core_dtype_name(one->wire),                           \
             fp8core_dtype_name(one->in), fp8core_dtype_name(one->out), one->delayed, one->error_feedback, one->owned, \
             one->mixed, one->messages, (int)step, __VA_ARGS__)
    RANGE_CHECK(result.nonfinite_tensors == statistics.nonfinite && (result.nonfinite_rank == -1 || left < 0),
                "%lld tensors, first on rank %d", (long long)result.nonfinite_tensors, result.nonfinite_rank);
    RANGE_CHECK(left < 0 || statistics.nonfinite == left, "nonfinite is %d, expected %d", statistics.nonfinite, left);
    RANGE_CHECK(statistics.mu == mu, "mu is %g, expected %g", statistics.mu, mu);
    mu = statistics.next_mu;
    RANGE_CHECK(!statistics.nonfinite || mu == statistics.mu, "mu moves to %g", mu);
    // All ranks alike.
    int64_t told = statistics.nonfinite, all[8];
    rank_ok(communicator, fp8comm_all_gather(communicator, &told, all, 1, FP8COMM_INT64));
    for (int i = 0; i < ranks; i++) RANGE_CHECK(all[i] == told, "another result on rank %d", i);
    for (int i = 0; i < RANGE_COUNT && (!one->owned || rank == owner); i++) {
      uint32_t code = 0;
      memcpy(&code, (unsigned char *)out.data + (size_t)i * fp8core_dtype_size(out_dtype),
             fp8core_dtype_size(out_dtype));
      const double got = (double)fp8core_decode(out_dtype, code), expected = mean * (i % 7 - 3) / 3;
      // Native sums may saturate.
      const double within = one->algorithm == FP8COMM_NATIVE ? most : 0.26 * most;
      RANGE_CHECK(statistics.nonfinite ? isnan(got) : fabs(got - expected) <= within && isfinite(got),
                  "element %d is %g, expected %g", i, got, expected);
    }
  }
  fp8comm_gradient_destroy(&reducer);
}

static void check_range(fp8comm_communicator *communicator, void *unused) {
  (void)unused;
  fp8core_context_options context_options = fp8core_context_options_default();
  fp8core_context *context;
  context_options.threads = 1;
  rank_ok(communicator, fp8core_context_create(&context, &context_options));
  for (int bits = 0; bits < 1024; bits++) {
    const range_case one = {(fp8comm_gradient_algorithm)(bits & 3),
                            bits & 4 ? FP8CORE_E5M2 : FP8CORE_E4M3,
                            bits & 8    ? FP8CORE_FP32
                            : bits & 16 ? FP8CORE_FP16
                                        : FP8CORE_BF16,
                            bits & 16 ? FP8CORE_FP16 : FP8CORE_BF16,
                            bits >> 5 & 1,
                            bits >> 6 & 1,
                            bits >> 7 & 1,
                            bits >> 8 & 1,
                            bits >> 9 & 1};
    const int scaled = one.algorithm == FP8COMM_TWO_SHOT || one.algorithm == FP8COMM_NATIVE;
    // What the baselines do not have.
    if (!scaled && (one.wire != FP8CORE_E4M3 || one.delayed || one.error_feedback)) continue;
    if (one.mixed && (one.owned || fp8comm_communicator_size(communicator) == 1)) continue;
    check_range_case(communicator, context, &one);
  }
  fp8core_context_destroy(&context);
}

// FP16 and BF16 have less room than a rounded mean may want: never an infinity that nobody is told of.
static void range(void **unused) {
  (void)unused;
  for (int ranks = 1; ranks <= 4; ranks++) run_ranks(ranks, 0, check_range, NULL);
}

// The least that FP16 has no room for, of a mean that is exact.
static void check_least_beyond(fp8comm_communicator *communicator, void *data) {
  static const float values[] = {65503, 65504, 65519.996F, 65520, 65536, 1e30F};
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8core_context *context;
  const int64_t count = 1;
  (void)data;
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  options.algorithm = FP8COMM_BASELINE_FP32;
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 1, &count, &options));
  for (size_t i = 0; i < COUNT(values); i++) {
    float value = i % 2 ? -values[i] : values[i];
    uint16_t code;
    fp8comm_gradient_result result;
    const fp8core_tensor in = vector(&value, FP8CORE_FP32, 1);
    fp8core_tensor out = vector(&code, FP8CORE_FP16, 1);
    rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, &in, &out, &result));
    const int beyond = values[i] >= 65520;
    const float mean = fp8core_decode(FP8CORE_FP16, code);
    rank_check(communicator, result.nonfinite_tensors == beyond && (beyond ? isnan(mean) : fabsf(mean) == 65504),
               "%g becomes %g, %lld tensors", (double)value, (double)mean, (long long)result.nonfinite_tensors);
  }
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
}

static void least_beyond(void **unused) {
  (void)unused;
  run_ranks(1, 0, check_least_beyond, NULL);
  run_ranks(2, 0, check_least_beyond, NULL);
}

// --- Amaxes that are known ---

// Step 0: as if they were measured; 1: one that is too small; 2: one that hides a NaN; 3: one that is a NaN itself.
static void check_known_amax(fp8comm_communicator *communicator, void *data) {
  const fp8comm_gradient_algorithm algorithm = *(const fp8comm_gradient_algorithm *)data;
  enum { COUNT_OF = 3000 };
  const int rank = fp8comm_communicator_rank(communicator), ranks = fp8comm_communicator_size(communicator);
  const int64_t counts[] = {COUNT_OF, COUNT_OF};
  fp8comm_gradient_reducer *reducers[2];
  fp8core_context *context;
  float *in[2], *out[2][2], amax[2];
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  for (int i = 0; i < 2; i++) {
    fp8comm_gradient_options options = fp8comm_gradient_options_default();
    options.algorithm = algorithm;
    options.inputs_have_amax = i;
    rank_ok(communicator, fp8comm_gradient_create(&reducers[i], communicator, context, 2, counts, &options));
    in[i] = malloc(COUNT_OF * 4);
    for (int j = 0; j < 2; j++) out[i][j] = malloc(COUNT_OF * 4);
  }
  for (int step = 0; step < 4; step++) {
    fp8core_tensor inputs[2], outputs[2][2];
    fp8comm_gradient_statistics statistics[2];
    fp8comm_gradient_result result;
    for (int i = 0; i < 2; i++) {
      fill(in[i], COUNT_OF, rank, i, 1, 1);
      amax[i] = 0;
      for (int j = 0; j < COUNT_OF; j++) amax[i] = fmaxf(amax[i], fabsf(in[i][j]));
      inputs[i] = vector(in[i], FP8CORE_FP32, COUNT_OF);
      for (int run = 0; run < 2; run++) outputs[run][i] = vector(out[run][i], FP8CORE_FP32, COUNT_OF);
    }
    // Rank 1 has nothing to say of its first tensor.
    if (rank != 1) inputs[0].amax = &amax[0];
    inputs[1].amax = &amax[1];
    if (step == 1) amax[1] /= 8;
    if (step == 2 && rank == ranks - 1) in[1][17] = NAN;
    if (step == 3 && rank == ranks - 1) amax[1] = NAN;
    for (int run = 0; run < 2; run++) {
      rank_ok(communicator, fp8comm_gradient_all_reduce(reducers[run], inputs, outputs[run], &result));
      rank_ok(communicator, fp8comm_gradient_get_statistics(reducers[run], 1, &statistics[run]));
      const int expected = step == 2 || (step == 3 && run == 1);
      rank_check(communicator, result.nonfinite_tensors == expected, "step %d, run %d: %lld tensors", step, run,
                 (long long)result.nonfinite_tensors);
      rank_check(communicator, result.nonfinite_rank == (expected ? ranks - 1 : -1), "step %d, run %d: rank %d", step,
                 run, result.nonfinite_rank);
      rank_check(communicator, statistics[run].nonfinite == expected, "step %d, run %d", step, run);
      rank_check(communicator, !expected || statistics[run].next_mu == statistics[run].mu, "step %d: mu moves", step);
      for (int j = 0; j < COUNT_OF; j++)
        rank_check(communicator, isnan(out[run][1][j]) == expected, "step %d, run %d: element %d is %g", step, run, j,
                   (double)out[run][1][j]);
    }
    rank_check(communicator, memcmp(out[0][0], out[1][0], COUNT_OF * 4) == 0, "step %d: other bits", step);
    if (step == 0) rank_check(communicator, memcmp(out[0][1], out[1][1], COUNT_OF * 4) == 0, "other bits");
    rank_check(communicator, (statistics[1].saturated_in_cast > 0) == (step == 1), "step %d: %llu saturated", step,
               (unsigned long long)statistics[1].saturated_in_cast);
  }
  for (int i = 0; i < 2; i++) {
    fp8comm_gradient_destroy(&reducers[i]);
    free(in[i]);
    for (int j = 0; j < 2; j++) free(out[i][j]);
  }
  fp8core_context_destroy(&context);
}

static void known_amax(void **unused) {
  (void)unused;
  for (fp8comm_gradient_algorithm algorithm = FP8COMM_TWO_SHOT; algorithm <= FP8COMM_NATIVE; algorithm++) {
    run_ranks(2, 0, check_known_amax, &algorithm);
    run_ranks(5, 0, check_known_amax, &algorithm);
  }
}

// --- mu ---

// Gradients that agree: a sum of N of them is N times as large, so mu comes down to 1 / N and stays.
static void check_mu_falls(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int ranks = fp8comm_communicator_size(communicator);
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics;
  gradient_rig rig;
  options.algorithm = FP8COMM_NATIVE;
  rank_ok(communicator, rig_make(&rig, communicator, 2000, &options));
  fill(rig.in, rig.count, 0, 0, 1, 0);
  double mu = 1;
  for (int step = 0; step < 12; step++) {
    rank_ok(communicator, rig_step(&rig, &statistics, NULL));
    const double saturation =
      fp8comm_saturation_rule(statistics.saturated_in_cast, statistics.saturated_in_sum, rig.count, ranks);
    rank_check(communicator, statistics.mu == mu, "mu is %g, expected %g", statistics.mu, mu);
    mu = fp8comm_mu_rule(mu, saturation, 1e-5, 0.5, exp2(1e-3), options.mu_min, options.mu_max);
    rank_check(communicator, statistics.next_mu == mu, "next mu is %g, expected %g", statistics.next_mu, mu);
    // Sums that are rounded up on the way saturate a little beyond 1 / N.
    rank_check(communicator, step < 3 ? statistics.saturated_in_sum > 0 : step < 5 || statistics.saturated_in_sum == 0,
               "step %d: %llu saturated", step, (unsigned long long)statistics.saturated_in_sum);
  }
  rank_check(communicator, mu > 0x1p-5 && mu < 0.13, "mu is %g", mu);
  rig_free(&rig);
}

// Small values and few large ones: mu grows, so that fewer underflow, until the large ones count.
static void check_mu_grows(fp8comm_communicator *communicator, void *data) {
  (void)data;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics;
  gradient_rig rig;
  uint64_t flushed = UINT64_MAX;
  options.growth_steps = 1;
  options.saturation_threshold = 0.01;
  options.mu_max = 1024;
  rank_ok(communicator, rig_make(&rig, communicator, 10000, &options));
  for (int64_t i = 0; i < rig.count; i++) rig.in[i] = i % 200 == 0 ? 1.0f : ldexpf(1.0f, -8 - (int)(i % 14));
  for (int step = 0; step < 14; step++) {
    rank_ok(communicator, rig_step(&rig, &statistics, NULL));
    if (step <= 8) rank_check(communicator, statistics.mu == ldexp(1, step), "step %d: mu is %g", step, statistics.mu);
    if (step <= 4)
      rank_check(communicator, statistics.flushed_to_zero < flushed || flushed == 0, "step %d: %llu flushed", step,
                 (unsigned long long)statistics.flushed_to_zero);
    flushed = statistics.flushed_to_zero;
    // 0.5 % of values are 1, which saturate from mu = 2 on.
    if (step > 0)
      rank_check(communicator, statistics.saturated_in_cast >= 50 * (uint64_t)fp8comm_communicator_size(communicator),
                 "step %d: %llu saturated", step, (unsigned long long)statistics.saturated_in_cast);
  }
  rank_check(communicator, statistics.mu == 512 || statistics.mu == 256, "mu is %g", statistics.mu);
  // Zeros say nothing.
  const double mu = statistics.next_mu;
  memset(rig.in, 0, (size_t)rig.count * 4);
  rank_ok(communicator, rig_step(&rig, &statistics, NULL));
  rank_check(communicator, statistics.next_mu == mu && statistics.amax == 0, "mu has moved for zeros");
  for (int64_t i = 0; i < rig.count; i++) rank_check(communicator, rig.out[i] == 0, "the mean of zeros");
  rig_free(&rig);
}

static uint32_t crc32_of(const unsigned char *bytes, size_t count) {
  uint32_t crc = UINT32_C(0xffffffff);
  for (size_t i = 0; i < count; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xedb88320) : 0);
  }
  return ~crc;
}

static void check_state(fp8comm_communicator *communicator, void *data) {
  (void)data;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics, continued;
  gradient_rig one, other;
  rank_ok(communicator, rig_make(&one, communicator, 777, &options));
  rank_ok(communicator, rig_make(&other, communicator, 777, &options));
  fill(one.in, 777, fp8comm_communicator_rank(communicator), 0, 1, 1);
  memcpy(other.in, one.in, 777 * 4);
  for (int step = 0; step < 3; step++) rank_ok(communicator, rig_step(&one, &statistics, NULL));
  unsigned char saved[64];
  const size_t bytes = fp8comm_gradient_saved_bytes(one.reducer);
  rank_check(communicator, bytes == 52, "%zu bytes", bytes);
  rank_ok(communicator, fp8comm_gradient_save(one.reducer, saved, bytes));
  rank_refused(communicator, fp8comm_gradient_save(one.reducer, saved, bytes + 1), FP8CORE_ERROR_INVALID_ARGUMENT,
               "52");
  for (size_t i = 0; i < bytes; i++) {
    saved[i] ^= 1;
    rank_refused(communicator, fp8comm_gradient_load(other.reducer, saved, bytes), FP8CORE_ERROR_CORRUPT_DATA, "");
    saved[i] ^= 1;
    rank_refused(communicator, fp8comm_gradient_load(other.reducer, saved, i), FP8CORE_ERROR_CORRUPT_DATA, "");
  }
  rank_ok(communicator, fp8comm_gradient_load(other.reducer, saved, bytes));
  rank_ok(communicator, rig_step(&one, &statistics, NULL));
  rank_ok(communicator, rig_step(&other, &continued, NULL));
  rank_check(communicator, statistics.mu == continued.mu && statistics.mu > 1, "mu is %g, expected %g", continued.mu,
             statistics.mu);
  rank_check(communicator, memcmp(one.out, other.out, 777 * 4) == 0, "the continued run differs");
  // Version 1 had no amaxes.
  unsigned char old[44];
  memcpy(old, saved, 40);
  old[8] = 1;
  const uint32_t checksum = crc32_of(old, 40);
  for (int i = 0; i < 4; i++) old[40 + i] = (unsigned char)(checksum >> 8 * i);
  rank_ok(communicator, fp8comm_gradient_load(other.reducer, old, sizeof(old)));
  rank_ok(communicator, rig_step(&other, &continued, NULL));
  rank_check(communicator, statistics.mu == continued.mu, "mu is %g, expected %g", continued.mu, statistics.mu);
  rig_free(&one);
  rank_ok(communicator, rig_make(&one, communicator, 778, &options));
  rank_refused(communicator, fp8comm_gradient_load(one.reducer, saved, bytes), FP8CORE_ERROR_INVALID_ARGUMENT, "777");
  rig_free(&one);
  rig_free(&other);
}

static void mu(void **unused) {
  (void)unused;
  run_ranks(8, 0, check_mu_falls, NULL);
  run_ranks(1, 0, check_mu_grows, NULL);
  run_ranks(3, 0, check_mu_grows, NULL);
  run_ranks(2, 0, check_state, NULL);
}

// --- Signal-to-noise ratio at 64 ranks ---

#define SNR_ELEMENTS 8192
typedef struct snr_case {
  fp8comm_gradient_algorithm algorithm;
  fp8comm_gradient_scaling scaling;
  double shared;
  double own;
  // Of the last step.
  double snr_db;
  double once_db;
  double mu;
  double flushed;
  double saturated;
} snr_case;

static void check_snr(fp8comm_communicator *communicator, void *data) {
  snr_case *one = data;
  const int ranks = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics;
  gradient_rig rig;
  options.algorithm = one->algorithm;
  options.scaling = one->scaling;
  options.measure_snr = 1;
  rank_ok(communicator, rig_make(&rig, communicator, SNR_ELEMENTS, &options));
  fill(rig.in, rig.count, rank, 5, one->shared, one->own);
  // As long as mu needs to come down.
  for (int step = 0; step < (one->scaling == FP8COMM_SCALING_AUTO ? 10 : 1); step++)
    rank_ok(communicator, rig_step(&rig, &statistics, NULL));
  // What the call says, against the mean in FP64.
  if (rank == 0) {
    double *mean = calloc(SNR_ELEMENTS, sizeof(*mean));
    float *part = malloc(SNR_ELEMENTS * 4);
    double amax = 0, signal = 0, noise = 0, once = 0;
    for (int other = 0; other < ranks; other++) {
      fill(part, rig.count, other, 5, one->shared, one->own);
      for (int i = 0; i < SNR_ELEMENTS; i++) mean[i] += (double)part[i] / ranks;
    }
    for (int i = 0; i < SNR_ELEMENTS; i++) amax = fabs(mean[i]) > amax ? fabs(mean[i]) : amax;
    const float scale = fp8core_scale_from_amax(FP8CORE_E4M3, (float)amax, 0, 0, 1);
    for (int i = 0; i < SNR_ELEMENTS; i++) {
      const uint32_t code = fp8core_encode(FP8CORE_E4M3, (float)mean[i] * scale, 1);
      const double off = (double)fp8core_decode(FP8CORE_E4M3, code) / (double)scale - mean[i];
      signal += mean[i] * mean[i];
      once += off * off;
      noise += ((double)rig.out[i] - mean[i]) * ((double)rig.out[i] - mean[i]);
    }
    one->once_db = 10 * log10(signal / once);
    one->snr_db = statistics.snr_db;
    one->mu = statistics.mu;
    one->flushed = (double)statistics.flushed_to_zero / SNR_ELEMENTS / ranks;
    one->saturated =
      (double)statistics.saturated_in_sum / SNR_ELEMENTS + (double)statistics.saturated_in_cast / SNR_ELEMENTS / ranks;
    rank_check(communicator, fabs(statistics.snr_db - 10 * log10(signal / noise)) < 0.01, "snr_db is %g, expected %g",
               statistics.snr_db, 10 * log10(signal / noise));
    free(mean);
    free(part);
  }
  rig_free(&rig);
}

static void snr(void **unused) {
  (void)unused;
  static const double own[] = {0.5, 1, 4, 1};
  print_message("64 ranks, %d elements; dB after 10 steps (auto)\n", SNR_ELEMENTS);
  for (int k = 0; k < 4; k++) {
    snr_case cases[] = {
      {.algorithm = FP8COMM_TWO_SHOT, .scaling = FP8COMM_SCALING_AUTO},
      {.algorithm = FP8COMM_NATIVE, .scaling = FP8COMM_SCALING_AUTO},
      {.algorithm = FP8COMM_NATIVE, .scaling = FP8COMM_SCALING_PRE},
      {.algorithm = FP8COMM_NATIVE, .scaling = FP8COMM_SCALING_POST},
      {.algorithm = FP8COMM_BASELINE_BF16, .scaling = FP8COMM_SCALING_POST},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
      cases[i].shared = k < 3;
      cases[i].own = own[k];
      run_ranks(64, 0, check_snr, &cases[i]);
      print_message("shared %g, own %g: %-8s %-4s %6.2f (once: %.2f), mu %.4g, flushed %.3g %%, saturated %.3g %%\n",
                    cases[i].shared, cases[i].own, fp8comm_gradient_algorithm_name(cases[i].algorithm),
                    fp8comm_gradient_scaling_name(cases[i].scaling), cases[i].snr_db, cases[i].once_db, cases[i].mu,
                    100 * cases[i].flushed, 100 * cases[i].saturated);
    }
    // The best that native reaches with any scaling.
    const double native = fmax(cases[1].snr_db, fmax(cases[2].snr_db, cases[3].snr_db));
    assert_true(cases[0].snr_db > native + 6);
    // Without anything in common both roundings weigh the same, which is 3 dB.
    if (k < 2) assert_true(cases[0].snr_db > cases[0].once_db - 1);
    assert_true(cases[0].snr_db > cases[0].once_db - 3.3);
  }
}

// --- Means for owners ---

typedef struct owner_case {
  fp8comm_gradient_algorithm algorithm;
  fp8core_dtype wire;
  // 0: one after the other; 1: the last rank owns all; 2: the last owns nothing.
  int pattern;
  // 0: one; 1: of some bytes; 2: by hand.
  int buckets;
  int snr;
} owner_case;

typedef struct owner_run {
  fp8comm_gradient_reducer *reducer;
  fp8core_tensor out[TENSORS];
  fp8comm_gradient_result result;
} owner_run;

static int owner_of(int pattern, int64_t tensor, int ranks) {
  if (pattern == 1) return ranks - 1;
  const int owners = pattern == 2 && ranks > 1 ? ranks - 1 : ranks;
  return (int)((tensor * 5 + 1) % owners);
}

static void check_owners(fp8comm_communicator *communicator, void *data) {
  static const int by_hand[TENSORS] = {0, 0, 0, 1, 2, 2, 3, 4};
  const owner_case *one = data;
  const int ranks = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const int scaled = one->algorithm == FP8COMM_TWO_SHOT || one->algorithm == FP8COMM_NATIVE;
  const fp8core_dtype narrow = scaled ? one->wire : FP8CORE_FP32;
  const fp8core_dtype formats[] = {narrow, FP8CORE_FP32, FP8CORE_BF16, FP8CORE_FP16};
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8core_context *context;
  fp8core_tensor in[TENSORS];
  float scale_inverse[TENSORS];
  int owners[TENSORS];
  owner_run runs[2];
  int64_t total = 0;
  memset(runs, 0, sizeof(runs));
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  options.algorithm = one->algorithm;
  options.scaling = FP8COMM_SCALING_AUTO;
  options.mu_initial = 1.0 / ranks;
  options.wire_dtype = one->wire;
  options.measure_snr = one->snr;
  if (one->buckets == 1) options.bucket_bytes = 5000;
  if (one->buckets == 2) options.bucket_of = by_hand;
  for (int64_t i = 0; i < TENSORS; i++) {
    owners[i] = owner_of(one->pattern, i, ranks);
    total += shapes[i];
    in[i] = vector(malloc((size_t)shapes[i] * 4 + 4), FP8CORE_FP32, shapes[i]);
    free(inputs_of(rank, i, FP8CORE_FP32, in[i].data, &scale_inverse[i]));
    in[i].scale_inverse = &scale_inverse[i];
  }
  // Run 1 is an all-reduce of the same.
  for (int run = 0; run < 2; run++) {
    options.owners = run == 0 ? owners : NULL;
    rank_ok(communicator,
            fp8comm_gradient_create(&runs[run].reducer, communicator, context, TENSORS, shapes, &options));
    if (one->buckets == 2)
      rank_check(communicator, fp8comm_gradient_buckets(runs[run].reducer) == 5, "%lld buckets, expected 5",
                 (long long)fp8comm_gradient_buckets(runs[run].reducer));
    for (int64_t i = 0; i < TENSORS; i++) {
      const int mine = run == 1 || owners[i] == rank;
      runs[run].out[i] = vector(mine ? malloc((size_t)shapes[i] * 4 + 4) : NULL, formats[i % 4], shapes[i]);
      // Nothing of it may be looked at.
      if (!mine) memset(&runs[run].out[i], 0x5a, sizeof(runs[run].out[i]));
      if (!mine) runs[run].out[i].data = NULL;
    }
  }
  for (int step = 0; step < 2; step++) {
    // In the second, the first rank with an owner other than itself has an infinity in the large tensor.
    const int poisoned = step == 1;
    if (poisoned && rank == 0) ((float *)in[5].data)[70000] = -INFINITY;
    for (int run = 0; run < 2; run++)
      rank_ok(communicator, fp8comm_gradient_all_reduce(runs[run].reducer, in, runs[run].out, &runs[run].result));
    rank_check(communicator, runs[0].result.nonfinite_tensors == poisoned, "%lld tensors are not finite",
               (long long)runs[0].result.nonfinite_tensors);
    rank_check(communicator, runs[0].result.nonfinite_rank == (poisoned && scaled ? 0 : -1), "rank %d is not finite",
               runs[0].result.nonfinite_rank);
    // What travels is what an all-reduce sends on the way there, and records are the same. Over all ranks.
    int64_t sent[2] = {(int64_t)runs[0].result.bytes_sent, (int64_t)runs[1].result.bytes_sent};
    rank_ok(communicator, fp8comm_all_reduce(communicator, sent, sent, 2, FP8COMM_INT64, FP8COMM_SUM));
    const int64_t wire_bytes = one->algorithm == FP8COMM_BASELINE_FP32   ? 4
                               : one->algorithm == FP8COMM_BASELINE_BF16 ? 2
                                                                         : 1;
    rank_check(communicator, sent[1] - sent[0] == (ranks - 1) * total * wire_bytes,
               "%lld bytes sent, %lld by all-reduces, expected %lld less", (long long)sent[0], (long long)sent[1],
               (long long)((ranks - 1) * total * wire_bytes));
    for (int64_t i = 0; i < TENSORS; i++) {
      fp8comm_gradient_statistics statistics, reduced;
      rank_ok(communicator, fp8comm_gradient_get_statistics(runs[0].reducer, i, &statistics));
      rank_ok(communicator, fp8comm_gradient_get_statistics(runs[1].reducer, i, &reduced));
      const double told[] = {(double)statistics.nonfinite,
                             (double)statistics.amax,
                             (double)statistics.wire_scale,
                             (double)statistics.mean_scale,
                             statistics.mu,
                             statistics.next_mu,
                             statistics.snr_db == statistics.snr_db ? statistics.snr_db : -1,
                             (double)statistics.saturated_in_cast,
                             (double)statistics.flushed_to_zero};
      double all[COUNT(told) * 16];
      rank_ok(communicator, fp8comm_all_gather(communicator, told, all, (int64_t)COUNT(told), FP8COMM_FP64));
      for (int other = 0; other < ranks; other++)
        rank_check(communicator, memcmp(all + (size_t)other * COUNT(told), told, sizeof(told)) == 0,
                   "tensor %lld: other statistics on rank %d", (long long)i, other);
      rank_check(communicator,
                 statistics.nonfinite == (poisoned && i == 5) && statistics.wire_scale == reduced.wire_scale &&
                   statistics.saturated_in_cast == reduced.saturated_in_cast &&
                   statistics.flushed_to_zero == reduced.flushed_to_zero && statistics.elements == shapes[i],
                 "tensor %lld: other statistics than an all-reduce's", (long long)i);
      const fp8core_tensor *out = &runs[0].out[i];
      if (owners[i] != rank) {
        fp8core_tensor untouched;
        memset(&untouched, 0x5a, sizeof(untouched));
        untouched.data = NULL;
        rank_check(communicator, memcmp(out, &untouched, sizeof(untouched)) == 0, "outputs[%lld] was written",
                   (long long)i);
        continue;
      }
      const size_t element = fp8core_dtype_size(out->dtype);
      const int same = (one->algorithm == FP8COMM_TWO_SHOT && one->wire == FP8CORE_E4M3 && out->dtype == one->wire) ||
                       (one->algorithm == FP8COMM_NATIVE && ranks <= 2) ||
                       (one->algorithm == FP8COMM_BASELINE_FP32 && ranks <= 2) ||
                       (one->algorithm == FP8COMM_BASELINE_BF16 && ranks <= 2 && out->dtype == FP8CORE_BF16);
      if (same) {
        rank_check(communicator, memcmp(out->data, runs[1].out[i].data, (size_t)shapes[i] * element) == 0,
                   "%s: tensor %lld has other bits than an all-reduce's",
                   fp8comm_gradient_algorithm_name(one->algorithm), (long long)i);
        rank_check(communicator, !out->scale_inverse || *out->scale_inverse == *runs[1].out[i].scale_inverse,
                   "tensor %lld has another scale", (long long)i);
      }
      rank_check(communicator, (out->scale_inverse != NULL) == (scaled && out->dtype == one->wire), "scales");
      accuracy_case accuracy_of = {.algorithm = one->algorithm, .wire = one->wire, .out = out->dtype};
      const int once = !(scaled && out->dtype == one->wire) &&
                       !(one->algorithm == FP8COMM_BASELINE_BF16 && out->dtype == FP8CORE_BF16);
      float *values[16], unused;
      double of_ranks[16], signal = 0, noise = 0;
      for (int other = 0; other < ranks; other++) values[other] = inputs_of(other, i, FP8CORE_FP32, NULL, &unused);
      for (int64_t j = 0; j < shapes[i]; j++) {
        double mean = 0;
        uint32_t code = 0;
        memcpy(&code, (unsigned char *)out->data + (size_t)j * element, element);
        const double got =
          (double)fp8core_decode(out->dtype, code) * (out->scale_inverse ? (double)*out->scale_inverse : 1);
        if (poisoned && i == 5) {
          rank_check(communicator, isnan(got), "element %lld of the poisoned tensor is %g", (long long)j, got);
          continue;
        }
        for (int other = 0; other < ranks; other++) mean += of_ranks[other] = (double)values[other][j];
        mean /= ranks;
        const double most = bound(&accuracy_of, &statistics, ranks, of_ranks, mean, once);
        rank_check(communicator, fabs(got - mean) <= most,
                   "%s %s to %s: element %lld of tensor %lld is %g, expected %g within %g",
                   fp8comm_gradient_algorithm_name(one->algorithm), fp8core_dtype_name(one->wire),
                   fp8core_dtype_name(out->dtype), (long long)j, (long long)i, got, mean, most);
        signal += mean * mean;
        noise += (got - mean) * (got - mean);
      }
      for (int other = 0; other < ranks; other++) free(values[other]);
      // Of formats to which nothing more was rounded.
      if (one->snr && scaled && shapes[i] > 1 && !statistics.nonfinite && i % 4 < 2)
        rank_check(communicator, fabs(statistics.snr_db - 10 * log10(signal / noise)) < 0.05,
                   "snr_db of tensor %lld is %g, expected %g", (long long)i, statistics.snr_db,
                   10 * log10(signal / noise));
    }
  }
  for (int run = 0; run < 2; run++) {
    for (int64_t i = 0; i < TENSORS; i++) free(runs[run].out[i].data);
    fp8comm_gradient_destroy(&runs[run].reducer);
  }
  for (int64_t i = 0; i < TENSORS; i++) free(in[i].data);
  fp8core_context_destroy(&context);
}

// Ranks that do not agree learn of it at creation: on sizes, owners, whether there are any, buckets.
static void check_disagreement(fp8comm_communicator *communicator, void *data) {
  const int subject = *(const int *)data;
  const int last = fp8comm_communicator_rank(communicator) == fp8comm_communicator_size(communicator) - 1;
  const int64_t sizes[] = {10, 20 + (subject == 0 && last), 30};
  const int owner[] = {0, subject == 1 && last, 0};
  const int bucket_of[] = {0, last, 1};
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8core_context *context;
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  if (subject == 1 || (subject == 2 && last)) options.owners = owner;
  if (subject == 3) options.bucket_of = bucket_of;
  rank_refused(communicator, fp8comm_gradient_create(&reducer, communicator, context, 3, sizes, &options),
               FP8CORE_ERROR_INVALID_ARGUMENT, "gradient_create of 3 tensors");
  fp8core_context_destroy(&context);
}

// Ranks that have loaded other states.
static void check_other_state(fp8comm_communicator *communicator, void *data) {
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_statistics statistics;
  gradient_rig rig;
  unsigned char saved[52];
  options.delayed_scaling = *(const int *)data;
  rank_ok(communicator, rig_make(&rig, communicator, 1000, &options));
  fill(rig.in, rig.count, 0, 0, 1, 0);
  rank_ok(communicator, rig_step(&rig, &statistics, NULL));
  rank_ok(communicator, fp8comm_gradient_save(rig.reducer, saved, sizeof(saved)));
  for (int64_t i = 0; i < rig.count; i++) rig.in[i] *= 1.5f;
  rank_ok(communicator, rig_step(&rig, &statistics, NULL));
  if (fp8comm_communicator_rank(communicator) == 1)
    rank_ok(communicator, fp8comm_gradient_load(rig.reducer, saved, sizeof(saved)));
  rank_refused(communicator, rig_step(&rig, &statistics, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "of the reducer and state with digest");
  rig_free(&rig);
}

// A communicator that ends before the reducers on it: a fault of the caller's that scripting languages make.
static void check_early_end(fp8comm_communicator *communicator, void *data) {
  fp8comm_communicator *half;
  gradient_rig rig;
  (void)data;
  rank_ok(communicator, fp8comm_communicator_split(communicator, 0, 0, &half));
  rank_ok(communicator, rig_make(&rig, half, 1000, NULL));
  fp8comm_communicator_destroy(&half);
  rig_free(&rig);
}

static void disagreement(void **unused) {
  (void)unused;
  for (int with_delay = 0; with_delay < 2; with_delay++) run_ranks(3, 0, check_other_state, &with_delay);
  run_ranks(3, 0, check_early_end, NULL);
  for (int subject = 0; subject < 4; subject++) {
    run_ranks(2, 0, check_disagreement, &subject);
    run_ranks(5, 0, check_disagreement, &subject);
  }
}

static void owners(void **unused) {
  (void)unused;
  static const int counts[] = {1, 2, 3, 8};
  for (size_t r = 0; r < COUNT(counts); r++) {
    for (int i = 0; i < 15; i++) {
      owner_case one = {(fp8comm_gradient_algorithm)(i % 5 % 4), i % 5 == 4 ? FP8CORE_E5M2 : FP8CORE_E4M3, i / 5,
                        (i / 5 + i) % 3, i / 5 == 1};
      run_ranks(counts[r], 0, check_owners, &one);
    }
  }
}

// --- Error feedback ---

typedef struct feedback_case {
  fp8comm_gradient_algorithm algorithm;
  int owned;
  // Steps after which the sums are compared.
  int steps;
  // How far the sum of means is off, as a share of one step's largest value: without feedback, with it.
  double off[2];
} feedback_case;

// The same gradients, but for a little noise, step after step, with a coarse wire: without feedback every step is off
// by the same, with it the sum stays within a step's error. One step has a NaN and must leave no trace.
static void check_feedback(fp8comm_communicator *communicator, void *data) {
  enum { ROWS = 7, COLUMNS = 300, STRIDE = 310, ELEMENTS = ROWS * COLUMNS };
  feedback_case *one = data;
  const int rank = fp8comm_communicator_rank(communicator), ranks = fp8comm_communicator_size(communicator);
  const int64_t shape[] = {ROWS, COLUMNS}, sizes[] = {ELEMENTS, 0, 100};
  const int owner[] = {ranks - 1, 0, 0};
  float *in = calloc((size_t)ROWS * STRIDE, 4), *small = calloc(100, 4), *base = malloc(ELEMENTS * 4);
  float small_out[100];
  for (int feedback = 0; feedback < 2; feedback++) {
    fp8comm_gradient_options options = fp8comm_gradient_options_default();
    fp8comm_gradient_reducer *reducer;
    fp8core_context *context;
    unsigned char codes[ELEMENTS];
    double *sums = calloc(ELEMENTS, sizeof(*sums)), *expected = calloc(ELEMENTS, sizeof(*expected)), amax = 0;
    options.algorithm = one->algorithm;
    options.wire_dtype = FP8CORE_E5M2;
    options.error_feedback = feedback;
    options.mu_initial = options.mu_max = 1.0 / ranks;
    if (one->owned) options.owners = owner;
    rank_ok(communicator, fp8core_context_create(&context, NULL));
    rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 3, sizes, &options));
    for (int step = 0; step <= one->steps; step++) {
      const int poisoned = step == one->steps / 2;
      fp8comm_gradient_result result;
      fp8core_tensor inputs[3], outputs[3];
      for (int other = 0; other < ranks; other++) {
        test_random noise = {(uint64_t)(step * 100 + other + 1)};
        fill(base, ELEMENTS, other, 9, 1, 1);
        for (int i = 0; i < ELEMENTS; i++) {
          const float value = base[i] + (float)(1e-5 * test_random_normal(&noise));
          if (!poisoned) expected[i] += (double)value / ranks;
          if (other == rank) in[i / COLUMNS * STRIDE + i % COLUMNS] = value;
          amax = fmax(amax, fabs((double)value));
        }
      }
      if (poisoned && rank == 0) in[5] = NAN;
      inputs[0] = fp8core_tensor_create(in, FP8CORE_FP32, 2, shape);
      inputs[0].row_stride = STRIDE;
      outputs[0] = vector(codes, FP8CORE_E5M2, ELEMENTS);
      inputs[1] = vector(NULL, FP8CORE_FP32, 0);
      outputs[1] = vector(NULL, FP8CORE_FP32, 0);
      inputs[2] = vector(small, FP8CORE_FP32, 100);
      outputs[2] = vector(small_out, FP8CORE_FP32, 100);
      rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, inputs, outputs, &result));
      rank_check(communicator, result.nonfinite_tensors == poisoned, "step %d: %lld tensors are not finite", step,
                 (long long)result.nonfinite_tensors);
      if (poisoned || (one->owned && rank != owner[0])) continue;
      for (int i = 0; i < ELEMENTS; i++)
        sums[i] += (double)fp8core_decode(FP8CORE_E5M2, codes[i]) * (double)*outputs[0].scale_inverse;
    }
    if (!one->owned || rank == owner[0]) {
      double most = 0;
      for (int i = 0; i < ELEMENTS; i++) most = fmax(most, fabs(sums[i] - expected[i]));
      if (rank == ranks - 1) one->off[feedback] = most / amax;
    }
    // Errors are each rank's own, and do not get into a saved state; loading one forgets them.
    if (feedback) {
      const size_t bytes = fp8comm_gradient_saved_bytes(reducer);
      unsigned char *state = malloc(bytes);
      rank_ok(communicator, fp8comm_gradient_save(reducer, state, bytes));
      fp8comm_gradient_reducer *fresh;
      unsigned char again[ELEMENTS];
      fp8core_tensor inputs[3], outputs[3];
      rank_ok(communicator, fp8comm_gradient_create(&fresh, communicator, context, 3, sizes, &options));
      fp8comm_gradient_reducer *const both[] = {reducer, fresh};
      for (int i = 0; i < 2; i++) {
        rank_ok(communicator, fp8comm_gradient_load(both[i], state, bytes));
        inputs[0] = fp8core_tensor_create(in, FP8CORE_FP32, 2, shape);
        inputs[0].row_stride = STRIDE;
        outputs[0] = vector(i == 0 ? codes : again, FP8CORE_E5M2, ELEMENTS);
        inputs[1] = vector(NULL, FP8CORE_FP32, 0);
        outputs[1] = vector(NULL, FP8CORE_FP32, 0);
        inputs[2] = vector(small, FP8CORE_FP32, 100);
        outputs[2] = vector(small_out, FP8CORE_FP32, 100);
        rank_ok(communicator, fp8comm_gradient_all_reduce(both[i], inputs, outputs, NULL));
      }
      rank_check(communicator, (one->owned && rank != owner[0]) || memcmp(codes, again, ELEMENTS) == 0,
                 "a loaded state remembers errors");
      fp8comm_gradient_destroy(&fresh);
      free(state);
    }
    fp8comm_gradient_destroy(&reducer);
    fp8core_context_destroy(&context);
    free(sums);
    free(expected);
  }
  free(in);
  free(small);
  free(base);
}

static void error_feedback(void **unused) {
  (void)unused;
  static const int counts[] = {1, 3, 8};
  for (size_t r = 0; r < COUNT(counts); r++) {
    for (int owned = 0; owned < 2; owned++) {
      feedback_case one = {FP8COMM_TWO_SHOT, owned, 100, {0, 0}};
      run_ranks(counts[r], 0, check_feedback, &one);
      print_message("%d ranks%s, 100 steps in E5M2: off by %.3f of the largest value, with feedback %.3f\n", counts[r],
                    owned ? ", owners" : "", one.off[0], one.off[1]);
      assert_true(one.off[0] > 1);
      // A step's own error: half of E5M2's steps for each rounding, which is 1/8 at the most for each.
      assert_true(one.off[1] < 0.3);
    }
  }
}

// --- Row strides, and threads ---

// One matrix with gaps between its rows, on two threads, beside the same without, on one: the same bits, and the gaps
// stay as they were.
static void check_strides(fp8comm_communicator *communicator, void *data) {
  enum { ROWS = 1201, COLUMNS = 977, STRIDE = 1000 };
  const int owned = *(const int *)data;
  const int rank = fp8comm_communicator_rank(communicator), ranks = fp8comm_communicator_size(communicator);
  const int64_t count = (int64_t)ROWS * COLUMNS, shape[] = {ROWS, COLUMNS};
  const int owner = ranks - 1;
  const fp8core_dtype formats[] = {FP8CORE_E4M3, FP8CORE_FP32, FP8CORE_BF16};
  float *wide = malloc((size_t)ROWS * STRIDE * 4), *dense = malloc((size_t)count * 4);
  unsigned char *wide_out = malloc((size_t)ROWS * STRIDE * 4), *dense_out = malloc((size_t)count * 4);
  fill(dense, count, rank, 3, 1, 1);
  for (int i = 0; i < ROWS; i++) memcpy(wide + (ptrdiff_t)i * STRIDE, dense + (ptrdiff_t)i * COLUMNS, COLUMNS * 4);
  for (size_t f = 0; f < COUNT(formats); f++) {
    const size_t element = fp8core_dtype_size(formats[f]);
    float amax[2] = {0, 0};
    memset(wide_out, 0x5a, (size_t)ROWS * STRIDE * 4);
    for (int run = 0; run < 2; run++) {
      fp8core_context_options context_options = fp8core_context_options_default();
      fp8comm_gradient_options options = fp8comm_gradient_options_default();
      fp8comm_gradient_reducer *reducer;
      fp8core_context *context;
      context_options.threads = 1 + run;
      if (owned) options.owners = &owner;
      rank_ok(communicator, fp8core_context_create(&context, &context_options));
      rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, 1, &count, &options));
      fp8core_tensor in = vector(dense, FP8CORE_FP32, count), out = vector(dense_out, formats[f], count);
      if (run == 1) {
        in = fp8core_tensor_create(wide, FP8CORE_FP32, 2, shape);
        out = fp8core_tensor_create(wide_out, formats[f], 2, shape);
        in.row_stride = out.row_stride = STRIDE;
      }
      out.amax = &amax[run];
      rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, &in, &out, NULL));
      fp8comm_gradient_destroy(&reducer);
      fp8core_context_destroy(&context);
    }
    if (owned && rank != owner) continue;
    rank_check(communicator, amax[0] == amax[1] && amax[0] > 0, "amax is %g, expected %g", (double)amax[1],
               (double)amax[0]);
    for (size_t i = 0; i < ROWS; i++) {
      rank_check(communicator,
                 memcmp(wide_out + i * STRIDE * element, dense_out + i * COLUMNS * element, COLUMNS * element) == 0,
                 "%s: row %zu differs", fp8core_dtype_name(formats[f]), i);
      for (size_t j = COLUMNS * element; j < STRIDE * element; j++)
        rank_check(communicator, wide_out[i * STRIDE * element + j] == 0x5a, "%s: the gap after row %zu was written",
                   fp8core_dtype_name(formats[f]), i);
    }
  }
  free(wide);
  free(dense);
  free(wide_out);
  free(dense_out);
}

static void strides(void **unused) {
  (void)unused;
  for (int owned = 0; owned < 2; owned++) {
    run_ranks(1, 0, check_strides, &owned);
    run_ranks(3, 0, check_strides, &owned);
    run_ranks(6, 0, check_strides, &owned);
  }
}

// --- Many tensors, one large one, buckets by hand ---

static void check_many(fp8comm_communicator *communicator, void *data) {
  (void)data;
  enum { MANY = 4000 };
  const int rank = fp8comm_communicator_rank(communicator), ranks = fp8comm_communicator_size(communicator);
  int64_t *counts = malloc(MANY * sizeof(*counts)), total = 0;
  fp8core_tensor *in = malloc(MANY * sizeof(*in)), *out = malloc(MANY * sizeof(*out));
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8comm_gradient_result result;
  fp8core_context *context;
  for (int i = 0; i < MANY; i++) counts[i] = i == 1234 ? (INT64_C(1) << 20) + 5 : i % 9;
  for (int i = 0; i < MANY; i++) total += counts[i];
  float *values = malloc((size_t)total * 4);
  unsigned char *codes = malloc((size_t)total), *early = malloc((size_t)total), *waited = calloc(1, (size_t)total);
  for (int64_t i = 0; i < total; i++) values[i] = (float)(i % 5 - 2 + rank);
  for (int64_t i = 0, before = 0; i < MANY; before += counts[i++]) {
    in[i] = vector(values + before, FP8CORE_FP32, counts[i]);
    out[i] = vector(codes + before, FP8CORE_E4M3, counts[i]);
  }
  options.bucket_bytes = 3000;
  options.buckets_in_flight = 3;
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  rank_ok(communicator, fp8comm_gradient_create(&reducer, communicator, context, MANY, counts, &options));
  const int64_t buckets = fp8comm_gradient_buckets(reducer);
  rank_check(communicator, buckets >= 6 && buckets <= 12, "%lld buckets", (long long)buckets);
  int64_t covered = 0;
  for (int step = 0; step < 2; step++) {
    // From the last to the first, as gradients come.
    for (int64_t i = buckets - 1; i >= 0; i--) {
      int64_t first, count;
      rank_ok(communicator, fp8comm_gradient_bucket(reducer, i, &first, &count));
      covered += count;
      rank_refused(communicator, fp8comm_gradient_wait_bucket(reducer, i), FP8CORE_ERROR_INVALID_ARGUMENT,
                   "was not started");
      rank_ok(communicator, fp8comm_gradient_start(reducer, i, in, out));
      rank_refused(communicator, fp8comm_gradient_start(reducer, i, in, out), FP8CORE_ERROR_INVALID_ARGUMENT,
                   "already");
      rank_ok(communicator, fp8comm_gradient_progress(reducer, NULL));
      // Of two in flight the one that was started last, and one that is done; its means are there.
      if (step == 1 && i % 2 == 0) {
        rank_ok(communicator, fp8comm_gradient_wait_bucket(reducer, i));
        rank_ok(communicator, fp8comm_gradient_wait_bucket(reducer, i));
        unsigned char *from = out[first].data, *end = (unsigned char *)out[first + count - 1].data;
        end += counts[first + count - 1];
        memcpy(early + (from - codes), from, (size_t)(end - from));
        memset(waited + (from - codes), 1, (size_t)(end - from));
      }
    }
    rank_ok(communicator, fp8comm_gradient_wait(reducer, &result));
  }
  for (int64_t i = 0; i < total; i++) {
    rank_check(communicator, !waited[i] || early[i] == codes[i],
               "element %lld has changed after its bucket was waited for", (long long)i);
  }
  rank_check(communicator, covered == 2 * MANY, "%lld tensors in buckets", (long long)covered);
  // One byte each way for an element, and records.
  const double most = 2.0 * (double)total * (ranks - 1) / ranks + 64.0 * ranks * MANY * 2;
  rank_check(communicator, (double)result.bytes_sent <= most, "%llu bytes sent", (unsigned long long)result.bytes_sent);
  for (int64_t i = 0; i < MANY; i++) {
    for (int64_t j = 0; j < counts[i]; j++) {
      const int64_t element = (float *)in[i].data - values + j;
      const double mean = (double)(element % 5 - 2) + (ranks - 1) / 2.0;
      const double got = (double)fp8core_decode(FP8CORE_E4M3, codes[element]) * (double)*out[i].scale_inverse;
      rank_check(communicator, fabs(got - mean) <= 0.13 * (fabs(mean) + ranks), "element %lld is %g, expected %g",
                 (long long)element, got, mean);
    }
  }
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
  free(counts);
  free(in);
  free(out);
  free(values);
  free(codes);
  free(early);
  free(waited);
}

static void many(void **unused) {
  (void)unused;
  run_ranks(1, 0, check_many, NULL);
  run_ranks(3, 0, check_many, NULL);
}

// --- Delayed scaling ---

typedef struct delayed_case {
  fp8core_dtype wire;
  int owned;
  int known;
} delayed_case;

enum { DELAYED_TENSORS = 4, DELAYED_STEPS = 14 };
static const int64_t delayed_shapes[DELAYED_TENSORS] = {70000, 0, 513, 3000};
// Of a step's values. That of the third tensor stays, so that the others alone decide whether a bucket is reduced
// twice.
// Twice the last two is more than FP32 has.
static const float delayed_sizes[DELAYED_STEPS] = {1, 1.5f, 1.2f, 5, 4, 0.1f, 0.19f, 0.2f, 0, 0, 1, 1.1f, 3e37f, 3e37f};
// A NaN among the values of the first tensor; and one that the last tensor's known amax claims.
enum { DELAYED_NAN = 7, DELAYED_NAN_AMAX = 4 };

static void fill_delayed(float *values, int64_t tensor, int step, int rank, int ranks) {
  fill(values, delayed_shapes[tensor], rank, tensor, 1, 1);
  for (int64_t i = 0; i < delayed_shapes[tensor]; i++) values[i] *= tensor == 2 ? 1.0f : delayed_sizes[step];
  if (step == DELAYED_NAN && tensor == 0 && rank == ranks - 1) values[69999] = NAN;
}

// How the reducers differ: in nothing that results could depend on.
typedef enum delayed_way {
  TRIES,
  TRIES_WITH_MESSAGES,
  ONE_BUCKET_A_TENSOR,
  MEASURES_FIRST,
  RESUMED,
  DELAYED_WAYS
} delayed_way;

static void check_delayed(fp8comm_communicator *communicator, void *data) {
  const delayed_case *one = data;
  const int ranks = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  static const int apart[DELAYED_TENSORS] = {0, 1, 2, 3};
  const float most = one->wire == FP8CORE_E4M3 ? 448 : 57344;
  fp8comm_gradient_reducer *reducers[DELAYED_WAYS];
  fp8core_context *context;
  fp8core_tensor in[DELAYED_TENSORS], out[DELAYED_WAYS][DELAYED_TENSORS];
  float amaxes[DELAYED_TENSORS], last[DELAYED_TENSORS], before[DELAYED_TENSORS];
  int owners[DELAYED_TENSORS], steps_as_expected = 0;
  unsigned char *saved = NULL;
  rank_ok(communicator, fp8core_context_create(&context, NULL));
  for (int i = 0; i < DELAYED_TENSORS; i++) {
    owners[i] = i % ranks;
    last[i] = -1;
    in[i] = vector(malloc((size_t)delayed_shapes[i] * 4 + 4), FP8CORE_FP32, delayed_shapes[i]);
    for (int way = 0; way < DELAYED_WAYS; way++) {
      const fp8core_dtype formats[] = {one->wire, FP8CORE_FP32, FP8CORE_BF16, FP8CORE_FP32};
      out[way][i] = vector(calloc((size_t)delayed_shapes[i] + 1, 4), formats[i], delayed_shapes[i]);
    }
  }
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  options.delayed_scaling = 1;
  options.wire_dtype = one->wire;
  options.inputs_have_amax = one->known;
  for (int way = 0; way < DELAYED_WAYS; way++) {
    fp8comm_gradient_options differing = options;
    differing.in_place = way != TRIES_WITH_MESSAGES;
    differing.bucket_of = way == ONE_BUCKET_A_TENSOR ? apart : NULL;
    differing.measure_snr = way == MEASURES_FIRST;
    differing.owners = one->owned ? owners : NULL;
    rank_ok(communicator, fp8comm_gradient_create(&reducers[way], communicator, context, DELAYED_TENSORS,
                                                  delayed_shapes, &differing));
  }
  // What is read in place needs no room here; of owners, where they own anything.
  const size_t memory = fp8comm_gradient_memory_bytes(reducers[TRIES]),
               with_messages = fp8comm_gradient_memory_bytes(reducers[TRIES_WITH_MESSAGES]);
  rank_check(communicator,
             one->owned  ? memory <= with_messages
             : ranks > 1 ? memory < with_messages
                         : memory == with_messages,
             "%zu bytes in place, %zu with messages", memory, with_messages);
  for (int step = 0; step < DELAYED_STEPS; step++) {
    fp8comm_gradient_result results[DELAYED_WAYS];
    for (int i = 0; i < DELAYED_TENSORS; i++) {
      float *values = in[i].data;
      fill_delayed(values, i, step, rank, ranks);
      amaxes[i] = before[i] = 0;
      for (int64_t j = 0; j < delayed_shapes[i]; j++) {
        if (isfinite(values[j])) amaxes[i] = fmaxf(amaxes[i], fabsf(values[j]));
      }
      in[i].amax = &amaxes[i];
      if (step == DELAYED_NAN_AMAX && one->known && i == 3 && rank == ranks - 1) amaxes[i] = NAN;
      rank_ok(communicator, fp8comm_all_reduce(communicator, &amaxes[i], &before[i], 1, FP8COMM_FP32, FP8COMM_MAX));
    }
    // What a step leaves behind is what the next needs.
    const size_t bytes = fp8comm_gradient_saved_bytes(reducers[TRIES]);
    if (!saved) saved = malloc(bytes);
    if (step > 0) {
      rank_ok(communicator, fp8comm_gradient_save(reducers[TRIES], saved, bytes));
      fp8comm_gradient_options same = options;
      same.owners = one->owned ? owners : NULL;
      fp8comm_gradient_destroy(&reducers[RESUMED]);
      rank_ok(communicator, fp8comm_gradient_create(&reducers[RESUMED], communicator, context, DELAYED_TENSORS,
                                                    delayed_shapes, &same));
      rank_ok(communicator, fp8comm_gradient_load(reducers[RESUMED], saved, bytes));
    }
    for (int way = 0; way < DELAYED_WAYS; way++)
      rank_ok(communicator, fp8comm_gradient_all_reduce(reducers[way], in, out[way], &results[way]));
    int as_expected = step > 0;
    for (int i = 0; i < DELAYED_TENSORS; i++) {
      const int poisoned = (step == DELAYED_NAN && i == 0) || (step == DELAYED_NAN_AMAX && one->known && i == 3);
      fp8comm_gradient_statistics first;
      rank_ok(communicator, fp8comm_gradient_get_statistics(reducers[TRIES], i, &first));
      for (int way = 1; way < DELAYED_WAYS; way++) {
        fp8comm_gradient_statistics other;
        rank_ok(communicator, fp8comm_gradient_get_statistics(reducers[way], i, &other));
        rank_check(communicator,
                   (poisoned || memcmp(&other.amax, &first.amax, 4) == 0) && other.wire_scale == first.wire_scale &&
                     other.mean_scale == first.mean_scale && other.next_mu == first.next_mu &&
                     other.saturated_in_cast == first.saturated_in_cast &&
                     other.flushed_to_zero == first.flushed_to_zero && other.nonfinite == first.nonfinite,
                   "step %d, way %d: other statistics of tensor %d", step, way, i);
        if (one->owned && owners[i] != rank) continue;
        rank_check(communicator,
                   memcmp(out[way][i].data, out[0][i].data,
                          (size_t)delayed_shapes[i] * fp8core_dtype_size(out[0][i].dtype)) == 0,
                   "step %d, way %d: other bits in tensor %d", step, way, i);
      }
      rank_check(communicator, first.nonfinite == poisoned, "step %d: tensor %d is %d", step, i, first.nonfinite);
      if (delayed_shapes[i] == 0 || poisoned) {
        as_expected = as_expected && !poisoned;
        continue;
      }
      rank_check(communicator, step < 12 || first.saturated_in_cast == 0, "step %d: %llu values saturate", step,
                 (unsigned long long)first.saturated_in_cast);
      const float expected = fp8comm_expected_amax_rule(last[i]);
      const int fits = fp8comm_expected_fits_rule(expected, before[i]);
      as_expected = as_expected && fits;
      rank_check(communicator, first.amax == before[i], "step %d: amax of tensor %d is %g, expected %g", step, i,
                 (double)first.amax, (double)before[i]);
      const float right = fp8comm_wire_scale_rule(one->wire, fits ? expected : before[i], first.mu, ranks);
      rank_check(communicator, first.wire_scale == right, "step %d: wire scale of tensor %d is %g, expected %g", step,
                 i, (double)first.wire_scale, (double)right);
      rank_check(communicator, first.mu > 1.02 || first.saturated_in_cast == 0, "step %d: %llu of tensor %d saturate",
                 step, (unsigned long long)first.saturated_in_cast, i);
      last[i] = before[i];
      if (i > 0 || one->owned) continue;
      // The mean's largest value lies in the last three octaves of its format.
      float largest = 0;
      for (int64_t j = 0; j < delayed_shapes[0]; j++)
        largest = fmaxf(largest, fabsf(fp8core_decode(one->wire, ((unsigned char *)out[0][0].data)[j])));
      rank_check(communicator, before[0] == 0 || (largest <= most && largest >= most / 8.6f),
                 "step %d: the largest code stands for %g", step, (double)largest);
    }
    for (int way = 1; way < DELAYED_WAYS; way++) {
      rank_check(communicator,
                 results[way].nonfinite_tensors == results[TRIES].nonfinite_tensors &&
                   results[way].nonfinite_rank == results[TRIES].nonfinite_rank,
                 "step %d, way %d: %lld tensors, first on rank %d", step, way,
                 (long long)results[way].nonfinite_tensors, results[way].nonfinite_rank);
    }
    const int anything = step == DELAYED_NAN || (step == DELAYED_NAN_AMAX && one->known);
    rank_check(communicator, results[TRIES].nonfinite_rank == (anything ? ranks - 1 : -1), "step %d: rank %d", step,
               results[TRIES].nonfinite_rank);
    // Means are as expected where gradients are. In place or not: as many bytes. What is tried in vain costs once more.
    rank_check(communicator, results[TRIES].bytes_sent == results[TRIES_WITH_MESSAGES].bytes_sent,
               "step %d: %llu bytes read in place, %llu sent", step, (unsigned long long)results[TRIES].bytes_sent,
               (unsigned long long)results[TRIES_WITH_MESSAGES].bytes_sent);
    fp8comm_gradient_statistics large;
    rank_ok(communicator, fp8comm_gradient_get_statistics(reducers[TRIES], 0, &large));
    // Many contributions to an owner are added up as they come, and nothing is tried.
    const int tries = step > 0 && (!one->owned || ranks <= 5);
    const uint64_t passes = (uint64_t)(tries && !as_expected ? 2 : 1) + (one->owned ? 0 : 1);
    rank_check(communicator, large.bytes_sent == 70000 * passes * (uint64_t)(ranks - 1),
               "step %d: %llu bytes of the first tensor, expected %llu passes", step,
               (unsigned long long)large.bytes_sent, (unsigned long long)passes);
    steps_as_expected += as_expected;
  }
  rank_check(communicator, steps_as_expected == (one->known ? 6 : 7), "%d steps were as expected", steps_as_expected);
  for (int way = 0; way < DELAYED_WAYS; way++) {
    fp8comm_gradient_destroy(&reducers[way]);
    for (int i = 0; i < DELAYED_TENSORS; i++) free(out[way][i].data);
  }
  for (int i = 0; i < DELAYED_TENSORS; i++) free(in[i].data);
  free(saved);
  fp8core_context_destroy(&context);
}

static void delayed(void **unused) {
  (void)unused;
  static const delayed_case cases[] = {
    {FP8CORE_E4M3, 0, 0}, {FP8CORE_E5M2, 0, 0}, {FP8CORE_E4M3, 1, 0}, {FP8CORE_E4M3, 0, 1}};
  static const int counts[] = {1, 2, 3, 8};
  for (size_t i = 0; i < COUNT(cases); i++) {
    for (size_t r = 0; r < COUNT(counts); r++) {
      delayed_case one = cases[i];
      run_ranks(counts[r], 0, check_delayed, &one);
    }
  }
}

// --- Arguments ---

static void check_arguments(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  const int64_t count = 10, negative = -3;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducer;
  fp8core_context *context;
  float buffer[10] = {0};
  uint8_t codes[10];
  rank_ok(communicator, fp8core_context_create(&context, NULL));
#define REFUSED(call, text) rank_refused(communicator, call, invalid, text)
#define CREATE(tensors, sizes) fp8comm_gradient_create(&reducer, communicator, context, tensors, sizes, &options)
  REFUSED(fp8comm_gradient_create(NULL, communicator, context, 1, &count, NULL), "reducer is NULL");
  REFUSED(fp8comm_gradient_create(&reducer, NULL, context, 1, &count, NULL), "communicator is NULL");
  REFUSED(fp8comm_gradient_create(&reducer, communicator, NULL, 1, &count, NULL), "context is NULL");
  REFUSED(CREATE(0, &count), "tensors is 0");
  REFUSED(CREATE(1, NULL), "elements is NULL");
  REFUSED(CREATE(1, &negative), "elements[0] is -3");
#define OPTION(field, value, text)                                                                                     \
  options = fp8comm_gradient_options_default();                                                                        \
  options.field = value;                                                                                               \
  REFUSED(CREATE(1, &count), text)
  OPTION(algorithm, (fp8comm_gradient_algorithm)9, "algorithm is 9");
  OPTION(scaling, (fp8comm_gradient_scaling)-1, "scaling is -1");
  OPTION(wire_dtype, FP8CORE_BF16, "wire_dtype is bf16");
  OPTION(buckets_in_flight, 0, "buckets_in_flight is 0");
  OPTION(bucket_bytes, 0, "bucket_bytes is 0");
  OPTION(saturation_threshold, NAN, "saturation_threshold is nan");
  OPTION(backoff, 1, "backoff is 1");
  OPTION(growth_steps, 0.5, "growth_steps is 0.5");
  OPTION(mu_initial, 1e9, "mu_min, mu_initial, mu_max are");
  const int outside = 3, below = -1, late[] = {0, 2};
  const int64_t two[] = {10, 10};
  OPTION(owners, &outside, "owners[0] is 3, expected a rank, 0 to 2");
  OPTION(owners, &below, "owners[0] is -1");
  OPTION(bucket_of, &outside, "bucket_of[0] is 3, expected 0");
  options = fp8comm_gradient_options_default();
  options.bucket_of = late;
  REFUSED(CREATE(2, two), "bucket_of[1] is 2, expected 0 or 1 after the 0 before it");
  options = fp8comm_gradient_options_default();
  options.size = 4;
  rank_refused(communicator, CREATE(1, &count), FP8CORE_ERROR_VERSION_MISMATCH, "size 4");
  options = fp8comm_gradient_options_default();
  rank_ok(communicator, CREATE(1, &count));
  fp8core_tensor in = vector(buffer, FP8CORE_FP32, 10), out = vector(codes, FP8CORE_E4M3, 10), wrong;
  REFUSED(fp8comm_gradient_all_reduce(NULL, &in, &out, NULL), "reducer is NULL");
  REFUSED(fp8comm_gradient_all_reduce(reducer, NULL, &out, NULL), "inputs is NULL");
  REFUSED(fp8comm_gradient_all_reduce(reducer, &in, NULL, NULL), "outputs is NULL");
  wrong = vector(buffer, FP8CORE_FP32, 9);
  REFUSED(fp8comm_gradient_all_reduce(reducer, &wrong, &out, NULL), "inputs[0] has 9 elements");
  wrong = vector(NULL, FP8CORE_E4M3, 10);
  REFUSED(fp8comm_gradient_all_reduce(reducer, &in, &wrong, NULL), "outputs[0]: ");
  wrong = vector(codes, FP8CORE_E5M2, 10);
  REFUSED(fp8comm_gradient_all_reduce(reducer, &in, &wrong, NULL),
          "outputs[0] is e5m2, expected fp32, bf16, fp16 or the wire's e4m3");
  REFUSED(fp8comm_gradient_start(reducer, 1, &in, &out), "bucket is 1");
  // None of it has hurt.
  rank_ok(communicator, fp8comm_gradient_all_reduce(reducer, &in, &out, NULL));
  fp8comm_gradient_destroy(&reducer);
  fp8core_context_destroy(&context);
}

static void arguments(void **unused) {
  (void)unused;
  run_ranks(3, 0, check_arguments, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(arguments),    cmocka_unit_test(native_is_the_rule),
    cmocka_unit_test(accuracy),     cmocka_unit_test(nonfinite),
    cmocka_unit_test(known_amax),   cmocka_unit_test(error_feedback),
    cmocka_unit_test(mu),           cmocka_unit_test(many),
    cmocka_unit_test(owners),       cmocka_unit_test(disagreement),
    cmocka_unit_test(strides),      cmocka_unit_test(snr),
    cmocka_unit_test(delayed),      cmocka_unit_test(range),
    cmocka_unit_test(least_beyond),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
