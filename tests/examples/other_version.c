// What a later release of libfp8comm, with another ABI, says of itself.
#include <fp8comm/version.h>
#include <fp8core/version.h>

int fp8core_api_version(void) { return FP8CORE_API_VERSION; }

int fp8comm_api_version(void) { return FP8COMM_API_VERSION + 1; }
