// SPDX-License-Identifier: Apache-2.0
#pragma once
// The whole model on one rank: embedding, layers, head and draft block, run over a batch of slices.
#include <memory>
#include <vector>

#include "model/bypass.h"
#include "model/layers/draft_block.h"
#include "model/runner.h"

namespace tessera::model {

class Model final : public Runner {
 public:
  // Binds every op and loads every weight. `num_draft_layers` 0 or 1. The queue's threads are the model's.
  Model(const Config& config, ops::Planner& planner, ModelWeights& weights, const ops::Precision& precision,
        int64_t num_draft_layers, int64_t max_step_tokens, int num_threads, const Bypass& bypass);

  const ModelFacts& facts() const override { return facts_; }
  const CacheSpec& cache_spec() const override { return cache_spec_; }
  int64_t max_step_tokens() const override { return max_step_tokens_; }
  // Bytes that a model takes for steps of `max_step_tokens`, besides weights and the ops' own workspace.
  static size_t step_bytes(const Config& config, const ops::Precision& precision, int64_t max_step_tokens);

  std::unique_ptr<SequenceState> new_sequence(int64_t capacity) override;
  std::unique_ptr<SequenceState> restore(std::span<const uint8_t> bytes) override;
  TensorView step(std::span<const SequenceSlice> slices) override;
  TensorView draft(std::span<const SequenceSlice> slices) override;
  int32_t sample(const SampleRequest& request) override;
  void set_tracer(Tracer* tracer) override { tracer_ = tracer; }

  // Runs one layer alone on given streams, in place: teacher-forced comparisons. Caches advance as in a step, the
  // position does not; call advance on the state oneself.
  void run_layer(size_t layer, std::span<const SequenceSlice> slices, const TensorView& streams);

 private:
  // What a step's slices are, row by row. Reserved once; refilled by every step.
  struct Batch {
    std::vector<SliceRows> slices;
    std::vector<int32_t> token_ids, logit_rows;
    std::vector<int64_t> positions, window_slots;
  };

  void fill_batch(std::span<const SequenceSlice> slices, bool is_draft);
  StepContext context();
  TensorView embed(const StepContext& context, const TensorView& out, int64_t streams) const;
  TensorView run_head(const StepContext& context, const OutputHead& head, const TensorView& streams);
  void reserve_scores(int64_t capacity);

  const Config config_;
  const int64_t max_step_tokens_;
  ops::Precision precision_;
  device::Queue queue_;
  ModelFacts facts_;
  CacheLayout cache_layout_;
  CacheSpec cache_spec_;
  Matrix embedding_;
  LinearLayer projection_;
  ops::Bound<ops::Embedding> embed_streams_, embed_rows_;
  ops::Bound<ops::Sample> sample_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<OutputHead> head_;
  std::unique_ptr<DraftBlock> draft_;
  device::Buffer workspace_, index_scores_;
  device::Tensor streams_buffer_, logits_buffer_;
  device::Arena arena_;
  TensorView streams_;
  Batch batch_;
  Tracer* tracer_ = nullptr;
};

}  // namespace tessera::model
