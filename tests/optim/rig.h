// What the tests of libfp8optim share: an optimizer with gradients of its own on the device under test, and the bits of
// all its states.
#ifndef FP8_TEST_OPTIM_RIG_H
#define FP8_TEST_OPTIM_RIG_H

#include "fp8optim/fp8optim.h"
#include "support.h"

#define PRESETS 6
#define RIG_TENSORS 4096

typedef struct rig {
  fp8core_context *context;
  fp8optim_adamw *adamw;
  int64_t count;
  fp8optim_parameter *parameters;
  // In device memory of the rig's, contiguous, zero at first, with scale_inverse NULL.
  fp8core_tensor *gradients;
} rig;

// Fails the test on an error. The gradients have this dtype.
rig rig_create(fp8core_context *context, const fp8optim_adamw_options *options, int64_t count,
               const fp8optim_parameter *parameters, int group_count, const fp8optim_group *groups,
               fp8core_dtype gradient_dtype);
// One matrix "w" with this weight dtype (none: -1), one group.
rig rig_matrix(fp8core_context *context, const fp8optim_adamw_options *options, int64_t rows, int64_t columns,
               int weight_dtype, const fp8optim_group *group, fp8core_dtype gradient_dtype);
void rig_destroy(rig *r);

int64_t rig_elements(const rig *r, int64_t index);
// Encodes to nearest, saturating; NaN and infinities stay such where the format has them.
void rig_set_gradient(rig *r, int64_t index, const float *values);
// Normal values times `factor`, in all tensors.
void rig_random_gradients(rig *r, test_random *random, double factor);
void rig_set_state(rig *r, int64_t index, fp8optim_state state, const float *values);
void rig_random_masters(rig *r, test_random *random, double factor);
// Stored values with their scale.
void rig_get(const rig *r, int64_t index, fp8optim_state state, float *values);
// The codes as they are stored.
void rig_codes(const rig *r, int64_t index, fp8optim_state state, uint32_t *codes);
float rig_scale(const rig *r, int64_t index, fp8optim_state state);
fp8optim_step_report rig_step(rig *r, const fp8optim_step_options *options);

// Everything that a step may change: what save() writes, and codes and scales of the weights.
typedef struct image {
  size_t saved_bytes;
  size_t bytes;
  unsigned char *data;
} image;
image rig_image(const rig *r);
void assert_same_image(const image *one, const image *other);
// Compares and frees `before`.
void assert_unchanged(const rig *r, image *before);

#endif
