// CUDA's threads on the host, for kernels of one argument: each thread of a block is a context of its own, which runs
// until it waits for its warp or its block. It shows whether a kernel's logic is right, not how fast it is: blocks run
// one after the other, and nothing races.
#ifndef FP8_TEST_EMULATION_H
#define FP8_TEST_EMULATION_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"
#if !defined(__x86_64__)
#  include <ucontext.h>
#endif

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
constexpr int most_copies = 256;
constexpr size_t stack_bytes = 64 << 10;

enum state { RUNNING, AT_WARP, AT_BLOCK, FINISHED };

inline void run_thread();

#if defined(__x86_64__)

// The stack pointer of who waits, above the registers that the System V ABI has a function keep. Neither swapcontext(),
// which costs two system calls, nor longjmp(), at which AddressSanitizer clears whole stacks.
typedef void *context;

__attribute__((naked, noinline)) static void switch_context(context *, context) {
  asm volatile("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
               "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
               "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

// Whatever is in memory may be another when it returns.
inline void switch_between(context *from, const context *to) {
  asm volatile("" ::: "memory");
  switch_context(from, *to);
  asm volatile("" ::: "memory");
}

// As if run_thread() had been called from nowhere: registers, the address to return to, and none above it.
inline void make_context(context *made, unsigned char *stack, size_t bytes) {
  void **top = (void **)(stack + bytes) - 8;
  memset(top, 0, 8 * sizeof(*top));
  top[6] = (void *)run_thread;
  *made = top;
}

#else

typedef ucontext_t context;

inline void switch_between(context *from, const context *to) { swapcontext(from, to); }

inline void make_context(context *made, unsigned char *stack, size_t bytes) {
  getcontext(made);
  made->uc_stack.ss_sp = stack;
  made->uc_stack.ss_size = bytes;
  made->uc_link = NULL;
  makecontext(made, run_thread, 0);
}

#endif

struct thread {
  // Where it goes on. Made once: a thread goes on to the next block's body where it ended the last one's.
  context resume;
  bool made;
  dim3 index;
  state where;
  // Exchanges that the thread has taken part in: values of one are still read while the next is written.
  unsigned exchanges;
  // Its asynchronous copies under way.
  int copies;
};

// What a thread shows to its warp.
struct alignas(16) slot {
  unsigned char bytes[32];
};

// 16 bytes; from NULL: zeros.
struct copy {
  void *to;
  const void *from;
};

inline thread threads[most_threads];
inline unsigned char *stacks;
inline slot exchanged[2][most_threads];
inline copy copies[most_threads][most_copies];
inline unsigned char *dynamic_shared;
inline size_t dynamic_shared_bytes;
inline int count, current;
inline context scheduler;
inline void (*body)(const void *);
inline const void *argument;
// All of the above is one GPU's: launches of several host threads take turns.
inline pthread_mutex_t device = PTHREAD_MUTEX_INITIALIZER;

__noinline__ inline void wait_at(state where) {
  threads[current].where = where;
  switch_between(&threads[current].resume, &scheduler);
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
  if (!next.made) make_context(&next.resume, stacks + (size_t)index * stack_bytes, stack_bytes);
  next.made = true;
  switch_between(&scheduler, &next.resume);
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
    // A kernel waits for its copies.
    if (thread.copies) abort();
  }
  // NaNs, in case they are read before they are written.
  if (dynamic_shared_bytes) memset(dynamic_shared, 0xff, dynamic_shared_bytes);
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

// Shows a value to the warp. The result is what its threads showed, until this thread's next exchange but one.
template <typename Value>
static const slot *show(const Value &value) {
  static_assert(sizeof(Value) <= sizeof(slot), "slots are small");
  const int self = current;
  slot *slots = exchanged[threads[self].exchanges++ % 2];
  memcpy(slots[self].bytes, &value, sizeof(value));
  wait_at(AT_WARP);
  return slots + self / warp_size * warp_size;
}

template <typename Value>
static Value shown(const slot *slots, int lane) {
  Value value;
  memcpy(&value, slots[lane].bytes, sizeof(value));
  return value;
}

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16 (PTX ISA, "ldmatrix"): lane i has the address of row i % 8 of matrix
// i / 8, and receives of each matrix two elements that are neighbours in a row (transposed: in a column).
static inline void load_matrices(const uint16_t *row, bool transposed, uint32_t (&registers)[4]) {
  struct matrix_row {
    uint16_t elements[8];
  };
  if ((uintptr_t)row % sizeof(matrix_row)) abort();
  matrix_row own;
  memcpy(&own, row, sizeof(own));
  const int lane = current % warp_size;
  const slot *slots = show(own);
  for (int matrix = 0; matrix < 4; matrix++) {
    const int line = lane / 4, first = 2 * (lane % 4);
    registers[matrix] = 0;
    for (int i = 0; i < 2; i++) {
      const matrix_row from = shown<matrix_row>(slots, 8 * matrix + (transposed ? first + i : line));
      registers[matrix] |= (uint32_t)from.elements[transposed ? line : first + i] << (16 * i);
    }
  }
}

static inline float bf16_half(uint32_t pair, int half) {
  const uint32_t bits = (pair >> (16 * half) & 0xffff) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point
// type"): d += a b. Which lane's register holds an element follows the layouts there.
static inline void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct fragments {
    uint32_t a[4], b[2];
  };
  const int lane = current % warp_size;
  const slot *slots = show(fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  for (int i = 0; i < 4; i++) {
    // Of row lane / 4, or 8 below it, and of columns 2 (lane % 4) and the next.
    const int below = i / 2, column = 2 * (lane % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      const int holder = k % 8 / 2;
      const fragments of_row = shown<fragments>(slots, lane / 4 * 4 + holder);
      const fragments of_column = shown<fragments>(slots, column * 4 + holder);
      sum += (double)bf16_half(of_row.a[below + 2 * (k / 8)], k % 2) * bf16_half(of_column.b[k / 8], k % 2);
    }
    d[i] = (float)sum;
  }
}

// cp.async.cg.shared.global of 16 bytes. Until the thread waits for it, the destination holds NaNs, so that a read
// before the wait shows, and so does a copy over what is still read.
static inline void copy_async(void *to, const void *from) {
  thread &self = threads[current];
  if (self.copies == most_copies || (uintptr_t)to % 16 || (uintptr_t)from % 16) abort();
  memset(to, 0xff, 16);
  copies[current][self.copies++] = {to, from};
}

// cp.async.wait_all
static inline void wait_for_copies() {
  thread &self = threads[current];
  for (int i = 0; i < self.copies; i++) {
    const copy &copy = copies[current][i];
    if (copy.from)
      memcpy(copy.to, copy.from, 16);
    else
      memset(copy.to, 0, 16);
  }
  self.copies = 0;
}

} // namespace emulation

static inline void __syncthreads() { emulation::wait_at(emulation::AT_BLOCK); }
static inline void __syncwarp() { emulation::wait_at(emulation::AT_WARP); }

static inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
  const int self = emulation::current;
  const int lane = self % emulation::warp_size;
  const emulation::slot *slots = emulation::show(value);
  return (self ^ mask) < emulation::count ? emulation::shown<uint32_t>(slots, lane ^ mask) : value;
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

static inline unsigned char *fp8core_dynamic_shared() { return emulation::dynamic_shared; }

template <typename Argument>
static int fp8core_launch(void (*kernel)(Argument), dim3 grid, dim3 block, void *stream, const Argument &argument,
                          size_t shared_bytes = 0) {
  struct call {
    void (*kernel)(Argument);
    const Argument *argument;
    static void run(const void *data) {
      const call *self = (const call *)data;
      self->kernel(*self->argument);
    }
  };
  const call data = {kernel, &argument};
  fake_stream_flush(stream);
  pthread_mutex_lock(&emulation::device);
  fake_device_begin();
  emulation::body = call::run;
  emulation::argument = &data;
  emulation::dynamic_shared_bytes = shared_bytes;
  if (shared_bytes) emulation::dynamic_shared = (unsigned char *)aligned_alloc(16, (shared_bytes + 15) / 16 * 16);
  if (shared_bytes && !emulation::dynamic_shared) abort();
  blockDim = block;
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = dim3(x, y, z);
        emulation::run_block(block);
      }
  emulation::argument = NULL;
  free(emulation::dynamic_shared);
  emulation::dynamic_shared = NULL;
  fake_device_end();
  pthread_mutex_unlock(&emulation::device);
  return 0;
}

#endif
