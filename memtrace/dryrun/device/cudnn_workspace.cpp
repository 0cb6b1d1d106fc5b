// The sizes of cuDNN's workspaces: the only real content of the graph API. Attention is exact (39 of 39 calls recorded
// on an H200, every allocation in order); convolutions are a guess.
#include "cudnn_graph.h"

#include <string>
#include <vector>

namespace standin {
namespace {

// Numbers of cudnn_graph.h that older releases of it do not name yet.
constexpr int kSdpaForward = 41;
constexpr int kSdpaBackward = 43;
constexpr auto kSdpaForwardQuery = 2800;

constexpr int64_t kAttentionBytes = 256;
constexpr int64_t kTensorCoreBytes = 16;
constexpr int64_t kPointwiseDataBytes = 400;

bool is_single_query(const Descriptor* query) {
  if (!query) return false;
  const auto sizes = sizes_of(*query);
  return sizes.size() == 4 && sizes[2] == 1;
}

// Grouped-query attention has full-head dK and dV, which torch's frontend writes as virtual tensors that are reduced
// over heads: those need room.
int64_t workspace_of_reduction(const Descriptor& operation) {
  const Descriptor* from = operation.nested(CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
  const Descriptor* to = operation.nested(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
  if (!from || !to || !from->integer(CUDNN_ATTR_TENSOR_IS_VIRTUAL, 0)) return 0;
  const auto wide = sizes_of(*from);
  const auto slim = sizes_of(*to);
  const bool over_heads = wide.size() == 4 && slim.size() == 4 && wide[1] > slim[1] && wide[2] == slim[2] &&
                          wide[3] == slim[3];
  return over_heads ? elements_of(*from) * element_bytes_of(*to) : 0;
}

enum class Pass { forward, weights, data };

struct Convolution {
  Pass pass;
  const Descriptor *input, *output, *weights;
};

Convolution convolution_of(const Descriptor& operation) {
  switch (operation.kind) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return {Pass::forward, operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X),
              operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y),
              operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W)};
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return {Pass::weights, operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X),
              operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY),
              operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW)};
    default:
      return {Pass::data, operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX),
              operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY),
              operation.nested(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W)};
  }
}

bool is_convolution(int kind) {
  return kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR ||
         kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR ||
         kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
}

int64_t bytes_of(const Descriptor& tensor) { return elements_of(tensor) * element_bytes_of(tensor); }

bool is_channels_last(const Descriptor& input) {
  const auto strides = input.integers(CUDNN_ATTR_TENSOR_STRIDES);
  const auto sizes = sizes_of(input);
  return strides.size() > 1 && sizes.size() > 1 && strides[1] == 1 && sizes[1] > 1;
}

std::string joined(const std::vector<int64_t>& sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

const char* name_of(Pass pass) {
  switch (pass) {
    case Pass::forward: return "forward";
    case Pass::weights: return "weight gradient";
    case Pass::data: break;
  }
  return "input gradient";
}

std::string described(const Convolution& of) {
  return std::string(name_of(of.pass)) + ", input " + joined(sizes_of(*of.input)) + ", weights " +
         joined(sizes_of(*of.weights)) + ", " + std::to_string(element_bytes_of(*of.input)) + " bytes an element" +
         (is_channels_last(*of.input) ? ", channels last" : "");
}

// Which algorithm runs is cuDNN's own choice. The rule was fitted on one ResNet-50 in fp32 on an H200: in NCHW the
// tensor-core kernels work on NHWC copies of the operands, in channels-last on the operands themselves.
int64_t workspace_by_rule(const Convolution& of) {
  const auto input = sizes_of(*of.input);
  const auto output = sizes_of(*of.output);
  const auto window = sizes_of(*of.weights);
  if (is_channels_last(*of.input)) return 0;
  const int64_t x = bytes_of(*of.input);
  const int64_t y = bytes_of(*of.output);
  const int64_t w = bytes_of(*of.weights);
  const bool has_window = input.size() > 2 && output.size() > 2 && window.size() > 2;
  int64_t taps = 1;
  for (size_t axis = 2; axis < window.size(); ++axis) taps *= window[axis];
  if (taps > 1) {
    const bool patches = has_window && input[1] <= 4 && input[2] == output[2] * window[2];
    if (of.pass == Pass::forward && patches) return 0;  // few channels, windows that do not overlap
    return x + y + (of.pass == Pass::weights ? 4 * w : w) + kTensorCoreBytes;
  }
  const bool strided = has_window && input[2] > output[2] + window[2];
  switch (of.pass) {
    case Pass::forward: return strided ? x + w + kTensorCoreBytes : 0;
    case Pass::weights: return x + y + 4 * w;
    case Pass::data: break;
  }
  return strided ? x + y : kPointwiseDataBytes;
}

}  // namespace

std::vector<int64_t> sizes_of(const Descriptor& tensor) { return tensor.integers(CUDNN_ATTR_TENSOR_DIMENSIONS); }

int64_t elements_of(const Descriptor& tensor) {
  int64_t product = 1;
  for (int64_t size : sizes_of(tensor)) product *= size;
  return product;
}

int64_t element_bytes_of(const Descriptor& tensor) {
  switch (tensor.integer(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_FLOAT)) {
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16: return 2;
    case CUDNN_DATA_DOUBLE:
    case CUDNN_DATA_INT64: return 8;
    case CUDNN_DATA_INT8:
    case CUDNN_DATA_UINT8:
    case CUDNN_DATA_BOOLEAN:
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2: return 1;
    default: return 4;
  }
}

int64_t workspace_of_graph(const Descriptor& graph) {
  int64_t bytes = 0;
  int products = 0;
  bool fused = false;
  bool single_query = false;
  const auto operations = graph.values.find(CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (operations == graph.values.end()) return 0;
  for (const Shared& each : operations->second.nested) {
    const Descriptor& operation = *each;
    if (operation.kind == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
      if (++products == 1) single_query = is_single_query(operation.nested(CUDNN_ATTR_OPERATION_MATMUL_ADESC));
    } else if (operation.kind == kSdpaForward) {
      fused = true;
      if (is_single_query(operation.nested(kSdpaForwardQuery))) {
        single_query = true;
        products = 2;
      }
    } else if (operation.kind == kSdpaBackward) {
      fused = true;
    } else if (operation.kind == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
      bytes += workspace_of_reduction(operation);
    } else if (is_convolution(operation.kind)) {
      bytes += workspace_of_convolution(operation);
    }
  }
  const bool attention = products > 1 || fused;
  const bool decoding = products == 2 && single_query;  // a forward with one query needs nothing
  return attention && !decoding ? bytes + kAttentionBytes : bytes;
}

int64_t workspace_of_convolution(const Descriptor& operation) {
  static const bool guessing = environment("MEMTRACE_GPU_CONV", 1) != 0;
  const Convolution of = convolution_of(operation);
  if (!of.input || !of.output || !of.weights) {
    note("convolution workspace taken as 0: of unknown shape");
    return 0;
  }
  const int64_t bytes = guessing ? workspace_by_rule(of) : 0;
  const std::string size = guessing ? "guessed as " + std::to_string(bytes) + " bytes" : "taken as 0";
  note(("convolution workspace " + size + ": " + described(of)).c_str());
  return bytes;
}

}  // namespace standin
