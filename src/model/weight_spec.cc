// SPDX-License-Identifier: Apache-2.0
#include "model/weight_spec.h"

#include <fmt/format.h>

#include "base/error.h"

namespace tessera::model {

namespace {

class Table {
 public:
  explicit Table(const Config& config) : c_(config) {}
  std::vector<WeightRow> take() { return std::move(rows_); }

  void linear(const std::string& name, int64_t out, int64_t in, ShardRule shard = ShardRule::kReplicate) {
    rows_.push_back({name, {out, in}, WeightKind::kLinear, shard, "linear", -1});
  }
  void plain(const std::string& name, int64_t out, int64_t in, const char* consumer = "linear") {
    rows_.push_back({name, {out, in}, WeightKind::kPlain, ShardRule::kReplicate, consumer, -1});
  }
  void vector(const std::string& name, const Shape& shape, const char* consumer,
              ShardRule shard = ShardRule::kReplicate) {
    rows_.push_back({name, shape, WeightKind::kVector, shard, consumer, -1});
  }

  void mixer(const std::string& prefix, int64_t rows, int64_t scales) {
    vector(prefix + "_fn", {rows, 4 * c_.hidden_size}, "mhc_pre");
    vector(prefix + "_base", {rows}, "mhc_pre");
    vector(prefix + "_scale", {scales}, "mhc_pre");
  }

  void compressor(const std::string& prefix, int64_t ratio, int64_t width) {
    const int64_t wide = ratio == 4 ? 2 * width : width;
    linear(prefix + "wkv", wide, c_.hidden_size);
    linear(prefix + "wgate", wide, c_.hidden_size);
    vector(prefix + "ape", {ratio, wide}, "compressor_pool");
    vector(prefix + "norm.weight", {width}, "rms_norm");
  }

  void attention(const std::string& a, int64_t ratio) {
    const int64_t d = c_.hidden_size, low = c_.o_groups * c_.o_lora_rank;
    linear(a + "wq_a", c_.q_lora_rank, d);
    vector(a + "q_norm.weight", {c_.q_lora_rank}, "rms_norm");
    linear(a + "wq_b", c_.num_heads * c_.head_dim, c_.q_lora_rank, ShardRule::kRowsByHead);
    linear(a + "wkv", c_.head_dim, d);
    vector(a + "kv_norm.weight", {c_.head_dim}, "rms_norm");
    vector(a + "attn_sink", {c_.num_heads}, "attention", ShardRule::kRowsByHead);
    linear(a + "wo_a", low, c_.group_width(), ShardRule::kRowsByGroup);
    linear(a + "wo_b", d, low, ShardRule::kColsByGroup);
    if (ratio != 0) compressor(a + "compressor.", ratio, c_.head_dim);
    if (ratio == 4) {
      linear(a + "indexer.wq_b", c_.index_num_heads * c_.index_head_dim, c_.q_lora_rank);
      linear(a + "indexer.weights_proj", c_.index_num_heads, d);
      compressor(a + "indexer.compressor.", ratio, c_.index_head_dim);
    }
  }

  void expert(const std::string& prefix, int64_t id) {
    const char* consumer = id < 0 ? "linear" : "moe_experts";
    for (const char* name : {"w1", "w2", "w3"}) {
      const bool is_down = name[1] == '2';
      const Shape shape = is_down ? Shape{c_.hidden_size, c_.expert_inner} : Shape{c_.expert_inner, c_.hidden_size};
      const ShardRule shard = is_down ? ShardRule::kExpertCols : ShardRule::kExpertRows;
      rows_.push_back({prefix + name, shape, WeightKind::kLinear, shard, consumer, id});
    }
  }

  void layer(const std::string& p, int64_t ratio, bool is_hashed) {
    mixer(p + "hc_attn", 24, 3);
    mixer(p + "hc_ffn", 24, 3);
    vector(p + "attn_norm.weight", {c_.hidden_size}, "rms_norm");
    vector(p + "ffn_norm.weight", {c_.hidden_size}, "rms_norm");
    attention(p + "attn.", ratio);
    plain(p + "ffn.gate", c_.num_experts, c_.hidden_size);
    if (is_hashed) {
      rows_.push_back({p + "ffn.gate.tid2eid",
                       {c_.vocab_size, c_.experts_per_token},
                       WeightKind::kTable,
                       ShardRule::kReplicate,
                       "router",
                       -1});
    } else {
      vector(p + "ffn.gate.bias", {c_.num_experts}, "router");
    }
    for (int64_t e = 0; e < c_.num_experts; ++e) expert(fmt::format("{}ffn.experts.{}.", p, e), e);
    expert(p + "ffn.shared_experts.", -1);
  }

  void head(const std::string& p) {
    mixer(p + "hc_head", 4, 1);
    vector(p + "norm.weight", {c_.hidden_size}, "rms_norm");
  }

 private:
  const Config& c_;
  std::vector<WeightRow> rows_;
};

}  // namespace

std::vector<WeightRow> make_weight_spec(const Config& config, int64_t num_draft_layers) {
  Table table(config);
  const int64_t d = config.hidden_size;
  table.plain("embed", config.vocab_size, d, "embedding");
  table.linear("head", config.vocab_size, d, ShardRule::kRowsByToken);
  table.head("");
  for (int64_t n = 0; n < config.num_layers; ++n) {
    table.layer(fmt::format("layers.{}.", n), config.compress_ratios[static_cast<size_t>(n)], config.is_hashed(n));
  }
  for (int64_t n = 0; n < num_draft_layers; ++n) {
    const std::string p = fmt::format("mtp.{}.", n);
    table.layer(p, 0, false);
    table.head(p);
    table.linear(p + "e_proj", d, d);
    table.linear(p + "h_proj", d, d);
    table.vector(p + "enorm.weight", {d}, "rms_norm");
    table.vector(p + "hnorm.weight", {d}, "rms_norm");
  }
  return table.take();
}

WeightSlice slice_of(const WeightRow& row, const Config& config, const Shard& shard) {
  WeightSlice slice{0, row.shape[0], 0, row.shape.rank() > 1 ? row.shape[1] : 1};
  const auto cut = [&](int64_t units, const char* what, int64_t& begin, int64_t& end) {
    if (units % shard.world != 0) {
      fail(ErrorCode::kUnsupported,
           fmt::format("{}: {} {} can't be cut over {} ranks", row.name, units, what, shard.world));
    }
    const int64_t size = end - begin;
    begin = size / units * (units / shard.world * shard.rank);
    end = begin + size / shard.world;
  };
  const bool cuts_heads = shard.attention == AttentionSplit::kByGroup;
  const auto cut_expert = [&](int64_t& begin, int64_t& end) {
    if (shard.experts == ExpertSplit::kByWidth) return cut(config.expert_inner, "channels", begin, end);
    if (row.expert < 0) return;
    int64_t first = 0, past = config.num_experts;
    cut(config.num_experts, "experts", first, past);
    if (row.expert < first || row.expert >= past) slice.row_end = 0;
  };
  switch (row.shard) {
    case ShardRule::kReplicate:
      break;
    case ShardRule::kRowsByHead:
      if (cuts_heads) cut(config.num_heads, "heads", slice.row_begin, slice.row_end);
      break;
    case ShardRule::kRowsByGroup:
      if (cuts_heads) cut(config.o_groups, "output groups", slice.row_begin, slice.row_end);
      break;
    case ShardRule::kColsByGroup:
      if (cuts_heads) cut(config.o_groups, "output groups", slice.col_begin, slice.col_end);
      break;
    case ShardRule::kExpertRows:
      cut_expert(slice.row_begin, slice.row_end);
      break;
    case ShardRule::kExpertCols:
      cut_expert(slice.col_begin, slice.col_end);
      break;
    case ShardRule::kRowsByToken:
      if (config.vocab_size % (shard.world * row.scale_rows) == 0) {
        cut(config.vocab_size, "tokens", slice.row_begin, slice.row_end);
      }
      break;
  }
  return slice;
}

Shard with_whole_attention(Shard shard) {
  shard.attention = AttentionSplit::kWhole;
  shard.keeps_all_heads = false;
  return shard;
}

std::vector<Shard> held_shards(const WeightRow& row, const Shard& shard) {
  std::vector<Shard> held{shard};
  if (!shard.keeps_all_heads || shard.attention != AttentionSplit::kByGroup || shard.world == 1) return held;
  if (row.name.starts_with("mtp.")) return held;  // a draft block's steps are whole
  if (row.shard == ShardRule::kRowsByHead || row.shard == ShardRule::kRowsByGroup) {
    held.push_back(with_whole_attention(shard));
  } else if (row.shard == ShardRule::kColsByGroup) {
    for (int64_t rank = 0; rank < shard.world; ++rank) {
      if (rank != shard.rank) held.push_back(shard), held.back().rank = rank;
    }
  }
  return held;
}

}  // namespace tessera::model
