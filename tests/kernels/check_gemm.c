// Every tier of the matrix products against the reference. `check_gemm` checks; `check_gemm --bench` times each tier.
//
// The bound: with u = 2^-24, a sum of K products in any order, of rounded or exact products, is off by at most
// K u / (1 - K u) sum |a| |b| (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1). The
// epilogue adds six roundings at most (factor, C's scale, beta, two sums, bias), and VDPBF16PS takes sums below 2^-126
// as zero. So before the activation a value v is within
//   E = (K + 6) 1.01 u (|alpha / scales| sum |a| |b| + |beta c| + |bias|) + 2 K 2^-126 |alpha / scales|.
// GELU's slope is at most 1.13; its vector form adds 2^-20 |v|, its derivative's 2^-19. Rounding to the format of D is
// monotonic: the stored code must lie between the roundings of v - E and v + E, with no allowance for the format.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fp8core/fp8core.h"

#define GUARD 96
#define UNIT 0x1p-24

static int failures;
static int checks;
static fp8core_context *contexts[5][5];

typedef struct gemm_case {
  fp8core_isa isa;
  int threads;
  fp8core_dtype a_dtype;
  fp8core_dtype b_dtype;
  fp8core_dtype c_dtype;
  fp8core_dtype d_dtype;
  int64_t m;
  int64_t n;
  int64_t k;
  int transpose_a;
  int transpose_b;
  // Elements between the end of a row and the start of the next.
  int64_t gap;
  int64_t batch;
  // Products side by side in the rows of D.
  int interleaved;
  float alpha;
  float beta;
  fp8core_epilogue epilogue;
  int with_bias;
  int with_auxiliary;
  int with_bias_gradient;
  fp8core_dtype auxiliary_dtype;
  // Small integers and scales of 1: every sum is exact, and so is D in FP32.
  int exact;
} gemm_case;

static uint64_t random_state;

static uint64_t random_bits(void) {
  random_state += UINT64_C(0x9E3779B97F4A7C15);
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static int64_t random_below(int64_t limit) { return (int64_t)(random_bits() % (uint64_t)limit); }

static double random_uniform(void) { return (double)(random_bits() >> 11) * 0x1p-53; }

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  if (!memory) {
    fprintf(stderr, "cannot allocate %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
}

static void fail_case(const gemm_case *parameters, const char *format, ...) {
  va_list arguments;
  if (failures++ > 20) return;
  fprintf(stderr,
          "FAIL %s threads=%d %s x %s -> %s (C %s) m=%lld n=%lld k=%lld ta=%d tb=%d gap=%lld batch=%lld%s alpha=%g "
          "beta=%g epilogue=%d bias=%d aux=%d(%s) gradient=%d exact=%d: ",
          fp8core_isa_name(parameters->isa), parameters->threads, fp8core_dtype_name(parameters->a_dtype),
          fp8core_dtype_name(parameters->b_dtype), fp8core_dtype_name(parameters->d_dtype),
          fp8core_dtype_name(parameters->c_dtype), (long long)parameters->m, (long long)parameters->n,
          (long long)parameters->k, parameters->transpose_a, parameters->transpose_b, (long long)parameters->gap,
          (long long)parameters->batch, parameters->interleaved ? " interleaved" : "", (double)parameters->alpha,
          (double)parameters->beta, (int)parameters->epilogue, parameters->with_bias, parameters->with_auxiliary,
          fp8core_dtype_name(parameters->auxiliary_dtype), parameters->with_bias_gradient, parameters->exact);
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n");
}

static float load(fp8core_dtype dtype, const void *data, int64_t index) {
  const unsigned char *bytes = data;
  uint32_t code = 0;
  const size_t size = fp8core_dtype_size(dtype);
  memcpy(&code, bytes + (size_t)index * size, size);
  return fp8core_decode(dtype, code);
}

static void store(fp8core_dtype dtype, void *data, int64_t index, float value) {
  unsigned char *bytes = data;
  const uint32_t code = fp8core_encode(dtype, value, 1);
  const size_t size = fp8core_dtype_size(dtype);
  memcpy(bytes + (size_t)index * size, &code, size);
}

// How far matrices begin from a multiple of 64 bytes: data need not be aligned on the CPU, not even to its elements.
typedef enum placement { ALIGNED, OFF_BY_A_BYTE, OFF_BY_AN_ELEMENT } placement;
static placement placed;

// Memory of a matrix or a batch of them with guard bytes around it.
typedef struct matrix {
  unsigned char *memory;
  size_t bytes;
  // Bytes of the guard before the first element, of 2 * GUARD in all.
  size_t start;
  fp8core_tensor tensor;
  int64_t batch_stride;
  float scale;
  float scale_inverse;
  float amax;
} matrix;

static void create_matrix(matrix *result, fp8core_dtype dtype, int64_t rows, int64_t columns, int64_t gap,
                          int64_t batch, int interleaved) {
  const size_t size = fp8core_dtype_size(dtype);
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const int64_t stride = interleaved ? columns * batch + gap : columns + gap;
  result->batch_stride = interleaved ? columns : rows * stride;
  result->bytes = (size_t)(rows * stride * (interleaved ? 1 : batch)) * size;
  result->memory = allocate(result->bytes + 2 * GUARD);
  result->start = (64 - (uintptr_t)result->memory % 64) % 64 + (placed == OFF_BY_A_BYTE       ? 1
                                                                : placed == OFF_BY_AN_ELEMENT ? size
                                                                                              : 0);
  memset(result->memory, 0xa5, result->bytes + 2 * GUARD);
  result->tensor = fp8core_tensor_matrix(result->memory + result->start, dtype, rows, columns, cpu);
  result->tensor.row_stride = stride;
  result->scale = 1.0f;
  result->scale_inverse = 1.0f;
  result->amax = 0.0f;
}

static void fill(matrix *target, int64_t batch, int exact) {
  const fp8core_tensor *tensor = &target->tensor;
  for (int64_t product = 0; product < batch; product++)
    for (int64_t i = 0; i < tensor->shape[0]; i++)
      for (int64_t j = 0; j < tensor->shape[1]; j++) {
        float value;
        if (exact)
          value = (float)(random_below(9) - 4);
        else
          value = (float)(ldexp(random_uniform() * 2.0 - 1.0, (int)random_below(8) - 3));
        store(tensor->dtype, tensor->data, product * target->batch_stride + i * tensor->row_stride + j, value);
      }
  if (!exact) {
    target->scale = (float)ldexp(1.0 + random_uniform(), (int)random_below(9) - 4);
    target->scale_inverse = 1.0f / target->scale;
  }
  target->tensor.scale = &target->scale;
  target->tensor.scale_inverse = &target->scale_inverse;
}

static matrix magnitudes_of(const matrix *source, int64_t batch) {
  matrix result = *source;
  result.memory = allocate(source->bytes + 2 * GUARD);
  memcpy(result.memory, source->memory, source->bytes + 2 * GUARD);
  result.tensor.data = result.memory + result.start;
  for (int64_t product = 0; product < batch; product++)
    for (int64_t i = 0; i < source->tensor.shape[0]; i++)
      for (int64_t j = 0; j < source->tensor.shape[1]; j++) {
        const int64_t index = product * source->batch_stride + i * source->tensor.row_stride + j;
        store(source->tensor.dtype, result.tensor.data, index,
              fabsf(load(source->tensor.dtype, source->tensor.data, index)));
      }
  return result;
}

static fp8core_context *context_of(fp8core_isa isa, int threads) {
  fp8core_context **context = &contexts[isa][threads];
  if (!*context) {
    fp8core_context_options options = fp8core_context_options_default();
    options.isa = isa;
    options.threads = threads;
    if (fp8core_context_create(context, &options) != FP8CORE_OK) {
      fprintf(stderr, "%s\n", fp8core_last_error());
      exit(1);
    }
  }
  return *context;
}

static int within(const gemm_case *parameters, const char *what, const fp8core_tensor *tensor, int64_t index,
                  double value, double error, float scale, int64_t row, int64_t column) {
  const float stored = load(tensor->dtype, tensor->data, index);
  const int fp8 = tensor->dtype == FP8CORE_E4M3 || tensor->dtype == FP8CORE_E5M2;
  const double slack = error + fabs(value) * 0x1p-22;
  const float low =
    fp8core_decode(tensor->dtype, fp8core_encode(tensor->dtype, (float)((value - slack) * (double)scale), fp8));
  const float high =
    fp8core_decode(tensor->dtype, fp8core_encode(tensor->dtype, (float)((value + slack) * (double)scale), fp8));
  if (stored >= low && stored <= high) return 1;
  fail_case(parameters, "%s[%lld, %lld] is %.9g, expected %.9g to %.9g", what, (long long)row, (long long)column,
            (double)stored, (double)low, (double)high);
  return 0;
}

// Bytes that are not elements must be as create_matrix() left them.
static void check_untouched(const gemm_case *parameters, const char *what, const matrix *target, int64_t batch) {
  const fp8core_tensor *tensor = &target->tensor;
  const size_t size = fp8core_dtype_size(tensor->dtype);
  unsigned char *element = allocate(target->bytes + 2 * GUARD);
  memset(element, 0, target->bytes + 2 * GUARD);
  for (int64_t product = 0; product < batch; product++)
    for (int64_t i = 0; i < tensor->shape[0]; i++)
      memset(element + target->start + (size_t)(product * target->batch_stride + i * tensor->row_stride) * size, 1,
             (size_t)tensor->shape[1] * size);
  for (size_t i = 0; i < target->bytes + 2 * GUARD; i++)
    if (!element[i] && target->memory[i] != 0xa5) {
      fail_case(parameters, "%s: byte %lld beyond the elements was written", what,
                (long long)i - (long long)target->start);
      break;
    }
  free(element);
}

typedef struct expectation {
  // Before the activation, and its bound; after it, and its bound. [batch, M, N]
  double *before;
  double *before_error;
  double *after;
  double *after_error;
} expectation;

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))); }

static double gelu_derivative(double x) {
  const double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.79788456080286535588 * (1.0 + 3.0 * 0.044715 * x * x);
}

static void run_reference(fp8core_accumulation accumulation, const fp8core_gemm_options *options, const matrix *a,
                          const matrix *b, const matrix *c, const matrix *d) {
  if (fp8core_gemm_reference(accumulation, options, &a->tensor, &b->tensor, c ? &c->tensor : NULL, &d->tensor) !=
      FP8CORE_OK) {
    fprintf(stderr, "FAIL reference: %s\n", fp8core_last_error());
    failures++;
  }
}

// The reference gives the sums and their bounds; the rest is computed here in double.
static void expect(const gemm_case *parameters, const matrix *a, const matrix *b, const matrix *c, const float *bias,
                   const matrix *auxiliary, expectation *result) {
  const size_t count = (size_t)(parameters->batch * parameters->m * parameters->n);
  matrix product;
  matrix magnitude;
  matrix a_magnitudes = magnitudes_of(a, a->batch_stride ? parameters->batch : 1);
  matrix b_magnitudes = magnitudes_of(b, b->batch_stride ? parameters->batch : 1);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  create_matrix(&product, FP8CORE_FP32, parameters->m, parameters->n, 0, parameters->batch, 0);
  create_matrix(&magnitude, FP8CORE_FP32, parameters->m, parameters->n, 0, parameters->batch, 0);
  options.transpose_a = parameters->transpose_a;
  options.transpose_b = parameters->transpose_b;
  options.alpha = parameters->alpha;
  options.batch = parameters->batch;
  options.batch_stride_a = a->batch_stride;
  options.batch_stride_b = b->batch_stride;
  options.batch_stride_d = product.batch_stride;
  run_reference(FP8CORE_ACCUMULATE_FP64, &options, a, b, NULL, &product);
  run_reference(FP8CORE_ACCUMULATE_FP64, &options, &a_magnitudes, &b_magnitudes, NULL, &magnitude);
  result->before = allocate(count * sizeof(double));
  result->before_error = allocate(count * sizeof(double));
  result->after = allocate(count * sizeof(double));
  result->after_error = allocate(count * sizeof(double));
  const double factor = fabs((double)parameters->alpha * (double)a->scale_inverse * (double)b->scale_inverse);
  for (int64_t i = 0; i < (int64_t)count; i++) {
    const int64_t batch = i / (parameters->m * parameters->n);
    const int64_t row = i / parameters->n % parameters->m;
    const int64_t column = i % parameters->n;
    double value = (double)load(FP8CORE_FP32, product.tensor.data, i);
    double sum = fabs((double)load(FP8CORE_FP32, magnitude.tensor.data, i));
    if (parameters->beta != 0.0f) {
      const int64_t index = batch * c->batch_stride + row * c->tensor.row_stride + column;
      const double added =
        (double)parameters->beta * (double)load(parameters->c_dtype, c->tensor.data, index) * (double)c->scale_inverse;
      value += added;
      sum += fabs(added);
    }
    if (bias) {
      value += (double)bias[column];
      sum += fabs((double)bias[column]);
    }
    const double error =
      (double)(parameters->k + 6) * 1.01 * UNIT * sum + 2.0 * (double)parameters->k * 0x1p-126 * factor;
    result->before[i] = value;
    result->before_error[i] = error;
    double x = 0.0;
    if (parameters->epilogue == FP8CORE_EPILOGUE_RELU_BACKWARD ||
        parameters->epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD)
      x = (double)load(parameters->auxiliary_dtype, auxiliary->tensor.data,
                       batch * auxiliary->batch_stride + row * auxiliary->tensor.row_stride + column) *
          (double)auxiliary->scale_inverse;
    double after = value;
    double after_error = error;
    switch (parameters->epilogue) {
    case FP8CORE_EPILOGUE_NONE: break;
    case FP8CORE_EPILOGUE_RELU: after = value < 0.0 ? 0.0 : value; break;
    case FP8CORE_EPILOGUE_GELU:
      after = gelu(value);
      after_error = 1.13 * error + 0x1p-20 * fabs(value);
      break;
    case FP8CORE_EPILOGUE_RELU_BACKWARD:
      after = x > 0.0 ? value : 0.0;
      after_error = x > 0.0 ? error : 0.0;
      break;
    case FP8CORE_EPILOGUE_GELU_BACKWARD:
      after = value * gelu_derivative(x);
      after_error = 1.13 * error + 0x1p-19 * fabs(value);
      break;
    }
    result->after[i] = after;
    result->after_error[i] = after_error;
  }
  free(product.memory);
  free(magnitude.memory);
  free(a_magnitudes.memory);
  free(b_magnitudes.memory);
}

static int check_results(const gemm_case *parameters, const expectation *expected, const matrix *d,
                         const matrix *auxiliary) {
  double low_amax = 0.0;
  double high_amax = 0.0;
  for (int64_t i = 0; i < parameters->batch * parameters->m * parameters->n; i++) {
    const int64_t batch = i / (parameters->m * parameters->n);
    const int64_t row = i / parameters->n % parameters->m;
    const int64_t column = i % parameters->n;
    if (!within(parameters, "D", &d->tensor, batch * d->batch_stride + row * d->tensor.row_stride + column,
                expected->after[i], expected->after_error[i], d->scale, row, column))
      return 0;
    if (parameters->exact && parameters->d_dtype == FP8CORE_FP32 && parameters->epilogue <= FP8CORE_EPILOGUE_RELU &&
        (double)load(FP8CORE_FP32, d->tensor.data, batch * d->batch_stride + row * d->tensor.row_stride + column) !=
          expected->after[i]) {
      fail_case(parameters, "D[%lld, %lld] is not exact", (long long)row, (long long)column);
      return 0;
    }
    if (auxiliary && parameters->epilogue <= FP8CORE_EPILOGUE_GELU &&
        !within(parameters, "auxiliary", &auxiliary->tensor,
                batch * auxiliary->batch_stride + row * auxiliary->tensor.row_stride + column, expected->before[i],
                expected->before_error[i], auxiliary->scale, row, column))
      return 0;
    low_amax = fmax(low_amax, fabs(expected->after[i]) - expected->after_error[i]);
    high_amax = fmax(high_amax, fabs(expected->after[i]) + expected->after_error[i]);
  }
  if ((double)d->amax < low_amax * (1.0 - 0x1p-22) || (double)d->amax > high_amax * (1.0 + 0x1p-22)) {
    fail_case(parameters, "amax is %.9g, expected %.9g to %.9g", (double)d->amax, low_amax, high_amax);
    return 0;
  }
  return 1;
}

static int check_bias_gradient(const gemm_case *parameters, const expectation *expected, const float *gradient) {
  for (int64_t column = 0; column < parameters->n; column++) {
    double sum = 0.0;
    double error = 0.0;
    const int64_t rows = parameters->batch * parameters->m;
    for (int64_t row = 0; row < rows; row++) {
      sum += expected->after[row * parameters->n + column];
      error += expected->after_error[row * parameters->n + column] +
               (double)rows * 1.01 * UNIT * fabs(expected->after[row * parameters->n + column]);
    }
    if (fabs((double)gradient[column] - sum) > error + fabs(sum) * 0x1p-23) {
      fail_case(parameters, "bias_gradient[%lld] is %.9g, expected %.9g within %.3g", (long long)column,
                (double)gradient[column], sum, error);
      return 0;
    }
  }
  return 1;
}

// What a product writes.
typedef struct product_results {
  matrix d;
  matrix auxiliary;
  float *gradient;
  fp8core_tensor gradient_tensor;
} product_results;

static int is_backward(const gemm_case *parameters) { return parameters->epilogue >= FP8CORE_EPILOGUE_RELU_BACKWARD; }

// Untouched memory for the results of a product, with the scales of `like`.
static void create_results(const gemm_case *parameters, const product_results *like, product_results *created) {
  create_matrix(&created->d, parameters->d_dtype, parameters->m, parameters->n, parameters->gap, parameters->batch,
                parameters->interleaved);
  create_matrix(&created->auxiliary, parameters->auxiliary_dtype, parameters->m, parameters->n, parameters->gap,
                parameters->batch, parameters->interleaved);
  if (like) {
    created->d.scale = like->d.scale;
    created->auxiliary.scale = like->auxiliary.scale;
    created->auxiliary.scale_inverse = like->auxiliary.scale_inverse;
    if (is_backward(parameters))
      memcpy(created->auxiliary.tensor.data, like->auxiliary.tensor.data, like->auxiliary.bytes);
  }
  created->d.tensor.scale = &created->d.scale;
  created->d.tensor.amax = &created->d.amax;
  created->auxiliary.tensor.scale = &created->auxiliary.scale;
  created->auxiliary.tensor.scale_inverse = &created->auxiliary.scale_inverse;
  created->auxiliary.tensor.amax = &created->auxiliary.amax;
  created->gradient = allocate((size_t)parameters->n * sizeof(float));
  created->gradient_tensor = fp8core_tensor_create(created->gradient, FP8CORE_FP32, 1, &parameters->n);
}

static void free_results(product_results *freed) {
  free(freed->d.memory);
  free(freed->auxiliary.memory);
  free(freed->gradient);
}

static fp8core_gemm_options options_into(const gemm_case *parameters, fp8core_gemm_options options,
                                         const product_results *target) {
  options.auxiliary = parameters->with_auxiliary ? &target->auxiliary.tensor : NULL;
  options.bias_gradient = parameters->with_bias_gradient ? &target->gradient_tensor : NULL;
  return options;
}

static void check_same_matrix(const gemm_case *parameters, const char *what, const char *other, const matrix *one,
                              const matrix *again) {
  // Whatever lies around the elements is looked at by check_untouched().
  const unsigned char *first = one->tensor.data;
  const unsigned char *second = again->tensor.data;
  if (memcmp(first, second, one->bytes) != 0) {
    const fp8core_dtype dtype = one->tensor.dtype;
    size_t byte = 0;
    while (first[byte] == second[byte]) byte++;
    const int64_t index = (int64_t)(byte / fp8core_dtype_size(dtype));
    fail_case(parameters, "%s differs from %s: element %lld is %.9g, not %.9g", what, other, (long long)index,
              (double)load(dtype, one->tensor.data, index), (double)load(dtype, again->tensor.data, index));
  }
  if (memcmp(&one->amax, &again->amax, sizeof(float)) != 0)
    fail_case(parameters, "amax of %s differs from %s: %.9g, not %.9g", what, other, (double)one->amax,
              (double)again->amax);
}

// Bit for bit: the same D, auxiliary and their amaxes from `threads` threads, and on the scalar tier from the
// reference; and the same column sums, where their order is the same.
static void check_same_bits(const gemm_case *parameters, const char *other, const product_results *one,
                            const product_results *again, int with_gradient) {
  check_same_matrix(parameters, "D", other, &one->d, &again->d);
  if (parameters->with_auxiliary) check_same_matrix(parameters, "auxiliary", other, &one->auxiliary, &again->auxiliary);
  if (parameters->with_bias_gradient && with_gradient &&
      memcmp(one->gradient, again->gradient, (size_t)parameters->n * sizeof(float)) != 0)
    fail_case(parameters, "bias_gradient differs from %s", other);
}

// The products of a batch, one call each.
static void run_one_by_one(const gemm_case *parameters, fp8core_gemm_options options, const matrix *a, const matrix *b,
                           const matrix *c, product_results *target) {
  const matrix *whole[5] = {a, b, c, &target->d, &target->auxiliary};
  options.batch = 1;
  options.bias_gradient = NULL;
  for (int64_t i = 0; i < parameters->batch; i++) {
    fp8core_tensor one[5];
    for (int j = 0; j < 5; j++) {
      one[j] = whole[j]->tensor;
      one[j].data =
        (unsigned char *)one[j].data + (size_t)(i * whole[j]->batch_stride) * fp8core_dtype_size(one[j].dtype);
    }
    options.auxiliary = parameters->with_auxiliary ? &one[4] : NULL;
    if (fp8core_gemm(context_of(parameters->isa, parameters->threads), &options, &one[0], &one[1], &one[2], &one[3]) !=
        FP8CORE_OK)
      fail_case(parameters, "%s", fp8core_last_error());
  }
}

static void run_case(const gemm_case *parameters, int compare_threads) {
  matrix a;
  matrix b;
  matrix c;
  product_results first;
  product_results again;
  const int64_t m = parameters->m;
  const int64_t n = parameters->n;
  const int64_t k = parameters->k;
  const int64_t batch = parameters->batch;
  const int backward = is_backward(parameters);
  placed = (placement)(checks++ % 3);
  create_matrix(&a, parameters->a_dtype, parameters->transpose_a ? k : m, parameters->transpose_a ? m : k,
                parameters->gap, batch, 0);
  create_matrix(&b, parameters->b_dtype, parameters->transpose_b ? n : k, parameters->transpose_b ? k : n,
                parameters->gap, batch, 0);
  create_matrix(&c, parameters->c_dtype, m, n, parameters->gap, batch, 0);
  create_results(parameters, NULL, &first);
  fill(&a, batch, parameters->exact);
  fill(&b, batch, parameters->exact);
  fill(&c, batch, parameters->exact);
  if (backward)
    fill(&first.auxiliary, batch, parameters->exact);
  else if (!parameters->exact)
    first.auxiliary.scale = 1.75f;
  if (!parameters->exact) first.d.scale = (float)ldexp(1.0 + random_uniform(), (int)random_below(6) - 5);
  float *bias = allocate((size_t)n * sizeof(float));
  for (int64_t i = 0; i < n; i++)
    bias[i] = parameters->exact ? (float)(random_below(9) - 4) : (float)(random_uniform() * 4.0 - 2.0);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  const fp8core_tensor bias_tensor = fp8core_tensor_create(bias, FP8CORE_FP32, 1, &n);
  options.transpose_a = parameters->transpose_a;
  options.transpose_b = parameters->transpose_b;
  options.alpha = parameters->alpha;
  options.beta = parameters->beta;
  options.epilogue = parameters->epilogue;
  options.bias = parameters->with_bias ? &bias_tensor : NULL;
  options.batch = batch;
  options.batch_stride_a = a.batch_stride;
  options.batch_stride_b = b.batch_stride;
  options.batch_stride_c = c.batch_stride;
  options.batch_stride_d = first.d.batch_stride;
  options.batch_stride_auxiliary = first.auxiliary.batch_stride;
  options = options_into(parameters, options, &first);
  if (fp8core_gemm(context_of(parameters->isa, parameters->threads), &options, &a.tensor, &b.tensor, &c.tensor,
                   &first.d.tensor) != FP8CORE_OK) {
    fail_case(parameters, "%s", fp8core_last_error());
  } else {
    expectation expected;
    expect(parameters, &a, &b, &c, parameters->with_bias ? bias : NULL, &first.auxiliary, &expected);
    (void)(check_results(parameters, &expected, &first.d, parameters->with_auxiliary ? &first.auxiliary : NULL) &&
           (!parameters->with_bias_gradient || check_bias_gradient(parameters, &expected, first.gradient)));
    check_untouched(parameters, "D", &first.d, batch);
    check_untouched(parameters, "auxiliary", &first.auxiliary, backward || parameters->with_auxiliary ? batch : 0);
    free(expected.before);
    free(expected.before_error);
    free(expected.after);
    free(expected.after_error);
  }
  // A product of one element of K is rounded once on every tier, so only GELU's may differ from the rule by a bit.
  const int exact_gelu =
    parameters->isa == FP8CORE_ISA_SCALAR ||
    (parameters->epilogue != FP8CORE_EPILOGUE_GELU && parameters->epilogue != FP8CORE_EPILOGUE_GELU_BACKWARD);
  if (exact_gelu && (k == 1 || parameters->isa == FP8CORE_ISA_SCALAR)) {
    create_results(parameters, &first, &again);
    options = options_into(parameters, options, &again);
    run_reference(FP8CORE_ACCUMULATE_FP32, &options, &a, &b, &c, &again.d);
    // Sums of columns in groups of rows differ in their last bits.
    check_same_bits(parameters, "the FP32 reference", &first, &again, 0);
    free_results(&again);
  }
  for (int threads = 1; compare_threads && threads <= 4; threads++) {
    create_results(parameters, &first, &again);
    options = options_into(parameters, options, &again);
    if (fp8core_gemm(context_of(parameters->isa, threads), &options, &a.tensor, &b.tensor, &c.tensor,
                     &again.d.tensor) != FP8CORE_OK)
      fail_case(parameters, "%s", fp8core_last_error());
    check_same_bits(parameters, "another number of threads", &first, &again, 1);
    free_results(&again);
  }
  if (compare_threads && batch > 1) {
    create_results(parameters, &first, &again);
    run_one_by_one(parameters, options, &a, &b, &c, &again);
    check_same_bits(parameters, "the products one by one", &first, &again, 0);
    free_results(&again);
  }
  free(a.memory);
  free(b.memory);
  free(c.memory);
  free_results(&first);
  free(bias);
}

static gemm_case plain_case(fp8core_isa isa) {
  gemm_case parameters;
  memset(&parameters, 0, sizeof(parameters));
  parameters.isa = isa;
  parameters.threads = 1;
  parameters.c_dtype = FP8CORE_FP32;
  parameters.d_dtype = FP8CORE_FP32;
  parameters.auxiliary_dtype = FP8CORE_FP32;
  parameters.batch = 1;
  parameters.alpha = 1.0f;
  return parameters;
}

static gemm_case random_case(fp8core_isa isa, int64_t largest) {
  gemm_case parameters = plain_case(isa);
  const fp8core_dtype wide[3] = {FP8CORE_BF16, FP8CORE_FP16, FP8CORE_FP32};
  parameters.threads = (int)random_below(4) + 1;
  parameters.c_dtype = (fp8core_dtype)random_below(FP8CORE_DTYPE_COUNT);
  parameters.auxiliary_dtype = wide[random_below(3)];
  parameters.m = random_below(largest) + 1;
  parameters.n = random_below(largest) + 1;
  parameters.k = random_below(largest) + 1;
  parameters.gap = random_below(3) == 0 ? random_below(20) : 0;
  parameters.batch = random_below(4) == 0 ? random_below(6) + 1 : 1;
  parameters.interleaved = (int)random_below(2);
  parameters.exact = random_below(4) == 0;
  if (random_below(2) == 0) {
    parameters.alpha = parameters.exact ? 2.0f : -1.3f;
    parameters.with_bias = (int)random_below(2);
    parameters.beta = random_below(2) == 0 ? 0.0f : parameters.exact ? 1.0f : 0.7f;
    parameters.epilogue = (fp8core_epilogue)random_below(5);
    parameters.with_auxiliary = parameters.epilogue >= FP8CORE_EPILOGUE_RELU_BACKWARD ||
                                (parameters.epilogue != FP8CORE_EPILOGUE_NONE && random_below(2));
    parameters.with_bias_gradient = (int)random_below(2);
  }
  return parameters;
}

// All pairs of operand formats, all result formats, all transposes, odd sizes, and everything else at random.
static void check_combinations(fp8core_isa isa) {
  for (int formats = 0; formats < 125; formats++)
    for (int transposes = 0; transposes < 4; transposes++) {
      gemm_case parameters = random_case(isa, transposes == formats % 4 ? 70 : 36);
      parameters.a_dtype = (fp8core_dtype)(formats / 25);
      parameters.b_dtype = (fp8core_dtype)(formats / 5 % 5);
      parameters.d_dtype = (fp8core_dtype)(formats % 5);
      parameters.transpose_a = transposes & 1;
      parameters.transpose_b = transposes >> 1;
      if (random_below(8) == 0) parameters.k = 1;
      run_case(&parameters, formats % 5 == 4);
    }
}

// Sizes on both sides of every width: of vectors, panels, packing steps, blocks of K and tasks.
static void check_boundaries(fp8core_isa isa) {
  static const int64_t rows[] = {1, 5, 6, 7, 11, 12, 13, 24, 25, 95, 97};
  static const int64_t columns[] = {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65};
  static const int64_t depths[] = {1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 193};
  const fp8core_dtype operands[][2] = {
    {FP8CORE_E4M3, FP8CORE_E5M2}, {FP8CORE_BF16, FP8CORE_E4M3}, {FP8CORE_FP32, FP8CORE_FP16}};
  for (int i = 0; i < 11 * 16; i++) {
    gemm_case parameters = plain_case(isa);
    parameters.a_dtype = operands[i % 3][0];
    parameters.b_dtype = operands[i % 3][1];
    parameters.m = rows[i % 11];
    parameters.n = columns[(i * 7 + i / 11) % 11];
    parameters.k = depths[i % 16];
    parameters.transpose_a = i / 3 & 1;
    parameters.transpose_b = i / 6 & 1;
    parameters.threads = 1 + i % 2;
    run_case(&parameters, 0);
  }
  static const int64_t large[][3] = {{195, 259, 515}, {97, 300, 257}, {13, 520, 1030},
                                     {210, 33, 385},  {388, 10, 129}, {1, 700, 513}};
  for (int i = 0; i < 6; i++)
    for (int formats = 0; formats < 2; formats++) {
      gemm_case parameters = plain_case(isa);
      parameters.a_dtype = formats ? FP8CORE_FP32 : FP8CORE_E5M2;
      parameters.b_dtype = formats ? FP8CORE_FP32 : FP8CORE_E4M3;
      parameters.d_dtype = i % 2 ? FP8CORE_BF16 : FP8CORE_FP32;
      parameters.m = large[i][0];
      parameters.n = large[i][1];
      parameters.k = large[i][2];
      parameters.transpose_a = i & 1;
      parameters.transpose_b = i >> 1 & 1;
      parameters.with_bias_gradient = i % 3 == 0;
      parameters.epilogue = i % 3 == 0 ? FP8CORE_EPILOGUE_GELU : FP8CORE_EPILOGUE_NONE;
      run_case(&parameters, 1);
    }
}

// All codes of the 8-bit formats through every way of packing: their products with 1 are the codes' values, NaNs
// included.
static void check_codes(fp8core_isa isa) {
  static unsigned char codes[256];
  static unsigned char ones[256];
  static float products[256];
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  for (int dtype = FP8CORE_E4M3; dtype <= FP8CORE_E5M2; dtype++)
    for (int role = 0; role < 4; role++) {
      fp8core_gemm_options options = fp8core_gemm_options_default();
      for (int i = 0; i < 256; i++) {
        codes[i] = (unsigned char)i;
        ones[i] = (unsigned char)fp8core_encode(FP8CORE_E4M3, 1.0f, 1);
      }
      const int as_a = role < 2;
      const int transposed = role % 2;
      fp8core_tensor many = fp8core_tensor_matrix(codes, (fp8core_dtype)dtype, (as_a != transposed) ? 256 : 1,
                                                  (as_a != transposed) ? 1 : 256, cpu);
      fp8core_tensor one = fp8core_tensor_matrix(ones, FP8CORE_E4M3, 1, 1, cpu);
      fp8core_tensor d = fp8core_tensor_matrix(products, FP8CORE_FP32, as_a ? 256 : 1, as_a ? 1 : 256, cpu);
      options.transpose_a = as_a && transposed;
      options.transpose_b = !as_a && transposed;
      memset(products, 0, sizeof(products));
      checks++;
      if (fp8core_gemm(context_of(isa, 1), &options, as_a ? &many : &one, as_a ? &one : &many, NULL, &d) !=
          FP8CORE_OK) {
        fprintf(stderr, "FAIL codes: %s\n", fp8core_last_error());
        failures++;
      }
      for (int i = 0; i < 256; i++) {
        const float value = fp8core_decode((fp8core_dtype)dtype, (uint32_t)i);
        if (!(products[i] == value || (isnan(products[i]) && isnan(value)))) {
          fprintf(stderr, "FAIL %s %s code %02x as %s%s: %g, expected %g\n", fp8core_isa_name(isa),
                  fp8core_dtype_name((fp8core_dtype)dtype), (unsigned)i, as_a ? "A" : "B",
                  transposed ? " transposed" : "", (double)products[i], (double)value);
          failures++;
        }
      }
    }
}

// Products too large for the reference, on small integers: with D exact, D x must be A (B x) for a random x
// (Freivalds). Their packed operands exceed what is packed at a time, or K is so long that tasks pack for themselves.
static void check_large(fp8core_isa isa, fp8core_dtype dtype, int64_t m, int64_t n, int64_t k, int threads) {
  gemm_case parameters = plain_case(isa);
  parameters.a_dtype = dtype;
  parameters.b_dtype = dtype;
  parameters.m = m;
  parameters.n = n;
  parameters.k = k;
  parameters.transpose_b = 1;
  parameters.threads = threads;
  parameters.exact = 1;
  checks++;
  matrix a;
  matrix b;
  matrix d;
  create_matrix(&a, dtype, m, k, 0, 1, 0);
  create_matrix(&b, dtype, n, k, 0, 1, 0);
  create_matrix(&d, FP8CORE_FP32, m, n, 0, 1, 0);
  fill(&a, 1, 1);
  fill(&b, 1, 1);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_b = 1;
  if (fp8core_gemm(context_of(isa, threads), &options, &a.tensor, &b.tensor, NULL, &d.tensor) != FP8CORE_OK)
    fail_case(&parameters, "%s", fp8core_last_error());
  int64_t *x = allocate((size_t)n * sizeof(int64_t));
  int64_t *b_x = allocate((size_t)k * sizeof(int64_t));
  memset(b_x, 0, (size_t)k * sizeof(int64_t));
  for (int64_t j = 0; j < n; j++) {
    x[j] = random_below(1000001) - 500000;
    for (int64_t i = 0; i < k; i++) b_x[i] += x[j] * (int64_t)load(dtype, b.tensor.data, j * k + i);
  }
  for (int64_t row = 0; row < m; row++) {
    int64_t left = 0;
    int64_t right = 0;
    for (int64_t j = 0; j < n; j++) left += (int64_t)load(FP8CORE_FP32, d.tensor.data, row * n + j) * x[j];
    for (int64_t i = 0; i < k; i++) right += b_x[i] * (int64_t)load(dtype, a.tensor.data, row * k + i);
    if (left != right) {
      fail_case(&parameters, "row %lld of D x differs from that of A (B x)", (long long)row);
      break;
    }
  }
  free(x);
  free(b_x);
  free(a.memory);
  free(b.memory);
  free(d.memory);
}

// GELU and its derivative over all magnitudes, through products of one element. Returns the largest difference from the
// scalar rule in units of 2^-24 of |x| (of 1 for the derivative).
static void check_gelu(fp8core_isa isa) {
  enum { COUNT = 1 << 14 };
  static float x[COUNT];
  static float one[1] = {1.0f};
  static float results[2][COUNT];
  static float rules[2][COUNT];
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  for (int round = 0; round < 16; round++) {
    for (int i = 0; i < COUNT; i++) {
      const double magnitude =
        i % 2 ? ldexp(1.0 + random_uniform(), (int)random_below(254) - 126) : random_uniform() * 12.0;
      x[i] = (float)(random_below(2) ? magnitude : -magnitude);
    }
    x[0] = 0.0f;
    x[1] = -0.0f;
    x[2] = INFINITY;
    x[3] = -INFINITY;
    x[4] = NAN;
    fp8core_tensor inputs = fp8core_tensor_matrix(x, FP8CORE_FP32, COUNT, 1, cpu);
    fp8core_tensor ones = fp8core_tensor_matrix(x, FP8CORE_FP32, COUNT, 1, cpu);
    fp8core_tensor factor = fp8core_tensor_matrix(one, FP8CORE_FP32, 1, 1, cpu);
    static float units[COUNT];
    for (int i = 0; i < COUNT; i++) units[i] = 1.0f;
    ones.data = units;
    for (int form = 0; form < 2; form++) {
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.epilogue = form == 0 ? FP8CORE_EPILOGUE_GELU : FP8CORE_EPILOGUE_GELU_BACKWARD;
      // The auxiliary matrix of the backward form holds x.
      options.auxiliary = form == 0 ? NULL : &inputs;
      fp8core_tensor d = fp8core_tensor_matrix(results[form], FP8CORE_FP32, COUNT, 1, cpu);
      fp8core_tensor rule = fp8core_tensor_matrix(rules[form], FP8CORE_FP32, COUNT, 1, cpu);
      const fp8core_tensor *left = form == 0 ? &inputs : &ones;
      checks++;
      if (fp8core_gemm(context_of(isa, 1), &options, left, &factor, NULL, &d) != FP8CORE_OK ||
          fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP32, &options, left, &factor, NULL, &rule) != FP8CORE_OK) {
        fprintf(stderr, "FAIL gelu: %s\n", fp8core_last_error());
        failures++;
      }
      for (int i = 0; i < COUNT; i++) {
        const double bound = form == 0 ? 0x1p-21 * fabs((double)x[i]) : 0x1p-20;
        const double difference = fabs((double)results[form][i] - (double)rules[form][i]);
        const int same = (isnan(results[form][i]) && isnan(rules[form][i])) || results[form][i] == rules[form][i];
        if (same || difference <= bound) continue;
        if (failures++ < 20)
          fprintf(stderr, "FAIL %s GELU%s of %.9g: %.9g, expected %.9g within %.3g\n", fp8core_isa_name(isa),
                  form ? "'" : "", (double)x[i], (double)results[form][i], (double)rules[form][i], bound);
      }
    }
  }
}

// Where an infinite gradient becomes NaN is the same on every tier: below -10 alone, not where the derivative crosses
// 0.
static void check_infinite_gradients(fp8core_isa isa) {
  enum { COUNT = 1 << 14 };
  static float x[COUNT];
  static float gradient[COUNT];
  static float result[COUNT];
  float one[1] = {1.0f};
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const float starts[] = {-0.75227f, -10.005f, -9.0f, -0.7521f, -0.1f, 9.995f, -100.0f};
  for (int round = 0; round < 16; round++) {
    float at = round < 7 ? starts[round] : 0.0f;
    for (int i = 0; i < COUNT; i++) {
      x[i] = round < 7 ? at : (float)((random_uniform() - 0.5) * 24.0);
      at = nextafterf(at, INFINITY);
      gradient[i] = i % 2 ? INFINITY : -INFINITY;
    }
    fp8core_gemm_options options = fp8core_gemm_options_default();
    fp8core_tensor auxiliary = fp8core_tensor_matrix(x, FP8CORE_FP32, COUNT, 1, cpu);
    const fp8core_tensor left = fp8core_tensor_matrix(gradient, FP8CORE_FP32, COUNT, 1, cpu);
    const fp8core_tensor factor = fp8core_tensor_matrix(one, FP8CORE_FP32, 1, 1, cpu);
    const fp8core_tensor d = fp8core_tensor_matrix(result, FP8CORE_FP32, COUNT, 1, cpu);
    options.epilogue = FP8CORE_EPILOGUE_GELU_BACKWARD;
    options.auxiliary = &auxiliary;
    for (int reference = 0; reference < 3; reference++) {
      checks++;
      const fp8core_status status =
        reference == 0 ? fp8core_gemm(context_of(isa, 1), &options, &left, &factor, NULL, &d)
                       : fp8core_gemm_reference(reference == 1 ? FP8CORE_ACCUMULATE_FP32 : FP8CORE_ACCUMULATE_FP64,
                                                &options, &left, &factor, NULL, &d);
      if (status != FP8CORE_OK) failures++;
      for (int i = 0; i < COUNT; i++)
        if ((x[i] < -10.0f ? !isnan(result[i]) : !isinf(result[i])) && failures++ < 20)
          fprintf(stderr, "FAIL %s infinite gradient of GELU at %.9g: %g\n", fp8core_isa_name(isa), (double)x[i],
                  (double)result[i]);
    }
  }
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void bench(fp8core_isa isa, int threads, fp8core_dtype dtype, fp8core_dtype d_dtype, int64_t m, int64_t n,
                  int64_t k, int ta, int tb) {
  matrix a;
  matrix b;
  matrix d;
  create_matrix(&a, dtype, ta ? k : m, ta ? m : k, 0, 1, 0);
  create_matrix(&b, dtype, tb ? n : k, tb ? k : n, 0, 1, 0);
  create_matrix(&d, d_dtype, m, n, 0, 1, 0);
  fill(&a, 1, 0);
  fill(&b, 1, 0);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_a = ta;
  options.transpose_b = tb;
  double best = 1e30;
  double total = 0.0;
  for (int i = 0; i < 200 && (total < 0.6 || i < 3); i++) {
    const double start = seconds();
    if (fp8core_gemm(context_of(isa, threads), &options, &a.tensor, &b.tensor, NULL, &d.tensor) != FP8CORE_OK) exit(1);
    const double time = seconds() - start;
    total += time;
    if (time < best) best = time;
  }
  printf("%-12s %d threads %4s -> %4s  %5lld x %5lld x %5lld %c%c  %8.3f ms  %7.1f GFLOP/s\n", fp8core_isa_name(isa),
         threads, fp8core_dtype_name(dtype), fp8core_dtype_name(d_dtype), (long long)m, (long long)n, (long long)k,
         ta ? 'T' : 'N', tb ? 'T' : 'N', best * 1e3, 2e-9 * (double)m * (double)n * (double)k / best);
  free(a.memory);
  free(b.memory);
  free(d.memory);
}

static void bench_tier(fp8core_isa isa) {
  static const int64_t shapes[][5] = {{1024, 1024, 1024, 0, 1}, {1024, 3072, 768, 0, 1}, {1024, 768, 3072, 0, 1},
                                      {1024, 768, 3072, 0, 0},  {3072, 768, 1024, 1, 0}, {1, 3072, 768, 0, 1},
                                      {16, 3072, 768, 0, 1},    {64, 64, 64, 0, 1}};
  for (int i = 0; i < 8; i++)
    for (int threads = 1; threads <= 2; threads++) {
      bench(isa, threads, FP8CORE_E4M3, FP8CORE_BF16, shapes[i][0], shapes[i][1], shapes[i][2], (int)shapes[i][3],
            (int)shapes[i][4]);
      if (i < 4)
        bench(isa, threads, FP8CORE_FP32, FP8CORE_FP32, shapes[i][0], shapes[i][1], shapes[i][2], (int)shapes[i][3],
              (int)shapes[i][4]);
    }
}

static int usage(FILE *stream, int result) {
  fprintf(stream, "usage: check_gemm          compare every tier with the reference\n"
                  "       check_gemm --bench  time products of every tier, on one thread and on two\n");
  return result;
}

int main(int argc, char **argv) {
  const int with_bench = argc == 2 && strcmp(argv[1], "--bench") == 0;
  if (argc == 2 && strcmp(argv[1], "--help") == 0) return usage(stdout, 0);
  if (argc > 1 && !with_bench) return usage(stderr, 2);
  const fp8core_isa best = fp8core_isa_best();
  for (fp8core_isa isa = FP8CORE_ISA_SCALAR; isa <= best; isa++) {
    if (with_bench) {
      bench_tier(isa);
      continue;
    }
    random_state = 1234;
    check_codes(isa);
    check_combinations(isa);
    check_boundaries(isa);
    if (isa != FP8CORE_ISA_SCALAR) {
      check_gelu(isa);
      check_infinite_gradients(isa);
      check_large(isa, FP8CORE_E4M3, 430, 350, 20000, 2);
      check_large(isa, FP8CORE_E4M3, 200, 260, 60000, 1);
      check_large(isa, FP8CORE_E4M3, 200, 260, 60000, 3);
    }
    printf("%s: %d checks, %d failures\n", fp8core_isa_name(isa), checks, failures);
  }
  for (int i = 0; i < 5; i++)
    for (int j = 0; j < 5; j++) fp8core_context_destroy(&contexts[i][j]);
  return failures ? 1 : 0;
}
