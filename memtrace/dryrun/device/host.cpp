// Pinned host memory, and copies between host and device.
//
// Small copies are performed, so that a program reads back what it wrote. Large ones would only touch memory.
#include "runtime.h"
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <map>

namespace standin {
namespace {

constexpr size_t kZeroLimit = 16 * kMiB;  // a large result is zero up to here, beyond it whatever is there

struct Pinned {
  size_t size;
  bool ours;  // else the program's, registered
};

std::map<const char*, Pinned>& pinned() {
  static auto& all = *new std::map<const char*, Pinned>;
  return all;
}

struct Answer {
  long long value;
  size_t bytes;
};

std::deque<Answer>& answers() {
  static auto& waiting = *new std::deque<Answer>;
  return waiting;
}

bool take_answer(void* to, size_t bytes) {
  Guard guard(mutex());
  if (answers().empty() || answers().front().bytes != bytes) return false;
  std::memcpy(to, &answers().front().value, bytes);
  answers().pop_front();
  return true;
}

}  // namespace

size_t copy_limit() {
  static const size_t bytes = environment("MEMTRACE_GPU_COPY_LIMIT", kMiB);
  return bytes;
}

bool is_pinned(const void* pointer) {
  Guard guard(mutex());
  const char* at = static_cast<const char*>(pointer);
  auto after = pinned().upper_bound(at);
  if (after == pinned().begin()) return false;
  const auto& [base, span] = *std::prev(after);
  return at < base + span.size;
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const bool to_device = is_device_memory(to);
  if (!to_device && is_device_memory(from) && take_answer(to, bytes)) return;
  if (bytes <= copy_limit()) {
    std::memmove(to, from, bytes);
  } else if (!to_device && bytes <= kZeroLimit) {
    std::memset(to, 0, bytes);
  }
}

void copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height) {
  if (width * height > copy_limit()) return;
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
}

void fill(void* to, int value, size_t bytes) {
  if (bytes <= copy_limit()) std::memset(to, value, bytes);
}

}  // namespace standin

using namespace standin;

// The next copies of this many bytes from device to host read these values, first in, first out: the sizes of results
// that depend on data. 0 bytes forgets those not yet read.
MEMTRACE_API void memtrace_answer(long long value, int bytes) {
  Guard guard(mutex());
  if (bytes <= 0) {
    answers().clear();
  } else if (bytes <= static_cast<int>(sizeof value)) {
    answers().push_back({value, static_cast<size_t>(bytes)});
  }
}

MEMTRACE_API int memtrace_answers_left() {
  Guard guard(mutex());
  return static_cast<int>(answers().size());
}

MEMTRACE_API cudaError_t cudaHostAlloc(void** result, size_t bytes, unsigned) {
  enter(current_device());
  *result = nullptr;
  if (bytes == 0) return cudaSuccess;
  const size_t size = (bytes + kPage - 1) / kPage * kPage;
  if (size < bytes) return failed(cudaErrorMemoryAllocation);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  Guard guard(mutex());
  pinned()[static_cast<char*>(base)] = {size, true};
  *result = base;
  return cudaSuccess;
}

MEMTRACE_API cudaError_t cudaMallocHost(void** result, size_t bytes) { return cudaHostAlloc(result, bytes, 0); }

MEMTRACE_API cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  Guard guard(mutex());
  auto found = pinned().find(static_cast<char*>(pointer));
  if (found == pinned().end() || !found->second.ours) {
    note("free of an unknown host pointer");
    return failed(cudaErrorInvalidValue);
  }
  munmap(pointer, found->second.size);
  pinned().erase(found);
  return cudaSuccess;
}

MEMTRACE_API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  if (!pointer || bytes == 0) return failed(cudaErrorInvalidValue);
  enter(current_device());
  Guard guard(mutex());
  const char* last = static_cast<char*>(pointer) + bytes - 1;
  if (is_pinned(pointer) || is_pinned(last)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  pinned()[static_cast<char*>(pointer)] = {bytes, false};
  return cudaSuccess;
}

MEMTRACE_API cudaError_t cudaHostUnregister(void* pointer) {
  Guard guard(mutex());
  auto found = pinned().find(static_cast<char*>(pointer));
  if (found == pinned().end() || found->second.ours) return failed(cudaErrorHostMemoryNotRegistered);
  pinned().erase(found);
  return cudaSuccess;
}

MEMTRACE_API cudaError_t cudaHostGetDevicePointer(void** result, void* pointer, unsigned) {
  if (!is_pinned(pointer)) return failed(cudaErrorInvalidValue);
  *result = pointer;
  return cudaSuccess;
}
