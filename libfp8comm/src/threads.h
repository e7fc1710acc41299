// The transport between threads of one process: messages are copied from the sender's buffer into the receiver's.
#ifndef FP8COMM_THREADS_H
#define FP8COMM_THREADS_H

#include "transport.h"

// What the ranks of one group share; lives until its last endpoint is destroyed.
typedef struct fp8comm_hub fp8comm_hub;

fp8core_status fp8comm_hub_create(int size, fp8comm_hub **hub);
// For a hub of which no endpoint was made.
void fp8comm_hub_destroy(fp8comm_hub *hub);
// Every rank's endpoint is to be made before any is used; options->all_gather is not needed.
fp8core_status fp8comm_hub_endpoint(fp8comm_hub *hub, const fp8comm_endpoint_options *options,
                                    fp8comm_endpoint **endpoint);

#endif
