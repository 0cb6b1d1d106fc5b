// cuDNN's graph API: one engine with one configuration for every graph. Executing it does nothing.
#include "cudnn_graph.h"

#include <algorithm>
#include <cstring>

namespace standin {

size_t width_of(int type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4;  // the enumerations, int32, float
  }
}

std::vector<int64_t> Descriptor::integers(int name) const {
  auto found = values.find(name);
  if (found == values.end() || width_of(found->second.type) != sizeof(int64_t)) return {};
  std::vector<int64_t> result(found->second.bytes.size() / sizeof(int64_t));
  std::memcpy(result.data(), found->second.bytes.data(), result.size() * sizeof(int64_t));
  return result;
}

int64_t Descriptor::integer(int name, int64_t otherwise) const {
  auto found = values.find(name);
  if (found == values.end()) return otherwise;
  const std::string& bytes = found->second.bytes;
  int64_t wide = 0;
  int32_t narrow = 0;
  switch (std::min(bytes.size(), width_of(found->second.type))) {
    case 8: std::memcpy(&wide, bytes.data(), sizeof wide); return wide;
    case 4: std::memcpy(&narrow, bytes.data(), sizeof narrow); return narrow;
    case 1: return bytes[0];
    default: return otherwise;
  }
}

const Descriptor* Descriptor::nested(int name) const {
  auto found = values.find(name);
  return found == values.end() || found->second.nested.empty() ? nullptr : found->second.nested.front().get();
}

}  // namespace standin

using namespace standin;

namespace {

// A program's handle is a pointer to a share in the descriptor.
Shared& shared(void* handle) { return *static_cast<Shared*>(handle); }

Shared* shares_at(void* handles, int64_t index) {
  void* handle = nullptr;
  std::memcpy(&handle, static_cast<char*>(handles) + index * sizeof handle, sizeof handle);
  return static_cast<Shared*>(handle);
}

void inherit(Descriptor& to, int name) {
  if (const Descriptor* from = to.nested(name)) to.workspace = from->workspace;
}

Value value_of(Shared descriptor) { return {CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, {}, {std::move(descriptor)}}; }

void answer(int64_t value, cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* result) {
  if (count) *count = 1;
  if (result && wanted > 0) std::memcpy(result, &value, std::min(width_of(type), sizeof value));
}

void answer_configuration(const Descriptor& heuristic, int64_t wanted, int64_t* count, void* results) {
  if (count) *count = 1;
  if (!results || wanted < 1) return;
  Shared* share = shares_at(results, 0);
  if (!share || !*share) return;
  auto engine = std::make_shared<Descriptor>();
  engine->kind = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
  auto graph = heuristic.values.find(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
  if (graph != heuristic.values.end()) engine->values[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = graph->second;
  inherit(*engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
  Descriptor& configuration = **share;
  configuration.values[CUDNN_ATTR_ENGINECFG_ENGINE] = value_of(engine);
  inherit(configuration, CUDNN_ATTR_ENGINECFG_ENGINE);
}

void answer_stored(const Value& value, int64_t wanted, int64_t* count, void* results) {
  if (count) *count = value.count;
  const int64_t given = std::min(wanted, value.count);
  if (!results || given <= 0) return;
  if (value.type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    std::memcpy(results, value.bytes.data(), given * width_of(value.type));
    return;
  }
  for (int64_t i = 0; i < given; ++i) {
    Shared* share = shares_at(results, i);
    if (share && value.nested[i]) *share = value.nested[i];
  }
}

// Lists that an engine may have and ours has not.
bool is_rightly_empty(int name) {
  switch (name) {
    case CUDNN_ATTR_ENGINE_KNOB_INFO:
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE:
    case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES:
    case CUDNN_ATTR_EXECUTION_PLAN_COMPUTED_INTERMEDIATE_UIDS: return true;
    default: return false;
  }
}

}  // namespace

MEMTRACE_API cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

MEMTRACE_API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind,
                                                        cudnnBackendDescriptor_t* handle) {
  auto* share = new Shared(std::make_shared<Descriptor>());
  (*share)->kind = kind;
  *handle = reinterpret_cast<cudnnBackendDescriptor_t>(share);
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t handle) {
  delete reinterpret_cast<Shared*>(handle);
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                                    cudnnBackendAttributeType_t type, int64_t count,
                                                    const void* data) {
  if (!handle || count < 0 || (count > 0 && !data)) return CUDNN_STATUS_BAD_PARAM;
  Value value{type, count, {}, {}};
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (int64_t i = 0; i < count; ++i) {
      Shared* share = shares_at(const_cast<void*>(data), i);
      value.nested.push_back(share ? *share : nullptr);
    }
  } else {
    value.bytes.assign(static_cast<const char*>(data), count * width_of(type));
  }
  shared(handle)->values[name] = std::move(value);
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t handle) {
  Descriptor& descriptor = *shared(handle);
  switch (descriptor.kind) {
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: descriptor.workspace = workspace_of_graph(descriptor); break;
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR: inherit(descriptor, CUDNN_ATTR_ENGINE_OPERATION_GRAPH); break;
    case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR: inherit(descriptor, CUDNN_ATTR_ENGINECFG_ENGINE); break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: inherit(descriptor, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG); break;
    default: break;
  }
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t handle,
                                                    cudnnBackendAttributeName_t name,
                                                    cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count,
                                                    void* results) {
  const Shared descriptor = shared(handle);  // held: an answer may replace what the handle stands for
  if (descriptor->kind == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR && name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    answer_configuration(*descriptor, wanted, count, results);
    return CUDNN_STATUS_SUCCESS;
  }
  const auto stored = descriptor->values.find(name);
  const bool is_stored = stored != descriptor->values.end();
  switch (name) {
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
      answer(descriptor->workspace, type, wanted, count, results);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED: answer(0, type, wanted, count, results); return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      answer(1, type, wanted, count, results);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      if (is_stored) break;
      answer(0, type, wanted, count, results);
      return CUDNN_STATUS_SUCCESS;
    default: break;
  }
  if (is_stored) {
    answer_stored(stored->second, wanted, count, results);
    return CUDNN_STATUS_SUCCESS;
  }
  if (count) *count = 0;
  if (!is_rightly_empty(name)) {
    note(("cuDNN attribute " + std::to_string(name) + " of descriptor " + std::to_string(descriptor->kind) +
          " not answered").c_str());
  }
  return CUDNN_STATUS_SUCCESS;
}
