// SPDX-License-Identifier: Apache-2.0
#pragma once
// The weights of a checkpoint, found and checked against the weight table before a byte of data is read, then read
// slice by slice with their bits unchanged. Formats are detected per tensor (docs/formats/checkpoints.md).
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "device/buffer.h"
#include "model/weight_format.h"
#include "model/weight_spec.h"
#include "ops/packed_layout.h"

namespace tessera::model {

// An owned linear map.
struct Matrix {
  device::Buffer data, scales;
  ops::WeightView view;
};

class WeightSource {
 public:
  // Resolves every tensor of the table. Throws kDataLoss, kNotFound or kUnsupported for the first that is missing, of
  // the wrong shape, or of a format that can't be read, naming file, tensor, expected and found. `progress` may be
  // null; it is advanced by the bytes read.
  WeightSource(const checkpoint::Checkpoint& checkpoint, const Config& config, int64_t num_draft_layers, Shard shard,
               ProgressSink* progress);

  ops::WeightFormat format(const std::string& name) const { return resolved(name).format; }
  // Rows and columns of a linear map that this rank holds.
  Shape local_shape(const std::string& name) const;
  // Bytes that all weights of this rank take in memory.
  uint64_t total_bytes() const { return total_bytes_; }
  // Names in the checkpoint that no row of the table asked for: draft blocks kept aside, static activation scales, ...
  const std::vector<std::string>& unused() const { return unused_; }

  // A linear map in the checkpoint's layout, or packed where `layout` is not null. Checks that no value is NaN or
  // infinite and no scale negative, naming the tensor.
  Matrix load_matrix(const std::string& name, const ops::PackedLayout* layout = nullptr);
  // A small tensor, widened exactly to FP32.
  device::Tensor load_vector(const std::string& name);
  // The routing table [vocab, top_k] as I32; every row distinct ids in [0, num_experts).
  device::Tensor load_table(const std::string& name);

  // Changes with the weights' content: a hash over everything loaded so far.
  uint64_t fingerprint() const { return fingerprint_; }
  const Config& config() const { return config_; }
  const Shard& shard() const { return shard_; }

 private:
  const WeightRow& row(const std::string& name) const;
  const StoredTensor& resolved(const std::string& name) const;
  void read_rows(const StoredTensor& stored, const WeightSlice& slice, const Matrix& matrix);
  void read_bytes(const checkpoint::LocatedTensor& tensor, uint64_t begin, uint64_t num_bytes, void* out);
  void add_fingerprint(const std::string& name, const void* data, size_t bytes);

  const Config& config_;
  Shard shard_;
  ProgressSink* progress_;
  std::map<std::string, WeightRow> rows_;
  std::map<std::string, StoredTensor> stored_;
  std::vector<std::string> unused_;
  uint64_t total_bytes_ = 0, fingerprint_ = 0;
};

}  // namespace tessera::model
