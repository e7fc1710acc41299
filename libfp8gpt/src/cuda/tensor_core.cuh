// Products of BF16 on tensor cores, and how their operands come: PTX for compute capability 8.0 and later, and for the
// tests the same on the host, with the layouts of registers that the PTX ISA states (tests/gpu/emulation.h).
#ifndef FP8GPT_CUDA_TENSOR_CORE_CUH
#define FP8GPT_CUDA_TENSOR_CORE_CUH

#include "numerics.h"
#include "platform.cuh"

// d [16, 8] += a [16, 16] b [16, 8] of a warp. Lane i has of d the columns 2 (i % 4) and the next, of rows i / 4
// (elements 0, 1) and i / 4 + 8 (2, 3); of a the same rows and columns, then the same 8 columns further on, two a word;
// of b in the same way its column i / 4. So the sums of two products that are neighbours, rounded, are an `a`.
static __device__ __forceinline__ void fp8gpt_multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
#if defined(FP8CORE_CUDA_EMULATION)
  emulation::multiply_m16n8k16(d, a, b0, b1);
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four matrices of 8 x 8 from shared memory, as operands of a product. Lane i names row i % 8 of matrix i / 8, 16 bytes
// at a multiple of 16.
static __device__ __forceinline__ void fp8gpt_load_matrices(const uint16_t *row, uint32_t (&matrices)[4]) {
#if defined(FP8CORE_CUDA_EMULATION)
  emulation::load_matrices(row, false, matrices);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"((uint32_t)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

static __device__ __forceinline__ void fp8gpt_load_matrices_transposed(const uint16_t *row, uint32_t (&matrices)[4]) {
#if defined(FP8CORE_CUDA_EMULATION)
  emulation::load_matrices(row, true, matrices);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"((uint32_t)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

// Starts to copy 16 bytes of global memory to shared memory; zeros, and `from` is not read, if not `there`.
static __device__ __forceinline__ void fp8gpt_copy_async(void *to, const void *from, bool there) {
#if defined(FP8CORE_CUDA_EMULATION)
  emulation::copy_async(to, there ? from : NULL);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
#endif
}

// Waits for the thread's own copies; a barrier makes them visible to the others.
static __device__ __forceinline__ void fp8gpt_wait_for_copies(void) {
#if defined(FP8CORE_CUDA_EMULATION)
  emulation::wait_for_copies();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Two values as BF16 in a word, rounded to nearest, ties to even.
static __device__ __forceinline__ uint32_t fp8gpt_pack_bf16(float low, float high) {
#if defined(FP8CORE_CUDA_EMULATION)
  const float values[2] = {low, high};
  uint32_t word = 0;
  for (int i = 0; i < 2; i++) {
    const uint32_t bits = fp8core_float_bits(values[i]);
    const uint32_t code = values[i] != values[i] ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    word |= code << (16 * i);
  }
  return word;
#else
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#endif
}

// 2^x with a relative error of at most 2^-22; 0 instead of a subnormal.
static __device__ __forceinline__ float fp8gpt_exp2(float x) {
#if defined(FP8CORE_CUDA_EMULATION)
  const float value = exp2f(x);
  return value < 0x1p-126f ? 0.0f : value;
#else
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
#endif
}

#endif
