// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a layer's parts cost on one of the ranks, added up: used by the files of step_cost.h alone.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/integer_math.h"
#include "bench/plan/families.h"
#include "bench/plan/step_cost.h"
#include "comm/nccl.h"

namespace tessera::bench {

// What the model of kernels does not describe has the rate that an H200 was measured with, in cycles of one of its
// multiprocessors so that other GPUs follow (docs/performance/{cuda,hopper,prefill}.md): beside what they are used for.
constexpr int64_t kFewRows = 8;  // tokens of kernels of few
// What small kernels of a step add beyond a launch and first bytes, loads and sums that depend on each other: 1.6 us,
// of the streams of 4,096 channels (3.4 to 4.8 us in all), norm_rope (3.3 to 3.9), scores of 2,048 entries (3.8), a
// norm by itself (4.0; all 2026-11-29-h200-two-formats.json).
constexpr double kSmallEnd = 2'900;

// A tensor of a layer as a rank holds it.
struct Held {
  int64_t rows = 0, cols = 0;
  ops::WeightFormat format{};
  double bytes = 0;
};

class StepLayer {
 public:
  StepLayer(const model::StoredModel& stored, const model::ParallelPlan& plan, const Target& target,
            const StepLoad& load, const std::string& prefix);
  std::vector<CostPart> take() { return std::move(parts_); }
  void attention(int64_t ratio);
  void experts();
  // Two a layer, and what replicated projections cost once they are cut.
  void sums(int64_t ratio);
  void ends();

 private:
  double rows() const { return static_cast<double>(load_.rows()); }
  // Of a prompt (model/layers/token_run.h): a decode step is recorded, and whole.
  bool are_tokens_cut() const {
    return plan_.world > 1 && load_.tokens > 1 && load_.rows() >= plan_.fewest_tokens_to_cut;
  }
  // Of a prompt whose rank has all heads' maps (model/layers/attention_heads.h): they are of its own tokens.
  bool are_heads_whole() const {
    return are_tokens_cut() && (plan_.keeps_all_heads || plan_.attention == model::AttentionSplit::kWhole);
  }
  // Of a token, of the maps of attention's input whose outputs every rank needs: keys in BF16, what compressors pool in
  // F32.
  double gathered_bytes(int64_t ratio) const;
  double head_rows() const { return are_heads_whole() ? own_rows() : rows(); }
  // What `work` adds up is of as many tokens as queries are.
  template <class Work>
  void of_queries(const Work& work) {
    const StepLoad whole = load_;
    if (are_heads_whole()) load_.tokens = ceil_div(load_.tokens, plan_.world);
    work();
    load_ = whole;
  }
  Kernel pass(double read_bytes, double written_bytes, double end_cycles = 0) const;
  // `cycles` of the whole GPU's multiprocessors together, spread over all of them.
  Kernel work(double cycles, double memory_bytes = 0, double end_cycles = 0) const;
  // A stream of weights as it is in a step, behind a kernel that leaves memory time.
  Kernel behind_small(const Kernel& stream) const;
  double us(const Kernel& kernel) const { return predict(kernel, t_, true).us(); }
  CostPart& part(const std::string& name);
  void add(const std::string& name, const std::vector<Kernel>& kernels, double factor = 1);
  // What is read and multiplied at least. Products of NVFP4 inputs are four times as fast as others, but on Hopper.
  void need(const std::string& name, double bytes, double flops, bool is_nvfp4);
  // Whether NVFP4 has kernels of the family's own, or is left to the portable ones.
  bool has_own_kernels() const { return t_.family == Family::kHopper || load_.input == ops::InputMode::kA4; }
  // Maps of one input: one launch where they stream weights. `parts`: of their rows, over so many ranks.
  void maps(const std::string& name, const std::vector<const char*>& names, int64_t parts = 1);
  // Hyper-connections of one of a layer's two halves.
  void streams();
  double stream_end() const;  // of one of its kernels
  void compress(int64_t ratio);
  // Among the scores of so many entries of each token, all in one call: more than a block holds in parts, of which each
  // lists its largest, and then among those (backends/cuda/top_k.cu, which also rounds parts up).
  void choose(double tokens, double entries);
  double middle() const { return static_cast<double>(load_.position) + static_cast<double>(load_.tokens + 1) / 2; }
  // What a token has in sight: keys, and parts of them.
  struct Sight {
    double keys = 0, parts = 0;
  };
  Sight sight_at(double position, int64_t ratio) const;
  // The mean of a chunk's tokens, of so many of them at most.
  Sight mean_sight(int64_t ratio) const;
  void attend(int64_t ratio);
  bool are_experts_by_id() const { return plan_.experts == model::ExpertSplit::kById && plan_.world > 1; }
  PlanShape routed_shape() const;
  // The shared expert in the launches of the routed ones.
  bool are_experts_together() const;
  void shared_with_routed();
  void routed();
  // What NCCL takes for a call with next to no bytes.
  double nccl_us() const { return plan_.world == 2 ? t_.collective.high : t_.collective.low; }
  // Calls for so many bytes of all ranks.
  static double pieces(double bytes) { return std::max(1.0, std::ceil(bytes / static_cast<double>(kScratchBytes))); }
  double own_rows() const { return are_tokens_cut() ? rows() / static_cast<double>(plan_.world) : rows(); }
  double index_entries() const { return middle() / 4; }
  // Where somebody sees more entries than are chosen (model/layers/indexer_layer.h).
  bool is_choice_cut() const { return are_tokens_cut() && (load_.position + load_.tokens) / 4 > c_.index_topk; }
  // Of `bytes` that every rank has, those that come from others.
  double others(double bytes) const { return bytes * static_cast<double>(plan_.world - 1); }
  // Logits of `own` tokens of the vocabulary from every rank, by NCCL, and their way to their places.
  void gather_logits(int64_t own);
  // `bytes` of every rank to every other, by NCCL.
  void gather(double bytes);
  // The sum over ranks of `count` values, into BF16: through peer memory, where the GPUs reach each other's and it has
  // room (comm/peer.h); else by NCCL (comm/nccl.h). `saved`: launches, of a sum made where streams are written.
  void sum(double count, DType in, int saved = 0);
  // The sum over ranks of each one's share of `count` values, by NCCL.
  void scatter(double count, DType in);
  // Of the entries that each token attends, those on other ranks; of a prompt they are copied once
  // (model/cache_pool.h, near_entries()).
  void read_from_others(double keys, int64_t ratio);
  void exchange(double received, double begin_us, double gigabytes, const char* name = kSumsPart);

  static constexpr int64_t kScratchBytes = comm::NcclOptions{}.scratch_bytes;
  const model::Config& c_;
  const model::ParallelPlan& plan_;
  const Target& t_;
  StepLoad load_;
  std::map<std::string, Held> held_;
  std::vector<CostPart> parts_;
  std::vector<double> longest_;  // of each part, its longest kernel
};

}  // namespace tessera::bench
