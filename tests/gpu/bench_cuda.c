// Speeds on a GPU, each beside its ceiling: casts beside a copy of as many bytes, products beside the card's dense rate
// and beside BF16. Medians of events around each call. Prints one table.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8core/cuda.h"
#include "fp8core/fp8core.h"

#define REPEATS 15

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
  fp8core_gemm_options gemm;
  fp8core_cast_options cast;
  fp8core_tensor a;
  fp8core_tensor b;
  fp8core_tensor d;
  fp8core_tensor transposed;
} work;

static fp8core_status run_copy(work *w) {
  return cudaMemcpyAsync(w->d.data, w->a.data, (size_t)w->a.row_stride, cudaMemcpyDeviceToDevice, stream) == cudaSuccess
           ? FP8CORE_OK
           : FP8CORE_ERROR_DEVICE;
}
static fp8core_status run_cast(work *w) { return fp8core_cast(context, &w->cast, &w->a, &w->d); }
static fp8core_status run_transpose(work *w) {
  return fp8core_cast_transpose(context, &w->cast, &w->a, &w->d, &w->transposed);
}
static fp8core_status run_gemm(work *w) { return fp8core_gemm(context, &w->gemm, &w->a, &w->b, NULL, &w->d); }

static int compare(const void *one, const void *other) {
  const float a = *(const float *)one, b = *(const float *)other;
  return (a > b) - (a < b);
}

// Milliseconds.
static double median_of(fp8core_status (*run)(work *), work *w) {
  cudaEvent_t start, stop;
  float times[REPEATS];
  if (cudaEventCreate(&start) != cudaSuccess || cudaEventCreate(&stop) != cudaSuccess)
    fail("cudaEventCreate", "no event");
  for (int i = -3; i < REPEATS; i++) {
    (void)cudaEventRecord(start, stream);
    if (run(w) != FP8CORE_OK) fail("run", fp8core_last_error());
    (void)cudaEventRecord(stop, stream);
    if (cudaEventSynchronize(stop) != cudaSuccess) fail("cudaEventSynchronize", cudaGetErrorString(cudaGetLastError()));
    if (i >= 0) (void)cudaEventElapsedTime(&times[i], start, stop);
  }
  (void)cudaEventDestroy(start);
  (void)cudaEventDestroy(stop);
  qsort(times, REPEATS, sizeof(times[0]), compare);
  return (double)times[REPEATS / 2];
}

static void print_bytes(const char *what, double milliseconds, double bytes) {
  const double rate = bytes / milliseconds * 1e-6;
  printf("%-46s %9.3f ms %9.0f GB/s %6.1f %% of copy\n", what, milliseconds, rate, 100.0 * rate / copy_rate);
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
  int major, minor;
  (void)fp8core_cuda_stream(context, &handle);
  stream = handle;
  (void)fp8core_cuda_compute_capability(context, &major, &minor);
  struct cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) fail("cudaGetDeviceProperties", "no device");
  printf("%s, compute capability %d.%d, %d multiprocessors\n", properties.name, major, minor,
         properties.multiProcessorCount);

  const int64_t n = 16384;
  const fp8core_device device = fp8core_context_device(context);
  float *host = malloc((size_t)(n * n) * sizeof(float));
  if (!host) fail("host memory", "none");
  uint32_t state = 12345;
  for (int64_t i = 0; i < n * n; i++) {
    // The sum of four uniform numbers: bell-shaped, and quick.
    float sum = -2.0f;
    for (int j = 0; j < 4; j++) {
      state = state * 1664525u + 1013904223u;
      sum += (float)(state >> 8) * 0x1p-24f;
    }
    host[i] = sum * 1.7f;
  }
  void *wide = need((size_t)(n * n) * 4), *copy = need((size_t)(n * n) * 4), *narrow = need((size_t)(n * n)),
       *turned = need((size_t)(n * n));
  void *half = need((size_t)(n * n) * 2);
  float *scalars = need(4096);
  if (fp8core_copy(context, wide, host, (size_t)(n * n) * 4) != FP8CORE_OK ||
      fp8core_zero(context, scalars, 4096) != FP8CORE_OK)
    fail("copy", fp8core_last_error());
  free(host);

  work w;
  memset(&w, 0, sizeof(w));
  w.cast = fp8core_cast_options_default();
  w.gemm = fp8core_gemm_options_default();
  w.a = fp8core_tensor_matrix(wide, FP8CORE_FP32, n, n, device);
  w.d = fp8core_tensor_matrix(copy, FP8CORE_FP32, n, n, device);
  w.a.row_stride = n * n * 4;
  double time = median_of(run_copy, &w);
  copy_rate = 2.0 * 4.0 * (double)(n * n) / time * 1e-6;
  print_bytes("copy, device to device, 1 GiB", time, 8.0 * (double)(n * n));
  w.a.row_stride = 0;

  const double elements = (double)(n * n);
  w.d = fp8core_tensor_matrix(half, FP8CORE_BF16, n, n, device);
  time = median_of(run_cast, &w);
  print_bytes("cast FP32 -> BF16", time, 6.0 * elements);
  w.d = fp8core_tensor_matrix(narrow, FP8CORE_E4M3, n, n, device);
  w.d.amax = &scalars[0];
  w.cast.statistics = (fp8core_cast_statistics *)(void *)(scalars + 64);
  time = median_of(run_cast, &w);
  print_bytes("cast FP32 -> E4M3, amax and counts", time, 5.0 * elements);
  w.cast.rounding = FP8CORE_ROUND_STOCHASTIC;
  time = median_of(run_cast, &w);
  print_bytes("cast FP32 -> E4M3, stochastic", time, 5.0 * elements);
  w.cast.rounding = FP8CORE_ROUND_NEAREST_EVEN;
  w.transposed = fp8core_tensor_matrix(turned, FP8CORE_E4M3, n, n, device);
  time = median_of(run_transpose, &w);
  print_bytes("cast-transpose FP32 -> E4M3, amax and counts", time, 6.0 * elements);
  w.a = fp8core_tensor_matrix(half, FP8CORE_BF16, n, n, device);
  time = median_of(run_cast, &w);
  print_bytes("cast BF16 -> E4M3, amax and counts", time, 3.0 * elements);
  time = median_of(run_transpose, &w);
  print_bytes("cast-transpose BF16 -> E4M3, amax and counts", time, 4.0 * elements);

  // Dense rates of H100 and H200 (SXM), from NVIDIA's data sheets; other cards have the ratio only.
  const int hopper = major == 9 && minor == 0;
  const int64_t m = 8192;
  const double operations = 2.0 * (double)m * (double)m * (double)m;
  double bf16_time = 0.0;
  for (int kind = 0; kind < 5; kind++) {
    const char *names[] = {"BF16 product 8192^3 -> BF16", "E4M3 product 8192^3 -> BF16",
                           "E4M3 product 8192^3 -> BF16, fast accumulation", "E4M3 x E5M2, B transposed first",
                           "E4M3 product 8192^3 -> E4M3, scale and amax"};
    const fp8core_dtype dtype = kind == 0 ? FP8CORE_BF16 : FP8CORE_E4M3;
    const double peak = kind == 0 ? 989.0 : 1979.0;
    w.gemm = fp8core_gemm_options_default();
    w.gemm.transpose_b = kind != 3;
    w.gemm.fast_accumulation = kind == 2 || kind == 4;
    w.a = fp8core_tensor_matrix(kind == 0 ? half : narrow, dtype, m, m, device);
    w.b = fp8core_tensor_matrix(kind == 0 ? (void *)((uint16_t *)half + m * m) : (void *)((uint8_t *)narrow + m * m),
                                kind == 3 ? FP8CORE_E5M2 : dtype, m, m, device);
    w.d = fp8core_tensor_matrix(copy, kind == 4 ? FP8CORE_E4M3 : FP8CORE_BF16, m, m, device);
    if (kind == 4) {
      const float one = 1.0f;
      if (fp8core_copy(context, &scalars[1], &one, sizeof(one)) != FP8CORE_OK) fail("copy", fp8core_last_error());
      w.d.scale = &scalars[1];
      w.d.amax = &scalars[0];
    }
    time = median_of(run_gemm, &w);
    if (kind == 0) bf16_time = time;
    printf("%-46s %9.3f ms %9.0f TFLOP/s", names[kind], time, operations / time * 1e-9);
    if (hopper) printf(" %5.1f %% of %.0f", 100.0 * operations / time * 1e-9 / peak, peak);
    if (kind > 0) printf("  %.2f x BF16", bf16_time / time);
    printf("\n");
  }
  void *all[] = {wide, copy, narrow, turned, half, scalars};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) (void)fp8core_free(context, all[i]);
  fp8core_context_destroy(&context);
  return 0;
}
