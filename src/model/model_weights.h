// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a model is built from: weights by their official names (weight_spec.h), wherever they come from.
#include <cstdint>
#include <string>

#include "device/buffer.h"
#include "device/queue.h"
#include "model/matrix_reader.h"
#include "model/weight_spec.h"
#include "ops/packed_layout.h"

namespace tessera::model {

class ModelWeights {
 public:
  virtual ~ModelWeights() = default;
  // Of the part that `shard` has of a tensor: its format in memory, rows and columns of a linear map; of one of
  // held_shards() the map itself, in the checkpoint's layout, or packed where `layout` is not null, or a small tensor
  // in FP32.
  virtual ops::WeightFormat part_format(const std::string& name, const Shard& shard) const = 0;
  virtual Shape part_shape(const std::string& name, const Shard& shard) const = 0;
  virtual Matrix load_part(const std::string& name, const Shard& shard, const ops::PackedLayout* layout) = 0;
  virtual device::Tensor load_vector_part(const std::string& name, const Shard& shard) = 0;
  // The same of this rank's part.
  ops::WeightFormat format(const std::string& name) const { return part_format(name, shard()); }
  Shape local_shape(const std::string& name) const { return part_shape(name, shard()); }
  Matrix load_matrix(const std::string& name, const ops::PackedLayout* layout = nullptr) {
    return load_part(name, shard(), layout);
  }
  device::Tensor load_vector(const std::string& name) { return load_vector_part(name, shard()); }
  // Bytes that all weights of this rank take in memory.
  virtual uint64_t total_bytes() const = 0;

  // The routing table [vocab, top_k] as I32; every row distinct ids in [0, num_experts).
  virtual device::Tensor load_table(const std::string& name) = 0;

  // Changes with the weights' content: a hash over all of this rank's part that was loaded so far.
  virtual uint64_t fingerprint() const = 0;
  virtual const Shard& shard() const = 0;
};

// The same map in another layout; `matrix` is given back when it is done.
Matrix packed(Matrix matrix, const ops::PackedLayout& layout, device::Queue& queue);

}  // namespace tessera::model
