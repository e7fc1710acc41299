// The reader of logs with any bytes, and the page of whatever it makes of them.
#include <math.h>
#include <string.h>

#include "fp8core/fp8core.h"
#include "fuzz.h"
#include "report_page.h"
#include "utf8.h"

static const char *const seeds[] = {
  "{\"event\": \"start\", \"step\": 0, \"parameters\": 5308416, \"memory\": {\"weights\": 1, \"exp_avg\": 2, "
  "\"exp_avg_sq\": 3, \"optimizer_overhead\": 4}, \"options\": {\"precision\": \"fp8-o2\", \"a\": [1, {\"b\": "
  "null}]}}\n"
  "{\"event\": \"step\", \"step\": 1, \"loss\": 5.5, \"lr\": 1e-3, \"grad_norm\": 2, \"mfu\": 0.4, \"skipped\": "
  "false}\n"
  "{\"event\": \"step\", \"step\": 2, \"loss\": null, \"skipped\": true, \"spike\": true, \"tokens_per_second\": 9}\n"
  "{\"event\": \"validation\", \"step\": 2, \"loss\": 5}\n",
  "{\"event\":\"fp8\",\"step\":7,\"tensors\":[{\"name\":\"a\",\"scale\":16,\"amax\":0.5,\"fill\":1.5},{\"name\":\"b\"}]"
  ","
  "\"weights\":[{\"name\":\"w\",\"zero_share\":0.1,\"saturated_share\":0}]}\r\n\n"
  "{\"step\":7,\"loss\":1}\n{\"step\":8,\"loss\":1e308}\n{\"step\":3,\"loss\":-1e308}\n"
  "{\"event\":\"fp8\",\"step\":9,\"tensors\":[{\"name\":\"a\",\"amax\":3e38}]}\n"
  "{\"event\":\"end\",\"reason\":\"<script>\\u0000\",\"peak_resident_bytes\":17}\n{\"event\":\"step\",\"st",
  "{\"type\":\"config\",\"learning_rate\":0.1}\nbroken\n{\"type\":\"memory\",\"parameters\":0,\"moments\":-5}\n"
  "{\"type\":\"eval\",\"step\":9007199254740992,\"loss\":0}\n{\"type\":\"event\",\"event\":\"x\",\"message\":"
  "\"\\ud83d\\ude00\"}\n",
};

uint8_t *fuzz_seed(size_t index, size_t *size) {
  if (index >= sizeof(seeds) / sizeof(seeds[0])) return NULL;
  *size = strlen(seeds[index]);
  uint8_t *bytes = malloc(*size);
  FUZZ_CHECK(bytes);
  memcpy(bytes, seeds[index], *size);
  return bytes;
}

static void check_text(const char *text) {
  FUZZ_CHECK(text);
  for (size_t left = strlen(text); left;) {
    const size_t length = fp8lm_utf8_length(text, left);
    FUZZ_CHECK(length);
    text += length;
    left -= length;
  }
}

static void check_log(const fp8lm_run_log *log) {
  FUZZ_CHECK(log->step_count + log->evaluation_count > 0);
  for (size_t i = 1; i < log->step_count; i++) FUZZ_CHECK(log->steps[i].step > log->steps[i - 1].step);
  for (size_t i = 1; i < log->evaluation_count; i++)
    FUZZ_CHECK(log->evaluations[i].step > log->evaluations[i - 1].step);
  for (size_t i = 0; i < log->tensor_count; i++) {
    const fp8lm_log_tensor *tensor = &log->tensors[i];
    check_text(tensor->name);
    for (size_t j = 1; j < tensor->count; j++) FUZZ_CHECK(tensor->statistics[j].step > tensor->statistics[j - 1].step);
  }
  for (size_t i = 0; i < log->setting_count; i++) {
    check_text(log->settings[i].value);
    FUZZ_CHECK(fp8lm_run_log_setting(log, log->settings[i].key) == log->settings[i].value);
  }
  for (size_t i = 0; i < log->event_count; i++) {
    check_text(log->events[i].kind);
    check_text(log->events[i].message);
  }
  for (size_t i = 0; i < log->problem_count; i++) FUZZ_CHECK(log->problems[i].line <= log->lines);
}

static void check_page(const fp8lm_run_log *log) {
  // Beside itself, under a name that tries to leave its place.
  const fp8lm_report_run runs[] = {{"a", "a", log}, {"<script>\"'&\xff", "]]>", log}};
  const fp8lm_report_options options = {.title = "</title>", .smoothing = -1, .most_tensors = 4};
  char *page = NULL;
  size_t size = 0;
  FILE *stream = open_memstream(&page, &size);
  FUZZ_CHECK(stream);
  FUZZ_CHECK(fp8lm_report_write(stream, runs, 2, &options) == FP8CORE_OK);
  FUZZ_CHECK(fclose(stream) == 0 && strlen(page) == size);
  // No number of a drawing or its values that isn't one.
  FUZZ_CHECK(!strstr(page, "=\"nan") && !strstr(page, "=\"inf"));
  for (const char *values = page; (values = strstr(values, "<script type=\"application/json\">"));) {
    const char *end = strstr(values, "</script>");
    FUZZ_CHECK(end);
    FUZZ_CHECK(!memmem(values, (size_t)(end - values), "nan", 3));
    FUZZ_CHECK(!memmem(values, (size_t)(end - values), "inf", 3));
    values = end;
  }
  for (const char *path = page; (path = strstr(path, " d=\""));) {
    path += 4;
    FUZZ_CHECK(strspn(path, "MLHVmlhvaz0123456789.- ") == strcspn(path, "\""));
  }
  free(page);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fp8lm_input input;
  fp8lm_input_from_memory(&input, data, size);
  fp8lm_run_log log;
  const fp8core_status status = fp8lm_run_log_read(&input, &log);
  if (status == FP8CORE_OK) {
    check_log(&log);
    check_page(&log);
  } else {
    FUZZ_CHECK(status == FP8CORE_ERROR_CORRUPT_DATA && *fp8core_last_error());
    FUZZ_CHECK(!log.steps && !log.tensors && !log.settings && !log.events);
  }
  fp8lm_run_log_free(&log);
  return 0;
}
