// fp8lm report: one page of several runs beside each other.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "command.h"
#include "replacement.h"
#include "report_page.h"

#define PREFIX "fp8lm report"

static const char help_text[] =
  "Usage: fp8lm report [OPTION]... RUN...\n"
  "\n"
  "Writes one HTML page that shows training runs beside each other: losses, learning rate, gradient norm, memory by\n"
  "class, throughput, FP8 statistics, warnings and configuration. The page needs no network and no other file.\n"
  "\n"
  "RUN is the folder of a run, with its log.jsonl, or a log itself. Losses are compared with those of the first RUN.\n"
  "A line of a log that cannot be read is named on standard error, left out, and listed on the page.\n"
  "\n"
  "Options:\n"
  "  --output PATH      the page (default report.html); '-' is standard output. A file that is there is replaced once\n"
  "                     the new one is whole\n"
  "  --title TEXT       title of the page (default 'Training runs')\n"
  "  --smoothing STEPS  time constant of the smoothed training loss, 0 to 1000000000; 0 shows the losses as they are\n"
  "                     (default: a hundredth of the steps)\n"
  "  --tensors N        tensors of each run of which FP8 statistics are listed, 0 to 8192 (default 200)\n"
  "  --strict           refuse a log with a line that cannot be read\n"
  "  --help             print this text\n"
  "\n"
  "Exit codes: 0 success; 1 a log could not be read or the page not written (a page that was there stays); 2 wrong "
  "usage.\n";

enum { OPTION_OUTPUT = 256, OPTION_TITLE, OPTION_SMOOTHING, OPTION_TENSORS, OPTION_STRICT, OPTION_HELP };

static const struct option options[] = {
  {"output", required_argument, NULL, OPTION_OUTPUT},
  {"title", required_argument, NULL, OPTION_TITLE},
  {"smoothing", required_argument, NULL, OPTION_SMOOTHING},
  {"tensors", required_argument, NULL, OPTION_TENSORS},
  {"strict", no_argument, NULL, OPTION_STRICT},
  {"help", no_argument, NULL, OPTION_HELP},
  {NULL, 0, NULL, 0},
};

typedef struct report_settings {
  const char *output;
  int strict;
  fp8lm_report_options page;
} report_settings;

// 0: go on; 1: done (help); -1: wrong usage.
static int parse_options(int argc, char **argv, report_settings *settings) {
  opterr = 0;
  for (;;) {
    const int option = getopt_long(argc, argv, ":", options, NULL);
    int64_t value;
    switch (option) {
    case -1: return 0;
    case OPTION_HELP: fputs(help_text, stdout); return 1;
    case OPTION_OUTPUT: settings->output = optarg; break;
    case OPTION_TITLE: settings->page.title = optarg; break;
    case OPTION_STRICT: settings->strict = 1; break;
    case OPTION_SMOOTHING:
      if (fp8lm_parse_integer(PREFIX, "--smoothing", optarg, 0, 1000000000, &settings->page.smoothing) != 0) return -1;
      break;
    case OPTION_TENSORS:
      if (fp8lm_parse_integer(PREFIX, "--tensors", optarg, 0, FP8LM_LOG_MOST_NAMES, &value) != 0) return -1;
      settings->page.most_tensors = (size_t)value;
      break;
    default: fp8lm_option_error(PREFIX, option, argv, options); return -1;
    }
  }
}

// Logs ----------------------------------------------------------------------------------------------------------------

// RUN/log.jsonl of a folder, a file as it is. NULL without memory.
static char *log_path(const char *run) {
  struct stat information;
  char *path;
  if (stat(run, &information) != 0 || !S_ISDIR(information.st_mode)) return strdup(run);
  size_t length = strlen(run);
  while (length > 1 && run[length - 1] == '/') length--;
  return asprintf(&path, "%.*s/log.jsonl", (int)length, run) < 0 ? NULL : path;
}

// What a run is called: its folder, or the file without its extension. NULL without memory.
static char *run_name(const char *path) {
  char *copy = strdup(path);
  if (!copy) return NULL;
  static const char own_name[] = "/log.jsonl";
  static const char extension[] = ".jsonl";
  size_t length = strlen(copy);
  if (length > strlen(own_name) && strcmp(copy + length - strlen(own_name), own_name) == 0) {
    length -= strlen(own_name);
  } else if (length > strlen(extension) && strcmp(copy + length - strlen(extension), extension) == 0) {
    length -= strlen(extension);
  }
  copy[length] = '\0';
  const char *slash = strrchr(copy, '/');
  if (slash && slash[1] && strcmp(slash + 1, ".") != 0 && strcmp(slash + 1, "..") != 0) {
    const size_t start = (size_t)(slash + 1 - copy);
    memmove(copy, copy + start, length - start + 1);
  }
  return copy;
}

static int read_log(const report_settings *settings, const char *path, fp8lm_run_log *log) {
  fp8lm_input input;
  fp8core_status status = fp8lm_input_open(&input, path);
  if (status == FP8CORE_OK) {
    status = fp8lm_run_log_read(&input, log);
    fp8lm_input_close(&input);
  }
  if (status != FP8CORE_OK) return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s: %s", path, fp8core_last_error());
  const char *word = settings->strict ? "" : "warning: ";
  for (size_t i = 0; i < log->problem_count; i++) {
    fp8lm_complain(0, PREFIX, "%s%s: line %" PRIu64 ": %s", word, path, log->problems[i].line,
                   log->problems[i].message);
  }
  if (log->broken_lines > log->problem_count) {
    fp8lm_complain(0, PREFIX, "%s%s: %" PRIu64 " more lines cannot be read", word, path,
                   log->broken_lines - log->problem_count);
  }
  if (log->cut_off) {
    fp8lm_complain(0, PREFIX, "warning: %s: line %" PRIu64 " is cut off: the run is still writing it, or died", path,
                   log->lines);
  }
  return settings->strict && log->broken_lines ? FP8LM_EXIT_FAILURE : FP8LM_EXIT_SUCCESS;
}

// Of runs with one name, each is called by its path.
static void tell_apart(fp8lm_report_run *runs, char *const *names, size_t count) {
  for (size_t i = 0; i < count; i++) {
    for (size_t j = 0; j < count; j++) {
      if (i != j && strcmp(names[i], names[j]) == 0) runs[i].name = runs[i].path;
    }
  }
}

// The page ------------------------------------------------------------------------------------------------------------

static int cannot_write(const char *path, const char *reason) {
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "cannot write %s: %s", path, reason);
}

static int write_file(const report_settings *settings, const fp8lm_report_run *runs, size_t count) {
  const char *path = settings->output;
  fp8lm_replacement file;
  if (fp8lm_replacement_open(&file, path) != FP8CORE_OK) return cannot_write(path, fp8core_last_error());
  fp8core_status status = fp8lm_report_write(file.stream, runs, count, &settings->page);
  if (status == FP8CORE_OK) status = fp8lm_replacement_commit(&file);
  fp8lm_replacement_discard(&file);
  if (status != FP8CORE_OK) return cannot_write(path, fp8core_last_error());
  fp8lm_print_text(stdout, path);
  printf(": %zu run%s\n", count, count == 1 ? "" : "s");
  return FP8LM_EXIT_SUCCESS;
}

static int write_page(const report_settings *settings, const fp8lm_report_run *runs, size_t count) {
  if (strcmp(settings->output, "-") != 0) return write_file(settings, runs, count);
  if (fp8lm_report_write(stdout, runs, count, &settings->page) == FP8CORE_OK) return FP8LM_EXIT_SUCCESS;
  return cannot_write("standard output", fp8core_last_error());
}

static int report(const report_settings *settings, size_t count, char **arguments) {
  fp8lm_run_log *logs = calloc(count, sizeof(*logs));
  fp8lm_report_run *runs = calloc(count, sizeof(*runs));
  char **paths = calloc(count, sizeof(*paths));
  char **names = calloc(count, sizeof(*names));
  int result = FP8LM_EXIT_SUCCESS;
  if (!logs || !runs || !paths || !names) {
    result = fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "no memory for %zu runs", count);
  } else {
    // All of them are tried, so that one look shows what is wrong.
    for (size_t i = 0; i < count; i++) {
      paths[i] = log_path(arguments[i]);
      names[i] = paths[i] ? run_name(paths[i]) : NULL;
      if (!names[i]) {
        result = fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "no memory for the name of '%s'", arguments[i]);
        break;
      }
      if (read_log(settings, paths[i], &logs[i]) != FP8LM_EXIT_SUCCESS) result = FP8LM_EXIT_FAILURE;
      runs[i] = (fp8lm_report_run){.name = names[i], .path = paths[i], .log = &logs[i]};
    }
    if (result == FP8LM_EXIT_SUCCESS) {
      tell_apart(runs, names, count);
      result = write_page(settings, runs, count);
    }
    for (size_t i = 0; i < count; i++) {
      free(paths[i]);
      free(names[i]);
      fp8lm_run_log_free(&logs[i]);
    }
  }
  free(logs);
  free(runs);
  free(paths);
  free(names);
  return result;
}

int fp8lm_report(int argc, char **argv) {
  report_settings settings = {.output = "report.html",
                              .page = {.title = "Training runs", .smoothing = -1, .most_tensors = 200}};
  const int parsed = parse_options(argc, argv, &settings);
  if (parsed != 0) return parsed > 0 ? FP8LM_EXIT_SUCCESS : FP8LM_EXIT_USAGE;
  if (argc == optind) return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "no run given; see '" PREFIX " --help'");
  return report(&settings, (size_t)(argc - optind), argv + optind);
}
