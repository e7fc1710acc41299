// The GPUs of programs whose ranks are threads: one for each rank, taken in turn.
#ifndef FP8_TEST_DEVICES_H
#define FP8_TEST_DEVICES_H

#include <stdio.h>

#include "fp8comm/device.h"
#include "fp8comm/fp8comm.h"
#include "fp8core/fp8core.h"

// 0; 77 and why where there is no GPU, as for a test that is skipped; 1 and why where one cannot be used.
static int open_devices(fp8core_context **contexts, int count, int *devices) {
  *devices = fp8core_device_count(FP8CORE_DEVICE_CUDA);
  if (*devices == 0) {
    printf("skipped: %s\n", fp8core_last_error());
    return 77;
  }
  for (int i = 0; i < count; i++) {
    fp8core_context_options options = fp8core_context_options_default();
    options.device.type = FP8CORE_DEVICE_CUDA;
    options.device.index = i % *devices;
    if (fp8core_context_create(&contexts[i], &options) == FP8CORE_OK) continue;
    printf("a context on device %d: %s\n", i % *devices, fp8core_last_error());
    return 1;
  }
  return 0;
}

// NCCL may be missing, from the build or the machine, and then is not checked; whether it is there, with the reason.
static int have_nccl(fp8core_context *context) {
  fp8comm_communicator *alone;
  fp8comm_device_options options = fp8comm_device_options_default();
  options.path = "nccl";
  if (fp8comm_communicator_create(&alone, 0, 1, NULL, NULL, NULL) != FP8CORE_OK) return 1;
  const fp8core_status status = fp8comm_communicator_use_device(alone, context, &options);
  if (status == FP8CORE_ERROR_NOT_SUPPORTED) printf("without NCCL: %s\n", fp8core_last_error());
  fp8comm_communicator_destroy(&alone);
  return status != FP8CORE_ERROR_NOT_SUPPORTED;
}

#endif
