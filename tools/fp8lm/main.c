// fp8lm: the command of the suite. A subcommand is one file and one line in a table.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "command.h"

static int help(int argc, char **argv);

static const fp8lm_command commands[] = {
#if defined(FP8LM_HAVE_TRAIN)
  {"ablate", "show what a part of the method is good for", fp8lm_ablate},
#endif
  {"bench", "measure kernels beside the machine's own limits", fp8lm_bench},
  {"data", "make training data: tokenize text, train a BPE", fp8lm_data},
#if defined(FP8LM_HAVE_TRAIN)
  {"generate", "continue a text with a trained model", fp8lm_generate},
#endif
  {"inspect", "show what quantisation does to the tensors of a file", fp8lm_inspect},
#if defined(FP8LM_HAVE_TRAIN)
  {"plan", "compute memory and traffic of training on many ranks", fp8lm_plan},
#endif
  {"report", "write a page that shows training runs beside each other", fp8lm_report},
#if defined(FP8LM_HAVE_TRAIN)
  {"train", "train a GPT model", fp8lm_train},
#endif
  {"help", "describe a command: fp8lm help COMMAND", help},
  {NULL, NULL, NULL},
};

static void print_help(void) {
  printf("Usage: fp8lm COMMAND [OPTION]... [ARGUMENT]...\n"
         "\n"
         "Tools for training in 8-bit floating point.\n"
         "\n"
         "Commands:\n");
  fp8lm_print_commands(stdout, commands);
  printf("\n"
         "Options:\n"
         "  --help     print this text\n"
         "  --version  print the versions of the tool and of libfp8core\n"
         "\n"
         "'fp8lm COMMAND --help' describes a command and its options.\n"
         "Exit codes: 0 success; 1 a failure at run time, with a message on standard error; 2 wrong usage;\n"
         "130 'train' was ended by a signal.\n");
}

static int help(int argc, char **argv) {
  if (argc < 2) {
    print_help();
    return FP8LM_EXIT_SUCCESS;
  }
  // Of the commands, these have others below them.
  static const char *const groups[] = {"ablate", "bench", "data"};
  int most = 2;
  for (size_t i = 0; i < sizeof(groups) / sizeof(*groups); i++)
    if (strcmp(argv[1], groups[i]) == 0) most = 3;
  if (argc > most)
    return fp8lm_complain(FP8LM_EXIT_USAGE, "fp8lm help", "unexpected argument '%s'; see 'fp8lm --help'", argv[most]);
  // "help bench core" runs "bench core --help".
  char option[] = "--help";
  char *arguments[8] = {argv[0]};
  int count = 1;
  for (int i = 1; i < argc; i++) arguments[count++] = argv[i];
  arguments[count++] = option;
  if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0) {
    print_help();
    return FP8LM_EXIT_SUCCESS;
  }
  return fp8lm_dispatch("fp8lm", "command", commands, count, arguments);
}

// A file must not get the number of a standard stream that is closed, or what is printed would land in it. Such a
// stream fails when it is used, as it would without a file in its place: input cannot be read, nor output written.
static int fill_standard_streams(void) {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++) {
    if (fcntl(stream, F_GETFD) >= 0 || errno != EBADF) continue;
    if (open("/dev/null", stream == STDOUT_FILENO ? O_RDONLY : O_WRONLY) != stream) return -1;
  }
  return 0;
}

int main(int argc, char **argv) {
  int result;
  if (fill_standard_streams() != 0)
    return fp8lm_complain(FP8LM_EXIT_FAILURE, "fp8lm", "a standard stream is closed, and /dev/null cannot be opened");
  // A limit on the size of files is an error of write(), as a full disk is.
  (void)signal(SIGXFSZ, SIG_IGN);
  if (argc > 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--version") == 0)) {
    result = fp8lm_complain(FP8LM_EXIT_USAGE, "fp8lm", "unexpected argument '%s' after %s", argv[2], argv[1]);
  } else if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    print_help();
    result = FP8LM_EXIT_SUCCESS;
  } else if (argc > 1 && strcmp(argv[1], "--version") == 0) {
    printf("fp8lm %s (libfp8core %s)\n", FP8LM_VERSION, fp8core_version());
    result = FP8LM_EXIT_SUCCESS;
  } else {
    result = fp8lm_dispatch("fp8lm", "command", commands, argc, argv);
  }
  // An earlier write may have failed, and what for is not kept.
  const int failed_before = ferror(stdout);
  if (fflush(stdout) != 0)
    return fp8lm_complain(FP8LM_EXIT_FAILURE, "fp8lm", "cannot write to standard output: %s", strerror(errno));
  if (failed_before) return fp8lm_complain(FP8LM_EXIT_FAILURE, "fp8lm", "cannot write to standard output");
  return result;
}
