// fp8comm_gradient_load() with any bytes: it either takes a state over, and what it would save then is a state that it
// takes over whole, or refuses them and changes nothing. Each input runs a second time with its checksum made right, so
// that mutations reach the fields behind it.
#include <string.h>

#include "fp8comm/fp8comm.h"
#include "fp8core/fp8core.h"
#include "fuzz.h"

#define STATES 2
#define TENSORS 3
// Of version 1, whose records had no amaxes.
#define OLD_BYTES (24 + 16 * TENSORS + 4)

static fp8core_context *context;
static fp8comm_communicator *communicator;
static fp8comm_gradient_reducer *states[STATES];
// What each state saves between inputs.
static uint8_t *baselines[STATES];
static size_t sizes[STATES];

static void create_state(int number) {
  static const int64_t elements[TENSORS] = {7, 0, 300};
  static float values[7 + 300];
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8core_tensor gradients[TENSORS];
  // The second one has other limits, within which factors are brought.
  options.mu_initial = number ? 0.25 : 1.0;
  options.mu_max = number ? 0.25 : 16.0;
  FUZZ_CHECK(fp8comm_gradient_create(&states[number], communicator, context, TENSORS, elements, &options) ==
             FP8CORE_OK);
  for (int i = 0; i < 7 + 300; i++) values[i] = 0.25f * (float)(i - 3);
  for (int i = 0; i < TENSORS; i++)
    gradients[i] = fp8core_tensor_create(i == 0 ? values : values + 7, FP8CORE_FP32, 1, &elements[i]);
  for (int step = 0; step < 2; step++)
    FUZZ_CHECK(fp8comm_gradient_all_reduce(states[number], gradients, gradients, NULL) == FP8CORE_OK);
  sizes[number] = fp8comm_gradient_saved_bytes(states[number]);
  baselines[number] = malloc(sizes[number]);
  FUZZ_CHECK(baselines[number]);
  FUZZ_CHECK(fp8comm_gradient_save(states[number], baselines[number], sizes[number]) == FP8CORE_OK);
}

static int no_others(void *user_data, const void *send, void *receive, size_t bytes) {
  (void)user_data;
  memcpy(receive, send, bytes);
  return 0;
}

static void prepare(void) {
  if (context) return;
  fp8core_context_options options = fp8core_context_options_default();
  options.threads = 1;
  FUZZ_CHECK(fp8core_context_create(&context, &options) == FP8CORE_OK);
  FUZZ_CHECK(fp8comm_communicator_create(&communicator, 0, 1, no_others, NULL, NULL) == FP8CORE_OK);
  for (int i = 0; i < STATES; i++) create_state(i);
}

uint8_t *fuzz_seed(size_t index, size_t *size) {
  prepare();
  if (index == STATES) {
    // As version 1 wrote it; the checksum is made right later.
    uint8_t *old = calloc(1, OLD_BYTES);
    FUZZ_CHECK(old);
    memcpy(old, baselines[0], 24);
    old[8] = 1;
    for (int i = 0; i < TENSORS; i++) memcpy(old + 24 + 16 * i, baselines[0] + 24 + 24 * i, 16);
    *size = OLD_BYTES;
    return old;
  }
  if (index > STATES) return NULL;
  *size = sizes[index];
  uint8_t *bytes = malloc(sizes[index]);
  FUZZ_CHECK(bytes);
  memcpy(bytes, baselines[index], sizes[index]);
  return bytes;
}

static void check_load(int number, const uint8_t *data, size_t size) {
  fp8comm_gradient_reducer *const state = states[number];
  const fp8core_status status = fp8comm_gradient_load(state, data, size);
  const size_t bytes = sizes[number];
  uint8_t *saved = malloc(bytes);
  uint8_t *again = malloc(bytes);
  FUZZ_CHECK(saved && again);
  FUZZ_CHECK(fp8comm_gradient_save(state, saved, bytes) == FP8CORE_OK);
  if (status == FP8CORE_OK) {
    FUZZ_CHECK(size == (data[8] == 1 ? OLD_BYTES : bytes));
    for (int i = 0; i < TENSORS; i++) {
      fp8comm_gradient_statistics statistics;
      FUZZ_CHECK(fp8comm_gradient_get_statistics(state, i, &statistics) == FP8CORE_OK);
      FUZZ_CHECK(statistics.next_mu > 0.0 && statistics.next_mu <= (number ? 0.25 : 16.0));
    }
    FUZZ_CHECK(fp8comm_gradient_load(state, saved, bytes) == FP8CORE_OK);
    FUZZ_CHECK(fp8comm_gradient_save(state, again, bytes) == FP8CORE_OK);
    FUZZ_CHECK(memcmp(saved, again, bytes) == 0);
    FUZZ_CHECK(fp8comm_gradient_load(state, baselines[number], bytes) == FP8CORE_OK);
  } else {
    FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA || status == FP8CORE_ERROR_INVALID_ARGUMENT);
    FUZZ_CHECK(*fp8core_last_error());
    FUZZ_CHECK(memcmp(saved, baselines[number], bytes) == 0);
  }
  free(saved);
  free(again);
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
