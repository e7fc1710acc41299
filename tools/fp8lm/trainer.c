#include "trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fp8comm/collectives.h"
#include "machine.h"
#include "parallel.h"
#include "tokenizer.h"
#include "try.h"

static fp8core_status out_of_memory(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %s", what);
}

static fp8core_status create_optimizer(fp8lm_trainer *trainer) {
  const fp8optim_adamw_options options = fp8lm_train_adamw_options(trainer->settings);
  // Weights, and what does not decay: norms and biases.
  const fp8optim_group groups[2] = {fp8lm_train_group(trainer->settings, 1), fp8lm_train_group(trainer->settings, 0)};
  fp8optim_parameter *parameters = calloc((size_t)trainer->parameter_count, sizeof(*parameters));
  if (!parameters) return out_of_memory("the table of parameters");
  fp8core_status status = FP8CORE_OK;
  for (int64_t i = 0; i < trainer->parameter_count && status == FP8CORE_OK; i++) {
    fp8gpt_parameter parameter;
    status = fp8gpt_model_parameter(trainer->model, i, &parameter);
    if (status != FP8CORE_OK) break;
    parameters[i] = fp8optim_parameter_create(parameter.name, parameter.shape[0], parameter.shape[1]);
    parameters[i].dimensions = parameter.dimensions;
    parameters[i].group = parameter.decay ? 0 : 1;
    parameters[i].with_weight = 1;
    parameters[i].weight_dtype = parameter.weight.dtype;
    parameters[i].weight = parameter.weight.data;
  }
  if (status == FP8CORE_OK)
    status = fp8optim_adamw_create(&trainer->adamw, trainer->context, &options, trainer->parameter_count, parameters, 2,
                                   groups);
  free(parameters);
  return status;
}

// Several ranks. The model's weights and gradients are the sharded optimizer's memory, lent part by part.

static fp8core_status create_sharded(fp8lm_trainer *trainer) {
  const fp8lm_train_settings *settings = trainer->settings;
  const fp8optim_group groups[2] = {fp8lm_train_group(settings, 1), fp8lm_train_group(settings, 0)};
  const int parts = fp8gpt_model_parts(trainer->model);
  fp8zero_parameter *parameters = calloc((size_t)trainer->parameter_count, sizeof(*parameters));
  int *resident = calloc((size_t)parts, sizeof(*resident));
  fp8core_status status = parameters && resident ? FP8CORE_OK : out_of_memory("the table of parameters");
  for (int64_t i = 0; i < trainer->parameter_count && status == FP8CORE_OK; i++) {
    fp8gpt_parameter parameter;
    status = fp8gpt_model_parameter(trainer->model, i, &parameter);
    if (status != FP8CORE_OK) break;
    parameters[i] = fp8zero_parameter_create(parameter.name, parameter.shape[0], parameter.shape[1], parameter.part);
    parameters[i].dimensions = parameter.dimensions;
    parameters[i].group = parameter.decay ? 0 : 1;
    parameters[i].weight_dtype = parameter.weight.dtype;
    parameters[i].gradient_dtype = parameter.gradient.dtype;
  }
  fp8zero_sharded_options options = fp8zero_sharded_options_default();
  options.stage = (int)settings->zero_stage;
  options.adamw = fp8lm_train_adamw_options(settings);
  options.gradient = fp8lm_train_gradient_options(settings);
  options.micro_batches = options.stage >= 2 ? (int)trainer->micro_batches : 1;
  options.resident = resident;
  // Held around all other parts.
  if (resident) resident[0] = fp8gpt_model_config(trainer->model)->tied_embeddings;
  if (status == FP8CORE_OK)
    status = fp8zero_sharded_create(&trainer->sharded, trainer->ranks->communicator, trainer->context, &options,
                                    trainer->parameter_count, parameters, 2, groups);
  free(resident);
  free(parameters);
  return status;
}

static fp8core_status acquire(void *user_data, int part, fp8gpt_direction direction) {
  fp8lm_trainer *trainer = user_data;
  int64_t first;
  int64_t count;
  TRY(fp8zero_sharded_acquire(trainer->sharded, part, (fp8zero_direction)direction));
  TRY(fp8zero_sharded_part(trainer->sharded, part, &first, &count));
  for (int64_t i = first; i < first + count; i++) {
    fp8core_tensor weight;
    void *gradient;
    TRY(fp8zero_sharded_weight(trainer->sharded, i, &weight));
    TRY(fp8gpt_model_bind_weight(trainer->model, i, &weight));
    if (direction == FP8GPT_FORWARD) continue;
    TRY(fp8zero_sharded_gradient(trainer->sharded, i, &gradient));
    TRY(fp8gpt_model_bind_gradient(trainer->model, i, gradient));
  }
  return FP8CORE_OK;
}

// Where gradients stay (stages 0 and 1), micro-batches add up there, and the last one's travel.
static fp8core_status release(void *user_data, int part, fp8gpt_direction direction) {
  fp8lm_trainer *trainer = user_data;
  const int last = trainer->micro_batches_done + 1 == trainer->micro_batches;
  if (direction == FP8GPT_BACKWARD && (last || fp8lm_trainer_stage(trainer) >= 2)) {
    int64_t first;
    int64_t count;
    TRY(fp8zero_sharded_part(trainer->sharded, part, &first, &count));
    for (int64_t i = first; i < first + count; i++) {
      fp8gpt_parameter parameter;
      TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
      trainer->gradients[i] = parameter.gradient;
    }
    TRY(fp8zero_sharded_reduce(trainer->sharded, part, trainer->gradients + first));
  }
  TRY(fp8zero_sharded_release(trainer->sharded, part, (fp8zero_direction)direction));
  return fp8zero_sharded_progress(trainer->sharded);
}

// The optimizer's masters are the initial weights in FP32; the model computes with the weights that it writes.
static fp8core_status set_masters(fp8lm_trainer *trainer) {
  int64_t most = 0;
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    const int64_t elements = parameter.dimensions == 2 ? parameter.shape[0] * parameter.shape[1] : parameter.shape[0];
    if (elements > most) most = elements;
  }
  void *values;
  TRY(fp8core_alloc(trainer->context, (size_t)most * sizeof(float), &values));
  fp8core_status status = FP8CORE_OK;
  for (int64_t i = 0; i < trainer->parameter_count && status == FP8CORE_OK; i++) {
    fp8gpt_parameter parameter;
    fp8core_tensor weight;
    status = fp8gpt_model_parameter(trainer->model, i, &parameter);
    if (status == FP8CORE_OK) status = fp8gpt_model_initial_weight(trainer->model, i, values);
    if (status != FP8CORE_OK) break;
    fp8core_tensor source = fp8core_tensor_create(values, FP8CORE_FP32, parameter.dimensions, parameter.shape);
    source.device = parameter.weight.device;
    if (trainer->sharded) {
      status = fp8zero_sharded_set_master(trainer->sharded, i, &source);
      continue;
    }
    status = fp8optim_adamw_set_state(trainer->adamw, i, FP8OPTIM_MASTER, &source);
    if (status == FP8CORE_OK) status = fp8optim_adamw_state(trainer->adamw, i, FP8OPTIM_WEIGHT, &weight);
    if (status == FP8CORE_OK) status = fp8gpt_model_bind_weight(trainer->model, i, &weight);
  }
  (void)fp8core_free(trainer->context, values);
  return status;
}

// What a rank makes by itself.
static fp8core_status create_model(fp8lm_trainer *trainer) {
  const fp8lm_train_settings *settings = trainer->settings;
  trainer->schedule = fp8lm_train_schedule(settings);
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = (int)settings->threads;
  if (settings->threads == 0 && trainer->ranks->sharing_size > 1 && !getenv("OMP_NUM_THREADS")) {
    const int share = fp8lm_cpus() / trainer->ranks->sharing_size;
    context_options.threads = share > 0 ? share : 1;
  }
  context_options.seed = (uint64_t)settings->seed;
  if (settings->device == FP8LM_TRAIN_CUDA) {
    context_options.device.type = FP8CORE_DEVICE_CUDA;
    context_options.device.index = fp8lm_ranks_gpu(trainer->ranks);
  }
  TRY(fp8core_context_create(&trainer->context, &context_options));
  const fp8gpt_config config = fp8lm_train_model_config(settings);
  fp8gpt_model_options model_options = fp8lm_train_model_options(settings);
  model_options.batch = (int)settings->pass_sequences;
  model_options.external_weights = trainer->ranks->size > 1;
  model_options.external_gradients = trainer->ranks->size > 1;
  TRY(fp8gpt_model_create(&trainer->model, trainer->context, &config, &model_options));
  trainer->parameter_count = fp8gpt_model_parameters(trainer->model);
  const size_t tokens = (size_t)(trainer->micro_batches * settings->pass_sequences * settings->seq_length);
  trainer->gradients = calloc((size_t)trainer->parameter_count, sizeof(*trainer->gradients));
  trainer->tokens = malloc(tokens * sizeof(*trainer->tokens));
  trainer->targets = malloc(tokens * sizeof(*trainer->targets));
  if (!trainer->gradients || !trainer->tokens || !trainer->targets) return out_of_memory("the tokens of a step");
  const size_t scaling_bytes = fp8core_scaling_saved_bytes(fp8gpt_model_scaling(trainer->model));
  if (settings->spike_action == FP8LM_TRAIN_SPIKE_STOP && scaling_bytes > 0) {
    trainer->scaling_before = malloc(scaling_bytes);
    if (!trainer->scaling_before) return out_of_memory("a copy of the scaling state");
  }
  if (settings->device == FP8LM_TRAIN_CUDA && trainer->ranks->size > 1 && scaling_bytes > 0) {
    trainer->amaxes =
      calloc((size_t)fp8core_scaling_tensors(fp8gpt_model_scaling(trainer->model)), sizeof(*trainer->amaxes));
    if (!trainer->amaxes) return out_of_memory("a copy of the scaling state's amaxes");
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_trainer_create(fp8lm_trainer *trainer, const fp8lm_train_settings *settings, fp8lm_ranks *ranks) {
  memset(trainer, 0, sizeof(*trainer));
  trainer->settings = settings;
  trainer->ranks = ranks;
  trainer->micro_batches = fp8lm_train_micro_batches(settings) / ranks->size;
  TRY(fp8lm_ranks_agree(ranks, create_model(trainer)));
  if (ranks->size == 1) {
    TRY(create_optimizer(trainer));
    return set_masters(trainer);
  }
  const fp8gpt_hooks hooks = {sizeof(hooks), trainer, acquire, release};
  if (settings->device == FP8LM_TRAIN_CUDA) TRY(fp8lm_ranks_use_gpu(ranks, trainer->context));
  TRY(create_sharded(trainer));
  trainer->adamw = fp8zero_sharded_adamw(trainer->sharded);
  fp8core_status status = set_masters(trainer);
  if (status == FP8CORE_OK && settings->spike_action == FP8LM_TRAIN_SPIKE_STOP) {
    trainer->reducer_before = malloc(fp8comm_gradient_saved_bytes(fp8zero_sharded_reducer(trainer->sharded)));
    if (!trainer->reducer_before) status = out_of_memory("a copy of the reducer's state");
  }
  TRY(fp8lm_ranks_agree(ranks, status));
  TRY(fp8zero_sharded_publish(trainer->sharded));
  return fp8gpt_model_set_hooks(trainer->model, &hooks);
}

int fp8lm_trainer_stage(const fp8lm_trainer *trainer) {
  return trainer->sharded ? (int)trainer->settings->zero_stage : 0;
}

int64_t fp8lm_trainer_local(const fp8lm_trainer *trainer, int64_t index) {
  return trainer->sharded ? fp8zero_sharded_local(trainer->sharded, index) : index;
}

void fp8lm_trainer_destroy(fp8lm_trainer *trainer) {
  if (trainer->sharded)
    fp8zero_sharded_destroy(&trainer->sharded);
  else
    fp8optim_adamw_destroy(&trainer->adamw);
  fp8gpt_model_destroy(&trainer->model);
  if (trainer->cast_statistics) (void)fp8core_free(trainer->context, trainer->cast_statistics);
  // One that the communicator was given goes after it.
  if (!trainer->ranks || trainer->ranks->context != trainer->context) fp8core_context_destroy(&trainer->context);
  free(trainer->gradients);
  free(trainer->tokens);
  free(trainer->targets);
  free(trainer->scaling_before);
  free(trainer->reducer_before);
  free(trainer->amaxes);
  free(trainer->vocab);
  free(trainer->merges);
  memset(trainer, 0, sizeof(*trainer));
}

fp8core_status fp8lm_trainer_read_tokenizer(fp8lm_trainer *trainer, const char *load) {
  char vocab[PATH_MAX];
  char merges[PATH_MAX];
  if (trainer->settings->vocab_file) {
    if (snprintf(vocab, sizeof(vocab), "%s", trainer->settings->vocab_file) >= PATH_MAX ||
        snprintf(merges, sizeof(merges), "%s", trainer->settings->merge_file) >= PATH_MAX)
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "the path of a tokenizer's file is too long");
  } else if (load) {
    fp8lm_checkpoint_index index;
    TRY(fp8lm_checkpoint_open(load, &index));
    const int there = fp8lm_checkpoint_index_file(&index, FP8LM_CHECKPOINT_VOCAB) &&
                      fp8lm_checkpoint_index_file(&index, FP8LM_CHECKPOINT_MERGES);
    fp8lm_checkpoint_index_free(&index);
    if (!there) return FP8CORE_OK;
    TRY(fp8lm_join_path(vocab, load, FP8LM_CHECKPOINT_VOCAB));
    TRY(fp8lm_join_path(merges, load, FP8LM_CHECKPOINT_MERGES));
  } else {
    return FP8CORE_OK;
  }
  // Checked whole now, not when text is to be generated.
  fp8lm_tokenizer *tokenizer;
  TRY(fp8lm_tokenizer_create_bpe(&tokenizer, vocab, merges));
  const uint32_t vocabulary = fp8lm_tokenizer_vocabulary(tokenizer);
  fp8lm_tokenizer_destroy(&tokenizer);
  if (vocabulary > (uint64_t)trainer->settings->vocab_size)
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                  "%s has %" PRIu32 " tokens, expected at most --vocab-size, %" PRId64, vocab,
                                  vocabulary, trainer->settings->vocab_size);
  TRY(fp8lm_read_whole_file(vocab, FP8LM_TOKENIZER_MAX_FILE, &trainer->vocab, &trainer->vocab_bytes));
  return fp8lm_read_whole_file(merges, FP8LM_TOKENIZER_MAX_FILE, &trainer->merges, &trainer->merges_bytes);
}

// Spikes.

static void find_spike(const fp8lm_trainer *trainer, fp8lm_step_result *result) {
  // Fewer say little of what is usual.
  const int enough = 20;
  double sum = 0.0;
  double squares = 0.0;
  const int count = trainer->loss_count;
  for (int i = 0; i < count; i++) sum += (double)trainer->losses[i];
  result->mean = count ? sum / count : 0.0;
  for (int i = 0; i < count; i++) {
    const double off = (double)trainer->losses[i] - result->mean;
    squares += off * off;
  }
  result->deviation = count ? sqrt(squares / count) : 0.0;
  if (trainer->settings->spike_sigma > 0.0 && count >= enough)
    result->spike = result->loss > result->mean + trainer->settings->spike_sigma * result->deviation;
}

static void remember_loss(fp8lm_trainer *trainer, const fp8lm_step_result *result) {
  if (!isfinite(result->loss)) return;
  if (trainer->loss_count == FP8LM_TRAINER_LOSSES) {
    memmove(trainer->losses, trainer->losses + 1, (FP8LM_TRAINER_LOSSES - 1) * sizeof(*trainer->losses));
    trainer->loss_count--;
  }
  trainer->losses[trainer->loss_count++] = (float)result->loss;
}

// The passes of a step raise amaxes, and may have set scales; reductions change their factors.
static fp8core_status keep_scaling(fp8lm_trainer *trainer) {
  fp8core_scaling *scaling = fp8gpt_model_scaling(trainer->model);
  fp8comm_gradient_reducer *reducer = fp8zero_sharded_reducer(trainer->sharded);
  if (trainer->reducer_before)
    TRY(fp8comm_gradient_save(reducer, trainer->reducer_before, fp8comm_gradient_saved_bytes(reducer)));
  if (!trainer->scaling_before) return FP8CORE_OK;
  return fp8core_scaling_save(scaling, trainer->scaling_before, fp8core_scaling_saved_bytes(scaling));
}

static fp8core_status restore_scaling(fp8lm_trainer *trainer) {
  fp8core_scaling *scaling = fp8gpt_model_scaling(trainer->model);
  fp8comm_gradient_reducer *reducer = fp8zero_sharded_reducer(trainer->sharded);
  if (trainer->sharded) TRY(fp8zero_sharded_skip(trainer->sharded));
  if (trainer->reducer_before)
    TRY(fp8comm_gradient_load(reducer, trainer->reducer_before, fp8comm_gradient_saved_bytes(reducer)));
  if (!trainer->scaling_before) return FP8CORE_OK;
  return fp8core_scaling_load(scaling, trainer->scaling_before, fp8core_scaling_saved_bytes(scaling));
}

// Forward and backward passes of a step. The mean of all ranks' means is that of all micro-batches, whose numbers are
// those that one rank would give them.
static fp8core_status run_micro_batches(fp8lm_trainer *trainer, double *loss) {
  const fp8lm_train_settings *settings = trainer->settings;
  const int64_t micro_batches = trainer->micro_batches;
  const int64_t before = trainer->ranks->rank * micro_batches;
  // Their gradients are added up by the owner, not here.
  const int alone = fp8lm_trainer_stage(trainer) >= 2;
  const int64_t tokens = settings->pass_sequences * settings->seq_length;
  double sum = 0.0;
  for (int64_t i = 0; i < micro_batches; i++) {
    fp8gpt_batch batch;
    float micro_loss;
    batch.sequences = (int)settings->pass_sequences;
    batch.length = (int)settings->seq_length;
    batch.tokens = trainer->tokens + i * tokens;
    batch.targets = trainer->targets + i * tokens;
    trainer->micro_batches_done = i;
    TRY(fp8gpt_model_train(trainer->model, &batch, i == 0 || alone, 1.0f / (float)micro_batches, trainer->step,
                           (int)(before + i), &micro_loss));
    sum += (double)micro_loss;
  }
  TRY(fp8lm_ranks_sum(trainer->ranks, &sum, 1));
  *loss = sum / (double)(micro_batches * trainer->ranks->size);
  return FP8CORE_OK;
}

// Every rank's scales come from what all ranks saw.
static fp8core_status share_amaxes(fp8lm_trainer *trainer) {
  fp8core_scaling *scaling = fp8gpt_model_scaling(trainer->model);
  if (!scaling || !trainer->sharded) return FP8CORE_OK;
  const int64_t count = fp8core_scaling_tensors(scaling);
  float *amaxes = fp8core_scaling_amaxes(scaling);
  if (!trainer->amaxes)
    return fp8comm_all_reduce(trainer->ranks->communicator, amaxes, amaxes, count, FP8COMM_FP32, FP8COMM_MAX);
  // By way of the host, where a NaN is never lost: NCCL's maximum may lose one.
  const size_t bytes = (size_t)count * sizeof(*amaxes);
  TRY(fp8core_copy(trainer->context, trainer->amaxes, amaxes, bytes));
  TRY(fp8comm_all_reduce(trainer->ranks->communicator, trainer->amaxes, trainer->amaxes, count, FP8COMM_FP32,
                         FP8COMM_MAX));
  return fp8core_copy(trainer->context, amaxes, trainer->amaxes, bytes);
}

static fp8core_status step_alone(fp8lm_trainer *trainer, const fp8optim_step_options *options,
                                 fp8optim_step_report *report) {
  // Scales of FP8 gradients are those of this step: their tensors are asked for anew.
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    TRY(fp8gpt_model_parameter(trainer->model, i, &parameter));
    trainer->gradients[i] = parameter.gradient;
  }
  return fp8optim_adamw_step(trainer->adamw, trainer->gradients, options, report);
}

static fp8core_status optimize(fp8lm_trainer *trainer, fp8lm_step_result *result) {
  fp8optim_step_options options = fp8optim_step_options_default();
  fp8optim_step_report report;
  options.max_norm = (float)trainer->settings->clip_grad;
  TRY(fp8optim_schedule_rate(&trainer->schedule, trainer->step, &result->learning_rate));
  TRY(fp8optim_adamw_set_learning_rate(trainer->adamw, result->learning_rate));
  TRY(share_amaxes(trainer));
  if (trainer->sharded)
    TRY(fp8zero_sharded_step(trainer->sharded, &options, &report));
  else
    TRY(step_alone(trainer, &options, &report));
  result->gradient_norm = report.gradient_norm;
  result->clip_factor = report.clip_factor;
  result->skipped = report.skipped;
  return fp8gpt_model_end_step(trainer->model);
}

// Ends a step without an update, as the optimizer does where gradients are not finite.
static fp8core_status pass_over(fp8lm_trainer *trainer, fp8lm_step_result *result) {
  result->skipped = 1;
  result->gradient_norm = NAN;
  result->clip_factor = NAN;
  if (trainer->sharded) {
    TRY(fp8zero_sharded_skip(trainer->sharded));
    TRY(share_amaxes(trainer));
  }
  TRY(fp8optim_schedule_rate(&trainer->schedule, trainer->step, &result->learning_rate));
  return fp8gpt_model_end_step(trainer->model);
}

fp8core_status fp8lm_trainer_step(fp8lm_trainer *trainer, const fp8lm_loader *loader, fp8lm_step_observer observer,
                                  void *user_data, fp8lm_step_result *result) {
  const fp8lm_train_settings *settings = trainer->settings;
  memset(result, 0, sizeof(*result));
  const double start = fp8lm_now();
  TRY(fp8lm_ranks_agree(trainer->ranks,
                        fp8lm_loader_batch(loader, FP8LM_TRAIN, (uint64_t)trainer->step, (uint32_t)trainer->ranks->rank,
                                           (uint32_t)trainer->ranks->size,
                                           (size_t)(trainer->micro_batches * settings->pass_sequences),
                                           (size_t)settings->seq_length, trainer->tokens, trainer->targets)));
  result->begun = 1;
  TRY(keep_scaling(trainer));
  const double data_done = fp8lm_now();
  TRY(run_micro_batches(trainer, &result->loss));
  const double model_done = fp8lm_now();
  if (observer) TRY(observer(trainer, user_data));
  find_spike(trainer, result);
  // What is not finite is the optimizer's to skip.
  const int spike = result->spike && isfinite(result->loss);
  result->stopped = spike && settings->spike_action == FP8LM_TRAIN_SPIKE_STOP;
  if (result->stopped) return restore_scaling(trainer);
  const int pass = spike && settings->spike_action == FP8LM_TRAIN_SPIKE_SKIP;
  const double observed = fp8lm_now();
  TRY(pass ? pass_over(trainer, result) : optimize(trainer, result));
  result->data_seconds = data_done - start;
  result->model_seconds = model_done - data_done;
  result->optimizer_seconds = fp8lm_now() - observed;
  // A spike that is passed over must not make the next one look usual.
  if (!pass) remember_loss(trainer, result);
  trainer->step++;
  trainer->skipped_steps += result->skipped;
  trainer->skipped_in_a_row = result->skipped ? trainer->skipped_in_a_row + 1 : 0;
  return FP8CORE_OK;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A pass over \p count sequences from \p first on; over none, one that does not count: all ranks make as many passes,
// as the weights of parts may come from all of them.
static fp8core_status validate_some(fp8lm_trainer *trainer, const fp8lm_loader *loader, int64_t first, int64_t count,
                                    double *sum, int *unread) {
  const int64_t length = trainer->settings->seq_length;
  const int64_t passed = count > 0 ? count : 1;
  fp8core_status status = FP8CORE_OK;
  for (int64_t i = 0; i < count && status == FP8CORE_OK; i++)
    status = fp8lm_loader_batch(loader, FP8LM_VALIDATION, (uint64_t)(first + i), 0, 1, 1, (size_t)length,
                                trainer->tokens + i * length, trainer->targets + i * length);
  *unread = 1;
  TRY(fp8lm_ranks_agree(trainer->ranks, status));
  *unread = 0;
  for (int64_t i = 0; count == 0 && i < length; i++) {
    trainer->tokens[i] = 0;
    trainer->targets[i] = -1;
  }
  const fp8gpt_batch batch = {(int)passed, (int)length, trainer->tokens, trainer->targets};
  float mean;
  TRY(fp8gpt_model_loss(trainer->model, &batch, &mean));
  *sum += (double)mean * (double)count;
  return FP8CORE_OK;
}

fp8core_status fp8lm_trainer_validate(fp8lm_trainer *trainer, const fp8lm_loader *loader, const volatile int *stop,
                                      double *loss, int64_t *sequences, int *unread) {
  const fp8lm_train_settings *settings = trainer->settings;
  const fp8lm_ranks *ranks = trainer->ranks;
  int64_t wanted = (int64_t)fp8lm_loader_sequences(loader, FP8LM_VALIDATION, (size_t)settings->seq_length);
  if (settings->eval_iters > 0) wanted = smaller(wanted, settings->eval_iters * settings->micro_batch_size);
  double sum = 0.0;
  *sequences = 0;
  *unread = 0;
  while (*sequences < wanted) {
    int64_t stopped = stop && *stop;
    TRY(fp8lm_ranks_max(ranks, &stopped, 1));
    if (stopped) {
      *sequences = 0;
      break;
    }
    const int64_t first = *sequences + ranks->rank * settings->pass_sequences;
    const int64_t left = first < wanted ? wanted - first : 0;
    TRY(validate_some(trainer, loader, first, smaller(settings->pass_sequences, left), &sum, unread));
    *sequences = smaller(wanted, *sequences + ranks->size * settings->pass_sequences);
  }
  TRY(fp8lm_ranks_sum(ranks, &sum, 1));
  *loss = *sequences > 0 ? sum / (double)*sequences : 0.0;
  return FP8CORE_OK;
}
