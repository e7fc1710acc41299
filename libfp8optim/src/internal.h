// What the files of libfp8optim share. Public functions validate; backends (src/cpu, src/cuda) assume valid input.
#ifndef FP8OPTIM_INTERNAL_H
#define FP8OPTIM_INTERNAL_H

#include "fp8optim/adamw.h"
#include "rules.h"

#ifdef __cplusplus
extern "C" {
#endif

#define fp8optim_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define FP8OPTIM_TRY(call)                                                                                             \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

// One chunk of one tensor.
typedef struct fp8optim_chunk {
  int64_t tensor;
  // Elements before it in its tensor.
  int64_t first;
  int64_t elements;
} fp8optim_chunk;

// What a tensor that is to become a state holds.
typedef struct fp8optim_survey {
  // FP32 bits of the largest magnitude.
  uint32_t largest;
  int negative;
} fp8optim_survey;

// What a step is done with, all in device memory, tables of the optimizer's.
typedef struct fp8optim_tables {
  fp8optim_tensor *tensors;
  fp8optim_gradient *gradients;
  fp8optim_group *groups;
  fp8optim_group_step *group_steps;
  fp8optim_constants *constants;
  fp8optim_chunk *chunks;
  fp8optim_chunk_result *results;
  fp8optim_progress *progress;
  // Of CUDA.
  fp8optim_share *shares;
  fp8optim_survey *survey;
} fp8optim_tables;

typedef struct fp8optim_backend {
  // The whole step, with the optimizer's gradients and groups.
  fp8core_status (*step)(fp8optim_adamw *adamw, float max_norm, float loss_scale);
  // The same in parts. `squares`, in host memory, is NULL or has room for one number a tensor. Waits for the device.
  fp8core_status (*measure)(fp8optim_adamw *adamw, double *squares, int *nonfinite);
  fp8core_status (*begin)(fp8optim_adamw *adamw, double sum_squares, int nonfinite, float max_norm, float loss_scale);
  // Tensors [first, first + count) of a step that is not skipped.
  fp8core_status (*update)(fp8optim_adamw *adamw, int64_t first, int64_t count);
  // Waits for the device.
  fp8core_status (*survey)(fp8optim_adamw *adamw, const fp8optim_gradient *source, int64_t rows, int64_t columns,
                           fp8optim_survey *found);
  // Casts a surveyed source into a state; see fp8optim_adamw_set_state().
  fp8core_status (*set_state)(fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                              const fp8optim_gradient *source, float scale, uint32_t largest);
  // Writes the weight of a tensor from its master, with a scale for it or the one that the tensor has.
  fp8core_status (*make_weight)(fp8optim_adamw *adamw, int64_t index, int choose_scale);
} fp8optim_backend;

#define FP8OPTIM_MAX_STEPS INT64_C(2147483646)

// Where a step in parts stands.
typedef enum fp8optim_phase { FP8OPTIM_IDLE = 0, FP8OPTIM_MEASURED = 1, FP8OPTIM_BEGUN = 2 } fp8optim_phase;

struct fp8optim_adamw {
  fp8core_context *context;
  const fp8optim_backend *backend;
  fp8optim_adamw_options options;
  int64_t tensor_count;
  int group_count;
  int64_t chunk_count;
  // Host memory. Names and shapes of the tensors; the gradients of the step in progress; the groups.
  fp8optim_parameter *parameters;
  char *names;
  // Where the parts of each tensor start in state_memory.
  int64_t *state_offsets;
  fp8optim_gradient *gradients;
  fp8optim_group *groups;
  // Device memory, one block each; NULL where there is nothing.
  void *table_memory;
  void *state_memory;
  int64_t table_bytes;
  int64_t state_bytes;
  fp8optim_tables tables;
  // Moments may be other than 0, which makes a step count of 0 a mistake; the count may be other than 0.
  int moments_set;
  int steps_known;
  // At least the count of steps as far as the host knows; looked up before it could pass the limit.
  int64_t most_steps;
  // Of a step in parts; host memory: whether it is skipped, and which tensors had their turn, and how many.
  fp8optim_phase phase;
  int skipped;
  unsigned char *updated;
  int64_t updated_count;
  // Of CUDA.
  void *backend_state;
};

extern const fp8optim_backend fp8optim_cpu_backend;

// Sets backend and backend_state of an optimizer whose context is of CUDA; the stub of a build without it fails.
fp8core_status fp8optim_cuda_init(fp8optim_adamw *adamw);
void fp8optim_cuda_destroy(fp8optim_adamw *adamw);

int64_t fp8optim_elements(const fp8optim_parameter *parameter);
// Of the last dimension.
int64_t fp8optim_row_length(const fp8optim_parameter *parameter);

// In host memory: whether a moment is other than 0.
int fp8optim_has_moments(const fp8optim_tensor *tensors, int64_t count);

// The table of tensors in memory from malloc() that the caller frees.
fp8core_status fp8optim_copy_tensors(const fp8optim_adamw *adamw, fp8optim_tensor **tensors);

fp8core_status fp8optim_read_progress(const fp8optim_adamw *adamw, fp8optim_progress *progress);

// Checks the gradients of a step and notes where they are.
fp8core_status fp8optim_take_gradients(fp8optim_adamw *adamw, const fp8core_tensor *gradients);

// Refuses a call from the beginning of a step in parts to its end; the second forgets what was measured, too.
fp8core_status fp8optim_check_not_begun(const fp8optim_adamw *adamw, const char *call);
fp8core_status fp8optim_check_idle(fp8optim_adamw *adamw, const char *call);

fp8core_status fp8optim_check_survey(const fp8optim_parameter *parameter, fp8optim_state state,
                                     const fp8optim_survey *found);

#ifdef __cplusplus
}
#endif

#endif
