// SPDX-License-Identifier: Apache-2.0
#include "comm/echo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

#include "base/error.h"
#include "comm/peer.h"
#include "device/buffer.h"
#include "device/device_choice.h"
#include "device/executor.h"

namespace tessera::comm {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

TensorView view_of(std::vector<float>& values) {
  return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}};
}

TEST(Echo, OthersSendWhatThisRankSends) {
  device::Queue queue(1);
  const std::unique_ptr<Communicator> comm = make_echo(1, 3);
  EXPECT_EQ(comm->rank(), 1);
  EXPECT_EQ(comm->world(), 3);
  std::vector<float> own{1, -2}, sum{9, 9}, all(6, 9), of_ranks{1, 2, 3, 4, 5, 6};
  comm->all_reduce(view_of(own), view_of(sum), queue);
  EXPECT_THAT(sum, ElementsAre(3, -6));
  comm->all_gather(view_of(own), view_of(all), queue);
  EXPECT_THAT(all, ElementsAre(1, -2, 1, -2, 1, -2));
  comm->reduce_scatter({of_ranks.data(), DType::kF32, {3, 2}}, view_of(sum), queue);
  EXPECT_THAT(sum, ElementsAre(9, 12));
  comm->all_reduce(view_of(own), view_of(own), queue);
  EXPECT_THAT(own, ElementsAre(3, -6));
  comm->broadcast(view_of(own), 2, queue);
  comm->barrier(queue);
  comm->check();
  EXPECT_THAT(own, ElementsAre(3, -6));
}

TEST(Echo, RunsComeBackWhereTheyAreOfOneSize) {
  device::Queue queue(1);
  const std::unique_ptr<Communicator> comm = make_echo(0, 2);
  std::vector<float> send{1, 2, 3}, receive{9, 9, 9};
  const std::array<int64_t, 2> bytes{4, 8};
  comm->all_to_all({send.data(), bytes}, {receive.data(), bytes}, queue);
  EXPECT_THAT(receive, ElementsAre(1, 2, 3));
  std::vector<uint16_t> halves{0x3F80, 0x4000, 0x4040}, all(6);
  comm->all_gather({halves.data(), DType::kBF16, {3}}, {all.data(), DType::kBF16, {2, 3}}, queue);
  EXPECT_THAT(all, ElementsAre(0x3F80, 0x4000, 0x4040, 0x3F80, 0x4000, 0x4040));
  try {
    const std::array<int64_t, 2> uneven{4, 4};
    comm->all_to_all({send.data(), bytes}, {receive.data(), uneven}, queue);
    ADD_FAILURE() << "runs of two sizes";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
}

TEST(Echo, OfPeersNeedsAGpuAndNoMoreRanksThanReachEachOther) {
  EXPECT_THROW(make_peer_echo(0, device::kMaxPeers + 1), Error);
  device::Machine machine;
  try {
    machine = device::machine_of("cuda:0");
  } catch (const Error& error) {
    EXPECT_THROW(make_peer_echo(0, 2), Error);
    GTEST_SKIP() << error.what();
  }
  const auto executor = device::make_executor(machine, 1);
  try {
    make_peer_echo(0, 2);
  } catch (const Error& error) {
    // As of a GPU that is emulated, which has no peers.
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    GTEST_SKIP() << error.what();
  }
  for (const int world : {2, 4, 8}) {
    for (const PeerWay way : {PeerWay::kWhole, PeerWay::kShares}) {
      PeerOptions options;
      options.way = way;
      const std::unique_ptr<Communicator> comm = make_peer_echo(world - 1, world, options);
      // Parts of one size and of several, and more than there is room for.
      for (const int64_t count : {1, 4096, 4097, 7168 * 8, 9 << 20}) {
        const std::vector<float> values(static_cast<size_t>(count), 0.5f);
        const device::Tensor in(DType::kF32, {count}, executor->memory()),
            out(DType::kF32, {count}, executor->memory());
        executor->memory().upload(in.view().data, values.data(), values.size() * sizeof(float));
        for (int i = 0; i < 3; ++i) comm->all_reduce(in.view(), out.view(), executor->queue());
        std::vector<float> sum(values.size());
        executor->memory().download(sum.data(), out.view().data, sum.size() * sizeof(float));
        EXPECT_THAT(sum, Each(0.5f * static_cast<float>(world))) << world << " " << count;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::comm
