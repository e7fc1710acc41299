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
#include <string.h>

static inline void fuzz_abort(const char *file, int line, const char *condition) {
  (void)fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, condition);
  abort();
}

// A copy of a saved state, of at least 4 bytes, whose last 4 are the CRC-32 of the others, little-endian, so that the
// rest of its reader sees mutations; computed here, not by the library under test. The caller frees it.
static inline uint8_t *fuzz_with_checksum(const uint8_t *data, size_t size) {
  uint8_t *repaired = (uint8_t *)malloc(size);
  FUZZ_CHECK(repaired);
  memcpy(repaired, data, size);
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < size - 4; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xEDB88320) : 0);
  }
  for (int i = 0; i < 4; i++) repaired[size - 4 + (size_t)i] = (uint8_t)(~crc >> (8 * i));
  return repaired;
}

#endif
