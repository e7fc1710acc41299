// Matrix products on CUDA: which types they run in, what is copied for them, and whether cuBLASLt or the kernel of
// epilogue.cu does what follows the sums. docs/cuda.md has the table.
//
// cuBLASLt counts columns first. A row-major matrix is the column-major transpose of itself, so that
// D = op(A) op(B) is asked for as D^T = op(B)^T op(A)^T: its A is our B, its m our N.
#include <string.h>

#include "plans.h"

// FP8 kernels want dimensions, strides and addresses in multiples of this.
#define FP8_ALIGNMENT 16
#define WORKSPACE_ALIGNMENT 256
// cuBLASLt's part of the workspace; with the scalars it fits the default workspace of a context.
#define BLAS_WORKSPACE_BYTES ((INT64_C(32) << 20) - (INT64_C(64) << 10))
#define SCALARS_BYTES 256
// Sums that a separate epilogue reads are made in pieces of at most this. Tests set it small, to have pieces.
#if defined(FP8CORE_CUDA_PRODUCT_BYTES)
#  define PRODUCT_BYTES ((int64_t)FP8CORE_CUDA_PRODUCT_BYTES)
#else
#  define PRODUCT_BYTES (INT64_C(256) << 20)
#endif

// What is done to an operand before cuBLASLt takes it.
typedef enum preparation { AS_IT_IS, CONVERTED, TRANSPOSED } preparation;

typedef struct gemm_operand {
  const fp8core_tensor *tensor;
  int64_t batch_stride;
  // The operand has its K in columns: [M, K] of A or [N, K] of B.
  int k_contiguous;
  int64_t rows;
  int64_t columns;
  preparation preparation;
  // As cuBLASLt sees it, after the preparation.
  fp8core_dtype dtype;
  int64_t stride;
  int64_t prepared_batch_stride;
  // 0: no copy.
  int64_t copy_bytes;
} gemm_operand;

typedef struct gemm_product {
  fp8core_context *context;
  const fp8core_cuda_state *state;
  const fp8core_gemm_job *job;
  // The type that the tensor cores multiply in: FP8, or a wider one that holds both operands exactly.
  int fp8;
  fp8core_dtype type;
  gemm_operand a;
  gemm_operand b;
  unsigned char *scalars;
  unsigned char *blas_workspace;
  unsigned char *a_copy;
  unsigned char *b_copy;
  float *sums;
  float *partial_sums;
} gemm_product;

static int is_fp8(fp8core_dtype dtype) { return dtype == FP8CORE_E4M3 || dtype == FP8CORE_E5M2; }

static int64_t size_of(fp8core_dtype dtype) { return (int64_t)fp8core_dtype_size(dtype); }

static int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static cudaDataType_t cuda_type(fp8core_dtype dtype) {
  switch (dtype) {
  case FP8CORE_E4M3: return CUDA_R_8F_E4M3;
  case FP8CORE_E5M2: return CUDA_R_8F_E5M2;
  case FP8CORE_BF16: return CUDA_R_16BF;
  case FP8CORE_FP16: return CUDA_R_16F;
  case FP8CORE_FP32: break;
  }
  return CUDA_R_32F;
}

// The narrowest of BF16, FP16 and FP32 that holds the values of both: every FP8 value is exact in BF16 and in FP16.
static fp8core_dtype common_type(fp8core_dtype a, fp8core_dtype b) {
  if (a == FP8CORE_FP32 || b == FP8CORE_FP32) return FP8CORE_FP32;
  const int bf16 = a == FP8CORE_BF16 || b == FP8CORE_BF16;
  const int fp16 = a == FP8CORE_FP16 || b == FP8CORE_FP16;
  if (bf16 && fp16) return FP8CORE_FP32;
  return fp16 ? FP8CORE_FP16 : FP8CORE_BF16;
}

static fp8core_rows rows_of(const fp8core_tensor *tensor) {
  const fp8core_rows rows = {tensor->data,  tensor->dtype,         tensor->row_stride,
                             tensor->scale, tensor->scale_inverse, tensor->amax};
  return rows;
}

static void describe_operand(gemm_operand *operand, const fp8core_tensor *tensor, int64_t batch_stride,
                             int k_contiguous) {
  memset(operand, 0, sizeof(*operand));
  operand->tensor = tensor;
  operand->batch_stride = batch_stride;
  operand->k_contiguous = k_contiguous;
  operand->rows = tensor->shape[0];
  operand->columns = tensor->shape[1];
  operand->dtype = tensor->dtype;
  operand->stride = tensor->row_stride;
  operand->prepared_batch_stride = batch_stride;
}

static int fp8_aligned(const gemm_operand *operand) {
  return (uintptr_t)operand->tensor->data % FP8_ALIGNMENT == 0 && operand->stride % FP8_ALIGNMENT == 0 &&
         operand->batch_stride % FP8_ALIGNMENT == 0 && operand->columns % FP8_ALIGNMENT == 0;
}

// Matrices of a batch that share memory need one copy.
static int64_t copies_of(const gemm_operand *operand, int64_t batch) { return operand->batch_stride == 0 ? 1 : batch; }

// Compute capability 10 takes FP8 operands in any layout; 8.9, 9.0 and 12 only with K contiguous in both.
static int fp8_wants_k_contiguous(const fp8core_cuda_state *state) {
  return state->capability / 10 != 10 && state->capability / 10 != 11;
}

// Returns 0 where no preparation makes it fit the FP8 kernels.
static int prepare_fp8(const fp8core_cuda_state *state, gemm_operand *operand, int64_t batch) {
  if (operand->k_contiguous || !fp8_wants_k_contiguous(state)) {
    if (fp8_aligned(operand)) return 1;
    if (operand->k_contiguous) return 0;
  }
  operand->preparation = TRANSPOSED;
  operand->k_contiguous = 1;
  operand->stride = round_up(operand->rows, FP8_ALIGNMENT);
  operand->prepared_batch_stride = operand->batch_stride == 0 ? 0 : operand->columns * operand->stride;
  operand->copy_bytes = copies_of(operand, batch) * operand->columns * operand->stride;
  return 1;
}

// Heads of an attention layer lie side by side in the rows of one matrix.
static int side_by_side(const gemm_operand *operand, int64_t batch) {
  return batch > 1 && operand->batch_stride == operand->columns &&
         batch * operand->columns <= operand->tensor->row_stride;
}

static void prepare_wide(gemm_operand *operand, fp8core_dtype type, int64_t batch) {
  if (operand->dtype == type) return;
  // Whole lines of 16 bytes, which BF16 kernels are fast on.
  const int64_t multiple = FP8_ALIGNMENT / size_of(type);
  operand->preparation = CONVERTED;
  operand->dtype = type;
  if (side_by_side(operand, batch)) {
    operand->stride = round_up(batch * operand->columns, multiple);
    operand->copy_bytes = operand->rows * operand->stride * size_of(type);
    return;
  }
  operand->stride = round_up(operand->columns, multiple);
  operand->prepared_batch_stride = operand->batch_stride == 0 ? 0 : operand->rows * operand->stride;
  operand->copy_bytes = copies_of(operand, batch) * operand->rows * operand->stride * size_of(type);
}

// One conversion of `rows` by `columns`, exact, NaNs and infinities kept.
static fp8core_status convert(const gemm_product *product, const gemm_operand *operand, const unsigned char *source,
                              unsigned char *copy, int64_t rows, int64_t columns, int64_t source_stride) {
  fp8core_cast_job cast;
  memset(&cast, 0, sizeof(cast));
  cast.rows = rows;
  cast.columns = columns;
  cast.source.data = (void *)(uintptr_t)source;
  cast.source.dtype = operand->tensor->dtype;
  cast.source.stride = source_stride;
  cast.destination.data = copy;
  cast.destination.dtype = operand->dtype;
  cast.destination.stride = operand->stride;
  return fp8core_cuda_check_launch(fp8core_cuda_launch_cast(&product->state->target, &cast), "launch of a conversion");
}

static fp8core_status make_copy(const gemm_product *product, const gemm_operand *operand, unsigned char *copy) {
  const int64_t batch = copies_of(operand, product->job->options.batch);
  const unsigned char *source = operand->tensor->data;
  const int64_t stride = operand->tensor->row_stride;
  if (operand->preparation == TRANSPOSED) {
    const fp8core_cuda_byte_transpose transpose = {operand->rows, operand->columns, batch,
                                                   source,        stride,           operand->batch_stride,
                                                   copy,          operand->stride,  operand->prepared_batch_stride};
    return fp8core_cuda_check_launch(fp8core_cuda_launch_byte_transpose(&product->state->target, &transpose),
                                     "launch of a transposition");
  }
  if (side_by_side(operand, product->job->options.batch))
    return convert(product, operand, source, copy, operand->rows, batch * operand->columns, stride);
  if (batch > 1 && operand->batch_stride == operand->rows * stride)
    return convert(product, operand, source, copy, batch * operand->rows, operand->columns, stride);
  for (int64_t i = 0; i < batch; i++)
    FP8CORE_TRY(convert(product, operand, source + i * operand->batch_stride * size_of(operand->tensor->dtype),
                        copy + i * operand->prepared_batch_stride * size_of(operand->dtype), operand->rows,
                        operand->columns, stride));
  return FP8CORE_OK;
}

// The part of a product that one call computes.
typedef struct gemm_part {
  int64_t first_matrix;
  int64_t matrices;
  int64_t first_row;
  int64_t rows;
} gemm_part;

// Where the operands of a part begin. Copies are not made yet when plans are looked for; their alignment is known.
static const unsigned char *operand_start(const gemm_operand *operand, const unsigned char *copy, int64_t matrix,
                                          int64_t outer) {
  const unsigned char *data = operand->preparation == AS_IT_IS ? operand->tensor->data : copy;
  const int64_t index =
    matrix * operand->prepared_batch_stride + (operand->k_contiguous ? outer * operand->stride : outer);
  return data + index * size_of(operand->dtype);
}

static int64_t operand_alignment(const gemm_operand *operand, const unsigned char *start, int64_t matrices) {
  return fp8core_cuda_alignment(start, matrices > 1 ? operand->prepared_batch_stride * size_of(operand->dtype) : 0);
}

// Key and pointers of the operands; D, C and the epilogue are the caller's.
static void describe_part(const gemm_product *product, const gemm_part *part, fp8core_cuda_plan_key *key,
                          fp8core_cuda_plan_pointers *pointers) {
  const fp8core_gemm_job *job = product->job;
  memset(key, 0, sizeof(*key));
  memset(pointers, 0, sizeof(*pointers));
  const unsigned char *a = operand_start(&product->a, product->a_copy, part->first_matrix, part->first_row);
  const unsigned char *b = operand_start(&product->b, product->b_copy, part->first_matrix, 0);
  key->m = job->n;
  key->n = part->rows;
  key->k = job->k;
  key->transpose_a = product->b.k_contiguous;
  key->transpose_b = !product->a.k_contiguous;
  key->type_a = cuda_type(product->b.dtype);
  key->type_b = cuda_type(product->a.dtype);
  key->leading_a = product->b.stride;
  key->leading_b = product->a.stride;
  key->batch = part->matrices;
  if (part->matrices > 1) {
    key->stride_a = product->b.prepared_batch_stride;
    key->stride_b = product->a.prepared_batch_stride;
  }
  key->alignment_a = operand_alignment(&product->b, b, part->matrices);
  key->alignment_b = operand_alignment(&product->a, a, part->matrices);
  key->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  key->fast_accumulation = product->fp8 && job->options.fast_accumulation;
  key->workspace_bytes = BLAS_WORKSPACE_BYTES;
  pointers->a = b;
  pointers->b = a;
  pointers->workspace = product->blas_workspace;
}

// The type that cuBLASLt pairs with D for C, and for the bias.
static fp8core_dtype type_beside(const gemm_product *product, int for_bias) {
  const fp8core_dtype d = product->job->d.dtype;
  if (is_fp8(d)) return FP8CORE_BF16;
  return for_bias && product->fp8 && d == FP8CORE_FP32 ? FP8CORE_BF16 : d;
}

static int fused_output(const gemm_product *product) {
  const fp8core_gemm_job *job = product->job;
  const fp8core_dtype d = job->d.dtype;
  if (is_fp8(d)) {
    // E5M2 comes out only where one of the operands is E5M2. One amax a call.
    if (!product->fp8 || (job->d.amax && job->options.batch > 1)) return 0;
    if (d == FP8CORE_E5M2 && job->a.dtype != FP8CORE_E5M2 && job->b.dtype != FP8CORE_E5M2) return 0;
  } else {
    if (job->d.scale || job->d.amax) return 0;
    if (!product->fp8 && d != product->type && d != FP8CORE_FP32) return 0;
  }
  // FP8 kernels write whole lines; others take what there is.
  if (!product->fp8) return 1;
  const int64_t size = size_of(d);
  return (uintptr_t)job->d.data % FP8_ALIGNMENT == 0 && job->d.row_stride * size % FP8_ALIGNMENT == 0 &&
         job->options.batch_stride_d * size % FP8_ALIGNMENT == 0;
}

static int fused_c(const gemm_product *product) {
  const fp8core_gemm_job *job = product->job;
  if (!job->c.data) return 1;
  if (job->c.scale_inverse || job->c.dtype != type_beside(product, 0)) return 0;
  const int64_t size = size_of(job->c.dtype);
  return !product->fp8 ||
         ((uintptr_t)job->c.data % FP8_ALIGNMENT == 0 && job->c.row_stride * size % FP8_ALIGNMENT == 0 &&
          job->options.batch_stride_c * size % FP8_ALIGNMENT == 0);
}

// Whether cuBLASLt's epilogues say the same as ours. ReLU stays ours: its maximum with 0 may lose a NaN. So does a GELU
// whose result is FP32, since the hardware's tanh is good for 16 bits.
static int fused_epilogue(const gemm_product *product) {
  const fp8core_gemm_job *job = product->job;
  const fp8core_epilogue epilogue = job->options.epilogue;
  if (job->bias_gradient.data) return 0;
  if (job->bias.data && (job->bias.scale_inverse || job->bias.dtype != type_beside(product, 1) ||
                         (uintptr_t)job->bias.data % FP8_ALIGNMENT != 0))
    return 0;
  if (epilogue == FP8CORE_EPILOGUE_NONE) return 1;
  if (epilogue != FP8CORE_EPILOGUE_GELU && epilogue != FP8CORE_EPILOGUE_GELU_BACKWARD) return 0;
  if (job->d.dtype == FP8CORE_FP32) return 0;
  if (!job->auxiliary.data) return 1;
  if (epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD && job->bias.data) return 0;
  const int scaled = epilogue == FP8CORE_EPILOGUE_GELU ? job->auxiliary.scale || job->auxiliary.amax
                                                       : job->auxiliary.scale_inverse != NULL;
  return !scaled && job->auxiliary.dtype == (is_fp8(job->d.dtype) ? FP8CORE_FP16 : job->d.dtype) &&
         (uintptr_t)job->auxiliary.data % FP8_ALIGNMENT == 0 && job->auxiliary.row_stride % 8 == 0 &&
         (job->options.batch == 1 || job->options.batch_stride_auxiliary % 8 == 0);
}

static int64_t blas_epilogue(const fp8core_gemm_job *job) {
  const int bias = job->bias.data != NULL;
  if (job->options.epilogue == FP8CORE_EPILOGUE_GELU_BACKWARD) return CUBLASLT_EPILOGUE_DGELU;
  if (job->options.epilogue != FP8CORE_EPILOGUE_GELU) return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  if (job->auxiliary.data) return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

static void describe_fused(const gemm_product *product, fp8core_cuda_plan_key *key,
                           fp8core_cuda_plan_pointers *pointers) {
  const fp8core_gemm_job *job = product->job;
  const fp8core_gemm_options *options = &job->options;
  const gemm_part whole = {0, options->batch, 0, job->m};
  const int batched = options->batch > 1;
  describe_part(product, &whole, key, pointers);
  key->type_d = cuda_type(job->d.dtype);
  key->leading_d = job->d.row_stride;
  key->stride_d = batched ? options->batch_stride_d : 0;
  key->alignment_d = fp8core_cuda_alignment(job->d.data, key->stride_d * size_of(job->d.dtype));
  pointers->d = job->d.data;
  key->type_c = cuda_type(type_beside(product, 0));
  if (job->c.data) {
    key->has_c = 1;
    key->leading_c = job->c.row_stride;
    key->stride_c = batched ? options->batch_stride_c : 0;
    key->alignment_c = fp8core_cuda_alignment(job->c.data, key->stride_c * size_of(job->c.dtype));
    pointers->c = job->c.data;
  } else {
    // beta = 0 reads nothing; an FP8 D's C has another type, and cannot stand in for it.
    key->leading_c = key->leading_d;
    key->stride_c = key->stride_d;
    key->alignment_c = is_fp8(job->d.dtype) ? WORKSPACE_ALIGNMENT : key->alignment_d;
    pointers->c = is_fp8(job->d.dtype) ? NULL : job->d.data;
  }
  key->epilogue = blas_epilogue(job);
  if (job->bias.data) {
    key->type_bias = cuda_type(job->bias.dtype);
    key->alignment_bias = fp8core_cuda_alignment(job->bias.data, 0);
    pointers->bias = job->bias.data;
  }
  if (job->auxiliary.data) {
    key->type_auxiliary = cuda_type(job->auxiliary.dtype);
    key->leading_auxiliary = job->auxiliary.row_stride;
    key->stride_auxiliary = batched ? options->batch_stride_auxiliary : 0;
    key->alignment_auxiliary = fp8core_cuda_alignment(job->auxiliary.data, 0);
    pointers->auxiliary = job->auxiliary.data;
  }
  if (product->fp8) {
    key->has_scale_a = job->b.scale_inverse != NULL;
    key->has_scale_b = job->a.scale_inverse != NULL;
    pointers->scale_a = job->b.scale_inverse;
    pointers->scale_b = job->a.scale_inverse;
    if (is_fp8(job->d.dtype)) {
      key->has_scale_d = job->d.scale != NULL;
      key->has_amax_d = job->d.amax != NULL;
      pointers->scale_d = job->d.scale;
      pointers->amax_d = (float *)(void *)product->scalars;
    }
  } else {
    key->device_factors = job->a.scale_inverse || job->b.scale_inverse;
  }
}

// Lays out the workspace. Offsets are the same whether it has that size already or not.
static fp8core_status place(gemm_product *product, int64_t sums_bytes, int64_t partial_bytes) {
  const int64_t sizes[] = {SCALARS_BYTES,         BLAS_WORKSPACE_BYTES, product->a.copy_bytes,
                           product->b.copy_bytes, sums_bytes,           partial_bytes};
  unsigned char *places[6];
  int64_t offsets[6], bytes = 0;
  for (int i = 0; i < 6; i++) {
    offsets[i] = bytes;
    bytes += round_up(sizes[i], WORKSPACE_ALIGNMENT);
  }
  void *base;
  FP8CORE_TRY(fp8core_workspace(product->context, (size_t)bytes, &base));
  for (int i = 0; i < 6; i++) places[i] = (unsigned char *)base + offsets[i];
  product->scalars = places[0];
  product->blas_workspace = places[1];
  product->a_copy = places[2];
  product->b_copy = places[3];
  product->sums = (float *)(void *)places[4];
  product->partial_sums = (float *)(void *)places[5];
  return FP8CORE_OK;
}

static fp8core_status make_copies(gemm_product *product) {
  if (product->a.preparation != AS_IT_IS) FP8CORE_TRY(make_copy(product, &product->a, product->a_copy));
  if (product->b.preparation != AS_IT_IS) FP8CORE_TRY(make_copy(product, &product->b, product->b_copy));
  return FP8CORE_OK;
}

// Stand-in for the workspace until it is known: any address with its alignment.
static void assume_workspace(gemm_product *product) {
  unsigned char *const aligned = (unsigned char *)(uintptr_t)WORKSPACE_ALIGNMENT;
  product->scalars = product->blas_workspace = product->a_copy = product->b_copy = aligned;
  product->sums = product->partial_sums = (float *)(void *)aligned;
}

// Everything in one call of cuBLASLt. *done is 0 where it cannot, and nothing was computed.
static fp8core_status run_fused(gemm_product *product, int *done) {
  const fp8core_gemm_job *job = product->job;
  const fp8core_cuda_target *target = &product->state->target;
  fp8core_cuda_plan_key key;
  fp8core_cuda_plan_pointers pointers;
  fp8core_cuda_plan *plan;
  *done = 0;
  if (!fused_output(product) || !fused_c(product) || !fused_epilogue(product)) return FP8CORE_OK;
  assume_workspace(product);
  describe_fused(product, &key, &pointers);
  FP8CORE_TRY(fp8core_cuda_find_plan(product->context, &key, &pointers, &plan));
  if (!plan) return FP8CORE_OK;
  FP8CORE_TRY(place(product, 0, 0));
  FP8CORE_TRY(make_copies(product));
  describe_fused(product, &key, &pointers);
  FP8CORE_TRY(fp8core_cuda_find_plan(product->context, &key, &pointers, &plan));
  if (!plan) return FP8CORE_OK;
  float *factors = (float *)(void *)(product->scalars + 16);
  if (key.device_factors) {
    FP8CORE_TRY(
      fp8core_cuda_check_launch(fp8core_cuda_launch_factors(target, factors, job->options.alpha, job->options.beta,
                                                            job->a.scale_inverse, job->b.scale_inverse),
                                "launch of a product's factors"));
    pointers.alpha = &factors[0];
    pointers.beta = &factors[1];
  } else {
    pointers.alpha = &job->options.alpha;
    pointers.beta = &job->options.beta;
  }
  // Whether cuBLASLt sets or raises its amax is not said; from zero both are the same.
  if (key.has_amax_d)
    FP8CORE_TRY(fp8core_cuda_check(cudaMemsetAsync(product->scalars, 0, sizeof(float), product->state->stream),
                                   "cudaMemsetAsync"));
  int refused;
  FP8CORE_TRY(fp8core_cuda_run_plan(product->context, plan, &pointers, &refused));
  if (refused) return FP8CORE_OK;
  *done = 1;
  if (!key.has_amax_d) return FP8CORE_OK;
  return fp8core_cuda_check_launch(fp8core_cuda_launch_merge_amax(target, job->d.amax,
                                                                  (float *)(void *)product->scalars, job->m, job->n,
                                                                  job->d.data, job->d.row_stride, job->d.dtype),
                                   "launch of an amax");
}

static int64_t sums_stride(const gemm_product *product) { return round_up(product->job->n, 32); }

// Sums of a part into the workspace, without scales.
static void describe_sums(const gemm_product *product, const gemm_part *part, fp8core_cuda_plan_key *key,
                          fp8core_cuda_plan_pointers *pointers) {
  describe_part(product, part, key, pointers);
  key->type_c = key->type_d = CUDA_R_32F;
  key->leading_c = key->leading_d = sums_stride(product);
  key->stride_c = key->stride_d = part->matrices > 1 ? part->rows * sums_stride(product) : 0;
  key->alignment_c = key->alignment_d = WORKSPACE_ALIGNMENT;
  pointers->c = pointers->d = product->sums;
}

// Partial sums of columns that a matrix of a batch has.
static int64_t row_blocks(const fp8core_gemm_job *job) {
  return (job->m + FP8CORE_CUDA_EPILOGUE_ROWS - 1) / FP8CORE_CUDA_EPILOGUE_ROWS;
}

static fp8core_status run_epilogue(const gemm_product *product, const gemm_part *part, const float *sums) {
  const fp8core_gemm_job *job = product->job;
  const fp8core_gemm_options *options = &job->options;
  fp8core_cuda_epilogue epilogue;
  memset(&epilogue, 0, sizeof(epilogue));
  epilogue.batch = part->matrices;
  epilogue.rows = part->rows;
  epilogue.columns = job->n;
  epilogue.product = sums;
  epilogue.product_stride = sums_stride(product);
  epilogue.product_batch_stride = part->rows * sums_stride(product);
  epilogue.alpha = options->alpha;
  epilogue.scale_inverse_a = job->a.scale_inverse;
  epilogue.scale_inverse_b = job->b.scale_inverse;
  epilogue.beta = options->beta;
  epilogue.c = rows_of(&job->c);
  epilogue.c_batch_stride = options->batch_stride_c;
  epilogue.bias = rows_of(&job->bias);
  epilogue.epilogue = options->epilogue;
  epilogue.auxiliary = rows_of(&job->auxiliary);
  epilogue.auxiliary_batch_stride = options->batch_stride_auxiliary;
  epilogue.d = rows_of(&job->d);
  epilogue.d_batch_stride = options->batch_stride_d;
  epilogue.c.data =
    job->c.data
      ? (unsigned char *)job->c.data +
          (part->first_matrix * options->batch_stride_c + part->first_row * job->c.row_stride) * size_of(job->c.dtype)
      : NULL;
  epilogue.d.data =
    (unsigned char *)job->d.data +
    (part->first_matrix * options->batch_stride_d + part->first_row * job->d.row_stride) * size_of(job->d.dtype);
  epilogue.auxiliary.data =
    job->auxiliary.data ? (unsigned char *)job->auxiliary.data + (part->first_matrix * options->batch_stride_auxiliary +
                                                                  part->first_row * job->auxiliary.row_stride) *
                                                                   size_of(job->auxiliary.dtype)
                        : NULL;
  // A part of several matrices has all of their rows.
  epilogue.partial_sums =
    job->bias_gradient.data
      ? product->partial_sums +
          (part->first_matrix * row_blocks(job) + part->first_row / FP8CORE_CUDA_EPILOGUE_ROWS) * job->n
      : NULL;
  return fp8core_cuda_check_launch(fp8core_cuda_launch_epilogue(&product->state->target, &epilogue),
                                   "launch of an epilogue");
}

static fp8core_status finish_bias_gradient(const gemm_product *product) {
  const fp8core_gemm_job *job = product->job;
  if (!job->bias_gradient.data) return FP8CORE_OK;
  const fp8core_rows sums = rows_of(&job->bias_gradient);
  return fp8core_cuda_check_launch(fp8core_cuda_launch_column_sums(&product->state->target, &sums,
                                                                   product->partial_sums,
                                                                   job->options.batch * row_blocks(job), job->n),
                                   "launch of column sums");
}

static int64_t partial_bytes(const fp8core_gemm_job *job) {
  return job->bias_gradient.data ? job->options.batch * row_blocks(job) * job->n * (int64_t)sizeof(float) : 0;
}

// Matrices and rows a part, so that its sums stay within PRODUCT_BYTES.
static gemm_part largest_part(const gemm_product *product) {
  const fp8core_gemm_job *job = product->job;
  const int64_t row_bytes = sums_stride(product) * (int64_t)sizeof(float);
  const int64_t rows = PRODUCT_BYTES / row_bytes / FP8CORE_CUDA_EPILOGUE_ROWS * FP8CORE_CUDA_EPILOGUE_ROWS;
  gemm_part part = {0, 1, 0, job->m};
  if (job->m > rows && job->m > FP8CORE_CUDA_EPILOGUE_ROWS) {
    part.rows = rows < FP8CORE_CUDA_EPILOGUE_ROWS ? FP8CORE_CUDA_EPILOGUE_ROWS : rows;
  } else {
    part.matrices = PRODUCT_BYTES / (job->m * row_bytes);
    if (part.matrices < 1) part.matrices = 1;
    if (part.matrices > job->options.batch) part.matrices = job->options.batch;
  }
  return part;
}

static fp8core_status find_part(gemm_product *product, const gemm_part *part, int *refused) {
  fp8core_cuda_plan_key key;
  fp8core_cuda_plan_pointers pointers;
  fp8core_cuda_plan *plan;
  describe_sums(product, part, &key, &pointers);
  FP8CORE_TRY(fp8core_cuda_find_plan(product->context, &key, &pointers, &plan));
  *refused = !plan;
  return FP8CORE_OK;
}

static fp8core_status run_part(gemm_product *product, const gemm_part *part, int *refused) {
  const float one = 1.0f, zero = 0.0f;
  fp8core_cuda_plan_key key;
  fp8core_cuda_plan_pointers pointers;
  fp8core_cuda_plan *plan;
  describe_sums(product, part, &key, &pointers);
  pointers.alpha = &one;
  pointers.beta = &zero;
  FP8CORE_TRY(fp8core_cuda_find_plan(product->context, &key, &pointers, &plan));
  *refused = !plan;
  if (plan) FP8CORE_TRY(fp8core_cuda_run_plan(product->context, plan, &pointers, refused));
  return *refused ? FP8CORE_OK : run_epilogue(product, part, product->sums);
}

// Calls for each part, the last of which may be smaller.
typedef fp8core_status (*part_function)(gemm_product *product, const gemm_part *part, int *refused);

static fp8core_status for_parts(gemm_product *product, const gemm_part *largest, part_function function, int *refused) {
  const fp8core_gemm_job *job = product->job;
  *refused = 0;
  for (int64_t matrix = 0; matrix < job->options.batch && !*refused; matrix += largest->matrices)
    for (int64_t row = 0; row < job->m && !*refused; row += largest->rows) {
      const int64_t matrices_left = job->options.batch - matrix, rows_left = job->m - row;
      const gemm_part part = {matrix, matrices_left < largest->matrices ? matrices_left : largest->matrices, row,
                              rows_left < largest->rows ? rows_left : largest->rows};
      FP8CORE_TRY(function(product, &part, refused));
      // Another way would add beta * C twice.
      if (*refused && function == run_part && (matrix > 0 || row > 0))
        return fp8core_set_last_error(FP8CORE_ERROR_DEVICE,
                                      "cublasLtMatmul refused a part of a product whose other parts it made");
    }
  return FP8CORE_OK;
}

// Sums by cuBLASLt, the rest by our own kernel.
static fp8core_status run_in_parts(gemm_product *product, int *done) {
  const fp8core_gemm_job *job = product->job;
  const gemm_part largest = largest_part(product);
  int refused;
  *done = 0;
  assume_workspace(product);
  FP8CORE_TRY(for_parts(product, &largest, find_part, &refused));
  if (refused) return FP8CORE_OK;
  FP8CORE_TRY(place(product, largest.matrices * largest.rows * sums_stride(product) * (int64_t)sizeof(float),
                    partial_bytes(job)));
  FP8CORE_TRY(make_copies(product));
  FP8CORE_TRY(for_parts(product, &largest, run_part, &refused));
  if (refused) return FP8CORE_OK;
  *done = 1;
  return finish_bias_gradient(product);
}

static fp8core_status run_as(gemm_product *product, int *done) {
  FP8CORE_TRY(run_fused(product, done));
  return *done ? FP8CORE_OK : run_in_parts(product, done);
}

// K = 0: there are no sums.
static fp8core_status run_without_sums(gemm_product *product) {
  const gemm_part whole = {0, product->job->options.batch, 0, product->job->m};
  FP8CORE_TRY(place(product, 0, partial_bytes(product->job)));
  FP8CORE_TRY(run_epilogue(product, &whole, NULL));
  return finish_bias_gradient(product);
}

static void describe_operands(gemm_product *product) {
  const fp8core_gemm_job *job = product->job;
  describe_operand(&product->a, &job->a, job->options.batch_stride_a, !job->options.transpose_a);
  describe_operand(&product->b, &job->b, job->options.batch_stride_b, job->options.transpose_b != 0);
}

fp8core_status fp8core_cuda_gemm(fp8core_context *context, const fp8core_gemm_job *job) {
  gemm_product product;
  int done = 0;
  if (job->a.dtype == FP8CORE_E5M2 && job->b.dtype == FP8CORE_E5M2)
    return fp8core_set_last_error(
      FP8CORE_ERROR_NOT_SUPPORTED,
      "A and B are both e5m2, which CUDA does not multiply; expected e4m3 in at least one of them");
  memset(&product, 0, sizeof(product));
  product.context = context;
  product.state = fp8core_cuda_state_of(context);
  product.job = job;
  product.type = common_type(job->a.dtype, job->b.dtype);
  describe_operands(&product);
  if (job->k == 0) return run_without_sums(&product);
  const int64_t batch = job->options.batch;
  if (is_fp8(job->a.dtype) && is_fp8(job->b.dtype) && product.state->capability >= 89 && job->n % FP8_ALIGNMENT == 0 &&
      job->k % FP8_ALIGNMENT == 0 && prepare_fp8(product.state, &product.a, batch) &&
      prepare_fp8(product.state, &product.b, batch)) {
    product.fp8 = 1;
    FP8CORE_TRY(run_as(&product, &done));
    if (done) return FP8CORE_OK;
  }
  product.fp8 = 0;
  describe_operands(&product);
  prepare_wide(&product.a, product.type, batch);
  prepare_wide(&product.b, product.type, batch);
  FP8CORE_TRY(run_as(&product, &done));
  if (done) return FP8CORE_OK;
  return fp8core_set_last_error(
    FP8CORE_ERROR_NOT_SUPPORTED, "cuBLASLt has no kernel for %s x %s -> %s, [%lld, %lld] x [%lld, %lld], batch %lld",
    fp8core_dtype_name(job->a.dtype), fp8core_dtype_name(job->b.dtype), fp8core_dtype_name(job->d.dtype),
    (long long)job->m, (long long)job->k, (long long)job->k, (long long)job->n, (long long)batch);
}
