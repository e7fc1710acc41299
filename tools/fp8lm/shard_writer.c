// Writing of shards, and the names of a series of them.
#include "shard.h"

#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "output.h"

#define BUFFER_BYTES ((size_t)1 << 20)
// "_000000.bin", ".tmp" and a NUL.
#define SUFFIX_ROOM 32

struct fp8lm_shard_writer {
  char *prefix;
  // A name, its temporary form, and room for either.
  char *path;
  size_t path_room;
  uint32_t vocabulary;
  unsigned width;
  uint64_t shard_tokens;
  int descriptor;
  unsigned char *buffer;
  size_t buffered;
  // Of the shard that is being written.
  uint64_t count;
  uint32_t checksum;
  // Shards begun, and of them those that have their names.
  size_t shards;
  size_t committed;
  uint64_t tokens;
};

static const char *name(const fp8lm_shard_writer *writer, size_t number, int temporary) {
  (void)snprintf(writer->path, writer->path_room, "%s_%06zu.bin%s", writer->prefix, number, temporary ? ".tmp" : "");
  return writer->path;
}

static fp8core_status failed(const char *what, const char *path) {
  return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "%s: cannot %s: %s", path, what, strerror(errno));
}

static fp8core_status write_all(fp8lm_shard_writer *writer, const void *bytes, size_t size) {
  const unsigned char *next = bytes;
  while (size) {
    const ssize_t written = write(writer->descriptor, next, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed("write", name(writer, writer->shards - 1, 1));
    next += written;
    size -= (size_t)written;
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_shard_writer_create(fp8lm_shard_writer **out, const char *prefix, uint32_t vocabulary,
                                         uint64_t shard_tokens) {
  fp8lm_shard_writer *writer = calloc(1, sizeof(*writer));
  *out = writer;
  if (writer) {
    writer->descriptor = -1;
    writer->vocabulary = vocabulary;
    writer->width = vocabulary <= 65536 ? 2 : 4;
    writer->shard_tokens = shard_tokens;
    writer->prefix = strdup(prefix);
    writer->path_room = strlen(prefix) + SUFFIX_ROOM;
    writer->path = malloc(writer->path_room);
    writer->buffer = malloc(BUFFER_BYTES);
  }
  if (!writer || !writer->prefix || !writer->path || !writer->buffer) {
    fp8lm_shard_writer_destroy(out);
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory to write shards");
  }
  return FP8CORE_OK;
}

static fp8core_status begin_shard(fp8lm_shard_writer *writer) {
  static const unsigned char header[FP8LM_SHARD_HEADER_BYTES];
  const char *path = name(writer, writer->shards, 1);
  const fp8core_status status = fp8lm_output_create(&writer->descriptor, path);
  if (status != FP8CORE_OK) return fp8core_set_last_error(status, "%s: %s", path, fp8core_last_error());
  writer->shards++;
  writer->count = 0;
  writer->checksum = 0;
  return write_all(writer, header, sizeof(header));
}

static fp8core_status flush_buffer(fp8lm_shard_writer *writer) {
  writer->checksum = fp8lm_crc32(writer->checksum, writer->buffer, writer->buffered);
  const fp8core_status status = write_all(writer, writer->buffer, writer->buffered);
  writer->buffered = 0;
  return status;
}

static fp8core_status end_shard(fp8lm_shard_writer *writer) {
  fp8core_status status = flush_buffer(writer);
  if (status != FP8CORE_OK) return status;
  uint32_t header[6] = {writer->width == 2 ? 20240520 : 20240801,
                        writer->width == 2 ? 1 : 7,
                        (uint32_t)writer->count,
                        writer->vocabulary,
                        1,
                        writer->checksum};
  for (size_t i = 0; i < 6; i++) header[i] = htole32(header[i]);
  const char *path = name(writer, writer->shards - 1, 1);
  if (lseek(writer->descriptor, 0, SEEK_SET) != 0) return failed("seek", path);
  status = write_all(writer, header, sizeof(header));
  if (status != FP8CORE_OK) return status;
  // Some file systems cannot sync.
  if (fsync(writer->descriptor) != 0 && errno != EINVAL && errno != EROFS) return failed("sync", path);
  const int descriptor = writer->descriptor;
  writer->descriptor = -1;
  return close(descriptor) == 0 ? FP8CORE_OK : failed("close", path);
}

fp8core_status fp8lm_shard_writer_append(fp8lm_shard_writer *writer, const uint32_t *tokens, size_t count) {
  while (count) {
    fp8core_status status = FP8CORE_OK;
    if (writer->descriptor < 0) status = begin_shard(writer);
    if (status != FP8CORE_OK) return status;
    size_t part = (BUFFER_BYTES - writer->buffered) / writer->width;
    if (part > count) part = count;
    if (part > writer->shard_tokens - writer->count) part = (size_t)(writer->shard_tokens - writer->count);
    unsigned char *out = writer->buffer + writer->buffered;
    for (size_t i = 0; i < part; i++) {
      if (writer->width == 2) {
        const uint16_t token = htole16((uint16_t)tokens[i]);
        memcpy(out + 2 * i, &token, 2);
      } else {
        const uint32_t token = htole32(tokens[i]);
        memcpy(out + 4 * i, &token, 4);
      }
    }
    writer->buffered += part * writer->width;
    writer->count += part;
    writer->tokens += part;
    tokens += part;
    count -= part;
    if (writer->count == writer->shard_tokens)
      status = end_shard(writer);
    else if (writer->buffered == BUFFER_BYTES)
      status = flush_buffer(writer);
    if (status != FP8CORE_OK) return status;
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_shard_writer_finish(fp8lm_shard_writer *writer) {
  return writer->descriptor < 0 ? FP8CORE_OK : end_shard(writer);
}

// Everything before the last '/', and where the name begins.
static char *folder_of(const char *prefix, const char **base) {
  const char *slash = strrchr(prefix, '/');
  *base = slash ? slash + 1 : prefix;
  return slash ? strndup(prefix, slash == prefix ? 1 : (size_t)(slash - prefix)) : strdup(".");
}

fp8core_status fp8lm_shard_writer_commit(fp8lm_shard_writer *writer) {
  char *temporary = malloc(writer->path_room);
  const char *base;
  char *folder = folder_of(writer->prefix, &base);
  fp8core_status status = FP8CORE_OK;
  if (!temporary || !folder) {
    status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory to name the shards");
  }
  while (status == FP8CORE_OK && writer->committed < writer->shards) {
    (void)strcpy(temporary, name(writer, writer->committed, 1));
    const char *path = name(writer, writer->committed, 0);
    if (rename(temporary, path) != 0)
      status = failed("rename the finished file to this", path);
    else
      writer->committed++;
  }
  if (status == FP8CORE_OK) {
    // So that the names last, too. Some file systems cannot do it for folders.
    const int descriptor = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor >= 0) {
      (void)fsync(descriptor);
      (void)close(descriptor);
    }
  }
  free(temporary);
  free(folder);
  return status;
}

uint64_t fp8lm_shard_writer_tokens(const fp8lm_shard_writer *writer) { return writer->tokens; }

size_t fp8lm_shard_writer_shards(const fp8lm_shard_writer *writer) { return writer->shards; }

void fp8lm_shard_writer_destroy(fp8lm_shard_writer **out) {
  fp8lm_shard_writer *writer = out ? *out : NULL;
  if (!writer) return;
  if (writer->descriptor >= 0) (void)close(writer->descriptor);
  for (size_t i = writer->committed; i < writer->shards; i++) (void)unlink(name(writer, i, 1));
  free(writer->prefix);
  free(writer->path);
  free(writer->buffer);
  free(writer);
  *out = NULL;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// The number of NAME_NNNNNN.bin; -1 for other names.
static long number_of(const char *file, const char *base) {
  const size_t length = strlen(base);
  if (strncmp(file, base, length) != 0 || file[length] != '_') return -1;
  const char *digits = file + length + 1;
  if (strspn(digits, "0123456789") != 6 || strcmp(digits + 6, ".bin") != 0) return -1;
  return strtol(digits, NULL, 10);
}

void fp8lm_shard_series_free(char ***paths, size_t count) {
  for (size_t i = 0; *paths && i < count; i++) free((*paths)[i]);
  free(*paths);
  *paths = NULL;
}

fp8core_status fp8lm_shard_series(const char *prefix, char ***paths, size_t *count) {
  const char *base;
  char *folder = folder_of(prefix, &base);
  DIR *directory = folder ? opendir(folder) : NULL;
  *paths = NULL;
  *count = 0;
  fp8core_status status = FP8CORE_OK;
  if (!directory) {
    status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: cannot read the folder: %s",
                                    folder ? folder : prefix, strerror(errno));
  }
  for (struct dirent *entry; directory && (entry = readdir(directory));) {
    if (number_of(entry->d_name, base) < 0) continue;
    char **larger = realloc(*paths, (*count + 1) * sizeof(char *));
    if (larger) *paths = larger;
    const size_t stem = (size_t)(base - prefix);
    char *path = larger ? malloc(stem + strlen(entry->d_name) + 1) : NULL;
    if (!path) {
      status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for the names of shards");
      break;
    }
    memcpy(path, prefix, stem);
    (void)strcpy(path + stem, entry->d_name);
    (*paths)[(*count)++] = path;
  }
  if (directory) (void)closedir(directory);
  if (*count) qsort(*paths, *count, sizeof(char *), compare_paths);
  for (size_t i = 0; status == FP8CORE_OK && i < *count; i++) {
    const size_t stem = (size_t)(base - prefix);
    const long first = number_of((*paths)[0] + stem, base);
    const long expected = (first ? 1 : 0) + (long)i;
    if (number_of((*paths)[i] + stem, base) != expected) {
      status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "%s_%06ld.bin is missing, but %s is there", prefix,
                                      expected, (*paths)[i]);
    }
  }
  free(folder);
  if (status != FP8CORE_OK) {
    fp8lm_shard_series_free(paths, *count);
    *count = 0;
  }
  return status;
}

fp8core_status fp8lm_shard_series_trim(const char *prefix, size_t keep) {
  const char *base;
  char *folder = folder_of(prefix, &base);
  DIR *directory = folder ? opendir(folder) : NULL;
  fp8core_status status = FP8CORE_OK;
  for (struct dirent *entry; directory && (entry = readdir(directory));) {
    const long number = number_of(entry->d_name, base);
    if (number < 0 || (size_t)number < keep) continue;
    if (unlinkat(dirfd(directory), entry->d_name, 0) != 0) status = failed("remove this file of before", entry->d_name);
  }
  if (directory) (void)closedir(directory);
  free(folder);
  return status;
}
