// Memory of every rank of a communicator that all of them read in place: see internal.h.
#include <stdlib.h>
#include <string.h>

#include "internal.h"

// This rank's own memory. Whether it has any.
static int share(fp8comm_communicator *communicator, size_t bytes, fp8comm_window *window, fp8comm_segment_name *name) {
  fp8comm_endpoint *endpoint = communicator->shared->endpoint;
  void *address;
  if (!window->ranks || !window->segments || !endpoint->transport->share) return 0;
  if (endpoint->transport->share(endpoint, bytes, &window->segments[communicator->rank], &address, name) != FP8CORE_OK)
    return 0;
  // The first touch is now, not in a step; and readers of the first step do not meet pages that are not there.
  memset(address, 0, bytes);
  window->own = address;
  window->ranks[communicator->rank] = address;
  return 1;
}

static int attach(fp8comm_communicator *communicator, fp8comm_window *window, const fp8comm_segment_name *names) {
  fp8comm_endpoint *endpoint = communicator->shared->endpoint;
  for (int rank = 0; rank < communicator->size; rank++) {
    const void *address;
    if (rank == communicator->rank) continue;
    if (endpoint->transport->attach(endpoint, fp8comm_endpoint_rank(communicator, rank), &names[rank],
                                    &window->segments[rank], &address) != FP8CORE_OK)
      return 0;
    window->ranks[rank] = address;
  }
  return 1;
}

// Whether every rank has come so far.
static fp8core_status agree(fp8comm_communicator *communicator, int own, int *all) {
  unsigned char able = (unsigned char)own;
  FP8COMM_TRY(fp8comm_all_reduce(communicator, &able, &able, 1, FP8COMM_BYTE, FP8COMM_MIN));
  *all = able != 0;
  return FP8CORE_OK;
}

static fp8core_status make(fp8comm_communicator *communicator, size_t bytes, fp8comm_window *window,
                           fp8comm_segment_name *names, int *made) {
  fp8comm_segment_name name;
  memset(&name, 0, sizeof(name));
  // Also a rank that has no memory for a window takes part.
  FP8COMM_TRY(agree(communicator, window && names && share(communicator, bytes, window, &name), made));
  if (!*made) return FP8CORE_OK;
  FP8COMM_TRY(fp8comm_all_gather(communicator, &name, names, (int64_t)sizeof(name), FP8COMM_BYTE));
  return agree(communicator, attach(communicator, window, names), made);
}

fp8core_status fp8comm_window_create(fp8comm_communicator *communicator, size_t bytes, fp8comm_window **window) {
  const size_t ranks = (size_t)communicator->size;
  fp8comm_segment_name *names = calloc(ranks, sizeof(*names));
  fp8comm_window *made = calloc(1, sizeof(*made));
  if (made) {
    made->ranks = calloc(ranks, sizeof(*made->ranks));
    made->segments = calloc(ranks, sizeof(*made->segments));
    made->communicator = communicator;
    made->next = communicator->windows;
    communicator->windows = made;
  }
  int all = 0;
  const fp8core_status status = make(communicator, bytes, made, names, &all);
  free(names);
  *window = made;
  if (status != FP8CORE_OK || !all) fp8comm_window_destroy(window);
  return status;
}

static void close_window(fp8comm_window *window) {
  fp8comm_endpoint *endpoint = window->communicator->shared->endpoint;
  fp8comm_window **link = &window->communicator->windows;
  for (int rank = 0; window->segments && rank < window->communicator->size; rank++) {
    if (window->segments[rank]) endpoint->transport->detach(endpoint, &window->segments[rank]);
  }
  while (*link != window) link = &(*link)->next;
  *link = window->next;
  window->communicator = NULL;
}

void fp8comm_windows_close(fp8comm_communicator *communicator) {
  while (communicator->windows) close_window(communicator->windows);
}

void fp8comm_window_destroy(fp8comm_window **window) {
  fp8comm_window *gone = *window;
  *window = NULL;
  if (!gone) return;
  if (gone->communicator) close_window(gone);
  free(gone->segments);
  free(gone->ranks);
  free(gone);
}
