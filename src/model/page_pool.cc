// SPDX-License-Identifier: Apache-2.0
#include "model/page_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"

namespace tessera::model {

namespace {

// Each rank's pages of a slab: enough of them that connecting ranks is seldom.
int64_t sharded_per_slab(int64_t page_bytes) {
  constexpr int64_t kSlabBytes = int64_t{128} << 20, kMostPages = 256;
  return std::clamp<int64_t>(kSlabBytes / page_bytes, 1, kMostPages);
}

}  // namespace

PagePool::PagePool(const PageShape& shape, device::MemorySpace& memory, comm::Communicator* ranks, device::Queue* queue)
    : shape_(shape), memory_(memory), ranks_(shape.sharded > 0 ? ranks : nullptr), queue_(queue) {
  TESSERA_CHECK(shape.sharded == 0 || ranks != nullptr, "ranks among which pages are sharded");
  num_in_slab_ = static_cast<int32_t>(ranks_ == nullptr ? pages_per_slab(shape.bytes())
                                                        : ranks->world() * sharded_per_slab(shape.sharded));
}

int64_t PagePool::pages_per_slab(int64_t page_bytes) {
  constexpr int64_t kSlabBytes = int64_t{8} << 20, kMostPages = 32;
  return page_bytes == 0 ? 1 : std::clamp<int64_t>(kSlabBytes / page_bytes, 1, kMostPages);
}

void PagePool::add_slab() {
  const size_t count = static_cast<size_t>(num_in_slab_);
  Slab slab;
  slab.owners.resize(count);
  for (size_t i = count; i-- > 0;) slab.free.push_back(static_cast<int32_t>(i));  // the lowest is given out first
  std::string own_fault;
  try {
    if (shape_.own > 0) slab.memory = device::Buffer(count * static_cast<size_t>(shape_.own), memory_);
  } catch (const std::bad_alloc&) {
    if (ranks_ == nullptr) throw;
    own_fault = "no memory left";  // for all ranks to know: none has the slab then
  } catch (const Error& error) {
    if (ranks_ == nullptr || error.code() != ErrorCode::kResourceExhausted) throw;
    own_fault = error.what();
  }
  if (ranks_ != nullptr) {
    std::string why_not;
    const size_t bytes = count / static_cast<size_t>(ranks_->world()) * static_cast<size_t>(shape_.sharded);
    slab.sharded = comm::make_shared_memory(*ranks_, memory_, *queue_, bytes, history_, own_fault, why_not);
    if (slab.sharded == nullptr) fail(ErrorCode::kUnsupported, "caches sharded over ranks: " + why_not);
  }
  const auto gone = std::find_if(slabs_.begin(), slabs_.end(), [](const Slab& old) { return old.owners.empty(); });
  if (gone != slabs_.end()) {
    *gone = std::move(slab);
  } else {
    slabs_.push_back(std::move(slab));
  }
  num_free_ += num_in_slab_;
}

void PagePool::reserve(int64_t count) {
  TESSERA_CHECK(count == 0 || shape_.bytes() > 0, "caches that grow have pages");
  const auto fail_exhausted = [&](const char* why) {
    give_back_whole();  // what was got on the way is of no use here, and of use to others
    fail(ErrorCode::kResourceExhausted,
         fmt::format("no memory for {} more cache pages of {} ({} are in use){}", count - num_free_,
                     format_bytes(static_cast<uint64_t>(shape_.bytes())), num_used_, why));
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
  if (ranks_ != nullptr) return;
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
  const int32_t page = static_cast<int32_t>(found - slabs_.begin()) * num_in_slab_ + index;
  note(page);
  return page;
}

void PagePool::note(int32_t page) noexcept {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
  history_ = (history_ + static_cast<uint64_t>(page) + 1) * kFactor;
}

void PagePool::share(int32_t page) noexcept {
  ++slab_of(page).owners[static_cast<size_t>(page % num_in_slab_)];
  note(page);
}

void PagePool::release(int32_t page) noexcept {
  Slab& slab = slab_of(page);
  const int32_t index = page % num_in_slab_;
  note(page);
  if (--slab.owners[static_cast<size_t>(index)] > 0) return;
  slab.free.push_back(index);  // within what it had
  --num_used_, ++num_free_;
  if (ranks_ != nullptr || static_cast<int32_t>(slab.free.size()) < num_in_slab_ || num_free_ < 2 * num_in_slab_)
    return;
  // Another slab's worth is free; that this one is whole is reason enough to give it back.
  slab = Slab();
  num_free_ -= num_in_slab_;
}

int64_t PagePool::bytes_for(int64_t pages) const {
  const int64_t more = std::max<int64_t>(pages - num_used_ - num_free_, 0),
                world = ranks_ == nullptr ? 1 : ranks_->world();
  return ceil_div<int64_t>(more, num_in_slab_) * num_in_slab_ / world * (world * shape_.own + shape_.sharded);
}

int32_t PagePool::owners(int32_t page) const {
  return slab_of(page).owners[static_cast<size_t>(page % num_in_slab_)];
}

uint8_t* PagePool::own(int32_t page) const {
  return slab_of(page).memory.as<uint8_t>() + static_cast<int64_t>(page % num_in_slab_) * shape_.own;
}

// Neighbours lie on different ranks: pages that a sequence took together are of all of them alike.
uint8_t* PagePool::sharded(int32_t page) const {
  const int32_t index = page % num_in_slab_, world = ranks_->world();
  return slab_of(page).sharded->of(index % world) + static_cast<int64_t>(index / world) * shape_.sharded;
}

void PagePool::copy(int32_t target, int32_t source) const {
  if (shape_.own > 0) memory_.copy(own(target), own(source), static_cast<size_t>(shape_.own));
  if (shape_.sharded > 0) memory_.copy(sharded(target), sharded(source), static_cast<size_t>(shape_.sharded));
}

void PagePool::upload(int32_t page, std::span<const uint8_t> bytes) const {
  const auto num_own = static_cast<size_t>(shape_.own);
  if (shape_.own > 0) memory_.upload(own(page), bytes.data(), num_own);
  if (shape_.sharded > 0) memory_.upload(sharded(page), bytes.data() + num_own, bytes.size() - num_own);
}

void PagePool::download(int32_t page, std::span<uint8_t> bytes) const {
  const auto num_own = static_cast<size_t>(shape_.own);
  if (shape_.own > 0) memory_.download(bytes.data(), own(page), num_own);
  if (shape_.sharded > 0) memory_.download(bytes.data() + num_own, sharded(page), bytes.size() - num_own);
}

}  // namespace tessera::model
