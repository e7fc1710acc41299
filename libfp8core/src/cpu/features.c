#include "cpu.h"

#include <pthread.h>

#if defined(__x86_64__)
#  include <cpuid.h>

// What the operating system saves at a context switch (Intel SDM volume 1, section 13.3): a CPUID bit alone is not
// enough.
static uint64_t read_xcr0(void) {
  uint32_t low;
  uint32_t high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

static uint32_t read_features(void) {
  unsigned a;
  unsigned b;
  unsigned c;
  unsigned d;
  uint32_t features = 0;
  const unsigned os_uses_xsave = 1U << 27;
  const uint64_t xmm_ymm_state = 0x6;
  const uint64_t opmask_zmm_state = 0xe0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & os_uses_xsave)) return 0;
  const uint64_t xcr0 = read_xcr0();
  if ((xcr0 & xmm_ymm_state) != xmm_ymm_state) return 0;
  if (c & 1U << 12) features |= FP8CORE_CPU_FMA;
  if (c & 1U << 29) features |= FP8CORE_CPU_F16C;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  if (b & 1U << 5) features |= FP8CORE_CPU_AVX2;
  if ((xcr0 & opmask_zmm_state) != opmask_zmm_state || !(b & 1U << 16)) return features;
  features |= FP8CORE_CPU_AVX512F;
  if (b & 1U << 17) features |= FP8CORE_CPU_AVX512DQ;
  if (b & 1U << 30) features |= FP8CORE_CPU_AVX512BW;
  if (b & 1U << 31) features |= FP8CORE_CPU_AVX512VL;
  if (c & 1U << 1) features |= FP8CORE_CPU_AVX512VBMI;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1U << 5)) features |= FP8CORE_CPU_AVX512BF16;
  return features;
}
#else
static uint32_t read_features(void) { return 0; }
#endif

// CPUID traps in a virtual machine, which makes it thousands of cycles.
static uint32_t features_found;
static pthread_once_t features_once = PTHREAD_ONCE_INIT;

static void find_features(void) { features_found = read_features(); }

uint32_t fp8core_cpu_features(void) {
  (void)pthread_once(&features_once, find_features);
  return features_found;
}

fp8core_isa fp8core_isa_of_features(uint32_t features) {
  const uint32_t avx2 = FP8CORE_CPU_AVX2 | FP8CORE_CPU_FMA | FP8CORE_CPU_F16C;
  const uint32_t avx512 =
    avx2 | FP8CORE_CPU_AVX512F | FP8CORE_CPU_AVX512BW | FP8CORE_CPU_AVX512DQ | FP8CORE_CPU_AVX512VL;
  const uint32_t avx512_bf16 = avx512 | FP8CORE_CPU_AVX512VBMI | FP8CORE_CPU_AVX512BF16;
  fp8core_isa isa = FP8CORE_ISA_SCALAR;
  (void)features;
  (void)avx2;
  (void)avx512_bf16;
#if defined(FP8CORE_HAVE_AVX2)
  if ((features & avx2) == avx2) isa = FP8CORE_ISA_AVX2;
#  if defined(FP8CORE_HAVE_AVX512)
  if ((features & avx512) == avx512) isa = FP8CORE_ISA_AVX512;
#    if defined(FP8CORE_HAVE_AVX512_BF16)
  if ((features & avx512_bf16) == avx512_bf16) isa = FP8CORE_ISA_AVX512_BF16;
#    endif
#  endif
#endif
  return isa;
}

fp8core_isa fp8core_isa_best(void) { return fp8core_isa_of_features(fp8core_cpu_features()); }
