#include "run_log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json_reader.h"
#include "tensor_file.h"

// Steps beyond it are not exact as doubles, which they are drawn as.
#define MOST_STEP (UINT64_C(1) << 53)

// Bytes of a setting's value that are kept.
#define VALUE_LIMIT ((size_t)4096)

static fp8core_status no_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for what the log holds");
}

// Makes room for one item more. Returns the items, or NULL: the old ones are still there then.
static void *grow(void *items, size_t count, size_t *room, size_t size) {
  if (count < *room) return items;
  const size_t larger = *room ? 2 * *room : 16;
  if (larger > SIZE_MAX / size) return NULL;
  void *moved = realloc(items, larger * size);
  if (moved) *room = larger;
  return moved;
}

// Names ---------------------------------------------------------------------------------------------------------------

static uint32_t hash_name(const char *name) {
  uint32_t hash = UINT32_C(2166136261);
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * UINT32_C(16777619);
  return hash;
}

typedef const char *(*name_at)(const fp8lm_run_log *log, size_t index);

static const char *tensor_name(const fp8lm_run_log *log, size_t index) { return log->tensors[index].name; }
static const char *setting_name(const fp8lm_run_log *log, size_t index) { return log->settings[index].key; }

// The slot of `name`: it holds its number plus one, or 0 where it isn't known.
static uint32_t *find_slot(const fp8lm_run_log *log, const fp8lm_log_names *names, name_at at, const char *name) {
  const size_t mask = names->slot_count - 1;
  size_t slot = hash_name(name) & mask;
  while (names->slots[slot] && strcmp(at(log, names->slots[slot] - 1), name) != 0) slot = (slot + 1) & mask;
  return &names->slots[slot];
}

// At least half of the slots stay free.
static fp8core_status reserve_name(const fp8lm_run_log *log, fp8lm_log_names *names, name_at at, size_t count) {
  if (2 * (count + 1) <= names->slot_count) return FP8CORE_OK;
  const fp8lm_log_names larger = {.slots = calloc(names->slot_count ? 2 * names->slot_count : 64, sizeof(uint32_t)),
                                  .slot_count = names->slot_count ? 2 * names->slot_count : 64};
  if (!larger.slots) return no_memory();
  for (size_t i = 0; i < count; i++) *find_slot(log, &larger, at, at(log, i)) = (uint32_t)i + 1;
  free(names->slots);
  *names = larger;
  return FP8CORE_OK;
}

static fp8core_status too_many(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "more than %d %s", FP8LM_LOG_MOST_NAMES, what);
}

static fp8core_status find_tensor(fp8lm_run_log *log, const char *name, fp8lm_log_tensor **tensor) {
  const fp8core_status status = reserve_name(log, &log->tensor_names, tensor_name, log->tensor_count);
  if (status != FP8CORE_OK) return status;
  uint32_t *slot = find_slot(log, &log->tensor_names, tensor_name, name);
  if (*slot == 0) {
    if (log->tensor_count == FP8LM_LOG_MOST_NAMES) return too_many("tensors");
    fp8lm_log_tensor *tensors = grow(log->tensors, log->tensor_count, &log->tensor_room, sizeof(*tensors));
    if (!tensors) return no_memory();
    log->tensors = tensors;
    char *copy = strdup(name);
    if (!copy) return no_memory();
    tensors[log->tensor_count] = (fp8lm_log_tensor){.name = copy};
    *slot = (uint32_t)++log->tensor_count;
  }
  *tensor = &log->tensors[*slot - 1];
  return FP8CORE_OK;
}

const char *fp8lm_run_log_setting(const fp8lm_run_log *log, const char *key) {
  if (!log->setting_names.slots) return NULL;
  const uint32_t number = *find_slot(log, &log->setting_names, setting_name, key);
  return number ? log->settings[number - 1].value : NULL;
}

// Takes both strings, whatever comes of it.
static fp8core_status set_setting(fp8lm_run_log *log, char *key, char *value) {
  fp8core_status status = key && value ? FP8CORE_OK : no_memory();
  if (status == FP8CORE_OK) status = reserve_name(log, &log->setting_names, setting_name, log->setting_count);
  uint32_t *slot = status == FP8CORE_OK ? find_slot(log, &log->setting_names, setting_name, key) : NULL;
  if (slot && *slot) {
    free(log->settings[*slot - 1].value);
    log->settings[*slot - 1].value = value;
    free(key);
    return FP8CORE_OK;
  }
  if (slot && log->setting_count == FP8LM_LOG_MOST_NAMES) status = too_many("settings");
  fp8lm_log_setting *settings = NULL;
  if (status == FP8CORE_OK) {
    settings = grow(log->settings, log->setting_count, &log->setting_room, sizeof(*settings));
    if (!settings) status = no_memory();
  }
  if (status != FP8CORE_OK) {
    free(key);
    free(value);
    return status;
  }
  log->settings = settings;
  settings[log->setting_count] = (fp8lm_log_setting){.key = key, .value = value};
  *slot = (uint32_t)++log->setting_count;
  return FP8CORE_OK;
}

// Text that grows -----------------------------------------------------------------------------------------------------

typedef struct text {
  char *bytes;
  size_t length;
  size_t room;
} text;

// A NUL, which JSON can hold and C cannot, ends in a replacement character.
static fp8core_status append(text *t, const char *bytes, size_t length) {
  static const char replacement[] = "\xef\xbf\xbd";
  const size_t replacement_length = sizeof(replacement) - 1;
  if (t->length + replacement_length * length + 1 > t->room) {
    const size_t room = 2 * (t->length + replacement_length * length + 32);
    char *moved = realloc(t->bytes, room);
    if (!moved) return no_memory();
    t->bytes = moved;
    t->room = room;
  }
  for (size_t i = 0; i < length; i++) {
    if (bytes[i]) {
      t->bytes[t->length++] = bytes[i];
    } else {
      memcpy(t->bytes + t->length, replacement, replacement_length);
      t->length += replacement_length;
    }
  }
  t->bytes[t->length] = '\0';
  return FP8CORE_OK;
}

// At most VALUE_LIMIT bytes, and no part of a character.
static size_t kept_length(const char *bytes, size_t length) {
  if (length <= VALUE_LIMIT) return length;
  length = VALUE_LIMIT;
  while (length && ((unsigned char)bytes[length] & 0xc0) == 0x80) length--;
  return length;
}

static char *copy_text(const char *bytes, size_t length) {
  text t = {.bytes = NULL};
  return append(&t, bytes, length) == FP8CORE_OK ? t.bytes : NULL;
}

// Any value of JSON as a reader would like it: strings without quotes, the rest as it is there.
static fp8core_status append_value(fp8lm_json *json, text *t) {
  const fp8lm_json_type type = fp8lm_json_peek(json);
  char *string;
  size_t length;
  fp8core_status status;
  if (type == FP8LM_JSON_STRING) {
    status = fp8lm_json_string(json, &string, &length);
    return status == FP8CORE_OK ? append(t, string, length) : status;
  }
  if (type != FP8LM_JSON_OBJECT && type != FP8LM_JSON_ARRAY) {
    const char *start = json->cursor;
    status = fp8lm_json_skip(json);
    return status == FP8CORE_OK ? append(t, start, (size_t)(json->cursor - start)) : status;
  }
  const int object = type == FP8LM_JSON_OBJECT;
  status = object ? fp8lm_json_enter_object(json) : fp8lm_json_enter_array(json);
  if (status == FP8CORE_OK) status = append(t, object ? "{" : "[", 1);
  for (int first = 1; status == FP8CORE_OK; first = 0) {
    int more;
    status = object ? fp8lm_json_next_member(json, &string, &length, &more) : fp8lm_json_next_element(json, &more);
    if (status != FP8CORE_OK || !more) break;
    if (!first) status = append(t, ", ", 2);
    if (status == FP8CORE_OK && object) status = append(t, string, length);
    if (status == FP8CORE_OK && object) status = append(t, ": ", 2);
    if (status == FP8CORE_OK) status = append_value(json, t);
  }
  return status == FP8CORE_OK ? append(t, object ? "}" : "]", 1) : status;
}

// One line ------------------------------------------------------------------------------------------------------------

typedef struct pair {
  char *key;
  char *value;
} pair;

typedef struct tensor_entry {
  const char *name;
  fp8lm_log_statistics statistics;
} tensor_entry;

// What a line says. It has an effect once the whole line is read, so that a broken one has none.
typedef struct record {
  int has_step;
  int64_t step;
  fp8lm_log_step values;
  int has_loss;
  int has_spike;
  int has_memory;
  double memory[FP8LM_LOG_MEMORY_CLASSES];
  double parameters;
  double peak_resident;
  char *kind;
  text message;
  pair *settings;
  size_t setting_count;
  size_t setting_room;
  tensor_entry *entries;
  size_t entry_count;
  size_t entry_room;
} record;

typedef enum line_type {
  LINE_NONE,
  LINE_START,
  LINE_MEMORY,
  LINE_STEP,
  LINE_VALIDATION,
  LINE_FP8,
  LINE_OTHER
} line_type;

// A field has the name that fp8lm train gives it, or the one that other trainers are likely to.
typedef struct known_name {
  const char *name;
  int index;
} known_name;

static const known_name line_types[] = {
  {"step", LINE_STEP},   {"validation", LINE_VALIDATION}, {"eval", LINE_VALIDATION}, {"fp8", LINE_FP8},
  {"start", LINE_START}, {"config", LINE_START},          {"memory", LINE_MEMORY},   {NULL, -1},
};

static const known_name columns[] = {
  {"loss", FP8LM_LOG_LOSS},
  {"lr", FP8LM_LOG_LEARNING_RATE},
  {"learning_rate", FP8LM_LOG_LEARNING_RATE},
  {"grad_norm", FP8LM_LOG_GRADIENT_NORM},
  {"gradient_norm", FP8LM_LOG_GRADIENT_NORM},
  {"tokens_per_second", FP8LM_LOG_TOKENS_PER_SECOND},
  {"mfu", FP8LM_LOG_MFU},
  {NULL, -1},
};

// Fields of one class add up.
static const known_name memory_classes[] = {
  {"weights", FP8LM_LOG_WEIGHTS},
  {"gradients", FP8LM_LOG_GRADIENTS},
  {"master", FP8LM_LOG_MASTER},
  {"moments", FP8LM_LOG_MOMENTS},
  {"exp_avg", FP8LM_LOG_MOMENTS},
  {"exp_avg_sq", FP8LM_LOG_MOMENTS},
  {"activations", FP8LM_LOG_ACTIVATIONS},
  {"workspace", FP8LM_LOG_WORKSPACE},
  {"optimizer_overhead", FP8LM_LOG_WORKSPACE},
  {NULL, -1},
};

enum { ENTRY_SCALE, ENTRY_AMAX, ENTRY_FILL, ENTRY_SATURATED, ENTRY_ZEROS };

static const known_name entry_fields[] = {
  {"scale", ENTRY_SCALE},
  {"amax", ENTRY_AMAX},
  {"fill", ENTRY_FILL},
  {"saturated_share", ENTRY_SATURATED},
  {"saturation", ENTRY_SATURATED},
  {"zero_share", ENTRY_ZEROS},
  {"underflow", ENTRY_ZEROS},
  {NULL, -1},
};

static int is(const char *key, size_t length, const char *name) {
  return length == strlen(name) && memcmp(key, name, length) == 0;
}

static int find_name(const known_name *names, const char *key, size_t length) {
  while (names->name && !is(key, length, names->name)) names++;
  return names->index;
}

// A number; NaN for null.
static fp8core_status read_real(fp8lm_json *json, double *value) {
  *value = NAN;
  return fp8lm_json_peek(json) == FP8LM_JSON_NULL ? fp8lm_json_skip(json) : fp8lm_json_real(json, value);
}

static fp8core_status read_float(fp8lm_json *json, float *value) {
  double read;
  const fp8core_status status = read_real(json, &read);
  *value = fabs(read) <= 3.4028234663852886e38 ? (float)read : NAN;
  return status;
}

static fp8core_status read_step(fp8lm_json *json, record *r) {
  uint64_t step;
  if (fp8lm_json_peek(json) == FP8LM_JSON_NULL) return fp8lm_json_skip(json);
  const fp8core_status status = fp8lm_json_unsigned(json, &step);
  if (status != FP8CORE_OK) return status;
  if (step > MOST_STEP)
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "step %" PRIu64 " is beyond 2^53", step);
  r->has_step = 1;
  r->step = (int64_t)step;
  return FP8CORE_OK;
}

static fp8core_status read_flag(fp8lm_json *json, unsigned char *flag) {
  int value;
  const fp8core_status status = fp8lm_json_boolean(json, &value);
  if (status == FP8CORE_OK) *flag = value != 0;
  return status;
}

static fp8core_status read_step_field(fp8lm_json *json, const char *key, size_t length, record *r) {
  if (is(key, length, "skipped")) return read_flag(json, &r->values.skipped);
  if (is(key, length, "spike")) {
    r->has_spike = 1;
    return read_flag(json, &r->values.spike);
  }
  const int column = find_name(columns, key, length);
  if (column < 0) return fp8lm_json_skip(json);
  if (column == FP8LM_LOG_LOSS) r->has_loss = 1;
  return read_real(json, &r->values.values[column]);
}

static fp8core_status read_memory_field(fp8lm_json *json, const char *key, size_t length, record *r) {
  if (is(key, length, "parameters")) return read_real(json, &r->parameters);
  const int class = find_name(memory_classes, key, length);
  if (class < 0) return fp8lm_json_skip(json);
  double bytes;
  const fp8core_status status = read_real(json, &bytes);
  if (isnan(bytes)) return status;
  r->has_memory = 1;
  r->memory[class] = isnan(r->memory[class]) ? bytes : r->memory[class] + bytes;
  return status;
}

typedef fp8core_status (*read_member)(fp8lm_json *json, const char *key, size_t length, record *r);

static fp8core_status read_members(fp8lm_json *json, read_member member, record *r) {
  fp8core_status status = fp8lm_json_enter_object(json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t length;
    int more;
    status = fp8lm_json_next_member(json, &key, &length, &more);
    if (status != FP8CORE_OK || !more) break;
    status = member(json, key, length, r);
  }
  return status;
}

// Settings of nested objects are called outer.inner.
static fp8core_status read_setting(fp8lm_json *json, const char *prefix, const char *key, size_t length, record *r) {
  text name = {.bytes = NULL};
  fp8core_status status = FP8CORE_OK;
  if (prefix) {
    status = append(&name, prefix, strlen(prefix));
    if (status == FP8CORE_OK) status = append(&name, ".", 1);
  }
  if (status == FP8CORE_OK) status = append(&name, key, kept_length(key, length));
  if (status == FP8CORE_OK && fp8lm_json_peek(json) == FP8LM_JSON_OBJECT && name.length < VALUE_LIMIT) {
    status = fp8lm_json_enter_object(json);
    while (status == FP8CORE_OK) {
      char *inner;
      size_t inner_length;
      int more;
      status = fp8lm_json_next_member(json, &inner, &inner_length, &more);
      if (status != FP8CORE_OK || !more) break;
      status = read_setting(json, name.bytes, inner, inner_length, r);
    }
    free(name.bytes);
    return status;
  }
  text value = {.bytes = NULL};
  if (status == FP8CORE_OK) status = append(&value, "", 0);
  if (status == FP8CORE_OK) status = append_value(json, &value);
  if (status == FP8CORE_OK) {
    value.bytes[kept_length(value.bytes, value.length)] = '\0';
    pair *settings = grow(r->settings, r->setting_count, &r->setting_room, sizeof(*settings));
    if (settings) {
      r->settings = settings;
      settings[r->setting_count++] = (pair){.key = name.bytes, .value = value.bytes};
      return FP8CORE_OK;
    }
    status = no_memory();
  }
  free(name.bytes);
  free(value.bytes);
  return status;
}

static fp8core_status read_option(fp8lm_json *json, const char *key, size_t length, record *r) {
  return read_setting(json, NULL, key, length, r);
}

static fp8core_status read_start_field(fp8lm_json *json, const char *key, size_t length, record *r) {
  const int object = fp8lm_json_peek(json) == FP8LM_JSON_OBJECT;
  if (is(key, length, "parameters")) return read_real(json, &r->parameters);
  if (is(key, length, "memory") && object) return read_members(json, read_memory_field, r);
  if (is(key, length, "options") && object) return read_members(json, read_option, r);
  return read_setting(json, NULL, key, length, r);
}

static fp8core_status read_entry(fp8lm_json *json, record *r) {
  tensor_entry entry = {.name = NULL};
  float values[] = {NAN, NAN, NAN, NAN, NAN};
  fp8core_status status = fp8lm_json_enter_object(json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t length;
    int more;
    status = fp8lm_json_next_member(json, &key, &length, &more);
    if (status != FP8CORE_OK || !more) break;
    const int field = find_name(entry_fields, key, length);
    if (field >= 0) {
      status = read_float(json, &values[field]);
    } else if (is(key, length, "name")) {
      char *name;
      status = fp8lm_json_string(json, &name, &length);
      // The text is the line's, which stays until the record has had its effect.
      if (status == FP8CORE_OK) entry.name = name;
    } else {
      status = fp8lm_json_skip(json);
    }
  }
  if (status != FP8CORE_OK) return status;
  if (!entry.name) return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "a tensor without \"name\"");
  entry.statistics = (fp8lm_log_statistics){.scale = values[ENTRY_SCALE],
                                            .amax = values[ENTRY_AMAX],
                                            .fill = values[ENTRY_FILL],
                                            .saturated = values[ENTRY_SATURATED],
                                            .zeros = values[ENTRY_ZEROS]};
  tensor_entry *entries = grow(r->entries, r->entry_count, &r->entry_room, sizeof(*entries));
  if (!entries) return no_memory();
  r->entries = entries;
  entries[r->entry_count++] = entry;
  return FP8CORE_OK;
}

static fp8core_status read_fp8_field(fp8lm_json *json, const char *key, size_t length, record *r) {
  if (!is(key, length, "tensors") && !is(key, length, "weights")) return fp8lm_json_skip(json);
  fp8core_status status = fp8lm_json_enter_array(json);
  while (status == FP8CORE_OK) {
    int more;
    status = fp8lm_json_next_element(json, &more);
    if (status != FP8CORE_OK || !more) break;
    status = read_entry(json, r);
  }
  return status;
}

// Of an event without a meaning here, what it says is kept as text.
static fp8core_status read_event_field(fp8lm_json *json, const char *key, size_t length, record *r) {
  if (is(key, length, "peak_resident_bytes")) return read_real(json, &r->peak_resident);
  if (r->message.length > VALUE_LIMIT) return fp8lm_json_skip(json);
  fp8core_status status = FP8CORE_OK;
  if (r->message.length) status = append(&r->message, ", ", 2);
  if (!is(key, length, "message")) {
    if (status == FP8CORE_OK) status = append(&r->message, key, kept_length(key, length));
    if (status == FP8CORE_OK) status = append(&r->message, " ", 1);
  }
  return status == FP8CORE_OK ? append_value(json, &r->message) : status;
}

// What the line is, wherever in the object that stands; an object that doesn't say, but has a step and a loss, is a
// step.
static fp8core_status find_type(char *line, size_t length, line_type *type, char **kind) {
  fp8lm_json json;
  fp8lm_json_init(&json, line, length);
  int has_step = 0;
  int has_loss = 0;
  const char *name = NULL;
  size_t name_length = 0;
  fp8core_status status = fp8lm_json_enter_object(&json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t key_length;
    int more;
    status = fp8lm_json_next_member(&json, &key, &key_length, &more);
    if (status != FP8CORE_OK || !more) break;
    const int is_event = is(key, key_length, "event");
    if ((is_event || is(key, key_length, "type")) && fp8lm_json_peek(&json) == FP8LM_JSON_STRING) {
      char *string;
      status = fp8lm_json_string(&json, &string, &key_length);
      name = string;
      name_length = key_length;
      if (is_event) break;
    } else {
      has_step |= is(key, key_length, "step");
      has_loss |= is(key, key_length, "loss");
      status = fp8lm_json_skip(&json);
    }
  }
  *type = has_step && has_loss ? LINE_STEP : LINE_NONE;
  if (status != FP8CORE_OK || !name) return status;
  const int known = find_name(line_types, name, name_length);
  *type = known < 0 ? LINE_OTHER : (line_type)known;
  if (known >= 0) return FP8CORE_OK;
  *kind = copy_text(name, kept_length(name, name_length));
  return *kind ? FP8CORE_OK : no_memory();
}

static fp8core_status read_field(fp8lm_json *json, line_type type, const char *key, size_t length, record *r) {
  if (type == LINE_NONE || is(key, length, "type") || is(key, length, "event")) return fp8lm_json_skip(json);
  if (is(key, length, "step")) return read_step(json, r);
  switch (type) {
  case LINE_START: return read_start_field(json, key, length, r);
  case LINE_MEMORY: return read_memory_field(json, key, length, r);
  case LINE_STEP: return read_step_field(json, key, length, r);
  case LINE_VALIDATION:
    if (!is(key, length, "loss")) break;
    r->has_loss = 1;
    return read_real(json, &r->values.values[FP8LM_LOG_LOSS]);
  case LINE_FP8: return read_fp8_field(json, key, length, r);
  case LINE_OTHER: return read_event_field(json, key, length, r);
  case LINE_NONE: break;
  }
  return fp8lm_json_skip(json);
}

// Keys of the objects that are open, in the line's text.
typedef struct key_list {
  struct key {
    const char *text;
    size_t length;
  } * keys;
  size_t count;
  size_t room;
} key_list;

static int compare_keys(const void *left, const void *right) {
  const struct key *a = left;
  const struct key *b = right;
  const int order = memcmp(a->text, b->text, a->length < b->length ? a->length : b->length);
  return order ? order : (a->length > b->length) - (a->length < b->length);
}

// Passes over a value, and looks for an object with a key twice. Other mistakes are found, and described, later.
static fp8core_status find_twins(fp8lm_json *json, key_list *list) {
  const fp8lm_json_type type = fp8lm_json_peek(json);
  if (type != FP8LM_JSON_OBJECT && type != FP8LM_JSON_ARRAY) return fp8lm_json_skip(json);
  const int object = type == FP8LM_JSON_OBJECT;
  const size_t first = list->count;
  fp8core_status status = object ? fp8lm_json_enter_object(json) : fp8lm_json_enter_array(json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t length;
    int more;
    status = object ? fp8lm_json_next_member(json, &key, &length, &more) : fp8lm_json_next_element(json, &more);
    if (status != FP8CORE_OK || !more) break;
    if (object) {
      struct key *keys = grow(list->keys, list->count, &list->room, sizeof(*keys));
      if (!keys) return no_memory();
      list->keys = keys;
      keys[list->count++] = (struct key){.text = key, .length = length};
    }
    status = find_twins(json, list);
  }
  if (status != FP8CORE_OK) return status;
  const size_t count = list->count - first;
  list->count = first;
  if (count < 2) return FP8CORE_OK;
  struct key *keys = list->keys + first;
  qsort(keys, count, sizeof(*keys), compare_keys);
  for (size_t i = 1; i < count; i++) {
    if (compare_keys(&keys[i - 1], &keys[i]) != 0) continue;
    char quoted[FP8LM_QUOTE_BYTES];
    // Nothing else comes with this status.
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "the key %s is there twice",
                                  fp8lm_quote(quoted, keys[i].text, keys[i].length));
  }
  return FP8CORE_OK;
}

static fp8core_status check_keys(char *line, size_t length) {
  fp8lm_json json;
  key_list list = {.keys = NULL};
  fp8lm_json_init(&json, line, length);
  const fp8core_status status = find_twins(&json, &list);
  free(list.keys);
  if (status == FP8CORE_ERROR_CORRUPT_DATA) return FP8CORE_OK;
  return status == FP8CORE_ERROR_NOT_SUPPORTED ? FP8CORE_ERROR_CORRUPT_DATA : status;
}

// A message names the field that it is about.
static fp8core_status in_field(fp8core_status status, const char *key, size_t length) {
  if (status != FP8CORE_ERROR_CORRUPT_DATA) return status;
  char message[512];
  (void)snprintf(message, sizeof(message), "%s", fp8core_last_error());
  return fp8core_set_last_error(status, "\"%.*s\": %s", length < 64 ? (int)length : 64, key, message);
}

static fp8core_status read_record(char *line, size_t length, line_type type, record *r) {
  fp8lm_json json;
  fp8lm_json_init(&json, line, length);
  fp8core_status status = fp8lm_json_enter_object(&json);
  while (status == FP8CORE_OK) {
    char *key;
    size_t key_length;
    int more;
    status = fp8lm_json_next_member(&json, &key, &key_length, &more);
    if (status != FP8CORE_OK || !more) break;
    status = in_field(read_field(&json, type, key, key_length, r), key, key_length);
  }
  if (status == FP8CORE_OK) status = fp8lm_json_finish(&json);
  const int needs_step = type == LINE_STEP || type == LINE_VALIDATION || type == LINE_FP8;
  if (status == FP8CORE_OK && needs_step && !r->has_step)
    status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "\"step\" is missing");
  return status;
}

// Its effect ----------------------------------------------------------------------------------------------------------

static fp8core_status add_event(fp8lm_run_log *log, int64_t step, const char *kind, const char *message) {
  if (log->event_count == FP8LM_LOG_KEPT_EVENTS) {
    log->further_events++;
    return FP8CORE_OK;
  }
  fp8lm_log_event *events = grow(log->events, log->event_count, &log->event_room, sizeof(*events));
  if (!events) return no_memory();
  log->events = events;
  events[log->event_count] = (fp8lm_log_event){.step = step, .kind = strdup(kind), .message = strdup(message)};
  const fp8lm_log_event *event = &events[log->event_count++];
  return event->kind && event->message ? FP8CORE_OK : no_memory();
}

// Takes back what was logged from `step` on.
static void rewind_to(fp8lm_run_log *log, int64_t step) {
  while (log->step_count && log->steps[log->step_count - 1].step >= step) log->step_count--;
  while (log->evaluation_count && log->evaluations[log->evaluation_count - 1].step >= step) log->evaluation_count--;
  if (log->newest_statistics < step) return;
  for (size_t i = 0; i < log->tensor_count; i++) {
    fp8lm_log_tensor *tensor = &log->tensors[i];
    while (tensor->count && tensor->statistics[tensor->count - 1].step >= step) tensor->count--;
  }
  log->newest_statistics = step - 1;
}

static fp8core_status add_step(fp8lm_run_log *log, const record *r) {
  if (log->step_count && log->steps[log->step_count - 1].step >= r->step) {
    char message[160];
    (void)snprintf(message, sizeof(message),
                   "line %" PRIu64 " goes back from step %" PRId64 " to step %" PRId64
                   "; what was logged from there on is replaced",
                   log->lines, log->steps[log->step_count - 1].step, r->step);
    const fp8core_status status = add_event(log, r->step, "resumed", message);
    if (status != FP8CORE_OK) return status;
    rewind_to(log, r->step);
  }
  fp8lm_log_step *steps = grow(log->steps, log->step_count, &log->step_room, sizeof(*steps));
  if (!steps) return no_memory();
  log->steps = steps;
  fp8lm_log_step *step = &steps[log->step_count++];
  *step = r->values;
  step->step = r->step;
  step->nonfinite = r->has_loss && isnan(r->values.values[FP8LM_LOG_LOSS]);
  log->tells_spikes |= r->has_spike;
  return FP8CORE_OK;
}

static fp8core_status add_evaluation(fp8lm_run_log *log, const record *r) {
  if (!r->has_loss) return FP8CORE_OK;
  while (log->evaluation_count && log->evaluations[log->evaluation_count - 1].step >= r->step) log->evaluation_count--;
  fp8lm_log_evaluation *evaluations =
    grow(log->evaluations, log->evaluation_count, &log->evaluation_room, sizeof(*evaluations));
  if (!evaluations) return no_memory();
  log->evaluations = evaluations;
  evaluations[log->evaluation_count++] =
    (fp8lm_log_evaluation){.step = r->step, .loss = r->values.values[FP8LM_LOG_LOSS]};
  return FP8CORE_OK;
}

static fp8core_status add_statistics(fp8lm_run_log *log, const record *r) {
  for (size_t i = 0; i < r->entry_count; i++) {
    fp8lm_log_tensor *tensor = NULL;
    const fp8core_status status = find_tensor(log, r->entries[i].name, &tensor);
    if (status != FP8CORE_OK) return status;
    while (tensor->count && tensor->statistics[tensor->count - 1].step >= r->step) tensor->count--;
    fp8lm_log_statistics *statistics = grow(tensor->statistics, tensor->count, &tensor->room, sizeof(*statistics));
    if (!statistics) return no_memory();
    tensor->statistics = statistics;
    statistics[tensor->count] = r->entries[i].statistics;
    statistics[tensor->count++].step = r->step;
  }
  if (log->newest_statistics < r->step) log->newest_statistics = r->step;
  return FP8CORE_OK;
}

static fp8core_status add_settings(fp8lm_run_log *log, record *r) {
  fp8core_status status = FP8CORE_OK;
  for (size_t i = 0; i < r->setting_count && status == FP8CORE_OK; i++) {
    status = set_setting(log, r->settings[i].key, r->settings[i].value);
    r->settings[i] = (pair){.key = NULL};
  }
  return status;
}

static void add_memory(fp8lm_run_log *log, const record *r) {
  if (!isnan(r->parameters)) log->parameters = r->parameters;
  if (!r->has_memory) return;
  log->has_memory = 1;
  memcpy(log->memory, r->memory, sizeof(log->memory));
}

static fp8core_status add_record(fp8lm_run_log *log, line_type type, record *r) {
  switch (type) {
  case LINE_START: add_memory(log, r); return add_settings(log, r);
  case LINE_MEMORY: add_memory(log, r); break;
  case LINE_STEP: return add_step(log, r);
  case LINE_VALIDATION: return add_evaluation(log, r);
  case LINE_FP8: return add_statistics(log, r);
  case LINE_OTHER:
    if (!isnan(r->peak_resident)) log->peak_resident = r->peak_resident;
    return add_event(log, r->has_step ? r->step : -1, r->kind, r->message.bytes ? r->message.bytes : "");
  case LINE_NONE: break;
  }
  return FP8CORE_OK;
}

static fp8core_status note_problem(fp8lm_run_log *log, const char *message) {
  log->broken_lines++;
  if (log->problem_count == FP8LM_LOG_KEPT_PROBLEMS) return FP8CORE_OK;
  char *copy = strdup(message);
  if (!copy) return no_memory();
  log->problems[log->problem_count++] = (fp8lm_log_problem){.line = log->lines, .message = copy};
  return FP8CORE_OK;
}

static int is_blank(const char *line, size_t length) {
  for (size_t i = 0; i < length; i++) {
    if (!strchr(" \t\r", line[i]) || line[i] == '\0') return 0;
  }
  return 1;
}

// `scratch` holds copies, for the first looks decode strings in place.
static fp8core_status read_line(fp8lm_run_log *log, char *line, char *scratch, size_t length, int ended) {
  if (is_blank(line, length)) return FP8CORE_OK;
  record r = {.parameters = NAN, .peak_resident = NAN};
  for (int i = 0; i < FP8LM_LOG_COLUMNS; i++) r.values.values[i] = NAN;
  for (int i = 0; i < FP8LM_LOG_MEMORY_CLASSES; i++) r.memory[i] = NAN;
  line_type type = LINE_NONE;
  memcpy(scratch, line, length);
  fp8core_status status = check_keys(scratch, length);
  memcpy(scratch, line, length);
  if (status == FP8CORE_OK) status = find_type(scratch, length, &type, &r.kind);
  if (status == FP8CORE_OK) status = read_record(line, length, type, &r);
  if (status == FP8CORE_OK) status = add_record(log, type, &r);
  if (status == FP8CORE_ERROR_CORRUPT_DATA) {
    if (ended) {
      status = note_problem(log, fp8core_last_error());
    } else {
      log->cut_off = 1;
      status = FP8CORE_OK;
    }
  }
  for (size_t i = 0; i < r.setting_count; i++) {
    free(r.settings[i].key);
    free(r.settings[i].value);
  }
  free(r.settings);
  free(r.entries);
  free(r.kind);
  free(r.message.bytes);
  return status;
}

// Lines of a file -----------------------------------------------------------------------------------------------------

typedef struct line_buffer {
  // As much again follows as scratch.
  char *bytes;
  size_t room;
  size_t used;
} line_buffer;

static fp8core_status read_lines(const fp8lm_input *input, line_buffer *buffer, fp8lm_run_log *log) {
  uint64_t offset = 0;
  int too_long = 0;
  while (offset < input->size || buffer->used) {
    if (buffer->used == buffer->room && buffer->room < FP8LM_LOG_LINE_LIMIT) {
      char *larger = malloc(4 * buffer->room);
      if (!larger) return no_memory();
      memcpy(larger, buffer->bytes, buffer->used);
      free(buffer->bytes);
      buffer->bytes = larger;
      buffer->room *= 2;
    }
    if (buffer->used == buffer->room) {
      too_long = 1;
      buffer->used = 0;
    }
    const size_t scanned = buffer->used;
    const uint64_t left = input->size - offset;
    const size_t count = left < buffer->room - scanned ? (size_t)left : buffer->room - scanned;
    fp8core_status status = fp8lm_input_read(input, offset, buffer->bytes + scanned, count);
    if (status != FP8CORE_OK) return status;
    offset += count;
    buffer->used += count;
    const int last = offset == input->size;
    size_t start = 0;
    size_t look = scanned;
    while (start < buffer->used) {
      const char *newline = look < buffer->used ? memchr(buffer->bytes + look, '\n', buffer->used - look) : NULL;
      if (!newline && !last) break;
      const size_t end = newline ? (size_t)(newline - buffer->bytes) : buffer->used;
      log->lines++;
      if (too_long) {
        char message[64];
        (void)snprintf(message, sizeof(message), "longer than %d bytes", (int)FP8LM_LOG_LINE_LIMIT);
        status = note_problem(log, message);
      } else {
        status = read_line(log, buffer->bytes + start, buffer->bytes + buffer->room, end - start, newline != NULL);
      }
      if (status != FP8CORE_OK) return status;
      too_long = 0;
      start = newline ? end + 1 : end;
      look = start;
    }
    buffer->used -= start;
    memmove(buffer->bytes, buffer->bytes + start, buffer->used);
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_run_log_read(const fp8lm_input *input, fp8lm_run_log *log) {
  memset(log, 0, sizeof(*log));
  log->parameters = NAN;
  log->peak_resident = NAN;
  log->newest_statistics = -1;
  for (int i = 0; i < FP8LM_LOG_MEMORY_CLASSES; i++) log->memory[i] = NAN;
  line_buffer buffer = {.room = 65536};
  buffer.bytes = malloc(2 * buffer.room);
  fp8core_status status = buffer.bytes ? read_lines(input, &buffer, log) : no_memory();
  free(buffer.bytes);
  if (status == FP8CORE_OK && log->step_count + log->evaluation_count == 0) {
    if (log->lines == 0) {
      status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "is empty");
    } else if (log->problem_count) {
      status =
        fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "holds no step and no evaluation; line %" PRIu64 ": %s",
                               log->problems[0].line, log->problems[0].message);
    } else {
      status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                      "holds no step and no evaluation in %" PRIu64 " line%s%s", log->lines,
                                      log->lines == 1 ? "" : "s", log->cut_off ? ", of which the last is cut off" : "");
    }
  }
  if (status != FP8CORE_OK) fp8lm_run_log_free(log);
  return status;
}

void fp8lm_run_log_free(fp8lm_run_log *log) {
  for (size_t i = 0; i < log->tensor_count; i++) {
    free(log->tensors[i].name);
    free(log->tensors[i].statistics);
  }
  for (size_t i = 0; i < log->setting_count; i++) {
    free(log->settings[i].key);
    free(log->settings[i].value);
  }
  for (size_t i = 0; i < log->event_count; i++) {
    free(log->events[i].kind);
    free(log->events[i].message);
  }
  for (size_t i = 0; i < log->problem_count; i++) free(log->problems[i].message);
  free(log->tensors);
  free(log->settings);
  free(log->events);
  free(log->steps);
  free(log->evaluations);
  free(log->tensor_names.slots);
  free(log->setting_names.slots);
  memset(log, 0, sizeof(*log));
}
