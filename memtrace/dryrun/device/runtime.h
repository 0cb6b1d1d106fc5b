// For the parts that answer the runtime API.
#pragma once
#include "standin.h"

#include <cuda_runtime_api.h>

namespace standin {

cudaError_t failed(cudaError_t error);  // remembers it for cudaGetLastError and returns it

}  // namespace standin
