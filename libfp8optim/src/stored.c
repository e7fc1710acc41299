// Parts of tensors as they are stored, for files of the caller's own format.
#include <string.h>

#include "internal.h"

static fp8core_status check_part(const fp8optim_adamw *adamw, const char *call, int64_t index, fp8optim_state state) {
  if (!adamw) return fp8optim_invalid("adamw of %s() is NULL, expected an optimizer", call);
  if (index < 0 || index >= adamw->tensor_count)
    return fp8optim_invalid("index is %lld, expected 0 to %lld", (long long)index, (long long)adamw->tensor_count - 1);
  if ((unsigned)state >= FP8OPTIM_PARTS)
    return fp8optim_invalid("state is %d, expected 0 to %d", (int)state, FP8OPTIM_PARTS - 1);
  if (state == FP8OPTIM_WEIGHT && !adamw->parameters[index].with_weight)
    return fp8optim_invalid("parameter \"%s\" was created with with_weight 0 and has no weight",
                            adamw->parameters[index].name);
  return FP8CORE_OK;
}

fp8core_status fp8optim_adamw_get_stored(const fp8optim_adamw *adamw, int64_t index, fp8optim_state state, float *scale,
                                         float *amax) {
  FP8OPTIM_TRY(check_part(adamw, "fp8optim_adamw_get_stored", index, state));
  if (!scale || !amax)
    return fp8optim_invalid("%s of fp8optim_adamw_get_stored() is NULL, expected host memory",
                            scale ? "amax" : "scale");
  const fp8optim_tensor *tensor = &adamw->tables.tensors[index];
  FP8OPTIM_TRY(fp8core_copy(adamw->context, scale, &tensor->scale[state], sizeof(*scale)));
  *amax = 0.0f;
  if (state == FP8OPTIM_WEIGHT) return FP8CORE_OK;
  return fp8core_copy(adamw->context, amax, &tensor->amax[state], sizeof(*amax));
}

fp8core_status fp8optim_adamw_set_stored(fp8optim_adamw *adamw, int64_t index, fp8optim_state state, const void *data,
                                         float scale, float amax) {
  FP8OPTIM_TRY(check_part(adamw, "fp8optim_adamw_set_stored", index, state));
  FP8OPTIM_TRY(fp8optim_check_idle(adamw, "fp8optim_adamw_set_stored"));
  const fp8optim_parameter *parameter = &adamw->parameters[index];
  if (!(scale >= FP8CORE_SCALE_MIN && scale <= FP8CORE_SCALE_MAX))
    return fp8optim_invalid("the %s scale of parameter \"%s\" is %g, expected a number in [2^-126, 2^126]",
                            fp8optim_state_name(state), parameter->name, (double)scale);
  if (!(amax >= 0.0f && fp8core_float_bits(amax) < FP8CORE_F32_INFINITY))
    return fp8optim_invalid("the %s amax of parameter \"%s\" is %g, expected a finite number of at least 0",
                            fp8optim_state_name(state), parameter->name, (double)amax);
  fp8core_tensor stored;
  FP8OPTIM_TRY(fp8optim_adamw_state(adamw, index, state, &stored));
  const int64_t bytes = fp8core_tensor_span_bytes(&stored);
  if (bytes > 0 && !data)
    return fp8optim_invalid("data of fp8optim_adamw_set_stored() is NULL, expected %lld bytes", (long long)bytes);
  fp8optim_tensor *tensor = &adamw->tables.tensors[index];
  const float inverse = 1.0f / scale;
  FP8OPTIM_TRY(fp8core_copy(adamw->context, &tensor->scale[state], &scale, sizeof(scale)));
  FP8OPTIM_TRY(fp8core_copy(adamw->context, &tensor->scale_inverse[state], &inverse, sizeof(inverse)));
  if (bytes > 0) FP8OPTIM_TRY(fp8core_copy(adamw->context, stored.data, data, (size_t)bytes));
  if (state == FP8OPTIM_WEIGHT) return FP8CORE_OK;
  if (state != FP8OPTIM_MASTER && amax > 0.0f) adamw->moments_set = 1;
  return fp8core_copy(adamw->context, &tensor->amax[state], &amax, sizeof(amax));
}
