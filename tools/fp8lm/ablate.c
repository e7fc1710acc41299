// fp8lm ablate: a table of ablations, one file each.
#include <string.h>

#include "command.h"

static const fp8lm_command commands[] = {
  {"allreduce", "scalings of the FP8 gradient all-reduce, on gradients of a training run", fp8lm_ablate_allreduce},
  {NULL, NULL, NULL},
};

int fp8lm_ablate(int argc, char **argv) {
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    printf("Usage: fp8lm ablate ABLATION [OPTION]...\n"
           "\n"
           "Shows what a part of the method is good for: with it and without, beside each other.\n"
           "\n"
           "Ablations:\n");
    fp8lm_print_commands(stdout, commands);
    printf("\n'fp8lm ablate ABLATION --help' describes an ablation and its options.\n");
    return FP8LM_EXIT_SUCCESS;
  }
  return fp8lm_dispatch("fp8lm ablate", "ablation", commands, argc, argv);
}
