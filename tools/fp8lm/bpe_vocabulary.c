// vocab.json and merges.txt, as GPT-2 and the package tokenizers write them.
#include "bpe_vocabulary.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "input.h"
#include "json_reader.h"
#include "tensor_file.h"
#include "utf8.h"
#include "words.h"

// A token as the files spell it, in the text of vocab.json.
typedef struct name {
  const char *text;
  uint32_t length;
  uint32_t id;
} name;

// Open addressing by the spelling; entries with a NULL text are free.
typedef struct names {
  name *entries;
  size_t count;
  size_t mask;
} names;

uint32_t fp8lm_byte_character(unsigned char byte) {
  if ((byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae) return byte;
  // The others, in order, are U+0100 and so on.
  if (byte <= 0x20) return 0x100U + byte;
  if (byte <= 0xa0) return 0x100U + 0x21 + (byte - 0x7fU);
  return 0x100U + 0x21 + 0x22;
}

// The byte that a character of at most two bytes of UTF-8 stands for; -1 if none.
static int character_byte(const char *text, size_t length) {
  const unsigned char *bytes = (const unsigned char *)text;
  if (length == 1) return bytes[0] >= 0x21 && bytes[0] <= 0x7e ? bytes[0] : -1;
  if (length != 2) return -1;
  const uint32_t c = (bytes[0] & 0x1fU) << 6 | (bytes[1] & 0x3fU);
  if (c < 0x100) return c >= 0xa1 && c != 0xad ? (int)c : -1;
  if (c <= 0x120) return (int)(c - 0x100);
  if (c <= 0x142) return (int)(c - 0x121 + 0x7f);
  return c == 0x143 ? 0xad : -1;
}

static uint64_t hash_text(const char *text, size_t length) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
  return hash ^ hash >> 29;
}

static name *find_name(const names *all, const char *text, size_t length) {
  for (size_t slot = hash_text(text, length) & all->mask;; slot = (slot + 1) & all->mask) {
    name *entry = &all->entries[slot];
    if (!entry->text || (entry->length == length && memcmp(entry->text, text, length) == 0)) return entry;
  }
}

static fp8core_status out_of_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for the vocabulary");
}

static fp8core_status grow_names(names *all) {
  names larger = {NULL, all->count, all->entries ? 2 * all->mask + 1 : 1023};
  larger.entries = calloc(larger.mask + 1, sizeof(name));
  if (!larger.entries) return out_of_memory();
  for (size_t i = 0; all->entries && i <= all->mask; i++) {
    if (all->entries[i].text) *find_name(&larger, all->entries[i].text, all->entries[i].length) = all->entries[i];
  }
  free(all->entries);
  *all = larger;
  return FP8CORE_OK;
}

static fp8core_status read_names(char *text, size_t size, names *all, uint64_t *largest) {
  fp8lm_json json;
  fp8lm_json_init(&json, text, size);
  fp8core_status status = fp8lm_json_enter_object(&json);
  for (;;) {
    char *key = NULL;
    size_t length = 0;
    int more = 0;
    char quoted[FP8LM_QUOTE_BYTES];
    if (status == FP8CORE_OK) status = fp8lm_json_next_member(&json, &key, &length, &more);
    if (status != FP8CORE_OK || !more) break;
    uint64_t id;
    status = fp8lm_json_unsigned(&json, &id);
    if (status != FP8CORE_OK) break;
    if (id > FP8LM_TOKENIZER_MAX_ID) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                    "token %s has the id %" PRIu64 ", expected at most %" PRIu32,
                                    fp8lm_quote(quoted, key, length), id, FP8LM_TOKENIZER_MAX_ID);
    }
    if (2 * (all->count + 1) > all->mask) status = grow_names(all);
    if (status != FP8CORE_OK) break;
    name *entry = find_name(all, key, length);
    if (entry->text) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "token %s is there twice",
                                    fp8lm_quote(quoted, key, length));
    }
    *entry = (name){key, (uint32_t)length, (uint32_t)id};
    all->count++;
    if (id > *largest) *largest = id;
  }
  if (status == FP8CORE_OK) status = fp8lm_json_finish(&json);
  if (status == FP8CORE_OK && all->count == 0) {
    status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the vocabulary is empty");
  }
  return status;
}

// The bytes that a token stands for: byte by byte where every character stands for one, else its own UTF-8 (special
// tokens). Returns their number.
static size_t token_bytes(const name *entry, unsigned char *bytes) {
  size_t count = 0;
  for (size_t i = 0; i < entry->length;) {
    const size_t length = fp8lm_utf8_length(entry->text + i, entry->length - i);
    const int byte = character_byte(entry->text + i, length);
    if (byte < 0) {
      memcpy(bytes, entry->text, entry->length);
      return entry->length;
    }
    bytes[count++] = (unsigned char)byte;
    i += length;
  }
  return count;
}

static fp8core_status fill_tokens(fp8lm_tokenizer *tokenizer, const names *all, uint64_t largest) {
  tokenizer->vocabulary = (uint32_t)largest + 1;
  tokenizer->tokens = calloc(tokenizer->vocabulary, sizeof(fp8lm_token));
  size_t room = 1;
  for (size_t i = 0; i <= all->mask; i++) room += all->entries[i].text ? all->entries[i].length : 0;
  tokenizer->token_bytes = malloc(room);
  if (!tokenizer->tokens || !tokenizer->token_bytes) return out_of_memory();
  size_t used = 0;
  for (size_t i = 0; i <= all->mask; i++) {
    const name *entry = &all->entries[i];
    if (!entry->text) continue;
    fp8lm_token *token = &tokenizer->tokens[entry->id];
    char quoted[FP8LM_QUOTE_BYTES];
    if (token->known) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "token %s has the id %" PRIu32 " of another",
                                    fp8lm_quote(quoted, entry->text, entry->length), entry->id);
    }
    token->bytes = tokenizer->token_bytes + used;
    token->length = (uint32_t)token_bytes(entry, tokenizer->token_bytes + used);
    token->known = 1;
    used += token->length;
  }
  for (int byte = 0; byte < 256; byte++) {
    const uint32_t c = fp8lm_byte_character((unsigned char)byte);
    char text[2] = {(char)c, 0};
    const size_t length = c < 0x80 ? 1 : 2;
    if (length == 2) {
      text[0] = (char)(0xc0 | c >> 6);
      text[1] = (char)(0x80 | (c & 0x3f));
    }
    const name *entry = find_name(all, text, length);
    if (!entry->text) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                    "the vocabulary lacks \"%.*s\", which stands for the byte 0x%02x: a byte-level BPE "
                                    "has all 256",
                                    (int)length, text, (unsigned)byte);
    }
    tokenizer->byte_ids[byte] = entry->id;
  }
  const name *end = find_name(all, FP8LM_END_OF_TEXT, strlen(FP8LM_END_OF_TEXT));
  tokenizer->end_of_text = end->text ? (int64_t)end->id : -1;
  return FP8CORE_OK;
}

static fp8core_status bad_line(size_t line, const char *text, size_t length, const char *what) {
  char quoted[FP8LM_QUOTE_BYTES];
  return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "line %zu, %s: %s", line, fp8lm_quote(quoted, text, length),
                                what);
}

static fp8core_status add_merge(fp8lm_tokenizer *tokenizer, const names *all, char *text, size_t length, size_t line,
                                uint32_t rank) {
  const char *space = memchr(text, ' ', length);
  const size_t left = space ? (size_t)(space - text) : 0;
  const size_t right = space ? length - left - 1 : 0;
  if (left == 0 || right == 0 || memchr(space + 1, ' ', right)) {
    return bad_line(line, text, length, "expected two tokens with a space between them");
  }
  const name *first = find_name(all, text, left);
  const name *second = find_name(all, text + left + 1, right);
  if (!first->text || !second->text) {
    return bad_line(line, text, length,
                    first->text ? "the vocabulary lacks the second" : "the vocabulary lacks the first");
  }
  const uint32_t first_id = first->id;
  const uint32_t second_id = second->id;
  const uint64_t key = (uint64_t)first_id << 32 | second_id;
  size_t slot = fp8lm_merge_slot(tokenizer, key);
  while (tokenizer->merges[slot].key != UINT64_MAX) {
    if (tokenizer->merges[slot].key == key) return bad_line(line, text, length, "is there twice");
    slot = (slot + 1) & tokenizer->merge_mask;
  }
  memmove(text + left, text + left + 1, right);
  const name *merged = find_name(all, text, length - 1);
  if (!merged->text) return bad_line(line, text, length - 1, "the vocabulary lacks this, what they merge to");
  tokenizer->merges[slot] = (fp8lm_merge){key, rank, merged->id};
  return FP8CORE_OK;
}

static fp8core_status read_merges(fp8lm_tokenizer *tokenizer, const names *all, char *text, size_t size) {
  size_t lines = 0;
  for (size_t i = 0; i < size; i++) lines += text[i] == '\n';
  unsigned bits = 4;
  while ((size_t)1 << bits < 2 * (lines + 2)) bits++;
  tokenizer->merge_shift = 64 - bits;
  tokenizer->merge_mask = ((size_t)1 << bits) - 1;
  tokenizer->merges = malloc(sizeof(fp8lm_merge) << bits);
  if (!tokenizer->merges) return out_of_memory();
  memset(tokenizer->merges, 0xff, sizeof(fp8lm_merge) << bits);
  uint32_t rank = 0;
  size_t line = 0;
  for (size_t start = 0; start < size;) {
    const char *newline = memchr(text + start, '\n', size - start);
    const size_t end = newline ? (size_t)(newline - text) : size;
    size_t length = end - start;
    line++;
    if (length && text[end - 1] == '\r') length--;
    if (length < 8 || memcmp(text + start, "#version", 8) != 0) {
      const fp8core_status status = add_merge(tokenizer, all, text + start, length, line, rank);
      if (status != FP8CORE_OK) return status;
      rank++;
    }
    start = end + 1;
  }
  return FP8CORE_OK;
}

// With the names of the files, where there are any, before the message.
static fp8core_status name_file(fp8core_status status, const char *path) {
  if (status == FP8CORE_OK || !path) return status;
  char message[400];
  snprintf(message, sizeof(message), "%s", fp8core_last_error());
  return fp8core_set_last_error(status, "%s: %s", path, message);
}

static fp8core_status parse(fp8lm_tokenizer **out, char *vocab, size_t vocab_size, char *merges, size_t merges_size,
                            const char *vocab_file, const char *merge_file) {
  fp8lm_words_prepare();
  fp8lm_tokenizer *tokenizer = calloc(1, sizeof(*tokenizer));
  names all = {NULL, 0, 0};
  uint64_t largest = 0;
  fp8core_status status = tokenizer ? grow_names(&all) : out_of_memory();
  if (status == FP8CORE_OK) status = name_file(read_names(vocab, vocab_size, &all, &largest), vocab_file);
  if (status == FP8CORE_OK) {
    tokenizer->bpe = 1;
    status = name_file(fill_tokens(tokenizer, &all, largest), vocab_file);
  }
  if (status == FP8CORE_OK) status = name_file(read_merges(tokenizer, &all, merges, merges_size), merge_file);
  free(all.entries);
  if (status != FP8CORE_OK) fp8lm_tokenizer_destroy(&tokenizer);
  *out = tokenizer;
  return status;
}

fp8core_status fp8lm_tokenizer_parse_bpe(fp8lm_tokenizer **tokenizer, char *vocab, size_t vocab_size, char *merges,
                                         size_t merges_size) {
  return parse(tokenizer, vocab, vocab_size, merges, merges_size, NULL, NULL);
}

fp8core_status fp8lm_read_whole_file(const char *path, uint64_t limit, char **bytes, size_t *size) {
  *bytes = NULL;
  *size = 0;
  fp8lm_input input;
  fp8core_status status = fp8lm_input_open(&input, path);
  if (status != FP8CORE_OK) return name_file(status, path);
  if (input.size > limit) {
    status = fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                    "the file has %" PRIu64 " bytes, expected at most %" PRIu64, input.size, limit);
  } else if (!(*bytes = malloc((size_t)input.size + 1))) {
    status =
      fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for its %" PRIu64 " bytes", input.size);
  } else {
    status = fp8lm_input_read(&input, 0, *bytes, (size_t)input.size);
    (*bytes)[input.size] = '\0';
    *size = (size_t)input.size;
  }
  fp8lm_input_close(&input);
  if (status != FP8CORE_OK) {
    free(*bytes);
    *bytes = NULL;
  }
  return name_file(status, path);
}

fp8core_status fp8lm_tokenizer_create_bpe(fp8lm_tokenizer **tokenizer, const char *vocab_file, const char *merge_file) {
  char *vocab = NULL;
  char *merges = NULL;
  size_t vocab_size;
  size_t merges_size;
  *tokenizer = NULL;
  fp8core_status status = fp8lm_read_whole_file(vocab_file, FP8LM_TOKENIZER_MAX_FILE, &vocab, &vocab_size);
  if (status == FP8CORE_OK) {
    status = fp8lm_read_whole_file(merge_file, FP8LM_TOKENIZER_MAX_FILE, &merges, &merges_size);
  }
  if (status == FP8CORE_OK) {
    status = parse(tokenizer, vocab, vocab_size, merges, merges_size, vocab_file, merge_file);
  }
  free(vocab);
  free(merges);
  return status;
}
