// Trains a small classifier on the ranks of an MPI program, each with its part of every batch, twice from the same
// start: once with gradients averaged by MPI_Allreduce() in FP32, once by libfp8comm with a byte an element on the
// wire. Shows loss against loss and bytes against bytes; exits with 1 where the losses part. Everything but the
// gradients' way is this program's own. Builds against the installed libraries alone:
//   mpicc -O2 train_mpi.c $(pkg-config --cflags --libs fp8comm) -lm -o train_mpi
//   mpirun -n 2 ./train_mpi
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fp8comm/fp8comm.h>
#include <fp8core/fp8core.h>
#include <mpi.h>

// A hidden layer, and a score for each class. Every class is a few clouds of points, so that no plane divides it from
// the others.
enum { INPUTS = 64, HIDDEN = 256, CLASSES = 10, CLOUDS = 40, BATCH = 96 };
enum { WINDOW = 50, MOST_STEPS = 1000 * WINDOW };
enum { HIDDEN_WEIGHT, HIDDEN_BIAS, OUTPUT_WEIGHT, OUTPUT_BIAS, TENSORS };
static const char *const names[TENSORS] = {"hidden.weight", "hidden.bias", "output.weight", "output.bias"};
static const int64_t elements[TENSORS] = {INPUTS * HIDDEN, HIDDEN, (HIDDEN * CLASSES), CLASSES};
enum { ELEMENTS = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES };

// The curves may part by this share of the loss, in the mean of WINDOW steps.
#define BOUND 0.02
// Of the mean gradient with FP8 on the wire against that in FP32, in dB; one rounding to E4M3 leaves 31.5.
#define LEAST_SNR 25.0

typedef struct run {
  float weights[ELEMENTS];
  float momentum[ELEMENTS];
  float gradients[ELEMENTS];
  // Means of WINDOW steps each.
  double losses[MOST_STEPS / WINDOW];
} run;

typedef struct arguments {
  int steps;
  double timeout_seconds;
  // Where a NaN is put among the gradients, to see what becomes of it; -1: nowhere.
  int nan_rank;
  int nan_step;
} arguments;

static int rank;
static int size;

// MPI ends the other ranks.
static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, fp8core_status_string(status), fp8core_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

// How ranks find each other: libfp8comm asks for a few exchanges of addresses, then goes its own way.
static int all_gather(void *user_data, const void *send, void *receive, size_t bytes) {
  const MPI_Comm *comm = user_data;
  return MPI_Allgather(send, (int)bytes, MPI_BYTE, receive, (int)bytes, MPI_BYTE, *comm);
}

// Uniform in [0, 1), the same for the same key on every rank, so that a batch does not depend on who computes what.
static float uniform(uint64_t key) {
  key = (key ^ (key >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  key = (key ^ (key >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (float)((key ^ (key >> 31)) >> 40) * 0x1p-24f;
}

// The sum of four uniform numbers is nearly normal; its variance is a third.
static float normal(uint64_t stream, uint64_t index) {
  const uint64_t key = (stream << 32 | index) * 4 + 1;
  float sum = -2.0f;
  for (uint64_t i = 0; i < 4; i++) sum += uniform((key + i) * UINT64_C(0x9e3779b97f4a7c15));
  return sum * 1.7320508f;
}

// A point of the batch of a step; returns its class.
static int draw(float *point, int step, int i) {
  const uint64_t stream = (uint64_t)step * BATCH + (uint64_t)i + 2;
  const int cloud = (int)(uniform(stream * UINT64_C(0x9e3779b97f4a7c15)) * CLOUDS);
  for (int j = 0; j < INPUTS; j++)
    point[j] = 0.5f * normal(1, (uint64_t)(cloud * INPUTS + j)) + normal(stream, (uint64_t)j);
  return cloud % CLASSES;
}

static void start(run *r) {
  const float ranges[TENSORS] = {1.0f / 8.0f, 0.0f, 1.0f / 16.0f, 0.0f};
  int64_t first = 0;
  for (int i = 0; i < TENSORS; i++) {
    for (int64_t j = first; j < first + elements[i]; j++) r->weights[j] = ranges[i] * normal(0, (uint64_t)j);
    first += elements[i];
  }
}

// Loss (nats) of a point; adds its gradients times `share`.
static double learn(run *r, const float *point, int class, float share) {
  const float *hidden_weight = r->weights;
  const float *hidden_bias = hidden_weight + elements[HIDDEN_WEIGHT];
  const float *output_weight = hidden_bias + elements[HIDDEN_BIAS];
  const float *output_bias = output_weight + elements[OUTPUT_WEIGHT];
  float hidden[HIDDEN];
  float score[CLASSES];
  memcpy(hidden, hidden_bias, sizeof(hidden));
  memcpy(score, output_bias, sizeof(score));
  for (int i = 0; i < INPUTS; i++) {
    for (int j = 0; j < HIDDEN; j++) hidden[j] += point[i] * hidden_weight[i * HIDDEN + j];
  }
  for (int j = 0; j < HIDDEN; j++) {
    hidden[j] = fmaxf(hidden[j], 0.0f);
    for (int k = 0; k < CLASSES; k++) score[k] += hidden[j] * output_weight[j * CLASSES + k];
  }
  float highest = score[0];
  for (int k = 1; k < CLASSES; k++) highest = fmaxf(highest, score[k]);
  float total = 0.0f;
  for (int k = 0; k < CLASSES; k++) total += expf(score[k] - highest);

  float *d_hidden_weight = r->gradients;
  float *d_hidden_bias = d_hidden_weight + elements[HIDDEN_WEIGHT];
  float *d_output_weight = d_hidden_bias + elements[HIDDEN_BIAS];
  float *d_output_bias = d_output_weight + elements[OUTPUT_WEIGHT];
  float d_score[CLASSES];
  float d_hidden[HIDDEN];
  for (int k = 0; k < CLASSES; k++) {
    d_score[k] = share * (expf(score[k] - highest) / total - (k == class ? 1.0f : 0.0f));
    d_output_bias[k] += d_score[k];
  }
  for (int j = 0; j < HIDDEN; j++) {
    d_hidden[j] = 0.0f;
    for (int k = 0; k < CLASSES; k++) {
      d_output_weight[j * CLASSES + k] += hidden[j] * d_score[k];
      if (hidden[j] > 0.0f) d_hidden[j] += output_weight[j * CLASSES + k] * d_score[k];
    }
    d_hidden_bias[j] += d_hidden[j];
  }
  for (int i = 0; i < INPUTS; i++) {
    for (int j = 0; j < HIDDEN; j++) d_hidden_weight[i * HIDDEN + j] += point[i] * d_hidden[j];
  }
  return (double)(logf(total) - (score[class] - highest));
}

// Gradients of this rank's part of the batch, such that their mean over ranks is that of the whole batch; returns this
// rank's part of the mean loss.
static double backward(run *r, const arguments *asked, int step) {
  double loss = 0.0;
  memset(r->gradients, 0, sizeof(r->gradients));
  for (int i = rank; i < BATCH; i += size) {
    float point[INPUTS];
    const int class = draw(point, step, i);
    loss += learn(r, point, class, (float)size / BATCH) / BATCH;
  }
  if (rank == asked->nan_rank && step == asked->nan_step) r->gradients[ELEMENTS / 2] = NAN;
  return loss;
}

static void update(run *r, const arguments *asked, int step) {
  const float rate = 0.1f * (1.0f - (float)step / (float)asked->steps);
  for (int i = 0; i < ELEMENTS; i++) {
    r->momentum[i] = 0.9f * r->momentum[i] + r->gradients[i];
    r->weights[i] -= rate * r->momentum[i];
  }
}

static void train_fp32(run *r, const arguments *asked) {
  start(r);
  for (int step = 0; step < asked->steps; step++) {
    double loss = backward(r, asked, step);
    MPI_Allreduce(MPI_IN_PLACE, &loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, r->gradients, ELEMENTS, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    float sum = 0.0f;
    for (int i = 0; i < ELEMENTS; i++) {
      r->gradients[i] /= (float)size;
      sum += r->gradients[i];
    }
    r->losses[step / WINDOW] += loss / WINDOW;
    if (isfinite(sum)) update(r, asked, step);
  }
}

static fp8comm_gradient_reducer *create_reducer(fp8comm_communicator *communicator, fp8core_context *context,
                                                fp8comm_gradient_algorithm algorithm) {
  fp8comm_gradient_reducer *reducer;
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  options.algorithm = algorithm;
  check(fp8comm_gradient_create(&reducer, communicator, context, TENSORS, elements, &options));
  return reducer;
}

static void describe(fp8core_tensor *tensors, float *values) {
  for (int i = 0; i < TENSORS; i++) {
    tensors[i] = fp8core_tensor_create(values, FP8CORE_FP32, 1, &elements[i]);
    values += elements[i];
  }
}

// What the last of a window's steps did to the gradients, over all tensors.
typedef struct quality {
  double snr_db;
  double saturated;
  double least_mu;
  double largest_mu;
  uint64_t bytes;
  uint64_t bytes_fp32;
} quality;

static quality measure(const fp8comm_gradient_reducer *reducer, const float *mean, const float *exact) {
  double signal = 0.0;
  double noise = 0.0;
  for (int i = 0; i < ELEMENTS; i++) {
    const double error = (double)mean[i] - (double)exact[i];
    signal += (double)exact[i] * (double)exact[i];
    noise += error * error;
  }
  quality found = {10.0 * log10(signal / noise), 0.0, INFINITY, 0.0, 0, 0};
  for (int i = 0; i < TENSORS; i++) {
    fp8comm_gradient_statistics statistics;
    check(fp8comm_gradient_get_statistics(reducer, i, &statistics));
    found.saturated += (double)statistics.saturated_in_cast / ((double)ELEMENTS * size);
    found.least_mu = fmin(found.least_mu, statistics.mu);
    found.largest_mu = fmax(found.largest_mu, statistics.mu);
  }
  return found;
}

// Which tensors the step is skipped for; every rank learns the same.
static void tell_nonfinite(const fp8comm_gradient_reducer *reducer, const fp8comm_gradient_result *result, int step) {
  for (int i = 0; i < TENSORS; i++) {
    fp8comm_gradient_statistics statistics;
    check(fp8comm_gradient_get_statistics(reducer, i, &statistics));
    if (!statistics.nonfinite) continue;
    fprintf(stderr, "rank %d: step %d: the gradient of %s is not finite on rank %d; step skipped\n", rank, step,
            names[i], result->nonfinite_rank);
  }
}

static quality train_fp8(run *r, const run *fp32, const arguments *asked, fp8comm_communicator *communicator) {
  // Ranks share the cores of their machine.
  fp8core_context *context;
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = 1;
  check(fp8core_context_create(&context, &context_options));
  fp8comm_gradient_reducer *reducer = create_reducer(communicator, context, FP8COMM_TWO_SHOT);
  // To compare with, once a window: the same exchange in FP32.
  fp8comm_gradient_reducer *reference = create_reducer(communicator, context, FP8COMM_BASELINE_FP32);
  static float exact[ELEMENTS];
  fp8core_tensor gradients[TENSORS];
  fp8core_tensor exact_means[TENSORS];
  describe(gradients, r->gradients);
  describe(exact_means, exact);

  quality found = {0};
  start(r);
  if (rank == 0) printf(" steps   loss FP32    loss FP8   SNR of the mean   saturated   mu\n");
  for (int step = 0; step < asked->steps; step++) {
    double loss = backward(r, asked, step);
    check(fp8comm_all_reduce(communicator, &loss, &loss, 1, FP8COMM_FP64, FP8COMM_SUM));
    r->losses[step / WINDOW] += loss / WINDOW;
    const int is_last = step % WINDOW == WINDOW - 1;
    fp8comm_gradient_result result_fp32 = {0};
    if (is_last) check(fp8comm_gradient_all_reduce(reference, gradients, exact_means, &result_fp32));
    // In place: the means are where the gradients were.
    fp8comm_gradient_result result;
    check(fp8comm_gradient_all_reduce(reducer, gradients, gradients, &result));
    if (result.nonfinite_tensors > 0) {
      tell_nonfinite(reducer, &result, step);
    } else {
      update(r, asked, step);
    }
    if (!is_last) continue;
    if (result.nonfinite_tensors == 0) found = measure(reducer, r->gradients, exact);
    found.bytes = result.bytes_sent;
    found.bytes_fp32 = result_fp32.bytes_sent;
    if (rank > 0) continue;
    printf("%6d   %9.4f   %9.4f   %12.1f dB   %7.4f %%   %.2f to %.2f\n", step + 1, fp32->losses[step / WINDOW],
           r->losses[step / WINDOW], found.snr_db, 100.0 * found.saturated, found.least_mu, found.largest_mu);
    fflush(stdout);
  }
  fp8comm_gradient_destroy(&reducer);
  fp8comm_gradient_destroy(&reference);
  fp8core_context_destroy(&context);
  return found;
}

// Whether all ranks have the same weights, bit for bit (a NaN differs from itself).
static int ranks_agree(fp8comm_communicator *communicator, const run *r) {
  static float lowest[ELEMENTS];
  static float highest[ELEMENTS];
  check(fp8comm_all_reduce(communicator, r->weights, lowest, ELEMENTS, FP8COMM_FP32, FP8COMM_MIN));
  check(fp8comm_all_reduce(communicator, r->weights, highest, ELEMENTS, FP8COMM_FP32, FP8COMM_MAX));
  for (int i = 0; i < ELEMENTS; i++) {
    if (!(lowest[i] == highest[i])) return 0;
  }
  return 1;
}

static void print_bytes(const quality *found) {
  printf("bytes that rank 0 sent in the last step, for %d gradients in %d tensors:\n", ELEMENTS, TENSORS);
  printf("  FP8 by libfp8comm     %8" PRIu64 "   %.2f a gradient, counted by the transport\n", found->bytes,
         (double)found->bytes / ELEMENTS);
  printf("  FP32 by libfp8comm    %8" PRIu64 "   %.2f, likewise\n", found->bytes_fp32,
         (double)found->bytes_fp32 / ELEMENTS);
  const double least = 2.0 * (size - 1) / size * (double)sizeof(float);
  printf(
    "  FP32 by MPI_Allreduce %8.0f   %.2f at least: 2 (N - 1) / N numbers of 4 bytes a gradient; MPI does not count\n",
    least * ELEMENTS, least);
}

// Says on rank 0 what is wrong, and returns whether something is.
static int complain(int wrong, const char *what) {
  if (wrong && rank == 0) fprintf(stderr, "failed: %s\n", what);
  return wrong;
}

static int judge(const run *fp32, const run *fp8, const quality *found, int steps, int agree) {
  const int windows = steps / WINDOW;
  double furthest = 0.0;
  int within = 1;
  for (int i = 0; i < windows; i++) {
    const double parting = fabs(fp8->losses[i] / fp32->losses[i] - 1.0);
    furthest = fmax(furthest, parting);
    // Also where one is NaN.
    within = within && parting <= BOUND;
  }
  if (rank == 0) printf("the curves part by %.2f %% at most, allowed: %.0f %%\n", 100.0 * furthest, 100.0 * BOUND);
  int failed = complain(!within, "the curves part");
  failed |= complain(!(fp32->losses[windows - 1] < fp32->losses[0]) && windows > 1, "nothing was learnt");
  failed |= complain(!(found->snr_db >= LEAST_SNR), "the mean gradient is too far from that in FP32");
  return failed | complain(!agree, "ranks do not have the same weights");
}

static int read_number(const char *text, const char *name, double least, double most, double *number) {
  char *end;
  errno = 0;
  *number = strtod(text, &end);
  if (end != text && *end == '\0' && errno == 0 && *number >= least && *number <= most) return 1;
  if (rank == 0) fprintf(stderr, "%s is \"%s\", expected a number from %g to %g\n", name, text, least, most);
  return 0;
}

static int read_arguments(arguments *asked, int count, char **words) {
  asked->steps = 400;
  asked->timeout_seconds = 60.0;
  asked->nan_rank = -1;
  asked->nan_step = -1;
  for (int i = 1; i < count; i++) {
    double number;
    double step;
    if (strcmp(words[i], "--steps") == 0 && i + 1 < count) {
      if (!read_number(words[++i], "--steps", WINDOW, MOST_STEPS, &number)) return 0;
      asked->steps = (int)number;
      if (asked->steps % WINDOW != 0) {
        if (rank == 0) fprintf(stderr, "--steps is %d, expected a multiple of %d\n", asked->steps, WINDOW);
        return 0;
      }
    } else if (strcmp(words[i], "--timeout") == 0 && i + 1 < count) {
      if (!read_number(words[++i], "--timeout", 1e-3, 1e6, &asked->timeout_seconds)) return 0;
    } else if (strcmp(words[i], "--nan") == 0 && i + 2 < count) {
      if (!read_number(words[i + 1], "the rank of --nan", 0, size - 1, &number) ||
          !read_number(words[i + 2], "the step of --nan", 0, MOST_STEPS, &step))
        return 0;
      asked->nan_rank = (int)number;
      asked->nan_step = (int)step;
      i += 2;
    } else {
      if (rank == 0)
        fprintf(
          stderr,
          "\"%s\" is unknown, or lacks its value; usage: train_mpi [--steps N] [--timeout SECONDS] [--nan RANK STEP]\n",
          words[i]);
      return 0;
    }
  }
  // Counted from 0.
  if (asked->nan_step < asked->steps) return 1;
  if (rank == 0)
    fprintf(stderr, "the step of --nan is %d, expected less than --steps, %d\n", asked->nan_step, asked->steps);
  return 0;
}

int main(int count, char **words) {
  MPI_Init(&count, &words);
  MPI_Comm comm = MPI_COMM_WORLD;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  arguments asked;
  if (!read_arguments(&asked, count, words)) {
    MPI_Finalize();
    return 2;
  }
  fp8comm_communicator *communicator;
  fp8comm_communicator_options options = fp8comm_communicator_options_default();
  options.timeout_seconds = asked.timeout_seconds;
  check(fp8comm_communicator_create(&communicator, rank, size, all_gather, &comm, &options));
  if (rank == 0)
    printf("libfp8comm %s, %d ranks over %s, %d steps of %d points\n", fp8comm_version(), size,
           fp8comm_communicator_transport(communicator), asked.steps, BATCH);

  static run fp32;
  static run fp8;
  train_fp32(&fp32, &asked);
  const quality found = train_fp8(&fp8, &fp32, &asked, communicator);
  const int agree = ranks_agree(communicator, &fp8);
  if (rank == 0) print_bytes(&found);
  const int failed = judge(&fp32, &fp8, &found, asked.steps, agree);
  fp8comm_communicator_destroy(&communicator);
  MPI_Finalize();
  return failed;
}
