// One step of AdamW beside its peers in one run: this library's presets, and the loop that a C programmer writes in
// FP32 (28 bytes a parameter; this file is compiled for the machine, without errno of sqrtf, with 512-bit vectors, as
// that loop's speed depends on it), on two threads. Beside them copies of large arrays, which bound what bytes can
// move: memcpy from one array to another, and multiplication in place, the mix of reads and writes that an optimizer
// has. Rounds are interleaved, as the speed of a shared machine drifts; medians over the rounds.
//
// bench_adamw [--parameters MILLIONS] [--rounds N] [--threads N]
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <omp.h>

#include "fp8core/fp8core.h"
#include "fp8optim/fp8optim.h"

#define COLUMNS 1024
#define MAX_ROUNDS 200

static void require(int condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "%s failed: %s\n", what, fp8core_last_error());
  exit(1);
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare_doubles(const void *one, const void *other) {
  const double a = *(const double *)one;
  const double b = *(const double *)other;
  return (a > b) - (a < b);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof(*values), compare_doubles);
  return values[count / 2];
}

static void *allocate(size_t bytes) {
  const size_t page = (size_t)2 << 20;
  void *memory = aligned_alloc(page, (bytes + page - 1) / page * page);
  require(memory != NULL, "aligned_alloc");
  (void)madvise(memory, bytes, MADV_HUGEPAGE);
  memset(memory, 0, bytes);
  return memory;
}

// The peer. Hyper-parameters are arguments, so that nothing is known at compile time.
static void plain_adamw(int64_t count, int threads, float *restrict w, float *restrict m, float *restrict v,
                        const float *restrict g, float beta1, float beta2, float step_size,
                        float inverse_root_correction2, float eps, float decay) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    const float gradient = g[i];
    const float first = beta1 * m[i] + (1.0f - beta1) * gradient;
    const float second = beta2 * v[i] + (1.0f - beta2) * gradient * gradient;
    m[i] = first;
    v[i] = second;
    w[i] = w[i] * decay - step_size * first / (sqrtf(second) * inverse_root_correction2 + eps);
  }
}

static void copy(int64_t bytes, int threads, unsigned char *to, const unsigned char *from) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t share = bytes / omp_get_num_threads();
    memcpy(to + share * omp_get_thread_num(), from + share * omp_get_thread_num(), (size_t)share);
  }
}

static void multiply_in_place(int64_t count, int threads, float *values, float factor) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) values[i] *= factor;
}

typedef struct contender {
  const char *name;
  fp8optim_preset preset;
  int stochastic;
  fp8core_dtype gradient_dtype;
  fp8core_dtype weight_dtype;
  // That a step must move: states twice, gradient once, weight once. The pass that measures the gradient is ours to
  // hide.
  double bytes;
  fp8optim_adamw *adamw;
  fp8core_tensor gradient;
} contender;

int main(int argc, char **argv) {
  int64_t count = 64;
  int rounds = 15;
  int threads = 2;
  for (int i = 1; i < argc; i++) {
    int64_t *millions = strcmp(argv[i], "--parameters") == 0 ? &count : NULL;
    int *number = strcmp(argv[i], "--rounds") == 0 ? &rounds : strcmp(argv[i], "--threads") == 0 ? &threads : NULL;
    if ((!millions && !number) || i + 1 == argc || atoi(argv[i + 1]) < 1) {
      fprintf(stderr, "usage: bench_adamw [--parameters MILLIONS] [--rounds N] [--threads N]\n");
      return 2;
    }
    if (millions)
      *millions = atoi(argv[++i]);
    else
      *number = atoi(argv[++i]);
  }
  if (rounds > MAX_ROUNDS) rounds = MAX_ROUNDS;
  count <<= 20;
  contender contenders[] = {
    {"fp8, E4M3 gradient and weight", FP8OPTIM_PRESET_FP8, 0, FP8CORE_E4M3, FP8CORE_E4M3, 12, NULL, {0}},
    {"fp8, stochastic rounding", FP8OPTIM_PRESET_FP8, 1, FP8CORE_E4M3, FP8CORE_E4M3, 12, NULL, {0}},
    {"fp8, BF16 gradient and weight", FP8OPTIM_PRESET_FP8, 0, FP8CORE_BF16, FP8CORE_BF16, 14, NULL, {0}},
    {"fp32, FP32 gradient, BF16 weight", FP8OPTIM_PRESET_FP32, 0, FP8CORE_FP32, FP8CORE_BF16, 30, NULL, {0}},
  };
  enum { OURS = sizeof(contenders) / sizeof(*contenders), PLAIN = OURS, COPY, IN_PLACE, ALL };
  static double times[ALL][MAX_ROUNDS];
  const int64_t shape[2] = {count / COLUMNS, COLUMNS};
  const float scale_inverse = 0x1p-9f;
  const fp8optim_group group = fp8optim_group_default();
  fp8core_context_options context_options = fp8core_context_options_default();
  fp8core_context *context;
  context_options.threads = threads;
  require(fp8core_context_create(&context, &context_options) == FP8CORE_OK, "fp8core_context_create");

  float *gradients = allocate((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; i++) gradients[i] = (float)((uint32_t)(i * 2654435761U) >> 8) * 0x1p-23f - 1.0f;
  const fp8core_tensor wide = fp8core_tensor_create(gradients, FP8CORE_FP32, 2, shape);
  for (int i = 0; i < OURS; i++) {
    contender *c = &contenders[i];
    fp8optim_adamw_options options = fp8optim_adamw_options_of(c->preset);
    fp8optim_parameter parameter = fp8optim_parameter_create("w", shape[0], shape[1]);
    const float scale = 1.0f / scale_inverse;
    options.stochastic_rounding = c->stochastic;
    parameter.with_weight = 1;
    parameter.weight_dtype = c->weight_dtype;
    require(fp8optim_adamw_create(&c->adamw, context, &options, 1, &parameter, 1, &group) == FP8CORE_OK,
            "fp8optim_adamw_create");
    require(fp8optim_adamw_set_state(c->adamw, 0, FP8OPTIM_MASTER, &wide) == FP8CORE_OK, "fp8optim_adamw_set_state");
    c->gradient = fp8core_tensor_create(allocate((size_t)count * fp8core_dtype_size(c->gradient_dtype)),
                                        c->gradient_dtype, 2, shape);
    if (c->gradient_dtype == FP8CORE_E4M3) c->gradient.scale = &scale;
    require(fp8core_cast(context, NULL, &wide, &c->gradient) == FP8CORE_OK, "fp8core_cast");
    c->gradient.scale = NULL;
    if (c->gradient_dtype == FP8CORE_E4M3) c->gradient.scale_inverse = &scale_inverse;
  }
  float *w = allocate((size_t)count * sizeof(float));
  float *m = allocate((size_t)count * sizeof(float));
  float *v = allocate((size_t)count * sizeof(float));

  for (int round = -1; round < rounds; round++) {
    double now[ALL];
    for (int i = 0; i < OURS; i++) {
      const double start = seconds();
      require(fp8optim_adamw_step(contenders[i].adamw, &contenders[i].gradient, NULL, NULL) == FP8CORE_OK,
              "fp8optim_adamw_step");
      now[i] = seconds() - start;
    }
    double start = seconds();
    plain_adamw(count, threads, w, m, v, gradients, 0.9f, 0.95f, 1e-3f, 1.0f, 1e-8f, 0.9999f);
    now[PLAIN] = seconds() - start;
    start = seconds();
    copy(count * (int64_t)sizeof(float), threads, (unsigned char *)m, (unsigned char *)w);
    now[COPY] = seconds() - start;
    start = seconds();
    multiply_in_place(count, threads, m, 0.999f);
    now[IN_PLACE] = seconds() - start;
    // The first round warms up.
    if (round >= 0)
      for (int i = 0; i < ALL; i++) times[i][round] = now[i];
  }
  const double parameters = (double)count * 1e-9;
  const double plain = parameters / median(times[PLAIN], rounds);
  const double copied = 8.0 * parameters / median(times[COPY], rounds);
  const double in_place = 8.0 * parameters / median(times[IN_PLACE], rounds);
  printf("%lld Mi parameters, %d threads, %d rounds; copy %.1f GB/s, in place %.1f GB/s\n", (long long)(count >> 20),
         threads, rounds, copied, in_place);
  printf("%-34s %8s %8s %10s %8s %9s\n", "step", "G par./s", "GB/s", "x FP32 loop", "of copy", "of in-pl.");
  for (int i = 0; i < OURS; i++) {
    const double speed = parameters / median(times[i], rounds);
    const double bandwidth = speed * contenders[i].bytes;
    printf("%-34s %8.2f %8.1f %11.2f %7.0f%% %8.0f%%\n", contenders[i].name, speed, bandwidth, speed / plain,
           100.0 * bandwidth / copied, 100.0 * bandwidth / in_place);
  }
  printf("%-34s %8.2f %8.1f %11.2f %7.0f%% %8.0f%%\n", "FP32 loop in C, 28 bytes", plain, 28.0 * plain, 1.0,
         2800.0 * plain / copied, 2800.0 * plain / in_place);
  for (int i = 0; i < OURS; i++) fp8optim_adamw_destroy(&contenders[i].adamw);
  fp8core_context_destroy(&context);
  return 0;
}
