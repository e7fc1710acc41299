// The exchange and the optimizer of a training step, without the model, in every stage of ZeRO: seconds of each phase,
// bytes of a rank by class, bytes on the wire. Ranks are threads of this process, with one CPU thread each.
//
//   bench_zero [RANKS [LAYERS [STEPS]]]     2, 4, 5; tensors of GPT-2 small's width, vocabulary 16,384
//
// In stage 3 the weights of a forward and a backward pass are gathered; in no stage is anything computed with them, so
// that nothing overlaps but exchanges and updates.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <fp8comm/fp8comm.h>
#include <fp8core/fp8core.h>
#include <fp8zero/sharded.h>

enum { WIDTH = 768, VOCABULARY = 16384, POSITIONS = 1024, MOST_LAYERS = 48, MOST_TENSORS = 4 + 12 * MOST_LAYERS };
enum { MOST_RANKS = 64 };

static int ranks = 2;
static int layers = 4;
static int steps = 5;

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

typedef struct model {
  int count;
  char names[MOST_TENSORS][32];
  fp8zero_parameter parameters[MOST_TENSORS];
} model;

static void add(model *m, const char *name, int64_t rows, int64_t columns, int part, int linear) {
  fp8zero_parameter *parameter = &m->parameters[m->count];
  snprintf(m->names[m->count], sizeof(m->names[0]), "%d.%s", part, name);
  *parameter = fp8zero_parameter_create(m->names[m->count++], rows, columns, part);
  parameter->weight_dtype = linear ? FP8CORE_E4M3 : FP8CORE_BF16;
  parameter->gradient_dtype = linear ? FP8CORE_E4M3 : FP8CORE_FP32;
}

static void make_model(model *m) {
  m->count = 0;
  add(m, "wte", VOCABULARY, WIDTH, 0, 0);
  add(m, "wpe", POSITIONS, WIDTH, 0, 0);
  for (int layer = 1; layer <= layers; layer++) {
    add(m, "ln1.weight", 1, WIDTH, layer, 0);
    add(m, "ln1.bias", 1, WIDTH, layer, 0);
    add(m, "attn.weight", 3 * WIDTH, WIDTH, layer, 1);
    add(m, "attn.bias", 1, 3 * WIDTH, layer, 0);
    add(m, "proj.weight", WIDTH, WIDTH, layer, 1);
    add(m, "proj.bias", 1, WIDTH, layer, 0);
    add(m, "ln2.weight", 1, WIDTH, layer, 0);
    add(m, "ln2.bias", 1, WIDTH, layer, 0);
    add(m, "fc.weight", 4 * WIDTH, WIDTH, layer, 1);
    add(m, "fc.bias", 1, 4 * WIDTH, layer, 0);
    add(m, "out.weight", WIDTH, 4 * WIDTH, layer, 1);
    add(m, "out.bias", 1, WIDTH, layer, 0);
  }
  add(m, "ln_f.weight", 1, WIDTH, layers + 1, 0);
  add(m, "ln_f.bias", 1, WIDTH, layers + 1, 0);
}

typedef struct worker {
  pthread_t thread;
  fp8comm_communicator *communicator;
  int stage;
  // Of all steps but the first: forward, backward with reductions, step, weights that still travel.
  double seconds[4];
  fp8zero_memory memory;
  fp8zero_traffic traffic;
} worker;

static void *work(void *argument) {
  worker *w = argument;
  model *m = calloc(1, sizeof(*m));
  fp8core_tensor *gradients = calloc(MOST_TENSORS, sizeof(*gradients));
  fp8core_context_options context_options = fp8core_context_options_default();
  fp8zero_sharded_options options = fp8zero_sharded_options_default();
  const fp8optim_group group = fp8optim_group_default();
  fp8core_context *context;
  fp8zero_sharded *sharded;
  if (!m || !gradients) exit(1);
  make_model(m);
  int *resident = calloc((size_t)layers + 2, sizeof(*resident));
  if (!resident) exit(1);
  resident[0] = 1;
  context_options.threads = 1;
  options.stage = w->stage;
  options.resident = resident;
  check(fp8core_context_create(&context, &context_options));
  check(fp8zero_sharded_create(&sharded, w->communicator, context, &options, m->count, m->parameters, 1, &group));
  uint32_t state = (uint32_t)fp8comm_communicator_rank(w->communicator) + 1;
  for (int step = 0; step < steps; step++) {
    double times[5];
    times[0] = now();
    for (int part = 0; part < layers + 2; part++) {
      check(fp8zero_sharded_acquire(sharded, part, FP8ZERO_FORWARD));
      check(fp8zero_sharded_release(sharded, part, FP8ZERO_FORWARD));
    }
    times[1] = now();
    double filling = 0.0;
    for (int part = layers + 1; part >= 0; part--) {
      int64_t first;
      int64_t count;
      check(fp8zero_sharded_acquire(sharded, part, FP8ZERO_BACKWARD));
      check(fp8zero_sharded_part(sharded, part, &first, &count));
      const double begin = now();
      for (int64_t i = first; i < first + count; i++) {
        const fp8zero_parameter *parameter = &m->parameters[i];
        const int64_t elements = parameter->shape[0] * parameter->shape[1];
        void *data;
        check(fp8zero_sharded_gradient(sharded, i, &data));
        gradients[i - first] = fp8core_tensor_create(data, parameter->gradient_dtype, 2, parameter->shape);
        // Any finite numbers: codes of magnitudes up to 1.
        for (int64_t j = 0; j < elements; j++) {
          state = state * UINT32_C(1664525) + UINT32_C(1013904223);
          if (parameter->gradient_dtype == FP8CORE_FP32)
            ((float *)data)[j] = (float)(int32_t)state * 0x1p-31f;
          else
            ((unsigned char *)data)[j] = (unsigned char)((state >> 24 & 0x80) | (state >> 8 & 0x37));
        }
      }
      filling += now() - begin;
      check(fp8zero_sharded_reduce(sharded, part, gradients));
      check(fp8zero_sharded_release(sharded, part, FP8ZERO_BACKWARD));
    }
    times[2] = now();
    check(fp8zero_sharded_step(sharded, NULL, NULL));
    times[3] = now();
    check(fp8zero_sharded_wait(sharded));
    times[4] = now();
    for (int i = 0; i < 4 && step > 0; i++) w->seconds[i] += times[i + 1] - times[i] - (i == 1 ? filling : 0.0);
  }
  check(fp8zero_sharded_memory(sharded, &w->memory));
  check(fp8zero_sharded_traffic(sharded, &w->traffic));
  fp8zero_sharded_destroy(&sharded);
  fp8core_context_destroy(&context);
  fp8comm_communicator_destroy(&w->communicator);
  free(resident);
  free(gradients);
  free(m);
  return NULL;
}

static int argument(int count, char **arguments, int index, int standard, int least, int most) {
  if (index >= count) return standard;
  const long value = strtol(arguments[index], NULL, 10);
  if (value >= least && value <= most) return (int)value;
  fprintf(stderr, "argument %d is %s, expected %d to %d\n", index, arguments[index], least, most);
  exit(2);
}

int main(int count, char **arguments) {
  ranks = argument(count, arguments, 1, 2, 1, MOST_RANKS);
  layers = argument(count, arguments, 2, 4, 1, MOST_LAYERS);
  steps = argument(count, arguments, 3, 5, 2, 1000);
  model *m = calloc(1, sizeof(*m));
  if (!m) return 1;
  make_model(m);
  double elements = 0.0;
  for (int i = 0; i < m->count; i++) elements += (double)(m->parameters[i].shape[0] * m->parameters[i].shape[1]);
  free(m);
  printf("%d ranks, %d layers, %.1f million parameters; ms a step, the slowest rank's; MB of the largest rank\n", ranks,
         layers, 1e-6 * elements);
  printf(
    "stage  forward backward     step     wait      sum   weights gradients    states     other     total      sent\n");
  for (int stage = 0; stage <= 3; stage++) {
    worker workers[MOST_RANKS];
    fp8comm_communicator *communicators[MOST_RANKS];
    double seconds[5] = {0.0};
    int largest = 0;
    memset(workers, 0, sizeof(workers));
    check(fp8comm_threads_create(ranks, communicators, NULL));
    for (int i = 0; i < ranks; i++) {
      workers[i].communicator = communicators[i];
      workers[i].stage = stage;
      if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) return 1;
    }
    for (int i = 0; i < ranks; i++) {
      double sum = 0.0;
      pthread_join(workers[i].thread, NULL);
      for (int phase = 0; phase < 4; phase++) {
        sum += workers[i].seconds[phase];
        if (workers[i].seconds[phase] > seconds[phase]) seconds[phase] = workers[i].seconds[phase];
      }
      if (sum > seconds[4]) seconds[4] = sum;
      if (workers[i].memory.total_bytes > workers[largest].memory.total_bytes) largest = i;
    }
    const fp8zero_memory *told = &workers[largest].memory;
    const fp8zero_traffic *sent = &workers[largest].traffic;
    const double weights = 1e-6 * (double)(told->weight_bytes + told->weight_buffer_bytes);
    const double of_gradients =
      1e-6 * (double)(told->gradient_bytes + told->gradient_buffer_bytes + told->mean_gradient_bytes);
    const double states = 1e-6 * (double)(told->master_bytes + told->exp_avg_bytes + told->exp_avg_sq_bytes);
    const double total = 1e-6 * (double)told->total_bytes;
    printf("%5d", stage);
    for (int phase = 0; phase < 5; phase++) printf(" %8.1f", 1e3 * seconds[phase] / (steps - 1));
    printf(" %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", weights, of_gradients, states,
           total - weights - of_gradients - states, total,
           1e-6 * (double)(sent->gradient_bytes + sent->weight_bytes + sent->control_bytes) / steps);
  }
  return 0;
}
