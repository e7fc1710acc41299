#include "fp8optim/adamw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define ALIGNMENT 256
#define MAX_NAME_BYTES 255

static const char *const preset_names[] = {"fp32", "bf16", "fp8", "fp8-bf16-master", "fp8-master", "fp8-exp-avg-sq"};
static const char *const state_names[FP8OPTIM_PARTS] = {"master", "exp_avg", "exp_avg_sq", "weight"};

const char *fp8optim_preset_name(fp8optim_preset preset) {
  const unsigned index = (unsigned)preset;
  return index < sizeof(preset_names) / sizeof(*preset_names) ? preset_names[index] : "unknown";
}

const char *fp8optim_state_name(fp8optim_state state) {
  const unsigned index = (unsigned)state;
  return index < FP8OPTIM_PARTS ? state_names[index] : "unknown";
}

int64_t fp8optim_elements(const fp8optim_parameter *parameter) {
  int64_t elements = 1;
  for (int i = 0; i < parameter->dimensions; i++) elements *= parameter->shape[i];
  return elements;
}

int64_t fp8optim_row_length(const fp8optim_parameter *parameter) {
  return parameter->dimensions == 0 ? 1 : parameter->shape[parameter->dimensions - 1];
}

static fp8core_status check_dtype(const char *what, fp8core_dtype dtype) {
  if ((unsigned)dtype < FP8CORE_DTYPE_COUNT) return FP8CORE_OK;
  return fp8optim_invalid("%s is %d, expected an fp8core_dtype, 0 to %d", what, (int)dtype, FP8CORE_DTYPE_COUNT - 1);
}

static fp8core_status check_group(int index, const fp8optim_group *group) {
  if (!(isfinite(group->learning_rate) && group->learning_rate >= 0.0))
    return fp8optim_invalid("learning_rate of group %d is %g, expected a finite number of at least 0", index,
                            group->learning_rate);
  if (!(group->beta1 >= 0.0 && group->beta1 < 1.0))
    return fp8optim_invalid("beta1 of group %d is %g, expected a number in [0, 1)", index, group->beta1);
  if (!(group->beta2 >= 0.0 && group->beta2 < 1.0))
    return fp8optim_invalid("beta2 of group %d is %g, expected a number in [0, 1)", index, group->beta2);
  if (!(isfinite(group->eps) && group->eps >= 1e-37))
    return fp8optim_invalid("eps of group %d is %g, expected a finite number of at least 1e-37", index, group->eps);
  if (!(isfinite(group->weight_decay) && group->weight_decay >= 0.0))
    return fp8optim_invalid("weight_decay of group %d is %g, expected a finite number of at least 0", index,
                            group->weight_decay);
  return FP8CORE_OK;
}

static int compare_names(const void *one, const void *other) {
  return strcmp(*(const char *const *)one, *(const char *const *)other);
}

static fp8core_status check_names(int64_t count, const fp8optim_parameter *parameters) {
  const char **names = malloc((size_t)count * sizeof(*names));
  if (!names)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory",
                                  (size_t)count * sizeof(*names));
  for (int64_t i = 0; i < count; i++) names[i] = parameters[i].name;
  qsort(names, (size_t)count, sizeof(*names), compare_names);
  const char *twice = NULL;
  for (int64_t i = 1; i < count && !twice; i++)
    if (strcmp(names[i - 1], names[i]) == 0) twice = names[i];
  free(names);
  return twice ? fp8optim_invalid("two parameters are called \"%s\", expected unique names", twice) : FP8CORE_OK;
}

static fp8core_status check_parameter(int64_t index, const fp8optim_parameter *parameter, int group_count,
                                      int on_cuda) {
  if (!parameter->name)
    return fp8optim_invalid("the name of parameter %lld is NULL, expected a string", (long long)index);
  const size_t length = strlen(parameter->name);
  if (length == 0 || length > MAX_NAME_BYTES)
    return fp8optim_invalid("the name of parameter %lld has %zu bytes, expected 1 to %d", (long long)index, length,
                            MAX_NAME_BYTES);
  if (parameter->dimensions < 0 || parameter->dimensions > FP8CORE_MAX_DIMENSIONS)
    return fp8optim_invalid("parameter \"%s\" has %d dimensions, expected 0 to %d", parameter->name,
                            parameter->dimensions, FP8CORE_MAX_DIMENSIONS);
  int64_t elements = 1;
  for (int i = 0; i < parameter->dimensions; i++) {
    const int64_t size = parameter->shape[i];
    if (size < 0)
      return fp8optim_invalid("shape[%d] of parameter \"%s\" is %lld, expected at least 0", i, parameter->name,
                              (long long)size);
    if (size != 0 && elements > INT64_MAX / 16 / size)
      return fp8optim_invalid("parameter \"%s\" has more than 2^59 elements", parameter->name);
    elements *= size;
  }
  if (parameter->group < 0 || parameter->group >= group_count)
    return fp8optim_invalid("group of parameter \"%s\" is %d, expected 0 to %d", parameter->name, parameter->group,
                            group_count - 1);
  if (parameter->with_weight) FP8OPTIM_TRY(check_dtype("weight_dtype", parameter->weight_dtype));
  if (parameter->weight && !parameter->with_weight)
    return fp8optim_invalid("parameter \"%s\" has weight memory at %p, but with_weight is 0", parameter->name,
                            parameter->weight);
  const void *const given[] = {parameter->master, parameter->exp_avg, parameter->exp_avg_sq, parameter->weight};
  for (int part = 0; part < FP8OPTIM_PARTS; part++)
    if (on_cuda && (uintptr_t)given[part] % 16 != 0)
      return fp8optim_invalid("%s of parameter \"%s\" is at %p, expected 16-byte alignment on CUDA", state_names[part],
                              parameter->name, given[part]);
  return FP8CORE_OK;
}

static fp8core_status check_context(const fp8optim_adamw *adamw, const char *call) {
  if (adamw) return FP8CORE_OK;
  return fp8optim_invalid("adamw of %s() is NULL, expected an optimizer", call);
}

static fp8core_status check_index(const fp8optim_adamw *adamw, int64_t index) {
  if (index >= 0 && index < adamw->tensor_count) return FP8CORE_OK;
  return fp8optim_invalid("index is %lld, expected 0 to %lld", (long long)index, (long long)adamw->tensor_count - 1);
}

static int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static fp8core_dtype part_dtype(const fp8optim_adamw *adamw, const fp8optim_parameter *parameter, int part) {
  switch (part) {
  case FP8OPTIM_MASTER: return adamw->options.master_dtype;
  case FP8OPTIM_EXP_AVG: return adamw->options.exp_avg_dtype;
  case FP8OPTIM_EXP_AVG_SQ: return adamw->options.exp_avg_sq_dtype;
  default: return parameter->weight_dtype;
  }
}

static void *given_part(const fp8optim_parameter *parameter, int part) {
  switch (part) {
  case FP8OPTIM_MASTER: return parameter->master;
  case FP8OPTIM_EXP_AVG: return parameter->exp_avg;
  case FP8OPTIM_EXP_AVG_SQ: return parameter->exp_avg_sq;
  default: return parameter->weight;
  }
}

// Bytes of a part that the optimizer allocates.
static int64_t own_bytes(const fp8optim_adamw *adamw, const fp8optim_parameter *parameter, int part) {
  if (given_part(parameter, part) || (part == FP8OPTIM_WEIGHT && !parameter->with_weight)) return 0;
  return fp8optim_elements(parameter) * (int64_t)fp8core_dtype_size(part_dtype(adamw, parameter, part));
}

// Places the tables one after the other from `memory` on; returns their bytes. With NULL only counts.
static int64_t place_tables(const fp8optim_adamw *adamw, unsigned char *memory, fp8optim_tables *tables) {
  int64_t offset = 0;
#define PLACE(field, count)                                                                                            \
  tables->field = memory ? (void *)(memory + offset) : NULL;                                                           \
  offset += aligned((int64_t)(count) * (int64_t)sizeof(*tables->field))
  PLACE(tensors, adamw->tensor_count);
  PLACE(gradients, adamw->tensor_count);
  PLACE(groups, adamw->group_count);
  PLACE(group_steps, adamw->group_count);
  PLACE(constants, adamw->tensor_count);
  PLACE(chunks, adamw->chunk_count);
  PLACE(results, adamw->chunk_count);
  PLACE(progress, 1);
  PLACE(shares, adamw->tensor_count);
  PLACE(survey, 1);
#undef PLACE
  return offset;
}

static fp8core_status out_of_memory(int64_t bytes) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %lld bytes of host memory",
                                (long long)bytes);
}

static fp8core_status copy_parameters(fp8optim_adamw *adamw, const fp8optim_parameter *parameters) {
  size_t name_bytes = 0;
  for (int64_t i = 0; i < adamw->tensor_count; i++) name_bytes += strlen(parameters[i].name) + 1;
  adamw->parameters = malloc((size_t)adamw->tensor_count * sizeof(*parameters));
  adamw->gradients = calloc((size_t)adamw->tensor_count, sizeof(*adamw->gradients));
  adamw->updated = calloc((size_t)adamw->tensor_count, sizeof(*adamw->updated));
  adamw->names = malloc(name_bytes);
  adamw->state_offsets = calloc((size_t)adamw->tensor_count, sizeof(*adamw->state_offsets));
  if (!adamw->parameters || !adamw->gradients || !adamw->updated || !adamw->names || !adamw->state_offsets)
    return out_of_memory((int64_t)name_bytes);
  memcpy(adamw->parameters, parameters, (size_t)adamw->tensor_count * sizeof(*parameters));
  char *name = adamw->names;
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    const size_t bytes = strlen(parameters[i].name) + 1;
    memcpy(name, parameters[i].name, bytes);
    adamw->parameters[i].name = name;
    name += bytes;
    // Not looked at without a weight; a format that needs no scale.
    if (!parameters[i].with_weight) adamw->parameters[i].weight_dtype = FP8CORE_FP32;
  }
  return FP8CORE_OK;
}

static void fill_chunks(const fp8optim_adamw *adamw, fp8optim_tensor *tensors, fp8optim_chunk *chunks) {
  int64_t next = 0;
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    tensors[i].first_chunk = next;
    for (int64_t first = 0; first < tensors[i].elements; first += FP8OPTIM_CHUNK, next++) {
      const int64_t rest = tensors[i].elements - first;
      chunks[next].tensor = i;
      chunks[next].first = first;
      chunks[next].elements = rest < FP8OPTIM_CHUNK ? rest : FP8OPTIM_CHUNK;
    }
    tensors[i].chunks = next - tensors[i].first_chunk;
  }
}

// Fills the tables, in host memory and then on the device.
static fp8core_status fill_tables(fp8optim_adamw *adamw) {
  fp8optim_tables host;
  unsigned char *image = calloc(1, (size_t)adamw->table_bytes);
  if (!image) return out_of_memory(adamw->table_bytes);
  (void)place_tables(adamw, image, &host);
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    int64_t offset = adamw->state_offsets[i];
    const fp8optim_parameter *parameter = &adamw->parameters[i];
    fp8optim_tensor *tensor = &host.tensors[i];
    tensor->elements = fp8optim_elements(parameter);
    tensor->row_length = fp8optim_row_length(parameter);
    tensor->group = parameter->group;
    tensor->stream = (uint32_t)i;
    for (int part = 0; part < FP8OPTIM_PARTS; part++) {
      const int64_t bytes = own_bytes(adamw, parameter, part);
      tensor->dtype[part] = part_dtype(adamw, parameter, part);
      tensor->scale[part] = 1.0f;
      tensor->scale_inverse[part] = 1.0f;
      tensor->data[part] = given_part(parameter, part);
      if (bytes > 0) tensor->data[part] = (unsigned char *)adamw->state_memory + offset;
      offset += aligned(bytes);
    }
  }
  fill_chunks(adamw, host.tensors, host.chunks);
  const fp8core_status status = fp8core_copy(adamw->context, adamw->table_memory, image, (size_t)adamw->table_bytes);
  free(image);
  return status;
}

// The amaxes of states that the caller brought.
static fp8core_status survey_given_states(fp8optim_adamw *adamw) {
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    for (int state = 0; state < FP8OPTIM_STATES; state++) {
      const fp8optim_parameter *parameter = &adamw->parameters[i];
      void *data = given_part(parameter, state);
      if (!data || fp8optim_elements(parameter) == 0) continue;
      const fp8optim_gradient source = {data, part_dtype(adamw, parameter, state), fp8optim_row_length(parameter),
                                        NULL};
      fp8optim_survey found;
      FP8OPTIM_TRY(adamw->backend->survey(adamw, &source, fp8optim_elements(parameter) / fp8optim_row_length(parameter),
                                          fp8optim_row_length(parameter), &found));
      FP8OPTIM_TRY(fp8optim_check_survey(parameter, (fp8optim_state)state, &found));
      const float amax = fp8core_bits_float(found.largest);
      FP8OPTIM_TRY(fp8core_copy(adamw->context, &adamw->tables.tensors[i].amax[state], &amax, sizeof(amax)));
      if (state != FP8OPTIM_MASTER && found.largest != 0) adamw->moments_set = 1;
    }
  }
  // Last, as nothing of the caller's may be written where creation fails.
  for (int64_t i = 0; i < adamw->tensor_count; i++)
    if (adamw->parameters[i].with_weight && adamw->parameters[i].master)
      FP8OPTIM_TRY(adamw->backend->make_weight(adamw, i, 1));
  return FP8CORE_OK;
}

fp8core_status fp8optim_check_survey(const fp8optim_parameter *parameter, fp8optim_state state,
                                     const fp8optim_survey *found) {
  if (found->largest >= FP8CORE_F32_INFINITY)
    return fp8optim_invalid("%s of parameter \"%s\" holds %s, expected finite values", state_names[state],
                            parameter->name, found->largest > FP8CORE_F32_INFINITY ? "a NaN" : "an infinity");
  if (state == FP8OPTIM_EXP_AVG_SQ && found->negative)
    return fp8optim_invalid("exp_avg_sq of parameter \"%s\" holds a negative value, expected none", parameter->name);
  return FP8CORE_OK;
}

static fp8core_status allocate(fp8optim_adamw *adamw) {
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    adamw->state_offsets[i] = adamw->state_bytes;
    adamw->chunk_count += (fp8optim_elements(&adamw->parameters[i]) + FP8OPTIM_CHUNK - 1) / FP8OPTIM_CHUNK;
    for (int part = 0; part < FP8OPTIM_PARTS; part++)
      if (__builtin_add_overflow(adamw->state_bytes, aligned(own_bytes(adamw, &adamw->parameters[i], part)),
                                 &adamw->state_bytes))
        return out_of_memory(INT64_MAX);
  }
  fp8optim_tables unused;
  adamw->table_bytes = place_tables(adamw, NULL, &unused);
  FP8OPTIM_TRY(fp8core_alloc(adamw->context, (size_t)adamw->state_bytes, &adamw->state_memory));
  if (adamw->state_memory) FP8OPTIM_TRY(fp8core_zero(adamw->context, adamw->state_memory, (size_t)adamw->state_bytes));
  FP8OPTIM_TRY(fp8core_alloc(adamw->context, (size_t)adamw->table_bytes, &adamw->table_memory));
  (void)place_tables(adamw, adamw->table_memory, &adamw->tables);
  return fill_tables(adamw);
}

// Memory of the caller's that is one part of a parameter.
typedef struct given_memory {
  uintptr_t first;
  uintptr_t end;
  const char *name;
  const char *part;
} given_memory;

static int compare_memory(const void *one, const void *other) {
  const uintptr_t a = ((const given_memory *)one)->first;
  const uintptr_t b = ((const given_memory *)other)->first;
  return (a > b) - (a < b);
}

// Parts are written at once and by many threads: no two may share a byte.
static fp8core_status check_distinct(const fp8optim_adamw *adamw) {
  int64_t count = 0;
  for (int64_t i = 0; i < adamw->tensor_count; i++)
    for (int part = 0; part < FP8OPTIM_PARTS; part++) count += given_part(&adamw->parameters[i], part) != NULL;
  if (count < 2) return FP8CORE_OK;
  given_memory *given = malloc((size_t)count * sizeof(*given));
  if (!given) return out_of_memory(count * (int64_t)sizeof(*given));
  count = 0;
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    const fp8optim_parameter *parameter = &adamw->parameters[i];
    for (int part = 0; part < FP8OPTIM_PARTS; part++) {
      const uintptr_t first = (uintptr_t)given_part(parameter, part);
      const uintptr_t bytes =
        (uintptr_t)fp8optim_elements(parameter) * fp8core_dtype_size(part_dtype(adamw, parameter, part));
      if (first == 0 || bytes == 0) continue;
      given[count++] = (given_memory){first, first + bytes, parameter->name, state_names[part]};
    }
  }
  qsort(given, (size_t)count, sizeof(*given), compare_memory);
  fp8core_status status = FP8CORE_OK;
  // Without an overlap before it, the neighbour is the one that reaches furthest.
  for (int64_t i = 1; i < count && status == FP8CORE_OK; i++)
    if (given[i].first < given[i - 1].end)
      status = fp8optim_invalid("%s of parameter \"%s\" at %p overlaps %s of parameter \"%s\" at %p, expected distinct "
                                "memory",
                                given[i].part, given[i].name, (void *)given[i].first, given[i - 1].part,
                                given[i - 1].name, (void *)given[i - 1].first);
  free(given);
  return status;
}

static fp8core_status create(fp8optim_adamw *adamw, const fp8optim_parameter *parameters,
                             const fp8optim_group *groups) {
  FP8OPTIM_TRY(copy_parameters(adamw, parameters));
  FP8OPTIM_TRY(check_distinct(adamw));
  adamw->groups = malloc((size_t)adamw->group_count * sizeof(*groups));
  if (!adamw->groups) return out_of_memory((int64_t)sizeof(*groups) * adamw->group_count);
  memcpy(adamw->groups, groups, (size_t)adamw->group_count * sizeof(*groups));
  if (fp8core_context_device(adamw->context).type == FP8CORE_DEVICE_CUDA)
    FP8OPTIM_TRY(fp8optim_cuda_init(adamw));
  else
    adamw->backend = &fp8optim_cpu_backend;
  FP8OPTIM_TRY(allocate(adamw));
  return survey_given_states(adamw);
}

fp8core_status fp8optim_adamw_create(fp8optim_adamw **adamw, fp8core_context *context,
                                     const fp8optim_adamw_options *options, int64_t parameter_count,
                                     const fp8optim_parameter *parameters, int group_count,
                                     const fp8optim_group *groups) {
  if (!adamw) return fp8optim_invalid("adamw of fp8optim_adamw_create() is NULL, expected where to put the handle");
  *adamw = NULL;
  if (!context) return fp8optim_invalid("context of fp8optim_adamw_create() is NULL, expected a context");
  // The options of another version may end before these.
  if (options && options->size != sizeof(*options))
    return fp8core_set_last_error(FP8CORE_ERROR_VERSION_MISMATCH, "fp8optim_adamw_options.size is %zu, expected %zu",
                                  options->size, sizeof(*options));
  const fp8optim_adamw_options chosen = options ? *options : fp8optim_adamw_options_default();
  FP8OPTIM_TRY(check_dtype("master_dtype", chosen.master_dtype));
  FP8OPTIM_TRY(check_dtype("exp_avg_dtype", chosen.exp_avg_dtype));
  FP8OPTIM_TRY(check_dtype("exp_avg_sq_dtype", chosen.exp_avg_sq_dtype));
  if (parameter_count < 1 || parameter_count > INT32_MAX)
    return fp8optim_invalid("parameter_count is %lld, expected 1 to 2^31 - 1", (long long)parameter_count);
  if (!parameters) return fp8optim_invalid("parameters is NULL, expected %lld", (long long)parameter_count);
  if (group_count < 1 || group_count > 65536)
    return fp8optim_invalid("group_count is %d, expected 1 to 65536", group_count);
  if (!groups) return fp8optim_invalid("groups is NULL, expected %d", group_count);
  for (int i = 0; i < group_count; i++) FP8OPTIM_TRY(check_group(i, &groups[i]));
  const int on_cuda = fp8core_context_device(context).type == FP8CORE_DEVICE_CUDA;
  for (int64_t i = 0; i < parameter_count; i++) FP8OPTIM_TRY(check_parameter(i, &parameters[i], group_count, on_cuda));
  FP8OPTIM_TRY(check_names(parameter_count, parameters));

  fp8optim_adamw *created = calloc(1, sizeof(*created));
  if (!created) return out_of_memory((int64_t)sizeof(*created));
  created->context = context;
  created->options = chosen;
  created->options.stochastic_rounding = chosen.stochastic_rounding != 0;
  created->tensor_count = parameter_count;
  created->group_count = group_count;
  const fp8core_status status = create(created, parameters, groups);
  if (status != FP8CORE_OK)
    fp8optim_adamw_destroy(&created);
  else
    *adamw = created;
  return status;
}

void fp8optim_adamw_destroy(fp8optim_adamw **adamw) {
  if (!adamw || !*adamw) return;
  fp8optim_adamw *destroyed = *adamw;
  *adamw = NULL;
  (void)fp8core_context_synchronize(destroyed->context);
  if (destroyed->backend_state) fp8optim_cuda_destroy(destroyed);
  (void)fp8core_free(destroyed->context, destroyed->table_memory);
  (void)fp8core_free(destroyed->context, destroyed->state_memory);
  free(destroyed->parameters);
  free(destroyed->names);
  free(destroyed->state_offsets);
  free(destroyed->gradients);
  free(destroyed->updated);
  free(destroyed->groups);
  free(destroyed);
}

fp8core_status fp8optim_adamw_state(const fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                    fp8core_tensor *tensor) {
  FP8OPTIM_TRY(check_context(adamw, "fp8optim_adamw_state"));
  FP8OPTIM_TRY(check_index(adamw, index));
  if ((unsigned)state >= FP8OPTIM_PARTS)
    return fp8optim_invalid("state is %d, expected 0 to %d", (int)state, FP8OPTIM_PARTS - 1);
  if (!tensor) return fp8optim_invalid("tensor of fp8optim_adamw_state() is NULL, expected where to put it");
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  if (state == FP8OPTIM_WEIGHT && !parameter->with_weight)
    return fp8optim_invalid("parameter \"%s\" was created with with_weight 0 and has no weight", parameter->name);
  int64_t offset = adamw->state_offsets[index];
  for (int part = 0; part < (int)state; part++) offset += aligned(own_bytes(adamw, parameter, part));
  void *data = given_part(parameter, (int)state);
  if (!data && fp8optim_elements(parameter) > 0) data = (unsigned char *)adamw->state_memory + offset;
  fp8optim_tensor *record = &adamw->tables.tensors[index];
  *tensor =
    fp8core_tensor_create(data, part_dtype(adamw, parameter, (int)state), parameter->dimensions, parameter->shape);
  tensor->device = fp8core_context_device(adamw->context);
  tensor->scale = &record->scale[state];
  tensor->scale_inverse = &record->scale_inverse[state];
  return FP8CORE_OK;
}

// A tensor of the caller's that is read element by element beside the parameter: its shape may differ where only the
// number of elements counts.
static fp8core_status check_source(const fp8optim_adamw *adamw, const char *what, int64_t index, int exact,
                                   const fp8core_tensor *source, fp8optim_gradient *view) {
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  const fp8core_device device = fp8core_context_device(adamw->context);
  if (!source) return fp8optim_invalid("%s of parameter \"%s\" is NULL, expected a tensor", what, parameter->name);
  if (fp8core_tensor_validate(source) != FP8CORE_OK) {
    char reason[256];
    strncpy(reason, fp8core_last_error(), sizeof(reason) - 1);
    reason[sizeof(reason) - 1] = '\0';
    return fp8optim_invalid("%s of parameter \"%s\": %s", what, parameter->name, reason);
  }
  int same = source->dimensions == parameter->dimensions;
  for (int i = 0; same && i < parameter->dimensions; i++) same = source->shape[i] == parameter->shape[i];
  if (exact && !same) {
    int differing = 0;
    while (differing < parameter->dimensions && differing < source->dimensions &&
           source->shape[differing] == parameter->shape[differing])
      differing++;
    if (source->dimensions != parameter->dimensions)
      return fp8optim_invalid("%s of parameter \"%s\" has %d dimensions, expected %d", what, parameter->name,
                              source->dimensions, parameter->dimensions);
    return fp8optim_invalid("shape[%d] of %s of parameter \"%s\" is %lld, expected %lld", differing, what,
                            parameter->name, (long long)source->shape[differing],
                            (long long)parameter->shape[differing]);
  }
  if (fp8core_tensor_elements(source) != fp8optim_elements(parameter))
    return fp8optim_invalid("%s of parameter \"%s\" has %lld elements, expected %lld", what, parameter->name,
                            (long long)fp8core_tensor_elements(source), (long long)fp8optim_elements(parameter));
  if (source->device.type != device.type || source->device.index != device.index)
    return fp8optim_invalid("%s of parameter \"%s\" is on device %d:%d, expected that of the optimizer, %d:%d", what,
                            parameter->name, (int)source->device.type, source->device.index, (int)device.type,
                            device.index);
  if ((uintptr_t)source->scale_inverse % sizeof(float) != 0)
    return fp8optim_invalid("scale_inverse of %s of parameter \"%s\" is at %p, expected 4-byte alignment", what,
                            parameter->name, (const void *)source->scale_inverse);
  const size_t size = fp8core_dtype_size(source->dtype);
  if (device.type == FP8CORE_DEVICE_CUDA && (uintptr_t)source->data % size != 0)
    return fp8optim_invalid("%s of parameter \"%s\" is at %p, expected %zu-byte alignment on CUDA", what,
                            parameter->name, source->data, size);
  const int64_t length = source->dimensions == 0 ? 1 : source->shape[source->dimensions - 1];
  view->data = source->data;
  view->dtype = source->dtype;
  view->row_stride = source->row_stride ? source->row_stride : length;
  // One row, or rows without a gap, whatever the shape: contiguous.
  if (length > 0 && (view->row_stride == length || fp8core_tensor_elements(source) == length))
    view->row_stride = fp8optim_row_length(parameter);
  else if (!same)
    return fp8optim_invalid(
      "%s of parameter \"%s\" has a row stride of %lld and another shape, expected one of the two", what,
      parameter->name, (long long)source->row_stride);
  view->scale_inverse = source->scale_inverse;
  return FP8CORE_OK;
}

static int overlap(const void *one, int64_t one_bytes, const void *other, int64_t other_bytes) {
  const uintptr_t a = (uintptr_t)one;
  const uintptr_t b = (uintptr_t)other;
  return one && other && a < b + (uintptr_t)other_bytes && b < a + (uintptr_t)one_bytes;
}

// A gradient is read while the parts of its parameter are written.
static fp8core_status check_gradient_apart(const fp8optim_adamw *adamw, int64_t index, const fp8core_tensor *gradient) {
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  const int64_t elements = fp8optim_elements(parameter);
  if (elements == 0) return FP8CORE_OK;
  const int64_t bytes = (int64_t)fp8core_tensor_span_bytes(gradient);
  if (overlap(gradient->data, bytes, adamw->state_memory, adamw->state_bytes))
    return fp8optim_invalid("the gradient of parameter \"%s\" at %p overlaps the optimizer's states, expected distinct "
                            "memory",
                            parameter->name, gradient->data);
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    const void *given = given_part(parameter, part);
    if (overlap(gradient->data, bytes, given,
                elements * (int64_t)fp8core_dtype_size(part_dtype(adamw, parameter, part))))
      return fp8optim_invalid("the gradient of parameter \"%s\" at %p overlaps its %s at %p, expected distinct memory",
                              parameter->name, gradient->data, state_names[part], given);
  }
  return FP8CORE_OK;
}

fp8core_status fp8optim_read_progress(const fp8optim_adamw *adamw, fp8optim_progress *progress) {
  return fp8core_copy(adamw->context, progress, adamw->tables.progress, sizeof(*progress));
}

fp8core_status fp8optim_adamw_set_state(fp8optim_adamw *adamw, int64_t index, fp8optim_state state,
                                        const fp8core_tensor *source) {
  FP8OPTIM_TRY(check_context(adamw, "fp8optim_adamw_set_state"));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_set_state"));
  FP8OPTIM_TRY(check_index(adamw, index));
  if ((unsigned)state >= FP8OPTIM_STATES)
    return fp8optim_invalid("state is %d, expected 0 to %d", (int)state, FP8OPTIM_STATES - 1);
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  fp8optim_gradient view;
  FP8OPTIM_TRY(check_source(adamw, "the source", index, 0, source, &view));
  const int64_t elements = fp8optim_elements(parameter);
  if (elements == 0) return FP8CORE_OK;
  fp8core_tensor stored;
  FP8OPTIM_TRY(fp8optim_adamw_state(adamw, index, state, &stored));
  if (overlap(source->data, (int64_t)fp8core_tensor_span_bytes(source), stored.data,
              (int64_t)fp8core_tensor_span_bytes(&stored)) &&
      !(source->data == stored.data && source->dtype == stored.dtype && !source->scale_inverse &&
        view.row_stride == fp8optim_row_length(parameter)))
    return fp8optim_invalid("the source of parameter \"%s\" at %p overlaps its %s at %p, expected distinct memory",
                            parameter->name, source->data, state_names[state], stored.data);
  fp8optim_survey found;
  FP8OPTIM_TRY(adamw->backend->survey(adamw, &view, elements / fp8optim_row_length(parameter),
                                      fp8optim_row_length(parameter), &found));
  FP8OPTIM_TRY(fp8optim_check_survey(parameter, state, &found));
  const float scale = fp8optim_scale_for(part_dtype(adamw, parameter, (int)state), state, found.largest);
  FP8OPTIM_TRY(adamw->backend->set_state(adamw, index, state, &view, scale, found.largest));
  if (state == FP8OPTIM_MASTER)
    return parameter->with_weight ? adamw->backend->make_weight(adamw, index, 1) : FP8CORE_OK;
  // Steps may have been skipped since the count was last looked at.
  fp8optim_progress progress;
  FP8OPTIM_TRY(fp8optim_read_progress(adamw, &progress));
  adamw->steps_known = progress.steps > 0;
  adamw->moments_set = 1;
  return FP8CORE_OK;
}

int64_t fp8optim_adamw_steps(const fp8optim_adamw *adamw) {
  fp8optim_progress progress;
  return adamw && fp8optim_read_progress(adamw, &progress) == FP8CORE_OK ? progress.steps : 0;
}

fp8core_status fp8optim_adamw_set_steps(fp8optim_adamw *adamw, int64_t steps) {
  FP8OPTIM_TRY(check_context(adamw, "fp8optim_adamw_set_steps"));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_set_steps"));
  if (steps < 0 || steps > FP8OPTIM_MAX_STEPS)
    return fp8optim_invalid("steps is %lld, expected 0 to 2^31 - 2", (long long)steps);
  FP8OPTIM_TRY(fp8core_copy(adamw->context, &adamw->tables.progress->steps, &steps, sizeof(steps)));
  adamw->steps_known = steps > 0;
  adamw->most_steps = steps;
  adamw->moments_set = 1;
  return FP8CORE_OK;
}

static fp8core_status check_group_index(const fp8optim_adamw *adamw, const char *call, int group) {
  FP8OPTIM_TRY(check_context(adamw, call));
  if (group < 0 || group >= adamw->group_count)
    return fp8optim_invalid("group is %d, expected 0 to %d", group, adamw->group_count - 1);
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_set_group(fp8optim_adamw *adamw, int group, const fp8optim_group *values) {
  FP8OPTIM_TRY(check_group_index(adamw, "fp8optim_adamw_set_group", group));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_set_group"));
  if (!values) return fp8optim_invalid("values of fp8optim_adamw_set_group() is NULL, expected hyper-parameters");
  FP8OPTIM_TRY(check_group(group, values));
  adamw->groups[group] = *values;
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_get_group(const fp8optim_adamw *adamw, int group, fp8optim_group *values) {
  FP8OPTIM_TRY(check_group_index(adamw, "fp8optim_adamw_get_group", group));
  if (!values) return fp8optim_invalid("values of fp8optim_adamw_get_group() is NULL, expected where to put them");
  *values = adamw->groups[group];
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_set_learning_rate(fp8optim_adamw *adamw, double learning_rate) {
  FP8OPTIM_TRY(check_context(adamw, "fp8optim_adamw_set_learning_rate"));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_set_learning_rate"));
  if (!(isfinite(learning_rate) && learning_rate >= 0.0))
    return fp8optim_invalid("learning_rate is %g, expected a finite number of at least 0", learning_rate);
  for (int i = 0; i < adamw->group_count; i++) adamw->groups[i].learning_rate = learning_rate;
  return FP8CORE_OK;
}

fp8core_status fp8optim_take_gradients(fp8optim_adamw *adamw, const fp8core_tensor *gradients) {
  if (!gradients) return fp8optim_invalid("gradients is NULL, expected %lld tensors", (long long)adamw->tensor_count);
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    FP8OPTIM_TRY(check_source(adamw, "the gradient", i, 1, &gradients[i], &adamw->gradients[i]));
    FP8OPTIM_TRY(check_gradient_apart(adamw, i, &gradients[i]));
  }
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_set_stream(fp8optim_adamw *adamw, int64_t index, int64_t stream) {
  FP8OPTIM_TRY(check_context(adamw, "fp8optim_adamw_set_stream"));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_set_stream"));
  FP8OPTIM_TRY(check_index(adamw, index));
  if (stream < 0 || stream > UINT32_MAX)
    return fp8optim_invalid("stream is %lld, expected 0 to 2^32 - 1", (long long)stream);
  const uint32_t value = (uint32_t)stream;
  return fp8core_copy(adamw->context, &adamw->tables.tensors[index].stream, &value, sizeof(value));
}

fp8core_status fp8optim_adamw_memory(const fp8optim_adamw *adamw, fp8optim_memory *memory) {
  FP8OPTIM_TRY(check_context(adamw, "fp8optim_adamw_memory"));
  if (!memory) return fp8optim_invalid("memory of fp8optim_adamw_memory() is NULL, expected where to put it");
  memset(memory, 0, sizeof(*memory));
  int64_t own = 0;
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    const fp8optim_parameter *parameter = &adamw->parameters[i];
    const int64_t elements = fp8optim_elements(parameter);
    memory->parameters += elements;
    memory->master_bytes += elements * (int64_t)fp8core_dtype_size(adamw->options.master_dtype);
    memory->exp_avg_bytes += elements * (int64_t)fp8core_dtype_size(adamw->options.exp_avg_dtype);
    memory->exp_avg_sq_bytes += elements * (int64_t)fp8core_dtype_size(adamw->options.exp_avg_sq_dtype);
    if (parameter->with_weight) memory->weight_bytes += elements * (int64_t)fp8core_dtype_size(parameter->weight_dtype);
    for (int part = 0; part < FP8OPTIM_PARTS; part++) own += own_bytes(adamw, parameter, part);
  }
  // Padding between states too.
  memory->overhead_bytes = adamw->table_bytes + adamw->state_bytes - own;
  return FP8CORE_OK;
}
