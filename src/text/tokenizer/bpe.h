// SPDX-License-Identifier: Apache-2.0
#pragma once
// Byte-pair merging: a piece of bytes becomes tokens by merging, again and again, the adjacent pair of lowest rank
// (the leftmost of equal ones).
// Source: Sennrich et al., arXiv 1508.07909; huggingface/tokenizers, models/bpe.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::text {

struct Merge {
  int32_t rank = 0;
  int32_t product = 0;  // the merged token's id
};

class Bpe {
 private:
  // A token of the piece in a doubly linked list; a merged-away one has id -1.
  struct Symbol {
    int32_t id, previous, next;
  };
  // A pair that may be merged. It is stale where a symbol has changed since; then the merge is looked up in vain.
  struct Candidate {
    int32_t rank, left, product;
    int32_t left_id, right_id;
    // Heap order: the lowest rank on top, then the leftmost.
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
  };

 public:
  // What encode() works in; pieces of a text may share one.
  class Scratch {
    friend Bpe;
    struct Known {
      uint64_t hash = 0;
      std::string_view piece;
      size_t begin = 0, count = 0;  // of ids
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    std::vector<Known> known;  // by hash, one each place
    size_t num_pieces = 0;
  };

  // `byte_ids`: the token of each single byte. `merges`: by merge_key(left, right).
  Bpe(const std::array<int32_t, 256>& byte_ids, const std::unordered_map<uint64_t, Merge>& merges);

  static uint64_t merge_key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  // Appends the tokens of `piece`. O(n log n). Where a scratch is used again, the bytes of its pieces must lie where
  // they did, and `ids` have what was appended: pieces that come again are copied from there.
  void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Slot {
    uint64_t key;
    Merge merge;
  };
  const Merge* find(int32_t left, int32_t right) const;
  void merge_all(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Slot> slots_;  // open addressing; a power of two, at most half full
  int shift_ = 0;
};

}  // namespace tessera::text
