#include "ranks.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "fp8comm/collectives.h"
#include "fp8comm/device.h"
#include "machine.h"
#include "try.h"

#define MESSAGE_BYTES 400

// Where a rank runs: hashes of its machine, the same as long as that is up, whatever its containers are called, and of
// the processors that it may use; and its number on the machine by its launcher, -1: it says none.
enum { PLACE_MACHINE, PLACE_PROCESSORS, PLACE_LAUNCHER_RANK, PLACE };

static int64_t hash_machine(void) {
  char text[256] = "";
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file) {
    if (!fgets(text, sizeof(text), file)) text[0] = '\0';
    (void)fclose(file);
  }
  if (!text[0]) (void)gethostname(text, sizeof(text) - 1);
  return (int64_t)fp8lm_crc32(0, text, strlen(text));
}

static int64_t hash_processors(void) {
  char host[256] = "";
  cpu_set_t set;
  (void)gethostname(host, sizeof(host) - 1);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_ZERO(&set);
  return (int64_t)fp8lm_crc32(fp8lm_crc32(0, host, strlen(host)), &set, sizeof(set));
}

// torchrun, Open MPI, MPICH and those that descend from it, Slurm.
static int64_t launcher_rank(void) {
  static const char *const variables[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                          "SLURM_LOCALID"};
  for (size_t i = 0; i < sizeof(variables) / sizeof(*variables); i++) {
    const char *text = getenv(variables[i]);
    if (!text) continue;
    char *end;
    const long value = strtol(text, &end, 10);
    return *text && !*end && value >= 0 && value <= INT32_MAX ? value : -1;
  }
  return -1;
}

// The launcher's number, where it gave each rank of the machine one of its own: variables may be those of a job around
// it. Else the number of ranks there that come before.
static int find_local_rank(const fp8lm_ranks *ranks, const int64_t (*all)[PLACE]) {
  const int64_t *own = all[ranks->rank];
  int before = 0;
  int told = 1;
  for (int i = 0; i < ranks->size; i++) {
    if (all[i][PLACE_MACHINE] != own[PLACE_MACHINE]) continue;
    before += i < ranks->rank;
    told = told && all[i][PLACE_LAUNCHER_RANK] >= 0;
    for (int j = 0; j < i && told; j++)
      told = all[j][PLACE_MACHINE] != own[PLACE_MACHINE] || all[j][PLACE_LAUNCHER_RANK] != all[i][PLACE_LAUNCHER_RANK];
  }
  return told ? (int)own[PLACE_LAUNCHER_RANK] : before;
}

// What the ranks of this machine share.
static fp8core_status find_place(fp8lm_ranks *ranks) {
  if (ranks->size == 1) return FP8CORE_OK;
  const int64_t own[PLACE] = {hash_machine(), hash_processors(), launcher_rank()};
  int64_t(*all)[PLACE] = calloc((size_t)ranks->size, sizeof(*all));
  if (!all) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the list of ranks");
  const fp8core_status status = fp8comm_all_gather(ranks->communicator, own, all, PLACE, FP8COMM_INT64);
  if (status == FP8CORE_OK) {
    ranks->sharing_size = 0;
    for (int i = 0; i < ranks->size; i++) ranks->sharing_size += all[i][PLACE_PROCESSORS] == own[PLACE_PROCESSORS];
    ranks->local_rank = find_local_rank(ranks, (const int64_t(*)[PLACE])all);
  }
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
  return find_place(ranks);
}

void fp8lm_ranks_destroy(fp8lm_ranks *ranks) {
  fp8comm_communicator_destroy(&ranks->communicator);
  fp8core_context_destroy(&ranks->context);
  memset(ranks, 0, sizeof(*ranks));
}

int fp8lm_ranks_gpu(const fp8lm_ranks *ranks) {
  const int gpus = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  return gpus > 0 ? ranks->local_rank % gpus : 0;
}

fp8core_status fp8lm_ranks_use_gpu(fp8lm_ranks *ranks, fp8core_context *context) {
  ranks->context = context;
  return fp8comm_communicator_use_device(ranks->communicator, context, NULL);
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

// The thread's last error, which all ranks know. Whoever returns with it may end the communication at once
// (fp8lm_ranks_abort()), which overtakes what others still wait for: none returns before all know. What comes of the
// barrier itself, after that, is of no interest.
static fp8core_status fail_together(const fp8lm_ranks *ranks, fp8core_status status) {
  char message[MESSAGE_BYTES + 32];
  (void)snprintf(message, sizeof(message), "%s", fp8core_last_error());
  (void)fp8comm_barrier(ranks->communicator);
  return fp8core_set_last_error(status, "%s", message);
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
  told[sizeof(told) - 1] = '\0';
  if (status != FP8CORE_OK)
    (void)fp8core_set_last_error(status, "%s", message);
  else
    status = fp8core_set_last_error(FP8CORE_ERROR_PEER, "rank %d failed: %s", (int)failed, told);
  return fail_together(ranks, status);
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
  return fail_together(ranks, fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                                     "rank %d has other %s than rank 0, expected the same",
                                                     (int)different, what));
}

fp8core_status fp8lm_ranks_is_first(const fp8lm_ranks *ranks, int64_t value, int *first) {
  *first = 1;
  if (ranks->size == 1) return FP8CORE_OK;
  const int64_t own[2] = {hash_machine(), value};
  int64_t(*all)[2] = calloc((size_t)ranks->size, sizeof(*all));
  if (!all) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the list of ranks");
  const fp8core_status status = fp8comm_all_gather(ranks->communicator, own, all, 2, FP8COMM_INT64);
  for (int i = 0; i < ranks->rank; i++) *first = *first && memcmp(all[i], own, sizeof(own)) != 0;
  free(all);
  return status;
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
