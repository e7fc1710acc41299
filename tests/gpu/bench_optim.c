// Steps of AdamW on a GPU, beside a copy of as many bytes: the bytes that a step must move, over its time. Medians of
// events around each step. Prints one table.
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8core/cuda.h"
#include "fp8optim/fp8optim.h"

#define REPEATS 15
#define MOST_TENSORS 4096

static fp8core_context *context;
static cudaStream_t stream;
static double copy_rate;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void *need(size_t bytes) {
  void *pointer;
  if (fp8core_alloc(context, bytes, &pointer) != FP8CORE_OK) fail("memory", fp8core_last_error());
  return pointer;
}

typedef struct work {
  fp8optim_adamw *adamw;
  fp8core_tensor *gradients;
  fp8optim_step_options options;
  void *from;
  void *to;
  size_t bytes;
} work;

static void run_copy(work *w) {
  if (cudaMemcpyAsync(w->to, w->from, w->bytes, cudaMemcpyDeviceToDevice, stream) != cudaSuccess)
    fail("cudaMemcpyAsync", cudaGetErrorString(cudaGetLastError()));
}

static void run_step(work *w) {
  if (fp8optim_adamw_step(w->adamw, w->gradients, &w->options, NULL) != FP8CORE_OK) fail("step", fp8core_last_error());
}

static int compare(const void *one, const void *other) {
  const float a = *(const float *)one, b = *(const float *)other;
  return (a > b) - (a < b);
}

// Milliseconds.
static double median_of(void (*run)(work *), work *w) {
  cudaEvent_t start, stop;
  float times[REPEATS];
  if (cudaEventCreate(&start) != cudaSuccess || cudaEventCreate(&stop) != cudaSuccess)
    fail("cudaEventCreate", "no event");
  for (int i = -3; i < REPEATS; i++) {
    (void)cudaEventRecord(start, stream);
    run(w);
    (void)cudaEventRecord(stop, stream);
    if (cudaEventSynchronize(stop) != cudaSuccess) fail("cudaEventSynchronize", cudaGetErrorString(cudaGetLastError()));
    if (i >= 0) (void)cudaEventElapsedTime(&times[i], start, stop);
  }
  (void)cudaEventDestroy(start);
  (void)cudaEventDestroy(stop);
  qsort(times, REPEATS, sizeof(times[0]), compare);
  return (double)times[REPEATS / 2];
}

typedef struct bench_case {
  const char *name;
  fp8optim_preset preset;
  fp8core_dtype gradient;
  int with_weight;
  fp8core_dtype weight;
  int stochastic;
  int tensors;
  int64_t rows;
  int64_t columns;
} bench_case;

static void bench(const bench_case *of) {
  static fp8optim_parameter parameters[MOST_TENSORS];
  static fp8core_tensor gradients[MOST_TENSORS];
  static char names[MOST_TENSORS][16];
  const fp8optim_group group = fp8optim_group_default();
  const int64_t elements = of->rows * of->columns;
  const size_t gradient_size = fp8core_dtype_size(of->gradient);
  fp8optim_adamw_options options = fp8optim_adamw_options_of(of->preset);
  work w;
  memset(&w, 0, sizeof(w));
  options.stochastic_rounding = of->stochastic;
  // Values that are no edge case: all alike, far from zero.
  const size_t gradient_bytes = (size_t)(of->tensors * elements) * gradient_size;
  unsigned char *gradient = need(gradient_bytes);
  if (cudaMemsetAsync(gradient, 0x35, gradient_bytes, stream) != cudaSuccess) fail("cudaMemsetAsync", "an error");
  for (int i = 0; i < of->tensors; i++) {
    snprintf(names[i], sizeof(names[i]), "t%d", i);
    parameters[i] = fp8optim_parameter_create(names[i], of->rows, of->columns);
    parameters[i].with_weight = of->with_weight;
    parameters[i].weight_dtype = of->weight;
    gradients[i] = fp8core_tensor_matrix(gradient + (size_t)(i * elements) * gradient_size, of->gradient, of->rows,
                                         of->columns, fp8core_context_device(context));
  }
  if (fp8optim_adamw_create(&w.adamw, context, &options, of->tensors, parameters, 1, &group) != FP8CORE_OK)
    fail("fp8optim_adamw_create", fp8core_last_error());
  w.gradients = gradients;
  w.options = fp8optim_step_options_default();
  w.options.max_norm = 1.0f;
  const double time = median_of(run_step, &w);
  const size_t states = fp8core_dtype_size(options.master_dtype) + fp8core_dtype_size(options.exp_avg_dtype) +
                        fp8core_dtype_size(options.exp_avg_sq_dtype);
  // Gradients are read twice.
  const size_t bytes = 2 * gradient_size + 2 * states + (of->with_weight ? fp8core_dtype_size(of->weight) : 0);
  const double rate = (double)bytes * (double)elements * of->tensors / time * 1e-6;
  printf("%-50s %9.3f ms %3zu bytes a parameter %6.0f GB/s %6.1f %% of copy\n", of->name, time, bytes, rate,
         100.0 * rate / copy_rate);
  fp8optim_adamw_destroy(&w.adamw);
  (void)fp8core_free(context, gradient);
}

int main(void) {
  if (fp8core_device_count(FP8CORE_DEVICE_CUDA) == 0) {
    printf("skipped: %s\n", fp8core_last_error());
    return 77;
  }
  fp8core_context_options options = fp8core_context_options_default();
  options.device.type = FP8CORE_DEVICE_CUDA;
  if (fp8core_context_create(&context, &options) != FP8CORE_OK) fail("context", fp8core_last_error());
  void *handle;
  (void)fp8core_cuda_stream(context, &handle);
  stream = handle;

  work w;
  memset(&w, 0, sizeof(w));
  w.bytes = (size_t)1 << 30;
  w.from = need(w.bytes);
  w.to = need(w.bytes);
  const double time = median_of(run_copy, &w);
  copy_rate = 2.0 * (double)w.bytes / time * 1e-6;
  printf("%-50s %9.3f ms %29.0f GB/s\n", "copy, device to device, 1 GiB", time, copy_rate);
  (void)fp8core_free(context, w.from);
  (void)fp8core_free(context, w.to);

  const bench_case cases[] = {
    {"fp8, gradient E4M3, weight E4M3, 32 x 4096^2", FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 1, FP8CORE_E4M3, 0, 32, 4096,
     4096},
    {"fp8, gradient E4M3, no weight, 32 x 4096^2", FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 0, FP8CORE_E4M3, 0, 32, 4096,
     4096},
    {"fp8, gradient BF16, weight BF16, 32 x 4096^2", FP8OPTIM_PRESET_FP8, FP8CORE_BF16, 1, FP8CORE_BF16, 0, 32, 4096,
     4096},
    {"fp8, stochastic, gradient E4M3, weight E4M3", FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 1, FP8CORE_E4M3, 1, 32, 4096,
     4096},
    {"fp32, gradient FP32, no weight, 32 x 4096^2", FP8OPTIM_PRESET_FP32, FP8CORE_FP32, 0, FP8CORE_FP32, 0, 32, 4096,
     4096},
    {"bf16, gradient BF16, weight BF16, 32 x 4096^2", FP8OPTIM_PRESET_BF16, FP8CORE_BF16, 1, FP8CORE_BF16, 0, 32, 4096,
     4096},
    {"fp8, gradient E4M3, weight E4M3, one of 2^29", FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 1, FP8CORE_E4M3, 0, 1, 1 << 15,
     1 << 14},
    {"fp8, gradient E4M3, weight E4M3, 4096 x 4096", FP8OPTIM_PRESET_FP8, FP8CORE_E4M3, 1, FP8CORE_E4M3, 0, 4096, 1,
     4096},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) bench(&cases[i]);
  fp8core_context_destroy(&context);
  return 0;
}
