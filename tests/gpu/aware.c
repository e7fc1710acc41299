#include "aware.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
// What the transport does, of which there is one in a process; and the same, watched.
static const fp8comm_transport *real;
static fp8comm_transport watched;
static _Atomic unsigned long long sent_bytes;

unsigned long long aware_sent_bytes(void) { return atomic_load(&sent_bytes); }

static void check(const void *data, size_t bytes, fp8comm_memory memory) {
  struct cudaPointerAttributes attributes;
  int device;
  if (bytes == 0) return;
  (void)cudaPointerGetAttributes(&attributes, data);
  const int on_device = attributes.type == cudaMemoryTypeDevice;
  if (on_device != (memory == FP8COMM_MEMORY_CUDA)) {
    (void)fprintf(stderr, "a message is in %s memory, but said to be in %s memory\n", on_device ? "device" : "host",
                  on_device ? "host" : "device");
    abort();
  }
  (void)cudaGetDevice(&device);
  if (!on_device || device == attributes.device) return;
  (void)fprintf(stderr, "a message is in the memory of device %d, while device %d is the current one\n",
                attributes.device, device);
  abort();
}

static fp8core_status watched_send(fp8comm_endpoint *endpoint, int peer, uint64_t tag, const void *data, size_t bytes,
                                   fp8comm_memory memory, fp8comm_operation **operation) {
  check(data, bytes, memory);
  if (memory == FP8COMM_MEMORY_CUDA) (void)atomic_fetch_add(&sent_bytes, bytes);
  return real->send(endpoint, peer, tag, data, bytes, memory, operation);
}

static fp8core_status watched_receive(fp8comm_endpoint *endpoint, int peer, uint64_t tag, void *data, size_t bytes,
                                      fp8comm_memory memory, fp8comm_operation **operation) {
  check(data, bytes, memory);
  return real->receive(endpoint, peer, tag, data, bytes, memory, operation);
}

static fp8core_status watched_check_cuda(const fp8comm_endpoint *endpoint) {
  (void)endpoint;
  return FP8CORE_OK;
}

void aware_make(fp8comm_communicator *communicator) {
  fp8comm_endpoint *endpoint = communicator->shared->endpoint;
  (void)pthread_mutex_lock(&lock);
  if (!real) {
    real = endpoint->transport;
    watched = *real;
    watched.send = watched_send;
    watched.receive = watched_receive;
    watched.check_cuda = watched_check_cuda;
  }
  if (endpoint->transport != real && endpoint->transport != &watched) abort();
  endpoint->transport = &watched;
  (void)pthread_mutex_unlock(&lock);
}
