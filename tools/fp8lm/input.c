#include "input.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

// The shards of a large corpus are all open at once. Only where the usual limit is too low for that is it raised to
// what the system allows. Returns whether there is room for more.
static int allow_more_files(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return 0;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

fp8core_status fp8lm_input_open(fp8lm_input *input, const char *path) {
  input->size = 0;
  input->memory = NULL;
  // Without O_NONBLOCK the open itself would wait for the writer of a pipe.
  input->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (input->descriptor < 0 && errno == EMFILE && allow_more_files())
    input->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (input->descriptor < 0) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot open the file: %s", strerror(errno));
  }
  struct stat information;
  if (fstat(input->descriptor, &information) != 0) {
    const int reason = errno;
    fp8lm_input_close(input);
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot get the size of the file: %s",
                                  strerror(reason));
  }
  if (!S_ISREG(information.st_mode)) {
    fp8lm_input_close(input);
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "is a %s, expected a regular file",
                                  S_ISDIR(information.st_mode) ? "directory" : "pipe, socket or device");
  }
  input->size = (uint64_t)information.st_size;
  return FP8CORE_OK;
}

void fp8lm_input_from_memory(fp8lm_input *input, const void *memory, uint64_t bytes) {
  input->size = bytes;
  input->descriptor = -1;
  // An empty buffer may come as a null pointer; `memory` tells it from a file.
  input->memory = memory ? memory : (const unsigned char *)"";
}

fp8core_status fp8lm_input_read(const fp8lm_input *input, uint64_t offset, void *buffer, size_t bytes) {
  if (offset > input->size || bytes > input->size - offset) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                  "cannot read %zu bytes at offset %" PRIu64 ": the file has %" PRIu64 " bytes", bytes,
                                  offset, input->size);
  }
  if (input->memory) {
    if (bytes) memcpy(buffer, input->memory + offset, bytes);
    return FP8CORE_OK;
  }
  unsigned char *destination = buffer;
  while (bytes) {
    const ssize_t got = pread(input->descriptor, destination, bytes, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "cannot read %zu bytes at offset %" PRIu64 ": %s",
                                    bytes, offset,
                                    got < 0 ? strerror(errno) : "the file became shorter while it was read");
    }
    destination += got;
    offset += (uint64_t)got;
    bytes -= (size_t)got;
  }
  return FP8CORE_OK;
}

void fp8lm_input_close(fp8lm_input *input) {
  if (!input->memory && input->descriptor >= 0) close(input->descriptor);
  input->descriptor = -1;
}
