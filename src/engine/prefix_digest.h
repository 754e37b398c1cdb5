// SPDX-License-Identifier: Apache-2.0
#pragma once
// What identifies a beginning of a text: a chain of SHA-256 over blocks of its tokens, so that two beginnings with one
// digest are the same, whoever chose them.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace tessera::engine {

using PrefixDigest = std::array<uint8_t, 32>;

inline constexpr int64_t kDigestTokens = 256;  // of a block

// Of the first k * kDigestTokens tokens, for k from 0 to ids.size() / kDigestTokens: the first is of the salt alone,
// which separates those who must not find each other's; each other one of the one before it and of a block's ids.
// Cost: about a microsecond a block.
std::vector<PrefixDigest> prefix_digests(std::string_view salt, std::span<const int32_t> ids);

// Digests are as good as random.
struct PrefixDigestHash {
  size_t operator()(const PrefixDigest& digest) const;
};

}  // namespace tessera::engine
