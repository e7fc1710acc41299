// Trains a small network on several ranks, each with samples of its own, in all four stages of ZeRO: the weights come
// out the same, the memory of a rank shrinks. The network is this program's own; libfp8zero reduces its gradients,
// updates and sends its weights. Ranks are threads here; between processes only the communicator changes:
// fp8comm_communicator_create_from_environment() under mpirun, srun or torchrun.
// Builds against the installed libraries alone: cc sharded.c $(pkg-config --cflags --libs fp8zero) -lm -lpthread
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fp8comm/fp8comm.h>
#include <fp8core/fp8core.h>
#include <fp8zero/sharded.h>

// A chain of layers, width to width, each a part: a matrix in FP8 and a bias in FP32.
enum { RANKS = 4, LAYERS = 6, WIDTH = 64, SAMPLES = 16, STEPS = 60, TENSORS = 2 * LAYERS };

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

static float uniform(uint32_t *state) {
  *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
  return (float)(*state >> 8) * 0x1p-23f - 1.0f;
}

typedef struct rank {
  pthread_t thread;
  fp8comm_communicator *communicator;
  int stage;
  double first_loss;
  double last_loss;
  fp8zero_memory memory;
  fp8zero_traffic traffic;
} rank;

// The matrix of a layer in FP32: what its codes and its scale say.
static void read_matrix(fp8core_context *context, const fp8zero_sharded *sharded, int layer, float *values) {
  fp8core_tensor weight;
  check(fp8zero_sharded_weight(sharded, 2 * layer, &weight));
  const fp8core_tensor wide = fp8core_tensor_create(values, FP8CORE_FP32, 2, weight.shape);
  check(fp8core_cast(context, NULL, &weight, &wide));
}

// One pass forward and backward over this rank's samples; returns the loss, a mean of squares.
static double pass(fp8core_context *context, fp8zero_sharded *sharded, const float *inputs, const float *targets) {
  static _Thread_local float activations[LAYERS + 1][SAMPLES][WIDTH];
  static _Thread_local float matrix[WIDTH][WIDTH];
  static _Thread_local float slope[SAMPLES][WIDTH];
  static _Thread_local float before[SAMPLES][WIDTH];
  memcpy(activations[0], inputs, sizeof(activations[0]));
  for (int layer = 0; layer < LAYERS; layer++) {
    fp8core_tensor bias;
    check(fp8zero_sharded_acquire(sharded, layer, FP8ZERO_FORWARD));
    read_matrix(context, sharded, layer, &matrix[0][0]);
    check(fp8zero_sharded_weight(sharded, 2 * layer + 1, &bias));
    for (int s = 0; s < SAMPLES; s++)
      for (int o = 0; o < WIDTH; o++) {
        float sum = ((const float *)bias.data)[o];
        for (int i = 0; i < WIDTH; i++) sum += matrix[o][i] * activations[layer][s][i];
        activations[layer + 1][s][o] = layer + 1 < LAYERS ? tanhf(sum) : sum;
      }
    check(fp8zero_sharded_release(sharded, layer, FP8ZERO_FORWARD));
  }
  double loss = 0.0;
  for (int s = 0; s < SAMPLES; s++)
    for (int o = 0; o < WIDTH; o++) {
      slope[s][o] = (activations[LAYERS][s][o] - targets[s * WIDTH + o]) / SAMPLES;
      loss += 0.5 * (double)slope[s][o] * (double)slope[s][o] * SAMPLES;
    }
  for (int layer = LAYERS - 1; layer >= 0; layer--) {
    void *memory[2];
    fp8core_tensor gradients[2];
    const int64_t shape[2] = {WIDTH, WIDTH};
    check(fp8zero_sharded_acquire(sharded, layer, FP8ZERO_BACKWARD));
    read_matrix(context, sharded, layer, &matrix[0][0]);
    for (int i = 0; i < 2; i++) {
      check(fp8zero_sharded_gradient(sharded, 2 * layer + i, &memory[i]));
      gradients[i] = fp8core_tensor_create(memory[i], FP8CORE_FP32, 2 - i, shape);
      memset(memory[i], 0, i == 0 ? sizeof(matrix) : sizeof(matrix[0]));
    }
    memset(before, 0, sizeof(before));
    for (int s = 0; s < SAMPLES; s++)
      for (int o = 0; o < WIDTH; o++) {
        ((float *)memory[1])[o] += slope[s][o];
        for (int i = 0; i < WIDTH; i++) {
          ((float *)memory[0])[o * WIDTH + i] += slope[s][o] * activations[layer][s][i];
          before[s][i] += slope[s][o] * matrix[o][i];
        }
      }
    for (int s = 0; s < SAMPLES; s++)
      for (int i = 0; i < WIDTH; i++)
        slope[s][i] = before[s][i] * (1 - activations[layer][s][i] * activations[layer][s][i]);
    // Travels while the layers below are computed.
    check(fp8zero_sharded_reduce(sharded, layer, gradients));
    check(fp8zero_sharded_release(sharded, layer, FP8ZERO_BACKWARD));
  }
  return loss;
}

static void *train(void *argument) {
  rank *r = argument;
  const int number = fp8comm_communicator_rank(r->communicator);
  char names[TENSORS][16];
  fp8zero_parameter parameters[TENSORS];
  fp8core_context_options context_options = fp8core_context_options_default();
  fp8zero_sharded_options options = fp8zero_sharded_options_default();
  fp8optim_group group = fp8optim_group_default();
  fp8core_context *context;
  fp8zero_sharded *sharded;
  context_options.threads = 1;
  options.stage = r->stage;
  group.learning_rate = 3e-3;
  for (int i = 0; i < TENSORS; i++) {
    snprintf(names[i], sizeof(names[i]), "%d.%s", i / 2, i % 2 ? "bias" : "weight");
    // A matrix with a weight in E4M3, a bias in FP32; both with gradients in FP32.
    parameters[i] = fp8zero_parameter_create(names[i], WIDTH, WIDTH, i / 2);
    if (i % 2 == 0) continue;
    parameters[i].dimensions = 1;
    parameters[i].weight_dtype = FP8CORE_FP32;
  }
  check(fp8core_context_create(&context, &context_options));
  check(fp8zero_sharded_create(&sharded, r->communicator, context, &options, TENSORS, parameters, 1, &group));
  // The same initial values on every rank; each keeps what it owns.
  uint32_t state = 1;
  for (int i = 0; i < TENSORS; i++) {
    static _Thread_local float values[WIDTH * WIDTH];
    for (int j = 0; j < WIDTH * WIDTH; j++) values[j] = i % 2 ? 0.0f : 0.2f * uniform(&state);
    const fp8core_tensor source =
      fp8core_tensor_create(values, FP8CORE_FP32, parameters[i].dimensions, parameters[i].shape);
    check(fp8zero_sharded_set_master(sharded, i, &source));
  }
  check(fp8zero_sharded_publish(sharded));

  fp8optim_step_options step_options = fp8optim_step_options_default();
  step_options.max_norm = 1.0f;
  for (int step = 0; step < STEPS; step++) {
    float inputs[SAMPLES * WIDTH];
    float targets[SAMPLES * WIDTH];
    // Other samples on each rank; what is to be learned is to shift them by one place.
    uint32_t samples = (uint32_t)(1 + number + 100 * (step % 4));
    for (int i = 0; i < SAMPLES * WIDTH; i++) inputs[i] = uniform(&samples);
    for (int i = 0; i < SAMPLES * WIDTH; i++) targets[i] = inputs[i / WIDTH * WIDTH + (i + 1) % WIDTH];
    r->last_loss = pass(context, sharded, inputs, targets);
    if (step == 0) r->first_loss = r->last_loss;
    check(fp8zero_sharded_step(sharded, &step_options, NULL));
  }
  check(fp8zero_sharded_wait(sharded));
  check(fp8zero_sharded_memory(sharded, &r->memory));
  check(fp8zero_sharded_traffic(sharded, &r->traffic));
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  fp8comm_communicator_destroy(&r->communicator);
  return NULL;
}

int main(void) {
  double losses[4];
  printf("stage  loss at first, at last   of rank 0: weights gradients optimizer bytes, sent a step\n");
  for (int stage = 0; stage < 4; stage++) {
    rank ranks[RANKS];
    fp8comm_communicator *communicators[RANKS];
    check(fp8comm_threads_create(RANKS, communicators, NULL));
    memset(ranks, 0, sizeof(ranks));
    for (int i = 0; i < RANKS; i++) {
      ranks[i].communicator = communicators[i];
      ranks[i].stage = stage;
      if (pthread_create(&ranks[i].thread, NULL, train, &ranks[i]) != 0) return 1;
    }
    for (int i = 0; i < RANKS; i++) pthread_join(ranks[i].thread, NULL);
    const fp8zero_memory *m = &ranks[0].memory;
    const fp8zero_traffic *t = &ranks[0].traffic;
    printf("%5d  %13.4f %8.4f %18lld %9lld %9lld %14lld\n", stage, ranks[0].first_loss, ranks[0].last_loss,
           (long long)(m->weight_bytes + m->weight_buffer_bytes),
           (long long)(m->gradient_bytes + m->gradient_buffer_bytes + m->mean_gradient_bytes),
           (long long)(m->master_bytes + m->exp_avg_bytes + m->exp_avg_sq_bytes),
           (long long)((t->gradient_bytes + t->weight_bytes + t->control_bytes) / STEPS));
    losses[stage] = ranks[0].last_loss;
    if (!(ranks[0].last_loss < 0.5 * ranks[0].first_loss)) return 1;
  }
  // Not nearly the same: the same.
  return !(losses[1] == losses[0] && losses[2] == losses[0] && losses[3] == losses[0]);
}
