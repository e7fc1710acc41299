// Attention through cuDNN, and our own kernels, against an FP64 reference; the same bits in every run, also out of a
// captured graph; and the time of both. On a GPU; with FP8_TEST_EMULATED our own kernels play cuDNN (fake_cudnn.c),
// which shows that this program does what it should.
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "fp8core/cuda.h"
#include "internal.h"

#if defined(FP8_TEST_EMULATED)
#  define EMULATED 1
#else
#  define EMULATED 0
#endif

// Of the norm of each result. A probability, a gradient of one and a result are rounded to BF16, one part in 512 at
// most each; where few keys count, gradients are differences of larger numbers.
#define MOST_ERROR 2e-2
#define MOST_LOG_ERROR 1e-4

static fp8core_context *gpu;
static void *stream;

typedef struct shape {
  int sequences;
  int length;
  int heads;
  int kv_heads;
  int head_dim;
  // Of queries and keys.
  float magnitude;
} shape;

static int64_t qkv_columns(const shape *of) { return (int64_t)(of->heads + 2 * of->kv_heads) * of->head_dim; }
static int64_t out_columns(const shape *of) { return (int64_t)of->heads * of->head_dim; }
static int64_t rows_of(const shape *of) { return (int64_t)of->sequences * of->length; }

// BF16 values as codes, and what they are.
typedef struct values {
  uint16_t *codes;
  double *numbers;
  int64_t count;
} values;

static values new_values(int64_t count) {
  values created = {malloc((size_t)count * sizeof(uint16_t)), malloc((size_t)count * sizeof(double)), count};
  assert_true(created.codes && created.numbers);
  return created;
}

static void free_values(values *freed) {
  free(freed->codes);
  free(freed->numbers);
}

static void decode(values *of) {
  for (int64_t i = 0; i < of->count; i++) of->numbers[i] = (double)fp8core_decode(FP8CORE_BF16, of->codes[i]);
}

static values random_values(int64_t count, uint64_t seed) {
  test_random random = {seed};
  values created = new_values(count);
  for (int64_t i = 0; i < count; i++)
    created.codes[i] =
      (uint16_t)fp8core_encode(FP8CORE_BF16, (float)(test_random_bits(&random) % 65536) / 16384.0f - 2.0f, 0);
  decode(&created);
  return created;
}

// Of a job: in host memory what it reads, and what it should write.
typedef struct problem {
  shape of;
  values qkv;
  values dout;
  double *out;
  double *log_sums;
  double *dqkv;
} problem;

static double *zeros(int64_t count) {
  double *created = calloc((size_t)count, sizeof(double));
  assert_non_null(created);
  return created;
}

static double dot(const double *a, const double *b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

static void add_scaled(double *to, const double *from, double factor, int count) {
  for (int i = 0; i < count; i++) to[i] += factor * from[i];
}

// One query of one head: its output, its logarithm, and what it adds to the gradients.
static void reference_query(problem *in, int64_t first, int query, int head, double *probabilities) {
  const shape *of = &in->of;
  const int d = of->head_dim;
  const int64_t row = qkv_columns(of);
  const int kv_head = head / (of->heads / of->kv_heads);
  const int64_t query_at = (first + query) * row + (int64_t)head * d;
  const int64_t keys_at = first * row + (int64_t)(of->heads + kv_head) * d;
  const int64_t values_at = keys_at + (int64_t)of->kv_heads * d;
  const int64_t out_at = (first + query) * out_columns(of) + (int64_t)head * d;
  const double scale = 1.0 / sqrt((double)d);
  double largest = -INFINITY;
  double sum = 0.0;
  for (int key = 0; key <= query; key++) {
    probabilities[key] = scale * dot(in->qkv.numbers + query_at, in->qkv.numbers + keys_at + key * row, d);
    largest = fmax(largest, probabilities[key]);
  }
  for (int key = 0; key <= query; key++) sum += probabilities[key] = exp(probabilities[key] - largest);
  in->log_sums[(first / of->length * of->heads + head) * of->length + query] = largest + log(sum);
  for (int key = 0; key <= query; key++) {
    probabilities[key] /= sum;
    add_scaled(in->out + out_at, in->qkv.numbers + values_at + key * row, probabilities[key], d);
  }
  const double *dout = in->dout.numbers + out_at;
  const double delta = dot(dout, in->out + out_at, d);
  for (int key = 0; key <= query; key++) {
    const double dscore = scale * probabilities[key] * (dot(dout, in->qkv.numbers + values_at + key * row, d) - delta);
    add_scaled(in->dqkv + query_at, in->qkv.numbers + keys_at + key * row, dscore, d);
    add_scaled(in->dqkv + keys_at + key * row, in->qkv.numbers + query_at, dscore, d);
    add_scaled(in->dqkv + values_at + key * row, dout, probabilities[key], d);
  }
}

static problem new_problem(const shape *of, int with_reference) {
  problem created = {.of = *of,
                     .qkv = random_values(rows_of(of) * qkv_columns(of), 1),
                     .dout = random_values(rows_of(of) * out_columns(of), 2)};
  const int64_t scaled = (int64_t)(of->heads + of->kv_heads) * of->head_dim;
  for (int64_t i = 0; i < created.qkv.count; i++)
    if (i % qkv_columns(of) < scaled)
      created.qkv.codes[i] = (uint16_t)fp8core_encode(FP8CORE_BF16, of->magnitude * (float)created.qkv.numbers[i], 0);
  decode(&created.qkv);
  if (!with_reference) return created;
  created.out = zeros(created.dout.count);
  created.dqkv = zeros(created.qkv.count);
  created.log_sums = zeros(rows_of(of) * of->heads);
  double *probabilities = zeros(of->length);
  for (int sequence = 0; sequence < of->sequences; sequence++)
    for (int head = 0; head < of->heads; head++)
      for (int query = 0; query < of->length; query++)
        reference_query(&created, (int64_t)sequence * of->length, query, head, probabilities);
  free(probabilities);
  return created;
}

static void free_problem(problem *freed) {
  free_values(&freed->qkv);
  free_values(&freed->dout);
  free(freed->out);
  free(freed->log_sums);
  free(freed->dqkv);
}

// A model, as far as attention needs one, with device memory for a job.
typedef struct runner {
  fp8gpt_model model;
  fp8gpt_attention job;
} runner;

static void start(runner *with, const problem *in, const char *wanted) {
  const shape *of = &in->of;
  fp8gpt_model *model = &with->model;
  memset(with, 0, sizeof(*with));
  assert_int_equal(setenv("FP8GPT_ATTENTION", wanted, 1), 0);
  model->context = gpu;
  model->activation_dtype = FP8CORE_BF16;
  model->rows = rows_of(of);
  model->options.batch = of->sequences;
  model->config.sequence = of->length;
  model->config.heads = of->heads;
  model->config.kv_heads = of->kv_heads;
  model->config.hidden = of->heads * of->head_dim;
  assert_ok(fp8gpt_cuda_init(model));
  assert_ok(model->backend->prepare(model));
  model->scratch = test_alloc(gpu, (size_t)model->backend->scratch_bytes(model));
  const size_t log_bytes = (size_t)(rows_of(of) * of->heads) * sizeof(float);
  with->job = (fp8gpt_attention){.dtype = FP8CORE_BF16,
                                 .sequences = of->sequences,
                                 .length = of->length,
                                 .heads = of->heads,
                                 .kv_heads = of->kv_heads,
                                 .head_dim = of->head_dim,
                                 .qkv = test_upload(gpu, in->qkv.codes, 2 * (size_t)in->qkv.count),
                                 .out = test_alloc(gpu, 2 * (size_t)in->dout.count),
                                 .log_sums = test_alloc(gpu, log_bytes),
                                 .dout = test_upload(gpu, in->dout.codes, 2 * (size_t)in->dout.count),
                                 .dqkv = test_alloc(gpu, 2 * (size_t)in->qkv.count)};
}

static void finish(runner *with) {
  test_free(gpu, (void *)with->job.qkv);
  test_free(gpu, with->job.out);
  test_free(gpu, with->job.log_sums);
  test_free(gpu, (void *)with->job.dout);
  test_free(gpu, with->job.dqkv);
  test_free(gpu, with->model.scratch);
  with->model.backend->destroy(&with->model);
}

static const char *attention_by(const runner *with) { return with->model.backend->attention_by(&with->model); }

static void run_both(runner *with) {
  assert_ok(with->model.backend->attention(&with->model, &with->job));
  assert_ok(with->model.backend->attention_backward(&with->model, &with->job));
}

typedef struct results {
  values out;
  values dqkv;
  float *log_sums;
  int64_t log_count;
} results;

static results fetch(const runner *with, const problem *in) {
  results fetched = {new_values(in->dout.count), new_values(in->qkv.count), NULL, rows_of(&in->of) * in->of.heads};
  fetched.log_sums = malloc((size_t)fetched.log_count * sizeof(float));
  assert_non_null(fetched.log_sums);
  test_download(gpu, fetched.out.codes, with->job.out, 2 * (size_t)fetched.out.count);
  test_download(gpu, fetched.dqkv.codes, with->job.dqkv, 2 * (size_t)fetched.dqkv.count);
  test_download(gpu, fetched.log_sums, with->job.log_sums, (size_t)fetched.log_count * sizeof(float));
  decode(&fetched.out);
  decode(&fetched.dqkv);
  return fetched;
}

static void free_results(results *freed) {
  free_values(&freed->out);
  free_values(&freed->dqkv);
  free(freed->log_sums);
}

// Of columns `first` to `end` - 1 of rows of `row`.
static double error_of(const double *found, const double *expected, int64_t count, int64_t row, int64_t first,
                       int64_t end) {
  double error = 0.0;
  double norm = 0.0;
  for (int64_t i = 0; i < count; i++) {
    if (i % row < first || i % row >= end) continue;
    error += (found[i] - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return error == 0.0 ? 0.0 : sqrt(error / norm);
}

static void expect_reference(const char *who, const problem *in, const results *found) {
  const shape *of = &in->of;
  const int64_t row = qkv_columns(of);
  const int64_t queries = out_columns(of);
  const int64_t keys = (int64_t)of->kv_heads * of->head_dim;
  double *logs = zeros(found->log_count);
  for (int64_t i = 0; i < found->log_count; i++) logs[i] = (double)found->log_sums[i];
  const double errors[] = {
    error_of(found->out.numbers, in->out, in->dout.count, queries, 0, queries),
    error_of(found->dqkv.numbers, in->dqkv, in->qkv.count, row, 0, queries),
    error_of(found->dqkv.numbers, in->dqkv, in->qkv.count, row, queries, queries + keys),
    error_of(found->dqkv.numbers, in->dqkv, in->qkv.count, row, queries + keys, row),
    error_of(logs, in->log_sums, found->log_count, found->log_count, 0, found->log_count),
  };
  free(logs);
  printf("%-6s %2d x %4d, heads %2d/%2d of %3d, magnitude %g: off by %.2g, gradients %.2g %.2g %.2g, logarithms %.2g\n",
         who, of->sequences, of->length, of->heads, of->kv_heads, of->head_dim, (double)of->magnitude, errors[0],
         errors[1], errors[2], errors[3], errors[4]);
  // A NaN must not pass.
  for (int i = 0; i < 5; i++) assert_true(errors[i] <= (i < 4 ? MOST_ERROR : MOST_LOG_ERROR));
}

static void expect_same_bits(const results *one, const results *other) {
  assert_memory_equal(one->out.codes, other->out.codes, 2 * (size_t)one->out.count);
  assert_memory_equal(one->dqkv.codes, other->dqkv.codes, 2 * (size_t)one->dqkv.count);
  assert_memory_equal(one->log_sums, other->log_sums, (size_t)one->log_count * sizeof(float));
}

// Out of a captured graph, over results that were wiped.
static void run_captured(runner *with, const problem *in) {
#if EMULATED
  run_both(with);
  (void)in;
#else
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  assert_ok(fp8core_zero(gpu, with->job.out, 2 * (size_t)in->dout.count));
  assert_ok(fp8core_zero(gpu, with->job.dqkv, 2 * (size_t)in->qkv.count));
  assert_ok(fp8core_context_synchronize(gpu));
  assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  run_both(with);
  assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  assert_int_equal(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  assert_int_equal(cudaGraphLaunch(executable, stream), cudaSuccess);
  assert_ok(fp8core_context_synchronize(gpu));
  assert_int_equal(cudaGraphExecDestroy(executable), cudaSuccess);
  assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
#endif
}

static void check_shape(const shape *of) {
  problem in = new_problem(of, 1);
  for (int own = 0; own < 2; own++) {
    runner with;
    start(&with, &in, own ? "own" : "cudnn");
    assert_true(strncmp(attention_by(&with), own ? "own" : "cuDNN ", own ? 3 : 6) == 0);
    run_both(&with);
    results first = fetch(&with, &in);
    expect_reference(own ? "own" : "cuDNN", &in, &first);
    run_captured(&with, &in);
    results again = fetch(&with, &in);
    expect_same_bits(&first, &again);
    free_results(&first);
    free_results(&again);
    finish(&with);
  }
  free_problem(&in);
}

static void reference(void **state) {
  (void)state;
#if EMULATED
  static const shape shapes[] = {{1, 16, 4, 2, 16, 1.0f}, {2, 9, 1, 1, 8, 2.0f}};
#else
  // Heads x sequences x length is a multiple of 64: see plan_backward() in cudnn_attention.cpp.
  static const shape shapes[] = {
    {2, 128, 4, 4, 64, 1.0f}, {2, 96, 4, 2, 64, 1.0f},   {2, 200, 8, 2, 128, 0.5f},
    {4, 77, 16, 4, 16, 2.0f}, {1, 129, 64, 64, 8, 2.0f}, {2, 288, 8, 1, 80, 1.0f},
    {1, 64, 1, 1, 96, 1.0f},  {1, 512, 2, 2, 64, 3.0f},  {1, 1024, 2, 1, 64, 1.0f},
  };
#endif
  for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++) check_shape(&shapes[i]);
}

// What is refused has a reason.
static void refusals(void **state) {
  (void)state;
  static const shape shapes[] = {{1, 64, 1, 1, 12, 1.0f}, {1, 33, 1, 1, 64, 1.0f}};
  for (size_t i = 0; i < 2 && !EMULATED; i++) {
    problem in = new_problem(&shapes[i], 0);
    runner with;
    start(&with, &in, "auto");
    printf("heads of %d, length %d: %s\n", shapes[i].head_dim, shapes[i].length, attention_by(&with));
    assert_non_null(strstr(attention_by(&with), "multiple of"));
    finish(&with);
    free_problem(&in);
  }
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double time_of(runner *with, int backward) {
  enum { RUNS = EMULATED ? 1 : 20 };
  double best = 1e30;
  for (int repeat = 0; repeat < (EMULATED ? 1 : 5); repeat++) {
    assert_ok(fp8core_context_synchronize(gpu));
    const double begin = seconds();
    for (int i = 0; i < RUNS; i++)
      assert_ok(backward ? with->model.backend->attention_backward(&with->model, &with->job)
                         : with->model.backend->attention(&with->model, &with->job));
    assert_ok(fp8core_context_synchronize(gpu));
    best = fmin(best, (seconds() - begin) / RUNS);
  }
  return best;
}

// GPT-2's smallest shape, and one of a larger model with grouped heads.
static void times(void **state) {
  (void)state;
  static const shape shapes[] = {{16, 1024, 12, 12, 64, 1.0f}, {2, 2048, 32, 8, 128, 1.0f}};
  static const shape tiny = {1, 8, 2, 2, 8, 1.0f};
  for (int i = 0; i < (EMULATED ? 1 : 2); i++) {
    const shape *of = EMULATED ? &tiny : &shapes[i];
    problem in = new_problem(of, 0);
    double best[2][2];
    for (int own = 0; own < 2; own++) {
      runner with;
      start(&with, &in, own ? "own" : "cudnn");
      run_both(&with);
      for (int backward = 0; backward < 2; backward++) best[own][backward] = time_of(&with, backward);
      finish(&with);
    }
    for (int backward = 0; backward < 2; backward++)
      printf("%d x %d, heads %d/%d of %d, %-8s  cuDNN %.3f ms, own %.3f ms: cuDNN takes %.2f of our own's time\n",
             of->sequences, of->length, of->heads, of->kv_heads, of->head_dim, backward ? "backward" : "forward",
             best[0][backward] * 1e3, best[1][backward] * 1e3, best[0][backward] / best[1][backward]);
    free_problem(&in);
  }
}

// Whether cuDNN can be had at all; else the program has nothing to check.
static void require_cudnn(void) {
  static const shape any = {1, EMULATED ? 8 : 64, 1, 1, EMULATED ? 8 : 64, 1.0f};
  problem in = new_problem(&any, 0);
  runner with;
  start(&with, &in, "auto");
  printf("attention: %s\n", attention_by(&with));
  const int absent =
    strstr(attention_by(&with), "cannot be loaded") || strstr(attention_by(&with), "this build of libfp8gpt");
  finish(&with);
  free_problem(&in);
  if (!absent) return;
  fp8core_context_destroy(&gpu);
  exit(77);
}

int main(void) {
  fp8core_context_options options = fp8core_context_options_default();
  options.device.type = FP8CORE_DEVICE_CUDA;
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) == 0) {
    printf("skipped: %s\n", fp8core_last_error());
    return 77;
  }
  if (fp8core_context_create(&gpu, &options) != FP8CORE_OK || fp8core_cuda_stream(gpu, &stream) != FP8CORE_OK) {
    fprintf(stderr, "%s\n", fp8core_last_error());
    return 1;
  }
  require_cudnn();
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(reference),
    cmocka_unit_test(refusals),
    cmocka_unit_test(times),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  fp8core_context_destroy(&gpu);
  return failed;
}
