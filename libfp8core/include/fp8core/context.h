/** \file
 * Execution contexts: a device, its threads or stream, a workspace, a seed and a log callback.
 *
 * Threads: a context is used by one thread at a time. This holds for every call of the library that takes it, and for
 * the scaling states made with it (scaling.h). Distinct contexts may be used from distinct threads at once, unless one
 * call writes memory that the other reads or writes; an amax or statistics that two calls share are such memory.
 * Calls marked "thread-safe" are free of this rule.
 *
 * Order: on the CPU a call has done its work when it returns. On CUDA it puts the work on the context's stream and
 * returns; memory that it was given must stay valid until the work is done. Option structs and tensor structs are read
 * during the call on both.
 *
 * Errors that every call with a context may return, beside those it lists: FP8CORE_ERROR_INVALID_ARGUMENT when the
 * context is NULL; FP8CORE_ERROR_DEVICE when CUDA reports a failure, which may be one of earlier work (never on the
 * CPU); FP8CORE_ERROR_OUT_OF_MEMORY when CUDA reports that it lacks memory for its own needs. A call with an options
 * struct returns FP8CORE_ERROR_VERSION_MISMATCH when the struct's size is none that a release up to the library's had.
 *
 * Threads of the CPU are OpenMP's. In a child of fork(), where they are not, every context runs with one thread once
 * the parent has created a CPU context of several; results are the same, as they do not depend on threads. OpenMP ends
 * the process where it cannot create a thread. fp8core_context_create() therefore creates as many as the context has,
 * at once and for a moment, and fails if it cannot. That cannot help where a limit is lowered or used up afterwards
 * (each thread that uses contexts gets OpenMP threads of its own), nor where OMP_STACKSIZE asks for more memory than
 * there is.
 */
#ifndef FP8CORE_CONTEXT_H
#define FP8CORE_CONTEXT_H

#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "status.h"
#include "version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8core_device_type { FP8CORE_DEVICE_CPU = 0, FP8CORE_DEVICE_CUDA = 1 } fp8core_device_type;

/** A device: the type and, for CUDA, the ordinal. The CPU has the index 0. */
typedef struct fp8core_device {
  fp8core_device_type type;
  int index;
} fp8core_device;

/**
 * CPU kernel tiers, each a superset of the one before. A tier needs its instructions in CPUID and its registers enabled
 * by the operating system (XCR0).
 */
typedef enum fp8core_isa {
  /** The best tier of this CPU, unless the environment variable FP8CORE_ISA names a lower one. */
  FP8CORE_ISA_AUTO = 0,
  /** Portable C. FP8CORE_ISA=scalar */
  FP8CORE_ISA_SCALAR = 1,
  /** AVX2, FMA and F16C. FP8CORE_ISA=avx2 */
  FP8CORE_ISA_AVX2 = 2,
  /** AVX-512 F, BW, DQ and VL. FP8CORE_ISA=avx512 */
  FP8CORE_ISA_AVX512 = 3,
  /** AVX-512 as above with BF16 dot products and VBMI. FP8CORE_ISA=avx512-bf16 */
  FP8CORE_ISA_AVX512_BF16 = 4
} fp8core_isa;

/** Bits of fp8core_cpu_features(). */
#define FP8CORE_CPU_AVX2 (UINT32_C(1) << 0)
#define FP8CORE_CPU_FMA (UINT32_C(1) << 1)
#define FP8CORE_CPU_F16C (UINT32_C(1) << 2)
#define FP8CORE_CPU_AVX512F (UINT32_C(1) << 3)
#define FP8CORE_CPU_AVX512BW (UINT32_C(1) << 4)
#define FP8CORE_CPU_AVX512DQ (UINT32_C(1) << 5)
#define FP8CORE_CPU_AVX512VL (UINT32_C(1) << 6)
#define FP8CORE_CPU_AVX512VBMI (UINT32_C(1) << 7)
#define FP8CORE_CPU_AVX512BF16 (UINT32_C(1) << 8)

/** Features of this CPU that the operating system has enabled, as a mask of FP8CORE_CPU_*. Thread-safe. */
FP8CORE_API uint32_t fp8core_cpu_features(void);

/** "scalar", "avx2", "avx512", "avx512-bf16", "auto"; "unknown" for a value outside the enum. Thread-safe. */
FP8CORE_API const char *fp8core_isa_name(fp8core_isa isa);

/** The best tier that this CPU runs, whatever FP8CORE_ISA says. Thread-safe. */
FP8CORE_API fp8core_isa fp8core_isa_best(void);

/**
 * Number of usable devices: 1 for the CPU; for CUDA the number of visible GPUs, 0 without a driver or in a build
 * without CUDA (fp8core_last_error() then says which). 0 for a value outside the enum. Thread-safe.
 */
FP8CORE_API int fp8core_device_count(fp8core_device_type type);

typedef enum fp8core_log_level {
  FP8CORE_LOG_DEBUG = 0,
  FP8CORE_LOG_INFO = 1,
  FP8CORE_LOG_WARNING = 2
} fp8core_log_level;

/** \p message is one line without a newline, valid during the call. Called from the thread that uses the context,
 * within the library's call. Must not call the library with the same context. */
typedef void (*fp8core_log_callback)(void *user_data, fp8core_log_level level, const char *message);

typedef struct fp8core_context_options {
  /** sizeof(fp8core_context_options) as the caller was compiled; tells the library which fields are there. One that no
   * release had is FP8CORE_ERROR_VERSION_MISMATCH, here and in the options of other calls. */
  size_t size;
  /** FP8CORE_API_VERSION as the caller was compiled. */
  int api_version;
  fp8core_device device;
  /**
   * CPU threads, 1 to 1024; 0: as many as OpenMP would use (OMP_NUM_THREADS). At most OMP_THREAD_LIMIT, with a warning
   * in the log. Without OpenMP: 1.
   */
  int threads;
  /** CPU kernel tier. One that this CPU lacks is refused. Takes precedence over FP8CORE_ISA, whose value must be valid
   * all the same. */
  fp8core_isa isa;
  /** CUDA: non-zero to run on \p stream, zero for a stream that the context creates and owns. */
  int use_stream;
  /** CUDA: a cudaStream_t of the device; NULL is CUDA's default stream. Must outlive the context. */
  void *stream;
  /**
   * Bytes of scratch memory to allocate at creation. 0: 32 MiB on CUDA, on demand on the CPU. A call that needs more
   * grows it once, which synchronises on CUDA; so a graph capture wants the size set here, or a first run before it.
   */
  size_t workspace_bytes;
  /** Key of the counter-based generator that stochastic rounding draws from. */
  uint64_t seed;
  /** May be NULL. */
  fp8core_log_callback log;
  void *log_user_data;
} fp8core_context_options;

/** Default options: CPU, all threads, best tier, own stream, seed 0, no log. Inline, so that it carries the caller's
 * version. */
static inline fp8core_context_options fp8core_context_options_default(void) {
  fp8core_context_options options;
  options.size = sizeof(options);
  options.api_version = FP8CORE_API_VERSION;
  options.device.type = FP8CORE_DEVICE_CPU;
  options.device.index = 0;
  options.threads = 0;
  options.isa = FP8CORE_ISA_AUTO;
  options.use_stream = 0;
  options.stream = NULL;
  options.workspace_bytes = 0;
  options.seed = 0;
  options.log = NULL;
  options.log_user_data = NULL;
  return options;
}

typedef struct fp8core_context fp8core_context;

/**
 * Creates a context. Allocates the workspace that the options ask for; on CUDA also a stream, unless one is given, and
 * a cuBLASLt handle, for which the first one loads cuBLASLt. Thread-safe, as long as no thread changes the environment
 * meanwhile (FP8CORE_ISA is read).
 *
 * \param context receives the handle, NULL on failure.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_VERSION_MISMATCH when the caller was compiled for another API version, or the options' size is
 *         wrong (see above);
 *         FP8CORE_ERROR_INVALID_ARGUMENT when \p context is NULL, an option is out of range, the tier is unknown or one
 *         that this CPU or build lacks (the option's or FP8CORE_ISA's), or there is no GPU of this index;
 *         FP8CORE_ERROR_NOT_SUPPORTED for CUDA without a GPU or driver, with a GPU below compute capability 8.0, when
 *         cuBLASLt cannot be loaded, or in a build without CUDA;
 *         FP8CORE_ERROR_OUT_OF_MEMORY when host or device memory is short, or the threads cannot be created;
 *         FP8CORE_ERROR_DEVICE when CUDA or cuBLASLt fails to start.
 */
FP8CORE_API fp8core_status fp8core_context_create(fp8core_context **context, const fp8core_context_options *options);

/**
 * Waits for the context's work, frees what it owns and clears the pointer. NULL and a cleared pointer are fine. States
 * made with it must be destroyed before; memory of fp8core_alloc() is not freed. Failures go unreported. No other
 * thread may use the context.
 */
FP8CORE_API void fp8core_context_destroy(fp8core_context **context);

/**
 * Waits until all work that was given to the context is done (a no-op on the CPU), and reports its failures.
 * One thread at a time.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the context is NULL; FP8CORE_ERROR_DEVICE when CUDA reports that some of
 *         the work failed, or the stream is being captured.
 */
FP8CORE_API fp8core_status fp8core_context_synchronize(fp8core_context *context);

/** The context's device. NULL gives the CPU. Thread-safe. */
FP8CORE_API fp8core_device fp8core_context_device(const fp8core_context *context);

/** The tier that the context's CPU kernels use (also on CUDA, for what runs on the host). NULL gives FP8CORE_ISA_AUTO.
 * Thread-safe. */
FP8CORE_API fp8core_isa fp8core_context_isa(const fp8core_context *context);

/** The context's number of CPU threads, 1 in a child of fork() (see above). NULL gives 0. Thread-safe. */
FP8CORE_API int fp8core_context_threads(const fp8core_context *context);

/** The context's seed. NULL gives 0. Not at once with fp8core_context_set_seed(). */
FP8CORE_API uint64_t fp8core_context_seed(const fp8core_context *context);

/**
 * Replaces the seed (the key of stochastic rounding, see FP8CORE_ROUND_STOCHASTIC), for work given to the context from
 * now on; work that it was given before keeps its seed. One thread at a time.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the context is NULL.
 */
FP8CORE_API fp8core_status fp8core_context_set_seed(fp8core_context *context, uint64_t seed);

/** Bytes of scratch memory that the context holds now. NULL gives 0. Not at once with a call that may grow it. */
FP8CORE_API size_t fp8core_context_workspace_bytes(const fp8core_context *context);

/**
 * Allocates memory on the context's device, not initialised, aligned to 256 bytes; from 2 MiB on the CPU's is aligned
 * to 2 MiB with transparent huge pages asked for. Blocking; not meant for the inside of a training step. One thread at
 * a time.
 *
 * \param bytes 0 gives NULL and success.
 * \param pointer receives the address, NULL on failure. To be freed by fp8core_free(): the context does not keep it.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p context or \p pointer is NULL;
 *         FP8CORE_ERROR_OUT_OF_MEMORY when the device has not so many bytes;
 *         FP8CORE_ERROR_DEVICE when CUDA fails, or its stream is being captured.
 */
FP8CORE_API fp8core_status fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer);

/**
 * Frees what fp8core_alloc() gave, by this context or another of the same device. NULL is fine. On CUDA it waits for
 * the context's stream first. One thread at a time.
 *
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when the context is NULL; FP8CORE_ERROR_DEVICE when CUDA reports a failure
 *         (also of the work it waits for), or its stream is being captured, in which case nothing is freed.
 */
FP8CORE_API fp8core_status fp8core_free(fp8core_context *context, void *pointer);

/**
 * Copies \p bytes between any two of host memory and the context's device memory. Ordered with the context's other
 * work; returns when the copy is done. The two may overlap on the CPU, not on CUDA. One thread at a time.
 *
 * \param bytes 0: success, nothing is looked at.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p context, \p destination or \p source is NULL; FP8CORE_ERROR_DEVICE
 *         when CUDA refuses an address, reports a failure, or its stream is being captured.
 */
FP8CORE_API fp8core_status fp8core_copy(fp8core_context *context, void *destination, const void *source, size_t bytes);

/**
 * Sets \p bytes of the context's device memory to zero, ordered with the context's other work; does not wait for it on
 * CUDA. One thread at a time.
 *
 * \param bytes 0: success, nothing is looked at.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when \p context or \p pointer is NULL; FP8CORE_ERROR_DEVICE when CUDA reports
 *         a failure.
 */
FP8CORE_API fp8core_status fp8core_zero(fp8core_context *context, void *pointer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
