// SPDX-License-Identifier: Apache-2.0
// Where GPUs do not reach each other's memory all ranks keep the communicator that they had, and its bits.
#include "comm/peer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/joined_ranks.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "comm/tcp_communicator.h"
#include "device/peer_view.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_all;
using tessera::testing::run_joined;
using tessera::testing::run_ranks;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kCount = 37;

std::vector<std::vector<float>> loopback_results(int world) {
  std::vector<std::vector<float>> results(static_cast<size_t>(world));
  auto ranks = make_loopback(world, 120);
  EXPECT_THAT(run_ranks(ranks,
                        [&](Communicator& comm, device::Queue& queue) {
                          results[static_cast<size_t>(comm.rank())] = run_all(comm, queue, kCount);
                        }),
              Each(""));
  return results;
}

// Two ranks that are threads with one GPU, or with none, and more ranks than a kernel knows.
class PeerFallback : public ::testing::TestWithParam<int> {};

TEST_P(PeerFallback, EveryRankKeepsTheOtherCommunicatorAndSaysWhy) {
  const int world = GetParam();
  std::vector<std::string> reasons(static_cast<size_t>(world));
  std::vector<std::vector<float>> results(static_cast<size_t>(world));
  EXPECT_THAT(run_joined(world,
                         [&](Bootstrap& bootstrap) {
                           const auto rank = static_cast<size_t>(bootstrap.rank());
                           std::unique_ptr<Communicator> other = make_tcp(bootstrap, 120);
                           const Communicator* const before = other.get();
                           const auto comm = make_peer(bootstrap, std::move(other), reasons[rank]);
                           EXPECT_EQ(comm.get(), before);
                           EXPECT_EQ(comm->peer_view(DType::kF32, 4096, 1), nullptr);
                           device::Queue queue(1);
                           results[rank] = run_all(*comm, queue, kCount);
                           bootstrap.all_gather({});
                           bootstrap.leave();
                         }),
              Each(""));
  EXPECT_NE(reasons[0], "");
  EXPECT_THAT(reasons, Each(reasons[0]));
  if (world > device::kMaxPeers) {
    EXPECT_EQ(reasons[0], "9 ranks, at most 8 can");
  }
  EXPECT_EQ(results, loopback_results(world));
}

INSTANTIATE_TEST_SUITE_P(Worlds, PeerFallback, ::testing::Values(2, device::kMaxPeers + 1));

}  // namespace
}  // namespace tessera::comm
