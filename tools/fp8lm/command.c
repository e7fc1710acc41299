#include "command.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

void fp8lm_print_commands(FILE *stream, const fp8lm_command *commands) {
  for (const fp8lm_command *command = commands; command->name; command++) {
    fprintf(stream, "  %-10s %s\n", command->name, command->summary);
  }
}

static void list_names(FILE *stream, const fp8lm_command *commands) {
  for (const fp8lm_command *command = commands; command->name; command++) {
    fprintf(stream, "%s%s", command == commands ? "" : ", ", command->name);
  }
}

int fp8lm_dispatch(const char *prefix, const char *kind, const fp8lm_command *commands, int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "%s: no %s given; %ss are ", prefix, kind, kind);
  } else {
    for (const fp8lm_command *command = commands; command->name; command++) {
      if (strcmp(command->name, argv[1]) == 0) return command->run(argc - 1, argv + 1);
    }
    fprintf(stderr, "%s: unknown %s '", prefix, argv[1][0] == '-' ? "option" : kind);
    fp8lm_print_text(stderr, argv[1]);
    fprintf(stderr, "'; %ss are ", kind);
  }
  list_names(stderr, commands);
  fprintf(stderr, "; see '%s --help'\n", prefix);
  return FP8LM_EXIT_USAGE;
}

void fp8lm_print_text(FILE *stream, const char *text) {
  const size_t length = strlen(text);
  for (size_t i = 0; i < length;) {
    char printable[FP8LM_PRINTABLE_BYTES];
    i += fp8lm_printable(text + i, length - i, printable);
    fputs(printable, stream);
  }
}

int fp8lm_complain(int exit_code, const char *prefix, const char *format, ...) {
  char *message = NULL;
  va_list arguments;
  // So that both have their order in one file. Whoever ends the program looks at the stream's error.
  (void)fflush(stdout);
  va_start(arguments, format);
  const int length = vasprintf(&message, format, arguments);
  va_end(arguments);
  fprintf(stderr, "%s: ", prefix);
  fp8lm_print_text(stderr, length < 0 ? format : message);
  fputc('\n', stderr);
  if (length >= 0) free(message);
  return exit_code;
}

int fp8lm_option_error(const char *prefix, int result, char *const *argv, const struct option *options) {
  const struct option *known = NULL;
  for (const struct option *option = options; option->name; option++) {
    if (optopt != 0 && option->val == optopt) known = option;
  }
  if (result == ':' && known) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "option '--%s' needs a value; see '%s --help'", known->name,
                          prefix);
  }
  if (known && known->has_arg == no_argument) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, prefix, "option '--%s' takes no value; see '%s --help'", known->name,
                          prefix);
  }
  // getopt has moved past a long option, but not past a cluster of short ones.
  if (optopt > 0 && optopt < 128) {
    fprintf(stderr, "%s: unknown option '-%c'; options are ", prefix, optopt);
  } else {
    fprintf(stderr, "%s: unknown or ambiguous option '", prefix);
    fp8lm_print_text(stderr, argv[optind - 1]);
    fprintf(stderr, "'; options are ");
  }
  for (const struct option *option = options; option->name; option++) {
    fprintf(stderr, "%s--%s", option == options ? "" : ", ", option->name);
  }
  fprintf(stderr, "; see '%s --help'\n", prefix);
  return FP8LM_EXIT_USAGE;
}

int fp8lm_parse_integer(const char *prefix, const char *option, const char *text, int64_t minimum, int64_t maximum,
                        int64_t *value) {
  char *end = NULL;
  errno = 0;
  const long long parsed = strtoll(text, &end, 10);
  // strtoll would skip white space.
  const int starts_well = (text[0] >= '0' && text[0] <= '9') || text[0] == '-';
  if (!starts_well || end == text || *end != '\0' || errno == ERANGE || parsed < minimum || parsed > maximum) {
    fp8lm_complain(0, prefix, "%s is '%s', expected a whole number from %" PRId64 " to %" PRId64, option, text, minimum,
                   maximum);
    return -1;
  }
  *value = parsed;
  return 0;
}

int fp8lm_parse_real(const char *prefix, const char *option, const char *text, double minimum, double maximum,
                     double *value) {
  char *end = NULL;
  errno = 0;
  const double parsed = strtod(text, &end);
  const int too_small = errno == ERANGE && parsed == 0.0;
  // strtod() takes hexadecimal numbers, too.
  const int starts_well =
    ((text[0] >= '0' && text[0] <= '9') || text[0] == '.' || text[0] == '-') && !strpbrk(text, "xX");
  if (!starts_well || end == text || *end != '\0' || too_small || !(parsed >= minimum && parsed <= maximum)) {
    // 15 digits: limits as they are written.
    fp8lm_complain(0, prefix, "%s is '%s', expected a %s from %.15g to %.15g", option, text,
                   too_small ? "number that a double holds," : "number", minimum, maximum);
    return -1;
  }
  *value = parsed;
  return 0;
}
