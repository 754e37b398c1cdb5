// SPDX-License-Identifier: Apache-2.0
// Collectives between two GPUs of this machine, through NCCL itself and through peer memory, as sums go there and all
// in shares: what the host would sum, called and recorded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

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

constexpr int kWorld = 2;

std::string why_not() {
  try {
    device::machine_of("cuda:1");
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
std::vector<std::string> run_gpus(Sums sums, const Work& work) {
  Socket listener = listen_at("127.0.0.1", 0);
  const int port = port_of(listener);
  std::vector<std::string> errors(kWorld);
  std::vector<std::thread> threads;
  for (int r = 0; r < kWorld; ++r) {
    threads.emplace_back([&, r] {
      try {
        BootstrapOptions joining;
        joining.place.rank = r, joining.place.world = kWorld, joining.place.port = port;
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

std::vector<float> sum_of(uint64_t seed, int64_t count) {
  std::vector<float> parts, sum(static_cast<size_t>(count));
  for (int r = 0; r < kWorld; ++r) {
    const std::vector<float> one = random_values(seed, r, count);
    parts.insert(parts.end(), one.begin(), one.end());
  }
  device::Queue queue(1);
  sum_ranks(parts.data(), DType::kF32, kWorld, count, sum.data(), DType::kF32, count, queue);
  return sum;
}

class CommOnGpus : public ::testing::TestWithParam<Sums> {
 protected:
  void SetUp() override {
    const std::string why = why_not();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  const uint64_t seed_ = fresh_seed();
};

// One token, odd sizes, and more than what two shots begin at; in place and not.
TEST_P(CommOnGpus, SumsAreThoseOfTheHost) {
  EXPECT_THAT(run_gpus(GetParam(),
                       [&](const Rank& rank) {
                         for (const int64_t count :
                              {1, 37, 63, 65, 4096, 32767, 70001, 131072, 300007, 524288, 1 << 20, 2625572, 5 << 20}) {
                           const device::Tensor in = rank.place(random_values(seed_, rank.comm.rank(), count));
                           const device::Tensor out(DType::kF32, {count}, rank.executor.memory());
                           rank.comm.all_reduce(in.view(), out.view(), rank.executor.queue());
                           rank.comm.all_reduce(in.view(), in.view(), rank.executor.queue());
                           EXPECT_EQ(rank.read(out.view()), sum_of(seed_, count)) << count;
                           EXPECT_EQ(rank.read(in.view()), sum_of(seed_, count)) << count << " in place";
                         }
                       }),
              Each(""));
}

TEST_P(CommOnGpus, OtherCollectivesMoveWhatTheyShould) {
  constexpr int64_t kCount = 1001;
  EXPECT_THAT(
      run_gpus(
          GetParam(),
          [&](const Rank& rank) {
            Communicator& comm = rank.comm;
            device::Queue& queue = rank.executor.queue();
            const int me = comm.rank();
            const std::vector<float> first = random_values(seed_, 0, kCount), second = random_values(seed_, 1, kCount);
            std::vector<float> both = first;
            both.insert(both.end(), second.begin(), second.end());
            const device::Tensor own = rank.place(me == 0 ? first : second),
                                 all(DType::kF32, {2 * kCount}, rank.executor.memory());
            comm.all_gather(own.view(), all.view(), queue);
            EXPECT_EQ(rank.read(all.view()), both);
            const std::vector<float> shares = random_values(seed_, me, 2 * kCount), whole = sum_of(seed_, 2 * kCount);
            const device::Tensor in = rank.place(shares), share(DType::kF32, {kCount}, rank.executor.memory());
            comm.reduce_scatter(in.view(), share.view(), queue);
            EXPECT_EQ(rank.read(share.view()),
                      std::vector<float>(whole.begin() + me * kCount, whole.begin() + (me + 1) * kCount));
            const std::vector<int64_t> bytes(kWorld, kCount * 4);
            comm.all_to_all({in.view().data, bytes}, {all.view().data, bytes}, queue);
            const std::vector<float> theirs = random_values(seed_, 1 - me, 2 * kCount), got = rank.read(all.view());
            const auto run = [&](const std::vector<float>& values, int n) {
              return std::vector<float>(values.begin() + n * kCount, values.begin() + (n + 1) * kCount);
            };
            EXPECT_EQ(run(got, me), run(shares, me));
            EXPECT_EQ(run(got, 1 - me), run(theirs, me));
            comm.broadcast(own.view(), 1, queue);
            EXPECT_EQ(rank.read(own.view()), second);
            comm.barrier(queue);
            comm.check();
          }),
      Each(""));
}

// As a decode step has them: recorded once, launched often, with other values each time.
TEST_P(CommOnGpus, ARecordingSumsWhatIsThereWhenItIsLaunched) {
  constexpr int64_t kCount = 4096;
  EXPECT_THAT(run_gpus(GetParam(),
                       [&](const Rank& rank) {
                         const device::Tensor in(DType::kF32, {kCount}, rank.executor.memory());
                         const device::Tensor out(DType::kF32, {kCount}, rank.executor.memory());
                         rank.comm.all_reduce(in.view(), out.view(), rank.executor.queue());
                         const auto recording = rank.executor.record([&] {
                           for (int i = 0; i < 20; ++i)
                             rank.comm.all_reduce(in.view(), out.view(), rank.executor.queue());
                         });
                         for (uint64_t round = 0; round < 20; ++round) {
                           const std::vector<float> values = random_values(seed_ + round, rank.comm.rank(), kCount);
                           rank.comm.begin_step(true);
                           rank.executor.memory().upload(in.view().data, values.data(), values.size() * sizeof(float));
                           recording->launch();
                           EXPECT_EQ(rank.read(out.view()), sum_of(seed_ + round, kCount)) << round;
                           rank.comm.end_step();
                         }
                       }),
              Each(""));
}

// Sums of many sizes behind each other, in place: once all ranks have the same, each next sum is twice the one before.
// A rank is late now and then.
TEST_P(CommOnGpus, SumsBehindEachOtherOfManySizesWhoeverIsLate) {
  const std::vector<int64_t> counts = {4096, 524288, 33, 131072, 1, 70001, 262144, 2048, 1000003};
  constexpr int kRounds = 10, kLaunches = 6, kSums = 3;
  EXPECT_THAT(run_gpus(GetParam(),
                       [&](const Rank& rank) {
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
                             rank.executor.memory().upload(tensors[i].view().data, values.data(),
                                                           values.size() * sizeof(float));
                             expected.push_back(sum_of(seed, counts[i]));
                             for (float& value : expected.back()) value = std::ldexp(value, kLaunches * kSums - 1);
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

INSTANTIATE_TEST_SUITE_P(Ways, CommOnGpus, ::testing::Values(Sums::kByNccl, Sums::kByPeers, Sums::kInShares),
                         [](const auto& way) {
                           return way.param == Sums::kByNccl ? "Nccl" : way.param == Sums::kByPeers ? "Peer" : "Shares";
                         });

}  // namespace
}  // namespace tessera::comm
