#include "fp8comm/version.h"

#define STRING(x) #x
#define EXPANDED_STRING(x) STRING(x)

const char *fp8comm_version(void) {
  return EXPANDED_STRING(FP8COMM_VERSION_MAJOR) "." EXPANDED_STRING(FP8COMM_VERSION_MINOR) "." EXPANDED_STRING(
    FP8COMM_VERSION_PATCH);
}

int fp8comm_api_version(void) { return FP8COMM_API_VERSION; }
