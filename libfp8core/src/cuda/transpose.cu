// Casts that write a matrix and its transpose in one read. A block takes a tile through shared memory, so that both are
// written in whole lines.
#include "kernels.h"
#include "rules.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / FP8CORE_WARP;
constexpr int64_t blocks_per_multiprocessor = 6;

struct transpose_arguments {
  int64_t rows;
  int64_t columns;
  int64_t row_tiles;
  int64_t column_tiles;
  int64_t batch;
  // Strides in elements. destination may be NULL.
  const unsigned char *source;
  int64_t source_stride;
  int64_t source_batch_stride;
  unsigned char *destination;
  int64_t destination_stride;
  unsigned char *transposed;
  int64_t transposed_stride;
  int64_t transposed_batch_stride;
  // Whether four elements of a row of the source, four of the destination, and sixteen of the transpose can be accessed
  // at once.
  int source_aligned;
  int destination_aligned;
  int transposed_aligned;
  const float *scale_inverse;
  const float *scale;
  float *amax;
  fp8core_cast_statistics *statistics;
  uint64_t first_element;
  fp8core_cast_mode mode;
};

// The first `valid` of four elements of `Size` bytes, packed in words as in memory; the others are 0.
template <int Size>
static __device__ __forceinline__ void load_four(const unsigned char *address, int valid, int aligned,
                                                 uint32_t (&words)[Size]) {
  if (aligned && valid == 4) {
    if (Size == 1) {
      words[0] = *(const uint32_t *)address;
    } else if (Size == 2) {
      const uint2 pair = *(const uint2 *)address;
      words[0] = pair.x;
      words[Size - 1] = pair.y;
    } else {
      const uint4 four = *(const uint4 *)address;
      words[0] = four.x;
      words[1 % Size] = four.y;
      words[2 % Size] = four.z;
      words[3 % Size] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Size; i++) words[i] = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i >= valid) continue;
    if (Size == 1)
      words[0] |= (uint32_t)address[i] << (8 * i);
    else if (Size == 2)
      words[i / 2 % Size] |= (uint32_t)((const uint16_t *)address)[i] << (16 * (i % 2));
    else
      words[i % Size] = ((const uint32_t *)address)[i];
  }
}

template <int Size>
static __device__ __forceinline__ uint32_t element_of(const uint32_t (&words)[Size], int i) {
  if (Size == 1) return words[0] >> (8 * i) & 0xff;
  if (Size == 2) return words[i / 2 % Size] >> (16 * (i % 2)) & 0xffff;
  return words[i % Size];
}

// Row i of the result holds byte i of each of the rows.
static __device__ __forceinline__ void transpose_bytes(uint32_t (&rows)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  rows[0] = __byte_perm(low01, low23, 0x5410);
  rows[1] = __byte_perm(low01, low23, 0x7632);
  rows[2] = __byte_perm(high01, high23, 0x5410);
  rows[3] = __byte_perm(high01, high23, 0x7632);
}

// To one-byte formats: tiles of 128 x 128. A lane takes four columns of four rows at a time, so that a warp reads and
// writes whole lines of rows, and leaves a word of four rows for each column in shared memory. The words of a column
// are one word further than a multiple of the banks apart; lanes 8 apart, whose columns would meet in a bank, store
// their words in rotated order.
constexpr int byte_tile = 128;
constexpr int byte_pitch = byte_tile / 4 + 1;

template <fp8core_dtype Source, fp8core_dtype Destination, bool Raw>
static __global__ __launch_bounds__(threads, 3) void byte_transpose_kernel(const transpose_arguments job) {
  constexpr int size = fp8core_traits<Source>::size;
  // Quads of rows whose loads are in flight together, up to 64 bytes a thread; more would spill registers where values
  // are cast.
  constexpr int together = size == 1 && !Raw ? 2 : 4 / size;
  constexpr int quads_a_warp = byte_tile / 4 / warps;
  __shared__ uint32_t words[byte_tile * byte_pitch];
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  const float scale_inverse = job.scale_inverse ? *job.scale_inverse : 1.0f;
  const float scale = job.scale ? *job.scale : 1.0f;
  fp8core_gathered gathered = {};
  const int64_t tiles_a_matrix = job.row_tiles * job.column_tiles, tiles = tiles_a_matrix * job.batch;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t matrix = tile / tiles_a_matrix, place = tile - matrix * tiles_a_matrix;
    const int64_t tile_row = place / job.column_tiles * byte_tile;
    const int64_t tile_column = (place - place / job.column_tiles * job.column_tiles) * byte_tile;
    const unsigned char *source = job.source + matrix * job.source_batch_stride * size;
    unsigned char *transposed = job.transposed + matrix * job.transposed_batch_stride;
    const int64_t column = tile_column + 4 * lane;
    const int64_t columns_left = job.columns - column;
    const int valid = columns_left >= 4 ? 4 : columns_left > 0 ? (int)columns_left : 0;
#pragma unroll
    for (int first_quad = 0; first_quad < quads_a_warp; first_quad += together) {
      uint32_t loaded[together][4][size];
#pragma unroll
      for (int t = 0; t < together; t++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const int64_t row = tile_row + 4 * (warp * quads_a_warp + first_quad + t) + r;
          const int row_valid = row < job.rows ? valid : 0;
          load_four<size>(source + (row * job.source_stride + column) * size, row_valid, job.source_aligned,
                          loaded[t][r]);
        }
      }
#pragma unroll
      for (int t = 0; t < together; t++) {
        const int quad = warp * quads_a_warp + first_quad + t;
        uint32_t packed[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const int64_t row = tile_row + 4 * quad + r;
          const int row_valid = row < job.rows ? valid : 0;
          if constexpr (Raw) {
            packed[r] = loaded[t][r][0];
          } else {
            uint32_t elements[4], codes[4];
#pragma unroll
            for (int i = 0; i < 4; i++) elements[i] = element_of<size>(loaded[t][r], i);
            fp8core_cast_quad<Source, Destination>(elements, row_valid, scale_inverse, scale, job.mode,
                                                   job.first_element + (uint64_t)(row * job.columns + column), codes,
                                                   gathered);
            packed[r] = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
            if (!job.destination || row_valid == 0) continue;
            unsigned char *destination = job.destination + row * job.destination_stride + column;
            if (row_valid == 4 && job.destination_aligned) {
              *(uint32_t *)destination = packed[r];
            } else {
#pragma unroll
              for (int i = 0; i < 4; i++)
                if (i < row_valid) destination[i] = (unsigned char)codes[i];
            }
          }
        }
        transpose_bytes(packed);
        const int turn = lane / 8;
        const uint32_t first[4] = {packed[0], packed[1], packed[2], packed[3]};
#pragma unroll
        for (int i = 0; i < 4; i++) packed[i] = turn & 1 ? first[(i + 1) % 4] : first[i];
        const uint32_t second[4] = {packed[0], packed[1], packed[2], packed[3]};
#pragma unroll
        for (int i = 0; i < 4; i++) packed[i] = turn & 2 ? second[(i + 2) % 4] : second[i];
#pragma unroll
        for (int i = 0; i < 4; i++) words[(4 * lane + ((i + turn) & 3)) * byte_pitch + quad] = packed[i];
      }
    }
    __syncthreads();
    // Sixteen rows of a column a lane; eight lanes a line.
#pragma unroll
    for (int pass = 0; pass < byte_tile / (4 * warps); pass++) {
      const int tile_line = pass * 4 * warps + warp * 4 + lane / 8;
      const int64_t line = tile_column + tile_line, row = tile_row + 16 * (lane % 8);
      const int64_t rows_left = job.rows - row;
      if (line >= job.columns || rows_left <= 0) continue;
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; i++) four[i] = words[tile_line * byte_pitch + 4 * (lane % 8) + i];
      unsigned char *out = transposed + line * job.transposed_stride + row;
      if (rows_left >= 16 && job.transposed_aligned) {
        *(uint4 *)out = make_uint4(four[0], four[1], four[2], four[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
          if (i < rows_left) out[i] = (unsigned char)(four[i / 4] >> (8 * (i % 4)));
      }
    }
    __syncthreads();
  }
  if constexpr (!Raw) {
    if (job.statistics && blockIdx.x == 0 && threadIdx.x == 0)
      (void)atomicAdd((unsigned long long *)&job.statistics->elements, (unsigned long long)(job.rows * job.columns));
    if (job.amax || job.statistics) fp8core_store_gathered(gathered, job.amax, job.statistics);
  }
}

// To two- and four-byte formats, which no product wants transposed: one kernel for all pairs, by the scalar rule, with
// tiles of 64 x 64.
constexpr int wide_tile = 64;

struct wide_arguments {
  transpose_arguments transpose;
  fp8core_dtype source_dtype;
  fp8core_dtype destination_dtype;
};

static __host__ __device__ __forceinline__ int size_of(fp8core_dtype dtype) {
  return dtype == FP8CORE_FP32 ? 4 : dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16 ? 2 : 1;
}

static __device__ __forceinline__ uint32_t load_code(const unsigned char *base, int64_t index, int size) {
  return size == 4 ? ((const uint32_t *)base)[index] : size == 2 ? ((const uint16_t *)base)[index] : base[index];
}

static __device__ __forceinline__ void store_code(unsigned char *base, int64_t index, int size, uint32_t code) {
  if (size == 4)
    ((uint32_t *)base)[index] = code;
  else
    ((uint16_t *)base)[index] = (uint16_t)code;
}

static __global__ __launch_bounds__(threads) void wide_transpose_kernel(const wide_arguments arguments) {
  const transpose_arguments &job = arguments.transpose;
  constexpr int pitch = wide_tile + 1;
  __shared__ uint32_t codes[wide_tile * pitch];
  const int source_size = size_of(arguments.source_dtype), size = size_of(arguments.destination_dtype);
  const float scale_inverse = job.scale_inverse ? *job.scale_inverse : 1.0f;
  const float scale = job.scale ? *job.scale : 1.0f;
  fp8core_gathered gathered = {};
  const int64_t tiles = job.row_tiles * job.column_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t tile_row = tile / job.column_tiles * wide_tile;
    const int64_t tile_column = (tile - tile / job.column_tiles * job.column_tiles) * wide_tile;
    for (int i = (int)threadIdx.x; i < wide_tile * wide_tile; i += threads) {
      const int64_t row = tile_row + i / wide_tile, column = tile_column + i % wide_tile;
      if (row >= job.rows || column >= job.columns) continue;
      const uint64_t element = job.first_element + (uint64_t)(row * job.columns + column);
      const uint32_t draw =
        job.mode.stochastic ? fp8core_draw_quad(job.mode.seed, job.mode.tensor_id, job.mode.step, element).v[0] : 0;
      const fp8core_cast_result result = fp8core_cast_element(
        load_code(job.source, row * job.source_stride + column, source_size), arguments.source_dtype, scale_inverse,
        arguments.destination_dtype, scale, job.mode.stochastic, draw, job.mode.saturate);
      gathered.amax = result.magnitude > gathered.amax ? result.magnitude : gathered.amax;
      gathered.saturated += (uint32_t)result.saturated;
      gathered.flushed_to_zero += (uint32_t)result.flushed_to_zero;
      gathered.nonfinite += (uint32_t)result.nonfinite;
      codes[i / wide_tile * pitch + i % wide_tile] = result.code;
      if (job.destination) store_code(job.destination, row * job.destination_stride + column, size, result.code);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < wide_tile * wide_tile; i += threads) {
      const int64_t row = tile_row + i % wide_tile, column = tile_column + i / wide_tile;
      if (row >= job.rows || column >= job.columns) continue;
      store_code(job.transposed, column * job.transposed_stride + row, size,
                 codes[i % wide_tile * pitch + i / wide_tile]);
    }
    __syncthreads();
  }
  if (job.statistics && blockIdx.x == 0 && threadIdx.x == 0)
    (void)atomicAdd((unsigned long long *)&job.statistics->elements, (unsigned long long)(job.rows * job.columns));
  if (job.amax || job.statistics) fp8core_store_gathered(gathered, job.amax, job.statistics);
}

int aligned_to(const void *pointer, int64_t stride, int64_t batch_stride, int elements, int size) {
  return (uintptr_t)pointer % (uintptr_t)(elements * size) == 0 && stride % elements == 0 &&
         batch_stride % elements == 0;
}

// Blocks that share the tiles of all matrices.
dim3 plan_tiles(const fp8core_cuda_target *target, transpose_arguments *job, int tile) {
  job->row_tiles = (job->rows + tile - 1) / tile;
  job->column_tiles = (job->columns + tile - 1) / tile;
  const int64_t tiles = job->row_tiles * job->column_tiles * job->batch;
  const int64_t resident = (int64_t)target->multiprocessors * blocks_per_multiprocessor;
  return dim3((unsigned)(tiles < resident ? tiles : resident), 1, 1);
}

template <fp8core_dtype Source, fp8core_dtype Destination, bool Raw>
int launch_bytes(const fp8core_cuda_target *target, transpose_arguments *job) {
  const dim3 grid = plan_tiles(target, job, byte_tile);
  return fp8core_launch(byte_transpose_kernel<Source, Destination, Raw>, grid, dim3(threads, 1, 1), target->stream,
                        *job);
}

template <fp8core_dtype Source>
int launch_source(const fp8core_cuda_target *target, transpose_arguments *job, fp8core_dtype destination) {
  return destination == FP8CORE_E4M3 ? launch_bytes<Source, FP8CORE_E4M3, false>(target, job)
                                     : launch_bytes<Source, FP8CORE_E5M2, false>(target, job);
}

int launch_wide(const fp8core_cuda_target *target, const transpose_arguments *job, fp8core_dtype source,
                fp8core_dtype destination) {
  wide_arguments arguments = {*job, source, destination};
  const dim3 grid = plan_tiles(target, &arguments.transpose, wide_tile);
  return fp8core_launch(wide_transpose_kernel, grid, dim3(threads, 1, 1), target->stream, arguments);
}

} // namespace

extern "C" int fp8core_cuda_launch_cast_transpose(const fp8core_cuda_target *target, const fp8core_cast_job *job) {
  const int source_size = size_of(job->source.dtype);
  const int size = size_of(job->transposed.dtype);
  transpose_arguments arguments = {};
  arguments.rows = job->rows;
  arguments.columns = job->columns;
  arguments.batch = 1;
  arguments.source = (const unsigned char *)job->source.data;
  arguments.source_stride = job->source.stride;
  arguments.destination = (unsigned char *)job->destination.data;
  arguments.destination_stride = job->destination.stride;
  arguments.transposed = (unsigned char *)job->transposed.data;
  arguments.transposed_stride = job->transposed.stride;
  arguments.source_aligned = aligned_to(arguments.source, arguments.source_stride, 0, 4, source_size);
  arguments.destination_aligned = aligned_to(arguments.destination, arguments.destination_stride, 0, 4, size);
  arguments.transposed_aligned = aligned_to(arguments.transposed, arguments.transposed_stride, 0, 16 / size, size);
  arguments.scale_inverse = job->source.scale_inverse;
  arguments.scale = job->destination.scale;
  arguments.amax = job->destination.amax;
  arguments.statistics = job->statistics;
  arguments.first_element = job->first_element;
  arguments.mode.stochastic = job->stochastic;
  arguments.mode.saturate = job->saturate;
  arguments.mode.count = job->statistics != NULL;
  arguments.mode.tensor_id = job->tensor_id;
  arguments.mode.step = job->step;
  arguments.mode.seed = job->seed;
  const fp8core_dtype destination = job->transposed.dtype;
  if (size > 1) return launch_wide(target, &arguments, job->source.dtype, destination);
#define TRANSPOSE(source_dtype) launch_source<source_dtype>(target, &arguments, destination)
  FP8CORE_DISPATCH_SOURCE(job->source.dtype, TRANSPOSE);
#undef TRANSPOSE
}

extern "C" int fp8core_cuda_launch_byte_transpose(const fp8core_cuda_target *target,
                                                  const fp8core_cuda_byte_transpose *job) {
  transpose_arguments arguments = {};
  arguments.rows = job->rows;
  arguments.columns = job->columns;
  arguments.batch = job->batch;
  arguments.source = (const unsigned char *)job->source;
  arguments.source_stride = job->source_stride;
  arguments.source_batch_stride = job->source_batch_stride;
  arguments.transposed = (unsigned char *)job->destination;
  arguments.transposed_stride = job->destination_stride;
  arguments.transposed_batch_stride = job->destination_batch_stride;
  arguments.source_aligned = aligned_to(arguments.source, job->source_stride, job->source_batch_stride, 4, 1);
  arguments.transposed_aligned =
    aligned_to(arguments.transposed, job->destination_stride, job->destination_batch_stride, 16, 1);
  return launch_bytes<FP8CORE_E4M3, FP8CORE_E4M3, true>(target, &arguments);
}
