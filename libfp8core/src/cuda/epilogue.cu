// What follows the sums of a matrix product: see fp8core_gemm(). One definition for whatever cuBLASLt does not fuse.
#include "gemm_rules.h"
#include "kernels.h"
#include "rules.cuh"

namespace {

// A block takes tiles of 128 columns and FP8CORE_CUDA_EPILOGUE_ROWS rows: four columns a thread.
constexpr int tile_lanes = 32;
constexpr int tile_columns = 4 * tile_lanes;
constexpr int tile_rows = 8;
constexpr int threads = tile_lanes * tile_rows;

// The rules with the format known to the compiler.
static __device__ __forceinline__ uint32_t encode(fp8core_dtype dtype, float value) {
  switch (dtype) {
  case FP8CORE_E4M3: return fp8core_result_code(FP8CORE_E4M3, value);
  case FP8CORE_E5M2: return fp8core_result_code(FP8CORE_E5M2, value);
  case FP8CORE_BF16: return fp8core_result_code(FP8CORE_BF16, value);
  case FP8CORE_FP16: return fp8core_result_code(FP8CORE_FP16, value);
  case FP8CORE_FP32: break;
  }
  return fp8core_result_code(FP8CORE_FP32, value);
}

static __device__ __forceinline__ float decode(fp8core_dtype dtype, uint32_t code) {
  switch (dtype) {
  case FP8CORE_E4M3: return fp8core_bits_float(fp8core_decode_bits(FP8CORE_E4M3, code));
  case FP8CORE_E5M2: return fp8core_bits_float(fp8core_decode_bits(FP8CORE_E5M2, code));
  case FP8CORE_BF16: return fp8core_bits_float(fp8core_decode_bits(FP8CORE_BF16, code));
  case FP8CORE_FP16: return fp8core_bits_float(fp8core_decode_bits(FP8CORE_FP16, code));
  case FP8CORE_FP32: break;
  }
  return fp8core_bits_float(fp8core_decode_bits(FP8CORE_FP32, code));
}

static __host__ __device__ __forceinline__ int size_of(fp8core_dtype dtype) {
  return dtype == FP8CORE_FP32 ? 4 : dtype == FP8CORE_BF16 || dtype == FP8CORE_FP16 ? 2 : 1;
}

// The values of the first `valid` of four elements, by vector where the address allows it.
static __device__ __forceinline__ void load_values(const fp8core_rows &from, int64_t index, int valid,
                                                   float scale_inverse, float (&values)[4]) {
  const int size = size_of(from.dtype);
  const unsigned char *address = (const unsigned char *)from.data + index * size;
  uint32_t codes[4] = {0, 0, 0, 0};
  if (valid == 4 && (uintptr_t)address % (uintptr_t)(4 * size) == 0) {
    if (size == 4) {
      const uint4 four = *(const uint4 *)address;
      codes[0] = four.x;
      codes[1] = four.y;
      codes[2] = four.z;
      codes[3] = four.w;
    } else if (size == 2) {
      const uint2 two = *(const uint2 *)address;
      codes[0] = two.x & 0xffff;
      codes[1] = two.x >> 16;
      codes[2] = two.y & 0xffff;
      codes[3] = two.y >> 16;
    } else {
      const uint32_t word = *(const uint32_t *)address;
#pragma unroll
      for (int i = 0; i < 4; i++) codes[i] = word >> (8 * i) & 0xff;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i >= valid) continue;
      codes[i] = size == 4   ? ((const uint32_t *)address)[i]
                 : size == 2 ? ((const uint16_t *)address)[i]
                             : (uint32_t)address[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] = decode(from.dtype, codes[i]) * scale_inverse;
}

static __device__ __forceinline__ void store_values(const fp8core_rows &to, int64_t index, int valid, float scale,
                                                    const float (&values)[4]) {
  const int size = size_of(to.dtype);
  unsigned char *address = (unsigned char *)to.data + index * size;
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; i++) codes[i] = encode(to.dtype, values[i] * scale);
  if (valid == 4 && (uintptr_t)address % (uintptr_t)(4 * size) == 0) {
    if (size == 4)
      *(uint4 *)address = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    else if (size == 2)
      *(uint2 *)address = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
    else
      *(uint32_t *)address = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i >= valid) continue;
    if (size == 4)
      ((uint32_t *)address)[i] = codes[i];
    else if (size == 2)
      ((uint16_t *)address)[i] = (uint16_t)codes[i];
    else
      address[i] = (unsigned char)codes[i];
  }
}

static __device__ __forceinline__ void raise(uint32_t *amax, float value) {
  const uint32_t magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
  *amax = magnitude > *amax ? magnitude : *amax;
}

static __global__ __launch_bounds__(threads) void epilogue_kernel(const fp8core_cuda_epilogue job) {
  __shared__ float shared_sums[tile_rows][tile_columns];
  const int64_t row_blocks = (job.rows + FP8CORE_CUDA_EPILOGUE_ROWS - 1) / FP8CORE_CUDA_EPILOGUE_ROWS;
  const double factor = fp8core_gemm_factor(job.alpha, job.scale_inverse_a, job.scale_inverse_b);
  const bool factor_fits = fp8core_gemm_factor_fits(factor);
  const float single_factor = (float)factor;
  const float c_scale = fp8core_scale_of(job.c.scale_inverse);
  const float bias_scale = fp8core_scale_of(job.bias.scale_inverse);
  const float auxiliary_scale = fp8core_scale_of(job.auxiliary.scale),
              auxiliary_inverse = fp8core_scale_of(job.auxiliary.scale_inverse);
  const float d_scale = fp8core_scale_of(job.d.scale);
  const bool writes_auxiliary =
    job.auxiliary.data && (job.epilogue == FP8CORE_EPILOGUE_RELU || job.epilogue == FP8CORE_EPILOGUE_GELU);
  const bool reads_auxiliary = job.auxiliary.data && !writes_auxiliary;
  const int64_t column = (int64_t)blockIdx.x * tile_columns + 4 * (int)threadIdx.x;
  const int64_t columns_left = job.columns - column;
  const int valid = columns_left >= 4 ? 4 : columns_left > 0 ? (int)columns_left : 0;
  fp8core_gathered d_gathered = {}, auxiliary_gathered = {};
  float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (job.bias.data && valid > 0) load_values(job.bias, column, valid, bias_scale, bias);
  for (int64_t matrix = blockIdx.z; matrix < job.batch; matrix += gridDim.z) {
    for (int64_t block = blockIdx.y; block < row_blocks; block += gridDim.y) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int step = 0; step < FP8CORE_CUDA_EPILOGUE_ROWS / tile_rows; step++) {
        const int64_t row = block * FP8CORE_CUDA_EPILOGUE_ROWS + step * tile_rows + (int)threadIdx.y;
        if (row >= job.rows || valid == 0) break;
        float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (job.product) {
          // Rows of the product are padded, so that four of its elements are always there, and aligned.
          const float4 four =
            *(const float4 *)(job.product + matrix * job.product_batch_stride + row * job.product_stride + column);
          values[0] = four.x;
          values[1] = four.y;
          values[2] = four.z;
          values[3] = four.w;
#pragma unroll
          for (int i = 0; i < 4; i++)
            values[i] = factor_fits ? values[i] * single_factor : (float)((double)values[i] * factor);
        }
        if (job.c.data) {
          float c[4];
          load_values(job.c, matrix * job.c_batch_stride + row * job.c.stride + column, valid, c_scale, c);
#pragma unroll
          for (int i = 0; i < 4; i++) values[i] = values[i] + job.beta * c[i];
        }
        if (job.bias.data) {
#pragma unroll
          for (int i = 0; i < 4; i++) values[i] = values[i] + bias[i];
        }
        float auxiliary[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int64_t auxiliary_index = matrix * job.auxiliary_batch_stride + row * job.auxiliary.stride + column;
        if (reads_auxiliary) load_values(job.auxiliary, auxiliary_index, valid, auxiliary_inverse, auxiliary);
        if (writes_auxiliary) {
          store_values(job.auxiliary, auxiliary_index, valid, auxiliary_scale, values);
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (i < valid) raise(&auxiliary_gathered.amax, values[i]);
        }
        if (job.epilogue != FP8CORE_EPILOGUE_NONE) {
#pragma unroll
          for (int i = 0; i < 4; i++) values[i] = fp8core_gemm_activation(job.epilogue, values[i], auxiliary[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (i < valid) raise(&d_gathered.amax, values[i]);
          sums[i] += values[i];
        }
        store_values(job.d, matrix * job.d_batch_stride + row * job.d.stride + column, valid, d_scale, values);
      }
      if (job.partial_sums) {
#pragma unroll
        for (int i = 0; i < 4; i++) shared_sums[threadIdx.y][4 * threadIdx.x + i] = sums[i];
        __syncthreads();
        const int thread = (int)fp8core_linear_thread();
        const int64_t summed = (int64_t)blockIdx.x * tile_columns + thread;
        if (thread < tile_columns && summed < job.columns) {
          float sum = 0.0f;
          for (int i = 0; i < tile_rows; i++) sum += shared_sums[i][thread];
          job.partial_sums[(matrix * row_blocks + block) * job.columns + summed] = sum;
        }
        __syncthreads();
      }
    }
  }
  if (job.d.amax) fp8core_store_gathered(d_gathered, job.d.amax, NULL);
  if (writes_auxiliary && job.auxiliary.amax) {
    __syncthreads();
    fp8core_store_gathered(auxiliary_gathered, job.auxiliary.amax, NULL);
  }
}

struct column_sums_arguments {
  fp8core_rows sums;
  const float *partial_sums;
  int64_t blocks;
  int64_t columns;
};

static __global__ __launch_bounds__(threads) void column_sums_kernel(const column_sums_arguments job) {
  const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  fp8core_gathered gathered = {};
  if (column < job.columns) {
    float sum = 0.0f;
    for (int64_t block = 0; block < job.blocks; block++) sum += job.partial_sums[block * job.columns + column];
    raise(&gathered.amax, sum);
    ((float *)job.sums.data)[column] = sum * fp8core_scale_of(job.sums.scale);
  }
  if (job.sums.amax) fp8core_store_gathered(gathered, job.sums.amax, NULL);
}

struct factors_arguments {
  float *factors;
  float alpha;
  float beta;
  const float *scale_a;
  const float *scale_b;
};

static __global__ void factors_kernel(const factors_arguments job) {
  job.factors[0] = (float)fp8core_gemm_factor(job.alpha, job.scale_a, job.scale_b);
  job.factors[1] = job.beta;
  job.factors[2] = 0.0f;
}

struct merge_arguments {
  float *amax;
  const float *measured;
  int64_t rows;
  int64_t vectors;
  const unsigned char *data;
  int64_t stride;
  // Added to the low seven bits of a byte, reaches the eighth for a NaN only.
  uint32_t reach;
};

static __global__ __launch_bounds__(threads) void merge_amax_kernel(const merge_arguments job) {
  uint32_t found = 0;
  for (int64_t row = blockIdx.y; row < job.rows; row += gridDim.y) {
    const uint4 *vectors = (const uint4 *)(job.data + row * job.stride);
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.vectors;
         i += (int64_t)gridDim.x * blockDim.x) {
      const uint4 four = vectors[i];
      found |= ((four.x & 0x7f7f7f7f) + job.reach) | ((four.y & 0x7f7f7f7f) + job.reach) |
               ((four.z & 0x7f7f7f7f) + job.reach) | ((four.w & 0x7f7f7f7f) + job.reach);
    }
  }
  if (found & 0x80808080) fp8core_raise_shared_amax(job.amax, FP8CORE_F32_QUIET_NAN);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    fp8core_raise_shared_amax(job.amax, fp8core_float_bits(*job.measured) & FP8CORE_F32_MAGNITUDE);
}

unsigned at_most(int64_t value, int64_t most) { return (unsigned)(value < most ? value : most); }

} // namespace

extern "C" int fp8core_cuda_launch_epilogue(const fp8core_cuda_target *target, const fp8core_cuda_epilogue *job) {
  const int64_t row_blocks = (job->rows + FP8CORE_CUDA_EPILOGUE_ROWS - 1) / FP8CORE_CUDA_EPILOGUE_ROWS;
  const dim3 grid((unsigned)((job->columns + tile_columns - 1) / tile_columns), at_most(row_blocks, 65535),
                  at_most(job->batch, 65535));
  return fp8core_launch(epilogue_kernel, grid, dim3(tile_lanes, tile_rows, 1), target->stream, *job);
}

extern "C" int fp8core_cuda_launch_column_sums(const fp8core_cuda_target *target, const fp8core_rows *sums,
                                               const float *partial_sums, int64_t blocks, int64_t columns) {
  const column_sums_arguments job = {*sums, partial_sums, blocks, columns};
  return fp8core_launch(column_sums_kernel, dim3((unsigned)((columns + threads - 1) / threads), 1, 1),
                        dim3(threads, 1, 1), target->stream, job);
}

extern "C" int fp8core_cuda_launch_factors(const fp8core_cuda_target *target, float *factors, float alpha, float beta,
                                           const float *scale_a, const float *scale_b) {
  const factors_arguments job = {factors, alpha, beta, scale_a, scale_b};
  return fp8core_launch(factors_kernel, dim3(1, 1, 1), dim3(1, 1, 1), target->stream, job);
}

extern "C" int fp8core_cuda_launch_merge_amax(const fp8core_cuda_target *target, float *amax, const float *measured,
                                              int64_t rows, int64_t columns, const void *data, int64_t stride,
                                              fp8core_dtype dtype) {
  const merge_arguments job = {amax,
                               measured,
                               rows,
                               columns / 16,
                               (const unsigned char *)data,
                               stride,
                               dtype == FP8CORE_E4M3 ? 0x01010101u : 0x03030303u};
  const int64_t across = (job.vectors + threads - 1) / threads;
  const int64_t resident = (int64_t)target->multiprocessors * 8;
  const int64_t down = (resident + across - 1) / across;
  const dim3 grid(at_most(across, resident), at_most(rows, down > 65535 ? 65535 : down), 1);
  return fp8core_launch(merge_amax_kernel, grid, dim3(threads, 1, 1), target->stream, job);
}
