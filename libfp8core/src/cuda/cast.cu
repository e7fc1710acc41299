// Casts and amax: grid-stride loops of 16-byte accesses where the pointers allow them, else element by element.
#include "kernels.h"
#include "rules.cuh"

namespace {

constexpr unsigned block_threads = 256;
// Blocks that are resident at once: 2048 threads a multiprocessor.
constexpr int64_t blocks_per_multiprocessor = 8;

struct cast_arguments {
  const unsigned char *source;
  unsigned char *destination;
  int64_t rows;
  int64_t columns;
  // In elements.
  int64_t source_stride;
  int64_t destination_stride;
  // Of each row, elements before the first vector, and vectors.
  int64_t head;
  int64_t vectors;
  const float *scale_inverse;
  const float *scale;
  float *amax;
  fp8core_cast_statistics *statistics;
  // Elements to add to the statistics.
  uint64_t elements;
  // The index of row r, column c in the whole tensor is first_element + r * row_elements + c.
  uint64_t first_element;
  int64_t row_elements;
  fp8core_cast_mode mode;
  // NULL, or: do nothing where this is positive.
  const uint64_t *skip_if_positive;
};

// `Bytes` of memory, aligned to `Bytes` (at most 16), as 32-bit words; fewer bytes than a word lie in its low end.
template <int Bytes>
static __device__ __forceinline__ void load_vector(const unsigned char *address, uint32_t *words) {
  if (Bytes == 16) {
    const uint4 value = *(const uint4 *)address;
    words[0] = value.x;
    words[1] = value.y;
    words[2] = value.z;
    words[3] = value.w;
  } else if (Bytes == 8) {
    const uint2 value = *(const uint2 *)address;
    words[0] = value.x;
    words[1] = value.y;
  } else if (Bytes == 4) {
    words[0] = *(const uint32_t *)address;
  } else if (Bytes == 2) {
    words[0] = *(const uint16_t *)address;
  } else {
    words[0] = *address;
  }
}

template <int Bytes>
static __device__ __forceinline__ void store_vector(unsigned char *address, const uint32_t *words) {
  if (Bytes == 16) {
    *(uint4 *)address = make_uint4(words[0], words[1], words[2], words[3]);
  } else if (Bytes == 8) {
    *(uint2 *)address = make_uint2(words[0], words[1]);
  } else if (Bytes == 4) {
    *(uint32_t *)address = words[0];
  } else if (Bytes == 2) {
    *(uint16_t *)address = (uint16_t)words[0];
  } else {
    *address = (unsigned char)words[0];
  }
}

// Element `i` of a vector in words.
template <int Size>
static __device__ __forceinline__ uint32_t vector_element(const uint32_t *words, int i) {
  if (Size == 4) return words[i];
  if (Size == 2) return words[i / 2] >> (16 * (i % 2)) & 0xffff;
  return words[i / 4] >> (8 * (i % 4)) & 0xff;
}

constexpr int larger(int a, int b) { return a > b ? a : b; }

template <fp8core_dtype Source, fp8core_dtype Destination>
struct cast_shape {
  static constexpr int source_size = fp8core_traits<Source>::size;
  static constexpr int destination_size = fp8core_traits<Destination>::size;
  // Elements a vector, so that neither side exceeds 16 bytes; and vectors a thread has in flight, at least 32 bytes of
  // loads.
  static constexpr int vector = 16 / larger(source_size, destination_size);
  static constexpr int unroll = vector == 16 ? 2 : 16 / vector;
  static constexpr int source_words = larger(1, vector *source_size / 4);
  static constexpr int destination_words = larger(1, vector *destination_size / 4);
};

template <fp8core_dtype Source, fp8core_dtype Destination>
static __global__ __launch_bounds__(block_threads) void cast_kernel(const cast_arguments job) {
  typedef cast_shape<Source, Destination> shape;
  const float scale_inverse = job.scale_inverse ? *job.scale_inverse : 1.0f;
  const float scale = job.scale ? *job.scale : 1.0f;
  fp8core_gathered gathered = {};
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < job.rows;
       row += (int64_t)gridDim.y * blockDim.y) {
    const unsigned char *source = job.source + row * job.source_stride * shape::source_size;
    unsigned char *destination = job.destination + row * job.destination_stride * shape::destination_size;
    const uint64_t row_element = job.first_element + (uint64_t)(row * job.row_elements);
    const int64_t step = (int64_t)gridDim.x * blockDim.x * shape::unroll;
    for (int64_t first = (int64_t)blockIdx.x * blockDim.x * shape::unroll + threadIdx.x; first < job.vectors;
         first += step) {
      uint32_t words[shape::unroll][shape::source_words];
#pragma unroll
      for (int u = 0; u < shape::unroll; u++) {
        const int64_t vector = first + (int64_t)u * blockDim.x;
        if (vector < job.vectors)
          load_vector<shape::vector * shape::source_size>(
            source + (job.head + vector * shape::vector) * shape::source_size, words[u]);
      }
#pragma unroll
      for (int u = 0; u < shape::unroll; u++) {
        const int64_t vector = first + (int64_t)u * blockDim.x;
        if (vector >= job.vectors) break;
        const int64_t column = job.head + vector * shape::vector;
        uint32_t packed[shape::destination_words];
#pragma unroll
        for (int i = 0; i < shape::destination_words; i++) packed[i] = 0;
#pragma unroll
        for (int quad = 0; quad < shape::vector; quad += 4) {
          uint32_t elements[4], codes[4];
#pragma unroll
          for (int i = 0; i < 4; i++) elements[i] = vector_element<shape::source_size>(words[u], quad + i);
          fp8core_cast_quad<Source, Destination>(elements, 4, scale_inverse, scale, job.mode,
                                                 row_element + (uint64_t)(column + quad), codes, gathered);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int byte = (quad + i) * shape::destination_size;
            packed[byte / 4] |= codes[i] << (8 * (byte % 4));
          }
        }
        store_vector<shape::vector * shape::destination_size>(destination + column * shape::destination_size, packed);
      }
    }
    const int64_t single = job.columns - job.vectors * shape::vector;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < single; i += (int64_t)gridDim.x * blockDim.x) {
      const int64_t column = i < job.head ? i : i + job.vectors * shape::vector;
      uint32_t elements[4] = {0, 0, 0, 0}, codes[4];
      load_vector<shape::source_size>(source + column * shape::source_size, elements);
      fp8core_cast_quad<Source, Destination>(elements, 1, scale_inverse, scale, job.mode,
                                             row_element + (uint64_t)column, codes, gathered);
      store_vector<shape::destination_size>(destination + column * shape::destination_size, codes);
    }
  }
  if (job.statistics && blockIdx.x == 0 && blockIdx.y == 0 && fp8core_linear_thread() == 0)
    (void)atomicAdd((unsigned long long *)&job.statistics->elements, (unsigned long long)job.elements);
  if (job.amax || job.statistics) fp8core_store_gathered(gathered, job.amax, job.statistics);
}

static __device__ __forceinline__ uint32_t load_code(const unsigned char *address, size_t size) {
  return size == 4 ? *(const uint32_t *)address : size == 2 ? *(const uint16_t *)address : *address;
}

static __device__ __forceinline__ void store_code(unsigned char *address, size_t size, uint32_t code) {
  if (size == 4)
    *(uint32_t *)address = code;
  else if (size == 2)
    *(uint16_t *)address = (uint16_t)code;
  else
    *address = (unsigned char)code;
}

static __host__ __device__ __forceinline__ int size_of(fp8core_dtype dtype) {
  return dtype == FP8CORE_FP32 ? 4 : dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16 ? 2 : 1;
}

// The start of each row when it is narrowed in place: all of it is read before any of it is written.
constexpr int in_place_elements = 4096;
constexpr int in_place_threads = 512;

struct in_place_arguments {
  cast_arguments cast;
  fp8core_dtype source_dtype;
  fp8core_dtype destination_dtype;
};

static __global__ __launch_bounds__(in_place_threads) void in_place_kernel(const in_place_arguments job) {
  constexpr int each = in_place_elements / in_place_threads;
  const cast_arguments &cast = job.cast;
  const int source_size = size_of(job.source_dtype), destination_size = size_of(job.destination_dtype);
  const float scale_inverse = cast.scale_inverse ? *cast.scale_inverse : 1.0f;
  const float scale = cast.scale ? *cast.scale : 1.0f;
  fp8core_gathered gathered = {};
  for (int64_t row = blockIdx.x; row < cast.rows; row += gridDim.x) {
    const unsigned char *source = cast.source + row * cast.source_stride * source_size;
    unsigned char *destination = cast.destination + row * cast.destination_stride * destination_size;
    uint32_t codes[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
      const int column = i * in_place_threads + (int)threadIdx.x;
      codes[i] = column < cast.columns ? load_code(source + (int64_t)column * source_size, (size_t)source_size) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < each; i++) {
      const int column = i * in_place_threads + (int)threadIdx.x;
      if (column >= cast.columns) continue;
      const uint64_t element = cast.first_element + (uint64_t)(row * cast.row_elements) + (uint64_t)column;
      const uint32_t draw =
        cast.mode.stochastic ? fp8core_draw_quad(cast.mode.seed, cast.mode.tensor_id, cast.mode.step, element).v[0] : 0;
      const fp8core_cast_result result =
        fp8core_cast_element(codes[i], job.source_dtype, scale_inverse, job.destination_dtype, scale,
                             cast.mode.stochastic, draw, cast.mode.saturate);
      gathered.amax = result.magnitude > gathered.amax ? result.magnitude : gathered.amax;
      gathered.saturated += (uint32_t)result.saturated;
      gathered.flushed_to_zero += (uint32_t)result.flushed_to_zero;
      gathered.nonfinite += (uint32_t)result.nonfinite;
      store_code(destination + (int64_t)column * destination_size, (size_t)destination_size, result.code);
    }
    __syncthreads();
  }
  if (cast.statistics && blockIdx.x == 0 && threadIdx.x == 0)
    (void)atomicAdd((unsigned long long *)&cast.statistics->elements, (unsigned long long)cast.elements);
  if (cast.amax || cast.statistics) fp8core_store_gathered(gathered, cast.amax, cast.statistics);
}

template <fp8core_dtype Source>
static __global__ __launch_bounds__(block_threads) void amax_kernel(const cast_arguments job) {
  constexpr int size = fp8core_traits<Source>::size;
  constexpr int vector = 16 / size;
  constexpr int unroll = 2;
  if (job.skip_if_positive && *job.skip_if_positive > 0) return;
  const float scale_inverse = job.scale_inverse ? *job.scale_inverse : 1.0f;
  fp8core_gathered gathered = {};
  for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < job.rows;
       row += (int64_t)gridDim.y * blockDim.y) {
    const unsigned char *source = job.source + row * job.source_stride * size;
    const int64_t step = (int64_t)gridDim.x * blockDim.x * unroll;
    for (int64_t first = (int64_t)blockIdx.x * blockDim.x * unroll + threadIdx.x; first < job.vectors; first += step) {
      uint32_t words[unroll][4];
#pragma unroll
      for (int u = 0; u < unroll; u++) {
        const int64_t index = first + (int64_t)u * blockDim.x;
        if (index < job.vectors) load_vector<16>(source + (job.head + index * vector) * size, words[u]);
      }
#pragma unroll
      for (int u = 0; u < unroll; u++) {
        if (first + (int64_t)u * blockDim.x >= job.vectors) break;
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < vector; i++) {
          const uint32_t bits = fp8core_decode_finite<Source>(vector_element<size>(words[u], i));
          const uint32_t magnitude =
            fp8core_float_bits(fp8core_bits_float(bits) * scale_inverse) & FP8CORE_F32_MAGNITUDE;
          largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= FP8CORE_F32_INFINITY) {
          // An infinity and a NaN look the same after fp8core_decode_finite().
          largest = 0;
          for (int i = 0; i < vector; i++) {
            const uint32_t code = vector_element<size>(words[u], i);
            const uint32_t magnitude =
              fp8core_cast_element(code, Source, scale_inverse, FP8CORE_FP32, 1.0f, 0, 0, 1).magnitude;
            largest = magnitude > largest ? magnitude : largest;
          }
        }
        gathered.amax = largest > gathered.amax ? largest : gathered.amax;
      }
    }
    const int64_t single = job.columns - job.vectors * vector;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < single; i += (int64_t)gridDim.x * blockDim.x) {
      const int64_t column = i < job.head ? i : i + job.vectors * vector;
      uint32_t code;
      load_vector<size>(source + column * size, &code);
      const uint32_t magnitude =
        fp8core_cast_element(code, Source, scale_inverse, FP8CORE_FP32, 1.0f, 0, 0, 1).magnitude;
      gathered.amax = magnitude > gathered.amax ? magnitude : gathered.amax;
    }
  }
  fp8core_store_gathered(gathered, job.amax, NULL);
}

// Sets head and vectors of each row for vectors of `vector` elements: none where the two sides, or the rows, are out of
// step.
void plan_vectors(cast_arguments *job, int source_size, int destination_size, int vector) {
  job->head = job->columns;
  job->vectors = 0;
  const uintptr_t source_offset = (uintptr_t)job->source % (uintptr_t)(vector * source_size);
  if (job->rows > 1 && job->source_stride % vector != 0) return;
  const int64_t head = (int64_t)((uintptr_t)vector - source_offset / (uintptr_t)source_size) % vector;
  if (job->destination) {
    const uintptr_t destination_offset = (uintptr_t)job->destination % (uintptr_t)(vector * destination_size);
    if (job->rows > 1 && job->destination_stride % vector != 0) return;
    if (source_offset / (uintptr_t)source_size != destination_offset / (uintptr_t)destination_size) return;
  }
  if (job->columns < head + vector) return;
  job->head = head;
  job->vectors = (job->columns - head) / vector;
}

void plan_grid(const fp8core_cuda_target *target, const cast_arguments *job, int unroll, dim3 *grid, dim3 *block) {
  const int64_t items = job->vectors > 0 ? job->vectors : job->columns;
  const int64_t each = job->vectors > 0 ? unroll : 1;
  unsigned width = block_threads;
  while (width > FP8CORE_WARP && job->rows > 1 && (int64_t)(width / 2) >= items) width /= 2;
  *block = dim3(width, block_threads / width, 1);
  const int64_t resident = (int64_t)target->multiprocessors * blocks_per_multiprocessor;
  int64_t across = (items + width * each - 1) / (width * each);
  across = across < 1 ? 1 : across > resident ? resident : across;
  int64_t down = (job->rows + block->y - 1) / block->y;
  int64_t down_most = (resident + across - 1) / across;
  down_most = down_most > 65535 ? 65535 : down_most;
  down = down > down_most ? down_most : down;
  *grid = dim3((unsigned)across, (unsigned)down, 1);
}

template <fp8core_dtype Source, fp8core_dtype Destination>
int launch_pair(const fp8core_cuda_target *target, cast_arguments *job) {
  typedef cast_shape<Source, Destination> shape;
  plan_vectors(job, shape::source_size, shape::destination_size, shape::vector);
  dim3 grid, block;
  plan_grid(target, job, shape::unroll, &grid, &block);
  return fp8core_launch(cast_kernel<Source, Destination>, grid, block, target->stream, *job);
}

template <fp8core_dtype Source>
int launch_source(const fp8core_cuda_target *target, cast_arguments *job, fp8core_dtype destination) {
#define CAST(destination_dtype) launch_pair<Source, destination_dtype>(target, job)
  FP8CORE_DISPATCH_SOURCE(destination, CAST);
#undef CAST
}

int launch_cast(const fp8core_cuda_target *target, cast_arguments *job, fp8core_dtype source,
                fp8core_dtype destination) {
#define CAST(source_dtype) launch_source<source_dtype>(target, job, destination)
  FP8CORE_DISPATCH_SOURCE(source, CAST);
#undef CAST
}

template <fp8core_dtype Source>
int launch_amax_of(const fp8core_cuda_target *target, cast_arguments *job) {
  constexpr int size = fp8core_traits<Source>::size;
  plan_vectors(job, size, size, 16 / size);
  dim3 grid, block;
  plan_grid(target, job, 2, &grid, &block);
  return fp8core_launch(amax_kernel<Source>, grid, block, target->stream, *job);
}

// Writing element i of the narrower format overwrites the source's element i / ratio. So the first elements are cast by
// a block that reads them all before it writes; from then on, each launch casts `ratio` times as many elements as are
// done, and overwrites only what the launches before it have read.
int launch_narrowing(const fp8core_cuda_target *target, const cast_arguments *whole, fp8core_dtype source,
                     fp8core_dtype destination) {
  const int source_size = size_of(source), destination_size = size_of(destination);
  const int64_t ratio = source_size / destination_size;
  in_place_arguments start;
  start.cast = *whole;
  start.source_dtype = source;
  start.destination_dtype = destination;
  if (start.cast.columns > in_place_elements) start.cast.columns = in_place_elements;
  start.cast.elements = (uint64_t)(start.cast.rows * start.cast.columns);
  const int64_t most_blocks = (int64_t)target->multiprocessors * 4;
  const dim3 grid((unsigned)(whole->rows < most_blocks ? whole->rows : most_blocks), 1, 1);
  int error = fp8core_launch(in_place_kernel, grid, dim3(in_place_threads, 1, 1), target->stream, start);
  for (int64_t done = in_place_elements; !error && done < whole->columns; done *= ratio) {
    cast_arguments part = *whole;
    part.source += done * source_size;
    part.destination += done * destination_size;
    part.first_element += (uint64_t)done;
    part.columns = whole->columns - done < done * (ratio - 1) ? whole->columns - done : done * (ratio - 1);
    part.elements = (uint64_t)(part.rows * part.columns);
    error = launch_cast(target, &part, source, destination);
  }
  return error;
}

} // namespace

extern "C" int fp8core_cuda_launch_cast(const fp8core_cuda_target *target, const fp8core_cast_job *job) {
  cast_arguments arguments = {};
  arguments.source = (const unsigned char *)job->source.data;
  arguments.destination = (unsigned char *)job->destination.data;
  arguments.rows = job->rows;
  arguments.columns = job->columns;
  arguments.source_stride = job->source.stride;
  arguments.destination_stride = job->destination.stride;
  if (job->source.stride == job->columns && job->destination.stride == job->columns) {
    arguments.columns *= arguments.rows;
    arguments.rows = 1;
  }
  arguments.row_elements = arguments.columns;
  arguments.scale_inverse = job->source.scale_inverse;
  arguments.scale = job->destination.scale;
  arguments.amax = job->destination.amax;
  arguments.statistics = job->statistics;
  arguments.elements = (uint64_t)(arguments.rows * arguments.columns);
  arguments.first_element = job->first_element;
  arguments.mode.stochastic = job->stochastic;
  arguments.mode.saturate = job->saturate;
  arguments.mode.count = job->statistics != NULL;
  arguments.mode.tensor_id = job->tensor_id;
  arguments.mode.step = job->step;
  arguments.mode.seed = job->seed;
  if (job->in_place_narrowing) return launch_narrowing(target, &arguments, job->source.dtype, job->destination.dtype);
  return launch_cast(target, &arguments, job->source.dtype, job->destination.dtype);
}

extern "C" int fp8core_cuda_launch_amax(const fp8core_cuda_target *target, int64_t rows, int64_t columns,
                                        const fp8core_rows *source, float *amax, const uint64_t *skip_if_positive) {
  cast_arguments arguments = {};
  arguments.source = (const unsigned char *)source->data;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.source_stride = source->stride;
  if (source->stride == columns) {
    arguments.columns *= arguments.rows;
    arguments.rows = 1;
  }
  arguments.scale_inverse = source->scale_inverse;
  arguments.amax = amax;
  arguments.skip_if_positive = skip_if_positive;
#define AMAX(source_dtype) launch_amax_of<source_dtype>(target, &arguments)
  FP8CORE_DISPATCH_SOURCE(source->dtype, AMAX);
#undef AMAX
}
