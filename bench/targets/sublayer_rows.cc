// SPDX-License-Identifier: Apache-2.0
// The whole of a layer's experts, from their input to their sum.
#include <array>
#include <cmath>
#include <memory>

#include "bench/targets/target_rows.h"

namespace tessera::bench {

namespace {

using ops::WeightFormat;

// Inputs of different runs, so that each is routed to other experts.
constexpr int64_t kInputs = 16;

struct Ops {
  ops::Bound<ops::Linear> gate, w1, w3, w2;
  ops::Bound<ops::Router> router;
  ops::Bound<ops::MoeExperts> experts;
  ops::Bound<ops::SwiGlu> swiglu;
  ops::Bound<ops::LinearGroup> gated;  // may be unbound
  ops::Bound<ops::MoeCombine> combine;

  Ops(ops::Planner& planner, const model::Config& c) {
    const int64_t hidden = c.hidden_size, inner = c.expert_inner, top_k = c.experts_per_token;
    const float limit = static_cast<float>(c.swiglu_limit);
    const auto map = [&](const char* where, WeightFormat format, int64_t out, int64_t in, DType output) {
      return planner.bind<ops::Linear>(where, {.in = in, .out = out, .format = format, .output = output});
    };
    gate = map("gate", WeightFormat::kBf16, c.num_experts, hidden, DType::kF32);
    w1 = map("shared w1", WeightFormat::kFp8Block, inner, hidden, DType::kBF16), w3 = w1;
    w2 = map("shared w2", WeightFormat::kFp8Block, hidden, inner, DType::kBF16);
    router = planner.bind<ops::Router>(
        "router",
        {.num_experts = c.num_experts, .top_k = top_k, .scaling = static_cast<float>(c.routed_scaling_factor)});
    experts = planner.bind<ops::MoeExperts>("experts", {.hidden = hidden,
                                                        .inner = inner,
                                                        .num_local = c.num_experts,
                                                        .top_k = top_k,
                                                        .format = WeightFormat::kNvfp4,
                                                        .swiglu_limit = limit});
    swiglu = planner.bind<ops::SwiGlu>("swiglu", {.inner = inner, .limit = limit});
    const ops::Chosen parts[] = {w1.chosen(), swiglu.chosen()};
    gated = planner.bind_fused<ops::LinearGroup>("gated", {.maps = {w1.desc, w3.desc}, .swiglu = swiglu.desc}, parts);
    combine = planner.bind<ops::MoeCombine>("combine", {.hidden = hidden, .top_k = top_k});
  }
  int64_t workspace_bytes(int64_t tokens) const {
    int64_t most = gated.is_bound() ? gated.workspace_bytes(tokens) : 0;
    for (const auto* map : {&gate, &w1, &w2}) most = std::max(most, map->workspace_bytes(tokens));
    return std::max(most, experts.workspace_bytes(tokens));
  }
};

struct Operands {
  device::Tensor x, logits, routed, gate, up, shared, out;
  Placed<float> bias, weights;
  Placed<int32_t> ids;
  Placed<ops::WeightView> w1, w3, w2;
  device::Buffer workspace;
};

std::shared_ptr<Operands> operands(OpBench& bench, const Ops& all, const model::Config& c, int64_t tokens) {
  const int64_t hidden = c.hidden_size, inner = c.expert_inner, top_k = c.experts_per_token;
  auto o = std::make_shared<Operands>();
  o->x = bench.activations(kInputs * tokens, hidden);
  o->logits = bench.zeros(DType::kF32, {tokens, c.num_experts});
  o->routed = bench.zeros(DType::kBF16, {tokens, top_k, hidden});
  o->gate = bench.zeros(DType::kBF16, {tokens, inner}), o->up = bench.zeros(DType::kBF16, {tokens, inner});
  o->shared = bench.zeros(DType::kBF16, {tokens, hidden}), o->out = bench.zeros(DType::kBF16, {tokens, hidden});
  o->bias = bench.place(bench.floats(c.num_experts, 0.05f));
  o->weights = bench.place(std::vector<float>(static_cast<size_t>(tokens * top_k)));
  o->ids = bench.place(std::vector<int32_t>(static_cast<size_t>(tokens * top_k)));
  std::vector<ops::WeightView> w1, w3, w2;
  for (int64_t e = 0; e < c.num_experts; ++e) {
    w1.push_back(bench.pool().weight(WeightFormat::kNvfp4, inner, hidden, 3 * e));
    w3.push_back(bench.pool().weight(WeightFormat::kNvfp4, inner, hidden, 3 * e + 1));
    w2.push_back(bench.pool().weight(WeightFormat::kNvfp4, hidden, inner, 3 * e + 2));
  }
  o->w1 = bench.place(w1), o->w3 = bench.place(w3), o->w2 = bench.place(w2);
  o->workspace = device::Buffer(static_cast<size_t>(all.workspace_bytes(tokens)), bench.memory());
  return o;
}

void run(OpBench& bench, const Ops& all, const Operands& o, const model::Config& c, int64_t tokens, int64_t at) {
  device::Queue& queue = bench.queue();
  void* const workspace = o.workspace.data();
  const auto weight = [&](const ops::Bound<ops::Linear>& map, int64_t index) {
    return bench.pool().weight(map.desc.format, map.desc.out, map.desc.in, index);
  };
  TensorView x = o.x.view();
  x.data = static_cast<char*>(x.data) + at / 2 % kInputs * tokens * c.hidden_size * 2;
  x.shape = {tokens, c.hidden_size};
  all.gate.run({.x = x, .weight = weight(all.gate, at), .y = o.logits, .num_tokens = tokens, .workspace = workspace},
               queue);
  all.router.run({.logits = o.logits.as<float>(),
                  .bias = o.bias.data(),
                  .experts = o.ids.data(),
                  .weights = o.weights.data(),
                  .num_tokens = tokens},
                 queue);
  all.experts.run({.x = x,
                   .experts = o.ids.data(),
                   .routing = o.weights.data(),
                   .w1 = o.w1.data(),
                   .w3 = o.w3.data(),
                   .w2 = o.w2.data(),
                   .out = o.routed,
                   .num_tokens = tokens,
                   .workspace = workspace},
                  queue);
  const ops::LinearGroup::Args gated{.x = x,
                                     .weights = {weight(all.w1, 3 * at), weight(all.w3, 3 * at + 1)},
                                     .y = {o.gate.view(), o.up.view()},
                                     .num_tokens = tokens,
                                     .workspace = workspace};
  if (all.gated.is_bound()) {
    all.gated.run(gated, queue);
  } else {
    all.w1.run(ops::linear_of_group(gated, 0), queue), all.w3.run(ops::linear_of_group(gated, 1), queue);
    all.swiglu.run(ops::swiglu_of_group(gated), queue);
  }
  all.w2.run(
      {.x = o.gate, .weight = weight(all.w2, 3 * at + 2), .y = o.shared, .num_tokens = tokens, .workspace = workspace},
      queue);
  all.combine.run({.routed = o.routed, .shared = o.shared, .out = o.out, .num_tokens = tokens}, queue);
}

}  // namespace

void sublayer_rows(OpBench& bench, const std::string& name, const model::Config& c, const TokenCounts& token_counts) {
  const auto all = std::make_shared<Ops>(bench.planner(), c);
  const auto bytes_of = [](WeightFormat format, int64_t out, int64_t in) {
    const ops::WeightView view{format, out, in};
    return view.data_bytes() + view.scale_bytes();
  };
  const int64_t top_k = c.experts_per_token, hidden = c.hidden_size, inner = c.expert_inner;
  const int64_t dense =
      bytes_of(WeightFormat::kBf16, c.num_experts, hidden) + 3 * bytes_of(WeightFormat::kFp8Block, inner, hidden);
  for (const int64_t tokens : token_counts) {
    // Of routing without preference, the experts that are expected to be hit.
    const double missed = std::pow(1 - static_cast<double>(top_k) / static_cast<double>(c.num_experts), tokens);
    const double hit = static_cast<double>(c.num_experts) * (1 - missed);
    const auto expert_bytes =
        static_cast<int64_t>(hit * static_cast<double>(3 * bytes_of(WeightFormat::kNvfp4, inner, hidden)));
    const int64_t operand_bytes =
        all->workspace_bytes(tokens) + tokens * ((kInputs + top_k + 2) * hidden + 2 * inner) * 2;
    bench.row(name + " with router, shared expert and combine", all->experts.variant->name, tokens, operand_bytes,
              [&]() -> OpBench::Case {
                const auto o = operands(bench, *all, c, tokens);
                return {{.tokens = tokens,
                         .bytes = dense + expert_bytes,
                         .flops = 2 * tokens * hidden * (3 * inner * (top_k + 1) + c.num_experts),
                         .residence = Residence::kMemory},
                        [=, &bench](int64_t at) { run(bench, *all, *o, c, tokens, at); }};
              });
  }
}

}  // namespace tessera::bench
