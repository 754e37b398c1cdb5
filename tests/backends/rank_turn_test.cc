// SPDX-License-Identifier: Apache-2.0
// The turn between the sublayers of a layer whose heads are cut: the sum over ranks of attention's output is part of
// the kernels that write and read the streams. Here one rank runs, and finds what the others would have sent; it must
// have the bits of the sum by itself (comm/cuda/peer_sum.h) and the turn behind it.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "backends/one_of_ranks.h"
#include "comm/cuda/peer_sum.h"
#include "comm/rank_sum.h"
#include "ops/mhc_post_pre/mhc_post_pre.h"

namespace tessera {
namespace {

using testing::Bytes;

// What a summand has here and there.
enum class Fill { kTails, kTiny, kOdd };

class RankTurn : public testing::OneOfRanks {
 protected:
  device::Tensor summand(int64_t n, int64_t hidden, Fill fill) {
    return filled(DType::kF32, {n, hidden}, [&] {
      const auto value = static_cast<float>(rng_.normal());
      const uint64_t kind = rng_.below(fill == Fill::kOdd ? 400 : 10);
      if (fill == Fill::kTiny) return kind < 3 ? std::copysign(0.0f, value) : value * 1e-39f;
      if (fill == Fill::kTails) return kind == 0 ? value * 1e6f : kind == 1 ? 0.0f : value;
      const uint32_t odd[] = {device::kNoPeerWord, 0x7FFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000};
      return kind < std::size(odd) ? __builtin_bit_cast(float, odd[kind]) : value;
    });
  }
  // As it travels: of 128 values those at 0 and 1, 4 and 5, ... and then those at 2 and 3, 6 and 7, ...
  static Bytes words_of(const device::Tensor& summand) {
    const int64_t count = summand.view().shape.num_elements();
    Bytes bytes(static_cast<size_t>(count) * sizeof(uint32_t));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = i / 128 * 64 + i % 4 / 2 * 32 + i % 128 / 4;
      const auto bits = __builtin_bit_cast(uint32_t, summand.as<float>()[i]);
      const uint32_t word = bits == device::kNoPeerWord ? 0x7FFFFFFF : bits;
      std::memcpy(bytes.data() + static_cast<size_t>(2 * slot + i % 2) * sizeof word, &word, sizeof word);
    }
    return bytes;
  }
  // Bit for bit, but for which NaN a sum of two NaNs is: a GPU has one, the CPU that emulates it keeps an operand's.
  void expect_same(const device::Tensor& found, const device::Tensor& expected) {
    EXPECT_TRUE(testing::same_bits_or_nan(floats_of(found), floats_of(expected)));
  }
  std::vector<float> floats_of(const device::Tensor& tensor) {
    const Bytes bytes = download(tensor);
    const bool is_bf16 = tensor.view().dtype == DType::kBF16;
    std::vector<float> values(static_cast<size_t>(tensor.view().shape.num_elements()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = comm::load_value(bytes.data(), is_bf16, static_cast<int64_t>(i));
    return values;
  }
  void check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden);
};

// What a turn leaves.
struct Outputs {
  device::Tensor streams, y, post, comb;
};

void RankTurn::check(int world, int rank, const std::vector<int64_t>& token_counts, int64_t hidden) {
  const ops::MhcPostPre::Desc alone{
      .mhc = {.hidden = hidden}, .combine = {}, .has_post = true, .norm = ops::RmsNorm::Desc{.width = hidden}};
  ops::MhcPostPre::Desc of_ranks = alone;
  of_ranks.sums_ranks = true;
  const ops::Variant<ops::MhcPostPre>* variant = variant_of(of_ranks);
  ASSERT_NE(variant, nullptr);
  device::MemorySpace& memory = executor_->memory();
  const int64_t most = *std::max_element(token_counts.begin(), token_counts.end()), capacity = most * hidden / 2;
  testing::PeerSlots slots(*executor_, world, capacity);
  const device::Buffer workspace(static_cast<size_t>(variant->workspace_bytes(of_ranks, most)), memory);
  const device::Tensor fn = placed(random(DType::kF32, {ops::kHcCoefficients, ops::kHcStreams * hidden})),
                       base = placed(random(DType::kF32, {ops::kHcCoefficients})),
                       scale = placed(random(DType::kF32, {3})), weight = placed(random(DType::kBF16, {hidden}));

  for (size_t call = 0; call < token_counts.size(); ++call) {
    const int64_t n = token_counts[call];
    const auto fill = static_cast<Fill>(call % 3);
    SCOPED_TRACE(::testing::Message() << "rank " << rank << " of " << world << ", " << n << " tokens of " << hidden);
    std::vector<device::Tensor> hosts, parts;
    for (int r = 0; r < world; ++r) {
      hosts.push_back(summand(n, hidden, fill));
      parts.push_back(placed(hosts.back()));
    }
    const device::Tensor x = placed(random(DType::kBF16, {n, ops::kHcStreams, hidden})),
                         post = placed(random(DType::kF32, {n, ops::kHcStreams})),
                         comb = placed(random(DType::kF32, {n, ops::kHcStreams, ops::kHcStreams}));
    const auto turn = [&](const ops::MhcPostPre::Desc& desc, const TensorView& o, const device::PeerView* peers,
                          int64_t tokens_of_parts = 0) {
      Outputs out{poisoned(DType::kBF16, {n, ops::kHcStreams, hidden}), poisoned(DType::kBF16, {n, hidden}),
                  poisoned(DType::kF32, {n, ops::kHcStreams}),
                  poisoned(DType::kF32, {n, ops::kHcStreams, ops::kHcStreams})};
      variant->run(desc,
                   {.combine = {},
                    .post = {.x = x.view(),
                             .o = o,
                             .post = post.as<float>(),
                             .comb = comb.as<float>(),
                             .out = out.streams.view(),
                             .num_tokens = tokens_of_parts},
                    .pre = {.x = out.streams.view(),
                            .fn = fn.as<float>(),
                            .base = base.as<float>(),
                            .scale = scale.as<float>(),
                            .y = out.y.view(),
                            .post = out.post.as<float>(),
                            .comb = out.comb.as<float>(),
                            .num_tokens = tokens_of_parts},
                    .weight = weight.view(),
                    .peers = peers,
                    .num_tokens = n,
                    .workspace = workspace.data()},
                   executor_->queue());
      executor_->synchronize();
      return out;
    };

    // One after the other: all ranks send, then this one collects.
    const testing::PeerSlots unfused(*executor_, world, comm::peer_slots(n * hidden));
    const device::Tensor o = poisoned(DType::kBF16, {n, hidden});
    const auto part_of_sum = [&](int r, comm::PeerPart part) {
      comm::peer_sum_on_gpu(unfused.view(r), comm::PeerWay::kWhole, parts[static_cast<size_t>(r)].view().data, false,
                            o.view().data, true, n * hidden, executor_->queue(), part);
    };
    for (int r = 0; r < world; ++r) part_of_sum(r, comm::PeerPart::kSend);
    part_of_sum(rank, comm::PeerPart::kCollect);
    const Outputs expected = turn(alone, o.view(), nullptr);
    // How many tokens there are is said once: parts need not say it too.
    const Outputs same = turn(alone, o.view(), nullptr, n);
    expect_same(same.y, expected.y), expect_same(same.comb, expected.comb);

    for (int r = 0; r < world; ++r) {
      if (r != rank) slots.send(rank, r, call, words_of(hosts[static_cast<size_t>(r)]));
    }
    const auto me = static_cast<size_t>(rank);
    const Outputs found = turn(of_ranks, parts[me].view(), &slots.view(rank));
    expect_same(found.streams, expected.streams);
    expect_same(found.y, expected.y);
    expect_same(found.post, expected.post);
    expect_same(found.comb, expected.comb);

    const Bytes own = words_of(hosts[me]);
    for (int r = 0; r < world; ++r) {
      if (r == rank) continue;
      EXPECT_TRUE(slots.sent(r, rank, call, own.size()) == own) << "what is sent to " << r;
      slots.free(r, rank, call, own.size());
    }
    EXPECT_TRUE(slots.is_free(rank));
    EXPECT_EQ(slots.calls(rank), (std::vector<uint32_t>{static_cast<uint32_t>(call) + 1, 0}));
  }
}

// Widths of whole slices, of fewer slices than there are at most, and of a last slice that is partly there. Few tokens,
// whose blocks wait; more than have room for that; and as many as have products of their own.
TEST_F(RankTurn, HasTheBitsOfTheSumAndTheTurnBehindIt) {
  check(1, 0, {1, 2}, 512);
  check(2, 0, {1, 5, 3, 8, 1, 7}, 512);
  check(2, 1, {2, 9, 1}, 1408);
  check(3, 1, {3, 69, 1}, 256);
  check(5, 3, {1, 2, 1}, 256);
  if (testing::kGpuIsEmulated) return;
  check(2, 0, {1, 8, 9, 32, 33, 64, 65, 301}, 4096);
  check(device::kMaxPeers, 5, {1, 7, 64}, 7168);
}

TEST_F(RankTurn, TakesWidthsThatTravelWhole) {
  ops::MhcPostPre::Desc desc{.mhc = {.hidden = 192},
                             .combine = {},
                             .has_post = true,
                             .norm = ops::RmsNorm::Desc{.width = 192},
                             .sums_ranks = true};
  EXPECT_EQ(variant_of(desc), nullptr) << "half a run";
  desc.mhc.hidden = desc.norm->width = 256;
  EXPECT_NE(variant_of(desc), nullptr);
  desc.mhc.activation = desc.norm->activation = DType::kF32;
  EXPECT_EQ(variant_of(desc), nullptr) << "sums are rounded to BF16";
  desc.mhc.activation = desc.norm->activation = DType::kBF16;
  desc.combine = ops::MoeCombine::Desc{.hidden = 256, .top_k = 2};
  EXPECT_NE(variant_of(desc), nullptr);
  desc.mhc.hidden = desc.norm->width = desc.combine->hidden = 260;
  EXPECT_EQ(variant_of(desc), nullptr) << "half of eight channels";
}

}  // namespace
}  // namespace tessera
