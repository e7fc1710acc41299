#include "fp8optim/version.h"

#define STRING(x) #x
#define EXPANDED_STRING(x) STRING(x)

const char *fp8optim_version(void) {
  return EXPANDED_STRING(FP8OPTIM_VERSION_MAJOR) "." EXPANDED_STRING(FP8OPTIM_VERSION_MINOR) "." EXPANDED_STRING(
    FP8OPTIM_VERSION_PATCH);
}

int fp8optim_api_version(void) { return FP8OPTIM_API_VERSION; }
