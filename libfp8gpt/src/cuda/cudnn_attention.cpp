#include "cudnn_attention.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <cudnn_frontend.h>

#include "internal.h"

// cudnn-frontend finds cuDNN's functions here.
void *cudnn_frontend::cudnn_dlhandle;

namespace fe = cudnn_frontend;

struct fp8gpt_cudnn {
  // NULL where plans are made for a GPU that need not be there.
  cudnnHandle_t handle = nullptr;
  std::shared_ptr<fe::DeviceProperties> properties;
  int capability = 0;
  std::string version;
  std::unique_ptr<fe::graph::Graph> forward;
  std::unique_ptr<fe::graph::Graph> backward;
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
};

namespace {

// Before it, lengths that are no multiple of 128 go through copies from the host in every backward pass.
constexpr int least_version = 91600;

// In 256 bytes, the alignment of CUDA's own allocations.
constexpr int64_t workspace_floats = 64;

#define STRING_OF(number) #number
#define SONAME(major) "libcudnn.so." STRING_OF(major)
constexpr char soname[] = SONAME(CUDNN_MAJOR);

// Names of the tensors of a graph.
enum : int64_t { queries = 1, keys, values, outputs, log_sums, doutputs, dqueries, dkeys, dvalues };

fp8core_status refused(const char *what, const std::string &reason) {
  // Reasons may be a list of what failed for each plan, a line each.
  return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuDNN: %s: %.160s", what,
                                reason.substr(0, reason.find('\n')).c_str());
}

// No exception of the headers leaves this file.
template <typename Function>
fp8core_status guarded(const char *what, Function function) {
  try {
    return function();
  } catch (const std::bad_alloc &) {
    return fp8core_set_last_error(FP8CORE_ERROR_OUT_OF_MEMORY, "cuDNN: %s: cannot allocate host memory", what);
  } catch (const std::exception &error) {
    return refused(what, error.what());
  } catch (...) {
    return refused(what, "an unknown error");
  }
}

fp8core_status load() {
  static std::mutex loading;
  const std::lock_guard<std::mutex> lock(loading);
  if (fe::cudnn_dlhandle) return FP8CORE_OK;
  void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return fp8core_set_last_error(FP8CORE_ERROR_NOT_SUPPORTED, "cuDNN (%s) cannot be loaded: %s", soname, dlerror());
  fe::cudnn_dlhandle = library;
  return FP8CORE_OK;
}

std::string version_text(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

fp8core_status open(fp8gpt_cudnn *cudnn, void *stream, const char *properties) {
  const size_t version = fe::detail::get_backend_version();
  cudnn->version = version_text(version);
  if (version < least_version)
    return refused("its version is", cudnn->version + ", expected at least " + version_text(least_version));
  if (properties) {
    cudnn->properties = std::make_shared<fe::DeviceProperties>();
    fe::error_t error =
      cudnn->properties->deserialize(std::vector<uint8_t>(properties, properties + strlen(properties)));
    return error.is_good() ? FP8CORE_OK : refused("properties of a GPU", error.get_message());
  }
  cudnnStatus_t status = fe::detail::create_handle(&cudnn->handle);
  if (status == CUDNN_STATUS_SUCCESS) status = fe::detail::set_stream(cudnn->handle, (cudaStream_t)stream);
  return status == CUDNN_STATUS_SUCCESS ? FP8CORE_OK
                                        : refused("cannot be used on this GPU", fe::detail::get_error_string(status));
}

std::unique_ptr<fe::graph::Graph> new_graph(const fp8gpt_cudnn *cudnn) {
  std::unique_ptr<fe::graph::Graph> graph = std::make_unique<fe::graph::Graph>();
  if (cudnn->properties) graph->set_device_properties(cudnn->properties);
  graph->set_sm_version(cudnn->capability)
    .set_io_data_type(fe::DataType_t::BFLOAT16)
    .set_intermediate_data_type(fe::DataType_t::FLOAT)
    .set_compute_data_type(fe::DataType_t::FLOAT);
  return graph;
}

typedef std::shared_ptr<fe::graph::Tensor_attributes> tensor;

// Heads of rows that hold `row` elements for each token.
void set_heads(const tensor &of, int64_t uid, const fp8gpt_attention *shape, int64_t heads, int64_t row) {
  of->set_uid(uid)
    .set_dim({shape->sequences, heads, shape->length, shape->head_dim})
    .set_stride({shape->length * row, shape->head_dim, row, 1})
    .set_data_type(fe::DataType_t::BFLOAT16);
}

void set_log_sums(const tensor &of, const fp8gpt_attention *shape) {
  of->set_uid(log_sums)
    .set_dim({shape->sequences, shape->heads, shape->length, 1})
    .set_stride({shape->heads * shape->length, shape->length, 1, 1})
    .set_data_type(fe::DataType_t::FLOAT);
}

tensor input_heads(fe::graph::Graph *graph, int64_t uid, const fp8gpt_attention *shape, int64_t heads, int64_t row) {
  const tensor created = graph->tensor(fe::graph::Tensor_attributes());
  set_heads(created, uid, shape, heads, row);
  return created;
}

int64_t qkv_row(const fp8gpt_attention *shape) {
  return (shape->heads + 2 * (int64_t)shape->kv_heads) * shape->head_dim;
}

int64_t out_row(const fp8gpt_attention *shape) { return (int64_t)shape->heads * shape->head_dim; }

float scale_of(const fp8gpt_attention *shape) { return (float)(1.0 / std::sqrt((double)shape->head_dim)); }

// The first plan of cuDNN's heuristics that can be had, so that the same GPU, shape and version give the same one.
fp8core_status plan(fp8gpt_cudnn *cudnn, const char *what, fe::graph::Graph *graph, int64_t *bytes) {
  fe::error_t error = graph->validate();
  if (error.is_good())
    error = cudnn->properties ? graph->build_operation_graph() : graph->build_operation_graph(cudnn->handle);
  if (error.is_good()) error = graph->create_execution_plans({fe::HeurMode_t::A});
  if (error.is_good()) error = graph->check_support();
  if (error.is_good()) error = graph->build_plans();
  if (error.is_good()) error = graph->get_workspace_size(*bytes);
  return error.is_good() ? FP8CORE_OK : refused(what, error.get_message());
}

fp8core_status plan_forward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape) {
  std::unique_ptr<fe::graph::Graph> graph = new_graph(cudnn);
  const tensor q = input_heads(graph.get(), queries, shape, shape->heads, qkv_row(shape));
  const tensor k = input_heads(graph.get(), keys, shape, shape->kv_heads, qkv_row(shape));
  const tensor v = input_heads(graph.get(), values, shape, shape->kv_heads, qkv_row(shape));
  const auto [out, stats] = graph->sdpa(q, k, v,
                                        fe::graph::SDPA_attributes()
                                          .set_name("attention")
                                          .set_generate_stats(true)
                                          .set_causal_mask(true)
                                          .set_attn_scale(scale_of(shape)));
  set_heads(out, outputs, shape, shape->heads, out_row(shape));
  out->set_output(true);
  set_log_sums(stats, shape);
  stats->set_output(true);
  int64_t bytes = 0;
  FP8GPT_TRY(plan(cudnn, "attention", graph.get(), &bytes));
  cudnn->forward = std::move(graph);
  cudnn->forward_bytes = bytes;
  return FP8CORE_OK;
}

fp8core_status plan_backward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape, int64_t most_bytes) {
  // A float for each query of each head comes first in the workspace, and what comes next starts where it ends: a
  // kernel that meets an address that it can't use takes the whole process down with it.
  const int64_t first = shape->sequences * shape->heads * shape->length;
  if (first % workspace_floats != 0)
    return refused("attention's backward pass", "sequences * heads * length is " + std::to_string(first) +
                                                  ", expected a multiple of " + std::to_string(workspace_floats));
  std::unique_ptr<fe::graph::Graph> graph = new_graph(cudnn);
  const tensor q = input_heads(graph.get(), queries, shape, shape->heads, qkv_row(shape));
  const tensor k = input_heads(graph.get(), keys, shape, shape->kv_heads, qkv_row(shape));
  const tensor v = input_heads(graph.get(), values, shape, shape->kv_heads, qkv_row(shape));
  const tensor out = input_heads(graph.get(), outputs, shape, shape->heads, out_row(shape));
  const tensor dout = input_heads(graph.get(), doutputs, shape, shape->heads, out_row(shape));
  const tensor stats = graph->tensor(fe::graph::Tensor_attributes());
  set_log_sums(stats, shape);
  // The same job must give the same bits.
  const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, dout, stats,
                                                 fe::graph::SDPA_backward_attributes()
                                                   .set_name("attention_backward")
                                                   .set_causal_mask(true)
                                                   .set_attn_scale(scale_of(shape))
                                                   .set_deterministic_algorithm(true));
  set_heads(dq, dqueries, shape, shape->heads, qkv_row(shape));
  set_heads(dk, dkeys, shape, shape->kv_heads, qkv_row(shape));
  set_heads(dv, dvalues, shape, shape->kv_heads, qkv_row(shape));
  for (const tensor &gradient : {dq, dk, dv}) gradient->set_output(true);
  int64_t bytes = 0;
  FP8GPT_TRY(plan(cudnn, "attention's backward pass", graph.get(), &bytes));
  if (bytes > most_bytes)
    return refused("attention's backward pass", "its workspace is " + std::to_string(bytes) +
                                                  " bytes, expected at most " + std::to_string(most_bytes));
  cudnn->backward = std::move(graph);
  cudnn->backward_bytes = bytes;
  return FP8CORE_OK;
}

// The heads of rows start after `elements` elements.
void *heads_at(const void *rows, int64_t elements) { return (void *)((const char *)rows + 2 * elements); }

typedef std::unordered_map<int64_t, void *> pointers;

pointers pointers_of(const fp8gpt_attention *job) {
  const int64_t first_key = out_row(job), first_value = first_key + (int64_t)job->kv_heads * job->head_dim;
  return {{queries, heads_at(job->qkv, 0)},
          {keys, heads_at(job->qkv, first_key)},
          {values, heads_at(job->qkv, first_value)},
          {outputs, job->out},
          {log_sums, job->log_sums}};
}

fp8core_status run(const fp8gpt_cudnn *cudnn, const char *what, const fe::graph::Graph *graph, pointers *of,
                   void *workspace) {
  fe::error_t error = graph->execute(cudnn->handle, *of, workspace);
  if (error.is_good()) return FP8CORE_OK;
  return fp8core_set_last_error(FP8CORE_ERROR_DEVICE, "cuDNN: %s: %.160s", what, error.get_message().c_str());
}

} // namespace

extern "C" fp8core_status fp8gpt_cudnn_open(fp8gpt_cudnn **opened, void *stream, int capability,
                                            const char *properties) {
  *opened = nullptr;
  return guarded("opening", [&] {
    FP8GPT_TRY(load());
    fp8gpt_cudnn *cudnn = new fp8gpt_cudnn;
    *opened = cudnn;
    cudnn->capability = capability;
    const fp8core_status status = guarded("opening", [&] { return open(cudnn, stream, properties); });
    if (status != FP8CORE_OK) fp8gpt_cudnn_close(opened);
    return status;
  });
}

extern "C" void fp8gpt_cudnn_close(fp8gpt_cudnn **closed) {
  fp8gpt_cudnn *cudnn = *closed;
  *closed = nullptr;
  if (!cudnn) return;
  (void)guarded("closing", [&] {
    cudnn->forward.reset();
    cudnn->backward.reset();
    if (cudnn->handle) (void)fe::detail::destroy_handle(cudnn->handle);
    return FP8CORE_OK;
  });
  delete cudnn;
}

extern "C" const char *fp8gpt_cudnn_version(const fp8gpt_cudnn *cudnn) { return cudnn->version.c_str(); }

extern "C" fp8core_status fp8gpt_cudnn_plan_forward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape) {
  return guarded("attention", [&] { return plan_forward(cudnn, shape); });
}

extern "C" fp8core_status fp8gpt_cudnn_plan_backward(fp8gpt_cudnn *cudnn, const fp8gpt_attention *shape,
                                                     int64_t most_bytes) {
  return guarded("attention's backward pass", [&] { return plan_backward(cudnn, shape, most_bytes); });
}

extern "C" int64_t fp8gpt_cudnn_workspace_bytes(const fp8gpt_cudnn *cudnn, int backward) {
  return backward ? std::max(cudnn->forward_bytes, cudnn->backward_bytes) : cudnn->forward_bytes;
}

extern "C" fp8core_status fp8gpt_cudnn_forward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job,
                                               void *workspace) {
  return guarded("attention", [&] {
    pointers of = pointers_of(job);
    return run(cudnn, "attention", cudnn->forward.get(), &of, workspace);
  });
}

extern "C" fp8core_status fp8gpt_cudnn_backward(const fp8gpt_cudnn *cudnn, const fp8gpt_attention *job,
                                                void *workspace) {
  return guarded("attention's backward pass", [&] {
    const int64_t first_key = out_row(job), first_value = first_key + (int64_t)job->kv_heads * job->head_dim;
    pointers of = pointers_of(job);
    of[doutputs] = (void *)job->dout;
    of[dqueries] = heads_at(job->dqkv, 0);
    of[dkeys] = heads_at(job->dqkv, first_key);
    of[dvalues] = heads_at(job->dqkv, first_value);
    return run(cudnn, "attention's backward pass", cudnn->backward.get(), &of, workspace);
  });
}
