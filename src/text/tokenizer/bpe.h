// SPDX-License-Identifier: Apache-2.0
#pragma once
// Byte-pair merging: a piece of bytes becomes tokens by merging, again and again, the adjacent pair of lowest rank
// (the leftmost of equal ones).
// Source: Sennrich et al., arXiv 1508.07909; huggingface/tokenizers, models/bpe.
#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::text {

struct Merge {
  int32_t rank = 0;
  int32_t product = 0;  // the merged token's id
};

class Bpe {
 public:
  // `byte_ids`: the token of each single byte. `merges`: by merge_key(left, right).
  Bpe(const std::array<int32_t, 256>& byte_ids, std::unordered_map<uint64_t, Merge> merges)
      : byte_ids_(byte_ids), merges_(std::move(merges)) {}

  static uint64_t merge_key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  // Appends the tokens of `piece`. O(n log n).
  void encode(std::string_view piece, std::vector<int32_t>& ids) const;

 private:
  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<uint64_t, Merge> merges_;
};

}  // namespace tessera::text
