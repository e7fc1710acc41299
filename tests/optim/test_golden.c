// Against AdamW in FP64 whose states are quantised by a definition of its own: the nearest number of the format's grid,
// written with frexp() and rint(), independent of the library's numerics.
//
// The library works in FP32 and its scales are FP32 numbers, so a value within a few units of FP32 of the middle
// between two numbers of a grid may go to the other side. Such neighbours are allowed for, and counted: they must be
// rare.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rig.h"

#define ROWS 24
#define COLUMNS 43
#define ELEMENTS (ROWS * COLUMNS)
#define STEPS 50

typedef struct grid {
  int mantissa_bits;
  // Exponent of the smallest normal number.
  int min_exponent;
  double max;
  int scaled;
} grid;

static grid grid_of(fp8core_dtype dtype) {
  switch (dtype) {
  case FP8CORE_E4M3: return (grid){3, -6, 448.0, 1};
  case FP8CORE_E5M2: return (grid){2, -14, 57344.0, 1};
  case FP8CORE_BF16: return (grid){7, -126, (2.0 - 0x1p-7) * 0x1p127, 0};
  case FP8CORE_FP16: return (grid){10, -14, 65504.0, 1};
  case FP8CORE_FP32: break;
  }
  return (grid){23, -126, (2.0 - 0x1p-23) * 0x1p127, 0};
}

// Distance of neighbours on the grid at a value.
static double spacing(grid g, double value) {
  int exponent;
  if (value == 0.0) return ldexp(1.0, g.min_exponent - g.mantissa_bits);
  (void)frexp(value, &exponent);
  exponent--;
  return ldexp(1.0, (exponent < g.min_exponent ? g.min_exponent : exponent) - g.mantissa_bits);
}

static double nearest(grid g, double value) {
  const double unit = spacing(g, value);
  const double rounded = rint(value / unit) * unit;
  return fabs(rounded) > g.max ? copysign(g.max, value) : rounded;
}

static double toward_zero(grid g, double value) {
  const double unit = spacing(g, value);
  return trunc(value / unit) * unit;
}

static double largest(const double *values) {
  double found = 0.0;
  for (int i = 0; i < ELEMENTS; i++) found = fmax(found, fabs(values[i]));
  return found;
}

typedef struct reference {
  fp8optim_adamw_options options;
  fp8optim_group group;
  double states[3][ELEMENTS];
  double scales[3];
  // The largest first moment, rounded to nearest whether or not it was stored so.
  double exp_avg_amax;
} reference;

// A moment's scale fills the format with the bound on its largest magnitude; a master's is a power of two with room.
static double moment_scale(grid g, double bound) { return g.scaled && bound > 0.0 ? g.max / bound : 1.0; }

static double master_scale(grid g, double bound, double kept) {
  if (!g.scaled || bound == 0.0) return 1.0;
  const double limit = g.max / bound;
  if (kept <= limit && kept * 16.0 > limit) return kept;
  int exponent;
  (void)frexp(limit / 2.0, &exponent);
  return ldexp(1.0, exponent - 1);
}

// One step in FP64. `scales`: NULL to choose them here, or those to quantise with.
static void advance(reference *r, const double *gradient, int step, const float *scales) {
  const fp8optim_group *h = &r->group;
  const grid master = grid_of(r->options.master_dtype);
  const grid exp_avg = grid_of(r->options.exp_avg_dtype);
  const grid exp_avg_sq = grid_of(r->options.exp_avg_sq_dtype);
  double *w = r->states[FP8OPTIM_MASTER];
  double *m = r->states[FP8OPTIM_EXP_AVG];
  double *v = r->states[FP8OPTIM_EXP_AVG_SQ];
  const double g_max = largest(gradient);
  const double m_bound = h->beta1 * r->exp_avg_amax + (1.0 - h->beta1) * g_max;
  const double v_bound = h->beta2 * largest(v) + (1.0 - h->beta2) * g_max * g_max;
  // An update is at most a few learning rates; the scale has more room than that.
  const double w_bound = largest(w) + 4.0 * h->learning_rate;
  const double s_m = scales ? (double)scales[FP8OPTIM_EXP_AVG] : moment_scale(exp_avg, m_bound);
  const double s_v = scales ? (double)scales[FP8OPTIM_EXP_AVG_SQ] : moment_scale(exp_avg_sq, v_bound);
  const double s_w =
    scales ? (double)scales[FP8OPTIM_MASTER] : master_scale(master, w_bound, r->scales[FP8OPTIM_MASTER]);
  const double correction1 = 1.0 - pow(h->beta1, step);
  const double correction2 = 1.0 - pow(h->beta2, step);
  const double least = ldexp(1.0, exp_avg_sq.min_exponent - exp_avg_sq.mantissa_bits) / s_v;
  double first_amax = 0.0;
  for (int i = 0; i < ELEMENTS; i++) {
    const double first = h->beta1 * m[i] + (1.0 - h->beta1) * gradient[i];
    first_amax = fmax(first_amax, fabs(first));
    double second = h->beta2 * v[i] + (1.0 - h->beta2) * gradient[i] * gradient[i];
    if (second > 0.0 && second < least) second = least;
    const double update = first / correction1 / (sqrt(second / correction2) + h->eps);
    const double changed = w[i] * (1.0 - h->learning_rate * h->weight_decay) - h->learning_rate * update;
    // A first moment of 8 bits that its gradient lets shrink rounds toward zero every fourth step.
    const int shrinks = exp_avg.mantissa_bits <= 3 && step % 4 == 0 && fabs(gradient[i]) < 0.25 * fabs(m[i]);
    m[i] = (shrinks ? toward_zero(exp_avg, first * s_m) : nearest(exp_avg, first * s_m)) / s_m;
    v[i] = nearest(exp_avg_sq, second * s_v) / s_v;
    w[i] = nearest(master, changed * s_w) / s_w;
  }
  r->exp_avg_amax = nearest(exp_avg, first_amax * s_m) / s_m;
  r->scales[FP8OPTIM_MASTER] = s_w;
  r->scales[FP8OPTIM_EXP_AVG] = s_m;
  r->scales[FP8OPTIM_EXP_AVG_SQ] = s_v;
}

static void read_states(const rig *r, double states[3][ELEMENTS], float scales[3]) {
  float values[ELEMENTS];
  for (int state = 0; state < 3; state++) {
    const double inverse = 1.0 / (double)rig_scale(r, 0, (fp8optim_state)state);
    uint32_t codes[ELEMENTS];
    fp8core_tensor tensor;
    assert_ok(fp8optim_adamw_state(r->adamw, 0, (fp8optim_state)state, &tensor));
    scales[state] = rig_scale(r, 0, (fp8optim_state)state);
    rig_codes(r, 0, (fp8optim_state)state, codes);
    rig_get(r, 0, (fp8optim_state)state, values);
    for (int i = 0; i < ELEMENTS; i++) states[state][i] = (double)fp8core_decode(tensor.dtype, codes[i]) * inverse;
  }
}

// Gradients whose sizes differ by tensor position, with some zeros, as the format of the gradient holds them.
static void make_gradient(fp8core_dtype dtype, test_random *random, int step, float *stored, double *exact) {
  for (int i = 0; i < ELEMENTS; i++) {
    const double size = exp2(-(double)(i % 11)) * (step % 7 == 3 ? 5.0 : 1.0);
    const double value = i % 29 == 0 && step % 3 ? 0.0 : size * test_random_normal(random);
    stored[i] = fp8core_decode(dtype, fp8core_encode(dtype, (float)value, 1));
    exact[i] = (double)stored[i];
  }
}

static fp8optim_group usual(void) {
  fp8optim_group group = fp8optim_group_default();
  group.learning_rate = 1e-2;
  return group;
}

static const fp8core_dtype gradient_dtypes[PRESETS] = {FP8CORE_FP32, FP8CORE_BF16, FP8CORE_E4M3,
                                                       FP8CORE_E4M3, FP8CORE_E4M3, FP8CORE_E4M3};

static void start(rig *r, reference *own, fp8core_context *context, const fp8optim_adamw_options *options,
                  fp8core_dtype gradient_dtype, test_random *random) {
  const fp8optim_group group = usual();
  float scales[3];
  memset(own, 0, sizeof(*own));
  own->options = *options;
  own->group = group;
  *r = rig_matrix(context, options, ROWS, COLUMNS, -1, &group, gradient_dtype);
  rig_random_masters(r, random, 0.5);
  read_states(r, own->states, scales);
  for (int state = 0; state < 3; state++) own->scales[state] = (double)scales[state];
}

// The scales of a step against their definition.
static void check_scales(const reference *own, const reference *before, const double *gradient, const float *scales) {
  const fp8optim_group *h = &own->group;
  const double g_max = largest(gradient);
  const double bounds[3] = {
    largest(before->states[0]),
    h->beta1 * before->exp_avg_amax + (1.0 - h->beta1) * g_max,
    h->beta2 * largest(before->states[2]) + (1.0 - h->beta2) * g_max * g_max,
  };
  const fp8core_dtype dtypes[3] = {own->options.master_dtype, own->options.exp_avg_dtype,
                                   own->options.exp_avg_sq_dtype};
  for (int state = 0; state < 3; state++) {
    const grid g = grid_of(dtypes[state]);
    const double scale = (double)scales[state];
    int exponent;
    if (!g.scaled) {
      assert_true(scale == 1.0);
    } else if (state == FP8OPTIM_MASTER) {
      // A power of two; the largest master and a few learning rates fit, with at most four powers to spare.
      assert_true(frexp(scale, &exponent) == 0.5);
      assert_true((bounds[state] + 2.0 * h->learning_rate) * scale <= g.max);
      assert_true((bounds[state] + 4.0 * h->learning_rate) * scale * 16.0 > g.max);
    } else if (fabs(scale * bounds[state] / g.max - 1.0) > 0x1p-17) {
      fail_msg("state %d: scale %a for a bound of %a", state, scale, bounds[state]);
    }
  }
}

// Each step from the library's own states: every value is the rounded one or, rarely, its neighbour on the grid.
static void each_step(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  static reference own;
  static reference before;
  static double found[3][ELEMENTS];
  for (int preset = 0; preset < PRESETS; preset++) {
    test_random random = {(uint64_t)preset + 1};
    const fp8optim_adamw_options options = fp8optim_adamw_options_of((fp8optim_preset)preset);
    const fp8core_dtype dtypes[3] = {options.master_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype};
    rig r;
    int neighbours = 0;
    start(&r, &own, context, &options, gradient_dtypes[preset], &random);
    for (int step = 1; step <= STEPS; step++) {
      float gradient[ELEMENTS];
      double exact[ELEMENTS];
      float scales[3];
      before = own;
      make_gradient(gradient_dtypes[preset], &random, step, gradient, exact);
      rig_set_gradient(&r, 0, gradient);
      (void)rig_step(&r, NULL);
      read_states(&r, found, scales);
      check_scales(&own, &before, exact, scales);
      advance(&own, exact, step, scales);
      for (int state = 0; state < 3; state++) {
        const grid g = grid_of(dtypes[state]);
        for (int i = 0; i < ELEMENTS; i++) {
          const double scale = (double)scales[state];
          const double expected = own.states[state][i];
          const double off = fabs(found[state][i] - expected) * scale;
          // FP32 itself rounds four times on the way to a master, whose terms may cancel.
          const double allowed = dtypes[state] == FP8CORE_FP32
                                   ? 0x1p-22 * (fabs(expected) + fabs(before.states[state][i]) + 1e-2)
                                   : spacing(g, expected * scale) * (1.0 + 1e-6);
          if (off > allowed)
            fail_msg("%s, step %d, %s[%d] is %a, expected %a, allowed %g",
                     fp8optim_preset_name((fp8optim_preset)preset), step, fp8optim_state_name((fp8optim_state)state), i,
                     found[state][i], expected, allowed / scale);
          neighbours += dtypes[state] != FP8CORE_FP32 && off > 0.25 * spacing(g, expected * scale);
        }
      }
      // What the library stored is what the next step starts from.
      memcpy(own.states, found, sizeof(found));
    }
    // A unit of FP32 is 2^-13 of FP16's and 2^-20 of E4M3's.
    if (neighbours > 3 * ELEMENTS * STEPS / 1000)
      fail_msg("%s: %d of %d values are neighbours", fp8optim_preset_name((fp8optim_preset)preset), neighbours,
               3 * ELEMENTS * STEPS);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// 50 steps on their own. A neighbour taken by one side moves a first moment by a unit of E4M3, an eighth of it, and the
// updates that it takes part in by as much: 10 steps' worth until it is forgotten. It starts on a new way of rounding
// the master, a unit of which it may be off each step. Bound: 50 steps of an eighth of a learning rate and a unit of
// the master; the mean, as such neighbours are rare, a tenth of one step's.
static void fifty_steps(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  static reference own;
  static double found[3][ELEMENTS];
  for (int preset = 0; preset < PRESETS; preset++) {
    test_random random = {(uint64_t)preset + 100};
    const fp8optim_adamw_options options = fp8optim_adamw_options_of((fp8optim_preset)preset);
    const grid g = grid_of(options.master_dtype);
    const double learning_rate = usual().learning_rate;
    float scales[3];
    rig r;
    start(&r, &own, context, &options, gradient_dtypes[preset], &random);
    for (int step = 1; step <= STEPS; step++) {
      float gradient[ELEMENTS];
      double exact[ELEMENTS];
      make_gradient(gradient_dtypes[preset], &random, step, gradient, exact);
      rig_set_gradient(&r, 0, gradient);
      (void)rig_step(&r, NULL);
      advance(&own, exact, step, NULL);
    }
    read_states(&r, found, scales);
    double mean = 0.0;
    double mean_allowed = 0.0;
    for (int i = 0; i < ELEMENTS; i++) {
      const double expected = own.states[FP8OPTIM_MASTER][i];
      const double unit = spacing(g, expected * own.scales[FP8OPTIM_MASTER]) / own.scales[FP8OPTIM_MASTER];
      const double off = fabs(found[FP8OPTIM_MASTER][i] - expected);
      if (off > STEPS * (learning_rate / 8.0 + unit))
        fail_msg("%s: master[%d] is %a, expected %a", fp8optim_preset_name((fp8optim_preset)preset), i,
                 found[FP8OPTIM_MASTER][i], expected);
      mean += off / ELEMENTS;
      mean_allowed += (learning_rate / 8.0 + unit) / ELEMENTS / 10.0;
    }
    if (mean > mean_allowed)
      fail_msg("%s: masters are off by %g in the mean, expected at most %g",
               fp8optim_preset_name((fp8optim_preset)preset), mean, mean_allowed);
    rig_destroy(&r);
  }
  fp8core_context_destroy(&context);
}

// FP32 states against FP64 ones without any rounding: 1e-6 relative, of the largest that a value was made from.
static void fp32_against_fp64(void **unused) {
  (void)unused;
  fp8core_context *context = test_context_default();
  static double w[ELEMENTS];
  static double m[ELEMENTS];
  static double v[ELEMENTS];
  test_random random = {77};
  const fp8optim_adamw_options options = fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP32);
  const fp8optim_group h = usual();
  static float read[ELEMENTS];
  rig r = rig_matrix(context, &options, ROWS, COLUMNS, -1, &h, FP8CORE_FP32);
  rig_random_masters(&r, &random, 0.5);
  rig_get(&r, 0, FP8OPTIM_MASTER, read);
  for (int i = 0; i < ELEMENTS; i++) w[i] = (double)read[i];
  for (int step = 1; step <= STEPS; step++) {
    float gradient[ELEMENTS];
    double exact[ELEMENTS];
    make_gradient(FP8CORE_FP32, &random, step, gradient, exact);
    rig_set_gradient(&r, 0, gradient);
    (void)rig_step(&r, NULL);
    for (int i = 0; i < ELEMENTS; i++) {
      m[i] = h.beta1 * m[i] + (1.0 - h.beta1) * exact[i];
      v[i] = h.beta2 * v[i] + (1.0 - h.beta2) * exact[i] * exact[i];
      w[i] = w[i] * (1.0 - h.learning_rate * h.weight_decay) -
             h.learning_rate * (m[i] / (1.0 - pow(h.beta1, step))) / (sqrt(v[i] / (1.0 - pow(h.beta2, step))) + h.eps);
    }
  }
  const double *const expected[3] = {w, m, v};
  for (int state = 0; state < 3; state++) {
    rig_get(&r, 0, (fp8optim_state)state, read);
    for (int i = 0; i < ELEMENTS; i++) {
      // First moments and masters are sums of terms of both signs: relative to the terms.
      const double size = exp2(-(double)(i % 11));
      const double terms = state == FP8OPTIM_MASTER ? 0.5 : state == FP8OPTIM_EXP_AVG ? size : 0.0;
      if (fabs((double)read[i] - expected[state][i]) > 1e-6 * (fabs(expected[state][i]) + terms))
        fail_msg("%s[%d] is %.9g, expected %.12g", fp8optim_state_name((fp8optim_state)state), i, (double)read[i],
                 expected[state][i]);
    }
  }
  rig_destroy(&r);
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(each_step),
    cmocka_unit_test(fifty_steps),
    cmocka_unit_test(fp32_against_fp64),
  };
  return cmocka_run_group_tests_name("golden", tests, NULL, NULL);
}
