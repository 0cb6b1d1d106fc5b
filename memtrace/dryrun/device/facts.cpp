#include "facts.h"

#include "standin.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace standin {
namespace {

// Every attribute that cuDeviceGetAttribute answered on one NVIDIA H200 (driver 580, CUDA 13.0), ten a row: row n
// begins with attribute 10 * n. -1: the driver answered an error, or there is no such attribute.
constexpr int kH200[] = {
    -1, 1024, 1024, 1024, 64, 2147483647, 65535, 65535, 49152, 65536,
    32, 2147483647, 65536, 1980000, 512, 1, 132, 0, 0, 1,
    0, 131072, 131072, 65536, 16384, 16384, 16384, 32768, 32768, 2048,
    512, 1, 1, 0, 6, 0, 3201000, 6016, 62914560, 2048,
    3, 1, 32768, 2048, 1, 32768, 32768, 8192, 8192, 32768,
    0, 32, 32768, 32768, 2046, 32768, 131072, 65536, 16384, 16384,
    16384, 32768, 2048, 32768, 32768, 2048, 32768, 32768, 2046, 268435456,
    131072, 65000, 2097120, 32768, 32768, 9, 0, 32768, 1, 1,
    1, 233472, 65536, 1, 0, 0, 0, 2, 0, 1,
    1, 1, 0, 0, 0, 1, 1, 232448, 0, 1,
    0, 0, 1, 1, 0, 0, 32, 1, 39321600, 134217728,
    1, 1024, 1, 1, 1, 1, 1, 1, 100, 9,
    1, 1, 1, 1, 1, 1, 4, 1, 1, 1,
    0, -1, 0, 0, 0, 0, 0, 0, 0, 590680286,
    415174878, 1, 1, 0, 1, 1, 0, 0,
};
constexpr int kAskedAlthoughAbsent = 131;  // the H200's own answer to it is -1, and success
constexpr size_t kH200Bytes = 150109880320;

// Memory outside torch on the same H200: what cudaMemGetInfo lacked besides torch's segments, after each of 65 kinds of
// work in a process of its own. The context; 2 for the code of the first kernels, 90 more for local memory; each handle;
// streams, of which torch makes its pool of 128 at once. Autograd's thread has handles of its own, so a training loop
// takes two. So a loop without attention by cuDNN ends with 751 MiB outside torch, one with it with 767, side streams add
// 70: as did recorded jobs that had the GPU to themselves.
constexpr size_t kContextBytes = 552402944;
constexpr size_t kCodeBytes = 2 * kMiB;
constexpr size_t kBlasBytes = 64 * kMiB;
constexpr size_t kDnnBytes = 8 * kMiB;

// From the tables of technical specifications by compute capability in NVIDIA's CUDA C++ Programming Guide. The
// number of multiprocessors and the size of L2 are a model's, not a capability's: of a usual one (A100, RTX A6000,
// RTX 4090, H200, B200, RTX 5090).
struct Capability {
  int number, threads, blocks, shared_kib, single_to_double, multiprocessors, l2_mib;
};
constexpr Capability kCapabilities[] = {
    {80, 2048, 32, 164, 2, 108, 40},   {86, 1536, 16, 100, 64, 84, 6},   {89, 1536, 24, 100, 64, 128, 72},
    {90, 2048, 32, 228, 2, 132, 60},   {100, 2048, 32, 228, 2, 148, 126}, {120, 1536, 24, 100, 64, 170, 96},
};
constexpr int kFirstWithClusters = 90;  // and with tensor maps and fabric handles

int capability() {
  static const int number = static_cast<int>(environment("MEMTRACE_GPU_SM", 90));
  return number;
}

// The newest that is not newer than the one asked for: 103 is as 100, 121 as 120.
const Capability& limits() {
  const Capability* best = kCapabilities;
  for (const Capability& each : kCapabilities) {
    if (each.number <= capability()) best = &each;
  }
  return *best;
}

int multiprocessors() {
  static const int count = static_cast<int>(environment("MEMTRACE_GPU_SMS", limits().multiprocessors));
  return count;
}

}  // namespace

bool attribute(int which, int device, int* value) {
  if (which <= 0 || which >= static_cast<int>(std::size(kH200))) return false;
  const Capability& of = limits();
  const bool clusters = capability() >= kFirstWithClusters;
  switch (which) {
    case kMajor: *value = capability() / 10; return true;
    case kMinor: *value = capability() % 10; return true;
    case kMultiprocessors: *value = multiprocessors(); return true;
    case kPciBus: *value = device; return true;
    case kThreadsPerMultiprocessor: *value = of.threads; return true;
    case kBlocksPerMultiprocessor: *value = of.blocks; return true;
    case kSharedPerMultiprocessor: *value = of.shared_kib << 10; return true;
    case kSharedPerBlockOptin: *value = (of.shared_kib - 1) << 10; return true;  // each block has 1 KiB reserved
    case kSingleToDouble: *value = of.single_to_double; return true;
    case kL2Bytes: *value = of.l2_mib << 20; return true;
    case kPersistingL2Bytes: *value = (of.l2_mib << 20) / 8 * 5; return true;
    case kClusterLaunch:
    case kTensorMap:
    case kFabricHandle: *value = clusters; return true;
    default: *value = kH200[which]; return *value != -1 || which == kAskedAlthoughAbsent;
  }
}

int fact(int which) {
  int value = 0;
  return attribute(which, 0, &value) ? value : 0;
}

const char* gpu_name() {
  const char* name = std::getenv("MEMTRACE_GPU_NAME");
  return name && *name ? name : "NVIDIA H200";
}

int gpu_count() {
  static const int count =
      static_cast<int>(std::clamp(environment("MEMTRACE_GPU_COUNT", 1), 0ull, 0ull + kMaxDevices));
  return count;
}

size_t total_bytes() {
  static const size_t bytes = environment("MEMTRACE_GPU_MEMORY", kH200Bytes);
  return bytes;
}

size_t context_bytes() {
  static const size_t bytes = environment("MEMTRACE_GPU_CONTEXT", kContextBytes);
  return bytes;
}

size_t code_bytes() { return kCodeBytes; }
size_t stream_bytes(int count) {
  // 2 MiB for the 2nd, 6th, 10th..., and for the 36th, 79th, 122nd...: right for each count up to 163.
  return static_cast<size_t>((count + 2) / 4 + (count + 7) / 43) * 2 * kMiB;
}
size_t blas_bytes() { return kBlasBytes; }
size_t dnn_bytes() { return kDnnBytes; }

}  // namespace standin
