// SPDX-License-Identifier: Apache-2.0
// The end of a layer whose experts are cut by width: what they gave is sent to the other ranks and added to what these
// sent, and the streams are written, in one kernel; or, for the next layer, read as well, by two. Here one rank runs,
// and finds what the others would have sent.
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
  // reads: for the next layer.
  void check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden, bool reads);
};

// What is read.
struct Read {
  device::Tensor y, post, comb;
};

void RankEnd::check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden, bool reads) {
  constexpr int64_t kTopK = 3;
  ops::MhcPostPre::Desc desc{.mhc = {.hidden = hidden},
                             .combine = ops::MoeCombine::Desc{.hidden = hidden, .top_k = kTopK},
                             .has_post = true,
                             .norm = {},
                             .sums_ranks = true};
  const ops::MhcPostPre::Desc read_alone{.mhc = desc.mhc, .combine = {}, .norm = ops::RmsNorm::Desc{.width = hidden}};
  if (reads) desc.norm = read_alone.norm;
  device::MemorySpace& memory = executor_->memory();
  const int64_t most = *std::max_element(token_counts.begin(), token_counts.end());
  testing::PeerSlots slots(*executor_, world, most * hidden / 4);
  const ops::Variant<ops::MhcPostPre>* variant = variant_of(desc);
  ASSERT_NE(variant, nullptr);
  const device::Buffer workspace(static_cast<size_t>(variant->workspace_bytes(read_alone, most)), memory);
  const device::Tensor fn = placed(random(DType::kF32, {ops::kHcCoefficients, ops::kHcStreams * hidden})),
                       base = placed(random(DType::kF32, {ops::kHcCoefficients})),
                       scale = placed(random(DType::kF32, {3})), weight = placed(random(DType::kBF16, {hidden}));

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
                         own_post = placed(post), own_comb = placed(comb), o(DType::kBF16, {n, hidden}, memory),
                         others = poisoned(DType::kBF16, {n, ops::kHcStreams, hidden});
    const TensorView written = reads ? others.view() : streams.view();
    const auto take_read = [&] {
      return Read{poisoned(DType::kBF16, {n, hidden}), poisoned(DType::kF32, {n, ops::kHcStreams}),
                  poisoned(DType::kF32, {n, ops::kHcStreams, ops::kHcStreams})};
    };
    const auto read_args = [&](const TensorView& x, const Read& read) {
      return ops::MhcPre::Args{.x = x,
                               .fn = fn.as<float>(),
                               .base = base.as<float>(),
                               .scale = scale.as<float>(),
                               .y = read.y.view(),
                               .post = read.post.as<float>(),
                               .comb = read.comb.as<float>()};
    };
    const Read found = take_read(), wanted = take_read();
    variant->run(desc,
                 {.combine = {.routed = own_routed.view(), .shared = own_shared.view(), .out = o.view()},
                  .post = {.x = streams.view(),
                           .o = o.view(),
                           .post = own_post.as<float>(),
                           .comb = own_comb.as<float>(),
                           .out = written},
                  .pre = reads ? read_args(written, found) : ops::MhcPre::Args{},
                  .weight = reads ? weight.view() : TensorView{},
                  .peers = &slots.view(rank),
                  .num_tokens = n,
                  .workspace = workspace.data()},
                 executor_->queue());
    executor_->synchronize();
    EXPECT_TRUE(download(reads ? others : streams) == bytes_of(expected.view()));
    if (reads) {
      variant->run(read_alone,
                   {.combine = {},
                    .post = {},
                    .pre = read_args(placed(expected).view(), wanted),
                    .weight = weight.view(),
                    .num_tokens = n,
                    .workspace = workspace.data()},
                   executor_->queue());
      executor_->synchronize();
      EXPECT_TRUE(download(found.y) == download(wanted.y));
      EXPECT_TRUE(download(found.post) == download(wanted.post));
      EXPECT_TRUE(download(found.comb) == download(wanted.comb));
    }
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
  check(1, 0, {2}, 512, false);
  check(2, 0, {1, 5, 3, 1}, 512, false);
  check(2, 1, {4, 1, 2}, 512, false);
  check(3, 1, {2, 3}, 512, false);
  if (testing::kGpuIsEmulated) return;
  check(2, 1, {300, 1, 301}, 1024, false);  // more slots than threads
  check(device::kMaxPeers, 5, {128, 64}, 4096, false);
}

// Few tokens, whose blocks wait; more than have room for that; and as many as have products of their own.
TEST_F(RankEnd, IsReadForTheNextLayerWithTheBitsOfReadingItAlone) {
  check(1, 0, {2, 1}, 512, true);
  check(2, 0, {1, 5, 8, 1, 9}, 512, true);
  check(2, 1, {4, 69, 2}, 1400, true);
  check(3, 1, {2, 3}, 256, true);
  if (testing::kGpuIsEmulated) return;
  check(2, 1, {1, 8, 9, 32, 33, 64, 65, 301}, 4096, true);
  check(device::kMaxPeers, 5, {1, 7, 64}, 7168, true);
}

}  // namespace
}  // namespace tessera
