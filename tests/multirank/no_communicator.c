// So that the bootstraps link without communicators and transports.
#include "fp8comm/communicator.h"

fp8core_status fp8comm_communicator_create(fp8comm_communicator **communicator, int rank, int size,
                                           fp8comm_out_of_band_all_gather all_gather, void *user_data,
                                           const fp8comm_communicator_options *options) {
  (void)communicator;
  (void)rank;
  (void)size;
  (void)all_gather;
  (void)user_data;
  (void)options;
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "no communicators in this program");
}
