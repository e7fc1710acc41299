// The all-gather by PMIx: each rank puts its part, a fence carries all parts to all nodes, each rank gets those of the
// others. Everything that may wait for other ranks is started and then waited for here with a timeout of our own,
// because servers need not support PMIX_TIMEOUT. A call that was given up may end later: its state is counted, not on a
// stack.
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <pmix.h>

#include "../transport.h"
#include "bootstrap.h"

// Between two looks at whether the waiting is to end.
#define LOOK_SECONDS 0.1

// A call underway: held by the one that waits and by PMIx, until each lets go.
typedef struct call {
  pthread_mutex_t mutex;
  pthread_cond_t ended_condition;
  int holders;
  int ended;
  pmix_status_t status;
  // Of a get: memory from malloc().
  void *bytes;
  size_t size;
} call;

typedef struct pmix_bootstrap {
  fp8comm_bootstrap base;
  pmix_proc_t self;
  fp8comm_wait_options wait;
  // Whether the waiting was ended, which then was not by the timeout.
  int interrupted;
  unsigned instance;
  unsigned sequence;
} pmix_bootstrap;

// Communicators of this process that were created so far: ranks create theirs in the same order.
static atomic_uint instances;

int fp8comm_pmix_is_there(void) { return getenv("PMIX_RANK") && getenv("PMIX_NAMESPACE"); }

static fp8core_status pmix_failed(const char *what, pmix_status_t status) {
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "PMIx: %s failed: %s", what, PMIx_Error_string(status));
}

static call *new_call(void) {
  call *const made = calloc(1, sizeof(*made));
  pthread_condattr_t attributes;
  if (!made) return NULL;
  if (pthread_condattr_init(&attributes) == 0) {
    if (pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
        pthread_cond_init(&made->ended_condition, &attributes) == 0) {
      (void)pthread_condattr_destroy(&attributes);
      (void)pthread_mutex_init(&made->mutex, NULL);
      made->holders = 2;
      return made;
    }
    (void)pthread_condattr_destroy(&attributes);
  }
  free(made);
  return NULL;
}

static void let_go(call *held, int holders) {
  (void)pthread_mutex_lock(&held->mutex);
  const int left = held->holders -= holders;
  (void)pthread_mutex_unlock(&held->mutex);
  if (left > 0) return;
  (void)pthread_cond_destroy(&held->ended_condition);
  (void)pthread_mutex_destroy(&held->mutex);
  free(held->bytes);
  free(held);
}

// The two callbacks run in a thread of PMIx.
static void on_ended(pmix_status_t status, void *data) {
  call *const ended = data;
  (void)pthread_mutex_lock(&ended->mutex);
  ended->status = status;
  ended->ended = 1;
  (void)pthread_cond_signal(&ended->ended_condition);
  (void)pthread_mutex_unlock(&ended->mutex);
  let_go(ended, 1);
}

static void on_value(pmix_status_t status, pmix_value_t *value, void *data) {
  call *const ended = data;
  if (status == PMIX_SUCCESS) {
    if (!value || value->type != PMIX_BYTE_OBJECT) {
      status = PMIX_ERR_TYPE_MISMATCH;
    } else {
      ended->size = value->data.bo.size;
      ended->bytes = malloc(ended->size + 1);
      if (!ended->bytes)
        status = PMIX_ERR_NOMEM;
      else if (ended->size > 0)
        memcpy(ended->bytes, value->data.bo.bytes, ended->size);
    }
  }
  on_ended(status, data);
}

static struct timespec deadline_after(double seconds) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  const double whole = seconds < 1e9 ? seconds : 1e9;
  time.tv_sec += (time_t)whole;
  time.tv_nsec += (long)((whole - (double)(time_t)whole) * 1e9);
  if (time.tv_nsec >= 1000000000) {
    time.tv_nsec -= 1000000000;
    time.tv_sec++;
  }
  return time;
}

static double seconds_from(const struct timespec *start, const struct timespec *end) {
  return (double)(end->tv_sec - start->tv_sec) + 1e-9 * (double)(end->tv_nsec - start->tv_nsec);
}

// PMIX_ERR_TIMEOUT where nothing came in time, or the waiting is to end.
static pmix_status_t wait_for(pmix_bootstrap *pmix, call *awaited, const struct timespec *deadline) {
  pmix_status_t status = PMIX_ERR_TIMEOUT;
  (void)pthread_mutex_lock(&awaited->mutex);
  for (struct timespec time = deadline_after(0); !awaited->ended && seconds_from(&time, deadline) > 0;
       time = deadline_after(0)) {
    const double waited = pmix->wait.timeout_seconds - seconds_from(&time, deadline);
    pmix->interrupted = pmix->wait.interrupt && pmix->wait.interrupt(pmix->wait.interrupt_data, waited);
    if (pmix->interrupted) break;
    struct timespec next = deadline_after(LOOK_SECONDS);
    if (seconds_from(&next, deadline) < 0) next = *deadline;
    (void)pthread_cond_timedwait(&awaited->ended_condition, &awaited->mutex, &next);
  }
  if (awaited->ended) status = awaited->status;
  (void)pthread_mutex_unlock(&awaited->mutex);
  return status;
}

static fp8core_status no_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for the PMIx bootstrap");
}

static fp8core_status fence(pmix_bootstrap *pmix, const struct timespec *deadline) {
  call *const fencing = new_call();
  if (!fencing) return no_memory();
  bool collect = true;
  pmix_info_t info;
  PMIX_INFO_LOAD(&info, PMIX_COLLECT_DATA, &collect, PMIX_BOOL);
  pmix_status_t status = PMIx_Fence_nb(NULL, 0, &info, 1, on_ended, fencing);
  int holders = 1;
  if (status == PMIX_SUCCESS) {
    status = wait_for(pmix, fencing, deadline);
  } else {
    // Done at once, or refused: there will be no callback.
    holders = 2;
    if (status == PMIX_OPERATION_SUCCEEDED) status = PMIX_SUCCESS;
  }
  PMIX_INFO_DESTRUCT(&info);
  let_go(fencing, holders);
  if (status == PMIX_SUCCESS) return FP8CORE_OK;
  if (status == PMIX_ERR_TIMEOUT && pmix->interrupted) {
    return fp8core_set_last_error(FP8CORE_ERROR_INTERRUPTED,
                                  "rank %d of %d was interrupted as it waited for others in all-gather number %u of "
                                  "the PMIx bootstrap",
                                  pmix->base.rank, pmix->base.ranks, pmix->sequence);
  }
  if (status == PMIX_ERR_TIMEOUT) {
    return fp8core_set_last_error(
      FP8CORE_ERROR_TIMEOUT,
      "a rank of the %d did not reach all-gather number %u of the PMIx bootstrap within %g s "
      "(told by rank %d; PMIx does not say which)",
      pmix->base.ranks, pmix->sequence, pmix->wait.timeout_seconds, pmix->base.rank);
  }
  return pmix_failed("PMIx_Fence_nb()", status);
}

static fp8core_status get_part(pmix_bootstrap *pmix, int rank, const char *key, size_t bytes, void *part,
                               const struct timespec *deadline) {
  call *const getting = new_call();
  if (!getting) return no_memory();
  pmix_proc_t from;
  PMIX_LOAD_PROCID(&from, pmix->self.nspace, (pmix_rank_t)rank);
  pmix_status_t status = PMIx_Get_nb(&from, key, NULL, 0, on_value, getting);
  int holders = 1;
  if (status == PMIX_SUCCESS)
    status = wait_for(pmix, getting, deadline);
  else
    holders = 2;
  fp8core_status result = FP8CORE_OK;
  if (status == PMIX_ERR_TIMEOUT && pmix->interrupted) {
    result = fp8core_set_last_error(FP8CORE_ERROR_INTERRUPTED,
                                    "rank %d of %d was interrupted as it waited for the part of rank %d from PMIx",
                                    pmix->base.rank, pmix->base.ranks, rank);
  } else if (status == PMIX_ERR_TIMEOUT) {
    result = fp8core_set_last_error(FP8CORE_ERROR_TIMEOUT, "PMIx did not give the part of rank %d within %g s", rank,
                                    pmix->wait.timeout_seconds);
  } else if (status != PMIX_SUCCESS) {
    result = fp8core_set_last_error(FP8CORE_ERROR_PEER, "PMIx does not give the part of rank %d: %s", rank,
                                    PMIx_Error_string(status));
  } else if (getting->size != bytes) {
    result = fp8core_set_last_error(FP8CORE_ERROR_PEER,
                                    "rank %d gave %zu bytes to all-gather number %u of the bootstrap, expected %zu",
                                    rank, getting->size, pmix->sequence, bytes);
  } else if (bytes > 0) {
    memcpy(part, getting->bytes, bytes);
  }
  let_go(getting, holders);
  return result;
}

static fp8core_status pmix_all_gather(fp8comm_bootstrap *bootstrap, const void *part, size_t bytes, void *table) {
  pmix_bootstrap *const pmix = (pmix_bootstrap *)bootstrap;
  const struct timespec deadline = deadline_after(pmix->wait.timeout_seconds);
  char key[64];
  // A key of its own each time: a value that was put is not put again.
  (void)snprintf(key, sizeof(key), "fp8comm.%u.%u", pmix->instance, ++pmix->sequence);
  // Put copies it.
  pmix_value_t value = {.type = PMIX_BYTE_OBJECT};
  value.data.bo.bytes = (char *)(uintptr_t)part;
  value.data.bo.size = bytes;
  pmix_status_t status = PMIx_Put(PMIX_GLOBAL, key, &value);
  if (status != PMIX_SUCCESS) return pmix_failed("PMIx_Put()", status);
  status = PMIx_Commit();
  if (status != PMIX_SUCCESS) return pmix_failed("PMIx_Commit()", status);
  FP8COMM_TRY(fence(pmix, &deadline));
  for (int r = 0; r < bootstrap->ranks; r++) {
    uint8_t *const place = (uint8_t *)table + (size_t)r * bytes;
    if (r != bootstrap->rank)
      FP8COMM_TRY(get_part(pmix, r, key, bytes, place, &deadline));
    else if (bytes > 0)
      memmove(place, part, bytes);
  }
  return FP8CORE_OK;
}

static void pmix_destroy(fp8comm_bootstrap *bootstrap) {
  // Counted by PMIx: an MPI library in the same process keeps its own.
  (void)PMIx_Finalize(NULL, 0);
  free(bootstrap);
}

fp8core_status fp8comm_pmix_create(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap) {
  *bootstrap = NULL;
  pmix_bootstrap *const pmix = calloc(1, sizeof(*pmix));
  if (!pmix) return no_memory();
  pmix_status_t status = PMIx_Init(&pmix->self, NULL, 0);
  if (status != PMIX_SUCCESS) {
    free(pmix);
    return pmix_failed("PMIx_Init() (PMIX_RANK and PMIX_NAMESPACE are set)", status);
  }
  pmix->base.all_gather = pmix_all_gather;
  pmix->base.destroy = pmix_destroy;
  pmix->wait = *wait;
  pmix->instance = atomic_fetch_add(&instances, 1);
  pmix_proc_t job;
  PMIX_LOAD_PROCID(&job, pmix->self.nspace, PMIX_RANK_WILDCARD);
  pmix_value_t *size = NULL;
  status = PMIx_Get(&job, PMIX_JOB_SIZE, NULL, 0, &size);
  fp8core_status result = FP8CORE_OK;
  if (status != PMIX_SUCCESS) {
    result = pmix_failed("PMIx_Get(PMIX_JOB_SIZE)", status);
  } else if (size->type != PMIX_UINT32 || size->data.uint32 < 1 || size->data.uint32 > FP8COMM_MAX_RANKS ||
             pmix->self.rank >= size->data.uint32) {
    result = fp8core_set_last_error(FP8CORE_ERROR_PEER,
                                    "PMIx says that this is rank %u of a job of %u ranks; expected 1 to %d ranks",
                                    (unsigned)pmix->self.rank, (unsigned)size->data.uint32, FP8COMM_MAX_RANKS);
  } else {
    pmix->base.rank = (int)pmix->self.rank;
    pmix->base.ranks = (int)size->data.uint32;
  }
  if (size) PMIX_VALUE_RELEASE(size);
  if (result != FP8CORE_OK) {
    pmix_destroy(&pmix->base);
    return result;
  }
  *bootstrap = &pmix->base;
  return FP8CORE_OK;
}
