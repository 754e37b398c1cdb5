// SPDX-License-Identifier: Apache-2.0
// A model of two ranks behind one runner: what one rank does, it does.
#include "model/mirrored_runner.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>

#include "backends/registry.h"
#include "base/error.h"
#include "comm/joined_ranks.h"
#include "comm/tcp_communicator.h"
#include "model/load_model.h"
#include "model/model_helpers.h"

namespace tessera::model {
namespace {

using tessera::testing::feed;
using tessera::testing::run_joined;
using ::testing::Each;
using ::testing::ElementsAre;

const std::string kTiny = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";
const std::vector<int32_t> kPrompt = {0, 17, 300, 45, 9, 812, 44, 44, 7};

std::unique_ptr<Runner> load(comm::Communicator* comm) {
  LoadOptions options;
  options.num_threads = 1;
  options.with_draft = false;
  options.comm = comm;
  if (comm != nullptr) options.shard = {comm->rank(), comm->world(), AttentionSplit::kWhole, ExpertSplit::kById};
  return load_model(kTiny, options, backends::all_backends(), device::probe_machine(), nullptr, nullptr).runner;
}

ErrorCode code_of_step(Runner& runner, SequenceState& state, std::span<const int32_t> ids) {
  const SequenceSlice slice{&state, ids};
  try {
    runner.step({&slice, 1});
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

// Sequences that are copied, taken back, kept and refused.
std::vector<float> use(Runner& runner) {
  std::vector<float> logits;
  const auto keep = [&](SequenceState& state, std::vector<int32_t> ids) {
    const std::vector<float> rows = feed(runner, state, ids, LogitRows::kAll);
    logits.insert(logits.end(), rows.begin(), rows.end());
  };
  auto state = runner.new_sequence(20);
  keep(*state, kPrompt);
  const auto snapshot = state->snapshot();
  const auto mark = state->mark();
  const auto copy = state->fork();
  keep(*copy, {5, 6});
  keep(*state, {7, 8});
  state->rollback(*mark);
  keep(*state, {5, 6});
  EXPECT_EQ(code_of_step(runner, *state, std::vector<int32_t>(12, 3)), ErrorCode::kInvalidArgument);  // too long
  EXPECT_EQ(code_of_step(runner, *state, std::vector<int32_t>{-1}), ErrorCode::kInvalidArgument);
  state.reset();
  keep(*runner.resume(*snapshot, 64), {9, 10, 11});
  EXPECT_THROW(runner.new_sequence(int64_t{1} << 40), Error);
  Draw draw;
  const std::vector<int32_t> ids = {4};
  const SequenceSlice slice{copy.get(), ids, LogitRows::kNone, &draw};
  runner.step({&slice, 1});
  logits.push_back(static_cast<float>(draw.token));
  return logits;
}

TEST(MirroredRunner, GivesTheBitsOfOneRank) {
  std::vector<float> shared;
  const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
    const auto comm = comm::make_tcp(bootstrap, 120);
    const auto runner = load(comm.get());
    if (bootstrap.rank() == 0) {
      MirroredRunner mirrored(*runner, bootstrap);
      shared = use(mirrored);
    } else {
      follow(*runner, bootstrap);
    }
    bootstrap.all_gather({});
  });
  EXPECT_THAT(errors, Each(""));
  EXPECT_EQ(shared, use(*load(nullptr)));
}

// A runner without a model, whose steps are a function.
class Fake : public Runner {
 public:
  explicit Fake(std::function<void()> work) : work_(std::move(work)) { facts_.vocab_size = 64; }
  const ModelFacts& facts() const override { return facts_; }
  const CacheSpec& cache_spec() const override { return spec_; }
  int64_t max_step_tokens() const override { return 8; }
  std::unique_ptr<SequenceState> new_sequence(int64_t) override { return std::make_unique<State>(); }
  std::unique_ptr<SequenceState> restore(std::span<const uint8_t>) override { return nullptr; }
  std::unique_ptr<SequenceState> resume(const StateSnapshot&, int64_t) override { return nullptr; }
  std::unique_ptr<StateSnapshot> restore_snapshot(std::span<const uint8_t>,
                                                  std::span<const std::span<const uint8_t>>) override {
    return nullptr;
  }
  TensorView step(std::span<const SequenceSlice>) override { return work_(), TensorView{}; }
  TensorView draft(std::span<const SequenceSlice>) override { return work_(), TensorView{}; }
  int32_t sample(const SampleRequest&) override { return 0; }
  void set_tracer(Tracer* tracer) override { is_traced_ = tracer != nullptr; }
  bool is_traced() const { return is_traced_; }

 private:
  class State final : public SequenceState {
   public:
    int64_t position() const override { return 0; }
    int64_t capacity() const override { return 8; }
    std::unique_ptr<SequenceState> fork() const override { return std::make_unique<State>(); }
    std::unique_ptr<StateSnapshot> snapshot() const override { return nullptr; }
    std::unique_ptr<StateMark> mark() const override { return nullptr; }
    void rollback(const StateMark&) override {}
    std::vector<uint8_t> save() const override { return {}; }
  };

  std::function<void()> work_;
  bool is_traced_ = false;
  ModelFacts facts_;
  CacheSpec spec_;
};

// What rank 0's program is told.
class Told final : public comm::LossSink {
 public:
  void lost(int, const std::string& message) override {
    const std::lock_guard lock(lock_);
    said_.push_back(message);
  }
  std::vector<std::string> said() {
    const std::lock_guard lock(lock_);
    return said_;
  }

 private:
  std::mutex lock_;
  std::vector<std::string> said_;
};

// Returns by an exception, once the group has ended.
void wait_for_the_end(comm::Bootstrap& bootstrap) {
  while (true) {
    bootstrap.check();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// Steps of two ranks' fakes, as long as they go well; what rank 0's program was told, and of each rank its error.
struct End {
  std::vector<std::string> told, errors;
};
template <class Step>
End step_until_the_end(const Step& step, int num_steps = 1) {
  Told told;
  const auto errors = run_joined(
      2,
      [&](comm::Bootstrap& bootstrap) {
        const auto comm = comm::make_tcp(bootstrap, bootstrap.rank() == 0 ? 1 : 120);
        Fake fake([&] { step(bootstrap, *comm); });
        if (bootstrap.rank() == 1) return follow(fake, bootstrap);
        MirroredRunner mirrored(fake, bootstrap);
        const auto state = mirrored.new_sequence(8);
        const std::vector<int32_t> ids = {1};
        const SequenceSlice slice{state.get(), ids};
        // An engine goes on after a step that failed.
        for (int n = 0; n + 1 < num_steps; ++n) EXPECT_THROW(mirrored.step({&slice, 1}), Error);
        mirrored.step({&slice, 1});
      },
      &told);
  return {told.said(), errors};
}

// The engine that asked for the step goes on to the next: it is the program that has to end.
TEST(MirroredRunner, AFaultOfRank0AloneIsToldToItsProgram) {
  const End end = step_until_the_end([](comm::Bootstrap& bootstrap, comm::Communicator& comm) {
    if (bootstrap.rank() == 1) wait_for_the_end(bootstrap);  // but for its heartbeats
    device::Queue queue(1);
    float sum = 1;
    const TensorView view{&sum, DType::kF32, {1}};
    comm.all_reduce(view, view, queue);
  });
  const std::string why = "all_reduce of 1 F32 into F32: rank 1 of 2 stalls: nothing came from it within 1 s";
  EXPECT_THAT(end.told, ElementsAre("rank 0 of 2 failed: " + why));
  EXPECT_THAT(end.errors, ElementsAre(why, "rank 0 of 2 failed: " + why));
}

// Masks stay on rank 0: nobody else finds the fault.
TEST(MirroredRunner, ABadMaskFailsItsStepAlone) {
  int steps[2] = {};
  Told told;
  const auto errors = run_joined(
      2,
      [&](comm::Bootstrap& bootstrap) {
        Fake fake([&] { ++steps[bootstrap.rank()]; });
        if (bootstrap.rank() == 1) return follow(fake, bootstrap);
        MirroredRunner mirrored(fake, bootstrap);
        const auto state = mirrored.new_sequence(8);
        const std::vector<int32_t> ids = {1};
        const std::vector<uint32_t> mask = {1, 2, 3};
        Draw draw;
        const SequenceSlice slice{state.get(), ids, LogitRows::kLast, &draw};
        draw.mask = mask;
        EXPECT_THROW(mirrored.step({&slice, 1}), Error);
        draw.mask = std::span(mask).first(2);
        mirrored.step({&slice, 1});
      },
      &told);
  EXPECT_THAT(errors, Each(""));
  EXPECT_THAT(steps, Each(1));
  EXPECT_THAT(told.said(), ElementsAre());
}

// Traced steps sum over ranks by other kernels than fused ones: all ranks trace, or none.
TEST(MirroredRunner, EveryRankTracesWhatRank0Traces) {
  struct Looks final : Tracer {
    void tensor(std::string_view, const TensorView&) override {}
  };
  std::vector<bool> traced[2];  // of each step
  const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
    Fake* seen = nullptr;
    Fake fake([&] { traced[bootstrap.rank()].push_back(seen->is_traced()); });
    seen = &fake;
    if (bootstrap.rank() == 1) {
      follow(fake, bootstrap);
      EXPECT_FALSE(fake.is_traced());  // by what has gone with follow()
      return;
    }
    Looks looks;
    MirroredRunner mirrored(fake, bootstrap);
    const auto state = mirrored.new_sequence(8);
    const std::vector<int32_t> ids = {1};
    const SequenceSlice slice{state.get(), ids};
    for (Tracer* tracer : {static_cast<Tracer*>(nullptr), static_cast<Tracer*>(&looks), static_cast<Tracer*>(nullptr),
                           static_cast<Tracer*>(&looks)}) {
      mirrored.set_tracer(tracer);
      mirrored.step({&slice, 1});
    }
  });
  EXPECT_THAT(errors, Each(""));
  for (const std::vector<bool>& of_rank : traced) EXPECT_THAT(of_rank, ElementsAre(false, true, false, true));
}

TEST(MirroredRunner, OrdersOfUnknownStatesAreRefused) {
  const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
    Fake fake([] {});
    if (bootstrap.rank() == 1) return follow(fake, bootstrap);
    std::vector<uint8_t> fork(1 + 2 * sizeof(uint64_t));  // kind, number of the copy, and of what is copied: 7
    fork[0] = 1, fork[1 + sizeof(uint64_t)] = 7;
    bootstrap.send_order(fork);
    bootstrap.all_gather({}, 120);
  });
  EXPECT_EQ(errors[1], "an order speaks of sequence 7, which is not here");
}

// The others wait in a sum of that step, where the next one would meet them.
// Ranks that share pages would write each other's over.
TEST(MirroredRunner, ARankWhosePagesPartedMakesNoStep) {
  class Paged final : public Fake {
   public:
    Paged(const std::function<void()>& step, uint64_t history) : Fake(step), history_(history) {}
    uint64_t page_history() const override { return history_; }

   private:
    uint64_t history_;
  };
  for (const uint64_t parted : {0, 1}) {
    std::atomic<int> num_steps = 0;
    const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
      const auto rank = static_cast<uint64_t>(bootstrap.rank());
      Paged paged([&] { ++num_steps; }, 7 + parted * rank);
      if (rank == 1) return follow(paged, bootstrap);
      MirroredRunner mirrored(paged, bootstrap);
      const auto state = mirrored.new_sequence(8);
      const std::vector<int32_t> ids = {1};
      const SequenceSlice slice{state.get(), ids};
      mirrored.step({&slice, 1});
    });
    EXPECT_EQ(errors[1], parted == 0 ? ""
                                     : "pages were taken otherwise on rank 0 (0000000000000007) than here "
                                       "(0000000000000008)");
    EXPECT_EQ(num_steps, parted == 0 ? 2 : 1);
  }
}

TEST(MirroredRunner, MemoryThatEndsOnRank0EndsTheGroup) {
  const auto step = [](comm::Bootstrap& bootstrap, comm::Communicator& comm) {
    if (bootstrap.rank() == 0) fail(ErrorCode::kResourceExhausted, "no page left");
    device::Queue queue(1);
    float sum = 1;
    const TensorView view{&sum, DType::kF32, {1}};
    comm.all_reduce(view, view, queue);
  };
  const End end = step_until_the_end(step, 2);
  EXPECT_THAT(end.told, ElementsAre("rank 0 of 2 failed: no page left"));
  EXPECT_EQ(end.errors[0], "rank 0 of 2 failed: no page left");
}

// Also while the bootstrap still waits for the last words of others.
TEST(MirroredRunner, ALossThatEndsAStepIsToldToRank0sProgram) {
  const End end = step_until_the_end([](comm::Bootstrap& bootstrap, comm::Communicator&) {
    if (bootstrap.rank() == 1) bootstrap.fail("out of luck");
    wait_for_the_end(bootstrap);
  });
  EXPECT_THAT(end.told, ElementsAre("rank 1 of 2 failed: out of luck"));
  EXPECT_EQ(end.errors[0], "rank 1 of 2 failed: out of luck");
}

// Writes down what it is told; the tokens that follow need nobody's word.
class Halves final : public Fake {
 public:
  // `finish` is called with the number of steps finished before; `goes_on`: whether it queues a next step.
  Halves(std::function<void(int)> finish, bool goes_on) : Fake([] {}), finish_(std::move(finish)), goes_on_(goes_on) {}
  bool can_run_ahead() const override { return true; }
  void queue_step(std::span<const SequenceSlice> slices) override {
    said.push_back("step");
    for (const SequenceSlice& slice : slices) note(*slice.draw, slice.ids[0]);
  }
  bool queue_next(std::span<Draw* const> draws) override {
    if (!goes_on_) return false;
    said.push_back("next");
    for (const Draw* draw : draws) note(*draw, -1);
    return true;
  }
  TensorView finish_step() override {
    said.push_back("finish");
    finish_(num_finished_++);
    return {};
  }
  std::vector<std::string> said;

 private:
  void note(const Draw& draw, int32_t id) {
    said.back() += fmt::format(" {}: {} {} at {}", id, draw.params.temperature, draw.params.seed, draw.position);
    for (const uint32_t word : draw.mask) said.back() += fmt::format(" {}", word);
  }
  std::function<void(int)> finish_;
  bool goes_on_;
  int num_finished_ = 0;
};

// Two sequences, three steps of which two are queued ahead, and where the third fails one more.
void run_ahead(MirroredRunner& mirrored) {
  const auto one = mirrored.new_sequence(8), two = mirrored.new_sequence(8);
  const std::vector<int32_t> ids = {5, 6};
  Draw draws[4][2];
  const std::vector<uint32_t> mask = {3, 4};
  for (uint64_t n = 0; n < 4; ++n) {
    for (uint64_t i = 0; i < 2; ++i) draws[n][i] = {.params = {.temperature = 0.5f, .seed = 7 + i}, .position = n + 1};
    draws[n][1].mask = mask;
  }
  const auto queue = [&](Draw* of) {
    const SequenceSlice slices[] = {{one.get(), std::span(ids).first(1), LogitRows::kNone, &of[0]},
                                    {two.get(), std::span(ids).last(1), LogitRows::kNone, &of[1]}};
    mirrored.queue_step(slices);
  };
  const auto go_on = [&](Draw* of) {
    Draw* const places[] = {&of[0], &of[1]};
    EXPECT_TRUE(mirrored.queue_next(places));
  };
  queue(draws[0]);
  go_on(draws[1]);
  mirrored.finish_step();
  go_on(draws[2]);
  mirrored.finish_step();
  EXPECT_THROW(mirrored.finish_step(), Error);
  queue(draws[3]);
  mirrored.finish_step();
}

TEST(MirroredRunner, StepsAreQueuedAheadOnEveryRank) {
  std::vector<std::string> said[2];
  const auto fails_third = [](int num_finished) {
    if (num_finished == 2) fail(ErrorCode::kNotFinite, "a request's fault");
  };
  const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
    Halves halves(fails_third, true);
    if (bootstrap.rank() == 0) {
      MirroredRunner mirrored(halves, bootstrap);
      run_ahead(mirrored);
    } else {
      follow(halves, bootstrap);
    }
    said[bootstrap.rank()] = halves.said;
  });
  EXPECT_THAT(errors, Each(""));
  EXPECT_EQ(said[1], said[0]);
  EXPECT_THAT(said[0], ElementsAre("step 5: 0.5 7 at 1 6: 0.5 8 at 1 3 4", "next -1: 0.5 7 at 2 -1: 0.5 8 at 2 3 4",
                                   "finish", "next -1: 0.5 7 at 3 -1: 0.5 8 at 3 3 4", "finish", "finish",
                                   "step 5: 0.5 7 at 4 6: 0.5 8 at 4 3 4", "finish"));
}

// Others are told of two masks; of a step with more they draw other tokens, from which no step goes on.
TEST(MirroredRunner, MasksOfAStepAreToldWhereTheyAreFew) {
  std::vector<std::string> said[2];
  const auto errors = run_joined(2, [&](comm::Bootstrap& bootstrap) {
    Halves halves([](int) {}, true);
    if (bootstrap.rank() == 0) {
      MirroredRunner mirrored(halves, bootstrap);
      const std::vector<int32_t> ids = {5};
      const std::vector<uint32_t> masks[] = {{1, 2}, {3, 4}, {5, 6}};
      std::unique_ptr<SequenceState> states[3];
      for (auto& state : states) state = mirrored.new_sequence(8);
      for (const size_t count : {3, 2, 3}) {
        const bool are_few = count == 2 || said[0].empty();
        Draw draws[3], next[3];
        std::vector<SequenceSlice> slices;
        std::vector<Draw*> places;
        for (size_t i = 0; i < count; ++i) {
          draws[i].mask = next[i].mask = masks[are_few ? i / 2 : i];
          slices.push_back({states[i].get(), ids, LogitRows::kNone, &draws[i]});
          places.push_back(&next[i]);
        }
        mirrored.queue_step(slices);
        EXPECT_EQ(mirrored.queue_next(places), are_few);
        for (int steps = are_few ? 2 : 1; steps > 0; --steps) mirrored.finish_step();
        said[0] = halves.said;
      }
    } else {
      follow(halves, bootstrap);
      said[1] = halves.said;
    }
  });
  EXPECT_THAT(errors, Each(""));
  const std::vector<std::string> common = {"step 5: 0 0 at 0 1 2 5: 0 0 at 0 1 2 5: 0 0 at 0 3 4",
                                           "next -1: 0 0 at 0 1 2 -1: 0 0 at 0 1 2 -1: 0 0 at 0 3 4",
                                           "finish",
                                           "finish",
                                           "step 5: 0 0 at 0 1 2 5: 0 0 at 0 1 2",
                                           "next -1: 0 0 at 0 1 2 -1: 0 0 at 0 1 2",
                                           "finish",
                                           "finish"};
  const auto with = [&](const char* step) {
    std::vector<std::string> all = common;
    all.insert(all.end(), {step, "finish"});
    return all;
  };
  EXPECT_EQ(said[0], with("step 5: 0 0 at 0 1 2 5: 0 0 at 0 3 4 5: 0 0 at 0 5 6"));
  EXPECT_EQ(said[1], with("step 5: 0 0 at 0 5: 0 0 at 0 5: 0 0 at 0"));
}

TEST(MirroredRunner, ARankThatHasNoRoomForAStepAheadEndsTheGroup) {
  Told told;
  const auto errors = run_joined(
      2,
      [&](comm::Bootstrap& bootstrap) {
        Halves halves([&](int) { wait_for_the_end(bootstrap); }, bootstrap.rank() == 0);
        if (bootstrap.rank() == 0) {
          MirroredRunner mirrored(halves, bootstrap);
          return run_ahead(mirrored);
        }
        try {
          follow(halves, bootstrap);
        } catch (const Error& error) {
          bootstrap.fail(error.what());
        }
      },
      &told);
  EXPECT_THAT(told.said(), ElementsAre("rank 1 of 2 failed: no room here for a step that rank 0 has queued"));
}

}  // namespace
}  // namespace tessera::model
