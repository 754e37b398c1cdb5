// SPDX-License-Identifier: Apache-2.0
// What ranks exchange in a step: sums, gathers, entries of others.
#include "bench/plan/step_layer.h"

#include <algorithm>
#include <cmath>

#include "base/integer_math.h"
#include "comm/peer.h"
#include "model/layers/vocabulary_head.h"
#include "ops/cache_entry.h"

namespace tessera::bench {

namespace {

// A sum over ranks in the first of them: 0.4 us on the GPU (2026-11-29-h200-row-types), 1 over the link, a guess from
// steps of two ranks and of one on other cards; of so many tokens at most (have_room_to_wait, on 132 multiprocessors).
constexpr double kSumOfFew = 1.4, kMostSumOfFew = 32;
// For each rank beyond two: 5.9 and 7.0 us add the two of Pro on eight, 3.5 and 4.2 of Flash on two, 4.6 and 3.6 the
// same products without ranks (2026-11-29-h200-two-formats.json).
constexpr double kSumOfRank = 0.2;
constexpr double kReadFromPeer = 3;  // us that attention waits longer for entries on other GPUs

}  // namespace

void StepLayer::sums(int64_t ratio) {
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

double StepLayer::gathered_bytes(int64_t ratio) const {
  const auto values = [&](const char* name) { return static_cast<double>(held_.at(name).rows); };
  double bytes = 2 * values("attn.wkv");
  if (ratio != 0) bytes += 8 * values("attn.compressor.wkv");
  if (ratio == 4) bytes += 8 * values("attn.indexer.compressor.wkv");
  return bytes;
}

void StepLayer::gather_logits(int64_t own) {
  const auto calls = static_cast<double>(ceil_div(load_.rows(), model::VocabularyHead::kGatheredRows));
  const double bytes = 4 * rows() * static_cast<double>(own), all = bytes * static_cast<double>(plan_.world);
  exchange(others(bytes), nccl_us() * calls, t_.link.low, kLogitsPart);
  if (load_.rows() > 1) part(kLogitsPart).us += us(pass(all, all));
}

void StepLayer::gather(double bytes) {
  exchange(others(bytes), nccl_us() * pieces(bytes * static_cast<double>(plan_.world)), t_.link.low);
}

void StepLayer::sum(double count, DType in, int saved) {
  const int64_t worth = saved > 0 ? comm::peer_fused_bytes(saved) : comm::kPeerShotBytes;
  const auto world = static_cast<int>(plan_.world);
  const comm::PeerOptions peers;
  const comm::PeerPlan plan = peers.plan(world, in, DType::kBF16, static_cast<int64_t>(count), worth);
  if (t_.peer_rate.low > 0 && world <= device::kMaxPeers && plan.slots <= peers.capacity(world)) {
    // To each of the others side by side.
    const double rate = std::min(others(t_.peer_rate.low), t_.link.low);
    const bool is_of_few = saved > 0 && plan.num_shots() == 1 && rows() <= kMostSumOfFew;
    const double few_us = kSumOfFew + kSumOfRank * static_cast<double>(plan_.world - 2);
    const double shot_us = is_of_few ? std::min(few_us, t_.peer_sum.low) : t_.peer_sum.low;
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

void StepLayer::scatter(double count, DType in) {
  const auto world = static_cast<double>(plan_.world);
  const double in_bytes = count * static_cast<double>(dtype_bits(in)) / 8, out_bytes = 2 * count;
  exchange(others(in_bytes / world), nccl_us() * pieces(in_bytes), t_.link.low);
  part(kSumsPart).us += us(pass(in_bytes, out_bytes / world));
}

void StepLayer::read_from_others(double keys, int64_t ratio) {
  double entries = head_rows() * std::max(keys - static_cast<double>(c_.sliding_window), 0.0);
  if (load_.tokens > 1) {
    const double of_prompts = static_cast<double>(load_.sequences * (load_.position + load_.tokens) / ratio);
    entries = std::min(entries, of_prompts);
  }
  const double bytes = entries * static_cast<double>(ops::kv_entry_layout({}, c_.head_dim, c_.rope_dim).entry_bytes());
  exchange(others(bytes / static_cast<double>(plan_.world)), kReadFromPeer,
           std::min(others(t_.peer_rate.low), t_.link.low), "attention");
}

void StepLayer::exchange(double received, double begin_us, double gigabytes, const char* name) {
  CostPart& p = part(name);
  const double link_us = received / (gigabytes * 1e3);
  p.us += begin_us + link_us;
  p.received_bytes += received;
  p.limit_us += received / (t_.link.low * 1e3);
  p.bound = link_us > begin_us ? "link" : "collectives";
}

}  // namespace tessera::bench
