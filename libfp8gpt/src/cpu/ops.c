#include "ops.h"

#include "internal.h"

const fp8gpt_ops *fp8gpt_cpu_ops(fp8core_isa isa) {
#if defined(FP8GPT_HAVE_AVX512)
  if (isa >= FP8CORE_ISA_AVX512) return &fp8gpt_ops_avx512;
#endif
#if defined(FP8GPT_HAVE_AVX2)
  if (isa >= FP8CORE_ISA_AVX2) return &fp8gpt_ops_avx2;
#endif
  (void)isa;
  return &fp8gpt_ops_scalar;
}

// Three rows, each padded to whole vectors of any tier.
int64_t fp8gpt_row_scratch(int64_t columns) { return 3 * (columns + 16); }

int64_t fp8gpt_attention_scratch(int64_t length, int head_dim, int heads_per_kv_head) {
  const int64_t stride = (head_dim + 15) / 16 * 16;
  const int64_t blocks =
    3 * FP8GPT_QUERY_BLOCK * stride + 5 * FP8GPT_KEY_BLOCK * stride + 3 * FP8GPT_QUERY_BLOCK * FP8GPT_KEY_BLOCK;
  return blocks + heads_per_kv_head * length * (stride + 1);
}
