// The output of fp8lm plan: tables and JSON.
#include "plan.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "json_writer.h"

static const char *const class_titles[FP8ZERO_MEMORY_CLASSES] = {
  "weights",    "gradients",         "master weights",   "exp_avg",
  "exp_avg_sq", "scales and tables", "activations kept", "workspace (estimate)"};
static const char *const traffic_titles[FP8ZERO_TRAFFIC_KINDS] = {
  "gradients, data parallel", "weights, ZeRO", "tensor parallel, gathered", "tensor parallel, summed", "pipeline"};

double fp8lm_plan_weight_related(const fp8zero_plan_result *result) {
  return result->traffic[FP8ZERO_TRAFFIC_GRADIENTS].mean + result->traffic[FP8ZERO_TRAFFIC_WEIGHTS].mean;
}

// A unit in which `most` bytes have digits before the point.
static double unit_of(double most, const char **name) {
  *name = most >= 0x1p30 ? "GiB" : most >= 0x1p20 ? "MiB" : "KiB";
  return most >= 0x1p30 ? 0x1p30 : most >= 0x1p20 ? 0x1p20 : 0x1p10;
}

static void print_row(FILE *stream, const char *title, const fp8zero_spread *spread, double unit) {
  fprintf(stream, "  %-26s %11.3f %11.3f %11.3f\n", title, (double)spread->minimum / unit,
          (double)spread->maximum / unit, spread->mean / unit);
}

// 66.4 % less; 3.0 % more.
static void print_change(FILE *stream, double now, double before) {
  const double change = 100.0 * (now / before - 1.0);
  fprintf(stream, "%.1f %% %s", fabs(change), change <= 0.0 ? "less" : "more");
}

static const char *distribution_title(fp8zero_distribution distribution) {
  return distribution == FP8ZERO_ELEMENTS ? "equal parts" : "whole tensors";
}

static void print_distribution(FILE *stream, fp8zero_distribution distribution, const fp8zero_plan_result *result,
                               double unit) {
  char title[40];
  (void)snprintf(title, sizeof(title), "of ZeRO, %s", distribution_title(distribution));
  fprintf(stream, "  %-26s %11.3f %11.3f %11.3f   ", title, (double)result->distributed.minimum / unit,
          (double)result->distributed.maximum / unit, result->distributed.mean / unit);
  if (distribution == FP8ZERO_ELEMENTS)
    fprintf(stream, "%" PRId64 " tensor%s cut\n", result->split_tensors, result->split_tensors == 1 ? "" : "s");
  else if (isfinite(result->balance))
    fprintf(stream, "maximum / minimum %.4f\n", result->balance);
  else
    fputs("some ranks have nothing\n", stream);
}

static void print_head(FILE *stream, const fp8lm_planned *plan) {
  const fp8zero_plan_model *model = &plan->model;
  const fp8zero_plan_options *options = &plan->options;
  const fp8zero_plan_result *result = &plan->result;
  fprintf(stream, "%s: %" PRId64 " parameters, %d layers, %d wide, feed-forward %d, %d heads", plan->name,
          result->parameters, model->layers, model->hidden, model->ffn_hidden, model->heads);
  if (model->kv_heads != model->heads) fprintf(stream, " (%d of keys and values)", model->kv_heads);
  fprintf(stream, "\nsequence %d, vocabulary %d", model->sequence, model->vocabulary);
  if (result->padded_vocabulary != model->vocabulary)
    fprintf(stream, " (padded to %" PRId64 ")", result->padded_vocabulary);
  fputc('\n', stream);
  fprintf(stream, "%" PRId64 " rank%s: tensor parallel %d%s, pipeline %d, data parallel %d", result->ranks,
          result->ranks == 1 ? "" : "s", options->tensor_parallel,
          options->sequence_parallel ? " with sequence parallelism" : "", options->pipeline_parallel,
          options->data_parallel);
  if (options->zero_stage > 0)
    fprintf(stream, "; ZeRO stage %d, %s", options->zero_stage, distribution_title(options->distribution));
  fprintf(stream, "\n%s; micro-batch %d, %d a step (global batch %" PRId64 "); activations %s\n",
          fp8zero_precision_name(options->precision), options->micro_batch, options->micro_batches,
          (int64_t)options->micro_batch * options->micro_batches * options->data_parallel,
          options->recompute ? "recomputed" : "kept");
}

static void print_baseline(FILE *stream, const fp8lm_planned *plan) {
  const char *memory_unit;
  const char *traffic_unit;
  const double memory = (double)plan->baseline.memory_total.maximum;
  const double sent = fp8lm_plan_weight_related(&plan->baseline);
  const double memory_scale = unit_of(memory, &memory_unit);
  const double traffic_scale = unit_of(sent, &traffic_unit);
  fprintf(stream, "\nbeside bf16, %.3f %s at most: ", memory / memory_scale, memory_unit);
  print_change(stream, (double)plan->result.memory_total.maximum, memory);
  if (sent > 0.0) {
    fprintf(stream, "; gradients and weights sent, %.3f %s: ", sent / traffic_scale, traffic_unit);
    print_change(stream, fp8lm_plan_weight_related(&plan->result), sent);
  }
  fputc('\n', stream);
}

void fp8lm_plan_print(FILE *stream, const fp8lm_planned *plan) {
  const fp8zero_plan_result *result = &plan->result;
  const char *unit_name;
  double unit = unit_of((double)result->memory_total.maximum, &unit_name);
  if (plan->search) fprintf(stream, "the largest %s that fits:\n", plan->search);
  print_head(stream, plan);
  fprintf(stream, "\nmemory of a rank, %s           minimum     maximum        mean\n", unit_name);
  for (int i = 0; i < FP8ZERO_MEMORY_CLASSES; i++) print_row(stream, class_titles[i], &result->memory[i], unit);
  print_row(stream, "total", &result->memory_total, unit);
  if (plan->options.zero_stage > 0) {
    const fp8zero_distribution other =
      plan->options.distribution == FP8ZERO_ELEMENTS ? FP8ZERO_WHOLE_TENSORS : FP8ZERO_ELEMENTS;
    print_distribution(stream, plan->options.distribution, result, unit);
    print_distribution(stream, other, &plan->other, unit);
  }
  if (result->ranks > 1) {
    unit = unit_of((double)result->traffic_total.maximum, &unit_name);
    fprintf(stream, "\nsent by a rank in a step, %s   minimum     maximum        mean\n", unit_name);
    for (int i = 0; i < FP8ZERO_TRAFFIC_KINDS; i++) print_row(stream, traffic_titles[i], &result->traffic[i], unit);
    print_row(stream, "total", &result->traffic_total, unit);
  }
  if (plan->options.precision != FP8ZERO_BF16) print_baseline(stream, plan);
  if (plan->device_bytes > 0.0) {
    const double left = plan->device_bytes - (double)result->memory_total.maximum;
    fprintf(stream, "device memory %.2f GiB: %s, %.2f GiB are %s\n", plan->device_bytes * 0x1p-30,
            left >= 0.0 ? "fits" : "does not fit", fabs(left) * 0x1p-30, left >= 0.0 ? "left" : "missing");
  }
}

// JSON.

static void put_spread(FILE *stream, const char *separator, const char *name, const fp8zero_spread *spread) {
  fprintf(stream, "%s\"%s\": {\"minimum\": %" PRId64 ", \"maximum\": %" PRId64 ", \"mean\": ", separator, name,
          spread->minimum, spread->maximum);
  fp8lm_json_write_number(stream, spread->mean);
  fputc('}', stream);
}

static void put_result(FILE *stream, const fp8zero_plan_result *result, const char *indentation) {
  fprintf(stream, "{\n%s  \"memory\": {", indentation);
  for (int i = 0; i < FP8ZERO_MEMORY_CLASSES; i++) {
    fprintf(stream, "%s\n%s    ", i ? "," : "", indentation);
    put_spread(stream, "", fp8zero_memory_class_name((fp8zero_memory_class)i), &result->memory[i]);
  }
  fprintf(stream, ",\n%s    ", indentation);
  put_spread(stream, "", "total", &result->memory_total);
  fprintf(stream, "},\n%s  \"traffic\": {", indentation);
  for (int i = 0; i < FP8ZERO_TRAFFIC_KINDS; i++) {
    fprintf(stream, "%s\n%s    ", i ? "," : "", indentation);
    put_spread(stream, "", fp8zero_traffic_kind_name((fp8zero_traffic_kind)i), &result->traffic[i]);
  }
  fprintf(stream, ",\n%s    ", indentation);
  put_spread(stream, "", "total", &result->traffic_total);
  fprintf(stream, "},\n%s  ", indentation);
  put_spread(stream, "", "distributed", &result->distributed);
  fprintf(stream, ",\n%s  \"balance\": ", indentation);
  fp8lm_json_write_number(stream, result->balance);
  fprintf(stream, ", \"split_tensors\": %" PRId64 "}", result->split_tensors);
}

static const char *truth(int value) { return value ? "true" : "false"; }

void fp8lm_plan_print_json(FILE *stream, const fp8lm_planned *plan) {
  const fp8zero_plan_model *model = &plan->model;
  const fp8zero_plan_options *options = &plan->options;
  fputs("{\n  \"model\": {\"name\": ", stream);
  fp8lm_json_write_string(stream, plan->name, strlen(plan->name));
  fprintf(stream,
          ", \"num-layers\": %d, \"hidden-size\": %d, \"ffn-hidden-size\": %d, \"num-attention-heads\": %d, "
          "\"num-query-groups\": %d, \"seq-length\": %d, \"vocab-size\": %d, \"padded-vocab-size\": %" PRId64 ", ",
          model->layers, model->hidden, model->ffn_hidden, model->heads, model->kv_heads, model->sequence,
          model->vocabulary, plan->result.padded_vocabulary);
  fprintf(stream,
          "\"normalization\": \"%s\", \"swiglu\": %s, \"position-embedding-type\": \"%s\", "
          "\"untie-embeddings-and-output-weights\": %s, \"disable-bias-linear\": %s, \"parameters\": %" PRId64 "},\n",
          model->rms_norm ? "RMSNorm" : "LayerNorm", truth(model->swiglu),
          model->learned_positions ? "learned_absolute" : "rope", truth(!model->tied_embeddings), truth(!model->biases),
          plan->result.parameters);
  fprintf(stream,
          "  \"options\": {\"precision\": \"%s\", \"tensor-model-parallel-size\": %d, \"sequence-parallel\": %s, "
          "\"pipeline-model-parallel-size\": %d, \"data-parallel-size\": %d, \"zero-stage\": %d, "
          "\"zero-partition\": \"%s\", ",
          fp8zero_precision_name(options->precision), options->tensor_parallel, truth(options->sequence_parallel),
          options->pipeline_parallel, options->data_parallel, options->zero_stage,
          options->distribution == FP8ZERO_ELEMENTS ? "elements" : "tensors");
  fprintf(stream,
          "\"micro-batch-size\": %d, \"global-batch-size\": %" PRId64 ", \"recompute-activations\": %s},\n"
          "  \"ranks\": %" PRId64 ",\n",
          options->micro_batch, (int64_t)options->micro_batch * options->micro_batches * options->data_parallel,
          truth(options->recompute), plan->result.ranks);
  if (plan->search) fprintf(stream, "  \"search\": \"%s\",\n", plan->search);
  if (plan->device_bytes > 0.0) {
    fputs("  \"device_bytes\": ", stream);
    fp8lm_json_write_number(stream, plan->device_bytes);
    fprintf(stream, ", \"fits\": %s,\n", truth((double)plan->result.memory_total.maximum <= plan->device_bytes));
  }
  fputs("  \"plan\": ", stream);
  put_result(stream, &plan->result, "  ");
  fputs(",\n  \"other_partition\": ", stream);
  if (options->zero_stage > 0)
    put_result(stream, &plan->other, "  ");
  else
    fputs("null", stream);
  fputs(",\n  \"bf16\": ", stream);
  put_result(stream, &plan->baseline, "  ");
  fputs("\n}\n", stream);
}
