// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/step_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "base/integer_math.h"
#include "bench/plan/families.h"
#include "comm/nccl.h"
#include "comm/peer.h"
#include "model/layers/vocabulary_head.h"
#include "model/rank_memory.h"
#include "ops/cache_entry.h"
#include "ops/mhc/mhc.h"

namespace tessera::bench {

namespace {

using model::ParallelPlan, model::WeightRow;

// Rates of an H200 that set what the model of kernels does not describe, in cycles of one of its multiprocessors so
// that other GPUs follow: docs/performance/{cuda,hopper,prefill}.md.
constexpr double kPortablePart = 27'450;  // 15 us: attention, 128 keys for 16 heads (13 to 17 in what was measured)
constexpr double kClusterPart = 8'100;    // 4.4 us: the same by a cluster of four (8.9 before it added 4.5 us less)
constexpr double kWidePart = 20'100;      // 11 us: attention of sm90, 128 keys for 64 heads
constexpr double kScoreRate = 765;        // FLOP: index scores, 185 TFLOP/s of 132 multiprocessors
constexpr double kWideScoreRate = 2'180;  // the same of sm90, 528 TFLOP/s
constexpr double kSelectCycles = 2.5;     // a score, of four thread blocks side by side: 6.3 million in 65 us
constexpr double kWholeChoice = 8192, kFewestChoiceParts = 5, kMostChoiceParts = 1024;  // backends/cuda/indexer.cu
// A value of the streams: products, mixing and writing, 590 us of 67 million of kernels that the records of whole
// steps, which other costs are fitted to with this one, were made with. Since products are on tensor cores it is 195 to
// 250: to be fitted anew with records of that.
constexpr double kStreamCycles = 2.12;
constexpr double kStreamEnd = 2'900;  // 1.6 us of 3.4 to 4.4 that each of its kernels takes for one token
// A sum over ranks in the first of them: 0.4 us on the GPU (2026-11-29-h200-row-types), 1 over the link, a guess from
// steps of two ranks and of one on other cards; of so many tokens at most (have_room_to_wait, on 132 multiprocessors).
constexpr double kSumOfFew = 1.4, kMostSumOfFew = 32;
constexpr double kReadFromPeer = 3;   // us that attention waits longer for entries on other GPUs
constexpr double kRouterEnd = 3'660;  // 2 of 4 us
constexpr int64_t kFewRows = 8;       // up to here attention may be the portable kernel's on Hopper too,
constexpr int64_t kFewBlocks = 132;   // where it has so many thread blocks at most,
constexpr int64_t kFewClusters = 48;  // or clusters of four
constexpr int64_t kMostSpread = 44;   // tokens' groups of 64 heads whose parts Hopper's own kernel spreads
constexpr int64_t kPartKeys = 128;

// A tensor of a layer as a rank holds it.
struct Held {
  int64_t rows = 0, cols = 0;
  ops::WeightFormat format{};
  double bytes = 0;
};

// The expected largest of n values of a normal distribution, in deviations.
double largest_of(int64_t n) {
  constexpr std::array kLargest = {0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424};
  return kLargest[static_cast<size_t>(std::min<int64_t>(n, 8))];
}

class Layer {
 public:
  Layer(const model::StoredModel& stored, const ParallelPlan& plan, const Target& target, const StepLoad& load,
        const std::string& prefix)
      : c_(stored.config), plan_(plan), t_(target), load_(load) {
    for (size_t i = 0; i < stored.rows.size(); ++i) {
      const WeightRow& row = stored.rows[i];
      if (row.expert > 0 || !row.name.starts_with(prefix)) continue;
      const model::Shard shard = plan.shard(0);
      const model::WeightSlice slice =
          model::slice_of(row, c_, are_heads_whole() ? model::with_whole_attention(shard) : shard);
      held_[row.name.substr(prefix.size())] = {slice.row_end - slice.row_begin, slice.col_end - slice.col_begin,
                                               stored.formats[i],
                                               static_cast<double>(slice_bytes(row, stored.formats[i], slice))};
    }
  }
  std::vector<CostPart> take() { return std::move(parts_); }

  void attention(int64_t ratio) {
    streams();
    std::vector<const char*> of_x = {"attn.wq_a", "attn.wkv"}, of_qr = {"attn.wq_b"};
    if (ratio != 0) of_x.insert(of_x.end(), {"attn.compressor.wkv", "attn.compressor.wgate"});
    if (ratio == 4) {
      of_x.insert(of_x.end(),
                  {"attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate", "attn.indexer.weights_proj"});
      of_qr.push_back("attn.indexer.wq_b");
    }
    of_queries([&] { maps("maps of the input", of_x, plan_.cuts_projections ? plan_.world : 1); });
    of_queries([&] { maps("maps of queries", of_qr); });
    const double q = head_rows() * static_cast<double>(held_.at("attn.wq_b").rows);
    add("norms, rotations, caches", {pass(2 * q, 2 * q)});
    if (ratio != 0) compress(ratio);
    attend(ratio);
    of_queries([&] { maps("output maps", {"attn.wo_a", "attn.wo_b"}); });
    if (are_heads_whole() && plan_.attention == model::AttentionSplit::kByGroup) {
      // Each rank's part of wo_b by itself, from columns that are set apart, and the sum of what they give.
      const double low = 2 * head_rows() * static_cast<double>(c_.o_groups * c_.o_lora_rank);
      const double out = head_rows() * static_cast<double>(c_.hidden_size);
      add("output maps", {pass(low, low), pass(4 * out * static_cast<double>(plan_.world), 2 * out)});
    }
  }

  void experts() {
    streams();
    maps("router", {"ffn.gate"});
    part("router").us += us(pass(0, 0, kRouterEnd));
    routed();
    if (are_experts_together()) {
      shared_with_routed();
    } else {
      maps("shared expert", {"ffn.shared_experts.w1", "ffn.shared_experts.w3", "ffn.shared_experts.w2"});
      const double h = rows() * static_cast<double>(held_.at("ffn.shared_experts.w1").rows);
      if (load_.rows() > kFewRows) add("shared expert", {pass(4 * h, 2 * h)});
    }
    const double out = 2 * rows() * static_cast<double>(c_.hidden_size);
    if (load_.rows() > kFewRows) {
      add("combine", {pass(out * static_cast<double>(c_.experts_per_token + 1), out)});
    }
  }

  // Two a layer, and what replicated projections cost once they are cut.
  void sums(int64_t ratio) {
    if (plan_.world == 1) return;
    const double vector = rows() * static_cast<double>(c_.hidden_size);
    const bool are_heads_cut = plan_.attention == model::AttentionSplit::kByGroup;
    const bool are_widths_cut = plan_.experts == model::ExpertSplit::kByWidth;
    if (are_tokens_cut()) {
      if (are_heads_cut && !are_heads_whole()) scatter(vector, DType::kF32);
      if (are_widths_cut) scatter(vector, DType::kBF16);
      const double inputs = 2 * vector / static_cast<double>(plan_.world);
      gather(inputs);
      gather(are_heads_whole() ? own_rows() * gathered_bytes(ratio) : inputs);
      if (ratio == 4 && is_choice_cut() && !are_heads_whole())
        gather(4 * own_rows() * static_cast<double>(c_.index_topk));
    } else {
      // Part of the turn between the sublayers and of a layer's end where they are whole.
      if (are_heads_cut) sum(vector, DType::kF32, 1);
      if (are_widths_cut) sum(vector, DType::kBF16, 2);
    }
    if (!are_widths_cut) sum(vector * static_cast<double>(c_.experts_per_token), DType::kBF16);
    if (plan_.cuts_projections) {
      double width = 0;
      for (const auto& [name, held] : held_) {
        const bool is_indexer = name.starts_with("attn.indexer.") && !name.ends_with("wq_b");
        const bool is_cut = name == "attn.wq_a" || name == "attn.wkv" || name.starts_with("attn.compressor.w") ||
                            (is_indexer && held.rows > 1 && held.cols == c_.hidden_size);
        if (is_cut) width += static_cast<double>(held.rows);
      }
      gather(4 * rows() * width / static_cast<double>(plan_.world));
    }
  }

  void ends() {
    const double streams = 2.0 * static_cast<double>(ops::kHcStreams * c_.hidden_size);
    if (plan_.shards_entries) sum(4, DType::kF32);  // all are done with the step before
    add("embedding", {pass(rows() * streams / static_cast<double>(ops::kHcStreams), rows() * streams)});
    add("hyper-connections", {pass(rows() * streams, 0, kStreamEnd), pass(0, 0, kStreamEnd)});
    if (are_tokens_cut()) gather(rows() * streams / static_cast<double>(plan_.world));
    load_.tokens = 1;  // each sequence's last token alone has logits
    maps("head", {"head"});
    if (const int64_t own = held_.at("head").rows; own < c_.vocab_size) gather_logits(own);
    const double logits = 4.0 * rows() * static_cast<double>(c_.vocab_size);
    add("drawing", {pass(logits, 0), pass(logits, 0), pass(0, 0)});
  }

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
  double gathered_bytes(int64_t ratio) const {
    const auto values = [&](const char* name) { return static_cast<double>(held_.at(name).rows); };
    double bytes = 2 * values("attn.wkv");
    if (ratio != 0) bytes += 8 * values("attn.compressor.wkv");
    if (ratio == 4) bytes += 8 * values("attn.indexer.compressor.wkv");
    return bytes;
  }
  double head_rows() const { return are_heads_whole() ? own_rows() : rows(); }
  // What `work` adds up is of as many tokens as queries are.
  template <class Work>
  void of_queries(const Work& work) {
    const StepLoad whole = load_;
    if (are_heads_whole()) load_.tokens = ceil_div(load_.tokens, plan_.world);
    work();
    load_ = whole;
  }

  Kernel pass(double read_bytes, double written_bytes, double end_cycles = 0) const {
    Kernel kernel = pass_kernel("", read_bytes, written_bytes, t_);
    kernel.end_cycles = end_cycles;
    return kernel;
  }
  // `cycles` of the whole GPU's multiprocessors together, spread over all of them.
  Kernel work(double cycles, double memory_bytes = 0, double end_cycles = 0) const {
    Kernel kernel = pass_kernel("", 0, 0, t_);
    kernel.issue_cycles = cycles / t_.multiprocessors;
    kernel.memory_bytes = memory_bytes;
    kernel.is_bulk = false;
    kernel.end_cycles = end_cycles;
    return kernel;
  }
  double us(const Kernel& kernel) const { return predict(kernel, t_, true).us(); }

  CostPart& part(const std::string& name) {
    const auto at = std::find_if(parts_.begin(), parts_.end(), [&](const CostPart& p) { return p.name == name; });
    if (at != parts_.end()) return *at;
    parts_.emplace_back().name = name;
    longest_.push_back(0);
    return parts_.back();
  }
  void add(const std::string& name, const std::vector<Kernel>& kernels, double factor = 1) {
    CostPart& p = part(name);
    const Estimate e = estimate(kernels, t_, true);
    p.us += factor * e.us;
    double& longest = longest_[static_cast<size_t>(&p - parts_.data())];
    for (const Prediction& prediction : e.parts) {
      if (prediction.us() <= longest) continue;
      longest = prediction.us();
      p.bound =
          prediction.fill_us + prediction.end_us > prediction.hidden_us ? "launch and end" : prediction.limit().name;
    }
  }
  // What is read and multiplied at least. Products of NVFP4 inputs are four times as fast as others, but on Hopper.
  void need(const std::string& name, double bytes, double flops, bool is_nvfp4) {
    CostPart& p = part(name);
    p.bytes += bytes, p.flops += flops;
    const double slower = is_nvfp4 || t_.family == Family::kHopper ? 1 : 4;
    p.limit_us += roofline_us(bytes, flops * slower, t_);
  }

  // Maps of one input: one launch where they stream weights. `parts`: of their rows, over so many ranks.
  void maps(const std::string& name, const std::vector<const char*>& names, int64_t parts = 1) {
    std::vector<Kernel> streams, others;
    std::vector<ops::Linear::Desc> of_together;
    std::vector<StreamWork> works;  // of the streams
    for (const char* map : names) {
      const Held& held = held_.at(map);
      PlanShape shape;
      shape.map = {.in = held.cols, .out = ceil_div(held.rows, parts), .format = held.format};
      if (std::string_view(map) == "attn.wo_a") {
        shape.map.groups = held.rows / c_.o_lora_rank;
        shape.map.out = held.rows / shape.map.groups;
      }
      std::vector<Kernel> kernels;
      // FP8 and BF16 have kernels of their own on Hopper alone.
      const bool is_packed = t_.family == Family::kHopper && held.format != ops::WeightFormat::kF32;
      if (is_packed || held.format == ops::WeightFormat::kNvfp4) kernels = our_kernels(shape, load_.rows(), t_);
      if (kernels.empty()) kernels = portable_kernels(shape, load_.rows(), t_);
      need(name, held.bytes / static_cast<double>(parts), shape_flops(shape, load_.rows()),
           held.format == ops::WeightFormat::kNvfp4);
      // Of one input and format: wo_a and wo_b, and w2, wait for what is before them.
      const bool waits = std::string_view(map) == "attn.wo_b" || std::string_view(map).ends_with(".w2");
      const bool is_stream = kernels.size() == 1 && load_.rows() <= kMostStreamTokens && !waits;
      const StreamWork work = stream_of(shape.map, load_.rows());
      if (!is_stream) {
        others.insert(others.end(), kernels.begin(), kernels.end());
      } else if (!works.empty() && works.back().format == work.format && works.back().width == work.width) {
        works.back().tiles += work.tiles, of_together.push_back(shape.map);
        streams.back() = few_tokens_kernel(of_together, works.back(), load_.rows(), t_);
      } else {
        works.push_back(work), of_together = {shape.map};
        streams.push_back(kernels[0]);
      }
    }
    if (others.empty()) join_formats(works, load_.rows(), t_, streams);
    add(name, streams), add(name, others);
  }

  // Hyper-connections of one of a layer's two halves.
  void streams() {
    const double values = own_rows() * static_cast<double>(ops::kHcStreams * c_.hidden_size);
    const double weights = 24.0 * 4 * static_cast<double>(ops::kHcStreams * c_.hidden_size);
    // Streams are read for products, mixed, and read and written with what a layer gives.
    const double bytes = values * 2 * 4.5;
    const bool is_cached = bytes < 32e6;
    for (int kernel = 0; kernel < 2; ++kernel) {
      add("hyper-connections",
          {work(kStreamCycles * values / 2, weights / 2 + (is_cached ? 0 : bytes / 2), kStreamEnd)});
    }
    need("hyper-connections", weights, 2 * 24 * values, true);
  }

  void compress(int64_t ratio) {
    const double width = static_cast<double>(ratio == 4 ? 2 * c_.head_dim : c_.head_dim);
    add("compressed entries", {pass(8 * rows() * width, 0)});
    if (ratio != 4) return;
    add("compressed entries", {pass(16 * rows() * static_cast<double>(c_.index_head_dim), 0)});
    // Scores of all entries of each sequence, read once, and the choice among them.
    const double entries = index_entries(), tokens = is_choice_cut() ? own_rows() : head_rows();
    const double flops = 2 * tokens * entries * static_cast<double>(c_.index_num_heads * c_.index_head_dim);
    const double bytes = static_cast<double>(load_.sequences) * entries *
                         static_cast<double>(ops::index_entry_layout({}, c_.index_head_dim).entry_bytes());
    add("index scores, choice", {work(flops / (t_.family == Family::kHopper ? kWideScoreRate : kScoreRate), bytes)});
    choose(tokens, entries);
    need("index scores, choice", bytes, flops, true);
  }

  // Among the scores of so many entries of each token (backends/cuda/indexer.cu, which rounds parts to whole chunks):
  // few tokens' in parts, of which each lists its largest, and then among those.
  void choose(double tokens, double entries) {
    const auto one = [&](double tiles, double scores) {
      Kernel kernel = pass(0, 0);
      kernel.tiles = static_cast<int64_t>(std::ceil(tiles));
      kernel.tiles_at_once = 4, kernel.issue_cycles = kSelectCycles * scores;
      add("index scores, choice", {kernel});
    };
    const double k = static_cast<double>(c_.index_topk), part = std::sqrt(entries * k);
    const double parts = std::min(entries / part, kMostChoiceParts / tokens);
    if (entries <= kWholeChoice || parts < kFewestChoiceParts) return one(tokens, entries);
    one(tokens * parts, entries / parts);
    one(tokens, parts * k);
  }

  double middle() const { return static_cast<double>(load_.position) + static_cast<double>(load_.tokens + 1) / 2; }

  // What a token has in sight: keys, and parts of them.
  struct Sight {
    double keys = 0, parts = 0;
  };
  Sight sight_at(double position, int64_t ratio) const {
    const auto parts_of = [](double keys) { return std::ceil(keys / static_cast<double>(kPartKeys)); };
    const double window = std::min(position, static_cast<double>(c_.sliding_window));
    double entries = ratio == 0 ? 0 : position / static_cast<double>(ratio);
    if (ratio == 4) entries = std::min(entries, static_cast<double>(c_.index_topk));
    return {window + entries, parts_of(window) + parts_of(entries)};
  }
  // The mean of a chunk's tokens, of so many of them at most.
  Sight mean_sight(int64_t ratio) const {
    const int64_t count = std::min<int64_t>(load_.tokens, 64);
    Sight mean;
    for (int64_t i = 0; i < count; ++i) {
      const double share = (static_cast<double>(i) + 0.5) / static_cast<double>(count);
      const Sight one =
          sight_at(static_cast<double>(load_.position) + share * static_cast<double>(load_.tokens) + 0.5, ratio);
      mean.keys += one.keys / static_cast<double>(count), mean.parts += one.parts / static_cast<double>(count);
    }
    return mean;
  }

  void attend(int64_t ratio) {
    const auto heads = static_cast<double>(held_.at("attn.attn_sink").rows);
    const auto [keys, parts] = mean_sight(ratio);
    const auto n = static_cast<int64_t>(head_rows());
    const auto num_parts = static_cast<int64_t>(std::ceil(parts)), num_heads = static_cast<int64_t>(heads);
    const bool are_few = parts > 1 && n <= kFewRows && n * ceil_div(num_heads, int64_t{16}) * num_parts <= kFewBlocks;
    const bool are_clusters =
        t_.family == Family::kHopper && n * ceil_div(num_heads, int64_t{16}) * num_parts <= kFewClusters;
    const bool is_wide = t_.family == Family::kHopper && heads >= 16 && !are_few && !are_clusters;
    const int64_t blocks = n * ceil_div(num_heads, is_wide ? int64_t{64} : int64_t{16});
    Kernel kernel = pass(0, 0);
    // Parts of few tokens are spread over multiprocessors and merged by a second kernel.
    const bool is_spread = parts > 1 && (is_wide ? blocks <= kMostSpread : blocks < t_.multiprocessors);
    kernel.tiles = is_spread ? blocks * num_parts : blocks;
    kernel.issue_cycles = (is_wide ? kWidePart : are_clusters ? kClusterPart : kPortablePart) * (is_spread ? 1 : parts);
    const double bytes = static_cast<double>(load_.sequences) *
                         (load_.tokens == 1 ? keys : keys + static_cast<double>(load_.tokens)) *
                         static_cast<double>(ops::kv_entry_layout({}, c_.head_dim, c_.rope_dim).entry_bytes());
    kernel.memory_bytes = bytes;
    add("attention", {kernel});
    if (plan_.shards_entries && ratio != 0) read_from_others(keys, ratio);
    if (is_spread) add("attention", {pass(0, 0)});
    add("attention", {pass(0, 4 * head_rows() * heads * static_cast<double>(c_.rope_dim))});  // rotation of its output
    need("attention", bytes, 4 * head_rows() * heads * static_cast<double>(c_.head_dim) * keys, false);
  }

  bool are_experts_by_id() const { return plan_.experts == model::ExpertSplit::kById && plan_.world > 1; }
  PlanShape routed_shape() const {
    const Held& w1 = held_.at("ffn.experts.0.w1");
    PlanShape shape;
    shape.is_experts = true;
    shape.experts = {.hidden = c_.hidden_size,
                     .inner = w1.rows,
                     .num_local = are_experts_by_id() ? c_.num_experts / plan_.world : c_.num_experts,
                     .num_experts = c_.num_experts,
                     .top_k = c_.experts_per_token,
                     .format = w1.format};
    return shape;
  }

  // The shared expert in the launches of the routed ones.
  bool are_experts_together() const {
    PlanShape shape = routed_shape();
    shape.shared = held_.at("ffn.shared_experts.w1").format;
    for (const char* matrix : {"w3", "w2"}) {
      if (held_.at(std::string("ffn.shared_experts.") + matrix).format != *shape.shared) return false;
    }
    return held_.at("ffn.shared_experts.w1").rows == shape.experts.inner &&
           are_launched_together(shape, load_.rows(), t_);
  }
  void shared_with_routed() {
    PlanShape shape = routed_shape();
    const double alone = estimate(our_kernels(shape, load_.rows(), t_), t_, true).us;
    shape.shared = held_.at("ffn.shared_experts.w1").format;
    const Estimate both = estimate(our_kernels(shape, load_.rows(), t_), t_, true);
    CostPart& p = part(kSharedPart);
    p.us += both.us - alone;
    p.bound = both.limit.name;
    const auto values = 3 * static_cast<double>(shape.experts.hidden * shape.experts.inner);
    need(kSharedPart, weight_bytes(*shape.shared, values), 2 * rows() * values,
         *shape.shared == ops::WeightFormat::kNvfp4);
  }

  void routed() {
    const bool is_by_id = are_experts_by_id();
    const PlanShape shape = routed_shape();
    const Held& w1 = held_.at("ffn.experts.0.w1");
    const int64_t n = load_.rows();
    const bool is_nvfp4 = w1.format == ops::WeightFormat::kNvfp4;
    const double touched = expert_load(shape, n, 1).touched;
    // All ranks wait for the one that has most to do.
    double fullest = 1;
    if (is_by_id && touched > 0) {
      const double share = touched / static_cast<double>(shape.experts.num_local);
      const double deviation = std::sqrt(touched * (1 - share));
      fullest = std::min(static_cast<double>(shape.experts.num_local), touched + largest_of(plan_.world) * deviation) /
                touched;
    }
    add("routed experts", is_nvfp4 ? our_kernels(shape, n, t_) : portable_kernels(shape, n, t_), fullest);
    need("routed experts",
         weight_bytes(w1.format, 3.0 * static_cast<double>(c_.hidden_size * w1.rows)) * touched * fullest,
         shape_flops(shape, n), is_nvfp4);
  }

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
  void gather_logits(int64_t own) {
    const auto calls = static_cast<double>(ceil_div(load_.rows(), model::VocabularyHead::kGatheredRows));
    const double bytes = 4 * rows() * static_cast<double>(own), all = bytes * static_cast<double>(plan_.world);
    exchange(others(bytes), nccl_us() * calls, t_.link.low, kLogitsPart);
    if (load_.rows() > 1) part(kLogitsPart).us += us(pass(all, all));
  }

  // `bytes` of every rank to every other, by NCCL.
  void gather(double bytes) {
    exchange(others(bytes), nccl_us() * pieces(bytes * static_cast<double>(plan_.world)), t_.link.low);
  }
  // The sum over ranks of `count` values, into BF16: through peer memory, where the GPUs reach each other's and it has
  // room (comm/peer.h); else by NCCL (comm/nccl.h). `saved`: launches, of a sum made where streams are written.
  void sum(double count, DType in, int saved = 0) {
    const int64_t worth = saved > 0 ? comm::peer_fused_bytes(saved) : comm::kPeerShotBytes;
    const auto world = static_cast<int>(plan_.world);
    const comm::PeerOptions peers;
    const comm::PeerPlan plan = peers.plan(world, in, DType::kBF16, static_cast<int64_t>(count), worth);
    if (t_.peer_rate.low > 0 && world <= device::kMaxPeers && plan.slots <= peers.capacity(world)) {
      // To each of the others side by side.
      const double rate = std::min(others(t_.peer_rate.low), t_.link.low);
      const bool is_of_few = saved > 0 && plan.num_shots() == 1 && rows() <= kMostSumOfFew;
      const double shot_us = is_of_few ? std::min(kSumOfFew, t_.peer_sum.low) : t_.peer_sum.low;
      return exchange(static_cast<double>(plan.sent_bytes(world)), plan.num_shots() * shot_us, rate);
    }
    const double in_bytes = count * static_cast<double>(dtype_bits(in)) / 8, out_bytes = 2 * count;
    if (in_bytes < static_cast<double>(comm::kNcclShareBytes)) {
      gather(in_bytes);
      part(kSumsPart).us += us(pass(in_bytes * world, out_bytes));
    } else {
      scatter(count, in);
      exchange(others(out_bytes / world), nccl_us(), t_.link.low);
    }
  }
  // The sum over ranks of each one's share of `count` values, by NCCL.
  void scatter(double count, DType in) {
    const auto world = static_cast<double>(plan_.world);
    const double in_bytes = count * static_cast<double>(dtype_bits(in)) / 8, out_bytes = 2 * count;
    exchange(others(in_bytes / world), nccl_us() * pieces(in_bytes), t_.link.low);
    part(kSumsPart).us += us(pass(in_bytes, out_bytes / world));
  }

  // Of the entries that each token attends, those on other ranks; of a prompt they are copied once
  // (model/cache_pool.h, near_entries()).
  void read_from_others(double keys, int64_t ratio) {
    double entries = head_rows() * std::max(keys - static_cast<double>(c_.sliding_window), 0.0);
    if (load_.tokens > 1) {
      const double of_prompts = static_cast<double>(load_.sequences * (load_.position + load_.tokens) / ratio);
      entries = std::min(entries, of_prompts);
    }
    const double bytes =
        entries * static_cast<double>(ops::kv_entry_layout({}, c_.head_dim, c_.rope_dim).entry_bytes());
    exchange(others(bytes / static_cast<double>(plan_.world)), kReadFromPeer,
             std::min(others(t_.peer_rate.low), t_.link.low), "attention");
  }

  void exchange(double received, double begin_us, double gigabytes, const char* name = kSumsPart) {
    CostPart& p = part(name);
    const double link_us = received / (gigabytes * 1e3);
    p.us += begin_us + link_us;
    p.received_bytes += received;
    p.limit_us += received / (t_.link.low * 1e3);
    p.bound = link_us > begin_us ? "link" : "collectives";
  }

  static constexpr int64_t kScratchBytes = comm::NcclOptions{}.scratch_bytes;
  const model::Config& c_;
  const ParallelPlan& plan_;
  const Target& t_;
  StepLoad load_;
  std::map<std::string, Held> held_;
  std::vector<CostPart> parts_;
  std::vector<double> longest_;  // of each part, its longest kernel
};

template <class Value>
double sum_of(const std::vector<CostPart>& parts, Value CostPart::*value) {
  double sum = 0;
  for (const CostPart& part : parts) sum += part.*value;
  return sum;
}

}  // namespace

double LayerCost::us() const {
  return sum_of(parts, &CostPart::us);
}

double LayerCost::limit_us() const {
  return sum_of(parts, &CostPart::limit_us);
}

double StepCost::us() const {
  return sum_of(parts(), &CostPart::us);
}

double StepCost::limit_us() const {
  return sum_of(parts(), &CostPart::limit_us);
}

std::vector<CostPart> StepCost::parts() const {
  std::vector<CostPart> all;
  std::vector<double> longest;  // whose bound stands for the part
  for (const LayerCost& layer : layers) {
    const auto count = static_cast<double>(layer.count);
    for (const CostPart& part : layer.parts) {
      auto at = std::find_if(all.begin(), all.end(), [&](const CostPart& p) { return p.name == part.name; });
      if (at == all.end()) {
        at = all.emplace(at);
        at->name = part.name;
        longest.push_back(0);
      }
      at->us += count * part.us, at->limit_us += count * part.limit_us;
      at->bytes += count * part.bytes, at->flops += count * part.flops;
      at->received_bytes += count * part.received_bytes;
      double& most = longest[static_cast<size_t>(at - all.begin())];
      if (count * part.us > most || at->bound.empty()) most = count * part.us, at->bound = part.bound;
    }
  }
  return all;
}

LayerCost layer_cost(const model::StoredModel& model, const ParallelPlan& plan, const Target& target,
                     const StepLoad& load, int64_t layer) {
  const int64_t ratio = model.config.compress_ratios[static_cast<size_t>(layer)];
  Layer costs(model, plan, target, load, fmt::format("layers.{}.", layer));
  costs.attention(ratio);
  costs.experts();
  costs.sums(ratio);
  return {ratio == 0 ? "window" : fmt::format("ratio {}", ratio), 1, costs.take()};
}

StepCost step_cost(const model::StoredModel& model, const ParallelPlan& plan, const Target& target,
                   const StepLoad& load) {
  StepCost step;
  std::map<int64_t, size_t> kinds;  // by ratio, where in `step`
  for (int64_t layer = 0; layer < model.config.num_layers; ++layer) {
    const auto [at, is_new] =
        kinds.try_emplace(model.config.compress_ratios[static_cast<size_t>(layer)], step.layers.size());
    if (is_new) {
      step.layers.push_back(layer_cost(model, plan, target, load, layer));
    } else {
      ++step.layers[at->second].count;
    }
  }
  Layer ends(model, plan, target, load, "");
  ends.ends();
  step.layers.push_back({"embedding, head, drawing", 1, ends.take()});
  return step;
}

}  // namespace tessera::bench
