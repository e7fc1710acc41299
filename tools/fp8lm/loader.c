#include "loader.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "checksum.h"
#include "shard.h"

// Weights are multiples of 2^-16, so that 65,536 samples have every source in its exact share.
enum { WEIGHT_BITS = 16, WEIGHT_SUM = 1 << WEIGHT_BITS, MAX_SOURCES = 1024, ROUNDS = 6 };

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

typedef struct open_shard {
  fp8lm_shard shard;
  char *path;
  // Tokens of the shards before it.
  uint64_t begin;
} open_shard;

// Tokens [begin, end) of some shards.
typedef struct part {
  open_shard *shards;
  size_t shard_count;
  uint64_t begin;
  uint64_t end;
} part;

typedef struct source {
  char *path;
  double weight;
  part parts[2];
} source;

typedef struct mixture {
  source *sources;
  size_t count;
  // Source s has the slots [slots[s], slots[s + 1]) of WEIGHT_SUM.
  uint32_t *slots;
} mixture;

struct fp8lm_loader {
  // The second only if validation has sources of its own.
  mixture mixtures[2];
  int own_validation;
  uint64_t seed;
  uint32_t vocabulary;
};

static fp8core_status out_of_memory(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "not enough memory for the data sources");
}

static fp8core_status name_error(fp8core_status status, const char *path) {
  char message[400];
  snprintf(message, sizeof(message), "%s", fp8core_last_error());
  return fp8core_set_last_error(status, "%s: %s", path, message);
}

// The order.

static uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

uint64_t fp8lm_permute(uint64_t key, uint64_t count, uint64_t index) {
  unsigned half = 1;
  while (half < 32 && UINT64_C(1) << (2 * half) < count) half++;
  const uint64_t mask = (UINT64_C(1) << half) - 1;
  // A permutation of 2^(2 half) numbers, fewer than four times as many as are wanted: walk until one of those comes.
  do {
    uint64_t left = index >> half;
    uint64_t right = index & mask;
    for (uint64_t round = 1; round <= ROUNDS; round++) {
      const uint64_t next = left ^ (mix((key + round * GOLDEN) ^ right) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= count);
  return index;
}

static uint32_t reverse_bits(uint32_t x) {
  uint32_t reversed = 0;
  for (int bit = 0; bit < WEIGHT_BITS; bit++) reversed |= (x >> bit & 1) << (WEIGHT_BITS - 1 - bit);
  return reversed;
}

// How many of 0 to position - 1 have, with their bits reversed, less than `bound`.
static uint32_t count_reversed_below(uint32_t position, uint32_t bound) {
  uint32_t count = 0;
  // Position's set bits divide the numbers below it into blocks with the upper bits given and the lower ones free.
  for (unsigned bit = 0; bit < WEIGHT_BITS; bit++) {
    if (!(position >> bit & 1)) continue;
    const uint32_t start = (position >> bit & ~1U) << bit;
    // The reversed numbers of the block are start's, reversed, plus any multiple of `spacing`.
    const uint32_t first = reverse_bits(start);
    const unsigned spacing_bits = WEIGHT_BITS - bit;
    if (bound > first) count += (bound - first + (1U << spacing_bits) - 1) >> spacing_bits;
  }
  return count;
}

static const mixture *mixture_of(const fp8lm_loader *loader, fp8lm_split split) {
  return &loader->mixtures[split == FP8LM_VALIDATION && loader->own_validation];
}

static uint64_t sequences_of(const part *tokens, size_t length) {
  const uint64_t count = tokens->end - tokens->begin;
  return count ? (count - 1) / length : 0;
}

fp8core_status fp8lm_loader_sample(const fp8lm_loader *loader, fp8lm_split split, uint64_t index, size_t length,
                                   fp8lm_sample *sample) {
  const mixture *mix_of = mixture_of(loader, split);
  const uint32_t position = (uint32_t)(index % WEIGHT_SUM);
  const uint32_t slot = reverse_bits(position);
  size_t low = 0;
  size_t high = mix_of->count - 1;
  while (low < high) {
    const size_t middle = (low + high + 1) / 2;
    if (mix_of->slots[middle] <= slot)
      low = middle;
    else
      high = middle - 1;
  }
  const uint32_t begin = mix_of->slots[low];
  const uint32_t end = mix_of->slots[low + 1];
  // How many samples of this source came before.
  const uint64_t number =
    index / WEIGHT_SUM * (end - begin) + count_reversed_below(position, end) - count_reversed_below(position, begin);
  const part *tokens = &mix_of->sources[low].parts[split];
  const uint64_t sequences = sequences_of(tokens, length);
  if (sequences == 0) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                  "%s has %" PRIu64 " tokens for %s, a sequence of %zu needs %zu",
                                  mix_of->sources[low].path, tokens->end - tokens->begin,
                                  split == FP8LM_TRAIN ? "training" : "validation", length, length + 1);
  }
  sample->source = low;
  sample->epoch = number / sequences;
  // Validation has the same order every time.
  const uint64_t epoch = split == FP8LM_TRAIN ? sample->epoch : 0;
  const uint64_t key = mix(mix(mix(loader->seed + GOLDEN) + (2 * low + split) * GOLDEN) + epoch * GOLDEN);
  sample->sequence = fp8lm_permute(key, sequences, number % sequences);
  return FP8CORE_OK;
}

static fp8core_status read_tokens(const fp8lm_loader *loader, const part *tokens, uint64_t first, size_t count,
                                  int32_t *out) {
  size_t low = 0;
  size_t high = tokens->shard_count - 1;
  while (low < high) {
    const size_t middle = (low + high + 1) / 2;
    if (tokens->shards[middle].begin <= first)
      low = middle;
    else
      high = middle - 1;
  }
  while (count) {
    const open_shard *at = &tokens->shards[low++];
    const uint64_t offset = first - at->begin;
    const size_t available = at->shard.count - offset < count ? (size_t)(at->shard.count - offset) : count;
    const fp8core_status status = fp8lm_shard_read(&at->shard, offset, available, out);
    if (status != FP8CORE_OK) return name_error(status, at->path);
    const uint32_t bound = loader->vocabulary ? loader->vocabulary : at->shard.vocabulary;
    int32_t largest = 0;
    for (size_t i = 0; i < available; i++) largest = out[i] > largest ? out[i] : largest;
    if ((bound && (uint32_t)largest >= bound) || largest == INT32_MAX) {
      size_t i = 0;
      while (out[i] != largest) i++;
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                    "%s: token %" PRIu64 " is %" PRId32 ", the vocabulary has %" PRIu32, at->path,
                                    offset + i, largest, bound);
    }
    out += available;
    first += available;
    count -= available;
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_loader_batch(const fp8lm_loader *loader, fp8lm_split split, uint64_t step, uint32_t rank,
                                  uint32_t ranks, size_t batch, size_t sequence_length, int32_t *inputs,
                                  int32_t *targets) {
  uint64_t before;
  if (batch == 0 || sequence_length == 0 || sequence_length > INT32_MAX || rank >= ranks) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                  "batch %zu, sequence length %zu, rank %" PRIu32 " of %" PRIu32 ": out of range",
                                  batch, sequence_length, rank, ranks);
  }
  if (__builtin_mul_overflow(step, ranks, &before) || __builtin_add_overflow(before, rank, &before) ||
      __builtin_mul_overflow(before, batch, &before) || before > UINT64_MAX - batch) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "step %" PRIu64 " is out of range", step);
  }
  const mixture *mix_of = mixture_of(loader, split);
  for (size_t i = 0; i < batch; i++) {
    fp8lm_sample sample;
    fp8core_status status = fp8lm_loader_sample(loader, split, before + i, sequence_length, &sample);
    if (status != FP8CORE_OK) return status;
    const part *tokens = &mix_of->sources[sample.source].parts[split];
    const uint64_t first = tokens->begin + sample.sequence * sequence_length;
    int32_t *input = inputs + i * sequence_length;
    int32_t *target = targets + i * sequence_length;
    status = read_tokens(loader, tokens, first, sequence_length, input);
    if (status == FP8CORE_OK) {
      status = read_tokens(loader, tokens, first + sequence_length, 1, target + sequence_length - 1);
    }
    if (status != FP8CORE_OK) return status;
    memcpy(target, input + 1, (sequence_length - 1) * sizeof(int32_t));
  }
  return FP8CORE_OK;
}

uint64_t fp8lm_loader_tokens(const fp8lm_loader *loader, fp8lm_split split) {
  const mixture *mix_of = mixture_of(loader, split);
  uint64_t sum = 0;
  for (size_t i = 0; i < mix_of->count; i++)
    sum += mix_of->sources[i].parts[split].end - mix_of->sources[i].parts[split].begin;
  return sum;
}

// A shard among those of all parts of all sources: of both mixtures, one after the other.
typedef struct shard_place {
  int mixture;
  // Two of each source.
  size_t part;
  size_t shard;
  const part *tokens;
} shard_place;

// The shard there, or the first one after it; NULL: no more.
static const open_shard *find_shard(const fp8lm_loader *loader, shard_place *at) {
  for (; at->mixture < 2; at->mixture++, at->part = 0) {
    const mixture *all = &loader->mixtures[at->mixture];
    for (; at->part < 2 * all->count; at->part++, at->shard = 0) {
      at->tokens = &all->sources[at->part / 2].parts[at->part % 2];
      if (at->shard < at->tokens->shard_count) return &at->tokens->shards[at->shard];
    }
  }
  return NULL;
}

uint32_t fp8lm_loader_vocabulary(const fp8lm_loader *loader) {
  uint32_t largest = 0;
  shard_place at = {0, 0, 0, NULL};
  for (const open_shard *one; (one = find_shard(loader, &at)); at.shard++)
    largest = one->shard.vocabulary > largest ? one->shard.vocabulary : largest;
  return largest;
}

uint64_t fp8lm_loader_sequences(const fp8lm_loader *loader, fp8lm_split split, size_t sequence_length) {
  const mixture *mix_of = mixture_of(loader, split);
  uint64_t sum = 0;
  for (size_t i = 0; sequence_length && i < mix_of->count; i++)
    sum += sequences_of(&mix_of->sources[i].parts[split], sequence_length);
  return sum;
}

// Opening.

static void close_part(part *tokens) {
  for (size_t i = 0; tokens->shards && i < tokens->shard_count; i++) {
    fp8lm_shard_close(&tokens->shards[i].shard);
    free(tokens->shards[i].path);
  }
  free(tokens->shards);
  *tokens = (part){NULL, 0, 0, 0};
}

static fp8core_status open_part(const fp8lm_loader *loader, part *tokens, char *const *paths, size_t count) {
  if (count == 0) return FP8CORE_OK;
  tokens->shards = calloc(count, sizeof(open_shard));
  if (!tokens->shards) return out_of_memory();
  tokens->shard_count = count;
  for (size_t i = 0; i < count; i++) {
    open_shard *at = &tokens->shards[i];
    const fp8core_status status = fp8lm_shard_open(&at->shard, paths[i]);
    if (status != FP8CORE_OK) return name_error(status, paths[i]);
    at->path = strdup(paths[i]);
    if (!at->path) return out_of_memory();
    if (loader->vocabulary && at->shard.vocabulary > loader->vocabulary) {
      return fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA,
                                    "%s: its vocabulary has %" PRIu32
                                    " tokens, expected at most --vocab-size, %" PRIu32,
                                    paths[i], at->shard.vocabulary, loader->vocabulary);
    }
    at->begin = tokens->end;
    tokens->end += at->shard.count;
  }
  return FP8CORE_OK;
}

static fp8core_status open_series(const fp8lm_loader *loader, const char *path, const char *suffix, part *tokens) {
  char **paths = NULL;
  size_t count = 0;
  char *prefix = malloc(strlen(path) + strlen(suffix) + 1);
  if (!prefix) return out_of_memory();
  (void)strcpy(prefix, path);
  (void)strcat(prefix, suffix);
  fp8core_status status = fp8lm_shard_series(prefix, &paths, &count);
  if (status == FP8CORE_OK) status = open_part(loader, tokens, paths, count);
  fp8lm_shard_series_free(&paths, count);
  free(prefix);
  return status;
}

// The end of `from` becomes `to`, with handles of its own.
static fp8core_status split_tail(const fp8lm_loader *loader, part *from, part *to, double fraction) {
  const uint64_t tail = (uint64_t)((double)(from->end - from->begin) * fraction);
  char **paths = malloc(from->shard_count * sizeof(char *));
  if (!paths) return out_of_memory();
  for (size_t i = 0; i < from->shard_count; i++) paths[i] = from->shards[i].path;
  const fp8core_status status = open_part(loader, to, paths, from->shard_count);
  free(paths);
  to->begin = from->end - tail;
  from->end = to->begin;
  return status;
}

static int parse_weight(const char *text, double *weight) {
  char *end;
  // strtod() takes hexadecimal numbers, too.
  if (!strchr("0123456789.+", text[0]) || strpbrk(text, "xX")) return 0;
  *weight = strtod(text, &end);
  return *end == '\0';
}

static fp8core_status open_source(const fp8lm_loader *loader, source *one, int all_validation, double fraction) {
  part *train = &one->parts[FP8LM_TRAIN];
  part *validation = &one->parts[FP8LM_VALIDATION];
  struct stat information;
  fp8core_status status;
  if (stat(one->path, &information) == 0 && !S_ISDIR(information.st_mode)) {
    char *path = one->path;
    status = open_part(loader, all_validation ? validation : train, &path, 1);
  } else {
    status = open_series(loader, one->path, "_val", validation);
    // Sources for validation may have been written without a part for training, or as one.
    if (status == FP8CORE_OK && !(all_validation && validation->shard_count)) {
      status = open_series(loader, one->path, "_train", all_validation ? validation : train);
    }
    double weight;
    if (status == FP8CORE_OK && !train->shard_count && !validation->shard_count && parse_weight(one->path, &weight)) {
      status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                      "%s: there is no such shard; if it is a weight, weights and paths must "
                                      "alternate: WEIGHT PATH WEIGHT PATH ...",
                                      one->path);
    } else if (status == FP8CORE_OK && !train->shard_count && !validation->shard_count) {
      status =
        fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                               "%s: there is no such shard, and no series %s_train_000000.bin", one->path, one->path);
    }
  }
  if (status == FP8CORE_OK && !all_validation && !validation->shard_count && fraction > 0.0) {
    status = split_tail(loader, train, validation, fraction);
  }
  return status;
}

// Divides the text at white space into words from malloc().
static fp8core_status split_words(const char *text, char ***words, size_t *count) {
  *words = calloc(2 * MAX_SOURCES + 1, sizeof(char *));
  *count = 0;
  if (!*words) return out_of_memory();
  for (const char *next = text; *(next += strspn(next, " \t\r\n"));) {
    if (*count == 2 * (size_t)MAX_SOURCES) {
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the data path has more than %d sources",
                                    MAX_SOURCES);
    }
    char *word = malloc(strlen(next) + 1);
    if (!word) return out_of_memory();
    (*words)[(*count)++] = word;
    while (*next && !strchr(" \t\r\n", *next)) {
      if (*next == '\\' && next[1]) next++;
      *word++ = *next++;
    }
    *word = '\0';
  }
  return FP8CORE_OK;
}

// Shares of WEIGHT_SUM by the largest remainder; a source that would have none gets one from the largest.
static fp8core_status fill_slots(mixture *all) {
  double sum = 0.0;
  for (size_t i = 0; i < all->count; i++) sum += all->sources[i].weight;
  all->slots = calloc(all->count + 1, sizeof(uint32_t));
  double *rests = malloc(all->count * sizeof(double));
  if (!all->slots || !rests) {
    free(rests);
    return out_of_memory();
  }
  uint32_t *const shares = all->slots + 1;
  uint32_t left = WEIGHT_SUM;
  for (size_t i = 0; i < all->count; i++) {
    const double exact = all->sources[i].weight / sum * WEIGHT_SUM;
    shares[i] = (uint32_t)exact < left ? (uint32_t)exact : left;
    rests[i] = exact - (double)shares[i];
    left -= shares[i];
  }
  for (; left; left--) {
    size_t best = 0;
    for (size_t i = 1; i < all->count; i++) best = rests[i] > rests[best] ? i : best;
    shares[best]++;
    rests[best] -= 1.0;
  }
  for (size_t i = 0; i < all->count; i++) {
    if (shares[i]) continue;
    size_t largest = 0;
    for (size_t k = 1; k < all->count; k++) largest = shares[k] > shares[largest] ? k : largest;
    shares[largest]--;
    shares[i] = 1;
  }
  for (size_t i = 1; i < all->count; i++) shares[i] += shares[i - 1];
  free(rests);
  return FP8CORE_OK;
}

static fp8core_status open_mixture(fp8lm_loader *loader, mixture *all, const char *text, int all_validation,
                                   double fraction) {
  char **words = NULL;
  size_t count = 0;
  fp8core_status status = split_words(text, &words, &count);
  int weighted = count > 1 && count % 2 == 0;
  double weight;
  for (size_t i = 0; weighted && i < count; i += 2) weighted = parse_weight(words[i], &weight);
  const size_t stride = weighted ? 2 : 1;
  if (status == FP8CORE_OK && count == 0) {
    status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the data path names no source");
  }
  if (status == FP8CORE_OK && count / stride > MAX_SOURCES) {
    status =
      fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the data path has more than %d sources", MAX_SOURCES);
  }
  if (status == FP8CORE_OK && !(all->sources = calloc(count / stride, sizeof(source)))) status = out_of_memory();
  for (size_t i = 0; status == FP8CORE_OK && i < count / stride; i++) {
    source *one = &all->sources[all->count++];
    one->path = words[stride * i + stride - 1];
    words[stride * i + stride - 1] = NULL;
    status = open_source(loader, one, all_validation, fraction);
    if (status != FP8CORE_OK) break;
    const part *main_part = &one->parts[all_validation ? FP8LM_VALIDATION : FP8LM_TRAIN];
    one->weight = (double)(main_part->end - main_part->begin);
    if (weighted) (void)parse_weight(words[2 * i], &one->weight);
    if (!(one->weight > 0.0 && one->weight <= 1e15)) {
      status =
        fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                               "%s: its weight is %g, expected more than 0 and at most 1e15", one->path, one->weight);
    }
  }
  if (status == FP8CORE_OK) status = fill_slots(all);
  for (size_t i = 0; words && i < count; i++) free(words[i]);
  free(words);
  return status;
}

fp8core_status fp8lm_loader_create(fp8lm_loader **out, const fp8lm_loader_options *options) {
  *out = NULL;
  if (!options->data_path) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "there is no data path");
  }
  if (!(options->validation_fraction >= 0.0 && options->validation_fraction < 1.0)) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                  "the share for validation is %g, expected at least 0 and less than 1",
                                  options->validation_fraction);
  }
  fp8lm_loader *loader = calloc(1, sizeof(*loader));
  if (!loader) return out_of_memory();
  *out = loader;
  loader->seed = options->seed;
  loader->vocabulary = options->vocabulary;
  loader->own_validation = options->validation_data_path != NULL;
  fp8core_status status = open_mixture(loader, &loader->mixtures[0], options->data_path, 0,
                                       loader->own_validation ? 0.0 : options->validation_fraction);
  if (status == FP8CORE_OK && loader->own_validation) {
    status = open_mixture(loader, &loader->mixtures[1], options->validation_data_path, 1, 0.0);
  }
  if (status != FP8CORE_OK) fp8lm_loader_destroy(out);
  return status;
}

void fp8lm_loader_destroy(fp8lm_loader **loader) {
  if (!loader || !*loader) return;
  for (int m = 0; m < 2; m++) {
    mixture *all = &(*loader)->mixtures[m];
    for (size_t i = 0; i < all->count; i++) {
      for (int split = 0; split < 2; split++) close_part(&all->sources[i].parts[split]);
      free(all->sources[i].path);
    }
    free(all->sources);
    free(all->slots);
  }
  free(*loader);
  *loader = NULL;
}

uint32_t fp8lm_loader_fingerprint(const fp8lm_loader *loader) {
  uint32_t crc = 0;
  shard_place at = {0, 0, 0, NULL};
  for (const open_shard *one; (one = find_shard(loader, &at)); at.shard++) {
    const fp8lm_shard *shard = &one->shard;
    const uint64_t header[] = {at.part, shard->count, shard->width, shard->vocabulary, shard->checksum};
    crc = fp8lm_crc32(crc, header, sizeof(header));
  }
  return crc;
}

uint32_t fp8lm_loader_files(const fp8lm_loader *loader) {
  uint32_t crc = 0;
  shard_place at = {0, 0, 0, NULL};
  for (const open_shard *one; (one = find_shard(loader, &at)); at.shard++) {
    struct stat file;
    if (stat(one->path, &file) != 0) memset(&file, 0, sizeof(file));
    const uint64_t identity[] = {(uint64_t)file.st_dev, (uint64_t)file.st_ino};
    crc = fp8lm_crc32(crc, identity, sizeof(identity));
  }
  return crc;
}

fp8core_status fp8lm_loader_check(const fp8lm_loader *loader) {
  shard_place at = {0, 0, 0, NULL};
  for (const open_shard *one; (one = find_shard(loader, &at)); at.shard++) {
    // The tail of the first part, in the same shards.
    if (at.part % 2 == FP8LM_VALIDATION && at.tokens->begin > 0) continue;
    const fp8core_status status = fp8lm_shard_check(&one->shard, loader->vocabulary);
    if (status != FP8CORE_OK) return name_error(status, one->path);
  }
  return FP8CORE_OK;
}
