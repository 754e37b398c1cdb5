// SPDX-License-Identifier: Apache-2.0
#pragma once
// What needs nothing but the maps of a layer's input: compressor_pool of up to two compressors (entries and index
// keys), and the rms_norm of the low-rank query. They share no values. Fused (decision 0023): every value has the bits
// that those ops give.
// Source: those ops' contracts.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/compressor/compressor.h"
#include "ops/rms_norm/rms_norm.h"

namespace tessera::ops {

struct PoolNorm {
  static constexpr const char* kName = "pool_norm";
  static constexpr bool kIsFused = true;
  static constexpr size_t kMostPools = 2;
  struct Desc {
    std::vector<CompressorPool::Desc> pools;  // at least one
    std::optional<RmsNorm::Desc> norm = {};
    std::string to_string() const;
  };
  struct Args {
    std::array<CompressorPool::Args, kMostPools> pools;  // as many as the description has
    RmsNorm::Args norm;                                  // where that is wanted
  };
};

bool pool_norm_reference_supports(const PoolNorm::Desc& desc, std::string& why_not);
void pool_norm_reference(const PoolNorm::Desc& desc, const PoolNorm::Args& args, device::Queue& queue);

}  // namespace tessera::ops
