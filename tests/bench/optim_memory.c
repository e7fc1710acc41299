// Bytes of every preset of the optimizer, computed and measured, for the tensors of GPT-2 small (124 M parameters):
// docs/memory.md has the table. Fails where fp8optim_adamw_memory(), the formats' sizes and the process disagree.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <fp8core/fp8core.h>
#include <fp8optim/fp8optim.h>

enum { LAYERS = 12, WIDTH = 768, VOCABULARY = 50257, POSITIONS = 1024, TENSORS = 4 + 12 * LAYERS };

static void check(fp8core_status status) {
  if (status == FP8CORE_OK) return;
  fprintf(stderr, "%s: %s\n", fp8core_status_string(status), fp8core_last_error());
  exit(1);
}

static int count;
static char names[TENSORS][32];
static fp8optim_parameter parameters[TENSORS];

static void add(const char *name, int layer, int64_t rows, int64_t columns, fp8core_dtype weight_dtype) {
  snprintf(names[count], sizeof(names[count]), layer < 0 ? "%s" : "%s.%d", name, layer);
  parameters[count] = fp8optim_parameter_create(names[count], rows, columns);
  parameters[count].with_weight = 1;
  parameters[count].weight_dtype = weight_dtype;
  count++;
}

static void add_all(fp8core_dtype weight_dtype) {
  count = 0;
  add("wte", -1, VOCABULARY, WIDTH, weight_dtype);
  add("wpe", -1, POSITIONS, WIDTH, weight_dtype);
  for (int layer = 0; layer < LAYERS; layer++) {
    const struct {
      const char *name;
      int64_t rows;
      int64_t columns;
    } tensors[] = {{"ln1.weight", 1, WIDTH},    {"ln1.bias", 1, WIDTH},           {"attn.weight", 3 * WIDTH, WIDTH},
                   {"attn.bias", 1, 3 * WIDTH}, {"proj.weight", WIDTH, WIDTH},    {"proj.bias", 1, WIDTH},
                   {"ln2.weight", 1, WIDTH},    {"ln2.bias", 1, WIDTH},           {"fc.weight", 4 * WIDTH, WIDTH},
                   {"fc.bias", 1, 4 * WIDTH},   {"out.weight", WIDTH, 4 * WIDTH}, {"out.bias", 1, WIDTH}};
    for (int i = 0; i < 12; i++) add(tensors[i].name, layer, tensors[i].rows, tensors[i].columns, weight_dtype);
  }
  add("ln_f.weight", -1, 1, WIDTH, weight_dtype);
  add("ln_f.bias", -1, 1, WIDTH, weight_dtype);
}

static double resident_bytes(void) {
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
  if (file) fclose(file);
  return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

int main(void) {
  static const struct {
    fp8optim_preset preset;
    const char *number;
    fp8core_dtype gradient;
    fp8core_dtype weight;
  } cases[] = {
    {FP8OPTIM_PRESET_FP32, "#0", FP8CORE_FP32, FP8CORE_FP32},
    {FP8OPTIM_PRESET_BF16, "#1", FP8CORE_FP32, FP8CORE_BF16},
    {FP8OPTIM_PRESET_BF16, "#1", FP8CORE_BF16, FP8CORE_BF16},
    {FP8OPTIM_PRESET_FP8, "#2a", FP8CORE_E4M3, FP8CORE_E4M3},
    {FP8OPTIM_PRESET_FP8, "#2a", FP8CORE_BF16, FP8CORE_BF16},
    {FP8OPTIM_PRESET_FP8_BF16_MASTER, "#2b", FP8CORE_E4M3, FP8CORE_E4M3},
    {FP8OPTIM_PRESET_FP8_MASTER, "#3", FP8CORE_E4M3, FP8CORE_E4M3},
    {FP8OPTIM_PRESET_FP8_EXP_AVG_SQ, "#4", FP8CORE_E4M3, FP8CORE_E4M3},
  };
  fp8core_context *context;
  int wrong = 0;
  check(fp8core_context_create(&context, NULL));
  printf("| preset | master, exp_avg, exp_avg_sq | gradient | sum | weight | measured states | overhead | process |\n"
         "| --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
    const fp8optim_adamw_options options = fp8optim_adamw_options_of(cases[i].preset);
    const fp8optim_group group = fp8optim_group_default();
    const int master = (int)fp8core_dtype_size(options.master_dtype);
    const int exp_avg = (int)fp8core_dtype_size(options.exp_avg_dtype);
    const int exp_avg_sq = (int)fp8core_dtype_size(options.exp_avg_sq_dtype);
    const int gradient = (int)fp8core_dtype_size(cases[i].gradient);
    const int weight = (int)fp8core_dtype_size(cases[i].weight);
    fp8optim_adamw *optimizer;
    fp8optim_memory memory;
    add_all(cases[i].weight);
    const double before = resident_bytes();
    check(fp8optim_adamw_create(&optimizer, context, &options, count, parameters, 1, &group));
    const double grown = resident_bytes() - before;
    check(fp8optim_adamw_memory(optimizer, &memory));
    const double n = (double)memory.parameters;
    const double states = (double)(memory.master_bytes + memory.exp_avg_bytes + memory.exp_avg_sq_bytes) / n;
    printf("| %s %s | %d + %d + %d | %s, %d | %d | %s, %d | %.3f | %.4f | %.3f |\n", cases[i].number,
           fp8optim_preset_name(cases[i].preset), master, exp_avg, exp_avg_sq, fp8core_dtype_name(cases[i].gradient),
           gradient, master + exp_avg + exp_avg_sq + gradient, fp8core_dtype_name(cases[i].weight), weight, states,
           (double)memory.overhead_bytes / n, grown / n);
    // The process: to 1 %, as it holds names, shapes and the allocator's own pages too.
    if (states != master + exp_avg + exp_avg_sq || (double)memory.weight_bytes / n != weight ||
        (before > 0.0 && fabs(grown / n - (states + weight)) > 0.01 * (states + weight))) {
      printf("failed: expected %d bytes of states and %d of weights, in the process too\n",
             master + exp_avg + exp_avg_sq, weight);
      wrong = 1;
    }
    if (i + 1 == sizeof(cases) / sizeof(*cases))
      printf("\n%lld parameters in %d tensors; \"process\" holds the weights too\n", (long long)memory.parameters,
             count);
    fp8optim_adamw_destroy(&optimizer);
  }
  fp8core_context_destroy(&context);
  return wrong;
}
