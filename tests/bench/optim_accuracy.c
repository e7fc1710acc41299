// What the formats of the optimizer's states cost: the loss that each preset reaches, the signal-to-noise ratio of each
// state with the scale chosen before the pass and after it, and updates far below half a unit of the master's last
// place. docs/results-optimizer.md has the tables. Fails unless preset fp8 ends within 1 % of the FP32 loss (2 % with
// masters that round to nearest) and small updates add up with stochastic rounding. Usage: optim_accuracy [steps]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fp8core/fp8core.h>
#include <fp8optim/fp8optim.h>

enum { MAX_TENSORS = 6, MAX_ELEMENTS = 4096 };

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

static uint64_t random_state = 1;

static double uniform(void) {
  random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return ((double)(random_state >> 11) + 0.5) * 0x1p-53;
}

static double normal(void) {
  const double radius = sqrt(-2.0 * log(uniform()));
  return radius * cos(6.283185307179586 * uniform());
}

typedef float values[MAX_TENSORS][MAX_ELEMENTS];

typedef struct problem {
  const char *name;
  // Of the scales of the inputs.
  double decades;
  double learning_rate;
  int tensors;
  const char *names[MAX_TENSORS];
  int64_t shapes[MAX_TENSORS][2];
  // Mean gradient of the loss over the mini-batch of a step.
  void (*gradients)(values weights, int step, values gradients);
  double (*loss)(values weights);
  // Of the minimum where it is known, else 0.
  double least_loss;
} problem;

// Logistic regression whose features have scales over some decades, so that the condition of the Hessian is about the
// square of that. Labels are drawn from a model of the same kind: convex, with a finite minimum.
enum { FEATURES = 256, ROWS = 4096, LOGISTIC_BATCH = 256 };
static float features[ROWS][FEATURES];
static float labels[ROWS];

static float logit(const float *weights, float bias, int row) {
  float partial[8] = {0.0f};
  for (int i = 0; i < FEATURES; i += 8)
    for (int j = 0; j < 8; j++) partial[j] += weights[i + j] * features[row][i + j];
  for (int j = 0; j < 8; j++) bias += partial[j];
  return bias;
}

static void logistic_gradients(values weights, int step, values gradients) {
  memset(gradients[0], 0, FEATURES * sizeof(float));
  gradients[1][0] = 0.0f;
  for (int i = 0; i < LOGISTIC_BATCH; i++) {
    // A permutation of the rows for each pass over them.
    const int at = step * LOGISTIC_BATCH + i;
    const int row = (at % ROWS * 1237 + at / ROWS * 797) % ROWS;
    const float d = (1.0f / (1.0f + expf(-logit(weights[0], weights[1][0], row))) - labels[row]) / LOGISTIC_BATCH;
    for (int j = 0; j < FEATURES; j++) gradients[0][j] += d * features[row][j];
    gradients[1][0] += d;
  }
}

static double logistic_loss(values weights) {
  double sum = 0.0;
  for (int row = 0; row < ROWS; row++) {
    const double z = (double)logit(weights[0], weights[1][0], row) * (labels[row] > 0.5f ? 1.0 : -1.0);
    sum += z > 0.0 ? log1p(exp(-z)) : log1p(exp(z)) - z;
  }
  return sum / ROWS;
}

// The minimum, by Newton's method in FP64.
static double logistic_minimum(void) {
  enum { UNKNOWNS = FEATURES + 1 };
  static double hessian[UNKNOWNS][UNKNOWNS + 1];
  static double w[UNKNOWNS];
  double loss = 0.0;
  for (int iteration = 0; iteration < 12; iteration++) {
    memset(hessian, 0, sizeof(hessian));
    loss = 0.0;
    for (int row = 0; row < ROWS; row++) {
      double z = w[FEATURES];
      for (int i = 0; i < FEATURES; i++) z += w[i] * (double)features[row][i];
      const double p = 1.0 / (1.0 + exp(-z));
      const double signed_z = labels[row] > 0.5f ? z : -z;
      loss += signed_z > 0.0 ? log1p(exp(-signed_z)) : log1p(exp(signed_z)) - signed_z;
      for (int i = 0; i < UNKNOWNS; i++) {
        const double x = i < FEATURES ? (double)features[row][i] : 1.0;
        const double factor = p * (1.0 - p) * x;
        for (int j = 0; j < FEATURES; j++) hessian[i][j] += factor * (double)features[row][j];
        hessian[i][FEATURES] += factor;
        hessian[i][UNKNOWNS] += (p - (double)labels[row]) * x;
      }
    }
    // Positive definite: no pivoting.
    for (int i = 0; i < UNKNOWNS; i++) {
      for (int j = i + 1; j < UNKNOWNS; j++) {
        const double factor = hessian[j][i] / hessian[i][i];
        for (int k = i; k <= UNKNOWNS; k++) hessian[j][k] -= factor * hessian[i][k];
      }
    }
    for (int i = UNKNOWNS - 1; i >= 0; i--) {
      for (int j = i + 1; j < UNKNOWNS; j++) hessian[i][UNKNOWNS] -= hessian[i][j] * hessian[j][UNKNOWNS];
      hessian[i][UNKNOWNS] /= hessian[i][i];
    }
    for (int i = 0; i < UNKNOWNS; i++) w[i] -= hessian[i][UNKNOWNS];
  }
  return loss / ROWS;
}

static void make_logistic(problem *p, double decades) {
  static double truth[FEATURES];
  static double scales[FEATURES];
  random_state = 1;
  for (int i = 0; i < FEATURES; i++) {
    scales[i] = pow(10.0, -decades * i / (FEATURES - 1));
    truth[i] = 0.6 * normal() / sqrt(scales[i]);
  }
  for (int row = 0; row < ROWS; row++) {
    double z = 0.3;
    for (int i = 0; i < FEATURES; i++) {
      features[row][i] = (float)(scales[i] * normal());
      z += truth[i] * (double)features[row][i];
    }
    labels[row] = uniform() < 1.0 / (1.0 + exp(-z)) ? 1.0f : 0.0f;
  }
  const problem made = {
    .name = "logistic regression, 257 parameters",
    .decades = decades,
    .learning_rate = 1e-2,
    .tensors = 2,
    .names = {"weight", "bias"},
    .shapes = {{1, FEATURES}, {1, 1}},
    .gradients = logistic_gradients,
    .loss = logistic_loss,
    .least_loss = logistic_minimum(),
  };
  *p = made;
}

// A network of two hidden layers that learns the classes that another network gives, with noise.
enum { INPUTS = 32, HIDDEN = 64, CLASSES = 10, SAMPLES = 16384, BATCH = 64 };
static float inputs[SAMPLES][INPUTS];
static int classes[SAMPLES];

typedef struct activations {
  float first[HIDDEN];
  float second[HIDDEN];
  float score[CLASSES];
} activations;

// Weights are [inputs, outputs], so that the inner loops run over outputs.
static void layer(const float *weight, const float *bias, const float *from, int from_count, float *to, int to_count) {
  memcpy(to, bias, (size_t)to_count * sizeof(float));
  for (int i = 0; i < from_count; i++)
    for (int j = 0; j < to_count; j++) to[j] += from[i] * weight[i * to_count + j];
}

// Gradients of the weights from those of the results `d`, and of what went in.
static void layer_back(const float *weight, const float *from, int from_count, const float *d, int to_count,
                       float *weight_gradient, float *bias_gradient, float *from_gradient) {
  for (int j = 0; j < to_count; j++) bias_gradient[j] += d[j];
  for (int i = 0; i < from_count; i++) {
    for (int j = 0; j < to_count; j++) weight_gradient[i * to_count + j] += from[i] * d[j];
    if (!from_gradient) continue;
    from_gradient[i] = 0.0f;
    for (int j = 0; j < to_count; j++) from_gradient[i] += weight[i * to_count + j] * d[j];
  }
}

static void forward(values weights, int sample, activations *a) {
  layer(weights[0], weights[1], inputs[sample], INPUTS, a->first, HIDDEN);
  for (int j = 0; j < HIDDEN; j++) a->first[j] = fmaxf(a->first[j], 0.0f);
  layer(weights[2], weights[3], a->first, HIDDEN, a->second, HIDDEN);
  for (int j = 0; j < HIDDEN; j++) a->second[j] = fmaxf(a->second[j], 0.0f);
  layer(weights[4], weights[5], a->second, HIDDEN, a->score, CLASSES);
}

// Turns scores into probabilities; returns the loss.
static double softmax(float *score, int target) {
  float highest = score[0];
  float total = 0.0f;
  for (int k = 1; k < CLASSES; k++) highest = fmaxf(highest, score[k]);
  for (int k = 0; k < CLASSES; k++) total += score[k] = expf(score[k] - highest);
  for (int k = 0; k < CLASSES; k++) score[k] /= total;
  return -log((double)score[target] + 1e-30);
}

static void network_gradients(values weights, int step, values gradients) {
  memset(gradients, 0, sizeof(values));
  for (int i = 0; i < BATCH; i++) {
    const int at = step * BATCH + i;
    const int sample = (at % SAMPLES * 5701 + at / SAMPLES * 3331) % SAMPLES;
    activations a;
    float first[HIDDEN];
    float second[HIDDEN];
    forward(weights, sample, &a);
    (void)softmax(a.score, classes[sample]);
    a.score[classes[sample]] -= 1.0f;
    for (int k = 0; k < CLASSES; k++) a.score[k] /= BATCH;
    layer_back(weights[4], a.second, HIDDEN, a.score, CLASSES, gradients[4], gradients[5], second);
    for (int j = 0; j < HIDDEN; j++)
      if (a.second[j] <= 0.0f) second[j] = 0.0f;
    layer_back(weights[2], a.first, HIDDEN, second, HIDDEN, gradients[2], gradients[3], first);
    for (int j = 0; j < HIDDEN; j++)
      if (a.first[j] <= 0.0f) first[j] = 0.0f;
    layer_back(weights[0], inputs[sample], INPUTS, first, HIDDEN, gradients[0], gradients[1], NULL);
  }
}

static double network_loss(values weights) {
  double sum = 0.0;
  for (int sample = 0; sample < SAMPLES; sample++) {
    activations a;
    forward(weights, sample, &a);
    sum += softmax(a.score, classes[sample]);
  }
  return sum / SAMPLES;
}

static int64_t elements_of(const problem *p, int tensor) { return p->shapes[tensor][0] * p->shapes[tensor][1]; }

// Where every run starts: matrices normal with the spread that keeps variances, vectors zero.
static void initial_values(const problem *p, values start) {
  memset(start, 0, sizeof(values));
  if (p->tensors == 2) return;
  for (int i = 0; i < p->tensors; i += 2)
    for (int64_t j = 0; j < elements_of(p, i); j++)
      start[i][j] = (float)(normal() * sqrt((i == 4 ? 1.0 : 2.0) / (double)p->shapes[i][0]));
}

static void make_network(problem *p) {
  static values teacher;
  const problem made = {
    .name = "network 32-64-64-10, 6922 parameters",
    .learning_rate = 2e-3,
    .tensors = 6,
    .names = {"first.weight", "first.bias", "second.weight", "second.bias", "third.weight", "third.bias"},
    .shapes = {{INPUTS, HIDDEN}, {1, HIDDEN}, {HIDDEN, HIDDEN}, {1, HIDDEN}, {HIDDEN, CLASSES}, {1, CLASSES}},
    .gradients = network_gradients,
    .loss = network_loss,
  };
  *p = made;
  random_state = 2;
  initial_values(p, teacher);
  for (int sample = 0; sample < SAMPLES; sample++) {
    activations a;
    for (int i = 0; i < INPUTS; i++) inputs[sample][i] = (float)normal();
    forward(teacher, sample, &a);
    int best = 0;
    for (int k = 0; k < CLASSES; k++) {
      // The largest of score and Gumbel noise: a draw from the softmax of three times the score.
      a.score[k] = 3.0f * a.score[k] - (float)log(-log(uniform()));
      if (a.score[k] > a.score[best]) best = k;
    }
    classes[sample] = best;
  }
}

// A run: an optimizer and the memory of its model.
typedef struct run {
  const problem *p;
  fp8core_context *context;
  fp8optim_adamw *optimizer;
  fp8core_dtype gradient_dtype;
  values weights;
  values gradients;
  unsigned char codes[MAX_TENSORS][MAX_ELEMENTS * 4];
  float scale[MAX_TENSORS];
  float scale_inverse[MAX_TENSORS];
  fp8core_tensor described[MAX_TENSORS];
} run;

static fp8core_tensor tensor_of(const run *r, void *data, fp8core_dtype dtype, int tensor) {
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  return fp8core_tensor_matrix(data, dtype, r->p->shapes[tensor][0], r->p->shapes[tensor][1], cpu);
}

// Casts FP32 values to `codes` with a scale from their amax, and describes those.
static fp8core_tensor quantise(run *r, float *from, fp8core_dtype dtype, int tensor, void *codes, float *scale) {
  float amax = 0.0f;
  const fp8core_tensor source = tensor_of(r, from, FP8CORE_FP32, tensor);
  fp8core_tensor result = tensor_of(r, codes, dtype, tensor);
  check(fp8core_amax(r->context, &source, &amax));
  scale[0] = fp8core_scale_from_amax(dtype, amax, 0, 0, 1.0f);
  scale[1] = 1.0f / scale[0];
  result.scale = &scale[0];
  result.scale_inverse = &scale[1];
  check(fp8core_cast(r->context, NULL, &source, &result));
  return result;
}

static void read_state(run *r, fp8optim_state state, values to) {
  for (int i = 0; i < r->p->tensors; i++) {
    fp8core_tensor stored;
    const fp8core_tensor decoded = tensor_of(r, to[i], FP8CORE_FP32, i);
    check(fp8optim_adamw_state(r->optimizer, i, state, &stored));
    check(fp8core_cast(r->context, NULL, &stored, &decoded));
  }
}

static void open_run(run *r, const problem *p, fp8core_context *context, const fp8optim_adamw_options *options,
                     fp8core_dtype gradient_dtype, fp8core_dtype weight_dtype, float perturbation) {
  static values start;
  fp8optim_parameter parameters[MAX_TENSORS];
  fp8optim_group group = fp8optim_group_default();
  group.weight_decay = 0.0;
  memset(r, 0, sizeof(*r));
  r->p = p;
  r->context = context;
  r->gradient_dtype = gradient_dtype;
  for (int i = 0; i < p->tensors; i++) {
    parameters[i] = fp8optim_parameter_create(p->names[i], p->shapes[i][0], p->shapes[i][1]);
    parameters[i].with_weight = 1;
    // Vectors stay in FP32, as a model would keep biases.
    parameters[i].weight_dtype = i % 2 ? FP8CORE_FP32 : weight_dtype;
  }
  check(fp8optim_adamw_create(&r->optimizer, context, options, p->tensors, parameters, 1, &group));
  random_state = 3;
  initial_values(p, start);
  start[0][0] += perturbation;
  for (int i = 0; i < p->tensors; i++) {
    const fp8core_tensor source = tensor_of(r, start[i], FP8CORE_FP32, i);
    check(fp8optim_adamw_set_state(r->optimizer, i, FP8OPTIM_MASTER, &source));
  }
  read_state(r, FP8OPTIM_WEIGHT, r->weights);
}

static void close_run(run *r) { fp8optim_adamw_destroy(&r->optimizer); }

static double rate_of(const problem *p, int step, int steps) {
  fp8optim_schedule schedule = fp8optim_schedule_default();
  double learning_rate;
  schedule.peak = p->learning_rate;
  schedule.floor = 0.1 * schedule.peak;
  schedule.warmup_steps = steps / 100;
  schedule.total_steps = steps;
  check(fp8optim_schedule_rate(&schedule, step, &learning_rate));
  return learning_rate;
}

static void train_step(run *r, int step, int steps) {
  check(fp8optim_adamw_set_learning_rate(r->optimizer, rate_of(r->p, step, steps)));
  r->p->gradients(r->weights, step, r->gradients);
  for (int i = 0; i < r->p->tensors; i++) {
    static float scales[MAX_TENSORS][2];
    r->described[i] = r->gradient_dtype == FP8CORE_FP32
                        ? tensor_of(r, r->gradients[i], FP8CORE_FP32, i)
                        : quantise(r, r->gradients[i], r->gradient_dtype, i, r->codes[i], scales[i]);
  }
  check(fp8optim_adamw_step(r->optimizer, r->described, NULL, NULL));
  read_state(r, FP8OPTIM_WEIGHT, r->weights);
}

// An AdamW of this program's own whose exp_avg_sq is cast to E4M3 as any other tensor is, so that small values become
// zero, which the library's never do; the rest of it is FP32.
static double train_with_zeros(const problem *p, fp8core_context *context, int steps, double *zeros) {
  static run r;
  static values exp_avg;
  static values exp_avg_sq;
  static unsigned char codes[MAX_ELEMENTS];
  const fp8optim_adamw_options options = fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP32);
  open_run(&r, p, context, &options, FP8CORE_FP32, FP8CORE_FP32, 0.0f);
  memset(exp_avg, 0, sizeof(values));
  memset(exp_avg_sq, 0, sizeof(values));
  for (int step = 0; step < steps; step++) {
    const double learning_rate = rate_of(p, step, steps);
    const double correction1 = 1.0 - pow(0.9, step + 1.0);
    const double correction2 = 1.0 - pow(0.95, step + 1.0);
    double zero = 0.0;
    double count = 0.0;
    p->gradients(r.weights, step, r.gradients);
    for (int i = 0; i < p->tensors; i++) {
      for (int64_t j = 0; j < elements_of(p, i); j++) {
        const float g = r.gradients[i][j];
        exp_avg[i][j] += 0.1f * (g - exp_avg[i][j]);
        exp_avg_sq[i][j] += 0.05f * (g * g - exp_avg_sq[i][j]);
      }
      float scale[2];
      const fp8core_tensor stored = quantise(&r, exp_avg_sq[i], FP8CORE_E4M3, i, codes, scale);
      const fp8core_tensor back = tensor_of(&r, exp_avg_sq[i], FP8CORE_FP32, i);
      check(fp8core_cast(context, NULL, &stored, &back));
      for (int64_t j = 0; j < elements_of(p, i); j++) {
        const double root = sqrt((double)exp_avg_sq[i][j] / correction2);
        r.weights[i][j] -= (float)(learning_rate / correction1 * (double)exp_avg[i][j] / (root + 1e-8));
        zero += exp_avg_sq[i][j] == 0.0f && exp_avg[i][j] != 0.0f;
        count += 1.0;
      }
    }
    *zeros = fmax(*zeros, zero / count);
  }
  const double loss = p->loss(r.weights);
  close_run(&r);
  return loss;
}

typedef struct configuration {
  const char *name;
  fp8optim_preset preset;
  int stochastic;
  fp8core_dtype gradient_dtype;
  fp8core_dtype weight_dtype;
  float perturbation;
} configuration;

// Returns the loss that the weights give at the end.
static double train(const problem *p, fp8core_context *context, const configuration *c, int steps, double reference) {
  static run r;
  fp8optim_adamw_options options = fp8optim_adamw_options_of(c->preset);
  options.stochastic_rounding = c->stochastic;
  open_run(&r, p, context, &options, c->gradient_dtype, c->weight_dtype, c->perturbation);
  for (int step = 0; step < steps; step++) train_step(&r, step, steps);
  const double loss = p->loss(r.weights);
  const double compared = reference > 0.0 ? reference : loss;
  printf("%-26s %-10s %-5s %-5s %9.5f  %+8.2f %%", c->name, c->stochastic ? "stochastic" : "nearest",
         fp8core_dtype_name(c->gradient_dtype), fp8core_dtype_name(c->weight_dtype), loss,
         100.0 * (loss / compared - 1.0));
  if (p->least_loss > 0.0) printf("  %.2e", loss - p->least_loss);
  if (c->weight_dtype == FP8CORE_E4M3) {
    read_state(&r, FP8OPTIM_MASTER, r.weights);
    printf("  (%.5f, %+.2f %% with the masters)", p->loss(r.weights), 100.0 * (p->loss(r.weights) / compared - 1.0));
  }
  printf("\n");
  fflush(stdout);
  close_run(&r);
  return loss;
}

static int compare_presets(const problem *p, fp8core_context *context, int steps) {
  static const configuration configurations[] = {
    {"#0 fp32", FP8OPTIM_PRESET_FP32, 0, FP8CORE_FP32, FP8CORE_FP32, 0.0f},
    {"#0 fp32, start + 1e-6", FP8OPTIM_PRESET_FP32, 0, FP8CORE_FP32, FP8CORE_FP32, 1e-6f},
    {"#1 bf16", FP8OPTIM_PRESET_BF16, 0, FP8CORE_BF16, FP8CORE_BF16, 0.0f},
    {"#2a fp8", FP8OPTIM_PRESET_FP8, 0, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#2a fp8", FP8OPTIM_PRESET_FP8, 1, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#2a fp8", FP8OPTIM_PRESET_FP8, 0, FP8CORE_E5M2, FP8CORE_FP32, 0.0f},
    {"#2a fp8", FP8OPTIM_PRESET_FP8, 0, FP8CORE_E4M3, FP8CORE_E4M3, 0.0f},
    {"#2b fp8-bf16-master", FP8OPTIM_PRESET_FP8_BF16_MASTER, 0, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#2b fp8-bf16-master", FP8OPTIM_PRESET_FP8_BF16_MASTER, 1, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#3 fp8-master", FP8OPTIM_PRESET_FP8_MASTER, 0, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#3 fp8-master", FP8OPTIM_PRESET_FP8_MASTER, 1, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#4 fp8-exp-avg-sq", FP8OPTIM_PRESET_FP8_EXP_AVG_SQ, 0, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
    {"#4 fp8-exp-avg-sq", FP8OPTIM_PRESET_FP8_EXP_AVG_SQ, 1, FP8CORE_E4M3, FP8CORE_FP32, 0.0f},
  };
  double reference = 0.0;
  int within = 1;
  printf("\n%s, %d steps\n", p->name, steps);
  if (p->least_loss > 0.0)
    printf("condition 1e%.0f, loss of the minimum %.5f; the last column is the distance to it\n", 2.0 * p->decades,
           p->least_loss);
  printf("%-26s %-10s %-5s %-5s %9s  %10s\n", "preset", "master", "grad.", "wght.", "loss", "to fp32");
  for (size_t i = 0; i < sizeof(configurations) / sizeof(*configurations); i++) {
    const configuration *c = &configurations[i];
    const double loss = train(p, context, c, steps, reference);
    if (i == 0) reference = loss;
    // To nearest masters lose small updates: 0.5 to 1.3 % were seen.
    const double allowed = c->stochastic ? 1.01 : 1.02;
    if (c->preset == FP8OPTIM_PRESET_FP8 && c->gradient_dtype == FP8CORE_E4M3 && c->weight_dtype == FP8CORE_FP32 &&
        !(loss <= allowed * reference)) {
      printf("failed: %s is above %g times the loss of fp32\n", c->name, allowed);
      within = 0;
    }
  }
  double zeros = 0.0;
  const double loss = train_with_zeros(p, context, steps, &zeros);
  printf("%-48s %9.5f  %+8.2f %%  (at most %.2f %% of exp_avg_sq zero beside an exp_avg that is not)\n",
         "fp32, exp_avg_sq E4M3 that may become zero", loss, 100.0 * (loss / reference - 1.0), 100.0 * zeros);
  return within;
}

typedef struct quality {
  double signal;
  double noise;
  double nonzero;
  double lost;
  double headroom;
  double count;
} quality;

static void judge(quality *q, const double *right, const float *stored, int64_t elements) {
  for (int64_t i = 0; i < elements; i++) {
    const double error = (double)stored[i] - right[i];
    q->signal += right[i] * right[i];
    q->noise += error * error;
    q->nonzero += right[i] != 0.0;
    // Half of the value or more is gone, or came with it.
    q->lost += right[i] != 0.0 && fabs(error) >= 0.5 * fabs(right[i]);
  }
}

// Scales from bounds before the pass, as the library has them, against scales from the true amaxes of the new values.
static void compare_scales(const problem *p, fp8core_context *context, fp8optim_preset preset) {
  static run r;
  static values exp_avg;
  static values exp_avg_sq;
  static values gradients;
  static values stored[2];
  static float exact[MAX_ELEMENTS];
  static double right[2][MAX_ELEMENTS];
  static unsigned char codes[MAX_ELEMENTS * 4];
  quality found[2][2];
  memset(found, 0, sizeof(found));
  const fp8optim_adamw_options options = fp8optim_adamw_options_of(preset);
  const fp8core_dtype dtypes[2] = {options.exp_avg_dtype, options.exp_avg_sq_dtype};
  const fp8optim_group group = fp8optim_group_default();
  open_run(&r, p, context, &options, FP8CORE_E4M3, FP8CORE_FP32, 0.0f);
  for (int step = 0; step < 2000; step++) {
    read_state(&r, FP8OPTIM_EXP_AVG, exp_avg);
    read_state(&r, FP8OPTIM_EXP_AVG_SQ, exp_avg_sq);
    train_step(&r, step, 2000);
    if (step % 20 != 19) continue;
    read_state(&r, FP8OPTIM_EXP_AVG, stored[0]);
    read_state(&r, FP8OPTIM_EXP_AVG_SQ, stored[1]);
    for (int i = 0; i < p->tensors; i += 2) {
      const fp8core_tensor decoded = tensor_of(&r, gradients[i], FP8CORE_FP32, i);
      check(fp8core_cast(context, NULL, &r.described[i], &decoded));
      for (int64_t j = 0; j < elements_of(p, i); j++) {
        const double g = (double)gradients[i][j];
        right[0][j] = group.beta1 * (double)exp_avg[i][j] + (1.0 - group.beta1) * g;
        right[1][j] = group.beta2 * (double)exp_avg_sq[i][j] + (1.0 - group.beta2) * g * g;
      }
      for (int state = 0; state < 2; state++) {
        float scale[2];
        fp8core_tensor before;
        judge(&found[state][0], right[state], stored[state][i], elements_of(p, i));
        for (int64_t j = 0; j < elements_of(p, i); j++) exact[j] = (float)right[state][j];
        const fp8core_tensor quantised = quantise(&r, exact, dtypes[state], i, codes, scale);
        const fp8core_tensor back = tensor_of(&r, exact, FP8CORE_FP32, i);
        check(fp8core_cast(context, NULL, &quantised, &back));
        judge(&found[state][1], right[state], exact, elements_of(p, i));
        check(fp8optim_adamw_state(r.optimizer, i, (fp8optim_state)(FP8OPTIM_EXP_AVG + state), &before));
        found[state][0].headroom += (double)(scale[0] / *before.scale);
        found[state][0].count += 1.0;
      }
    }
  }
  close_run(&r);
  for (int state = 0; state < 2; state++)
    printf("%-20s %-11s %-5s %8.2f dB %8.2f dB %12.3f %11.3f %% %9.3f %%\n", fp8optim_preset_name(preset),
           fp8optim_state_name((fp8optim_state)(FP8OPTIM_EXP_AVG + state)), fp8core_dtype_name(dtypes[state]),
           10.0 * log10(found[state][0].signal / found[state][0].noise),
           10.0 * log10(found[state][1].signal / found[state][1].noise),
           found[state][0].headroom / found[state][0].count, 100.0 * found[state][0].lost / found[state][0].nonzero,
           100.0 * found[state][1].lost / found[state][1].nonzero);
}

// The distance that masters of 1.5 go in small updates, in units of their last place, and its spread over the elements.
static int small_updates(fp8core_context *context) {
  static const struct {
    fp8core_dtype dtype;
    double unit;
    int stochastic;
    double update;
    int steps;
    double expected;
  } cases[] = {
    {FP8CORE_FP16, 0x1p-10, 0, 0x1p-10, 10240, 0.0},
    {FP8CORE_FP16, 0x1p-10, 1, 0x1p-10, 10240, 10.0},
    {FP8CORE_BF16, 0x1p-7, 0, 0x1p-10, 10240, 0.0},
    {FP8CORE_BF16, 0x1p-7, 1, 0x1p-10, 10240, 10.0},
    {FP8CORE_E4M3, 0x1p-3, 0, 0x1p-10, 10240, 0.0},
    {FP8CORE_E4M3, 0x1p-3, 1, 0x1p-10, 10240, 10.0},
    // Below half a unit of FP32's last place, in which the new master is computed, stochastic rounding comes too late.
    {FP8CORE_FP16, 0x1p-10, 1, 0x1p-13, 81920, 10.0},
    {FP8CORE_FP16, 0x1p-10, 1, 0x1p-15, 81920, 0.0},
  };
  int right = 1;
  printf("\nupdates of masters of 1.5, in units of the master's last place\n");
  printf("%-6s %-10s %8s %8s %8s %8s %8s\n", "master", "rounding", "update", "updates", "sum", "went", "spread");
  for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
    static float start[MAX_ELEMENTS];
    static float ones[MAX_ELEMENTS];
    const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
    const double unit = cases[i].unit;
    fp8optim_adamw *optimizer;
    fp8optim_adamw_options options = fp8optim_adamw_options_of(FP8OPTIM_PRESET_FP8);
    fp8optim_parameter parameter = fp8optim_parameter_create("x", 1, MAX_ELEMENTS);
    fp8optim_group group = fp8optim_group_default();
    const fp8core_tensor source = fp8core_tensor_matrix(start, FP8CORE_FP32, 1, MAX_ELEMENTS, cpu);
    const fp8core_tensor gradient = fp8core_tensor_matrix(ones, FP8CORE_FP32, 1, MAX_ELEMENTS, cpu);
    options.master_dtype = cases[i].dtype;
    options.stochastic_rounding = cases[i].stochastic;
    // Gradients that never change make every update the learning rate.
    group.learning_rate = unit * cases[i].update;
    group.weight_decay = 0.0;
    for (int j = 0; j < MAX_ELEMENTS; j++) {
      start[j] = 1.5f;
      ones[j] = 1.0f;
    }
    check(fp8optim_adamw_create(&optimizer, context, &options, 1, &parameter, 1, &group));
    check(fp8optim_adamw_set_state(optimizer, 0, FP8OPTIM_MASTER, &source));
    for (int step = 0; step < cases[i].steps; step++) check(fp8optim_adamw_step(optimizer, &gradient, NULL, NULL));
    fp8core_tensor stored;
    check(fp8optim_adamw_state(optimizer, 0, FP8OPTIM_MASTER, &stored));
    check(fp8core_cast(context, NULL, &stored, &source));
    double sum = 0.0;
    double squares = 0.0;
    for (int j = 0; j < MAX_ELEMENTS; j++) {
      const double went = (1.5 - (double)start[j]) / unit;
      sum += went;
      squares += went * went;
    }
    const double mean = sum / MAX_ELEMENTS;
    printf("%-6s %-10s %8g %8d %8g %8.3f %8.3f\n", fp8core_dtype_name(options.master_dtype),
           options.stochastic_rounding ? "stochastic" : "nearest", cases[i].update, cases[i].steps,
           cases[i].update * cases[i].steps, mean, sqrt(fabs(squares / MAX_ELEMENTS - mean * mean)));
    if (fabs(mean - cases[i].expected) > (cases[i].expected > 0.0 ? 0.3 : 0.0)) {
      printf("failed: expected %g\n", cases[i].expected);
      right = 0;
    }
    fp8optim_adamw_destroy(&optimizer);
  }
  return right;
}

// Elements whose gradient is zero from step 100 on, beside others that keep the tensor's amaxes up: how far they go, in
// learning rates, where AdamW stops within some steps. As rows of an embedding whose token is not met.
static void ceased_gradients(fp8core_context *context) {
  static const struct {
    fp8optim_preset preset;
    fp8core_dtype exp_avg;
    double beta1;
    double beta2;
  } cases[] = {
    {FP8OPTIM_PRESET_FP32, FP8CORE_FP32, 0.9, 0.95}, {FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0.9, 0.95},
    {FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0.9, 0.999}, {FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0.95, 0.95},
    {FP8OPTIM_PRESET_FP8, FP8CORE_BF16, 0.9, 0.95},  {FP8OPTIM_PRESET_FP8, FP8CORE_FP16, 0.9, 0.95},
    {FP8OPTIM_PRESET_FP8, FP8CORE_FP16, 0.95, 0.95},
  };
  enum { ELEMENTS = 64, ROUND = 1000, ROUNDS = 3 };
  printf("\nelements without gradient from step 100 on: farthest way in each %d steps, in learning rates\n", ROUND);
  for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
    float weights[ELEMENTS] = {0.0f};
    float gradients[ELEMENTS];
    const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
    const fp8core_tensor gradient = fp8core_tensor_matrix(gradients, FP8CORE_FP32, 1, ELEMENTS, cpu);
    fp8optim_adamw_options options = fp8optim_adamw_options_of(cases[i].preset);
    fp8optim_parameter parameter = fp8optim_parameter_create("x", 1, ELEMENTS);
    fp8optim_group group = fp8optim_group_default();
    fp8optim_adamw *optimizer;
    options.exp_avg_dtype = cases[i].exp_avg;
    parameter.with_weight = 1;
    parameter.weight_dtype = FP8CORE_FP32;
    parameter.weight = weights;
    group.beta1 = cases[i].beta1;
    group.beta2 = cases[i].beta2;
    group.weight_decay = 0.0;
    random_state = 4;
    check(fp8optim_adamw_create(&optimizer, context, &options, 1, &parameter, 1, &group));
    printf("%-5s exp_avg %-5s beta1 %-5g beta2 %-5g", fp8optim_preset_name(cases[i].preset),
           fp8core_dtype_name(cases[i].exp_avg), cases[i].beta1, cases[i].beta2);
    for (int round = 0; round < ROUNDS; round++) {
      float before[ELEMENTS];
      double farthest = 0.0;
      for (int step = 0; step < ROUND; step++) {
        if (step == 0 || (round == 0 && step == 100)) memcpy(before, weights, sizeof(before));
        for (int j = 0; j < ELEMENTS; j++)
          gradients[j] = j >= ELEMENTS / 2 && round * ROUND + step >= 100 ? 0.0f : (float)(1.0 + 0.1 * normal());
        check(fp8optim_adamw_step(optimizer, &gradient, NULL, NULL));
      }
      for (int j = ELEMENTS / 2; j < ELEMENTS; j++)
        farthest = fmax(farthest, fabs((double)weights[j] - (double)before[j]));
      printf(" %10.3g", farthest / group.learning_rate);
    }
    printf("\n");
    fp8optim_adamw_destroy(&optimizer);
  }
}

int main(int argc, char **argv) {
  const int steps = argc > 1 ? atoi(argv[1]) : 10000;
  static problem logistic;
  static problem network;
  fp8core_context *context;
  fp8core_context_options options = fp8core_context_options_default();
  options.threads = 1;
  check(fp8core_context_create(&context, &options));
  make_network(&network);
  int right = 1;
  for (int decades = 2; decades <= 3; decades++) {
    make_logistic(&logistic, (double)decades);
    right = compare_presets(&logistic, context, steps) && right;
  }
  right = compare_presets(&network, context, steps) && right;
  printf("\nSNR of the moments over 2000 steps of the network, scale from the bound and from the true amax\n");
  printf("%-20s %-11s %-5s %11s %11s %12s %13s %11s\n", "preset", "state", "", "bound", "true", "bound / true",
         "lost, bound", "lost, true");
  compare_scales(&network, context, FP8OPTIM_PRESET_FP8);
  compare_scales(&network, context, FP8OPTIM_PRESET_FP8_EXP_AVG_SQ);
  right = small_updates(context) && right;
  ceased_gradients(context);
  fp8core_context_destroy(&context);
  return right ? 0 : 1;
}
