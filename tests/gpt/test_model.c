// The model's contract: bits, precision levels, micro-batches, scaling states, generation, memory, and bad input.
#include "../support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(HAVE_MALLINFO2)
#  include <malloc.h>
#endif

#include "fp8gpt/model.h"
#include "reference.h"

#if defined(__SANITIZE_ADDRESS__)
#  define WITH_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define WITH_ADDRESS_SANITIZER 1
#  endif
#endif

#define PRECISIONS 5
#define MOST_TOKENS 1024

static const char *const architectures[] = {"tiny-gpt", "tiny-gpt2", "tiny-llama"};

static fp8gpt_config small_config(const char *preset) {
  fp8gpt_config config;
  assert_ok(fp8gpt_config_preset(preset, &config));
  config.layers = 2;
  config.hidden = 64;
  config.heads = 4;
  config.kv_heads = config.activation == FP8GPT_SWIGLU ? 2 : 4;
  config.ffn_hidden = 112;
  config.vocabulary = 61;
  config.sequence = 70;
  config.init_std = 0.1f;
  return config;
}

static fp8gpt_model *create_model(fp8core_context *context, const fp8gpt_config *config, fp8gpt_precision precision,
                                  int batch) {
  fp8gpt_model_options options = fp8gpt_model_options_default();
  fp8gpt_model *model;
  options.precision = precision;
  options.batch = batch;
  options.seed = 5;
  assert_ok(fp8gpt_model_create(&model, context, config, &options));
  return model;
}

static fp8gpt_model *create_with(fp8core_context *context, const fp8gpt_config *config,
                                 const fp8gpt_model_options *options) {
  fp8gpt_model *model;
  assert_ok(fp8gpt_model_create(&model, context, config, options));
  return model;
}

typedef struct text {
  int32_t tokens[MOST_TOKENS];
  int32_t targets[MOST_TOKENS];
  fp8gpt_batch batch;
} text;

static void fill_text(text *filled, uint64_t seed, int sequences, int length, int vocabulary, int every) {
  test_random random = {seed};
  assert_true(sequences * length <= MOST_TOKENS);
  for (int i = 0; i < sequences * length; i++) {
    filled->tokens[i] = (int32_t)(test_random_bits(&random) % (uint64_t)vocabulary);
    filled->targets[i] = (int32_t)(test_random_bits(&random) % (uint64_t)vocabulary);
    if (every && i % every == 1) filled->targets[i] = -1;
  }
  filled->batch = (fp8gpt_batch){sequences, length, filled->tokens, filled->targets};
}

static fp8gpt_parameter parameter_of(const fp8gpt_model *model, int64_t index) {
  fp8gpt_parameter parameter;
  assert_ok(fp8gpt_model_parameter(model, index, &parameter));
  return parameter;
}

// Of a tensor without memory too.
static size_t bytes_of(const fp8core_tensor *tensor) {
  size_t bytes = fp8core_dtype_size(tensor->dtype);
  for (int i = 0; i < tensor->dimensions; i++) bytes *= (size_t)tensor->shape[i];
  return bytes;
}

static void *taken(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  assert_non_null(memory);
  return memory;
}

// Everything that a pass may change, in one block: gradients, their scales, and the scaling state.
typedef struct snapshot {
  unsigned char *bytes;
  size_t size;
} snapshot;

static snapshot take_snapshot(fp8gpt_model *model, int with_gradients) {
  fp8core_scaling *scaling = fp8gpt_model_scaling(model);
  snapshot shot = {NULL, fp8core_scaling_saved_bytes(scaling)};
  for (int64_t i = 0; i < fp8gpt_model_parameters(model) && with_gradients; i++) {
    const fp8gpt_parameter parameter = parameter_of(model, i);
    shot.size += bytes_of(&parameter.gradient) + sizeof(float);
  }
  shot.bytes = taken(shot.size);
  unsigned char *to = shot.bytes;
  for (int64_t i = 0; i < fp8gpt_model_parameters(model) && with_gradients; i++) {
    const fp8gpt_parameter parameter = parameter_of(model, i);
    const float scale = parameter.gradient.scale_inverse ? *parameter.gradient.scale_inverse : 1.0f;
    memcpy(to, parameter.gradient.data, bytes_of(&parameter.gradient));
    to += bytes_of(&parameter.gradient);
    memcpy(to, &scale, sizeof(scale));
    to += sizeof(scale);
  }
  if (scaling) assert_ok(fp8core_scaling_save(scaling, to, fp8core_scaling_saved_bytes(scaling)));
  return shot;
}

static void assert_same(snapshot one, snapshot other, const char *what) {
  if (one.size != other.size || memcmp(one.bytes, other.bytes, one.size) != 0) fail_msg("%s: bits differ", what);
  free(one.bytes);
  free(other.bytes);
}

// A gradient's or weight's values, as what they stand for.
static double *values_of(const fp8core_tensor *tensor) {
  const int64_t elements = fp8core_tensor_elements(tensor);
  const size_t size = fp8core_dtype_size(tensor->dtype);
  const double scale = tensor->scale_inverse ? (double)*tensor->scale_inverse : 1.0;
  double *values = taken((size_t)elements * sizeof(double));
  for (int64_t i = 0; i < elements; i++) {
    uint32_t code = 0;
    memcpy(&code, (const unsigned char *)tensor->data + (size_t)i * size, size);
    values[i] = (double)fp8core_decode(tensor->dtype, code) * scale;
  }
  return values;
}

// Two steps of two micro-batches, so that delayed scales come from a history in the second.
static snapshot two_steps(fp8gpt_model *model, const text *given, float losses[4]) {
  for (int pass = 0; pass < 4; pass++) {
    assert_ok(fp8gpt_model_train(model, &given->batch, pass % 2 == 0, 0.5f, pass / 2, pass % 2, &losses[pass]));
    if (pass == 1) assert_ok(fp8gpt_model_end_step(model));
  }
  return take_snapshot(model, 1);
}

static void assert_same_losses(const float *one, const float *other, const char *what) {
  for (int i = 0; i < 4; i++)
    if (memcmp(&one[i], &other[i], sizeof(float)) != 0)
      fail_msg("%s: loss %d is %.9g and %.9g", what, i, (double)one[i], (double)other[i]);
}

// The same bits on 1, 2, 3 and 5 threads, again, and with recomputation.
static void test_bits(void **state) {
  (void)state;
  for (int architecture = 0; architecture < 3; architecture++)
    for (int precision = 0; precision < PRECISIONS; precision++)
      for (int just_in_time = 0; just_in_time < (precision >= FP8GPT_TE ? 2 : 1); just_in_time++) {
        fp8gpt_config config = small_config(architectures[architecture]);
        fp8gpt_model_options options = fp8gpt_model_options_default();
        text given;
        snapshot first = {NULL, 0};
        float losses[4];
        char what[128];
        options.precision = (fp8gpt_precision)precision;
        options.batch = 5;
        options.seed = 5;
        if (just_in_time) options.scaling.policy = FP8CORE_SCALING_JUST_IN_TIME;
        config.dropout = architecture == 1 ? 0.1f : 0.0f;
        fill_text(&given, 3, 5, 67, config.vocabulary, 5);
        static const int threads[] = {1, 2, 3, 5, 1, 2};
        for (int run = 0; run < 6; run++) {
          float again[4];
          fp8core_context *context = test_context(threads[run], FP8CORE_ISA_AUTO);
          options.recompute = run >= 4;
          fp8gpt_model *model = create_with(context, &config, &options);
          const snapshot shot = two_steps(model, &given, run == 0 ? losses : again);
          (void)snprintf(what, sizeof(what), "%s in %s, %s, %d threads%s", architectures[architecture],
                         fp8gpt_precision_name(options.precision), just_in_time ? "just in time" : "delayed",
                         threads[run], options.recompute ? ", recomputed" : "");
          if (run == 0) {
            first = shot;
            for (int i = 0; i < 4; i++)
              if (!(losses[i] > 3.0f && losses[i] < 6.0f)) fail_msg("%s: loss %g", what, (double)losses[i]);
          } else {
            assert_same_losses(losses, again, what);
            const snapshot copy = {taken(first.size), first.size};
            memcpy(copy.bytes, first.bytes, first.size);
            assert_same(copy, shot, what);
          }
          // And the next pass of the same model.
          if (run == 0) {
            float loss;
            assert_ok(fp8gpt_model_train(model, &given.batch, 1, 0.5f, 1, 0, &loss));
            if (options.scaling.policy == FP8CORE_SCALING_DELAYED || precision < FP8GPT_TE)
              assert_memory_equal(&loss, &losses[2], sizeof(loss));
          }
          fp8gpt_model_destroy(&model);
          fp8core_context_destroy(&context);
        }
        free(first.bytes);
      }
}

// Difference of two models' gradients as a share of their norm, over all parameters.
static double gradient_difference(const fp8gpt_model *one, const fp8gpt_model *other, double *tensor_worst) {
  double difference = 0.0;
  double norm = 0.0;
  if (tensor_worst) *tensor_worst = 0.0;
  for (int64_t i = 0; i < fp8gpt_model_parameters(one); i++) {
    const fp8gpt_parameter a = parameter_of(one, i);
    const fp8gpt_parameter b = parameter_of(other, i);
    double *left = values_of(&a.gradient);
    double *right = values_of(&b.gradient);
    double own = 0.0;
    double own_norm = 0.0;
    for (int64_t j = 0; j < fp8core_tensor_elements(&a.gradient); j++) {
      own += (left[j] - right[j]) * (left[j] - right[j]);
      own_norm += right[j] * right[j];
    }
    difference += own;
    norm += own_norm;
    if (tensor_worst && own_norm > 0.0) *tensor_worst = fmax(*tensor_worst, sqrt(own / own_norm));
    free(left);
    free(right);
  }
  return sqrt(difference / norm);
}

// Micro-batches of one sequence add up to the batch: FP32 to its rounding, BF16 (FP32 gradients) to BF16's in passes,
// FP8 to one rounding of the sum a micro-batch.
static void test_micro_batches(void **state) {
  (void)state;
  static const double bounds[PRECISIONS] = {2e-6, 2e-2, 0.25, 0.25, 0.25};
  for (int architecture = 0; architecture < 3; architecture++)
    for (int precision = 0; precision < PRECISIONS; precision++) {
      const fp8gpt_config config = small_config(architectures[architecture]);
      fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
      fp8gpt_model *whole = create_model(context, &config, (fp8gpt_precision)precision, 4);
      fp8gpt_model *parts = create_model(context, &config, (fp8gpt_precision)precision, 1);
      text given;
      fill_text(&given, 9, 4, 40, config.vocabulary, 0);
      float loss;
      for (int step = 0; step < 2; step++) {
        double sum = 0.0;
        assert_ok(fp8gpt_model_train(whole, &given.batch, 1, 1.0f, step, 0, &loss));
        for (int i = 0; i < 4; i++) {
          const fp8gpt_batch part = {1, 40, given.tokens + 40 * i, given.targets + 40 * i};
          float part_loss;
          assert_ok(fp8gpt_model_train(parts, &part, i == 0, 0.25f, step, i, &part_loss));
          sum += (double)part_loss / 4.0;
        }
        const double loss_bound = precision == FP8GPT_FP32 ? 1e-6 : precision == FP8GPT_BF16 ? 1e-4 : 2e-2;
        if (!(fabs(sum - (double)loss) <= loss_bound * (double)loss))
          fail_msg("loss of parts %g, of the whole %g", sum, (double)loss);
        const double difference = gradient_difference(parts, whole, NULL);
        if (!(difference <= bounds[precision]))
          fail_msg("%s in %s, step %d: gradients differ by %g, expected at most %g", architectures[architecture],
                   fp8gpt_precision_name((fp8gpt_precision)precision), step, difference, bounds[precision]);
        assert_ok(fp8gpt_model_end_step(whole));
        assert_ok(fp8gpt_model_end_step(parts));
      }
      fp8gpt_model_destroy(&whole);
      fp8gpt_model_destroy(&parts);
      fp8core_context_destroy(&context);
    }
}

// The codes of an FP8 weight under a reciprocal scale that is a power of two, with one code of 448: BF16 holds its
// values, and a cast of those just in time gives the same codes and scale.
static void round_to_power_of_two(const fp8core_tensor *weight) {
  int exponent;
  (void)frexpf(*weight->scale_inverse, &exponent);
  *(float *)(uintptr_t)weight->scale_inverse = ldexpf(1.0f, exponent);
  unsigned char *codes = weight->data;
  codes[0] = 0x7e;
}

// The noise of accumulating in E4M3: gradients of N micro-batches in fp8-o1, against the same products accumulated in
// FP32. Those are te's, whose BF16 weights have the values of the E4M3 ones. Where all micro-batches are the same text,
// each adds a 64th of what is there in the end: less than half a step of E4M3, but on the average not lost.
static void test_accumulation_noise(void **state) {
  (void)state;
  static const int numbers[] = {1, 2, 4, 8, 16, 32, 64};
  for (int policy = 0; policy < 2; policy++) {
    double before = 1e9;
    for (size_t n = 0; n < sizeof(numbers) / sizeof(*numbers); n++) {
      const int same = numbers[n] == 64;
      const fp8gpt_config config = small_config("tiny-gpt");
      fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
      fp8gpt_model_options options = fp8gpt_model_options_default();
      options.seed = 5;
      options.scaling.policy = (fp8core_scaling_policy)policy;
      options.precision = FP8GPT_FP8_O1;
      fp8gpt_model *narrow = create_with(context, &config, &options);
      options.precision = FP8GPT_TE;
      fp8gpt_model *wide = create_with(context, &config, &options);
      options.precision = FP8GPT_FP32;
      fp8gpt_model *exact = create_with(context, &config, &options);
      for (int64_t i = 0; i < fp8gpt_model_parameters(wide); i++) {
        const fp8gpt_parameter from = parameter_of(narrow, i);
        const fp8gpt_parameter to = parameter_of(wide, i);
        if (from.linear) round_to_power_of_two(&from.weight);
        const fp8gpt_parameter exact_to = parameter_of(exact, i);
        assert_ok(fp8core_cast(context, NULL, &from.weight, &to.weight));
        assert_ok(fp8core_cast(context, NULL, &from.weight, &exact_to.weight));
      }
      double signal = 0.0;
      double noise = 0.0;
      double product_noise = 0.0;
      double along = 0.0;
      for (int step = 0; step < 3; step++) {
        for (int i = 0; i < numbers[n]; i++) {
          text given;
          float loss;
          fill_text(&given, (uint64_t)(same ? 1000 : 1000 + i), 1, 64, config.vocabulary, 0);
          assert_ok(fp8gpt_model_train(narrow, &given.batch, i == 0, 1.0f / (float)numbers[n], step, i, &loss));
          assert_ok(fp8gpt_model_train(wide, &given.batch, i == 0, 1.0f / (float)numbers[n], step, i, &loss));
          assert_ok(fp8gpt_model_train(exact, &given.batch, i == 0, 1.0f / (float)numbers[n], step, i, &loss));
        }
        if (step < 2) {
          assert_ok(fp8gpt_model_end_step(narrow));
          assert_ok(fp8gpt_model_end_step(wide));
        }
      }
      for (int64_t i = 0; i < fp8gpt_model_parameters(wide); i++) {
        const fp8gpt_parameter ours = parameter_of(narrow, i);
        const fp8gpt_parameter theirs = parameter_of(wide, i);
        if (!ours.linear) continue;
        double *left = values_of(&ours.gradient);
        double *right = values_of(&theirs.gradient);
        const float *true_gradient = parameter_of(exact, i).gradient.data;
        for (int64_t j = 0; j < fp8core_tensor_elements(&ours.gradient); j++) {
          noise += (left[j] - right[j]) * (left[j] - right[j]);
          product_noise += (right[j] - (double)true_gradient[j]) * (right[j] - (double)true_gradient[j]);
          signal += right[j] * right[j];
          along += left[j] * right[j];
        }
        free(left);
        free(right);
      }
      const double ratio = 10.0 * log10(signal / noise);
      print_message("%s scaling, %2d micro-batches: E4M3 accumulation %.1f dB, FP8 products %.1f dB\n",
                    policy == 0 ? "just-in-time" : "delayed", numbers[n], ratio, 10.0 * log10(signal / product_noise));
      // 31.6 dB is one rounding to nearest, and the square of the k-th sum k of N parts of the whole's, as the texts
      // have nothing in common (or less, where they are the same). From the ninth on sums are rounded stochastically,
      // with twice the noise.
      double noises = 0.0;
      for (int k = 1; k <= numbers[n]; k++) noises += (k > 8 ? 2.0 : 1.0) * k / numbers[n];
      const double expected = 30.5 - 10.0 * log10(noises);
      if (!(ratio >= expected)) fail_msg("expected at least %.1f dB", expected);
      if (!same && !(ratio <= before + 1.0)) fail_msg("expected no more than with fewer micro-batches");
      if (same && !(fabs(along / signal - 1.0) < 0.01))
        fail_msg("the sum is %.4f of what it should be, expected 1 on the average", along / signal);
      before = ratio;
      fp8gpt_model_destroy(&narrow);
      fp8gpt_model_destroy(&wide);
      fp8gpt_model_destroy(&exact);
      fp8core_context_destroy(&context);
    }
  }
}

// An evaluation in the middle of a step changes neither gradients nor scaling states, and is the training loss.
static void test_loss(void **state) {
  (void)state;
  for (int architecture = 0; architecture < 3; architecture++)
    for (int precision = 0; precision < PRECISIONS; precision++) {
      const fp8gpt_config config = small_config(architectures[architecture]);
      fp8core_context *context = test_context(2, FP8CORE_ISA_AUTO);
      fp8gpt_model *model = create_model(context, &config, (fp8gpt_precision)precision, 3);
      fp8gpt_model_options options = fp8gpt_model_options_default();
      options.precision = (fp8gpt_precision)precision;
      options.batch = 3;
      options.seed = 5;
      options.inference = 1;
      fp8gpt_model *inference = create_with(context, &config, &options);
      text given;
      text other;
      fill_text(&given, 4, 3, 70, config.vocabulary, 4);
      fill_text(&other, 5, 2, 33, config.vocabulary, 0);
      float evaluated;
      float inferred;
      float loss;
      for (int step = 0; step < 3; step++) {
        assert_ok(fp8gpt_model_loss(model, &given.batch, &evaluated));
        assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, step, 0, &loss));
        // The first step is scaled just in time, as evaluations are.
        const int same = precision < FP8GPT_TE || step == 0;
        if (same ? memcmp(&evaluated, &loss, sizeof(loss)) != 0
                 : !(fabs((double)evaluated - (double)loss) <= 2e-2 * (double)loss))
          fail_msg("%s in %s, step %d: evaluated %.9g, trained %.9g", architectures[architecture],
                   fp8gpt_precision_name((fp8gpt_precision)precision), step, (double)evaluated, (double)loss);
        const snapshot before = take_snapshot(model, 1);
        assert_ok(fp8gpt_model_loss(model, &other.batch, &inferred));
        assert_same(before, take_snapshot(model, 1), "an evaluation");
        assert_ok(fp8gpt_model_loss(inference, &given.batch, &inferred));
        assert_memory_equal(&evaluated, &inferred, sizeof(inferred));
        // Micro-batches around an evaluation.
        float again;
        assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, step, 0, &again));
        assert_memory_equal(&again, &loss, sizeof(loss));
        assert_ok(fp8gpt_model_end_step(model));
      }
      // Against the FP64 reference with the weights as they are stored.
      static const double bounds[PRECISIONS] = {2e-6, 5e-3, 3e-2, 3e-2, 3e-2};
      reference *right = reference_create(model, 5);
      const double expected = reference_loss(right, &given.batch, -1, 0, NULL);
      if (!(fabs((double)evaluated - expected) <= bounds[precision] * expected))
        fail_msg("%s in %s: loss %.9g, expected %.9g", architectures[architecture],
                 fp8gpt_precision_name((fp8gpt_precision)precision), (double)evaluated, expected);
      reference_destroy(right);
      fp8gpt_model_destroy(&model);
      fp8gpt_model_destroy(&inference);
      fp8core_context_destroy(&context);
    }
}

// Logits of a text in pieces of these sizes, repeated, against those of the whole text in FP64.
static void test_next(void **state) {
  (void)state;
  double worst[PRECISIONS][4] = {{0.0}};
  enum { LENGTH = 70 };
  // Of the largest logit: FP32's rounding, BF16's through two layers, E4M3's.
  static const double bounds[PRECISIONS] = {5e-6, 3e-2, 0.3, 0.3, 0.3};
  static const int pieces[][3] = {{LENGTH, LENGTH, LENGTH}, {1, 1, 1}, {33, 1, 5}, {7, 20, 2}};
  for (int architecture = 0; architecture < 3; architecture++)
    for (int precision = 0; precision < PRECISIONS; precision++) {
      const fp8gpt_config config = small_config(architectures[architecture]);
      fp8core_context *context = test_context(2, FP8CORE_ISA_AUTO);
      fp8gpt_model_options options = fp8gpt_model_options_default();
      options.precision = (fp8gpt_precision)precision;
      options.inference = 1;
      options.seed = 5;
      fp8gpt_model *model = create_with(context, &config, &options);
      text given;
      fill_text(&given, 6, 1, LENGTH, config.vocabulary, 0);
      reference *right = reference_create(model, 5);
      double *expected = taken((size_t)(LENGTH * config.vocabulary) * sizeof(double));
      float *logits = taken((size_t)config.vocabulary * sizeof(float));
      (void)reference_loss(right, &given.batch, -1, 0, expected);
      for (size_t way = 0; way < sizeof(pieces) / sizeof(*pieces); way++) {
        int position = 0;
        for (int i = 0; position < LENGTH; i++) {
          const int count = pieces[way][i % 3] < LENGTH - position ? pieces[way][i % 3] : LENGTH - position;
          assert_ok(fp8gpt_model_next(model, given.tokens + position, count, position, logits));
          position += count;
          // Evaluations do not touch the cache.
          if (i == 2) {
            float loss;
            assert_ok(fp8gpt_model_loss(model, &given.batch, &loss));
          }
          double largest = 0.0;
          double difference = 0.0;
          for (int j = 0; j < config.vocabulary; j++) {
            const double at = expected[(position - 1) * config.vocabulary + j];
            largest = fmax(largest, fabs(at));
            difference = fmax(difference, fabs((double)logits[j] - at));
          }
          worst[precision][way] = fmax(worst[precision][way], difference / largest);
          if (!(difference <= bounds[precision] * largest))
            fail_msg("%s in %s, pieces of %d, %d, %d: logits after %d tokens are off by %g of %g",
                     architectures[architecture], fp8gpt_precision_name(options.precision), pieces[way][0],
                     pieces[way][1], pieces[way][2], position, difference, largest);
        }
      }
      // Back to an earlier position, with other tokens.
      float *again = taken((size_t)config.vocabulary * sizeof(float));
      assert_ok(fp8gpt_model_next(model, given.tokens, 20, 0, logits));
      assert_ok(fp8gpt_model_next(model, given.tokens + 20, 1, 20, logits));
      assert_ok(fp8gpt_model_next(model, given.tokens + 40, 5, 20, again));
      assert_ok(fp8gpt_model_next(model, given.tokens + 20, 1, 20, again));
      assert_memory_equal(logits, again, (size_t)config.vocabulary * sizeof(float));
      free(again);
      free(logits);
      free(expected);
      reference_destroy(right);
      fp8gpt_model_destroy(&model);
      fp8core_context_destroy(&context);
    }
  for (int precision = 0; precision < PRECISIONS; precision++)
    print_message("%-6s differences of logits: whole %.2g, one by one %.2g, pieces %.2g and %.2g of the largest\n",
                  fp8gpt_precision_name((fp8gpt_precision)precision), worst[precision][0], worst[precision][1],
                  worst[precision][2], worst[precision][3]);
}

// Bytes by class: weights and gradients as table 6 of FP8-LM has them, the rest against the process's own count.
static void test_memory(void **state) {
  (void)state;
  static const int weight_bytes[PRECISIONS][2] = {{4, 4}, {2, 2}, {2, 2}, {1, 2}, {1, 2}};
  static const int gradient_bytes[PRECISIONS][2] = {{4, 4}, {4, 4}, {4, 4}, {1, 2}, {1, 2}};
  for (int precision = 0; precision < PRECISIONS; precision++)
    for (int kind = 0; kind < 3; kind++) {
      fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
      fp8gpt_config config = small_config("tiny-gpt");
      fp8gpt_model_options options = fp8gpt_model_options_default();
      fp8gpt_memory memory;
      text given;
      float loss;
      options.precision = (fp8gpt_precision)precision;
      // Small enough that no block is rounded to huge pages.
      options.batch = 2;
      options.recompute = kind == 1;
      options.inference = kind == 2;
      fill_text(&given, 8, 2, 70, config.vocabulary, 0);
#if defined(HAVE_MALLINFO2)
      const struct mallinfo2 before = mallinfo2();
#endif
      fp8gpt_model *model = create_with(context, &config, &options);
      assert_ok(fp8gpt_memory_report(model, &memory));
      int64_t weights = 0;
      int64_t gradients = 0;
      int64_t parameters = 0;
      for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
        const fp8gpt_parameter parameter = parameter_of(model, i);
        const int64_t elements = fp8core_tensor_elements(&parameter.weight);
        parameters += elements;
        weights += elements * weight_bytes[precision][!parameter.linear];
        if (!options.inference)
          gradients += elements * (parameter.dimensions == 1 ? 4 : gradient_bytes[precision][!parameter.linear]);
      }
      assert_int_equal(memory.parameters, parameters);
      assert_int_equal(memory.parameters, fp8gpt_config_parameters(&config));
      assert_int_equal(memory.weight_bytes, weights);
      assert_int_equal(memory.gradient_bytes, gradients);
      const int64_t all =
        memory.weight_bytes + memory.gradient_bytes + memory.activation_bytes + memory.workspace_bytes;
#if defined(HAVE_MALLINFO2)
      const struct mallinfo2 after = mallinfo2();
      const int64_t held = (int64_t)(after.uordblks + after.hblkhd) - (int64_t)(before.uordblks + before.hblkhd);
      // Beyond it only the tables on the host, and what malloc adds to align large blocks.
      if (after.uordblks > 0 && !(held >= all && held <= all + 65536))
        fail_msg("%s, kind %d: the process holds %lld bytes more, the report says %lld",
                 fp8gpt_precision_name(options.precision), kind, (long long)held, (long long)all);
#endif
      // Passes allocate nothing: of any size, with and without history, of the first and of many micro-batches.
      for (int step = 0; step < 2; step++)
        for (int length = 70; length > 0; length -= 23) {
          given.batch.length = length;
          for (int i = 0; i < 10 && !options.inference; i++)
            assert_ok(fp8gpt_model_train(model, &given.batch, i == 0, 0.1f, step, i, &loss));
          assert_ok(fp8gpt_model_loss(model, &given.batch, &loss));
          if (options.inference) {
            float logits[61];
            assert_int_equal(config.vocabulary, 61);
            assert_ok(fp8gpt_model_next(model, given.tokens, length, 0, logits));
          }
          assert_ok(fp8gpt_model_end_step(model));
        }
#if defined(HAVE_MALLINFO2)
      const struct mallinfo2 later = mallinfo2();
      assert_int_equal(later.uordblks + later.hblkhd, after.uordblks + after.hblkhd);
#endif
      fp8gpt_memory again;
      assert_ok(fp8gpt_memory_report(model, &again));
      assert_memory_equal(&again, &memory, sizeof(memory));
      if (kind == 0)
        print_message("%-6s %lld parameters: weights %lld, gradients %lld, activations %lld, workspace %lld bytes\n",
                      fp8gpt_precision_name(options.precision), (long long)memory.parameters,
                      (long long)memory.weight_bytes, (long long)memory.gradient_bytes,
                      (long long)memory.activation_bytes, (long long)memory.workspace_bytes);
      (void)all;
      fp8gpt_model_destroy(&model);
      fp8core_context_destroy(&context);
    }
}

// Functions of seed, name and element alone, with the deviations that the config names; weights are their casts.
static void test_initial_weights(void **state) {
  (void)state;
  for (int architecture = 0; architecture < 3; architecture++) {
    fp8gpt_config config = small_config(architectures[architecture]);
    config.init_std = 0.02f;
    fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
    fp8gpt_model *first = create_model(context, &config, FP8GPT_FP32, 1);
    for (int64_t i = 0; i < fp8gpt_model_parameters(first); i++) {
      const fp8gpt_parameter parameter = parameter_of(first, i);
      const int64_t elements = fp8core_tensor_elements(&parameter.weight);
      const float *values = parameter.weight.data;
      double square = 0.0;
      double mean = 0.0;
      if (parameter.dimensions == 1) {
        const float expected = strstr(parameter.name, "norm.weight") ? 1.0f : 0.0f;
        for (int64_t j = 0; j < elements; j++) assert_true(values[j] == expected);
        continue;
      }
      for (int64_t j = 0; j < elements; j++) {
        mean += (double)values[j] / (double)elements;
        square += (double)values[j] * (double)values[j] / (double)elements;
      }
      const int residual = strstr(parameter.name, "projection") || strstr(parameter.name, "fc2");
      const double expected = 0.02 / (residual ? sqrt(2.0 * config.layers) : 1.0);
      const double spread = 4.0 / sqrt(2.0 * (double)elements);
      if (!(fabs(sqrt(square) / expected - 1.0) <= spread && fabs(mean) <= spread * 2.0 * expected))
        fail_msg("%s: mean %g, deviation %g, expected %g", parameter.name, mean, sqrt(square), expected);
    }
    for (int precision = 0; precision < PRECISIONS; precision++)
      for (int threads = 1; threads <= 3; threads++) {
        fp8core_context *other_context = test_context(threads, FP8CORE_ISA_AUTO);
        fp8gpt_model *other = create_model(other_context, &config, (fp8gpt_precision)precision, 2);
        for (int64_t i = 0; i < fp8gpt_model_parameters(first); i++) {
          const fp8gpt_parameter one = parameter_of(first, i);
          const fp8gpt_parameter two = parameter_of(other, i);
          const int64_t elements = fp8core_tensor_elements(&one.weight);
          float *values = taken((size_t)elements * sizeof(float));
          assert_string_equal(one.name, two.name);
          assert_ok(fp8gpt_model_initial_weight(other, i, values));
          assert_memory_equal(values, one.weight.data, (size_t)elements * sizeof(float));
          double *stored = values_of(&two.weight);
          double largest = 0.0;
          for (int64_t j = 0; j < elements; j++) largest = fmax(largest, fabs((double)values[j]));
          for (int64_t j = 0; j < elements; j++) {
            const double value = (double)values[j];
            const double bound = two.weight.dtype == FP8CORE_FP32   ? 0.0
                                 : two.weight.dtype == FP8CORE_BF16 ? 0x1p-8 * fabs(value)
                                                                    : 0x1.01p-4 * fabs(value) + 0x1p-18 * largest;
            if (!(fabs(stored[j] - value) <= bound))
              fail_msg("%s [%lld] is %g, expected %g", one.name, (long long)j, stored[j], value);
          }
          free(stored);
          free(values);
        }
        fp8gpt_model_destroy(&other);
        fp8core_context_destroy(&other_context);
      }
    // Another seed, and two parameters of a model, have nothing in common.
    fp8gpt_model_options options = fp8gpt_model_options_default();
    options.precision = FP8GPT_FP32;
    options.seed = 6;
    fp8gpt_model *other = create_with(context, &config, &options);
    const fp8gpt_parameter one = parameter_of(first, 0);
    const fp8gpt_parameter two = parameter_of(other, 0);
    int same = 0;
    for (int64_t j = 0; j < 64; j++) same += ((float *)one.weight.data)[j] == ((float *)two.weight.data)[j];
    assert_int_equal(same, 0);
    fp8gpt_model_destroy(&first);
    fp8gpt_model_destroy(&other);
    fp8core_context_destroy(&context);
  }
}

// Memory that comes and goes with the parts, as under ZeRO stage 3: weights and gradients lie in a store, and in memory
// of their own only between acquire and release, which ends in poison.
typedef struct parts_store {
  fp8gpt_model *model;
  // One a parameter.
  void **weights;
  void **gradients;
  void **lent_weights;
  void **lent_gradients;
  float *inverses;
  int held[8][2];
  char calls[256];
  int fails_at;
} parts_store;

static fp8core_status tell_call(parts_store *store, const char *what, int part, fp8gpt_direction direction) {
  const size_t length = strlen(store->calls);
  (void)snprintf(store->calls + length, sizeof(store->calls) - length, " %s%d%s", what, part,
                 direction == FP8GPT_BACKWARD ? "b" : "f");
  if (store->fails_at == 0 || --store->fails_at > 0) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_PEER, "a hook of the test's");
}

static fp8core_status lend(void *user_data, int part, fp8gpt_direction direction) {
  parts_store *store = user_data;
  const fp8core_status status = tell_call(store, "+", part, direction);
  if (status != FP8CORE_OK) return status;
  assert_int_equal(store->held[part][0] + store->held[part][1], 0);
  store->held[part][direction] = 1;
  for (int64_t i = 0; i < fp8gpt_model_parameters(store->model); i++) {
    const fp8gpt_parameter parameter = parameter_of(store->model, i);
    if (parameter.part != part) continue;
    fp8core_tensor weight = parameter.weight;
    memcpy(store->lent_weights[i], store->weights[i], bytes_of(&weight));
    weight.data = store->lent_weights[i];
    weight.scale_inverse = weight.dtype == FP8CORE_E4M3 ? &store->inverses[i] : NULL;
    assert_ok(fp8gpt_model_bind_weight(store->model, i, &weight));
    if (direction == FP8GPT_FORWARD) continue;
    memcpy(store->lent_gradients[i], store->gradients[i], bytes_of(&parameter.gradient));
    assert_ok(fp8gpt_model_bind_gradient(store->model, i, store->lent_gradients[i]));
  }
  return FP8CORE_OK;
}

static fp8core_status take_back(void *user_data, int part, fp8gpt_direction direction) {
  parts_store *store = user_data;
  assert_int_equal(store->held[part][direction], 1);
  store->held[part][direction] = 0;
  for (int64_t i = 0; i < fp8gpt_model_parameters(store->model); i++) {
    const fp8gpt_parameter parameter = parameter_of(store->model, i);
    if (parameter.part != part) continue;
    memset(store->lent_weights[i], 0xff, bytes_of(&parameter.weight));
    if (direction == FP8GPT_FORWARD) continue;
    memcpy(store->gradients[i], store->lent_gradients[i], bytes_of(&parameter.gradient));
    memset(store->lent_gradients[i], 0xff, bytes_of(&parameter.gradient));
  }
  return tell_call(store, "-", part, direction);
}

static void **taken_table(const fp8gpt_model *model, int gradients) {
  void **table = taken((size_t)fp8gpt_model_parameters(model) * sizeof(*table));
  for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
    const fp8gpt_parameter parameter = parameter_of(model, i);
    const size_t bytes = bytes_of(gradients ? &parameter.gradient : &parameter.weight);
    table[i] = taken(bytes);
    memset(table[i], 0xff, bytes);
  }
  return table;
}

static void free_table(const fp8gpt_model *model, void **table) {
  for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) free(table[i]);
  free(table);
}

static void test_parts(void **state) {
  (void)state;
  static const char *const untied = " +0f -0f +1f -1f +2f -2f +3b -3b +2b -2b +1b -1b +0b -0b";
  static const char *const tied = " +0f -0f +1f -1f +2f -2f +0b +3b -3b +2b -2b +1b -1b -0b";
  for (size_t a = 0; a < 3; a++)
    for (int precision = 0; precision <= FP8GPT_FP8_O3; precision++)
      for (int recompute = 0; recompute < 2; recompute++) {
        fp8gpt_config config = small_config(architectures[a]);
        config.dropout = 0.1f;
        fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
        fp8gpt_model_options options = fp8gpt_model_options_default();
        options.precision = (fp8gpt_precision)precision;
        options.batch = 2;
        options.recompute = recompute;
        fp8gpt_model *own = create_with(context, &config, &options);
        options.external_weights = 1;
        options.external_gradients = 1;
        fp8gpt_model *model = create_with(context, &config, &options);
        const int64_t count = fp8gpt_model_parameters(model);
        fp8gpt_memory memory[2];
        assert_ok(fp8gpt_memory_report(own, &memory[0]));
        assert_ok(fp8gpt_memory_report(model, &memory[1]));
        assert_int_equal(memory[1].weight_bytes, 0);
        assert_int_equal(memory[1].gradient_bytes, 0);
        assert_true(memory[1].workspace_bytes <= memory[0].workspace_bytes);

        parts_store store = {.model = model,
                             .weights = taken_table(model, 0),
                             .gradients = taken_table(model, 1),
                             .lent_weights = taken_table(model, 0),
                             .lent_gradients = taken_table(model, 1),
                             .inverses = taken((size_t)count * sizeof(float))};
        int last = 0;
        for (int64_t i = 0; i < count; i++) {
          const fp8gpt_parameter parameter = parameter_of(own, i);
          memcpy(store.weights[i], parameter.weight.data, bytes_of(&parameter.weight));
          if (parameter.weight.scale_inverse) store.inverses[i] = *parameter.weight.scale_inverse;
          assert_true(parameter.part == last || parameter.part == last + 1);
          last = parameter.part;
        }
        assert_int_equal(last, fp8gpt_model_parts(model) - 1);
        text given;
        float losses[2];
        fill_text(&given, 12, 2, 30, config.vocabulary, 0);
        assert_fails(fp8gpt_model_loss(model, &given.batch, &losses[0]), FP8CORE_ERROR_INVALID_ARGUMENT,
                     "\"embedding.token.weight\" has no weight, expected one from fp8gpt_model_bind_weight()");
        const fp8gpt_hooks hooks = {sizeof(hooks), &store, lend, take_back};
        assert_ok(fp8gpt_model_set_hooks(model, &hooks));
        for (int step = 0; step < 2; step++) {
          for (int i = 0; i < 3; i++) {
            fill_text(&given, (uint64_t)(20 + i), 2, 30, config.vocabulary, 0);
            store.calls[0] = '\0';
            assert_ok(fp8gpt_model_train(own, &given.batch, i == 0, 0.5f, step, i, &losses[0]));
            assert_ok(fp8gpt_model_train(model, &given.batch, i == 0, 0.5f, step, i, &losses[1]));
            assert_memory_equal(&losses[0], &losses[1], sizeof(*losses));
            assert_string_equal(store.calls, config.tied_embeddings ? tied : untied);
          }
          for (int64_t i = 0; i < count; i++) {
            const fp8gpt_parameter expected = parameter_of(own, i);
            assert_memory_equal(store.gradients[i], expected.gradient.data, bytes_of(&expected.gradient));
          }
          assert_ok(fp8gpt_model_end_step(own));
          assert_ok(fp8gpt_model_end_step(model));
        }
        store.calls[0] = '\0';
        assert_ok(fp8gpt_model_loss(own, &given.batch, &losses[0]));
        assert_ok(fp8gpt_model_loss(model, &given.batch, &losses[1]));
        assert_memory_equal(&losses[0], &losses[1], sizeof(*losses));
        assert_string_equal(store.calls, config.tied_embeddings ? " +0f -0f +1f -1f +2f -2f +0f +3f -3f -0f"
                                                                : " +0f -0f +1f -1f +2f -2f +3f -3f");
        // A hook's error ends the pass.
        store.calls[0] = '\0';
        store.fails_at = 6;
        assert_fails(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 2, 0, &losses[0]), FP8CORE_ERROR_PEER,
                     "a hook of the test's");
        assert_string_equal(store.calls, " +0f -0f +1f -1f +2f -2f");

        fp8gpt_hooks wrong = hooks;
        wrong.size--;
        assert_fails(fp8gpt_model_set_hooks(model, &wrong), FP8CORE_ERROR_VERSION_MISMATCH, "fp8gpt_hooks.size is ");
        assert_fails(fp8gpt_model_set_hooks(NULL, NULL), FP8CORE_ERROR_INVALID_ARGUMENT, "is NULL, expected a model");
        const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
        assert_fails(fp8gpt_model_bind_gradient(NULL, 0, &losses), invalid, "bind_gradient() is NULL");
        assert_fails(fp8gpt_model_bind_gradient(model, count, &losses), invalid, "expected 0 to ");
        assert_fails(fp8gpt_model_bind_gradient(model, 0, NULL), invalid, "NULL, expected memory");
        assert_fails(fp8gpt_model_bind_gradient(model, 0, (unsigned char *)&losses + 1), invalid, "an address that ");
        assert_int_equal(fp8gpt_model_parts(NULL), 0);
        fp8gpt_model_destroy(&own);
        free_table(model, store.weights);
        free_table(model, store.gradients);
        free_table(model, store.lent_weights);
        free_table(model, store.lent_gradients);
        free(store.inverses);
        fp8gpt_model_destroy(&model);
        fp8core_context_destroy(&context);
      }
}

static void test_bound_weights(void **state) {
  (void)state;
  for (int precision = 0; precision < PRECISIONS; precision++) {
    const fp8gpt_config config = small_config("tiny-llama");
    fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
    fp8gpt_model *model = create_model(context, &config, (fp8gpt_precision)precision, 2);
    text given;
    float before;
    float loss;
    fp8gpt_memory memory[2];
    fill_text(&given, 12, 2, 30, config.vocabulary, 0);
    assert_ok(fp8gpt_model_loss(model, &given.batch, &before));
    assert_ok(fp8gpt_memory_report(model, &memory[0]));
    const int64_t count = fp8gpt_model_parameters(model);
    void **copies = taken((size_t)count * sizeof(*copies));
    float *inverses = taken((size_t)count * sizeof(*inverses));
    for (int64_t i = 0; i < count; i++) {
      const fp8gpt_parameter parameter = parameter_of(model, i);
      fp8core_tensor weight = parameter.weight;
      copies[i] = taken(bytes_of(&weight));
      memcpy(copies[i], weight.data, bytes_of(&weight));
      memset(weight.data, 0xff, bytes_of(&weight));
      weight.data = copies[i];
      if (weight.scale_inverse) {
        inverses[i] = *weight.scale_inverse;
        weight.scale = NULL;
        weight.amax = NULL;
        weight.scale_inverse = &inverses[i];
      }
      assert_ok(fp8gpt_model_bind_weight(model, i, &weight));
      const fp8gpt_parameter bound = parameter_of(model, i);
      assert_ptr_equal(bound.weight.data, copies[i]);
    }
    // The model's own memory is all NaN now.
    assert_ok(fp8gpt_model_loss(model, &given.batch, &loss));
    assert_memory_equal(&loss, &before, sizeof(loss));
    assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 0, &loss));
    assert_memory_equal(&loss, &before, sizeof(loss));
    assert_ok(fp8gpt_memory_report(model, &memory[1]));
    assert_int_equal(memory[0].weight_bytes, memory[1].weight_bytes);
    // What the optimizer writes there is what the next pass reads, scales included.
    for (int64_t i = 0; i < count; i++) {
      const fp8gpt_parameter parameter = parameter_of(model, i);
      if (parameter.linear && parameter.weight.scale_inverse) inverses[i] *= 2.0f;
      if (!parameter.linear) memset(copies[i], 0, bytes_of(&parameter.weight));
    }
    assert_ok(fp8gpt_model_loss(model, &given.batch, &loss));
    // Without embeddings, norms and output all logits are 0.
    assert_true(fabs((double)loss - log(61.0)) < 1e-6);

    fp8gpt_parameter parameter = parameter_of(model, 2);
    assert_int_equal(parameter.linear, 1);
    fp8core_tensor wrong = parameter.weight;
    const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
    assert_fails(fp8gpt_model_bind_weight(NULL, 0, &wrong), invalid, "model of fp8gpt_model_bind_weight() is NULL");
    assert_fails(fp8gpt_model_bind_weight(model, -1, &wrong), invalid, "index is -1, expected 0 to ");
    assert_fails(fp8gpt_model_bind_weight(model, count, &wrong), invalid, "expected 0 to ");
    assert_fails(fp8gpt_model_bind_weight(model, 2, NULL), invalid, "NULL, expected a tensor");
    wrong.dtype = wrong.dtype == FP8CORE_FP32 ? FP8CORE_BF16 : FP8CORE_FP32;
    wrong.scale_inverse = NULL;
    wrong.scale = NULL;
    assert_fails(fp8gpt_model_bind_weight(model, 2, &wrong), invalid, ", expected ");
    wrong = parameter.weight;
    wrong.shape[1]--;
    assert_fails(fp8gpt_model_bind_weight(model, 2, &wrong), invalid, "has another shape, expected [");
    wrong = parameter.weight;
    wrong.shape[0]++;
    assert_fails(fp8gpt_model_bind_weight(model, 2, &wrong), invalid, "has another shape, expected [");
    wrong = parameter.weight;
    wrong.row_stride = wrong.shape[1] + 16;
    assert_fails(fp8gpt_model_bind_weight(model, 2, &wrong), invalid, "row stride of ");
    wrong = parameter.weight;
    wrong.device.type = FP8CORE_DEVICE_CUDA;
    assert_fails(fp8gpt_model_bind_weight(model, 2, &wrong), invalid, "device");
    wrong = parameter.weight;
    wrong.data = NULL;
    assert_fails(fp8gpt_model_bind_weight(model, 2, &wrong), invalid, "NULL");
    const fp8gpt_parameter after = parameter_of(model, 2);
    assert_memory_equal(&after.weight, &parameter.weight, sizeof(after.weight));

    fp8gpt_model_destroy(&model);
    for (int64_t i = 0; i < count; i++) free(copies[i]);
    free(copies);
    free(inverses);
    fp8core_context_destroy(&context);
  }
}

// Texts of which no target counts: no loss, and no gradient, not even NaN.
static void test_no_targets(void **state) {
  (void)state;
  for (int precision = 0; precision < PRECISIONS; precision++) {
    const fp8gpt_config config = small_config("tiny-gpt");
    fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
    fp8gpt_model *model = create_model(context, &config, (fp8gpt_precision)precision, 2);
    text given;
    float loss;
    fill_text(&given, 12, 2, 30, config.vocabulary, 1);
    for (int i = 0; i < 60; i++) given.targets[i] = -1;
    for (int step = 0; step < 2; step++) {
      assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, step, 0, &loss));
      assert_true(loss == 0.0f);
      for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
        const fp8gpt_parameter parameter = parameter_of(model, i);
        double *values = values_of(&parameter.gradient);
        for (int64_t j = 0; j < fp8core_tensor_elements(&parameter.gradient); j++)
          if (values[j] != 0.0) fail_msg("%s [%lld] is %g", parameter.name, (long long)j, values[j]);
        free(values);
      }
      assert_ok(fp8gpt_model_loss(model, &given.batch, &loss));
      assert_true(loss == 0.0f);
      assert_ok(fp8gpt_model_end_step(model));
    }
    // The step after is as any other.
    fill_text(&given, 12, 2, 30, config.vocabulary, 0);
    assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 2, 0, &loss));
    assert_true(loss > 3.0f && loss < 6.0f);
    fp8gpt_model_destroy(&model);
    fp8core_context_destroy(&context);
  }
}

// A NaN in a weight shows in the loss and in gradients; the step after, without it, is clean.
static void test_nan(void **state) {
  (void)state;
  for (int precision = 0; precision < PRECISIONS; precision++) {
    const fp8gpt_config config = small_config("tiny-gpt");
    fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
    fp8gpt_model *model = create_model(context, &config, (fp8gpt_precision)precision, 2);
    text given;
    float loss;
    fill_text(&given, 12, 2, 30, config.vocabulary, 0);
    float clean[2];
    for (int step = 0; step < 2; step++) {
      assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, step, 0, &clean[step]));
      assert_ok(fp8gpt_model_end_step(model));
    }
    for (int64_t i = 0; i < fp8gpt_model_parameters(model); i++) {
      const fp8gpt_parameter parameter = parameter_of(model, i);
      const size_t size = fp8core_dtype_size(parameter.weight.dtype);
      unsigned char kept[4];
      // The first token's embedding; the first element of all others.
      unsigned char *at =
        (unsigned char *)parameter.weight.data + (strcmp(parameter.name, "embedding.token.weight") == 0
                                                    ? (size_t)given.tokens[0] * (size_t)config.hidden * size
                                                    : 0);
      memcpy(kept, at, size);
      memset(at, 0x7f, size);
      if (size == 4) memcpy(at, &(float){NAN}, 4);
      if (size == 2) memcpy(at, &(uint16_t){0x7fc0}, 2);
      assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 2, 0, &loss));
      if (!isnan(loss)) fail_msg("%s with a NaN: the loss is %g", parameter.name, (double)loss);
      assert_ok(fp8gpt_model_end_step(model));
      memcpy(at, kept, size);
      assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 3, 0, &loss));
      if (memcmp(&loss, &clean[1], sizeof(loss)) != 0 && !(fabsf(loss - clean[1]) <= 1e-2f * loss))
        fail_msg("%s without its NaN: the loss is %g, expected %g", parameter.name, (double)loss, (double)clean[1]);
      assert_ok(fp8gpt_model_end_step(model));
    }
    fp8gpt_model_destroy(&model);
    fp8core_context_destroy(&context);
  }
}

// Plain SGD with FP32 masters in the test: every precision learns to continue a text of period 5, and they agree.
static void test_training(void **state) {
  (void)state;
  enum { STEPS = 200, SEQUENCES = 4, LENGTH = 24 };
  for (int architecture = 0; architecture < 3; architecture++)
    for (int precision = 0; precision < PRECISIONS; precision++) {
      fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
      fp8gpt_config config = small_config(architectures[architecture]);
      config.hidden = 32;
      config.ffn_hidden = 64;
      config.vocabulary = 23;
      config.sequence = LENGTH;
      config.init_std = 0.08f;
      fp8gpt_model *model = create_model(context, &config, (fp8gpt_precision)precision, SEQUENCES);
      const int64_t count = fp8gpt_model_parameters(model);
      float **masters = taken((size_t)count * sizeof(*masters));
      float *inverses = taken((size_t)count * sizeof(*inverses));
      float *scales = taken((size_t)count * sizeof(*scales));
      for (int64_t i = 0; i < count; i++) {
        const fp8gpt_parameter parameter = parameter_of(model, i);
        fp8core_tensor weight = parameter.weight;
        masters[i] = taken((size_t)fp8core_tensor_elements(&weight) * sizeof(float));
        assert_ok(fp8gpt_model_initial_weight(model, i, masters[i]));
        if (weight.dtype != FP8CORE_E4M3) continue;
        weight.scale = &scales[i];
        weight.scale_inverse = &inverses[i];
        scales[i] = *parameter.weight.scale;
        inverses[i] = *parameter.weight.scale_inverse;
        assert_ok(fp8gpt_model_bind_weight(model, i, &weight));
      }
      float first = 0.0f;
      float loss = 0.0f;
      for (int step = 0; step < STEPS; step++) {
        text given;
        test_random random = {(uint64_t)step + 77};
        for (int sequence = 0; sequence < SEQUENCES; sequence++) {
          int32_t period[5];
          for (int i = 0; i < 5; i++) period[i] = (int32_t)(test_random_bits(&random) % 23);
          for (int i = 0; i < LENGTH; i++) {
            // Five tokens that no one can know, then their repetition.
            given.tokens[sequence * LENGTH + i] = period[i % 5];
            given.targets[sequence * LENGTH + i] = i < 5 ? -1 : (period[i % 5] + 1) % 23;
          }
        }
        given.batch = (fp8gpt_batch){SEQUENCES, LENGTH, given.tokens, given.targets};
        assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, step, 0, &loss));
        if (step == 0) first = loss;
        for (int64_t i = 0; i < count; i++) {
          const fp8gpt_parameter parameter = parameter_of(model, i);
          const int64_t elements = fp8core_tensor_elements(&parameter.weight);
          double *gradient = values_of(&parameter.gradient);
          float largest = 0.0f;
          for (int64_t j = 0; j < elements; j++) {
            masters[i][j] -= 0.5f * (float)gradient[j];
            largest = fmaxf(largest, fabsf(masters[i][j]));
          }
          free(gradient);
          if (parameter.weight.dtype == FP8CORE_E4M3) {
            scales[i] = fp8core_scale_from_amax(FP8CORE_E4M3, largest, 0, 0, scales[i]);
            inverses[i] = 1.0f / scales[i];
          }
          fp8core_tensor master =
            fp8core_tensor_create(masters[i], FP8CORE_FP32, parameter.weight.dimensions, parameter.weight.shape);
          assert_ok(fp8core_cast(context, NULL, &master, &parameter.weight));
        }
        assert_ok(fp8gpt_model_end_step(model));
      }
      print_message("%-10s %-6s loss %.3f, after %d steps %.3f\n", architectures[architecture],
                    fp8gpt_precision_name((fp8gpt_precision)precision), (double)first, STEPS, (double)loss);
      if (!(loss < 0.25f * first)) fail_msg("the loss does not fall below a quarter");
      for (int64_t i = 0; i < count; i++) free(masters[i]);
      free(masters);
      free(inverses);
      free(scales);
      fp8gpt_model_destroy(&model);
      fp8core_context_destroy(&context);
    }
}

static void test_scaled_tensors(void **state) {
  (void)state;
  static const int per_layer[PRECISIONS] = {0, 0, 12, 12, 12};
  for (int precision = 0; precision < PRECISIONS; precision++) {
    const fp8gpt_config config = small_config("tiny-gpt");
    fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
    fp8gpt_model *model = create_model(context, &config, (fp8gpt_precision)precision, 2);
    const int64_t count = fp8gpt_model_scaled_tensors(model);
    const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
    const char *name = NULL;
    fp8core_scaling_record record;
    text given;
    float loss;
    assert_int_equal(count, per_layer[precision] * config.layers);
    assert_int_equal(fp8gpt_model_scaling(model) != NULL, count > 0);
    fill_text(&given, 12, 2, 30, config.vocabulary, 0);
    assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 0, &loss));
    for (int64_t i = 0; i < count; i++) {
      assert_ok(fp8gpt_model_scaled_tensor(model, i, &name, &record));
      const int output = strstr(name, "output_gradient") != NULL;
      assert_int_equal(record.dtype, output ? FP8CORE_E5M2 : FP8CORE_E4M3);
      assert_non_null(strstr(name, "layers."));
      if (!(record.amax > 0.0f && isfinite(record.amax))) fail_msg("%s: amax %g", name, (double)record.amax);
      assert_int_equal(record.history_steps, 0);
      const char *only = NULL;
      assert_ok(fp8gpt_model_scaled_tensor(model, i, &only, NULL));
      assert_ok(fp8gpt_model_scaled_tensor(model, i, NULL, &record));
      assert_ptr_equal(only, name);
    }
    assert_ok(fp8gpt_model_end_step(model));
    for (int64_t i = 0; i < count; i++) {
      assert_ok(fp8gpt_model_scaled_tensor(model, i, &name, &record));
      assert_int_equal(record.history_steps, 1);
      assert_true(record.amax == 0.0f);
    }
    assert_fails(fp8gpt_model_scaled_tensor(model, count, &name, &record), invalid, "index is ");
    assert_fails(fp8gpt_model_scaled_tensor(model, -1, &name, &record), invalid, "index is -1");
    assert_fails(fp8gpt_model_scaled_tensor(NULL, 0, &name, &record), invalid, "NULL, expected a model");
    // A state that is saved and loaded into another model continues bit for bit.
    if (count > 0) {
      fp8gpt_model *other = create_model(context, &config, (fp8gpt_precision)precision, 2);
      const size_t bytes = fp8core_scaling_saved_bytes(fp8gpt_model_scaling(model));
      void *saved = taken(bytes);
      float again;
      assert_ok(fp8core_scaling_save(fp8gpt_model_scaling(model), saved, bytes));
      assert_ok(fp8core_scaling_load(fp8gpt_model_scaling(other), saved, bytes));
      assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 1, 0, &loss));
      assert_ok(fp8gpt_model_train(other, &given.batch, 1, 1.0f, 1, 0, &again));
      assert_memory_equal(&loss, &again, sizeof(loss));
      assert_same(take_snapshot(model, 1), take_snapshot(other, 1), "a restored state");
      free(saved);
      fp8gpt_model_destroy(&other);
    }
    fp8gpt_model_destroy(&model);
    fp8core_context_destroy(&context);
  }
}

// Elements of every cast that a training pass makes, and no other bits than without counting.
static void test_count_casts(void **state) {
  (void)state;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  static const fp8gpt_precision precisions[] = {FP8GPT_TE, FP8GPT_FP8_O2};
  for (int architecture = 0; architecture < 3; architecture++)
    for (int which = 0; which < 2; which++) {
      const fp8gpt_config config = small_config(architectures[architecture]);
      fp8core_context *context = test_context(2, FP8CORE_ISA_AUTO);
      fp8gpt_model *counted = create_model(context, &config, precisions[which], 2);
      fp8gpt_model *plain = create_model(context, &config, precisions[which], 2);
      const int64_t count = fp8gpt_model_scaled_tensors(counted);
      fp8core_cast_statistics *statistics = calloc((size_t)count, sizeof(*statistics));
      float losses[2][4];
      text given;
      assert_non_null(statistics);
      fill_text(&given, 8, 2, 30, config.vocabulary, 0);
      assert_ok(fp8gpt_model_count_casts(counted, statistics));
      assert_same(two_steps(counted, &given, losses[0]), two_steps(plain, &given, losses[1]), "counted casts");
      assert_same_losses(losses[0], losses[1], "counted casts");
      for (int64_t i = 0; i < count; i++) {
        const char *name;
        assert_ok(fp8gpt_model_scaled_tensor(counted, i, &name, NULL));
        const int behind_gelu = config.activation == FP8GPT_GELU && strstr(name, "fc2.input");
        const int by_product = strstr(name, "weight_gradient") != NULL || behind_gelu;
        if (strstr(name, "qkv.input")) assert_int_equal(statistics[i].elements, 4 * 60 * config.hidden);
        if ((statistics[i].elements == 0) != by_product)
          fail_msg("%s: %llu elements", name, (unsigned long long)statistics[i].elements);
        assert_int_equal(statistics[i].nonfinite, 0);
      }
      // Evaluation is not counted, nor is anything once it has ended.
      fp8core_cast_statistics *before = taken((size_t)count * sizeof(*before));
      memcpy(before, statistics, (size_t)count * sizeof(*before));
      assert_ok(fp8gpt_model_loss(counted, &given.batch, &losses[0][0]));
      assert_fails(fp8gpt_model_count_casts(counted, (void *)((char *)statistics + 4)), invalid, "8-byte alignment");
      assert_ok(fp8gpt_model_count_casts(counted, NULL));
      assert_ok(fp8gpt_model_train(counted, &given.batch, 1, 1.0f, 2, 0, &losses[0][0]));
      assert_memory_equal(before, statistics, (size_t)count * sizeof(*before));
      free(before);
      free(statistics);
      fp8gpt_model_destroy(&counted);
      fp8gpt_model_destroy(&plain);
      fp8core_context_destroy(&context);
    }
  const fp8gpt_config config = small_config("tiny-gpt");
  fp8core_cast_statistics none;
  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  fp8gpt_model *model = create_model(context, &config, FP8GPT_BF16, 1);
  assert_fails(fp8gpt_model_count_casts(model, &none), invalid, "computes in bf16 and has no scaled tensors");
  assert_fails(fp8gpt_model_count_casts(NULL, &none), invalid, "NULL, expected a model");
  assert_ok(fp8gpt_model_count_casts(model, NULL));
  fp8gpt_model_destroy(&model);
  fp8core_context_destroy(&context);
}

static void test_config(void **state) {
  (void)state;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  fp8gpt_config config;
  int presets = 0;
  for (const char *name; (name = fp8gpt_config_preset_name(presets)); presets++) {
    assert_ok(fp8gpt_config_preset(name, &config));
    assert_ok(fp8gpt_config_validate(&config));
    assert_int_equal(config.size, sizeof(config));
    assert_true(fp8gpt_config_parameters(&config) > 0);
  }
  assert_int_equal(presets, 9);
  assert_null(fp8gpt_config_preset_name(-1));
  // GPT-2's and Llama's own counts; table 1 of FP8-LM has shapes, of which the rest follows.
  static const struct {
    const char *name;
    int64_t parameters;
    int shape[3];
  } known[] = {{"gpt2-124m", 124439808, {12, 768, 12}},
               {"llama-7b", 6738415616, {32, 4096, 32}},
               {"gpt-125m", 124439808 - 1024 * 768, {12, 768, 12}},
               {"gpt-7b", 0, {32, 4096, 32}},
               {"gpt-13b", 0, {40, 5120, 40}},
               {"gpt-175b", 0, {96, 12288, 96}}};
  for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
    assert_ok(fp8gpt_config_preset(known[i].name, &config));
    if (known[i].parameters) assert_int_equal(fp8gpt_config_parameters(&config), known[i].parameters);
    assert_int_equal(config.layers, known[i].shape[0]);
    assert_int_equal(config.hidden, known[i].shape[1]);
    assert_int_equal(config.heads, known[i].shape[2]);
  }
  // Megatron's count for GPT-2 124M at 1024: 6 (85M + 38.6M) + 6 * 12 * 768 * 1024.
  assert_ok(fp8gpt_config_preset("gpt2-124m", &config));
  assert_true(fp8gpt_config_flops_per_token(NULL, 1024) == -1.0);
  assert_true(fabs(fp8gpt_config_flops_per_token(&config, 1024) -
                   (6.0 * (12.0 * 12 * 768 * 768 + 768.0 * 50257) + 6.0 * 12 * 768 * 1024)) < 1.0);
  assert_fails(fp8gpt_config_preset("gpt3", &config), invalid, "there is no preset \"gpt3\", expected one of gpt-125m");
  assert_fails(fp8gpt_config_preset(NULL, &config), invalid, "name of fp8gpt_config_preset() is NULL");
  assert_fails(fp8gpt_config_preset("gpt-7b", NULL), invalid, "config of fp8gpt_config_preset() is NULL");
  for (int i = 0; i < presets; i++)
    test_assert_message_contains("", "NULL"), (void)fp8gpt_config_preset("x", &config),
      test_assert_message_contains("preset", fp8gpt_config_preset_name(i)), (void)fp8gpt_config_preset(NULL, NULL);
  assert_fails(fp8gpt_config_validate(NULL), invalid, "config is NULL, expected a config");
  assert_int_equal(fp8gpt_config_parameters(NULL), -1);

#define BAD(field, value, text)                                                                                        \
  do {                                                                                                                 \
    config = small_config("tiny-gpt");                                                                                 \
    config.field = value;                                                                                              \
    assert_fails(fp8gpt_config_validate(&config), invalid, text);                                                      \
    assert_int_equal(fp8gpt_config_parameters(&config), -1);                                                           \
  } while (0)
  BAD(layers, 0, "layers is 0, expected 1 to ");
  BAD(layers, -3, "layers is -3, expected 1 to ");
  BAD(hidden, 0, "hidden is 0, expected 1 to ");
  BAD(hidden, 66, "hidden is 66, expected a multiple of the 4 heads");
  BAD(hidden, INT32_MAX, "hidden is 2147483647, expected 1 to ");
  BAD(hidden, 1028, "a head has 257 elements (hidden 1028, heads 4), expected at most 256");
  BAD(hidden, 4, "a head has 1 elements, expected an even number");
  BAD(heads, 0, "heads is 0, expected 1 to 64");
  BAD(heads, 65, "heads is 65, expected 1 to 64");
  BAD(kv_heads, 0, "kv_heads is 0, expected 1 to 4");
  BAD(kv_heads, 3, "heads is 4, expected a multiple of the 3 kv_heads");
  BAD(kv_heads, 8, "kv_heads is 8, expected 1 to 4");
  BAD(ffn_hidden, 0, "ffn_hidden is 0, expected 1 to ");
  BAD(vocabulary, 1, "vocabulary is 1, expected 2 to ");
  BAD(sequence, 0, "sequence is 0, expected 1 to ");
  BAD(normalization, (fp8gpt_normalization)2, "normalization is 2, expected 0 to 1");
  BAD(activation, (fp8gpt_activation)7, "activation is 7, expected 0 to 1");
  BAD(position, (fp8gpt_position)2, "position is 2, expected 0 to 1");
  BAD(norm_eps, 0.0f, "norm_eps is 0, expected a finite positive number");
  BAD(norm_eps, NAN, "norm_eps is nan, expected");
  BAD(rope_theta, -1.0f, "rope_theta is -1, expected a finite positive number");
  BAD(rope_theta, INFINITY, "rope_theta is inf, expected");
  BAD(dropout, 1.0f, "dropout is 1, expected a number in [0, 1)");
  BAD(dropout, -0.1f, "dropout is -0.1, expected");
  BAD(dropout, NAN, "dropout is nan, expected");
  BAD(init_std, -1.0f, "init_std is -1, expected");
  BAD(init_std, INFINITY, "init_std is inf, expected");
#undef BAD
  config = small_config("tiny-gpt");
  config.size--;
  assert_fails(fp8gpt_config_validate(&config), FP8CORE_ERROR_VERSION_MISMATCH, "fp8gpt_config.size is ");
  assert_string_equal(fp8gpt_precision_name(FP8GPT_FP32), "fp32");
  assert_string_equal(fp8gpt_precision_name(FP8GPT_FP8_O2), "fp8-o2");
  assert_string_equal(fp8gpt_precision_name(FP8GPT_FP8_O3), "fp8-o3");
  assert_string_equal(fp8gpt_precision_name((fp8gpt_precision)6), "unknown");
  assert_string_equal(fp8gpt_precision_name((fp8gpt_precision)-1), "unknown");
}

static void test_bad_input(void **state) {
  (void)state;
  const fp8core_status invalid = FP8CORE_ERROR_INVALID_ARGUMENT;
  fp8core_context *context = test_context(1, FP8CORE_ISA_AUTO);
  fp8gpt_config config = small_config("tiny-gpt");
  fp8gpt_model_options options = fp8gpt_model_options_default();
  fp8gpt_model *model = (fp8gpt_model *)context;
  assert_fails(fp8gpt_model_create(NULL, context, &config, &options), invalid,
               "model of fp8gpt_model_create() is NULL");
  assert_fails(fp8gpt_model_create(&model, NULL, &config, &options), invalid, "context of fp8gpt_model_create()");
  assert_null(model);
  assert_fails(fp8gpt_model_create(&model, context, NULL, &options), invalid, "config is NULL");
#define BAD(field, value, status, text)                                                                                \
  do {                                                                                                                 \
    options = fp8gpt_model_options_default();                                                                          \
    options.precision = FP8GPT_FP8_O2;                                                                                 \
    options.field = value;                                                                                             \
    model = (fp8gpt_model *)context;                                                                                   \
    assert_fails(fp8gpt_model_create(&model, context, &config, &options), status, text);                               \
    assert_null(model);                                                                                                \
  } while (0)
  BAD(size, sizeof(options) - 8, FP8CORE_ERROR_VERSION_MISMATCH, "fp8gpt_model_options.size is ");
  BAD(precision, (fp8gpt_precision)6, invalid, "precision is 6, expected");
  BAD(precision, (fp8gpt_precision)-1, invalid, "precision is -1, expected");
  BAD(batch, 0, invalid, "batch is 0, expected at least 1");
  BAD(batch, -7, invalid, "batch is -7, expected at least 1");
  BAD(batch, INT32_MAX, invalid, "batch is 2147483647, expected at least 1 and at most 2^31 - 1 tokens (sequence 70)");
  BAD(scaling.history_length, 0, invalid, "history_length is 0");
  BAD(scaling.margin, 65, invalid, "margin is 65");
  BAD(scaling.size, 3, FP8CORE_ERROR_VERSION_MISMATCH, "size is 3");
#undef BAD
  fp8gpt_model_destroy(NULL);
  fp8gpt_model_destroy(&model);
  assert_int_equal(fp8gpt_model_parameters(NULL), 0);
  assert_int_equal(fp8gpt_model_scaled_tensors(NULL), 0);
  assert_null(fp8gpt_model_scaling(NULL));
  assert_null(fp8gpt_model_config(NULL));
  // NULL options are the defaults.
  assert_ok(fp8gpt_model_create(&model, context, &config, NULL));
  assert_memory_equal(fp8gpt_model_config(model), &config, sizeof(config));
  fp8gpt_model_destroy(&model);
  assert_null(model);

  text given;
  fill_text(&given, 1, 2, 10, config.vocabulary, 0);
  model = create_model(context, &config, FP8GPT_FP8_O2, 2);
  float loss = 0.0f;
  assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 0, &loss));
  assert_ok(fp8gpt_model_end_step(model));
  assert_ok(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 1, 0, &loss));
  const snapshot before = take_snapshot(model, 1);
  loss = 42.0f;
#define BAD(call, text)                                                                                                \
  do {                                                                                                                 \
    assert_fails(call, invalid, text);                                                                                 \
    assert_true(loss == 42.0f);                                                                                        \
  } while (0)
#define BAD_BATCH(field, value, text)                                                                                  \
  do {                                                                                                                 \
    fp8gpt_batch bad = given.batch;                                                                                    \
    bad.field = value;                                                                                                 \
    BAD(fp8gpt_model_train(model, &bad, 1, 1.0f, 0, 0, &loss), text);                                                  \
    BAD(fp8gpt_model_loss(model, &bad, &loss), text);                                                                  \
  } while (0)
  BAD(fp8gpt_model_train(NULL, &given.batch, 1, 1.0f, 0, 0, &loss), "model of fp8gpt_model_train() is NULL");
  BAD(fp8gpt_model_train(model, NULL, 1, 1.0f, 0, 0, &loss), "batch of fp8gpt_model_train() is NULL");
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 0, NULL), "loss is NULL");
  BAD(fp8gpt_model_train(model, &given.batch, 1, 0.0f, 0, 0, &loss), "loss_scale is 0, expected");
  BAD(fp8gpt_model_train(model, &given.batch, 1, -1.0f, 0, 0, &loss), "loss_scale is -1, expected");
  BAD(fp8gpt_model_train(model, &given.batch, 1, NAN, 0, 0, &loss), "loss_scale is nan, expected");
  BAD(fp8gpt_model_train(model, &given.batch, 1, INFINITY, 0, 0, &loss), "loss_scale is inf, expected");
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, -1, 0, &loss), "step is -1, expected");
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, (1 << 21) - 1, 0, &loss),
      "step is 2097151, expected 0 to 2097150");
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, -1, &loss), "micro_batch is -1, expected 0 to 2047");
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 2048, &loss), "micro_batch is 2048, expected 0 to 2047");
  BAD(fp8gpt_model_loss(NULL, &given.batch, &loss), "model of fp8gpt_model_loss() is NULL");
  BAD(fp8gpt_model_loss(model, NULL, &loss), "batch of fp8gpt_model_loss() is NULL");
  BAD(fp8gpt_model_loss(model, &given.batch, NULL), "loss is NULL");
  BAD_BATCH(sequences, 0, "sequences is 0, expected 1 to the model's batch of 2");
  BAD_BATCH(sequences, 3, "sequences is 3, expected 1 to the model's batch of 2");
  BAD_BATCH(length, 0, "length is 0, expected 1 to the model's sequence of 70");
  BAD_BATCH(length, 71, "length is 71, expected 1 to the model's sequence of 70");
  BAD_BATCH(tokens, NULL, "tokens is NULL, expected token ids");
  BAD_BATCH(targets, NULL, "targets is NULL, expected token ids");
  const int32_t kept[2] = {given.tokens[7], given.targets[19]};
  given.tokens[7] = config.vocabulary;
  BAD_BATCH(sequences, 2, "token 7 is 61, expected 0 to 60");
  given.tokens[7] = -1;
  BAD_BATCH(sequences, 2, "token 7 is -1, expected 0 to 60");
  given.tokens[7] = kept[0];
  given.targets[19] = -2;
  BAD_BATCH(sequences, 2, "target 19 is -2, expected -1 to 60");
  given.targets[19] = INT32_MAX;
  BAD_BATCH(sequences, 2, "target 19 is 2147483647, expected -1 to 60");
  given.targets[19] = kept[1];
  float logits[61];
  BAD(fp8gpt_model_next(model, given.tokens, 1, 0, logits), "inference 0, expected one for inference");
  BAD(fp8gpt_model_end_step(NULL), "model of fp8gpt_model_end_step() is NULL");
  fp8gpt_parameter parameter;
  fp8gpt_memory memory;
  BAD(fp8gpt_model_parameter(NULL, 0, &parameter), "model of fp8gpt_model_parameter() is NULL");
  BAD(fp8gpt_model_parameter(model, 0, NULL), "parameter is NULL");
  BAD(fp8gpt_model_parameter(model, 1000, &parameter), "index is 1000, expected 0 to ");
  BAD(fp8gpt_model_initial_weight(NULL, 0, logits), "model of fp8gpt_model_initial_weight() is NULL");
  BAD(fp8gpt_model_initial_weight(model, 0, NULL), "values of fp8gpt_model_initial_weight() is NULL");
  BAD(fp8gpt_model_initial_weight(model, -1, logits), "index is -1");
  BAD(fp8gpt_memory_report(NULL, &memory), "model of fp8gpt_memory_report() is NULL");
  BAD(fp8gpt_memory_report(model, NULL), "memory of fp8gpt_memory_report() is NULL");
  assert_same(before, take_snapshot(model, 1), "refused calls");
  fp8gpt_model_destroy(&model);

  options = fp8gpt_model_options_default();
  options.inference = 1;
  model = create_with(context, &config, &options);
  parameter = parameter_of(model, 0);
  assert_null(parameter.gradient.data);
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 0, &loss), "sequences is 2");
  given.batch.sequences = 1;
  BAD(fp8gpt_model_train(model, &given.batch, 1, 1.0f, 0, 0, &loss), "inference 1, expected one for training");
  BAD(fp8gpt_model_next(NULL, given.tokens, 1, 0, logits), "model of fp8gpt_model_next() is NULL");
  BAD(fp8gpt_model_next(model, NULL, 1, 0, logits), "tokens is NULL");
  BAD(fp8gpt_model_next(model, given.tokens, 1, 0, NULL), "logits is NULL, expected memory for 61");
  BAD(fp8gpt_model_next(model, given.tokens, 0, 0, logits), "count 0, expected");
  BAD(fp8gpt_model_next(model, given.tokens, 1, -1, logits), "position is -1");
  BAD(fp8gpt_model_next(model, given.tokens, 71, 0, logits),
      "count 71, expected at least 0 and 1, and a sum of at most 70");
  BAD(fp8gpt_model_next(model, given.tokens, INT32_MAX, INT32_MAX, logits), "a sum of at most 70");
  BAD(fp8gpt_model_next(model, given.tokens, 1, 1, logits), "position is 1, expected at most the 0 tokens");
  assert_ok(fp8gpt_model_next(model, given.tokens, 10, 0, logits));
  BAD(fp8gpt_model_next(model, given.tokens, 1, 11, logits), "position is 11, expected at most the 10 tokens");
  float kept_logits[61];
  memcpy(kept_logits, logits, sizeof(logits));
  given.tokens[9] = 61;
  BAD(fp8gpt_model_next(model, given.tokens, 10, 0, logits), "token 9 is 61, expected 0 to 60");
  assert_memory_equal(kept_logits, logits, sizeof(logits));
  // A refused call leaves the sequence as it was.
  assert_ok(fp8gpt_model_next(model, given.tokens, 1, 10, logits));
  fp8gpt_model_destroy(&model);
#undef BAD
#undef BAD_BATCH
#if !defined(WITH_ADDRESS_SANITIZER)
  // More memory than there are addresses, which the sanitizer takes for a fault.
  config.hidden = 1 << 16;
  config.heads = 1 << 15;
  config.kv_heads = 1 << 15;
  config.layers = 10000;
  config.sequence = 1 << 20;
  config.ffn_hidden = 1 << 22;
  options = fp8gpt_model_options_default();
  options.batch = 2047;
  model = (fp8gpt_model *)context;
  assert_fails(fp8gpt_model_create(&model, context, &config, &options), FP8CORE_ERROR_OUT_OF_MEMORY, "cannot allocate");
  assert_null(model);
#endif
  fp8core_context_destroy(&context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_config),
    cmocka_unit_test(test_bad_input),
    cmocka_unit_test(test_bits),
    cmocka_unit_test(test_micro_batches),
    cmocka_unit_test(test_accumulation_noise),
    cmocka_unit_test(test_loss),
    cmocka_unit_test(test_next),
    cmocka_unit_test(test_memory),
    cmocka_unit_test(test_initial_weights),
    cmocka_unit_test(test_bound_weights),
    cmocka_unit_test(test_parts),
    cmocka_unit_test(test_no_targets),
    cmocka_unit_test(test_nan),
    cmocka_unit_test(test_scaled_tensors),
    cmocka_unit_test(test_count_casts),
    cmocka_unit_test(test_training),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
