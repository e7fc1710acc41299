/** \file
 * Returns a status that is not FP8CORE_OK, with the message that the call has left.
 */
#ifndef FP8LM_TRY_H
#define FP8LM_TRY_H

#include "fp8core/status.h"

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    const fp8core_status try_status = (call);                                                                          \
    if (try_status != FP8CORE_OK) return try_status;                                                                   \
  } while (0)

#endif
