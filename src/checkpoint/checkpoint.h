// SPDX-License-Identifier: Apache-2.0
#pragma once
// A checkpoint's folder: one model.safetensors, or an index and its shards, or any *.safetensors files.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera::checkpoint {

inline constexpr const char* kIndexName = "model.safetensors.index.json";  // names the shard of every tensor

// A tensor and the shard that holds it.
struct LocatedTensor {
  const TensorEntry* entry = nullptr;
  const SafetensorsFile* file = nullptr;

  void read_part(uint64_t begin, uint64_t num_bytes, void* out) const {
    file->read_part(*entry, begin, num_bytes, out);
  }
  void read(void* out) const { file->read(*entry, out); }
};

class Checkpoint {
 public:
  // Opens every shard and checks its header. With an index, index and shards must agree both ways. Throws kNotFound
  // with what was looked for, kDataLoss.
  static Checkpoint open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const std::vector<LocatedTensor>& tensors() const { return tensors_; }  // by name
  const LocatedTensor* find(std::string_view name) const;                 // nullptr where absent
  size_t num_files() const { return files_.size(); }

 private:
  std::string directory_;
  std::vector<SafetensorsFile> files_;  // never resized after open: tensors point into it
  std::vector<LocatedTensor> tensors_;
};

}  // namespace tessera::checkpoint
