// Which GPU the stand-in is. Configured by MEMTRACE_GPU_*; without them the NVIDIA H200 that was measured.
#pragma once
#include <cstddef>

namespace standin {

// Indices are CUdevice_attribute (cuda.h); cudaDeviceAttr has the same numbers.
enum Attribute : int {
  kMaxThreadsPerBlock = 1,
  kMultiprocessors = 16,
  kPciBus = 33,
  kPciDevice = 34,
  kL2Bytes = 38,
  kThreadsPerMultiprocessor = 39,
  kMajor = 75,
  kMinor = 76,
  kSharedPerMultiprocessor = 81,
  kSingleToDouble = 87,
  kSharedPerBlockOptin = 97,
  kBlocksPerMultiprocessor = 106,
  kPersistingL2Bytes = 108,
  kClusterLaunch = 120,
  kTensorMap = 127,
  kFabricHandle = 128,
};

bool attribute(int which, int device, int* value);  // false: a real device does not have it
int fact(int which);                                // of device 0; 0 where there is none
const char* gpu_name();
int gpu_count();
size_t total_bytes();
size_t context_bytes();       // what the driver takes when a context is made
size_t code_bytes();          // of the first kernels of a library
size_t stream_bytes(int count);  // for so many streams
size_t blas_bytes();          // for each cuBLAS handle
size_t dnn_bytes();           // for each cuDNN handle

}  // namespace standin
