/** \file
 * Version of the headers, and of the library found at run time.
 *
 * These macros are the only place where the version is written down: the build reads them.
 * The API version is the library's soname. It moves when the ABI breaks, independently of the release.
 */
#ifndef FP8CORE_VERSION_H
#define FP8CORE_VERSION_H

#include "attributes.h"

#define FP8CORE_VERSION_MAJOR 0
#define FP8CORE_VERSION_MINOR 1
#define FP8CORE_VERSION_PATCH 0

#define FP8CORE_API_VERSION 0

#ifdef __cplusplus
extern "C" {
#endif

/** Release of the library that is loaded, as "major.minor.patch". Static storage; thread-safe. */
FP8CORE_API const char *fp8core_version(void);

/** API version (soname) of the library that is loaded. Equal to FP8CORE_API_VERSION of a matching header. Thread-safe.
 */
FP8CORE_API int fp8core_api_version(void);

#ifdef __cplusplus
}
#endif

#endif
