// SPDX-License-Identifier: Apache-2.0
// The whole model with NVFP4 inputs (a4) on an emulated GPU that says it is a B200, and on one that says it is an RTX
// PRO 6000: maps and experts on its tensor cores, the rest on the portable backend. Built with TESSERA_SM100_EMULATED
// or TESSERA_SM120_EMULATED the same on a Hopper GPU, where such products are in software.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/goldens.h"
#include "testing/gpu_stage.h"

#ifdef TESSERA_CUDA_EMULATED
#include "device/cuda/emulated/capability.h"
#endif

namespace tessera {
namespace {

using model::LogitRows;

struct Blackwell {
  int compute_major;
  const char* variant;  // of its backend, of maps and experts
};

class EmulatedBlackwell : public ::testing::TestWithParam<Blackwell> {
 protected:
#ifdef TESSERA_CUDA_EMULATED
  EmulatedBlackwell() {
    device::emulated::set_compute_capability(GetParam().compute_major, 0);
  }
#endif
  ~EmulatedBlackwell() override {
    unsetenv("TESSERA_BACKENDS");
#ifdef TESSERA_CUDA_EMULATED
    device::emulated::set_compute_capability(9, 0);
#endif
  }
  void SetUp() override {
    std::string why_not;
    if (!testing::find_test_gpu(why_not).has_value()) GTEST_SKIP() << why_not;
  }

  // On a GPU with the test's backend and the portable one alone: a build may have both in software for one GPU.
  static model::LoadedModel load_on(const std::string& device) {
    const std::string variant = GetParam().variant;
    setenv("TESSERA_DEVICE", device.c_str(), 1);
    setenv("TESSERA_BACKENDS", device == "cpu" ? "" : ("cuda," + variant.substr(0, variant.find('.'))).c_str(), 1);
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
  const size_t vocab = static_cast<size_t>(gpu.runner->facts().vocab_size);
  const std::vector<int32_t> prompt = {0, 3, 32, 17, 29, 36, 4, 6};
  constexpr int32_t kEnd = 1;
  const auto there = gpu.runner->new_sequence(32), whole = gpu.runner->new_sequence(32),
             here = cpu.runner->new_sequence(32);
  std::vector<int32_t> ids = prompt;
  std::vector<float> rows;
  for (size_t fed = 0; ids.size() < prompt.size() + 6 && (fed == 0 || ids.back() != kEnd);) {
    const std::span<const int32_t> next = std::span(ids).subspan(fed);
    const std::vector<float> found = testing::feed(*gpu.runner, *there, next, LogitRows::kAll),
                             expected = testing::feed(*cpu.runner, *here, next, LogitRows::kAll);
    fed = ids.size();
    // 0.0007 was seen: sums differ in their last bits, and then a rounding to BF16 falls the other way.
    EXPECT_TRUE(testing::is_close(found, expected, 5e-3));
    for (size_t at = 0; at < found.size(); at += vocab) {
      EXPECT_EQ(testing::argmax(std::span(found).subspan(at, vocab)),
                testing::argmax(std::span(expected).subspan(at, vocab)));
    }
    rows.insert(rows.end(), found.begin(), found.end());
    ids.push_back(testing::argmax(std::span(expected).last(vocab)));
  }
  EXPECT_EQ(std::vector<int32_t>(ids.begin() + static_cast<int64_t>(prompt.size()), ids.end()),
            std::vector<int32_t>({28, 27, kEnd}));
  // Decode equals prefill.
  ids.pop_back();
  EXPECT_TRUE(testing::same_bits(testing::feed(*gpu.runner, *whole, ids, LogitRows::kAll), rows));
}

// Prompts of tests/goldens/tiny-v4-eval.jsonl: 1, 44, 63, 66, 471, 35, 131, 123.
const std::vector<std::vector<int32_t>> kPrompts = {{0, 3, 24, 18, 23, 36, 4, 6}, {0, 3, 29, 20, 28, 36, 4, 6},
                                                    {0, 3, 32, 17, 29, 36, 4, 6}, {0, 3, 26, 17, 28, 36, 4, 6},
                                                    {0, 3, 47, 80, 4, 6},         {0, 3, 28, 20, 24, 36, 4, 6},
                                                    {0, 3, 458, 415, 21, 4, 6},   {0, 3, 458, 351, 21, 4, 6}};

// A ragged prefill, then recorded steps of eight rows. The same greedy tokens as the CPU, and each sequence has the
// bits that it has alone.
class SlowEmulatedBlackwell : public EmulatedBlackwell {};

TEST_P(SlowEmulatedBlackwell, EightSequencesAnswerAsTheReferenceDoesAndAsAlone) {
  constexpr int kSteps = 3;
  const auto gpu = load_on("cuda:0"), cpu = load_on("cpu");
  const size_t vocab = static_cast<size_t>(gpu.runner->facts().vocab_size);
  const auto run = [&](model::Runner& runner, std::span<const std::vector<int32_t>> texts,
                       std::vector<std::vector<float>>& rows) {
    std::vector<std::unique_ptr<model::SequenceState>> states;
    std::vector<std::vector<int32_t>> next(texts.begin(), texts.end()), answers(texts.size());
    rows.assign(texts.size(), {});
    for (size_t i = 0; i < texts.size(); ++i) states.push_back(runner.new_sequence(16));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<model::SequenceSlice> slices;
      for (size_t i = 0; i < texts.size(); ++i) slices.push_back({states[i].get(), next[i], LogitRows::kLast});
      const float* logits = runner.step(slices).as<float>();
      for (size_t i = 0; i < texts.size(); ++i, logits += vocab) {
        rows[i].insert(rows[i].end(), logits, logits + vocab);
        answers[i].push_back(testing::argmax(std::span(logits, vocab)));
        next[i] = {answers[i].back()};
      }
    }
    return answers;
  };
  std::vector<std::vector<float>> together, expected, alone;
  const auto answers = run(*gpu.runner, kPrompts, together);
  EXPECT_EQ(answers, run(*cpu.runner, kPrompts, expected));
  for (size_t i = 0; i < kPrompts.size(); ++i) {
    // Where two experts are nearly as good a rounding chooses: 0.08 was seen.
    EXPECT_TRUE(testing::is_close(together[i], expected[i], 0.2)) << "sequence " << i;
    EXPECT_EQ(run(*gpu.runner, std::span(kPrompts).subspan(i, 1), alone).front(), answers[i]);
    EXPECT_TRUE(testing::same_bits(alone.front(), together[i])) << "sequence " << i;
  }
}

std::vector<Blackwell> targets() {
  std::vector<Blackwell> all;
#if defined(TESSERA_CUDA_EMULATED) || defined(TESSERA_SM100_EMULATED)
  all.push_back({10, "sm100.tcgen05"});
#endif
#if defined(TESSERA_CUDA_EMULATED) || defined(TESSERA_SM120_EMULATED)
  all.push_back({12, "sm120.block_scaled"});
#endif
  return all;
}
std::string name_of(const ::testing::TestParamInfo<Blackwell>& test) {
  return "Compute" + std::to_string(test.param.compute_major) + "0";
}

INSTANTIATE_TEST_SUITE_P(Targets, SlowEmulatedBlackwell, ::testing::ValuesIn(targets()), name_of);
INSTANTIATE_TEST_SUITE_P(Targets, EmulatedBlackwell, ::testing::ValuesIn(targets()), name_of);

}  // namespace
}  // namespace tessera
