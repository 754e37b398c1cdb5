// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checkpoints with one mistake planted in them, as converters, downloads and people make them.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "testing/stored_tensors.h"

namespace tessera::testing {

// A checkpoint in memory, to be changed and written again.
class EditableCheckpoint {
 public:
  // Reads every tensor of `folder`, and config.json, generation_config.json, tokenizer.json and tokenizer_config.json
  // where they are there.
  static EditableCheckpoint read(const std::string& folder);
  // Writes config, tokenizer and one model.safetensors.
  void write(const std::string& folder) const;

  // Throws std::out_of_range for a name that it has not got.
  Stored& tensor(const std::string& name) { return tensors_.at(name); }
  bool has(const std::string& name) const { return tensors_.contains(name); }
  void set(const std::string& name, Stored stored) { tensors_[name] = std::move(stored); }
  void erase(const std::string& name) { tensors_.erase(name); }
  Tensors& tensors() { return tensors_; }
  // The text of one of the other files; empty where there is none.
  std::string& file(const std::string& name) { return files_[name]; }

 private:
  Tensors tensors_;
  std::map<std::string, std::string> files_;
};

struct PlantedFault {
  std::string name;         // "swapped nibbles"
  std::string description;  // for docs/doctor.md
  // What a finding must say to have named the fault.
  std::string kind;   // its kind
  std::string where;  // part of its place
  std::function<void(EditableCheckpoint&)> plant;
  // Faults that are planted in the written files (a shard cut short). May be empty.
  std::function<void(const std::string& folder)> damage;
  int64_t num_tokens = 64;  // of the sample: some faults show late
};

// Faults for the bundled NVFP4 model.
std::vector<PlantedFault> planted_faults();

// Those that leave no trace in the weights, or one that only other layers show (silent_faults.cc); part of the above.
std::vector<PlantedFault> silent_faults();

// Rewrites every NVFP4 matrix whose name begins with `prefix` as FP8 in 128x128 blocks with F32 scales (`.weight` and
// `.scale`), for faults of that format.
void convert_to_fp8(EditableCheckpoint& checkpoint, const std::string& prefix);

}  // namespace tessera::testing
