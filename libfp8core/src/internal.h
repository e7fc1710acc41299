// What the files of libfp8core share: the context, the table of functions that a device implements, and argument
// checks. Public functions (src/*.c) validate and normalise; backends (src/cpu, src/cuda) assume valid input.
#ifndef FP8CORE_INTERNAL_H
#define FP8CORE_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/cast.h"
#include "fp8core/context.h"
#include "fp8core/gemm.h"
#include "fp8core/scaling.h"
#include "fp8core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define fp8core_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define FP8CORE_TRY(call)                                                                                              \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

// Rows of a matrix on the context's device, row starts `stride` elements apart. A cast sees every tensor like this.
typedef struct fp8core_rows {
  void *data;
  fp8core_dtype dtype;
  int64_t stride;
  // Device pointers, NULL: 1.
  const float *scale;
  const float *scale_inverse;
  // Device pointer, NULL: not wanted.
  float *amax;
} fp8core_rows;

typedef struct fp8core_cast_job {
  int64_t rows;
  int64_t columns;
  fp8core_rows source;
  // data NULL: only the transpose is wanted.
  fp8core_rows destination;
  // [columns, rows]; data NULL: not wanted. amax and scale are in `destination`, also when destination.data is NULL.
  fp8core_rows transposed;
  // source.data == destination.data and the destination's element is narrower: writes must trail reads.
  int in_place_narrowing;
  int stochastic;
  int saturate;
  uint32_t tensor_id;
  uint32_t step;
  uint64_t first_element;
  uint64_t seed;
  // Device pointer, NULL: not wanted.
  fp8core_cast_statistics *statistics;
} fp8core_cast_job;

typedef struct fp8core_gemm_job {
  int64_t m;
  int64_t n;
  int64_t k;
  // Defaults filled in; every tensor has its row_stride set. Unused pointers are NULL.
  fp8core_gemm_options options;
  fp8core_tensor a;
  fp8core_tensor b;
  // c.data is NULL when beta is 0.
  fp8core_tensor c;
  fp8core_tensor d;
  // The options' tensors with row_stride set; data NULL when not wanted.
  fp8core_tensor bias;
  fp8core_tensor auxiliary;
  fp8core_tensor bias_gradient;
} fp8core_gemm_job;

// Device arrays of a scaling state, one entry a tensor; passed by value to kernels.
typedef struct fp8core_scaling_arrays {
  int64_t tensors;
  // Policy and limits; see fp8core_scaling_options.
  int delayed;
  int history_length;
  int most_recent;
  int margin;
  int power_of_two;
  // uint8_t holding an fp8core_dtype.
  uint8_t *dtypes;
  float *scale;
  float *scale_inverse;
  float *amax;
  // Scratch: the amax of a just-in-time pass.
  float *measured;
  // [tensors, history_length] ring buffers.
  float *history;
  // Steps ever pushed; the ring's write position is this modulo history_length.
  uint64_t *history_steps;
  uint64_t *nonfinite_steps;
} fp8core_scaling_arrays;

// What a device implements.
typedef struct fp8core_backend {
  void (*destroy)(fp8core_context *context);
  fp8core_status (*synchronize)(fp8core_context *context);
  fp8core_status (*alloc)(fp8core_context *context, size_t bytes, void **pointer);
  fp8core_status (*free)(fp8core_context *context, void *pointer);
  fp8core_status (*copy)(fp8core_context *context, void *destination, const void *source, size_t bytes);
  fp8core_status (*zero)(fp8core_context *context, void *pointer, size_t bytes);
  // Never called with no elements. With job->transposed.data set it is a cast-transpose.
  fp8core_status (*cast)(fp8core_context *context, const fp8core_cast_job *job);
  fp8core_status (*amax)(fp8core_context *context, int64_t rows, int64_t columns, const fp8core_rows *source,
                         float *amax);
  // Sets measured[index] to 0, raises it to the source's amax, and sets the scale of `index` from it
  // (fp8core_calibrate_rule in scaling_rules.h); does nothing where `only_without_history` and the tensor has a
  // history.
  fp8core_status (*scaling_calibrate)(fp8core_context *context, const fp8core_scaling_arrays *arrays, int64_t index,
                                      int only_without_history, int64_t rows, int64_t columns,
                                      const fp8core_rows *source);
  fp8core_status (*scaling_update)(fp8core_context *context, const fp8core_scaling_arrays *arrays);
  // Stores one float of device memory into another, ordered with the context's work.
  fp8core_status (*copy_float)(fp8core_context *context, float *destination, const float *source);
  // m, n > 0; k may be 0.
  fp8core_status (*gemm)(fp8core_context *context, const fp8core_gemm_job *job);
} fp8core_backend;

struct fp8core_context {
  const fp8core_backend *backend;
  fp8core_device device;
  int threads;
  fp8core_isa isa;
  uint64_t seed;
  fp8core_log_callback log;
  void *log_user_data;
  // Grown by fp8core_workspace(); owned.
  void *workspace;
  size_t workspace_bytes;
  // A call is made for the sake of its workspace only: it ends where it has it.
  int reserving;
  // Of the backend: the stream, cuBLASLt handle and caches of CUDA; NULL on the CPU.
  void *backend_state;
};

// CPU threads that a call may use now: the context's, but 1 in a child of fork().
int fp8core_usable_threads(const fp8core_context *context);

// What fp8core_workspace() returns instead of success while the context is reserving; it is passed on like an error.
#define FP8CORE_RESERVED ((fp8core_status)1)

// At least `bytes` of the context's device memory, 256-byte aligned, contents undefined, valid until the next call.
fp8core_status fp8core_workspace(fp8core_context *context, size_t bytes, void **pointer);

void fp8core_log(const fp8core_context *context, fp8core_log_level level, const char *format, ...) FP8CORE_PRINTF(3, 4);

extern const fp8core_backend fp8core_cpu_backend;

// CUDA, or the stub of a build without it (src/cuda/stub.c), which answers why not. The context has every field but
// workspace and backend_state set; on success `backend` and `backend_state` are set too.
fp8core_status fp8core_cuda_context_init(fp8core_context *context, const fp8core_context_options *options);
// 0 and a last error where there is none.
int fp8core_cuda_device_count(void);

// One-line message and status when `pointer` (called `name`.`field`, or `name` where `field` is "") is no multiple of
// `alignment`. NULL is one of any.
fp8core_status fp8core_check_aligned(const char *name, const char *field, const void *pointer, size_t alignment);
// One-line message and status when `tensor` (called `name` in the message) is null, invalid, or not on the context's
// device. The only check of a tensor: whatever passes it may be read through its pointers.
fp8core_status fp8core_check_tensor(const fp8core_context *context, const char *name, const fp8core_tensor *tensor);
// The row stride in elements (the row length where there are no two rows), the length of a row, and the number of rows
// of a valid tensor (0 where it has no elements), none of whose products overflow.
int64_t fp8core_row_stride(const fp8core_tensor *tensor);
int64_t fp8core_row_length(const fp8core_tensor *tensor);
int64_t fp8core_row_count(const fp8core_tensor *tensor);
// Checks the options' leading size and copies what the caller knows over the defaults; NULL leaves them.
fp8core_status fp8core_read_options(const char *name, void *destination, size_t size, const void *source);

// Validates arguments of fp8core_gemm() and fp8core_gemm_reference() (context NULL) into a job. *empty: M or N is 0.
fp8core_status fp8core_gemm_prepare(const fp8core_context *context, const fp8core_gemm_options *options,
                                    const fp8core_tensor *a, const fp8core_tensor *b, const fp8core_tensor *c,
                                    const fp8core_tensor *d, fp8core_gemm_job *job, int *empty);
// Grows the workspace to what a product needs, which is not computed.
fp8core_status fp8core_reserve_product(fp8core_context *context, const fp8core_gemm_job *job);
// Validates arguments of fp8core_cast*() into a job. `transposed` may be NULL. *empty: no elements.
fp8core_status fp8core_cast_prepare(fp8core_context *context, const fp8core_cast_options *options,
                                    const fp8core_tensor *source, const fp8core_tensor *destination,
                                    const fp8core_tensor *transposed, fp8core_cast_job *job, int *empty);

#ifdef __cplusplus
}
#endif

#endif
