// fp8core_draw() in AVX2: see FP8CORE_ROUND_STOCHASTIC. For files that are compiled with its flags.
#ifndef FP8CORE_CPU_DRAW_AVX2_H
#define FP8CORE_CPU_DRAW_AVX2_H

#include <immintrin.h>
#include <stdint.h>

static inline __attribute__((always_inline)) __m256i fp8core_xor3(__m256i a, __m256i b, __m256i c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}

// The draws of 32 elements from `block` on, eight blocks of the generator. In lanes of 64 bits, of which the
// multiplication reads the lower half only, so that the upper one may hold anything.
static inline __attribute__((always_inline)) void fp8core_draw32(uint64_t seed, uint32_t tensor_id, uint32_t step,
                                                                 uint64_t block, __m256i draws[4]) {
  // Position p of the output of the unpack operations below holds generator block (p % 4) * 2 + p / 4.
  const __m256i even_offsets = _mm256_setr_epi64x(0, 4, 1, 5);
  const __m256i odd_offsets = _mm256_setr_epi64x(2, 6, 3, 7);
  const __m256i multiplier0 = _mm256_set1_epi64x(0xD2511F53);
  const __m256i multiplier1 = _mm256_set1_epi64x(0xCD9E8D57);
  const __m256i first = _mm256_set1_epi64x((long long)block);
  __m256i a0 = _mm256_add_epi64(first, even_offsets);
  __m256i b0 = _mm256_add_epi64(first, odd_offsets);
  __m256i a1 = _mm256_srli_epi64(a0, 32);
  __m256i b1 = _mm256_srli_epi64(b0, 32);
  __m256i a2 = _mm256_set1_epi64x(tensor_id);
  __m256i b2 = a2;
  __m256i a3 = _mm256_set1_epi64x(step);
  __m256i b3 = a3;
  uint32_t key0 = (uint32_t)seed;
  uint32_t key1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const __m256i keys0 = _mm256_set1_epi64x(key0);
    const __m256i keys1 = _mm256_set1_epi64x(key1);
    const __m256i a_product0 = _mm256_mul_epu32(a0, multiplier0);
    const __m256i a_product1 = _mm256_mul_epu32(a2, multiplier1);
    const __m256i b_product0 = _mm256_mul_epu32(b0, multiplier0);
    const __m256i b_product1 = _mm256_mul_epu32(b2, multiplier1);
    a0 = fp8core_xor3(_mm256_srli_epi64(a_product1, 32), a1, keys0);
    b0 = fp8core_xor3(_mm256_srli_epi64(b_product1, 32), b1, keys0);
    a2 = fp8core_xor3(_mm256_srli_epi64(a_product0, 32), a3, keys1);
    b2 = fp8core_xor3(_mm256_srli_epi64(b_product0, 32), b3, keys1);
    a1 = a_product1;
    b1 = b_product1;
    a3 = a_product0;
    b3 = b_product0;
    key0 += UINT32_C(0x9E3779B9);
    key1 += UINT32_C(0xBB67AE85);
  }
  const __m256i word0 = _mm256_blend_epi32(a0, _mm256_slli_epi64(b0, 32), 0xaa);
  const __m256i word1 = _mm256_blend_epi32(a1, _mm256_slli_epi64(b1, 32), 0xaa);
  const __m256i word2 = _mm256_blend_epi32(a2, _mm256_slli_epi64(b2, 32), 0xaa);
  const __m256i word3 = _mm256_blend_epi32(a3, _mm256_slli_epi64(b3, 32), 0xaa);
  const __m256i low01 = _mm256_unpacklo_epi32(word0, word1);
  const __m256i high01 = _mm256_unpackhi_epi32(word0, word1);
  const __m256i low23 = _mm256_unpacklo_epi32(word2, word3);
  const __m256i high23 = _mm256_unpackhi_epi32(word2, word3);
  draws[0] = _mm256_unpacklo_epi64(low01, low23);
  draws[1] = _mm256_unpackhi_epi64(low01, low23);
  draws[2] = _mm256_unpacklo_epi64(high01, high23);
  draws[3] = _mm256_unpackhi_epi64(high01, high23);
}

#endif
