// SPDX-License-Identifier: Apache-2.0
#include "model/layers/moe_layer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace tessera::model {

namespace {

std::string name_of(const std::string& prefix, int64_t expert, const char* matrix) {
  return fmt::format("{}experts.{}.{}", prefix, expert, matrix);
}

// The routed experts that this rank has of a layer.
ops::MoeExperts::Desc experts_of(const Config& c, const ModelWeights& weights, const ops::Precision& precision,
                                 const std::string& prefix) {
  const Shard& shard = weights.shard();
  const bool is_by_id = shard.experts == ExpertSplit::kById;
  const int64_t num_local = is_by_id ? c.num_experts / shard.world : c.num_experts;
  const int64_t first = is_by_id ? num_local * shard.rank : 0;
  const ops::WeightFormat format = weights.format(name_of(prefix, first, "w1"));
  return {.hidden = c.hidden_size,
          .inner = weights.local_shape(name_of(prefix, first, "w1"))[0],
          .first_expert = first,
          .num_local = num_local,
          .num_experts = c.num_experts,
          .top_k = c.experts_per_token,
          .format = format,
          .input = resolve_input(precision.input, format, InputRole::kQuantised),
          .swiglu_limit = static_cast<float>(c.swiglu_limit),
          .activation = precision.activation()};
}

}  // namespace

uint64_t expert_padding(ops::Planner& planner, const Config& config, const ModelWeights& weights,
                        const ops::Precision& precision, const std::string& prefix) try {
  const ops::MoeExperts::Desc desc = experts_of(config, weights, precision, prefix);
  const ops::PackedLayout* layout = planner.bind<ops::MoeExperts>(prefix + "experts", desc).packed_layout();
  if (layout == nullptr) return 0;
  int64_t padding = 0;
  for (const char* matrix : {"w1", "w2", "w3"}) {
    const Shape shape = weights.local_shape(name_of(prefix, desc.first_expert, matrix));
    const ops::WeightView view{desc.format, shape[0], shape[1]};
    const int64_t packed = layout->data_bytes(view) + layout->scale_bytes(view);
    padding += desc.num_local * std::max<int64_t>(0, packed - view.data_bytes() - view.scale_bytes());
  }
  return static_cast<uint64_t>(padding);
} catch (const Error& error) {
  if (error.code() != ErrorCode::kUnsupported) throw;
  return 0;
}

MoeLayer::MoeLayer(LayerBuilder& builder, const std::string& prefix, bool is_hashed, const Bypass& bypass)
    : prefix_(prefix), bypass_(bypass) {
  const Config& c = builder.config;
  const DType activation = builder.activation();
  const float limit = static_cast<float>(c.swiglu_limit);
  gate_ = LinearLayer(builder, prefix + "gate", InputRole::kPlain, DType::kF32);
  if (is_hashed) {
    table_ = builder.weights.load_table(prefix + "gate.tid2eid");
  } else {
    bias_ = builder.weights.load_vector(prefix + "gate.bias");
  }
  router_ = builder.bind<ops::Router>(prefix + "router", {.num_experts = c.num_experts,
                                                          .top_k = c.experts_per_token,
                                                          .is_hashed = is_hashed,
                                                          .is_normalized = c.norm_topk_prob,
                                                          .scaling = static_cast<float>(c.routed_scaling_factor)});
  const bool is_by_id = builder.weights.shard().experts == ExpertSplit::kById;
  slot_sum_ = RankSum(builder, is_by_id), output_sum_ = RankSum(builder, !is_by_id);
  load_experts(builder);
  shared_w1_ = LinearLayer(builder, prefix + "shared_experts.w1", InputRole::kQuantised, activation);
  shared_w2_ = LinearLayer(builder, prefix + "shared_experts.w2", InputRole::kQuantised, activation);
  shared_w3_ = LinearLayer(builder, prefix + "shared_experts.w3", InputRole::kQuantised, activation);
  swiglu_ = builder.bind<ops::SwiGlu>(prefix + "shared_experts.swiglu",
                                      {.inner = shared_w1_.out_features(), .limit = limit, .activation = activation});
  const ops::Bound<ops::Linear>&gate = shared_w1_.op(), &up = shared_w3_.op();
  if (gate.chosen() == up.chosen()) {
    shared_gated_ = builder.bind_fused<ops::LinearGroup>(prefix + "shared_experts.gated",
                                                         {.maps = {gate.desc, up.desc}, .swiglu = swiglu_.desc},
                                                         {gate.chosen(), swiglu_.chosen()});
    const ops::Bound<ops::Linear>& down = shared_w2_.op();
    const bool are_alike = experts_.chosen() == gate.chosen() && down.chosen() == gate.chosen();
    if (are_alike && !bypass_.routed_experts && !bypass_.shared_experts) {
      all_experts_ = builder.bind_fused<ops::AllExperts>(
          prefix + "all_experts", {experts_.desc, {.maps = {gate.desc, up.desc}, .swiglu = swiglu_.desc}, down.desc},
          {experts_.chosen(), gate.chosen(), up.chosen(), swiglu_.chosen(), down.chosen()});
    }
  }
  combine_ = builder.bind<ops::MoeCombine>(
      prefix + "combine", {.hidden = c.hidden_size, .top_k = c.experts_per_token, .activation = activation});
}

void MoeLayer::load_experts(LayerBuilder& builder) {
  const ops::MoeExperts::Desc desc = experts_of(builder.config, builder.weights, builder.precision, prefix_);
  const int64_t first = desc.first_expert, num_local = desc.num_local;
  const auto name = [&](int64_t e, const char* matrix) { return name_of(prefix_, e, matrix); };
  for (int64_t e = first; e < first + num_local; ++e) {
    for (const char* matrix : {"w1", "w2", "w3"}) {
      if (builder.weights.format(name(e, matrix)) != desc.format) {
        fail(ErrorCode::kUnsupported,
             fmt::format("tensor {}: stored as {}, other experts of the layer as {}", name(e, matrix),
                         to_string(builder.weights.format(name(e, matrix))), to_string(desc.format)));
      }
    }
  }
  experts_ = builder.bind<ops::MoeExperts>(prefix_ + "experts", desc);
  const ops::PackedLayout* layout = experts_.packed_layout();
  matrices_.reserve(static_cast<size_t>(3 * num_local));
  std::vector<ops::WeightView> w1, w2, w3;
  for (int64_t e = first; e < first + num_local; ++e) {
    const auto load = [&](const char* matrix) {
      matrices_.push_back(builder.weights.load_matrix(name(e, matrix), layout));
      return matrices_.back().view;
    };
    w1.push_back(load("w1"));
    w2.push_back(load("w2"));
    w3.push_back(load("w3"));
  }
  const auto place = [&](const std::vector<ops::WeightView>& views) {
    device::Buffer placed(views.size() * sizeof(ops::WeightView), builder.memory);
    builder.memory.upload(placed.data(), views.data(), placed.size());
    return placed;
  };
  w1_ = place(w1), w2_ = place(w2), w3_ = place(w3);
}

void MoeLayer::run_shared(const StepContext& context, const ops::LinearGroup::Args& gated,
                          const ops::Linear::Args& down) const {
  const int64_t n = gated.num_tokens;
  if (shared_gated_.is_bound() && context.tracer == nullptr) {
    shared_gated_.run(gated, context.queue);
  } else {
    shared_w1_.run_into(context, gated.x, gated.y[0], n);
    shared_w3_.run_into(context, gated.x, gated.y[1], n);
    swiglu_.run(ops::swiglu_of_group(gated), context.queue);
    context.trace(prefix_, "shared_experts.swiglu", gated.y[0]);
  }
  shared_w2_.run_into(context, down.x, down.y, n);
}

ops::MoeCombine::Args MoeLayer::run(const StepContext& context, const TensorView& x, const TensorView& out) const {
  const int64_t n = context.num_tokens(), k = router_.desc.top_k;
  const TensorView logits = gate_.run(context, x, n);
  const TensorView ids = context.take(DType::kI32, {n, k});
  const TensorView weights = context.take(DType::kF32, {n, k});
  // Between what wrote x and the experts, which read it early (ops/all_experts).
  router_.run({.logits = logits.as<float>(),
               .bias = bias_.as<float>(),
               .table = table_.as<int32_t>(),
               .token_ids = context.batch.token_ids(),
               .experts = ids.as<int32_t>(),
               .weights = weights.as<float>(),
               .num_tokens = n},
              context.queue);
  context.trace(prefix_, "expert_ids", ids);
  context.trace(prefix_, "expert_weights", weights);

  ops::MoeExperts::Args routed{.x = x,
                               .experts = ids.as<int32_t>(),
                               .routing = weights.as<float>(),
                               .w1 = w1_.as<ops::WeightView>(),
                               .w3 = w3_.as<ops::WeightView>(),
                               .w2 = w2_.as<ops::WeightView>(),
                               .num_tokens = n,
                               .workspace = context.workspace};
  ops::LinearGroup::Args gated{
      .x = x, .weights = {shared_w1_.weight(), shared_w3_.weight()}, .num_tokens = n, .workspace = context.workspace};
  ops::Linear::Args down{.weight = shared_w2_.weight(), .num_tokens = n, .workspace = context.workspace};
  if (!bypass_.routed_experts) routed.out = context.take(context.activation, {n, k, experts_.desc.hidden});
  if (!bypass_.shared_experts) {
    gated.y = {shared_w1_.take_output(context, n), shared_w3_.take_output(context, n)};
    down.x = gated.y[0], down.y = shared_w2_.take_output(context, n);
  }
  const bool are_fused = all_experts_.is_bound() && context.tracer == nullptr;
  if (are_fused) {
    all_experts_.run({.routed = routed, .gated = gated, .down = down, .num_tokens = n, .workspace = context.workspace},
                     context.queue);
  }
  if (!bypass_.routed_experts) {
    if (!are_fused) experts_.run(routed, context.queue);
    // One summand of each slot is not zero: every rank gets the bits of the one that has the expert, and combines them
    // in the order of experts, as one rank does.
    if (slot_sum_.is_needed()) slot_sum_.run(context, routed.out, routed.out);
    context.trace(prefix_, "experts", routed.out);
  }
  if (!bypass_.shared_experts && !are_fused) run_shared(context, gated, down);
  return {.routed = routed.out, .shared = down.y, .out = out, .num_tokens = n};
}

}  // namespace tessera::model
