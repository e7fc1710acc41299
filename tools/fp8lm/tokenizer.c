// Tokenizers and encoders: see tokenizer.h; the files of a BPE are read in bpe_vocabulary.c.
#include "tokenizer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bpe_vocabulary.h"
#include "utf8_repair.h"
#include "words.h"

// Words of up to so many bytes and tokens are remembered.
#define CACHED_BYTES ((size_t)24)
#define CACHED_TOKENS ((size_t)8)
#define CACHE_BITS 15
// Words of up to so many bytes are merged by looking for the lowest rank again and again, longer ones with a heap.
#define SHORT_WORD ((size_t)48)
// Zero bytes after the text, so that a word can be read eight bytes at a time.
#define PADDING ((size_t)32)

// A cache line.
typedef struct cached_word {
  uint64_t key[CACHED_BYTES / 8];
  uint32_t ids[CACHED_TOKENS];
  // 0: unused.
  uint32_t length;
  uint32_t count;
} cached_word;

typedef struct symbol {
  // UINT32_MAX: merged into the one before.
  uint32_t id;
  int32_t previous;
  int32_t next;
} symbol;

struct fp8lm_encoder {
  const fp8lm_tokenizer *tokenizer;
  fp8lm_encoder_options options;
  cached_word *cache;
  // Text that has no tokens yet, after repair.
  unsigned char *text;
  size_t size;
  size_t room;
  // Without so much text, looking for words again would be in vain: it is the double of what did not hold a whole one.
  size_t worthwhile;
  // Begin of a sequence of UTF-8, whose end is still to come.
  unsigned char cut[4];
  size_t cut_size;
  // Bytes fed before, for messages.
  uint64_t position;
  uint64_t replaced;
  // For long words.
  symbol *symbols;
  size_t symbol_room;
  uint64_t *heap;
  size_t heap_size;
  size_t heap_room;
};

static fp8core_status out_of_memory(size_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for %zu bytes of text or tokens",
                                bytes);
}

fp8core_status fp8lm_tokenizer_create_bytes(fp8lm_tokenizer **out) {
  fp8lm_words_prepare();
  fp8lm_tokenizer *tokenizer = calloc(1, sizeof(*tokenizer));
  *out = tokenizer;
  if (tokenizer) {
    tokenizer->vocabulary = FP8LM_TOKENIZER_BYTES_VOCABULARY;
    tokenizer->end_of_text = 256;
    tokenizer->tokens = calloc(FP8LM_TOKENIZER_BYTES_VOCABULARY, sizeof(fp8lm_token));
    tokenizer->token_bytes = malloc(256 + strlen(FP8LM_END_OF_TEXT));
  }
  if (!tokenizer || !tokenizer->tokens || !tokenizer->token_bytes) {
    fp8lm_tokenizer_destroy(out);
    return out_of_memory(256);
  }
  for (uint32_t i = 0; i < 256; i++) {
    tokenizer->token_bytes[i] = (unsigned char)i;
    tokenizer->tokens[i] = (fp8lm_token){tokenizer->token_bytes + i, 1, 1};
    tokenizer->byte_ids[i] = i;
  }
  memcpy(tokenizer->token_bytes + 256, FP8LM_END_OF_TEXT, strlen(FP8LM_END_OF_TEXT));
  tokenizer->tokens[256] = (fp8lm_token){tokenizer->token_bytes + 256, (uint32_t)strlen(FP8LM_END_OF_TEXT), 1};
  return FP8CORE_OK;
}

void fp8lm_tokenizer_destroy(fp8lm_tokenizer **tokenizer) {
  if (!tokenizer || !*tokenizer) return;
  free((*tokenizer)->tokens);
  free((*tokenizer)->token_bytes);
  free((*tokenizer)->merges);
  free(*tokenizer);
  *tokenizer = NULL;
}

uint32_t fp8lm_tokenizer_vocabulary(const fp8lm_tokenizer *tokenizer) { return tokenizer->vocabulary; }

int64_t fp8lm_tokenizer_end_of_text(const fp8lm_tokenizer *tokenizer) { return tokenizer->end_of_text; }

const unsigned char *fp8lm_tokenizer_bytes(const fp8lm_tokenizer *tokenizer, uint32_t id, size_t *length) {
  if (id >= tokenizer->vocabulary || !tokenizer->tokens[id].known) return NULL;
  *length = tokenizer->tokens[id].length;
  return tokenizer->tokens[id].bytes;
}

fp8core_status fp8lm_tokens_reserve(fp8lm_tokens *tokens, size_t count) {
  if (count <= tokens->room - tokens->count) return FP8CORE_OK;
  size_t room = tokens->room + tokens->room / 2;
  if (room < tokens->count + count) room = tokens->count + count;
  uint32_t *larger = room <= SIZE_MAX / sizeof(uint32_t) ? realloc(tokens->ids, room * sizeof(uint32_t)) : NULL;
  if (!larger) return out_of_memory(room);
  tokens->ids = larger;
  tokens->room = room;
  return FP8CORE_OK;
}

void fp8lm_tokens_free(fp8lm_tokens *tokens) {
  free(tokens->ids);
  *tokens = (fp8lm_tokens){NULL, 0, 0};
}

fp8core_status fp8lm_encoder_create(fp8lm_encoder **out, const fp8lm_tokenizer *tokenizer,
                                    const fp8lm_encoder_options *options) {
  fp8lm_encoder *encoder = calloc(1, sizeof(*encoder));
  *out = encoder;
  if (encoder && tokenizer->bpe) encoder->cache = calloc((size_t)1 << CACHE_BITS, sizeof(cached_word));
  if (!encoder || (tokenizer->bpe && !encoder->cache)) {
    fp8lm_encoder_destroy(out);
    return out_of_memory(sizeof(cached_word) << CACHE_BITS);
  }
  encoder->tokenizer = tokenizer;
  encoder->options = *options;
  return FP8CORE_OK;
}

void fp8lm_encoder_destroy(fp8lm_encoder **encoder) {
  if (!encoder || !*encoder) return;
  free((*encoder)->cache);
  free((*encoder)->text);
  free((*encoder)->symbols);
  free((*encoder)->heap);
  free(*encoder);
  *encoder = NULL;
}

uint64_t fp8lm_encoder_replaced(const fp8lm_encoder *encoder) { return encoder->replaced; }

void fp8lm_encoder_locate(fp8lm_encoder *encoder, uint64_t position) { encoder->position = position; }

// A new text.
static void restart(fp8lm_encoder *encoder) {
  encoder->size = 0;
  encoder->worthwhile = 0;
  encoder->cut_size = 0;
  encoder->position = 0;
}

// Merging: always the pair of the lowest rank, of several the leftmost.

static size_t merge_short(const fp8lm_tokenizer *tokenizer, const unsigned char *word, size_t count, uint32_t *ids) {
  uint32_t ranks[SHORT_WORD];
  uint32_t merged[SHORT_WORD];
  for (size_t i = 0; i < count; i++) ids[i] = tokenizer->byte_ids[word[i]];
  for (size_t i = 0; i + 1 < count; i++) {
    const fp8lm_merge *merge = fp8lm_find_merge(tokenizer, ids[i], ids[i + 1]);
    ranks[i] = merge ? merge->rank : UINT32_MAX;
    merged[i] = merge ? merge->id : 0;
  }
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; i++) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == UINT32_MAX) break;
    ids[best] = merged[best];
    count--;
    const size_t moved = count - best - 1;
    memmove(ids + best + 1, ids + best + 2, moved * sizeof(uint32_t));
    if (moved) {
      memmove(ranks + best + 1, ranks + best + 2, (moved - 1) * sizeof(uint32_t));
      memmove(merged + best + 1, merged + best + 2, (moved - 1) * sizeof(uint32_t));
    }
    for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < count; i++) {
      const fp8lm_merge *merge = fp8lm_find_merge(tokenizer, ids[i], ids[i + 1]);
      ranks[i] = merge ? merge->rank : UINT32_MAX;
      merged[i] = merge ? merge->id : 0;
    }
  }
  return count;
}

// Smallest first; the rank is in the upper half of a value, the position in the lower.
static void push(fp8lm_encoder *encoder, uint64_t value) {
  size_t at = encoder->heap_size++;
  while (at > 0 && encoder->heap[(at - 1) / 2] > value) {
    encoder->heap[at] = encoder->heap[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  encoder->heap[at] = value;
}

static uint64_t pop(fp8lm_encoder *encoder) {
  uint64_t *const heap = encoder->heap;
  const uint64_t top = heap[0];
  const uint64_t value = heap[--encoder->heap_size];
  const size_t size = encoder->heap_size;
  size_t at = 0;
  for (size_t child = 1; child < size; child = 2 * at + 1) {
    if (child + 1 < size && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= value) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = value;
  return top;
}

static const fp8lm_merge *merge_at(const fp8lm_encoder *encoder, int32_t position) {
  const symbol *left = &encoder->symbols[position];
  if (left->id == UINT32_MAX || left->next < 0) return NULL;
  return fp8lm_find_merge(encoder->tokenizer, left->id, encoder->symbols[left->next].id);
}

static void push_at(fp8lm_encoder *encoder, int32_t position) {
  const fp8lm_merge *merge = merge_at(encoder, position);
  if (merge) push(encoder, (uint64_t)merge->rank << 32 | (uint32_t)position);
}

static fp8core_status merge_long(fp8lm_encoder *encoder, const unsigned char *word, size_t count, uint32_t *ids,
                                 size_t *ids_count) {
  if (encoder->symbol_room < count) {
    free(encoder->symbols);
    free(encoder->heap);
    encoder->symbols = malloc(count * sizeof(symbol));
    // A merge takes a value off and puts at most two in.
    encoder->heap = malloc(2 * count * sizeof(uint64_t));
    encoder->symbol_room = encoder->symbols && encoder->heap ? count : 0;
    if (!encoder->symbol_room) return out_of_memory(count);
  }
  symbol *const symbols = encoder->symbols;
  encoder->heap_size = 0;
  for (size_t i = 0; i < count; i++) {
    symbols[i].id = encoder->tokenizer->byte_ids[word[i]];
    symbols[i].previous = (int32_t)i - 1;
    symbols[i].next = i + 1 < count ? (int32_t)i + 1 : -1;
  }
  for (size_t i = 0; i + 1 < count; i++) push_at(encoder, (int32_t)i);
  while (encoder->heap_size) {
    const uint64_t top = pop(encoder);
    const int32_t position = (int32_t)(uint32_t)top;
    const fp8lm_merge *merge = merge_at(encoder, position);
    // The pair has changed since.
    if (!merge || merge->rank != top >> 32) continue;
    symbol *const left = &symbols[position];
    symbol *const right = &symbols[left->next];
    left->id = merge->id;
    left->next = right->next;
    right->id = UINT32_MAX;
    if (right->next >= 0) symbols[right->next].previous = position;
    if (left->previous >= 0) push_at(encoder, left->previous);
    push_at(encoder, position);
  }
  size_t written = 0;
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids[written++] = symbols[i].id;
  *ids_count = written;
  return FP8CORE_OK;
}

// `ids` has room for `length`, and no less than CACHED_TOKENS.
static fp8core_status encode_word(fp8lm_encoder *encoder, const unsigned char *word, size_t length, uint32_t *ids,
                                  size_t *count) {
  if (length == 1) {
    ids[0] = encoder->tokenizer->byte_ids[word[0]];
    *count = 1;
    return FP8CORE_OK;
  }
  if (length > CACHED_BYTES) {
    if (length > SHORT_WORD) return merge_long(encoder, word, length, ids, count);
    *count = merge_short(encoder->tokenizer, word, length, ids);
    return FP8CORE_OK;
  }
  // The bytes past the word are taken off with a mask, which memory holds so that it fits either byte order.
  static const unsigned char masks[2 * CACHED_BYTES] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                                        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                                        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
  uint64_t key[CACHED_BYTES / 8];
  uint64_t mask[CACHED_BYTES / 8];
  memcpy(key, word, sizeof(key));
  memcpy(mask, masks + CACHED_BYTES - length, sizeof(mask));
  for (size_t i = 0; i < CACHED_BYTES / 8; i++) key[i] &= mask[i];
  uint64_t hash = (key[0] ^ length) * UINT64_C(0x9E3779B97F4A7C15);
  hash = (hash ^ hash >> 32 ^ key[1]) * UINT64_C(0xD6E8FEB86659FD93);
  hash = (hash ^ hash >> 32 ^ key[2]) * UINT64_C(0xD6E8FEB86659FD93);
  cached_word *slot = &encoder->cache[hash >> (64 - CACHE_BITS)];
  if (slot->length == length && slot->key[0] == key[0] && slot->key[1] == key[1] && slot->key[2] == key[2]) {
    memcpy(ids, slot->ids, sizeof(slot->ids));
    *count = slot->count;
    return FP8CORE_OK;
  }
  uint32_t merged[CACHED_BYTES];
  *count = merge_short(encoder->tokenizer, word, length, merged);
  memcpy(ids, merged, *count * sizeof(uint32_t));
  if (*count <= CACHED_TOKENS) {
    memcpy(slot->key, key, sizeof(key));
    memcpy(slot->ids, merged, *count * sizeof(uint32_t));
    slot->length = (uint32_t)length;
    slot->count = (uint32_t)*count;
  }
  return FP8CORE_OK;
}

// Appends the tokens of whole words; *used is how many bytes they have.
static fp8core_status encode_words(fp8lm_encoder *encoder, const unsigned char *text, size_t size, int final,
                                   fp8lm_tokens *tokens, size_t *used) {
  *used = 0;
  const fp8core_status reserved = fp8lm_tokens_reserve(tokens, size + CACHED_TOKENS);
  if (reserved != FP8CORE_OK) return reserved;
  if (!encoder->tokenizer->bpe) {
    uint32_t *ids = tokens->ids + tokens->count;
    for (size_t i = 0; i < size; i++) ids[i] = text[i];
    tokens->count += size;
    *used = size;
    return FP8CORE_OK;
  }
  while (*used < size) {
    const size_t length = fp8lm_next_word(text + *used, size - *used, final);
    if (length > FP8LM_TOKENIZER_MAX_WORD || (length == 0 && size - *used > FP8LM_TOKENIZER_MAX_WORD)) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                    "the text holds a word of more than %zu bytes (a run of letters, of digits, of "
                                    "white space or of other characters)",
                                    FP8LM_TOKENIZER_MAX_WORD);
    }
    if (length == 0) break;
    size_t count = 0;
    const fp8core_status status = encode_word(encoder, text + *used, length, tokens->ids + tokens->count, &count);
    if (status != FP8CORE_OK) return status;
    tokens->count += count;
    *used += length;
  }
  return FP8CORE_OK;
}

// Encodes what is in encoder->text, all of it if `final`.
static fp8core_status encode_text(fp8lm_encoder *encoder, int final, fp8lm_tokens *tokens) {
  static const char special[] = FP8LM_END_OF_TEXT;
  const size_t special_size = sizeof(special) - 1;
  const int with_special = encoder->options.special && encoder->tokenizer->end_of_text >= 0;
  if (!final && encoder->size < encoder->worthwhile) return FP8CORE_OK;
  if (encoder->size) memset(encoder->text + encoder->size, 0, PADDING);
  size_t start = 0;
  while (start < encoder->size) {
    const unsigned char *text = encoder->text + start;
    const size_t size = encoder->size - start;
    const unsigned char *found = with_special ? memmem(text, size, special, special_size) : NULL;
    size_t part = size;
    // What may be the start of the special token waits.
    if (found)
      part = (size_t)(found - text);
    else if (with_special && !final)
      part = size < special_size ? 0 : size - (special_size - 1);
    size_t used = 0;
    const fp8core_status status = encode_words(encoder, text, part, final || found, tokens, &used);
    if (status != FP8CORE_OK) return status;
    start += used;
    if (!found) break;
    const fp8core_status reserved = fp8lm_tokens_reserve(tokens, 1);
    if (reserved != FP8CORE_OK) return reserved;
    tokens->ids[tokens->count++] = (uint32_t)encoder->tokenizer->end_of_text;
    start += special_size;
  }
  encoder->worthwhile = start ? 0 : 2 * encoder->size;
  encoder->size -= start;
  memmove(encoder->text, encoder->text + start, encoder->size);
  return FP8CORE_OK;
}

static fp8core_status reserve_text(fp8lm_encoder *encoder, size_t size) {
  if (size + PADDING <= encoder->room) return FP8CORE_OK;
  const size_t room = size + size / 2 + PADDING;
  unsigned char *larger = realloc(encoder->text, room);
  if (!larger) return out_of_memory(room);
  encoder->text = larger;
  encoder->room = room;
  return FP8CORE_OK;
}

// Copies text behind what is there, with ill-formed UTF-8 as the options say. Room has been made.
static fp8core_status append_text(fp8lm_encoder *encoder, const unsigned char *bytes, size_t size, int final) {
  const fp8lm_repaired repaired =
    fp8lm_repair_utf8(encoder->text + encoder->size, bytes, size, final, encoder->options.invalid_utf8);
  encoder->size += repaired.written;
  encoder->position += repaired.used;
  encoder->replaced += repaired.replaced;
  if (repaired.refused) {
    return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, "byte %" PRIu64 " of the text, 0x%02x, is not UTF-8",
                                  encoder->position, (unsigned)bytes[repaired.used]);
  }
  encoder->cut_size = size - repaired.used;
  if (encoder->cut_size) memcpy(encoder->cut, bytes + repaired.used, encoder->cut_size);
  return FP8CORE_OK;
}

static fp8core_status append(fp8lm_encoder *encoder, const unsigned char *bytes, size_t size, int final) {
  // A byte becomes three at most.
  const size_t factor = encoder->options.invalid_utf8 == FP8LM_INVALID_REPLACE ? 3 : 1;
  fp8core_status status = reserve_text(encoder, encoder->size + factor * (size + sizeof(encoder->cut)));
  if (encoder->options.invalid_utf8 == FP8LM_INVALID_KEEP) {
    if (status == FP8CORE_OK && size) memcpy(encoder->text + encoder->size, bytes, size);
    if (status == FP8CORE_OK) encoder->size += size;
    return status;
  }
  // Complete the sequence that was cut, byte by byte.
  while (status == FP8CORE_OK && encoder->cut_size && (size || final)) {
    unsigned char begin[4];
    size_t begun = encoder->cut_size;
    memcpy(begin, encoder->cut, begun);
    if (size) {
      begin[begun++] = *bytes++;
      size--;
    }
    status = append_text(encoder, begin, begun, final && !size);
  }
  return status == FP8CORE_OK && size ? append_text(encoder, bytes, size, final) : status;
}

fp8core_status fp8lm_encoder_feed(fp8lm_encoder *encoder, const void *bytes, size_t size, fp8lm_tokens *tokens) {
  const unsigned char *next = bytes;
  // By blocks, so that the copy of the text stays small.
  const size_t block = (size_t)1 << 16;
  fp8core_status status = FP8CORE_OK;
  while (size && status == FP8CORE_OK) {
    const size_t count = size < block ? size : block;
    status = append(encoder, next, count, 0);
    if (status == FP8CORE_OK) status = encode_text(encoder, 0, tokens);
    next += count;
    size -= count;
  }
  if (status != FP8CORE_OK) restart(encoder);
  return status;
}

fp8core_status fp8lm_encoder_finish(fp8lm_encoder *encoder, fp8lm_tokens *tokens) {
  fp8core_status status = append(encoder, NULL, 0, 1);
  if (status == FP8CORE_OK) status = encode_text(encoder, 1, tokens);
  restart(encoder);
  return status;
}
