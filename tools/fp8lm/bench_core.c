// fp8lm bench core: the kernels of libfp8core beside what the machine can do.
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "json_writer.h"
#include "machine.h"

#define PREFIX "fp8lm bench core"

// Columns of the matrix that is cast and, in the transposing case, transposed.
#define CAST_COLUMNS 4096
#define MAX_ROUNDS 15
// A sample lasts at least this long, so that the clock and a cold cache do not count.
#define SAMPLE_SECONDS 0.02

static const char help_text[] =
  "Usage: fp8lm bench core [OPTION]...\n"
  "\n"
  "Measures the casts and matrix products of libfp8core, on every kernel tier that this CPU has and on every GPU "
  "asked\n"
  "for, beside limits of the machine that are measured in the same rounds.\n"
  "\n"
  "Casts: GB/s of bytes read and written; casts to FP8 gather amax and counts. Beside it the bandwidth of a plain "
  "copy\n"
  "of as many bytes by as many threads, the better of memcpy and non-temporal stores (on a GPU: a copy within its\n"
  "memory), and the share of it. A cast that reads more than it writes can exceed a copy.\n"
  "Products: GFLOP/s of [M, K] times the transpose of [N, K], the product of a linear layer, packing and conversion\n"
  "included. Beside it the peak of multiply-add loops that touch no memory (BF16 dot products for FP8 and BF16 "
  "operands\n"
  "on the tier avx512-bf16, FP32 FMA of the tier's width elsewhere, the CPU's widest for scalar), and the share of "
  "it.\n"
  "Every figure is the median over rounds, with the smallest and largest; the share is the median of the rounds' "
  "shares.\n"
  "\n"
  "Options:\n"
  "  --device DEVICE   cpu, cuda, cuda:N or all (default: all that are there)\n"
  "  --isa TIER        only this tier: scalar, avx2, avx512 or avx512-bf16\n"
  "  --threads N       CPU threads, 1 to 1024 (default: as many as OpenMP would use)\n"
  "  --elements N      elements of a cast, a multiple of 4096 (default 33554432). Where source and destination fit "
  "the\n"
  "                    caches, so does the copy beside it: shares of small and of large casts are not comparable\n"
  "  --seconds S       time a case, its limit included, 0.001 to 3600 (default 0.5); a single run may take longer\n"
  "  --filter PATTERN  only the cases that the shell pattern matches as a whole: a name of --list, "
  "'cast/*/fp32-e4m3';\n"
  "                    where there is none, those whose name contains it: cast/avx512/, e5m2\n"
  "  --list            print the names of the cases and stop\n"
  "  --json            print one JSON object instead of tables\n"
  "  --help            print this text\n"
  "\n"
  "Exit codes: 0 success; 1 a device or tier is not there, or a kernel failed; 2 wrong usage.\n";

typedef struct cast_kind {
  const char *name;
  fp8core_dtype source;
  fp8core_dtype destination;
  int stochastic;
  int transpose;
} cast_kind;

static const cast_kind cast_kinds[] = {
  {"fp32-e4m3", FP8CORE_FP32, FP8CORE_E4M3, 0, 0},           {"fp32-e5m2", FP8CORE_FP32, FP8CORE_E5M2, 0, 0},
  {"bf16-e4m3", FP8CORE_BF16, FP8CORE_E4M3, 0, 0},           {"e4m3-fp32", FP8CORE_E4M3, FP8CORE_FP32, 0, 0},
  {"e4m3-bf16", FP8CORE_E4M3, FP8CORE_BF16, 0, 0},           {"fp32-e4m3-stochastic", FP8CORE_FP32, FP8CORE_E4M3, 1, 0},
  {"fp32-e4m3-transpose", FP8CORE_FP32, FP8CORE_E4M3, 0, 1},
};

typedef struct gemm_kind {
  const char *name;
  fp8core_dtype operands;
  fp8core_dtype result;
} gemm_kind;

static const gemm_kind gemm_kinds[] = {
  {"e4m3-bf16", FP8CORE_E4M3, FP8CORE_BF16},
  {"bf16-bf16", FP8CORE_BF16, FP8CORE_BF16},
  {"fp32-fp32", FP8CORE_FP32, FP8CORE_FP32},
};

typedef struct gemm_shape {
  int64_t m;
  int64_t n;
  int64_t k;
  int only_cuda;
} gemm_shape;

static const gemm_shape gemm_shapes[] = {
  {1024, 1024, 1024, 0},
  {1024, 3072, 768, 0},
  {1024, 768, 3072, 0},
  {8192, 8192, 8192, 1},
};

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

typedef struct bench_settings {
  int want_cpu;
  int want_cuda;
  // -1: all.
  int cuda_index;
  // Whether the absence of a GPU is an error.
  int cuda_required;
  fp8core_isa isa;
  int threads;
  int64_t elements;
  double seconds;
  // As given, and with stars around, for fnmatch().
  const char *pattern;
  char *filter;
  int list;
  int json;
} bench_settings;

// Data of one device, shared by its tiers. Of the formats that no case needs the pointers stay NULL.
typedef struct bench_device {
  fp8core_device device;
  // On the CPU one context a tier.
  fp8core_context *contexts[FP8CORE_ISA_AVX512_BF16 + 1];
  int context_count;
  void *sources[FP8CORE_DTYPE_COUNT];
  void *destination;
  void *transposed;
  void *operands_a[FP8CORE_DTYPE_COUNT];
  void *operands_b[FP8CORE_DTYPE_COUNT];
  void *result;
  // Scale, its reciprocal and an amax; then the statistics of casts.
  float *scales;
  fp8core_cast_statistics *statistics;
} bench_device;

typedef struct bench_case {
  char name[80];
  bench_device *device;
  fp8core_context *context;
  const cast_kind *cast;
  const gemm_kind *gemm;
  const gemm_shape *shape;
  // Bytes or FLOP of one run.
  double work;
  // Of a product on the CPU; -1 where no limit is measured.
  int peak;
  int repeats;
  double spent;
  int rounds;
  // In GB/s or GFLOP/s; limits are 0 when not measured.
  double rates[MAX_ROUNDS];
  double limits[MAX_ROUNDS];
} bench_case;

typedef struct bench_run {
  const bench_settings *settings;
  bench_device *devices;
  int device_count;
  bench_case *cases;
  size_t case_count;
} bench_run;

static size_t element_bytes(fp8core_dtype dtype) { return fp8core_dtype_size(dtype); }

// Which machine limit a product of this tier is compared with.
static int peak_of(fp8core_isa isa, fp8core_dtype operands) {
  if (isa == FP8CORE_ISA_AVX512_BF16 && operands != FP8CORE_FP32) return FP8LM_PEAK_BF16_DOT;
  if (isa == FP8CORE_ISA_AVX2 || !fp8lm_peak_available(FP8LM_PEAK_FMA_AVX512)) {
    return fp8lm_peak_available(FP8LM_PEAK_FMA_AVX2) ? FP8LM_PEAK_FMA_AVX2 : -1;
  }
  return FP8LM_PEAK_FMA_AVX512;
}

static void device_name(char *buffer, size_t size, fp8core_device device) {
  if (device.type == FP8CORE_DEVICE_CUDA)
    snprintf(buffer, size, "cuda:%d", device.index);
  else
    snprintf(buffer, size, "cpu");
}

static void context_name(char *buffer, size_t size, const bench_device *device, const fp8core_context *context) {
  if (device->device.type == FP8CORE_DEVICE_CUDA)
    device_name(buffer, size, device->device);
  else
    snprintf(buffer, size, "%s", fp8core_isa_name(fp8core_context_isa(context)));
}

static void add_case(bench_run *bench, bench_device *device, fp8core_context *context, const cast_kind *cast,
                     const gemm_kind *gemm, const gemm_shape *shape) {
  char where[32];
  context_name(where, sizeof(where), device, context);
  bench_case *added = &bench->cases[bench->case_count];
  memset(added, 0, sizeof(*added));
  added->device = device;
  added->context = context;
  added->cast = cast;
  added->gemm = gemm;
  added->shape = shape;
  added->peak = -1;
  if (cast) {
    snprintf(added->name, sizeof(added->name), "cast/%s/%s", where, cast->name);
    const size_t written = element_bytes(cast->destination) * (cast->transpose ? 2 : 1);
    added->work = (double)bench->settings->elements * (double)(element_bytes(cast->source) + written);
  } else {
    snprintf(added->name, sizeof(added->name), "gemm/%s/%s/%" PRId64 "x%" PRId64 "x%" PRId64, where, gemm->name,
             shape->m, shape->n, shape->k);
    added->work = 2.0 * (double)shape->m * (double)shape->n * (double)shape->k;
    if (device->device.type == FP8CORE_DEVICE_CPU) added->peak = peak_of(fp8core_context_isa(context), gemm->operands);
  }
  bench->case_count++;
}

static fp8core_status create_context(const bench_settings *settings, bench_device *device, fp8core_isa isa) {
  fp8core_context_options options = fp8core_context_options_default();
  options.device = device->device;
  options.threads = settings->threads;
  options.isa = isa;
  const fp8core_status status = fp8core_context_create(&device->contexts[device->context_count], &options);
  if (status == FP8CORE_OK) device->context_count++;
  return status;
}

static int create_devices(bench_run *bench) {
  const bench_settings *settings = bench->settings;
  if (settings->want_cpu) {
    bench_device *device = &bench->devices[bench->device_count++];
    device->device.type = FP8CORE_DEVICE_CPU;
    const fp8core_isa first = settings->isa == FP8CORE_ISA_AUTO ? FP8CORE_ISA_SCALAR : settings->isa;
    const fp8core_isa last = settings->isa == FP8CORE_ISA_AUTO ? fp8core_isa_best() : settings->isa;
    for (int isa = (int)first; isa <= (int)last; isa++) {
      if (create_context(settings, device, (fp8core_isa)isa) != FP8CORE_OK) return -1;
    }
  }
  if (!settings->want_cuda) return 0;
  const int gpus = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  const int first = settings->cuda_index < 0 ? 0 : settings->cuda_index;
  const int last = settings->cuda_index < 0 ? gpus - 1 : settings->cuda_index;
  if (settings->cuda_required && (gpus == 0 || last >= gpus)) {
    // Without any GPU the library's message says why.
    if (gpus)
      (void)fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cuda:%d is not there: %d GPU%s found", last, gpus,
                                   gpus == 1 ? "" : "s");
    return -1;
  }
  for (int index = first; index <= last; index++) {
    bench_device *device = &bench->devices[bench->device_count++];
    device->device.type = FP8CORE_DEVICE_CUDA;
    device->device.index = index;
    if (create_context(settings, device, FP8CORE_ISA_AUTO) != FP8CORE_OK) return -1;
  }
  return 0;
}

static void list_cases(bench_run *bench) {
  for (int d = 0; d < bench->device_count; d++) {
    bench_device *device = &bench->devices[d];
    for (size_t kind = 0; kind < COUNT_OF(cast_kinds); kind++) {
      for (int c = 0; c < device->context_count; c++) {
        add_case(bench, device, device->contexts[c], &cast_kinds[kind], NULL, NULL);
      }
    }
    for (size_t kind = 0; kind < COUNT_OF(gemm_kinds); kind++) {
      for (size_t shape = 0; shape < COUNT_OF(gemm_shapes); shape++) {
        if (gemm_shapes[shape].only_cuda && device->device.type != FP8CORE_DEVICE_CUDA) continue;
        for (int c = 0; c < device->context_count; c++) {
          add_case(bench, device, device->contexts[c], NULL, &gemm_kinds[kind], &gemm_shapes[shape]);
        }
      }
    }
  }
}

// Only the cases whose whole name the filter matches; where there is none, those that contain it.
static void filter_cases(bench_run *bench) {
  const bench_settings *settings = bench->settings;
  const char *pattern = settings->filter;
  size_t kept = 0;
  for (size_t i = 0; i < bench->case_count; i++) {
    if (fnmatch(settings->pattern, bench->cases[i].name, 0) == 0) pattern = settings->pattern;
  }
  for (size_t i = 0; i < bench->case_count; i++) {
    if (fnmatch(pattern, bench->cases[i].name, 0) == 0) bench->cases[kept++] = bench->cases[i];
  }
  bench->case_count = kept;
}

// The best context of the device does the preparations.
static fp8core_context *owner_of(const bench_device *device) { return device->contexts[device->context_count - 1]; }

// Uniform in [-1, 1), by a linear congruential generator (Knuth, MMIX).
static void fill_uniform(float *values, size_t count, uint64_t seed) {
  uint64_t state = seed;
  for (size_t i = 0; i < count; i++) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    values[i] = (float)(int32_t)(uint32_t)(state >> 32) * 0x1p-31f;
  }
}

// Allocates `count` elements of `dtype` and fills them with the values of `host`. Does nothing where they are there
// already.
static fp8core_status prepare_data(const bench_device *device, fp8core_dtype dtype, const float *host, size_t count,
                                   void **data) {
  if (*data) return FP8CORE_OK;
  fp8core_context *context = owner_of(device);
  fp8core_status status = fp8core_alloc(context, count * element_bytes(dtype), data);
  if (status != FP8CORE_OK) return status;
  if (dtype == FP8CORE_FP32) return fp8core_copy(context, *data, host, count * sizeof(float));
  void *wide = NULL;
  status = fp8core_alloc(context, count * sizeof(float), &wide);
  if (status == FP8CORE_OK) status = fp8core_copy(context, wide, host, count * sizeof(float));
  const fp8core_tensor source = fp8core_tensor_matrix(wide, FP8CORE_FP32, 1, (int64_t)count, device->device);
  const fp8core_tensor destination = fp8core_tensor_matrix(*data, dtype, 1, (int64_t)count, device->device);
  if (status == FP8CORE_OK) status = fp8core_cast(context, NULL, &source, &destination);
  if (status == FP8CORE_OK) status = fp8core_context_synchronize(context);
  (void)fp8core_free(context, wide);
  return status;
}

static size_t larger(size_t one, size_t other) { return one > other ? one : other; }

static fp8core_status prepare_device(const bench_run *bench, bench_device *device) {
  fp8core_context *context = owner_of(device);
  const size_t elements = (size_t)bench->settings->elements;
  size_t destination_bytes = 0;
  size_t transposed_bytes = 0;
  size_t a_elements = 0;
  size_t b_elements = 0;
  size_t result_bytes = 0;
  for (size_t i = 0; i < bench->case_count; i++) {
    const bench_case *item = &bench->cases[i];
    if (item->device != device) continue;
    if (item->cast) {
      // A copy of as many bytes runs in the same buffers.
      destination_bytes = larger(destination_bytes, elements * element_bytes(FP8CORE_FP32));
      if (item->cast->transpose) transposed_bytes = elements * element_bytes(item->cast->destination);
    } else {
      a_elements = larger(a_elements, (size_t)(item->shape->m * item->shape->k));
      b_elements = larger(b_elements, (size_t)(item->shape->n * item->shape->k));
      result_bytes =
        larger(result_bytes, (size_t)(item->shape->m * item->shape->n) * element_bytes(item->gemm->result));
    }
  }
  const size_t host_elements = larger(destination_bytes ? elements : 0, larger(a_elements, b_elements));
  if (host_elements == 0) return FP8CORE_OK;
  float *host = malloc(host_elements * sizeof(float));
  if (!host) {
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of test data",
                                  host_elements * sizeof(float));
  }
  fill_uniform(host, host_elements, 1);
  const float scales[3] = {448.0f, 1.0f / 448.0f, 0.0f};
  void *pointer = NULL;
  fp8core_status status = fp8core_alloc(context, sizeof(scales), &pointer);
  device->scales = pointer;
  if (status == FP8CORE_OK) status = fp8core_copy(context, pointer, scales, sizeof(scales));
  if (status == FP8CORE_OK) status = fp8core_alloc(context, sizeof(*device->statistics), &pointer);
  if (status == FP8CORE_OK) {
    device->statistics = pointer;
    status = fp8core_zero(context, pointer, sizeof(*device->statistics));
  }
  if (status == FP8CORE_OK) status = fp8core_alloc(context, destination_bytes, &device->destination);
  if (status == FP8CORE_OK) status = fp8core_zero(context, device->destination, destination_bytes);
  if (status == FP8CORE_OK) status = fp8core_alloc(context, transposed_bytes, &device->transposed);
  if (status == FP8CORE_OK) status = fp8core_zero(context, device->transposed, transposed_bytes);
  if (status == FP8CORE_OK) status = fp8core_alloc(context, result_bytes, &device->result);
  for (size_t i = 0; i < bench->case_count && status == FP8CORE_OK; i++) {
    const bench_case *item = &bench->cases[i];
    if (item->device != device) continue;
    if (item->cast) {
      status = prepare_data(device, item->cast->source, host, elements, &device->sources[item->cast->source]);
      // What a copy reads.
      if (status == FP8CORE_OK)
        status = prepare_data(device, FP8CORE_FP32, host, elements, &device->sources[FP8CORE_FP32]);
    } else {
      const fp8core_dtype operands = item->gemm->operands;
      status = prepare_data(device, operands, host, a_elements, &device->operands_a[operands]);
      if (status == FP8CORE_OK)
        status = prepare_data(device, operands, host, b_elements, &device->operands_b[operands]);
    }
  }
  free(host);
  return status;
}

static void release_device(bench_device *device) {
  if (device->context_count == 0) return;
  fp8core_context *context = owner_of(device);
  for (int i = 0; i < FP8CORE_DTYPE_COUNT; i++) {
    (void)fp8core_free(context, device->sources[i]);
    (void)fp8core_free(context, device->operands_a[i]);
    (void)fp8core_free(context, device->operands_b[i]);
  }
  (void)fp8core_free(context, device->destination);
  (void)fp8core_free(context, device->transposed);
  (void)fp8core_free(context, device->result);
  (void)fp8core_free(context, device->scales);
  (void)fp8core_free(context, device->statistics);
  for (int i = 0; i < device->context_count; i++) fp8core_context_destroy(&device->contexts[i]);
}

static fp8core_status run_cast(const bench_case *item, int64_t elements) {
  const bench_device *device = item->device;
  const int64_t rows = elements / CAST_COLUMNS;
  fp8core_tensor source =
    fp8core_tensor_matrix(device->sources[item->cast->source], item->cast->source, rows, CAST_COLUMNS, device->device);
  fp8core_tensor destination =
    fp8core_tensor_matrix(device->destination, item->cast->destination, rows, CAST_COLUMNS, device->device);
  fp8core_cast_options options = fp8core_cast_options_default();
  if (item->cast->stochastic) options.rounding = FP8CORE_ROUND_STOCHASTIC;
  if (element_bytes(item->cast->source) > element_bytes(item->cast->destination)) {
    destination.scale = device->scales;
    destination.amax = device->scales + 2;
    options.statistics = device->statistics;
  } else {
    source.scale_inverse = device->scales + 1;
  }
  if (!item->cast->transpose) return fp8core_cast(item->context, &options, &source, &destination);
  fp8core_tensor transposed =
    fp8core_tensor_matrix(device->transposed, item->cast->destination, CAST_COLUMNS, rows, device->device);
  transposed.scale = device->scales;
  return fp8core_cast_transpose(item->context, &options, &source, &destination, &transposed);
}

static fp8core_status run_gemm(const bench_case *item) {
  const bench_device *device = item->device;
  const gemm_shape *shape = item->shape;
  const fp8core_dtype dtype = item->gemm->operands;
  const fp8core_tensor a = fp8core_tensor_matrix(device->operands_a[dtype], dtype, shape->m, shape->k, device->device);
  const fp8core_tensor b = fp8core_tensor_matrix(device->operands_b[dtype], dtype, shape->n, shape->k, device->device);
  const fp8core_tensor d =
    fp8core_tensor_matrix(device->result, item->gemm->result, shape->m, shape->n, device->device);
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_b = 1;
  options.fast_accumulation = 1;
  return fp8core_gemm(item->context, &options, &a, &b, NULL, &d);
}

// Seconds of `repeats` runs; negative after an error.
static double time_case(const bench_case *item, int64_t elements, int repeats) {
  const double start = fp8lm_now();
  for (int i = 0; i < repeats; i++) {
    if ((item->cast ? run_cast(item, elements) : run_gemm(item)) != FP8CORE_OK) return -1.0;
  }
  if (fp8core_context_synchronize(item->context) != FP8CORE_OK) return -1.0;
  return fp8lm_now() - start;
}

// GB/s of a copy within the memory of a GPU that moves as many bytes as the cast; 0 after an error.
static double device_copy_rate(const bench_case *item) {
  bench_device *device = item->device;
  const size_t bytes = (size_t)(item->work / 2.0);
  const int repeats = 5;
  double start = 0.0;
  for (int i = -1; i < repeats; i++) {
    if (i == 0) start = fp8lm_now();
    if (fp8core_copy(item->context, device->destination, device->sources[FP8CORE_FP32], bytes) != FP8CORE_OK)
      return 0.0;
  }
  return 2e-9 * (double)bytes * repeats / (fp8lm_now() - start);
}

static double limit_of(const bench_case *item) {
  const int threads = fp8core_context_threads(item->context);
  if (item->device->device.type == FP8CORE_DEVICE_CUDA) return item->cast ? device_copy_rate(item) : 0.0;
  if (item->cast) {
    return 1e-9 * fp8lm_copy_bandwidth(threads, 2, item->device->destination, item->device->sources[FP8CORE_FP32],
                                       (size_t)(item->work / 2.0));
  }
  return item->peak < 0 ? 0.0 : 1e-9 * fp8lm_peak_rate((fp8lm_peak)item->peak, threads, SAMPLE_SECONDS);
}

// One sample of a case, beside its limit. Returns -1 after an error.
static int sample_case(bench_case *item, int64_t elements) {
  const double start = fp8lm_now();
  if (item->rounds == 0) {
    // The first run warms up, and tells how many make a sample.
    const double once = time_case(item, elements, 1);
    if (once < 0.0) return -1;
    item->repeats = once >= SAMPLE_SECONDS ? 1 : (int)ceil(SAMPLE_SECONDS / (once > 1e-6 ? once : 1e-6));
  }
  const double limit = limit_of(item);
  const double seconds = time_case(item, elements, item->repeats);
  if (seconds < 0.0) return -1;
  item->rates[item->rounds] = 1e-9 * item->work * item->repeats / seconds;
  item->limits[item->rounds] = limit;
  item->rounds++;
  item->spent += fp8lm_now() - start;
  return 0;
}

// Rounds over all cases, so that a change of the machine's mood meets them all.
static int run_cases(bench_run *bench) {
  for (int round = 0; round < MAX_ROUNDS; round++) {
    for (size_t i = 0; i < bench->case_count; i++) {
      bench_case *item = &bench->cases[i];
      if (round > 0 && item->spent + item->spent / item->rounds > bench->settings->seconds) continue;
      if (sample_case(item, bench->settings->elements) != 0) {
        fp8lm_complain(0, PREFIX, "%s: %s", item->name, fp8core_last_error());
        return -1;
      }
    }
  }
  return 0;
}

static int compare_doubles(const void *one, const void *other) {
  const double left = *(const double *)one;
  const double right = *(const double *)other;
  return (left > right) - (left < right);
}

typedef struct sample_spread {
  double median;
  double smallest;
  double largest;
} sample_spread;

static sample_spread spread_of(const double *samples, int count) {
  double sorted[MAX_ROUNDS];
  memcpy(sorted, samples, (size_t)count * sizeof(*samples));
  qsort(sorted, (size_t)count, sizeof(*sorted), compare_doubles);
  const sample_spread result = {(sorted[(count - 1) / 2] + sorted[count / 2]) / 2.0, sorted[0], sorted[count - 1]};
  return result;
}

// Medians over the rounds; limit and share are 0 when not measured.
static void summarise(const bench_case *item, sample_spread *rate, sample_spread *limit, sample_spread *share) {
  double shares[MAX_ROUNDS];
  for (int i = 0; i < item->rounds; i++) shares[i] = item->limits[i] > 0.0 ? item->rates[i] / item->limits[i] : 0.0;
  *rate = spread_of(item->rates, item->rounds);
  *limit = spread_of(item->limits, item->rounds);
  *share = spread_of(shares, item->rounds);
}

static const char *limit_name(const bench_case *item) {
  if (item->cast) return "copy";
  return item->peak < 0 ? "not measured" : fp8lm_peak_name((fp8lm_peak)item->peak);
}

static int cpu_threads(const bench_run *bench) {
  for (int i = 0; i < bench->device_count; i++) {
    if (bench->devices[i].device.type == FP8CORE_DEVICE_CPU)
      return fp8core_context_threads(bench->devices[i].contexts[0]);
  }
  return 0;
}

static void print_tables(const bench_run *bench) {
  printf("fp8lm %s, libfp8core %s; CPU threads: %d; best tier: %s\n", FP8LM_VERSION, fp8core_version(),
         cpu_threads(bench), fp8core_isa_name(fp8core_isa_best()));
  int group = -1;
  for (size_t i = 0; i < bench->case_count; i++) {
    const bench_case *item = &bench->cases[i];
    const int this_group = item->cast ? 0 : 1;
    if (this_group != group || item->device != bench->cases[i - 1].device) {
      if (item->cast)
        printf("\nCasts of %" PRId64 " elements, GB/s of bytes read and written\n", bench->settings->elements);
      else
        printf("\nMatrix products, GFLOP/s\n");
      printf("%-46s %9s  %-19s %6s  %9s  %6s  %s\n", "case", "median", "smallest - largest", "rounds", "limit", "share",
             "limit is");
      group = this_group;
    }
    sample_spread rate;
    sample_spread limit;
    sample_spread share;
    summarise(item, &rate, &limit, &share);
    char range[40];
    snprintf(range, sizeof(range), "%.4g - %.4g", rate.smallest, rate.largest);
    printf("%-46s %9.4g  %-19s %6d  ", item->name, rate.median, range, item->rounds);
    if (limit.median > 0.0)
      printf("%9.4g  %5.1f%%  %s\n", limit.median, 100.0 * share.median, limit_name(item));
    else
      printf("%9s  %6s  not measured\n", "-", "-");
  }
}

static void write_spread(const char *name, const sample_spread *spread) {
  printf(", \"%s\": ", name);
  if (spread->median <= 0.0) {
    fputs("null", stdout);
    return;
  }
  fputs("{\"median\": ", stdout);
  fp8lm_json_write_number(stdout, spread->median);
  fputs(", \"smallest\": ", stdout);
  fp8lm_json_write_number(stdout, spread->smallest);
  fputs(", \"largest\": ", stdout);
  fp8lm_json_write_number(stdout, spread->largest);
  fputc('}', stdout);
}

static void write_json(const bench_run *bench) {
  printf(
    "{\"version\": \"%s\", \"libfp8core\": \"%s\", \"threads\": %d, \"best_isa\": \"%s\", \"cpu_features\": %" PRIu32
    ", \"results\": [",
    FP8LM_VERSION, fp8core_version(), cpu_threads(bench), fp8core_isa_name(fp8core_isa_best()), fp8core_cpu_features());
  for (size_t i = 0; i < bench->case_count; i++) {
    const bench_case *item = &bench->cases[i];
    char device[32];
    device_name(device, sizeof(device), item->device->device);
    printf("%s\n  {\"name\": \"%s\", \"group\": \"%s\", \"device\": \"%s\", \"isa\": \"%s\"", i ? "," : "", item->name,
           item->cast ? "cast" : "gemm", device, fp8core_isa_name(fp8core_context_isa(item->context)));
    if (item->cast) {
      printf(", \"elements\": %" PRId64 ", \"bytes\": %.0f, \"unit\": \"GB/s\"", bench->settings->elements, item->work);
    } else {
      printf(", \"m\": %" PRId64 ", \"n\": %" PRId64 ", \"k\": %" PRId64 ", \"unit\": \"GFLOP/s\"", item->shape->m,
             item->shape->n, item->shape->k);
    }
    sample_spread rate;
    sample_spread limit;
    sample_spread share;
    summarise(item, &rate, &limit, &share);
    printf(", \"rounds\": %d", item->rounds);
    write_spread("rate", &rate);
    printf(", \"limit_name\": \"%s\"", limit_name(item));
    write_spread("limit", &limit);
    write_spread("share", &share);
    fputc('}', stdout);
  }
  fputs("\n]}\n", stdout);
}

// Threads that share a CPU wait for each other: a share of such a copy says nothing.
static void warn_of_shared_cpus(const bench_run *bench) {
  cpu_set_t allowed;
  const int threads = cpu_threads(bench);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  if (threads > CPU_COUNT(&allowed))
    fp8lm_complain(0, PREFIX, "warning: %d threads on %d CPU%s: rates and shares depend on how they take turns",
                   threads, CPU_COUNT(&allowed), CPU_COUNT(&allowed) == 1 ? "" : "s");
}

static int run_bench(const bench_settings *settings) {
  bench_run bench = {.settings = settings};
  const int gpus = settings->want_cuda ? fp8core_device_count(FP8CORE_DEVICE_CUDA) : 0;
  const size_t devices = 2 + (size_t)(gpus > 0 ? gpus : 0);
  const size_t tiers = FP8CORE_ISA_AVX512_BF16 + 1;
  bench.devices = calloc(devices, sizeof(*bench.devices));
  bench.cases = calloc(devices * tiers * (COUNT_OF(cast_kinds) + COUNT_OF(gemm_kinds) * COUNT_OF(gemm_shapes)),
                       sizeof(*bench.cases));
  int result = FP8LM_EXIT_FAILURE;
  if (!bench.devices || !bench.cases) {
    fp8lm_complain(0, PREFIX, "cannot allocate the list of cases");
  } else if (create_devices(&bench) != 0) {
    fp8lm_complain(0, PREFIX, "%s", fp8core_last_error());
  } else {
    list_cases(&bench);
    if (settings->filter) filter_cases(&bench);
    fp8core_status status = FP8CORE_OK;
    if (bench.case_count == 0) {
      result = fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                              "no case's name contains --filter '%s'; --list prints the names", settings->pattern);
    } else if (settings->list) {
      for (size_t i = 0; i < bench.case_count; i++) puts(bench.cases[i].name);
      result = FP8LM_EXIT_SUCCESS;
    } else {
      warn_of_shared_cpus(&bench);
      for (int i = 0; i < bench.device_count && status == FP8CORE_OK; i++)
        status = prepare_device(&bench, &bench.devices[i]);
      if (status != FP8CORE_OK) {
        fp8lm_complain(0, PREFIX, "%s", fp8core_last_error());
      } else if (run_cases(&bench) == 0) {
        if (settings->json)
          write_json(&bench);
        else
          print_tables(&bench);
        result = FP8LM_EXIT_SUCCESS;
      }
    }
  }
  for (int i = 0; i < bench.device_count; i++) release_device(&bench.devices[i]);
  free(bench.devices);
  free(bench.cases);
  return result;
}

static int parse_device(bench_settings *settings, const char *text) {
  settings->want_cpu = strcmp(text, "cpu") == 0 || strcmp(text, "all") == 0;
  settings->want_cuda = strcmp(text, "all") == 0 || strncmp(text, "cuda", 4) == 0;
  settings->cuda_required = settings->want_cuda && !settings->want_cpu;
  settings->cuda_index = -1;
  if (strncmp(text, "cuda:", 5) == 0) {
    int64_t index;
    if (fp8lm_parse_integer(PREFIX, "the number of --device cuda:N", text + 5, 0, 1023, &index) != 0) return -1;
    settings->cuda_index = (int)index;
    return 0;
  }
  if (!settings->want_cpu && strcmp(text, "cuda") != 0) {
    return fp8lm_complain(-1, PREFIX, "--device is '%s', expected cpu, cuda, cuda:N or all", text);
  }
  return 0;
}

static int parse_isa(bench_settings *settings, const char *text) {
  for (int isa = FP8CORE_ISA_SCALAR; isa <= FP8CORE_ISA_AVX512_BF16; isa++) {
    if (strcmp(text, fp8core_isa_name((fp8core_isa)isa)) == 0) {
      settings->isa = (fp8core_isa)isa;
      return 0;
    }
  }
  return fp8lm_complain(-1, PREFIX, "--isa is '%s', expected scalar, avx2, avx512 or avx512-bf16", text);
}

static int parse_filter(bench_settings *settings, const char *text) {
  const size_t size = strlen(text) + 3;
  free(settings->filter);
  settings->filter = malloc(size);
  if (!settings->filter) return fp8lm_complain(-1, PREFIX, "cannot allocate the filter");
  settings->pattern = text;
  snprintf(settings->filter, size, "*%s*", text);
  return 0;
}

enum {
  OPTION_DEVICE = 256,
  OPTION_ISA,
  OPTION_THREADS,
  OPTION_ELEMENTS,
  OPTION_SECONDS,
  OPTION_FILTER,
  OPTION_LIST,
  OPTION_JSON,
  OPTION_HELP
};

static const struct option options[] = {
  {"device", required_argument, NULL, OPTION_DEVICE},
  {"isa", required_argument, NULL, OPTION_ISA},
  {"threads", required_argument, NULL, OPTION_THREADS},
  {"elements", required_argument, NULL, OPTION_ELEMENTS},
  {"seconds", required_argument, NULL, OPTION_SECONDS},
  {"filter", required_argument, NULL, OPTION_FILTER},
  {"list", no_argument, NULL, OPTION_LIST},
  {"json", no_argument, NULL, OPTION_JSON},
  {"help", no_argument, NULL, OPTION_HELP},
  {NULL, 0, NULL, 0},
};

// 0: go on; 1: done (help); -1: wrong usage.
static int parse_options(int argc, char **argv, bench_settings *settings) {
  opterr = 0;
  for (;;) {
    const int option = getopt_long(argc, argv, ":", options, NULL);
    int64_t value = 0;
    int failed = 0;
    switch (option) {
    case -1:
      if (optind == argc) return 0;
      return fp8lm_complain(-1, PREFIX, "unexpected argument '%s'; see '" PREFIX " --help'", argv[optind]);
    case OPTION_HELP: fputs(help_text, stdout); return 1;
    case OPTION_DEVICE: failed = parse_device(settings, optarg); break;
    case OPTION_ISA: failed = parse_isa(settings, optarg); break;
    case OPTION_THREADS:
      failed = fp8lm_parse_integer(PREFIX, "--threads", optarg, 1, 1024, &value);
      settings->threads = (int)value;
      break;
    case OPTION_ELEMENTS:
      failed = fp8lm_parse_integer(PREFIX, "--elements", optarg, CAST_COLUMNS, INT64_C(1) << 40, &settings->elements);
      if (!failed && settings->elements % CAST_COLUMNS != 0) {
        failed = fp8lm_complain(-1, PREFIX, "--elements is '%s', expected a multiple of %d", optarg, CAST_COLUMNS);
      }
      break;
    case OPTION_SECONDS:
      failed = fp8lm_parse_real(PREFIX, "--seconds", optarg, 0.001, 3600.0, &settings->seconds);
      break;
    case OPTION_FILTER: failed = parse_filter(settings, optarg); break;
    case OPTION_LIST: settings->list = 1; break;
    case OPTION_JSON: settings->json = 1; break;
    default: fp8lm_option_error(PREFIX, option, argv, options); return -1;
    }
    if (failed) return -1;
  }
}

int fp8lm_bench_core(int argc, char **argv) {
  bench_settings settings = {.want_cpu = 1,
                             .want_cuda = 1,
                             .cuda_index = -1,
                             .isa = FP8CORE_ISA_AUTO,
                             .elements = INT64_C(1) << 25,
                             .seconds = 0.5};
  const int parsed = parse_options(argc, argv, &settings);
  const int result = parsed > 0 ? FP8LM_EXIT_SUCCESS : parsed < 0 ? FP8LM_EXIT_USAGE : run_bench(&settings);
  free(settings.filter);
  return result;
}
