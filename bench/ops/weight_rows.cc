// SPDX-License-Identifier: Apache-2.0
// Linear maps and routed experts: what reads weights.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "base/integer_math.h"
#include "bench/ops/op_bench.h"

namespace tessera::bench {

namespace {

using ops::WeightFormat;
using enum WeightFormat;

// Ids [tokens, top_k]: token t's experts follow Zipf's law with exponent 1, or all experts alike. Adds the number of
// different ones to `distinct`.
std::vector<int32_t> choose(Rng& rng, int64_t num, int64_t top_k, int64_t tokens, bool is_skewed, int64_t& distinct) {
  std::vector<double> cumulative(static_cast<size_t>(num));
  double total = 0;
  for (int64_t e = 0; e < num; ++e) {
    total += is_skewed ? 1.0 / static_cast<double>(e + 1) : 1.0;
    cumulative[static_cast<size_t>(e)] = total;
  }
  std::vector<int32_t> ids;
  std::vector<char> seen(static_cast<size_t>(num));
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> mine;
    while (static_cast<int64_t>(mine.size()) < top_k) {
      const double at = static_cast<double>(rng.uniform()) * total;
      const auto id =
          static_cast<int32_t>(std::upper_bound(cumulative.begin(), cumulative.end() - 1, at) - cumulative.begin());
      if (std::find(mine.begin(), mine.end(), id) == mine.end()) mine.push_back(id);
    }
    std::sort(mine.begin(), mine.end());
    for (const int32_t id : mine) {
      distinct += seen[static_cast<size_t>(id)] == 0 ? 1 : 0;
      seen[static_cast<size_t>(id)] = 1;
      ids.push_back(id);
    }
  }
  return ids;
}

struct ExpertOperands {
  device::Tensor x, out;
  std::vector<Placed<int32_t>> choices;  // different ones in every run, so that the experts read are not in cache
  Placed<float> routing;
  Placed<ops::WeightView> w1, w3, w2;
};

struct GroupedOperands {
  device::Tensor x, out;
  std::vector<Placed<int32_t>> sizes;  // different ones in every run
  Placed<ops::WeightView> weights;
  device::Buffer workspace;
  int64_t num_rows = 0;
};

constexpr int64_t kChoices = 16;

// One matrix of every expert, [out, in].
void grouped_map_rows(OpBench& bench, const std::string& name, const model::Config& c,
                      const ops::GroupedLinear::Desc& desc, const TokenCounts& token_counts) {
  const int64_t groups = desc.num_groups, top_k = c.experts_per_token;
  const bool is_masked = desc.layout == ops::RowLayout::kMasked;
  // Inputs, as they are arranged too, and outputs; masked: room for some rows more in every group.
  const int64_t row_bytes = 2 * desc.in * 2 + desc.out * 2;
  const OpBench::Footprint footprint{.fixed = groups * 16 * row_bytes,
                                     .per_token = top_k * row_bytes * (is_masked ? 2 : 1)};
  bench.rows<ops::GroupedLinear>(
      name, desc, footprint, token_counts, [&](const auto& op, int64_t tokens, void*) -> OpBench::Case {
        std::vector<std::vector<int32_t>> counts;
        int64_t distinct = 0, most = 0;
        for (int64_t i = 0; i < kChoices; ++i) {
          std::vector<int32_t>& of_run = counts.emplace_back(static_cast<size_t>(groups));
          for (const int32_t e : choose(bench.rng(), groups, top_k, tokens, false, distinct)) {
            most = std::max<int64_t>(most, ++of_run[static_cast<size_t>(e)]);
          }
        }
        const auto o = std::make_shared<GroupedOperands>();
        o->num_rows = is_masked ? groups * most : tokens * top_k;
        for (std::vector<int32_t>& sizes : counts) {
          if (!is_masked) {
            sizes.insert(sizes.begin(), 0);
            std::partial_sum(sizes.begin(), sizes.end(), sizes.begin());
          }
          o->sizes.push_back(bench.place(sizes));
        }
        o->x = bench.activations(o->num_rows, desc.in);
        o->out = bench.zeros(DType::kBF16, {o->num_rows, desc.out});
        o->workspace = device::Buffer(static_cast<size_t>(op.workspace_bytes(o->num_rows)), bench.memory());
        std::vector<ops::WeightView> weights;
        for (int64_t e = 0; e < groups; ++e) weights.push_back(bench.pool().weight(kNvfp4, desc.out, desc.in, e));
        o->weights = bench.place(weights);
        return {{.tokens = tokens,
                 .bytes = (weights[0].data_bytes() + weights[0].scale_bytes()) * distinct / kChoices,
                 .flops = 2 * tokens * top_k * desc.in * desc.out,
                 .residence = Residence::kMemory},
                [=, &bench](int64_t run) {
                  op.run({.x = o->x,
                          .sizes = o->sizes[static_cast<size_t>(run / 2 % kChoices)].data(),
                          .weights = o->weights.data(),
                          .out = o->out,
                          .num_rows = o->num_rows,
                          .expected_rows = ceil_div(tokens * top_k, groups),
                          .workspace = o->workspace.data()},
                         bench.queue());
                }};
      });
}

}  // namespace

void linear_rows(OpBench& bench, const MapShape& map, const TokenCounts& token_counts) {
  const WeightFormat format = map.format;
  const int64_t out = map.out, in = map.in, groups = map.groups;
  const DType output = map.output;
  const Way way = map.way;
  const ops::InputMode mode = format == kNvfp4 ? bench.options().mode : ops::InputMode::kA16;
  const ops::Linear::Desc desc{
      .in = in, .out = out, .groups = groups, .format = format, .input = mode, .output = output};
  const OpBench::Footprint footprint{.per_token = groups * (in * 2 + out * 4)};
  bench.rows<ops::Linear>(
      map.name, desc, footprint, token_counts, [&](const auto& op, int64_t tokens, void* workspace) -> OpBench::Case {
        const auto x = std::make_shared<device::Tensor>(bench.activations(tokens, groups * in));
        const auto y = std::make_shared<device::Tensor>(bench.zeros(output, {tokens, groups * out}));
        const ops::WeightView shape = bench.pool().weight(format, groups * out, in, 0);
        return {{.tokens = tokens,
                 .bytes = shape.data_bytes() + shape.scale_bytes(),
                 .flops = 2 * tokens * in * out * groups,
                 .residence = Residence::kMemory,
                 .way = way},
                [=, &bench](int64_t run) {
                  op.run({.x = *x,
                          .weight = bench.pool().weight(format, groups * out, in, run),
                          .y = *y,
                          .num_tokens = tokens,
                          .workspace = workspace},
                         bench.queue());
                }};
      });
}

void expert_rows(OpBench& bench, const std::string& name, const model::Config& c, bool is_skewed,
                 const TokenCounts& token_counts) {
  const int64_t top_k = c.experts_per_token, hidden = c.hidden_size, inner = c.expert_inner;
  const ops::MoeExperts::Desc desc{.hidden = hidden,
                                   .inner = inner,
                                   .num_local = c.num_experts,
                                   .top_k = top_k,
                                   .format = kNvfp4,
                                   .input = bench.options().mode,
                                   .swiglu_limit = static_cast<float>(c.swiglu_limit)};
  const OpBench::Footprint footprint{.per_token = (1 + top_k) * hidden * 2 + top_k * 8 * (kChoices + 1)};
  bench.rows<ops::MoeExperts>(
      name + (is_skewed ? " zipf" : ""), desc, footprint, token_counts,
      [&](const auto& op, int64_t tokens, void* workspace) -> OpBench::Case {
        const auto o = std::make_shared<ExpertOperands>();
        o->x = bench.activations(tokens, hidden);
        o->out = bench.zeros(DType::kBF16, {tokens, top_k, hidden});
        o->routing = bench.place(std::vector<float>(static_cast<size_t>(tokens * top_k), 0.25f));
        int64_t distinct = 0;
        for (int64_t i = 0; i < kChoices; ++i) {
          o->choices.push_back(bench.place(choose(bench.rng(), c.num_experts, top_k, tokens, is_skewed, distinct)));
        }
        std::vector<ops::WeightView> w1, w3, w2;
        for (int64_t e = 0; e < c.num_experts; ++e) {
          w1.push_back(bench.pool().weight(kNvfp4, inner, hidden, 3 * e));
          w3.push_back(bench.pool().weight(kNvfp4, inner, hidden, 3 * e + 1));
          w2.push_back(bench.pool().weight(kNvfp4, hidden, inner, 3 * e + 2));
        }
        o->w1 = bench.place(w1), o->w3 = bench.place(w3), o->w2 = bench.place(w2);
        const int64_t bytes = 3 * (w1[0].data_bytes() + w1[0].scale_bytes()) * distinct / kChoices;
        return {{.tokens = tokens,
                 .bytes = bytes,
                 .flops = 6 * tokens * top_k * hidden * inner,
                 .residence = Residence::kMemory},
                [=, &bench](int64_t run) {
                  op.run({.x = o->x,
                          .experts = o->choices[static_cast<size_t>(run / 2 % kChoices)].data(),
                          .routing = o->routing.data(),
                          .w1 = o->w1.data(),
                          .w3 = o->w3.data(),
                          .w2 = o->w2.data(),
                          .out = o->out,
                          .num_tokens = tokens,
                          .workspace = workspace},
                         bench.queue());
                }};
      });
}

void grouped_rows(OpBench& bench, const std::string& name, const model::Config& c, ops::RowLayout layout,
                  const TokenCounts& token_counts) {
  ops::GroupedLinear::Desc desc{.in = c.hidden_size,
                                .out = c.expert_inner,
                                .num_groups = c.num_experts,
                                .layout = layout,
                                .input = bench.options().mode};
  grouped_map_rows(bench, name + " w1", c, desc, token_counts);
  std::swap(desc.in, desc.out);
  grouped_map_rows(bench, name + " w2", c, desc, token_counts);
}

void bench_weights(OpBench& bench, const std::string& name, const model::Config& c) {
  const int64_t d = c.hidden_size, low = c.o_groups * c.o_lora_rank;
  const auto map = [&](const char* what, WeightFormat format, int64_t out, int64_t in, DType output = DType::kBF16,
                       int64_t groups = 1) {
    linear_rows(bench, {name + " " + what, format, out, in, output, groups}, bench.options().tokens);
  };
  map("wq_a", kNvfp4, c.q_lora_rank, d);
  map("wq_b", kNvfp4, c.num_heads * c.head_dim, c.q_lora_rank);
  map("wkv", kNvfp4, c.head_dim, d);
  map("wo_a", kNvfp4, c.o_lora_rank, c.group_width(), DType::kBF16, c.o_groups);
  map("wo_a", kFp8Block, c.o_lora_rank, c.group_width(), DType::kBF16, c.o_groups);
  map("wo_b", kNvfp4, d, low);
  map("wo_b", kFp8Block, d, low);
  map("wo_b", kBf16, d, low);
  map("shared w1", kNvfp4, c.expert_inner, d);
  map("shared w2", kNvfp4, d, c.expert_inner);
  map("shared w2", kFp8Block, d, c.expert_inner);
  map("indexer wq_b", kFp8Block, c.index_num_heads * c.index_head_dim, c.q_lora_rank);
  map("compressor wkv", kBf16, 2 * c.head_dim, d, DType::kF32);
  map("gate", kBf16, c.num_experts, d, DType::kF32);
  map("gate", kF32, c.num_experts, d, DType::kF32);
  // A quarter of it, which is far larger than any cache.
  map("head/4", kBf16, c.vocab_size / 4, d, DType::kF32);
  expert_rows(bench, name, c, false, bench.options().tokens);
  expert_rows(bench, name, c, true, bench.options().tokens);
  for (const ops::RowLayout layout : {ops::RowLayout::kContiguous, ops::RowLayout::kMasked}) {
    grouped_rows(bench, name, c, layout, bench.options().tokens);
  }
}

}  // namespace tessera::bench
