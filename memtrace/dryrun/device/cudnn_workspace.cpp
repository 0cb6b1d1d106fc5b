// The sizes of cuDNN's workspaces: the only real content of the graph API. Attention is exact (39 of 39 calls recorded
// on an H200, every allocation in order); convolutions are a guess.
#include "cudnn_graph.h"
#include "facts.h"

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

struct Operands {
  int64_t x, y, w;                                 // bytes, of copies where there may be some
  int64_t batch, inputs, outputs, group, taps;     // images; channels, and those that one weight sees; of a window
  int64_t places;                                  // of the output, in one image
  int64_t weights;                                 // how many
  bool strided, half, channels_last;

  int64_t rows() const { return batch * places; }  // of the matrix product that the convolution is
  int64_t depth() const { return inputs * taps; }
  bool is_aligned() const { return inputs % 8 == 0 && outputs % 8 == 0; }
};

int64_t product_from(const std::vector<int64_t>& sizes, size_t first) {
  int64_t product = 1;
  for (size_t axis = first; axis < sizes.size(); ++axis) product *= sizes[axis];
  return product;
}

// Of the copies that tensor-core kernels work on: 16 bytes of channels at a time.
int64_t padded_channels(int64_t count, bool half) {
  const int64_t step = half ? 8 : 4;
  return (count + step - 1) / step * step;
}

Operands operands_of(const Convolution& of) {
  const auto input = sizes_of(*of.input);
  const auto output = sizes_of(*of.output);
  const auto window = sizes_of(*of.weights);
  const bool complete = input.size() > 2 && output.size() > 2 && window.size() > 2;
  Operands all{};
  all.x = bytes_of(*of.input);
  all.y = bytes_of(*of.output);
  all.w = bytes_of(*of.weights);
  all.weights = elements_of(*of.weights);
  all.half = element_bytes_of(*of.input) == 2;
  all.channels_last = is_channels_last(*of.input);
  if (!complete) return all;
  all.batch = input[0];
  all.inputs = input[1];
  all.outputs = window[0];
  all.group = window[1];
  all.taps = product_from(window, 2);
  all.places = product_from(output, 2);
  all.strided = input[2] > output[2] + window[2];
  if (all.channels_last || all.taps == 1 || all.group != all.inputs || all.inputs * all.outputs == 0) return all;
  const int64_t inputs = padded_channels(all.inputs, all.half);
  const int64_t outputs = padded_channels(all.outputs, all.half);
  all.x = all.x / all.inputs * inputs;
  all.y = all.y / all.outputs * outputs;
  all.w = all.w / (all.inputs * all.outputs) * inputs * outputs;
  return all;
}

// Which algorithm runs is cuDNN's own choice. In NCHW the tensor-core kernels work on NHWC copies of the operands, in
// channels-last on the operands themselves. The rule was fitted on 2,586 calls of cuDNN 9.19 on an H200
// (bench/convolutions.py, which says how many are equal): its numbers are where other kernels were taken there.
constexpr int64_t kPersistentBytes = 131;  // of kernels that go over many rows
constexpr int64_t kPartialSumsBytes = 679;
constexpr int64_t kGroupedBytes = 64;
constexpr int64_t kFewPlaces = 904;
constexpr int64_t kManyRows = 28928, kVeryManyRows = 400000;
constexpr int64_t kRowsToShareOfFloats = 8720, kRowsToShareOfHalves = 25088, kWeightsToShareOfHalves = 73728;
constexpr int64_t kShallow = 136, kShallowFloats = 272, kShallowWeights = 32, kDeepLast = 432;  // depths

int64_t workspace_of_points(Pass pass, const Operands& of) {
  const int64_t copies = of.x + of.y + kTensorCoreBytes;
  if (pass == Pass::weights) {
    const int64_t one_each = of.batch * of.weights * 4;  // a gradient in fp32 for each image, then their sum
    return of.strided || (of.batch > 1 && one_each > copies) ? copies : one_each;
  }
  if (of.strided) return copies + (pass == Pass::data && of.batch > 4 ? kPersistentBytes : 0);
  if (pass == Pass::data) return !of.half && of.rows() > kManyRows ? kPointwiseDataBytes : 0;
  return of.half && of.places <= kFewPlaces && of.depth() > kShallow ? copies : 0;
}

// Gradients of few weights over many rows: the rows are shared out until every multiprocessor has a tile of weights, and
// each share has a sum of its own.
int64_t shares_of_rows(const Operands& of) {
  const int64_t tile = of.half || of.outputs > 64 ? 128 : 64;
  const auto tiles = [tile](int64_t size) { return (size + tile - 1) / tile; };
  const int64_t processors = fact(kMultiprocessors);
  const int64_t all = tiles(of.outputs) * tiles(of.group * of.taps);
  return (processors + all - 1) / all;
}

int64_t workspace_of_windows(Pass pass, const Operands& of) {
  const int64_t copies = of.x + of.y + of.w + kTensorCoreBytes;
  switch (pass) {
    case Pass::forward:
      if (of.depth() <= kShallow && (!of.half || of.inputs < 4)) return 0;
      if (!of.half && !of.is_aligned() && of.inputs < 64) return 0;
      return copies + (of.rows() > kManyRows ? kPersistentBytes : 0);
    case Pass::data:
      if (of.depth() <= kShallowFloats && !of.half) return 0;
      return copies + (of.batch > 3 ? kPersistentBytes : 0);
    case Pass::weights: break;
  }
  if (!of.half && of.depth() < kShallowWeights && of.rows() >= kVeryManyRows) return 0;
  const bool shared_out = of.half ? of.rows() >= kRowsToShareOfHalves && of.weights <= kWeightsToShareOfHalves
                                  : of.rows() > kRowsToShareOfFloats;
  const int64_t shares = shared_out ? shares_of_rows(of) : 1;
  return shares > 1 ? of.x + of.y + shares * of.w + kPartialSumsBytes : copies;
}

int64_t workspace_in_channels_last(Pass pass, const Operands& of) {
  if (pass == Pass::weights || !of.is_aligned() || of.depth() <= kDeepLast) return 0;
  const bool persistent = of.rows() > kManyRows || (pass == Pass::data && of.strided && of.batch > 4);
  return persistent ? kPersistentBytes : 0;
}

int64_t workspace_by_rule(const Convolution& convolution) {
  const Operands of = operands_of(convolution);
  const bool grouped = of.group != of.inputs;
  if (grouped && (of.group == 1 || of.channels_last)) return 0;
  if (grouped) return of.x + of.y + kGroupedBytes;
  if (of.channels_last) return workspace_in_channels_last(convolution.pass, of);
  if (of.taps <= 1) return workspace_of_points(convolution.pass, of);
  return workspace_of_windows(convolution.pass, of);
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
