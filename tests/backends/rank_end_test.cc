// SPDX-License-Identifier: Apache-2.0
// The end of a layer whose experts are cut by width: what they gave is sent to the other ranks and added to what these
// sent, and the streams are written, in one kernel. Here one rank runs, and finds what the others would have sent.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "backends/one_of_ranks.h"
#include "ops/mhc_post_pre/mhc_post_pre.h"

namespace tessera {
namespace {

using testing::Bytes;

class RankEnd : public testing::OneOfRanks {
 protected:
  void check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden);
};

void RankEnd::check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden) {
  constexpr int64_t kTopK = 3;
  ops::MhcPostPre::Desc desc{.mhc = {.hidden = hidden},
                             .combine = ops::MoeCombine::Desc{.hidden = hidden, .top_k = kTopK},
                             .has_post = true,
                             .norm = {},
                             .sums_ranks = true};
  device::MemorySpace& memory = executor_->memory();
  testing::PeerSlots slots(*executor_, world, *std::max_element(token_counts.begin(), token_counts.end()) * hidden / 4);
  const ops::Variant<ops::MhcPostPre>* variant = variant_of(desc);
  ASSERT_NE(variant, nullptr);

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

    const size_t part_bytes = bytes_of(sum.view()).size();
    for (int r = 0; r < world; ++r) {
      if (r != rank) slots.send(rank, r, call, bytes_of(parts[static_cast<size_t>(r)].view()));
    }
    const auto me = static_cast<size_t>(rank);
    const device::Tensor own_routed = placed(routed[me]), own_shared = placed(shared[me]), streams = placed(x),
                         own_post = placed(post), own_comb = placed(comb), o(DType::kBF16, {n, hidden}, memory);
    variant->run(desc,
                 {.combine = {.routed = own_routed.view(), .shared = own_shared.view(), .out = o.view()},
                  .post = {.x = streams.view(),
                           .o = o.view(),
                           .post = own_post.as<float>(),
                           .comb = own_comb.as<float>(),
                           .out = streams.view()},
                  .pre = {},
                  .weight = {},
                  .peers = &slots.view(rank),
                  .num_tokens = n},
                 executor_->queue());
    executor_->synchronize();
    EXPECT_TRUE(download(streams) == bytes_of(expected.view()));
    for (int r = 0; r < world; ++r) {
      if (r == rank) continue;
      EXPECT_TRUE(slots.sent(r, rank, call, part_bytes) == bytes_of(parts[me].view())) << "what is sent to " << r;
      slots.free(r, rank, call, part_bytes);
    }
    EXPECT_TRUE(slots.is_free(rank));
    EXPECT_EQ(slots.calls(rank), (std::vector<uint32_t>{static_cast<uint32_t>(call) + 1, 0}));
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
