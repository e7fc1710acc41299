#include "plans.h"

#include <stdlib.h>
#include <string.h>

// Shapes of a training run are few; a caller whose shapes never repeat must not grow the table for ever.
#define MOST_PLANS 4096
#define SLOTS (2 * MOST_PLANS)
#define CANDIDATES 8

struct fp8core_cuda_plan {
  fp8core_cuda_plan_key key;
  int refused;
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a;
  cublasLtMatrixLayout_t b;
  cublasLtMatrixLayout_t c;
  cublasLtMatrixLayout_t d;
  cublasLtMatmulAlgo_t algorithm;
};

struct fp8core_cuda_plans {
  // Open addressing; NULL: free.
  fp8core_cuda_plan *slots[SLOTS];
  int count;
};

static void free_plan(fp8core_cuda_plan *plan) {
  if (!plan) return;
  if (plan->operation) (void)fp8core_cublaslt.cublasLtMatmulDescDestroy(plan->operation);
  cublasLtMatrixLayout_t layouts[] = {plan->a, plan->b, plan->c, plan->d};
  for (int i = 0; i < 4; i++)
    if (layouts[i]) (void)fp8core_cublaslt.cublasLtMatrixLayoutDestroy(layouts[i]);
  free(plan);
}

static void clear_plans(fp8core_cuda_plans *plans) {
  for (int i = 0; i < SLOTS; i++) free_plan(plans->slots[i]);
  memset(plans, 0, sizeof(*plans));
}

fp8core_status fp8core_cuda_plans_create(fp8core_cuda_plans **plans) {
  *plans = calloc(1, sizeof(**plans));
  return *plans ? FP8CORE_OK
                : fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY,
                                         "cannot allocate %zu bytes for the plans of products", sizeof(**plans));
}

void fp8core_cuda_plans_destroy(fp8core_cuda_plans **plans) {
  if (!*plans) return;
  clear_plans(*plans);
  free(*plans);
  *plans = NULL;
}

int64_t fp8core_cuda_alignment(const void *pointer, int64_t stride_bytes) {
  const uint64_t bits = (uint64_t)(uintptr_t)pointer | (uint64_t)stride_bytes | 256;
  return (int64_t)(bits & (~bits + 1));
}

// FNV-1a.
static uint64_t hash_of(const fp8core_cuda_plan_key *key) {
  const unsigned char *bytes = (const unsigned char *)key;
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < sizeof(*key); i++) hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
  return hash;
}

#define TRY_BLAS(function, ...) FP8CORE_TRY(fp8core_cuda_check_blas(fp8core_cublaslt.function(__VA_ARGS__), #function))

static fp8core_status set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                    const void *value, size_t bytes) {
  TRY_BLAS(cublasLtMatmulDescSetAttribute, operation, attribute, value, bytes);
  return FP8CORE_OK;
}

static fp8core_status set_int32(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                int64_t value) {
  const int32_t narrow = (int32_t)value;
  return set_attribute(operation, attribute, &narrow, sizeof(narrow));
}

static fp8core_status set_pointers(cublasLtMatmulDesc_t operation, const fp8core_cuda_plan_key *key,
                                   const fp8core_cuda_plan_pointers *pointers) {
  const struct {
    cublasLtMatmulDescAttributes_t attribute;
    int wanted;
    const void *pointer;
  } attributes[] = {
    {CUBLASLT_MATMUL_DESC_BIAS_POINTER, key->alignment_bias != 0, pointers->bias},
    {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, key->alignment_auxiliary != 0, pointers->auxiliary},
    {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, key->has_scale_a != 0, pointers->scale_a},
    {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, key->has_scale_b != 0, pointers->scale_b},
    {CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, key->has_scale_d != 0, pointers->scale_d},
    {CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, key->has_amax_d != 0, pointers->amax_d},
  };
  for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++)
    if (attributes[i].wanted)
      FP8CORE_TRY(
        set_attribute(operation, attributes[i].attribute, &attributes[i].pointer, sizeof(attributes[i].pointer)));
  return FP8CORE_OK;
}

static fp8core_status describe_operation(fp8core_cuda_plan *plan, const fp8core_cuda_plan_pointers *pointers) {
  const fp8core_cuda_plan_key *key = &plan->key;
  // FP32 sums, and FP32 products of FP32 operands (no TF32).
  TRY_BLAS(cublasLtMatmulDescCreate, &plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  FP8CORE_TRY(set_int32(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, key->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
  FP8CORE_TRY(set_int32(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, key->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
  FP8CORE_TRY(set_int32(plan->operation, CUBLASLT_MATMUL_DESC_POINTER_MODE,
                        key->device_factors ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST));
  FP8CORE_TRY(set_int32(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, key->epilogue));
  if (key->alignment_bias) FP8CORE_TRY(set_int32(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, key->type_bias));
  if (key->alignment_auxiliary) {
    FP8CORE_TRY(set_int32(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, key->type_auxiliary));
    FP8CORE_TRY(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &key->leading_auxiliary,
                              sizeof(key->leading_auxiliary)));
    if (key->batch > 1)
      FP8CORE_TRY(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &key->stride_auxiliary,
                                sizeof(key->stride_auxiliary)));
  }
  if (key->fast_accumulation) {
    const int8_t fast = 1;
    FP8CORE_TRY(set_attribute(plan->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast)));
  }
  return set_pointers(plan->operation, key, pointers);
}

static fp8core_status describe_matrix(cublasLtMatrixLayout_t *layout, int64_t type, int64_t rows, int64_t columns,
                                      int64_t leading, int64_t batch, int64_t stride) {
  TRY_BLAS(cublasLtMatrixLayoutCreate, layout, (cudaDataType_t)type, (uint64_t)rows, (uint64_t)columns, leading);
  if (batch > 1) {
    const int32_t count = (int32_t)batch;
    TRY_BLAS(cublasLtMatrixLayoutSetAttribute, *layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count));
    TRY_BLAS(cublasLtMatrixLayoutSetAttribute, *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
             sizeof(stride));
  }
  return FP8CORE_OK;
}

static fp8core_status set_preferences(cublasLtMatmulPreference_t preference, const fp8core_cuda_plan_key *key) {
  const uint64_t workspace = (uint64_t)key->workspace_bytes;
  TRY_BLAS(cublasLtMatmulPreferenceSetAttribute, preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
           sizeof(workspace));
  // Sums that are split over K are added in FP32, in the workspace; not in D's type, and not in the order of arrival.
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  TRY_BLAS(cublasLtMatmulPreferenceSetAttribute, preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
           sizeof(reductions));
  const struct {
    cublasLtMatmulPreferenceAttributes_t attribute;
    int64_t bytes;
  } alignments[] = {
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key->alignment_a},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key->alignment_b},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key->alignment_c},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key->alignment_d},
  };
  for (int i = 0; i < 4; i++) {
    const uint32_t bytes = (uint32_t)alignments[i].bytes;
    TRY_BLAS(cublasLtMatmulPreferenceSetAttribute, preference, alignments[i].attribute, &bytes, sizeof(bytes));
  }
  return FP8CORE_OK;
}

static fp8core_status choose_algorithm(fp8core_context *context, fp8core_cuda_plan *plan,
                                       cublasLtMatmulPreference_t preference) {
  cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
  int found = 0;
  FP8CORE_TRY(set_preferences(preference, &plan->key));
  memset(candidates, 0, sizeof(candidates));
  const cublasStatus_t status = fp8core_cublaslt.cublasLtMatmulAlgoGetHeuristic(
    fp8core_cuda_state_of(context)->blas, plan->operation, plan->a, plan->b, plan->c, plan->d, preference, CANDIDATES,
    candidates, &found);
  plan->refused = 1;
  if (status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED)
    return fp8core_cuda_check_blas(status, "cublasLtMatmulAlgoGetHeuristic");
  // Every other failure is its way to say that no kernel serves.
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found && plan->refused; i++) {
    if (candidates[i].state != CUBLAS_STATUS_SUCCESS || candidates[i].workspaceSize > (size_t)plan->key.workspace_bytes)
      continue;
    plan->algorithm = candidates[i].algo;
    plan->refused = 0;
  }
  return FP8CORE_OK;
}

static fp8core_status describe(fp8core_context *context, fp8core_cuda_plan *plan,
                               const fp8core_cuda_plan_pointers *pointers) {
  const fp8core_cuda_plan_key *key = &plan->key;
  FP8CORE_TRY(describe_operation(plan, pointers));
  const int ta = key->transpose_a != 0, tb = key->transpose_b != 0;
  FP8CORE_TRY(describe_matrix(&plan->a, key->type_a, ta ? key->k : key->m, ta ? key->m : key->k, key->leading_a,
                              key->batch, key->stride_a));
  FP8CORE_TRY(describe_matrix(&plan->b, key->type_b, tb ? key->n : key->k, tb ? key->k : key->n, key->leading_b,
                              key->batch, key->stride_b));
  FP8CORE_TRY(describe_matrix(&plan->c, key->type_c, key->m, key->n, key->leading_c, key->batch, key->stride_c));
  FP8CORE_TRY(describe_matrix(&plan->d, key->type_d, key->m, key->n, key->leading_d, key->batch, key->stride_d));
  cublasLtMatmulPreference_t preference = NULL;
  TRY_BLAS(cublasLtMatmulPreferenceCreate, &preference);
  const fp8core_status status = choose_algorithm(context, plan, preference);
  (void)fp8core_cublaslt.cublasLtMatmulPreferenceDestroy(preference);
  return status;
}

fp8core_status fp8core_cuda_find_plan(fp8core_context *context, const fp8core_cuda_plan_key *key,
                                      const fp8core_cuda_plan_pointers *pointers, fp8core_cuda_plan **plan) {
  fp8core_cuda_plans *plans = fp8core_cuda_state_of(context)->plans;
  *plan = NULL;
  // cuBLASLt counts batches in 32 bits.
  if (key->batch > INT32_MAX) return FP8CORE_OK;
  if (plans->count >= MOST_PLANS) clear_plans(plans);
  size_t slot = (size_t)(hash_of(key) % SLOTS);
  for (; plans->slots[slot]; slot = (slot + 1) % SLOTS) {
    fp8core_cuda_plan *known = plans->slots[slot];
    if (memcmp(&known->key, key, sizeof(*key)) != 0) continue;
    *plan = known->refused ? NULL : known;
    return FP8CORE_OK;
  }
  fp8core_cuda_plan *created = calloc(1, sizeof(*created));
  if (!created)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes for a plan",
                                  sizeof(*created));
  created->key = *key;
  const fp8core_status status = describe(context, created, pointers);
  if (status != FP8CORE_OK) {
    free_plan(created);
    return status;
  }
  plans->slots[slot] = created;
  plans->count++;
  fp8core_log(context, FP8CORE_LOG_DEBUG, "product %lld x %lld x %lld (types %lld, %lld -> %lld, epilogue %lld): %s",
              (long long)key->m, (long long)key->n, (long long)key->k, (long long)key->type_a, (long long)key->type_b,
              (long long)key->type_d, (long long)key->epilogue,
              created->refused ? "cuBLASLt has no kernel" : "planned");
  *plan = created->refused ? NULL : created;
  return FP8CORE_OK;
}

fp8core_status fp8core_cuda_run_plan(fp8core_context *context, fp8core_cuda_plan *plan,
                                     const fp8core_cuda_plan_pointers *pointers, int *refused) {
  const fp8core_cuda_state *state = fp8core_cuda_state_of(context);
  *refused = 0;
  FP8CORE_TRY(set_pointers(plan->operation, &plan->key, pointers));
  const cublasStatus_t status = fp8core_cublaslt.cublasLtMatmul(
    state->blas, plan->operation, pointers->alpha, pointers->a, plan->a, pointers->b, plan->b, pointers->beta,
    pointers->c, plan->c, pointers->d, plan->d, &plan->algorithm, pointers->workspace,
    (size_t)plan->key.workspace_bytes, state->stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      status == CUBLAS_STATUS_ARCH_MISMATCH) {
    fp8core_log(context, FP8CORE_LOG_WARNING,
                "cublasLtMatmul refuses what its heuristics offered (%s); another way is taken",
                fp8core_cublaslt.cublasLtGetStatusName(status));
    plan->refused = 1;
    *refused = 1;
    return FP8CORE_OK;
  }
  return fp8core_cuda_check_blas(status, "cublasLtMatmul");
}
