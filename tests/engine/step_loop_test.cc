// SPDX-License-Identifier: Apache-2.0
// The step loop by hand: prefixes, faults, logprobs, statistics.
#include "engine/step_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/collector.h"
#include "engine/hash_runner.h"
#include "engine/logprobs.h"
#include "engine/prefix_cache.h"
#include "engine/step_loop_fixture.h"

namespace tessera::engine {
namespace {

class StepLoopTest : public StepLoopFixture {
 protected:
  // Runs requests together to their end, one id after the other.
  std::vector<std::shared_ptr<Collector>> run(StepLoop& loop, const std::vector<Request>& requests) {
    std::vector<std::shared_ptr<Collector>> sinks;
    for (const Request& request : requests) {
      sinks.push_back(std::make_shared<Collector>(request.num_choices));
      accept(loop, request, sinks.back());
    }
    while (loop.step()) {
      clock_.time += 0.5;
      loop.audit();
    }
    EXPECT_TRUE(loop.is_idle());
    return sinks;
  }
};

TEST_F(StepLoopTest, BeginsWithAKnownPrefix) {
  PrefixCache store(runner_, {.budget_bytes = 100000, .least_gain_tokens = 1});
  std::vector<int32_t> prompt(20);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i);
  Request first = request(prompt, 30);
  first.boundaries = {3, 12};
  StepLoop plain(runner_, budget_, room_, clock_, {}), caching(runner_, budget_, room_, clock_, {.prefixes = &store});
  first.stop_ids = {run(plain, {first})[0]->ids[0][4]};
  const auto expected = run(plain, {first});
  const int64_t end = 20 + static_cast<int64_t>(expected[0]->ids[0].size()) - 1;  // the last token drawn is not run
  const auto sinks = run(caching, {first});
  EXPECT_EQ(sinks[0]->ids, expected[0]->ids);
  EXPECT_EQ(store.stats().num_kept, 4) << "at both boundaries, at the prompt's end and the answer's";

  // The same again, one that departs after a boundary, one that goes on after the answer.
  Request departing = first, continued = first;
  departing.prompt[15] = 3;
  continued.prompt.insert(continued.prompt.end(), expected[0]->ids[0].begin(), expected[0]->ids[0].end());
  continued.prompt.push_back(7);
  continued.max_tokens = 10, continued.stop_ids.clear();
  const Totals before = caching.totals();
  for (const Request& again : {first, departing, continued}) {
    const auto alone = run(plain, {again});
    const auto cached = run(caching, {again});
    EXPECT_EQ(cached[0]->ids, alone[0]->ids);
    const int64_t num_cached = again.prompt == first.prompt ? 12 : again.prompt == departing.prompt ? 12 : end;
    EXPECT_EQ(cached[0]->outcome.num_cached_tokens, num_cached);
  }
  EXPECT_EQ(caching.totals().num_cached_tokens - before.num_cached_tokens, 24 + end);
  EXPECT_EQ(caching.totals().num_hits - before.num_hits, 3);
  EXPECT_EQ(caching.totals().num_lookups, 4);
  EXPECT_EQ(caching.totals().num_prefill_tokens - before.num_prefill_tokens, 8 + 8 + 2);

  // Whoever wants the prompt's logprobs needs all of its rows.
  Request scored = first;
  scored.prompt_logprobs = 1;
  const auto all = run(caching, {scored});
  EXPECT_EQ(all[0]->outcome.num_cached_tokens, 0);
  EXPECT_EQ(all[0]->prompt.size(), 19u);
  EXPECT_EQ(all[0]->ids, expected[0]->ids);
  EXPECT_EQ(caching.totals().num_lookups, 4) << "nothing was looked up";

  // Another salt finds nothing of all that.
  Request apart = first;
  apart.cache_salt = "other";
  EXPECT_EQ(run(caching, {apart})[0]->outcome.num_cached_tokens, 0);
  EXPECT_EQ(run(caching, {apart})[0]->outcome.num_cached_tokens, 12);
}

// Where memory ends, what is only kept for later goes first, and nobody who runs notices.
TEST_F(StepLoopTest, PrefixesMakeRoomForWhoRuns) {
  HashRunner tight(8, 100, budget_, {}, 1, {.page_tokens = 4, .limit = 16});
  PrefixCache store(tight, {.budget_bytes = 100000});
  StepLoop plain(runner_, budget_, room_, clock_, {}), caching(tight, budget_, room_, clock_, {.prefixes = &store});
  std::vector<Request> requests;
  for (int32_t i = 0; i < 6; ++i) requests.push_back(request(std::vector<int32_t>(30, i + 1), 20));
  for (const Request& one : requests) EXPECT_EQ(run(caching, {one})[0]->ids, run(plain, {one})[0]->ids);
  EXPECT_GT(tight.failed().no_pages, 0) << "13 of 16 pages hold a sequence";
  EXPECT_GT(store.stats().num_evicted, 0);
  EXPECT_EQ(caching.totals().num_failed_steps, 0);
  EXPECT_EQ(caching.totals().num_recomputed, 0);
  while (store.give_up()) {
  }
  EXPECT_EQ(tight.num_pages(), 0);
}

// A step that lacks nothing but pages costs nobody anything but the one who is to be kept last.
TEST_F(StepLoopTest, WhoCameLastGivesWayWherePagesEnd) {
  HashRunner tight(8, 100, budget_, {}, 1, {.page_tokens = 4, .limit = 20});
  for (const int64_t swap_bytes : {0, 100000}) {
    StepLoop plain(runner_, budget_, room_, clock_, {}),
        loop(tight, budget_, room_, clock_, {.swap_bytes = swap_bytes});
    std::vector<Request> requests;
    for (int32_t i = 0; i < 5; ++i) requests.push_back(request({i, 2, 3, 4, 5, 6}, 60));
    requests[1].num_choices = 3;
    const auto expected = run(plain, requests), sinks = run(loop, requests);
    for (size_t i = 0; i < sinks.size(); ++i) {
      EXPECT_EQ(sinks[i]->ids, expected[i]->ids);
      EXPECT_EQ(sinks[i]->outcome.error, "");
    }
    EXPECT_EQ(sinks[0]->outcome.num_preemptions, 0) << "who came first";
    EXPECT_GT(sinks[4]->outcome.num_preemptions, 0);
    EXPECT_EQ(loop.totals().num_failed_steps, 0);
    EXPECT_GT(swap_bytes == 0 ? loop.totals().num_recomputed : loop.totals().num_swapped, 0);
    EXPECT_EQ(tight.num_pages(), 0);
  }
  // One that does not fit even alone ends, and says why.
  HashRunner tiny(8, 100, budget_, {}, 1, {.page_tokens = 4, .limit = 5});
  StepLoop loop(tiny, budget_, room_, clock_, {});
  const auto sinks = run(loop, {request({1, 2, 3}, 10), request({1, 2, 3}, 60)});
  EXPECT_EQ(sinks[0]->outcome.error, "");
  EXPECT_EQ(sinks[1]->outcome.error_code, ErrorCode::kResourceExhausted);
}

// What a fault may have damaged is not begun with again.
TEST_F(StepLoopTest, AFaultForgetsWhatLedToIt) {
  HashRunner poisonous(8, 100, budget_, {.has_poison = true}, 1);
  PrefixCache store(poisonous, {.budget_bytes = 100000, .least_gain_tokens = 1});
  StepLoop loop(poisonous, budget_, room_, clock_, {.prefixes = &store});
  // A prompt whose last token, and no other, is one at which a step throws.
  std::vector<int32_t> prompt;
  for (int32_t next = 0; prompt.empty(); ++next) {
    std::vector<int32_t> ids = {next % 24, next / 24 % 24, next / 576 % 24, next / 13824, 1, 2, 3, 4, 5};
    uint64_t context = 0;
    size_t first_bad = 0;
    while (first_bad < ids.size()) {
      context = hash_token(context, static_cast<int64_t>(first_bad), ids[first_bad]);
      if (is_poisoned(context)) break;
      ++first_bad;
    }
    if (first_bad + 1 == ids.size()) prompt = ids;
  }
  Request sound = request({prompt.begin(), prompt.end() - 1}, 0), bad = request(prompt, 2);
  run(loop, {sound});
  EXPECT_EQ(store.stats().num_snapshots, 1);
  EXPECT_EQ(run(loop, {bad})[0]->outcome.error, "a fault that stays");
  EXPECT_EQ(store.stats().num_snapshots, 0);
  EXPECT_EQ(poisonous.num_snapshots(), 0);
}

// Of several in one step only the one at fault ends; the others were dropped, run again, and say the same.
TEST_F(StepLoopTest, OnlyTheRequestAtFaultEnds) {
  HashRunner poisonous(8, 100, budget_, {.has_poison = true}, 1);
  std::vector<Request> requests;
  int64_t num_poisoned = 0;
  for (int32_t i = 0; requests.size() < 6; ++i) {
    Request one = request({i % 24, i / 24 % 24, i / 576, 5, 6, 7}, 3);
    uint64_t context = 0;
    bool is_bad = false;
    for (int64_t k = 0; k < 6; ++k) {
      context = hash_token(context, k, one.prompt[static_cast<size_t>(k)]);
      is_bad = is_bad || is_poisoned(context);
    }
    if (is_bad ? num_poisoned++ == 0 : requests.size() - static_cast<size_t>(num_poisoned > 0 ? 1 : 0) < 5)
      requests.push_back(one);
  }
  StepLoop clean(runner_, budget_, room_, clock_, {}), faulty(poisonous, budget_, room_, clock_, {});
  const auto expected = run(clean, requests);
  const auto sinks = run(faulty, requests);
  int num_failed = 0;
  for (size_t i = 0; i < sinks.size(); ++i) {
    if (sinks[i]->outcome.reasons[0] == FinishReason::kFailed) {
      ++num_failed;
      EXPECT_EQ(sinks[i]->outcome.error, "a fault that stays");
      EXPECT_EQ(sinks[i]->outcome.error_code, ErrorCode::kNotFinite);
    } else {
      EXPECT_EQ(sinks[i]->ids, expected[i]->ids);
    }
  }
  EXPECT_EQ(num_failed, 1);
  EXPECT_GE(faulty.totals().num_failed_steps, 2) << "once together, once alone";
  EXPECT_EQ(poisonous.num_states(), 0);
}

TEST_F(StepLoopTest, CountsWhatItDoes) {
  StepLoop loop(runner_, budget_, room_, clock_, {});
  ASSERT_FALSE(room_.enter(10));
  auto sink = std::make_shared<Collector>();
  loop.accept(++last_id_, request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 3), sink, clock_.time);
  clock_.time += 2;
  ASSERT_TRUE(loop.step());
  EXPECT_EQ(loop.last_step().num_prefill_tokens, 8);
  EXPECT_EQ(loop.last_step().num_admitted, 1);
  EXPECT_EQ(loop.last_step().num_running, 1);
  EXPECT_EQ(loop.last_step().cache_bytes, budget_.bytes(10, 13));
  clock_.time += 1;
  ASSERT_TRUE(loop.step());
  EXPECT_EQ(loop.last_step().num_prefill_tokens, 2);
  EXPECT_EQ(loop.last_step().num_drawn, 1);
  clock_.time += 1;
  ASSERT_TRUE(loop.step());
  EXPECT_EQ(loop.last_step().num_decode_tokens, 1);
  ASSERT_TRUE(loop.step());
  EXPECT_FALSE(loop.step());
  const Outcome& outcome = sink->outcome;
  EXPECT_EQ(outcome.reasons, std::vector{FinishReason::kLength});
  EXPECT_EQ(outcome.num_prompt_tokens, 10);
  EXPECT_EQ(outcome.num_generated_tokens, 3);
  EXPECT_EQ(outcome.waited_seconds, 2);
  EXPECT_EQ(outcome.first_token_seconds, 3);
  EXPECT_EQ(outcome.seconds, 4);
  EXPECT_EQ(loop.totals().num_decode_tokens, 2) << "the last token drawn is not run";
  EXPECT_EQ(loop.totals().num_completed, 1);
}

TEST_F(StepLoopTest, GoesOnAfterItWasAbandoned) {
  StepLoop loop(runner_, budget_, room_, clock_, {.max_running = 1});
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 3; ++i) {
    ASSERT_FALSE(room_.enter(1));
    sinks.push_back(std::make_shared<Collector>());
    loop.accept(++last_id_, request({7}, 5), sinks.back(), clock_.time);
  }
  ASSERT_TRUE(loop.step());
  EXPECT_EQ(room_.num_requests(), 2);
  loop.abandon("planted");
  for (const auto& sink : sinks) {
    EXPECT_EQ(sink->outcome.reasons, std::vector{FinishReason::kFailed});
    EXPECT_EQ(sink->outcome.error, "planted");
    EXPECT_EQ(sink->num_ends(), 1);
  }
  EXPECT_EQ(room_.num_requests(), 0);
  EXPECT_EQ(runner_.num_states(), 0);
  loop.audit();
  StepLoop fresh(runner_, budget_, room_, clock_, {});
  EXPECT_EQ(run(loop, {request({7}, 5)})[0]->ids, run(fresh, {request({7}, 5)})[0]->ids);
}

TEST_F(StepLoopTest, PromptAloneIsRunAndScored) {
  StepLoop loop(runner_, budget_, room_, clock_, {});
  Request echo = request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0);
  echo.prompt_logprobs = 0;
  echo.num_choices = 2;
  const auto sinks = run(loop, {echo});
  EXPECT_EQ(sinks[0]->outcome.reasons, (std::vector{FinishReason::kLength, FinishReason::kLength}));
  EXPECT_EQ(sinks[0]->prompt.size(), 9u);
  EXPECT_TRUE(sinks[0]->is_in_order);
  EXPECT_TRUE(sinks[0]->ids[0].empty());
}

TEST(Logprobs, AreThoseOfTheSoftmax) {
  const std::vector<float> row = {1, 3, 2, 3, -50};
  const Logprobs logprobs = logprobs_of(row, 2, 10);
  double total = 0, sum = 0;
  for (const float logit : row) sum += std::exp(static_cast<double>(logit));
  std::vector<int32_t> order;
  for (const TokenLogprob& one : logprobs.likeliest) {
    order.push_back(one.id);
    total += std::exp(static_cast<double>(one.logprob));
  }
  EXPECT_EQ(order, (std::vector<int32_t>{1, 3, 2, 0, 4})) << "ties by id; no more than there are";
  EXPECT_NEAR(total, 1, 1e-6);
  EXPECT_NEAR(static_cast<double>(logprobs.token), 2 - std::log(sum), 1e-6);
  EXPECT_EQ(logprobs.token, logprobs.likeliest[2].logprob);
  EXPECT_TRUE(logprobs_of(row, 0, 0).likeliest.empty());
}

}  // namespace
}  // namespace tessera::engine
