// The CUDA backend's table: devices, streams, memory, and the calls that hand a job to the kernels.
#include <stdlib.h>
#include <string.h>

#include "fp8core/cuda.h"
#include "state.h"

#define OLDEST_CAPABILITY 80

fp8core_status fp8core_cuda_check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return FP8CORE_OK;
  // The runtime keeps the last error for whoever asks next; it has been reported.
  (void)cudaGetLastError();
  return fp8core_set_last_error(error == cudaErrorMemoryAllocation ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_DEVICE,
                                "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

fp8core_status fp8core_cuda_check_blas(cublasStatus_t error, const char *what) {
  if (error == CUBLAS_STATUS_SUCCESS) return FP8CORE_OK;
  return fp8core_set_last_error(
    error == CUBLAS_STATUS_ALLOC_FAILED ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_DEVICE, "%s: %s (%s)", what,
    fp8core_cublaslt.cublasLtGetStatusString(error), fp8core_cublaslt.cublasLtGetStatusName(error));
}

fp8core_status fp8core_cuda_enter(const fp8core_context *context, int *previous) {
  const int device = fp8core_cuda_state_of(context)->device;
  FP8CORE_TRY(fp8core_cuda_check(cudaGetDevice(previous), "cudaGetDevice"));
  return *previous == device ? FP8CORE_OK : fp8core_cuda_check(cudaSetDevice(device), "cudaSetDevice");
}

void fp8core_cuda_leave(const fp8core_context *context, int previous) {
  if (previous != fp8core_cuda_state_of(context)->device) (void)cudaSetDevice(previous);
}

// Growing or freeing memory waits for the stream, which a capture cannot record.
static fp8core_status refuse_capture(const fp8core_cuda_state *state, const char *what, size_t bytes) {
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FP8CORE_TRY(fp8core_cuda_check(cudaStreamIsCapturing(state->stream, &capture), "cudaStreamIsCapturing"));
  if (capture == cudaStreamCaptureStatusNone) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_DEVICE,
                                "%s (%zu bytes) while the stream is being captured; a workspace grows in a first run "
                                "before the capture, or is set by workspace_bytes",
                                what, bytes);
}

static fp8core_status cuda_synchronize(fp8core_context *context) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status =
    fp8core_cuda_check(cudaStreamSynchronize(fp8core_cuda_state_of(context)->stream), "cudaStreamSynchronize");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_alloc(fp8core_context *context, size_t bytes, void **pointer) {
  int previous;
  FP8CORE_TRY(refuse_capture(fp8core_cuda_state_of(context), "device memory is wanted", bytes));
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  void *allocated = NULL;
  const cudaError_t error = cudaMalloc(&allocated, bytes);
  fp8core_cuda_leave(context, previous);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cudaMalloc of %zu bytes: %s (%s)", bytes,
                                  cudaGetErrorString(error), cudaGetErrorName(error));
  }
  FP8CORE_TRY(fp8core_cuda_check(error, "cudaMalloc"));
  *pointer = allocated;
  return FP8CORE_OK;
}

static fp8core_status cuda_free(fp8core_context *context, void *pointer) {
  fp8core_cuda_state *state = fp8core_cuda_state_of(context);
  int previous;
  FP8CORE_TRY(refuse_capture(state, "device memory is freed", context->workspace_bytes));
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  fp8core_status status = fp8core_cuda_check(cudaStreamSynchronize(state->stream), "cudaStreamSynchronize");
  const fp8core_status freed = fp8core_cuda_check(cudaFree(pointer), "cudaFree");
  if (status == FP8CORE_OK) status = freed;
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_copy(fp8core_context *context, void *destination, const void *source, size_t bytes) {
  const cudaStream_t stream = fp8core_cuda_state_of(context)->stream;
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  fp8core_status status =
    fp8core_cuda_check(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  if (status == FP8CORE_OK) status = fp8core_cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_zero(fp8core_context *context, void *pointer, size_t bytes) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status =
    fp8core_cuda_check(cudaMemsetAsync(pointer, 0, bytes, fp8core_cuda_state_of(context)->stream), "cudaMemsetAsync");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_cast(fp8core_context *context, const fp8core_cast_job *job) {
  const fp8core_cuda_target *target = &fp8core_cuda_state_of(context)->target;
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status =
    job->transposed.data
      ? fp8core_cuda_check_launch(fp8core_cuda_launch_cast_transpose(target, job), "launch of a cast-transpose")
      : fp8core_cuda_check_launch(fp8core_cuda_launch_cast(target, job), "launch of a cast");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_amax(fp8core_context *context, int64_t rows, int64_t columns, const fp8core_rows *source,
                                float *amax) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status = fp8core_cuda_check_launch(
    fp8core_cuda_launch_amax(&fp8core_cuda_state_of(context)->target, rows, columns, source, amax, NULL),
    "launch of an amax");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status calibrate(const fp8core_cuda_target *target, const fp8core_scaling_arrays *arrays, int64_t index,
                                int only_without_history, int64_t rows, int64_t columns, const fp8core_rows *source) {
  const uint64_t *skip = only_without_history ? &arrays->history_steps[index] : NULL;
  FP8CORE_TRY(fp8core_cuda_check_launch(
    fp8core_cuda_launch_calibrate_begin(target, arrays, index, only_without_history), "launch of a calibration"));
  if (rows > 0 && columns > 0)
    FP8CORE_TRY(fp8core_cuda_check_launch(
      fp8core_cuda_launch_amax(target, rows, columns, source, &arrays->measured[index], skip), "launch of an amax"));
  return fp8core_cuda_check_launch(fp8core_cuda_launch_calibrate_end(target, arrays, index, only_without_history),
                                   "launch of a calibration");
}

static fp8core_status cuda_scaling_calibrate(fp8core_context *context, const fp8core_scaling_arrays *arrays,
                                             int64_t index, int only_without_history, int64_t rows, int64_t columns,
                                             const fp8core_rows *source) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status =
    calibrate(&fp8core_cuda_state_of(context)->target, arrays, index, only_without_history, rows, columns, source);
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_scaling_update(fp8core_context *context, const fp8core_scaling_arrays *arrays) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status = fp8core_cuda_check_launch(
    fp8core_cuda_launch_scaling_update(&fp8core_cuda_state_of(context)->target, arrays), "launch of a scaling update");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_copy_float(fp8core_context *context, float *destination, const float *source) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status =
    fp8core_cuda_check(cudaMemcpyAsync(destination, source, sizeof(float), cudaMemcpyDeviceToDevice,
                                       fp8core_cuda_state_of(context)->stream),
                       "cudaMemcpyAsync");
  fp8core_cuda_leave(context, previous);
  return status;
}

static fp8core_status cuda_gemm(fp8core_context *context, const fp8core_gemm_job *job) {
  int previous;
  FP8CORE_TRY(fp8core_cuda_enter(context, &previous));
  const fp8core_status status = fp8core_cuda_gemm(context, job);
  fp8core_cuda_leave(context, previous);
  return status;
}

static void release(fp8core_cuda_state *state) {
  fp8core_cuda_plans_destroy(&state->plans);
  if (state->blas) (void)fp8core_cublaslt.cublasLtDestroy(state->blas);
  if (state->owns_stream) (void)cudaStreamDestroy(state->stream);
  free(state);
}

static void cuda_destroy(fp8core_context *context) {
  fp8core_cuda_state *state = fp8core_cuda_state_of(context);
  int previous = state->device;
  const fp8core_status entered = fp8core_cuda_enter(context, &previous);
  (void)cudaStreamSynchronize(state->stream);
  context->backend_state = NULL;
  const int device = state->device;
  release(state);
  if (entered == FP8CORE_OK && previous != device) (void)cudaSetDevice(previous);
}

static const fp8core_backend cuda_backend = {
  .destroy = cuda_destroy,
  .synchronize = cuda_synchronize,
  .alloc = cuda_alloc,
  .free = cuda_free,
  .copy = cuda_copy,
  .zero = cuda_zero,
  .cast = cuda_cast,
  .amax = cuda_amax,
  .scaling_calibrate = cuda_scaling_calibrate,
  .scaling_update = cuda_scaling_update,
  .copy_float = cuda_copy_float,
  .gemm = cuda_gemm,
};

static fp8core_status count_devices(int *count) {
  *count = 0;
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess && *count > 0) return FP8CORE_OK;
  (void)cudaGetLastError();
  *count = 0;
  if (error == cudaSuccess)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "CUDA finds no GPU (cudaGetDeviceCount gives 0)");
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "CUDA finds no usable GPU: %s (%s of cudaGetDeviceCount)",
                                cudaGetErrorString(error), cudaGetErrorName(error));
}

int fp8core_cuda_device_count(void) {
  int count;
  return count_devices(&count) == FP8CORE_OK ? count : 0;
}

// The context's device is current.
static fp8core_status open_device(fp8core_cuda_state *state, const fp8core_context_options *options) {
  int major = 0, minor = 0;
  FP8CORE_TRY(fp8core_cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, state->device),
                                 "cudaDeviceGetAttribute"));
  FP8CORE_TRY(fp8core_cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, state->device),
                                 "cudaDeviceGetAttribute"));
  FP8CORE_TRY(fp8core_cuda_check(
    cudaDeviceGetAttribute(&state->target.multiprocessors, cudaDevAttrMultiProcessorCount, state->device),
    "cudaDeviceGetAttribute"));
  state->capability = 10 * major + minor;
  if (state->capability < OLDEST_CAPABILITY)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                  "CUDA device %d has compute capability %d.%d, expected at least %d.%d (BF16)",
                                  state->device, major, minor, OLDEST_CAPABILITY / 10, OLDEST_CAPABILITY % 10);
  if (options->use_stream) {
    state->stream = (cudaStream_t)options->stream;
  } else {
    FP8CORE_TRY(fp8core_cuda_check(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking),
                                   "cudaStreamCreateWithFlags"));
    state->owns_stream = 1;
  }
  state->target.stream = state->stream;
  FP8CORE_TRY(fp8core_cublaslt_load());
  FP8CORE_TRY(fp8core_cuda_check_blas(fp8core_cublaslt.cublasLtCreate(&state->blas), "cublasLtCreate"));
  return fp8core_cuda_plans_create(&state->plans);
}

fp8core_status fp8core_cuda_context_init(fp8core_context *context, const fp8core_context_options *options) {
  const int device = options->device.index;
  int count, previous;
  FP8CORE_TRY(count_devices(&count));
  if (device < 0 || device >= count)
    return fp8core_invalid("device.index is %d, expected 0 to %d (CUDA finds %d)", device, count - 1, count);
  fp8core_cuda_state *state = calloc(1, sizeof(*state));
  if (!state)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes for a CUDA context",
                                  sizeof(*state));
  state->device = device;
  fp8core_status status = fp8core_cuda_check(cudaGetDevice(&previous), "cudaGetDevice");
  if (status == FP8CORE_OK) {
    status = fp8core_cuda_check(cudaSetDevice(device), "cudaSetDevice");
    if (status == FP8CORE_OK) status = open_device(state, options);
    if (status != FP8CORE_OK) {
      release(state);
      state = NULL;
    }
    if (previous != device) (void)cudaSetDevice(previous);
  } else {
    free(state);
    state = NULL;
  }
  if (!state) return status;
  context->backend = &cuda_backend;
  context->backend_state = state;
  return FP8CORE_OK;
}

fp8core_status fp8core_cuda_stream(const fp8core_context *context, void **stream) {
  if (!stream) return fp8core_invalid("stream is NULL, expected where to put the handle");
  *stream = NULL;
  if (!context || context->device.type != FP8CORE_DEVICE_CUDA)
    return fp8core_invalid("context is %s, expected one of a CUDA device", context ? "of the CPU" : "NULL");
  *stream = fp8core_cuda_state_of(context)->stream;
  return FP8CORE_OK;
}

fp8core_status fp8core_cuda_compute_capability(const fp8core_context *context, int *major, int *minor) {
  if (!major || !minor) return fp8core_invalid("%s is NULL, expected where to put a number", major ? "minor" : "major");
  *major = 0;
  *minor = 0;
  if (!context || context->device.type != FP8CORE_DEVICE_CUDA)
    return fp8core_invalid("context is %s, expected one of a CUDA device", context ? "of the CPU" : "NULL");
  *major = fp8core_cuda_state_of(context)->capability / 10;
  *minor = fp8core_cuda_state_of(context)->capability % 10;
  return FP8CORE_OK;
}
