// SPDX-License-Identifier: Apache-2.0
// The kernel that sums over ranks through peer memory, all ranks on one GPU: there kernels run one after another and
// can't wait for each other, so every rank sends before any collects.
#include "comm/cuda/peer_sum.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

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

constexpr int64_t kMostWords = 40000, kCapacity = 20000;  // slots: more than one round of the kernel's threads

// The ranks' memory, as each of them sees it.
class Group {
 public:
  Group(device::Executor& executor, int world) {
    device::MemorySpace& memory = executor.memory();
    ended_ = device::Buffer(sizeof(uint32_t), executor.staging());
    for (int r = 0; r < world; ++r) {
      const std::vector<uint8_t> empty(static_cast<size_t>(peer_slot_bytes(world, kCapacity)), 0xFF);
      slots_.emplace_back(empty.size(), memory);
      memory.upload(slots_.back().data(), empty.data(), empty.size());
      calls_.emplace_back(device::kPeerCounters * sizeof(uint32_t), memory);
    }
    for (int r = 0; r < world; ++r) {
      device::PeerView& view = views_.emplace_back();
      view.rank = r, view.world = world, view.capacity = kCapacity;
      for (size_t p = 0; p < slots_.size(); ++p) view.slots[p] = slots_[p].as<uint64_t>();
      view.calls = calls_[static_cast<size_t>(r)].as<uint32_t>();
      view.ended = ended_.as<uint32_t>();
    }
  }
  const std::vector<device::PeerView>& views() const { return views_; }
  void end() { *ended_.as<uint32_t>() = 1; }

 private:
  device::Buffer ended_;
  std::vector<device::Buffer> slots_, calls_;
  std::vector<device::PeerView> views_;
};

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

  // Bytes of `count` random values; now and then a NaN of the bits that say that nothing has come yet.
  std::vector<uint8_t> random_bytes(DType dtype, int64_t count, bool has_nans) {
    std::vector<uint8_t> bytes(static_cast<size_t>(count * dtype_bits(dtype) / 8));
    for (int64_t i = 0; i < count; ++i) {
      store_value(bytes.data(), dtype == DType::kBF16, i, static_cast<float>(rng_.normal()));
    }
    if (has_nans) {
      for (size_t word = 3; word * sizeof(device::kNoPeerWord) < bytes.size(); word += 64 + rng_.below(64)) {
        std::memcpy(bytes.data() + word * sizeof(device::kNoPeerWord), &device::kNoPeerWord,
                    sizeof(device::kNoPeerWord));
      }
    }
    return bytes;
  }

  // A sum of all ranks on the GPU, against the host's; in place where the types agree and `is_in_place`.
  void check_sum(const Group& group, DType in, DType out, int64_t count, bool is_in_place, bool has_nans = false) {
    const int world = static_cast<int>(group.views().size());
    std::vector<uint8_t> parts;
    std::vector<device::Tensor> summands, sums;
    for (int r = 0; r < world; ++r) {
      const std::vector<uint8_t> part = random_bytes(in, count, has_nans);
      parts.insert(parts.end(), part.begin(), part.end());
      summands.emplace_back(in, Shape{count}, memory());
      memory().upload(summands.back().view().data, part.data(), part.size());
      if (!is_in_place) sums.emplace_back(out, Shape{count}, memory());
    }
    const std::vector<device::Tensor>& results = is_in_place ? summands : sums;
    for (const PeerPart part : {PeerPart::kSend, PeerPart::kCollect}) {
      for (size_t r = 0; r < summands.size(); ++r) {
        peer_sum_on_gpu(group.views()[r], summands[r].view().data, in == DType::kBF16, results[r].view().data,
                        out == DType::kBF16, count, executor_->queue(), part);
      }
    }
    std::vector<uint8_t> expected(static_cast<size_t>(count * dtype_bits(out) / 8));
    device::Queue host(1);
    sum_ranks(parts.data(), in, world, count, expected.data(), out, count, host);
    for (size_t r = 0; r < results.size(); ++r) {
      std::vector<uint8_t> found(expected.size());
      memory().download(found.data(), results[r].view().data, found.size());
      const std::string what = fmt::format("rank {} of {}, {} values", r, world, count);
      if (!has_nans) ASSERT_TRUE(found == expected) << what;
      for (int64_t i = 0; has_nans && i < count; ++i) {
        const bool is_bf16 = out == DType::kBF16;
        const float value = load_value(found.data(), is_bf16, i), wanted = load_value(expected.data(), is_bf16, i);
        ASSERT_TRUE(std::isnan(wanted) ? std::isnan(value) : value == wanted) << what << ", " << i;
      }
    }
  }

  const uint64_t seed_ = fresh_seed();
  Rng rng_{seed_};
  std::unique_ptr<device::Executor> executor_;
};

// One value of two, every type, several rounds of a block's threads; calls of different sizes, of which some have
// blocks that others have not.
TEST_F(PeerSum, HasTheHostsBitsCallAfterCall) {
  SCOPED_TRACE(seed_);
  for (const int world : {1, 2, 3, device::kMaxPeers}) {
    const Group group(*executor_, world);
    for (const int64_t count :
         {int64_t{2}, int64_t{258}, int64_t{600}, int64_t{62}, kMostWords, int64_t{512}, int64_t{4096}}) {
      if (world > 2 && count > 600) continue;  // an emulated GPU is slow
      check_sum(group, DType::kF32, DType::kBF16, count, false);
      check_sum(group, DType::kF32, DType::kF32, count, true);
      check_sum(group, DType::kBF16, DType::kBF16, count, true);
      check_sum(group, DType::kBF16, DType::kF32, count, false);
    }
  }
}

// Nobody waits for a summand that has come.
TEST_F(PeerSum, NansOfAllBitsAreSummedToo) {
  SCOPED_TRACE(seed_);
  for (const int world : {1, 2, 3}) {
    const Group group(*executor_, world);
    for (const DType in : {DType::kF32, DType::kBF16}) {
      for (int call = 0; call < 3; ++call) check_sum(group, in, DType::kF32, 1000, false, true);
    }
  }
}

// An odd number of words leaves the second half of a slot empty.
TEST_F(PeerSum, OddNumbersOfWordsAreSummed) {
  SCOPED_TRACE(seed_);
  const Group group(*executor_, 2);
  for (const int64_t count : {int64_t{1}, int64_t{31}, int64_t{33}, int64_t{63}, int64_t{65}, int64_t{20001}}) {
    check_sum(group, DType::kF32, DType::kF32, count, true);
    check_sum(group, DType::kF32, DType::kBF16, count, false);
    check_sum(group, DType::kBF16, DType::kF32, 2 * count, false);
  }
}

// Who waits for a rank that never comes goes when the group has ended.
TEST_F(PeerSum, NobodyWaitsOnceTheGroupHasEnded) {
  Group group(*executor_, 2);
  group.end();
  const device::Tensor values(DType::kF32, {300}, memory());
  peer_sum_on_gpu(group.views()[0], values.view().data, false, values.view().data, false, 300, executor_->queue());
  executor_->synchronize();
}

}  // namespace
}  // namespace tessera::comm
