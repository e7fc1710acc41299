/** \file
 * Version of the headers, and of the library found at run time.
 *
 * These macros are the only place where the version is written down: the build reads them.
 * The API version is the library's soname.
 */
#ifndef FP8COMM_VERSION_H
#define FP8COMM_VERSION_H

#if defined(__GNUC__)
#  define FP8COMM_API __attribute__((visibility("default")))
#else
#  define FP8COMM_API
#endif

#define FP8COMM_VERSION_MAJOR 0
#define FP8COMM_VERSION_MINOR 1
#define FP8COMM_VERSION_PATCH 0

#define FP8COMM_API_VERSION 0

#ifdef __cplusplus
extern "C" {
#endif

/** Release of the library that is loaded, as "major.minor.patch". Static storage; thread-safe. */
FP8COMM_API const char *fp8comm_version(void);

/** API version (soname) of the library that is loaded. Thread-safe. */
FP8COMM_API int fp8comm_api_version(void);

#ifdef __cplusplus
}
#endif

#endif
