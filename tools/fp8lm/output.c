#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static fp8core_status refuse(int *descriptor, const char *what) {
  if (*descriptor >= 0) (void)close(*descriptor);
  *descriptor = -1;
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "is a %s, expected a regular file", what);
}

static fp8core_status open_regular(int *descriptor, const char *path, int flags) {
  struct stat information;
  // Without O_NONBLOCK the open itself would wait for the reader of a pipe.
  *descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | flags, 0666);
  if (*descriptor < 0) {
    const int reason = errno;
    if (reason == EISDIR) return refuse(descriptor, "directory");
    // Of sockets.
    if (reason == ENXIO) return refuse(descriptor, "pipe, socket or device");
    if (reason == ELOOP && (flags & O_NOFOLLOW)) return refuse(descriptor, "symbolic link");
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot open the file: %s", strerror(reason));
  }
  if (fstat(*descriptor, &information) != 0 || !S_ISREG(information.st_mode))
    return refuse(descriptor, "pipe, socket or device");
  return FP8CORE_OK;
}

fp8core_status fp8lm_output_open(int *descriptor, const char *path) { return open_regular(descriptor, path, O_APPEND); }

fp8core_status fp8lm_output_create(int *descriptor, const char *path) {
  // Emptied only once it is known what it is.
  const fp8core_status status = open_regular(descriptor, path, O_NOFOLLOW);
  if (status != FP8CORE_OK || ftruncate(*descriptor, 0) == 0) return status;
  const int reason = errno;
  (void)close(*descriptor);
  *descriptor = -1;
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot empty the file: %s", strerror(reason));
}

fp8core_status fp8lm_output_open_locked(int *descriptor, const char *path, const char *what) {
  const fp8core_status status = fp8lm_output_open(descriptor, path);
  if (status != FP8CORE_OK || flock(*descriptor, LOCK_EX | LOCK_NB) == 0) return status;
  const int reason = errno;
  (void)close(*descriptor);
  *descriptor = -1;
  if (reason == EWOULDBLOCK)
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "another run is writing to %s", what);
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot lock the file: %s", strerror(reason));
}

// Between two looks at whether a signal has come; and how many of them lines are waited for after it.
#define LOOK_MILLISECONDS 100
#define LOOKS_AFTER_SIGNAL 3

typedef struct screen {
  int descriptor;
  const volatile sig_atomic_t *stop;
  int looks;
  // Of the first write that failed.
  int error;
} screen;

static ssize_t write_to_screen(void *cookie, const char *text, size_t size) {
  screen *to = cookie;
  for (size_t done = 0; done < size && to->looks < LOOKS_AFTER_SIGNAL;) {
    const ssize_t written = write(to->descriptor, text + done, size - done);
    if (written > 0) {
      done += (size_t)written;
    } else if (written < 0 && errno == EAGAIN) {
      struct pollfd room = {to->descriptor, POLLOUT, 0};
      if (poll(&room, 1, LOOK_MILLISECONDS) <= 0 && *to->stop) to->looks++;
    } else if (written == 0 || errno != EINTR) {
      if (to->error == 0) to->error = written == 0 ? EIO : errno;
      return 0;
    }
  }
  return (ssize_t)size;
}

static int close_screen(void *cookie) {
  screen *to = cookie;
  const int error = to->error;
  if (to->descriptor != STDOUT_FILENO) (void)close(to->descriptor);
  free(to);
  errno = error;
  return error == 0 ? 0 : -1;
}

FILE *fp8lm_output_screen(const volatile sig_atomic_t *stop) {
  const cookie_io_functions_t functions = {NULL, write_to_screen, NULL, close_screen};
  struct stat information;
  screen *to = malloc(sizeof(*to));
  if (!to) return NULL;
  to->stop = stop;
  to->looks = 0;
  to->error = 0;
  to->descriptor = -1;
  // Opened anew, as others have to do with the one that is there, who do not expect O_NONBLOCK. One that cannot be, as
  // it belongs to another user, is written to as it is; so is one that cannot be written to at all.
  if ((fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) != O_RDONLY && fstat(STDOUT_FILENO, &information) == 0 &&
      (S_ISFIFO(information.st_mode) || S_ISCHR(information.st_mode)))
    to->descriptor = open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (to->descriptor < 0) to->descriptor = STDOUT_FILENO;
  FILE *stream = fopencookie(to, "w", functions);
  if (!stream) (void)close_screen(to);
  return stream;
}
