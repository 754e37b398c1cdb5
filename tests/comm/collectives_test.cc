// SPDX-License-Identifier: Apache-2.0
// Every collective at every rank count from 1 to 8, odd sizes, against what one thread computes from all inputs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/rng.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "numeric/bf16.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kSizes[] = {1, 3, 7, 64, 1001, 4096 + 5};

// Values whose sum depends on its order.
std::vector<float> values_of(int rank, int64_t count) {
  Rng rng(static_cast<uint64_t>(rank) * 77 + static_cast<uint64_t>(count));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(rng.normal()) * (rng.below(10) == 0 ? 1e6f : 1.0f);
  return values;
}

std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> rounded;
  for (const float value : values) rounded.push_back(numeric::bf16_from_float(value));
  return rounded;
}

TensorView view_of(std::vector<float>& values) {
  return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}};
}
TensorView view_of(std::vector<uint16_t>& values) {
  return {values.data(), DType::kBF16, {static_cast<int64_t>(values.size())}};
}

// The contract in plain loops: ranks ascending, FP32.
std::vector<float> sum_of(int world, int64_t count, bool is_bf16) {
  std::vector<float> sum(static_cast<size_t>(count));
  for (int r = 0; r < world; ++r) {
    const std::vector<float> values = values_of(r, count);
    for (size_t i = 0; i < sum.size(); ++i) {
      const float value = is_bf16 ? numeric::bf16_round(values[i]) : values[i];
      sum[i] = r == 0 ? value : sum[i] + value;
    }
  }
  return sum;
}

class Collectives : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  template <class Work>
  void run(const Work& work) {
    auto ranks = make_loopback(world());
    EXPECT_THAT(run_ranks(ranks, work), Each(""));
  }
};

TEST_P(Collectives, AllReduceSumsInRankOrderInPlace) {
  run([&](Communicator& comm, device::Queue& queue) {
    for (const int64_t count : kSizes) {
      std::vector<float> values = values_of(comm.rank(), count);
      comm.all_reduce(view_of(values), view_of(values), queue);
      EXPECT_EQ(values, sum_of(world(), count, false)) << count;
    }
  });
}

TEST_P(Collectives, AllReduceRoundsOnce) {
  run([&](Communicator& comm, device::Queue& queue) {
    for (const int64_t count : kSizes) {
      std::vector<float> values = values_of(comm.rank(), count);
      std::vector<uint16_t> narrow(values.size()), halves = as_bf16(values);
      comm.all_reduce(view_of(values), view_of(narrow), queue);
      EXPECT_EQ(narrow, as_bf16(sum_of(world(), count, false))) << count;
      comm.all_reduce(view_of(halves), view_of(halves), queue);
      EXPECT_EQ(halves, as_bf16(sum_of(world(), count, true))) << count;
    }
  });
}

TEST_P(Collectives, AllGatherOfValuesAndBytes) {
  run([&](Communicator& comm, device::Queue& queue) {
    for (const int64_t count : kSizes) {
      std::vector<float> values = values_of(comm.rank(), count);
      std::vector<float> all(values.size() * static_cast<size_t>(world()));
      comm.all_gather(view_of(values), view_of(all), queue);
      std::vector<uint8_t> bytes(static_cast<size_t>(count), static_cast<uint8_t>(comm.rank() + 1));
      std::vector<uint8_t> all_bytes(bytes.size() * static_cast<size_t>(world()));
      comm.all_gather({bytes.data(), DType::kU8, {count}}, {all_bytes.data(), DType::kU8, {world(), count}}, queue);
      for (int r = 0; r < world(); ++r) {
        const std::vector<float> expected = values_of(r, count);
        EXPECT_EQ(std::memcmp(all.data() + r * count, expected.data(), expected.size() * 4), 0) << count << ' ' << r;
        EXPECT_EQ(all_bytes[static_cast<size_t>(r * count)], r + 1);
        EXPECT_EQ(all_bytes[static_cast<size_t>((r + 1) * count - 1)], r + 1);
      }
    }
  });
}

TEST_P(Collectives, AllGatherOfSeveralArraysIsThatOfEach) {
  run([&](Communicator& comm, device::Queue& queue) {
    std::vector<float> first = values_of(comm.rank(), 37), all_first(first.size() * static_cast<size_t>(world()));
    std::vector<uint8_t> second(5, static_cast<uint8_t>(comm.rank() + 1)), all_second(5 * static_cast<size_t>(world()));
    const Communicator::Gathered arrays[] = {
        {view_of(first), view_of(all_first)},
        {{nullptr, DType::kBF16, {0}}, {nullptr, DType::kBF16, {world(), 0}}},
        {{second.data(), DType::kU8, {5}}, {all_second.data(), DType::kU8, {world(), 5}}}};
    comm.all_gather(arrays, queue);
    comm.all_gather(std::span<const Communicator::Gathered>(), queue);
    for (int r = 0; r < world(); ++r) {
      const std::vector<float> expected = values_of(r, 37);
      EXPECT_EQ(std::memcmp(all_first.data() + r * 37, expected.data(), expected.size() * 4), 0) << r;
      EXPECT_EQ(all_second[static_cast<size_t>(r * 5 + 4)], r + 1);
    }
  });
}

TEST_P(Collectives, ReduceScatterGivesEachItsShare) {
  run([&](Communicator& comm, device::Queue& queue) {
    for (const int64_t count : kSizes) {
      std::vector<float> values = values_of(comm.rank(), count * world());
      std::vector<float> share(static_cast<size_t>(count));
      std::vector<uint16_t> narrow(share.size());
      comm.reduce_scatter(view_of(values), view_of(share), queue);
      comm.reduce_scatter(view_of(values), view_of(narrow), queue);
      const std::vector<float> sum = sum_of(world(), count * world(), false);
      const std::vector<float> expected(sum.begin() + comm.rank() * count, sum.begin() + (comm.rank() + 1) * count);
      EXPECT_EQ(share, expected) << count;
      EXPECT_EQ(narrow, as_bf16(expected)) << count;
    }
  });
}

// Skewed, with empty runs and ranks that get nothing at all.
TEST_P(Collectives, AllToAllOfUnequalRuns) {
  const auto bytes_from_to = [](int from, int to) -> int64_t {
    return to == 1 ? 0 : (from * 5 + to * 3) % 7 * (to == 0 ? 100 : 1);
  };
  run([&](Communicator& comm, device::Queue& queue) {
    std::vector<int64_t> send_bytes, receive_bytes;
    std::vector<uint8_t> send, expected;
    for (int r = 0; r < world(); ++r) {
      send_bytes.push_back(bytes_from_to(comm.rank(), r));
      receive_bytes.push_back(bytes_from_to(r, comm.rank()));
      send.insert(send.end(), static_cast<size_t>(send_bytes.back()), static_cast<uint8_t>(comm.rank() * 16 + r));
      expected.insert(expected.end(), static_cast<size_t>(receive_bytes.back()),
                      static_cast<uint8_t>(r * 16 + comm.rank()));
    }
    std::vector<uint8_t> received(expected.size());
    comm.all_to_all({send.data(), send_bytes}, {received.data(), receive_bytes}, queue);
    EXPECT_EQ(received, expected);
  });
}

TEST_P(Collectives, BroadcastFromEveryRank) {
  run([&](Communicator& comm, device::Queue& queue) {
    for (int root = 0; root < world(); ++root) {
      std::vector<float> values = values_of(comm.rank(), 333);
      comm.broadcast(view_of(values), root, queue);
      EXPECT_EQ(values, values_of(root, 333));
    }
  });
}

TEST_P(Collectives, BarrierHoldsEverybody) {
  std::atomic<int> num_here{0};
  run([&](Communicator& comm, device::Queue& queue) {
    for (int round = 1; round <= 50; ++round) {
      ++num_here;
      comm.barrier(queue);
      EXPECT_GE(num_here, round * world());
    }
  });
}

TEST_P(Collectives, EmptyArraysAreNoCalls) {
  run([&](Communicator& comm, device::Queue& queue) {
    std::vector<float> none;
    if (comm.rank() == 0) comm.all_reduce(view_of(none), view_of(none), queue);
    comm.barrier(queue);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, ::testing::Range(1, 9));

TEST(CollectiveErrors, WrongArgumentsAreNamed) {
  auto ranks = make_loopback(1);
  device::Queue queue(1);
  Communicator& comm = *ranks[0];
  std::vector<float> a(4), b(5);
  std::vector<int64_t> runs(2);
  const auto message = [&](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([&] { comm.all_reduce(view_of(a), view_of(b), queue); }),
            "all_reduce: expected F32 [4], found F32 [5]");
  EXPECT_THAT(message([&] {
                comm.all_reduce({a.data(), DType::kI32, {4}}, {a.data(), DType::kI32, {4}}, queue);
              }),
              HasSubstr("expected F32 or BF16"));
  EXPECT_THAT(message([&] {
                comm.all_reduce({a.data(), DType::kF32, {2}}, {a.data() + 1, DType::kF32, {2}}, queue);
              }),
              HasSubstr("do not overlap"));
  EXPECT_THAT(message([&] { comm.all_gather(view_of(a), view_of(b), queue); }), HasSubstr("1 times the elements"));
  EXPECT_THAT(message([&] {
                comm.all_to_all({a.data(), runs}, {b.data(), runs}, queue);
              }),
              HasSubstr("1 runs to send"));
  EXPECT_THAT(message([&] { comm.broadcast(view_of(a), 1, queue); }), HasSubstr("a root from 0 to 0"));
  EXPECT_THAT(message([&] { make_loopback(0); }), HasSubstr("world size: expected 1 to 1024, found 0"));
}

TEST(CollectiveErrors, RanksThatDisagreeAllLearnOfIt) {
  auto ranks = make_loopback(3);
  const auto errors = run_ranks(ranks, [](Communicator& comm, device::Queue& queue) {
    std::vector<float> values(comm.rank() == 2 ? 5 : 4);
    comm.all_reduce(view_of(values), view_of(values), queue);
  });
  EXPECT_THAT(errors, Each("rank 2 calls all_reduce of 5 F32, rank 0 calls all_reduce of 4 F32"));
}

TEST(CollectiveErrors, RunsThatDisagree) {
  auto ranks = make_loopback(2);
  const auto errors = run_ranks(ranks, [](Communicator& comm, device::Queue& queue) {
    std::vector<uint8_t> send(16), receive(16);
    const std::vector<int64_t> bytes = {4, 4}, wrong = {3, 4};
    comm.all_to_all({send.data(), bytes}, {receive.data(), comm.rank() == 1 ? wrong : bytes}, queue);
  });
  EXPECT_THAT(errors, Each("all_to_all: rank 0 sends 4 bytes to rank 1, which expects 3"));
}

TEST(CollectiveErrors, ARankThatThrowsEndsTheOthers) {
  auto ranks = make_loopback(4);
  const auto errors = run_ranks(ranks, [](Communicator& comm, device::Queue& queue) {
    comm.barrier(queue);
    if (comm.rank() == 3) fail(ErrorCode::kNotFinite, "a NaN");
    comm.barrier(queue);
  });
  EXPECT_EQ(errors[3], "a NaN");
  for (size_t r = 0; r < 3; ++r) EXPECT_EQ(errors[r], "rank 3 failed: a NaN");
}

TEST(CollectiveErrors, ARankThatStallsIsNamed) {
  auto ranks = make_loopback(3, 2);
  const auto errors = run_ranks(ranks, [](Communicator& comm, device::Queue& queue) {
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(5));
    comm.barrier(queue);
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 1 of 3 did not come to barrier")));
}

TEST(CollectiveErrors, ARankThatLeavesIsNamed) {
  auto ranks = make_loopback(2);
  std::unique_ptr<Communicator> leaving = std::move(ranks[1]);
  std::thread other([&] { leaving.reset(); });
  device::Queue queue(1);
  try {
    ranks[0]->barrier(queue);
    ADD_FAILURE() << "a barrier of one";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1 of 2 has left");
  }
  other.join();
  EXPECT_THROW(ranks[0]->check(), Error);
}

}  // namespace
}  // namespace tessera::comm
