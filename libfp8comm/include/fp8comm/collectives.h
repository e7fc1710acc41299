/** \file
 * Collective operations on host memory, and on that of a GPU where the communicator was given one (device.h, which
 * tells what differs).
 *
 * Every rank of a communicator calls the same operations in the same order, with the same counts, dtypes, reductions
 * and roots. Where they do not agree, the call fails with FP8CORE_ERROR_INVALID_ARGUMENT and a message with what one
 * rank asked for and another one expected, and the communicator is broken (communicator.h). Ranks that do not agree
 * exchange no data; a rank that needs nothing from one that does not agree (a broadcast's root, a sender, one whose
 * counts are 0) may have done its part before, and fails in its next call.
 *
 * Each operation comes in two forms. The blocking one returns when this rank's part is done and its buffers may be used
 * again. The form with `_start` returns at once with a request; its buffers must not be touched (sent ones may be read)
 * until fp8comm_request_wait() or fp8comm_request_test() says that it is done. Work goes on within calls of this
 * library only, for all requests at once. Requests may be waited for in any order.
 *
 * Counts are in elements, 0 is fine (the call is still one of all ranks), and a pointer to no elements may be NULL.
 * Alignment is that of bytes. In place means the address that each call names; any other overlap of what is read
 * and what is written is FP8CORE_ERROR_INVALID_ARGUMENT.
 *
 * Results have the same bits on every rank and from run to run: contributions are added in an order that depends on
 * count and number of ranks only. 16-bit formats are added up in FP32 and rounded once, to nearest even (FP16 and BF16
 * overflow to infinity). Minimum and maximum: a NaN anywhere gives the quiet NaN, -0 is below +0.
 *
 * Errors that every call may return: FP8CORE_ERROR_INVALID_ARGUMENT for a pointer that is NULL, a count that is
 * negative or exceeds memory, a dtype, reduction or rank out of range; FP8CORE_ERROR_NOT_SUPPORTED for a reduction that
 * the dtype has not; FP8CORE_ERROR_OUT_OF_MEMORY; FP8CORE_ERROR_PEER and FP8CORE_ERROR_TIMEOUT as told in
 * communicator.h.
 */
#ifndef FP8COMM_COLLECTIVES_H
#define FP8COMM_COLLECTIVES_H

#include <stddef.h>
#include <stdint.h>

#include "communicator.h"
#include "fp8core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Elements of messages. The first five are fp8core_dtype's. */
typedef enum fp8comm_dtype {
  /** Moved only: FP8 sums need scales, see gradient.h. */
  FP8COMM_E4M3 = FP8CORE_E4M3,
  FP8COMM_E5M2 = FP8CORE_E5M2,
  FP8COMM_BF16 = FP8CORE_BF16,
  FP8COMM_FP16 = FP8CORE_FP16,
  FP8COMM_FP32 = FP8CORE_FP32,
  FP8COMM_FP64 = 5,
  FP8COMM_INT64 = 6,
  /** Unsigned, for flags and for anything else: minimum and maximum, no sum. */
  FP8COMM_BYTE = 7
} fp8comm_dtype;

/** Bytes of one element: 1, 1, 2, 2, 4, 8, 8, 1; 0 outside the enum. Thread-safe. */
FP8COMM_API size_t fp8comm_dtype_size(fp8comm_dtype dtype);

/** "e4m3", "e5m2", "bf16", "fp16", "fp32", "fp64", "int64", "byte"; "unknown" outside the enum. Thread-safe. */
FP8COMM_API const char *fp8comm_dtype_name(fp8comm_dtype dtype);

/** INT64 sums wrap around modulo 2^64. */
typedef enum fp8comm_reduction { FP8COMM_SUM = 0, FP8COMM_MIN = 1, FP8COMM_MAX = 2 } fp8comm_reduction;

/** An operation that was started. Opaque. */
typedef struct fp8comm_request fp8comm_request;

/**
 * Works on what goes on and tells whether the request is done. Then, and on failure, frees it and clears the pointer.
 *
 * \param request a cleared pointer counts as done.
 * \param done receives 1 or 0.
 */
FP8COMM_API fp8core_status fp8comm_request_test(fp8comm_request **request, int *done);

/** Waits until the request is done, frees it and clears the pointer, also on failure. A cleared pointer is fine. */
FP8COMM_API fp8core_status fp8comm_request_wait(fp8comm_request **request);

/**
 * The sum, minimum or maximum over all ranks, element by element, to all ranks. Up to a few KiB, or 256 KiB over all
 * ranks, in log2(ranks) steps; above, as reduce-scatter and all-gather, each rank sending twice \p count elements less
 * its own part.
 *
 * \param send \p count elements. In place: \p receive.
 */
FP8COMM_API fp8core_status fp8comm_all_reduce(fp8comm_communicator *communicator, const void *send, void *receive,
                                              int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction);
FP8COMM_API fp8core_status fp8comm_all_reduce_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                                    int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction,
                                                    fp8comm_request **request);

/**
 * The same, of which rank i receives elements i * count to (i + 1) * count.
 *
 * \param send count * size elements.
 * \param receive \p count elements. In place: at this rank's elements of \p send.
 */
FP8COMM_API fp8core_status fp8comm_reduce_scatter(fp8comm_communicator *communicator, const void *send, void *receive,
                                                  int64_t count, fp8comm_dtype dtype, fp8comm_reduction reduction);
FP8COMM_API fp8core_status fp8comm_reduce_scatter_start(fp8comm_communicator *communicator, const void *send,
                                                        void *receive, int64_t count, fp8comm_dtype dtype,
                                                        fp8comm_reduction reduction, fp8comm_request **request);

/**
 * \p count elements of every rank to all, in the order of ranks.
 *
 * \param send \p count elements. In place: at this rank's elements of \p receive.
 * \param receive count * size elements.
 */
FP8COMM_API fp8core_status fp8comm_all_gather(fp8comm_communicator *communicator, const void *send, void *receive,
                                              int64_t count, fp8comm_dtype dtype);
FP8COMM_API fp8core_status fp8comm_all_gather_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                                    int64_t count, fp8comm_dtype dtype, fp8comm_request **request);

/**
 * counts[i] elements of each rank i to all, one after the other.
 *
 * \param counts one a rank, the same on all; read during the call.
 */
FP8COMM_API fp8core_status fp8comm_all_gatherv(fp8comm_communicator *communicator, const void *send, void *receive,
                                               const int64_t *counts, fp8comm_dtype dtype);
FP8COMM_API fp8core_status fp8comm_all_gatherv_start(fp8comm_communicator *communicator, const void *send,
                                                     void *receive, const int64_t *counts, fp8comm_dtype dtype,
                                                     fp8comm_request **request);

/** Elements i * count to (i + 1) * count of \p send to rank i, which receives them at those of the sender's number. Not
 * in place. Both buffers have count * size elements. */
FP8COMM_API fp8core_status fp8comm_all_to_all(fp8comm_communicator *communicator, const void *send, void *receive,
                                              int64_t count, fp8comm_dtype dtype);
FP8COMM_API fp8core_status fp8comm_all_to_all_start(fp8comm_communicator *communicator, const void *send, void *receive,
                                                    int64_t count, fp8comm_dtype dtype, fp8comm_request **request);

/** \p data of \p root to all others' \p data. */
FP8COMM_API fp8core_status fp8comm_broadcast(fp8comm_communicator *communicator, void *data, int64_t count,
                                             fp8comm_dtype dtype, int root);
FP8COMM_API fp8core_status fp8comm_broadcast_start(fp8comm_communicator *communicator, void *data, int64_t count,
                                                   fp8comm_dtype dtype, int root, fp8comm_request **request);

/** Returns when every rank has called it. */
FP8COMM_API fp8core_status fp8comm_barrier(fp8comm_communicator *communicator);
FP8COMM_API fp8core_status fp8comm_barrier_start(fp8comm_communicator *communicator, fp8comm_request **request);

/**
 * A message to one other rank, which must receive as many elements of the same dtype. Messages between two ranks match
 * in the order of the calls; they are independent of collective operations. The blocking form may wait for the
 * receiver.
 */
FP8COMM_API fp8core_status fp8comm_send(fp8comm_communicator *communicator, const void *data, int64_t count,
                                        fp8comm_dtype dtype, int peer);
FP8COMM_API fp8core_status fp8comm_send_start(fp8comm_communicator *communicator, const void *data, int64_t count,
                                              fp8comm_dtype dtype, int peer, fp8comm_request **request);
FP8COMM_API fp8core_status fp8comm_recv(fp8comm_communicator *communicator, void *data, int64_t count,
                                        fp8comm_dtype dtype, int peer);
FP8COMM_API fp8core_status fp8comm_recv_start(fp8comm_communicator *communicator, void *data, int64_t count,
                                              fp8comm_dtype dtype, int peer, fp8comm_request **request);

#ifdef __cplusplus
}
#endif

#endif
