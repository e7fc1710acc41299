#include "fp8zero/version.h"

#define STRING(x) #x
#define EXPANDED_STRING(x) STRING(x)

const char *fp8zero_version(void) {
  return EXPANDED_STRING(FP8ZERO_VERSION_MAJOR) "." EXPANDED_STRING(FP8ZERO_VERSION_MINOR) "." EXPANDED_STRING(
    FP8ZERO_VERSION_PATCH);
}

int fp8zero_api_version(void) { return FP8ZERO_API_VERSION; }
