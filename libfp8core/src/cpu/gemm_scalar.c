#include "cpu/gemm.h"

// The portable tier. Products are rounded before they are added, so that its sums are those of fp8core_gemm_reference()
// in FP32 bit for bit.

#define ROWS 4
#define COLUMNS 8

static void pack(const fp8core_gemm_operand *source, int width, int64_t first, int64_t count, int64_t k_first,
                 int64_t k_count, unsigned char *panels, int64_t panel_stride) {
  const int64_t element = (int64_t)fp8core_dtype_size(source->dtype);
  const int64_t i_stride = source->k_contiguous ? source->stride : element;
  const int64_t k_stride = source->k_contiguous ? element : source->stride;
  for (int64_t panel = 0; panel * width < count; panel++) {
    float *packed = (float *)(void *)(panels + panel * panel_stride);
    const unsigned char *corner = source->data + (first + panel * width) * i_stride + k_first * k_stride;
    const int64_t valid = count - panel * width < width ? count - panel * width : width;
    for (int64_t k = 0; k < k_count; k++)
      for (int64_t i = 0; i < width; i++)
        packed[k * width + i] =
          i < valid ? fp8core_load_element(source->dtype, corner + i * i_stride + k * k_stride, 0) : 0.0f;
  }
}

static void pack_a(const fp8core_gemm_operand *source, int64_t first, int64_t count, int64_t k_first, int64_t k_count,
                   unsigned char *panels, int64_t panel_stride) {
  pack(source, ROWS, first, count, k_first, k_count, panels, panel_stride);
}

static void pack_b(const fp8core_gemm_operand *source, int64_t first, int64_t count, int64_t k_first, int64_t k_count,
                   unsigned char *panels, int64_t panel_stride) {
  pack(source, COLUMNS, first, count, k_first, k_count, panels, panel_stride);
}

static void multiply(int rows, int columns, int64_t k, const unsigned char *a, const unsigned char *b, float *tile,
                     int accumulate) {
  const float *packed_a = (const float *)(const void *)a;
  const float *packed_b = (const float *)(const void *)b;
  (void)rows;
  (void)columns;
  float sums[ROWS][COLUMNS] = {{0}};
  if (accumulate) memcpy(sums, tile, sizeof(sums));
  for (int64_t i = 0; i < k; i++)
    for (int row = 0; row < ROWS; row++)
      for (int column = 0; column < COLUMNS; column++)
        sums[row][column] += packed_a[i * ROWS + row] * packed_b[i * COLUMNS + column];
  memcpy(tile, sums, sizeof(sums));
}

static void raise(uint32_t *maximum, float value) {
  const uint32_t magnitude = fp8core_float_bits(value) & FP8CORE_F32_MAGNITUDE;
  if (magnitude > *maximum) *maximum = magnitude;
}

static float finish_element(const fp8core_gemm_epilogue *epilogue, int64_t row, int64_t column, float sum,
                            fp8core_gemm_maxima *maxima) {
  float value = sum * epilogue->factor;
  if (epilogue->c) {
    const float c = fp8core_load_element(epilogue->c_dtype, epilogue->c, row * epilogue->c_stride + column);
    value += epilogue->beta * (c * epilogue->c_scale_inverse);
  }
  if (epilogue->bias) value += epilogue->bias[column];
  float auxiliary = 0.0f;
  if (epilogue->auxiliary) {
    const int64_t index = row * epilogue->auxiliary_stride + column;
    if (epilogue->activation == FP8CORE_EPILOGUE_RELU || epilogue->activation == FP8CORE_EPILOGUE_GELU) {
      raise(&maxima->auxiliary, value);
      fp8core_store_element(epilogue->auxiliary_dtype, epilogue->auxiliary, index, value * epilogue->auxiliary_scale);
    } else {
      auxiliary =
        fp8core_load_element(epilogue->auxiliary_dtype, epilogue->auxiliary, index) * epilogue->auxiliary_scale_inverse;
    }
  }
  value = fp8core_gemm_activation(epilogue->activation, value, auxiliary);
  raise(&maxima->d, value);
  fp8core_store_element(epilogue->d_dtype, epilogue->d, row * epilogue->d_stride + column, value * epilogue->d_scale);
  return value;
}

static void finish(const fp8core_gemm_epilogue *epilogue, const fp8core_gemm_tile *tile, fp8core_gemm_maxima *maxima) {
  for (int row = 0; row < tile->rows; row++)
    for (int column = 0; column < tile->columns; column++) {
      const float value =
        finish_element(epilogue, tile->row + row, tile->column + column, tile->sums[row * COLUMNS + column], maxima);
      if (tile->column_sums) tile->column_sums[column] += value;
    }
}

const fp8core_gemm_kernels fp8core_gemm_scalar = {
  .rows = ROWS,
  .columns = COLUMNS,
  .k_unit = 1,
  .packed_bytes = 4,
  .block_k = 512,
  .pack_a = pack_a,
  .pack_b = pack_b,
  .multiply = multiply,
  .finish = finish,
};
