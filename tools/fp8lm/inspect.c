// fp8lm inspect: what quantisation does to the tensors of a file.
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "json_writer.h"
#include "tensor_file.h"

#define PREFIX "fp8lm inspect"

// A block and its copies stay in the second-level cache.
#define BLOCK_ELEMENTS ((size_t)65536)

static const char help_text[] =
  "Usage: fp8lm inspect [OPTION]... FILE...\n"
  "\n"
  "Shows, for every tensor of raw, NumPy (.npy) or safetensors files, what casting it to each format would do.\n"
  "\n"
  "For each tensor: dtype, shape, number of elements, the largest finite magnitude (amax), the smallest magnitude "
  "other\n"
  "than zero, and how many values are infinite or NaN. Then, for each format (e4m3, e5m2, bf16, fp16) and policy:\n"
  "  scale      the multiplier applied before the cast\n"
  "  SNR        signal-to-noise ratio, 10 log10(sum x^2 / sum (x - x')^2) dB over the finite values x and what comes\n"
  "             back, x'; 'exact' when every value comes back unchanged\n"
  "  underflow  share of all elements that are not zero but become zero\n"
  "  overflow   share of all elements that are finite but beyond the format's maximum, and are saturated\n"
  "Policies:\n"
  "  just-in-time  maximum of the format / amax / 2^margin (1 for bf16, which has the range of fp32)\n"
  "  power-of-two  the same, lowered to a power of two\n"
  "  none          scale 1\n"
  "A tensor with infinite or NaN values keeps the scale 1, as a first step of training would.\n"
  "Casts round to nearest even and saturate. FP64 values are first rounded to FP32.\n"
  "\n"
  "Options:\n"
  "  --format FORMAT   raw, npy or safetensors; by default by the extension, else by the content\n"
  "  --dtype DTYPE     e4m3, e5m2, bf16, fp16, fp32 or fp64: what a raw file holds (little-endian), or a NumPy file\n"
  "                    whose type of 1 or 2 bytes does not say (void, integers, f1, as ml_dtypes writes them)\n"
  "  --shape N,N,...   shape of a raw file; without it one dimension as long as the file\n"
  "  --tensor PATTERN  only tensors whose name matches the shell pattern; may be given several times\n"
  "  --margin N        powers of two of head-room under the maximum, -64 to 64 (default 0)\n"
  "  --threads N       CPU threads, 1 to 1024 (default: as many as OpenMP would use)\n"
  "  --json            print one JSON object instead of tables\n"
  "  --help            print this text\n"
  "\n"
  "Files are read in blocks: memory does not grow with their size.\n"
  "Exit codes: 0 success; 1 a file or tensor could not be read (the others are still shown); 2 wrong usage.\n";

enum { FORMATS = 4, POLICIES = 3 };

static const fp8core_dtype formats[FORMATS] = {FP8CORE_E4M3, FP8CORE_E5M2, FP8CORE_BF16, FP8CORE_FP16};
static const char *const policies[POLICIES] = {"just-in-time", "power-of-two", "none"};
static const char *const file_formats[] = {
  [FP8LM_FILE_RAW] = "raw", [FP8LM_FILE_NPY] = "npy", [FP8LM_FILE_SAFETENSORS] = "safetensors"};

typedef struct inspect_settings {
  // -1: by content and extension.
  int format;
  const fp8lm_element *dtype;
  fp8lm_element dtype_storage;
  const uint64_t *shape;
  uint64_t shape_storage[FP8LM_NPY_MAX_DIMENSIONS];
  size_t dimensions;
  const char **patterns;
  int *pattern_matches;
  size_t pattern_count;
  int margin;
  int threads;
  int json;
} inspect_settings;

typedef struct cast_figures {
  float scale;
  double squared_error;
  fp8core_cast_statistics statistics;
} cast_figures;

typedef struct tensor_report {
  uint64_t nonfinite;
  // Largest finite and smallest nonzero magnitude; 0 without such a value.
  float amax;
  float minimum;
  double squared_signal;
  fp8lm_narrowing narrowing;
  cast_figures figures[FORMATS][POLICIES];
} tensor_report;

typedef struct block_buffers {
  fp8core_context *context;
  unsigned char *bytes;
  float *values;
  float *returned;
  unsigned char *codes;
} block_buffers;

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Sums go to lanes by position, so that they vectorise and come out the same everywhere.
enum { LANES = 8 };

static double sum_lanes(const double lanes[LANES]) {
  double sum = 0.0;
  for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

static void measure_block(const float *values, size_t count, tensor_report *report) {
  uint32_t largest = bits_of(report->amax);
  // Wraps to the largest number for zero, which then never is the minimum.
  uint32_t smallest = bits_of(report->minimum) - 1;
  uint64_t nonfinite = 0;
  double lanes[LANES] = {0.0};
  for (size_t i = 0; i < count; i++) {
    const uint32_t magnitude = bits_of(values[i]) & 0x7fffffff;
    const int finite = magnitude < 0x7f800000;
    const double value = finite ? (double)values[i] : 0.0;
    nonfinite += (uint64_t)!finite;
    if (finite && magnitude > largest) largest = magnitude;
    if (finite && magnitude - 1 < smallest) smallest = magnitude - 1;
    lanes[i % LANES] += value * value;
  }
  smallest++;
  memcpy(&report->amax, &largest, sizeof(largest));
  memcpy(&report->minimum, &smallest, sizeof(smallest));
  report->nonfinite += nonfinite;
  report->squared_signal += sum_lanes(lanes);
}

static double squared_error(const float *values, const float *returned, size_t count) {
  double lanes[LANES] = {0.0};
  for (size_t i = 0; i < count; i++) {
    const int finite = (bits_of(values[i]) & 0x7fffffff) < 0x7f800000;
    const double difference = finite ? (double)values[i] - (double)returned[i] : 0.0;
    lanes[i % LANES] += difference * difference;
  }
  return sum_lanes(lanes);
}

static fp8core_status quantise_block(const block_buffers *buffers, fp8core_dtype format, size_t count,
                                     cast_figures *figures) {
  const float scale_inverse = 1.0f / figures->scale;
  const int64_t shape = (int64_t)count;
  const fp8core_tensor values = fp8core_tensor_create(buffers->values, FP8CORE_FP32, 1, &shape);
  fp8core_tensor codes = fp8core_tensor_create(buffers->codes, format, 1, &shape);
  const fp8core_tensor returned = fp8core_tensor_create(buffers->returned, FP8CORE_FP32, 1, &shape);
  codes.scale = &figures->scale;
  codes.scale_inverse = &scale_inverse;
  fp8core_cast_options options = fp8core_cast_options_default();
  options.statistics = &figures->statistics;
  fp8core_status status = fp8core_cast(buffers->context, &options, &values, &codes);
  if (status == FP8CORE_OK) status = fp8core_cast(buffers->context, NULL, &codes, &returned);
  if (status == FP8CORE_OK) figures->squared_error += squared_error(buffers->values, buffers->returned, count);
  return status;
}

static fp8core_status inspect_tensor(const block_buffers *buffers, const fp8lm_input *input, const fp8lm_tensor *tensor,
                                     int margin, tensor_report *report) {
  memset(report, 0, sizeof(*report));
  for (uint64_t first = 0; first < tensor->elements; first += BLOCK_ELEMENTS) {
    const uint64_t left = tensor->elements - first;
    const size_t count = left < BLOCK_ELEMENTS ? (size_t)left : BLOCK_ELEMENTS;
    const fp8core_status status = fp8lm_tensor_read(buffers->context, input, tensor, first, count, buffers->bytes,
                                                    buffers->values, &report->narrowing);
    if (status != FP8CORE_OK) return status;
    measure_block(buffers->values, count, report);
  }
  const float amax = report->nonfinite ? HUGE_VALF : report->amax;
  for (int format = 0; format < FORMATS; format++) {
    report->figures[format][0].scale = fp8core_scale_from_amax(formats[format], amax, margin, 0, 1.0f);
    report->figures[format][1].scale = fp8core_scale_from_amax(formats[format], amax, margin, 1, 1.0f);
    report->figures[format][2].scale = 1.0f;
  }
  for (uint64_t first = 0; first < tensor->elements; first += BLOCK_ELEMENTS) {
    const uint64_t left = tensor->elements - first;
    const size_t count = left < BLOCK_ELEMENTS ? (size_t)left : BLOCK_ELEMENTS;
    fp8core_status status =
      fp8lm_tensor_read(buffers->context, input, tensor, first, count, buffers->bytes, buffers->values, NULL);
    for (int i = 0; i < FORMATS * POLICIES && status == FP8CORE_OK; i++) {
      cast_figures *row = report->figures[i / POLICIES];
      const int policy = i % POLICIES;
      // Policies that chose one scale share the work.
      int same = 0;
      while (row[same].scale != row[policy].scale) same++;
      if (same == policy)
        status = quantise_block(buffers, formats[i / POLICIES], count, &row[policy]);
      else
        row[policy] = row[same];
    }
    if (status != FP8CORE_OK) return status;
  }
  return FP8CORE_OK;
}

static double signal_to_noise(const tensor_report *report, const cast_figures *figures) {
  return 10.0 * log10(report->squared_signal / figures->squared_error);
}

static void print_shape(FILE *stream, const fp8lm_tensor *tensor, const char *separator) {
  fputc('[', stream);
  for (size_t i = 0; i < tensor->dimensions; i++) {
    fprintf(stream, "%s%" PRIu64, i ? separator : "", tensor->shape[i]);
  }
  fputc(']', stream);
}

static void print_tensor(const fp8lm_tensor *tensor, const tensor_report *report) {
  fputs("\n  ", stdout);
  if (tensor->name[0]) {
    fp8lm_json_write_string(stdout, tensor->name, strlen(tensor->name));
    fputs("  ", stdout);
  }
  printf("%s  ", tensor->dtype_name);
  if (strcmp(tensor->dtype_name, fp8lm_element_name(tensor->element)) != 0 && tensor->element != FP8LM_ELEMENT_OTHER) {
    printf("(%s)  ", fp8lm_element_name(tensor->element));
  }
  print_shape(stdout, tensor, ", ");
  printf("  %" PRIu64 " element%s%s\n", tensor->elements, tensor->elements == 1 ? "" : "s",
         tensor->fortran_order ? ", Fortran order" : "");
  if (!report) {
    printf("  note: values of this dtype are not read\n");
    return;
  }
  printf("  amax %.9g   smallest nonzero %.9g   non-finite %" PRIu64 "\n", (double)report->amax,
         (double)report->minimum, report->nonfinite);
  if (report->nonfinite) {
    printf("  note: infinite or NaN values are left out of the figures, and keep the scale at 1\n");
  }
  if (report->narrowing.overflowed || report->narrowing.underflowed) {
    printf("  note: rounding to FP32 made %" PRIu64 " values infinite and %" PRIu64 " zero\n",
           report->narrowing.overflowed, report->narrowing.underflowed);
  }
  if (tensor->elements == 0) return;
  printf("    %-6s  %-12s  %14s  %9s  %11s  %11s\n", "format", "policy", "scale", "SNR dB", "underflow %",
         "overflow %");
  const double elements = (double)tensor->elements;
  for (int format = 0; format < FORMATS; format++) {
    for (int policy = 0; policy < POLICIES; policy++) {
      const cast_figures *figures = &report->figures[format][policy];
      char snr[32] = "exact";
      if (figures->squared_error > 0.0) snprintf(snr, sizeof(snr), "%.2f", signal_to_noise(report, figures));
      printf("    %-6s  %-12s  %14.8g  %9s  %11.5g  %11.5g\n", fp8core_dtype_name(formats[format]), policies[policy],
             (double)figures->scale, snr, 100.0 * (double)figures->statistics.flushed_to_zero / elements,
             100.0 * (double)figures->statistics.saturated / elements);
    }
  }
}

static void write_key(const char *key) { printf(", \"%s\": ", key); }

static void write_share(const char *key, uint64_t count, uint64_t elements) {
  write_key(key);
  fp8lm_json_write_number(stdout, elements ? (double)count / (double)elements : 0.0);
}

static void write_tensor(const fp8lm_tensor *tensor, const tensor_report *report) {
  fputs("\n      {\"name\": ", stdout);
  fp8lm_json_write_string(stdout, tensor->name, strlen(tensor->name));
  write_key("stored_dtype");
  fp8lm_json_write_string(stdout, tensor->dtype_name, strlen(tensor->dtype_name));
  write_key("dtype");
  printf("\"%s\"", fp8lm_element_name(tensor->element));
  write_key("shape");
  print_shape(stdout, tensor, ", ");
  printf(", \"fortran_order\": %s, \"elements\": %" PRIu64, tensor->fortran_order ? "true" : "false", tensor->elements);
  if (!report) {
    printf(", \"skipped\": \"values of this dtype are not read\"}");
    return;
  }
  write_key("amax");
  fp8lm_json_write_number(stdout, (double)report->amax);
  write_key("min_nonzero");
  // 0 would be a value that is not there.
  fp8lm_json_write_number(stdout, report->minimum > 0.0f ? (double)report->minimum : HUGE_VAL);
  printf(", \"nonfinite\": %" PRIu64 ", \"overflowed_fp32\": %" PRIu64 ", \"underflowed_fp32\": %" PRIu64
         ", \"casts\": [",
         report->nonfinite, report->narrowing.overflowed, report->narrowing.underflowed);
  for (int i = 0; i < FORMATS * POLICIES; i++) {
    const cast_figures *figures = &report->figures[i / POLICIES][i % POLICIES];
    printf("%s\n        {\"format\": \"%s\", \"policy\": \"%s\", \"scale\": ", i ? "," : "",
           fp8core_dtype_name(formats[i / POLICIES]), policies[i % POLICIES]);
    fp8lm_json_write_number(stdout, (double)figures->scale);
    write_key("snr_db");
    fp8lm_json_write_number(stdout, figures->squared_error > 0.0 ? signal_to_noise(report, figures) : HUGE_VAL);
    printf(", \"exact\": %s", figures->squared_error > 0.0 ? "false" : "true");
    write_share("underflow_share", figures->statistics.flushed_to_zero, tensor->elements);
    write_share("overflow_share", figures->statistics.saturated, tensor->elements);
    fputc('}', stdout);
  }
  fputs("]}", stdout);
}

static int has_extension(const char *path, const char *extension) {
  const size_t length = strlen(path);
  const size_t extension_length = strlen(extension);
  return length > extension_length && strcmp(path + length - extension_length, extension) == 0;
}

static fp8core_status describe_file(const inspect_settings *settings, const char *path, const fp8lm_input *input,
                                    fp8lm_tensor_file *file) {
  memset(file, 0, sizeof(*file));
  int format = settings->format;
  if (format < 0) {
    unsigned char start[4];
    if (has_extension(path, ".npy")) {
      format = FP8LM_FILE_NPY;
    } else if (has_extension(path, ".safetensors")) {
      format = FP8LM_FILE_SAFETENSORS;
    } else if (fp8lm_looks_like_npy(input)) {
      format = FP8LM_FILE_NPY;
    } else if (!settings->dtype && fp8lm_looks_like_safetensors(input)) {
      format = FP8LM_FILE_SAFETENSORS;
    } else if (settings->dtype) {
      format = FP8LM_FILE_RAW;
    } else if (input->size >= 4 && fp8lm_input_read(input, 0, start, 4) == FP8CORE_OK &&
               memcmp(start, "PK\3\4", 4) == 0) {
      return fp8core_set_last_error(
        FP8CORE_ERROR_NOT_SUPPORTED,
        "is a ZIP archive (.npz, .pt), expected .npy, .safetensors or raw; unpack it first");
    } else {
      return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                    "is neither .npy nor .safetensors; for raw bytes give --dtype");
    }
  }
  if (settings->shape && format != FP8LM_FILE_RAW) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT, "--shape is for raw files, this one is %s",
                                  file_formats[format]);
  }
  if (settings->dtype && format == FP8LM_FILE_SAFETENSORS) {
    return fp8core_set_last_error(FP8CORE_ERROR_INVALID_ARGUMENT,
                                  "--dtype is for raw and NumPy files, this one is safetensors");
  }
  switch ((fp8lm_file_format)format) {
  case FP8LM_FILE_NPY: return fp8lm_npy_describe(input, settings->dtype, file);
  case FP8LM_FILE_SAFETENSORS: return fp8lm_safetensors_describe(input, file);
  case FP8LM_FILE_RAW: break;
  }
  return fp8lm_raw_describe(input, *settings->dtype, settings->dimensions, settings->shape, file);
}

static int is_wanted(const inspect_settings *settings, const char *name) {
  int wanted = settings->pattern_count == 0;
  for (size_t i = 0; i < settings->pattern_count; i++) {
    if (fnmatch(settings->patterns[i], name, 0) == 0) {
      settings->pattern_matches[i] = 1;
      wanted = 1;
    }
  }
  return wanted;
}

// *heads counts those printed: a blank line stands between files, and not for one that cannot be read.
static void print_file_head(const inspect_settings *settings, const char *path, const fp8lm_tensor_file *file,
                            int *heads) {
  if (settings->json) {
    printf("\"format\": \"%s\", \"tensors\": [", file_formats[file->format]);
    return;
  }
  if ((*heads)++) fputc('\n', stdout);
  fp8lm_print_text(stdout, path);
  printf(": %s, ", file_formats[file->format]);
  if (settings->pattern_count) {
    size_t wanted = 0;
    for (size_t i = 0; i < file->tensor_count; i++) wanted += (size_t)is_wanted(settings, file->tensors[i].name);
    printf("%zu of ", wanted);
  }
  printf("%zu tensor%s\n", file->tensor_count, file->tensor_count == 1 ? "" : "s");
}

static int inspect_file(const inspect_settings *settings, const block_buffers *buffers, const char *path, int *heads) {
  fp8lm_input input;
  fp8lm_tensor_file file = {.tensors = NULL};
  fp8core_status status = fp8lm_input_open(&input, path);
  if (settings->json) {
    fputs("\n    {\"file\": ", stdout);
    fp8lm_json_write_string(stdout, path, strlen(path));
    fputs(", ", stdout);
  }
  if (status == FP8CORE_OK) {
    status = describe_file(settings, path, &input, &file);
    const int described = status == FP8CORE_OK;
    int printed = 0;
    if (described) print_file_head(settings, path, &file, heads);
    for (size_t i = 0; i < file.tensor_count && status == FP8CORE_OK; i++) {
      const fp8lm_tensor *tensor = &file.tensors[i];
      if (!is_wanted(settings, tensor->name)) continue;
      tensor_report report;
      const int readable = tensor->element != FP8LM_ELEMENT_OTHER;
      if (readable) status = inspect_tensor(buffers, &input, tensor, settings->margin, &report);
      if (status != FP8CORE_OK) break;
      if (settings->json) {
        if (printed++) fputc(',', stdout);
        write_tensor(tensor, readable ? &report : NULL);
      } else {
        print_tensor(tensor, readable ? &report : NULL);
      }
    }
    if (settings->json && described) fputs(status == FP8CORE_OK ? "]" : "], ", stdout);
    fp8lm_tensor_file_free(&file);
    fp8lm_input_close(&input);
  }
  if (settings->json) {
    if (status != FP8CORE_OK) {
      fputs("\"error\": ", stdout);
      fp8lm_json_write_string(stdout, fp8core_last_error(), strlen(fp8core_last_error()));
    }
    fputc('}', stdout);
  }
  return status == FP8CORE_OK ? FP8LM_EXIT_SUCCESS
                              : fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s: %s", path, fp8core_last_error());
}

static int parse_shape(inspect_settings *settings, const char *text) {
  char *copy = strdup(text);
  int result = copy ? 0 : -1;
  settings->dimensions = 0;
  char *cursor = copy;
  while (result == 0 && cursor) {
    char *comma = strchr(cursor, ',');
    if (comma) *comma = '\0';
    int64_t size;
    if (settings->dimensions == FP8LM_NPY_MAX_DIMENSIONS) {
      fp8lm_complain(0, PREFIX, "--shape is '%s', expected at most %d sizes", text, FP8LM_NPY_MAX_DIMENSIONS);
      result = -1;
    } else if (fp8lm_parse_integer(PREFIX, "a size of --shape", cursor, 0, INT64_MAX, &size) != 0) {
      result = -1;
    } else {
      settings->shape_storage[settings->dimensions++] = (uint64_t)size;
    }
    cursor = comma ? comma + 1 : NULL;
  }
  free(copy);
  settings->shape = settings->shape_storage;
  return result;
}

static int parse_format(const char *text) {
  for (int i = 0; i < 3; i++) {
    if (strcmp(text, file_formats[i]) == 0) return i;
  }
  fp8lm_complain(0, PREFIX, "--format is '%s', expected raw, npy or safetensors", text);
  return -1;
}

enum {
  OPTION_FORMAT = 256,
  OPTION_DTYPE,
  OPTION_SHAPE,
  OPTION_TENSOR,
  OPTION_MARGIN,
  OPTION_THREADS,
  OPTION_JSON,
  OPTION_HELP
};

static const struct option options[] = {
  {"format", required_argument, NULL, OPTION_FORMAT},
  {"dtype", required_argument, NULL, OPTION_DTYPE},
  {"shape", required_argument, NULL, OPTION_SHAPE},
  {"tensor", required_argument, NULL, OPTION_TENSOR},
  {"margin", required_argument, NULL, OPTION_MARGIN},
  {"threads", required_argument, NULL, OPTION_THREADS},
  {"json", no_argument, NULL, OPTION_JSON},
  {"help", no_argument, NULL, OPTION_HELP},
  {NULL, 0, NULL, 0},
};

// 0: go on; 1: done (help); -1: wrong usage.
static int parse_options(int argc, char **argv, inspect_settings *settings) {
  opterr = 0;
  for (;;) {
    const int option = getopt_long(argc, argv, ":", options, NULL);
    int64_t value;
    switch (option) {
    case -1: return 0;
    case OPTION_HELP: fputs(help_text, stdout); return 1;
    case OPTION_JSON: settings->json = 1; break;
    case OPTION_FORMAT:
      settings->format = parse_format(optarg);
      if (settings->format < 0) return -1;
      break;
    case OPTION_DTYPE:
      if (fp8lm_element_from_name(optarg, &settings->dtype_storage) != 0) {
        return fp8lm_complain(-1, PREFIX, "--dtype is '%s', expected e4m3, e5m2, bf16, fp16, fp32 or fp64", optarg);
      }
      settings->dtype = &settings->dtype_storage;
      break;
    case OPTION_SHAPE:
      if (parse_shape(settings, optarg) != 0) return -1;
      break;
    case OPTION_TENSOR: settings->patterns[settings->pattern_count++] = optarg; break;
    case OPTION_MARGIN:
      if (fp8lm_parse_integer(PREFIX, "--margin", optarg, -64, 64, &value) != 0) return -1;
      settings->margin = (int)value;
      break;
    case OPTION_THREADS:
      if (fp8lm_parse_integer(PREFIX, "--threads", optarg, 1, 1024, &value) != 0) return -1;
      settings->threads = (int)value;
      break;
    default: fp8lm_option_error(PREFIX, option, argv, options); return -1;
    }
  }
}

static int check_usage(const inspect_settings *settings, int file_count) {
  if (file_count == 0) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "no file given; see '" PREFIX " --help'");
  }
  if (settings->format == FP8LM_FILE_RAW && !settings->dtype) {
    return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--format raw needs --dtype");
  }
  if (settings->shape && !settings->dtype) return fp8lm_complain(FP8LM_EXIT_USAGE, PREFIX, "--shape needs --dtype");
  return FP8LM_EXIT_SUCCESS;
}

static int inspect_files(const inspect_settings *settings, int file_count, char **paths) {
  block_buffers buffers = {.context = NULL};
  fp8core_context_options context_options = fp8core_context_options_default();
  context_options.threads = settings->threads;
  if (fp8core_context_create(&buffers.context, &context_options) != FP8CORE_OK) {
    return fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "%s", fp8core_last_error());
  }
  buffers.bytes = malloc(BLOCK_ELEMENTS * sizeof(double));
  buffers.values = malloc(BLOCK_ELEMENTS * sizeof(float));
  buffers.returned = malloc(BLOCK_ELEMENTS * sizeof(float));
  buffers.codes = malloc(BLOCK_ELEMENTS * sizeof(uint16_t));
  int result = FP8LM_EXIT_SUCCESS;
  int heads = 0;
  if (!buffers.bytes || !buffers.values || !buffers.returned || !buffers.codes) {
    result = fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "cannot allocate the buffers of a block");
  } else {
    if (settings->json) printf("{\"margin\": %d, \"files\": [", settings->margin);
    for (int i = 0; i < file_count; i++) {
      if (i && settings->json) fputc(',', stdout);
      if (inspect_file(settings, &buffers, paths[i], &heads) != FP8LM_EXIT_SUCCESS) result = FP8LM_EXIT_FAILURE;
    }
    if (settings->json) fputs("\n]}\n", stdout);
    for (size_t i = 0; i < settings->pattern_count; i++) {
      if (settings->pattern_matches[i]) continue;
      result =
        fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "no tensor's name matches --tensor '%s'", settings->patterns[i]);
    }
  }
  free(buffers.bytes);
  free(buffers.values);
  free(buffers.returned);
  free(buffers.codes);
  fp8core_context_destroy(&buffers.context);
  return result;
}

int fp8lm_inspect(int argc, char **argv) {
  inspect_settings settings = {.format = -1};
  settings.patterns = calloc((size_t)argc, sizeof(*settings.patterns));
  settings.pattern_matches = calloc((size_t)argc, sizeof(*settings.pattern_matches));
  int result;
  if (!settings.patterns || !settings.pattern_matches) {
    result = fp8lm_complain(FP8LM_EXIT_FAILURE, PREFIX, "cannot allocate the list of patterns");
  } else {
    const int parsed = parse_options(argc, argv, &settings);
    if (parsed > 0) {
      result = FP8LM_EXIT_SUCCESS;
    } else if (parsed < 0) {
      result = FP8LM_EXIT_USAGE;
    } else {
      result = check_usage(&settings, argc - optind);
      if (result == FP8LM_EXIT_SUCCESS) result = inspect_files(&settings, argc - optind, argv + optind);
    }
  }
  free(settings.patterns);
  free(settings.pattern_matches);
  return result;
}
