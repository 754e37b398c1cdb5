// SPDX-License-Identifier: Apache-2.0
#pragma once
// What vectors go through between a map and attention: a norm, rotary positions, the indexer's Hadamard transform, a
// cache, as far as they want it; and all vectors of a layer, in one call where their backend has one (decision 0023).
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/layers/linear_layer.h"

namespace tessera::model {

struct VectorSteps {
  // Of one call.
  struct Rows {
    TensorView x;                        // [rows, vectors, width], in place; where they are stored, scratch
    const int64_t* positions = nullptr;  // [rows]
    int64_t num_rows = 0;
    const int64_t* slots = nullptr;  // [rows] and where they are stored, as in ops::CacheWrite
    ops::PagedEntries<uint8_t> cache = {};
  };

  std::optional<NormLayer> norm;
  ops::Bound<ops::Rope> rope;
  std::optional<ops::Bound<ops::Hadamard>> hadamard;
  std::optional<ops::Bound<ops::CacheWrite>> write;
  std::string rotated, transformed;  // names in traces of x after rope, after hadamard; empty: not traced

  // One by one.
  void run(const StepContext& context, const float* frequencies, const Rows& rows) const;
};

class VectorGroup {
 public:
  struct Call {
    const VectorSteps* steps;
    VectorSteps::Rows rows;
  };

  VectorGroup() = default;
  VectorGroup(LayerBuilder& builder, const std::string& where, const std::vector<const VectorSteps*>& all);

  // The steps given to the constructor, in that order. A traced step runs them one by one.
  void run(const StepContext& context, const float* frequencies, std::span<const Call> calls) const;

 private:
  ops::Bound<ops::NormRope> op_;
};

}  // namespace tessera::model
