// Sums, minima and maxima of plain elements.
#ifndef FP8COMM_REDUCTIONS_H
#define FP8COMM_REDUCTIONS_H

#include "internal.h"

// FP8CORE_ERROR_NOT_SUPPORTED for what the dtype has not. Both are within their enums.
fp8core_status fp8comm_find_reducer(fp8comm_dtype dtype, fp8comm_reduction reduction, fp8comm_reducer *reducer);

#endif
