// The reader of a checkpoint's index with any bytes: what it takes is consistent and is written and read again to the
// same text; what it refuses leaves a message and nothing else.
#include <string.h>

#include "checkpoint.h"
#include "checksum.h"
#include "fp8core/fp8core.h"
#include "fuzz.h"

static void fill(fp8lm_checkpoint_index *index, int which) {
  static const fp8lm_checkpoint_file files[2][5] = {
    {{FP8LM_CHECKPOINT_MODEL, 123, 0x12345678}, {FP8LM_CHECKPOINT_STATE, UINT64_MAX, 0}},
    {{FP8LM_CHECKPOINT_MODEL, 123, 0x12345678},
     {"state-00001-of-00003.safetensors", UINT64_MAX, 0},
     {"state-00003-of-00003.safetensors", 8, 0},
     {FP8LM_CHECKPOINT_VOCAB, 0, 0xffffffff},
     {FP8LM_CHECKPOINT_MERGES, 7, 1}},
  };
  memset(index, 0, sizeof(*index));
  index->step = 100;
  index->optimizer_steps = 98;
  index->skipped_steps = 2;
  index->skipped_in_a_row = 1;
  fp8lm_train_settings *settings = &index->settings;
  settings->preset = strdup(which ? "tiny-llama" : "tiny-gpt");
  settings->data_path = strdup("1 a 2 \"b\\ \xc3\xa9\"");
  FUZZ_CHECK(settings->preset && settings->data_path);
  settings->num_layers = 2;
  settings->hidden_size = 64;
  settings->ffn_hidden_size = 256;
  settings->num_attention_heads = 4;
  settings->num_query_groups = which ? 2 : 4;
  settings->seq_length = 16;
  settings->max_position_embeddings = 32;
  settings->vocab_size = 257;
  settings->norm_epsilon = 1e-5;
  settings->rotary_base = 1e4;
  settings->swiglu = which;
  settings->position_embedding_type = which;
  settings->fp8_amax_history_len = 16;
  settings->micro_batch_size = 1;
  settings->global_batch_size = 2;
  settings->train_iters = 1000;
  settings->lr = 0.1 + 0.2;
  settings->lr_decay_iters = 1000;
  settings->adam_eps = 1e-8;
  settings->max_skipped = 3;
  for (int i = 0; i < 5 && files[which][i].name[0]; i++)
    FUZZ_CHECK(fp8lm_checkpoint_index_add(index, &files[which][i]) == FP8CORE_OK);
}

static char *text_of(const fp8lm_checkpoint_index *index, size_t *size) {
  char *text = NULL;
  FILE *stream = open_memstream(&text, size);
  FUZZ_CHECK(stream);
  fp8lm_checkpoint_index_write(stream, index);
  FUZZ_CHECK(fclose(stream) == 0 && text);
  return text;
}

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index > 1) return NULL;
  fp8lm_checkpoint_index made;
  fill(&made, (int)index);
  char *text = text_of(&made, size);
  fp8lm_checkpoint_index_free(&made);
  return (uint8_t *)text;
}

// Mutations hardly ever keep the checksum right: with it made right, the rest of the reader sees them.
static void sign(char *text, size_t size) {
  static const char key[] = "\"crc32\": \"";
  const size_t tail = sizeof(key) - 1 + 8 + 4;
  if (size < tail || memcmp(text + size - tail, key, sizeof(key) - 1) != 0) return;
  char digits[9];
  (void)snprintf(digits, sizeof(digits), "%08x", fp8lm_crc32(0, text, size - tail));
  memcpy(text + size - tail + sizeof(key) - 1, digits, 8);
}

static void try_text(const uint8_t *data, size_t size, int with_signature) {
  char *text = malloc(size + 1);
  FUZZ_CHECK(text);
  if (size > 0) memcpy(text, data, size);
  text[size] = '\0';
  if (with_signature) sign(text, size);
  fp8lm_checkpoint_index index;
  const fp8core_status status = fp8lm_checkpoint_index_parse(text, size, &index);
  free(text);
  if (status != FP8CORE_OK) {
    FUZZ_CHECK((status == FP8CORE_ERROR_CORRUPT_DATA || status == FP8CORE_ERROR_NOT_SUPPORTED) &&
               *fp8core_last_error());
    FUZZ_CHECK(index.file_count == 0 && !index.settings.preset && !index.settings.data_path);
    return;
  }
  FUZZ_CHECK(index.file_count >= 2 && index.settings.preset && index.settings.data_path);
  size_t once_size;
  size_t twice_size;
  char *once = text_of(&index, &once_size);
  char *copy = malloc(once_size + 1);
  FUZZ_CHECK(copy);
  memcpy(copy, once, once_size + 1);
  fp8lm_checkpoint_index again;
  FUZZ_CHECK(fp8lm_checkpoint_index_parse(copy, once_size, &again) == FP8CORE_OK);
  char *twice = text_of(&again, &twice_size);
  FUZZ_CHECK(once_size == twice_size && memcmp(once, twice, once_size) == 0);
  fp8lm_checkpoint_index_free(&again);
  fp8lm_checkpoint_index_free(&index);
  free(once);
  free(twice);
  free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  try_text(data, size, 0);
  try_text(data, size, 1);
  return 0;
}
