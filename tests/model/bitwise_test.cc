// SPDX-License-Identifier: Apache-2.0
// Determinism, bit for bit and in every mode: decode = prefill = any chunking = any company in the batch = any thread
// count; saved, restored, forked and rolled-back sequences continue as if nothing had happened.
#include <gtest/gtest.h>

#include <numeric>

#include "base/rng.h"
#include "model/memory_fit.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/goldens.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera {
namespace {

using model::LogitRows;
using testing::random_ids;

struct Mode {
  ops::InputMode input;
  ops::CacheMode cache;
};

constexpr Mode kModes[] = {{ops::InputMode::kF32, ops::CacheMode::kExact}, {ops::InputMode::kF32, ops::CacheMode::kFp8},
                           {ops::InputMode::kA16, ops::CacheMode::kExact}, {ops::InputMode::kA16, ops::CacheMode::kFp8},
                           {ops::InputMode::kA8, ops::CacheMode::kExact},  {ops::InputMode::kA8, ops::CacheMode::kFp8},
                           {ops::InputMode::kA4, ops::CacheMode::kExact},  {ops::InputMode::kA4, ops::CacheMode::kFp8}};

std::string name_of(const Mode& mode) {
  return std::string(to_string(mode.input)) + "_" + std::string(to_string(mode.cache));
}

// Feeds ids in chunks of random length; all logits.
std::vector<float> feed_random(model::Runner& runner, model::SequenceState& state, std::span<const int32_t> ids,
                               Rng& rng) {
  std::vector<float> logits;
  while (!ids.empty()) {
    const size_t most = std::min(ids.size(), static_cast<size_t>(runner.max_step_tokens()));
    const size_t count = 1 + rng.below(rng.below(2) == 0 ? std::min<size_t>(most, 5) : most);
    const std::vector<float> part = testing::feed(runner, state, ids.first(count), LogitRows::kAll);
    logits.insert(logits.end(), part.begin(), part.end());
    ids = ids.subspan(count);
  }
  return logits;
}

class Bitwise : public ::testing::TestWithParam<Mode> {
 protected:
  Bitwise() : seed_(fresh_seed()), rng_(seed_) {}
  void SetUp() override { RecordProperty("seed", std::to_string(seed_)); }
  std::string seed_text() const { return "seed " + std::to_string(seed_); }

  uint64_t seed_;
  Rng rng_;
};

TEST_P(Bitwise, ChunkingDoesNotMatter) {
  SCOPED_TRACE(seed_text());
  const auto loaded = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache);
  model::Runner& runner = *loaded.runner;
  for (const int64_t length :
       {int64_t{1}, int64_t{2}, int64_t{5}, int64_t{33}, 129 + static_cast<int64_t>(rng_.below(10)),
        257 + static_cast<int64_t>(rng_.below(344))}) {
    const std::vector<int32_t> ids = random_ids(rng_, length, runner.facts().vocab_size);
    const auto whole = runner.new_sequence(length), split = runner.new_sequence(length + 7);
    const std::vector<float> expected = testing::feed(runner, *whole, ids, LogitRows::kAll);
    EXPECT_TRUE(testing::same_bits(feed_random(runner, *split, ids, rng_), expected)) << length << " tokens";
  }
}

class LargeSteps : public Bitwise {};

// A step of more rows than a ring holds writes and attends them one after the other.
TEST_P(LargeSteps, StepsLargerThanARingDoNotMatter) {
  SCOPED_TRACE(seed_text());
  const int64_t most = model::kRingRows + 200;
  const auto large = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache, 2, most);
  const auto small = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache);
  const model::Config config = model::load_config(testing::tiny_model());
  ASSERT_EQ(model::ring_slots(config, most), config.sliding_window + model::kRingRows - 1);
  ASSERT_EQ(model::ring_slots(config, 64), config.sliding_window + 63);
  // Three sequences, each a while on its way before the step that has them all.
  const int64_t lengths[] = {model::kRingRows - 50 + static_cast<int64_t>(rng_.below(100)),
                             1 + static_cast<int64_t>(rng_.below(50)), 0};
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::unique_ptr<model::SequenceState>> states;
  std::vector<std::vector<float>> expected;
  std::vector<model::SequenceSlice> slices;
  int64_t left = most;
  for (const int64_t length : lengths) {
    const int64_t before = 1 + static_cast<int64_t>(rng_.below(150)), rows = length > 0 ? length : left;
    left -= rows;
    ids.push_back(random_ids(rng_, before + rows + 1, large.runner->facts().vocab_size));
    const auto alone = small.runner->new_sequence(before + rows + 1);
    expected.push_back(testing::feed(*small.runner, *alone, ids.back(), LogitRows::kAll));
    states.push_back(large.runner->new_sequence(before + rows + 1));
    testing::feed(*large.runner, *states.back(), std::span(ids.back()).first(static_cast<size_t>(before)),
                  LogitRows::kNone);
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t before = static_cast<size_t>(states[i]->position());
    slices.push_back({states[i].get(), std::span(ids[i]).subspan(before, ids[i].size() - before - 1), LogitRows::kAll});
  }
  const size_t vocab = static_cast<size_t>(large.runner->facts().vocab_size);
  const TensorView together = large.runner->step(slices);
  const float* logits = together.as<float>();
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t rows = slices[i].ids.size(), before = ids[i].size() - rows - 1;
    EXPECT_TRUE(testing::same_bits({logits, rows * vocab}, {expected[i].data() + before * vocab, rows * vocab})) << i;
    logits += rows * vocab;
  }
  // And what such a step leaves in the rings serves the next token.
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::vector<float> next =
        testing::feed(*large.runner, *states[i], std::span(ids[i]).last(1), LogitRows::kAll);
    EXPECT_TRUE(testing::same_bits(next, {expected[i].data() + (ids[i].size() - 1) * vocab, vocab})) << i;
  }
}

TEST_P(Bitwise, DecodeEqualsPrefill) {
  SCOPED_TRACE(seed_text());
  const auto loaded = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache);
  model::Runner& runner = *loaded.runner;
  const std::vector<int32_t> ids = random_ids(rng_, 140, runner.facts().vocab_size);
  const auto one_by_one = runner.new_sequence(140), at_once = runner.new_sequence(140);
  const std::vector<float> decoded = testing::feed(runner, *one_by_one, ids, LogitRows::kAll, 1);
  EXPECT_TRUE(testing::same_bits(testing::feed(runner, *at_once, ids, LogitRows::kAll), decoded));
}

class SlowBitwise : public Bitwise {};

// 600 tokens in one step, in steps of 64, and one by one.
TEST_P(SlowBitwise, OneStepEqualsSixHundred) {
  SCOPED_TRACE(seed_text());
  const auto small = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache);
  const auto large = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache, 2, 600);
  const std::vector<int32_t> ids = random_ids(rng_, 600, small.runner->facts().vocab_size);
  const auto at_once = large.runner->new_sequence(600), in_steps = small.runner->new_sequence(600),
             one_by_one = small.runner->new_sequence(600);
  const std::vector<float> expected = testing::feed(*small.runner, *in_steps, ids, LogitRows::kAll);
  EXPECT_TRUE(testing::same_bits(testing::feed(*large.runner, *at_once, ids, LogitRows::kAll), expected));
  EXPECT_TRUE(testing::same_bits(testing::feed(*small.runner, *one_by_one, ids, LogitRows::kAll, 1), expected));
}

TEST_P(Bitwise, CompanyInTheBatchDoesNotMatter) {
  SCOPED_TRACE(seed_text());
  const auto loaded = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache);
  model::Runner& runner = *loaded.runner;
  constexpr size_t kSequences = 4;
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::unique_ptr<model::SequenceState>> states;
  std::vector<std::vector<float>> expected, found(kSequences);
  for (size_t i = 0; i < kSequences; ++i) {
    ids.push_back(random_ids(rng_, 20 + static_cast<int64_t>(rng_.below(180)), runner.facts().vocab_size));
    const auto alone = runner.new_sequence(400);
    expected.push_back(testing::feed(runner, *alone, ids[i], LogitRows::kAll));
    states.push_back(runner.new_sequence(400));
  }
  // Ragged steps: each sequence brings 0 to 9 tokens, in changing order.
  std::vector<size_t> done(kSequences);
  for (bool is_running = true; is_running;) {
    is_running = false;
    std::vector<model::SequenceSlice> slices;
    std::vector<size_t> owners;
    const size_t shift = rng_.below(kSequences);
    for (size_t n = 0; n < kSequences; ++n) {
      const size_t i = (n + shift) % kSequences;
      const size_t count = std::min<size_t>(rng_.below(10), ids[i].size() - done[i]);
      is_running = is_running || done[i] + count < ids[i].size();
      if (count == 0) continue;
      slices.push_back({states[i].get(), std::span(ids[i]).subspan(done[i], count), LogitRows::kAll});
      owners.push_back(i);
      done[i] += count;
    }
    if (slices.empty()) continue;
    const TensorView logits = runner.step(slices);
    const float* row = logits.as<float>();
    for (size_t n = 0; n < slices.size(); ++n) {
      const size_t values = slices[n].ids.size() * static_cast<size_t>(runner.facts().vocab_size);
      found[owners[n]].insert(found[owners[n]].end(), row, row + values);
      row += values;
    }
  }
  for (size_t i = 0; i < kSequences; ++i) EXPECT_TRUE(testing::same_bits(found[i], expected[i])) << "sequence " << i;
}

TEST_P(Bitwise, ThreadsAndStepSizeDoNotMatter) {
  SCOPED_TRACE(seed_text());
  std::vector<float> expected;
  const std::vector<int32_t> ids = random_ids(rng_, 150, 1024);
  for (const int threads : {1, 2, 3, 12}) {
    const auto loaded =
        testing::load(testing::tiny_model(), GetParam().input, GetParam().cache, threads, threads == 3 ? 17 : 64);
    const auto state = loaded.runner->new_sequence(150);
    const std::vector<float> logits = testing::feed(*loaded.runner, *state, ids, LogitRows::kAll);
    if (expected.empty()) expected = logits;
    EXPECT_TRUE(testing::same_bits(logits, expected)) << threads << " threads";
  }
}

TEST_P(Bitwise, SavedForkedAndRolledBackSequencesGoOn) {
  SCOPED_TRACE(seed_text());
  const auto loaded = testing::load(testing::tiny_model(), GetParam().input, GetParam().cache);
  model::Runner& runner = *loaded.runner;
  const int64_t total = 320;
  const std::vector<int32_t> ids = random_ids(rng_, total, runner.facts().vocab_size);
  const auto straight = runner.new_sequence(total);
  const std::vector<float> all = testing::feed(runner, *straight, ids, LogitRows::kAll);
  const size_t vocab = static_cast<size_t>(runner.facts().vocab_size);
  for (int round = 0; round < 3; ++round) {
    const size_t cut = 1 + rng_.below(static_cast<uint64_t>(total) - 2);
    SCOPED_TRACE("cut at " + std::to_string(cut));
    const std::span<const int32_t> head = std::span(ids).first(cut), tail = std::span(ids).subspan(cut);
    const std::vector<float> expected(all.begin() + static_cast<int64_t>(cut * vocab), all.end());
    const auto state = runner.new_sequence(total);
    testing::feed(runner, *state, head, LogitRows::kNone);

    const auto fork = state->fork();
    const auto restored = runner.restore(state->save());
    EXPECT_EQ(restored->position(), static_cast<int64_t>(cut));
    // Another future, farther than a step and than the ring, then back.
    const auto mark = state->mark();
    const std::vector<int32_t> other =
        random_ids(rng_, std::min<int64_t>(150, total - static_cast<int64_t>(cut)), 1024);
    testing::feed(runner, *state, other, LogitRows::kNone);
    state->rollback(*mark);
    EXPECT_TRUE(testing::same_bits(feed_random(runner, *state, tail, rng_), expected)) << "rolled back";
    EXPECT_TRUE(testing::same_bits(feed_random(runner, *fork, tail, rng_), expected)) << "forked";
    EXPECT_TRUE(testing::same_bits(feed_random(runner, *restored, tail, rng_), expected)) << "restored";
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, Bitwise, ::testing::ValuesIn(kModes),
                         [](const auto& mode) { return name_of(mode.param); });
INSTANTIATE_TEST_SUITE_P(Modes, LargeSteps, ::testing::Values(Mode{ops::InputMode::kA16, ops::CacheMode::kFp8}),
                         [](const auto& mode) { return name_of(mode.param); });
INSTANTIATE_TEST_SUITE_P(Modes, SlowBitwise, ::testing::ValuesIn(kModes),
                         [](const auto& mode) { return name_of(mode.param); });

// The generated model T0 adds a CSA layer with hashed routing and the draft block.
TEST(BitwiseDraft, ChunkingAndRollBackDoNotMatter) {
  const testing::TemporaryFolder folder;
  testing::write_generated_model(testing::Generated::kT0, folder.path());
  for (const Mode& mode : kModes) {
    SCOPED_TRACE(name_of(mode));
    const auto loaded = testing::load(folder.path(), mode.input, mode.cache);
    model::Runner& runner = *loaded.runner;
    const std::vector<int32_t> ids = testing::generated_ids(testing::Generated::kT0, 200);
    const auto run = [&](model::SequenceState& state, size_t begin, size_t end, size_t chunk) {
      std::vector<float> drafts;
      for (size_t at = begin; at < end; at += chunk) {
        const size_t count = std::min(chunk, end - at);
        const model::SequenceSlice slice{&state, std::span(ids).subspan(at, count), LogitRows::kNone};
        runner.step({&slice, 1});
        const model::SequenceSlice next{&state, std::span(ids).subspan(at + 1, count), LogitRows::kAll};
        const TensorView view = runner.draft({&next, 1});
        drafts.insert(drafts.end(), view.as<float>(), view.as<float>() + view.shape.num_elements());
      }
      return drafts;
    };
    const auto a = runner.new_sequence(200), b = runner.new_sequence(200);
    const std::vector<float> expected = run(*a, 0, 190, 64);
    std::vector<float> found = run(*b, 0, 100, 1);
    const auto mark = b->mark();
    run(*b, 100, 150, 7);
    b->rollback(*mark);
    const std::vector<float> rest = run(*b, 100, 190, 13);
    found.insert(found.end(), rest.begin(), rest.end());
    EXPECT_TRUE(testing::same_bits(found, expected));
  }
}

}  // namespace
}  // namespace tessera
