// Trains a small network to predict the next character of a text: the network, its gradients and its memory are this
// program's own, and libfp8optim is its only optimizer. Two runs go side by side from the same start, FP32 throughout
// and preset fp8 (FP8 gradients with a scale, FP8 weights out), to show loss against loss and bytes against bytes.
// Builds against the installed library alone: cc train.c $(pkg-config --cflags --libs fp8optim) -lm
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fp8core/fp8core.h>
#include <fp8optim/fp8optim.h>

static const char text[] =
  "a number of eight bits has a sign, a few bits of exponent and fewer of mantissa. it cannot hold a weight and it "
  "cannot hold the change of a weight, but it can hold the direction in which the weight should go. so the weight is "
  "kept in sixteen bits with a scale, the direction in eight bits with a scale, and the square of the direction in "
  "sixteen, as its range is twice as wide. a scale is one number for a whole tensor. it is chosen so that the largest "
  "value just fits, and the small ones are still there. when the largest value grows, the scale must fall before the "
  "value is stored, or the value is cut. when it shrinks, the scale must rise, or the small values are lost. the sum "
  "of what is known is a bound on what will come, so the scale can be chosen before the values are seen, and memory is "
  "read once and written once. that is the whole trick, and the rest is care: no step may be taken on a number that is "
  "no number, no square may become zero, and the same bits must come out on every machine, however many threads it "
  "has.";

// Characters are looked up in an embedding, CONTEXT of them feed a hidden layer, and an output layer gives a score for
// each character that may come next.
enum { CHARACTERS = 30, CONTEXT = 6, WIDTH = 12, INPUTS = CONTEXT * WIDTH, HIDDEN = 96, BATCH = 32, STEPS = 400 };
enum { EMBEDDING, HIDDEN_WEIGHT, HIDDEN_BIAS, OUTPUT_WEIGHT, OUTPUT_BIAS, TENSORS };
static const char *const names[TENSORS] = {"embedding", "hidden.weight", "hidden.bias", "output.weight", "output.bias"};
static const int64_t shapes[TENSORS][2] = {
  {CHARACTERS, WIDTH}, {HIDDEN, INPUTS}, {1, HIDDEN}, {CHARACTERS, HIDDEN}, {1, CHARACTERS}};
enum { LARGEST = HIDDEN * INPUTS };

typedef struct run {
  fp8optim_adamw *optimizer;
  int in_fp8;
  // What the network computes with, and the gradients, in FP32; for the FP8 run decoded from, and cast to, FP8.
  float weights[TENSORS][LARGEST];
  float gradients[TENSORS][LARGEST];
  unsigned char gradient_codes[TENSORS][LARGEST];
  float gradient_scale[TENSORS];
  float gradient_scale_inverse[TENSORS];
} run;

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

static uint32_t next_random(uint32_t *state) {
  *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
  return *state >> 8;
}

static int character(int position) {
  static const char alphabet[CHARACTERS + 1] = "abcdefghijklmnopqrstuvwxyz ,.:";
  return (int)(strchr(alphabet, text[position]) - alphabet);
}

// Loss (nats) of predicting the character at `position`; adds its gradients, times `share`, unless share is 0.
static double predict(run *r, int position, float share) {
  float input[INPUTS];
  float hidden[HIDDEN];
  float score[CHARACTERS];
  for (int i = 0; i < CONTEXT; i++)
    memcpy(&input[i * WIDTH], &r->weights[EMBEDDING][character(position - CONTEXT + i) * WIDTH], WIDTH * sizeof(float));
  for (int j = 0; j < HIDDEN; j++) {
    float sum = r->weights[HIDDEN_BIAS][j];
    for (int i = 0; i < INPUTS; i++) sum += r->weights[HIDDEN_WEIGHT][j * INPUTS + i] * input[i];
    hidden[j] = tanhf(sum);
  }
  float highest = -INFINITY;
  for (int k = 0; k < CHARACTERS; k++) {
    score[k] = r->weights[OUTPUT_BIAS][k];
    for (int j = 0; j < HIDDEN; j++) score[k] += r->weights[OUTPUT_WEIGHT][k * HIDDEN + j] * hidden[j];
    highest = fmaxf(highest, score[k]);
  }
  const int target = character(position);
  float total = 0.0f;
  for (int k = 0; k < CHARACTERS; k++) total += expf(score[k] - highest);
  const double loss = (double)(logf(total) - (score[target] - highest));
  if (share == 0.0f) return loss;

  float hidden_gradient[HIDDEN] = {0.0f};
  float input_gradient[INPUTS] = {0.0f};
  for (int k = 0; k < CHARACTERS; k++) {
    const float d = share * (expf(score[k] - highest) / total - (k == target ? 1.0f : 0.0f));
    r->gradients[OUTPUT_BIAS][k] += d;
    for (int j = 0; j < HIDDEN; j++) {
      r->gradients[OUTPUT_WEIGHT][k * HIDDEN + j] += d * hidden[j];
      hidden_gradient[j] += d * r->weights[OUTPUT_WEIGHT][k * HIDDEN + j];
    }
  }
  for (int j = 0; j < HIDDEN; j++) {
    const float d = hidden_gradient[j] * (1.0f - hidden[j] * hidden[j]);
    r->gradients[HIDDEN_BIAS][j] += d;
    for (int i = 0; i < INPUTS; i++) {
      r->gradients[HIDDEN_WEIGHT][j * INPUTS + i] += d * input[i];
      input_gradient[i] += d * r->weights[HIDDEN_WEIGHT][j * INPUTS + i];
    }
  }
  for (int i = 0; i < INPUTS; i++)
    r->gradients[EMBEDDING][character(position - CONTEXT + i / WIDTH) * WIDTH + i % WIDTH] += input_gradient[i];
  return loss;
}

static double loss_of_text(run *r) {
  const int length = (int)strlen(text);
  double sum = 0.0;
  for (int position = CONTEXT; position < length; position++) sum += predict(r, position, 0.0f);
  return sum / (length - CONTEXT);
}

static fp8core_tensor matrix(void *data, fp8core_dtype dtype, int tensor) {
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  return fp8core_tensor_matrix(data, dtype, shapes[tensor][0], shapes[tensor][1], cpu);
}

static void create(run *r, fp8core_context *context, int in_fp8) {
  // No decay on the biases.
  fp8optim_group groups[2] = {fp8optim_group_default(), fp8optim_group_default()};
  groups[1].weight_decay = 0.0;
  fp8optim_parameter parameters[TENSORS];
  for (int i = 0; i < TENSORS; i++) {
    const int is_bias = shapes[i][0] == 1;
    parameters[i] = fp8optim_parameter_create(names[i], shapes[i][0], shapes[i][1]);
    parameters[i].group = is_bias;
    parameters[i].with_weight = 1;
    // FP8 matrices in the optimizer's memory; everything else straight into the network's own.
    parameters[i].weight_dtype = in_fp8 && !is_bias ? FP8CORE_E4M3 : FP8CORE_FP32;
    if (parameters[i].weight_dtype == FP8CORE_FP32) parameters[i].weight = r->weights[i];
  }
  const fp8optim_adamw_options options = fp8optim_adamw_options_of(in_fp8 ? FP8OPTIM_PRESET_FP8 : FP8OPTIM_PRESET_FP32);
  r->in_fp8 = in_fp8;
  check(fp8optim_adamw_create(&r->optimizer, context, &options, TENSORS, parameters, 2, groups));
  uint32_t seed = 1;
  for (int i = 0; i < TENSORS; i++) {
    float initial[LARGEST];
    const float range = i == EMBEDDING ? 1.0f : shapes[i][0] == 1 ? 0.0f : sqrtf(3.0f / (float)shapes[i][1]);
    for (int j = 0; j < shapes[i][0] * shapes[i][1]; j++)
      initial[j] = range * ((float)next_random(&seed) * 0x1p-23f - 1.0f);
    const fp8core_tensor source = matrix(initial, FP8CORE_FP32, i);
    check(fp8optim_adamw_set_state(r->optimizer, i, FP8OPTIM_MASTER, &source));
  }
}

// The FP8 weights that the last step wrote, as the FP32 numbers of this program's loops. A program with FP8 products
// (fp8core_gemm()) would take them as they are.
static void read_weights(run *r, fp8core_context *context) {
  for (int i = 0; i < TENSORS; i++) {
    fp8core_tensor weight;
    check(fp8optim_adamw_state(r->optimizer, i, FP8OPTIM_WEIGHT, &weight));
    if (weight.data == r->weights[i]) continue;
    const fp8core_tensor decoded = matrix(r->weights[i], FP8CORE_FP32, i);
    check(fp8core_cast(context, NULL, &weight, &decoded));
  }
}

static double train_step(run *r, fp8core_context *context, int step, double learning_rate) {
  const int length = (int)strlen(text);
  uint32_t seed = (uint32_t)step * 7919u + 1u;
  double loss = 0.0;
  memset(r->gradients, 0, sizeof(r->gradients));
  for (int i = 0; i < BATCH; i++)
    loss += predict(r, CONTEXT + (int)(next_random(&seed) % (uint32_t)(length - CONTEXT)), 1.0f / BATCH) / BATCH;

  fp8core_tensor gradients[TENSORS];
  for (int i = 0; i < TENSORS; i++) {
    gradients[i] = matrix(r->gradients[i], FP8CORE_FP32, i);
    if (!r->in_fp8) continue;
    float amax = 0.0f;
    fp8core_tensor codes = matrix(r->gradient_codes[i], FP8CORE_E4M3, i);
    check(fp8core_amax(context, &gradients[i], &amax));
    r->gradient_scale[i] = fp8core_scale_from_amax(FP8CORE_E4M3, amax, 0, 0, 1.0f);
    r->gradient_scale_inverse[i] = 1.0f / r->gradient_scale[i];
    codes.scale = &r->gradient_scale[i];
    codes.scale_inverse = &r->gradient_scale_inverse[i];
    check(fp8core_cast(context, NULL, &gradients[i], &codes));
    gradients[i] = codes;
  }
  fp8optim_step_options options = fp8optim_step_options_default();
  options.max_norm = 1.0f;
  check(fp8optim_adamw_set_learning_rate(r->optimizer, learning_rate));
  check(fp8optim_adamw_step(r->optimizer, gradients, &options, NULL));
  read_weights(r, context);
  return loss;
}

static void print_bytes(const char *name, const run *r, double gradient_bytes) {
  fp8optim_memory memory;
  check(fp8optim_adamw_memory(r->optimizer, &memory));
  const double n = (double)memory.parameters;
  const double states = (double)(memory.master_bytes + memory.exp_avg_bytes + memory.exp_avg_sq_bytes) / n;
  printf("%-4s master %.0f, moments %.0f, gradient %.0f: %.0f bytes a parameter; weights %.2f; scales and tables %lld "
         "bytes in all\n",
         name, (double)memory.master_bytes / n, states - (double)memory.master_bytes / n, gradient_bytes,
         states + gradient_bytes, (double)memory.weight_bytes / n, (long long)memory.overhead_bytes);
}

int main(void) {
  static run fp32;
  static run fp8;
  fp8core_context *context;
  check(fp8core_context_create(&context, NULL));
  create(&fp32, context, 0);
  create(&fp8, context, 1);
  read_weights(&fp8, context);

  fp8optim_schedule schedule = fp8optim_schedule_default();
  schedule.peak = 1e-2;
  schedule.floor = 1e-3;
  schedule.warmup_steps = 20;
  schedule.total_steps = STEPS;
  const double start = loss_of_text(&fp32);
  printf("step     loss FP32   loss FP8\n");
  for (int step = 0; step < STEPS; step++) {
    double learning_rate;
    check(fp8optim_schedule_rate(&schedule, step, &learning_rate));
    const double loss32 = train_step(&fp32, context, step, learning_rate);
    const double loss8 = train_step(&fp8, context, step, learning_rate);
    if (step % 50 == 0) printf("%4d     %9.4f  %9.4f\n", step, loss32, loss8);
  }
  const double end32 = loss_of_text(&fp32);
  const double end8 = loss_of_text(&fp8);
  printf("the text %9.4f  %9.4f   (%.4f before training)\n", end32, end8, start);
  print_bytes("fp32", &fp32, sizeof(float));
  print_bytes("fp8", &fp8, 1.0);
  fp8optim_adamw_destroy(&fp32.optimizer);
  fp8optim_adamw_destroy(&fp8.optimizer);
  fp8core_context_destroy(&context);
  return end32 < 0.5 * start && fabs(end8 - end32) < 0.05 * end32 ? 0 : 1;
}
