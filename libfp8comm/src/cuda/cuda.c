// What libfp8comm does with CUDA: copies and marks on a stream of its own.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "../device.h"
#include "fp8core/cuda.h"
#include "kernels.h"

static fp8core_status check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return FP8CORE_OK;
  // The runtime keeps the last error for whoever asks next; it has been reported.
  (void)cudaGetLastError();
  return fp8core_set_last_error(error == cudaErrorMemoryAllocation ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_DEVICE,
                                "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// The device, for as long as this library works: a caller's choice is not ours to change.
static fp8core_status enter(const fp8comm_cuda *cuda, int *previous) {
  FP8COMM_TRY(check(cudaGetDevice(previous), "cudaGetDevice"));
  return *previous == cuda->device ? FP8CORE_OK : check(cudaSetDevice(cuda->device), "cudaSetDevice");
}

static void leave(const fp8comm_cuda *cuda, int previous) {
  if (previous != cuda->device) (void)cudaSetDevice(previous);
}

// Also where it is the current one: a driver has a context for the thread then, which what is no runtime call needs.
static fp8core_status cuda_enter(const fp8comm_cuda *cuda, int *previous) {
  FP8COMM_TRY(check(cudaGetDevice(previous), "cudaGetDevice"));
  return check(cudaSetDevice(cuda->device), "cudaSetDevice");
}

static void cuda_close(fp8comm_cuda *cuda) {
  int previous = cuda->device;
  const fp8core_status entered = enter(cuda, &previous);
  if (cuda->stream) {
    (void)cudaStreamSynchronize((cudaStream_t)cuda->stream);
    (void)cudaStreamDestroy((cudaStream_t)cuda->stream);
  }
  if (entered == FP8CORE_OK) leave(cuda, previous);
  free(cuda);
}

static fp8core_status cuda_find(fp8comm_cuda *cuda, const char *name, const void *pointer, int *on_device) {
  struct cudaPointerAttributes attributes;
  *on_device = 0;
  const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
  // Of old: memory that CUDA does not know.
  if (error == cudaErrorInvalidValue) {
    (void)cudaGetLastError();
    return FP8CORE_OK;
  }
  FP8COMM_TRY(check(error, "cudaPointerGetAttributes"));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != cuda->device)
    return fp8comm_invalid(
      "%s is in the memory of CUDA device %d, expected the communicator's device %d or host memory", name,
      attributes.device, cuda->device);
  *on_device = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  return FP8CORE_OK;
}

static fp8core_status cuda_record(fp8comm_cuda *cuda, void **event) {
  int previous;
  FP8COMM_TRY(enter(cuda, &previous));
  fp8core_status status = FP8CORE_OK;
  if (!*event) {
    cudaEvent_t made = NULL;
    status = check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    *event = made;
  }
  if (status == FP8CORE_OK)
    status = check(cudaEventRecord((cudaEvent_t)*event, (cudaStream_t)cuda->stream), "cudaEventRecord");
  leave(cuda, previous);
  return status;
}

static fp8core_status follow(fp8comm_cuda *cuda, cudaStream_t from) {
  cudaEvent_t event = NULL;
  FP8COMM_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
  fp8core_status status = check(cudaEventRecord(event, from), "cudaEventRecord");
  if (status == FP8CORE_OK)
    status = check(cudaStreamWaitEvent((cudaStream_t)cuda->stream, event, 0), "cudaStreamWaitEvent");
  // Lives on until the stream is past it.
  (void)cudaEventDestroy(event);
  return status;
}

static fp8core_status cuda_follow(fp8comm_cuda *cuda) {
  void *from;
  int previous;
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FP8COMM_TRY(fp8core_cuda_stream(cuda->context, &from));
  FP8COMM_TRY(check(cudaStreamIsCapturing((cudaStream_t)from, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone)
    return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "the context's stream is being captured, expected it not to "
                                                        "be: a graph cannot hold what other ranks must agree to");
  FP8COMM_TRY(enter(cuda, &previous));
  const fp8core_status status = follow(cuda, (cudaStream_t)from);
  leave(cuda, previous);
  return status;
}

static fp8core_status cuda_copy(fp8comm_cuda *cuda, void *destination, const void *source, size_t bytes) {
  int previous;
  FP8COMM_TRY(enter(cuda, &previous));
  const fp8core_status status = check(
    cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, (cudaStream_t)cuda->stream), "cudaMemcpyAsync");
  leave(cuda, previous);
  return status;
}

static fp8core_status cuda_query(fp8comm_cuda *cuda, void *event, int *done) {
  (void)cuda;
  const cudaError_t error = cudaEventQuery((cudaEvent_t)event);
  *done = error == cudaSuccess;
  if (error != cudaErrorNotReady) return check(error, "cudaEventQuery");
  (void)cudaGetLastError();
  return FP8CORE_OK;
}

static void cuda_destroy_event(fp8comm_cuda *cuda, void *event) {
  (void)cuda;
  (void)cudaEventDestroy((cudaEvent_t)event);
}

static void cuda_synchronize(fp8comm_cuda *cuda) {
  int previous;
  if (enter(cuda, &previous) != FP8CORE_OK) return;
  (void)cudaStreamSynchronize((cudaStream_t)cuda->stream);
  leave(cuda, previous);
}

static fp8core_status cuda_allocate(fp8comm_cuda *cuda, size_t bytes, void **memory) {
  int previous;
  *memory = NULL;
  FP8COMM_TRY(enter(cuda, &previous));
  const cudaError_t error = cudaHostAlloc(memory, bytes, cudaHostAllocPortable);
  leave(cuda, previous);
  if (error != cudaErrorMemoryAllocation) return check(error, "cudaHostAlloc");
  (void)cudaGetLastError();
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of page-locked host memory",
                                bytes);
}

static void cuda_free(fp8comm_cuda *cuda, void *memory) {
  (void)cuda;
  (void)cudaFreeHost(memory);
}

static fp8core_status cuda_sum(fp8comm_cuda *cuda, const fp8comm_sum_job *job) {
  int previous;
  if (job->count == 0) return FP8CORE_OK;
  FP8COMM_TRY(enter(cuda, &previous));
  const fp8core_status status =
    check((cudaError_t)fp8comm_cuda_launch_sum(job, cuda->stream), "launch of a sum of codes");
  leave(cuda, previous);
  return status;
}

static fp8core_status cuda_reduce(fp8comm_cuda *cuda, fp8comm_step_kind step, const fp8comm_reduce_job *job) {
  int previous;
  if (job->count == 0) return FP8CORE_OK;
  FP8COMM_TRY(enter(cuda, &previous));
  const int error = step == FP8COMM_STEP_FIRST ? fp8comm_cuda_launch_widen(job, cuda->stream)
                    : step == FP8COMM_STEP_ADD ? fp8comm_cuda_launch_add(job, cuda->stream)
                                               : fp8comm_cuda_launch_narrow(job, cuda->stream);
  const fp8core_status status = check((cudaError_t)error, "launch of a reduction");
  leave(cuda, previous);
  return status;
}

static fp8core_status cuda_feedback(fp8comm_cuda *cuda, const fp8comm_feedback_job *job,
                                    int (*launch)(const fp8comm_feedback_job *, void *), const char *what) {
  int previous;
  if (job->count == 0) return FP8CORE_OK;
  FP8COMM_TRY(enter(cuda, &previous));
  const fp8core_status status = check((cudaError_t)launch(job, cuda->stream), what);
  leave(cuda, previous);
  return status;
}

static fp8core_status cuda_measure_corrected(fp8comm_cuda *cuda, const fp8comm_feedback_job *job) {
  return cuda_feedback(cuda, job, fp8comm_cuda_launch_feedback_measure, "launch of an amax with error feedback");
}

static fp8core_status cuda_cast_corrected(fp8comm_cuda *cuda, const fp8comm_feedback_job *job) {
  return cuda_feedback(cuda, job, fp8comm_cuda_launch_feedback_cast, "launch of a cast with error feedback");
}

static const fp8comm_cuda_functions functions = {
  .close = cuda_close,
  .enter = cuda_enter,
  .leave = leave,
  .find = cuda_find,
  .follow = cuda_follow,
  .copy = cuda_copy,
  .record = cuda_record,
  .query = cuda_query,
  .destroy_event = cuda_destroy_event,
  .synchronize = cuda_synchronize,
  .allocate = cuda_allocate,
  .free = cuda_free,
  .sum = cuda_sum,
  .reduce = cuda_reduce,
  .measure_corrected = cuda_measure_corrected,
  .cast_corrected = cuda_cast_corrected,
};

static fp8core_status open_stream(fp8comm_cuda *cuda) {
  cudaStream_t stream = NULL;
  FP8COMM_TRY(check(cudaDeviceGetPCIBusId(cuda->name, sizeof(cuda->name), cuda->device), "cudaDeviceGetPCIBusId"));
  FP8COMM_TRY(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
  cuda->stream = stream;
  return FP8CORE_OK;
}

fp8core_status fp8comm_cuda_open(fp8core_context *context, fp8comm_cuda **cuda) {
  int major, minor, previous;
  *cuda = NULL;
  FP8COMM_TRY(fp8core_cuda_compute_capability(context, &major, &minor));
  fp8comm_cuda *made = calloc(1, sizeof(*made));
  if (!made) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a communicator's device");
  made->functions = &functions;
  made->context = context;
  made->device = fp8core_context_device(context).index;
  made->capability = 10 * major + minor;
  fp8core_status status = enter(made, &previous);
  if (status == FP8CORE_OK) {
    status = open_stream(made);
    leave(made, previous);
  }
  if (status == FP8CORE_OK) {
    *cuda = made;
  } else {
    cuda_close(made);
  }
  return status;
}
