// Communication of device memory: ranks are threads, with a CUDA context each, on as many GPUs as there are (several
// on one where they are few, which NCCL refuses: then its ranks are fewer). On GPUs; and, as
// check_comm_emulated, against a CUDA runtime and an NCCL that are played, of which the former copies no sooner than it
// is waited for, and with a transport that takes device memory ("threads"), as this one never does on a GPU.
// check_ucx.c has the one that may.
#include "../comm/ranks.h"
#include "devices.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "fp8core/cuda.h"
#if defined(FP8_TEST_EMULATED)
#  include "aware.h"
#  include "fake_cuda.h"
#endif

#define MOST_RANKS 8
#define COUNT(array) (sizeof(array) / sizeof(*(array)))

// One a rank, of device rank % devices.
static fp8core_context *contexts[MOST_RANKS];
static int devices;
// Staged; NCCL, unless it is missing; the transport's own, in emulations.
static const char *paths[3] = {"staged"};
static size_t path_count = 1;
static int nccl;

static fp8core_context *context_of(const fp8comm_communicator *communicator) {
  return contexts[fp8comm_communicator_rank(communicator)];
}

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Whether anything here can be such a transport.
static int make_aware(fp8comm_communicator *communicator) {
#if defined(FP8_TEST_EMULATED)
  aware_make(communicator);
  return 1;
#else
  (void)communicator;
  return 0;
#endif
}

static fp8core_status use(fp8comm_communicator *communicator, const char *path) {
  fp8comm_device_options options = fp8comm_device_options_default();
  if (path && strcmp(path, "threads") == 0) (void)make_aware(communicator);
  options.path = path;
  return fp8comm_communicator_use_device(communicator, context_of(communicator), &options);
}

// Device memory with these bytes, or NULL.
static void *on_device(fp8core_context *context, const void *host, size_t bytes) {
  void *device = NULL;
  if (fp8core_alloc(context, bytes + 1, &device) != FP8CORE_OK) return NULL;
  if (host && fp8core_copy(context, device, host, bytes) != FP8CORE_OK) return NULL;
  return device;
}

// Small integers, whose sums are exact in every format but FP8 (where they stay below 16).
static double value_of(int rank, int64_t i, fp8comm_dtype dtype) {
  return dtype <= FP8COMM_E5M2 ? (double)((rank + i) % 3 - 1) : (double)((rank * 7 + i * 3) % 15 - 7);
}

static void put(fp8comm_dtype dtype, void *data, int64_t i, double value) {
  unsigned char *at = (unsigned char *)data + (size_t)i * fp8comm_dtype_size(dtype);
  const uint32_t code = dtype <= FP8COMM_FP32 ? fp8core_encode((fp8core_dtype)dtype, (float)value, 0) : 0;
  const int64_t integer = dtype == FP8COMM_INT64 ? (int64_t)value : 0;
  if (dtype <= FP8COMM_FP32) memcpy(at, &code, fp8comm_dtype_size(dtype));
  if (dtype == FP8COMM_FP64) memcpy(at, &value, 8);
  if (dtype == FP8COMM_INT64) memcpy(at, &integer, 8);
  if (dtype == FP8COMM_BYTE) *at = (unsigned char)(value + 100);
}

static double get(fp8comm_dtype dtype, const void *data, int64_t i) {
  const unsigned char *at = (const unsigned char *)data + (size_t)i * fp8comm_dtype_size(dtype);
  uint32_t code = 0;
  int64_t integer = 0;
  double value = 0;
  if (dtype <= FP8COMM_FP32) {
    memcpy(&code, at, fp8comm_dtype_size(dtype));
    return (double)fp8core_decode((fp8core_dtype)dtype, code);
  }
  if (dtype == FP8COMM_BYTE) return (double)*at - 100;
  memcpy(&integer, at, 8);
  memcpy(&value, at, 8);
  return dtype == FP8COMM_INT64 ? (double)integer : value;
}

static double expected(int ranks, int64_t i, fp8comm_dtype dtype, fp8comm_reduction reduction) {
  double result = value_of(0, i, dtype);
  for (int rank = 1; rank < ranks; rank++) {
    const double value = value_of(rank, i, dtype);
    if (reduction == FP8COMM_SUM) result += value;
    if (reduction == FP8COMM_MIN && value < result) result = value;
    if (reduction == FP8COMM_MAX && value > result) result = value;
  }
  return result;
}

typedef struct device_case {
  const char *path;
  fp8comm_dtype dtype;
  fp8comm_reduction reduction;
  int64_t count;
  int refused;
} device_case;

// --- Every collective ---

static void reduce(fp8comm_communicator *communicator, const device_case *one) {
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const size_t element = fp8comm_dtype_size(one->dtype), bytes = (size_t)one->count * element;
  const size_t total = bytes * (size_t)size;
  unsigned char *host = calloc(1, total + 1);
  for (int64_t i = 0; i < one->count * size; i++) put(one->dtype, host, i, value_of(rank, i, one->dtype));
  unsigned char *in = on_device(context, host, total), *out = on_device(context, NULL, total);
  rank_check(communicator, host && in && out, "memory: %s", fp8core_last_error());
  if (one->refused) {
    rank_refused(communicator, fp8comm_all_reduce(communicator, in, out, one->count, one->dtype, one->reduction),
                 FP8CORE_ERROR_NOT_SUPPORTED, fp8comm_dtype_name(one->dtype)[0] == 'e' ? "" : "bytes have no sum");
  } else {
    rank_ok(communicator, fp8comm_all_reduce(communicator, in, out, one->count, one->dtype, one->reduction));
    rank_ok(communicator, fp8core_copy(context, host, out, bytes));
    for (int64_t i = 0; i < one->count; i++)
      rank_check(communicator, get(one->dtype, host, i) == expected(size, i, one->dtype, one->reduction),
                 "all_reduce (%s) of %lld %s: element %lld is %g, expected %g", one->path, (long long)one->count,
                 fp8comm_dtype_name(one->dtype), (long long)i, get(one->dtype, host, i),
                 expected(size, i, one->dtype, one->reduction));
    rank_ok(communicator, fp8comm_reduce_scatter(communicator, in, out, one->count, one->dtype, one->reduction));
    rank_ok(communicator, fp8core_copy(context, host, out, bytes));
    for (int64_t i = 0; i < one->count; i++)
      rank_check(communicator,
                 get(one->dtype, host, i) == expected(size, i + rank * one->count, one->dtype, one->reduction),
                 "reduce_scatter (%s) of %lld %s: element %lld is %g", one->path, (long long)one->count,
                 fp8comm_dtype_name(one->dtype), (long long)i, get(one->dtype, host, i));
    // In place.
    unsigned char *own = in + (size_t)rank * bytes, *again = calloc(1, bytes + 1);
    rank_ok(communicator, fp8comm_reduce_scatter(communicator, in, own, one->count, one->dtype, one->reduction));
    rank_ok(communicator, fp8core_copy(context, again, own, bytes));
    rank_check(communicator, again && memcmp(host, again, bytes) == 0, "reduce_scatter in place differs");
    free(again);
    rank_ok(communicator, fp8comm_all_reduce(communicator, own, own, one->count, one->dtype, one->reduction));
  }
  rank_ok(communicator, fp8core_free(context, in));
  rank_ok(communicator, fp8core_free(context, out));
  free(host);
}

// The formats, of large ones two, and the reductions.
static void check_reduce(fp8comm_communicator *communicator, void *data) {
  static const fp8comm_dtype dtypes[] = {FP8COMM_FP32, FP8COMM_BF16,  FP8COMM_FP16,
                                         FP8COMM_FP64, FP8COMM_INT64, FP8COMM_BYTE};
  device_case one = *(const device_case *)data;
  rank_ok(communicator, use(communicator, one.path));
  rank_check(communicator, strcmp(fp8comm_communicator_device_path(communicator), one.path) == 0, "path is %s",
             fp8comm_communicator_device_path(communicator));
  for (size_t d = 0; d < (one.count > 2000 ? 2 : COUNT(dtypes)); d++) {
    for (int reduction = FP8COMM_SUM; reduction <= FP8COMM_MAX; reduction++) {
      one.dtype = dtypes[d];
      one.reduction = (fp8comm_reduction)reduction;
      one.refused = one.dtype == FP8COMM_BYTE && reduction == FP8COMM_SUM;
      reduce(communicator, &one);
    }
  }
}

// Where sums are the device's own they have the bits of those in host memory, NaNs and zeros of both signs included;
// for elements at any address.
static void check_bits(fp8comm_communicator *communicator, void *data) {
  static const fp8comm_dtype dtypes[] = {FP8COMM_FP32, FP8COMM_BF16,  FP8COMM_FP16,
                                         FP8COMM_FP64, FP8COMM_INT64, FP8COMM_BYTE};
  const device_case *one = data;
  const int64_t count = one->count;
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const size_t room = (size_t)count * (size_t)size * 8 + 8;
  unsigned char *in = calloc(1, room), *out = malloc(room), *back = malloc(room);
  unsigned char *device_in = on_device(context, NULL, room), *device_out = on_device(context, NULL, room);
  rank_check(communicator, in && out && back && device_in && device_out, "memory: %s", fp8core_last_error());
  rank_ok(communicator, use(communicator, one->path));
  for (int i = 0; i < (int)COUNT(dtypes) * 6; i++) {
    const fp8comm_dtype dtype = dtypes[i / 6];
    const fp8comm_reduction reduction = (fp8comm_reduction)(i / 2 % 3);
    const int scatters = i % 2;
    const size_t element = fp8comm_dtype_size(dtype), bytes = (size_t)count * element, off = scatters ? 1 : 0;
    const size_t all = scatters ? bytes * (size_t)size : bytes;
    if (dtype == FP8COMM_BYTE && reduction == FP8COMM_SUM) continue;
    test_random random = {(uint64_t)(rank * 100 + i + 1)};
    for (size_t j = 0; j < all / element; j++) {
      double value = test_random_normal(&random) * exp(3 * test_random_normal(&random));
      // NaNs of sums are the device's.
      if (j % 11 == 3) value = rank % 2 ? 0.0 : -0.0;
      if (j % 13 == (size_t)rank && reduction != FP8COMM_SUM) value = NAN;
      if (dtype == FP8COMM_INT64 || dtype == FP8COMM_BYTE) {
        const uint64_t bits = test_random_bits(&random);
        memcpy(in + off + j * element, &bits, element);
      } else {
        put(dtype, in + off, (int64_t)j, value);
      }
    }
    memset(out, 0xee, room);
    rank_ok(communicator, fp8core_copy(context, device_in, in, room));
    rank_ok(communicator, fp8core_copy(context, device_out, out, room));
    if (scatters) {
      rank_ok(communicator, fp8comm_reduce_scatter(communicator, in + off, out + off, count, dtype, reduction));
      rank_ok(communicator,
              fp8comm_reduce_scatter(communicator, device_in + off, device_out + off, count, dtype, reduction));
    } else {
      rank_ok(communicator, fp8comm_all_reduce(communicator, in + off, out + off, count, dtype, reduction));
      rank_ok(communicator,
              fp8comm_all_reduce(communicator, device_in + off, device_out + off, count, dtype, reduction));
    }
    rank_ok(communicator, fp8core_copy(context, back, device_out, room));
    rank_check(communicator, memcmp(back, out, room) == 0, "%s of %lld %s, reduction %d, differs from host memory's",
               scatters ? "reduce_scatter" : "all_reduce", (long long)count, fp8comm_dtype_name(dtype), (int)reduction);
    if (scatters) continue;
    // In place.
    rank_ok(communicator, fp8comm_all_reduce(communicator, device_in, device_in, count, dtype, reduction));
    rank_ok(communicator, fp8core_copy(context, back, device_in, bytes));
    rank_check(communicator, memcmp(back, out, bytes) == 0, "all_reduce of %lld %s, reduction %d, differs in place",
               (long long)count, fp8comm_dtype_name(dtype), (int)reduction);
  }
  rank_ok(communicator, fp8core_free(context, device_in));
  rank_ok(communicator, fp8core_free(context, device_out));
  free(in);
  free(out);
  free(back);
}

static void check_fp8_sum(fp8comm_communicator *communicator, void *data) {
  const device_case *one = data;
  rank_ok(communicator, use(communicator, one->path));
  reduce(communicator, one);
}

static void check_moves(fp8comm_communicator *communicator, void *data) {
  const device_case *one = data;
  const int64_t count = one->count;
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  const size_t total = (size_t)count * (size_t)size * 4;
  float *host = calloc(1, total + 4);
  for (int64_t i = 0; i < count * size; i++) host[i] = (float)value_of(rank, i, FP8COMM_FP32);
  float *in = on_device(context, host, total), *out = on_device(context, NULL, total);
  rank_check(communicator, host && in && out, "memory: %s", fp8core_last_error());
  rank_ok(communicator, use(communicator, one->path));
  rank_ok(communicator, fp8comm_all_gather(communicator, in, out, count, FP8COMM_FP32));
  rank_ok(communicator, fp8core_copy(context, host, out, total));
  for (int64_t i = 0; i < count * size; i++)
    rank_check(communicator, (double)host[i] == value_of((int)(i / count), i % count, FP8COMM_FP32),
               "all_gather (%s) of %lld: element %lld is %g", one->path, (long long)count, (long long)i,
               (double)host[i]);
  // In place.
  rank_ok(communicator, fp8core_copy(context, out + rank * count, in, (size_t)count * 4));
  rank_ok(communicator, fp8comm_all_gather(communicator, out + rank * count, out, count, FP8COMM_FP32));
  rank_ok(communicator, fp8core_copy(context, host, out, total));
  for (int64_t i = 0; i < count * size; i++)
    rank_check(communicator, (double)host[i] == value_of((int)(i / count), i % count, FP8COMM_FP32),
               "all_gather in place (%s) of %lld", one->path, (long long)count);
  rank_ok(communicator, fp8comm_all_to_all(communicator, in, out, count, FP8COMM_FP32));
  rank_ok(communicator, fp8core_copy(context, host, out, total));
  for (int from = 0; from < size; from++) {
    for (int64_t i = 0; i < count; i++)
      rank_check(communicator, (double)host[from * count + i] == value_of(from, rank * count + i, FP8COMM_FP32),
                 "all_to_all (%s) of %lld", one->path, (long long)count);
  }
  for (int root = 0; root < size; root += root + 1) {
    rank_ok(communicator, fp8core_copy(context, out, in, (size_t)count * 4));
    rank_ok(communicator, fp8comm_broadcast(communicator, out, count, FP8COMM_FP32, root));
    rank_ok(communicator, fp8core_copy(context, host, out, (size_t)count * 4));
    for (int64_t i = 0; i < count; i++)
      rank_check(communicator, (double)host[i] == value_of(root, i, FP8COMM_FP32), "broadcast (%s) of %lld from %d",
                 one->path, (long long)count, root);
  }
  // Sizes of each rank's own, some of them none.
  int64_t counts[MOST_RANKS], before = 0;
  for (int i = 0; i < size; i++) counts[i] = i % 3 == 1 ? 0 : (count + i) % (count + 1);
  rank_ok(communicator, fp8comm_all_gatherv(communicator, in, out, counts, FP8COMM_FP32));
  rank_ok(communicator, fp8core_copy(context, host, out, total));
  for (int from = 0; from < size; before += counts[from++]) {
    for (int64_t i = 0; i < counts[from]; i++)
      rank_check(communicator, (double)host[before + i] == value_of(from, i, FP8COMM_FP32), "all_gatherv (%s) of %lld",
                 one->path, (long long)count);
  }
  // A ring of messages, twice each, which every rank begins by sending; and one of them in host memory.
  if (size > 1) {
    fp8comm_request *sends[3], *receives[3];
    int64_t token = rank, received = -1;
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    for (int i = 0; i < 2; i++) {
      rank_ok(communicator, fp8comm_send_start(communicator, in + i * count, count, FP8COMM_FP32, right, &sends[i]));
      rank_ok(communicator, fp8comm_recv_start(communicator, out + i * count, count, FP8COMM_FP32, left, &receives[i]));
    }
    rank_ok(communicator, fp8comm_recv_start(communicator, &received, 1, FP8COMM_INT64, left, &receives[2]));
    rank_ok(communicator, fp8comm_send_start(communicator, &token, 1, FP8COMM_INT64, right, &sends[2]));
    for (int i = 2; i >= 0; i--) {
      rank_ok(communicator, fp8comm_request_wait(&sends[i]));
      rank_ok(communicator, fp8comm_request_wait(&receives[i]));
    }
    rank_check(communicator, received == left, "the message in host memory is %lld", (long long)received);
    rank_ok(communicator, fp8core_copy(context, host, out, (size_t)count * 8));
    for (int64_t i = 0; i < 2 * count; i++)
      rank_check(communicator, (double)host[i] == value_of(left, i, FP8COMM_FP32), "message (%s) of %lld", one->path,
                 (long long)count);
  }
  rank_ok(communicator, fp8comm_barrier(communicator));
  rank_ok(communicator, fp8core_free(context, in));
  rank_ok(communicator, fp8core_free(context, out));
  free(host);
}

// As many as there are GPUs, for NCCL.
static int most_ranks(const char *path) {
  const int all = MOST_RANKS;
  return strcmp(path, "nccl") != 0 || devices > all ? all : devices;
}

static const int rank_counts[] = {1, 2, 3, 5, 8};
// None, fewer than ranks, odd, and several chunks where chunks are small.
static const int64_t sizes[] = {0, 1, 7, 1023, 20001};

// Which way data went: only the staged one has page-locked memory in between.
static void run_watched(int ranks, rank_function function, device_case *one) {
#if defined(FP8_TEST_EMULATED)
  const unsigned long long staged = fake_page_locked_bytes(), sent = aware_sent_bytes();
  run_ranks(ranks, 0, function, one);
  const int by_transport = strcmp(one->path, "threads") == 0, by_host = strcmp(one->path, "staged") == 0;
  assert_int_equal(fake_page_locked_bytes() > staged, by_host && ranks > 1 && one->count > 0);
  assert_int_equal(aware_sent_bytes() > sent, by_transport && ranks > 1 && one->count > 0);
#else
  run_ranks(ranks, 0, function, one);
#endif
}

static void reductions(void **unused) {
  (void)unused;
  for (size_t p = 0; p < path_count; p++) {
    for (size_t r = 0; r < COUNT(rank_counts); r++) {
      for (size_t s = 0; s < COUNT(sizes) && rank_counts[r] <= most_ranks(paths[p]); s++) {
        device_case one = {paths[p], FP8COMM_FP32, FP8COMM_SUM, sizes[s], 0};
        run_watched(rank_counts[r], check_reduce, &one);
        if (strcmp(paths[p], "threads") == 0) run_watched(rank_counts[r], check_bits, &one);
      }
    }
  }
}

static void moves(void **unused) {
  (void)unused;
  for (size_t p = 0; p < path_count; p++) {
    for (size_t r = 0; r < COUNT(rank_counts); r++) {
      for (size_t s = 1; s < COUNT(sizes) && rank_counts[r] <= most_ranks(paths[p]); s++) {
        device_case one = {paths[p], FP8COMM_FP32, FP8COMM_SUM, sizes[s], 0};
        run_watched(rank_counts[r], check_moves, &one);
      }
    }
  }
}

// FP8 is added up by NCCL alone, from compute capability 9.0 on.
static void fp8_sums(void **unused) {
  (void)unused;
  int major, minor;
  assert_ok(fp8core_cuda_compute_capability(contexts[0], &major, &minor));
  for (size_t p = 0; p < path_count; p++) {
    for (int dtype = FP8COMM_E4M3; dtype <= FP8COMM_E5M2; dtype++) {
      const int refused = strcmp(paths[p], "nccl") != 0 || major < 9;
      device_case one = {paths[p], (fp8comm_dtype)dtype, FP8COMM_SUM, 1000, refused};
      run_ranks(most_ranks(paths[p]) < 3 ? most_ranks(paths[p]) : 3, 0, check_fp8_sum, &one);
    }
  }
}

// --- Streams, splits, and host memory beside ---

static void check_overlap(fp8comm_communicator *communicator, void *data) {
  const char *path = data;
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  enum { REQUESTS = 4, ELEMENTS = 5000 };
  float *host = calloc(ELEMENTS, 4), *buffers[REQUESTS];
  fp8comm_request *requests[REQUESTS];
  rank_ok(communicator, use(communicator, path));
  for (int i = 0; i < REQUESTS; i++) {
    for (int j = 0; j < ELEMENTS; j++) host[j] = (float)(rank + i + j % 7);
    buffers[i] = on_device(context, host, ELEMENTS * 4);
    rank_check(communicator, buffers[i] != NULL, "memory: %s", fp8core_last_error());
    rank_ok(communicator, fp8comm_all_reduce_start(communicator, buffers[i], buffers[i], ELEMENTS, FP8COMM_FP32,
                                                   FP8COMM_SUM, &requests[i]));
  }
  // Host memory goes its own way meanwhile.
  int64_t sum = rank;
  rank_ok(communicator, fp8comm_all_reduce(communicator, &sum, &sum, 1, FP8COMM_INT64, FP8COMM_SUM));
  rank_check(communicator, sum == size * (size - 1) / 2, "the sum in host memory is %lld", (long long)sum);
  for (int i = REQUESTS - 1; i >= 0; i--) {
    rank_ok(communicator, fp8comm_request_wait(&requests[i]));
    rank_ok(communicator, fp8core_copy(context, host, buffers[i], ELEMENTS * 4));
    for (int j = 0; j < ELEMENTS; j++) {
      const int right = size * (size - 1) / 2 + size * (i + j % 7);
      rank_check(communicator, host[j] == (float)right, "request %d: element %d is %g, expected %d", i, j,
                 (double)host[j], right);
    }
    rank_ok(communicator, fp8core_free(context, buffers[i]));
  }
  free(host);
}

// A call comes after what the context's stream was given before and has not done: what is sent is what a copy there
// brings, and what is received does not overwrite what a copy there still reads.
static void check_order(fp8comm_communicator *communicator, void *data) {
#if defined(FP8_TEST_EMULATED)
  enum { ELEMENTS = 5000 };
#else
  enum { ELEMENTS = 8 << 20 };
#endif
  const size_t bytes = (size_t)ELEMENTS * 4;
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  void *stream, *locked[2] = {NULL, NULL};
  rank_ok(communicator, use(communicator, data));
  rank_ok(communicator, fp8core_cuda_stream(context, &stream));
  float *in = on_device(context, NULL, bytes), *out = on_device(context, NULL, bytes * (size_t)size);
  rank_check(communicator,
             in && out && cudaHostAlloc(&locked[0], bytes, cudaHostAllocDefault) == cudaSuccess &&
               cudaHostAlloc(&locked[1], bytes, cudaHostAllocDefault) == cudaSuccess,
             "memory");
  float *values = locked[0], *before = locked[1], *host = malloc(bytes * (size_t)size);
  for (int round = 0; round < 3; round++) {
    const int root = round % size;
    for (int i = 0; i < ELEMENTS; i++) values[i] = (float)(rank + 10 * round + i % 100);
    for (size_t i = 0; i < (size_t)ELEMENTS * (size_t)size; i++) host[i] = (float)(-1 - round);
    rank_ok(communicator, fp8core_copy(context, out, host, bytes * (size_t)size));
    rank_check(communicator,
               cudaMemcpyAsync(in, values, bytes, cudaMemcpyDefault, (cudaStream_t)stream) == cudaSuccess &&
                 cudaMemcpyAsync(before, out, bytes, cudaMemcpyDefault, (cudaStream_t)stream) == cudaSuccess,
               "copies");
    if (round == 0) rank_ok(communicator, fp8comm_all_gather(communicator, in, out, ELEMENTS, FP8COMM_FP32));
    if (round == 1 && size > 1) {
      fp8comm_request *sending;
      rank_ok(communicator, fp8comm_send_start(communicator, in, ELEMENTS, FP8COMM_FP32, (rank + 1) % size, &sending));
      rank_ok(communicator, fp8comm_recv(communicator, out, ELEMENTS, FP8COMM_FP32, (rank + size - 1) % size));
      rank_ok(communicator, fp8comm_request_wait(&sending));
    }
    float *at_root = rank == root ? in : out;
    if (round == 2) rank_ok(communicator, fp8comm_broadcast(communicator, at_root, ELEMENTS, FP8COMM_FP32, root));
    rank_ok(communicator, fp8core_copy(context, host, round == 2 ? at_root : out, bytes * (size_t)(round ? 1 : size)));
    rank_check(communicator, cudaStreamSynchronize((cudaStream_t)stream) == cudaSuccess, "the stream");
    for (int i = 0; i < ELEMENTS * (round ? 1 : size); i++) {
      const int from = round == 0 ? i / ELEMENTS : round == 1 ? (rank + size - 1) % size : root;
      if (round == 1 && size == 1) break;
      const float right = (float)(from + 10 * round + i % ELEMENTS % 100);
      rank_check(communicator, host[i] == right, "%s, round %d: element %d is %g, expected %g", (const char *)data,
                 round, i, (double)host[i], (double)right);
    }
    for (int i = 0; i < ELEMENTS; i++)
      rank_check(communicator, before[i] == (float)(-1 - round), "%s, round %d: element %d was overwritten with %g",
                 (const char *)data, round, i, (double)before[i]);
  }
  (void)cudaFreeHost(locked[0]);
  (void)cudaFreeHost(locked[1]);
  rank_ok(communicator, fp8core_free(context, in));
  rank_ok(communicator, fp8core_free(context, out));
  free(host);
}

static void check_split(fp8comm_communicator *communicator, void *data) {
  const char *path = data;
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  fp8comm_communicator *part;
  rank_ok(communicator, use(communicator, path));
  // The last rank is in none.
  rank_ok(communicator, fp8comm_communicator_split(communicator, rank == size - 1 ? -1 : rank % 2, -rank, &part));
  int64_t value = 1 + rank;
  int64_t *device = on_device(context, &value, 8);
  rank_check(communicator, device != NULL, "memory: %s", fp8core_last_error());
  if (part) {
    rank_check(communicator, strcmp(fp8comm_communicator_device_path(part), path) == 0, "the part's path is %s",
               fp8comm_communicator_device_path(part));
    rank_ok(communicator, fp8comm_all_reduce(part, device, device, 1, FP8COMM_INT64, FP8COMM_SUM));
    int64_t right = 0;
    for (int i = rank % 2; i < size - 1; i += 2) right += 1 + i;
    rank_ok(communicator, fp8core_copy(context, &value, device, 8));
    rank_check(communicator, value == right, "the part's sum is %lld, expected %lld", (long long)value,
               (long long)right);
    rank_refused(communicator, fp8comm_communicator_use_device(part, context, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
                 "has a device already");
  }
  rank_ok(communicator, fp8comm_all_reduce(communicator, device, device, 1, FP8COMM_INT64, FP8COMM_MAX));
  rank_ok(communicator, fp8core_free(context, device));
  fp8comm_communicator_destroy(&part);
}

static void streams_and_splits(void **unused) {
  (void)unused;
  for (size_t p = 0; p < path_count; p++) {
    const int most = most_ranks(paths[p]);
    for (int ranks = 1; ranks <= most; ranks = ranks == 1 ? 3 : ranks + 2) {
      run_ranks(ranks, 0, check_overlap, (void *)(uintptr_t)paths[p]);
      run_ranks(ranks, 0, check_order, (void *)(uintptr_t)paths[p]);
      run_ranks(ranks, 0, check_split, (void *)(uintptr_t)paths[p]);
    }
  }
}

// --- Arguments ---

static void check_arguments(fp8comm_communicator *communicator, void *data) {
  fp8core_context *context = context_of(communicator), *host = data;
  float values[8] = {0};
  float *device = on_device(context, values, sizeof(values));
  fp8comm_device_options options = fp8comm_device_options_default();
  rank_check(communicator, device != NULL, "memory: %s", fp8core_last_error());
  rank_refused(communicator, fp8comm_communicator_use_device(NULL, context, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "communicator is NULL");
  rank_refused(communicator, fp8comm_communicator_use_device(communicator, NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "context is NULL");
  rank_refused(communicator, fp8comm_communicator_use_device(communicator, host, NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "context is of the CPU");
  options.path = "carrier pigeon";
  rank_refused(communicator, fp8comm_communicator_use_device(communicator, context, &options),
               FP8CORE_ERROR_INVALID_ARGUMENT, "path is \"carrier pigeon\"");
  options.size = 3;
  rank_refused(communicator, fp8comm_communicator_use_device(communicator, context, &options),
               FP8CORE_ERROR_VERSION_MISMATCH, "size 3");
  rank_check(communicator, strcmp(fp8comm_communicator_device_path(communicator), "none") == 0, "path is not none");
  rank_ok(communicator, use(communicator, "staged"));
  rank_refused(communicator, use(communicator, "staged"), FP8CORE_ERROR_INVALID_ARGUMENT, "has a device already");
  rank_refused(communicator, fp8comm_all_reduce(communicator, device, values, 8, FP8COMM_FP32, FP8COMM_SUM),
               FP8CORE_ERROR_INVALID_ARGUMENT, "send is in device memory and receive in host memory");
  // Nothing is broken by it.
  rank_ok(communicator, fp8comm_all_reduce(communicator, device, device, 8, FP8COMM_FP32, FP8COMM_SUM));
  if (devices > 1) {
    fp8core_context *other = contexts[(fp8comm_communicator_rank(communicator) + 1) % 2];
    if (fp8comm_communicator_rank(communicator) == 0) {
      float *elsewhere = on_device(other, values, sizeof(values));
      rank_refused(communicator, fp8comm_broadcast(communicator, elsewhere, 8, FP8COMM_FP32, 0),
                   FP8CORE_ERROR_INVALID_ARGUMENT, "data is in the memory of CUDA device 1");
      rank_ok(communicator, fp8core_free(other, elsewhere));
    }
  }
  rank_ok(communicator, fp8core_free(context, device));
}

typedef struct choice_case {
  // Both ranks have one GPU.
  int shared;
  // Ranks, from 0 on, whose transport takes device memory.
  int aware;
} choice_case;

// NULL chooses NCCL where every rank has a GPU of its own, else a transport that takes device memory on every rank; who
// asks for one of them is told why not.
static void check_choice(fp8comm_communicator *communicator, void *data) {
  const choice_case *one = data;
  const int rank = fp8comm_communicator_rank(communicator);
  fp8core_context *context = contexts[one->shared ? devices * rank : rank];
  fp8comm_device_options options = fp8comm_device_options_default();
  if (rank < one->aware) (void)make_aware(communicator);
  options.path = "nccl";
  if (one->shared || !nccl) {
    rank_refused(communicator, fp8comm_communicator_use_device(communicator, context, &options),
                 FP8CORE_ERROR_NOT_SUPPORTED, !nccl ? "rank 0 has no NCCL" : "ranks 0 and 1 have the same GPU");
  }
  options.path = "ucx";
  if (one->aware < 2) {
    char text[128];
    (void)snprintf(text, sizeof(text), "the transport \"threads\" of rank %d takes no memory of CUDA devices",
                   one->aware);
    rank_refused(communicator, fp8comm_communicator_use_device(communicator, context, &options),
                 FP8CORE_ERROR_NOT_SUPPORTED, text);
    if (rank >= one->aware)
      rank_check(communicator, strstr(fp8core_last_error(), "(here: the transport \"threads\" moves host memory only)"),
                 "\"%s\" lacks the reason", fp8core_last_error());
  }
  rank_ok(communicator, fp8comm_communicator_use_device(communicator, context, NULL));
  const char *right = !one->shared && nccl ? "nccl"
                      : one->aware == 2    ? "threads"
                                           : "staged",
             *path = fp8comm_communicator_device_path(communicator);
  rank_check(communicator, strcmp(path, right) == 0, "path is %s, expected %s", path, right);
}

// With one rank nothing travels, so the transport bears every memory.
static void check_alone(void) {
  static const char *const wanted[] = {NULL, "staged", "ucx", "self"};
  static const char *const right[] = {"staged", "staged", "self", "self"};
  for (size_t i = 0; i < COUNT(wanted); i++) {
    fp8comm_communicator *alone;
    float values[100], back[100];
    assert_ok(fp8comm_communicator_create(&alone, 0, 1, NULL, NULL, NULL));
    assert_ok(use(alone, wanted[i]));
    assert_string_equal(fp8comm_communicator_device_path(alone), right[i]);
    for (int j = 0; j < 100; j++) values[j] = (float)(j + (int)i);
    float *in = on_device(contexts[0], values, sizeof(values)), *out = on_device(contexts[0], NULL, sizeof(values));
    assert_true(in && out);
    assert_ok(fp8comm_all_gather(alone, in, out, 100, FP8COMM_FP32));
    assert_ok(fp8core_copy(contexts[0], back, out, sizeof(back)));
    assert_memory_equal(back, values, sizeof(values));
    assert_ok(fp8core_free(contexts[0], in));
    assert_ok(fp8core_free(contexts[0], out));
    fp8comm_communicator_destroy(&alone);
  }
}

static void arguments(void **unused) {
  (void)unused;
  fp8core_context *host;
  assert_ok(fp8core_context_create(&host, NULL));
  run_ranks(1, 0, check_arguments, host);
  run_ranks(2, 0, check_arguments, host);
  fp8core_context_destroy(&host);
  assert_string_equal(fp8comm_communicator_device_path(NULL), "none");
  check_alone();
  for (int aware = 0; aware <= (strcmp(paths[path_count - 1], "threads") == 0 ? 2 : 0); aware++) {
    choice_case one = {1, aware};
    if (devices < MOST_RANKS) run_ranks(2, 0, check_choice, &one);
    one.shared = 0;
    if (devices > 1) run_ranks(2, 0, check_choice, &one);
  }
}

// --- Ranks that do not agree, do not come, or leave ---

typedef struct failure_case {
  const char *path;
  int what;
} failure_case;

enum { OTHER_COUNT, OTHER_OPERATION, OTHER_MEMORY, OTHER_MESSAGE, ABSENT, ABORTS, LEAVES, LEAVES_LATER, FAILURES };

static fp8core_status odd_call(fp8comm_communicator *communicator, int what, float *in, float *out, int odd) {
  static float host[4096];
  const int rank = fp8comm_communicator_rank(communicator), size = fp8comm_communicator_size(communicator);
  switch (what) {
  case OTHER_COUNT: return fp8comm_all_reduce(communicator, in, out, odd ? 100 : 101, FP8COMM_FP32, FP8COMM_SUM);
  case OTHER_OPERATION:
    return odd ? fp8comm_all_gather(communicator, in, out, 10, FP8COMM_FP32)
               : fp8comm_all_reduce(communicator, in, out, 10, FP8COMM_FP32, FP8COMM_SUM);
  case OTHER_MEMORY:
    return odd ? fp8comm_all_reduce(communicator, host, host, 4096, FP8COMM_FP32, FP8COMM_SUM)
               : fp8comm_all_reduce(communicator, in, in, 4096, FP8COMM_FP32, FP8COMM_SUM);
  default:
    if (rank == 0) return fp8comm_send(communicator, in, 2000, FP8COMM_FP32, size - 1);
    if (rank == size - 1) return fp8comm_recv(communicator, out, 2001, FP8COMM_FP32, 0);
    return fp8comm_all_reduce(communicator, in, out, 10, FP8COMM_FP32, FP8COMM_SUM);
  }
}

// Buffers of a request that still runs when its rank leaves.
static void *left_behind[2];

// The last rank agrees, but goes before its device has done its part; well before the time is over.
static fp8core_status late(fp8comm_communicator *communicator, float *in, float *out) {
  fp8comm_request *request;
  const int last = fp8comm_communicator_rank(communicator) == fp8comm_communicator_size(communicator) - 1;
  const fp8core_status status =
    fp8comm_all_reduce_start(communicator, in, out, 10000, FP8COMM_FP32, FP8COMM_SUM, &request);
  // Its part was never given to the device: nobody has tested or waited.
  return status == FP8CORE_OK && !last ? fp8comm_request_wait(&request) : status;
}

static void check_failure(fp8comm_communicator *communicator, void *data) {
  const failure_case *one = data;
  fp8core_context *context = context_of(communicator);
  const int size = fp8comm_communicator_size(communicator), rank = fp8comm_communicator_rank(communicator);
  float *in = on_device(context, NULL, 65536), *out = on_device(context, NULL, 65536);
  rank_check(communicator, in && out, "memory: %s", fp8core_last_error());
  rank_ok(communicator, use(communicator, one->path));
  // All have it before one fails, which may overtake the barrier.
  (void)fp8comm_barrier(communicator);
  if (one->what >= ABSENT && one->what != LEAVES_LATER)
    rank_ok(communicator, fp8comm_communicator_set_timeout(communicator, 1));
  const double start = now();
  const int last = rank == size - 1;
  if (one->what < ABSENT) {
    const fp8core_status status = odd_call(communicator, one->what, in, out, last);
    // A sender may be done before; its next call fails.
    if (status != FP8CORE_OK || one->what != OTHER_MESSAGE) {
      rank_check(communicator, status == FP8CORE_ERROR_INVALID_ARGUMENT && strstr(fp8core_last_error(), "do not agree"),
                 "case %d: %s, \"%s\"", one->what, fp8core_status_string(status), fp8core_last_error());
    }
    rank_check(communicator, fp8comm_barrier(communicator) != FP8CORE_OK, "the communicator is not broken");
    rank_check(communicator, now() - start < 5, "it took %g s", now() - start);
  } else if (last) {
    // Beyond the time of the others; gone at once where it leaves.
    const struct timespec time = {3, 0};
    if (one->what == ABORTS) rank_ok(communicator, fp8comm_communicator_abort(communicator, "out of patience"));
    if (one->what == ABSENT) (void)nanosleep(&time, NULL);
    if (one->what == LEAVES_LATER) {
      left_behind[0] = in;
      left_behind[1] = out;
      rank_ok(communicator, late(communicator, in, out));
      return;
    }
  } else {
    const fp8core_status status = one->what == LEAVES_LATER
                                    ? late(communicator, in, out)
                                    : fp8comm_all_reduce(communicator, in, out, 10000, FP8COMM_FP32, FP8COMM_SUM);
    char name[32];
    (void)snprintf(name, sizeof(name), "rank %d", size - 1);
    rank_check(communicator, status == FP8CORE_ERROR_TIMEOUT || status == FP8CORE_ERROR_PEER, "case %d: %s (%s)",
               one->what, fp8core_status_string(status), fp8core_last_error());
    rank_check(communicator, strstr(fp8core_last_error(), name), "\"%s\" does not name %s", fp8core_last_error(), name);
    // The one that leaves waits a moment for NCCL's end.
    rank_check(communicator, now() - start < (one->what == LEAVES_LATER ? 10 : 4), "it took %g s", now() - start);
  }
  rank_ok(communicator, fp8core_free(context, in));
  rank_ok(communicator, fp8core_free(context, out));
}

static void failures(void **unused) {
  (void)unused;
  for (size_t p = 0; p < path_count; p++) {
    const int ranks = most_ranks(paths[p]) < 4 ? most_ranks(paths[p]) : 4;
    for (int what = 0; what < FAILURES && ranks > 1; what++) {
      failure_case one = {paths[p], what};
      run_ranks(ranks, 20, check_failure, &one);
      for (int i = 0; i < 2; i++) {
        assert_ok(fp8core_free(contexts[ranks - 1], left_behind[i]));
        left_behind[i] = NULL;
      }
    }
  }
}

static void check_paths_differ(fp8comm_communicator *communicator, void *data) {
  (void)data;
  const int rank = fp8comm_communicator_rank(communicator);
  rank_refused(communicator, use(communicator, rank == 1 ? "staged" : NULL), FP8CORE_ERROR_INVALID_ARGUMENT,
               "path is \"staged\" on rank 1, but \"the best\" on rank 0");
  // All the same, so that nothing is broken.
  rank_ok(communicator, use(communicator, "staged"));
}

static void paths_differ(void **unused) {
  (void)unused;
  run_ranks(3, 0, check_paths_differ, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(arguments), cmocka_unit_test(paths_differ),       cmocka_unit_test(moves),
    cmocka_unit_test(fp8_sums),  cmocka_unit_test(streams_and_splits), cmocka_unit_test(reductions),
    cmocka_unit_test(failures),
  };
  const int opened = open_devices(contexts, MOST_RANKS, &devices);
  if (opened != 0) return opened;
  nccl = have_nccl(contexts[0]);
  if (nccl) paths[path_count++] = "nccl";
#if defined(FP8_TEST_EMULATED)
  paths[path_count++] = "threads";
#endif
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  for (int i = 0; i < MOST_RANKS; i++) fp8core_context_destroy(&contexts[i]);
  return failed;
}
