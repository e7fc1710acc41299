#include "cpu.h"

#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#  include <sys/mman.h>
#endif

// Below this, a huge page would waste more than it saves.
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define ALIGNMENT ((size_t)256)

static void cpu_destroy(fp8core_context *context) { (void)context; }

static fp8core_status cpu_synchronize(fp8core_context *context) {
  (void)context;
  return FP8CORE_OK;
}

static fp8core_status cpu_alloc(fp8core_context *context, size_t bytes, void **pointer) {
  (void)context;
  const size_t alignment = bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : ALIGNMENT;
  *pointer = NULL;
  if (bytes <= SIZE_MAX - alignment)
    *pointer = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (!*pointer)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
#if defined(__linux__)
  // First touch of 4 KiB pages costs far more than the work done on them. Advice only: a refusal changes nothing.
  if (alignment == HUGE_PAGE_BYTES) (void)madvise(*pointer, bytes, MADV_HUGEPAGE);
#endif
  return FP8CORE_OK;
}

static fp8core_status cpu_free(fp8core_context *context, void *pointer) {
  (void)context;
  free(pointer);
  return FP8CORE_OK;
}

static fp8core_status cpu_copy(fp8core_context *context, void *destination, const void *source, size_t bytes) {
  (void)context;
  memmove(destination, source, bytes);
  return FP8CORE_OK;
}

static fp8core_status cpu_zero(fp8core_context *context, void *pointer, size_t bytes) {
  (void)context;
  memset(pointer, 0, bytes);
  return FP8CORE_OK;
}

const fp8core_backend fp8core_cpu_backend = {
  .destroy = cpu_destroy,
  .synchronize = cpu_synchronize,
  .alloc = cpu_alloc,
  .free = cpu_free,
  .copy = cpu_copy,
  .zero = cpu_zero,
  .cast = fp8core_cpu_cast,
  .amax = fp8core_cpu_amax,
  .scaling_calibrate = fp8core_cpu_scaling_calibrate,
  .scaling_update = fp8core_cpu_scaling_update,
  .copy_float = fp8core_cpu_copy_float,
  .gemm = fp8core_cpu_gemm,
};
