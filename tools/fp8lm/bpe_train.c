#include "bpe_train.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer.h"
#include "words.h"

static fp8core_status out_of_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory to train");
}

// Makes room for one element more in an array that doubles. 0 where there is no memory.
static int grow(void **array, size_t count, size_t *room, size_t element) {
  if (count < *room) return 1;
  const size_t larger = *room ? 2 * *room : 4;
  void *moved = larger <= SIZE_MAX / element ? realloc(*array, larger * element) : NULL;
  if (!moved) return 0;
  *array = moved;
  *room = larger;
  return 1;
}

// Words.

static uint64_t hash_word(const unsigned char *word, size_t length) {
  uint64_t hash = length;
  while (length >= 8) {
    uint64_t part;
    memcpy(&part, word, 8);
    hash = (hash ^ part) * UINT64_C(0x9E3779B97F4A7C15);
    hash ^= hash >> 32;
    word += 8;
    length -= 8;
  }
  for (size_t i = 0; i < length; i++) hash = (hash ^ word[i]) * UINT64_C(0x100000001b3);
  hash *= UINT64_C(0x9E3779B97F4A7C15);
  return hash ^ hash >> 32;
}

static fp8core_status grow_counts(fp8lm_word_counts *counts) {
  const size_t mask = counts->entries ? 2 * counts->mask + 1 : 4095;
  struct fp8lm_word_count *entries = calloc(mask + 1, sizeof(*entries));
  if (!entries) return out_of_memory();
  for (size_t i = 0; counts->entries && i <= counts->mask; i++) {
    if (!counts->entries[i].count) continue;
    size_t slot = counts->entries[i].hash & mask;
    while (entries[slot].count) slot = (slot + 1) & mask;
    entries[slot] = counts->entries[i];
  }
  free(counts->entries);
  counts->entries = entries;
  counts->mask = mask;
  return FP8CORE_OK;
}

static fp8core_status count_hashed(fp8lm_word_counts *counts, const unsigned char *word, size_t length, uint64_t hash,
                                   uint64_t count) {
  if (!counts->entries || 2 * (counts->used + 1) > counts->mask) {
    const fp8core_status status = grow_counts(counts);
    if (status != FP8CORE_OK) return status;
  }
  size_t slot = hash & counts->mask;
  for (; counts->entries[slot].count; slot = (slot + 1) & counts->mask) {
    struct fp8lm_word_count *entry = &counts->entries[slot];
    if (entry->hash == hash && entry->length == length && memcmp(counts->bytes + entry->offset, word, length) == 0) {
      entry->count += count;
      return FP8CORE_OK;
    }
  }
  if (length > counts->bytes_room - counts->bytes_used) {
    const size_t room = 2 * counts->bytes_room + length + 65536;
    unsigned char *larger = realloc(counts->bytes, room);
    if (!larger) return out_of_memory();
    counts->bytes = larger;
    counts->bytes_room = room;
  }
  memcpy(counts->bytes + counts->bytes_used, word, length);
  counts->entries[slot] = (struct fp8lm_word_count){hash, count, counts->bytes_used, (uint32_t)length};
  counts->bytes_used += length;
  counts->used++;
  return FP8CORE_OK;
}

fp8core_status fp8lm_count_word(fp8lm_word_counts *counts, const unsigned char *word, size_t length, uint64_t count) {
  return count_hashed(counts, word, length, hash_word(word, length), count);
}

fp8core_status fp8lm_count_words(fp8lm_word_counts *counts, const unsigned char *text, size_t size) {
  fp8lm_words_prepare();
  for (size_t used = 0; used < size;) {
    const size_t length = fp8lm_next_word(text + used, size - used, 1);
    if (length > FP8LM_TOKENIZER_MAX_WORD) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "the text holds a word of more than %zu bytes",
                                    FP8LM_TOKENIZER_MAX_WORD);
    }
    const fp8core_status status = fp8lm_count_word(counts, text + used, length, 1);
    if (status != FP8CORE_OK) return status;
    used += length;
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_add_counts(fp8lm_word_counts *counts, const fp8lm_word_counts *other) {
  for (size_t i = 0; other->entries && i <= other->mask; i++) {
    const struct fp8lm_word_count *entry = &other->entries[i];
    if (!entry->count) continue;
    const fp8core_status status =
      count_hashed(counts, other->bytes + entry->offset, entry->length, entry->hash, entry->count);
    if (status != FP8CORE_OK) return status;
  }
  return FP8CORE_OK;
}

void fp8lm_word_counts_free(fp8lm_word_counts *counts) {
  free(counts->entries);
  free(counts->bytes);
  *counts = (fp8lm_word_counts){NULL, 0, 0, NULL, 0, 0};
}

// Training.
//
// Two ways may lead to the same token ("ab" + "c", "a" + "bc"). As in tokenizers, pairs with such a token could then
// enter the queue twice, each time with the words that the way concerned, and be merged twice, of which the later time
// counts: the files never have a pair twice.

typedef struct word_list {
  uint32_t *words;
  size_t count;
  size_t room;
} word_list;

typedef struct pair_entry {
  // First id in the upper half; UINT64_MAX: free.
  uint64_t pair;
  int64_t count;
  // Number of the last merge of the pair, from 1; 0: none.
  uint32_t merge;
  // Words with the pair that the queue does not know of yet, and whether it is on the list of such pairs.
  uint32_t pending;
  word_list words;
} pair_entry;

typedef struct candidate {
  uint64_t pair;
  int64_t count;
  word_list words;
} candidate;

typedef struct training_word {
  // Into symbols.
  size_t start;
  uint32_t length;
  int64_t count;
} training_word;

typedef struct merge_record {
  uint64_t pair;
  uint32_t id;
} merge_record;

typedef struct token_text {
  size_t offset;
  uint32_t length;
} token_text;

typedef struct trainer {
  training_word *words;
  size_t word_count;
  uint32_t *symbols;
  // Pairs, by open addressing.
  pair_entry *pairs;
  size_t pairs_used;
  size_t pairs_mask;
  // Pairs with words pending.
  uint64_t *pending;
  size_t pending_count;
  size_t pending_room;
  // Largest first.
  candidate *heap;
  size_t heap_size;
  size_t heap_room;
  merge_record *merges;
  size_t merge_count;
  size_t merge_room;
  // Bytes of every token, and a table from the bytes to the token.
  token_text *tokens;
  size_t token_count;
  size_t token_room;
  unsigned char *text;
  size_t text_used;
  size_t text_room;
  // Ids + 1; 0: free.
  uint32_t *by_text;
  size_t by_text_mask;
} trainer;

static uint64_t pair_of(uint32_t first, uint32_t second) { return (uint64_t)first << 32 | second; }

static size_t pair_slot(const trainer *t, uint64_t pair) {
  uint64_t hash = pair * UINT64_C(0x9E3779B97F4A7C15);
  size_t slot = (size_t)(hash ^ hash >> 32) & t->pairs_mask;
  while (t->pairs[slot].pair != pair && t->pairs[slot].pair != UINT64_MAX) slot = (slot + 1) & t->pairs_mask;
  return slot;
}

// NULL where there is no memory.
static pair_entry *entry_of(trainer *t, uint64_t pair) {
  if (!t->pairs || 2 * (t->pairs_used + 1) > t->pairs_mask) {
    pair_entry *old = t->pairs;
    const size_t old_size = old ? t->pairs_mask + 1 : 0;
    const size_t size = old ? 2 * old_size : 65536;
    pair_entry *larger = size <= SIZE_MAX / sizeof(pair_entry) ? malloc(size * sizeof(pair_entry)) : NULL;
    if (!larger) return NULL;
    for (size_t i = 0; i < size; i++) larger[i] = (pair_entry){UINT64_MAX, 0, 0, 0, {NULL, 0, 0}};
    t->pairs = larger;
    t->pairs_mask = size - 1;
    for (size_t i = 0; i < old_size; i++) {
      if (old[i].pair != UINT64_MAX) t->pairs[pair_slot(t, old[i].pair)] = old[i];
    }
    free(old);
  }
  pair_entry *entry = &t->pairs[pair_slot(t, pair)];
  if (entry->pair == UINT64_MAX) {
    entry->pair = pair;
    t->pairs_used++;
  }
  return entry;
}

// Changes the count of a pair, and notes the word if it gained the pair.
static int change(trainer *t, uint32_t first, uint32_t second, int64_t count, uint32_t word) {
  pair_entry *entry = entry_of(t, pair_of(first, second));
  if (!entry) return 0;
  entry->count += count;
  if (count < 0) return 1;
  if (!entry->pending) {
    if (!grow((void **)&t->pending, t->pending_count, &t->pending_room, sizeof(uint64_t))) return 0;
    t->pending[t->pending_count++] = entry->pair;
    entry->pending = 1;
  }
  // Words come one after another.
  if (entry->words.count && entry->words.words[entry->words.count - 1] == word) return 1;
  if (!grow((void **)&entry->words.words, entry->words.count, &entry->words.room, sizeof(uint32_t))) return 0;
  entry->words.words[entry->words.count++] = word;
  return 1;
}

static int precedes(const candidate *a, const candidate *b) {
  return a->count != b->count ? a->count > b->count : a->pair < b->pair;
}

static void sift_down(trainer *t, candidate value) {
  size_t at = 0;
  for (size_t child = 1; child < t->heap_size; child = 2 * at + 1) {
    if (child + 1 < t->heap_size && precedes(&t->heap[child + 1], &t->heap[child])) child++;
    if (!precedes(&t->heap[child], &value)) break;
    t->heap[at] = t->heap[child];
    at = child;
  }
  t->heap[at] = value;
}

static int queue_pending(trainer *t) {
  for (size_t i = 0; i < t->pending_count; i++) {
    pair_entry *entry = &t->pairs[pair_slot(t, t->pending[i])];
    const candidate value = {entry->pair, entry->count, entry->words};
    entry->pending = 0;
    entry->words = (word_list){NULL, 0, 0};
    if (value.count <= 0) {
      free(value.words.words);
      continue;
    }
    if (!grow((void **)&t->heap, t->heap_size, &t->heap_room, sizeof(candidate))) {
      free(value.words.words);
      return 0;
    }
    size_t at = t->heap_size++;
    for (; at > 0 && precedes(&value, &t->heap[(at - 1) / 2]); at = (at - 1) / 2) t->heap[at] = t->heap[(at - 1) / 2];
    t->heap[at] = value;
  }
  t->pending_count = 0;
  return 1;
}

// Merges in one word, left to right, and counts what that changes.
static int merge_word(trainer *t, uint32_t number, uint64_t pair, uint32_t id) {
  training_word *word = &t->words[number];
  uint32_t *symbols = t->symbols + word->start;
  const uint32_t first = (uint32_t)(pair >> 32);
  const uint32_t second = (uint32_t)pair;
  uint32_t written = 0;
  for (uint32_t i = 0; i < word->length; i++) {
    if (symbols[i] != first || i + 1 == word->length || symbols[i + 1] != second) {
      symbols[written++] = symbols[i];
      continue;
    }
    if (written > 0) {
      if (!change(t, symbols[written - 1], first, -word->count, number)) return 0;
      if (!change(t, symbols[written - 1], id, word->count, number)) return 0;
    }
    if (i + 2 < word->length) {
      if (!change(t, second, symbols[i + 2], -word->count, number)) return 0;
      if (!change(t, id, symbols[i + 2], word->count, number)) return 0;
    }
    symbols[written++] = id;
    i++;
  }
  word->length = written;
  return 1;
}

// The token with these bytes, a new one if there is none. -1 where there is no memory.
static int64_t token_with(trainer *t, const unsigned char *bytes, size_t length) {
  size_t slot = hash_word(bytes, length) & t->by_text_mask;
  for (; t->by_text[slot]; slot = (slot + 1) & t->by_text_mask) {
    const token_text *token = &t->tokens[t->by_text[slot] - 1];
    if (token->length == length && memcmp(t->text + token->offset, bytes, length) == 0) return t->by_text[slot] - 1;
  }
  if (!grow((void **)&t->tokens, t->token_count, &t->token_room, sizeof(token_text))) return -1;
  while (t->text_room - t->text_used < length) {
    if (!grow((void **)&t->text, t->text_room, &t->text_room, 1)) return -1;
  }
  memcpy(t->text + t->text_used, bytes, length);
  t->tokens[t->token_count] = (token_text){t->text_used, (uint32_t)length};
  t->text_used += length;
  t->by_text[slot] = (uint32_t)++t->token_count;
  return (int64_t)t->token_count - 1;
}

static int prepare(trainer *t, const fp8lm_word_counts *counts, const fp8lm_train_options *options,
                   fp8lm_trained *trained) {
  t->by_text_mask = 1023;
  while (t->by_text_mask < 2 * (size_t)options->vocabulary) t->by_text_mask = 2 * t->by_text_mask + 1;
  t->by_text = calloc(t->by_text_mask + 1, sizeof(uint32_t));
  t->words = malloc((counts->used + 1) * sizeof(training_word));
  t->symbols = malloc((counts->bytes_used + 1) * sizeof(uint32_t));
  if (!t->by_text || !t->words || !t->symbols) return 0;
  // Bytes in the order of the characters that stand for them.
  uint32_t ids[256];
  for (uint32_t c = 0x21; c < 0x144; c++) {
    for (int byte = 0; byte < 256; byte++) {
      if (fp8lm_byte_character((unsigned char)byte) != c) continue;
      const unsigned char text = (unsigned char)byte;
      const int64_t id = token_with(t, &text, 1);
      if (id < 0) return 0;
      ids[byte] = (uint32_t)id;
    }
  }
  size_t used = 0;
  for (size_t i = 0; counts->entries && i <= counts->mask; i++) {
    const struct fp8lm_word_count *entry = &counts->entries[i];
    if (!entry->count) continue;
    t->words[t->word_count] = (training_word){used, entry->length, (int64_t)entry->count};
    for (uint32_t k = 0; k < entry->length; k++) t->symbols[used++] = ids[counts->bytes[entry->offset + k]];
    const uint32_t *symbols = t->symbols + t->words[t->word_count].start;
    for (uint32_t k = 0; k + 1 < entry->length; k++) {
      if (!change(t, symbols[k], symbols[k + 1], (int64_t)entry->count, (uint32_t)t->word_count)) return 0;
    }
    t->word_count++;
    trained->bytes += entry->count * entry->length;
  }
  return queue_pending(t);
}

// One merge. 0: there is no memory; *done: there was nothing left to merge.
static int merge_next(trainer *t, uint64_t minimum_frequency, int *done) {
  if (t->heap_size == 0) {
    *done = 1;
    return 1;
  }
  candidate top = t->heap[0];
  pair_entry *entry = &t->pairs[pair_slot(t, top.pair)];
  if (top.count != entry->count) {
    top.count = entry->count;
    sift_down(t, top);
    return 1;
  }
  if (top.count < 1 || (uint64_t)top.count < minimum_frequency) {
    *done = 1;
    return 1;
  }
  const candidate last = t->heap[--t->heap_size];
  if (t->heap_size) sift_down(t, last);
  const token_text first = t->tokens[top.pair >> 32];
  const token_text second = t->tokens[top.pair & UINT32_MAX];
  const size_t length = (size_t)first.length + second.length;
  unsigned char *bytes = malloc(length);
  int64_t id = -1;
  if (bytes) {
    memcpy(bytes, t->text + first.offset, first.length);
    memcpy(bytes + first.length, t->text + second.offset, second.length);
    id = token_with(t, bytes, length);
  }
  free(bytes);
  int good = id >= 0 && grow((void **)&t->merges, t->merge_count, &t->merge_room, sizeof(merge_record));
  if (good) {
    t->merges[t->merge_count++] = (merge_record){top.pair, (uint32_t)id};
    entry->merge = (uint32_t)t->merge_count;
  }
  for (size_t i = 0; good && i < top.words.count; i++) good = merge_word(t, top.words.words[i], top.pair, (uint32_t)id);
  free(top.words.words);
  return good && queue_pending(t);
}

static void write_token(const trainer *t, size_t id, FILE *stream, int json) {
  const token_text *token = &t->tokens[id];
  for (uint32_t i = 0; i < token->length; i++) {
    const uint32_t c = fp8lm_byte_character(t->text[token->offset + i]);
    if (c >= 0x80) {
      fputc((int)(0xc0 | c >> 6), stream);
      fputc((int)(0x80 | (c & 0x3f)), stream);
    } else {
      if (json && (c == '"' || c == '\\')) fputc('\\', stream);
      fputc((int)c, stream);
    }
  }
}

static int write_files(const trainer *t, const fp8lm_train_options *options, fp8lm_trained *trained) {
  const uint32_t first = options->end_of_text == FP8LM_END_OF_TEXT_FIRST;
  FILE *stream = open_memstream(&trained->vocab, &trained->vocab_size);
  if (!stream) return 0;
  fputc('{', stream);
  if (first) fputs("\"" FP8LM_END_OF_TEXT "\":0", stream);
  for (size_t id = 0; id < t->token_count; id++) {
    fputs(id || first ? ",\"" : "\"", stream);
    write_token(t, id, stream, 1);
    fprintf(stream, "\":%zu", id + first);
  }
  trained->vocabulary = (uint32_t)t->token_count + first;
  if (options->end_of_text == FP8LM_END_OF_TEXT_LAST) {
    fprintf(stream, ",\"" FP8LM_END_OF_TEXT "\":%" PRIu32, trained->vocabulary++);
  }
  fputc('}', stream);
  if (ferror(stream) | fclose(stream)) return 0;
  stream = open_memstream(&trained->merges, &trained->merges_size);
  if (!stream) return 0;
  fputs("#version: 0.2\n", stream);
  for (size_t i = 0; i < t->merge_count; i++) {
    const uint64_t pair = t->merges[i].pair;
    // Of a pair that was merged twice, the later time counts.
    if (t->pairs[pair_slot(t, pair)].merge != i + 1) continue;
    write_token(t, pair >> 32, stream, 0);
    fputc(' ', stream);
    write_token(t, pair & UINT32_MAX, stream, 0);
    fputc('\n', stream);
    trained->merge_count++;
  }
  return !(ferror(stream) | fclose(stream));
}

fp8core_status fp8lm_train_bpe(const fp8lm_word_counts *counts, const fp8lm_train_options *options,
                               fp8lm_trained *trained) {
  trainer t;
  memset(&t, 0, sizeof(t));
  *trained = (fp8lm_trained){NULL, 0, NULL, 0, 0, 0, 0, 0};
  const uint32_t wanted = options->vocabulary - (options->end_of_text != FP8LM_END_OF_TEXT_NONE);
  int good = prepare(&t, counts, options, trained);
  for (int done = 0; good && !done && t.token_count < wanted;) good = merge_next(&t, options->minimum_frequency, &done);
  for (size_t i = 0; good && i < t.word_count; i++) trained->tokens += (uint64_t)t.words[i].count * t.words[i].length;
  if (good) good = write_files(&t, options, trained);
  for (size_t i = 0; i < t.heap_size; i++) free(t.heap[i].words.words);
  for (size_t i = 0; t.pairs && i <= t.pairs_mask; i++) free(t.pairs[i].words.words);
  free(t.words);
  free(t.symbols);
  free(t.pairs);
  free(t.pending);
  free(t.heap);
  free(t.merges);
  free(t.tokens);
  free(t.text);
  free(t.by_text);
  if (good) return FP8CORE_OK;
  fp8lm_trained_free(trained);
  return out_of_memory();
}

void fp8lm_trained_free(fp8lm_trained *trained) {
  free(trained->vocab);
  free(trained->merges);
  *trained = (fp8lm_trained){NULL, 0, NULL, 0, 0, 0, 0, 0};
}
