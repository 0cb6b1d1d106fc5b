// The runtime API: devices, memory, errors.
#include "runtime.h"

#include "facts.h"

#include <cstdio>
#include <cstring>

namespace standin {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer is not registered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by memtrace's stand-in for a GPU"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};
constexpr ErrorText kOther = {cudaErrorUnknown, "cudaErrorUnknown", "error of memtrace's stand-in for a GPU"};

const ErrorText& text_of(cudaError_t error) {
  for (const ErrorText& each : kErrors) {
    if (each.error == error) return each;
  }
  return kOther;
}

cudaError_t result_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::ok: return cudaSuccess;
    case Outcome::out_of_memory: return failed(cudaErrorMemoryAllocation);
    case Outcome::invalid: break;
  }
  return failed(cudaErrorInvalidValue);
}

cudaError_t fill_any(void* to, int value, size_t bytes) {
  if (bytes && !is_device_memory(to) && !is_pinned(to)) return failed(cudaErrorInvalidValue);
  fill(to, value, bytes);
  return cudaSuccess;
}

}  // namespace

cudaError_t failed(cudaError_t error) { return last_error = error; }

int driver_version() { return CUDART_VERSION; }

}  // namespace standin

using namespace standin;

// --- errors and versions

MEMTRACE_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
MEMTRACE_API cudaError_t cudaPeekAtLastError() { return last_error; }
MEMTRACE_API const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }
MEMTRACE_API const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }

MEMTRACE_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_version();
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// --- devices

MEMTRACE_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpu_count();
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
MEMTRACE_API cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaSetDevice(int device) {
  if (!is_ordinal(device)) return failed(cudaErrorInvalidDevice);
  select_device(device);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (!is_ordinal(device)) return failed(cudaErrorInvalidDevice);
  if (!attribute(static_cast<int>(which), device, value)) {
    *value = 0;
    note("attribute the real device does not have");
  }
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!is_ordinal(device) || !is_ordinal(peer)) return failed(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!is_ordinal(device)) return failed(cudaErrorInvalidDevice);
  std::snprintf(text, size, "0000:%02x:%02x.0", device, fact(kPciDevice));
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit which) {
  switch (which) {  // as the H200 answered
    case cudaLimitPrintfFifoSize: *value = 8650752; break;
    case cudaLimitMallocHeapSize: *value = 8388608; break;
    default: *value = 1024;
  }
  return cudaSuccess;
}

// --- memory

MEMTRACE_API cudaError_t cudaMalloc(void** result, size_t bytes) {
  return result_of(allocate(current_device(), bytes, result));
}
MEMTRACE_API cudaError_t cudaFree(void* pointer) {
  enter(current_device());  // cudaFree(nullptr) is how programs ask for a context
  return result_of(release(pointer));
}
MEMTRACE_API cudaError_t cudaMallocManaged(void** result, size_t bytes, unsigned) {
  note("managed memory answered as device memory");
  return cudaMalloc(result, bytes);
}
MEMTRACE_API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  enter(current_device());
  *available = free_bytes(current_device());
  *total = total_bytes();
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  void* where = const_cast<void*>(pointer);
  Guard guard(mutex());
  if (is_device_memory(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = device_of(pointer);
    attributes->devicePointer = where;
  } else if (is_pinned(pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = current_device();
    attributes->devicePointer = attributes->hostPointer = where;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    attributes->hostPointer = where;
  }
  return cudaSuccess;
}

// --- copies

MEMTRACE_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  copy(to, from, bytes);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                             cudaStream_t) {
  if (!is_ordinal(to_device) || !is_ordinal(from_device)) return failed(cudaErrorInvalidDevice);
  copy(to, from, bytes);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, nullptr);
}
MEMTRACE_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                           size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) return failed(cudaErrorInvalidValue);
  copy_rows(to, to_pitch, from, from_pitch, width, height);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                      size_t height, cudaMemcpyKind kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
}
MEMTRACE_API cudaError_t cudaMemset(void* to, int value, size_t bytes) { return fill_any(to, value, bytes); }
MEMTRACE_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return fill_any(to, value, bytes);
}
