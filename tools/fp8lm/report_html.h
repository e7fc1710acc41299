/** \file
 * Text, numbers and charts of the report page.
 */
#ifndef FP8LM_REPORT_HTML_H
#define FP8LM_REPORT_HTML_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/** Writes \p text so that it is text anywhere in HTML, attributes in double quotes included; control characters and
 * bytes that are not UTF-8 as fp8lm_printable() shows them. */
void fp8lm_html_text(FILE *stream, const char *text);

/** Writes a whole number with a comma at each thousand. */
void fp8lm_html_count(FILE *stream, double value);

/** Writes bytes in the largest binary unit that leaves a whole part. */
void fp8lm_html_bytes(FILE *stream, double bytes);

/** Writes the page as far as its title, with style; and its end, with the script, of the command \p command. */
void fp8lm_html_begin(FILE *stream, const char *title);
void fp8lm_html_end(FILE *stream, const char *command);

/** Writes the button of the legend that hides and shows a run; all of them stand in one nav of the class legend. */
void fp8lm_html_run_button(FILE *stream, size_t run, const char *name);

/** Colours and dashes that runs are told apart by, as the classes c0, c1, ... and d0, d1, ... of the page. */
enum { FP8LM_RUN_COLOURS = 6, FP8LM_RUN_DASHES = 4 };

/** Dash of a run: with the colour, another pair for each of the first 24. */
static inline size_t fp8lm_run_dash(size_t run) { return (run + run / FP8LM_RUN_COLOURS) % FP8LM_RUN_DASHES; }

typedef enum fp8lm_series_style {
  /** Thin and pale: values as they were logged, below their smoothed line. */
  FP8LM_SERIES_RAW,
  FP8LM_SERIES_LINE,
  /** A thin line with a mark at each value. */
  FP8LM_SERIES_MARKS
} fp8lm_series_style;

/** Values over steps, ascending. A value that is NaN is a gap. */
typedef struct fp8lm_series {
  size_t run;
  fp8lm_series_style style;
  /** What the values are, where the chart has more than one kind. */
  const char *kind;
  const double *steps;
  const double *values;
  size_t count;
} fp8lm_series;

typedef struct fp8lm_chart {
  const char *title;
  const char *note;
  /** Over the whole width of the page. */
  int wide;
  /** A logarithmic axis where all values are positive and far apart. */
  int may_be_logarithmic;
  int from_zero;
  /** Values are shares, shown in per cent. */
  int percent;
  /** What the steps are, a name in the singular; NULL: "step". */
  const char *step_name;
  double first_step;
  double last_step;
  const fp8lm_series *series;
  size_t count;
} fp8lm_chart;

/** Writes a chart as a figure: static SVG, with its values beside it as JSON for the page's script. A chart of no value
 * is not written. \return 0, or -1 without memory. */
int fp8lm_html_chart(FILE *stream, const fp8lm_chart *chart);

/** Non-zero where \p chart has a value to draw. */
int fp8lm_chart_has_values(const fp8lm_chart *chart);

/** Writes a line of the size of a word over \p count values, logarithmic where asked and possible. */
int fp8lm_html_sparkline(FILE *stream, const double *steps, const double *values, size_t count, int logarithmic,
                         const char *label);

#endif
