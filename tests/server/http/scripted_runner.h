// SPDX-License-Identifier: Apache-2.0
#pragma once
// A runner that says a given text after every <｜Assistant｜>, token by token, then ends, as slowly as a test wants.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "model/runner.h"

namespace tessera::server {

class ScriptedRunner final : public model::Runner {
 public:
  // `ids` is the answer, `begin_id` the token after which it begins, `skipped_ids` those that are no
  // part of it, `end_id` the end token.
  ScriptedRunner(std::vector<int32_t> ids, int32_t begin_id, std::vector<int32_t> skipped_ids, int32_t end_id,
                 int32_t vocab)
      : ids_(std::move(ids)), begin_id_(begin_id), skipped_ids_(std::move(skipped_ids)), end_id_(end_id) {
    facts_.vocab_size = vocab;
    facts_.max_positions = 1 << 16;
    facts_.eos_ids = {end_id};
    facts_.precision = "scripted";
    spec_.snapshot_bytes = 64;
    spec_.kinds.push_back({"layers.0.window", 64, 16, 0});
    spec_.kinds.push_back({"layers.0.entries", 8, 0, 1});
  }

  const model::ModelFacts& facts() const override { return facts_; }
  const model::CacheSpec& cache_spec() const override { return spec_; }
  int64_t max_step_tokens() const override { return 256; }
  std::unique_ptr<model::SequenceState> new_sequence(int64_t capacity) override {
    return std::make_unique<State>(*this, capacity);
  }
  std::unique_ptr<model::SequenceState> restore(std::span<const uint8_t>) override { return nullptr; }
  std::unique_ptr<model::SequenceState> resume(const model::StateSnapshot& snapshot, int64_t capacity) override {
    return std::make_unique<State>(*static_cast<const Snapshot&>(snapshot).state, capacity);
  }
  std::unique_ptr<model::StateSnapshot> restore_snapshot(std::span<const uint8_t>,
                                                         std::span<const std::span<const uint8_t>>) override {
    return nullptr;
  }
  TensorView step(std::span<const model::SequenceSlice> slices) override {
    const double begin = thread_seconds();
    if (left_at_ > 0) outside_seconds_ += begin - left_at_;
    struct Leaving {
      ~Leaving() { at = thread_seconds(); }
      double& at;
    } const leaving{left_at_};
    if (step_microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(step_microseconds));
    ++num_steps;
    if (throws) fail(ErrorCode::kDeviceError, "the device is gone");
    const auto vocab = static_cast<size_t>(facts_.vocab_size);
    logits_.clear();
    for (const model::SequenceSlice& slice : slices) {
      auto& state = static_cast<State&>(*slice.state);
      for (size_t i = 0; i < slice.ids.size(); ++i) {
        state.push(slice.ids[i]);
        if (slice.logits == model::LogitRows::kNone) continue;
        if (slice.logits == model::LogitRows::kLast && i + 1 < slice.ids.size()) continue;
        logits_.resize(logits_.size() + vocab, -10.0f);
        logits_[logits_.size() - vocab + static_cast<size_t>(state.next())] = 10.0f;
      }
      if (slice.draw != nullptr) slice.draw->token = first_allowed(state.next(), slice.draw->mask);
    }
    for (const model::SequenceSlice& slice : slices) {
      if (slice.draw != nullptr) note(slice.draw->params.seed);
    }
    return {logits_.data(), DType::kF32, {static_cast<int64_t>(logits_.size() / vocab), static_cast<int64_t>(vocab)}};
  }
  TensorView draft(std::span<const model::SequenceSlice>) override { return {}; }
  int32_t sample(const model::SampleRequest& request) override {
    ++num_sampled;
    note(request.params.seed);
    return first_allowed(
        static_cast<int32_t>(std::max_element(request.logits.begin(), request.logits.end()) - request.logits.begin()),
        request.mask);
  }
  void set_tracer(model::Tracer*) override {}

  std::atomic<int64_t> step_microseconds{0}, num_steps{0}, num_states{0};
  std::atomic<int64_t> num_sampled{0};  // tokens that were drawn apart from a step, which costs a row of logits
  std::atomic<bool> throws{false}, keeps_times{false};
  // Of the processor, that the engine's thread used between steps. To be read once nothing runs.
  double outside_seconds() const { return outside_seconds_; }
  // When the tokens of the request with this seed were made, in seconds of the steady clock. To be read once nothing
  // runs.
  const std::vector<double>& made(uint64_t seed) { return made_[seed]; }

 private:
  static double thread_seconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  // A token of the request with this seed is made.
  void note(uint64_t seed) {
    if (!keeps_times) return;
    made_[seed].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count());
  }

  // What is to be said; where a mask forbids it, the first token that it allows.
  static int32_t first_allowed(int32_t id, std::span<const uint32_t> mask) {
    const auto is_allowed = [&](size_t at) { return (mask[at / 32] >> (at % 32) & 1) != 0; };
    if (mask.empty() || is_allowed(static_cast<size_t>(id))) return id;
    size_t at = 0;
    while (at < 32 * mask.size() && !is_allowed(at)) ++at;
    return at < 32 * mask.size() ? static_cast<int32_t>(at) : -1;
  }

  class State final : public model::SequenceState {
   public:
    State(ScriptedRunner& runner, int64_t capacity) : runner_(runner), capacity_(capacity) { ++runner_.num_states; }
    State(const State& other) : State(other, other.capacity_) {}
    State(const State& other, int64_t capacity)
        : runner_(other.runner_), capacity_(capacity), position_(other.position_), said_(other.said_) {
      ++runner_.num_states;
    }
    ~State() override { --runner_.num_states; }
    int64_t position() const override { return position_; }
    int64_t capacity() const override { return capacity_; }
    std::unique_ptr<model::SequenceState> fork() const override { return std::make_unique<State>(*this); }
    std::unique_ptr<model::StateSnapshot> snapshot() const override { return std::make_unique<Snapshot>(*this); }
    std::unique_ptr<model::StateMark> mark() const override { return nullptr; }
    void rollback(const model::StateMark&) override {}
    std::vector<uint8_t> save() const override { return {}; }
    void push(int32_t id) {
      ++position_;
      if (id == runner_.begin_id_) {
        said_ = 0;
      } else if (std::find(runner_.skipped_ids_.begin(), runner_.skipped_ids_.end(), id) ==
                 runner_.skipped_ids_.end()) {
        ++said_;
      }
    }
    int32_t next() const { return said_ < runner_.ids_.size() ? runner_.ids_[said_] : runner_.end_id_; }

   private:
    ScriptedRunner& runner_;
    int64_t capacity_, position_ = 0;
    size_t said_ = 0;
  };
  class Snapshot final : public model::StateSnapshot {
   public:
    explicit Snapshot(const State& of) : state(std::make_unique<State>(of)) {}
    int64_t position() const override { return state->position(); }
    int64_t own_bytes() const override { return 64; }
    std::span<const int32_t> pages() const override { return {}; }
    std::vector<uint8_t> save() const override { return {}; }
    void save_page(size_t, std::span<uint8_t>) const override {}
    const std::unique_ptr<State> state;
  };

  const std::vector<int32_t> ids_;
  const int32_t begin_id_;
  const std::vector<int32_t> skipped_ids_;
  const int32_t end_id_;
  model::ModelFacts facts_;
  model::CacheSpec spec_;
  std::vector<float> logits_;
  double left_at_ = 0, outside_seconds_ = 0;
  std::unordered_map<uint64_t, std::vector<double>> made_;  // by seed
};

}  // namespace tessera::server
