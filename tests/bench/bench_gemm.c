// Matrix products beside their peers in one run: this library, oneDNN's BF16 matmul with plain layouts and with
// pre-packed weights, and OpenBLAS, each on two threads, and the peak of the instructions. Rounds are interleaved, as
// the speed of a shared machine drifts; medians and best times are over the rounds. Prints a table, or JSON with
// --json. --rounds N: 15 unless given.
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <omp.h>

#include <cblas.h>
#include <dnnl.h>

#include "fp8core/fp8core.h"

#define THREADS 2
#define MAX_ROUNDS 200

extern void openblas_set_num_threads(int threads);

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

#define ON_24(instruction)                                                                                             \
  instruction(0) instruction(1) instruction(2) instruction(3) instruction(4) instruction(5) instruction(6)             \
    instruction(7) instruction(8) instruction(9) instruction(10) instruction(11) instruction(12) instruction(13)       \
      instruction(14) instruction(15) instruction(16) instruction(17) instruction(18) instruction(19) instruction(20)  \
        instruction(21) instruction(22) instruction(23)
#define DOT(number) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #number "\n\t"
#define FMA(number) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #number "\n\t"
#define CLEAR(number) "vpxord %%zmm" #number ", %%zmm" #number ", %%zmm" #number "\n\t"
#define CLOBBERS                                                                                                       \
  "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13",  \
    "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23", "zmm30", "zmm31"

#define PEAK_LOOPS 400000

__attribute__((target("avx512f,avx512bf16"))) static void dot_loop(void) {
  __asm__ volatile(ON_24(CLEAR) CLEAR(30) CLEAR(31)::: CLOBBERS);
  for (int i = 0; i < PEAK_LOOPS; i++) __asm__ volatile(ON_24(DOT)::: CLOBBERS);
}

__attribute__((target("avx512f"))) static void fma_loop(void) {
  __asm__ volatile(ON_24(CLEAR) CLEAR(30) CLEAR(31)::: CLOBBERS);
  for (int i = 0; i < PEAK_LOOPS; i++) __asm__ volatile(ON_24(FMA)::: CLOBBERS);
}

// GFLOP/s of all threads together.
static double peak(void (*loop)(void), double operations) {
  const double start = seconds();
#pragma omp parallel num_threads(THREADS)
  loop();
  return THREADS * PEAK_LOOPS * 24.0 * operations / (seconds() - start) * 1e-9;
}

typedef struct shape {
  const char *name;
  int64_t m;
  int64_t n;
  int64_t k;
  int transpose_a;
  int transpose_b;
  fp8core_dtype a_dtype;
} shape;

static const shape shapes[] = {
  {"forward", 1024, 1024, 1024, 0, 1, FP8CORE_E4M3}, {"forward", 1024, 3072, 768, 0, 1, FP8CORE_E4M3},
  {"forward", 1024, 768, 3072, 0, 1, FP8CORE_E4M3},  {"dX", 1024, 768, 3072, 0, 0, FP8CORE_E5M2},
  {"dW", 3072, 768, 1024, 1, 0, FP8CORE_E5M2},       {"dX", 1024, 3072, 768, 0, 0, FP8CORE_E5M2},
  {"dW", 768, 3072, 1024, 1, 0, FP8CORE_E5M2},
};
#define SHAPES ((int)(sizeof(shapes) / sizeof(shapes[0])))

enum { OURS_FP8, ONEDNN_PLAIN, ONEDNN_PACKED, OURS_FP32, OPENBLAS, DOT_PEAK, FMA_PEAK, CONTENDERS };
static const char *const contender_names[CONTENDERS] = {"fp8core_fp8",  "onednn_bf16_plain", "onednn_bf16_packed",
                                                        "fp8core_fp32", "openblas_fp32",     "peak_bf16_dot",
                                                        "peak_fma"};

typedef struct onednn_product {
  dnnl_primitive_t primitive;
  dnnl_exec_arg_t arguments[3];
} onednn_product;

static dnnl_engine_t engine;
static dnnl_stream_t stream;

static void check_dnnl(dnnl_status_t status, const char *what) {
  if (status == dnnl_success) return;
  fprintf(stderr, "oneDNN: %s: status %d\n", what, (int)status);
  exit(1);
}

static dnnl_memory_desc_t plain_layout(int64_t rows, int64_t columns, int transposed) {
  dnnl_memory_desc_t description;
  const dnnl_dims_t sizes = {rows, columns};
  const dnnl_dims_t strides = {transposed ? 1 : columns, transposed ? rows : 1};
  check_dnnl(dnnl_memory_desc_init_by_strides(&description, 2, sizes, dnnl_bf16, strides), "layout");
  return description;
}

static onednn_product create_onednn(const shape *product, void *a, void *b, void *d, int packed) {
  onednn_product result;
  dnnl_matmul_desc_t description;
  dnnl_primitive_desc_t primitive_description;
  const dnnl_memory_desc_t a_layout = plain_layout(product->m, product->k, product->transpose_a);
  const dnnl_memory_desc_t b_layout = plain_layout(product->k, product->n, product->transpose_b);
  const dnnl_memory_desc_t d_layout = plain_layout(product->m, product->n, 0);
  dnnl_memory_desc_t weights = b_layout;
  const dnnl_dims_t sizes = {product->k, product->n};
  if (packed)
    check_dnnl(dnnl_memory_desc_init_by_tag(&weights, 2, sizes, dnnl_bf16, dnnl_format_tag_any), "any layout");
  check_dnnl(dnnl_matmul_desc_init(&description, &a_layout, &weights, NULL, &d_layout), "matmul");
  check_dnnl(dnnl_primitive_desc_create(&primitive_description, &description, NULL, engine, NULL), "matmul");
  check_dnnl(dnnl_primitive_create(&result.primitive, primitive_description), "matmul");
  dnnl_memory_t memory[3];
  check_dnnl(dnnl_memory_create(&memory[0], &a_layout, engine, a), "memory");
  check_dnnl(dnnl_memory_create(&memory[1], &b_layout, engine, b), "memory");
  check_dnnl(dnnl_memory_create(&memory[2], &d_layout, engine, d), "memory");
  if (packed) {
    const dnnl_memory_desc_t *chosen = dnnl_primitive_desc_query_md(primitive_description, dnnl_query_weights_md, 0);
    dnnl_memory_t reordered;
    dnnl_primitive_desc_t reorder_description;
    dnnl_primitive_t reorder;
    check_dnnl(dnnl_memory_create(&reordered, chosen, engine, DNNL_MEMORY_ALLOCATE), "packed memory");
    check_dnnl(dnnl_reorder_primitive_desc_create(&reorder_description, &b_layout, engine, chosen, engine, NULL),
               "reorder");
    check_dnnl(dnnl_primitive_create(&reorder, reorder_description), "reorder");
    const dnnl_exec_arg_t arguments[2] = {{DNNL_ARG_FROM, memory[1]}, {DNNL_ARG_TO, reordered}};
    check_dnnl(dnnl_primitive_execute(reorder, stream, 2, arguments), "reorder");
    check_dnnl(dnnl_stream_wait(stream), "reorder");
    memory[1] = reordered;
  }
  const int roles[3] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
  for (int i = 0; i < 3; i++) {
    result.arguments[i].arg = roles[i];
    result.arguments[i].memory = memory[i];
  }
  return result;
}

static void *allocate(int64_t bytes) {
  void *memory = aligned_alloc(2 << 20, ((size_t)bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20));
  require(memory != NULL, "allocation");
  return memory;
}

static void fill(void *data, fp8core_dtype dtype, int64_t count) {
  uint64_t state = 1;
  const size_t size = fp8core_dtype_size(dtype);
  for (int64_t i = 0; i < count; i++) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const uint32_t code = fp8core_encode(dtype, (float)(state >> 40) * 0x1p-23f - 1.0f, 1);
    memcpy((unsigned char *)data + (size_t)i * size, &code, size);
  }
}

typedef struct buffers {
  void *fp8[3];
  void *bf16[3];
  float *fp32[3];
} buffers;

static fp8core_gemm_options options_of(const shape *product) {
  fp8core_gemm_options options = fp8core_gemm_options_default();
  options.transpose_a = product->transpose_a;
  options.transpose_b = product->transpose_b;
  return options;
}

static void run_ours(fp8core_context *context, const shape *product, void *const data[3], int fp8) {
  const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
  const int64_t a_rows = product->transpose_a ? product->k : product->m;
  const int64_t b_rows = product->transpose_b ? product->n : product->k;
  const fp8core_tensor a = fp8core_tensor_matrix(data[0], fp8 ? product->a_dtype : FP8CORE_FP32, a_rows,
                                                 product->m * product->k / a_rows, cpu);
  const fp8core_tensor b =
    fp8core_tensor_matrix(data[1], fp8 ? FP8CORE_E4M3 : FP8CORE_FP32, b_rows, product->n * product->k / b_rows, cpu);
  const fp8core_tensor d =
    fp8core_tensor_matrix(data[2], fp8 ? FP8CORE_BF16 : FP8CORE_FP32, product->m, product->n, cpu);
  const fp8core_gemm_options options = options_of(product);
  require(fp8core_gemm(context, &options, &a, &b, NULL, &d) == FP8CORE_OK, "fp8core_gemm");
}

static void run_openblas(const shape *product, float *const data[3]) {
  cblas_sgemm(CblasRowMajor, product->transpose_a ? CblasTrans : CblasNoTrans,
              product->transpose_b ? CblasTrans : CblasNoTrans, (int)product->m, (int)product->n, (int)product->k, 1.0f,
              data[0], (int)(product->transpose_a ? product->m : product->k), data[1],
              (int)(product->transpose_b ? product->k : product->n), 0.0f, data[2], (int)product->n);
}

static void run_contender(int contender, fp8core_context *context, const shape *product, const buffers *data,
                          const onednn_product *plain, const onednn_product *packed) {
  switch (contender) {
  case OURS_FP8: run_ours(context, product, data->fp8, 1); break;
  case ONEDNN_PLAIN:
    check_dnnl(dnnl_primitive_execute(plain->primitive, stream, 3, plain->arguments), "execute");
    break;
  case ONEDNN_PACKED:
    check_dnnl(dnnl_primitive_execute(packed->primitive, stream, 3, packed->arguments), "execute");
    break;
  case OURS_FP32: run_ours(context, product, (void *const *)(const void *)data->fp32, 0); break;
  default: run_openblas(product, data->fp32); break;
  }
}

// OpenBLAS's threads go on spinning for a while, on the core that the next contender needs.
static void pause_after_openblas(void) {
  const struct timespec pause = {0, 60000000};
  nanosleep(&pause, NULL);
}

static void bench_shape(fp8core_context *context, const shape *product, int rounds, int json, int last) {
  static double times[CONTENDERS][MAX_ROUNDS];
  buffers data;
  const int64_t counts[3] = {product->m * product->k, product->k * product->n, product->m * product->n};
  for (int i = 0; i < 3; i++) {
    data.fp8[i] = allocate(counts[i] * 2);
    data.bf16[i] = allocate(counts[i] * 2);
    data.fp32[i] = allocate(counts[i] * 4);
    fill(data.fp8[i], i == 0 ? product->a_dtype : FP8CORE_E4M3, counts[i]);
    fill(data.bf16[i], FP8CORE_BF16, counts[i]);
    fill(data.fp32[i], FP8CORE_FP32, counts[i]);
  }
  const onednn_product plain = create_onednn(product, data.bf16[0], data.bf16[1], data.bf16[2], 0);
  const onednn_product packed = create_onednn(product, data.bf16[0], data.bf16[1], data.bf16[2], 1);
  const double operations = 2e-9 * (double)product->m * (double)product->n * (double)product->k;
  for (int round = 0; round < rounds; round++) {
    times[DOT_PEAK][round] = operations / peak(dot_loop, 64.0);
    times[FMA_PEAK][round] = operations / peak(fma_loop, 32.0);
    for (int contender = OURS_FP8; contender <= OPENBLAS; contender++) {
      run_contender(contender, context, product, &data, &plain, &packed);
      double best = 1e30;
      for (int i = 0; i < 3; i++) {
        const double start = seconds();
        run_contender(contender, context, product, &data, &plain, &packed);
        const double time = seconds() - start;
        if (time < best) best = time;
      }
      times[contender][round] = best;
      if (contender == OPENBLAS) pause_after_openblas();
    }
  }
  double median[CONTENDERS];
  double best[CONTENDERS];
  for (int contender = 0; contender < CONTENDERS; contender++) {
    qsort(times[contender], (size_t)rounds, sizeof(double), compare_doubles);
    median[contender] = operations / times[contender][rounds / 2];
    best[contender] = operations / times[contender][0];
  }
  if (json) {
    printf("  {\"product\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, \"gflops\": {", product->name,
           (long long)product->m, (long long)product->n, (long long)product->k);
    for (int contender = 0; contender < CONTENDERS; contender++)
      printf("%s\"%s\": {\"median\": %.1f, \"best\": %.1f}", contender ? ", " : "", contender_names[contender],
             median[contender], best[contender]);
    printf("}}%s\n", last ? "" : ",");
  } else {
    const double *rows[2] = {median, best};
    for (int i = 0; i < 2; i++)
      printf("%-8s %5lld %5lld %5lld %-6s %7.0f %7.0f %7.0f %7.0f  %5.1f%% %6.2f %6.2f | %6.0f %6.0f %6.0f %6.2f\n",
             product->name, (long long)product->m, (long long)product->n, (long long)product->k, i ? "best" : "median",
             rows[i][OURS_FP8], rows[i][ONEDNN_PLAIN], rows[i][ONEDNN_PACKED], rows[i][DOT_PEAK],
             100.0 * rows[i][OURS_FP8] / rows[i][DOT_PEAK], rows[i][OURS_FP8] / rows[i][ONEDNN_PLAIN],
             rows[i][OURS_FP8] / rows[i][ONEDNN_PACKED], rows[i][OURS_FP32], rows[i][OPENBLAS], rows[i][FMA_PEAK],
             rows[i][OURS_FP32] / rows[i][OPENBLAS]);
  }
  fflush(stdout);
  for (int i = 0; i < 3; i++) {
    free(data.fp8[i]);
    free(data.bf16[i]);
    free(data.fp32[i]);
  }
}

int main(int argc, char **argv) {
  int json = 0;
  int rounds = 15;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--json") == 0)
      json = 1;
    else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
      rounds = atoi(argv[++i]);
    else
      rounds = 0;
  }
  if (rounds < 1 || rounds > MAX_ROUNDS) {
    fprintf(stderr, "usage: bench_gemm [--json] [--rounds 1..%d]\n", MAX_ROUNDS);
    return 2;
  }
  if (fp8core_isa_best() < FP8CORE_ISA_AVX512_BF16) {
    fprintf(stderr, "this CPU has no BF16 dot products: nothing to compare\n");
    return 77;
  }
  fp8core_context *context;
  fp8core_context_options options = fp8core_context_options_default();
  options.threads = THREADS;
  require(fp8core_context_create(&context, &options) == FP8CORE_OK, "fp8core_context_create");
  omp_set_num_threads(THREADS);
  openblas_set_num_threads(THREADS);
  check_dnnl(dnnl_engine_create(&engine, dnnl_cpu, 0), "engine");
  check_dnnl(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "stream");
  if (json)
    printf("[\n");
  else
    printf("GFLOP/s, %d threads\nproduct      M     N     K           FP8   plain  packed    peak of peak /plain "
           "/packed |   FP32 OpenBLAS peak ratio\n",
           THREADS);
  for (int i = 0; i < SHAPES; i++) bench_shape(context, &shapes[i], rounds, json, i == SHAPES - 1);
  if (json) printf("]\n");
  fp8core_context_destroy(&context);
  return 0;
}
