// fp8lm plan --paper: the systems that FP8-LM (Peng et al., 2023) measured, planned, beside what was measured.
#include "plan.h"

#include "command.h"
#include "fp8gpt/config.h"

// One system in one precision. Memory: table 8, a GPU of 80 GB; where a system is not in it (minimum 0), table 2.
typedef struct paper_memory {
  const char *preset;
  fp8zero_precision precision;
  int micro_batch;
  double minimum;
  double maximum;
} paper_memory;

static const paper_memory memory_rows[] = {
  {"gpt-7b", FP8ZERO_BF16, 2, 69.07, 69.63},     {"gpt-7b", FP8ZERO_TE, 2, 76.97, 77.28},
  {"gpt-7b", FP8ZERO_FP8_O3, 2, 49.06, 49.36},   {"gpt-7b", FP8ZERO_FP8_O3, 4, 0.0, 69.3},
  {"gpt-13b", FP8ZERO_BF16, 2, 67.98, 68.18},    {"gpt-13b", FP8ZERO_TE, 2, 73.68, 76.36},
  {"gpt-13b", FP8ZERO_FP8_O3, 2, 48.45, 48.85},  {"gpt-13b", FP8ZERO_FP8_O3, 4, 0.0, 67.8},
  {"gpt-175b", FP8ZERO_BF16, 1, 65.60, 66.12},   {"gpt-175b", FP8ZERO_TE, 1, 69.04, 69.57},
  {"gpt-175b", FP8ZERO_FP8_O3, 1, 38.64, 40.28}, {"gpt-175b", FP8ZERO_FP8_O3, 4, 0.0, 57.7},
};

// On the wire: gradients and weights of a step, and activations of a micro-batch (0: not there); table 7.
typedef struct paper_traffic {
  const char *preset;
  fp8zero_precision precision;
  int micro_batch;
  double weight_related;
  double activation_related;
} paper_traffic;

static const paper_traffic traffic_rows[] = {
  {"gpt-7b", FP8ZERO_BF16, 2, 37.2, 0.0},   {"gpt-7b", FP8ZERO_FP8_O3, 2, 13.9, 0.0},
  {"gpt-13b", FP8ZERO_BF16, 2, 34.3, 4.7},  {"gpt-13b", FP8ZERO_FP8_O3, 2, 12.4, 3.1},
  {"gpt-175b", FP8ZERO_BF16, 1, 23.4, 5.9}, {"gpt-175b", FP8ZERO_FP8_O3, 1, 8.2, 3.9},
};

#define COUNT(rows) ((int)(sizeof(rows) / sizeof(*(rows))))

static const char notes[] =
  "The paper's GB are taken as GiB, with which its traffic of activations agrees. ZeRO is of stage 1, by whole "
  "tensors\n"
  "in FP8 and by equal parts else; a step has as many micro-batches as stages; tensor parallelism is with sequence\n"
  "parallelism; the vocabulary is padded to a multiple of 128 times the tensor-parallel size. BF16 and TE have the\n"
  "smaller of FP8's micro-batches, with which the same traffic agrees. Planned minima and maxima are over all stages.\n"
  "\n"
  "Memory that the formulas leave out: what the GPU's driver, communication and matrix libraries hold, what an\n"
  "allocator cannot use, dropout masks, logits of all rows at once; and what a framework keeps twice: transposed FP8\n"
  "copies and 16-bit copies of weights and activations beside FP8. Our model keeps none of these from pass to pass:\n"
  "the planned FP8 memory is what it needs, not what the paper's needed.\n"
  "Gradients and weights: an output layer of its own would come on top, which the paper's models seem to have, and\n"
  "gradients of embeddings in FP32, where ours travel in FP8 in the FP8 levels.\n"
  "Activations are the all-gathers; the measured figures have no room for the reduce-scatters, which 'fp8lm plan'\n"
  "lists by themselves.\n";

static fp8core_status plan_system(const char *preset, fp8zero_precision precision, int micro_batch,
                                  fp8zero_plan_options *options, fp8zero_plan_result *result) {
  fp8gpt_config config;
  const fp8core_status status = fp8gpt_config_preset(preset, &config);
  if (status != FP8CORE_OK) return status;
  fp8zero_plan_model model = fp8zero_plan_model_default();
  model.layers = config.layers;
  model.hidden = config.hidden;
  model.heads = config.heads;
  model.kv_heads = config.kv_heads;
  model.ffn_hidden = config.ffn_hidden;
  model.vocabulary = config.vocabulary;
  model.sequence = config.sequence;
  model.tied_embeddings = config.tied_embeddings;
  model.biases = config.biases;
  // 32 H100 of 80 GB for the first two, 128 for the last.
  *options = fp8zero_plan_options_default();
  const int billions = config.layers == 32 ? 7 : config.layers == 40 ? 13 : 175;
  options->tensor_parallel = billions == 7 ? 1 : billions == 13 ? 2 : 8;
  options->pipeline_parallel = billions == 175 ? 4 : 1;
  options->data_parallel = billions == 7 ? 32 : billions == 13 ? 16 : 4;
  options->sequence_parallel = options->tensor_parallel > 1;
  options->precision = precision;
  options->zero_stage = 1;
  options->distribution = precision >= FP8ZERO_FP8_O1 ? FP8ZERO_WHOLE_TENSORS : FP8ZERO_ELEMENTS;
  options->micro_batch = micro_batch;
  options->micro_batches = options->pipeline_parallel;
  options->vocabulary_multiple = 128;
  return fp8zero_plan(&model, options, result);
}

static double deviation(double planned, double measured) { return 100.0 * (planned / measured - 1.0); }

// All-gathers of a micro-batch. The paper's are of a stage between others, where there is one.
static double activation_related(const fp8zero_plan_options *options, const fp8zero_plan_result *result) {
  return (double)result->traffic[FP8ZERO_TRAFFIC_TENSOR_GATHER].minimum / options->micro_batches;
}

static void print_system(FILE *stream, const char *preset, const fp8zero_plan_options *options) {
  fprintf(stream, "  %-9s %2d %2d %2d  %-6s  %11d", preset, options->tensor_parallel, options->pipeline_parallel,
          options->data_parallel, fp8zero_precision_name(options->precision), options->micro_batch);
}

static int print_memory(FILE *stream, int json) {
  if (json)
    fputs("{\n  \"memory\": [", stream);
  else
    fputs("memory of a rank, GiB, minimum to maximum, and how far the planned maximum is from the measured one\n"
          "  model     TP PP DP  level   micro-batch         planned        measured  deviation\n",
          stream);
  for (int i = 0; i < COUNT(memory_rows); i++) {
    const paper_memory *row = &memory_rows[i];
    fp8zero_plan_options options;
    fp8zero_plan_result result;
    if (plan_system(row->preset, row->precision, row->micro_batch, &options, &result) != FP8CORE_OK)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, FP8LM_PLAN_PREFIX, "%s", fp8core_last_error());
    const double least = (double)result.memory_total.minimum * 0x1p-30;
    const double most = (double)result.memory_total.maximum * 0x1p-30;
    if (json) {
      fprintf(stream,
              "%s\n    {\"model\": \"%s\", \"precision\": \"%s\", \"micro-batch-size\": %d, \"planned\": [%.3f, %.3f], "
              "\"measured\": [",
              i ? "," : "", row->preset, fp8zero_precision_name(row->precision), row->micro_batch, least, most);
      if (row->minimum > 0.0)
        fprintf(stream, "%.2f", row->minimum);
      else
        fputs("null", stream);
      fprintf(stream, ", %.2f], \"deviation_percent\": %.4f}", row->maximum, deviation(most, row->maximum));
      continue;
    }
    print_system(stream, row->preset, &options);
    fprintf(stream, "  %5.2f to %5.2f  ", least, most);
    if (row->minimum > 0.0)
      fprintf(stream, "%5.2f to %5.2f", row->minimum, row->maximum);
    else
      fprintf(stream, "         %5.2f", row->maximum);
    fprintf(stream, "  %+7.1f %%\n", deviation(most, row->maximum));
  }
  return FP8LM_EXIT_SUCCESS;
}

static int print_traffic(FILE *stream, int json) {
  if (json)
    fputs("],\n  \"traffic\": [", stream);
  else
    fputs("\nsent by a rank, GiB                        gradients and weights of a step  activations of a micro-batch\n"
          "  model     TP PP DP  level   micro-batch    planned  measured  deviation    planned  measured  deviation\n",
          stream);
  for (int i = 0; i < COUNT(traffic_rows); i++) {
    const paper_traffic *row = &traffic_rows[i];
    fp8zero_plan_options options;
    fp8zero_plan_result result;
    if (plan_system(row->preset, row->precision, row->micro_batch, &options, &result) != FP8CORE_OK)
      return fp8lm_complain(FP8LM_EXIT_FAILURE, FP8LM_PLAN_PREFIX, "%s", fp8core_last_error());
    const double weights = fp8lm_plan_weight_related(&result) * 0x1p-30;
    const double activations = activation_related(&options, &result) * 0x1p-30;
    if (json) {
      fprintf(stream,
              "%s\n    {\"model\": \"%s\", \"precision\": \"%s\", \"micro-batch-size\": %d, \"weights\": {\"planned\": "
              "%.3f, \"measured\": %.1f, \"deviation_percent\": %.4f}, \"activations\": ",
              i ? "," : "", row->preset, fp8zero_precision_name(row->precision), row->micro_batch, weights,
              row->weight_related, deviation(weights, row->weight_related));
      if (row->activation_related > 0.0)
        fprintf(stream, "{\"planned\": %.3f, \"measured\": %.1f, \"deviation_percent\": %.4f}}", activations,
                row->activation_related, deviation(activations, row->activation_related));
      else
        fputs("null}", stream);
      continue;
    }
    print_system(stream, row->preset, &options);
    fprintf(stream, "    %7.2f  %8.1f  %+7.1f %%", weights, row->weight_related,
            deviation(weights, row->weight_related));
    if (row->activation_related > 0.0)
      fprintf(stream, "    %7.2f  %8.1f  %+7.1f %%", activations, row->activation_related,
              deviation(activations, row->activation_related));
    fputc('\n', stream);
  }
  if (json) fputs("]\n}\n", stream);
  return FP8LM_EXIT_SUCCESS;
}

int fp8lm_plan_paper(FILE *stream, int json) {
  if (!json)
    fputs(
      "The systems of FP8-LM (Peng et al., 2023, tables 2, 7 and 8: H100 of 80 GB), planned and as measured there\n\n",
      stream);
  int status = print_memory(stream, json);
  if (status == FP8LM_EXIT_SUCCESS) status = print_traffic(stream, json);
  if (status == FP8LM_EXIT_SUCCESS && !json) fprintf(stream, "\n%s", notes);
  return status;
}
