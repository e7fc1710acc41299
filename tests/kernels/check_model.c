// What a model computes beside its products (libfp8gpt/src/backend.h) against FP64 references: every tier of the CPU's
// backend; with FP8_TEST_CUDA the CUDA backend, on a GPU or, with FP8_TEST_EMULATED, with its kernels on the host.
// `check_model` checks; `check_model --bench` times.
//
// Bounds, with u = 2^-24. A sum of n terms in 16 lanes or more is off by at most (n / 16 + 32) u sum |terms|; a dot
// product of d terms in any order by (d + 4) u sum |products|. The exponential is within 2^-21 of its value; a softmax
// whose scores are off by e_j, of largest score m, has numerators off by a share of r_j = e_j + max e + u |s_j - m| +
// 2^-21. Each check states how these combine. Stored BF16 values must lie between the roundings of the reference's
// bounds; FP32 ones within them and one rounding.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(FP8_TEST_CUDA) && !defined(FP8_TEST_EMULATED)
#  include <cuda_runtime_api.h>
#endif

#include "cpu/ops.h"
#include "fp8core/fp8core.h"
#include "internal.h"
#include "numerics.h"

#define UNIT 0x1p-24
#define EXP_ERROR 0x1p-21
#define GUARD 64

static int failures;
// Messages of the backend in hand.
static int messages;
static int checks;
// A tier's or "cuda".
static const char *name;
// Of a model's backend: what its functions use of one.
static fp8gpt_model model;
static uint64_t random_state;

static uint64_t random_bits(void) {
  random_state += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static double random_uniform(void) { return (double)(random_bits() >> 11) * 0x1p-53; }

static float random_value(double magnitude) {
  return (float)(magnitude * (random_uniform() + random_uniform() + random_uniform() - 1.5));
}

static void fail(const char *format, ...) {
  va_list arguments;
  failures++;
  if (messages++ >= 20) return;
  fprintf(stderr, "FAIL %s ", name);
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n");
}

// Memory that both the host and the device in hand reach.
static void *allocate(size_t bytes) {
  void *memory = NULL;
#if defined(FP8_TEST_CUDA) && !defined(FP8_TEST_EMULATED)
  if (cudaMallocManaged(&memory, bytes ? bytes : 1, cudaMemAttachGlobal) != cudaSuccess) memory = NULL;
#else
  memory = malloc(bytes ? bytes : 1);
#endif
  if (!memory) {
    fprintf(stderr, "cannot allocate %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
}

static void deallocate(void *memory) {
#if defined(FP8_TEST_CUDA) && !defined(FP8_TEST_EMULATED)
  (void)cudaFree(memory);
#else
  free(memory);
#endif
}

// An array of activations with guard bytes after it, which release() looks at.
typedef struct array {
  fp8core_dtype dtype;
  int64_t count;
  unsigned char *data;
} array;

static size_t array_bytes(const array *of) { return (size_t)of->count * fp8core_dtype_size(of->dtype); }

static array create(fp8core_dtype dtype, int64_t count) {
  array created = {dtype, count, NULL};
  created.data = allocate(array_bytes(&created) + GUARD);
  memset(created.data, 0xa5, array_bytes(&created) + GUARD);
  return created;
}

static void release(array *freed, const char *what) {
  for (size_t i = 0; i < GUARD; i++)
    if (freed->data[array_bytes(freed) + i] != 0xa5) {
      fail("%s: written beyond its %lld elements", what, (long long)freed->count);
      break;
    }
  deallocate(freed->data);
}

static float *floats(const array *of) { return (float *)(void *)of->data; }

static float get(const array *from, int64_t index) {
  uint32_t code = 0;
  memcpy(&code, from->data + (size_t)index * fp8core_dtype_size(from->dtype), fp8core_dtype_size(from->dtype));
  return fp8core_decode(from->dtype, code);
}

static void put(array *to, int64_t index, float value) {
  const uint32_t code = fp8core_encode(to->dtype, value, 0);
  memcpy(to->data + (size_t)index * fp8core_dtype_size(to->dtype), &code, fp8core_dtype_size(to->dtype));
}

static array filled(fp8core_dtype dtype, int64_t count, double magnitude) {
  array created = create(dtype, count);
  for (int64_t i = 0; i < count; i++) put(&created, i, random_value(magnitude));
  return created;
}

static float bf16(double value) { return fp8core_decode(FP8CORE_BF16, fp8core_encode(FP8CORE_BF16, (float)value, 0)); }

// Whether a stored value can come from one within `error` of `expected`.
static int within(fp8core_dtype dtype, float stored, double expected, double error) {
  const double slack = error * 1.001 + 0x1p-140;
  if (isnan(expected) || isnan(error)) return isnan(stored);
  if (dtype == FP8CORE_FP32) return fabs((double)stored - expected) <= slack + UNIT * (fabs(expected) + slack);
  return stored >= bf16(expected - slack) && stored <= bf16(expected + slack);
}

static void expect(const char *what, const array *from, int64_t index, double expected, double error) {
  const float stored = get(from, index);
  if (!within(from->dtype, stored, expected, error))
    fail("%s (%s) [%lld]: %.9g, expected %.9g within %.3g", what, fp8core_dtype_name(from->dtype), (long long)index,
         (double)stored, expected, error);
}

static void expect_known(const char *what, const array *from, int64_t index, double expected, double error,
                         int unknown) {
  if (!unknown)
    expect(what, from, index, expected, error);
  else if (!isfinite(get(from, index)))
    fail("%s (%s) [%lld]: %g", what, fp8core_dtype_name(from->dtype), (long long)index, (double)get(from, index));
}

static double sum_error(int64_t count) { return ((double)count / 16.0 + 32.0) * UNIT; }

static int drops(const fp8gpt_dropout *dropout, int64_t element) {
  return dropout->probability > 0.0f && (double)fp8core_draw(dropout->seed, dropout->place, dropout->pass,
                                                             (uint64_t)element) < (double)dropout->probability * 0x1p32;
}

static double kept_factor(const fp8gpt_dropout *dropout) { return 1.0 / (1.0 - (double)dropout->probability); }

static int32_t *create_ids(int64_t count) { return allocate((size_t)count * sizeof(int32_t)); }

// Runs a function of the backend, and waits for it.
#define RUN(function, ...) finish(model.backend->function(&model, __VA_ARGS__), #function)

static void finish(fp8core_status status, const char *function) {
  if (status == FP8CORE_OK && model.context) status = fp8core_context_synchronize(model.context);
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s: %s\n", name, function, fp8core_last_error());
  exit(1);
}

// A model's sizes, and the scratch that its backend asks for then.
static array scratch_of(const fp8gpt_config *config, int64_t rows) {
  model.config = *config;
  model.rows = rows;
  array scratch = create(FP8CORE_FP32, model.backend->scratch_bytes(&model) / (int64_t)sizeof(float));
  model.scratch = scratch.data;
  return scratch;
}

static array row_scratch(int64_t columns, int64_t rows) {
  fp8gpt_config config;
  memset(&config, 0, sizeof(config));
  config.hidden = config.ffn_hidden = config.vocabulary = (int)columns;
  config.heads = config.kv_heads = config.sequence = 1;
  return scratch_of(&config, rows);
}

static const uint32_t rounded_away[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
#define TAILS (sizeof(rounded_away) / sizeof(*rounded_away))
#define CODES 65536

#if !defined(FP8_TEST_CUDA)
// Loads and stores of the CPU's tiers: every BF16 code, and the bits that are rounded away at their ties.
static void check_load_store(void) {
  enum { BLOCK = 256 };
  checks++;
  for (uint32_t high = 0; high < CODES; high += BLOCK)
    for (size_t tail = 0; tail < TAILS; tail++) {
      float values[BLOCK];
      float back[BLOCK];
      uint16_t codes[BLOCK];
      for (uint32_t i = 0; i < BLOCK; i++) values[i] = fp8core_bits_float((high + i) << 16 | rounded_away[tail]);
      model.ops->store(FP8CORE_BF16, values, BLOCK, codes);
      model.ops->load(FP8CORE_BF16, codes, BLOCK, back);
      for (uint32_t i = 0; i < BLOCK; i++) {
        const uint32_t right = fp8core_encode(FP8CORE_BF16, values[i], 0);
        const int same_value = isnan(values[i]) ? isnan(back[i]) : back[i] == fp8core_decode(FP8CORE_BF16, right);
        if (codes[i] != right || !same_value)
          fail("store of %08x: %04x, expected %04x", fp8core_float_bits(values[i]), codes[i], right);
      }
    }
}
#endif

// Embeddings, and through them every load and store, and dropout. All of it is exact: a sum is one chain of additions
// in FP32, in the order of the rows.

// Whether a stored value is the rounding of this one; NaNs may have any sign.
static int stored_as(const array *from, int64_t index, float value) {
  const float stored = get(from, index);
  return isnan(value) ? isnan(stored) : stored == fp8core_decode(from->dtype, fp8core_encode(from->dtype, value, 0));
}

static float dropped(const fp8gpt_dropout *dropout, int64_t element, float value) {
  if (dropout->probability == 0.0f) return value;
  return drops(dropout, element) ? 0.0f : value * (1.0f / (1.0f - dropout->probability));
}

static void check_rounding(int64_t columns) {
  const int64_t rows = CODES / columns;
  array scratch = row_scratch(columns, rows);
  array words = create(FP8CORE_BF16, CODES);
  array out = create(FP8CORE_BF16, CODES);
  array dout = create(FP8CORE_FP32, CODES);
  int32_t *ids = create_ids(rows + 1);
  fp8gpt_embedding job;
  fp8gpt_embedding_backward backward;
  memset(&job, 0, sizeof(job));
  memset(&backward, 0, sizeof(backward));
  checks++;
  for (int64_t i = 0; i < CODES; i++) {
    const uint16_t code = (uint16_t)i;
    memcpy(words.data + 2 * i, &code, sizeof(code));
  }
  for (int64_t i = 0; i <= rows; i++) ids[i] = (int32_t)i;
  job.dtype = FP8CORE_BF16;
  job.rows = rows;
  job.columns = columns;
  job.length = rows;
  job.tokens = ids;
  job.words = words.data;
  job.out = out.data;
  RUN(embed, &job);
  for (int64_t i = 0; i < CODES; i++)
    if (!stored_as(&out, i, get(&words, i))) fail("embedding of %04x: %g", (unsigned)i, (double)get(&out, i));
  backward.dtype = FP8CORE_FP32;
  backward.rows = rows;
  backward.columns = columns;
  backward.length = rows;
  backward.dout = dout.data;
  backward.tokens = backward.order = backward.starts = ids;
  backward.runs = rows;
  backward.gradient_dtype = FP8CORE_BF16;
  backward.dwords = out.data;
  for (size_t tail = 0; tail < TAILS; tail++) {
    for (int64_t i = 0; i < CODES; i++) put(&dout, i, fp8core_bits_float((uint32_t)i << 16 | rounded_away[tail]));
    memset(out.data, 0, array_bytes(&out));
    RUN(embed_backward, &backward);
    for (int64_t i = 0; i < CODES; i++)
      if (!stored_as(&out, i, get(&dout, i)))
        fail("rounding of %08x: %g", fp8core_float_bits(get(&dout, i)), (double)get(&out, i));
  }
  deallocate(ids);
  release(&words, "words");
  release(&out, "out");
  release(&dout, "dout");
  release(&scratch, "scratch of embeddings");
}

typedef struct embedding_case {
  fp8core_dtype dtype;
  fp8core_dtype gradient;
  int64_t sequences;
  int64_t length;
  int64_t position;
  int64_t columns;
  // Of the tokens that occur.
  int32_t tokens;
  int with_places;
  float dropout;
} embedding_case;

static void check_embedding(const embedding_case *of) {
  const int64_t rows = of->sequences * of->length;
  const int64_t columns = of->columns;
  const fp8gpt_dropout dropout = {of->dropout, UINT64_C(0x123456789abcdef), 7, 1u << 8 | 3u};
  array scratch = row_scratch(columns, rows);
  array words = filled(of->dtype, of->tokens * columns, 1.0);
  array places = filled(of->dtype, (of->position + of->length) * columns, 1.0);
  array out = create(of->dtype, rows * columns);
  array dout = filled(of->dtype, rows * columns, 1.0);
  array dwords = filled(of->gradient, of->tokens * columns, 1.0);
  array dplaces = filled(of->gradient, of->length * columns, 1.0);
  array dwords_before = create(of->gradient, dwords.count);
  array dplaces_before = create(of->gradient, dplaces.count);
  int32_t *tokens = create_ids(rows);
  int32_t *order = create_ids(rows);
  int32_t *starts = create_ids(rows + 1);
  float *sums = allocate((size_t)columns * sizeof(float));
  int64_t dropped_elements = 0;
  int64_t runs = 0;
  int64_t placed = 0;
  fp8gpt_embedding job;
  fp8gpt_embedding_backward backward;
  memset(&job, 0, sizeof(job));
  memset(&backward, 0, sizeof(backward));
  checks++;
  memcpy(dwords_before.data, dwords.data, array_bytes(&dwords));
  memcpy(dplaces_before.data, dplaces.data, array_bytes(&dplaces));
  // The first token is frequent.
  for (int64_t row = 0; row < rows; row++)
    tokens[row] = random_bits() % 2 ? 0 : (int32_t)(random_bits() % (uint64_t)of->tokens);
  put(&words, tokens[rows - 1] * columns + columns - 1, NAN);
  put(&dout, rows * columns / 2, NAN);
  job.dtype = of->dtype;
  job.rows = rows;
  job.columns = columns;
  job.length = of->length;
  job.position = of->position;
  job.tokens = tokens;
  job.words = words.data;
  job.places = of->with_places ? places.data : NULL;
  job.dropout = dropout;
  job.out = out.data;
  RUN(embed, &job);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < columns; i++) {
      float sum = get(&words, tokens[row] * columns + i);
      if (of->with_places) sum += get(&places, (of->position + row % of->length) * columns + i);
      dropped_elements += drops(&dropout, row * columns + i);
      if (!stored_as(&out, row * columns + i, dropped(&dropout, row * columns + i, sum)))
        fail("embedding (%s) of row %lld, column %lld: %.9g of %.9g", fp8core_dtype_name(of->dtype), (long long)row,
             (long long)i, (double)get(&out, row * columns + i), (double)sum);
    }
  const double share = (double)dropped_elements / (double)(rows * columns);
  const double deviation = sqrt((double)of->dropout * (1.0 - (double)of->dropout) / (double)(rows * columns)) + 1e-9;
  if (fabs(share - (double)of->dropout) > 5.0 * deviation)
    fail("dropout %g drops %g of the elements", (double)of->dropout, share);

  for (int32_t token = 0; token < of->tokens; token++) {
    starts[runs] = (int32_t)placed;
    for (int64_t row = 0; row < rows; row++)
      if (tokens[row] == token) order[placed++] = (int32_t)row;
    runs += placed > starts[runs];
  }
  starts[runs] = (int32_t)placed;
  backward.dtype = of->dtype;
  backward.rows = rows;
  backward.columns = columns;
  backward.length = of->length;
  backward.dropout = dropout;
  backward.dout = dout.data;
  backward.tokens = tokens;
  backward.order = order;
  backward.starts = starts;
  backward.runs = runs;
  backward.gradient_dtype = of->gradient;
  backward.dwords = dwords.data;
  backward.dplaces = of->with_places ? dplaces.data : NULL;
  RUN(embed_backward, &backward);
  for (int part = 0; part < 2; part++)
    for (int64_t at = 0; at < (part ? of->length : of->tokens); at++) {
      const array *gradient = part ? &dplaces : &dwords;
      memset(sums, 0, (size_t)columns * sizeof(float));
      for (int64_t row = 0; row < rows; row++) {
        if (part ? row % of->length != at || !of->with_places : tokens[row] != at) continue;
        for (int64_t i = 0; i < columns; i++)
          sums[i] += dropped(&dropout, row * columns + i, get(&dout, row * columns + i));
      }
      for (int64_t i = 0; i < columns; i++) {
        const float expected = get(part ? &dplaces_before : &dwords_before, at * columns + i) + sums[i];
        if (!stored_as(gradient, at * columns + i, expected))
          fail("gradient of %s %lld, column %lld: %.9g, expected %.9g", part ? "place" : "word", (long long)at,
               (long long)i, (double)get(gradient, at * columns + i), (double)expected);
      }
    }
  deallocate(tokens);
  deallocate(order);
  deallocate(starts);
  deallocate(sums);
  release(&words, "words");
  release(&places, "places");
  release(&out, "out");
  release(&dout, "dout");
  release(&dwords, "dwords");
  release(&dplaces, "dplaces");
  release(&dwords_before, "dwords_before");
  release(&dplaces_before, "dplaces_before");
  release(&scratch, "scratch of embeddings");
}

static void check_embeddings(void) {
  static const int64_t columns[] = {1, 2, 3, 4, 6, 8, 16, 20, 33, 100, 768, 1000};
  check_rounding(2048);
  // One element at a time.
  check_rounding(1);
  for (size_t i = 0; i < sizeof(columns) / sizeof(*columns); i++)
    for (int wide = 0; wide < 4; wide++) {
      const fp8core_dtype dtype = wide % 2 ? FP8CORE_FP32 : FP8CORE_BF16;
      const fp8core_dtype gradient = wide / 2 ? FP8CORE_FP32 : FP8CORE_BF16;
      const embedding_case cases[] = {
        {dtype, gradient, 1, 1, 0, columns[i], 1, 1, 0.0f},
        {dtype, gradient, 3, 21, 2, columns[i], 9, 1, 0.0f},
        {dtype, gradient, 2, 33, 0, columns[i], 40, 0, 0.1f},
        {dtype, gradient, 25, 4, 1, columns[i], 3, 1, 0.3f},
      };
      for (size_t j = 0; j < sizeof(cases) / sizeof(*cases); j++) check_embedding(&cases[j]);
    }
}

// Norms. With A the mean of |x|, c = x - mean, s = sqrt(var + eps): the mean is off by a = (n/16 + 32) u A, the
// reciprocal deviation by a share of (n/32 + 24) u + a / s, the result by |w| / s (a + |c| that) and 3 roundings.

typedef struct norm_case {
  fp8gpt_normalization type;
  fp8core_dtype dtype;
  int64_t rows;
  int64_t columns;
  double magnitude;
  double offset;
  int with_delta;
  float dropout;
  fp8core_dtype weights;
} norm_case;

static void check_norm(const norm_case *parameters) {
  const int64_t rows = parameters->rows;
  const int64_t columns = parameters->columns;
  const int64_t count = rows * columns;
  const fp8core_dtype dtype = parameters->dtype;
  const int layer_norm = parameters->type == FP8GPT_LAYER_NORM;
  array x = filled(dtype, count, parameters->magnitude);
  array delta = filled(dtype, count, parameters->magnitude);
  array sum = create(dtype, count);
  array y = create(dtype, count);
  array dy = filled(dtype, count, 1.0);
  array dx = filled(dtype, count, 0.5);
  array ddelta = create(dtype, count);
  array weight = filled(parameters->weights, columns, 1.0);
  array bias = filled(parameters->weights, columns, 1.0);
  array mean = create(FP8CORE_FP32, rows);
  array inverse = create(FP8CORE_FP32, rows);
  array weight_gradient = filled(FP8CORE_FP32, columns, 1.0);
  array bias_gradient = filled(FP8CORE_FP32, columns, 1.0);
  array weight_before = create(FP8CORE_FP32, columns);
  array bias_before = create(FP8CORE_FP32, columns);
  array scratch = row_scratch(columns, rows);
  const int first = (int)(random_bits() % 2);
  fp8gpt_norm norm;
  memset(&norm, 0, sizeof(norm));
  checks++;
  for (int64_t i = 0; i < count; i++) put(&x, i, get(&x, i) + (float)parameters->offset);
  norm.type = parameters->type;
  norm.dtype = dtype;
  norm.rows = rows;
  norm.columns = columns;
  norm.eps = 1e-5f;
  norm.x = x.data;
  norm.delta = parameters->with_delta ? delta.data : NULL;
  norm.dropout = (fp8gpt_dropout){parameters->dropout, 99, 3, 5};
  norm.sum = sum.data;
  norm.y = y.data;
  norm.weight_dtype = parameters->weights;
  norm.weight = weight.data;
  norm.bias = layer_norm ? bias.data : NULL;
  norm.mean = floats(&mean);
  norm.inverse_deviation = floats(&inverse);
  RUN(norm, &norm);

  fp8gpt_norm_backward backward;
  memset(&backward, 0, sizeof(backward));
  backward.forward = norm;
  backward.forward.x = parameters->with_delta ? sum.data : x.data;
  backward.forward.delta = NULL;
  backward.forward.sum = NULL;
  backward.forward.y = NULL;
  backward.dy = dy.data;
  backward.dx = dx.data;
  backward.ddelta = parameters->dropout > 0.0f ? ddelta.data : NULL;
  backward.dweight = floats(&weight_gradient);
  backward.dbias = layer_norm ? floats(&bias_gradient) : NULL;
  backward.first = first;
  array dx_before = create(dtype, count);
  memcpy(dx_before.data, dx.data, array_bytes(&dx));
  memcpy(weight_before.data, weight_gradient.data, array_bytes(&weight_gradient));
  memcpy(bias_before.data, bias_gradient.data, array_bytes(&bias_gradient));
  RUN(norm_backward, &backward);

  double *dweight = calloc((size_t)(4 * columns), sizeof(double));
  if (!dweight) exit(1);
  double *dweight_magnitude = dweight + columns;
  double *dbias = dweight + 2 * columns;
  double *dbias_magnitude = dweight + 3 * columns;
  for (int64_t row = 0; row < rows; row++) {
    double average = 0.0;
    double magnitude = 0.0;
    double square = 0.0;
    const array *input = parameters->with_delta ? &sum : &x;
    for (int64_t i = row * columns; i < (row + 1) * columns; i++) {
      if (parameters->with_delta) {
        const double added = drops(&norm.dropout, i) ? 0.0 : (double)get(&delta, i) * kept_factor(&norm.dropout);
        expect("norm's sum", &sum, i, (double)get(&x, i) + added,
               4.0 * UNIT * (fabs((double)get(&x, i)) + fabs(added)));
      }
      average += (double)get(input, i) / (double)columns;
      magnitude += fabs((double)get(input, i)) / (double)columns;
    }
    if (!layer_norm) average = 0.0;
    for (int64_t i = row * columns; i < (row + 1) * columns; i++)
      square += ((double)get(input, i) - average) * ((double)get(input, i) - average) / (double)columns;
    const double deviation = sqrt(square + (double)norm.eps);
    const double mean_error = layer_norm ? sum_error(columns) * magnitude : 0.0;
    const double inverse_error = ((double)columns / 32.0 + 24.0) * UNIT + mean_error / deviation;
    if (layer_norm) expect("norm's mean", &mean, row, average, mean_error);
    expect("norm's reciprocal deviation", &inverse, row, 1.0 / deviation, inverse_error / deviation);
    // Backward: from the mean and the reciprocal that are stored.
    const double stored_inverse = (double)get(&inverse, row);
    const double stored_mean = layer_norm ? (double)get(&mean, row) : 0.0;
    double along = 0.0;
    double along_magnitude = 0.0;
    double gradient = 0.0;
    double gradient_magnitude = 0.0;
    for (int64_t i = 0; i < columns; i++) {
      const int64_t at = row * columns + i;
      const double centred = (double)get(input, at) - average;
      const double w = (double)get(&weight, i);
      const double b = layer_norm ? (double)get(&bias, i) : 0.0;
      const double value = centred / deviation * w;
      expect("norm", &y, at, value + b,
             fabs(w) / deviation * (mean_error + fabs(centred) * inverse_error) + 4.0 * UNIT * (fabs(value) + fabs(b)));
      const double unit = ((double)get(input, at) - stored_mean) * stored_inverse;
      const double scaled = (double)get(&dy, at) * w;
      along += scaled * unit / (double)columns;
      along_magnitude += fabs(scaled * unit) / (double)columns;
      gradient += scaled / (double)columns;
      gradient_magnitude += fabs(scaled) / (double)columns;
      dweight[i] += (double)get(&dy, at) * unit;
      dweight_magnitude[i] += fabs((double)get(&dy, at) * unit);
      dbias[i] += (double)get(&dy, at);
      dbias_magnitude[i] += fabs((double)get(&dy, at));
    }
    if (!layer_norm) gradient = gradient_magnitude = 0.0;
    for (int64_t i = 0; i < columns; i++) {
      const int64_t at = row * columns + i;
      const double unit = ((double)get(input, at) - stored_mean) * stored_inverse;
      const double scaled = (double)get(&dy, at) * (double)get(&weight, i);
      const double before = (double)get(&dx_before, at);
      const double value = stored_inverse * (scaled - gradient - unit * along);
      const double error = stored_inverse * (sum_error(columns) + 8.0 * UNIT) *
                             (fabs(scaled) + gradient_magnitude + fabs(unit) * along_magnitude) +
                           4.0 * UNIT * (fabs(value) + fabs(before));
      expect("gradient of a norm's input", &dx, at, before + value, error);
      if (!backward.ddelta) continue;
      const double kept = drops(&norm.dropout, at) ? 0.0 : kept_factor(&norm.dropout);
      expect("gradient of a norm's branch", &ddelta, at, (before + value) * kept,
             (error + 4.0 * UNIT * fabs(before + value)) * kept);
    }
  }
  for (int64_t i = 0; i < columns; i++) {
    const double weight_added = first ? 0.0 : (double)get(&weight_before, i);
    const double bias_added = first ? 0.0 : (double)get(&bias_before, i);
    expect("gradient of a norm's weight", &weight_gradient, i, weight_added + dweight[i],
           ((double)rows + 6.0) * UNIT * dweight_magnitude[i]);
    if (layer_norm)
      expect("gradient of a norm's bias", &bias_gradient, i, bias_added + dbias[i],
             (double)rows * UNIT * dbias_magnitude[i]);
    else if (get(&bias_gradient, i) != get(&bias_before, i))
      fail("gradient of a bias that there is not");
  }
  free(dweight);
  release(&x, "x");
  release(&delta, "delta");
  release(&sum, "sum");
  release(&y, "y");
  release(&dy, "dy");
  release(&dx, "dx");
  release(&dx_before, "dx_before");
  release(&ddelta, "ddelta");
  release(&weight, "weight");
  release(&bias, "bias");
  release(&mean, "mean");
  release(&inverse, "inverse");
  release(&weight_gradient, "gradient of a norm's weight");
  release(&bias_gradient, "gradient of a norm's bias");
  release(&weight_before, "weight_before");
  release(&bias_before, "bias_before");
  release(&scratch, "scratch of a norm");
}

// A row with a NaN or an infinity shows it in all of its outputs, and in no other row.
static void check_norm_nonfinite(fp8gpt_normalization type, fp8core_dtype dtype, float value, int64_t columns,
                                 int64_t place) {
  array x = filled(dtype, 3 * columns, 1.0);
  array y = create(dtype, 3 * columns);
  array ones = create(FP8CORE_FP32, columns);
  array numbers = create(FP8CORE_FP32, 6);
  array scratch = row_scratch(columns, 3);
  fp8gpt_norm norm;
  memset(&norm, 0, sizeof(norm));
  checks++;
  for (int64_t i = 0; i < columns; i++) put(&ones, i, 1.0f);
  put(&x, columns + place, value);
  norm.type = type;
  norm.dtype = dtype;
  norm.rows = 3;
  norm.columns = columns;
  norm.eps = 1e-5f;
  norm.x = x.data;
  norm.y = y.data;
  norm.weight_dtype = FP8CORE_FP32;
  norm.weight = ones.data;
  norm.mean = floats(&numbers);
  norm.inverse_deviation = norm.mean + 3;
  RUN(norm, &norm);
  for (int64_t i = 0; i < 3 * columns; i++) {
    const int here = i / columns == 1;
    // RMSNorm divides finite values by infinity.
    const int shows = isnan(get(&y, i)) || (type == FP8GPT_RMS_NORM && isinf(value) && i != columns + place);
    if (here ? !shows : !isfinite(get(&y, i)))
      fail("norm of a row with %g: [%lld] is %g", (double)value, (long long)i, (double)get(&y, i));
  }
  release(&x, "x");
  release(&y, "y");
  release(&ones, "ones");
  release(&numbers, "numbers");
  release(&scratch, "scratch of a norm");
}

static void check_norms(void) {
  static const int64_t columns[] = {1, 2, 3, 7, 15, 16, 17, 24, 31, 33, 64, 80, 100, 257, 768, 1000, 1031, 1096};
  for (int type = 0; type < 2; type++)
    for (int wide = 0; wide < 2; wide++) {
      const fp8gpt_normalization normalization = (fp8gpt_normalization)type;
      const fp8core_dtype dtype = wide ? FP8CORE_FP32 : FP8CORE_BF16;
      for (size_t i = 0; i < sizeof(columns) / sizeof(*columns); i++) {
        const norm_case cases[] = {
          {normalization, dtype, 5, columns[i], 1.0, 0.0, 0, 0.0f, FP8CORE_FP32},
          {normalization, dtype, 3, columns[i], 1.0, 30.0, 1, 0.0f, FP8CORE_BF16},
          {normalization, dtype, 70, columns[i], 1e-3, 0.0, 1, 0.25f, FP8CORE_FP32},
          {normalization, dtype, 1, columns[i], 1e6, 0.0, 1, 0.5f, FP8CORE_BF16},
          {normalization, dtype, 2, columns[i], 0.0, 0.0, 0, 0.0f, FP8CORE_FP32},
        };
        for (size_t j = 0; j < sizeof(cases) / sizeof(*cases); j++) check_norm(&cases[j]);
      }
      // Rows enough for several of each block of a GPU, and rows beyond what its threads keep in registers.
      const norm_case large[] = {
        {normalization, dtype, 300, 100, 1.0, 0.0, 1, 0.3f, FP8CORE_FP32},
        {normalization, dtype, 2100, 40, 1.0, 0.0, 0, 0.0f, FP8CORE_FP32},
        {normalization, dtype, 300, 3072, 1.0, 0.0, 0, 0.0f, FP8CORE_BF16},
        {normalization, dtype, 130, 3073, 1.0, 0.0, 1, 0.1f, FP8CORE_FP32},
        {normalization, dtype, 130, 24600, 1.0, 0.0, 1, 0.1f, FP8CORE_FP32},
      };
      for (size_t i = 0; i < sizeof(large) / sizeof(*large); i++) check_norm(&large[i]);
      for (int64_t place = 0; place < 37; place++) {
        check_norm_nonfinite(normalization, dtype, NAN, 37, place);
        check_norm_nonfinite(normalization, dtype, INFINITY, 37, place);
      }
      check_norm_nonfinite(normalization, dtype, NAN, 64, 41);
      check_norm_nonfinite(normalization, dtype, NAN, 24600, 24599);
    }
}

// Attention.

typedef struct attention_case {
  fp8core_dtype dtype;
  int64_t sequences;
  int64_t length;
  int heads;
  int kv_heads;
  int head_dim;
  // Of queries and keys: scores grow with its square.
  double magnitude;
} attention_case;

typedef struct attention_memory {
  array qkv;
  array out;
  array log_sums;
  array dout;
  array dqkv;
  array scratch;
  fp8gpt_attention attention;
} attention_memory;

static int64_t qkv_stride(const attention_case *of) { return (int64_t)(of->heads + 2 * of->kv_heads) * of->head_dim; }

static array attention_scratch(const attention_case *of) {
  fp8gpt_config config;
  memset(&config, 0, sizeof(config));
  config.heads = of->heads;
  config.kv_heads = of->kv_heads;
  config.hidden = of->heads * of->head_dim;
  config.sequence = (int)of->length;
  return scratch_of(&config, of->sequences * of->length);
}

static attention_memory create_attention(const attention_case *parameters) {
  attention_memory created;
  const int64_t rows = parameters->sequences * parameters->length;
  const int64_t stride = qkv_stride(parameters);
  created.qkv = filled(parameters->dtype, rows * stride, 1.0);
  for (int64_t i = 0; i < rows * stride; i++)
    if (i % stride < (parameters->heads + parameters->kv_heads) * (int64_t)parameters->head_dim)
      put(&created.qkv, i, (float)parameters->magnitude * get(&created.qkv, i));
  created.out = create(parameters->dtype, rows * parameters->heads * parameters->head_dim);
  created.log_sums = create(FP8CORE_FP32, rows * parameters->heads);
  created.dout = filled(parameters->dtype, rows * parameters->heads * parameters->head_dim, 1.0);
  created.dqkv = create(parameters->dtype, rows * stride);
  created.scratch = attention_scratch(parameters);
  fp8gpt_attention *attention = &created.attention;
  memset(attention, 0, sizeof(*attention));
  attention->dtype = parameters->dtype;
  attention->sequences = parameters->sequences;
  attention->length = parameters->length;
  attention->heads = parameters->heads;
  attention->kv_heads = parameters->kv_heads;
  attention->head_dim = parameters->head_dim;
  attention->qkv = created.qkv.data;
  attention->out = created.out.data;
  attention->log_sums = floats(&created.log_sums);
  attention->dout = created.dout.data;
  attention->dqkv = created.dqkv.data;
  return created;
}

static void run_forward(const attention_memory *memory) {
  model.scratch = memory->scratch.data;
  RUN(attention, &memory->attention);
}

static void run_backward(const attention_memory *memory) {
  model.scratch = memory->scratch.data;
  RUN(attention_backward, &memory->attention);
}

static void release_attention(attention_memory *memory) {
  release(&memory->qkv, "qkv");
  release(&memory->out, "attention's output");
  release(&memory->log_sums, "attention's logarithms");
  release(&memory->dout, "dout");
  release(&memory->dqkv, "dqkv");
  release(&memory->scratch, "scratch of attention");
}

// Where element `i` of a head's row lies among queries (part 0), keys (1) or values (2).
static int64_t qkv_at(const attention_case *of, int64_t row, int part, int head, int i) {
  const int before = part == 0 ? head : of->heads + (part == 2 ? of->kv_heads : 0) + head;
  return row * qkv_stride(of) + (int64_t)before * of->head_dim + i;
}

// A row's scores and their errors; the largest of each.
typedef struct scores {
  double *score;
  double *error;
  double largest;
  double largest_error;
  int unknown;
} scores;

// Of an addition in a dot product: a GPU's tensor cores may cut off where others round to nearest.
#if defined(FP8_TEST_CUDA) && !defined(FP8_TEST_EMULATED)
#  define SUM_UNIT (2.0 * UNIT)
#else
#  define SUM_UNIT UNIT
#endif

static void row_scores(const attention_case *of, const array *qkv, int64_t first, int64_t query, int head,
                       scores *found) {
  const int kv_head = head / (of->heads / of->kv_heads);
  const double factor = 1.0 / sqrt((double)of->head_dim);
  found->largest = -INFINITY;
  found->largest_error = 0.0;
  for (int64_t key = 0; key <= query; key++) {
    double sum = 0.0;
    double magnitude = 0.0;
    for (int i = 0; i < of->head_dim; i++) {
      const double product = (double)get(qkv, qkv_at(of, first + query, 0, head, i)) *
                             (double)get(qkv, qkv_at(of, first + key, 1, kv_head, i)) * factor;
      sum += product;
      magnitude += fabs(product);
    }
    found->score[key] = sum;
    found->error[key] = ((double)of->head_dim + 6.0) * SUM_UNIT * magnitude;
    if (sum > found->largest) found->largest = sum;
    if (found->error[key] > found->largest_error) found->largest_error = found->error[key];
  }
}

// Of probabilities and of the scores' gradients, as the left side of a product: tensor cores take them in BF16.
static double operand_error(fp8core_dtype dtype) {
#if defined(FP8_TEST_CUDA)
  return dtype == FP8CORE_BF16 ? 0x1p-8 : 0.0;
#else
  (void)dtype;
  return 0.0;
#endif
}

// The output is off by sum p_j |v_j| (expm1(r_j) + D + (T + 16) u), with D = sum p_j expm1(r_j) of the denominator; and
// by sum p_j |v_j| times the error of an operand.
static void expect_attention(const attention_case *of, const array *qkv, int64_t first, int64_t query, int head,
                             scores *space, const array *out, int64_t out_row, const array *log_sums,
                             const char *what) {
  const int kv_head = head / (of->heads / of->kv_heads);
  row_scores(of, qkv, first, query, head, space);
  double sum = 0.0;
  double share = 0.0;
  for (int64_t key = 0; key <= query; key++) {
    const double below = space->score[key] - space->largest;
    const double error = space->error[key] + space->largest_error + UNIT * fabs(below) + EXP_ERROR;
    const double e = exp(below);
    // Not below what rounds to 0 in the exponential.
    space->error[key] = expm1(fmin(error, 700.0)) + (e < 0x1p-120 ? 1.0 : 0.0);
    space->score[key] = e;
    sum += e;
    share += e * space->error[key];
  }
  share /= sum;
  const double rounding = ((double)query + 17.0) * UNIT;
  if (log_sums) {
    const double expected = space->largest + log(sum);
    expect("attention's logarithm", log_sums, first * of->heads + head * of->length + query, expected,
           space->largest_error + fmin(share, 1e10) + rounding + 2.0 * UNIT * fabs(expected));
  }
  for (int i = 0; i < of->head_dim; i++) {
    double value = 0.0;
    double error = 0.0;
    for (int64_t key = 0; key <= query; key++) {
      const double term = space->score[key] / sum * (double)get(qkv, qkv_at(of, first + key, 2, kv_head, i));
      value += term;
      error += fabs(term) * (space->error[key] + share * 1.1 + rounding + operand_error(of->dtype) * 1.01);
    }
    // Where scores are not known to a unit, any mixture of values is right.
    expect_known(what, out, (out_row * of->heads + head) * of->head_dim + i, value, error, !(share <= 0.5));
  }
}

// The backward pass from the stored output and logarithms: p = exp(s - l) has a share of error
// r = expm1(e + u (|s| + |l|) + 2^-21), and dS = p (dP - delta) follows.
static void expect_gradients(const attention_case *of, const attention_memory *memory, int64_t first, int kv_head,
                             scores *space) {
  const int64_t length = of->length;
  const int d = of->head_dim;
  const int shared = of->heads / of->kv_heads;
  const double factor = 1.0 / sqrt((double)d);
  double *keys = calloc((size_t)(4 * length * d), sizeof(double));
  double *queries = malloc((size_t)(2 * d) * sizeof(double));
  if (!keys || !queries) exit(1);
  double *keys_error = keys + length * d;
  double *values = keys + 2 * length * d;
  double *values_error = keys + 3 * length * d;
  space->unknown = 0;
  for (int head = kv_head * shared; head < (kv_head + 1) * shared; head++)
    for (int64_t query = 0; query < length; query++) {
      const int64_t out_at = ((first + query) * of->heads + head) * d;
      const double log_sum = (double)get(&memory->log_sums, first * of->heads + head * length + query);
      double delta = 0.0;
      double delta_error = 0.0;
      for (int i = 0; i < d; i++) {
        const double product = (double)get(&memory->out, out_at + i) * (double)get(&memory->dout, out_at + i);
        delta += product;
        delta_error += fabs(product) * (sum_error(d) + UNIT);
      }
      row_scores(of, &memory->qkv, first, query, head, space);
      memset(queries, 0, (size_t)(2 * d) * sizeof(double));
      for (int64_t key = 0; key <= query; key++) {
        double dp = 0.0;
        double dp_error = 0.0;
        for (int i = 0; i < d; i++) {
          const double product =
            (double)get(&memory->dout, out_at + i) * (double)get(&memory->qkv, qkv_at(of, first + key, 2, kv_head, i));
          dp += product;
          dp_error += fabs(product) * ((double)d + 4.0) * UNIT;
        }
        const double p = exp(fmin(space->score[key] - log_sum, 0.0));
        const double off = space->error[key] + UNIT * (fabs(space->score[key]) + fabs(log_sum)) + EXP_ERROR;
        // Of a score that is not known to a unit, the gradient need only be finite.
        if (off > 1.0) space->unknown = 1;
        const double r = off > 1.0 ? 0.0 : expm1(off) + (p < 0x1p-120 ? 1.0 : 0.0);
        const double ds = p * (dp - delta);
        const double ds_error = p * (r * (fabs(dp) + fabs(delta)) * 1.01 + dp_error + delta_error) +
                                4.0 * UNIT * fabs(ds) + p * UNIT * (fabs(dp) + fabs(delta));
        const double rounding = ((double)(length * shared) + 8.0) * UNIT + operand_error(of->dtype) * 1.01;
        for (int i = 0; i < d; i++) {
          const double q = (double)get(&memory->qkv, qkv_at(of, first + query, 0, head, i)) * factor;
          const double k = (double)get(&memory->qkv, qkv_at(of, first + key, 1, kv_head, i)) * factor;
          const double g = (double)get(&memory->dout, out_at + i);
          queries[i] += ds * k;
          queries[d + i] += fabs(k) * (ds_error + rounding * fabs(ds));
          keys[key * d + i] += ds * q;
          keys_error[key * d + i] += fabs(q) * (ds_error + rounding * fabs(ds));
          values[key * d + i] += p * g;
          values_error[key * d + i] += fabs(p * g) * (r + rounding);
        }
      }
      for (int i = 0; i < d; i++)
        expect_known("gradient of queries", &memory->dqkv, qkv_at(of, first + query, 0, head, i), queries[i],
                     queries[d + i], space->unknown);
    }
  for (int64_t key = 0; key < length; key++)
    for (int i = 0; i < d; i++) {
      expect_known("gradient of keys", &memory->dqkv, qkv_at(of, first + key, 1, kv_head, i), keys[key * d + i],
                   keys_error[key * d + i], space->unknown);
      expect_known("gradient of values", &memory->dqkv, qkv_at(of, first + key, 2, kv_head, i), values[key * d + i],
                   values_error[key * d + i], space->unknown);
    }
  free(keys);
  free(queries);
}

// The same rows through a cache, in pieces of these sizes, repeated.
static void expect_cached(const attention_case *of, const attention_memory *memory, int64_t first, scores *space,
                          int64_t piece) {
  const int64_t stride = qkv_stride(of);
  const int64_t cached = 2 * (int64_t)of->kv_heads * of->head_dim;
  array cache = create(of->dtype, of->length * cached);
  array out = create(of->dtype, of->length * of->heads * of->head_dim);
  for (int64_t position = 0; position < of->length; position += piece) {
    const size_t size = fp8core_dtype_size(of->dtype);
    fp8gpt_attention_cached job = {memory->attention, cache.data, position};
    job.attention.sequences = 1;
    job.attention.length = of->length - position < piece ? of->length - position : piece;
    job.attention.qkv = memory->qkv.data + (size_t)((first + position) * stride) * size;
    job.attention.out = out.data + (size_t)(position * of->heads * of->head_dim) * size;
    job.attention.log_sums = NULL;
    RUN(attention_cached, &job);
  }
  for (int64_t row = 0; row < of->length; row++)
    for (int64_t i = 0; i < cached; i++)
      if (get(&cache, row * cached + i) !=
          get(&memory->qkv, (first + row) * stride + (int64_t)of->heads * of->head_dim + i))
        fail("row %lld of a cache is not that of its keys and values", (long long)row);
  for (int64_t query = 0; query < of->length; query++)
    for (int head = 0; head < of->heads; head++)
      expect_attention(of, &memory->qkv, first, query, head, space, &out, query, NULL, "attention with a cache");
  release(&cache, "cache");
  release(&out, "cached attention's output");
}

static void check_attention(const attention_case *parameters) {
  attention_memory memory = create_attention(parameters);
  scores space = {allocate((size_t)parameters->length * sizeof(double)),
                  allocate((size_t)parameters->length * sizeof(double)), 0.0, 0.0, 0};
  const int before = failures;
  checks++;
  run_forward(&memory);
  run_backward(&memory);
  for (int64_t sequence = 0; sequence < parameters->sequences; sequence++) {
    const int64_t first = sequence * parameters->length;
    for (int head = 0; head < parameters->heads; head++)
      for (int64_t query = 0; query < parameters->length; query++)
        expect_attention(parameters, &memory.qkv, first, query, head, &space, &memory.out, first + query,
                         &memory.log_sums, "attention");
    for (int head = 0; head < parameters->kv_heads; head++) expect_gradients(parameters, &memory, first, head, &space);
    expect_cached(parameters, &memory, first, &space, 1 + (int64_t)(random_bits() % 40));
  }
  if (failures > before)
    fprintf(stderr, "  in %lld x %lld, heads %d/%d of %d, magnitude %g\n", (long long)parameters->sequences,
            (long long)parameters->length, parameters->heads, parameters->kv_heads, parameters->head_dim,
            parameters->magnitude);
  free(space.score);
  free(space.error);
  release_attention(&memory);
}

// A NaN in one row of queries, keys or values shows where causality lets it, and nowhere else: not in earlier rows (a
// value's NaN may reach those, as 0 * NaN), other heads or other sequences.
static void check_attention_nan(fp8core_dtype dtype, int part, int64_t row, int64_t length, int cached) {
  const attention_case parameters = {dtype, 2, length, 4, 2, 24, 1.0};
  attention_memory clean = create_attention(&parameters);
  run_forward(&clean);
  array before = create(dtype, clean.out.count);
  memcpy(before.data, clean.out.data, array_bytes(&before));
  put(&clean.qkv, qkv_at(&parameters, row, part, part == 0 ? 2 : 1, 5), NAN);
  checks++;
  if (cached) {
    // The first sequence only.
    array cache = create(dtype, length * 2 * (int64_t)parameters.kv_heads * parameters.head_dim);
    fp8gpt_attention_cached job = {clean.attention, cache.data, 0};
    job.attention.sequences = 1;
    job.attention.log_sums = NULL;
    RUN(attention_cached, &job);
    release(&cache, "cache");
  } else {
    run_forward(&clean);
    run_backward(&clean);
  }
  for (int64_t at = 0; at < before.count; at++) {
    const int64_t query = at / (parameters.heads * parameters.head_dim);
    const int head = (int)(at / parameters.head_dim % parameters.heads);
    const int element = (int)(at % parameters.head_dim);
    // Heads 2 and 3 share the second head of keys and values.
    const int concerned = part == 0 ? query == row && head == 2 : query >= row && query < length && head >= 2;
    const int must = concerned && (part != 2 || element == 5);
    const int may = part == 2 && query < length && head >= 2 && element == 5;
    const float value = get(&clean.out, at);
    if (must ? !isnan(value) : !(may && isnan(value)) && (cached ? !isfinite(value) : value != get(&before, at)))
      fail("attention%s with a NaN in part %d of row %lld of %lld: query %lld, head %d, element %d is %g",
           cached ? " with a cache" : "", part, (long long)row, (long long)length, (long long)query, head, element,
           (double)value);
  }
  if (!cached) {
    // Every gradient that the NaN takes part in: those of its own row, in its head.
    const int head = part == 0 ? 2 : 1;
    for (int i = 0; i < parameters.head_dim; i++)
      if (part < 2 && !isnan(get(&clean.dqkv, qkv_at(&parameters, row, part, head, i))))
        fail("gradient with a NaN in part %d of row %lld of %lld: element %d is %g", part, (long long)row,
             (long long)length, i, (double)get(&clean.dqkv, qkv_at(&parameters, row, part, head, i)));
    for (int64_t at = length * qkv_stride(&parameters); at < clean.dqkv.count; at++)
      if (!isfinite(get(&clean.dqkv, at))) fail("gradient of another sequence is %g", (double)get(&clean.dqkv, at));
  }
  release(&before, "before");
  release_attention(&clean);
}

static void check_attentions(void) {
  static const int head_dims[] = {2, 6, 16, 24, 33, 64, 80, 128, 256};
  for (int64_t length = 1; length <= 130; length++) {
    const int d = head_dims[length % 9];
    const attention_case parameters = {length % 2 ? FP8CORE_FP32 : FP8CORE_BF16,
                                       length < 40 ? 2 : 1,
                                       length,
                                       d > 100 ? 1 : 2,
                                       d > 100 || length % 3 ? 1 : 2,
                                       d > 100 && length > 70 ? 24 : d,
                                       length % 5 == 0 ? 3.0 : 1.0};
    check_attention(&parameters);
  }
  for (int i = 0; i < 9; i++) {
    const attention_case parameters = {FP8CORE_FP32, 1, 67, 3, 1, head_dims[i], 2.0};
    check_attention(&parameters);
  }
  // Scores of hundreds, where all but one key have probabilities that underflow; of 10^5 and 10^12; all equal.
  static const double magnitudes[] = {20.0, 500.0, 1e6, 0.0, 1e-20};
  for (int i = 0; i < 5; i++)
    for (int wide = 0; wide < 2; wide++) {
      const attention_case parameters = {wide ? FP8CORE_FP32 : FP8CORE_BF16, 1, 70, 2, 1, 24, magnitudes[i]};
      check_attention(&parameters);
    }
  static const int64_t rows[] = {0, 1, 17, 31, 32, 63, 64, 65, 99};
  for (int part = 0; part < 3; part++)
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
      for (int cached = 0; cached < 2; cached++)
        for (int wide = 0; wide < 2; wide++)
          check_attention_nan(wide ? FP8CORE_FP32 : FP8CORE_BF16, part, rows[i], 100, cached);
  check_attention_nan(FP8CORE_FP32, 1, 0, 1, 0);
}

// All keys of the first block NaN, or scores that overflow to minus infinity there: the blocks after it must not hide
// the one, nor be spoilt by the other.
static void check_attention_block(float first_keys) {
  const attention_case parameters = {FP8CORE_FP32, 1, 130, 1, 1, 16, 1.0};
  attention_memory memory = create_attention(&parameters);
  checks++;
  for (int64_t row = 0; row < 130; row++)
    for (int i = 0; i < 16; i++) {
      put(&memory.qkv, qkv_at(&parameters, row, 0, 0, i), 1e20f);
      put(&memory.qkv, qkv_at(&parameters, row, 1, 0, i), row < 64 ? first_keys : 1e-20f);
    }
  run_forward(&memory);
  for (int64_t row = 64; row < 130; row++) {
    const float value = get(&memory.out, row * 16);
    if (isnan(first_keys) ? !isnan(value) : !isfinite(value))
      fail("attention with keys of %g in the first block: row %lld is %g", (double)first_keys, (long long)row,
           (double)value);
  }
  release_attention(&memory);
}

// Rotation: low cos - high sin, two roundings each.

static void check_rotate(fp8core_dtype dtype, int head_dim, int64_t length) {
  const int heads = 3;
  const int64_t rows = 2 * length + 1;
  const int64_t stride = (int64_t)(heads + 1) * head_dim;
  array data = filled(dtype, rows * stride, 2.0);
  array before = create(dtype, rows * stride);
  array angles = create(FP8CORE_FP32, length * head_dim);
  array scratch = row_scratch((int64_t)heads * head_dim, rows);
  checks++;
  memcpy(before.data, data.data, array_bytes(&data));
  for (int64_t position = 0; position < length; position++)
    for (int i = 0; i < head_dim / 2; i++) {
      const double angle = (double)position * pow(10000.0, -2.0 * i / head_dim);
      put(&angles, position * head_dim + i, (float)cos(angle));
      put(&angles, position * head_dim + head_dim / 2 + i, (float)sin(angle));
    }
  const float *table = floats(&angles);
  for (int sign = 1; sign >= -1; sign -= 2) {
    memcpy(data.data, before.data, array_bytes(&data));
    const fp8gpt_rotation job = {dtype, rows, stride, length, heads, head_dim, data.data, table, (float)sign};
    RUN(rotate, &job);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < stride; i++) {
        const int64_t at = row * stride + i;
        if (i >= (int64_t)heads * head_dim) {
          if (get(&data, at) != get(&before, at)) fail("rotate changes what is not of its heads");
          continue;
        }
        const int half = head_dim / 2;
        const int64_t in_head = i % head_dim;
        const int high = in_head >= half;
        const double other = (double)get(&before, high ? at - half : at + half);
        const double cosine = (double)table[row % length * head_dim + in_head % half];
        const double sine = sign * (double)table[row % length * head_dim + half + in_head % half];
        const double value = (double)get(&before, at) * cosine;
        const double turned = high ? other * sine : -other * sine;
        expect("rotate", &data, at, value + turned, 2.0 * UNIT * (fabs(value) + fabs(turned)));
      }
  }
  release(&data, "rows");
  release(&before, "before");
  release(&angles, "angles");
  release(&scratch, "scratch of rotate");
}

// SwiGLU: within 2^-20 of its value, and of 2^-108 up, as the sigmoid is 0 below -80. Its derivative, s + x s (1 - s),
// within 2^-20 of the sum of their magnitudes and 2^-22 |x| s, as 1 - s has the error of s.

static double sigmoid_of(double x) { return x < 0.0 ? exp(x) / (1.0 + exp(x)) : 1.0 / (1.0 + exp(-x)); }

static void check_swiglu(fp8core_dtype dtype, int64_t width, double magnitude) {
  static const float special[] = {0.0f,  -0.0f,  -79.9f, -80.0f, -80.1f, -87.0f, -88.0f, -89.0f, 80.0f,
                                  88.0f, 100.0f, -1e4f,  1e4f,   -1e30f, 1e30f,  -3e38f, 1e-30f, -1e-40f};
  const int64_t rows = 3;
  array gate_up = filled(dtype, rows * 2 * width, magnitude);
  array dout = filled(dtype, rows * width, 1.0);
  array out = create(dtype, rows * width);
  array gradient = create(dtype, rows * 2 * width);
  array scratch = row_scratch(width, rows);
  fp8gpt_swiglu job = {dtype, rows, width, gate_up.data, out.data, dout.data, gradient.data};
  checks++;
  for (size_t i = 0; i < sizeof(special) / sizeof(*special) && (int64_t)i < width; i++)
    put(&gate_up, 2 * width + (int64_t)i, special[i]);
  RUN(swiglu, &job);
  RUN(swiglu_backward, &job);
  for (int64_t i = 0; i < rows * width; i++) {
    const int64_t at = i / width * 2 * width + i % width;
    const double x = (double)get(&gate_up, at);
    const double up = (double)get(&gate_up, at + width);
    const double g = (double)get(&dout, i);
    const double s = sigmoid_of(x);
    const double slope = x * s * (1.0 - s);
    expect("swiglu", &out, i, x * s * up, 0x1p-20 * fabs(x * s * up) + 0x1p-108 * fabs(up));
    expect("gradient of the gate", &gradient, at, g * up * (s + slope),
           fabs(g * up) * (0x1p-20 * (s + fabs(slope)) + (fabs(x) < 100.0 ? 0x1p-22 * fabs(x) * s : 0.0) + 0x1p-108));
    expect("gradient of up", &gradient, at + width, g * x * s, 0x1p-20 * fabs(g * x * s) + 0x1p-108 * fabs(g));
  }
  job.rows = 1;
  for (int64_t i = 0; i < width; i++)
    for (int part = 0; part < 2; part++) {
      const float kept = get(&gate_up, i + part * width);
      put(&gate_up, i + part * width, NAN);
      RUN(swiglu, &job);
      RUN(swiglu_backward, &job);
      for (int64_t j = 0; j < width; j++)
        if (isnan(get(&out, j)) != (j == i) || isnan(get(&gradient, j)) != (j == i))
          fail("swiglu with a NaN at %lld: [%lld] is %g", (long long)i, (long long)j, (double)get(&out, j));
      put(&gate_up, i + part * width, kept);
      if (width > 40) i += 7;
    }
  release(&gate_up, "gate_up");
  release(&dout, "dout");
  release(&out, "swiglu's output");
  release(&gradient, "gradient of gate and up");
  release(&scratch, "scratch of swiglu");
}

// Cross-entropy: with r_j = u |l_j - m| + 2^-21, S = sum p r + (V / 16 + 48) u is the error of the logarithm; the loss
// log(sum) - (l_t - m) has 2 u of each part besides. Gradients are off by a share of r_j + S + 3 u, that of the target
// by u more.

static void check_cross_entropy(fp8core_dtype dtype, int64_t vocabulary, double magnitude, double offset) {
  const int64_t rows = 5;
  array logits = filled(FP8CORE_FP32, rows * vocabulary, magnitude);
  array losses = create(FP8CORE_FP32, rows);
  array gradient = create(dtype, rows * vocabulary);
  array scratch = row_scratch(vocabulary, rows);
  int32_t *targets = create_ids(rows);
  fp8gpt_cross_entropy loss;
  memset(&loss, 0, sizeof(loss));
  checks++;
  for (int64_t i = 0; i < rows * vocabulary; i++) put(&logits, i, get(&logits, i) + (float)offset);
  for (int64_t row = 0; row < rows; row++) targets[row] = (int32_t)(random_bits() % (uint64_t)vocabulary);
  targets[0] = (int32_t)vocabulary - 1;
  targets[2] = -1;
  loss.rows = rows;
  loss.vocabulary = vocabulary;
  loss.logits = floats(&logits);
  loss.targets = targets;
  loss.scale = 0.25f;
  loss.losses = floats(&losses);
  loss.dtype = dtype;
  loss.dlogits = gradient.data;
  RUN(cross_entropy, &loss);
  for (int64_t row = 0; row < rows; row++) {
    double largest = -INFINITY;
    double sum = 0.0;
    double share = 0.0;
    for (int64_t i = 0; i < vocabulary; i++) largest = fmax(largest, (double)get(&logits, row * vocabulary + i));
    for (int64_t i = 0; i < vocabulary; i++) {
      const double below = (double)get(&logits, row * vocabulary + i) - largest;
      sum += exp(below);
      share += exp(below) * (UNIT * fabs(below) + EXP_ERROR);
    }
    share = share / sum + ((double)vocabulary / 16.0 + 48.0) * UNIT;
    if (targets[row] < 0) {
      expect("loss that does not count", &losses, row, 0.0, 0.0);
      for (int64_t i = 0; i < vocabulary; i++) expect("its gradient", &gradient, row * vocabulary + i, 0.0, 0.0);
      continue;
    }
    const double target = (double)get(&logits, row * vocabulary + targets[row]) - largest;
    expect("loss", &losses, row, log(sum) - target, share + 2.0 * UNIT * (fabs(log(sum)) + fabs(target)));
    for (int64_t i = 0; i < vocabulary; i++) {
      const double below = (double)get(&logits, row * vocabulary + i) - largest;
      const double p = exp(below) / sum;
      const double error = p * (UNIT * fabs(below) + EXP_ERROR + share + 3.0 * UNIT) + 0x1p-120;
      const int here = i == targets[row];
      expect("gradient of logits", &gradient, row * vocabulary + i, 0.25 * (p - here), 0.25 * (error + here * UNIT));
    }
  }
  // Losses alone are the same.
  array losses_alone = create(FP8CORE_FP32, rows);
  fp8gpt_cross_entropy alone = loss;
  alone.losses = floats(&losses_alone);
  alone.dlogits = NULL;
  RUN(cross_entropy, &alone);
  if (memcmp(losses_alone.data, losses.data, array_bytes(&losses)) != 0)
    fail("losses of %lld logits change without the gradient", (long long)vocabulary);
  release(&losses_alone, "losses alone");
  // A NaN or an infinity anywhere.
  for (int64_t i = 0; i<vocabulary; i += vocabulary> 100 ? 61 : 1)
    for (int infinite = 0; infinite < 2; infinite++) {
      const float kept = get(&logits, i);
      put(&logits, i, infinite ? INFINITY : NAN);
      loss.rows = 2;
      RUN(cross_entropy, &loss);
      if (isfinite(get(&losses, 0)) || isnan(get(&losses, 1)))
        fail("loss of %lld logits with %g at %lld: %g", (long long)vocabulary,
             infinite ? (double)INFINITY : (double)NAN, (long long)i, (double)get(&losses, 0));
      for (int64_t j = 0; j < vocabulary && !infinite; j++)
        if (!isnan(get(&gradient, j))) fail("gradient of logits with a NaN: %g", (double)get(&gradient, j));
      // One that can't be.
      put(&logits, i, -INFINITY);
      loss.rows = 1;
      RUN(cross_entropy, &loss);
      if (vocabulary > 1 && i != targets[0] && (!isfinite(get(&losses, 0)) || get(&gradient, i) != 0.0f))
        fail("loss of %lld logits with -inf at %lld: %g", (long long)vocabulary, (long long)i, (double)get(&losses, 0));
      put(&logits, i, kept);
    }
  deallocate(targets);
  release(&logits, "logits");
  release(&losses, "losses");
  release(&gradient, "gradient of logits");
  release(&scratch, "scratch of cross-entropy");
}

static void check_cross_entropies(void) {
  static const int64_t vocabularies[] = {2, 3, 15, 16, 17, 31, 32, 33, 48, 257, 1000, 16400, 50257};
  for (size_t i = 0; i < sizeof(vocabularies) / sizeof(*vocabularies); i++)
    for (int wide = 0; wide < 2; wide++) {
      const fp8core_dtype dtype = wide ? FP8CORE_FP32 : FP8CORE_BF16;
      check_cross_entropy(dtype, vocabularies[i], 2.0, 0.0);
      if (vocabularies[i] > 10000) continue;
      check_cross_entropy(dtype, vocabularies[i], 100.0, 0.0);
      check_cross_entropy(dtype, vocabularies[i], 1e20, 0.0);
      check_cross_entropy(dtype, vocabularies[i], 0.0, 1e8);
      check_cross_entropy(dtype, vocabularies[i], 1.0, -1e4);
    }
}

// Column sums and sums of vectors: additions in any order.

static void check_column_sums(fp8core_dtype dtype, int64_t rows, int64_t columns, int first) {
  array data = filled(dtype, rows * columns, 1.0);
  array sums = filled(FP8CORE_FP32, columns, 1.0);
  array before = create(FP8CORE_FP32, columns);
  array scratch = row_scratch(columns, rows);
  const fp8gpt_column_sums job = {dtype, rows, columns, data.data, floats(&sums), first};
  checks++;
  memcpy(before.data, sums.data, array_bytes(&sums));
  put(&data, rows / 2 * columns + columns / 2, NAN);
  RUN(column_sums, &job);
  for (int64_t column = 0; column < columns; column++) {
    double sum = first ? 0.0 : (double)get(&before, column);
    double magnitude = fabs(sum);
    for (int64_t row = 0; row < rows; row++) {
      sum += (double)get(&data, row * columns + column);
      magnitude += fabs((double)get(&data, row * columns + column));
    }
    expect("column sum", &sums, column, sum, (double)rows * UNIT * magnitude);
  }
  release(&data, "data");
  release(&sums, "sums");
  release(&before, "before");
  release(&scratch, "scratch of column sums");
}

static void check_add(int64_t count) {
  array values = filled(FP8CORE_FP32, count, 1.0);
  array gradient = filled(FP8CORE_FP32, count, 1.0);
  array before = create(FP8CORE_FP32, count);
  checks++;
  memcpy(before.data, gradient.data, array_bytes(&gradient));
  put(&values, count / 2, NAN);
  for (int first = 0; first < 2; first++) {
    RUN(add, floats(&values), count, floats(&gradient), first);
    for (int64_t i = 0; i < count; i++)
      if (!stored_as(&gradient, i, first ? get(&values, i) : get(&before, i) + get(&values, i)))
        fail("add of %lld: [%lld] is %g", (long long)count, (long long)i, (double)get(&gradient, i));
  }
  release(&values, "values");
  release(&gradient, "gradient");
  release(&before, "before");
}

static void check_rows(void) {
  static const int64_t widths[] = {1, 2, 15, 16, 17, 40, 64, 100, 688};
  for (int wide = 0; wide < 2; wide++) {
    const fp8core_dtype dtype = wide ? FP8CORE_FP32 : FP8CORE_BF16;
    for (size_t i = 0; i < sizeof(widths) / sizeof(*widths); i++) {
      check_swiglu(dtype, widths[i], 2.0);
      check_swiglu(dtype, widths[i], 20.0);
      check_column_sums(dtype, 1 + (int64_t)(random_bits() % 200), widths[i], (int)(i % 2));
    }
    check_column_sums(dtype, 1000, 600, 0);
    check_column_sums(dtype, 300, 1, 1);
    check_column_sums(dtype, 64, 4000, 0);
    check_swiglu(dtype, 5000, 2.0);
    for (int head_dim = 2; head_dim <= 256; head_dim += head_dim < 40 ? 2 : 72) check_rotate(dtype, head_dim, 7);
    check_rotate(dtype, 64, 130);
    check_rotate(dtype, 6, 1);
  }
  for (int64_t count = 1; count < 10000; count = 3 * count + 1) check_add(count);
}

// Times.

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#define TIME(best, call)                                                                                               \
  do {                                                                                                                 \
    double total = 0.0;                                                                                                \
    (best) = 1e30;                                                                                                     \
    for (int repeat = 0; repeat < 1000 && (total < 0.3 || repeat < 3); repeat++) {                                     \
      const double start = seconds();                                                                                  \
      call;                                                                                                            \
      const double time = seconds() - start;                                                                           \
      total += time;                                                                                                   \
      if (time < (best)) (best) = time;                                                                                \
    }                                                                                                                  \
  } while (0)

// Values of which the same million repeats: making random ones takes longer than what is timed.
static array repeated(fp8core_dtype dtype, int64_t count) {
  const int64_t piece = (int64_t)1 << 20;
  array created = create(dtype, count);
  for (int64_t i = 0; i < count && i < piece; i++) put(&created, i, random_value(1.0));
  const size_t size = fp8core_dtype_size(dtype);
  for (int64_t i = piece; i < count; i += piece)
    memcpy(created.data + (size_t)i * size, created.data, (size_t)(count - i < piece ? count - i : piece) * size);
  return created;
}

// What is timed: for one core of a CPU, or for a whole GPU.
#if defined(FP8_TEST_CUDA)
enum { ROWS = 8192, COLUMNS = 4096, LOGIT_ROWS = 2048, SEQUENCES = 4, HEADS = 32, LONGEST = 8192 };
#else
enum { ROWS = 256, COLUMNS = 3072, LOGIT_ROWS = 16, SEQUENCES = 1, HEADS = 4, LONGEST = 1024 };
#endif

static void report(const char *what, fp8core_dtype dtype, int64_t rows, int64_t columns, double time, double bytes) {
  printf("%-8s %s %-18s  %5lld x %5lld  %8.3f ms  %8.1f GB/s\n", name, fp8core_dtype_name(dtype), what, (long long)rows,
         (long long)columns, time * 1e3, bytes / time * 1e-9);
}

static void bench_attention(fp8core_dtype dtype) {
  const char *type = fp8core_dtype_name(dtype);
  double best;
  for (int64_t length = LONGEST / 16; length <= LONGEST; length *= 4) {
    const attention_case parameters = {dtype, SEQUENCES, length, HEADS, HEADS, 64, 1.0};
    attention_memory memory = create_attention(&parameters);
    // Causal: half of the scores count.
    const double flops = 2.0 * (double)length * (double)length * 64.0 * HEADS * SEQUENCES;
    TIME(best, run_forward(&memory));
    printf("%-8s %s attention           %d heads of 64, length %4lld  %8.3f ms  %8.1f GFLOP/s\n", name, type,
           HEADS * SEQUENCES, (long long)length, best * 1e3, flops / best * 1e-9);
    TIME(best, run_backward(&memory));
    printf("%-8s %s attention backward  %d heads of 64, length %4lld  %8.3f ms  %8.1f GFLOP/s\n", name, type,
           HEADS * SEQUENCES, (long long)length, best * 1e3, 2.5 * flops / best * 1e-9);
    release_attention(&memory);
  }
}

static void bench(fp8core_dtype dtype) {
  double best;
  bench_attention(dtype);
  const int64_t vocabulary = 50257;
  const double row_bytes = (double)ROWS * (double)COLUMNS * (double)fp8core_dtype_size(dtype);
  array scratch = row_scratch(vocabulary, ROWS);
  array wide = repeated(dtype, 2 * (int64_t)ROWS * COLUMNS);
  array wide_gradient = repeated(dtype, 2 * (int64_t)ROWS * COLUMNS);
  array x = repeated(dtype, (int64_t)ROWS * COLUMNS);
  array out = repeated(dtype, (int64_t)ROWS * COLUMNS);
  array vectors = repeated(FP8CORE_FP32, 4 * COLUMNS + 2 * ROWS);
  int32_t *ids = create_ids(ROWS + 1);
  for (int32_t i = 0; i <= ROWS; i++) ids[i] = i;

  fp8gpt_embedding embedding = {.dtype = dtype, .rows = ROWS, .columns = COLUMNS, .length = ROWS, .tokens = ids};
  embedding.words = x.data;
  embedding.out = out.data;
  TIME(best, RUN(embed, &embedding));
  report("embedding", dtype, ROWS, COLUMNS, best, 2.0 * row_bytes);
  fp8gpt_embedding_backward embedding_backward = {
    .dtype = dtype, .rows = ROWS, .columns = COLUMNS, .length = ROWS, .tokens = ids, .order = ids, .starts = ids};
  embedding_backward.dout = x.data;
  embedding_backward.runs = ROWS;
  embedding_backward.gradient_dtype = dtype;
  embedding_backward.dwords = out.data;
  TIME(best, RUN(embed_backward, &embedding_backward));
  report("embedding backward", dtype, ROWS, COLUMNS, best, 3.0 * row_bytes);

  fp8gpt_norm norm = {.dtype = dtype, .rows = ROWS, .columns = COLUMNS, .eps = 1e-5f};
  norm.x = x.data;
  norm.delta = wide.data;
  norm.sum = wide_gradient.data;
  norm.y = out.data;
  norm.weight_dtype = FP8CORE_FP32;
  norm.weight = vectors.data;
  norm.bias = floats(&vectors) + COLUMNS;
  norm.mean = floats(&vectors) + 4 * COLUMNS;
  norm.inverse_deviation = norm.mean + ROWS;
  TIME(best, RUN(norm, &norm));
  report("layer norm", dtype, ROWS, COLUMNS, best, 4.0 * row_bytes);
  norm.dropout = (fp8gpt_dropout){0.1f, 1, 2, 3};
  TIME(best, RUN(norm, &norm));
  report("with dropout", dtype, ROWS, COLUMNS, best, 4.0 * row_bytes);
  fp8gpt_norm_backward norm_backward = {.forward = norm, .dy = wide.data, .dx = out.data, .first = 1};
  norm_backward.forward.delta = NULL;
  norm_backward.dweight = floats(&vectors) + 2 * COLUMNS;
  norm_backward.dbias = floats(&vectors) + 3 * COLUMNS;
  TIME(best, RUN(norm_backward, &norm_backward));
  report("its backward pass", dtype, ROWS, COLUMNS, best, 4.0 * row_bytes);

  const fp8gpt_rotation rotation = {
    dtype, ROWS, COLUMNS, ROWS / 8, COLUMNS / 128, 128, wide.data, floats(&wide_gradient), 1.0f};
  TIME(best, RUN(rotate, &rotation));
  report("rotation", dtype, ROWS, COLUMNS, best, 2.0 * row_bytes);
  const fp8gpt_swiglu swiglu = {dtype, ROWS, COLUMNS, wide.data, out.data, x.data, wide_gradient.data};
  TIME(best, RUN(swiglu, &swiglu));
  report("swiglu", dtype, ROWS, COLUMNS, best, 3.0 * row_bytes);
  TIME(best, RUN(swiglu_backward, &swiglu));
  report("its backward pass", dtype, ROWS, COLUMNS, best, 5.0 * row_bytes);
  const fp8gpt_column_sums sums = {dtype, ROWS, COLUMNS, x.data, floats(&vectors), 1};
  TIME(best, RUN(column_sums, &sums));
  report("column sums", dtype, ROWS, COLUMNS, best, row_bytes);

  array logits = repeated(FP8CORE_FP32, LOGIT_ROWS * vocabulary);
  array gradient = create(dtype, LOGIT_ROWS * vocabulary);
  const fp8gpt_cross_entropy loss = {LOGIT_ROWS, vocabulary, floats(&logits), ids,
                                     1.0f,       norm.mean,  dtype,           gradient.data};
  TIME(best, RUN(cross_entropy, &loss));
  // Logits are read twice.
  report("cross-entropy", dtype, LOGIT_ROWS, vocabulary, best,
         (double)(LOGIT_ROWS * vocabulary) * (8.0 + (double)fp8core_dtype_size(dtype)));
  deallocate(ids);
  release(&wide, "wide");
  release(&wide_gradient, "wide_gradient");
  release(&x, "x");
  release(&out, "out");
  release(&vectors, "vectors");
  release(&logits, "logits");
  release(&gradient, "gradient");
  release(&scratch, "scratch");
}

static int usage(FILE *stream, int result) {
  fprintf(stream, "usage: check_model          compare every backend with the references\n"
                  "       check_model --bench  time every backend, a CPU's on one thread\n");
  return result;
}

static void run_backend(int with_bench) {
  random_state = 4321;
  messages = 0;
  if (with_bench) {
    bench(FP8CORE_BF16);
    bench(FP8CORE_FP32);
    return;
  }
  check_embeddings();
  check_norms();
  check_attentions();
  check_attention_block(NAN);
  check_attention_block(-1e20f);
  check_rows();
  check_cross_entropies();
  printf("%s: %d checks, %d failures\n", name, checks, failures);
}

int main(int argc, char **argv) {
  const int with_bench = argc == 2 && strcmp(argv[1], "--bench") == 0;
  if (argc == 2 && strcmp(argv[1], "--help") == 0) return usage(stdout, 0);
  if (argc > 1 && !with_bench) return usage(stderr, 2);
#if defined(FP8_TEST_CUDA)
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) == 0) {
    printf("skipped: %s\n", fp8core_last_error());
    return 77;
  }
  fp8core_context_options options = fp8core_context_options_default();
  options.device.type = FP8CORE_DEVICE_CUDA;
  name = "cuda";
  finish(fp8core_context_create(&model.context, &options), "context");
  finish(fp8gpt_cuda_init(&model), "backend");
  run_backend(with_bench);
  model.backend->destroy(&model);
  fp8core_context_destroy(&model.context);
#else
  model.backend = &fp8gpt_cpu_backend;
  model.threads = with_bench ? 1 : 2;
  for (fp8core_isa isa = FP8CORE_ISA_SCALAR; isa <= fp8core_isa_best(); isa++) {
    // Tiers without loops of their own have those below.
    if (model.ops == fp8gpt_cpu_ops(isa)) continue;
    model.ops = fp8gpt_cpu_ops(isa);
    name = fp8core_isa_name(isa);
    if (!with_bench) check_load_store();
    run_backend(with_bench);
  }
#endif
  return failures ? 1 : 0;
}
