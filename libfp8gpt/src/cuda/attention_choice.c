// cuDNN or our own kernels, for whole batches of a BF16 model in training. cuDNN's plans are not taken on trust: before
// the first use they compute what our own kernels compute, on the very shape, and must agree and repeat themselves.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8core/cuda.h"
#include "kernels.h"
#include "state.h"

// cuDNN's backward pass gives the same bits every time by way of a matrix of all scores, on most GPUs: quadratic in the
// length. From here on our own, which needs no such memory, is preferred.
#define MOST_WORKSPACE_BYTES (INT64_C(1) << 30)

// Between two ways through BF16, relative to the norm of the result; mistakes in the mask, the scale or the layout make
// more than a tenth. Measured between our BF16 and FP32 kernels: see tests/kernels/check_model.c.
#define MOST_DIFFERENCE 2e-2
// Of logarithms of sums, which both keep in FP32.
#define MOST_LOG_DIFFERENCE 1e-3

typedef enum preference { AUTO, CUDNN, OWN } preference;

static fp8core_status preferred(preference *prefer) {
  static const char *const names[] = {"auto", "cudnn", "own"};
  const char *const value = getenv("FP8GPT_ATTENTION");
  *prefer = AUTO;
  if (!value || !*value) return FP8CORE_OK;
  for (int i = 0; i < 3; i++)
    if (strcmp(value, names[i]) == 0) {
      *prefer = (preference)i;
      return FP8CORE_OK;
    }
  return fp8gpt_invalid("FP8GPT_ATTENTION is \"%.40s\", expected auto, cudnn or own", value);
}

// The check.

typedef struct trial {
  fp8gpt_model *model;
  fp8gpt_attention own;
  fp8gpt_attention other;
  void *workspace;
  float *deltas;
  double *sums;
} trial;

static int64_t qkv_columns(const fp8gpt_attention *job) {
  return (job->heads + 2 * (int64_t)job->kv_heads) * job->head_dim;
}

// The root of the sum of squared differences over that of squares; 0 where all are the same.
static fp8core_status difference(const trial *of, const fp8gpt_cuda_comparison *columns, double *found) {
  double sums[2 * FP8GPT_CUDA_REDUCTION_BLOCKS];
  double total[2] = {0.0, 0.0};
  FP8GPT_TRY(fp8gpt_cuda_check(fp8gpt_cuda_launch_compare(fp8gpt_cuda_state_of(of->model)->stream, columns),
                               "launch of a comparison"));
  FP8GPT_TRY(fp8core_copy(of->model->context, sums, of->sums, sizeof(sums)));
  for (int i = 0; i < 2 * FP8GPT_CUDA_REDUCTION_BLOCKS; i++) total[i % 2] += sums[i];
  *found = total[0] == 0.0 ? 0.0 : sqrt(total[0] / total[1]);
  return FP8CORE_OK;
}

static fp8core_status expect(const trial *of, const char *what, fp8gpt_cuda_comparison columns, double most) {
  double found;
  columns.sums = of->sums;
  FP8GPT_TRY(difference(of, &columns, &found));
  // A NaN must not pass.
  if (found <= most) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                most > 0.0
                                  ? "cuDNN: %s differ from our own kernels' by %.2g of their norm, expected at most %g"
                                  : "cuDNN: %s differ by %.2g of their norm from one run to the next, expected %g",
                                what, found, most);
}

static fp8core_status expect_out(const trial *of, const char *what, double most) {
  const int64_t columns = (int64_t)of->own.heads * of->own.head_dim;
  const fp8gpt_cuda_comparison out = {.dtype = FP8CORE_BF16,
                                      .rows = of->own.sequences * of->own.length,
                                      .row_stride = columns,
                                      .columns = columns,
                                      .found = of->other.out,
                                      .expected = of->own.out};
  return expect(of, what, out, most);
}

static fp8core_status check_forward(const trial *of) {
  const fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(of->model);
  const fp8gpt_cuda_comparison logs = {.dtype = FP8CORE_FP32,
                                       .rows = 1,
                                       .columns = of->own.sequences * of->own.heads * of->own.length,
                                       .found = of->other.log_sums,
                                       .expected = of->own.log_sums};
  FP8GPT_TRY(fp8gpt_cuda_check(fp8gpt_cuda_launch_attention(state->stream, &of->own), "launch of attention"));
  FP8GPT_TRY(fp8gpt_cudnn_forward(state->cudnn, &of->other, of->workspace));
  FP8GPT_TRY(expect_out(of, "attention's outputs", MOST_DIFFERENCE));
  return expect(of, "attention's logarithms", logs, MOST_LOG_DIFFERENCE);
}

// In dqkv, queries, keys and values have sizes of their own, and are compared each for itself.
static fp8core_status expect_gradients(const trial *of, const char *const *names, double most) {
  const fp8gpt_attention *job = &of->own;
  const int64_t columns[] = {(int64_t)job->heads * job->head_dim, (int64_t)job->kv_heads * job->head_dim,
                             (int64_t)job->kv_heads * job->head_dim};
  fp8gpt_cuda_comparison part = {.dtype = FP8CORE_BF16,
                                 .rows = job->sequences * job->length,
                                 .row_stride = qkv_columns(job),
                                 .found = of->other.dqkv,
                                 .expected = job->dqkv};
  for (int i = 0; i < 3; i++) {
    part.columns = columns[i];
    FP8GPT_TRY(expect(of, names[i], part, most));
    part.first_column += columns[i];
  }
  return FP8CORE_OK;
}

static fp8core_status check_backward(const trial *of) {
  static const char *const names[] = {"gradients of queries", "gradients of keys", "gradients of values"};
  const fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(of->model);
  trial again = *of;
  FP8GPT_TRY(fp8gpt_cuda_check(fp8gpt_cuda_launch_attention_backward(state->stream, &of->own, of->deltas),
                               "launch of attention's backward pass"));
  FP8GPT_TRY(fp8gpt_cudnn_backward(state->cudnn, &of->other, of->workspace));
  FP8GPT_TRY(expect_gradients(of, names, MOST_DIFFERENCE));
  // Once more, to where our own lie.
  again.other.dqkv = of->own.dqkv;
  FP8GPT_TRY(fp8gpt_cudnn_backward(state->cudnn, &again.other, of->workspace));
  return expect_gradients(of, names, 0.0);
}

static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays out what the check needs; called twice, first without memory, to count its bytes.
static int64_t lay_trial(trial *of, const fp8gpt_attention *shape, int backward, unsigned char *memory) {
  const int64_t rows = shape->sequences * shape->length;
  const int64_t out = aligned(2 * rows * shape->heads * shape->head_dim);
  const int64_t qkv = aligned(2 * rows * qkv_columns(shape));
  const int64_t logs = aligned((int64_t)sizeof(float) * rows * shape->heads);
  int64_t at = 0;
#define TAKE(bytes) (at += (bytes), memory ? memory + at - (bytes) : NULL)
  of->own = *shape;
  of->own.qkv = TAKE(qkv);
  of->own.dout = TAKE(out);
  of->other = of->own;
  of->own.out = TAKE(out);
  of->other.out = TAKE(out);
  of->own.log_sums = (float *)(void *)TAKE(logs);
  of->other.log_sums = (float *)(void *)TAKE(logs);
  of->own.dqkv = TAKE(qkv);
  of->other.dqkv = TAKE(qkv);
  of->deltas = (float *)(void *)TAKE(logs);
  of->sums = (double *)(void *)TAKE(aligned((int64_t)sizeof(double) * 2 * FP8GPT_CUDA_REDUCTION_BLOCKS));
  of->workspace = TAKE(aligned(fp8gpt_cudnn_workspace_bytes(fp8gpt_cuda_state_of(of->model)->cudnn, backward)));
#undef TAKE
  return at;
}

static fp8core_status run_trial(const trial *of, void *memory, int64_t bytes, int backward, fp8core_status *backwards) {
  void *const stream = fp8gpt_cuda_state_of(of->model)->stream;
  const int64_t rows = of->own.sequences * of->own.length;
  // What is not written must not look like a result.
  FP8GPT_TRY(fp8core_zero(of->model->context, memory, (size_t)bytes));
  FP8GPT_TRY(fp8gpt_cuda_check(fp8gpt_cuda_launch_fill(stream, (void *)of->own.qkv, rows * qkv_columns(&of->own), 0),
                               "launch of a fill"));
  FP8GPT_TRY(
    fp8gpt_cuda_check(fp8gpt_cuda_launch_fill(stream, (void *)of->own.dout, rows * of->own.heads * of->own.head_dim, 1),
                      "launch of a fill"));
  FP8GPT_TRY(check_forward(of));
  if (backward) *backwards = check_backward(of);
  return FP8CORE_OK;
}

// The status is of the forward pass, *backwards of the backward pass.
static fp8core_status check_cudnn(fp8gpt_model *model, const fp8gpt_attention *shape, int backward,
                                  fp8core_status *backwards) {
  trial of = {.model = model};
  void *memory;
  const int64_t bytes = lay_trial(&of, shape, backward, NULL);
  FP8GPT_TRY(fp8core_alloc(model->context, (size_t)bytes, &memory));
  (void)lay_trial(&of, shape, backward, memory);
  const fp8core_status status = run_trial(&of, memory, bytes, backward, backwards);
  const fp8core_status freed = fp8core_free(model->context, memory);
  return status != FP8CORE_OK ? status : freed;
}

// The choice.

// Plans and checks; where only the backward pass fails, `reason` says why, and the forward pass is cuDNN's.
static fp8core_status try_cudnn(fp8gpt_model *model, int64_t most_bytes, char *reason, size_t size) {
  fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(model);
  const fp8gpt_config *config = &model->config;
  const fp8gpt_attention shape = {.dtype = FP8CORE_BF16,
                                  .sequences = model->options.batch,
                                  .length = config->sequence,
                                  .heads = config->heads,
                                  .kv_heads = config->kv_heads,
                                  .head_dim = config->hidden / config->heads};
  int major, minor;
  FP8GPT_TRY(fp8core_cuda_compute_capability(model->context, &major, &minor));
  FP8GPT_TRY(fp8gpt_cudnn_open(&state->cudnn, state->stream, 10 * major + minor, NULL));
  FP8GPT_TRY(fp8gpt_cudnn_plan_forward(state->cudnn, &shape));
  fp8core_status backwards = fp8gpt_cudnn_plan_backward(state->cudnn, &shape, most_bytes);
  const int planned = backwards == FP8CORE_OK;
  if (!planned) (void)snprintf(reason, size, "%s", fp8core_last_error());
  FP8GPT_TRY(check_cudnn(model, &shape, planned, &backwards));
  if (planned && backwards != FP8CORE_OK) (void)snprintf(reason, size, "%s", fp8core_last_error());
  state->cudnn_backward = backwards == FP8CORE_OK;
  return FP8CORE_OK;
}

fp8core_status fp8gpt_cuda_choose_attention(fp8gpt_model *model) {
  fp8gpt_cuda_state *state = fp8gpt_cuda_state_of(model);
  char reason[256] = "";
  preference prefer;
  FP8GPT_TRY(preferred(&prefer));
  if (model->activation_dtype != FP8CORE_BF16 || model->options.inference || prefer == OWN) {
    (void)snprintf(state->attention, sizeof(state->attention), "own: %s",
                   model->activation_dtype != FP8CORE_BF16 ? "activations are FP32"
                   : model->options.inference              ? "the model is for inference"
                                                           : "FP8GPT_ATTENTION is own");
    return FP8CORE_OK;
  }
  fp8core_status status = try_cudnn(model, prefer == CUDNN ? INT64_MAX : MOST_WORKSPACE_BYTES, reason, sizeof(reason));
  if (status != FP8CORE_OK) (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  const int whole = status == FP8CORE_OK && state->cudnn_backward;
  if (prefer == CUDNN && !whole) {
    if (status == FP8CORE_OK) status = FP8CORE_ERROR_NOT_SUPPORTED;
    return fp8core_set_last_error(status, "FP8GPT_ATTENTION is cudnn, but %s", reason);
  }
  if (status != FP8CORE_OK) {
    fp8gpt_cudnn_close(&state->cudnn);
    (void)snprintf(state->attention, sizeof(state->attention), "own: %s", reason);
    return FP8CORE_OK;
  }
  (void)snprintf(state->attention, sizeof(state->attention), "cuDNN %s%s%s", fp8gpt_cudnn_version(state->cudnn),
                 whole ? "" : " forward, own backward: ", reason);
  return FP8CORE_OK;
}
