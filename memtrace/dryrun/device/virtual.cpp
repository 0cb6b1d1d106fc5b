// The driver's virtual memory: reservations, memory without an address, and mappings between them. torch's expandable
// segments are made of it.
//
// Memory stays used until it is both released and unmapped.
#include "driver.h"

#include <sys/mman.h>

#include <cstring>
#include <map>

using namespace standin;

namespace {

constexpr size_t kGranularity = 2 * kMiB;

struct Memory {
  size_t size;
  int device;
  int references;  // cuMemCreate and cuMemRetainAllocationHandle, less cuMemRelease
  int mappings;
};

struct Mapping {
  size_t size;
  CUmemGenericAllocationHandle memory;
};

struct State {
  std::map<CUmemGenericAllocationHandle, Memory> memories;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, Mapping> mappings;
  CUmemGenericAllocationHandle next = 1;
};

State& state() {
  static auto& all = *new State;
  return all;
}

// The last entry that begins at or before an address, if the address lies in it.
template <typename Map, typename Size>
typename Map::iterator holding(Map& map, CUdeviceptr at, Size size_of) {
  auto after = map.upper_bound(at);
  if (after == map.begin()) return map.end();
  auto found = std::prev(after);
  return at < found->first + size_of(found->second) ? found : map.end();
}

auto mapping_at(CUdeviceptr at) {
  return holding(state().mappings, at, [](const Mapping& mapping) { return mapping.size; });
}

bool is_reserved(CUdeviceptr at, size_t bytes) {
  auto found = holding(state().reservations, at, [](size_t size) { return size; });
  return found != state().reservations.end() && at + bytes <= found->first + found->second;
}

bool is_free_of_mappings(CUdeviceptr at, size_t bytes) {
  if (mapping_at(at) != state().mappings.end()) return false;
  auto after = state().mappings.lower_bound(at);
  return after == state().mappings.end() || after->first >= at + bytes;
}

void drop_if_unused(CUmemGenericAllocationHandle handle) {
  auto found = state().memories.find(handle);
  const Memory& memory = found->second;
  if (memory.references > 0 || memory.mappings > 0) return;
  unclaim(memory.device, memory.size);
  state().memories.erase(found);
}

}  // namespace

namespace standin {

int mapped_device(const void* pointer) {
  auto mapping = mapping_at(number(pointer));
  if (mapping == state().mappings.end()) return -1;
  return state().memories.at(mapping->second.memory).device;
}

}  // namespace standin

MEMTRACE_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                    CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemAddressReserve(CUdeviceptr* result, size_t bytes, size_t alignment, CUdeviceptr,
                                          unsigned long long) {
  if (bytes == 0 || bytes % kGranularity || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
  Guard guard(mutex());
  char* base = reserve_addresses(bytes, alignment > kGranularity ? alignment : kGranularity, true);
  if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
  *result = number(base);
  state().reservations[*result] = bytes;
  add_range(base, bytes);
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemAddressFree(CUdeviceptr base, size_t bytes) {
  Guard guard(mutex());
  auto found = state().reservations.find(base);
  if (found == state().reservations.end() || found->second != bytes || !is_free_of_mappings(base, bytes)) {
    note("virtual memory freed that is not reserved, or still mapped");
    return CUDA_ERROR_INVALID_VALUE;
  }
  state().reservations.erase(found);
  drop_range(static_cast<char*>(address(base)));
  munmap(address(base), bytes);
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* of,
                                  unsigned long long) {
  if (bytes == 0 || bytes % kGranularity) return CUDA_ERROR_INVALID_VALUE;
  if (of->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    refuse("cuMemCreate of host memory", 0);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const int device = of->location.id;
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  Guard guard(mutex());
  if (!claim(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = state().next++;
  state().memories[*handle] = {bytes, device, 1, 0};
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Guard guard(mutex());
  auto found = state().memories.find(handle);
  if (found == state().memories.end() || found->second.references == 0) {
    note("release of an unknown memory handle");
    return CUDA_ERROR_INVALID_VALUE;
  }
  --found->second.references;
  drop_if_unused(handle);
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                               unsigned long long) {
  Guard guard(mutex());
  auto found = state().memories.find(handle);
  const bool fits = found != state().memories.end() && bytes > 0 && bytes % kGranularity == 0 && offset == 0 &&
                    bytes <= found->second.size;
  if (!fits || !is_reserved(at, bytes) || !is_free_of_mappings(at, bytes)) return CUDA_ERROR_INVALID_VALUE;
  ++found->second.mappings;
  state().mappings[at] = {bytes, handle};
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  Guard guard(mutex());
  auto& mappings = state().mappings;
  const CUdeviceptr end = at + bytes;
  // Whole mappings only, one after the other. Looked through first: an error changes nothing.
  CUdeviceptr reached = at;
  for (auto each = mappings.find(at); each != mappings.end() && each->first == reached && reached < end; ++each) {
    reached += each->second.size;
  }
  if (bytes == 0 || reached != end) return CUDA_ERROR_INVALID_VALUE;
  for (auto each = mappings.find(at); each != mappings.end() && each->first < end;) {
    const auto handle = each->second.memory;
    each = mappings.erase(each);
    --state().memories.at(handle).mappings;
    drop_if_unused(handle);
  }
  madvise(address(at), bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc*, size_t) {
  Guard guard(mutex());
  return is_reserved(at, bytes) && mapping_at(at) != state().mappings.end() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

MEMTRACE_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* result,
                                                             CUmemGenericAllocationHandle handle) {
  Guard guard(mutex());
  auto found = state().memories.find(handle);
  if (found == state().memories.end()) return CUDA_ERROR_INVALID_VALUE;
  std::memset(result, 0, sizeof *result);
  result->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  result->location.id = found->second.device;
  return CUDA_SUCCESS;
}

MEMTRACE_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* at) {
  Guard guard(mutex());
  auto mapping = mapping_at(number(at));
  if (mapping == state().mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  *handle = mapping->second.memory;
  ++state().memories.at(*handle).references;
  return CUDA_SUCCESS;
}

// No other process has this device.
MEMTRACE_API CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                                   unsigned long long) {
  refuse("cuMemExportToShareableHandle", 0);
  return CUDA_ERROR_NOT_SUPPORTED;
}
MEMTRACE_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  refuse("cuMemImportFromShareableHandle", 0);
  return CUDA_ERROR_NOT_SUPPORTED;
}
