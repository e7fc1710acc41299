#include "rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *host(size_t bytes) {
  void *memory = calloc(1, bytes ? bytes : 1);
  assert_non_null(memory);
  return memory;
}

int64_t rig_elements(const rig *r, int64_t index) {
  int64_t elements = 1;
  for (int i = 0; i < r->parameters[index].dimensions; i++) elements *= r->parameters[index].shape[i];
  return elements;
}

rig rig_create(fp8core_context *context, const fp8optim_adamw_options *options, int64_t count,
               const fp8optim_parameter *parameters, int group_count, const fp8optim_group *groups,
               fp8core_dtype gradient_dtype) {
  rig r;
  r.context = context;
  r.count = count;
  assert_ok(fp8optim_adamw_create(&r.adamw, context, options, count, parameters, group_count, groups));
  r.parameters = host((size_t)count * sizeof(*parameters));
  r.gradients = host((size_t)count * sizeof(*r.gradients));
  memcpy(r.parameters, parameters, (size_t)count * sizeof(*parameters));
  for (int64_t i = 0; i < count; i++) {
    const size_t bytes = (size_t)rig_elements(&r, i) * fp8core_dtype_size(gradient_dtype);
    void *data = test_alloc(context, bytes);
    if (bytes) assert_ok(fp8core_zero(context, data, bytes));
    r.gradients[i] = fp8core_tensor_create(data, gradient_dtype, parameters[i].dimensions, parameters[i].shape);
    r.gradients[i].device = test_device();
  }
  return r;
}

rig rig_matrix(fp8core_context *context, const fp8optim_adamw_options *options, int64_t rows, int64_t columns,
               int weight_dtype, const fp8optim_group *group, fp8core_dtype gradient_dtype) {
  fp8optim_parameter parameter = fp8optim_parameter_create("w", rows, columns);
  parameter.with_weight = weight_dtype >= 0;
  if (weight_dtype >= 0) parameter.weight_dtype = (fp8core_dtype)weight_dtype;
  return rig_create(context, options, 1, &parameter, 1, group, gradient_dtype);
}

void rig_destroy(rig *r) {
  for (int64_t i = 0; i < r->count; i++) test_free(r->context, r->gradients[i].data);
  fp8optim_adamw_destroy(&r->adamw);
  assert_null(r->adamw);
  free(r->parameters);
  free(r->gradients);
}

static void put_code(unsigned char *codes, int64_t index, fp8core_dtype dtype, float value) {
  const uint32_t code = fp8core_encode(dtype, value, isfinite(value));
  memcpy(codes + index * (int64_t)fp8core_dtype_size(dtype), &code, fp8core_dtype_size(dtype));
}

void rig_set_gradient(rig *r, int64_t index, const float *values) {
  const fp8core_tensor *gradient = &r->gradients[index];
  const int64_t elements = rig_elements(r, index);
  const size_t bytes = (size_t)elements * fp8core_dtype_size(gradient->dtype);
  if (!bytes) return;
  unsigned char *codes = host(bytes);
  for (int64_t i = 0; i < elements; i++) put_code(codes, i, gradient->dtype, values[i]);
  assert_ok(fp8core_copy(r->context, gradient->data, codes, bytes));
  free(codes);
}

static void for_random(rig *r, test_random *random, double factor, void (*set)(rig *, int64_t, const float *)) {
  for (int64_t i = 0; i < r->count; i++) {
    const int64_t elements = rig_elements(r, i);
    float *values = host((size_t)elements * sizeof(float));
    for (int64_t j = 0; j < elements; j++) values[j] = (float)(factor * test_random_normal(random));
    set(r, i, values);
    free(values);
  }
}

void rig_random_gradients(rig *r, test_random *random, double factor) {
  for_random(r, random, factor, rig_set_gradient);
}

void rig_set_state(rig *r, int64_t index, fp8optim_state state, const float *values) {
  const int64_t elements = rig_elements(r, index);
  void *data = test_upload(r->context, values, (size_t)elements * sizeof(float));
  const fp8core_tensor source = test_matrix(data, FP8CORE_FP32, 1, elements);
  assert_ok(fp8optim_adamw_set_state(r->adamw, index, state, &source));
  assert_ok(fp8core_context_synchronize(r->context));
  test_free(r->context, data);
}

static void set_master(rig *r, int64_t index, const float *values) {
  if (rig_elements(r, index)) rig_set_state(r, index, FP8OPTIM_MASTER, values);
}

void rig_random_masters(rig *r, test_random *random, double factor) { for_random(r, random, factor, set_master); }

void rig_codes(const rig *r, int64_t index, fp8optim_state state, uint32_t *codes) {
  fp8core_tensor tensor;
  assert_ok(fp8optim_adamw_state(r->adamw, index, state, &tensor));
  const int64_t elements = fp8core_tensor_elements(&tensor);
  const size_t size = fp8core_dtype_size(tensor.dtype);
  unsigned char *bytes = host((size_t)elements * size);
  if (elements) test_download(r->context, bytes, tensor.data, (size_t)elements * size);
  for (int64_t i = 0; i < elements; i++) {
    codes[i] = 0;
    memcpy(&codes[i], bytes + i * (int64_t)size, size);
  }
  free(bytes);
}

float rig_scale(const rig *r, int64_t index, fp8optim_state state) {
  fp8core_tensor tensor;
  float pair[2];
  assert_ok(fp8optim_adamw_state(r->adamw, index, state, &tensor));
  test_download(r->context, &pair[0], tensor.scale, sizeof(float));
  test_download(r->context, &pair[1], tensor.scale_inverse, sizeof(float));
  assert_true(isnormal(pair[0]) && pair[0] > 0.0f && pair[1] == 1.0f / pair[0]);
  return pair[0];
}

void rig_get(const rig *r, int64_t index, fp8optim_state state, float *values) {
  fp8core_tensor tensor;
  assert_ok(fp8optim_adamw_state(r->adamw, index, state, &tensor));
  const int64_t elements = fp8core_tensor_elements(&tensor);
  const float scale_inverse = 1.0f / rig_scale(r, index, state);
  uint32_t *codes = host((size_t)elements * sizeof(*codes));
  rig_codes(r, index, state, codes);
  for (int64_t i = 0; i < elements; i++) values[i] = fp8core_decode(tensor.dtype, codes[i]) * scale_inverse;
  free(codes);
}

fp8optim_step_report rig_step(rig *r, const fp8optim_step_options *options) {
  fp8optim_step_report report;
  assert_ok(fp8optim_adamw_step(r->adamw, r->gradients, options, &report));
  return report;
}

image rig_image(const rig *r) {
  image taken;
  taken.saved_bytes = fp8optim_adamw_saved_bytes(r->adamw);
  taken.bytes = taken.saved_bytes;
  for (int64_t i = 0; i < r->count; i++)
    if (r->parameters[i].with_weight) taken.bytes += ((size_t)rig_elements(r, i) + 1) * sizeof(uint32_t);
  taken.data = host(taken.bytes);
  assert_ok(fp8optim_adamw_save(r->adamw, taken.data, taken.saved_bytes));
  unsigned char *at = taken.data + taken.saved_bytes;
  for (int64_t i = 0; i < r->count; i++) {
    if (!r->parameters[i].with_weight) continue;
    const float scale = rig_scale(r, i, FP8OPTIM_WEIGHT);
    const size_t elements = (size_t)rig_elements(r, i);
    uint32_t *codes = host(elements * sizeof(*codes));
    rig_codes(r, i, FP8OPTIM_WEIGHT, codes);
    memcpy(at, &scale, sizeof(scale));
    memcpy(at + sizeof(scale), codes, elements * sizeof(*codes));
    at += (elements + 1) * sizeof(uint32_t);
    free(codes);
  }
  return taken;
}

void assert_same_image(const image *one, const image *other) {
  assert_int_equal(one->bytes, other->bytes);
  for (size_t i = 0; i < one->bytes; i++)
    if (one->data[i] != other->data[i])
      fail_msg("byte %zu of %zu (%zu of them saved) is %02x and %02x", i, one->bytes, one->saved_bytes, one->data[i],
               other->data[i]);
}

void assert_unchanged(const rig *r, image *before) {
  image now = rig_image(r);
  assert_same_image(&now, before);
  free(now.data);
  free(before->data);
  before->data = NULL;
}
