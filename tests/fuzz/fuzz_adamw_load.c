// fp8optim_adamw_load() with any bytes: it either takes a state over whole, and would save the very same bytes (but for
// weights of another format), or refuses them and changes nothing. Each input runs a second time with its checksum made
// right, so that mutations reach the fields behind it.
#include <string.h>

#include "fp8core/fp8core.h"
#include "fp8optim/fp8optim.h"
#include "fuzz.h"

#define STATES 3
#define TENSORS 3

static fp8core_context *context;
static fp8optim_adamw *states[STATES];
// What each state saves between inputs.
static uint8_t *baselines[STATES];
static size_t sizes[STATES];

static float values[12];
static fp8core_tensor gradients[TENSORS];

static void create_state(int number) {
  const fp8optim_preset presets[STATES] = {FP8OPTIM_PRESET_FP8, FP8OPTIM_PRESET_FP32, FP8OPTIM_PRESET_FP8_EXP_AVG_SQ};
  fp8optim_adamw_options options = fp8optim_adamw_options_of(presets[number]);
  const fp8optim_group group = fp8optim_group_default();
  fp8optim_parameter parameters[TENSORS] = {fp8optim_parameter_create("a", 3, 4),
                                            fp8optim_parameter_create("bias", 1, 2),
                                            fp8optim_parameter_create("none", 0, 2)};
  options.stochastic_rounding = number == 2;
  parameters[0].with_weight = 1;
  parameters[1].with_weight = number;
  parameters[1].weight_dtype = FP8CORE_BF16;
  FUZZ_CHECK(fp8optim_adamw_create(&states[number], context, &options, TENSORS, parameters, 1, &group) == FP8CORE_OK);
  for (int i = 0; i < 12; i++) values[i] = 0.25f * (float)(i - 3);
  for (int i = 0; i < TENSORS; i++) gradients[i] = fp8core_tensor_create(values, FP8CORE_FP32, 2, parameters[i].shape);
  FUZZ_CHECK(fp8optim_adamw_set_state(states[number], 0, FP8OPTIM_MASTER, &gradients[0]) == FP8CORE_OK);
  for (int step = 0; step < 2; step++)
    FUZZ_CHECK(fp8optim_adamw_step(states[number], gradients, NULL, NULL) == FP8CORE_OK);
  sizes[number] = fp8optim_adamw_saved_bytes(states[number]);
  baselines[number] = malloc(sizes[number]);
  FUZZ_CHECK(baselines[number]);
  FUZZ_CHECK(fp8optim_adamw_save(states[number], baselines[number], sizes[number]) == FP8CORE_OK);
}

static void prepare(void) {
  if (context) return;
  fp8core_context_options options = fp8core_context_options_default();
  options.threads = 1;
  FUZZ_CHECK(fp8core_context_create(&context, &options) == FP8CORE_OK);
  for (int i = 0; i < STATES; i++) create_state(i);
}

// Of the saved form: magic, version, three dtypes, rounding, seed, tensors.
#define STEPS_AT (8 + 5 * 4 + 8 + 8)

uint8_t *fuzz_seed(size_t index, size_t *size) {
  // Of the first state, with a count of steps that the next one may be refused for: none though there are moments, and
  // the last ones. Their checksum is made right when they run.
  const uint32_t counts[] = {0, INT32_MAX - 2, INT32_MAX - 1};
  prepare();
  if (index >= STATES + sizeof(counts) / sizeof(*counts)) return NULL;
  const size_t number = index < STATES ? index : 0;
  *size = sizes[number];
  uint8_t *bytes = malloc(sizes[number]);
  FUZZ_CHECK(bytes);
  memcpy(bytes, baselines[number], sizes[number]);
  if (index >= STATES)
    for (size_t i = 0; i < 4; i++) bytes[STEPS_AT + i] = (uint8_t)(counts[index - STATES] >> (8 * i));
  return bytes;
}

// Where a weight had another format, its dtype and scale are the optimizer's own: takes them over into `loaded`.
static void adopt_weights(int number, uint8_t *loaded, const uint8_t *saved) {
  const size_t name_bytes[TENSORS] = {1, 4, 4};
  const size_t elements[TENSORS] = {12, 2, 0};
  const size_t element_bytes[STATES] = {5, 12, 4};
  size_t at = 8 + 5 * 4 + 8 + 3 * 8;
  for (int i = 0; i < TENSORS; i++) {
    at += 4 + name_bytes[i] + 4 + 2 * 8;
    if (memcmp(loaded + at, saved + at, 4) != 0) {
      memcpy(loaded + at, saved + at, 4);
      memcpy(loaded + at + 4 + 3 * 4, saved + at + 4 + 3 * 4, 4);
    }
    at += 4 + 7 * 4 + elements[i] * element_bytes[number];
  }
  FUZZ_CHECK(at + 4 == sizes[number]);
  // The checksum follows.
  memcpy(loaded + at, saved + at, 4);
}

// Whether the optimizer takes a step: not with moments of no step, nor after the last one that it can count.
static int takes_step(const fp8optim_adamw *state) {
  const int64_t steps = fp8optim_adamw_steps(state);
  for (int index = 0; index < TENSORS && steps == 0; index++) {
    for (int part = FP8OPTIM_EXP_AVG; part <= FP8OPTIM_EXP_AVG_SQ; part++) {
      float scale;
      float amax;
      FUZZ_CHECK(fp8optim_adamw_get_stored(state, index, (fp8optim_state)part, &scale, &amax) == FP8CORE_OK);
      if (amax > 0.0f) return 0;
    }
  }
  return steps < INT32_MAX - 1;
}

// Takes one, or is refused it and changes nothing.
static void check_step(int number, uint8_t *before, uint8_t *after) {
  fp8optim_adamw *const state = states[number];
  fp8optim_step_report report;
  if (takes_step(state)) {
    FUZZ_CHECK(fp8optim_adamw_step(state, gradients, NULL, &report) == FP8CORE_OK);
    FUZZ_CHECK(!report.skipped && report.steps > 0 && fp8optim_adamw_steps(state) == report.steps);
    return;
  }
  FUZZ_CHECK(fp8optim_adamw_save(state, before, sizes[number]) == FP8CORE_OK);
  FUZZ_CHECK(fp8optim_adamw_step(state, gradients, NULL, &report) == FP8CORE_ERROR_INVALID_ARGUMENT);
  FUZZ_CHECK(fp8optim_adamw_save(state, after, sizes[number]) == FP8CORE_OK);
  FUZZ_CHECK(memcmp(before, after, sizes[number]) == 0);
}

static void check_load(int number, const uint8_t *data, size_t size) {
  fp8optim_adamw *const state = states[number];
  const fp8core_status status = fp8optim_adamw_load(state, data, size);
  uint8_t *saved = malloc(sizes[number]);
  FUZZ_CHECK(saved);
  FUZZ_CHECK(fp8optim_adamw_save(state, saved, sizes[number]) == FP8CORE_OK);
  if (status == FP8CORE_OK) {
    FUZZ_CHECK(size == sizes[number]);
    uint8_t *loaded = malloc(size);
    FUZZ_CHECK(loaded);
    memcpy(loaded, data, size);
    adopt_weights(number, loaded, saved);
    FUZZ_CHECK(memcmp(saved, loaded, size) == 0);
    for (int index = 0; index < TENSORS; index++) {
      for (int part = 0; part < 3; part++) {
        fp8core_tensor tensor;
        FUZZ_CHECK(fp8optim_adamw_state(state, index, (fp8optim_state)part, &tensor) == FP8CORE_OK);
        FUZZ_CHECK(*tensor.scale >= FP8CORE_SCALE_MIN && *tensor.scale <= FP8CORE_SCALE_MAX);
        FUZZ_CHECK(*tensor.scale_inverse == 1.0f / *tensor.scale);
      }
    }
    // Whatever was taken over, the next steps are taken where they can be.
    for (int step = 0; step < 2; step++) check_step(number, saved, loaded);
    free(loaded);
    FUZZ_CHECK(fp8optim_adamw_load(state, baselines[number], sizes[number]) == FP8CORE_OK);
  } else {
    FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA || status == FP8CORE_ERROR_INVALID_ARGUMENT);
    FUZZ_CHECK(*fp8core_last_error());
    FUZZ_CHECK(memcmp(saved, baselines[number], sizes[number]) == 0);
  }
  free(saved);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  prepare();
  for (int i = 0; i < STATES; i++) check_load(i, data, size);
  if (size < 4) return 0;
  uint8_t *repaired = fuzz_with_checksum(data, size);
  for (int i = 0; i < STATES; i++) check_load(i, repaired, size);
  free(repaired);
  return 0;
}
