// A cuDNN that is played (libfp8gpt/src/cuda/cudnn_attention.h): it computes what our own kernels compute, in the
// emulation, and does wrong what a test wants.
#ifndef FP8_TEST_FAKE_CUDNN_H
#define FP8_TEST_FAKE_CUDNN_H

#include <stdint.h>

typedef enum fake_cudnn_fault {
  FAKE_CUDNN_GOOD = 0,
  FAKE_CUDNN_ABSENT,
  FAKE_CUDNN_NO_FORWARD,
  FAKE_CUDNN_NO_BACKWARD,
  // Does nothing, and says that all is well.
  FAKE_CUDNN_IDLE_FORWARD,
  FAKE_CUDNN_FAILING_FORWARD,
  FAKE_CUDNN_NAN_FORWARD,
  // A scale that is off by a tenth.
  FAKE_CUDNN_WRONG_LOGARITHMS,
  // One part of the gradients is off by a tenth.
  FAKE_CUDNN_WRONG_QUERIES,
  FAKE_CUDNN_WRONG_KEYS,
  FAKE_CUDNN_WRONG_VALUES,
  FAKE_CUDNN_FAILING_BACKWARD,
  // The last bit of one gradient is another in every second run.
  FAKE_CUDNN_RESTLESS
} fake_cudnn_fault;

typedef struct fake_cudnn_state {
  fake_cudnn_fault fault;
  // Of a backward pass; every byte of it is written.
  int64_t workspace_bytes;
  // Handles that are open, and passes so far.
  int open;
  int forwards;
  int backwards;
  int capability;
} fake_cudnn_state;

extern fake_cudnn_state fake_cudnn;

#endif
