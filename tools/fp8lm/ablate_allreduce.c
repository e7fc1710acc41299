// fp8lm ablate allreduce: FP8-LM's figure 7 on a model that it trains.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ablate_results.h"
#include "command.h"
#include "fp8comm/fp8comm.h"
#include "json_writer.h"
#include "machine.h"
#include "replacement.h"
#include "simulated_ranks.h"
#include "trainer.h"
#include "try.h"

#define PREFIX "fp8lm ablate allreduce"

typedef struct own_settings {
  int64_t ranks;
  int64_t steps;
  int64_t measured_steps;
  fp8comm_gradient_options gradient;
  const char *folder;
  const char *json;
  const char *output;
  const char *title;
} own_settings;

typedef struct run {
  own_settings own;
  fp8lm_train_settings settings;
  fp8lm_trainer trainer;
  fp8lm_loader *loader;
  fp8lm_simulated_ranks *ranks;
  fp8lm_replacement json;
  fp8lm_replacement page;
  // Steps of what was loaded.
  int64_t first_step;
  // Of the last step.
  double loss;
  fp8lm_ablate_results results;
} run;

// --- Options ---

static const char usage[] =
  "Usage: " PREFIX " --data-path PATH [OPTION]...\n"
  "\n"
  "Compares the scalings of the FP8 gradient all-reduce (FP8-LM, section 2.1 and figure 7): auto, pre and post, in\n"
  "native sums and in two-shot ones. A model is trained as by 'fp8lm train', but data-parallel, with as many ranks as\n"
  "--ranks says, each with a micro-batch of its own; they are simulated one after the other. In the last steps all\n"
  "ranks' gradients are reduced by libfp8comm, over a thread a rank, and compared with their mean in FP64, by which\n"
  "the model is updated. Prints, for each block of the model, signal-to-noise ratio, underflow and overflow.\n";

static const fp8lm_train_option own_options[] = {
  {NULL, NULL, "Ablation"},
  {"ranks", "N", "data-parallel ranks, 2 to 1024 (default 128)"},
  {"ablate-steps", "N", "steps that are reduced, the last ones of the run, in which mu adapts (default 16)"},
  {"measure-steps", "N",
   "steps of which the figures are, the last ones of these (default 4, or all if they are fewer)"},
  {"wire-dtype", "NAME", "of the codes: e4m3 (default) or e5m2"},
  {"saturation-threshold", "X", "share of values that saturate above which mu is reduced (default 1e-5, the paper's)"},
  {"backoff", "X", "by what it is multiplied then (default 0.5)"},
  {"growth-steps", "X", "steps in which it doubles otherwise (default 1000)"},
  {"mu-initial", "X", "mu of the first reduced step (default 1)"},
  {"mu-min", "X", "least mu (default 2^-16)"},
  {"mu-max", "X", "largest mu (default 16)"},
  {"scratch", "DIR",
   "keep the gradients of all ranks in a file there, which is gone at the end; without, in memory: ranks times the "
   "model's gradients"},
  {"json", "FILE", "write all figures, of every tensor and step, as JSON"},
  {"output", "FILE", "write an HTML page with plots"},
  {"title", "TEXT", "its title (default 'Scaling of the FP8 gradient all-reduce')"},
};

// The ranks are simulated, and their reductions are what is compared.
static const char *const without[] = {"global-batch-size",
                                      "spike-sigma",
                                      "spike-action",
                                      "valid-data-path",
                                      "vocab-file",
                                      "merge-file",
                                      "eval-interval",
                                      "eval-iters",
                                      "data-parallel-size",
                                      "zero-stage",
                                      "grad-reduce",
                                      "grad-scaling",
                                      "grad-delayed-scaling",
                                      "distributed-timeout-minutes",
                                      "device",
                                      "save",
                                      "resume",
                                      "save-interval",
                                      "keep-last",
                                      "exit-interval",
                                      "log-dir",
                                      "tensorboard-dir",
                                      "log-fp8-interval",
                                      NULL};

static const char end_of_help[] =
  "Other defaults than those of 'fp8lm train': --precision bf16, whose gradients are in FP32; --train-iters 64;\n"
  "--micro-batch-size 1. With --load a run of 'fp8lm train' goes on; its options but --train-iters, which counts its\n"
  "steps too, then hold. A step has ranks times --micro-batch-size sequences. The CPU only. Results do not depend on\n"
  "--threads.\n"
  "\n"
  "Exit codes: 0 success; 1 a failure at run time (data or a checkpoint that cannot be read, a file that cannot be\n"
  "written, gradients that stay infinite); 2 wrong usage. Files are written when all is done, and replaced as a "
  "whole.\n";

static int set_text(const char *prefix, const char *option, const char *value, const char **text) {
  if (!*value) return fp8lm_complain(-1, prefix, "%s is empty", option);
  *text = value;
  return 0;
}

static int set_option(void *user_data, const char *prefix, const char *name, const char *value) {
  own_settings *own = user_data;
  char option[64];
  const double least_mu = ldexp(1.0, -60);
  const double most_mu = ldexp(1.0, 60);
  (void)snprintf(option, sizeof(option), "--%s", name);
#define IS(text) (strcmp(name, text) == 0)
  if (IS("ranks")) return fp8lm_parse_integer(prefix, option, value, 2, FP8LM_SIMULATED_RANKS, &own->ranks);
  if (IS("ablate-steps")) return fp8lm_parse_integer(prefix, option, value, 1, 10000, &own->steps);
  if (IS("measure-steps")) return fp8lm_parse_integer(prefix, option, value, 1, 10000, &own->measured_steps);
  if (IS("saturation-threshold"))
    return fp8lm_parse_real(prefix, option, value, 0.0, 1.0, &own->gradient.saturation_threshold);
  if (IS("backoff")) return fp8lm_parse_real(prefix, option, value, 1e-6, 0.999999, &own->gradient.backoff);
  if (IS("growth-steps")) return fp8lm_parse_real(prefix, option, value, 1.0, 1e9, &own->gradient.growth_steps);
  if (IS("mu-initial")) return fp8lm_parse_real(prefix, option, value, least_mu, most_mu, &own->gradient.mu_initial);
  if (IS("mu-min")) return fp8lm_parse_real(prefix, option, value, least_mu, most_mu, &own->gradient.mu_min);
  if (IS("mu-max")) return fp8lm_parse_real(prefix, option, value, least_mu, most_mu, &own->gradient.mu_max);
  if (IS("scratch")) return set_text(prefix, option, value, &own->folder);
  if (IS("json")) return set_text(prefix, option, value, &own->json);
  if (IS("output")) return set_text(prefix, option, value, &own->output);
  if (IS("title")) return set_text(prefix, option, value, &own->title);
#undef IS
  const int wide = strcmp(value, "e5m2") == 0;
  if (!wide && strcmp(value, "e4m3") != 0)
    return fp8lm_complain(-1, prefix, "%s is '%s', expected e4m3 or e5m2", option, value);
  own->gradient.wire_dtype = wide ? FP8CORE_E5M2 : FP8CORE_E4M3;
  return 0;
}

static int check_settings(run *now) {
  own_settings *own = &now->own;
  fp8lm_train_settings *settings = &now->settings;
  if (settings->device != FP8LM_TRAIN_CPU)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "\"device\" is cuda, expected cpu: gradients are reduced in host memory");
  if (own->measured_steps == 0) own->measured_steps = own->steps < 4 ? own->steps : 4;
  if (own->measured_steps > own->steps)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--measure-steps is %" PRId64 ", expected at most --ablate-steps, %" PRId64,
                          own->measured_steps, own->steps);
  if (!settings->load && own->steps > settings->train_iters)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--ablate-steps is %" PRId64 ", expected at most --train-iters, %" PRId64, own->steps,
                          settings->train_iters);
  if (!(own->gradient.mu_min <= own->gradient.mu_initial && own->gradient.mu_initial <= own->gradient.mu_max))
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--mu-initial is %.9g, expected a number from --mu-min, %.9g, to --mu-max, %.9g",
                          own->gradient.mu_initial, own->gradient.mu_min, own->gradient.mu_max);
  if (own->json && own->output && strcmp(own->json, own->output) == 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--json and --output are both %s, expected two files", own->json);
  // What a step has; the ranks' order in it is that of the loader.
  settings->global_batch_size = own->ranks * settings->micro_batch_size;
  return FP8LM_EXIT_SUCCESS;
}

// --- Beginning ---

static int failed(void) { return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s", fp8core_last_error()); }

static int failed_at(const char *path) {
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s: %s", path, fp8core_last_error());
}

static int cannot_write(const char *path) {
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "cannot write %s: %s", path, fp8core_last_error());
}

// Before any work is done for them.
static int open_outputs(run *now) {
  if (now->own.json && fp8lm_replacement_open(&now->json, now->own.json) != FP8CORE_OK)
    return cannot_write(now->own.json);
  if (now->own.output && fp8lm_replacement_open(&now->page, now->own.output) != FP8CORE_OK)
    return cannot_write(now->own.output);
  return FP8LM_EXIT_SUCCESS;
}

static int open_data(run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  fp8lm_loader_options options = fp8lm_loader_options_default();
  options.data_path = settings->data_path;
  options.validation_fraction = settings->val_fraction;
  options.seed = (uint64_t)settings->seed;
  options.vocabulary = (uint32_t)settings->vocab_size;
  if (fp8lm_loader_create(&now->loader, &options) != FP8CORE_OK) return failed();
  if (settings->check_data && fp8lm_loader_check(now->loader) != FP8CORE_OK) return failed();
  return FP8LM_EXIT_SUCCESS;
}

static int open_model(run *now) {
  // Its ranks are simulated.
  static fp8lm_ranks alone = {.size = 1, .sharing_size = 1};
  fp8lm_train_settings *settings = &now->settings;
  if (settings->load) {
    const fp8gpt_config config = fp8lm_train_model_config(settings);
    if (fp8lm_check_weights(&config, settings->load) != FP8CORE_OK) return failed_at(settings->load);
  }
  if (fp8lm_trainer_create(&now->trainer, settings, &alone) != FP8CORE_OK) return failed();
  if (!settings->load) return FP8LM_EXIT_SUCCESS;
  if (fp8lm_trainer_load(&now->trainer, settings->load) != FP8CORE_OK) return failed_at(settings->load);
  now->first_step = now->trainer.step;
  if (now->trainer.step + now->own.steps > settings->train_iters) {
    char text[PATH_MAX + 128];
    (void)snprintf(text, sizeof(text),
                   "%s has %" PRId64 " steps, and --train-iters is %" PRId64
                   ": expected at least --ablate-steps, %" PRId64 ", more",
                   settings->load, now->trainer.step, settings->train_iters, now->own.steps);
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "%s", text);
  }
  return FP8LM_EXIT_SUCCESS;
}

static double mebibytes(double bytes) { return bytes / 1048576.0; }

static int open_ranks(run *now) {
  const own_settings *own = &now->own;
  const int64_t bytes = fp8lm_simulated_gradient_bytes(now->trainer.model, (int)own->ranks);
  const double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  // Where memory is promised and not there, the process would be killed later.
  if (!own->folder && (double)bytes > 0.9 * memory)
    return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                          "the gradients of %" PRId64
                          " ranks are %.0f MiB, and this machine has %.0f MiB of memory: use "
                          "--scratch, fewer --ranks or a smaller model",
                          own->ranks, mebibytes((double)bytes), mebibytes(memory));
  const fp8lm_simulated_options options = {.ranks = (int)own->ranks,
                                           .steps = own->steps,
                                           .measured_steps = own->measured_steps,
                                           .gradient = own->gradient,
                                           .folder = own->folder,
                                           .threads = fp8core_context_threads(now->trainer.context)};
  if (fp8lm_simulated_ranks_create(&now->ranks, now->trainer.model, &options) != FP8CORE_OK) return failed();
  fp8gpt_memory model;
  if (fp8gpt_memory_report(now->trainer.model, &model) != FP8CORE_OK) return failed();
  const fp8lm_train_settings *settings = &now->settings;
  printf("%s, %s, %" PRId64 " parameters; %" PRId64 " ranks of %" PRId64 " x %" PRId64 " tokens; %d CPU thread%s\n",
         settings->preset, fp8lm_train_precision_name(settings), model.parameters, own->ranks,
         settings->micro_batch_size, settings->seq_length, options.threads, options.threads == 1 ? "" : "s");
  printf("%s: gradients of all ranks %.0f MiB; memory: reducers %.0f, mean %.0f\n", own->folder ? "file" : "memory",
         mebibytes((double)bytes), mebibytes((double)fp8lm_simulated_reducer_bytes(now->ranks)),
         mebibytes((double)fp8lm_simulated_mean_bytes(now->ranks)));
  (void)fflush(stdout);
  return FP8LM_EXIT_SUCCESS;
}

// --- Training ---

// The rank's batch, of which the trainer's memory has room for all ranks'.
static fp8core_status pass(run *now, int rank, int keep, double *loss) {
  const fp8lm_train_settings *settings = &now->settings;
  fp8lm_trainer *trainer = &now->trainer;
  float rank_loss;
  TRY(fp8lm_loader_batch(now->loader, FP8LM_TRAIN, (uint64_t)trainer->step, (uint32_t)rank, (uint32_t)now->own.ranks,
                         (size_t)settings->micro_batch_size, (size_t)settings->seq_length, trainer->tokens,
                         trainer->targets));
  const fp8gpt_batch batch = {(int)settings->micro_batch_size, (int)settings->seq_length, trainer->tokens,
                              trainer->targets};
  TRY(fp8gpt_model_train(trainer->model, &batch, 1, 1.0f, trainer->step, rank, &rank_loss));
  *loss += (double)rank_loss / (double)now->own.ranks;
  return fp8lm_simulated_ranks_add(now->ranks, trainer->context, rank, keep);
}

// The model's scales see what all ranks saw, as passes raise the amaxes and only the end of a step takes them.
static fp8core_status step(run *now, int reduced) {
  fp8lm_trainer *trainer = &now->trainer;
  fp8optim_step_options options = fp8optim_step_options_default();
  fp8optim_step_report report;
  double rate;
  now->loss = 0.0;
  fp8lm_simulated_ranks_begin(now->ranks);
  for (int i = 0; i < (int)now->own.ranks; i++) TRY(pass(now, i, reduced, &now->loss));
  if (reduced) TRY(fp8lm_simulated_ranks_reduce(now->ranks));
  for (int64_t i = 0; i < trainer->parameter_count; i++)
    TRY(fp8lm_simulated_ranks_mean(now->ranks, i, &trainer->gradients[i]));
  options.max_norm = (float)now->settings.clip_grad;
  TRY(fp8optim_schedule_rate(&trainer->schedule, trainer->step, &rate));
  TRY(fp8optim_adamw_set_learning_rate(trainer->adamw, rate));
  TRY(fp8optim_adamw_step(trainer->adamw, trainer->gradients, &options, &report));
  TRY(fp8gpt_model_end_step(trainer->model));
  trainer->step++;
  trainer->skipped_steps += report.skipped;
  trainer->skipped_in_a_row = report.skipped ? trainer->skipped_in_a_row + 1 : 0;
  return FP8CORE_OK;
}

static void find_step(run *now, int64_t index);

static void print_step(const run *now, int64_t reduced, double seconds) {
  const int64_t step_number = now->trainer.step;
  if (reduced < 0 && step_number % now->settings.log_interval != 0) return;
  printf("step %" PRId64 "/%" PRId64 "  loss %.4f  %.1f s", step_number, now->settings.train_iters, now->loss, seconds);
  if (reduced >= 0) {
    for (int i = 0; i < FP8LM_ABLATE_ALGORITHMS; i++) {
      const fp8lm_ablate_step *found = &now->results.steps[(size_t)i * now->results.step_count + (size_t)reduced];
      printf("  %s mu %.5f (%.5f to %.5f)", fp8lm_ablate_algorithm(i), found->mu_median, found->mu_least,
             found->mu_most);
    }
  }
  putchar('\n');
  (void)fflush(stdout);
}

static int train(run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  fp8lm_trainer *trainer = &now->trainer;
  while (trainer->step < settings->train_iters) {
    const int64_t index = trainer->step - (settings->train_iters - now->own.steps);
    const double start = fp8lm_now();
    if (step(now, index >= 0) != FP8CORE_OK) return failed();
    if (index >= 0) find_step(now, index);
    print_step(now, index, fp8lm_now() - start);
    if (trainer->skipped_in_a_row >= settings->max_skipped)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                            "%" PRId64 " steps in a row were skipped, as their gradients were not finite",
                            trainer->skipped_in_a_row);
  }
  return FP8LM_EXIT_SUCCESS;
}

// --- Figures ---

// The number in "layers.NUMBER.", or -1.
static int64_t block_of(const char *name) {
  static const char start[] = "layers.";
  char *end;
  if (strncmp(name, start, strlen(start)) != 0) return -1;
  const long block = strtol(name + strlen(start), &end, 10);
  return *end == '.' ? block : -1;
}

static int64_t elements_of(const fp8gpt_parameter *parameter) {
  return parameter->shape[0] * (parameter->dimensions > 1 ? parameter->shape[1] : 1);
}

static int compare(const void *one, const void *other) {
  double a;
  double b;
  memcpy(&a, one, sizeof(a));
  memcpy(&b, other, sizeof(b));
  return (a > b) - (a < b);
}

static double median(double *values, int64_t count) {
  if (count == 0) return (double)NAN;
  qsort(values, (size_t)count, sizeof(*values), compare);
  return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}

static double share(double part, double whole) { return whole > 0.0 ? part / whole : (double)NAN; }

static int reducer_of(int index) {
  static const fp8comm_gradient_algorithm algorithms[] = {FP8COMM_NATIVE, FP8COMM_TWO_SHOT};
  static const fp8comm_gradient_scaling scalings[] = {FP8COMM_SCALING_AUTO, FP8COMM_SCALING_PRE, FP8COMM_SCALING_POST};
  return fp8lm_reducer_of(algorithms[index / FP8LM_ABLATE_SCALINGS], scalings[index % FP8LM_ABLATE_SCALINGS]);
}

static fp8core_status allocate_results(run *now) {
  fp8lm_ablate_results *results = &now->results;
  results->blocks = (size_t)now->settings.num_layers;
  results->step_count = (size_t)now->own.steps;
  results->measured_steps = now->own.measured_steps;
  results->groups = calloc(fp8lm_ablate_group_count(results), sizeof(*results->groups));
  results->steps = calloc(FP8LM_ABLATE_ALGORITHMS * results->step_count, sizeof(*results->steps));
  if (results->groups && results->steps) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the table of results");
}

// What auto-scaling did in reduced step `index`.
static void find_step(run *now, int64_t index) {
  const int64_t tensors = now->trainer.parameter_count;
  double *mus = malloc((size_t)tensors * sizeof(*mus));
  for (int i = 0; i < FP8LM_ABLATE_ALGORITHMS; i++) {
    fp8lm_ablate_step *found = &now->results.steps[(size_t)i * now->results.step_count + (size_t)index];
    double values = 0.0;
    double saturated = 0.0;
    int64_t count = 0;
    *found = (fp8lm_ablate_step){.step = now->trainer.step, .mu_least = HUGE_VAL, .mu_median = NAN};
    for (int64_t j = 0; j < tensors; j++) {
      const fp8lm_reduction *reduction =
        fp8lm_simulated_reduction(now->ranks, index, reducer_of(i * FP8LM_ABLATE_SCALINGS), j);
      fp8gpt_parameter parameter;
      (void)fp8gpt_model_parameter(now->trainer.model, j, &parameter);
      values += (double)(elements_of(&parameter) * now->own.ranks);
      saturated += (double)(reduction->saturated_in_cast + reduction->saturated_in_sum);
      found->mu_least = fmin(found->mu_least, reduction->mu);
      found->mu_most = fmax(found->mu_most, reduction->mu);
      if (mus) mus[count++] = reduction->mu;
    }
    if (mus) found->mu_median = median(mus, count);
    found->overflow = share(saturated, values);
  }
  free(mus);
}

typedef struct sums {
  double signal;
  double noise;
  double elements;
  double saturated;
  double flushed;
  double lost;
  double at_maximum;
} sums;

static void add(sums *total, const fp8lm_reduction *reduction, int64_t elements) {
  total->signal += reduction->signal;
  total->noise += reduction->noise;
  total->elements += (double)elements;
  total->saturated += (double)(reduction->saturated_in_cast + reduction->saturated_in_sum);
  total->flushed += (double)reduction->flushed_to_zero;
  total->lost += (double)reduction->lost;
  total->at_maximum += (double)reduction->at_maximum;
}

static fp8lm_ablate_figures figures_of(const sums *total, int64_t ranks) {
  const double values = total->elements * (double)ranks;
  const double snr = total->signal > 0.0 ? total->signal / total->noise : (double)NAN;
  return (fp8lm_ablate_figures){.snr = snr,
                                .underflow = share(total->flushed, values),
                                .overflow = share(total->saturated, values),
                                .lost = share(total->lost, total->elements),
                                .at_maximum = share(total->at_maximum, total->elements)};
}

static sums tensor_sums(const run *now, int reducer, int64_t tensor, int64_t elements, int64_t *nonfinite) {
  sums total = {0};
  for (int64_t i = now->own.steps - now->own.measured_steps; i < now->own.steps; i++) {
    const fp8lm_reduction *reduction = fp8lm_simulated_reduction(now->ranks, i, reducer, tensor);
    if (!reduction->nonfinite) add(&total, reduction, elements);
    *nonfinite += reduction->nonfinite;
  }
  return total;
}

// Whether a tensor belongs to a group: a block, all blocks, the others, all.
static int is_in(size_t group, size_t blocks, int64_t block) {
  if (group < blocks) return block == (int64_t)group;
  return group == blocks ? block >= 0 : group == blocks + 1 ? block < 0 : 1;
}

static fp8core_status find_group(run *now, size_t index) {
  fp8lm_ablate_results *results = &now->results;
  fp8lm_ablate_group *group = &results->groups[index];
  static const char *const names[] = {"all blocks", "others", "all"};
  const int64_t tensors = now->trainer.parameter_count;
  sums totals[FP8LM_ABLATE_REDUCERS] = {{0}};
  double *mus = malloc((size_t)tensors * FP8LM_ABLATE_ALGORITHMS * sizeof(*mus));
  if (!mus) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate a list of factors");
  if (index < results->blocks)
    (void)snprintf(group->name, sizeof(group->name), "block %zu", index);
  else
    (void)snprintf(group->name, sizeof(group->name), "%s", names[index - results->blocks]);
  results->nonfinite = 0;
  for (int64_t i = 0; i < tensors; i++) {
    fp8gpt_parameter parameter;
    (void)fp8gpt_model_parameter(now->trainer.model, i, &parameter);
    if (!is_in(index, results->blocks, block_of(parameter.name))) continue;
    const int64_t elements = elements_of(&parameter);
    for (int j = 0; j < FP8LM_ABLATE_REDUCERS; j++) {
      int64_t nonfinite = 0;
      const sums one = tensor_sums(now, reducer_of(j), i, elements, &nonfinite);
      totals[j].signal += one.signal;
      totals[j].noise += one.noise;
      totals[j].elements += one.elements;
      totals[j].saturated += one.saturated;
      totals[j].flushed += one.flushed;
      totals[j].lost += one.lost;
      totals[j].at_maximum += one.at_maximum;
      if (j == 0) results->nonfinite += nonfinite;
      if (j % FP8LM_ABLATE_SCALINGS != 0) continue;
      mus[j / FP8LM_ABLATE_SCALINGS * tensors + group->tensors] =
        fp8lm_simulated_reduction(now->ranks, now->own.steps - 1, reducer_of(j), i)->mu;
    }
    group->tensors++;
    group->elements += elements;
  }
  for (int j = 0; j < FP8LM_ABLATE_REDUCERS; j++) group->figures[j] = figures_of(&totals[j], now->own.ranks);
  for (int j = 0; j < FP8LM_ABLATE_ALGORITHMS; j++) group->mu[j] = median(mus + j * tensors, group->tensors);
  free(mus);
  return FP8CORE_OK;
}

static fp8core_status find_results(run *now) {
  // The last group is all tensors, of which the count of those that are not finite then is.
  for (size_t i = 0; i < fp8lm_ablate_group_count(&now->results); i++) TRY(find_group(now, i));
  return FP8CORE_OK;
}

// --- JSON ---

static void put_real(FILE *json, const char *key, double value) {
  fprintf(json, ", \"%s\": ", key);
  fp8lm_json_write_number(json, value);
}

static void put_text(FILE *json, const char *key, const char *value) {
  fprintf(json, "\"%s\": ", key);
  fp8lm_json_write_string(json, value, strlen(value));
}

static void begin_reducer(FILE *json, int index) {
  fprintf(json, "%s\n    {\"algorithm\": \"%s\", \"scaling\": \"%s\"", index ? "," : "",
          fp8lm_ablate_algorithm(index / FP8LM_ABLATE_SCALINGS), fp8lm_ablate_scaling(index % FP8LM_ABLATE_SCALINGS));
}

static void put_group(FILE *json, const fp8lm_ablate_group *group) {
  fputs("  {", json);
  put_text(json, "name", group->name);
  fprintf(json, ", \"tensors\": %" PRId64 ", \"elements\": %" PRId64 ", \"reducers\": [", group->tensors,
          group->elements);
  for (int i = 0; i < FP8LM_ABLATE_REDUCERS; i++) {
    const fp8lm_ablate_figures *figures = &group->figures[i];
    begin_reducer(json, i);
    put_real(json, "snr", figures->snr);
    put_real(json, "snr_db", fp8lm_ablate_decibels(figures->snr));
    put_real(json, "underflow", figures->underflow);
    put_real(json, "overflow", figures->overflow);
    put_real(json, "lost", figures->lost);
    put_real(json, "at_maximum", i < FP8LM_ABLATE_SCALINGS ? figures->at_maximum : (double)NAN);
    put_real(json, "mu", i % FP8LM_ABLATE_SCALINGS == 0 ? group->mu[i / FP8LM_ABLATE_SCALINGS] : (double)NAN);
    fputc('}', json);
  }
  fputs("]}", json);
}

static void put_tensor_steps(FILE *json, const run *now, int reducer, int64_t tensor) {
  const char *separator = "";
  for (int64_t i = 0; i < now->own.steps; i++) {
    const fp8lm_reduction *reduction = fp8lm_simulated_reduction(now->ranks, i, reducer, tensor);
    if (!reduction->present) continue;
    fprintf(json, "%s\n      {\"step\": %" PRId64 ", \"nonfinite\": %s", separator,
            now->settings.train_iters - now->own.steps + i + 1, reduction->nonfinite ? "true" : "false");
    put_real(json, "mu", reduction->mu);
    fprintf(json,
            ", \"saturated_in_cast\": %" PRIu64 ", \"saturated_in_sum\": %" PRIu64 ", \"flushed_to_zero\": %" PRIu64
            ", \"lost\": %" PRIu64 ", \"at_maximum\": %" PRIu64,
            reduction->saturated_in_cast, reduction->saturated_in_sum, reduction->flushed_to_zero, reduction->lost,
            reduction->at_maximum);
    put_real(json, "signal", reduction->signal);
    put_real(json, "noise", reduction->noise);
    fputc('}', json);
    separator = ",";
  }
}

static void put_tensor(FILE *json, const run *now, int64_t tensor) {
  fp8gpt_parameter parameter;
  (void)fp8gpt_model_parameter(now->trainer.model, tensor, &parameter);
  fputs("  {", json);
  put_text(json, "name", parameter.name);
  fprintf(json, ", \"elements\": %" PRId64 ", \"dtype\": \"%s\", \"reducers\": [", elements_of(&parameter),
          fp8core_dtype_name(parameter.gradient.dtype));
  for (int i = 0; i < FP8LM_ABLATE_REDUCERS; i++) {
    begin_reducer(json, i);
    fputs(", \"steps\": [", json);
    put_tensor_steps(json, now, reducer_of(i), tensor);
    fputs("]}", json);
  }
  fputs("]}", json);
}

static void put_auto(FILE *json, const fp8lm_ablate_results *results, int algorithm) {
  fprintf(json, "  {\"algorithm\": \"%s\", \"steps\": [", fp8lm_ablate_algorithm(algorithm));
  for (size_t i = 0; i < results->step_count; i++) {
    const fp8lm_ablate_step *one = &results->steps[(size_t)algorithm * results->step_count + i];
    fprintf(json, "%s\n    {\"step\": %" PRId64, i ? "," : "", one->step);
    put_real(json, "mu_least", one->mu_least);
    put_real(json, "mu_median", one->mu_median);
    put_real(json, "mu_most", one->mu_most);
    put_real(json, "overflow", one->overflow);
    fputc('}', json);
  }
  fputs("]}", json);
}

static void put_own_options(FILE *json, const own_settings *own) {
  const fp8comm_gradient_options *gradient = &own->gradient;
  fprintf(json, "{\"ranks\": %" PRId64 ", \"ablate-steps\": %" PRId64 ", \"measure-steps\": %" PRId64 ", ", own->ranks,
          own->steps, own->measured_steps);
  put_text(json, "wire-dtype", fp8core_dtype_name(gradient->wire_dtype));
  put_real(json, "saturation-threshold", gradient->saturation_threshold);
  put_real(json, "backoff", gradient->backoff);
  put_real(json, "growth-steps", gradient->growth_steps);
  put_real(json, "mu-initial", gradient->mu_initial);
  put_real(json, "mu-min", gradient->mu_min);
  put_real(json, "mu-max", gradient->mu_max);
  fputc('}', json);
}

static void write_json(FILE *json, const run *now) {
  const fp8lm_ablate_results *results = &now->results;
  fputc('{', json);
  put_text(json, "fp8lm", FP8LM_VERSION);
  fputs(",\n\"options\": ", json);
  fp8lm_train_settings_write(json, &now->settings, 0);
  fputs(",\n\"ablation\": ", json);
  put_own_options(json, &now->own);
  fprintf(json, ",\n\"first_step\": %" PRId64 ", \"step\": %" PRId64 ", \"skipped_steps\": %" PRId64, now->first_step,
          now->trainer.step, now->trainer.skipped_steps);
  put_real(json, "loss", now->loss);
  fputs(",\n\"auto\": [\n", json);
  for (int i = 0; i < FP8LM_ABLATE_ALGORITHMS; i++) {
    if (i) fputs(",\n", json);
    put_auto(json, results, i);
  }
  fputs("],\n\"groups\": [\n", json);
  for (size_t i = 0; i < fp8lm_ablate_group_count(results); i++) {
    if (i) fputs(",\n", json);
    put_group(json, &results->groups[i]);
  }
  fputs("],\n\"tensors\": [\n", json);
  for (int64_t i = 0; i < now->trainer.parameter_count; i++) {
    if (i) fputs(",\n", json);
    put_tensor(json, now, i);
  }
  fputs("]}\n", json);
}

// --- The end ---

static fp8core_status write_page(FILE *stream, const run *now) {
  const own_settings *own = &now->own;
  const fp8lm_train_settings *settings = &now->settings;
  char summary[512];
  char *options = NULL;
  size_t length = 0;
  FILE *text = open_memstream(&options, &length);
  if (text) {
    fp8lm_train_settings_write(text, settings, 2);
    fputc('\n', text);
    put_own_options(text, own);
  }
  if (!text || fclose(text) != 0) {
    free(options);
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for the options");
  }
  (void)snprintf(summary, sizeof(summary),
                 "A model of preset %.40s with %" PRId64 " blocks of width %" PRId64 ", trained in %s to step %" PRId64
                 "; %" PRId64 " ranks, each with %" PRId64 " x %" PRId64
                 " tokens a step; loss %.4f. All ranks' gradients of the last %" PRId64
                 " steps were reduced in FP8 (%s); the figures are of the last %" PRId64 ".",
                 settings->preset, settings->num_layers, settings->hidden_size, fp8lm_train_precision_name(settings),
                 now->trainer.step, own->ranks, settings->micro_batch_size, settings->seq_length, now->loss, own->steps,
                 fp8core_dtype_name(own->gradient.wire_dtype), own->measured_steps);
  const fp8lm_ablate_page page = {own->title, summary, options};
  const fp8core_status status = fp8lm_ablate_write_page(stream, &now->results, &page);
  free(options);
  return status;
}

static int write_outputs(run *now) {
  fp8core_status status = FP8CORE_OK;
  if (now->own.json) {
    write_json(now->json.stream, now);
    if (fp8lm_replacement_commit(&now->json) != FP8CORE_OK) return cannot_write(now->own.json);
  }
  if (now->own.output) {
    status = write_page(now->page.stream, now);
    if (status == FP8CORE_OK) status = fp8lm_replacement_commit(&now->page);
    if (status != FP8CORE_OK) return cannot_write(now->own.output);
  }
  return FP8LM_EXIT_SUCCESS;
}

static int ablate(run *now) {
  int result = check_settings(now);
  if (result == FP8LM_EXIT_SUCCESS) result = open_outputs(now);
  if (result == FP8LM_EXIT_SUCCESS) result = open_data(now);
  if (result == FP8LM_EXIT_SUCCESS) result = open_model(now);
  if (result == FP8LM_EXIT_SUCCESS) result = open_ranks(now);
  if (result == FP8LM_EXIT_SUCCESS && allocate_results(now) != FP8CORE_OK) result = failed();
  if (result == FP8LM_EXIT_SUCCESS) result = train(now);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  if (find_results(now) != FP8CORE_OK) return failed();
  fp8lm_ablate_print(stdout, &now->results);
  return write_outputs(now);
}

int fp8lm_ablate_allreduce(int argc, char **argv) {
  run now = {.own = {.ranks = 128,
                     .steps = 16,
                     .gradient = fp8comm_gradient_options_default(),
                     .title = "Scaling of the FP8 gradient all-reduce"}};
  const fp8lm_train_variant variant = {.usage = usage,
                                       .end = end_of_help,
                                       .options = own_options,
                                       .count = (int)(sizeof(own_options) / sizeof(*own_options)),
                                       .without = without,
                                       .set = set_option,
                                       .user_data = &now.own,
                                       .precision = FP8GPT_BF16,
                                       .train_iters = 64,
                                       .micro_batch_size = 1};
  int result = fp8lm_train_settings_parse_variant(PREFIX, argc, argv, &variant, &now.settings);
  if (result < 0) return FP8LM_EXIT_SUCCESS;
  if (result != FP8LM_EXIT_SUCCESS) return result;
  result = ablate(&now);
  fp8lm_replacement_discard(&now.json);
  fp8lm_replacement_discard(&now.page);
  fp8lm_simulated_ranks_destroy(&now.ranks);
  fp8lm_loader_destroy(&now.loader);
  fp8lm_trainer_destroy(&now.trainer);
  fp8lm_train_settings_free(&now.settings);
  free(now.results.groups);
  free(now.results.steps);
  return result;
}
