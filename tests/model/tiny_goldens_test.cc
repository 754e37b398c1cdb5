// SPDX-License-Identifier: Apache-2.0
// The trained tiny model against values of independent implementations in f32 x exact: the NVFP4 checkpoint of the
// repository, and the BF16 original where TESSERA_TINY_BF16 names its folder.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/goldens.h"
#include "testing/trace_recorder.h"

namespace tessera {
namespace {

constexpr double kBound = 1e-5;

// Runs one golden prompt: last logits, index scores and selections of the last position, 32 greedy tokens.
void check_prompt(model::Runner& runner, const testing::Goldens& goldens, const std::string& prompt) {
  SCOPED_TRACE(prompt);
  const std::vector<int32_t> ids = goldens.ints(prompt + "input_ids");
  const auto state = runner.new_sequence(static_cast<int64_t>(ids.size()) + 40);
  const auto whole = runner.new_sequence(static_cast<int64_t>(ids.size()));
  testing::TraceRecorder trace({"indexer.scores", "indexer.selection"});
  runner.set_tracer(&trace);
  std::vector<float> logits = testing::feed(runner, *state, ids, model::LogitRows::kAll);
  runner.set_tracer(nullptr);
  const std::vector<float> expected = goldens.floats(prompt + "last_logits");
  EXPECT_TRUE(testing::is_close(std::span(logits).last(expected.size()), expected, kBound));

  for (const std::string layer : {"layer2", "layer4"}) {
    const std::vector<int32_t> top = goldens.ints(prompt + layer + ".index_topk_last");
    const std::string traced = std::string("layers.") + layer.back() + ".attn.indexer.";
    const std::vector<int32_t>& selected = trace.ints(traced + "selection");
    const int64_t top_k = 16;
    ASSERT_GE(static_cast<int64_t>(selected.size()), top_k);
    std::vector<int32_t> last(selected.end() - top_k, selected.end());
    std::erase(last, -1);
    EXPECT_EQ(last, top) << layer;
    const std::vector<float> scores = goldens.floats(prompt + layer + ".index_scores_last");
    EXPECT_TRUE(testing::is_close(std::span(trace.floats(traced + "scores")).last(scores.size()), scores, kBound))
        << layer;
  }

  std::vector<int32_t> greedy;
  std::span<const float> row = std::span(logits).last(static_cast<size_t>(runner.facts().vocab_size));
  for (int step = 0; step < 32; ++step) {
    greedy.push_back(testing::argmax(row));
    logits = testing::feed(runner, *state, {&greedy.back(), 1}, model::LogitRows::kLast);
    row = logits;
  }
  EXPECT_EQ(greedy, goldens.ints(prompt + "greedy_ids"));
}

TEST(TinyGoldens, Nvfp4Checkpoint) {
  const model::LoadedModel loaded = testing::load(testing::tiny_model(), ops::InputMode::kF32, ops::CacheMode::kExact);
  const testing::Goldens goldens(testing::golden_path("tiny-v4-nvfp4.safetensors"));
  for (const int length : {5, 37, 130, 300, 700}) {
    check_prompt(*loaded.runner, goldens, "prompt" + std::to_string(length) + ".");
  }
}

TEST(TinyGoldens, Nvfp4Streams) {
  const model::LoadedModel loaded = testing::load(testing::tiny_model(), ops::InputMode::kF32, ops::CacheMode::kExact);
  const testing::Goldens goldens(testing::golden_path("tiny-v4-nvfp4.safetensors"));
  const std::vector<int32_t> ids = goldens.ints("prompt300.input_ids");
  testing::TraceRecorder trace({".out"});
  loaded.runner->set_tracer(&trace);
  const auto state = loaded.runner->new_sequence(300);
  testing::feed(*loaded.runner, *state, ids, model::LogitRows::kNone);
  const std::vector<int32_t> positions = goldens.ints("prompt300.stream_positions");
  for (int layer = 0; layer < 6; ++layer) {
    const std::vector<float> expected = goldens.floats("prompt300.layer" + std::to_string(layer) + ".streams");
    const std::vector<float>& all = trace.floats("layers." + std::to_string(layer) + ".out");
    const size_t width = expected.size() / positions.size();
    for (size_t i = 0; i < positions.size(); ++i) {
      const std::span<const float> found(all.data() + static_cast<size_t>(positions[i]) * width, width);
      EXPECT_TRUE(testing::is_close(found, std::span(expected).subspan(i * width, width), kBound))
          << "layer " << layer << " position " << positions[i];
    }
  }
}

std::string bf16_folder() {
  const char* folder = std::getenv("TESSERA_TINY_BF16");
  return folder == nullptr ? "" : folder;
}

TEST(TinyGoldens, Bf16Original) {
  const std::string folder = bf16_folder();
  if (folder.empty()) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  const model::LoadedModel loaded = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  const testing::Goldens goldens(folder + "/golden.safetensors");
  for (const int length : {5, 37, 130, 300, 700, 1500}) {
    check_prompt(*loaded.runner, goldens, "prompt" + std::to_string(length) + ".");
  }
}

TEST(TinyGoldens, Bf16OriginalStreams) {
  const std::string folder = bf16_folder();
  if (folder.empty()) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  const model::LoadedModel loaded = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  const testing::Goldens goldens(folder + "/golden-300-streams.safetensors");
  const std::vector<int32_t> ids = goldens.ints("input_ids");
  testing::TraceRecorder trace({".out", "selection"});
  loaded.runner->set_tracer(&trace);
  const auto state = loaded.runner->new_sequence(300);
  const std::vector<float> logits = testing::feed(*loaded.runner, *state, ids, model::LogitRows::kAll);
  EXPECT_TRUE(testing::is_close(logits, goldens.floats("logits"), kBound));
  for (int layer = 0; layer < 6; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    EXPECT_TRUE(testing::is_close(trace.floats("layers." + std::to_string(layer) + ".out"),
                                  goldens.floats(name + ".streams"), kBound))
        << name;
    if (!goldens.has(name + ".index_topk")) continue;
    // The golden lists are unsorted.
    std::vector<int32_t> expected = goldens.ints(name + ".index_topk");
    std::vector<int32_t> found = trace.ints("layers." + std::to_string(layer) + ".attn.indexer.selection");
    ASSERT_EQ(found.size(), expected.size());
    for (size_t t = 0; t < 300; ++t) {
      std::sort(expected.begin() + static_cast<int64_t>(t * 16), expected.begin() + static_cast<int64_t>(t * 16 + 16));
      std::sort(found.begin() + static_cast<int64_t>(t * 16), found.begin() + static_cast<int64_t>(t * 16 + 16));
    }
    EXPECT_EQ(found, expected) << name;
  }
}

}  // namespace
}  // namespace tessera
