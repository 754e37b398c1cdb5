// SPDX-License-Identifier: Apache-2.0
#pragma once
// The weights of a checkpoint, found and checked against the weight table before a byte of data is read, then read
// slice by slice with their bits unchanged. Formats are detected per tensor (docs/formats/checkpoints.md).
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/read_ahead.h"
#include "device/buffer.h"
#include "device/queue.h"
#include "model/matrix_reader.h"
#include "model/model_weights.h"
#include "model/mxfp4_scaling.h"
#include "model/weight_format.h"
#include "model/weight_spec.h"
#include "ops/packed_layout.h"

namespace tessera::model {

// What happens to MXFP4 blocks that NVFP4 can't hold exactly.
enum class Inexact { kRefuse, kRound };

// Sees every tensor that a WeightSource has read, before it is packed, and may change its values: the doctor's
// hypotheses about a damaged checkpoint are tried this way. Format and shape stay.
class WeightEdit {
 public:
  virtual ~WeightEdit() = default;
  virtual void edit(const std::string& name, Matrix& matrix) const = 0;
  // The same for load_vector (F32) and load_table (I32).
  virtual void edit_values(const std::string& name, device::Tensor& values) const = 0;
};

class WeightSource final : public ModelWeights {
 public:
  // Resolves every tensor of the table. Throws kDataLoss, kNotFound or kUnsupported for the first that is missing, of
  // the wrong shape, or of a format that can't be read, naming file, tensor, expected and found. `progress` may be
  // null; it is advanced by the bytes read.
  WeightSource(const checkpoint::Checkpoint& checkpoint, const Config& config, int64_t num_draft_layers, Shard shard,
               ProgressSink* progress, Inexact inexact = Inexact::kRefuse);

  ops::WeightFormat part_format(const std::string& name, const Shard& shard) const override;
  // How the checkpoint stores it.
  const StoredTensor& stored(const std::string& name) const { return resolved(name); }
  Shape part_shape(const std::string& name, const Shard& shard) const override;
  uint64_t total_bytes() const override { return total_bytes_; }
  // Names in the checkpoint that no row of the table asked for: those of draft blocks (MTP, DSpark), which are known
  // and kept aside, and those that this program does not know.
  const std::vector<std::string>& kept_aside() const { return kept_aside_; }
  const std::vector<std::string>& unknown() const { return unknown_; }

  // A linear map in the checkpoint's layout (MXFP4 as NVFP4, w1 and w3 of an expert with one tensor scale), or packed
  // where `layout` is not null. Checks that no value is NaN or infinite and no scale negative, naming the tensor.
  // Throws kUnsupported with the count for MXFP4 blocks that NVFP4 can't hold exactly, unless these may be rounded.
  Matrix load_part(const std::string& name, const Shard& shard, const ops::PackedLayout* layout) override;
  // Where matrices are read to from now on (Executor::loading()).
  void set_memory(device::MemorySpace& memory) { reader_.set_memory(memory); }
  // Those bytes of the files that loading the part of `name` reads; of columns their whole rows. (Of MXFP4 not what is
  // looked at besides: a partner's scales, and of a tensor whose scales lie far apart codes of other ranks' rows.)
  std::vector<checkpoint::FilePart> parts_of(const std::string& name, const Shard& shard) const;
  // Of all weights, about in the order in which a model loads them.
  std::vector<checkpoint::FilePart> parts_in_order() const;
  // All of it will be loaded from now on: the disk may read ahead of that (checkpoint/read_ahead.h).
  void read_ahead();
  // Null: none. Must outlive the source.
  void set_edit(const WeightEdit* edit) { edit_ = edit; }
  // A small tensor, widened exactly to FP32.
  device::Tensor load_vector_part(const std::string& name, const Shard& shard) override;
  device::Tensor load_table(const std::string& name) override;

  // MXFP4 blocks rounded so far; 0 unless Inexact::kRound.
  int64_t num_rounded_blocks() const { return reader_.num_rounded_blocks(); }

  uint64_t fingerprint() const override { return fingerprint_; }
  const Config& config() const { return config_; }
  const Shard& shard() const override { return shard_; }

 private:
  const WeightRow& row(const std::string& name) const;
  const StoredTensor& resolved(const std::string& name) const;
  const Mxfp4Scaling& scaling(const std::string& name);
  int global_exponent(const std::string& name);
  void count_as_read(const std::string& name, const Shard& shard);
  void add_fingerprint(const std::string& name, const void* data, size_t bytes);

  const Config& config_;
  const WeightEdit* edit_ = nullptr;
  Shard shard_;
  int64_t num_draft_layers_;
  Inexact inexact_;
  device::Queue queue_;  // reads and packs with every core
  MatrixReader reader_;
  std::map<std::string, WeightRow> rows_;
  std::map<std::string, StoredTensor> stored_;
  std::map<std::string, Mxfp4Scaling> scalings_;  // by w1 for w1 and w3
  std::vector<std::string> kept_aside_, unknown_;
  uint64_t total_bytes_ = 0, fingerprint_ = 0;
  std::optional<checkpoint::ReadAhead> ahead_;
};

}  // namespace tessera::model
