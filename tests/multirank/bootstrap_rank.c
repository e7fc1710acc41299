// One rank of a test of the bootstraps, without a transport: finds the others as the environment says, and gathers.
//
//   bootstrap_rank TIMEOUT [BYTES...]      all-gathers of so many bytes a rank, default 1 7 64 0 100003
//   bootstrap_rank TIMEOUT hang            after the first, takes part in no other
//   bootstrap_rank TIMEOUT die             after the first, ends without a word
//
// SIGTERM interrupts its waiting. Prints one line: "ok rank R of N", or "error STATUS SECONDS MESSAGE" and exits
// with 3.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bootstrap/bootstrap.h"

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double started;

static volatile sig_atomic_t told;

static void on_signal(int number) {
  (void)number;
  told = 1;
}

static int is_told(void *user_data, double stalled_seconds) {
  // An address of the caller's, and a time that can be.
  if (user_data != &told || !(stalled_seconds >= 0 && stalled_seconds < 1000)) exit(8);
  return told;
}

static int fail(fp8core_status status) {
  (void)printf("error %d %.3f %s\n", (int)status, now() - started, fp8core_last_error());
  return 3;
}

static uint8_t pattern(int rank, size_t i) { return (uint8_t)((size_t)rank * 31 + i * 7 + (i >> 8)); }

static fp8core_status gather(fp8comm_bootstrap *bootstrap, size_t bytes) {
  uint8_t *const part = malloc(bytes + 1);
  uint8_t *const table = malloc(bytes * (size_t)bootstrap->ranks + 1);
  if (!part || !table) exit(4);
  for (size_t i = 0; i < bytes; i++) part[i] = pattern(bootstrap->rank, i);
  table[bytes * (size_t)bootstrap->ranks] = 0x5a;
  started = now();
  const fp8core_status status = bootstrap->all_gather(bootstrap, part, bytes, table);
  if (status == FP8CORE_OK) {
    for (int r = 0; r < bootstrap->ranks; r++) {
      for (size_t i = 0; i < bytes; i++) {
        if (table[(size_t)r * bytes + i] == pattern(r, i)) continue;
        (void)printf("wrong byte %zu of rank %d's %zu\n", i, r, bytes);
        exit(5);
      }
    }
    if (table[bytes * (size_t)bootstrap->ranks] != 0x5a) exit(6);
  }
  free(part);
  free(table);
  return status;
}

// No socket of the library's may be left to a program that this one executes.
static int count_inherited(void) {
  int inherited = 0;
  for (int fd = 0; fd < 1024; fd++) {
    const int flags = fcntl(fd, F_GETFD);
    if (flags >= 0 && !(flags & FD_CLOEXEC)) inherited++;
  }
  return inherited;
}

int main(int count, char **arguments) {
  if (count < 2) return 2;
  const double timeout = strtod(arguments[1], NULL);
  const char *const mode = count > 2 ? arguments[2] : "";
  const int inherited = count_inherited();
  fp8comm_bootstrap *bootstrap;
  started = now();
  (void)signal(SIGTERM, on_signal);
  const fp8comm_wait_options wait = {timeout, is_told, (void *)(uintptr_t)&told};
  fp8core_status status = fp8comm_environment_create(&wait, &bootstrap);
  if (status != FP8CORE_OK) return fail(status);
  if (!bootstrap) {
    (void)printf("ok rank 0 of 1\n");
    return 0;
  }
  // PMIx opens what it likes.
  if (!getenv("PMIX_RANK") && count_inherited() != inherited) {
    (void)printf("a file would be inherited\n");
    return 7;
  }
  static const size_t usual[] = {1, 7, 64, 0, 100003};
  const int modal = strcmp(mode, "hang") == 0 || strcmp(mode, "die") == 0;
  const size_t calls = modal ? 1 : count > 2 ? (size_t)count - 2 : sizeof(usual) / sizeof(usual[0]);
  for (size_t i = 0; i < calls && status == FP8CORE_OK; i++)
    status = gather(bootstrap, count > 2 && !modal ? strtoul(arguments[2 + i], NULL, 10) : usual[i]);
  if (status == FP8CORE_OK && strcmp(mode, "hang") == 0) (void)sleep((unsigned)(3 * timeout) + 1);
  if (status == FP8CORE_OK && modal) _exit(0);
  const int result = status == FP8CORE_OK ? 0 : fail(status);
  if (result == 0) (void)printf("ok rank %d of %d\n", bootstrap->rank, bootstrap->ranks);
  bootstrap->destroy(bootstrap);
  return result;
}
