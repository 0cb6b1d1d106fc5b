// cuBLAS and cuBLASLt: handles and queries. Products themselves are generated stubs that do nothing.
//
// Written without the library's types, whose signatures change more often than its binary interface.
#include "standin.h"

#include <cuda_runtime_api.h>

#include <cstring>

using namespace standin;

namespace {

// build.py reads the version from the library's header: to include it would take more headers than the wheels have.
#ifndef MEMTRACE_BLAS_VERSION
#define MEMTRACE_BLAS_VERSION CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, 0
#endif
constexpr int kBlasVersion[] = {MEMTRACE_BLAS_VERSION};

int blas_version() { return kBlasVersion[0] * 10000 + kBlasVersion[1] * 100 + kBlasVersion[2]; }

constexpr size_t kHeuristicResultBytes = 96;

int made(void** result) {
  *result = new_handle();
  return 0;
}

int answered(int* result, int value) {
  *result = value;
  return 0;
}

}  // namespace

MEMTRACE_API int cublasCreate_v2(void** handle) {
  take_outside(Outside::blas_handle);
  return made(handle);
}
MEMTRACE_API int cublasGetVersion_v2(void*, int* version) { return answered(version, blas_version()); }
MEMTRACE_API int cublasGetProperty(int which, int* value) {
  return which >= 0 && which < 3 ? answered(value, kBlasVersion[which]) : 7;
}
MEMTRACE_API int cublasGetMathMode(void*, int* mode) { return answered(mode, 0); }
MEMTRACE_API int cublasGetPointerMode_v2(void*, int* mode) { return answered(mode, 0); }
MEMTRACE_API int cublasGetSmCountTarget(void*, int* count) { return answered(count, 0); }
MEMTRACE_API int cublasGetStream_v2(void*, void** stream) {
  *stream = nullptr;
  return 0;
}
MEMTRACE_API const char* cublasGetStatusString(int status) {
  return status == 0 ? "CUBLAS_STATUS_SUCCESS" : "error of memtrace's stand-in for cuBLAS";
}

MEMTRACE_API int cublasLtCreate(void** handle) { return made(handle); }
MEMTRACE_API size_t cublasLtGetVersion() { return blas_version(); }
MEMTRACE_API int cublasLtMatmulDescCreate(void** descriptor, int, int) { return made(descriptor); }
MEMTRACE_API int cublasLtMatrixLayoutCreate(void** layout, int, uint64_t, uint64_t, int64_t) { return made(layout); }
MEMTRACE_API int cublasLtMatmulPreferenceCreate(void** preference) { return made(preference); }
// One algorithm that needs no workspace: torch allocates one of fixed size before it asks.
MEMTRACE_API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted,
                                                void* results, int* count) {
  if (wanted < 1) return 7;
  std::memset(results, 0, kHeuristicResultBytes);
  return answered(count, 1);
}
