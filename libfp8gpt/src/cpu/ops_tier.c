// Compiled once a tier, with its instruction-set flags and -DTIER=its name; see ops.h. Loops are written so that the
// compiler makes vectors of them.
#include <math.h>
#include <string.h>

#include "internal.h"
#include "ops.h"

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
#define INLINE static inline __attribute__((always_inline))

#define LANES 16
typedef float v_float __attribute__((vector_size(LANES * 4)));
typedef int32_t v_int __attribute__((vector_size(LANES * 4)));

INLINE v_float splat(float value) { return value - (v_float){0}; }

#include "cpu/vector_exp.h"

INLINE v_float v_load(const float *from) {
  v_float value;
  memcpy(&value, from, sizeof(value));
  return value;
}
INLINE void v_store(float *to, v_float value) { memcpy(to, &value, sizeof(value)); }
INLINE v_float v_select(v_int mask, v_float yes, v_float no) {
  return (v_float)(((v_int)yes & mask) | ((v_int)no & ~mask));
}
INLINE v_float v_max(v_float a, v_float b) { return v_select(a > b, a, b); }

INLINE float sum_lanes(v_float value) {
  float sum = 0.0f;
  for (int i = 0; i < LANES; i++) sum += value[i];
  return sum;
}
INLINE float max_lanes(v_float value) {
  float largest = value[0];
  for (int i = 1; i < LANES; i++) largest = value[i] > largest ? value[i] : largest;
  return largest;
}

// exp(x) for x <= 88, 0 below -87.
INLINE v_float v_exp(v_float x) {
  v_int exponent;
  const v_float p = fp8core_vector_exp(v_max(x, splat(-87.0f)), &exponent);
  const v_float scaled = p * (v_float)((exponent + 127) << 23);
  // A NaN stays one.
  return v_select(x != x, x, v_select(x < splat(-87.0f), splat(0.0f), scaled));
}

static void load(fp8core_dtype dtype, const void *source, int64_t count, float *values) {
  if (dtype == FP8CORE_FP32) {
    memcpy(values, source, (size_t)count * sizeof(float));
    return;
  }
  const uint16_t *codes = source;
  uint32_t *bits = (uint32_t *)(void *)values;
  for (int64_t i = 0; i < count; i++) bits[i] = (uint32_t)codes[i] << 16;
}

static void store(fp8core_dtype dtype, const float *values, int64_t count, void *destination) {
  if (dtype == FP8CORE_FP32) {
    memcpy(destination, values, (size_t)count * sizeof(float));
    return;
  }
  uint16_t *codes = destination;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
    codes[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  }
}

INLINE const void *at(fp8core_dtype dtype, const void *data, int64_t index) {
  return (const unsigned char *)data + index * (dtype == FP8CORE_FP32 ? 4 : 2);
}
INLINE void *place(fp8core_dtype dtype, void *data, int64_t index) {
  return (unsigned char *)data + index * (dtype == FP8CORE_FP32 ? 4 : 2);
}

static void drop(const fp8gpt_dropout *dropout, int64_t first, int64_t count, float *values) {
  if (dropout->probability == 0.0f) return;
  const float kept = 1.0f / (1.0f - dropout->probability);
  const double threshold = (double)dropout->probability * 4294967296.0;
  uint32_t draws[4];
  for (int64_t i = 0; i < count; i++) {
    const uint64_t element = (uint64_t)(first + i);
    if (i == 0 || element % 4 == 0)
      fp8core_draw_block(dropout->seed, dropout->place, dropout->pass, element / 4, draws);
    values[i] = (double)draws[element % 4] < threshold ? 0.0f : values[i] * kept;
  }
}

// Sums over a row in 16 lanes, the rest after them.
INLINE float row_sum(const float *x, int64_t count) {
  v_float sum = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sum += v_load(x + i);
  float rest = 0.0f;
  for (; i < count; i++) rest += x[i];
  return sum_lanes(sum) + rest;
}
INLINE float row_dot(const float *x, const float *y, int64_t count) {
  v_float sum = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sum += v_load(x + i) * v_load(y + i);
  float rest = 0.0f;
  for (; i < count; i++) rest += x[i] * y[i];
  return sum_lanes(sum) + rest;
}

static void norm(const fp8gpt_norm *norm, int64_t first, int64_t last, float *scratch) {
  const int64_t columns = norm->columns;
  const float *weight = norm->weight;
  const float *bias = norm->bias;
  float *x = scratch;
  float *y = scratch + columns;
  for (int64_t row = first; row < last; row++) {
    const int64_t start = row * columns;
    load(norm->dtype, at(norm->dtype, norm->x, start), columns, x);
    if (norm->delta) {
      load(norm->dtype, at(norm->dtype, norm->delta, start), columns, y);
      drop(&norm->dropout, start, columns, y);
      for (int64_t i = 0; i < columns; i++) x[i] += y[i];
      store(norm->dtype, x, columns, place(norm->dtype, norm->sum, start));
      // What is normalised is what the backward pass will read.
      load(norm->dtype, at(norm->dtype, norm->sum, start), columns, x);
    }
    float mean = 0.0f;
    if (norm->type == FP8GPT_LAYER_NORM) {
      mean = row_sum(x, columns) / (float)columns;
      for (int64_t i = 0; i < columns; i++) x[i] -= mean;
      norm->mean[row] = mean;
    }
    const float inverse = 1.0f / sqrtf(row_dot(x, x, columns) / (float)columns + norm->eps);
    norm->inverse_deviation[row] = inverse;
    if (bias)
      for (int64_t i = 0; i < columns; i++) y[i] = x[i] * inverse * weight[i] + bias[i];
    else
      for (int64_t i = 0; i < columns; i++) y[i] = x[i] * inverse * weight[i];
    store(norm->dtype, y, columns, place(norm->dtype, norm->y, start));
  }
}

static void norm_backward(const fp8gpt_norm_backward *backward, int64_t first, int64_t last, float *partial,
                          float *scratch) {
  const fp8gpt_norm *norm = &backward->forward;
  const int64_t columns = norm->columns;
  const float *weight = norm->weight;
  float *x = scratch;
  float *dy = scratch + columns;
  float *dx = scratch + 2 * columns;
  float *dweight = partial;
  float *dbias = partial + columns;
  for (int64_t row = first; row < last; row++) {
    const int64_t start = row * columns;
    const float mean = norm->type == FP8GPT_LAYER_NORM ? norm->mean[row] : 0.0f;
    const float inverse = norm->inverse_deviation[row];
    load(norm->dtype, at(norm->dtype, norm->x, start), columns, x);
    load(norm->dtype, at(norm->dtype, backward->dy, start), columns, dy);
    for (int64_t i = 0; i < columns; i++) x[i] = (x[i] - mean) * inverse;
    for (int64_t i = 0; i < columns; i++) dweight[i] += dy[i] * x[i];
    for (int64_t i = 0; i < columns; i++) dbias[i] += dy[i];
    for (int64_t i = 0; i < columns; i++) dy[i] *= weight[i];
    const float along = row_dot(dy, x, columns) / (float)columns;
    const float average = norm->type == FP8GPT_LAYER_NORM ? row_sum(dy, columns) / (float)columns : 0.0f;
    load(norm->dtype, at(norm->dtype, backward->dx, start), columns, dx);
    for (int64_t i = 0; i < columns; i++) dx[i] += inverse * (dy[i] - average - x[i] * along);
    store(norm->dtype, dx, columns, place(norm->dtype, backward->dx, start));
    if (backward->ddelta) {
      drop(&norm->dropout, start, columns, dx);
      store(norm->dtype, dx, columns, place(norm->dtype, backward->ddelta, start));
    }
  }
}

// Queries at `position` and after, against keys and values of the cache.
static void attention_cached(const fp8gpt_attention_cached *job, int head, float *scratch) {
  const fp8gpt_attention *attention = &job->attention;
  const fp8core_dtype dtype = attention->dtype;
  const int head_dim = attention->head_dim;
  const int kv_head = head / (attention->heads / attention->kv_heads);
  const int64_t row_stride = (int64_t)(attention->heads + 2 * attention->kv_heads) * head_dim;
  const int64_t cache_stride = 2 * (int64_t)attention->kv_heads * head_dim;
  const float factor = 1.0f / sqrtf((float)head_dim);
  float *query = scratch;
  float *other = query + head_dim;
  float *out = other + head_dim;
  float *scores = out + head_dim;
  for (int64_t row = 0; row < attention->length; row++) {
    const int64_t keys = job->position + row + 1;
    float largest = -INFINITY;
    float sum = 0.0f;
    load(dtype, at(dtype, attention->qkv, row * row_stride + (int64_t)head * head_dim), head_dim, query);
    for (int64_t key = 0; key < keys; key++) {
      load(dtype, at(dtype, job->cache, key * cache_stride + (int64_t)kv_head * head_dim), head_dim, other);
      scores[key] = row_dot(query, other, head_dim) * factor;
      if (!(scores[key] <= largest)) largest = scores[key];
    }
    memset(out, 0, (size_t)head_dim * sizeof(float));
    for (int64_t key = 0; key < keys; key++) {
      const float e = expf(scores[key] - largest);
      load(dtype, at(dtype, job->cache, key * cache_stride + (int64_t)(attention->kv_heads + kv_head) * head_dim),
           head_dim, other);
      sum += e;
      for (int i = 0; i < head_dim; i++) out[i] += e * other[i];
    }
    for (int i = 0; i < head_dim; i++) out[i] /= sum;
    store(dtype, out, head_dim, place(dtype, attention->out, (row * attention->heads + head) * (int64_t)head_dim));
  }
}

static void column_sums(const fp8gpt_column_sums *job, int64_t first, int64_t last, float *sums) {
  float values[FP8GPT_COLUMN_GROUP];
  for (int64_t i = first; i < last; i++) sums[i] = 0.0f;
  for (int64_t row = 0; row < job->rows; row++) {
    load(job->dtype, at(job->dtype, job->data, row * job->columns + first), last - first, values);
    for (int64_t i = first; i < last; i++) sums[i] += values[i - first];
  }
}

static void rotate(const fp8gpt_rotation *job, int64_t first, int64_t last, float *scratch) {
  const fp8core_dtype dtype = job->dtype;
  const int head_dim = job->head_dim;
  const int half = head_dim / 2;
  for (int64_t row = first; row < last; row++) {
    const float *cosines = job->angles + row % job->length * head_dim;
    const float *sines = cosines + half;
    for (int head = 0; head < job->heads; head++) {
      void *values = place(dtype, job->data, row * job->row_stride + (int64_t)head * head_dim);
      load(dtype, values, head_dim, scratch);
      for (int i = 0; i < half; i++) {
        const float low = scratch[i];
        const float high = scratch[i + half];
        scratch[head_dim + i] = low * cosines[i] - job->sign * high * sines[i];
        scratch[head_dim + half + i] = high * cosines[i] + job->sign * low * sines[i];
      }
      store(dtype, scratch + head_dim, head_dim, values);
    }
  }
}

// 0 below -80, so that no x, however large, makes more of it.
INLINE v_float sigmoid(v_float x) {
  const v_float value = splat(1.0f) / (splat(1.0f) + v_exp(-v_max(x, splat(-80.0f))));
  return v_select(x < splat(-80.0f), splat(0.0f), value);
}

// Rows are padded to whole vectors in scratch.
INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

static void swiglu(const fp8gpt_swiglu *job, int64_t first, int64_t last, float *scratch) {
  const fp8core_dtype dtype = job->dtype;
  const int64_t width = job->width;
  float *gate = scratch;
  float *up = scratch + padded(width);
  for (int64_t i = width; i < padded(width); i++) gate[i] = up[i] = 0.0f;
  for (int64_t row = first; row < last; row++) {
    load(dtype, at(dtype, job->gate_up, row * 2 * width), width, gate);
    load(dtype, at(dtype, job->gate_up, row * 2 * width + width), width, up);
    for (int64_t i = 0; i < width; i += LANES) {
      const v_float x = v_load(gate + i);
      v_store(gate + i, x * sigmoid(x) * v_load(up + i));
    }
    store(dtype, gate, width, place(dtype, job->out, row * width));
  }
}

static void swiglu_backward(const fp8gpt_swiglu *job, int64_t first, int64_t last, float *scratch) {
  const fp8core_dtype dtype = job->dtype;
  const int64_t width = job->width;
  float *gate = scratch;
  float *up = gate + padded(width);
  float *gradient = up + padded(width);
  for (int64_t i = width; i < padded(width); i++) gate[i] = up[i] = gradient[i] = 0.0f;
  for (int64_t row = first; row < last; row++) {
    load(dtype, at(dtype, job->gate_up, row * 2 * width), width, gate);
    load(dtype, at(dtype, job->gate_up, row * 2 * width + width), width, up);
    load(dtype, at(dtype, job->dout, row * width), width, gradient);
    for (int64_t i = 0; i < width; i += LANES) {
      const v_float x = v_load(gate + i);
      const v_float s = sigmoid(x);
      const v_float g = v_load(gradient + i);
      v_store(gate + i, g * v_load(up + i) * (s + x * s * (splat(1.0f) - s)));
      v_store(up + i, g * (x * s));
    }
    store(dtype, gate, width, place(dtype, job->dgate_up, row * 2 * width));
    store(dtype, up, width, place(dtype, job->dgate_up, row * 2 * width + width));
  }
}

static void cross_entropy(const fp8gpt_cross_entropy *loss, int64_t first, int64_t last, float *scratch) {
  const int64_t vocabulary = loss->vocabulary;
  const int64_t whole = vocabulary / LANES * LANES;
  for (int64_t row = first; row < last; row++) {
    const float *logits = loss->logits + row * vocabulary;
    const int32_t target = loss->targets[row];
    if (target < 0) {
      loss->losses[row] = 0.0f;
      if (loss->dlogits) {
        memset(scratch, 0, (size_t)vocabulary * sizeof(float));
        store(loss->dtype, scratch, vocabulary, place(loss->dtype, loss->dlogits, row * vocabulary));
      }
      continue;
    }
    v_float largest_lanes = splat(-INFINITY);
    for (int64_t i = 0; i < whole; i += LANES) largest_lanes = v_max(v_load(logits + i), largest_lanes);
    float largest = max_lanes(largest_lanes);
    for (int64_t i = whole; i < vocabulary; i++) largest = logits[i] > largest ? logits[i] : largest;
    v_float sum_lanes_of = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
      const v_float e = v_exp(v_load(logits + i) - splat(largest));
      v_store(scratch + i, e);
      sum_lanes_of += e;
    }
    float sum = sum_lanes(sum_lanes_of);
    for (int64_t i = whole; i < vocabulary; i++) {
      scratch[i] = expf(logits[i] - largest);
      sum += scratch[i];
    }
    // The difference first: logits may be much larger than it.
    loss->losses[row] = logf(sum) + (largest - logits[target]);
    if (!loss->dlogits) continue;
    const float factor = loss->scale / sum;
    for (int64_t i = 0; i < vocabulary; i++) scratch[i] *= factor;
    scratch[target] -= loss->scale;
    store(loss->dtype, scratch, vocabulary, place(loss->dtype, loss->dlogits, row * vocabulary));
  }
}

// Attention: Dao, "FlashAttention-2", 2023, algorithms 1 and 2, in blocks of 32 queries and 64 keys. All products are
// of small blocks in the first-level cache, four rows by 64 columns at a time.

#define QUERIES FP8GPT_QUERY_BLOCK
#define KEYS FP8GPT_KEY_BLOCK
#define VECTORS (KEYS / LANES)

// c [rows, columns] = or += a [rows, inner] b [inner, columns]; columns a multiple of 16, rows of 4.
INLINE void multiply(int rows, int columns, int inner, const float *a, int a_stride, const float *b, int b_stride,
                     float *c, int c_stride, int accumulate) {
  for (int column = 0; column < columns; column += KEYS) {
    const int vectors = (columns - column < KEYS ? columns - column : KEYS) / LANES;
    for (int row = 0; row < rows; row += 4) {
      v_float sums[4][VECTORS];
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < VECTORS; j++)
          sums[i][j] = accumulate && j < vectors ? v_load(c + (row + i) * c_stride + column + j * LANES) : splat(0.0f);
      if (vectors == VECTORS) {
        for (int k = 0; k < inner; k++) {
          v_float right[VECTORS];
          for (int j = 0; j < VECTORS; j++) right[j] = v_load(b + k * b_stride + column + j * LANES);
          for (int i = 0; i < 4; i++) {
            const v_float left = splat(a[(row + i) * a_stride + k]);
            for (int j = 0; j < VECTORS; j++) sums[i][j] += left * right[j];
          }
        }
      } else {
        for (int k = 0; k < inner; k++)
          for (int j = 0; j < vectors; j++) {
            const v_float right = v_load(b + k * b_stride + column + j * LANES);
            for (int i = 0; i < 4; i++) sums[i][j] += splat(a[(row + i) * a_stride + k]) * right;
          }
      }
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < vectors; j++) v_store(c + (row + i) * c_stride + column + j * LANES, sums[i][j]);
    }
  }
}

INLINE int head_stride(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// Rows first .. first + count - 1 of a head, times a factor, padded with zeros to `rows` rows and whole vectors.
static void load_block(fp8core_dtype dtype, const void *data, int64_t row_stride, int64_t first, int64_t count,
                       int rows, int head_dim, float factor, float *block) {
  const int stride = head_stride(head_dim);
  for (int row = 0; row < rows; row++) {
    float *values = block + row * stride;
    int done = 0;
    if (row < count) {
      load(dtype, at(dtype, data, (first + row) * row_stride), head_dim, values);
      for (int i = 0; i < head_dim; i++) values[i] *= factor;
      done = head_dim;
    }
    for (int i = done; i < stride; i++) values[i] = 0.0f;
  }
}

static void transpose(const float *block, int rows, int columns, int stride, float *transposed, int transposed_stride) {
  for (int row = 0; row < rows; row++)
    for (int column = 0; column < columns; column++)
      transposed[column * transposed_stride + row] = block[row * stride + column];
}

static void attention(const fp8gpt_attention *attention, int64_t sequence, int head, float *scratch) {
  const fp8core_dtype dtype = attention->dtype;
  const int head_dim = attention->head_dim;
  const int stride = head_stride(head_dim);
  const int kv_head = head / (attention->heads / attention->kv_heads);
  const int64_t length = attention->length;
  const int64_t row_stride = (int64_t)(attention->heads + 2 * attention->kv_heads) * head_dim;
  const void *rows = at(dtype, attention->qkv, sequence * length * row_stride);
  const void *queries = at(dtype, rows, (int64_t)head * head_dim);
  const void *keys = at(dtype, rows, (int64_t)(attention->heads + kv_head) * head_dim);
  const void *values = at(dtype, rows, (int64_t)(attention->heads + attention->kv_heads + kv_head) * head_dim);
  float *q = scratch;
  float *k = q + QUERIES * stride;
  float *k_transposed = k + KEYS * stride;
  float *v = k_transposed + KEYS * stride;
  float *out = v + KEYS * stride;
  float *scores = out + QUERIES * stride;
  float maxima[QUERIES];
  float sums[QUERIES];
  const float factor = 1.0f / sqrtf((float)head_dim);
  for (int64_t query = 0; query < length; query += QUERIES) {
    const int64_t count = length - query < QUERIES ? length - query : QUERIES;
    load_block(dtype, queries, row_stride, query, count, QUERIES, head_dim, factor, q);
    memset(out, 0, (size_t)(QUERIES * stride) * sizeof(float));
    for (int i = 0; i < QUERIES; i++) {
      maxima[i] = -INFINITY;
      sums[i] = 0.0f;
    }
    for (int64_t key = 0; key < query + count; key += KEYS) {
      const int64_t key_count = length - key < KEYS ? length - key : KEYS;
      load_block(dtype, keys, row_stride, key, key_count, KEYS, head_dim, 1.0f, k);
      transpose(k, KEYS, head_dim, stride, k_transposed, KEYS);
      load_block(dtype, values, row_stride, key, key_count, KEYS, head_dim, 1.0f, v);
      multiply(QUERIES, KEYS, head_dim, q, stride, k_transposed, KEYS, scores, KEYS, 0);
      for (int i = 0; i < QUERIES; i++) {
        float *row = scores + i * KEYS;
        // Keys after the query do not count.
        for (int64_t j = query + i - key + 1 > 0 ? query + i - key + 1 : 0; j < KEYS; j++) row[j] = -INFINITY;
        // A NaN is in no maximum, but in the exponentials.
        v_float largest_lanes = splat(-INFINITY);
        for (int j = 0; j < KEYS; j += LANES) largest_lanes = v_max(v_load(row + j), largest_lanes);
        const float largest = max_lanes(largest_lanes) > maxima[i] ? max_lanes(largest_lanes) : maxima[i];
        if (largest == -INFINITY) {
          for (int j = 0; j < KEYS; j++) {
            row[j] = row[j] != row[j] ? row[j] : 0.0f;
            sums[i] += row[j];
          }
          continue;
        }
        const float correction = maxima[i] == -INFINITY ? 0.0f : expf(maxima[i] - largest);
        v_float sum = {0};
        for (int j = 0; j < KEYS; j += LANES) {
          const v_float e = v_exp(v_load(row + j) - splat(largest));
          v_store(row + j, e);
          sum += e;
        }
        sums[i] = sums[i] * correction + sum_lanes(sum);
        maxima[i] = largest;
        if (correction != 1.0f)
          for (int j = 0; j < stride; j += LANES)
            v_store(out + i * stride + j, v_load(out + i * stride + j) * splat(correction));
      }
      multiply(QUERIES, stride, KEYS, scores, KEYS, v, stride, out, stride, 1);
    }
    for (int64_t i = 0; i < count; i++) {
      const float inverse = 1.0f / sums[i];
      for (int j = 0; j < stride; j++) out[i * stride + j] *= inverse;
      store(
        dtype, out + i * stride, head_dim,
        place(dtype, attention->out, ((sequence * length + query + i) * attention->heads + head) * (int64_t)head_dim));
      attention->log_sums[(sequence * attention->heads + head) * length + query + i] = maxima[i] + logf(sums[i]);
    }
  }
}

static void attention_backward(const fp8gpt_attention *attention, int64_t sequence, int kv_head, float *scratch) {
  const fp8core_dtype dtype = attention->dtype;
  const int head_dim = attention->head_dim;
  const int stride = head_stride(head_dim);
  const int shared = attention->heads / attention->kv_heads;
  const int64_t length = attention->length;
  const int64_t row_stride = (int64_t)(attention->heads + 2 * attention->kv_heads) * head_dim;
  const int64_t out_stride = (int64_t)attention->heads * head_dim;
  const int64_t first_row = sequence * length;
  const int64_t key_offset = (int64_t)(attention->heads + kv_head) * head_dim;
  const int64_t value_offset = key_offset + (int64_t)attention->kv_heads * head_dim;
  const float factor = 1.0f / sqrtf((float)head_dim);
  float *q = scratch;
  float *dout = q + QUERIES * stride;
  float *k = dout + QUERIES * stride;
  float *k_transposed = k + KEYS * stride;
  float *v_transposed = k_transposed + KEYS * stride;
  float *dk = v_transposed + KEYS * stride;
  float *dv = dk + KEYS * stride;
  float *probabilities = dv + KEYS * stride;
  float *dscores = probabilities + QUERIES * KEYS;
  float *transposed = dscores + QUERIES * KEYS;
  float *block = transposed + QUERIES * KEYS;
  // [shared, length]: sums of out * dout, and [shared, length, stride]: gradients of the queries.
  float *deltas = block + QUERIES * stride;
  float *dqueries = deltas + (int64_t)shared * length;
  memset(dqueries, 0, (size_t)(shared * length * stride) * sizeof(float));
  for (int i = 0; i < shared; i++)
    for (int64_t row = 0; row < length; row++) {
      const int64_t from = (first_row + row) * out_stride + (int64_t)(kv_head * shared + i) * head_dim;
      load(dtype, at(dtype, attention->out, from), head_dim, q);
      load(dtype, at(dtype, attention->dout, from), head_dim, dout);
      deltas[i * length + row] = row_dot(q, dout, head_dim);
    }
  for (int64_t key = 0; key < length; key += KEYS) {
    const int64_t key_count = length - key < KEYS ? length - key : KEYS;
    const void *rows = at(dtype, attention->qkv, first_row * row_stride);
    load_block(dtype, at(dtype, rows, value_offset), row_stride, key, key_count, KEYS, head_dim, 1.0f, k);
    transpose(k, KEYS, head_dim, stride, v_transposed, KEYS);
    load_block(dtype, at(dtype, rows, key_offset), row_stride, key, key_count, KEYS, head_dim, 1.0f, k);
    transpose(k, KEYS, head_dim, stride, k_transposed, KEYS);
    memset(dk, 0, (size_t)(KEYS * stride) * sizeof(float));
    memset(dv, 0, (size_t)(KEYS * stride) * sizeof(float));
    for (int i = 0; i < shared; i++) {
      const int head = kv_head * shared + i;
      const float *log_sums = attention->log_sums + (sequence * attention->heads + head) * length;
      for (int64_t query = key / QUERIES * QUERIES; query < length; query += QUERIES) {
        const int64_t count = length - query < QUERIES ? length - query : QUERIES;
        load_block(dtype, at(dtype, rows, (int64_t)head * head_dim), row_stride, query, count, QUERIES, head_dim,
                   factor, q);
        load_block(dtype, at(dtype, attention->dout, first_row * out_stride + (int64_t)head * head_dim), out_stride,
                   query, count, QUERIES, head_dim, 1.0f, dout);
        multiply(QUERIES, KEYS, head_dim, q, stride, k_transposed, KEYS, probabilities, KEYS, 0);
        multiply(QUERIES, KEYS, head_dim, dout, stride, v_transposed, KEYS, dscores, KEYS, 0);
        for (int row = 0; row < QUERIES; row++) {
          float *p = probabilities + row * KEYS;
          float *ds = dscores + row * KEYS;
          if (row >= count) {
            memset(p, 0, KEYS * sizeof(float));
            memset(ds, 0, KEYS * sizeof(float));
            continue;
          }
          for (int64_t j = query + row - key + 1 > 0 ? query + row - key + 1 : 0; j < KEYS; j++) p[j] = -INFINITY;
          const v_float sum = splat(log_sums[query + row]);
          const v_float delta = splat(deltas[i * length + query + row]);
          for (int j = 0; j < KEYS; j += LANES) {
            const v_float probability = v_exp(v_load(p + j) - sum);
            v_store(p + j, probability);
            v_store(ds + j, probability * (v_load(ds + j) - delta));
          }
        }
        transpose(probabilities, QUERIES, KEYS, KEYS, transposed, QUERIES);
        multiply(KEYS, stride, QUERIES, transposed, QUERIES, dout, stride, dv, stride, 1);
        transpose(dscores, QUERIES, KEYS, KEYS, transposed, QUERIES);
        // q carries the factor, which the keys' gradient has too.
        multiply(KEYS, stride, QUERIES, transposed, QUERIES, q, stride, dk, stride, 1);
        float *dq = dqueries + (i * length + query) * stride;
        if (count == QUERIES) {
          multiply(QUERIES, stride, KEYS, dscores, KEYS, k, stride, dq, stride, 1);
        } else {
          multiply(QUERIES, stride, KEYS, dscores, KEYS, k, stride, block, stride, 0);
          for (int64_t row = 0; row < count; row++)
            for (int j = 0; j < stride; j++) dq[row * stride + j] += block[row * stride + j];
        }
      }
    }
    for (int64_t row = 0; row < key_count; row++) {
      const int64_t to = (first_row + key + row) * row_stride;
      store(dtype, dk + row * stride, head_dim, place(dtype, attention->dqkv, to + key_offset));
      store(dtype, dv + row * stride, head_dim, place(dtype, attention->dqkv, to + value_offset));
    }
  }
  for (int i = 0; i < shared; i++)
    for (int64_t row = 0; row < length; row++) {
      float *dq = dqueries + (i * length + row) * stride;
      for (int j = 0; j < head_dim; j++) dq[j] *= factor;
      store(dtype, dq, head_dim,
            place(dtype, attention->dqkv, (first_row + row) * row_stride + (int64_t)(kv_head * shared + i) * head_dim));
    }
}

const fp8gpt_ops NAME(fp8gpt_ops_, TIER) = {
  .load = load,
  .store = store,
  .norm = norm,
  .norm_backward = norm_backward,
  .attention = attention,
  .attention_backward = attention_backward,
  .attention_cached = attention_cached,
  .column_sums = column_sums,
  .drop = drop,
  .rotate = rotate,
  .swiglu = swiglu,
  .swiglu_backward = swiglu_backward,
  .cross_entropy = cross_entropy,
};
