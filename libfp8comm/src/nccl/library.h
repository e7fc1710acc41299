// NCCL, loaded when device memory first wants it: it is two hundred megabytes, which a process that never touches a GPU
// should neither map nor need.
#ifndef FP8COMM_NCCL_LIBRARY_H
#define FP8COMM_NCCL_LIBRARY_H

#include <nccl.h>

#include "fp8core/status.h"

// The functions that this library calls. Their types are those of nccl.h.
#define FP8COMM_NCCL_FUNCTIONS(FUNCTION)                                                                               \
  FUNCTION(ncclAllGather)                                                                                              \
  FUNCTION(ncclAllReduce)                                                                                              \
  FUNCTION(ncclBroadcast)                                                                                              \
  FUNCTION(ncclCommAbort)                                                                                              \
  FUNCTION(ncclCommDestroy)                                                                                            \
  FUNCTION(ncclCommFinalize)                                                                                           \
  FUNCTION(ncclCommGetAsyncError)                                                                                      \
  FUNCTION(ncclCommInitRankConfig)                                                                                     \
  FUNCTION(ncclGetErrorString)                                                                                         \
  FUNCTION(ncclGetLastError)                                                                                           \
  FUNCTION(ncclGetUniqueId)                                                                                            \
  FUNCTION(ncclGetVersion)                                                                                             \
  FUNCTION(ncclGroupEnd)                                                                                               \
  FUNCTION(ncclGroupStart)                                                                                             \
  FUNCTION(ncclRecv)                                                                                                   \
  FUNCTION(ncclReduceScatter)                                                                                          \
  FUNCTION(ncclSend)

typedef struct fp8comm_nccl_table {
#define FP8COMM_NCCL_POINTER(name) __typeof__(name) *name;
  FP8COMM_NCCL_FUNCTIONS(FP8COMM_NCCL_POINTER)
#undef FP8COMM_NCCL_POINTER
} fp8comm_nccl_table;

// Filled once fp8comm_nccl_load() has succeeded, and never changed afterwards.
extern fp8comm_nccl_table fp8comm_nccl_library;

// Loads the library on its first success, for the whole process; it is never unloaded. Thread-safe. A failure is tried
// afresh by the next call.
fp8core_status fp8comm_nccl_load(void);

// What the library is called: the ABI is that of the headers.
extern const char fp8comm_nccl_soname[];

// Fills the table from a file, whose name dlopen() looks up; changes it only on success.
fp8core_status fp8comm_nccl_load_from(fp8comm_nccl_table *table, const char *file);

#endif
