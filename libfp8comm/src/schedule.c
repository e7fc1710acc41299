// Algorithms, as steps of requests: see internal.h.
#include <string.h>

#include "internal.h"

// A part travels in pieces of about this size: small enough to be added while they are in the second-level cache,
// large enough that a message's own cost does not count.
#define PIECE_BYTES ((size_t)256 << 10)
// Pieces on their way to and from each rank at once: on a network each has to be asked for and answered.
#define PIECES_IN_FLIGHT ((size_t)4)
// Messages of a pairwise exchange that are in flight at once.
#define WINDOW 8
// Up to these bytes over all ranks, or of one, everything goes to everyone in log2(ranks) steps.
#define SMALL_TOTAL_BYTES ((size_t)256 << 10)
#define SMALL_BYTES ((size_t)2 << 10)

static size_t minimum(size_t one, size_t other) { return one < other ? one : other; }

static int distant(const fp8comm_communicator *communicator, int distance) {
  return (communicator->rank + distance + communicator->size) % communicator->size;
}

size_t fp8comm_part_begin(const fp8comm_parts *parts, int rank) {
  if (parts->begins) return parts->begins[rank];
  return parts->part > 0 && (size_t)rank > parts->count / parts->part
           ? parts->count
           : minimum(parts->count, parts->part * (size_t)rank);
}

size_t fp8comm_part_count(const fp8comm_parts *parts, int rank) {
  if (parts->begins) return parts->begins[rank + 1] - parts->begins[rank];
  return minimum(parts->part, parts->count - fp8comm_part_begin(parts, rank));
}

static size_t piece_elements(const fp8comm_reducer *reducer) { return PIECE_BYTES / reducer->element; }

size_t fp8comm_reduce_scatter_bytes(const fp8comm_communicator *communicator, const fp8comm_parts *parts,
                                    const fp8comm_reducer *reducer) {
  return communicator->size > 1 ? PIECES_IN_FLIGHT * minimum(parts->part, piece_elements(reducer)) * reducer->element
                                : 0;
}

// Pieces of a part, at least one, so that ranks without elements take part in nothing and agree on it.
static size_t pieces(size_t count, size_t piece) { return (count + piece - 1) / piece; }

// How many messages there were when each of the last pieces had been added.
typedef struct marks {
  size_t messages[PIECES_IN_FLIGHT];
} marks;

static void mark(marks *window, const fp8comm_request *request, size_t piece) {
  window->messages[piece % PIECES_IN_FLIGHT] = request->message_count;
}

static void wait_for_piece(const marks *window, fp8comm_request *request, size_t piece) {
  fp8comm_add_wait_for(request, window->messages[piece % PIECES_IN_FLIGHT]);
}

void fp8comm_build_reduce_scatter(fp8comm_request *request, const fp8comm_reducer *reducer, const fp8comm_parts *parts,
                                  const void *source, void *accumulator, void *scratch) {
  const fp8comm_communicator *communicator = request->communicator;
  const unsigned char *in = source;
  unsigned char *sum = accumulator;
  const size_t piece = minimum(parts->part, piece_elements(reducer));
  const size_t own = fp8comm_part_count(parts, communicator->rank);
  // What was received and not yet added: while it is, the next pieces travel.
  struct {
    unsigned char *data;
    size_t offset;
    size_t count;
  } waiting[PIECES_IN_FLIGHT];
  marks window;
  size_t posted = 0, added = 0;
  memset(waiting, 0, sizeof(waiting));
  fp8comm_add_reduction(request, FP8COMM_STEP_FIRST, reducer, sum,
                        in + fp8comm_part_begin(parts, communicator->rank) * reducer->element, 0, own);
  for (int distance = 1; distance < communicator->size; distance++) {
    const int to = distant(communicator, distance), from = distant(communicator, -distance);
    const size_t theirs = fp8comm_part_count(parts, to), begin = fp8comm_part_begin(parts, to);
    const size_t rounds = piece > 0 ? pieces(theirs > own ? theirs : own, piece) : 0;
    for (size_t i = 0; i < rounds; i++) {
      const size_t offset = i * piece, slot = posted % PIECES_IN_FLIGHT;
      if (posted - added == PIECES_IN_FLIGHT) {
        wait_for_piece(&window, request, added++);
        fp8comm_add_reduction(request, FP8COMM_STEP_ADD, reducer, sum + waiting[slot].offset * reducer->accumulator,
                              waiting[slot].data, waiting[slot].offset, waiting[slot].count);
      }
      waiting[slot].data = (unsigned char *)scratch + slot * piece * reducer->element;
      waiting[slot].offset = offset;
      waiting[slot].count = offset < own ? minimum(piece, own - offset) : 0;
      if (offset < own) fp8comm_add_receive(request, from, waiting[slot].data, waiting[slot].count * reducer->element);
      if (offset < theirs)
        fp8comm_add_send(request, to, in + (begin + offset) * reducer->element,
                         minimum(piece, theirs - offset) * reducer->element);
      mark(&window, request, posted++);
    }
  }
  while (added < posted) {
    const size_t slot = added % PIECES_IN_FLIGHT;
    wait_for_piece(&window, request, added++);
    fp8comm_add_reduction(request, FP8COMM_STEP_ADD, reducer, sum + waiting[slot].offset * reducer->accumulator,
                          waiting[slot].data, waiting[slot].offset, waiting[slot].count);
  }
}

void fp8comm_build_contributions(fp8comm_request *request, const fp8comm_reducer *reducer, const fp8comm_parts *parts,
                                 const void *source, void *received, size_t stride) {
  const fp8comm_communicator *communicator = request->communicator;
  const size_t element = reducer->element, piece = minimum(parts->part, piece_elements(reducer));
  const size_t own = fp8comm_part_count(parts, communicator->rank);
  const size_t rounds = piece > 0 ? pieces(parts->part, piece) : 0;
  const size_t own_begin = fp8comm_part_begin(parts, communicator->rank);
  marks window;
  for (size_t i = 0; i < rounds + PIECES_IN_FLIGHT; i++) {
    const size_t offset = i * piece;
    // While the others travel.
    if (i >= PIECES_IN_FLIGHT && i - PIECES_IN_FLIGHT < rounds) {
      const size_t before = (i - PIECES_IN_FLIGHT) * piece;
      if (before < own)
        fp8comm_add_reduction(request, FP8COMM_STEP_FIRST, reducer, NULL, NULL, own_begin + before,
                              minimum(piece, own - before));
      wait_for_piece(&window, request, i);
      if (before < own)
        fp8comm_add_reduction(request, FP8COMM_STEP_ADD, reducer, NULL, NULL, before, minimum(piece, own - before));
    }
    if (i >= rounds) continue;
    for (int distance = 1; distance < communicator->size; distance++) {
      const int to = distant(communicator, distance), from = distant(communicator, -distance);
      const size_t theirs = fp8comm_part_count(parts, to), begin = fp8comm_part_begin(parts, to);
      if (offset < own && received) {
        fp8comm_add_receive(request, from,
                            (unsigned char *)received + ((size_t)(distance - 1) * stride + offset) * element,
                            minimum(piece, own - offset) * element);
      } else if (offset < own) {
        fp8comm_add_receive(request, from, NULL, 0);
      }
      if (offset < theirs)
        fp8comm_add_reduction(request, FP8COMM_STEP_FIRST, reducer, NULL, NULL, begin + offset,
                              minimum(piece, theirs - offset));
      if (offset < theirs && received) {
        fp8comm_add_send(request, to, (const unsigned char *)source + (begin + offset) * element,
                         minimum(piece, theirs - offset) * element);
      } else if (offset < theirs) {
        fp8comm_add_notice(request, to, minimum(piece, theirs - offset) * element);
      }
    }
    mark(&window, request, i);
  }
}

// The pieces of the other ranks that are as far in their parts as `offset`.
static void add_last(fp8comm_request *request, const fp8comm_reducer *reducer, const fp8comm_parts *parts,
                     size_t offset, size_t piece) {
  for (int distance = 1; distance < request->communicator->size; distance++) {
    const int from = distant(request->communicator, -distance);
    const size_t theirs = fp8comm_part_count(parts, from);
    if (offset < theirs)
      fp8comm_add_reduction(request, FP8COMM_STEP_LAST, reducer, NULL, NULL, fp8comm_part_begin(parts, from) + offset,
                            minimum(piece, theirs - offset));
  }
}

void fp8comm_build_all_gather_in_pieces(fp8comm_request *request, const fp8comm_reducer *reducer,
                                        const fp8comm_parts *parts, void *data) {
  const fp8comm_communicator *communicator = request->communicator;
  const size_t element = reducer->element, piece = minimum(parts->part, piece_elements(reducer));
  const size_t own = fp8comm_part_count(parts, communicator->rank);
  const size_t own_begin = fp8comm_part_begin(parts, communicator->rank);
  const size_t rounds = piece > 0 ? pieces(parts->part, piece) : 0;
  unsigned char *bytes = data;
  marks window;
  for (size_t i = 0; i < rounds + PIECES_IN_FLIGHT; i++) {
    const size_t offset = i * piece;
    if (i >= PIECES_IN_FLIGHT && i - PIECES_IN_FLIGHT < rounds) {
      wait_for_piece(&window, request, i);
      add_last(request, reducer, parts, (i - PIECES_IN_FLIGHT) * piece, piece);
    }
    for (int distance = 1; i < rounds && distance < communicator->size; distance++) {
      const int to = distant(communicator, distance), from = distant(communicator, -distance);
      const size_t theirs = fp8comm_part_count(parts, from), begin = fp8comm_part_begin(parts, from);
      if (offset < theirs && bytes) {
        fp8comm_add_receive(request, from, bytes + (begin + offset) * element,
                            minimum(piece, theirs - offset) * element);
      } else if (offset < theirs) {
        fp8comm_add_receive(request, from, NULL, 0);
      }
      if (offset < own && bytes) {
        fp8comm_add_send(request, to, bytes + (own_begin + offset) * element, minimum(piece, own - offset) * element);
      } else if (offset < own) {
        fp8comm_add_notice(request, to, minimum(piece, own - offset) * element);
      }
    }
    if (i < rounds) mark(&window, request, i);
    // This rank's own part while the first pieces travel.
    for (size_t at = 0; i + 1 == PIECES_IN_FLIGHT && at < own; at += piece)
      fp8comm_add_reduction(request, FP8COMM_STEP_LAST, reducer, NULL, NULL, own_begin + at, minimum(piece, own - at));
  }
}

void fp8comm_build_all_gather(fp8comm_request *request, const fp8comm_parts *parts, size_t element, void *data) {
  const fp8comm_communicator *communicator = request->communicator;
  unsigned char *bytes = data;
  const size_t own = fp8comm_part_count(parts, communicator->rank);
  const unsigned char *mine = bytes + fp8comm_part_begin(parts, communicator->rank) * element;
  for (int distance = 1; distance < communicator->size; distance++) {
    const int to = distant(communicator, distance), from = distant(communicator, -distance);
    const size_t theirs = fp8comm_part_count(parts, from);
    if (theirs > 0)
      fp8comm_add_receive(request, from, bytes + fp8comm_part_begin(parts, from) * element, theirs * element);
    if (own > 0) fp8comm_add_send(request, to, mine, own * element);
    if (distance % WINDOW == 0) fp8comm_add_wait(request);
  }
  fp8comm_add_wait(request);
}

int fp8comm_all_reduce_is_small(const fp8comm_communicator *communicator, size_t count, size_t element) {
  return count <= SMALL_BYTES / element || count <= SMALL_TOTAL_BYTES / element / (size_t)communicator->size;
}

size_t fp8comm_small_all_reduce_bytes(const fp8comm_communicator *communicator, size_t count,
                                      const fp8comm_reducer *reducer) {
  // Everyone's elements, then the accumulators at a multiple of 8.
  const size_t gathered = (size_t)communicator->size * count * reducer->element;
  return (gathered + 7) / 8 * 8 + count * reducer->accumulator;
}

// All-gather after Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
// systems", 1997: after step k a rank has the blocks of 2^k ranks from its own on; then sums in the order of ranks.
void fp8comm_build_small_all_reduce(fp8comm_request *request, const fp8comm_reducer *reducer, size_t count,
                                    const void *source, void *destination, void *scratch) {
  // No scratch is there either.
  if (count == 0) return;
  const fp8comm_communicator *communicator = request->communicator;
  const int size = communicator->size;
  const size_t block = count * reducer->element;
  unsigned char *blocks = scratch;
  unsigned char *sum = blocks + ((size_t)size * block + 7) / 8 * 8;
  fp8comm_add_copy(request, blocks, source, block);
  for (int have = 1; have < size; have *= 2) {
    const int more = have < size - have ? have : size - have;
    fp8comm_add_receive(request, distant(communicator, have), blocks + (size_t)have * block, (size_t)more * block);
    fp8comm_add_send(request, distant(communicator, -have), blocks, (size_t)more * block);
    fp8comm_add_wait(request);
  }
  for (int rank = 0; rank < size; rank++) {
    const int place = (rank - communicator->rank + size) % size;
    fp8comm_add_reduction(request, rank == 0 ? FP8COMM_STEP_FIRST : FP8COMM_STEP_ADD, reducer, sum,
                          blocks + (size_t)place * block, 0, count);
  }
  fp8comm_add_reduction(request, FP8COMM_STEP_LAST, reducer, destination, sum, 0, count);
}

// Dissemination: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
void fp8comm_build_barrier(fp8comm_request *request) {
  const fp8comm_communicator *communicator = request->communicator;
  for (int distance = 1; distance < communicator->size; distance *= 2) {
    fp8comm_add_receive(request, distant(communicator, -distance), NULL, 0);
    fp8comm_add_send(request, distant(communicator, distance), NULL, 0);
    fp8comm_add_wait(request);
  }
}
