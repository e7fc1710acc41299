// In builds without NCCL.
#include "../device.h"

static fp8core_status not_built(void) {
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED,
                                "this libfp8comm was built without NCCL (the option nccl is off, or CUDA or nccl.h was "
                                "missing)");
}

fp8core_status fp8comm_nccl_version(int *version) {
  *version = 0;
  return not_built();
}

// No communicator ever has NCCL's path, so that nothing calls the others.

fp8core_status fp8comm_nccl_check_fp8(const fp8comm_cuda *cuda) {
  (void)cuda;
  return not_built();
}

fp8core_status fp8comm_nccl_unique_id(void *id) {
  (void)id;
  return not_built();
}

fp8core_status fp8comm_nccl_open(fp8comm_cuda *cuda, int rank, int size, const void *id, fp8comm_nccl **nccl) {
  (void)cuda, (void)rank, (void)size, (void)id;
  *nccl = NULL;
  return not_built();
}

fp8core_status fp8comm_nccl_poll(fp8comm_nccl *nccl, int *done) {
  (void)nccl;
  *done = 1;
  return not_built();
}

fp8core_status fp8comm_nccl_launch(fp8comm_nccl *nccl, fp8comm_request *const *requests, int count) {
  (void)nccl, (void)requests, (void)count;
  return not_built();
}

void fp8comm_nccl_close(fp8comm_nccl **nccl, int aborts) {
  (void)aborts;
  *nccl = NULL;
}
