// SPDX-License-Identifier: Apache-2.0
// The whole model with NVFP4 inputs (a4) on an emulated GPU that says it is a B200, and on one that says it is an RTX
// PRO 6000: maps and experts on its tensor cores, the rest on the portable backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "device/cuda/emulated/capability.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/goldens.h"

namespace tessera {
namespace {

using model::LogitRows;

struct Blackwell {
  int compute_major;
  const char* variant;  // of its backend, of maps and experts
};

class EmulatedBlackwell : public ::testing::TestWithParam<Blackwell> {
 protected:
  EmulatedBlackwell() { device::emulated::set_compute_capability(GetParam().compute_major, 0); }
  ~EmulatedBlackwell() override { device::emulated::set_compute_capability(9, 0); }

  static model::LoadedModel load_on(const char* device) {
    setenv("TESSERA_DEVICE", device, 1);
    return testing::load(testing::tiny_model(), ops::InputMode::kA4, ops::CacheMode::kFp8);
  }
};

// Prompt 63 of tests/goldens/tiny-v4-eval.jsonl, "9*6=", and its answer.
TEST_P(EmulatedBlackwell, GivesTheReferencesGreedyTokens) {
  const auto gpu = load_on("cuda:0"), cpu = load_on("cpu");
  const auto lines_of = [&](const char* op) {
    return std::ranges::count_if(
        gpu.plan, [&](const ops::PlanLine& line) { return line.chosen == GetParam().variant && line.op == op; });
  };
  EXPECT_GT(lines_of("linear"), 20);
  EXPECT_GE(lines_of("moe_experts"), gpu.config.num_layers);
  const std::vector<int32_t> prompt = {0, 3, 32, 17, 29, 36, 4, 6};
  const size_t vocab = static_cast<size_t>(gpu.runner->facts().vocab_size);
  const auto there = gpu.runner->new_sequence(32), here = cpu.runner->new_sequence(32);
  std::vector<int32_t> next = prompt, answer;
  std::vector<float> first_logits;
  constexpr int32_t kEnd = 1;
  while (answer.size() < 6 && (answer.empty() || answer.back() != kEnd)) {
    const std::vector<float> found = testing::feed(*gpu.runner, *there, next, LogitRows::kLast),
                             expected = testing::feed(*cpu.runner, *here, next, LogitRows::kLast);
    if (answer.empty()) first_logits = found;
    std::printf("relative error of the logits %.3g\n", testing::relative_error(found, expected));
    ASSERT_EQ(testing::argmax(found), testing::argmax(expected));
    next = {testing::argmax(expected)};
    answer.push_back(next[0]);
  }
  EXPECT_EQ(answer, std::vector<int32_t>({28, 27, kEnd}));
  // Decode equals prefill: the last token of the prompt by itself.
  const auto split = gpu.runner->new_sequence(32);
  const std::vector<float> logits = testing::feed(*gpu.runner, *split, prompt, LogitRows::kLast, 7);
  EXPECT_TRUE(testing::same_bits(std::span(logits).last(vocab), first_logits));
}

INSTANTIATE_TEST_SUITE_P(Targets, EmulatedBlackwell,
                         ::testing::Values(Blackwell{10, "sm100.tcgen05"}, Blackwell{12, "sm120.block_scaled"}),
                         [](const auto& test) { return "Compute" + std::to_string(test.param.compute_major) + "0"; });

}  // namespace
}  // namespace tessera
