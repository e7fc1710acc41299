/** \file
 * Communicators: a group of ranks that exchange data, how it comes about, and how it ends.
 *
 * Statuses and messages are those of libfp8core (fp8core/status.h); a message that concerns another rank names it.
 *
 * Threads: a communicator, those split from it, and everything made with them (requests, reducers) are used by one
 * thread at a time. Distinct communicators that no split connects may be used from distinct threads at once.
 *
 * Failures: a rank that is gone, or takes no part within the timeout, breaks the communicator. The call in progress
 * fails on every rank that is left, soon after the first one has noticed, and so does every later call, with the same
 * message. So does a call in which ranks do not agree (operation, sizes, dtypes). Communicators that splits connect
 * break together. A broken communicator can only be destroyed. What a failed call was to write is undefined.
 * Arguments that a rank refuses by itself (FP8CORE_ERROR_INVALID_ARGUMENT and the like, before anything is sent) break
 * nothing; the other ranks wait for that rank's call.
 */
#ifndef FP8COMM_COMMUNICATOR_H
#define FP8COMM_COMMUNICATOR_H

#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A rank's place in a group. Opaque. */
typedef struct fp8comm_communicator fp8comm_communicator;

/**
 * An all-gather by other means (MPI, a file, a store), by which ranks find each other: sends \p bytes bytes of this
 * rank and receives those of all, in the order of ranks, size * bytes in all. Every rank calls it, in the same order
 * with the same sizes. Blocking.
 *
 * \return 0 on success; anything else makes the call that needed it fail.
 */
typedef int (*fp8comm_out_of_band_all_gather)(void *user_data, const void *send, void *receive, size_t bytes);

/**
 * Whether a call that waits is to give up: not 0. Asked by the waiting thread, about ten times a second or more often,
 * once it has waited for a moment. It must not call the library with a communicator.
 *
 * \param stalled_seconds for how long the call has seen no progress; while a communicator is created, for how long it
 *        has waited for other ranks.
 */
typedef int (*fp8comm_interrupt)(void *user_data, double stalled_seconds);

typedef struct fp8comm_communicator_options {
  /** sizeof(fp8comm_communicator_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
  size_t size;
  /**
   * Seconds in which a waiting call may see no progress before it fails, above 0, at most 1e6. Time between calls does
   * not count. In the last quarter of it, or the last 2 seconds, the call asks all ranks whether they are there, and
   * names those that do not answer.
   */
  double timeout_seconds;
  /** "ucx", or NULL for the best one that this build has. A size of 1 needs none. Read during the call. */
  const char *transport;
  /**
   * Ends calls that wait for other ranks, as after a signal; NULL: none. The call then fails with
   * FP8CORE_ERROR_INTERRUPTED, and the communicator breaks as fp8comm_communicator_abort() breaks it, but with that
   * status on every rank. Kept, with its data, for this communicator and those split from it. While one is created,
   * a caller's own all-gather has to look after itself.
   */
  fp8comm_interrupt interrupt;
  void *interrupt_data;
} fp8comm_communicator_options;

/** 60 seconds, the best transport, no interrupt. */
static inline fp8comm_communicator_options fp8comm_communicator_options_default(void) {
  fp8comm_communicator_options options;
  options.size = sizeof(options);
  options.timeout_seconds = 60;
  options.transport = NULL;
  options.interrupt = NULL;
  options.interrupt_data = NULL;
  return options;
}

/**
 * Creates a communicator of \p size ranks, on every one of them. Blocking, collective. Thread-safe.
 *
 * \param communicator receives the handle, NULL on failure.
 * \param rank from 0 to size - 1, another one on each.
 * \param size 1 to 65,536. With 1 neither the callback nor a transport is used.
 * \param all_gather is called during this call only.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when a pointer is NULL, rank, size or an option is out of range;
 *         FP8CORE_ERROR_NOT_SUPPORTED when this build has no such transport; FP8CORE_ERROR_VERSION_MISMATCH for options
 *         of a wrong size, or ranks with other versions of the library; FP8CORE_ERROR_PEER when the callback fails, or
 *         ranks do not agree on their number and order; FP8CORE_ERROR_TIMEOUT; FP8CORE_ERROR_INTERRUPTED;
 *         FP8CORE_ERROR_OUT_OF_MEMORY.
 */
FP8COMM_API fp8core_status fp8comm_communicator_create(fp8comm_communicator **communicator, int rank, int size,
                                                       fp8comm_out_of_band_all_gather all_gather, void *user_data,
                                                       const fp8comm_communicator_options *options);

/**
 * The same with what the environment tells: PMIx where a launcher offers it (`mpirun`, `srun --mpi=pmix`, `prterun`),
 * or the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as `torchrun` sets them, over TCP, or Slurm's own of a
 * job step (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST), likewise. Without any, a communicator of one
 * rank. Thread-safe, as long as no thread changes the environment meanwhile.
 *
 * \return what fp8comm_communicator_create() returns, and FP8CORE_ERROR_INVALID_ARGUMENT for variables that are
 *         malformed or missing, which the message names; FP8CORE_ERROR_NOT_SUPPORTED under a launcher that speaks PMIx
 *         in a build without it.
 */
FP8COMM_API fp8core_status fp8comm_communicator_create_from_environment(fp8comm_communicator **communicator,
                                                                        const fp8comm_communicator_options *options);

/**
 * Creates \p count communicators over the memory of this process, one for each of as many threads, rank i in
 * communicators[i]. For tests, and for programs that drive each device from a thread. Thread-safe.
 *
 * \param count 1 to 65,536.
 * \param communicators room for \p count handles; all NULL on failure.
 * \param options as above; \p transport must be NULL.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for arguments out of range; FP8CORE_ERROR_VERSION_MISMATCH;
 *         FP8CORE_ERROR_OUT_OF_MEMORY.
 */
FP8COMM_API fp8core_status fp8comm_threads_create(int count, fp8comm_communicator **communicators,
                                                  const fp8comm_communicator_options *options);

/**
 * Divides a communicator: ranks that pass the same colour form a new one, in the order of their keys, of their ranks
 * where keys are equal. Blocking, collective over \p parent. The parent stays; either may be destroyed first. At most
 * 32,000 divisions of a communicator and its descendants.
 *
 * \param communicator receives the handle; NULL for a negative colour, and on failure.
 * \param color 0 or above; negative: this rank is in none of the new ones.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT for NULL and for a division too many; FP8CORE_ERROR_OUT_OF_MEMORY; those of a
 *         collective.
 */
FP8COMM_API fp8core_status fp8comm_communicator_split(fp8comm_communicator *parent, int color, int key,
                                                      fp8comm_communicator **communicator);

/**
 * Frees the communicator and clears the pointer. NULL and a cleared pointer are fine. Not collective: a rank that has
 * done its calls may leave. Requests and reducers of it must have been waited for, or destroyed, before; requests that
 * are still running are ended where they are. Ranks that still wait for this one then fail.
 */
FP8COMM_API void fp8comm_communicator_destroy(fp8comm_communicator **communicator);

/** This rank. NULL gives 0. Thread-safe. */
FP8COMM_API int fp8comm_communicator_rank(const fp8comm_communicator *communicator);

/** Number of ranks. NULL gives 0. Thread-safe. */
FP8COMM_API int fp8comm_communicator_size(const fp8comm_communicator *communicator);

/** "self", "threads", "ucx"; "none" for NULL. Static storage; thread-safe. */
FP8COMM_API const char *fp8comm_communicator_transport(const fp8comm_communicator *communicator);

/** Bytes that this rank has sent through the transport since creation, counted by the transport, of this communicator
 * and all that splits connect with it, and those that it has told others to read in place instead; what NCCL sends of
 * device memory is not counted, what UCX sends is. NULL gives 0. */
FP8COMM_API uint64_t fp8comm_communicator_bytes_sent(const fp8comm_communicator *communicator);

/** Replaces the timeout for calls from now on. FP8CORE_ERROR_INVALID_ARGUMENT out of range. */
FP8COMM_API fp8core_status fp8comm_communicator_set_timeout(fp8comm_communicator *communicator, double seconds);

/**
 * Breaks the communicator, and those that splits connect with it, on all ranks: calls that wait for this rank, or any
 * other, fail with FP8CORE_ERROR_PEER, this rank's number and \p reason. For a rank that cannot go on. Does not wait,
 * and overtakes what others still wait for: after an error that a collective tells all ranks, a barrier before this
 * call lets each of them see that error first.
 *
 * \param reason printed into messages of the others, up to 200 bytes; may be NULL.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the communicator is NULL.
 */
FP8COMM_API fp8core_status fp8comm_communicator_abort(fp8comm_communicator *communicator, const char *reason);

#ifdef __cplusplus
}
#endif

#endif
