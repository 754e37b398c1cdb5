// SPDX-License-Identifier: Apache-2.0
// The engine on the bundled model: whatever runs beside a request, and however often it is preempted, it gets the
// tokens and log-probabilities that generate() gives it alone, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "engine/collector.h"
#include "engine/generate.h"
#include "engine/hash_runner.h"
#include "engine/logprobs.h"
#include "engine/prefix_cache.h"
#include "model/model_helpers.h"
#include "model/sequence_caches.h"
#include "testing/goldens.h"
#include "testing/seed.h"

namespace tessera::engine {
namespace {

constexpr int64_t kStepTokens = 16;
constexpr int kThreads = 4;
constexpr int32_t kBanned = 11;  // by a mask here, by a bias in generate(), which must come to the same

struct Expected {
  std::vector<int32_t> ids;
  FinishReason reason = FinishReason::kNone;
  std::vector<Logprobs> prompt, drawn;
};

// generate() alone, keeping what the engine should say of each token.
Expected alone(model::Runner& runner, const Request& request, uint64_t choice) {
  class Rows final : public GenerateObserver {
   public:
    explicit Rows(size_t vocab) : vocab_(vocab) {}
    bool wants_logits() const override { return true; }
    void logits(int64_t, std::span<const float> rows) override { all.insert(all.end(), rows.begin(), rows.end()); }
    bool token(int32_t) override { return true; }
    std::span<const float> row(size_t i) const { return std::span(all).subspan(i * vocab_, vocab_); }
    std::vector<float> all;

   private:
    size_t vocab_;
  } rows(static_cast<size_t>(runner.facts().vocab_size));
  GenerateOptions options{
      .max_tokens = request.max_tokens, .sampling = request.sampling, .stop_at_end_token = request.stop_at_end_token};
  if (request.allowed != nullptr) options.sampling.logit_bias.emplace_back(kBanned, -1e9f);
  options.sampling.params.seed += choice;
  const GenerateResult result = generate(runner, request.prompt, options, rows, nullptr);
  Expected expected{result.ids, result.finish_reason, {}, {}};
  const size_t length = request.prompt.size();
  for (size_t i = 1; i < length; ++i) expected.prompt.push_back(logprobs_of(rows.row(i - 1), request.prompt[i], 2));
  for (size_t i = 0; i < result.ids.size(); ++i)
    expected.drawn.push_back(logprobs_of(rows.row(length - 1 + i), result.ids[i], 3));
  return expected;
}

// Begins with some of what others begin with.
Request draw_request(Rng& rng, int32_t vocab, std::span<const int32_t> common) {
  Request request;
  const std::span<const int32_t> beginning = common.first(rng.below(common.size() + 1));
  request.prompt = testing::random_ids(rng, 1 + static_cast<int64_t>(rng.below(40)), vocab);
  request.prompt.insert(request.prompt.begin(), beginning.begin(), beginning.end());
  for (size_t at = rng.below(60); at < request.prompt.size(); at += 1 + rng.below(100))
    request.boundaries.push_back(static_cast<int64_t>(at));
  request.max_tokens = static_cast<int64_t>(rng.below(40));
  request.stop_at_end_token = rng.below(3) == 0;
  model::SamplingParams& params = request.sampling.params;
  params.seed = rng.next_u64();
  params.temperature = rng.below(3) == 0 ? 0.0f : 1.0f;
  if (rng.below(3) == 0) params.top_p = 0.9f;
  if (rng.below(3) == 0) params.repetition_penalty = 1.3f, params.frequency_penalty = 0.2f;
  if (rng.below(3) == 0) request.sampling.logit_bias = {{7, 3.0f}, {9, -2.0f}};
  static const auto kAllBut = std::make_shared<std::vector<uint32_t>>(mask_without(kBanned, vocab));
  if (rng.below(3) == 0) request.allowed = kAllBut;
  if (rng.below(4) == 0) request.num_choices = 3;
  if (rng.below(3) == 0) request.logprobs = 3, request.prompt_logprobs = 2;
  request.priority = static_cast<Priority>(rng.below(3));
  request.client = rng.below(2);
  return request;
}

void expect_same(const std::vector<Logprobs>& found, const std::vector<Logprobs>& expected, const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].token, expected[i].token) << what << ' ' << i;
    ASSERT_EQ(found[i].likeliest.size(), expected[i].likeliest.size());
    for (size_t k = 0; k < found[i].likeliest.size(); ++k) {
      EXPECT_EQ(found[i].likeliest[k].id, expected[i].likeliest[k].id);
      EXPECT_EQ(found[i].likeliest[k].logprob, expected[i].likeliest[k].logprob);
    }
  }
}

// Bytes per token as the scheduler is told: so few that sequences are preempted while they run.
Totals run_everything(const CacheBudget& budget, const StepLoopOptions& options, model::Runner& runner,
                      int requests_per_thread, uint64_t seed, int64_t num_common = 0) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  struct Case {
    Request request;
    std::vector<Expected> expected;
    std::shared_ptr<Collector> sink;
    bool cancels = false;
  };
  std::vector<std::vector<Case>> cases(kThreads);
  Rng rng(seed);
  const std::vector<int32_t> common = testing::random_ids(rng, num_common, runner.facts().vocab_size);
  for (std::vector<Case>& own : cases) {
    for (int i = 0; i < requests_per_thread; ++i) {
      Case one{.request = draw_request(rng, runner.facts().vocab_size, common), .expected = {}, .sink = {}};
      for (int c = 0; c < one.request.num_choices; ++c)
        one.expected.push_back(alone(runner, one.request, static_cast<uint64_t>(c)));
      one.sink = std::make_shared<Collector>(one.request.num_choices);
      one.cancels = rng.below(6) == 0;
      own.push_back(std::move(one));
    }
  }
  Engine::Status status;
  {
    Engine engine(runner, budget, {.steps = options});
    std::vector<std::thread> clients;
    for (std::vector<Case>& own : cases) {
      clients.emplace_back([&] {
        for (size_t i = 0; i < own.size(); ++i) {
          const auto submitted = engine.submit(own[i].request, own[i].sink);
          ASSERT_TRUE(std::holds_alternative<RequestId>(submitted)) << std::get<Refusal>(submitted).message;
          if (i % 3 == 2) own[i - 1].sink->wait();
          if (own[i].cancels) engine.cancel(std::get<RequestId>(submitted));
        }
      });
    }
    for (std::thread& client : clients) client.join();
    EXPECT_TRUE(engine.drain(1e9));
    status = engine.status();
  }
  for (const std::vector<Case>& own : cases) {
    for (const Case& one : own) {
      const Outcome& outcome = one.sink->wait();
      for (size_t c = 0; c < one.expected.size(); ++c) {
        const std::vector<int32_t>&ids = one.sink->ids[c], &expected = one.expected[c].ids;
        if (outcome.reasons[c] == FinishReason::kCancelled) {
          EXPECT_TRUE(one.cancels);
          EXPECT_EQ(std::mismatch(ids.begin(), ids.end(), expected.begin(), expected.end()).first, ids.end());
          continue;
        }
        EXPECT_EQ(ids, expected);
        EXPECT_EQ(outcome.reasons[c], one.expected[c].reason) << outcome.error;
      }
      const bool has_all = outcome.reasons[0] != FinishReason::kCancelled && one.expected.size() == 1;
      if (!has_all || !one.request.logprobs) continue;
      EXPECT_TRUE(one.sink->is_in_order);
      expect_same(one.sink->prompt, one.expected[0].prompt, "prompt");
      expect_same(one.sink->logprobs, one.expected[0].drawn, "drawn");
    }
  }
  EXPECT_EQ(status.last_step.cache_bytes, 0);
  EXPECT_TRUE(status.fault.empty()) << status.fault;
  return status.totals;
}

// Three sequences at a time, whatever the runner itself could hold: they push each other out.
const PagedBudget kTight(4, 3 * PagedBudget(4, 0).bytes(80, 80));

// Seconds, and minutes with sanitizers: ./test --quick leaves it out.
TEST(SlowEngineModel, EqualsGenerateWhateverTheBudget) {
  const model::LoadedModel loaded =
      testing::load(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8, 2, kStepTokens);
  model::Runner& runner = *loaded.runner;
  const uint64_t seed = fresh_seed();
  const ReservedBudget reserved(runner.cache_spec(), 5 * runner.cache_spec().bytes(80));
  EXPECT_GT(run_everything(reserved, {}, runner, 12, seed).num_decode_tokens, 0);
  EXPECT_GT(run_everything(kTight, {}, runner, 12, seed + 1).num_recomputed, 0);
  EXPECT_GT(run_everything(kTight, {.swap_bytes = int64_t{1} << 30}, runner, 12, seed + 2).num_swapped, 0);
}

// Prompts of which a beginning was known, cut anywhere, beside others, with several choices and cancels: their tokens
// and log-probabilities are those of generate(). `num_snapshots`: about as many have room.
Totals run_with_prefixes(int64_t step_tokens, int64_t num_snapshots, int requests_per_thread) {
  constexpr int64_t kCommon = 290;  // more than a page
  const model::LoadedModel loaded =
      testing::load(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8, 2, step_tokens);
  model::Runner& runner = *loaded.runner;
  const model::CacheSpec& spec = runner.cache_spec();
  const ReservedBudget reserved(spec, 6 * spec.bytes(400));
  const int64_t one = spec.snapshot_bytes + 2 * spec.page_bytes;
  PrefixCache prefixes(runner, {.budget_bytes = num_snapshots * one, .interval_tokens = 64});
  Totals totals;
  for (int round = 0; round < 5 && totals.num_hits == 0; ++round) {  // few requests may draw no beginning that is known
    totals = run_everything(reserved, {.prefixes = &prefixes}, runner, requests_per_thread, fresh_seed(), kCommon);
  }
  prefixes.audit();
  EXPECT_GT(totals.num_hits, 0);
  while (prefixes.give_up()) {
  }
  const auto state = runner.new_sequence(1);
  EXPECT_EQ(dynamic_cast<model::SequenceCaches&>(*state).pool().pages().num_used(), 0);
  return totals;
}

TEST(EngineModel, AnswersAreTheSameAfterAHit) {
  EXPECT_EQ(run_with_prefixes(64, 200, 3).num_snapshots_evicted, 0);
}

TEST(SlowEngineModel, AnswersAreTheSameAfterAHitInChunksOfAnySize) {
  EXPECT_EQ(run_with_prefixes(7, 400, 8).num_snapshots_evicted, 0);
  EXPECT_GT(run_with_prefixes(64, 3, 8).num_snapshots_evicted, 0);
}

// With memory for a sequence or two beside the snapshots, whatever the ledger says: prefixes and preemptions at once.
TEST(SlowEngineModel, AnswersAreTheSameAfterAHitInLittleMemory) {
  const model::LoadedModel loaded =
      testing::load(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8, 2, kStepTokens);
  model::Runner& runner = *loaded.runner;
  const uint64_t seed = fresh_seed();
  const PagedBudget tight(4, 3 * PagedBudget(4, 0).bytes(300, 300));
  for (const int64_t swap_bytes : {int64_t{0}, int64_t{1} << 30}) {
    PrefixCache prefixes(runner, {.budget_bytes = int64_t{1} << 26, .interval_tokens = 50});
    const Totals totals =
        run_everything(tight, {.swap_bytes = swap_bytes, .prefixes = &prefixes}, runner, 10, seed, 200);
    EXPECT_GT(totals.num_hits, 0);
    EXPECT_GT(totals.num_swapped + totals.num_recomputed, 0);
    prefixes.audit();
  }
}

}  // namespace
}  // namespace tessera::engine
