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

  ops::WeightFormat format(const std::string& name) const override { return source_.format(name); }
  Shape local_shape(const std::string& name) const override { return source_.local_shape(name); }
  uint64_t total_bytes() const override { return source_.total_bytes(); }
  Matrix load_matrix(const std::string& name, const ops::PackedLayout* layout = nullptr) override;
  device::Tensor load_vector(const std::string& name) override { return placed(source_.load_vector(name)); }
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
