// fp8lm bench: a table of benchmarks, one file each.
#include <string.h>

#include "command.h"

static const fp8lm_command commands[] = {
  {"core", "casts in GB/s and matrix products in GFLOP/s, for every tier and GPU", fp8lm_bench_core},
  {NULL, NULL, NULL},
};

int fp8lm_bench(int argc, char **argv) {
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    printf("Usage: fp8lm bench BENCHMARK [OPTION]...\n"
           "\n"
           "Measures kernels beside the machine's own limits, taken in the same run.\n"
           "\n"
           "Benchmarks:\n");
    fp8lm_print_commands(stdout, commands);
    printf("\n'fp8lm bench BENCHMARK --help' describes a benchmark and its options.\n");
    return FP8LM_EXIT_SUCCESS;
  }
  return fp8lm_dispatch("fp8lm bench", "benchmark", commands, argc, argv);
}
