// SPDX-License-Identifier: Apache-2.0
#pragma once
// What happens to vectors between the maps and attention, of several sets of them in one call: of each set rms_norm,
// rope, hadamard and cache_write in this order, as far as the set wants them. Fused (decision 0023): every stored
// value has the bits that those ops give one after the other, with their rounding points.
// Source: those ops' contracts.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/cache_write/cache_write.h"
#include "ops/hadamard/hadamard.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"

namespace tessera::ops {

struct NormRope {
  static constexpr const char* kName = "norm_rope";
  static constexpr bool kIsFused = true;
  static constexpr size_t kMostSets = 5;
  // All parts are of one width and activation.
  struct SetDesc {
    std::optional<RmsNorm::Desc> norm = {};  // of each vector
    Rope::Desc rope;                         // vectors: 1 where they are stored in a cache
    std::optional<Hadamard::Desc> hadamard = {};
    std::optional<CacheWrite::Desc> write = {};
  };
  struct Desc {
    std::vector<SetDesc> sets;
    std::string to_string() const;
  };
  struct Set {
    TensorView x;                        // [rows, vectors, width] activation, in place; stored ones are scratch after
    TensorView weight;                   // [width] BF16 or F32, of the norm; data null: none
    const int64_t* positions = nullptr;  // [rows]; like slots, made by no kernel: copied from the host
    const float* frequencies = nullptr;  // [rope_dim / 2]
    const int64_t* slots = nullptr;      // [rows], stored ones only; -1: of nobody, not written
    PagedEntries<uint8_t> cache;
    int64_t num_rows = 0;
  };
  struct Args {
    std::array<Set, kMostSets> sets;  // as many as the description has
  };
};

bool norm_rope_reference_supports(const NormRope::Desc& desc, std::string& why_not);
void norm_rope_reference(const NormRope::Desc& desc, const NormRope::Args& args, device::Queue& queue);

}  // namespace tessera::ops
