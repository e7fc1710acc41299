// fp8lm train.
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "command.h"
#include "machine.h"
#include "output.h"
#include "tokenizer.h"
#include "train_log.h"
#include "trainer.h"

#define PREFIX "fp8lm train"

// The peak is measured before the first step, and after a few of the next ones: the best of short times, some of which
// another program may have had a part of.
#define PEAK_SECONDS 0.02
#define PEAK_STEPS 16

// After a signal a rank waits for others, without progress, for twice the longest step so far and these seconds.
#define STOP_PATIENCE 3.0

static volatile sig_atomic_t stop;

static void request_stop(int signal_number) {
  (void)signal_number;
  stop = 1;
}

// The first one ends the run after its step, or, where that waits for ranks that do not come, without it; the second
// one ends the program.
static void catch_signals(void) {
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = request_stop;
  action.sa_flags = (int)(SA_RESTART | SA_RESETHAND);
  (void)sigaction(SIGINT, &action, NULL);
  (void)sigaction(SIGTERM, &action, NULL);
  // A run goes on when nobody reads its lines any more; its exit status tells.
  (void)signal(SIGPIPE, SIG_IGN);
}

typedef struct run {
  fp8lm_train_settings settings;
  fp8lm_ranks ranks;
  fp8lm_trainer trainer;
  fp8lm_loader *loader;
  fp8lm_train_log log;
  // What all ranks know of the signal: decisions that they must make alike never look at `stop`, which comes at any
  // time.
  int stopping;
  // Whether steps are taken.
  int begun;
  // Held while the run lives, so that no two write to one folder; -1: none.
  int lock;
  // Steps at the last validation and checkpoint.
  int64_t validated;
  int64_t saved;
} run;

// Rank 0 prints, logs and keeps the folder.
static int leads(const run *now) { return now->ranks.rank == 0; }

// A signal came to a rank that waited for others, which did not come. The step in progress, if any, is lost.
static int ended_in_vain(const run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  char name[64];
  char when[64] = "before the first step";
  char what[96] = "";
  if (now->begun) (void)snprintf(when, sizeof(when), "after step %" PRId64, now->trainer.step);
  if (settings->save && now->begun && now->saved > 0)
    (void)snprintf(what, sizeof(what), "; --resume continues from step %" PRId64, now->saved);
  else if (now->begun)
    (void)snprintf(what, sizeof(what), ", without a checkpoint%s", settings->save ? "" : ", as there is no --save");
  return fp8lm_complain(FP8LM_EXIT_SIGNAL, PREFIX, "%sended by a signal %s: %s%s",
                        fp8lm_ranks_name(&now->ranks, name, sizeof(name)), when, fp8core_last_error(), what);
}

// Also for what the others would wait for in vain: they are told.
static int failed(const run *now) {
  char name[64];
  if (fp8lm_ranks_abort(&now->ranks) == FP8CORE_ERROR_INTERRUPTED) return ended_in_vain(now);
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s%s", fp8lm_ranks_name(&now->ranks, name, sizeof(name)),
                        fp8core_last_error());
}

// Of rank 0 alone, or of each rank by itself: the others learn by share_result().
static int failed_alone(const run *now) {
  char name[64];
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s%s", fp8lm_ranks_name(&now->ranks, name, sizeof(name)),
                        fp8core_last_error());
}

static int failed_at(const char *path) {
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s: %s", path, fp8core_last_error());
}

// The worst result of all ranks.
static int share_result(const run *now, int result) {
  int64_t worst = result;
  if (fp8lm_ranks_max(&now->ranks, &worst, 1) != FP8CORE_OK) return failed(now);
  return (int)worst;
}

// The folder of --save: made and locked.
static int prepare_folder(run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  char path[PATH_MAX];
  if (!settings->save) return FP8LM_EXIT_SUCCESS;
  if (fp8lm_make_folders(settings->save) != FP8CORE_OK || fp8lm_join_path(path, settings->save, "lock") != FP8CORE_OK)
    return failed_at(settings->save);
  const fp8core_status status = fp8lm_output_open_locked(&now->lock, path, "this folder");
  return status == FP8CORE_OK ? FP8LM_EXIT_SUCCESS : failed_at(path);
}

// Where each rank writes a part of checkpoints, all must have the same folder, not only the same path: a text that rank
// 0 puts into the lock tells.
static fp8core_status compare_folders(const run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  char path[PATH_MAX];
  char text[64] = "";
  char found[sizeof(text)] = "";
  fp8core_status status = FP8CORE_OK;
  if (now->ranks.size == 1 || !settings->save || settings->zero_stage == 0) return FP8CORE_OK;
  if (leads(now)) {
    struct timespec time;
    (void)timespec_get(&time, TIME_UTC);
    const int length =
      snprintf(text, sizeof(text), "%ld %lld.%09ld\n", (long)getpid(), (long long)time.tv_sec, time.tv_nsec);
    if (ftruncate(now->lock, 0) != 0 || write(now->lock, text, (size_t)length) != length || fsync(now->lock) != 0)
      status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s/lock: cannot write the file: %s",
                                      settings->save, strerror(errno));
  }
  status = fp8lm_ranks_agree(&now->ranks, status);
  if (status == FP8CORE_OK) status = fp8lm_ranks_broadcast(&now->ranks, text, sizeof(text));
  if (status != FP8CORE_OK) return status;
  FILE *stream = fp8lm_join_path(path, settings->save, "lock") == FP8CORE_OK ? fopen(path, "re") : NULL;
  if (stream) {
    if (!fgets(found, sizeof(found), stream)) found[0] = '\0';
    (void)fclose(stream);
  }
  if (strcmp(text, found) != 0)
    status =
      fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                             "%s is not the folder that rank 0 has under this path, expected one on a file system "
                             "that all ranks share",
                             settings->save);
  else if (access(settings->save, W_OK) != 0)
    status = fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s: cannot write into the folder: %s",
                                    settings->save, strerror(errno));
  return fp8lm_ranks_agree(&now->ranks, status);
}

// Whether the checkpoint lies in the folder, by its path or, where that is a link, by itself.
static int lies_in(const char *checkpoint, const char *folder) {
  char path[PATH_MAX];
  struct stat one;
  struct stat other;
  if (stat(folder, &one) != 0) return 0;
  if (fp8lm_join_path(path, checkpoint, "..") == FP8CORE_OK && stat(path, &other) == 0 && one.st_dev == other.st_dev &&
      one.st_ino == other.st_ino)
    return 1;
  size_t length = strlen(checkpoint);
  while (length > 0 && checkpoint[length - 1] == '/') length--;
  while (length > 0 && checkpoint[length - 1] != '/') length--;
  if (length >= sizeof(path)) return 0;
  memcpy(path, checkpoint, length);
  path[length] = '\0';
  return stat(length > 0 ? path : ".", &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

// The checkpoints of a folder must be the run's own, as all but the newest are removed: not those of another run, nor
// later than where this one goes on, after \p loaded steps, as they would be taken for the newest for ever.
static int check_folder(const run *now, int64_t loaded) {
  const fp8lm_train_settings *settings = &now->settings;
  char *newest;
  int64_t step;
  if (!settings->save) return FP8LM_EXIT_SUCCESS;
  if (fp8lm_checkpoint_newest(settings->save, &newest, &step) != FP8CORE_OK) return failed_at(settings->save);
  if (!newest) return FP8LM_EXIT_SUCCESS;
  if (settings->load) {
    int result = FP8LM_EXIT_SUCCESS;
    if (!lies_in(settings->load, settings->save))
      result = fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                              "%s has checkpoints of a run already, and %s is none of them: continue that run with "
                              "--resume, or save elsewhere",
                              settings->save, settings->load);
    else if (step > loaded)
      result = fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                              "%s is later than %s, which is to be continued: remove it, or save elsewhere", newest,
                              settings->load);
    free(newest);
    return result;
  }
  const int result =
    fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                   "%s is there from an earlier run: continue it with --resume, or save elsewhere", newest);
  free(newest);
  return result;
}

// What can be told of the checkpoint to continue before data are read, a model is made and a log is begun.
static int check_load(run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  fp8lm_checkpoint_index index;
  if (!settings->load) return check_folder(now, 0);
  if (fp8lm_checkpoint_open(settings->load, &index) != FP8CORE_OK) return failed_at(settings->load);
  const int64_t step = index.step;
  fp8lm_checkpoint_index_free(&index);
  if (step > settings->train_iters)
    return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s has %" PRId64 " steps already, and --train-iters is %" PRId64,
                          settings->load, step, settings->train_iters);
  const fp8gpt_config config = fp8lm_train_model_config(settings);
  if (fp8lm_check_weights(&config, settings->load) != FP8CORE_OK) return failed_at(settings->load);
  return check_folder(now, step);
}

static int open_data(run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  fp8lm_loader_options options = fp8lm_loader_options_default();
  options.data_path = settings->data_path;
  options.validation_data_path = settings->valid_data_path;
  options.validation_fraction = settings->val_fraction;
  options.seed = (uint64_t)settings->seed;
  options.vocabulary = (uint32_t)settings->vocab_size;
  return fp8lm_loader_create(&now->loader, &options) == FP8CORE_OK ? FP8LM_EXIT_SUCCESS : failed_alone(now);
}

// That all ranks read the same, and that it is whole: each copy is read by one of the ranks that have it.
static int check_data(const run *now) {
  const uint32_t fingerprint = fp8lm_loader_fingerprint(now->loader);
  int first = 0;
  if (fp8lm_ranks_compare(&now->ranks, &fingerprint, sizeof(fingerprint), "shards of data") != FP8CORE_OK)
    return failed(now);
  if (!now->settings.check_data) return FP8LM_EXIT_SUCCESS;
  if (fp8lm_ranks_is_first(&now->ranks, fp8lm_loader_files(now->loader), &first) != FP8CORE_OK) return failed(now);
  const int whole = !first || fp8lm_loader_check(now->loader) == FP8CORE_OK;
  return share_result(now, whole ? FP8LM_EXIT_SUCCESS : failed_alone(now));
}

// Checkpoints without a tokenizer are taken for those of bytes.
static void warn_of_tokenizer(const run *now) {
  const uint32_t vocabulary = fp8lm_loader_vocabulary(now->loader);
  if (!now->settings.save || now->trainer.vocab || !vocabulary || vocabulary == FP8LM_TOKENIZER_BYTES_VOCABULARY)
    return;
  (void)fp8lm_complain(0, PREFIX,
                       "warning: the data's tokenizer has %" PRIu32 " tokens, but without --vocab-file checkpoints "
                       "have no tokenizer: 'fp8lm generate' will need --vocab-file",
                       vocabulary);
}

// The rate of a product, in FLOP/s, of the largest one that takes no more than a moment; 0 where it fails.
static double product_rate(fp8core_context *context, fp8core_dtype dtype) {
  double rate = 0.0;
  for (int64_t size = 256; size <= 8192; size *= 2) {
    const int64_t shape[2] = {size, size};
    const size_t bytes = (size_t)(size * size) * fp8core_dtype_size(dtype);
    void *memory;
    if (fp8core_alloc(context, 3 * bytes, &memory) != FP8CORE_OK) break;
    fp8core_tensor matrices[3];
    for (int i = 0; i < 3; i++) {
      matrices[i] = fp8core_tensor_create((unsigned char *)memory + (size_t)i * bytes, dtype, 2, shape);
      matrices[i].device = fp8core_context_device(context);
    }
    fp8core_gemm_options options = fp8core_gemm_options_default();
    options.transpose_b = 1;
    double seconds = 0.0;
    fp8core_status status = fp8core_zero(context, memory, 3 * bytes);
    // The first one chooses a kernel; the best of the others counts.
    for (int i = 0; i < 4 && status == FP8CORE_OK; i++) {
      const double start = fp8lm_now();
      status = fp8core_gemm(context, &options, &matrices[0], &matrices[1], NULL, &matrices[2]);
      if (status == FP8CORE_OK) status = fp8core_context_synchronize(context);
      const double taken = fp8lm_now() - start;
      if (i == 1 || (i > 1 && taken < seconds)) seconds = taken;
    }
    (void)fp8core_free(context, memory);
    if (status != FP8CORE_OK) break;
    rate = 2.0 * (double)size * (double)size * (double)size / seconds;
    if (seconds > 2e-3) break;
  }
  return rate;
}

// What MFU is measured by: the fastest loop of multiply-adds that the precision can use; on a GPU, which does not tell
// its peak, a large product (BF16 in all precisions but fp32, as in the paper's comparisons).
static double measure_peak(const fp8lm_trainer *trainer) {
  if (trainer->settings->device == FP8LM_TRAIN_CUDA)
    return product_rate(trainer->context, trainer->settings->precision == FP8GPT_FP32 ? FP8CORE_FP32 : FP8CORE_BF16);
  const int threads = fp8core_context_threads(trainer->context);
  const fp8lm_peak order[] = {FP8LM_PEAK_BF16_DOT, FP8LM_PEAK_FMA_AVX512, FP8LM_PEAK_FMA_AVX2};
  for (int i = trainer->settings->precision == FP8GPT_FP32; i < 3; i++)
    if (fp8lm_peak_available(order[i])) return fp8lm_peak_rate(order[i], threads, PEAK_SECONDS);
  return 0.0;
}

// Passes that the ranks' shares of the global batch leave room for, where no micro-batch was asked for.
static void fit_passes(run *now) {
  fp8lm_train_settings *settings = &now->settings;
  const int64_t share = settings->global_batch_size / now->ranks.size;
  if (settings->micro_batch_size_given || settings->global_batch_size % now->ranks.size != 0) return;
  if (settings->pass_sequences > share) settings->pass_sequences = share;
  while (share % settings->pass_sequences != 0) settings->pass_sequences--;
}

static int check_ranks(const run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  const int ranks = now->ranks.size;
  if (settings->data_parallel_size > 0 && settings->data_parallel_size != ranks)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--data-parallel-size is %" PRId64 ", but there %s %d rank%s; a launcher starts more: mpirun "
                          "-n %" PRId64 " fp8lm train ...",
                          settings->data_parallel_size, ranks == 1 ? "is" : "are", ranks, ranks == 1 ? "" : "s",
                          settings->data_parallel_size);
  if (!settings->micro_batch_size_given && settings->global_batch_size % ranks != 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--global-batch-size is %" PRId64 ", expected a multiple of the number of ranks, %d",
                          settings->global_batch_size, ranks);
  if (settings->global_batch_size % (settings->pass_sequences * ranks) != 0)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--global-batch-size is %" PRId64 ", expected a multiple of --micro-batch-size times the "
                          "number of ranks, %" PRId64 " times %d",
                          settings->global_batch_size, settings->pass_sequences, ranks);
  if (fp8lm_train_micro_batches(settings) > FP8GPT_MICRO_BATCHES)
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX,
                          "--global-batch-size is %" PRId64 ": %d ranks take it in passes of %" PRId64 ", %" PRId64
                          " of them a step, expected at most %d",
                          settings->global_batch_size, ranks, settings->pass_sequences,
                          fp8lm_train_micro_batches(settings), FP8GPT_MICRO_BATCHES);
  return FP8LM_EXIT_SUCCESS;
}

// The first line that differs, of texts with the same names before the tabulators.
static fp8core_status compare_lines(const char *own, const char *first) {
  while (*own && *first) {
    const size_t length = strcspn(own, "\n"), first_length = strcspn(first, "\n");
    const size_t name = strcspn(own, "\t\n");
    if (length != first_length || memcmp(own, first, length) != 0)
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%.*s is %.*s, expected rank 0's, %.*s", (int)name,
                                    own, (int)(length > name ? length - name - 1 : 0), own + name + 1,
                                    (int)(first_length > name ? first_length - name - 1 : 0), first + name + 1);
    own += length + 1;
    first += length + 1;
  }
  return FP8CORE_OK;
}

// All that decides what a rank does must be the same on all of them.
static int compare_settings(const run *now) {
  char *own = NULL;
  char *first = NULL;
  size_t length = 0;
  if (now->ranks.size == 1) return FP8LM_EXIT_SUCCESS;
  FILE *stream = open_memstream(&own, &length);
  if (stream) fp8lm_train_settings_write_shared(stream, &now->settings);
  fp8core_status status = FP8CORE_OK;
  if (!stream || fclose(stream) != 0)
    status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the text of the options");
  status = fp8lm_ranks_agree(&now->ranks, status);
  int64_t bytes = (int64_t)length;
  if (status == FP8CORE_OK) status = fp8lm_ranks_broadcast(&now->ranks, &bytes, sizeof(bytes));
  if (status == FP8CORE_OK) {
    first = calloc(1, (size_t)bytes + 1);
    if (!first)
      status = fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate the text of rank 0's options");
    status = fp8lm_ranks_agree(&now->ranks, status);
  }
  if (status == FP8CORE_OK) {
    if (leads(now)) memcpy(first, own, length);
    status = fp8lm_ranks_broadcast(&now->ranks, first, (size_t)bytes);
  }
  if (status == FP8CORE_OK) status = fp8lm_ranks_agree(&now->ranks, compare_lines(own, first));
  free(own);
  free(first);
  return status == FP8CORE_OK ? FP8LM_EXIT_SUCCESS : failed(now);
}

// After steps 1, 2, 4 ... of this run: at different times of whatever else the machine does. Not on a GPU, whose memory
// the run has now.
static void measure_peak_again(run *now) {
  const int64_t steps = now->log.all_steps;
  if (now->ranks.size > 1) return;
  if (now->settings.device == FP8LM_TRAIN_CUDA || steps > PEAK_STEPS || (steps & (steps - 1)) != 0) return;
  const double peak = measure_peak(&now->trainer);
  if (peak > now->log.peak) now->log.peak = peak;
}

static int begin(run *now) {
  fp8lm_train_settings *settings = &now->settings;
  int result;
  const fp8core_status found = fp8lm_ranks_create(&now->ranks, 60.0 * settings->distributed_timeout_minutes, &stop);
  if (found != FP8CORE_OK) return found == FP8CORE_ERROR_INTERRUPTED ? ended_in_vain(now) : failed_alone(now);
  fit_passes(now);
  // All find the same.
  result = leads(now) ? check_ranks(now) : FP8LM_EXIT_SUCCESS;
  result = share_result(now, result);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  result = compare_settings(now);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  if (leads(now)) result = prepare_folder(now);
  if (leads(now) && result == FP8LM_EXIT_SUCCESS) result = check_load(now);
  if (result == FP8LM_EXIT_SUCCESS) result = open_data(now);
  result = share_result(now, result);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  result = check_data(now);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  if (compare_folders(now) != FP8CORE_OK) return failed(now);
  if (fp8lm_trainer_create(&now->trainer, settings, &now->ranks) != FP8CORE_OK) return failed(now);
  if (fp8lm_trainer_read_tokenizer(&now->trainer, settings->load) != FP8CORE_OK) return failed(now);
  if (leads(now)) warn_of_tokenizer(now);
  if (settings->load && fp8lm_trainer_load(&now->trainer, settings->load) != FP8CORE_OK)
    return fp8lm_ranks_abort(&now->ranks) == FP8CORE_ERROR_INTERRUPTED ? ended_in_vain(now) : failed_at(settings->load);

  if (leads(now) && fp8lm_train_log_open(&now->log, settings, &stop) != FP8CORE_OK) return failed(now);
  now->log.peak = measure_peak(&now->trainer);
  if (fp8lm_ranks_sum(&now->ranks, &now->log.peak, 1) != FP8CORE_OK) return failed(now);
  // A checkpoint that goes to another folder is written there even if no step is left to be done: for another number
  // of ranks, say.
  now->saved = settings->load && settings->save && !lies_in(settings->load, settings->save) ? -1 : now->trainer.step;
  now->validated = -1;
  if (!leads(now)) return FP8LM_EXIT_SUCCESS;
  if (fp8lm_train_log_start(&now->log, &now->trainer, settings->load, fp8lm_loader_tokens(now->loader, FP8LM_TRAIN),
                            fp8lm_loader_tokens(now->loader, FP8LM_VALIDATION)) != FP8CORE_OK)
    return failed(now);
  return FP8LM_EXIT_SUCCESS;
}

// Skipped steps changed nothing, and a run that has diverged must not replace its good checkpoints: none is written
// before a step is taken again.
static int save(run *now) {
  if (!now->settings.save || now->saved == now->trainer.step || now->trainer.skipped_in_a_row > 0)
    return FP8LM_EXIT_SUCCESS;
  const double start = fp8lm_now();
  const double patience = now->ranks.stop_patience;
  // However long a rank writes, what it writes is wanted.
  now->ranks.stop_patience = FP8LM_RANKS_WAIT;
  const fp8core_status status = fp8lm_trainer_save(&now->trainer, now->settings.save, now->settings.keep_last);
  now->ranks.stop_patience = patience;
  if (status != FP8CORE_OK) {
    char name[64];
    return fp8lm_complain(
      FP8LM_EXIT_FAILURE, PREFIX,
      "%s%s: the checkpoint of step %" PRId64 " could not be written: %s; earlier ones are untouched",
      fp8lm_ranks_name(&now->ranks, name, sizeof(name)), now->settings.save, now->trainer.step, fp8core_last_error());
  }
  now->saved = now->trainer.step;
  if (leads(now)) fp8lm_train_log_checkpoint(&now->log, &now->trainer, fp8lm_now() - start);
  return FP8LM_EXIT_SUCCESS;
}

// A step or a validation failed. Where the state is \p whole on all ranks, that after the last step, as where data
// could not be read, it is saved.
static int failed_part(run *now, int whole) {
  char reason[400];
  (void)snprintf(reason, sizeof(reason), "%s", fp8core_last_error());
  // All ranks know of data that cannot be read, and are still there; in other cases they are told.
  const int together = whole && fp8lm_ranks_agree(&now->ranks, FP8CORE_OK) == FP8CORE_OK;
  (void)fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "%s", reason);
  if (!together) return failed(now);
  char name[64];
  (void)fp8lm_complain(0, PREFIX, "%s%s", fp8lm_ranks_name(&now->ranks, name, sizeof(name)), reason);
  (void)save(now);
  if (leads(now)) fp8lm_train_log_end(&now->log, &now->trainer, "error");
  return FP8LM_EXIT_FAILURE;
}

static int validate(run *now) {
  double loss;
  int64_t sequences;
  int unread;
  if (now->validated == now->trainer.step) return FP8LM_EXIT_SUCCESS;
  const double start = fp8lm_now();
  if (fp8lm_trainer_validate(&now->trainer, now->loader, &stop, &loss, &sequences, &unread) != FP8CORE_OK)
    return failed_part(now, unread || now->ranks.size == 1);
  now->validated = now->trainer.step;
  if (sequences > 0 && leads(now))
    fp8lm_train_log_validation(&now->log, &now->trainer, loss, sequences, fp8lm_now() - start);
  return FP8LM_EXIT_SUCCESS;
}

static fp8core_status observe(fp8lm_trainer *trainer, void *user_data) {
  run *now = user_data;
  return fp8lm_train_log_fp8(&now->log, trainer, trainer->step + 1);
}

static int due(int64_t step, int64_t interval) { return interval > 0 && step % interval == 0; }

// What skipped the last steps, for messages.
static const char *skip_reason(const run *now) {
  return now->settings.spike_action == FP8LM_TRAIN_SPIKE_SKIP ? "gradients were not finite or the loss was a spike"
                                                              : "gradients were not finite";
}

static void tell_skipped(const run *now) {
  const int64_t skipped = now->trainer.skipped_in_a_row;
  char text[128] = "";
  if (skipped == 0) return;
  if (now->settings.save && now->saved > 0)
    (void)snprintf(text, sizeof(text), ": the last checkpoint is that of step %" PRId64, now->saved);
  else if (now->settings.save)
    (void)snprintf(text, sizeof(text), ": there is no checkpoint");
  (void)fp8lm_complain(FP8LM_EXIT_SUCCESS, PREFIX, "the last %" PRId64 " step%s skipped, as the %s%s", skipped,
                       skipped == 1 ? " was" : "s were", skip_reason(now), text);
}

// A step was not taken, as its loss is a spike.
static int stop_before_spike(run *now, const fp8lm_step_result *spike) {
  if (leads(now)) fp8lm_train_log_spike(&now->log, &now->trainer, spike);
  const int result = save(now);
  if (!leads(now)) return FP8LM_EXIT_FAILURE;
  fp8lm_train_log_end(&now->log, &now->trainer, "spike");
  tell_skipped(now);
  if (result != FP8LM_EXIT_SUCCESS) return result;
  return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                        "the loss of step %" PRId64 ", %.4f, is a spike: the steps before had %.4f, with a deviation "
                        "of %.4f; the run ends before it, as --spike-action is stop%s",
                        now->trainer.step + 1, spike->loss, spike->mean, spike->deviation,
                        now->settings.save ? "; --resume --spike-action skip passes over it, a lower --lr may help"
                                           : ", without a checkpoint, as there is no --save");
}

// A signal to one rank is one to all.
static fp8core_status share_stop(run *now) {
  int64_t stopping = stop;
  const fp8core_status status = fp8lm_ranks_max(&now->ranks, &stopping, 1);
  if (status == FP8CORE_OK) now->stopping = stopping != 0;
  return status;
}

static int train(run *now) {
  const fp8lm_train_settings *settings = &now->settings;
  fp8lm_trainer *trainer = &now->trainer;
  const char *reason = "done";
  int result = FP8LM_EXIT_SUCCESS;
  int exit_due = 0;
  double longest = 0.0;
  now->begun = 1;
  now->ranks.stop_patience = STOP_PATIENCE;
  while (trainer->step < settings->train_iters) {
    fp8lm_step_result done;
    if (share_stop(now) != FP8CORE_OK) return failed(now);
    if (now->stopping) break;
    // Within it a rank that is there has done the longest step again, and is waited for after a signal.
    now->ranks.stop_patience = STOP_PATIENCE + 2.0 * longest;
    const double start = fp8lm_now();
    const int observed = leads(now) && due(trainer->step + 1, settings->log_fp8_interval);
    if (observed && fp8lm_train_log_prepare_fp8(&now->log, trainer) != FP8CORE_OK) return failed(now);
    if (fp8lm_trainer_step(trainer, now->loader, observed ? observe : NULL, now, &done) != FP8CORE_OK)
      return failed_part(now, !done.begun);
    if (done.stopped) return stop_before_spike(now, &done);
    const double seconds = fp8lm_now() - start;
    if (seconds > longest) longest = seconds;
    if (leads(now)) fp8lm_train_log_step(&now->log, trainer, &done);
    measure_peak_again(now);
    if (trainer->skipped_in_a_row >= settings->max_skipped) {
      if (!leads(now)) return FP8LM_EXIT_FAILURE;
      fp8lm_train_log_end(&now->log, trainer, "skipped");
      return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX,
                            "%" PRId64 " steps in a row were skipped, as the %s: the run has diverged; a lower --lr or "
                            "more --lr-warmup-iters may help",
                            trainer->skipped_in_a_row, skip_reason(now));
    }
    if (due(trainer->step, settings->eval_interval)) result = validate(now);
    if (result != FP8LM_EXIT_SUCCESS) return result;
    if (due(trainer->step, settings->save_interval)) result = save(now);
    if (result != FP8LM_EXIT_SUCCESS) return result;
    // After a skipped step nothing would be saved, and whatever continues the run would come to the same end for ever.
    exit_due |= due(trainer->step, settings->exit_interval);
    if (exit_due && trainer->skipped_in_a_row == 0 && trainer->step < settings->train_iters) {
      reason = "exit-interval";
      break;
    }
  }
  // One that comes now ends no step.
  if (share_stop(now) != FP8CORE_OK) return failed(now);
  if (now->stopping) reason = "signal";
  if (!now->stopping && trainer->step == settings->train_iters && settings->eval_interval > 0) {
    result = validate(now);
    if (result != FP8LM_EXIT_SUCCESS) return result;
    // It may have been cut short.
    if (share_stop(now) != FP8CORE_OK) return failed(now);
  }
  result = save(now);
  if (!leads(now)) return result != FP8LM_EXIT_SUCCESS || !now->stopping ? result : FP8LM_EXIT_SIGNAL;
  fp8lm_train_log_end(&now->log, trainer, reason);
  tell_skipped(now);
  if (result != FP8LM_EXIT_SUCCESS || !now->stopping) return result;
  return fp8lm_complain(FP8LM_EXIT_SIGNAL, PREFIX, "ended by a signal after step %" PRId64 "%s", trainer->step,
                        settings->save ? "; --resume continues" : ", without a checkpoint, as there is no --save");
}

int fp8lm_train(int argc, char **argv) {
  run now = {.lock = -1};
  int result = fp8lm_train_settings_parse(PREFIX, argc, argv, &now.settings);
  if (result < 0) return FP8LM_EXIT_SUCCESS;
  if (result != FP8LM_EXIT_SUCCESS) return result;
  catch_signals();
  result = begin(&now);
  if (result == FP8LM_EXIT_SUCCESS) result = train(&now);
  if (result == FP8LM_EXIT_SIGNAL && now.begun && leads(&now) && !now.log.ended)
    fp8lm_train_log_end(&now.log, &now.trainer, "signal");
  if (fp8lm_train_log_close(&now.log) != FP8CORE_OK && result == FP8LM_EXIT_SUCCESS) result = failed_alone(&now);
  fp8lm_loader_destroy(&now.loader);
  fp8lm_trainer_destroy(&now.trainer);
  fp8lm_ranks_destroy(&now.ranks);
  if (now.lock >= 0) close(now.lock);
  fp8lm_train_settings_free(&now.settings);
  return result;
}
