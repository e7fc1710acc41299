#include "fp8core/gemm.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "gemm_rules.h"
#include "internal.h"
#include "overlap.h"

#define EPILOGUE_LAST FP8CORE_EPILOGUE_GELU_BACKWARD

static fp8core_status refuse_overlaps(const fp8core_region *written, const fp8core_region *const *others, int count) {
  for (int i = 0; i < count; i++) FP8CORE_TRY(fp8core_refuse_overlap(written, others[i]));
  return FP8CORE_OK;
}

static fp8core_status check_matrix(const fp8core_context *context, const char *name, const fp8core_tensor *tensor,
                                   fp8core_tensor *copy) {
  FP8CORE_TRY(fp8core_check_tensor(context, name, tensor));
  if (tensor->dimensions != 2) return fp8core_invalid("%s has %d dimensions, expected 2", name, tensor->dimensions);
  *copy = *tensor;
  copy->row_stride = fp8core_row_stride(tensor);
  return FP8CORE_OK;
}

static fp8core_status check_shape(const char *name, const fp8core_tensor *tensor, int64_t m, int64_t n) {
  if (tensor->shape[0] != m || tensor->shape[1] != n)
    return fp8core_invalid("%s is [%lld, %lld], expected [M, N] = [%lld, %lld]", name, (long long)tensor->shape[0],
                           (long long)tensor->shape[1], (long long)m, (long long)n);
  return FP8CORE_OK;
}

static fp8core_status check_vector(const fp8core_context *context, const char *name, const fp8core_tensor *tensor,
                                   int64_t n, fp8core_tensor *copy) {
  FP8CORE_TRY(fp8core_check_tensor(context, name, tensor));
  if (tensor->dimensions != 1 || tensor->shape[0] != n)
    return fp8core_invalid("%s has %d dimensions and length %lld, expected a vector of N = %lld", name,
                           tensor->dimensions, (long long)fp8core_row_length(tensor), (long long)n);
  *copy = *tensor;
  copy->row_stride = fp8core_row_stride(tensor);
  return FP8CORE_OK;
}

static fp8core_status check_wide_dtype(const char *name, const fp8core_tensor *tensor) {
  if (tensor->dtype == FP8CORE_E4M3 || tensor->dtype == FP8CORE_E5M2)
    return fp8core_invalid("%s is %s, expected fp32, bf16 or fp16", name, fp8core_dtype_name(tensor->dtype));
  return FP8CORE_OK;
}

static fp8core_status check_options(const fp8core_gemm_options *options) {
  if (!isfinite(options->alpha))
    return fp8core_invalid("alpha is %g, expected a finite number", (double)options->alpha);
  if (!isfinite(options->beta)) return fp8core_invalid("beta is %g, expected a finite number", (double)options->beta);
  if ((int)options->epilogue < 0 || options->epilogue > EPILOGUE_LAST)
    return fp8core_invalid("epilogue is %d, expected 0 to %d", (int)options->epilogue, (int)EPILOGUE_LAST);
  if (options->batch < 1) return fp8core_invalid("batch is %lld, expected at least 1", (long long)options->batch);
  const struct {
    const char *name;
    int64_t value;
  } strides[] = {{"a", options->batch_stride_a},
                 {"b", options->batch_stride_b},
                 {"c", options->batch_stride_c},
                 {"d", options->batch_stride_d},
                 {"auxiliary", options->batch_stride_auxiliary}};
  for (size_t i = 0; i < sizeof(strides) / sizeof(strides[0]); i++)
    if (strides[i].value < 0)
      return fp8core_invalid("batch_stride_%s is %lld, expected 0 or more", strides[i].name,
                             (long long)strides[i].value);
  const int backward =
    options->epilogue == FP8CORE_EPILOGUE_RELU_BACKWARD || options->epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD;
  if (backward && !options->auxiliary)
    return fp8core_invalid("auxiliary is NULL, expected the pre-activations that epilogue %d reads",
                           (int)options->epilogue);
  if (options->epilogue == FP8CORE_EPILOGUE_NONE && options->auxiliary)
    return fp8core_invalid("auxiliary is set, expected NULL without an activation");
  return FP8CORE_OK;
}

static fp8core_status check_inner(const fp8core_gemm_job *job) {
  const int transpose_a = job->options.transpose_a != 0;
  const int transpose_b = job->options.transpose_b != 0;
  const int64_t k_of_b = job->b.shape[transpose_b];
  if (job->k != k_of_b)
    return fp8core_invalid("A is [%lld, %lld]%s with K = %lld, but B is [%lld, %lld]%s with K = %lld, expected equal K",
                           (long long)job->a.shape[0], (long long)job->a.shape[1], transpose_a ? " transposed" : "",
                           (long long)job->k, (long long)job->b.shape[0], (long long)job->b.shape[1],
                           transpose_b ? " transposed" : "", (long long)k_of_b);
  return FP8CORE_OK;
}

// Matrices of a batch that are written: one after the other, or side by side in the same rows, as the heads of an
// attention layer are.
static fp8core_status check_batch_apart(const char *name, const fp8core_tensor *tensor, int64_t batch, int64_t stride) {
  const int64_t m = tensor->shape[0];
  const int64_t n = tensor->shape[1];
  if (batch == 1 || m == 0 || n == 0) return FP8CORE_OK;
  const int apart = stride >= (m - 1) * tensor->row_stride + n;
  const int interleaved = stride >= n && (batch - 1) * stride <= tensor->row_stride - n;
  if (apart || interleaved) return FP8CORE_OK;
  return fp8core_invalid("batch_stride_%s is %lld, which makes the [%lld, %lld] matrices overlap (row stride %lld)",
                         name, (long long)stride, (long long)m, (long long)n, (long long)tensor->row_stride);
}

static fp8core_status check_aliasing(const fp8core_gemm_job *job) {
  const fp8core_gemm_options *options = &job->options;
  const fp8core_tensor none = {0};
  fp8core_region a;
  fp8core_region b;
  fp8core_region c;
  fp8core_region d;
  fp8core_region bias;
  fp8core_region auxiliary;
  fp8core_region bias_gradient;
  FP8CORE_TRY(fp8core_region_of("A", &job->a, options->batch, options->batch_stride_a, &a));
  FP8CORE_TRY(fp8core_region_of("B", &job->b, options->batch, options->batch_stride_b, &b));
  FP8CORE_TRY(fp8core_region_of("D", &job->d, options->batch, options->batch_stride_d, &d));
  FP8CORE_TRY(check_batch_apart("d", &job->d, options->batch, options->batch_stride_d));
  memset(&c, 0, sizeof(c));
  if (job->c.data) {
    FP8CORE_TRY(fp8core_region_of("C", &job->c, options->batch, options->batch_stride_c, &c));
    const int same = job->c.data == job->d.data && job->c.dtype == job->d.dtype &&
                     (job->m == 1 || job->c.row_stride == job->d.row_stride) &&
                     (options->batch == 1 || options->batch_stride_c == options->batch_stride_d);
    if (!same && fp8core_regions_overlap(&c, &d))
      return fp8core_overlap(&c, &d, "distinct memory, or the same memory with equal dtype and strides");
  }
  FP8CORE_TRY(fp8core_region_of("bias", job->bias.data ? &job->bias : &none, 1, 0, &bias));
  FP8CORE_TRY(fp8core_region_of("auxiliary", job->auxiliary.data ? &job->auxiliary : &none, options->batch,
                                options->batch_stride_auxiliary, &auxiliary));
  FP8CORE_TRY(
    fp8core_region_of("bias_gradient", job->bias_gradient.data ? &job->bias_gradient : &none, 1, 0, &bias_gradient));
  if (!job->bias.data) bias.span = 0;
  if (!job->auxiliary.data) auxiliary.span = 0;
  if (!job->bias_gradient.data) bias_gradient.span = 0;
  const fp8core_region *const read_beside_d[] = {&a, &b, &bias, &auxiliary};
  const fp8core_region *const beside_auxiliary[] = {&a, &b, &c, &bias};
  const fp8core_region *const beside_gradient[] = {&a, &b, &c, &d, &bias, &auxiliary};
  FP8CORE_TRY(refuse_overlaps(&d, read_beside_d, 4));
  const int writes_auxiliary =
    job->auxiliary.data && (options->epilogue == FP8CORE_EPILOGUE_RELU || options->epilogue == FP8CORE_EPILOGUE_GELU);
  if (writes_auxiliary) {
    FP8CORE_TRY(check_batch_apart("auxiliary", &job->auxiliary, options->batch, options->batch_stride_auxiliary));
    FP8CORE_TRY(refuse_overlaps(&auxiliary, beside_auxiliary, 4));
  }
  FP8CORE_TRY(refuse_overlaps(&bias_gradient, beside_gradient, 6));
  d.written = 1;
  bias_gradient.written = 1;
  auxiliary.written = writes_auxiliary;
  fp8core_scalars scalars;
  scalars.count = 0;
  fp8core_add_scalars_of(&scalars, "A", &job->a, 0);
  fp8core_add_scalars_of(&scalars, "B", &job->b, 0);
  fp8core_add_scalars_of(&scalars, "C", &job->c, 0);
  fp8core_add_scalars_of(&scalars, "D", &job->d, 1);
  fp8core_add_scalars_of(&scalars, "bias", &job->bias, 0);
  fp8core_add_scalars_of(&scalars, "auxiliary", &job->auxiliary, writes_auxiliary);
  fp8core_add_scalars_of(&scalars, "bias_gradient", &job->bias_gradient, 1);
  const fp8core_region *const data[] = {&a, &b, &c, &d, &bias, &auxiliary, &bias_gradient};
  return fp8core_check_scalars(&scalars, data, 7);
}

fp8core_status fp8core_gemm_prepare(const fp8core_context *context, const fp8core_gemm_options *options,
                                    const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                    const fp8core_tensor *d, fp8core_gemm_job *job, int *empty) {
  memset(job, 0, sizeof(*job));
  job->options = fp8core_gemm_options_default();
  FP8CORE_TRY(fp8core_read_options("fp8core_gemm_options", &job->options, sizeof(job->options), options));
  options = &job->options;
  FP8CORE_TRY(check_options(options));
  FP8CORE_TRY(check_matrix(context, "A", a, &job->a));
  FP8CORE_TRY(check_matrix(context, "B", b, &job->b));
  FP8CORE_TRY(check_matrix(context, "D", d, &job->d));
  job->m = a->shape[options->transpose_a ? 1 : 0];
  job->k = a->shape[options->transpose_a ? 0 : 1];
  job->n = b->shape[options->transpose_b ? 0 : 1];
  FP8CORE_TRY(check_inner(job));
  FP8CORE_TRY(check_shape("D", d, job->m, job->n));
  if (options->beta != 0.0f) {
    if (!c) return fp8core_invalid("C is NULL with beta %g, expected a matrix, or beta 0", (double)options->beta);
    FP8CORE_TRY(check_matrix(context, "C", c, &job->c));
    FP8CORE_TRY(check_shape("C", c, job->m, job->n));
  }
  if (options->bias) {
    FP8CORE_TRY(check_vector(context, "bias", options->bias, job->n, &job->bias));
    FP8CORE_TRY(check_wide_dtype("bias", &job->bias));
  }
  if (options->auxiliary) {
    FP8CORE_TRY(check_matrix(context, "auxiliary", options->auxiliary, &job->auxiliary));
    FP8CORE_TRY(check_shape("auxiliary", options->auxiliary, job->m, job->n));
    FP8CORE_TRY(check_wide_dtype("auxiliary", &job->auxiliary));
  }
  if (options->bias_gradient) {
    FP8CORE_TRY(check_vector(context, "bias_gradient", options->bias_gradient, job->n, &job->bias_gradient));
    if (job->bias_gradient.dtype != FP8CORE_FP32)
      return fp8core_invalid("bias_gradient is %s, expected fp32", fp8core_dtype_name(job->bias_gradient.dtype));
  }
  *empty = job->m == 0 || job->n == 0;
  return check_aliasing(job);
}

fp8core_status fp8core_gemm(fp8core_context *context, const fp8core_gemm_options *options, const fp8core_tensor *a,
                            const fp8core_tensor *b, const fp8core_tensor *c, const fp8core_tensor *d) {
  fp8core_gemm_job job;
  int empty;
  if (!context) return fp8core_invalid("context is NULL, expected a context");
  FP8CORE_TRY(fp8core_gemm_prepare(context, options, a, b, c, d, &job, &empty));
  if (!empty) return context->backend->gemm(context, &job);
  // The sums over no rows.
  if (job.bias_gradient.data && job.n > 0)
    return context->backend->zero(context, job.bias_gradient.data, (size_t)job.n * sizeof(float));
  return FP8CORE_OK;
}

fp8core_status fp8core_gemm_reserve(fp8core_context *context, const fp8core_gemm_options *options,
                                    const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                    const fp8core_tensor *d) {
  fp8core_gemm_job job;
  int empty;
  if (!context) return fp8core_invalid("context is NULL, expected a context");
  FP8CORE_TRY(fp8core_gemm_prepare(context, options, a, b, c, d, &job, &empty));
  return empty ? FP8CORE_OK : fp8core_reserve_product(context, &job);
}

fp8core_status fp8core_reserve_product(fp8core_context *context, const fp8core_gemm_job *job) {
  context->reserving = 1;
  const fp8core_status status = context->backend->gemm(context, job);
  context->reserving = 0;
  return status == FP8CORE_RESERVED ? FP8CORE_OK : status;
}

// One FP32 operation is the double one rounded to FP32: of two FP32 numbers a product is exact in double and a sum
// rounds twice without harm (53 >= 2 * 24 + 2: Figueroa, "When is double rounding innocuous?", SIGNUM 1995).
static double rounded(fp8core_accumulation accumulation, double value) {
  return accumulation == FP8CORE_ACCUMULATE_FP32 ? (double)(float)value : value;
}

// In FP32 the rule of numerics.h; in FP64 the same formulas once more, in double and independent of it: the judge of
// that very rule.
static double reference_activation(fp8core_accumulation accumulation, fp8core_epilogue epilogue, double value,
                                   double auxiliary) {
  if (accumulation == FP8CORE_ACCUMULATE_FP32)
    return (double)fp8core_gemm_activation(epilogue, (float)value, (float)auxiliary);
  const double root = 0.79788456080286535588;
  const double x = epilogue == FP8CORE_EPILOGUE_GELU ? value : auxiliary;
  const double u = root * (x + 0.044715 * x * x * x);
  switch (epilogue) {
  case FP8CORE_EPILOGUE_NONE: break;
  case FP8CORE_EPILOGUE_RELU: return value < 0.0 ? 0.0 : value;
  case FP8CORE_EPILOGUE_GELU: return x == -(double)INFINITY ? -0.0 : 0.5 * x * (1.0 + tanh(u));
  case FP8CORE_EPILOGUE_RELU_BACKWARD: return auxiliary > 0.0 ? value : 0.0;
  case FP8CORE_EPILOGUE_GELU_BACKWARD: {
    if (fabs(x) > (double)FP8CORE_GELU_FLAT) return value * (x > 0.0 ? 1.0 : 0.0);
    const double e = exp(-2.0 * u);
    const double s = 1.0 / (1.0 + e);
    const double slope = 2.0 * x * s * (e * s) * root * (1.0 + 3.0 * 0.044715 * x * x);
    return value * (s + slope == 0.0 ? (double)FP8CORE_GELU_LEAST : s + slope);
  }
  }
  return value;
}

static void raise_amax(float *amax, float value) {
  fp8core_raise_amax(amax, fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE);
}

#define REFERENCE_COLUMNS 64

typedef struct reference_block {
  fp8core_accumulation accumulation;
  int64_t product;
  int64_t column;
  int columns;
  double factor;
  double sums[REFERENCE_COLUMNS];
} reference_block;

static void reference_products(const fp8core_gemm_job *job, const reference_block *block, int64_t row, double *sums) {
  const fp8core_gemm_options *options = &job->options;
  const int64_t a_start = block->product * options->batch_stride_a;
  const int64_t b_start = block->product * options->batch_stride_b;
  for (int j = 0; j < block->columns; j++) sums[j] = 0.0;
  for (int64_t k = 0; k < job->k; k++) {
    const int64_t a_index = options->transpose_a ? k * job->a.row_stride + row : row * job->a.row_stride + k;
    const double a = (double)fp8core_load_element(job->a.dtype, job->a.data, a_start + a_index);
    for (int j = 0; j < block->columns; j++) {
      const int64_t column = block->column + j;
      const int64_t b_index = options->transpose_b ? column * job->b.row_stride + k : k * job->b.row_stride + column;
      const double b = (double)fp8core_load_element(job->b.dtype, job->b.data, b_start + b_index);
      sums[j] = rounded(block->accumulation, sums[j] + rounded(block->accumulation, a * b));
    }
  }
}

static void reference_row(const fp8core_gemm_job *job, reference_block *block, int64_t row) {
  const fp8core_gemm_options *options = &job->options;
  const fp8core_accumulation accumulation = block->accumulation;
  const int factor_fits = fp8core_gemm_factor_fits(block->factor);
  double sums[REFERENCE_COLUMNS];
  reference_products(job, block, row, sums);
  for (int j = 0; j < block->columns; j++) {
    const int64_t column = block->column + j;
    const double factor = factor_fits ? rounded(accumulation, block->factor) : block->factor;
    double value = rounded(accumulation, sums[j] * factor);
    if (job->c.data) {
      const int64_t index = block->product * options->batch_stride_c + row * job->c.row_stride + column;
      const double c = rounded(accumulation, (double)fp8core_load_element(job->c.dtype, job->c.data, index) *
                                               (double)fp8core_scale_of(job->c.scale_inverse));
      value = rounded(accumulation, value + rounded(accumulation, (double)options->beta * c));
    }
    if (job->bias.data) {
      const double bias = (double)fp8core_load_element(job->bias.dtype, job->bias.data, column);
      value =
        rounded(accumulation, value + rounded(accumulation, bias * (double)fp8core_scale_of(job->bias.scale_inverse)));
    }
    double auxiliary = 0.0;
    if (job->auxiliary.data) {
      const int64_t index = block->product * options->batch_stride_auxiliary + row * job->auxiliary.row_stride + column;
      if (options->epilogue == FP8CORE_EPILOGUE_RELU || options->epilogue == FP8CORE_EPILOGUE_GELU) {
        raise_amax(job->auxiliary.amax, (float)value);
        fp8core_store_element(job->auxiliary.dtype, job->auxiliary.data, index,
                              (float)value * fp8core_scale_of(job->auxiliary.scale));
      } else {
        auxiliary = (double)fp8core_load_element(job->auxiliary.dtype, job->auxiliary.data, index) *
                    (double)fp8core_scale_of(job->auxiliary.scale_inverse);
      }
    }
    value = reference_activation(accumulation, options->epilogue, value, auxiliary);
    block->sums[j] = rounded(accumulation, block->sums[j] + value);
    raise_amax(job->d.amax, (float)value);
    fp8core_store_element(job->d.dtype, job->d.data,
                          block->product * options->batch_stride_d + row * job->d.row_stride + column,
                          (float)value * fp8core_scale_of(job->d.scale));
  }
}

fp8core_status fp8core_gemm_reference(fp8core_accumulation accumulation, const fp8core_gemm_options *options,
                                      const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                      const fp8core_tensor *d) {
  fp8core_gemm_job job;
  int empty;
  if (accumulation != FP8CORE_ACCUMULATE_FP32 && accumulation != FP8CORE_ACCUMULATE_FP64)
    return fp8core_invalid("accumulation is %d, expected 0 (FP32) or 1 (FP64)", (int)accumulation);
  FP8CORE_TRY(fp8core_gemm_prepare(NULL, options, a, b, c, d, &job, &empty));
  if (empty) {
    if (job.bias_gradient.data) memset(job.bias_gradient.data, 0, (size_t)job.n * sizeof(float));
    return FP8CORE_OK;
  }
  reference_block block;
  block.accumulation = accumulation;
  block.factor = fp8core_gemm_factor(job.options.alpha, job.a.scale_inverse, job.b.scale_inverse);
  for (block.column = 0; block.column < job.n; block.column += REFERENCE_COLUMNS) {
    block.columns = (int)(job.n - block.column < REFERENCE_COLUMNS ? job.n - block.column : REFERENCE_COLUMNS);
    memset(block.sums, 0, sizeof(block.sums));
    for (block.product = 0; block.product < job.options.batch; block.product++)
      for (int64_t row = 0; row < job.m; row++) reference_row(&job, &block, row);
    if (!job.bias_gradient.data) continue;
    for (int j = 0; j < block.columns; j++) {
      raise_amax(job.bias_gradient.amax, (float)block.sums[j]);
      fp8core_store_element(FP8CORE_FP32, job.bias_gradient.data, block.column + j,
                            (float)block.sums[j] * fp8core_scale_of(job.bias_gradient.scale));
    }
  }
  return FP8CORE_OK;
}
