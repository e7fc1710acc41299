// What the played CUDA runtime and the played NCCL share: work that a stream was given and that ends later.
#ifndef FP8_TEST_FAKE_CUDA_H
#define FP8_TEST_FAKE_CUDA_H

#if defined(__cplusplus)
extern "C" {
#else
#  include <stdatomic.h>

typedef struct fake_work {
  _Atomic int references;
  _Atomic int done;
} fake_work;

// The stream is not past the work until it is done.
void fake_stream_put(void *stream, fake_work *work);
void fake_work_release(fake_work *work);

// Bytes that copies have moved between page-locked host memory and elsewhere, so far, of all threads.
unsigned long long fake_page_locked_bytes(void);
// Bytes of memory that is allocated now, of all threads: page-locked, or of all devices.
unsigned long long fake_held_bytes(int page_locked);
#endif

// Does what a stream was given and has not done: before kernels, which run at once.
void fake_stream_flush(void *stream);

// Around what the device does with its memory: outside of these the host cannot touch it, with FP8_FAKE_GUARD.
void fake_device_begin(void);
void fake_device_end(void);

#if defined(__cplusplus)
}
#endif

#endif
