// SPDX-License-Identifier: Apache-2.0
#include "model/page_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::model {

int64_t PagePool::pages_per_slab(int64_t page_bytes) {
  constexpr int64_t kSlabBytes = int64_t{8} << 20, kMostPages = 32;
  return page_bytes == 0 ? 1 : std::clamp<int64_t>(kSlabBytes / page_bytes, 1, kMostPages);
}

void PagePool::add_slab() {
  const size_t count = static_cast<size_t>(num_in_slab_);
  Slab slab;
  slab.owners.resize(count);
  for (size_t i = count; i-- > 0;) slab.free.push_back(static_cast<int32_t>(i));  // the lowest is given out first
  slab.memory = device::Buffer(count * static_cast<size_t>(page_bytes_), memory_);
  const auto gone =
      std::find_if(slabs_.begin(), slabs_.end(), [](const Slab& old) { return old.memory.data() == nullptr; });
  if (gone != slabs_.end()) {
    *gone = std::move(slab);
  } else {
    slabs_.push_back(std::move(slab));
  }
  num_free_ += num_in_slab_;
}

void PagePool::reserve(int64_t count) {
  TESSERA_CHECK(count == 0 || page_bytes_ > 0, "caches that grow have pages");
  const auto fail_exhausted = [&](const char* why) {
    give_back_whole();  // what was got on the way is of no use here, and of use to others
    fail(ErrorCode::kResourceExhausted,
         fmt::format("no memory for {} more cache pages of {} ({} are in use){}", count - num_free_,
                     format_bytes(static_cast<uint64_t>(page_bytes_)), num_used_, why));
  };
  try {
    while (num_free_ < count) add_slab();
  } catch (const std::bad_alloc&) {
    fail_exhausted("");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    fail_exhausted((std::string(": ") + error.what()).c_str());
  }
}

void PagePool::give_back_whole() noexcept {
  for (Slab& slab : slabs_) {
    if (static_cast<int32_t>(slab.free.size()) < num_in_slab_ || num_free_ < 2 * num_in_slab_) continue;
    slab = Slab();
    num_free_ -= num_in_slab_;
  }
}

int32_t PagePool::take() noexcept {
  const auto found = std::find_if(slabs_.begin(), slabs_.end(), [](const Slab& slab) { return !slab.free.empty(); });
  Slab& slab = *found;
  const int32_t index = slab.free.back();
  slab.free.pop_back();
  slab.owners[static_cast<size_t>(index)] = 1;
  ++num_used_, --num_free_;
  return static_cast<int32_t>(found - slabs_.begin()) * num_in_slab_ + index;
}

void PagePool::share(int32_t page) noexcept {
  ++slab_of(page).owners[static_cast<size_t>(page % num_in_slab_)];
}

void PagePool::release(int32_t page) noexcept {
  Slab& slab = slab_of(page);
  const int32_t index = page % num_in_slab_;
  if (--slab.owners[static_cast<size_t>(index)] > 0) return;
  slab.free.push_back(index);  // within what it had
  --num_used_, ++num_free_;
  if (static_cast<int32_t>(slab.free.size()) < num_in_slab_ || num_free_ < 2 * num_in_slab_) return;
  // Another slab's worth is free; that this one is whole is reason enough to give it back.
  slab = Slab();
  num_free_ -= num_in_slab_;
}

int32_t PagePool::owners(int32_t page) const {
  return slabs_[static_cast<size_t>(page / num_in_slab_)].owners[static_cast<size_t>(page % num_in_slab_)];
}

uint8_t* PagePool::address(int32_t page) const {
  const Slab& slab = slabs_[static_cast<size_t>(page / num_in_slab_)];
  return slab.memory.as<uint8_t>() + static_cast<int64_t>(page % num_in_slab_) * page_bytes_;
}

}  // namespace tessera::model
