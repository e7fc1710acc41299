// In builds without PMIx.
#include <stdlib.h>

#include "bootstrap.h"

int fp8comm_pmix_is_there(void) { return getenv("PMIX_RANK") && getenv("PMIX_NAMESPACE"); }

fp8core_status fp8comm_pmix_create(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap) {
  (void)wait;
  *bootstrap = NULL;
  return fp8core_set_last_error(
    FP8CORE_ERROR_NOT_SUPPORTED,
    "this process was started with PMIx, but this build of libfp8comm has none (-Dpmix=disabled, or "
    "PMIx was not found); RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do without");
}
