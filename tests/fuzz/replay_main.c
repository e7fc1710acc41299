// Drives a fuzz target without libFuzzer: every seed input, each cut at any place, then mutations that depend on
// nothing but a seed and their number, so that a failure can be repeated with --only.
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"

#define SEEDS_LIMIT 64

typedef struct input {
  uint8_t *bytes;
  size_t size;
} input;

static input seeds[SEEDS_LIMIT];
static size_t seed_count;
// What runs now, for the message at a crash.
static volatile sig_atomic_t current_number = -1;

static void report_abort(int signal_number) {
  char digits[24];
  int length = 0;
  long number = current_number;
  static const char text[] = "replay: the input that failed is number ";
  static const char outside[] = "replay: the input that failed is a seed, a cut seed, or a file\n";
  (void)signal(signal_number, SIG_DFL);
  if (number < 0) {
    (void)!write(STDERR_FILENO, outside, sizeof(outside) - 1);
  } else {
    do digits[sizeof(digits) - 1 - (size_t)length++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
    (void)!write(STDERR_FILENO, digits + sizeof(digits) - length, (size_t)length);
    (void)!write(STDERR_FILENO, "\n", 1);
  }
  (void)raise(signal_number);
}

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  if (!memory) {
    (void)fprintf(stderr, "replay: no memory for %zu bytes\n", bytes);
    exit(2);
  }
  return memory;
}

// From memory of exactly the input's size, so that a sanitizer sees a read past it.
static void run(const uint8_t *bytes, size_t size) {
  uint8_t *copy = malloc(size ? size : 1);
  if (!copy) exit(2);
  if (size) memcpy(copy, bytes, size);
  FUZZ_CHECK(LLVMFuzzerTestOneInput(copy, size) == 0);
  free(copy);
}

// SplitMix64.
static uint64_t next(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t bound) { return bound ? (size_t)(next(state) % bound) : 0; }

// A number of the kind that sizes and offsets go wrong with.
static uint64_t awkward_number(uint64_t *state, size_t size) {
  const uint64_t numbers[] = {
    0,          1,          2,          0x7f,       0x80,       0xff,       0x7fff,    0x8000,
    0xffff,     0x7f800000, 0x7fc00000, 0x7fffffff, 0x80000000, UINT32_MAX, INT64_MAX, (uint64_t)INT64_MAX + 1,
    UINT64_MAX, size,       size - 1,   size + 1,   size - 8};
  const uint64_t number = numbers[below(state, sizeof(numbers) / sizeof(numbers[0]))];
  return next(state) % 4 == 0 ? number - 1 : number;
}

// One change to `bytes`, which has room for `room`; returns the new size.
static size_t mutate_once(uint64_t *state, uint8_t *bytes, size_t size, size_t room) {
  const size_t place = below(state, size);
  const size_t rest = size - place;
  size_t length = 1 + below(state, 16);
  switch (next(state) % 10) {
  case 0:
    if (size) bytes[place] ^= (uint8_t)(1U << next(state) % 8);
    return size;
  case 1:
    if (size) bytes[place] = (uint8_t)next(state);
    return size;
  case 2: return below(state, size + 1);
  case 3:
    if (length > room - size) length = room - size;
    for (size_t i = 0; i < length; i++) bytes[size + i] = (uint8_t)next(state);
    return size + length;
  case 4:
  case 5: {
    const uint64_t number = awkward_number(state, size);
    const size_t widths[] = {1, 2, 4, 8};
    const size_t width = widths[below(state, 4)];
    for (size_t i = 0; i < width && i < rest; i++) bytes[place + i] = (uint8_t)(number >> (8 * i));
    return size;
  }
  case 6:
    if (length > rest) length = rest;
    memmove(bytes + place, bytes + place + length, rest - length);
    return size - length;
  case 7:
    // Twice the same.
    if (length > rest) length = rest;
    if (length > room - size) length = room - size;
    memmove(bytes + place + length, bytes + place, rest);
    return size + length;
  case 8: {
    // A piece of another seed.
    const input *const other = &seeds[below(state, seed_count)];
    const size_t from = below(state, other->size);
    length = 1 + below(state, 64);
    if (length > rest) length = rest;
    if (length > other->size - from) length = other->size - from;
    memcpy(bytes + place, other->bytes + from, length);
    return size;
  }
  default: {
    // A digit, bracket or quote, for inputs that are text.
    const char text[] = "0123456789-+.eE{}[]\",:\\nult \x80\xff";
    if (size) bytes[place] = (uint8_t)text[below(state, sizeof(text) - 1)];
    return size;
  }
  }
}

static void run_mutation(uint64_t seed, long number) {
  uint64_t state = seed * UINT64_C(0x2545F4914F6CDD1D) + (uint64_t)number;
  const input *const chosen = &seeds[below(&state, seed_count)];
  const size_t room = chosen->size + 1024;
  uint8_t *bytes = allocate(room);
  size_t size = chosen->size;
  memcpy(bytes, chosen->bytes, size);
  const size_t changes = 1 + below(&state, 8);
  for (size_t i = 0; i < changes; i++) size = mutate_once(&state, bytes, size, room);
  current_number = (sig_atomic_t)number;
  run(bytes, size);
  current_number = -1;
  free(bytes);
}

static void run_seeds(void) {
  run((const uint8_t *)"", 0);
  for (size_t i = 0; i < seed_count; i++) {
    // Every cut of a short input, a thousand of a long one.
    const size_t stride = 1 + seeds[i].size / 1000;
    for (size_t size = 0; size < seeds[i].size; size += stride) run(seeds[i].bytes, size);
    run(seeds[i].bytes, seeds[i].size);
  }
}

static int run_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    (void)fprintf(stderr, "replay: %s: %s\n", path, strerror(errno));
    return 2;
  }
  size_t size = 0;
  size_t room = 4096;
  uint8_t *bytes = allocate(room);
  for (size_t count; (count = fread(bytes + size, 1, room - size, file)) > 0;) {
    size += count;
    if (size < room) continue;
    uint8_t *larger = allocate(2 * room);
    memcpy(larger, bytes, size);
    free(bytes);
    bytes = larger;
    room *= 2;
  }
  (void)fclose(file);
  run(bytes, size);
  free(bytes);
  return 0;
}

// As a corpus for libFuzzer to start from.
static int write_seeds(const char *directory) {
  for (size_t i = 0; i < seed_count; i++) {
    char path[4096];
    if (snprintf(path, sizeof(path), "%s/seed-%zu", directory, i) >= (int)sizeof(path)) return 2;
    FILE *file = fopen(path, "wb");
    if (!file) {
      (void)fprintf(stderr, "replay: %s: %s\n", path, strerror(errno));
      return 2;
    }
    const size_t written = fwrite(seeds[i].bytes, 1, seeds[i].size, file);
    if (fclose(file) != 0 || written != seeds[i].size) return 2;
  }
  return 0;
}

static int usage(void) {
  (void)fprintf(stderr,
                "usage: replay [--iterations N] [--seed N] [--only NUMBER] [--write-seeds DIRECTORY] [FILE...]\n");
  return 2;
}

static int parse_number(const char *text, long *number) {
  char *end;
  errno = 0;
  *number = strtol(text, &end, 10);
  return !*text || *end || errno || *number < 0 || *number > SIG_ATOMIC_MAX;
}

int main(int count, char **arguments) {
  long iterations = 4000;
  long seed = 1;
  long only = -1;
  const char *directory = NULL;
  int next_argument = 1;
  for (; next_argument < count && strncmp(arguments[next_argument], "--", 2) == 0; next_argument += 2) {
    const char *const option = arguments[next_argument];
    if (next_argument + 1 == count) return usage();
    const char *const value = arguments[next_argument + 1];
    if (strcmp(option, "--write-seeds") == 0)
      directory = value;
    else if (strcmp(option, "--iterations") == 0 && parse_number(value, &iterations) == 0)
      continue;
    else if (strcmp(option, "--seed") == 0 && parse_number(value, &seed) == 0)
      continue;
    else if (strcmp(option, "--only") == 0 && parse_number(value, &only) == 0)
      continue;
    else
      return usage();
  }
  (void)signal(SIGABRT, report_abort);
  while (seed_count < SEEDS_LIMIT && (seeds[seed_count].bytes = fuzz_seed(seed_count, &seeds[seed_count].size)))
    seed_count++;
  FUZZ_CHECK(seed_count > 0);
  int status = 0;
  if (directory) {
    status = write_seeds(directory);
  } else if (next_argument < count) {
    for (; next_argument < count && status == 0; next_argument++) status = run_file(arguments[next_argument]);
  } else if (only >= 0) {
    run_mutation((uint64_t)seed, only);
  } else {
    run_seeds();
    for (long i = 0; i < iterations; i++) run_mutation((uint64_t)seed, i);
    (void)printf("%zu seed inputs, their cuts, and %ld mutations with seed %ld\n", seed_count, iterations, seed);
  }
  for (size_t i = 0; i < seed_count; i++) free(seeds[i].bytes);
  return status;
}
