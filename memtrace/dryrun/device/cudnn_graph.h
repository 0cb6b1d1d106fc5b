// A descriptor of cuDNN's graph API: it remembers what it was given.
#pragma once
#include "standin.h"

#include <cudnn.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace standin {

struct Descriptor;
using Shared = std::shared_ptr<Descriptor>;  // a program may destroy what others still refer to

struct Value {
  int type = 0;
  int64_t count = 0;
  std::string bytes;           // of plain values
  std::vector<Shared> nested;  // of descriptors
};

struct Descriptor {
  int kind = 0;
  std::map<int, Value> values;
  int64_t workspace = 0;

  std::vector<int64_t> integers(int name) const;
  int64_t integer(int name, int64_t otherwise) const;
  const Descriptor* nested(int name) const;  // the first one, or null
};

// Of tensor descriptors.
std::vector<int64_t> sizes_of(const Descriptor& tensor);
int64_t elements_of(const Descriptor& tensor);
int64_t element_bytes_of(const Descriptor& tensor);

size_t width_of(int type);  // of one value of a cudnnBackendAttributeType_t, in bytes

// What an engine asks for on top of what torch's own frontend adds.
int64_t workspace_of_graph(const Descriptor& graph);
int64_t workspace_of_convolution(const Descriptor& operation);

}  // namespace standin
