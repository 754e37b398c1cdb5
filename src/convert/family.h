// SPDX-License-Identifier: Apache-2.0
#pragma once
// The families of linear maps that a conversion may put into NVFP4. What belongs to none (embedding, router, index
// weights, norms, hyper-connections, a draft block's projections) always keeps its bits.
#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::convert {

enum class Family : uint8_t {
  kExperts,     // ffn.experts.E.w1, w2, w3
  kShared,      // ffn.shared_experts.w1, w2, w3
  kAttention,   // attn.wq_a, wq_b, wkv, wo_a, wo_b
  kCompressor,  // wkv and wgate of attn.compressor and attn.indexer.compressor
  kIndexer,     // attn.indexer.wq_b
  kHead,        // head
};
constexpr size_t kNumFamilies = 6;
using FamilySet = std::bitset<kNumFamilies>;

std::string_view to_string(Family family);  // "experts", ...

// "experts,shared" as a set; "all" is every family. Throws kInvalidArgument naming an unknown or empty item.
FamilySet parse_families(std::string_view text);
// The inverse, in the order of the enumeration.
std::string to_string(const FamilySet& families);

// The family of an official name without ".weight" ("layers.3.attn.wq_a", "mtp.0.ffn.experts.7.w2"), or nothing.
std::optional<Family> family_of(std::string_view official);

}  // namespace tessera::convert
