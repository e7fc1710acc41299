#include "machine.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fp8core/context.h"

#if defined(__x86_64__)
#  include <emmintrin.h>
#endif

double fp8lm_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct team {
  // Held until all threads were started, or not: `abandoned` then tells them to go.
  pthread_mutex_t gate;
  int abandoned;
  pthread_barrier_t barrier;
  void (*work)(void *argument, int thread);
  void *argument;
  int repeats;
  double seconds;
} team;

typedef struct member {
  team *team;
  int thread;
  pthread_t handle;
} member;

static void *run_member(void *pointer) {
  const member *self = pointer;
  team *shared = self->team;
  pthread_mutex_lock(&shared->gate);
  const int abandoned = shared->abandoned;
  pthread_mutex_unlock(&shared->gate);
  if (abandoned) return NULL;
  // A quarter more runs warm up: caches, and the clock of a core that was asleep.
  for (int i = 0; i <= shared->repeats / 4; i++) shared->work(shared->argument, self->thread);
  pthread_barrier_wait(&shared->barrier);
  const double start = self->thread == 0 ? fp8lm_now() : 0.0;
  for (int i = 0; i < shared->repeats; i++) shared->work(shared->argument, self->thread);
  pthread_barrier_wait(&shared->barrier);
  if (self->thread == 0) shared->seconds = fp8lm_now() - start;
  return NULL;
}

// The idle workers of an OpenMP team spin for some milliseconds before they sleep, and would take a core from ours.
static void wait_for_idle_workers(void) {
  const struct timespec pause = {0, 10 * 1000 * 1000};
  (void)nanosleep(&pause, NULL);
}

// Seconds that `repeats` runs take on all threads at once, after some that warm up; starting threads is not counted.
// 0 when they cannot be started.
static double time_team(int threads, int repeats, void (*work)(void *argument, int thread), void *argument) {
  team shared = {.work = work, .argument = argument, .repeats = repeats};
  member *members = calloc((size_t)threads, sizeof(*members));
  if (!members) return 0.0;
  if (pthread_mutex_init(&shared.gate, NULL) != 0 ||
      pthread_barrier_init(&shared.barrier, NULL, (unsigned)threads) != 0) {
    free(members);
    return 0.0;
  }
  pthread_mutex_lock(&shared.gate);
  int started = 1;
  members[0] = (member){.team = &shared, .thread = 0};
  while (started < threads) {
    members[started] = (member){.team = &shared, .thread = started};
    if (pthread_create(&members[started].handle, NULL, run_member, &members[started]) != 0) break;
    started++;
  }
  shared.abandoned = started != threads;
  pthread_mutex_unlock(&shared.gate);
  run_member(&members[0]);
  for (int i = 1; i < started; i++) pthread_join(members[i].handle, NULL);
  pthread_barrier_destroy(&shared.barrier);
  pthread_mutex_destroy(&shared.gate);
  free(members);
  return shared.seconds;
}

typedef struct copy_work {
  int threads;
  char *destination;
  const char *source;
  size_t bytes;
} copy_work;

// The part of a thread, cut at multiples of 64 bytes so that no cache line is shared.
static size_t part_of(const copy_work *work, int thread, size_t *start) {
  const size_t lines = work->bytes / 64;
  const size_t first = lines * (size_t)thread / (size_t)work->threads;
  const size_t last = lines * ((size_t)thread + 1) / (size_t)work->threads;
  *start = first * 64;
  return (last - first) * 64;
}

static void copy_plain(void *argument, int thread) {
  const copy_work *work = argument;
  size_t start;
  const size_t bytes = part_of(work, thread, &start);
  memcpy(work->destination + start, work->source + start, bytes);
}

#if defined(__x86_64__)
static void copy_streaming(void *argument, int thread) {
  const copy_work *work = argument;
  size_t start;
  const size_t bytes = part_of(work, thread, &start);
  for (size_t i = 0; i < bytes; i += 64) {
    const __m128i *source = (const __m128i *)(const void *)(work->source + start + i);
    __m128i *destination = (__m128i *)(void *)(work->destination + start + i);
    const __m128i first = _mm_loadu_si128(source);
    const __m128i second = _mm_loadu_si128(source + 1);
    const __m128i third = _mm_loadu_si128(source + 2);
    const __m128i fourth = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, first);
    _mm_stream_si128(destination + 1, second);
    _mm_stream_si128(destination + 2, third);
    _mm_stream_si128(destination + 3, fourth);
  }
  _mm_sfence();
}
#endif

double fp8lm_copy_bandwidth(int threads, int repeats, void *destination, const void *source, size_t bytes) {
  copy_work work = {threads, destination, source, bytes & ~(size_t)63};
  const double moved = 2.0 * (double)work.bytes * repeats;
  wait_for_idle_workers();
  const double plain = time_team(threads, repeats, copy_plain, &work);
  double best = plain > 0.0 ? moved / plain : 0.0;
#if defined(__x86_64__)
  if (((uintptr_t)destination & 15) == 0) {
    const double streaming = time_team(threads, repeats, copy_streaming, &work);
    if (streaming > 0.0 && moved / streaming > best) best = moved / streaming;
  }
#endif
  return best;
}

const char *fp8lm_peak_name(fp8lm_peak peak) {
  static const char *const names[] = {"fp32-fma-avx2", "fp32-fma-avx512", "bf16-dot"};
  return names[peak];
}

double fp8lm_share_of_peak(double *peak, double rate) {
  if (!(*peak > 0.0)) return (double)NAN;
  if (rate > *peak) *peak = rate;
  return rate / *peak;
}

#if defined(FP8LM_HAVE_X86_PEAKS)

// Each loop is one piece of assembler, so that no compiler folds, reorders or spills it at any level of optimisation.
// The multiplicands are broadcast from memory; the accumulators grow, so that the sums are ordinary numbers.

#  define REPEAT_12(macro)                                                                                             \
    macro(0) macro(1) macro(2) macro(3) macro(4) macro(5) macro(6) macro(7) macro(8) macro(9) macro(10) macro(11)
#  define REPEAT_24(macro)                                                                                             \
    REPEAT_12(macro)                                                                                                   \
    macro(12) macro(13) macro(14) macro(15) macro(16) macro(17) macro(18) macro(19) macro(20) macro(21) macro(22)      \
      macro(23)

#  define CLOBBER_16                                                                                                   \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",         \
      "xmm13", "xmm14", "xmm15"
#  define CLOBBER_26                                                                                                   \
    CLOBBER_16, "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25"

#  define CLEAR_YMM(n) "vxorps %%ymm" #  n ", %%ymm" #  n ", %%ymm" #  n "\n\t"
#  define CLEAR_ZMM(n) "vpxord %%zmm" #  n ", %%zmm" #  n ", %%zmm" #  n "\n\t"
#  define FMA_YMM(n) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #  n "\n\t"
#  define FMA_ZMM(n) "vfmadd231ps %%zmm24, %%zmm25, %%zmm" #  n "\n\t"
#  define DOT_ZMM(n) "vdpbf16ps %%zmm24, %%zmm25, %%zmm" #  n "\n\t"

// clang-format off
__attribute__((target("avx2,fma"))) static void fma_avx2(uint64_t iterations) {
  static const float factors[2] = {0.75f, 0x1p-20f};
  __asm__ volatile(REPEAT_12(CLEAR_YMM)
                   "vbroadcastss (%1), %%ymm12\n\t"
                   "vbroadcastss 4(%1), %%ymm13\n\t"
                   "1:\n\t" REPEAT_12(FMA_YMM)
                   "dec %0\n\t"
                   "jnz 1b\n\t"
                   "vzeroupper"
                   : "+r"(iterations) : "r"(factors) : "cc", "memory", CLOBBER_16);
}

__attribute__((target("avx512f"))) static void fma_avx512(uint64_t iterations) {
  static const float factors[2] = {0.75f, 0x1p-20f};
  __asm__ volatile(REPEAT_24(CLEAR_ZMM)
                   "vbroadcastss (%1), %%zmm24\n\t"
                   "vbroadcastss 4(%1), %%zmm25\n\t"
                   "1:\n\t" REPEAT_24(FMA_ZMM)
                   "dec %0\n\t"
                   "jnz 1b\n\t"
                   "vzeroupper"
                   : "+r"(iterations) : "r"(factors) : "cc", "memory", CLOBBER_26);
}

__attribute__((target("avx512f,avx512bf16"))) static void bf16_dot(uint64_t iterations) {
  // Pairs of BF16: 0.75, and 2^-20.
  static const uint32_t factors[2] = {0x3f403f40, 0x35803580};
  __asm__ volatile(REPEAT_24(CLEAR_ZMM)
                   "vbroadcastss (%1), %%zmm24\n\t"
                   "vbroadcastss 4(%1), %%zmm25\n\t"
                   "1:\n\t" REPEAT_24(DOT_ZMM)
                   "dec %0\n\t"
                   "jnz 1b\n\t"
                   "vzeroupper"
                   : "+r"(iterations) : "r"(factors) : "cc", "memory", CLOBBER_26);
}
// clang-format on

static const struct {
  void (*loop)(uint64_t iterations);
  double flop_an_iteration;
  uint32_t features;
} peaks[] = {
  [FP8LM_PEAK_FMA_AVX2] = {fma_avx2, 12 * 8 * 2, FP8CORE_CPU_AVX2 | FP8CORE_CPU_FMA},
  [FP8LM_PEAK_FMA_AVX512] = {fma_avx512, 24 * 16 * 2, FP8CORE_CPU_AVX512F},
  [FP8LM_PEAK_BF16_DOT] = {bf16_dot, 24 * 16 * 4, FP8CORE_CPU_AVX512F | FP8CORE_CPU_AVX512BF16},
};

int fp8lm_peak_available(fp8lm_peak peak) {
  return (fp8core_cpu_features() & peaks[peak].features) == peaks[peak].features;
}

typedef struct peak_work {
  void (*loop)(uint64_t iterations);
  uint64_t iterations;
} peak_work;

static void run_peak(void *argument, int thread) {
  (void)thread;
  const peak_work *work = argument;
  work->loop(work->iterations);
}

double fp8lm_peak_rate(fp8lm_peak peak, int threads, double seconds) {
  if (!fp8lm_peak_available(peak)) return 0.0;
  // A repeat is a fifth of a millisecond or so: short beside `seconds`, long beside the clock.
  peak_work work = {peaks[peak].loop, 50000};
  wait_for_idle_workers();
  const double one = time_team(threads, 1, run_peak, &work);
  if (one <= 0.0) return 0.0;
  const int repeats = seconds / one < 1.0 ? 1 : seconds / one > 1e6 ? 1000000 : (int)(seconds / one);
  const double elapsed = time_team(threads, repeats, run_peak, &work);
  return elapsed > 0.0 ? peaks[peak].flop_an_iteration * (double)work.iterations * repeats * threads / elapsed : 0.0;
}

#else

int fp8lm_peak_available(fp8lm_peak peak) {
  (void)peak;
  return 0;
}

double fp8lm_peak_rate(fp8lm_peak peak, int threads, double seconds) {
  (void)peak;
  (void)threads;
  (void)seconds;
  return 0.0;
}

#endif
