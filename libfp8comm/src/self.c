// The transport of one rank, which has nobody to talk to: its communicators move data without messages.
#include <stdlib.h>

#include "transport.h"

static fp8core_status self_create(fp8comm_endpoint **endpoint, const fp8comm_endpoint_options *options) {
  (void)options;
  *endpoint = calloc(1, sizeof(**endpoint));
  if (!*endpoint) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate an endpoint");
  (*endpoint)->transport = &fp8comm_self_transport;
  return FP8CORE_OK;
}

static void self_destroy(fp8comm_endpoint *endpoint) { free(endpoint); }

static fp8core_status no_peer(int peer) {
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "there is no rank %d beside this one", peer);
}

static fp8core_status self_send(fp8comm_endpoint *endpoint, int peer, uint64_t tag, const void *data, size_t bytes,
                                fp8comm_memory memory, fp8comm_operation **operation) {
  (void)endpoint, (void)tag, (void)data, (void)bytes, (void)memory;
  *operation = NULL;
  return no_peer(peer);
}

static fp8core_status self_receive(fp8comm_endpoint *endpoint, int peer, uint64_t tag, void *data, size_t bytes,
                                   fp8comm_memory memory, fp8comm_operation **operation) {
  (void)endpoint, (void)tag, (void)data, (void)bytes, (void)memory;
  *operation = NULL;
  return no_peer(peer);
}

static fp8core_status self_progress(fp8comm_endpoint *endpoint) {
  (void)endpoint;
  return FP8CORE_OK;
}

static fp8core_status self_test(fp8comm_endpoint *endpoint, fp8comm_operation **operation, int *done) {
  (void)endpoint;
  *operation = NULL;
  *done = 1;
  return FP8CORE_OK;
}

static void self_cancel(fp8comm_endpoint *endpoint, fp8comm_operation **operation) {
  (void)endpoint;
  *operation = NULL;
}

static void self_send_control(fp8comm_endpoint *endpoint, int peer, const fp8comm_control *message) {
  (void)endpoint, (void)peer, (void)message;
}

// Nothing travels, whatever memory it is in.
static fp8core_status self_check_cuda(const fp8comm_endpoint *endpoint) {
  (void)endpoint;
  return FP8CORE_OK;
}

static uint64_t self_bytes_sent(const fp8comm_endpoint *endpoint) {
  (void)endpoint;
  return 0;
}

const fp8comm_transport fp8comm_self_transport = {
  .name = "self",
  .create = self_create,
  .destroy = self_destroy,
  .send = self_send,
  .receive = self_receive,
  .progress = self_progress,
  .test = self_test,
  .cancel = self_cancel,
  .send_control = self_send_control,
  .wait = NULL,
  .is_gone = NULL,
  .check_cuda = self_check_cuda,
  .bytes_sent = self_bytes_sent,
};
