// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/bpe.h"

#include <algorithm>

namespace tessera::text {

namespace {

// A token of the piece in a doubly linked list; a merged-away one has id -1.
struct Symbol {
  int32_t id, previous, next;
};

// A pair that may be merged. It is stale where a symbol has changed since; then the merge is looked up in vain.
struct Candidate {
  int32_t rank, left, product;
  int32_t left_id, right_id;
};

// Heap order: the lowest rank on top, then the leftmost.
bool is_later(const Candidate& a, const Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

}  // namespace

void Bpe::encode(std::string_view piece, std::vector<int32_t>& ids) const {
  const int32_t count = static_cast<int32_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  for (int32_t i = 0; i < count; ++i) {
    symbols[static_cast<size_t>(i)] = {byte_ids_[static_cast<unsigned char>(piece[static_cast<size_t>(i)])], i - 1,
                                       i + 1 < count ? i + 1 : -1};
  }
  std::vector<Candidate> heap;
  const auto add = [&](int32_t left) {
    if (left < 0 || symbols[static_cast<size_t>(left)].next < 0) return;
    const Symbol& a = symbols[static_cast<size_t>(left)];
    const Symbol& b = symbols[static_cast<size_t>(a.next)];
    const auto merge = merges_.find(merge_key(a.id, b.id));
    if (merge == merges_.end()) return;
    heap.push_back({merge->second.rank, left, merge->second.product, a.id, b.id});
    std::push_heap(heap.begin(), heap.end(), is_later);
  };
  for (int32_t i = 0; i + 1 < count; ++i) add(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), is_later);
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
