// SPDX-License-Identifier: Apache-2.0
#pragma once
// `tessera check`: structure, scales in sane bands, hashes. Reads headers and scales, and every byte only for hashes.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "doctor/finding.h"
#include "model/config.h"

namespace tessera::doctor {

struct StructureReport {
  std::vector<Finding> findings;
  std::optional<model::Config> config;                 // nothing where config.json can't be read
  std::unique_ptr<checkpoint::Checkpoint> checkpoint;  // null where the shards can't be opened
  bool can_run = false;                                // every tensor of the model is there, in a readable format
};

// config.json and the headers: every tensor there, of the right shape and a readable format, none that nobody knows,
// and compress_ratios as the tensors have them. Throws kNotFound where there is no such folder.
StructureReport check_structure(const std::string& directory);

// Reads every scale of the model's matrices: none that is NaN, negative or not finite, few that are zero or clip their
// block, none so far below the others that NVFP4 can't hold an MXFP4 block.
// `progress` may be null.
std::vector<Finding> check_scales(const StructureReport& structure, ProgressSink* progress);

// Compares every tensor with hashes.json. `num_checked` (may be null) counts the tensors compared.
std::vector<Finding> check_hashes(const checkpoint::Checkpoint& checkpoint, ProgressSink* progress,
                                  size_t* num_checked);

// Writes hashes.json for what the folder holds now.
void write_hashes_of(const checkpoint::Checkpoint& checkpoint, ProgressSink* progress);

}  // namespace tessera::doctor
