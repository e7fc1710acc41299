#include "fp8core/status.h"

#include <stdarg.h>
#include <stdio.h>

#include "fp8core/version.h"

#define MESSAGE_BYTES 512

static _Thread_local char last_error[MESSAGE_BYTES];

const char *fp8core_status_string(fp8core_status status) {
  switch (status) {
  case FP8CORE_OK: return "success";
  case FP8CORE_ERROR_INVALID_ARGUMENT: return "invalid argument";
  case FP8CORE_ERROR_NOT_SUPPORTED: return "not supported";
  case FP8CORE_ERROR_OUT_OF_MEMORY: return "out of memory";
  case FP8CORE_ERROR_DEVICE: return "device error";
  case FP8CORE_ERROR_VERSION_MISMATCH: return "version mismatch";
  case FP8CORE_ERROR_CORRUPT_DATA: return "corrupt data";
  case FP8CORE_ERROR_TIMEOUT: return "timeout";
  case FP8CORE_ERROR_PEER: return "peer failure";
  case FP8CORE_ERROR_INTERRUPTED: return "interrupted";
  }
  return "unknown status";
}

const char *fp8core_last_error(void) { return last_error; }

fp8core_status fp8core_set_last_error(fp8core_status status, const char *format, ...) {
  if (!format) {
    (void)snprintf(last_error, sizeof(last_error), "%s", fp8core_status_string(status));
    return status;
  }
  // Formatted aside first: an argument may point into the old message.
  char message[MESSAGE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  (void)snprintf(last_error, sizeof(last_error), "%s", length < 0 ? format : message);
  return status;
}

#define STRING(x) #x
#define EXPANDED_STRING(x) STRING(x)

const char *fp8core_version(void) {
  return EXPANDED_STRING(FP8CORE_VERSION_MAJOR) "." EXPANDED_STRING(FP8CORE_VERSION_MINOR) "." EXPANDED_STRING(
    FP8CORE_VERSION_PATCH);
}

int fp8core_api_version(void) { return FP8CORE_API_VERSION; }
