/** \file Export and compiler attributes shared by the headers of libfp8core. */
#ifndef FP8CORE_ATTRIBUTES_H
#define FP8CORE_ATTRIBUTES_H

#if defined(_WIN32)
#  if defined(FP8CORE_BUILDING)
#    define FP8CORE_API __declspec(dllexport)
#  else
#    define FP8CORE_API __declspec(dllimport)
#  endif
#elif defined(__GNUC__)
#  define FP8CORE_API __attribute__((visibility("default")))
#else
#  define FP8CORE_API
#endif

#if defined(__GNUC__)
#  define FP8CORE_PRINTF(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))
#else
#  define FP8CORE_PRINTF(format_index, first_argument)
#endif

#endif
