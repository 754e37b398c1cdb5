// SPDX-License-Identifier: Apache-2.0
// Traffic as an agent makes it: a long system prompt, then turn after turn the whole conversation again, longer by an
// answer and a tool's result. Nearly all of it must come from the prefix cache, and no answer may tell.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "base/error.h"
#include "base/file.h"
#include "engine/collector.h"
#include "engine/generate.h"
#include "engine/prefix_cache.h"
#include "engine/step_loop.h"
#include "model/model_helpers.h"
#include "testing/goldens.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::engine {
namespace {

constexpr int kTurns = 50;
constexpr int64_t kStepTokens = 256;

struct Shape {
  int64_t system_tokens, answer_tokens, result_tokens;
  std::vector<int> checked_turns;  // whose prompts are run whole, too
};

class StillClock final : public Clock {
 public:
  double now() const override { return 1; }
};

// The bundled model with positions for longer texts than it was trained for.
model::LoadedModel load_with_64k_positions(const testing::TemporaryFolder& folder) {
  std::string config = read_file(testing::tiny_model() + "/config.json", 1 << 20);
  const std::string known = "\"max_position_embeddings\": 4096";
  const size_t at = config.find(known);
  TESSERA_CHECK(at != std::string::npos, "the bundled model's config");
  folder.write("config.json", config.replace(at, known.size(), "\"max_position_embeddings\": 65536"));
  std::filesystem::create_symlink(testing::tiny_model() + "/model.safetensors", folder.file("model.safetensors"));
  return testing::load(folder.path(), ops::InputMode::kA16, ops::CacheMode::kFp8, 2, kStepTokens);
}

class Agent {
 public:
  Agent(model::Runner& runner, const Shape& shape, uint64_t seed)
      : runner_(runner),
        shape_(shape),
        rng_(seed),
        budget_(runner.cache_spec(), int64_t{1} << 30),
        prefixes_(runner, {.budget_bytes = int64_t{1} << 29}),
        loop_(runner, budget_, room_, clock_, {.prefixes = &prefixes_}) {
    system_ = testing::random_ids(rng_, shape.system_tokens, runner.facts().vocab_size);
  }

  // What the cache gives it, of the tokens that it has seen before.
  double run() {
    // Never from a cache: one sequence that sees each token once.
    const int64_t most = shape_.system_tokens + kTurns * (shape_.answer_tokens + shape_.result_tokens);
    const auto line = runner_.new_sequence(most);
    std::vector<int32_t> text = system_;
    std::vector<int64_t> messages;
    int64_t num_replayed = 0, num_cached = 0, num_seen = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      messages.push_back(static_cast<int64_t>(text.size()));
      add(text, testing::random_ids(rng_, shape_.result_tokens, runner_.facts().vocab_size));
      const Request request = ask(text, messages);
      const auto answer = answer_to(request);
      EXPECT_EQ(answer->ids[0], along(*line, request)) << "turn " << turn;
      if (std::count(shape_.checked_turns.begin(), shape_.checked_turns.end(), turn) > 0) {
        EXPECT_EQ(answer->ids[0], alone(request)) << "turn " << turn;
      }
      num_replayed += num_seen, num_cached += answer->outcome.num_cached_tokens;
      EXPECT_LE(answer->outcome.num_cached_tokens, num_seen);
      messages.push_back(static_cast<int64_t>(text.size()));
      add(text, answer->ids[0]);
      num_seen = static_cast<int64_t>(text.size());
    }
    std::cout << text.size() << " tokens after " << kTurns << " turns, " << num_cached << " of " << num_replayed
              << " replayed ones from the cache, " << prefixes_.stats().num_snapshots << " snapshots of "
              << prefixes_.stats().bytes << " bytes\n";
    prefixes_.audit();
    // Another conversation begins with the same system prompt.
    std::vector<int32_t> other = system_;
    add(other, testing::random_ids(rng_, shape_.result_tokens, runner_.facts().vocab_size));
    const Request second = ask(other, {shape_.system_tokens});
    const auto answer = answer_to(second);
    EXPECT_EQ(answer->outcome.num_cached_tokens, shape_.system_tokens);
    EXPECT_EQ(answer->ids[0], alone(second));
    return static_cast<double>(num_cached) / static_cast<double>(num_replayed);
  }

 private:
  static void add(std::vector<int32_t>& text, const std::vector<int32_t>& more) {
    text.insert(text.end(), more.begin(), more.end());
  }
  Request ask(const std::vector<int32_t>& prompt, const std::vector<int64_t>& messages) {
    Request request;
    request.prompt = prompt;
    request.boundaries = messages;
    request.max_tokens = shape_.answer_tokens;
    request.stop_at_end_token = false;
    request.sampling.params.temperature = 1;
    request.sampling.params.seed = rng_.next_u64();
    return request;
  }
  std::shared_ptr<Collector> answer_to(const Request& request) {
    auto sink = std::make_shared<Collector>();
    EXPECT_FALSE(room_.enter(static_cast<int64_t>(request.prompt.size())));
    loop_.accept(++last_id_, request, sink, 0);
    while (loop_.step()) loop_.audit();
    EXPECT_EQ(sink->outcome.error, "");
    return sink;
  }
  std::vector<int32_t> alone(const Request& request) {
    class Nobody final : public GenerateObserver {
     public:
      bool token(int32_t) override { return true; }
    } nobody;
    return generate(runner_, request.prompt,
                    {.max_tokens = request.max_tokens, .sampling = request.sampling, .stop_at_end_token = false},
                    nobody, nullptr)
        .ids;
  }
  std::vector<int32_t> along(model::SequenceState& line, const Request& request) {
    std::vector<int32_t> ids = request.prompt;
    while (static_cast<int64_t>(ids.size() - request.prompt.size()) < request.max_tokens) {
      const std::span<const int32_t> next = std::span(ids).subspan(static_cast<size_t>(line.position()));
      const std::vector<float> rows = testing::feed(runner_, line, next, model::LogitRows::kLast);
      const std::span<const float> row = std::span(rows).last(static_cast<size_t>(runner_.facts().vocab_size));
      ids.push_back(runner_.sample({.logits = row, .params = request.sampling.params, .position = ids.size()}));
    }
    return {ids.begin() + static_cast<std::ptrdiff_t>(request.prompt.size()), ids.end()};
  }

  model::Runner& runner_;
  const Shape shape_;
  Rng rng_;
  std::vector<int32_t> system_;
  ReservedBudget budget_;
  WaitingRoom room_{{}};
  StillClock clock_;
  PrefixCache prefixes_;
  StepLoop loop_;
  RequestId last_id_ = 0;
};

void expect_that_replays_come_from_the_cache(const Shape& shape) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const testing::TemporaryFolder folder;
  const model::LoadedModel loaded = load_with_64k_positions(folder);
  EXPECT_GE(Agent(*loaded.runner, shape, seed).run(), 0.99);
}

TEST(SlowAgent, ReplaysComeFromTheCache) {
  expect_that_replays_come_from_the_cache(
      {.system_tokens = 700, .answer_tokens = 6, .result_tokens = 18, .checked_turns = {49}});
}

TEST(SlowAgent, ReplaysOfALongSystemPromptComeFromTheCache) {
  expect_that_replays_come_from_the_cache(
      {.system_tokens = 25000, .answer_tokens = 30, .result_tokens = 100, .checked_turns = {49}});
}

}  // namespace
}  // namespace tessera::engine
