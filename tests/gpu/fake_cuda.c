// A CUDA runtime and a cuBLASLt of the host, as far as the CUDA backend uses them, for tests without a GPU. Device
// memory is host memory, streams do their work at once, and products are computed in double. It is as strict as
// NVIDIA's documentation of cublasLtMatmul() is about types, layouts and alignment, so that the backend's choice among
// its ways is tested.
//
// Copies that CUDA does later (between device memories, from and to page-locked memory) are done when an event behind
// them is asked for, one each time, and so are waits for another stream's; so that who does not wait for them shows.
//
// With FP8_FAKE_GUARD set, device memory can be touched while the device works only (or another rank's, where ranks are
// threads), so that a host that follows a device pointer ends with a segmentation fault.
//
// FP8_FAKE_CAPABILITY is the compute capability of the GPUs that it plays: 80, 89, 90 (default) or 100; or one for
// each, with commas between, the last for the rest. FP8_FAKE_DEVICES is how many there are, 2 by default.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/cublaslt.h"
#include "fake_cuda.h"
#include "numerics.h"

// For the emulated libraries that are linked with the one that this is in.
#pragma GCC visibility push(default)

// A thread has its own, as in CUDA.
static _Thread_local int current_device;

static int capability_of(int device) {
  const char *value = getenv("FP8_FAKE_CAPABILITY");
  if (!value) return 90;
  for (int i = 0; i < device && strchr(value, ','); i++) value = strchr(value, ',') + 1;
  return atoi(value);
}

static int capability(void) { return capability_of(current_device); }

cudaError_t cudaGetDeviceCount(int *count) {
  const char *value = getenv("FP8_FAKE_DEVICES");
  *count = value ? atoi(value) : 2;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability_of(device) / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? capability_of(device) % 10
                                                            : 2;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *name, int bytes, int device) {
  (void)snprintf(name, (size_t)bytes, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

// --- Memory that the host must not touch ---

// Addresses that are given out once, so that also memory that was freed shows.
#define GUARDED_BYTES ((size_t)1 << 38)

static pthread_mutex_t guard_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char *guarded;
static size_t guarded_used;
static int guard_users;

static int is_guarded(void) { return getenv("FP8_FAKE_GUARD") != NULL; }

static void protect(int rights) {
  if (guarded_used > 0 && mprotect(guarded, guarded_used, rights) != 0) abort();
}

void fake_device_begin(void) {
  if (!is_guarded()) return;
  (void)pthread_mutex_lock(&guard_lock);
  if (guard_users++ == 0) protect(PROT_READ | PROT_WRITE);
  (void)pthread_mutex_unlock(&guard_lock);
}

void fake_device_end(void) {
  if (!is_guarded()) return;
  (void)pthread_mutex_lock(&guard_lock);
  if (--guard_users == 0) protect(PROT_NONE);
  (void)pthread_mutex_unlock(&guard_lock);
}

static void *allocate_guarded(size_t bytes) {
  const size_t page = 4096, whole = (bytes + page - 1) / page * page;
  void *memory = NULL;
  (void)pthread_mutex_lock(&guard_lock);
  if (!guarded) {
    void *reserved = mmap(NULL, GUARDED_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved != MAP_FAILED) guarded = reserved;
  }
  if (guarded && whole <= GUARDED_BYTES - guarded_used) {
    memory = guarded + guarded_used;
    guarded_used += whole;
    if (guard_users > 0) protect(PROT_READ | PROT_WRITE);
  }
  (void)pthread_mutex_unlock(&guard_lock);
  return memory;
}

// --- Memory of each kind ---

typedef struct range {
  struct range *next;
  const unsigned char *begin;
  size_t bytes;
  int device;
  int page_locked;
} range;

static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
static range *ranges;

static void add_range(void *pointer, size_t bytes, int page_locked) {
  range *added = malloc(sizeof(*added));
  if (!added) abort();
  *added = (range){NULL, pointer, bytes, current_device, page_locked};
  (void)pthread_mutex_lock(&ranges_lock);
  added->next = ranges;
  ranges = added;
  (void)pthread_mutex_unlock(&ranges_lock);
}

// How many bytes it had.
static size_t remove_range(const void *pointer) {
  (void)pthread_mutex_lock(&ranges_lock);
  range **link = &ranges;
  while (*link && (*link)->begin != pointer) link = &(*link)->next;
  range *gone = *link;
  if (gone) *link = gone->next;
  (void)pthread_mutex_unlock(&ranges_lock);
  if (pointer && !gone) abort();
  const size_t bytes = gone ? gone->bytes : 0;
  free(gone);
  return bytes;
}

unsigned long long fake_held_bytes(int page_locked) {
  unsigned long long bytes = 0;
  (void)pthread_mutex_lock(&ranges_lock);
  for (const range *one = ranges; one; one = one->next) bytes += one->page_locked == page_locked ? one->bytes : 0;
  (void)pthread_mutex_unlock(&ranges_lock);
  return bytes;
}

static int find_range(const void *pointer, range *found) {
  const unsigned char *at = pointer;
  (void)pthread_mutex_lock(&ranges_lock);
  const range *one = ranges;
  while (one && !(at >= one->begin && at < one->begin + one->bytes)) one = one->next;
  if (one) *found = *one;
  (void)pthread_mutex_unlock(&ranges_lock);
  return one != NULL;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  range found;
  memset(attributes, 0, sizeof(*attributes));
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;
  if (!find_range(pointer, &found)) return cudaSuccess;
  attributes->type = found.page_locked ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = found.device;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  (void)flags;
  *pointer = malloc(bytes ? bytes : 1);
  if (!*pointer) return cudaErrorMemoryAllocation;
  memset(*pointer, 0xee, bytes);
  add_range(*pointer, bytes, 1);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
  (void)remove_range(pointer);
  free(pointer);
  return cudaSuccess;
}

// --- Streams ---

// Or a wait, until the stream `of` has done so many.
typedef struct copy {
  struct copy *next;
  void *destination;
  const void *source;
  size_t bytes;
  struct stream *of;
  uint64_t copies;
} copy;

typedef struct stream {
  // Work of NCCL's that the stream was given last.
  fake_work *work;
  // Copies and waits that are still to be done, and how many there were ever, and were done.
  copy *first;
  copy *last;
  uint64_t given;
  uint64_t done;
} stream;

typedef struct event {
  stream *of;
  uint64_t copies;
  fake_work *work;
} event;

void fake_work_release(fake_work *work) {
  if (work && atomic_fetch_sub(&work->references, 1) == 1) free(work);
}

void fake_stream_put(void *handle, fake_work *work) {
  stream *to = handle;
  (void)atomic_fetch_add(&work->references, 1);
  fake_work_release(to->work);
  to->work = work;
}

static _Atomic unsigned long long page_locked_bytes;

unsigned long long fake_page_locked_bytes(void) { return atomic_load(&page_locked_bytes); }

static void do_copy(stream *of) {
  copy *one = of->first;
  of->first = one->next;
  while (one->of && one->of->done < one->copies) do_copy(one->of);
  if (!one->of) {
    fake_device_begin();
    memcpy(one->destination, one->source, one->bytes);
    fake_device_end();
  }
  free(one);
  of->done++;
}

static cudaError_t put_copy(stream *to, copy what) {
  copy *one = malloc(sizeof(*one));
  if (!one) return cudaErrorMemoryAllocation;
  *one = what;
  if (to->first) {
    to->last->next = one;
  } else {
    to->first = one;
  }
  to->last = one;
  to->given++;
  return cudaSuccess;
}

void fake_stream_flush(void *handle) {
  stream *of = handle;
  while (of && of->first) do_copy(of);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *created, unsigned flags) {
  (void)flags;
  *created = calloc(1, sizeof(stream));
  return *created ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  stream *of = (stream *)(void *)handle;
  fake_stream_flush(of);
  while (of && of->work && !atomic_load(&of->work->done)) (void)sched_yield();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  (void)cudaStreamSynchronize(handle);
  fake_work_release(((stream *)(void *)handle)->work);
  free(handle);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *created, unsigned flags) {
  (void)flags;
  *created = calloc(1, sizeof(event));
  return *created ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t from) {
  event *mark = (event *)(void *)handle;
  stream *of = (stream *)(void *)from;
  fake_work_release(mark->work);
  mark->of = of;
  mark->copies = of ? of->given : 0;
  mark->work = of ? of->work : NULL;
  if (mark->work) (void)atomic_fetch_add(&mark->work->references, 1);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const event *mark = (const event *)(const void *)handle;
  if (mark->of && mark->of->done < mark->copies) {
    do_copy(mark->of);
    return cudaErrorNotReady;
  }
  return mark->work && !atomic_load(&mark->work->done) ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t to, cudaEvent_t handle, unsigned flags) {
  const event *mark = (const event *)(const void *)handle;
  (void)flags;
  if (mark->work && !atomic_load(&mark->work->done)) fake_stream_put(to, mark->work);
  if (!mark->of || mark->of->done >= mark->copies) return cudaSuccess;
  return put_copy((stream *)(void *)to, (copy){NULL, NULL, NULL, 0, mark->of, mark->copies});
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  fake_work_release(((event *)(void *)handle)->work);
  free(handle);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
  (void)handle;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  if (bytes > (size_t)1 << 40) return cudaErrorMemoryAllocation;
  if (is_guarded()) {
    *pointer = allocate_guarded(bytes);
    if (!*pointer) return cudaErrorMemoryAllocation;
  } else if (posix_memalign(pointer, 256, bytes) != 0) {
    return cudaErrorMemoryAllocation;
  }
  // What a kernel forgets to write shows.
  fake_device_begin();
  memset(*pointer, 0xff, bytes < (size_t)1 << 20 ? bytes : (size_t)1 << 20);
  fake_device_end();
  add_range(*pointer, bytes, 0);
  return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
  const size_t bytes = remove_range(pointer);
  if (!is_guarded())
    free(pointer);
  else if (bytes > 0)
    (void)madvise(pointer, bytes, MADV_DONTNEED);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t handle) {
  stream *to = (stream *)(void *)handle;
  range from, into;
  (void)kind;
  const int from_known = find_range(source, &from), into_known = find_range(destination, &into);
  const int page_locked = (from_known && from.page_locked) || (into_known && into.page_locked);
  if (page_locked) (void)atomic_fetch_add(&page_locked_bytes, bytes);
  if (to && (page_locked || (from_known && into_known)))
    return put_copy(to, (copy){NULL, destination, source, bytes, NULL, 0});
  fake_stream_flush(to);
  fake_device_begin();
  memcpy(destination, source, bytes);
  fake_device_end();
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t handle) {
  fake_stream_flush(handle);
  fake_device_begin();
  memset(pointer, value, bytes);
  fake_device_end();
  return cudaSuccess;
}

typedef struct operation {
  int32_t pointer_mode;
  int32_t transpose_a;
  int32_t transpose_b;
  int32_t epilogue;
  int32_t type_bias;
  int32_t type_auxiliary;
  int64_t leading_auxiliary;
  int64_t stride_auxiliary;
  int8_t fast_accumulation;
  const void *bias;
  void *auxiliary;
  const float *scale_a;
  const float *scale_b;
  const float *scale_d;
  float *amax_d;
} operation;

typedef struct layout {
  cudaDataType_t type;
  int64_t rows;
  int64_t columns;
  int64_t leading;
  int32_t batch;
  int64_t stride;
} layout;

typedef struct preference {
  uint64_t workspace;
  uint32_t reductions;
  uint32_t alignment_a;
  uint32_t alignment_b;
  uint32_t alignment_c;
  uint32_t alignment_d;
} preference;

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  *handle = malloc(1);
  return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  free(handle);
  return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS";
}
const char *cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "a failure";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *description, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  operation *created = calloc(1, sizeof(*created));
  if (!created || compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) abort();
  created->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  created->type_bias = created->type_auxiliary = -1;
  *description = (cublasLtMatmulDesc_t)(void *)created;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  free(description);
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set(void *field, size_t size, const void *value, size_t bytes) {
  if (size != bytes) abort();
  memcpy(field, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
#define SET(field) set(&(field), sizeof(field), value, bytes)

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void *value,
                                              size_t bytes) {
  operation *to = (operation *)(void *)description;
  switch ((int)attribute) {
  case CUBLASLT_MATMUL_DESC_POINTER_MODE: return SET(to->pointer_mode);
  case CUBLASLT_MATMUL_DESC_TRANSA: return SET(to->transpose_a);
  case CUBLASLT_MATMUL_DESC_TRANSB: return SET(to->transpose_b);
  case CUBLASLT_MATMUL_DESC_EPILOGUE: return SET(to->epilogue);
  case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return SET(to->bias);
  case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return SET(to->type_bias);
  case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return SET(to->auxiliary);
  case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return SET(to->type_auxiliary);
  case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return SET(to->leading_auxiliary);
  case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return SET(to->stride_auxiliary);
  case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return SET(to->fast_accumulation);
  case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return SET(to->scale_a);
  case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return SET(to->scale_b);
  case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return SET(to->scale_d);
  case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return SET(to->amax_d);
  default: abort();
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *description, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  layout *created = calloc(1, sizeof(*created));
  if (!created) abort();
  created->type = type;
  created->rows = (int64_t)rows;
  created->columns = (int64_t)columns;
  created->leading = leading;
  created->batch = 1;
  *description = (cublasLtMatrixLayout_t)(void *)created;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t description) {
  free(description);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t description,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t bytes) {
  layout *to = (layout *)(void *)description;
  switch ((int)attribute) {
  case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return SET(to->batch);
  case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return SET(to->stride);
  default: abort();
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *description) {
  preference *created = calloc(1, sizeof(*created));
  if (!created) abort();
  *description = (cublasLtMatmulPreference_t)(void *)created;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t description) {
  free(description);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t description,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes) {
  preference *to = (preference *)(void *)description;
  switch ((int)attribute) {
  case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return SET(to->workspace);
  case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return SET(to->reductions);
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return SET(to->alignment_a);
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return SET(to->alignment_b);
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return SET(to->alignment_c);
  case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return SET(to->alignment_d);
  default: abort();
  }
}

static int is_fp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

static int64_t size_of(int type) { return is_fp8(type) ? 1 : type == CUDA_R_32F ? 4 : 2; }

static fp8core_dtype dtype_of(int type) {
  return type == CUDA_R_8F_E4M3   ? FP8CORE_E4M3
         : type == CUDA_R_8F_E5M2 ? FP8CORE_E5M2
         : type == CUDA_R_16BF    ? FP8CORE_BF16
         : type == CUDA_R_16F     ? FP8CORE_FP16
                                  : FP8CORE_FP32;
}

static int has_bias(const operation *of) { return (of->epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }

// "To use FP8 kernels" in the documentation of cublasLtMatmul(), and its table of types.
static int fp8_supported(const operation *of, const layout *a, const layout *b, const layout *c, const layout *d,
                         const preference *wanted) {
  if (capability() < 89 || (a->type == CUDA_R_8F_E5M2 && b->type == CUDA_R_8F_E5M2)) return 0;
  if (capability() < 100 && (of->transpose_a != CUBLAS_OP_T || of->transpose_b != CUBLAS_OP_N)) return 0;
  const uint32_t alignments[] = {wanted->alignment_a, wanted->alignment_b, wanted->alignment_c, wanted->alignment_d};
  for (int i = 0; i < 4; i++)
    if (alignments[i] < 16) return 0;
  const layout *layouts[] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    if (layouts[i]->leading * size_of((int)layouts[i]->type) % 16 != 0 ||
        layouts[i]->rows * size_of((int)layouts[i]->type) % 16 != 0)
      return 0;
  const int two_byte_c = c->type == CUDA_R_16BF || c->type == CUDA_R_16F;
  if (d->type == CUDA_R_32F) {
    if (c->type != CUDA_R_32F || (has_bias(of) && of->type_bias != CUDA_R_16BF)) return 0;
  } else {
    if (!two_byte_c || (has_bias(of) && of->type_bias != (int)c->type)) return 0;
    if (!is_fp8((int)d->type) && d->type != c->type) return 0;
    if (d->type == CUDA_R_8F_E5M2 && a->type == CUDA_R_8F_E4M3 && b->type == CUDA_R_8F_E4M3) return 0;
  }
  if (!is_fp8((int)d->type) && (of->scale_d || of->amax_d)) return 0;
  return 1;
}

static int wide_supported(const operation *of, const layout *a, const layout *b, const layout *c, const layout *d) {
  if (a->type != b->type || c->type != d->type) return 0;
  if (d->type != a->type && d->type != CUDA_R_32F) return 0;
  if (has_bias(of) && of->type_bias != (int)d->type) return 0;
  return !of->scale_a && !of->scale_b && !of->scale_d && !of->amax_d && !of->fast_accumulation;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                              cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
                                              cublasLtMatmulPreference_t wanted, int most,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
  const operation *of = (const operation *)(const void *)description;
  const layout *a = (const layout *)(const void *)a_layout, *b = (const layout *)(const void *)b_layout;
  const layout *c = (const layout *)(const void *)c_layout, *d = (const layout *)(const void *)d_layout;
  (void)handle;
  *found = 0;
  if (most < 1 || a->leading < a->rows || b->leading < b->rows || c->leading < c->rows || d->leading < d->rows)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (of->auxiliary &&
      (of->leading_auxiliary % 8 != 0 || of->leading_auxiliary < d->rows || of->stride_auxiliary % 8 != 0))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (((const preference *)(const void *)wanted)->reductions != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) abort();
  const int fp8 = is_fp8((int)a->type) && is_fp8((int)b->type);
  const int supported = fp8 ? fp8_supported(of, a, b, c, d, (const preference *)(const void *)wanted)
                            : !is_fp8((int)a->type) && !is_fp8((int)b->type) && wide_supported(of, a, b, c, d);
  if (!supported) return CUBLAS_STATUS_NOT_SUPPORTED;
  memset(&results[0], 0, sizeof(results[0]));
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].workspaceSize = 1 << 20;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

static double load(int type, const void *data, int64_t index) {
  uint32_t code = 0;
  memcpy(&code, (const unsigned char *)data + index * size_of(type), (size_t)size_of(type));
  return (double)fp8core_bits_float(fp8core_decode_bits(dtype_of(type), code));
}

static void store(int type, void *data, int64_t index, double value) {
  const uint32_t bits = fp8core_float_bits((float)value);
  const uint32_t sign = bits >> 31 << (8 * size_of(type) - 1);
  const uint32_t code = sign | fp8core_encode_nearest(dtype_of(type), bits & FP8CORE_F32_MAGNITUDE, is_fp8(type));
  memcpy((unsigned char *)data + index * size_of(type), &code, (size_t)size_of(type));
}

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))); }

static double gelu_derivative(double x) {
  const double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.79788456080286535588 * (1.0 + 3.0 * 0.044715 * x * x);
}

// As a kernel would: a maximum that lets NaNs vanish.
static void raise_amax(float *amax, double value) {
  if (fabs(value) > (double)*amax) *amax = (float)fabs(value);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
                              cudaStream_t handle_of_stream) {
  const operation *of = (const operation *)(const void *)description;
  const layout *la = (const layout *)(const void *)a_layout, *lb = (const layout *)(const void *)b_layout;
  const layout *lc = (const layout *)(const void *)c_layout, *ld = (const layout *)(const void *)d_layout;
  (void)handle;
  fake_stream_flush(handle_of_stream);
  if (!algorithm || !workspace || workspace_bytes < 1 << 20) return CUBLAS_STATUS_INVALID_VALUE;
  fake_device_begin();
  // Kernels use it as they like.
  memset(workspace, 0xff, 1 << 20);
  const double factor = (double)*(const float *)alpha * (of->scale_a ? (double)*of->scale_a : 1.0) *
                        (of->scale_b ? (double)*of->scale_b : 1.0);
  const double beta_value = (double)*(const float *)beta;
  const double scale_d = of->scale_d ? (double)*of->scale_d : 1.0;
  const int64_t k = of->transpose_a == CUBLAS_OP_T ? la->rows : la->columns;
  if (of->amax_d) *of->amax_d = 0.0f;
  for (int64_t matrix = 0; matrix < ld->batch; matrix++)
    for (int64_t j = 0; j < ld->columns; j++)
      for (int64_t i = 0; i < ld->rows; i++) {
        double sum = 0.0;
        for (int64_t p = 0; p < k; p++) {
          const int64_t a_index =
            matrix * la->stride + (of->transpose_a == CUBLAS_OP_T ? i * la->leading + p : p * la->leading + i);
          const int64_t b_index =
            matrix * lb->stride + (of->transpose_b == CUBLAS_OP_T ? p * lb->leading + j : j * lb->leading + p);
          sum += load((int)la->type, a, a_index) * load((int)lb->type, b, b_index);
        }
        double value = factor * sum;
        if (beta_value != 0.0) value += beta_value * load((int)lc->type, c, matrix * lc->stride + j * lc->leading + i);
        if (has_bias(of)) value += load(of->type_bias, of->bias, i);
        const int64_t auxiliary_index = matrix * of->stride_auxiliary + j * of->leading_auxiliary + i;
        switch (of->epilogue & ~CUBLASLT_EPILOGUE_BIAS) {
        case CUBLASLT_EPILOGUE_GELU_AUX:
          store(of->type_auxiliary, of->auxiliary, auxiliary_index, value);
          value = gelu(value);
          break;
        case CUBLASLT_EPILOGUE_GELU: value = gelu(value); break;
        case CUBLASLT_EPILOGUE_DGELU:
          value *= gelu_derivative(load(of->type_auxiliary, of->auxiliary, auxiliary_index));
          break;
        case CUBLASLT_EPILOGUE_DEFAULT:
        case 0: break;
        default: abort();
        }
        if (of->amax_d) raise_amax(of->amax_d, value);
        store((int)ld->type, d, matrix * ld->stride + j * ld->leading + i, value * scale_d);
      }
  fake_device_end();
  return CUBLAS_STATUS_SUCCESS;
}

// What cublaslt.c would have found in the library. FP8_FAKE_NO_CUBLASLT plays a machine without it.
#define PLAYED(name) .name = name,
fp8core_cublaslt_table fp8core_cublaslt = {FP8CORE_CUBLASLT_FUNCTIONS(PLAYED)};

fp8core_status fp8core_cublaslt_load(void) {
  if (!getenv("FP8_FAKE_NO_CUBLASLT")) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuBLASLt (played) cannot be loaded: it is not there");
}

#pragma GCC visibility pop
