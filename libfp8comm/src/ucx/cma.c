#include "cma.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

int fp8comm_cma_is_allowed(void) {
  static const char *const names[] = {"all", "sm", "shm", "cma"};
  const char *list = getenv("UCX_TLS");
  if (!list) return 1;
  const int excludes = *list == '^';
  list += excludes;
  int found = 0;
  while (*list) {
    const size_t length = strcspn(list, ",");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
      found |= length == strlen(names[i]) && memcmp(list, names[i], length) == 0;
    list += length + (list[length] == ',');
  }
  return found != excludes;
}

ssize_t fp8comm_cma_read(pid_t process, uint64_t address, void *destination, size_t bytes) {
  const struct iovec here = {.iov_base = destination, .iov_len = bytes};
  const struct iovec there = {.iov_base = (void *)(uintptr_t)address, .iov_len = bytes};
  ssize_t got;
  do got = process_vm_readv(process, &here, 1, &there, 1, 0);
  while (got < 0 && errno == EINTR);
  return got;
}
