// SPDX-License-Identifier: Apache-2.0
#pragma once
// The model one layer at a time: each layer is built, run over all tokens of the sample, and dropped again where it
// does not fit beside the others, so a checkpoint larger than memory can be examined.
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "device/executor.h"
#include "model/layers/block.h"
#include "model/sequence_caches.h"
#include "model/weight_source.h"
#include "ops/planner.h"

namespace tessera::doctor {

struct StackOptions {
  ops::Precision precision{ops::InputMode::kF32, ops::CacheMode::kExact};
  bool keeps_layers = true;  // false: build each layer anew whenever it runs
};

class LayerStack {
 public:
  // Everything given must outlive the stack; `machine` and `executor` agree on what computes. `ids` is the whole
  // sample, run as one step. Tensors that are passed in and out are the host's.
  LayerStack(model::WeightSource& weights, std::span<const ops::Backend* const> backends,
             const device::Machine& machine, device::Executor& executor, const StackOptions& options,
             std::vector<int32_t> ids);

  int64_t num_tokens() const { return static_cast<int64_t>(ids_.size()); }
  size_t num_layers() const { return static_cast<size_t>(config_.num_layers); }
  // Streams [tokens, 4, hidden] before the first layer.
  device::Tensor embed() { return embed(weights_); }
  device::Tensor embed(model::WeightSource& weights);
  // Runs a layer in place, over as many of the first tokens as `streams` [tokens, 4, hidden] has. `tracer` may be null.
  void run_layer(size_t layer, const TensorView& streams, model::Tracer* tracer);
  // Frees a layer that was kept.
  void drop_layer(size_t layer) { kept_.erase(layer); }
  // The same with another source of this layer's weights (a trial), built for this call only.
  void run_layer_from(model::WeightSource& weights, size_t layer, const TensorView& streams);
  // FP32 logits [tokens, vocab] from the streams after the last layer, of as many tokens as these have.
  std::vector<float> logits(const TensorView& streams) { return logits(weights_, streams); }
  std::vector<float> logits(model::WeightSource& weights, const TensorView& streams);
  DType activation() const { return options_.precision.activation(); }

 private:
  model::LayerBuilder builder(model::ModelWeights& weights);
  std::unique_ptr<model::Block> build(model::WeightSource& weights, size_t layer);
  void run(const model::Block& block, const TensorView& streams, model::Tracer* tracer);
  int64_t window_slots() const { return config_.sliding_window + num_tokens() - 1; }
  model::StepBatch batch(const model::CacheLayout& layout, int32_t place, int64_t count) const;
  model::StepContext context(const model::StepBatch& batch, const model::CachePool& caches, model::Tracer* tracer);
  void reserve(const model::LayerBuilder& used);
  template <class Work>
  void on_device(const TensorView& tensor, const Work& work);

  model::WeightSource& weights_;
  const model::Config& config_;
  StackOptions options_;
  ops::Planner planner_;
  device::Executor& executor_;
  std::vector<int32_t> ids_;
  device::Arena arena_;
  device::Buffer workspace_, index_scores_;
  std::map<size_t, std::unique_ptr<model::Block>> kept_;
};

// Negative log likelihood, in nats, of each of ids[1..] given the ones before, from logits [ids, vocab]; NaN or
// infinite where a logit is not finite.
std::vector<double> surprises(std::span<const float> logits, std::span<const int32_t> ids, int64_t vocab);

// What the model itself expects a next token to cost after each of `num_tokens` tokens: mean and variance of the
// surprise under its own probabilities, in nats.
struct Expectation {
  double mean = 0, variance = 0;
};
std::vector<Expectation> expectations(std::span<const float> logits, size_t num_tokens, int64_t vocab);

}  // namespace tessera::doctor
