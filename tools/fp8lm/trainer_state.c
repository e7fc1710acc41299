// Trainers to and from checkpoints. model.safetensors has what the model computes with, state.safetensors the rest.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "input.h"
#include "tensor_file.h"
#include "trainer.h"

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

#define STATES 3
#define PARTS 4
#define NAME_BYTES 320

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

static fp8core_status write_list(const fp8lm_checkpoint_writer *writer, const char *name, fp8core_context *context,
                                 const tensor_list *list, fp8lm_checkpoint_index *index) {
  static const char *const metadata[] = {"format", "fp8lm", NULL};
  char path[PATH_MAX];
  fp8lm_saved_file saved;
  TRY(fp8lm_join_path(path, writer->temporary_path, name));
  TRY(in_file(name, fp8lm_safetensors_write(path, context, list->tensors, list->count, metadata, &saved)));
  const fp8lm_checkpoint_file file = {name, saved.bytes, saved.crc32};
  index->files[index->file_count++] = file;
  return FP8CORE_OK;
}

static fp8core_status write_text(const fp8lm_checkpoint_writer *writer, const char *name, const char *text,
                                 size_t bytes, fp8lm_checkpoint_index *index) {
  char path[PATH_MAX];
  fp8lm_saved_file saved;
  TRY(fp8lm_join_path(path, writer->temporary_path, name));
  TRY(in_file(name, fp8lm_write_file(path, text, bytes, &saved)));
  const fp8lm_checkpoint_file file = {name, saved.bytes, saved.crc32};
  index->files[index->file_count++] = file;
  return FP8CORE_OK;
}

static const int64_t one = 1;

// Weights; those with a scale are followed by its reciprocal, by which a stored element is multiplied.
static fp8core_status write_model(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                  fp8lm_checkpoint_index *index) {
  tensor_list list = {NULL, NULL, 0};
  const size_t count = (size_t)trainer->parameter_count;
  float *inverses = calloc(count, sizeof(*inverses));
  fp8core_status status = inverses ? list_create(&list, 2 * count) : out_of_memory("the scales of weights");
  for (int64_t i = 0; i < trainer->parameter_count && status == FP8CORE_OK; i++) {
    fp8gpt_parameter parameter;
    status = fp8gpt_model_parameter(trainer->model, i, &parameter);
    if (status != FP8CORE_OK) break;
    (void)list_add(&list, parameter.weight.dtype, parameter.dimensions, parameter.shape, parameter.weight.data,
                   parameter.name, "");
    if (fp8core_dtype_size(parameter.weight.dtype) > 1) continue;
    status = fp8core_copy(trainer->context, &inverses[i], parameter.weight.scale_inverse, sizeof(float));
    (void)list_add(&list, FP8CORE_FP32, 1, &one, &inverses[i], parameter.name, "_scale_inv");
  }
  if (status == FP8CORE_OK) status = write_list(writer, FP8LM_CHECKPOINT_MODEL, trainer->context, &list, index);
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
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    for (int part = 0; part < PARTS; part++) {
      fp8core_tensor state;
      float amax;
      char suffix[32];
      TRY(fp8optim_adamw_get_stored(trainer->adamw, i, parts[part], &kept[i].scales[part], &amax));
      if (part == STATES) continue;
      kept[i].amaxes[part] = amax;
      TRY(fp8optim_adamw_state(trainer->adamw, i, parts[part], &state));
      (void)snprintf(suffix, sizeof(suffix), ".%s", fp8optim_state_name(parts[part]));
      (void)list_add(list, state.dtype, parameter.dimensions, parameter.shape, state.data, parameter.name, suffix);
    }
    (void)list_add(list, FP8CORE_FP32, 1, &scale_count, kept[i].scales, parameter.name, ".scales");
    (void)list_add(list, FP8CORE_FP32, 1, &amax_count, kept[i].amaxes, parameter.name, ".amaxes");
  }
  return FP8CORE_OK;
}

static fp8core_status write_state(const fp8lm_trainer *trainer, const fp8lm_checkpoint_writer *writer,
                                  fp8lm_checkpoint_index *index) {
  tensor_list list = {NULL, NULL, 0};
  const size_t count = (size_t)trainer->parameter_count;
  fp8core_scaling *scaling = fp8gpt_model_scaling(trainer->model);
  const int64_t scaling_bytes = (int64_t)fp8core_scaling_saved_bytes(scaling);
  const int64_t losses = trainer->loss_count;
  parameter_scales *kept = calloc(count, sizeof(*kept));
  unsigned char *saved_scaling = malloc((size_t)scaling_bytes + 1);
  fp8core_status status =
    kept && saved_scaling ? list_create(&list, (STATES + 2) * count + 2) : out_of_memory("the scales of states");
  if (status == FP8CORE_OK) {
    status = list_states(trainer, &list, kept);
    (void)list_add(&list, FP8CORE_FP32, 1, &losses, trainer->losses, "trainer.losses", "");
    if (status == FP8CORE_OK && scaling) {
      status = fp8core_scaling_save(scaling, saved_scaling, (size_t)scaling_bytes);
      list_add(&list, FP8CORE_E4M3, 1, &scaling_bytes, saved_scaling, "model.scaling", "")->dtype = "U8";
    }
    if (status == FP8CORE_OK) status = write_list(writer, FP8LM_CHECKPOINT_STATE, trainer->context, &list, index);
  }
  list_free(&list);
  free(saved_scaling);
  free(kept);
  return status;
}

static fp8core_status write_checkpoint(const fp8lm_trainer *trainer, fp8lm_checkpoint_writer *writer) {
  fp8lm_checkpoint_index index;
  memset(&index, 0, sizeof(index));
  index.step = trainer->step;
  index.optimizer_steps = fp8optim_adamw_steps(trainer->adamw);
  index.skipped_steps = trainer->skipped_steps;
  index.skipped_in_a_row = trainer->skipped_in_a_row;
  index.settings = *trainer->settings;
  TRY(write_model(trainer, writer, &index));
  TRY(write_state(trainer, writer, &index));
  if (trainer->vocab) {
    TRY(write_text(writer, FP8LM_CHECKPOINT_VOCAB, trainer->vocab, trainer->vocab_bytes, &index));
    TRY(write_text(writer, FP8LM_CHECKPOINT_MERGES, trainer->merges, trainer->merges_bytes, &index));
  }
  return fp8lm_checkpoint_commit(writer, &index);
}

fp8core_status fp8lm_trainer_save(fp8lm_trainer *trainer, const char *folder, int64_t keep) {
  fp8lm_checkpoint_writer writer;
  TRY(fp8lm_checkpoint_begin(&writer, folder, trainer->step));
  const fp8core_status status = write_checkpoint(trainer, &writer);
  if (status != FP8CORE_OK) {
    fp8lm_checkpoint_abandon(&writer);
    return status;
  }
  return fp8lm_checkpoint_prune(folder, keep);
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

static fp8core_status load_states(fp8lm_trainer *trainer, opened *states, opened *weights, block *into) {
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    parameter_scales kept;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    TRY(in_file(states->name, read_small(states, parameter.name, ".scales", PARTS, kept.scales)));
    TRY(in_file(states->name, read_small(states, parameter.name, ".amaxes", STATES, kept.amaxes)));
    for (int part = 0; part < PARTS; part++) {
      const int is_weight = parts[part] == FP8OPTIM_WEIGHT;
      opened *from = is_weight ? weights : states;
      char name[NAME_BYTES];
      fp8core_tensor state;
      const fp8lm_tensor *tensor;
      TRY(fp8optim_adamw_state(trainer->adamw, i, parts[part], &state));
      (void)snprintf(name, sizeof(name), "%s%s%s", parameter.name, is_weight ? "" : ".",
                     is_weight ? "" : fp8optim_state_name(parts[part]));
      fp8core_status status =
        find_tensor(from, name, fp8lm_safetensors_dtype(state.dtype), parameter.dimensions, parameter.shape, &tensor);
      if (status == FP8CORE_OK) status = read_whole(from, tensor, into);
      if (status == FP8CORE_OK)
        status = fp8optim_adamw_set_stored(trainer->adamw, i, parts[part], into->bytes, kept.scales[part],
                                           is_weight ? 0.0f : kept.amaxes[part]);
      TRY(in_file(from->name, status));
      if (is_weight && fp8core_dtype_size(state.dtype) == 1)
        TRY(in_file(from->name, check_inverse(from, parameter.name, kept.scales[part])));
    }
  }
  return FP8CORE_OK;
}

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
  if (!scaling) return FP8CORE_OK;
  TRY(find_tensor(states, "model.scaling", "U8", 1, &any, &tensor));
  TRY(read_whole(states, tensor, into));
  return fp8core_scaling_load(scaling, into->bytes, (size_t)tensor->bytes);
}

static fp8core_status load_files(fp8lm_trainer *trainer, const char *path) {
  opened states;
  opened weights;
  block into = {NULL, 0};
  TRY(in_file(FP8LM_CHECKPOINT_STATE, open_file(&states, path, FP8LM_CHECKPOINT_STATE)));
  fp8core_status status = in_file(FP8LM_CHECKPOINT_MODEL, open_file(&weights, path, FP8LM_CHECKPOINT_MODEL));
  if (status == FP8CORE_OK) {
    status = load_states(trainer, &states, &weights, &into);
    if (status == FP8CORE_OK) status = in_file(states.name, load_rest(trainer, &states, &into));
    if (status == FP8CORE_OK) status = in_file(states.name, check_all_used(&states));
    if (status == FP8CORE_OK) status = in_file(weights.name, check_all_used(&weights));
    close_file(&weights);
  }
  free(into.bytes);
  close_file(&states);
  return status;
}

fp8core_status fp8lm_trainer_load(fp8lm_trainer *trainer, const char *path) {
  fp8lm_checkpoint_index index;
  TRY(fp8lm_checkpoint_open(path, &index));
  fp8core_status status = fp8lm_checkpoint_verify(path, &index);
  if (status == FP8CORE_OK) status = load_files(trainer, path);
  if (status == FP8CORE_OK) status = fp8optim_adamw_set_steps(trainer->adamw, index.optimizer_steps);
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
