// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory in pages of one size, which sequences take one by one and may share. It comes in slabs of many pages and goes
// back when a slab holds nothing, except for one, so that a page at a boundary costs no allocation each time.
//
// A page may have a part of which the ranks have one copy among them (docs/decisions/0035-one-copy-of-entries.md): page
// n's lies on rank n mod world, and all write and read it. Such slabs are made by all ranks together, and stay.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/shared_memory.h"
#include "device/buffer.h"

namespace tessera::model {

// Bytes of a page, multiples of what kernels load at once.
struct PageShape {
  int64_t own = 0;      // in this rank's memory
  int64_t sharded = 0;  // on one of the ranks
  int64_t bytes() const { return own + sharded; }
};

class PagePool {
 public:
  // `memory` must outlive the pool. No bytes: nobody takes a page. `ranks`, which outlive it with `queue`, where a part
  // is sharded: all of them then reserve, take, share and release alike, in the same order.
  PagePool(const PageShape& shape, device::MemorySpace& memory, comm::Communicator* ranks = nullptr,
           device::Queue* queue = nullptr);

  // Pages of a slab of pages without a sharded part: some MiB of them.
  static int64_t pages_per_slab(int64_t page_bytes);

  // Until the next release(), `count` pages can be taken. Throws kResourceExhausted where memory ends, and has changed
  // nothing then that anybody sees; kUnsupported where ranks don't reach each other's memory.
  void reserve(int64_t count);
  // Whether that asks nothing of the other ranks.
  bool can_reserve_alone(int64_t count) const { return ranks_ == nullptr || count <= num_free_; }
  // A page that was reserved, with one owner; what it holds is undefined.
  int32_t take() noexcept;
  // One more owner, and one less; without owners the page is free.
  void share(int32_t page) noexcept;
  void release(int32_t page) noexcept;

  int32_t owners(int32_t page) const;
  bool is_shared(int32_t page) const { return owners(page) > 1; }
  // Of its parts, for the memory's device.
  uint8_t* own(int32_t page) const;
  uint8_t* sharded(int32_t page) const;
  // All of a page, shape().bytes(), its own part first, in the order of the queue's work.
  void copy(int32_t target, int32_t source) const;
  void upload(int32_t page, std::span<const uint8_t> bytes) const;
  void download(int32_t page, std::span<uint8_t> bytes) const;
  const PageShape& shape() const { return shape_; }
  bool is_sharded() const { return ranks_ != nullptr; }
  // A number that all takes, shares and releases of sharded pages have made, in their order; 0 of others.
  uint64_t history() const { return ranks_ == nullptr ? 0 : history_; }
  // Bytes that this rank takes for there to be so many pages at once, used or free: whole slabs, less those it has.
  int64_t bytes_for(int64_t pages) const;
  int64_t num_used() const { return num_used_; }
  int64_t num_free() const { return num_free_; }  // that need no memory to be taken

 private:
  struct Slab {
    device::Buffer memory;  // of the own parts
    std::unique_ptr<comm::SharedMemory> sharded;
    std::vector<int32_t> owners;  // of each page; none: it was given back
    std::vector<int32_t> free;    // pages of this slab, by index in it
  };

  void add_slab();
  // Notes what has become of a page, for ranks to compare.
  void note(int32_t page) noexcept;
  // All slabs that hold nothing, except for one.
  void give_back_whole() noexcept;
  Slab& slab_of(int32_t page) { return slabs_[static_cast<size_t>(page / num_in_slab_)]; }
  const Slab& slab_of(int32_t page) const { return slabs_[static_cast<size_t>(page / num_in_slab_)]; }

  PageShape shape_;
  device::MemorySpace& memory_;
  comm::Communicator* ranks_;
  device::Queue* queue_;
  int32_t num_in_slab_;
  uint64_t history_ = 0;  // of pages taken, shared and released
  std::vector<Slab> slabs_;
  int64_t num_used_ = 0, num_free_ = 0;
};

}  // namespace tessera::model
