// SPDX-License-Identifier: Apache-2.0
// Pages: distinct, shared and given back as owners say, and refused where memory ends.
#include "model/page_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <new>
#include <set>

#include "base/error.h"
#include "base/rng.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "testing/seed.h"

namespace tessera::model {
namespace {

// Host memory of a limited size.
class LimitedMemory final : public device::MemorySpace {
 public:
  void* allocate(size_t bytes) override {
    if (used_ + bytes > limit) throw std::bad_alloc();
    void* data = device::host_memory().allocate(bytes);
    used_ += bytes;
    return data;
  }
  void release(void* data, size_t bytes) noexcept override {
    device::host_memory().release(data, bytes);
    used_ -= bytes;
  }
  void upload(void* to, const void* from, size_t bytes) override { device::host_memory().upload(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { device::host_memory().download(to, from, bytes); }
  void queue_download(void* to, const void* from, size_t bytes) override { download(to, from, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { device::host_memory().copy(to, from, bytes); }
  bool is_host() const override { return true; }
  size_t used() const { return used_; }

  size_t limit = std::numeric_limits<size_t>::max();

 private:
  size_t used_ = 0;
};

TEST(PagePool, PagesAreDistinctWhileTheyHaveOwners) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  const int64_t page_bytes = 16 * (1 + static_cast<int64_t>(rng.below(40000)));
  const int64_t slab = PagePool::pages_per_slab(page_bytes);
  LimitedMemory memory;
  {
    PagePool pool({.own = page_bytes}, memory);
    std::map<int32_t, int> owners;
    std::map<int32_t, uint8_t> marks;
    for (int step = 0; step < 3000; ++step) {
      const bool is_filling = step / 500 % 2 == 0;
      if (owners.empty() || rng.below(100) < (is_filling ? 60 : 30)) {
        pool.reserve(1);
        const int32_t page = pool.take();
        ASSERT_EQ(owners.count(page), 0u) << "somebody has it";
        owners[page] = 1;
        marks[page] = static_cast<uint8_t>(rng.below(256));
        std::fill_n(pool.own(page), page_bytes, marks[page]);
      } else {
        auto found = owners.begin();
        std::advance(found, static_cast<int64_t>(rng.below(owners.size())));
        const auto [page, count] = *found;
        ASSERT_EQ(pool.own(page)[0], marks[page]);
        ASSERT_EQ(pool.own(page)[page_bytes - 1], marks[page]);
        ASSERT_EQ(pool.is_shared(page), count > 1);
        if (rng.below(4) == 0) {
          pool.share(page), ++found->second;
        } else {
          pool.release(page);
          if (--found->second == 0) owners.erase(found);
        }
      }
      ASSERT_EQ(pool.num_used(), static_cast<int64_t>(owners.size()));
      ASSERT_GE(static_cast<int64_t>(memory.used()), (pool.num_used() + pool.num_free()) * page_bytes);
      ASSERT_EQ(pool.num_used() + pool.num_free(), (pool.num_used() + pool.num_free()) / slab * slab);
    }
    for (const auto& [page, count] : owners) {
      for (int i = 0; i < count; ++i) pool.release(page);
    }
    EXPECT_EQ(pool.num_used(), 0);
    EXPECT_LE(pool.num_free(), slab) << "the rest went back";
  }
  EXPECT_EQ(memory.used(), 0u);
}

TEST(PagePool, WhereMemoryEndsNothingChanges) {
  LimitedMemory memory;
  constexpr int64_t kPageBytes = 1 << 20;
  const int64_t slab = PagePool::pages_per_slab(kPageBytes);
  memory.limit = static_cast<size_t>(4 * slab * kPageBytes);
  PagePool pool({.own = kPageBytes}, memory);
  pool.reserve(1);
  const int32_t page = pool.take();
  const size_t used = memory.used();
  try {
    pool.reserve(4 * slab);
    ADD_FAILURE() << "one more than there is room for";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted) << error.what();
  }
  EXPECT_EQ(pool.num_used(), 1);
  EXPECT_LE(memory.used(), used + static_cast<size_t>(slab * kPageBytes))
      << "of what was got on the way, one slab stays";
  pool.reserve(4 * slab - 1);
  for (int64_t i = 1; i < 4 * slab; ++i) EXPECT_NE(pool.take(), page);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THROW(pool.reserve(1), Error);
}

// Of sharded parts there is one copy, whoever writes it; own parts are each rank's.
TEST(PagePool, ShardedPartsLieOnTheRanksInTurn) {
  constexpr PageShape kShape{.own = 48, .sharded = int64_t{16} << 20};  // eight of a rank's in a slab
  constexpr int kWorld = 3, kPages = 9 * kWorld;
  auto ranks = comm::make_loopback(kWorld, 60);
  std::vector<std::vector<int32_t>> taken(kWorld);
  EXPECT_THAT(tessera::testing::run_ranks(
                  ranks,
                  [&](comm::Communicator& comm, device::Queue& queue) {
                    PagePool pool(kShape, device::host_memory(), &comm, &queue);
                    EXPECT_FALSE(pool.can_reserve_alone(1));
                    pool.reserve(1);
                    EXPECT_EQ(pool.num_free(), 8 * kWorld);
                    EXPECT_TRUE(pool.can_reserve_alone(8 * kWorld));
                    EXPECT_FALSE(pool.can_reserve_alone(8 * kWorld + 1));
                    pool.reserve(kPages);
                    std::vector<int32_t>& pages = taken[static_cast<size_t>(comm.rank())];
                    for (int i = 0; i < kPages; ++i) pages.push_back(pool.take());
                    // Every rank marks the pages that it holds by its turn, at both ends, and its own parts of all.
                    const auto last = [&](int32_t page) { return pool.sharded(page) + kShape.sharded - 1; };
                    for (int i = 0; i < kPages; ++i) {
                      *pool.own(pages[i]) = static_cast<uint8_t>(100 * comm.rank() + i);
                      if (i % kWorld != comm.rank()) continue;
                      *pool.sharded(pages[i]) = *last(pages[i]) = static_cast<uint8_t>(i + 1);
                    }
                    comm.barrier(queue);
                    std::set<const uint8_t*> places;
                    for (int i = 0; i < kPages; ++i) {
                      EXPECT_EQ(*pool.sharded(pages[i]), i + 1) << "page " << i;
                      EXPECT_EQ(*last(pages[i]), i + 1) << "page " << i;
                      EXPECT_EQ(*pool.own(pages[i]), static_cast<uint8_t>(100 * comm.rank() + i));
                      EXPECT_TRUE(places.insert(pool.sharded(pages[i])).second) << "two pages in one place";
                    }
                    comm.barrier(queue);
                    // Every rank copies: the same bytes.
                    pool.copy(pages[0], pages[4]);
                    comm.barrier(queue);
                    EXPECT_EQ(*last(pages[0]), 5);
                    EXPECT_EQ(*pool.own(pages[0]), static_cast<uint8_t>(100 * comm.rank() + 4));
                    std::vector<uint8_t> bytes(static_cast<size_t>(kShape.bytes()));
                    pool.download(pages[1], bytes);
                    EXPECT_EQ(bytes.front(), static_cast<uint8_t>(100 * comm.rank() + 1));
                    EXPECT_EQ(bytes[static_cast<size_t>(kShape.own)], 2);
                    EXPECT_EQ(bytes.back(), 2);
                    comm.barrier(queue);
                    pool.upload(pages[2], bytes);
                    EXPECT_EQ(*last(pages[2]), 2);
                    for (const int32_t page : pages) pool.release(page);
                    EXPECT_EQ(pool.num_free(), 16 * kWorld) << "others may still read what a rank would give back";
                    comm.barrier(queue);
                  }),
              ::testing::Each(""));
  EXPECT_EQ(taken[1], taken[0]);
  EXPECT_EQ(taken[2], taken[0]);
}

// Pages of other numbers would be other places: seen when the pool grows.
TEST(PagePool, RanksWhosePagesPartSaySo) {
  auto ranks = comm::make_loopback(2, 60);
  const auto errors = tessera::testing::run_ranks(ranks, [](comm::Communicator& comm, device::Queue& queue) {
    PagePool pool({.own = 16, .sharded = int64_t{128} << 20}, device::host_memory(), &comm, &queue);
    pool.reserve(2);
    const int32_t first = pool.take(), second = pool.take();
    pool.release(comm.rank() == 0 ? first : second);
    pool.reserve(2);
  });
  EXPECT_THAT(errors, ::testing::Each(::testing::HasSubstr("ranks share memory of")));
}

}  // namespace
}  // namespace tessera::model
