// The CUDA backend against the scalar rules, bit for bit, and its products against the reference, to a bound. On a GPU;
// and, with FP8_TEST_EMULATED, the same backend and kernels on the host (emulation.h, fake_cuda.c), with fewer cases.
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(FP8_TEST_EMULATED)
#  include <cuda_runtime_api.h>
#endif

#include "fp8core/cuda.h"
#include "numerics.h"

#define GUARD 64
#define GUARD_BYTE 0xa5

#if defined(FP8_TEST_EMULATED)
#  define EMULATED 1
#else
#  define EMULATED 0
#endif

static fp8core_context *context;

static void require_gpu(void) {
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) > 0) return;
  printf("skipped: %s\n", fp8core_last_error());
  exit(77);
}

static size_t size_of(fp8core_dtype dtype) { return fp8core_dtype_size(dtype); }

static uint32_t load_code(const void *data, int64_t index, fp8core_dtype dtype) {
  uint32_t code = 0;
  memcpy(&code, (const unsigned char *)data + index * (int64_t)size_of(dtype), size_of(dtype));
  return code;
}

static void store_code(void *data, int64_t index, fp8core_dtype dtype, uint32_t code) {
  memcpy((unsigned char *)data + index * (int64_t)size_of(dtype), &code, size_of(dtype));
}

// NaNs keep no payload.
static int same_code(fp8core_dtype dtype, uint32_t one, uint32_t other) {
  if (one == other) return 1;
  return isnan(fp8core_decode(dtype, one)) && isnan(fp8core_decode(dtype, other));
}

// Any code, but mostly values near those that rounding to FP8 turns on.
static uint32_t random_code(test_random *random, fp8core_dtype dtype) {
  const uint64_t bits = test_random_bits(random);
  if (bits % 4 == 0)
    return (uint32_t)(bits >> 32) & (size_of(dtype) == 4 ? UINT32_MAX : (1u << (8 * size_of(dtype))) - 1);
  if (bits % 64 == 1) return fp8core_encode(dtype, (bits >> 8) % 2 ? INFINITY : NAN, 0);
  // A value, or the middle of two, of one of the FP8 formats, or one FP32 step beside it.
  const fp8core_dtype near = bits % 2 ? FP8CORE_E4M3 : FP8CORE_E5M2;
  const uint32_t code = (uint32_t)(bits >> 16) & 0x7e;
  const float value = 0.5f * (fp8core_decode(near, code) + fp8core_decode(near, code + (uint32_t)(bits >> 24) % 2));
  uint32_t single = fp8core_float_bits(value) + (uint32_t)(bits >> 30) % 3 - 1;
  single = (single & FP8CORE_F32_MAGNITUDE) | (uint32_t)(bits >> 63) << 31;
  return fp8core_encode(dtype, fp8core_bits_float(single), 1);
}

typedef struct cast_case {
  fp8core_dtype from;
  fp8core_dtype to;
  int stochastic;
  int saturate;
  int64_t rows;
  int64_t columns;
  int64_t source_gap;
  int64_t destination_gap;
  // Elements that the start is off a multiple of 256 bytes.
  int64_t source_offset;
  int64_t destination_offset;
  int transposed;
  int only_transposed;
  int scaled;
  int in_place;
} cast_case;

typedef struct expectation {
  fp8core_cast_statistics statistics;
  uint32_t amax;
} expectation;

static void fail_case(const cast_case *c, const char *what, int64_t row, int64_t column, uint32_t got,
                      uint32_t expected) {
  fail_msg(
    "%s: %s -> %s%s%s, [%lld, %lld], gaps %lld %lld, offsets %lld %lld, scaled %d, in place %d, transposed %d%d: "
    "row %lld, column %lld: %08x, expected %08x",
    what, fp8core_dtype_name(c->from), fp8core_dtype_name(c->to), c->stochastic ? ", stochastic" : "",
    c->saturate ? ", saturating" : "", (long long)c->rows, (long long)c->columns, (long long)c->source_gap,
    (long long)c->destination_gap, (long long)c->source_offset, (long long)c->destination_offset, c->scaled,
    c->in_place, c->transposed, c->only_transposed, (long long)row, (long long)column, got, expected);
}

static void run_cast(const cast_case *c, uint64_t seed) {
  test_random random = {seed};
  const int64_t source_stride = c->columns + c->source_gap, destination_stride = c->columns + c->destination_gap;
  const int64_t transposed_stride = c->rows + c->destination_gap;
  const size_t source_bytes = ((size_t)(c->rows * source_stride + c->source_offset)) * size_of(c->from) + 2 * GUARD;
  const size_t destination_bytes =
    ((size_t)(c->rows * destination_stride + c->destination_offset)) * size_of(c->to) + 2 * GUARD;
  const size_t transposed_bytes =
    ((size_t)(c->columns * transposed_stride + c->destination_offset)) * size_of(c->to) + 2 * GUARD;
  unsigned char *source = malloc(source_bytes),
                *destination = malloc(destination_bytes > source_bytes ? destination_bytes : source_bytes);
  unsigned char *transposed = malloc(transposed_bytes), *expected = malloc(destination_bytes),
                *expected_transposed = malloc(transposed_bytes);
  const size_t source_start = GUARD + (size_t)c->source_offset * size_of(c->from);
  const size_t start = GUARD + (size_t)c->destination_offset * size_of(c->to);
  memset(source, GUARD_BYTE, source_bytes);
  for (int64_t i = 0; i < c->rows * source_stride; i++)
    store_code(source + source_start, i, c->from, random_code(&random, c->from));
  memset(expected, GUARD_BYTE, destination_bytes);
  memset(expected_transposed, GUARD_BYTE, transposed_bytes);

  const float scales[4] = {c->scaled ? 3.7f : 1.0f, 0.0f, c->scaled ? 0.31f : 1.0f, 0.0f};
  expectation want = {{0, 0, 0, 0}, 0};
  const uint64_t first = c->scaled ? 4097 : 0;
  for (int64_t row = 0; row < c->rows; row++)
    for (int64_t column = 0; column < c->columns; column++) {
      const uint64_t element = first + (uint64_t)(row * c->columns + column);
      const uint32_t draw = c->stochastic ? fp8core_draw(99, 5, 7, element) : 0;
      const fp8core_cast_result result =
        fp8core_cast_element(load_code(source + source_start, row * source_stride + column, c->from), c->from,
                             scales[2], c->to, scales[0], c->stochastic, draw, c->saturate);
      store_code(expected + start, row * destination_stride + column, c->to, result.code);
      store_code(expected_transposed + start, column * transposed_stride + row, c->to, result.code);
      want.amax = result.magnitude > want.amax ? result.magnitude : want.amax;
      want.statistics.elements++;
      want.statistics.saturated += (uint64_t)result.saturated;
      want.statistics.flushed_to_zero += (uint64_t)result.flushed_to_zero;
      want.statistics.nonfinite += (uint64_t)result.nonfinite;
    }

  unsigned char *device_source = test_upload(context, source, source_bytes);
  memset(destination, GUARD_BYTE, destination_bytes);
  memset(transposed, GUARD_BYTE, transposed_bytes);
  unsigned char *device_destination =
    c->in_place ? device_source : test_upload(context, destination, destination_bytes);
  unsigned char *device_transposed = test_upload(context, transposed, transposed_bytes);
  float *device_scales = test_upload(context, scales, sizeof(scales));
  const fp8core_cast_statistics none = {0, 0, 0, 0};
  fp8core_cast_statistics *device_statistics = test_upload(context, &none, sizeof(none));

  fp8core_tensor from = test_matrix(device_source + source_start, c->from, c->rows, c->columns);
  fp8core_tensor to =
    test_matrix(device_destination + (c->in_place ? source_start : start), c->to, c->rows, c->columns);
  fp8core_tensor turned = test_matrix(device_transposed + start, c->to, c->columns, c->rows);
  from.row_stride = source_stride;
  to.row_stride =
    c->in_place && c->source_gap ? source_stride * (int64_t)(size_of(c->from) / size_of(c->to)) : destination_stride;
  turned.row_stride = transposed_stride;
  if (c->scaled) {
    from.scale_inverse = &device_scales[2];
    to.scale = turned.scale = &device_scales[0];
  }
  to.amax = turned.amax = &device_scales[1];
  fp8core_cast_options options = fp8core_cast_options_default();
  options.rounding = c->stochastic ? FP8CORE_ROUND_STOCHASTIC : FP8CORE_ROUND_NEAREST_EVEN;
  options.saturate = c->saturate;
  options.tensor_id = 5;
  options.step = 7;
  options.first_element = first;
  options.statistics = device_statistics;
  assert_ok(fp8core_context_set_seed(context, 99));
  if (c->transposed)
    assert_ok(fp8core_cast_transpose(context, &options, &from, c->only_transposed ? NULL : &to, &turned));
  else
    assert_ok(fp8core_cast(context, &options, &from, &to));

  fp8core_cast_statistics statistics;
  float amax;
  test_download(context, &statistics, device_statistics, sizeof(statistics));
  test_download(context, &amax, &device_scales[1], sizeof(amax));
  test_download(context, destination, device_destination, c->in_place ? source_bytes : destination_bytes);
  test_download(context, transposed, device_transposed, transposed_bytes);
  if (c->in_place) {
    for (int64_t row = 0; row < c->rows; row++)
      for (int64_t column = 0; column < c->columns; column++) {
        const uint32_t got = load_code(destination + source_start, row * to.row_stride + column, c->to);
        const uint32_t right = load_code(expected + start, row * destination_stride + column, c->to);
        if (!same_code(c->to, got, right)) fail_case(c, "code", row, column, got, right);
      }
  } else if (!c->only_transposed) {
    for (size_t i = 0; i < destination_bytes; i++)
      if (destination[i] != expected[i])
        fail_case(c, "byte of the destination", (int64_t)i, 0, destination[i], expected[i]);
  }
  if (c->transposed)
    for (size_t i = 0; i < transposed_bytes; i++)
      if (transposed[i] != expected_transposed[i])
        fail_case(c, "byte of the transpose", (int64_t)i, 0, transposed[i], expected_transposed[i]);
  if (fp8core_float_bits(amax) != want.amax && !(want.amax > FP8CORE_F32_INFINITY && isnan(amax)))
    fail_case(c, "amax", 0, 0, fp8core_float_bits(amax), want.amax);
  if (memcmp(&statistics, &want.statistics, sizeof(statistics)) != 0)
    fail_case(c, "statistics (saturated)", 0, 0, (uint32_t)statistics.saturated, (uint32_t)want.statistics.saturated);

  if (!c->in_place) test_free(context, device_destination);
  test_free(context, device_source);
  test_free(context, device_transposed);
  test_free(context, device_scales);
  test_free(context, device_statistics);
  free(source);
  free(destination);
  free(transposed);
  free(expected);
  free(expected_transposed);
}

static const struct {
  int64_t rows, columns, source_gap, destination_gap, source_offset, destination_offset;
} shapes[] = {
  {1, 1001, 0, 0, 0, 0}, {7, 37, 3, 11, 1, 3}, {5, 64, 16, 32, 0, 0}, {1, 300, 0, 0, 5, 5},   {130, 133, 0, 3, 0, 0},
  {1, 17, 0, 0, 3, 0},   {3, 1, 2, 0, 0, 1},   {257, 16, 0, 0, 2, 2}, {65, 500, 4, 12, 4, 4},
};
#define SHAPES ((int)(sizeof(shapes) / sizeof(shapes[0])))

static void casts(int transposed) {
  uint64_t seed = 1;
  for (int from = 0; from < FP8CORE_DTYPE_COUNT; from++)
    for (int to = 0; to < FP8CORE_DTYPE_COUNT; to++)
      for (int shape = 0; shape < SHAPES; shape++)
        for (int mode = 0; mode < 4; mode++) {
          // The emulation is slow: each pair takes every mode, and every shape, but not each with each.
          if (EMULATED && (shape + from + to) % 4 != mode) continue;
          const cast_case c = {.from = (fp8core_dtype)from,
                               .to = (fp8core_dtype)to,
                               .stochastic = mode & 1,
                               .saturate = mode >> 1,
                               .rows = shapes[shape].rows,
                               .columns = shapes[shape].columns,
                               .source_gap = shapes[shape].source_gap,
                               .destination_gap = shapes[shape].destination_gap,
                               .source_offset = shapes[shape].source_offset,
                               .destination_offset = shapes[shape].destination_offset,
                               .transposed = transposed,
                               .only_transposed = transposed && shape % 3 == 1,
                               .scaled = (shape + mode) % 2};
          run_cast(&c, seed++);
        }
}

static void casts_match_the_rule(void **state) {
  (void)state;
  casts(0);
}

static void cast_transposes_match_the_rule(void **state) {
  (void)state;
  casts(1);
}

static void casts_in_place_match_the_rule(void **state) {
  (void)state;
  const int64_t lengths[] = {1, 33, 4096, 4097, 8192, 16385, 70001};
  for (int from = 0; from < FP8CORE_DTYPE_COUNT; from++)
    for (int to = 0; to < FP8CORE_DTYPE_COUNT; to++) {
      if (size_of((fp8core_dtype)to) > size_of((fp8core_dtype)from)) continue;
      for (int i = 0; i < (EMULATED ? 5 : 7); i++)
        for (int mode = 0; mode < 2; mode++) {
          if (EMULATED && (i + from + to) % 2 != mode) continue;
          const cast_case c = {.from = (fp8core_dtype)from,
                               .to = (fp8core_dtype)to,
                               .stochastic = mode,
                               .saturate = 1,
                               .rows = 1,
                               .columns = lengths[i],
                               .scaled = 1,
                               .in_place = 1};
          run_cast(&c, (uint64_t)(1000 + i));
        }
      const cast_case strided = {.from = (fp8core_dtype)from,
                                 .to = (fp8core_dtype)to,
                                 .saturate = 1,
                                 .rows = 9,
                                 .columns = 4200,
                                 .source_gap = 8,
                                 .scaled = 1,
                                 .in_place = 1};
      run_cast(&strided, 77);
    }
}

static void amax_sees_infinities_and_nans(void **state) {
  (void)state;
  const float specials[] = {0.0f, -3.5f, INFINITY, NAN};
  const uint32_t right[] = {fp8core_float_bits(2.0f), fp8core_float_bits(3.5f), FP8CORE_F32_INFINITY,
                            FP8CORE_F32_QUIET_NAN};
  for (int dtype = 0; dtype < FP8CORE_DTYPE_COUNT; dtype++)
    for (int special = 0; special < 4; special++)
      for (int64_t place = 0; place < 130; place += 43) {
        if (dtype == FP8CORE_E4M3 && special == 2) continue;
        unsigned char data[4 * 130];
        for (int64_t i = 0; i < 130; i++)
          store_code(data, i, (fp8core_dtype)dtype,
                     fp8core_encode((fp8core_dtype)dtype,
                                    i == place ? specials[special]
                                    : i % 2    ? 1.0f
                                               : -2.0f,
                                    0));
        const float zero = 0.0f;
        unsigned char *device = test_upload(context, data, sizeof(data));
        float *device_amax = test_upload(context, &zero, sizeof(zero)), amax;
        const fp8core_tensor tensor = test_matrix(device, (fp8core_dtype)dtype, 1, 130);
        assert_ok(fp8core_amax(context, &tensor, device_amax));
        test_download(context, &amax, device_amax, sizeof(amax));
        if (!(special == 3 ? isnan(amax) : fp8core_float_bits(amax) == right[special]))
          fail_msg("amax of %s, special %d at %lld: %a", fp8core_dtype_name((fp8core_dtype)dtype), special,
                   (long long)place, (double)amax);
        test_free(context, device);
        test_free(context, device_amax);
      }
}

// The same calls on the CPU and on the device: the saved states are the same bytes.
static void scaling_states_match_the_cpu(void **state) {
  (void)state;
  enum { TENSORS = 11, ELEMENTS = 70 };
  fp8core_context *cpu;
  fp8core_context_options cpu_options = fp8core_context_options_default();
  const fp8core_device cpu_device = {FP8CORE_DEVICE_CPU, 0};
  assert_ok(fp8core_context_create(&cpu, &cpu_options));
  const int lengths[] = {1, 3, 40};
  for (int length = 0; length < 3; length++)
    for (int variant = 0; variant < 4; variant++) {
      fp8core_scaling_options options = fp8core_scaling_options_default();
      options.policy = variant == 3 ? FP8CORE_SCALING_JUST_IN_TIME : FP8CORE_SCALING_DELAYED;
      options.history_length = lengths[length];
      options.amax_choice = variant == 1 ? FP8CORE_AMAX_MOST_RECENT : FP8CORE_AMAX_MAXIMUM;
      options.power_of_two = variant == 2;
      options.margin = variant;
      fp8core_dtype dtypes[TENSORS];
      for (int i = 0; i < TENSORS; i++) dtypes[i] = (fp8core_dtype)(i % 4);
      fp8core_scaling *host, *device;
      assert_ok(fp8core_scaling_create(&host, cpu, TENSORS, dtypes, &options));
      assert_ok(fp8core_scaling_create(&device, context, TENSORS, dtypes, &options));
      test_random random = {(uint64_t)(length * 10 + variant)};
      float values[ELEMENTS];
      unsigned char *device_values = test_alloc(context, sizeof(values)),
                    *device_output = test_alloc(context, 2 * ELEMENTS);
      unsigned char host_output[2 * ELEMENTS], output[2 * ELEMENTS];
      for (int step = 0; step < (EMULATED ? 6 : 60); step++) {
        for (int i = 0; i < TENSORS; i++) {
          const float size = (float)exp2(20.0 * test_random_uniform(&random) - 10.0);
          if ((step + i) % 7 == 3) continue;
          for (int j = 0; j < ELEMENTS; j++) values[j] = size * (float)test_random_normal(&random);
          if ((step + i) % 5 == 4) values[step % ELEMENTS] = step % 2 ? INFINITY : NAN;
          test_download(context, device_values, values, sizeof(values));
          const fp8core_tensor from = test_matrix(device_values, FP8CORE_FP32, 1, ELEMENTS);
          fp8core_tensor to = test_matrix(device_output, dtypes[i], 1, ELEMENTS);
          const fp8core_tensor host_from = fp8core_tensor_matrix(values, FP8CORE_FP32, 1, ELEMENTS, cpu_device);
          fp8core_tensor host_to = fp8core_tensor_matrix(host_output, dtypes[i], 1, ELEMENTS, cpu_device);
          assert_ok(fp8core_scaling_cast(host, i, NULL, &host_from, &host_to, NULL));
          assert_ok(fp8core_scaling_cast(device, i, NULL, &from, &to, NULL));
          test_download(context, output, device_output, size_of(dtypes[i]) * ELEMENTS);
          assert_memory_equal(output, host_output, size_of(dtypes[i]) * ELEMENTS);
        }
        assert_ok(fp8core_scaling_update(host));
        assert_ok(fp8core_scaling_update(device));
      }
      const size_t bytes = fp8core_scaling_saved_bytes(host);
      unsigned char *saved = malloc(bytes), *saved_device = malloc(bytes);
      assert_ok(fp8core_scaling_save(host, saved, bytes));
      assert_ok(fp8core_scaling_save(device, saved_device, bytes));
      assert_memory_equal(saved_device, saved, bytes);
      free(saved);
      free(saved_device);
      test_free(context, device_values);
      test_free(context, device_output);
      fp8core_scaling_destroy(&host);
      fp8core_scaling_destroy(&device);
    }
  fp8core_context_destroy(&cpu);
}

// A matrix on the host and on the device, with scales.
typedef struct pair {
  unsigned char *host;
  unsigned char *device;
  size_t bytes;
  // Scale, inverse, amax.
  float *scales;
  float *device_scales;
  fp8core_tensor on_host;
  fp8core_tensor on_device;
} pair;

static pair make_pair(test_random *random, fp8core_dtype dtype, int64_t batch, int64_t rows, int64_t columns,
                      int64_t gap, double size, int scaled) {
  pair made;
  memset(&made, 0, sizeof(made));
  const int64_t stride = columns + gap, elements = batch * rows * stride;
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  made.bytes = (size_t)(elements > 0 ? elements : 1) * size_of(dtype);
  made.host = malloc(made.bytes);
  made.scales = calloc(3, sizeof(float));
  made.scales[0] = scaled ? 0.5f + (float)test_random_uniform(random) * 3.0f : 1.0f;
  made.scales[1] = 1.0f / made.scales[0];
  // Large matrices repeat themselves: drawing them would take longer than all else. Not in step with a line of memory.
  const int64_t drawn = size == 0.0 ? 0 : elements < 1000003 ? elements : 1000003;
  const int64_t element_bytes = (int64_t)size_of(dtype);
  memset(made.host, 0, made.bytes);
  for (int64_t i = 0; i < drawn; i++)
    store_code(made.host, i, dtype, fp8core_encode(dtype, (float)(size * test_random_normal(random)), 1));
  for (int64_t i = drawn; drawn > 0 && i < elements; i += drawn)
    memcpy(made.host + i * element_bytes, made.host,
           (size_t)((elements - i < drawn ? elements - i : drawn) * element_bytes));
  made.device = test_upload(context, made.host, made.bytes);
  made.device_scales = test_upload(context, made.scales, 3 * sizeof(float));
  made.on_host = fp8core_tensor_matrix(made.host, dtype, rows, columns, cpu);
  made.on_device = test_matrix(made.device, dtype, rows, columns);
  made.on_host.row_stride = made.on_device.row_stride = stride;
  if (scaled) {
    made.on_host.scale = &made.scales[0];
    made.on_host.scale_inverse = &made.scales[1];
    made.on_device.scale = &made.device_scales[0];
    made.on_device.scale_inverse = &made.device_scales[1];
  }
  return made;
}

static void free_pair(pair *freed) {
  test_free(context, freed->device);
  test_free(context, freed->device_scales);
  free(freed->host);
  free(freed->scales);
}

static fp8core_tensor vector_of(fp8core_tensor matrix) {
  matrix.dimensions = 1;
  matrix.shape[0] = matrix.shape[1];
  matrix.row_stride = 0;
  return matrix;
}

// Half the distance of neighbours at |value|, which is in the stored, scaled range.
static double rounding_of(fp8core_dtype dtype, double value) {
  const fp8core_format format = fp8core_format_of(dtype);
  int exponent;
  (void)frexp(value, &exponent);
  const int floor_exponent = exponent - 1 < format.min_exponent ? format.min_exponent : exponent - 1;
  return ldexp(0.5, floor_exponent - format.mantissa_bits);
}

static double clamped(fp8core_dtype dtype, double value) {
  const double most = (double)fp8core_dtype_max(dtype);
  if (size_of(dtype) > 1) return value;
  return value > most ? most : value < -most ? -most : value;
}

typedef struct gemm_case {
  fp8core_dtype a, b, d;
  int ta, tb;
  int64_t m, n, k, batch, gap;
  float alpha, beta;
  fp8core_dtype c, bias, auxiliary;
  fp8core_epilogue epilogue;
  int has_bias, has_auxiliary, has_gradient, amax, scaled, d_scaled, fast;
} gemm_case;

static void describe(const gemm_case *c, char *text, size_t bytes) {
  snprintf(text, bytes,
           "%s%s x %s%s -> %s, [%lld, %lld, %lld] x %lld, gap %lld, alpha %g, beta %g (%s), epilogue %d, bias %d (%s), "
           "auxiliary %d (%s), gradient %d, amax %d, scaled %d, D scaled %d, fast %d",
           fp8core_dtype_name(c->a), c->ta ? "'" : "", fp8core_dtype_name(c->b), c->tb ? "'" : "",
           fp8core_dtype_name(c->d), (long long)c->m, (long long)c->n, (long long)c->k, (long long)c->batch,
           (long long)c->gap, (double)c->alpha, (double)c->beta, fp8core_dtype_name(c->c), (int)c->epilogue,
           c->has_bias, fp8core_dtype_name(c->bias), c->has_auxiliary, fp8core_dtype_name(c->auxiliary),
           c->has_gradient, c->amax, c->scaled, c->d_scaled, c->fast);
}

// The bound: sums err by at most test_cuda_product_error() of the sum of the magnitudes of their terms, and what is
// added to them by a few roundings; a fused GELU of x by half of |x| times the error of its tanh, whose hardware form
// is good to 2^-11; then D's own rounding. What may be lost where numbers are no longer normal is TINY.
#define TINY 0x1p-120
static void run_gemm(const gemm_case *c, uint64_t seed) {
  test_random random = {seed};
  char text[512];
  describe(c, text, sizeof(text));
  const double relative = test_cuda_product_error(c->a, c->b, c->fast);
  pair a = make_pair(&random, c->a, c->batch, c->ta ? c->k : c->m, c->ta ? c->m : c->k, c->gap, 1.0, c->scaled);
  pair b = make_pair(&random, c->b, c->batch, c->tb ? c->n : c->k, c->tb ? c->k : c->n, c->gap, 0.5, c->scaled);
  pair cc = make_pair(&random, c->c, c->batch, c->m, c->n, c->gap, 1.0, c->scaled && c->has_bias);
  pair bias = make_pair(&random, c->bias, 1, 1, c->n, 0, 1.0, 0);
  pair auxiliary = make_pair(&random, c->auxiliary, c->batch, c->m, c->n, 8, 1.0, 0);
  pair d = make_pair(&random, c->d, c->batch, c->m, c->n, c->gap, 1.0, c->d_scaled);
  pair right = make_pair(&random, FP8CORE_FP32, c->batch, c->m, c->n, 0, 0.0, 0);
  pair right_auxiliary = make_pair(&random, FP8CORE_FP32, c->batch, c->m, c->n, 0, 0.0, 0);
  pair before = make_pair(&random, FP8CORE_FP32, c->batch, c->m, c->n, 0, 0.0, 0);
  pair magnitude = make_pair(&random, FP8CORE_FP32, c->batch, c->m, c->n, 0, 0.0, 0);
  pair gradient = make_pair(&random, FP8CORE_FP32, 1, 1, c->n, 0, 1.0, 0);
  const fp8core_tensor bias_on_device = vector_of(bias.on_device), bias_on_host = vector_of(bias.on_host);
  const fp8core_tensor gradient_on_device = vector_of(gradient.on_device),
                       gradient_on_host = vector_of(gradient.on_host);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_a = c->ta;
  options.transpose_b = c->tb;
  options.alpha = c->alpha;
  options.beta = c->beta;
  options.epilogue = c->epilogue;
  options.fast_accumulation = c->fast;
  options.batch = c->batch;
  options.batch_stride_a = a.on_host.shape[0] * a.on_host.row_stride;
  options.batch_stride_b = b.on_host.shape[0] * b.on_host.row_stride;
  options.batch_stride_c = c->m * cc.on_host.row_stride;
  options.batch_stride_d = c->m * d.on_host.row_stride;
  options.batch_stride_auxiliary = c->m * auxiliary.on_host.row_stride;
  fp8core_gemm_options reference = options;
  if (c->has_bias) {
    options.bias = &bias_on_device;
    reference.bias = &bias_on_host;
  }
  const int backward = c->epilogue == FP8CORE_EPILOGUE_RELU_BACKWARD || c->epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD;
  if (c->has_auxiliary) {
    options.auxiliary = &auxiliary.on_device;
    reference.auxiliary = backward ? &auxiliary.on_host : &right_auxiliary.on_host;
    if (!backward) reference.batch_stride_auxiliary = c->m * right_auxiliary.on_host.row_stride;
  }
  if (c->has_gradient) {
    options.bias_gradient = &gradient_on_device;
    reference.bias_gradient = &gradient_on_host;
  }
  reference.batch_stride_d = c->m * right.on_host.row_stride;
  if (c->amax) d.on_device.amax = &d.device_scales[2];
  assert_ok(
    fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, &reference, &a.on_host, &b.on_host, &cc.on_host, &right.on_host));
  // Before the activation.
  fp8core_gemm_options linear = reference;
  linear.epilogue = FP8CORE_EPILOGUE_NONE;
  linear.auxiliary = NULL;
  linear.bias_gradient = NULL;
  assert_ok(
    fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, &linear, &a.on_host, &b.on_host, &cc.on_host, &before.on_host));
  const fp8core_status status =
    fp8core_gemm(context, &options, &a.on_device, &b.on_device, &cc.on_device, &d.on_device);
  if (status != FP8CORE_OK) fail_msg("%s: %s", text, fp8core_last_error());
  unsigned char *got = malloc(d.bytes), *got_auxiliary = malloc(auxiliary.bytes);
  float *got_gradient = malloc(gradient.bytes);
  float amax = 0.0f;
  test_download(context, got, d.device, d.bytes);
  test_download(context, got_auxiliary, auxiliary.device, auxiliary.bytes);
  test_download(context, got_gradient, gradient.device, gradient.bytes);
  test_download(context, &amax, &d.device_scales[2], sizeof(amax));

  // The sums of magnitudes.
  for (size_t i = 0; i < a.bytes / size_of(c->a); i++)
    store_code(a.host, (int64_t)i, c->a, load_code(a.host, (int64_t)i, c->a) & ~(1u << (8 * size_of(c->a) - 1)));
  for (size_t i = 0; i < b.bytes / size_of(c->b); i++)
    store_code(b.host, (int64_t)i, c->b, load_code(b.host, (int64_t)i, c->b) & ~(1u << (8 * size_of(c->b) - 1)));
  fp8core_gemm_options plain = fp8core_gemm_options_default();
  plain.transpose_a = c->ta;
  plain.transpose_b = c->tb;
  plain.alpha = fabsf(c->alpha);
  plain.batch = c->batch;
  plain.batch_stride_a = options.batch_stride_a;
  plain.batch_stride_b = options.batch_stride_b;
  plain.batch_stride_d = reference.batch_stride_d;
  assert_ok(fp8core_gemm_reference(FP8CORE_ACCUMULATE_FP64, &plain, &a.on_host, &b.on_host, NULL, &magnitude.on_host));

  const float *values = (const float *)(void *)right.host, *sums = (const float *)(void *)magnitude.host;
  const float *inputs = (const float *)(void *)before.host;
  double largest = 0.0, largest_error = 0.0;
  for (int64_t matrix = 0; matrix < c->batch; matrix++)
    for (int64_t row = 0; row < c->m; row++)
      for (int64_t column = 0; column < c->n; column++) {
        const int64_t index = (matrix * c->m + row) * c->n + column;
        const double value = (double)values[index];
        const double input = fabs((double)inputs[index]);
        double added = 0.0;
        if (c->beta != 0.0f)
          added += fabs(
            (double)c->beta * (double)cc.scales[1] *
            (double)fp8core_decode(
              c->c, load_code(cc.host, matrix * options.batch_stride_c + row * cc.on_host.row_stride + column, c->c)));
        if (c->has_bias) added += fabs((double)fp8core_decode(c->bias, load_code(bias.host, column, c->bias)));
        const double input_error = relative * (double)sums[index] + 0x1p-20 * ((double)sums[index] + added) + TINY;
        double error = input_error;
        const double hyperbolic = EMULATED ? 0x1p-20 : 0x1p-11;
        if (c->epilogue == FP8CORE_EPILOGUE_GELU) error = 1.13 * input_error + hyperbolic * input;
        // The derivative at 2, where it turns fastest, takes three times the error of its tanh.
        if (c->epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD) error = 1.13 * input_error + 4.0 * hyperbolic * input;
        largest = fabs(value) > largest ? fabs(value) : largest;
        largest_error = error > largest_error ? error : largest_error;
        const double scale = (double)d.scales[0];
        const double expected = clamped(c->d, value * scale);
        const double stored = (double)fp8core_decode(
          c->d, load_code(got, matrix * options.batch_stride_d + row * d.on_host.row_stride + column, c->d));
        const double allowed = error * scale + rounding_of(c->d, fabs(value * scale) + error * scale) * 1.01;
        if (!(fabs(stored - expected) <= allowed))
          fail_msg("%s: D[%lld][%lld, %lld] is %g, expected %g within %g", text, (long long)matrix, (long long)row,
                   (long long)column, stored, expected, allowed);
        if (c->has_auxiliary && !backward) {
          const double written = (double)((const float *)(void *)right_auxiliary.host)[index];
          const int64_t place = matrix * options.batch_stride_auxiliary + row * auxiliary.on_host.row_stride + column;
          const double kept = (double)fp8core_decode(c->auxiliary, load_code(got_auxiliary, place, c->auxiliary));
          if (!(fabs(kept - written) <= input_error + rounding_of(c->auxiliary, fabs(written) + input_error) * 1.01))
            fail_msg("%s: auxiliary[%lld][%lld, %lld] is %g, expected %g", text, (long long)matrix, (long long)row,
                     (long long)column, kept, written);
        }
      }
  if (c->amax && !(fabs((double)amax - largest) <= largest_error + 0x1p-9 * largest))
    fail_msg("%s: amax is %g, expected %g", text, (double)amax, largest);
  for (int64_t column = 0; c->has_gradient && column < c->n; column++) {
    const double sum = (double)((const float *)(void *)gradient.host)[column];
    const double rows = (double)(c->batch * c->m);
    if (!(fabs((double)got_gradient[column] - sum) <= rows * largest_error + 0x1p-18 * rows * largest))
      fail_msg("%s: bias gradient [%lld] is %g, expected %g", text, (long long)column, (double)got_gradient[column],
               sum);
  }
  free(got);
  free(got_auxiliary);
  free(got_gradient);
  pair *all[] = {&a, &b, &cc, &bias, &auxiliary, &d, &right, &right_auxiliary, &before, &magnitude, &gradient};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) free_pair(all[i]);
}

static void products_match_the_reference(void **state) {
  (void)state;
  // Of whole lines of FP8; odd; single; K = 0; more than a tile of the epilogue.
  const int64_t sizes[][3] = {{32, 48, 64},  {33, 17, 8}, {1, 1, 1},    {7, 16, 0},
                              {96, 160, 32}, {4, 50, 16}, {130, 64, 48}};
  const fp8core_dtype wide[] = {FP8CORE_BF16, FP8CORE_FP16, FP8CORE_FP32};
  test_random random = {4711};
  uint64_t seed = 1;
  for (int a = 0; a < FP8CORE_DTYPE_COUNT; a++)
    for (int b = 0; b < FP8CORE_DTYPE_COUNT; b++)
      for (int transposes = 0; transposes < 4; transposes++)
        for (int draw = 0; draw < (EMULATED ? 5 : 40); draw++) {
          if (a == FP8CORE_E5M2 && b == FP8CORE_E5M2) continue;
          const uint64_t bits = test_random_bits(&random);
          const int64_t *size = sizes[bits % 7];
          gemm_case c = {.a = (fp8core_dtype)a,
                         .b = (fp8core_dtype)b,
                         .d = (fp8core_dtype)((bits >> 8) % 5),
                         .ta = transposes & 1,
                         .tb = transposes >> 1,
                         .m = size[0],
                         .n = size[1],
                         .k = size[2],
                         .batch = (bits >> 12) % 4 == 0 ? 3 : 1,
                         .gap = (bits >> 16) % 3 == 0   ? 16
                                : (bits >> 16) % 3 == 1 ? 0
                                                        : 5,
                         .alpha = (bits >> 20) % 2 ? 1.0f : -0.75f,
                         .beta = (bits >> 21) % 3 == 0 ? 0.5f : 0.0f,
                         .c = (fp8core_dtype)((bits >> 24) % 5),
                         .bias = wide[(bits >> 28) % 3],
                         .auxiliary = wide[(bits >> 30) % 3],
                         .epilogue = (fp8core_epilogue)((bits >> 34) % 5),
                         .has_bias = (bits >> 38) % 2,
                         .amax = (bits >> 39) % 2,
                         .scaled = (bits >> 40) % 2,
                         .d_scaled = (bits >> 41) % 2,
                         .fast = (bits >> 42) % 2};
          const int backward =
            c.epilogue == FP8CORE_EPILOGUE_RELU_BACKWARD || c.epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD;
          if (backward || (bits >> 43) % 2) c.has_auxiliary = c.epilogue != FP8CORE_EPILOGUE_NONE;
          c.has_gradient = (bits >> 44) % 3 == 0;
          // What cuBLASLt fuses wants more of the draws than chance gives it.
          if ((bits >> 48) % 2) {
            c.d = (bits >> 49) % 2 || c.a > FP8CORE_E5M2 || c.b > FP8CORE_E5M2 ? FP8CORE_BF16 : FP8CORE_E4M3;
            c.c = c.bias = c.auxiliary = FP8CORE_BF16;
            c.gap = 0;
            c.has_gradient = 0;
            c.d_scaled = c.d == FP8CORE_E4M3;
          }
          run_gemm(&c, seed++);
        }
}

static void products_beyond_one_part_match(void **state) {
  (void)state;
  // 260 MiB of sums, with a row of 4 MiB: a part of 64 rows, and one of one.
  const gemm_case c = {.a = FP8CORE_E4M3,
                       .b = FP8CORE_E4M3,
                       .d = FP8CORE_E4M3,
                       .tb = 1,
                       .m = 65,
                       .n = 1 << 20,
                       .k = 16,
                       .batch = 1,
                       .alpha = 1.0f,
                       .epilogue = FP8CORE_EPILOGUE_RELU,
                       .c = FP8CORE_BF16,
                       .bias = FP8CORE_FP32,
                       .auxiliary = FP8CORE_BF16,
                       .has_bias = 1,
                       .has_gradient = 1,
                       .amax = 1};
  if (EMULATED) skip();
  run_gemm(&c, 5);
}

// The own kernel's factor is in FP64, so that only the result itself may overflow or underflow. An amax keeps the
// result from being fused.
static void extreme_factors_are_exact(void **state) {
  (void)state;
  for (int i = 0; i < TEST_EXTREME_FACTORS; i++)
    for (int fp8 = 0; fp8 < 2; fp8++) {
      enum { N = 16 };
      const test_factors *factors = &test_extreme_factors[i];
      const fp8core_dtype dtype = fp8 ? FP8CORE_E4M3 : FP8CORE_FP32;
      unsigned char codes[2][4 * N * N];
      float results[N * N];
      const float scales[3] = {1.0f / factors->scale_a, 1.0f / factors->scale_b, 0.0f};
      memset(codes, 0, sizeof(codes));
      // One product each, in a matrix that FP8 kernels take.
      for (int64_t j = 0; j < N; j++) {
        store_code(codes[0], j * N, dtype, fp8core_encode(dtype, 2.0f, 1));
        store_code(codes[1], j * N, dtype, fp8core_encode(dtype, 3.0f, 1));
      }
      unsigned char *a_data = test_upload(context, codes[0], sizeof(codes[0]));
      unsigned char *b_data = test_upload(context, codes[1], sizeof(codes[1]));
      float *d_data = test_alloc(context, sizeof(results)),
            *device_scales = test_upload(context, scales, sizeof(scales));
      fp8core_tensor a = test_matrix(a_data, dtype, N, N), b = test_matrix(b_data, dtype, N, N);
      fp8core_tensor d = test_matrix(d_data, FP8CORE_FP32, N, N);
      a.scale_inverse = &device_scales[0];
      b.scale_inverse = &device_scales[1];
      d.amax = &device_scales[2];
      fp8core_gemm_options options = fp8core_gemm_options_default();
      options.transpose_b = 1;
      options.alpha = factors->alpha;
      assert_ok(fp8core_gemm(context, &options, &a, &b, NULL, &d));
      float amax;
      test_download(context, results, d_data, sizeof(results));
      test_download(context, &amax, &device_scales[2], sizeof(amax));
      for (int j = 0; j < N * N; j++)
        if (results[j] != factors->expected)
          fail_msg("%s, scales %a and %a, alpha %a: %a, expected %a", fp8core_dtype_name(dtype),
                   (double)factors->scale_a, (double)factors->scale_b, (double)factors->alpha, (double)results[j],
                   (double)factors->expected);
      assert_true(amax == factors->expected);
      test_free(context, a_data);
      test_free(context, b_data);
      test_free(context, d_data);
      test_free(context, device_scales);
    }
}

static void nan_reaches_the_amax(void **state) {
  (void)state;
  enum { N = 32 };
  for (int value = 0; value < 2; value++) {
    unsigned char codes[N * N];
    float scales[3] = {1.0f, 1.0f, 0.0f}, amax;
    for (int i = 0; i < N * N; i++) codes[i] = 0x38;
    if (value) codes[N + 3] = 0x7f;
    unsigned char *a = test_upload(context, codes, sizeof(codes)), *d = test_alloc(context, sizeof(codes));
    float *device_scales = test_upload(context, scales, sizeof(scales));
    const fp8core_tensor operand = test_matrix(a, FP8CORE_E4M3, N, N);
    fp8core_tensor result = test_matrix(d, FP8CORE_E4M3, N, N);
    result.scale = &device_scales[0];
    result.amax = &device_scales[2];
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.transpose_b = 1;
    assert_ok(fp8core_gemm(context, &options, &operand, &operand, NULL, &result));
    test_download(context, &amax, &device_scales[2], sizeof(amax));
    assert_true(value ? isnan(amax) : amax == 32.0f);
    // It never sinks.
    const float more = 1000.0f;
    assert_ok(fp8core_copy(context, &device_scales[2], value ? &amax : &more, sizeof(more)));
    codes[N + 3] = 0x38;
    assert_ok(fp8core_copy(context, a, codes, sizeof(codes)));
    assert_ok(fp8core_gemm(context, &options, &operand, &operand, NULL, &result));
    test_download(context, &amax, &device_scales[2], sizeof(amax));
    assert_true(value ? isnan(amax) : amax == 1000.0f);
    test_free(context, a);
    test_free(context, d);
    test_free(context, device_scales);
  }
}

static void bad_input_is_refused(void **state) {
  (void)state;
  unsigned char *data = test_alloc(context, 4096);
  const fp8core_tensor fp8 = test_matrix(data, FP8CORE_E5M2, 16, 16),
                       odd = test_matrix(data + 1025, FP8CORE_FP32, 4, 4);
  const fp8core_tensor result = test_matrix(data + 2048, FP8CORE_FP32, 16, 16),
                       small = test_matrix(data, FP8CORE_E4M3, 4, 4);
  assert_fails(fp8core_gemm(context, NULL, &fp8, &fp8, NULL, &result), FP8CORE_ERROR_NOT_SUPPORTED, "e5m2");
  assert_fails(fp8core_cast(context, NULL, &odd, &small), FP8CORE_ERROR_INVALID_ARGUMENT, "expected a multiple");
  assert_fails(fp8core_amax(context, &odd, (float *)(void *)data), FP8CORE_ERROR_INVALID_ARGUMENT,
               "expected a multiple");
  const fp8core_tensor operand = test_matrix(data, FP8CORE_E4M3, 4, 4);
  assert_fails(fp8core_gemm(context, NULL, &operand, &operand, NULL, &odd), FP8CORE_ERROR_INVALID_ARGUMENT,
               "D.data is ");
  void *huge;
  assert_fails(fp8core_alloc(context, (size_t)1 << 50, &huge), FP8CORE_ERROR_OUT_OF_MEMORY, "1125899906842624");
  test_free(context, data);
}

#if !defined(FP8_TEST_EMULATED)
// Cast, product and scaling update of one step, captured and replayed, give what they give when called.
static void steps_can_be_captured(void **state) {
  (void)state;
  enum { N = 256 };
  const fp8core_dtype dtypes[2] = {FP8CORE_E4M3, FP8CORE_E4M3};
  fp8core_scaling_options scaling_options = fp8core_scaling_options_default();
  fp8core_scaling *scaling;
  void *stream;
  test_random random = {3};
  float *values = malloc(N * N * sizeof(float));
  scaling_options.history_length = 4;
  assert_ok(fp8core_scaling_create(&scaling, context, 2, dtypes, &scaling_options));
  assert_ok(fp8core_cuda_stream(context, &stream));
  for (int i = 0; i < N * N; i++) values[i] = (float)test_random_normal(&random);
  float *source = test_upload(context, values, N * N * sizeof(float));
  unsigned char *x = test_alloc(context, N * N), *turned = test_alloc(context, N * N),
                *d = test_alloc(context, 2 * N * N);
  const fp8core_tensor from = test_matrix(source, FP8CORE_FP32, N, N), result = test_matrix(d, FP8CORE_BF16, N, N);
  fp8core_tensor to = test_matrix(x, FP8CORE_E4M3, N, N), transposed = test_matrix(turned, FP8CORE_E4M3, N, N);
  uint16_t *first = malloc(2 * N * N), *replayed = malloc(2 * N * N);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  for (int round = 0; round < 2; round++) {
    // The first round grows the workspace and plans the product.
    if (round == 1) assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    assert_ok(fp8core_scaling_cast_transpose(scaling, 0, NULL, &from, &to, &transposed, NULL));
    assert_ok(fp8core_gemm(context, NULL, &to, &transposed, NULL, &result));
    assert_ok(fp8core_scaling_update(scaling));
    if (round == 1) assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    if (round == 0) test_download(context, first, d, 2 * N * N);
  }
  assert_int_equal(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  assert_ok(fp8core_zero(context, d, 2 * N * N));
  for (int i = 0; i < 3; i++) assert_int_equal(cudaGraphLaunch(executable, stream), cudaSuccess);
  test_download(context, replayed, d, 2 * N * N);
  assert_memory_equal(first, replayed, 2 * N * N);
  fp8core_scaling_record record;
  assert_ok(fp8core_scaling_get(scaling, 0, &record));
  assert_int_equal(record.history_steps, 4);
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  fp8core_scaling_destroy(&scaling);
  test_free(context, source);
  test_free(context, x);
  test_free(context, turned);
  test_free(context, d);
  free(values);
  free(first);
  free(replayed);
}

static void more_than_2_31_elements_are_cast(void **state) {
  (void)state;
  const int64_t elements = (INT64_C(1) << 31) + 4099;
  void *source, *destination;
  if (fp8core_alloc(context, (size_t)elements * 4, &source) != FP8CORE_OK) skip();
  if (fp8core_alloc(context, (size_t)elements, &destination) != FP8CORE_OK) skip();
  assert_ok(fp8core_zero(context, source, (size_t)elements * 4));
  const int64_t places[] = {0, INT32_MAX, INT64_C(1) << 31, elements - 1};
  const float marks[] = {1.0f, -2.0f, 500.0f, -3.0f};
  for (int i = 0; i < 4; i++) assert_ok(fp8core_copy(context, (float *)source + places[i], &marks[i], sizeof(float)));
  const fp8core_cast_statistics none = {0, 0, 0, 0};
  fp8core_cast_statistics *device_statistics = test_upload(context, &none, sizeof(none)), statistics;
  const float zero = 0.0f;
  float *device_amax = test_upload(context, &zero, sizeof(zero)), amax;
  const fp8core_tensor from = test_matrix(source, FP8CORE_FP32, 1, elements);
  fp8core_tensor to = test_matrix(destination, FP8CORE_E4M3, 1, elements);
  to.amax = device_amax;
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = device_statistics;
  assert_ok(fp8core_cast(context, &options, &from, &to));
  for (int i = 0; i < 4; i++) {
    unsigned char code;
    test_download(context, &code, (unsigned char *)destination + places[i], 1);
    assert_int_equal(code, fp8core_encode(FP8CORE_E4M3, marks[i], 1));
  }
  test_download(context, &statistics, device_statistics, sizeof(statistics));
  test_download(context, &amax, device_amax, sizeof(amax));
  assert_int_equal(statistics.elements, elements);
  assert_int_equal(statistics.saturated, 1);
  assert_int_equal(statistics.flushed_to_zero, 0);
  assert_true(amax == 500.0f);
  test_free(context, source);
  test_free(context, destination);
  test_free(context, device_statistics);
  test_free(context, device_amax);
}
#endif

#if defined(FP8_TEST_EMULATED)
static void context_without_cublaslt_is_refused(void **state) {
  (void)state;
  fp8core_context_options options = fp8core_context_options_default();
  fp8core_context *refused = context;
  options.device = test_device();
  setenv("FP8_FAKE_NO_CUBLASLT", "1", 1);
  assert_fails(fp8core_context_create(&refused, &options), FP8CORE_ERROR_NOT_SUPPORTED, "cuBLASLt (played)");
  assert_null(refused);
  unsetenv("FP8_FAKE_NO_CUBLASLT");
  assert_ok(fp8core_context_create(&refused, &options));
  fp8core_context_destroy(&refused);
}
#endif

int main(void) {
  setenv("FP8CORE_TEST_DEVICE", "cuda", 1);
  require_gpu();
  context = test_context_default();
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(casts_match_the_rule),
    cmocka_unit_test(cast_transposes_match_the_rule),
    cmocka_unit_test(casts_in_place_match_the_rule),
    cmocka_unit_test(amax_sees_infinities_and_nans),
    cmocka_unit_test(scaling_states_match_the_cpu),
    cmocka_unit_test(products_match_the_reference),
    cmocka_unit_test(products_beyond_one_part_match),
    cmocka_unit_test(extreme_factors_are_exact),
    cmocka_unit_test(nan_reaches_the_amax),
    cmocka_unit_test(bad_input_is_refused),
#if defined(FP8_TEST_EMULATED)
    cmocka_unit_test(context_without_cublaslt_is_refused),
#else
    cmocka_unit_test(steps_can_be_captured),
    cmocka_unit_test(more_than_2_31_elements_are_cast),
#endif
  };
  const int failures = cmocka_run_group_tests(tests, NULL, NULL);
  fp8core_context_destroy(&context);
  return failures;
}
