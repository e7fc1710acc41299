#include "event_file.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "output.h"

struct fp8lm_event_file {
  FILE *stream;
};

// Fields of Event, Summary and Summary.Value.
enum { EVENT_WALL_TIME = 1, EVENT_STEP = 2, EVENT_FILE_VERSION = 3, EVENT_SUMMARY = 5 };
enum { SUMMARY_VALUE = 1 };
enum { VALUE_TAG = 1, VALUE_SIMPLE_VALUE = 2 };
// Wire types of protobuf.
enum { VARINT = 0, FIXED_64 = 1, BYTES = 2, FIXED_32 = 5 };

uint32_t fp8lm_crc32c(const void *data, size_t bytes) {
  const unsigned char *from = data;
  uint32_t crc = UINT32_MAX;
  for (size_t i = 0; i < bytes; i++) {
    crc ^= from[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (UINT32_C(0x82f63b78) & -(crc & 1));
  }
  return ~crc;
}

// So that the checksum of data with checksums in it is not one of special value: TFRecord's own rotation and sum.
static uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + UINT32_C(0xa282ead8); }

typedef struct buffer {
  unsigned char bytes[4096];
  size_t size;
} buffer;

static void put_little_endian(buffer *out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) out->bytes[out->size++] = (unsigned char)(value >> 8 * i);
}

static void put_varint(buffer *out, uint64_t value) {
  for (; value > 127; value >>= 7) out->bytes[out->size++] = (unsigned char)(value | 128);
  out->bytes[out->size++] = (unsigned char)value;
}

static void put_key(buffer *out, unsigned field, unsigned wire_type) { put_varint(out, field << 3 | wire_type); }

static void put_bytes(buffer *out, unsigned field, const void *bytes, size_t size) {
  put_key(out, field, BYTES);
  put_varint(out, size);
  memcpy(out->bytes + out->size, bytes, size);
  out->size += size;
}

static void put_double(buffer *out, unsigned field, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  put_key(out, field, FIXED_64);
  put_little_endian(out, bits, 8);
}

static void put_float(buffer *out, unsigned field, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  put_key(out, field, FIXED_32);
  put_little_endian(out, bits, 4);
}

static double wall_time(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void put_record(FILE *stream, const buffer *event) {
  buffer frame = {.size = 0};
  put_little_endian(&frame, event->size, 8);
  put_little_endian(&frame, masked(fp8lm_crc32c(frame.bytes, 8)), 4);
  fwrite(frame.bytes, 1, frame.size, stream);
  fwrite(event->bytes, 1, event->size, stream);
  frame.size = 0;
  put_little_endian(&frame, masked(fp8lm_crc32c(event->bytes, event->size)), 4);
  fwrite(frame.bytes, 1, frame.size, stream);
}

fp8core_status fp8lm_event_file_create(fp8lm_event_file **file, const char *folder) {
  char host[256] = "localhost";
  char path[PATH_MAX];
  *file = NULL;
  if (gethostname(host, sizeof(host) - 1) != 0) (void)strcpy(host, "localhost");
  const int length = snprintf(path, sizeof(path), "%s/events.out.tfevents.%010" PRId64 ".%s.%ld", folder,
                              (int64_t)wall_time(), host, (long)getpid());
  if (length < 0 || (size_t)length >= sizeof(path))
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the path of the event file is too long");
  fp8lm_event_file *created = calloc(1, sizeof(*created));
  if (!created) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate an event file");
  int descriptor;
  const fp8core_status status = fp8lm_output_open(&descriptor, path);
  if (status != FP8CORE_OK) {
    free(created);
    return status;
  }
  created->stream = fdopen(descriptor, "ab");
  if (!created->stream) {
    const int reason = errno;
    (void)close(descriptor);
    free(created);
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot create an event file: %s", strerror(reason));
  }
  buffer event = {.size = 0};
  static const char version[] = "brain.Event:2";
  put_double(&event, EVENT_WALL_TIME, wall_time());
  put_bytes(&event, EVENT_FILE_VERSION, version, sizeof(version) - 1);
  put_record(created->stream, &event);
  *file = created;
  return FP8CORE_OK;
}

// Bytes of a value besides its tag, and of an event besides its values, at most.
#define VALUE_BYTES 32
#define EVENT_BYTES 64

void fp8lm_event_file_add(fp8lm_event_file *file, int64_t step, const fp8lm_scalar *scalars, size_t count) {
  while (count > 0) {
    buffer summary = {.size = 0};
    for (; count > 0; scalars++, count--) {
      buffer value = {.size = 0};
      const size_t length = strlen(scalars->tag);
      if (length > 1024) continue;
      if (summary.size + length + VALUE_BYTES + EVENT_BYTES > sizeof(summary.bytes)) break;
      put_bytes(&value, VALUE_TAG, scalars->tag, length);
      put_float(&value, VALUE_SIMPLE_VALUE, scalars->value);
      put_bytes(&summary, SUMMARY_VALUE, value.bytes, value.size);
    }
    buffer event = {.size = 0};
    put_double(&event, EVENT_WALL_TIME, wall_time());
    put_key(&event, EVENT_STEP, VARINT);
    put_varint(&event, (uint64_t)step);
    put_bytes(&event, EVENT_SUMMARY, summary.bytes, summary.size);
    put_record(file->stream, &event);
  }
}

void fp8lm_event_file_flush(fp8lm_event_file *file) { (void)fflush(file->stream); }

fp8core_status fp8lm_event_file_close(fp8lm_event_file **file) {
  if (!*file) return FP8CORE_OK;
  FILE *stream = (*file)->stream;
  free(*file);
  *file = NULL;
  errno = 0;
  const int bad = ferror(stream);
  if (fclose(stream) == 0 && !bad) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot write the event file: %s",
                                errno ? strerror(errno) : "a write failed");
}
