// Casts on the CPU: which kernel runs on which elements, in which thread.
#include "cast.h"

#include <string.h>

#include "cpu.h"
#include "numerics.h"

// Elements below which starting threads costs more than they save: some tens of microseconds of one thread.
#define PARALLEL_ELEMENTS (INT64_C(1) << 17)
// Elements that an in-place cast to a narrower format does in one thread before there is room for several.
#define IN_PLACE_START (INT64_C(1) << 15)
// The kernels count in 32 bits a lane.
#define KERNEL_ELEMENTS (INT64_C(1) << 30)
// Source and destination bytes together from which the destination is written past the caches: it would not stay in
// them.
#define STREAMING_BYTES (INT64_C(32) << 20)
#define CACHE_LINE 64

static const fp8core_cast_kernels *kernels_of(fp8core_isa isa) {
  const fp8core_cast_kernels *kernels = &fp8core_cast_scalar;
#if defined(FP8CORE_HAVE_AVX2)
  if (isa >= FP8CORE_ISA_AVX2) kernels = &fp8core_cast_avx2;
#endif
#if defined(FP8CORE_HAVE_AVX512)
  // BF16's own instructions take subnormals as zero, so casts gain nothing from the tier above.
  if (isa >= FP8CORE_ISA_AVX512) kernels = &fp8core_cast_avx512;
#endif
  (void)isa;
  return kernels;
}

// The SIMD kernels take the sign from the source, scale magnitudes, and fold 2^8 into the scale of E4M3 sources.
static int scales_are_regular(fp8core_dtype source, float scale_inverse, float scale) {
  const float folded = source == FP8CORE_E4M3 ? scale_inverse * 256.0f : scale_inverse;
  const uint32_t folded_bits = fp8core_float_bits(folded);
  const uint32_t scale_bits = fp8core_float_bits(scale);
  return folded_bits - 1 < FP8CORE_F32_INFINITY - 1 && scale_bits - 1 < FP8CORE_F32_INFINITY - 1;
}

static fp8core_isa isa_for(const fp8core_context *context, fp8core_dtype source, float scale_inverse, float scale) {
  return scales_are_regular(source, scale_inverse, scale) ? context->isa : FP8CORE_ISA_SCALAR;
}

static float value_or_one(const float *pointer) { return pointer ? *pointer : 1.0f; }

static int64_t minimum(int64_t one, int64_t other) { return one < other ? one : other; }

static void add_totals(fp8core_cast_totals *sum, const fp8core_cast_totals *part) {
  sum->amax = part->amax > sum->amax ? part->amax : sum->amax;
  sum->saturated += part->saturated;
  sum->flushed_to_zero += part->flushed_to_zero;
  sum->nonfinite += part->nonfinite;
}

typedef struct cast_plan {
  const fp8core_cast_job *job;
  fp8core_cast_kernel kernel;
  fp8core_transpose_kernel transpose;
  fp8core_copy_kernel copy;
  fp8core_cast_parameters parameters;
  // Of a cast with transpose, the outputs that are written past the caches.
  int streaming_destination;
  int streaming_transposed;
  int64_t source_bytes;
  int64_t destination_bytes;
  int threads;
} cast_plan;

static const unsigned char *source_at(const cast_plan *plan, int64_t row, int64_t column) {
  return (const unsigned char *)plan->job->source.data + (row * plan->job->source.stride + column) * plan->source_bytes;
}

// Elements of one row.
static void cast_run(const cast_plan *plan, const unsigned char *source, unsigned char *destination, int64_t elements,
                     uint64_t first_element, fp8core_cast_totals *totals) {
  fp8core_cast_parameters parameters = plan->parameters;
  while (elements > 0) {
    int64_t part = minimum(elements, KERNEL_ELEMENTS);
    if (plan->parameters.streaming) {
      // Streaming stores want whole lines, which start at a multiple of their size.
      const int64_t misaligned = (int64_t)((uintptr_t)destination % CACHE_LINE);
      const int can_align = misaligned % plan->destination_bytes == 0;
      parameters.streaming = misaligned == 0;
      if (misaligned != 0 && can_align) part = minimum(part, (CACHE_LINE - misaligned) / plan->destination_bytes);
    }
    plan->kernel(&parameters, source, destination, part, first_element, totals);
    source += part * plan->source_bytes;
    destination += part * plan->destination_bytes;
    first_element += (uint64_t)part;
    elements -= part;
  }
}

// Elements [begin, end) of the matrix, row after row.
static void cast_range(const cast_plan *plan, int64_t begin, int64_t end, fp8core_cast_totals *totals) {
  const fp8core_cast_job *job = plan->job;
  int64_t row = begin / job->columns;
  int64_t column = begin % job->columns;
  while (begin < end) {
    const int64_t part = minimum(job->columns - column, end - begin);
    unsigned char *destination =
      (unsigned char *)job->destination.data + (row * job->destination.stride + column) * plan->destination_bytes;
    cast_run(plan, source_at(plan, row, column), destination, part, job->first_element + (uint64_t)begin, totals);
    begin += part;
    column = 0;
    row++;
  }
}

// Units [begin, end) of `unit` elements each, divided among the threads.
static void cast_parallel(const cast_plan *plan, int64_t begin, int64_t end, int64_t unit,
                          fp8core_cast_totals *totals) {
  const int64_t units = (end - begin + unit - 1) / unit;
  const int threads = end - begin < PARALLEL_ELEMENTS ? 1 : (int)minimum(plan->threads, units);
  if (threads == 1) {
    cast_range(plan, begin, end, totals);
    return;
  }
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static, 1) num_threads(threads)
#endif
  for (int thread = 0; thread < threads; thread++) {
    const int64_t share = units / threads;
    const int64_t larger_shares = units % threads;
    const int64_t first = share * thread + minimum(thread, larger_shares);
    const int64_t last = first + share + (thread < larger_shares);
    fp8core_cast_totals part = {0, 0, 0, 0};
    cast_range(plan, begin + first * unit, minimum(begin + last * unit, end), &part);
#if defined(_OPENMP)
#  pragma omp critical(fp8core_cast)
#endif
    add_totals(totals, &part);
  }
}

// In place to a narrower format. Elements [done, ratio * done) are written to where elements [0, done) were read:
// threads are free to divide each such phase.
static void cast_narrowing_in_place(const cast_plan *plan, fp8core_cast_totals *totals) {
  const fp8core_cast_job *job = plan->job;
  if (job->rows > 1) {
    // Rows start at the same bytes, so each is on its own.
    cast_parallel(plan, 0, job->rows * job->columns, job->columns, totals);
    return;
  }
  const int64_t ratio = plan->source_bytes / plan->destination_bytes;
  int64_t done = plan->threads == 1 ? job->columns : minimum(job->columns, IN_PLACE_START);
  cast_range(plan, 0, done, totals);
  while (done < job->columns) {
    const int64_t end = minimum(done * ratio, job->columns);
    cast_parallel(plan, done, end, CACHE_LINE, totals);
    done = end;
  }
}

#define STRIP_ROWS 128
#define STRIP_BYTES 512
// Rows that are read ahead.
#define STRIP_PREFETCH_ROWS 8

// A strip of up to STRIP_ROWS rows, STRIP_BYTES of codes wide: cast into a buffer, from there to both outputs, each of
// which gets several lines that follow one another at a time.
static void cast_transpose_strip(const cast_plan *plan, int64_t row, int64_t column, fp8core_cast_totals *totals) {
  // The distance of the rows is no power of two, so that those of one column do not compete for the same lines of a
  // cache.
  enum { STRIDE = STRIP_BYTES + CACHE_LINE };
  unsigned char codes[STRIP_ROWS * STRIDE] __attribute__((aligned(CACHE_LINE)));
  unsigned char tile[FP8CORE_TILE * FP8CORE_TILE * 4] __attribute__((aligned(CACHE_LINE)));
  const fp8core_cast_job *job = plan->job;
  const int64_t bytes = plan->destination_bytes;
  const int64_t rows = minimum(job->rows - row, STRIP_ROWS);
  const int64_t columns = minimum(job->columns - column, STRIP_BYTES / bytes);
  for (int64_t i = 0; i < rows; i++) {
    unsigned char *from = codes + i * STRIDE;
    plan->kernel(&plan->parameters, source_at(plan, row + i, column), from, columns,
                 job->first_element + (uint64_t)((row + i) * job->columns + column), totals);
    if (job->destination.data) {
      unsigned char *to =
        (unsigned char *)job->destination.data + ((row + i) * job->destination.stride + column) * bytes;
      const int64_t streamed = plan->streaming_destination ? columns * bytes / CACHE_LINE * CACHE_LINE : 0;
      if (streamed > 0) plan->copy(to, from, streamed);
      memcpy(to + streamed, from + streamed, (size_t)(columns * bytes - streamed));
    }
  }
  for (int64_t first_column = 0; first_column < columns; first_column += FP8CORE_TILE) {
    for (int64_t first_row = 0; first_row < rows; first_row += FP8CORE_TILE) {
      const int64_t tile_rows = minimum(rows - first_row, FP8CORE_TILE);
      const int64_t tile_columns = minimum(columns - first_column, FP8CORE_TILE);
      const unsigned char *from = codes + first_row * STRIDE + first_column * bytes;
      unsigned char *to = (unsigned char *)job->transposed.data +
                          ((column + first_column) * job->transposed.stride + row + first_row) * bytes;
      if (tile_rows == FP8CORE_TILE && tile_columns == FP8CORE_TILE) {
        plan->transpose(from, STRIDE, to, job->transposed.stride * bytes, plan->streaming_transposed);
        continue;
      }
      // What lies beyond the edges in `codes` is transposed too, but not copied.
      plan->transpose(from, STRIDE, tile, FP8CORE_TILE * bytes, 0);
      for (int64_t i = 0; i < tile_columns; i++)
        memcpy(to + i * job->transposed.stride * bytes, tile + i * FP8CORE_TILE * bytes, (size_t)(tile_rows * bytes));
    }
  }
}

static int rows_are_aligned(const fp8core_rows *matrix, int64_t bytes) {
  return (uintptr_t)matrix->data % CACHE_LINE == 0 && matrix->stride * bytes % CACHE_LINE == 0;
}

static void cast_transpose(const cast_plan *plan, fp8core_cast_totals *totals) {
  const fp8core_cast_job *job = plan->job;
  const int64_t strip = STRIP_BYTES / plan->destination_bytes;
  const int64_t strips = (job->columns + strip - 1) / strip;
  const int64_t tasks = (job->rows + STRIP_ROWS - 1) / STRIP_ROWS * strips;
  const int threads = job->rows * job->columns < PARALLEL_ELEMENTS ? 1 : (int)minimum(plan->threads, tasks);
  (void)threads;
#if defined(_OPENMP)
#  pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
    fp8core_cast_totals part = {0, 0, 0, 0};
#if defined(_OPENMP)
#  pragma omp for schedule(static)
#endif
    for (int64_t task = 0; task < tasks; task++)
      cast_transpose_strip(plan, task / strips * STRIP_ROWS, task % strips * strip, &part);
    // Streaming stores are not ordered by a release of a lock.
    if (plan->streaming_destination || plan->streaming_transposed) __atomic_thread_fence(__ATOMIC_SEQ_CST);
#if defined(_OPENMP)
#  pragma omp critical(fp8core_cast)
#endif
    add_totals(totals, &part);
  }
}

fp8core_status fp8core_cpu_cast(fp8core_context *context, const fp8core_cast_job *job) {
  const fp8core_dtype from = job->source.dtype;
  const fp8core_dtype to = job->transposed.data ? job->transposed.dtype : job->destination.dtype;
  const float scale_inverse = value_or_one(job->source.scale_inverse);
  const float scale = value_or_one(job->destination.scale);
  const fp8core_cast_kernels *kernels = kernels_of(isa_for(context, from, scale_inverse, scale));
  cast_plan plan = {
    .job = job,
    .kernel = kernels->cast[from][to][job->stochastic ? 1 : 0],
    .parameters = {.scale_inverse = scale_inverse,
                   .scale = scale,
                   .saturate = job->saturate,
                   .seed = job->seed,
                   .tensor_id = job->tensor_id,
                   .step = job->step,
                   .streaming = 0,
                   .prefetch = FP8CORE_PREFETCH_BYTES},
    .source_bytes = (int64_t)fp8core_dtype_size(from),
    .destination_bytes = (int64_t)fp8core_dtype_size(to),
    .threads = fp8core_usable_threads(context),
  };
  plan.transpose = kernels->transpose[plan.destination_bytes / 2];
  plan.copy = kernels->copy;
  const int64_t elements = job->rows * job->columns;
  fp8core_cast_totals totals = {0, 0, 0, 0};
  const int large = elements >= STREAMING_BYTES / (plan.source_bytes + plan.destination_bytes);
  if (job->transposed.data) {
    plan.parameters.prefetch = STRIP_PREFETCH_ROWS * job->source.stride * plan.source_bytes;
    plan.streaming_destination = large && rows_are_aligned(&job->destination, plan.destination_bytes);
    plan.streaming_transposed = large && rows_are_aligned(&job->transposed, plan.destination_bytes);
    cast_transpose(&plan, &totals);
  } else if (job->in_place_narrowing) {
    cast_narrowing_in_place(&plan, &totals);
  } else {
    plan.parameters.streaming = job->source.data != job->destination.data && !job->stochastic && large;
    cast_parallel(&plan, 0, elements, CACHE_LINE, &totals);
  }
  fp8core_raise_amax(job->destination.amax, totals.amax);
  if (job->statistics) {
    job->statistics->elements += (uint64_t)elements;
    job->statistics->saturated += (uint64_t)totals.saturated;
    job->statistics->flushed_to_zero += (uint64_t)totals.flushed_to_zero;
    job->statistics->nonfinite += (uint64_t)totals.nonfinite;
  }
  return FP8CORE_OK;
}

fp8core_status fp8core_cpu_amax(fp8core_context *context, int64_t rows, int64_t columns, const fp8core_rows *source,
                                float *amax) {
  const float scale_inverse = value_or_one(source->scale_inverse);
  const int64_t bytes = (int64_t)fp8core_dtype_size(source->dtype);
  const fp8core_amax_kernel kernel =
    kernels_of(isa_for(context, source->dtype, scale_inverse, 1.0f))->amax[source->dtype];
  const int64_t elements = rows * columns;
  const int threads = elements < PARALLEL_ELEMENTS ? 1 : fp8core_usable_threads(context);
  fp8core_cast_totals totals = {0, 0, 0, 0};
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
#endif
  for (int thread = 0; thread < threads; thread++) {
    const int64_t share = elements / threads / CACHE_LINE * CACHE_LINE;
    const int64_t end = thread == threads - 1 ? elements : share * (thread + 1);
    fp8core_cast_totals part = {0, 0, 0, 0};
    for (int64_t begin = share * thread; begin < end;) {
      const int64_t column = begin % columns;
      const int64_t run = minimum(minimum(columns - column, end - begin), KERNEL_ELEMENTS);
      kernel(scale_inverse, (const unsigned char *)source->data + (begin / columns * source->stride + column) * bytes,
             run, &part);
      begin += run;
    }
#if defined(_OPENMP)
#  pragma omp critical(fp8core_cast)
#endif
    add_totals(&totals, &part);
  }
  fp8core_raise_amax(amax, totals.amax);
  return FP8CORE_OK;
}
