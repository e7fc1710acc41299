/** \file
 * What the subcommands of fp8lm share: exit codes, messages, parsing of arguments.
 */
#ifndef FP8LM_COMMAND_H
#define FP8LM_COMMAND_H

#include <getopt.h>
#include <stdint.h>
#include <stdio.h>

#include "fp8core/fp8core.h"

/** Exit codes, the same for every subcommand; docs/fp8lm.md lists them. */
enum {
  FP8LM_EXIT_SUCCESS = 0,
  /** Something failed while running: a file that cannot be read or is malformed, a device that is not there. */
  FP8LM_EXIT_FAILURE = 1,
  /** The command line is wrong; nothing was done. */
  FP8LM_EXIT_USAGE = 2,
  /** A run was ended by a signal, in good order. */
  FP8LM_EXIT_SIGNAL = 130
};

/** One entry of a table of subcommands; the table ends with a NULL name. */
typedef struct fp8lm_command {
  const char *name;
  /** One line for the list of commands. */
  const char *summary;
  /** Runs it with argv[0] the subcommand's own name; returns an exit code. */
  int (*run)(int argc, char **argv);
} fp8lm_command;

/**
 * Runs the entry of \p commands named argv[1]. Prints what exists, and returns FP8LM_EXIT_USAGE, when there is none.
 * \param prefix what was typed so far ("fp8lm bench"), for messages.
 * \param kind what the help calls an entry: "command", "benchmark".
 */
int fp8lm_dispatch(const char *prefix, const char *kind, const fp8lm_command *commands, int argc, char **argv);

/** Prints the names and summaries of \p commands, indented. */
void fp8lm_print_commands(FILE *stream, const fp8lm_command *commands);

/** Prints \p text with its control characters escaped, as fp8lm_printable() does: names of files may hold any. */
void fp8lm_print_text(FILE *stream, const char *text);

/** Prints "PREFIX: MESSAGE" and a newline on stderr, the message as fp8lm_print_text(), after what is due on stdout,
 * and returns \p exit_code. */
int fp8lm_complain(int exit_code, const char *prefix, const char *format, ...) FP8CORE_PRINTF(3, 4);

/**
 * Explains a '?' or ':' of getopt_long() (called with opterr 0 and an option string that starts with ':') on stderr,
 * with the options that exist. Returns FP8LM_EXIT_USAGE.
 */
int fp8lm_option_error(const char *prefix, int result, char *const *argv, const struct option *options);

/** Parses a whole decimal number within [minimum, maximum]. Returns 0, or -1 after a message that names \p option. */
int fp8lm_parse_integer(const char *prefix, const char *option, const char *text, int64_t minimum, int64_t maximum,
                        int64_t *value);

/** The same for a finite decimal fraction; one that isn't 0 but too small for a double is refused. */
int fp8lm_parse_real(const char *prefix, const char *option, const char *text, double minimum, double maximum,
                     double *value);

/** The subcommands, one file each. */
int fp8lm_bench(int argc, char **argv);
int fp8lm_bench_core(int argc, char **argv);
int fp8lm_data(int argc, char **argv);
int fp8lm_inspect(int argc, char **argv);
int fp8lm_report(int argc, char **argv);

/** Of builds with libfp8zero and libfp8gpt (FP8LM_HAVE_PLAN). */
int fp8lm_plan(int argc, char **argv);

/** Of builds with libfp8optim and libfp8gpt (FP8LM_HAVE_TRAIN). */
int fp8lm_generate(int argc, char **argv);
int fp8lm_train(int argc, char **argv);

/** Of builds with these and libfp8comm (FP8LM_HAVE_ABLATE). */
int fp8lm_ablate(int argc, char **argv);
int fp8lm_ablate_allreduce(int argc, char **argv);

#endif
