/** \file
 * All of libfp8optim.
 */
#ifndef FP8OPTIM_FP8OPTIM_H
#define FP8OPTIM_FP8OPTIM_H

#include "adamw.h"
#include "schedule.h"
#include "version.h"

#endif
