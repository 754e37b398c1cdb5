// SPDX-License-Identifier: Apache-2.0
// Collectives through the bootstrap's connections: the bits of loopback, and who does not come.
#include "comm/tcp_communicator.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "comm/joined_ranks.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "numeric/bf16.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_all;
using tessera::testing::run_joined;
using tessera::testing::run_ranks;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class TcpWorlds : public ::testing::TestWithParam<int> {};

// Small and large messages, odd sizes, and ones that take several.
TEST_P(TcpWorlds, GiveTheBitsOfLoopback) {
  const int world = GetParam();
  for (const int64_t count : {1, 37, 500001 / world}) {
    std::vector<std::vector<float>> results[2];
    for (auto& one : results) one.resize(static_cast<size_t>(world));
    auto ranks = make_loopback(world, 120);
    EXPECT_THAT(run_ranks(ranks,
                          [&](Communicator& comm, device::Queue& queue) {
                            results[0][static_cast<size_t>(comm.rank())] = run_all(comm, queue, count);
                          }),
                Each(""));
    EXPECT_THAT(run_joined(world,
                           [&](Bootstrap& bootstrap) {
                             device::Queue queue(1);
                             const auto comm = make_tcp(bootstrap, 120);
                             results[1][static_cast<size_t>(bootstrap.rank())] = run_all(*comm, queue, count);
                           }),
                Each(""));
    EXPECT_EQ(results[0], results[1]) << count;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, TcpWorlds, ::testing::Values(1, 2, 3));

TEST(TcpCommunicator, RunsOfDifferentSizesAndBf16) {
  EXPECT_THAT(run_joined(2,
                         [](Bootstrap& bootstrap) {
                           device::Queue queue(1);
                           const auto comm = make_tcp(bootstrap);
                           const auto self = static_cast<size_t>(bootstrap.rank());
                           const std::vector<int64_t> sent[2] = {{1, 2}, {3, 0}}, received[2] = {{1, 3}, {2, 0}};
                           std::vector<uint8_t> from(3, static_cast<uint8_t>(self + 1)), to(4, 9);
                           comm->all_to_all({from.data(), sent[self]}, {to.data(), received[self]}, queue);
                           const std::vector<uint8_t> expected[2] = {{1, 2, 2, 2}, {1, 1, 9, 9}};
                           EXPECT_EQ(to, expected[self]);
                           uint16_t half = numeric::bf16_from_float(self == 0 ? 1.0f : 0.5f);
                           const TensorView view{&half, DType::kBF16, {1}};
                           comm->all_reduce(view, view, queue);
                           EXPECT_EQ(numeric::bf16_to_float(half), 1.5f);
                         }),
              Each(""));
}

TEST(TcpCommunicator, OtherCallsAndMissingOnesAreNamed) {
  float values[4] = {};
  const std::vector<std::string> others = run_joined(2, [&](Bootstrap& bootstrap) {
    device::Queue queue(1);
    const auto comm = make_tcp(bootstrap);
    float own[4] = {};
    const TensorView view{own, DType::kF32, {bootstrap.rank() == 0 ? 4 : 3}};
    comm->all_reduce(view, view, queue);
  });
  EXPECT_THAT(others, Each(HasSubstr("calls all_reduce of")));
  // What else ranks hand round: nothing, a small number, a large one.
  for (const std::vector<uint8_t>& bytes : {std::vector<uint8_t>{}, {7, 0, 0, 0, 0, 0, 0, 0}, {7, 255, 255, 255}}) {
    const std::vector<std::string> none = run_joined(2, [&](Bootstrap& bootstrap) {
      device::Queue queue(1);
      if (bootstrap.rank() == 1) return bootstrap.all_gather(bytes), void();
      make_tcp(bootstrap)->barrier(queue);
    });
    EXPECT_EQ(none[0],
              fmt::format("rank 1 calls no collective ({} bytes), rank 0 calls barrier of order 0", bytes.size()));
  }
  const std::vector<std::string> missing = run_joined(2, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) return bootstrap.take_order(), void();
    device::Queue queue(1);
    const TensorView view{values, DType::kF32, {4}};
    try {
      make_tcp(bootstrap, 0.2)->all_reduce(view, view, queue);
    } catch (const Error& error) {
      bootstrap.fail(error.what());
      throw;
    }
  });
  const std::string why = "all_reduce of 4 F32 into F32: rank 1 of 2 stalls: nothing came from it within 0.2 s";
  EXPECT_EQ(missing[0], why);
  EXPECT_EQ(missing[1], "rank 0 of 2 failed: " + why);
}

// A rank that gave up a step must not meet another's sum of it.
TEST(TcpCommunicator, SumsOfAnotherOrderAreRefused) {
  const auto sum_after = [](Bootstrap& bootstrap, int sent, int taken) {
    device::Queue queue(1);
    const auto comm = make_tcp(bootstrap, 120);
    const std::vector<uint8_t> order = {1};
    for (int n = 0; n < (bootstrap.rank() == 0 ? sent : taken); ++n) {
      bootstrap.rank() == 0 ? bootstrap.send_order(order) : void(bootstrap.take_order());
    }
    float one = 1;
    const TensorView view{&one, DType::kF32, {1}};
    comm->all_reduce(view, view, queue);
    EXPECT_EQ(one, 2);
  };
  EXPECT_THAT(run_joined(2, [&](Bootstrap& bootstrap) { sum_after(bootstrap, 3, 3); }), Each(""));
  EXPECT_THAT(run_joined(2, [&](Bootstrap& bootstrap) { sum_after(bootstrap, 3, 2); }),
              Each(AllOf(HasSubstr("of order 3"), HasSubstr("of order 2"))));
}

}  // namespace
}  // namespace tessera::comm
