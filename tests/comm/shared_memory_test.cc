// SPDX-License-Identifier: Apache-2.0
// Memory of every rank that all reach: threads here, processes by the program (tests/apps/ranks_test.py).
#include "comm/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "comm/echo.h"
#include "comm/loopback.h"
#include "comm/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_ranks;

constexpr size_t kBytes = 3 * 4096 + 160;

TEST(SharedMemory, WhatOneRankWritesAllRead) {
  auto ranks = make_loopback(3, 60);
  EXPECT_THAT(run_ranks(ranks,
                        [](Communicator& comm, device::Queue& queue) {
                          std::string why_not;
                          const auto shared =
                              make_shared_memory(comm, device::host_memory(), queue, kBytes, 7, "", why_not);
                          ASSERT_NE(shared, nullptr) << why_not;
                          ASSERT_EQ(shared->world(), 3);
                          const int rank = comm.rank();
                          const uint8_t* own = shared->of(rank);
                          EXPECT_TRUE(std::all_of(own, own + kBytes, [](uint8_t byte) { return byte == 0; }));
                          comm.barrier(queue);
                          // Each writes into the next one's, up to its last byte.
                          std::memset(shared->of((rank + 1) % 3), rank + 1, kBytes);
                          comm.barrier(queue);
                          for (int of = 0; of < 3; ++of) {
                            const uint8_t* part = shared->of(of);
                            const auto writer = static_cast<uint8_t>((of + 2) % 3 + 1);
                            EXPECT_TRUE(std::all_of(part, part + kBytes, [&](uint8_t byte) { return byte == writer; }))
                                << of << " seen by " << rank;
                          }
                          comm.barrier(queue);
                        }),
              Each(""));
}

TEST(SharedMemory, RanksThatMeanSomethingElseSaySo) {
  auto ranks = make_loopback(2, 60);
  const auto errors = run_ranks(ranks, [](Communicator& comm, device::Queue& queue) {
    std::string why_not;
    make_shared_memory(comm, device::host_memory(), queue, kBytes, static_cast<uint64_t>(comm.rank()), "", why_not);
  });
  EXPECT_THAT(errors, Each(HasSubstr("ranks share memory of 12448 bytes (000000000000000")));
}

TEST(SharedMemory, TooMuchOfItIsRefusedOnEveryRankAlike) {
  auto ranks = make_loopback(2, 60);
  std::vector<ErrorCode> codes(2);
  run_ranks(ranks, [&](Communicator& comm, device::Queue& queue) {
    std::string why_not;
    try {
      make_shared_memory(comm, device::host_memory(), queue, size_t{1} << 62, 0, "", why_not);
    } catch (const Error& error) {
      codes[static_cast<size_t>(comm.rank())] = error.code();
      EXPECT_THAT(error.what(), HasSubstr("rank 0: memory that ranks share: "));
    }
  });
  EXPECT_THAT(codes, Each(ErrorCode::kResourceExhausted));
}

// A server's pages are hundreds of them.
TEST(SharedMemory, KeepsNoDescriptor) {
  const auto num_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  auto ranks = make_loopback(2, 60);
  const auto before = num_files();
  EXPECT_THAT(
      run_ranks(ranks,
                [&](Communicator& comm, device::Queue& queue) {
                  std::vector<std::unique_ptr<SharedMemory>> all;
                  std::string why_not;
                  for (int i = 0; i < 8; ++i) {
                    all.push_back(make_shared_memory(comm, device::host_memory(), queue, kBytes, 0, "", why_not));
                    ASSERT_NE(all.back(), nullptr) << why_not;
                  }
                  comm.barrier(queue);
                  if (comm.rank() == 0) EXPECT_EQ(num_files(), before);
                  comm.barrier(queue);
                }),
      Each(""));
}

// What goes with it is one rank's alone; that it has no memory for that all have to know.
TEST(SharedMemory, AFaultOfOneRankIsEverybodys) {
  auto ranks = make_loopback(2, 60);
  const auto errors = run_ranks(ranks, [&](Communicator& comm, device::Queue& queue) {
    std::string why_not;
    make_shared_memory(comm, device::host_memory(), queue, kBytes, 0, comm.rank() == 1 ? "no room for keys" : "",
                       why_not);
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 1: no room for keys")));
}

// An address that leads to something else: another container's process may have the same numbers.
TEST(SharedMemory, AnAddressOfAnotherMachineIsNotTaken) {
  std::string why_not;
  const auto part = make_host_part(kBytes, why_not), other = make_host_part(kBytes, why_not);
  ASSERT_TRUE(part != nullptr && other != nullptr) << why_not;
  std::vector<uint8_t> address = other->address();
  EXPECT_NE(part->reach(address, why_not), nullptr);
  std::vector<uint8_t> forged = address;
  forged.back() ^= 1;  // the number that tells it from others
  EXPECT_EQ(part->reach(forged, why_not), nullptr);
  EXPECT_THAT(why_not, HasSubstr("not of that rank"));
  forged = address;
  forged[16] ^= 64;  // its size
  why_not.clear();
  EXPECT_EQ(part->reach(forged, why_not), nullptr);
  EXPECT_THAT(why_not, HasSubstr("not of that rank"));
  forged = address;
  forged[4] = 0x7F;  // no process has that number
  why_not.clear();
  EXPECT_EQ(part->reach(forged, why_not), nullptr);
  EXPECT_THAT(why_not, HasSubstr("No such file or directory"));
}

TEST(SharedMemory, ARankByItselfFindsItsOwn) {
  device::Queue queue(1);
  const auto comm = make_echo(1, 2);
  std::string why_not;
  const auto shared = make_shared_memory(*comm, device::host_memory(), queue, kBytes, 0, "", why_not);
  ASSERT_NE(shared, nullptr) << why_not;
  EXPECT_EQ(shared->of(0), shared->of(1));
}

}  // namespace
}  // namespace tessera::comm
