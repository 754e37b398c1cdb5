// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/test_seams.h"
#include "device/buffer.h"
#include "device/machine.h"
#include "device/queue.h"

namespace tessera::device {
namespace {

TEST(Queue, CoversEveryItemOnce) {
  for (const int threads : {1, 2, 5}) {
    Queue queue(threads);
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
      queue.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

TEST(Queue, ThrowsWhatAPartThrew) {
  Queue queue(2);
  EXPECT_THROW(queue.parallel_for(10, 1,
                                  [](int64_t, int64_t end) {
                                    if (end == 10) throw std::runtime_error("x");
                                  }),
               std::runtime_error);
  int64_t sum = 0;
  queue.parallel_for(3, 100, [&](int64_t begin, int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 3) << "usable afterwards; small work stays on this thread";
}

// Many short loops back to back, with work of unequal length: each part once, in its own loop.
TEST(Queue, LoopsNeverMix) {
  for (const int threads : {2, 3, 8}) {
    Queue queue(threads);
    std::vector<int64_t> last(257);
    for (int64_t loop = 1; loop <= 3000; ++loop) {
      const int64_t count = 1 + loop * 31 % 257;
      queue.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) last[static_cast<size_t>(i)] += loop;
        if (begin == 0 && loop % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      });
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(last[static_cast<size_t>(i)], loop) << threads << " threads, item " << i;
        last[static_cast<size_t>(i)] = 0;
      }
    }
  }
}

TEST(Buffer, IsAlignedAndZero) {
  const Buffer buffer(1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kBufferAlignment, 0u);
  EXPECT_EQ(std::accumulate(buffer.as<uint8_t>(), buffer.as<uint8_t>() + 1000, 0), 0);
  EXPECT_EQ(Buffer(0).data(), nullptr);
  // Whole large pages, and a rest on small ones; again where the same memory is dirty.
  for (int i = 0; i < 3; ++i) {
    const Buffer large((size_t{5} << 20) + 3);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(large.data()) % kBufferAlignment, 0u);
    EXPECT_EQ(std::count(large.as<char>(), large.as<char>() + large.size(), 0), static_cast<int64_t>(large.size()));
    std::fill_n(large.as<char>(), large.size(), 'x');
  }
  EXPECT_THROW(Buffer(SIZE_MAX), std::bad_alloc);
#ifdef TESSERA_TEST_SEAMS
  seams::fail_allocation(1);
  EXPECT_THROW(Buffer(8), std::bad_alloc);
  seams::fail_allocation(0);
#endif
}

#if defined(__linux__)
// Pages of a block that exist.
int64_t num_present(const Buffer& buffer) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), count = buffer.size() / page;
  std::vector<unsigned char> present(count);
  EXPECT_EQ(mincore(buffer.data(), count * page, present.data()), 0);
  return std::count_if(present.begin(), present.end(), [](unsigned char bits) { return (bits & 1) != 0; });
}

// Weights are packed by all threads, which hence zero them too.
TEST(Buffer, LeavesLargeBlocksToTheirFirstWriters) {
  const Buffer buffer(size_t{64} << 20);
  EXPECT_EQ(num_present(buffer), 0);
  Queue queue(3);
  queue.parallel_for(static_cast<int64_t>(buffer.size()), 1 << 20, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (std::exchange(buffer.as<char>()[i], 'x') != 0) ADD_FAILURE() << "byte " << i;
    }
  });
  EXPECT_EQ(num_present(buffer), static_cast<int64_t>(buffer.size()) / sysconf(_SC_PAGESIZE));
}

// More large blocks than a process may have mappings, as the experts of a large model are.
TEST(Buffer, OutnumbersMappings) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer needs the mappings for itself";
#endif
  std::vector<Buffer> blocks;
  while (blocks.size() < 32800) blocks.emplace_back(size_t{2} << 20);
  for (int i = 0; i < 4; ++i) {
    Buffer& last = blocks.back();
    EXPECT_EQ(std::count(last.as<char>(), last.as<char>() + last.size(), 0), static_cast<int64_t>(last.size()));
    std::fill_n(last.as<char>(), last.size(), 'x');
    std::swap(last, blocks[static_cast<size_t>(i) * 1000]);
    blocks.pop_back();
  }
}

TEST(Buffer, FollowsThePolicyOfWhoMakesIt) {
  // A thread of its own, since policies are a thread's.
  bool is_allowed = false;
  std::thread([&] {
    const unsigned long node = 1;
    is_allowed = syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, &node, 64) == 0;
    if (!is_allowed) return;
    const Buffer buffer(size_t{8} << 20);
    std::thread([&] { std::fill_n(buffer.as<char>(), buffer.size(), 'x'); }).join();
    int mode = -1;
    ASSERT_EQ(syscall(SYS_get_mempolicy, &mode, nullptr, 0, buffer.as<char>() + (5 << 20), MPOL_F_ADDR), 0);
    EXPECT_EQ(mode, MPOL_INTERLEAVE);
  }).join();
  const Buffer buffer(size_t{8} << 20);
  int mode = -1;
  if (!is_allowed || syscall(SYS_get_mempolicy, &mode, nullptr, 0, buffer.data(), MPOL_F_ADDR) != 0) {
    GTEST_SKIP() << "the system lets nobody choose";
  }
  EXPECT_EQ(mode, MPOL_DEFAULT);
}
#endif

TEST(Arena, GivesBackAndNeverOverruns) {
  Arena arena(1024);
  const TensorView a = arena.take(DType::kF32, {10});
  const size_t mark = arena.mark();
  const TensorView b = arena.take(DType::kBF16, {100});
  EXPECT_NE(a.data, b.data);
  arena.reset_to(mark);
  EXPECT_EQ(arena.take(DType::kBF16, {100}).data, b.data);
  EXPECT_THROW(arena.take(DType::kF32, {1000}), Error);
}

TEST(Machine, IsProbed) {
  const Machine machine = probe_machine();
  EXPECT_GE(machine.num_cores, 1);
  EXPECT_GT(machine.memory_total_bytes, 0u);
  EXPECT_LE(machine.memory_available_bytes, machine.memory_total_bytes);
}

}  // namespace
}  // namespace tessera::device
