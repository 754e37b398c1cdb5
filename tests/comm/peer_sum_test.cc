// SPDX-License-Identifier: Apache-2.0
// The kernels that sum over ranks through peer memory, all ranks on one GPU: there kernels run one after another and
// can't wait for each other, so every rank does a part of a sum before any does the next.
#include "comm/cuda/peer_sum.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "comm/rank_sum.h"
#include "device/buffer.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "numeric/bf16.h"
#include "testing/seed.h"

namespace tessera::comm {
namespace {

constexpr int64_t kCapacity = 20000;  // slots

std::string to_string(PeerWay way) {
  return way == PeerWay::kWhole ? "whole" : "shares";
}

// The ranks' memory, as each of them sees it.
class Group {
 public:
  Group(device::Executor& executor, int world, int64_t capacity = kCapacity) : memory_(executor.memory()) {
    ended_ = device::Buffer(sizeof(uint32_t), executor.staging());
    const std::vector<uint8_t> empty(static_cast<size_t>(peer_slot_bytes(world, capacity)), 0xFF);
    for (int r = 0; r < world; ++r) {
      slots_.emplace_back(empty.size(), memory_);
      memory_.upload(slots_.back().data(), empty.data(), empty.size());
      calls_.emplace_back(device::kPeerCounters * sizeof(uint32_t), memory_);
    }
    for (int r = 0; r < world; ++r) {
      device::PeerView& view = views_.emplace_back();
      view.rank = r, view.world = world, view.capacity = capacity;
      for (size_t p = 0; p < slots_.size(); ++p) view.slots[p] = slots_[p].as<uint64_t>();
      view.calls = calls_[static_cast<size_t>(r)].as<uint32_t>();
      view.ended = ended_.as<uint32_t>();
    }
  }
  const std::vector<device::PeerView>& views() const { return views_; }
  void end() { *ended_.as<uint32_t>() = 1; }

  // Whether nothing lies in any slot of a rank, and every rank has ended so many calls.
  void expect_free(uint32_t num_calls) const {
    for (size_t r = 0; r < slots_.size(); ++r) {
      std::vector<uint32_t> words(slots_[r].size() / sizeof(uint32_t)), calls(device::kPeerCounters);
      memory_.download(words.data(), slots_[r].data(), slots_[r].size());
      memory_.download(calls.data(), calls_[r].data(), calls_[r].size());
      const auto count = std::count(words.begin(), words.end(), device::kNoPeerWord);
      EXPECT_EQ(static_cast<size_t>(count), words.size()) << "rank " << r;
      EXPECT_EQ(calls, (std::vector<uint32_t>{num_calls, 0})) << "rank " << r;
    }
  }

 private:
  device::MemorySpace& memory_;
  device::Buffer ended_;
  std::vector<device::Buffer> slots_, calls_;
  std::vector<device::PeerView> views_;
};

// What summands are of. NaNs: now and then of the bits that say that nothing has come yet.
enum class Fill { kTails, kTiny, kNans };

class PeerSum : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      executor_ = device::make_executor(device::machine_of("cuda"), 1);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  device::MemorySpace& memory() { return executor_->memory(); }

  float random_value(Fill fill) {
    const auto value = static_cast<float>(rng_.normal());
    const uint64_t kind = rng_.below(10);
    if (fill == Fill::kTiny) return kind < 3 ? std::copysign(0.0f, value) : value * 1e-39f;
    return kind == 0 ? value * 1e6f : kind == 1 ? 0.0f : value;
  }
  std::vector<uint8_t> random_bytes(DType dtype, int64_t count, Fill fill) {
    std::vector<uint8_t> bytes(static_cast<size_t>(count * dtype_bits(dtype) / 8));
    for (int64_t i = 0; i < count; ++i) store_value(bytes.data(), dtype == DType::kBF16, i, random_value(fill));
    if (fill == Fill::kNans) {
      for (size_t word = 3; word * sizeof(device::kNoPeerWord) < bytes.size(); word += 64 + rng_.below(64)) {
        std::memcpy(bytes.data() + word * sizeof(device::kNoPeerWord), &device::kNoPeerWord,
                    sizeof(device::kNoPeerWord));
      }
    }
    return bytes;
  }

  // Sums of all ranks on the GPU, one in each way of `ways` over the same memory, against the host's; in place where
  // the types agree and `is_in_place`.
  void check_sum(const Group& group, std::vector<PeerWay> ways, DType in, DType out, int64_t count, bool is_in_place,
                 Fill fill = Fill::kTails) {
    const int world = static_cast<int>(group.views().size());
    std::vector<uint8_t> parts;
    std::vector<device::Tensor> summands, sums;
    for (int r = 0; r < world; ++r) {
      const std::vector<uint8_t> part = random_bytes(in, count, fill);
      parts.insert(parts.end(), part.begin(), part.end());
      summands.emplace_back(in, Shape{count}, memory());
      if (!is_in_place) sums.emplace_back(out, Shape{count}, memory());
    }
    std::vector<uint8_t> expected(static_cast<size_t>(count * dtype_bits(out) / 8));
    device::Queue host(1);
    sum_ranks(parts.data(), in, world, count, expected.data(), out, count, host);
    const size_t part_bytes = parts.size() / summands.size();
    std::vector<uint8_t> first;  // rank 0's in the first way: the bits of all
    for (const PeerWay way : ways) {
      for (size_t r = 0; r < summands.size(); ++r) {
        memory().upload(summands[r].view().data, parts.data() + r * part_bytes, part_bytes);
      }
      for (const PeerPart part : {PeerPart::kSend, PeerPart::kAdd, PeerPart::kCollect}) {
        if (part == PeerPart::kAdd && way == PeerWay::kWhole) continue;
        for (size_t r = 0; r < summands.size(); ++r) {
          peer_sum_on_gpu(group.views()[r], way, summands[r].view().data, in == DType::kBF16,
                          (is_in_place ? summands : sums)[r].view().data, out == DType::kBF16, count,
                          executor_->queue(), part);
        }
      }
      for (size_t r = 0; r < summands.size(); ++r) {
        std::vector<uint8_t> found(expected.size());
        memory().download(found.data(), (is_in_place ? summands : sums)[r].view().data, found.size());
        const std::string what =
            fmt::format("rank {} of {}, {} values, {}, {}", r, world, count, to_string(way), is_in_place);
        if (first.empty()) first = found;
        ASSERT_TRUE(found == first) << what;
        if (fill != Fill::kNans) {
          ASSERT_TRUE(found == expected) << what;
        }
        for (int64_t i = 0; fill == Fill::kNans && i < count; ++i) {
          const bool is_bf16 = out == DType::kBF16;
          const float value = load_value(found.data(), is_bf16, i), wanted = load_value(expected.data(), is_bf16, i);
          ASSERT_TRUE(std::isnan(wanted) ? std::isnan(value) : value == wanted) << what << ", " << i;
        }
      }
    }
  }
  // Every pair of types; the number of sums.
  uint32_t check_types(const Group& group, std::vector<PeerWay> ways, int64_t count, Fill fill = Fill::kTails) {
    check_sum(group, ways, DType::kF32, DType::kBF16, count, false, fill);
    check_sum(group, ways, DType::kF32, DType::kF32, count, true, fill);
    check_sum(group, ways, DType::kBF16, DType::kBF16, count, true, fill);
    check_sum(group, ways, DType::kBF16, DType::kF32, count, false, fill);
    return 4 * static_cast<uint32_t>(ways.size());
  }

  const uint64_t seed_ = fresh_seed();
  Rng rng_{seed_};
  std::unique_ptr<device::Executor> executor_;
};

// One value of two, every type, several blocks; calls of different sizes, of which some have blocks that others have
// not.
TEST_F(PeerSum, HasTheHostsBitsCallAfterCall) {
  SCOPED_TRACE(seed_);
  for (const int world : {1, 2, 3, device::kMaxPeers}) {
    const Group group(*executor_, world);
    uint32_t num_calls = 0;
    for (const int64_t count : {2, 258, 600, 62, 40000, 512, 4096}) {
      if (world > 2 && count > 600) continue;  // an emulated GPU is slow
      num_calls += check_types(group, {PeerWay::kWhole}, count);
    }
    group.expect_free(num_calls);
  }
}

// One word to several blocks: shares of other lengths than the others', and none at all; values in all types.
TEST_F(PeerSum, SharesHaveTheSameBits) {
  SCOPED_TRACE(seed_);
  for (const int world : {1, 2, 3, 5, device::kMaxPeers}) {
    const Group group(*executor_, world);
    uint32_t num_calls = 0;
    for (const int64_t count : {2, 62, 66, 258, 64 * world - 2, 64 * world + 2, 600 * world, 1102 * world}) {
      num_calls += check_types(group, {PeerWay::kShares}, count);
      if (count < 300) num_calls += check_types(group, {PeerWay::kShares}, count, Fill::kTiny);
    }
    group.expect_free(num_calls);
  }
}

// Calls of both ways by turns over the same memory: a half has words of the one where it had those of the other.
TEST_F(PeerSum, WaysTakeTurns) {
  SCOPED_TRACE(seed_);
  constexpr PeerWay kWhole = PeerWay::kWhole, kShares = PeerWay::kShares;
  for (const int world : {2, 3, 5, device::kMaxPeers}) {
    const Group group(*executor_, world);
    uint32_t num_calls = 0;
    for (int round = 0; round < 12; ++round) {
      const auto count = 2 * static_cast<int64_t>(1 + rng_.below(1000));
      std::vector<PeerWay> ways;
      for (uint64_t n = 1 + rng_.below(3); n > 0; --n) ways.push_back(rng_.below(2) == 0 ? kWhole : kShares);
      num_calls += check_types(group, ways, count, static_cast<Fill>(rng_.below(3)));
    }
    group.expect_free(num_calls);
  }
}

// Nobody waits for a summand that has come, nor for what it gives; all ranks have the same NaN, in both ways.
TEST_F(PeerSum, NansOfAllBitsAreSummedToo) {
  SCOPED_TRACE(seed_);
  for (const int world : {1, 2, 3, 5, device::kMaxPeers}) {
    const Group group(*executor_, world);
    uint32_t num_calls = 0;
    for (int round = 0; round < 3; ++round) {
      num_calls += check_types(group, {PeerWay::kWhole, PeerWay::kShares}, 1000, Fill::kNans);
    }
    group.expect_free(num_calls);
  }
}

// An odd number of words leaves the second half of a slot empty.
TEST_F(PeerSum, OddNumbersOfWordsAreSummed) {
  SCOPED_TRACE(seed_);
  const std::vector<PeerWay> ways = {PeerWay::kWhole, PeerWay::kShares};
  for (const int world : {2, 3}) {
    const Group group(*executor_, world);
    for (const int64_t count : {1, 31, 33, 63, 65, 20001}) {
      if (world > 2 && count > 65) continue;
      check_sum(group, ways, DType::kF32, DType::kF32, count, true);
      check_sum(group, ways, DType::kF32, DType::kBF16, count, false);
      check_sum(group, ways, DType::kBF16, DType::kF32, 2 * count, false);
    }
  }
}

// More slots than all blocks of most threads have threads.
TEST_F(PeerSum, ThreadsHaveSeveralSlots) {
  SCOPED_TRACE(seed_);
  constexpr int64_t kThreads = 128 * 1024, kMore = 700;
  const Group group(*executor_, 2, 2 * (kThreads + kMore));
  check_sum(group, {PeerWay::kWhole}, DType::kF32, DType::kBF16, 2 * (kThreads + kMore), false);
  check_sum(group, {PeerWay::kShares}, DType::kF32, DType::kBF16, 4 * (kThreads + kMore), false);
  group.expect_free(2);
}

// Who waits for a rank that never comes goes when the group has ended.
TEST_F(PeerSum, NobodyWaitsOnceTheGroupHasEnded) {
  for (const PeerWay way : {PeerWay::kWhole, PeerWay::kShares}) {
    Group group(*executor_, 2);
    group.end();
    const device::Tensor values(DType::kF32, {300}, memory());
    peer_sum_on_gpu(group.views()[0], way, values.view().data, false, values.view().data, false, 300,
                    executor_->queue());
    executor_->synchronize();
  }
}

}  // namespace
}  // namespace tessera::comm
