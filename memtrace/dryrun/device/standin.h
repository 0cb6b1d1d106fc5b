// What the parts of the stand-in device share. No vendor header is needed here.
//
// The library is preloaded into every process of a job, shells and compilers too. So nothing may run before the first
// CUDA call (no global constructors), and nothing may be destroyed at exit: CUDA's callers call in from their own
// destructors. Every table is therefore a function-local `static auto& x = *new ...`.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>

#define MEMTRACE_API extern "C" __attribute__((visibility("default")))

namespace standin {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kPage = 4096;
constexpr int kMaxDevices = 64;

// --- report.cpp: one lock for all state, and what was answered without knowing
using Guard = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& mutex();
void note(const char* what);                      // something was guessed or misused
int unknown(const char* function);                // a generated stub answered success without doing anything: 0
int refuse(const char* function, int error);      // one that has to fill in what we do not know: error
unsigned long long environment(const char* name, unsigned long long otherwise);
void* new_handle();                               // opaque, unique, never dereferenced

// --- memory.cpp: device memory
enum class Outcome { ok, out_of_memory, invalid };
int current_device();                             // of the calling thread
bool is_ordinal(int device);
void select_device(int device);                   // makes its context too
void enter(int device);                           // makes the context
bool is_entered(int device);
Outcome allocate(int device, size_t bytes, void** result);
Outcome release(void* pointer);                   // null is fine
size_t free_bytes(int device);
long long least_room();                           // what the fullest device had left when it was fullest
size_t used_bytes(int device);                    // by allocate() and claim()
size_t outside_bytes(int device);                 // by the driver and the vendor's libraries
bool claim(int device, size_t bytes);             // memory of the virtual memory API: has no address of its own
void unclaim(int device, size_t bytes);
enum class Outside { kernels, local_memory, stream, blas_handle, dnn_handle };
void take_outside(Outside what);                  // of the current device; the first two: once

// --- memory.cpp: addresses
char* reserve_addresses(size_t bytes, size_t alignment, bool accessible);
void add_range(char* base, size_t bytes);         // a reservation of the virtual memory API
void drop_range(char* base);
bool is_device_memory(const void* pointer);
int device_of(const void* pointer);               // of device memory
bool allocation_of(const void* pointer, void** base, size_t* bytes);

// --- virtual.cpp
int mapped_device(const void* pointer);           // -1 where nothing is mapped

// --- host.cpp: pinned memory and copies
bool is_pinned(const void* pointer);
void copy(void* to, const void* from, size_t bytes);
void copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height);
void fill(void* to, int value, size_t bytes);
size_t copy_limit();

// --- streams.cpp
bool is_capturing(void* stream);
void host_waited();                               // events recorded before are done now
int driver_version();                             // as the headers say, 13000

// --- launch.cpp
int blocks_per_multiprocessor(int threads);       // as if registers and shared memory never limit
void* driver_function(const char* name);          // the newest version of it, or null

}  // namespace standin
