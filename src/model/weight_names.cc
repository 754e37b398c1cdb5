// SPDX-License-Identifier: Apache-2.0
#include "model/weight_names.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <utility>

namespace tessera::model {

namespace {

using Pair = std::pair<std::string_view, std::string_view>;

constexpr std::array kTopLevel = {
    Pair{"embed", "model.embed_tokens"},           Pair{"head", "lm_head"},
    Pair{"norm.weight", "model.norm.weight"},      Pair{"hc_head_fn", "model.hc_head.hc_fn"},
    Pair{"hc_head_base", "model.hc_head.hc_base"}, Pair{"hc_head_scale", "model.hc_head.hc_scale"},
};

// Behind "layers.N." and "model.layers.N.".
constexpr std::array kInLayer = {
    Pair{"attn_norm.weight", "input_layernorm.weight"},
    Pair{"ffn_norm.weight", "post_attention_layernorm.weight"},
    Pair{"hc_attn_fn", "attn_hc.fn"},
    Pair{"hc_attn_base", "attn_hc.base"},
    Pair{"hc_attn_scale", "attn_hc.scale"},
    Pair{"hc_ffn_fn", "ffn_hc.fn"},
    Pair{"hc_ffn_base", "ffn_hc.base"},
    Pair{"hc_ffn_scale", "ffn_hc.scale"},
    Pair{"attn.attn_sink", "self_attn.sinks"},
    Pair{"attn.wq_a", "self_attn.q_a_proj"},
    Pair{"attn.q_norm.weight", "self_attn.q_a_norm.weight"},
    Pair{"attn.wq_b", "self_attn.q_b_proj"},
    Pair{"attn.wkv", "self_attn.kv_proj"},
    Pair{"attn.kv_norm.weight", "self_attn.kv_norm.weight"},
    Pair{"attn.wo_a", "self_attn.o_a_proj"},
    Pair{"attn.wo_b", "self_attn.o_b_proj"},
    Pair{"attn.compressor.wkv", "self_attn.compressor.kv_proj"},
    Pair{"attn.compressor.wgate", "self_attn.compressor.gate_proj"},
    Pair{"attn.compressor.ape", "self_attn.compressor.position_bias"},
    Pair{"attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"},
    Pair{"attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"},
    Pair{"attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"},
    Pair{"attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"},
    Pair{"attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"},
    Pair{"attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"},
    Pair{"attn.indexer.compressor.norm.weight", "self_attn.compressor.indexer.kv_norm.weight"},
    Pair{"ffn.gate", "mlp.gate"},
    Pair{"ffn.gate.bias", "mlp.gate.e_score_correction_bias"},
    Pair{"ffn.gate.tid2eid", "mlp.gate.tid2eid"},
    Pair{"ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"},
    Pair{"ffn.shared_experts.w2", "mlp.shared_experts.down_proj"},
    Pair{"ffn.shared_experts.w3", "mlp.shared_experts.up_proj"},
};

// Other spellings in use.
constexpr std::array kInLayerOther = {
    Pair{"attn.indexer.wq_b", "self_attn.indexer.q_b_proj"},
    Pair{"attn.indexer.weights_proj", "self_attn.indexer.weights_proj"},
    Pair{"attn.indexer.weights_proj", "self_attn.compressor.indexer.weights_proj"},
    Pair{"attn.indexer.compressor.wkv", "self_attn.indexer.compressor.kv_proj"},
    Pair{"attn.indexer.compressor.wgate", "self_attn.indexer.compressor.gate_proj"},
    Pair{"attn.indexer.compressor.ape", "self_attn.indexer.compressor.position_bias"},
    Pair{"attn.indexer.compressor.norm.weight", "self_attn.indexer.compressor.kv_norm.weight"},
};

constexpr std::array kExpert = {Pair{"w1", "gate_proj"}, Pair{"w2", "down_proj"}, Pair{"w3", "up_proj"}};

template <size_t N>
std::string_view find(const std::array<Pair, N>& table, std::string_view key) {
  for (const Pair& pair : table) {
    if (pair.first == key) return pair.second;
  }
  return {};
}

// "PREFIX" + number + "." + rest; false where `name` is not of that form.
bool split_number(std::string_view name, std::string_view prefix, int64_t& number, std::string_view& rest) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  const size_t digits = static_cast<size_t>(end - name.data());
  if (error != std::errc() || digits >= name.size() || name[digits] != '.') return false;
  rest = name.substr(digits + 1);
  return true;
}

}  // namespace

std::string hf_name(std::string_view official) {
  int64_t layer = 0, expert = 0;
  std::string_view rest, matrix;
  if (!split_number(official, "layers.", layer, rest)) return std::string(find(kTopLevel, official));
  if (split_number(rest, "ffn.experts.", expert, matrix)) {
    const std::string_view name = find(kExpert, matrix);
    return name.empty() ? "" : fmt::format("model.layers.{}.mlp.experts.{}.{}", layer, expert, name);
  }
  const std::string_view name = find(kInLayer, rest);
  return name.empty() ? "" : fmt::format("model.layers.{}.{}", layer, name);
}

std::vector<std::string> hf_names(std::string_view official) {
  std::vector<std::string> names;
  if (std::string current = hf_name(official); !current.empty()) names.push_back(std::move(current));
  int64_t layer = 0;
  std::string_view rest;
  if (!split_number(official, "layers.", layer, rest)) return names;
  for (const Pair& pair : kInLayerOther) {
    if (pair.first == rest) names.push_back(fmt::format("model.layers.{}.{}", layer, pair.second));
  }
  return names;
}

FusedExpert hf_fused_expert(std::string_view official) {
  int64_t layer = 0, expert = 0;
  std::string_view rest, matrix;
  if (!split_number(official, "layers.", layer, rest) || !split_number(rest, "ffn.experts.", expert, matrix)) return {};
  const std::string prefix = fmt::format("model.layers.{}.mlp.experts.", layer);
  if (matrix == "w2") return {prefix + "down_proj", expert, 0, 1};
  return {prefix + "gate_up_proj", expert, matrix == "w3" ? 1 : 0, 2};
}

}  // namespace tessera::model
