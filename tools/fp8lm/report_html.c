#include "report_html.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "report_assets.h"
#include "utf8.h"

void fp8lm_html_text(FILE *stream, const char *text) {
  const size_t length = strlen(text);
  for (size_t i = 0; i < length;) {
    char printable[FP8LM_PRINTABLE_BYTES];
    i += fp8lm_printable(text + i, length - i, printable);
    switch (printable[0]) {
    case '&': fputs("&amp;", stream); break;
    case '<': fputs("&lt;", stream); break;
    case '>': fputs("&gt;", stream); break;
    case '"': fputs("&quot;", stream); break;
    case '\'': fputs("&#39;", stream); break;
    default: fputs(printable, stream);
    }
  }
}

void fp8lm_html_count(FILE *stream, double value) {
  char digits[400];
  const int length = snprintf(digits, sizeof(digits), "%.0f", value);
  for (int i = 0; i < length; i++) {
    if (i && digits[i - 1] != '-' && (length - i) % 3 == 0) fputc(',', stream);
    fputc(digits[i], stream);
  }
}

void fp8lm_html_bytes(FILE *stream, double bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  while (fabs(bytes) >= 1024.0 && unit < 5) {
    bytes /= 1024.0;
    unit++;
  }
  fprintf(stream, unit ? "%.2f&nbsp;%s" : "%.0f&nbsp;%s", bytes, units[unit]);
}

void fp8lm_html_begin(FILE *stream, const char *title) {
  fputs(
    "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'\">\n<title>",
    stream);
  fp8lm_html_text(stream, title);
  fputs("</title>\n<style>\n", stream);
  fputs(report_css, stream);
  fputs("</style>\n</head>\n<body>\n<header><h1>", stream);
  fp8lm_html_text(stream, title);
  fputs("</h1></header>\n", stream);
}

void fp8lm_html_end(FILE *stream, const char *command) {
  fprintf(stream, "<footer>%s %s</footer>\n<div id=\"tip\" role=\"status\" hidden></div>\n<script>\n", command,
          FP8LM_VERSION);
  fputs(report_js, stream);
  fputs("</script>\n</body>\n</html>\n", stream);
}

void fp8lm_html_run_button(FILE *stream, size_t run, const char *name) {
  fprintf(stream, "<button type=\"button\" data-run=\"%zu\" aria-pressed=\"true\" title=\"Hide or show this run\">",
          run);
  fprintf(stream,
          "<svg class=\"swatch c%zu d%zu\" viewBox=\"0 0 26 10\" aria-hidden=\"true\"><path class=\"line\" d=\"M1 "
          "5H25\"/></svg><span>",
          run % FP8LM_RUN_COLOURS, fp8lm_run_dash(run));
  fp8lm_html_text(stream, name);
  fputs("</span></button>", stream);
}

// Thinning ------------------------------------------------------------------------------------------------------------

typedef struct points {
  double *x;
  double *y;
  size_t count;
} points;

static void points_free(points *p) {
  free(p->x);
  free(p->y);
  *p = (points){.count = 0};
}

// Beyond it, differences and logarithms are no longer safe.
static int is_drawable(double value) { return fabs(value) < 1e100; }

static void add_point(points *p, double x, double y) {
  p->x[p->count] = x;
  p->y[p->count++] = y;
}

// Keeps of each of `buckets` parts of the steps the first value, the smallest, the largest and the last: what a line
// over all values would touch in a column of so many. A bucket without a value is a gap.
static int thin(const double *x, const double *y, size_t count, double first, double last, size_t buckets,
                points *kept) {
  const size_t most = count < 4 * buckets ? count : 4 * buckets;
  *kept = (points){.x = malloc((most + 1) * sizeof(double)), .y = malloc((most + 1) * sizeof(double))};
  if (!kept->x || !kept->y) {
    points_free(kept);
    return -1;
  }
  if (count <= 4 * buckets) {
    for (size_t i = 0; i < count; i++) add_point(kept, x[i], is_drawable(y[i]) ? y[i] : NAN);
    return 0;
  }
  const double factor = last > first ? (double)buckets / (last - first) : 0.0;
  for (size_t begin = 0; begin < count;) {
    size_t end = begin;
    size_t chosen[4];
    size_t values = 0;
    const double bucket = fmin(floor((x[begin] - first) * factor), (double)(buckets - 1));
    for (; end < count && fmin(floor((x[end] - first) * factor), (double)(buckets - 1)) <= bucket; end++) {
      if (!is_drawable(y[end])) continue;
      if (values++ == 0) chosen[0] = chosen[1] = chosen[2] = end;
      if (y[end] < y[chosen[1]]) chosen[1] = end;
      if (y[end] > y[chosen[2]]) chosen[2] = end;
      chosen[3] = end;
    }
    if (values == 0) {
      add_point(kept, x[begin], NAN);
    } else {
      if (chosen[1] > chosen[2]) {
        const size_t swap = chosen[1];
        chosen[1] = chosen[2];
        chosen[2] = swap;
      }
      for (int i = 0; i < 4; i++) {
        if (i == 0 || chosen[i] != chosen[i - 1]) add_point(kept, x[chosen[i]], y[chosen[i]]);
      }
    }
    begin = end;
  }
  return 0;
}

// Axes ----------------------------------------------------------------------------------------------------------------

typedef struct axis {
  double low;
  double high;
  int logarithmic;
  // Of the drawing, where low and high lie.
  double from;
  double to;
} axis;

static double place(const axis *a, double value) {
  const double share = a->logarithmic ? (log10(value) - log10(a->low)) / (log10(a->high) - log10(a->low))
                                      : (value - a->low) / (a->high - a->low);
  return a->from + share * (a->to - a->from);
}

static void put_coordinate(FILE *stream, double value) {
  char text[32];
  const int length = snprintf(text, sizeof(text), "%.1f", value);
  if (length > 2 && strcmp(text + length - 2, ".0") == 0) text[length - 2] = '\0';
  fputs(strcmp(text, "-0") == 0 ? "0" : text, stream);
}

enum { MOST_TICKS = 24 };

// Multiples of 1, 2 or 5 times a power of ten, about `wanted` of them.
static int linear_ticks(double low, double high, int wanted, double ticks[MOST_TICKS], int *decimals) {
  const double rough = (high - low) / wanted;
  const double power = pow(10.0, floor(log10(rough)));
  const double lead = rough / power;
  const double step = power * (lead < 1.5 ? 1.0 : lead < 3.5 ? 2.0 : lead < 7.5 ? 5.0 : 10.0);
  const double first = ceil(low / step - 1e-9);
  int count = 0;
  for (double i = first; count < MOST_TICKS && i * step <= high + 1e-9 * step; i++)
    ticks[count++] = i == 0.0 ? 0.0 : i * step;
  const double places = ceil(-log10(step) - 1e-9);
  *decimals = places > 0 && places < 15 ? (int)places : places > 0 ? 15 : 0;
  return count;
}

// Powers of ten, thinned where they are many; with 2 and 5 times them where they are few.
static int logarithmic_ticks(double low, double high, int wanted, double ticks[MOST_TICKS]) {
  const int first = (int)floor(log10(low) + 1e-9);
  const int last = (int)ceil(log10(high) - 1e-9);
  const int stride = 1 + (last - first) / (2 * wanted);
  const int dense = last - first <= wanted / 2 + 1;
  int count = 0;
  for (int exponent = first; exponent <= last; exponent += stride) {
    static const double leads[] = {1.0, 2.0, 5.0};
    for (int i = 0; i < (dense ? 3 : 1); i++) {
      const double tick = leads[i] * pow(10.0, exponent);
      if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9) && count < MOST_TICKS) ticks[count++] = tick;
    }
  }
  return count;
}

// A tick with the suffix that its size asks for.
static void put_tick(FILE *stream, double value, int decimals, double largest, int percent) {
  if (percent) {
    if (decimals > 6 && value != 0.0) {
      fprintf(stream, "%.2g&#8239;%%", 100.0 * value);
    } else {
      fprintf(stream, "%.*f&#8239;%%", value == 0.0 || decimals < 2 ? 0 : decimals - 2, 100.0 * value);
    }
  } else if (value == 0.0) {
    fputc('0', stream);
  } else if (largest >= 1e15 || largest < 1e-3) {
    fprintf(stream, "%.3g", value);
  } else if (largest >= 1e9) {
    fprintf(stream, "%.4gG", value / 1e9);
  } else if (largest >= 1e6) {
    fprintf(stream, "%.4gM", value / 1e6);
  } else if (largest >= 1e4) {
    fprintf(stream, "%.4gk", value / 1e3);
  } else {
    fprintf(stream, "%.*f", decimals, value);
  }
}

static void put_logarithmic_tick(FILE *stream, double value, int percent) {
  if (percent) {
    fprintf(stream, "%.3g&#8239;%%", 100.0 * value);
  } else if (value >= 1e4 || value < 1e-3) {
    const int exponent = (int)floor(log10(value) + 1e-9);
    const int lead = (int)lround(value / pow(10.0, exponent));
    if (lead != 1) fprintf(stream, "%d·", lead);
    fprintf(stream, "10<tspan class=\"power\" dy=\"-4\">%s%d</tspan>", exponent < 0 ? "−" : "", abs(exponent));
  } else {
    fprintf(stream, "%g", value);
  }
}

static int value_range(const fp8lm_chart *chart, double *low, double *high) {
  *low = HUGE_VAL;
  *high = -HUGE_VAL;
  for (size_t i = 0; i < chart->count; i++) {
    const fp8lm_series *series = &chart->series[i];
    for (size_t j = 0; j < series->count; j++) {
      const double value = series->values[j];
      if (!is_drawable(value)) continue;
      if (value < *low) *low = value;
      if (value > *high) *high = value;
    }
  }
  return *low <= *high;
}

int fp8lm_chart_has_values(const fp8lm_chart *chart) {
  double low;
  double high;
  return value_range(chart, &low, &high);
}

static void choose_range(const fp8lm_chart *chart, axis *y) {
  (void)value_range(chart, &y->low, &y->high);
  y->logarithmic = chart->may_be_logarithmic && y->low > 1e-100 && y->high / y->low > 30.0;
  if (y->logarithmic) {
    const double margin = pow(y->high / y->low, 0.04);
    y->low /= margin;
    y->high *= margin;
    return;
  }
  if (chart->from_zero && y->low > 0.0) y->low = 0.0;
  double range = y->high - y->low;
  if (range < 1e-9 * fmax(fabs(y->low), fabs(y->high)) || range < 1e-90)
    range = fmax(0.1 * fmax(fabs(y->low), fabs(y->high)), chart->percent ? 0.001 : 1e-6);
  if (!(chart->from_zero && y->low == 0.0)) y->low -= 0.05 * range;
  y->high = fmax(y->high, y->low + range) + 0.05 * range;
}

// Drawing -------------------------------------------------------------------------------------------------------------

static void put_path(FILE *stream, const points *p, const axis *x, const axis *y) {
  int pen_down = 0;
  for (size_t i = 0; i < p->count; i++) {
    if (isnan(p->y[i])) {
      pen_down = 0;
      continue;
    }
    // A value between two gaps is a dot, by the round ends of lines.
    const int alone = !pen_down && (i + 1 == p->count || isnan(p->y[i + 1]));
    fputs(pen_down ? "L" : "M", stream);
    put_coordinate(stream, place(x, p->x[i]));
    fputc(' ', stream);
    put_coordinate(stream, place(y, p->y[i]));
    if (alone) fputs("h0", stream);
    pen_down = 1;
  }
}

// Beyond it, marks would hide the line.
enum { MOST_MARKS = 100 };

static void put_marks(FILE *stream, size_t run, const points *p, const axis *x, const axis *y) {
  static const char *const shapes[FP8LM_RUN_DASHES] = {
    "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z",
    "m-3 -3h6v6h-6z",
    "m0 -4l4 4l-4 4l-4 -4z",
    "m0 -3.8l3.6 6.2h-7.2z",
  };
  fputs("<path class=\"marks\" d=\"", stream);
  for (size_t i = 0; i < p->count; i++) {
    if (isnan(p->y[i])) continue;
    fputc('M', stream);
    put_coordinate(stream, place(x, p->x[i]));
    fputc(' ', stream);
    put_coordinate(stream, place(y, p->y[i]));
    fputs(shapes[run % FP8LM_RUN_DASHES], stream);
  }
  fputs("\"/>", stream);
}

static void put_axes(FILE *stream, const fp8lm_chart *chart, const axis *x, const axis *y) {
  double ticks[MOST_TICKS];
  int decimals = 0;
  int count =
    y->logarithmic ? logarithmic_ticks(y->low, y->high, 5, ticks) : linear_ticks(y->low, y->high, 5, ticks, &decimals);
  fputs("<g class=\"axis y\">", stream);
  for (int i = 0; i < count; i++) {
    fputs("<path class=\"grid\" d=\"M", stream);
    put_coordinate(stream, x->from);
    fputc(' ', stream);
    put_coordinate(stream, place(y, ticks[i]));
    fputc('H', stream);
    put_coordinate(stream, x->to);
    fputs("\"/><text x=\"", stream);
    put_coordinate(stream, x->from - 7);
    fputs("\" y=\"", stream);
    put_coordinate(stream, place(y, ticks[i]) + 4);
    fputs("\">", stream);
    if (y->logarithmic) {
      put_logarithmic_tick(stream, ticks[i], chart->percent);
    } else {
      put_tick(stream, ticks[i], decimals, fmax(fabs(y->low), fabs(y->high)), chart->percent);
    }
    fputs("</text>", stream);
  }
  fputs("</g><g class=\"axis x\"><path class=\"base\" d=\"M", stream);
  put_coordinate(stream, x->from);
  fputc(' ', stream);
  put_coordinate(stream, y->from);
  fputc('H', stream);
  put_coordinate(stream, x->to);
  fputs("\"/>", stream);
  count = linear_ticks(x->low, x->high, chart->wide ? 10 : 5, ticks, &decimals);
  for (int i = 0; i < count; i++) {
    if (ticks[i] != floor(ticks[i])) continue;
    fputs("<path class=\"base\" d=\"M", stream);
    put_coordinate(stream, place(x, ticks[i]));
    fputc(' ', stream);
    put_coordinate(stream, y->from);
    fputs("v4\"/><text x=\"", stream);
    put_coordinate(stream, place(x, ticks[i]));
    fputs("\" y=\"", stream);
    put_coordinate(stream, y->from + 18);
    fputs("\">", stream);
    put_tick(stream, ticks[i], 0, x->high, 0);
    fputs("</text>", stream);
  }
  fputs("</g>", stream);
}

static void put_numbers(FILE *stream, const double *values, size_t count, int digits) {
  fputc('[', stream);
  for (size_t i = 0; i < count; i++) {
    if (i) fputc(',', stream);
    if (isnan(values[i])) {
      fputs("null", stream);
    } else {
      fprintf(stream, "%.*g", digits, values[i]);
    }
  }
  fputc(']', stream);
}

static void put_values(FILE *stream, const fp8lm_chart *chart, const points *kept, const axis *x, const axis *y) {
  fprintf(stream, "<script type=\"application/json\">{\"x\":[%.17g,%.17g,%g,%g],\"y\":[%.17g,%.17g,%g,%g],\"log\":%d,",
          x->low, x->high, x->from, x->to, y->low, y->high, y->from, y->to, y->logarithmic);
  if (chart->step_name) fprintf(stream, "\"name\":\"%s\",", chart->step_name);
  fprintf(stream, "\"percent\":%d,\"series\":[", chart->percent != 0);
  for (size_t i = 0; i < chart->count; i++) {
    fprintf(stream, "%s{\"run\":%zu,\"kind\":\"%s\",\"x\":", i ? "," : "", chart->series[i].run, chart->series[i].kind);
    put_numbers(stream, kept[i].x, kept[i].count, 17);
    fputs(",\"y\":", stream);
    put_numbers(stream, kept[i].y, kept[i].count, 6);
    fputc('}', stream);
  }
  fputs("]}</script>", stream);
}

int fp8lm_html_chart(FILE *stream, const fp8lm_chart *chart) {
  if (!fp8lm_chart_has_values(chart)) return 0;
  const double width = chart->wide ? 1160.0 : 572.0;
  const double height = chart->wide ? 380.0 : 250.0;
  axis x = {.low = chart->first_step, .high = chart->last_step, .from = 70.0, .to = width - 16.0};
  if (!(x.high > x.low)) {
    x.low -= 1.0;
    x.high += 1.0;
  }
  axis y = {.from = height - 28.0, .to = 10.0};
  choose_range(chart, &y);
  points *kept = calloc(chart->count, sizeof(*kept));
  int result = kept ? 0 : -1;
  for (size_t i = 0; i < chart->count && result == 0; i++) {
    const fp8lm_series *series = &chart->series[i];
    result = thin(series->steps, series->values, series->count, x.low, x.high, chart->wide ? 550 : 260, &kept[i]);
  }
  if (result == 0) {
    fprintf(stream, "<figure class=\"chart%s\"><figcaption><b>%s</b>", chart->wide ? " wide" : "", chart->title);
    if (y.logarithmic) fputs(" <span>logarithmic</span>", stream);
    if (chart->note) fprintf(stream, " <span>%s</span>", chart->note);
    fprintf(stream,
            "</figcaption>\n<div class=\"scroll\"><svg viewBox=\"0 0 %g %g\" role=\"img\" tabindex=\"0\" "
            "aria-label=\"%s over %ss, ",
            width, height, chart->title, chart->step_name ? chart->step_name : "step");
    fprintf(stream, "from %.6g to %.6g; arrow keys read values\">", y.low, y.high);
    put_axes(stream, chart, &x, &y);
    for (size_t i = 0; i < chart->count; i++) {
      static const char *const styles[] = {"raw", "line", "thin"};
      const fp8lm_series *series = &chart->series[i];
      fprintf(stream, "\n<g class=\"run c%zu d%zu\" data-run=\"%zu\"><path class=\"%s\" d=\"",
              series->run % FP8LM_RUN_COLOURS, fp8lm_run_dash(series->run), series->run, styles[series->style]);
      put_path(stream, &kept[i], &x, &y);
      fputs("\"/>", stream);
      if (series->style == FP8LM_SERIES_MARKS && kept[i].count <= MOST_MARKS)
        put_marks(stream, series->run, &kept[i], &x, &y);
      fputs("</g>", stream);
    }
    fputs("<path class=\"cross\" d=\"\"/></svg></div>\n", stream);
    put_values(stream, chart, kept, &x, &y);
    fputs("</figure>\n", stream);
  }
  for (size_t i = 0; kept && i < chart->count; i++) points_free(&kept[i]);
  free(kept);
  return result;
}

int fp8lm_html_sparkline(FILE *stream, const double *steps, const double *values, size_t count, int logarithmic,
                         const char *label) {
  const fp8lm_series series = {.steps = steps, .values = values, .count = count};
  const fp8lm_chart chart = {.series = &series, .count = 1};
  axis x = {.low = count ? steps[0] : 0.0, .high = count ? steps[count - 1] : 0.0, .from = 2.0, .to = 118.0};
  if (!(x.high > x.low)) {
    x.low -= 1.0;
    x.high += 1.0;
  }
  axis y = {.from = 20.0, .to = 2.0};
  if (!value_range(&chart, &y.low, &y.high)) return 0;
  y.logarithmic = logarithmic && y.low > 1e-100 && y.high > y.low;
  if (!y.logarithmic && !(y.high - y.low > 1e-12 * fmax(fabs(y.low), fabs(y.high)))) {
    // A line along the middle; along the bottom where all is 0.
    const double half = fmax(0.5 * fabs(y.low), 1e-90);
    y.high += half;
    if (y.low != 0.0) y.low -= half;
  }
  points kept;
  if (thin(steps, values, count, x.low, x.high, 20, &kept) != 0) return -1;
  fprintf(stream, "<svg class=\"spark\" viewBox=\"0 0 120 22\" role=\"img\" aria-label=\"%s over steps\"><path d=\"",
          label);
  put_path(stream, &kept, &x, &y);
  fputs("\"/></svg>", stream);
  points_free(&kept);
  return 0;
}
