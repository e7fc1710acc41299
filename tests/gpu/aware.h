// For emulations, in which device memory is memory like any other: a transport that takes it, which only a UCX that was
// built with CUDA does, is any transport that says so.
#ifndef FP8_TEST_AWARE_H
#define FP8_TEST_AWARE_H

#include "fp8comm/communicator.h"

// From now on the transport of the communicator, and of those that splits connect with it, takes device memory. It ends
// the program where it is given other memory than it is told of, or the thread's device is another one.
void aware_make(fp8comm_communicator *communicator);

// Bytes of device memory that such transports have been given to send, so far, of all threads.
unsigned long long aware_sent_bytes(void);

#endif
