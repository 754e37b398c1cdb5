// SPDX-License-Identifier: Apache-2.0
// Collectives through a library that has NCCL's functions: what is called, what is summed, and what happens where it
// fails.
#include "comm/nccl.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "base/error.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "comm/tcp.h"
#include "device/executor.h"
#include "device/memory_space.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_all;
using tessera::testing::run_ranks;
using ::testing::Each;
using ::testing::HasSubstr;

class FakeNccl {
 public:
  FakeNccl() : handle_(dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }
  void set_async_error(int code) const { call<void (*)(int)>("fake_nccl_set_async_error")(code); }
  // An abort waits until it is no longer held, as NCCL's does for recordings that have the communicator.
  void hold_aborts(bool is_held) const { call<void (*)(int)>("fake_nccl_hold_aborts")(is_held ? 1 : 0); }
  void refuse_ranks(bool are_refused) const { call<void (*)(int)>("fake_nccl_refuse_ranks")(are_refused ? 1 : 0); }
  int open_comms() const { return call<int (*)()>("fake_nccl_open_comms")(); }

 private:
  template <class Function>
  Function call(const char* name) const {
    return reinterpret_cast<Function>(dlsym(handle_, name));
  }
  void* handle_;
};

class NcclTest : public ::testing::TestWithParam<int> {
 protected:
  void TearDown() override { fake_.set_async_error(0), fake_.hold_aborts(false), fake_.refuse_ranks(false); }

  std::vector<std::unique_ptr<Communicator>> make(int world, NcclOptions options = {}) {
    options.library = FAKE_NCCL;
    Socket listener = listen_at("127.0.0.1", 0);
    const int port = port_of(listener);
    std::vector<std::unique_ptr<Communicator>> ranks(static_cast<size_t>(world));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank] {
        BootstrapOptions joining;
        joining.place.rank = rank, joining.place.world = world, joining.place.port = port;
        joining.secret = "a secret of the ranks";
        Bootstrap bootstrap(joining, nullptr, nullptr, rank == 0 ? std::move(listener) : Socket());
        ranks[static_cast<size_t>(rank)] = make_nccl(bootstrap, device::host_memory(), options);
        bootstrap.leave();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ranks;
  }

  FakeNccl fake_;
};

// Small and large messages, odd sizes, and a scratch that holds a part of them: the bits of loopback.
TEST_P(NcclTest, GivesTheBitsOfLoopback) {
  const int world = GetParam();
  for (const int64_t count : {1, 37, 70001}) {
    std::vector<std::vector<float>> results[2];
    NcclOptions options;
    options.scratch_bytes = 40000;
    for (const bool is_nccl : {false, true}) {
      auto ranks = is_nccl ? make(world, options) : make_loopback(world);
      results[is_nccl].resize(ranks.size());
      EXPECT_THAT(run_ranks(ranks,
                            [&](Communicator& comm, device::Queue& queue) {
                              results[is_nccl][static_cast<size_t>(comm.rank())] = run_all(comm, queue, count);
                            }),
                  Each(""));
    }
    EXPECT_EQ(results[0], results[1]) << count;
  }
  EXPECT_EQ(fake_.open_comms(), 0);
}

// Connections are made on threads of their own, for which the first calls wait.
TEST_P(NcclTest, SumsAfterItHasBegunToConnect) {
  std::vector<std::vector<float>> results[2];
  for (const bool connects : {false, true}) {
    std::vector<std::unique_ptr<device::Executor>> executors;
    auto ranks = make(GetParam());
    for (const auto& rank : ranks) {
      executors.push_back(device::make_executor({}, 1));
      if (connects) rank->begin_to_connect(*executors.back());
    }
    results[connects].resize(ranks.size());
    EXPECT_THAT(run_ranks(ranks,
                          [&](Communicator& comm, device::Queue& queue) {
                            comm.begin_step(true);
                            results[connects][static_cast<size_t>(comm.rank())] = run_all(comm, queue, 37);
                            comm.end_step();
                          }),
                Each(""));
    ranks.clear();
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(fake_.open_comms(), 0);
}

INSTANTIATE_TEST_SUITE_P(Worlds, NcclTest, ::testing::Values(1, 2, 3, 8));

using NcclFaults = NcclTest;

TEST_F(NcclFaults, AMissingLibraryIsNamed) {
  BootstrapOptions alone;
  alone.secret = "a secret of the ranks";
  Bootstrap bootstrap(alone, nullptr, nullptr);
  NcclOptions options;
  options.library = "libnccl-of-nobody.so.2";
  try {
    make_nccl(bootstrap, device::host_memory(), options);
    ADD_FAILURE() << "a library that is not there";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("NCCL, which several GPUs need, can't be opened: libnccl-of-nobody.so.2"));
  }
}

TEST_F(NcclFaults, ARankThatDoesNotConnectIsMissedByTheNextCall) {
  NcclOptions options;
  options.limit_seconds = 0.3;
  auto ranks = make(2, options);
  const auto executor = device::make_executor({}, 1);
  ranks[0]->begin_to_connect(*executor);
  // Whoever asks meanwhile takes nothing off the limit.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ranks[0]->check();
  device::Queue queue(1);
  try {
    ranks[0]->barrier(queue);
    ADD_FAILURE() << "connections without the other";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 of 2: connecting did not end within 0.3 s"));
  }
  ranks[1]->begin_to_connect(*executor);
  ranks.clear();  // while it waits for the one that gave up
  EXPECT_EQ(fake_.open_comms(), 0);
}

// A rank that never comes: whoever waits in NCCL is freed by the watchdog.
TEST_F(NcclFaults, ACallThatDoesNotEndIsAborted) {
  NcclOptions options;
  options.limit_seconds = 0.3;
  auto ranks = make(2, options);
  std::vector<float> values(4);
  device::Queue queue(1);
  try {
    ranks[0]->all_reduce({values.data(), DType::kF32, {4}}, {values.data(), DType::kF32, {4}}, queue);
    ADD_FAILURE() << "a sum without the other";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 of 2: all_reduce did not end within 0.3 s"));
  }
  EXPECT_THROW(ranks[0]->check(), Error);
  EXPECT_THROW(ranks[0]->barrier(queue), Error);
}

// A replayed step makes no calls: it is timed as a whole, and none begins behind an abort.
TEST_F(NcclFaults, AStepThatDoesNotEndIsAborted) {
  NcclOptions options;
  options.limit_seconds = 0.3;
  auto ranks = make(2, options);
  ranks[0]->begin_step(true);
  ranks[0]->end_step();
  ranks[0]->begin_step(true);
  // As who waits for the queue: it comes back when the communicator is aborted.
  while (fake_.open_comms() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  try {
    ranks[0]->end_step();
    ADD_FAILURE() << "a step that never ended";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 of 2: a step did not end within 0.3 s"));
  }
  EXPECT_THROW(ranks[0]->begin_step(true), Error);
}

// Somebody looks at every output of such a step, and may take long.
TEST_F(NcclFaults, AStepWithoutALimitTakesWhatItTakes) {
  NcclOptions options;
  options.limit_seconds = 0.1;
  auto ranks = make(2, options);
  ranks[0]->begin_step(false);
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  ranks[0]->end_step();
  EXPECT_EQ(fake_.open_comms(), 2);
  ranks[0]->begin_step(true);
  while (fake_.open_comms() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_THROW(ranks[0]->end_step(), Error);
}

// An abort that waits for recordings, which whoever is refused gives back.
TEST_F(NcclFaults, NobodyWaitsForAnAbort) {
  auto ranks = make(2);
  fake_.hold_aborts(true);
  std::thread aborting([&] { ranks[0]->abort("rank 1 is lost"); });
  std::string why;
  while (why.empty()) {
    try {
      ranks[0]->check();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } catch (const Error& error) {
      why = error.what();
    }
  }
  EXPECT_EQ(why, "rank 1 is lost");
  EXPECT_THROW(ranks[0]->begin_step(true), Error);
  EXPECT_EQ(fake_.open_comms(), 2);  // it still waits
  fake_.hold_aborts(false);
  aborting.join();
  EXPECT_EQ(fake_.open_comms(), 1);
}

TEST_F(NcclFaults, ARankThatIsRefusedSaysWhy) {
  fake_.refuse_ranks(true);
  Socket listener = listen_at("127.0.0.1", 0);
  BootstrapOptions joining;
  joining.place.world = 1, joining.place.port = port_of(listener), joining.secret = "a secret of the ranks";
  Bootstrap bootstrap(joining, nullptr, nullptr, std::move(listener));
  NcclOptions options;
  options.library = FAKE_NCCL;
  try {
    make_nccl(bootstrap, device::host_memory(), options);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("ncclCommInitRankConfig: NCCL: "));
  }
}

TEST_F(NcclFaults, AnAsynchronousErrorEndsIt) {
  auto ranks = make(2);
  fake_.set_async_error(3);
  std::string message;
  for (int i = 0; i < 500 && message.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    try {
      ranks[1]->check();
    } catch (const Error& error) {
      message = error.what();
    }
  }
  EXPECT_EQ(message, "rank 1 of 2: between calls: NCCL: internal error");
}

}  // namespace
}  // namespace tessera::comm
