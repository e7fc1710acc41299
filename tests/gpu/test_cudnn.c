// Plans of cuDNN for attention, made for GPUs that need not be there: cuDNN's heuristics choose, and its kernels are
// compiled and given to a CUDA driver that is played (fake_driver.c, the first argument). Nothing is computed.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "support.h"

#include "cuda/cudnn_attention.h"

static int *driver_kernels;
static const char *driver_kernel;

// What cuDNN wants to know of a GPU, as of NVIDIA's data sheets and the CUDA programming guide.
static const char *properties_of(int capability) {
  static char text[1024];
  const int shared = capability == 80 ? 166912 : capability == 89 || capability == 120 ? 101376 : 232448;
  const int threads = capability == 89 || capability == 120 ? 1536 : 2048;
  const int processors = capability == 80 ? 108 : capability == 100 ? 148 : capability == 120 ? 170 : 132;
  (void)snprintf(text, sizeof(text),
                 "{\"deviceVer\": %d, \"driverVer\": 13000, \"maxGridSize\": [2147483647, 65535, 65535], "
                 "\"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, \"multiProcessorCount\": %d, "
                 "\"warpSize\": 32, \"maxSharedMemoryPerBlock\": 49152, \"maxSharedMemoryPerBlockOptin\": %d, "
                 "\"reservedSharedMemoryPerBlock\": 1024, \"maxRegistersPerSM\": 65536, \"maxCtasPerSM\": 32, "
                 "\"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": %d, \"pciDeviceId\": 0, \"isTccDriver\": 0, "
                 "\"supportCoopLaunch\": 1, \"smClockRateKHz\": 1980000, \"memClockRateKHz\": 3201000, "
                 "\"l2CacheSize\": 62914560, \"deviceName\": \"a GPU\", \"totalGlobalMem\": 85899345920, "
                 "\"cudaDeviceId\": 0}",
                 10 * capability, processors, shared, threads);
  return text;
}

static fp8gpt_cudnn *open_for(int capability) {
  fp8gpt_cudnn *cudnn;
  assert_ok(fp8gpt_cudnn_open(&cudnn, NULL, capability, properties_of(capability)));
  assert_non_null(cudnn);
  return cudnn;
}

static fp8gpt_attention shape_of(int64_t sequences, int64_t length, int heads, int kv_heads, int head_dim) {
  fp8gpt_attention shape;
  memset(&shape, 0, sizeof(shape));
  shape.dtype = FP8CORE_BF16;
  shape.sequences = sequences;
  shape.length = length;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

static void plans(void **state) {
  (void)state;
  static const int capabilities[] = {80, 89, 90, 100, 120};
  const fp8gpt_attention shapes[] = {
    shape_of(16, 1024, 12, 12, 64), shape_of(1, 2048, 32, 32, 128), shape_of(2, 1000, 32, 8, 128),
    shape_of(4, 77, 16, 4, 16),     shape_of(1, 200, 8, 2, 80),
  };
  for (size_t i = 0; i < sizeof(capabilities) / sizeof(*capabilities); i++)
    for (size_t j = 0; j < sizeof(shapes) / sizeof(*shapes); j++) {
      const fp8gpt_attention *shape = &shapes[j];
      fp8gpt_cudnn *cudnn = open_for(capabilities[i]);
      const int before = *driver_kernels;
      assert_ok(fp8gpt_cudnn_plan_forward(cudnn, shape));
      const int64_t forward = fp8gpt_cudnn_workspace_bytes(cudnn, 0);
      // A kernel was compiled, and is one of attention.
      assert_true(*driver_kernels > before);
      assert_non_null(strstr(driver_kernel, "sdpa"));
      assert_ok(fp8gpt_cudnn_plan_backward(cudnn, shape, INT64_MAX));
      const int64_t backward = fp8gpt_cudnn_workspace_bytes(cudnn, 1);
      printf("%d, %lld x %lld, heads %d/%d of %d: workspace %lld and %lld, %s\n", capabilities[i],
             (long long)shape->sequences, (long long)shape->length, shape->heads, shape->kv_heads, shape->head_dim,
             (long long)forward, (long long)backward, driver_kernel);
      assert_true(forward >= 0);
      assert_true(backward >= forward);
      assert_true(strncmp(fp8gpt_cudnn_version(cudnn), "9.", 2) == 0);
      fp8gpt_cudnn_close(&cudnn);
      assert_null(cudnn);
    }
}

static void refusals(void **state) {
  (void)state;
  fp8gpt_cudnn *cudnn = open_for(90);
  fp8gpt_attention shape = shape_of(2, 128, 4, 4, 12);
  assert_fails(fp8gpt_cudnn_plan_forward(cudnn, &shape), FP8CORE_ERROR_NOT_SUPPORTED, "multiple of 8");
  assert_fails(fp8gpt_cudnn_plan_backward(cudnn, &shape, INT64_MAX), FP8CORE_ERROR_NOT_SUPPORTED, "multiple of 8");
  shape = shape_of(2, 1024, 4, 4, 64);
  assert_ok(fp8gpt_cudnn_plan_forward(cudnn, &shape));
  // What gives the same bits keeps all scores: 2 * 4 * 1024 * 1024 of 2 bytes.
  assert_fails(fp8gpt_cudnn_plan_backward(cudnn, &shape, 16 << 20), FP8CORE_ERROR_NOT_SUPPORTED,
               "expected at most 16777216");
  assert_true(fp8gpt_cudnn_workspace_bytes(cudnn, 1) < 16 << 20);
  assert_ok(fp8gpt_cudnn_plan_backward(cudnn, &shape, 32 << 20));
  assert_true(fp8gpt_cudnn_workspace_bytes(cudnn, 1) >= 16 << 20);
  shape = shape_of(3, 77, 4, 1, 16);
  assert_fails(fp8gpt_cudnn_plan_backward(cudnn, &shape, INT64_MAX), FP8CORE_ERROR_NOT_SUPPORTED,
               "sequences * heads * length is 924, expected a multiple of 64");
  fp8gpt_cudnn_close(&cudnn);
  // Heads of 256: not backwards on this GPU.
  cudnn = open_for(89);
  shape = shape_of(1, 128, 2, 2, 256);
  assert_fails(fp8gpt_cudnn_plan_backward(cudnn, &shape, INT64_MAX), FP8CORE_ERROR_NOT_SUPPORTED,
               "less than or equal to 128");
  fp8gpt_cudnn_close(&cudnn);
  fp8gpt_cudnn_close(&cudnn);
}

static void no_gpu(void **state) {
  (void)state;
  fp8gpt_cudnn *cudnn = (fp8gpt_cudnn *)&cudnn;
  // The played driver has none.
  assert_fails(fp8gpt_cudnn_open(&cudnn, NULL, 90, NULL), FP8CORE_ERROR_NOT_SUPPORTED, "cannot be used on this GPU");
  assert_null(cudnn);
  assert_fails(fp8gpt_cudnn_open(&cudnn, NULL, 90, "{\"deviceVer\": 900}"), FP8CORE_ERROR_NOT_SUPPORTED,
               "cuDNN: properties of a GPU");
  assert_null(cudnn);
}

int main(int count, char **arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: test_cudnn PLAYED-DRIVER\n");
    return 1;
  }
  void *driver = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
  if (!driver) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  driver_kernels = (int *)dlsym(driver, "fake_driver_kernels");
  driver_kernel = (const char *)dlsym(driver, "fake_driver_kernel");
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(no_gpu),
    cmocka_unit_test(refusals),
    cmocka_unit_test(plans),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
