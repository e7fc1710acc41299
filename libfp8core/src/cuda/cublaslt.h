// cuBLASLt, loaded when the first CUDA context is made: it is half a gigabyte, which a process that never touches a
// GPU should neither map nor relocate.
#ifndef FP8CORE_CUDA_CUBLASLT_H
#define FP8CORE_CUDA_CUBLASLT_H

#include <cublasLt.h>

#include "internal.h"

// The functions that the backend calls. Their types are those of cublasLt.h.
#define FP8CORE_CUBLASLT_FUNCTIONS(FUNCTION)                                                                           \
  FUNCTION(cublasLtCreate)                                                                                             \
  FUNCTION(cublasLtDestroy)                                                                                            \
  FUNCTION(cublasLtGetStatusName)                                                                                      \
  FUNCTION(cublasLtGetStatusString)                                                                                    \
  FUNCTION(cublasLtMatmul)                                                                                             \
  FUNCTION(cublasLtMatmulAlgoGetHeuristic)                                                                             \
  FUNCTION(cublasLtMatmulDescCreate)                                                                                   \
  FUNCTION(cublasLtMatmulDescDestroy)                                                                                  \
  FUNCTION(cublasLtMatmulDescSetAttribute)                                                                             \
  FUNCTION(cublasLtMatmulPreferenceCreate)                                                                             \
  FUNCTION(cublasLtMatmulPreferenceDestroy)                                                                            \
  FUNCTION(cublasLtMatmulPreferenceSetAttribute)                                                                       \
  FUNCTION(cublasLtMatrixLayoutCreate)                                                                                 \
  FUNCTION(cublasLtMatrixLayoutDestroy)                                                                                \
  FUNCTION(cublasLtMatrixLayoutSetAttribute)

typedef struct fp8core_cublaslt_table {
#define FP8CORE_CUBLASLT_POINTER(name) __typeof__(name) *name;
  FP8CORE_CUBLASLT_FUNCTIONS(FP8CORE_CUBLASLT_POINTER)
#undef FP8CORE_CUBLASLT_POINTER
} fp8core_cublaslt_table;

// Filled once fp8core_cublaslt_load() has succeeded, and never changed afterwards.
extern fp8core_cublaslt_table fp8core_cublaslt;

// Loads the library on its first success, for the whole process; it is never unloaded. Thread-safe. A failure is tried
// afresh by the next call.
fp8core_status fp8core_cublaslt_load(void);

// What the library is called: the ABI is that of the headers.
extern const char fp8core_cublaslt_soname[];

// Fills the table from a file, whose name dlopen() looks up; changes it only on success.
fp8core_status fp8core_cublaslt_open(fp8core_cublaslt_table *table, const char *file);

#endif
