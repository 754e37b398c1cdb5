// SPDX-License-Identifier: Apache-2.0
#include "bench/e2e/layer_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/rng.h"
#include "bench/ops/rounds.h"
#include "bench/synthetic/random_caches.h"
#include "numeric/bf16.h"

namespace tessera::bench {

namespace {

// Inputs of different calls, so that each is routed to other experts; those of a long chunk overlap in part.
constexpr int64_t kInputs = 16, kFewestTokens = 64;
constexpr int64_t kMostCalls = 16, kAlignment = 128;

class ExpertCounter final : public model::Tracer {
 public:
  void tensor(std::string_view name, const TensorView& value) override {
    if (!name.ends_with("expert_ids") || value.dtype != DType::kI32) return;
    const int32_t* ids = value.as<int32_t>();
    experts.insert(ids, ids + value.shape.num_elements());
  }
  std::set<int32_t> experts;
};

}  // namespace

std::string LayerRow::description() const {
  const std::string kind = ratio == 0 ? "window" : fmt::format("ratio {}", ratio);
  return fmt::format("{}: {}{}", layer, kind, is_hashed ? ", hashed" : "");
}

LayerBench::LayerBench(model::Model& model, const model::Config& config, const SyntheticWeights& weights,
                       const device::Machine& machine, uint64_t seed)
    : model_(model), config_(config), weights_(weights), probe_(make_probe(machine, model.executor())) {
  device::MemorySpace& memory = model.executor().memory();
  const device::InterleavedMemory interleaved = model.executor().interleave();
  pool_ = device::Buffer(static_cast<size_t>(kReadBytes), memory);
  // Pages that nobody wrote are all one page, and in the cache.
  if (memory.is_host()) std::memset(pool_.data(), 1, pool_.size());
  ceilings_ = probe_->ceilings(pool_.data(), kReadBytes);
  const int64_t most = model.max_step_tokens(), count = std::max(kFewestTokens, most + kInputs);
  Rng rng(seed);
  for (int64_t i = 0; i < count; ++i) {
    ids_.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(config.vocab_size))));
  }
  const device::Tensor inputs(DType::kBF16, {count, ops::kHcStreams, config.hidden_size});
  for (int64_t i = 0; i < inputs.view().shape.num_elements(); ++i) {
    inputs.as<uint16_t>()[i] = numeric::bf16_from_float(rng.normal());
  }
  inputs_ = inputs.clone_into(memory);
  streams_ = device::Tensor(DType::kBF16, {most, ops::kHcStreams, config.hidden_size}, memory);
}

int64_t LayerBench::num_inputs(int64_t tokens) const {
  return inputs_.view().shape[0] - tokens + 1;
}

void LayerBench::prepare(model::SequenceState& state, int64_t tokens, int64_t call) {
  const size_t at = static_cast<size_t>(call % num_inputs(tokens));
  // Of a decode step the logits are wanted, and so it is one that can be recorded.
  const model::SequenceSlice slice{&state, std::span(ids_).subspan(at, static_cast<size_t>(tokens)),
                                   tokens == 1 ? model::LogitRows::kLast : model::LogitRows::kNone};
  model_.prepare({&slice, 1});
}

void LayerBench::queue(int64_t layer, int64_t tokens, int64_t call) {
  const TensorView streams = model::rows_of(streams_, 0, tokens);
  const TensorView input = model::rows_of(inputs_, call % num_inputs(tokens), tokens);
  model_.executor().memory().copy(streams.data, input.data, static_cast<size_t>(streams.num_bytes()));
  model_.queue_layer(static_cast<size_t>(layer), streams);
}

double LayerBench::experts_hit(model::SequenceState& state, int64_t layer, int64_t tokens) {
  if (tokens == 1) return static_cast<double>(config_.experts_per_token);
  ExpertCounter counter;
  int64_t total = 0;
  model_.set_tracer(&counter);
  for (int64_t call = 0; call < kInputs; ++call) {
    counter.experts.clear();
    prepare(state, tokens, call);
    queue(layer, tokens, call);
    model_.executor().synchronize();
    total += std::ssize(counter.experts);
  }
  model_.set_tracer(nullptr);
  return static_cast<double>(total) / static_cast<double>(kInputs);
}

LayerRow LayerBench::time(model::SequenceState& state, int64_t layer, int64_t tokens, double min_seconds) {
  TESSERA_CHECK(tokens >= 1 && tokens <= model_.max_step_tokens(), "tokens of a step");
  LayerRow row;
  row.layer = layer, row.tokens = tokens;
  row.ratio = config_.compress_ratios[static_cast<size_t>(layer)];
  row.is_hashed = config_.is_hashed(layer);
  row.num_experts = experts_hit(state, layer, tokens);
  row.bytes = weights_.layer_bytes(layer, row.num_experts) +
              cache_bytes_read(state, static_cast<size_t>(layer), config_, tokens);
  device::Executor& executor = model_.executor();
  prepare(state, tokens, 0);
  const auto run = [&](int64_t i) {
    // What is recorded reads one batch: then the calls' tokens differ in their streams alone.
    if (!executor.can_record()) prepare(state, tokens, i / 2);
    queue(layer, tokens, i / 2);
  };
  const int64_t part = std::min(row.bytes, kReadBytes), spots = kReadBytes / part;
  const auto read = [&](int64_t i) {
    const char* from = pool_.as<char>() + i % spots * part / kAlignment * kAlignment;
    for (int64_t left = row.bytes; left > 0; left -= part) probe_->read(from, std::min(left, part));
  };
  Pair pair = measure_calls(executor, run, read, kMostCalls, min_seconds, row.calls);
  row.time = std::move(pair.a), row.read_time = std::move(pair.b);
  return row;
}

}  // namespace tessera::bench
