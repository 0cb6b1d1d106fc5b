// The lock, the counters, and what memtrace reads from the library by name (ctypes).
#include "standin.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <utility>

namespace standin {
namespace {

using Counters = std::map<std::pair<std::string, std::string>, unsigned long long>;

Counters& counters() {
  static auto& all = *new Counters;
  return all;
}

constexpr size_t kMostNames = 4096;  // a job whose shapes never repeat must not fill memory with them

void count(const char* kind, const char* name) {
  Guard guard(mutex());
  auto& all = counters();
  const auto found = all.find({kind, name});
  if (found != all.end()) {
    ++found->second;
  } else {
    ++all[{kind, all.size() < kMostNames ? name : "more that is not listed"}];
  }
}

std::recursive_mutex* made_mutex() {
  static auto* made = [] {
    auto* fresh = new std::recursive_mutex;
    // Another thread may hold the lock while this one forks, and it does not exist in the child. The child makes the
    // lock anew: it may not unlock one whose owner has another thread id.
    pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { new (&mutex()) std::recursive_mutex; });
    return fresh;
  }();
  return made;
}

}  // namespace

std::recursive_mutex& mutex() { return *made_mutex(); }

void note(const char* what) { count("note", what); }

int unknown(const char* function) {
  count("unknown", function);
  return 0;
}

int refuse(const char* function, int error) {
  count("refused", function);
  return error;
}

unsigned long long environment(const char* name, unsigned long long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

void* new_handle() {
  // Looks like an address, far from 0, 1 and 2, which mean special streams; whoever reads through it fails at once.
  static std::atomic<uintptr_t> next{uintptr_t{1} << 44};
  return reinterpret_cast<void*>(next += 256);
}

}  // namespace standin

using namespace standin;

// Lines of kind, count and name, with tabs between. Valid until the next call.
MEMTRACE_API const char* memtrace_report() {
  Guard guard(mutex());
  static auto& text = *new std::string;
  text.clear();
  for (const auto& [key, times] : counters()) {
    text += key.first + "\t" + std::to_string(times) + "\t" + key.second + "\n";
  }
  return text.c_str();
}

MEMTRACE_API unsigned long long memtrace_reserved_bytes(int device) {
  return is_ordinal(device) ? used_bytes(device) : 0;
}

MEMTRACE_API unsigned long long memtrace_outside_bytes() { return outside_bytes(current_device()); }

MEMTRACE_API long long memtrace_least_room() { return least_room(); }
