// SPDX-License-Identifier: Apache-2.0
// Steps that are queued before the one before has drawn: the tokens and the bits of steps one after the other. Only
// where steps can be recorded: on a GPU, an emulated one too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "model/cache_spec.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera {
namespace {

using model::Draw;
using model::LogitRows;
using model::SequenceSlice;

class RunAhead : public ::testing::Test {
 protected:
  RunAhead() {
#ifdef TESSERA_TESTED_DEVICE  // elsewhere the environment's choice
    setenv("TESSERA_DEVICE", TESSERA_TESTED_DEVICE, 1);
#endif
    testing::write_generated_model(testing::smallest_config(), folder_.path());
    loaded_ = testing::load(folder_.path(), ops::InputMode::kA16, ops::CacheMode::kExact, 2, kStepTokens);
  }

  struct Sequence {
    std::unique_ptr<model::SequenceState> state;
    std::vector<int32_t> ids;
    uint64_t seed = 0;
  };

  Draw draw_of(const Sequence& sequence, size_t position) const {
    return {.params = {.temperature = sequence.seed % 2 == 0 ? 0.0f : 1.5f, .seed = sequence.seed},
            .position = position};
  }

  // Of `lengths` tokens, of which all but the last have run.
  std::vector<Sequence> begin(const std::vector<size_t>& lengths, int64_t capacity) {
    std::vector<Sequence> sequences;
    Rng rng(seed_);
    for (const size_t length : lengths) {
      Sequence sequence{runner().new_sequence(capacity), {}, rng.next_u64()};
      sequence.ids = testing::random_ids(rng, static_cast<int64_t>(length), runner().facts().vocab_size);
      testing::feed(runner(), *sequence.state, std::span(sequence.ids).first(length - 1), LogitRows::kNone);
      sequences.push_back(std::move(sequence));
    }
    return sequences;
  }

  std::vector<Draw> draws_of(const std::vector<Sequence>& sequences, size_t ahead) const {
    std::vector<Draw> draws;
    for (const Sequence& sequence : sequences) draws.push_back(draw_of(sequence, sequence.ids.size() + ahead));
    return draws;
  }

  static std::vector<SequenceSlice> slices_of(std::vector<Sequence>& sequences, std::vector<Draw>& draws) {
    std::vector<SequenceSlice> slices;
    for (size_t i = 0; i < sequences.size(); ++i) {
      slices.push_back({sequences[i].state.get(), std::span(sequences[i].ids).last(1), LogitRows::kNone, &draws[i]});
    }
    return slices;
  }

  static std::vector<Draw*> places_of(std::vector<Draw>& draws) {
    std::vector<Draw*> places;
    for (Draw& draw : draws) places.push_back(&draw);
    return places;
  }

  static void take(std::vector<Sequence>& sequences, const std::vector<Draw>& draws) {
    for (size_t i = 0; i < sequences.size(); ++i) sequences[i].ids.push_back(draws[i].token);
  }

  void decode(std::vector<Sequence>& sequences, int num_steps) {
    for (int n = 0; n < num_steps; ++n) {
      std::vector<Draw> draws = draws_of(sequences, 0);
      runner().step(slices_of(sequences, draws));
      take(sequences, draws);
    }
  }

  void decode_ahead(std::vector<Sequence>& sequences, int num_steps) {
    std::vector<Draw> draws = draws_of(sequences, 0), next;
    runner().queue_step(slices_of(sequences, draws));
    for (int n = 0; n < num_steps; ++n) {
      if (n + 1 < num_steps) {
        next = draws_of(sequences, 1);
        ASSERT_TRUE(runner().queue_next(places_of(next)));
      }
      const int64_t position = sequences[0].state->position();
      EXPECT_EQ(runner().finish_step().shape[0], 0);
      EXPECT_EQ(sequences[0].state->position(), position + 1) << "what is queued behind is not counted yet";
      take(sequences, draws);
      std::swap(draws, next);
    }
  }

  model::Runner& runner() {
    return *loaded_.runner;
  }

  static constexpr int64_t kStepTokens = 64;
  const testing::TemporaryFolder folder_;
  model::LoadedModel loaded_;
  const uint64_t seed_ = fresh_seed();
};

// Also where a sequence goes on to a new page, and in a page that it shares.
TEST_F(RunAhead, HasTheTokensAndTheBitsOfSteps) {
  if (!runner().can_run_ahead()) GTEST_SKIP() << "nothing is recorded here";
  SCOPED_TRACE("seed " + std::to_string(seed_));
#ifdef TESSERA_TESTED_DEVICE  // emulated: no page is filled in seconds
  constexpr int kSteps = 3;
  const std::vector<size_t> lengths = {2, 3};
#else
  constexpr int kSteps = 7;
  const std::vector<size_t> lengths = {model::kPageTokens - 2, 3, 9};
#endif
  std::vector<Sequence> plain = begin(lengths, 2 * model::kPageTokens), ahead = begin(lengths, 2 * model::kPageTokens);
  const auto kept = ahead[1].state->snapshot();
  decode(plain, kSteps);
  decode_ahead(ahead, kSteps);
  for (size_t i = 0; i < lengths.size(); ++i) {
    EXPECT_EQ(ahead[i].ids, plain[i].ids);
    EXPECT_TRUE(std::all_of(plain[i].ids.begin(), plain[i].ids.end(), [](int32_t id) { return id >= 0; }));
    EXPECT_EQ(ahead[i].state->position(), plain[i].state->position());
    const auto row = [&](Sequence& sequence) {
      return testing::feed(runner(), *sequence.state, std::span(sequence.ids).last(1), LogitRows::kLast);
    };
    EXPECT_TRUE(testing::same_bits(row(ahead[i]), row(plain[i])));
  }
  // What was shared has not changed under its owner.
  const auto again = runner().resume(*kept, 64);
  std::vector<int32_t> ids(ahead[1].ids.begin() + again->position(), ahead[1].ids.end());
  const auto fresh = runner().new_sequence(64);
  const std::vector<float> expected = testing::feed(runner(), *fresh, ahead[1].ids, LogitRows::kLast);
  EXPECT_TRUE(testing::same_bits(testing::feed(runner(), *again, ids, LogitRows::kLast), expected));
}

TEST_F(RunAhead, WhatCannotBeKnownIsNotQueued) {
  if (!runner().can_run_ahead()) GTEST_SKIP() << "nothing is recorded here";
  const auto is_queued = [&](int64_t capacity, size_t num_new, LogitRows rows, bool draws, bool is_masked) {
    const auto state = runner().new_sequence(capacity);
    const std::vector<int32_t> ids = {5, 6};
    testing::feed(runner(), *state, std::span(ids).first(ids.size() - num_new), LogitRows::kNone);
    std::vector<uint32_t> mask(static_cast<size_t>(ops::mask_words(runner().facts().vocab_size)));
    mask[0] = 1u << 9;
    Draw draw{.position = 2}, next{.position = 3};
    if (is_masked) draw.mask = next.mask = mask;
    const SequenceSlice slice{state.get(), std::span(ids).last(num_new), rows, draws ? &draw : nullptr};
    runner().queue_step({&slice, 1});
    Draw* const place = &next;
    const bool is_ahead = runner().queue_next({&place, 1});
    runner().finish_step();
    EXPECT_EQ(state->position(), 2);
    if (!is_ahead) return false;
    runner().finish_step();
    EXPECT_EQ(state->position(), 3);
    EXPECT_GE(next.token, 0);
    EXPECT_TRUE(!is_masked || (draw.token == 9 && next.token == 9));
    return true;
  };
  EXPECT_TRUE(is_queued(3, 1, LogitRows::kNone, true, false));
  EXPECT_FALSE(is_queued(2, 1, LogitRows::kNone, true, false)) << "full";
  EXPECT_FALSE(is_queued(3, 2, LogitRows::kNone, true, false)) << "not one token";
  EXPECT_FALSE(is_queued(3, 1, LogitRows::kLast, true, false)) << "a row for the host";
  EXPECT_FALSE(is_queued(3, 1, LogitRows::kLast, false, false)) << "no draw";
  EXPECT_TRUE(is_queued(3, 1, LogitRows::kNone, true, true)) << "a mask";
  EXPECT_TRUE(is_queued(4, 1, LogitRows::kNone, true, false)) << "and nothing is left of that";
}

TEST_F(RunAhead, OthersMakeWholeSteps) {
  if (runner().can_run_ahead()) GTEST_SKIP() << "this one can";
  std::vector<Sequence> plain = begin({3, 5}, 16), halves = begin({3, 5}, 16);
  decode(plain, 3);
  for (int n = 0; n < 3; ++n) {
    std::vector<Draw> draws = draws_of(halves, 0), next = draws_of(halves, 1);
    runner().queue_step(slices_of(halves, draws));
    EXPECT_FALSE(runner().queue_next(places_of(next)));
    runner().finish_step();
    take(halves, draws);
  }
  EXPECT_EQ(halves[0].ids, plain[0].ids);
  EXPECT_EQ(halves[1].ids, plain[1].ids);
}

}  // namespace
}  // namespace tessera
