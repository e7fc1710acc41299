#include "shard.h"

#include <endian.h>
#include <inttypes.h>
#include <string.h>

#include "checksum.h"

// Tokens that are checked at once.
enum { BLOCK = 16384 };

enum { MAGIC_16 = 20240520, VERSION_16 = 1, MAGIC_32 = 20240801, VERSION_32 = 7 };

static const struct {
  uint32_t magic;
  const char *what;
} foreign[] = {
  {20240522, "an evaluation file of llm.c, not its tokens"},
  {20240326, "a model of llm.c, not tokens"},
  {20240327, "a debug state of llm.c, not tokens"},
  {20240328, "a tokenizer of llm.c, not tokens"},
  {20240335, "an optimizer state of llm.c, not tokens"},
  {0x44494d4d /* MMID */, "an index of Megatron (.idx), not a shard of llm.c"},
  {0x04034b50, "a zip archive"},
  {0x587a37fd, "compressed by xz: decompress it first"},
  {0xfd2fb528, "compressed by zstd: decompress it first"},
};

static uint32_t number_at(const unsigned char *header, size_t index) {
  uint32_t value;
  memcpy(&value, header + 4 * index, 4);
  return le32toh(value);
}

// Reads what the shard's input begins with.
static fp8core_status read_header(fp8lm_shard *shard) {
  unsigned char header[FP8LM_SHARD_HEADER_BYTES];
  const uint64_t bytes = shard->input.size;
  const fp8core_status status =
    fp8lm_input_read(&shard->input, 0, header, bytes < sizeof(header) ? (size_t)bytes : sizeof(header));
  if (status != FP8CORE_OK) return status;
  if (bytes == 0) return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the file is empty");
  const uint32_t magic = bytes >= 4 ? number_at(header, 0) : 0;
  if (magic != MAGIC_16 && magic != MAGIC_32) {
    const char *what = "not a token shard";
    for (size_t i = 0; i < sizeof(foreign) / sizeof(foreign[0]); i++) {
      if (magic == foreign[i].magic) what = foreign[i].what;
    }
    if (__builtin_bswap32(magic) == MAGIC_16 || __builtin_bswap32(magic) == MAGIC_32) what = "of the other byte order";
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                  "the file is %s: it begins with %" PRIu32 ", a shard with %d or %d", what, magic,
                                  MAGIC_16, MAGIC_32);
  }
  if (bytes < FP8LM_SHARD_HEADER_BYTES) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                  "the file has %" PRIu64 " bytes, its header alone should have %zu: it is cut off",
                                  bytes, FP8LM_SHARD_HEADER_BYTES);
  }
  const uint32_t version = number_at(header, 1);
  const uint32_t known = magic == MAGIC_16 ? VERSION_16 : VERSION_32;
  if (version != known) {
    return fp8core_set_last_error(
      version > known && version <= INT32_MAX ? FP8CORE_ERROR_NOT_SUPPORTED : FP8CORE_ERROR_CORRUPT_DATA,
      "version %" PRId32 " of the format, only %" PRIu32 " can be read", (int32_t)version, known);
  }
  const uint32_t count = number_at(header, 2);
  if (count == 0 || count > FP8LM_SHARD_MAX_TOKENS) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                  "the header says %" PRId32 " tokens, expected 1 to %" PRId32, (int32_t)count,
                                  FP8LM_SHARD_MAX_TOKENS);
  }
  const unsigned width = magic == MAGIC_16 ? 2 : 4;
  const uint64_t expected = FP8LM_SHARD_HEADER_BYTES + (uint64_t)count * width;
  if (bytes != expected) {
    return fp8core_set_last_error(
      FP8CORE_ERROR_CORRUPT_DATA,
      "the file has %" PRIu64 " bytes, but its header and %" PRIu32 " tokens have %" PRIu64 ": %s", bytes, count,
      expected, bytes < expected ? "it is cut off" : "something follows them");
  }
  const uint32_t has_checksum = number_at(header, 4);
  if (has_checksum > 1) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "number 4 of the header is %" PRIu32 ", expected 0 or 1",
                                  has_checksum);
  }
  shard->count = count;
  shard->width = width;
  shard->vocabulary = number_at(header, 3);
  shard->has_checksum = (int)has_checksum;
  shard->checksum = number_at(header, 5);
  return FP8CORE_OK;
}

static fp8core_status open_input(fp8lm_shard *shard) {
  const fp8core_status status = read_header(shard);
  if (status != FP8CORE_OK) {
    fp8lm_input_close(&shard->input);
    memset(shard, 0, sizeof(*shard));
  }
  return status;
}

fp8core_status fp8lm_shard_from_memory(fp8lm_shard *shard, const void *memory, size_t bytes) {
  memset(shard, 0, sizeof(*shard));
  fp8lm_input_from_memory(&shard->input, memory, bytes);
  return open_input(shard);
}

fp8core_status fp8lm_shard_open(fp8lm_shard *shard, const char *path) {
  memset(shard, 0, sizeof(*shard));
  const fp8core_status status = fp8lm_input_open(&shard->input, path);
  return status == FP8CORE_OK ? open_input(shard) : status;
}

static fp8core_status read_bytes(const fp8lm_shard *shard, uint64_t first, size_t count, void *bytes) {
  return fp8lm_input_read(&shard->input, FP8LM_SHARD_HEADER_BYTES + first * shard->width, bytes, count * shard->width);
}

// Bytes of tokens to the tokens; they may be the last bytes of the place for them.
static void decode(const fp8lm_shard *shard, const unsigned char *bytes, size_t count, int32_t *tokens) {
  for (size_t i = 0; i < count; i++) {
    if (shard->width == 2) {
      uint16_t token;
      memcpy(&token, bytes + 2 * i, 2);
      tokens[i] = le16toh(token);
    } else {
      const uint32_t token = number_at(bytes, i);
      tokens[i] = token > INT32_MAX ? INT32_MAX : (int32_t)token;
    }
  }
}

fp8core_status fp8lm_shard_read(const fp8lm_shard *shard, uint64_t first, size_t count, int32_t *tokens) {
  unsigned char *bytes = (unsigned char *)tokens + count * (sizeof(*tokens) - shard->width);
  const fp8core_status status = read_bytes(shard, first, count, bytes);
  if (status == FP8CORE_OK) decode(shard, bytes, count, tokens);
  return status;
}

fp8core_status fp8lm_shard_check(const fp8lm_shard *shard, uint32_t vocabulary) {
  const uint32_t bound = vocabulary ? vocabulary : shard->vocabulary;
  uint32_t crc = 0;
  int32_t block[BLOCK];
  unsigned char bytes[sizeof(block)];
  for (uint64_t first = 0; first < shard->count; first += BLOCK) {
    const size_t count = shard->count - first < BLOCK ? (size_t)(shard->count - first) : BLOCK;
    const fp8core_status status = read_bytes(shard, first, count, bytes);
    if (status != FP8CORE_OK) return status;
    decode(shard, bytes, count, block);
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) largest = (uint32_t)block[i] > largest ? (uint32_t)block[i] : largest;
    for (size_t i = 0; bound && largest >= bound && i < count; i++) {
      if ((uint32_t)block[i] >= bound) {
        return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                      "token %" PRIu64 " is %" PRId32 ", the vocabulary has %" PRIu32, first + i,
                                      block[i], bound);
      }
    }
    if (shard->has_checksum) crc = fp8lm_crc32(crc, bytes, count * shard->width);
  }
  if (shard->has_checksum && crc != shard->checksum) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                  "the checksum of the tokens is %08" PRIx32 ", the header says %08" PRIx32, crc,
                                  shard->checksum);
  }
  return FP8CORE_OK;
}

void fp8lm_shard_close(fp8lm_shard *shard) {
  // An open one has tokens.
  if (shard->count) fp8lm_input_close(&shard->input);
  memset(shard, 0, sizeof(*shard));
}
