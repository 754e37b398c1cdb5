// SPDX-License-Identifier: Apache-2.0
// One step ahead (src/engine/step_loop_ahead.cc), in the step loop and in generate(): the same tokens, and nothing that
// a queued step still runs is touched. The runner of these tests fails where it is.
#include <gtest/gtest.h>

#include "base/error.h"
#include "engine/fake_runner.h"
#include "engine/hash_runner.h"
#include "engine/prefix_cache.h"
#include "engine/step_loop.h"
#include "engine/step_loop_fixture.h"

namespace tessera::engine {
namespace {

// Says of each token whether the step after it was queued by then.
class Asking final : public Sink {
 public:
  bool token(const Token& token) override {
    if (static_cast<int64_t>(ids.size()) == throws_at) fail(ErrorCode::kInternal, "a sink's own fault");
    ids.push_back(token.id);
    were_ahead.push_back(loop->is_ahead());
    return static_cast<int64_t>(ids.size()) != stop_at;
  }
  int64_t room() const override { return most; }
  void finished(const Outcome& how) override { outcome = how, has_ended = true; }

  const StepLoop* loop = nullptr;
  std::vector<int32_t> ids;
  std::vector<bool> were_ahead;
  int64_t stop_at = -1, most = 1000, throws_at = -1;
  bool has_ended = false;
  Outcome outcome;
};

class RunAheadTest : public StepLoopFixture {
 protected:
  RunAheadTest() { runner_.set_runs_ahead(true); }

  std::shared_ptr<Asking> accept(StepLoop& loop, const Request& request) {
    auto sink = std::make_shared<Asking>();
    sink->loop = &loop;
    StepLoopFixture::accept(loop, request, sink);
    return sink;
  }
  static void run_out(StepLoop& loop) {
    while (loop.step()) loop.audit();
    EXPECT_TRUE(loop.is_idle());
  }
};

TEST_F(RunAheadTest, TokensAreDeliveredWhileTheNextStepIsQueued) {
  StepLoop loop(runner_, budget_, room_, clock_, {});
  const auto sink = accept(loop, request({1, 2, 3}, 6));
  run_out(loop);
  // The prompt's step draws the first; the sixth has no next one, and nobody runs it.
  EXPECT_EQ(sink->were_ahead, (std::vector<bool>{false, true, true, true, true, false}));
  EXPECT_EQ(runner_.num_ahead(), 4);
  EXPECT_EQ(loop.totals().num_decode_tokens, 5);
  runner_.set_runs_ahead(false);
  StepLoop plain(runner_, budget_, room_, clock_, {});
  const auto expected = accept(plain, request({1, 2, 3}, 6));
  run_out(plain);
  EXPECT_EQ(sink->ids, expected->ids);
}

TEST_F(RunAheadTest, WhoEndsLeavesWithTheStepThatWasQueued) {
  PrefixCache store(runner_, {.budget_bytes = 100000, .least_gain_tokens = 1});
  StepLoop loop(runner_, budget_, room_, clock_, {.prefixes = &store});
  const auto sink = accept(loop, request({1, 2, 3}, 50));
  sink->stop_at = 4;
  while (!sink->has_ended) ASSERT_TRUE(loop.step());
  EXPECT_EQ(sink->outcome.reasons, std::vector<FinishReason>{FinishReason::kStop});
  EXPECT_TRUE(loop.is_ahead() && !loop.is_idle());
  EXPECT_EQ(loop.scheduler().used_bytes(), 0);
  EXPECT_EQ(loop.leaving_bytes(), budget_.bytes(7, 53));
  EXPECT_EQ(runner_.num_states(), 1);
  EXPECT_EQ(store.stats().num_kept, 1) << "the prompt";
  loop.audit();
  // One that comes now is served after that step; what the answer left is known by then, its last token too.
  Request next = request({1, 2, 3}, 3);
  next.prompt.insert(next.prompt.end(), sink->ids.begin(), sink->ids.end());
  next.prompt.push_back(9);
  const auto after = accept(loop, next);
  EXPECT_TRUE(loop.step());
  EXPECT_TRUE(after->ids.empty());
  EXPECT_EQ(runner_.num_states(), 0);
  EXPECT_EQ(loop.leaving_bytes(), 0);
  run_out(loop);
  EXPECT_EQ(after->outcome.num_cached_tokens, 7);
  EXPECT_EQ(sink->ids.size(), 4u);
}

TEST_F(RunAheadTest, CancelsAndArrivalsWaitForOneStepAtMost) {
  StepLoop loop(runner_, budget_, room_, clock_, {});
  const auto first = accept(loop, request({1, 2}, 50)), second = accept(loop, request({3}, 50));
  while (first->ids.size() < 5) ASSERT_TRUE(loop.step());
  ASSERT_TRUE(loop.is_ahead());
  const size_t had = first->ids.size();
  loop.cancel(1, "");
  EXPECT_TRUE(first->has_ended);
  const auto third = accept(loop, request({4}, 2));
  EXPECT_TRUE(loop.step());
  loop.audit();
  EXPECT_FALSE(loop.is_ahead()) << "somebody has come, and somebody has gone";
  EXPECT_EQ(first->ids.size(), had) << "what the queued step drew for it is nobody's";
  EXPECT_EQ(runner_.num_states(), 1);
  EXPECT_TRUE(loop.step());
  EXPECT_EQ(third->ids.size(), 1u);
  run_out(loop);
  EXPECT_EQ(second->ids.size(), 50u);
}

TEST_F(RunAheadTest, GoesNoFurtherThanItKnows) {
  const auto num_ahead = [&](Request one, int64_t most_room = 1000) {
    const int64_t before = runner_.num_ahead();
    StepLoop loop(runner_, budget_, room_, clock_, {});
    accept(loop, one)->most = most_room;
    run_out(loop);
    return runner_.num_ahead() - before;
  };
  const Request plain = request({1, 2, 3}, 6);
  EXPECT_EQ(num_ahead(plain), 4);
  EXPECT_EQ(num_ahead(plain, 1), 0) << "room for the token that is being drawn alone";
  EXPECT_EQ(num_ahead(plain, 2), 4);
  Request other = plain;
  other.sampling.params.frequency_penalty = 1;
  EXPECT_EQ(num_ahead(other), 0) << "drawn by the host";
  other = plain, other.logprobs = 1;
  EXPECT_EQ(num_ahead(other), 0) << "rows for the host";
  other = plain, other.allowed = std::make_shared<const std::vector<uint32_t>>(1, 0xF0F0F0u);
  EXPECT_EQ(num_ahead(other), 4) << "of tokens that all may be drawn from";
  other = plain, other.num_choices = 3;
  EXPECT_EQ(num_ahead(other), 4) << "steps of three";
}

// Who leaves the loop leaves nothing queued.
TEST_F(RunAheadTest, NothingStaysQueued) {
  {
    StepLoop loop(runner_, budget_, room_, clock_, {});
    accept(loop, request({1, 2}, 50));
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(loop.step());
    ASSERT_TRUE(loop.is_ahead());
    loop.abandon("broken");
    EXPECT_TRUE(loop.is_idle());
    EXPECT_EQ(runner_.num_states(), 0);
    accept(loop, request({1, 2}, 50));
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(loop.step());
    ASSERT_TRUE(loop.is_ahead());
  }
  EXPECT_EQ(runner_.num_states(), 0);
  EXPECT_NO_THROW(runner_.new_sequence(4));
}

// The others of the request have not got what the step drew for them, and the queued step runs it all the same.
TEST_F(RunAheadTest, ASinkThatThrowsEndsChoicesWhoseTokenWasNotTaken) {
  StepLoop loop(runner_, budget_, room_, clock_, {});
  Request of_three = request({1, 2}, 30);
  of_three.num_choices = 3;
  const auto sink = accept(loop, of_three);
  sink->throws_at = 9;  // the fourth token of the first choice
  while (!sink->has_ended) ASSERT_TRUE(loop.step());
  ASSERT_TRUE(loop.is_ahead());
  EXPECT_EQ(loop.leaving_bytes(), 3 * budget_.bytes(6, 32));
  EXPECT_EQ(runner_.num_states(), 3);
  loop.audit();
  run_out(loop);
  EXPECT_EQ(runner_.num_states(), 0);
}

TEST_F(RunAheadTest, AFailedStepTakesTheQueuedOneWithIt) {
  const auto run_all = [&](HashRunner& runner) {
    StepLoop loop(runner, budget_, room_, clock_, {});
    std::vector<std::shared_ptr<Asking>> sinks;
    for (int32_t i = 0; i < 3; ++i) sinks.push_back(accept(loop, request({i, 5}, 40)));
    run_out(loop);
    std::vector<std::vector<int32_t>> ids;
    for (const auto& sink : sinks) ids.push_back(sink->ids);
    return std::pair(ids, loop.totals().num_failed_steps);
  };
  HashRunner failing(8, 100, budget_, {.step = 5}, 3);
  failing.set_runs_ahead(true);
  const auto [expected, none] = run_all(runner_);
  const auto [found, num_failed] = run_all(failing);
  EXPECT_EQ(none, 0);
  EXPECT_GT(num_failed, 0);
  EXPECT_GT(failing.num_ahead(), 0);
  EXPECT_EQ(found, expected);
}

TEST_F(RunAheadTest, GenerateGivesTheSameTokens) {
  struct Result {
    GenerateResult result;
    int64_t position;
  };
  const auto run = [&](bool is_ahead, const GenerateOptions& options, int64_t stop_at) {
    runner_.set_runs_ahead(is_ahead);
    Watcher watcher;
    watcher.stop_at = stop_at;
    Sequence sequence({1, 2, 3}, runner_.new_sequence(40));
    GenerateResult result = generate(runner_, sequence, options, watcher, nullptr);
    EXPECT_EQ(watcher.tokens, result.ids);
    return Result{std::move(result), sequence.state().position()};
  };
  GenerateOptions options{.max_tokens = 12, .stop_at_end_token = false};
  for (const int64_t stop_at : {-1, 1, 5, 12}) {
    const Result plain = run(false, options, stop_at), ahead = run(true, options, stop_at);
    EXPECT_EQ(ahead.result.ids, plain.result.ids);
    EXPECT_EQ(ahead.result.finish_reason, plain.result.finish_reason);
    EXPECT_EQ(ahead.position, plain.position + (stop_at == 5 ? 1 : 0)) << "the last token was run already";
  }
  EXPECT_EQ(runner_.num_ahead(), 10 + 0 + 4 + 10);
  // Where the answer fills the sequence.
  options.max_tokens = 100;
  EXPECT_EQ(run(true, options, -1).result.ids, run(false, options, -1).result.ids);
  options.sampling.params.presence_penalty = 1;
  const int64_t before = runner_.num_ahead();
  EXPECT_EQ(run(true, options, -1).result.ids, run(false, options, -1).result.ids);
  EXPECT_EQ(runner_.num_ahead(), before);
}

}  // namespace
}  // namespace tessera::engine
