// SPDX-License-Identifier: Apache-2.0
#include "bench/shapes/published.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::bench {

namespace {

struct Sizes {
  std::string_view name;
  int64_t vocab, hidden, layers, heads, head_dim, q_rank, o_groups, o_rank, window, index_heads, index_topk, experts,
      top_k, inner, hashed, num_first, first_ratio;
  double scaling;
};

constexpr Sizes kSizes[] = {
    {"flash", 129280, 4096, 43, 64, 512, 1024, 8, 1024, 128, 64, 512, 256, 6, 2048, 3, 2, 0, 1.5},
    {"pro", 129280, 7168, 61, 128, 512, 1536, 16, 1024, 128, 64, 1024, 384, 6, 3072, 3, 2, 128, 2.5},
    {"small", 512, 256, 5, 8, 128, 128, 2, 128, 32, 16, 16, 16, 3, 128, 1, 1, 0, 1.5},
};

}  // namespace

model::Config published_config(std::string_view name) {
  const auto* const found =
      std::find_if(std::begin(kSizes), std::end(kSizes), [&](const Sizes& s) { return s.name == name; });
  if (found == std::end(kSizes)) {
    fail(ErrorCode::kInvalidArgument, fmt::format("expected flash, pro or small, found \"{}\"", printable(name, 60)));
  }
  const Sizes& s = *found;
  model::Config c;
  c.vocab_size = s.vocab, c.hidden_size = s.hidden, c.num_layers = s.layers;
  c.num_heads = s.heads, c.head_dim = s.head_dim, c.rope_dim = 64;
  c.q_lora_rank = s.q_rank, c.o_groups = s.o_groups, c.o_lora_rank = s.o_rank, c.sliding_window = s.window;
  c.index_num_heads = s.index_heads, c.index_head_dim = 128, c.index_topk = s.index_topk;
  c.num_experts = s.experts, c.experts_per_token = s.top_k, c.expert_inner = s.inner, c.num_hash_layers = s.hashed;
  c.routed_scaling_factor = s.scaling, c.swiglu_limit = 10;
  c.rope_theta = 10000, c.compress_rope_theta = 160000;
  c.max_positions = int64_t{1} << 20;
  c.bos_id = 0, c.eos_ids = {1};
  // The first layers have a window only (Flash) or all tokens heavily compressed (Pro); then 4 and 128 by turns.
  for (int64_t n = 0; n < s.layers; ++n) {
    const bool is_first = n < s.num_first;
    c.compress_ratios.push_back(is_first ? s.first_ratio : (n - s.num_first) % 2 == 0 ? 4 : 128);
  }
  return c;
}

model::Config with_layers(const model::Config& config, int64_t num_layers) {
  if (num_layers < 1 || num_layers > config.num_layers) {
    fail(ErrorCode::kInvalidArgument, fmt::format("layers: expected 1 to {}, found {}", config.num_layers, num_layers));
  }
  if (num_layers == config.num_layers) return config;
  model::Config cut = config;
  const bool has_plain =
      std::find(config.compress_ratios.begin(), config.compress_ratios.end(), 0) != config.compress_ratios.end();
  cut.num_layers = num_layers;
  cut.num_hash_layers = num_layers >= 2 ? 1 : 0;
  cut.compress_ratios.clear();
  if (has_plain && num_layers >= 4) cut.compress_ratios.push_back(0);
  for (int64_t ratio = 4; static_cast<int64_t>(cut.compress_ratios.size()) < num_layers; ratio = ratio == 4 ? 128 : 4) {
    cut.compress_ratios.push_back(ratio);
  }
  return cut;
}

}  // namespace tessera::bench
