// Cross-memory attach: large messages between processes of one machine in a single copy, which the receiver makes.
//
// UCX has it too, but UCX 1.13 not for connections that notice the end of a peer, and without it copies large messages
// twice, 8 KiB at a time, with both processes awake. Ours needs nothing of a connection but an offer (a tagged message)
// and a receipt (a control message); and as the receiver does all the work, in calls of its own, an operation can be
// cancelled at any time.
#ifndef FP8COMM_CMA_H
#define FP8COMM_CMA_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

// Smaller messages go through UCX: an offer and a receipt cost more than a second copy.
#define FP8COMM_CMA_LEAST 65536

// Whether the user lets UCX have it (UCX_TLS).
int fp8comm_cma_is_allowed(void);

// At most `bytes` bytes of another process; returns how many, or -1 (errno; ESRCH: it is no more).
ssize_t fp8comm_cma_read(pid_t process, uint64_t address, void *destination, size_t bytes);

#endif
