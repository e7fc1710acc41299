/** \file
 * What the machine itself can do: copy bandwidth and arithmetic peaks, measured beside the kernels.
 */
#ifndef FP8LM_MACHINE_H
#define FP8LM_MACHINE_H

#include <stddef.h>

/** Seconds of a steady clock. */
double fp8lm_now(void);

/**
 * Copies \p bytes bytes from \p source to \p destination, cut into \p threads parts, by memcpy() and by non-temporal
 * stores (on x86-64), each \p repeats times after a first one that is not timed.
 *
 * \return bytes read and written a second, of the better way; 0 when threads cannot be started.
 */
double fp8lm_copy_bandwidth(int threads, int repeats, void *destination, const void *source, size_t bytes);

/** Loops of independent multiply-adds that keep the execution units full and touch no memory. */
typedef enum fp8lm_peak {
  /** 12 accumulators of 8 floats, vfmadd231ps. */
  FP8LM_PEAK_FMA_AVX2,
  /** 24 accumulators of 16 floats, vfmadd231ps. */
  FP8LM_PEAK_FMA_AVX512,
  /** 24 accumulators of 16 floats, vdpbf16ps: pairs of BF16 products. */
  FP8LM_PEAK_BF16_DOT
} fp8lm_peak;

#define FP8LM_PEAK_COUNT 3

/** "fp32-fma-avx2", "fp32-fma-avx512", "bf16-dot". */
const char *fp8lm_peak_name(fp8lm_peak peak);

/** Whether this build and this CPU have the instructions. */
int fp8lm_peak_available(fp8lm_peak peak);

/** FLOP a second of \p threads threads at once, over about \p seconds; 0 where it is not available or threads cannot be
 * started. */
double fp8lm_peak_rate(fp8lm_peak peak, int threads, double seconds);

/** The share of \p rate in \p *peak, which was measured, and is raised to a rate beyond it: other programs may have had
 * the machine meanwhile. From 0 to 1; NaN where *peak is 0, not known, which it stays. */
double fp8lm_share_of_peak(double *peak, double rate);

#endif
