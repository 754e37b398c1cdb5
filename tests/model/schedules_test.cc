// SPDX-License-Identifier: Apache-2.0
// Random schedules, bit for bit: sequences are fed in chunks of any size, alone and with strangers, one token of each
// (a recorded step on a GPU) or traced (never recorded), mixed, and in between saved and restored, forked,
// resumed from snapshots and rolled back. Whatever the schedule, each logit is that of the same text fed alone, token
// by token, and each token that a step draws is the one that is drawn from those logits. TESSERA_SCHEDULES sets how
// many are drawn, TESSERA_SCHEDULES_SEED repeats a run; docs/testing.md.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>

#include "model/model_helpers.h"
#include "testing/generated_model.h"
#include "testing/goldens.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera {
namespace {

using model::LogitRows;

constexpr uint64_t kSchedules = 20;
constexpr size_t kTexts = 3, kMostSequences = 5;
constexpr int64_t kCapacity = 330, kMostStepTokens = 64;

// Never recorded: a traced step runs eagerly.
class Onlooker final : public model::Tracer {
 public:
  void tensor(std::string_view, const TensorView&) override {}
};

// A model, some texts, and what each of their tokens gives when it is fed alone.
class Subject {
 public:
  Subject(const std::string& folder, ops::InputMode input, ops::CacheMode cache, Rng& rng)
      : name_(std::string(to_string(input)) + " x " + std::string(to_string(cache))),
        loaded_(testing::load(folder, input, cache, 2, kMostStepTokens)) {
    for (size_t i = 0; i < kTexts; ++i) {
      // One of a few tokens, one past the ring and a page of the caches, one in between.
      const int64_t length = i == 0   ? 1 + static_cast<int64_t>(rng.below(8))
                             : i == 1 ? model::kPageTokens + static_cast<int64_t>(rng.below(30))
                                      : 20 + static_cast<int64_t>(rng.below(100));
      texts_.push_back(testing::random_ids(rng, length, runner().facts().vocab_size));
      const auto state = runner().new_sequence(length);
      expected_.push_back(testing::feed(runner(), *state, texts_[i], LogitRows::kAll, 1));
    }
  }
  model::Runner& runner() const { return *loaded_.runner; }
  const std::string& name() const { return name_; }
  const std::vector<int32_t>& text(size_t i) const { return texts_[i]; }
  size_t vocab() const { return static_cast<size_t>(runner().facts().vocab_size); }
  const float* expected(size_t text, size_t token) const { return expected_[text].data() + token * vocab(); }

 private:
  std::string name_;
  model::LoadedModel loaded_;
  std::vector<std::vector<int32_t>> texts_;
  std::vector<std::vector<float>> expected_;
};

class Schedule {
 public:
  Schedule(const Subject& subject, uint64_t seed, uint64_t number) : subject_(subject), rng_(seed, number) {
    const size_t count = 1 + rng_.below(kMostSequences);
    for (size_t i = 0; i < count; ++i) join();
    favourite_ = rng_.below(kWays);
  }

  // False at the first row that has other bits; then `what` says where.
  bool run(std::string& what) {
    const uint64_t num_steps = 4 + rng_.below(20);
    for (uint64_t i = 0; i < num_steps; ++i) {
      // Somebody ends, somebody comes.
      if (rng_.below(8) == 0 && sequences_.size() < kMostSequences) join();
      if (rng_.below(16) == 0 && sequences_.size() > 1) {
        sequences_.erase(sequences_.begin() + static_cast<int64_t>(rng_.below(sequences_.size())));
      }
      for (Sequence& sequence : sequences_) disturb(sequence);
      if (!step(what)) return false;
    }
    return true;
  }
  uint64_t num_rows() const { return num_rows_; }
  uint64_t num_draws() const { return num_draws_; }

 private:
  struct Sequence {
    std::unique_ptr<model::SequenceState> state;
    size_t text = 0, done = 0;
  };
  enum Way { kOneOfEach, kOneOfSome, kAsMuchAsFits, kChunk, kMixed, kWays };

  void join() {
    // Of varying capacity: a longer one moves what recorded steps have the address of.
    sequences_.push_back(
        {subject_.runner().new_sequence(kCapacity + static_cast<int64_t>(rng_.below(40)) * 8), rng_.below(kTexts), 0});
  }

  void disturb(Sequence& sequence) {
    model::Runner& runner = subject_.runner();
    switch (rng_.below(24)) {
      case 0:
        sequence.state = runner.restore(sequence.state->save());
        return;
      case 1:
        sequence.state = sequence.state->fork();
        return;
      case 2: {  // a fork goes its own way beside the first one
        if (sequences_.size() >= kMostSequences) return;
        const auto other = sequence.state->fork();
        feed_anything(*other);
        return;
      }
      case 3: {
        const auto mark = sequence.state->mark();
        feed_anything(*sequence.state);
        sequence.state->rollback(*mark);
        return;
      }
      case 4: {  // goes on from a snapshot, after the one it was taken of went elsewhere
        const auto snapshot = sequence.state->snapshot();
        feed_anything(*sequence.state);
        sequence.state = runner.resume(*snapshot, kCapacity + static_cast<int64_t>(rng_.below(40)) * 8);
        return;
      }
      default:
        return;
    }
  }

  // Another future: farther than a step and than the ring.
  void feed_anything(model::SequenceState& state) {
    const int64_t count = std::min<int64_t>(1 + static_cast<int64_t>(rng_.below(100)), kCapacity - state.position());
    const std::vector<int32_t> ids = testing::random_ids(rng_, count, subject_.runner().facts().vocab_size);
    testing::feed(subject_.runner(), state, ids, LogitRows::kNone);
  }

  size_t left(const Sequence& sequence) const { return subject_.text(sequence.text).size() - sequence.done; }

  // How many tokens each sequence brings.
  std::vector<size_t> shares(Way way) {
    std::vector<size_t> counts(sequences_.size());
    size_t room = kMostStepTokens;
    const size_t chosen = rng_.below(sequences_.size());
    for (size_t i = 0; i < sequences_.size(); ++i) {
      size_t wanted = 0;
      if (way == kOneOfEach) wanted = 1;
      if (way == kOneOfSome) wanted = rng_.below(2);
      if (way == kAsMuchAsFits && i == chosen) wanted = room;
      if (way == kChunk && i == chosen) wanted = 1 + rng_.below(kMostStepTokens);
      if (way == kMixed) wanted = rng_.below(2) == 0 ? 1 : rng_.below(30);
      counts[i] = std::min({wanted, left(sequences_[i]), room});
      room -= counts[i];
    }
    return counts;
  }

  bool step(std::string& what) {
    const std::vector<size_t> counts = shares(static_cast<Way>(rng_.below(2) == 0 ? favourite_ : rng_.below(kWays)));
    const bool wants_all = rng_.below(4) != 0, is_traced = rng_.below(6) == 0;
    std::vector<model::SequenceSlice> slices;
    std::vector<size_t> owners;
    std::deque<model::Draw> draws;            // of the slices, which hold their addresses
    const uint64_t draws_in = rng_.below(3);  // none, some, all
    const size_t shift = rng_.below(sequences_.size());
    for (size_t n = 0; n < sequences_.size(); ++n) {
      const size_t i = (n + shift) % sequences_.size();
      if (counts[i] == 0) continue;
      const auto wanted = wants_all ? LogitRows::kAll : static_cast<LogitRows>(rng_.below(3));
      const std::span<const int32_t> text = subject_.text(sequences_[i].text);
      slices.push_back({sequences_[i].state.get(), text.subspan(sequences_[i].done, counts[i]), wanted});
      if (rng_.below(2) < draws_in) slices.back().draw = &draws.emplace_back(random_draw());
      owners.push_back(i);
    }
    if (slices.empty()) return true;
    subject_.runner().set_tracer(is_traced ? &onlooker_ : nullptr);
    const TensorView logits = subject_.runner().step(slices);
    subject_.runner().set_tracer(nullptr);
    const float* row = logits.as<float>();
    for (size_t n = 0; n < slices.size(); ++n) {
      Sequence& sequence = sequences_[owners[n]];
      const size_t count = slices[n].ids.size();
      for (size_t t = 0; t < count; ++t) {
        const bool is_there =
            slices[n].logits == LogitRows::kAll || (slices[n].logits == LogitRows::kLast && t + 1 == count);
        if (!is_there) continue;
        const size_t bytes = subject_.vocab() * sizeof(float);
        if (std::memcmp(row, subject_.expected(sequence.text, sequence.done + t), bytes) != 0) {
          what = "text " + std::to_string(sequence.text) + ", token " + std::to_string(sequence.done + t) +
                 ", in a step of " + std::to_string(slices.size()) + " slices, " + std::to_string(count) +
                 " tokens of this one" + (is_traced ? ", traced" : "");
          return false;
        }
        row += subject_.vocab();
        ++num_rows_;
      }
      sequence.done += count;
    }
    for (size_t n = 0; n < slices.size(); ++n) {
      if (slices[n].draw == nullptr) continue;
      const Sequence& sequence = sequences_[owners[n]];
      const std::span<const float> last(subject_.expected(sequence.text, sequence.done - 1), subject_.vocab());
      const model::Draw& draw = *slices[n].draw;
      const int32_t expected =
          subject_.runner().sample({.logits = last, .params = draw.params, .position = draw.position});
      if (draw.token != expected) {
        what = "text " + std::to_string(sequence.text) + ", drawn after token " + std::to_string(sequence.done - 1) +
               ": " + std::to_string(draw.token) + ", alone " + std::to_string(expected);
        return false;
      }
      ++num_draws_;
    }
    return true;
  }

  model::Draw random_draw() {
    model::Draw draw{.params = {.seed = rng_.next_u64()}, .position = rng_.below(1 << 20)};
    if (rng_.below(2) == 0) draw.params.temperature = 0.5f + rng_.uniform();
    if (rng_.below(3) == 0) draw.params.top_k = 1 + static_cast<int32_t>(rng_.below(50));
    if (rng_.below(3) == 0) draw.params.top_p = 0.5f + rng_.uniform() / 2;
    if (rng_.below(3) == 0) draw.params.min_p = rng_.uniform() / 10;
    return draw;
  }

  const Subject& subject_;
  Rng rng_;
  Onlooker onlooker_;
  std::vector<Sequence> sequences_;
  uint64_t favourite_ = 0, num_rows_ = 0, num_draws_ = 0;
};

uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::stoull(text) : otherwise;
}

TEST(Schedules, EachGivesTheLogitsOfATextAlone) {
  const uint64_t seed = number_of("TESSERA_SCHEDULES_SEED", fresh_seed());
  const uint64_t count = number_of("TESSERA_SCHEDULES", kSchedules);
  SCOPED_TRACE("TESSERA_SCHEDULES_SEED=" + std::to_string(seed));
  const testing::TemporaryFolder folder;
  testing::write_generated_model(testing::Generated::kT0, folder.path());
  Rng rng(seed);
  std::vector<Subject> subjects;
  for (const std::string& model : {testing::tiny_model(), folder.path()}) {
    for (const ops::InputMode input : {ops::InputMode::kA16, ops::InputMode::kA4}) {
      for (const ops::CacheMode cache : {ops::CacheMode::kExact, ops::CacheMode::kFp8}) {
        subjects.emplace_back(model, input, cache, rng);
      }
    }
  }
  uint64_t num_failed = 0, num_rows = 0, num_draws = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const size_t subject = rng.below(subjects.size());
    Schedule schedule(subjects[subject], seed, i + 1);
    std::string what;
    if (!schedule.run(what) && ++num_failed <= 5) {
      ADD_FAILURE() << "schedule " << i << ", " << (subject < subjects.size() / 2 ? "tiny, " : "generated, ")
                    << subjects[subject].name() << ": " << what;
    }
    num_rows += schedule.num_rows(), num_draws += schedule.num_draws();
  }
  std::cout << count << " random schedules, " << num_rows << " rows of logits and " << num_draws
            << " drawn tokens compared, " << num_failed << " failed\n";
  EXPECT_EQ(num_failed, 0u);
  EXPECT_GE(num_rows, count);
  EXPECT_GE(num_draws, count);
}

}  // namespace
}  // namespace tessera
