// SPDX-License-Identifier: Apache-2.0
// Each rule of the scheduler by itself; the simulator has them all at once.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "engine/hash_runner.h"
#include "engine/waiting_room.h"

namespace tessera::engine {
namespace {

using Key = SequenceKey;

// A token is ten bytes, as it comes.
class TokenBudget final : public CacheBudget {
 public:
  explicit TokenBudget(int64_t tokens) : tokens_(tokens) {}
  int64_t total_bytes() const override { return 10 * tokens_; }
  int64_t bytes(int64_t num_tokens, int64_t) const override { return 10 * num_tokens; }

 private:
  int64_t tokens_;
};

Scheduler::Job job(Key key, int64_t num_tokens, uint64_t client = 0, Priority priority = Priority::kNormal) {
  return {.key = key, .client = client, .priority = priority, .num_tokens = num_tokens, .capacity = num_tokens + 100};
}

// Plans a step, and tells the scheduler that all of it ran and each finished sequence drew a token.
Scheduler::Plan run(Scheduler& scheduler) {
  const Scheduler::Plan plan = scheduler.plan();
  for (const Scheduler::Slice& slice : plan.slices) {
    scheduler.ran(slice.key, slice.num_tokens);
    const Scheduler::Entry& entry = scheduler.entries().at(slice.key);
    if (entry.num_done == entry.job.num_tokens) scheduler.drew(slice.key);
  }
  scheduler.audit();
  return plan;
}

std::vector<std::pair<Key, int64_t>> slices(const Scheduler::Plan& plan) {
  std::vector<std::pair<Key, int64_t>> pairs;
  for (const Scheduler::Slice& slice : plan.slices) pairs.emplace_back(slice.key, slice.num_tokens);
  return pairs;
}

using Slices = std::vector<std::pair<Key, int64_t>>;
using Keys = std::vector<Key>;

TEST(Scheduler, DecodesFirstAndSharesTheRestAmongPrompts) {
  const TokenBudget budget(100000);
  Scheduler scheduler({.max_step_tokens = 32, .max_running = 100}, budget);
  for (Key key = 1; key <= 3; ++key) scheduler.add(job(key, 4));
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 4}, {2, 4}, {3, 4}}));
  for (Key key = 4; key <= 9; ++key) scheduler.add(job(key, key == 4 ? 2 : 100));
  // Of 29 tokens 14 go to all six prompts, two and a bit each, and 15 to the first four, of which the short one is
  // done.
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 1}, {2, 1}, {3, 1}, {4, 2}, {5, 8}, {6, 8}, {7, 7}, {8, 2}, {9, 2}}));
  EXPECT_EQ(scheduler.num_waiting(), 0);
  EXPECT_EQ(Scheduler::most_running({.max_step_tokens = 32, .max_running = 100}), 28) << "an eighth is left to prompts";
  EXPECT_EQ(Scheduler::most_running({.max_step_tokens = 1, .max_running = 100}), 1);
}

TEST(Scheduler, StepsAreShorterWhileSomebodyDecodes) {
  const TokenBudget budget(100000);
  const Scheduler::Limits limits{.max_step_tokens = 256, .max_running = 100, .max_mixed_step_tokens = 32};
  EXPECT_EQ(Scheduler::most_running(limits), 28);
  Scheduler scheduler(limits, budget);
  EXPECT_EQ(scheduler.max_running(), 28);
  scheduler.add(job(1, 700));
  scheduler.add(job(2, 20));
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 236}, {2, 20}})) << "prompts alone";
  EXPECT_EQ(slices(run(scheduler)), (Slices{{2, 1}, {1, 31}})) << "beside an answer";
  scheduler.set_paused(2, true);
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 256}})) << "a paused one waits for nothing";
  scheduler.set_paused(2, false);
  EXPECT_EQ(slices(run(scheduler)), (Slices{{2, 1}, {1, 31}}));
  scheduler.remove(2);
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 146}}));
  // A limit beyond the runner's says nothing.
  EXPECT_EQ(Scheduler::most_running({.max_step_tokens = 32, .max_running = 100, .max_mixed_step_tokens = 512}), 28);
}

// Long prompts, however many, do not make a short one wait for their ends.
TEST(Scheduler, ShortPromptsPassBesideLongOnes) {
  const TokenBudget budget(1 << 20);
  for (const int64_t step_tokens : {8, 64, 512}) {
    Scheduler scheduler({.max_step_tokens = step_tokens, .max_running = 100}, budget);
    const Key num_long = static_cast<Key>(std::min<int64_t>(step_tokens - 2, 40));
    for (Key key = 1; key <= num_long; ++key) scheduler.add(job(key, 10000));
    run(scheduler);
    const Key last = num_long + 1;
    scheduler.add(job(last, 12));
    int num_steps = 0;
    while (scheduler.entries().at(last).num_done < 12) run(scheduler), ++num_steps;
    EXPECT_LE(num_steps, 12) << "at least a token in each of " << step_tokens;
    // And the first of the long ones go on: half of each step is theirs.
    EXPECT_GE(scheduler.entries().at(1).num_done, num_steps * std::max<int64_t>(1, step_tokens / 2 / 4));
  }
}

TEST(Scheduler, GivesWayInKeepingOrderAndGrantsNoMoreUntilSomebodyEnds) {
  const TokenBudget budget(1000);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  scheduler.add(job(1, 20, 0, Priority::kLow));
  scheduler.add(job(2, 20));
  scheduler.add(job(3, 20, 0, Priority::kHigh));
  EXPECT_EQ(run(scheduler).admitted, (Keys{3, 2, 1}));
  EXPECT_EQ(scheduler.give_way(), 1u) << "the lowest priority";
  EXPECT_EQ(scheduler.give_way(), 2u);
  EXPECT_EQ(scheduler.give_way(), std::nullopt) << "one alone";
  scheduler.set_done(1, 0), scheduler.set_done(2, 0);
  scheduler.audit();
  for (int i = 0; i < 5; ++i) {
    const Scheduler::Plan plan = run(scheduler);
    EXPECT_TRUE(plan.admitted.empty());
    EXPECT_EQ(slices(plan), (Slices{{3, 1}})) << "which may grow";
  }
  scheduler.remove(3);
  EXPECT_EQ(run(scheduler).admitted, (Keys{1, 2})) << "the fourth admission is the oldest one's";
}

TEST(Scheduler, ClientsShareWhateverTheyAsk) {
  const TokenBudget budget(1000);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 1}, budget);
  for (Key key = 1; key <= 40; ++key) scheduler.add(job(key, 10, 7));
  std::map<uint64_t, int> num_served;
  Key next = 100;
  for (int i = 0; i < 30; ++i) {
    scheduler.add(job(next++, 10, 8));  // one at a time
    const Keys admitted = run(scheduler).admitted;
    ASSERT_EQ(admitted.size(), 1u);
    ++num_served[scheduler.entries().at(admitted[0]).job.client];
    scheduler.remove(admitted[0]);
  }
  // Of the other three of four admissions each has half; every fourth is the first one's, who came before.
  EXPECT_GE(num_served[8], 10);
  EXPECT_GE(num_served[7], 14);
}

TEST(Scheduler, PriorityGoesFirstButNobodyStarves) {
  const TokenBudget budget(1000);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 1}, budget);
  scheduler.add(job(1, 10, 0, Priority::kLow));
  scheduler.add(job(2, 10, 0, Priority::kNormal));
  Keys order;
  for (Key key = 3; key <= 14; ++key) {
    scheduler.add(job(key, 10, 0, Priority::kHigh));
    const Keys admitted = run(scheduler).admitted;
    ASSERT_EQ(admitted.size(), 1u);
    order.push_back(admitted[0]);
    scheduler.remove(admitted[0]);
  }
  EXPECT_EQ(order, (Keys{3, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11, 12}));
}

TEST(Scheduler, NobodyPassesTheOneWhoseTurnItIs) {
  const TokenBudget budget(300);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  scheduler.add(job(1, 150));
  scheduler.add(job(2, 190));
  scheduler.add(job(3, 5));
  EXPECT_EQ(run(scheduler).admitted, (Keys{1}));
  EXPECT_EQ(run(scheduler).admitted, (Keys{}));
  scheduler.remove(1);
  EXPECT_EQ(run(scheduler).admitted, (Keys{2, 3}));
}

TEST(Scheduler, PreemptsForPriorityTwiceAtMost) {
  const TokenBudget budget(220);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  scheduler.add(job(1, 100, 0, Priority::kLow));
  EXPECT_EQ(run(scheduler).admitted, (Keys{1}));
  for (Key key = 2; key <= 4; ++key) {
    scheduler.add(job(key, 120, 0, Priority::kHigh));
    const Scheduler::Plan plan = run(scheduler);
    EXPECT_EQ(plan.preempted, key < 4 ? (Keys{1}) : (Keys{})) << key;
    EXPECT_EQ(plan.admitted, key < 4 ? (Keys{key}) : (Keys{})) << key;
    if (key < 4) scheduler.remove(key);
    run(scheduler);
  }
}

TEST(Scheduler, GrowthTakesFromTheEndOfTheKeepingOrder) {
  const TokenBudget budget(120);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  scheduler.add({.key = 1, .priority = Priority::kLow, .num_tokens = 20, .capacity = 100});
  scheduler.add({.key = 2, .num_tokens = 20, .capacity = 100});
  scheduler.add({.key = 3, .num_tokens = 20, .capacity = 100});
  Keys preempted;
  for (int i = 0; i < 200 && preempted.size() < 2; ++i) {
    for (const Key key : run(scheduler).preempted) preempted.push_back(key);
    EXPECT_LE(scheduler.used_bytes(), budget.total_bytes());
  }
  EXPECT_EQ(preempted, (Keys{1, 3})) << "the lowest priority first, then who came last";
}

TEST(Scheduler, PausedSequencesGiveWay) {
  const TokenBudget budget(250);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  scheduler.add(job(1, 100));
  run(scheduler), run(scheduler);
  scheduler.set_paused(1, true);
  EXPECT_TRUE(run(scheduler).slices.empty());
  scheduler.add(job(2, 140, 0, Priority::kLow));
  EXPECT_EQ(run(scheduler).preempted, (Keys{1})) << "even for a lower priority";
  EXPECT_TRUE(run(scheduler).admitted.empty());
  scheduler.set_paused(1, false);
  EXPECT_EQ(run(scheduler).preempted, (Keys{2}));
}

TEST(Scheduler, ForksTakeTheirShareOfTheCharge) {
  const TokenBudget budget(1000);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  Scheduler::Job many = job(16, 20);
  many.num_copies = 3;
  scheduler.add(many);
  scheduler.plan();
  EXPECT_EQ(scheduler.used_bytes(), 600);
  EXPECT_EQ(scheduler.num_running(), 3);
  scheduler.ran(16, 20);
  scheduler.fork(16, 17), scheduler.fork(16, 18);
  scheduler.audit();
  EXPECT_EQ(scheduler.used_bytes(), 600);
  for (const Key key : {16, 17, 18}) scheduler.drew(key);
  EXPECT_EQ(slices(run(scheduler)), (Slices{{16, 1}, {17, 1}, {18, 1}}));
  scheduler.remove(16);
  EXPECT_EQ(scheduler.used_bytes(), 420);
  EXPECT_THROW(scheduler.fork(17, 19), Error) << "nobody announced it";
  EXPECT_FALSE(scheduler.fits(100, 11)) << "more than run at once";
  EXPECT_TRUE(scheduler.fits(100, 10));
  EXPECT_FALSE(scheduler.fits(101, 10));
}

TEST(Scheduler, IsolatedSequencesRunAloneUntilTheyArePast) {
  const TokenBudget budget(10000);
  Scheduler scheduler({.max_step_tokens = 16, .max_running = 10}, budget);
  for (Key key = 1; key <= 3; ++key) scheduler.add(job(key, 4));
  run(scheduler);
  scheduler.add(job(4, 50));
  scheduler.plan();  // this step failed for 1 and 2
  scheduler.isolate(1, 5);
  scheduler.isolate(2, 5);
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 5}}));
  EXPECT_EQ(slices(run(scheduler)), (Slices{{2, 5}}));
  EXPECT_EQ(slices(run(scheduler)), (Slices{{1, 1}, {2, 1}, {3, 1}, {4, 13}}));
}

TEST(Scheduler, IsolatedSequencesRunAloneEvenWhenTheyComeBack) {
  const TokenBudget budget(250);
  Scheduler scheduler({.max_step_tokens = 16, .max_running = 10}, budget);
  scheduler.add(job(1, 60, 0, Priority::kLow));
  scheduler.plan();
  scheduler.isolate(1, 16);
  scheduler.add({.key = 2, .priority = Priority::kHigh, .num_tokens = 200, .capacity = 220});
  scheduler.set_paused(1, true);
  EXPECT_EQ(run(scheduler).preempted, (Keys{1}));
  scheduler.set_paused(1, false);
  scheduler.remove(2);
  scheduler.add(job(3, 4, 0, Priority::kHigh));
  const Scheduler::Plan plan = run(scheduler);
  EXPECT_EQ(plan.admitted, (Keys{3, 1}));
  EXPECT_EQ(slices(plan), (Slices{{1, 16}}));
  EXPECT_EQ(slices(run(scheduler)), (Slices{{3, 4}, {1, 12}}));
}

TEST(Scheduler, GrowthTakesFromThePausedFirst) {
  const TokenBudget budget(90);
  Scheduler scheduler({.max_step_tokens = 64, .max_running = 10}, budget);
  scheduler.add({.key = 1, .priority = Priority::kHigh, .num_tokens = 20, .capacity = 90});
  scheduler.add({.key = 2, .num_tokens = 20, .capacity = 90});
  EXPECT_EQ(run(scheduler).admitted, (Keys{1, 2}));
  scheduler.set_paused(1, true);
  Keys preempted;
  for (int i = 0; i < 60 && preempted.empty(); ++i) preempted = run(scheduler).preempted;
  EXPECT_EQ(preempted, (Keys{1}));
}

TEST(WaitingRoom, RefusesWithAnEstimate) {
  WaitingRoom room({.max_requests = 3, .max_tokens = 100});
  EXPECT_FALSE(room.enter(500)) << "a long one alone";
  const auto long_one = room.check(1);
  ASSERT_TRUE(long_one);
  EXPECT_EQ(long_one->retry_after_seconds, 1) << "nothing is known yet";
  room.leave(500);
  // Two a second, of ten tokens each.
  for (int i = 0; i < 40; ++i) {
    EXPECT_FALSE(room.enter(10));
    room.leave_begun(10, 100 + 0.5 * i);
  }
  EXPECT_FALSE(room.enter(90));
  const auto refused = room.enter(90);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->reason, Refusal::Reason::kFull);
  EXPECT_GE(refused->retry_after_seconds, 4) << "80 tokens too many at 20 a second";
  EXPECT_LE(refused->retry_after_seconds, 5);
  EXPECT_FALSE(room.enter(10));
  EXPECT_EQ(room.num_tokens(), 100);
  EXPECT_TRUE(room.check(1));
  room.leave(90), room.leave(10);
  EXPECT_EQ(room.num_requests(), 0);
}

// The step behind the planned one, before that has run.
TEST(Scheduler, KnowsTheNextStepWhereNothingCanChangeIt) {
  const TokenBudget budget(30);
  Scheduler scheduler({.max_step_tokens = 32, .max_running = 2}, budget);
  scheduler.add({.key = 1, .num_tokens = 4, .capacity = 8});
  scheduler.plan();
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "a prompt";
  scheduler.ran(1, 4), scheduler.drew(1);
  scheduler.plan();
  EXPECT_EQ(scheduler.grow_ahead(), 1);
  EXPECT_EQ(scheduler.used_bytes(), 10 * 6) << "a token to be run in it, and one that was drawn";
  scheduler.ran(1, 1), scheduler.drew(1);
  scheduler.audit();
  EXPECT_EQ(scheduler.grow_ahead(), 1) << "the one after that";
  scheduler.ran(1, 1), scheduler.drew(1);
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "the eighth token is the last, and nobody runs it";
  scheduler.remove(1);

  scheduler.add({.key = 2, .num_tokens = 4, .capacity = 30});
  scheduler.add({.key = 3, .num_tokens = 4, .capacity = 30});
  run(scheduler);
  scheduler.plan();
  scheduler.add({.key = 4, .num_tokens = 4, .capacity = 30});
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "somebody came";
  EXPECT_EQ(slices(scheduler.plan()), (Slices{{2, 1}, {3, 1}})) << "for whom there is no place";
  EXPECT_EQ(scheduler.grow_ahead(), 2);
  scheduler.set_paused(2, true);
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "who waits may take its place";
  scheduler.set_paused(2, false);
  scheduler.plan();
  EXPECT_EQ(scheduler.grow_ahead(), 2);
  scheduler.remove(4);
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "who waited behind it may fit";
  scheduler.plan();
  EXPECT_EQ(scheduler.grow_ahead(), 2);
  scheduler.isolate(3, 4);
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "one runs alone";
}

TEST(Scheduler, PlansAgainBeforeLongWhereSomebodyWaits) {
  const TokenBudget budget(1000);
  Scheduler scheduler({.max_step_tokens = 32, .max_running = 1}, budget);
  scheduler.add(job(1, 4));
  run(scheduler);
  const auto num_ahead = [&] {
    scheduler.plan();
    int64_t count = 0;
    while (count < 50 && scheduler.grow_ahead() > 0) {
      ++count;
      scheduler.ran(1, 1), scheduler.drew(1);
    }
    return count;
  };
  EXPECT_EQ(num_ahead(), 50);
  scheduler.add(job(2, 4));
  EXPECT_EQ(num_ahead(), Scheduler::kMostAhead);
}

TEST(Scheduler, TakesNoMemoryFromAnybodyForAStepAhead) {
  const TokenBudget budget(12);
  Scheduler scheduler({.max_step_tokens = 32, .max_running = 2}, budget);
  for (const Key key : {1, 2}) scheduler.add({.key = key, .num_tokens = 4, .capacity = 8});
  run(scheduler);
  EXPECT_EQ(slices(scheduler.plan()), (Slices{{1, 1}, {2, 1}}));
  EXPECT_EQ(scheduler.used_bytes(), 10 * (5 + 5));
  EXPECT_EQ(scheduler.grow_ahead(), 2);
  EXPECT_EQ(scheduler.used_bytes(), 10 * (6 + 6));
  for (const Key key : {1, 2}) scheduler.ran(key, 1), scheduler.drew(key);
  EXPECT_EQ(scheduler.grow_ahead(), 0) << "it would take 14 tokens";
  EXPECT_EQ(scheduler.used_bytes(), 10 * (6 + 6));
  scheduler.audit();
  for (const Key key : {1, 2}) scheduler.ran(key, 1), scheduler.drew(key);
  EXPECT_EQ(scheduler.plan().preempted, Keys{2});
}

}  // namespace
}  // namespace tessera::engine
