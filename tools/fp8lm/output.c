#include "output.h"

#include <errno.h>
#include <fcntl.h>
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
