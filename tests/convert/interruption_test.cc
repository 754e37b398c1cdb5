// SPDX-License-Identifier: Apache-2.0
// Conversions that are stopped, or whose disk fails, at any point: nothing that looks whole is left, and resuming gives
// the bytes of a conversion that was never stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/test_seams.h"
#include "checkpoint/checkpoint.h"
#include "convert/convert_helpers.h"
#include "convert/work_folder.h"
#include "testing/generated_model.h"
#include "testing/op_harness.h"
#include "testing/temporary_folder.h"

namespace tessera::convert {
namespace {

namespace fs = std::filesystem;
using testing::all_files;
using testing::convert_options;
using ::testing::HasSubstr;

// Asks for a stop after a number of updates.
class Stopper final : public ProgressSink {
 public:
  explicit Stopper(uint64_t updates) : left_(updates) {}
  void begin(std::string_view, uint64_t total, std::string_view) override { total_ = total; }
  void advance(uint64_t amount) override {
    done_ += amount;
    if (left_-- == 0) is_stopped = true;
  }
  void end() override { has_ended = true; }
  std::atomic<bool> is_stopped{false};
  bool has_ended = false;
  uint64_t done_ = 0, total_ = 0;
  uint64_t left_;
};

class Interruption : public testing::RandomTest {
 protected:
  Interruption() {
    fs::create_directory(source());
    testing::write_generated_model(testing::Generated::kT0, source());
    convert(source(), folder_.file("whole"), options(), nullptr, nullptr, nullptr);
  }
  std::string source() const { return folder_.file("in"); }
  std::string out() const { return folder_.file("out"); }
  Options options(Existing existing = Existing::kRefuse) const {
    Options options = convert_options("experts,attention", 250'000);
    options.existing = existing;
    return options;
  }
  // No program takes it for a checkpoint.
  void expect_unfinished() const {
    EXPECT_FALSE(fs::exists(out() + "/config.json"));
    EXPECT_FALSE(fs::exists(out() + "/model.safetensors.index.json"));
  }
  void expect_whole() const { EXPECT_TRUE(all_files(out()) == all_files(folder_.file("whole"))); }

  testing::TemporaryFolder folder_;
};

// A checkpoint that is to be replaced stays as it is until the new one is whole, wherever that stops.
TEST_F(Interruption, WhatIsReplacedStaysUntilThen) {
  Options other = convert_options("shared", 400'000);
  convert(source(), out(), other, nullptr, nullptr, nullptr);
  const auto before = all_files(out());
  Stopper stopper(rng_.below(200));
  EXPECT_THROW(convert(source(), out(), options(Existing::kReplace), nullptr, &stopper, &stopper.is_stopped), Error);
  auto after = all_files(out());
  std::erase_if(after, [](const auto& file) { return file.first.starts_with(kWorkFolderName); });
  EXPECT_TRUE(after == before);
  if (is_unfinished(out())) {
    convert(source(), out(), options(Existing::kResume), nullptr, nullptr, nullptr);
  } else {
    EXPECT_THROW(convert(source(), out(), options(Existing::kResume), nullptr, nullptr, nullptr), Error);
    convert(source(), out(), options(Existing::kReplace), nullptr, nullptr, nullptr);
  }
  expect_whole();
}

TEST_F(Interruption, StoppedAndResumedGivesTheSameBytes) {
  Options trial = options();
  trial.is_trial = true;
  Stopper counter(~uint64_t{0});
  convert(source(), "", trial, nullptr, &counter, nullptr);
  const uint64_t num_updates = ~uint64_t{0} - counter.left_;
  int num_stops = 0;
  size_t most_resumed = 0;
  // First somewhere in the third quarter (a stop wished for at the very end comes too late), then anywhere.
  uint64_t updates = num_updates / 2 + rng_.below(num_updates / 4);
  for (bool is_done = false; !is_done; updates = rng_.below(num_updates)) {
    Stopper stopper(updates);
    try {
      const Result result =
          convert(source(), out(), options(Existing::kResume), nullptr, &stopper, &stopper.is_stopped);
      is_done = true;
      most_resumed = result.num_resumed_shards;
      EXPECT_EQ(stopper.done_, stopper.total_);
      Stopper none(~uint64_t{0});
      const Result whole = convert(source(), folder_.file("again"), options(), nullptr, &none, nullptr);
      EXPECT_EQ(none.done_, none.total_);
      for (size_t f = 0; f < kNumFamilies; ++f) {
        EXPECT_EQ(result.families[f].squared_error, whole.families[f].squared_error);
        EXPECT_EQ(result.families[f].scales, whole.families[f].scales);
      }
    } catch (const Error& error) {
      ASSERT_EQ(static_cast<int>(error.code()), static_cast<int>(ErrorCode::kCancelled)) << error.what();
      expect_unfinished();
      EXPECT_TRUE(stopper.has_ended);
      ASSERT_LT(++num_stops, 100);
    }
  }
  EXPECT_GT(num_stops, 0);
  EXPECT_GT(most_resumed, 0u);
  expect_whole();
}

// Stops when some shards are finished; false where it was done before.
bool stop_midway(const std::string& source, const std::string& out, const Options& options) {
  for (uint64_t updates = 100;; updates += 40) {
    Stopper stopper(updates);
    try {
      convert(source, out, options, nullptr, &stopper, &stopper.is_stopped);
      return false;
    } catch (const Error&) {
      if (fs::exists(out)) return true;
    }
  }
}

TEST_F(Interruption, AnUnfinishedFolderIsRefusedUnlessResumedOrForced) {
  ASSERT_TRUE(stop_midway(source(), out(), options()));
  EXPECT_THAT(testing::convert_error(source(), out(), options(), ErrorCode::kInvalidArgument), HasSubstr("--resume"));
  Options other = options(Existing::kResume);
  other.rule = numeric::Nvfp4WeightRule::kFourOverSix;
  EXPECT_THAT(testing::convert_error(source(), out(), other, ErrorCode::kInvalidArgument), HasSubstr("other options"));
  fs::last_write_time(source() + "/model.safetensors", fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_THAT(testing::convert_error(source(), out(), options(Existing::kResume), ErrorCode::kInvalidArgument),
              HasSubstr("another source"));
  convert(source(), out(), options(Existing::kReplace), nullptr, nullptr, nullptr);
  expect_whole();
}

TEST_F(Interruption, TwoConversionsDoNotShareAFolder) {
  Options replace = options(Existing::kReplace);
  const WorkFolder first(out(), Existing::kRefuse, "0");
  EXPECT_THAT(testing::convert_error(source(), out(), replace, ErrorCode::kInvalidArgument),
              HasSubstr("another conversion is writing here"));
  EXPECT_TRUE(fs::exists(out() + "/" + kWorkFolderName + "/conversion.json"));
}

TEST_F(Interruption, DamagedShardsAndRecordsAreMadeAgain) {
  ASSERT_TRUE(stop_midway(source(), out(), options()));
  const std::string work = out() + "/" + kWorkFolderName + "/";
  std::vector<std::string> shards;
  for (const auto& [name, content] : all_files(work)) {
    if (name.ends_with(".safetensors")) shards.push_back(name);
  }
  ASSERT_FALSE(shards.empty());
  fs::resize_file(work + shards[0], 1000);
  std::ofstream(work + "model-00001-of-00002.safetensors.tmp-1-1") << "left over";
  if (shards.size() > 1) std::ofstream(work + shards[1] + ".json") << "{\"families\": [";
  convert(source(), out(), options(Existing::kResume), nullptr, nullptr, nullptr);
  expect_whole();
}

#ifdef TESSERA_TEST_SEAMS
TEST_F(Interruption, AFailingFileCallAnywhereLeavesNothingThatLooksWhole) {
  seams::fail_file_call(0);
  convert(source(), out(), options(), nullptr, nullptr, nullptr);
  const int64_t total = seams::num_file_calls();
  fs::remove_all(out());
  for (int round = 0; round < 12; ++round) {
    // Anywhere, and then among the last calls, which write what a checkpoint is known by.
    const int64_t first = round < 6 ? 1 : std::max<int64_t>(1, total - 60);
    const auto nth = first + static_cast<int64_t>(rng_.below(static_cast<uint64_t>(total - first + 1)));
    SCOPED_TRACE(nth);
    bool has_failed = false;
    seams::fail_file_call(nth);
    try {
      convert(source(), out(), options(), nullptr, nullptr, nullptr);
    } catch (const Error&) {
      has_failed = true;
    }
    seams::fail_file_call(0);
    if (has_failed) {
      expect_unfinished();
      convert(source(), out(), options(Existing::kResume), nullptr, nullptr, nullptr);
    }
    expect_whole();
    fs::remove_all(out());
  }
}
#endif

}  // namespace
}  // namespace tessera::convert
