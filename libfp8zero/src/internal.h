// What the files of libfp8zero share.
#ifndef FP8ZERO_INTERNAL_H
#define FP8ZERO_INTERNAL_H

#include "fp8comm/collectives.h"
#include "fp8zero/sharded.h"

#define fp8zero_invalid(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define FP8ZERO_TRY(call)                                                                                              \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

// One tensor of parameters.
typedef struct fp8zero_tensor {
  const char *name;
  int dimensions;
  int64_t shape[FP8CORE_MAX_DIMENSIONS];
  int64_t elements;
  int group;
  fp8core_dtype weight_dtype;
  fp8core_dtype gradient_dtype;
  int part;
  int replicated;
  int owner;
  // In this rank's optimizer; -1: not there.
  int64_t local;
  // Of the weight and of its scale_inverse in the part's weights, in bytes.
  int64_t weight_offset;
  int64_t scale_offset;
  // In the part's memory for gradients.
  int64_t gradient_offset;
} fp8zero_tensor;

// What is exchanged at once. Its weights are, owner by owner, tensors at multiples of 64 bytes and then one
// scale_inverse for each, so that an owner's are one range.
typedef struct fp8zero_part {
  int64_t first;
  int64_t count;
  // Those of this rank's optimizer.
  int64_t local_first;
  int64_t local_count;
  int64_t first_bucket;
  int64_t bucket_count;
  int64_t weight_bytes;
  int64_t gradient_bytes;
  // Of the weights, by rank; and where this rank's begin.
  int64_t *counts;
  int64_t own_offset;
  // Whether its weights, and its gradients, have memory of their own.
  int weights_stay;
  int gradients_stay;
  // This rank's weights, which it updates, and those of all: NULL while they are nowhere.
  unsigned char *own;
  unsigned char *weights;
  fp8comm_request *gather;
  // Whether the model has memory to write gradients to, and where: NULL without elements.
  int writable;
  unsigned char *gradients;
  int held[2];
  // Reductions of this step; whether the last one may still be in flight, and when it was started.
  int reductions;
  int reducing;
  uint64_t ticket;
} fp8zero_part;

// Memory that parts have one after the other. `part` is -1 where it is free.
typedef struct fp8zero_buffer {
  unsigned char *memory;
  int part;
  uint64_t ticket;
} fp8zero_buffer;

struct fp8zero_sharded {
  fp8comm_communicator *communicator;
  fp8core_context *context;
  // Where weights, gradients and states lie: the context's; and whether NCCL moves them.
  fp8core_device device;
  int nccl;
  fp8zero_sharded_options options;
  int rank;
  int size;
  int64_t tensor_count;
  fp8zero_tensor *tensors;
  char *names;
  int part_count;
  fp8zero_part *parts;
  int64_t *counts;
  // Tensors by rank, and the most that one has.
  int64_t *owned;
  int64_t local_count;
  fp8optim_adamw *adamw;
  // Of the optimizer's tensors; one without elements on a rank that owns none.
  int64_t adamw_count;
  fp8core_tensor *local_gradients;
  // The sums of squares of all ranks, one after the other, each with what it has to tell after them.
  double *squares;
  int64_t *square_counts;
  int64_t *square_begins;
  // What the ranks of the model's communicator tell, two numbers each.
  double *model_sums;
  fp8comm_gradient_reducer *reducer;
  fp8core_tensor *inputs;
  fp8core_tensor *means;
  fp8core_dtype mean_dtype;
  // Memory.
  unsigned char *weights;
  unsigned char *gradients;
  unsigned char *sums;
  // A mean in FP32, before it is added to the sum of several micro-batches: of so many elements at once. On a GPU a 1
  // follows them.
  float *scratch;
  int64_t scratch_elements;
  int weight_buffer_count;
  int gradient_buffer_count;
  fp8zero_buffer *weight_buffers;
  fp8zero_buffer *gradient_buffers;
  fp8zero_memory memory;
  uint64_t tickets;
  // Weights were set since all ranks had the same.
  int unpublished;
  // Of the step in progress: micro-batches that are done with, and parts that were reduced in the one after them.
  int rounds;
  int round_parts;
  fp8comm_gradient_result result;
  fp8comm_gradient_result last_result;
  uint64_t sent_bytes;
  // What the communicator had sent at the end of the last call, from where on the next counts if something was in
  // flight.
  uint64_t counted;
  int counts_on;
  // Of gathers, and how many of these bytes NCCL sent, so that the transport has not counted them.
  uint64_t gathered_bytes;
  uint64_t uncounted_bytes;
  uint64_t control_bytes;
};

static inline int fp8zero_on_gpu(const fp8zero_sharded *sharded) { return sharded->device.type != FP8CORE_DEVICE_CPU; }

// Sums of the means of several micro-batches (accumulate.c): makes the scratch, for tensors of up to `largest`
// elements; adds a mean, contiguous, to a sum in FP32, or to nothing where it is the first; frees the scratch.
fp8core_status fp8zero_make_scratch(fp8zero_sharded *sharded, int64_t largest);
fp8core_status fp8zero_add_mean(const fp8zero_sharded *sharded, const fp8core_tensor *mean, int64_t elements,
                                float *sum, int first);
void fp8zero_free_scratch(fp8zero_sharded *sharded);

// Makes everything but the reducer, by itself; `sharded` is zeroed but for communicator and context. On failure the
// caller destroys it.
fp8core_status fp8zero_make(fp8zero_sharded *sharded, const fp8zero_sharded_options *options, int64_t parameter_count,
                            const fp8zero_parameter *parameters, int group_count, const fp8optim_group *groups);

// Tells all ranks whether this one has made its part, with `status`, and compares what they were given.
fp8core_status fp8zero_agree(fp8zero_sharded *sharded, fp8core_status status, int group_count,
                             const fp8optim_group *groups);

// Returns the status, with the thread's last error, which all ranks of the communicator know: when all do, as an abort
// that followed would overtake it.
fp8core_status fp8zero_fail_together(fp8comm_communicator *communicator, fp8core_status status);

// The reducer; collective.
fp8core_status fp8zero_make_reducer(fp8zero_sharded *sharded);

#endif
