// Device memory, apart from how it gets there: what libfp8comm needs of CUDA (src/cuda/) and of NCCL (src/nccl/), and
// the steps that collectives on device memory consist of (device.c). Both folders have a stub for builds without.
#ifndef FP8COMM_SRC_DEVICE_H
#define FP8COMM_SRC_DEVICE_H

#include "cuda/kernels.h"
#include "fp8comm/device.h"
#include "internal.h"

#define FP8COMM_CUDA_NAME_BYTES 32
#define FP8COMM_NCCL_ID_BYTES 128

typedef struct fp8comm_cuda_functions fp8comm_cuda_functions;

// A context's device, and a stream of its own there. Begins the object of src/cuda/.
typedef struct fp8comm_cuda {
  const fp8comm_cuda_functions *functions;
  fp8core_context *context;
  int device;
  // 90 for compute capability 9.0.
  int capability;
  // cudaStream_t.
  void *stream;
  // Its place on the PCI bus, which tells GPUs of one machine apart.
  char name[FP8COMM_CUDA_NAME_BYTES];
} fp8comm_cuda;

struct fp8comm_cuda_functions {
  void (*close)(fp8comm_cuda *cuda);
  // Makes the device the calling thread's current one, which *previous was; and that again.
  fp8core_status (*enter)(const fp8comm_cuda *cuda, int *previous);
  void (*leave)(const fp8comm_cuda *cuda, int previous);
  // Whether `pointer` is memory that the device works on; FP8CORE_ERROR_INVALID_ARGUMENT, with `name`, for another
  // device's.
  fp8core_status (*find)(fp8comm_cuda *cuda, const char *name, const void *pointer, int *on_device);
  // What the stream is given from now on comes after what the context's stream was given before.
  fp8core_status (*follow)(fp8comm_cuda *cuda);
  // Puts a copy on the stream, between any two of device memory and page-locked host memory.
  fp8core_status (*copy)(fp8comm_cuda *cuda, void *destination, const void *source, size_t bytes);
  // Marks where the stream is; *event NULL: it is made.
  fp8core_status (*record)(fp8comm_cuda *cuda, void **event);
  // Whether the stream is past the mark.
  fp8core_status (*query)(fp8comm_cuda *cuda, void *event, int *done);
  void (*destroy_event)(fp8comm_cuda *cuda, void *event);
  // Waits for the stream.
  void (*synchronize)(fp8comm_cuda *cuda);
  // Page-locked host memory.
  fp8core_status (*allocate)(fp8comm_cuda *cuda, size_t bytes, void **memory);
  void (*free)(fp8comm_cuda *cuda, void *memory);
  // Puts a sum of codes on the stream.
  fp8core_status (*sum)(fp8comm_cuda *cuda, const fp8comm_sum_job *job);
  // The same of a step of a plain reduction: FIRST and LAST of 16-bit formats, ADD of all.
  fp8core_status (*reduce)(fp8comm_cuda *cuda, fp8comm_step_kind step, const fp8comm_reduce_job *job);
  // The same of the two steps of error feedback.
  fp8core_status (*measure_corrected)(fp8comm_cuda *cuda, const fp8comm_feedback_job *job);
  fp8core_status (*cast_corrected)(fp8comm_cuda *cuda, const fp8comm_feedback_job *job);
};

// From a context of a CUDA device, as far as it says.
fp8core_status fp8comm_cuda_open(fp8core_context *context, fp8comm_cuda **cuda);

// --- NCCL: communicators that do not block. One thread at a time. ---

typedef struct fp8comm_nccl fp8comm_nccl;

// As NCCL codes it: 22809 is 2.28.9. Loads the library; FP8CORE_ERROR_NOT_SUPPORTED, with the reason, where there is
// none that serves. Thread-safe.
fp8core_status fp8comm_nccl_version(int *version);
// Whether FP8 has reductions here; else why not.
fp8core_status fp8comm_nccl_check_fp8(const fp8comm_cuda *cuda);
fp8core_status fp8comm_nccl_unique_id(void *id);
// Begins to make a communicator, which all ranks do. It is closed by _close(), also where it never came about.
fp8core_status fp8comm_nccl_open(fp8comm_cuda *cuda, int rank, int size, const void *id, fp8comm_nccl **nccl);
// Whether what was begun last, the making or a launch, has been put on the stream. Fails with NCCL's words where it has
// met an error, of what is on the stream too.
fp8core_status fp8comm_nccl_poll(fp8comm_nccl *nccl, int *done);
// Begins to put operations on the stream, as one group.
fp8core_status fp8comm_nccl_launch(fp8comm_nccl *nccl, fp8comm_request *const *requests, int count);
// Frees it. `aborts`: ends what is on the stream. Else nothing is; waits for other ranks' _close(), but no longer than
// a moment.
void fp8comm_nccl_close(fp8comm_nccl **nccl, int aborts);

// --- device.c ---

// Whether the collective's buffers are in device memory; all must be of one kind.
fp8core_status fp8comm_device_find(const fp8comm_communicator *communicator, const fp8comm_collective *collective,
                                   int *on_device);
// Adds the steps of a collective on device memory to its request, which has been begun.
fp8core_status fp8comm_device_build(fp8comm_request *request, const fp8comm_collective *collective);
// Adds what moves device memory without the host's, on a communicator whose path does that (NCCL's, the transport's),
// of what the stream has been given before: a collective, or FP8COMM_OPERATION_GRADIENT, in
// which every rank gets from all others its part of `send` (of `counts` elements, one part after the other), those of
// the rank before it first, and each at a multiple of 16 bytes. What the stream is given afterwards sees the result.
// The collective is read when the step's turn comes.
void fp8comm_add_device_collective(fp8comm_request *request, const fp8comm_collective *collective);
// Whether that can be had.
int fp8comm_device_is_direct(const fp8comm_communicator *communicator);
// Where the transport moves device memory, its calls want the device to be the thread's current one, which it is
// between the two; returns what is to be restored.
int fp8comm_device_make_current(const fp8comm_shared *shared);
void fp8comm_device_restore(const fp8comm_shared *shared, int previous);
// The same path for a communicator that was split off.
fp8core_status fp8comm_device_inherit(fp8comm_communicator *communicator, const fp8comm_communicator *parent);
// Gives NCCL what is its turn, of all requests in flight.
fp8core_status fp8comm_device_progress(fp8comm_shared *shared);
// A step of the kinds that concern devices. *done 0: it has to be tried again.
fp8core_status fp8comm_device_step(fp8comm_request *request, const fp8comm_step *step, int *done);
// Ends what a request has on the device; then its memory is not touched any more.
void fp8comm_device_cancel(fp8comm_request *request);
// Frees what a request keeps for its next use.
void fp8comm_device_free(fp8comm_request *request);
// The end of a communicator, and of what those over one endpoint share.
void fp8comm_device_leave(fp8comm_communicator *communicator);
void fp8comm_device_close(fp8comm_shared *shared);

#endif
