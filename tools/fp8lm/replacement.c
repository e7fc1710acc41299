#include "replacement.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Files that are being written, for signals that end the program; NULL: none.
static const char *volatile unfinished[FP8LM_MOST_REPLACEMENTS];

static void end_by_signal(int signal_number) {
  for (int i = 0; i < FP8LM_MOST_REPLACEMENTS; i++) {
    const char *path = unfinished[i];
    if (path) (void)unlink(path);
  }
  // Its handler is the default one by now.
  (void)raise(signal_number);
}

static void catch_signals(void) {
  static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
  for (size_t i = 0; i < sizeof(ends) / sizeof(*ends); i++) {
    struct sigaction action;
    // One that is ignored, as nohup does, stays so.
    if (sigaction(ends[i], NULL, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    memset(&action, 0, sizeof(action));
    action.sa_handler = end_by_signal;
    action.sa_flags = (int)SA_RESETHAND;
    (void)sigaction(ends[i], &action, NULL);
  }
}

static fp8core_status failed(const char *reason) {
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s", reason);
}

// mkstemp(), with no moment at which a signal would leave the file behind.
static int create_temporary(char *path) {
  sigset_t all;
  sigset_t before;
  int place = 0;
  while (place < FP8LM_MOST_REPLACEMENTS && unfinished[place]) place++;
  if (place == FP8LM_MOST_REPLACEMENTS) {
    errno = EMFILE;
    return -1;
  }
  (void)sigfillset(&all);
  (void)sigprocmask(SIG_BLOCK, &all, &before);
  const int descriptor = mkstemp(path);
  const int reason = errno;
  if (descriptor >= 0) unfinished[place] = path;
  (void)sigprocmask(SIG_SETMASK, &before, NULL);
  errno = reason;
  return descriptor;
}

static void forget(fp8lm_replacement *replacement) {
  for (int i = 0; i < FP8LM_MOST_REPLACEMENTS; i++) {
    if (unfinished[i] == replacement->temporary) unfinished[i] = NULL;
  }
  free(replacement->temporary);
  memset(replacement, 0, sizeof(*replacement));
}

fp8core_status fp8lm_replacement_open(fp8lm_replacement *replacement, const char *path) {
  struct stat information;
  memset(replacement, 0, sizeof(*replacement));
  if (stat(path, &information) == 0 && !S_ISREG(information.st_mode))
    return failed(S_ISDIR(information.st_mode) ? "is a directory, expected a file"
                                               : "is a pipe, socket or device, expected a file");
  replacement->path = path;
  if (asprintf(&replacement->temporary, "%s.XXXXXX", path) < 0) {
    replacement->temporary = NULL;
    return failed("no memory for its name");
  }
  catch_signals();
  const int descriptor = create_temporary(replacement->temporary);
  if (descriptor >= 0) replacement->stream = fdopen(descriptor, "w");
  if (replacement->stream) return FP8CORE_OK;
  const int reason = errno;
  if (descriptor >= 0) {
    (void)close(descriptor);
    (void)unlink(replacement->temporary);
  }
  forget(replacement);
  return failed(strerror(reason));
}

fp8core_status fp8lm_replacement_commit(fp8lm_replacement *replacement) {
  FILE *stream = replacement->stream;
  fp8core_status status = FP8CORE_OK;
  const mode_t mask = umask(0);
  (void)umask(mask);
  // A write that failed earlier does not say why.
  errno = EIO;
  if (fflush(stream) != 0 || ferror(stream) || fchmod(fileno(stream), 0666 & ~mask) != 0 || fsync(fileno(stream)) != 0)
    status = failed(strerror(errno));
  if (fclose(stream) != 0 && status == FP8CORE_OK) status = failed(strerror(errno));
  if (status == FP8CORE_OK && rename(replacement->temporary, replacement->path) != 0) status = failed(strerror(errno));
  if (status != FP8CORE_OK) (void)unlink(replacement->temporary);
  forget(replacement);
  return status;
}

void fp8lm_replacement_discard(fp8lm_replacement *replacement) {
  if (!replacement->stream) return;
  (void)fclose(replacement->stream);
  (void)unlink(replacement->temporary);
  forget(replacement);
}
