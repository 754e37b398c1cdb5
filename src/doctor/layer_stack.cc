// SPDX-License-Identifier: Apache-2.0
#include "doctor/layer_stack.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "model/placed_weights.h"

namespace tessera::doctor {

namespace {

using model::Block;
using model::LayerBuilder;
using model::PlacedWeights;
using model::WeightSource;

// Activations that a layer or the head holds at once: generous sums of what they take.
size_t arena_bytes(const model::Config& c, int64_t tokens) {
  const int64_t values = 16 * ops::kHcStreams * c.hidden_size + 3 * c.num_heads * c.head_dim + 8 * c.head_dim +
                         2 * c.q_lora_rank + 2 * c.o_groups * c.o_lora_rank +
                         2 * c.index_num_heads * (c.index_head_dim + 1) + c.experts_per_token * (c.hidden_size + 4) +
                         8 * c.expert_inner + 2 * c.num_experts + 2 * c.index_topk + 512;
  return static_cast<size_t>(tokens * values) * sizeof(float) + (1 << 20);
}

}  // namespace

LayerStack::LayerStack(WeightSource& weights, std::span<const ops::Backend* const> backends,
                       const device::Machine& machine, device::Executor& executor, const StackOptions& options,
                       std::vector<int32_t> ids)
    : weights_(weights),
      config_(weights.config()),
      options_(options),
      planner_(backends, machine),
      executor_(executor),
      ids_(std::move(ids)),
      arena_(arena_bytes(config_, static_cast<int64_t>(ids_.size())), executor.memory()),
      index_scores_(static_cast<size_t>(model::score_floats(num_tokens(), num_tokens() / 4 + 1)) * sizeof(float),
                    executor.memory()) {
  for (const int32_t id : ids_) {
    if (id < 0 || id >= config_.vocab_size) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("token id {}: this model has ids 0 to {}", id, config_.vocab_size - 1));
    }
  }
}

LayerBuilder LayerStack::builder(model::ModelWeights& weights) {
  return LayerBuilder{config_, planner_, weights, options_.precision, num_tokens(), window_slots(), executor_.memory()};
}

void LayerStack::reserve(const LayerBuilder& used) {
  const size_t bytes = static_cast<size_t>(used.workspace_bytes);
  if (bytes > workspace_.size()) workspace_ = device::Buffer(bytes, executor_.memory());
}

model::StepContext LayerStack::context(const model::StepBatch& batch, const model::CachePool& caches,
                                       model::Tracer* tracer) {
  arena_.reset_to(0);
  return {.queue = executor_.queue(),
          .arena = arena_,
          .workspace = workspace_.data(),
          .tracer = tracer,
          .batch = batch,
          .caches = caches,
          .index_scores = index_scores_.as<float>(),
          .num_scores = static_cast<int64_t>(index_scores_.size() / sizeof(float)),
          .score_stride = num_tokens() / 4 + 1,
          .is_recorded = false,
          .activation = activation()};
}

// One sequence of `count` tokens from its start, all of whose logits are wanted.
model::StepBatch LayerStack::batch(const model::CacheLayout& layout, int32_t place, int64_t count) const {
  std::vector<int64_t> ratios;
  if (!layout.layers.empty() && layout.layers.front().ratio != 0) ratios = {layout.layers.front().ratio};
  model::StepBatch batch(ratios,
                         {.max_tokens = count, .window_slots = window_slots(), .index_top_k = config_.index_topk},
                         executor_.staging(), executor_.memory());
  std::vector<int32_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  const model::SliceRows slice{place, 0, count, 0};
  batch.fill({&slice, 1}, std::span(ids_).first(rows.size()), rows, {}, {});
  return batch;
}

// Calls work with the host's tensor where the ops compute, and brings back what it made of it.
template <class Work>
void LayerStack::on_device(const TensorView& tensor, const Work& work) {
  device::MemorySpace& memory = executor_.memory();
  if (memory.is_host()) return work(tensor);
  const device::Tensor placed(tensor.dtype, tensor.shape, memory);
  const size_t bytes = static_cast<size_t>(tensor.num_bytes());
  memory.upload(placed.view().data, tensor.data, bytes);
  work(placed.view());
  memory.download(tensor.data, placed.view().data, bytes);
}

device::Tensor LayerStack::embed(WeightSource& weights) {
  PlacedWeights placed(weights, executor_.memory(), executor_.queue());
  LayerBuilder build = builder(placed);
  const model::Matrix table = placed.load_matrix("embed");
  const DType stored = table.view.format == ops::WeightFormat::kF32 ? DType::kF32 : DType::kBF16;
  const auto op = build.bind<ops::Embedding>(
      "embed",
      {.vocab = config_.vocab_size, .hidden = config_.hidden_size, .weight = stored, .activation = activation()});
  const TensorView weight{const_cast<void*>(table.view.data), stored, {config_.vocab_size, config_.hidden_size}};
  device::Tensor streams(activation(), {num_tokens(), ops::kHcStreams, config_.hidden_size});
  const device::Buffer ids(ids_.size() * sizeof(int32_t), executor_.memory());
  executor_.memory().upload(ids.data(), ids_.data(), ids.size());
  on_device(streams, [&](const TensorView& out) {
    op.run({.weight = weight, .ids = ids.as<int32_t>(), .num_tokens = num_tokens(), .out = out}, executor_.queue());
  });
  return streams;
}

std::unique_ptr<Block> LayerStack::build(WeightSource& weights, size_t layer) {
  PlacedWeights placed(weights, executor_.memory(), executor_.queue());
  LayerBuilder build = builder(placed);
  auto block = std::make_unique<Block>(build, fmt::format("layers.{}.", layer), config_.compress_ratios[layer],
                                       config_.is_hashed(static_cast<int64_t>(layer)), model::Bypass{}, false);
  reserve(build);
  return block;
}

void LayerStack::run(const Block& block, const TensorView& streams, model::Tracer* tracer) {
  // The layer's caches alone: it is layer 0 of a sequence that has no other.
  model::CacheLayout layout;
  layout.layers.push_back(block.cache_layout());
  model::CachePool pool(layout, executor_.memory());
  const int64_t count = streams.shape[0];
  model::SequenceCaches caches(pool, count);
  caches.make_room(0, count);
  const model::StepBatch rows = batch(layout, caches.place(), count);
  on_device(streams, [&](const TensorView& placed) { block.run(context(rows, pool, tracer), 0, placed); });
}

void LayerStack::run_layer(size_t layer, const TensorView& streams, model::Tracer* tracer) {
  std::unique_ptr<Block>& kept = kept_[layer];
  if (kept == nullptr) kept = build(weights_, layer);
  run(*kept, streams, tracer);
  if (!options_.keeps_layers) kept_.erase(layer);
}

void LayerStack::run_layer_from(WeightSource& weights, size_t layer, const TensorView& streams) {
  run(*build(weights, layer), streams, nullptr);
}

std::vector<float> LayerStack::logits(WeightSource& weights, const TensorView& streams) {
  PlacedWeights placed(weights, executor_.memory(), executor_.queue());
  LayerBuilder build = builder(placed);
  const model::OutputHead head(build, "");
  const model::VocabularyHead projection(build);
  reserve(build);
  const int64_t count = streams.shape[0];
  const model::CachePool nothing({}, executor_.memory());
  const model::StepBatch rows = batch({}, 0, count);
  const device::Tensor logits(DType::kF32, {count, config_.vocab_size}, executor_.memory());
  on_device(streams, [&](const TensorView& inputs) {
    head.run(context(rows, nothing, nullptr), projection, inputs, rows.logit_rows(), count, logits);
  });
  std::vector<float> out(static_cast<size_t>(count * config_.vocab_size));
  executor_.memory().download(out.data(), logits.view().data, out.size() * sizeof(float));
  return out;
}

std::vector<double> surprises(std::span<const float> logits, std::span<const int32_t> ids, int64_t vocab) {
  std::vector<double> out;
  const size_t width = static_cast<size_t>(vocab);
  for (size_t t = 1; t < ids.size(); ++t) {
    const std::span<const float> row = logits.subspan((t - 1) * width, width);
    const double most = *std::max_element(row.begin(), row.end());
    double total = 0;
    for (const float x : row) total += std::exp(static_cast<double>(x) - most);
    out.push_back(most + std::log(total) - static_cast<double>(row[static_cast<size_t>(ids[t])]));
  }
  return out;
}

std::vector<Expectation> expectations(std::span<const float> logits, size_t num_tokens, int64_t vocab) {
  std::vector<Expectation> out;
  const size_t width = static_cast<size_t>(vocab);
  for (size_t t = 0; t < num_tokens; ++t) {
    const std::span<const float> row = logits.subspan(t * width, width);
    const double most = *std::max_element(row.begin(), row.end());
    double total = 0, first = 0, second = 0;
    for (const float x : row) total += std::exp(static_cast<double>(x) - most);
    for (const float x : row) {
      const double cost = most + std::log(total) - static_cast<double>(x), share = std::exp(-cost);
      if (share > 0) first += share * cost, second += share * cost * cost;
    }
    out.push_back({first, second - first * first});
  }
  return out;
}

}  // namespace tessera::doctor
