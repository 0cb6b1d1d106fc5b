// Recurrent nets. The size of the weights is exact, their order our own: all matrices layer by layer, then all biases.
// Workspace and reserve are a guess.
#include "cudnn_shape.h"

using namespace standin;

namespace {

struct Recurrent {
  int64_t gates = 1;
  int64_t directions = 1;
  int64_t input = 0, hidden = 0, projected = 0, layers = 0;
  bool biased = false;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;

  int64_t element_bytes() const {
    return type == CUDNN_DATA_FLOAT ? 4 : type == CUDNN_DATA_DOUBLE ? 8 : 2;
  }
  bool is_projected() const { return projected && projected != hidden; }
  int64_t output() const { return projected ? projected : hidden; }
  int64_t cells() const { return layers * directions; }  // a layer in one direction, cuDNN's "pseudo layer"
  int64_t width(int64_t cell) const { return cell / directions == 0 ? input : output() * directions; }
  int64_t weights(int64_t cell) const {
    return gates * hidden * (width(cell) + output()) + (is_projected() ? projected * hidden : 0);
  }
  int64_t weights_before(int64_t cell) const {
    int64_t sum = 0;
    for (int64_t each = 0; each < cell; ++each) sum += weights(each);
    return sum;
  }
  int64_t biases() const { return biased ? 2 * gates * hidden * cells() : 0; }
};

Recurrent& recurrent(cudnnRNNDescriptor_t handle) { return *reinterpret_cast<Recurrent*>(handle); }

int64_t gates_of(cudnnRNNMode_t cell) { return cell == CUDNN_LSTM ? 4 : cell == CUDNN_GRU ? 3 : 1; }

void describe(cudnnTensorDescriptor_t handle, cudnnDataType_t type, int64_t rows, int64_t columns) {
  const int height = static_cast<int>(rows);
  const int width = static_cast<int>(columns);
  if (handle) shape(handle) = {type, {1, height, width}, {height * width, width, 1}};
}

}  // namespace

MEMTRACE_API cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* handle) {
  *handle = reinterpret_cast<cudnnRNNDescriptor_t>(new Recurrent);
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t handle) {
  delete reinterpret_cast<Recurrent*>(handle);
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t handle, cudnnRNNAlgo_t, cudnnRNNMode_t cell,
                                                    cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
                                                    cudnnRNNInputMode_t, cudnnDataType_t type, cudnnDataType_t,
                                                    cudnnMathType_t, int32_t input, int32_t hidden, int32_t projected,
                                                    int32_t layers, cudnnDropoutDescriptor_t, uint32_t) {
  Recurrent& net = recurrent(handle);
  net.gates = gates_of(cell);
  net.directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1;
  net.input = input;
  net.hidden = hidden;
  net.projected = projected;
  net.layers = layers;
  net.biased = bias != CUDNN_RNN_NO_BIAS;
  net.type = type;
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t handle, size_t* bytes) {
  const Recurrent& net = recurrent(handle);
  *bytes = net.element_bytes() * (net.weights_before(net.cells()) + net.biases());
  return CUDNN_STATUS_SUCCESS;
}

// Matrix and bias number `which` of a cell: those for its input, then those for its own output, then the projection.
MEMTRACE_API cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t handle, int32_t cell, size_t,
                                                   const void* space, int32_t which,
                                                   cudnnTensorDescriptor_t matrix_shape, void** matrix,
                                                   cudnnTensorDescriptor_t bias_shape, void** bias) {
  const Recurrent& net = recurrent(handle);
  char* base = static_cast<char*>(const_cast<void*>(space));
  const bool is_projection = which == 2 * net.gates;
  const bool is_recurrent = which >= net.gates && !is_projection;
  const int64_t rows = is_projection ? net.projected : net.hidden;
  const int64_t columns = is_projection ? net.hidden : is_recurrent ? net.output() : net.width(cell);
  const int64_t of_input = net.hidden * net.width(cell);
  const int64_t of_output = net.hidden * net.output();
  int64_t offset = net.weights_before(cell);
  if (is_projection) {
    offset += net.gates * (of_input + of_output);
  } else if (is_recurrent) {
    offset += net.gates * of_input + (which - net.gates) * of_output;
  } else {
    offset += which * of_input;
  }
  describe(matrix_shape, net.type, rows, columns);
  if (matrix) *matrix = is_projection && !net.is_projected() ? nullptr : base + net.element_bytes() * offset;
  if (!bias) return CUDNN_STATUS_SUCCESS;
  if (!net.biased || is_projection) {
    *bias = nullptr;
    return CUDNN_STATUS_SUCCESS;
  }
  describe(bias_shape, net.type, net.hidden, 1);
  const int64_t before = net.weights_before(net.cells()) + (cell * 2 * net.gates + which) * net.hidden;
  *bias = base + net.element_bytes() * before;
  return CUDNN_STATUS_SUCCESS;
}

MEMTRACE_API cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t* handle) { return new_shape(handle); }
MEMTRACE_API cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t handle) {
  return drop_shape(handle);
}
MEMTRACE_API cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t handle, cudnnDataType_t type,
                                                     cudnnRNNDataLayout_t, int steps, int batch, int width, const int*,
                                                     void*) {
  shape(handle) = {type, {steps, batch, width}, {}};
  return CUDNN_STATUS_SUCCESS;
}

// Kept for backward: gates and cell state of every step, inputs between layers, first and last states. Workspace: the
// weights, and the gates once more.
MEMTRACE_API cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t handle,
                                                     cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t data,
                                                     size_t* workspace, size_t* reserve) {
  constexpr int64_t kReserveExtra = 256;
  const Recurrent& net = recurrent(handle);
  const Shape& of = shape(data);
  if (of.sizes.size() < 2) return CUDNN_STATUS_BAD_PARAM;
  note("recurrent workspace and reserve guessed");
  const int64_t state = of.sizes[1] * net.directions * net.hidden * net.element_bytes();
  const int64_t layer = of.sizes[0] * state;
  if (workspace) *workspace = net.element_bytes() * net.weights_before(net.cells()) + net.layers * layer * net.gates;
  if (!reserve) return CUDNN_STATUS_SUCCESS;
  const int64_t kept = net.layers * layer * (net.gates + 1) + (net.layers - 1) * layer + 2 * net.layers * state;
  *reserve = mode == CUDNN_FWD_MODE_TRAINING ? kept + kReserveExtra : 0;
  return CUDNN_STATUS_SUCCESS;
}
