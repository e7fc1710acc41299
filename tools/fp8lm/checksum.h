/** \file
 * The checksum of shards and checkpoints.
 */
#ifndef FP8LM_CHECKSUM_H
#define FP8LM_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <zlib.h>

/** CRC-32 of ISO 3309 (that of zlib and PNG) of \p size bytes, continued from \p crc, 0 at the start. */
static inline uint32_t fp8lm_crc32(uint32_t crc, const void *bytes, size_t size) {
  return (uint32_t)crc32_z(crc, bytes, size);
}

#endif
