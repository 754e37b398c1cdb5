// SPDX-License-Identifier: Apache-2.0
// The end of a layer whose experts are cut by width: what they gave is sent to the other ranks and added to what these
// sent, and the streams are written, in one kernel. Here one rank runs, and finds what the others would have sent.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "device/buffer.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "numeric/bf16.h"
#include "ops/mhc_post_pre/mhc_post_pre.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;

class RankEnd : public testing::RandomTest {
 protected:
  void SetUp() override {
    try {
      executor_ = device::make_executor(device::machine_of("cuda"), 1);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  device::Tensor random(DType dtype, const Shape& shape) {
    device::Tensor tensor(dtype, shape);
    for (int64_t i = 0; i < shape.num_elements(); ++i) {
      const auto value = static_cast<float>(rng_.normal());
      if (dtype == DType::kF32) {
        tensor.as<float>()[i] = value;
      } else {
        tensor.as<uint16_t>()[i] = numeric::bf16_from_float(value);
      }
    }
    return tensor;
  }
  device::Tensor placed(const device::Tensor& host) { return host.clone_into(executor_->memory()); }
  static Bytes bytes_of(const TensorView& view) {
    Bytes bytes(static_cast<size_t>(view.num_bytes()));
    std::memcpy(bytes.data(), view.data, bytes.size());
    return bytes;
  }
  Bytes download(const void* data, size_t size) {
    Bytes bytes(size);
    executor_->memory().download(bytes.data(), data, size);
    return bytes;
  }
  void check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden);

  std::unique_ptr<device::Executor> executor_;
  device::Queue host_{2};
};

void RankEnd::check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden) {
  constexpr int64_t kTopK = 3;
  ops::MhcPostPre::Desc desc{.mhc = {.hidden = hidden},
                             .combine = ops::MoeCombine::Desc{.hidden = hidden, .top_k = kTopK},
                             .has_post = true,
                             .norm = {},
                             .sums_ranks = true};
  device::MemorySpace& memory = executor_->memory();
  const int64_t capacity = *std::max_element(token_counts.begin(), token_counts.end()) * hidden / 4;
  const Bytes no_words(static_cast<size_t>(2 * world * capacity) * sizeof(uint64_t), 0xFF);
  std::vector<device::Buffer> slots;
  device::PeerView view;
  view.rank = rank, view.world = world, view.capacity = capacity;
  for (int r = 0; r < world; ++r) {
    slots.emplace_back(no_words.size(), memory);
    memory.upload(slots.back().data(), no_words.data(), no_words.size());
    view.slots[r] = slots.back().as<uint64_t>();
  }
  device::Buffer calls(device::kPeerCounters * sizeof(uint32_t), memory);
  const std::vector<uint32_t> none(device::kPeerCounters);
  memory.upload(calls.data(), none.data(), calls.size());
  const device::Buffer ended(sizeof(uint32_t), executor_->staging());
  *ended.as<uint32_t>() = 0;
  view.calls = calls.as<uint32_t>(), view.ended = ended.as<uint32_t>();

  for (size_t call = 0; call < token_counts.size(); ++call) {
    const int64_t n = token_counts[call];
    SCOPED_TRACE(::testing::Message() << "rank " << rank << " of " << world << ", " << n << " tokens");
    std::vector<device::Tensor> routed, shared, parts;
    for (int r = 0; r < world; ++r) {
      routed.push_back(random(DType::kBF16, {n, kTopK, hidden}));
      shared.push_back(random(DType::kBF16, {n, hidden}));
      parts.emplace_back(DType::kBF16, Shape{n, hidden});
      ops::moe_combine_reference(
          *desc.combine,
          {.routed = routed.back().view(), .shared = shared.back().view(), .out = parts.back().view(), .num_tokens = n},
          host_);
    }
    const device::Tensor sum(DType::kBF16, {n, hidden});
    for (int64_t i = 0; i < n * hidden; ++i) {
      float value = 0;
      for (int r = 0; r < world; ++r) {
        const float part = numeric::bf16_to_float(parts[static_cast<size_t>(r)].as<uint16_t>()[i]);
        value = r == 0 ? part : value + part;
      }
      sum.as<uint16_t>()[i] = numeric::bf16_from_float(value);
    }
    const device::Tensor x = random(DType::kBF16, {n, ops::kHcStreams, hidden});
    const device::Tensor post = random(DType::kF32, {n, ops::kHcStreams});
    const device::Tensor comb = random(DType::kF32, {n, ops::kHcStreams, ops::kHcStreams});
    const device::Tensor expected(DType::kBF16, {n, ops::kHcStreams, hidden});
    ops::mhc_post_reference(desc.mhc,
                            {.x = x.view(),
                             .o = sum.view(),
                             .post = post.as<float>(),
                             .comb = comb.as<float>(),
                             .out = expected.view(),
                             .num_tokens = n},
                            host_);

    const size_t half = (call % 2) * static_cast<size_t>(world * capacity), part_bytes = bytes_of(sum.view()).size();
    const auto sent = [&](int receiver, int sender) {
      return slots[static_cast<size_t>(receiver)].as<uint64_t>() + half + static_cast<size_t>(sender * capacity);
    };
    for (int r = 0; r < world; ++r) {
      if (r != rank) memory.upload(sent(rank, r), parts[static_cast<size_t>(r)].view().data, part_bytes);
    }
    const auto me = static_cast<size_t>(rank);
    const device::Tensor own_routed = placed(routed[me]), own_shared = placed(shared[me]), streams = placed(x),
                         own_post = placed(post), own_comb = placed(comb), o(DType::kBF16, {n, hidden}, memory);
    bool has_run = false;
    for (const ops::Backend* backend : backends::all_backends()) {
      for (const ops::Variant<ops::MhcPostPre>& variant : backend->variants_of<ops::MhcPostPre>()) {
        std::string why_not;
        if (!backend->is_on_gpu || has_run || !variant.supports(desc, why_not)) continue;
        variant.run(desc,
                    {.combine = {.routed = own_routed.view(), .shared = own_shared.view(), .out = o.view()},
                     .post = {.x = streams.view(),
                              .o = o.view(),
                              .post = own_post.as<float>(),
                              .comb = own_comb.as<float>(),
                              .out = streams.view()},
                     .pre = {},
                     .weight = {},
                     .peers = &view,
                     .num_tokens = n},
                    executor_->queue());
        has_run = true;
      }
    }
    ASSERT_TRUE(has_run);
    executor_->synchronize();
    EXPECT_TRUE(download(streams.view().data, static_cast<size_t>(streams.view().num_bytes())) ==
                bytes_of(expected.view()));
    for (int r = 0; r < world; ++r) {
      if (r == rank) continue;
      EXPECT_TRUE(download(sent(r, rank), part_bytes) == bytes_of(parts[me].view())) << "what is sent to " << r;
      EXPECT_TRUE(download(sent(rank, r), part_bytes) == Bytes(part_bytes, 0xFF)) << "slots of " << r << " are free";
      memory.upload(sent(r, rank), no_words.data(), part_bytes);  // as that rank would
    }
  }
}

TEST_F(RankEnd, IsTheSumOfAllRanksBeforeTheStreamsAreWritten) {
  check(1, 0, {2}, 512);
  check(2, 0, {1, 5, 3, 1}, 512);
  check(2, 1, {4, 1, 2}, 512);
  check(3, 1, {2, 3}, 512);
  if (testing::kGpuIsEmulated) return;
  check(2, 1, {300, 1, 301}, 1024);  // more slots than threads
  check(device::kMaxPeers, 5, {128, 64}, 4096);
}

}  // namespace
}  // namespace tessera
