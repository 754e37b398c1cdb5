// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights of another source in the memory where the ops compute, one at a time: the host holds the largest at most.
// What a GPU's variants want packed is packed there.
#include "model/model_weights.h"

namespace tessera::model {

class PlacedWeights final : public ModelWeights {
 public:
  // All must outlive this; `queue` works in `memory`. With the host's memory it passes everything on as it is, and
  // matrices of a source that makes them in `memory` are not copied.
  PlacedWeights(ModelWeights& source, device::MemorySpace& memory, device::Queue& queue)
      : source_(source), memory_(memory), queue_(queue) {}

  ops::WeightFormat part_format(const std::string& name, const Shard& shard) const override {
    return source_.part_format(name, shard);
  }
  Shape part_shape(const std::string& name, const Shard& shard) const override {
    return source_.part_shape(name, shard);
  }
  uint64_t total_bytes() const override { return source_.total_bytes(); }
  Matrix load_part(const std::string& name, const Shard& shard, const ops::PackedLayout* layout) override;
  device::Tensor load_vector_part(const std::string& name, const Shard& shard) override {
    return placed(source_.load_vector_part(name, shard));
  }
  device::Tensor load_table(const std::string& name) override { return placed(source_.load_table(name)); }
  uint64_t fingerprint() const override { return source_.fingerprint(); }
  const Shard& shard() const override { return source_.shard(); }

 private:
  device::Tensor placed(device::Tensor tensor) const {
    return memory_.is_host() ? std::move(tensor) : tensor.clone_into(memory_);
  }

  ModelWeights& source_;
  device::MemorySpace& memory_;
  device::Queue& queue_;
};

}  // namespace tessera::model
