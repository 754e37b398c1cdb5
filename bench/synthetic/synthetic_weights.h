// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights made in memory, a function of (seed, name, format) alone. Formats are those of published checkpoints: NVFP4
// for routed experts, NVFP4 or FP8 in blocks (`dense`) for the shared expert and attention's maps, BF16 for the head,
// the compressors and the indexer's weights. Codes are random, and NVFP4's scales lie over four binary orders of
// magnitude. Rows have about unit length, so that activations keep their size through layers, router logits spread and
// every kind of layer does its usual work. A rank's whole matrices are those of one rank; of what is cut each rank has
// a part made for it, which is no part of another number of ranks' matrix but has its size. Where a rank holds the
// others' heads too, those are the others' parts, one behind another (but
// where that would part FP8's blocks).
#include <map>
#include <optional>
#include <vector>

#include "device/executor.h"
#include "model/config.h"
#include "model/model_weights.h"
#include "ops/planner.h"

namespace tessera::bench {

class SyntheticWeights final : public model::ModelWeights {
 public:
  // Throws kUnsupported where the shape can't be cut so.
  SyntheticWeights(const model::Config& config, uint64_t seed, int num_threads, const model::Shard& shard = {},
                   ops::WeightFormat dense = ops::WeightFormat::kNvfp4);

  // From now on matrices in the checkpoint's layout are made in the memory of `executor`, by its device, and have the
  // same bytes there; on the host's nothing changes. The executor must live while weights are loaded.
  void make_in(device::Executor& executor, const device::Machine& machine);

  ops::WeightFormat part_format(const std::string& name, const model::Shard& shard) const override;
  Shape part_shape(const std::string& name, const model::Shard& shard) const override;
  uint64_t total_bytes() const override { return total_bytes_; }
  model::Matrix load_part(const std::string& name, const model::Shard& shard, const ops::PackedLayout* layout) override;
  device::Tensor load_vector_part(const std::string& name, const model::Shard& shard) override;
  device::Tensor load_table(const std::string& name) override;
  uint64_t fingerprint() const override { return seed_; }
  const model::Shard& shard() const override { return shard_; }

  // Bytes of a layer's weights with so many of its experts; of a model that is not cut.
  int64_t layer_bytes(int64_t layer, double num_experts) const;
  // That one token reads: all but the experts that it is not routed to.
  int64_t token_bytes(int64_t layer) const {
    return layer_bytes(layer, static_cast<double>(config_.experts_per_token));
  }
  // Packing so far: seconds, and bytes of the packed weights.
  double pack_seconds() const { return pack_seconds_; }
  int64_t packed_bytes() const { return packed_bytes_; }

 private:
  struct Maker {
    device::Executor& executor;
    ops::Bound<ops::RandomFill> codes, scales, e4m3, values;
  };
  struct Tensor {
    model::WeightRow row;
    ops::WeightFormat format;  // of matrices
  };
  // What is made at once: rows of a tensor, all of them or those of one rank's part.
  struct Piece {
    int64_t first_row, num_rows;  // of the part that is asked for
    uint64_t seed;
  };
  const Tensor& tensor(const std::string& name) const;
  Shape shape_of(const model::WeightRow& row, const model::Shard& shard) const;
  std::vector<Piece> pieces_of(const model::WeightRow& row, const model::Shard& shard) const;
  void fill(const Maker* maker, const ops::WeightView& part, uint64_t seed, double factor, void* data, void* scales);

  const model::Config config_;
  uint64_t seed_;
  model::Shard shard_;
  device::Queue queue_;
  std::optional<Maker> maker_;
  std::map<std::string, Tensor> tensors_;
  uint64_t total_bytes_ = 0;
  double pack_seconds_ = 0;
  int64_t packed_bytes_ = 0;
};

}  // namespace tessera::bench
