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
#include "device/launch_observer.h"
#include "numeric/bf16.h"

namespace tessera::bench {

namespace {

// Inputs of different calls, so that each is routed to other experts; those of a long chunk overlap in part.
constexpr int64_t kInputs = 16, kFewestTokens = 64;
constexpr int64_t kAlignment = 128;

class ExpertCounter final : public model::Tracer {
 public:
  void tensor(std::string_view name, const TensorView& value) override {
    if (!name.ends_with("expert_ids") || value.dtype != DType::kI32) return;
    const int32_t* ids = value.as<int32_t>();
    experts.insert(ids, ids + value.shape.num_elements());
  }
  std::set<int32_t> experts;
};

// Queues the first kernels of a layer, and lists them.
class FirstLaunches final : public device::LaunchObserver {
 public:
  FirstLaunches(const device::Queue& queue, size_t most) : queue_(queue), most_(most) {}

  // Calls `work` until it has queued so many.
  template <class Work>
  void run(const Work& work) {
    if (most_ == 0) return;
    try {
      work();
    } catch (const Enough&) {
    }
  }
  std::vector<LaunchTime> take() { return std::move(taken_); }

  void launched(const char* kernel) override {
    taken_.push_back({kernel, queue_.op_being_recorded(), 0});
    if (taken_.size() == most_) throw Enough();
  }

 private:
  struct Enough {};
  const device::Queue& queue_;
  const size_t most_;
  std::vector<LaunchTime> taken_;
};

}  // namespace

std::string LayerRow::description() const {
  const std::string kind = ratio == 0 ? "window" : fmt::format("ratio {}", ratio);
  return fmt::format("{}: {}{}", layer, kind, is_hashed ? ", hashed" : "");
}

LayerBench::LayerBench(model::Model& model, const model::Config& config, const SyntheticWeights& weights,
                       const device::Machine& machine, uint64_t seed, int64_t read_bytes)
    : model_(model), config_(config), weights_(weights), probe_(make_probe(machine, model.executor())) {
  device::MemorySpace& memory = model.executor().memory();
  const device::InterleavedMemory interleaved = model.executor().interleave();
  pool_ = device::Buffer(static_cast<size_t>(read_bytes), memory);
  // Pages that nobody wrote are all one page, and in the cache.
  if (memory.is_host()) std::memset(pool_.data(), 1, pool_.size());
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

void LayerBench::prepare(const LayerBatch& batch, int64_t call) {
  std::span<const int32_t> ids(ids_);
  ids = ids.subspan(static_cast<size_t>(call % num_inputs(batch.tokens())));
  std::vector<model::SequenceSlice> slices;
  for (size_t i = 0; i < batch.states.size(); ++i) {
    const auto tokens = static_cast<size_t>(batch.tokens_each);
    // Of a decode step the logits are wanted, and so it is one that can be recorded.
    slices.push_back({batch.states[i], ids.subspan(i * tokens, tokens),
                      tokens == 1 ? model::LogitRows::kLast : model::LogitRows::kNone});
  }
  model_.prepare(slices);
}

void LayerBench::begin(int64_t tokens, int64_t call) {
  const TensorView streams = model::rows_of(streams_, 0, tokens);
  const TensorView input = model::rows_of(inputs_, call % num_inputs(tokens), tokens);
  model_.executor().memory().copy(streams.data, input.data, static_cast<size_t>(streams.num_bytes()));
}

void LayerBench::queue_layer(int64_t layer, int64_t tokens) {
  model_.queue_layer(static_cast<size_t>(layer), model::rows_of(streams_, 0, tokens));
}

double LayerBench::experts_hit(const LayerBatch& batch, int64_t layer) {
  if (batch.tokens() == 1) return static_cast<double>(config_.experts_per_token);
  ExpertCounter counter;
  int64_t total = 0;
  model_.set_tracer(&counter);
  for (int64_t call = 0; call < kInputs; ++call) {
    counter.experts.clear();
    prepare(batch, call);
    begin(batch.tokens(), call);
    queue_layer(layer, batch.tokens());
    model_.executor().synchronize();
    total += std::ssize(counter.experts);
  }
  model_.set_tracer(nullptr);
  return static_cast<double>(total) / static_cast<double>(kInputs);
}

LayerRow LayerBench::time(model::SequenceState& state, int64_t layer, int64_t tokens, double min_seconds) {
  model::SequenceState* const states[] = {&state};
  return time({states, tokens}, layer, min_seconds);
}

LayerRow LayerBench::time(const LayerBatch& batch, int64_t layer, double min_seconds) {
  const int64_t tokens = batch.tokens();
  TESSERA_CHECK(tokens >= 1 && tokens <= model_.max_step_tokens(), "tokens of a step");
  LayerRow row;
  row.layer = layer, row.tokens = tokens;
  row.ratio = config_.compress_ratios[static_cast<size_t>(layer)];
  row.is_hashed = config_.is_hashed(layer);
  row.num_experts = experts_hit(batch, layer);
  row.bytes = weights_.layer_bytes(layer, row.num_experts);
  for (model::SequenceState* state : batch.states) {
    row.bytes += cache_bytes_read(*state, static_cast<size_t>(layer), config_, batch.tokens_each);
  }
  device::Executor& executor = model_.executor();
  prepare(batch, 0);
  const auto run = [&](int64_t i) {
    // What is recorded reads one batch: then the calls' tokens differ in their streams alone.
    if (!executor.can_record()) prepare(batch, i / 2);
    begin(tokens, i / 2);
    queue_layer(layer, tokens);
  };
  const int64_t part = std::min(row.bytes, read_bytes()), spots = read_bytes() / part;
  const auto read = [&](int64_t i) {
    const char* from = pool_.as<char>() + i % spots * part / kAlignment * kAlignment;
    for (int64_t left = row.bytes; left > 0; left -= part) probe_->read(from, std::min(left, part));
  };
  Pair pair = measure_calls(executor, run, read, kMostCalls, min_seconds, row.calls);
  row.time = std::move(pair.a), row.read_time = std::move(pair.b);
  return row;
}

std::vector<LaunchTime> LayerBench::launches(const LayerBatch& batch, int64_t layer, int64_t calls) {
  device::Executor& executor = model_.executor();
  if (!executor.can_record()) return {};
  prepare(batch, 0);
  std::vector<LaunchTime> all;
  executor.record([&] {
    begin(batch.tokens(), 0);
    FirstLaunches every(executor.queue(), SIZE_MAX);
    every.run([&] { queue_layer(layer, batch.tokens()); });
    all = every.take();
  });
  double before = 0;
  for (size_t count = 0; count <= all.size(); ++count) {
    const auto call = [&](int64_t i) {
      begin(batch.tokens(), i / 2);
      FirstLaunches(executor.queue(), count).run([&] { queue_layer(layer, batch.tokens()); });
      probe_->read(pool_.data(), read_bytes());
    };
    const double now = measure_round(executor, call, calls);
    if (count > 0) all[count - 1].seconds = now - before;
    before = now;
  }
  return all;
}

}  // namespace tessera::bench
