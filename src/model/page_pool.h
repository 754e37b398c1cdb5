// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory in pages of one size, which sequences take one by one and may share. It comes in slabs of many pages and goes
// back when a slab holds nothing, except for one, so that a page at a boundary costs no allocation each time.
#include <cstdint>
#include <vector>

#include "device/buffer.h"

namespace tessera::model {

class PagePool {
 public:
  // `memory` must outlive the pool. page_bytes 0: nobody takes a page.
  PagePool(int64_t page_bytes, device::MemorySpace& memory) : page_bytes_(page_bytes), memory_(memory) {}

  // Pages of a slab: some MiB of them.
  static int64_t pages_per_slab(int64_t page_bytes);

  // Until the next release(), `count` pages can be taken. Throws kResourceExhausted where memory ends, and has changed
  // nothing then that anybody sees.
  void reserve(int64_t count);
  // A page that was reserved, with one owner; what it holds is undefined.
  int32_t take() noexcept;
  // One more owner, and one less; without owners the page is free.
  void share(int32_t page) noexcept;
  void release(int32_t page) noexcept;

  int32_t owners(int32_t page) const;
  bool is_shared(int32_t page) const { return owners(page) > 1; }
  uint8_t* address(int32_t page) const;  // in the memory
  int64_t page_bytes() const { return page_bytes_; }
  int64_t num_used() const { return num_used_; }
  int64_t num_free() const { return num_free_; }  // that need no memory to be taken

 private:
  struct Slab {
    device::Buffer memory;        // empty: it was given back
    std::vector<int32_t> owners;  // of each page
    std::vector<int32_t> free;    // pages of this slab, by index in it
  };

  void add_slab();
  // All slabs that hold nothing, except for one.
  void give_back_whole() noexcept;
  Slab& slab_of(int32_t page) { return slabs_[static_cast<size_t>(page / num_in_slab_)]; }

  int64_t page_bytes_;
  device::MemorySpace& memory_;
  int32_t num_in_slab_ = static_cast<int32_t>(pages_per_slab(page_bytes_));
  std::vector<Slab> slabs_;
  int64_t num_used_ = 0, num_free_ = 0;
};

}  // namespace tessera::model
