// Attention: Dao, "FlashAttention-2", 2023. The scores of a tile of queries and a tile of keys exist on the chip only;
// forward, a softmax that goes along with the keys keeps a maximum, a sum and an output for each query, and leaves the
// logarithm of the sum, from which the backward pass has the probabilities again.
//
// BF16 goes through tensor cores: a block is four warps, each with its own 16 or 32 rows of one tile in its registers,
// and meets the tiles of the other side one after the other in shared memory. A warp's probabilities are in the
// registers where the next product wants them. Gradients of keys and values are one kernel, whose rows are keys, and
// gradients of queries another, whose rows are queries: scores are computed twice, but no sum is shared by blocks, so
// that the same job gives the same bits. Tiles, rows by columns of scores:
//
//   head_dim, at most   64         80, 96     128        256
//   forward             128 x 64   128 x 64   128 x 64   64 x 64
//   keys, values        128 x 32   64 x 64    64 x 32    64 x 16, in two halves of the columns
//   queries             128 x 64   128 x 32   64 x 32    64 x 16
//
// No block needs more than the 99 KiB of shared memory that capability 8.9 has, and at 128 or less two fit into the
// 164 KiB of 8.0. FP32 has kernels of its own, of 64 x 64 tiles and fused multiply-adds.
#include <float.h>

#include "tensor_core.cuh"
#include "values.cuh"

namespace {

// What the kernels share. Strides are those of rows, in elements.
struct attention_arguments {
  // Queries of a sequence, and keys before the first of them.
  int length;
  int position;
  int heads;
  int kv_heads;
  int head_dim;
  // Every row of a head can be read and written 16 bytes at a time.
  bool by_vector;
  // 1 / sqrt(head_dim), and the same for powers of 2.
  float scale;
  float scale_log2;
  // Of the first head of the first sequence.
  const void *queries;
  const void *keys;
  const void *values;
  int query_stride;
  int key_stride;
  void *out;
  const void *dout;
  int out_stride;
  // NULL: not wanted.
  float *log_sums;
  float *deltas;
  // With the strides of queries and keys.
  void *dqueries;
  void *dkeys;
  void *dvalues;
};

// In one instruction, where 64-bit strides would take several.
static __device__ __forceinline__ int64_t row_offset(int row, int stride) { return (int64_t)row * stride; }

// A block's work: neighbours have neighbouring tiles, as they share what they read.
struct block_place {
  int64_t sequence;
  int head;
  int tile;
};

static __device__ __forceinline__ block_place place_of(unsigned block, int tiles, int heads) {
  const unsigned pair = block / (unsigned)tiles;
  block_place place;
  place.tile = (int)(block % (unsigned)tiles);
  place.head = (int)(pair % (unsigned)heads);
  place.sequence = pair / (unsigned)heads;
  return place;
}

FP8CORE_RULE int tiles_of(int length, int tile) { return (length - 1) / tile + 1; }

FP8CORE_RULE int smaller(int a, int b) { return a < b ? a : b; }

// The heads' rows of one sequence.
template <typename Element>
struct head_rows {
  const Element *queries;
  const Element *keys;
  const Element *values;
};

template <typename Element>
static __device__ __forceinline__ head_rows<Element> rows_of(const attention_arguments &job, int64_t sequence, int head,
                                                             int kv_head) {
  const int64_t first_key = sequence * ((int64_t)job.position + job.length) * job.key_stride;
  const int64_t key_offset = first_key + (int64_t)kv_head * job.head_dim;
  head_rows<Element> rows;
  rows.queries = (const Element *)job.queries + sequence * job.length * job.query_stride + (int64_t)head * job.head_dim;
  rows.keys = (const Element *)job.keys + key_offset;
  rows.values = (const Element *)job.values + key_offset;
  return rows;
}

static __device__ __forceinline__ int64_t out_offset(const attention_arguments &job, int64_t sequence, int head) {
  return sequence * job.length * job.out_stride + (int64_t)head * job.head_dim;
}

// Of log_sums and deltas.
static __device__ __forceinline__ int64_t sums_offset(const attention_arguments &job, int64_t sequence, int head) {
  return (sequence * job.heads + head) * job.length;
}

static __device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return fp8core_bits_float(__shfl_xor_sync(0xffffffffu, fp8core_float_bits(value), mask));
}

// Over lanes that differ in the bits below `Lanes` only.
template <int Lanes>
static __device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

template <int Lanes>
static __device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// Where the maximum of a row's scores begins: not at minus infinity, so that scores of minus infinity alone have
// exponentials of 0, not NaN. A NaN is in no maximum, but in the exponentials.
constexpr float lowest = -FLT_MAX;

// At most 0, or NaN: a score may round above the logarithm of its own row's sum, and by much if both are large.
static __device__ __forceinline__ float not_positive(float x) { return x > 0.0f ? 0.0f : x; }

// BF16.

constexpr int warps = 4;
constexpr int threads = warps * FP8CORE_WARP;

// From row to row of a tile in shared memory: an odd multiple of 16 bytes, so that 8 rows of a matrix that is loaded
// are in different banks.
FP8CORE_CONSTANT_RULE int pitch_of(int head_dim) { return head_dim + 8; }

constexpr size_t most_shared_bytes = 99 << 10;

constexpr size_t shared_bytes_of(int rows, int head_dim) {
  return (size_t)rows * (size_t)pitch_of(head_dim) * sizeof(uint16_t);
}

// Rows first .. first + Rows - 1 of a head to shared memory; zeros where there are none, and after the columns.
template <int Rows, int HeadDim>
static __device__ __forceinline__ void load_tile(uint16_t *tile, const uint16_t *rows, int stride, int first,
                                                 int row_count, const attention_arguments &job) {
  constexpr int pitch = pitch_of(HeadDim);
  // A thread keeps to its column, so that one address is all that it steps.
  constexpr int lanes_a_row = HeadDim <= 64 ? 8 : HeadDim <= 128 ? 16 : 32;
  constexpr int rows_at_once = threads / lanes_a_row;
  static_assert(Rows % rows_at_once == 0 && HeadDim <= 8 * lanes_a_row, "whole rows, and all of them");
  if (job.by_vector) {
    const int row = (int)(threadIdx.x / lanes_a_row);
    const int column = (int)(threadIdx.x % lanes_a_row) * 8;
    const int rows_left = column < job.head_dim ? row_count - first - row : 0;
    const uint16_t *from = rows + row_offset(first + row, stride) + column;
    if (column >= HeadDim) return;
#pragma unroll
    for (int start = 0; start < Rows; start += rows_at_once) {
      fp8gpt_copy_async(tile + (start + row) * pitch + column, from, start < rows_left);
      from += rows_at_once * stride;
    }
  } else {
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < Rows * HeadDim; i += threads) {
      const int at = first + i / HeadDim, column = i % HeadDim;
      const bool there = at < row_count && column < job.head_dim;
      tile[i / HeadDim * pitch + column] = there ? rows[row_offset(at, stride) + column] : (uint16_t)0;
    }
  }
}

// Rounds a warp's sums and writes them to rows, of which `row_count` are there, through its own rows of a tile.
template <int RowTiles, int Columns, int Pitch>
static __device__ __forceinline__ void store_rows(const float (&sums)[RowTiles][Columns / 8][4], uint16_t *tile,
                                                  uint16_t *rows, int stride, int row_count, int columns,
                                                  bool by_vector) {
  const int lane = (int)threadIdx.x % FP8CORE_WARP;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int n = 0; n < Columns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *(uint32_t *)(tile + (16 * m + lane / 4 + 8 * half) * Pitch + 8 * n + 2 * (lane % 4)) =
          fp8gpt_pack_bf16(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
  __syncwarp();
  if (by_vector) {
    constexpr int vectors_a_row = Columns / 8;
#pragma unroll 4
    for (int vector = lane; vector < 16 * RowTiles * vectors_a_row; vector += FP8CORE_WARP) {
      const int row = vector / vectors_a_row, column = vector % vectors_a_row * 8;
      if (row < row_count && column < columns)
        *(uint4 *)(rows + row_offset(row, stride) + column) = *(const uint4 *)(tile + row * Pitch + column);
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < 16 * RowTiles * Columns; i += FP8CORE_WARP) {
      const int row = i / Columns, column = i % Columns;
      if (row < row_count && column < columns) rows[row_offset(row, stride) + column] = tile[row * Pitch + column];
    }
  }
}

template <int RowTiles, int ColumnTiles>
static __device__ __forceinline__ void clear(float (&sums)[RowTiles][ColumnTiles][4]) {
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int n = 0; n < ColumnTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
}

// sums [rows, Columns] = left [rows, Inner] right [Columns, Inner]^T
template <int RowTiles, int Columns, int Inner>
static __device__ __forceinline__ void multiply_rows(const uint16_t *left, const uint16_t *right,
                                                     float (&sums)[RowTiles][Columns / 8][4]) {
  constexpr int pitch = pitch_of(Inner);
  const int lane = (int)threadIdx.x % FP8CORE_WARP;
  left += lane % 16 * pitch + lane / 16 * 8;
  right += (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8;
  clear(sums);
#pragma unroll
  for (int k = 0; k < Inner; k += 16) {
    uint32_t a[RowTiles][4];
#pragma unroll
    for (int m = 0; m < RowTiles; m++) fp8gpt_load_matrices(left + 16 * m * pitch + k, a[m]);
#pragma unroll
    for (int n = 0; n < Columns / 8; n += 2) {
      uint32_t b[4];
      fp8gpt_load_matrices(right + 8 * n * pitch + k, b);
#pragma unroll
      for (int m = 0; m < RowTiles; m++) {
        fp8gpt_multiply_bf16(sums[m][n], a[m], b[0], b[1]);
        fp8gpt_multiply_bf16(sums[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sums [rows, Columns] += left [rows, 16] right [16, Columns]; left is in registers.
template <int RowTiles, int Columns, int Pitch>
static __device__ __forceinline__ void add_product(const uint32_t (&left)[RowTiles][4], const uint16_t *right,
                                                   float (&sums)[RowTiles][Columns / 8][4]) {
  const int lane = (int)threadIdx.x % FP8CORE_WARP;
  right += lane % 16 * Pitch + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < Columns / 8; n += 2) {
    uint32_t b[4];
    fp8gpt_load_matrices_transposed(right + 8 * n, b);
#pragma unroll
    for (int m = 0; m < RowTiles; m++) {
      fp8gpt_multiply_bf16(sums[m][n], left[m], b[0], b[1]);
      fp8gpt_multiply_bf16(sums[m][n + 1], left[m], b[2], b[3]);
    }
  }
}

// 16 columns of values that lie as sums do, rounded, as the left side of a product.
template <int RowTiles, int ColumnTiles>
static __device__ __forceinline__ void pack_left(const float (&values)[RowTiles][ColumnTiles][4], int first_column,
                                                 uint32_t (&left)[RowTiles][4]) {
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&pair)[4] = values[m][first_column / 8 + i / 2];
      left[m][i] = fp8gpt_pack_bf16(pair[2 * (i % 2)], pair[2 * (i % 2) + 1]);
    }
}

template <int HeadDim, int RowTiles>
struct forward_shape {
  static constexpr int queries = warps * 16 * RowTiles;
  static constexpr int keys = 64;
  static constexpr size_t shared_bytes = shared_bytes_of(queries + 2 * keys, HeadDim);
  static_assert(shared_bytes <= most_shared_bytes, "of one block");
};

// A block: a tile of queries of one head. Keys are loaded while the probabilities meet the values, values while the
// scores are computed.
template <int HeadDim, int RowTiles>
static __global__ __launch_bounds__(threads) void forward_kernel(const attention_arguments job) {
  typedef forward_shape<HeadDim, RowTiles> shape;
  constexpr int pitch = pitch_of(HeadDim), keys = shape::keys;
  const int tiles = tiles_of(job.length, shape::queries);
  const block_place place = place_of(blockIdx.x, tiles, job.heads);
  // The last have the most keys: they begin first.
  const int first_query = (tiles - 1 - place.tile) * shape::queries;
  const head_rows<uint16_t> from =
    rows_of<uint16_t>(job, place.sequence, place.head, place.head / (job.heads / job.kv_heads));
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  uint16_t *q = (uint16_t *)fp8core_dynamic_shared();
  uint16_t *k = q + shape::queries * pitch;
  uint16_t *v = k + keys * pitch;
  uint16_t *own_q = q + warp * 16 * RowTiles * pitch;
  const int own_query = first_query + warp * 16 * RowTiles;
  const int all_keys = job.position + job.length;
  const int last_query = smaller(first_query + shape::queries, job.length) - 1;
  const int key_count = job.position + last_query + 1;
  float out[RowTiles][HeadDim / 8][4];
  float largest[RowTiles][2], sum[RowTiles][2];
  clear(out);
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      largest[m][half] = lowest;
      sum[m][half] = 0.0f;
    }
  load_tile<shape::queries, HeadDim>(q, from.queries, job.query_stride, first_query, job.length, job);
  load_tile<keys, HeadDim>(k, from.keys, job.key_stride, 0, all_keys, job);
#pragma unroll 1
  for (int key = 0; key < key_count; key += keys) {
    float scores[RowTiles][keys / 8][4];
    fp8gpt_wait_for_copies();
    __syncthreads();
    load_tile<keys, HeadDim>(v, from.values, job.key_stride, key, all_keys, job);
    multiply_rows<RowTiles, keys, HeadDim>(own_q, k, scores);
    fp8gpt_wait_for_copies();
    __syncthreads();
    if (key + keys - 1 > job.position + own_query) {
      // The first row's last key, from this lane's first column on.
      const int last = job.position + own_query + lane / 4 - key - 2 * (lane % 4);
#pragma unroll
      for (int m = 0; m < RowTiles; m++)
#pragma unroll
        for (int n = 0; n < keys / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (8 * n + i % 2 - 16 * m - 8 * (i / 2) > last) scores[m][n][i] = -INFINITY;
    }
#pragma unroll
    for (int m = 0; m < RowTiles; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float found = largest[m][half];
#pragma unroll
        for (int n = 0; n < keys / 8; n++)
          found = fmaxf(found, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        found = lanes_max<4>(found);
        const float correction = fp8gpt_exp2((largest[m][half] - found) * job.scale_log2);
        largest[m][half] = found;
        sum[m][half] *= correction;
#pragma unroll
        for (int n = 0; n < HeadDim / 8; n++)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; i++) out[m][n][i] *= correction;
      }
    // Not before, for want of registers.
    if (key + keys < key_count) load_tile<keys, HeadDim>(k, from.keys, job.key_stride, key + keys, all_keys, job);
#pragma unroll
    for (int part = 0; part < keys; part += 16) {
      uint32_t probabilities[RowTiles][4];
      // The difference first, which is exact where it matters: scores may be large.
#pragma unroll
      for (int m = 0; m < RowTiles; m++)
#pragma unroll
        for (int n = part / 8; n < part / 8 + 2; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            scores[m][n][i] = fp8gpt_exp2((scores[m][n][i] - largest[m][i / 2]) * job.scale_log2);
            sum[m][i / 2] += scores[m][n][i];
          }
      pack_left(scores, part, probabilities);
      add_product<RowTiles, HeadDim, pitch>(probabilities, v + part * pitch, out);
    }
  }
  float *log_sums = job.log_sums ? job.log_sums + sums_offset(job, place.sequence, place.head) : NULL;
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float total = lanes_sum<4>(sum[m][half]);
      const float inverse = 1.0f / total;
      const int query = own_query + 16 * m + lane / 4 + 8 * half;
#pragma unroll
      for (int n = 0; n < HeadDim / 8; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) out[m][n][i] *= inverse;
      if (log_sums && lane % 4 == 0 && query < job.length)
        log_sums[query] = fmaf(largest[m][half], job.scale, logf(total));
    }
  uint16_t *to =
    (uint16_t *)job.out + out_offset(job, place.sequence, place.head) + row_offset(own_query, job.out_stride);
  store_rows<RowTiles, HeadDim, pitch>(out, own_q, to, job.out_stride, job.length - own_query, job.head_dim,
                                       job.by_vector);
}

// The probability of a score, from the logarithm of its row's sum times log2(e).
static __device__ __forceinline__ float probability_of(const attention_arguments &job, float score, float log2_sum) {
  return fp8gpt_exp2(not_positive(fmaf(score, job.scale_log2, -log2_sum)));
}

constexpr float log2_e = 1.44269504088896341f;

template <int HeadDim, int OutDim, int RowTiles, int Queries>
struct key_gradient_shape {
  static constexpr int keys = warps * 16 * RowTiles;
  static constexpr int parts = HeadDim / OutDim;
  static constexpr size_t shared_bytes = shared_bytes_of(2 * keys + 4 * Queries, HeadDim);
  static_assert(shared_bytes <= most_shared_bytes, "of one block");
};

// A block: OutDim columns of the gradients of a tile of keys and values, which meets the tiles of the queries that
// share it, of one head after the other; each is loaded while the one before is computed. Rows are keys.
template <int HeadDim, int OutDim, int RowTiles, int Queries>
static __global__ __launch_bounds__(threads) void key_gradient_kernel(const attention_arguments job) {
  typedef key_gradient_shape<HeadDim, OutDim, RowTiles, Queries> shape;
  constexpr int pitch = pitch_of(HeadDim), stage = 2 * Queries * pitch;
  const int first_column = (int)(blockIdx.x % shape::parts) * OutDim;
  const block_place place = place_of(blockIdx.x / shape::parts, tiles_of(job.length, shape::keys), job.kv_heads);
  const int first_key = place.tile * shape::keys;
  const int first_head = place.head * (job.heads / job.kv_heads);
  const int last_head = first_head + job.heads / job.kv_heads - 1;
  const head_rows<uint16_t> from = rows_of<uint16_t>(job, place.sequence, first_head, place.head);
  const uint16_t *douts = (const uint16_t *)job.dout + out_offset(job, place.sequence, first_head);
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  uint16_t *k = (uint16_t *)fp8core_dynamic_shared();
  uint16_t *v = k + shape::keys * pitch;
  uint16_t *stages = v + shape::keys * pitch;
  uint16_t *own_k = k + warp * 16 * RowTiles * pitch;
  uint16_t *own_v = v + warp * 16 * RowTiles * pitch;
  const int own_key = first_key + warp * 16 * RowTiles;
  float dk[RowTiles][OutDim / 8][4], dv[RowTiles][OutDim / 8][4];
  clear(dk);
  clear(dv);
  load_tile<shape::keys, HeadDim>(k, from.keys, job.key_stride, first_key, job.length, job);
  load_tile<shape::keys, HeadDim>(v, from.values, job.key_stride, first_key, job.length, job);
  load_tile<Queries, HeadDim>(stages, from.queries, job.query_stride, first_key, job.length, job);
  load_tile<Queries, HeadDim>(stages + Queries * pitch, douts, job.out_stride, first_key, job.length, job);
  int head = first_head, query = first_key;
  uint16_t *now = stages, *next = stages + stage;
#pragma unroll 1
  while (head <= last_head) {
    const uint16_t *q = now, *dout = now + Queries * pitch;
    // The last one's copies are there, and the last one but one's tiles are no longer read.
    fp8gpt_wait_for_copies();
    __syncthreads();
    int next_query = query + Queries, next_head = head;
    if (next_query >= job.length) {
      next_query = first_key;
      next_head++;
    }
    if (next_head <= last_head) {
      const int64_t offset = (int64_t)(next_head - first_head) * job.head_dim;
      load_tile<Queries, HeadDim>(next, from.queries + offset, job.query_stride, next_query, job.length, job);
      load_tile<Queries, HeadDim>(next + Queries * pitch, douts + offset, job.out_stride, next_query, job.length, job);
    }
    // Of the columns of this lane; read a product before they are needed.
    float log2_sums[Queries / 8][2], deltas[Queries / 8][2];
    const int64_t sums = sums_offset(job, place.sequence, head);
#pragma unroll
    for (int n = 0; n < Queries / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = query + 8 * n + 2 * (lane % 4) + i;
        log2_sums[n][i] = column < job.length ? job.log_sums[sums + column] * log2_e : 0.0f;
      }
    float probabilities[RowTiles][Queries / 8][4], dscores[RowTiles][Queries / 8][4];
    multiply_rows<RowTiles, Queries, HeadDim>(own_k, q, probabilities);
#pragma unroll
    for (int m = 0; m < RowTiles; m++)
#pragma unroll
      for (int n = 0; n < Queries / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          probabilities[m][n][i] = probability_of(job, probabilities[m][n][i], log2_sums[n][i % 2]);
    if (own_key + 16 * RowTiles - 1 > query || query + Queries > job.length) {
      // Of the queries that are there, those from the key on count: the first row's first one and the last one, from
      // this lane's first column on.
      const int first = own_key + lane / 4 - query - 2 * (lane % 4), last = job.length - 1 - query - 2 * (lane % 4);
#pragma unroll
      for (int m = 0; m < RowTiles; m++)
#pragma unroll
        for (int n = 0; n < Queries / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (8 * n + i % 2 - 16 * m - 8 * (i / 2) < first || 8 * n + i % 2 > last) probabilities[m][n][i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < Queries / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = query + 8 * n + 2 * (lane % 4) + i;
        deltas[n][i] = column < job.length ? job.deltas[sums + column] : 0.0f;
      }
#pragma unroll
    for (int part = 0; part < Queries; part += 16) {
      uint32_t left[RowTiles][4];
      pack_left(probabilities, part, left);
      add_product<RowTiles, OutDim, pitch>(left, dout + part * pitch + first_column, dv);
    }
    multiply_rows<RowTiles, Queries, HeadDim>(own_v, dout, dscores);
#pragma unroll
    for (int part = 0; part < Queries; part += 16) {
      uint32_t left[RowTiles][4];
#pragma unroll
      for (int m = 0; m < RowTiles; m++)
#pragma unroll
        for (int n = part / 8; n < part / 8 + 2; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) dscores[m][n][i] = probabilities[m][n][i] * (dscores[m][n][i] - deltas[n][i % 2]);
      pack_left(dscores, part, left);
      add_product<RowTiles, OutDim, pitch>(left, q + part * pitch + first_column, dk);
    }
    query = next_query;
    head = next_head;
    uint16_t *free = now;
    now = next;
    next = free;
  }
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int n = 0; n < OutDim / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) dk[m][n][i] *= job.scale;
  const int64_t to =
    (place.sequence * job.length + own_key) * job.key_stride + (int64_t)place.head * job.head_dim + first_column;
  const int rows = job.length - own_key, columns = job.head_dim - first_column;
  store_rows<RowTiles, OutDim, pitch>(dk, own_k, (uint16_t *)job.dkeys + to, job.key_stride, rows, columns,
                                      job.by_vector);
  store_rows<RowTiles, OutDim, pitch>(dv, own_v, (uint16_t *)job.dvalues + to, job.key_stride, rows, columns,
                                      job.by_vector);
}

template <int HeadDim, int RowTiles, int Keys>
struct query_gradient_shape {
  static constexpr int queries = warps * 16 * RowTiles;
  static constexpr size_t shared_bytes = shared_bytes_of(2 * queries + 4 * Keys, HeadDim);
  static_assert(shared_bytes <= most_shared_bytes, "of one block");
};

// A block: a tile of queries of one head, which meets the tiles of keys and values up to it; each is loaded while the
// one before is computed.
template <int HeadDim, int RowTiles, int Keys>
static __global__ __launch_bounds__(threads) void query_gradient_kernel(const attention_arguments job) {
  typedef query_gradient_shape<HeadDim, RowTiles, Keys> shape;
  constexpr int pitch = pitch_of(HeadDim), stage = 2 * Keys * pitch;
  const int tiles = tiles_of(job.length, shape::queries);
  const block_place place = place_of(blockIdx.x, tiles, job.heads);
  const int first_query = (tiles - 1 - place.tile) * shape::queries;
  const head_rows<uint16_t> from =
    rows_of<uint16_t>(job, place.sequence, place.head, place.head / (job.heads / job.kv_heads));
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  uint16_t *q = (uint16_t *)fp8core_dynamic_shared();
  uint16_t *dout = q + shape::queries * pitch;
  uint16_t *stages = dout + shape::queries * pitch;
  uint16_t *own_q = q + warp * 16 * RowTiles * pitch;
  uint16_t *own_dout = dout + warp * 16 * RowTiles * pitch;
  const int own_query = first_query + warp * 16 * RowTiles;
  const int key_count = smaller(first_query + shape::queries, job.length);
  const uint16_t *douts = (const uint16_t *)job.dout + out_offset(job, place.sequence, place.head);
  float dq[RowTiles][HeadDim / 8][4];
  float log2_sums[RowTiles][2], deltas[RowTiles][2];
  clear(dq);
  load_tile<shape::queries, HeadDim>(q, from.queries, job.query_stride, first_query, job.length, job);
  load_tile<shape::queries, HeadDim>(dout, douts, job.out_stride, first_query, job.length, job);
  load_tile<Keys, HeadDim>(stages, from.keys, job.key_stride, 0, job.length, job);
  load_tile<Keys, HeadDim>(stages + Keys * pitch, from.values, job.key_stride, 0, job.length, job);
  const int64_t sums = sums_offset(job, place.sequence, place.head);
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = own_query + 16 * m + lane / 4 + 8 * half;
      log2_sums[m][half] = query < job.length ? job.log_sums[sums + query] * log2_e : 0.0f;
      deltas[m][half] = query < job.length ? job.deltas[sums + query] : 0.0f;
    }
  uint16_t *now = stages, *next = stages + stage;
#pragma unroll 1
  for (int key = 0; key < key_count; key += Keys) {
    const uint16_t *k = now, *v = now + Keys * pitch;
    // The last one's copies are there, and the last one but one's tiles are no longer read.
    fp8gpt_wait_for_copies();
    __syncthreads();
    if (key + Keys < key_count) {
      load_tile<Keys, HeadDim>(next, from.keys, job.key_stride, key + Keys, job.length, job);
      load_tile<Keys, HeadDim>(next + Keys * pitch, from.values, job.key_stride, key + Keys, job.length, job);
    }
    float probabilities[RowTiles][Keys / 8][4], dscores[RowTiles][Keys / 8][4];
    multiply_rows<RowTiles, Keys, HeadDim>(own_q, k, probabilities);
    multiply_rows<RowTiles, Keys, HeadDim>(own_dout, v, dscores);
    if (key + Keys - 1 > own_query) {
      // Scores of keys after the query do not count. The first row's last key, from this lane's first column on.
      const int last = own_query + lane / 4 - key - 2 * (lane % 4);
#pragma unroll
      for (int m = 0; m < RowTiles; m++)
#pragma unroll
        for (int n = 0; n < Keys / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (8 * n + i % 2 - 16 * m - 8 * (i / 2) > last) probabilities[m][n][i] = -INFINITY;
    }
#pragma unroll
    for (int part = 0; part < Keys; part += 16) {
      uint32_t left[RowTiles][4];
#pragma unroll
      for (int m = 0; m < RowTiles; m++)
#pragma unroll
        for (int n = part / 8; n < part / 8 + 2; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            dscores[m][n][i] =
              probability_of(job, probabilities[m][n][i], log2_sums[m][i / 2]) * (dscores[m][n][i] - deltas[m][i / 2]);
      pack_left(dscores, part, left);
      add_product<RowTiles, HeadDim, pitch>(left, k + part * pitch, dq);
    }
    uint16_t *free = now;
    now = next;
    next = free;
  }
#pragma unroll
  for (int m = 0; m < RowTiles; m++)
#pragma unroll
    for (int n = 0; n < HeadDim / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) dq[m][n][i] *= job.scale;
  uint16_t *to = (uint16_t *)job.dqueries + (place.sequence * job.length + own_query) * job.query_stride +
                 (int64_t)place.head * job.head_dim;
  store_rows<RowTiles, HeadDim, pitch>(dq, own_q, to, job.query_stride, job.length - own_query, job.head_dim,
                                       job.by_vector);
}

// FP32: tiles of 64 x 64 scores in blocks of 16 x 16 threads, each with four rows and four columns, 16 apart. Operands
// come through shared memory in parts of 32 or 64 columns of the heads.

constexpr int wide_tile = 64;
constexpr int wide_threads = 256;
constexpr int wide_part = 32;
constexpr int wide_part_pitch = wide_part + 1;
constexpr int wide_pitch = wide_tile + 1;

struct wide_shared {
  // Two parts of 32 columns, or one of 64.
  float operands[2 * wide_tile * wide_part_pitch];
  // Probabilities or the gradients of scores: [query, key].
  float weights[wide_tile * wide_pitch];
};

// `Columns` columns of 64 rows; zeros where there are none.
template <int Columns>
static __device__ __forceinline__ void load_part(float *part, const float *rows, int stride, int first, int row_count,
                                                 int first_column, int columns) {
#pragma unroll 4
  for (int i = (int)threadIdx.x; i < wide_tile * Columns; i += wide_threads) {
    const int row = i / Columns, column = i % Columns;
    const bool there = first + row < row_count && first_column + column < columns;
    part[row * (Columns + 1) + column] = there ? rows[row_offset(first + row, stride) + first_column + column] : 0.0f;
  }
}

// sums += a b, with the strides of a's rows, b's columns and the inner index of both.
template <int RowStride, int LeftStride, int ColumnStride, int RightStride>
static __device__ __forceinline__ void multiply_part(const float *a, const float *b, int inner, float (&sums)[4][4]) {
  a += (int)threadIdx.x / 16 * RowStride;
  b += (int)threadIdx.x % 16 * ColumnStride;
#pragma unroll 8
  for (int k = 0; k < inner; k++) {
    float left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; i++) left[i] = a[16 * i * RowStride + k * LeftStride];
#pragma unroll
    for (int j = 0; j < 4; j++) right[j] = b[16 * j * ColumnStride + k * RightStride];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
  }
}

// 64 rows of a head in memory.
struct wide_rows {
  const float *rows;
  int stride;
  int first;
  int count;
};

// Products of the rows of two heads.
static __device__ __forceinline__ void wide_scores(wide_shared &shared, const wide_rows &left, const wide_rows &right,
                                                   int head_dim, float (&sums)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
  float *second = shared.operands + wide_tile * wide_part_pitch;
#pragma unroll 1
  for (int column = 0; column < head_dim; column += wide_part) {
    __syncthreads();
    load_part<wide_part>(shared.operands, left.rows, left.stride, left.first, left.count, column, head_dim);
    load_part<wide_part>(second, right.rows, right.stride, right.first, right.count, column, head_dim);
    __syncthreads();
    multiply_part<wide_part_pitch, 1, wide_part_pitch, 1>(shared.operands, second, wide_part, sums);
  }
}

// sums += weights or their transpose, times rows of a head.
template <bool Transposed, int Parts>
static __device__ __forceinline__ void add_weighted(wide_shared &shared, const wide_rows &right, int head_dim,
                                                    float (&sums)[Parts][4][4]) {
#pragma unroll
  for (int part = 0; part < Parts; part++) {
    if (part * wide_tile >= head_dim) break;
    __syncthreads();
    load_part<wide_tile>(shared.operands, right.rows, right.stride, right.first, right.count, part * wide_tile,
                         head_dim);
    __syncthreads();
    multiply_part<Transposed ? 1 : wide_pitch, Transposed ? wide_pitch : 1, 1, wide_pitch>(
      shared.weights, shared.operands, wide_tile, sums[part]);
  }
}

template <int Parts>
static __device__ __forceinline__ void clear_parts(float (&sums)[Parts][4][4]) {
#pragma unroll
  for (int part = 0; part < Parts; part++)
#pragma unroll
    for (int i = 0; i < 16; i++) sums[part][i / 4][i % 4] = 0.0f;
}

static __device__ __forceinline__ void store_weights(wide_shared &shared, const float (&weights)[4][4]) {
  // Others may still read what was there.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      shared.weights[((int)threadIdx.x / 16 + 16 * i) * wide_pitch + (int)threadIdx.x % 16 + 16 * j] = weights[i][j];
}

// Rows first .. of a head, times a factor.
template <int Parts>
static __device__ __forceinline__ void store_parts(const float (&sums)[Parts][4][4], float factor, float *rows,
                                                   int stride, int first, int row_count, int head_dim) {
#pragma unroll
  for (int part = 0; part < Parts; part++)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int row = first + (int)threadIdx.x / 16 + 16 * i;
        const int column = part * wide_tile + (int)threadIdx.x % 16 + 16 * j;
        if (row < row_count && column < head_dim) rows[row_offset(row, stride) + column] = sums[part][i][j] * factor;
      }
}

template <int Parts>
static __global__ __launch_bounds__(wide_threads) void wide_forward_kernel(const attention_arguments job) {
  __shared__ wide_shared shared;
  const int tiles = tiles_of(job.length, wide_tile);
  const block_place place = place_of(blockIdx.x, tiles, job.heads);
  const int first_query = (tiles - 1 - place.tile) * wide_tile;
  const head_rows<float> from =
    rows_of<float>(job, place.sequence, place.head, place.head / (job.heads / job.kv_heads));
  const wide_rows q = {from.queries, job.query_stride, first_query, job.length};
  const int all_keys = job.position + job.length;
  const int key_count = job.position + smaller(first_query + wide_tile, job.length);
  const int own_query = first_query + (int)threadIdx.x / 16;
  float out[Parts][4][4], largest[4], sum[4];
  clear_parts(out);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    largest[i] = lowest;
    sum[i] = 0.0f;
  }
#pragma unroll 1
  for (int key = 0; key < key_count; key += wide_tile) {
    const wide_rows k = {from.keys, job.key_stride, key, all_keys}, v = {from.values, job.key_stride, key, all_keys};
    float scores[4][4];
    wide_scores(shared, q, k, job.head_dim, scores);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float found = largest[i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool counts = key + (int)threadIdx.x % 16 + 16 * j <= job.position + own_query + 16 * i;
        scores[i][j] = counts ? scores[i][j] * job.scale : -INFINITY;
        found = fmaxf(found, scores[i][j]);
      }
      found = lanes_max<16>(found);
      const float correction = expf(largest[i] - found);
      largest[i] = found;
      sum[i] *= correction;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        scores[i][j] = expf(scores[i][j] - found);
        sum[i] += scores[i][j];
      }
#pragma unroll
      for (int part = 0; part < Parts; part++)
#pragma unroll
        for (int j = 0; j < 4; j++) out[part][i][j] *= correction;
    }
    store_weights(shared, scores);
    add_weighted<false, Parts>(shared, v, job.head_dim, out);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float total = lanes_sum<16>(sum[i]);
    const int query = own_query + 16 * i;
#pragma unroll
    for (int part = 0; part < Parts; part++)
#pragma unroll
      for (int j = 0; j < 4; j++) out[part][i][j] /= total;
    if (job.log_sums && threadIdx.x % 16 == 0 && query < job.length)
      job.log_sums[sums_offset(job, place.sequence, place.head) + query] = largest[i] + logf(total);
  }
  store_parts(out, 1.0f, (float *)job.out + out_offset(job, place.sequence, place.head), job.out_stride, first_query,
              job.length, job.head_dim);
}

// Probabilities and gradients of the scores of a tile.
static __device__ __forceinline__ void wide_gradients(wide_shared &shared, const attention_arguments &job,
                                                      const head_rows<float> &from, const float *douts, int64_t sums,
                                                      int first_query, int first_key, float (&probabilities)[4][4],
                                                      float (&dscores)[4][4]) {
  const wide_rows q = {from.queries, job.query_stride, first_query, job.length};
  const wide_rows k = {from.keys, job.key_stride, first_key, job.length};
  const wide_rows v = {from.values, job.key_stride, first_key, job.length};
  const wide_rows dout = {douts, job.out_stride, first_query, job.length};
  wide_scores(shared, q, k, job.head_dim, probabilities);
  wide_scores(shared, dout, v, job.head_dim, dscores);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int query = first_query + (int)threadIdx.x / 16 + 16 * i;
    const float log_sum = query < job.length ? job.log_sums[sums + query] : 0.0f;
    const float delta = query < job.length ? job.deltas[sums + query] : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool counts = first_key + (int)threadIdx.x % 16 + 16 * j <= query && query < job.length;
      const float probability = expf(not_positive(probabilities[i][j] * job.scale - log_sum));
      probabilities[i][j] = counts ? probability : 0.0f;
      dscores[i][j] = counts ? probability * (dscores[i][j] - delta) : 0.0f;
    }
  }
}

template <int Parts>
static __global__ __launch_bounds__(wide_threads) void wide_key_gradient_kernel(const attention_arguments job) {
  __shared__ wide_shared shared;
  const block_place place = place_of(blockIdx.x, tiles_of(job.length, wide_tile), job.kv_heads);
  const int first_key = place.tile * wide_tile;
  const int heads_a_key = job.heads / job.kv_heads;
  float dk[Parts][4][4], dv[Parts][4][4];
  clear_parts(dk);
  clear_parts(dv);
#pragma unroll 1
  for (int head = place.head * heads_a_key; head < (place.head + 1) * heads_a_key; head++) {
    const head_rows<float> from = rows_of<float>(job, place.sequence, head, place.head);
    const float *douts = (const float *)job.dout + out_offset(job, place.sequence, head);
#pragma unroll 1
    for (int query = first_key; query < job.length; query += wide_tile) {
      const wide_rows q = {from.queries, job.query_stride, query, job.length};
      const wide_rows dout = {douts, job.out_stride, query, job.length};
      float probabilities[4][4], dscores[4][4];
      wide_gradients(shared, job, from, douts, sums_offset(job, place.sequence, head), query, first_key, probabilities,
                     dscores);
      store_weights(shared, probabilities);
      add_weighted<true, Parts>(shared, dout, job.head_dim, dv);
      store_weights(shared, dscores);
      add_weighted<true, Parts>(shared, q, job.head_dim, dk);
    }
  }
  const int64_t to = place.sequence * job.length * job.key_stride + (int64_t)place.head * job.head_dim;
  store_parts(dk, job.scale, (float *)job.dkeys + to, job.key_stride, first_key, job.length, job.head_dim);
  store_parts(dv, 1.0f, (float *)job.dvalues + to, job.key_stride, first_key, job.length, job.head_dim);
}

template <int Parts>
static __global__ __launch_bounds__(wide_threads) void wide_query_gradient_kernel(const attention_arguments job) {
  __shared__ wide_shared shared;
  const int tiles = tiles_of(job.length, wide_tile);
  const block_place place = place_of(blockIdx.x, tiles, job.heads);
  const int first_query = (tiles - 1 - place.tile) * wide_tile;
  const head_rows<float> from =
    rows_of<float>(job, place.sequence, place.head, place.head / (job.heads / job.kv_heads));
  const float *douts = (const float *)job.dout + out_offset(job, place.sequence, place.head);
  float dq[Parts][4][4];
  clear_parts(dq);
#pragma unroll 1
  for (int key = 0; key <= first_query; key += wide_tile) {
    const wide_rows k = {from.keys, job.key_stride, key, job.length};
    float probabilities[4][4], dscores[4][4];
    wide_gradients(shared, job, from, douts, sums_offset(job, place.sequence, place.head), first_query, key,
                   probabilities, dscores);
    store_weights(shared, dscores);
    add_weighted<false, Parts>(shared, k, job.head_dim, dq);
  }
  float *to =
    (float *)job.dqueries + place.sequence * job.length * job.query_stride + (int64_t)place.head * job.head_dim;
  store_parts(dq, job.scale, to, job.query_stride, first_query, job.length, job.head_dim);
}

// Sums of out * dout over a head's columns, by eight lanes each.

constexpr int delta_threads = 256;
constexpr int delta_lanes = 8;

struct delta_arguments {
  // Heads of all rows.
  int64_t count;
  int length;
  int heads;
  int head_dim;
  const void *out;
  const void *dout;
  float *deltas;
};

template <fp8core_dtype Dtype, int Vector>
static __global__ __launch_bounds__(delta_threads) void delta_kernel(const delta_arguments job) {
  const int64_t index = ((int64_t)blockIdx.x * delta_threads + threadIdx.x) / delta_lanes;
  float sum = 0.0f;
  if (index < job.count) {
    for (int column = (int)threadIdx.x % delta_lanes * Vector; column < job.head_dim; column += delta_lanes * Vector) {
      float out[Vector], dout[Vector];
      fp8gpt_load<Dtype, Vector>(job.out, index * job.head_dim + column, out);
      fp8gpt_load<Dtype, Vector>(job.dout, index * job.head_dim + column, dout);
#pragma unroll
      for (int i = 0; i < Vector; i++) sum = fmaf(out[i], dout[i], sum);
    }
  }
  sum = lanes_sum<delta_lanes>(sum);
  if (index >= job.count || threadIdx.x % delta_lanes != 0) return;
  const int64_t row = index / job.heads, sequence = row / job.length;
  job.deltas[(sequence * job.heads + index % job.heads) * job.length + row % job.length] = sum;
}

// One query of one head, for a few new tokens after many: 16 warps share the keys, `Together` of which each awaits at
// once, with lanes along the columns. Each keeps a softmax of its own; these meet in shared memory.

constexpr int row_threads = 512;
constexpr int row_warps = row_threads / FP8CORE_WARP;

template <fp8core_dtype Dtype, int PerLane>
static __device__ __forceinline__ void load_lanes(const void *data, int64_t first, int head_dim, bool there,
                                                  float (&values)[PerLane]) {
  const int lane = (int)threadIdx.x % FP8CORE_WARP;
#pragma unroll
  for (int i = 0; i < PerLane; i++) {
    float value[1] = {0.0f};
    if (there && lane + FP8CORE_WARP * i < head_dim)
      fp8gpt_load<Dtype, 1>(data, first + lane + FP8CORE_WARP * i, value);
    values[i] = value[0];
  }
}

template <fp8core_dtype Dtype, int PerLane, int Together>
static __global__ __launch_bounds__(row_threads) void row_kernel(const attention_arguments job) {
  __shared__ float outs[row_warps][PerLane * FP8CORE_WARP];
  __shared__ float maxima[row_warps], sums[row_warps];
  const int query = (int)(blockIdx.x / (unsigned)job.heads), head = (int)(blockIdx.x % (unsigned)job.heads);
  const int lane = (int)threadIdx.x % FP8CORE_WARP, warp = (int)threadIdx.x / FP8CORE_WARP;
  const int64_t key_offset = (int64_t)(head / (job.heads / job.kv_heads)) * job.head_dim;
  const int key_count = job.position + query + 1;
  float q[PerLane], out[PerLane];
  load_lanes<Dtype, PerLane>(job.queries, row_offset(query, job.query_stride) + (int64_t)head * job.head_dim,
                             job.head_dim, true, q);
#pragma unroll
  for (int i = 0; i < PerLane; i++) out[i] = 0.0f;
  float largest = lowest, sum = 0.0f;
#pragma unroll 1
  for (int key = warp * Together; key < key_count; key += row_warps * Together) {
    float k[Together][PerLane], v[Together][PerLane], scores[Together];
#pragma unroll
    for (int t = 0; t < Together; t++)
      load_lanes<Dtype, PerLane>(job.keys, row_offset(key + t, job.key_stride) + key_offset, job.head_dim,
                                 key + t < key_count, k[t]);
#pragma unroll
    for (int t = 0; t < Together; t++)
      load_lanes<Dtype, PerLane>(job.values, row_offset(key + t, job.key_stride) + key_offset, job.head_dim,
                                 key + t < key_count, v[t]);
    float found = largest;
#pragma unroll
    for (int t = 0; t < Together; t++) {
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < PerLane; i++) score = fmaf(q[i], k[t][i], score);
      score = fp8gpt_warp_sum(score);
      scores[t] = key + t < key_count ? score * job.scale : -INFINITY;
      found = fmaxf(found, scores[t]);
    }
    const float correction = expf(largest - found);
    largest = found;
    sum *= correction;
#pragma unroll
    for (int i = 0; i < PerLane; i++) out[i] *= correction;
#pragma unroll
    for (int t = 0; t < Together; t++) {
      const float probability = expf(scores[t] - largest);
      sum += probability;
#pragma unroll
      for (int i = 0; i < PerLane; i++) out[i] = fmaf(probability, v[t][i], out[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < PerLane; i++) outs[warp][lane + FP8CORE_WARP * i] = out[i];
  if (lane == 0) {
    maxima[warp] = largest;
    sums[warp] = sum;
  }
  __syncthreads();
  const int column = (int)threadIdx.x;
  if (column >= job.head_dim) return;
  for (int i = 0; i < row_warps; i++) largest = fmaxf(largest, maxima[i]);
  float total = 0.0f, value[1] = {0.0f};
  for (int i = 0; i < row_warps; i++) {
    const float share = expf(maxima[i] - largest);
    total = fmaf(sums[i], share, total);
    value[0] = fmaf(outs[i][column], share, value[0]);
  }
  value[0] /= total;
  fp8gpt_store<Dtype, 1>(value, job.out, row_offset(query, job.out_stride) + (int64_t)head * job.head_dim + column);
}

// Keys and values of new tokens into the cache.

constexpr int copy_threads = 256;

struct copy_arguments {
  // [rows, columns] in words of a size that divides both rows.
  int64_t rows;
  int64_t columns;
  const void *from;
  int64_t stride;
  void *to;
};

template <typename Word>
static __global__ __launch_bounds__(copy_threads) void copy_kernel(const copy_arguments job) {
  const int64_t first = (int64_t)blockIdx.x * copy_threads + threadIdx.x, step = (int64_t)gridDim.x * copy_threads;
  for (int64_t i = first; i < job.rows * job.columns; i += step)
    ((Word *)job.to)[i] = ((const Word *)job.from)[i / job.columns * job.stride + i % job.columns];
}

// On the host.

constexpr int invalid_value = 1;

const void *offset(fp8core_dtype dtype, const void *data, int64_t elements) {
  return data ? (const char *)data + elements * fp8gpt_bytes(dtype) : NULL;
}

attention_arguments arguments_of(const fp8gpt_attention *job) {
  const fp8core_dtype dtype = job->dtype;
  const int64_t keys = (int64_t)job->heads * job->head_dim, values = keys + (int64_t)job->kv_heads * job->head_dim;
  attention_arguments arguments = {};
  arguments.length = (int)job->length;
  arguments.heads = job->heads;
  arguments.kv_heads = job->kv_heads;
  arguments.head_dim = job->head_dim;
  arguments.by_vector = (int64_t)job->head_dim * fp8gpt_bytes(dtype) % 16 == 0 && fp8gpt_aligned(job->qkv) &&
                        fp8gpt_aligned(job->out) && fp8gpt_aligned(job->dout) && fp8gpt_aligned(job->dqkv);
  arguments.scale = (float)(1.0 / sqrt((double)job->head_dim));
  arguments.scale_log2 = (float)(1.4426950408889634 / sqrt((double)job->head_dim));
  arguments.queries = job->qkv;
  arguments.keys = offset(dtype, job->qkv, keys);
  arguments.values = offset(dtype, job->qkv, values);
  arguments.query_stride = (int)(values + (int64_t)job->kv_heads * job->head_dim);
  arguments.key_stride = arguments.query_stride;
  arguments.out = job->out;
  arguments.dout = job->dout;
  arguments.out_stride = (int)keys;
  arguments.log_sums = job->log_sums;
  arguments.dqueries = job->dqkv;
  arguments.dkeys = (void *)offset(dtype, job->dqkv, keys);
  arguments.dvalues = (void *)offset(dtype, job->dqkv, values);
  return arguments;
}

// One block for each tile of each head of each sequence.
int launch_tiles(void (*kernel)(attention_arguments), int block, size_t shared_bytes, void *stream,
                 const attention_arguments &arguments, int64_t sequences, int heads, int tile) {
  const int64_t blocks = sequences * heads * tiles_of(arguments.length, tile);
  if (blocks > INT32_MAX) return invalid_value;
  return fp8core_launch(kernel, dim3((unsigned)blocks, 1, 1), dim3((unsigned)block, 1, 1), stream, arguments,
                        shared_bytes);
}

template <int HeadDim, int RowTiles>
int launch_forward(void *stream, const attention_arguments &arguments, int64_t sequences) {
  typedef forward_shape<HeadDim, RowTiles> shape;
  return launch_tiles(forward_kernel<HeadDim, RowTiles>, threads, shape::shared_bytes, stream, arguments, sequences,
                      arguments.heads, shape::queries);
}

template <int Parts>
int launch_wide_forward(void *stream, const attention_arguments &arguments, int64_t sequences) {
  return launch_tiles(wide_forward_kernel<Parts>, wide_threads, 0, stream, arguments, sequences, arguments.heads,
                      wide_tile);
}

int launch_any_forward(fp8core_dtype dtype, void *stream, const attention_arguments &arguments, int64_t sequences) {
  const int head_dim = arguments.head_dim;
  if (dtype == FP8CORE_FP32)
    return head_dim <= 64    ? launch_wide_forward<1>(stream, arguments, sequences)
           : head_dim <= 128 ? launch_wide_forward<2>(stream, arguments, sequences)
                             : launch_wide_forward<4>(stream, arguments, sequences);
  return head_dim <= 64    ? launch_forward<64, 2>(stream, arguments, sequences)
         : head_dim <= 80  ? launch_forward<80, 2>(stream, arguments, sequences)
         : head_dim <= 96  ? launch_forward<96, 2>(stream, arguments, sequences)
         : head_dim <= 128 ? launch_forward<128, 2>(stream, arguments, sequences)
                           : launch_forward<256, 1>(stream, arguments, sequences);
}

template <int HeadDim, int OutDim, int KeyRowTiles, int Queries, int QueryRowTiles, int Keys>
int launch_backward(void *stream, const attention_arguments &arguments, int64_t sequences) {
  typedef key_gradient_shape<HeadDim, OutDim, KeyRowTiles, Queries> key_shape;
  typedef query_gradient_shape<HeadDim, QueryRowTiles, Keys> query_shape;
  const int error =
    launch_tiles(key_gradient_kernel<HeadDim, OutDim, KeyRowTiles, Queries>, threads, key_shape::shared_bytes, stream,
                 arguments, sequences * key_shape::parts, arguments.kv_heads, key_shape::keys);
  return error ? error
               : launch_tiles(query_gradient_kernel<HeadDim, QueryRowTiles, Keys>, threads, query_shape::shared_bytes,
                              stream, arguments, sequences, arguments.heads, query_shape::queries);
}

template <int Parts>
int launch_wide_backward(void *stream, const attention_arguments &arguments, int64_t sequences) {
  const int error = launch_tiles(wide_key_gradient_kernel<Parts>, wide_threads, 0, stream, arguments, sequences,
                                 arguments.kv_heads, wide_tile);
  return error ? error
               : launch_tiles(wide_query_gradient_kernel<Parts>, wide_threads, 0, stream, arguments, sequences,
                              arguments.heads, wide_tile);
}

// Up to as many queries, each has the cache read by a block of its own.
constexpr int64_t most_single_rows = 8;

template <fp8core_dtype Dtype>
int launch_rows(void *stream, const attention_arguments &arguments) {
  const dim3 grid((unsigned)(arguments.length * arguments.heads), 1, 1), block(row_threads, 1, 1);
  return arguments.head_dim <= 64    ? fp8core_launch(row_kernel<Dtype, 2, 8>, grid, block, stream, arguments)
         : arguments.head_dim <= 128 ? fp8core_launch(row_kernel<Dtype, 4, 8>, grid, block, stream, arguments)
                                     : fp8core_launch(row_kernel<Dtype, 8, 4>, grid, block, stream, arguments);
}

template <typename Word>
int launch_copy(void *stream, const copy_arguments &elements, int64_t elements_a_word) {
  copy_arguments words = elements;
  words.columns /= elements_a_word;
  words.stride /= elements_a_word;
  const int64_t blocks = fp8gpt_divide_up(words.rows * words.columns, copy_threads);
  return fp8core_launch(copy_kernel<Word>, dim3((unsigned)(blocks < 1024 ? blocks : 1024), 1, 1),
                        dim3(copy_threads, 1, 1), stream, words);
}

} // namespace

extern "C" int fp8gpt_cuda_launch_attention(void *stream, const fp8gpt_attention *job) {
  attention_arguments arguments = arguments_of(job);
  return launch_any_forward(job->dtype, stream, arguments, job->sequences);
}

extern "C" int fp8gpt_cuda_launch_attention_backward(void *stream, const fp8gpt_attention *job, float *deltas) {
  attention_arguments arguments = arguments_of(job);
  arguments.deltas = deltas;
  delta_arguments delta;
  delta.count = job->sequences * job->length * job->heads;
  delta.length = arguments.length;
  delta.heads = job->heads;
  delta.head_dim = job->head_dim;
  delta.out = job->out;
  delta.dout = job->dout;
  delta.deltas = deltas;
  const int64_t blocks = fp8gpt_divide_up(delta.count, delta_threads / delta_lanes);
  if (blocks > INT32_MAX) return invalid_value;
  const int error = fp8gpt_dispatch(job->dtype, arguments.by_vector, [&](auto shape) {
    typedef decltype(shape) of;
    return fp8core_launch(delta_kernel<of::dtype, of::vector>, dim3((unsigned)blocks, 1, 1), dim3(delta_threads, 1, 1),
                          stream, delta);
  });
  if (error) return error;
  const int64_t sequences = job->sequences;
  const int head_dim = job->head_dim;
  if (job->dtype == FP8CORE_FP32)
    return head_dim <= 64    ? launch_wide_backward<1>(stream, arguments, sequences)
           : head_dim <= 128 ? launch_wide_backward<2>(stream, arguments, sequences)
                             : launch_wide_backward<4>(stream, arguments, sequences);
  return head_dim <= 64    ? launch_backward<64, 64, 2, 32, 2, 64>(stream, arguments, sequences)
         : head_dim <= 80  ? launch_backward<80, 80, 1, 64, 2, 32>(stream, arguments, sequences)
         : head_dim <= 96  ? launch_backward<96, 96, 1, 64, 2, 32>(stream, arguments, sequences)
         : head_dim <= 128 ? launch_backward<128, 128, 1, 32, 1, 32>(stream, arguments, sequences)
                           : launch_backward<256, 128, 1, 16, 1, 16>(stream, arguments, sequences);
}

extern "C" int fp8gpt_cuda_launch_attention_cached(void *stream, const fp8gpt_attention_cached *job) {
  const fp8gpt_attention *attention = &job->attention;
  const fp8core_dtype dtype = attention->dtype;
  attention_arguments arguments = arguments_of(attention);
  const int64_t keys = (int64_t)attention->kv_heads * attention->head_dim;
  copy_arguments copy;
  copy.rows = attention->length;
  copy.columns = 2 * keys;
  copy.from = arguments.keys;
  copy.stride = arguments.query_stride;
  arguments.by_vector = arguments.by_vector && fp8gpt_aligned(job->cache);
  arguments.position = (int)job->position;
  arguments.keys = job->cache;
  arguments.values = offset(dtype, job->cache, keys);
  arguments.key_stride = (int)(2 * keys);
  arguments.log_sums = NULL;
  copy.to = (void *)offset(dtype, job->cache, job->position * arguments.key_stride);
  const int error = arguments.by_vector     ? launch_copy<uint4>(stream, copy, 16 / fp8gpt_bytes(dtype))
                    : dtype == FP8CORE_FP32 ? launch_copy<uint32_t>(stream, copy, 1)
                                            : launch_copy<uint16_t>(stream, copy, 1);
  if (error) return error;
  if (attention->length > most_single_rows) return launch_any_forward(dtype, stream, arguments, 1);
  return dtype == FP8CORE_FP32 ? launch_rows<FP8CORE_FP32>(stream, arguments)
                               : launch_rows<FP8CORE_BF16>(stream, arguments);
}
