// SPDX-License-Identifier: Apache-2.0
// Collectives between two, four or eight GPUs of this machine, as many as there are, through NCCL itself and through
// peer memory, as sums go there and all in shares: what the host would sum, called and recorded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <tuple>

#include "base/error.h"
#include "base/rng.h"
#include "comm/nccl.h"
#include "comm/nccl_library.h"
#include "comm/peer.h"
#include "comm/rank_sum.h"
#include "comm/tcp.h"
#include "device/buffer.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "testing/seed.h"

namespace tessera::comm {
namespace {

using ::testing::Each;

std::string why_not(int world) {
  try {
    device::machine_of("cuda:" + std::to_string(world - 1));
    nccl_library(NcclOptions().library);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// What a rank does on its own GPU.
struct Rank {
  Communicator& comm;
  device::Executor& executor;

  device::Tensor place(const std::vector<float>& values) const {
    device::Tensor tensor(DType::kF32, {static_cast<int64_t>(values.size())}, executor.memory());
    executor.memory().upload(tensor.view().data, values.data(), values.size() * sizeof(float));
    return tensor;
  }
  std::vector<float> read(const TensorView& view) const {
    std::vector<float> values(static_cast<size_t>(view.shape.num_elements()));
    executor.memory().download(values.data(), view.data, values.size() * sizeof(float));
    return values;
  }
};

enum class Sums { kByNccl, kByPeers, kInShares };

// Runs work(rank) on a thread for each GPU; what each threw.
template <class Work>
std::vector<std::string> run_gpus(int world, Sums sums, const Work& work) {
  Socket listener = listen_at("127.0.0.1", 0);
  const int port = port_of(listener);
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        BootstrapOptions joining;
        joining.place.rank = r, joining.place.world = world, joining.place.port = port;
        joining.secret = "a secret of the ranks";
        Bootstrap bootstrap(joining, nullptr, nullptr, r == 0 ? std::move(listener) : Socket());
        const auto executor = device::make_executor(device::machine_of("cuda:" + std::to_string(r)), 1);
        {
          std::unique_ptr<Communicator> comm = make_nccl(bootstrap, executor->memory());
          std::string why_not;
          PeerOptions options;
          if (sums == Sums::kInShares) options.way = PeerWay::kShares;
          if (sums != Sums::kByNccl) comm = make_peer(bootstrap, std::move(comm), why_not, options);
          EXPECT_EQ(why_not, "");
          work(Rank{*comm, *executor});
          bootstrap.all_gather({});
        }
        bootstrap.leave();
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

std::vector<float> random_values(uint64_t seed, int rank, int64_t count) {
  Rng rng(seed, static_cast<uint64_t>(rank));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(rng.normal());
  return values;
}

std::vector<float> sum_of(int world, uint64_t seed, int64_t count) {
  std::vector<float> parts, sum(static_cast<size_t>(count));
  for (int r = 0; r < world; ++r) {
    const std::vector<float> one = random_values(seed, r, count);
    parts.insert(parts.end(), one.begin(), one.end());
  }
  device::Queue queue(1);
  sum_ranks(parts.data(), DType::kF32, world, count, sum.data(), DType::kF32, count, queue);
  return sum;
}

// Of a value that each rank has, in rank order.
float sum_of_equal(int world, float value) {
  float sum = value;
  for (int r = 1; r < world; ++r) sum += value;
  return sum;
}

class CommOnGpus : public ::testing::TestWithParam<std::tuple<Sums, int>> {
 protected:
  void SetUp() override {
    const std::string why = why_not(world_);
    if (!why.empty()) GTEST_SKIP() << why;
  }
  template <class Work>
  std::vector<std::string> run(const Work& work) const {
    return run_gpus(world_, std::get<Sums>(GetParam()), work);
  }
  std::vector<float> sum(uint64_t seed, int64_t count) const { return sum_of(world_, seed, count); }
  const int world_ = std::get<int>(GetParam());
  const uint64_t seed_ = fresh_seed();
};

// One token, odd sizes, and more than what two shots begin at; in place and not.
TEST_P(CommOnGpus, SumsAreThoseOfTheHost) {
  EXPECT_THAT(run([&](const Rank& rank) {
                for (const int64_t count :
                     {1, 37, 63, 65, 4096, 32767, 70001, 131072, 300007, 524288, 1 << 20, 2625572, 5 << 20}) {
                  const device::Tensor in = rank.place(random_values(seed_, rank.comm.rank(), count));
                  const device::Tensor out(DType::kF32, {count}, rank.executor.memory());
                  rank.comm.all_reduce(in.view(), out.view(), rank.executor.queue());
                  rank.comm.all_reduce(in.view(), in.view(), rank.executor.queue());
                  EXPECT_EQ(rank.read(out.view()), sum(seed_, count)) << count;
                  EXPECT_EQ(rank.read(in.view()), sum(seed_, count)) << count << " in place";
                }
              }),
              Each(""));
}

TEST_P(CommOnGpus, OtherCollectivesMoveWhatTheyShould) {
  constexpr int64_t kCount = 1001;
  EXPECT_THAT(run([&](const Rank& rank) {
                Communicator& comm = rank.comm;
                device::Queue& queue = rank.executor.queue();
                const int me = comm.rank();
                const device::Tensor own = rank.place(random_values(seed_, me, kCount)),
                                     all(DType::kF32, {world_ * kCount}, rank.executor.memory());
                std::vector<float> every;
                for (int r = 0; r < world_; ++r) {
                  const std::vector<float> one = random_values(seed_, r, kCount);
                  every.insert(every.end(), one.begin(), one.end());
                }
                comm.all_gather(own.view(), all.view(), queue);
                EXPECT_EQ(rank.read(all.view()), every);
                // Two at once, of different sizes.
                const device::Tensor again(DType::kF32, {world_ * kCount}, rank.executor.memory()),
                    few(DType::kF32, {world_ * 3}, rank.executor.memory());
                const Communicator::Gathered arrays[] = {{own.view(), again.view()},
                                                         {{own.view().data, DType::kF32, {3}}, few.view()}};
                comm.all_gather(arrays, queue);
                EXPECT_EQ(rank.read(again.view()), every);
                for (int r = 0; r < world_; ++r) {
                  EXPECT_EQ(rank.read(few.view())[static_cast<size_t>(3 * r + 2)],
                            every[static_cast<size_t>(r * kCount + 2)]);
                }
                const auto part = [&](const std::vector<float>& values, int n) {
                  return std::vector<float>(values.begin() + n * kCount, values.begin() + (n + 1) * kCount);
                };
                const device::Tensor in = rank.place(random_values(seed_, me, world_ * kCount)),
                                     share(DType::kF32, {kCount}, rank.executor.memory());
                comm.reduce_scatter(in.view(), share.view(), queue);
                EXPECT_EQ(rank.read(share.view()), part(sum(seed_, world_ * kCount), me));
                const std::vector<int64_t> bytes(static_cast<size_t>(world_), kCount * 4);
                comm.all_to_all({in.view().data, bytes}, {all.view().data, bytes}, queue);
                const std::vector<float> got = rank.read(all.view());
                for (int r = 0; r < world_; ++r) {
                  EXPECT_EQ(part(got, r), part(random_values(seed_, r, world_ * kCount), me)) << r;
                }
                comm.broadcast(own.view(), 1, queue);
                EXPECT_EQ(rank.read(own.view()), random_values(seed_, 1, kCount));
                comm.barrier(queue);
                comm.check();
              }),
              Each(""));
}

// As a decode step has them: recorded once, launched often, with other values each time.
TEST_P(CommOnGpus, ARecordingSumsWhatIsThereWhenItIsLaunched) {
  constexpr int64_t kCount = 4096;
  EXPECT_THAT(run([&](const Rank& rank) {
                const device::Tensor in(DType::kF32, {kCount}, rank.executor.memory());
                const device::Tensor out(DType::kF32, {kCount}, rank.executor.memory());
                rank.comm.all_reduce(in.view(), out.view(), rank.executor.queue());
                const auto recording = rank.executor.record([&] {
                  for (int i = 0; i < 20; ++i) rank.comm.all_reduce(in.view(), out.view(), rank.executor.queue());
                });
                for (uint64_t round = 0; round < 20; ++round) {
                  const std::vector<float> values = random_values(seed_ + round, rank.comm.rank(), kCount);
                  rank.comm.begin_step(true);
                  rank.executor.memory().upload(in.view().data, values.data(), values.size() * sizeof(float));
                  recording->launch();
                  EXPECT_EQ(rank.read(out.view()), sum(seed_ + round, kCount)) << round;
                  rank.comm.end_step();
                }
              }),
              Each(""));
}

// Sums of many sizes behind each other, in place: after the first all ranks have the same.
// A rank is late now and then.
TEST_P(CommOnGpus, SumsBehindEachOtherOfManySizesWhoeverIsLate) {
  const std::vector<int64_t> counts = {4096, 524288, 33, 131072, 1, 70001, 262144, 2048, 1000003};
  constexpr int kRounds = 10, kLaunches = 6, kSums = 3;
  EXPECT_THAT(run([&](const Rank& rank) {
                std::vector<device::Tensor> tensors;
                for (const int64_t count : counts) {
                  tensors.emplace_back(DType::kF32, Shape{count}, rank.executor.memory());
                }
                auto sum_all = [&] {
                  for (int i = 0; i < kSums; ++i) {
                    for (const device::Tensor& x : tensors) {
                      rank.comm.all_reduce(x.view(), x.view(), rank.executor.queue());
                    }
                  }
                };
                sum_all();
                const auto recording = rank.executor.record(sum_all);
                Rng lateness(seed_, static_cast<uint64_t>(100 + rank.comm.rank()));
                for (uint64_t round = 0; round < kRounds; ++round) {
                  std::vector<std::vector<float>> expected;
                  for (size_t i = 0; i < counts.size(); ++i) {
                    const uint64_t seed = seed_ + round * 100 + i;
                    const std::vector<float> values = random_values(seed, rank.comm.rank(), counts[i]);
                    rank.executor.memory().upload(tensors[i].view().data, values.data(), values.size() * sizeof(float));
                    expected.push_back(sum(seed, counts[i]));
                    for (float& value : expected.back()) {
                      for (int n = 1; n < kLaunches * kSums; ++n) value = sum_of_equal(world_, value);
                    }
                  }
                  rank.comm.begin_step(true);
                  for (int i = 0; i < kLaunches; ++i) {
                    if (lateness.below(3) == 0) {
                      std::this_thread::sleep_for(std::chrono::microseconds(lateness.below(400)));
                    }
                    recording->launch();
                  }
                  for (size_t i = 0; i < counts.size(); ++i) {
                    EXPECT_TRUE(rank.read(tensors[i].view()) == expected[i]) << counts[i] << ", " << round;
                  }
                  rank.comm.end_step();
                }
              }),
              Each(""));
}

INSTANTIATE_TEST_SUITE_P(Ways, CommOnGpus,
                         ::testing::Combine(::testing::Values(Sums::kByNccl, Sums::kByPeers, Sums::kInShares),
                                            ::testing::Values(2, 4, 8)),
                         [](const auto& way) {
                           const Sums sums = std::get<Sums>(way.param);
                           return std::string(sums == Sums::kByNccl    ? "Nccl"
                                              : sums == Sums::kByPeers ? "Peer"
                                                                       : "Shares") +
                                  "Of" + std::to_string(std::get<int>(way.param));
                         });

}  // namespace
}  // namespace tessera::comm
