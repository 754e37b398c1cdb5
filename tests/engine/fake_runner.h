// SPDX-License-Identifier: Apache-2.0
#pragma once
// A runner made for tests of the engine: the next token is a known function of the last one.
#include <gtest/gtest.h>

#include "device/queue.h"
#include "engine/generate.h"
#include "ops/sample/sample.h"

namespace tessera::engine {

inline constexpr int32_t kVocab = 50;

class FakeMark final : public model::StateMark {
 public:
  explicit FakeMark(int64_t position) : position_(position) {}
  int64_t position() const override { return position_; }

 private:
  int64_t position_;
};

class FakeState final : public model::SequenceState {
 public:
  explicit FakeState(int64_t capacity) : capacity_(capacity) {}
  int64_t position() const override { return static_cast<int64_t>(seen.size()); }
  int64_t capacity() const override { return capacity_; }
  std::unique_ptr<SequenceState> fork() const override { return std::make_unique<FakeState>(*this); }
  std::unique_ptr<model::StateMark> mark() const override { return std::make_unique<FakeMark>(position()); }
  void rollback(const model::StateMark& mark) override {
    EXPECT_LE(mark.position(), position());
    seen.resize(static_cast<size_t>(mark.position()));
  }
  std::unique_ptr<model::StateSnapshot> snapshot() const override { return nullptr; }
  std::vector<uint8_t> save() const override { return {}; }
  std::vector<int32_t> seen;

 private:
  int64_t capacity_;
};

// After token i comes 2 i + 1 (mod vocab); its logit leads by 3.
class FakeRunner final : public model::Runner {
 public:
  FakeRunner() {
    facts_.vocab_size = kVocab;
    facts_.max_positions = 40;
    facts_.eos_ids = {1, 2};
  }
  const model::ModelFacts& facts() const override { return facts_; }
  const model::CacheSpec& cache_spec() const override { return spec_; }
  int64_t max_step_tokens() const override { return 4; }
  std::unique_ptr<model::SequenceState> new_sequence(int64_t capacity) override {
    EXPECT_LE(capacity, facts_.max_positions);
    return std::make_unique<FakeState>(capacity);
  }
  std::unique_ptr<model::SequenceState> restore(std::span<const uint8_t>) override { return nullptr; }
  std::unique_ptr<model::SequenceState> resume(const model::StateSnapshot&, int64_t) override { return nullptr; }
  std::unique_ptr<model::StateSnapshot> restore_snapshot(std::span<const uint8_t>,
                                                         std::span<const std::span<const uint8_t>>) override {
    return nullptr;
  }
  TensorView step(std::span<const model::SequenceSlice> slices) override {
    EXPECT_EQ(slices.size(), 1u);
    FakeState& state = dynamic_cast<FakeState&>(*slices[0].state);
    chunks.push_back(slices[0].ids.size());
    logits_.clear();
    for (size_t i = 0; i < slices[0].ids.size(); ++i) {
      state.seen.push_back(slices[0].ids[i]);
      const bool is_wanted = slices[0].logits == model::LogitRows::kAll ||
                             (slices[0].logits == model::LogitRows::kLast && i + 1 == slices[0].ids.size());
      if (!is_wanted) continue;
      const std::vector<float> row = row_after(slices[0].ids[i]);
      logits_.insert(logits_.end(), row.begin(), row.end());
    }
    EXPECT_LE(state.position(), state.capacity());
    last_seen = state.seen;
    if (slices[0].draw != nullptr) {
      const std::vector<float> row = row_after(state.seen.back());
      slices[0].draw->token =
          sample({.logits = row, .params = slices[0].draw->params, .position = slices[0].draw->position});
    }
    num_rows += static_cast<int64_t>(logits_.size()) / kVocab;
    return {logits_.data(), DType::kF32, {static_cast<int64_t>(logits_.size()) / kVocab, kVocab}};
  }
  TensorView draft(std::span<const model::SequenceSlice>) override { return {}; }
  int32_t sample(const model::SampleRequest& request) override {
    requests.push_back(request.params);
    counts.assign(request.counts.begin(), request.counts.end());
    int32_t token = 0;
    std::vector<float> row(request.logits.begin(), request.logits.end());
    device::Queue queue(1);
    const ops::SampleRow how{.params = request.params, .position = request.position};
    std::vector<char> workspace(static_cast<size_t>(ops::sample_reference_workspace({kVocab}, 1)));
    ops::sample_reference({kVocab},
                          {.logits = row.data(),
                           .rows = &how,
                           .num_rows = 1,
                           .counts = request.counts.empty() ? nullptr : request.counts.data(),
                           .bias_ids = request.bias_ids.data(),
                           .bias_values = request.bias_values.data(),
                           .num_bias = static_cast<int64_t>(request.bias_ids.size()),
                           .tokens = &token,
                           .workspace = workspace.data()},
                          queue);
    return token;
  }
  void set_tracer(model::Tracer*) override {}

  std::vector<size_t> chunks;
  std::vector<model::SamplingParams> requests;
  std::vector<int32_t> counts, last_seen;
  int64_t num_rows = 0;  // of logits that were asked for

 private:
  static std::vector<float> row_after(int32_t id) {
    std::vector<float> row(kVocab);
    row[static_cast<size_t>((2 * id + 1) % kVocab)] = 3;
    return row;
  }

  model::ModelFacts facts_;
  model::CacheSpec spec_;
  std::vector<float> logits_;
};

class Watcher final : public GenerateObserver {
 public:
  bool wants_logits() const override { return wants; }
  void logits(int64_t first_position, std::span<const float> rows) override {
    for (size_t i = 0; i < rows.size() / kVocab; ++i) positions.push_back(first_position + static_cast<int64_t>(i));
  }
  bool token(int32_t id) override {
    tokens.push_back(id);
    if (cancel_at == static_cast<int64_t>(tokens.size())) cancel = true;
    return stop_at != static_cast<int64_t>(tokens.size());
  }
  bool wants = false;
  int64_t stop_at = -1, cancel_at = -1;
  std::atomic<bool> cancel{false};
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
};

}  // namespace tessera::engine
