// The runtime API: properties, kernels that do nothing, and driver functions by name.
#include "runtime.h"

#include "facts.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_set>

namespace standin {
namespace {

constexpr int kRegisters = 32;  // of any kernel; nobody has asked for a reason yet

struct LaunchShape {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
// Not initialized on purpose, so that no constructor runs: always pushed before it is popped.
LaunchShape& pushed() {
  static thread_local LaunchShape shape{};
  return shape;
}

// torch looks these up at its start and does without them: parts of a GPU, memory of several GPUs, the driver's log.
bool is_optional(const char* name) {
  for (const char* part : {"GreenCtx", "DevResource", "SmResource", "cuMulticast", "cuLogs"}) {
    if (std::strstr(name, part)) return true;
  }
  return false;
}

void* own_library() {
  static void* const self = [] {
    Dl_info info;
    const auto here = reinterpret_cast<const void*>(&own_library);
    return dladdr(here, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
  }();
  return self;
}

void fill_properties(cudaDeviceProp* of, int device) {
  auto value = [device](int which) {
    int answer = 0;
    return attribute(which, device, &answer) ? answer : 0;
  };
  std::memset(of, 0, sizeof *of);
  std::snprintf(of->name, sizeof of->name, "%s", gpu_name());
  of->uuid.bytes[15] = static_cast<char>(device);
  of->totalGlobalMem = total_bytes();
  of->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
  for (int axis = 0; axis < 3; ++axis) {
    of->maxThreadsDim[axis] = value(cudaDevAttrMaxBlockDimX + axis);
    of->maxGridSize[axis] = value(cudaDevAttrMaxGridDimX + axis);
  }
  of->major = value(cudaDevAttrComputeCapabilityMajor);
  of->minor = value(cudaDevAttrComputeCapabilityMinor);
  of->multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
  of->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
  of->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
  of->warpSize = value(cudaDevAttrWarpSize);
  of->regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
  of->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
  of->sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
  of->sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  of->sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  of->reservedSharedMemPerBlock = value(cudaDevAttrReservedSharedMemoryPerBlock);
  of->totalConstMem = value(cudaDevAttrTotalConstantMemory);
  of->memPitch = value(cudaDevAttrMaxPitch);
  of->textureAlignment = value(cudaDevAttrTextureAlignment);
  of->texturePitchAlignment = value(cudaDevAttrTexturePitchAlignment);
  of->surfaceAlignment = value(cudaDevAttrSurfaceAlignment);
  of->maxTexture1D = value(cudaDevAttrMaxTexture1DWidth);
  of->l2CacheSize = value(cudaDevAttrL2CacheSize);
  of->persistingL2CacheMaxSize = value(cudaDevAttrMaxPersistingL2CacheSize);
  of->accessPolicyMaxWindowSize = value(cudaDevAttrMaxAccessPolicyWindowSize);
  of->memoryBusWidth = value(cudaDevAttrGlobalMemoryBusWidth);
  of->pciBusID = value(cudaDevAttrPciBusId);
  of->pciDeviceID = value(cudaDevAttrPciDeviceId);
  of->asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
  of->integrated = value(cudaDevAttrIntegrated);
  of->canMapHostMemory = value(cudaDevAttrCanMapHostMemory);
  of->concurrentKernels = value(cudaDevAttrConcurrentKernels);
  of->ECCEnabled = value(cudaDevAttrEccEnabled);
  of->tccDriver = value(cudaDevAttrTccDriver);
  of->unifiedAddressing = value(cudaDevAttrUnifiedAddressing);
  of->streamPrioritiesSupported = value(cudaDevAttrStreamPrioritiesSupported);
  of->globalL1CacheSupported = value(cudaDevAttrGlobalL1CacheSupported);
  of->localL1CacheSupported = value(cudaDevAttrLocalL1CacheSupported);
  of->managedMemory = value(cudaDevAttrManagedMemory);
  of->isMultiGpuBoard = value(cudaDevAttrIsMultiGpuBoard);
  of->hostNativeAtomicSupported = value(cudaDevAttrHostNativeAtomicSupported);
  of->pageableMemoryAccess = value(cudaDevAttrPageableMemoryAccess);
  of->pageableMemoryAccessUsesHostPageTables = value(cudaDevAttrPageableMemoryAccessUsesHostPageTables);
  of->directManagedMemAccessFromHost = value(cudaDevAttrDirectManagedMemAccessFromHost);
  of->concurrentManagedAccess = value(cudaDevAttrConcurrentManagedAccess);
  of->computePreemptionSupported = value(cudaDevAttrComputePreemptionSupported);
  of->canUseHostPointerForRegisteredMem = value(cudaDevAttrCanUseHostPointerForRegisteredMem);
  of->cooperativeLaunch = value(cudaDevAttrCooperativeLaunch);
  of->hostRegisterSupported = value(cudaDevAttrHostRegisterSupported);
  of->hostRegisterReadOnlySupported = value(cudaDevAttrHostRegisterReadOnlySupported);
  of->sparseCudaArraySupported = value(cudaDevAttrSparseCudaArraySupported);
  of->timelineSemaphoreInteropSupported = value(cudaDevAttrTimelineSemaphoreInteropSupported);
  of->memoryPoolsSupported = value(cudaDevAttrMemoryPoolsSupported);
  of->clusterLaunch = value(cudaDevAttrClusterLaunch);
#if CUDART_VERSION < 13000
  of->clockRate = value(cudaDevAttrClockRate);
  of->memoryClockRate = value(cudaDevAttrMemoryClockRate);
  of->deviceOverlap = value(cudaDevAttrGpuOverlap);
  of->cooperativeMultiDeviceLaunch = value(cudaDevAttrCooperativeMultiDeviceLaunch);
  of->singleToDoublePrecisionPerfRatio = value(cudaDevAttrSingleToDoublePrecisionPerfRatio);
#endif
}

// Of torch's kernels: for the first of these, and of no other of 40 kinds that ran alone on the H200, the driver
// enlarged local memory (fill, add, cast, sum, mean, layer norm, dropout; not random numbers, arange, cat, softmax,
// foreach, attention, products).
bool has_large_local_memory(const char* name) {
  for (const char* part : {"elementwise_kernelI", "reduce_kernelI", "layer_norm_kernel", "dropout_kernel"}) {
    if (std::strstr(name, part)) return true;
  }
  return false;
}

std::unordered_set<const void*>& with_large_local_memory() {
  static auto& all = *new std::unordered_set<const void*>;
  return all;
}

cudaError_t launched(const void* function) {
  Guard guard(mutex());
  take_outside(Outside::kernels);
  if (with_large_local_memory().count(function)) take_outside(Outside::local_memory);
  return cudaSuccess;
}

}  // namespace

int blocks_per_multiprocessor(int threads) {
  return std::min(fact(kThreadsPerMultiprocessor) / threads, fact(kBlocksPerMultiprocessor));
}

void* driver_function(const char* name) {
  // cuda.h turns a plain name into its newest version, so that is what a plain name means here too.
  for (const char* version : {"_v3", "_v2", ""}) {
    const std::string full = std::string(name) + version;
    if (void* found = dlsym(own_library(), full.c_str())) return found;
  }
  if (*name && !is_optional(name)) note((std::string("driver function not offered: ") + name).c_str());
  return nullptr;
}

}  // namespace standin

using namespace standin;

#undef cudaGetDeviceProperties
#if CUDART_VERSION >= 13000
#define PROPERTIES cudaGetDeviceProperties
#else
#define PROPERTIES cudaGetDeviceProperties_v2
#endif
MEMTRACE_API cudaError_t PROPERTIES(cudaDeviceProp* properties, int device) {
  if (!is_ordinal(device)) return failed(cudaErrorInvalidDevice);
  fill_properties(properties, device);
  return cudaSuccess;
}

MEMTRACE_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->ptxVersion = attributes->binaryVersion = fact(kMajor) * 10 + fact(kMinor);
  attributes->maxThreadsPerBlock = fact(kMaxThreadsPerBlock);
  attributes->numRegs = kRegisters;
  attributes->maxDynamicSharedSizeBytes = fact(kSharedPerBlockOptin);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  if (threads <= 0) return failed(cudaErrorInvalidValue);
  *blocks = blocks_per_multiprocessor(threads);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                                                int threads, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

// What every __device__ variable is: 64 KiB that all share. Kernels that would write there do not run.
MEMTRACE_API cudaError_t cudaGetSymbolAddress(void** result, const void*) {
  static char shared[1 << 16];
  *result = shared;
  return cudaSuccess;
}

// --- launches: nothing runs

#undef cudaLaunchKernel
#undef cudaLaunchKernelExC
#undef cudaLaunchCooperativeKernel
MEMTRACE_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(function);
}
MEMTRACE_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return launched(function);
}
MEMTRACE_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(function);
}

// --- what nvcc's host code calls around a launch

MEMTRACE_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed() = {grid, block, shared, stream};
  return 0;
}
MEMTRACE_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed().grid;
  *block = pushed().block;
  *shared = pushed().shared;
  *static_cast<cudaStream_t*>(stream) = pushed().stream;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(kernel);
}
MEMTRACE_API cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
MEMTRACE_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*,
                                         void*, void*, int*) {
  if (!has_large_local_memory(name)) return;
  Guard guard(mutex());
  with_large_local_memory().insert(function);
}
MEMTRACE_API void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
MEMTRACE_API cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = static_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}

// --- the driver's functions

#undef cudaGetDriverEntryPoint
#undef cudaGetDriverEntryPointByVersion
MEMTRACE_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                          unsigned long long,
                                                          cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                                 cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
