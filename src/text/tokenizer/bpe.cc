// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::text {

namespace {

constexpr uint64_t kNoKey = ~uint64_t{0};  // ids are not negative
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
// Of pieces that are looked up before they are merged; longer ones hardly come again.
constexpr size_t kMostKnownBytes = 32;
constexpr size_t kKnownPlaces = 4096;
// In so short a text the table does not pay.
constexpr size_t kLeastPieces = 200;

uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = bytes.size();
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    hash = (std::rotl(hash, 5) ^ word) * kOdd;
  }
  uint64_t rest = 0;
  for (const char byte : bytes) rest = rest << 8 | static_cast<unsigned char>(byte);
  return (std::rotl(hash, 5) ^ rest) * kOdd;
}

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, const std::unordered_map<uint64_t, Merge>& merges)
    : byte_ids_(byte_ids), slots_(std::bit_ceil(2 * merges.size() + 2), Slot{kNoKey, {}}) {
  shift_ = 64 - std::countr_zero(slots_.size());
  for (const auto& [key, merge] : merges) {
    size_t at = (key * kOdd) >> shift_;
    while (slots_[at].key != kNoKey) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {key, merge};
  }
}

const Merge* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t key = merge_key(left, right);
  for (size_t at = (key * kOdd) >> shift_; slots_[at].key != kNoKey; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at].key == key) return &slots_[at].merge;
  }
  return nullptr;
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (piece.size() == 1) return ids.push_back(byte_ids_[static_cast<unsigned char>(piece[0])]);
  if (piece.size() > kMostKnownBytes || ++scratch.num_pieces <= kLeastPieces) return merge_all(piece, scratch, ids);
  if (scratch.known.empty()) scratch.known.resize(kKnownPlaces);
  const uint64_t hash = hash_of(piece);
  Scratch::Known& known = scratch.known[hash >> (64 - std::countr_zero(kKnownPlaces))];
  if (known.hash == hash && known.piece == piece) {
    for (size_t i = 0; i < known.count; ++i) ids.push_back(ids[known.begin + i]);
    return;
  }
  const size_t begin = ids.size();
  merge_all(piece, scratch, ids);
  known = {hash, piece, begin, ids.size() - begin};
}

void Bpe::merge_all(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const {
  const int32_t count = static_cast<int32_t>(piece.size());
  std::vector<Symbol>& symbols = scratch.symbols;
  symbols.resize(piece.size());
  for (int32_t i = 0; i < count; ++i) {
    symbols[static_cast<size_t>(i)] = {byte_ids_[static_cast<unsigned char>(piece[static_cast<size_t>(i)])], i - 1,
                                       i + 1 < count ? i + 1 : -1};
  }
  std::vector<Candidate>& heap = scratch.heap;
  heap.clear();
  const auto add = [&](int32_t left) {
    if (left < 0 || symbols[static_cast<size_t>(left)].next < 0) return;
    const Symbol& a = symbols[static_cast<size_t>(left)];
    const Symbol& b = symbols[static_cast<size_t>(a.next)];
    const Merge* merge = find(a.id, b.id);
    if (merge == nullptr) return;
    heap.push_back({merge->rank, left, merge->product, a.id, b.id});
    std::push_heap(heap.begin(), heap.end());
  };
  for (int32_t i = 0; i + 1 < count; ++i) add(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate best = heap.back();
    heap.pop_back();
    Symbol& left = symbols[static_cast<size_t>(best.left)];
    if (left.id != best.left_id || left.next < 0 || symbols[static_cast<size_t>(left.next)].id != best.right_id)
      continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = best.product;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.left;
    add(left.previous);
    add(best.left);
  }
  for (int32_t i = count > 0 ? 0 : -1; i >= 0; i = symbols[static_cast<size_t>(i)].next) {
    ids.push_back(symbols[static_cast<size_t>(i)].id);
  }
}

}  // namespace tessera::text
