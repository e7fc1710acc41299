/** \file
 * The mean of gradients over all ranks, with FP8 on the wire (FP8-LM, Peng et al., 2023, section 2.1).
 *
 * A reducer belongs to a communicator and a list of tensors. It packs tensors into buckets, each of which is exchanged
 * as one: a message of the tensors' amaxes, from which every rank has the same scales; the codes; and a message of
 * counts, from which every rank has the same next scaling factors. numerics.md, "Gradient all-reduce", has all rules.
 *
 * The mean has the same bits on every rank and from run to run, on any number of threads, any CPU tier, and CUDA.
 * Gradients and means lie in the memory of the context's device. On CUDA amaxes and casts are the GPU's, on the
 * communicator's own stream there; codes come to the host to travel and to be added up, but of two-shot over NCCL or a
 * transport that takes device memory (without \p measure_snr) they stay on the GPU. Threads: one at a time, as
 * communicator and context are. Statuses, failures and messages: communicator.h. A failure of the communicator within a
 * call leaves the reducer good for nothing but fp8comm_gradient_destroy().
 *
 * A gradient with an infinity or a NaN on any rank: every rank learns of it in the same call (the result, and the
 * tensor's statistics), the mean of that tensor is NaN throughout, so that an optimizer that looks skips the step, and
 * scaling factors stay as they were. So where the mean is beyond what an output in FP16 or BF16 holds, and some value
 * would become an infinity: the narrowest output that some rank has of the tensor decides, for all ranks. Where only
 * roundings of what travels exceed that format, no gradient does, values saturate at its maximum instead.
 */
#ifndef FP8COMM_GRADIENT_H
#define FP8COMM_GRADIENT_H

#include <stddef.h>
#include <stdint.h>

#include "communicator.h"
#include "fp8core/context.h"
#include "fp8core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How the contributions are added up. Every rank sends as many elements, with all of them: those of the bucket twice,
 * less its own part. With owners: once, less those of its own tensors. */
typedef enum fp8comm_gradient_algorithm {
  /** Each rank adds up a part of the bucket in FP32, from FP8 contributions, and rounds the mean to FP8 with a scale of
   * its own: two roundings, however many ranks. */
  FP8COMM_TWO_SHOT = 0,
  /** Sums in FP8, rounded at each of the ranks - 1 additions: what a transport's own FP8 sum does, as in the paper. */
  FP8COMM_NATIVE = 1,
  /** For comparison: 4 bytes an element, no rounding but FP32's. */
  FP8COMM_BASELINE_FP32 = 2,
  /** For comparison: 2 bytes an element, added up in FP32, two roundings. */
  FP8COMM_BASELINE_BF16 = 3
} fp8comm_gradient_algorithm;

/** "two-shot", "native", "fp32", "bf16"; "unknown" outside the enum. Thread-safe. */
FP8COMM_API const char *fp8comm_gradient_algorithm_name(fp8comm_gradient_algorithm algorithm);

/** What values are multiplied by before the cast, beside the shared scale, which makes the largest of all ranks the
 * format's maximum. Of the FP8 algorithms. */
typedef enum fp8comm_gradient_scaling {
  /** A factor mu for each tensor: multiplied by \p backoff for the next step where too many values saturate, in the
   * cast or in the sum; else it grows. */
  FP8COMM_SCALING_AUTO = 0,
  /** 1 / ranks: no sum can saturate, small values underflow. */
  FP8COMM_SCALING_PRE = 1,
  /** 1: sums saturate (native). */
  FP8COMM_SCALING_POST = 2
} fp8comm_gradient_scaling;

/** "auto", "pre", "post"; "unknown" outside the enum. Thread-safe. */
FP8COMM_API const char *fp8comm_gradient_scaling_name(fp8comm_gradient_scaling scaling);

typedef struct fp8comm_gradient_options {
  /** sizeof(fp8comm_gradient_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
  size_t size;
  fp8comm_gradient_algorithm algorithm;
  fp8comm_gradient_scaling scaling;
  /** On the wire, of the FP8 algorithms: E4M3 or E5M2. */
  fp8core_dtype wire_dtype;
  /** Buckets that are worked on at once, each with memory of its own, 1 to 64; at most as many as there are. */
  int buckets_in_flight;
  /** Bytes on the wire that a bucket has at most, unless one tensor has more: at least 1. */
  int64_t bucket_bytes;
  /** Share of values, 0 to 1, above which mu is multiplied by \p backoff. */
  double saturation_threshold;
  /** In (0, 1). */
  double backoff;
  /** Steps in which mu doubles, at least 1. */
  double growth_steps;
  /** mu of the first step, and the limits within which it stays: 2^-60 <= mu_min <= mu_initial <= mu_max <= 2^60. */
  double mu_initial;
  double mu_min;
  double mu_max;
  /** Non-zero: the mean is compared with that of an FP32 exchange, which costs its bytes and memory. */
  int measure_snr;
  /** NULL: every rank gets every mean. Else one rank a tensor, read during creation: the mean is for that rank only, so
   * that each contribution travels to it and nothing comes back, half the bytes of an all-reduce. The owner's FP8
   * output has the bits of an all-reduce's where sums do not depend on their order (two-shot in E4M3); others are
   * rounded once, from the sum. Outputs of tensors that a rank does not own are not looked at, nor written. Results and
   * statistics are the same on every rank all the same. Ranks may own nothing. */
  const int *owners;
  /** NULL: tensors are packed by \p bucket_bytes. Else the bucket of each tensor, from 0, each that of the tensor
   * before or the next; read during creation. \p bucket_bytes is ignored then. */
  const int *bucket_of;
  /** Non-zero: where an input of this rank has an amax, that is taken for the largest magnitude of its values, which
   * are then read once instead of twice: what made the gradient often knows it (fp8core_cast(), fp8core_gemm()). Of the
   * FP8 algorithms. Too large an amax costs range; with one that is too small values saturate, and are counted. An
   * infinity or a NaN that it does not show is found by the cast: results, statistics and the mean tell it as ever. */
  int inputs_have_amax;
  /** Non-zero: what a value loses when it is cast is added to the same value of the next step (Seide et al., "1-bit
   * stochastic gradient descent", 2014; Karimireddy et al., 2019), so that sums over many steps lose nothing; with
   * two-shot the same for the rounding of the mean. 2 bytes an element of memory, and 2 of this rank's part: errors are
   * kept in BF16, which needs no scale, and leaves out 2^-9 of an error. They are not part of saved states, as each
   * rank has its own; loading one forgets them. A step leaves alone those of a tensor that is not finite. All amaxes
   * are measured. Of the FP8 algorithms. Gradients on a GPU have their casts' errors there, and those of means where
   * sums are. Slower: values are gone through several times. */
  int error_feedback;
  /** Non-zero: where all ranks are on one machine and the transport can ("ucx" over shared memory), two-shot leaves
   * codes where the rank that made them has put them, in memory that all of them read, and sends word instead. The
   * bytes count as sent all the same. 0: everything travels in messages, as it does with \p error_feedback, on CUDA and
   * with owners on more than 5 ranks. Results do not depend on it. */
  int in_place;
  /** Non-zero: delayed scaling. A tensor's scales are made for twice the amax of the step before, its mean's for twice
   * that mean's, so that two-shot casts and adds up in one pass, without asking for amaxes first. What is found is
   * exchanged with the counts: where it is larger than expected, or less than an eighth of it, or not finite, the
   * bucket is reduced once more, and that tensor's scales come from what was found, as without the option; so no value
   * saturates, but by mu. Costs up to 3 of the 15 octaves between E4M3's largest and smallest normal value. The amaxes
   * are part of the saved state. Of the FP8 algorithms; native, \p measure_snr, \p error_feedback, CUDA and
   * owners on more than 5 ranks choose the same scales, but gain no time. */
  int delayed_scaling;
} fp8comm_gradient_options;

/** Two-shot, auto, E4M3, buckets of 25 MiB, two in flight; the paper's constants: a threshold of 0.001 %, halving,
 * doubling in 1,000 steps; mu from 1, between 2^-16 and 16. No SNR, no owners, amaxes measured, no error feedback; in
 * place, no delayed scaling. */
static inline fp8comm_gradient_options fp8comm_gradient_options_default(void) {
  fp8comm_gradient_options options;
  options.size = sizeof(options);
  options.algorithm = FP8COMM_TWO_SHOT;
  options.scaling = FP8COMM_SCALING_AUTO;
  options.wire_dtype = FP8CORE_E4M3;
  options.buckets_in_flight = 2;
  options.bucket_bytes = (int64_t)25 << 20;
  options.saturation_threshold = 1e-5;
  options.backoff = 0.5;
  options.growth_steps = 1000;
  options.mu_initial = 1;
  options.mu_min = 0.0000152587890625;
  options.mu_max = 16;
  options.measure_snr = 0;
  options.owners = NULL;
  options.bucket_of = NULL;
  options.inputs_have_amax = 0;
  options.error_feedback = 0;
  options.in_place = 1;
  options.delayed_scaling = 0;
  return options;
}

/** Opaque. */
typedef struct fp8comm_gradient_reducer fp8comm_gradient_reducer;

/**
 * Creates a reducer. Allocates all memory of later steps: for each bucket in flight the bytes of the largest bucket on
 * the wire, and, for each element of this rank's part of it (elements / ranks, or of the tensors that it owns), with
 * two-shot ranks - 1 bytes for the contributions of the others (none where they are read in place), at most 4 with
 * owners; with the baselines 4 bytes, and with
 * \p error_feedback. With \p measure_snr 4 bytes an element and 4 an element of the part more. Tensors
 * are packed in the order of their indices. Blocking, collective.
 *
 * \param reducer receives the handle, NULL on failure.
 * \param communicator, context must outlive the reducer. A CPU's context does casts and sums with its threads. One of a
 *        CUDA device must be that of fp8comm_communicator_use_device(). Then the memory on the host is page-locked, and
 *        the device holds for each bucket in flight the bytes of the largest one: twice those where codes stay on the
 *        GPU, of which the host holds nothing then but records of tensors and 16 KiB; 4 an element more of this rank's
 *        part then or with \p owners, of all with \p measure_snr. Sums on the host are done by as many threads as a CPU
 *        context has by default.
 * \param tensors at least 1.
 * \param elements of each tensor, at least 0; read during the call.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for arguments out of range, where ranks do not agree on sizes and options, and
 *         for a context on a GPU that is not the communicator's; FP8CORE_ERROR_VERSION_MISMATCH;
 *         FP8CORE_ERROR_DEVICE; FP8CORE_ERROR_OUT_OF_MEMORY; those of communicator.h.
 */
FP8COMM_API fp8core_status fp8comm_gradient_create(fp8comm_gradient_reducer **reducer,
                                                   fp8comm_communicator *communicator, fp8core_context *context,
                                                   int64_t tensors, const int64_t *elements,
                                                   const fp8comm_gradient_options *options);

/** Frees the reducer and clears the pointer; ends buckets in flight where they are. NULL and a cleared pointer are
 * fine. Before communicator and context. */
FP8COMM_API void fp8comm_gradient_destroy(fp8comm_gradient_reducer **reducer);

/** What a step did. */
typedef struct fp8comm_gradient_result {
  /** Tensors whose gradient held an infinity or a NaN on some rank. With the baselines also those whose sum left the
   * format's range; else those whose mean, as codes have it, left FP32's; and those whose mean left that of some
   * rank's output. The same on every rank. */
  int64_t nonfinite_tensors;
  /** The lowest rank that had one; -1: none, or unknown (baselines, and means beyond a format's range). */
  int nonfinite_rank;
  /** Bytes that this rank sent since the first bucket was started, counted by the transport; NCCL's are not. */
  uint64_t bytes_sent;
} fp8comm_gradient_result;

/**
 * The mean of every tensor over all ranks: all buckets are started, and waited for. Blocking, collective.
 *
 * \param inputs one a tensor, on the context's device, of any dtype, shape and row stride, with as many elements as at
 *        creation; FP8 ones with their scale_inverse. Ranks may have different dtypes and shapes. An amax is read when
 *        the bucket starts, where the option says so.
 * \param outputs one a tensor, with as many elements: FP32, BF16, FP16, or the wire's FP8, on each rank as it likes;
 *        of a tensor that another rank owns anything, which is left alone. Written: the data, at the end of the
 *        bucket; and scale and scale_inverse, which with FP8 point to floats of the reducer's that hold until the
 *        tensor's next start, else are NULL. amax is raised as by fp8core_cast(). In place where an output has the
 *        data pointer of the same tensor's input; any other overlap is the caller's fault.
 * \param result may be NULL.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for a tensor that is not valid, on another device, or of another size or
 *         dtype, before anything of this call is exchanged; those of communicator.h.
 */
FP8COMM_API fp8core_status fp8comm_gradient_all_reduce(fp8comm_gradient_reducer *reducer, const fp8core_tensor *inputs,
                                                       fp8core_tensor *outputs, fp8comm_gradient_result *result);

/** Number of buckets. NULL gives 0. */
FP8COMM_API int64_t fp8comm_gradient_buckets(const fp8comm_gradient_reducer *reducer);

/** The tensors of a bucket: \p count from \p first on. FP8CORE_ERROR_INVALID_ARGUMENT out of range or for NULL. */
FP8COMM_API fp8core_status fp8comm_gradient_bucket(const fp8comm_gradient_reducer *reducer, int64_t bucket,
                                                   int64_t *first, int64_t *count);

/**
 * Starts one bucket, as soon as its gradients are there, so that it travels while others are computed. In the same
 * order on every rank, each bucket once between two waits. Goes on with those in flight, and waits for the oldest where
 * as many are in flight as the options allow.
 *
 * \param inputs, outputs of all tensors, as above; those of the bucket are looked at, and their data must stay until
 *        fp8comm_gradient_wait() returns.
 */
FP8COMM_API fp8core_status fp8comm_gradient_start(fp8comm_gradient_reducer *reducer, int64_t bucket,
                                                  const fp8core_tensor *inputs, fp8core_tensor *outputs);

/** Works on buckets in flight; for calls in between. \p done, which may be NULL, receives whether none is left. */
FP8COMM_API fp8core_status fp8comm_gradient_progress(fp8comm_gradient_reducer *reducer, int *done);

/** Waits until one bucket that was started has its means written; its inputs are no longer read. Others may still be in
 * flight, and the step goes on: fp8comm_gradient_wait() ends it. FP8CORE_ERROR_INVALID_ARGUMENT where it was not
 * started. */
FP8COMM_API fp8core_status fp8comm_gradient_wait_bucket(fp8comm_gradient_reducer *reducer, int64_t bucket);

/** Waits for all buckets that were started, and sums up. \p result may be NULL. */
FP8COMM_API fp8core_status fp8comm_gradient_wait(fp8comm_gradient_reducer *reducer, fp8comm_gradient_result *result);

/** One tensor's last step, over all ranks. Counts are those of fp8core_cast_statistics, 0 with the baselines, and of
 * ranks whose gradient held an infinity or a NaN. */
typedef struct fp8comm_gradient_statistics {
  int64_t elements;
  /** Values that saturated when they were cast, of elements * ranks. */
  uint64_t saturated_in_cast;
  /** Additions that saturated (native), of elements * (ranks - 1). */
  uint64_t saturated_in_sum;
  /** Values other than 0 that became 0 when they were cast, of elements * ranks. */
  uint64_t flushed_to_zero;
  /** Bytes of its elements that all ranks together sent, contributions and means. Not those of amaxes and counts, which
   * are the bucket's, nor of \p measure_snr. */
  uint64_t bytes_sent;
  /** Whether it counts as not finite: fp8comm_gradient_result. */
  int nonfinite;
  /** Largest magnitude on any rank; of the mean with the baselines. Of a tensor that is not finite it says nothing. */
  float amax;
  /** By which each rank's values were multiplied: shared scale times factor. */
  float wire_scale;
  /** Of the mean as it travelled, or of an owner's in FP8: mean = code / mean_scale. */
  float mean_scale;
  /** Factor of this step, and of the next. 1 unless the scaling is auto. */
  double mu;
  double next_mu;
  /** 10 log10 of the squares of the FP32 mean over those of the difference, before the mean is rounded to an output in
   * FP32, BF16 or FP16; infinity where there is none. NaN where it was not asked for, or nothing is there to compare.
   */
  double snr_db;
} fp8comm_gradient_statistics;

/** Copies the statistics of one tensor's last step that was waited for; zeros before, with mu.
 * FP8CORE_ERROR_INVALID_ARGUMENT for NULL and out of range. */
FP8COMM_API fp8core_status fp8comm_gradient_get_statistics(const fp8comm_gradient_reducer *reducer, int64_t tensor,
                                                           fp8comm_gradient_statistics *statistics);

/** Bytes of memory that the reducer holds. NULL gives 0. */
FP8COMM_API size_t fp8comm_gradient_memory_bytes(const fp8comm_gradient_reducer *reducer);

/** Bytes that fp8comm_gradient_save() writes. NULL gives 0. Thread-safe. */
FP8COMM_API size_t fp8comm_gradient_saved_bytes(const fp8comm_gradient_reducer *reducer);

/**
 * Writes the state, factors mu and amaxes of the last step: little-endian, versioned, checksummed; numerics.md,
 * "Gradient all-reduce". The same bytes on every rank, and good for any number of ranks. Not between a start and its
 * wait.
 *
 * \param bytes exactly fp8comm_gradient_saved_bytes().
 */
FP8COMM_API fp8core_status fp8comm_gradient_save(const fp8comm_gradient_reducer *reducer, void *buffer, size_t bytes);

/**
 * Restores what fp8comm_gradient_save() wrote; on every rank, from the same bytes. A factor outside the options' limits
 * is brought within. Errors of error_feedback are set to 0.
 *
 * \return FP8CORE_ERROR_CORRUPT_DATA for bytes that are truncated, damaged or foreign; FP8CORE_ERROR_INVALID_ARGUMENT
 *         where number or sizes of tensors differ. The state is untouched on any error.
 */
FP8COMM_API fp8core_status fp8comm_gradient_load(fp8comm_gradient_reducer *reducer, const void *buffer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
