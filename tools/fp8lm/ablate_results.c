#include "ablate_results.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "report_html.h"

static const char *const algorithms[FP8LM_ABLATE_ALGORITHMS] = {"native", "two-shot"};
static const char *const scalings[FP8LM_ABLATE_SCALINGS] = {"auto", "pre", "post"};

const char *fp8lm_ablate_algorithm(int algorithm) { return algorithms[algorithm]; }
const char *fp8lm_ablate_scaling(int scaling) { return scalings[scaling]; }

const char *fp8lm_ablate_reducer(int reducer) {
  static const char *const names[FP8LM_ABLATE_REDUCERS] = {"native auto",   "native pre",   "native post",
                                                           "two-shot auto", "two-shot pre", "two-shot post"};
  return names[reducer];
}

double fp8lm_ablate_decibels(double snr) { return 10.0 * log10(snr); }

// --- Tables ---

typedef double (*figure_function)(const fp8lm_ablate_figures *figures);

static double decibels(const fp8lm_ablate_figures *figures) { return fp8lm_ablate_decibels(figures->snr); }
static double underflow(const fp8lm_ablate_figures *figures) { return figures->underflow; }
static double overflow(const fp8lm_ablate_figures *figures) { return figures->overflow; }
static double at_maximum(const fp8lm_ablate_figures *figures) { return figures->at_maximum; }

static void print_cell(FILE *stream, double value, int decimals) {
  if (isnan(value))
    fprintf(stream, " %8s", "-");
  else
    fprintf(stream, " %8.*f", decimals, value);
}

static void print_line(FILE *stream, const fp8lm_ablate_group *group, int algorithm) {
  const fp8lm_ablate_figures *figures = group->figures + algorithm * FP8LM_ABLATE_SCALINGS;
  fprintf(stream, "  %-13s", group->name);
  for (int i = 0; i < FP8LM_ABLATE_SCALINGS; i++) print_cell(stream, decibels(&figures[i]), 2);
  fputs("  ", stream);
  for (int i = 0; i < FP8LM_ABLATE_SCALINGS; i++) print_cell(stream, 100.0 * figures[i].underflow, 4);
  fputs("  ", stream);
  for (int i = 0; i < FP8LM_ABLATE_SCALINGS; i++) print_cell(stream, 100.0 * figures[i].overflow, 4);
  fprintf(stream, "  %8.5f\n", group->mu[algorithm]);
}

void fp8lm_ablate_print(FILE *stream, const fp8lm_ablate_results *results) {
  const size_t groups = fp8lm_ablate_group_count(results);
  for (int algorithm = 0; algorithm < FP8LM_ABLATE_ALGORITHMS; algorithm++) {
    fprintf(stream, "\n%-15s %26s  %27s  %27s\n%-15s", algorithms[algorithm], "SNR, dB         ", "underflow, %       ",
            "overflow, %        ", "");
    for (int i = 0; i < 3; i++) {
      if (i) fputs("  ", stream);
      for (int j = 0; j < FP8LM_ABLATE_SCALINGS; j++) fprintf(stream, " %8s", scalings[j]);
    }
    fprintf(stream, "  %8s\n", "mu");
    for (size_t i = 0; i < groups; i++) {
      if (i == results->blocks) fputc('\n', stream);
      if (results->groups[i].tensors > 0) print_line(stream, &results->groups[i], algorithm);
    }
  }
  if (results->nonfinite > 0)
    fprintf(stream, "\n%lld tensor%s left out, as a gradient was not finite\n", (long long)results->nonfinite,
            results->nonfinite == 1 ? " was" : "s were");
}

// --- The page ---

static int put_blocks_chart(FILE *stream, const fp8lm_ablate_results *results, int algorithm, figure_function figure,
                            fp8lm_chart chart) {
  double *values = malloc((1 + (size_t)FP8LM_ABLATE_SCALINGS) * results->blocks * sizeof(*values));
  fp8lm_series series[FP8LM_ABLATE_SCALINGS];
  char title[96];
  if (!values) return -1;
  for (size_t i = 0; i < results->blocks; i++) values[i] = (double)i;
  for (int i = 0; i < FP8LM_ABLATE_SCALINGS; i++) {
    double *row = values + (size_t)(i + 1) * results->blocks;
    const int reducer = algorithm * FP8LM_ABLATE_SCALINGS + i;
    for (size_t j = 0; j < results->blocks; j++) row[j] = figure(&results->groups[j].figures[reducer]);
    series[i] = (fp8lm_series){.run = (size_t)reducer,
                               .style = FP8LM_SERIES_MARKS,
                               .kind = chart.title,
                               .steps = values,
                               .values = row,
                               .count = results->blocks};
  }
  (void)snprintf(title, sizeof(title), "%s, %s", chart.title, algorithms[algorithm]);
  chart.title = title;
  chart.step_name = "block";
  chart.first_step = 0.0;
  chart.last_step = (double)results->blocks - 1.0;
  chart.series = series;
  chart.count = FP8LM_ABLATE_SCALINGS;
  const int result = fp8lm_html_chart(stream, &chart);
  free(values);
  return result;
}

static int put_charts(FILE *stream, const fp8lm_ablate_results *results) {
  static const struct {
    figure_function figure;
    fp8lm_chart chart;
  } kinds[] = {
    {decibels, {.title = "SNR", .note = "dB, of the mean over all ranks, by block; more is better"}},
    {underflow, {.title = "Underflow", .note = "share of the values cast that became 0", .percent = 1, .from_zero = 1}},
    {overflow,
     {.title = "Overflow", .note = "share of values that saturated, cast or added", .percent = 1, .from_zero = 1}},
    {at_maximum,
     {.title = "Elements at the maximum", .note = "share of the elements of the sum", .percent = 1, .from_zero = 1}},
  };
  int result = 0;
  fputs("<section><h2>By block</h2>\n<div class=\"charts\">\n", stream);
  for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds) && result == 0; i++) {
    for (int j = 0; j < FP8LM_ABLATE_ALGORITHMS && result == 0; j++) {
      // Means of two-shot always reach it.
      if (kinds[i].figure == at_maximum && j == 1) continue;
      result = put_blocks_chart(stream, results, j, kinds[i].figure, kinds[i].chart);
    }
  }
  fputs("</div>\n</section>\n", stream);
  return result;
}

static int put_mu(FILE *stream, const fp8lm_ablate_results *results) {
  const size_t count = results->step_count;
  double *values = malloc(7 * count * sizeof(*values));
  fp8lm_series series[3 * FP8LM_ABLATE_ALGORITHMS];
  if (!values) return -1;
  for (size_t i = 0; i < count; i++) values[i] = (double)results->steps[i].step;
  for (int i = 0; i < FP8LM_ABLATE_ALGORITHMS; i++) {
    static const char *const kinds[] = {"least", "most", "median"};
    for (int j = 0; j < 3; j++) {
      double *row = values + (size_t)(1 + 3 * i + j) * count;
      for (size_t k = 0; k < count; k++) {
        const fp8lm_ablate_step *step = &results->steps[(size_t)i * count + k];
        row[k] = j == 0 ? step->mu_least : j == 1 ? step->mu_most : step->mu_median;
      }
      series[3 * i + j] = (fp8lm_series){.run = (size_t)(i * FP8LM_ABLATE_SCALINGS),
                                         .style = j == 2 ? FP8LM_SERIES_LINE : FP8LM_SERIES_RAW,
                                         .kind = kinds[j],
                                         .steps = values,
                                         .values = row,
                                         .count = count};
    }
  }
  const fp8lm_chart chart = {.title = "mu",
                             .note = "median over tensors; pale: the smallest and the largest",
                             .wide = 1,
                             .may_be_logarithmic = 1,
                             .first_step = values[0],
                             .last_step = values[count - 1],
                             .series = series,
                             .count = 3 * FP8LM_ABLATE_ALGORITHMS};
  fputs("<section><h2>Auto-scaling</h2>\n<div class=\"charts\">\n", stream);
  const int result = fp8lm_html_chart(stream, &chart);
  fputs("</div>\n</section>\n", stream);
  free(values);
  return result;
}

static void put_cell(FILE *stream, double value, int decimals) {
  if (isnan(value))
    fputs("<td>–</td>", stream);
  else if (isinf(value))
    fputs("<td>∞</td>", stream);
  else
    fprintf(stream, "<td>%.*f</td>", decimals, value);
}

static void put_row(FILE *stream, const fp8lm_ablate_group *group, int reducer) {
  const fp8lm_ablate_figures *figures = &group->figures[reducer];
  fprintf(stream, "<tr class=\"run\" data-run=\"%d\"><th scope=\"row\">%s</th><td>%s</td>", reducer, group->name,
          fp8lm_ablate_reducer(reducer));
  put_cell(stream, decibels(figures), 2);
  put_cell(stream, figures->snr, 1);
  put_cell(stream, 100.0 * figures->underflow, 4);
  put_cell(stream, 100.0 * figures->overflow, 4);
  put_cell(stream, 100.0 * figures->lost, 4);
  put_cell(stream, reducer < FP8LM_ABLATE_SCALINGS ? 100.0 * figures->at_maximum : (double)NAN, 4);
  put_cell(stream, reducer % FP8LM_ABLATE_SCALINGS == 0 ? group->mu[reducer / FP8LM_ABLATE_SCALINGS] : (double)NAN, 5);
  fputs("</tr>\n", stream);
}

static void put_table(FILE *stream, const fp8lm_ablate_results *results) {
  fputs(
    "<section><h2>Figures</h2>\n<div class=\"scroll\"><table class=\"figures\">\n<thead><tr><th></th><th>reducer</th>"
    "<th>SNR, dB</th><th>SNR</th><th>underflow, %</th><th>overflow, %</th><th>zeros of the mean, %</th>"
    "<th>at the maximum, %</th><th>mu</th></tr></thead>\n<tbody>\n",
    stream);
  // The sums first.
  for (size_t i = 0; i < fp8lm_ablate_group_count(results); i++) {
    const fp8lm_ablate_group *group = &results->groups[(i + results->blocks) % fp8lm_ablate_group_count(results)];
    for (int j = 0; j < FP8LM_ABLATE_REDUCERS && group->tensors > 0; j++) put_row(stream, group, j);
  }
  fputs(
    "</tbody>\n</table></div>\n<p class=\"note\">SNR: squares of the mean in FP64 over those of the difference. "
    "Underflow: of the values of all ranks, those that were not 0 and became it when they were cast. Overflow: of the "
    "same, those that saturated when they were cast or added. Zeros of the mean: elements that are 0 although the mean "
    "in FP64 is not. At the maximum: elements of a native sum. mu: median over tensors in the last step.</p>\n",
    stream);
  if (results->nonfinite > 0)
    fprintf(stream, "<p class=\"note\">Left out, as a gradient was not finite: %lld.</p>\n",
            (long long)results->nonfinite);
  fputs("</section>\n", stream);
}

fp8core_status fp8lm_ablate_write_page(FILE *stream, const fp8lm_ablate_results *results,
                                       const fp8lm_ablate_page *page) {
  fp8lm_html_begin(stream, page->title);
  fputs("<nav class=\"legend\" aria-label=\"Reducers\">", stream);
  for (int i = 0; i < FP8LM_ABLATE_REDUCERS; i++) fp8lm_html_run_button(stream, (size_t)i, fp8lm_ablate_reducer(i));
  fputs("</nav>\n<main>\n<p>", stream);
  fp8lm_html_text(stream, page->summary);
  fputs("</p>\n", stream);
  int result = put_charts(stream, results);
  if (result == 0) result = put_mu(stream, results);
  put_table(stream, results);
  fputs("<section><h2>Configuration</h2>\n<details><summary>Options</summary>\n<pre>", stream);
  // fp8lm_html_text() would show line ends as escapes.
  for (const char *line = page->options; *line;) {
    char text[4096];
    const size_t length = strcspn(line, "\n");
    (void)snprintf(text, sizeof(text), "%.*s", (int)(length < sizeof(text) ? length : sizeof(text) - 1), line);
    fp8lm_html_text(stream, text);
    fputc('\n', stream);
    line += length + (line[length] == '\n');
  }
  fputs("</pre>\n</details>\n</section>\n</main>\n", stream);
  fp8lm_html_end(stream, "fp8lm ablate allreduce");
  return result == 0 ? FP8CORE_OK : fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "no memory for the page");
}
