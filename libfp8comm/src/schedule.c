// Algorithms, as steps of requests: see internal.h.
#include "internal.h"

// A part travels in pieces of about this size: small enough to be added while they are in the second-level cache,
// large enough that a message's own cost does not count.
#define PIECE_BYTES ((size_t)256 << 10)
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
  return communicator->size > 1 ? 2 * minimum(parts->part, piece_elements(reducer)) * reducer->element : 0;
}

// Pieces of a part, at least one, so that ranks without elements take part in nothing and agree on it.
static size_t pieces(size_t count, size_t piece) { return (count + piece - 1) / piece; }

void fp8comm_build_reduce_scatter(fp8comm_request *request, const fp8comm_reducer *reducer, const fp8comm_parts *parts,
                                  const void *source, void *accumulator, void *scratch) {
  const fp8comm_communicator *communicator = request->communicator;
  const unsigned char *in = source;
  unsigned char *sum = accumulator;
  const size_t piece = minimum(parts->part, piece_elements(reducer));
  const size_t own = fp8comm_part_count(parts, communicator->rank);
  // What was received and not yet added: while it is, the next piece travels.
  struct {
    unsigned char *data;
    size_t offset;
    size_t count;
  } waiting = {NULL, 0, 0};
  int slot = 0;
  fp8comm_add_reduction(request, FP8COMM_STEP_FIRST, reducer, sum,
                        in + fp8comm_part_begin(parts, communicator->rank) * reducer->element, 0, own);
  for (int distance = 1; distance < communicator->size; distance++) {
    const int to = distant(communicator, distance), from = distant(communicator, -distance);
    const size_t theirs = fp8comm_part_count(parts, to), begin = fp8comm_part_begin(parts, to);
    const size_t rounds = piece > 0 ? pieces(theirs > own ? theirs : own, piece) : 0;
    for (size_t i = 0; i < rounds; i++) {
      const size_t offset = i * piece;
      unsigned char *staging = (unsigned char *)scratch + (size_t)slot * piece * reducer->element;
      if (offset < own) fp8comm_add_receive(request, from, staging, minimum(piece, own - offset) * reducer->element);
      if (offset < theirs)
        fp8comm_add_send(request, to, in + (begin + offset) * reducer->element,
                         minimum(piece, theirs - offset) * reducer->element);
      fp8comm_add_reduction(request, FP8COMM_STEP_ADD, reducer, sum + waiting.offset * reducer->accumulator,
                            waiting.data, waiting.offset, waiting.count);
      fp8comm_add_wait(request);
      waiting.data = staging;
      waiting.offset = offset;
      waiting.count = offset < own ? minimum(piece, own - offset) : 0;
      slot ^= 1;
    }
  }
  fp8comm_add_reduction(request, FP8COMM_STEP_ADD, reducer, sum + waiting.offset * reducer->accumulator, waiting.data,
                        waiting.offset, waiting.count);
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
