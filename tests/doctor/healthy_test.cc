// SPDX-License-Identifier: Apache-2.0
// Sound checkpoints get a clean verdict, and random weights the words "cannot judge".
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "backends/registry.h"
#include "doctor/deep_check.h"
#include "testing/generated_model.h"
#include "testing/temporary_folder.h"
#include "testing/test_machine.h"

namespace tessera::doctor {

namespace {

DeepReport examine(const std::string& folder, ops::Precision mode, int64_t max_tokens) {
  DeepOptions options;
  options.mode = mode;
  options.max_tokens = max_tokens;
  return check_deep(folder, options, backends::all_backends(), testing::test_machine(), nullptr);
}

constexpr ops::Precision kExact{ops::InputMode::kF32, ops::CacheMode::kExact};

void expect_no_fault(const DeepReport& report) {
  for (const Finding& finding : report.findings) {
    EXPECT_NE(finding.severity, Severity::kFault) << finding.kind << " " << finding.where << ": " << finding.evidence;
  }
}

void expect_healthy(const DeepReport& report) {
  expect_no_fault(report);
  EXPECT_TRUE(report.can_judge_weights);
  EXPECT_TRUE(report.can_judge_text);
  EXPECT_EQ(report.verdict.find("Healthy"), 0u) << report.verdict;
  ASSERT_TRUE(report.surprise.has_value());
  EXPECT_LT(*report.surprise, 0.5);
}

TEST(DoctorHealthy, BundledModel) {
  const DeepReport report =
      examine(std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4", {ops::InputMode::kA16, ops::CacheMode::kFp8}, 140);
  expect_healthy(report);
  ASSERT_EQ(report.layers.size(), 6u);
  ASSERT_TRUE(report.mode_surprise.has_value());
  EXPECT_NEAR(*report.mode_surprise, *report.surprise, 0.1);
  for (const LayerReport& layer : report.layers) {
    EXPECT_GT(layer.experts_hit, 4);
    EXPECT_GT(layer.stream_rms, 0);
    ASSERT_FALSE(layer.worst.empty());
    // BF16 and FP8 round, and nothing more.
    EXPECT_GT(layer.worst.front().relative, 1e-4);
    EXPECT_LT(layer.worst.front().relative, 0.3) << layer.worst.front().name;
  }
}

TEST(DoctorHealthy, OriginalInBf16) {
  const char* folder = std::getenv("TESSERA_TINY_BF16");
  if (folder == nullptr || !std::filesystem::exists(folder)) GTEST_SKIP() << "TESSERA_TINY_BF16 is not set";
  expect_healthy(examine(folder, kExact, 64));
}

TEST(DoctorHealthy, RandomWeightsCannotBeJudged) {
  const testing::TemporaryFolder folder;
  testing::write_generated_model(testing::Generated::kT0, folder.path());
  const DeepReport report = examine(folder.path(), kExact, 32);
  expect_no_fault(report);
  EXPECT_FALSE(report.can_judge_weights);
  EXPECT_FALSE(report.can_judge_text);
  EXPECT_NE(report.verdict.find("annot judge"), std::string::npos) << report.verdict;
}

TEST(DoctorHealthy, RandomWeightsInEveryReadableLayout) {
  const std::string data = testing::shared_data();
  if (data.empty()) GTEST_SKIP() << "no shared data";
  for (const auto& item : std::filesystem::directory_iterator(data + "/formats")) {
    if (!item.is_directory()) continue;
    SCOPED_TRACE(item.path().string());
    const DeepReport report = examine(item.path().string(), kExact, 16);
    expect_no_fault(report);
    EXPECT_FALSE(report.can_judge_weights);
    EXPECT_TRUE(report.surprise.has_value()) << "it ran";
  }
}

}  // namespace

}  // namespace tessera::doctor
