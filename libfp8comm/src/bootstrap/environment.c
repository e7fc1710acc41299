// Which bootstrap, from the environment.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../transport.h"
#include "bootstrap.h"

static fp8core_status read_number(const char *variable, long least, long most, int *value) {
  const char *const text = getenv(variable);
  if (!text) return fp8comm_invalid("%s is not set; expected a whole number from %ld to %ld", variable, least, most);
  char *end;
  errno = 0;
  const long number = strtol(text, &end, 10);
  // No white space or sign in front, which strtol() takes.
  if (text[0] < '0' || text[0] > '9' || *end || errno || number < least || number > most)
    return fp8comm_invalid("%s is '%s'; expected a whole number from %ld to %ld", variable, text, least, most);
  *value = (int)number;
  return FP8CORE_OK;
}

static int is_set(const char *variable) { return getenv(variable) != NULL; }

// torchrun keeps a store of its own at MASTER_PORT, unless it leaves that to rank 0.
static int port_is_torchruns(void) {
  const char *const text = getenv("TORCHELASTIC_USE_AGENT_STORE");
  return text && strcmp(text, "True") == 0;
}

static fp8core_status read_secret(fp8comm_tcp_options *options) {
  options->secret = getenv("FP8COMM_SECRET");
  if (options->secret && !*options->secret)
    return fp8comm_invalid("FP8COMM_SECRET is empty; expected random text, or the variable not set");
  if (is_set("FP8COMM_ALLOW_INSECURE"))
    FP8COMM_TRY(read_number("FP8COMM_ALLOW_INSECURE", 0, 1, &options->allow_insecure));
  return FP8CORE_OK;
}

static fp8core_status read_port(fp8comm_tcp_options *options) {
  if (is_set("FP8COMM_PORT")) return read_number("FP8COMM_PORT", 1, 65535, &options->port);
  const int above = port_is_torchruns();
  FP8COMM_TRY(read_number("MASTER_PORT", 1, 65535 - above, &options->port));
  options->port += above;
  return FP8CORE_OK;
}

static fp8core_status create_tcp(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap) {
  fp8comm_tcp_options options = {.wait = *wait, .address_from = "MASTER_ADDR"};
  FP8COMM_TRY(read_number("WORLD_SIZE", 1, FP8COMM_MAX_RANKS, &options.ranks));
  FP8COMM_TRY(read_number("RANK", 0, options.ranks - 1, &options.rank));
  if (options.ranks == 1) return FP8CORE_OK;
  options.address = getenv("MASTER_ADDR");
  if (!options.address || !*options.address) {
    return fp8comm_invalid("MASTER_ADDR is %s; expected the name or address of rank 0's machine",
                           options.address ? "empty" : "not set");
  }
  FP8COMM_TRY(read_port(&options));
  FP8COMM_TRY(read_secret(&options));
  return fp8comm_tcp_create(&options, bootstrap);
}

// ---- Slurm's own variables, of `srun` without PMIx

// Of job steps alone: in the script of a batch job SLURM_NTASKS and SLURM_PROCID are set, though no other task runs.
static int slurm_is_there(void) { return is_set("SLURM_STEP_NUM_TASKS") && is_set("SLURM_PROCID"); }

// The first of a list of hosts as Slurm writes it, "a,b", "n[08-11,14]" or "r[1-2]n[1-4]": of each bracket the first
// number. Fails where the list is malformed.
static int first_host(const char *list, char *host, size_t bytes) {
  size_t used = 0;
  int skips = 0;
  int within = 0;
  for (; *list && (within || *list != ','); list++) {
    if (*list == '[' || *list == ']') {
      if (within == (*list == '[')) return 0;
      within = *list == '[';
      skips = 0;
      continue;
    }
    if (within && (*list == '-' || *list == ',')) skips = 1;
    if (skips) continue;
    if (used + 1 == bytes) return 0;
    host[used++] = *list;
  }
  host[used] = 0;
  return used > 0 && !within;
}

// Ranks are tasks, and rank 0 listens on the step's first node. Its port is one of 10,000 below those that Linux gives
// to clients, so that neighbouring jobs and steps have different ones.
static fp8core_status create_slurm(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap) {
  fp8comm_tcp_options options = {.wait = *wait};
  char host[256];
  FP8COMM_TRY(read_number("SLURM_STEP_NUM_TASKS", 1, FP8COMM_MAX_RANKS, &options.ranks));
  FP8COMM_TRY(read_number("SLURM_PROCID", 0, options.ranks - 1, &options.rank));
  if (options.ranks == 1) return FP8CORE_OK;
  options.address = getenv("MASTER_ADDR");
  options.address_from = "MASTER_ADDR";
  if (!options.address || !*options.address) {
    const char *const nodes = getenv("SLURM_STEP_NODELIST");
    int count;
    FP8COMM_TRY(read_number("SLURM_STEP_NUM_NODES", 1, FP8COMM_MAX_RANKS, &count));
    if (!nodes || !first_host(nodes, host, sizeof(host)))
      return fp8comm_invalid("SLURM_STEP_NODELIST is '%s'; expected the names of the step's nodes, or MASTER_ADDR",
                             nodes ? nodes : "");
    // Other machines need not reach what is one machine's own.
    options.address = count == 1 ? "127.0.0.1" : host;
    options.address_from = "the first node of SLURM_STEP_NODELIST";
    options.across_machines = count > 1;
  }
  if (is_set("FP8COMM_PORT") || is_set("MASTER_PORT")) {
    FP8COMM_TRY(read_port(&options));
  } else {
    const char *const job = getenv("SLURM_JOB_ID");
    const char *const step = getenv("SLURM_STEP_ID");
    options.port =
      20000 + (int)(((job ? strtoull(job, NULL, 10) : 0) * 97 + (step ? strtoull(step, NULL, 10) : 0)) % 10000);
  }
  FP8COMM_TRY(read_secret(&options));
  return fp8comm_tcp_create(&options, bootstrap);
}

fp8core_status fp8comm_environment_create(const fp8comm_wait_options *wait, fp8comm_bootstrap **bootstrap) {
  *bootstrap = NULL;
  const int tcp_is_there = is_set("RANK") || is_set("WORLD_SIZE");
  const char *const choice = getenv("FP8COMM_BOOTSTRAP");
  if (choice) {
    if (strcmp(choice, "none") == 0) return FP8CORE_OK;
    if (strcmp(choice, "tcp") == 0) return create_tcp(wait, bootstrap);
    if (strcmp(choice, "slurm") == 0) return create_slurm(wait, bootstrap);
    if (strcmp(choice, "pmix") != 0)
      return fp8comm_invalid("FP8COMM_BOOTSTRAP is '%s'; expected pmix, tcp, slurm or none", choice);
    if (!fp8comm_pmix_is_there())
      return fp8comm_invalid(
        "FP8COMM_BOOTSTRAP is 'pmix', but PMIX_RANK and PMIX_NAMESPACE are not set; expected a launcher of PMIx");
    return fp8comm_pmix_create(wait, bootstrap);
  }
  // Of `srun torchrun`, PMIx knows the agent, whose variables its workers have inherited, all the same.
  if (tcp_is_there && is_set("TORCHELASTIC_RUN_ID")) return create_tcp(wait, bootstrap);
  if (fp8comm_pmix_is_there()) {
    const fp8core_status status = fp8comm_pmix_create(wait, bootstrap);
    if (status != FP8CORE_ERROR_NOT_SUPPORTED || !tcp_is_there) return status;
  }
  if (tcp_is_there) return create_tcp(wait, bootstrap);
  return slurm_is_there() ? create_slurm(wait, bootstrap) : FP8CORE_OK;
}

// The callback of fp8comm_communicator_create(), which keeps why it failed.
typedef struct gatherer {
  fp8comm_bootstrap *bootstrap;
  fp8core_status status;
  char message[512];
} gatherer;

static int gather(void *user_data, const void *send, void *receive, size_t bytes) {
  gatherer *const from = user_data;
  const fp8core_status status = from->bootstrap->all_gather(from->bootstrap, send, bytes, receive);
  if (status != FP8CORE_OK && from->status == FP8CORE_OK) {
    from->status = status;
    (void)snprintf(from->message, sizeof(from->message), "%s", fp8core_last_error());
  }
  return (int)status;
}

fp8core_status fp8comm_communicator_create_from_environment(fp8comm_communicator **communicator,
                                                            const fp8comm_communicator_options *options) {
  const fp8comm_communicator_options defaults = fp8comm_communicator_options_default();
  const fp8comm_communicator_options *const used = options ? options : &defaults;
  // What is wrong with these is told before any rank is waited for, by the call that checks them.
  if (!communicator || used->size != sizeof(*used) || !(used->timeout_seconds > 0 && used->timeout_seconds <= 1e6))
    return fp8comm_communicator_create(communicator, 0, 1, NULL, NULL, used);
  *communicator = NULL;
  gatherer from = {.status = FP8CORE_OK};
  const fp8comm_wait_options wait = {used->timeout_seconds, used->interrupt, used->interrupt_data};
  FP8COMM_TRY(fp8comm_environment_create(&wait, &from.bootstrap));
  if (!from.bootstrap) return fp8comm_communicator_create(communicator, 0, 1, NULL, NULL, used);
  const fp8core_status status =
    fp8comm_communicator_create(communicator, from.bootstrap->rank, from.bootstrap->ranks, gather, &from, used);
  from.bootstrap->destroy(from.bootstrap);
  if (status != FP8CORE_OK && from.status != FP8CORE_OK) return fp8core_set_last_error(from.status, "%s", from.message);
  return status;
}
