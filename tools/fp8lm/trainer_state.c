// Trainers to and from checkpoints. model.safetensors has what the model computes with, files of states the rest: one,
// or where ranks divide it one a rank, so that each writes what it owns.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "fp8comm/collectives.h"
#include "input.h"
#include "tensor_file.h"
#include "trainer.h"
#include "try.h"

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

#define STATES 3
#define PARTS 4
#define NAME_BYTES 320
#define REDUCER "gradient.reducer"

static const fp8optim_state parts[PARTS] = {FP8OPTIM_MASTER, FP8OPTIM_EXP_AVG, FP8OPTIM_EXP_AVG_SQ, FP8OPTIM_WEIGHT};

static fp8core_status out_of_memory(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %s", what);
}

static fp8core_status in_file(const char *name, fp8core_status status) {
  char reason[400];
  (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  return status == FP8CORE_OK ? status : fp8core_set_last_error(status, "%s: %s", name, reason);
}

// Writing: a list of tensors, with the small ones and the names of all.

typedef struct tensor_list {
  fp8lm_saved_tensor *tensors;
  char (*names)[NAME_BYTES];
  size_t count;
} tensor_list;

static void list_free(tensor_list *list) {
  free(list->tensors);
  free(list->names);
}

static fp8core_status list_create(tensor_list *list, size_t most) {
  list->tensors = calloc(most, sizeof(*list->tensors));
  list->names = calloc(most, sizeof(*list->names));
  list->count = 0;
  if (list->tensors && list->names) return FP8CORE_OK;
  return out_of_memory("the list of tensors");
}

static fp8lm_saved_tensor *list_add(tensor_list *list, fp8core_dtype dtype, int dimensions, const int64_t *shape,
                                    const void *data, const char *name, const char *suffix) {
  const size_t index = list->count++;
  (void)snprintf(list->names[index], NAME_BYTES, "%s%s", name, suffix);
  list->tensors[index] = fp8lm_saved_tensor_create(list->names[index], dtype, dimensions, shape, data);
  return &list->tensors[index];
}

static const char *const metadata[] = {"format", "fp8lm", NULL};

static fp8lm_checkpoint_file entry_of(const char *name, const fp8lm_saved_file *saved) {
  fp8lm_checkpoint_file file = {.bytes = saved->bytes, .crc32 = saved->crc32};
  (void)snprintf(file.name, sizeof(file.name), "%s", name);
  return file;
}

static fp8core_status write_list(const fp8lm_checkpoint_writer *writer, const char *name, fp8core_context *context,
                                 const tensor_list *list, fp8lm_checkpoint_file *file) {
  char path[PATH_MAX];
  fp8lm_saved_file saved;
  TRY(fp8lm_join_path(path, writer->temporary_path, name));
  TRY(in_file(name, fp8lm_safetensors_write(path, context, list->tensors, list->count, metadata, &saved)));
  *file = entry_of(name, &saved);
  return FP8CORE_OK;
}

static fp8core_status write_text(const fp8lm_checkpoint_writer *writer, const char *name, const char *text,
                                 size_t bytes, fp8lm_checkpoint_index *index) {
  char path[PATH_MAX];
  fp8lm_saved_file saved;
  TRY(fp8lm_join_path(path, writer->temporary_path, name));
  TRY(in_file(name, fp8lm_write_file(path, text, bytes, &saved)));
  const fp8lm_checkpoint_file file = entry_of(name, &saved);
  return fp8lm_checkpoint_index_add(index, &file);
}

static const int64_t one = 1;

// Weights; those with a scale are followed by its reciprocal, by which a stored element is multiplied.
static fp8core_status list_weights(const fp8lm_trainer *trainer, tensor_list *list, float *inverses) {
  TRY(list_create(list, 2 * (size_t)trainer->parameter_count));
  // Those of the last step may be on their way.
  if (trainer->sharded) TRY(fp8zero_sharded_wait(trainer->sharded));
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    fp8core_tensor weight = parameter.weight;
    const int comes_later = fp8lm_trainer_stage(trainer) == 3;
    if (trainer->sharded && !comes_later) TRY(fp8zero_sharded_weight(trainer->sharded, i, &weight));
    (void)list_add(list, weight.dtype, parameter.dimensions, parameter.shape, weight.data, parameter.name, "");
    if (fp8core_dtype_size(weight.dtype) > 1) continue;
    if (!comes_later) TRY(fp8core_copy(trainer->context, &inverses[i], weight.scale_inverse, sizeof(float)));
    (void)list_add(list, FP8CORE_FP32, 1, &one, &inverses[i], parameter.name, "_scale_inv");
  }
  return FP8CORE_OK;
}

// Weights that are on several ranks come part by part, which all of them pass through; rank 0 writes.
static fp8core_status gather_weights(const fp8lm_trainer *trainer, fp8lm_safetensors_writer *file) {
  fp8core_status written = FP8CORE_OK;
  size_t at = 0;
  for (int part = 0; part < fp8zero_sharded_parts(trainer->sharded); part++) {
    int64_t first;
    int64_t count;
    TRY(fp8zero_sharded_part(trainer->sharded, part, &first, &count));
    TRY(fp8zero_sharded_acquire(trainer->sharded, part, FP8ZERO_FORWARD));
    for (int64_t i = first; i < first + count; i++) {
      fp8core_tensor weight;
      TRY(fp8zero_sharded_weight(trainer->sharded, i, &weight));
      const int scaled = fp8core_dtype_size(weight.dtype) == 1;
      if (file && written == FP8CORE_OK) written = fp8lm_safetensors_put(file, trainer->context, at, weight.data);
      if (file && written == FP8CORE_OK && scaled)
        written = fp8lm_safetensors_put(file, trainer->context, at + 1, weight.scale_inverse);
      at += scaled ? 2 : 1;
    }
    TRY(fp8zero_sharded_release(trainer->sharded, part, FP8ZERO_FORWARD));
  }
  return written;
}

static fp8core_status write_gathered(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                     const tensor_list *list, fp8lm_checkpoint_file *file) {
  const int writes = trainer->ranks->rank == 0;
  fp8lm_safetensors_writer whole;
  fp8lm_saved_file saved;
  if (!writes) return gather_weights(trainer, NULL);
  char path[PATH_MAX];
  fp8core_status status = fp8lm_join_path(path, writer->temporary_path, FP8LM_CHECKPOINT_MODEL);
  if (status == FP8CORE_OK) status = fp8lm_safetensors_begin(&whole, path, list->tensors, list->count, metadata);
  char reason[400];
  (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  // The others go through the parts in any case.
  const fp8core_status gathered = gather_weights(trainer, status == FP8CORE_OK ? &whole : NULL);
  if (status != FP8CORE_OK && gathered == FP8CORE_OK) (void)fp8core_set_last_error(status, "%s", reason);
  status = fp8lm_safetensors_end(&whole, gathered != FP8CORE_OK ? gathered : status, &saved);
  if (status == FP8CORE_OK) *file = entry_of(FP8LM_CHECKPOINT_MODEL, &saved);
  return in_file(FP8LM_CHECKPOINT_MODEL, status);
}

static fp8core_status write_model(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                  fp8lm_checkpoint_index *index) {
  tensor_list list = {NULL, NULL, 0};
  fp8lm_checkpoint_file file = {.bytes = 0};
  float *inverses = calloc((size_t)trainer->parameter_count, sizeof(*inverses));
  fp8core_status status = inverses ? list_weights(trainer, &list, inverses) : out_of_memory("the scales of weights");
  status = fp8lm_ranks_agree(trainer->ranks, status);
  if (status == FP8CORE_OK && fp8lm_trainer_stage(trainer) == 3)
    status = write_gathered(trainer, writer, &list, &file);
  else if (status == FP8CORE_OK && trainer->ranks->rank == 0)
    status = write_list(writer, FP8LM_CHECKPOINT_MODEL, trainer->context, &list, &file);
  if (status == FP8CORE_OK && trainer->ranks->rank == 0) status = fp8lm_checkpoint_index_add(index, &file);
  list_free(&list);
  free(inverses);
  return status;
}

// What is kept of a parameter beside its states, in host memory.
typedef struct parameter_scales {
  float scales[PARTS];
  float amaxes[STATES];
} parameter_scales;

static fp8core_status list_states(const fp8lm_trainer *trainer, tensor_list *list, parameter_scales *kept) {
  static const int64_t scale_count = PARTS;
  static const int64_t amax_count = STATES;
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    const int64_t local = fp8lm_trainer_local(trainer, i);
    if (local < 0) continue;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    for (int part = 0; part < PARTS; part++) {
      fp8core_tensor state;
      float amax;
      char suffix[32];
      TRY(fp8optim_adamw_get_stored(trainer->adamw, local, parts[part], &kept[i].scales[part], &amax));
      if (part == STATES) continue;
      kept[i].amaxes[part] = amax;
      TRY(fp8optim_adamw_state(trainer->adamw, local, parts[part], &state));
      (void)snprintf(suffix, sizeof(suffix), ".%s", fp8optim_state_name(parts[part]));
      (void)list_add(list, state.dtype, parameter.dimensions, parameter.shape, state.data, parameter.name, suffix);
    }
    (void)list_add(list, FP8CORE_FP32, 1, &scale_count, kept[i].scales, parameter.name, ".scales");
    (void)list_add(list, FP8CORE_FP32, 1, &amax_count, kept[i].amaxes, parameter.name, ".amaxes");
  }
  return FP8CORE_OK;
}

static void list_bytes(tensor_list *list, const char *name, const void *data, size_t bytes) {
  const int64_t count = (int64_t)bytes;
  list_add(list, FP8CORE_E4M3, 1, &count, data, name, "")->dtype = "U8";
}

// What is the same on every rank, and in rank 0's file.
static fp8core_status list_rest(const fp8lm_trainer *trainer, tensor_list *list, unsigned char *scaling_bytes,
                                unsigned char *reducer_bytes) {
  const int64_t losses = trainer->loss_count;
  fp8core_scaling *scaling = fp8gpt_model_scaling(trainer->model);
  const fp8comm_gradient_reducer *reducer = fp8zero_sharded_reducer(trainer->sharded);
  (void)list_add(list, FP8CORE_FP32, 1, &losses, trainer->losses, "trainer.losses", "");
  if (scaling) {
    TRY(fp8core_scaling_save(scaling, scaling_bytes, fp8core_scaling_saved_bytes(scaling)));
    list_bytes(list, "model.scaling", scaling_bytes, fp8core_scaling_saved_bytes(scaling));
  }
  if (!reducer) return FP8CORE_OK;
  TRY(fp8comm_gradient_save(reducer, reducer_bytes, fp8comm_gradient_saved_bytes(reducer)));
  list_bytes(list, REDUCER, reducer_bytes, fp8comm_gradient_saved_bytes(reducer));
  return FP8CORE_OK;
}

// How many files the states are divided into: one a rank, or rank 0's alone.
static int state_files(const fp8lm_trainer *trainer) {
  return fp8lm_trainer_stage(trainer) > 0 ? trainer->ranks->size : 1;
}

// This rank's file of states; no name where it has none.
static fp8core_status write_state(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                  fp8lm_checkpoint_file *file) {
  tensor_list list = {NULL, NULL, 0};
  char name[FP8LM_CHECKPOINT_NAME_BYTES];
  const size_t count = (size_t)trainer->parameter_count;
  memset(file, 0, sizeof(*file));
  if (trainer->ranks->rank >= state_files(trainer)) return FP8CORE_OK;
  fp8lm_checkpoint_state_name(name, trainer->ranks->rank, state_files(trainer));
  parameter_scales *kept = calloc(count, sizeof(*kept));
  unsigned char *scaling = malloc(fp8core_scaling_saved_bytes(fp8gpt_model_scaling(trainer->model)) + 1);
  unsigned char *reducer = malloc(fp8comm_gradient_saved_bytes(fp8zero_sharded_reducer(trainer->sharded)) + 1);
  fp8core_status status =
    kept && scaling && reducer ? list_create(&list, (STATES + 2) * count + 3) : out_of_memory("the scales of states");
  if (status == FP8CORE_OK) status = list_states(trainer, &list, kept);
  if (status == FP8CORE_OK && trainer->ranks->rank == 0) status = list_rest(trainer, &list, scaling, reducer);
  if (status == FP8CORE_OK) status = write_list(writer, name, trainer->context, &list, file);
  list_free(&list);
  free(reducer);
  free(scaling);
  free(kept);
  return status;
}

// Rank 0 learns of all files of states.
static fp8core_status collect_states(const fp8lm_trainer *trainer, const fp8lm_checkpoint_file *own,
                                     fp8lm_checkpoint_index *index) {
  const int ranks = trainer->ranks->size;
  if (ranks == 1) return fp8lm_checkpoint_index_add(index, own);
  const int64_t sent[2] = {own->name[0] ? (int64_t)own->bytes : -1, (int64_t)own->crc32};
  int64_t *all = calloc((size_t)ranks, sizeof(sent));
  fp8core_status status = fp8lm_ranks_agree(trainer->ranks, all ? FP8CORE_OK : out_of_memory("the list of files"));
  if (status == FP8CORE_OK) status = fp8comm_all_gather(trainer->ranks->communicator, sent, all, 2, FP8COMM_INT64);
  for (int rank = 0; rank < ranks && status == FP8CORE_OK && trainer->ranks->rank == 0; rank++) {
    fp8lm_checkpoint_file file = {.bytes = (uint64_t)all[2 * rank], .crc32 = (uint32_t)all[2 * rank + 1]};
    if (all[2 * rank] < 0) continue;
    fp8lm_checkpoint_state_name(file.name, rank, state_files(trainer));
    status = fp8lm_checkpoint_index_add(index, &file);
  }
  free(all);
  return status;
}

static fp8core_status write_texts(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                  fp8lm_checkpoint_index *index) {
  if (!trainer->vocab) return FP8CORE_OK;
  TRY(write_text(writer, FP8LM_CHECKPOINT_VOCAB, trainer->vocab, trainer->vocab_bytes, index));
  return write_text(writer, FP8LM_CHECKPOINT_MERGES, trainer->merges, trainer->merges_bytes, index);
}

static fp8core_status write_files(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                  fp8lm_checkpoint_index *index) {
  fp8lm_checkpoint_file file;
  TRY(fp8lm_ranks_agree(trainer->ranks, write_model(trainer, writer, index)));
  TRY(fp8lm_ranks_agree(trainer->ranks, write_state(trainer, writer, &file)));
  TRY(fp8lm_ranks_agree(trainer->ranks, collect_states(trainer, &file, index)));
  return fp8lm_ranks_agree(trainer->ranks,
                           trainer->ranks->rank == 0 ? write_texts(trainer, writer, index) : FP8CORE_OK);
}

static fp8core_status write_checkpoint(const fp8lm_trainer *trainer, fp8lm_checkpoint_writer *writer) {
  fp8lm_checkpoint_index index;
  memset(&index, 0, sizeof(index));
  index.step = trainer->step;
  index.optimizer_steps = fp8optim_adamw_steps(trainer->adamw);
  index.skipped_steps = trainer->skipped_steps;
  index.skipped_in_a_row = trainer->skipped_in_a_row;
  fp8core_status status = write_files(trainer, writer, &index);
  index.settings = *trainer->settings;
  if (status == FP8CORE_OK && trainer->ranks->rank == 0) status = fp8lm_checkpoint_commit(writer, &index);
  index.settings = fp8lm_train_settings_none();
  fp8lm_checkpoint_index_free(&index);
  return status;
}

fp8core_status fp8lm_trainer_save(fp8lm_trainer *trainer, const char *folder, int64_t keep) {
  fp8lm_checkpoint_writer writer;
  const int leads = trainer->ranks->rank == 0;
  memset(&writer, 0, sizeof(writer));
  TRY(fp8lm_ranks_agree(trainer->ranks, leads ? fp8lm_checkpoint_begin(&writer, folder, trainer->step) : FP8CORE_OK));
  TRY(fp8lm_ranks_broadcast(trainer->ranks, writer.temporary_path, sizeof(writer.temporary_path)));
  fp8core_status status = write_checkpoint(trainer, &writer);
  if (leads && status != FP8CORE_OK) fp8lm_checkpoint_abandon(&writer);
  if (leads && status == FP8CORE_OK) status = fp8lm_checkpoint_prune(folder, keep);
  return fp8lm_ranks_agree(trainer->ranks, status);
}

// Reading.

typedef struct opened {
  fp8lm_input input;
  fp8lm_tensor_file file;
  // By name.
  const fp8lm_tensor **sorted;
  size_t used;
  const char *name;
} opened;

static int compare_tensors(const void *left, const void *right) {
  return strcmp((*(const fp8lm_tensor *const *)left)->name, (*(const fp8lm_tensor *const *)right)->name);
}

static int compare_with_name(const void *name, const void *tensor) {
  return strcmp(name, (*(const fp8lm_tensor *const *)tensor)->name);
}

static void close_file(opened *from) {
  fp8lm_tensor_file_free(&from->file);
  fp8lm_input_close(&from->input);
  free(from->sorted);
}

static fp8core_status open_file(opened *from, const char *folder, const char *name) {
  char path[PATH_MAX];
  memset(from, 0, sizeof(*from));
  from->name = name;
  from->input.descriptor = -1;
  TRY(fp8lm_join_path(path, folder, name));
  TRY(fp8lm_input_open(&from->input, path));
  fp8core_status status = fp8lm_safetensors_describe(&from->input, &from->file);
  if (status == FP8CORE_OK) {
    from->sorted = calloc(from->file.tensor_count + 1, sizeof(*from->sorted));
    if (!from->sorted) status = out_of_memory("the list of tensors");
  }
  if (status != FP8CORE_OK) {
    close_file(from);
    return status;
  }
  for (size_t i = 0; i < from->file.tensor_count; i++) from->sorted[i] = &from->file.tensors[i];
  if (from->file.tensor_count > 0) qsort(from->sorted, from->file.tensor_count, sizeof(*from->sorted), compare_tensors);
  return status;
}

// The tensor of this name, which must have this dtype and shape. NULL stands for any dtype, a negative size for any.
static fp8core_status find_tensor(opened *from, const char *name, const char *dtype, int dimensions,
                                  const int64_t *shape, const fp8lm_tensor **found) {
  const fp8lm_tensor **entry = from->file.tensor_count > 0 ? bsearch(name, from->sorted, from->file.tensor_count,
                                                                     sizeof(*from->sorted), compare_with_name)
                                                           : NULL;
  if (!entry) return corrupt("the tensor \"%s\" is missing", name);
  const fp8lm_tensor *tensor = *entry;
  if (dtype && strcmp(tensor->dtype_name, dtype) != 0)
    return corrupt("the tensor \"%s\" is %s, expected %s", name, tensor->dtype_name, dtype);
  int same = tensor->dimensions == (size_t)dimensions;
  for (int i = 0; same && i < dimensions; i++) same = shape[i] < 0 || tensor->shape[i] == (uint64_t)shape[i];
  if (!same)
    return corrupt(
      "the tensor \"%s\" has another shape than the model's, which has %d dimension%s, the first of %" PRId64, name,
      dimensions, dimensions == 1 ? "" : "s", shape[0]);
  from->used++;
  *found = tensor;
  return FP8CORE_OK;
}

static fp8core_status read_small(opened *from, const char *parameter, const char *suffix, int64_t count,
                                 float *values) {
  char name[NAME_BYTES];
  const fp8lm_tensor *tensor;
  (void)snprintf(name, sizeof(name), "%s%s", parameter, suffix);
  TRY(find_tensor(from, name, "F32", 1, &count, &tensor));
  return fp8lm_input_read(&from->input, tensor->offset, values, (size_t)count * sizeof(*values));
}

static fp8core_status check_scale_inverse(const char *parameter, float inverse) {
  if (inverse >= FP8CORE_SCALE_MIN && inverse <= FP8CORE_SCALE_MAX) return FP8CORE_OK;
  return corrupt("\"%s_scale_inv\" is %g, expected a number in [2^-126, 2^126]", parameter, (double)inverse);
}

static fp8core_status check_all_used(const opened *from) {
  if (from->used == from->file.tensor_count) return FP8CORE_OK;
  return corrupt("it has %zu tensors, expected %zu", from->file.tensor_count, from->used);
}

// Reads all data of a tensor into memory that grows.
typedef struct block {
  void *bytes;
  size_t room;
} block;

static fp8core_status read_whole(const opened *from, const fp8lm_tensor *tensor, block *into) {
  if (tensor->bytes > into->room) {
    free(into->bytes);
    into->room = 0;
    into->bytes = malloc((size_t)tensor->bytes);
    if (!into->bytes) return out_of_memory("a tensor");
    into->room = (size_t)tensor->bytes;
  }
  return fp8lm_input_read(&from->input, tensor->offset, into->bytes, (size_t)tensor->bytes);
}

// Weights that show every size of the model, in its last layer, and then the number of all elements.
static fp8core_status check_weights(const fp8gpt_config *config, opened *weights) {
  const int64_t head = config->hidden / config->heads;
  const struct {
    const char *name;
    int in_layer;
    int dimensions;
    int64_t shape[2];
  } some[] = {
    {"embedding.token.weight", 0, 2, {config->vocabulary, config->hidden}},
    {"attention.qkv.weight", 1, 2, {(config->heads + 2 * (int64_t)config->kv_heads) * head, config->hidden}},
    {"ffn.fc2.weight", 1, 2, {config->hidden, config->ffn_hidden}},
    {"final_norm.weight", 0, 1, {config->hidden, 1}},
  };
  for (size_t i = 0; i < sizeof(some) / sizeof(*some); i++) {
    char name[NAME_BYTES];
    const fp8lm_tensor *tensor;
    if (some[i].in_layer)
      (void)snprintf(name, sizeof(name), "layers.%d.%s", config->layers - 1, some[i].name);
    else
      (void)snprintf(name, sizeof(name), "%s", some[i].name);
    TRY(find_tensor(weights, name, NULL, some[i].dimensions, some[i].shape, &tensor));
  }
  static const char inverse[] = "_scale_inv";
  uint64_t elements = 0;
  for (size_t i = 0; i < weights->file.tensor_count; i++) {
    const fp8lm_tensor *tensor = &weights->file.tensors[i];
    const size_t length = strlen(tensor->name);
    if (length < strlen(inverse) || strcmp(tensor->name + length - strlen(inverse), inverse) != 0)
      elements += tensor->elements;
  }
  const int64_t expected = fp8gpt_config_parameters(config);
  if (expected < 0 || elements != (uint64_t)expected)
    return corrupt("its tensors have %" PRIu64 " elements, but the model of the options has %" PRId64, elements,
                   expected);
  return FP8CORE_OK;
}

fp8core_status fp8lm_check_weights(const fp8gpt_config *config, const char *path) {
  opened weights;
  TRY(in_file(FP8LM_CHECKPOINT_MODEL, open_file(&weights, path, FP8LM_CHECKPOINT_MODEL)));
  const fp8core_status status = in_file(FP8LM_CHECKPOINT_MODEL, check_weights(config, &weights));
  close_file(&weights);
  return status;
}

// The stored reciprocal is what other readers of the model go by.
static fp8core_status check_inverse(opened *weights, const char *parameter, float scale) {
  float inverse;
  TRY(read_small(weights, parameter, "_scale_inv", 1, &inverse));
  TRY(check_scale_inverse(parameter, inverse));
  // A device's division may round the other way.
  const float expected = 1.0f / scale;
  if (inverse != expected && inverse != nextafterf(expected, 0.0f) && inverse != nextafterf(expected, INFINITY))
    return corrupt("\"%s_scale_inv\" is %g, expected %g, as the scale of the weight is %g", parameter, (double)inverse,
                   (double)expected, (double)scale);
  return FP8CORE_OK;
}

static int has_tensor(const opened *from, const char *parameter, const char *suffix) {
  char name[NAME_BYTES];
  (void)snprintf(name, sizeof(name), "%s%s", parameter, suffix);
  return from->file.tensor_count > 0 &&
         bsearch(name, from->sorted, from->file.tensor_count, sizeof(*from->sorted), compare_with_name) != NULL;
}

// States, and weights beside them, of one parameter of this rank's.
static fp8core_status load_parameter(fp8lm_trainer *trainer, const fp8gpt_parameter *parameter, int64_t local,
                                     opened *states, opened *weights, block *into) {
  parameter_scales kept;
  TRY(in_file(states->name, read_small(states, parameter->name, ".scales", PARTS, kept.scales)));
  TRY(in_file(states->name, read_small(states, parameter->name, ".amaxes", STATES, kept.amaxes)));
  for (int part = 0; part < PARTS; part++) {
    const int is_weight = parts[part] == FP8OPTIM_WEIGHT;
    opened *from = is_weight ? weights : states;
    char name[NAME_BYTES];
    fp8core_tensor state;
    const fp8lm_tensor *tensor;
    TRY(fp8optim_adamw_state(trainer->adamw, local, parts[part], &state));
    (void)snprintf(name, sizeof(name), "%s%s%s", parameter->name, is_weight ? "" : ".",
                   is_weight ? "" : fp8optim_state_name(parts[part]));
    fp8core_status status =
      find_tensor(from, name, fp8lm_safetensors_dtype(state.dtype), parameter->dimensions, parameter->shape, &tensor);
    if (status == FP8CORE_OK) status = read_whole(from, tensor, into);
    if (status == FP8CORE_OK)
      status = fp8optim_adamw_set_stored(trainer->adamw, local, parts[part], into->bytes, kept.scales[part],
                                         is_weight ? 0.0f : kept.amaxes[part]);
    TRY(in_file(from->name, status));
    if (is_weight && fp8core_dtype_size(state.dtype) == 1)
      TRY(in_file(from->name, check_inverse(from, parameter->name, kept.scales[part])));
  }
  return FP8CORE_OK;
}

// The parameters that a file of states has; `seen` has a flag for each and learns which they were. What other ranks own
// is theirs to read.
static fp8core_status load_states(fp8lm_trainer *trainer, opened *states, opened *weights, unsigned char *seen,
                                  block *into) {
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    if (!has_tensor(states, parameter.name, ".scales")) continue;
    if (seen[i]) return in_file(states->name, corrupt("the states of \"%s\" are in another file too", parameter.name));
    seen[i] = 1;
    const int64_t local = fp8lm_trainer_local(trainer, i);
    if (local >= 0) {
      TRY(load_parameter(trainer, &parameter, local, states, weights, into));
      continue;
    }
    states->used += STATES + 2;
    weights->used += fp8core_dtype_size(parameter.weight.dtype) == 1 ? 2 : 1;
  }
  return FP8CORE_OK;
}

// What is the same on every rank.
static fp8core_status load_rest(fp8lm_trainer *trainer, opened *states, block *into) {
  static const int64_t any = -1;
  const fp8lm_tensor *tensor;
  TRY(find_tensor(states, "trainer.losses", "F32", 1, &any, &tensor));
  if (tensor->elements > FP8LM_TRAINER_LOSSES)
    return corrupt("\"trainer.losses\" has %" PRIu64 " elements, expected at most %d", tensor->elements,
                   FP8LM_TRAINER_LOSSES);
  trainer->loss_count = (int)tensor->elements;
  TRY(fp8lm_input_read(&states->input, tensor->offset, trainer->losses, (size_t)tensor->bytes));
  for (int i = 0; i < trainer->loss_count; i++)
    if (!isfinite(trainer->losses[i]))
      return corrupt("element %d of \"trainer.losses\" is %g, expected a finite number", i, (double)trainer->losses[i]);
  fp8core_scaling *scaling = fp8gpt_model_scaling(trainer->model);
  if (scaling) {
    TRY(find_tensor(states, "model.scaling", "U8", 1, &any, &tensor));
    TRY(read_whole(states, tensor, into));
    TRY(fp8core_scaling_load(scaling, into->bytes, (size_t)tensor->bytes));
  }
  // A run of one rank has none; it needs none either.
  if (!has_tensor(states, REDUCER, "")) return FP8CORE_OK;
  TRY(find_tensor(states, REDUCER, "U8", 1, &any, &tensor));
  fp8comm_gradient_reducer *reducer = fp8zero_sharded_reducer(trainer->sharded);
  if (!reducer) return FP8CORE_OK;
  TRY(read_whole(states, tensor, into));
  return fp8comm_gradient_load(reducer, into->bytes, (size_t)tensor->bytes);
}

static fp8core_status load_state_file(fp8lm_trainer *trainer, const char *path, const char *name, int first,
                                      opened *weights, unsigned char *seen, block *into) {
  opened states;
  TRY(in_file(name, open_file(&states, path, name)));
  fp8core_status status = load_states(trainer, &states, weights, seen, into);
  if (status == FP8CORE_OK && first) status = in_file(name, load_rest(trainer, &states, into));
  if (status == FP8CORE_OK) status = in_file(name, check_all_used(&states));
  close_file(&states);
  return status;
}

static fp8core_status check_all_seen(const fp8lm_trainer *trainer, const unsigned char *seen) {
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    if (seen[i]) continue;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    return corrupt("the states of \"%s\" are missing", parameter.name);
  }
  return FP8CORE_OK;
}

static fp8core_status load_files(fp8lm_trainer *trainer, const char *path, const fp8lm_checkpoint_index *index) {
  opened weights;
  block into = {NULL, 0};
  int first = 1;
  unsigned char *seen = calloc((size_t)trainer->parameter_count, 1);
  if (!seen) return out_of_memory("the list of parameters");
  fp8core_status status = in_file(FP8LM_CHECKPOINT_MODEL, open_file(&weights, path, FP8LM_CHECKPOINT_MODEL));
  if (status == FP8CORE_OK) {
    for (int i = 0; i < index->file_count && status == FP8CORE_OK; i++) {
      if (!fp8lm_checkpoint_is_state(index->files[i].name)) continue;
      status = load_state_file(trainer, path, index->files[i].name, first, &weights, seen, &into);
      first = 0;
    }
    if (status == FP8CORE_OK) status = check_all_seen(trainer, seen);
    if (status == FP8CORE_OK) status = in_file(weights.name, check_all_used(&weights));
    close_file(&weights);
  }
  free(into.bytes);
  free(seen);
  return status;
}

// All read one checkpoint, which rank 0 verifies, not others under the same path.
static fp8core_status compare_indices(const fp8lm_trainer *trainer, const fp8lm_checkpoint_index *index) {
  const int64_t steps[] = {index->step, index->optimizer_steps, index->skipped_steps, index->skipped_in_a_row};
  uint32_t crc = fp8lm_crc32(0, steps, sizeof(steps));
  for (int i = 0; i < index->file_count; i++) {
    const uint64_t file[] = {index->files[i].bytes, index->files[i].crc32};
    crc = fp8lm_crc32(crc, file, sizeof(file));
  }
  return fp8lm_ranks_compare(trainer->ranks, &crc, sizeof(crc), "files of this checkpoint");
}

fp8core_status fp8lm_trainer_load(fp8lm_trainer *trainer, const char *path) {
  fp8lm_checkpoint_index index;
  fp8core_status status = fp8lm_checkpoint_open(path, &index);
  // Reading everything once is enough.
  if (status == FP8CORE_OK && trainer->ranks->rank == 0) status = fp8lm_checkpoint_verify(path, &index);
  status = fp8lm_ranks_agree(trainer->ranks, status);
  if (status == FP8CORE_OK) status = compare_indices(trainer, &index);
  if (status == FP8CORE_OK) status = fp8lm_ranks_agree(trainer->ranks, load_files(trainer, path, &index));
  if (status == FP8CORE_OK) status = fp8optim_adamw_set_steps(trainer->adamw, index.optimizer_steps);
  if (status == FP8CORE_OK && trainer->sharded) status = fp8zero_sharded_publish(trainer->sharded);
  if (status == FP8CORE_OK) {
    trainer->step = index.step;
    trainer->skipped_steps = index.skipped_steps;
    trainer->skipped_in_a_row = index.skipped_in_a_row;
  }
  fp8lm_checkpoint_index_free(&index);
  return status;
}

static fp8core_status load_weight(fp8core_context *context, fp8gpt_model *model, int64_t index, opened *weights,
                                  block *into, float *scales) {
  fp8gpt_parameter parameter;
  const fp8lm_tensor *tensor;
  // The scale and its reciprocal.
  float scale[2] = {1.0f, 1.0f};
  TRY(fp8gpt_model_parameter(model, index, &parameter));
  TRY(find_tensor(weights, parameter.name, fp8lm_safetensors_dtype(parameter.weight.dtype), parameter.dimensions,
                  parameter.shape, &tensor));
  TRY(read_whole(weights, tensor, into));
  if (fp8core_dtype_size(parameter.weight.dtype) == 1) {
    TRY(read_small(weights, parameter.name, "_scale_inv", 1, &scale[1]));
    TRY(check_scale_inverse(parameter.name, scale[1]));
    scale[0] = 1.0f / scale[1];
  }
  TRY(fp8core_copy(context, parameter.weight.data, into->bytes, (size_t)tensor->bytes));
  TRY(fp8core_copy(context, scales, scale, sizeof(scale)));
  parameter.weight.scale = &scales[0];
  parameter.weight.scale_inverse = &scales[1];
  return fp8gpt_model_bind_weight(model, index, &parameter.weight);
}

fp8core_status fp8lm_load_weights(fp8core_context *context, fp8gpt_model *model, const char *path, float *scales) {
  opened weights;
  block into = {NULL, 0};
  TRY(in_file(FP8LM_CHECKPOINT_MODEL, open_file(&weights, path, FP8LM_CHECKPOINT_MODEL)));
  fp8core_status status = FP8CORE_OK;
  for (int64_t i = 0; i < fp8gpt_model_parameters(model) && status == FP8CORE_OK; i++)
    status = load_weight(context, model, i, &weights, &into, scales + 2 * i);
  if (status == FP8CORE_OK) status = check_all_used(&weights);
  free(into.bytes);
  close_file(&weights);
  return in_file(FP8LM_CHECKPOINT_MODEL, status);
}
