// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/tcgen05.cuh does on the emulated GPU. Products, copies of scales and commits of a thread are made in order
// and some time after they were issued (device/cuda/emulated/block.h); loads and stores by the time they are waited
// for. Rules are checked when an instruction is issued where they can be, so that breaking one does not depend on
// chance.
#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "backends/cuda_common/ptx/emulated/bulk_copy.h"
#include "backends/cuda_common/ptx/emulated/product_sums.h"
#include "backends/cuda_common/ptx/emulated/shared_window.h"
#include "backends/cuda_common/ptx/emulated/tcgen05_decode.h"
#include "backends/cuda_common/ptx/emulated/tcgen05_sums.h"
#include "backends/cuda_common/ptx/emulated/tensor_memory.h"

namespace tessera::backends::cuda_common::ptx::emulated {

using device::emulated::Site;

// All lanes of a warp at one place, by one way (".sync.aligned") and with one argument; `once` is called by the last.
template <class Once>
void by_whole_warp(const Site& site, const char* what, uint32_t argument, const Once& once) {
  using device::emulated::kWarp;
  struct Payload {
    const Site& site;
    const char* what;
    uint32_t argument;
    uint64_t way;
    const Once& once;
  } mine{site, what, argument, device::emulated::way_of_thread(), once};
  device::emulated::collective(site, ~0u, &mine, [](void* const(&lanes)[kWarp]) {
    const Payload& first = *static_cast<Payload*>(lanes[0]);
    for (void* lane : lanes) {
      const Payload& other = *static_cast<Payload*>(lane);
      if (other.argument != first.argument) {
        fail_at(first.site, first.what, "lanes of a warp give different addresses or counts");
      }
      if (other.way != first.way) {
        fail_at(first.site, first.what, "lanes of a warp have parted, and no barrier of the warp has followed");
      }
    }
    first.once();
  });
}

// Calls act(i) as if block i of those that work together did it: this one, or both of its pair (cta_group::2).
template <class Act>
void in_each_block(int num_blocks, const Act& act) {
  if (num_blocks == 1) return act(0);
  const int first = device::emulated::current.rank & ~1;
  for (int i = 0; i < num_blocks; ++i) {
    device::emulated::dynamic_shared_of(first + i);  // is it still there
    device::emulated::as_block(first + i, [&] { act(i); });
  }
}
// What two blocks do together, one of them asks for.
inline void check_pair(const Site& site, const char* what, int num_blocks, bool by_both) {
  if (num_blocks == 1) return;
  if (device::emulated::cluster_size() % 2 != 0) fail_at(site, what, "cta_group::2 without a cluster of pairs");
  if (!by_both && device::emulated::current.rank % 2 != 0) fail_at(site, what, "is for the pair's even block to give");
}

// What the first column is called here: 512 columns can begin at 0 alone, and a kernel that took that for granted would
// go wrong where it allocates fewer.
constexpr int kFirstColumn = 1024;
inline int column_at(uint32_t address) {
  return column_of(address) - kFirstColumn;
}

inline bool is_allocation_size(int columns) {
  return columns >= TensorMemory::kLeastColumns && columns <= TensorMemory::kColumns && (columns & (columns - 1)) == 0;
}

inline void tcgen05_alloc(uint32_t* shared, int columns, int num_blocks, const Site& site) {
  const device::emulated::Aside aside;
  constexpr const char* kWhat = "tcgen05.alloc";
  check_pair(site, kWhat, num_blocks, true);
  if (num_blocks > 1 && device::emulated::num_cluster_barriers() == 0)
    fail_at(site, kWhat, "before the cluster has met: the pair's other block need not be there");
  by_whole_warp(site, kWhat, static_cast<uint32_t>(columns), [&] {
    TensorMemory& memory = TensorMemory::of_block();
    if (!is_allocation_size(columns)) fail_at(site, kWhat, "columns are no power of two from 32 to 512");
    if (memory.has_relinquished) fail_at(site, kWhat, "the block has given up its right to allocate");
    int first = memory.take_grant(columns);  // by what the other of the pair asked for
    if (first == TensorMemory::kNobody) {
      first = memory.allocate(columns);
      if (first == TensorMemory::kNobody) fail_at(site, kWhat, "waits for ever for columns that its own block has");
      const int rank = device::emulated::current.rank;
      in_each_block(num_blocks, [&](int) {
        if (device::emulated::current.rank == rank) return;
        if (!TensorMemory::of_block().grant(first, columns))
          fail_at(site, kWhat, "a pair's blocks have different columns");
      });
    }
    *shared = static_cast<uint32_t>(kFirstColumn + first);
  });
}

inline void tcgen05_relinquish_alloc_permit(int num_blocks, const Site& site) {
  const device::emulated::Aside aside;
  constexpr const char* kWhat = "tcgen05.relinquish_alloc_permit";
  check_pair(site, kWhat, num_blocks, true);
  by_whole_warp(site, kWhat, 0, [] { TensorMemory::of_block().has_relinquished = true; });
}

inline void tcgen05_dealloc(uint32_t address, int columns, int num_blocks, const Site& site) {
  const device::emulated::Aside aside;
  constexpr const char* kWhat = "tcgen05.dealloc";
  check_pair(site, kWhat, num_blocks, true);
  by_whole_warp(site, kWhat, address, [&] {
    const char* fault = TensorMemory::of_block().release(static_cast<int>(address) - kFirstColumn, columns);
    if (fault != nullptr) fail_at(site, kWhat, fault);
  });
}

// Columns of an operand in tensor memory.
inline int check_columns(const Site& site, const char* what, const char* operand, uint32_t address, int count) {
  const int first = column_at(address);
  if (lane_of(address) != 0) fail_at(site, what, std::string(operand) + " do not begin at lane 0");
  if (!TensorMemory::of_block().is_allocated(first, count)) {
    fail_at(site, what,
            std::string(operand) + " take columns " + std::to_string(first) + " to " +
                std::to_string(first + count - 1) + ", which are not all allocated");
  }
  return first;
}

// 32x128b.warpx4: 32 lanes of 16 bytes to four columns, a copy for every 32 lanes.
class ScaleCopy final : public device::emulated::LateWork {
 public:
  ScaleCopy(int column, SharedMatrix source, int num_blocks, Site site)
      : column_(column), source_(source), num_blocks_(num_blocks), site_(site) {}
  void make() const override {
    in_each_block(num_blocks_, [&](int) { copy(); });
  }

 private:
  void copy() const {
    TensorMemory& memory = TensorMemory::of_block();
    for (uint32_t lane = 0; lane < TensorMemory::kQuadrant; ++lane) {
      const unsigned char* from = shared_at(source_.address(lane, 0), 16);
      if (from == nullptr) fail_at(site_, "tcgen05.cp", "reads beyond shared memory");
      for (int i = 0; i < 4; ++i) {
        uint32_t word;
        std::memcpy(&word, from + 4 * i, 4);
        for (int quadrant = 0; quadrant < 4; ++quadrant) {
          memory.write(quadrant * TensorMemory::kQuadrant + static_cast<int>(lane), column_ + i, word);
        }
      }
    }
  }

  int column_;
  SharedMatrix source_;
  int num_blocks_;
  Site site_;
};

// Of two blocks each copies from its own shared memory to its own tensor memory.
inline void tcgen05_cp_scales(uint32_t address, uint64_t descriptor, int num_blocks, const Site& site) {
  constexpr const char* kWhat = "tcgen05.cp";
  check_pair(site, kWhat, num_blocks, false);
  SharedMatrix source{};
  const char* fault = decode_shared_matrix(descriptor, source);
  if (fault != nullptr) fail_at(site, kWhat, fault);
  if (source.row_bytes != 16) fail_at(site, kWhat, "its source is swizzled");
  if (source.stride != 128) fail_at(site, kWhat, "its source's stride is not 8 lanes of 16 bytes");
  const int first = column_at(address);
  in_each_block(num_blocks, [&](int) {
    check_columns(site, kWhat, "scales", address, 4);
    for (int i = first; i < first + 4; ++i) {
      const TensorMemory::Column& column = TensorMemory::of_block().column(i);
      if (column.num_products > 0 || column.unread != 0) {
        fail_at(site, kWhat, "overwrites column " + std::to_string(i) + ", which holds sums");
      }
    }
  });
  device::emulated::tensor_work_late(std::make_unique<ScaleCopy>(first, source, num_blocks, site));
}

// What it takes to make a product.
struct Nvfp4Operands {
  SharedMatrix a, b;
  int d, a_scales, b_scales;  // columns
  int n;
  bool adds;
  int num_blocks;
};

class Nvfp4MmaWork final : public device::emulated::LateWork {
 public:
  Nvfp4MmaWork(const Nvfp4Operands& operands, Site site)
      : operands_(operands), site_(site), thread_(device::emulated::current.index()) {}

  // Of two blocks each has 128 rows of A and of the sums, with their scales, half of B and all of B's scales.
  void make() const override {
    const auto b = std::make_unique<Rows<kMostColumns>>();
    const int n_each = operands_.n / operands_.num_blocks;
    in_each_block(operands_.num_blocks, [&](int i) { b->load(*this, operands_.b, i * n_each, n_each); });
    if (operands_.num_blocks > 1) check_scales_of_pair();
    in_each_block(operands_.num_blocks, [&](int) { multiply(*b); });
  }

 private:
  static constexpr int kMostColumns = 256, kM = TensorMemory::kLanes;
  template <int kRows>
  class Rows;

  // Like what it calls it is on no thread's way: keeping one would take longer than the products.
  [[gnu::flatten, gnu::no_sanitize_coverage]] void multiply(const Rows<kMostColumns>& b) const {
    TensorMemory& memory = TensorMemory::of_block();
    const bool is_fast = sums_are_fast();
    const auto a = std::make_unique<Rows<kM>>();
    a->load(*this, operands_.a, 0, kM);
    for (int quadrant = 0; quadrant < 4; ++quadrant) {
      std::array<Scales, kMostColumns> b_scales;
      for (int n = 0; n < operands_.n; ++n) {
        b_scales[static_cast<size_t>(n)] = scales_of(memory, "B", operands_.b_scales, n, quadrant);
      }
      for (int row = 0; row < kM; ++row) {
        const Scales a_scales = scales_of(memory, "A", operands_.a_scales, row, quadrant);
        if (row / TensorMemory::kQuadrant != quadrant) continue;  // its copy has to be there all the same
        for (int n = 0; n < operands_.n; ++n) {
          int groups[kGroupsOfProduct];
          for (int i = 0; i < kGroupsOfProduct; ++i) groups[i] = group_sum(a->at(row, i), b.at(n, i));
          const int column = operands_.d + n;
          const TensorMemory::Cell& old = memory.cell(row, column);
          if (operands_.adds && !old.is_written) {
            fail("adds to lane " + std::to_string(row) + " of column " + std::to_string(column) +
                 ", where nothing was written");
          }
          const uint32_t sum = tcgen05_sum(is_fast, operands_.adds ? old.bits : 0, groups, a_scales.bytes,
                                           b_scales[static_cast<size_t>(n)].bytes);
          memory.write(row, column, sum);
        }
      }
    }
    for (int column = operands_.d; column < operands_.d + operands_.n; ++column) {
      TensorMemory::Column& one = memory.column(column);
      --one.num_products, one.unread = TensorMemory::kAllQuadrants, one.uncommitted_of = thread_;
    }
  }

  struct Scales {
    uint8_t bytes[kGroupsOfProduct];
  };

  [[noreturn]] void fail(std::string rule) const { fail_at(site_, "tcgen05.mma", std::move(rule)); }

  // 64 codes of each row, in halves.
  template <int kRows>
  class Rows {
   public:
    // `count` rows of the matrix, from `first` on here.
    void load(const Nvfp4MmaWork& work, const SharedMatrix& matrix, int first, int count) {
      for (int row = 0; row < count; ++row) {
        for (int byte = 0; byte < 32; ++byte) {
          const unsigned char* at =
              shared_at(matrix.address(static_cast<uint32_t>(row), static_cast<uint32_t>(byte)), 1);
          if (at == nullptr) work.fail("an operand lies beyond shared memory");
          int8_t* halves = &halves_[first + row][2 * byte];
          halves[0] = static_cast<int8_t>(halves_of_e2m1(*at & 15u));
          halves[1] = static_cast<int8_t>(halves_of_e2m1(*at >> 4));
        }
      }
    }
    const int8_t* at(int row, int group) const { return &halves_[row][group * kProductsOfGroup]; }

   private:
    int8_t halves_[kRows][64];
  };

  // The copy in the lanes that `quadrant` computes; all copies have to be the same.
  Scales scales_of(TensorMemory& memory, const char* operand, int first_column, int row, int quadrant) const {
    const int lane = row % TensorMemory::kQuadrant, column = first_column + row / TensorMemory::kQuadrant;
    const TensorMemory::Cell& copy = memory.cell(quadrant * TensorMemory::kQuadrant + lane, column);
    const auto where = [&] {
      return "the scales of " + std::string(operand) + "'s row " + std::to_string(row) + " in lanes " +
             std::to_string(quadrant * TensorMemory::kQuadrant) + " to " +
             std::to_string(quadrant * TensorMemory::kQuadrant + 31) + ", column " + std::to_string(column);
    };
    if (!copy.is_written) fail(where() + ", were not written");
    if (copy.bits != memory.cell(lane, column).bits) fail(where() + ", are not those of lanes 0 to 31");
    Scales scales;
    std::memcpy(scales.bytes, &copy.bits, sizeof scales);
    return scales;
  }

  // Each block of a pair multiplies by its own copy of all of B's scales: one that had half of them from elsewhere, or
  // from before, would have other sums than the block beside it.
  void check_scales_of_pair() const {
    std::array<TensorMemory::Cell, kMostColumns> of_even;
    in_each_block(operands_.num_blocks, [&](int block) {
      TensorMemory& memory = TensorMemory::of_block();
      for (int n = 0; n < operands_.n; ++n) {
        const TensorMemory::Cell& copy =
            memory.cell(n % TensorMemory::kQuadrant, operands_.b_scales + n / TensorMemory::kQuadrant);
        TensorMemory::Cell& other = of_even[static_cast<size_t>(n)];
        if (block == 0) {
          other = copy;
        } else if (other.is_written && copy.is_written && other.bits != copy.bits) {
          fail("the scales of B's row " + std::to_string(n) + " in the pair's odd block are not those in its even one");
        }
      }
    });
  }

  Nvfp4Operands operands_;
  Site site_;
  int thread_;
};

inline void tcgen05_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, uint32_t a_scales,
                              uint32_t b_scales, bool adds, int num_blocks, const Site& site) {
  constexpr const char* kWhat = "tcgen05.mma";
  check_pair(site, kWhat, num_blocks, false);
  Nvfp4Operands operands{};
  Nvfp4Instruction instruction{};
  const auto check = [&](const char* fault) {
    if (fault != nullptr) fail_at(site, kWhat, fault);
  };
  check(decode_nvfp4_instruction(descriptor, num_blocks, instruction));
  check(decode_shared_matrix(a, operands.a));
  check(decode_shared_matrix(b, operands.b));
  for (const SharedMatrix* matrix : {&operands.a, &operands.b}) {
    if (matrix->row_bytes > 16 && matrix->start % matrix->row_bytes + 32 > matrix->row_bytes) {
      fail_at(site, kWhat, "64 columns run over the end of an operand's swizzled rows");
    }
  }
  const int n = operands.n = instruction.n, b_columns = (n + 31) / 32;
  operands.adds = adds, operands.num_blocks = num_blocks;
  in_each_block(num_blocks, [&](int) {
    operands.d = check_columns(site, kWhat, "sums", d, n);
    operands.a_scales = check_columns(site, kWhat, "scales of A", a_scales, 4);
    operands.b_scales = check_columns(site, kWhat, "scales of B", b_scales, b_columns);
  });
  const auto overlap = [](int first, int count, int other, int other_count) {
    return first < other + other_count && other < first + count;
  };
  if (overlap(operands.d, n, operands.a_scales, 4) || overlap(operands.d, n, operands.b_scales, b_columns) ||
      overlap(operands.a_scales, 4, operands.b_scales, b_columns)) {
    fail_at(site, kWhat, "sums and scales overlap in tensor memory");
  }
  in_each_block(num_blocks, [&](int) {
    TensorMemory& memory = TensorMemory::of_block();
    for (int i = operands.d; i < operands.d + n; ++i) {
      TensorMemory::Column& column = memory.column(i);
      if (!column.loading.empty()) {
        fail_at(site, kWhat, "writes column " + std::to_string(i) + ", of which a load has not been waited for");
      }
      if (!adds && (column.unread != 0 || column.num_products > 0)) {
        fail_at(site, kWhat, "begins column " + std::to_string(i) + " anew, whose sums nobody has read");
      }
    }
    for (int i = operands.d; i < operands.d + n; ++i) ++memory.column(i).num_products;
  });
  device::emulated::tensor_work_late(std::make_unique<Nvfp4MmaWork>(operands, site));
}

class Arrival final : public device::emulated::LateWork {
 public:
  Arrival(const uint64_t* barrier, int rank) : barrier_(barrier), rank_(rank) {}
  void make() const override { arrive_at(barrier_, rank_); }

 private:
  const uint64_t* barrier_;
  int rank_;
};

// What a thread's commits wait for is made in order; their arrivals are in no order, so that the last one's does not
// say that others' have been.
class CommitWork final : public device::emulated::LateWork {
 public:
  CommitWork(const uint64_t* barrier, int num_blocks, uint32_t blocks)
      : barrier_(barrier), num_blocks_(num_blocks), blocks_(blocks), thread_(device::emulated::current.index()) {}
  void make() const override {
    in_each_block(num_blocks_, [&](int) { TensorMemory::of_block().commit(thread_); });
    for_each_rank(blocks_, [&](int rank) {
      device::emulated::engine_work_late(std::make_unique<Arrival>(barrier_, rank), "a commit's arrival");
    });
  }

 private:
  const uint64_t* barrier_;  // of the block that issued it
  int num_blocks_;
  uint32_t blocks_;
  int thread_;
};

// Of a pair the barriers of `blocks` at this place count an arrival.
inline void tcgen05_commit(uint64_t* barrier, int num_blocks, uint32_t blocks, const Site& site) {
  constexpr const char* kWhat = "tcgen05.commit";
  check_pair(site, kWhat, num_blocks, false);
  if (shared_offset(barrier) < 0) fail_at(site, kWhat, "its barrier is not in dynamic shared memory");
  if (num_blocks == 1) blocks = 1u << device::emulated::current.rank;
  if (!are_of_cluster(blocks)) fail_at(site, kWhat, "is for no block, or for one that the cluster lacks");
  device::emulated::tensor_work_late(std::make_unique<CommitWork>(barrier, num_blocks, blocks));
}

// A lane's part of a load or store 32x32b: `count` columns of its own lane.
class TensorTransfer final : public device::emulated::LateWork {
 public:
  TensorTransfer(int column, int count, uint32_t* to, const uint32_t* from, const char* what, Site site)
      : column_(column), count_(count), to_(to), site_(site), what_(what) {
    const auto& current = device::emulated::current;
    lane_ = current.index() / device::emulated::kWarp % 4 * TensorMemory::kQuadrant + current.lane();
    if (from != nullptr) std::memcpy(values_.data(), from, static_cast<size_t>(count) * 4);
  }
  void make() const override {
    TensorMemory& memory = TensorMemory::of_block();
    for (int i = 0; i < count_; ++i) {
      if (to_ == nullptr) {
        memory.write(lane_, column_ + i, values_[static_cast<size_t>(i)]);
        continue;
      }
      const TensorMemory::Cell& cell = memory.cell(lane_, column_ + i);
      if (!cell.is_written) {
        fail_at(site_, what_,
                "lane " + std::to_string(lane_) + " of column " + std::to_string(column_ + i) +
                    " is read, where nothing was written");
      }
      to_[i] = cell.bits;
    }
  }

 private:
  int column_, count_;
  uint32_t* to_;  // null: a store
  Site site_;
  const char* what_;
  int lane_ = 0;
  std::array<uint32_t, 128> values_{};
};

// What loads and stores of a warp have in common; the first column.
inline int check_transfer(const Site& site, const char* what, uint32_t address, int count) {
  const int first = column_at(address), warp = device::emulated::current.index() / device::emulated::kWarp;
  by_whole_warp(site, what, address, [&] {
    if (lane_of(address) != warp % 4 * TensorMemory::kQuadrant) {
      fail_at(site, what,
              "warp " + std::to_string(warp) + " reaches lanes " + std::to_string(warp % 4 * 32) + " to " +
                  std::to_string(warp % 4 * 32 + 31) + " alone, and not those from " +
                  std::to_string(lane_of(address)));
    }
    TensorMemory& memory = TensorMemory::of_block();
    if (!memory.is_allocated(first, count)) {
      fail_at(site, what,
              "columns " + std::to_string(first) + " to " + std::to_string(first + count - 1) + " are not allocated");
    }
    for (int i = first; i < first + count; ++i) {
      if (memory.column(i).num_products > 0) {
        fail_at(site, what, "column " + std::to_string(i) + " belongs to a product that is under way");
      }
      if (memory.column(i).uncommitted_of != TensorMemory::kNobody) {
        fail_at(site, what, "column " + std::to_string(i) + " was written by a product that no commit has followed");
      }
    }
  });
  return first;
}

inline void tcgen05_ld(uint32_t* registers, int count, uint32_t address, const Site& site) {
  const device::emulated::Aside aside;
  constexpr const char* kWhat = "tcgen05.ld";
  const int first = check_transfer(site, kWhat, address, count);
  TensorMemory& memory = TensorMemory::of_block();
  for (int i = first; i < first + count; ++i) {
    memory.column(i).unread &= ~(1u << (device::emulated::current.index() / device::emulated::kWarp % 4));
    memory.column(i).loading.push_back(device::emulated::current.index());
  }
  for (int i = 0; i < count; ++i) registers[i] = ~0u;
  device::emulated::work_late(device::emulated::LateKind::kTensorLoads,
                              std::make_unique<TensorTransfer>(first, count, registers, nullptr, kWhat, site));
}

inline void tcgen05_st(const uint32_t* registers, int count, uint32_t address, const Site& site) {
  const device::emulated::Aside aside;
  constexpr const char* kWhat = "tcgen05.st";
  const int first = check_transfer(site, kWhat, address, count);
  device::emulated::work_late(device::emulated::LateKind::kTensorStores,
                              std::make_unique<TensorTransfer>(first, count, nullptr, registers, kWhat, site));
}

// Lanes meet before they wait, so that whoever runs between finds loads under way: a set of sums that was given back
// too early shows.
inline void tcgen05_wait_ld(const Site& site) {
  const device::emulated::Aside aside;
  by_whole_warp(site, "tcgen05.wait::ld", 0, [] {});
  device::emulated::commit_late(device::emulated::LateKind::kTensorLoads);
  device::emulated::wait_for_late(device::emulated::LateKind::kTensorLoads, 0);
  TensorMemory::of_block().end_loads(device::emulated::current.index());
}

inline void tcgen05_wait_st(const Site& site) {
  const device::emulated::Aside aside;
  device::emulated::commit_late(device::emulated::LateKind::kTensorStores);
  device::emulated::wait_for_late(device::emulated::LateKind::kTensorStores, 0);
  by_whole_warp(site, "tcgen05.wait::st", 0, [] {});
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
