// Every tier of what a model computes beside its products (libfp8gpt/src/cpu/ops_tier.c) against FP64 references.
// `check_model` checks; `check_model --bench` times each tier.
//
// Bounds, with u = 2^-24. A sum of n terms in 16 lanes is off by at most (n / 16 + 32) u sum |terms|; a dot product of
// d terms in any order by (d + 4) u sum |products|. The exponential is within 2^-21 of its value; a softmax whose
// scores are off by e_j, of largest score m, has numerators off by a share of r_j = e_j + max e + u |s_j - m| + 2^-21.
// Each check states how these combine. Stored BF16 values must lie between the roundings of the reference's bounds;
// FP32 ones within them and one rounding.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu/ops.h"
#include "fp8core/fp8core.h"
#include "numerics.h"

#define UNIT 0x1p-24
#define EXP_ERROR 0x1p-21
#define GUARD 64

static int failures;
// Messages of the tier in hand.
static int messages;
static int checks;
static const char *tier_name;
static const fp8gpt_ops *ops;
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
  fprintf(stderr, "FAIL %s ", tier_name);
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n");
}

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  if (!memory) {
    fprintf(stderr, "cannot allocate %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
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
  free(freed->data);
}

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

static const fp8gpt_dropout no_dropout = {0.0f, 0, 0, 0};

// Loads and stores: every BF16 code, and the bits that are rounded away at their ties.

static void check_load_store(void) {
  static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  enum { BLOCK = 256 };
  checks++;
  for (uint32_t high = 0; high < 1u << 16; high += BLOCK)
    for (size_t tail = 0; tail < sizeof(low) / sizeof(*low); tail++) {
      float values[BLOCK];
      float back[BLOCK];
      uint16_t codes[BLOCK];
      for (uint32_t i = 0; i < BLOCK; i++) values[i] = fp8core_bits_float((high + i) << 16 | low[tail]);
      ops->store(FP8CORE_BF16, values, BLOCK, codes);
      ops->load(FP8CORE_BF16, codes, BLOCK, back);
      for (uint32_t i = 0; i < BLOCK; i++) {
        const uint32_t right = fp8core_encode(FP8CORE_BF16, values[i], 0);
        const int same_value = isnan(values[i]) ? isnan(back[i]) : back[i] == fp8core_decode(FP8CORE_BF16, right);
        if (codes[i] != right || !same_value)
          fail("store of %08x: %04x, expected %04x", fp8core_float_bits(values[i]), codes[i], right);
      }
    }
}

// Dropout is defined by its draws, so it is exact.

static void check_drop(void) {
  enum { COUNT = 5000 };
  static float values[COUNT];
  static const float probabilities[] = {0.1f, 0.5f, 0.9f};
  for (int trial = 0; trial < 3; trial++) {
    const fp8gpt_dropout dropout = {probabilities[trial], UINT64_C(0x123456789abcdef), 7, 1u << 8 | 3u};
    const float kept = 1.0f / (1.0f - dropout.probability);
    int dropped = 0;
    checks++;
    for (int i = 0; i < COUNT; i++) values[i] = (float)(i + 1);
    ops->drop(&dropout, 1003, COUNT, values);
    for (int i = 0; i < COUNT; i++) {
      const uint32_t draw = fp8core_draw(dropout.seed, dropout.place, dropout.pass, (uint64_t)(1003 + i));
      const int drops = (double)draw < (double)dropout.probability * 0x1p32;
      dropped += drops;
      if (values[i] != (drops ? 0.0f : (float)(i + 1) * kept)) fail("dropout of element %d: %g", i, (double)values[i]);
    }
    const double share = (double)dropped / COUNT;
    const double deviation = sqrt((double)dropout.probability * (1.0 - (double)dropout.probability) / COUNT);
    if (fabs(share - (double)dropout.probability) > 4.0 * deviation)
      fail("dropout %g drops %g of the elements", (double)dropout.probability, share);
  }
  // A NaN that is kept is one; probability 0 changes nothing.
  const float before = values[17];
  ops->drop(&no_dropout, 0, COUNT, values);
  if (values[17] != before) fail("dropout of probability 0 changes values");
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
  array weight = filled(FP8CORE_FP32, columns, 1.0);
  array bias = filled(FP8CORE_FP32, columns, 1.0);
  array mean = create(FP8CORE_FP32, rows);
  array inverse = create(FP8CORE_FP32, rows);
  array partial = create(FP8CORE_FP32, 2 * columns);
  array scratch = create(FP8CORE_FP32, fp8gpt_row_scratch(columns));
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
  norm.weight = (const float *)(const void *)weight.data;
  norm.bias = layer_norm ? (const float *)(const void *)bias.data : NULL;
  norm.mean = (float *)(void *)mean.data;
  norm.inverse_deviation = (float *)(void *)inverse.data;
  // In two parts, as threads do.
  ops->norm(&norm, 0, rows / 2, (float *)(void *)scratch.data);
  ops->norm(&norm, rows / 2, rows, (float *)(void *)scratch.data);

  fp8gpt_norm_backward backward;
  memset(&backward, 0, sizeof(backward));
  backward.forward = norm;
  backward.dy = dy.data;
  backward.dx = dx.data;
  backward.ddelta = parameters->dropout > 0.0f ? ddelta.data : NULL;
  backward.dweight = NULL;
  backward.dbias = NULL;
  array dx_before = create(dtype, count);
  memcpy(dx_before.data, dx.data, array_bytes(&dx));
  memset(partial.data, 0, array_bytes(&partial));
  ops->norm_backward(&backward, 0, rows / 2, (float *)(void *)partial.data, (float *)(void *)scratch.data);
  ops->norm_backward(&backward, rows / 2, rows, (float *)(void *)partial.data, (float *)(void *)scratch.data);

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
        const int drops = parameters->dropout > 0.0f &&
                          (double)fp8core_draw(99, 3, 5, (uint64_t)i) < (double)parameters->dropout * 0x1p32;
        const double kept = 1.0 / (1.0 - (double)parameters->dropout);
        const double added = drops ? 0.0 : (double)get(&delta, i) * kept;
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
      const int drops = (double)fp8core_draw(99, 3, 5, (uint64_t)at) < (double)parameters->dropout * 0x1p32;
      const double kept = 1.0 / (1.0 - (double)parameters->dropout);
      expect("gradient of a norm's branch", &ddelta, at, drops ? 0.0 : (before + value) * kept,
             drops ? 0.0 : (error + 4.0 * UNIT * fabs(before + value)) * kept);
    }
  }
  for (int64_t i = 0; i < columns; i++) {
    expect("gradient of a norm's weight", &partial, i, dweight[i], ((double)rows + 6.0) * UNIT * dweight_magnitude[i]);
    expect("gradient of a norm's bias", &partial, columns + i, dbias[i], (double)rows * UNIT * dbias_magnitude[i]);
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
  release(&partial, "partial");
  release(&scratch, "scratch of a norm");
}

// A row with a NaN or an infinity shows it in all of its outputs, and in no other row.
static void check_norm_nonfinite(fp8gpt_normalization type, fp8core_dtype dtype, float value, int64_t columns,
                                 int64_t place) {
  array x = filled(dtype, 3 * columns, 1.0);
  array y = create(dtype, 3 * columns);
  array ones = create(FP8CORE_FP32, columns);
  array numbers = create(FP8CORE_FP32, 6);
  array scratch = create(FP8CORE_FP32, fp8gpt_row_scratch(columns));
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
  norm.weight = (const float *)(const void *)ones.data;
  norm.mean = (float *)(void *)numbers.data;
  norm.inverse_deviation = norm.mean + 3;
  ops->norm(&norm, 0, 3, (float *)(void *)scratch.data);
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
  static const int64_t columns[] = {1, 2, 7, 15, 16, 17, 24, 31, 33, 64, 80, 257, 768, 1031};
  for (int type = 0; type < 2; type++)
    for (int wide = 0; wide < 2; wide++) {
      const fp8core_dtype dtype = wide ? FP8CORE_FP32 : FP8CORE_BF16;
      for (size_t i = 0; i < sizeof(columns) / sizeof(*columns); i++) {
        const norm_case cases[] = {
          {(fp8gpt_normalization)type, dtype, 5, columns[i], 1.0, 0.0, 0, 0.0f},
          {(fp8gpt_normalization)type, dtype, 3, columns[i], 1.0, 30.0, 1, 0.0f},
          {(fp8gpt_normalization)type, dtype, 70, columns[i], 1e-3, 0.0, 1, 0.25f},
          {(fp8gpt_normalization)type, dtype, 1, columns[i], 1e6, 0.0, 1, 0.5f},
          {(fp8gpt_normalization)type, dtype, 2, columns[i], 0.0, 0.0, 0, 0.0f},
        };
        for (size_t j = 0; j < sizeof(cases) / sizeof(*cases); j++) check_norm(&cases[j]);
      }
      for (int64_t place = 0; place < 37; place++) {
        check_norm_nonfinite((fp8gpt_normalization)type, dtype, NAN, 37, place);
        check_norm_nonfinite((fp8gpt_normalization)type, dtype, INFINITY, 37, place);
      }
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
  created.scratch = create(FP8CORE_FP32, fp8gpt_attention_scratch(parameters->length, parameters->head_dim,
                                                                  parameters->heads / parameters->kv_heads));
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
  attention->log_sums = (float *)(void *)created.log_sums.data;
  attention->dout = created.dout.data;
  attention->dqkv = created.dqkv.data;
  return created;
}

static void run_forward(attention_memory *memory) {
  for (int64_t sequence = 0; sequence < memory->attention.sequences; sequence++)
    for (int head = 0; head < memory->attention.heads; head++)
      ops->attention(&memory->attention, sequence, head, (float *)(void *)memory->scratch.data);
}

static void run_backward(attention_memory *memory) {
  for (int64_t sequence = 0; sequence < memory->attention.sequences; sequence++)
    for (int head = 0; head < memory->attention.kv_heads; head++)
      ops->attention_backward(&memory->attention, sequence, head, (float *)(void *)memory->scratch.data);
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
    found->error[key] = ((double)of->head_dim + 6.0) * UNIT * magnitude;
    if (sum > found->largest) found->largest = sum;
    if (found->error[key] > found->largest_error) found->largest_error = found->error[key];
  }
}

// The output is off by sum p_j |v_j| (expm1(r_j) + D + (T + 16) u), with D = sum p_j expm1(r_j) of the denominator.
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
      error += fabs(term) * (space->error[key] + share * 1.1 + rounding);
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
        const double rounding = ((double)(length * shared) + 8.0) * UNIT;
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
  array scratch = create(FP8CORE_FP32, 3 * of->head_dim + of->length);
  for (int64_t row = 0; row < of->length; row++)
    for (int64_t i = 0; i < cached; i++)
      put(&cache, row * cached + i, get(&memory->qkv, (first + row) * stride + (int64_t)of->heads * of->head_dim + i));
  for (int64_t position = 0; position < of->length; position += piece) {
    const size_t size = fp8core_dtype_size(of->dtype);
    fp8gpt_attention attention = memory->attention;
    attention.sequences = 1;
    attention.length = of->length - position < piece ? of->length - position : piece;
    attention.qkv = memory->qkv.data + (size_t)((first + position) * stride) * size;
    attention.out = out.data + (size_t)(position * of->heads * of->head_dim) * size;
    for (int head = 0; head < of->heads; head++)
      ops->attention_cached(&attention, cache.data, position, head, (float *)(void *)scratch.data);
  }
  for (int64_t query = 0; query < of->length; query++)
    for (int head = 0; head < of->heads; head++)
      expect_attention(of, &memory->qkv, first, query, head, space, &out, query, NULL, "attention with a cache");
  release(&cache, "cache");
  release(&out, "cached attention's output");
  release(&scratch, "scratch of cached attention");
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
    const int64_t stride = qkv_stride(&parameters);
    const int64_t columns = 2 * (int64_t)parameters.kv_heads * parameters.head_dim;
    array cache = create(dtype, length * columns);
    array scratch = create(FP8CORE_FP32, 3 * parameters.head_dim + length);
    for (int64_t i = 0; i < length * columns; i++)
      put(&cache, i,
          get(&clean.qkv, i / columns * stride + (int64_t)parameters.heads * parameters.head_dim + i % columns));
    clean.attention.sequences = 1;
    for (int head = 0; head < parameters.heads; head++)
      ops->attention_cached(&clean.attention, cache.data, 0, head, (float *)(void *)scratch.data);
    release(&cache, "cache");
    release(&scratch, "scratch of cached attention");
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
  array scratch = create(FP8CORE_FP32, 2 * head_dim);
  checks++;
  memcpy(before.data, data.data, array_bytes(&data));
  for (int64_t position = 0; position < length; position++)
    for (int i = 0; i < head_dim / 2; i++) {
      const double angle = (double)position * pow(10000.0, -2.0 * i / head_dim);
      put(&angles, position * head_dim + i, (float)cos(angle));
      put(&angles, position * head_dim + head_dim / 2 + i, (float)sin(angle));
    }
  const float *table = (const float *)(const void *)angles.data;
  for (int sign = 1; sign >= -1; sign -= 2) {
    memcpy(data.data, before.data, array_bytes(&data));
    ops->rotate(dtype, data.data, stride, 0, rows / 2, length, heads, head_dim, table, (float)sign,
                (float *)(void *)scratch.data);
    ops->rotate(dtype, data.data, stride, rows / 2, rows, length, heads, head_dim, table, (float)sign,
                (float *)(void *)scratch.data);
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
  array scratch = create(FP8CORE_FP32, fp8gpt_row_scratch(width));
  checks++;
  for (size_t i = 0; i < sizeof(special) / sizeof(*special) && (int64_t)i < width; i++)
    put(&gate_up, 2 * width + (int64_t)i, special[i]);
  ops->swiglu(dtype, gate_up.data, 0, 1, width, out.data, (float *)(void *)scratch.data);
  ops->swiglu(dtype, gate_up.data, 1, rows, width, out.data, (float *)(void *)scratch.data);
  ops->swiglu_backward(dtype, gate_up.data, dout.data, 0, 2, width, gradient.data, (float *)(void *)scratch.data);
  ops->swiglu_backward(dtype, gate_up.data, dout.data, 2, rows, width, gradient.data, (float *)(void *)scratch.data);
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
  for (int64_t i = 0; i < width; i++)
    for (int part = 0; part < 2; part++) {
      const float kept = get(&gate_up, i + part * width);
      put(&gate_up, i + part * width, NAN);
      ops->swiglu(dtype, gate_up.data, 0, 1, width, out.data, (float *)(void *)scratch.data);
      ops->swiglu_backward(dtype, gate_up.data, dout.data, 0, 1, width, gradient.data, (float *)(void *)scratch.data);
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
  array scratch = create(FP8CORE_FP32, fp8gpt_row_scratch(vocabulary));
  int32_t targets[5];
  fp8gpt_cross_entropy loss;
  memset(&loss, 0, sizeof(loss));
  checks++;
  for (int64_t i = 0; i < rows * vocabulary; i++) put(&logits, i, get(&logits, i) + (float)offset);
  for (int64_t row = 0; row < rows; row++) targets[row] = (int32_t)(random_bits() % (uint64_t)vocabulary);
  targets[0] = (int32_t)vocabulary - 1;
  targets[2] = -1;
  loss.rows = rows;
  loss.vocabulary = vocabulary;
  loss.logits = (const float *)(const void *)logits.data;
  loss.targets = targets;
  loss.scale = 0.25f;
  loss.losses = (float *)(void *)losses.data;
  loss.dtype = dtype;
  loss.dlogits = gradient.data;
  ops->cross_entropy(&loss, 0, 2, (float *)(void *)scratch.data);
  ops->cross_entropy(&loss, 2, rows, (float *)(void *)scratch.data);
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
  // A NaN or an infinity anywhere.
  for (int64_t i = 0; i<vocabulary; i += vocabulary> 100 ? 61 : 1)
    for (int infinite = 0; infinite < 2; infinite++) {
      const float kept = get(&logits, i);
      put(&logits, i, infinite ? INFINITY : NAN);
      ops->cross_entropy(&loss, 0, 2, (float *)(void *)scratch.data);
      if (isfinite(get(&losses, 0)) || isnan(get(&losses, 1)))
        fail("loss of %lld logits with %g at %lld: %g", (long long)vocabulary,
             infinite ? (double)INFINITY : (double)NAN, (long long)i, (double)get(&losses, 0));
      for (int64_t j = 0; j < vocabulary && !infinite; j++)
        if (!isnan(get(&gradient, j))) fail("gradient of logits with a NaN: %g", (double)get(&gradient, j));
      // One that can't be.
      put(&logits, i, -INFINITY);
      ops->cross_entropy(&loss, 0, 1, (float *)(void *)scratch.data);
      if (vocabulary > 1 && i != targets[0] && (!isfinite(get(&losses, 0)) || get(&gradient, i) != 0.0f))
        fail("loss of %lld logits with -inf at %lld: %g", (long long)vocabulary, (long long)i, (double)get(&losses, 0));
      put(&logits, i, kept);
    }
  release(&logits, "logits");
  release(&losses, "losses");
  release(&gradient, "gradient of logits");
  release(&scratch, "scratch of cross-entropy");
}

static void check_cross_entropies(void) {
  static const int64_t vocabularies[] = {2, 3, 15, 16, 17, 31, 32, 33, 48, 257, 1000, 50257};
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

// Column sums: one chain of additions.

static void check_column_sums(fp8core_dtype dtype, int64_t rows, int64_t columns) {
  array data = filled(dtype, rows * columns, 1.0);
  array sums = create(FP8CORE_FP32, columns);
  checks++;
  for (int64_t first = 0; first < columns; first += FP8GPT_COLUMN_GROUP)
    ops->column_sums(dtype, data.data, rows, columns, first,
                     first + FP8GPT_COLUMN_GROUP < columns ? first + FP8GPT_COLUMN_GROUP : columns,
                     (float *)(void *)sums.data);
  for (int64_t column = 0; column < columns; column++) {
    double sum = 0.0;
    double magnitude = 0.0;
    for (int64_t row = 0; row < rows; row++) {
      sum += (double)get(&data, row * columns + column);
      magnitude += fabs((double)get(&data, row * columns + column));
    }
    expect("column sum", &sums, column, sum, (double)rows * UNIT * magnitude);
  }
  release(&data, "data");
  release(&sums, "sums");
}

static void check_rows(void) {
  static const int64_t widths[] = {1, 2, 15, 16, 17, 40, 64, 100, 688};
  for (int wide = 0; wide < 2; wide++) {
    const fp8core_dtype dtype = wide ? FP8CORE_FP32 : FP8CORE_BF16;
    for (size_t i = 0; i < sizeof(widths) / sizeof(*widths); i++) {
      check_swiglu(dtype, widths[i], 2.0);
      check_swiglu(dtype, widths[i], 20.0);
      check_column_sums(dtype, 1 + (int64_t)(random_bits() % 200), widths[i]);
    }
    check_column_sums(dtype, 1000, 600);
    for (int head_dim = 2; head_dim <= 256; head_dim += head_dim < 40 ? 2 : 72) check_rotate(dtype, head_dim, 7);
    check_rotate(dtype, 64, 130);
    check_rotate(dtype, 6, 1);
  }
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

static void bench(fp8core_dtype dtype) {
  const char *type = fp8core_dtype_name(dtype);
  double best;
  for (int64_t length = 64; length <= 1024; length *= 4) {
    const attention_case parameters = {dtype, 1, length, 4, 4, 64, 1.0};
    attention_memory memory = create_attention(&parameters);
    // Causal: half of the scores count.
    const double flops = 2.0 * (double)length * (double)length * 64.0 * 4.0;
    TIME(best, run_forward(&memory));
    printf("%-8s %s attention           4 heads of 64, length %4lld  %8.3f ms  %7.1f GFLOP/s\n", tier_name, type,
           (long long)length, best * 1e3, flops / best * 1e-9);
    TIME(best, run_backward(&memory));
    printf("%-8s %s attention backward  4 heads of 64, length %4lld  %8.3f ms  %7.1f GFLOP/s\n", tier_name, type,
           (long long)length, best * 1e3, 2.5 * flops / best * 1e-9);
    release_attention(&memory);
  }
  const int64_t rows = 256;
  const int64_t columns = 3072;
  const double elements = (double)rows * (double)columns;
  array gate_up = filled(dtype, rows * 2 * columns, 1.0);
  array out = create(dtype, rows * 2 * columns);
  array scratch = create(FP8CORE_FP32, fp8gpt_row_scratch(50257));
  array logits = filled(FP8CORE_FP32, 16 * 50257, 1.0);
  array gradient = create(dtype, 16 * 50257);
  array vectors = filled(FP8CORE_FP32, 2 * columns + 2 * rows, 1.0);
  float *space = (float *)(void *)scratch.data;
  TIME(best, ops->swiglu(dtype, gate_up.data, 0, rows, columns, out.data, space));
  printf("%-8s %s swiglu              %lld x %lld  %8.3f ms  %6.2f ns an element\n", tier_name, type, (long long)rows,
         (long long)columns, best * 1e3, best / elements * 1e9);
  fp8gpt_norm norm;
  memset(&norm, 0, sizeof(norm));
  norm.dtype = dtype;
  norm.rows = rows;
  norm.columns = columns;
  norm.eps = 1e-5f;
  norm.x = gate_up.data;
  norm.delta = gate_up.data;
  norm.sum = out.data;
  norm.y = out.data;
  norm.weight = (const float *)(const void *)vectors.data;
  norm.bias = norm.weight;
  norm.mean = (float *)(void *)vectors.data + 2 * columns;
  norm.inverse_deviation = norm.mean + rows;
  TIME(best, ops->norm(&norm, 0, rows, space));
  printf("%-8s %s layer norm          %lld x %lld  %8.3f ms  %6.2f ns an element\n", tier_name, type, (long long)rows,
         (long long)columns, best * 1e3, best / elements * 1e9);
  norm.dropout = (fp8gpt_dropout){0.1f, 1, 2, 3};
  TIME(best, ops->norm(&norm, 0, rows, space));
  printf("%-8s %s with dropout        %lld x %lld  %8.3f ms  %6.2f ns an element\n", tier_name, type, (long long)rows,
         (long long)columns, best * 1e3, best / elements * 1e9);
  int32_t targets[16] = {0};
  fp8gpt_cross_entropy loss = {16,    50257,        (const float *)(const void *)logits.data, targets, 1.0f, norm.mean,
                               dtype, gradient.data};
  TIME(best, ops->cross_entropy(&loss, 0, 16, space));
  printf("%-8s %s cross-entropy       16 x 50257  %8.3f ms  %6.2f ns an element\n", tier_name, type, best * 1e3,
         best / (16.0 * 50257.0) * 1e9);
  release(&gate_up, "gate_up");
  release(&out, "out");
  release(&scratch, "scratch");
  release(&logits, "logits");
  release(&gradient, "gradient");
  release(&vectors, "vectors");
}

static int usage(FILE *stream, int result) {
  fprintf(stream, "usage: check_model          compare every tier with the references\n"
                  "       check_model --bench  time every tier, on one thread\n");
  return result;
}

int main(int argc, char **argv) {
  const int with_bench = argc == 2 && strcmp(argv[1], "--bench") == 0;
  if (argc == 2 && strcmp(argv[1], "--help") == 0) return usage(stdout, 0);
  if (argc > 1 && !with_bench) return usage(stderr, 2);
  const fp8gpt_ops *last = NULL;
  for (fp8core_isa isa = FP8CORE_ISA_SCALAR; isa <= fp8core_isa_best(); isa++) {
    ops = fp8gpt_cpu_ops(isa);
    tier_name = fp8core_isa_name(isa);
    // Tiers without loops of their own have those below.
    if (ops == last) continue;
    last = ops;
    if (with_bench) {
      bench(FP8CORE_BF16);
      bench(FP8CORE_FP32);
      continue;
    }
    random_state = 4321;
    messages = 0;
    check_load_store();
    check_drop();
    check_norms();
    check_attentions();
    check_attention_block(NAN);
    check_attention_block(-1e20f);
    check_rows();
    check_cross_entropies();
    printf("%s: %d checks, %d failures\n", tier_name, checks, failures);
  }
  return failures ? 1 : 0;
}
