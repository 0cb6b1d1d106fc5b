// What the descriptors of cuDNN's older API remember of a tensor.
#pragma once
#include "standin.h"

#include <cudnn.h>

#include <vector>

namespace standin {

struct Shape {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::vector<int> sizes;
  std::vector<int> strides;
};

inline Shape& shape(const void* handle) { return *static_cast<Shape*>(const_cast<void*>(handle)); }

template <typename Handle>
cudnnStatus_t new_shape(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new Shape);
  return CUDNN_STATUS_SUCCESS;
}

inline cudnnStatus_t drop_shape(void* handle) {
  delete static_cast<Shape*>(handle);
  return CUDNN_STATUS_SUCCESS;
}

inline void give_shape(const Shape& of, int wanted, cudnnDataType_t* type, int* rank, int* sizes, int* strides) {
  if (type) *type = of.type;
  *rank = static_cast<int>(of.sizes.size());
  for (int axis = 0; axis < wanted && axis < *rank; ++axis) {
    sizes[axis] = of.sizes[axis];
    if (strides && axis < static_cast<int>(of.strides.size())) strides[axis] = of.strides[axis];
  }
}

}  // namespace standin
