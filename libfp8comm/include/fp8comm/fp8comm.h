/** \file
 * All of libfp8comm.
 */
#ifndef FP8COMM_FP8COMM_H
#define FP8COMM_FP8COMM_H

#include "collectives.h"
#include "communicator.h"
#include "device.h"
#include "gradient.h"
#include "version.h"

#endif
