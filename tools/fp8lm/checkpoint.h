/** \file
 * Checkpoints: a folder step-NNNNNNNN with safetensors files and index.json, which names them with size and CRC-32, and
 * holds the options of the run. docs/fp8lm.md describes the form. A checkpoint appears under its name when all of it is
 * on the disk, and not before.
 */
#ifndef FP8LM_CHECKPOINT_H
#define FP8LM_CHECKPOINT_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "fp8core/status.h"
#include "safetensors_writer.h"
#include "train_settings.h"

#define FP8LM_CHECKPOINT_VERSION 1

/** Names of the files. */
#define FP8LM_CHECKPOINT_INDEX "index.json"
#define FP8LM_CHECKPOINT_MODEL "model.safetensors"
#define FP8LM_CHECKPOINT_STATE "state.safetensors"
#define FP8LM_CHECKPOINT_VOCAB "vocab.json"
#define FP8LM_CHECKPOINT_MERGES "merges.txt"

/** Largest index.json and configuration file that are read. */
#define FP8LM_CHECKPOINT_MAX_TEXT UINT64_C(8388608)

#define FP8LM_CHECKPOINT_NAME_BYTES 48

typedef struct fp8lm_checkpoint_file {
  /** One of the names above, or a shard of the state. */
  char name[FP8LM_CHECKPOINT_NAME_BYTES];
  uint64_t bytes;
  uint32_t crc32;
} fp8lm_checkpoint_file;

typedef struct fp8lm_checkpoint_index {
  /** Steps of the run that are done, skipped ones included: the next one's number, for schedule, dropout and data. */
  int64_t step;
  /** Of the optimizer. */
  int64_t optimizer_steps;
  int64_t skipped_steps;
  int64_t skipped_in_a_row;
  /** The stored options only. */
  fp8lm_train_settings settings;
  fp8lm_checkpoint_file *files;
  int file_count;
  int file_room;
} fp8lm_checkpoint_index;

/** The file of a rank's states: FP8LM_CHECKPOINT_STATE with one rank, else "state-00001-of-00004.safetensors". */
void fp8lm_checkpoint_state_name(char name[FP8LM_CHECKPOINT_NAME_BYTES], int rank, int ranks);

/** Whether \p name is that of a file of states. */
int fp8lm_checkpoint_is_state(const char *name);

fp8core_status fp8lm_checkpoint_index_add(fp8lm_checkpoint_index *index, const fp8lm_checkpoint_file *file);

/** Writes the text of index.json. */
void fp8lm_checkpoint_index_write(FILE *stream, const fp8lm_checkpoint_index *index);

/**
 * Reads the text of index.json, which is changed.
 *
 * \return FP8CORE_ERROR_CORRUPT_DATA for damaged or foreign text, FP8CORE_ERROR_NOT_SUPPORTED for a later version; the
 *         index is then empty.
 */
fp8core_status fp8lm_checkpoint_index_parse(char *text, size_t length, fp8lm_checkpoint_index *index);

void fp8lm_checkpoint_index_free(fp8lm_checkpoint_index *index);

/** The entry of \p name; NULL if there is none. */
const fp8lm_checkpoint_file *fp8lm_checkpoint_index_file(const fp8lm_checkpoint_index *index, const char *name);

/** Reads a text of at most FP8LM_CHECKPOINT_MAX_TEXT bytes into memory from malloc(), with a NUL after it. */
fp8core_status fp8lm_checkpoint_read_text(const char *path, char **text, size_t *length);

/** Reads the index of the checkpoint \p path and checks that its files are there, with their sizes. */
fp8core_status fp8lm_checkpoint_open(const char *path, fp8lm_checkpoint_index *index);

/** Reads all files and checks their CRC-32. */
fp8core_status fp8lm_checkpoint_verify(const char *path, const fp8lm_checkpoint_index *index);

/**
 * The checkpoint of the most steps in \p folder: of its folders step-NNNNNNNN, with 8 digits, or more where the number
 * has more. From malloc(); *path is NULL where there is none, or no folder.
 * \param step NULL, or receives its number, -1 where there is none.
 */
fp8core_status fp8lm_checkpoint_newest(const char *folder, char **path, int64_t *step);

/** \p given itself if it is a checkpoint, else the newest in it; an error where there is none. */
fp8core_status fp8lm_checkpoint_find(const char *given, char **path);

/** FOLDER/NAME; an error where it is too long. */
fp8core_status fp8lm_join_path(char path[PATH_MAX], const char *folder, const char *name);

/** Creates \p folder and those above it that are missing. */
fp8core_status fp8lm_make_folders(const char *folder);

/** A checkpoint that is being written. */
typedef struct fp8lm_checkpoint_writer {
  const char *folder;
  char final_path[PATH_MAX];
  char temporary_path[PATH_MAX];
} fp8lm_checkpoint_writer;

/** Makes the folder step-NNNNNNNN.tmp for its files, after removing what an interrupted run left; where something else
 * has that name, step-NNNNNNNN.1.tmp and so on. */
fp8core_status fp8lm_checkpoint_begin(fp8lm_checkpoint_writer *writer, const char *folder, int64_t step);

/** Writes the index and gives the folder its name; a checkpoint that had it is replaced. */
fp8core_status fp8lm_checkpoint_commit(fp8lm_checkpoint_writer *writer, const fp8lm_checkpoint_index *index);

/** Removes what was written; the message of the error that led here is kept. */
void fp8lm_checkpoint_abandon(fp8lm_checkpoint_writer *writer);

/** Removes all but the newest \p keep checkpoints of \p folder; 0 removes none. One that holds anything else, and a
 * link to one, stays whole. */
fp8core_status fp8lm_checkpoint_prune(const char *folder, int64_t keep);

#endif
