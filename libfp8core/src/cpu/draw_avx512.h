// fp8core_draw() in AVX-512: see FP8CORE_ROUND_STOCHASTIC. For files that are compiled with its flags.
#ifndef FP8CORE_CPU_DRAW_AVX512_H
#define FP8CORE_CPU_DRAW_AVX512_H

#include <immintrin.h>
#include <stdint.h>

// Both keys of each of the generator's rounds.
typedef struct fp8core_draw_keys {
  __m512i rounds[10][2];
} fp8core_draw_keys;

static inline __attribute__((always_inline)) fp8core_draw_keys fp8core_draw_keys_of(uint64_t seed) {
  fp8core_draw_keys keys;
  for (uint32_t round = 0; round < 10; round++) {
    keys.rounds[round][0] = _mm512_set1_epi64((uint32_t)seed + round * UINT32_C(0x9E3779B9));
    keys.rounds[round][1] = _mm512_set1_epi64((uint32_t)(seed >> 32) + round * UINT32_C(0xBB67AE85));
  }
  return keys;
}

// The draws of 64 elements from `block` on, sixteen blocks of the generator. In lanes of 64 bits, of which the
// multiplication reads the lower half only, so that the upper one may hold anything.
static inline __attribute__((always_inline)) void fp8core_draw64(const fp8core_draw_keys *keys, uint32_t tensor_id,
                                                                 uint32_t step, uint64_t block, __m512i draws[4]) {
  // Position p of the output of unpack operations below holds generator block (p % 4) * 4 + p / 4.
  const __m512i even_offsets = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i odd_offsets = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  const __m512i multiplier0 = _mm512_set1_epi64(0xD2511F53);
  const __m512i multiplier1 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i first = _mm512_set1_epi64((long long)block);
  __m512i a0 = _mm512_add_epi64(first, even_offsets);
  __m512i b0 = _mm512_add_epi64(first, odd_offsets);
  __m512i a1 = _mm512_srli_epi64(a0, 32);
  __m512i b1 = _mm512_srli_epi64(b0, 32);
  __m512i a2 = _mm512_set1_epi64(tensor_id);
  __m512i b2 = a2;
  __m512i a3 = _mm512_set1_epi64(step);
  __m512i b3 = a3;
  for (int round = 0; round < 10; round++) {
    const __m512i a_product0 = _mm512_mul_epu32(a0, multiplier0);
    const __m512i a_product1 = _mm512_mul_epu32(a2, multiplier1);
    const __m512i b_product0 = _mm512_mul_epu32(b0, multiplier0);
    const __m512i b_product1 = _mm512_mul_epu32(b2, multiplier1);
    a0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a_product1, 32), a1, keys->rounds[round][0], 0x96);
    b0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b_product1, 32), b1, keys->rounds[round][0], 0x96);
    a2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a_product0, 32), a3, keys->rounds[round][1], 0x96);
    b2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b_product0, 32), b3, keys->rounds[round][1], 0x96);
    a1 = a_product1;
    b1 = b_product1;
    a3 = a_product0;
    b3 = b_product0;
  }
  const __mmask16 odd = 0xaaaa;
  const __m512i word0 = _mm512_mask_mov_epi32(a0, odd, _mm512_slli_epi64(b0, 32));
  const __m512i word1 = _mm512_mask_mov_epi32(a1, odd, _mm512_slli_epi64(b1, 32));
  const __m512i word2 = _mm512_mask_mov_epi32(a2, odd, _mm512_slli_epi64(b2, 32));
  const __m512i word3 = _mm512_mask_mov_epi32(a3, odd, _mm512_slli_epi64(b3, 32));
  const __m512i low01 = _mm512_unpacklo_epi32(word0, word1);
  const __m512i high01 = _mm512_unpackhi_epi32(word0, word1);
  const __m512i low23 = _mm512_unpacklo_epi32(word2, word3);
  const __m512i high23 = _mm512_unpackhi_epi32(word2, word3);
  draws[0] = _mm512_unpacklo_epi64(low01, low23);
  draws[1] = _mm512_unpackhi_epi64(low01, low23);
  draws[2] = _mm512_unpacklo_epi64(high01, high23);
  draws[3] = _mm512_unpackhi_epi64(high01, high23);
}

#endif
