// Tokens a second of training steps: forward, backward, and AdamW's step where libfp8optim is built; bf16 and fp8-o2 in
// turns, the medians of the rounds. Also the products' rate (Megatron's count of operations) as a share of what the
// CPU's BF16 dot products reach in a loop of nothing else, which is timed beside each round.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fp8core/fp8core.h"
#include "fp8gpt/model.h"
#include "machine.h"
#if defined(HAVE_OPTIM)
#  include "fp8optim/fp8optim.h"
#endif

#define MOST_ROUNDS 99

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "bench_model: %s\n", fp8core_last_error());
  exit(1);
}

static void *taken(size_t bytes) {
  void *memory = malloc(bytes);
  if (!memory) {
    fprintf(stderr, "bench_model: cannot allocate %zu bytes\n", bytes);
    exit(1);
  }
  return memory;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare(const void *one, const void *other) {
  const double a = *(const double *)one;
  const double b = *(const double *)other;
  return (a > b) - (a < b);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof(*values), compare);
  return values[count / 2];
}

typedef struct trainer {
  fp8gpt_precision precision;
  fp8gpt_model *model;
#if defined(HAVE_OPTIM)
  fp8optim_adamw *optimizer;
  fp8core_tensor *gradients;
#endif
  double passes[MOST_ROUNDS];
  double steps[MOST_ROUNDS];
  float loss;
} trainer;

static void create(trainer *created, fp8core_context *context, const fp8gpt_config *config, int batch,
                   fp8gpt_precision precision) {
  fp8gpt_model_options options = fp8gpt_model_options_default();
  memset(created, 0, sizeof(*created));
  created->precision = precision;
  options.precision = precision;
  options.batch = batch;
  check(fp8gpt_model_create(&created->model, context, config, &options));
#if defined(HAVE_OPTIM)
  const int64_t count = fp8gpt_model_parameters(created->model);
  fp8optim_parameter *parameters = taken((size_t)count * sizeof(*parameters));
  created->gradients = taken((size_t)count * sizeof(*created->gradients));
  const fp8optim_adamw_options chosen =
    fp8optim_adamw_options_of(precision == FP8GPT_FP8_O2 ? FP8OPTIM_PRESET_FP8 : FP8OPTIM_PRESET_FP32);
  fp8optim_group groups[2] = {fp8optim_group_default(), fp8optim_group_default()};
  groups[1].weight_decay = 0.0;
  for (int64_t i = 0; i < count; i++) {
    fp8gpt_parameter parameter;
    check(fp8gpt_model_parameter(created->model, i, &parameter));
    parameters[i] =
      fp8optim_parameter_create(parameter.name, parameter.shape[0], parameter.dimensions == 2 ? parameter.shape[1] : 1);
    parameters[i].dimensions = parameter.dimensions;
    parameters[i].group = !parameter.decay;
    parameters[i].with_weight = 1;
    parameters[i].weight_dtype = parameter.weight.dtype;
    parameters[i].weight = parameter.weight.data;
    created->gradients[i] = parameter.gradient;
  }
  check(fp8optim_adamw_create(&created->optimizer, context, &chosen, count, parameters, 2, groups));
  free(parameters);
  for (int64_t i = 0; i < count; i++) {
    fp8core_tensor weight;
    check(fp8optim_adamw_state(created->optimizer, i, FP8OPTIM_WEIGHT, &weight));
    check(fp8gpt_model_bind_weight(created->model, i, &weight));
    float *values = taken((size_t)fp8core_tensor_elements(&weight) * sizeof(float));
    check(fp8gpt_model_initial_weight(created->model, i, values));
    const fp8core_tensor source = fp8core_tensor_create(values, FP8CORE_FP32, weight.dimensions, weight.shape);
    check(fp8optim_adamw_set_state(created->optimizer, i, FP8OPTIM_MASTER, &source));
    free(values);
  }
#endif
}

static void run_round(trainer *trained, const fp8gpt_batch *batch, int round) {
  const double start = seconds();
  check(fp8gpt_model_train(trained->model, batch, 1, 1.0f, round + 1, 0, &trained->loss));
  const double middle = seconds();
#if defined(HAVE_OPTIM)
  fp8optim_step_options options = fp8optim_step_options_default();
  fp8optim_step_report report;
  options.max_norm = 1.0;
  check(fp8optim_adamw_step(trained->optimizer, trained->gradients, &options, &report));
#endif
  check(fp8gpt_model_end_step(trained->model));
  // The first pass grows what it needs, and scales just in time.
  if (round < 0) return;
  trained->passes[round] = middle - start;
  trained->steps[round] = seconds() - start;
}

static int usage(FILE *stream, int result) {
  fprintf(stream, "usage: bench_model [PRESET [BATCH [LENGTH [THREADS [ROUNDS [LAYERS]]]]]]\n"
                  "Tokens a second of training steps in bf16 and fp8-o2; gpt2-124m 4 64 1 7 by default.\n");
  return result;
}

int main(int argc, char **argv) {
  int numbers[] = {4, 64, 1, 7, 0};
  if (argc == 2 && strcmp(argv[1], "--help") == 0) return usage(stdout, 0);
  if (argc > 7) return usage(stderr, 2);
  for (int i = 2; i < argc; i++) {
    char *end;
    const long number = strtol(argv[i], &end, 10);
    if (*end || number < 1 || number > (i == 5 ? MOST_ROUNDS : 1 << 20)) return usage(stderr, 2);
    numbers[i - 2] = (int)number;
  }
  const int batch = numbers[0];
  const int length = numbers[1];
  const int threads = numbers[2];
  const int rounds = numbers[3];
  fp8gpt_config config;
  fp8core_context *context;
  fp8core_context_options options = fp8core_context_options_default();
  check(fp8gpt_config_preset(argc > 1 ? argv[1] : "gpt2-124m", &config));
  config.sequence = length;
  if (numbers[4]) config.layers = numbers[4];
  options.threads = threads;
  check(fp8core_context_create(&context, &options));
  const int tokens = batch * length;
  int32_t *ids = taken(2 * (size_t)tokens * sizeof(*ids));
  uint64_t state = 1;
  for (int i = 0; i < 2 * tokens; i++) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    ids[i] = (int32_t)((state >> 33) % (uint64_t)config.vocabulary);
  }
  const fp8gpt_batch given = {batch, length, ids, ids + tokens};
  static trainer trainers[2];
  static double peaks[MOST_ROUNDS];
  create(&trainers[0], context, &config, batch, FP8GPT_BF16);
  create(&trainers[1], context, &config, batch, FP8GPT_FP8_O2);
  for (int round = -1; round < rounds; round++) {
    if (round >= 0) peaks[round] = fp8lm_peak_rate(FP8LM_PEAK_BF16_DOT, threads, 0.05);
    for (int i = 0; i < 2; i++) run_round(&trainers[i], &given, round);
  }
  const double most = median(peaks, rounds);
  const double operations = fp8gpt_config_flops_per_token(&config, length) * tokens;
  printf("%s, %d layers, %.1f M parameters, B=%d T=%d, %d threads, %s; BF16 dot products alone: %.1f GFLOP/s\n",
         argc > 1 ? argv[1] : "gpt2-124m", config.layers, (double)fp8gpt_config_parameters(&config) * 1e-6, batch,
         length, threads, fp8core_isa_name(fp8core_context_isa(context)), most * 1e-9);
  for (int i = 0; i < 2; i++) {
    trainer *trained = &trainers[i];
    const double pass = median(trained->passes, rounds);
    const double step = median(trained->steps, rounds);
    printf("%-6s forward and backward %8.1f ms  %7.1f tokens/s  %6.1f GFLOP/s",
           fp8gpt_precision_name(trained->precision), pass * 1e3, tokens / pass, operations / pass * 1e-9);
    if (most > 0.0) printf(" (%.0f %% of dot products)", 100.0 * operations / pass / most);
#if defined(HAVE_OPTIM)
    printf("; with AdamW %8.1f ms  %7.1f tokens/s", step * 1e3, tokens / step);
#else
    (void)step;
#endif
    printf("; loss %.4f\n", (double)trained->loss);
  }
  printf("fp8-o2 / bf16: %.3f of the tokens/s",
         median(trainers[0].passes, rounds) / median(trainers[1].passes, rounds));
#if defined(HAVE_OPTIM)
  printf(", with AdamW %.3f", median(trainers[0].steps, rounds) / median(trainers[1].steps, rounds));
#endif
  printf("\n");
  for (int i = 0; i < 2; i++) {
#if defined(HAVE_OPTIM)
    fp8optim_adamw_destroy(&trainers[i].optimizer);
    free(trainers[i].gradients);
#endif
    fp8gpt_model_destroy(&trainers[i].model);
  }
  free(ids);
  fp8core_context_destroy(&context);
  return 0;
}
