#include "report_page.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "report_html.h"

// A spike is a loss above the mean of the last thirty steps or so by a tenth of it and by eight mean deviations.
#define SPIKE_STEPS 30.0
#define SPIKE_DEVIATIONS 8.0
#define SPIKE_SHARE 0.1
#define SPIKE_WARMUP 20

// Spans of steps and events that are listed of a run; more are counted.
#define MOST_SPANS 12
#define MOST_EVENTS 50

// Tensors that are listed before the reader asks for more.
#define OPEN_TENSORS 8

// Steps that a warning is about, first to last.
typedef struct span {
  int64_t first;
  int64_t last;
  size_t steps;
  // Of a spike: the largest loss, and the mean before.
  double peak;
  double mean;
} span;

typedef struct spans {
  span items[MOST_SPANS];
  size_t count;
  size_t further;
  size_t steps;
} spans;

// Shares that are compared between tensors.
enum { SATURATED, ZEROS, FILL, HEALTH };

// What is computed of a run. Arrays belong to the page.
typedef struct run_data {
  double *steps;
  double *columns[FP8LM_LOG_COLUMNS];
  double *smoothed;
  double *evaluation_steps;
  double *evaluations;
  // The largest share of any tensor at each step with statistics.
  double *health_steps;
  double *health[HEALTH];
  size_t health_count;
  // NaN where there is none.
  double final_training;
  double final_validation;
  double best_validation;
  int64_t best_step;
  double median_rate;
  double median_mfu;
  double bytes;
  spans skipped;
  spans nonfinite;
  spans spikes;
} run_data;

typedef struct page {
  FILE *stream;
  const fp8lm_report_run *runs;
  size_t count;
  const fp8lm_report_options *options;
  run_data *data;
  double smoothing;
  double first_step;
  double last_step;
  fp8lm_series *series;
  size_t series_count;
  // Everything that was allocated, for the end.
  void **blocks;
  size_t block_count;
  size_t block_room;
  int failed;
} page;

// `count` doubles that live as long as the page; NULL, and `failed`, without memory.
static double *numbers(page *p, size_t count) {
  if (p->block_count == p->block_room) {
    const size_t room = p->block_room ? 2 * p->block_room : 64;
    void **blocks = realloc(p->blocks, room * sizeof(*blocks));
    if (!blocks) {
      p->failed = 1;
      return NULL;
    }
    p->blocks = blocks;
    p->block_room = room;
  }
  double *block = malloc((count + 1) * sizeof(double));
  if (!block) {
    p->failed = 1;
    return NULL;
  }
  p->blocks[p->block_count++] = block;
  return block;
}

static void put(page *p, const char *text) { fputs(text, p->stream); }
static void put_text(page *p, const char *text) { fp8lm_html_text(p->stream, text); }

static void FP8CORE_PRINTF(2, 3) print(page *p, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vfprintf(p->stream, format, arguments);
  va_end(arguments);
}

// Figures of a run ----------------------------------------------------------------------------------------------------

static void add_span(spans *s, int64_t step, int continues, double peak, double mean) {
  s->steps++;
  if (continues && s->further == 0 && s->count) {
    span *last = &s->items[s->count - 1];
    last->last = step;
    last->steps++;
    if (peak > last->peak) last->peak = peak;
  } else if (!continues && s->count < MOST_SPANS) {
    s->items[s->count++] = (span){.first = step, .last = step, .steps = 1, .peak = peak, .mean = mean};
  } else if (!continues) {
    s->further++;
  }
}

static void find_warnings(const fp8lm_run_log *log, run_data *data) {
  double mean = 0.0;
  double deviation = 0.0;
  size_t seen = 0;
  int was_skipped = 0;
  int was_nonfinite = 0;
  int was_spike = 0;
  for (size_t i = 0; i < log->step_count; i++) {
    const fp8lm_log_step *step = &log->steps[i];
    if (step->skipped) add_span(&data->skipped, step->step, was_skipped, 0.0, 0.0);
    if (step->nonfinite && !step->skipped) add_span(&data->nonfinite, step->step, was_nonfinite, 0.0, 0.0);
    was_skipped = step->skipped;
    was_nonfinite = step->nonfinite && !step->skipped;
    double loss = step->values[FP8LM_LOG_LOSS];
    if (isnan(loss)) continue;
    const double threshold = fmax(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * fabs(mean));
    const int stands_out = seen >= SPIKE_WARMUP && loss - mean > threshold;
    const int is_spike = log->tells_spikes ? step->spike : stands_out;
    if (is_spike) add_span(&data->spikes, step->step, was_spike, loss, mean);
    // A loss that stays high becomes the mean after a while.
    if (stands_out) loss = mean + threshold;
    was_spike = is_spike;
    const double share = fmax(1.0 / (double)++seen, 1.0 / SPIKE_STEPS);
    deviation += share * (fabs(loss - mean) - deviation);
    mean += share * (loss - mean);
    // The first losses fall too fast to tell of their noise.
    if (seen <= 2) deviation = 0.0;
  }
}

// The time constant grows with the steps from the start, where losses fall fast.
static double constant_at(const double *steps, size_t i, double constant) {
  return fmax(fmin(constant, (steps[i] - steps[0]) / 4.0), 1e-3);
}

// Mean of all values, which count by exp(-distance in steps / constant): both ways, so that the line doesn't lag
// behind.
static void smooth(const double *steps, const double *values, size_t count, double constant, double *smoothed,
                   double *weights) {
  double sum = 0.0;
  double weight = 0.0;
  double last = 0.0;
  for (size_t i = 0; i < count; i++) {
    const double value = values[i];
    smoothed[i] = NAN;
    if (isnan(value)) continue;
    const double kept = weight > 0.0 ? exp((last - steps[i]) / constant_at(steps, i, constant)) : 0.0;
    sum = kept * sum + value;
    weight = kept * weight + 1.0;
    last = steps[i];
    smoothed[i] = sum;
    weights[i] = weight;
  }
  sum = weight = 0.0;
  for (size_t i = count; i-- > 0;) {
    if (isnan(values[i])) continue;
    const double kept = weight > 0.0 ? exp((steps[i] - last) / constant_at(steps, i, constant)) : 0.0;
    smoothed[i] = (smoothed[i] + kept * sum) / (weights[i] + kept * weight);
    sum = kept * sum + values[i];
    weight = kept * weight + 1.0;
    last = steps[i];
  }
}

static int compare_doubles(const void *a, const void *b) {
  const double x = *(const double *)a;
  const double y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(page *p, const double *values, size_t count) {
  double *sorted = numbers(p, count);
  if (!sorted) return NAN;
  size_t kept = 0;
  for (size_t i = 0; i < count; i++) {
    if (!isnan(values[i])) sorted[kept++] = values[i];
  }
  qsort(sorted, kept, sizeof(double), compare_doubles);
  if (kept == 0) return NAN;
  return kept % 2 ? sorted[kept / 2] : 0.5 * sorted[kept / 2 - 1] + 0.5 * sorted[kept / 2];
}

static double last_value(const double *values, size_t count) {
  while (count && isnan(values[count - 1])) count--;
  return count ? values[count - 1] : NAN;
}

// The larger one; NaN only where both are.
static double larger(double a, double b) { return isnan(b) || a > b ? a : b; }

static double health_of(const fp8lm_log_statistics *s, int which) {
  return (double)(which == SATURATED ? s->saturated : which == ZEROS ? s->zeros : s->fill);
}

static int compare_statistics(const void *a, const void *b) {
  const fp8lm_log_statistics *const *x = a;
  const fp8lm_log_statistics *const *y = b;
  return ((*x)->step > (*y)->step) - ((*x)->step < (*y)->step);
}

static void find_health(page *p, const fp8lm_run_log *log, run_data *data) {
  size_t count = 0;
  for (size_t i = 0; i < log->tensor_count; i++) count += log->tensors[i].count;
  if (count == 0) return;
  const fp8lm_log_statistics **all = malloc(count * sizeof(*all));
  if (!all) {
    p->failed = 1;
    return;
  }
  size_t filled = 0;
  for (size_t i = 0; i < log->tensor_count; i++) {
    for (size_t j = 0; j < log->tensors[i].count; j++) all[filled++] = &log->tensors[i].statistics[j];
  }
  qsort(all, count, sizeof(*all), compare_statistics);
  size_t steps = 0;
  for (size_t i = 0; i < count; i++) steps += i == 0 || all[i]->step != all[i - 1]->step;
  data->health_steps = numbers(p, steps);
  for (int which = 0; which < HEALTH; which++) data->health[which] = numbers(p, steps);
  size_t kept = 0;
  for (size_t i = 0; i < count && !p->failed; i++) {
    if (i == 0 || all[i]->step != all[i - 1]->step) {
      data->health_steps[kept++] = (double)all[i]->step;
      for (int which = 0; which < HEALTH; which++) data->health[which][kept - 1] = NAN;
    }
    for (int which = 0; which < HEALTH; which++) {
      double *worst = &data->health[which][kept - 1];
      *worst = larger(*worst, health_of(all[i], which));
    }
  }
  data->health_count = kept;
  free(all);
}

static void find_figures(page *p, const fp8lm_run_log *log, run_data *data) {
  data->steps = numbers(p, log->step_count);
  data->smoothed = numbers(p, log->step_count);
  for (int c = 0; c < FP8LM_LOG_COLUMNS; c++) data->columns[c] = numbers(p, log->step_count);
  data->evaluation_steps = numbers(p, log->evaluation_count);
  data->evaluations = numbers(p, log->evaluation_count);
  if (p->failed) return;
  for (size_t i = 0; i < log->step_count; i++) {
    data->steps[i] = (double)log->steps[i].step;
    for (int c = 0; c < FP8LM_LOG_COLUMNS; c++) data->columns[c][i] = log->steps[i].values[c];
  }
  data->best_validation = NAN;
  for (size_t i = 0; i < log->evaluation_count; i++) {
    data->evaluation_steps[i] = (double)log->evaluations[i].step;
    data->evaluations[i] = log->evaluations[i].loss;
    if (isnan(data->best_validation) || data->evaluations[i] < data->best_validation) {
      data->best_validation = data->evaluations[i];
      data->best_step = log->evaluations[i].step;
    }
  }
  const double *loss = data->columns[FP8LM_LOG_LOSS];
  if (p->smoothing > 0.0) {
    double *weights = numbers(p, log->step_count);
    if (!weights) return;
    smooth(data->steps, loss, log->step_count, p->smoothing, data->smoothed, weights);
  } else {
    memcpy(data->smoothed, loss, log->step_count * sizeof(double));
  }
  data->final_training = last_value(data->smoothed, log->step_count);
  data->final_validation = last_value(data->evaluations, log->evaluation_count);
  data->median_rate = median(p, data->columns[FP8LM_LOG_TOKENS_PER_SECOND], log->step_count);
  data->median_mfu = median(p, data->columns[FP8LM_LOG_MFU], log->step_count);
  data->bytes = NAN;
  for (int c = 0; c < FP8LM_LOG_MEMORY_CLASSES; c++) {
    if (!isnan(log->memory[c])) data->bytes = (isnan(data->bytes) ? 0.0 : data->bytes) + log->memory[c];
  }
  find_warnings(log, data);
  find_health(p, log, data);
}

static void find_steps(page *p) {
  double first = HUGE_VAL;
  double last = -HUGE_VAL;
  size_t most = 0;
  for (size_t r = 0; r < p->count; r++) {
    const fp8lm_run_log *log = p->runs[r].log;
    if (log->step_count) {
      first = fmin(first, (double)log->steps[0].step);
      last = fmax(last, (double)log->steps[log->step_count - 1].step);
    }
    if (log->evaluation_count) {
      first = fmin(first, (double)log->evaluations[0].step);
      last = fmax(last, (double)log->evaluations[log->evaluation_count - 1].step);
    }
    for (size_t i = 0; i < log->tensor_count; i++) {
      const fp8lm_log_tensor *tensor = &log->tensors[i];
      if (tensor->count == 0) continue;
      first = fmin(first, (double)tensor->statistics[0].step);
      last = fmax(last, (double)tensor->statistics[tensor->count - 1].step);
    }
    if (log->step_count > most) most = log->step_count;
  }
  p->first_step = first;
  p->last_step = last;
  // Of few steps, each is worth seeing.
  p->smoothing = p->options->smoothing >= 0 ? (double)p->options->smoothing
                 : most < 100               ? 0.0
                                            : floor((last - first) / 100.0);
}

// Small pieces --------------------------------------------------------------------------------------------------------

static void put_run_name(page *p, size_t run) {
  print(
    p,
    "<span class=\"name\" data-run=\"%zu\"><svg class=\"swatch c%zu d%zu\" viewBox=\"0 0 26 10\" aria-hidden=\"true\">",
    run, run % FP8LM_RUN_COLOURS, fp8lm_run_dash(run));
  put(p, "<path class=\"line\" d=\"M1 5H25\"/></svg>");
  put_text(p, p->runs[run].name);
  put(p, "</span>");
}

static void put_number_cell(page *p, const char *format, double value) {
  put(p, "<td>");
  if (isnan(value)) {
    put(p, "–");
  } else {
    char text[400];
    (void)snprintf(text, sizeof(text), format, value);
    put_text(p, text);
  }
  put(p, "</td>");
}

static void put_bytes_cell(page *p, double bytes) {
  put(p, "<td>");
  if (isnan(bytes)) {
    put(p, "–");
  } else {
    fp8lm_html_bytes(p->stream, bytes);
  }
  put(p, "</td>");
}

static void put_count_cell(page *p, double value) {
  put(p, "<td>");
  if (isnan(value)) {
    put(p, "–");
  } else {
    fp8lm_html_count(p->stream, value);
  }
  put(p, "</td>");
}

static void put_step_text(page *p, int64_t step) { fp8lm_html_count(p->stream, (double)step); }

static int any(const page *p, int (*has)(const page *p, size_t run)) {
  for (size_t r = 0; r < p->count; r++) {
    if (has(p, r)) return 1;
  }
  return 0;
}

static size_t column_values(const page *p, size_t run, int column) {
  size_t count = 0;
  for (size_t i = 0; i < p->runs[run].log->step_count; i++)
    count += (size_t)!isnan(p->runs[run].log->steps[i].values[column]);
  return count;
}

// Runs and their figures ----------------------------------------------------------------------------------------------

static int has_training(const page *p, size_t run) { return !isnan(p->data[run].final_training); }
static int has_validation(const page *p, size_t run) { return !isnan(p->data[run].final_validation); }
static int has_rate(const page *p, size_t run) { return !isnan(p->data[run].median_rate); }
static int has_mfu(const page *p, size_t run) { return !isnan(p->data[run].median_mfu); }
static int has_memory(const page *p, size_t run) { return !isnan(p->data[run].bytes); }
static int has_peak(const page *p, size_t run) { return has_memory(p, run) && !isnan(p->runs[run].log->peak_resident); }
static int has_parameters(const page *p, size_t run) { return p->runs[run].log->parameters > 0.0; }
static int has_health(const page *p, size_t run) { return p->data[run].health_count > 0; }
static int has_settings(const page *p, size_t run) { return p->runs[run].log->setting_count > 0; }
static int has_precision(const page *p, size_t run) {
  return fp8lm_run_log_setting(p->runs[run].log, "precision") != NULL;
}

// Losses of a run and of the first at the last step that both have.
static int last_common(const double *first_steps, const double *first, size_t first_count, const double *steps,
                       const double *values, size_t count, double *of_first, double *of_run, double *step) {
  while (first_count && count) {
    const double a = first_steps[first_count - 1];
    const double b = steps[count - 1];
    if (a > b || isnan(first[first_count - 1])) {
      first_count--;
    } else if (b > a || isnan(values[count - 1])) {
      count--;
    } else {
      *of_first = first[first_count - 1];
      *of_run = values[count - 1];
      *step = a;
      return 1;
    }
  }
  return 0;
}

// The last loss of a run and, below it, how far it is from the first run's.
static void put_loss_cell(page *p, size_t run, double loss, const double *first_steps, const double *first,
                          size_t first_count, const double *steps, const double *values, size_t count) {
  double of_first;
  double of_run;
  double step;
  if (isnan(loss)) {
    put(p, "<td>–</td>");
    return;
  }
  print(p, "<td>%.4f", loss);
  if (run == 0) {
    if (p->count > 1) put(p, "<br><small>reference</small>");
  } else if (!last_common(first_steps, first, first_count, steps, values, count, &of_first, &of_run, &step)) {
    put(p, "<br><small>no step in common</small>");
  } else {
    print(p, "<br><small>%+.4f", of_run - of_first);
    if (of_first != 0.0) print(p, ", %+.2f&#8239;%%", 100.0 * (of_run - of_first) / fabs(of_first));
    if (step < steps[count - 1] || step < first_steps[first_count - 1]) {
      put(p, "<br>at step ");
      put_step_text(p, (int64_t)step);
    }
    put(p, "</small>");
  }
  put(p, "</td>");
}

static size_t warnings_of(const page *p, size_t run) {
  const fp8lm_run_log *log = p->runs[run].log;
  const run_data *data = &p->data[run];
  return data->skipped.steps + data->nonfinite.steps + data->spikes.count + data->spikes.further +
         (size_t)log->broken_lines + (size_t)log->cut_off;
}

static void put_runs(page *p) {
  const int training = any(p, has_training);
  const int validation = any(p, has_validation);
  put(p, "<section id=\"runs\"><h2>Runs</h2>\n<div class=\"scroll\"><table class=\"figures\"><thead><tr><th "
         "scope=\"col\">Run</th>");
  if (any(p, has_precision)) put(p, "<th scope=\"col\">Precision</th>");
  if (any(p, has_parameters)) put(p, "<th scope=\"col\">Parameters</th>");
  put(p, "<th scope=\"col\">Last step</th>");
  if (training) put(p, "<th scope=\"col\">Training loss</th>");
  if (validation) put(p, "<th scope=\"col\">Validation loss</th>");
  if (validation) put(p, "<th scope=\"col\">Best validation</th>");
  if (any(p, has_rate)) put(p, "<th scope=\"col\">Tokens/s, median</th>");
  if (any(p, has_mfu)) put(p, "<th scope=\"col\">MFU, median</th>");
  if (any(p, has_memory)) put(p, "<th scope=\"col\">Memory</th>");
  put(p, "<th scope=\"col\">Warnings</th></tr></thead>\n<tbody>\n");
  for (size_t r = 0; r < p->count; r++) {
    const fp8lm_run_log *log = p->runs[r].log;
    const fp8lm_run_log *first = p->runs[0].log;
    const run_data *data = &p->data[r];
    const double last = fmax(log->step_count ? data->steps[log->step_count - 1] : 0.0,
                             log->evaluation_count ? data->evaluation_steps[log->evaluation_count - 1] : 0.0);
    put(p, "<tr><th scope=\"row\">");
    put_run_name(p, r);
    put(p, "</th>");
    if (any(p, has_precision)) {
      const char *precision = fp8lm_run_log_setting(log, "precision");
      put(p, "<td>");
      put_text(p, precision ? precision : "–");
      put(p, "</td>");
    }
    if (any(p, has_parameters)) put_count_cell(p, log->parameters);
    put_count_cell(p, last);
    if (training) {
      put_loss_cell(p, r, data->final_training, p->data[0].steps, p->data[0].smoothed, first->step_count, data->steps,
                    data->smoothed, log->step_count);
    }
    if (validation) {
      put_loss_cell(p, r, data->final_validation, p->data[0].evaluation_steps, p->data[0].evaluations,
                    first->evaluation_count, data->evaluation_steps, data->evaluations, log->evaluation_count);
    }
    if (validation) {
      if (isnan(data->best_validation)) {
        put(p, "<td>–</td>");
      } else {
        print(p, "<td>%.4f<br><small>at step ", data->best_validation);
        put_step_text(p, data->best_step);
        put(p, "</small></td>");
      }
    }
    if (any(p, has_rate)) put_number_cell(p, data->median_rate < 1000.0 ? "%.1f" : "%.0f", data->median_rate);
    if (any(p, has_mfu)) put_number_cell(p, "%.1f %%", 100.0 * data->median_mfu);
    if (any(p, has_memory)) put_bytes_cell(p, data->bytes);
    const size_t warnings = warnings_of(p, r);
    if (warnings) {
      print(p, "<td class=\"alert\"><a href=\"#warnings-%zu\">%zu</a></td>", r, warnings);
    } else {
      put(p, "<td>none</td>");
    }
    put(p, "</tr>\n");
  }
  put(p, "</tbody></table></div>\n");
  if (training) {
    if (p->smoothing > 0.0) {
      print(p,
            "<p class=\"note\">Training losses are smoothed: means of all steps, each counted by exp(−distance/%.0f "
            "step%s).</p>\n",
            p->smoothing, p->smoothing == 1.0 ? "" : "s");
    } else {
      put(p, "<p class=\"note\">Training losses are those of the last step, not smoothed.</p>\n");
    }
  }
  put(p, "</section>\n");
}

// Charts --------------------------------------------------------------------------------------------------------------

static void begin_chart(page *p) { p->series_count = 0; }

static void add_series(page *p, size_t run, fp8lm_series_style style, const char *kind, const double *steps,
                       const double *values, size_t count) {
  p->series[p->series_count++] =
    (fp8lm_series){.run = run, .style = style, .kind = kind, .steps = steps, .values = values, .count = count};
}

static void end_chart(page *p, fp8lm_chart chart) {
  chart.first_step = p->first_step;
  chart.last_step = p->last_step;
  chart.series = p->series;
  chart.count = p->series_count;
  if (fp8lm_html_chart(p->stream, &chart) != 0) p->failed = 1;
}

// A column of the steps; where it is noisy, smoothed as the loss is.
static void put_column_chart(page *p, int column, int noisy, fp8lm_chart chart) {
  begin_chart(p);
  noisy = noisy && p->smoothing > 0.0;
  for (size_t r = 0; r < p->count; r++) {
    add_series(p, r, noisy ? FP8LM_SERIES_RAW : FP8LM_SERIES_LINE, "value", p->data[r].steps,
               p->data[r].columns[column], p->runs[r].log->step_count);
  }
  for (size_t r = 0; r < p->count && noisy; r++) {
    const run_data *data = &p->data[r];
    const size_t count = p->runs[r].log->step_count;
    double *smoothed = numbers(p, count);
    double *weights = numbers(p, count);
    if (p->failed) return;
    smooth(data->steps, data->columns[column], count, p->smoothing, smoothed, weights);
    add_series(p, r, FP8LM_SERIES_LINE, "smoothed", data->steps, smoothed, count);
  }
  end_chart(p, chart);
}

static void put_loss_chart(page *p) {
  begin_chart(p);
  for (size_t r = 0; r < p->count; r++) {
    const run_data *data = &p->data[r];
    const size_t count = p->runs[r].log->step_count;
    if (p->smoothing > 0.0)
      add_series(p, r, FP8LM_SERIES_RAW, "training", data->steps, data->columns[FP8LM_LOG_LOSS], count);
  }
  for (size_t r = 0; r < p->count; r++) {
    const run_data *data = &p->data[r];
    add_series(p, r, FP8LM_SERIES_LINE, p->smoothing > 0.0 ? "smoothed" : "training", data->steps, data->smoothed,
               p->runs[r].log->step_count);
  }
  for (size_t r = 0; r < p->count; r++) {
    const run_data *data = &p->data[r];
    add_series(p, r, FP8LM_SERIES_MARKS, "validation", data->evaluation_steps, data->evaluations,
               p->runs[r].log->evaluation_count);
  }
  end_chart(p,
            (fp8lm_chart){.title = "Loss",
                          .note = p->smoothing > 0.0 ? "pale: each step; lines: smoothed; marks: validation; over steps"
                                                     : "lines: training; marks: validation; over steps",
                          .wide = 1,
                          .may_be_logarithmic = 1});
}

// Values of a run less those of the first at the same steps.
static size_t subtract(const double *first_steps, const double *first, size_t first_count, const double *steps,
                       const double *values, size_t count, double *common, double *differences) {
  size_t kept = 0;
  size_t j = 0;
  for (size_t i = 0; i < count; i++) {
    while (j < first_count && first_steps[j] < steps[i]) j++;
    if (j == first_count || first_steps[j] != steps[i]) continue;
    common[kept] = steps[i];
    differences[kept++] = values[i] - first[j];
  }
  return kept;
}

static void put_difference_chart(page *p) {
  begin_chart(p);
  const run_data *first = &p->data[0];
  for (size_t r = 1; r < p->count; r++) {
    const run_data *data = &p->data[r];
    const size_t count = p->runs[r].log->step_count;
    double *steps = numbers(p, count);
    double *differences = numbers(p, count);
    if (p->failed) return;
    const size_t kept = subtract(first->steps, first->smoothed, p->runs[0].log->step_count, data->steps, data->smoothed,
                                 count, steps, differences);
    add_series(p, r, FP8LM_SERIES_LINE, p->smoothing > 0.0 ? "smoothed" : "training", steps, differences, kept);
  }
  for (size_t r = 1; r < p->count; r++) {
    const run_data *data = &p->data[r];
    const size_t count = p->runs[r].log->evaluation_count;
    double *steps = numbers(p, count);
    double *differences = numbers(p, count);
    if (p->failed) return;
    const size_t kept = subtract(first->evaluation_steps, first->evaluations, p->runs[0].log->evaluation_count,
                                 data->evaluation_steps, data->evaluations, count, steps, differences);
    add_series(p, r, FP8LM_SERIES_MARKS, "validation", steps, differences, kept);
  }
  end_chart(p, (fp8lm_chart){.title = "Loss less the first run’s", .note = "lines: training; marks: validation"});
}

static void put_validation_chart(page *p) {
  begin_chart(p);
  for (size_t r = 0; r < p->count; r++) {
    add_series(p, r, FP8LM_SERIES_MARKS, "validation", p->data[r].evaluation_steps, p->data[r].evaluations,
               p->runs[r].log->evaluation_count);
  }
  end_chart(p, (fp8lm_chart){.title = "Validation loss", .may_be_logarithmic = 1});
}

static void put_health_chart(page *p, int which) {
  static const fp8lm_chart charts[HEALTH] = {
    [SATURATED] = {.title = "Saturation",
                   .note = "share of elements at the format’s maximum, worst tensor",
                   .percent = 1,
                   .from_zero = 1},
    [ZEROS] = {.title = "Underflow",
               .note = "share of elements that are zero in FP8, worst tensor",
               .percent = 1,
               .from_zero = 1},
    [FILL] = {.title = "Fill",
              .note = "amax × scale over the format’s maximum, fullest tensor; above 1 it saturates",
              .may_be_logarithmic = 1,
              .from_zero = 1},
  };
  begin_chart(p);
  for (size_t r = 0; r < p->count; r++) {
    add_series(p, r, FP8LM_SERIES_LINE, "worst", p->data[r].health_steps, p->data[r].health[which],
               p->data[r].health_count);
  }
  end_chart(p, charts[which]);
}

static void put_losses(page *p) {
  if (!any(p, has_training) && !any(p, has_validation)) return;
  put(p, "<section id=\"loss\"><h2>Loss</h2>\n<div class=\"charts\">\n");
  put_loss_chart(p);
  if (any(p, has_training)) put_validation_chart(p);
  if (p->count > 1) put_difference_chart(p);
  put(p, "</div></section>\n");
}

static void put_optimisation(page *p) {
  size_t values = 0;
  for (size_t r = 0; r < p->count; r++) {
    values += column_values(p, r, FP8LM_LOG_LEARNING_RATE) + column_values(p, r, FP8LM_LOG_GRADIENT_NORM);
  }
  if (values == 0) return;
  put(p, "<section id=\"optimisation\"><h2>Learning rate and gradients</h2>\n<div class=\"charts\">\n");
  put_column_chart(p, FP8LM_LOG_LEARNING_RATE, 0, (fp8lm_chart){.title = "Learning rate", .from_zero = 1});
  put_column_chart(p, FP8LM_LOG_GRADIENT_NORM, 1,
                   (fp8lm_chart){.title = "Gradient norm", .may_be_logarithmic = 1, .from_zero = 1});
  put(p, "</div></section>\n");
}

static void put_throughput(page *p) {
  if (!any(p, has_rate) && !any(p, has_mfu)) return;
  put(p, "<section id=\"throughput\"><h2>Throughput</h2>\n<div class=\"charts\">\n");
  put_column_chart(p, FP8LM_LOG_TOKENS_PER_SECOND, 1, (fp8lm_chart){.title = "Tokens per second", .from_zero = 1});
  put_column_chart(
    p, FP8LM_LOG_MFU, 1,
    (fp8lm_chart){.title = "MFU", .note = "share of the machine’s measured peak", .from_zero = 1, .percent = 1});
  put(p, "</div></section>\n");
}

// Memory --------------------------------------------------------------------------------------------------------------

static const char *const class_names[FP8LM_LOG_MEMORY_CLASSES] = {
  [FP8LM_LOG_WEIGHTS] = "Weights", [FP8LM_LOG_GRADIENTS] = "Gradients",     [FP8LM_LOG_MASTER] = "Master",
  [FP8LM_LOG_MOMENTS] = "Moments", [FP8LM_LOG_ACTIVATIONS] = "Activations", [FP8LM_LOG_WORKSPACE] = "Workspace",
};

// Weights, gradients and what the optimizer keeps: what grows with the parameters alone.
static double states_of(const fp8lm_run_log *log) {
  double sum = NAN;
  for (int c = FP8LM_LOG_WEIGHTS; c <= FP8LM_LOG_MOMENTS; c++) {
    if (!isnan(log->memory[c])) sum = (isnan(sum) ? 0.0 : sum) + log->memory[c];
  }
  return sum;
}

static void put_memory_bar(page *p, size_t run, double largest) {
  const fp8lm_run_log *log = p->runs[run].log;
  print(p, "<div class=\"bar run\" data-run=\"%zu\"><div class=\"label\">", run);
  put_run_name(p, run);
  put(p, "<span>");
  if (has_parameters(p, run) && !isnan(states_of(log)))
    print(p, "<small>model states %.2f B/param</small> ", states_of(log) / log->parameters);
  put(p, "<b>");
  fp8lm_html_bytes(p->stream, p->data[run].bytes);
  put(p,
      "</b></span></div><svg viewBox=\"0 0 1000 30\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Memory by "
      "class\">");
  double x = 0.0;
  for (int c = 0; c < FP8LM_LOG_MEMORY_CLASSES; c++) {
    if (!(log->memory[c] > 0.0) || !(largest > 0.0)) continue;
    const double width = 1000.0 * (log->memory[c] / largest);
    print(p, "<rect class=\"m%d\" x=\"%.2f\" y=\"0\" width=\"%.2f\" height=\"30\"><title>%s: ", c, x, width,
          class_names[c]);
    fp8lm_html_bytes(p->stream, log->memory[c]);
    put(p, "</title></rect>");
    x += width;
  }
  put(p, "</svg></div>\n");
}

static void put_memory_cell(page *p, size_t run, double bytes) {
  put(p, "<td>");
  if (isnan(bytes)) {
    put(p, "–");
  } else {
    fp8lm_html_bytes(p->stream, bytes);
    if (has_parameters(p, run)) print(p, "<br><small>%.2f B/param</small>", bytes / p->runs[run].log->parameters);
  }
  put(p, "</td>");
}

static void put_memory(page *p) {
  if (!any(p, has_memory)) return;
  double largest = 0.0;
  for (size_t r = 0; r < p->count; r++) {
    double positive = 0.0;
    for (int c = 0; c < FP8LM_LOG_MEMORY_CLASSES; c++) positive += fmax(p->runs[r].log->memory[c], 0.0);
    largest = fmax(largest, positive);
  }
  put(p, "<section id=\"memory\"><h2>Memory</h2>\n<div class=\"bars\">\n");
  for (size_t r = 0; r < p->count; r++) {
    if (has_memory(p, r)) put_memory_bar(p, r, largest);
  }
  put(p, "</div>\n<div class=\"scroll\"><table class=\"figures\"><thead><tr><th scope=\"col\">Run</th>");
  for (int c = 0; c < FP8LM_LOG_MEMORY_CLASSES; c++) {
    print(p,
          "<th scope=\"col\"><span class=\"class\"><svg class=\"swatch\" viewBox=\"0 0 12 12\" "
          "aria-hidden=\"true\"><rect class=\"m%d\" "
          "width=\"12\" height=\"12\"/></svg>%s</span></th>",
          c, class_names[c]);
  }
  put(p, "<th scope=\"col\">Model states</th><th scope=\"col\">Together</th>");
  if (any(p, has_peak)) put(p, "<th scope=\"col\">Peak of process</th>");
  put(p, "</tr></thead>\n<tbody>\n");
  for (size_t r = 0; r < p->count; r++) {
    const fp8lm_run_log *log = p->runs[r].log;
    if (!has_memory(p, r)) continue;
    put(p, "<tr><th scope=\"row\">");
    put_run_name(p, r);
    put(p, "</th>");
    for (int c = 0; c < FP8LM_LOG_MEMORY_CLASSES; c++) put_memory_cell(p, r, log->memory[c]);
    put_memory_cell(p, r, states_of(log));
    put_memory_cell(p, r, p->data[r].bytes);
    if (any(p, has_peak)) put_bytes_cell(p, log->peak_resident);
    put(p, "</tr>\n");
  }
  put(p, "</tbody></table></div>\n<p class=\"note\">Model states: weights, gradients, master weights and moments.</p>\n"
         "</section>\n");
}

// FP8 -----------------------------------------------------------------------------------------------------------------

typedef struct ranked {
  const fp8lm_log_tensor *tensor;
  size_t index;
  // Its saturation was counted, not only judged by its amax.
  int counted;
  double worst[HEALTH];
} ranked;

// Those that are counted, then the others; of each the worst first, equals in the order of the log.
static int compare_ranked(const void *a, const void *b) {
  const ranked *x = a;
  const ranked *y = b;
  static const int order[] = {SATURATED, FILL, ZEROS};
  if (x->counted != y->counted) return y->counted - x->counted;
  for (int i = 0; i < HEALTH; i++) {
    if (x->worst[order[i]] != y->worst[order[i]]) return x->worst[order[i]] < y->worst[order[i]] ? 1 : -1;
  }
  return (x->index > y->index) - (x->index < y->index);
}

// Columns of the table of tensors: the shares, and two more.
enum { SCALE = HEALTH, AMAX, STATISTICS };

static const struct {
  const char *title;
  const char *label;
} statistics[STATISTICS] = {
  [SATURATED] = {"Saturated, most", "saturated share"},
  [ZEROS] = {"Zero, most", "share of zeros"},
  [FILL] = {"Fill, most", "fill"},
  [SCALE] = {"Scale, last", "scale"},
  [AMAX] = {"amax, last", "amax"},
};

static double statistic(const fp8lm_log_statistics *s, int which) {
  return which == SCALE ? (double)s->scale : which == AMAX ? (double)s->amax : health_of(s, which);
}

static int has_statistic(const ranked *tensors, size_t count, int which) {
  for (size_t i = 0; i < count; i++) {
    for (size_t j = 0; j < tensors[i].tensor->count; j++) {
      if (!isnan(statistic(&tensors[i].tensor->statistics[j], which))) return 1;
    }
  }
  return 0;
}

static void put_statistic(page *p, const fp8lm_log_tensor *tensor, int which, const double *steps, double *values) {
  double most = NAN;
  for (size_t i = 0; i < tensor->count; i++) {
    values[i] = statistic(&tensor->statistics[i], which);
    most = larger(most, values[i]);
  }
  const double last = last_value(values, tensor->count);
  if (isnan(last)) {
    put(p, "<td>–</td><td></td>");
    return;
  }
  if (which == SATURATED || which == ZEROS) {
    print(p, "<td>%.3g&#8239;%%</td><td class=\"trace\">", 100.0 * most);
  } else if (which == FILL) {
    print(p, "<td>%.3f</td><td class=\"trace\">", most);
  } else {
    // Scales are often whole powers of two.
    print(p, fabs(last) >= 1e3 && fabs(last) < 1e7 ? "<td>%.0f</td>" : "<td>%.4g</td>", last);
    put(p, "<td class=\"trace\">");
  }
  if (fp8lm_html_sparkline(p->stream, steps, values, tensor->count, which >= SCALE, statistics[which].label) != 0)
    p->failed = 1;
  put(p, "</td>");
}

static void put_tensors(page *p, const ranked *tensors, size_t count, const int *shown) {
  put(p, "<div class=\"scroll\"><table class=\"tensors\"><thead><tr><th scope=\"col\">Tensor</th>");
  for (int which = 0; which < STATISTICS; which++) {
    if (shown[which]) print(p, "<th scope=\"col\" colspan=\"2\">%s</th>", statistics[which].title);
  }
  put(p, "</tr></thead>\n<tbody>\n");
  for (size_t i = 0; i < count && !p->failed; i++) {
    const fp8lm_log_tensor *tensor = tensors[i].tensor;
    double *steps = malloc((2 * tensor->count + 1) * sizeof(double));
    if (!steps) {
      p->failed = 1;
      break;
    }
    for (size_t j = 0; j < tensor->count; j++) steps[j] = (double)tensor->statistics[j].step;
    put(p, "<tr><th scope=\"row\">");
    put_text(p, tensor->name);
    put(p, "</th>");
    for (int which = 0; which < STATISTICS; which++) {
      if (shown[which]) put_statistic(p, tensor, which, steps, steps + tensor->count);
    }
    put(p, "</tr>\n");
    free(steps);
  }
  put(p, "</tbody></table></div>\n");
}

static ranked rank(const fp8lm_log_tensor *tensor, size_t index) {
  ranked entry = {.tensor = tensor, .index = index};
  for (size_t i = 0; i < tensor->count; i++) {
    const fp8lm_log_statistics *s = &tensor->statistics[i];
    entry.counted |= !isnan((double)s->saturated);
    for (int which = 0; which < HEALTH; which++) entry.worst[which] = larger(entry.worst[which], health_of(s, which));
  }
  return entry;
}

// One table, folded beyond its first rows.
static void put_tensor_group(page *p, const ranked *tensors, size_t count) {
  int columns[STATISTICS];
  for (int which = 0; which < STATISTICS; which++) columns[which] = has_statistic(tensors, count, which);
  // One more row takes less room than the fold.
  const size_t open = count > OPEN_TENSORS + 1 ? OPEN_TENSORS : count;
  if (open) put_tensors(p, tensors, open, columns);
  if (open == count) return;
  print(p, "<details><summary>%zu more tensors</summary>\n", count - open);
  put_tensors(p, tensors + open, count - open, columns);
  put(p, "</details>\n");
}

static void put_run_tensors(page *p, size_t run) {
  const fp8lm_run_log *log = p->runs[run].log;
  ranked *tensors = malloc((log->tensor_count + 1) * sizeof(*tensors));
  if (!tensors) {
    p->failed = 1;
    return;
  }
  size_t count = 0;
  for (size_t i = 0; i < log->tensor_count; i++) {
    if (log->tensors[i].count) tensors[count++] = rank(&log->tensors[i], i);
  }
  qsort(tensors, count, sizeof(*tensors), compare_ranked);
  const size_t shown = count < p->options->most_tensors ? count : p->options->most_tensors;
  size_t counted = 0;
  while (counted < shown && tensors[counted].counted) counted++;
  print(p, "<div class=\"run\" data-run=\"%zu\"><h3>", run);
  put_run_name(p, run);
  print(p, " <small>%zu tensor%s%s</small></h3>\n", count, count == 1 ? "" : "s", count > 1 ? ", the worst first" : "");
  put_tensor_group(p, tensors, counted);
  put_tensor_group(p, tensors + counted, shown - counted);
  if (count > shown) print(p, "<p class=\"note\">%zu of %zu are not shown.</p>\n", count - shown, count);
  put(p, "</div>\n");
  free(tensors);
}

static int has_fill(const page *p, size_t run) {
  for (size_t i = 0; i < p->data[run].health_count; i++) {
    if (!isnan(p->data[run].health[FILL][i])) return 1;
  }
  return 0;
}

static void put_health(page *p) {
  if (!any(p, has_health)) return;
  put(p, "<section id=\"fp8\"><h2>FP8</h2>\n<div class=\"charts\">\n");
  for (int which = 0; which < HEALTH; which++) put_health_chart(p, which);
  put(p, "</div>\n");
  if (any(p, has_fill)) {
    put(
      p,
      "<p class=\"note\">Fill is the largest magnitude of a step times the scale, over the format’s maximum: with "
      "delayed scaling the scale comes from the steps before, so a step whose values have grown fills more than 1, and "
      "what lies beyond the maximum was stored as the maximum (saturated), until the scale of later steps "
      "follows.</p>\n");
  }
  for (size_t r = 0; r < p->count && !p->failed; r++) {
    if (has_health(p, r)) put_run_tensors(p, r);
  }
  put(p, "</section>\n");
}

// Warnings and events -------------------------------------------------------------------------------------------------

static void put_spans(page *p, const spans *s, const char *what, int spike) {
  if (s->steps == 0) return;
  print(p, "<li><b>%s</b>: ", what);
  for (size_t i = 0; i < s->count; i++) {
    const span *item = &s->items[i];
    put(p, i ? (spike ? "; step " : ", ") : item->first == item->last ? "step " : spike ? "step " : "steps ");
    put_step_text(p, item->first);
    if (item->last != item->first) {
      put(p, " to ");
      put_step_text(p, item->last);
    }
    if (spike) print(p, " (%.4g after a mean of %.4g)", item->peak, item->mean);
  }
  if (s->further) print(p, ", and %zu more", s->further);
  put(p, "</li>\n");
}

static void put_events(page *p, const fp8lm_run_log *log) {
  if (log->event_count == 0) return;
  const uint64_t count = log->event_count + log->further_events;
  print(p,
        "<details><summary>%" PRIu64
        " event%s</summary>\n<div class=\"scroll\"><table class=\"events\"><thead><tr><th scope=\"col\">Step</th>"
        "<th scope=\"col\">Event</th><th scope=\"col\">Message</th></tr></thead>\n<tbody>\n",
        count, count == 1 ? "" : "s");
  const size_t shown = log->event_count < MOST_EVENTS ? log->event_count : MOST_EVENTS;
  for (size_t i = 0; i < shown; i++) {
    const fp8lm_log_event *event = &log->events[i];
    put(p, "<tr>");
    put_count_cell(p, event->step < 0 ? NAN : (double)event->step);
    put(p, "<td>");
    put_text(p, event->kind);
    put(p, "</td><td>");
    put_text(p, event->message);
    put(p, "</td></tr>\n");
  }
  put(p, "</tbody></table></div>\n");
  if (count > shown) print(p, "<p class=\"note\">and %" PRIu64 " more</p>\n", count - shown);
  put(p, "</details>\n");
}

static void put_warnings(page *p) {
  put(p, "<section id=\"warnings\"><h2>Warnings and events</h2>\n");
  int written = 0;
  for (size_t r = 0; r < p->count; r++) {
    const fp8lm_run_log *log = p->runs[r].log;
    const run_data *data = &p->data[r];
    if (warnings_of(p, r) == 0 && log->event_count == 0) continue;
    written = 1;
    print(p, "<div class=\"run\" data-run=\"%zu\" id=\"warnings-%zu\"><h3>", r, r);
    put_run_name(p, r);
    put(p, "</h3>\n");
    if (warnings_of(p, r)) {
      put(p, "<ul>\n");
      put_spans(p, &data->skipped, "Skipped", 0);
      put_spans(p, &data->nonfinite, "Loss not finite", 0);
      put_spans(p, &data->spikes, "Spike of the loss", 1);
      if (log->broken_lines) {
        print(p, "<li><b>%" PRIu64 " line%s of the log could not be read</b>:<ul>\n", log->broken_lines,
              log->broken_lines == 1 ? "" : "s");
        for (size_t i = 0; i < log->problem_count; i++) {
          print(p, "<li>line %" PRIu64 ": ", log->problems[i].line);
          put_text(p, log->problems[i].message);
          put(p, "</li>\n");
        }
        if (log->broken_lines > log->problem_count)
          print(p, "<li>and %" PRIu64 " more</li>\n", log->broken_lines - log->problem_count);
        put(p, "</ul></li>\n");
      }
      if (log->cut_off) put(p, "<li><b>The last line is cut off</b>: the run was still writing, or died</li>\n");
      put(p, "</ul>\n");
    }
    put_events(p, log);
    put(p, "</div>\n");
  }
  if (!written) put(p, "<p class=\"note\">None: no step was skipped, every loss is finite, none stands out.</p>\n");
  put(p, "</section>\n");
}

// Settings ------------------------------------------------------------------------------------------------------------

static int differs(const page *p, const char *key) {
  const char *first = fp8lm_run_log_setting(p->runs[0].log, key);
  for (size_t r = 1; r < p->count; r++) {
    const char *value = fp8lm_run_log_setting(p->runs[r].log, key);
    if (!value != !first || (value && strcmp(value, first) != 0)) return 1;
  }
  return 0;
}

static int in_earlier_run(const page *p, size_t run, const char *key) {
  for (size_t r = 0; r < run; r++) {
    if (fp8lm_run_log_setting(p->runs[r].log, key)) return 1;
  }
  return 0;
}

static size_t count_settings(const page *p, int different) {
  size_t count = 0;
  for (size_t r = 0; r < p->count; r++) {
    for (size_t i = 0; i < p->runs[r].log->setting_count; i++) {
      const char *key = p->runs[r].log->settings[i].key;
      count += (size_t)(!in_earlier_run(p, r, key) && differs(p, key) == different);
    }
  }
  return count;
}

static void put_settings_table(page *p, int different) {
  const size_t columns = different ? p->count : 1;
  put(p, "<div class=\"scroll\"><table class=\"settings\"><thead><tr><th scope=\"col\">Setting</th>");
  for (size_t r = 0; r < columns; r++) {
    put(p, "<th scope=\"col\">");
    if (different || p->count == 1) {
      put_run_name(p, r);
    } else {
      put(p, "All runs");
    }
    put(p, "</th>");
  }
  put(p, "</tr></thead>\n<tbody>\n");
  for (size_t r = 0; r < p->count; r++) {
    for (size_t i = 0; i < p->runs[r].log->setting_count; i++) {
      const char *key = p->runs[r].log->settings[i].key;
      if (in_earlier_run(p, r, key) || differs(p, key) != different) continue;
      put(p, "<tr><th scope=\"row\">");
      put_text(p, key);
      put(p, "</th>");
      for (size_t c = 0; c < columns; c++) {
        const char *value = fp8lm_run_log_setting(p->runs[c].log, key);
        put(p, "<td>");
        put_text(p, value ? value : "–");
        put(p, "</td>");
      }
      put(p, "</tr>\n");
    }
  }
  put(p, "</tbody></table></div>\n");
}

static void put_settings(page *p) {
  put(p, "<section id=\"configuration\"><h2>Configuration</h2>\n");
  if (any(p, has_settings)) {
    const size_t different = count_settings(p, 1);
    const size_t same = count_settings(p, 0);
    if (different) put_settings_table(p, 1);
    if (different && same) {
      print(p, "<details><summary>%zu setting%s the same in all runs</summary>\n", same, same == 1 ? "" : "s");
      put_settings_table(p, 0);
      put(p, "</details>\n");
    } else if (same) {
      if (p->count > 1) put(p, "<p class=\"note\">The same in all runs.</p>\n");
      put_settings_table(p, 0);
    }
  }
  put(p, "<details><summary>Logs</summary>\n<ul>\n");
  for (size_t r = 0; r < p->count; r++) {
    put(p, "<li>");
    put_run_name(p, r);
    put(p, ": ");
    put_text(p, p->runs[r].path);
    print(p, ", %" PRIu64 " line%s</li>\n", p->runs[r].log->lines, p->runs[r].log->lines == 1 ? "" : "s");
  }
  put(p, "</ul>\n</details>\n</section>\n");
}

// The whole -----------------------------------------------------------------------------------------------------------

static void put_head(page *p) {
  fp8lm_html_begin(p->stream, p->options->title);
  put(p, "<nav class=\"legend\" aria-label=\"Runs\">");
  for (size_t r = 0; r < p->count; r++) fp8lm_html_run_button(p->stream, r, p->runs[r].name);
  if (p->smoothing > 0.0)
    put(p, "<button type=\"button\" id=\"raw\" aria-pressed=\"true\" title=\"Hide or show the loss of each step\">each "
           "step</button>");
  put(p, "</nav>\n<main>\n");
}

static void put_page(page *p) {
  put_head(p);
  put_runs(p);
  put_losses(p);
  put_optimisation(p);
  put_memory(p);
  put_throughput(p);
  put_health(p);
  put_warnings(p);
  put_settings(p);
  put(p, "</main>\n");
  fp8lm_html_end(p->stream, "fp8lm report");
}

fp8core_status fp8lm_report_write(FILE *stream, const fp8lm_report_run *runs, size_t count,
                                  const fp8lm_report_options *options) {
  page p = {.stream = stream, .runs = runs, .count = count, .options = options};
  p.data = calloc(count, sizeof(*p.data));
  // A chart has at most three series a run.
  p.series = calloc(3 * count, sizeof(*p.series));
  p.failed = !p.data || !p.series;
  if (!p.failed) find_steps(&p);
  for (size_t r = 0; r < count && !p.failed; r++) find_figures(&p, runs[r].log, &p.data[r]);
  if (!p.failed) put_page(&p);
  for (size_t i = 0; i < p.block_count; i++) free(p.blocks[i]);
  free(p.blocks);
  free(p.data);
  free(p.series);
  return p.failed ? fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for the page") : FP8CORE_OK;
}
