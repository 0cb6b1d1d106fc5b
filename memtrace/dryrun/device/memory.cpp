// Device memory: where the driver puts it, how much there is, whose an address is.
//
// The rules were measured on an H200 (docs: how dry runs work). Memory is taken from the process's own address space
// in slabs of multiples of 32 MiB; slabs are searched newest first; a request goes to the low end of the smallest hole
// that fits; an empty slab is given back at once. The kernel's own choice of addresses does the rest. The pages are
// ordinary memory that is hardly ever touched, so they cost nothing.
#include "standin.h"

#include "facts.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <map>
#include <utility>

namespace standin {
namespace {

constexpr size_t kUnit = 2 * kMiB;
constexpr size_t kSlab = 32 * kMiB;

// When torch first allocates, the driver holds 8 MiB of one slab, and below it, with a gap between, 414 of 416. The 414
// are for the local memory of kernels. Larger kernels have it exchanged for 504, which are not in a slab.
constexpr size_t kOlderInUse = 8 * kMiB;
constexpr size_t kGap = 64 * kMiB;
constexpr size_t kLocalMemory = 414 * kMiB;
constexpr size_t kLargerLocalMemory = 504 * kMiB;
constexpr size_t kCodeSlab = 8 * kMiB;  // made for the first kernel, whatever holes there are

using Spans = std::map<size_t, size_t>;  // offset to length

struct Slab {
  char* base;
  size_t size;
  Spans holes;
  Spans used;
};

struct Device {
  std::list<Slab> slabs;  // newest first
  size_t used = 0;
  size_t most = 0;  // used and outside, at any time
  size_t outside = 0;  // beside the context
  char* local_memory = nullptr;
  bool has_kernels = false;
  bool has_dnn = false;
  int streams = 0;
  bool entered = false;
};

struct Range {
  size_t size;
  int device;                     // -1: a reservation of the virtual memory API
  std::list<Slab>::iterator slab;  // only where there is a device
};

Device& device_state(int device) {
  static auto* const all = new Device[kMaxDevices];
  return all[device];
}

std::map<const char*, Range>& ranges() {
  static auto& all = *new std::map<const char*, Range>;
  return all;
}

const std::pair<const char* const, Range>* range_of(const void* pointer) {
  const char* at = static_cast<const char*>(pointer);
  auto after = ranges().upper_bound(at);
  if (after == ranges().begin()) return nullptr;
  const auto& found = *std::prev(after);
  return at < found.first + found.second.size ? &found : nullptr;
}

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

Spans::iterator smallest_hole(Slab& slab, size_t bytes) {
  auto best = slab.holes.end();
  for (auto hole = slab.holes.begin(); hole != slab.holes.end(); ++hole) {
    if (hole->second >= bytes && (best == slab.holes.end() || hole->second < best->second)) best = hole;
  }
  return best;
}

char* take_from(Slab& slab, Spans::iterator hole, size_t bytes) {
  const auto [offset, length] = *hole;
  slab.holes.erase(hole);
  if (length > bytes) slab.holes[offset + bytes] = length - bytes;
  slab.used[offset] = bytes;
  return slab.base + offset;
}

char* place_in_new_slab(int device, size_t bytes, size_t unit) {
  const size_t size = rounded_up(bytes, unit);
  char* base = reserve_addresses(size, unit, true);
  if (!base) {
    note("this machine's own limits on address space (ulimit -v, overcommit) ended a device allocation");
    return nullptr;
  }
  auto& slabs = device_state(device).slabs;
  slabs.push_front({base, size, {{0, size}}, {}});
  ranges()[base] = {size, device, slabs.begin()};
  return take_from(slabs.front(), slabs.front().holes.begin(), bytes);
}

char* place(int device, size_t bytes) {
  auto& slabs = device_state(device).slabs;
  for (Slab& slab : slabs) {
    auto hole = smallest_hole(slab, bytes);
    if (hole != slab.holes.end()) return take_from(slab, hole, bytes);
  }
  return place_in_new_slab(device, bytes, kSlab);
}

void join_hole(Slab& slab, size_t offset, size_t length) {
  auto hole = slab.holes.emplace(offset, length).first;
  auto after = std::next(hole);
  if (after != slab.holes.end() && offset + length == after->first) {
    hole->second += after->second;
    slab.holes.erase(after);
  }
  if (hole == slab.holes.begin()) return;
  auto before = std::prev(hole);
  if (before->first + before->second == offset) {
    before->second += hole->second;
    slab.holes.erase(hole);
  }
}

void give_back(int device, std::list<Slab>::iterator slab, Spans::iterator use) {
  const auto [offset, bytes] = *use;
  slab->used.erase(use);
  if (slab->used.empty()) {
    ranges().erase(slab->base);
    munmap(slab->base, slab->size);
    device_state(device).slabs.erase(slab);
    return;
  }
  madvise(slab->base + offset, bytes, MADV_DONTNEED);
  join_hole(*slab, offset, bytes);
}

void grew(int device) {
  Device& state = device_state(device);
  state.most = std::max(state.most, state.used + state.outside);
}

void hold_outside(int device, size_t bytes) {
  device_state(device).outside += bytes;
  grew(device);
  place(device, bytes);
}

void enlarge_local_memory(int device) {
  Device& state = device_state(device);
  char* const before = std::exchange(state.local_memory, nullptr);
  if (!before) return;
  const auto slab = ranges().at(before).slab;
  give_back(device, slab, slab->used.find(0));
  reserve_addresses(kLargerLocalMemory, kUnit, false);
  state.outside += kLargerLocalMemory - kLocalMemory;
  grew(device);
}

// A process with a real cuDNN loads some 380 MiB of libraries at its first handle, below which later slabs come. With
// them left out, one of eight jobs had other addresses than on the H200 in every run, with them in none.
void reserve_libraries() {
  const char* spans = std::getenv("MEMTRACE_GPU_DNN_SPANS");
  char* end = nullptr;
  for (const char* at = spans; at && *at; at = *end ? end + 1 : end) {
    const size_t bytes = std::strtoull(at, &end, 10);
    if (end == at) return;
    reserve_addresses(bytes, kPage, false);
  }
}

thread_local int selected = 0;

}  // namespace

// --- addresses

char* reserve_addresses(size_t bytes, size_t alignment, bool accessible) {
  // This is how the driver asks: with room to align, and the unaligned rest given back.
  const size_t asked = bytes + alignment - kPage;
  void* mapped = mmap(nullptr, asked, accessible ? PROT_READ | PROT_WRITE : PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(mapped);
  char* end = start + asked;
  auto number = reinterpret_cast<uintptr_t>(start);
  char* base = start + (rounded_up(number, alignment) - number);
  if (base > start) munmap(start, base - start);
  if (end > base + bytes) munmap(base + bytes, end - base - bytes);
  madvise(base, bytes, MADV_NOHUGEPAGE);  // one written byte shall cost a page, not 2 MiB
  return base;
}

void add_range(char* base, size_t bytes) {
  Guard guard(mutex());
  ranges()[base] = {bytes, -1, {}};
}

void drop_range(char* base) {
  Guard guard(mutex());
  ranges().erase(base);
}

bool is_device_memory(const void* pointer) {
  Guard guard(mutex());
  return range_of(pointer) != nullptr;
}

int device_of(const void* pointer) {
  Guard guard(mutex());
  const auto* found = range_of(pointer);
  if (found && found->second.device >= 0) return found->second.device;
  return std::max(0, mapped_device(pointer));
}

bool allocation_of(const void* pointer, void** base, size_t* bytes) {
  Guard guard(mutex());
  const auto* found = range_of(pointer);
  if (!found) return false;
  if (found->second.device < 0) {
    *base = const_cast<char*>(found->first);
    *bytes = found->second.size;
    return true;
  }
  const Slab& slab = *found->second.slab;
  const size_t offset = static_cast<const char*>(pointer) - slab.base;
  auto after = slab.used.upper_bound(offset);
  if (after == slab.used.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  if (offset >= start + length) return false;
  *base = slab.base + start;
  *bytes = length;
  return true;
}

// --- devices and how much they hold

int current_device() { return selected; }

bool is_ordinal(int device) { return device >= 0 && device < gpu_count(); }

void select_device(int device) {
  selected = device;
  enter(device);
}

bool is_entered(int device) {
  Guard guard(mutex());
  return device_state(device).entered;
}

void enter(int device) {
  Guard guard(mutex());
  Device& state = device_state(device);
  if (state.entered) return;
  state.entered = true;
  place(device, kOlderInUse);
  reserve_addresses(kGap, kSlab, false);
  state.local_memory = place_in_new_slab(device, kLocalMemory, kSlab);
}

size_t outside_bytes(int device) {
  Guard guard(mutex());
  return context_bytes() + device_state(device).outside;
}

size_t used_bytes(int device) {
  Guard guard(mutex());
  return device_state(device).used;
}

size_t free_bytes(int device) {
  Guard guard(mutex());
  const size_t taken = used_bytes(device) + outside_bytes(device);
  return taken < total_bytes() ? total_bytes() - taken : 0;
}

long long least_room() {
  Guard guard(mutex());
  auto room = static_cast<long long>(total_bytes());
  for (int device = 0; device < gpu_count(); ++device) {
    const Device& state = device_state(device);
    if (!state.entered) continue;
    room = std::min(room, static_cast<long long>(total_bytes()) - static_cast<long long>(context_bytes() + state.most));
  }
  return room;
}

bool claim(int device, size_t bytes) {
  Guard guard(mutex());
  enter(device);
  if (bytes > free_bytes(device)) return false;
  device_state(device).used += bytes;
  grew(device);
  return true;
}

void unclaim(int device, size_t bytes) {
  Guard guard(mutex());
  device_state(device).used -= bytes;
}

void take_outside(Outside what) {
  Guard guard(mutex());
  const int device = current_device();
  enter(device);
  Device& state = device_state(device);
  switch (what) {
    case Outside::kernels:
      if (std::exchange(state.has_kernels, true)) break;
      place_in_new_slab(device, code_bytes(), kCodeSlab);
      state.outside += code_bytes();
      grew(device);
      break;
    case Outside::local_memory: enlarge_local_memory(device); break;
    case Outside::stream: {
      const size_t before = stream_bytes(state.streams);
      const size_t after = stream_bytes(++state.streams);
      if (after > before) hold_outside(device, after - before);
      break;
    }
    case Outside::blas_handle:
      hold_outside(device, blas_bytes());
      hold_outside(device, code_bytes());
      break;
    case Outside::dnn_handle:
      if (!std::exchange(state.has_dnn, true)) reserve_libraries();
      hold_outside(device, dnn_bytes());
      break;
  }
}

Outcome allocate(int device, size_t bytes, void** result) {
  Guard guard(mutex());
  enter(device);
  *result = nullptr;
  if (bytes == 0) return Outcome::ok;
  if (bytes > free_bytes(device)) return Outcome::out_of_memory;  // before it is rounded: that could overflow
  bytes = rounded_up(bytes, kUnit);
  if (bytes > free_bytes(device)) return Outcome::out_of_memory;
  *result = place(device, bytes);
  if (!*result) return Outcome::out_of_memory;
  device_state(device).used += bytes;
  grew(device);
  return Outcome::ok;
}

Outcome release(void* pointer) {
  Guard guard(mutex());
  if (!pointer) return Outcome::ok;
  const auto* found = range_of(pointer);
  if (!found || found->second.device < 0) {
    note("free of an unknown pointer");
    return Outcome::invalid;
  }
  const int device = found->second.device;
  auto slab = found->second.slab;
  const size_t offset = static_cast<char*>(pointer) - slab->base;
  auto use = slab->used.find(offset);
  if (use == slab->used.end()) {
    note("free of an unknown pointer");
    return Outcome::invalid;
  }
  device_state(device).used -= use->second;
  give_back(device, slab, use);
  return Outcome::ok;
}

}  // namespace standin
