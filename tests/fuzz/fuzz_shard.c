// The reader of token shards with any bytes.
#include <string.h>

#include "checksum.h"
#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "shard.h"

static void put(uint8_t *bytes, size_t index, uint32_t value) {
  for (size_t i = 0; i < 4; i++) bytes[4 * index + i] = (uint8_t)(value >> (8 * i));
}

uint8_t *fuzz_seed(size_t index, size_t *size) {
  static const struct {
    uint32_t magic, version, count, width, vocabulary;
    int checksum;
  } seeds[] = {{20240520, 1, 5, 2, 0, 0},
               {20240520, 1, 9000, 2, 65536, 1},
               {20240801, 7, 3, 4, 0, 1},
               {20240801, 7, 1, 4, 128256, 0}};
  if (index >= sizeof(seeds) / sizeof(seeds[0])) return NULL;
  const size_t bytes = (size_t)seeds[index].count * seeds[index].width;
  *size = FP8LM_SHARD_HEADER_BYTES + bytes;
  uint8_t *file = calloc(1, *size);
  FUZZ_CHECK(file);
  put(file, 0, seeds[index].magic);
  put(file, 1, seeds[index].version);
  put(file, 2, seeds[index].count);
  put(file, 3, seeds[index].vocabulary);
  for (size_t i = 0; i < bytes; i += seeds[index].width) file[FP8LM_SHARD_HEADER_BYTES + i] = (uint8_t)i;
  if (seeds[index].checksum) {
    put(file, 4, 1);
    put(file, 5, fp8lm_crc32(0, file + FP8LM_SHARD_HEADER_BYTES, bytes));
  }
  return file;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fp8lm_shard shard;
  const fp8core_status status = fp8lm_shard_from_memory(&shard, data, size);
  if (status != FP8CORE_OK) {
    FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA || status == FP8CORE_ERROR_NOT_SUPPORTED);
    FUZZ_CHECK(*fp8core_last_error() && !shard.count);
    return 0;
  }
  FUZZ_CHECK(shard.count > 0 && (shard.width == 2 || shard.width == 4));
  FUZZ_CHECK(FP8LM_SHARD_HEADER_BYTES + shard.count * shard.width == size);
  int32_t token;
  uint32_t largest = 0;
  for (uint64_t i = 0; i < shard.count; i++) {
    FUZZ_CHECK(fp8lm_shard_read(&shard, i, 1, &token) == FP8CORE_OK);
    FUZZ_CHECK(token >= 0);
    if ((uint32_t)token > largest) largest = (uint32_t)token;
  }
  const uint32_t crc = fp8lm_crc32(0, data + FP8LM_SHARD_HEADER_BYTES, (size_t)shard.count * shard.width);
  const int right = !shard.has_checksum || crc == shard.checksum;
  FUZZ_CHECK((fp8lm_shard_check(&shard, largest + 1) == FP8CORE_OK) == right);
  if (largest) FUZZ_CHECK(fp8lm_shard_check(&shard, largest) == FP8CORE_ERROR_CORRUPT_DATA);
  fp8lm_shard_close(&shard);
  return 0;
}
