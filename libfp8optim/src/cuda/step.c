// The CUDA backend: what a step and the setting of states put on the context's stream.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "fp8core/cuda.h"
#include "internal.h"
#include "kernels.h"

typedef struct fp8optim_cuda_state {
  int device;
  int multiprocessors;
  void *stream;
  // What the tables of gradients and groups on the device hold, unless `unknown`: not yet, or a graph that was captured
  // may put its own there whenever it is launched.
  fp8optim_gradient *gradients;
  fp8optim_group *groups;
  int unknown;
  int captured;
} fp8optim_cuda_state;

static fp8optim_cuda_state *state_of(const fp8optim_adamw *adamw) { return adamw->backend_state; }

static fp8core_status check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return FP8CORE_OK;
  // The runtime keeps the last error for whoever asks next; it has been reported.
  (void)cudaGetLastError();
  return fp8core_set_last_error(error == cudaErrorMemoryAllocation ? FP8CORE_ERROR_OUT_OF_MEMORY : FP8CORE_ERROR_DEVICE,
                                "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

static fp8core_status check_launch(int error, const char *what) { return check((cudaError_t)error, what); }

// The context's device, for as long as the backend works: a caller's choice of device is not ours to change.
static fp8core_status enter(const fp8optim_adamw *adamw, int *previous) {
  const int device = state_of(adamw)->device;
  FP8OPTIM_TRY(check(cudaGetDevice(previous), "cudaGetDevice"));
  return *previous == device ? FP8CORE_OK : check(cudaSetDevice(device), "cudaSetDevice");
}

static void leave(const fp8optim_adamw *adamw, int previous) {
  if (previous != state_of(adamw)->device) (void)cudaSetDevice(previous);
}

// Brings a table to the device where it is not what is there. It travels as arguments of kernels: the host's copy may
// change at once, nothing waits, and a captured graph keeps the table as it was.
static fp8core_status upload(const fp8optim_cuda_state *state, void *device, const void *values, void *uploaded,
                             size_t bytes, const char *what) {
  const size_t part_bytes = FP8OPTIM_CUDA_UPLOAD_WORDS * sizeof(uint32_t);
  for (size_t at = 0; at < bytes; at += part_bytes) {
    const size_t part = bytes - at < part_bytes ? bytes - at : part_bytes;
    const unsigned char *from = (const unsigned char *)values + at;
    uint32_t words[FP8OPTIM_CUDA_UPLOAD_WORDS];
    if (!state->unknown && memcmp(from, (unsigned char *)uploaded + at, part) == 0) continue;
    memcpy(words, from, part);
    FP8OPTIM_TRY(check_launch(
      fp8optim_cuda_launch_upload(state->stream, (unsigned char *)device + at, words, (int)(part / sizeof(uint32_t))),
      what));
    memcpy((unsigned char *)uploaded + at, from, part);
  }
  return FP8CORE_OK;
}

static fp8core_status upload_tables(fp8optim_adamw *adamw) {
  fp8optim_cuda_state *state = state_of(adamw);
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FP8OPTIM_TRY(check(cudaStreamIsCapturing((cudaStream_t)state->stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) state->captured = 1;
  if (state->captured) state->unknown = 1;
  const int unknown = state->unknown;
  // An error on the way leaves what is there unknown.
  FP8OPTIM_TRY(upload(state, adamw->tables.gradients, adamw->gradients, state->gradients,
                      (size_t)adamw->tensor_count * sizeof(*state->gradients), "launch of the upload of gradients"));
  FP8OPTIM_TRY(upload(state, adamw->tables.groups, adamw->groups, state->groups,
                      (size_t)adamw->group_count * sizeof(*state->groups), "launch of the upload of groups"));
  if (unknown) state->unknown = 0;
  return FP8CORE_OK;
}

static fp8optim_cuda_step job_of(const fp8optim_adamw *adamw, float max_norm, float loss_scale) {
  const fp8optim_cuda_step job = {
    .tables = adamw->tables,
    .tensor_count = adamw->tensor_count,
    .chunk_count = adamw->chunk_count,
    .group_count = adamw->group_count,
    .state_dtype = {adamw->options.master_dtype, adamw->options.exp_avg_dtype, adamw->options.exp_avg_sq_dtype},
    .max_norm = max_norm,
    .loss_scale = loss_scale,
    .stochastic = adamw->options.stochastic_rounding,
    .seed = adamw->options.seed,
  };
  return job;
}

static fp8core_status queue_measure(fp8optim_adamw *adamw, const fp8optim_cuda_step *job) {
  void *stream = state_of(adamw)->stream;
  FP8OPTIM_TRY(upload_tables(adamw));
  if (job->chunk_count > 0)
    FP8OPTIM_TRY(check_launch(fp8optim_cuda_launch_measure(stream, job), "launch of the measuring of gradients"));
  return check_launch(fp8optim_cuda_launch_gather(stream, job), "launch of the gathering of gradients");
}

static fp8core_status queue_begin(fp8optim_adamw *adamw, const fp8optim_cuda_step *job) {
  void *stream = state_of(adamw)->stream;
  FP8OPTIM_TRY(check_launch(fp8optim_cuda_launch_begin(stream, job), "launch of the beginning of a step"));
  return check_launch(fp8optim_cuda_launch_plan(stream, job), "launch of the planning of a step");
}

static fp8core_status queue_step(fp8optim_adamw *adamw, float max_norm, float loss_scale) {
  void *stream = state_of(adamw)->stream;
  const fp8optim_cuda_step job = job_of(adamw, max_norm, loss_scale);
  FP8OPTIM_TRY(queue_measure(adamw, &job));
  FP8OPTIM_TRY(queue_begin(adamw, &job));
  if (job.chunk_count > 0)
    FP8OPTIM_TRY(check_launch(fp8optim_cuda_launch_update(stream, &job), "launch of the update of a step"));
  return check_launch(fp8optim_cuda_launch_end(stream, &job), "launch of the end of a step");
}

static fp8core_status step(fp8optim_adamw *adamw, float max_norm, float loss_scale) {
  int previous;
  FP8OPTIM_TRY(enter(adamw, &previous));
  const fp8core_status status = queue_step(adamw, max_norm, loss_scale);
  leave(adamw, previous);
  return status;
}

static fp8core_status measure(fp8optim_adamw *adamw, double *squares, int *nonfinite) {
  const fp8optim_cuda_step job = job_of(adamw, 0.0f, 1.0f);
  const size_t bytes = (size_t)adamw->tensor_count * sizeof(fp8optim_share);
  fp8optim_share *shares = malloc(bytes);
  int previous;
  if (!shares)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
  fp8core_status status = enter(adamw, &previous);
  if (status == FP8CORE_OK) {
    status = queue_measure(adamw, &job);
    leave(adamw, previous);
  }
  if (status == FP8CORE_OK) status = fp8core_copy(adamw->context, shares, adamw->tables.shares, bytes);
  if (status == FP8CORE_OK) {
    *nonfinite = 0;
    for (int64_t i = 0; i < adamw->tensor_count; i++) {
      if (squares) squares[i] = shares[i].sum_squares;
      if (shares[i].nonfinite) *nonfinite = 1;
    }
  }
  free(shares);
  return status;
}

// The kernel that adds up the shares of tensors finds the sum in the first one's.
static fp8core_status begin(fp8optim_adamw *adamw, double sum_squares, int nonfinite, float max_norm,
                            float loss_scale) {
  const fp8optim_cuda_step job = job_of(adamw, max_norm, loss_scale);
  fp8optim_share share;
  int previous;
  memset(&share, 0, sizeof(share));
  share.sum_squares = sum_squares;
  share.nonfinite = nonfinite;
  FP8OPTIM_TRY(
    fp8core_zero(adamw->context, adamw->tables.shares, (size_t)adamw->tensor_count * sizeof(*adamw->tables.shares)));
  FP8OPTIM_TRY(fp8core_copy(adamw->context, adamw->tables.shares, &share, sizeof(share)));
  FP8OPTIM_TRY(enter(adamw, &previous));
  fp8core_status status = upload_tables(adamw);
  if (status == FP8CORE_OK) status = queue_begin(adamw, &job);
  leave(adamw, previous);
  return status;
}

// Chunks and their results are cut to the range; the end of a step finds a tensor's by their place in the whole table.
static fp8core_status update(fp8optim_adamw *adamw, int64_t first, int64_t count) {
  void *stream = state_of(adamw)->stream;
  fp8optim_cuda_step job = job_of(adamw, 0.0f, 1.0f);
  fp8optim_cuda_step end = job;
  int64_t before = 0;
  int previous;
  job.chunk_count = 0;
  for (int64_t i = 0; i < first + count; i++) {
    const int64_t chunks = (fp8optim_elements(&adamw->parameters[i]) + FP8OPTIM_CHUNK - 1) / FP8OPTIM_CHUNK;
    *(i < first ? &before : &job.chunk_count) += chunks;
  }
  job.tables.chunks += before;
  job.tables.results += before;
  end.tables.tensors += first;
  end.tables.gradients += first;
  end.tensor_count = count;
  FP8OPTIM_TRY(enter(adamw, &previous));
  fp8core_status status = FP8CORE_OK;
  if (job.chunk_count > 0)
    status = check_launch(fp8optim_cuda_launch_update(stream, &job), "launch of the update of a step");
  if (status == FP8CORE_OK)
    status = check_launch(fp8optim_cuda_launch_end(stream, &end), "launch of the end of a step");
  leave(adamw, previous);
  return status;
}

static fp8core_status survey(fp8optim_adamw *adamw, const fp8optim_gradient *source, int64_t rows, int64_t columns,
                             fp8optim_survey *found) {
  const fp8optim_cuda_state *state = state_of(adamw);
  const fp8optim_cuda_setting setting = {
    .source = *source, .elements = rows * columns, .row_length = columns, .found = adamw->tables.survey};
  int previous;
  FP8OPTIM_TRY(fp8core_zero(adamw->context, adamw->tables.survey, sizeof(*found)));
  FP8OPTIM_TRY(enter(adamw, &previous));
  const fp8core_status status = check_launch(
    fp8optim_cuda_launch_survey(state->stream, &setting, state->multiprocessors), "launch of the survey of a state");
  leave(adamw, previous);
  FP8OPTIM_TRY(status);
  return fp8core_copy(adamw->context, found, adamw->tables.survey, sizeof(*found));
}

static fp8core_status set_state(fp8optim_adamw *adamw, int64_t index, fp8optim_state part,
                                const fp8optim_gradient *source, float scale, uint32_t largest) {
  const fp8optim_cuda_state *state = state_of(adamw);
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  const fp8optim_cuda_setting setting = {
    .tensor = &adamw->tables.tensors[index],
    .state = part,
    .source = *source,
    .elements = fp8optim_elements(parameter),
    .row_length = fp8optim_row_length(parameter),
    .scale = scale,
    .largest = largest,
  };
  int previous;
  FP8OPTIM_TRY(enter(adamw, &previous));
  fp8core_status status = check_launch(fp8optim_cuda_launch_set_state(state->stream, &setting, state->multiprocessors),
                                       "launch of the setting of a state");
  // The source is the caller's, and may change when this returns.
  if (status == FP8CORE_OK) status = check(cudaStreamSynchronize((cudaStream_t)state->stream), "cudaStreamSynchronize");
  leave(adamw, previous);
  return status;
}

static fp8core_status make_weight(fp8optim_adamw *adamw, int64_t index, int choose_scale) {
  const fp8optim_cuda_state *state = state_of(adamw);
  const fp8optim_cuda_setting setting = {
    .tensor = &adamw->tables.tensors[index],
    .elements = fp8optim_elements(&adamw->parameters[index]),
  };
  int previous;
  fp8core_status status = FP8CORE_OK;
  FP8OPTIM_TRY(enter(adamw, &previous));
  if (choose_scale)
    status = check_launch(fp8optim_cuda_launch_choose_weight_scale(state->stream, &setting),
                          "launch of the choice of a weight's scale");
  if (status == FP8CORE_OK && setting.elements > 0)
    status = check_launch(fp8optim_cuda_launch_make_weight(state->stream, &setting, state->multiprocessors),
                          "launch of the making of a weight");
  leave(adamw, previous);
  return status;
}

static const fp8optim_backend cuda_backend = {
  .step = step,
  .measure = measure,
  .begin = begin,
  .update = update,
  .survey = survey,
  .set_state = set_state,
  .make_weight = make_weight,
};

fp8core_status fp8optim_cuda_init(fp8optim_adamw *adamw) {
  fp8optim_cuda_state *state = calloc(1, sizeof(*state));
  if (!state)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory",
                                  sizeof(*state));
  adamw->backend = &cuda_backend;
  adamw->backend_state = state;
  state->device = fp8core_context_device(adamw->context).index;
  state->unknown = 1;
  state->gradients = calloc((size_t)adamw->tensor_count, sizeof(*state->gradients));
  state->groups = calloc((size_t)adamw->group_count, sizeof(*state->groups));
  if (!state->gradients || !state->groups)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate host memory for %lld gradients",
                                  (long long)adamw->tensor_count);
  FP8OPTIM_TRY(fp8core_cuda_stream(adamw->context, &state->stream));
  return check(cudaDeviceGetAttribute(&state->multiprocessors, cudaDevAttrMultiProcessorCount, state->device),
               "cudaDeviceGetAttribute");
}

void fp8optim_cuda_destroy(fp8optim_adamw *adamw) {
  fp8optim_cuda_state *state = state_of(adamw);
  adamw->backend_state = NULL;
  free(state->gradients);
  free(state->groups);
  free(state);
}
