// cuDNN's older API: handles, descriptors, batch norm, dropout.
#include "cudnn_shape.h"

#include "facts.h"

#include <cuda_runtime_api.h>

namespace {

using namespace standin;

constexpr size_t kDropoutStateBytes = 24;  // of one thread

template <typename Handle>
cudnnStatus_t made(Handle* result) {
  *result = static_cast<Handle>(new_handle());
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

MEMTRACE_API cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  take_outside(Outside::dnn_handle);
  return made(handle);
}
MEMTRACE_API size_t cudnnGetVersion() { return CUDNN_VERSION; }
MEMTRACE_API size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
MEMTRACE_API cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  switch (which) {
    case MAJOR_VERSION: *value = CUDNN_MAJOR; break;
    case MINOR_VERSION: *value = CUDNN_MINOR; break;
    default: *value = CUDNN_PATCHLEVEL;
  }
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "error of memtrace's stand-in for cuDNN";
}
MEMTRACE_API void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}
MEMTRACE_API cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) {
  *stream = nullptr;
  return CUDNN_STATUS_SUCCESS;
}

// --- descriptors that only have to exist

MEMTRACE_API cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* d) { return made(d); }
MEMTRACE_API cudnnStatus_t cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t* d) { return made(d); }
MEMTRACE_API cudnnStatus_t cudnnCreateDropoutDescriptor(cudnnDropoutDescriptor_t* d) { return made(d); }
MEMTRACE_API cudnnStatus_t cudnnCreatePoolingDescriptor(cudnnPoolingDescriptor_t* d) { return made(d); }
MEMTRACE_API cudnnStatus_t cudnnCreateCTCLossDescriptor(cudnnCTCLossDescriptor_t* d) { return made(d); }
MEMTRACE_API cudnnStatus_t cudnnCreateSpatialTransformerDescriptor(cudnnSpatialTransformerDescriptor_t* d) {
  return made(d);
}

// --- shapes

MEMTRACE_API cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* handle) { return new_shape(handle); }
MEMTRACE_API cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* handle) { return new_shape(handle); }
MEMTRACE_API cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t handle) { return drop_shape(handle); }
MEMTRACE_API cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t handle) { return drop_shape(handle); }

MEMTRACE_API cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t handle, cudnnDataType_t type, int rank,
                                                      const int* sizes, const int* strides) {
  shape(handle) = {type, {sizes, sizes + rank}, {strides, strides + rank}};
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t handle, int wanted,
                                                      cudnnDataType_t* type, int* rank, int* sizes, int* strides) {
  give_shape(shape(handle), wanted, type, rank, sizes, strides);
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t handle, cudnnDataType_t type,
                                                      cudnnTensorFormat_t, int rank, const int* sizes) {
  shape(handle) = {type, {sizes, sizes + rank}, {}};
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t handle, int wanted,
                                                      cudnnDataType_t* type, cudnnTensorFormat_t* format, int* rank,
                                                      int* sizes) {
  give_shape(shape(handle), wanted, type, rank, sizes, nullptr);
  if (format) *format = CUDNN_TENSOR_NCHW;
  return CUDNN_STATUS_SUCCESS;
}

// --- dropout and batch norm

MEMTRACE_API cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) {
  const size_t threads = static_cast<size_t>(fact(kMultiprocessors)) * fact(kThreadsPerMultiprocessor);
  *bytes = threads * kDropoutStateBytes;
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
  note("batch norm workspace taken as 0");
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  note("batch norm workspace taken as 0");
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
MEMTRACE_API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                                cudnnBatchNormOps_t,
                                                                                const cudnnActivationDescriptor_t,
                                                                                const cudnnTensorDescriptor_t,
                                                                                size_t* bytes) {
  note("batch norm reserve taken as 0");
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
