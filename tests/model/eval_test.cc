// SPDX-License-Identifier: Apache-2.0
// The 474 held-out prompts of the tiny model: right answers per task, and equality with an independent implementation's
// greedy tokens. A prompt's answer counts only with its end token.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>

#include "base/json.h"
#include "model/model_helpers.h"
#include "testing/goldens.h"
#include "testing/seed.h"

namespace tessera {
namespace {

struct Prompt {
  int64_t id = 0;
  std::string task, expected;
  std::vector<int32_t> ids, golden_ids;
};

std::vector<Prompt> read_prompts() {
  std::ifstream file(testing::golden_path("tiny-v4-eval.jsonl"));
  std::vector<Prompt> prompts;
  for (std::string line; std::getline(file, line);) {
    const Json json = Json::parse(line, "tiny-v4-eval.jsonl");
    const JsonCursor root(json, "tiny-v4-eval.jsonl");
    const auto ids = [&](const char* key) {
      std::vector<int32_t> out;
      for (const JsonCursor& id : root.at(key).elements()) out.push_back(static_cast<int32_t>(id.integer(0, 1023)));
      return out;
    };
    prompts.push_back({root.at("id").integer(0, 1 << 20), root.at("task").string(), root.at("expected").string(),
                       ids("prompt_ids"), ids("hf_fp32_ids")});
  }
  return prompts;
}

// Greedy continuation up to the end token, and each step's lead of the best logit over the second.
struct Answer {
  std::vector<int32_t> ids;
  std::vector<float> gaps;
};

Answer answer(model::Runner& runner, const Prompt& prompt, size_t max_tokens) {
  const auto state = runner.new_sequence(static_cast<int64_t>(prompt.ids.size() + max_tokens));
  std::vector<float> row = testing::feed(runner, *state, prompt.ids, model::LogitRows::kLast);
  row.erase(row.begin(), row.end() - runner.facts().vocab_size);
  Answer out;
  while (out.ids.size() < max_tokens) {
    const int32_t best = testing::argmax(row);
    float second = -INFINITY;
    for (size_t i = 0; i < row.size(); ++i) {
      if (static_cast<int32_t>(i) != best) second = std::max(second, row[i]);
    }
    out.ids.push_back(best);
    out.gaps.push_back(row[static_cast<size_t>(best)] - second);
    if (best == 1) break;
    row = testing::feed(runner, *state, {&best, 1}, model::LogitRows::kLast);
  }
  return out;
}

struct Score {
  int right = 0, total = 0;
  std::map<std::string, std::pair<int, int>> by_task;
};

// An answer is right where its text is the expected one and it ends with the end token.
Score evaluate(model::Runner& runner, const std::vector<Prompt>& prompts, size_t stride,
               const std::vector<std::string>& bytes) {
  Score score;
  for (size_t i = 0; i < prompts.size(); i += stride) {
    const Answer got = answer(runner, prompts[i], 64);
    std::string text;
    for (size_t t = 0; t + 1 < got.ids.size(); ++t) text += bytes[static_cast<size_t>(got.ids[t])];
    const bool is_right = got.ids.back() == 1 && text == prompts[i].expected;
    score.right += is_right;
    ++score.total;
    auto& task = score.by_task[prompts[i].task];
    task.first += is_right;
    ++task.second;
  }
  return score;
}

// Bytes of every token, read from the vocabulary file itself.
std::vector<std::string> token_bytes() {
  const std::string path = testing::tiny_model() + "/tokenizer.json";
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const Json json = Json::parse(text, path);
  std::vector<std::string> bytes(1024);
  for (const auto& [token, id] : JsonCursor(json, path).at("model").at("vocab").members()) {
    // Within ASCII the byte alphabet is the text itself, but for the space (U+0120) and the line end (U+010A).
    std::string plain;
    for (size_t i = 0; i < token.size(); ++i) {
      if (token.compare(i, 2, "\u0120") == 0) {
        plain += ' ', ++i;
      } else if (token.compare(i, 2, "\u010A") == 0) {
        plain += '\n', ++i;
      } else {
        plain += token[i];
      }
    }
    bytes[static_cast<size_t>(id.integer(0, 1023))] = plain;
  }
  return bytes;
}

void report(const char* what, const Score& score) {
  std::printf("%s: %d of %d right;", what, score.right, score.total);
  for (const auto& [task, counts] : score.by_task) std::printf(" %s %d/%d", task.c_str(), counts.first, counts.second);
  std::printf("\n");
}

// Every 20th prompt in every mode; the thresholds leave room for one prompt more than the golden run misses.
TEST(Eval, SomePromptsInEveryMode) {
  const std::vector<Prompt> prompts = read_prompts();
  ASSERT_EQ(prompts.size(), 474u);
  const std::vector<std::string> bytes = token_bytes();
  for (const auto input : {ops::InputMode::kF32, ops::InputMode::kA16, ops::InputMode::kA8, ops::InputMode::kA4}) {
    for (const auto cache : {ops::CacheMode::kExact, ops::CacheMode::kFp8}) {
      const auto loaded = testing::load(testing::tiny_model(), input, cache);
      const Score score = evaluate(*loaded.runner, prompts, 20, bytes);
      report(loaded.runner->facts().precision.c_str(), score);
      const bool is_four_bit = input == ops::InputMode::kA4;
      EXPECT_GE(score.right, score.total - (is_four_bit ? 2 : 1)) << loaded.runner->facts().precision;
    }
  }
}

void check_whole(const std::string& folder, ops::InputMode input, ops::CacheMode cache, int at_least) {
  const auto loaded = testing::load(folder, input, cache);
  const Score score = evaluate(*loaded.runner, read_prompts(), 1, token_bytes());
  report(loaded.runner->facts().precision.c_str(), score);
  EXPECT_GE(score.right, at_least);
}

TEST(SlowEval, AllPromptsA16Exact) {
  check_whole(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kExact, 455);
}
TEST(SlowEval, AllPromptsA16Fp8) {
  check_whole(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8, 455);
}

TEST(SlowEval, AllPromptsA8Fp8) {
  check_whole(testing::tiny_model(), ops::InputMode::kA8, ops::CacheMode::kFp8, 450);
}
// Four-bit activations cost this small model some answers that hang on one undecided token.
TEST(SlowEval, AllPromptsA4Fp8) {
  check_whole(testing::tiny_model(), ops::InputMode::kA4, ops::CacheMode::kFp8, 440);
}
// The independent implementation has 458.
TEST(SlowEval, AllPromptsOfTheBf16Original) {
  const char* folder = std::getenv("TESSERA_TINY_BF16");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  check_whole(folder, ops::InputMode::kA16, ops::CacheMode::kExact, 455);
}

// In FP32, which is slow, each run takes every third prompt from another one on.
std::vector<Prompt> some_prompts() {
  constexpr size_t kStride = 3;
  const std::vector<Prompt> all = read_prompts();
  std::vector<Prompt> some;
  for (size_t i = fresh_seed() % kStride; i < all.size(); i += kStride) some.push_back(all[i]);
  return some;
}

// f32 x exact against the greedy ids of Hugging Face transformers in FP32 on the BF16 model. Differences are listed
// with the lead of the best logit over the second where the answers part; returns how many have a lead above
// `explained`.
int count_unexplained(const std::string& folder, float explained) {
  const auto loaded = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  int different = 0, unexplained = 0;
  for (const Prompt& prompt : some_prompts()) {
    const Answer got = answer(*loaded.runner, prompt, prompt.golden_ids.size());
    if (got.ids == prompt.golden_ids) continue;
    size_t at = 0;
    while (at < got.ids.size() && got.ids[at] == prompt.golden_ids[at]) ++at;
    const float gap = at < got.gaps.size() ? got.gaps[at] : INFINITY;
    ++different;
    unexplained += gap > explained;
    std::printf("prompt %d (%s): differs at step %zu, top-2 gap %.4f\n", static_cast<int>(prompt.id),
                prompt.task.c_str(), at, static_cast<double>(gap));
  }
  std::printf("%d prompts differ, %d by a gap above %g\n", different, unexplained, static_cast<double>(explained));
  return unexplained;
}

// The same weights: nothing but FP32 noise may part the answers.
TEST(SlowEval, GreedyIdsOfTheBf16Original) {
  const char* folder = std::getenv("TESSERA_TINY_BF16");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  EXPECT_EQ(count_unexplained(folder, 1e-4f), 0);
}

// Logits behind `ids`.
std::vector<float> last_row(model::Runner& runner, const std::vector<int32_t>& ids) {
  const auto state = runner.new_sequence(static_cast<int64_t>(ids.size()));
  const std::vector<float> rows = testing::feed(runner, *state, ids, model::LogitRows::kLast);
  return {rows.end() - runner.facts().vocab_size, rows.end()};
}

// Other weights: NVFP4 is about 10 % from the original. Answers part only where the lead of the best logit is at most
// twice the largest distance of a logit from the original's (docs/contracts/numerics.md, section 5).
TEST(SlowEval, GreedyIdsOfTheNvfp4Model) {
  const char* folder = std::getenv("TESSERA_TINY_BF16");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  const auto loaded = testing::load(testing::tiny_model(), ops::InputMode::kF32, ops::CacheMode::kExact);
  const auto original = testing::load(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  int different = 0;
  for (const Prompt& prompt : some_prompts()) {
    const Answer got = answer(*loaded.runner, prompt, prompt.golden_ids.size());
    if (got.ids == prompt.golden_ids) continue;
    size_t at = 0;
    while (at < got.ids.size() && got.ids[at] == prompt.golden_ids[at]) ++at;
    ASSERT_LT(at, got.gaps.size());
    std::vector<int32_t> ids = prompt.ids;
    ids.insert(ids.end(), got.ids.begin(), got.ids.begin() + static_cast<std::ptrdiff_t>(at));
    const std::vector<float> a = last_row(*loaded.runner, ids), b = last_row(*original.runner, ids);
    float distance = 0;
    for (size_t i = 0; i < a.size(); ++i) distance = std::max(distance, std::fabs(a[i] - b[i]));
    ++different;
    std::printf("prompt %d (%s): differs at step %zu, top-2 gap %.3f, largest logit distance %.3f\n",
                static_cast<int>(prompt.id), prompt.task.c_str(), at, static_cast<double>(got.gaps[at]),
                static_cast<double>(distance));
    EXPECT_LE(got.gaps[at], 2 * distance) << "prompt " << prompt.id;
  }
  std::printf("%d prompts differ\n", different);
  EXPECT_LE(different, 10);
}

// The numpy implementation's figure for these weights and this text, FP32.
constexpr double kNumpyPerplexity = 42.30;

// Perplexity per token of 24 held-out segments of 512 tokens.
double perplexity(const std::string& folder, ops::InputMode input, ops::CacheMode cache) {
  const auto loaded = testing::load(folder, input, cache);
  model::Runner& runner = *loaded.runner;
  std::ifstream file(testing::golden_path("tiny-v4-heldout.json"));
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const Json json = Json::parse(text, "tiny-v4-heldout.json");
  double nats = 0;
  int64_t count = 0;
  for (const JsonCursor& segment : JsonCursor(json, "tiny-v4-heldout.json").at("segments").elements()) {
    std::vector<int32_t> ids;
    for (const JsonCursor& id : segment.elements()) ids.push_back(static_cast<int32_t>(id.integer(0, 1023)));
    const auto state = runner.new_sequence(static_cast<int64_t>(ids.size()));
    const std::vector<float> logits = testing::feed(runner, *state, ids, model::LogitRows::kAll);
    for (size_t t = 0; t + 1 < ids.size(); ++t) {
      const float* row = logits.data() + t * 1024;
      const double max = *std::max_element(row, row + 1024);
      double sum = 0;
      for (int i = 0; i < 1024; ++i) sum += std::exp(static_cast<double>(row[i]) - max);
      nats += max + std::log(sum) - static_cast<double>(row[ids[t + 1]]);
      ++count;
    }
  }
  return std::exp(nats / static_cast<double>(count));
}

TEST(SlowEval, HeldOutPerplexity) {
  const double exact = perplexity(testing::tiny_model(), ops::InputMode::kF32, ops::CacheMode::kExact);
  const double usual = perplexity(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8);
  std::printf("perplexity per token: f32 x exact %.3f, a16 x fp8 %.3f\n", exact, usual);
  EXPECT_NEAR(exact, kNumpyPerplexity, 0.005);
  EXPECT_NEAR(usual, kNumpyPerplexity, 0.3);
}

TEST(SlowEval, HeldOutPerplexityOfTheBf16Original) {
  const char* folder = std::getenv("TESSERA_TINY_BF16");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_TINY_BF16 does not name the BF16 model's folder";
  const double exact = perplexity(folder, ops::InputMode::kF32, ops::CacheMode::kExact);
  std::printf("perplexity per token of the BF16 original: %.3f\n", exact);
  EXPECT_NEAR(exact, 41.91, 0.01);
}

}  // namespace
}  // namespace tessera
