// SPDX-License-Identifier: Apache-2.0
#pragma once
// `tessera inspect`: what a checkpoint is and where it fits, from config.json and the shards' headers alone.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/cache_spec.h"
#include "model/config.h"
#include "ops/precision.h"

namespace tessera::doctor {

// The tensors of one part of the model that are stored in one format.
struct FamilyFormat {
  std::string family;  // "experts", "shared experts", "attention", "compressor", "indexer", "router", "embedding and
                       // head", "norms and mixing", "draft", "unknown"
  std::string format;  // "nvfp4", "mxfp4", "fp8-block", "bf16", "f32", ...
  int64_t num_matrices = 0;
  int64_t num_values = 0;
  uint64_t num_bytes = 0;  // on disk, scales included
};

struct ContextRow {
  uint64_t memory_bytes = 0;
  int64_t max_tokens = 0;  // 0: the weights alone do not fit
};

struct GpuRow {
  std::string name;
  uint64_t memory_bytes = 0;
  int num_gpus = 0;  // the fewest, a power of two; 0: more than 64
  int64_t max_tokens = 0;
};

struct Inspection {
  std::string directory;
  std::string what;  // "DeepSeek-V4 Flash, NVFP4 experts, FP8 attention"
  model::Config config;
  size_t num_files = 0, num_tensors = 0;
  uint64_t num_bytes = 0;     // of all tensors
  uint64_t loaded_bytes = 0;  // that the program would hold in memory
  std::string draft;          // "none", "MTP", "DSpark"
  std::vector<FamilyFormat> families;
  model::CacheSpec caches;     // of one sequence
  double bytes_per_token = 0;  // growth of a long sequence
  int64_t fixed_bytes = 0;     // of a sequence, whatever its length
  std::vector<ContextRow> contexts;
  std::vector<GpuRow> gpus;
  std::vector<std::string> problems;  // tensors that can't be read, first ten
};

// Throws what opening the checkpoint or its config throws. `precision` decides the caches' bytes.
Inspection inspect(const std::string& directory, const ops::Precision& precision);

// The caches that one sequence of such a model keeps.
model::CacheSpec cache_spec_of(const model::Config& config, const ops::Precision& precision);

// The longest sequence whose caches fit beside `loaded_bytes` in `memory_bytes`, at most config.max_positions.
int64_t max_tokens_in(uint64_t memory_bytes, uint64_t loaded_bytes, const model::CacheSpec& caches,
                      int64_t max_positions);

}  // namespace tessera::doctor
