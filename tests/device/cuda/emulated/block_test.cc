// SPDX-License-Identifier: Apache-2.0
// Clusters of the emulated GPU: a kernel that leaves one of its barriers out is noticed with most seeds, whichever it
// is and though each block waits for itself there; with the same seed the same happens.
#include "device/cuda/emulated/block.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

#include "device/cuda/emulated/capability.h"

namespace tessera::device::emulated {
namespace {

constexpr int kThreads = 8, kParts = 3, kSeeds = 100;

enum class Meeting { kNone, kBegin, kGiven, kRead, kTold, kEnd };

struct Shared {
  int given[8];  // by block
  int total;
};

// Blocks give each other a number for each part, add up those they were given, and look at the next block's total.
class Exchange final : public ThreadCode {
 public:
  // num_steps: of each block by itself between two meetings.
  Exchange(Meeting left_out, int num_blocks, int num_steps, int* found)
      : left_out_(left_out), blocks_(num_blocks), steps_(num_steps), found_(found) {}

  void run() const override {
    Shared& own = *static_cast<Shared*>(dynamic_shared());
    const int rank = current.rank, thread = current.index();
    if (thread == 0) own.total = 0;
    meet(Meeting::kBegin);
    for (int part = 0; part < kParts; ++part) {
      if (thread < blocks_) static_cast<Shared*>(dynamic_shared_of(thread))->given[rank] = number(part, rank);
      meet(Meeting::kGiven);
      step();
      if (thread == 0) {
        for (int i = 0; i < blocks_; ++i) own.total += own.given[i];
      }
      step();
      meet(Meeting::kRead);
    }
    meet(Meeting::kTold);
    const int next = static_cast<Shared*>(dynamic_shared_of((rank + 1) % blocks_))->total;
    if (thread == 0) found_[rank] = next;
    meet(Meeting::kEnd);
  }

  int total() const {
    int sum = 0;
    for (int part = 0; part < kParts; ++part) {
      for (int rank = 0; rank < blocks_; ++rank) sum += number(part, rank);
    }
    return sum;
  }

 private:
  static int number(int part, int rank) { return 1 << (3 * part) << rank; }
  void step() const {
    for (int i = 0; i < steps_; ++i) sync_block(Site::current());
  }
  void meet(Meeting meeting) const {
    if (meeting != left_out_) return sync_cluster(Site::current());
    sync_block(Site::current());
  }

  Meeting left_out_;
  int blocks_, steps_;
  int* found_;
};

// What `seed` makes of it; empty: all is as it should be.
std::string fault_of(Meeting left_out, int num_blocks, int num_steps, uint32_t seed) {
  std::array<int, 8> found{};
  const Exchange exchange(left_out, num_blocks, num_steps, found.data());
  seed_chance(seed);
  ::testing::internal::CaptureStderr();
  const bool is_sound =
      run_grid(exchange, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), sizeof(Shared), num_blocks);
  const std::string said = ::testing::internal::GetCapturedStderr();
  if (!is_sound) return said;
  std::string wrong;
  for (int rank = 0; rank < num_blocks; ++rank) {
    const int sum = found[static_cast<size_t>(rank)];
    if (sum != exchange.total()) wrong += "block " + std::to_string(rank) + " found " + std::to_string(sum) + "\n";
  }
  return wrong;
}

int faults_of(Meeting left_out, int num_blocks, int num_steps) {
  int count = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed)
    count += fault_of(left_out, num_blocks, num_steps, seed).empty() ? 0 : 1;
  return count;
}

TEST(EmulatedCluster, WhoMeetsWhereTheyHaveToIsRight) {
  for (const int num_blocks : {1, 2, 4, 8}) EXPECT_EQ(faults_of(Meeting::kNone, num_blocks, 20), 0);
}

TEST(EmulatedCluster, AMissingMeetingIsNoticedWithMostSeeds) {
  for (const auto& [num_blocks, num_steps] : {std::pair{2, 1}, {4, 1}, {8, 1}, {2, 100}, {4, 100}}) {
    SCOPED_TRACE(std::to_string(num_blocks) + " blocks, " + std::to_string(num_steps) + " steps");
    EXPECT_EQ(faults_of(Meeting::kBegin, num_blocks, num_steps), kSeeds);
    for (const Meeting one : {Meeting::kGiven, Meeting::kRead, Meeting::kEnd}) {
      EXPECT_GE(faults_of(one, num_blocks, num_steps), kSeeds * 3 / 4) << static_cast<int>(one);
    }
    // Behind the last part the cluster has just met: another meeting adds nothing.
    EXPECT_EQ(faults_of(Meeting::kTold, num_blocks, num_steps), 0);
  }
}

TEST(EmulatedCluster, ASeedRepeats) {
  int num_kinds = 0;
  std::string last;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    const std::string fault = fault_of(Meeting::kRead, 4, 1, seed);
    EXPECT_EQ(fault_of(Meeting::kRead, 4, 1, seed), fault) << seed;
    num_kinds += fault != last ? 1 : 0;
    last = fault;
  }
  EXPECT_GT(num_kinds, kSeeds / 10);  // other seeds, other orders
}

}  // namespace
}  // namespace tessera::device::emulated
