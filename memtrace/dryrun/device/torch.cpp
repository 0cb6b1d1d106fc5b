// What torch's own libraries ask one another, where the truth does not serve a dry run.
#include "standin.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstring>

// Whether memory can be shared over a fabric. There is nobody to share it with; torch would ask NVML, which is not there
// either, and torch does not look.
MEMTRACE_API bool _ZN3c104cuda17get_fabric_accessEa(signed char) { return false; }

// torch asks c10::impl::dispatch_mode_enabled() and, while any Python dispatch mode is active, takes slower paths that
// allocate more (attention, gradient accumulation). memtrace's own mode must not show there: callers inside
// libtorch_cpu and libtorch_cuda are told only of others. The Python bindings need the truth and get it.
namespace {

constexpr const char* kEnabled = "_ZN3c104impl21dispatch_mode_enabledEv";
constexpr const char* kCount = "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv";  // modes of this thread
constexpr int kMaxRanges = 32;

struct Range {
  uintptr_t begin, end;
};
Range ranges[kMaxRanges];
std::atomic<int> range_count{0};
std::atomic<bool> hidden{false};

// A function of libc10, which is not in the global scope; null where this release has none of the name.
template <typename Function>
Function in_torch(const char* name, std::atomic<Function>& found) {
  Function function = found.load(std::memory_order_relaxed);
  if (function) return function;
  void* library = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  if (!library) return nullptr;
  function = reinterpret_cast<Function>(dlsym(library, name));
  found = function;
  return function;
}

bool (*enabled())() {
  static std::atomic<bool (*)()> found{nullptr};
  return in_torch(kEnabled, found);
}

int64_t (*count())() {
  static std::atomic<int64_t (*)()> found{nullptr};
  return in_torch(kCount, found);
}

int add_segments(dl_phdr_info* info, size_t, void*) {
  if (!std::strstr(info->dlpi_name, "/libtorch_cpu.so") && !std::strstr(info->dlpi_name, "/libtorch_cuda.so")) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    const int at = range_count;
    if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X) || at == kMaxRanges) continue;
    const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
    ranges[at] = {begin, begin + segment.p_memsz};
    range_count = at + 1;
  }
  return 0;
}

}  // namespace

MEMTRACE_API void memtrace_hide_mode(int on) {
  if (range_count == 0) {
    standin::Guard guard(standin::mutex());
    if (range_count == 0) dl_iterate_phdr(add_segments, nullptr);
  }
  hidden = on != 0;
}

// Whether the libc10 that is loaded has the functions at all: other versions of torch may not.
MEMTRACE_API int memtrace_can_hide() { return enabled() && count(); }

MEMTRACE_API bool _ZN3c104impl21dispatch_mode_enabledEv() {
  if (hidden.load(std::memory_order_relaxed)) {
    const auto caller = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    const int known = range_count.load(std::memory_order_acquire);
    for (int i = 0; i < known; ++i) {
      if (caller < ranges[i].begin || caller >= ranges[i].end) continue;
      const auto modes = count();
      return modes && modes() > 1;
    }
  }
  const auto ask = enabled();
  return ask && ask();
}
