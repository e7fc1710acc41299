#include "cpu/gemm.h"

#include <string.h>

#include "cpu/cpu.h"

#if defined(_OPENMP)
#  include <omp.h>
#endif

// Packed operands of at most this many bytes are shared by all threads at a time: a share of the last-level cache.
#define SHARED_BYTES ((int64_t)24 << 20)
// Below this many multiplications, starting threads costs more than it saves.
#define PARALLEL_PRODUCTS ((int64_t)1 << 19)
// A shared phase hands out tasks in the order in which threads ask; this many a thread even out their speeds.
#define TASKS_PER_THREAD 6
// Rows whose column sums are one partial sum: a fixed number of panels, so that the order of additions is fixed too.
#define GROUP_PANELS 8
#define PACK_B_PANELS 4
// Bytes of a task's packed A: less than half of a second-level cache of 1 MiB, so that it stays there for all columns.
#define TASK_A_BYTES ((int64_t)448 << 10)
// Panels of A of a task. With fewer, one of B is used too seldom once it is read.
#define LEAST_TASK_ROWS 6
#define MOST_TASK_ROWS 32
// Panels of B that are packed at a time. With fewer, A is packed too often.
#define LEAST_SHARED_COLUMNS 16
// Bytes of the sums that a task keeps from one chunk of K to the next.
#define TASK_SUM_BYTES ((int64_t)1 << 20)
#define CACHE_LINE 64

typedef struct gemm_plan {
  const fp8core_gemm_job *job;
  const fp8core_gemm_kernels *kernels;
  // Threads that share one product; each works on a product of its own when `separate`.
  int threads;
  int separate;
  int64_t block_k;
  int64_t blocks_k;
  // Blocks of K of which a task packs A at a time.
  int64_t chunk_blocks;
  int64_t row_panels;
  int64_t column_panels;
  // Panels of B that are packed at a time.
  int64_t shared_columns;
  // The rows are cut into this many parts; the most panels of a task.
  int64_t row_parts;
  int64_t task_rows;
  int64_t task_columns;
  // A panel of B that only one task reads (or one too large to keep) is packed by the task itself, block by block.
  int pack_b_in_task;
  int64_t a_panel_stride;
  int64_t b_panel_stride;
  // Bytes of a team's packed B, and of a thread's own scratch memory.
  int64_t b_bytes;
  int64_t scratch_bytes;
  int64_t scratch_a;
  int64_t scratch_b;
  double factor;
  float *bias;
  // [batch, groups, N]
  float *column_sums;
  int64_t groups;
} gemm_plan;

typedef struct gemm_team {
  const gemm_plan *plan;
  int rank;
  int size;
  // Shared by the team: the next task. Every thread draws one beyond the end of a phase, so a phase of `tasks` advances
  // it by `tasks` plus the size of the team, and all threads know where the next one starts.
  int64_t *ticket;
  int64_t phase_start;
  unsigned char *packed_b;
  unsigned char *scratch;
  fp8core_gemm_maxima maxima;
} gemm_team;

static int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// The part of the result that one call of the packing and computing phases works on, in panels.
typedef struct gemm_area {
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
} gemm_area;

typedef struct gemm_product {
  // The product's part of the plan's; NULL: not wanted.
  float *column_sums;
  fp8core_gemm_operand a;
  fp8core_gemm_operand b;
  fp8core_gemm_epilogue epilogue;
} gemm_product;

static int64_t next_task(gemm_team *team) {
  return __atomic_fetch_add(team->ticket, 1, __ATOMIC_RELAXED) - team->phase_start;
}

static void end_phase(gemm_team *team, int64_t tasks) {
  team->phase_start += tasks + team->size;
  if (team->size > 1) {
#if defined(_OPENMP)
#  pragma omp barrier
#endif
  }
}

// Start of part `index` of `parts` nearly equal parts of `count`.
static int64_t part_start(int64_t count, int64_t parts, int64_t index) { return index * count / parts; }

static int64_t block_length(const gemm_plan *plan, int64_t block) {
  return minimum(plan->job->k - block * plan->block_k, plan->block_k);
}

static void pack_a(const gemm_plan *plan, const gemm_product *product, int64_t panel, int64_t panels, int64_t block,
                   unsigned char *packed) {
  const int64_t width = plan->kernels->rows;
  const int64_t first = panel * width;
  if (plan->job->k == 0) return;
  plan->kernels->pack_a(&product->a, first, minimum(panels * width, plan->job->m - first), block * plan->block_k,
                        block_length(plan, block), packed, plan->a_panel_stride);
}

// Blocks of a panel follow each other in the packed B.
static void pack_b(const gemm_plan *plan, const gemm_product *product, int64_t panel, int64_t panels, int64_t block,
                   unsigned char *packed) {
  const int64_t width = plan->kernels->columns;
  const int64_t first = panel * width;
  if (plan->job->k == 0) return;
  plan->kernels->pack_b(&product->b, first, minimum(panels * width, plan->job->n - first), block * plan->block_k,
                        block_length(plan, block), packed, plan->blocks_k * plan->b_panel_stride);
}

static void packing_phase(gemm_team *team, const gemm_product *product, int64_t column, int64_t columns) {
  const gemm_plan *plan = team->plan;
  const int64_t groups = divide_up(columns, PACK_B_PANELS);
  const int64_t tasks = groups * plan->blocks_k;
  for (int64_t task = next_task(team); task < tasks; task = next_task(team)) {
    const int64_t block = task % plan->blocks_k;
    const int64_t panel = task / plan->blocks_k * PACK_B_PANELS;
    pack_b(plan, product, column + panel, minimum(PACK_B_PANELS, columns - panel), block,
           team->packed_b + (panel * plan->blocks_k + block) * plan->b_panel_stride);
  }
  end_phase(team, tasks);
}

static void prefetch_rows(const unsigned char *first, int64_t stride, int rows) {
  for (int row = 0; row < rows; row++) __builtin_prefetch(first + row * stride, 1);
}

static void finish_tile(gemm_team *team, const gemm_product *product, float *sums, int64_t row_panel,
                        int64_t column_panel, int rows, int columns) {
  const gemm_plan *plan = team->plan;
  const int tile_columns = plan->kernels->columns;
  fp8core_gemm_tile tile;
  tile.sums = sums;
  tile.row = row_panel * plan->kernels->rows;
  tile.column = column_panel * tile_columns;
  tile.rows = rows;
  tile.columns = columns;
  tile.column_sums = NULL;
  if (!fp8core_gemm_factor_fits(plan->factor))
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < columns; column++)
        sums[row * tile_columns + column] = (float)((double)sums[row * tile_columns + column] * plan->factor);
  if (product->column_sums) {
    tile.column_sums = product->column_sums + row_panel / GROUP_PANELS * plan->job->n + tile.column;
    if (row_panel % GROUP_PANELS == 0) memset(tile.column_sums, 0, (size_t)columns * sizeof(float));
  }
  plan->kernels->finish(&product->epilogue, &tile, &team->maxima);
}

// One part of the result, whole: all of K, then the epilogue. `first_column` is the first panel of the packed B.
static void compute_task(gemm_team *team, const gemm_product *product, int64_t first_column, const gemm_area *part) {
  const gemm_plan *plan = team->plan;
  const fp8core_gemm_kernels *kernels = plan->kernels;
  const int64_t tile_floats = (int64_t)kernels->rows * kernels->columns;
  const int64_t d_bytes = (int64_t)fp8core_dtype_size(product->epilogue.d_dtype);
  float *tiles = (float *)(void *)team->scratch;
  unsigned char *packed_a = team->scratch + plan->scratch_a;
  unsigned char *own_b = team->scratch + plan->scratch_b;
  for (int64_t chunk = 0; chunk < plan->blocks_k; chunk += plan->chunk_blocks) {
    const int64_t chunk_end = minimum(chunk + plan->chunk_blocks, plan->blocks_k);
    for (int64_t block = chunk; block < chunk_end; block++)
      pack_a(plan, product, part->row, part->rows, block,
             packed_a + (block - chunk) * plan->task_rows * plan->a_panel_stride);
    for (int64_t j = 0; j < part->columns; j++) {
      const int64_t column_panel = part->column + j;
      const int columns = (int)minimum(kernels->columns, plan->job->n - column_panel * kernels->columns);
      const unsigned char *packed_b =
        team->packed_b + (column_panel - first_column) * plan->blocks_k * plan->b_panel_stride;
      float *column_tiles = plan->chunk_blocks < plan->blocks_k ? tiles + j * plan->task_rows * tile_floats : tiles;
      for (int64_t block = chunk; block < chunk_end; block++) {
        const int last_block = block == plan->blocks_k - 1;
        const int64_t k = block_length(plan, block);
        const unsigned char *a = packed_a + (block - chunk) * plan->task_rows * plan->a_panel_stride;
        const unsigned char *b = packed_b + block * plan->b_panel_stride;
        if (plan->pack_b_in_task) {
          b = own_b;
          pack_b(plan, product, column_panel, 1, block, own_b);
        }
        for (int64_t i = 0; i < part->rows; i++) {
          const int64_t row_panel = part->row + i;
          const int rows = (int)minimum(kernels->rows, plan->job->m - row_panel * kernels->rows);
          float *tile = column_tiles + i * tile_floats;
          if (last_block)
            prefetch_rows(product->epilogue.d +
                            (row_panel * kernels->rows * product->epilogue.d_stride + column_panel * kernels->columns) *
                              d_bytes,
                          product->epilogue.d_stride * d_bytes, rows);
          kernels->multiply(rows, columns, k, a + i * plan->a_panel_stride, b, tile, block > 0);
          if (last_block) finish_tile(team, product, tile, row_panel, column_panel, rows, columns);
        }
      }
    }
  }
}

// Groups of rows are never split: their column sums belong to one task.
static int64_t row_unit(const fp8core_gemm_job *job) { return job->bias_gradient.data ? GROUP_PANELS : 1; }

static void compute_phase(gemm_team *team, const gemm_product *product, int64_t column, int64_t columns) {
  const gemm_plan *plan = team->plan;
  const int64_t unit = row_unit(plan->job);
  const int64_t units = divide_up(plan->row_panels, unit);
  const int64_t column_parts = divide_up(columns, plan->task_columns);
  const int64_t tasks = plan->row_parts * column_parts;
  for (int64_t task = next_task(team); task < tasks; task = next_task(team)) {
    const int64_t i = task % plan->row_parts;
    const int64_t j = task / plan->row_parts;
    gemm_area part;
    part.row = part_start(units, plan->row_parts, i) * unit;
    part.rows = minimum(part_start(units, plan->row_parts, i + 1) * unit, plan->row_panels) - part.row;
    part.column = column + part_start(columns, column_parts, j);
    part.columns = column + part_start(columns, column_parts, j + 1) - part.column;
    compute_task(team, product, column, &part);
  }
  end_phase(team, tasks);
}

static gemm_product product_of(const gemm_plan *plan, int64_t index) {
  const fp8core_gemm_job *job = plan->job;
  const fp8core_gemm_options *options = &job->options;
  const int64_t a_size = (int64_t)fp8core_dtype_size(job->a.dtype);
  const int64_t b_size = (int64_t)fp8core_dtype_size(job->b.dtype);
  const int64_t c_size = (int64_t)fp8core_dtype_size(job->c.dtype);
  const int64_t d_size = (int64_t)fp8core_dtype_size(job->d.dtype);
  const int64_t auxiliary_size = (int64_t)fp8core_dtype_size(job->auxiliary.dtype);
  gemm_product product;
  product.column_sums = plan->column_sums ? plan->column_sums + index * plan->groups * job->n : NULL;
  // Without K the operands may be NULL; nothing is packed then.
  product.a.data = job->k ? (const unsigned char *)job->a.data + index * options->batch_stride_a * a_size : NULL;
  product.a.dtype = job->a.dtype;
  product.a.k_contiguous = !options->transpose_a;
  product.a.stride = job->a.row_stride * a_size;
  product.b.data = job->k ? (const unsigned char *)job->b.data + index * options->batch_stride_b * b_size : NULL;
  product.b.dtype = job->b.dtype;
  product.b.k_contiguous = options->transpose_b != 0;
  product.b.stride = job->b.row_stride * b_size;
  fp8core_gemm_epilogue *epilogue = &product.epilogue;
  epilogue->activation = options->epilogue;
  epilogue->factor = fp8core_gemm_factor_fits(plan->factor) ? (float)plan->factor : 1.0f;
  epilogue->beta = options->beta;
  epilogue->c = job->c.data ? (const unsigned char *)job->c.data + index * options->batch_stride_c * c_size : NULL;
  epilogue->c_dtype = job->c.dtype;
  epilogue->c_stride = job->c.row_stride;
  epilogue->c_scale_inverse = fp8core_scale_of(job->c.scale_inverse);
  epilogue->d = (unsigned char *)job->d.data + index * options->batch_stride_d * d_size;
  epilogue->d_dtype = job->d.dtype;
  epilogue->d_stride = job->d.row_stride;
  epilogue->d_scale = fp8core_scale_of(job->d.scale);
  epilogue->bias = plan->bias;
  epilogue->auxiliary = job->auxiliary.data ? (unsigned char *)job->auxiliary.data +
                                                index * options->batch_stride_auxiliary * auxiliary_size
                                            : NULL;
  epilogue->auxiliary_dtype = job->auxiliary.dtype;
  epilogue->auxiliary_stride = job->auxiliary.row_stride;
  epilogue->auxiliary_scale = fp8core_scale_of(job->auxiliary.scale);
  epilogue->auxiliary_scale_inverse = fp8core_scale_of(job->auxiliary.scale_inverse);
  return product;
}

static void run_product(gemm_team *team, int64_t index) {
  const gemm_plan *plan = team->plan;
  const gemm_product product = product_of(plan, index);
  for (int64_t column = 0; column < plan->column_panels; column += plan->shared_columns) {
    const int64_t columns = minimum(plan->shared_columns, plan->column_panels - column);
    if (!plan->pack_b_in_task) packing_phase(team, &product, column, columns);
    compute_phase(team, &product, column, columns);
  }
}

static void choose_tasks(gemm_plan *plan) {
  const fp8core_gemm_kernels *kernels = plan->kernels;
  const int64_t tile_bytes = (int64_t)kernels->rows * kernels->columns * (int64_t)sizeof(float);
  const int64_t unit = row_unit(plan->job);
  const int64_t units = divide_up(plan->row_panels, unit);
  const int64_t fitting_blocks = maximum(TASK_A_BYTES / (maximum(LEAST_TASK_ROWS, unit) * plan->a_panel_stride), 1);
  const int64_t chunks = divide_up(plan->blocks_k, fitting_blocks);
  plan->chunk_blocks = divide_up(plan->blocks_k, chunks);
  const int64_t fitting_rows = minimum(TASK_A_BYTES / (plan->chunk_blocks * plan->a_panel_stride), MOST_TASK_ROWS);
  plan->row_parts = divide_up(units, maximum(fitting_rows / unit, 1));
  plan->task_columns = plan->shared_columns;
  if (chunks > 1)
    plan->task_columns =
      minimum(plan->task_columns, TASK_SUM_BYTES / (tile_bytes * divide_up(units, plan->row_parts) * unit));
  if (plan->threads > 1) {
    const int64_t wanted = plan->threads * TASKS_PER_THREAD;
    int64_t column_parts = divide_up(plan->column_panels, plan->task_columns);
    // Rows first: A is packed once for each part of the columns.
    const int64_t most_parts = maximum(plan->row_panels / maximum(LEAST_TASK_ROWS, unit), 1);
    plan->row_parts = maximum(plan->row_parts, minimum(most_parts, divide_up(wanted, column_parts)));
    if (round_up(plan->row_parts, plan->threads) <= units) plan->row_parts = round_up(plan->row_parts, plan->threads);
    if (plan->row_parts * column_parts < wanted)
      column_parts = minimum(divide_up(wanted, plan->row_parts), plan->column_panels);
    plan->task_columns = minimum(plan->task_columns, divide_up(plan->column_panels, column_parts));
  }
  plan->task_rows = divide_up(units, plan->row_parts) * unit;
}

// Padding keeps panels, whose sizes are often powers of two, from competing for the same cache sets.
static int64_t panel_stride(const gemm_plan *plan, int64_t width) {
  return round_up(plan->block_k * width * plan->kernels->packed_bytes, CACHE_LINE) + CACHE_LINE;
}

static void choose_blocks(gemm_plan *plan) {
  const fp8core_gemm_job *job = plan->job;
  const fp8core_gemm_kernels *kernels = plan->kernels;
  // Whole blocks of 64 suit the packing of 64-byte rows.
  plan->blocks_k = job->k == 0 ? 1 : divide_up(job->k, kernels->block_k);
  plan->block_k =
    job->k <= kernels->block_k ? round_up(job->k, kernels->k_unit) : round_up(divide_up(job->k, plan->blocks_k), 64);
  if (job->k != 0) plan->blocks_k = divide_up(job->k, plan->block_k);
  plan->row_panels = divide_up(job->m, kernels->rows);
  plan->column_panels = divide_up(job->n, kernels->columns);
  plan->a_panel_stride = panel_stride(plan, kernels->rows);
  plan->b_panel_stride = panel_stride(plan, kernels->columns);
  const int64_t b_bytes = plan->b_panel_stride * plan->blocks_k;
  plan->shared_columns = minimum(SHARED_BYTES / (plan->separate ? 8 : 1) / b_bytes, plan->column_panels);
  // K is so long that few panels fit: a task packs a block of K at a time.
  plan->pack_b_in_task = plan->shared_columns < minimum(LEAST_SHARED_COLUMNS, plan->column_panels);
  if (plan->pack_b_in_task) plan->shared_columns = plan->column_panels;
  // Nearly equal parts: a small last one would pack much for little work.
  plan->shared_columns = divide_up(plan->column_panels, divide_up(plan->column_panels, plan->shared_columns));
  choose_tasks(plan);
  if (plan->row_parts == 1) {
    plan->pack_b_in_task = 1;
    plan->shared_columns = plan->column_panels;
  }
  plan->b_bytes = plan->pack_b_in_task ? 0 : plan->shared_columns * b_bytes;
  const int64_t kept_columns = plan->chunk_blocks < plan->blocks_k ? plan->task_columns : 1;
  plan->scratch_a = kept_columns * plan->task_rows * kernels->rows * kernels->columns * (int64_t)sizeof(float);
  plan->scratch_b = plan->scratch_a + plan->chunk_blocks * plan->task_rows * plan->a_panel_stride;
  plan->scratch_bytes =
    round_up(plan->scratch_b + (plan->pack_b_in_task ? plan->b_panel_stride : 0), 4096) + CACHE_LINE;
}

static const fp8core_gemm_kernels *choose_kernels(const fp8core_context *context, const fp8core_gemm_job *job) {
  const fp8core_gemm_kernels *kernels = &fp8core_gemm_scalar;
#if defined(FP8CORE_HAVE_AVX2)
  if (context->isa >= FP8CORE_ISA_AVX2) kernels = &fp8core_gemm_avx2;
#endif
#if defined(FP8CORE_HAVE_AVX512)
  if (context->isa >= FP8CORE_ISA_AVX512) kernels = &fp8core_gemm_avx512;
#endif
#if defined(FP8CORE_HAVE_AVX512_BF16)
  // FP16 has more bits than BF16 keeps.
  if (context->isa >= FP8CORE_ISA_AVX512_BF16 && job->a.dtype <= FP8CORE_BF16 && job->b.dtype <= FP8CORE_BF16)
    kernels = &fp8core_gemm_avx512_bf16;
#endif
  (void)context;
  (void)job;
  return kernels;
}

static int choose_threads(const fp8core_context *context, const fp8core_gemm_job *job) {
  double products = (double)job->m * (double)job->n * (double)job->k * (double)job->options.batch;
  return products < (double)PARALLEL_PRODUCTS ? 1 : fp8core_usable_threads(context);
}

static void store_bias_gradient(const gemm_plan *plan) {
  const fp8core_tensor *gradient = &plan->job->bias_gradient;
  const int64_t n = plan->job->n;
  const int64_t groups = plan->job->options.batch * plan->groups;
  const float scale = fp8core_scale_of(gradient->scale);
  float *total = plan->column_sums;
  uint32_t largest = 0;
  for (int64_t group = 1; group < groups; group++)
    for (int64_t column = 0; column < n; column++) total[column] += plan->column_sums[group * n + column];
  for (int64_t column = 0; column < n; column++) {
    const uint32_t magnitude = fp8core_float_bits(total[column]) & FP8CORE_F32_MAGNITUDE;
    if (magnitude > largest) largest = magnitude;
    fp8core_store_element(FP8CORE_FP32, gradient->data, column, total[column] * scale);
  }
  fp8core_raise_amax(gradient->amax, largest);
}

// Everything that a thread does: its share of one product after the other, or whole products of its own.
static void run_thread(const gemm_plan *plan, unsigned char *memory, int64_t *ticket, fp8core_gemm_maxima *maxima,
                       int rank, int size) {
  unsigned char *scratches = memory + (plan->separate ? plan->b_bytes * plan->threads : plan->b_bytes);
  int64_t own_ticket = 0;
  gemm_team team;
  memset(&team, 0, sizeof(team));
  team.plan = plan;
  team.rank = plan->separate ? 0 : rank;
  team.size = plan->separate ? 1 : size;
  team.ticket = plan->separate ? &own_ticket : ticket;
  team.packed_b = memory + (plan->separate ? plan->b_bytes * rank : 0);
  team.scratch = scratches + rank * plan->scratch_bytes;
  if (plan->separate) {
    for (int64_t index = __atomic_fetch_add(ticket, 1, __ATOMIC_RELAXED); index < plan->job->options.batch;
         index = __atomic_fetch_add(ticket, 1, __ATOMIC_RELAXED))
      run_product(&team, index);
  } else {
    for (int64_t index = 0; index < plan->job->options.batch; index++) run_product(&team, index);
  }
  maxima[rank] = team.maxima;
}

fp8core_status fp8core_cpu_gemm(fp8core_context *context, const fp8core_gemm_job *job) {
  gemm_plan plan;
  memset(&plan, 0, sizeof(plan));
  plan.job = job;
  plan.kernels = choose_kernels(context, job);
  plan.factor = fp8core_gemm_factor(job->options.alpha, job->a.scale_inverse, job->b.scale_inverse);
  const int threads = choose_threads(context, job);
  plan.separate = threads > 1 && job->options.batch >= threads &&
                  (job->options.batch >= 4 * threads || job->options.batch % threads == 0);
  plan.threads = plan.separate ? 1 : threads;
  choose_blocks(&plan);
  plan.threads = threads;
  const int64_t bias_bytes = job->bias.data ? round_up(job->n * (int64_t)sizeof(float), 4096) : 0;
  plan.groups = divide_up(plan.row_panels, GROUP_PANELS);
  const int64_t sums_bytes =
    job->bias_gradient.data ? round_up(job->options.batch * plan.groups * job->n * (int64_t)sizeof(float), 4096) : 0;
  const int64_t maxima_bytes = round_up(threads * (int64_t)sizeof(fp8core_gemm_maxima) + CACHE_LINE, 4096);
  const int64_t bytes = bias_bytes + sums_bytes + maxima_bytes +
                        (plan.separate ? plan.b_bytes * threads : plan.b_bytes) + plan.scratch_bytes * threads;
  void *workspace;
  FP8CORE_TRY(fp8core_workspace(context, (size_t)bytes, &workspace));
  unsigned char *memory = workspace;
  // The ticket has a cache line of its own.
  int64_t *ticket = (int64_t *)(void *)memory;
  fp8core_gemm_maxima *maxima = (fp8core_gemm_maxima *)(void *)(memory + CACHE_LINE);
  memory += maxima_bytes;
  if (job->bias.data) {
    const float scale_inverse = fp8core_scale_of(job->bias.scale_inverse);
    plan.bias = (float *)(void *)memory;
    for (int64_t i = 0; i < job->n; i++)
      plan.bias[i] = fp8core_load_element(job->bias.dtype, job->bias.data, i) * scale_inverse;
    memory += bias_bytes;
  }
  if (job->bias_gradient.data) {
    plan.column_sums = (float *)(void *)memory;
    memory += sums_bytes;
  }
  *ticket = 0;
  memset(maxima, 0, (size_t)threads * sizeof(*maxima));
#if defined(_OPENMP)
#  pragma omp parallel num_threads(threads) if (threads > 1)
  run_thread(&plan, memory, ticket, maxima, omp_get_thread_num(), omp_get_num_threads());
#else
  run_thread(&plan, memory, ticket, maxima, 0, 1);
#endif
  for (int i = 1; i < threads; i++) {
    if (maxima[i].d > maxima[0].d) maxima[0].d = maxima[i].d;
    if (maxima[i].auxiliary > maxima[0].auxiliary) maxima[0].auxiliary = maxima[i].auxiliary;
  }
  fp8core_raise_amax(job->d.amax, maxima[0].d);
  if (job->options.epilogue == FP8CORE_EPILOGUE_RELU || job->options.epilogue == FP8CORE_EPILOGUE_GELU)
    fp8core_raise_amax(job->auxiliary.amax, maxima[0].auxiliary);
  if (plan.column_sums) store_bias_gradient(&plan);
  return FP8CORE_OK;
}
