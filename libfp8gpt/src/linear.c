// Linear layers: products in the model's precision. Weights are [outputs, inputs].
//
// FP8 (FP8-LM section 2.1 and Micikevicius et al. 2022): inputs and weights E4M3, gradients of outputs E5M2, gradients
// of weights E4M3; each with a scale of its own, delayed by default.
#include "internal.h"

fp8core_tensor fp8gpt_matrix(const fp8gpt_model *model, const void *data, fp8core_dtype dtype, int64_t rows,
                             int64_t columns) {
  return fp8core_tensor_matrix((void *)(uintptr_t)data, dtype, rows, columns, fp8core_context_device(model->context));
}

static fp8core_tensor activations(const fp8gpt_model *model, const void *data, int64_t rows, int64_t columns) {
  return fp8gpt_matrix(model, data, model->activation_dtype, rows, columns);
}

static fp8core_scaling *scaling_of(const fp8gpt_model *model, int training) {
  return training ? model->scaling : model->evaluation_scaling;
}

fp8core_status fp8gpt_product(fp8gpt_model *model, const fp8core_gemm_options *options, const fp8core_tensor *a,
                              const fp8core_tensor *b, const fp8core_tensor *c, const fp8core_tensor *d) {
  return model->reserving ? fp8core_gemm_reserve(model->context, options, a, b, c, d)
                          : fp8core_gemm(model->context, options, a, b, c, d);
}

// The same, stored under the scale of tensor `index`.
static fp8core_status scaled_product(fp8gpt_model *model, fp8core_scaling *scaling, int index,
                                     const fp8core_gemm_options *options, const fp8core_tensor *a,
                                     const fp8core_tensor *b, const fp8core_tensor *c, fp8core_tensor *d) {
  return model->reserving ? fp8core_scaling_gemm_reserve(scaling, index, options, a, b, c, d)
                          : fp8core_scaling_gemm(scaling, index, options, a, b, c, d, NULL);
}

// A cast to FP8 under the scale of tensor `index`.
static fp8core_status quantise(fp8gpt_model *model, int index, int training, const fp8core_tensor *source,
                               fp8core_tensor *destination) {
  fp8core_cast_options options = fp8core_cast_options_default();
  if (model->reserving) return fp8core_scaling_bind(scaling_of(model, training), index, destination);
  if (training && model->statistics) options.statistics = &model->statistics[index];
  return fp8core_scaling_cast(scaling_of(model, training), index, &options, source, destination, NULL);
}

// The layer's weight as its products read it.
static fp8core_status product_weight(fp8gpt_model *model, const fp8gpt_linear *layer, int training,
                                     fp8core_tensor *weight) {
  *weight = model->parameters[layer->weight].weight;
  weight->amax = NULL;
  if (layer->weight_scale < 0) return FP8CORE_OK;
  const fp8core_tensor wide = *weight;
  *weight = fp8gpt_matrix(model, model->quantised_weight, FP8CORE_E4M3, layer->outputs, layer->inputs);
  return quantise(model, layer->weight_scale, training, &wide, weight);
}

static fp8core_status save_input(fp8gpt_model *model, fp8gpt_linear *layer, int64_t rows, const void *input,
                                 int training) {
  const fp8core_tensor values = activations(model, input, rows, layer->inputs);
  if (!model->fp8) {
    layer->input = values;
    return FP8CORE_OK;
  }
  layer->input = fp8gpt_matrix(model, layer->input_data, FP8CORE_E4M3, rows, layer->inputs);
  return quantise(model, layer->input_scale, training, &values, &layer->input);
}

static void set_bias(const fp8gpt_model *model, const fp8gpt_linear *layer, fp8core_gemm_options *options) {
  if (layer->bias >= 0) options->bias = &model->parameters[layer->bias].weight;
}

fp8core_status fp8gpt_linear_forward_saved(fp8gpt_model *model, fp8gpt_linear *layer, int64_t rows, void *output,
                                           int training) {
  fp8core_gemm_options options = fp8core_gemm_options_default();
  fp8core_tensor weight;
  const fp8core_tensor result = activations(model, output, rows, layer->outputs);
  FP8GPT_TRY(product_weight(model, layer, training, &weight));
  options.transpose_b = 1;
  options.fast_accumulation = 1;
  set_bias(model, layer, &options);
  fp8core_tensor input = layer->input;
  input.amax = NULL;
  return fp8gpt_product(model, &options, &input, &weight, NULL, &result);
}

fp8core_status fp8gpt_linear_forward(fp8gpt_model *model, fp8gpt_linear *layer, int64_t rows, const void *input,
                                     void *output, int training) {
  FP8GPT_TRY(save_input(model, layer, rows, input, training));
  return fp8gpt_linear_forward_saved(model, layer, rows, output, training);
}

fp8core_status fp8gpt_linear_forward_gelu(fp8gpt_model *model, fp8gpt_linear *layer, fp8gpt_linear *next, int64_t rows,
                                          const void *input, void *pre_activation, int training) {
  fp8core_gemm_options options = fp8core_gemm_options_default();
  fp8core_tensor weight;
  const fp8core_tensor auxiliary = activations(model, pre_activation, rows, layer->outputs);
  FP8GPT_TRY(save_input(model, layer, rows, input, training));
  FP8GPT_TRY(product_weight(model, layer, training, &weight));
  options.transpose_b = 1;
  options.fast_accumulation = 1;
  options.epilogue = FP8CORE_EPILOGUE_GELU;
  options.auxiliary = &auxiliary;
  set_bias(model, layer, &options);
  fp8core_tensor from = layer->input;
  from.amax = NULL;
  if (!model->fp8) {
    next->input = activations(model, next->input_data, rows, layer->outputs);
    return fp8gpt_product(model, &options, &from, &weight, NULL, &next->input);
  }
  next->input = fp8gpt_matrix(model, next->input_data, FP8CORE_E4M3, rows, layer->outputs);
  return scaled_product(model, scaling_of(model, training), next->input_scale, &options, &from, &weight, NULL,
                        &next->input);
}

static fp8core_status bias_gradient(fp8gpt_model *model, int bias, int64_t rows, const void *gradient, int first) {
  const fp8gpt_parameter_record *record = &model->parameters[bias];
  const fp8gpt_column_sums job = {.dtype = model->activation_dtype,
                                  .rows = rows,
                                  .columns = record->elements,
                                  .data = gradient,
                                  .gradient = record->gradient.data,
                                  .first = first};
  if (model->reserving) return FP8CORE_OK;
  return model->backend->column_sums(model, &job);
}

// Micro-batches whose sums are rounded to nearest.
#define NEAREST_MICRO_BATCHES 8

// Of draws, beside those of a caller's own casts.
#define GRADIENT_DRAWS (UINT32_C(1) << 31)

static fp8core_status take_wide_weight_gradient(fp8gpt_model *model) {
  int64_t most = 0;
  if (model->wide_weight_gradient) return FP8CORE_OK;
  for (int64_t i = 0; i < model->parameter_count; i++)
    if (model->parameters[i].gradient_scale >= 0 && model->parameters[i].elements > most)
      most = model->parameters[i].elements;
  model->wide_weight_gradient_bytes = most * (int64_t)sizeof(float);
  return fp8core_alloc(model->context, (size_t)model->wide_weight_gradient_bytes, &model->wide_weight_gradient);
}

// Gradient of a weight: [outputs, rows] times [rows, inputs], set, or added to what earlier micro-batches left.
//
// An FP8 sum is formed in FP32, this weight's alone, and rounded once a micro-batch. What one of many micro-batches
// adds may be less than half a step of E4M3, a sixteenth of what is there, every time: nearest would lose all of it. So
// only the first few sums are rounded to nearest, which has half the noise, and the rest stochastically.
static fp8core_status weight_gradient(fp8gpt_model *model, const fp8gpt_linear *layer, const fp8gpt_pass *now,
                                      const fp8core_tensor *output_gradient) {
  const fp8gpt_parameter_record *parameter = &model->parameters[layer->weight];
  const fp8core_tensor *earlier = now->first ? NULL : &parameter->gradient;
  fp8core_gemm_options options = fp8core_gemm_options_default();
  fp8core_tensor input = layer->input;
  fp8core_tensor sum = parameter->gradient;
  input.amax = NULL;
  options.transpose_a = 1;
  options.beta = now->first ? 0.0f : 1.0f;
  if (parameter->gradient_scale < 0) return fp8gpt_product(model, &options, output_gradient, &input, earlier, &sum);
  if (now->first || model->accumulated <= NEAREST_MICRO_BATCHES)
    return scaled_product(model, model->scaling, parameter->gradient_scale, &options, output_gradient, &input, earlier,
                          &sum);
  FP8GPT_TRY(take_wide_weight_gradient(model));
  const fp8core_tensor wide =
    fp8gpt_matrix(model, model->wide_weight_gradient, FP8CORE_FP32, layer->outputs, layer->inputs);
  fp8core_cast_options rounding = fp8core_cast_options_default();
  rounding.rounding = FP8CORE_ROUND_STOCHASTIC;
  rounding.tensor_id = GRADIENT_DRAWS | (uint32_t)parameter->gradient_scale;
  rounding.step = now->number;
  FP8GPT_TRY(fp8gpt_product(model, &options, output_gradient, &input, earlier, &wide));
  if (model->reserving) return FP8CORE_OK;
  return fp8core_scaling_cast(model->scaling, parameter->gradient_scale, &rounding, &wide, &sum, NULL);
}

fp8core_status fp8gpt_linear_backward(fp8gpt_model *model, fp8gpt_linear *layer, const fp8gpt_pass *now,
                                      const void *output_gradient, int with_bias_gradient, void *input_gradient,
                                      const void *gelu_of, int bias_below) {
  const int64_t rows = now->rows;
  fp8core_tensor gradient = activations(model, output_gradient, rows, layer->outputs);
  if (with_bias_gradient && layer->bias >= 0)
    FP8GPT_TRY(bias_gradient(model, layer->bias, rows, output_gradient, now->first));
  if (model->fp8) {
    const fp8core_tensor wide = gradient;
    gradient = fp8gpt_matrix(model, model->quantised_gradient, FP8CORE_E5M2, rows, layer->outputs);
    FP8GPT_TRY(quantise(model, layer->output_gradient_scale, 1, &wide, &gradient));
    gradient.amax = NULL;
  }

  FP8GPT_TRY(weight_gradient(model, layer, now, &gradient));

  // Of the input: [rows, outputs] times [outputs, inputs].
  if (!input_gradient) return FP8CORE_OK;
  fp8core_tensor weight;
  FP8GPT_TRY(product_weight(model, layer, 1, &weight));
  const fp8core_tensor result = activations(model, input_gradient, rows, layer->inputs);
  fp8core_tensor auxiliary;
  fp8core_tensor sums;
  fp8core_gemm_options options = fp8core_gemm_options_default();
  if (gelu_of) {
    auxiliary = activations(model, gelu_of, rows, layer->inputs);
    options.epilogue = FP8CORE_EPILOGUE_GELU_BACKWARD;
    options.auxiliary = &auxiliary;
    if (bias_below >= 0) {
      sums = fp8core_tensor_create(model->column_sums, FP8CORE_FP32, 1, &layer->inputs);
      sums.device = fp8core_context_device(model->context);
      options.bias_gradient = &sums;
    }
  }
  FP8GPT_TRY(fp8gpt_product(model, &options, &gradient, &weight, NULL, &result));
  if (!options.bias_gradient || model->reserving) return FP8CORE_OK;
  return model->backend->add(model, model->column_sums, layer->inputs, model->parameters[bias_below].gradient.data,
                             now->first);
}
