// What a fuzz target gives. The same file runs under libFuzzer (clang, -Dfuzzing=true) and, with any compiler, under
// replay_main.c, which feeds it seeded mutations of its seed inputs.
#ifndef FP8_FUZZ_H
#define FP8_FUZZ_H

#include <stddef.h>
#include <stdint.h>

// Runs one input; aborts when a property that must hold does not. Returns 0.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Valid input number `index`, counted from 0, in memory from malloc() that the caller frees; NULL past the last one.
uint8_t *fuzz_seed(size_t index, size_t *size);

// Aborts with the condition's text. Unlike assert() it is there in every build type.
#define FUZZ_CHECK(condition)                                                                                          \
  do {                                                                                                                 \
    if (!(condition)) fuzz_abort(__FILE__, __LINE__, #condition);                                                      \
  } while (0)

#include <stdio.h>
#include <stdlib.h>

static inline void fuzz_abort(const char *file, int line, const char *condition) {
  (void)fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, condition);
  abort();
}

#endif
