// SPDX-License-Identifier: Apache-2.0
// The engine's thread: submissions from many threads, cancels, slow consumers, faults, draining.
#include "engine/engine.h"
#include "engine/prefix_store.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <atomic>
#include <chrono>
#include <exception>
#include <new>
#include <thread>

#include "base/rng.h"
#include "base/test_seams.h"
#include "engine/collector.h"
#include "engine/hash_runner.h"
#include "engine/token_queue.h"
#include "testing/failing_new.h"
#include "testing/seed.h"

namespace tessera::engine {
namespace {

// What a request gets alone.
std::vector<int32_t> alone(const Request& request, uint64_t choice, int64_t max_positions) {
  uint64_t context = 0;
  int64_t position = 0;
  for (const int32_t id : request.prompt) context = hash_token(context, position++, id);
  const int64_t end = position + std::min(request.max_tokens, max_positions - position);
  std::vector<int32_t> ids;
  while (position < end) {
    ids.push_back(next_token(context, request.sampling.params.seed + choice, static_cast<uint64_t>(position), 0));
    context = hash_token(context, position++, ids.back());
    if (request.stop_at_end_token && ids.back() == kHashEnd) break;
  }
  return ids;
}

Request draw_request(Rng& rng, int64_t max_tokens) {
  Request request;
  for (uint64_t i = 1 + rng.below(20); i > 0; --i)
    request.prompt.push_back(static_cast<int32_t>(rng.below(kHashVocab)));
  request.max_tokens = max_tokens;
  request.sampling.params.seed = rng.next_u64();
  request.client = rng.below(3);
  request.priority = static_cast<Priority>(rng.below(3));
  return request;
}

RequestId submit(Engine& engine, const Request& request, std::shared_ptr<Sink> sink) {
  const auto submitted = engine.submit(request, std::move(sink));
  if (const Refusal* refused = std::get_if<Refusal>(&submitted)) ADD_FAILURE() << refused->message;
  return std::holds_alternative<RequestId>(submitted) ? std::get<RequestId>(submitted) : 0;
}

class EngineTest : public testing::Test {
 protected:
  const uint64_t seed_ = fresh_seed();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  Rng rng_{seed_};
  PagedBudget budget_{4, 20 * 1000};
  HashRunner runner_{16, 200, budget_, {}, seed_};
};

// Each thread submits, waits, cancels, or reads a queue slowly; every answer is that of the request alone.
TEST_F(EngineTest, ManyThreadsGetWhatEachWouldAlone) {
  Engine engine(runner_, budget_, {.steps = {.swap_bytes = 3000}});
  std::atomic<int64_t> num_right{0}, num_cancelled{0};
  std::vector<std::thread> clients;
  for (uint64_t n = 0; n < 6; ++n) {
    clients.emplace_back([&, n] {
      Rng rng(seed_, n + 1);
      for (int i = 0; i < 60; ++i) {
        Request request = draw_request(rng, static_cast<int64_t>(rng.below(40)));
        if (rng.below(4) == 0) request.num_choices = 3;
        const int num_choices = request.num_choices;
        if (rng.below(3) == 0) {
          auto queue = std::make_shared<TokenQueue>(num_choices + static_cast<int64_t>(rng.below(4)), &engine);
          submit(engine, request, queue);
          std::vector<std::vector<int32_t>> ids(static_cast<size_t>(num_choices));
          for (;;) {
            const TokenQueue::Event event = queue->pop();
            if (std::holds_alternative<Outcome>(event)) break;
            if (const Token* token = std::get_if<Token>(&event))
              ids[static_cast<size_t>(token->choice)].push_back(token->id);
            if (rng.below(8) == 0) std::this_thread::yield();
          }
          for (size_t c = 0; c < ids.size(); ++c) EXPECT_EQ(ids[c], alone(request, c, 200));
          ++num_right;
          continue;
        }
        auto sink = std::make_shared<Collector>(num_choices);
        const RequestId id = submit(engine, request, sink);
        const bool cancels = rng.below(4) == 0;
        if (cancels) engine.cancel(id);
        const Outcome& outcome = sink->wait();
        for (size_t c = 0; c < sink->ids.size(); ++c) {
          const std::vector<int32_t> expected = alone(request, c, 200);
          const size_t count = sink->ids[c].size();
          ASSERT_LE(count, expected.size());
          EXPECT_TRUE(std::equal(sink->ids[c].begin(), sink->ids[c].end(), expected.begin()));
          if (outcome.reasons[c] == FinishReason::kCancelled) {
            EXPECT_TRUE(cancels);
          } else {
            EXPECT_EQ(count, expected.size());
          }
        }
        // Some choices may have ended before the cancellation came.
        const bool was_cancelled =
            std::ranges::find(outcome.reasons, FinishReason::kCancelled) != outcome.reasons.end();
        ++(was_cancelled ? num_cancelled : num_right);
        EXPECT_EQ(sink->num_ends(), 1);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(num_right + num_cancelled, 360);
  EXPECT_TRUE(engine.drain(0));
  const Engine::Status status = engine.status();
  EXPECT_EQ(status.totals.num_requests, 360);
  EXPECT_EQ(status.totals.num_completed, num_right);
  EXPECT_EQ(status.last_step.cache_bytes, 0);
  EXPECT_EQ(runner_.num_states(), 0);
  EXPECT_TRUE(status.is_draining);
  EXPECT_TRUE(status.fault.empty()) << status.fault;
}

TEST_F(EngineTest, SinkStopsAndCancelsFromWithin) {
  Engine engine(runner_, budget_, {});
  Request request = draw_request(rng_, 30);
  request.stop_at_end_token = false;
  const std::vector<int32_t> expected = alone(request, 0, 200);
  auto stopping = std::make_shared<Collector>();
  stopping->stop_at = 5;
  submit(engine, request, stopping);
  EXPECT_EQ(stopping->wait().reasons, std::vector{FinishReason::kStop});
  EXPECT_EQ(stopping->ids[0], std::vector(expected.begin(), expected.begin() + 5));

  request.stop_ids = {expected[7]};
  auto listed = std::make_shared<Collector>();
  submit(engine, request, listed);
  EXPECT_EQ(listed->wait().reasons, std::vector{FinishReason::kStop});
  EXPECT_EQ(listed->ids[0].back(), expected[7]);
  EXPECT_LE(listed->ids[0].size(), 8u);

  request.stop_ids.clear();
  auto cancelling = std::make_shared<Collector>();
  cancelling->engine = &engine, cancelling->cancel_at = 4;
  cancelling->id = 3;  // the third submission
  EXPECT_EQ(submit(engine, request, cancelling), 3u);
  EXPECT_EQ(cancelling->wait().reasons, std::vector{FinishReason::kCancelled});
  EXPECT_EQ(cancelling->ids[0].size(), 4u) << "a cancel takes effect before the next step";
}

TEST_F(EngineTest, RefusesWithFigures) {
  Engine engine(runner_, budget_, {.waiting = {.max_requests = 0}});
  const auto refusal = [&](const Request& request) {
    const auto submitted = engine.submit(request, std::make_shared<Collector>());
    EXPECT_TRUE(std::holds_alternative<Refusal>(submitted));
    return std::holds_alternative<Refusal>(submitted) ? std::get<Refusal>(submitted) : Refusal{};
  };
  const Refusal full = refusal({.prompt = {1, 2}});
  EXPECT_EQ(full.reason, Refusal::Reason::kFull);
  EXPECT_EQ(full.message,
            "busy: requests that wait: 0 of 0, their prompt tokens: 0 of 1048576; this one has 2; try again in 1 s");
  EXPECT_EQ(full.retry_after_seconds, 1);
  EXPECT_EQ(engine.check_room(2)->reason, Refusal::Reason::kFull);
  // Of a request in which one thing is other than in a good one.
  const auto message = [&](const auto& spoil) {
    Request request;
    request.prompt = {1};
    spoil(request);
    return refusal(request).message;
  };
  EXPECT_EQ(message([](Request& r) { r.prompt.clear(); }), "prompt: expected at least one token, found none");
  EXPECT_EQ(message([](Request& r) { r.prompt = {1, 24}; }), "prompt: expected token ids from 0 to 23, found 24");
  EXPECT_EQ(message([](Request& r) { r.prompt.resize(201); }),
            "prompt: expected at most 200 tokens, this model's longest sequence, found 201");
  EXPECT_EQ(message([](Request& r) { r.max_tokens = -1; }), "max-tokens: expected 0 or more, found -1");
  EXPECT_EQ(message([](Request& r) { r.num_choices = 17; }), "choices: expected 1 to 16, found 17");
  EXPECT_EQ(message([](Request& r) { r.stop_ids = {-1}; }), "stop-ids: expected token ids from 0 to 23, found -1");
  EXPECT_EQ(message([](Request& r) { r.stop_ids.resize(257); }), "stop-ids: expected at most 256, found 257");
  EXPECT_EQ(message([](Request& r) { r.logprobs = 21; }), "logprobs: expected 0 to 20, found 21");
  EXPECT_EQ(message([](Request& r) { r.prompt_logprobs = -1; }), "prompt-logprobs: expected 0 to 20, found -1");
  EXPECT_EQ(message([](Request& r) { r.sampling.params.temperature = -1; }),
            "temperature: expected a number from 0 (greedy) to 100, found -1");
  Request large;
  large.prompt = {1}, large.max_tokens = 1000, large.num_choices = 14;
  EXPECT_EQ(refusal(large).reason, Refusal::Reason::kTooLarge);
  EXPECT_EQ(refusal(large).message,
            "14 choices of up to 200 tokens take 1640 bytes each; the cache has 20000 and runs 14 sequences at most");
  engine.drain(0);
  EXPECT_EQ(refusal({.prompt = {1}}).reason, Refusal::Reason::kDraining);
  EXPECT_EQ(engine.check_room(1)->reason, Refusal::Reason::kDraining);
}

// A runner that waits at a gate, so that a step lasts as long as the test wants.
class GatedRunner final : public model::Runner {
 public:
  explicit GatedRunner(model::Runner& inner) : inner_(inner) {}
  const model::ModelFacts& facts() const override { return inner_.facts(); }
  const model::CacheSpec& cache_spec() const override { return inner_.cache_spec(); }
  int64_t max_step_tokens() const override { return inner_.max_step_tokens(); }
  std::unique_ptr<model::SequenceState> new_sequence(int64_t capacity) override {
    return inner_.new_sequence(capacity);
  }
  std::unique_ptr<model::SequenceState> restore(std::span<const uint8_t> bytes) override {
    return inner_.restore(bytes);
  }
  std::unique_ptr<model::SequenceState> resume(const model::StateSnapshot& snapshot, int64_t capacity) override {
    return inner_.resume(snapshot, capacity);
  }
  std::unique_ptr<model::StateSnapshot> restore_snapshot(std::span<const uint8_t> saved,
                                                         std::span<const std::span<const uint8_t>> pages) override {
    return inner_.restore_snapshot(saved, pages);
  }
  TensorView step(std::span<const model::SequenceSlice> slices) override {
    const std::lock_guard<std::mutex> hold(gate);
    return inner_.step(slices);
  }
  TensorView draft(std::span<const model::SequenceSlice> slices) override { return inner_.draft(slices); }
  int32_t sample(const model::SampleRequest& request) override { return inner_.sample(request); }
  void set_tracer(model::Tracer* tracer) override { inner_.set_tracer(tracer); }
  std::mutex gate;

 private:
  model::Runner& inner_;
};

TEST_F(EngineTest, NobodyWaitsForAStep) {
  GatedRunner gated(runner_);
  Engine engine(gated, budget_, {.waiting = {.max_requests = 3}});
  auto first = std::make_shared<Collector>(), second = std::make_shared<Collector>();
  {
    const std::lock_guard<std::mutex> closed(gated.gate);
    submit(engine, {.prompt = {5}, .max_tokens = 3}, first);
    const RequestId id = submit(engine, {.prompt = {6}, .max_tokens = 3}, second);
    engine.cancel(id);
    EXPECT_FALSE(engine.check_room(1));
    engine.wake();
    engine.status();
  }
  first->wait();
  EXPECT_EQ(second->wait().reasons.size(), 1u);
}

TEST_F(EngineTest, DrainEndsWhatIsLeftAtItsDeadline) {
  GatedRunner gated(runner_);
  auto sink = std::make_shared<Collector>();
  Engine engine(gated, budget_, {});
  Request request = draw_request(rng_, 150);
  request.stop_at_end_token = false;
  std::thread drainer;
  {
    const std::lock_guard<std::mutex> closed(gated.gate);
    submit(engine, request, sink);
    drainer = std::thread([&] { EXPECT_FALSE(engine.drain(0.01)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  drainer.join();
  EXPECT_EQ(sink->wait().reasons, std::vector{FinishReason::kCancelled});
  EXPECT_EQ(sink->wait().error, "shutting down");
  EXPECT_EQ(runner_.num_states(), 0);
}

TEST_F(EngineTest, DestructorEndsEveryRequest) {
  std::vector<std::shared_ptr<Collector>> sinks;
  {
    Engine engine(runner_, budget_, {});
    for (int i = 0; i < 40; ++i) {
      sinks.push_back(std::make_shared<Collector>());
      submit(engine, draw_request(rng_, 100), sinks.back());
    }
  }
  for (const auto& sink : sinks) EXPECT_EQ(sink->num_ends(), 1);
  EXPECT_EQ(runner_.num_states(), 0);
}

TEST_F(EngineTest, SlowConsumerEndsAloneAndLosesNothing) {
  Engine engine(runner_, budget_, {.steps = {.slow_consumer_seconds = 0.05}});
  Request request = draw_request(rng_, 20);
  request.stop_at_end_token = false;
  auto stuck = std::make_shared<TokenQueue>(4, &engine);
  submit(engine, request, stuck);
  auto other = std::make_shared<Collector>();
  submit(engine, request, other);
  EXPECT_EQ(other->wait().reasons, std::vector{FinishReason::kLength});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const std::vector<int32_t> expected = alone(request, 0, 200);
  std::vector<int32_t> ids;
  for (;;) {
    const TokenQueue::Event event = stuck->pop();
    if (const Token* token = std::get_if<Token>(&event)) ids.push_back(token->id);
    if (const Outcome* outcome = std::get_if<Outcome>(&event)) {
      EXPECT_EQ(outcome->reasons, std::vector{FinishReason::kFailed});
      EXPECT_EQ(outcome->error_code, ErrorCode::kResourceExhausted);
      EXPECT_EQ(outcome->error, "its tokens were not taken for 0.05 s");
      break;
    }
  }
  EXPECT_EQ(ids, std::vector(expected.begin(), expected.begin() + 4)) << "all that were drawn are there";
  EXPECT_FALSE(stuck->try_pop());
}

// An exception where none may be ends the requests of that moment; the next ones find a sound engine.
class BreakingObserver final : public StepObserver {
 public:
  void step(const StepStats&, const Totals&) override {
    if (breaks.exchange(false)) fail(ErrorCode::kInternal, "planted");
  }
  std::atomic<bool> breaks{false};
};

TEST_F(EngineTest, SurvivesABrokenInvariant) {
  BreakingObserver observer;
  Engine engine(runner_, budget_, {.steps = {.observer = &observer}});
  Request request = draw_request(rng_, 150);
  request.stop_at_end_token = false;
  observer.breaks = true;
  auto lost = std::make_shared<Collector>(), sound = std::make_shared<Collector>();
  submit(engine, request, lost);
  EXPECT_EQ(lost->wait().reasons, std::vector{FinishReason::kFailed});
  EXPECT_EQ(lost->wait().error, "planted");
  submit(engine, request, sound);
  EXPECT_EQ(sound->wait().reasons, std::vector{FinishReason::kLength});
  EXPECT_EQ(sound->ids[0], alone(request, 0, 200));
  EXPECT_EQ(engine.status().fault, "planted");
}

// Memory that ends where the loop keeps its lists costs the requests of that moment. Only where it ends again and again
// does the engine call itself broken.
class ShortObserver final : public StepObserver {
 public:
  void step(const StepStats&, const Totals&) override {
    if (num_left > 0 && num_left-- > 0) throw std::bad_alloc();
  }
  std::atomic<int> num_left{0};
};

TEST_F(EngineTest, WantOfMemoryIsAFaultOnceItIsLasting) {
  ShortObserver observer;
  Engine engine(runner_, budget_, {.steps = {.observer = &observer}});
  const auto lose_requests = [&](int count) {
    observer.num_left = count;
    for (int i = 0; i < count; ++i) {
      auto lost = std::make_shared<Collector>();
      Request request = draw_request(rng_, 150);
      request.stop_at_end_token = false;
      submit(engine, request, lost);
      EXPECT_EQ(lost->wait().error, "out of memory");
      EXPECT_EQ(lost->wait().error_code, ErrorCode::kResourceExhausted);
    }
  };
  const auto find_fault_within = [&](int milliseconds) {
    for (int i = 0; i < milliseconds && engine.status().fault.empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return engine.status().fault;
  };
  for (int round = 0; round < 2; ++round) {
    lose_requests(7);
    const Request request = draw_request(rng_, 150);
    auto sound = std::make_shared<Collector>();
    submit(engine, request, sound);
    sound->wait();
    EXPECT_EQ(sound->ids[0], alone(request, 0, 200));
    // The observer still sees the step that ended it: not one of those that are to throw.
    for (int i = 0; i < 10000 && engine.status().totals.num_completed <= round; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(engine.status().fault, "") << "steps between count it anew";
  }
  lose_requests(7);
  EXPECT_EQ(find_fault_within(20), "");
  lose_requests(1);
  EXPECT_EQ(find_fault_within(10000), "out of memory");
}

#ifdef TESSERA_TEST_SEAMS
// An error that breaks the loop while there is no memory left at all, not even for its message.
class BreakingWithoutMemory final : public StepObserver {
 public:
  struct Planted : std::exception {
    const char* what() const noexcept override { return "planted, in a line too long for a string without memory"; }
  };
  void step(const StepStats&, const Totals&) override {
    if (!breaks.exchange(false)) return;
    seams::fail_allocation(1, int64_t{1} << 40);
    throw Planted();
  }
  std::atomic<bool> breaks{true};
};

class SinkWithoutMemory final : public Sink {
 public:
  bool token(const Token&) override { return true; }
  void finished(const Outcome& how) override {
    seams::fail_allocation(0);
    is_told = how.error == "out of memory" && how.reasons.size() == 1 && how.reasons[0] == FinishReason::kFailed;
    has_ended = true;
  }
  std::atomic<bool> is_told{false}, has_ended{false};
};

TEST_F(EngineTest, ABrokenInvariantNeedsNoMemory) {
  if (!seams::can_new_fail()) GTEST_SKIP() << "operator new is a sanitizer's";
  seams::spare_this_thread(true);
  {
    BreakingWithoutMemory observer;
    Engine engine(runner_, budget_, {.steps = {.observer = &observer}});
    Request request = draw_request(rng_, 150);
    request.stop_at_end_token = false;
    auto lost = std::make_shared<SinkWithoutMemory>();
    submit(engine, request, lost);
    for (int i = 0; i < 10000 && !lost->has_ended; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(lost->is_told);
    auto sound = std::make_shared<Collector>();
    submit(engine, request, sound);
    sound->wait();
    EXPECT_EQ(sound->ids[0], alone(request, 0, 200));
  }
  seams::spare_this_thread(false);
}
#endif

// A sink that throws ends its own request.
class ThrowingSink final : public Sink {
 public:
  bool token(const Token&) override { throw std::runtime_error("the sink is full of water"); }
  void finished(const Outcome& how) override { collector.finished(how); }
  Collector collector;
};

TEST_F(EngineTest, ThrowingSinkEndsItsOwnRequest) {
  Engine engine(runner_, budget_, {});
  auto throwing = std::make_shared<ThrowingSink>();
  auto other = std::make_shared<Collector>();
  const Request request = draw_request(rng_, 20);
  submit(engine, request, throwing);
  submit(engine, request, other);
  EXPECT_EQ(throwing->collector.wait().error, "the sink is full of water");
  other->wait();
  EXPECT_EQ(other->ids[0], alone(request, 0, 200));
}

class RoomlessSink final : public Sink {
 public:
  int64_t room() const override { throw std::runtime_error("no telling"); }
  bool token(const Token&) override { return true; }
  void finished(const Outcome& how) override { collector.finished(how); }
  Collector collector;
};

TEST_F(EngineTest, SinkThatCannotSayItsRoomEndsItsOwnRequest) {
  Engine engine(runner_, budget_, {});
  auto roomless = std::make_shared<RoomlessSink>();
  auto other = std::make_shared<Collector>();
  Request request = draw_request(rng_, 20);
  request.stop_at_end_token = false;
  submit(engine, request, roomless);
  submit(engine, request, other);
  EXPECT_EQ(roomless->collector.wait().error, "no telling");
  other->wait();
  EXPECT_EQ(other->ids[0], alone(request, 0, 200));
}

// A store that fails where it is asked how far to run.
class FailingStore final : public PrefixStore {
 public:
  std::unique_ptr<model::SequenceState> find(const Request&, std::span<const int32_t>, int64_t) override {
    return nullptr;
  }
  int64_t next_offer(const Request& request, int64_t position) override {
    if (request.client == 7) throw std::runtime_error("the store is on fire");
    return position + 1000;
  }
  void offer(const Request&, std::span<const int32_t>, const model::SequenceState&) override {}
  void forget(const Request&, std::span<const int32_t>) override {}
  bool give_up() override { return false; }
  PrefixStats stats() const override { return {}; }
};

TEST_F(EngineTest, FailingStoreEndsTheRequestThatAskedIt) {
  FailingStore store;
  Engine engine(runner_, budget_, {.steps = {.prefixes = &store}});
  auto lost = std::make_shared<Collector>(), other = std::make_shared<Collector>();
  Request request = draw_request(rng_, 20);
  submit(engine, request, other);
  Request unlucky = request;
  unlucky.client = 7;
  submit(engine, unlucky, lost);
  EXPECT_EQ(lost->wait().error, "the store is on fire");
  other->wait();
  EXPECT_EQ(other->ids[0], alone(request, 0, 200));
}

}  // namespace
TEST(TokenQueue, WaitsNoLongerThanItIsTold) {
  TokenQueue queue(4, nullptr);
  EXPECT_FALSE(queue.pop_within(std::chrono::milliseconds(1)).has_value());
  queue.token({.choice = 0, .id = 7, .logprobs = std::nullopt});
  const auto event = queue.pop_within(std::chrono::milliseconds(0));
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(std::get<Token>(*event).id, 7);
}

}  // namespace tessera::engine
