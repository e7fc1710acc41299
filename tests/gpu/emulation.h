// CUDA's threads on the host, for kernels of one argument: each thread of a block is a context of its own, which runs
// until it waits for its warp or its block. It shows whether a kernel's logic is right, not how fast it is: blocks run
// one after the other, and nothing races.
#ifndef FP8_TEST_EMULATION_H
#define FP8_TEST_EMULATION_H

#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
// Aligned as on the device, so that the undefined behaviour sanitizer sees a misaligned access.
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// With external linkage: the compiler must not think that nothing changes them while a thread waits.
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr int warp_size = 32;
constexpr int most_threads = 1024;
constexpr size_t stack_bytes = 64 << 10;

enum state { RUNNING, AT_WARP, AT_BLOCK, FINISHED };

struct thread {
  // Where it goes on. Made once: a thread goes on to the next block's body where it ended the last one's. Switches are
  // jumps, as swapcontext() costs two system calls.
  jmp_buf resume;
  bool made;
  dim3 index;
  state where;
  // Exchanges that the thread has taken part in: values of one are still read while the next is written.
  unsigned exchanges;
};

inline thread threads[most_threads];
inline unsigned char *stacks;
inline uint64_t exchanged[2][most_threads];
inline int count, current;
inline jmp_buf scheduler;
inline void (*body)(const void *);
inline const void *argument;
// All of the above is one GPU's: launches of several host threads take turns.
inline pthread_mutex_t device = PTHREAD_MUTEX_INITIALIZER;

__noinline__ inline void wait_at(state where) {
  threads[current].where = where;
  if (!_setjmp(threads[current].resume)) _longjmp(scheduler, 1);
}

inline void run_thread() {
  for (;;) {
    body(argument);
    wait_at(FINISHED);
  }
}

// Returns when the thread waits.
__noinline__ inline void resume(int index) {
  thread &next = threads[index];
  current = index;
  threadIdx = next.index;
  if (_setjmp(scheduler)) return;
  if (next.made) _longjmp(next.resume, 1);
  next.made = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stacks + (size_t)index * stack_bytes;
  start.uc_stack.ss_size = stack_bytes;
  start.uc_link = NULL;
  makecontext(&start, run_thread, 0);
  setcontext(&start);
}

// Releases the threads in [first, last) where all that have not finished wait at `where`.
inline bool release(int first, int last, state where) {
  bool any = false;
  for (int i = first; i < last; i++) {
    if (threads[i].where == FINISHED) continue;
    if (threads[i].where != where) return false;
    any = true;
  }
  for (int i = first; any && i < last; i++)
    if (threads[i].where == where) threads[i].where = RUNNING;
  return any;
}

inline void run_block(dim3 block) {
  if (!stacks) stacks = (unsigned char *)malloc(most_threads * stack_bytes);
  count = (int)(block.x * block.y * block.z);
  if (!stacks || count > most_threads) abort();
  for (int i = 0; i < count; i++) {
    thread &thread = threads[i];
    thread.index = dim3((unsigned)i % block.x, (unsigned)i / block.x % block.y, (unsigned)i / (block.x * block.y));
    thread.where = RUNNING;
    thread.exchanges = 0;
  }
  for (int finished = 0; finished < count;) {
    bool progress = false;
    finished = 0;
    for (int i = 0; i < count; i++) {
      if (threads[i].where == RUNNING) {
        resume(i);
        progress = true;
      }
      finished += threads[i].where == FINISHED;
    }
    for (int first = 0; first < count; first += warp_size)
      progress |= release(first, first + warp_size < count ? first + warp_size : count, AT_WARP);
    progress |= release(0, count, AT_BLOCK);
    // Threads that wait for each other at different places would hang a GPU.
    if (!progress && finished < count) abort();
  }
}

} // namespace emulation

static inline void __syncthreads() { emulation::wait_at(emulation::AT_BLOCK); }
static inline void __syncwarp() { emulation::wait_at(emulation::AT_WARP); }

static inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
  const int self = emulation::current;
  uint64_t *values = emulation::exchanged[emulation::threads[self].exchanges++ % 2];
  values[self] = value;
  emulation::wait_at(emulation::AT_WARP);
  const int other = self ^ mask;
  return other < emulation::count ? (uint32_t)values[other] : value;
}

static inline int atomicMax(int *address, int value) {
  const int old = *address;
  *address = value > old ? value : old;
  return old;
}

static inline unsigned long long atomicAdd(unsigned long long *address, unsigned long long value) {
  const unsigned long long old = *address;
  *address = old + value;
  return old;
}

// Byte i of the result is the byte of y:x that the low three bits of nibble i name.
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = (uint64_t)y << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= (uint32_t)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}

template <typename Argument>
static int fp8core_launch(void (*kernel)(Argument), dim3 grid, dim3 block, void *, const Argument &argument) {
  struct call {
    void (*kernel)(Argument);
    const Argument *argument;
    static void run(const void *data) {
      const call *self = (const call *)data;
      self->kernel(*self->argument);
    }
  };
  const call data = {kernel, &argument};
  pthread_mutex_lock(&emulation::device);
  emulation::body = call::run;
  emulation::argument = &data;
  blockDim = block;
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = dim3(x, y, z);
        emulation::run_block(block);
      }
  emulation::argument = NULL;
  pthread_mutex_unlock(&emulation::device);
  return 0;
}

#endif
