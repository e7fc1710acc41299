#include "fp8gpt/version.h"

#define STRING(x) #x
#define EXPANDED_STRING(x) STRING(x)

const char *fp8gpt_version(void) {
  return EXPANDED_STRING(FP8GPT_VERSION_MAJOR) "." EXPANDED_STRING(FP8GPT_VERSION_MINOR) "." EXPANDED_STRING(
    FP8GPT_VERSION_PATCH);
}

int fp8gpt_api_version(void) { return FP8GPT_API_VERSION; }
