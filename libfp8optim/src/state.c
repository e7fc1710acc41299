// Saved states. All integers little-endian:
//
//   8 bytes  "FP8OPTIM"
//   u32      version of this format
//   u32      master dtype, exp_avg dtype, exp_avg_sq dtype, stochastic rounding (four fields)
//   u64      seed
//   i64      tensors, steps, skipped steps
//   per tensor: u32 bytes of the name, the name; u32 dimensions, i64 a dimension; u32 dtype of the weight (fp32 without
//               one), to which its scale belongs; f32 scale of each of the four parts, f32 amax of each of the three
//               states; the bytes of master, exp_avg, exp_avg_sq
//   u32      CRC-32 of all before
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "internal.h"

#define MAGIC "FP8OPTIM"
#define MAGIC_BYTES 8
#define FORMAT_VERSION 1
#define HEADER_BYTES (MAGIC_BYTES + 5 * 4 + 8 + 3 * 8)
#define CHECKSUM_BYTES 4

static size_t record_bytes(const fp8optim_adamw *adamw, int64_t index) {
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  return 4 + strlen(parameter->name) + 4 + 8 * (size_t)parameter->dimensions + 4 +
         sizeof(float) * (FP8OPTIM_PARTS + FP8OPTIM_STATES);
}

static size_t data_bytes(const fp8optim_adamw *adamw, int64_t index) {
  const size_t element = fp8core_dtype_size(adamw->options.master_dtype) +
                         fp8core_dtype_size(adamw->options.exp_avg_dtype) +
                         fp8core_dtype_size(adamw->options.exp_avg_sq_dtype);
  return (size_t)fp8optim_elements(&adamw->parameters[index]) * element;
}

size_t fp8optim_adamw_saved_bytes(const fp8optim_adamw *adamw) {
  if (!adamw) return 0;
  size_t bytes = HEADER_BYTES + CHECKSUM_BYTES;
  for (int64_t i = 0; i < adamw->tensor_count; i++) bytes += record_bytes(adamw, i) + data_bytes(adamw, i);
  return bytes;
}

// Writing and reading at a place that moves on. Bounds are the caller's: the sizes are known before.
typedef struct cursor {
  unsigned char *at;
} cursor;

static void put(cursor *out, const void *bytes, size_t count) {
  memcpy(out->at, bytes, count);
  out->at += count;
}

static void put_u32(cursor *out, uint32_t value) {
  for (int i = 0; i < 4; i++) *out->at++ = (unsigned char)(value >> 8 * i);
}

static void put_u64(cursor *out, uint64_t value) {
  for (int i = 0; i < 8; i++) *out->at++ = (unsigned char)(value >> 8 * i);
}

typedef struct reader {
  const unsigned char *at;
} reader;

static uint32_t get_u32(reader *in) {
  uint32_t value = 0;
  for (int i = 0; i < 4; i++) value |= (uint32_t)*in->at++ << 8 * i;
  return value;
}

static uint64_t get_u64(reader *in) {
  uint64_t value = 0;
  for (int i = 0; i < 8; i++) value |= (uint64_t)*in->at++ << 8 * i;
  return value;
}

static float get_float(reader *in) { return fp8core_bits_float(get_u32(in)); }

static uint32_t checksum(const unsigned char *bytes, size_t count) { return (uint32_t)crc32_z(0, bytes, count); }

fp8core_status fp8optim_copy_tensors(const fp8optim_adamw *adamw, fp8optim_tensor **tensors) {
  const size_t bytes = (size_t)adamw->tensor_count * sizeof(**tensors);
  *tensors = malloc(bytes);
  if (!*tensors)
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %zu bytes of host memory", bytes);
  const fp8core_status status = fp8core_copy(adamw->context, *tensors, adamw->tables.tensors, bytes);
  if (status != FP8CORE_OK) free(*tensors);
  return status;
}

static fp8core_status write_states(const fp8optim_adamw *adamw, const fp8optim_tensor *tensors, cursor *out) {
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    const fp8optim_parameter *parameter = &adamw->parameters[i];
    const size_t name_bytes = strlen(parameter->name);
    put_u32(out, (uint32_t)name_bytes);
    put(out, parameter->name, name_bytes);
    put_u32(out, (uint32_t)parameter->dimensions);
    for (int j = 0; j < parameter->dimensions; j++) put_u64(out, (uint64_t)parameter->shape[j]);
    put_u32(out, (uint32_t)parameter->weight_dtype);
    for (int part = 0; part < FP8OPTIM_PARTS; part++) put_u32(out, fp8core_float_bits(tensors[i].scale[part]));
    for (int state = 0; state < FP8OPTIM_STATES; state++) put_u32(out, fp8core_float_bits(tensors[i].amax[state]));
    for (int state = 0; state < FP8OPTIM_STATES; state++) {
      const size_t bytes = (size_t)tensors[i].elements * fp8core_dtype_size(tensors[i].dtype[state]);
      if (bytes > 0) FP8OPTIM_TRY(fp8core_copy(adamw->context, out->at, tensors[i].data[state], bytes));
      out->at += bytes;
    }
  }
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_save(const fp8optim_adamw *adamw, void *buffer, size_t bytes) {
  if (!adamw) return fp8optim_invalid("adamw of fp8optim_adamw_save() is NULL, expected an optimizer");
  FP8OPTIM_TRY(fp8optim_check_not_begun(adamw, "fp8optim_adamw_save"));
  if (!buffer) return fp8optim_invalid("buffer of fp8optim_adamw_save() is NULL, expected host memory");
  const size_t expected = fp8optim_adamw_saved_bytes(adamw);
  if (bytes != expected)
    return fp8optim_invalid("bytes is %zu, expected the %zu of fp8optim_adamw_saved_bytes()", bytes, expected);
  fp8optim_progress progress;
  fp8optim_tensor *tensors;
  FP8OPTIM_TRY(fp8core_copy(adamw->context, &progress, adamw->tables.progress, sizeof(progress)));
  FP8OPTIM_TRY(fp8optim_copy_tensors(adamw, &tensors));
  cursor out = {buffer};
  put(&out, MAGIC, MAGIC_BYTES);
  put_u32(&out, FORMAT_VERSION);
  put_u32(&out, (uint32_t)adamw->options.master_dtype);
  put_u32(&out, (uint32_t)adamw->options.exp_avg_dtype);
  put_u32(&out, (uint32_t)adamw->options.exp_avg_sq_dtype);
  put_u32(&out, (uint32_t)adamw->options.stochastic_rounding);
  put_u64(&out, adamw->options.seed);
  put_u64(&out, (uint64_t)adamw->tensor_count);
  put_u64(&out, (uint64_t)progress.steps);
  put_u64(&out, (uint64_t)progress.skipped_steps);
  const fp8core_status status = write_states(adamw, tensors, &out);
  free(tensors);
  if (status == FP8CORE_OK) put_u32(&out, checksum(buffer, bytes - CHECKSUM_BYTES));
  return status;
}

#define corrupt(...) fp8core_set_last_error(FP8CORE_ERROR_CORRUPT_DATA, __VA_ARGS__)

static fp8core_status check_option(const char *what, uint64_t saved, uint64_t own) {
  if (saved == own) return FP8CORE_OK;
  return fp8optim_invalid("the saved %s is %llu, expected the optimizer's, %llu", what, (unsigned long long)saved,
                          (unsigned long long)own);
}

static fp8core_status check_saved_dtype(const char *what, uint32_t saved, fp8core_dtype own) {
  if (saved >= FP8CORE_DTYPE_COUNT) return corrupt("the saved %s is %u, expected 0 to 4", what, saved);
  if (saved == (uint32_t)own) return FP8CORE_OK;
  return fp8optim_invalid("the saved %s is %s, expected the optimizer's, %s", what,
                          fp8core_dtype_name((fp8core_dtype)saved), fp8core_dtype_name(own));
}

static int valid_scale(float scale) { return scale >= FP8CORE_SCALE_MIN && scale <= FP8CORE_SCALE_MAX; }
static int valid_amax(float amax) { return amax >= 0.0f && fp8core_float_bits(amax) < FP8CORE_F32_INFINITY; }

// Checks one tensor's record and reads it; `in` is left at its data.
static fp8core_status read_record(const fp8optim_adamw *adamw, int64_t index, reader *in, const unsigned char *end,
                                  fp8optim_tensor *tensor) {
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  const size_t name_bytes = strlen(parameter->name);
  // Of a state that fits this optimizer, every record has the size of the parameter's.
  if ((size_t)(end - in->at) < 4) return corrupt("the state ends within tensor %lld", (long long)index);
  const uint32_t saved_name_bytes = get_u32(in);
  if (saved_name_bytes > 255 || (size_t)(end - in->at) < saved_name_bytes)
    return corrupt("the name of saved tensor %lld has %u bytes, expected 1 to 255", (long long)index, saved_name_bytes);
  if (saved_name_bytes != name_bytes || memcmp(in->at, parameter->name, name_bytes) != 0)
    return fp8optim_invalid("saved tensor %lld is called \"%.*s\", expected \"%s\"", (long long)index,
                            (int)saved_name_bytes, (const char *)in->at, parameter->name);
  in->at += name_bytes;
  if ((size_t)(end - in->at) < record_bytes(adamw, index) - 4 - name_bytes)
    return corrupt("the state ends within tensor \"%s\"", parameter->name);
  const uint32_t dimensions = get_u32(in);
  if (dimensions != (uint32_t)parameter->dimensions)
    return fp8optim_invalid("saved tensor \"%s\" has %u dimensions, expected %d", parameter->name, dimensions,
                            parameter->dimensions);
  for (int j = 0; j < parameter->dimensions; j++) {
    const int64_t size = (int64_t)get_u64(in);
    if (size != parameter->shape[j])
      return fp8optim_invalid("shape[%d] of saved tensor \"%s\" is %lld, expected %lld", j, parameter->name,
                              (long long)size, (long long)parameter->shape[j]);
  }
  const uint32_t weight_dtype = get_u32(in);
  if (weight_dtype >= FP8CORE_DTYPE_COUNT)
    return corrupt("the weight dtype of saved tensor \"%s\" is %u, expected 0 to %d", parameter->name, weight_dtype,
                   FP8CORE_DTYPE_COUNT - 1);
  for (int part = 0; part < FP8OPTIM_PARTS; part++) {
    tensor->scale[part] = get_float(in);
    if (!valid_scale(tensor->scale[part]))
      return corrupt("the %s scale of saved tensor \"%s\" is %g, expected a number in [2^-126, 2^126]",
                     fp8optim_state_name((fp8optim_state)part), parameter->name, (double)tensor->scale[part]);
    tensor->scale_inverse[part] = 1.0f / tensor->scale[part];
  }
  for (int state = 0; state < FP8OPTIM_STATES; state++) {
    tensor->amax[state] = get_float(in);
    if (!valid_amax(tensor->amax[state]))
      return corrupt("the %s amax of saved tensor \"%s\" is %g, expected a finite number of at least 0",
                     fp8optim_state_name((fp8optim_state)state), parameter->name, (double)tensor->amax[state]);
  }
  // A weight of another format gets a scale for its own.
  if (weight_dtype != (uint32_t)parameter->weight_dtype) {
    tensor->scale[FP8OPTIM_WEIGHT] = 0.0f;
    fp8optim_weight_scale_rule(tensor);
  }
  if ((size_t)(end - in->at) < data_bytes(adamw, index))
    return corrupt("the state ends within the data of tensor \"%s\"", parameter->name);
  return FP8CORE_OK;
}

// Checks everything before anything is changed; fills the scales and amaxes of `tensors`.
static fp8core_status check_saved(const fp8optim_adamw *adamw, const unsigned char *buffer, size_t bytes,
                                  fp8optim_tensor *tensors, fp8optim_progress *progress) {
  if (bytes < HEADER_BYTES + CHECKSUM_BYTES)
    return corrupt("the state has %zu bytes, expected at least %d", bytes, HEADER_BYTES + CHECKSUM_BYTES);
  if (memcmp(buffer, MAGIC, MAGIC_BYTES) != 0) return corrupt("the state does not begin with \"" MAGIC "\"");
  reader in = {buffer + MAGIC_BYTES};
  const uint32_t version = get_u32(&in);
  if (version != FORMAT_VERSION) return corrupt("the state has version %u, expected %d", version, FORMAT_VERSION);
  reader tail = {buffer + bytes - CHECKSUM_BYTES};
  const uint32_t saved = get_u32(&tail);
  const uint32_t computed = checksum(buffer, bytes - CHECKSUM_BYTES);
  if (saved != computed) return corrupt("the state's checksum is %08x, expected %08x", saved, computed);
  FP8OPTIM_TRY(check_saved_dtype("master_dtype", get_u32(&in), adamw->options.master_dtype));
  FP8OPTIM_TRY(check_saved_dtype("exp_avg_dtype", get_u32(&in), adamw->options.exp_avg_dtype));
  FP8OPTIM_TRY(check_saved_dtype("exp_avg_sq_dtype", get_u32(&in), adamw->options.exp_avg_sq_dtype));
  FP8OPTIM_TRY(check_option("stochastic_rounding", get_u32(&in), (uint64_t)adamw->options.stochastic_rounding));
  FP8OPTIM_TRY(check_option("seed", get_u64(&in), adamw->options.seed));
  FP8OPTIM_TRY(check_option("number of tensors", get_u64(&in), (uint64_t)adamw->tensor_count));
  progress->steps = (int64_t)get_u64(&in);
  progress->skipped_steps = (int64_t)get_u64(&in);
  if (progress->steps < 0 || progress->steps > INT32_MAX - 1 || progress->skipped_steps < 0)
    return corrupt("the saved steps are %lld and %lld skipped, expected 0 to 2^31 - 2", (long long)progress->steps,
                   (long long)progress->skipped_steps);
  const unsigned char *end = buffer + bytes - CHECKSUM_BYTES;
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    FP8OPTIM_TRY(read_record(adamw, i, &in, end, &tensors[i]));
    in.at += data_bytes(adamw, i);
  }
  if (in.at != end)
    return corrupt("the state has %zu bytes after the last tensor, expected none", (size_t)(end - in.at));
  return FP8CORE_OK;
}

static fp8core_status restore(fp8optim_adamw *adamw, const unsigned char *buffer, const fp8optim_tensor *tensors,
                              const fp8optim_progress *progress) {
  const unsigned char *at = buffer + HEADER_BYTES;
  FP8OPTIM_TRY(
    fp8core_copy(adamw->context, adamw->tables.tensors, tensors, (size_t)adamw->tensor_count * sizeof(*tensors)));
  FP8OPTIM_TRY(fp8core_copy(adamw->context, adamw->tables.progress, progress, sizeof(*progress)));
  for (int64_t i = 0; i < adamw->tensor_count; i++) {
    at += record_bytes(adamw, i);
    for (int state = 0; state < FP8OPTIM_STATES; state++) {
      const size_t bytes = (size_t)tensors[i].elements * fp8core_dtype_size(tensors[i].dtype[state]);
      if (bytes > 0) FP8OPTIM_TRY(fp8core_copy(adamw->context, tensors[i].data[state], at, bytes));
      at += bytes;
    }
    if (adamw->parameters[i].with_weight) FP8OPTIM_TRY(adamw->backend->make_weight(adamw, i, 0));
  }
  adamw->steps_known = progress->steps > 0;
  adamw->most_steps = progress->steps;
  // Moments that were saved before their count was set want it before a step, as they did.
  adamw->moments_set = adamw->steps_known || fp8optim_has_moments(tensors, adamw->tensor_count);
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_load(fp8optim_adamw *adamw, const void *buffer, size_t bytes) {
  if (!adamw) return fp8optim_invalid("adamw of fp8optim_adamw_load() is NULL, expected an optimizer");
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_load"));
  if (!buffer) return fp8optim_invalid("buffer of fp8optim_adamw_load() is NULL, expected host memory");
  fp8optim_tensor *tensors;
  fp8optim_progress progress;
  memset(&progress, 0, sizeof(progress));
  FP8OPTIM_TRY(fp8optim_copy_tensors(adamw, &tensors));
  fp8core_status status = check_saved(adamw, buffer, bytes, tensors, &progress);
  if (status == FP8CORE_OK) status = restore(adamw, buffer, tensors, &progress);
  free(tensors);
  return status;
}
