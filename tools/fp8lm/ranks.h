/** \file
 * The data-parallel ranks of a run, and how they stay together: what one of them finds, all know.
 *
 * All calls but those of fp8lm_ranks_name(), fp8lm_ranks_gpu() and fp8lm_ranks_abort() are collective. With one rank
 * they do nothing.
 *
 * Where fp8lm_ranks_agree() or fp8lm_ranks_compare() finds an error, each rank has its message, whatever the others do
 * next, fp8lm_ranks_abort() included.
 */
#ifndef FP8LM_RANKS_H
#define FP8LM_RANKS_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "fp8comm/communicator.h"
#include "fp8core/context.h"
#include "fp8core/status.h"

typedef struct fp8lm_ranks {
  fp8comm_communicator *communicator;
  int rank;
  int size;
  /** Ranks on this rank's machine that may run on the same processors: not those that a launcher bound to others. */
  int sharing_size;
  /** This rank's number among those of its machine. */
  int local_rank;
  /** Of the GPU that the communicator was given; NULL: none. */
  fp8core_context *context;
  /** Not 0 after a signal, from when on calls wait for other ranks no longer than this many seconds without progress;
   * FP8LM_RANKS_WAIT: as long as without a signal. */
  const volatile sig_atomic_t *stop;
  double stop_patience;
  /** When a waiting call first saw the signal; 0: none has. */
  double stop_seen;
} fp8lm_ranks;

#define FP8LM_RANKS_WAIT 1e9

/** Finds the ranks that a launcher started (fp8comm_communicator_create_from_environment()); one without a launcher.
 * FP8CORE_ERROR_INTERRUPTED where a signal comes before the others. \p ranks must stay where it is, and so must \p
 * stop, which a signal sets. */
fp8core_status fp8lm_ranks_create(fp8lm_ranks *ranks, double timeout_seconds, const volatile sig_atomic_t *stop);
void fp8lm_ranks_destroy(fp8lm_ranks *ranks);

/** The number of the GPU that this rank is to use, of those that it sees, of which there is at least one: ranks of a
 * machine take them in turn, and share them where they are few. 0 where it sees none. */
int fp8lm_ranks_gpu(const fp8lm_ranks *ranks);

/** Lets ranks exchange what lies in the memory of the context's GPU. The context is the ranks' from now on, also where
 * this fails: it lives until they are destroyed. */
fp8core_status fp8lm_ranks_use_gpu(fp8lm_ranks *ranks, fp8core_context *context);

/** "rank 3 of 8: ", for messages; empty with one rank. */
const char *fp8lm_ranks_name(const fp8lm_ranks *ranks, char *buffer, size_t size);

/** Sums or maxima over all ranks, in place; added in the order of ranks. */
fp8core_status fp8lm_ranks_sum(const fp8lm_ranks *ranks, double *values, int64_t count);
fp8core_status fp8lm_ranks_max(const fp8lm_ranks *ranks, int64_t *values, int64_t count);

/** FP8CORE_OK where every rank passes that. Else this rank's own status and message where it failed, and on others that
 * of the lowest rank that did, named. */
fp8core_status fp8lm_ranks_agree(const fp8lm_ranks *ranks, fp8core_status status);

/** Whether \p bytes are the same on all ranks; \p what they are, for the message. */
fp8core_status fp8lm_ranks_compare(const fp8lm_ranks *ranks, const void *bytes, size_t size, const char *what);

/** Whether no rank below this one, on this machine, passes the same \p value: by what they share, one of them does what
 * is to be done once. */
fp8core_status fp8lm_ranks_is_first(const fp8lm_ranks *ranks, int64_t value, int *first);

/** Rank 0's bytes to all. */
fp8core_status fp8lm_ranks_broadcast(const fp8lm_ranks *ranks, void *bytes, size_t size);

/** Tells the others that this rank cannot go on, with the thread's last error, which stays. \return FP8CORE_OK; or
 * FP8CORE_ERROR_INTERRUPTED, with its message, where a signal to some rank had ended everything before. */
fp8core_status fp8lm_ranks_abort(const fp8lm_ranks *ranks);

#endif
