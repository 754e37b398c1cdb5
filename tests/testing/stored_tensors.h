// SPDX-License-Identifier: Apache-2.0
#pragma once
// A checkpoint's tensors in memory, to be changed and written again.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/rng.h"
#include "tensor/tensor_view.h"

namespace tessera::testing {

struct Stored {
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<uint8_t> bytes;
};
using Tensors = std::map<std::string, Stored>;

Tensors read_tensors(const std::string& folder);

// FOLDER/model.safetensors by the program's own writer.
void write_tensors(const std::string& folder, const Tensors& tensors);

// Legal but odd, byte by byte: one to three shards with an index whose total_size is stale, tensors in random order and
// so at odd offsets, keys of an entry in random order, spaces behind the header, metadata, and tensors that no model
// asks for: an empty one, a scalar, one of an unknown dtype.
void write_odd_tensors(const std::string& folder, const Tensors& tensors, Rng& rng);

}  // namespace tessera::testing
