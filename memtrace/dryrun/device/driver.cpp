// The driver API: devices, contexts, memory, streams.
#include "driver.h"

#include "facts.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

using namespace standin;

namespace {

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported by memtrace's stand-in for a GPU"},
};

const ErrorText* text_of(CUresult error) {
  for (const ErrorText& each : kErrors) {
    if (each.error == error) return &each;
  }
  return nullptr;
}

// A context is its device's place in this array.
char contexts[kMaxDevices];

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }

int device_of_context(CUcontext context) {
  const auto index = reinterpret_cast<char*>(context) - contexts;
  return index >= 0 && index < kMaxDevices ? static_cast<int>(index) : -1;
}

std::vector<int>& pushed() {  // the devices below the current one; leaked by a thread that ends, as threads are few
  static thread_local auto* stack = new std::vector<int>;
  return *stack;
}

CUresult result_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::ok: return CUDA_SUCCESS;
    case Outcome::out_of_memory: return CUDA_ERROR_OUT_OF_MEMORY;
    case Outcome::invalid: break;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Only a vendor's runtime asks for tables that are not documented, and only one that is linked into something gets here.
void say_who_asks(void* caller) {
  Dl_info found;
  const char* path = dladdr(caller, &found) && found.dli_fname ? found.dli_fname : "a library";
  const char* slash = std::strrchr(path, '/');
  note((std::string(slash ? slash + 1 : path) + " has a CUDA runtime of its own linked in, which is not answered: what it "
        "does on a GPU fails").c_str());
}

CUresult copied(void* to, const void* from, size_t bytes) {
  copy(to, from, bytes);
  return CUDA_SUCCESS;
}

}  // namespace

MEMTRACE_API CUresult cuInit(unsigned) { return gpu_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
MEMTRACE_API CUresult cuDriverGetVersion(int* version) {
  *version = driver_version();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* known = text_of(error);
  *text = known ? known->text : nullptr;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
MEMTRACE_API CUresult cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* known = text_of(error);
  *name = known ? known->name : nullptr;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
MEMTRACE_API CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t,
                                       CUdriverProcAddressQueryResult* result) {
  if (std::strcmp(name, "cuGetExportTable") == 0) say_who_asks(__builtin_return_address(0));
  *function = driver_function(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// --- devices

MEMTRACE_API CUresult cuDeviceGetCount(int* count) {
  *count = gpu_count();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuDeviceGetName(char* text, int size, CUdevice device) {
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(text, size, "%s", gpu_name());
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute(static_cast<int>(which), device, value)) return CUDA_SUCCESS;
  *value = 0;
  note("attribute the real device does not have");
  return CUDA_ERROR_INVALID_VALUE;
}
MEMTRACE_API CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = total_bytes();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid, 0, sizeof *uuid);
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

// --- contexts: each device has its primary one

MEMTRACE_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = is_entered(device);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  enter(device);
  *context = context_of(device);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
MEMTRACE_API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = is_entered(current_device()) ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxSetCurrent(CUcontext context) {
  if (!context) return CUDA_SUCCESS;  // the runtime binds the device's own again at its next call
  const int device = device_of_context(context);
  if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  select_device(device);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxPushCurrent(CUcontext context) {
  const int device = device_of_context(context);
  if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  pushed().push_back(current_device());
  select_device(device);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxPopCurrent(CUcontext* context) {
  if (context) *context = context_of(current_device());
  if (pushed().empty()) return CUDA_SUCCESS;
  select_device(pushed().back());
  pushed().pop_back();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxSynchronize() {
  host_waited();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxGetLimit(size_t* value, CUlimit which) {
  switch (which) {  // as the H200 answered
    case CU_LIMIT_STACK_SIZE: *value = 1024; break;
    case CU_LIMIT_PRINTF_FIFO_SIZE: *value = 8650752; break;
    default: *value = 8388608;
  }
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
MEMTRACE_API CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

// --- memory

MEMTRACE_API CUresult cuMemAlloc(CUdeviceptr* result, size_t bytes) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* pointer = nullptr;
  const Outcome outcome = allocate(current_device(), bytes, &pointer);
  *result = number(pointer);
  return result_of(outcome);
}
MEMTRACE_API CUresult cuMemFree(CUdeviceptr pointer) { return result_of(release(address(pointer))); }
MEMTRACE_API CUresult cuMemGetInfo(size_t* available, size_t* total) {
  *available = free_bytes(current_device());
  *total = total_bytes();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  void* start = nullptr;
  size_t size = 0;
  if (!allocation_of(address(pointer), &start, &size)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = number(start);
  if (bytes) *bytes = size;
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  const bool on_device = is_device_memory(address(pointer));
  if (!on_device && !is_pinned(address(pointer))) return CUDA_ERROR_INVALID_VALUE;
  const int device = on_device ? device_of(address(pointer)) : current_device();
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = pointer; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(value) = context_of(device); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = device; return CUDA_SUCCESS;
    default: note("pointer attribute not answered"); return CUDA_ERROR_INVALID_VALUE;
  }
}

MEMTRACE_API CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return copied(address(to), from, bytes);
}
MEMTRACE_API CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return copied(to, address(from), bytes);
}
MEMTRACE_API CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  return copied(address(to), address(from), bytes);
}
MEMTRACE_API CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  return copied(address(to), from, bytes);
}
MEMTRACE_API CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  return copied(to, address(from), bytes);
}
MEMTRACE_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  return copied(address(to), address(from), bytes);
}
MEMTRACE_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream) {
  fill(address(to), value, bytes);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
  if (count > copy_limit() / sizeof value) return CUDA_SUCCESS;
  for (size_t i = 0; i < count; ++i) static_cast<unsigned*>(address(to))[i] = value;
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuStreamWriteValue32(CUstream, CUdeviceptr to, cuuint32_t value, unsigned) {
  *static_cast<cuuint32_t*>(address(to)) = value;
  return CUDA_SUCCESS;
}

// --- streams and events, as far as Triton uses them

MEMTRACE_API CUresult cuStreamCreate(CUstream* stream, unsigned) {
  *stream = static_cast<CUstream>(new_handle());
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuStreamSynchronize(CUstream) {
  host_waited();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuEventCreate(CUevent* event, unsigned) {
  *event = static_cast<CUevent>(new_handle());
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
MEMTRACE_API CUresult cuEventSynchronize(CUevent) {
  host_waited();
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  note("elapsed time answered as 1 ms");
  *milliseconds = 1;
  return CUDA_SUCCESS;
}
