// The CPU's backend: divides each job among threads, whose loops are a tier's (ops.h). Results do not depend on the
// number of threads: what a thread sums belongs to one row, head, column or group of rows.
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "ops.h"

const fp8gpt_ops *fp8gpt_cpu_ops(fp8core_isa isa) {
#if defined(FP8GPT_HAVE_AVX512)
  if (isa >= FP8CORE_ISA_AVX512) return &fp8gpt_ops_avx512;
#endif
#if defined(FP8GPT_HAVE_AVX2)
  if (isa >= FP8CORE_ISA_AVX2) return &fp8gpt_ops_avx2;
#endif
  (void)isa;
  return &fp8gpt_ops_scalar;
}

// Scratch: a part for each thread, then what a job's threads share.

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Three rows, each padded to whole vectors of any tier.
static int64_t row_scratch(int64_t columns) { return 3 * (columns + 16); }

// Enough for attention_cached() too.
static int64_t attention_scratch(int64_t length, int head_dim, int heads_per_kv_head) {
  const int64_t stride = (head_dim + 15) / 16 * 16;
  const int64_t blocks =
    3 * FP8GPT_QUERY_BLOCK * stride + 5 * FP8GPT_KEY_BLOCK * stride + 3 * FP8GPT_QUERY_BLOCK * FP8GPT_KEY_BLOCK;
  return blocks + heads_per_kv_head * length * (stride + 1);
}

static int64_t thread_floats(const fp8gpt_model *model) {
  const fp8gpt_config *config = &model->config;
  const int64_t columns = larger(larger(config->hidden, config->ffn_hidden), config->vocabulary);
  const int64_t row = row_scratch(columns);
  const int64_t head =
    attention_scratch(config->sequence, config->hidden / config->heads, config->heads / config->kv_heads);
  return larger(larger(row, head), 4096);
}

static float *thread_scratch(const fp8gpt_model *model) {
#if defined(_OPENMP)
  return (float *)model->scratch + omp_get_thread_num() * thread_floats(model);
#else
  return model->scratch;
#endif
}

// FP32 values of a norm's weight and bias: [2, hidden].
static float *vector_values(const fp8gpt_model *model) {
  return (float *)model->scratch + model->threads * thread_floats(model);
}

// Partial sums of columns.
static float *partial_sums(const fp8gpt_model *model) { return vector_values(model) + 2 * model->config.hidden; }

static int64_t norm_groups(int64_t rows) { return (rows + FP8GPT_NORM_GROUP - 1) / FP8GPT_NORM_GROUP; }

static int64_t scratch_bytes(const fp8gpt_model *model) {
  const fp8gpt_config *config = &model->config;
  const int64_t widest = larger((config->heads + 2 * (int64_t)config->kv_heads) * (config->hidden / config->heads),
                                (config->activation == FP8GPT_SWIGLU ? 2 : 1) * (int64_t)config->ffn_hidden);
  const int64_t shared =
    2 * (int64_t)config->hidden + larger(2 * norm_groups(model->rows) * config->hidden, larger(widest, config->hidden));
  return (model->threads * thread_floats(model) + shared) * (int64_t)sizeof(float);
}

#define ROWS_AT_A_TIME 16

#if defined(_OPENMP)
#  define PARALLEL_FOR _Pragma("omp parallel for schedule(dynamic, 1) num_threads(threads)")
#else
#  define PARALLEL_FOR
#endif

#define FOR_ROWS(rows, begin, end, call)                                                                               \
  do {                                                                                                                 \
    const int64_t row_groups = ((rows) + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;                                         \
    const int threads = row_groups < model->threads ? (int)row_groups : model->threads;                                \
    (void)threads;                                                                                                     \
    PARALLEL_FOR                                                                                                       \
    for (int64_t row_group = 0; row_group < row_groups; row_group++) {                                                 \
      const int64_t begin = row_group * ROWS_AT_A_TIME;                                                                \
      const int64_t end = begin + ROWS_AT_A_TIME < (rows) ? begin + ROWS_AT_A_TIME : (rows);                           \
      call;                                                                                                            \
    }                                                                                                                  \
  } while (0)

static const void *at(fp8core_dtype dtype, const void *data, int64_t index) {
  return (const unsigned char *)data + index * (int64_t)fp8core_dtype_size(dtype);
}
static void *place(fp8core_dtype dtype, void *data, int64_t index) {
  return (unsigned char *)data + index * (int64_t)fp8core_dtype_size(dtype);
}

// Embeddings.

static fp8core_status embed(fp8gpt_model *model, const fp8gpt_embedding *job) {
  const fp8core_dtype dtype = job->dtype;
  const int64_t columns = job->columns;
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t row = 0; row < job->rows; row++) {
    float *sum = thread_scratch(model);
    float *values = sum + columns;
    model->ops->load(dtype, at(dtype, job->words, job->tokens[row] * columns), columns, sum);
    if (job->places) {
      model->ops->load(dtype, at(dtype, job->places, (job->position + row % job->length) * columns), columns, values);
      for (int64_t i = 0; i < columns; i++) sum[i] += values[i];
    }
    model->ops->drop(&job->dropout, row * columns, columns, sum);
    model->ops->store(dtype, sum, columns, place(dtype, job->out, row * columns));
  }
  return FP8CORE_OK;
}

// Adds a row of the embedding's gradient to a sum.
static void add_to(const fp8gpt_model *model, const fp8gpt_embedding_backward *job, int64_t row, float *sum,
                   float *values) {
  model->ops->load(job->dtype, at(job->dtype, job->dout, row * job->columns), job->columns, values);
  model->ops->drop(&job->dropout, row * job->columns, job->columns, values);
  for (int64_t i = 0; i < job->columns; i++) sum[i] += values[i];
}

// Adds a sum to a row of a gradient.
static void add_row(const fp8gpt_model *model, const fp8gpt_embedding_backward *job, void *gradient, int64_t row,
                    const float *sum, float *values) {
  void *data = place(job->gradient_dtype, gradient, row * job->columns);
  model->ops->load(job->gradient_dtype, data, job->columns, values);
  for (int64_t i = 0; i < job->columns; i++) values[i] += sum[i];
  model->ops->store(job->gradient_dtype, values, job->columns, data);
}

static fp8core_status embed_backward(fp8gpt_model *model, const fp8gpt_embedding_backward *job) {
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t run = 0; run < job->runs; run++) {
    float *sum = thread_scratch(model);
    float *values = sum + job->columns;
    memset(sum, 0, (size_t)job->columns * sizeof(float));
    for (int32_t i = job->starts[run]; i < job->starts[run + 1]; i++) add_to(model, job, job->order[i], sum, values);
    add_row(model, job, job->dwords, job->tokens[job->order[job->starts[run]]], sum, values);
  }
  if (!job->dplaces) return FP8CORE_OK;
  PARALLEL_FOR
  for (int64_t position = 0; position < job->length; position++) {
    float *sum = thread_scratch(model);
    float *values = sum + job->columns;
    memset(sum, 0, (size_t)job->columns * sizeof(float));
    for (int64_t row = position; row < job->rows; row += job->length) add_to(model, job, row, sum, values);
    add_row(model, job, job->dplaces, position, sum, values);
  }
  return FP8CORE_OK;
}

// Norms.

// The tiers read FP32 weights.
static fp8gpt_norm with_wide_weights(const fp8gpt_model *model, const fp8gpt_norm *job) {
  fp8gpt_norm wide = *job;
  float *values = vector_values(model);
  model->ops->load(job->weight_dtype, job->weight, job->columns, values);
  if (job->bias) model->ops->load(job->weight_dtype, job->bias, job->columns, values + job->columns);
  wide.weight_dtype = FP8CORE_FP32;
  wide.weight = values;
  wide.bias = job->bias ? values + job->columns : NULL;
  return wide;
}

static fp8core_status norm(fp8gpt_model *model, const fp8gpt_norm *job) {
  const fp8gpt_norm wide = with_wide_weights(model, job);
  FOR_ROWS(job->rows, begin, end, model->ops->norm(&wide, begin, end, thread_scratch(model)));
  return FP8CORE_OK;
}

static fp8core_status add(fp8gpt_model *model, const float *values, int64_t count, float *gradient, int first) {
  (void)model;
  for (int64_t i = 0; i < count; i++) gradient[i] = first ? values[i] : gradient[i] + values[i];
  return FP8CORE_OK;
}

static fp8core_status norm_backward(fp8gpt_model *model, const fp8gpt_norm_backward *job) {
  const int64_t rows = job->forward.rows;
  const int64_t columns = job->forward.columns;
  const int64_t groups = norm_groups(rows);
  const int threads = model->threads;
  float *partials = partial_sums(model);
  fp8gpt_norm_backward wide = *job;
  (void)threads;
  wide.forward = with_wide_weights(model, &job->forward);
  memset(partials, 0, (size_t)(2 * groups * columns) * sizeof(float));
  PARALLEL_FOR
  for (int64_t group = 0; group < groups; group++) {
    const int64_t begin = group * FP8GPT_NORM_GROUP;
    const int64_t end = begin + FP8GPT_NORM_GROUP < rows ? begin + FP8GPT_NORM_GROUP : rows;
    model->ops->norm_backward(&wide, begin, end, partials + 2 * group * columns, thread_scratch(model));
  }
  for (int64_t group = 1; group < groups; group++)
    for (int64_t i = 0; i < 2 * columns; i++) partials[i] += partials[2 * group * columns + i];
  (void)add(model, partials, columns, job->dweight, job->first);
  if (job->dbias) (void)add(model, partials + columns, columns, job->dbias, job->first);
  return FP8CORE_OK;
}

// Attention.

static fp8core_status rotate(fp8gpt_model *model, const fp8gpt_rotation *job) {
  FOR_ROWS(job->rows, begin, end, model->ops->rotate(job, begin, end, thread_scratch(model)));
  return FP8CORE_OK;
}

static fp8core_status attention(fp8gpt_model *model, const fp8gpt_attention *job) {
  const int64_t tasks = job->sequences * job->heads;
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t task = 0; task < tasks; task++)
    model->ops->attention(job, task / job->heads, (int)(task % job->heads), thread_scratch(model));
  return FP8CORE_OK;
}

static fp8core_status attention_backward(fp8gpt_model *model, const fp8gpt_attention *job) {
  const int64_t tasks = job->sequences * job->kv_heads;
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t task = 0; task < tasks; task++)
    model->ops->attention_backward(job, task / job->kv_heads, (int)(task % job->kv_heads), thread_scratch(model));
  return FP8CORE_OK;
}

static fp8core_status attention_cached(fp8gpt_model *model, const fp8gpt_attention_cached *job) {
  const fp8gpt_attention *attention = &job->attention;
  const fp8core_dtype dtype = attention->dtype;
  const int64_t cached = 2 * (int64_t)attention->kv_heads * attention->head_dim;
  const int64_t queries = (int64_t)attention->heads * attention->head_dim;
  const int threads = model->threads;
  (void)threads;
  for (int64_t row = 0; row < attention->length; row++)
    memcpy(place(dtype, job->cache, (job->position + row) * cached),
           at(dtype, attention->qkv, row * (queries + cached) + queries), (size_t)cached * fp8core_dtype_size(dtype));
  PARALLEL_FOR
  for (int head = 0; head < attention->heads; head++) model->ops->attention_cached(job, head, thread_scratch(model));
  return FP8CORE_OK;
}

// Feed-forward part and loss.

static fp8core_status swiglu(fp8gpt_model *model, const fp8gpt_swiglu *job) {
  FOR_ROWS(job->rows, begin, end, model->ops->swiglu(job, begin, end, thread_scratch(model)));
  return FP8CORE_OK;
}

static fp8core_status swiglu_backward(fp8gpt_model *model, const fp8gpt_swiglu *job) {
  FOR_ROWS(job->rows, begin, end, model->ops->swiglu_backward(job, begin, end, thread_scratch(model)));
  return FP8CORE_OK;
}

static fp8core_status cross_entropy(fp8gpt_model *model, const fp8gpt_cross_entropy *job) {
  FOR_ROWS(job->rows, begin, end, model->ops->cross_entropy(job, begin, end, thread_scratch(model)));
  return FP8CORE_OK;
}

static fp8core_status column_sums(fp8gpt_model *model, const fp8gpt_column_sums *job) {
  float *sums = partial_sums(model);
  const int64_t groups = (job->columns + FP8GPT_COLUMN_GROUP - 1) / FP8GPT_COLUMN_GROUP;
  const int threads = model->threads;
  (void)threads;
  PARALLEL_FOR
  for (int64_t group = 0; group < groups; group++) {
    const int64_t begin = group * FP8GPT_COLUMN_GROUP;
    const int64_t end = begin + FP8GPT_COLUMN_GROUP < job->columns ? begin + FP8GPT_COLUMN_GROUP : job->columns;
    model->ops->column_sums(job, begin, end, sums);
  }
  return add(model, sums, job->columns, job->gradient, job->first);
}

static const char *attention_by(const fp8gpt_model *model) {
  (void)model;
  return "own";
}

const fp8gpt_backend fp8gpt_cpu_backend = {
  .logit_rows = 256,
  .attention_by = attention_by,
  .scratch_bytes = scratch_bytes,
  .embed = embed,
  .embed_backward = embed_backward,
  .norm = norm,
  .norm_backward = norm_backward,
  .rotate = rotate,
  .attention = attention,
  .attention_backward = attention_backward,
  .attention_cached = attention_cached,
  .swiglu = swiglu,
  .swiglu_backward = swiglu_backward,
  .cross_entropy = cross_entropy,
  .column_sums = column_sums,
  .add = add,
};
