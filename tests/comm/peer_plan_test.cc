// SPDX-License-Identifier: Apache-2.0
// Which way sums over ranks take through peer memory, by hand.
#include "comm/peer_plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "comm/peer.h"

namespace tessera::comm {
namespace {

constexpr PeerWay kWhole = PeerWay::kWhole, kShares = PeerWay::kShares;
constexpr int64_t kMiB = 1 << 20;

PeerWay way_of(int world, DType in, DType out, int64_t in_bytes) {
  return PeerOptions().plan(world, in, out, in_bytes * 8 / dtype_bits(in)).way;
}

// A second shot for at least 1 MiB less to send. Between two ranks shares of one type send as much.
TEST(PeerPlan, SharesWhereTheySaveAShotsBytes) {
  struct Row {
    int world;
    DType in, out;
    int64_t whole_bytes,
        share_bytes;  // of the summand: the largest that is sent whole, the smallest in shares; 0: none
  };
  const DType f32 = DType::kF32, bf16 = DType::kBF16;
  for (const Row& row : std::vector<Row>{{1, bf16, bf16, 64 * kMiB, 0},
                                         {2, bf16, bf16, 64 * kMiB, 0},
                                         {2, f32, f32, 64 * kMiB, 0},
                                         {2, bf16, f32, 64 * kMiB, 0},
                                         {2, f32, bf16, 4 * kMiB, 4 * kMiB + 4096},  // 1 and 3/4
                                         {3, bf16, bf16, 1536 << 10, 1540 << 10},    // 2 and 4/3
                                         {4, bf16, bf16, 680 << 10, 688 << 10},      // 3 and 3/2
                                         {4, bf16, f32, 1360 << 10, 1368 << 10},     // 3 and 9/4
                                         {8, bf16, bf16, 195 << 10, 196 << 10},      // 7 and 7/4
                                         {8, f32, bf16, 178 << 10, 182 << 10}}) {    // 7 and 21/16
    SCOPED_TRACE(testing::Message() << row.world << ' ' << dtype_name(row.in) << ' ' << dtype_name(row.out));
    for (const int64_t bytes : {int64_t{4}, row.whole_bytes / 2, row.whole_bytes}) {
      EXPECT_EQ(way_of(row.world, row.in, row.out, bytes), kWhole) << bytes;
    }
    if (row.share_bytes == 0) continue;
    for (const int64_t bytes : {row.share_bytes, 2 * row.share_bytes, 64 * kMiB}) {
      EXPECT_EQ(way_of(row.world, row.in, row.out, bytes), kShares) << bytes;
    }
  }
}

TEST(PeerPlan, SendsWhatItSays) {
  // 8 MiB of BF16 over eight: whole seven times, in shares 7/8 twice.
  EXPECT_EQ(peer_plan(kWhole, 8, true, true, 4 * kMiB).sent_bytes(8), 56 * kMiB);
  EXPECT_EQ(peer_plan(kShares, 8, true, true, 4 * kMiB).sent_bytes(8), 14 * kMiB);
  EXPECT_EQ(peer_plan(kShares, 8, true, false, 4 * kMiB).sent_bytes(8), 21 * kMiB);
  EXPECT_EQ(peer_plan(kShares, 2, false, true, 2 * kMiB).sent_bytes(2), 6 * kMiB);
  EXPECT_EQ(peer_plan(kWhole, 8, true, true, 4 * kMiB).num_shots(), 1);
  EXPECT_EQ(peer_plan(kShares, 8, true, true, 4 * kMiB).num_shots(), 2);
  // A share is whole groups of 32 slots: of one word seven ranks have none, and are sent nothing.
  const PeerPlan one = peer_plan(kShares, 8, false, false, 1);
  EXPECT_EQ(one.num_slots, 32);
  EXPECT_EQ(one.share_slots, 32);
  EXPECT_EQ(one.slots, 64);
  EXPECT_EQ(peer_plan(kShares, 8, false, false, 64 * 8 + 1).share_slots, 64);
}

TEST(PeerPlan, RoomIsForWhatIsSent) {
  const PeerOptions options;
  for (const int world : {1, 2, 3, 5, 8}) {
    const int64_t capacity = options.capacity(world);
    EXPECT_EQ(capacity % kPeerLanes, 0) << world;
    EXPECT_LE(capacity * (world - 1) * kPeerSlotBytes, options.most_sent_bytes) << world;
    EXPECT_LE(peer_slot_bytes(world, capacity), 4 * options.most_sent_bytes) << world;
  }
  const auto has_room = [&](int world, DType in, DType out, int64_t count) {
    return options.plan(world, in, out, count).slots <= options.capacity(world);
  };
  // 16 MiB to one; of eight ranks nine in shares, where whole it would be two.
  EXPECT_TRUE(has_room(2, DType::kBF16, DType::kBF16, 8 * kMiB));
  EXPECT_FALSE(has_room(2, DType::kBF16, DType::kBF16, 8 * kMiB + 128));
  EXPECT_TRUE(has_room(2, DType::kF32, DType::kBF16, 5 * kMiB));
  EXPECT_TRUE(has_room(8, DType::kBF16, DType::kBF16, 9 * kMiB / 2));
  EXPECT_FALSE(has_room(8, DType::kBF16, DType::kBF16, 5 * kMiB));
}

// With its neighbours a sum is made whole for longer; not where every sum is to be made in shares.
TEST(PeerPlan, SumsWithTheirNeighboursAreWholeForLonger) {
  PeerOptions options;
  const auto is_fused = [&](int world, DType in, int64_t bytes, int num_launches) {
    return options.is_fused(world, in, bytes * 8 / dtype_bits(in), num_launches);
  };
  EXPECT_TRUE(is_fused(2, DType::kBF16, 16 * kMiB, 2));
  EXPECT_FALSE(is_fused(2, DType::kBF16, 16 * kMiB + 256, 2));
  EXPECT_TRUE(is_fused(8, DType::kBF16, 487 << 10, 2));
  EXPECT_FALSE(is_fused(8, DType::kBF16, 489 << 10, 2));
  // F32 that is sent in shares comes back as BF16, in half the bytes: of two ranks too they save a quarter.
  EXPECT_TRUE(is_fused(2, DType::kF32, 7 * kMiB, 1));
  EXPECT_FALSE(is_fused(2, DType::kF32, 7 * kMiB + 1024, 1));
  EXPECT_TRUE(is_fused(2, DType::kF32, 10 * kMiB, 2));
  EXPECT_TRUE(is_fused(8, DType::kF32, 314 << 10, 1));
  EXPECT_FALSE(is_fused(8, DType::kF32, 316 << 10, 1));
  options.way = kShares;
  EXPECT_FALSE(is_fused(2, DType::kBF16, 0, 2));
  EXPECT_EQ(options.plan(2, DType::kBF16, DType::kBF16, 2).way, kShares);
}

}  // namespace
}  // namespace tessera::comm
