#include "checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checksum.h"
#include "fp8core/fp8core.h"
#include "fp8gpt/version.h"
#include "fp8optim/version.h"
#include "input.h"
#include "json_writer.h"
#include "tensor_file.h"

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)
#define refused(...) fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

#define FORMAT "fp8lm checkpoint"
#define STEP_PREFIX "step-"
#define STEP_DIGITS 8
#define TEMPORARY_SUFFIX ".tmp"
#define MOST_TEMPORARY_NAMES 1000
#define CHECKSUM_KEY "\"crc32\": \""

static const char *const file_names[] = {FP8LM_CHECKPOINT_MODEL, FP8LM_CHECKPOINT_STATE, FP8LM_CHECKPOINT_VOCAB,
                                         FP8LM_CHECKPOINT_MERGES};

void fp8lm_checkpoint_state_name(char name[FP8LM_CHECKPOINT_NAME_BYTES], int rank, int ranks) {
  if (ranks == 1)
    (void)snprintf(name, FP8LM_CHECKPOINT_NAME_BYTES, "%s", FP8LM_CHECKPOINT_STATE);
  else
    (void)snprintf(name, FP8LM_CHECKPOINT_NAME_BYTES, "state-%05d-of-%05d.safetensors", rank + 1, ranks);
}

// Of one of several ranks, as fp8lm_checkpoint_state_name() spells it.
static int is_shard_of_state(const char *name) {
  int shard;
  int shards;
  char spelled[FP8LM_CHECKPOINT_NAME_BYTES];
  if (sscanf(name, "state-%5d-of-%5d.safetensors", &shard, &shards) != 2 || shard < 1 || shard > shards || shards < 2)
    return 0;
  fp8lm_checkpoint_state_name(spelled, shard - 1, shards);
  return strcmp(name, spelled) == 0;
}

int fp8lm_checkpoint_is_state(const char *name) {
  return strcmp(name, FP8LM_CHECKPOINT_STATE) == 0 || is_shard_of_state(name);
}

static int known_file(const char *name) {
  for (size_t i = 0; i < sizeof(file_names) / sizeof(*file_names); i++)
    if (strcmp(file_names[i], name) == 0) return 1;
  return is_shard_of_state(name);
}

fp8core_status fp8lm_checkpoint_index_add(fp8lm_checkpoint_index *index, const fp8lm_checkpoint_file *file) {
  if (index->file_count == index->file_room) {
    const int room = 2 * index->file_room + 8;
    fp8lm_checkpoint_file *grown = realloc(index->files, (size_t)room * sizeof(*grown));
    if (!grown) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the list of files");
    index->files = grown;
    index->file_room = room;
  }
  index->files[index->file_count++] = *file;
  return FP8CORE_OK;
}

// Paths and folders.

fp8core_status fp8lm_join_path(char path[PATH_MAX], const char *folder, const char *name) {
  const int length = snprintf(path, PATH_MAX, "%s/%s", folder, name);
  if (length >= 0 && length < PATH_MAX) return FP8CORE_OK;
  return refused("the path is too long");
}

fp8core_status fp8lm_make_folders(const char *folder) {
  char path[PATH_MAX];
  const size_t length = strlen(folder);
  if (length >= sizeof(path)) return refused("the path is too long");
  memcpy(path, folder, length + 1);
  for (size_t i = 1; i <= length; i++) {
    if (path[i] != '/' && path[i] != '\0') continue;
    path[i] = '\0';
    if (mkdir(path, 0777) != 0 && errno != EEXIST) return refused("cannot create the folder: %s", strerror(errno));
    if (i < length) path[i] = '/';
  }
  struct stat information;
  if (stat(folder, &information) != 0) return refused("cannot look at the folder: %s", strerror(errno));
  return S_ISDIR(information.st_mode) ? FP8CORE_OK : refused("is not a folder");
}

static fp8core_status sync_folder(const char *path) {
  const int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return refused("cannot open the folder: %s", strerror(errno));
  const int failed = fsync(descriptor) != 0;
  const int reason = errno;
  close(descriptor);
  return failed ? refused("cannot sync the folder: %s", strerror(reason)) : FP8CORE_OK;
}

// Whether it is a folder (no link to one) with nothing in it but files of checkpoints, all or some of them.
static int only_checkpoint_files(const char *path) {
  const int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR *directory = descriptor >= 0 ? fdopendir(descriptor) : NULL;
  if (!directory) {
    if (descriptor >= 0) close(descriptor);
    return 0;
  }
  int only = 1;
  for (const struct dirent *entry; only && (entry = readdir(directory)) != NULL;) {
    struct stat information;
    const char *name = entry->d_name;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
    only = (known_file(name) || strcmp(name, FP8LM_CHECKPOINT_INDEX) == 0) &&
           fstatat(descriptor, name, &information, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(information.st_mode);
  }
  closedir(directory);
  return only;
}

// Only files that checkpoints have: a folder with anything else in it stays whole.
static void remove_folder(const char *path) {
  char file[PATH_MAX];
  if (!only_checkpoint_files(path)) return;
  if (fp8lm_join_path(file, path, FP8LM_CHECKPOINT_INDEX) == FP8CORE_OK) (void)unlink(file);
  DIR *directory = opendir(path);
  if (!directory) return;
  for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
    if (known_file(entry->d_name)) (void)unlinkat(dirfd(directory), entry->d_name, 0);
  closedir(directory);
  (void)rmdir(path);
}

// The number of "step-NNNNNNNN" as step_path() writes it, which has no second spelling; -1 for other names. *rest is
// what follows the digits.
static int64_t step_of_name(const char *name, const char **rest) {
  if (strncmp(name, STEP_PREFIX, strlen(STEP_PREFIX)) != 0) return -1;
  const char *digits = name + strlen(STEP_PREFIX);
  const size_t count = strspn(digits, "0123456789");
  if (count < STEP_DIGITS || count > 15 || (count > STEP_DIGITS && digits[0] == '0')) return -1;
  *rest = digits + count;
  return strtoll(digits, NULL, 10);
}

// "step-NNNNNNNN.tmp" and, where that was taken, "step-NNNNNNNN.1.tmp" and so on.
static int is_temporary_name(const char *name) {
  const char *rest;
  if (step_of_name(name, &rest) < 0) return 0;
  if (*rest == '.' && rest[1] >= '1' && rest[1] <= '9') rest += 1 + strspn(rest + 1, "0123456789");
  return strcmp(rest, TEMPORARY_SUFFIX) == 0;
}

typedef struct step_list {
  int64_t *steps;
  size_t count;
  size_t room;
} step_list;

static int compare_steps(const void *one, const void *other) {
  const int64_t left = *(const int64_t *)one;
  const int64_t right = *(const int64_t *)other;
  return (left > right) - (left < right);
}

// Steps of the checkpoints of a folder in ascending order.
static fp8core_status list_steps(const char *folder, step_list *list) {
  memset(list, 0, sizeof(*list));
  DIR *directory = opendir(folder);
  if (!directory) return errno == ENOENT ? FP8CORE_OK : refused("cannot read the folder: %s", strerror(errno));
  fp8core_status status = FP8CORE_OK;
  for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
    const char *rest;
    struct stat information;
    const int64_t step = step_of_name(entry->d_name, &rest);
    if (step < 0 || *rest != '\0' || fstatat(dirfd(directory), entry->d_name, &information, 0) != 0 ||
        !S_ISDIR(information.st_mode))
      continue;
    if (list->count == list->room) {
      const size_t room = 2 * list->room + 16;
      int64_t *grown = realloc(list->steps, room * sizeof(*grown));
      if (!grown) {
        status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the list of checkpoints");
        break;
      }
      list->steps = grown;
      list->room = room;
    }
    list->steps[list->count++] = step;
  }
  closedir(directory);
  if (status != FP8CORE_OK) {
    free(list->steps);
    memset(list, 0, sizeof(*list));
  } else if (list->count > 0) {
    qsort(list->steps, list->count, sizeof(*list->steps), compare_steps);
  }
  return status;
}

static fp8core_status step_path(char path[PATH_MAX], const char *folder, int64_t step) {
  char name[64];
  (void)snprintf(name, sizeof(name), STEP_PREFIX "%0*" PRId64, STEP_DIGITS, step);
  return fp8lm_join_path(path, folder, name);
}

// The name to try after \p tries others, which something is in the way of.
static fp8core_status temporary_path(char path[PATH_MAX], const char *folder, int64_t step, int tries) {
  char name[64];
  if (tries == 0)
    (void)snprintf(name, sizeof(name), STEP_PREFIX "%0*" PRId64 TEMPORARY_SUFFIX, STEP_DIGITS, step);
  else
    (void)snprintf(name, sizeof(name), STEP_PREFIX "%0*" PRId64 ".%d" TEMPORARY_SUFFIX, STEP_DIGITS, step, tries);
  return fp8lm_join_path(path, folder, name);
}

// What interrupted runs left.
static fp8core_status remove_temporary(const char *folder) {
  DIR *directory = opendir(folder);
  if (!directory) return errno == ENOENT ? FP8CORE_OK : refused("cannot read the folder: %s", strerror(errno));
  for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
    char path[PATH_MAX];
    if (is_temporary_name(entry->d_name) && fp8lm_join_path(path, folder, entry->d_name) == FP8CORE_OK)
      remove_folder(path);
  }
  closedir(directory);
  return FP8CORE_OK;
}

fp8core_status fp8lm_checkpoint_newest(const char *folder, char **path, int64_t *step) {
  *path = NULL;
  if (step) *step = -1;
  step_list list;
  fp8core_status status = list_steps(folder, &list);
  if (status != FP8CORE_OK) return status;
  if (list.count > 0) {
    char found[PATH_MAX];
    status = step_path(found, folder, list.steps[list.count - 1]);
    if (status == FP8CORE_OK) *path = strdup(found);
    if (step) *step = list.steps[list.count - 1];
    if (status == FP8CORE_OK && !*path)
      status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a path");
  }
  free(list.steps);
  return status;
}

fp8core_status fp8lm_checkpoint_find(const char *given, char **path) {
  char index[PATH_MAX];
  *path = NULL;
  fp8core_status status = fp8lm_join_path(index, given, FP8LM_CHECKPOINT_INDEX);
  if (status != FP8CORE_OK) return status;
  if (access(index, F_OK) == 0) {
    *path = strdup(given);
    return *path ? FP8CORE_OK : fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a path");
  }
  status = fp8lm_checkpoint_newest(given, path, NULL);
  if (status != FP8CORE_OK || *path) return status;
  return access(given, F_OK) == 0 ? refused("is no checkpoint and holds none, expected " FP8LM_CHECKPOINT_INDEX
                                            " or folders " STEP_PREFIX "NNNNNNNN")
                                  : refused("there is no such folder");
}

// The index.

void fp8lm_checkpoint_index_write(FILE *stream, const fp8lm_checkpoint_index *index) {
  // The checksum is of all that comes before its key.
  char *text = NULL;
  size_t length = 0;
  FILE *memory = open_memstream(&text, &length);
  if (!memory) {
    // Seen by whoever looks at the stream's error, and by the reader of what is then no index.
    fputs("{", stream);
    return;
  }
  fprintf(memory,
          "{\n"
          "  \"format\": \"" FORMAT "\",\n"
          "  \"version\": %d,\n"
          "  \"fp8lm\": \"%s\",\n"
          "  \"libraries\": {\"fp8core\": \"%s\", \"fp8optim\": \"%s\", \"fp8gpt\": \"%s\"},\n"
          "  \"step\": %" PRId64 ",\n"
          "  \"optimizer_steps\": %" PRId64 ",\n"
          "  \"skipped_steps\": %" PRId64 ",\n"
          "  \"skipped_in_a_row\": %" PRId64 ",\n"
          "  \"loader\": {\"next_step\": %" PRId64 "},\n"
          "  \"options\": ",
          FP8LM_CHECKPOINT_VERSION, FP8LM_VERSION, fp8core_version(), fp8optim_version(), fp8gpt_version(), index->step,
          index->optimizer_steps, index->skipped_steps, index->skipped_in_a_row, index->step);
  fp8lm_train_settings_write(memory, &index->settings, 4);
  fputs(",\n  \"files\": [", memory);
  for (int i = 0; i < index->file_count; i++)
    fprintf(memory, "%s\n    {\"name\": \"%s\", \"bytes\": %" PRIu64 ", \"crc32\": \"%08" PRIx32 "\"}",
            i > 0 ? "," : "", index->files[i].name, index->files[i].bytes, index->files[i].crc32);
  fputs("\n  ],\n  ", memory);
  if (fclose(memory) == 0) {
    fwrite(text, 1, length, stream);
    fprintf(stream, CHECKSUM_KEY "%08" PRIx32 "\"\n}\n", fp8lm_crc32(0, text, length));
  }
  free(text);
}

static int is_key(const char *key, size_t length, const char *name) {
  return length == strlen(name) && memcmp(key, name, length) == 0;
}

// Whether the text ends in the checksum of what comes before it.
static int checksum_right(const char *text, size_t length) {
  const size_t key = strlen(CHECKSUM_KEY);
  const size_t tail = key + 8 + strlen("\"\n}\n");
  if (length < tail || memcmp(text + length - tail, CHECKSUM_KEY, key) != 0) return 0;
  char digits[9];
  char expected[9];
  memcpy(digits, text + length - tail + key, 8);
  digits[8] = '\0';
  (void)snprintf(expected, sizeof(expected), "%08" PRIx32, fp8lm_crc32(0, text, length - tail));
  return strcmp(digits, expected) == 0;
}

static fp8core_status read_count(fp8lm_json *json, const char *name, uint64_t most, int64_t *value) {
  uint64_t number;
  const fp8core_status status = fp8lm_json_unsigned(json, &number);
  if (status != FP8CORE_OK) return status;
  if (number > most) return corrupt("\"%s\" is %" PRIu64 ", expected at most %" PRIu64, name, number, most);
  *value = (int64_t)number;
  return FP8CORE_OK;
}

static fp8core_status read_checksum(fp8lm_json *json, uint32_t *value) {
  char *text;
  size_t length;
  const fp8core_status status = fp8lm_json_string(json, &text, &length);
  if (status != FP8CORE_OK) return status;
  if (length != 8 || strspn(text, "0123456789abcdef") != 8)
    return corrupt("a \"crc32\" is not 8 digits of lower-case hexadecimal");
  *value = (uint32_t)strtoul(text, NULL, 16);
  return FP8CORE_OK;
}

static fp8core_status read_file_entry(fp8lm_json *json, fp8lm_checkpoint_file *file) {
  int have_bytes = 0;
  int have_checksum = 0;
  memset(file, 0, sizeof(*file));
  fp8core_status status = fp8lm_json_enter_object(json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t length;
    int more;
    status = fp8lm_json_next_member(json, &key, &length, &more);
    if (status != FP8CORE_OK) return status;
    if (!more) break;
    if (is_key(key, length, "name")) {
      char *name;
      status = fp8lm_json_string(json, &name, &length);
      if (status != FP8CORE_OK) return status;
      char quoted[FP8LM_QUOTE_BYTES];
      if (strlen(name) != length || !known_file(name))
        return corrupt("checkpoints have no file %s", fp8lm_quote(quoted, name, length));
      (void)snprintf(file->name, sizeof(file->name), "%s", name);
    } else if (is_key(key, length, "bytes")) {
      status = fp8lm_json_unsigned(json, &file->bytes);
      have_bytes = 1;
    } else if (is_key(key, length, "crc32")) {
      status = read_checksum(json, &file->crc32);
      have_checksum = 1;
    } else {
      return corrupt("an unknown key in \"files\"");
    }
  }
  if (status != FP8CORE_OK) return status;
  return file->name[0] && have_bytes && have_checksum ? FP8CORE_OK
                                                      : corrupt("an entry of \"files\" lacks name, bytes or crc32");
}

// Shards are listed in ascending order, so that none is there twice, however many there are.
static int comes_after_shards(const fp8lm_checkpoint_index *index, const char *name) {
  for (int i = index->file_count - 1; i >= 0; i--)
    if (is_shard_of_state(index->files[i].name)) return strcmp(index->files[i].name, name) < 0;
  return 1;
}

static fp8core_status read_files(fp8lm_json *json, fp8lm_checkpoint_index *index) {
  fp8core_status status = fp8lm_json_enter_array(json);
  while (status == FP8CORE_OK) {
    int more;
    fp8lm_checkpoint_file file;
    status = fp8lm_json_next_element(json, &more);
    if (status != FP8CORE_OK || !more) break;
    status = read_file_entry(json, &file);
    if (status != FP8CORE_OK) break;
    if (is_shard_of_state(file.name) ? !comes_after_shards(index, file.name)
                                     : fp8lm_checkpoint_index_file(index, file.name) != NULL)
      return corrupt("the file %s is there twice, or not in order", file.name);
    status = fp8lm_checkpoint_index_add(index, &file);
  }
  return status;
}

enum {
  KEY_FORMAT,
  KEY_VERSION,
  KEY_FP8LM,
  KEY_LIBRARIES,
  KEY_STEP,
  KEY_OPTIMIZER_STEPS,
  KEY_SKIPPED_STEPS,
  KEY_SKIPPED_IN_A_ROW,
  KEY_LOADER,
  KEY_OPTIONS,
  KEY_FILES,
  KEY_CRC32,
  KEYS
};

static const char *const keys[KEYS] = {"format", "version",         "fp8lm",         "libraries",
                                       "step",   "optimizer_steps", "skipped_steps", "skipped_in_a_row",
                                       "loader", "options",         "files",         "crc32"};

static fp8core_status read_member(fp8lm_json *json, int key, fp8lm_checkpoint_index *index) {
  char *text;
  size_t length;
  int64_t version = 0;
  uint32_t checksum = 0;
  fp8core_status status;
  const uint64_t most_steps = INT32_MAX - 1;
  switch (key) {
  case KEY_FORMAT:
    status = fp8lm_json_string(json, &text, &length);
    if (status == FP8CORE_OK && !is_key(text, length, FORMAT))
      return corrupt("\"format\" is not \"" FORMAT "\": this is a file of something else");
    return status;
  case KEY_VERSION:
    status = read_count(json, "version", INT64_MAX, &version);
    if (status == FP8CORE_OK && version != FP8LM_CHECKPOINT_VERSION)
      return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                    "the checkpoint has version %" PRId64 ", this fp8lm reads version %d", version,
                                    FP8LM_CHECKPOINT_VERSION);
    return status;
  case KEY_STEP: return read_count(json, "step", most_steps, &index->step);
  case KEY_OPTIMIZER_STEPS: return read_count(json, "optimizer_steps", most_steps, &index->optimizer_steps);
  case KEY_SKIPPED_STEPS: return read_count(json, "skipped_steps", most_steps, &index->skipped_steps);
  case KEY_SKIPPED_IN_A_ROW: return read_count(json, "skipped_in_a_row", most_steps, &index->skipped_in_a_row);
  case KEY_OPTIONS: return fp8lm_train_settings_read(json, &index->settings);
  case KEY_FILES: return read_files(json, index);
  case KEY_CRC32: return read_checksum(json, &checksum);
  // What wrote it, and the loader's position, which is the step.
  default: return fp8lm_json_skip(json);
  }
}

static fp8core_status parse_index(char *text, size_t length, fp8lm_checkpoint_index *index) {
  fp8lm_json json;
  unsigned char seen[KEYS] = {0};
  const int right = checksum_right(text, length);
  fp8lm_json_init(&json, text, length);
  fp8core_status status = fp8lm_json_enter_object(&json);
  for (;;) {
    char *name;
    size_t name_length;
    int more = 0;
    if (status == FP8CORE_OK) status = fp8lm_json_next_member(&json, &name, &name_length, &more);
    if (status != FP8CORE_OK) return status;
    if (!more) break;
    int key = 0;
    while (key < KEYS && !is_key(name, name_length, keys[key])) key++;
    char quoted[FP8LM_QUOTE_BYTES];
    // The two that tell whether the rest can be read come first.
    if (key == KEYS || (key > KEY_VERSION && !seen[KEY_VERSION]) || (key > KEY_FORMAT && !seen[KEY_FORMAT]))
      return corrupt("%s is not expected here: this is no index of a checkpoint",
                     fp8lm_quote(quoted, name, name_length));
    if (seen[key]) return corrupt("\"%s\" is there twice", keys[key]);
    seen[key] = 1;
    status = read_member(&json, key, index);
  }
  status = fp8lm_json_finish(&json);
  if (status != FP8CORE_OK) return status;
  for (int key = 0; key < KEYS; key++)
    if (!seen[key]) return corrupt("\"%s\" is missing", keys[key]);
  if (!right) return corrupt("its checksum does not fit: it was changed or damaged");
  int states = 0;
  for (int i = 0; i < index->file_count; i++) states += fp8lm_checkpoint_is_state(index->files[i].name);
  if (!fp8lm_checkpoint_index_file(index, FP8LM_CHECKPOINT_MODEL) || states == 0)
    return corrupt("\"files\" lacks " FP8LM_CHECKPOINT_MODEL " or " FP8LM_CHECKPOINT_STATE);
  // Shards come in order: so many are all of them, or one of another number of ranks is among them.
  for (int i = 0, shard = 0; i < index->file_count; i++) {
    char expected[FP8LM_CHECKPOINT_NAME_BYTES];
    if (!fp8lm_checkpoint_is_state(index->files[i].name)) continue;
    fp8lm_checkpoint_state_name(expected, shard++, states);
    if (strcmp(index->files[i].name, expected) != 0)
      return corrupt("\"files\" has %d files of states, and %s among them, expected %s", states, index->files[i].name,
                     expected);
  }
  if (index->optimizer_steps > index->step || index->skipped_steps > index->step ||
      index->skipped_in_a_row > index->skipped_steps)
    return corrupt("more steps were skipped or taken than the %" PRId64 " of the run", index->step);
  const fp8gpt_config config = fp8lm_train_model_config(&index->settings);
  if (fp8gpt_config_validate(&config) != FP8CORE_OK) {
    char reason[256];
    (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
    return corrupt("its options: %s", reason);
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_checkpoint_index_parse(char *text, size_t length, fp8lm_checkpoint_index *index) {
  memset(index, 0, sizeof(*index));
  const fp8core_status status = parse_index(text, length, index);
  if (status != FP8CORE_OK) fp8lm_checkpoint_index_free(index);
  return status;
}

void fp8lm_checkpoint_index_free(fp8lm_checkpoint_index *index) {
  fp8lm_train_settings_free(&index->settings);
  free(index->files);
  memset(index, 0, sizeof(*index));
}

const fp8lm_checkpoint_file *fp8lm_checkpoint_index_file(const fp8lm_checkpoint_index *index, const char *name) {
  for (int i = 0; i < index->file_count; i++)
    if (strcmp(index->files[i].name, name) == 0) return &index->files[i];
  return NULL;
}

// Reading.

static fp8core_status named(const char *name, fp8core_status status) {
  char reason[400];
  (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  return fp8core_set_last_error(status, "%s: %s", name, reason);
}

fp8core_status fp8lm_checkpoint_read_text(const char *path, char **text, size_t *length) {
  fp8lm_input input;
  *text = NULL;
  fp8core_status status = fp8lm_input_open(&input, path);
  if (status != FP8CORE_OK) return status;
  if (input.size > FP8LM_CHECKPOINT_MAX_TEXT) {
    status = corrupt("it has %" PRIu64 " bytes, expected at most %" PRIu64, input.size, FP8LM_CHECKPOINT_MAX_TEXT);
  } else {
    *length = (size_t)input.size;
    *text = malloc(*length + 1);
    status = *text ? fp8lm_input_read(&input, 0, *text, *length)
                   : fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate its %zu bytes", *length);
  }
  fp8lm_input_close(&input);
  if (status == FP8CORE_OK) {
    (*text)[*length] = '\0';
    return status;
  }
  free(*text);
  *text = NULL;
  return status;
}

fp8core_status fp8lm_checkpoint_open(const char *path, fp8lm_checkpoint_index *index) {
  char file[PATH_MAX];
  char *text = NULL;
  size_t length = 0;
  memset(index, 0, sizeof(*index));
  fp8core_status status = fp8lm_join_path(file, path, FP8LM_CHECKPOINT_INDEX);
  if (status == FP8CORE_OK) status = fp8lm_checkpoint_read_text(file, &text, &length);
  if (status == FP8CORE_OK) status = fp8lm_checkpoint_index_parse(text, length, index);
  free(text);
  if (status != FP8CORE_OK) return named(FP8LM_CHECKPOINT_INDEX, status);
  for (int i = 0; i < index->file_count && status == FP8CORE_OK; i++) {
    fp8lm_input input;
    status = fp8lm_join_path(file, path, index->files[i].name);
    if (status == FP8CORE_OK) status = fp8lm_input_open(&input, file);
    if (status != FP8CORE_OK) {
      status = named(index->files[i].name, status);
      break;
    }
    if (input.size != index->files[i].bytes)
      status = corrupt("%s: it has %" PRIu64 " bytes, but the index says %" PRIu64, index->files[i].name, input.size,
                       index->files[i].bytes);
    fp8lm_input_close(&input);
  }
  if (status != FP8CORE_OK) fp8lm_checkpoint_index_free(index);
  return status;
}

#define BLOCK_BYTES ((size_t)1 << 20)

static fp8core_status verify_file(const char *path, const fp8lm_checkpoint_file *file, void *block) {
  fp8lm_input input;
  uint32_t crc = 0;
  fp8core_status status = fp8lm_input_open(&input, path);
  if (status != FP8CORE_OK) return status;
  for (uint64_t first = 0; first < input.size && status == FP8CORE_OK; first += BLOCK_BYTES) {
    const size_t bytes = input.size - first < BLOCK_BYTES ? (size_t)(input.size - first) : BLOCK_BYTES;
    status = fp8lm_input_read(&input, first, block, bytes);
    if (status == FP8CORE_OK) crc = fp8lm_crc32(crc, block, bytes);
  }
  if (status == FP8CORE_OK && (crc != file->crc32 || input.size != file->bytes))
    status =
      corrupt("its checksum is %08" PRIx32 ", but the index says %08" PRIx32 ": it is damaged", crc, file->crc32);
  fp8lm_input_close(&input);
  return status;
}

fp8core_status fp8lm_checkpoint_verify(const char *path, const fp8lm_checkpoint_index *index) {
  char file[PATH_MAX];
  void *block = malloc(BLOCK_BYTES);
  if (!block) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes", BLOCK_BYTES);
  fp8core_status status = FP8CORE_OK;
  for (int i = 0; i < index->file_count && status == FP8CORE_OK; i++) {
    status = fp8lm_join_path(file, path, index->files[i].name);
    if (status == FP8CORE_OK) status = verify_file(file, &index->files[i], block);
    if (status != FP8CORE_OK) status = named(index->files[i].name, status);
  }
  free(block);
  return status;
}

// Writing.

fp8core_status fp8lm_checkpoint_begin(fp8lm_checkpoint_writer *writer, const char *folder, int64_t step) {
  char path[PATH_MAX];
  writer->folder = folder;
  writer->temporary_path[0] = '\0';
  fp8core_status status = remove_temporary(folder);
  if (status == FP8CORE_OK) status = step_path(writer->final_path, folder, step);
  // Something of the user's that has the name stays, and does not end the run.
  for (int tries = 0; status == FP8CORE_OK; tries++) {
    status = temporary_path(path, folder, step, tries);
    if (status != FP8CORE_OK) break;
    if (mkdir(path, 0777) == 0) {
      memcpy(writer->temporary_path, path, sizeof(path));
      break;
    }
    if (errno != EEXIST || tries + 1 == MOST_TEMPORARY_NAMES)
      status = refused("cannot create the folder %s: %s", path, strerror(errno));
  }
  return status;
}

static fp8core_status write_index(const char *path, const fp8lm_checkpoint_index *index) {
  char *text = NULL;
  size_t length = 0;
  FILE *stream = open_memstream(&text, &length);
  if (!stream) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the index");
  fp8lm_checkpoint_index_write(stream, index);
  const int bad = ferror(stream);
  fp8core_status status = FP8CORE_OK;
  if (fclose(stream) != 0 || bad || !checksum_right(text, length))
    status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the index");
  fp8lm_saved_file saved;
  if (status == FP8CORE_OK) status = fp8lm_write_file(path, text, length, &saved);
  free(text);
  return status;
}

fp8core_status fp8lm_checkpoint_commit(fp8lm_checkpoint_writer *writer, const fp8lm_checkpoint_index *index) {
  char path[PATH_MAX];
  fp8core_status status = fp8lm_join_path(path, writer->temporary_path, FP8LM_CHECKPOINT_INDEX);
  if (status == FP8CORE_OK) status = write_index(path, index);
  if (status != FP8CORE_OK) return named(FP8LM_CHECKPOINT_INDEX, status);
  status = sync_folder(writer->temporary_path);
  if (status != FP8CORE_OK) return status;
  if (rename(writer->temporary_path, writer->final_path) != 0) {
    // A checkpoint of this step is there: both change places at once, and the old one goes. What is none (a file, or a
    // folder that holds something else) stays, under the temporary name.
    if ((errno != EEXIST && errno != ENOTEMPTY && errno != ENOTDIR) ||
        renameat2(AT_FDCWD, writer->temporary_path, AT_FDCWD, writer->final_path, RENAME_EXCHANGE) != 0)
      return refused("cannot rename %s to %s: %s", writer->temporary_path, writer->final_path, strerror(errno));
    remove_folder(writer->temporary_path);
  }
  writer->temporary_path[0] = '\0';
  return sync_folder(writer->folder);
}

void fp8lm_checkpoint_abandon(fp8lm_checkpoint_writer *writer) {
  if (writer->temporary_path[0]) remove_folder(writer->temporary_path);
  writer->temporary_path[0] = '\0';
}

fp8core_status fp8lm_checkpoint_prune(const char *folder, int64_t keep) {
  step_list list;
  if (keep == 0) return FP8CORE_OK;
  const fp8core_status status = list_steps(folder, &list);
  if (status != FP8CORE_OK) return status;
  for (size_t i = 0; i + (size_t)keep < list.count; i++) {
    char path[PATH_MAX];
    char temporary[PATH_MAX];
    if (step_path(path, folder, list.steps[i]) != FP8CORE_OK || !only_checkpoint_files(path)) continue;
    // Under a temporary name first, so that none is ever there in part.
    for (int tries = 0; tries < MOST_TEMPORARY_NAMES; tries++) {
      if (temporary_path(temporary, folder, list.steps[i], tries) != FP8CORE_OK) break;
      if (rename(path, temporary) == 0) {
        remove_folder(temporary);
        break;
      }
      if (errno != EEXIST && errno != ENOTEMPTY && errno != ENOTDIR) break;
    }
  }
  free(list.steps);
  return FP8CORE_OK;
}
