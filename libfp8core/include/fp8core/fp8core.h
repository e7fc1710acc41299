/** \file All of libfp8core but the CUDA-specific header. */
#ifndef FP8CORE_H
#define FP8CORE_H

#include "cast.h"
#include "context.h"
#include "dtype.h"
#include "gemm.h"
#include "scaling.h"
#include "status.h"
#include "tensor.h"
#include "version.h"

#endif
