// SPDX-License-Identifier: Apache-2.0
// The lane of new grammars: different ones are limited, requests for one of them are not but by their number.
#include "server/compiling_lane.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>

namespace tessera::server {
namespace {

// Runs until it is told to end.
class Held final : public Job {
 public:
  Held(std::shared_future<void> end, std::atomic<int>& num_ran) : end_(std::move(end)), num_ran_(num_ran) {}
  void run() noexcept override {
    end_.wait();
    ++num_ran_;
  }

 private:
  std::shared_future<void> end_;
  std::atomic<int>& num_ran_;
};

struct LaneOf {
  explicit LaneOf(size_t grammars, size_t requests) : lane(grammars, requests) {}
  CompilingLane::Added ask(const std::string& key) { return lane.add(key, std::make_unique<Held>(end, num_ran)); }
  bool add(const std::string& key) { return ask(key) == CompilingLane::Added::kYes; }
  void wait_for(int count) {
    while (num_ran < count) std::this_thread::yield();
  }

  std::promise<void> ends;
  std::shared_future<void> end = ends.get_future().share();
  std::atomic<int> num_ran{0};
  CompilingLane lane;
};

TEST(CompilingLane, RequestsForTheSameGrammarTakeOnePlace) {
  LaneOf of(2, 100);
  EXPECT_TRUE(of.add("a"));
  EXPECT_TRUE(of.add("b"));
  for (int i = 0; i < 30; ++i) EXPECT_TRUE(of.add(i % 2 == 0 ? "a" : "b"));
  EXPECT_EQ(of.ask("c"), CompilingLane::Added::kTooManyGrammars);
  of.ends.set_value();
  of.wait_for(32);
  // The last job's place is free once the job is gone, a moment after it ran.
  while (!of.add("c")) std::this_thread::yield();
  of.wait_for(33);
}

TEST(CompilingLane, RequestsThatWaitAreLimited) {
  LaneOf of(2, 3);
  int taken = 0;
  while (of.add("a")) ++taken;  // one may run already
  EXPECT_GE(taken, 3);
  EXPECT_LE(taken, 4);
  EXPECT_EQ(of.ask("a"), CompilingLane::Added::kTooManyRequests);
  of.ends.set_value();
  of.wait_for(taken);
  while (!of.add("a")) std::this_thread::yield();
}

// A grammar that could not be compiled stays so for those that wait for it by then, and not for later ones.
TEST(CompilingLane, AFailureIsForAllThatWait) {
  LaneOf of(2, 10);
  of.lane.fail("a");  // of nobody
  EXPECT_FALSE(of.lane.has_failed("a"));
  EXPECT_TRUE(of.add("a"));
  EXPECT_TRUE(of.add("a"));
  EXPECT_TRUE(of.add("b"));
  of.lane.fail("a");
  EXPECT_TRUE(of.lane.has_failed("a"));
  EXPECT_FALSE(of.lane.has_failed("b"));
  of.ends.set_value();
  of.wait_for(3);
  while (of.lane.has_failed("a")) std::this_thread::yield();
}

// What still waits at the end is dropped; nothing of it is used afterwards.
TEST(CompilingLane, EndsWithRequestsThatWait) {
  std::atomic<int> num_ran{0};
  std::promise<void> ends;
  {
    CompilingLane lane(4, 10);
    const std::shared_future<void> end = ends.get_future().share();
    for (const char* key : {"a", "b", "a", "c"}) {
      EXPECT_EQ(lane.add(key, std::make_unique<Held>(end, num_ran)), CompilingLane::Added::kYes);
    }
    ends.set_value();
  }
  EXPECT_LE(num_ran, 4);
}

}  // namespace
}  // namespace tessera::server
