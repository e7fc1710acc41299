#include "text_source.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "json_reader.h"
#include "tensor_file.h"
#include "tokenizer.h"
#include "words.h"

#define PIECE_BYTES ((size_t)1 << 20)
// How long what never comes is waited for before the next look at the signals.
#define LOOK_MILLISECONDS 200

static fp8core_status out_of_memory(size_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for %zu bytes of text", bytes);
}

static fp8core_status reserve(char **bytes, size_t *room, size_t size) {
  if (size <= *room) return FP8CORE_OK;
  char *larger = realloc(*bytes, size);
  if (!larger) return out_of_memory(size);
  *bytes = larger;
  *room = size;
  return FP8CORE_OK;
}

void fp8lm_text_source_init(fp8lm_text_source *source, char *const *paths, size_t count, fp8lm_text_format format,
                            fp8lm_text_division division, const volatile sig_atomic_t *interrupted) {
  fp8lm_words_prepare();
  memset(source, 0, sizeof(*source));
  source->paths = paths;
  source->count = count;
  source->format = format;
  source->division = division;
  source->interrupted = interrupted;
  source->descriptor = -1;
}

static int is_standard_input(const char *path) { return strcmp(path, "-") == 0; }

static const char *name_of(const char *path) { return is_standard_input(path) ? "standard input" : path; }

static int has_json_extension(const char *path) {
  const char *dot = strrchr(path, '.');
  return dot && (strcasecmp(dot, ".jsonl") == 0 || strcasecmp(dot, ".ndjson") == 0 || strcasecmp(dot, ".json") == 0);
}

static fp8core_status open_next(fp8lm_text_source *source) {
  const char *path = source->paths[source->finished];
  source->descriptor = is_standard_input(path) ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
  if (source->descriptor < 0) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: cannot open the file: %s", path,
                                  strerror(errno));
  }
  struct stat information;
  if (fstat(source->descriptor, &information) == 0 && S_ISDIR(information.st_mode)) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: is a directory, expected a file", name_of(path));
  }
  source->jsonl = source->format == FP8LM_TEXT_JSONL || (source->format == FP8LM_TEXT_AUTO && has_json_extension(path));
  source->at_end = 0;
  source->offset = 0;
  source->line = 0;
  return FP8CORE_OK;
}

static void close_current(fp8lm_text_source *source) {
  if (source->descriptor >= 0 && !is_standard_input(source->paths[source->finished])) (void)close(source->descriptor);
  source->descriptor = -1;
}

// Reads until the piece has `size` bytes or the file ends.
static fp8core_status fill(fp8lm_text_source *source, fp8lm_piece *piece, size_t size) {
  const fp8core_status status = reserve(&piece->bytes, &piece->room, size + 1);
  if (status != FP8CORE_OK) return status;
  while (piece->size < size && !source->at_end) {
    if (source->interrupted && *source->interrupted) {
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: interrupted", piece->name);
    }
    // A signal that comes after the look at the flag would not end a read() of what never comes.
    if (source->interrupted) {
      struct pollfd polled = {.fd = source->descriptor, .events = POLLIN};
      const int ready = poll(&polled, 1, LOOK_MILLISECONDS);
      if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    }
    const ssize_t got = read(source->descriptor, piece->bytes + piece->size, size - piece->size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: cannot read: %s", piece->name,
                                    strerror(errno));
    }
    source->at_end = got == 0;
    piece->size += (size_t)got;
  }
  return FP8CORE_OK;
}

// Where the piece should end; 0 where that is not in sight.
static size_t division(const fp8lm_text_source *source, const fp8lm_piece *piece) {
  const unsigned char *text = (const unsigned char *)piece->bytes;
  if (source->at_end) return piece->size;
  if (source->jsonl) {
    const char *newline = memrchr(piece->bytes, '\n', piece->size);
    return newline ? (size_t)(newline - piece->bytes) + 1 : 0;
  }
  if (source->division == FP8LM_DIVIDE_ANYWHERE) return piece->size;
  for (size_t position = piece->size - 1; position > 0; position--) {
    const unsigned char next = text[position];
    if (source->division == FP8LM_DIVIDE_SPACE && next != ' ' && (next < '\t' || next > '\r')) continue;
    if (fp8lm_divides_words(text, piece->size, position)) return position;
  }
  return 0;
}

fp8core_status fp8lm_text_next(fp8lm_text_source *source, fp8lm_piece *piece, int *more) {
  piece->size = 0;
  *more = 0;
  if (source->finished == source->count) return FP8CORE_OK;
  fp8core_status status = FP8CORE_OK;
  if (source->descriptor < 0) status = open_next(source);
  if (status != FP8CORE_OK) return status;
  piece->name = name_of(source->paths[source->finished]);
  piece->jsonl = source->jsonl;
  piece->offset = source->offset;
  piece->line = source->line;
  status = reserve(&piece->bytes, &piece->room, source->rest_size + 1);
  if (status != FP8CORE_OK) return status;
  if (source->rest_size) memcpy(piece->bytes, source->rest, source->rest_size);
  piece->size = source->rest_size;
  source->rest_size = 0;
  // One run of characters, however long a word may be, always has its end within this.
  const size_t limit = source->jsonl ? FP8LM_MAX_LINE : 2 * FP8LM_TOKENIZER_MAX_WORD + PIECE_BYTES;
  size_t end = 0;
  for (size_t wanted = PIECE_BYTES;; wanted *= 2) {
    if (wanted > limit) wanted = limit;
    status = fill(source, piece, wanted);
    if (status != FP8CORE_OK) return status;
    end = division(source, piece);
    if (end || source->at_end) break;
    if (wanted < limit) continue;
    if (source->jsonl) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "%s, line %" PRIu64 ": is longer than %zu bytes",
                                    piece->name, source->line + 1, limit);
    }
    return fp8core_set_last_error(
      FP8CORE_ERROR_CORRUPT_DATA, "%s: has %zu bytes from byte %" PRIu64 " on with no %s", piece->name, limit,
      source->offset, source->division == FP8LM_DIVIDE_SPACE ? "white space between them" : "end of a word in them");
  }
  if (source->at_end) {
    piece->ends_document = !source->jsonl;
    close_current(source);
    source->finished++;
    *more = 1;
    return FP8CORE_OK;
  }
  piece->ends_document = 0;
  source->rest_size = piece->size - end;
  status = reserve(&source->rest, &source->rest_room, source->rest_size + 1);
  if (status != FP8CORE_OK) return status;
  memcpy(source->rest, piece->bytes + end, source->rest_size);
  piece->size = end;
  source->offset += end;
  if (source->jsonl) {
    for (size_t i = 0; i < end; i++) source->line += piece->bytes[i] == '\n';
  }
  *more = 1;
  return FP8CORE_OK;
}

void fp8lm_text_source_free(fp8lm_text_source *source) {
  if (source->finished < source->count) close_current(source);
  free(source->rest);
  source->rest = NULL;
}

void fp8lm_piece_free(fp8lm_piece *piece) {
  free(piece->bytes);
  memset(piece, 0, sizeof(*piece));
}

// The string under `key`; both strings are in the line.
static fp8core_status find_text(char *line, size_t length, const char *key, char **text, size_t *size) {
  fp8lm_json json;
  fp8lm_json_init(&json, line, length);
  fp8core_status status = fp8lm_json_enter_object(&json);
  char quoted[FP8LM_QUOTE_BYTES];
  *text = NULL;
  for (int more = 1; status == FP8CORE_OK;) {
    char *name;
    size_t name_length;
    status = fp8lm_json_next_member(&json, &name, &name_length, &more);
    if (status != FP8CORE_OK || !more) break;
    if (name_length != strlen(key) || memcmp(name, key, name_length) != 0) {
      status = fp8lm_json_skip(&json);
    } else if (*text) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the key %s is there twice",
                                    fp8lm_quote(quoted, key, strlen(key)));
    } else {
      status = fp8lm_json_string(&json, text, size);
    }
  }
  if (status == FP8CORE_OK) status = fp8lm_json_finish(&json);
  if (status == FP8CORE_OK && !*text) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "there is no key %s",
                                  fp8lm_quote(quoted, key, strlen(key)));
  }
  return status;
}

fp8core_status fp8lm_each_json_text(fp8lm_piece *piece, const char *key,
                                    fp8core_status (*use)(void *context, const char *text, size_t size),
                                    void *context) {
  uint64_t line = piece->line;
  for (size_t start = 0; start < piece->size;) {
    char *begin = piece->bytes + start;
    const char *newline = memchr(begin, '\n', piece->size - start);
    const size_t length = newline ? (size_t)(newline - begin) : piece->size - start;
    line++;
    start += length + 1;
    size_t blank = 0;
    while (blank < length && strchr(" \t\r", begin[blank]) && begin[blank]) blank++;
    if (blank == length) continue;
    char *text;
    size_t size = 0;
    fp8core_status status = find_text(begin, length, key, &text, &size);
    if (status == FP8CORE_OK) status = use(context, text, size);
    if (status != FP8CORE_OK) {
      char message[400];
      snprintf(message, sizeof(message), "%s", fp8core_last_error());
      return fp8core_set_last_error(status, "%s, line %" PRIu64 ": %s", piece->name, line, message);
    }
  }
  return FP8CORE_OK;
}
