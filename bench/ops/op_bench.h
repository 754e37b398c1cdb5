// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the rows of `tessera bench ops` share: the device, planner, random data there, and how a row is measured.
#include <functional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "bench/ops/bench_ops.h"
#include "bench/ops/probe.h"
#include "bench/ops/weight_pool.h"
#include "device/buffer.h"
#include "device/executor.h"
#include "model/config.h"
#include "ops/planner.h"

namespace tessera::bench {

// Values where the ops compute.
template <class T>
class Placed {
 public:
  Placed() = default;
  Placed(const std::vector<T>& values, device::MemorySpace& memory) : buffer_(values.size() * sizeof(T), memory) {
    if (!values.empty()) memory.upload(buffer_.data(), values.data(), buffer_.size());
  }
  T* data() const { return buffer_.as<T>(); }

 private:
  device::Buffer buffer_;
};

class OpBench {
 public:
  OpBench(const Options& options, const std::function<void(const Report&, const Row&)>& on_row);

  const Options& options() const { return options_; }
  const WeightPool& pool() const { return pool_; }
  device::Queue& queue() { return executor_->queue(); }
  device::MemorySpace& memory() { return executor_->memory(); }
  Rng& rng() { return rng_; }
  Report take() { return std::move(report_); }

  // What one row is; bytes and flops as in Row.
  struct Work {
    int64_t tokens = 0, bytes = 0, flops = 0;
    Residence residence = Residence::kCache;
    Way way = Way::kInTurn;
  };
  // Bytes that a row's operands take: at any number of tokens, and more for each token.
  struct Footprint {
    int64_t fixed = 0, per_token = 0;
  };
  // Binds `desc`, then for each number of tokens: `prepare(bound, tokens, workspace)` makes the operands and returns
  // the work and the call, whose argument counts runs. Rows that `only` leaves out are neither prepared nor run. Throws
  // kResourceExhausted with figures, before anything is made, where a row doesn't fit into memory.
  struct Case {
    Work work;
    std::function<void(int64_t)> call;
  };
  template <class Op, class Prepare>
  void rows(const std::string& name, const typename Op::Desc& desc, const Footprint& footprint,
            const Prepare& prepare) {
    rows<Op>(name, desc, footprint, options_.tokens, prepare);
  }
  template <class Op, class Prepare>
  void rows(const std::string& name, const typename Op::Desc& desc, const Footprint& footprint,
            const std::vector<int64_t>& token_counts, const Prepare& prepare) {
    const std::string full = std::string(Op::kName) + " " + name + " " + desc.to_string();
    if (full.find(options_.only) == std::string::npos) return;
    const ops::Bound<Op> bound = planner_.bind<Op>(full, desc);
    for (const int64_t tokens : token_counts) {
      const int64_t work_bytes = bound.workspace_bytes(tokens);
      check_fit(full, tokens, footprint.fixed + tokens * footprint.per_token + work_bytes);
      const device::Buffer workspace(static_cast<size_t>(work_bytes), memory());
      measure(full, planner_.lines().back().chosen, prepare(bound, tokens, workspace.data()));
    }
  }
  // A row of several ops, bound by planner(): `bytes` is what its operands take, `prepare()` makes them.
  ops::Planner& planner() { return planner_; }
  template <class Prepare>
  void row(const std::string& name, const std::string& variant, int64_t tokens, int64_t bytes, const Prepare& prepare) {
    if (name.find(options_.only) == std::string::npos) return;
    check_fit(name, tokens, bytes);
    measure(name, variant, prepare());
  }

  // Operands where the ops compute: normal values, zeros, values of the host.
  device::Tensor activations(int64_t tokens, int64_t width);
  device::Tensor zeros(DType dtype, const Shape& shape) { return device::Tensor(dtype, shape, memory()); }
  template <class T>
  Placed<T> place(const std::vector<T>& values) {
    return Placed<T>(values, memory());
  }
  device::Buffer place(const device::Buffer& host) { return host.clone_into(memory()); }
  // The host's: normal values.
  std::vector<float> floats(int64_t count, float scale);
  // first, first + 1, ...
  static std::vector<int64_t> positions(int64_t first, int64_t count);

 private:
  void check_fit(const std::string& name, int64_t tokens, int64_t bytes) const;
  void measure(const std::string& name, const std::string& variant, const Case& a_case);

  const Options& options_;
  const std::function<void(const Report&, const Row&)>& on_row_;
  device::Machine machine_;
  std::unique_ptr<device::Executor> executor_;
  device::InterleavedMemory interleaved_;  // everything made here
  std::unique_ptr<Probe> probe_;
  ops::Planner planner_;
  WeightPool pool_;
  device::Buffer fence_;  // where copies that keep calls apart go
  Rng rng_{11};
  Report report_;
};

// One op's rows, at `tokens`.
struct MapShape {
  std::string name;
  ops::WeightFormat format = ops::WeightFormat::kNvfp4;
  int64_t out = 0, in = 0;
  DType output = DType::kBF16;
  int64_t groups = 1;
  Way way = Way::kInTurn;
};
using TokenCounts = std::vector<int64_t>;
void linear_rows(OpBench& bench, const MapShape& map, const TokenCounts& tokens);
void expert_rows(OpBench& bench, const std::string& name, const model::Config& config, bool is_skewed,
                 const TokenCounts& tokens);
// The experts' w1 and w2 as maps of rows that are sorted by expert already: those of so many tokens.
void grouped_rows(OpBench& bench, const std::string& name, const model::Config& config, ops::RowLayout layout,
                  const TokenCounts& tokens);
// A full window and `entries` selected entries.
void attention_rows(OpBench& bench, const std::string& name, const model::Config& config, int64_t entries,
                    const TokenCounts& tokens);
void index_score_rows(OpBench& bench, const std::string& name, const model::Config& config, int64_t entries,
                      const TokenCounts& tokens);
void top_k_rows(OpBench& bench, const std::string& name, const model::Config& config, int64_t entries,
                const TokenCounts& tokens);
// The rows of one model's shapes.
void bench_weights(OpBench& bench, const std::string& name, const model::Config& config);
void bench_attention(OpBench& bench, const std::string& name, const model::Config& config);
void bench_rows(OpBench& bench, const std::string& name, const model::Config& config);
void bench_choices(OpBench& bench, const std::string& name, const model::Config& config);

}  // namespace tessera::bench
