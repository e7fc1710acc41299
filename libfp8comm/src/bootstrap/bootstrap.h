// How ranks find each other before they have a transport: an all-gather of a few bytes out of band.
#ifndef FP8COMM_BOOTSTRAP_H
#define FP8COMM_BOOTSTRAP_H

#include <stddef.h>
#include <stdint.h>

#include "fp8comm/communicator.h"

typedef struct fp8comm_bootstrap fp8comm_bootstrap;

struct fp8comm_bootstrap {
  int rank;
  int ranks;
  // The same `bytes` on every rank, from `part`, into `table` in the order of ranks. After an error the bootstrap is
  // good for nothing but destroy(), and the table's contents are undefined.
  fp8core_status (*all_gather)(fp8comm_bootstrap *bootstrap, const void *part, size_t bytes, void *table);
  void (*destroy)(fp8comm_bootstrap *bootstrap);
};

// How long ranks are waited for: for all to be there, and in each all-gather.
typedef struct fp8comm_wait_options {
  double timeout_seconds;
  // As in fp8comm_communicator_options. FP8CORE_ERROR_INTERRUPTED where it ends the waiting.
  fp8comm_interrupt interrupt;
  void *interrupt_data;
} fp8comm_wait_options;

typedef struct fp8comm_tcp_options {
  int rank;
  int ranks;
  // Of rank 0: a name or a numeric address, of IPv4 or IPv6.
  const char *address;
  // What told it, for messages.
  const char *address_from;
  // The ranks are known to be on several machines, so a loopback address is wrong.
  int across_machines;
  int port;
  // NULL: none, and then every address must be loopback unless allow_insecure. Copied.
  const char *secret;
  int allow_insecure;
  fp8comm_wait_options wait;
} fp8comm_tcp_options;

// From valid options. Rank 0 returns when all ranks are there, others when rank 0 knows them.
fp8core_status fp8comm_tcp_create(const fp8comm_tcp_options *options, fp8comm_bootstrap **bootstrap);

// Whether this process was started by a PMIx launcher.
int fp8comm_pmix_is_there(void);
// The stub of a build without PMIx answers why not.
fp8core_status fp8comm_pmix_create(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap);

// PMIx where its variables are there, else the variables of torchrun, else those of a step of Slurm, else one rank.
fp8core_status fp8comm_environment_create(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap);

#endif
