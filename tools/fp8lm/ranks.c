#include "ranks.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "fp8comm/collectives.h"
#include "machine.h"
#include "try.h"

#define MESSAGE_BYTES 400

// By the names of hosts and the sets of processors.
static fp8core_status count_sharing(fp8lm_ranks *ranks) {
  char host[256] = "";
  cpu_set_t set;
  ranks->sharing_size = 1;
  if (ranks->size == 1) return FP8CORE_OK;
  (void)gethostname(host, sizeof(host) - 1);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_ZERO(&set);
  const int64_t own = (int64_t)fp8lm_crc32(fp8lm_crc32(0, host, strlen(host)), &set, sizeof(set));
  int64_t *all = calloc((size_t)ranks->size, sizeof(*all));
  if (!all) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the list of ranks");
  const fp8core_status status = fp8comm_all_gather(ranks->communicator, &own, all, 1, FP8COMM_INT64);
  ranks->sharing_size = 0;
  for (int i = 0; i < ranks->size; i++) ranks->sharing_size += all[i] == own;
  free(all);
  return status;
}

// Ranks that compute are waited for, those that never come are not: nobody can tell one from the other but by time.
static int is_interrupted(void *user_data, double stalled_seconds) {
  fp8lm_ranks *ranks = user_data;
  if (!*ranks->stop) return 0;
  const double now = fp8lm_now();
  if (ranks->stop_seen == 0.0) ranks->stop_seen = now;
  const double since = now - ranks->stop_seen;
  return (since < stalled_seconds ? since : stalled_seconds) >= ranks->stop_patience;
}

fp8core_status fp8lm_ranks_create(fp8lm_ranks *ranks, double timeout_seconds, const volatile sig_atomic_t *stop) {
  fp8comm_communicator_options options = fp8comm_communicator_options_default();
  memset(ranks, 0, sizeof(*ranks));
  ranks->size = 1;
  ranks->sharing_size = 1;
  ranks->stop = stop;
  options.timeout_seconds = timeout_seconds;
  options.interrupt = is_interrupted;
  options.interrupt_data = ranks;
  TRY(fp8comm_communicator_create_from_environment(&ranks->communicator, &options));
  ranks->rank = fp8comm_communicator_rank(ranks->communicator);
  ranks->size = fp8comm_communicator_size(ranks->communicator);
  return count_sharing(ranks);
}

void fp8lm_ranks_destroy(fp8lm_ranks *ranks) {
  fp8comm_communicator_destroy(&ranks->communicator);
  memset(ranks, 0, sizeof(*ranks));
}

const char *fp8lm_ranks_name(const fp8lm_ranks *ranks, char *buffer, size_t size) {
  buffer[0] = '\0';
  if (ranks->size > 1) (void)snprintf(buffer, size, "rank %d of %d: ", ranks->rank, ranks->size);
  return buffer;
}

fp8core_status fp8lm_ranks_sum(const fp8lm_ranks *ranks, double *values, int64_t count) {
  if (ranks->size == 1) return FP8CORE_OK;
  return fp8comm_all_reduce(ranks->communicator, values, values, count, FP8COMM_FP64, FP8COMM_SUM);
}

fp8core_status fp8lm_ranks_max(const fp8lm_ranks *ranks, int64_t *values, int64_t count) {
  if (ranks->size == 1) return FP8CORE_OK;
  return fp8comm_all_reduce(ranks->communicator, values, values, count, FP8COMM_INT64, FP8COMM_MAX);
}

// The lowest rank that has something to tell, on all; the number of ranks where none has.
static fp8core_status lowest(const fp8lm_ranks *ranks, int has, int64_t *found) {
  *found = has ? ranks->rank : ranks->size;
  return fp8comm_all_reduce(ranks->communicator, found, found, 1, FP8COMM_INT64, FP8COMM_MIN);
}

fp8core_status fp8lm_ranks_agree(const fp8lm_ranks *ranks, fp8core_status status) {
  char message[MESSAGE_BYTES] = "";
  int64_t failed;
  if (ranks->size == 1) return status;
  if (status != FP8CORE_OK) (void)snprintf(message, sizeof(message), "%s", fp8core_last_error());
  TRY(lowest(ranks, status != FP8CORE_OK, &failed));
  if (failed == ranks->size) return FP8CORE_OK;
  char told[MESSAGE_BYTES];
  memcpy(told, message, sizeof(told));
  TRY(fp8comm_broadcast(ranks->communicator, told, sizeof(told), FP8COMM_BYTE, (int)failed));
  if (status != FP8CORE_OK) return fp8core_set_last_error(status, "%s", message);
  told[sizeof(told) - 1] = '\0';
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d failed: %s", (int)failed, told);
}

fp8core_status fp8lm_ranks_compare(const fp8lm_ranks *ranks, const void *bytes, size_t size, const char *what) {
  int64_t first[2];
  int64_t different;
  if (ranks->size == 1) return FP8CORE_OK;
  const int64_t own[2] = {(int64_t)size, (int64_t)fp8lm_crc32(0, bytes, size)};
  memcpy(first, own, sizeof(first));
  TRY(fp8lm_ranks_broadcast(ranks, first, sizeof(first)));
  TRY(lowest(ranks, memcmp(first, own, sizeof(own)) != 0, &different));
  if (different == ranks->size) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "rank %d has other %s than rank 0, expected the same",
                                (int)different, what);
}

fp8core_status fp8lm_ranks_broadcast(const fp8lm_ranks *ranks, void *bytes, size_t size) {
  if (ranks->size == 1) return FP8CORE_OK;
  return fp8comm_broadcast(ranks->communicator, bytes, (int64_t)size, FP8COMM_BYTE, 0);
}

fp8core_status fp8lm_ranks_abort(const fp8lm_ranks *ranks) {
  char message[MESSAGE_BYTES];
  if (ranks->size <= 1) return FP8CORE_OK;
  (void)snprintf(message, sizeof(message), "%s", fp8core_last_error());
  (void)fp8comm_communicator_abort(ranks->communicator, message);
  // Fails at once, as what broke the communicator first.
  if (fp8comm_barrier(ranks->communicator) == FP8CORE_ERROR_INTERRUPTED) return FP8CORE_ERROR_INTERRUPTED;
  (void)fp8core_set_last_error(FP8CORE_ERROR_PEER, "%s", message);
  return FP8CORE_OK;
}
