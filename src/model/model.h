// SPDX-License-Identifier: Apache-2.0
#pragma once
// The whole model on one rank: embedding, layers, head and draft block, run over a batch of slices.
#include <array>
#include <memory>
#include <vector>

#include "device/executor.h"
#include "model/bypass.h"
#include "model/layers/draft_block.h"
#include "model/runner.h"
#include "model/sample_step.h"
#include "model/sequence_caches.h"

namespace tessera::model {

class Model final : public Runner {
 public:
  // Binds every op and loads every weight. `num_draft_layers` 0 or 1. The planner's machine and the executor agree.
  // `comm` is of the ranks among which `weights` is one's share, and outlives this; null for one rank. All ranks then
  // make the same steps in the same order, and each has the same logits and draws.
  Model(const Config& config, ops::Planner& planner, ModelWeights& weights, const ops::Precision& precision,
        int64_t num_draft_layers, int64_t max_step_tokens, std::unique_ptr<device::Executor> executor,
        const Bypass& bypass, comm::Communicator* comm = nullptr);

  const ModelFacts& facts() const override { return facts_; }
  const CacheSpec& cache_spec() const override { return cache_spec_; }
  int64_t max_step_tokens() const override { return max_step_tokens_; }
  // Bytes that a model takes for steps of `max_step_tokens`, besides weights and the ops' own workspace; on each of
  // `world` ranks.
  static size_t step_bytes(const Config& config, const ops::Precision& precision, int64_t max_step_tokens,
                           int64_t world = 1);

  uint64_t page_history() const override { return pool_->pages().history(); }
  void meet_ranks() override;
  void reserve(const CacheRoom& room) override;
  int64_t reserved_bytes(const CacheRoom& room) const override;
  std::unique_ptr<SequenceState> new_sequence(int64_t capacity) override;
  std::unique_ptr<SequenceState> restore(std::span<const uint8_t> bytes) override;
  std::unique_ptr<SequenceState> resume(const StateSnapshot& snapshot, int64_t capacity) override;
  std::unique_ptr<StateSnapshot> restore_snapshot(std::span<const uint8_t> saved,
                                                  std::span<const std::span<const uint8_t>> pages) override;
  TensorView step(std::span<const SequenceSlice> slices) override;
  bool can_run_ahead() const override { return executor_->can_record() && tracer_ == nullptr; }
  void queue_step(std::span<const SequenceSlice> slices) override;
  bool queue_next(std::span<Draw* const> draws) override;
  TensorView finish_step() override;
  TensorView draft(std::span<const SequenceSlice> slices) override;
  int32_t sample(const SampleRequest& request) override;
  void set_tracer(Tracer* tracer) override { tracer_ = tracer; }

  // Runs one layer alone on given streams, in place: teacher-forced comparisons. Caches advance as in a step, the
  // position does not; call advance on the state oneself.
  void run_layer(size_t layer, std::span<const SequenceSlice> slices, const TensorView& streams);

  // The same for measuring, without copies and waits. prepare() makes `slices` the batch, as step() would: one token of
  // each whose logits are wanted can be recorded. queue_layer() queues a layer of it, as often as one likes and under
  // executor().record() too, on streams [rows, 4, hidden] where the ops compute, in place.
  void prepare(std::span<const SequenceSlice> slices);
  void queue_layer(size_t layer, const TensorView& streams);
  // What was recorded of the last step() or draft(), `times` behind each other without the host, and the wait for it.
  // Its sequences must still be there, and are of no more use: pools take the token in again. False where it was not
  // recorded, or the pool of pages grew, another step was prepared or a layer was run since.
  bool repeat_step(int64_t times);
  device::Executor& executor() { return *executor_; }

 private:
  // What a step's slices are. Reserved once; refilled by every step.
  struct Slices {
    std::vector<SliceRows> rows;
    std::vector<SequenceCaches*> states;
    std::vector<int32_t> token_ids;
    std::vector<int32_t> logit_rows;  // those that the host wants, then those that are only drawn from
    int64_t num_wanted = 0;           // of the host
    std::vector<ops::SampleRow> draws;
    std::vector<std::span<const uint32_t>> masks;
    std::vector<Draw*> drawn;           // where their tokens go
    std::vector<int32_t> shared_pages;  // that are about to be written
    int64_t num_checked = 0;            // rows of logits whose outcome comes before the draws'
    size_t turn = 0;                    // of host_outcomes_ and ends_

    int64_t position(int64_t row) const;
  };
  // Work of a step that was recorded.
  struct Recorded {
    int64_t num_rows;
    bool is_draft, draws;
    std::unique_ptr<device::Recording> work;
  };

  void read_slices(std::span<const SequenceSlice> slices, bool is_draft);
  // Pages for the entries that the slices complete. Where there are too few, nothing has changed. False, and nothing
  // has changed, where only this rank is asked (`alone`) and more than it would have to do something.
  bool make_room(bool alone = false);
  // run(), which is a part of a step. Where it throws, what was queued has ended, and kResourceExhausted comes out only
  // where the step has done nothing.
  template <class Run>
  auto run_part(const Run& run);
  // Queues a step whose slices were read, and what comes of it.
  template <class Work>
  void queue_whole(bool is_draft, const Work& work);
  // The rows that a recorded step of the slices has; 0: it is not recorded.
  int64_t recorded_rows() const;
  void forget_recorded() { recorded_.clear(), last_launched_ = nullptr; }
  // Fills the batch and queues work(context), or what was recorded of it for as many rows.
  template <class Work>
  void queue_work(bool is_draft, const Work& work);
  StepContext context(bool is_recorded);
  // Of the tokens from `first` on, as many as `out` has rows.
  TensorView embed(const StepContext& context, int64_t first, const TensorView& out, int64_t streams) const;
  // Whether a step's tokens are cut over ranks, and how: alike on all of them.
  TokenRun run_of(const StepContext& context) const;
  // Before a step writes caches that other ranks read: they are done with the step before.
  void await_ranks(const StepContext& context) const;
  // Embedding and blocks of such a step; leaves the streams of all tokens where somebody reads them.
  void queue_cut_blocks(const StepContext& context) const;
  // All blocks, each of which may leave its end to the next one.
  void queue_blocks(const StepContext& context, const TensorView& streams) const;
  void queue_head(const StepContext& context, const OutputHead& head, const TensorView& streams);
  // Makes slices_ those of the next step; the ids are not known yet.
  void move_on(std::span<Draw* const> draws);
  bool has_room_ahead();
  // The step's wanted rows and its outcomes on their way to the host.
  void queue_outcome();
  // Waits for the step and hands out its tokens; its wanted rows, in host memory.
  TensorView read_outcome(const Slices& step);
  void check_capacity(int64_t capacity) const;
  void reserve_scores(int64_t capacity);
  void reserve_host_logits(int64_t rows);

  const Config config_;
  const int64_t max_step_tokens_, fewest_tokens_to_cut_;
  ops::Precision precision_;
  std::unique_ptr<device::Executor> executor_;
  comm::Communicator* comm_;
  ModelFacts facts_;
  std::unique_ptr<CachePool> pool_;
  CacheSpec cache_spec_;
  Matrix embedding_;
  VocabularyHead projection_;
  ops::Bound<ops::Embedding> embed_streams_, embed_rows_;
  ops::Bound<ops::FiniteCheck> finite_check_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<OutputHead> head_;
  std::unique_ptr<DraftBlock> draft_;
  std::unique_ptr<SampleStep> sample_;
  device::Buffer workspace_, index_scores_;
  int64_t score_stride_ = 0;
  // Outcomes: for each row of logits its first bad one, then the token of each draw.
  device::Tensor streams_buffer_, logits_, outcomes_;
  device::Tensor host_logits_;                               // where these are not the host's
  std::array<device::Tensor, 2> host_outcomes_;              // the same, of one step after the other
  std::array<std::unique_ptr<device::QueuePoint>, 2> ends_;  // of the same steps
  device::Arena arena_;
  int64_t num_step_rows_ = 0;        // of the last step()
  bool has_changed_states_ = false;  // the step under way; or it may have
  bool is_queue_behind_ = false;     // work of a step that failed may still be queued
  bool is_prepared_to_record_ = false;
  Slices slices_, earlier_;  // of the last step, and of the one before where that is still queued
  int num_queued_ = 0;       // steps
  size_t turn_ = 0;          // of the last step
  std::unique_ptr<StepBatch> batch_;
  std::vector<Recorded> recorded_;
  device::Recording* last_launched_ = nullptr;  // of recorded_, by the last step
  int64_t recorded_version_ = 0;                // of the pool
  Tracer* tracer_ = nullptr;
};

}  // namespace tessera::model
