// cudaMallocAsync and its pools: the same memory as cudaMalloc's. A real pool keeps freed memory until it is trimmed;
// this one gives it back at once, which is said.
#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace {

using namespace standin;

struct Pool {
  size_t used = 0;
  size_t peak = 0;
};

Pool& pool_of(int device) {
  static auto* const all = new Pool[kMaxDevices];
  return all[device];
}

cudaMemPool_t name_of(int device) { return reinterpret_cast<cudaMemPool_t>(&pool_of(device)); }

int device_of_pool(cudaMemPool_t pool) {
  const auto index = reinterpret_cast<Pool*>(pool) - &pool_of(0);
  return index >= 0 && index < kMaxDevices ? static_cast<int>(index) : current_device();
}

struct Share {
  int device;
  size_t bytes;
};

std::map<void*, Share>& shares() {
  static auto& all = *new std::map<void*, Share>;
  return all;
}

cudaError_t allocate_from(int device, void** result, size_t bytes) {
  note("cudaMallocAsync answered as cudaMalloc: its pool keeps nothing back");
  Guard guard(mutex());
  if (allocate(device, bytes, result) != Outcome::ok) return failed(cudaErrorMemoryAllocation);
  if (!*result) return cudaSuccess;
  shares()[*result] = {device, bytes};
  Pool& pool = pool_of(device);
  pool.used += bytes;
  pool.peak = std::max(pool.peak, pool.used);
  return cudaSuccess;
}

}  // namespace

MEMTRACE_API cudaError_t cudaMallocAsync(void** result, size_t bytes, cudaStream_t) {
  return allocate_from(current_device(), result, bytes);
}
MEMTRACE_API cudaError_t cudaMallocFromPoolAsync(void** result, size_t bytes, cudaMemPool_t pool, cudaStream_t) {
  return allocate_from(device_of_pool(pool), result, bytes);
}
MEMTRACE_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  Guard guard(mutex());
  auto share = shares().find(pointer);
  if (share != shares().end()) {
    pool_of(share->second.device).used -= share->second.bytes;
    shares().erase(share);
  }
  return release(pointer) == Outcome::ok ? cudaSuccess : failed(cudaErrorInvalidValue);
}

MEMTRACE_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  if (!is_ordinal(device)) return failed(cudaErrorInvalidDevice);
  *pool = name_of(device);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}

MEMTRACE_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void* value) {
  Guard guard(mutex());
  const Pool& of = pool_of(device_of_pool(pool));
  uint64_t answer = 0;
  switch (which) {
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent: answer = of.used; break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh: answer = of.peak; break;
    case cudaMemPoolAttrReleaseThreshold: break;
    default:  // the reuse policies are an int
      std::memset(value, 0, sizeof(int));
      return cudaSuccess;
  }
  std::memcpy(value, &answer, sizeof answer);
  return cudaSuccess;
}
