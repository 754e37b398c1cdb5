// SPDX-License-Identifier: Apache-2.0
// What a layer's attention costs: its maps, its caches, the choice of entries, and attending them.
#include "bench/plan/step_layer.h"

#include <algorithm>
#include <cmath>

#include "base/integer_math.h"
#include "ops/cache_entry.h"

namespace tessera::bench {

namespace {

constexpr double kPortablePart = 27'450;  // 15 us: attention, 128 keys for 16 heads (13 to 17 in what was measured)
constexpr double kClusterPart = 6'700;    // 3.7 us: the same by a cluster of four (5.6 to 5.7 of Flash on two, of Pro
                                          // on eight, less launch and first bytes; 2026-11-29-h200-two-formats.json)
constexpr double kWidePart = 20'100;      // 11 us: attention of sm90, 128 keys for 64 heads
constexpr double kPoolEnd = 1'300;        // 0.7 of 2.7 us that pools and the query's norm add (the same record)
constexpr double kScoreRate = 765;        // FLOP: index scores, 185 TFLOP/s of 132 multiprocessors
constexpr double kWideScoreRate = 2'180;  // the same of sm90, 528 TFLOP/s
// Of a choice its rounds, and each score: 8,192 in 7.8 us, 16,384 in 11.0, though 10,240 in 6.9
// (2026-11-29-h200-choices.json).
constexpr double kChoiceCycles = 3'300, kSelectCycles = 0.9;
constexpr double kHeldChoice = 16'896, kMostChoiceParts = 1024;  // scores of a block, parts (backends/cuda/top_k.cu)
// Up to kFewRows tokens attention is the portable kernel's on Hopper too where it has so many thread blocks at most, or
// clusters of four.
constexpr int64_t kFewBlocks = 132, kFewClusters = 48;
constexpr int64_t kMostSpread = 44;  // tokens' groups of 64 heads whose parts Hopper's own kernel spreads
constexpr int64_t kPartKeys = 128;

}  // namespace

void StepLayer::attention(int64_t ratio) {
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
  add("norms, rotations, caches", {pass(2 * q, 2 * q, kSmallEnd)});
  if (ratio == 0) add("norms, rotations, caches", {pass(0, 0, kSmallEnd)});  // others' is in the launch of their pools
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

void StepLayer::compress(int64_t ratio) {
  const double width = static_cast<double>(ratio == 4 ? 2 * c_.head_dim : c_.head_dim);
  const double index_width = ratio == 4 ? static_cast<double>(2 * c_.index_head_dim) : 0;
  add("compressed entries", {pass(8 * rows() * (width + index_width), 0, kPoolEnd)});
  if (ratio != 4) return;
  // Scores of all entries of each sequence, read once, and the choice among them.
  const double entries = index_entries(), tokens = is_choice_cut() ? own_rows() : head_rows();
  const double flops = 2 * tokens * entries * static_cast<double>(c_.index_num_heads * c_.index_head_dim);
  const double bytes = static_cast<double>(load_.sequences) * entries *
                       static_cast<double>(ops::index_entry_layout({}, c_.index_head_dim).entry_bytes());
  add("index scores, choice",
      {work(flops / (t_.family == Family::kHopper ? kWideScoreRate : kScoreRate), bytes, kSmallEnd)});
  choose(tokens, entries);
  need("index scores, choice", bytes, flops, true);
}

void StepLayer::choose(double tokens, double entries) {
  const auto one = [&](double tiles, double scores) {
    Kernel kernel = pass(0, 0);
    kernel.tiles = static_cast<int64_t>(std::ceil(tiles));
    kernel.tiles_at_once = 3, kernel.issue_cycles = kChoiceCycles + kSelectCycles * scores;
    add("index scores, choice", {kernel});
  };
  const double k = static_cast<double>(c_.index_topk), part = std::sqrt(entries * k);
  const double parts = std::min(entries / part, kMostChoiceParts / tokens);
  const double fewest = entries <= kHeldChoice * parts ? 2 : 3;
  if (entries <= kHeldChoice || parts < fewest) return one(tokens, entries);
  one(tokens * parts, entries / parts);
  one(tokens, parts * k);
}

StepLayer::Sight StepLayer::sight_at(double position, int64_t ratio) const {
  const auto parts_of = [](double keys) { return std::ceil(keys / static_cast<double>(kPartKeys)); };
  const double window = std::min(position, static_cast<double>(c_.sliding_window));
  double entries = ratio == 0 ? 0 : position / static_cast<double>(ratio);
  if (ratio == 4) entries = std::min(entries, static_cast<double>(c_.index_topk));
  return {window + entries, parts_of(window) + parts_of(entries)};
}

StepLayer::Sight StepLayer::mean_sight(int64_t ratio) const {
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

void StepLayer::attend(int64_t ratio) {
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
  // Its output is rotated where parts are merged, or by a kernel of its own.
  const double rotated = 4 * head_rows() * heads * static_cast<double>(c_.rope_dim);
  add("attention", {is_spread ? pass(0, 0) : pass(0, rotated)});
  need("attention", bytes, 4 * head_rows() * heads * static_cast<double>(c_.head_dim) * keys, false);
}

}  // namespace tessera::bench
