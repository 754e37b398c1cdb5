// SPDX-License-Identifier: Apache-2.0
#pragma once
// OUT/.tessera-convert: where a conversion keeps what is not whole yet. A shard is written there, flushed and renamed,
// then recorded with its hashes and statistics; an interrupted conversion is taken up after the last record. When
// everything is there, the checkpoint that it replaces is removed (where that was asked for), shards and the small
// files move to OUT, config.json last: without it no program takes OUT for a checkpoint. The folder goes at the very
// end.
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/tensor_hashes.h"
#include "convert/plan.h"
#include "convert/statistics.h"

namespace tessera::convert {

constexpr const char* kWorkFolderName = ".tessera-convert";

enum class Existing : uint8_t {
  kRefuse,   // OUT must be empty or not exist
  kResume,   // or hold an unfinished conversion of the same source with the same options
  kReplace,  // the files of a checkpoint in OUT are removed once the new one is whole
};

struct FinishedShard {
  FamilyStatistics statistics;
  checkpoint::TensorHashes hashes;
};

class WorkFolder {
 public:
  // Creates OUT and the work folder, and takes its lock. `fingerprint` stands for source and options. Throws
  // kInvalidArgument where OUT may not be used (no name, not empty, in use by another process, not writable, or begun
  // with another fingerprint), kResourceExhausted where the disk has no room for a file.
  WorkFolder(std::string out, Existing existing, const std::string& fingerprint);
  // Removes what is there of an unfinished conversion that has no finished shard; OUT too, where this made it.
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::string& out() const { return out_; }
  // Where a shard is written before OUT has everything.
  std::string shard_path(const PlannedShard& shard) const;

  // What is recorded of a shard; nothing where it has to be made.
  std::optional<FinishedShard> finished(const PlannedShard& shard) const;
  void record(const PlannedShard& shard, const FinishedShard& finished) const;

  // Removes what is replaced, then moves the shards to OUT.
  void publish(const std::vector<PlannedShard>& shards) const;
  // Removes the work folder: the conversion is whole.
  void remove();

 private:
  void prepare(Existing existing, const std::string& fingerprint);
  void remove_replaced(const std::vector<PlannedShard>& shards) const;
  void clean_up() noexcept;
  std::string out_, path_;
  bool has_made_out_ = false, is_removed_ = false, replaces_ = false;
  int lock_ = -1;
};

}  // namespace tessera::convert
