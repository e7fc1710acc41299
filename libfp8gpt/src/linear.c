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

// A cast to FP8 under the scale of tensor `index`.
static fp8core_status quantise(fp8gpt_model *model, int index, int training, const fp8core_tensor *source,
                               fp8core_tensor *destination) {
  fp8core_cast_options options = fp8core_cast_options_default();
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
  return fp8core_gemm(model->context, &options, &input, &weight, NULL, &result);
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
    return fp8core_gemm(model->context, &options, &from, &weight, NULL, &next->input);
  }
  next->input = fp8gpt_matrix(model, next->input_data, FP8CORE_E4M3, rows, layer->outputs);
  return fp8core_scaling_gemm(scaling_of(model, training), next->input_scale, &options, &from, &weight, NULL,
                              &next->input, NULL);
}

void fp8gpt_add_vector_gradient(fp8gpt_model *model, int parameter, const float *values, int first) {
  float *gradient = model->parameters[parameter].gradient.data;
  for (int64_t i = 0; i < model->parameters[parameter].elements; i++)
    gradient[i] = first ? values[i] : gradient[i] + values[i];
}

const float *fp8gpt_vector(fp8gpt_model *model, int parameter, int which) {
  if (parameter < 0) return NULL;
  const fp8gpt_parameter_record *record = &model->parameters[parameter];
  float *values = model->weight_values + (which ? model->config.hidden : 0);
  model->ops->load(record->weight.dtype, record->weight.data, record->elements, values);
  return values;
}

fp8core_status fp8gpt_bias_gradient(fp8gpt_model *model, int bias, int64_t rows, const void *gradient, int first) {
  const int64_t columns = model->parameters[bias].elements;
  float *sums = model->norm_partials;
  const int64_t groups = (columns + FP8GPT_COLUMN_GROUP - 1) / FP8GPT_COLUMN_GROUP;
#if defined(_OPENMP)
#  pragma omp parallel for num_threads(model->threads)
#endif
  for (int64_t group = 0; group < groups; group++) {
    const int64_t begin = group * FP8GPT_COLUMN_GROUP;
    const int64_t end = begin + FP8GPT_COLUMN_GROUP < columns ? begin + FP8GPT_COLUMN_GROUP : columns;
    model->ops->column_sums(model->activation_dtype, gradient, rows, columns, begin, end, sums);
  }
  fp8gpt_add_vector_gradient(model, bias, sums, first);
  return FP8CORE_OK;
}

fp8core_status fp8gpt_linear_backward(fp8gpt_model *model, fp8gpt_linear *layer, int64_t rows,
                                      const void *output_gradient, int with_bias_gradient, void *input_gradient,
                                      const void *gelu_of, int bias_below, int first) {
  fp8core_gemm_options options = fp8core_gemm_options_default();
  fp8core_tensor gradient = activations(model, output_gradient, rows, layer->outputs);
  if (with_bias_gradient && layer->bias >= 0)
    FP8GPT_TRY(fp8gpt_bias_gradient(model, layer->bias, rows, output_gradient, first));
  if (model->fp8) {
    const fp8core_tensor wide = gradient;
    gradient = fp8gpt_matrix(model, model->quantised_gradient, FP8CORE_E5M2, rows, layer->outputs);
    FP8GPT_TRY(quantise(model, layer->output_gradient_scale, 1, &wide, &gradient));
    gradient.amax = NULL;
  }

  // Of the weight: [outputs, rows] times [rows, inputs], added to what earlier micro-batches left.
  fp8gpt_parameter_record *parameter = &model->parameters[layer->weight];
  fp8core_tensor input = layer->input;
  fp8core_tensor weight_gradient = parameter->gradient;
  const fp8core_tensor earlier = weight_gradient;
  input.amax = NULL;
  options.transpose_a = 1;
  options.beta = first ? 0.0f : 1.0f;
  if (parameter->gradient_scale >= 0)
    FP8GPT_TRY(fp8core_scaling_gemm(model->scaling, parameter->gradient_scale, &options, &gradient, &input,
                                    first ? NULL : &earlier, &weight_gradient, NULL));
  else
    FP8GPT_TRY(fp8core_gemm(model->context, &options, &gradient, &input, first ? NULL : &earlier, &weight_gradient));

  // Of the input: [rows, outputs] times [outputs, inputs].
  if (!input_gradient) return FP8CORE_OK;
  fp8core_tensor weight;
  FP8GPT_TRY(product_weight(model, layer, 1, &weight));
  const fp8core_tensor result = activations(model, input_gradient, rows, layer->inputs);
  fp8core_tensor auxiliary;
  fp8core_tensor sums;
  options = fp8core_gemm_options_default();
  if (gelu_of) {
    auxiliary = activations(model, gelu_of, rows, layer->inputs);
    options.epilogue = FP8CORE_EPILOGUE_GELU_BACKWARD;
    options.auxiliary = &auxiliary;
    if (bias_below >= 0) {
      sums = fp8core_tensor_create(model->norm_partials, FP8CORE_FP32, 1, &layer->inputs);
      sums.device = fp8core_context_device(model->context);
      options.bias_gradient = &sums;
    }
  }
  FP8GPT_TRY(fp8core_gemm(model->context, &options, &gradient, &weight, NULL, &result));
  if (options.bias_gradient) fp8gpt_add_vector_gradient(model, bias_below, model->norm_partials, first);
  return FP8CORE_OK;
}
