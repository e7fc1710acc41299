// Saved states of the gradient all-reduce. All integers little-endian:
//
//   8 bytes  "FP8GRADS"
//   u32      version of this format
//   u32      0
//   u64      tensors
//   per tensor: i64 elements, f64 mu; from version 2 on f32 amax and f32 mean amax of the last step, -1: none
//   u32      CRC-32 (ISO 3309, ITU-T V.42) of all before
#include <float.h>
#include <string.h>

#include "gradient.h"
#include "internal.h"
#include "numerics.h"

#define MAGIC "FP8GRADS"
#define FORMAT_VERSION 2
#define HEADER_BYTES 24
#define RECORD_BYTES 24
// Of version 1.
#define OLD_RECORD_BYTES 16
#define CHECKSUM_BYTES 4

static uint32_t checksum(const unsigned char *bytes, size_t count) {
  uint32_t crc = UINT32_C(0xffffffff);
  for (size_t i = 0; i < count; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xedb88320) : 0);
  }
  return ~crc;
}

static void put(unsigned char *at, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
}

static uint64_t get(const unsigned char *at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; i++) value |= (uint64_t)at[i] << 8 * i;
  return value;
}

size_t fp8comm_gradient_saved_bytes(const fp8comm_gradient_reducer *reducer) {
  if (!reducer) return 0;
  int64_t count;
  (void)fp8comm_gradient_tensors(reducer, &count);
  return HEADER_BYTES + RECORD_BYTES * (size_t)count + CHECKSUM_BYTES;
}

static fp8core_status check(const fp8comm_gradient_reducer *reducer, const void *buffer, size_t bytes, int exact) {
  double least, most;
  int busy;
  if (!reducer) return fp8comm_invalid("reducer is NULL, expected a reducer");
  if (!buffer) return fp8comm_invalid("buffer is NULL, expected host memory");
  fp8comm_gradient_limits(reducer, &least, &most, &busy);
  if (busy) return fp8comm_invalid("a bucket is started, expected fp8comm_gradient_wait() before");
  if (exact && bytes != fp8comm_gradient_saved_bytes(reducer))
    return fp8comm_invalid("bytes is %zu, expected the %zu of fp8comm_gradient_saved_bytes()", bytes,
                           fp8comm_gradient_saved_bytes(reducer));
  return FP8CORE_OK;
}

fp8core_status fp8comm_gradient_save(const fp8comm_gradient_reducer *reducer, void *buffer, size_t bytes) {
  FP8COMM_TRY(check(reducer, buffer, bytes, 1));
  int64_t count;
  const fp8comm_gradient_tensor *tensors = fp8comm_gradient_tensors(reducer, &count);
  unsigned char *at = buffer;
  memcpy(at, MAGIC, 8);
  put(at + 8, FORMAT_VERSION, 4);
  put(at + 12, 0, 4);
  put(at + 16, (uint64_t)count, 8);
  at += HEADER_BYTES;
  for (int64_t i = 0; i < count; i++, at += RECORD_BYTES) {
    uint64_t bits;
    memcpy(&bits, &tensors[i].mu, 8);
    put(at, (uint64_t)tensors[i].elements, 8);
    put(at + 8, bits, 8);
    put(at + 16, fp8core_float_bits(tensors[i].last_amax), 4);
    put(at + 20, fp8core_float_bits(tensors[i].last_mean_amax), 4);
  }
  put(at, checksum(buffer, bytes - CHECKSUM_BYTES), 4);
  return FP8CORE_OK;
}

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

static double mu_of(const unsigned char *record) {
  const uint64_t bits = get(record + 8, 8);
  double mu;
  memcpy(&mu, &bits, 8);
  return mu;
}

// Of version 1 nothing is known.
static float amax_of(const unsigned char *record, size_t record_bytes, int of_mean) {
  return record_bytes == OLD_RECORD_BYTES ? -1 : fp8core_bits_float((uint32_t)get(record + (of_mean ? 20 : 16), 4));
}

fp8core_status fp8comm_gradient_load(fp8comm_gradient_reducer *reducer, const void *buffer, size_t bytes) {
  FP8COMM_TRY(check(reducer, buffer, bytes, 0));
  const unsigned char *from = buffer;
  if (bytes < HEADER_BYTES + CHECKSUM_BYTES)
    return corrupt("the state has %zu bytes, expected at least %d", bytes, HEADER_BYTES + CHECKSUM_BYTES);
  if (memcmp(from, MAGIC, 8) != 0) return corrupt("the state does not begin with \"" MAGIC "\"");
  const uint64_t version = get(from + 8, 4);
  if (version < 1 || version > FORMAT_VERSION)
    return corrupt("the state has version %u, expected 1 to %d", (unsigned)version, FORMAT_VERSION);
  const size_t record_bytes = version == 1 ? OLD_RECORD_BYTES : RECORD_BYTES;
  const uint32_t saved = (uint32_t)get(from + bytes - CHECKSUM_BYTES, 4);
  const uint32_t computed = checksum(from, bytes - CHECKSUM_BYTES);
  if (saved != computed) return corrupt("the state's checksum is %08x, expected %08x", saved, computed);
  int64_t count;
  fp8comm_gradient_tensor *tensors = fp8comm_gradient_tensors(reducer, &count);
  const uint64_t saved_count = get(from + 16, 8);
  if (saved_count != (bytes - HEADER_BYTES - CHECKSUM_BYTES) / record_bytes ||
      (bytes - HEADER_BYTES - CHECKSUM_BYTES) % record_bytes != 0)
    return corrupt("the state says %llu tensors, which are not %zu bytes", (unsigned long long)saved_count, bytes);
  if (saved_count != (uint64_t)count)
    return fp8comm_invalid("the state has %llu tensors, expected %lld", (unsigned long long)saved_count,
                           (long long)count);
  for (int64_t i = 0; i < count; i++) {
    const unsigned char *record = from + HEADER_BYTES + record_bytes * (size_t)i;
    const int64_t elements = (int64_t)get(record, 8);
    const double mu = mu_of(record);
    if (elements != tensors[i].elements)
      return fp8comm_invalid("saved tensor %lld has %lld elements, expected %lld", (long long)i, (long long)elements,
                             (long long)tensors[i].elements);
    // Also false for a NaN.
    if (!(mu >= 0x1p-60 && mu <= 0x1p60))
      return corrupt("mu of saved tensor %lld is %g, expected 2^-60 to 2^60", (long long)i, mu);
    for (int of_mean = 0; of_mean < 2; of_mean++) {
      const float amax = amax_of(record, record_bytes, of_mean);
      if (!(amax == -1 || (amax >= 0 && amax <= FLT_MAX)))
        return corrupt("the %s of saved tensor %lld is %g, expected a finite number, or -1",
                       of_mean ? "mean's amax" : "amax", (long long)i, (double)amax);
    }
  }
  double least, most;
  int busy;
  fp8comm_gradient_limits(reducer, &least, &most, &busy);
  FP8COMM_TRY(fp8comm_gradient_forget(reducer));
  for (int64_t i = 0; i < count; i++) {
    const unsigned char *record = from + HEADER_BYTES + record_bytes * (size_t)i;
    const double mu = mu_of(record);
    tensors[i].last_amax = amax_of(record, record_bytes, 0);
    tensors[i].last_mean_amax = amax_of(record, record_bytes, 1);
    tensors[i].mu = mu < least ? least : mu > most ? most : mu;
    tensors[i].statistics.mu = tensors[i].statistics.next_mu = tensors[i].mu;
  }
  return FP8CORE_OK;
}
