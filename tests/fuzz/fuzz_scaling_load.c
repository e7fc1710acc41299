// fp8core_scaling_load() with any bytes: it either takes a state over whole, and would save the very same bytes, or
// refuses them and changes nothing. Each input runs a second time with its checksum made right, so that mutations reach
// the fields behind it.
#include <string.h>

#include "fp8core/fp8core.h"
#include "fuzz.h"

#define STATES 3

static fp8core_context *context;
static fp8core_scaling *states[STATES];
// What each state saves between inputs.
static uint8_t *baselines[STATES];
static size_t sizes[STATES];

static void create_state(int number) {
  const fp8core_dtype dtypes[3] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_FP16};
  fp8core_scaling_options options = fp8core_scaling_options_default();
  options.policy = number == 0 ? FP8CORE_SCALING_JUST_IN_TIME : FP8CORE_SCALING_DELAYED;
  options.history_length = number == 2 ? 1 : 4;
  options.amax_choice = number == 2 ? FP8CORE_AMAX_MOST_RECENT : FP8CORE_AMAX_MAXIMUM;
  options.margin = -number;
  options.power_of_two = number == 2;
  FUZZ_CHECK(fp8core_scaling_create(&states[number], context, 3, dtypes, &options) == FP8CORE_OK);
  const float values[2] = {3.0f, -0.25f};
  for (int step = 0; step < 3; step++) {
    for (int index = 0; index < 3; index++) {
      uint16_t codes[2];
      const fp8core_device cpu = {FP8CORE_DEVICE_CPU, 0};
      float shifted[2] = {values[0] * (float)(step + 1), values[1] * (float)(index + 1)};
      const fp8core_tensor source = fp8core_tensor_matrix(shifted, FP8CORE_FP32, 1, 2, cpu);
      fp8core_tensor destination = fp8core_tensor_matrix(codes, dtypes[index], 1, 2, cpu);
      FUZZ_CHECK(fp8core_scaling_cast(states[number], index, NULL, &source, &destination, NULL) == FP8CORE_OK);
    }
    // The last step is left open.
    if (step < 2) FUZZ_CHECK(fp8core_scaling_update(states[number]) == FP8CORE_OK);
  }
  sizes[number] = fp8core_scaling_saved_bytes(states[number]);
  baselines[number] = malloc(sizes[number]);
  FUZZ_CHECK(baselines[number]);
  FUZZ_CHECK(fp8core_scaling_save(states[number], baselines[number], sizes[number]) == FP8CORE_OK);
}

static void prepare(void) {
  if (context) return;
  fp8core_context_options options = fp8core_context_options_default();
  options.threads = 1;
  FUZZ_CHECK(fp8core_context_create(&context, &options) == FP8CORE_OK);
  for (int i = 0; i < STATES; i++) create_state(i);
}

uint8_t *fuzz_seed(size_t index, size_t *size) {
  prepare();
  if (index >= STATES) return NULL;
  *size = sizes[index];
  uint8_t *bytes = malloc(sizes[index]);
  FUZZ_CHECK(bytes);
  memcpy(bytes, baselines[index], sizes[index]);
  return bytes;
}

static void check_load(int number, const uint8_t *data, size_t size) {
  fp8core_scaling *const state = states[number];
  const fp8core_status status = fp8core_scaling_load(state, data, size);
  uint8_t *saved = malloc(sizes[number]);
  FUZZ_CHECK(saved);
  FUZZ_CHECK(fp8core_scaling_save(state, saved, sizes[number]) == FP8CORE_OK);
  if (status == FP8CORE_OK) {
    FUZZ_CHECK(size == sizes[number] && memcmp(saved, data, size) == 0);
    for (int index = 0; index < 3; index++) {
      fp8core_scaling_record record;
      FUZZ_CHECK(fp8core_scaling_get(state, index, &record) == FP8CORE_OK);
      FUZZ_CHECK(record.scale >= FP8CORE_SCALE_MIN && record.scale <= FP8CORE_SCALE_MAX);
      FUZZ_CHECK(record.scale_inverse == 1.0f / record.scale);
    }
    // Whatever was taken over, the next steps work, and what they leave can be saved and loaded.
    for (int step = 0; step < 2; step++) FUZZ_CHECK(fp8core_scaling_update(state) == FP8CORE_OK);
    FUZZ_CHECK(fp8core_scaling_save(state, saved, sizes[number]) == FP8CORE_OK);
    FUZZ_CHECK(fp8core_scaling_load(state, saved, sizes[number]) == FP8CORE_OK);
    FUZZ_CHECK(fp8core_scaling_load(state, baselines[number], sizes[number]) == FP8CORE_OK);
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
