// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/read_ahead.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "base/rng.h"
#include "testing/seed.h"

namespace tessera::checkpoint {

namespace {

// What was asked for, seen from the loader's thread.
class Asked final : public ReadAheadSink {
 public:
  void will_read(const FilePart& part) override {
    const std::lock_guard lock(mutex_);
    parts_.push_back(part);
    num_bytes_ += part.num_bytes;
    most_ = std::max(most_, num_bytes_ - std::min(num_bytes_, used_));
    changed_.notify_all();
  }
  // Before ReadAhead::used() is told: no ask counts as early that was allowed.
  void use(uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    used_ += num_bytes;
  }
  void wait_for(uint64_t num_bytes) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_bytes_ >= num_bytes; });
  }
  uint64_t most() {
    const std::lock_guard lock(mutex_);
    return most_;
  }
  std::vector<FilePart> parts() {
    const std::lock_guard lock(mutex_);
    return parts_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<FilePart> parts_;
  uint64_t num_bytes_ = 0, used_ = 0, most_ = 0;
};

TEST(ReadAhead, AsksForEveryByteInOrderAndStaysInItsWindow) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  std::vector<FilePart> parts;
  uint64_t total = 0;
  for (int i = 0; i < 40; ++i) {
    const uint64_t num_bytes = rng.below(4) == 0 ? 0 : rng.below(rng.below(2) == 0 ? 100 : 20 << 20);
    parts.push_back({nullptr, rng.below(1 << 30), num_bytes});
    total += num_bytes;
  }
  const uint64_t window = (8 << 20) + rng.below(32 << 20);
  Asked asked;
  ReadAhead ahead(parts, window, &asked);
  for (uint64_t used = 0; used < total;) {
    const uint64_t num_bytes = std::min(total - used, 1 + rng.below(3 << 20));
    asked.use(num_bytes);
    ahead.used(num_bytes);
    used += num_bytes;
  }
  asked.wait_for(total);
  EXPECT_LE(asked.most(), window);
  // Pieces of a part follow each other without a gap.
  const std::vector<FilePart> found = asked.parts();
  size_t at = 0;
  for (const FilePart& part : parts) {
    for (uint64_t done = 0; done < part.num_bytes; done += found[at++].num_bytes) {
      ASSERT_LT(at, found.size());
      EXPECT_EQ(found[at].offset, part.offset + done);
    }
  }
  EXPECT_EQ(at, found.size());
}

TEST(ReadAhead, AsksForTheWindowBeforeAnythingIsRead) {
  Asked asked;
  const ReadAhead ahead({{nullptr, 5, 100 << 20}}, 12 << 20, &asked);
  asked.wait_for(12 << 20);
  EXPECT_EQ(asked.most(), 12 << 20);
}

TEST(ReadAhead, EndsWhileItWaits) {
  Asked asked;
  { const ReadAhead ahead({{nullptr, 0, 10}}, 9, &asked); }
  EXPECT_TRUE(asked.parts().empty());
}

}  // namespace

}  // namespace tessera::checkpoint
