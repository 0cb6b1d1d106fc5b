// For the parts that answer the driver API. They define functions under cuda.h's plain names: the header itself turns
// them into the versioned names of its release (cuMemAlloc into cuMemAlloc_v2).
#pragma once
#include "standin.h"

#include <cuda.h>

namespace standin {

inline void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }
inline CUdeviceptr number(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace standin
