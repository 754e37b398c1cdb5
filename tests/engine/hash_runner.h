// SPDX-License-Identifier: Apache-2.0
#pragma once
// A runner made for tests of the engine whose answers depend on all that a model's would: a sequence's state is a hash
// of its tokens and their places, and the next token a hash of that, the seed, the place and the counts. A token too
// many, too few, out of order or of another request changes everything after it. It throws, loses and damages on
// demand.
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "base/rng.h"
#include "engine/cache_budget.h"
#include "model/runner.h"

namespace tessera::engine {

inline constexpr int32_t kHashVocab = 24;
inline constexpr int32_t kHashEnd = 0;  // the end token

// What a context is, token by token; begins as 0.
uint64_t hash_token(uint64_t context, int64_t position, int32_t id);
// Whether a step throws that runs the token which makes the context this.
bool is_poisoned(uint64_t context);
// The token that follows; `counts` is a hash of the occurrences, 0 without penalties.
int32_t next_token(uint64_t context, uint64_t seed, uint64_t position, uint64_t counts);
// The first token from there on, in a circle, that the mask allows; -1: none.
int32_t masked_token(int32_t id, std::span<const uint32_t> mask);
uint64_t hash_counts(std::span<const int32_t> counts);

// Bytes by the page, of what a sequence holds: a budget that runs out while sequences run.
class PagedBudget final : public CacheBudget {
 public:
  PagedBudget(int64_t page_tokens, int64_t total_bytes) : page_tokens_(page_tokens), total_bytes_(total_bytes) {}
  int64_t total_bytes() const override { return total_bytes_; }
  int64_t bytes(int64_t num_tokens, int64_t) const override {
    return 40 + 8 * ((num_tokens + page_tokens_ - 1) / page_tokens_ * page_tokens_);
  }

 private:
  int64_t page_tokens_, total_bytes_;
};

class HashRunner final : public model::Runner {
 public:
  // One in so many calls fails; 0: none. Those for snapshots alternate between want of memory and the device's errors.
  struct Faults {
    uint64_t step = 0;  // of several slices; every state of it is damaged
    uint64_t new_sequence = 0, fork = 0, save = 0, restore = 0, sample = 0, snapshot = 0, resume = 0;
    bool has_poison = false;
  };
  struct Failed {
    int64_t step = 0, new_sequence = 0, fork = 0, save = 0, restore = 0, sample = 0, snapshot = 0, resume = 0;
    int64_t poison = 0, no_pages = 0;
  };
  // What of a sequence grows lies in pages that copies share; whoever writes into a shared one copies it first.
  struct Pages {
    int64_t page_tokens = 4;
    int64_t limit = 0;  // pages that there are; 0: as many as are wanted
  };
  static constexpr int64_t kSnapshotBytes = 40, kTokenBytes = 8;  // of a page

  HashRunner(int64_t max_step_tokens, int64_t max_positions, const CacheBudget& budget, const Faults& faults,
             uint64_t seed)
      : HashRunner(max_step_tokens, max_positions, budget, faults, seed, Pages{}) {}
  HashRunner(int64_t max_step_tokens, int64_t max_positions, const CacheBudget& budget, const Faults& faults,
             uint64_t seed, const Pages& pages);
  ~HashRunner() override;

  const model::ModelFacts& facts() const override { return facts_; }
  const model::CacheSpec& cache_spec() const override { return spec_; }
  int64_t max_step_tokens() const override { return max_step_tokens_; }
  std::unique_ptr<model::SequenceState> new_sequence(int64_t capacity) override;
  std::unique_ptr<model::SequenceState> restore(std::span<const uint8_t> bytes) override;
  std::unique_ptr<model::SequenceState> resume(const model::StateSnapshot& snapshot, int64_t capacity) override;
  std::unique_ptr<model::StateSnapshot> restore_snapshot(std::span<const uint8_t> saved,
                                                         std::span<const std::span<const uint8_t>> pages) override;
  TensorView step(std::span<const model::SequenceSlice> slices) override;
  // Computes when a step is finished: what is changed or dropped before that is a broken promise.
  bool can_run_ahead() const override { return runs_ahead_; }
  void queue_step(std::span<const model::SequenceSlice> slices) override;
  bool queue_next(std::span<model::Draw* const> draws) override;
  TensorView finish_step() override;
  TensorView draft(std::span<const model::SequenceSlice>) override { return {}; }
  int32_t sample(const model::SampleRequest& request) override;
  void set_tracer(model::Tracer*) override {}

  void set_runs_ahead(bool runs_ahead) { runs_ahead_ = runs_ahead; }
  int64_t num_ahead() const { return num_ahead_; }  // steps that were queued behind another

  int64_t num_states() const { return static_cast<int64_t>(states_.size()); }
  int64_t num_snapshots() const { return num_snapshots_; }
  int64_t num_pages() const { return num_pages_; }  // that somebody has
  int64_t held_bytes() const;                       // by states, by the budget
  const Failed& failed() const { return failed_; }

 private:
  class State;
  class Snapshot;
  using Page = std::shared_ptr<const int32_t>;  // its number
  struct Queued {
    std::vector<model::SequenceSlice> slices;
    std::vector<std::vector<int32_t>> ids;  // of the slices; empty: those that the step before draws
  };
  TensorView compute(std::span<const model::SequenceSlice> slices);
  void expect_nothing_queued() const;
  void see(State& state, int32_t id) const;
  Page take_page();
  void give_pages(std::span<const model::SequenceSlice> slices);
  bool fails(uint64_t one_in, int64_t& count);

  const int64_t max_step_tokens_;
  const CacheBudget& budget_;
  const Faults faults_;
  Rng rng_;
  Failed failed_;
  model::ModelFacts facts_;
  model::CacheSpec spec_;
  const Pages pages_;
  std::vector<int32_t> free_pages_;
  int64_t num_pages_ = 0;
  std::set<const State*> states_;
  std::vector<Queued> queued_;
  bool runs_ahead_ = false, has_lost_queued_ = false;
  int64_t num_ahead_ = 0;
  int64_t num_snapshots_ = 0;
  std::vector<float> logits_;
};

}  // namespace tessera::engine
