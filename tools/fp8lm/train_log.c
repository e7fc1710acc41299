#include "train_log.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "fp8comm/device.h"
#include "fp8core/fp8core.h"
#include "json_writer.h"
#include "machine.h"
#include "output.h"

static fp8core_status at_path(const char *path, fp8core_status status) {
  char reason[400];
  (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  return status == FP8CORE_OK ? status : fp8core_set_last_error(status, "%.100s: %s", path, reason);
}

// Without the sign of a NaN, which printf() would show.
static double plain(double value) { return isnan(value) ? (double)NAN : value; }

// Pieces of a JSON object on one line.

static void begin(FILE *json, const char *event) { fprintf(json, "{\"event\": \"%s\"", event); }

static void put_integer(FILE *json, const char *key, int64_t value) { fprintf(json, ", \"%s\": %" PRId64, key, value); }

static void put_real(FILE *json, const char *key, double value) {
  fprintf(json, ", \"%s\": ", key);
  fp8lm_json_write_number(json, value);
}

static void put_text(FILE *json, const char *key, const char *value) {
  fprintf(json, ", \"%s\": ", key);
  fp8lm_json_write_string(json, value, strlen(value));
}

static void finish(fp8lm_train_log *log) {
  fputs("}\n", log->json);
  // A line is whole in the file when the next step begins, whatever ends the program.
  if (fflush(log->json) != 0 && log->json_error == 0) log->json_error = errno;
}

// The file and the events.

// Locked, for the lines of two runs in one file would belong to neither.
static fp8core_status open_json(fp8lm_train_log *log, const char *path) {
  int descriptor;
  const fp8core_status status = fp8lm_output_open_locked(&descriptor, path, "this log");
  if (status != FP8CORE_OK) return status;
  char last = '\n';
  const off_t size = lseek(descriptor, 0, SEEK_END);
  if (size > 0 && pread(descriptor, &last, 1, size - 1) != 1) last = '\n';
  log->json = fdopen(descriptor, "a");
  if (!log->json) {
    const int reason = errno;
    (void)close(descriptor);
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot open the log: %s", strerror(reason));
  }
  // A run that died, or met a full disk, has left a part of a line: it stays alone.
  if (last != '\n') fputc('\n', log->json);
  return FP8CORE_OK;
}

static const char *folder_of(const fp8lm_train_settings *settings) {
  return settings->log_dir ? settings->log_dir : settings->save;
}

fp8core_status fp8lm_train_log_open(fp8lm_train_log *log, const fp8lm_train_settings *settings,
                                    const volatile sig_atomic_t *stop) {
  memset(log, 0, sizeof(*log));
  log->settings = settings;
  log->screen = fp8lm_output_screen(stop);
  if (!log->screen) return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the stream of lines");
  // Open MPI gives ranks a terminal of their own, whatever its output is.
  log->bar = isatty(STDOUT_FILENO) && !getenv("PMIX_RANK");
  const char *folder = folder_of(settings);
  char path[PATH_MAX];
  if (folder) {
    fp8core_status status = fp8lm_make_folders(folder);
    if (status == FP8CORE_OK) status = fp8lm_join_path(path, folder, "log.jsonl");
    if (status != FP8CORE_OK) return at_path(folder, status);
    status = open_json(log, path);
    if (status != FP8CORE_OK) return at_path(path, status);
  }
  if (!folder && !settings->tensorboard_dir) return FP8CORE_OK;
  fp8core_status status = FP8CORE_OK;
  if (settings->tensorboard_dir)
    (void)snprintf(path, sizeof(path), "%s", settings->tensorboard_dir);
  else
    status = fp8lm_join_path(path, folder, "tensorboard");
  if (status == FP8CORE_OK) status = fp8lm_make_folders(path);
  if (status == FP8CORE_OK) status = fp8lm_event_file_create(&log->events, path);
  return at_path(path, status);
}

static void end_bar(fp8lm_train_log *log) {
  if (log->bar_shown) fputs("\r\033[K", log->screen);
  log->bar_shown = 0;
}

fp8core_status fp8lm_train_log_close(fp8lm_train_log *log) {
  end_bar(log);
  fp8core_status status = fp8lm_event_file_close(&log->events);
  if (log->json) {
    if (fclose(log->json) != 0 && log->json_error == 0) log->json_error = errno;
    if (log->json_error != 0)
      status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%.300s/log.jsonl could not be written whole: %s",
                                      folder_of(log->settings), strerror(log->json_error));
  }
  log->json = NULL;
  if (log->screen && fclose(log->screen) != 0 && status == FP8CORE_OK)
    status =
      fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "cannot write to standard output: %s", strerror(errno));
  log->screen = NULL;
  return status;
}

// Resident memory, in bytes; 0 where the system does not tell.
static int64_t peak_of_status(void) {
  char line[256];
  int64_t kilobytes = 0;
  FILE *status = fopen("/proc/self/status", "r");
  if (!status) return 0;
  while (fgets(line, sizeof(line), status))
    if (strncmp(line, "VmHWM:", 6) == 0) kilobytes = strtoll(line + 6, NULL, 10);
  (void)fclose(status);
  return 1024 * kilobytes;
}

// Setting up takes an FP32 copy of the largest weight, which training has no use for: its own peak begins here.
static void reset_peak(void) {
  FILE *references = fopen("/proc/self/clear_refs", "w");
  if (!references) return;
  fputs("5\n", references);
  (void)fclose(references);
}

// The start.

static const char *reduction_name(const fp8lm_trainer *trainer) {
  return fp8comm_gradient_algorithm_name(fp8lm_train_gradient_options(trainer->settings).algorithm);
}

// How ranks exchange what is on GPUs, after how they exchange the rest.
static const char *gpu_path(const fp8lm_trainer *trainer) {
  if (!trainer->ranks->context) return "";
  const char *path = fp8comm_communicator_device_path(trainer->ranks->communicator);
  return strcmp(path, "nccl") == 0     ? ", GPUs over NCCL"
         : strcmp(path, "staged") == 0 ? ", GPUs by way of the host"
                                       : ", GPUs too";
}

static void put_memory(FILE *json, const fp8gpt_memory *model, const fp8optim_memory *optimizer) {
  fprintf(json,
          ", \"memory\": {\"weights\": %" PRId64 ", \"gradients\": %" PRId64 ", \"master\": %" PRId64
          ", \"exp_avg\": %" PRId64 ", \"exp_avg_sq\": %" PRId64 ", \"activations\": %" PRId64
          ", \"workspace\": %" PRId64 ", \"optimizer_overhead\": %" PRId64 "}",
          model->weight_bytes, model->gradient_bytes, optimizer->master_bytes, optimizer->exp_avg_bytes,
          optimizer->exp_avg_sq_bytes, model->activation_bytes, model->workspace_bytes, optimizer->overhead_bytes);
}

// Of several ranks, rank 0's: weights and gradients are the sharded optimizer's then, and with what its exchanges need
// its overhead.
static fp8core_status optimizer_memory(const fp8lm_trainer *trainer, fp8gpt_memory *model, fp8optim_memory *optimizer) {
  fp8zero_memory sharded;
  if (!trainer->sharded) return fp8optim_adamw_memory(trainer->adamw, optimizer);
  const fp8core_status status = fp8zero_sharded_memory(trainer->sharded, &sharded);
  if (status != FP8CORE_OK) return status;
  model->weight_bytes = sharded.weight_bytes + sharded.weight_buffer_bytes;
  model->gradient_bytes = sharded.gradient_bytes + sharded.gradient_buffer_bytes + sharded.mean_gradient_bytes;
  optimizer->master_bytes = sharded.master_bytes;
  optimizer->exp_avg_bytes = sharded.exp_avg_bytes;
  optimizer->exp_avg_sq_bytes = sharded.exp_avg_sq_bytes;
  optimizer->overhead_bytes = sharded.communication_bytes + sharded.overhead_bytes;
  return FP8CORE_OK;
}

static void print_start(const fp8lm_train_log *log, const fp8lm_trainer *trainer, const char *load,
                        const fp8gpt_memory *model, const fp8optim_memory *optimizer, uint64_t train_tokens,
                        uint64_t validation_tokens) {
  FILE *screen = log->screen;
  const fp8lm_train_settings *settings = trainer->settings;
  const double mebibyte = 1048576.0;
  const int64_t states = model->weight_bytes + model->gradient_bytes + optimizer->master_bytes +
                         optimizer->exp_avg_bytes + optimizer->exp_avg_sq_bytes;
  fprintf(screen, "%s, %s, %" PRId64 " parameters; %d CPU thread%s, %s", settings->preset,
          fp8lm_train_precision_name(settings), model->parameters, fp8core_context_threads(trainer->context),
          fp8core_context_threads(trainer->context) == 1 ? "" : "s",
          fp8core_isa_name(fp8core_context_isa(trainer->context)));
  if (log->peak > 0.0) fprintf(screen, ", %.0f GFLOP/s measured peak", log->peak / 1e9);
  // On a CPU there is one only.
  if (settings->device == FP8LM_TRAIN_CUDA) fprintf(screen, "\nattention: %s", fp8gpt_model_attention(trainer->model));
  fprintf(screen,
          "\nmemory: weights %.1f MiB, gradients %.1f, master %.1f, exp_avg %.1f, exp_avg_sq %.1f: %.2f bytes a "
          "parameter; activations %.1f, workspace %.1f\n",
          (double)model->weight_bytes / mebibyte, (double)model->gradient_bytes / mebibyte,
          (double)optimizer->master_bytes / mebibyte, (double)optimizer->exp_avg_bytes / mebibyte,
          (double)optimizer->exp_avg_sq_bytes / mebibyte, (double)states / (double)model->parameters,
          (double)model->activation_bytes / mebibyte, (double)model->workspace_bytes / mebibyte);
  fprintf(screen, "data: %" PRIu64 " tokens for training, %" PRIu64 " for validation; %" PRId64 " a step\n",
          train_tokens, validation_tokens, settings->global_batch_size * settings->seq_length);
  if (trainer->sharded)
    fprintf(screen, "%d ranks over %s%s, ZeRO stage %d, gradients reduced by %s; memory is that of rank 0\n",
            trainer->ranks->size, fp8comm_communicator_transport(trainer->ranks->communicator), gpu_path(trainer),
            fp8lm_trainer_stage(trainer), reduction_name(trainer));
  if (load) fprintf(screen, "continuing %s after %" PRId64 " steps\n", load, trainer->step);
  (void)fflush(screen);
}

fp8core_status fp8lm_train_log_start(fp8lm_train_log *log, fp8lm_trainer *trainer, const char *load,
                                     uint64_t train_tokens, uint64_t validation_tokens) {
  const fp8lm_train_settings *settings = trainer->settings;
  fp8gpt_memory model;
  fp8optim_memory optimizer;
  fp8core_status status = fp8gpt_memory_report(trainer->model, &model);
  if (status == FP8CORE_OK) status = optimizer_memory(trainer, &model, &optimizer);
  if (status != FP8CORE_OK) return status;
  const fp8gpt_config *config = fp8gpt_model_config(trainer->model);
  log->setup_peak = peak_of_status();
  reset_peak();
  log->flops_per_token = fp8gpt_config_flops_per_token(config, (int)settings->seq_length);
  print_start(log, trainer, load, &model, &optimizer, train_tokens, validation_tokens);
  if (!log->json) return FP8CORE_OK;
  FILE *json = log->json;
  begin(json, "start");
  put_integer(json, "step", trainer->step);
  put_text(json, "fp8lm", FP8LM_VERSION);
  if (load) put_text(json, "load", load);
  put_integer(json, "parameters", model.parameters);
  put_integer(json, "ranks", trainer->ranks->size);
  if (trainer->sharded) {
    put_text(json, "transport", fp8comm_communicator_transport(trainer->ranks->communicator));
    put_text(json, "device_path", fp8comm_communicator_device_path(trainer->ranks->communicator));
    put_integer(json, "zero_stage", fp8lm_trainer_stage(trainer));
    put_text(json, "grad_reduce", reduction_name(trainer));
    put_text(json, "grad_scaling", fp8comm_gradient_scaling_name(fp8lm_train_gradient_options(settings).scaling));
    put_integer(json, "grad_delayed_scaling", settings->grad_delayed_scaling);
  }
  put_integer(json, "threads", fp8core_context_threads(trainer->context));
  put_text(json, "isa", fp8core_isa_name(fp8core_context_isa(trainer->context)));
  put_text(json, "attention", fp8gpt_model_attention(trainer->model));
  put_real(json, "peak_flops", log->peak);
  put_real(json, "flops_per_token", log->flops_per_token);
  put_integer(json, "tokens_per_step", settings->global_batch_size * settings->seq_length);
  put_integer(json, "train_tokens", (int64_t)train_tokens);
  put_integer(json, "validation_tokens", (int64_t)validation_tokens);
  put_memory(json, &model, &optimizer);
  fputs(", \"options\": ", json);
  fp8lm_train_settings_write(json, settings, 0);
  finish(log);
  return FP8CORE_OK;
}

// Steps.

static void format_time(double seconds, char *text, size_t size) {
  const int64_t whole = (int64_t)(seconds + 0.5);
  if (whole >= 3600)
    (void)snprintf(text, size, "%" PRId64 ":%02d:%02d", whole / 3600, (int)(whole / 60 % 60), (int)(whole % 60));
  else
    (void)snprintf(text, size, "%d:%02d", (int)(whole / 60), (int)(whole % 60));
}

static void draw_bar(fp8lm_train_log *log, int64_t step, int64_t steps, const char *figures) {
  const double now = fp8lm_now();
  if (log->bar_shown && now - log->bar_time < 0.1 && step < steps) return;
  struct winsize window = {.ws_col = 80};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_col < 20) window.ws_col = 80;
  const int rest = window.ws_col - 4 - (int)strlen(figures);
  const int width = rest > 40 ? 40 : rest;
  fputs("\r\033[K", log->screen);
  if (width >= 5) {
    const int done = (int)((double)step / (double)steps * width);
    fputc('[', log->screen);
    for (int i = 0; i < width; i++) fputc(i < done ? '#' : '.', log->screen);
    fputs("] ", log->screen);
  }
  fprintf(log->screen, "%.*s", window.ws_col - 1, figures);
  (void)fflush(log->screen);
  log->bar_shown = 1;
  log->bar_time = now;
}

static double seconds_of(const fp8lm_step_result *result) {
  return result->data_seconds + result->model_seconds + result->optimizer_seconds;
}

// Of rank 0, since the start: what it sent.
static void put_traffic(FILE *json, const fp8lm_trainer *trainer) {
  fp8zero_traffic traffic;
  if (!trainer->sharded || fp8zero_sharded_traffic(trainer->sharded, &traffic) != FP8CORE_OK) return;
  put_integer(json, "gradient_bytes_sent", (int64_t)traffic.gradient_bytes);
  put_integer(json, "weight_bytes_sent", (int64_t)traffic.weight_bytes);
}

static void print_step(fp8lm_train_log *log, const fp8lm_trainer *trainer, const fp8lm_step_result *result) {
  const fp8lm_train_settings *settings = log->settings;
  const int64_t tokens = settings->global_batch_size * settings->seq_length;
  char left[32];
  char figures[256];
  log->seconds += seconds_of(result);
  log->loss_sum += result->loss;
  log->steps++;
  log->all_seconds += seconds_of(result);
  log->all_steps++;
  const int due = trainer->step % settings->log_interval == 0 || trainer->step == settings->train_iters;
  if (!due && !log->bar) return;
  const double rate = (double)(log->steps * tokens) / log->seconds;
  format_time((double)(settings->train_iters - trainer->step) * log->all_seconds / (double)log->all_steps, left,
              sizeof(left));
  int used = snprintf(figures, sizeof(figures), "%s%" PRId64 "/%" PRId64 "  loss %.4f  ", log->bar ? "" : "step ",
                      trainer->step, settings->train_iters, plain(log->loss_sum / (double)log->steps));
  // The bar wants the room.
  if (!log->bar)
    used += snprintf(figures + used, sizeof(figures) - (size_t)used, "lr %.2e  norm %.3f  ", result->learning_rate,
                     plain((double)result->gradient_norm));
  used += snprintf(figures + used, sizeof(figures) - (size_t)used, "%.0f tokens/s", rate);
  if (log->peak > 0.0)
    used += snprintf(figures + used, sizeof(figures) - (size_t)used, "  MFU %.1f %%%s",
                     100.0 * fp8lm_share_of_peak(&log->peak, rate * log->flops_per_token),
                     log->bar ? "" : " of the measured peak");
  (void)snprintf(figures + used, sizeof(figures) - (size_t)used, "  %s left", left);
  if (log->bar) {
    draw_bar(log, trainer->step, settings->train_iters, figures);
  } else {
    fprintf(log->screen, "%s\n", figures);
    (void)fflush(log->screen);
  }
  if (!due) return;
  log->seconds = 0.0;
  log->loss_sum = 0.0;
  log->steps = 0;
}

void fp8lm_train_log_step(fp8lm_train_log *log, const fp8lm_trainer *trainer, const fp8lm_step_result *result) {
  const fp8lm_train_settings *settings = log->settings;
  const int64_t tokens = settings->global_batch_size * settings->seq_length;
  const double rate = (double)tokens / seconds_of(result);
  const double utilization = fp8lm_share_of_peak(&log->peak, rate * log->flops_per_token);
  if (log->json) {
    begin(log->json, "step");
    put_integer(log->json, "step", trainer->step);
    put_integer(log->json, "tokens", trainer->step * tokens);
    put_real(log->json, "loss", result->loss);
    put_real(log->json, "lr", result->learning_rate);
    put_real(log->json, "grad_norm", (double)result->gradient_norm);
    put_real(log->json, "clip_factor", (double)result->clip_factor);
    fprintf(log->json, ", \"skipped\": %s, \"spike\": %s", result->skipped ? "true" : "false",
            result->spike ? "true" : "false");
    put_integer(log->json, "skipped_steps", trainer->skipped_steps);
    put_real(log->json, "tokens_per_second", rate);
    put_real(log->json, "mfu", utilization);
    put_real(log->json, "data_seconds", result->data_seconds);
    put_real(log->json, "model_seconds", result->model_seconds);
    put_real(log->json, "optimizer_seconds", result->optimizer_seconds);
    put_traffic(log->json, trainer);
    finish(log);
  }
  if (log->events) {
    const fp8lm_scalar scalars[] = {
      {"train/loss", (float)result->loss},
      {"train/learning_rate", (float)result->learning_rate},
      {"train/gradient_norm", result->gradient_norm},
      {"train/skipped_steps", (float)trainer->skipped_steps},
      {"speed/tokens_per_second", (float)rate},
      {"speed/mfu", (float)utilization},
    };
    fp8lm_event_file_add(log->events, trainer->step, scalars, sizeof(scalars) / sizeof(*scalars));
  }
  if (result->skipped || result->spike) {
    end_bar(log);
    // A spike of the trainer's own skipping has a finite loss, and its gradients were not looked at.
    const int passed_over =
      result->skipped && result->spike && isfinite(result->loss) && settings->spike_action == FP8LM_TRAIN_SPIKE_SKIP;
    if (result->skipped)
      fprintf(log->screen, "step %" PRId64 ": skipped, as its %s (%" PRId64 " so far, %" PRId64 " in a row)\n",
              trainer->step, passed_over ? "loss is a spike" : "gradients are not finite", trainer->skipped_steps,
              trainer->skipped_in_a_row);
    if (result->spike)
      fprintf(log->screen,
              "step %" PRId64 ": the loss of %.4f is a spike: the steps before had %.4f, with a deviation of %.4f\n",
              trainer->step, plain(result->loss), result->mean, result->deviation);
  }
  print_step(log, trainer, result);
}

void fp8lm_train_log_spike(fp8lm_train_log *log, const fp8lm_trainer *trainer, const fp8lm_step_result *result) {
  end_bar(log);
  if (!log->json) return;
  begin(log->json, "spike");
  put_integer(log->json, "step", trainer->step + 1);
  put_real(log->json, "loss", result->loss);
  put_real(log->json, "mean", result->mean);
  put_real(log->json, "deviation", result->deviation);
  finish(log);
}

void fp8lm_train_log_validation(fp8lm_train_log *log, const fp8lm_trainer *trainer, double loss, int64_t sequences,
                                double seconds) {
  if (log->json) {
    begin(log->json, "validation");
    put_integer(log->json, "step", trainer->step);
    put_real(log->json, "loss", loss);
    put_integer(log->json, "sequences", sequences);
    put_real(log->json, "seconds", seconds);
    finish(log);
  }
  if (log->events) {
    const fp8lm_scalar scalar = {"validation/loss", (float)loss};
    fp8lm_event_file_add(log->events, trainer->step, &scalar, 1);
    fp8lm_event_file_flush(log->events);
  }
  end_bar(log);
  fprintf(log->screen, "step %" PRId64 ": validation loss %.4f\n", trainer->step, plain(loss));
  (void)fflush(log->screen);
}

void fp8lm_train_log_checkpoint(fp8lm_train_log *log, const fp8lm_trainer *trainer, double seconds) {
  if (log->json) {
    begin(log->json, "checkpoint");
    put_integer(log->json, "step", trainer->step);
    put_text(log->json, "folder", log->settings->save);
    put_real(log->json, "seconds", seconds);
    finish(log);
  }
  if (log->events) fp8lm_event_file_flush(log->events);
  end_bar(log);
  fprintf(log->screen, "step %" PRId64 ": checkpoint written to %s in %.2f s\n", trainer->step, log->settings->save,
          seconds);
  (void)fflush(log->screen);
}

// FP8 tensors.

static fp8core_status out_of_memory(const char *what) {
  return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate %s", what);
}

// What the codes of a tensor in FP8 show: shares of zeros and of values at the format's end.
static void put_codes(FILE *json, const fp8core_tensor *tensor, const unsigned char *codes) {
  const int64_t elements = fp8core_tensor_elements(tensor);
  int64_t zeros = 0;
  int64_t ends = 0;
  for (int64_t i = 0; i < elements; i++) {
    const unsigned magnitude = codes[i] & 127;
    zeros += magnitude == 0;
    // E4M3's 448.
    ends += magnitude == 126;
  }
  put_real(json, "zero_share", (double)zeros / (double)elements);
  put_real(json, "saturated_share", (double)ends / (double)elements);
}

// A tensor in FP8 and its scale as host memory has them; *copy is memory that grows, for tensors of another device.
static fp8core_status read_codes(const fp8lm_trainer *trainer, const fp8core_tensor *tensor, void **copy,
                                 const unsigned char **codes, float *scale) {
  const fp8core_status status = fp8core_copy(trainer->context, scale, tensor->scale, sizeof(*scale));
  *codes = tensor->data;
  if (status != FP8CORE_OK || tensor->device.type == FP8CORE_DEVICE_CPU) return status;
  const size_t bytes = (size_t)fp8core_tensor_elements(tensor);
  void *larger = realloc(*copy, bytes);
  if (!larger) return out_of_memory("a copy of a tensor");
  *copy = larger;
  *codes = larger;
  return fp8core_copy(trainer->context, larger, tensor->data, bytes);
}

static fp8core_status put_weights(FILE *json, const fp8lm_trainer *trainer, void **copy, const char **separator) {
  for (int64_t i = 0; i < trainer->parameter_count; i++) {
    fp8gpt_parameter parameter;
    const fp8core_status status = fp8gpt_model_parameter(trainer->model, i, &parameter);
    if (status != FP8CORE_OK) return status;
    const fp8core_tensor *tensors[2] = {&parameter.weight, &parameter.gradient};
    for (int which = 0; which < 2; which++) {
      if (tensors[which]->dtype != FP8CORE_E4M3 || !tensors[which]->scale) continue;
      const unsigned char *codes;
      float scale;
      const fp8core_status read = read_codes(trainer, tensors[which], copy, &codes, &scale);
      if (read != FP8CORE_OK) return read;
      fprintf(json, "%s{\"name\": ", *separator);
      *separator = ", ";
      char name[320];
      (void)snprintf(name, sizeof(name), "%s%s", parameter.name, which ? ".gradient" : "");
      fp8lm_json_write_string(json, name, strlen(name));
      put_text(json, "dtype", fp8core_dtype_name(tensors[which]->dtype));
      put_real(json, "scale", (double)scale);
      put_codes(json, tensors[which], codes);
      fputc('}', json);
    }
  }
  return FP8CORE_OK;
}

fp8core_status fp8lm_train_log_prepare_fp8(fp8lm_train_log *log, fp8lm_trainer *trainer) {
  const int64_t count = fp8gpt_model_scaled_tensors(trainer->model);
  if (!log->json || count == 0) return FP8CORE_OK;
  const size_t bytes = (size_t)count * sizeof(fp8core_cast_statistics);
  fp8core_status status = FP8CORE_OK;
  if (!trainer->cast_statistics) status = fp8core_alloc(trainer->context, bytes, &trainer->cast_statistics);
  if (status == FP8CORE_OK) status = fp8core_zero(trainer->context, trainer->cast_statistics, bytes);
  return status == FP8CORE_OK ? fp8gpt_model_count_casts(trainer->model, trainer->cast_statistics) : status;
}

fp8core_status fp8lm_train_log_fp8(fp8lm_train_log *log, fp8lm_trainer *trainer, int64_t step) {
  const int64_t count = fp8gpt_model_scaled_tensors(trainer->model);
  if (!log->json || count == 0) return FP8CORE_OK;
  FILE *json = log->json;
  const size_t bytes = (size_t)count * sizeof(fp8core_cast_statistics);
  fp8core_cast_statistics *statistics = malloc(bytes);
  void *copy = NULL;
  if (!statistics) return out_of_memory("the statistics of casts");
  fp8core_status status = fp8core_copy(trainer->context, statistics, trainer->cast_statistics, bytes);
  begin(json, "fp8");
  put_integer(json, "step", step);
  fputs(", \"tensors\": [", json);
  const char *separator = "";
  for (int64_t i = 0; i < count && status == FP8CORE_OK; i++) {
    const char *name;
    fp8core_scaling_record record;
    status = fp8gpt_model_scaled_tensor(trainer->model, i, &name, &record);
    if (status != FP8CORE_OK) break;
    fprintf(json, "%s{\"name\": ", separator);
    separator = ", ";
    fp8lm_json_write_string(json, name, strlen(name));
    put_text(json, "dtype", fp8core_dtype_name(record.dtype));
    put_real(json, "scale", (double)record.scale);
    put_real(json, "amax", (double)record.amax);
    // The largest value after scaling, in units of the format's largest: above 1 it saturated.
    put_real(json, "fill", (double)record.amax * (double)record.scale / (double)fp8core_dtype_max(record.dtype));
    put_integer(json, "nonfinite_steps", (int64_t)record.nonfinite_steps);
    const fp8core_cast_statistics *casts = &statistics[i];
    if (casts->elements > 0) {
      put_real(json, "saturated_share", (double)casts->saturated / (double)casts->elements);
      put_real(json, "zero_share", (double)casts->flushed_to_zero / (double)casts->elements);
    }
    fputc('}', json);
  }
  fputs("], \"weights\": [", json);
  separator = "";
  // Of several ranks, gradients are on their way, and weights come and go.
  if (status == FP8CORE_OK && !trainer->sharded) status = put_weights(json, trainer, &copy, &separator);
  fputc(']', json);
  finish(log);
  free(copy);
  free(statistics);
  return status == FP8CORE_OK ? fp8gpt_model_count_casts(trainer->model, NULL) : status;
}

void fp8lm_train_log_end(fp8lm_train_log *log, const fp8lm_trainer *trainer, const char *reason) {
  log->ended = 1;
  const int64_t tokens = log->settings->global_batch_size * log->settings->seq_length;
  const double rate = log->all_seconds > 0.0 ? (double)(log->all_steps * tokens) / log->all_seconds : 0.0;
  if (log->json) {
    begin(log->json, "end");
    put_integer(log->json, "step", trainer->step);
    put_text(log->json, "reason", reason);
    put_integer(log->json, "skipped_steps", trainer->skipped_steps);
    put_real(log->json, "tokens_per_second", rate);
    put_real(log->json, "peak_flops", log->peak);
    put_real(log->json, "seconds", log->all_seconds);
    put_integer(log->json, "peak_resident_bytes", peak_of_status());
    put_integer(log->json, "setup_peak_resident_bytes", log->setup_peak);
    finish(log);
  }
  end_bar(log);
  fprintf(log->screen, "%" PRId64 " steps in %.1f s, %.0f tokens/s; %" PRId64 " skipped in all\n", log->all_steps,
          log->all_seconds, rate, trainer->skipped_steps);
}
