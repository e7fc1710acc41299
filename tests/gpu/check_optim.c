// The optimizer on CUDA against the optimizer on the CPU: the saved states and the weights are the same bytes, but
// where a clip factor follows from norms whose sums have another order. On a GPU; and, with FP8_TEST_EMULATED, the same
// backend and kernels on the host, with fewer cases.
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(FP8_TEST_EMULATED)
#  include <cuda_runtime_api.h>
#endif

#include "fp8core/cuda.h"
#include "fp8optim/fp8optim.h"

#if defined(FP8_TEST_EMULATED)
#  define EMULATED 1
#else
#  define EMULATED 0
#endif

// What the two norms may differ by: the CPU adds up to 512 squares of FP8 and FP16 in FP32 (a relative 2^-15 of their
// sum at the worst, half of it of the root), CUDA up to 16 of any format.
#define NORM_BOUND 0x1.1p-16

static fp8core_context *cpu;
static fp8core_context *gpu;

static void require_gpu(void) {
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) > 0) return;
  printf("skipped: %s\n", fp8core_last_error());
  exit(77);
}

// The same tensors in the memory of both devices.
#define SIDES 2
static fp8core_context *side_context(int side) { return side == 0 ? cpu : gpu; }

typedef struct tensor_case {
  // Given rows times columns; elements follow.
  int64_t rows;
  int64_t columns;
  // Elements between the rows of the gradient; elements that it starts off an aligned address.
  int64_t gap;
  int64_t offset;
  fp8core_dtype gradient;
  int with_weight;
  fp8core_dtype weight;
  int group;
  int scaled;
} tensor_case;

typedef struct gradient_memory {
  unsigned char *host;
  unsigned char *data[SIDES];
  float *scale_inverse[SIDES];
  size_t bytes;
} gradient_memory;

#define MOST_TENSORS 24
typedef struct run {
  const char *name;
  fp8optim_adamw_options options;
  int tensors;
  tensor_case of[MOST_TENSORS];
  fp8optim_adamw *adamw[SIDES];
  gradient_memory gradients[MOST_TENSORS];
  test_random random;
} run;

// The last keeps its masters.
#define GROUPS 3
static const fp8optim_group groups[GROUPS] = {
  {1e-2, 0.9, 0.95, 1e-8, 0.1}, {3e-3, 0.8, 0.999, 1e-6, 0.0}, {0.0, 0.9, 0.95, 1e-8, 0.1}};

static void start_run(run *r, uint64_t seed) {
  char names[MOST_TENSORS][16];
  fp8optim_parameter parameters[MOST_TENSORS];
  r->random.state = seed;
  for (int i = 0; i < r->tensors; i++) {
    snprintf(names[i], sizeof(names[i]), "t%d", i);
    parameters[i] = fp8optim_parameter_create(names[i], r->of[i].rows, r->of[i].columns);
    parameters[i].group = r->of[i].group;
    parameters[i].with_weight = r->of[i].with_weight;
    parameters[i].weight_dtype = r->of[i].weight;
  }
  for (int side = 0; side < SIDES; side++)
    assert_ok(
      fp8optim_adamw_create(&r->adamw[side], side_context(side), &r->options, r->tensors, parameters, GROUPS, groups));
  for (int i = 0; i < r->tensors; i++) {
    const tensor_case *of = &r->of[i];
    gradient_memory *memory = &r->gradients[i];
    const int64_t elements = of->rows * of->columns;
    const float scale_inverse = of->scaled ? 0.37f : 1.0f;
    memory->bytes = (size_t)(of->rows * (of->columns + of->gap) + of->offset + 1) * fp8core_dtype_size(of->gradient);
    memory->host = calloc(1, memory->bytes);
    float *values = malloc((size_t)(elements > 0 ? elements : 1) * sizeof(float));
    for (int64_t j = 0; j < elements; j++) values[j] = 0.05f * (float)test_random_normal(&r->random);
    for (int side = 0; side < SIDES; side++) {
      fp8core_context *context = side_context(side);
      memory->data[side] = test_alloc(context, memory->bytes);
      memory->scale_inverse[side] = test_upload(context, &scale_inverse, sizeof(scale_inverse));
      if (elements == 0) continue;
      float *device = test_upload(context, values, (size_t)elements * sizeof(float));
      const fp8core_tensor source =
        fp8core_tensor_matrix(device, FP8CORE_FP32, of->rows, of->columns, fp8core_context_device(context));
      assert_ok(fp8optim_adamw_set_state(r->adamw[side], i, FP8OPTIM_MASTER, &source));
      test_free(context, device);
    }
    free(values);
  }
}

static void end_run(run *r) {
  for (int side = 0; side < SIDES; side++) {
    fp8optim_adamw_destroy(&r->adamw[side]);
    for (int i = 0; i < r->tensors; i++) {
      test_free(side_context(side), r->gradients[i].data[side]);
      test_free(side_context(side), r->gradients[i].scale_inverse[side]);
    }
  }
  for (int i = 0; i < r->tensors; i++) free(r->gradients[i].host);
}

static void store(unsigned char *data, int64_t index, fp8core_dtype dtype, uint32_t code) {
  memcpy(data + index * (int64_t)fp8core_dtype_size(dtype), &code, fp8core_dtype_size(dtype));
}

// Draws gradients. `size`: of a typical one; 0: whole numbers, whose squares add without rounding. `poison`: what one
// element is, in the last tensor that is not empty; 0: nothing.
static void draw_gradients(run *r, double size, float poison) {
  int last = -1;
  for (int i = 0; i < r->tensors; i++) {
    const tensor_case *of = &r->of[i];
    gradient_memory *memory = &r->gradients[i];
    // What lies between rows must not be seen.
    for (size_t j = 0; j < memory->bytes; j++) memory->host[j] = 0xff;
    for (int64_t row = 0; row < of->rows; row++)
      for (int64_t column = 0; column < of->columns; column++) {
        const double bell = test_random_normal(&r->random);
        const uint64_t bits = test_random_bits(&r->random);
        // A few elements far from the others, and zeros.
        const double far = bits % 64 == 0 ? 37.0 : bits % 64 < 4 ? 0.0 : bits % 64 == 5 ? 1e-4 : 1.0;
        const float value = size == 0.0 ? (float)(bits >> 32 & 3) : (float)(size * bell * far);
        store(memory->host, of->offset + row * (of->columns + of->gap) + column, of->gradient,
              fp8core_encode(of->gradient, value, 1));
      }
    if (of->rows * of->columns > 0) last = i;
  }
  if (poison != 0.0f && last >= 0) {
    const tensor_case *of = &r->of[last];
    store(r->gradients[last].host, of->offset + (of->rows - 1) * (of->columns + of->gap) + of->columns / 2,
          of->gradient, fp8core_encode(of->gradient, poison, 0));
  }
  for (int i = 0; i < r->tensors; i++)
    for (int side = 0; side < SIDES; side++)
      assert_ok(
        fp8core_copy(side_context(side), r->gradients[i].data[side], r->gradients[i].host, r->gradients[i].bytes));
}

static void tensors_of(const run *r, int side, fp8core_tensor *tensors) {
  for (int i = 0; i < r->tensors; i++) {
    const tensor_case *of = &r->of[i];
    tensors[i] =
      fp8core_tensor_matrix(r->gradients[i].data[side] + of->offset * (int64_t)fp8core_dtype_size(of->gradient),
                            of->gradient, of->rows, of->columns, fp8core_context_device(side_context(side)));
    if (of->gap) tensors[i].row_stride = of->columns + of->gap;
    if (of->scaled) tensors[i].scale_inverse = r->gradients[i].scale_inverse[side];
  }
}

static void take_step(run *r, float max_norm, float loss_scale, fp8optim_step_report report[SIDES]) {
  for (int side = 0; side < SIDES; side++) {
    fp8core_tensor tensors[MOST_TENSORS];
    fp8optim_step_options options = fp8optim_step_options_default();
    options.max_norm = max_norm;
    options.loss_scale = loss_scale;
    tensors_of(r, side, tensors);
    assert_ok(fp8optim_adamw_step(r->adamw[side], tensors, &options, &report[side]));
  }
  assert_int_equal(report[0].skipped, report[1].skipped);
  assert_int_equal(report[0].steps, report[1].steps);
  assert_int_equal(report[0].skipped_steps, report[1].skipped_steps);
  if (isinf(report[0].gradient_norm)) {
    assert_true(isinf(report[1].gradient_norm));
  } else if (!isnan(report[0].gradient_norm)) {
    const double norm = (double)report[0].gradient_norm, other = (double)report[1].gradient_norm;
    if (!(fabs(norm - other) <= NORM_BOUND * norm)) fail_msg("%s: the norm is %a, on the CPU %a", r->name, other, norm);
  } else {
    assert_true(isnan(report[1].gradient_norm));
  }
}

static void compare(const run *r, const char *when) {
  const size_t bytes = fp8optim_adamw_saved_bytes(r->adamw[0]);
  unsigned char *saved[SIDES];
  assert_int_equal(fp8optim_adamw_saved_bytes(r->adamw[1]), bytes);
  for (int side = 0; side < SIDES; side++) {
    saved[side] = malloc(bytes);
    assert_ok(fp8optim_adamw_save(r->adamw[side], saved[side], bytes));
  }
  for (int i = 0; i < r->tensors; i++)
    for (int part = 0; part < 4; part++) {
      unsigned char *data[SIDES];
      float scale[SIDES][2];
      size_t part_bytes = 0;
      if (part == FP8OPTIM_WEIGHT && !r->of[i].with_weight) continue;
      for (int side = 0; side < SIDES; side++) {
        fp8core_tensor tensor;
        assert_ok(fp8optim_adamw_state(r->adamw[side], i, (fp8optim_state)part, &tensor));
        part_bytes = (size_t)fp8core_tensor_span_bytes(&tensor);
        data[side] = malloc(part_bytes + 1);
        if (part_bytes > 0) test_download(side_context(side), data[side], tensor.data, part_bytes);
        test_download(side_context(side), &scale[side][0], tensor.scale, sizeof(float));
        test_download(side_context(side), &scale[side][1], tensor.scale_inverse, sizeof(float));
      }
      if (memcmp(scale[0], scale[1], sizeof(scale[0])) != 0)
        fail_msg("%s, %s: the scale of %s of tensor %d is %a, on the CPU %a", r->name, when,
                 fp8optim_state_name((fp8optim_state)part), i, (double)scale[1][0], (double)scale[0][0]);
      for (size_t j = 0; j < part_bytes; j++)
        if (data[0][j] != data[1][j])
          fail_msg("%s, %s: byte %zu of %s of tensor %d [%lld, %lld], gradient %s, is %02x, on the CPU %02x", r->name,
                   when, j, fp8optim_state_name((fp8optim_state)part), i, (long long)r->of[i].rows,
                   (long long)r->of[i].columns, fp8core_dtype_name(r->of[i].gradient), data[1][j], data[0][j]);
      free(data[0]);
      free(data[1]);
    }
  // Amaxes and counts too.
  if (memcmp(saved[0], saved[1], bytes) != 0) fail_msg("%s, %s: the saved states differ", r->name, when);
  free(saved[0]);
  free(saved[1]);
}

// Tensors that between them have every format, sizes around vectors and chunks, rows with gaps, odd addresses.
static void fill_tensors(run *r, int shift) {
  static const struct {
    int64_t rows, columns, gap, offset;
  } shapes[] = {
    {1, 1, 0, 0},      {1, 3, 0, 0},     {1, 8, 0, 0},   {3, 5, 0, 1},   {0, 7, 0, 0},      {1, 127, 0, 3},
    {37, 16, 16, 0},   {37, 16, 3, 0},   {7, 33, 0, 0},  {9, 1, 4, 0},   {1, 16384, 0, 0},  {1, 16385, 0, 1},
    {5, 3301, 11, 2},  {2, 9000, 8, 16}, {64, 64, 0, 0}, {129, 8, 8, 8}, {1, 70000, 0, 0},  {700, 0, 0, 0},
    {2, 16400, 16, 0}, {1, 40000, 0, 5}, {3, 2, 1, 0},   {1, 255, 0, 0}, {300, 100, 28, 0}, {1, 31, 0, 0},
  };
  r->tensors = (int)(sizeof(shapes) / sizeof(shapes[0]));
  for (int i = 0; i < r->tensors; i++) {
    tensor_case *of = &r->of[i];
    of->rows = shapes[i].rows;
    of->columns = shapes[i].columns;
    of->gap = shapes[i].gap;
    of->offset = shapes[i].offset;
    of->gradient = (fp8core_dtype)((i + shift) % FP8CORE_DTYPE_COUNT);
    of->with_weight = (i + shift) % 6 != 5;
    of->weight = (fp8core_dtype)((i / 2 + shift * 2) % FP8CORE_DTYPE_COUNT);
    of->group = i % 7 == 6 ? 2 : i % 3 == 1;
    of->scaled = (i + shift) % 4 == 1;
  }
}

// Without clipping no bit depends on the norm.
static void run_steps(const char *name, const fp8optim_adamw_options *options, int shift) {
  run r;
  fp8optim_step_report report[SIDES];
  memset(&r, 0, sizeof(r));
  r.name = name;
  r.options = *options;
  fill_tensors(&r, shift);
  start_run(&r, (uint64_t)(shift + 1));
  compare(&r, "after the masters were set");
  const double sizes[] = {1e-3, 2.0, 1e-2, 1e-6};
  // One is skipped; in the fourth that is taken, moments shrink.
  for (int step = 0; step < (EMULATED ? 6 : 10); step++) {
    char when[32];
    const float poison = step == 2 ? (shift % 2 ? INFINITY : NAN) : 0.0f;
    snprintf(when, sizeof(when), "step %d", step + 1);
    // E4M3 has no infinity: its code is a NaN's then.
    draw_gradients(&r, sizes[step % 4], poison);
    take_step(&r, 0.0f, step % 2 ? 128.0f : 1.0f, report);
    assert_int_equal(report[0].skipped, poison != 0.0f);
    assert_true(report[1].clip_factor == 1.0f);
    compare(&r, when);
  }
  end_run(&r);
}

static void presets_match_the_cpu(void **state) {
  (void)state;
  for (int preset = 0; preset <= FP8OPTIM_PRESET_FP8_EXP_AVG_SQ; preset++) {
    const fp8optim_adamw_options options = fp8optim_adamw_options_of((fp8optim_preset)preset);
    for (int shift = 0; shift < (EMULATED ? 2 : 30); shift++)
      run_steps(fp8optim_preset_name((fp8optim_preset)preset), &options, shift + preset);
  }
}

static void stochastic_rounding_matches_the_cpu(void **state) {
  (void)state;
  for (int preset = 0; preset <= FP8OPTIM_PRESET_FP8_EXP_AVG_SQ; preset++) {
    fp8optim_adamw_options options = fp8optim_adamw_options_of((fp8optim_preset)preset);
    options.stochastic_rounding = 1;
    options.seed = UINT64_C(0x123456789abcdef);
    run_steps("stochastic", &options, preset);
  }
}

static void other_formats_match_the_cpu(void **state) {
  (void)state;
  const fp8core_dtype formats[][3] = {{FP8CORE_BF16, FP8CORE_BF16, FP8CORE_BF16},
                                      {FP8CORE_FP32, FP8CORE_E5M2, FP8CORE_BF16},
                                      {FP8CORE_E5M2, FP8CORE_FP16, FP8CORE_FP32},
                                      {FP8CORE_FP16, FP8CORE_FP32, FP8CORE_E5M2},
                                      {FP8CORE_FP32, FP8CORE_BF16, FP8CORE_E4M3}};
  for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
    fp8optim_adamw_options options = fp8optim_adamw_options_default();
    options.master_dtype = formats[i][0];
    options.exp_avg_dtype = formats[i][1];
    options.exp_avg_sq_dtype = formats[i][2];
    options.stochastic_rounding = i % 2 == 1;
    run_steps("other formats", &options, (int)i);
  }
}

// Whole numbers from 0 to 3: sums of their squares are exact in any order, and so is all that follows from them.
static void clipping_matches_the_cpu(void **state) {
  (void)state;
  for (int shift = 0; shift < (EMULATED ? 2 : 10); shift++) {
    run r;
    fp8optim_step_report report[SIDES];
    memset(&r, 0, sizeof(r));
    r.name = "clipping";
    r.options = fp8optim_adamw_options_of(shift % 2 ? FP8OPTIM_PRESET_FP8 : FP8OPTIM_PRESET_FP32);
    fill_tensors(&r, shift);
    for (int i = 0; i < r.tensors; i++) r.of[i].scaled = 0;
    start_run(&r, 99);
    for (int step = 0; step < 3; step++) {
      draw_gradients(&r, 0.0, 0.0f);
      take_step(&r, 3.0f, 7.0f, report);
      assert_true(report[0].gradient_norm == report[1].gradient_norm);
      assert_true(report[0].clip_factor == report[1].clip_factor);
      assert_true(report[0].clip_factor < 1.0f);
      compare(&r, "clipped");
    }
    end_run(&r);
  }
}

// Gradients of any size: factors differ by the bound of the norms, and so do moments of the first step, but for their
// rounding. In FP32 nothing rounds away.
static void clipping_is_within_the_bound(void **state) {
  (void)state;
  run r;
  fp8optim_step_report report[SIDES];
  memset(&r, 0, sizeof(r));
  r.name = "clipping to a bound";
  r.options = fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP32);
  fill_tensors(&r, 3);
  start_run(&r, 5);
  draw_gradients(&r, 1.0, 0.0f);
  take_step(&r, 0.5f, 1.0f, report);
  assert_true(report[1].clip_factor < 1.0f);
  assert_true(fabs((double)report[1].clip_factor - (double)report[0].clip_factor) <=
              1.01 * NORM_BOUND * (double)report[0].clip_factor);
  for (int i = 0; i < r.tensors; i++) {
    const int64_t elements = r.of[i].rows * r.of[i].columns;
    float *moments[SIDES];
    if (elements == 0) continue;
    for (int side = 0; side < SIDES; side++) {
      fp8core_tensor tensor;
      assert_ok(fp8optim_adamw_state(r.adamw[side], i, FP8OPTIM_EXP_AVG, &tensor));
      moments[side] = malloc((size_t)elements * sizeof(float));
      test_download(side_context(side), moments[side], tensor.data, (size_t)elements * sizeof(float));
    }
    for (int64_t j = 0; j < elements; j++) {
      const double one = (double)moments[0][j], other = (double)moments[1][j];
      if (!(fabs(one - other) <= 1.02 * NORM_BOUND * fabs(one)))
        fail_msg("exp_avg of tensor %d [%lld] is %g, on the CPU %g", i, (long long)j, other, one);
    }
    free(moments[0]);
    free(moments[1]);
  }
  end_run(&r);
}

// Sums of squares that overflow FP32, or vanish in it.
static void far_norms_match_the_cpu(void **state) {
  (void)state;
  const double sizes[] = {1e-30, 1e15, 1e-42, 1e37};
  for (int size = 0; size < 4; size++)
    for (int dtype = FP8CORE_BF16; dtype <= FP8CORE_FP32; dtype += FP8CORE_FP32 - FP8CORE_BF16) {
      run r;
      fp8optim_step_report report[SIDES];
      memset(&r, 0, sizeof(r));
      r.name = "far norms";
      r.options = fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP32);
      r.tensors = 2;
      for (int i = 0; i < 2; i++) {
        r.of[i].rows = 3;
        r.of[i].columns = 1111;
        r.of[i].gradient = (fp8core_dtype)dtype;
      }
      start_run(&r, 8);
      for (int step = 0; step < 2; step++) {
        draw_gradients(&r, sizes[size], 0.0f);
        take_step(&r, 0.0f, 1.0f, report);
        assert_int_equal(report[0].skipped, size == 3);
        compare(&r, "far norms");
      }
      end_run(&r);
    }
}

// States of any format, with rows apart and scales, from outside; and a saved state of the CPU's that goes on here.
static void states_are_set_as_on_the_cpu(void **state) {
  (void)state;
  run r;
  fp8optim_step_report report[SIDES];
  memset(&r, 0, sizeof(r));
  r.name = "states from outside";
  r.options = fp8optim_adamw_options_default();
  fill_tensors(&r, 1);
  start_run(&r, 77);
  draw_gradients(&r, 0.0, 0.0f);
  for (int side = 0; side < SIDES; side++) {
    fp8core_tensor tensors[MOST_TENSORS];
    tensors_of(&r, side, tensors);
    assert_ok(fp8optim_adamw_set_steps(r.adamw[side], 12));
    // Not negative, so that each will do.
    for (int i = 0; i < r.tensors; i++)
      for (int part = 0; part < 3; part++)
        assert_ok(fp8optim_adamw_set_state(r.adamw[side], i, (fp8optim_state)part, &tensors[i]));
  }
  compare(&r, "set");
  assert_int_equal(fp8optim_adamw_steps(r.adamw[1]), 12);
  draw_gradients(&r, 1e-3, NAN);
  for (int side = 0; side < SIDES; side++) {
    fp8core_tensor tensors[MOST_TENSORS];
    tensors_of(&r, side, tensors);
    assert_fails(fp8optim_adamw_set_state(r.adamw[side], r.tensors - 1, FP8OPTIM_EXP_AVG, &tensors[r.tensors - 1]),
                 FP8CORE_ERROR_INVALID_ARGUMENT, "a NaN");
    assert_fails(fp8optim_adamw_set_state(r.adamw[side], 10, FP8OPTIM_EXP_AVG_SQ, &tensors[10]),
                 FP8CORE_ERROR_INVALID_ARGUMENT, "negative");
  }
  compare(&r, "refused");
  draw_gradients(&r, 1e-3, 0.0f);
  take_step(&r, 0.0f, 1.0f, report);
  const size_t bytes = fp8optim_adamw_saved_bytes(r.adamw[0]);
  unsigned char *saved = malloc(bytes);
  assert_ok(fp8optim_adamw_save(r.adamw[0], saved, bytes));
  draw_gradients(&r, 1e-2, 0.0f);
  take_step(&r, 0.0f, 1.0f, report);
  compare(&r, "a step more");
  for (int side = 0; side < SIDES; side++) assert_ok(fp8optim_adamw_load(r.adamw[side], saved, bytes));
  compare(&r, "loaded");
  take_step(&r, 0.0f, 1.0f, report);
  compare(&r, "resumed");
  free(saved);
  end_run(&r);
}

// More than one part of a table, and groups that change between steps.
static void many_tensors_match_the_cpu(void **state) {
  (void)state;
  enum { TENSORS = 300, MANY = 120, COLUMNS = 37 };
  fp8optim_parameter *parameters = malloc(TENSORS * sizeof(*parameters));
  fp8optim_group *many = malloc(MANY * sizeof(*many));
  char(*names)[16] = malloc(TENSORS * sizeof(*names));
  float *values = malloc(TENSORS * COLUMNS * sizeof(*values));
  fp8core_tensor *tensors = malloc(TENSORS * sizeof(*tensors));
  fp8optim_adamw *adamw[SIDES];
  float *device[SIDES];
  test_random random = {6};
  for (int i = 0; i < TENSORS; i++) {
    snprintf(names[i], sizeof(names[i]), "t%d", i);
    parameters[i] = fp8optim_parameter_create(names[i], 1, COLUMNS);
    parameters[i].group = i % MANY;
  }
  for (int i = 0; i < MANY; i++) {
    many[i] = fp8optim_group_default();
    many[i].learning_rate = 1e-3 * i;
  }
  for (int side = 0; side < SIDES; side++) {
    assert_ok(fp8optim_adamw_create(&adamw[side], side_context(side), NULL, TENSORS, parameters, MANY, many));
    device[side] = test_alloc(side_context(side), TENSORS * COLUMNS * sizeof(float));
  }
  const size_t bytes = fp8optim_adamw_saved_bytes(adamw[0]);
  unsigned char *saved[SIDES] = {malloc(bytes), malloc(bytes)};
  for (int step = 0; step < 4; step++) {
    for (int i = 0; i < TENSORS * COLUMNS; i++) values[i] = (float)test_random_normal(&random);
    for (int side = 0; side < SIDES; side++) {
      fp8optim_group changed = fp8optim_group_default();
      changed.beta1 = 0.1 * step;
      assert_ok(fp8optim_adamw_set_group(adamw[side], 110, &changed));
      assert_ok(fp8core_copy(side_context(side), device[side], values, TENSORS * COLUMNS * sizeof(float)));
      // The last steps find other gradients at other places.
      for (int i = 0; i < TENSORS; i++)
        tensors[i] = fp8core_tensor_matrix(device[side] + (step < 2 ? i : (i + 250) % TENSORS) * COLUMNS, FP8CORE_FP32,
                                           1, COLUMNS, fp8core_context_device(side_context(side)));
      assert_ok(fp8optim_adamw_step(adamw[side], tensors, NULL, NULL));
      assert_ok(fp8optim_adamw_save(adamw[side], saved[side], bytes));
    }
    assert_memory_equal(saved[1], saved[0], bytes);
  }
  for (int side = 0; side < SIDES; side++) {
    fp8optim_adamw_destroy(&adamw[side]);
    test_free(side_context(side), device[side]);
    free(saved[side]);
  }
  free(parameters);
  free(many);
  free(names);
  free(values);
  free(tensors);
}

#if !defined(FP8_TEST_EMULATED)
// A captured step is a step each time it is launched; steps outside of the graph do not disturb it.
static void steps_can_be_captured(void **state) {
  (void)state;
  run r;
  fp8optim_step_report report[SIDES];
  fp8core_tensor tensors[MOST_TENSORS];
  void *stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  memset(&r, 0, sizeof(r));
  r.name = "captured";
  r.options = fp8optim_adamw_options_default();
  fill_tensors(&r, 2);
  start_run(&r, 31);
  assert_ok(fp8core_cuda_stream(gpu, &stream));
  draw_gradients(&r, 1e-2, 0.0f);
  tensors_of(&r, 1, tensors);
  assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  assert_ok(fp8optim_adamw_step(r.adamw[1], tensors, NULL, NULL));
  assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  assert_int_equal(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < 4; i++) {
    if (i == 2) {
      fp8core_tensor turned[MOST_TENSORS];
      // The same gradients, described elsewhere: other scales.
      for (int side = 0; side < SIDES; side++) {
        tensors_of(&r, side, turned);
        for (int j = 0; j < r.tensors; j++)
          turned[j].scale_inverse = r.gradients[(j + 1) % r.tensors].scale_inverse[side];
        assert_ok(fp8optim_adamw_step(r.adamw[side], turned, NULL, NULL));
      }
      compare(&r, "a step between");
    }
    draw_gradients(&r, 1e-2, 0.0f);
    assert_int_equal(cudaGraphLaunch(executable, stream), cudaSuccess);
    tensors_of(&r, 0, tensors);
    assert_ok(fp8optim_adamw_step(r.adamw[0], tensors, NULL, &report[0]));
    compare(&r, "captured");
  }
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  end_run(&r);
}

// Indices beyond 2^31.
static void a_large_tensor_is_updated(void **state) {
  (void)state;
  const int64_t elements = (INT64_C(1) << 31) + 16384 + 5;
  fp8optim_parameter parameter = fp8optim_parameter_create("large", 1, elements);
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_adamw *adamw;
  void *gradient;
  fp8core_tensor tensor;
  fp8optim_step_report report;
  if (fp8core_alloc(gpu, (size_t)elements, &gradient) != FP8CORE_OK) skip();
  if (fp8optim_adamw_create(&adamw, gpu, NULL, 1, &parameter, 1, &group) != FP8CORE_OK) {
    test_free(gpu, gradient);
    skip();
  }
  assert_ok(fp8core_zero(gpu, gradient, (size_t)elements));
  const unsigned char one = 0x38;
  const int64_t places[] = {0, INT32_MAX, INT64_C(1) << 31, elements - 1};
  for (int i = 0; i < 4; i++) assert_ok(fp8core_copy(gpu, (unsigned char *)gradient + places[i], &one, 1));
  const fp8core_tensor gradients = test_matrix(gradient, FP8CORE_E4M3, 1, elements);
  assert_ok(fp8optim_adamw_step(adamw, &gradients, NULL, &report));
  assert_true(report.gradient_norm == 2.0f);
  assert_ok(fp8optim_adamw_state(adamw, 0, FP8OPTIM_EXP_AVG, &tensor));
  for (int i = 0; i < 4; i++) {
    unsigned char code[2];
    test_download(gpu, code, (const unsigned char *)tensor.data + places[i] - (i > 0), 2);
    // The largest value of the tensor, beside a zero.
    assert_true(code[i > 0] >= 0x7d);
    assert_int_equal(code[i == 0], i == 2 ? code[1] : 0);
  }
  fp8optim_adamw_destroy(&adamw);
  test_free(gpu, gradient);
}
#endif

int main(void) {
  setenv("FP8CORE_TEST_DEVICE", "cuda", 1);
  require_gpu();
  const fp8core_context_options options = fp8core_context_options_default();
  assert_ok(fp8core_context_create(&cpu, &options));
  gpu = test_context_default();
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(presets_match_the_cpu),
    cmocka_unit_test(stochastic_rounding_matches_the_cpu),
    cmocka_unit_test(other_formats_match_the_cpu),
    cmocka_unit_test(clipping_matches_the_cpu),
    cmocka_unit_test(clipping_is_within_the_bound),
    cmocka_unit_test(far_norms_match_the_cpu),
    cmocka_unit_test(states_are_set_as_on_the_cpu),
    cmocka_unit_test(many_tensors_match_the_cpu),
#if !defined(FP8_TEST_EMULATED)
    cmocka_unit_test(steps_can_be_captured),
    cmocka_unit_test(a_large_tensor_is_updated),
#endif
  };
  const int failures = cmocka_run_group_tests(tests, NULL, NULL);
  fp8core_context_destroy(&gpu);
  fp8core_context_destroy(&cpu);
  return failures;
}
