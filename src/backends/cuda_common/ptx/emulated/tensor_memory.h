// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensor memory of a thread block on the emulated GPU: 128 lanes by 512 columns of 32 bits, and what is known of each
// column, so that whoever reads what was not written, not committed or not allocated, or overwrites what others read or
// nobody has read, is told so. Source: PTX ISA, "Tensor Memory", "tcgen05.alloc", "Memory Consistency Model for 5th
// generation of TensorCore operations".
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda/emulated/block.h"

namespace tessera::backends::cuda_common::ptx::emulated {

// Ends the grid: `what` (an instruction) at `site` broke a rule.
[[noreturn]] inline void fail_at(const device::emulated::Site& site, const char* what, std::string rule) {
  std::string line = device::emulated::words(site);
  line += std::string(": ") + what + ": ";
  line += rule;
  device::emulated::fail(std::move(line));
}

class TensorMemory final : public device::emulated::BlockState {
 public:
  static constexpr int kLanes = 128, kColumns = 512, kLeastColumns = 32, kQuadrant = 32;
  static constexpr unsigned kAllQuadrants = 15;

  struct Column {
    bool is_allocated = false;
    unsigned unread = 0;            // quadrants of lanes that hold sums which nobody has read
    int uncommitted_of = kNobody;   // thread whose product wrote it, no commit having followed
    int num_products = 0;           // issued for it and not made
    std::vector<int> loading = {};  // threads that have not waited for their loads of it
  };
  static constexpr int kNobody = -1;

  static TensorMemory& of_block() {
    return static_cast<TensorMemory&>(device::emulated::block_state(
        +[]() -> std::unique_ptr<device::emulated::BlockState> { return std::make_unique<TensorMemory>(); }));
  }

  std::string fault_at_end() const override {
    for (const auto& [first, count] : allocations_) {
      return "the block has ended with " + std::to_string(count) + " columns of tensor memory allocated";
    }
    return "";
  }

  // The first of `count` columns; kNobody: there are none. Anywhere by chance: no kernel may think that it is 0.
  int allocate(int count) {
    std::vector<int> free;
    for (int first = 0; first + count <= kColumns; first += count) {
      bool is_free = true;
      for (int i = first; i < first + count; ++i) is_free &= !columns_[static_cast<size_t>(i)].is_allocated;
      if (is_free) free.push_back(first);
    }
    if (free.empty()) return kNobody;
    const int first = free[static_cast<size_t>(device::emulated::random_below(static_cast<int>(free.size())))];
    take(first, count);
    return first;
  }
  // The same columns as the other block of a pair, which asked first: take_grant() gives them when this one asks.
  // False: they are not free.
  bool grant(int first, int count) {
    for (int i = first; i < first + count; ++i) {
      if (column(i).is_allocated) return false;
    }
    take(first, count);
    granted_.push_back({first, count});
    return true;
  }
  int take_grant(int count) {
    if (granted_.empty() || granted_.front().second != count) return kNobody;
    const int first = granted_.front().first;
    granted_.erase(granted_.begin());
    return first;
  }
  // Null, or what is wrong.
  const char* release(int first, int count) {
    const auto found = allocations_.find(first);
    if (found == allocations_.end() || found->second != count) return "gives back columns that no allocation gave";
    for (int i = first; i < first + count; ++i) {
      if (column(i).num_products > 0) return "gives back columns while a product writes them";
      if (!column(i).loading.empty()) return "gives back columns while a load reads them";
      column(i) = {};
    }
    allocations_.erase(found);
    return nullptr;
  }
  bool has_relinquished = false;

  bool is_allocated(int first, int count) const {
    if (first < 0 || first + count > kColumns) return false;
    for (int i = first; i < first + count; ++i) {
      if (!columns_[static_cast<size_t>(i)].is_allocated) return false;
    }
    return true;
  }

  Column& column(int at) { return columns_[static_cast<size_t>(at)]; }

  struct Cell {
    uint32_t bits = ~0u;  // NaN
    bool is_written = false;
  };
  Cell& cell(int lane, int at) { return cells_[static_cast<size_t>(at)][static_cast<size_t>(lane)]; }
  void write(int lane, int at, uint32_t bits) { cell(lane, at) = {bits, true}; }

  // Loads of `thread` that it has not waited for end. On nobody's way: that would take longer than the rest.
  [[gnu::flatten, gnu::no_sanitize_coverage]] void end_loads(int thread) {
    for (Column& one : columns_) {
      if (!one.loading.empty()) std::erase(one.loading, thread);
    }
  }
  // A commit of `thread`.
  void commit(int thread) {
    for (Column& one : columns_) {
      if (one.uncommitted_of == thread) one.uncommitted_of = kNobody;
    }
  }

 private:
  void take(int first, int count) {
    for (int i = first; i < first + count; ++i) {
      column(i) = {.is_allocated = true};
      for (int lane = 0; lane < kLanes; ++lane) cell(lane, i) = {};
    }
    allocations_[first] = count;
  }

  std::array<Column, kColumns> columns_;
  std::vector<std::array<Cell, kLanes>> cells_ = std::vector<std::array<Cell, kLanes>>(kColumns);
  std::map<int, int> allocations_;            // first columns and counts
  std::vector<std::pair<int, int>> granted_;  // the same, not yet asked for
};

}  // namespace tessera::backends::cuda_common::ptx::emulated
