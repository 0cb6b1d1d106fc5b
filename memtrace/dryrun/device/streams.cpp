// Streams, events, capture and graphs. Work is done when it is asked for; a captured graph replays nothing.
#include "runtime.h"

#include <map>

namespace standin {
namespace {

struct Event {
  unsigned long long order = 0;    // of its last record; 0 before the first
  unsigned long long epoch = 0;    // how often the host had waited by then
  unsigned long long capture = 0;  // the capture it was recorded in
};

struct State {
  std::map<void*, unsigned long long> capturing;  // stream to the number of its capture
  std::map<void*, Event> events;
  unsigned long long captures = 0;
  unsigned long long records = 0;
  unsigned long long epoch = 1;
};

State& state() {
  static auto& all = *new State;
  return all;
}

// An upper bound for memory that other streams still use: an event is done only once the host has waited.
bool late() {
  static const bool on = environment("MEMTRACE_GPU_LATE_EVENTS", 0) != 0;
  return on;
}

unsigned long long capture_of(void* stream) {
  auto found = state().capturing.find(stream);
  return found == state().capturing.end() ? 0 : found->second;
}

cudaError_t made(void* result) {
  enter(current_device());
  *static_cast<void**>(result) = new_handle();
  return cudaSuccess;
}

cudaError_t begin_capture(cudaStream_t stream) {
  Guard guard(mutex());
  if (!stream) return failed(cudaErrorStreamCaptureUnsupported);  // the legacy stream cannot be captured
  if (capture_of(stream)) return failed(cudaErrorIllegalState);
  state().capturing[stream] = ++state().captures;
  return cudaSuccess;
}

cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                         cudaGraph_t* graph, const cudaGraphNode_t** dependencies, size_t* count) {
  Guard guard(mutex());
  static void* const growing = new_handle();
  const unsigned long long capture = capture_of(stream);
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (number) *number = capture;
  if (graph) *graph = static_cast<cudaGraph_t>(growing);
  if (dependencies) *dependencies = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

}  // namespace

bool is_capturing(void* stream) {
  Guard guard(mutex());
  return capture_of(stream) != 0;
}

void host_waited() {
  Guard guard(mutex());
  ++state().epoch;
}

}  // namespace standin

using namespace standin;

// --- streams

MEMTRACE_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  made(stream);
  take_outside(Outside::stream);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
MEMTRACE_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
MEMTRACE_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Guard guard(mutex());
  state().capturing.erase(stream);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  host_waited();
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaDeviceSynchronize() {
  enter(current_device());
  host_waited();
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Guard guard(mutex());
  auto found = state().events.find(event);
  // A stream that waits for an event of a capture joins it.
  if (found != state().events.end() && found->second.capture) state().capturing[stream] = found->second.capture;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!is_capturing(stream)) function(data);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                               unsigned) {
  if (is_capturing(stream)) return failed(cudaErrorStreamCaptureUnsupported);
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// --- events

MEMTRACE_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return made(event); }
MEMTRACE_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return made(event); }
MEMTRACE_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Guard guard(mutex());
  state().events.erase(event);
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!event) return failed(cudaErrorInvalidResourceHandle);
  Guard guard(mutex());
  state().events[event] = {++state().records, state().epoch, capture_of(stream)};
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
MEMTRACE_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard guard(mutex());
  auto found = state().events.find(event);
  const bool pending = found != state().events.end() && found->second.epoch == state().epoch;
  if (!pending) return cudaSuccess;
  if (late()) return failed(cudaErrorNotReady);
  note("work on another stream was asked for and taken as done");
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  host_waited();
  return cudaSuccess;
}
// Always 1 ms: programs that measure how often to repeat something get a sane number, and choices made by timing fall
// the same way in every run.
MEMTRACE_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Guard guard(mutex());
  auto first = state().events.find(start);
  auto second = state().events.find(end);
  if (first == state().events.end() || second == state().events.end()) return failed(cudaErrorInvalidResourceHandle);
  note("elapsed time answered as 1 ms");
  const auto from = first->second.order;
  const auto to = second->second.order;
  *milliseconds = from == to ? 0.0f : from < to ? 1.0f : -1.0f;
  return cudaSuccess;
}

// --- capture and graphs

MEMTRACE_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return begin_capture(stream);
}
#if CUDART_VERSION >= 12030
MEMTRACE_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                                       const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) {
  return begin_capture(stream);
}
#endif
MEMTRACE_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Guard guard(mutex());
  const unsigned long long capture = capture_of(stream);
  if (!capture) return failed(cudaErrorIllegalState);
  auto& capturing = state().capturing;
  for (auto each = capturing.begin(); each != capturing.end();) {
    each = each->second == capture ? capturing.erase(each) : std::next(each);
  }
  for (auto& [handle, event] : state().events) {
    if (event.capture == capture) event.capture = 0;
  }
  note("CUDA graph captured: replays do nothing");
  *graph = static_cast<cudaGraph_t>(new_handle());
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
MEMTRACE_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode mine = cudaStreamCaptureModeGlobal;
  const cudaStreamCaptureMode before = mine;
  mine = *mode;
  *mode = before;
  return cudaSuccess;
}

// CUDA 13 took the edges into the plain name; 12 has them in a third version.
#undef cudaStreamGetCaptureInfo
#if CUDART_VERSION >= 13000
#define WITH_EDGES cudaStreamGetCaptureInfo
#else
#define WITH_EDGES cudaStreamGetCaptureInfo_v3
MEMTRACE_API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                     unsigned long long* number, cudaGraph_t* graph,
                                                     const cudaGraphNode_t** dependencies, size_t* count) {
  return capture_info(stream, status, number, graph, dependencies, count);
}
#endif
#if CUDART_VERSION >= 12030
MEMTRACE_API cudaError_t WITH_EDGES(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* number,
                                    cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                    const cudaGraphEdgeData** edges, size_t* count) {
  if (edges) *edges = nullptr;
  return capture_info(stream, status, number, graph, dependencies, count);
}
#endif

MEMTRACE_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  return made(executable);
}
MEMTRACE_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  return made(executable);
}
// One node: torch warns of a graph that has none.
MEMTRACE_API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes && *count > 0) nodes[0] = static_cast<cudaGraphNode_t>(new_handle());
  *count = 1;
  return cudaSuccess;
}
