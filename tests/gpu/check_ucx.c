// Device memory over UCX: ranks are processes, with a CUDA context each, on as many GPUs as there are (several on one
// where they are few). On GPUs: that UCX moves it where it was built with CUDA, and else says that it does not. As
// check_ucx_emulated, with a CUDA runtime that is played: the same over the UCX that is there, which takes device
// memory for what it then is, memory like any other, and only has to be said to take it.
//
// Without arguments the program is the test, and starts itself as ranks; no CUDA before that, which a child could not
// use after.
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fp8comm/fp8comm.h"
#include "fp8core/fp8core.h"
#include "support.h"
#if defined(FP8_TEST_EMULATED)
#  include "aware.h"
#  include "fake_cuda.h"
#endif

#define MOST_RANKS 4
#define NO_GPU 77
#define NO_CUDA_IN_UCX 78
#define COUNT(array) (sizeof(array) / sizeof(*(array)))

extern char **environ;

// --- A rank ---

static int rank, size;

#define CHECK(condition, ...)                                                                                          \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      (void)printf("%s:%d: rank %d of %d: ", __FILE__, __LINE__, rank, size);                                          \
      (void)printf(__VA_ARGS__);                                                                                       \
      (void)printf("\n");                                                                                              \
      (void)fflush(stdout);                                                                                            \
      _exit(1);                                                                                                        \
    }                                                                                                                  \
  } while (0)
#define OK(call) CHECK((call) == FP8CORE_OK, "%s: %s", #call, fp8core_last_error())

static void make_aware(fp8comm_communicator *communicator) {
#if defined(FP8_TEST_EMULATED)
  aware_make(communicator);
#else
  (void)communicator;
#endif
}

static fp8core_status use(fp8comm_communicator *communicator, fp8core_context *context, const char *path) {
  fp8comm_device_options options = fp8comm_device_options_default();
  options.path = path;
  return fp8comm_communicator_use_device(communicator, context, &options);
}

static void *on_device(fp8core_context *context, const void *host, size_t bytes) {
  void *device = NULL;
  OK(fp8core_alloc(context, bytes + 1, &device));
  if (host) OK(fp8core_copy(context, device, host, bytes));
  return device;
}

static float value_of(int of, int64_t i) { return (float)((of * 7 + (int)(i % 1000) * 3) % 1001); }

// What moves only, at sizes below and above those at which UCX and the transport change their ways; large messages of
// host memory meanwhile.
static void check_moves(fp8comm_communicator *communicator, fp8core_context *context, int64_t count) {
  const size_t bytes = (size_t)count * 4, total = bytes * (size_t)size;
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  float *host = malloc(total), *both = calloc(2, 400000);
  fp8comm_request *requests[3];
  CHECK(host && both, "memory");
  for (int64_t i = 0; i < count * size; i++) host[i] = value_of(rank, i);
  float *in = on_device(context, host, total), *out = on_device(context, NULL, total);

  OK(fp8comm_all_gather_start(communicator, in, out, count, FP8COMM_FP32, &requests[0]));
  for (int i = 0; i < 100000; i++) both[i] = (float)(rank + i % 7);
  OK(fp8comm_all_reduce(communicator, both, both + 100000, 100000, FP8COMM_FP32, FP8COMM_SUM));
  for (int i = 0; i < 100000; i++)
    CHECK(both[100000 + i] == (float)(size * (size - 1) / 2 + size * (i % 7)), "the sum in host memory, element %d", i);
  OK(fp8comm_request_wait(&requests[0]));
  OK(fp8core_copy(context, host, out, total));
  for (int64_t i = 0; i < count * size; i++)
    CHECK(host[i] == value_of((int)(i / count), i % count), "all_gather of %lld, element %lld is %g", (long long)count,
          (long long)i, (double)host[i]);

  OK(fp8comm_all_to_all(communicator, in, out, count, FP8COMM_FP32));
  OK(fp8core_copy(context, host, out, total));
  for (int64_t i = 0; i < count * size; i++)
    CHECK(host[i] == value_of((int)(i / count), rank * count + i % count), "all_to_all of %lld, element %lld is %g",
          (long long)count, (long long)i, (double)host[i]);

  int64_t counts[MOST_RANKS], before = 0;
  for (int i = 0; i < size; i++) counts[i] = i == 1 ? 0 : count - i % 2;
  OK(fp8comm_all_gatherv(communicator, in, out, counts, FP8COMM_FP32));
  OK(fp8core_copy(context, host, out, total));
  for (int from = 0; from < size; before += counts[from++]) {
    for (int64_t i = 0; i < counts[from]; i++)
      CHECK(host[before + i] == value_of(from, i), "all_gatherv of %lld, element %lld of rank %d is %g",
            (long long)count, (long long)i, from, (double)host[before + i]);
  }

  for (int root = 0; root < size; root++) {
    float *data = rank == root ? in : out;
    OK(fp8comm_broadcast(communicator, data, count, FP8COMM_FP32, root));
    OK(fp8core_copy(context, host, data, bytes));
    for (int64_t i = 0; i < count; i++)
      CHECK(host[i] == value_of(root, i), "broadcast of %lld from %d, element %lld is %g", (long long)count, root,
            (long long)i, (double)host[i]);
  }

  OK(fp8comm_send_start(communicator, in, count, FP8COMM_FP32, right, &requests[0]));
  OK(fp8comm_recv_start(communicator, out, count, FP8COMM_FP32, left, &requests[1]));
  OK(fp8comm_recv_start(communicator, both + 100000, 100000, FP8COMM_FP32, left, &requests[2]));
  OK(fp8comm_send(communicator, both, 100000, FP8COMM_FP32, right));
  for (int i = 0; i < 3; i++) OK(fp8comm_request_wait(&requests[i]));
  OK(fp8core_copy(context, host, out, bytes));
  for (int64_t i = 0; i < count; i++)
    CHECK(host[i] == value_of(left, i), "a message of %lld, element %lld is %g", (long long)count, (long long)i,
          (double)host[i]);
  for (int i = 0; i < 100000; i++) CHECK(both[100000 + i] == (float)(left + i % 7), "the message in host memory");
  OK(fp8core_free(context, in));
  OK(fp8core_free(context, out));
  free(host);
  free(both);
}

static void check_sum(fp8comm_communicator *communicator, fp8core_context *context, int64_t count) {
  const size_t bytes = (size_t)count * 4;
  float *host = malloc(bytes);
  CHECK(host, "memory");
  for (int64_t i = 0; i < count; i++) host[i] = (float)(rank + (int)(i % 100));
  float *data = on_device(context, host, bytes);
  OK(fp8comm_all_reduce(communicator, data, data, count, FP8COMM_FP32, FP8COMM_SUM));
  OK(fp8core_copy(context, host, data, bytes));
  for (int64_t i = 0; i < count; i++)
    CHECK(host[i] == (float)(size * (size - 1) / 2 + size * (int)(i % 100)), "all_reduce, element %lld is %g",
          (long long)i, (double)host[i]);
  OK(fp8core_free(context, data));
  free(host);
}

// Sums have the bits of those in host memory.
static void check_bits(fp8comm_communicator *communicator, fp8core_context *context, int64_t count) {
  static const fp8comm_dtype dtypes[] = {FP8COMM_FP32, FP8COMM_BF16, FP8COMM_FP16};
  const size_t room = (size_t)count * 4;
  unsigned char *in = malloc(room), *out = malloc(room), *back = malloc(room);
  CHECK(in && out && back, "memory");
  void *data = on_device(context, NULL, room);
  for (int i = 0; i < (int)COUNT(dtypes) * 2; i++) {
    const fp8comm_dtype dtype = dtypes[i / 2];
    const fp8comm_reduction reduction = i % 2 ? FP8COMM_MAX : FP8COMM_SUM;
    const size_t element = fp8comm_dtype_size(dtype), bytes = (size_t)count * element;
    test_random random = {(uint64_t)(rank * 100 + i + 1)};
    for (int64_t j = 0; j < count; j++) {
      const uint32_t code = fp8core_encode((fp8core_dtype)dtype, (float)test_random_normal(&random), 0);
      memcpy(in + (size_t)j * element, &code, element);
    }
    OK(fp8core_copy(context, data, in, bytes));
    OK(fp8comm_all_reduce(communicator, in, out, count, dtype, reduction));
    OK(fp8comm_all_reduce(communicator, data, data, count, dtype, reduction));
    OK(fp8core_copy(context, back, data, bytes));
    CHECK(memcmp(out, back, bytes) == 0, "all_reduce of %s, reduction %d, differs from host memory's",
          fp8comm_dtype_name(dtype), (int)reduction);
  }
  OK(fp8core_free(context, data));
  free(in);
  free(out);
  free(back);
}

// The means are the CPU's, bit for bit.
static void check_gradients(fp8comm_communicator *communicator, fp8core_context *context, int feedback) {
  enum { TENSORS = 3, ELEMENTS = 30000 };
  const int64_t sizes[TENSORS] = {ELEMENTS, 1, 777};
  fp8comm_gradient_options options = fp8comm_gradient_options_default();
  fp8comm_gradient_reducer *reducers[2];
  fp8core_context *cpu;
  fp8core_tensor inputs[2][TENSORS], outputs[2][TENSORS];
  void *memory[2][2][TENSORS];
  float *values = malloc(ELEMENTS * 4);
  unsigned char *means[2] = {malloc(ELEMENTS * 4), malloc(ELEMENTS * 4)};
  CHECK(values && means[0] && means[1], "memory");
  options.wire_dtype = feedback ? FP8CORE_E5M2 : FP8CORE_E4M3;
  options.error_feedback = feedback;
  options.bucket_bytes = 1000;
  OK(fp8core_context_create(&cpu, NULL));
  fp8core_context *const contexts[2] = {cpu, context};
  for (int side = 0; side < 2; side++) {
    OK(fp8comm_gradient_create(&reducers[side], communicator, contexts[side], TENSORS, sizes, &options));
    for (int i = 0; i < TENSORS; i++) {
      for (int j = 0; j < 2; j++) OK(fp8core_alloc(contexts[side], (size_t)sizes[i] * 4, &memory[side][j][i]));
      const fp8core_dtype out = i == 2 ? FP8CORE_FP32 : options.wire_dtype;
      inputs[side][i] = fp8core_tensor_create(memory[side][0][i], FP8CORE_FP32, 1, &sizes[i]);
      outputs[side][i] = fp8core_tensor_create(memory[side][1][i], out, 1, &sizes[i]);
      inputs[side][i].device = outputs[side][i].device = fp8core_context_device(contexts[side]);
    }
  }
  for (int step = 0; step < 3; step++) {
    for (int i = 0; i < TENSORS; i++) {
      test_random random = {(uint64_t)(rank * 100 + step * 10 + i + 1)};
      for (int64_t j = 0; j < sizes[i]; j++) values[j] = (float)test_random_normal(&random);
      for (int side = 0; side < 2; side++)
        OK(fp8core_copy(contexts[side], memory[side][0][i], values, (size_t)sizes[i] * 4));
    }
    for (int side = 0; side < 2; side++)
      OK(fp8comm_gradient_all_reduce(reducers[side], inputs[side], outputs[side], NULL));
    for (int i = 0; i < TENSORS; i++) {
      const size_t bytes = (size_t)sizes[i] * fp8core_dtype_size(outputs[0][i].dtype);
      for (int side = 0; side < 2; side++) OK(fp8core_copy(contexts[side], means[side], memory[side][1][i], bytes));
      CHECK(memcmp(means[0], means[1], bytes) == 0, "step %d: the means of tensor %d differ from the CPU's", step, i);
    }
  }
  for (int side = 0; side < 2; side++) {
    fp8comm_gradient_destroy(&reducers[side]);
    for (int i = 0; i < TENSORS; i++) {
      for (int j = 0; j < 2; j++) OK(fp8core_free(contexts[side], memory[side][j][i]));
    }
    free(means[side]);
  }
  fp8core_context_destroy(&cpu);
  free(values);
}

static void check_path(fp8comm_communicator *communicator, fp8core_context *context, const char *path) {
  static const int64_t counts[] = {1, 1000, 20000, 300001};
  const int by_transport = strcmp(path, "ucx") == 0;
  if (by_transport) make_aware(communicator);
  OK(use(communicator, context, path));
  CHECK(strcmp(fp8comm_communicator_device_path(communicator), path) == 0, "the path is %s, expected %s",
        fp8comm_communicator_device_path(communicator), path);
  for (size_t i = 0; i < COUNT(counts); i++) check_moves(communicator, context, counts[i]);
  check_sum(communicator, context, 300001);
  if (by_transport) check_bits(communicator, context, 100001);
#if defined(FP8_TEST_EMULATED)
  // The way that data went.
  CHECK((fake_page_locked_bytes() == 0) == by_transport, "%llu bytes went through page-locked memory",
        fake_page_locked_bytes());
  CHECK((aware_sent_bytes() > 0) == by_transport, "%llu bytes were sent from device memory", aware_sent_bytes());
#endif
  check_gradients(communicator, context, 0);
  check_gradients(communicator, context, 1);
  fp8comm_communicator *part;
  OK(fp8comm_communicator_split(communicator, 0, -rank, &part));
  CHECK(strcmp(fp8comm_communicator_device_path(part), path) == 0, "the part's path is %s, expected %s",
        fp8comm_communicator_device_path(part), path);
  float number = (float)rank;
  float *data = on_device(context, &number, sizeof(number));
  OK(fp8comm_broadcast(part, data, 1, FP8COMM_FP32, 0));
  OK(fp8core_copy(context, &number, data, sizeof(number)));
  CHECK(number == (float)(size - 1), "the part's rank 0 has sent %g", (double)number);
  OK(fp8core_free(context, data));
  fp8comm_communicator_destroy(&part);
}

// `lacking`: the first rank whose UCX takes no device memory.
static void check_refusal(fp8comm_communicator *communicator, fp8core_context *context, int lacking) {
  char text[128];
  if (rank != lacking && lacking > 0) make_aware(communicator);
  (void)snprintf(text, sizeof(text), "the transport \"ucx\" of rank %d takes no memory of CUDA devices", lacking);
  const fp8core_status status = use(communicator, context, "ucx");
  CHECK(status == FP8CORE_ERROR_NOT_SUPPORTED && strstr(fp8core_last_error(), text), "%s, \"%s\", expected \"%s\"",
        fp8core_status_string(status), fp8core_last_error(), text);
  if (rank == lacking)
    CHECK(strstr(fp8core_last_error(), "(here: UCX 1."), "\"%s\" lacks the reason", fp8core_last_error());
  OK(use(communicator, context, NULL));
  CHECK(strcmp(fp8comm_communicator_device_path(communicator), "ucx") != 0, "the path is ucx");
  check_sum(communicator, context, 1000);
}

// The last rank is killed while the others wait for what it would have sent.
static void check_death(fp8comm_communicator *communicator, fp8core_context *context) {
  const int64_t count = 1000000;
  make_aware(communicator);
  OK(use(communicator, context, "ucx"));
  float *in = on_device(context, NULL, (size_t)count * 4), *out = on_device(context, NULL, (size_t)(count * size) * 4);
  OK(fp8comm_all_gather(communicator, in, out, count, FP8COMM_FP32));
  // None is still in it.
  (void)fp8comm_barrier(communicator);
  if (rank == size - 1) (void)raise(SIGKILL);
  char name[32];
  (void)snprintf(name, sizeof(name), "rank %d", size - 1);
  const fp8core_status status = fp8comm_all_gather(communicator, in, out, count, FP8COMM_FP32);
  CHECK(status == FP8CORE_ERROR_PEER || status == FP8CORE_ERROR_TIMEOUT, "%s: %s", fp8core_status_string(status),
        fp8core_last_error());
  CHECK(strstr(fp8core_last_error(), name), "\"%s\" does not name %s", fp8core_last_error(), name);
  OK(fp8core_free(context, in));
  OK(fp8core_free(context, out));
}

static int be_rank(const char *what) {
  rank = atoi(getenv("RANK"));
  size = atoi(getenv("WORLD_SIZE"));
  const int devices = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  if (devices == 0) {
    if (rank == 0) (void)printf("skipped: %s\n", fp8core_last_error());
    return NO_GPU;
  }
  fp8core_context_options options = fp8core_context_options_default();
  fp8comm_communicator_options settings = fp8comm_communicator_options_default();
  fp8core_context *context;
  fp8comm_communicator *communicator;
  int result = 0;
  options.device.type = FP8CORE_DEVICE_CUDA;
  options.device.index = rank % devices;
  settings.timeout_seconds = strcmp(what, "death") == 0 ? 8 : 60;
  // Before the communicator: some UCX looks at the device then.
  OK(fp8core_context_create(&context, &options));
  OK(fp8comm_communicator_create_from_environment(&communicator, &settings));
  CHECK(strcmp(fp8comm_communicator_transport(communicator), "ucx") == 0, "the transport is %s",
        fp8comm_communicator_transport(communicator));
  if (strcmp(what, "probe") == 0) {
    const fp8core_status status = use(communicator, context, "ucx");
    if (rank == 0 && status != FP8CORE_OK) (void)printf("without \"ucx\": %s\n", fp8core_last_error());
    CHECK(status == FP8CORE_OK || status == FP8CORE_ERROR_NOT_SUPPORTED, "%s", fp8core_last_error());
    result = status == FP8CORE_OK ? 0 : NO_CUDA_IN_UCX;
  } else if (strcmp(what, "refused") == 0) {
    check_refusal(communicator, context, 0);
  } else if (strcmp(what, "partly") == 0) {
    check_refusal(communicator, context, 1);
  } else if (strcmp(what, "death") == 0) {
    check_death(communicator, context);
  } else {
    check_path(communicator, context, what);
  }
  fp8comm_communicator_destroy(&communicator);
  fp8core_context_destroy(&context);
  return result;
}

// --- The test ---

static int free_port(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof(address);
  const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_true(probe >= 0);
  assert_int_equal(bind(probe, (const struct sockaddr *)&address, sizeof(address)), 0);
  assert_int_equal(getsockname(probe, (struct sockaddr *)&address, &length), 0);
  (void)close(probe);
  return ntohs(address.sin_port);
}

static void set(const char *name, int value) {
  char text[16];
  (void)snprintf(text, sizeof(text), "%d", value);
  assert_int_equal(setenv(name, text, 1), 0);
}

// Exit status of rank 0, which must be every rank's; of the last one whether it was killed.
static int run(int ranks, const char *what) {
  pid_t processes[MOST_RANKS];
  char program[] = "/proc/self/exe", argument[16];
  char *const arguments[] = {program, argument, NULL};
  int statuses[MOST_RANKS];
  (void)snprintf(argument, sizeof(argument), "%s", what);
  set("WORLD_SIZE", ranks);
  set("MASTER_PORT", free_port());
  assert_int_equal(setenv("MASTER_ADDR", "127.0.0.1", 1), 0);
  assert_int_equal(setenv("FP8COMM_BOOTSTRAP", "tcp", 1), 0);
  (void)fflush(stdout);
  for (int i = 0; i < ranks; i++) {
    set("RANK", i);
    assert_int_equal(posix_spawn(&processes[i], program, NULL, NULL, arguments, environ), 0);
  }
  for (int i = 0; i < ranks; i++) {
    while (waitpid(processes[i], &statuses[i], 0) < 0) assert_int_equal(errno, EINTR);
  }
  const int dies = strcmp(what, "death") == 0;
  if (dies) assert_true(WIFSIGNALED(statuses[ranks - 1]) && WTERMSIG(statuses[ranks - 1]) == SIGKILL);
  for (int i = 0; i < ranks - dies; i++) {
    assert_true(WIFEXITED(statuses[i]));
    assert_int_equal(WEXITSTATUS(statuses[i]), WEXITSTATUS(statuses[0]));
  }
  return WEXITSTATUS(statuses[0]);
}

static int without_cuda;

static void staged(void **state) {
  (void)state;
  for (int ranks = 2; ranks <= 3; ranks++) assert_int_equal(run(ranks, "staged"), 0);
}

static void by_ucx(void **state) {
  (void)state;
#if !defined(FP8_TEST_EMULATED)
  if (without_cuda) skip();
#endif
  for (int ranks = 2; ranks <= MOST_RANKS; ranks++) assert_int_equal(run(ranks, "ucx"), 0);
}

static void killed_rank_is_named(void **state) {
  (void)state;
#if !defined(FP8_TEST_EMULATED)
  if (without_cuda) skip();
#endif
  assert_int_equal(run(3, "death"), 0);
}

static void refusals(void **state) {
  (void)state;
  if (!without_cuda) skip();
  assert_int_equal(run(2, "refused"), 0);
#if defined(FP8_TEST_EMULATED)
  assert_int_equal(run(3, "partly"), 0);
#endif
}

int main(int count, char **arguments) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(staged), cmocka_unit_test(by_ucx),
                                     cmocka_unit_test(killed_rank_is_named), cmocka_unit_test(refusals)};
  if (count > 1) return be_rank(arguments[1]);
  const int probed = run(2, "probe");
  if (probed == NO_GPU) return 77;
  if (probed != 0 && probed != NO_CUDA_IN_UCX) return 1;
  without_cuda = probed == NO_CUDA_IN_UCX;
  return cmocka_run_group_tests(tests, NULL, NULL);
}
