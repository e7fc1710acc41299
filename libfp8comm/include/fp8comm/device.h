/** \file
 * Communication of device memory. Plain C, without the headers of CUDA and NCCL.
 *
 * A communicator of any transport takes device memory once it was given a CUDA context: every collective then accepts
 * addresses in host memory, as before, and in the memory of the context's GPU; the address tells which. All buffers of
 * a call are of one kind, on every rank of the same (\p counts, roots and the like are the host's always). Reducers
 * with a context on a GPU (gradient.h) need it too.
 *
 * Order: the call works on what the context's stream has been given before it. It has a stream of its own, so that
 * later work of the context overlaps with requests. A request that is done is done on the device too: what is given to
 * any stream afterwards sees its results. Not within a CUDA graph: FP8CORE_ERROR_DEVICE while the stream is captured.
 *
 * Three ways lead to other ranks:
 *
 * - "nccl": NCCL, loaded when it is first wanted (libnccl.so.2, 2.14 or later), with a GPU for each rank. Sums are
 *   NCCL's: the same bits on every rank, and from run to run on the same machines, but 16-bit sums may be rounded more
 *   than once, and NaNs and signed zeros of minima and maxima are NCCL's. E4M3 and E5M2 have all reductions (of the
 *   codes' values, without scales) from NCCL 2.24 and compute capability 9.0 on, else FP8CORE_ERROR_NOT_SUPPORTED.
 * - "ucx": UCX moves device memory as it moves host memory, where it was built with CUDA; several ranks may share a
 *   GPU. Sums are kernels', of the bits that host memory has, but for what NaN a sum gives. The device is the calling
 *   thread's current one within calls. The context is best made before the communicator: some versions of UCX look for
 *   the device only then.
 * - "staged": copies through page-locked host memory, in chunks, around the algorithms for host memory; for every
 *   transport, several ranks may share a GPU. Sums are added in an order that depends on count, chunk and ranks only.
 *   A communicator of one rank copies from device to device.
 *
 * Over any way ranks must agree, as with host memory: every rank's operation, sizes, dtype, reduction, root and kind
 * of memory travel over the host's transport beside the data, and NCCL is given a collective only when the rank before
 * this one agrees, so that ranks that do not are named. Failures and timeouts are those of communicator.h: the time
 * counts from the call, work that the stream was given before it included. A rank that the transport knows to be gone
 * is named a second after, whatever NCCL says. When a rank fails, NCCL's part is aborted on all.
 *
 * NCCL has one queue a rank: ranks begin operations on device memory in the same order, also those of communicators
 * that splits connect, and messages (fp8comm_send() and fp8comm_recv()) among them. Messages that were started one
 * after the other go as one group in the next call that waits or tests, and are done together; so two ranks that send
 * to each other start both messages before they wait. A message whose ranks do not agree fails at the receiver, and
 * then at the sender.
 */
#ifndef FP8COMM_DEVICE_H
#define FP8COMM_DEVICE_H

#include <stddef.h>

#include "communicator.h"
#include "fp8core/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fp8comm_device_options {
  /** sizeof(fp8comm_device_options) as the caller was compiled; another one is FP8CORE_ERROR_VERSION_MISMATCH. */
  size_t size;
  /** "nccl"; "ucx", or the transport's name, for the transport itself; "staged"; or NULL: with several ranks NCCL where
   * each has it and a GPU of its own, else the transport where every rank's takes device memory, else staged. Read
   * during the call. The same on every rank. */
  const char *path;
} fp8comm_device_options;

/** The best path. */
static inline fp8comm_device_options fp8comm_device_options_default(void) {
  fp8comm_device_options options;
  options.size = sizeof(options);
  options.path = NULL;
  return options;
}

/**
 * Lets the communicator, and those that are split from it later, take device memory. Blocking, collective. Once a
 * communicator.
 *
 * \param context of a CUDA device; must outlive the communicator and all that splits connect with it, which it is for.
 *        Used by the same thread.
 * \param options NULL for the defaults.
 * \return FP8CORE_ERROR_INVALID_ARGUMENT when a pointer is NULL, the context is a CPU's, the path is unknown or not the
 *         same on all ranks, the communicator has a device already, or one that a split connects with it has another
 *         context; FP8CORE_ERROR_NOT_SUPPORTED in a build without CUDA, and, on every rank, for "nccl" where some rank
 *         has none or shares a GPU, and for "ucx" where some rank's transport takes no device memory (another one than
 *         UCX, or a UCX without CUDA; with one rank anything serves): the message names the rank;
 *         FP8CORE_ERROR_VERSION_MISMATCH;
 *         FP8CORE_ERROR_DEVICE when CUDA or NCCL fails; those of communicator.h.
 */
FP8COMM_API fp8core_status fp8comm_communicator_use_device(fp8comm_communicator *communicator, fp8core_context *context,
                                                           const fp8comm_device_options *options);

/** "nccl", "staged", or the transport's name ("ucx") where that moves device memory itself; "none" for NULL and for a
 * communicator without a device. Static storage; thread-safe. */
FP8COMM_API const char *fp8comm_communicator_device_path(const fp8comm_communicator *communicator);

#ifdef __cplusplus
}
#endif

#endif
