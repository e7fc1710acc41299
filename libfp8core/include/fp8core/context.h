/** \file
 * Execution contexts: a device, its threads or stream, a workspace, a seed and a log callback.
 *
 * A context may be used by one thread at a time; distinct contexts may be used from distinct threads at once.
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

/** \p message is one line without a newline, valid during the call. May be called from the thread that uses the
 * context. */
typedef void (*fp8core_log_callback)(void *user_data, fp8core_log_level level, const char *message);

typedef struct fp8core_context_options {
  /** sizeof(fp8core_context_options) as the caller was compiled; tells the library which fields are there. */
  size_t size;
  /** FP8CORE_API_VERSION as the caller was compiled. */
  int api_version;
  fp8core_device device;
  /** CPU threads, 1 to 1024; 0: as many as OpenMP would use (OMP_NUM_THREADS). Without OpenMP: 1. */
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
 * Creates a context.
 *
 * \param context receives the handle, NULL on failure.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_VERSION_MISMATCH when the caller was compiled for another API version;
 *         FP8CORE_ERROR_INVALID_ARGUMENT for options out of range, an unknown FP8CORE_ISA or one that this CPU lacks;
 *         FP8CORE_ERROR_NOT_SUPPORTED for CUDA without a GPU, or in a build without it;
 *         FP8CORE_ERROR_DEVICE, FP8CORE_ERROR_OUT_OF_MEMORY.
 */
FP8CORE_API fp8core_status fp8core_context_create(fp8core_context **context, const fp8core_context_options *options);

/** Waits for the context's work, frees what it owns and clears the pointer. NULL and a cleared pointer are fine. */
FP8CORE_API void fp8core_context_destroy(fp8core_context **context);

/** Waits until all work that was given to the context is done (a no-op on the CPU), and reports its failures. */
FP8CORE_API fp8core_status fp8core_context_synchronize(fp8core_context *context);

/** The context's device. NULL gives the CPU. */
FP8CORE_API fp8core_device fp8core_context_device(const fp8core_context *context);

/** The tier that the context's CPU kernels use (also on CUDA, for what runs on the host). NULL gives FP8CORE_ISA_AUTO.
 */
FP8CORE_API fp8core_isa fp8core_context_isa(const fp8core_context *context);

/** The context's number of CPU threads. NULL gives 0. */
FP8CORE_API int fp8core_context_threads(const fp8core_context *context);

/** The context's seed. NULL gives 0. */
FP8CORE_API uint64_t fp8core_context_seed(const fp8core_context *context);

/** Replaces the seed, for work given to the context from now on. */
FP8CORE_API fp8core_status fp8core_context_set_seed(fp8core_context *context, uint64_t seed);

/** Bytes of scratch memory that the context holds now. NULL gives 0. */
FP8CORE_API size_t fp8core_context_workspace_bytes(const fp8core_context *context);

/**
 * Allocates \p bytes on the context's device, aligned to 256 bytes (the CPU's with transparent huge pages asked for),
 * not initialised. 0 bytes gives NULL. Blocking; not meant for the inside of a training step.
 */
FP8CORE_API fp8core_status fp8core_alloc(fp8core_context *context, size_t bytes, void **pointer);

/** Frees what fp8core_alloc() gave, of a context of the same device. NULL is fine. */
FP8CORE_API fp8core_status fp8core_free(fp8core_context *context, void *pointer);

/**
 * Copies \p bytes between any two of host memory and the context's device memory. Ordered with the context's other
 * work; returns when the copy is done.
 */
FP8CORE_API fp8core_status fp8core_copy(fp8core_context *context, void *destination, const void *source, size_t bytes);

/** Sets \p bytes of device memory to zero, ordered with the context's other work; does not wait for it on CUDA. */
FP8CORE_API fp8core_status fp8core_zero(fp8core_context *context, void *pointer, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
