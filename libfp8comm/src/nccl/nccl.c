// NCCL's communicators and collectives. None of its calls blocks: communicators are made with blocking = 0, and what
// goes on is looked at by ncclCommGetAsyncError(), so that a peer that is gone is the communicator's failure or its
// timeout, never a hang.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../device.h"
#include "library.h"

#define OLDEST_VERSION 21400
#define FP8_VERSION 22400
#define FP8_CAPABILITY 90
// What a moment is, for the last rank to close.
#define CLOSE_SECONDS 2.0

struct fp8comm_nccl {
  ncclComm_t communicator;
  fp8comm_cuda *cuda;
  int size;
  int rank;
};

static fp8core_status check(const fp8comm_nccl *nccl, ncclResult_t result, const char *what) {
  if (result == ncclSuccess || result == ncclInProgress) return FP8CORE_OK;
  fp8core_status status = FP8CORE_ERROR_DEVICE;
  if (result == ncclRemoteError || result == ncclSystemError || result == ncclInternalError)
    status = FP8CORE_ERROR_PEER;
  const char *detail = fp8comm_nccl_library.ncclGetLastError(nccl ? nccl->communicator : NULL);
  return fp8core_set_last_error(status, "NCCL: %s: %s%s%s", what, fp8comm_nccl_library.ncclGetErrorString(result),
                                detail && *detail ? ": " : "", detail ? detail : "");
}

fp8core_status fp8comm_nccl_version(int *version) {
  *version = 0;
  FP8COMM_TRY(fp8comm_nccl_load());
  FP8COMM_TRY(check(NULL, fp8comm_nccl_library.ncclGetVersion(version), "ncclGetVersion"));
  if (*version >= OLDEST_VERSION) return FP8CORE_OK;
  const int found = *version;
  *version = 0;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "NCCL has version %d, expected at least %d (2.14)", found,
                                OLDEST_VERSION);
}

fp8core_status fp8comm_nccl_check_fp8(const fp8comm_cuda *cuda) {
  int version;
#if NCCL_VERSION_CODE < FP8_VERSION
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                "FP8 has no reductions here: this build's nccl.h is of version %d, expected at least "
                                "%d (2.24); see fp8comm/gradient.h for sums with scales",
                                NCCL_VERSION_CODE, FP8_VERSION);
#endif
  FP8COMM_TRY(fp8comm_nccl_version(&version));
  if (version < FP8_VERSION)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                  "FP8 has no reductions here: NCCL has version %d, expected at least %d (2.24); see "
                                  "fp8comm/gradient.h for sums with scales",
                                  version, FP8_VERSION);
  if (cuda->capability < FP8_CAPABILITY)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                  "FP8 has no reductions here: the GPU has compute capability %d.%d, expected at least "
                                  "9.0; see fp8comm/gradient.h for sums with scales",
                                  cuda->capability / 10, cuda->capability % 10);
  return FP8CORE_OK;
}

fp8core_status fp8comm_nccl_unique_id(void *id) {
  ncclUniqueId made;
  FP8COMM_TRY(fp8comm_nccl_load());
  FP8COMM_TRY(check(NULL, fp8comm_nccl_library.ncclGetUniqueId(&made), "ncclGetUniqueId"));
  memcpy(id, &made, sizeof(made));
  return FP8CORE_OK;
}

_Static_assert(sizeof(ncclUniqueId) == FP8COMM_NCCL_ID_BYTES, "ids travel whole");

static fp8core_status enter(const fp8comm_cuda *cuda, int *previous) {
  if (cudaGetDevice(previous) == cudaSuccess &&
      (*previous == cuda->device || cudaSetDevice(cuda->device) == cudaSuccess))
    return FP8CORE_OK;
  (void)cudaGetLastError();
  return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "CUDA device %d cannot be made the current one", cuda->device);
}

static void leave(const fp8comm_cuda *cuda, int previous) {
  if (previous != cuda->device) (void)cudaSetDevice(previous);
}

fp8core_status fp8comm_nccl_open(fp8comm_cuda *cuda, int rank, int size, const void *id, fp8comm_nccl **nccl) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId unique;
  int previous;
  *nccl = NULL;
  config.blocking = 0;
  memcpy(&unique, id, sizeof(unique));
  FP8COMM_TRY(enter(cuda, &previous));
  fp8comm_nccl *made = calloc(1, sizeof(*made));
  fp8core_status status = FP8CORE_OK;
  if (!made) {
    status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate NCCL's part of a communicator");
  } else {
    made->cuda = cuda;
    made->rank = rank;
    made->size = size;
    status = check(NULL, fp8comm_nccl_library.ncclCommInitRankConfig(&made->communicator, size, unique, rank, &config),
                   "ncclCommInitRankConfig");
  }
  leave(cuda, previous);
  if (status == FP8CORE_OK) {
    *nccl = made;
  } else if (made) {
    if (made->communicator) (void)fp8comm_nccl_library.ncclCommAbort(made->communicator);
    free(made);
  }
  return status;
}

fp8core_status fp8comm_nccl_poll(fp8comm_nccl *nccl, int *done) {
  ncclResult_t state = ncclSuccess;
  *done = 0;
  FP8COMM_TRY(
    check(nccl, fp8comm_nccl_library.ncclCommGetAsyncError(nccl->communicator, &state), "ncclCommGetAsyncError"));
  FP8COMM_TRY(check(nccl, state, "communication"));
  *done = state == ncclSuccess;
  return FP8CORE_OK;
}

static ncclDataType_t type_of(fp8comm_dtype dtype) {
  switch (dtype) {
#if NCCL_VERSION_CODE >= FP8_VERSION
  case FP8COMM_E4M3: return ncclFloat8e4m3;
  case FP8COMM_E5M2: return ncclFloat8e5m2;
#else
  case FP8COMM_E4M3:
  case FP8COMM_E5M2: break;
#endif
  case FP8COMM_BF16: return ncclBfloat16;
  case FP8COMM_FP16: return ncclFloat16;
  case FP8COMM_FP32: return ncclFloat32;
  case FP8COMM_FP64: return ncclFloat64;
  case FP8COMM_INT64: return ncclInt64;
  case FP8COMM_BYTE: break;
  }
  return ncclUint8;
}

static ncclRedOp_t reduction_of(fp8comm_reduction reduction) {
  return reduction == FP8COMM_MIN ? ncclMin : reduction == FP8COMM_MAX ? ncclMax : ncclSum;
}

static int goes_on(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

// From the rank before this one, the one before that, and so on, in the order in which they are added up.
static ncclResult_t put_parts(const fp8comm_nccl *nccl, const fp8comm_collective *collective) {
  const fp8comm_nccl_table *library = &fp8comm_nccl_library;
  const cudaStream_t stream = (cudaStream_t)nccl->cuda->stream;
  const size_t own = (size_t)collective->counts[nccl->rank] * collective->element, stride = (own + 15) / 16 * 16;
  const unsigned char *send = collective->send;
  unsigned char *receive = collective->receive;
  ncclResult_t result = ncclSuccess;
  for (int rank = 0; rank < nccl->size && goes_on(result); rank++) {
    const size_t theirs = (size_t)collective->counts[rank] * collective->element;
    const int distance = (nccl->rank - rank + nccl->size) % nccl->size;
    if (distance > 0 && theirs > 0)
      result = library->ncclSend(send, theirs, ncclUint8, rank, nccl->communicator, stream);
    if (distance > 0 && own > 0 && goes_on(result))
      result =
        library->ncclRecv(receive + (size_t)(distance - 1) * stride, own, ncclUint8, rank, nccl->communicator, stream);
    send += theirs;
  }
  return result;
}

// What moves only moves as bytes.
static ncclResult_t put(const fp8comm_nccl *nccl, const fp8comm_collective *collective) {
  const fp8comm_nccl_table *library = &fp8comm_nccl_library;
  const ncclComm_t communicator = nccl->communicator;
  const cudaStream_t stream = (cudaStream_t)nccl->cuda->stream;
  const ncclDataType_t type = type_of((fp8comm_dtype)collective->header.dtype);
  const ncclRedOp_t reduction = reduction_of(collective->reduction);
  const size_t count = collective->count, bytes = count * collective->element;
  const unsigned char *send = collective->send;
  unsigned char *receive = collective->receive;
  ncclResult_t result = ncclSuccess;
  switch (collective->header.operation) {
  case FP8COMM_OPERATION_ALL_REDUCE:
    return library->ncclAllReduce(send, receive, count, type, reduction, communicator, stream);
  case FP8COMM_OPERATION_REDUCE_SCATTER:
    return library->ncclReduceScatter(send, receive, count, type, reduction, communicator, stream);
  case FP8COMM_OPERATION_ALL_GATHER:
    return library->ncclAllGather(send, receive, bytes, ncclUint8, communicator, stream);
  case FP8COMM_OPERATION_ALL_GATHERV:
    for (int rank = 0; rank < nccl->size && goes_on(result); rank++) {
      const size_t part = (size_t)collective->counts[rank] * collective->element;
      if (part > 0)
        result = library->ncclBroadcast(rank == nccl->rank ? send : receive, receive, part, ncclUint8, rank,
                                        communicator, stream);
      receive += part;
    }
    return result;
  case FP8COMM_OPERATION_ALL_TO_ALL:
    for (int rank = 0; rank < nccl->size && goes_on(result); rank++) {
      result = library->ncclSend(send + bytes * (size_t)rank, bytes, ncclUint8, rank, communicator, stream);
      if (goes_on(result))
        result = library->ncclRecv(receive + bytes * (size_t)rank, bytes, ncclUint8, rank, communicator, stream);
    }
    return result;
  case FP8COMM_OPERATION_GRADIENT: return put_parts(nccl, collective);
  case FP8COMM_OPERATION_BROADCAST:
    return library->ncclBroadcast(receive, receive, bytes, ncclUint8, collective->peer, communicator, stream);
  default:
    return collective->sends ? library->ncclSend(send, bytes, ncclUint8, collective->peer, communicator, stream)
                             : library->ncclRecv(receive, bytes, ncclUint8, collective->peer, communicator, stream);
  }
}

fp8core_status fp8comm_nccl_launch(fp8comm_nccl *nccl, fp8comm_request *const *requests, int count) {
  int previous;
  FP8COMM_TRY(enter(nccl->cuda, &previous));
  fp8core_status status = check(nccl, fp8comm_nccl_library.ncclGroupStart(), "ncclGroupStart");
  if (status == FP8CORE_OK) {
    for (int i = 0; i < count && status == FP8CORE_OK; i++)
      status = check(nccl, put(nccl, &requests[i]->collective), "a collective");
    // Also after a failure, of which it would tell once more.
    const ncclResult_t ended = fp8comm_nccl_library.ncclGroupEnd();
    if (status == FP8CORE_OK) status = check(nccl, ended, "ncclGroupEnd");
  }
  leave(nccl->cuda, previous);
  return status;
}

// Whether all ranks have closed in time.
static int finalize(const fp8comm_nccl *nccl) {
  const double start = fp8comm_now();
  ncclResult_t state = fp8comm_nccl_library.ncclCommFinalize(nccl->communicator);
  while (state == ncclInProgress && fp8comm_now() - start < CLOSE_SECONDS) {
    if (fp8comm_nccl_library.ncclCommGetAsyncError(nccl->communicator, &state) != ncclSuccess) return 0;
    const struct timespec moment = {0, 100000};
    if (state == ncclInProgress) (void)nanosleep(&moment, NULL);
  }
  return state == ncclSuccess;
}

void fp8comm_nccl_close(fp8comm_nccl **nccl, int aborts) {
  fp8comm_nccl *gone = *nccl;
  int previous;
  *nccl = NULL;
  if (!gone) return;
  const fp8core_status entered = enter(gone->cuda, &previous);
  if (aborts || !finalize(gone)) {
    (void)fp8comm_nccl_library.ncclCommAbort(gone->communicator);
  } else {
    (void)fp8comm_nccl_library.ncclCommDestroy(gone->communicator);
  }
  if (entered == FP8CORE_OK) leave(gone->cuda, previous);
  free(gone);
}
