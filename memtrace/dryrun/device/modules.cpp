// The driver API: code and launches. Triton compiles with its own ptxas and loads here; nothing runs.
#include "driver.h"

#include "facts.h"

#include <cstring>

using namespace standin;

namespace {

template <typename Handle>
CUresult made(Handle* result) {
  *result = static_cast<Handle>(new_handle());
  return CUDA_SUCCESS;
}

}  // namespace

MEMTRACE_API CUresult cuModuleLoad(CUmodule* module, const char*) { return made(module); }
MEMTRACE_API CUresult cuModuleLoadData(CUmodule* module, const void*) { return made(module); }
MEMTRACE_API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return made(module);
}
MEMTRACE_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
MEMTRACE_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { return made(function); }
MEMTRACE_API CUresult cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned,
                                        CUlibraryOption*, void**, unsigned) {
  return made(library);
}
MEMTRACE_API CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char*) { return made(kernel); }
MEMTRACE_API CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = fact(kMaxThreadsPerBlock); break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = fact(kMajor) * 10 + fact(kMinor); break;
    default: *value = 0;
  }
  note("kernel's registers and shared memory taken as 32 and 0");
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
MEMTRACE_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
MEMTRACE_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  *blocks = blocks_per_multiprocessor(threads);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     CUstream, void**, void**) {
  take_outside(Outside::kernels);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) {
  take_outside(Outside::kernels);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                unsigned, unsigned, CUstream, void**) {
  take_outside(Outside::kernels);
  return CUDA_SUCCESS;
}
MEMTRACE_API CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*,
                                             const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                             const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  std::memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* linker) { return made(linker); }
MEMTRACE_API CUresult cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*,
                                    void**) {
  return CUDA_SUCCESS;
}
// The code it links is never read.
MEMTRACE_API CUresult cuLinkComplete(CUlinkState, void** code, size_t* bytes) {
  static char nothing[64];
  *code = nothing;
  *bytes = sizeof nothing;
  return CUDA_SUCCESS;
}
