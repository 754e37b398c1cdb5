// SPDX-License-Identifier: Apache-2.0
#pragma once
// Single layers of a model of random weights, on random streams, beside reading as many bytes where they compute.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/ops/probe.h"
#include "bench/ops/timing.h"
#include "bench/synthetic/synthetic_weights.h"
#include "device/buffer.h"
#include "model/model.h"

namespace tessera::bench {

struct LayerRow {
  int64_t layer = 0, ratio = 0;  // ratio as in model::Config::compress_ratios
  bool is_hashed = false;
  int64_t tokens = 1;
  double num_experts = 0;   // different ones that the tokens are routed to, on average
  int64_t bytes = 0;        // of weights and cache entries that the tokens read, each counted once
  int64_t calls = 1;        // timed at once, as one recording: a sample is their mean
  Samples time, read_time;  // of the layer; of reading as many bytes in the same run

  std::string description() const;  // "2: ratio 4, hashed"
  double gbs() const { return static_cast<double>(bytes) / time.quantile(0.5) * 1e-9; }
  double share_of_read() const { return read_time.quantile(0.5) / time.quantile(0.5); }
};

// A kernel of a layer and what it adds to the layer's time. One that overlaps with those before it adds little.
struct LaunchTime {
  std::string kernel, op;  // "linear_stream", "layers.0.attn.wq_a (linear, packed)"
  double seconds = 0;      // of a recording up to this kernel less one up to the kernel before, of medians
};

// Sequences that stand alike, and tokens of each: one is a decode step, several are a chunk of a prefill.
struct LayerBatch {
  std::span<model::SequenceState* const> states;
  int64_t tokens_each = 1;
  int64_t tokens() const { return std::ssize(states) * tokens_each; }
};

class LayerBench {
 public:
  static constexpr int64_t kReadBytes = int64_t{256} << 20;  // what reads beside layers go through
  static constexpr int64_t kMostCalls = 16;                  // timed at once

  // `model`, of `weights` on `machine`, computes in BF16. All must outlive this.
  LayerBench(model::Model& model, const model::Config& config, const SyntheticWeights& weights,
             const device::Machine& machine, uint64_t seed, int64_t read_bytes = kReadBytes);

  // Measured when called.
  Ceilings ceilings() { return probe_->ceilings(pool_.data(), read_bytes()); }
  // `tokens` tokens, other ones in each of several calls, through a layer where `state` stands; it stays there. One
  // token is a decode step (on a GPU as it is recorded), several are a chunk of a prefill. Calls include copying their
  // streams to where the layer changes them.
  LayerRow time(model::SequenceState& state, int64_t layer, int64_t tokens, double min_seconds);
  LayerRow time(const LayerBatch& batch, int64_t layer, double min_seconds);
  // The layer's kernels in order; none where the executor does not record. Between calls the caches are filled with
  // other bytes.
  std::vector<LaunchTime> launches(const LayerBatch& batch, int64_t layer, int64_t calls = kMostCalls);

 private:
  // Different experts of a call, averaged over the calls' inputs.
  double experts_hit(const LayerBatch& batch, int64_t layer);
  void prepare(const LayerBatch& batch, int64_t call);
  // Copies a call's streams to where queue_layer() changes them.
  void begin(int64_t tokens, int64_t call);
  void queue_layer(int64_t layer, int64_t tokens);
  int64_t num_inputs(int64_t tokens) const;
  int64_t read_bytes() const { return static_cast<int64_t>(pool_.size()); }

  model::Model& model_;
  const model::Config& config_;
  const SyntheticWeights& weights_;
  std::unique_ptr<Probe> probe_;
  device::Buffer pool_;
  std::vector<int32_t> ids_;
  device::Tensor inputs_, streams_;  // [tokens, 4, hidden]
};

}  // namespace tessera::bench
